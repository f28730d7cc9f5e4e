//! Who keeps the job in the world of layer 1: the specification, or a set of scripts.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher as _};
use std::rc::Rc;

use crate::calls::{arguments, words};
use crate::host::{Host, Stored};
use crate::model::Model;
use crate::mutants;
use crate::support::Call;
use crate::view::{View, of_model, of_record};

/// One or the other.
#[derive(Clone, Debug)]
pub enum Keeper {
    Specification(Model),
    /// The scripts with a planted bug, by its place; without one if `None`.
    Scripts {
        mutant: Option<usize>,
        stored: Stored,
        now_ms: u64,
    },
}

/// A master or a replica, and what it says of the job.
#[derive(Clone, Debug)]
pub struct Redis {
    keeper: Keeper,
    pub view: Option<View>,
    /// What `view` is by, as seen from now.
    pub key: u64,
}

thread_local! {
    static HOSTS: RefCell<HashMap<Option<usize>, Rc<Host>>> = RefCell::default();
}

fn host(mutant: Option<usize>) -> Rc<Host> {
    HOSTS.with_borrow_mut(|hosts| Rc::clone(hosts.entry(mutant).or_insert_with(|| Rc::new(mutants::host(mutant)))))
}

impl Redis {
    /// An empty one that keeps what the specification says.
    pub fn specification() -> Self {
        Redis { keeper: Keeper::Specification(Model::new()), view: None, key: 0 }
    }

    /// An empty one with scripts.
    pub fn scripts(mutant: Option<usize>) -> Self {
        let now_ms = Model::new().now_ms;
        Redis { keeper: Keeper::Scripts { mutant, stored: Stored::default(), now_ms }, view: None, key: 0 }
    }

    /// Lets time pass.
    pub fn age(&mut self, by_ms: u64) {
        match &mut self.keeper {
            Keeper::Specification(model) => model.age(by_ms),
            Keeper::Scripts { stored, now_ms, .. } => {
                *now_ms += by_ms;
                stored.expire(*now_ms);
            }
        }
        self.look();
    }

    /// Answers a call, in the specification's words; `error …` for a script that ended with one.
    pub fn answer(&mut self, call: &Call) -> String {
        let answer = match &mut self.keeper {
            Keeper::Specification(model) => model.answer(call),
            Keeper::Scripts { mutant, stored, now_ms } => {
                match host(*mutant).run(call.script(), &arguments(call), stored, *now_ms, 0) {
                    Ok(reply) => words(call, &reply),
                    Err(error) => format!("error {error}"),
                }
            }
        };
        self.look();
        answer
    }

    fn look(&mut self) {
        let now_ms = match &self.keeper {
            Keeper::Specification(model) => {
                self.view = of_model(model);
                model.now_ms
            }
            Keeper::Scripts { stored, now_ms, .. } => {
                let read = |packed| of_record(packed, stored.expires_ms).expect("a record that can be read");
                self.view = stored.packed.as_deref().map(read);
                *now_ms
            }
        };
        let mut hasher = DefaultHasher::new();
        if let Some(view) = &self.view {
            view.hash_as_seen(now_ms, &mut hasher);
            self.key = hasher.finish();
        } else {
            self.key = 0;
        }
    }
}
