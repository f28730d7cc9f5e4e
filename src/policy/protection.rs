//! What keeps a struggling provider from being hammered: the rules as they are set, and the arithmetic of a retry budget.
//!
//! Pure, as all of `policy`: a second is a number that the caller tells. Whether a breaker is open is not decided here: the fleet
//! knows, in `lua/`.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How far back a retry budget looks, in seconds.
pub const BUDGET_WINDOW_SECONDS: u64 = 10;

/// When a provider's breaker opens, and for how long. One for each of its models.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Breaker {
    /// Failures in a row that open it; 0: no number of them does.
    pub consecutive: u32,
    /// The share of failures in the window that opens it; 0: none does.
    pub ratio: f64,
    /// How far back the ratio looks.
    #[serde(with = "humantime_serde")]
    pub window: Duration,
    /// Calls in the window before the ratio counts.
    pub min_calls: u32,
    /// How long it is open at first. Doubles each time a probe fails.
    #[serde(with = "humantime_serde")]
    pub open: Duration,
    /// How long it is open at most.
    #[serde(with = "humantime_serde")]
    pub open_max: Duration,
    /// How long a probe keeps others from probing. Absent: the provider's total timeout and five seconds.
    #[serde(with = "humantime_serde")]
    pub probe_lease: Option<Duration>,
    /// Refusals that count as failures, as 429; the other definite ones show that the provider works.
    pub statuses: Vec<u16>,
}

impl Default for Breaker {
    fn default() -> Self {
        Breaker {
            consecutive: 5,
            ratio: 0.5,
            window: Duration::from_secs(30),
            min_calls: 20,
            open: Duration::from_secs(30),
            open_max: Duration::from_secs(300),
            probe_lease: None,
            statuses: Vec::new(),
        }
    }
}

/// How many calls a second, by the whole fleet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Calls a second, in the long run. More than 0.
    pub per_second: f64,
    /// Calls that may come at once after a pause, 1 or more.
    pub burst: u32,
}

/// How many further attempts (retries, failovers, races) a route's jobs may begin beside their first ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RetryBudget {
    /// Further attempts for a hundred first ones of the last ten seconds.
    pub percent: u32,
    /// Further attempts a second that are always allowed.
    #[serde(default = "one")]
    pub min_per_second: u32,
}

fn one() -> u32 {
    1
}

/// What a retry budget has seen in its window: at most one entry a second.
#[derive(Debug, Default)]
pub struct BudgetWindow {
    seconds: VecDeque<(u64, Spent)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    first: u64,
    further: u64,
}

impl BudgetWindow {
    /// A first attempt began.
    pub fn first(&mut self, second: u64) {
        self.at(second).first += 1;
    }

    /// Takes one further attempt out of the budget, if it is in there.
    pub fn take(&mut self, budget: RetryBudget, second: u64) -> Option<Taken> {
        self.at(second);
        let (first, further) =
            self.seconds.iter().fold((0, 0), |(first, further), (_, spent)| (first + spent.first, further + spent.further));
        let allowed = first * u64::from(budget.percent) / 100 + u64::from(budget.min_per_second) * BUDGET_WINDOW_SECONDS;
        if further >= allowed {
            return None;
        }
        self.at(second).further += 1;
        Some(Taken { second })
    }

    /// Puts one back that did not begin.
    pub fn put_back(&mut self, taken: Taken) {
        if let Some((_, spent)) = self.seconds.iter_mut().find(|(second, _)| *second == taken.second) {
            spent.further = spent.further.saturating_sub(1);
        }
    }

    fn at(&mut self, second: u64) -> &mut Spent {
        while self.seconds.front().is_some_and(|(first, _)| first + BUDGET_WINDOW_SECONDS <= second) {
            self.seconds.pop_front();
        }
        if self.seconds.back().is_none_or(|(last, _)| *last < second) {
            self.seconds.push_back((second, Spent::default()));
        }
        &mut self.seconds.back_mut().expect("one was pushed").1
    }
}

/// A further attempt that was taken out of a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    second: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(window: &mut BudgetWindow, budget: RetryBudget, second: u64) -> usize {
        std::iter::from_fn(|| window.take(budget, second)).take(1000).count()
    }

    #[test]
    fn a_budget_is_a_share_of_the_first_attempts_and_a_little_more() {
        let budget = RetryBudget { percent: 20, min_per_second: 1 };
        let mut window = BudgetWindow::default();
        assert_eq!(taken(&mut window, budget, 100), 10, "what is always allowed");
        for _ in 0..100 {
            window.first(101);
        }
        assert_eq!(taken(&mut window, budget, 101), 20);
        assert_eq!(taken(&mut window, RetryBudget { percent: 0, min_per_second: 0 }, 101), 0);
    }

    #[test]
    fn what_was_spent_is_forgotten_after_the_window_and_not_before() {
        let budget = RetryBudget { percent: 0, min_per_second: 1 };
        let mut window = BudgetWindow::default();
        assert_eq!(taken(&mut window, budget, 100), 10);
        assert_eq!(taken(&mut window, budget, 100 + BUDGET_WINDOW_SECONDS - 1), 0);
        assert_eq!(taken(&mut window, budget, 100 + BUDGET_WINDOW_SECONDS), 10);
        assert!(window.seconds.len() <= BUDGET_WINDOW_SECONDS as usize + 1);
    }

    #[test]
    fn an_attempt_that_did_not_begin_is_put_back() {
        let budget = RetryBudget { percent: 0, min_per_second: 1 };
        let mut window = BudgetWindow::default();
        let one = window.take(budget, 100).unwrap();
        assert_eq!(taken(&mut window, budget, 101), 9);
        window.put_back(one);
        assert_eq!(taken(&mut window, budget, 101), 1);
    }
}
