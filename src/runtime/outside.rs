//! Calls from outside about jobs that are there: operators who cancel, resolve and reopen, executors that drive attempts themselves.
//!
//! Each is one script and then a look at the job: its hints, its blobs, its waiters, and whether it can go on here.

use std::sync::Arc;
use std::time::Duration;

use crate::attempt::{AttemptToken, FinishOutcome};
use crate::error::StoreError;
use crate::failpoint::failpoint;
use crate::job::{JobId, JobState};
use crate::metrics;
use crate::policy::{self, FailoverOn};
use crate::provider::Response;
use crate::runtime::{CheckResult, Decision, Inner, Report, Route, Runtime, SettleError, Then, checks, millis, sweeper, verdict};
use crate::store::{
    Begin, BeginAttempt, Begun, CancelMode, Canceled, Extended, FinishAttempt, Finished, Follow, Marked, Read, Reopened,
    ResolveAttempt, Resolved, Tell, WriteAhead,
};
use crate::validate::Invalid;

impl Runtime {
    /// Asks for a job to be canceled, or ends it at once.
    ///
    /// # Errors
    /// The store's: the same call again, with the same request id.
    pub async fn cancel(
        &self,
        id: JobId,
        request_id: &str,
        mode: CancelMode,
        actor: &str,
        reason: &str,
    ) -> Result<Canceled, StoreError> {
        let ended_before = match self.inner.store.read_job(id.identity()).await? {
            Read::Found(job) => job.is_ended(),
            Read::Gone(_) | Read::NotFound => true,
        };
        failpoint!("cancel.before");
        let canceled = self.inner.store.committing().cancel_job(id, request_id, mode, actor, reason).await;
        let canceled = self.inner.made(id, canceled).await?;
        failpoint!("cancel.made");
        tracing::info!(job = %id, actor, mode = ?mode, answer = ?canceled, "a cancel");
        if matches!(canceled, Canceled::Canceled { .. }) && !ended_before {
            metrics::job_ended(JobState::Canceled.as_str());
        }
        self.inner.after_change(id).await;
        Ok(canceled)
    }

    /// Decides, from outside, what became of an unknown attempt. A success has a result that is as the route requires, unless the
    /// decision says otherwise.
    ///
    /// # Errors
    /// The result is not valid: nothing is decided. The store's: the same call again, with the same request id.
    pub async fn resolve(&self, id: JobId, decision: Decision) -> Result<Resolved, SettleError> {
        if decision.check == CheckResult::Checked
            && let Some(invalid) = self.inner.fault_of(id, decision.result.as_ref()).await?
        {
            return Err(SettleError::InvalidOutput(invalid.1));
        }
        Ok(resolve(&self.inner, id, decision).await?)
    }

    /// Gives a failed job new attempts.
    ///
    /// # Errors
    /// The store's: the same call again, with the same request id.
    pub async fn reopen(
        &self,
        id: JobId,
        request_id: &str,
        actor: &str,
        reason: &str,
        attempts: u32,
    ) -> Result<Reopened, StoreError> {
        let deadline_ms = match self.inner.store.read_job(id.identity()).await? {
            Read::Found(job) => self.inner.routes.get(&job.route).and_then(|route| route.deadline).map_or(0, millis),
            Read::Gone(_) | Read::NotFound => 0,
        };
        let store = self.inner.store.committing();
        let reopened = store.reopen_job(id, request_id, actor, reason, attempts, deadline_ms).await;
        let reopened = self.inner.made(id, reopened).await?;
        tracing::info!(job = %id, actor, answer = ?reopened, "a reopening");
        self.inner.after_change(id).await;
        Ok(reopened)
    }

    /// Begins an attempt for an executor outside this process.
    ///
    /// # Errors
    /// The store's: the same call again, with the same token.
    pub async fn begin_outside(
        &self,
        id: JobId,
        token: AttemptToken,
        provider: &str,
        lease: Duration,
    ) -> Result<Begun, StoreError> {
        let begin = BeginAttempt {
            job: id,
            token,
            holder: None,
            lease_ms: millis(lease),
            hint_ms: self.inner.store.now_ms() + millis(lease),
            gateway: &self.inner.gateway,
            begin: Begin::Starting { provider },
        };
        self.inner.store.committing().begin_attempt(&begin).await
    }

    /// Writes ahead for an executor outside this process.
    ///
    /// # Errors
    /// The store's: do not send before the same call has been answered.
    pub async fn mark_outside(
        &self,
        id: JobId,
        number: u32,
        token: AttemptToken,
        url: &str,
        request_hash: &[u8],
    ) -> Result<Marked, StoreError> {
        let sent = WriteAhead { url, request_hash, certificate: "" };
        self.inner.store.committing().mark_running(id, number, token, sent).await
    }

    /// Extends the lease of an executor outside this process.
    ///
    /// # Errors
    /// The store's: the same call again.
    pub async fn extend_outside(
        &self,
        id: JobId,
        number: u32,
        token: AttemptToken,
        sequence: u64,
        lease: Duration,
    ) -> Result<Extended, StoreError> {
        self.inner.store.extend_lease(id, number, token, sequence, millis(lease)).await
    }

    /// Records how an attempt of an executor outside this process ended. A success whose result is not as the route requires is
    /// recorded as a failure, as it is for a provider of this gateway's.
    ///
    /// # Errors
    /// The store's: the same call again.
    pub async fn finish_outside(
        &self,
        id: JobId,
        number: u32,
        token: AttemptToken,
        report: Report,
    ) -> Result<Finished, StoreError> {
        let inner = &self.inner;
        let report = match report.outcome {
            FinishOutcome::Succeeded => inner.checked(id, report).await?,
            FinishOutcome::Failed | FinishOutcome::Unknown | FinishOutcome::Aborted => report,
        };
        let result = inner.payload(id.identity(), report.result.as_ref()).await?;
        let finish = FinishAttempt {
            job: id,
            number,
            token,
            outcome: report.outcome,
            result: &result,
            reason: &report.reason,
            remote_id: "",
            model: "",
            follow: follow(report.then),
            hint_ms: None,
            strip_at_ms: None,
            tell: Tell::Nothing,
        };
        let finished = inner.made(id, inner.store.committing().finish_attempt(&finish).await).await?;
        verdict::count_finish(&finished, report.outcome, verdict::About { job: id, attempt: number, provider: None });
        inner.after_change(id).await;
        Ok(finished)
    }
}

/// Writes down what was decided, or found out, about an unknown attempt, and goes on with its job.
pub(super) async fn resolve(inner: &Arc<Inner>, id: JobId, decision: Decision) -> Result<Resolved, StoreError> {
    let result = inner.payload(id.identity(), decision.result.as_ref()).await?;
    let resolve = ResolveAttempt {
        job: id,
        number: decision.number,
        request_id: &decision.request_id,
        outcome: decision.outcome,
        actor: &decision.actor,
        reason: &decision.reason,
        word: decision.word,
        result: &result,
        follow: follow(decision.then),
    };
    failpoint!("resolve.before");
    let resolved = inner.made(id, inner.store.committing().resolve_attempt(&resolve).await).await?;
    failpoint!("resolve.made");
    let (number, actor) = (decision.number, &decision.actor);
    tracing::info!(job = %id, attempt = number, actor, outcome = decision.outcome.as_str(), answer = ?resolved, "a decision");
    match &resolved {
        Resolved::Won { .. } => {
            metrics::result("won");
            metrics::late_result();
            metrics::job_ended(JobState::Succeeded.as_str());
        }
        Resolved::Recorded { job } if job.is_ended() => metrics::job_ended(job.as_str()),
        Resolved::Discarded { .. } => {
            metrics::result("discarded");
            metrics::late_result();
            tracing::warn!(job = %id, attempt = number, "a success is discarded: its job had ended");
        }
        Resolved::Recorded { .. }
        | Resolved::Repeated { .. }
        | Resolved::Quarantine { .. }
        | Resolved::NotUnknown { .. }
        | Resolved::NotFound => {}
    }
    inner.after_change(id).await;
    Ok(resolved)
}

impl Inner {
    /// What is wrong with a result that somebody brings to a job, and the job's route.
    async fn fault_of(&self, id: JobId, result: Option<&Response>) -> Result<Option<(Arc<Route>, Invalid)>, StoreError> {
        let Some(result) = result.filter(|_| checks::any(self)) else { return Ok(None) };
        let job = match self.store.read_job(id.identity()).await? {
            Read::Found(job) if job.id == id => job,
            // The script says so.
            Read::Found(_) | Read::Gone(_) | Read::NotFound => return Ok(None),
        };
        let Some(route) = self.routes.get(&job.route) else { return Ok(None) };
        Ok(checks::fault_of(self, &job, result).await?.map(|invalid| (Arc::clone(route), invalid)))
    }

    /// An executor's success as it counts for the route.
    async fn checked(&self, id: JobId, report: Report) -> Result<Report, StoreError> {
        let Some((route, invalid)) = self.fault_of(id, report.result.as_ref()).await? else { return Ok(report) };
        let again = route.plan.failover_on.contains(&FailoverOn::InvalidOutput);
        let then = if again { Then::Retry } else { Then::End };
        let reason = verdict::one_line(&format!("{}: {invalid}", policy::INVALID_OUTPUT));
        Ok(Report { outcome: FinishOutcome::Failed, result: None, reason, then })
    }

    /// What a call from outside brought. One that is not durable was made all the same: its job is looked after as if it were.
    pub(super) async fn made<T>(self: &Arc<Self>, id: JobId, made: Result<T, StoreError>) -> Result<T, StoreError> {
        if matches!(made, Err(StoreError::NotDurable { .. })) {
            self.after_change(id).await;
        }
        made
    }

    /// After somebody outside changed a job: keeps its blobs, tends its hints, goes on with it if it is pending, wakes who waits.
    pub(super) async fn after_change(self: &Arc<Self>, id: JobId) {
        let identity = id.identity();
        self.waiters.wake(identity);
        sweeper::look_soon(Arc::clone(self), identity).await;
    }
}

fn follow(then: Then) -> Follow {
    match then {
        Then::End => Follow::End,
        Then::Retry => Follow::Retry { delay_ms: 0, hold_ms: 0 },
    }
}
