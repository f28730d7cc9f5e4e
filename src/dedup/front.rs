//! A front: ids that this process has been told of, so that the second click of a double click asks nobody.
//!
//! It can say of an id that it is a duplicate, never that it is the first. **An id is in it only from when Redis told this
//! process, for the first time, that it begins to remember the id (`First` of a check, `Committed` of a commit), and until half
//! a window after that was asked, at most.** So Redis, asked at that moment, would say duplicate too, unless it has lost what it
//! acknowledged. Nothing else makes an entry: neither `Duplicate`, whose id may be forgotten a moment later, nor what a batch is
//! told again, nor a claim.
//!
//! And only batches whose token nobody else can have are asked of it ([`Dedup::check_once`](super::Dedup::check_once)). Batches that
//! can be sent again are always Redis', which has their verdicts. The argument is `docs/adr/0039-a-front-only-says-duplicate.md`.

use std::collections::hash_map::RandomState;
use std::time::Duration;

use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{OptionsBuilder, UnitWeighter};

use crate::dedup::id::ClickId;
use crate::dedup::stream::{Stream, StreamError};
use crate::provider::boottime_ms;

/// Ids that one front knows: some 61 bytes each.
pub const FRONT_ENTRIES_MAX: usize = 10_000_000;

/// The part of the entries that is kept for those that were asked for. Few: what matters here is how recent one is.
const HOT_PART: f64 = 0.05;

/// How much a front knows, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Front {
    /// So many ids at most, 1 to [`FRONT_ENTRIES_MAX`]. Beyond, the older ones are asked about again.
    pub entries: usize,
    /// For so long, from a millisecond, and never longer than half of the stream's window: between two clocks that run at different
    /// speeds, or one that is set, the other half is room.
    pub ttl: Duration,
}

impl Default for Front {
    /// A minute, and a hundred thousand ids: about 6 MB.
    fn default() -> Self {
        Front { entries: 100_000, ttl: Duration::from_secs(60) }
    }
}

/// What is known here.
pub(crate) struct Known {
    /// Until when, by [`boottime_ms`].
    ids: Cache<ClickId, u64, UnitWeighter, RandomState>,
    ttl_ms: u64,
    #[cfg(test)]
    pub(crate) passed_ms: std::sync::atomic::AtomicU64,
}

impl Known {
    pub(crate) fn new(front: Front, stream: &Stream) -> Result<Self, StreamError> {
        let wrong = |what: String| Err(StreamError { name: stream.name.clone(), what });
        if front.entries == 0 || front.entries > FRONT_ENTRIES_MAX {
            return wrong(format!("a front has 1 to {FRONT_ENTRIES_MAX} entries, not {}", front.entries));
        }
        if front.ttl < Duration::from_millis(1) {
            return wrong(format!("a front's ttl is a millisecond or more, not {:?}", front.ttl));
        }
        let options = OptionsBuilder::new()
            .estimated_items_capacity(front.entries)
            .weight_capacity(front.entries as u64)
            .hot_allocation(HOT_PART)
            .ghost_allocation(0.0)
            .build()
            .expect("both capacities are set");
        Ok(Known {
            ids: Cache::with_options(options, UnitWeighter, RandomState::default(), DefaultLifecycle::default()),
            ttl_ms: u64::try_from(front.ttl.as_millis()).unwrap_or(u64::MAX).min(stream.window_ms() / 2),
            #[cfg(test)]
            passed_ms: Default::default(),
        })
    }

    /// Notes an id of which Redis said, when asked at a moment ([`Known::now_ms`]) or later, that it remembers it from then on.
    pub(crate) fn learn(&self, id: &ClickId, asked_ms: u64) {
        self.ids.insert(*id, asked_ms + self.ttl_ms);
    }

    /// Whether an id is a duplicate for certain.
    pub(crate) fn knows(&self, id: &ClickId) -> bool {
        let now_ms = self.now_ms();
        match self.ids.get(id) {
            Some(until_ms) if now_ms < until_ms => true,
            Some(_) => {
                // Learned again meanwhile it is lost, and costs a question.
                self.ids.remove(id);
                false
            }
            None => false,
        }
    }

    /// The moment, on the clock of its entries.
    #[cfg(not(test))]
    pub(crate) fn now_ms(&self) -> u64 {
        boottime_ms()
    }

    /// As if so much time had passed.
    #[cfg(test)]
    pub(crate) fn now_ms(&self) -> u64 {
        boottime_ms() + self.passed_ms.load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
