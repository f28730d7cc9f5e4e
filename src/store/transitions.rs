//! One method per script: arguments in, reply out.
//!
//! The order of the arguments is the script's header's; a test compares them. How a call is made, and made again, is `call.rs`.

use crate::attempt::{AttemptToken, FinishOutcome};
use crate::error::StoreError;
use crate::job::{Body, Identity, JobId, Payload};
use crate::store::call::{Around, Call};
use crate::store::reply::Reply;
use crate::store::retry;
use crate::store::tried::nothing_of;
use crate::store::{
    AskExtended, AskTaken, BeginAttempt, Begun, CancelMode, Canceled, Canceling, Durable, Extended, FinishAttempt, Finished,
    Gone, HasBlobs, Marked, NoteAttempt, NoteReply, PostponeJob, Postponed, Read, Reopened, ResolveAttempt, Resolved, Script,
    Store, SubmitJob, Submitted, Ticked, Word, WriteAhead, record,
};

/// Appends arguments to a command, each straight into its bytes.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { |command: &mut redis::Cmd| { $($argument.append_to(command);)* } };
}

pub(super) use arguments;

pub(super) trait Argument {
    fn append_to(&self, command: &mut redis::Cmd);
}

impl Argument for u64 {
    fn append_to(&self, command: &mut redis::Cmd) {
        command.arg(*self);
    }
}

impl Argument for u32 {
    fn append_to(&self, command: &mut redis::Cmd) {
        command.arg(*self);
    }
}

impl Argument for &str {
    fn append_to(&self, command: &mut redis::Cmd) {
        command.arg(*self);
    }
}

impl Argument for &[u8] {
    fn append_to(&self, command: &mut redis::Cmd) {
        command.arg(*self);
    }
}

impl Argument for JobId {
    fn append_to(&self, command: &mut redis::Cmd) {
        command.arg(&self.as_bytes()[..]);
    }
}

impl Argument for AttemptToken {
    fn append_to(&self, command: &mut redis::Cmd) {
        command.arg(&self.as_bytes()[..]);
    }
}

fn body_arguments(payload: &Payload) -> (u64, &[u8]) {
    match &payload.body {
        Body::Inline(bytes) => (0, bytes),
        Body::Blob { sha256, bytes } => (*bytes, sha256),
    }
}

impl Store {
    /// Claims a key for one job, or says what it already stands for. One round trip, its hint included.
    ///
    /// # Errors
    /// `NotExecuted`: nothing was claimed. `Ambiguous`: the same call again, with the same token, tells.
    pub async fn submit_job(&self, submit: &SubmitJob<'_>) -> Result<Submitted, StoreError> {
        let (submitted, durable) = self.submit_told(submit).await?;
        durable.settle(submitted)
    }

    /// Claims as [`Store::submit_job`] does, and says whether what it tells is durable.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn submit_told(&self, submit: &SubmitJob<'_>) -> Result<(Submitted, Durable), StoreError> {
        let (blob_bytes, body) = body_arguments(submit.input);
        let rules = &submit.rules;
        let sent = submit.begin.sent();
        let arguments = arguments![
            submit.id,
            &submit.digest[..],
            &submit.fingerprint[..],
            submit.owner.as_str(),
            submit.route,
            submit.class.as_str(),
            submit.deadline_ms,
            rules.attempts_max,
            rules.race_max,
            rules.race_after_ms,
            rules.key_life_ms,
            rules.retention_ms,
            if rules.releases_on_failure { "release" } else { "keep" },
            rules.quarantine_ms,
            submit.input.head.as_str(),
            blob_bytes,
            body,
            submit.begin.word(),
            submit.token,
            submit.lease_ms,
            submit.begin.provider(),
            submit.gateway,
            sent.url,
            sent.request_hash,
            sent.certificate,
        ];
        let identity = submit.id.identity();
        let around = Around { before: vec![self.hint_due(identity, submit.hint_ms)], after: vec![] };
        let call = self.call(Script::SubmitJob, identity, arguments, submit.token.as_bytes().to_vec());
        let (mut reply, durable) = self.run_told(&call, &around).await?;
        let submitted = match reply.status() {
            "created" => {
                let (id, created_ms) = (job_id(&mut reply)?, reply.parse()?);
                let word = reply.text()?;
                let attempt = match word.as_str() {
                    "pending" => None,
                    state => Some(state.parse().map_err(|_| reply.unknown_status())?),
                };
                Submitted::Created { id, created_ms, attempt }
            }
            "existing" => Submitted::Existing(Box::new(record::unpack(&reply.bytes()?)?)),
            "conflict" => Submitted::Conflict { id: job_id(&mut reply)? },
            "gone" => Submitted::Gone(gone(&mut reply)?),
            "collision" => Submitted::Collision,
            _ => return Err(reply.unknown_status()),
        };
        Ok((submitted, durable))
    }

    /// Takes the one free slot of a job for a new attempt.
    ///
    /// # Errors
    /// `NotExecuted`: nothing began. `Ambiguous`: the same call again, with the same token, tells.
    pub async fn begin_attempt(&self, begin: &BeginAttempt<'_>) -> Result<Begun, StoreError> {
        let sent = begin.begin.sent();
        let holder: &[u8] = begin.holder.as_ref().map_or(&[], |token| &token.as_bytes()[..]);
        let arguments = arguments![
            begin.job,
            begin.token,
            holder,
            begin.begin.word(),
            begin.lease_ms,
            begin.begin.provider(),
            begin.gateway,
            sent.url,
            sent.request_hash,
            sent.certificate,
        ];
        let identity = begin.job.identity();
        let around = Around { before: vec![self.hint_due(identity, begin.hint_ms)], after: vec![] };
        let call = self.call(Script::BeginAttempt, identity, arguments, begin.token.as_bytes().to_vec());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "started" => Ok(Begun::Started { number: reply.parse()?, lease_until_ms: reply.parse()? }),
            "repeated" => Ok(Begun::Repeated { number: reply.parse()?, state: reply.parse()? }),
            "blocked" => Ok(Begun::Blocked { by: reply.parse()?, number: reply.parse()? }),
            "too_early" => Ok(Begun::TooEarly { wait_ms: reply.parse()? }),
            "exhausted" => Ok(Begun::Exhausted { attempts: reply.parse()? }),
            "deadline" => Ok(Begun::Deadline),
            "canceling" => Ok(Begun::Canceling),
            "ended" => Ok(Begun::Ended { state: reply.parse()? }),
            "not_found" => Ok(Begun::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Writes ahead that an attempt may now touch its provider.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: do not send before the same call has been answered.
    pub async fn mark_running(
        &self,
        job: JobId,
        number: u32,
        token: AttemptToken,
        sent: WriteAhead<'_>,
    ) -> Result<Marked, StoreError> {
        let arguments = arguments![job, number, token, sent.url, sent.request_hash, sent.certificate];
        let call = self.call(Script::MarkRunning, job.identity(), arguments, token.as_bytes().to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "running" => Ok(Marked::Running { lease_until_ms: reply.parse()? }),
            "repeated" => Ok(Marked::Repeated { lease_until_ms: reply.parse()? }),
            "fenced" => Ok(Marked::Fenced { why: reply.text()? }),
            "not_found" => Ok(Marked::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Says that an attempt is still being worked on. `sequence` is one more for each new extension.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: the lease may not run on; the same call again.
    pub async fn extend_lease(
        &self,
        job: JobId,
        number: u32,
        token: AttemptToken,
        sequence: u64,
        lease_ms: u64,
    ) -> Result<Extended, StoreError> {
        let arguments = arguments![job, number, token, sequence, lease_ms];
        let call = self.call(Script::ExtendLease, job.identity(), arguments, token.as_bytes().to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "extended" => {
                let lease_until_ms = reply.parse()?;
                let canceling = match reply.text()?.as_str() {
                    "yes" => Canceling::Yes,
                    "no" => Canceling::No,
                    _ => return Err(reply.unknown_status()),
                };
                Ok(Extended::Extended { lease_until_ms, canceling })
            }
            "fenced" => Ok(Extended::Fenced { why: reply.text()? }),
            "not_found" => Ok(Extended::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Records how an attempt ended; a success claims the job's result at most once. One round trip, hints and wake-up included.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: keep the result in hand and make the same call again.
    pub async fn finish_attempt(&self, finish: &FinishAttempt<'_>) -> Result<Finished, StoreError> {
        let (finished, durable) = self.finish_told(finish).await?;
        durable.settle(finished)
    }

    /// Finishes as [`Store::finish_attempt`] does, and says whether what it tells is durable.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn finish_told(&self, finish: &FinishAttempt<'_>) -> Result<(Finished, Durable), StoreError> {
        let (blob_bytes, body) = body_arguments(finish.result);
        let (delay_ms, hold_ms) = finish.follow.delays_ms();
        let arguments = arguments![
            finish.job,
            finish.number,
            finish.token,
            finish.outcome.as_str(),
            finish.result.head.as_str(),
            blob_bytes,
            body,
            finish.reason,
            finish.remote_id,
            finish.model,
            finish.follow.word(),
            delay_ms,
            hold_ms,
            finish.tell.word(),
        ];
        let identity = finish.job.identity();
        let mut around = Around { before: vec![], after: vec![self.announce(identity)] };
        match finish.outcome {
            FinishOutcome::Unknown => around.before.push(self.hint_unknown(identity, self.now_ms())),
            FinishOutcome::Succeeded => {
                if let Some(seen_ms) = finish.hint_ms {
                    around.after.push(self.settle_due(identity, seen_ms, finish.strip_at_ms.unwrap_or(0)));
                }
            }
            FinishOutcome::Failed | FinishOutcome::Aborted => {}
        }
        let call = self.call(Script::FinishAttempt, identity, arguments, finish.token.as_bytes().to_vec());
        let (mut reply, durable) = self.run_told(&call, &around).await?;
        let finished = match reply.status() {
            "won" => {
                let (version, was, packed) = (reply.parse()?, reply.parse()?, reply.bytes()?);
                let job = if packed.is_empty() { None } else { Some(Box::new(record::unpack(&packed)?)) };
                Finished::Won { version, was, job }
            }
            "recorded" => Finished::Recorded { job: reply.parse()? },
            "repeated" => Finished::Repeated { attempt: reply.parse()?, job: reply.parse()?, completed_by: reply.parse()? },
            "discarded" => Finished::Discarded { attempt: reply.parse()?, completed_by: reply.parse()? },
            "not_found" => Finished::NotFound,
            _ => return Err(reply.unknown_status()),
        };
        // The pipeline took the hint away before anybody knew the answer; a job that is still open needs it.
        if let (FinishOutcome::Succeeded, Some(seen_ms)) = (finish.outcome, finish.hint_ms)
            && !finished.tells_the_end()
            && let Err(error) = self.note_due(identity, seen_ms).await
        {
            tracing::warn!(%error, %identity, "a hint is lost until the slow scan finds its job");
        }
        Ok((finished, durable))
    }

    /// Records what somebody outside decided about an unknown attempt.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: the same call again, with the same request id.
    pub async fn resolve_attempt(&self, resolve: &ResolveAttempt<'_>) -> Result<Resolved, StoreError> {
        let (blob_bytes, body) = body_arguments(resolve.result);
        let word = match resolve.word {
            Word::Provider => "provider",
            Word::Operator => "operator",
        };
        let arguments = arguments![
            resolve.job,
            resolve.number,
            resolve.request_id,
            resolve.outcome.as_str(),
            resolve.actor,
            resolve.reason,
            word,
            resolve.result.head.as_str(),
            blob_bytes,
            body,
            resolve.follow.word(),
        ];
        let identity = resolve.job.identity();
        let around = Around { before: vec![self.hint_due(identity, self.now_ms())], after: vec![self.announce(identity)] };
        let call = self.call(Script::ResolveAttempt, identity, arguments, resolve.request_id.as_bytes().to_vec());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "won" => Ok(Resolved::Won { version: reply.parse()? }),
            "recorded" => Ok(Resolved::Recorded { job: reply.parse()? }),
            "repeated" => Ok(Resolved::Repeated { attempt: reply.parse()?, job: reply.parse()?, completed_by: reply.parse()? }),
            "discarded" => {
                let _attempt = reply.text()?;
                Ok(Resolved::Discarded { completed_by: reply.parse()? })
            }
            "quarantine" => Ok(Resolved::Quarantine { until_ms: reply.parse()?, wait_ms: reply.parse()? }),
            "not_unknown" => Ok(Resolved::NotUnknown { state: reply.parse()? }),
            "not_found" => Ok(Resolved::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Writes down what was learned about an attempt without ending it.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: the same call again.
    pub async fn note_attempt(&self, note: &NoteAttempt<'_>) -> Result<NoteReply, StoreError> {
        let (event, actor, detail) = note.event.map_or(("", "", ""), |noted| (noted.event.as_str(), noted.actor, noted.detail));
        let arguments = arguments![note.job, note.number, note.token, note.remote_id, note.model, event, actor, detail];
        let call = self.call(Script::NoteAttempt, note.job.identity(), arguments, note.token.as_bytes().to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "noted" => Ok(NoteReply::Noted { attempt: reply.parse()?, job: reply.parse()? }),
            "repeated" => Ok(NoteReply::Repeated { attempt: reply.parse()?, job: reply.parse()? }),
            "not_found" => Ok(NoteReply::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Asks for a job to be canceled, or ends it at once.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: the same call again, with the same request id.
    pub async fn cancel_job(
        &self,
        job: JobId,
        request_id: &str,
        mode: CancelMode,
        actor: &str,
        reason: &str,
    ) -> Result<Canceled, StoreError> {
        let mode = match mode {
            CancelMode::Graceful => "graceful",
            CancelMode::Force => "force",
        };
        let arguments = arguments![job, request_id, mode, actor, reason];
        let around = Around { before: vec![], after: vec![self.announce(job.identity())] };
        let call = self.call(Script::CancelJob, job.identity(), arguments, request_id.as_bytes().to_vec());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "canceled" => Ok(Canceled::Canceled { effect: reply.text()? }),
            "canceling" => Ok(Canceled::Canceling { open: reply.parse()? }),
            "ended" => Ok(Canceled::Ended { state: reply.parse()? }),
            "not_found" => Ok(Canceled::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Lets time act on a job: lapsed leases, a passed deadline, bytes that need no longer be kept.
    ///
    /// # Errors
    /// Any: look again later.
    pub async fn tick_job(&self, identity: Identity) -> Result<Ticked, StoreError> {
        let echo = identity.to_string();
        let call = self.call(Script::TickJob, identity, arguments![echo.as_str()], echo.as_bytes().to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "ticked" | "unchanged" => {
                let ticked = reply.status() == "ticked";
                let (id, state, due_ms) = (job_id(&mut reply)?, reply.parse()?, reply.parse()?);
                let blobs = match reply.text()?.as_str() {
                    "yes" => HasBlobs::Yes,
                    "no" => HasBlobs::No,
                    _ => return Err(reply.unknown_status()),
                };
                let open = reply.parse()?;
                let changes = if ticked { reply.text()? } else { String::new() };
                let changes = changes.split_ascii_whitespace().map(str::to_owned).collect();
                Ok(Ticked::Job { id, state, due_ms, blobs, open, changes })
            }
            "not_found" => Ok(Ticked::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Gives a failed job new attempts.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: the same call again, with the same request id.
    pub async fn reopen_job(
        &self,
        job: JobId,
        request_id: &str,
        actor: &str,
        reason: &str,
        attempts: u32,
        deadline_ms: u64,
    ) -> Result<Reopened, StoreError> {
        let arguments = arguments![job, request_id, actor, reason, attempts, deadline_ms];
        let identity = job.identity();
        let around = Around { before: vec![self.hint_due(identity, self.now_ms())], after: vec![] };
        let call = self.call(Script::ReopenJob, identity, arguments, request_id.as_bytes().to_vec());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "reopened" => Ok(Reopened::Reopened { version: reply.parse()? }),
            "not_failed" => Ok(Reopened::NotFailed { state: reply.parse()? }),
            "gone" => Ok(Reopened::Gone),
            "not_found" => Ok(Reopened::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Says why a pending job waits, and until when, and asks for a look at it then.
    ///
    /// # Errors
    /// Any: the job is looked at when its holder's lease has lapsed.
    pub async fn postpone_job(&self, postpone: &PostponeJob<'_>) -> Result<Postponed, StoreError> {
        let holder: &[u8] = postpone.holder.as_ref().map_or(&[], |token| &token.as_bytes()[..]);
        let arguments = arguments![postpone.job, postpone.token, holder, postpone.delay_ms, postpone.reason];
        let identity = postpone.job.identity();
        let look_ms = self.now_ms().saturating_add(postpone.delay_ms);
        let around = Around { before: vec![self.hint_due(identity, look_ms)], after: vec![] };
        let call = self.call(Script::PostponeJob, identity, arguments, postpone.token.as_bytes().to_vec());
        let mut reply = self.run(&call, &around).await?;
        match reply.status() {
            "postponed" | "repeated" => Ok(Postponed::Postponed { next_at_ms: reply.parse()? }),
            "too_early" => Ok(Postponed::TooEarly { wait_ms: reply.parse()? }),
            "begun" => Ok(Postponed::Begun),
            "canceling" => Ok(Postponed::Canceling),
            "ended" => Ok(Postponed::Ended { state: reply.parse()? }),
            "not_found" => Ok(Postponed::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Takes the right to ask providers about a job, if nobody has it: not while somebody asks, nor before the next question is due.
    ///
    /// # Errors
    /// Any: look again later. A lease that was taken and not answered for lapses by itself.
    pub(crate) async fn take_ask(&self, identity: Identity, token: AttemptToken, lease_ms: u64) -> Result<AskTaken, StoreError> {
        self.take_lease(&self.inner.keys.ask(identity), token, lease_ms).await
    }

    pub(crate) async fn take_lease(&self, key: &str, token: AttemptToken, lease_ms: u64) -> Result<AskTaken, StoreError> {
        let (mut take, mut left) = (redis::cmd("SET"), redis::cmd("PTTL"));
        take.arg(key).arg(&token.as_bytes()[..]).arg("NX").arg("PX").arg(lease_ms);
        left.arg(key);
        let values = self.commands(vec![take, left]).await?;
        match &values[..] {
            [redis::Value::Okay, _] => Ok(AskTaken::Taken),
            [redis::Value::Nil, redis::Value::Int(left_ms)] => {
                Ok(AskTaken::Standing { wait_ms: u64::try_from(*left_ms).unwrap_or(0) })
            }
            [redis::Value::ServerError(error), ..] | [_, redis::Value::ServerError(error)] => Err(retry::of_server(error)),
            other => Err(StoreError::fatal("BADREPLY", format!("a lease was asked for, and the answer is {other:?}"))),
        }
    }

    /// Keeps the right to ask about a job, or leaves it standing so long that nobody asks earlier.
    ///
    /// # Errors
    /// Any: it lapses by itself.
    pub async fn extend_ask(&self, identity: Identity, token: AttemptToken, lease_ms: u64) -> Result<AskExtended, StoreError> {
        let arguments = arguments![token, lease_ms];
        let call = Call::new(Script::ExtendAsk, &[&self.inner.keys.ask(identity)], arguments, token.as_bytes().to_vec());
        let reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "extended" => Ok(AskExtended::Extended),
            "lost" => Ok(AskExtended::Lost),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Reads a job at one moment, from the master.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: again. `Fatal`: a record that nobody may interpret; never taken for an absent one.
    pub async fn read_job(&self, identity: Identity) -> Result<Read, StoreError> {
        let (read, durable) = self.read_once(identity).await?;
        durable.settle(read)
    }

    /// Reads a job for somebody outside: an ending is told only once it is durable; until then the job is shown as it stood before.
    ///
    /// One round trip where nothing must be durable or the job is open, else two; the second takes no longer than
    /// [`StoreOptions::durability_timeout`](crate::store::StoreOptions::durability_timeout) and half of a reply's time.
    ///
    /// # Errors
    /// As [`Store::read_job`]; and `NotDurable` where the job has ended so long ago that nothing but that could be told.
    pub async fn read_told(&self, identity: Identity) -> Result<Read, StoreError> {
        let (read, _) = self.read_once(identity).await?;
        if self.inner.commit.is_none() || matches!(&read, Read::Found(job) if !job.is_ended()) || read == Read::NotFound {
            return Ok(read);
        }
        // By itself it would also wait for the batch before its own.
        let within = self.inner.options.durability_timeout + self.inner.options.response_timeout / 2;
        let (read, durable) = match tokio::time::timeout(within, self.committing().read_once(identity)).await {
            Ok(told) => told?,
            Err(_) => (read, nothing_of(self.durability())),
        };
        match (read, durable) {
            (Read::Found(job), Durable::Short { have, want }) if job.is_ended() => {
                Ok(Read::Found(Box::new(job.before_its_end(have, want))))
            }
            (Read::Gone(_), Durable::Short { have, want }) => Err(StoreError::NotDurable { have, want }),
            (read, Durable::Yes | Durable::Short { .. }) => Ok(read),
        }
    }

    async fn read_once(&self, identity: Identity) -> Result<(Read, Durable), StoreError> {
        let echo = identity.to_string();
        let call = self.call(Script::ReadJob, identity, arguments!["record", echo.as_str()], echo.as_bytes().to_vec());
        // A replica runs it too, and may be behind.
        let asked = if self.inner.nodes.may_answer_as_replica() { vec![redis::cmd("ROLE")] } else { vec![] };
        let around = Around { before: asked, after: vec![] };
        let (mut reply, durable) = self.run_told(&call, &around).await?;
        let read = match reply.status() {
            "found" => Read::Found(Box::new(record::unpack(&reply.bytes()?)?)),
            "gone" => Read::Gone(gone(&mut reply)?),
            "not_found" => Read::NotFound,
            _ => return Err(reply.unknown_status()),
        };
        Ok((read, durable))
    }

    fn call(&self, script: Script, identity: Identity, arguments: impl FnOnce(&mut redis::Cmd), echo: Vec<u8>) -> Call {
        Call::new(script, &[&self.inner.keys.job(identity)], arguments, echo)
    }
}

fn job_id(reply: &mut Reply) -> Result<JobId, StoreError> {
    let bytes = reply.bytes()?;
    let bytes: [u8; 16] = bytes.try_into().map_err(|_| reply.unknown_status())?;
    JobId::from_bytes(bytes).map_err(|_| reply.unknown_status())
}

fn gone(reply: &mut Reply) -> Result<Gone, StoreError> {
    Ok(Gone { id: job_id(reply)?, state: reply.parse()?, ended_ms: reply.parse()?, owner: reply.text()? })
}
