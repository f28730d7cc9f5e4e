//! From a submission to its one result: claims, attempts, leases, waiting.
//!
//! One process is gateway, workers and sweeper. All state is in Redis, so any gateway can finish any job; what is kept here is
//! only work in hand. The runtime decides *what it would like to do*; whether that may happen is decided by the scripts, on the
//! record. The client's going away changes nothing: once a job is claimed it runs on.
//!
//! ```text
//! submit ── claim ──▶ drive: call provider ─▶ finish ─▶ wake waiters
//!             │            ▲   heartbeats (timers)
//!             ▼            │
//!          existing      sweeper: lapsed, pending, due
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::attempt::{Attempt, AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use crate::error::{Refusal, StoreError};
use crate::fingerprint::{Fingerprinted, Sha256Bytes, fingerprint};
use crate::job::{Class, Identity, Job, JobId, JobState, Key, Owner, Payload, Rules, locate};
use crate::metrics;
use crate::policy::Plan;
use crate::provider::{Call, Fence, Outcome, Provider, Rendered, Request, Response, boottime_ms};
use crate::store::{
    Begin, BeginAttempt, Begun, CancelMode, Canceled, Extended, FinishAttempt, Finished, Follow, Gone, Hint, Marked, Read,
    Reopened, ResolveAttempt, Resolved, Store, SubmitJob, Submitted, Word, WriteAhead,
};

mod attempts;
mod sweeper;
mod timers;
mod waiters;

pub use attempts::Drained;

use attempts::{Pending, Running, Work};
use timers::Timers;
use waiters::Waiters;

/// How the runtime keeps its promises.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// This gateway's name: a label; a boot nonce is added to it.
    pub gateway: String,
    /// How long an attempt belongs to its gateway without a heartbeat. Renewed at a third.
    pub lease: Duration,
    /// How long before the lease's end nothing is sent any more.
    pub lease_margin: Duration,
    /// How often the hints are looked through.
    pub sweep: Duration,
    /// Most jobs that this gateway works on at once; more are left pending for whoever has room.
    pub jobs_max: usize,
    /// Most requests that wait for a job at once.
    pub waiters_max: usize,
}

impl Default for RuntimeOptions {
    fn default() -> Self {
        RuntimeOptions {
            gateway: "gateway".to_owned(),
            lease: Duration::from_secs(15),
            lease_margin: Duration::from_secs(3),
            sweep: Duration::from_secs(1),
            jobs_max: 10_000,
            waiters_max: 10_000,
        }
    }
}

/// A route: what kind of job, by which providers, under which rules.
#[derive(Clone, Debug)]
pub struct Route {
    /// Its name.
    pub name: String,
    /// How many attempts may be open at once.
    pub class: Class,
    /// The providers' names, in order of preference. Empty: attempts are driven from outside.
    pub providers: Vec<String>,
    /// How long a job has, all attempts together; `None` for no deadline.
    pub deadline: Option<Duration>,
    /// The rules that each of its jobs carries.
    pub rules: Rules,
    /// What may come next.
    pub plan: Plan,
    /// JSON pointers that do not count in the fingerprint.
    pub fingerprint_ignore: Vec<String>,
}

/// A provider as the runtime uses it.
#[derive(Clone)]
pub struct ProviderSlot {
    /// Its name: a metric label.
    pub name: String,
    /// The adapter.
    pub provider: Arc<dyn Provider>,
    /// How long one call may take.
    pub total: Duration,
    /// Most calls at once from this gateway.
    pub in_flight_max: usize,
}

impl fmt::Debug for ProviderSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProviderSlot").field("name", &self.name).finish_non_exhaustive()
    }
}

/// One intent.
#[derive(Clone, Debug)]
pub struct Submission {
    /// On whose behalf.
    pub owner: Owner,
    /// The caller's name for the intent.
    pub key: Key,
    /// By which route.
    pub route: String,
    /// What is asked for.
    pub request: Request,
    /// W3C trace context, passed on to the first attempt.
    pub traceparent: Option<String>,
}

/// What a submit led to.
#[derive(Clone, Debug)]
pub struct Receipt {
    /// The job, as it was at that moment.
    pub job: Arc<Job>,
    /// Whether the job was there before.
    pub replayed: Replayed,
}

/// Whether a submit met a job that was there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// It did: attached, or answered again.
    Yes,
    /// It created the job.
    No,
}

/// Why a submit has no job to show.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SubmitError {
    /// No such route.
    #[error("there is no route {0:?}")]
    UnknownRoute(String),
    /// The route's first provider cannot be asked this.
    #[error("the request cannot be sent to a provider of the route: {0}")]
    Unrenderable(String),
    /// Another request came first under this key.
    #[error("job {0} has this key for another request")]
    Conflict(JobId),
    /// The job ended so long ago that its result is no longer kept. It does not run again.
    #[error("job {} ended as {} and is no longer kept", .0.id, .0.state)]
    Gone(Gone),
    /// Another owner and key have the same identity. Nothing can be done but use another key.
    #[error("another owner and key have the same identity; use another key")]
    Collision,
    /// This gateway is stopping.
    #[error("this gateway is stopping")]
    Stopping,
    /// The store. The job may exist: the same key again.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// For what to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// Until the job has ended.
    Ended,
    /// Until it has ended, or is unknown.
    Settled,
}

impl WaitFor {
    fn is_met_by(self, job: &Job) -> bool {
        job.is_ended() || (self == WaitFor::Settled && job.state == JobState::Unknown)
    }
}

/// Why a wait has nothing to show.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// No such job.
    #[error("there is no such job")]
    NotFound,
    /// It ended so long ago that it is no longer kept.
    #[error("job {} ended as {} and is no longer kept", .0.id, .0.state)]
    Gone(Gone),
    /// Too many requests wait already.
    #[error("{limit} requests wait already, the limit of this gateway")]
    TooManyWaiters {
        /// The limit.
        limit: usize,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A decision about an unknown attempt, from outside.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The attempt's number.
    pub number: u32,
    /// New for each decision.
    pub request_id: String,
    /// What is decided.
    pub outcome: ResolveOutcome,
    /// Who decides.
    pub actor: String,
    /// Why.
    pub reason: String,
    /// Whose word it is.
    pub word: Word,
    /// The result of a success: head and bytes.
    pub result: Option<Response>,
    /// Whether another attempt may begin.
    pub then: Then,
}

/// What follows a decision, or a reported failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The job ends with it.
    End,
    /// Another attempt may begin.
    Retry,
}

/// An external executor's report.
#[derive(Clone, Debug)]
pub struct Report {
    /// How the attempt ended.
    pub outcome: FinishOutcome,
    /// The result of a success, or the refusal of a failure.
    pub result: Option<Response>,
    /// Why it did not succeed.
    pub reason: String,
    /// Whether another attempt may begin after a failure.
    pub then: Then,
}

/// Which jobs to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListState {
    /// Those with an unknown attempt, the longest unknown first.
    Unknown,
    /// Those that have not ended, the one due first first.
    Open,
}

/// Why a runtime cannot be started: a route without rules that hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("route {route:?}: {problem}")]
pub struct StartError {
    route: String,
    problem: String,
}

/// The runtime. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct Runtime {
    inner: Arc<Inner>,
}

struct Inner {
    store: Store,
    options: RuntimeOptions,
    /// The label with its boot nonce.
    gateway: String,
    routes: BTreeMap<String, Arc<Route>>,
    providers: BTreeMap<String, Arc<Lane>>,
    jobs: Arc<Semaphore>,
    pending: AtomicUsize,
    in_hand: AtomicUsize,
    running: Mutex<HashMap<AttemptToken, Arc<Running>>>,
    timers: Timers,
    waiters: Waiters,
    /// Work on jobs. Joined on shutdown.
    work: TaskTracker,
    /// Sweeper, timers, subscriptions. Joined on shutdown, after the work.
    house: TaskTracker,
    /// No new work.
    stopping: CancellationToken,
    /// Nothing any more.
    stopped: CancellationToken,
}

/// A provider and its permits.
struct Lane {
    slot: ProviderSlot,
    permits: Arc<Semaphore>,
}

impl Runtime {
    /// Starts the runtime: its sweeper, its timers, its ear for wake-ups.
    ///
    /// # Errors
    /// A route names a provider that is not there.
    pub fn start(
        store: Store,
        options: RuntimeOptions,
        providers: Vec<ProviderSlot>,
        routes: Vec<Route>,
    ) -> Result<Self, StartError> {
        let providers: BTreeMap<String, Arc<Lane>> = providers
            .into_iter()
            .map(|slot| {
                let permits = Arc::new(Semaphore::new(slot.in_flight_max));
                (slot.name.clone(), Arc::new(Lane { slot, permits }))
            })
            .collect();
        for route in &routes {
            if let Some(absent) = route.providers.iter().find(|name| !providers.contains_key(*name)) {
                let problem = format!("there is no provider {absent:?}");
                return Err(StartError { route: route.name.clone(), problem });
            }
        }
        let nonce = Uuid::new_v4().simple().to_string();
        let (house, stopped) = (TaskTracker::new(), CancellationToken::new());
        let (timers, ticking) = Timers::new();
        let inner = Arc::new(Inner {
            gateway: format!("{}-{}", options.gateway, &nonce[..6]),
            jobs: Arc::new(Semaphore::new(options.jobs_max)),
            waiters: Waiters::new(store.clone(), options.waiters_max, house.clone(), stopped.clone()),
            routes: routes.into_iter().map(|route| (route.name.clone(), Arc::new(route))).collect(),
            providers,
            pending: AtomicUsize::new(0),
            in_hand: AtomicUsize::new(0),
            running: Mutex::new(HashMap::new()),
            timers,
            work: TaskTracker::new(),
            house: house.clone(),
            stopping: CancellationToken::new(),
            stopped,
            store,
            options,
        });
        house.spawn(timers::run(Arc::downgrade(&inner), ticking, inner.stopped.clone()));
        house.spawn(sweeper::run(Arc::clone(&inner)));
        house.spawn(waiters::listen(Arc::clone(&inner)));
        Ok(Runtime { inner })
    }

    /// The store under it.
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// This gateway's label, with its boot nonce.
    pub fn gateway(&self) -> &str {
        &self.inner.gateway
    }

    /// A route by name.
    pub fn route(&self, name: &str) -> Option<&Arc<Route>> {
        self.inner.routes.get(name)
    }

    /// Submits an intent: the same owner, key and request lead to the same job, however often and wherever they are submitted.
    ///
    /// A new job is claimed and, if there is room, its first attempt begun in one round trip; the call then returns while the
    /// provider works. Nothing is sent to a provider before the claim is in Redis.
    ///
    /// # Errors
    /// See [`SubmitError`]. After [`SubmitError::Store`] the job may exist: submit again with the same key.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the claim undecided; if it was made, the job stays, and the sweeper of any gateway goes on with
    /// it.
    pub async fn submit(&self, submission: Submission) -> Result<Receipt, SubmitError> {
        let outcome = self.submit_uncounted(submission).await;
        metrics::submit(match &outcome {
            Ok(Receipt { replayed: Replayed::No, .. }) => "created",
            Ok(Receipt { replayed: Replayed::Yes, .. }) => "existing",
            Err(SubmitError::Conflict(_)) => "conflict",
            Err(SubmitError::Gone(_)) => "gone",
            Err(SubmitError::Collision) => "collision",
            Err(SubmitError::UnknownRoute(_) | SubmitError::Unrenderable(_) | SubmitError::Stopping) => "refused",
            Err(SubmitError::Store(_)) => "error",
        });
        outcome
    }

    async fn submit_uncounted(&self, submission: Submission) -> Result<Receipt, SubmitError> {
        let began = Instant::now();
        let inner = &self.inner;
        if inner.stopping.is_cancelled() {
            return Err(SubmitError::Stopping);
        }
        let Submission { owner, key, route, request, traceparent } = submission;
        let route = Arc::clone(inner.routes.get(&route).ok_or(SubmitError::UnknownRoute(route))?);
        let (digest, identity) = locate(&owner, &key);
        let fingerprint = fingerprint(Fingerprinted {
            route: &route.name,
            method: &request.method,
            target: &request.target,
            content_type: &request.content_type,
            body: &request.body,
            ignore: &route.fingerprint_ignore,
        });
        let first = inner.first_call(&route, &request)?;
        let body = inner.store.put_body(identity, Arc::clone(&request.body)).await?;
        let input = Payload { head: request.head(), body };
        let token = AttemptToken::random();
        let room = first.as_ref().and_then(|first| inner.try_room(&first.lane));
        let waits = if room.is_none() && first.is_some() { Pending::try_count(inner) } else { None };
        let begin = match (&first, &room) {
            (Some(first), Some(_)) => Begin::Running { provider: &first.lane.slot.name, sent: first.write_ahead() },
            _ => Begin::Pending,
        };
        let submit = SubmitJob {
            id: JobId::new(inner.store.now_ms(), identity),
            digest,
            fingerprint,
            owner: &owner,
            route: &route.name,
            class: route.class,
            deadline_ms: route.deadline.map_or(0, millis),
            rules: route.rules,
            input: &input,
            token,
            // Otherwise nobody here holds the job: whoever has room may begin, or somebody outside.
            lease_ms: if room.is_some() || waits.is_some() { inner.lease_ms() } else { 0 },
            gateway: &inner.gateway,
            begin,
        };
        // The lease clock starts before the first send of the call that grants it.
        let lease_from_ms = boottime_ms();
        let hint_ms = inner.store.now_ms() + submit.lease_ms;
        let (id, created_ms, first_state) = match self.claim(&submit).await? {
            Claimed::Created { id, created_ms, first } => (id, created_ms, first),
            Claimed::There(receipt) => {
                inner.forget_hint(&receipt.job, hint_ms);
                return Ok(receipt);
            }
        };
        let begins = matches!(submit.begin, Begin::Running { .. });
        if begins && first_state != Some(AttemptState::Running) {
            // Our own claim, answered again after somebody has judged its attempt: nothing may be sent for it any more.
            let job = self.read(id).await.map_err(|error| SubmitError::from_read(error, id))?;
            return Ok(Receipt { job, replayed: Replayed::No });
        }
        if let Err(error) = inner.store.keep_blobs(identity, &[&input.body], crate::store::Keep::Open).await {
            tracing::debug!(job = %id, %error, "the input's blob is left to the sweeper");
        }
        let job = Arc::new(fresh(&submit, id, created_ms));
        if let Some(FirstCall { lane, rendered, .. }) = first {
            let deadline = route.deadline.map(|deadline| began + deadline);
            let work = Work { job: id, route, request: Arc::new(request), traceparent, tries: Vec::new(), deadline };
            let runtime = Arc::clone(inner);
            match (room, waits) {
                (Some(room), _) => {
                    let attempt = Running::new(inner, &work, lane, 1, token, lease_from_ms, Some(hint_ms));
                    inner.work.spawn(attempts::drive(runtime, work, attempt, rendered, room, began));
                }
                (None, Some(waits)) => {
                    inner.work.spawn(attempts::drive_pending(runtime, work, token, lease_from_ms, waits));
                }
                (None, None) => {}
            }
        }
        Ok(Receipt { job, replayed: Replayed::No })
    }

    /// Claims a key, and sorts what may come back instead.
    async fn claim(&self, submit: &SubmitJob<'_>) -> Result<Claimed, SubmitError> {
        let there = |job: Box<Job>| Ok(Claimed::There(Receipt { job: Arc::new(*job), replayed: Replayed::Yes }));
        match self.inner.store.submit_job(submit).await {
            Ok(Submitted::Created { id, created_ms, attempt }) => Ok(Claimed::Created { id, created_ms, first: attempt }),
            Ok(Submitted::Existing(job)) => there(job),
            Ok(Submitted::Conflict { id }) => Err(SubmitError::Conflict(id)),
            Ok(Submitted::Gone(gone)) => Err(SubmitError::Gone(gone)),
            Ok(Submitted::Collision) => Err(SubmitError::Collision),
            Err(error @ StoreError::Ambiguous { .. }) => {
                self.inner.settle_claim(submit);
                Err(error.into())
            }
            Err(error @ StoreError::NotExecuted { code: Refusal::Connect, .. }) => Err(error.into()),
            // Out of memory or of replicas: a duplicate still gets its answer, only a new job is refused.
            Err(error @ StoreError::NotExecuted { .. }) => match self.inner.store.read_job(submit.id.identity()).await {
                Ok(Read::Found(job)) if job.digest != submit.digest => Err(SubmitError::Collision),
                Ok(Read::Found(job)) if job.fingerprint != submit.fingerprint => Err(SubmitError::Conflict(job.id)),
                Ok(Read::Found(job)) => there(job),
                Ok(Read::Gone(gone)) => Err(SubmitError::Gone(gone)),
                Ok(Read::NotFound) | Err(_) => Err(error.into()),
            },
            Err(error @ StoreError::Fatal { .. }) => Err(error.into()),
        }
    }

    /// Reads a job by id.
    ///
    /// # Errors
    /// See [`ReadError`]; another incarnation's id is `NotFound`.
    pub async fn read(&self, id: JobId) -> Result<Arc<Job>, ReadError> {
        match self.inner.store.read_job(id.identity()).await? {
            Read::Found(job) if job.id == id => Ok(Arc::new(*job)),
            Read::Gone(gone) if gone.id == id => Err(ReadError::Gone(gone)),
            Read::Found(_) | Read::Gone(_) | Read::NotFound => Err(ReadError::NotFound),
        }
    }

    /// Finds the job of an owner's key.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn find(&self, owner: &Owner, key: &Key) -> Result<Arc<Job>, ReadError> {
        let (digest, identity) = locate(owner, key);
        match self.inner.store.read_job(identity).await? {
            Read::Found(job) if job.digest == digest => Ok(Arc::new(*job)),
            Read::Gone(gone) => Err(ReadError::Gone(gone)),
            Read::Found(_) | Read::NotFound => Err(ReadError::NotFound),
        }
    }

    /// Waits until a job has ended or settled, wherever it runs, but no longer than `within`; then returns it as it is.
    ///
    /// # Errors
    /// See [`ReadError`].
    ///
    /// # Cancel safety
    /// Cancel safe. The job does not notice.
    pub async fn wait(&self, id: JobId, wait_for: WaitFor, within: Duration) -> Result<Arc<Job>, ReadError> {
        let deadline = tokio::time::Instant::now() + within;
        let mut seat = self.inner.waiters.join(id.identity())?;
        let mut last = None;
        loop {
            let news = tokio::select! {
                news = seat.news() => news,
                () = tokio::time::sleep_until(deadline) => break,
            };
            match news {
                Some(Ok(job)) if job.id != id => return Err(ReadError::NotFound),
                Some(Ok(job)) if wait_for.is_met_by(&job) => return Ok(job),
                Some(Ok(job)) => last = Some(job),
                Some(Err(error)) => return Err(error),
                // The follower stopped: the gateway is stopping.
                None => break,
            }
        }
        match last {
            Some(job) => Ok(job),
            None => self.read(id).await,
        }
    }

    /// The bytes of a job's input.
    ///
    /// # Errors
    /// `Fatal` (`BADBLOB`) if they are missing or not those that the record names.
    pub async fn input(&self, job: &Job) -> Result<Request, StoreError> {
        let body = self.inner.store.body(job.id.identity(), &job.input.body).await?;
        Ok(Request::from_head(&job.input.head, body))
    }

    /// The bytes of a job's result; of a failed job the provider's refusal. `None` if there is none.
    ///
    /// # Errors
    /// `Fatal` (`BADBLOB`) if they are missing or not those that the record names.
    pub async fn result(&self, job: &Job) -> Result<Option<Response>, StoreError> {
        if job.result.head.is_empty() {
            return Ok(None);
        }
        let body = self.inner.store.body(job.id.identity(), &job.result.body).await?;
        Ok(Response::from_head(&job.result.head, body))
    }

    /// Lists unknown or open jobs, from the hints; at most `limit`.
    ///
    /// # Errors
    /// The store's.
    pub async fn list(&self, state: ListState, limit: usize) -> Result<Vec<Arc<Job>>, StoreError> {
        use crate::store::Which;
        let which = match state {
            ListState::Unknown => Which::Unknown,
            ListState::Open => Which::Due,
        };
        let mut jobs = Vec::new();
        for hint in self.inner.store.oldest(which, limit).await? {
            let Read::Found(job) = self.inner.store.read_job(hint.identity).await? else { continue };
            let listed = match state {
                ListState::Unknown => job.attempts.iter().any(|attempt| attempt.state == AttemptState::Unknown),
                ListState::Open => !job.is_ended(),
            };
            if listed {
                jobs.push(Arc::new(*job));
            }
        }
        Ok(jobs)
    }

    /// Asks for a job to be canceled, or ends it at once.
    ///
    /// # Errors
    /// The store's: the same call again, with the same request id.
    pub async fn cancel(
        &self,
        id: JobId,
        request_id: &str,
        mode: CancelMode,
        actor: &str,
        reason: &str,
    ) -> Result<Canceled, StoreError> {
        let ended_before = match self.inner.store.read_job(id.identity()).await? {
            Read::Found(job) => job.is_ended(),
            Read::Gone(_) | Read::NotFound => true,
        };
        let canceled = self.inner.store.cancel_job(id, request_id, mode, actor, reason).await?;
        if matches!(canceled, Canceled::Canceled { .. }) && !ended_before {
            metrics::job_ended(JobState::Canceled.as_str());
        }
        self.inner.after_change(id).await;
        Ok(canceled)
    }

    /// Decides, from outside, what became of an unknown attempt.
    ///
    /// # Errors
    /// The store's: the same call again, with the same request id.
    pub async fn resolve(&self, id: JobId, decision: Decision) -> Result<Resolved, StoreError> {
        let inner = &self.inner;
        let result = inner.payload(id.identity(), decision.result.as_ref()).await?;
        let resolve = ResolveAttempt {
            job: id,
            number: decision.number,
            request_id: &decision.request_id,
            outcome: decision.outcome,
            actor: &decision.actor,
            reason: &decision.reason,
            word: decision.word,
            result: &result,
            follow: follow(decision.then),
        };
        let resolved = inner.store.resolve_attempt(&resolve).await?;
        inner.after_change(id).await;
        Ok(resolved)
    }

    /// Gives a failed job new attempts.
    ///
    /// # Errors
    /// The store's: the same call again, with the same request id.
    pub async fn reopen(
        &self,
        id: JobId,
        request_id: &str,
        actor: &str,
        reason: &str,
        attempts: u32,
    ) -> Result<Reopened, StoreError> {
        let deadline_ms = match self.inner.store.read_job(id.identity()).await? {
            Read::Found(job) => self.inner.routes.get(&job.route).and_then(|route| route.deadline).map_or(0, millis),
            Read::Gone(_) | Read::NotFound => 0,
        };
        let reopened = self.inner.store.reopen_job(id, request_id, actor, reason, attempts, deadline_ms).await?;
        self.inner.after_change(id).await;
        Ok(reopened)
    }

    /// Begins an attempt for an executor outside this process.
    ///
    /// # Errors
    /// The store's: the same call again, with the same token.
    pub async fn begin_outside(
        &self,
        id: JobId,
        token: AttemptToken,
        provider: &str,
        lease: Duration,
    ) -> Result<Begun, StoreError> {
        let begin = BeginAttempt {
            job: id,
            token,
            holder: None,
            lease_ms: millis(lease),
            gateway: &self.inner.gateway,
            begin: Begin::Starting { provider },
        };
        self.inner.store.begin_attempt(&begin).await
    }

    /// Writes ahead for an executor outside this process.
    ///
    /// # Errors
    /// The store's: do not send before the same call has been answered.
    pub async fn mark_outside(
        &self,
        id: JobId,
        number: u32,
        token: AttemptToken,
        url: &str,
        request_hash: &[u8],
    ) -> Result<Marked, StoreError> {
        self.inner.store.mark_running(id, number, token, WriteAhead { url, request_hash, certificate: "" }).await
    }

    /// Extends the lease of an executor outside this process.
    ///
    /// # Errors
    /// The store's: the same call again.
    pub async fn extend_outside(
        &self,
        id: JobId,
        number: u32,
        token: AttemptToken,
        sequence: u64,
        lease: Duration,
    ) -> Result<Extended, StoreError> {
        self.inner.store.extend_lease(id, number, token, sequence, millis(lease)).await
    }

    /// Records how an attempt of an executor outside this process ended.
    ///
    /// # Errors
    /// The store's: the same call again.
    pub async fn finish_outside(
        &self,
        id: JobId,
        number: u32,
        token: AttemptToken,
        report: Report,
    ) -> Result<Finished, StoreError> {
        let inner = &self.inner;
        let result = inner.payload(id.identity(), report.result.as_ref()).await?;
        let finish = FinishAttempt {
            job: id,
            number,
            token,
            outcome: report.outcome,
            result: &result,
            reason: &report.reason,
            remote_id: "",
            model: "",
            follow: follow(report.then),
            hint_ms: None,
            strip_at_ms: None,
        };
        let finished = inner.store.finish_attempt(&finish).await?;
        attempts::count_finish(&finished, report.outcome);
        inner.after_change(id).await;
        Ok(finished)
    }

    /// Sends a safe request (`GET`, `HEAD`) to a route's first provider, without a job: it may be repeated by anybody.
    ///
    /// # Errors
    /// `UnknownRoute`, `Unrenderable`, `Stopping`; everything that happens at the provider is an [`Outcome`].
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future drops the call.
    pub async fn pass_through(&self, route: &str, request: &Request) -> Result<Outcome, SubmitError> {
        let inner = &self.inner;
        if inner.stopping.is_cancelled() {
            return Err(SubmitError::Stopping);
        }
        let route = inner.routes.get(route).ok_or_else(|| SubmitError::UnknownRoute(route.to_owned()))?;
        let Some(FirstCall { lane, rendered, .. }) = inner.first_call(route, request)? else {
            return Err(SubmitError::Unrenderable("the route has no provider".to_owned()));
        };
        let Ok(_permit) = lane.permits.try_acquire() else {
            let reason = format!("the provider has {} calls in flight, its limit", lane.slot.in_flight_max);
            return Ok(Outcome::NotSent { reason });
        };
        let call = Call {
            rendered,
            job_id: None,
            attempt: 0,
            idempotency_key: String::new(),
            traceparent: None,
            fence: Fence::until(u64::MAX),
            deadline: Instant::now() + lane.slot.total,
        };
        Ok(lane.slot.provider.submit(call).await)
    }

    /// Whether a new job could be taken now: a script that writes is run, not a `PING`.
    ///
    /// # Errors
    /// What a submit would meet.
    pub async fn ready(&self) -> Result<(), SubmitError> {
        if self.inner.stopping.is_cancelled() {
            return Err(SubmitError::Stopping);
        }
        Ok(self.inner.store.canary().await?)
    }

    /// Stops: nothing new begins; running attempts have `drain` to finish; the rest become unknown, and are counted.
    ///
    /// # Cancel safety
    /// Not cancel safe: attempts may be left to their leases.
    pub async fn shutdown(&self, drain: Duration) -> Drained {
        attempts::shut_down(&self.inner, drain).await
    }
}

impl SubmitError {
    fn from_read(error: ReadError, id: JobId) -> Self {
        match error {
            ReadError::Store(error) => SubmitError::Store(error),
            ReadError::Gone(gone) => SubmitError::Gone(gone),
            ReadError::NotFound | ReadError::TooManyWaiters { .. } => {
                SubmitError::Store(StoreError::fatal("BADRECORD", format!("job {id} was claimed and is not there")))
            }
        }
    }
}

/// What a claim led to.
enum Claimed {
    Created { id: JobId, created_ms: u64, first: Option<AttemptState> },
    There(Receipt),
}

/// The first attempt's call, ready before the claim so that the claim is its write-ahead.
struct FirstCall {
    lane: Arc<Lane>,
    rendered: Rendered,
    hash: Sha256Bytes,
}

impl FirstCall {
    fn write_ahead(&self) -> WriteAhead<'_> {
        WriteAhead { url: &self.rendered.url, request_hash: &self.hash, certificate: "" }
    }
}

impl Inner {
    /// Renders a request for the route's first provider; `None` where attempts come from outside.
    fn first_call(&self, route: &Route, request: &Request) -> Result<Option<FirstCall>, SubmitError> {
        let Some(name) = route.providers.first() else { return Ok(None) };
        let lane = Arc::clone(&self.providers[name]);
        let rendered = lane.slot.provider.render(request).map_err(|error| SubmitError::Unrenderable(error.to_string()))?;
        let hash = rendered.hash();
        Ok(Some(FirstCall { lane, rendered, hash }))
    }

    /// A duplicate of an ended job has left a hint that nobody needs; the sweeper would take it, but many of them would crowd it.
    fn forget_hint(self: &Arc<Self>, job: &Job, at_ms: u64) {
        if job.is_ended() {
            let (runtime, hint) = (Arc::clone(self), Hint { identity: job.id.identity(), at_ms });
            self.work.spawn(async move {
                let _ = runtime.store.move_due(hint, 0).await;
            });
        }
    }

    fn lease_ms(&self) -> u64 {
        millis(self.options.lease)
    }

    fn running(&self) -> MutexGuard<'_, HashMap<AttemptToken, Arc<Running>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a provider's answer fit for the record.
    async fn payload(&self, identity: Identity, response: Option<&Response>) -> Result<Payload, StoreError> {
        match response {
            None => Ok(Payload::default()),
            Some(response) => {
                let body = self.store.put_body(identity, Arc::clone(&response.body)).await?;
                Ok(Payload { head: response.head(), body })
            }
        }
    }

    /// After somebody outside changed a job: keeps its blobs, tends its hints, goes on with it if it is pending, wakes who waits.
    async fn after_change(self: &Arc<Self>, id: JobId) {
        let identity = id.identity();
        self.waiters.wake(identity);
        sweeper::look_soon(Arc::clone(self), identity).await;
    }
}

/// A job as its claim made it: nobody else has touched it when this is composed.
fn fresh(submit: &SubmitJob<'_>, id: JobId, created_ms: u64) -> Job {
    let attempts = match submit.begin {
        Begin::Pending => Vec::new(),
        Begin::Starting { provider } => vec![first_attempt(submit, provider, AttemptState::Starting, created_ms)],
        Begin::Running { provider, .. } => vec![first_attempt(submit, provider, AttemptState::Running, created_ms)],
    };
    Job {
        id,
        digest: submit.digest,
        fingerprint: submit.fingerprint,
        owner: submit.owner.as_str().to_owned(),
        route: submit.route.to_owned(),
        class: submit.class,
        state: if attempts.is_empty() { JobState::Pending } else { JobState::Running },
        version: 0,
        revision: 1,
        created_ms,
        updated_ms: created_ms,
        ended_ms: 0,
        deadline_ms: if submit.deadline_ms == 0 { 0 } else { created_ms + submit.deadline_ms },
        next_at_ms: 0,
        holder_lease_ms: if attempts.is_empty() { created_ms + submit.lease_ms } else { 0 },
        completed_by: 0,
        retain_until_ms: 0,
        canceled_by: String::new(),
        reason: String::new(),
        rules: submit.rules,
        attempts,
        events: Vec::new(),
        input: submit.input.clone(),
        result: Payload::default(),
    }
}

fn first_attempt(submit: &SubmitJob<'_>, provider: &str, state: AttemptState, now_ms: u64) -> Attempt {
    Attempt {
        number: 1,
        state,
        token: submit.token,
        provider: provider.to_owned(),
        gateway: submit.gateway.to_owned(),
        version: 0,
        started_ms: now_ms,
        lease_ms: now_ms + submit.lease_ms,
        sequence: 0,
        ended_ms: 0,
        reason: String::new(),
        url: String::new(),
        request_hash: Vec::new(),
        certificate: String::new(),
        remote_id: String::new(),
        model: String::new(),
    }
}

fn follow(then: Then) -> Follow {
    match then {
        Then::End => Follow::End,
        Then::Retry => Follow::Retry { delay_ms: 0, hold_ms: 0 },
    }
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
