//! What a provider says of a call before its outcome: heard while the call runs.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::OptionFuture;
use tokio::sync::mpsc::Receiver;

use crate::attempt::AttemptToken;
use crate::job::JobId;
use crate::policy::LINGER_MAX;
use crate::provider::{Outcome, Told};
use crate::runtime::attempts::{Running, STORE_PAUSE, STORE_PAUSE_MAX};
use crate::runtime::streams::Writing;
use crate::runtime::verdict::is_name;
use crate::runtime::{Inner, verdict};
use crate::store::NoteAttempt;

/// How long after the outcome what was told before it may take to be heard.
const LAST_TOLD: Duration = Duration::from_secs(1);

/// How long after its deadline an adapter may say how a call ended. It keeps the deadline itself; this is for one that does not.
const GRACE: Duration = Duration::from_secs(1);

/// Waits for an outcome, and hears what is told before it.
pub(super) async fn hear(
    runtime: &Arc<Inner>,
    attempt: &Arc<Running>,
    outcome: impl Future<Output = Outcome>,
    heard: Receiver<Told>,
    deadline: Instant,
) -> Outcome {
    let mut writing = runtime.streams.enter(attempt);
    let outcome = hear_into(runtime, attempt, outcome, heard, deadline, &mut writing).await;
    writing.end(&outcome);
    outcome
}

async fn hear_into(
    runtime: &Arc<Inner>,
    attempt: &Arc<Running>,
    outcome: impl Future<Output = Outcome>,
    heard: Receiver<Told>,
    deadline: Instant,
    writing: &mut Writing<'_>,
) -> Outcome {
    let mut listening = pin!(listen(runtime, attempt, heard, writing));
    let mut outcome = pin!(outcome);
    let mut listens = true;
    let mut bound = deadline + GRACE;
    let outcome = loop {
        tokio::select! {
            outcome = &mut outcome => break outcome,
            () = &mut listening, if listens => listens = false,
            // What is known of it is written down; a stop does not wait for what may never come.
            () = async { attempt.noted_unknown.cancelled().await; runtime.stopping.cancelled().await } => {
                break Outcome::Unknown { reason: "the gateway stopped".to_owned() };
            }
            // One that has said that its time is over listens for a late answer, in its own time.
            () = tokio::time::sleep_until(bound.into()) => match attempt.overdue.is_cancelled() {
                true if bound < deadline + LINGER_MAX => bound = deadline + LINGER_MAX,
                _ => break Outcome::Unknown { reason: "timeout: the adapter did not keep its deadline".to_owned() },
            },
        }
    };
    if listens {
        // An adapter that keeps its end of the channel for itself keeps nobody waiting.
        let _ = tokio::time::timeout(LAST_TOLD, listening).await;
    }
    outcome
}

async fn listen(runtime: &Arc<Inner>, attempt: &Arc<Running>, mut heard: Receiver<Told>, writing: &mut Writing<'_>) {
    // Beside the rest: while Redis is away it takes its time, and an answer that comes in parts must not wait for it.
    let mut noting = OptionFuture::from(None);
    loop {
        let told = tokio::select! {
            biased;
            // Settled elsewhere: whoever still asks the provider is told by this that nobody listens any more.
            () = attempt.settled.cancelled() => return,
            Some(()) = &mut noting => {
                noting = OptionFuture::from(None);
                continue;
            }
            told = heard.recv() => told,
        };
        match told {
            None => break,
            Some(Told::Accepted { remote_id }) => accepted(runtime, attempt, remote_id),
            Some(Told::Overdue { reason }) => {
                attempt.overdue.cancel();
                noting = OptionFuture::from(Some(async move { verdict::overdue(runtime, attempt, &reason).await }.boxed()));
            }
            Some(Told::Head { status, headers }) => writing.begin(&attempt.lane.slot.name, status, headers),
            Some(Told::Part(part)) => writing.push(&part),
        }
    }
    noting.await;
}

/// The provider took it on under a name of its own: noted at once, beside the call. The first name counts.
fn accepted(runtime: &Arc<Inner>, attempt: &Arc<Running>, remote_id: String) {
    let (job, number, token) = (attempt.job, attempt.number, attempt.token);
    if !is_name(&remote_id) || attempt.remote_id.set(remote_id.clone()).is_err() {
        return tracing::debug!(%job, attempt = number, "the provider's name for an attempt is not noted: too long, or the second");
    }
    tracing::debug!(%job, attempt = number, remote_id, "the provider took it on");
    let named = Named { job, number, token, remote_id };
    runtime.work.spawn(note(Arc::clone(runtime), Arc::downgrade(attempt), named));
}

/// What a provider calls an attempt.
struct Named {
    job: JobId,
    number: u32,
    token: AttemptToken,
    remote_id: String,
}

/// Notes the name, again and again until the store has it, or until the attempt has ended: its end says it too.
async fn note(runtime: Arc<Inner>, attempt: Weak<Running>, named: Named) {
    let Named { job, number, token, remote_id } = &named;
    let note = NoteAttempt { job: *job, number: *number, token: *token, remote_id, model: "", event: None };
    let mut pause = STORE_PAUSE;
    while let Err(error) = runtime.store.note_attempt(&note).await {
        tracing::debug!(%job, attempt = number, %error, "the provider's name for an attempt is not noted yet");
        if !error.is_retryable() && !error.is_for_permission() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = runtime.stopped.cancelled() => return,
        }
        if attempt.strong_count() == 0 {
            return;
        }
        pause = (pause * 2).min(STORE_PAUSE_MAX);
    }
}
