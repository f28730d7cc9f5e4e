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
//!          existing      sweeper: lapsed, pending, due ─▶ reconciler: unknown
//! ```

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::attempt::{Attempt, AttemptState, AttemptToken};
use crate::error::StoreError;
use crate::job::{Identity, Job, JobId, Key, Owner, Payload, locate};
use crate::metrics;
use crate::policy::{Effects, Gate};
use crate::provider::{Request, Response, Sent};
use crate::store::{Read, Store};

mod adopt;
mod attempts;
mod certificates;
mod checks;
mod delivered;
mod latencies;
mod losses;
mod outside;
mod protection;
mod readiness;
mod reconciler;
mod spool;
mod streams;
mod submit;
mod sweeper;
mod timers;
mod told;
mod verdict;
mod waiters;
mod words;

pub use attempts::Drained;
pub use delivered::{Delivered, WebhookError};
pub use protection::{Protection, ProviderProtection};
pub use readiness::NotReady;
#[cfg(feature = "gateway")]
pub(crate) use streams::{Came, Next, Reader};
pub use words::*;

use attempts::{Running, Work};
use latencies::Latencies;
use protection::{Budgets, Guard};
use spool::Spool;
use streams::Streams;
use timers::Timers;
use waiters::{First, Seat, Waiters};

/// Hints of duplicates that are taken away side by side.
const FORGETTING_MAX: usize = 256;

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
    /// Whether any provider has a guard.
    guarded: bool,
    budgets: Budgets,
    /// What providers under certificates answered last.
    answers: certificates::Answers,
    jobs: Arc<Semaphore>,
    pending: AtomicUsize,
    /// Places for taking away hints that nobody needs.
    forgetting: Arc<Semaphore>,
    /// Places for asking providers about unknown attempts.
    asks: Arc<Semaphore>,
    /// What it wrote last, to be missed if it is lost.
    losses: losses::Losses,
    /// What tracked races go by.
    latencies: Latencies,
    /// Whoever has a result in hand; joined on shutdown, so that none is dropped before it is in the spool.
    hands: TaskTracker,
    /// What was in hand when the gateway stopped.
    left_in_hand: LeftInHand,
    spool: Option<Arc<Spool>>,
    running: Mutex<HashMap<AttemptToken, Arc<Running>>>,
    timers: Timers,
    waiters: Waiters,
    streams: Streams,
    /// Work on jobs. Joined on shutdown.
    work: TaskTracker,
    /// Sweeper, timers, subscriptions. Joined on shutdown, after the work.
    house: TaskTracker,
    /// No new work.
    stopping: CancellationToken,
    /// Nothing any more.
    stopped: CancellationToken,
}

/// Results that were in hand when the gateway stopped.
#[derive(Default)]
struct LeftInHand {
    spooled: AtomicUsize,
    lost: AtomicUsize,
}

/// A place among those who wait for a job that is yet to be submitted.
pub(crate) struct Expected(Seat);

/// A provider and its permits.
struct Lane {
    slot: ProviderSlot,
    permits: Arc<Semaphore>,
    /// What the fleet keeps it from, if anything.
    guard: Option<Arc<Guard>>,
}

impl Runtime {
    /// Starts the runtime: its sweeper, its timers, its ear for wake-ups.
    ///
    /// # Errors
    /// A route names a provider that is not there, or the spool cannot be written.
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
                let rules = options.protection.providers.get(&slot.name);
                let guard = rules.and_then(|rules| Guard::new(&slot.name, rules, slot.total, options.lease));
                (slot.name.clone(), Arc::new(Lane { slot, permits, guard }))
            })
            .collect();
        for route in &routes {
            if let Some(absent) = route.providers.iter().find(|name| !providers.contains_key(*name)) {
                let problem = format!("there is no provider {absent:?}");
                return Err(StartError::Route { route: route.name.clone(), problem });
            }
        }
        let spool = options.spool.clone().map(Spool::open).transpose()?;
        let named: Vec<&str> = routes.iter().map(|route| route.name.as_str()).collect();
        metrics::start_at_zero(&providers.keys().map(String::as_str).collect::<Vec<_>>(), &named);
        let nonce = Uuid::new_v4().simple().to_string();
        let (house, stopped) = (TaskTracker::new(), CancellationToken::new());
        let (timers, ticking) = Timers::new();
        let inner = Arc::new(Inner {
            gateway: format!("{}-{}", options.gateway, &nonce[..6]),
            jobs: Arc::new(Semaphore::new(options.jobs_max)),
            waiters: Waiters::new(store.clone(), options.waiters_max, house.clone(), stopped.clone()),
            streams: Streams::new(store.clone(), house.clone(), stopped.clone()),
            routes: routes.into_iter().map(|route| (route.name.clone(), Arc::new(route))).collect(),
            guarded: providers.values().any(|lane| lane.guard.is_some()),
            budgets: Budgets::new(&options.protection.retry_budgets),
            answers: certificates::Answers::default(),
            providers,
            pending: AtomicUsize::new(0),
            forgetting: Arc::new(Semaphore::new(FORGETTING_MAX)),
            asks: Arc::new(Semaphore::new(reconciler::ASKS_MAX)),
            latencies: Latencies::default(),
            losses: losses::Losses::default(),
            hands: TaskTracker::new(),
            left_in_hand: LeftInHand::default(),
            spool: spool.clone(),
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
        if readiness::needs_commits(&inner) {
            house.spawn(readiness::run(Arc::clone(&inner)));
        }
        house.spawn(waiters::listen(Arc::clone(&inner)));
        if inner.routes.values().any(|route| route.proof.contracts.iter().any(Option::is_some)) {
            house.spawn(certificates::run(Arc::clone(&inner)));
        }
        for route in inner.routes.values().filter(|route| route.providers.len() > 1) {
            let (name, gate) = (&route.name, route.plan.gate);
            metrics::gate_open(name, gate != Gate::Enforce);
            match gate {
                Gate::Enforce => {}
                Gate::Shadow => tracing::warn!(
                    route = name,
                    "gate = \"shadow\": failovers need no certificate; what would be denied is counted"
                ),
                Gate::Off => tracing::warn!(route = name, "gate = \"off\": failovers need no certificate"),
            }
        }
        for guard in inner.providers.values().filter_map(|lane| lane.guard.clone()) {
            house.spawn(protection::run(Arc::clone(&inner), guard));
        }
        if let Some(spool) = spool {
            house.spawn(spool::run(Arc::clone(&inner), spool));
        }
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

    /// Reads a job by id.
    ///
    /// # Errors
    /// See [`ReadError`]; another incarnation's id is `NotFound`.
    pub async fn read(&self, id: JobId) -> Result<Arc<Job>, ReadError> {
        match self.inner.store.read_told(id.identity()).await? {
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
        match self.inner.store.read_told(identity).await? {
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
        let mut seat = self.inner.waiters.join(id.identity(), First::Read)?;
        self.wait_on(&mut seat, id, wait_for, within).await
    }

    /// Takes a place among those who wait for a key's job, before it is submitted: then what comes of it is told without a read.
    /// `None` if all places are taken; [`Runtime::wait`] says so.
    pub(crate) fn expect(&self, owner: &Owner, key: &Key) -> Option<Expected> {
        let (_, identity) = locate(owner, key);
        self.inner.waiters.join(identity, First::Wait).ok().map(Expected)
    }

    /// Waits as [`Runtime::wait`] does, on a place that was taken before the submit that this is the receipt of.
    pub(crate) async fn wait_expected(
        &self,
        expected: Option<Expected>,
        receipt: &Receipt,
        wait_for: WaitFor,
        within: Duration,
    ) -> Result<Arc<Job>, ReadError> {
        let id = receipt.job.id;
        let Some(Expected(mut seat)) = expected else { return self.wait(id, wait_for, within).await };
        if receipt.replayed == Replayed::Yes {
            // It may have ended before the place was taken.
            self.inner.waiters.wake(id.identity());
        }
        match self.wait_on(&mut seat, id, wait_for, within).await {
            // The place was among those who wait for the incarnation before.
            Err(ReadError::NotFound) => self.wait(id, wait_for, within).await,
            waited => waited,
        }
    }

    async fn wait_on(&self, seat: &mut Seat, id: JobId, wait_for: WaitFor, within: Duration) -> Result<Arc<Job>, ReadError> {
        let deadline = tokio::time::Instant::now() + within;
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
    /// The store's, where not even a part of the list can be made.
    pub async fn list(&self, state: ListState, limit: usize) -> Result<Listed, StoreError> {
        use crate::store::Which;
        let which = match state {
            ListState::Unknown => Which::Unknown,
            ListState::Open => Which::Due,
        };
        let (mut jobs, away) = self.inner.store.listed(which, limit).await?;
        jobs.retain(|job| match state {
            ListState::Unknown => job.attempts.iter().any(|attempt| attempt.state == AttemptState::Unknown),
            ListState::Open => !job.is_ended(),
        });
        Ok(Listed { jobs: jobs.into_iter().map(|job| Arc::new(*job)).collect(), incomplete: away.into_names() })
    }

    /// Stops: nothing new begins; running attempts have `drain` to finish; the rest become unknown, and are counted.
    /// A result that the store does not take is in the spool when this returns.
    ///
    /// # Cancel safety
    /// Not cancel safe: attempts may be left to their leases.
    pub async fn shutdown(&self, drain: Duration) -> Drained {
        attempts::shut_down(&self.inner, drain).await
    }
}

impl Inner {
    fn lease_ms(&self) -> u64 {
        millis(self.options.lease)
    }

    fn running(&self) -> MutexGuard<'_, HashMap<AttemptToken, Arc<Running>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store for what comes before an attempt's first byte: where it changes the world, that must be durable.
    fn ahead(&self, route: &Route) -> Store {
        match route.effects {
            Effects::External => self.store.committing(),
            Effects::Pure => self.store.clone(),
        }
    }

    /// How long ago an attempt began.
    fn age(&self, attempt: &Attempt) -> Duration {
        Duration::from_millis(self.store.now_ms().saturating_sub(attempt.started_ms))
    }

    /// What its provider is asked by.
    fn sent(&self, job: &Job, attempt: &Attempt) -> Sent {
        Sent {
            job_id: job.id,
            attempt: attempt.number,
            url: attempt.url.clone(),
            remote_id: attempt.remote_id.clone(),
            idempotency_key: attempt_key(job.id, attempt.number),
            age: self.age(attempt),
        }
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
}

/// An attempt's idempotency key: the same wherever it is sent, sent again or asked about.
fn attempt_key(job: JobId, number: u32) -> String {
    format!("{job}-{number}")
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
