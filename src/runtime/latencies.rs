//! How long each provider took for each route, lately: when a race's next attempt is worth it.
//!
//! A window of the last [`WINDOW_MAX`] successes of this gateway. Nothing is shared or kept: a gateway that was just started begins
//! with the fallback. Failures are not in it: a provider that refuses fast would make every race begin early.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::policy::Tracked;

/// Most latencies of a route and provider that are remembered; the oldest go.
const WINDOW_MAX: usize = 512;

/// By route and provider; both come from the configuration, so their number is bounded.
#[derive(Default)]
pub(super) struct Latencies {
    windows: Mutex<HashMap<(String, String), Arc<Window>>>,
}

/// What one provider took for one route.
#[derive(Default)]
pub(super) struct Window(Mutex<VecDeque<Duration>>);

impl Latencies {
    /// The window of a route and a provider.
    pub(super) fn of(&self, route: &str, provider: &str) -> Arc<Window> {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(windows.entry((route.to_owned(), provider.to_owned())).or_default())
    }
}

impl Window {
    /// A success took so long.
    pub(super) fn add(&self, took: Duration) {
        let mut latencies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if latencies.len() == WINDOW_MAX {
            latencies.pop_front();
        }
        latencies.push_back(took);
    }

    /// How long an attempt runs before another may begin.
    pub(super) fn after(&self, tracked: Tracked) -> Duration {
        let mut latencies: Vec<Duration> = self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        tracked.after(&mut latencies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_latencies_count() {
        let latencies = Latencies::default();
        let tracked = Tracked { percentile: 50, fallback: Duration::from_secs(9) };
        let window = latencies.of("print", "laser");
        for _ in 0..WINDOW_MAX {
            window.add(Duration::from_secs(1));
        }
        assert_eq!(window.after(tracked), Duration::from_secs(1));
        for _ in 0..WINDOW_MAX {
            latencies.of("print", "laser").add(Duration::from_secs(2));
        }
        assert_eq!(window.after(tracked), Duration::from_secs(2));
        assert_eq!(window.0.lock().unwrap().len(), WINDOW_MAX);
        assert_eq!(latencies.of("print", "inkjet").after(tracked), tracked.fallback, "each provider has its own");
    }
}
