//! Whether a write would be durable now: tried at every master, by the way of those that must be, instead of counting replicas or
//! reading settings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::Value;

use crate::error::{StoreError, Want};
use crate::store::cluster::Before;
use crate::store::commit::{Durability, Durable};
use crate::store::nodes::Master;
use crate::store::{By, Store, StoreOptions, retry};

/// How old a try may be that somebody is answered with: however many ask, a lane that commits carries one a second for them.
const TRIED_AGE: Duration = Duration::from_secs(1);

/// What a try at one master brought.
#[derive(Clone, Debug)]
pub struct Tried {
    /// Which; `None` for the one server of a URL.
    pub node: Option<String>,
    /// Whether it was durable in time.
    pub outcome: Result<Durable, StoreError>,
}

/// The last try.
pub(super) type LastTry = tokio::sync::Mutex<Option<Known>>;

/// What a try brought, and when it began and ended.
pub(super) struct Known {
    began: Instant,
    ended: Instant,
    tried: Vec<Tried>,
}

impl Store {
    /// Tries at every master whether a write is as durable in time as [`StoreOptions::durability`] says. Nothing is left by it. None
    /// is tried at the level `memory`.
    pub(crate) async fn try_commits(&self) -> Vec<Tried> {
        let asked = Instant::now();
        let mut last = self.inner.tried.lock().await;
        // Whoever asked while it was tried waits no longer than whoever tried.
        if let Some(known) = &*last
            && (asked <= known.ended || asked.saturating_duration_since(known.began) < TRIED_AGE)
        {
            return known.tried.clone();
        }
        let began = Instant::now();
        let tried = self.try_each().await;
        *last = Some(Known { began, ended: Instant::now(), tried: tried.clone() });
        tried
    }

    /// The same, on connections of its own that stand for nothing else, also where a gateway would not start. For `doctor`.
    ///
    /// # Errors
    /// It cannot be reached.
    pub async fn try_durability(options: StoreOptions) -> Result<Vec<Tried>, StoreError> {
        let store = Store::open(options).await?;
        let tried = store.try_each().await;
        store.close().await;
        Ok(tried)
    }

    async fn try_each(&self) -> Vec<Tried> {
        let Some(commit) = &self.inner.commit else { return Vec::new() };
        let (within, durability) = (commit.batch(), self.durability());
        let addresses = self.inner.nodes.addresses();
        let tries = self.one_of_each_master().into_iter().map(|(master, number)| {
            let address = addresses.iter().find(|(known, _)| Some(known) == master.as_ref());
            let address = address.and_then(|(_, address)| address.clone());
            async move {
                let tried = tokio::time::timeout(within, self.try_one(&number)).await;
                // What the lane is at takes longer than the level allows.
                let outcome = tried.unwrap_or_else(|_| Ok(nothing_of(durability)));
                Tried { node: node(master, address), outcome }
            }
        });
        join_all(tries).await
    }

    async fn try_one(&self, number: &str) -> Result<Durable, StoreError> {
        let mut get = redis::cmd("GET");
        get.arg(self.inner.keys.canary(number));
        let (mut values, came) = self.inner.nodes.send_around(vec![get], 0, Before::Tried, By::Commit).await?;
        match values.swap_remove(0) {
            Value::ServerError(error) => Err(retry::of_server(&error)),
            _ => Ok(came.durable()),
        }
    }
}

fn node(master: Option<Master>, address: Option<Arc<str>>) -> Option<String> {
    match (address, master) {
        (Some(address), _) | (None, Some(Master::At(address))) => Some(address.to_string()),
        (None, Some(Master::Only) | None) => None,
    }
}

/// None has it, in the time that was given.
pub(super) fn nothing_of(durability: Durability) -> Durable {
    match durability {
        Durability::Memory => Durable::Yes,
        Durability::Fsync => Durable::Short { have: 0, want: Want::Disk },
        Durability::Replicated(replicas) => Durable::Short { have: 0, want: Want::Replicas(replicas) },
    }
}
