//! What keeps a struggling provider from being hammered: who may go in, who waits, and what is told of it.
//!
//! The fleet's knowledge is in Redis (`lua/admit_call.lua`, `lua/report_call.lua`); a gateway's view of it, with a short life, is in
//! `guard.rs`. A closed breaker costs no round trip; anything else, and every limit of the fleet, is asked for, after the claim: a
//! duplicate takes no turn and no probe. What is refused here is no try of the job: nothing was sent and nothing is counted. It goes
//! to another provider where what was not sent may, waits here for a short time, or is put off in its record. All of them refused is
//! all of them refused: nobody is called because nobody is left.
//!
//! Deliberately not here: attempts that executors outside make; they keep to their own limits.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::attempt::AttemptToken;
use crate::job::{Body, JobId, JobState};
use crate::metrics;
use crate::policy::{self, BudgetWindow, Open, Rate, RetryBudget, Taken, Try};
use crate::provider::Outcome;
use crate::runtime::attempts::{Room, Running, Work, lane_of};
use crate::runtime::verdict::FENCED;
use crate::runtime::{Inner, Lane, Route, certificates, millis, sweeper};
use crate::store::{Failed, PostponeJob, Postponed, Refused};

mod guard;
mod model;

pub(super) use guard::{Guard, Pass, run};
pub(super) use model::Model;

/// The shortest wait before somebody asks again.
const WAIT_MIN: Duration = Duration::from_millis(50);
/// The longest wait of which nobody knows how long it will be: for a permit, for a probe's end, for Redis.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// What a runtime keeps its providers from. What is not named is not limited.
#[derive(Clone, Debug, Default)]
pub struct Protection {
    /// By provider.
    pub providers: BTreeMap<String, ProviderProtection>,
    /// Retry budgets by route.
    pub retry_budgets: BTreeMap<String, RetryBudget>,
}

/// What the whole fleet keeps a provider from.
#[derive(Clone, Debug, Default)]
pub struct ProviderProtection {
    /// Most calls at once.
    pub fleet_in_flight: Option<u32>,
    /// How many calls a second.
    pub rate: Option<Rate>,
    /// When it is left alone for a while.
    pub breaker: Option<policy::Breaker>,
    /// How long a 429's `Retry-After` keeps everybody away, at most.
    pub hold_max: Option<Duration>,
}

impl ProviderProtection {
    fn is_nothing(&self) -> bool {
        self.fleet_in_flight.is_none() && self.rate.is_none() && self.breaker.is_none() && self.hold_max.is_none()
    }
}

/// What keeps an attempt from beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// What the fleet knows of the provider.
    Fleet(Refused),
    /// The route's further attempts are used up for now.
    Budget,
    /// Redis does not say whether it may.
    Store,
}

impl Why {
    pub(super) fn word(self) -> &'static str {
        match self {
            Why::Fleet(Refused::Hold) => "hold",
            Why::Fleet(Refused::Breaker) => "breaker",
            Why::Fleet(Refused::Probe) => "probe",
            Why::Fleet(Refused::Permits) => "permits",
            Why::Fleet(Refused::Rate) => "rate",
            Why::Budget => "budget",
            Why::Store => "store",
        }
    }

    /// Whether it is a matter of turns: the next one is whoever has waited longest.
    fn is_of_turns(self) -> bool {
        match self {
            Why::Fleet(Refused::Permits | Refused::Rate) => true,
            Why::Fleet(Refused::Hold | Refused::Breaker | Refused::Probe) | Why::Budget | Why::Store => false,
        }
    }
}

/// A refusal by our own protection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) provider: String,
    pub(super) why: Why,
    /// When to ask again.
    pub(super) wait: Duration,
}

impl Refusal {
    fn new(provider: &str, why: Why, wait: Duration) -> Self {
        metrics::refused(provider, why.word());
        Refusal { provider: provider.to_owned(), why, wait: wait.max(WAIT_MIN) }
    }

    /// Why, and until when, by Redis' clock.
    pub(super) fn reason(&self, now_ms: u64) -> String {
        let until = SystemTime::UNIX_EPOCH + Duration::from_millis(now_ms) + self.wait;
        format!("{self} until {}", humantime::format_rfc3339_seconds(until))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let provider = &self.provider;
        match self.why {
            Why::Fleet(Refused::Hold) => write!(f, "hold: {provider} wants to be left alone"),
            Why::Fleet(Refused::Breaker) => write!(f, "breaker: {provider} is not called"),
            Why::Fleet(Refused::Probe) => write!(f, "probe: {provider} is being tried by another call"),
            Why::Fleet(Refused::Permits) => write!(f, "permits: {provider} has as many calls of the fleet as it may"),
            Why::Fleet(Refused::Rate) => write!(f, "rate: {provider} is called as often as it may"),
            Why::Budget => write!(f, "retry_budget: no further attempt at {provider}"),
            Why::Store => write!(f, "store: redis does not say whether {provider} may be called"),
        }
    }
}

/// Whether an attempt is its job's first, or a further one: a retry, a failover, a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    First,
    Further,
}

impl Turn {
    pub(super) fn after(tries: &[Try]) -> Self {
        if tries.is_empty() { Turn::First } else { Turn::Further }
    }
}

/// The retry budgets of a gateway, by route.
pub(super) struct Budgets {
    began: Instant,
    routes: BTreeMap<String, Arc<Budget>>,
}

struct Budget {
    rules: RetryBudget,
    window: Mutex<BudgetWindow>,
    began: Instant,
}

impl Budget {
    fn with<T>(&self, change: impl FnOnce(&mut BudgetWindow, u64) -> T) -> T {
        let second = self.began.elapsed().as_secs();
        change(&mut self.window.lock().unwrap_or_else(PoisonError::into_inner), second)
    }
}

impl Budgets {
    pub(super) fn new(rules: &BTreeMap<String, RetryBudget>) -> Self {
        let began = Instant::now();
        let budget = |rules: &RetryBudget| Arc::new(Budget { rules: *rules, window: Mutex::default(), began });
        Budgets { began, routes: rules.iter().map(|(route, rules)| (route.clone(), budget(rules))).collect() }
    }

    /// A share for one attempt; `None` if the budget is used up.
    fn share(&self, route: &Route, turn: Turn) -> Option<Share> {
        let Some(budget) = self.routes.get(&route.name) else { return Some(Share::default()) };
        let taken = match turn {
            Turn::First => None,
            Turn::Further => Some(budget.with(|window, second| window.take(budget.rules, second))?),
        };
        debug_assert!(self.began <= budget.began);
        Some(Share(Some(Unspent { budget: Arc::clone(budget), taken })))
    }
}

/// A share of a retry budget. Put back on drop, unless its attempt began.
#[derive(Default)]
pub(super) struct Share(Option<Unspent>);

struct Unspent {
    budget: Arc<Budget>,
    taken: Option<Taken>,
}

impl Share {
    /// Its attempt begins.
    pub(super) fn spend(&mut self) {
        if let Some(Unspent { budget, taken: None }) = self.0.take() {
            budget.with(BudgetWindow::first);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some(Unspent { budget, taken: Some(taken) }) = self.0.take() {
            budget.with(|window, _| window.put_back(taken));
        }
    }
}

/// What an outcome says of its provider's health; `None` if nothing.
pub(super) fn health(attempt: &Running, outcome: &Outcome, statuses: &[u16]) -> Option<Failed> {
    match outcome {
        // A definite 5xx and what is configured as such; any other refusal is the answer of somebody who is well.
        Outcome::Rejected { response, .. } if response.status >= 500 || statuses.contains(&response.status) => Some(Failed::Yes),
        Outcome::Succeeded { .. } | Outcome::InvalidOutput { .. } | Outcome::Rejected { .. } => Some(Failed::No),
        // Whoever asked to cancel may be why it ended so.
        Outcome::Unknown { .. } | Outcome::NotSent { .. } if attempt.is_canceling() => None,
        // Our own lease ran out, or the job's time before it was sent; or we kept it back ourselves.
        Outcome::NotSent { reason } if attempt.fence.lease().is_err() || is_our_own(reason) => None,
        Outcome::Unknown { .. } | Outcome::NotSent { .. } => Some(Failed::Yes),
    }
}

/// How the reason of a call begins that was not made because its job's time was over.
pub(super) const DEADLINE: &str = "deadline: ";

fn is_our_own(reason: &str) -> bool {
    [DEADLINE, FENCED, policy::DENIED].iter().any(|word| reason.starts_with(word))
}

impl Inner {
    /// Which model a request names, if a breaker of the route's providers wants to know.
    pub(super) fn model_of(&self, route: &Route, body: &[u8]) -> Model {
        if self.wants_model(route) { Model::of(body) } else { Model::default() }
    }

    fn wants_model(&self, route: &Route) -> bool {
        let guards = |name: &String| self.providers.get(name).and_then(|lane| lane.guard.as_ref());
        self.guarded && route.providers.iter().filter_map(guards).any(|guard| guard.has_breaker())
    }

    /// Room for a job's first attempt, if there is some right now and nobody need be asked for it.
    pub(super) fn try_enter(&self, lane: &Lane, route: &Route, body: &[u8]) -> Option<Room> {
        let mut room = self.try_room(lane)?;
        if let Some(guard) = &lane.guard {
            room.pass = Some(guard.at_hand(&self.model_of(route, body))?.ok()?);
        }
        room.share = self.budgets.share(route, Turn::First)?;
        Some(room)
    }

    /// Asks for what an attempt needs besides room here.
    pub(super) async fn admit(
        &self,
        mut room: Room,
        lane: &Lane,
        route: &Route,
        model: &Model,
        turn: Turn,
    ) -> Result<Room, Refusal> {
        let Some(share) = self.budgets.share(route, turn) else {
            return Err(Refusal::new(&lane.slot.name, Why::Budget, WAIT_MAX));
        };
        room.share = share;
        if let Some(guard) = &lane.guard {
            room.pass = Some(guard.ask(&self.store, model).await?);
        }
        Ok(room)
    }

    /// Room at a provider, or elsewhere where it may go; asks, and does not wait.
    pub(super) async fn enter_now(
        &self,
        route: &Arc<Route>,
        place: usize,
        (model, open): (&Model, &Open),
        turn: Turn,
    ) -> Result<(usize, Room), Kept> {
        let mut kept = Kept::Full;
        for place in std::iter::once(place).chain(route.plan.elsewhere(place, open)) {
            let Some(lane) = lane_of(self, route, place) else { continue };
            let Some(room) = self.try_room(&lane) else { continue };
            match self.admit(room, &lane, route, model, turn).await {
                Ok(room) => return Ok((place, room)),
                Err(refusal) => kept = kept.or_sooner(refusal),
            }
        }
        Err(kept)
    }

    /// The model that a kept input names, if anybody wants to know. An input that cannot be read names none.
    ///
    /// Its members are passed over, not built: it is safe to look at before the slot is taken.
    pub(super) async fn model_of_kept(&self, route: &Route, job: JobId, input: &Body) -> Model {
        if !self.wants_model(route) {
            return Model::default();
        }
        match self.store.body(job.identity(), input).await {
            Ok(body) => Model::of(&body),
            Err(_) => Model::default(),
        }
    }
}

/// Why nobody was let in.
pub(super) enum Kept {
    /// No room on this gateway.
    Full,
    /// Our own protection; of several refusals the one that is over first.
    Refused(Refusal),
}

impl Kept {
    fn or_sooner(self, refusal: Refusal) -> Self {
        match self {
            Kept::Refused(sooner) if sooner.wait <= refusal.wait => Kept::Refused(sooner),
            Kept::Full | Kept::Refused(_) => Kept::Refused(refusal),
        }
    }
}

/// Waits for room at a provider, or elsewhere where what was not sent may go. What would take longer than `within` is put off in
/// the job's record, and the job is left to whoever looks at it then: `None`.
pub(super) async fn enter(
    runtime: &Arc<Inner>,
    work: &Work,
    place: usize,
    holder: Option<AttemptToken>,
    within: Duration,
) -> Option<(usize, Arc<Lane>, Room)> {
    let until = Instant::now() + within;
    let left = || until.saturating_duration_since(Instant::now());
    let (route, turn) = (&work.route, Turn::after(&work.tries));
    let model = runtime.model_of(route, &work.request.body);
    let lane = lane_of(runtime, route, place)?;
    let mut queue = None;
    let mut pause = WAIT_MIN;
    loop {
        if let Some(guard) = lane.guard.as_ref().filter(|guard| guard.has_turns() && queue.is_none()) {
            queue = tokio::time::timeout(left(), guard.queue()).await.ok();
            if queue.is_none() {
                let refusal = Refusal::new(&lane.slot.name, Why::Fleet(Refused::Permits), WAIT_MAX);
                postpone(runtime, work.job, holder, &refusal).await;
                return None;
            }
        }
        let room = runtime.room(&lane, left()).await?;
        let refusal = match runtime.admit(room, &lane, route, &model, turn).await {
            Ok(room) => return Some((place, Arc::clone(&lane), room)),
            Err(refusal) => refusal,
        };
        let mut sooner = refusal.clone();
        let open = certificates::open(runtime, route, &work.request).await.open;
        for other in route.plan.elsewhere(place, &open) {
            let Some(lane) = lane_of(runtime, route, other) else { continue };
            let Some(room) = runtime.try_room(&lane) else { continue };
            match runtime.admit(room, &lane, route, &model, turn).await {
                Ok(room) => {
                    tracing::debug!(job = %work.job, provider = lane.slot.name, why = %refusal, "a job goes elsewhere");
                    return Some((other, lane, room));
                }
                Err(other) if other.wait < sooner.wait => sooner = other,
                Err(_) => {}
            }
        }
        if !refusal.why.is_of_turns() {
            // Others may be let in meanwhile: for another model, or by another route.
            queue = None;
        }
        let wait = if sooner.why == Why::Fleet(Refused::Permits) { pause } else { sooner.wait };
        pause = (pause * 2).min(WAIT_MAX / 2);
        if wait >= left() {
            postpone(runtime, work.job, holder, &sooner).await;
            return None;
        }
        tokio::select! {
            () = runtime.timers.pause(wait) => {}
            () = runtime.stopping.cancelled() => return None,
        }
        if runtime.stopped.is_cancelled() {
            return None;
        }
    }
}

/// Writes down that a pending job waits, and why. Returns when to look at it again, by Redis' clock; 0 if it is over or somebody
/// else's.
pub(super) async fn postpone(runtime: &Arc<Inner>, job: JobId, holder: Option<AttemptToken>, refusal: &Refusal) -> u64 {
    let reason = refusal.reason(runtime.store.now_ms());
    put_off(runtime, job, holder, refusal.wait, &reason).await
}

/// Writes down that a pending job waits for so long, and why. Returns as [`postpone`].
pub(super) async fn put_off(runtime: &Arc<Inner>, job: JobId, holder: Option<AttemptToken>, wait: Duration, reason: &str) -> u64 {
    let now_ms = runtime.store.now_ms();
    // Those that wait for the same moment do not come at once.
    let token = AttemptToken::random();
    let jitter = wait.min(WAIT_MAX * 5).mul_f64(f64::from(token.as_bytes()[0]) / 1280.0);
    let postpone = PostponeJob { job, token, holder, delay_ms: millis(wait + jitter), reason };
    match runtime.store.postpone_job(&postpone).await {
        Ok(Postponed::Postponed { next_at_ms }) => {
            tracing::debug!(%job, reason, "a job waits");
            runtime.waiters.wake(job.identity());
            next_at_ms
        }
        Ok(Postponed::TooEarly { wait_ms }) => now_ms + wait_ms,
        Ok(Postponed::Ended { state: JobState::Failed }) => {
            metrics::job_ended(JobState::Failed.as_str());
            let _ = runtime.store.announce_now(job.identity()).await;
            runtime.waiters.wake(job.identity());
            sweeper::look_soon(Arc::clone(runtime), job.identity()).await;
            0
        }
        Ok(Postponed::Begun | Postponed::Canceling | Postponed::Ended { .. } | Postponed::NotFound) => 0,
        Err(error) => {
            tracing::debug!(%job, %error, "a wait is not written down; the job is looked at when its lease has lapsed");
            now_ms + millis(runtime.options.lease)
        }
    }
}
