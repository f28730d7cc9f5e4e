//! What a provider says of a call before its outcome: heard while the call runs.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::mpsc::Receiver;

use crate::provider::{Outcome, Told};
use crate::runtime::Inner;
use crate::runtime::attempts::Running;
use crate::runtime::streams::Writing;

/// How long after the outcome what was told before it may take to be heard.
const LAST_TOLD: Duration = Duration::from_secs(1);

/// Waits for an outcome, and hears what is told before it.
pub(super) async fn hear(
    runtime: &Inner,
    attempt: &Running,
    outcome: impl Future<Output = Outcome>,
    heard: Receiver<Told>,
) -> Outcome {
    let mut writing = runtime.streams.enter(attempt);
    let outcome = hear_into(runtime, attempt, outcome, heard, &mut writing).await;
    writing.end(&outcome);
    outcome
}

async fn hear_into(
    runtime: &Inner,
    attempt: &Running,
    outcome: impl Future<Output = Outcome>,
    heard: Receiver<Told>,
    writing: &mut Writing<'_>,
) -> Outcome {
    let mut listening = pin!(listen(runtime, attempt, heard, writing));
    let mut outcome = pin!(outcome);
    let mut listens = true;
    let outcome = loop {
        tokio::select! {
            outcome = &mut outcome => break outcome,
            () = &mut listening, if listens => listens = false,
        }
    };
    if listens {
        // An adapter that keeps its end of the channel for itself keeps nobody waiting.
        let _ = tokio::time::timeout(LAST_TOLD, listening).await;
    }
    outcome
}

async fn listen(_runtime: &Inner, attempt: &Running, mut heard: Receiver<Told>, writing: &mut Writing<'_>) {
    while let Some(told) = heard.recv().await {
        match told {
            Told::Accepted { remote_id } => {
                tracing::debug!(job = %attempt.job, attempt = attempt.number, remote_id, "the provider took it on");
            }
            Told::Head { status, headers } => writing.begin(&attempt.lane.slot.name, status, headers),
            Told::Part(part) => writing.push(&part),
        }
    }
}
