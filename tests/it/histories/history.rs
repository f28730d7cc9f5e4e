//! How the calls of one job, as their workers saw them, and what the wires delivered become a history.

use std::collections::HashMap;

use onejob::store::Script;

use super::check::{Event, Outcome};
use super::frames;
use super::told::Act;
use super::wire::{Delivery, Fate};
use crate::support::{Answer, Call};

/// One call as its worker saw it.
pub struct Made {
    pub worker: usize,
    pub call: Call,
    pub called: u64,
    pub at: u64,
    pub came: Came,
}

/// What a worker was told.
pub enum Came {
    Told {
        words: String,
        answer: Box<Answer>,
    },
    /// It was not executed, says the store.
    Refused(String),
    /// It may have been executed.
    Unknown,
}

/// Calls that nobody can tell from each other on the wire.
#[derive(Default)]
struct Same<'a> {
    made: Vec<&'a Made>,
    deliveries: Vec<&'a Delivery>,
}

/// The calls of one job as a history.
#[derive(Default)]
pub struct Assembled {
    pub events: Vec<Event>,
    /// Calls that were not answered, and of which one reached Redis at least.
    pub unknown: usize,
    /// What the store said and the wire knows better.
    pub wrong: Vec<String>,
}

/// The history of the calls: what was answered, and, for every delivery that no answer belongs to, an operation of unknown outcome.
/// A store that makes the same call again makes one operation, of which the earlier deliveries may have been executed.
pub fn assemble(made: &[Made], deliveries: &[Delivery]) -> Assembled {
    let Assembled { mut events, mut unknown, mut wrong } = Assembled::default();
    type Name = (Option<usize>, &'static str, Vec<(usize, Vec<u8>)>);
    let shared = deliveries.iter().any(|delivery| delivery.who.is_none());
    let mut same: HashMap<Name, Same> = HashMap::new();
    for one in made {
        let who = Some(one.worker).filter(|_| !shared);
        same.entry((who, one.call.script(), frames::marks(&one.call))).or_default().made.push(one);
    }
    for delivery in deliveries {
        let fits = |(who, script, marks): &&Name| {
            *who == delivery.who
                && *script == delivery.script.name()
                && marks.iter().all(|(place, mark)| delivery.arguments[*place] == *mark)
        };
        match same.keys().find(fits).cloned() {
            Some(name) => same.get_mut(&name).expect("it was found").deliveries.push(delivery),
            None if delivery.script == Script::ReadJob => {}
            None => wrong.push(format!("nobody made the call {delivery:?}")),
        }
    }
    for Same { made, deliveries } in same.into_values() {
        let (mut answered, mut alone) = (0, 0);
        for one in &made {
            match &one.came {
                Came::Told { words, .. } => {
                    answered += 1;
                    let outcome = Outcome::Told { at: one.at, words: words.clone() };
                    events.push(Event { who: who(one), act: Act::Call(one.call.clone()), called: one.called, outcome });
                }
                // Where the same call was made again, it may have been the other one.
                Came::Refused(why) if made.len() == 1 => {
                    let within = |delivery: &&&Delivery| (one.called..one.at).contains(&delivery.at) && !delivery.copy;
                    if !shared && deliveries.iter().filter(within).any(|delivery| delivery.fate == Fate::Executed) {
                        wrong.push(format!("{} was executed, and refused: {why}", frames::name(&one.call)));
                    }
                }
                Came::Refused(_) => {}
                Came::Unknown => alone += 1,
            }
        }
        let maybe = |delivery: &&&Delivery| delivery.fate != Fate::Refused;
        let (copies, own): (Vec<&Delivery>, Vec<&Delivery>) =
            deliveries.iter().filter(maybe).copied().partition(|delivery| delivery.copy);
        // Which of them an answer belongs to is not known: the earliest of the others may be placed anywhere that any of them may be.
        let mut own: Vec<u64> = own.iter().map(|delivery| delivery.at).collect();
        own.sort_unstable();
        own.truncate(own.len().saturating_sub(answered));
        unknown += alone.min(own.len());
        for called in own.into_iter().chain(copies.iter().map(|delivery| delivery.at)) {
            let one = made[0];
            events.push(Event { who: who(one), act: Act::Call(one.call.clone()), called, outcome: Outcome::Unknown });
        }
    }
    // A read that nobody was answered says nothing.
    events.retain(|event| !(event.outcome == Outcome::Unknown && matches!(event.act, Act::Call(Call::Read { .. }))));
    Assembled { events, unknown, wrong }
}

fn who(made: &Made) -> String {
    format!("worker {}", made.worker)
}
