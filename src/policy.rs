//! What may begin next: which provider, after which delay, under which budget.
//!
//! Pure functions over plain data: no clock, no I/O, no randomness. *Whether* another attempt may begin at this moment is decided
//! in `lua/`, on the record; here only *what the runtime would like to do next*. One budget of attempts serves every retry and
//! failover.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::attempt::{Attempt, AttemptState};

mod protection;

pub use protection::{BUDGET_WINDOW_SECONDS, Breaker, BudgetWindow, Rate, RetryBudget, Taken};

/// How the reason of an attempt begins that the gate kept back before anything was sent: `failover_denied: <provider>: <why>`.
pub const DENIED: &str = "failover_denied: ";

/// Most tries of a job that never got as far as a provider, as the scripts allow beside `attempts_max`.
pub const UNSENT_MAX: usize = 8;
/// The longest pause between two attempts at one provider that asked for none.
pub const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// How long TCP waits for an acknowledgement before it gives a connection up: part of the quarantine.
pub const TCP_USER_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest that a late answer is listened for: it holds a connection and a permit.
pub const LINGER_MAX: Duration = Duration::from_secs(3600);
/// The statuses that can be refusals.
const STATUSES: RangeInclusive<u16> = 400..=599;

/// A definite failure after which another attempt may begin. What is unknown is none, and has no word here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FailoverOn {
    /// `not_sent`: nothing left for the provider.
    NotSent,
    /// `rejected:<status>`: the provider refused with this status, 400 to 599.
    Rejected {
        /// The status.
        status: u16,
    },
    /// `invalid_output`: it answered, but not as the route requires.
    InvalidOutput,
}

/// A text is no word of `failover_on`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is not one of not_sent, rejected:<status from 400 to 599>, invalid_output")]
pub struct InvalidFailover {
    word: String,
}

impl FromStr for FailoverOn {
    type Err = InvalidFailover;

    fn from_str(word: &str) -> Result<Self, InvalidFailover> {
        let status = || {
            let digits = word.strip_prefix("rejected:")?;
            let three_digits = digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit());
            three_digits.then(|| digits.parse().ok()).flatten().filter(|status| STATUSES.contains(status))
        };
        match word {
            "not_sent" => Ok(FailoverOn::NotSent),
            "invalid_output" => Ok(FailoverOn::InvalidOutput),
            _ => match status() {
                Some(status) => Ok(FailoverOn::Rejected { status }),
                None => Err(InvalidFailover { word: word.chars().take(64).collect() }),
            },
        }
    }
}

impl fmt::Display for FailoverOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailoverOn::NotSent => f.write_str("not_sent"),
            FailoverOn::Rejected { status } => write!(f, "rejected:{status}"),
            FailoverOn::InvalidOutput => f.write_str("invalid_output"),
        }
    }
}

impl Serialize for FailoverOn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for FailoverOn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What an attempt does to the world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effects {
    /// Nothing but compute its answer: two attempts waste money, no more.
    Pure,
    /// Something that must not happen twice.
    #[default]
    External,
}

/// Whether a job may go to another provider than its route's first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// Only to one that has proved the same contract.
    #[default]
    Enforce,
    /// To any; what would have been denied is counted.
    Shadow,
    /// To any: somebody decided that they are interchangeable.
    Off,
}

/// To which providers of a route a job may go, by their place. To the first one always: it is the owner's own choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open(Vec<bool>);

impl Open {
    /// To all.
    pub fn all(providers: usize) -> Self {
        Open(vec![true; providers])
    }

    /// To the first one alone.
    pub fn first(providers: usize) -> Self {
        Open((0..providers).map(|place| place == 0).collect())
    }

    /// Lets jobs go there too.
    pub fn add(&mut self, place: usize) {
        if let Some(open) = self.0.get_mut(place) {
            *open = true;
        }
    }

    /// Whether a job may go there.
    pub fn is(&self, place: usize) -> bool {
        place == 0 || self.0.get(place).copied().unwrap_or(false)
    }
}

/// A route's rules about what comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// How many providers the route has, 1 or more. A provider is named by its place.
    pub providers: usize,
    /// How many attempts the route allows.
    pub attempts_max: u32,
    /// After which failures another attempt may begin.
    pub failover_on: Vec<FailoverOn>,
    /// Whether it may go to another provider.
    pub gate: Gate,
    /// The pause before the first repetition at one provider; doubles up to [`BACKOFF_MAX`].
    pub backoff: Duration,
}

/// An attempt that is over, as far as the plan is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Try {
    /// Which provider.
    pub provider: usize,
    /// Why it failed.
    pub failure: FailoverOn,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Begin another attempt.
    Begin {
        /// At which provider.
        provider: usize,
        /// After how long.
        delay: Duration,
        /// Who would have been next, had the gate not kept the job from there.
        denied: Option<usize>,
    },
    /// The job ends with this failure.
    End(Ending),
}

/// Why no other attempt begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The route does not begin again after such a failure.
    NotInFailoverOn,
    /// The attempts are used up.
    AttemptsExhausted,
    /// The next one would begin after the deadline.
    Deadline,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ending::NotInFailoverOn => "not in failover_on",
            Ending::AttemptsExhausted => "attempts exhausted",
            Ending::Deadline => "deadline",
        })
    }
}

impl Plan {
    /// Decides what comes after the last of these tries.
    ///
    /// `retry_after` is how long the provider that failed last wants to be left alone: it is honoured for that provider, and a
    /// wait beyond the deadline ends the job at once. `remaining` is what is left of the job's deadline. A provider to which the job
    /// may not go is passed over; where it may go to no other one, it stays where it is or comes back to the first.
    pub fn after(&self, tries: &[Try], retry_after: Option<Duration>, remaining: Option<Duration>, open: &Open) -> Next {
        let Some(last) = tries.last() else {
            return Next::Begin { provider: 0, delay: Duration::ZERO, denied: None };
        };
        if !self.failover_on.contains(&last.failure) {
            return Next::End(Ending::NotInFailoverOn);
        }
        // A provider that is down for a moment must not use up the attempts that may touch it; the deadline bounds the waiting.
        let unsent = tries.iter().filter(|one| one.failure == FailoverOn::NotSent).count();
        let sent_max = usize::try_from(self.attempts_max).unwrap_or(usize::MAX);
        if tries.len() - unsent >= sent_max || unsent >= UNSENT_MAX {
            return Next::End(Ending::AttemptsExhausted);
        }
        let (provider, denied) = self.beside(last.provider, open);
        let before = tries.iter().filter(|one| one.provider == provider).count();
        let mut delay = if before == 0 { Duration::ZERO } else { self.backoff_before(before) };
        if provider == last.provider
            && let Some(retry_after) = retry_after
        {
            delay = delay.max(retry_after);
        }
        match remaining {
            Some(remaining) if delay >= remaining => Next::End(Ending::Deadline),
            _ => Next::Begin { provider, delay, denied },
        }
    }

    /// The provider after this one to which the job may go, and the nearest before it to which it may not.
    pub fn beside(&self, last: usize, open: &Open) -> (usize, Option<usize>) {
        let providers = self.providers.max(1);
        let round = (1..=providers).map(|step| (last + step) % providers);
        let next = round.clone().find(|place| open.is(*place)).unwrap_or(0);
        let denied = round.take_while(|place| *place != next).next();
        (next, denied)
    }

    /// The other providers at which an attempt may begin instead, in order, where our own protection keeps it from this one.
    pub fn elsewhere(&self, place: usize, open: &Open) -> Vec<usize> {
        if !self.failover_on.contains(&FailoverOn::NotSent) {
            return Vec::new();
        }
        let providers = self.providers.max(1);
        (1..providers).map(|step| (place + step) % providers).filter(|place| open.is(*place)).collect()
    }

    /// What comes after a try whose end was found out later. The delay is left to the record.
    pub fn after_all(&self, tries: &[Try], remaining: Option<Duration>) -> Result<(), Ending> {
        match self.after(tries, None, remaining, &Open::first(self.providers)) {
            Next::Begin { .. } => Ok(()),
            Next::End(ending) => Err(ending),
        }
    }

    fn backoff_before(&self, tries_there: usize) -> Duration {
        let doublings = u32::try_from(tries_there.saturating_sub(1)).unwrap_or(u32::MAX).min(16);
        (self.backoff * 2_u32.pow(doublings)).min(BACKOFF_MAX)
    }
}

/// When providers are asked what became of an unknown attempt, and for how long before a person must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reconcile {
    /// From the moment it became unknown to the first question; also the shortest pause between two.
    pub first: Duration,
    /// The longest pause between two questions.
    pub max: Duration,
    /// How long it may stay unknown before a person is called. The questions go on.
    pub give_up: Duration,
    /// How long it may stay unknown before it is abandoned, where doing it twice only costs. `None`: never.
    pub abandon_after: Option<Duration>,
}

impl Default for Reconcile {
    fn default() -> Self {
        Reconcile {
            first: Duration::from_secs(2),
            max: Duration::from_secs(300),
            give_up: Duration::from_secs(3600),
            abandon_after: None,
        }
    }
}

impl Reconcile {
    /// The pause after a question that settled nothing about an attempt unknown for so long: half of that, within the limits.
    /// It follows from the record alone, so whoever asks next keeps the same schedule.
    pub fn pause(&self, age: Duration) -> Duration {
        (age / 2).clamp(self.first.min(self.max), self.max)
    }
}

/// Most times that one attempt is sent again with its key to find out what became of it.
pub const REPLAYS_MAX: usize = 5;

/// When another attempt of a race may begin, where that is not fixed but follows the provider's own latencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracked {
    /// Which percentile of the latencies of its successes, [`PERCENTILES`].
    pub percentile: u8,
    /// What counts until there are enough of them.
    pub fallback: Duration,
}

/// The percentiles that can be tracked: below the half, every second attempt would be raced.
pub const PERCENTILES: RangeInclusive<u8> = 50..=99;
/// The shortest time that a tracked race gives an attempt, and what the record says of it: the scripts allow no race before.
pub const TRACKED_AFTER_MIN: Duration = Duration::from_millis(10);

impl Tracked {
    /// How many latencies it takes before one of them is beyond the percentile; never fewer than twenty.
    pub fn samples_min(self) -> usize {
        let beyond = 100 - usize::from(self.percentile.min(99));
        100_usize.div_ceil(beyond).max(20)
    }

    /// How long an attempt runs before another may begin, by what its provider took for others.
    pub fn after(self, latencies: &mut [Duration]) -> Duration {
        if latencies.len() < self.samples_min() {
            return self.fallback;
        }
        latencies.sort_unstable();
        let rank = (latencies.len() * usize::from(self.percentile)).div_ceil(100);
        latencies[rank.clamp(1, latencies.len()) - 1].max(TRACKED_AFTER_MIN)
    }
}

/// What begins an attempt's `reason` if nothing was sent for a reason of the provider's: it counts as a try.
pub const NOT_SENT: &str = "not_sent";
/// What begins an attempt's `reason` if the provider refused; the status follows.
pub const REJECTED: &str = "rejected";
/// What begins an attempt's `reason` if what it made is not valid.
pub const INVALID_OUTPUT: &str = "invalid_output";

/// Reads from a record's attempts what was tried, so that a gateway that adopts a job goes on where another one stopped.
///
/// Attempts that never got as far as a provider (a lease that lapsed while starting, a gateway that stopped) are no tries; nor are
/// those that never left before the job was last reopened, to `version`. `place` tells a provider's place in the route.
pub fn tries_of(attempts: &[Attempt], version: u64, place: impl Fn(&str) -> Option<usize>) -> Vec<Try> {
    attempts
        .iter()
        .filter(|attempt| attempt.state != AttemptState::Aborted || attempt.version == version)
        .filter_map(|attempt| Some(Try { provider: place(&attempt.provider)?, failure: failure_of(attempt)? }))
        .collect()
}

fn failure_of(attempt: &Attempt) -> Option<FailoverOn> {
    let words = attempt.reason.as_str();
    match attempt.state {
        AttemptState::Failed | AttemptState::Aborted if words.starts_with(NOT_SENT) => Some(FailoverOn::NotSent),
        AttemptState::Failed if words.starts_with(INVALID_OUTPUT) => Some(FailoverOn::InvalidOutput),
        AttemptState::Failed => {
            let status = words.strip_prefix(REJECTED).and_then(|rest| rest.split_whitespace().next()?.parse().ok());
            // A failure that somebody resolved by hand, saying that another attempt may begin.
            Some(status.map_or(FailoverOn::NotSent, |status| FailoverOn::Rejected { status }))
        }
        AttemptState::Canceled | AttemptState::Abandoned => Some(FailoverOn::NotSent),
        AttemptState::Aborted
        | AttemptState::Starting
        | AttemptState::Running
        | AttemptState::Unknown
        | AttemptState::Succeeded
        | AttemptState::Discarded => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(providers: usize, gate: Gate) -> Plan {
        Plan {
            providers,
            attempts_max: 3,
            failover_on: vec![FailoverOn::NotSent, FailoverOn::Rejected { status: 429 }],
            gate,
            backoff: Duration::from_millis(200),
        }
    }

    fn not_sent(provider: usize) -> Try {
        Try { provider, failure: FailoverOn::NotSent }
    }

    fn begin(provider: usize, delay_ms: u64, denied: Option<usize>) -> Next {
        Next::Begin { provider, delay: Duration::from_millis(delay_ms), denied }
    }

    fn open(providers: usize, places: &[usize]) -> Open {
        let mut open = Open::first(providers);
        places.iter().for_each(|place| open.add(*place));
        open
    }

    #[test]
    fn where_all_may_be_entered_the_next_provider_begins_at_once() {
        let (plan, all) = (plan(2, Gate::Off), Open::all(2));
        assert_eq!(plan.after(&[not_sent(0)], None, None, &all), begin(1, 0, None));
        assert_eq!(plan.after(&[not_sent(0), not_sent(1)], None, None, &all), begin(0, 200, None));
    }

    #[test]
    fn a_closed_gate_keeps_the_job_at_its_first_provider_and_says_who_was_denied() {
        let (plan, first) = (plan(2, Gate::Enforce), Open::first(2));
        assert_eq!(plan.after(&[not_sent(0)], None, None, &first), begin(0, 200, Some(1)));
        assert_eq!(plan.after(&[not_sent(0), not_sent(0)], None, None, &first), begin(0, 400, Some(1)));
    }

    #[test]
    fn a_denied_provider_is_passed_over_and_one_that_was_left_is_not_entered_again_without_leave() {
        let plan = plan(3, Gate::Enforce);
        assert_eq!(plan.after(&[not_sent(0)], None, None, &open(3, &[2])), begin(2, 0, Some(1)));
        assert_eq!(plan.after(&[not_sent(0), not_sent(2)], None, None, &open(3, &[])), begin(0, 200, None));
        assert_eq!(plan.after(&[not_sent(0), not_sent(1)], None, None, &open(3, &[1])), begin(0, 200, Some(2)));
        assert_eq!(plan.beside(1, &open(3, &[1])), (0, Some(2)));
    }

    #[test]
    fn what_we_keep_from_a_provider_goes_elsewhere_only_where_it_may_go_and_what_was_not_sent_may() {
        let three = plan(3, Gate::Enforce);
        assert_eq!(three.elsewhere(1, &Open::all(3)), [2, 0]);
        assert_eq!(three.elsewhere(1, &Open::first(3)), [0]);
        assert_eq!(three.elsewhere(0, &Open::first(3)), [0; 0]);
        assert_eq!(plan(1, Gate::Off).elsewhere(0, &Open::all(1)), [0; 0]);
        let only_busy = Plan { failover_on: vec![FailoverOn::Rejected { status: 429 }], ..three };
        assert_eq!(only_busy.elsewhere(0, &Open::all(3)), [0; 0]);
    }

    #[test]
    fn one_budget_serves_every_retry_and_failover() {
        for (providers, gate) in [(1, Gate::Enforce), (2, Gate::Enforce), (2, Gate::Off), (5, Gate::Off)] {
            let plan = plan(providers, gate);
            let open = if gate == Gate::Off { Open::all(providers) } else { Open::first(providers) };
            let mut tries = Vec::new();
            while let Next::Begin { provider, .. } = plan.after(&tries, None, None, &open) {
                tries.push(Try { provider, failure: FailoverOn::Rejected { status: 429 } });
            }
            assert_eq!(tries.len(), 3, "{providers} {gate:?}");
        }
    }

    #[test]
    fn what_never_left_uses_up_no_attempt_and_is_bounded_all_the_same() {
        let plan = plan(1, Gate::Enforce);
        let mut tries = vec![Try { provider: 0, failure: FailoverOn::Rejected { status: 429 } }];
        while let Next::Begin { provider, .. } = plan.after(&tries, None, None, &Open::first(1)) {
            tries.push(not_sent(provider));
        }
        assert_eq!(tries.len(), 1 + UNSENT_MAX);
    }

    #[test]
    fn a_refusal_outside_failover_on_ends_the_job() {
        let refused = Try { provider: 0, failure: FailoverOn::Rejected { status: 400 } };
        assert_eq!(plan(2, Gate::Off).after(&[refused], None, None, &Open::all(2)), Next::End(Ending::NotInFailoverOn));
    }

    #[test]
    fn retry_after_is_honoured_within_the_deadline_and_ends_the_job_beyond_it() {
        let plan = plan(1, Gate::Enforce);
        let busy = [Try { provider: 0, failure: FailoverOn::Rejected { status: 429 } }];
        let two = Some(Duration::from_secs(2));
        assert_eq!(plan.after(&busy, two, Some(Duration::from_secs(3)), &Open::all(1)), begin(0, 2000, None));
        assert_eq!(plan.after(&busy, two, Some(Duration::from_secs(2)), &Open::all(1)), Next::End(Ending::Deadline));
    }

    #[test]
    fn questions_come_at_half_the_age_and_within_the_limits() {
        let (first, max) = (Duration::from_secs(2), Duration::from_secs(30));
        let reconcile = Reconcile { first, max, ..Reconcile::default() };
        let pause = |age| reconcile.pause(Duration::from_secs(age)).as_secs();
        assert_eq!([0, 2, 4, 10, 60, 86_400].map(pause), [2, 2, 2, 5, 30, 30]);
        let upside_down = Reconcile { first: max, max: first, ..reconcile };
        assert_eq!(upside_down.pause(Duration::ZERO), first, "never longer than the longest");
    }

    #[test]
    fn a_percentile_needs_a_latency_beyond_it() {
        let fallback = Duration::from_secs(9);
        let tracked = |percentile| Tracked { percentile, fallback };
        let taken = |count: u64| (1..=count).rev().map(|n| Duration::from_millis(n * 100)).collect::<Vec<_>>();
        assert_eq!(tracked(95).after(&mut taken(19)), fallback);
        assert_eq!(tracked(95).after(&mut taken(20)), Duration::from_millis(1900));
        assert_eq!(tracked(99).after(&mut taken(99)), fallback);
        assert_eq!(tracked(99).after(&mut taken(100)), Duration::from_millis(9900));
        assert_eq!(tracked(50).after(&mut taken(200)), Duration::from_millis(10_000));
        assert_eq!(tracked(50).after(&mut vec![Duration::ZERO; 40]), TRACKED_AFTER_MIN);
    }

    #[test]
    fn words_of_failover_on_are_read_and_written() {
        for word in ["not_sent", "rejected:429", "invalid_output"] {
            assert_eq!(word.parse::<FailoverOn>().unwrap().to_string(), word);
        }
        for word in ["", "unknown", "rejected:", "rejected:200", "rejected:600", "rejected:4 2"] {
            assert!(word.parse::<FailoverOn>().is_err(), "{word}");
        }
    }
}
