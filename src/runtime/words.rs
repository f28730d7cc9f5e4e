//! What the runtime is given and what it answers: options, routes, submissions, receipts, decisions.
//!
//! Plain types; nothing here does anything.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::attempt::{FinishOutcome, ResolveOutcome};
use crate::error::StoreError;
use crate::job::{Class, Job, JobId, JobState, Key, Owner, Rules};
use crate::policy::{Effects, Plan, Reconcile, Tracked};
use crate::provider::{Provider, Request, Response};
use crate::qualify::Contract;
use crate::runtime::Protection;
use crate::store::{Gone, Word};
use crate::validate::{Invalid, Validator};

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
    /// Where results go that Redis does not take. None: they are in memory alone, and lost with the process.
    pub spool: Option<SpoolOptions>,
    /// What the providers are kept from. By default nothing but `in_flight_max`.
    pub protection: Protection,
}

/// Where results go that Redis does not take, and how much of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpoolOptions {
    /// The directory. Made if it is not there; only its owner may enter it. Several gateways may share it.
    pub dir: PathBuf,
    /// Most bytes of all files in it, those for a person among them. Beyond, results stay in memory alone.
    pub bytes_max: u64,
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
            spool: None,
            protection: Protection::default(),
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
    /// What an attempt does to the world: whether its write-ahead must be durable before anything is sent.
    pub effects: Effects,
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
    /// What its providers after the first must have proved.
    pub proof: Proof,
    /// What is required of its inputs and of the answers to them; `None` for nothing.
    pub validator: Option<Arc<Validator>>,
    /// When providers are asked about its unknown attempts.
    pub reconcile: Reconcile,
    /// When a race's next attempt begins, if that is tracked: `rules.race_after_ms` is then only how early it may.
    pub tracked: Option<Tracked>,
}

/// What a route's providers must have proved before a job may go there, and what takes their word back.
#[derive(Clone, Debug, Default)]
pub struct Proof {
    /// What each provider must have proved, by its place; `None` where nothing can be.
    pub contracts: Vec<Option<Arc<Contract>>>,
    /// When invalid answers suspend a certificate; `None` for never.
    pub suspend: Option<Suspend>,
}

/// How many of a provider's last answers may be invalid, less one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Suspend {
    /// So many invalid ones suspend.
    pub invalid: usize,
    /// Of so many.
    pub of: usize,
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
    /// The route requires something else of its inputs. There is no job, and nothing was claimed.
    #[error("the input is not as the route requires: {0}")]
    InvalidInput(Invalid),
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
    pub(super) fn is_met_by(self, job: &Job) -> bool {
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
    /// Whether the result must be as the route requires.
    pub check: CheckResult,
}

/// Whether a result that somebody brings must be as the route requires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckResult {
    /// It must; else nothing is decided.
    #[default]
    Checked,
    /// Somebody answers for it by name.
    Unchecked,
}

/// Why a decision or a report came to nothing.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SettleError {
    /// The result is not as the route requires. Nothing was decided.
    #[error("the result is not as the route requires: {0}")]
    InvalidOutput(Invalid),
    /// The store: the same call again.
    #[error(transparent)]
    Store(#[from] StoreError),
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

/// A list of jobs.
#[derive(Debug)]
pub struct Listed {
    /// The jobs.
    pub jobs: Vec<Arc<Job>>,
    /// The masters of a cluster that could not be asked: jobs of theirs may be missing. Empty if none is.
    pub incomplete: Vec<String>,
}

/// Why a runtime cannot be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// A route's rules do not hold.
    #[error("route {route:?}: {problem}")]
    Route {
        /// Which.
        route: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Results could not be kept where they are to be.
    #[error("cannot use the spool directory {}: {doing}: {why}", dir.display())]
    Spool {
        /// Which.
        dir: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// Why it failed.
        why: String,
    },
}
