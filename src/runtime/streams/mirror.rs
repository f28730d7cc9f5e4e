//! A mirror of another gateway's streams, for the readers on this one.
//!
//! One for each job that somebody here waits for and that runs elsewhere: it asks for the stream, copies it from Redis as it is
//! written there, and ends with its last reader. What became of the attempt it reads from the record, as everybody does.

use std::sync::Arc;
use std::time::Duration;

use super::readers::{Fate, fate};
use super::{Live, Mirrored, Progress, STORE_PAUSE, Shared};
use crate::attempt::{Attempt, AttemptState};
use crate::job::JobId;
use crate::provider::Response;
use crate::runtime::Inner;
use crate::runtime::waiters::{First, Seat};
use crate::store::StreamOf;

/// How often a mirror looks for the next batch; doubles up to [`LOOK_PAUSE_MAX`] while nothing comes.
const LOOK_PAUSE: Duration = Duration::from_millis(25);
/// The longest pause before a mirror looks again.
const LOOK_PAUSE_MAX: Duration = Duration::from_millis(200);

/// Sees to it that the streams of a job that runs elsewhere come here too, as long as somebody reads them.
pub(super) fn keep(runtime: &Arc<Inner>, job: JobId) {
    let streams = &runtime.streams;
    {
        let mut slots = streams.shared.slots();
        let Some(slot) = slots.get_mut(&job.identity()) else { return };
        if slot.here > 0 || slot.mirrored == Mirrored::Yes {
            return;
        }
        slot.mirrored = Mirrored::Yes;
    }
    let (runtime, stopped) = (Arc::clone(runtime), streams.stopped.clone());
    streams.tasks.spawn(async move {
        let mirror = Mirror { runtime: &runtime, job };
        tokio::select! {
            () = stopped.cancelled() => {}
            () = mirror.keep() => {}
        }
    });
}

/// What is copied here of another gateway's streams.
struct Mirror<'a> {
    runtime: &'a Inner,
    job: JobId,
}

impl Drop for Mirror<'_> {
    fn drop(&mut self) {
        let shared = &self.runtime.streams.shared;
        shared.tidy(self.job.identity(), |slot| slot.mirrored = Mirrored::No);
    }
}

impl Mirror<'_> {
    /// Follows the job: each time that it has news, looks whether an attempt of another gateway has begun to answer.
    async fn keep(&self) {
        let store = &self.runtime.store;
        let Ok(mut seat) = self.runtime.waiters.join(self.job.identity(), First::Read) else { return };
        loop {
            let Some(Ok(job)) = seat.news().await else { return };
            if job.id != self.job || job.is_ended() || !self.is_read(None) {
                return;
            }
            let running = |attempt: &&Attempt| attempt.state == AttemptState::Running && attempt.gateway != self.runtime.gateway;
            for attempt in job.attempts.iter().filter(running) {
                let of = StreamOf { job: self.job, attempt: attempt.number };
                match self.copy(of, &attempt.provider, &mut seat).await {
                    Copied::Nothing => {
                        let _ = store.want_stream(self.job).await;
                    }
                    Copied::Something => break,
                    Copied::ForNobody => return,
                }
            }
        }
    }

    /// Copies a stream until it is over.
    async fn copy(&self, of: StreamOf, provider: &str, seat: &mut Seat) -> Copied {
        let store = &self.runtime.store;
        let Ok(Some(batches)) = store.read_stream(of, 0).await else { return Copied::Nothing };
        let Some(head) = batches.head.and_then(|head| Response::from_head(&head, Arc::from([]))) else { return Copied::Nothing };
        let live = Live::new(of, provider, head);
        let mut copying = Copying { shared: &self.runtime.streams.shared, live, end: Progress::Broken };
        let mut at = batches.bytes.len();
        copying.live.push(&batches.bytes);
        copying.shared.add(&copying.live);
        let mut pause = LOOK_PAUSE;
        loop {
            tokio::select! {
                news = seat.news() => {
                    let Some(Ok(job)) = news else { return Copied::Something };
                    match fate(&job, of) {
                        Fate::Running => {}
                        Fate::Won => {
                            copying.end = Progress::Over;
                            return Copied::Something;
                        }
                        Fate::Unknown | Fate::Lost => return Copied::Something,
                    }
                }
                () = tokio::time::sleep(pause) => {}
            }
            if !self.is_read(Some(&copying.live)) {
                return Copied::ForNobody;
            }
            match store.read_stream(of, at).await {
                Ok(Some(more)) if more.bytes.is_empty() => pause = (pause * 2).min(LOOK_PAUSE_MAX),
                Ok(Some(more)) => {
                    copying.live.push(&more.bytes);
                    at += more.bytes.len();
                    pause = LOOK_PAUSE;
                }
                Ok(None) => {
                    tracing::debug!(job = %of.job, attempt = of.attempt, at, "a stream has a gap; its readers are broken off");
                    return Copied::Something;
                }
                Err(error) => {
                    tracing::debug!(job = %of.job, attempt = of.attempt, %error, "a part of a stream is not read yet");
                    pause = STORE_PAUSE;
                }
            }
        }
    }

    /// Whether anybody waits for a stream of the job, or reads this one.
    fn is_read(&self, live: Option<&Arc<Live>>) -> bool {
        let waited_for = || {
            let slots = self.runtime.streams.shared.slots();
            slots.get(&self.job.identity()).is_some_and(|slot| slot.lives.receiver_count() > 0)
        };
        live.is_some_and(|live| live.progress.receiver_count() > 0) || waited_for()
    }
}

/// What came of copying.
enum Copied {
    /// There is nothing yet.
    Nothing,
    /// It is over.
    Something,
    /// Nobody reads it any more.
    ForNobody,
}

/// A stream that is copied here, until what is copied is over.
struct Copying<'a> {
    shared: &'a Shared,
    live: Arc<Live>,
    end: Progress,
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.shared.remove(self.live.of);
        self.live.progress.send_replace(self.end);
    }
}
