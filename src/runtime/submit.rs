//! From a submission to a claim, and from a claim to its first attempt.
//!
//! The claim is the first attempt's write-ahead, so the request is rendered and room is taken before it; where the key stands for a
//! job already, both are given back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::attempt::{Attempt, AttemptState, AttemptToken};
use crate::error::{Refusal, StoreError};
use crate::failpoint::failpoint;
use crate::fingerprint::{Fingerprinted, HalfBytes, Sha256Bytes, fingerprint};
use crate::job::{Identity, Job, JobId, JobState, Payload, locate};
use crate::metrics;
use crate::policy::Effects;
use crate::provider::{Call, Fence, Outcome, Rendered, Request, Telling, boottime_ms};
use crate::runtime::attempts::{self, Pending, Running, Work};
use crate::runtime::certificates::Grant;
use crate::runtime::losses::What;
use crate::runtime::protection::Model;
use crate::runtime::{
    Inner, Lane, ReadError, Receipt, Replayed, Route, Runtime, Submission, SubmitError, WaitFor, checks, millis,
};
use crate::store::{Begin, Durable, Failed, Hint, Read, SubmitJob, Submitted, WriteAhead};
use crate::validate::Invalid;

/// How long a claim may be on its way: a call gives up before.
const CLAIM_ARRIVES: Duration = Duration::from_secs(2);

impl Runtime {
    /// Submits an intent: the same owner, key and request lead to the same job, however often and wherever they are submitted.
    ///
    /// A new job is claimed and, if there is room, its first attempt begun in one round trip; the call then returns while the
    /// provider works. Nothing is sent to a provider before the claim is in Redis.
    ///
    /// # Errors
    /// See [`SubmitError`]. After [`SubmitError::Store`] the job may exist: submit again with the same key.
    ///
    /// # Cancel safety
    /// Dropping the future stops nothing: the claim is made by a task of its own, and a job that was claimed runs.
    pub async fn submit(&self, submission: Submission) -> Result<Receipt, SubmitError> {
        self.submit_holding(submission, ()).await
    }

    /// Submits an intent and waits for what comes of it, but no longer than `within`: as [`Runtime::submit`] and then
    /// [`Runtime::wait`], with two reads less where the job runs here. The receipt has the job as it is then.
    ///
    /// # Errors
    /// See [`SubmitError`]. Where too many wait already, the receipt has the job as it was submitted.
    ///
    /// # Cancel safety
    /// As [`Runtime::submit`].
    pub async fn submit_and_wait(
        &self,
        submission: Submission,
        wait_for: WaitFor,
        within: Duration,
    ) -> Result<Receipt, SubmitError> {
        let expected = self.expect(&submission.owner, &submission.key);
        let receipt = self.submit(submission).await?;
        if wait_for.is_met_by(&receipt.job) {
            return Ok(receipt);
        }
        match self.wait_expected(expected, &receipt, wait_for, within).await {
            Ok(job) => Ok(Receipt { job, replayed: receipt.replayed }),
            Err(ReadError::TooManyWaiters { .. }) => Ok(receipt),
            Err(error) => Err(SubmitError::from_read(error, receipt.job.id)),
        }
    }

    /// Submits, and keeps something until the claim is made or refused, whether or not the caller stays: a body's share of the
    /// memory for bodies.
    pub(crate) async fn submit_holding<T: Send + 'static>(
        &self,
        submission: Submission,
        held: T,
    ) -> Result<Receipt, SubmitError> {
        let runtime = self.clone();
        let submit = self.inner.work.spawn(async move {
            let outcome = runtime.submit_uncounted(submission).await;
            drop(held);
            outcome
        });
        let outcome = match submit.await {
            Ok(outcome) => outcome,
            // A provider's `render` panicked, before anything was claimed.
            Err(error) => Err(SubmitError::Unrenderable(format!("a provider's adapter panicked: {error}"))),
        };
        metrics::submit(match &outcome {
            Ok(Receipt { replayed: Replayed::No, .. }) => "created",
            Ok(Receipt { replayed: Replayed::Yes, .. }) => "existing",
            Err(SubmitError::Conflict(_)) => "conflict",
            Err(SubmitError::Gone(_)) => "gone",
            Err(SubmitError::Collision) => "collision",
            Err(
                SubmitError::UnknownRoute(_)
                | SubmitError::Unrenderable(_)
                | SubmitError::InvalidInput(_)
                | SubmitError::Stopping,
            ) => "refused",
            Err(SubmitError::Store(_)) => "error",
        });
        outcome
    }

    async fn submit_uncounted(&self, submission: Submission) -> Result<Receipt, SubmitError> {
        let began = Instant::now();
        let inner = &self.inner;
        if inner.stopping.is_cancelled() {
            return Err(SubmitError::Stopping);
        }
        let Submission { owner, key, route, request, traceparent } = submission;
        let route = Arc::clone(inner.routes.get(&route).ok_or(SubmitError::UnknownRoute(route))?);
        let (digest, identity) = locate(&owner, &key);
        let fingerprint = fingerprint(Fingerprinted {
            route: &route.name,
            method: &request.method,
            target: &request.target,
            content_type: &request.content_type,
            body: &request.body,
            ignore: &route.fingerprint_ignore,
        });
        if let Err(invalid) = checks::check_input(&route, &request.body).await {
            return self.invalid_input(identity, digest, fingerprint, invalid).await;
        }
        let first = inner.first_call(&route, &request)?;
        let body = match inner.store.put_body(identity, Arc::clone(&request.body)).await {
            Ok(body) => body,
            Err(error) => return self.there_already(identity, digest, fingerprint, error).await,
        };
        failpoint!("claim.blob");
        let input = Payload { head: request.head(), body };
        let token = AttemptToken::random();
        let room = first.as_ref().and_then(|first| inner.try_enter(&first.lane, &route, &request.body));
        let waits = if room.is_none() && first.is_some() { Pending::try_count(inner) } else { None };
        let begin = match (&first, &room) {
            (Some(first), Some(_)) => Begin::Running { provider: &first.lane.slot.name, sent: first.write_ahead() },
            _ => Begin::Pending,
        };
        // Without room nobody here holds the job: whoever has some may begin, or somebody outside.
        let lease_ms = if room.is_some() || waits.is_some() { inner.lease_ms() } else { 0 };
        // Whoever is outside begins by itself: a look before it had the time to is for nothing.
        // And no look before the claim itself can have arrived: it would find nothing and take the hint away.
        let look_in_ms =
            if first.is_none() { inner.lease_ms() } else { lease_ms.max(millis(CLAIM_ARRIVES + inner.store.commit_deadline())) };
        let hint_ms = inner.store.now_ms() + look_in_ms;
        let submit = SubmitJob {
            id: JobId::new(inner.store.now_ms(), identity),
            digest,
            fingerprint,
            owner: &owner,
            route: &route.name,
            class: route.class,
            deadline_ms: route.deadline.map_or(0, millis),
            rules: route.rules,
            input: &input,
            token,
            lease_ms,
            hint_ms,
            gateway: &inner.gateway,
            begin,
        };
        // The lease clock starts before the first send of the call that grants it.
        let lease_from_ms = boottime_ms();
        let (id, created_ms, first_state) = match self.claim(&submit, route.effects).await {
            Ok(Claimed::Created { id, created_ms, first }) => (id, created_ms, first),
            Ok(Claimed::There(receipt)) => {
                inner.forget_hint(&receipt.job, hint_ms);
                return Ok(receipt);
            }
            Err(SubmitError::Store(error @ (StoreError::Ambiguous { .. } | StoreError::NotDurable { .. }))) => {
                // What it would have taken is taken until its fate is known; without any of it nobody here holds the job.
                if room.is_some() || waits.is_some() {
                    inner.settle_claim(&submit, &error, (room, waits));
                }
                return Err(error.into());
            }
            Err(error) => return Err(error),
        };
        failpoint!("claim.made");
        inner.losses.remember(What::Job, id, 0, Duration::from_millis(route.rules.key_life_ms));
        let begins = matches!(submit.begin, Begin::Running { .. });
        if begins && first_state != Some(AttemptState::Running) {
            // Our own claim, answered again after somebody has judged its attempt: nothing may be sent for it any more.
            let job = self.read(id).await.map_err(|error| SubmitError::from_read(error, id))?;
            return Ok(Receipt { job, replayed: Replayed::No });
        }
        if let Err(error) = inner.store.keep_blobs(identity, &[&input.body], crate::store::Keep::Open).await {
            tracing::debug!(job = %id, %error, "the input's blob is left to the sweeper");
        }
        let job = Arc::new(fresh(&submit, id, created_ms));
        if let Some(FirstCall { lane, rendered, .. }) = first {
            let deadline = route.deadline.map(|deadline| began + deadline);
            let work = Work {
                job: id,
                route,
                request: Arc::new(request),
                input: input.body.clone(),
                traceparent,
                tries: Vec::new(),
                deadline,
                hint_ms: Some(hint_ms),
            };
            let runtime = Arc::clone(inner);
            match (room, waits) {
                (Some(room), _) => {
                    let attempt = Running::new(inner, &work, lane, (1, token), Grant::default(), lease_from_ms, Some(hint_ms));
                    inner.work.spawn(attempts::drive(runtime, work, attempt, rendered, room, began));
                }
                (None, Some(waits)) => {
                    inner.work.spawn(attempts::drive_pending(runtime, work, token, lease_from_ms, waits));
                }
                (None, None) => {}
            }
        }
        Ok(Receipt { job, replayed: Replayed::No })
    }

    /// Claims a key, and sorts what may come back instead.
    ///
    /// A claim that is not durable counts only where an attempt changes nothing: lost, it would cost another computation. An ending
    /// that is not durable is not told anywhere.
    async fn claim(&self, submit: &SubmitJob<'_>, effects: Effects) -> Result<Claimed, SubmitError> {
        let there = |job: Job| Ok(Claimed::There(Receipt { job: Arc::new(job), replayed: Replayed::Yes }));
        let (submitted, durable) = match self.inner.store.committing().submit_told(submit).await {
            Ok(told) => told,
            Err(error) => {
                let there = self.there_already(submit.id.identity(), submit.digest, submit.fingerprint, error).await;
                return there.map(Claimed::There);
            }
        };
        match (submitted, durable) {
            (Submitted::Existing(job), Durable::Short { have, want }) if job.is_ended() => there(job.before_its_end(have, want)),
            (Submitted::Created { .. } | Submitted::Existing(_), Durable::Short { have, want })
                if effects == Effects::External =>
            {
                Err(StoreError::NotDurable { have, want }.into())
            }
            (Submitted::Gone(_), Durable::Short { have, want }) => Err(StoreError::NotDurable { have, want }.into()),
            (Submitted::Created { id, created_ms, attempt }, _) => Ok(Claimed::Created { id, created_ms, first: attempt }),
            (Submitted::Existing(job), _) => there(*job),
            (Submitted::Conflict { id }, _) => Err(SubmitError::Conflict(id)),
            (Submitted::Gone(gone), Durable::Yes) => Err(SubmitError::Gone(gone)),
            (Submitted::Collision, _) => Err(SubmitError::Collision),
        }
    }

    /// Out of memory or of replicas: a duplicate still gets its answer, only a new job is refused. Whatever else kept a claim from
    /// being made is told as it is.
    async fn there_already(
        &self,
        identity: Identity,
        digest: HalfBytes,
        fingerprint: HalfBytes,
        error: StoreError,
    ) -> Result<Receipt, SubmitError> {
        match error {
            // A replica may be behind: what it says of a job is not told.
            StoreError::Ambiguous { .. }
            | StoreError::NotDurable { .. }
            | StoreError::NotExecuted { code: Refusal::Connect | Refusal::ReadOnly, .. }
            | StoreError::Fatal { .. } => return Err(error.into()),
            StoreError::NotExecuted { .. } => {}
        }
        match self.inner.store.read_told(identity).await {
            Ok(Read::Found(job)) if job.digest != digest => Err(SubmitError::Collision),
            Ok(Read::Found(job)) if job.fingerprint != fingerprint => Err(SubmitError::Conflict(job.id)),
            Ok(Read::Found(job)) => Ok(Receipt { job: Arc::new(*job), replayed: Replayed::Yes }),
            Ok(Read::Gone(gone)) => Err(SubmitError::Gone(gone)),
            Ok(Read::NotFound) | Err(_) => Err(error.into()),
        }
    }

    /// An input that is not as the route requires: no job is made of it. But a job that is there already is answered as ever: its
    /// input was valid when it came, and the requirements have changed since.
    async fn invalid_input(
        &self,
        identity: Identity,
        digest: HalfBytes,
        fingerprint: HalfBytes,
        invalid: Invalid,
    ) -> Result<Receipt, SubmitError> {
        match self.inner.store.read_told(identity).await? {
            Read::Found(job) if job.digest != digest => Err(SubmitError::Collision),
            Read::Found(job) if job.fingerprint != fingerprint => Err(SubmitError::Conflict(job.id)),
            // Its key has been given back: this would be a new job.
            Read::Found(job) if job.state == JobState::Failed && job.rules.releases_on_failure => {
                Err(SubmitError::InvalidInput(invalid))
            }
            Read::Found(job) => Ok(Receipt { job: Arc::new(*job), replayed: Replayed::Yes }),
            Read::Gone(gone) => Err(SubmitError::Gone(gone)),
            Read::NotFound => Err(SubmitError::InvalidInput(invalid)),
        }
    }

    /// Sends a safe request (`GET`, `HEAD`) to a route's first provider, without a job: it may be repeated by anybody.
    ///
    /// # Errors
    /// `UnknownRoute`, `Unrenderable`, `Stopping`; everything that happens at the provider is an [`Outcome`].
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future drops the call.
    pub async fn pass_through(&self, route: &str, request: &Request) -> Result<Outcome, SubmitError> {
        let inner = &self.inner;
        if inner.stopping.is_cancelled() {
            return Err(SubmitError::Stopping);
        }
        let route = inner.routes.get(route).ok_or_else(|| SubmitError::UnknownRoute(route.to_owned()))?;
        let Some(FirstCall { lane, rendered, .. }) = inner.first_call(route, request)? else {
            return Err(SubmitError::Unrenderable("the route has no provider".to_owned()));
        };
        let Ok(_permit) = lane.permits.try_acquire() else {
            let reason = format!("the provider has {} calls in flight, its limit", lane.slot.in_flight_max);
            return Ok(Outcome::NotSent { reason });
        };
        let mut pass = match &lane.guard {
            None => None,
            Some(guard) => match guard.ask(&inner.store, &Model::default()).await {
                Ok(pass) => Some(pass),
                Err(refusal) => return Ok(Outcome::NotSent { reason: refusal.reason(inner.store.now_ms()) }),
            },
        };
        let call = Call {
            rendered,
            job_id: None,
            attempt: 0,
            idempotency_key: String::new(),
            traceparent: None,
            fence: Fence::until(u64::MAX),
            deadline: Instant::now() + lane.slot.total,
            told: Telling::nobody(),
        };
        let outcome = lane.slot.provider.submit(call).await;
        if let Some(pass) = &mut pass {
            let failed = match outcome {
                Outcome::Unknown { .. } | Outcome::NotSent { .. } => Failed::Yes,
                Outcome::Succeeded { .. } | Outcome::InvalidOutput { .. } | Outcome::Rejected { .. } => Failed::No,
            };
            pass.tell(Some(failed), None);
        }
        Ok(outcome)
    }
}

impl Inner {
    /// Renders a request for the route's first provider; `None` where attempts come from outside.
    fn first_call(&self, route: &Route, request: &Request) -> Result<Option<FirstCall>, SubmitError> {
        let Some(name) = route.providers.first() else { return Ok(None) };
        let lane = Arc::clone(&self.providers[name]);
        let rendered = lane.slot.provider.render(request).map_err(|error| SubmitError::Unrenderable(error.to_string()))?;
        let hash = rendered.hash();
        Ok(Some(FirstCall { lane, rendered, hash }))
    }

    /// A duplicate of an ended job has left a hint that nobody needs; the sweeper would take it, but many of them would crowd it.
    fn forget_hint(self: &Arc<Self>, job: &Job, at_ms: u64) {
        if !job.is_ended() {
            return;
        }
        // More than the limit only while the store is slow; then the sweeper takes them.
        let Ok(place) = Arc::clone(&self.forgetting).try_acquire_owned() else { return };
        let (runtime, hint) = (Arc::clone(self), Hint { identity: job.id.identity(), at_ms });
        self.work.spawn(async move {
            let _ = runtime.store.move_due(hint, 0).await;
            drop(place);
        });
    }
}

impl SubmitError {
    fn from_read(error: ReadError, id: JobId) -> Self {
        match error {
            ReadError::Store(error) => SubmitError::Store(error),
            ReadError::Gone(gone) => SubmitError::Gone(gone),
            ReadError::NotFound | ReadError::TooManyWaiters { .. } => {
                SubmitError::Store(StoreError::fatal("BADRECORD", format!("job {id} was claimed and is not there")))
            }
        }
    }
}

/// What a claim led to.
enum Claimed {
    Created { id: JobId, created_ms: u64, first: Option<AttemptState> },
    There(Receipt),
}

/// The first attempt's call, ready before the claim so that the claim is its write-ahead.
struct FirstCall {
    lane: Arc<Lane>,
    rendered: Rendered,
    hash: Sha256Bytes,
}

impl FirstCall {
    fn write_ahead(&self) -> WriteAhead<'_> {
        WriteAhead { url: &self.rendered.url, request_hash: &self.hash, certificate: "" }
    }
}

/// A job as its claim made it: nobody else has touched it when this is composed.
fn fresh(submit: &SubmitJob<'_>, id: JobId, created_ms: u64) -> Job {
    let attempts = match submit.begin {
        Begin::Pending => Vec::new(),
        Begin::Starting { provider } => vec![first_attempt(submit, provider, AttemptState::Starting, created_ms)],
        Begin::Running { provider, .. } => vec![first_attempt(submit, provider, AttemptState::Running, created_ms)],
    };
    Job {
        id,
        digest: submit.digest,
        fingerprint: submit.fingerprint,
        owner: submit.owner.as_str().to_owned(),
        route: submit.route.to_owned(),
        class: submit.class,
        state: if attempts.is_empty() { JobState::Pending } else { JobState::Running },
        version: 0,
        revision: 1,
        created_ms,
        updated_ms: created_ms,
        ended_ms: 0,
        deadline_ms: if submit.deadline_ms == 0 { 0 } else { created_ms + submit.deadline_ms },
        next_at_ms: 0,
        holder_lease_ms: if attempts.is_empty() { created_ms + submit.lease_ms } else { 0 },
        completed_by: 0,
        retain_until_ms: 0,
        canceled_by: String::new(),
        reason: String::new(),
        rules: submit.rules,
        attempts,
        events: Vec::new(),
        input: submit.input.clone(),
        result: Payload::default(),
    }
}

fn first_attempt(submit: &SubmitJob<'_>, provider: &str, state: AttemptState, now_ms: u64) -> Attempt {
    Attempt {
        number: 1,
        state,
        token: submit.token,
        provider: provider.to_owned(),
        gateway: submit.gateway.to_owned(),
        version: 0,
        started_ms: now_ms,
        lease_ms: now_ms + submit.lease_ms,
        sequence: 0,
        ended_ms: 0,
        reason: String::new(),
        url: String::new(),
        request_hash: Vec::new(),
        certificate: String::new(),
        remote_id: String::new(),
        model: String::new(),
    }
}
