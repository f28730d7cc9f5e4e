//! A few long-lived multiplexed connections that carry the scripts.
//!
//! A checkout from the pool costs `UNWATCH` and `PING`; a lane costs nothing. Lanes are taken from the pool once and held. A lane
//! that breaks, that finds itself on a replica, that brings somebody else's reply, or that times out [`TIMEOUTS_MAX`] times in a
//! row is given up and built anew in the background with capped back-off; meanwhile callers use another lane or fail fast. Never a
//! blocking command on a lane.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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
    }

    /// Gives that connection up; whether it was still the lane's.
    fn give_up(&self, generation: u64) -> bool {
        let mut held = self.held();
        held.generation == generation && held.connection.take().is_some()
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
                connection: Mutex::new(Held { connection: Some(connection), generation: 0 }),
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
                    self.rebuild(way, "readonly");
                }
                Ok((values, way))
            }
            Ok(Err(error)) => {
                if error.is_timeout() {
                    self.timed_out(way);
                } else if error.is_io_error() || error.is_connection_dropped() || error.is_unrecoverable_error() {
                    self.rebuild(way, "broken");
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
        self.rebuild(way, "foreign");
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
            self.rebuild(way, "timeouts");
        }
    }

    /// Gives a lane's connection up and builds a new one in the background. What other calls still say of the old one changes
    /// nothing.
    fn rebuild(&self, way: Way, why: &'static str) {
        let lane = Arc::clone(&self.lanes[way.lane]);
        if !lane.give_up(way.generation) {
            return;
        }
        tracing::warn!(why, "a connection to redis is given up and built anew");
        let (pool, stop) = (self.pool.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            let mut pause = REBUILD_PAUSE;
            loop {
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
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(pause) => {}
                }
                pause = (pause * 2).min(REBUILD_PAUSE_MAX);
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
