//! What the fleet knows of its providers: whether one may be called now, and how calls went.
//!
//! One HASH and one ZSET a provider, whatever the number of jobs; the rules stand in `lua/admit_call.lua`, `lua/report_call.lua` and
//! `lua/extend_permits.lua`. Nothing here remembers anything.

use std::str::FromStr;

use crate::attempt::AttemptToken;
use crate::error::StoreError;
use crate::store::call::{Around, Call};
use crate::store::transitions::{Argument as _, arguments};
use crate::store::{Script, Store};

/// A question whether a provider may be called now.
#[derive(Clone, Copy, Debug)]
pub struct AdmitCall<'a> {
    /// New for each call: the permit's name, and the probe's.
    pub token: AttemptToken,
    /// The provider.
    pub provider: &'a str,
    /// The model's name in 16 hexadecimal digits, `""` for none.
    pub model: &'a str,
    /// The breaker's rules, if there is one.
    pub breaker: Option<BreakerRules>,
    /// Calls of the fleet at once; 0 for no limit.
    pub permits_max: u64,
    /// How long a permit is kept without being extended.
    pub lease_ms: u64,
    /// Between two calls of the fleet, in microseconds; 0 for no limit.
    pub interval_us: u64,
    /// Calls that may come at once after a pause.
    pub burst: u64,
    /// The longest that a provider may hold callers off.
    pub hold_max_ms: u64,
}

/// When a breaker opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRules {
    /// Failures in a row that open it; 0 for any number.
    pub consecutive: u64,
    /// Failures of 1000 calls that open it; 0 for any.
    pub ratio_permille: u64,
    /// Calls in the window before the ratio counts.
    pub calls_min: u64,
    /// How far back the ratio looks.
    pub window_ms: u64,
    /// How long it is open at first.
    pub open_ms: u64,
    /// How long at most.
    pub open_max_ms: u64,
    /// How long a probe keeps others from probing.
    pub probe_lease_ms: u64,
}

/// The reply to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admitted {
    /// It may be called.
    Admitted {
        /// As what.
        kind: Kind,
        /// Under which generation of the breaker.
        generation: u64,
        /// Which breaker of the provider.
        place: String,
        /// Permits that are taken now.
        permits: u64,
    },
    /// It may not.
    Refused {
        /// By what.
        why: Refused,
        /// When to ask again, in ms; 0 for nobody knows.
        wait_ms: u64,
        /// Which breaker of the provider.
        place: String,
    },
}

/// What a call is for the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of many.
    Call,
    /// The one that finds out whether the provider is well again.
    Probe,
}

impl FromStr for Kind {
    type Err = ();

    fn from_str(word: &str) -> Result<Self, ()> {
        match word {
            "call" => Ok(Kind::Call),
            "probe" => Ok(Kind::Probe),
            _ => Err(()),
        }
    }
}

/// What keeps a call from a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refused {
    /// The provider asked to be left alone.
    Hold,
    /// Its breaker is open.
    Breaker,
    /// Somebody else probes it.
    Probe,
    /// The fleet has as many calls there as it may.
    Permits,
    /// The fleet has called it as often as it may.
    Rate,
}

impl FromStr for Refused {
    type Err = ();

    fn from_str(word: &str) -> Result<Self, ()> {
        match word {
            "hold" => Ok(Refused::Hold),
            "breaker" => Ok(Refused::Breaker),
            "probe" => Ok(Refused::Probe),
            "permits" => Ok(Refused::Permits),
            "rate" => Ok(Refused::Rate),
            _ => Err(()),
        }
    }
}

/// How calls went.
#[derive(Clone, Debug)]
pub struct ReportCall<'a> {
    /// New for each report.
    pub token: AttemptToken,
    /// The provider.
    pub provider: &'a str,
    /// Which breaker of the provider, as [`Admitted::Admitted`] told; `""` without one.
    pub place: &'a str,
    /// The generation, as it told.
    pub generation: u64,
    /// Calls that are over.
    pub tally: Tally,
    /// A probe that is over: then the tally does not count.
    pub probe: Option<(AttemptToken, ProbeOutcome)>,
    /// The breaker's rules, if there is one.
    pub breaker: Option<BreakerRules>,
    /// How long the provider wants to be left alone; 0 for not.
    pub hold_ms: u64,
    /// The longest that it may hold callers off.
    pub hold_max_ms: u64,
}

/// Calls of one generation that are over, in their order as far as it matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many.
    pub calls: u64,
    /// Failures among them.
    pub failures: u64,
    /// Failures before the first success.
    pub leading: u64,
    /// Failures in a row.
    pub longest: u64,
    /// Failures after the last success.
    pub trailing: u64,
}

impl Tally {
    /// Counts one more call.
    pub fn count(&mut self, failed: Failed) {
        self.calls += 1;
        match failed {
            Failed::Yes => {
                let none_succeeded = self.failures + 1 == self.calls;
                self.failures += 1;
                self.trailing += 1;
                self.leading += u64::from(none_succeeded);
                self.longest = self.longest.max(self.trailing);
            }
            Failed::No => self.trailing = 0,
        }
    }
}

/// Whether a call failed in a way that says something about its provider's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// It did.
    Yes,
    /// The provider answered.
    No,
}

/// How a probe ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// The provider is well.
    Succeeded,
    /// It is not.
    Failed,
    /// It was not sent, or says nothing: another may probe.
    GivenBack,
}

impl ProbeOutcome {
    fn word(self) -> &'static str {
        match self {
            ProbeOutcome::Succeeded => "succeeded",
            ProbeOutcome::Failed => "failed",
            ProbeOutcome::GivenBack => "given_back",
        }
    }
}

/// The reply to a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    /// Whether the calls were of the generation that stands.
    pub counted: Counted,
    /// What calls meet now.
    pub stands: Stands,
    /// How long, in ms; 0 where it may change at once.
    pub wait_ms: u64,
    /// The generation that stands; 0 without a breaker.
    pub generation: u64,
    /// Whether this report opened the breaker.
    pub opened: Opened,
}

/// Whether calls were of the generation that stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// They were.
    Yes,
    /// An earlier call with this token counted them, or said that they do not count.
    Before,
    /// They were not: they changed nothing.
    Stale,
}

/// Whether a report opened a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// It did.
    Yes,
    /// It did not.
    No,
}

/// What calls meet at a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stands {
    /// Nothing in their way.
    Closed,
    /// An open breaker.
    Open,
    /// A breaker that lets one probe pass.
    HalfOpen,
    /// The provider asked to be left alone.
    Hold,
}

impl FromStr for Stands {
    type Err = ();

    fn from_str(word: &str) -> Result<Self, ()> {
        match word {
            "closed" => Ok(Stands::Closed),
            "open" => Ok(Stands::Open),
            "half_open" => Ok(Stands::HalfOpen),
            "hold" => Ok(Stands::Hold),
            _ => Err(()),
        }
    }
}

/// Rules of a breaker that never opens, for calls without one.
const NO_BREAKER: BreakerRules =
    BreakerRules { consecutive: 0, ratio_permille: 0, calls_min: 0, window_ms: 1, open_ms: 1, open_max_ms: 1, probe_lease_ms: 1 };

impl Store {
    /// Asks whether a provider may be called now, and takes what the call needs.
    ///
    /// # Errors
    /// Any: the provider is not to be called. What may have been taken is free again after its lease.
    pub async fn admit_call(&self, admit: &AdmitCall<'_>) -> Result<Admitted, StoreError> {
        let rules = admit.breaker.unwrap_or(NO_BREAKER);
        let arguments = arguments![
            admit.token,
            admit.model,
            if admit.breaker.is_some() { "on" } else { "off" },
            rules.probe_lease_ms,
            admit.permits_max,
            admit.lease_ms,
            admit.interval_us,
            admit.burst,
            admit.hold_max_ms,
        ];
        let keys = [self.inner.keys.guard(admit.provider), self.inner.keys.permits(admit.provider)];
        let call = Call::new(Script::AdmitCall, &[&keys[0], &keys[1]], arguments, admit.token.as_bytes().to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "admitted" => Ok(Admitted::Admitted {
                kind: reply.parse()?,
                generation: reply.parse()?,
                place: reply.text()?,
                permits: reply.parse()?,
            }),
            "refused" => Ok(Admitted::Refused { why: reply.parse()?, wait_ms: reply.parse()?, place: reply.text()? }),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Tells the fleet how calls to a provider went.
    ///
    /// # Errors
    /// Any: the same report again, with the same token.
    pub async fn report_call(&self, report: &ReportCall<'_>) -> Result<Reported, StoreError> {
        let rules = report.breaker.unwrap_or(NO_BREAKER);
        let probe: &[u8] = report.probe.as_ref().map_or(&[], |(token, _)| &token.as_bytes()[..]);
        let arguments = arguments![
            report.token,
            report.place,
            report.generation,
            report.tally.calls,
            report.tally.failures,
            report.tally.leading,
            report.tally.longest,
            report.tally.trailing,
            probe,
            report.probe.map_or("", |(_, outcome)| outcome.word()),
            rules.consecutive,
            rules.ratio_permille,
            rules.calls_min,
            rules.window_ms,
            rules.open_ms,
            rules.open_max_ms,
            rules.probe_lease_ms,
            report.hold_ms,
            report.hold_max_ms,
        ];
        let key = self.inner.keys.guard(report.provider);
        let call = Call::new(Script::ReportCall, &[&key], arguments, report.token.as_bytes().to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        let counted = match reply.status() {
            "reported" => Counted::Yes,
            "repeated" => Counted::Before,
            "stale" => Counted::Stale,
            _ => return Err(reply.unknown_status()),
        };
        let (stands, wait_ms, generation) = (reply.parse()?, reply.parse()?, reply.parse()?);
        let opened = match reply.text()?.as_str() {
            "yes" => Opened::Yes,
            "no" => Opened::No,
            _ => return Err(reply.unknown_status()),
        };
        Ok(Reported { counted, stands, wait_ms, generation, opened })
    }

    /// Keeps permits of a provider for another lease, and gives others back. Returns how many are taken now.
    ///
    /// # Errors
    /// Any: the same call again; what is not extended is free after its lease.
    pub async fn extend_permits(
        &self,
        provider: &str,
        kept: &[AttemptToken],
        returned: &[AttemptToken],
        lease_ms: u64,
    ) -> Result<u64, StoreError> {
        let echo = AttemptToken::random();
        let joined = |tokens: &[AttemptToken]| tokens.iter().flat_map(|token| token.as_bytes().to_vec()).collect::<Vec<u8>>();
        let (kept, returned) = (joined(kept), joined(returned));
        let arguments = arguments![echo, kept.as_slice(), returned.as_slice(), lease_ms];
        let key = self.inner.keys.permits(provider);
        let call = Call::new(Script::ExtendPermits, &[&key], arguments, echo.as_bytes().to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "extended" => reply.parse(),
            _ => Err(reply.unknown_status()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_keeps_what_the_order_of_its_calls_says() {
        let tally = |calls: &str| {
            let mut tally = Tally::default();
            calls.chars().for_each(|call| tally.count(if call == 'x' { Failed::Yes } else { Failed::No }));
            (tally.calls, tally.failures, tally.leading, tally.longest, tally.trailing)
        };
        assert_eq!(tally(""), (0, 0, 0, 0, 0));
        assert_eq!(tally("xxx"), (3, 3, 3, 3, 3));
        assert_eq!(tally("x..xxx.xx"), (9, 6, 1, 3, 2));
        assert_eq!(tally("xx."), (3, 2, 2, 2, 0));
    }
}
