//! The masters as they were checked: those of the start, and whichever joins a cluster or is named by sentinels later.
//!
//! One that a start would have refused is refused by the canary: a gateway is not ready while it is there. What comes to it meanwhile
//! is served, as it would be by a server that was made so after the start.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::StoreError;
use crate::metrics;
use crate::store::Store;

#[derive(Default)]
pub(super) struct Masters(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// Those that a start would take, by their addresses, and whether they may evict.
    sound: BTreeMap<Option<Arc<str>>, bool>,
    /// What is wrong with another.
    unsound: Option<StoreError>,
}

impl Masters {
    pub(super) fn is_sound(&self, address: Option<&str>, evicts: bool) {
        let mut known = self.known();
        known.sound.insert(address.map(Arc::from), evicts);
        known.tell();
    }

    /// # Errors
    /// What is wrong with one of them, as far as was seen last.
    pub(super) fn all_sound(&self) -> Result<(), StoreError> {
        self.known().unsound.clone().map_or(Ok(()), Err)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn tell(&self) {
        metrics::eviction_allowed(u8::from(self.sound.values().any(|evicts| *evicts)));
    }
}

impl Store {
    /// Checks the masters that have not been found sound yet. One that does not answer is looked at the next time.
    ///
    /// # Errors
    /// `Fatal` with what a start would say of one of them.
    pub(crate) async fn check_newcomers(&self) -> Result<(), StoreError> {
        let masters = self.inner.nodes.addresses();
        let newcomers: Vec<_> = {
            let known = self.inner.masters.known();
            masters.iter().filter(|(_, address)| !known.sound.contains_key(address)).cloned().collect()
        };
        let (mut sound, mut unsound) = (Vec::new(), None);
        for (master, address) in newcomers {
            let Ok(facts) = self.facts_of(&master, address.as_deref()).await else { continue };
            let mut warnings = Vec::new();
            match self.check_facts(&facts, &mut warnings) {
                Ok(evicts) => sound.push((address, evicts)),
                Err(error) => unsound = unsound.or(Some(error)),
            }
            for warning in warnings {
                tracing::warn!(warning, "a master has joined");
            }
        }
        let mut known = self.inner.masters.known();
        // One that comes back may be another server.
        known.sound.retain(|address, _| masters.iter().any(|(_, present)| present == address));
        known.sound.extend(sound);
        known.unsound.clone_from(&unsound);
        known.tell();
        unsound.map_or(Ok(()), Err)
    }
}
