//! What an outcome means: for the record, for the metrics, and for what comes next.
//!
//! A result in hand is stored before anybody is told, and kept until the store takes it or the process must stop. What may begin next
//! is the plan's wish (`policy.rs`); whether it may is the scripts' word.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::attempt::{AttemptState, FinishOutcome};
use crate::error::StoreError;
use crate::job::JobState;
use crate::metrics;
use crate::policy::{self, FailoverOn, GateSaid, Next, Try};
use crate::provider::{Outcome, Response};
use crate::runtime::attempts::{Running, STORE_PAUSE, STORE_PAUSE_MAX, Work};
use crate::runtime::sweeper;
use crate::runtime::{Inner, millis};
use crate::store::{FinishAttempt, Finished, Follow, Hint, Keep};

/// What an outcome means for the record.
pub(super) struct Verdict {
    outcome: FinishOutcome,
    reason: String,
    response: Option<Response>,
    remote_id: String,
    model: String,
    follow: Follow,
    next: Option<(usize, Duration)>,
}

impl Verdict {
    /// An end with nothing to keep but its reason, and nothing after it.
    pub(super) fn plain(outcome: FinishOutcome, reason: String) -> Self {
        Verdict {
            outcome,
            reason,
            response: None,
            remote_id: String::new(),
            model: String::new(),
            follow: Follow::End,
            next: None,
        }
    }
}

/// Records how an attempt ended, and says what comes next: a provider's place and a delay.
pub(super) async fn conclude(
    runtime: &Arc<Inner>,
    work: &mut Work,
    attempt: &Arc<Running>,
    outcome: Outcome,
) -> Option<(usize, Duration)> {
    metrics::attempt(&attempt.lane.slot.name, outcome.word());
    let verdict = judge(runtime, work, attempt, outcome);
    let finished = store_verdict(runtime, attempt, &verdict).await;
    if verdict.outcome == FinishOutcome::Unknown {
        let (job, provider, reason) = (attempt.job, &attempt.lane.slot.name, &verdict.reason);
        tracing::warn!(%job, attempt = attempt.number, provider, reason, "an attempt is unknown; nothing else begins for its key");
    }
    count_finish(&finished, verdict.outcome);
    match finished {
        Finished::Recorded { job: JobState::Pending } | Finished::Repeated { job: JobState::Pending, .. } => {
            if verdict.next.is_none() {
                // Given back: whoever has room may begin, and that may be us.
                sweeper::look_soon(Arc::clone(runtime), attempt.job.identity()).await;
            }
            verdict.next
        }
        Finished::Recorded { job } if job.is_ended() => {
            if let Some(at_ms) = attempt.hint_ms {
                let hint = Hint { identity: attempt.job.identity(), at_ms };
                // Left standing it would only cost the sweeper a look.
                let _ = runtime.store.move_due(hint, attempt.strip_at_ms(&runtime.store).unwrap_or(0)).await;
            }
            None
        }
        Finished::Won { .. }
        | Finished::Recorded { .. }
        | Finished::Repeated { .. }
        | Finished::Discarded { .. }
        | Finished::NotFound => None,
    }
}

fn judge(runtime: &Inner, work: &mut Work, attempt: &Running, outcome: Outcome) -> Verdict {
    let (failure, retry_after, mut verdict) = match outcome {
        Outcome::Succeeded { response, remote_id, model } => {
            return Verdict {
                response: Some(response),
                remote_id: remote_id.unwrap_or_default(),
                model: model.unwrap_or_default(),
                ..Verdict::plain(FinishOutcome::Succeeded, String::new())
            };
        }
        Outcome::Unknown { reason } => return Verdict::plain(FinishOutcome::Unknown, reason),
        Outcome::NotSent { reason } if attempt.fence.check().is_err() => {
            // Our own lease ran out: no failure of the provider's, and whoever has a lease may begin.
            metrics::fenced();
            let mut verdict = Verdict::plain(FinishOutcome::Aborted, format!("fenced: {reason}"));
            verdict.follow = Follow::Retry { delay_ms: 0, hold_ms: 0 };
            return verdict;
        }
        Outcome::NotSent { reason } => {
            let reason = format!("{}: {reason}", policy::NOT_SENT);
            (FailoverOn::NotSent, None, Verdict::plain(FinishOutcome::Aborted, reason))
        }
        Outcome::Rejected { reason, response, retry_after } => {
            let status = response.status;
            let mut verdict = Verdict::plain(FinishOutcome::Failed, format!("{} {status}: {reason}", policy::REJECTED));
            verdict.response = Some(response);
            (FailoverOn::Rejected { status }, retry_after, verdict)
        }
        Outcome::InvalidOutput { reason } => {
            let reason = format!("{}: {reason}", policy::INVALID_OUTPUT);
            (FailoverOn::InvalidOutput, None, Verdict::plain(FinishOutcome::Failed, reason))
        }
    };
    work.tries.push(Try { provider: attempt.place, failure });
    let remaining = work.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    match work.route.plan.after(&work.tries, retry_after, remaining) {
        Next::Begin { provider, delay, gate } => {
            if gate == GateSaid::Denied {
                metrics::failover_denied(&work.route.name);
                verdict.reason.push_str("; failover_denied: no certificate, and the route's gate is enforce");
            }
            verdict.follow = Follow::Retry { delay_ms: millis(delay), hold_ms: runtime.lease_ms() };
            verdict.next = Some((provider, delay));
        }
        Next::End(why) => {
            verdict.reason.push_str("; ");
            verdict.reason.push_str(&why.to_string());
        }
    }
    verdict
}

/// Stores how an attempt ended, again and again until the store has it or the process must stop.
async fn store_verdict(runtime: &Arc<Inner>, attempt: &Running, verdict: &Verdict) -> Finished {
    let mut in_hand = None;
    let mut pause = STORE_PAUSE;
    loop {
        match try_store(runtime, attempt, verdict).await {
            Ok(Finished::NotFound) => {
                let (job, outcome) = (attempt.job, verdict.outcome.as_str());
                tracing::error!(%job, attempt = attempt.number, outcome, "an attempt ended whose job is not in the store any more");
                return Finished::NotFound;
            }
            Ok(finished) => return finished,
            Err(error) if error.is_retryable() || error.is_for_permission() => {
                in_hand.get_or_insert_with(InHand::count);
                tracing::warn!(job = %attempt.job, attempt = attempt.number, %error, "a result is kept in hand");
            }
            Err(error) => {
                tracing::error!(job = %attempt.job, attempt = attempt.number, %error, "a result cannot be stored");
                return Finished::NotFound;
            }
        }
        tokio::select! {
            () = runtime.stopped.cancelled() => {
                tracing::error!(job = %attempt.job, attempt = attempt.number, "stopped with a result that the store did not take");
                return Finished::NotFound;
            }
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(STORE_PAUSE_MAX);
    }
}

/// A result that the store was offered and has not taken.
struct InHand;

impl InHand {
    fn count() -> Self {
        metrics::result_held();
        InHand
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        metrics::result_let_go();
    }
}

pub(super) async fn try_store(runtime: &Arc<Inner>, attempt: &Running, verdict: &Verdict) -> Result<Finished, StoreError> {
    let identity = attempt.job.identity();
    let result = runtime.payload(identity, verdict.response.as_ref()).await?;
    let finish = FinishAttempt {
        job: attempt.job,
        number: attempt.number,
        token: attempt.token,
        outcome: verdict.outcome,
        result: &result,
        reason: &verdict.reason,
        remote_id: &verdict.remote_id,
        model: &verdict.model,
        follow: verdict.follow,
        hint_ms: attempt.hint_ms,
        strip_at_ms: attempt.strip_at_ms(&runtime.store),
    };
    let finished = runtime.store.finish_attempt(&finish).await?;
    if matches!(finished, Finished::Won { .. }) {
        let kept = runtime.store.keep_blobs(identity, &[&result.body], Keep::For(attempt.key_life)).await;
        if let Err(error) = kept {
            tracing::warn!(job = %attempt.job, %error, "the result's blob is left to the sweeper");
        }
    }
    Ok(finished)
}

/// Counts what a finish led to.
pub(crate) fn count_finish(finished: &Finished, outcome: FinishOutcome) {
    match finished {
        Finished::Won { was, .. } => {
            metrics::result("won");
            if *was != AttemptState::Running && *was != AttemptState::Starting {
                metrics::late_result();
            }
            metrics::job_ended(JobState::Succeeded.as_str());
        }
        Finished::Discarded { attempt: AttemptState::Discarded, .. } if outcome == FinishOutcome::Succeeded => {
            metrics::result("discarded");
            metrics::late_result();
        }
        Finished::Recorded { job } if job.is_ended() => metrics::job_ended(job.as_str()),
        Finished::Recorded { .. } | Finished::Repeated { .. } | Finished::Discarded { .. } | Finished::NotFound => {}
    }
}
