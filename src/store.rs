//! The only way to Redis: one method per script, hints, blobs and wake-ups.
//!
//! The store knows how to call and how to call again; it holds no rule of the state machine. Those stand in `lua/`, once. It is the
//! only importer of `redis` and `deadpool-redis`. Every method has a deadline, and every one that changes something may be called
//! again with the same arguments after any error: the answer is equivalent and nothing happens twice.
//!
//! Cancel safety, for every method here: dropping the future leaves the call undecided, as a lost reply does. Make the same call again.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use deadpool_redis::{Manager, Pool, Runtime};
use redis::{AsyncConnectionConfig, IntoConnectionInfo as _, Value};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use crate::error::{Refusal, StoreError};
use crate::fingerprint::Sha256Bytes;
use crate::job::{Body, Class, Identity, Job, JobId, JobState, Owner, Payload, Rules};
use crate::metrics;

mod blobs;
mod check;
mod hints;
mod keys;
mod lanes;
pub mod private_redis;
mod record;
mod reply;
mod retry;
mod scripts;
mod wake;

pub(crate) use blobs::Keep;
pub use check::{Checked, RedisFacts};
pub use hints::Hint;
pub(crate) use hints::Which;
pub use scripts::Script;
pub use wake::Wakeups;

use keys::Keys;
use lanes::Lanes;
use reply::Reply;

/// How long TCP waits for an acknowledgement before it gives a connection up.
pub const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Which Redis, and how patient with it.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// `redis://`, `rediss://` or `redis+unix://`.
    pub url: String,
    /// The prefix of every key.
    pub prefix: String,
    /// How many multiplexed connections carry scripts, 1 or more.
    pub lanes: usize,
    /// How many connections serve what must be isolated, 1 or more.
    pub pool_max: usize,
    /// How long to wait for a connection.
    pub connect_timeout: Duration,
    /// How long to wait for a reply.
    pub response_timeout: Duration,
    /// Whether to start although Redis may evict open jobs.
    pub eviction: Eviction,
    /// Bodies over this size are kept in a blob.
    pub blob_bytes_min: usize,
    /// How long a blob that no record names is kept.
    pub blob_grace: Duration,
}

impl StoreOptions {
    /// The defaults, for a URL.
    pub fn new(url: &str) -> Self {
        StoreOptions {
            url: url.to_owned(),
            prefix: "oj".to_owned(),
            lanes: 2,
            pool_max: 16,
            connect_timeout: Duration::from_secs(1),
            response_timeout: Duration::from_millis(500),
            eviction: Eviction::Refused,
            blob_bytes_min: 8 << 10,
            blob_grace: Duration::from_secs(3600),
        }
    }
}

/// What to do about a Redis that may evict keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// Do not start: an evicted open job is a job that may run twice.
    Refused,
    /// Start, and say so loudly.
    Allowed,
}

/// The store. Cheap to clone; all clones share the lanes.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    options: StoreOptions,
    keys: Keys,
    lanes: Lanes,
    pool: Pool,
    client: redis::Client,
    /// Redis' clock minus ours, in ms: hints are written in Redis' time.
    clock_offset_ms: AtomicI64,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// A claim of a key.
#[derive(Clone, Debug)]
pub struct SubmitJob<'a> {
    /// The proposed id; the reply has the real one.
    pub id: JobId,
    /// The digest of owner and key.
    pub digest: Sha256Bytes,
    /// The fingerprint of the request.
    pub fingerprint: Sha256Bytes,
    /// On whose behalf.
    pub owner: &'a Owner,
    /// By which route.
    pub route: &'a str,
    /// How many attempts may be open at once.
    pub class: Class,
    /// How long the job has from now, in ms; 0 for no deadline.
    pub deadline_ms: u64,
    /// The rules that the job carries.
    pub rules: Rules,
    /// What is asked for.
    pub input: &'a Payload,
    /// The first attempt's token, or the pending job's holder's.
    pub token: AttemptToken,
    /// How long the attempt, or the pending job, is the caller's.
    pub lease_ms: u64,
    /// Who calls: a label.
    pub gateway: &'a str,
    /// What the claim already does.
    pub begin: Begin<'a>,
}

/// What a claim or a beginning already does.
#[derive(Clone, Copy, Debug)]
pub enum Begin<'a> {
    /// Only the claim; the caller holds the job.
    Pending,
    /// The slot is taken; the write-ahead comes later.
    Starting {
        /// For which provider.
        provider: &'a str,
    },
    /// The write-ahead too: this may be sent.
    Running {
        /// To which provider.
        provider: &'a str,
        /// What is sent.
        sent: WriteAhead<'a>,
    },
}

impl Begin<'_> {
    fn word(&self) -> &'static str {
        match self {
            Begin::Pending => "pending",
            Begin::Starting { .. } => "starting",
            Begin::Running { .. } => "running",
        }
    }

    fn provider(&self) -> &str {
        match self {
            Begin::Pending => "",
            Begin::Starting { provider } | Begin::Running { provider, .. } => provider,
        }
    }

    fn sent(&self) -> WriteAhead<'_> {
        match self {
            Begin::Running { sent, .. } => *sent,
            Begin::Pending | Begin::Starting { .. } => WriteAhead::default(),
        }
    }
}

/// What is written before the first byte may leave.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteAhead<'a> {
    /// The resolved URL.
    pub url: &'a str,
    /// SHA-256 of the rendered request.
    pub request_hash: &'a [u8],
    /// The certificate under which it goes there, `""` for none.
    pub certificate: &'a str,
}

/// The reply to a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// The key is this call's.
    Created {
        /// The job's id.
        id: JobId,
        /// When it was created, Unix ms of Redis.
        created_ms: u64,
        /// The first attempt's present state, `None` for a pending job.
        attempt: Option<AttemptState>,
    },
    /// The same request came first: this is its job.
    Existing(Box<Job>),
    /// Another request came first.
    Conflict {
        /// Its job.
        id: JobId,
    },
    /// It ended so long ago that its result is no longer kept.
    Gone(Gone),
    /// Another owner and key have the same identity.
    Collision,
}

/// A job whose result is no longer kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The job.
    pub id: JobId,
    /// How it ended.
    pub state: JobState,
    /// When, Unix ms of Redis.
    pub ended_ms: u64,
}

/// A new attempt.
#[derive(Clone, Copy, Debug)]
pub struct BeginAttempt<'a> {
    /// The job.
    pub job: JobId,
    /// The attempt's token: new for each.
    pub token: AttemptToken,
    /// The token by which the caller holds the pending job, if it does.
    pub holder: Option<AttemptToken>,
    /// How long the attempt is the caller's.
    pub lease_ms: u64,
    /// Who calls: a label.
    pub gateway: &'a str,
    /// Slot only, or with the write-ahead. Never [`Begin::Pending`].
    pub begin: Begin<'a>,
}

/// The reply to a beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begun {
    /// The slot is this attempt's.
    Started {
        /// Its number.
        number: u32,
        /// Until when it is the caller's, Unix ms of Redis.
        lease_until_ms: u64,
    },
    /// An earlier call with this token began it.
    Repeated {
        /// Its number.
        number: u32,
        /// Its present state.
        state: AttemptState,
    },
    /// Another attempt is in the way.
    Blocked {
        /// Its state: starting, running or unknown.
        by: AttemptState,
        /// Its number.
        number: u32,
    },
    /// A delay or another holder's lease has this long to run.
    TooEarly {
        /// How long.
        wait_ms: u64,
    },
    /// The attempts are used up.
    Exhausted {
        /// How many were made.
        attempts: u32,
    },
    /// The job's time is over.
    Deadline,
    /// Somebody asked to cancel it.
    Canceling,
    /// It has ended.
    Ended {
        /// How.
        state: JobState,
    },
    /// No such job, or another incarnation.
    NotFound,
}

/// The reply to a write-ahead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Marked {
    /// Send.
    Running {
        /// Until when it is the caller's, Unix ms of Redis.
        lease_until_ms: u64,
    },
    /// An earlier call with this token did the same.
    Repeated {
        /// Until when it is the caller's, Unix ms of Redis.
        lease_until_ms: u64,
    },
    /// Do not send.
    Fenced {
        /// `token`, `state`, `lease`, `canceling` or `ended`.
        why: String,
    },
    /// No such job, or another incarnation.
    NotFound,
}

/// The reply to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extended {
    /// The lease runs on.
    Extended {
        /// Until when, Unix ms of Redis.
        lease_until_ms: u64,
        /// Whether somebody asked to cancel the job.
        canceling: Canceling,
    },
    /// The attempt is no longer the caller's.
    Fenced {
        /// `token`, `state`, `lease` or `ended`.
        why: String,
    },
    /// No such job, or another incarnation.
    NotFound,
}

/// Whether somebody asked to cancel a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Canceling {
    /// Somebody did.
    Yes,
    /// Nobody did.
    No,
}

/// How an attempt ended.
#[derive(Clone, Debug)]
pub struct FinishAttempt<'a> {
    /// The job.
    pub job: JobId,
    /// The attempt's number.
    pub number: u32,
    /// The attempt's token.
    pub token: AttemptToken,
    /// How.
    pub outcome: FinishOutcome,
    /// The result of a success, or the refusal of a failure.
    pub result: &'a Payload,
    /// Why it did not succeed.
    pub reason: &'a str,
    /// The provider's own name for the work, `""` if none.
    pub remote_id: &'a str,
    /// The model that answered, `""` if none.
    pub model: &'a str,
    /// What may follow a failure.
    pub follow: Follow,
    /// The hint that the caller wrote for this attempt, to be taken away after a success; `None` to leave it.
    pub hint_ms: Option<u64>,
    /// When the kept bytes are to be stripped, Unix ms of Redis, if before the key's end.
    pub strip_at_ms: Option<u64>,
}

/// What may follow a definite failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow {
    /// The failure is the job's.
    End,
    /// Another attempt may begin.
    Retry {
        /// How long to wait before it.
        delay_ms: u64,
        /// How long beyond that the caller's token keeps the job for itself; 0 to let it go.
        hold_ms: u64,
    },
}

impl Follow {
    fn word(self) -> &'static str {
        match self {
            Follow::End => "end",
            Follow::Retry { .. } => "retry",
        }
    }

    fn delays_ms(self) -> (u64, u64) {
        match self {
            Follow::End => (0, 0),
            Follow::Retry { delay_ms, hold_ms } => (delay_ms, hold_ms),
        }
    }
}

/// The reply to a finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finished {
    /// This call claimed the result.
    Won {
        /// The job's version now.
        version: u64,
    },
    /// The attempt's row is as reported.
    Recorded {
        /// The job's state now.
        job: JobState,
    },
    /// An earlier call with this token and outcome did the same.
    Repeated {
        /// The attempt's state now.
        attempt: AttemptState,
        /// The job's state now.
        job: JobState,
        /// Whose result the job has, 0 for nobody's.
        completed_by: u32,
    },
    /// The job had ended, or the attempt was already judged.
    Discarded {
        /// The attempt's state now.
        attempt: AttemptState,
        /// Whose result the job has, 0 for nobody's.
        completed_by: u32,
    },
    /// No such job, attempt or token, or another incarnation.
    NotFound,
}

/// A decision about an unknown attempt.
#[derive(Clone, Debug)]
pub struct ResolveAttempt<'a> {
    /// The job.
    pub job: JobId,
    /// The attempt's number.
    pub number: u32,
    /// New for each decision.
    pub request_id: &'a str,
    /// What is decided.
    pub outcome: ResolveOutcome,
    /// Who decides.
    pub actor: &'a str,
    /// Why.
    pub reason: &'a str,
    /// Whose word it is.
    pub word: Word,
    /// The result of a success.
    pub result: &'a Payload,
    /// What may follow; the delays are ignored.
    pub follow: Follow,
}

/// Whose word a decision rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The provider's own: believed at once.
    Provider,
    /// An operator's: "it did not happen" is believed only after the quarantine.
    Operator,
}

/// The reply to a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// This decision claimed the result.
    Won {
        /// The job's version now.
        version: u64,
    },
    /// The attempt is closed as decided.
    Recorded {
        /// The job's state now.
        job: JobState,
    },
    /// An earlier call with this request id did it.
    Repeated {
        /// The attempt's state now.
        attempt: AttemptState,
        /// The job's state now.
        job: JobState,
        /// Whose result the job has, 0 for nobody's.
        completed_by: u32,
    },
    /// The job had ended; only the attempt's row says so.
    Discarded {
        /// Whose result the job has, 0 for nobody's.
        completed_by: u32,
    },
    /// Too early to believe that nothing happened.
    Quarantine {
        /// Until when, Unix ms of Redis.
        until_ms: u64,
        /// How much longer.
        wait_ms: u64,
    },
    /// The attempt is not unknown.
    NotUnknown {
        /// Its state.
        state: AttemptState,
    },
    /// No such job or attempt, or another incarnation.
    NotFound,
}

/// How to cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelMode {
    /// Ask; the job ends when its open attempts have settled, and a success that comes first wins.
    Graceful,
    /// End the job now, whatever its open attempts may still do.
    Force,
}

/// The reply to a cancel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Canceled {
    /// The job has ended as canceled.
    Canceled {
        /// `none`, or `unknown` if attempts were open.
        effect: String,
    },
    /// It will, when these have settled.
    Canceling {
        /// How many attempts are open.
        open: u32,
    },
    /// It had ended otherwise.
    Ended {
        /// How.
        state: JobState,
    },
    /// No such job, or another incarnation.
    NotFound,
}

/// What time has done to a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ticked {
    /// Something changed, or nothing if `changes` is empty.
    Job {
        /// The job.
        id: JobId,
        /// Its state now.
        state: JobState,
        /// When to look again, Unix ms of Redis; 0 for no time of its own.
        due_ms: u64,
        /// Whether the record names a blob.
        blobs: HasBlobs,
        /// Words among `aborted`, `unknown`, `deadline`, `stripped`.
        changes: Vec<String>,
    },
    /// No such job.
    NotFound,
}

/// Whether a record names a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HasBlobs {
    /// It does.
    Yes,
    /// All its bytes are in it.
    No,
}

/// The reply to a reopening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reopened {
    /// The job is pending again.
    Reopened {
        /// Its version now.
        version: u64,
    },
    /// Only a failed job can be reopened.
    NotFailed {
        /// Its state.
        state: JobState,
    },
    /// Its input is no longer kept.
    Gone,
    /// No such job, or another incarnation.
    NotFound,
}

/// The reply to a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// The job.
    Found(Box<Job>),
    /// It ended so long ago that its result is no longer kept.
    Gone(Gone),
    /// No such job.
    NotFound,
}

/// A script's arguments, owned, so that the same call can be made again.
struct Call {
    script: Script,
    key: String,
    arguments: Vec<Vec<u8>>,
    echo: Vec<u8>,
}

/// Commands that go before and after a script in the same pipeline: all of them harmless to repeat.
#[derive(Default)]
struct Around {
    before: Vec<redis::Cmd>,
    after: Vec<redis::Cmd>,
}

macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { vec![$($argument.argument()),*] };
}

trait Argument {
    fn argument(&self) -> Vec<u8>;
}

impl Argument for u64 {
    fn argument(&self) -> Vec<u8> {
        self.to_string().into_bytes()
    }
}

impl Argument for u32 {
    fn argument(&self) -> Vec<u8> {
        self.to_string().into_bytes()
    }
}

impl Argument for &str {
    fn argument(&self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }
}

impl Argument for &[u8] {
    fn argument(&self) -> Vec<u8> {
        self.to_vec()
    }
}

impl Argument for JobId {
    fn argument(&self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }
}

impl Argument for AttemptToken {
    fn argument(&self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }
}

fn body_arguments(payload: &Payload) -> (u64, &[u8]) {
    match &payload.body {
        Body::Inline(bytes) => (0, bytes),
        Body::Blob { sha256, bytes } => (*bytes, sha256),
    }
}

impl Store {
    /// Connects, and checks that this Redis can keep the promises: version, schema, eviction.
    ///
    /// # Errors
    /// `NotExecuted` while Redis cannot be reached; `Fatal` with the reason if it cannot be used.
    pub async fn connect(options: StoreOptions) -> Result<(Self, Checked), StoreError> {
        let connect_error = |error: &dyn std::fmt::Display| StoreError::NotExecuted {
            code: Refusal::Connect,
            detail: format!("cannot connect to redis at {}: {error}", without_password(&options.url)),
        };
        let tcp = redis::io::tcp::TcpSettings::default()
            .set_nodelay(true)
            .set_user_timeout(TCP_USER_TIMEOUT)
            .set_keepalive(redis::io::tcp::socket2::TcpKeepalive::new().with_time(Duration::from_secs(30)));
        let info = options
            .url
            .as_str()
            .into_connection_info()
            .map_err(|error| StoreError::fatal("BADURL", format!("redis.url: {error}")))?
            .set_tcp_settings(tcp);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(options.connect_timeout))
            .set_response_timeout(Some(options.response_timeout));
        let client = redis::Client::open(info.clone()).map_err(|error| connect_error(&error))?;
        let manager = Manager::new_with_config(info, config).map_err(|error| connect_error(&error))?;
        let pool = Pool::builder(manager)
            .max_size(options.pool_max)
            .wait_timeout(Some(options.connect_timeout))
            .create_timeout(Some(options.connect_timeout))
            .recycle_timeout(Some(options.response_timeout))
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|error| connect_error(&error))?;
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        // The client's own timeout fires first and says more; this one bounds what it does not cover.
        let deadline = options.response_timeout + options.response_timeout / 2;
        let lanes = Lanes::open(pool.clone(), options.lanes.max(1), deadline, tasks.clone(), stop.clone())
            .await
            .map_err(|error| connect_error(&error))?;
        let keys = Keys::new(&options.prefix);
        let inner = Inner { options, keys, lanes, pool, client, clock_offset_ms: AtomicI64::new(0), tasks, stop };
        let store = Store { inner: Arc::new(inner) };
        let checked = store.check().await?;
        store.synchronize_clock().await?;
        Ok((store, checked))
    }

    /// Stops the background work of the store. Calls made afterwards still work as long as their lane stands.
    pub async fn close(&self) {
        self.inner.stop.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
        self.inner.pool.close();
    }

    /// Unix ms of Redis' clock, as far as it was seen last: for hints only.
    pub fn now_ms(&self) -> u64 {
        let ours = i64::try_from(local_ms()).unwrap_or(i64::MAX);
        u64::try_from(ours.saturating_add(self.inner.clock_offset_ms.load(Ordering::Relaxed))).unwrap_or(0)
    }

    /// Reads Redis' clock.
    pub(crate) async fn synchronize_clock(&self) -> Result<(), StoreError> {
        let before = local_ms();
        let value = self.command(redis::cmd("TIME")).await?;
        let (seconds, microseconds): (u64, u64) =
            redis::from_redis_value(value).map_err(|error| StoreError::fatal("BADREPLY", error))?;
        let theirs = seconds * 1000 + microseconds / 1000;
        let ours = before + (local_ms() - before) / 2;
        let offset = i64::try_from(theirs).unwrap_or(0) - i64::try_from(ours).unwrap_or(0);
        self.inner.clock_offset_ms.store(offset, Ordering::Relaxed);
        Ok(())
    }

    /// Claims a key for one job, or says what it already stands for. One round trip, its hint included.
    ///
    /// # Errors
    /// `NotExecuted`: nothing was claimed. `Ambiguous`: the same call again, with the same token, tells.
    pub async fn submit_job(&self, submit: &SubmitJob<'_>) -> Result<Submitted, StoreError> {
        let (blob_bytes, body) = body_arguments(submit.input);
        let rules = &submit.rules;
        let sent = submit.begin.sent();
        let arguments = arguments![
            submit.id,
            &submit.digest[..],
            &submit.fingerprint[..],
            submit.owner.as_str(),
            submit.route,
            submit.class.as_str(),
            submit.deadline_ms,
            rules.attempts_max,
            rules.race_max,
            rules.race_after_ms,
            rules.key_life_ms,
            rules.retention_ms,
            if rules.releases_on_failure { "release" } else { "keep" },
            rules.quarantine_ms,
            submit.input.head.as_str(),
            blob_bytes,
            body,
            submit.begin.word(),
            submit.token,
            submit.lease_ms,
            submit.begin.provider(),
            submit.gateway,
            sent.url,
            sent.request_hash,
            sent.certificate,
        ];
        let identity = submit.id.identity();
        let around = Around { before: vec![self.hint_due(identity, self.now_ms() + submit.lease_ms)], after: vec![] };
        let call = self.call(Script::SubmitJob, identity, arguments, submit.token.argument());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "created" => {
                let (id, created_ms) = (job_id(&mut reply)?, reply.parse()?);
                let word = reply.text()?;
                let attempt = match word.as_str() {
                    "pending" => None,
                    state => Some(state.parse().map_err(|_| reply.unknown_status())?),
                };
                Ok(Submitted::Created { id, created_ms, attempt })
            }
            "existing" => Ok(Submitted::Existing(Box::new(record::unpack(&reply.bytes()?)?))),
            "conflict" => Ok(Submitted::Conflict { id: job_id(&mut reply)? }),
            "gone" => Ok(Submitted::Gone(gone(&mut reply)?)),
            "collision" => Ok(Submitted::Collision),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Takes the one free slot of a job for a new attempt.
    ///
    /// # Errors
    /// `NotExecuted`: nothing began. `Ambiguous`: the same call again, with the same token, tells.
    pub async fn begin_attempt(&self, begin: &BeginAttempt<'_>) -> Result<Begun, StoreError> {
        let sent = begin.begin.sent();
        let holder: &[u8] = begin.holder.as_ref().map_or(&[], |token| &token.as_bytes()[..]);
        let arguments = arguments![
            begin.job,
            begin.token,
            holder,
            begin.begin.word(),
            begin.lease_ms,
            begin.begin.provider(),
            begin.gateway,
            sent.url,
            sent.request_hash,
            sent.certificate,
        ];
        let identity = begin.job.identity();
        let around = Around { before: vec![self.hint_due(identity, self.now_ms() + begin.lease_ms)], after: vec![] };
        let call = self.call(Script::BeginAttempt, identity, arguments, begin.token.argument());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "started" => Ok(Begun::Started { number: reply.parse()?, lease_until_ms: reply.parse()? }),
            "repeated" => Ok(Begun::Repeated { number: reply.parse()?, state: reply.parse()? }),
            "blocked" => Ok(Begun::Blocked { by: reply.parse()?, number: reply.parse()? }),
            "too_early" => Ok(Begun::TooEarly { wait_ms: reply.parse()? }),
            "exhausted" => Ok(Begun::Exhausted { attempts: reply.parse()? }),
            "deadline" => Ok(Begun::Deadline),
            "canceling" => Ok(Begun::Canceling),
            "ended" => Ok(Begun::Ended { state: reply.parse()? }),
            "not_found" => Ok(Begun::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Writes ahead that an attempt may now touch its provider.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: do not send before the same call has been answered.
    pub async fn mark_running(
        &self,
        job: JobId,
        number: u32,
        token: AttemptToken,
        sent: WriteAhead<'_>,
    ) -> Result<Marked, StoreError> {
        let arguments = arguments![job, number, token, sent.url, sent.request_hash, sent.certificate];
        let call = self.call(Script::MarkRunning, job.identity(), arguments, token.argument());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "running" => Ok(Marked::Running { lease_until_ms: reply.parse()? }),
            "repeated" => Ok(Marked::Repeated { lease_until_ms: reply.parse()? }),
            "fenced" => Ok(Marked::Fenced { why: reply.text()? }),
            "not_found" => Ok(Marked::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Says that an attempt is still being worked on. `sequence` is one more for each new extension.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: the lease may not run on; the same call again.
    pub async fn extend_lease(
        &self,
        job: JobId,
        number: u32,
        token: AttemptToken,
        sequence: u64,
        lease_ms: u64,
    ) -> Result<Extended, StoreError> {
        let arguments = arguments![job, number, token, sequence, lease_ms];
        let call = self.call(Script::ExtendLease, job.identity(), arguments, token.argument());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "extended" => {
                let lease_until_ms = reply.parse()?;
                let canceling = match reply.text()?.as_str() {
                    "yes" => Canceling::Yes,
                    "no" => Canceling::No,
                    _ => return Err(reply.unknown_status()),
                };
                Ok(Extended::Extended { lease_until_ms, canceling })
            }
            "fenced" => Ok(Extended::Fenced { why: reply.text()? }),
            "not_found" => Ok(Extended::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Records how an attempt ended; a success claims the job's result at most once. One round trip, hints and wake-up included.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: keep the result in hand and make the same call again.
    pub async fn finish_attempt(&self, finish: &FinishAttempt<'_>) -> Result<Finished, StoreError> {
        let (blob_bytes, body) = body_arguments(finish.result);
        let (delay_ms, hold_ms) = finish.follow.delays_ms();
        let arguments = arguments![
            finish.job,
            finish.number,
            finish.token,
            finish.outcome.as_str(),
            finish.result.head.as_str(),
            blob_bytes,
            body,
            finish.reason,
            finish.remote_id,
            finish.model,
            finish.follow.word(),
            delay_ms,
            hold_ms,
        ];
        let identity = finish.job.identity();
        let mut around = Around { before: vec![], after: vec![self.announce(identity)] };
        match finish.outcome {
            FinishOutcome::Unknown => around.before.push(self.hint_unknown(identity, self.now_ms())),
            FinishOutcome::Succeeded => {
                if let Some(seen_ms) = finish.hint_ms {
                    around.after.push(self.settle_due(identity, seen_ms, finish.strip_at_ms.unwrap_or(0)));
                }
            }
            FinishOutcome::Failed | FinishOutcome::Aborted => {}
        }
        let call = self.call(Script::FinishAttempt, identity, arguments, finish.token.argument());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "won" => Ok(Finished::Won { version: reply.parse()? }),
            "recorded" => Ok(Finished::Recorded { job: reply.parse()? }),
            "repeated" => Ok(Finished::Repeated { attempt: reply.parse()?, job: reply.parse()?, completed_by: reply.parse()? }),
            "discarded" => Ok(Finished::Discarded { attempt: reply.parse()?, completed_by: reply.parse()? }),
            "not_found" => Ok(Finished::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Records what somebody outside decided about an unknown attempt.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: the same call again, with the same request id.
    pub async fn resolve_attempt(&self, resolve: &ResolveAttempt<'_>) -> Result<Resolved, StoreError> {
        let (blob_bytes, body) = body_arguments(resolve.result);
        let word = match resolve.word {
            Word::Provider => "provider",
            Word::Operator => "operator",
        };
        let arguments = arguments![
            resolve.job,
            resolve.number,
            resolve.request_id,
            resolve.outcome.as_str(),
            resolve.actor,
            resolve.reason,
            word,
            resolve.result.head.as_str(),
            blob_bytes,
            body,
            resolve.follow.word(),
        ];
        let identity = resolve.job.identity();
        let around = Around { before: vec![self.hint_due(identity, self.now_ms())], after: vec![self.announce(identity)] };
        let call = self.call(Script::ResolveAttempt, identity, arguments, resolve.request_id.as_bytes().to_vec());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "won" => Ok(Resolved::Won { version: reply.parse()? }),
            "recorded" => Ok(Resolved::Recorded { job: reply.parse()? }),
            "repeated" => Ok(Resolved::Repeated { attempt: reply.parse()?, job: reply.parse()?, completed_by: reply.parse()? }),
            "discarded" => {
                let _attempt = reply.text()?;
                Ok(Resolved::Discarded { completed_by: reply.parse()? })
            }
            "quarantine" => Ok(Resolved::Quarantine { until_ms: reply.parse()?, wait_ms: reply.parse()? }),
            "not_unknown" => Ok(Resolved::NotUnknown { state: reply.parse()? }),
            "not_found" => Ok(Resolved::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Asks for a job to be canceled, or ends it at once.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: the same call again, with the same request id.
    pub async fn cancel_job(
        &self,
        job: JobId,
        request_id: &str,
        mode: CancelMode,
        actor: &str,
        reason: &str,
    ) -> Result<Canceled, StoreError> {
        let mode = match mode {
            CancelMode::Graceful => "graceful",
            CancelMode::Force => "force",
        };
        let arguments = arguments![job, request_id, mode, actor, reason];
        let around = Around { before: vec![], after: vec![self.announce(job.identity())] };
        let call = self.call(Script::CancelJob, job.identity(), arguments, request_id.as_bytes().to_vec());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "canceled" => Ok(Canceled::Canceled { effect: reply.text()? }),
            "canceling" => Ok(Canceled::Canceling { open: reply.parse()? }),
            "ended" => Ok(Canceled::Ended { state: reply.parse()? }),
            "not_found" => Ok(Canceled::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Lets time act on a job: lapsed leases, a passed deadline, bytes that need no longer be kept.
    ///
    /// # Errors
    /// Any: look again later.
    pub async fn tick_job(&self, identity: Identity) -> Result<Ticked, StoreError> {
        let echo = identity.to_string().into_bytes();
        let call = self.call(Script::TickJob, identity, vec![echo.clone()], echo);
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "ticked" | "unchanged" => {
                let ticked = reply.status() == "ticked";
                let (id, state, due_ms) = (job_id(&mut reply)?, reply.parse()?, reply.parse()?);
                let blobs = match reply.text()?.as_str() {
                    "yes" => HasBlobs::Yes,
                    "no" => HasBlobs::No,
                    _ => return Err(reply.unknown_status()),
                };
                let changes = if ticked { reply.text()? } else { String::new() };
                let changes = changes.split_ascii_whitespace().map(str::to_owned).collect();
                Ok(Ticked::Job { id, state, due_ms, blobs, changes })
            }
            "not_found" => Ok(Ticked::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Gives a failed job new attempts.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: the same call again, with the same request id.
    pub async fn reopen_job(
        &self,
        job: JobId,
        request_id: &str,
        actor: &str,
        reason: &str,
        attempts: u32,
        deadline_ms: u64,
    ) -> Result<Reopened, StoreError> {
        let arguments = arguments![job, request_id, actor, reason, attempts, deadline_ms];
        let identity = job.identity();
        let around = Around { before: vec![self.hint_due(identity, self.now_ms())], after: vec![] };
        let call = self.call(Script::ReopenJob, identity, arguments, request_id.as_bytes().to_vec());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "reopened" => Ok(Reopened::Reopened { version: reply.parse()? }),
            "not_failed" => Ok(Reopened::NotFailed { state: reply.parse()? }),
            "gone" => Ok(Reopened::Gone),
            "not_found" => Ok(Reopened::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Reads a job at one moment, from the master.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: again. `Fatal`: a record that nobody may interpret; never taken for an absent one.
    pub async fn read_job(&self, identity: Identity) -> Result<Read, StoreError> {
        let echo = identity.to_string();
        let call = self.call(Script::ReadJob, identity, arguments!["record", echo.as_str()], echo.as_bytes().to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "found" => Ok(Read::Found(Box::new(record::unpack(&reply.bytes()?)?))),
            "gone" => Ok(Read::Gone(gone(&mut reply)?)),
            "not_found" => Ok(Read::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    fn call(&self, script: Script, identity: Identity, arguments: Vec<Vec<u8>>, echo: Vec<u8>) -> Call {
        Call { script, key: self.inner.keys.job(identity), arguments, echo }
    }

    /// Makes a call, and the same call again where the error allows it, within a bounded number of tries.
    async fn run(&self, call: &Call, around: &Around) -> Result<Reply, StoreError> {
        let began = Instant::now();
        let mut pause = retry::PAUSE;
        let mut tries = 1;
        let outcome = loop {
            let outcome = self.run_once(call, around).await;
            let again = match &outcome {
                // Again at once would meet the same memory, role or disk.
                Err(StoreError::NotExecuted { code, .. }) => {
                    matches!(code, Refusal::Connect | Refusal::Busy | Refusal::Loading | Refusal::Cluster)
                }
                Err(StoreError::Ambiguous { .. }) => true,
                Err(StoreError::Fatal { .. }) | Ok(_) => false,
            };
            if let Err(error) = &outcome {
                metrics::store_error(error.class());
            }
            if !again || tries == retry::TRIES_MAX {
                break outcome;
            }
            tries += 1;
            tokio::time::sleep(pause).await;
            pause *= 2;
        };
        metrics::script(call.script.name(), began.elapsed());
        outcome
    }

    async fn run_once(&self, call: &Call, around: &Around) -> Result<Reply, StoreError> {
        let mut pipeline = redis::Pipeline::with_capacity(around.before.len() + 1 + around.after.len());
        for command in &around.before {
            pipeline.add_command(command.clone());
        }
        pipeline.add_command(script_command("EVALSHA", call.script.sha1(), call));
        for command in &around.after {
            pipeline.add_command(command.clone());
        }
        let place = around.before.len();
        let mut values = self.inner.lanes.send(&pipeline, place + 1 + around.after.len()).await?;
        // Where a job would have no other hint, a refused hint is a refused call: nobody would find the job again.
        if call.script.needs_its_hint()
            && let Some(Value::ServerError(error)) = values[..place].iter().find(|value| matches!(value, Value::ServerError(_)))
        {
            return Err(retry::of_server(error));
        }
        let mut value = values.swap_remove(place);
        if matches!(&value, Value::ServerError(error) if retry::is_noscript(error)) {
            value = self.eval(call, around).await?;
        }
        match value {
            Value::ServerError(error) => Err(retry::of_server(&error)),
            value => Reply::read(call.script, &call.echo, value),
        }
    }

    /// Redis has forgotten the script: sends the whole text, which it then remembers, and what comes after once more.
    async fn eval(&self, call: &Call, around: &Around) -> Result<Value, StoreError> {
        let mut pipeline = redis::Pipeline::with_capacity(1 + around.after.len());
        pipeline.add_command(script_command("EVAL", call.script.code(), call));
        for command in &around.after {
            pipeline.add_command(command.clone());
        }
        let mut values = self.inner.lanes.send(&pipeline, 1 + around.after.len()).await?;
        Ok(values.swap_remove(0))
    }

    /// Sends one command on a lane.
    async fn command(&self, command: redis::Cmd) -> Result<Value, StoreError> {
        let mut values = self.commands(vec![command]).await?;
        match values.swap_remove(0) {
            Value::ServerError(error) => Err(retry::of_server(&error)),
            value => Ok(value),
        }
    }

    /// Sends commands on a lane, in one pipeline; an error of Redis is a value.
    async fn commands(&self, commands: Vec<redis::Cmd>) -> Result<Vec<Value>, StoreError> {
        let replies = commands.len();
        let mut pipeline = redis::Pipeline::with_capacity(replies);
        for command in commands {
            pipeline.add_command(command);
        }
        self.inner.lanes.send(&pipeline, replies).await.inspect_err(|error| metrics::store_error(error.class()))
    }
}

fn script_command(command: &str, script: &str, call: &Call) -> redis::Cmd {
    let mut command = redis::cmd(command);
    command.arg(script).arg(1).arg(call.key.as_str());
    for argument in &call.arguments {
        command.arg(argument.as_slice());
    }
    command
}

fn job_id(reply: &mut Reply) -> Result<JobId, StoreError> {
    let bytes = reply.bytes()?;
    let bytes: [u8; 16] = bytes.try_into().map_err(|_| reply.unknown_status())?;
    JobId::from_bytes(bytes).map_err(|_| reply.unknown_status())
}

fn gone(reply: &mut Reply) -> Result<Gone, StoreError> {
    Ok(Gone { id: job_id(reply)?, state: reply.parse()?, ended_ms: reply.parse()? })
}

fn local_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock stands after 1970");
    u64::try_from(since.as_millis()).expect("the clock stands before the year 500,000,000")
}

/// A URL for people: the password hidden.
pub(crate) fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    match rest.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://…@{host}"),
        None => url.to_owned(),
    }
}
