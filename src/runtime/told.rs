//! What a provider says of a call before its outcome: heard while the call runs.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::mpsc::Receiver;

use crate::provider::{Outcome, Told};
use crate::runtime::Inner;
use crate::runtime::attempts::Running;

/// How long after the outcome what was told before it may take to be heard.
const LAST_TOLD: Duration = Duration::from_secs(1);

/// Waits for an outcome, and hears what is told before it.
pub(super) async fn hear(
    runtime: &Inner,
    attempt: &Running,
    outcome: impl Future<Output = Outcome>,
    heard: Receiver<Told>,
) -> Outcome {
    let mut listening = pin!(listen(runtime, attempt, heard));
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

async fn listen(_runtime: &Inner, attempt: &Running, mut heard: Receiver<Told>) {
    loop {
        let told = tokio::select! {
            biased;
            // Settled elsewhere: whoever still asks the provider is told by this that nobody listens any more.
            () = attempt.settled.cancelled() => return,
            told = heard.recv() => told,
        };
        let Some(told) = told else { return };
        match told {
            Told::Accepted { remote_id } => {
                tracing::debug!(job = %attempt.job, attempt = attempt.number, remote_id, "the provider took it on");
            }
            Told::Head { .. } | Told::Part(_) => {}
        }
    }
}
