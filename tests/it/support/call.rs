//! Any call of the store as plain data, so that tests can tabulate, repeat and shrink calls.

use std::sync::Arc;

use onejob::attempt::{AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::error::StoreError;
use onejob::fingerprint::{digest, second_half, sha256};
use onejob::job::{Body, Class, Identity, JobId, Owner, Payload, Rules};
use onejob::store::{
    Begin, BeginAttempt, Begun, CancelMode, Canceled, Extended, FinishAttempt, Finished, Follow, Marked, NoteAttempt, NoteReply,
    Noted, NotedEvent, PostponeJob, Postponed, Read, Reopened, ResolveAttempt, Resolved, Store, SubmitJob, Submitted, Tell,
    Ticked, Word, WriteAhead,
};

use super::{KEY_LIFE_MS, LEASE_MS, QUARANTINE_MS, RACE_AFTER_MS, RETENTION_MS};

const REQUEST_HASH: [u8; 32] = [7; 32];

/// A small payload.
pub fn payload(body: &str) -> Payload {
    Payload { head: "HTTP/1.1 200 OK".to_owned(), body: Body::Inline(Arc::from(body.as_bytes())) }
}

/// What every attempt of the tests sends.
pub fn sent() -> WriteAhead<'static> {
    WriteAhead { url: "https://laser.example/v1/prints", request_hash: &REQUEST_HASH, certificate: "certificate-1" }
}

/// What a claim or a beginning already does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum First {
    Pending,
    Starting,
    Running,
}

impl First {
    fn begin(self) -> Begin<'static> {
        match self {
            First::Pending => Begin::Pending,
            First::Starting => Begin::Starting { provider: "laser" },
            First::Running => Begin::Running { provider: "laser", sent: sent() },
        }
    }
}

/// A claim that owns its parts.
#[derive(Clone, Debug)]
pub struct Submission {
    pub owner: Owner,
    pub key: String,
    /// The proposed id's time.
    pub time_ms: u64,
    pub route: &'static str,
    pub class: Class,
    pub deadline_ms: u64,
    pub rules: Rules,
    /// What is asked for; its SHA-256 is the fingerprint.
    pub request: String,
    pub token: AttemptToken,
    pub lease_ms: u64,
    pub first: First,
}

impl Submission {
    /// A pending one, exclusive, without a deadline, for three attempts.
    pub fn new(key: &str) -> Self {
        Submission {
            owner: Owner::new("shop").expect("an owner"),
            key: key.to_owned(),
            time_ms: 1_795_000_000_000,
            route: "print",
            class: Class::Exclusive,
            deadline_ms: 0,
            rules: Rules {
                attempts_max: 3,
                race_max: 2,
                race_after_ms: RACE_AFTER_MS,
                key_life_ms: KEY_LIFE_MS,
                retention_ms: RETENTION_MS,
                releases_on_failure: false,
                quarantine_ms: QUARANTINE_MS,
            },
            request: "print page 1".to_owned(),
            token: AttemptToken::random(),
            lease_ms: LEASE_MS,
            first: First::Pending,
        }
    }

    /// The same request of another caller.
    pub fn by_another(&self) -> Self {
        Submission { token: AttemptToken::random(), time_ms: self.time_ms + 1, ..self.clone() }
    }

    /// Where the job lives.
    pub fn identity(&self) -> Identity {
        Identity::of(&digest(self.owner.as_str(), &self.key))
    }

    /// The proposed id.
    pub fn id(&self) -> JobId {
        JobId::new(self.time_ms, self.identity())
    }

    async fn send(&self, store: &Store) -> Result<Submitted, StoreError> {
        let submit = SubmitJob {
            id: self.id(),
            digest: second_half(&digest(self.owner.as_str(), &self.key)),
            fingerprint: second_half(&sha256(self.request.as_bytes())),
            owner: &self.owner,
            route: self.route,
            class: self.class,
            deadline_ms: self.deadline_ms,
            rules: self.rules,
            input: &payload(&self.request),
            token: self.token,
            lease_ms: self.lease_ms,
            hint_ms: store.now_ms() + self.lease_ms,
            gateway: "gateway-1",
            begin: self.first.begin(),
        };
        store.submit_job(&submit).await
    }
}

/// One call of the store.
#[derive(Clone, Debug)]
pub enum Call {
    Submit(Submission),
    Begin { job: JobId, token: AttemptToken, holder: Option<AttemptToken>, first: First },
    Mark { job: JobId, number: u32, token: AttemptToken },
    Extend { job: JobId, number: u32, token: AttemptToken, sequence: u64, lease_ms: u64 },
    Finish { job: JobId, number: u32, token: AttemptToken, outcome: FinishOutcome, body: String, follow: Follow },
    Resolve { job: JobId, number: u32, request_id: String, outcome: ResolveOutcome, word: Word, body: String, follow: Follow },
    Note { job: JobId, number: u32, token: AttemptToken, remote_id: String, event: Option<(Noted, String)> },
    Cancel { job: JobId, request_id: String, mode: CancelMode },
    Tick { identity: Identity },
    Reopen { job: JobId, request_id: String, attempts: u32, deadline_ms: u64 },
    Postpone { job: JobId, token: AttemptToken, holder: Option<AttemptToken>, delay_ms: u64 },
    Read { identity: Identity },
}

/// Whatever a call was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Submitted(Submitted),
    Begun(Begun),
    Marked(Marked),
    Extended(Extended),
    Finished(Finished),
    Resolved(Resolved),
    Noted(NoteReply),
    Canceled(Canceled),
    Ticked(Ticked),
    Reopened(Reopened),
    Postponed(Postponed),
    Read(Read),
}

impl Call {
    /// Sends it.
    pub async fn send(&self, store: &Store) -> Result<Answer, StoreError> {
        Ok(match self {
            Call::Submit(submission) => Answer::Submitted(submission.send(store).await?),
            Call::Begin { job, token, holder, first } => {
                let (job, token, holder) = (*job, *token, *holder);
                let hint_ms = store.now_ms() + LEASE_MS;
                let begin =
                    BeginAttempt { job, token, holder, lease_ms: LEASE_MS, hint_ms, gateway: "gateway-1", begin: first.begin() };
                Answer::Begun(store.begin_attempt(&begin).await?)
            }
            Call::Mark { job, number, token } => Answer::Marked(store.mark_running(*job, *number, *token, sent()).await?),
            Call::Extend { job, number, token, sequence, lease_ms } => {
                Answer::Extended(store.extend_lease(*job, *number, *token, *sequence, *lease_ms).await?)
            }
            Call::Finish { job, number, token, outcome, body, follow } => {
                let (result, model, reason) = match outcome {
                    FinishOutcome::Succeeded => (payload(body), "laser-2", ""),
                    FinishOutcome::Failed => (payload(body), "", "rejected"),
                    FinishOutcome::Unknown => (Payload::default(), "", "timeout"),
                    FinishOutcome::Aborted => (Payload::default(), "", "no_permit"),
                };
                let finish = FinishAttempt {
                    job: *job,
                    number: *number,
                    token: *token,
                    outcome: *outcome,
                    result: &result,
                    reason,
                    remote_id: "",
                    model,
                    follow: *follow,
                    hint_ms: None,
                    strip_at_ms: None,
                    tell: Tell::Nothing,
                };
                Answer::Finished(store.finish_attempt(&finish).await?)
            }
            Call::Resolve { job, number, request_id, outcome, word, body, follow } => {
                let result = match outcome {
                    ResolveOutcome::Succeeded => payload(body),
                    ResolveOutcome::Failed | ResolveOutcome::Canceled | ResolveOutcome::Abandoned => Payload::default(),
                };
                let resolve = ResolveAttempt {
                    job: *job,
                    number: *number,
                    request_id,
                    outcome: *outcome,
                    actor: "ada",
                    reason: "looked at the printer",
                    word: *word,
                    result: &result,
                    follow: *follow,
                };
                Answer::Resolved(store.resolve_attempt(&resolve).await?)
            }
            Call::Note { job, number, token, remote_id, event } => {
                let event = event.as_ref().map(|(event, detail)| NotedEvent { event: *event, actor: "ada", detail });
                let note = NoteAttempt { job: *job, number: *number, token: *token, remote_id, model: "", event };
                Answer::Noted(store.note_attempt(&note).await?)
            }
            Call::Cancel { job, request_id, mode } => {
                Answer::Canceled(store.cancel_job(*job, request_id, *mode, "ada", "changed my mind").await?)
            }
            Call::Tick { identity } => Answer::Ticked(store.tick_job(*identity).await?),
            Call::Reopen { job, request_id, attempts, deadline_ms } => {
                Answer::Reopened(store.reopen_job(*job, request_id, "ada", "paper is back", *attempts, *deadline_ms).await?)
            }
            Call::Postpone { job, token, holder, delay_ms } => {
                let (job, token, holder, delay_ms) = (*job, *token, *holder, *delay_ms);
                let postpone = PostponeJob { job, token, holder, delay_ms, reason: "breaker: laser is not called" };
                Answer::Postponed(store.postpone_job(&postpone).await?)
            }
            Call::Read { identity } => Answer::Read(store.read_job(*identity).await?),
        })
    }

    /// The name of its script.
    pub fn script(&self) -> &'static str {
        match self {
            Call::Submit(_) => "submit_job",
            Call::Begin { .. } => "begin_attempt",
            Call::Mark { .. } => "mark_running",
            Call::Extend { .. } => "extend_lease",
            Call::Finish { .. } => "finish_attempt",
            Call::Resolve { .. } => "resolve_attempt",
            Call::Note { .. } => "note_attempt",
            Call::Cancel { .. } => "cancel_job",
            Call::Tick { .. } => "tick_job",
            Call::Reopen { .. } => "reopen_job",
            Call::Postpone { .. } => "postpone_job",
            Call::Read { .. } => "read_job",
        }
    }

    /// The same call for another incarnation of the job; `None` for a call that names none.
    pub fn for_another_incarnation(&self) -> Option<Self> {
        let mut call = self.clone();
        match &mut call {
            Call::Submit(_) | Call::Tick { .. } | Call::Read { .. } => return None,
            Call::Begin { job, .. }
            | Call::Mark { job, .. }
            | Call::Extend { job, .. }
            | Call::Finish { job, .. }
            | Call::Resolve { job, .. }
            | Call::Note { job, .. }
            | Call::Cancel { job, .. }
            | Call::Postpone { job, .. }
            | Call::Reopen { job, .. } => *job = JobId::new(job.time_ms() + 1, job.identity()),
        }
        Some(call)
    }
}
