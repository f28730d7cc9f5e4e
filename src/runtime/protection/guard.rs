//! One provider's guard on this gateway: what it was told of the fleet's knowledge, for a short while, and what it has yet to tell.
//!
//! A view that says "closed" lets calls pass without a question for [`VIEW_LIFE`]; every reply corrects it. Anything else is asked
//! for. Successes are reported together, every [`REPORT_EVERY`]; failures within [`REPORT_GAP`]. A report that did not arrive is
//! sent again as it was. Whatever breaks here breaks towards asking, and a question without an answer is a refusal.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, Semaphore, SemaphorePermit};

use crate::attempt::AttemptToken;
use crate::metrics;
use crate::runtime::protection::model::Model;
use crate::runtime::protection::{ProviderProtection, Refusal, WAIT_MAX, Why};
use crate::runtime::{Inner, millis};
use crate::store::{
    AdmitCall, Admitted, BreakerRules, Counted, Failed, Kind, Opened, ProbeOutcome, Refused, ReportCall, Reported, Stands, Store,
    Tally,
};

/// How long a gateway believes what it was told of a breaker: so late, at most, it learns that another one's report opened it.
pub(super) const VIEW_LIFE: Duration = Duration::from_secs(1);
/// How often successes are reported.
const REPORT_EVERY: Duration = Duration::from_millis(250);
/// How long a failure waits for others to be reported with.
const REPORT_GAP: Duration = Duration::from_millis(10);
/// A view that old is renewed while its breaker is in use.
const VIEW_RENEWED: Duration = Duration::from_millis(400);
/// The same of one that is not closed and that nobody asks for: what a metric says of it stays true.
const VIEW_RENEWED_RARELY: Duration = Duration::from_secs(5);
/// How long after its last call a breaker is in use.
const IN_USE: Duration = Duration::from_secs(60);
/// Most models whose breaker is remembered; beyond, all are forgotten and asked for again.
const MODELS_KNOWN_MAX: usize = 256;
/// Most permits that are extended or given back in one call.
const PERMITS_AT_ONCE_MAX: usize = 256;
/// Most permits that wait to be given back; beyond, the oldest are left to their leases.
const RETURNED_MAX: usize = 10_000;
/// Most probes whose outcome waits to be told: one each time a breaker half opens.
const PROBES_TOLD_MAX: usize = 64;
/// How long a stopping gateway takes to tell the rest.
const LAST_REPORT: Duration = Duration::from_secs(1);

/// A provider's guard.
pub(crate) struct Guard {
    provider: String,
    breaker: Option<BreakerRules>,
    statuses: Vec<u16>,
    permits_max: u64,
    permit_lease: Duration,
    interval_us: u64,
    burst: u64,
    hold_max_ms: u64,
    known: Mutex<Known>,
    /// Who waits for a turn: one asks, the others wait behind it.
    queue: Semaphore,
    /// There is something that should not wait to be told.
    news: Notify,
}

#[derive(Default)]
struct Known {
    /// Which breaker is a model's.
    places: HashMap<Model, Arc<str>>,
    breakers: HashMap<Arc<str>, Local>,
    /// Permits in use, and those to be given back.
    kept: HashSet<AttemptToken>,
    returned: Vec<AttemptToken>,
    extended: Option<Instant>,
    /// Probes that are over.
    probes: Vec<Report>,
    /// How long the provider wants to be left alone.
    hold: Option<Duration>,
}

/// A breaker as this gateway knows it.
struct Local {
    generation: u64,
    stands: Stands,
    until: Instant,
    /// When the question was asked that this is the answer to.
    asked: Instant,
    used: Instant,
    tally: Tally,
    /// A report on its way, or one that did not arrive.
    report: Option<Report>,
}

impl Local {
    /// The report that is to be sent: one that has not arrived, or else what was counted since.
    fn gather(&mut self, place: &Arc<str>) -> Report {
        let Local { generation, tally, report, .. } = self;
        let gathered = report.get_or_insert_with(|| Report {
            token: AttemptToken::random(),
            place: Arc::clone(place),
            generation: *generation,
            tally: std::mem::take(tally),
            probe: None,
            hold: Duration::ZERO,
        });
        gathered.clone()
    }

    fn has_untold_failures(&self) -> bool {
        self.tally.failures > 0 || self.report.as_ref().is_some_and(|report| report.tally.failures > 0)
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now < self.asked + VIEW_LIFE
    }
}

#[derive(Clone)]
struct Report {
    token: AttemptToken,
    place: Arc<str>,
    generation: u64,
    tally: Tally,
    probe: Option<(AttemptToken, ProbeOutcome)>,
    hold: Duration,
}

impl Guard {
    /// A guard, where there is anything to guard against. `total` is how long a call may take, `lease` how long a permit is kept.
    pub(crate) fn new(provider: &str, rules: &ProviderProtection, total: Duration, lease: Duration) -> Option<Arc<Self>> {
        if rules.is_nothing() {
            return None;
        }
        let breaker = rules.breaker.as_ref().map(|breaker| BreakerRules {
            consecutive: u64::from(breaker.consecutive),
            ratio_permille: permille(breaker.ratio),
            calls_min: u64::from(breaker.min_calls),
            window_ms: millis(breaker.window).max(1),
            open_ms: millis(breaker.open).max(1),
            open_max_ms: millis(breaker.open_max.max(breaker.open)).max(1),
            probe_lease_ms: millis(breaker.probe_lease.unwrap_or(total + Duration::from_secs(5))).max(1),
        });
        let interval_us = rules.rate.map_or(0, |rate| interval_us(rate.per_second));
        Some(Arc::new(Guard {
            provider: provider.to_owned(),
            breaker,
            statuses: rules.breaker.as_ref().map(|breaker| breaker.statuses.clone()).unwrap_or_default(),
            permits_max: rules.fleet_in_flight.map_or(0, u64::from),
            permit_lease: lease,
            interval_us,
            burst: rules.rate.map_or(1, |rate| u64::from(rate.burst.max(1))),
            hold_max_ms: rules.hold_max.map_or(0, millis),
            known: Mutex::default(),
            queue: Semaphore::new(1),
            news: Notify::new(),
        }))
    }

    pub(crate) fn has_breaker(&self) -> bool {
        self.breaker.is_some()
    }

    /// Whether calls take turns: then each is asked for.
    pub(crate) fn has_turns(&self) -> bool {
        self.permits_max > 0 || self.interval_us > 0
    }

    /// Refusals that count as failures.
    pub(crate) fn statuses(&self) -> &[u16] {
        &self.statuses
    }

    /// Waits to be the one that asks for a turn.
    pub(crate) async fn queue(&self) -> SemaphorePermit<'_> {
        self.queue.acquire().await.expect("it is never closed")
    }

    /// The answer, where it is known without a question; a refusal is as good as an admission.
    pub(crate) fn at_hand(self: &Arc<Self>, model: &Model) -> Option<Result<Pass, Refusal>> {
        let now = Instant::now();
        let mut known = self.known();
        let place = Arc::clone(known.places.get(model)?);
        // After a failure that the fleet has not heard of, "closed" is not believed any more.
        let local = known.breakers.get_mut(&place).filter(|local| local.is_fresh(now) && !local.has_untold_failures())?;
        local.used = now;
        let why = match local.stands {
            Stands::Closed if self.has_turns() => return None,
            Stands::Closed => {
                return Some(Ok(self.pass(Kind::Call, local.generation, place, AttemptToken::random())));
            }
            Stands::Open => Refused::Breaker,
            Stands::HalfOpen => Refused::Probe,
            Stands::Hold => Refused::Hold,
        };
        // What may change at any moment is asked for.
        let wait = local.until.checked_duration_since(now).filter(|wait| !wait.is_zero())?;
        let wait = if why == Refused::Probe { wait.min(WAIT_MAX) } else { wait };
        Some(Err(Refusal::new(&self.provider, Why::Fleet(why), wait)))
    }

    /// Asks whether the provider may be called now.
    pub(crate) async fn ask(self: &Arc<Self>, store: &Store, model: &Model) -> Result<Pass, Refusal> {
        if let Some(answer) = self.at_hand(model) {
            return answer;
        }
        let untold = self.known().untold_failures(model);
        if let Some(report) = untold {
            // What this gateway saw is told before it asks. That it may be on its way already does no harm: it is the same report.
            self.report_calls(store, &report).await;
        }
        let (token, asked) = (AttemptToken::random(), Instant::now());
        let admit = AdmitCall {
            token,
            provider: &self.provider,
            model: model.as_str(),
            breaker: self.breaker,
            permits_max: self.permits_max,
            lease_ms: millis(self.permit_lease),
            interval_us: self.interval_us,
            burst: self.burst,
            hold_max_ms: self.hold_max_ms,
        };
        match store.admit_call(&admit).await {
            Ok(Admitted::Admitted { kind, generation, place, permits }) => {
                let stands = match kind {
                    Kind::Call => Stands::Closed,
                    Kind::Probe => Stands::HalfOpen,
                };
                let place = self.learn(model, &place, asked, stands, Duration::ZERO, Some(generation));
                if self.permits_max > 0 {
                    metrics::fleet_permits(&self.provider, permits);
                }
                Ok(self.admitted(kind, generation, place, token))
            }
            Ok(Admitted::Refused { why, wait_ms, place }) => {
                let wait = Duration::from_millis(wait_ms);
                let (stands, wait) = match why {
                    Refused::Hold => (Stands::Hold, wait),
                    Refused::Breaker => (Stands::Open, wait),
                    // It may be over long before its lease is.
                    Refused::Probe => (Stands::HalfOpen, wait.min(WAIT_MAX)),
                    Refused::Permits => return Err(Refusal::new(&self.provider, Why::Fleet(why), WAIT_MAX / 2)),
                    Refused::Rate => return Err(Refusal::new(&self.provider, Why::Fleet(why), wait)),
                };
                self.learn(model, &place, asked, stands, wait, None);
                Err(Refusal::new(&self.provider, Why::Fleet(why), wait))
            }
            Err(error) => {
                tracing::debug!(provider = self.provider, %error, "redis does not say whether a provider may be called");
                if self.permits_max > 0 {
                    self.give_back(token);
                }
                Err(Refusal::new(&self.provider, Why::Store, WAIT_MAX))
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(self: &Arc<Self>, kind: Kind, generation: u64, place: Arc<str>, token: AttemptToken) -> Pass {
        Pass { guard: Arc::clone(self), kind, generation, place, token, told: false }
    }

    fn admitted(self: &Arc<Self>, kind: Kind, generation: u64, place: Arc<str>, token: AttemptToken) -> Pass {
        if self.permits_max > 0 {
            self.known().kept.insert(token);
        }
        self.pass(kind, generation, place, token)
    }

    /// Takes in what was said of a model's breaker.
    fn learn(
        &self,
        model: &Model,
        place: &str,
        asked: Instant,
        stands: Stands,
        wait: Duration,
        generation: Option<u64>,
    ) -> Arc<str> {
        let now = Instant::now();
        let mut known = self.known();
        let place = match known.breakers.get_key_value(place) {
            Some((place, _)) => Arc::clone(place),
            None => Arc::from(place),
        };
        if known.places.len() >= MODELS_KNOWN_MAX && !known.places.contains_key(model) {
            known.places.clear();
        }
        known.places.insert(model.clone(), Arc::clone(&place));
        let local = known.breakers.entry(Arc::clone(&place)).or_insert_with(|| Local {
            generation: 0,
            stands,
            until: now,
            asked,
            used: now,
            tally: Tally::default(),
            report: None,
        });
        local.used = now;
        local.take_in(asked, stands, now + wait, generation);
        place
    }

    /// A call is over.
    fn tell(&self, pass: &Pass, failed: Option<Failed>, hold: Option<Duration>) {
        let mut known = self.known();
        if let Some(hold) = hold.filter(|_| self.hold_max_ms > 0) {
            known.hold = known.hold.max(Some(hold));
            self.news.notify_one();
        }
        match (pass.kind, failed) {
            (Kind::Probe, failed) => {
                let outcome = match failed {
                    Some(Failed::No) => ProbeOutcome::Succeeded,
                    Some(Failed::Yes) => ProbeOutcome::Failed,
                    None => ProbeOutcome::GivenBack,
                };
                if known.probes.len() < PROBES_TOLD_MAX {
                    known.probes.push(Report {
                        token: AttemptToken::random(),
                        place: Arc::clone(&pass.place),
                        generation: pass.generation,
                        tally: Tally::default(),
                        probe: Some((pass.token, outcome)),
                        hold: Duration::ZERO,
                    });
                }
                self.news.notify_one();
            }
            (Kind::Call, Some(failed)) if self.breaker.is_some() => {
                let Some(local) = known.breakers.get_mut(&pass.place).filter(|local| local.generation == pass.generation) else {
                    return;
                };
                local.tally.count(failed);
                local.used = Instant::now();
                if failed == Failed::Yes {
                    self.news.notify_one();
                }
            }
            (Kind::Call, _) => {}
        }
    }

    fn give_back(&self, token: AttemptToken) {
        let mut known = self.known();
        known.kept.remove(&token);
        if known.returned.len() < RETURNED_MAX {
            known.returned.push(token);
        }
        self.news.notify_one();
    }

    /// Tells the fleet what there is to tell, and learns what it knows.
    async fn report(&self, store: &Store) {
        for report in self.probes_over() {
            let asked = Instant::now();
            if let Some(reported) = self.send(store, &report).await {
                let mut known = self.known();
                known.probes.retain(|probe| probe.token != report.token);
                known.hear(&report.place, asked, &reported);
                drop(known);
                self.speak_of(&report, &reported);
            }
        }
        self.report_hold(store).await;
        for report in self.due() {
            self.report_calls(store, &report).await;
        }
        self.report_permits(store).await;
        if self.breaker.is_some() {
            metrics::breaker_state(&self.provider, self.worst());
        }
    }

    async fn report_calls(&self, store: &Store, report: &Report) {
        let asked = Instant::now();
        let Some(reported) = self.send(store, report).await else { return };
        let mut known = self.known();
        if let Some(local) = known.breakers.get_mut(&report.place) {
            // Another one may be on its way by now.
            local.report.take_if(|sent| sent.token == report.token);
        }
        known.hear(&report.place, asked, &reported);
        drop(known);
        self.speak_of(report, &reported);
    }

    async fn report_hold(&self, store: &Store) {
        let Some(hold) = self.known().hold.take() else { return };
        let report = Report {
            token: AttemptToken::random(),
            place: Arc::from(""),
            generation: 0,
            tally: Tally::default(),
            probe: None,
            hold,
        };
        let asked = Instant::now();
        match self.send(store, &report).await {
            Some(reported) => {
                let until = Instant::now() + Duration::from_millis(reported.wait_ms);
                let mut known = self.known();
                for local in known.breakers.values_mut().filter(|local| local.stands == Stands::Closed) {
                    local.take_in(asked, reported.stands, until, None);
                }
            }
            None => {
                let mut known = self.known();
                known.hold = known.hold.max(Some(hold));
            }
        }
    }

    async fn report_permits(&self, store: &Store) {
        if self.permits_max == 0 {
            return;
        }
        let (kept, returned) = {
            let mut known = self.known();
            let due = known.extended.is_none_or(|at| at.elapsed() >= self.permit_lease / 3);
            let kept: Vec<AttemptToken> = if due { known.kept.iter().copied().collect() } else { Vec::new() };
            if due {
                known.extended = Some(Instant::now());
            }
            (kept, std::mem::take(&mut known.returned))
        };
        let calls = kept.len().max(returned.len()).div_ceil(PERMITS_AT_ONCE_MAX);
        let part = |tokens: &[AttemptToken], call: usize| {
            tokens.iter().skip(call * PERMITS_AT_ONCE_MAX).take(PERMITS_AT_ONCE_MAX).copied().collect::<Vec<_>>()
        };
        for call in 0..calls {
            let (kept, back) = (part(&kept, call), part(&returned, call));
            match store.extend_permits(&self.provider, &kept, &back, millis(self.permit_lease)).await {
                Ok(permits) => metrics::fleet_permits(&self.provider, permits),
                Err(error) => {
                    tracing::debug!(provider = self.provider, %error, "permits are not extended or given back yet");
                    let mut known = self.known();
                    known.returned.extend(back);
                    known.returned.truncate(RETURNED_MAX);
                    known.extended = None;
                }
            }
        }
    }

    async fn send(&self, store: &Store, report: &Report) -> Option<Reported> {
        let call = ReportCall {
            token: report.token,
            provider: &self.provider,
            place: if self.breaker.is_some() { &report.place } else { "" },
            generation: report.generation,
            tally: report.tally,
            probe: report.probe,
            breaker: self.breaker,
            hold_ms: millis(report.hold),
            hold_max_ms: self.hold_max_ms,
        };
        match store.report_call(&call).await {
            Ok(reported) => Some(reported),
            Err(error) => {
                tracing::debug!(provider = self.provider, %error, "a report about a provider has not arrived yet");
                None
            }
        }
    }

    /// Says what a report led to: once, where it happened.
    fn speak_of(&self, report: &Report, reported: &Reported) {
        let provider = &self.provider;
        match (reported.opened, report.probe) {
            (Opened::Yes, _) => {
                metrics::breaker_opened(provider);
                tracing::warn!(provider, open_ms = reported.wait_ms, "a breaker opens: the provider is left alone for a while");
            }
            (Opened::No, Some((_, ProbeOutcome::Succeeded))) if reported.counted == Counted::Yes => {
                tracing::info!(provider, "a probe succeeded: the breaker is closed");
            }
            (Opened::No, _) => {}
        }
    }

    fn probes_over(&self) -> Vec<Report> {
        self.known().probes.clone()
    }

    /// The reports that are due: what has been counted, and views that are to be renewed. Forgets what is not in use.
    fn due(&self) -> Vec<Report> {
        let now = Instant::now();
        let mut known = self.known();
        known.breakers.retain(|_, local| {
            now < local.used + IN_USE || local.tally.calls > 0 || local.report.is_some() || local.stands != Stands::Closed
        });
        let Known { places, breakers, .. } = &mut *known;
        places.retain(|_, place| breakers.contains_key(place));
        let mut due = Vec::new();
        for (place, local) in breakers {
            let renewed = if now < local.used + IN_USE { VIEW_RENEWED } else { VIEW_RENEWED_RARELY };
            if local.report.is_some() || local.tally.calls > 0 || now >= local.asked + renewed {
                due.push(local.gather(place));
            }
        }
        due
    }

    /// What its worst breaker says: 0 closed, 1 half open, 2 open.
    fn worst(&self) -> u8 {
        let of = |local: &Local| match local.stands {
            Stands::Closed | Stands::Hold => 0,
            Stands::HalfOpen => 1,
            Stands::Open => 2,
        };
        self.known().breakers.values().map(of).max().unwrap_or(0)
    }
}

impl Known {
    /// The report that has to be told before a question about this model is asked.
    fn untold_failures(&mut self, model: &Model) -> Option<Report> {
        let Known { places, breakers, .. } = self;
        let place = places.get(model)?;
        let local = breakers.get_mut(place).filter(|local| local.has_untold_failures())?;
        Some(local.gather(place))
    }

    fn hear(&mut self, place: &Arc<str>, asked: Instant, reported: &Reported) {
        let until = Instant::now() + Duration::from_millis(reported.wait_ms);
        if reported.counted == Counted::Stale && reported.generation == 0 {
            // Its place was given to another model.
            self.breakers.remove(place);
        } else if let Some(local) = self.breakers.get_mut(place) {
            local.take_in(asked, reported.stands, until, Some(reported.generation));
        }
    }
}

impl Local {
    /// Takes in an answer, unless a later question has been answered already.
    fn take_in(&mut self, asked: Instant, stands: Stands, until: Instant, generation: Option<u64>) {
        if let Some(generation) = generation.filter(|generation| *generation > self.generation) {
            // What was counted before is of calls that nobody asks for any more.
            self.tally = Tally::default();
            self.generation = generation;
        } else if asked < self.asked || generation.is_some_and(|generation| generation < self.generation) {
            return;
        }
        (self.asked, self.stands, self.until) = (asked, stands, until);
    }
}

/// What lets one call pass. On drop its permit is given back, and a probe that nothing was told of.
pub(crate) struct Pass {
    guard: Arc<Guard>,
    kind: Kind,
    generation: u64,
    place: Arc<str>,
    token: AttemptToken,
    told: bool,
}

impl Pass {
    /// The call is over: what it says of its provider's health, if anything, and how long that one wants to be left alone.
    pub(crate) fn tell(&mut self, failed: Option<Failed>, hold: Option<Duration>) {
        self.told = true;
        self.guard.tell(self, failed, hold);
    }

    pub(crate) fn guard(&self) -> &Guard {
        &self.guard
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.kind == Kind::Probe && !self.told {
            self.guard.tell(self, None, None);
        }
        if self.guard.permits_max > 0 {
            self.guard.give_back(self.token);
        }
    }
}

/// Tells the fleet, again and again, until the gateway stops.
pub(crate) async fn run(runtime: Arc<Inner>, guard: Arc<Guard>) {
    loop {
        tokio::select! {
            () = runtime.stopped.cancelled() => break,
            () = tokio::time::sleep(REPORT_EVERY) => {}
            () = guard.news.notified() => tokio::time::sleep(REPORT_GAP).await,
        }
        guard.report(&runtime.store).await;
    }
    // Permits that are not given back now are free when their leases lapse.
    let _ = tokio::time::timeout(LAST_REPORT, guard.report(&runtime.store)).await;
}

fn permille(ratio: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a checked share of 1, rounded up")]
    let permille = (ratio.clamp(0.0, 1.0) * 1000.0).ceil() as u64;
    permille
}

/// Rounded up: a limit is never exceeded for being rounded.
fn interval_us(per_second: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number of at most a day")]
    let interval = (1_000_000.0 / per_second.max(1e-6)).ceil() as u64;
    interval.max(1)
}
