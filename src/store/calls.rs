//! What goes into a script and what comes out, as plain types: one pair for each script.
//!
//! The words are those of the scripts' headers. Nothing here calls anything, and nothing here decides.

use crate::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use crate::fingerprint::HalfBytes;
use crate::job::{Class, Job, JobId, JobState, Owner, Payload, Rules};

/// A claim of a key.
#[derive(Clone, Debug)]
pub struct SubmitJob<'a> {
    /// The proposed id; the reply has the real one.
    pub id: JobId,
    /// The digest of owner and key.
    pub digest: HalfBytes,
    /// The fingerprint of the request.
    pub fingerprint: HalfBytes,
    /// On whose behalf.
    pub owner: &'a Owner,
    /// By which route.
    pub route: &'a str,
    /// How many attempts may be open at once.
    pub class: Class,
    /// How long the job has from now, in ms; 0 for no deadline.
    pub deadline_ms: u64,
    /// The rules that the job carries.
    pub rules: Rules,
    /// What is asked for.
    pub input: &'a Payload,
    /// The first attempt's token, or the pending job's holder's.
    pub token: AttemptToken,
    /// How long the attempt, or the pending job, is the caller's.
    pub lease_ms: u64,
    /// When somebody should look at the job, by [`crate::store::Store::now_ms`]: the hint that goes before the claim.
    pub hint_ms: u64,
    /// Who calls: a label.
    pub gateway: &'a str,
    /// What the claim already does.
    pub begin: Begin<'a>,
}

/// What a claim or a beginning already does.
#[derive(Clone, Copy, Debug)]
pub enum Begin<'a> {
    /// Only the claim; the caller holds the job.
    Pending,
    /// The slot is taken; the write-ahead comes later.
    Starting {
        /// For which provider.
        provider: &'a str,
    },
    /// The write-ahead too: this may be sent.
    Running {
        /// To which provider.
        provider: &'a str,
        /// What is sent.
        sent: WriteAhead<'a>,
    },
}

impl Begin<'_> {
    pub(super) fn word(&self) -> &'static str {
        match self {
            Begin::Pending => "pending",
            Begin::Starting { .. } => "starting",
            Begin::Running { .. } => "running",
        }
    }

    pub(super) fn provider(&self) -> &str {
        match self {
            Begin::Pending => "",
            Begin::Starting { provider } | Begin::Running { provider, .. } => provider,
        }
    }

    pub(super) fn sent(&self) -> WriteAhead<'_> {
        match self {
            Begin::Running { sent, .. } => *sent,
            Begin::Pending | Begin::Starting { .. } => WriteAhead::default(),
        }
    }
}

/// What is written before the first byte may leave.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteAhead<'a> {
    /// The resolved URL.
    pub url: &'a str,
    /// SHA-256 of the rendered request.
    pub request_hash: &'a [u8],
    /// The certificate under which it goes there, `""` for none.
    pub certificate: &'a str,
}

/// The reply to a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// The key is this call's.
    Created {
        /// The job's id.
        id: JobId,
        /// When it was created, Unix ms of Redis.
        created_ms: u64,
        /// The first attempt's present state, `None` for a pending job.
        attempt: Option<AttemptState>,
    },
    /// The same request came first: this is its job.
    Existing(Box<Job>),
    /// Another request came first.
    Conflict {
        /// Its job.
        id: JobId,
    },
    /// It ended so long ago that its result is no longer kept.
    Gone(Gone),
    /// Another owner and key have the same identity.
    Collision,
}

/// A job whose result is no longer kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The job.
    pub id: JobId,
    /// How it ended.
    pub state: JobState,
    /// When, Unix ms of Redis.
    pub ended_ms: u64,
    /// On whose behalf.
    pub owner: String,
}

/// A new attempt.
#[derive(Clone, Copy, Debug)]
pub struct BeginAttempt<'a> {
    /// The job.
    pub job: JobId,
    /// The attempt's token: new for each.
    pub token: AttemptToken,
    /// The token by which the caller holds the pending job, if it does.
    pub holder: Option<AttemptToken>,
    /// How long the attempt is the caller's.
    pub lease_ms: u64,
    /// When somebody should look at the job, by [`crate::store::Store::now_ms`]: the hint that goes before the beginning.
    pub hint_ms: u64,
    /// Who calls: a label.
    pub gateway: &'a str,
    /// Slot only, or with the write-ahead. Never [`Begin::Pending`].
    pub begin: Begin<'a>,
}

/// The reply to a beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begun {
    /// The slot is this attempt's.
    Started {
        /// Its number.
        number: u32,
        /// Until when it is the caller's, Unix ms of Redis.
        lease_until_ms: u64,
    },
    /// An earlier call with this token began it.
    Repeated {
        /// Its number.
        number: u32,
        /// Its present state.
        state: AttemptState,
    },
    /// Another attempt is in the way.
    Blocked {
        /// Its state: starting, running or unknown.
        by: AttemptState,
        /// Its number.
        number: u32,
    },
    /// A delay or another holder's lease has this long to run.
    TooEarly {
        /// How long.
        wait_ms: u64,
    },
    /// The attempts are used up.
    Exhausted {
        /// How many were made.
        attempts: u32,
    },
    /// The job's time is over.
    Deadline,
    /// Somebody asked to cancel it.
    Canceling,
    /// It has ended.
    Ended {
        /// How.
        state: JobState,
    },
    /// No such job, or another incarnation.
    NotFound,
}

/// The reply to a write-ahead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Marked {
    /// Send.
    Running {
        /// Until when it is the caller's, Unix ms of Redis.
        lease_until_ms: u64,
    },
    /// An earlier call with this token did the same.
    Repeated {
        /// Until when it is the caller's, Unix ms of Redis.
        lease_until_ms: u64,
    },
    /// Do not send.
    Fenced {
        /// `token`, `state`, `lease`, `canceling` or `ended`.
        why: String,
    },
    /// No such job, or another incarnation.
    NotFound,
}

/// The reply to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extended {
    /// The lease runs on.
    Extended {
        /// Until when, Unix ms of Redis.
        lease_until_ms: u64,
        /// Whether somebody asked to cancel the job.
        canceling: Canceling,
    },
    /// The attempt is no longer the caller's.
    Fenced {
        /// `token`, `state`, `lease` or `ended`.
        why: String,
    },
    /// No such job, or another incarnation.
    NotFound,
}

/// Whether somebody asked to cancel a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Canceling {
    /// Somebody did.
    Yes,
    /// Nobody did.
    No,
}

/// How an attempt ended.
#[derive(Clone, Debug)]
pub struct FinishAttempt<'a> {
    /// The job.
    pub job: JobId,
    /// The attempt's number.
    pub number: u32,
    /// The attempt's token.
    pub token: AttemptToken,
    /// How.
    pub outcome: FinishOutcome,
    /// The result of a success, or the refusal of a failure.
    pub result: &'a Payload,
    /// Why it did not succeed.
    pub reason: &'a str,
    /// The provider's own name for the work, `""` if none.
    pub remote_id: &'a str,
    /// The model that answered, `""` if none.
    pub model: &'a str,
    /// What may follow a failure.
    pub follow: Follow,
    /// The hint that the caller wrote for this attempt, to be taken away after a success; `None` to leave it.
    pub hint_ms: Option<u64>,
    /// When the kept bytes are to be stripped, Unix ms of Redis, if before the key's end.
    pub strip_at_ms: Option<u64>,
    /// What a call that wins is to be told.
    pub tell: Tell,
}

/// What may follow a definite failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow {
    /// The failure is the job's.
    End,
    /// Another attempt may begin.
    Retry {
        /// How long to wait before it.
        delay_ms: u64,
        /// How long beyond that the caller's token keeps the job for itself; 0 to let it go.
        hold_ms: u64,
    },
}

impl Follow {
    pub(super) fn word(self) -> &'static str {
        match self {
            Follow::End => "end",
            Follow::Retry { .. } => "retry",
        }
    }

    pub(super) fn delays_ms(self) -> (u64, u64) {
        match self {
            Follow::End => (0, 0),
            Follow::Retry { delay_ms, hold_ms } => (delay_ms, hold_ms),
        }
    }
}

/// What a call that claims the result is to be told besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tell {
    /// Nothing: nobody waits for the job here.
    Nothing,
    /// The job: it saves the read that would follow.
    Record,
}

impl Tell {
    pub(super) fn word(self) -> &'static str {
        match self {
            Tell::Nothing => "nothing",
            Tell::Record => "record",
        }
    }
}

/// The reply to a finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finished {
    /// This call claimed the result.
    Won {
        /// The job's version now.
        version: u64,
        /// What the attempt was before: running, or given up already.
        was: AttemptState,
        /// The job as this call left it, if the caller asked for it.
        job: Option<Box<Job>>,
    },
    /// The attempt's row is as reported.
    Recorded {
        /// The job's state now.
        job: JobState,
    },
    /// An earlier call with this token and outcome did the same.
    Repeated {
        /// The attempt's state now.
        attempt: AttemptState,
        /// The job's state now.
        job: JobState,
        /// Whose result the job has, 0 for nobody's.
        completed_by: u32,
    },
    /// The job had ended, or the attempt was already judged.
    Discarded {
        /// The attempt's state now.
        attempt: AttemptState,
        /// Whose result the job has, 0 for nobody's.
        completed_by: u32,
    },
    /// No such job, attempt or token, or another incarnation.
    NotFound,
}

impl Finished {
    /// Whether the reply is proof that the job has ended.
    pub(super) fn tells_the_end(&self) -> bool {
        match self {
            Finished::Won { .. } => true,
            Finished::Recorded { job } | Finished::Repeated { job, .. } => job.is_ended(),
            Finished::Discarded { completed_by, .. } => *completed_by > 0,
            Finished::NotFound => false,
        }
    }
}

/// A decision about an unknown attempt.
#[derive(Clone, Debug)]
pub struct ResolveAttempt<'a> {
    /// The job.
    pub job: JobId,
    /// The attempt's number.
    pub number: u32,
    /// New for each decision.
    pub request_id: &'a str,
    /// What is decided.
    pub outcome: ResolveOutcome,
    /// Who decides.
    pub actor: &'a str,
    /// Why.
    pub reason: &'a str,
    /// Whose word it is.
    pub word: Word,
    /// The result of a success, or the refusal of a failure.
    pub result: &'a Payload,
    /// What may follow; the delays are ignored.
    pub follow: Follow,
}

/// Whose word a decision rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The provider's own: believed at once.
    Provider,
    /// An operator's: "it did not happen" is believed only after the quarantine.
    Operator,
}

/// The reply to a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// This decision claimed the result.
    Won {
        /// The job's version now.
        version: u64,
    },
    /// The attempt is closed as decided.
    Recorded {
        /// The job's state now.
        job: JobState,
    },
    /// An earlier call with this request id did it.
    Repeated {
        /// The attempt's state now.
        attempt: AttemptState,
        /// The job's state now.
        job: JobState,
        /// Whose result the job has, 0 for nobody's.
        completed_by: u32,
    },
    /// The job had ended; only the attempt's row says so.
    Discarded {
        /// Whose result the job has, 0 for nobody's.
        completed_by: u32,
    },
    /// Too early to believe that nothing happened.
    Quarantine {
        /// Until when, Unix ms of Redis.
        until_ms: u64,
        /// How much longer.
        wait_ms: u64,
    },
    /// The attempt is not unknown.
    NotUnknown {
        /// Its state.
        state: AttemptState,
    },
    /// No such job or attempt, or another incarnation.
    NotFound,
}

/// What was learned about an attempt without ending it.
#[derive(Clone, Copy, Debug)]
pub struct NoteAttempt<'a> {
    /// The job.
    pub job: JobId,
    /// The attempt's number.
    pub number: u32,
    /// The attempt's token: whoever asks on its behalf has it from the record.
    pub token: AttemptToken,
    /// The provider's own name for the work, `""` for no news of it. A name that stands stays.
    pub remote_id: &'a str,
    /// Which model answers, `""` for no news of it.
    pub model: &'a str,
    /// What happened, if something did.
    pub event: Option<NotedEvent<'a>>,
}

/// Something that happened to an attempt and did not end it. The same event in the same words is noted once.
#[derive(Clone, Copy, Debug)]
pub struct NotedEvent<'a> {
    /// What.
    pub event: Noted,
    /// Who says so.
    pub actor: &'a str,
    /// More.
    pub detail: &'a str,
}

/// What may be noted of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// Its provider was asked to stop it.
    CancelSent,
    /// Its provider says that it was stopped, and may yet say otherwise.
    CancelSeen,
    /// Nobody could find out what became of it: a person must.
    NeedsOperator,
    /// It was sent again, with the same key and the same bytes.
    Replayed,
}

impl Noted {
    /// The word of the event.
    pub fn as_str(self) -> &'static str {
        match self {
            Noted::CancelSent => "cancel_sent",
            Noted::CancelSeen => "cancel_seen",
            Noted::NeedsOperator => "needs_operator",
            Noted::Replayed => "replayed",
        }
    }
}

/// The reply to a note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoteReply {
    /// It is written down.
    Noted {
        /// The attempt's state.
        attempt: AttemptState,
        /// The job's state.
        job: JobState,
    },
    /// There was nothing new in it.
    Repeated {
        /// The attempt's state.
        attempt: AttemptState,
        /// The job's state.
        job: JobState,
    },
    /// No such job, attempt or token, or another incarnation.
    NotFound,
}

/// The reply to whoever asks providers about a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskExtended {
    /// The lease lasts as long as was asked for.
    Extended,
    /// It lapsed, or is somebody else's.
    Lost,
}

/// Whether a job's providers may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AskTaken {
    /// By this caller, until its lease ends.
    Taken,
    /// Not for so long: somebody asks, or somebody asked a short while ago.
    Standing {
        /// How much longer.
        wait_ms: u64,
    },
}

/// How to cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelMode {
    /// Ask; the job ends when its open attempts have settled, and a success that comes first wins.
    Graceful,
    /// End the job now, whatever its open attempts may still do.
    Force,
}

/// The reply to a cancel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Canceled {
    /// The job has ended as canceled.
    Canceled {
        /// `none`, or `unknown` if attempts were open.
        effect: String,
    },
    /// It will, when these have settled.
    Canceling {
        /// How many attempts are open.
        open: u32,
    },
    /// It had ended otherwise.
    Ended {
        /// How.
        state: JobState,
    },
    /// No such job, or another incarnation.
    NotFound,
}

/// What time has done to a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ticked {
    /// Something changed, or nothing if `changes` is empty.
    Job {
        /// The job.
        id: JobId,
        /// Its state now.
        state: JobState,
        /// When to look again, Unix ms of Redis; 0 for no time of its own.
        due_ms: u64,
        /// Whether the record names a blob.
        blobs: HasBlobs,
        /// How many attempts are open.
        open: u32,
        /// Words among `aborted`, `unknown`, `poisoned`, `deadline`, `stripped`.
        changes: Vec<String>,
    },
    /// No such job.
    NotFound,
}

/// Whether a record names a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HasBlobs {
    /// It does.
    Yes,
    /// All its bytes are in it.
    No,
}

/// The reply to a reopening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reopened {
    /// The job is pending again.
    Reopened {
        /// Its version now.
        version: u64,
    },
    /// Only a failed job can be reopened.
    NotFailed {
        /// Its state.
        state: JobState,
    },
    /// Its input is no longer kept.
    Gone,
    /// No such job, or another incarnation.
    NotFound,
}

/// The reply to a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// The job.
    Found(Box<Job>),
    /// It ended so long ago that its result is no longer kept.
    Gone(Gone),
    /// No such job.
    NotFound,
}
