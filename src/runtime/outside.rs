//! Calls from outside about jobs that are there: operators who cancel, resolve and reopen, executors that drive attempts themselves.
//!
//! Each is one script and then a look at the job: its hints, its blobs, its waiters, and whether it can go on here.

use std::sync::Arc;
use std::time::Duration;

use crate::attempt::AttemptToken;
use crate::error::StoreError;
use crate::failpoint::failpoint;
use crate::job::{JobId, JobState};
use crate::metrics;
use crate::runtime::{Decision, Inner, Report, Runtime, Then, millis, sweeper, verdict};
use crate::store::{
    Begin, BeginAttempt, Begun, CancelMode, Canceled, Extended, FinishAttempt, Finished, Follow, Marked, Read, Reopened,
    ResolveAttempt, Resolved, Tell, WriteAhead,
};

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
        let canceled = self.inner.store.cancel_job(id, request_id, mode, actor, reason).await?;
        failpoint!("cancel.made");
        tracing::info!(job = %id, actor, mode = ?mode, answer = ?canceled, "a cancel");
        if matches!(canceled, Canceled::Canceled { .. }) && !ended_before {
            metrics::job_ended(JobState::Canceled.as_str());
        }
        self.inner.after_change(id).await;
        Ok(canceled)
    }

    /// Decides, from outside, what became of an unknown attempt.
    ///
    /// # Errors
    /// The store's: the same call again, with the same request id.
    pub async fn resolve(&self, id: JobId, decision: Decision) -> Result<Resolved, StoreError> {
        let inner = &self.inner;
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
        let resolved = inner.store.resolve_attempt(&resolve).await?;
        failpoint!("resolve.made");
        let (number, actor) = (decision.number, &decision.actor);
        tracing::info!(job = %id, attempt = number, actor, outcome = decision.outcome.as_str(), answer = ?resolved, "a decision");
        inner.after_change(id).await;
        Ok(resolved)
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
        let reopened = self.inner.store.reopen_job(id, request_id, actor, reason, attempts, deadline_ms).await?;
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
        self.inner.store.begin_attempt(&begin).await
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
        self.inner.store.mark_running(id, number, token, WriteAhead { url, request_hash, certificate: "" }).await
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

    /// Records how an attempt of an executor outside this process ended.
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
        let finished = inner.store.finish_attempt(&finish).await?;
        verdict::count_finish(&finished, report.outcome, verdict::About { job: id, attempt: number, provider: None });
        inner.after_change(id).await;
        Ok(finished)
    }
}

impl Inner {
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
