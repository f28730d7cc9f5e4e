//! What a provider says of an attempt by itself: a webhook, on whatever gateway it arrives.
//!
//! The attempt was `running` in Redis before its submit left, so a webhook may be faster than the submit's answer. Its evidence is
//! recorded with the attempt's own token, which the record has; the poll that comes to the same is then `repeated`, and of two that
//! come to different ends one is the record's.

use std::sync::Arc;
use std::time::Duration;

use crate::attempt::{Attempt, AttemptState, FinishOutcome};
use crate::error::StoreError;
use crate::job::{Job, JobId, JobState};
use crate::metrics;
use crate::policy::{self, FailoverOn, Next, Open, Try};
use crate::provider::webhook::{Delivery, WebhookRefused};
use crate::provider::{CancelSemantics, Evidence, Outcome, Response};
use crate::runtime::attempts::Running;
use crate::runtime::certificates::{self, Seen};
use crate::runtime::verdict::{About, count_cost, count_finish, fit};
use crate::runtime::{Inner, ReadError, Runtime, checks, millis};
use crate::store::{FinishAttempt, Finished, Follow, Read, Tell};

/// What evidence from outside led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivered {
    /// Its result is the job's.
    Won,
    /// The attempt's row is as it says.
    Recorded,
    /// Somebody had said the same before.
    Repeated,
    /// The job had ended, or the attempt had been judged; the result does not count.
    Discarded,
    /// It settles nothing.
    Ignored,
}

impl Delivered {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Delivered::Won => "won",
            Delivered::Recorded => "recorded",
            Delivered::Repeated => "repeated",
            Delivered::Discarded => "discarded",
            Delivered::Ignored => "ignored",
        }
    }
}

/// Why a webhook was not taken.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WebhookError {
    /// It is not the provider's own.
    #[error(transparent)]
    Refused(#[from] WebhookRefused),
    /// There is no such job, attempt or provider; or it is no longer kept.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl From<StoreError> for WebhookError {
    fn from(error: StoreError) -> Self {
        WebhookError::Read(ReadError::Store(error))
    }
}

impl Runtime {
    /// Takes a webhook: checks that it is the provider's own, reads what it says, and records that.
    ///
    /// # Errors
    /// It is refused, or about nothing that is known; or the store's: the provider may send it again.
    pub async fn webhook(&self, delivery: Delivery) -> Result<Delivered, WebhookError> {
        let Delivery { provider: name, job_id: id, attempt: number, body, .. } = &delivery;
        let Some(lane) = self.inner.providers.get(name) else { return Err(ReadError::NotFound.into()) };
        let provider = &lane.slot.provider;
        // Before anything is read: who cannot sign learns nothing and costs Redis nothing.
        match provider.verify_webhook(&delivery) {
            Ok(()) => {}
            Err(WebhookRefused::NotConfigured) => return Err(ReadError::NotFound.into()),
            Err(refused) => return Err(refused.into()),
        }
        let job = self.read(*id).await?;
        let attempt = attempt_of(&job, *number).filter(|attempt| attempt.provider == *name).ok_or(ReadError::NotFound)?;
        let sent = self.inner.sent(&job, attempt);
        let evidence = provider.read_webhook(sent, Arc::clone(body)).await;
        Ok(self.delivered(*id, *number, evidence).await?)
    }

    /// Records what is known of an attempt from outside of its own call: it is settled, its waiters are told, and whoever still
    /// asks about it stops.
    ///
    /// # Errors
    /// No such job or attempt; or the store's: the same evidence again changes nothing twice.
    pub async fn delivered(&self, id: JobId, number: u32, evidence: Evidence) -> Result<Delivered, ReadError> {
        let inner = &self.inner;
        let job = self.read(id).await?;
        let attempt = attempt_of(&job, number).ok_or(ReadError::NotFound)?;
        let Some(outcome) = inner.proved(attempt, evidence) else { return Ok(Delivered::Ignored) };
        let outcome = checks::checked_for(inner, &job, outcome).await?;
        let word = outcome.word();
        let seen = Seen::under(&attempt.certificate, &outcome);
        let Some(settling) = inner.settling(&job, attempt, outcome) else { return Ok(Delivered::Ignored) };
        let result = inner.payload(id.identity(), settling.response.as_ref()).await?;
        let finish = FinishAttempt {
            job: id,
            number,
            token: attempt.token,
            outcome: settling.outcome,
            result: &result,
            reason: &settling.reason,
            remote_id: &settling.remote_id,
            model: &settling.model,
            follow: settling.follow,
            hint_ms: None,
            strip_at_ms: None,
            tell: Tell::Nothing,
        };
        let finished = inner.made(id, inner.store.committing().finish_attempt(&finish).await).await?;
        let provider = Some(attempt.provider.as_str());
        count_finish(&finished, settling.outcome, About { job: id, attempt: number, provider });
        if let (false, Some(route)) = (matches!(finished, Finished::Repeated { .. }), inner.routes.get(&job.route)) {
            certificates::saw(inner, route, &attempt.provider, &attempt.certificate, seen).await;
        }
        if let (Finished::Discarded { attempt: AttemptState::Discarded, .. }, Some(lane), Some(response)) =
            (&finished, inner.providers.get(&attempt.provider), &settling.response)
            && settling.outcome == FinishOutcome::Succeeded
        {
            count_cost(lane, id, number, response);
        }
        let delivered = match finished {
            Finished::Won { .. } => Delivered::Won,
            Finished::Recorded { .. } => Delivered::Recorded,
            Finished::Repeated { .. } => Delivered::Repeated,
            Finished::Discarded { .. } => Delivered::Discarded,
            Finished::NotFound => return Err(ReadError::NotFound),
        };
        if matches!(delivered, Delivered::Won | Delivered::Recorded) && inner.providers.contains_key(&attempt.provider) {
            metrics::attempt(&attempt.provider, word);
        }
        tracing::debug!(job = %id, attempt = number, provider, answer = delivered.as_str(), "the provider told an end by itself");
        let running = inner.running().get(&attempt.token).cloned();
        if let Some(running) = running {
            running.settled.cancel();
        }
        inner.after_change(id).await;
        Ok(delivered)
    }
}

/// How an attempt is to be recorded.
struct Settling {
    outcome: FinishOutcome,
    response: Option<Response>,
    reason: String,
    remote_id: String,
    model: String,
    follow: Follow,
}

impl Inner {
    /// The outcome that evidence proves of an attempt; `None` if it proves none.
    fn proved(&self, attempt: &Attempt, evidence: Evidence) -> Option<Outcome> {
        match evidence {
            Evidence::Settled(outcome) => Some(outcome),
            Evidence::Canceled => {
                // Where "canceled" may still turn into a result, its own poll waits that out.
                let abilities = self.providers.get(&attempt.provider)?.slot.provider.abilities();
                match abilities.cancel {
                    CancelSemantics::BestEffort | CancelSemantics::QueuedOnly if !abilities.settle.is_zero() => None,
                    CancelSemantics::None
                    | CancelSemantics::QueuedOnly
                    | CancelSemantics::BestEffort
                    | CancelSemantics::Confirmed => Some(crate::provider::async_http::canceled()),
                }
            }
            Evidence::NoAnswer { reason } => {
                let (provider, number) = (&attempt.provider, attempt.number);
                tracing::warn!(provider, attempt = number, reason, "a provider told something that proves nothing");
                None
            }
            Evidence::StillRunning | Evidence::NotFound | Evidence::Expired => None,
        }
    }

    /// How a proved outcome is recorded, and whether another attempt may follow.
    fn settling(&self, job: &Job, attempt: &Attempt, outcome: Outcome) -> Option<Settling> {
        let (failure, response, retry_after, reason) = match fit(outcome) {
            Outcome::Succeeded { response, remote_id, model } => {
                return Some(Settling {
                    outcome: FinishOutcome::Succeeded,
                    response: Some(response),
                    reason: String::new(),
                    remote_id: remote_id.unwrap_or_default(),
                    model: model.unwrap_or_default(),
                    follow: Follow::End,
                });
            }
            Outcome::Rejected { reason, response, retry_after } => {
                let status = response.status;
                let reason = format!("{} {status}: {reason}", policy::REJECTED);
                (FailoverOn::Rejected { status }, Some(response), retry_after, reason)
            }
            Outcome::InvalidOutput { reason } => {
                (FailoverOn::InvalidOutput, None, None, format!("{}: {reason}", policy::INVALID_OUTPUT))
            }
            // Neither is a proof.
            Outcome::Unknown { .. } | Outcome::NotSent { .. } => return None,
        };
        let follow = self.after_failure(job, attempt, failure, retry_after);
        let (remote_id, model) = (String::new(), String::new());
        Some(Settling { outcome: FinishOutcome::Failed, response, reason, remote_id, model, follow })
    }

    /// What the route's plan would like to do after this failure. Whoever has room begins it.
    fn after_failure(&self, job: &Job, attempt: &Attempt, failure: FailoverOn, retry_after: Option<Duration>) -> Follow {
        let Some(route) = self.routes.get(&job.route) else { return Follow::End };
        let place = |name: &str| route.providers.iter().position(|provider| provider == name);
        let Some(provider) = place(&attempt.provider) else { return Follow::End };
        let mut tries = policy::tries_of(&job.attempts, job.version, place);
        tries.push(Try { provider, failure });
        let now_ms = self.store.now_ms();
        let remaining = (job.deadline_ms > 0).then(|| Duration::from_millis(job.deadline_ms.saturating_sub(now_ms)));
        match route.plan.after(&tries, retry_after, remaining, &Open::first(route.providers.len())) {
            Next::Begin { delay, .. } => Follow::Retry { delay_ms: millis(delay), hold_ms: 0 },
            Next::End(_) => Follow::End,
        }
    }
}

/// After a heartbeat was refused: whether that is because the attempt was settled elsewhere. One whose lease lapsed is not: it goes
/// on asking, because evidence counts.
pub(super) async fn notice_if_settled(runtime: &Inner, running: &Running) {
    let Ok(Read::Found(job)) = runtime.store.read_job(running.job.identity()).await else { return };
    if job.id != running.job {
        return;
    }
    let is_open = attempt_of(&job, running.number).is_some_and(|attempt| attempt.state.is_open());
    let is_over = matches!(job.state, JobState::Succeeded | JobState::Failed | JobState::Canceled | JobState::Indeterminate);
    // A job that was ended by force may still be told what became of its attempt.
    if !is_open || (is_over && job.completed_by > 0) {
        running.settled.cancel();
    }
}

fn attempt_of(job: &Job, number: u32) -> Option<&Attempt> {
    job.attempts.iter().find(|attempt| attempt.number == number)
}
