//! One attempt after another: the call to the provider, its heartbeats, its end, and what comes next.
//!
//! The order is the promise: the write-ahead is in Redis before the fence lets the first byte pass; a result in hand is stored
//! before anybody is told; a beginning whose fate is not known is never sent.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use crate::attempt::{AttemptState, AttemptToken, FinishOutcome};
use crate::error::StoreError;
use crate::failpoint::failpoint;
use crate::job::{Body, Class, JobId, Payload};
use crate::metrics;
use crate::policy::{FailoverOn, Next, Try};
use crate::provider::{Call, Fence, Outcome, Rendered, Request, Telling, boottime_ms};
use crate::runtime::certificates::{self, Grant};
use crate::runtime::losses::{self, What};
use crate::runtime::protection::{self, Pass, Share, Turn};
use crate::runtime::timers::Timer;
use crate::runtime::verdict::{Verdict, Whose, conclude, try_store};
use crate::runtime::{Inner, Lane, Route, attempt_key, delivered, millis, sweeper, told};
use crate::store::{
    Begin, BeginAttempt, Begun, Canceling, Extended, FinishAttempt, Finished, Follow, Read, SubmitJob, Tell, WriteAhead,
    bytes_life,
};

/// The first pause before a call to the store is made again; doubles up to [`STORE_PAUSE_MAX`].
pub(super) const STORE_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause before a call to the store is made again.
pub(super) const STORE_PAUSE_MAX: Duration = Duration::from_secs(2);
/// The first pause before a race that may not begin yet tries again; doubles up to [`RACE_PAUSE_MAX`].
const RACE_PAUSE: Duration = Duration::from_millis(50);
/// The last pause of a race that may not begin yet. With those before it six seconds; a clock that is set back by more costs the
/// race, not the job.
const RACE_PAUSE_MAX: Duration = Duration::from_millis(3200);
/// How long a gateway tries to give back what it may have begun, while Redis does not answer. It knows that nothing was sent; later
/// the attempt would stay unknown until a person resolves it.
const SETTLE_MAX: Duration = Duration::from_secs(600);
/// How the reason of an attempt begins that was not sent because too few had its write-ahead.
const NOT_DURABLE: &str = "not_durable: ";
/// How long a stopping gateway tries to write down that an attempt became unknown.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// How long a stopping gateway waits for its results in hand to be in the spool.
const LAST_WRITES: Duration = Duration::from_secs(10);

/// A job that this gateway works on.
#[derive(Clone)]
pub(crate) struct Work {
    pub(crate) job: JobId,
    pub(crate) route: Arc<Route>,
    pub(crate) request: Arc<Request>,
    /// Where the request's body is kept.
    pub(crate) input: Body,
    pub(crate) traceparent: Option<String>,
    /// What was tried, in order.
    pub(crate) tries: Vec<Try>,
    /// The job's deadline, on our clock.
    pub(crate) deadline: Option<Instant>,
    /// The hint that this gateway wrote for the job, if it did: a later one does not put it off.
    pub(crate) hint_ms: Option<u64>,
}

/// An attempt that runs here.
pub(crate) struct Running {
    pub(super) job: JobId,
    pub(super) number: u32,
    pub(super) token: AttemptToken,
    pub(super) lane: Arc<Lane>,
    /// The attempt's provider, by its place in the route.
    pub(super) place: usize,
    /// The certificate under which it was allowed, `""` for none.
    pub(super) certificate: String,
    pub(super) fence: Fence,
    pub(super) sequence: AtomicU64,
    /// The hint that was written for it, to be taken away at its end; `None` to leave it.
    pub(super) hint_ms: Option<u64>,
    /// When its retained bytes are to be stripped, from the end of the job; 0 for never.
    pub(super) strip_after_ms: u64,
    /// Where the job's input is kept.
    pub(super) input: Body,
    /// How long input and result are kept from the end of the job.
    pub(super) bytes_life: Duration,
    /// How long its job's key stands, from the end of the job.
    pub(super) key_life: Duration,
    /// Whether its time is over and its call listens on for a late answer.
    pub(super) overdue: CancellationToken,
    /// Whether it is written down as unknown though its call goes on.
    pub(super) noted_unknown: CancellationToken,
    /// Whether it has ended, and the store is yet to take it.
    pub(super) in_hand: AtomicBool,
    /// Whether it was found to be lost.
    missed: AtomicBool,
    /// Whether somebody asked to cancel its job, as of the last heartbeat.
    pub(super) canceling: AtomicBool,
    /// Whether another attempt of its race may have begun: then the job's end is not the end of its attempts.
    pub(super) raced: AtomicBool,
    /// The provider's own name for the work, once it is told.
    pub(super) remote_id: OnceLock<String>,
    /// Cancelled once somebody else has settled it: by a webhook, here or on another gateway.
    pub(super) settled: CancellationToken,
}

/// Room for one attempt: among our jobs, at its provider, and in what protects that one.
pub(crate) struct Room {
    _job: OwnedSemaphorePermit,
    _provider: OwnedSemaphorePermit,
    pub(super) pass: Option<Pass>,
    pub(super) share: Share,
}

impl Room {
    fn new(job: OwnedSemaphorePermit, provider: OwnedSemaphorePermit) -> Self {
        Room { _job: job, _provider: provider, pass: None, share: Share::default() }
    }

    /// Its call is over.
    fn tell(&mut self, attempt: &Running, outcome: &Outcome) {
        let Some(pass) = &mut self.pass else { return };
        let hold = match outcome {
            Outcome::Rejected { response, retry_after, .. } if response.status == 429 => *retry_after,
            Outcome::Rejected { .. }
            | Outcome::Succeeded { .. }
            | Outcome::InvalidOutput { .. }
            | Outcome::NotSent { .. }
            | Outcome::Unknown { .. } => None,
        };
        pass.tell(protection::health(attempt, outcome, pass.guard().statuses()), hold);
    }
}

/// How a shutdown went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Attempts that were running when the shutdown began.
    pub running: usize,
    /// Of these, how many became unknown because the drain was over.
    pub unknown: usize,
    /// Of these, how many could not even be written down as unknown; their leases will lapse.
    pub unwritten: usize,
    /// Of these, how many had ended with what the store did not take: it is in the spool, and stored at the next start.
    pub spooled: usize,
}

impl Running {
    pub(crate) fn new(
        runtime: &Arc<Inner>,
        work: &Work,
        lane: Arc<Lane>,
        (number, token): (u32, AttemptToken),
        grant: Grant,
        lease_from_ms: u64,
        hint_ms: Option<u64>,
    ) -> Arc<Self> {
        let rules = &work.route.rules;
        let place = work.route.providers.iter().position(|name| *name == lane.slot.name).unwrap_or_default();
        let attempt = Arc::new(Running {
            job: work.job,
            number,
            token,
            lane,
            place,
            fence: grant.fence(Fence::until(runtime.fence_ms(lease_from_ms))),
            certificate: grant.certificate,
            sequence: AtomicU64::new(0),
            hint_ms,
            strip_after_ms: if rules.retention_ms < rules.key_life_ms { rules.retention_ms } else { 0 },
            input: work.input.clone(),
            bytes_life: bytes_life(rules),
            key_life: Duration::from_millis(rules.key_life_ms),
            overdue: CancellationToken::new(),
            noted_unknown: CancellationToken::new(),
            in_hand: AtomicBool::new(false),
            missed: AtomicBool::new(false),
            canceling: AtomicBool::new(false),
            raced: AtomicBool::new(false),
            remote_id: OnceLock::new(),
            settled: CancellationToken::new(),
        });
        runtime.running().insert(token, Arc::clone(&attempt));
        attempt
    }

    /// Its job, or its row in it, is not in the store any more. Counted once.
    pub(super) fn miss(&self) {
        if !self.missed.swap(true, Ordering::Relaxed) {
            losses::lost(What::Attempt, self.job);
        }
    }

    /// Whether somebody asked to cancel its job, as of the last heartbeat.
    pub(super) fn is_canceling(&self) -> bool {
        self.canceling.load(Ordering::Relaxed)
    }

    /// What storing its end takes.
    pub(super) fn whose(&self) -> Whose {
        let Running { job, number, token, strip_after_ms, bytes_life, .. } = *self;
        // Whatever ran beside it is looked at when its lease is over, should its gateway die.
        let hint_ms = self.hint_ms.filter(|_| !self.raced.load(Ordering::Relaxed));
        Whose { job, number, token, hint_ms, strip_after_ms, input: self.input.clone(), bytes_life }
    }
}

impl Inner {
    /// Until when an attempt may be sent, whose lease was asked for at this moment.
    pub(super) fn fence_ms(&self, lease_from_ms: u64) -> u64 {
        lease_from_ms + millis(self.options.lease.saturating_sub(self.options.lease_margin))
    }

    /// Room for one more attempt, if there is some right now.
    pub(crate) fn try_room(&self, lane: &Lane) -> Option<Room> {
        let job = Arc::clone(&self.jobs).try_acquire_owned().ok()?;
        let provider = Arc::clone(&lane.permits).try_acquire_owned().ok()?;
        Some(Room::new(job, provider))
    }

    /// Waits for room, but not for longer than `within`, and not once the gateway stops.
    pub(super) async fn room(&self, lane: &Lane, within: Duration) -> Option<Room> {
        let acquire = async {
            let provider = Arc::clone(&lane.permits).acquire_owned().await.ok()?;
            let job = Arc::clone(&self.jobs).acquire_owned().await.ok()?;
            Some(Room::new(job, provider))
        };
        tokio::select! {
            room = acquire => room,
            () = tokio::time::sleep(within) => None,
            () = self.stopping.cancelled() => None,
        }
    }

    /// How long an attempt of a race runs before another may begin.
    fn race_after(&self, route: &Route, lane: &Lane) -> Duration {
        match route.tracked {
            None => Duration::from_millis(route.rules.race_after_ms),
            Some(tracked) => self.latencies.of(&route.name, &lane.slot.name).after(tracked),
        }
    }

    /// Whether as many attempts of a race run here as may run at all.
    fn race_is_full(&self, work: &Work) -> bool {
        let beside = self.running().values().filter(|attempt| attempt.job == work.job).count();
        beside >= work.route.rules.race_max as usize
    }

    /// A submit whose reply was lost: finds out whether the claim was made, and if so, gives its attempt back unsent.
    ///
    /// `held` is what the job would have taken here: as many claims can be settled at once as there is room for jobs.
    pub(crate) fn settle_claim(
        self: &Arc<Self>,
        submit: &SubmitJob<'_>,
        why: &StoreError,
        held: (Option<Room>, Option<Pending>),
    ) {
        let reason = unconfirmed(why, "claim not confirmed");
        let (runtime, identity, token) = (Arc::clone(self), submit.id.identity(), submit.token);
        self.work.spawn(async move {
            let held = held;
            let (began, mut pause) = (Instant::now(), STORE_PAUSE);
            while began.elapsed() < SETTLE_MAX && !runtime.stopped.is_cancelled() {
                match runtime.store.read_job(identity).await {
                    Ok(Read::Found(job)) => {
                        let ours = job.attempts.first().is_some_and(|attempt| attempt.token == token);
                        if !ours || give_back(&runtime, job.id, 1, token, &reason, 0).await.is_ok() {
                            drop(held);
                            // Without a holder it goes on at once, here or elsewhere.
                            sweeper::look_soon(Arc::clone(&runtime), identity).await;
                            return;
                        }
                    }
                    // It may still arrive, but no longer than its own lease.
                    Ok(Read::Gone(_) | Read::NotFound) if began.elapsed() >= runtime.options.lease => return,
                    Ok(Read::Gone(_) | Read::NotFound) | Err(_) => {}
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(STORE_PAUSE_MAX);
            }
        });
    }
}

/// Why an attempt is given back whose beginning is not certain, or not durable.
pub(super) fn unconfirmed(why: &StoreError, otherwise: &str) -> String {
    match why {
        StoreError::NotDurable { have, want } => format!("{NOT_DURABLE}{have} of {want} had its write-ahead in time"),
        StoreError::NotExecuted { .. } | StoreError::Ambiguous { .. } | StoreError::Fatal { .. } => otherwise.to_owned(),
    }
}

/// Says of an attempt that nothing was sent for it, and that another may begin after a while.
pub(super) async fn give_back(
    runtime: &Arc<Inner>,
    job: JobId,
    number: u32,
    token: AttemptToken,
    reason: &str,
    delay_ms: u64,
) -> Result<Finished, StoreError> {
    let finish = FinishAttempt {
        job,
        number,
        token,
        outcome: FinishOutcome::Aborted,
        result: &Payload::default(),
        reason,
        remote_id: "",
        model: "",
        follow: Follow::Retry { delay_ms, hold_ms: 0 },
        hint_ms: None,
        strip_at_ms: None,
        tell: Tell::Nothing,
    };
    runtime.store.finish_attempt(&finish).await
}

/// Drives a job from an attempt that has begun until it has ended, or until somebody else must go on.
pub(crate) async fn drive(
    runtime: Arc<Inner>,
    mut work: Work,
    mut attempt: Arc<Running>,
    mut rendered: Rendered,
    mut room: Room,
    began: Instant,
) {
    // Calls to providers, and delays that somebody wanted: not ours.
    let mut apart = Duration::ZERO;
    loop {
        runtime.timers.set(Timer::Heartbeat(Arc::downgrade(&attempt)), runtime.options.lease / 3).await;
        if work.route.class == Class::Race {
            let after = runtime.race_after(&work.route, &attempt.lane);
            let mut beside = work.clone();
            // The racer goes on from the attempt that is still running, which is no failed try yet.
            beside.tries.push(Try { provider: attempt.place, failure: FailoverOn::NotSent });
            runtime.timers.set(Timer::Race(Arc::downgrade(&attempt), Box::new(beside)), after).await;
        }
        let called = Instant::now();
        room.share.spend();
        let outcome = {
            let mut calling = std::pin::pin!(call(&runtime, &work, &attempt, rendered));
            tokio::select! {
                biased;
                outcome = &mut calling => {
                    room.tell(&attempt, &outcome);
                    outcome
                }
                () = attempt.overdue.cancelled() => {
                    // What it says late does not change that it was late.
                    room.tell(&attempt, &Outcome::Unknown { reason: String::new() });
                    calling.await
                }
            }
        };
        failpoint!("call.answered");
        if work.route.tracked.is_some() && matches!(outcome, Outcome::Succeeded { .. }) {
            runtime.latencies.of(&work.route.name, &attempt.lane.slot.name).add(called.elapsed());
        }
        apart += called.elapsed();
        let next = match outcome {
            // What the provider told by itself is in the record; that we stopped asking is no news.
            Outcome::Unknown { .. } if attempt.settled.is_cancelled() => None,
            outcome => conclude(&runtime, &mut work, &attempt, outcome).await,
        };
        runtime.running().remove(&attempt.token);
        drop(room);
        runtime.waiters.wake(work.job.identity());
        let Some((place, delay)) = next else { break };
        let holder = attempt.token;
        drop(attempt);
        apart += delay;
        match begin_next(&runtime, &work, place, delay, Some(holder)).await {
            Some(begun) => (attempt, rendered, room) = begun,
            None => break,
        }
    }
    metrics::overhead(began.elapsed().saturating_sub(apart));
}

/// Drives a job that was claimed without an attempt, because there was no room for one.
pub(crate) async fn drive_pending(runtime: Arc<Inner>, work: Work, holder: AttemptToken, lease_from_ms: u64, _pending: Pending) {
    let left = runtime.fence_ms(lease_from_ms).saturating_sub(boottime_ms());
    // Past its lease, whoever has room may take the job.
    if let Some((began, (attempt, rendered, room))) =
        enter_and_begin(&runtime, &work, 0, Some(holder), Duration::from_millis(left)).await
    {
        drive(runtime, work, attempt, rendered, room, began).await;
    }
}

/// Begins another attempt of a race beside the one that is running, if the scripts allow it.
///
/// By Redis' clock the running one may be younger than by ours. Then it tries again for a while, as long as that one runs.
pub(crate) async fn race(runtime: Arc<Inner>, beside: Weak<Running>, work: Work) {
    let Some(last) = work.tries.last() else { return };
    let leave = certificates::open(&runtime, &work.route, &work.request).await;
    let (place, denied) = work.route.plan.beside(last.provider, &leave.open);
    if let Some(denied) = denied {
        metrics::failover_denied(&work.route.name, leave.word(denied));
        tracing::warn!(job = %work.job, why = leave.say(&work.route, denied), "a race goes on without a provider");
    }
    let Some(lane) = lane_of(&runtime, &work.route, place) else { return };
    let model = runtime.model_of(&work.route, &work.request.body);
    let mut pause = RACE_PAUSE;
    loop {
        let Some(room) = runtime.try_room(&lane) else { return };
        let Ok(room) = runtime.admit(room, &lane, &work.route, &model, Turn::Further).await else { return };
        let began = Instant::now();
        match beside.upgrade() {
            // Before it begins: one of the two may end the job at any moment from then on.
            Some(beside) => beside.raced.store(true, Ordering::Relaxed),
            None => return,
        }
        match begin(&runtime, &work, place, None, room, Arc::clone(&lane)).await {
            Ok((attempt, rendered, room)) => {
                attempt.raced.store(true, Ordering::Relaxed);
                return drive(runtime, work, attempt, rendered, room, began).await;
            }
            Err(NotBegun::BesideRunning) if pause <= RACE_PAUSE_MAX && !runtime.race_is_full(&work) => {}
            Err(NotBegun::BesideRunning | NotBegun::Denied(_) | NotBegun::Otherwise) => return,
        }
        tokio::select! {
            () = runtime.timers.pause(pause) => {}
            () = runtime.stopping.cancelled() => return,
        }
        if beside.strong_count() == 0 {
            return;
        }
        pause *= 2;
    }
}

/// Counts a job that waits here for room or for its next attempt.
pub(crate) struct Pending(Arc<Inner>);

impl Pending {
    /// A place to wait for room or for a moment, if not too many wait already: a waiting job holds its request in memory.
    pub(crate) fn try_count(runtime: &Arc<Inner>) -> Option<Self> {
        let others = runtime.pending.fetch_add(1, Ordering::Relaxed);
        let pending = Pending(Arc::clone(runtime));
        (others < runtime.options.jobs_max).then_some(pending)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) fn lane_of(runtime: &Inner, route: &Route, place: usize) -> Option<Arc<Lane>> {
    let name = route.providers.get(place)?;
    runtime.providers.get(name).map(Arc::clone)
}

/// Waits out a delay and for room, then begins the next attempt.
async fn begin_next(
    runtime: &Arc<Inner>,
    work: &Work,
    place: usize,
    delay: Duration,
    holder: Option<AttemptToken>,
) -> Option<(Arc<Running>, Rendered, Room)> {
    // Beyond the limit the job is left to whoever has room, a lease after its time has come.
    let _pending = Pending::try_count(runtime)?;
    if !delay.is_zero() {
        tokio::select! {
            () = runtime.timers.pause(delay) => {}
            () = runtime.stopping.cancelled() => return None,
        }
    }
    let within = runtime.options.lease / 2;
    enter_and_begin(runtime, work, place, holder, within).await.map(|(_, begun)| begun)
}

/// Waits for room, then begins; says also when it began to. What is denied at the last moment goes on as if nobody had thought of
/// going there: at once where nothing was tried, else after the pause that the plan has for a repetition.
async fn enter_and_begin(
    runtime: &Arc<Inner>,
    work: &Work,
    mut place: usize,
    holder: Option<AttemptToken>,
    within: Duration,
) -> Option<(Instant, (Arc<Running>, Rendered, Room))> {
    // At each provider once; what changes all the time while we look is left to whoever looks later.
    for _ in 0..=work.route.providers.len() {
        let (entered, lane, room) = protection::enter(runtime, work, place, holder, within).await?;
        let began = Instant::now();
        let why = match begin(runtime, work, entered, holder, room, lane).await {
            Ok(begun) => return Some((began, begun)),
            Err(NotBegun::Denied(why)) => why,
            Err(NotBegun::BesideRunning | NotBegun::Otherwise) => return None,
        };
        let open = certificates::open(runtime, &work.route, &work.request).await.open;
        let remaining = work.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match work.route.plan.after(&work.tries, None, remaining, &open) {
            Next::Begin { provider, delay, .. } if delay.is_zero() => place = provider,
            Next::Begin { delay, .. } => {
                protection::put_off(runtime, work.job, holder, delay, &why).await;
                return None;
            }
            Next::End(_) => {
                protection::put_off(runtime, work.job, holder, remaining.unwrap_or_default(), &why).await;
                return None;
            }
        }
    }
    None
}

/// Why no attempt began.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NotBegun {
    /// One is running, beside which none may begin yet.
    BesideRunning,
    /// The gate keeps it from there: why, for the record.
    Denied(String),
    /// Anything else: somebody else will see to the job.
    Otherwise,
}

/// Begins an attempt with its write-ahead.
async fn begin(
    runtime: &Arc<Inner>,
    work: &Work,
    place: usize,
    holder: Option<AttemptToken>,
    room: Room,
    lane: Arc<Lane>,
) -> Result<(Arc<Running>, Rendered, Room), NotBegun> {
    if runtime.stopping.is_cancelled() {
        return Err(NotBegun::Otherwise);
    }
    debug_assert_eq!(work.route.providers.get(place), Some(&lane.slot.name));
    let rendered = match lane.slot.provider.render(&work.request) {
        Ok(rendered) => rendered,
        Err(error) => {
            tracing::warn!(job = %work.job, provider = lane.slot.name, %error, "the request cannot be rendered for this provider");
            return Err(NotBegun::Otherwise);
        }
    };
    let hash = rendered.hash();
    let permit = certificates::permit(runtime, &work.route, work.job, place, &rendered).await;
    let grant = permit.map_err(NotBegun::Denied)?;
    let token = AttemptToken::random();
    let hint_ms = runtime.store.now_ms() + runtime.lease_ms();
    let begin = BeginAttempt {
        job: work.job,
        token,
        holder,
        lease_ms: runtime.lease_ms(),
        hint_ms,
        gateway: &runtime.gateway,
        begin: Begin::Running {
            provider: &lane.slot.name,
            sent: WriteAhead { url: &rendered.url, request_hash: &hash, certificate: &grant.certificate },
        },
    };
    let mut again = 0;
    loop {
        failpoint!("begin.before");
        let lease_from_ms = boottime_ms();
        match runtime.ahead(&work.route).begin_attempt(&begin).await {
            Ok(Begun::Started { number, .. }) => {
                failpoint!("begin.made");
                let attempt =
                    Running::new(runtime, work, lane, (number, token), grant, lease_from_ms, work.hint_ms.or(Some(hint_ms)));
                return Ok((attempt, rendered, room));
            }
            // A delay that Redis' clock sees a little longer than ours.
            Ok(Begun::TooEarly { wait_ms }) if wait_ms <= runtime.lease_ms() && again < 3 => {
                again += 1;
                runtime.timers.pause(Duration::from_millis(wait_ms)).await;
            }
            Ok(Begun::Blocked { by: AttemptState::Running, .. }) => return Err(NotBegun::BesideRunning),
            Ok(refused) => {
                tracing::debug!(job = %work.job, ?refused, "no attempt began");
                return Err(NotBegun::Otherwise);
            }
            Err(error @ (StoreError::Ambiguous { .. } | StoreError::NotDurable { .. })) => {
                tracing::warn!(job = %work.job, %error, "a beginning is not confirmed; it is not sent");
                settle_beginning(runtime, &begin, &error).await;
                return Err(NotBegun::Otherwise);
            }
            Err(error) => {
                tracing::warn!(job = %work.job, %error, "no attempt began; the sweeper will go on");
                return Err(NotBegun::Otherwise);
            }
        }
    }
}

/// A beginning whose reply was lost: the same call tells its number, and then it is given back unsent.
pub(super) async fn settle_beginning(runtime: &Arc<Inner>, begin: &BeginAttempt<'_>, why: &StoreError) {
    let reason = unconfirmed(why, "beginning not confirmed");
    let (began, mut pause) = (Instant::now(), STORE_PAUSE);
    while began.elapsed() < SETTLE_MAX && !runtime.stopped.is_cancelled() {
        match runtime.store.begin_attempt(begin).await {
            Ok(Begun::Started { number, .. } | Begun::Repeated { number, .. }) => {
                if give_back(runtime, begin.job, number, begin.token, &reason, 0).await.is_ok() {
                    return;
                }
            }
            Ok(_) => return,
            Err(error) => tracing::debug!(job = %begin.job, %error, "a beginning is still not confirmed"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(STORE_PAUSE_MAX);
    }
}

/// The one call to the provider.
async fn call(runtime: &Arc<Inner>, work: &Work, attempt: &Arc<Running>, rendered: Rendered) -> Outcome {
    let total = Instant::now() + attempt.lane.slot.total;
    let deadline = work.deadline.map_or(total, |deadline| deadline.min(total));
    if deadline <= Instant::now() {
        return Outcome::NotSent { reason: format!("{}the job's time is over", protection::DEADLINE) };
    }
    let (telling, heard) = Telling::channel();
    let call = Call {
        rendered,
        job_id: Some(work.job),
        attempt: attempt.number,
        idempotency_key: attempt_key(work.job, attempt.number),
        traceparent: work.traceparent.clone(),
        fence: attempt.fence.clone(),
        deadline,
        told: telling,
    };
    // An adapter that panics may have sent something. It must not take the attempt's end with it.
    let submit = AssertUnwindSafe(attempt.lane.slot.provider.submit(call)).catch_unwind();
    let outcome = submit.map(|outcome| outcome.unwrap_or(Outcome::Unknown { reason: "panic: the adapter panicked".to_owned() }));
    told::hear(runtime, attempt, outcome, heard, deadline).await
}

/// Extends an attempt's lease, and sets the timer for the next time.
pub(crate) async fn heartbeat(runtime: Arc<Inner>, attempt: Arc<Running>) {
    let sequence = attempt.sequence.fetch_add(1, Ordering::Relaxed) + 1;
    let lease_from_ms = boottime_ms();
    let extended = runtime.store.extend_lease(attempt.job, attempt.number, attempt.token, sequence, runtime.lease_ms()).await;
    let next = match extended {
        Ok(Extended::Extended { canceling, .. }) => {
            attempt.canceling.store(canceling == Canceling::Yes, Ordering::Relaxed);
            attempt.fence.extend(runtime.fence_ms(lease_from_ms));
            runtime.options.lease / 3
        }
        Ok(Extended::Fenced { why }) => {
            // Authority is gone, evidence is not: the call runs on, and its outcome is judged by the scripts.
            tracing::debug!(job = %attempt.job, attempt = attempt.number, why, "an attempt is fenced");
            attempt.fence.close();
            delivered::notice_if_settled(&runtime, &attempt).await;
            return;
        }
        Ok(Extended::NotFound) => {
            attempt.miss();
            attempt.fence.close();
            return;
        }
        Err(error) => {
            tracing::debug!(job = %attempt.job, %error, "a heartbeat was lost");
            runtime.options.lease / 10
        }
    };
    runtime.timers.set(Timer::Heartbeat(Arc::downgrade(&attempt)), next).await;
}

/// Stops: see [`crate::runtime::Runtime::shutdown`].
pub(crate) async fn shut_down(runtime: &Arc<Inner>, drain: Duration) -> Drained {
    runtime.stopping.cancel();
    runtime.work.close();
    // Those that are written down as unknown already only listened on.
    let unnoted = |attempt: &&Arc<Running>| !attempt.noted_unknown.is_cancelled();
    let mut drained = Drained { running: runtime.running().values().filter(unnoted).count(), ..Drained::default() };
    if tokio::time::timeout(drain, runtime.work.wait()).await.is_err() {
        // What has ended is no longer unknown, though the store does not know it yet.
        let unended = |attempt: &&Arc<Running>| !attempt.in_hand.load(Ordering::Relaxed);
        let left: Vec<Arc<Running>> = runtime.running().values().filter(unended).filter(unnoted).cloned().collect();
        let words = left.iter().map(|attempt| async move {
            let reason = "gateway stopped before the provider answered".to_owned();
            let verdict = Verdict::plain(FinishOutcome::Unknown, reason);
            let written = tokio::time::timeout(LAST_WORDS, try_store(runtime, &attempt.whose(), &verdict)).await;
            match written {
                Ok(Ok(Finished::Recorded { .. } | Finished::Repeated { .. })) => (1, 0),
                // It ended at the last moment after all.
                Ok(Ok(Finished::Won { .. } | Finished::Discarded { .. } | Finished::NotFound)) => (0, 0),
                Ok(Err(_)) | Err(_) => (0, 1),
            }
        });
        for (unknown, unwritten) in futures_util::future::join_all(words).await {
            drained.unknown += unknown;
            drained.unwritten += unwritten;
        }
    }
    runtime.stopped.cancel();
    runtime.hands.close();
    // A disk that takes longer than this keeps nothing.
    let _ = tokio::time::timeout(LAST_WRITES, runtime.hands.wait()).await;
    drained.spooled = runtime.left_in_hand.spooled.load(Ordering::Relaxed);
    drained.unwritten += runtime.left_in_hand.lost.load(Ordering::Relaxed);
    runtime.house.close();
    // What is left of the work hangs at a provider and is dropped with the process.
    let _ = tokio::time::timeout(LAST_WORDS, runtime.house.wait()).await;
    drained
}
