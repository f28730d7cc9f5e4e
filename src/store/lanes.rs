//! A few long-lived multiplexed connections that carry the scripts.
//!
//! A checkout from the pool costs `UNWATCH` and `PING`; a lane costs nothing. Lanes are taken from the pool once and held. A lane
//! that breaks, that finds itself on a replica, that brings somebody else's reply, or that times out [`TIMEOUTS_MAX`] times in a
//! row is built anew in the background with capped back-off, which goes on growing while each successor fares no better; meanwhile
//! callers use another lane or fail fast. On a replica the old connection serves on: it still says why nothing is taken, and is
//! right again if the same server is made a master. Never a blocking command on a lane.
//!
//! All lanes of one [`Lanes`] lead to one server. Where sentinels say which, and it is another one than before, the lanes to the
//! old one are given up too: a master that nobody else believes in any more would take the same jobs once more.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deadpool_redis::Pool;
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{Pipeline, Value};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::{Refusal, StoreError};
use crate::metrics;
use crate::store::sentinel::Sentinels;
use crate::store::{dial, retry};

/// So many timeouts in a row, and a lane is built anew.
const TIMEOUTS_MAX: u32 = 3;
/// The first pause between two attempts to build a lane; doubles up to [`REBUILD_PAUSE_MAX`].
const REBUILD_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause between two attempts to build a lane.
const REBUILD_PAUSE_MAX: Duration = Duration::from_secs(2);
/// A connection that served for so long before it broke was a good one: its successor is built at once.
const SERVED_MIN: Duration = Duration::from_millis(500);
/// The same for one that found itself on a replica: nothing is gained by haste, most often the successor will be on one too.
const SERVED_ON_REPLICA_MIN: Duration = REBUILD_PAUSE_MAX;

/// Where the connections come from.
pub(crate) enum Source {
    /// A pool of one server's.
    Pool(Pool),
    /// A pool of one node's of a cluster, and its address.
    Node(Pool, Arc<str>),
    /// Whichever server the sentinels name.
    Sentinels(Arc<Sentinels>),
}

impl Source {
    /// A connection, and the how manieth server it leads to.
    async fn take(&self) -> Result<(MultiplexedConnection, u64), StoreError> {
        match self {
            Source::Pool(pool) | Source::Node(pool, _) => dial::take(pool).await.map(|connection| (connection, 0)),
            Source::Sentinels(sentinels) => Box::pin(sentinels.take()).await,
        }
    }

    /// The server's address, where there may be others.
    fn node(&self) -> Option<Arc<str>> {
        match self {
            Source::Pool(_) => None,
            Source::Node(_, address) => Some(Arc::clone(address)),
            Source::Sentinels(sentinels) => sentinels.named_last(),
        }
    }
}

pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    next: AtomicUsize,
    source: Source,
    deadline: Duration,
    tasks: TaskTracker,
    stop: CancellationToken,
}

struct Lane {
    connection: Mutex<Held>,
    timeouts: AtomicU32,
}

/// A lane's connection, and how many it had before: what is said of one never falls on its successor.
struct Held {
    connection: Option<MultiplexedConnection>,
    generation: u64,
    /// The how manieth server it leads to.
    server: u64,
    /// Since when it stands.
    since: Instant,
    /// Whether its successor is being built.
    succession: Succession,
    /// How long its building was put off; doubles while successors fare no better.
    pause: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Succession {
    None,
    UnderWay,
}

/// What becomes of a connection whose successor is built.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    /// It serves until then.
    Serves,
    /// It is of no use any more.
    GivenUp,
}

impl Lane {
    fn new(connection: Option<MultiplexedConnection>, server: u64) -> Self {
        let (since, succession) = (Instant::now(), Succession::None);
        let held = Held { connection, generation: 0, server, since, succession, pause: Duration::ZERO };
        Lane { connection: Mutex::new(held), timeouts: AtomicU32::new(0) }
    }

    fn get(&self) -> Option<(MultiplexedConnection, u64)> {
        let held = self.held();
        held.connection.clone().map(|connection| (connection, held.generation))
    }

    fn set(&self, (connection, server): (MultiplexedConnection, u64)) {
        let mut held = self.held();
        held.generation += 1;
        held.server = server;
        held.connection = Some(connection);
        held.since = Instant::now();
        held.succession = Succession::None;
    }

    /// Asks for a successor of that connection; how long its building is to be put off, if it is this caller's to build.
    fn succeed(&self, generation: u64, meanwhile: Meanwhile) -> Option<Duration> {
        let mut held = self.held();
        if held.generation != generation {
            return None;
        }
        let served_min = match meanwhile {
            Meanwhile::Serves => SERVED_ON_REPLICA_MIN,
            Meanwhile::GivenUp => {
                held.connection = None;
                SERVED_MIN
            }
        };
        if held.succession == Succession::UnderWay {
            return None;
        }
        held.succession = Succession::UnderWay;
        held.pause = if held.since.elapsed() >= served_min {
            Duration::ZERO
        } else {
            (held.pause * 2).clamp(REBUILD_PAUSE, REBUILD_PAUSE_MAX)
        };
        Some(held.pause)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, Debug)]
struct Way {
    lane: usize,
    generation: u64,
}

/// The connection that replies came by.
#[derive(Clone)]
pub(crate) struct Came {
    lanes: Arc<Lanes>,
    way: Way,
}

impl Came {
    /// A reply came that answers somebody else's call: what else comes by that connection is not to be believed either.
    pub(crate) fn distrust(&self) {
        self.lanes.rebuild(self.way, "foreign", Meanwhile::GivenUp);
    }

    /// A reader found itself on a replica.
    pub(crate) fn on_replica(&self) {
        self.lanes.rebuild(self.way, "readonly", Meanwhile::Serves);
    }
}

impl Lanes {
    /// Opens the lanes. `deadline` is the outer bound around every call.
    ///
    /// # Errors
    /// `NotExecuted` if one cannot be opened.
    pub(crate) async fn open(
        source: Source,
        lanes: usize,
        deadline: Duration,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Result<Arc<Self>, StoreError> {
        let mut open = Vec::with_capacity(lanes);
        for _ in 0..lanes {
            let (connection, server) = source.take().await?;
            open.push(Lane::new(Some(connection), server));
        }
        Ok(Arc::new(Lanes { lanes: open, next: AtomicUsize::new(0), source, deadline, tasks, stop }))
    }

    /// Opens lanes that need not stand yet: those that cannot be opened now are built in the background.
    pub(crate) async fn open_or_build(
        source: Source,
        lanes: usize,
        deadline: Duration,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let mut open = Vec::with_capacity(lanes);
        for _ in 0..lanes {
            // One that cannot be reached is not tried for each.
            let tried = open.last().is_none_or(|lane: &Lane| lane.get().is_some());
            open.push(Lane::new(if tried { source.take().await.ok().map(|(connection, _)| connection) } else { None }, 0));
        }
        let lanes = Arc::new(Lanes { lanes: open, next: AtomicUsize::new(0), source, deadline, tasks, stop });
        for lane in 0..lanes.lanes.len() {
            if lanes.lanes[lane].get().is_none() {
                lanes.rebuild(Way { lane, generation: 0 }, "broken", Meanwhile::GivenUp);
            }
        }
        lanes
    }

    /// Asks the sentinels, if there are any, and gives up what leads to a server that they do not name any more.
    pub(crate) async fn look_again(self: &Arc<Self>) {
        if let Source::Sentinels(sentinels) = &self.source
            && let Ok(server) = sentinels.look().await
        {
            self.leave_others(server);
        }
    }

    /// Gives up the lanes to the servers before this one.
    fn leave_others(self: &Arc<Self>, server: u64) {
        for (lane, one) in self.lanes.iter().enumerate() {
            let (before, generation) = {
                let held = one.held();
                (held.server < server && held.connection.is_some(), held.generation)
            };
            if before {
                self.rebuild(Way { lane, generation }, "elsewhere", Meanwhile::GivenUp);
            }
        }
    }

    /// Takes no connection any more.
    pub(crate) fn close(&self) {
        self.stop.cancel();
        if let Source::Pool(pool) | Source::Node(pool, _) = &self.source {
            pool.close();
        }
    }

    /// Sends a pipeline once and returns the reply of each command, an error of Redis among them as a value, and by which way
    /// they came.
    ///
    /// # Errors
    /// `NotExecuted` if no lane stands, `Ambiguous` if the replies did not come.
    pub(crate) async fn send(self: &Arc<Self>, pipeline: &Pipeline, replies: usize) -> Result<(Vec<Value>, Came), StoreError> {
        let Some((way, mut connection)) = self.pick() else {
            return Err(StoreError::NotExecuted { code: Refusal::Connect, detail: "no connection to redis stands".to_owned() });
        };
        let call = connection.req_packed_commands(pipeline, 0, replies);
        match tokio::time::timeout(self.deadline, call).await {
            Ok(Ok(values)) => {
                self.lanes[way.lane].timeouts.store(0, Ordering::Relaxed);
                if values.iter().any(is_readonly) {
                    self.rebuild(way, "readonly", Meanwhile::Serves);
                }
                Ok((values, Came { lanes: Arc::clone(self), way }))
            }
            Ok(Err(error)) => {
                if error.is_timeout() {
                    self.timed_out(way);
                } else if error.is_io_error() || error.is_connection_dropped() || error.is_unrecoverable_error() {
                    self.rebuild(way, "broken", Meanwhile::GivenUp);
                }
                Err(retry::of_connection(&error))
            }
            Err(_) => {
                self.timed_out(way);
                Err(StoreError::Ambiguous { detail: format!("no reply within {:?}", self.deadline) })
            }
        }
    }

    fn pick(&self) -> Option<(Way, MultiplexedConnection)> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        (0..self.lanes.len()).find_map(|step| {
            let lane = first.wrapping_add(step) % self.lanes.len();
            self.lanes[lane].get().map(|(connection, generation)| (Way { lane, generation }, connection))
        })
    }

    fn timed_out(self: &Arc<Self>, way: Way) {
        if self.lanes[way.lane].timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= TIMEOUTS_MAX {
            self.rebuild(way, "timeouts", Meanwhile::GivenUp);
        }
    }

    /// Builds a successor of a lane's connection in the background. What other calls still say of the old one changes nothing.
    fn rebuild(self: &Arc<Self>, way: Way, why: &'static str, meanwhile: Meanwhile) {
        let Some(mut pause) = self.lanes[way.lane].succeed(way.generation, meanwhile) else { return };
        let node = self.source.node();
        let node = node.as_deref();
        match meanwhile {
            Meanwhile::GivenUp => tracing::warn!(node, why, "a connection to redis is given up; another is being built"),
            Meanwhile::Serves => tracing::warn!(node, why, "a connection to redis serves on; another is being built"),
        }
        let (lanes, stop) = (Arc::clone(self), self.stop.clone());
        self.tasks.spawn(async move {
            let lane = &lanes.lanes[way.lane];
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(pause) => {}
                }
                let built = tokio::select! {
                    () = stop.cancelled() => return,
                    built = lanes.source.take() => built,
                };
                match built {
                    Ok(built) => {
                        let server = built.1;
                        lane.timeouts.store(0, Ordering::Relaxed);
                        lane.set(built);
                        lanes.leave_others(server);
                        metrics::lane_rebuilt(why);
                        tracing::info!(node = lanes.source.node().as_deref(), why, "a connection to redis stands again");
                        return;
                    }
                    Err(error) => tracing::debug!(%error, "redis is not there yet"),
                }
                pause = (pause * 2).clamp(REBUILD_PAUSE, REBUILD_PAUSE_MAX);
            }
        });
    }
}

fn is_readonly(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.code() == "READONLY")
}
