//! Who waits for a job, on this gateway.
//!
//! All who wait for one job share one follower: it reads the record when a wake-up says that something changed, or every
//! [`POLL`] because a wake-up is only a hint, and tells them all. Ten thousand waiters cost one read.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::StoreError;
use crate::job::{Identity, Job};
use crate::metrics;
use crate::runtime::{Inner, ReadError};
use crate::store::{Read, Store};

/// How often a job is read although nobody said that it changed.
const POLL: Duration = Duration::from_secs(2);
/// The pause before a lost subscription is opened again.
const LISTEN_PAUSE: Duration = Duration::from_millis(500);

type News = Option<Result<Arc<Job>, ReadError>>;

pub(crate) struct Waiters {
    shared: Arc<Shared>,
    limit: usize,
    tasks: TaskTracker,
    stopped: CancellationToken,
}

struct Shared {
    store: Store,
    followed: Mutex<HashMap<Identity, Followed>>,
    waiting: AtomicUsize,
}

struct Followed {
    news: watch::Sender<News>,
    changed: Arc<Notify>,
}

/// One waiter's place. Leaving is dropping it.
pub(crate) struct Seat {
    news: watch::Receiver<News>,
    shared: Arc<Shared>,
}

impl Seat {
    /// The job as the follower last read it, then each later reading; `None` once nobody follows it any more.
    pub(crate) async fn news(&mut self) -> News {
        loop {
            self.news.changed().await.ok()?;
            let news = self.news.borrow_and_update().clone();
            if news.is_some() {
                return news;
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        metrics::waiter_left();
    }
}

impl Waiters {
    pub(crate) fn new(store: Store, limit: usize, tasks: TaskTracker, stopped: CancellationToken) -> Self {
        metrics::waiters_limit(limit);
        let shared = Shared { store, followed: Mutex::new(HashMap::new()), waiting: AtomicUsize::new(0) };
        Waiters { shared: Arc::new(shared), limit, tasks, stopped }
    }

    /// Takes a place among those who wait for a job.
    ///
    /// # Errors
    /// All places are taken.
    pub(crate) fn join(&self, identity: Identity) -> Result<Seat, ReadError> {
        let waiting = self.shared.waiting.fetch_add(1, Ordering::Relaxed) + 1;
        if waiting > self.limit {
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(ReadError::TooManyWaiters { limit: self.limit });
        }
        metrics::waiter_came();
        let mut followed = self.shared.followed();
        let mut news = match followed.get(&identity) {
            Some(one) => one.news.subscribe(),
            None => {
                let (sender, receiver) = watch::channel(None);
                let changed = Arc::new(Notify::new());
                followed.insert(identity, Followed { news: sender.clone(), changed: Arc::clone(&changed) });
                self.tasks.spawn(follow(Arc::clone(&self.shared), identity, sender, changed, self.stopped.clone()));
                receiver
            }
        };
        drop(followed);
        // What is known already is news to who joins now.
        news.mark_changed();
        Ok(Seat { news, shared: Arc::clone(&self.shared) })
    }

    /// Says that a job has changed.
    pub(crate) fn wake(&self, identity: Identity) {
        if let Some(one) = self.shared.followed().get(&identity) {
            one.changed.notify_one();
        }
    }
}

impl Shared {
    fn followed(&self) -> std::sync::MutexGuard<'_, HashMap<Identity, Followed>> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads one job for all who wait for it, until it has ended or nobody waits any more.
async fn follow(
    shared: Arc<Shared>,
    identity: Identity,
    sender: watch::Sender<News>,
    changed: Arc<Notify>,
    stopped: CancellationToken,
) {
    loop {
        let (news, last) = match shared.store.read_job(identity).await {
            Ok(Read::Found(job)) => {
                let ended = job.is_ended();
                (Some(Ok(Arc::new(*job))), ended)
            }
            Ok(Read::Gone(gone)) => (Some(Err(ReadError::Gone(gone))), true),
            Ok(Read::NotFound) => (Some(Err(ReadError::NotFound)), true),
            Err(error @ StoreError::Fatal { .. }) => (Some(Err(ReadError::Store(error))), true),
            // The store is away; each who waits has a deadline of its own.
            Err(StoreError::NotExecuted { .. } | StoreError::Ambiguous { .. }) => (None, false),
        };
        if last {
            // Who comes from now on begins anew: an ended job may be reopened.
            shared.followed().remove(&identity);
        }
        if news.is_some() {
            sender.send_replace(news);
        }
        if last {
            return;
        }
        tokio::select! {
            () = changed.notified() => {}
            () = tokio::time::sleep(POLL) => {}
            () = sender.closed() => {
                let mut followed = shared.followed();
                if sender.receiver_count() == 0 {
                    followed.remove(&identity);
                    return;
                }
            }
            () = stopped.cancelled() => {
                shared.followed().remove(&identity);
                return;
            }
        }
    }
}

/// Listens to all gateways, and wakes those who wait here.
pub(crate) async fn listen(runtime: Arc<Inner>) {
    let stopped = runtime.stopped.clone();
    loop {
        let wakeups = tokio::select! {
            () = stopped.cancelled() => return,
            wakeups = runtime.store.wakeups() => wakeups,
        };
        match wakeups {
            Ok(mut wakeups) => loop {
                let identity = tokio::select! {
                    () = stopped.cancelled() => return,
                    identity = wakeups.next() => identity,
                };
                match identity {
                    Some(identity) => runtime.waiters.wake(identity),
                    None => {
                        tracing::warn!("the subscription to wake-ups is lost; waiting goes on by polling until it stands again");
                        break;
                    }
                }
            },
            Err(error) => tracing::debug!(%error, "no subscription to wake-ups"),
        }
        tokio::select! {
            () = stopped.cancelled() => return,
            () = tokio::time::sleep(LISTEN_PAUSE) => {}
        }
    }
}
