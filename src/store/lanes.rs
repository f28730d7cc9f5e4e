//! A few long-lived multiplexed connections that carry the scripts.
//!
//! A checkout from the pool costs `UNWATCH` and `PING`; a lane costs nothing. Lanes are taken from the pool once and held. A lane
//! that breaks, that finds itself on a replica, that brings somebody else's reply, or that times out [`TIMEOUTS_MAX`] times in a
//! row is built anew in the background with capped back-off, which goes on growing while each successor fares no better; meanwhile
//! callers use another lane or fail fast. On a replica the old connection serves on: it still says why nothing is taken, and is
//! right again if the same server is made a master. Never a blocking command on a lane.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deadpool_redis::{Connection, Pool};
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{Pipeline, Value};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::{Refusal, StoreError};
use crate::metrics;
use crate::store::retry;

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

pub(crate) struct Lanes {
    lanes: Vec<Arc<Lane>>,
    next: AtomicUsize,
    pool: Pool,
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
    fn get(&self) -> Option<(MultiplexedConnection, u64)> {
        let held = self.held();
        held.connection.clone().map(|connection| (connection, held.generation))
    }

    fn set(&self, connection: MultiplexedConnection) {
        let mut held = self.held();
        held.generation += 1;
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

/// The connection that replies came by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    lane: usize,
    generation: u64,
}

impl Lanes {
    /// Opens the lanes. `deadline` is the outer bound around every call.
    pub(crate) async fn open(
        pool: Pool,
        lanes: usize,
        deadline: Duration,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Result<Self, StoreError> {
        let mut open = Vec::with_capacity(lanes);
        for _ in 0..lanes {
            let connection = take(&pool).await?;
            open.push(Arc::new(Lane {
                connection: Mutex::new(Held {
                    connection: Some(connection),
                    generation: 0,
                    since: Instant::now(),
                    succession: Succession::None,
                    pause: Duration::ZERO,
                }),
                timeouts: AtomicU32::new(0),
            }));
        }
        Ok(Lanes { lanes: open, next: AtomicUsize::new(0), pool, deadline, tasks, stop })
    }

    /// Sends a pipeline once and returns the reply of each command, an error of Redis among them as a value, and by which way
    /// they came.
    ///
    /// # Errors
    /// `NotExecuted` if no lane stands, `Ambiguous` if the replies did not come.
    pub(crate) async fn send(&self, pipeline: &Pipeline, replies: usize) -> Result<(Vec<Value>, Way), StoreError> {
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
                Ok((values, way))
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

    /// A reply came that answers somebody else's call: what else comes by that connection is not to be believed either.
    pub(crate) fn distrust(&self, way: Way) {
        self.rebuild(way, "foreign", Meanwhile::GivenUp);
    }

    /// A reader found itself on a replica.
    pub(crate) fn on_replica(&self, way: Way) {
        self.rebuild(way, "readonly", Meanwhile::Serves);
    }

    fn pick(&self) -> Option<(Way, MultiplexedConnection)> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        (0..self.lanes.len()).find_map(|step| {
            let lane = first.wrapping_add(step) % self.lanes.len();
            self.lanes[lane].get().map(|(connection, generation)| (Way { lane, generation }, connection))
        })
    }

    fn timed_out(&self, way: Way) {
        if self.lanes[way.lane].timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= TIMEOUTS_MAX {
            self.rebuild(way, "timeouts", Meanwhile::GivenUp);
        }
    }

    /// Builds a successor of a lane's connection in the background. What other calls still say of the old one changes nothing.
    fn rebuild(&self, way: Way, why: &'static str, meanwhile: Meanwhile) {
        let lane = Arc::clone(&self.lanes[way.lane]);
        let Some(mut pause) = lane.succeed(way.generation, meanwhile) else { return };
        match meanwhile {
            Meanwhile::GivenUp => tracing::warn!(why, "a connection to redis is given up; another is being built"),
            Meanwhile::Serves => tracing::warn!(why, "a connection to redis serves on; another is being built"),
        }
        let (pool, stop) = (self.pool.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(pause) => {}
                }
                let built = tokio::select! {
                    () = stop.cancelled() => return,
                    built = take(&pool) => built,
                };
                match built {
                    Ok(connection) => {
                        lane.timeouts.store(0, Ordering::Relaxed);
                        lane.set(connection);
                        metrics::lane_rebuilt(why);
                        tracing::info!(why, "a connection to redis stands again");
                        return;
                    }
                    Err(error) => tracing::debug!(%error, "redis is not there yet"),
                }
                pause = (pause * 2).clamp(REBUILD_PAUSE, REBUILD_PAUSE_MAX);
            }
        });
    }
}

async fn take(pool: &Pool) -> Result<MultiplexedConnection, StoreError> {
    let connection =
        pool.get().await.map_err(|error| StoreError::NotExecuted { code: Refusal::Connect, detail: error.to_string() })?;
    Ok(Connection::take(connection))
}

fn is_readonly(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.code() == "READONLY")
}
