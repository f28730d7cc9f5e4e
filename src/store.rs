//! The only way to Redis: one method per script, hints, blobs and wake-ups.
//!
//! The store knows how to call and how to call again; it holds no rule of the state machine. Those stand in `lua/`, once. It is
//! the only importer of `redis` and `deadpool-redis`. Every method has a deadline, and every one that changes something may be
//! called again with the same arguments after any error: the answer is equivalent and nothing happens twice.
//!
//! Cancel safety, for every method here: dropping the future leaves the call undecided, as a lost reply does. Make the same call
//! again.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::StoreError;
use crate::place::Place;

mod bench;
mod blobs;
mod call;
mod calls;
mod certificates;
mod check;
mod cluster;
mod commit;
mod compose;
mod dedup;
mod dial;
mod hints;
mod keys;
mod lanes;
mod lineage;
mod listing;
mod masters;
mod mirror;
mod nodes;
pub mod private_redis;
mod protection;
mod record;
mod reply;
mod retry;
mod scripts;
mod sentinel;
mod slots;
mod streams;
#[cfg(test)]
pub(crate) mod testing;
mod transitions;
mod tried;
mod wake;

pub use bench::BENCH_PREFIX;
pub(crate) use blobs::{Keep, bytes_life};
pub use calls::*;
pub use certificates::{CertificateEvent, Certified, EVIDENCE_BYTES_MAX, Issued, RenewalLease, Stood, insist};
pub use check::{Checked, RedisFacts};
pub use commit::{Durability, Durable};
pub use dedup::{DedupBatch, DedupLevel, Deduplicated};
pub use hints::Hint;
pub(crate) use hints::{ScanPlace, Turn as DueTurn, Which};
pub(crate) use lineage::Lineage;
pub use mirror::{
    MIRROR_ID_BYTES, MirrorChunk, MirrorDigest, MirrorFrame, MirrorId, MirrorNews, MirrorPosition, MirrorShard, MirrorView,
    Mirrored, first_frame, frame_bytes,
};
pub use nodes::Kind as RedisKind;
pub use protection::{
    AdmitCall, Admitted, BreakerRules, Counted, Failed, Kind, Opened, ProbeOutcome, Refused, ReportCall, Reported, Stands, Tally,
};
pub use scripts::Script;
pub(crate) use streams::{Appended, STREAM_LIFE, StreamOf};
pub use tried::Tried;
pub(crate) use wake::Said;
pub use wake::Wakeups;

use cluster::{Cluster, Opening};
use commit::{Commit, CommitOptions, Fence, Leads};
use dial::Dial;
use keys::Keys;
use lanes::{Lanes, Source};
use masters::Masters;
use nodes::{Master, Nodes};
use sentinel::Sentinels;
use tried::LastTry;

/// Which Redis, and how patient with it.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// `redis://`, `rediss://`, `redis+unix://`, `redis+cluster://` or `redis+sentinel://`.
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
    /// What a write must have survived before anybody hears of it.
    pub durability: Durability,
    /// How long the replicas, or the disk, may take for it.
    pub durability_timeout: Duration,
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
            durability: Durability::Memory,
            durability_timeout: Duration::from_secs(1),
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
    by: By,
}

/// By which connections the calls of a handle go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The lanes.
    Lanes,
    /// The commit lane: a reply comes with what it says being durable, or with how far it is from that.
    Commit,
}

struct Inner {
    options: StoreOptions,
    keys: Keys,
    nodes: Nodes,
    dial: Dial,
    masters: Masters,
    /// How what must be durable is committed; `None` where nothing must.
    commit: Option<CommitOptions>,
    /// The last try whether it would be.
    tried: LastTry,
    /// What `oj:meta` says which store this is, as it was read last.
    id: Mutex<Arc<str>>,
    /// Redis' clock minus ours, in ms: hints are written in Redis' time.
    clock_offset_ms: AtomicI64,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Store {
    /// Connects, and checks that this Redis can keep the promises: version, schema, eviction.
    ///
    /// # Errors
    /// As [`Store::open`] and [`Store::check`].
    pub async fn connect(options: StoreOptions) -> Result<(Self, Checked), StoreError> {
        let store = Store::open(options).await?;
        let checked = store.check().await?;
        Ok((store, checked))
    }

    /// Connects, and checks nothing: for whoever wants to know what is wrong. [`Store::check`] must have been good before it is used
    /// for jobs.
    ///
    /// # Errors
    /// `NotExecuted` while nobody can be reached.
    pub async fn open(options: StoreOptions) -> Result<Self, StoreError> {
        let dial = Dial::new(&options);
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        // The client's own timeout fires first and says more; this one bounds what it does not cover.
        let deadline = options.response_timeout + options.response_timeout / 2;
        let lanes = options.lanes.max(1);
        let place = Place::of(&options.url).map_err(|what| StoreError::fatal("BADURL", format!("redis.url: {what}")))?;
        let keys = Keys::new(&options.prefix);
        let commit = (options.durability != Durability::Memory).then(|| CommitOptions {
            durability: options.durability,
            timeout: options.durability_timeout,
            connect_timeout: options.connect_timeout,
            response_timeout: options.response_timeout,
            fence: match place {
                Place::One | Place::Sentinel { .. } => Fence::One(keys.commit()),
                Place::Cluster { .. } => Fence::InSlot(keys.commit()),
            },
        });
        let committing = |leads: Leads| {
            let (commit, lane) = Commit::new(leads, commit.clone()?);
            tasks.spawn(lane.run(stop.clone()));
            Some(commit)
        };
        let nodes = match place {
            Place::One => {
                let (source, client) = (Source::Pool(dial.pool(&options.url)?), Box::new(dial.client(&options.url)?));
                let lanes = Lanes::open(source, lanes, deadline, tasks.clone(), stop.clone());
                let lanes = lanes.await.map_err(|error| match error {
                    StoreError::NotExecuted { detail, .. } => dial::cannot(&options.url, &detail),
                    error => error,
                })?;
                Nodes::One { lanes, commit: committing(Leads::To { client: client.clone(), node: None }), client }
            }
            Place::Sentinel { url, sentinels, service } => {
                let sentinels = Arc::new(Sentinels::new(url, sentinels, service, dial.clone()));
                let source = Source::Sentinels(Arc::clone(&sentinels));
                let lanes = Lanes::open(source, lanes, deadline, tasks.clone(), stop.clone()).await?;
                Nodes::Sentinel { lanes, commit: committing(Leads::ToNamed(Arc::clone(&sentinels))), sentinels }
            }
            Place::Cluster { url, seeds } => {
                let commit = commit.clone();
                let opening = Opening { dial: dial.clone(), lanes, deadline, commit, tasks: tasks.clone(), stop: stop.clone() };
                Nodes::Cluster(Box::pin(Cluster::connect(url, seeds, opening)).await?)
            }
        };
        let id = Mutex::new(Arc::from(""));
        let inner = Inner {
            options,
            keys,
            nodes,
            dial,
            masters: Masters::default(),
            commit,
            tried: LastTry::default(),
            id,
            clock_offset_ms: AtomicI64::new(0),
            tasks,
            stop,
        };
        Ok(Store { inner: Arc::new(inner), by: By::Lanes })
    }

    /// Stops the background work of the store. Calls made afterwards still work as long as their lane stands.
    pub async fn close(&self) {
        self.inner.stop.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
        self.inner.nodes.close();
    }

    /// The same store, whose calls are answered when what they wrote and tell is as durable as [`StoreOptions::durability`] says;
    /// where it does not become so in time, with [`StoreError::NotDurable`]. At the level `memory` this is the store as it is.
    pub fn committing(&self) -> Store {
        let by = if self.inner.commit.is_some() { By::Commit } else { By::Lanes };
        Store { inner: Arc::clone(&self.inner), by }
    }

    /// What a write must have survived before anybody hears of it.
    pub fn durability(&self) -> Durability {
        self.inner.options.durability
    }

    /// How much later than any other a call may arrive that must be durable.
    pub(crate) fn commit_deadline(&self) -> Duration {
        self.inner.commit.as_ref().map_or(Duration::ZERO, CommitOptions::deadline)
    }

    /// Unix ms of Redis' clock, as far as it was seen last: for hints only.
    pub fn now_ms(&self) -> u64 {
        let ours = i64::try_from(local_ms()).unwrap_or(i64::MAX);
        u64::try_from(ours.saturating_add(self.inner.clock_offset_ms.load(Ordering::Relaxed))).unwrap_or(0)
    }

    /// Which kind of Redis it is.
    pub fn kind(&self) -> RedisKind {
        self.inner.nodes.kind()
    }

    /// Reads Redis' clock: in a cluster, that of the master that is furthest behind, so that nobody looks before time. And looks
    /// whether sentinels name another master.
    pub(crate) async fn synchronize_clock(&self) -> Result<(), StoreError> {
        self.inner.nodes.look_again().await;
        let masters = self.inner.nodes.masters();
        let offsets = join_all(masters.iter().map(|master| self.clock_offset_of(master))).await;
        let (mut least, mut failed) = (None, None);
        for offset in offsets {
            match offset {
                Ok(offset) => least = Some(least.map_or(offset, |least: i64| least.min(offset))),
                Err(error) => failed = Some(error),
            }
        }
        match (least, failed) {
            (Some(offset), _) => self.inner.clock_offset_ms.store(offset, Ordering::Relaxed),
            (None, Some(error)) => return Err(error),
            (None, None) => {}
        }
        Ok(())
    }

    /// A master's clock minus ours, in ms.
    async fn clock_offset_of(&self, master: &Master) -> Result<i64, StoreError> {
        let before = local_ms();
        let value = self.on(master, redis::cmd("TIME")).await?;
        let (seconds, microseconds): (u64, u64) =
            redis::from_redis_value(value).map_err(|error| StoreError::fatal("BADREPLY", error))?;
        let theirs = seconds * 1000 + microseconds / 1000;
        let ours = before + (local_ms() - before) / 2;
        Ok(i64::try_from(theirs).unwrap_or(0) - i64::try_from(ours).unwrap_or(0))
    }
}

fn local_ms() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "the proposed time of a job id, and what Redis' clock is compared with")]
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock stands after 1970");
    u64::try_from(since.as_millis()).expect("the clock stands before the year 500,000,000")
}
