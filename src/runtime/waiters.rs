//! Who waits for a job, on this gateway.
//!
//! All who wait for one job share one follower: it reads the record when a wake-up says that something changed, or every
//! [`POLL`] because a wake-up is only a hint, and tells them all. Ten thousand waiters cost one read. Where the job's result is
//! claimed on this gateway, even that is saved: the reply to the claim tells the job, and the follower has nothing left to do.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::StoreError;
use crate::job::{Identity, Job, JobId};
use crate::metrics;
use crate::runtime::losses::{self, What};
use crate::runtime::{Inner, ReadError};
use crate::store::{Read, Said, Store};

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
    /// How many calls are under way that may tell the job's end.
    held: usize,
    /// Whether somebody said meanwhile that the job has changed.
    woken: bool,
}

/// Keeps a follower from reading while a call is under way that may tell it the end: the call's own wake-up comes before its reply.
pub(crate) struct Hold {
    shared: Arc<Shared>,
    identity: Identity,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut followed = self.shared.followed();
        let Some(one) = followed.get_mut(&self.identity) else { return };
        one.held = one.held.saturating_sub(1);
        if one.held == 0 && std::mem::take(&mut one.woken) {
            one.changed.notify_one();
        }
    }
}

/// What a new follower does first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum First {
    /// It reads the job.
    Read,
    /// It waits until somebody says that the job has changed: the job is being claimed just now.
    Wait,
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
    pub(crate) fn join(&self, identity: Identity, first: First) -> Result<Seat, ReadError> {
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
                followed
                    .insert(identity, Followed { news: sender.clone(), changed: Arc::clone(&changed), held: 0, woken: false });
                let stopped = self.stopped.clone();
                self.tasks.spawn(follow(Arc::clone(&self.shared), identity, sender, changed, first, stopped));
                receiver
            }
        };
        drop(followed);
        // What is known already is news to who joins now.
        news.mark_changed();
        Ok(Seat { news, shared: Arc::clone(&self.shared) })
    }

    /// If anybody waits for a job here, keeps them waiting for what the caller is about to tell.
    pub(crate) fn hold(&self, identity: Identity) -> Option<Hold> {
        self.shared.followed().get_mut(&identity)?.held += 1;
        Some(Hold { shared: Arc::clone(&self.shared), identity })
    }

    /// Tells an ended job to all who wait for it here.
    pub(crate) fn tell(&self, job: Arc<Job>) {
        let mut followed = self.shared.followed();
        // Who comes from now on begins anew: an ended job may be reopened.
        let Some(one) = followed.remove(&job.id.identity()) else { return };
        one.news.send_replace(Some(Ok(job)));
        // Its follower finds that it has been dismissed.
        one.changed.notify_one();
    }

    /// Says that a job has changed.
    pub(crate) fn wake(&self, identity: Identity) {
        match self.shared.followed().get_mut(&identity) {
            Some(one) if one.held > 0 => one.woken = true,
            Some(one) => one.changed.notify_one(),
            None => {}
        }
    }
}

impl Shared {
    fn followed(&self) -> MutexGuard<'_, HashMap<Identity, Followed>> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a follower is still the one: others may have told the end, and somebody come anew, while it read.
fn still_follows(followed: &HashMap<Identity, Followed>, identity: Identity, sender: &watch::Sender<News>) -> bool {
    followed.get(&identity).is_some_and(|one| one.news.same_channel(sender))
}

/// Reads one job for all who wait for it, until it has ended or nobody waits any more.
async fn follow(
    shared: Arc<Shared>,
    identity: Identity,
    sender: watch::Sender<News>,
    changed: Arc<Notify>,
    first: First,
    stopped: CancellationToken,
) {
    let mut reads = first == First::Read;
    let mut seen: Option<(JobId, u64)> = None;
    loop {
        if reads {
            let (news, last) = match shared.store.read_told(identity).await {
                Ok(Read::Found(job)) => {
                    let ended = job.is_ended();
                    if seen.is_some_and(|seen| losses::is_older(&job, seen)) {
                        losses::lost(What::Job, job.id);
                    }
                    seen = Some((job.id, job.revision));
                    (Some(Ok(Arc::new(*job))), ended)
                }
                Ok(Read::Gone(gone)) => (Some(Err(ReadError::Gone(gone))), true),
                Ok(Read::NotFound) => {
                    // It was open when it was seen: it has no expiry.
                    if let Some((id, _)) = seen {
                        losses::lost(What::Job, id);
                    }
                    (Some(Err(ReadError::NotFound)), true)
                }
                Err(error @ StoreError::Fatal { .. }) => (Some(Err(ReadError::Store(error))), true),
                // The store is away; each who waits has a deadline of its own.
                Err(StoreError::NotExecuted { .. } | StoreError::Ambiguous { .. } | StoreError::NotDurable { .. }) => {
                    (None, false)
                }
            };
            // Under the lock, or what was read before the end could be told after it.
            let mut followed = shared.followed();
            if !still_follows(&followed, identity, &sender) {
                return;
            }
            if last {
                // Who comes from now on begins anew: an ended job may be reopened.
                followed.remove(&identity);
            }
            if news.is_some() {
                sender.send_replace(news);
            }
            if last {
                return;
            }
        }
        reads = true;
        tokio::select! {
            () = changed.notified() => {
                if !still_follows(&shared.followed(), identity, &sender) {
                    return;
                }
            }
            () = tokio::time::sleep(POLL) => {}
            () = sender.closed() => {
                let mut followed = shared.followed();
                if sender.receiver_count() == 0 {
                    if still_follows(&followed, identity, &sender) {
                        followed.remove(&identity);
                    }
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
                let said = tokio::select! {
                    () = stopped.cancelled() => return,
                    said = wakeups.next() => said,
                };
                match said {
                    Some(Said::Changed(identity)) => runtime.waiters.wake(identity),
                    Some(Said::StreamWanted(job)) => runtime.streams.wanted(job),
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
