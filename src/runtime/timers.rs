//! Every timer of the runtime, in one `DelayQueue`.
//!
//! Heartbeats, races, and pauses before the next attempt. A timer holds its attempt weakly: one that is over is forgotten when
//! its timer fires. Nothing here decides; a timer only calls.

use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::time::DelayQueue;

use crate::runtime::attempts::{self, Running};
use crate::runtime::{Inner, Work};

/// Most timers that wait to be taken into the queue; a caller beyond that waits its turn.
const SETTING_MAX: usize = 1024;

pub(crate) enum Timer {
    /// Extend an attempt's lease.
    Heartbeat(Weak<Running>),
    /// See whether another attempt of a race should begin.
    Race(Weak<Running>, Box<Work>),
    /// Go on.
    Wake(oneshot::Sender<()>),
}

/// The way to set a timer.
pub(crate) struct Timers {
    setting: mpsc::Sender<(Timer, Duration)>,
}

/// The other end of [`Timers`].
pub(crate) struct Ticking {
    set: mpsc::Receiver<(Timer, Duration)>,
}

impl Timers {
    pub(crate) fn new() -> (Self, Ticking) {
        let (setting, set) = mpsc::channel(SETTING_MAX);
        (Timers { setting }, Ticking { set })
    }

    /// Sets a timer. After the runtime has stopped, no timer fires any more.
    pub(crate) async fn set(&self, timer: Timer, after: Duration) {
        // The queue is gone only when the runtime has stopped, and then nobody waits for a timer.
        let _ = self.setting.send((timer, after)).await;
    }

    /// Waits; returns at once when the runtime stops.
    pub(crate) async fn pause(&self, after: Duration) {
        let (wake, woken) = oneshot::channel();
        self.set(Timer::Wake(wake), after).await;
        let _ = woken.await;
    }
}

pub(crate) async fn run(runtime: Weak<Inner>, mut ticking: Ticking, stopped: CancellationToken) {
    let mut queue: DelayQueue<Timer> = DelayQueue::new();
    loop {
        tokio::select! {
            () = stopped.cancelled() => return,
            set = ticking.set.recv() => match set {
                Some((timer, after)) => {
                    queue.insert(timer, after);
                }
                None => return,
            },
            Some(expired) = poll_fn(|context| queue.poll_expired(context)), if !queue.is_empty() => {
                let Some(runtime) = runtime.upgrade() else { return };
                fire(&runtime, expired.into_inner());
            }
        }
    }
}

fn fire(runtime: &Arc<Inner>, timer: Timer) {
    match timer {
        Timer::Heartbeat(attempt) => {
            if let Some(attempt) = attempt.upgrade() {
                runtime.house.spawn(attempts::heartbeat(Arc::clone(runtime), attempt));
            }
        }
        Timer::Race(attempt, work) => {
            // Only while the attempt before it still runs.
            if attempt.strong_count() > 0 && !runtime.stopping.is_cancelled() {
                runtime.work.spawn(attempts::race(Arc::clone(runtime), attempt, *work));
            }
        }
        Timer::Wake(wake) => {
            let _ = wake.send(());
        }
    }
}
