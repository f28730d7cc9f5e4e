//! Readers of a stream: from its beginning, whenever they come, to the end of the stored result.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use super::{Live, Progress, Shared, Slot, Streams, mirror};
use crate::attempt::AttemptState;
use crate::job::{Job, JobId};
use crate::metrics;
use crate::provider::Response;
use crate::runtime::waiters::{First, Seat};
use crate::runtime::{Expected, ReadError, Receipt, Replayed, Runtime, WaitFor};
use crate::store::StreamOf;

/// Most bytes that a reader takes at once: what one that does not read holds, besides its connection's own buffers.
const READ_BYTES_MAX: usize = 64 << 10;
/// How long a reader waits, after the last part, for the result to be stored. A result in hand is stored later too; then the same key
/// replays it.
const STORED_WAIT_MAX: Duration = Duration::from_secs(30);

impl Streams {
    /// The streams of a job, from now on.
    fn of(&self, job: JobId) -> Coming {
        let lives = self.shared.slots().entry(job.identity()).or_insert_with(Slot::new).lives.subscribe();
        Coming { shared: Arc::clone(&self.shared), job, lives: Some(lives) }
    }
}

/// What is to come of a job's streams.
struct Coming {
    shared: Arc<Shared>,
    job: JobId,
    lives: Option<watch::Receiver<Vec<Arc<Live>>>>,
}

impl Coming {
    /// The stream of this job that began first, as soon as there is one.
    async fn begun(&mut self) -> Arc<Live> {
        let job = self.job;
        let lives = self.lives.as_mut().expect("it is taken on drop alone");
        let of_job = |lives: &[Arc<Live>]| lives.iter().find(|live| live.of.job == job).cloned();
        loop {
            if let Some(live) = of_job(&lives.borrow_and_update()) {
                return live;
            }
            if lives.changed().await.is_err() {
                // Its sender is kept as long as somebody listens.
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.lives = None;
        self.shared.tidy(self.job.identity(), |_| {});
    }
}

/// What came to who waits for an answer.
pub(crate) enum Came {
    /// The job, settled or as it stands when the time is over.
    Job(Arc<Job>),
    /// Its answer has begun.
    Stream(Reader),
}

/// One who reads a stream.
pub(crate) struct Reader {
    of: StreamOf,
    provider: String,
    head: Response,
    live: Weak<Live>,
    progress: watch::Receiver<Progress>,
    seat: Seat,
    read_bytes: usize,
    end: &'static str,
}

/// What a reader reads next.
pub(crate) enum Next {
    /// Bytes that follow those before.
    Part(Bytes),
    /// The attempt's answer is the job's result, and stored: the rest of it, after so many bytes.
    Rest {
        /// The job, ended.
        job: Arc<Job>,
        /// How much of the result was read.
        read_bytes: usize,
    },
    /// There is no more of it, and it was not all.
    Broken,
}

impl Reader {
    fn new(live: &Arc<Live>, seat: Seat) -> Self {
        metrics::stream_reader_came();
        Reader {
            of: live.of,
            provider: live.provider.clone(),
            head: live.head.clone(),
            live: Arc::downgrade(live),
            progress: live.progress.subscribe(),
            seat,
            read_bytes: 0,
            end: "left",
        }
    }

    /// The answer's status and headers, without a body.
    pub(crate) fn head(&self) -> &Response {
        &self.head
    }

    /// Whose answer it is.
    pub(crate) fn provider(&self) -> &str {
        &self.provider
    }

    /// Reads on. After `Rest` and `Broken` there is nothing more.
    ///
    /// # Cancel safety
    /// Cancel safe: nothing that was not returned counts as read.
    pub(crate) async fn next(&mut self) -> Next {
        loop {
            if let Some(live) = self.live.upgrade() {
                self.progress.borrow_and_update();
                let part = live.after(self.read_bytes, READ_BYTES_MAX);
                if !part.is_empty() {
                    self.read_bytes += part.len();
                    return Next::Part(part);
                }
            }
            // Not held meanwhile: it is dropped when it is over.
            if self.progress.changed().await.is_err() {
                let over = *self.progress.borrow() == Progress::Over;
                let next = if over { self.rest().await } else { Next::Broken };
                self.end = if matches!(next, Next::Rest { .. }) { "whole" } else { "broken" };
                return next;
            }
        }
    }

    /// Waits until the record says what became of the attempt.
    async fn rest(&mut self) -> Next {
        let deadline = tokio::time::Instant::now() + STORED_WAIT_MAX;
        loop {
            let news = tokio::select! {
                news = self.seat.news() => news,
                () = tokio::time::sleep_until(deadline) => return Next::Broken,
            };
            let Some(Ok(job)) = news else { return Next::Broken };
            match fate(&job, self.of) {
                // It has ended well, late: the record is about to say so.
                Fate::Running | Fate::Unknown => {}
                Fate::Won => return Next::Rest { job, read_bytes: self.read_bytes },
                Fate::Lost => return Next::Broken,
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        metrics::stream_reader_left(self.end);
    }
}

/// What a record says of the attempt behind a stream.
pub(super) enum Fate {
    Running,
    /// Its time was over, or its lease: only its own gateway can know better.
    Unknown,
    Won,
    Lost,
}

pub(super) fn fate(job: &Job, of: StreamOf) -> Fate {
    let attempt = job.attempts.iter().find(|attempt| attempt.number == of.attempt);
    match attempt {
        _ if job.id != of.job => Fate::Lost,
        Some(attempt) if attempt.state == AttemptState::Running && !job.is_ended() => Fate::Running,
        Some(attempt) if attempt.state == AttemptState::Unknown && !job.is_ended() => Fate::Unknown,
        Some(_) if job.completed_by == of.attempt => Fate::Won,
        Some(_) | None => Fate::Lost,
    }
}

impl Runtime {
    /// Waits as [`Runtime::wait_expected`] does for a job to settle, or until its answer has begun to come in parts, wherever it
    /// runs.
    ///
    /// # Errors
    /// See [`ReadError`].
    ///
    /// # Cancel safety
    /// Cancel safe. The job does not notice.
    pub(crate) async fn wait_or_read(
        &self,
        expected: Option<Expected>,
        receipt: &Receipt,
        within: Duration,
    ) -> Result<Came, ReadError> {
        let id = receipt.job.id;
        let mut coming = self.inner.streams.of(id);
        let mut seat = match expected {
            Some(Expected(seat)) => {
                if receipt.replayed == Replayed::Yes {
                    // It may have ended before the place was taken.
                    self.inner.waiters.wake(id.identity());
                }
                seat
            }
            None => self.inner.waiters.join(id.identity(), First::Read)?,
        };
        if receipt.replayed == Replayed::Yes {
            mirror::keep(&self.inner, id);
        }
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let left = deadline.saturating_duration_since(tokio::time::Instant::now());
            let waited = tokio::select! {
                live = coming.begun() => return Ok(Came::Stream(Reader::new(&live, seat))),
                waited = self.wait_on(&mut seat, id, WaitFor::Settled, left) => waited,
            };
            match waited {
                // The place was among those who wait for the incarnation before.
                Err(ReadError::NotFound) if self.read(id).await.is_ok() => {
                    seat = self.inner.waiters.join(id.identity(), First::Read)?;
                }
                waited => return waited.map(Came::Job),
            }
        }
    }
}
