//! Answers that come in parts, for any number of readers, while they come.
//!
//! The parts of a running attempt are in the memory of its gateway, whole, so that a reader may come late and begin at the beginning,
//! and a slow one keeps nobody waiting. A reader on another gateway reads a *mirror* of them: its gateway asks, and the one that runs
//! the attempt writes them to Redis from then on (`store/streams.rs`). Where nobody asks, a stream costs Redis nothing.
//!
//! What a reader is told:
//!
//! - Parts are told before the result is stored; the end is told after it. Once the attempt is over, the rest is read from the job's
//!   result, and only if that is this very attempt's. So no reader ever sees the end of what was not stored.
//! - A reader whose attempt did not win is broken off, and never given a byte of another attempt's. In a race, readers follow the
//!   attempt whose answer began first.
//! - Readers come and go; the attempt does not notice.
//!
//! `streams/readers.rs` has the readers, `streams/mirror.rs` the mirrors. Deliberately not here: whether a stream is whole (the
//! adapter's), and anything that is held for readers once an attempt is over: a slow one reads the rest from the store.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::StoreError;
use crate::job::{Identity, JobId};
use crate::provider::{Outcome, Response};
use crate::runtime::attempts::Running;
use crate::store::{Appended, STREAM_LIFE, Store, StreamOf};

#[cfg(feature = "gateway")]
mod mirror;
#[cfg(feature = "gateway")]
mod readers;

#[cfg(feature = "gateway")]
pub(crate) use readers::{Came, Next, Reader};

/// Most bytes of one batch in Redis.
const BATCH_BYTES_MAX: usize = 256 << 10;
/// The least time between two batches of a stream that is not behind: what comes meanwhile goes together.
const BATCH_PAUSE: Duration = Duration::from_millis(50);
/// The pause after Redis did not take or give a batch.
const STORE_PAUSE: Duration = Duration::from_millis(500);
/// The streams that this gateway has.
pub(crate) struct Streams {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stopped: CancellationToken,
}

struct Shared {
    store: Store,
    slots: Mutex<HashMap<Identity, Slot>>,
}

/// What is here of one job.
struct Slot {
    /// The streams that are coming in, the one that began first first. Whoever waits for one listens.
    lives: watch::Sender<Vec<Arc<Live>>>,
    /// Attempts that run here.
    here: usize,
    /// Which job has readers on other gateways, as far as one said so.
    wanted: Option<JobId>,
    /// Whether a mirror of another gateway's streams is kept.
    mirrored: Mirrored,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mirrored {
    #[cfg(feature = "gateway")]
    Yes,
    No,
}

impl Slot {
    fn new() -> Self {
        Slot { lives: watch::Sender::new(Vec::new()), here: 0, wanted: None, mirrored: Mirrored::No }
    }

    fn is_of_use(&self) -> bool {
        self.here > 0 || self.mirrored != Mirrored::No || self.lives.receiver_count() > 0
    }
}

/// A stream that is coming in. Dropped when it is over: whoever still reads goes on with the result.
struct Live {
    of: StreamOf,
    #[cfg_attr(not(feature = "gateway"), expect(dead_code, reason = "for readers, and a library alone has none"))]
    provider: String,
    head: Response,
    bytes: Mutex<Vec<u8>>,
    progress: watch::Sender<Progress>,
}

/// How far a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// So many bytes have come.
    Growing(usize),
    /// The attempt succeeded, as far as its gateway can tell.
    Over,
    /// It did not.
    Broken,
}

impl Live {
    fn new(of: StreamOf, provider: &str, head: Response) -> Arc<Self> {
        let progress = watch::Sender::new(Progress::Growing(0));
        Arc::new(Live { of, provider: provider.to_owned(), head, bytes: Mutex::default(), progress })
    }

    fn push(&self, part: &[u8]) {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.extend_from_slice(part);
        self.progress.send_replace(Progress::Growing(bytes.len()));
    }

    /// What has come after so many bytes, at most so much.
    fn after(&self, from: usize, bytes_max: usize) -> Bytes {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let rest = bytes.get(from..).unwrap_or_default();
        Bytes::copy_from_slice(&rest[..rest.len().min(bytes_max)])
    }
}

impl Streams {
    pub(crate) fn new(store: Store, tasks: TaskTracker, stopped: CancellationToken) -> Self {
        Streams { shared: Arc::new(Shared { store, slots: Mutex::default() }), tasks, stopped }
    }

    /// Says that an attempt runs here, until what is returned is dropped.
    pub(crate) fn enter(&self, attempt: &Running) -> Writing<'_> {
        let of = StreamOf { job: attempt.job, attempt: attempt.number };
        self.shared.slots().entry(of.job.identity()).or_insert_with(Slot::new).here += 1;
        Writing { streams: self, of, live: None, end: Progress::Broken }
    }

    /// Another gateway has readers for a job's streams: they are written from now on, if the job runs here.
    pub(crate) fn wanted(&self, job: JobId) {
        let lives = match self.shared.slots().get_mut(&job.identity()) {
            Some(slot) if slot.here > 0 && slot.wanted != Some(job) => {
                slot.wanted = Some(job);
                slot.lives.borrow().clone()
            }
            Some(_) | None => return,
        };
        lives.iter().filter(|live| live.of.job == job).for_each(|live| self.publish(live));
    }

    /// Writes a stream to Redis, for the readers of other gateways.
    fn publish(&self, live: &Arc<Live>) {
        let (store, stopped) = (self.shared.store.clone(), self.stopped.clone());
        let (of, head, progress) = (live.of, live.head.head(), live.progress.subscribe());
        // Not held: it is over when it is dropped.
        let live = Arc::downgrade(live);
        self.tasks.spawn(async move {
            tokio::select! {
                () = stopped.cancelled() => {}
                () = publish(&store, of, &head, &live, progress) => {}
            }
            // The record has the whole, or there is none.
            let _ = store.remove_stream(of).await;
        });
    }
}

impl Shared {
    fn slots(&self) -> MutexGuard<'_, HashMap<Identity, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows a stream to who waits for it; says which job is wanted elsewhere, as of that very moment: a stream is written by one.
    fn add(&self, live: &Arc<Live>) -> Option<JobId> {
        let mut slots = self.slots();
        let slot = slots.get_mut(&live.of.job.identity())?;
        slot.lives.send_modify(|lives| lives.push(Arc::clone(live)));
        slot.wanted
    }

    fn remove(&self, of: StreamOf) {
        if let Some(slot) = self.slots().get_mut(&of.job.identity()) {
            slot.lives.send_if_modified(|lives| {
                lives.retain(|live| live.of != of);
                false
            });
        }
    }

    /// Forgets a job of which nothing is here any more.
    fn tidy(&self, identity: Identity, change: impl FnOnce(&mut Slot)) {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&identity) else { return };
        change(slot);
        if !slot.is_of_use() {
            slots.remove(&identity);
        }
    }
}

/// An attempt that runs here, and its stream if it has one.
pub(crate) struct Writing<'a> {
    streams: &'a Streams,
    of: StreamOf,
    live: Option<Arc<Live>>,
    end: Progress,
}

impl Writing<'_> {
    /// The answer has begun.
    pub(crate) fn begin(&mut self, provider: &str, status: u16, headers: Vec<(String, String)>) {
        if self.live.is_some() {
            return;
        }
        let live = Live::new(self.of, provider, Response { status, headers, body: Arc::from([]) });
        if self.streams.shared.add(&live) == Some(self.of.job) {
            self.streams.publish(&live);
        }
        self.live = Some(live);
    }

    /// A part of it has come.
    pub(crate) fn push(&self, part: &[u8]) {
        if let Some(live) = &self.live {
            live.push(part);
        }
    }

    /// The call is over.
    pub(crate) fn end(mut self, outcome: &Outcome) {
        self.end = match outcome {
            Outcome::Succeeded { .. } => Progress::Over,
            Outcome::NotSent { .. } | Outcome::Rejected { .. } | Outcome::InvalidOutput { .. } | Outcome::Unknown { .. } => {
                Progress::Broken
            }
        };
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let shared = &self.streams.shared;
        if let Some(live) = self.live.take() {
            shared.remove(self.of);
            live.progress.send_replace(self.end);
        }
        shared.tidy(self.of.job.identity(), |slot| {
            slot.here -= 1;
            if slot.here == 0 {
                slot.wanted = None;
            }
        });
    }
}

/// Writes a stream until it is over, and announces its beginning.
async fn publish(store: &Store, of: StreamOf, head: &str, live: &Weak<Live>, mut progress: watch::Receiver<Progress>) {
    let mut at = None;
    loop {
        let Some(from) = at else {
            until_taken(of, || store.begin_stream(of, head)).await;
            // To those who wait for its beginning.
            let _ = store.announce_now(of.job.identity()).await;
            at = Some(0);
            continue;
        };
        progress.borrow_and_update();
        let Some(batch) = live.upgrade().map(|live| live.after(from, BATCH_BYTES_MAX)) else { return };
        if batch.is_empty() {
            tokio::select! {
                changed = progress.changed() => match changed {
                    Ok(()) => {}
                    Err(_) => return,
                },
                () = tokio::time::sleep(STREAM_LIFE / 3) => drop(store.renew_stream(of).await),
            }
            continue;
        }
        // The very same batch again, or what was taken of it would be taken for what is to follow it.
        at = match until_taken(of, || store.append_stream(of, from, &batch)).await {
            Appended::There => Some(from + batch.len()),
            // Redis lost it. Who reads it finds the gap, if there is one.
            Appended::Lost => None,
        };
        if batch.len() < BATCH_BYTES_MAX {
            tokio::time::sleep(BATCH_PAUSE).await;
        }
    }
}

/// Makes a call to the store until it is answered. Ends with the gateway: its caller waits for that too.
async fn until_taken<T, F: Future<Output = Result<T, StoreError>>>(of: StreamOf, mut call: impl FnMut() -> F) -> T {
    loop {
        match call().await {
            Ok(taken) => return taken,
            Err(error) => {
                tracing::debug!(job = %of.job, attempt = of.attempt, %error, "a part of a stream is not written yet");
                tokio::time::sleep(STORE_PAUSE).await;
            }
        }
    }
}
