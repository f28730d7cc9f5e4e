//! One job in a private Redis: short words for the calls, the record before and after, and time made to pass.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use onejob::attempt::{AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::{Job, JobId};
use onejob::store::{
    Begun, CancelMode, Canceled, Extended, Finished, Follow, Marked, NoteReply, Noted, Read, Reopened, Resolved, Store,
    Submitted, Ticked, Word,
};
use redis::aio::MultiplexedConnection;

use super::{Answer, Call, First, LEASE_MS, Submission};

const PRELUDE: &str = include_str!("../../../lua/prelude.lua");

/// Everything in a record that is a time, made older, and the key's life with it.
const AGE: &str = "
local function older(row, positions)
  for _, position in ipairs(positions) do
    if row[position] > 0 then row[position] = row[position] - ARGV[1] end
  end
end
older(record, { P.created_ms, P.updated_ms, P.ended_ms, P.deadline_ms, P.next_at_ms, P.holder_lease_ms, P.retain_until_ms })
for _, attempt in ipairs(record[P.attempts]) do older(attempt, { A.started_ms, A.lease_ms, A.ended_ms }) end
for _, event in ipairs(record[P.events]) do older(event, { 1 }) end
";

/// One job.
pub struct Given {
    pub store: Store,
    /// The id of its present incarnation.
    pub id: JobId,
    /// What it was claimed with.
    pub submission: Submission,
    connection: MultiplexedConnection,
    tokens: Vec<AttemptToken>,
    requests: AtomicU32,
}

/// A record as Redis has it: its bytes and when it expires. Equal dumps: nothing was touched, the TTL included.
#[derive(Clone, PartialEq, Eq)]
pub struct Dump {
    pub packed: Option<Vec<u8>>,
    /// Unix ms; -1 for never, -2 for no record.
    pub expires_at_ms: i64,
}

impl fmt::Debug for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let packed = self.packed.as_deref().map(String::from_utf8_lossy);
        write!(f, "Dump {{ expires_at_ms: {}, packed: {packed:?} }}", self.expires_at_ms)
    }
}

impl Given {
    pub(super) fn new(store: Store, connection: MultiplexedConnection, submission: Submission) -> Self {
        let tokens = match submission.first {
            First::Pending => vec![],
            First::Starting | First::Running => vec![submission.token],
        };
        Given { store, id: submission.id(), submission, connection, tokens, requests: AtomicU32::new(0) }
    }

    /// The name of its key.
    pub fn key(&self) -> String {
        format!("oj:{{{}}}", self.id.identity())
    }

    /// The token of an attempt, by its number.
    pub fn token(&self, number: u32) -> AttemptToken {
        self.tokens[number as usize - 1]
    }

    /// Claims it.
    pub async fn submit(&self) -> Submitted {
        match self.send(&Call::Submit(self.submission.clone())).await {
            Answer::Submitted(submitted) => submitted,
            other => panic!("{other:?}"),
        }
    }

    /// A beginning with a new token, for a caller that holds nothing.
    pub fn call_begin(&self, first: First) -> Call {
        Call::Begin { job: self.id, token: AttemptToken::random(), holder: None, first }
    }

    /// Begins an attempt, in the name of whoever may hold the job.
    pub async fn begin(&mut self, first: First) -> Begun {
        let holder = Some(self.tokens.last().copied().unwrap_or(self.submission.token));
        let token = AttemptToken::random();
        let answer = self.send(&Call::Begin { job: self.id, token, holder, first }).await;
        match answer {
            Answer::Begun(begun) => {
                if matches!(begun, Begun::Started { .. }) {
                    self.tokens.push(token);
                }
                begun
            }
            other => panic!("{other:?}"),
        }
    }

    /// Begins an attempt that must begin, and returns its number.
    pub async fn begins(&mut self, first: First) -> u32 {
        match self.begin(first).await {
            Begun::Started { number, .. } => number,
            other => panic!("{other:?}"),
        }
    }

    pub async fn mark(&self, number: u32) -> Marked {
        match self.send(&self.call_mark(number)).await {
            Answer::Marked(marked) => marked,
            other => panic!("{other:?}"),
        }
    }

    pub fn call_mark(&self, number: u32) -> Call {
        Call::Mark { job: self.id, number, token: self.token(number) }
    }

    pub fn call_postpone(&self, holder: Option<AttemptToken>, delay_ms: u64) -> Call {
        Call::Postpone { job: self.id, token: AttemptToken::random(), holder, delay_ms }
    }

    pub async fn extend(&self, number: u32, sequence: u64) -> Extended {
        match self.send(&self.call_extend(number, sequence)).await {
            Answer::Extended(extended) => extended,
            other => panic!("{other:?}"),
        }
    }

    pub fn call_extend(&self, number: u32, sequence: u64) -> Call {
        Call::Extend { job: self.id, number, token: self.token(number), sequence, lease_ms: 2 * LEASE_MS }
    }

    pub fn call_finish(&self, number: u32, outcome: FinishOutcome, body: &str, follow: Follow) -> Call {
        Call::Finish { job: self.id, number, token: self.token(number), outcome, body: body.to_owned(), follow }
    }

    pub async fn finish(&self, number: u32, outcome: FinishOutcome, body: &str, follow: Follow) -> Finished {
        match self.send(&self.call_finish(number, outcome, body, follow)).await {
            Answer::Finished(finished) => finished,
            other => panic!("{other:?}"),
        }
    }

    pub async fn succeed(&self, number: u32, body: &str) -> Finished {
        self.finish(number, FinishOutcome::Succeeded, body, Follow::End).await
    }

    /// A refusal, and the job's.
    pub async fn fail(&self, number: u32) -> Finished {
        self.finish(number, FinishOutcome::Failed, "refused", Follow::End).await
    }

    /// A refusal after which another attempt may begin.
    pub async fn fail_and_retry(&self, number: u32, delay_ms: u64, hold_ms: u64) -> Finished {
        self.finish(number, FinishOutcome::Failed, "refused", Follow::Retry { delay_ms, hold_ms }).await
    }

    /// A timeout.
    pub async fn lose(&self, number: u32) -> Finished {
        self.finish(number, FinishOutcome::Unknown, "", Follow::End).await
    }

    /// Nothing was sent; another attempt may begin.
    pub async fn abort(&self, number: u32) -> Finished {
        self.finish(number, FinishOutcome::Aborted, "", Follow::Retry { delay_ms: 0, hold_ms: 0 }).await
    }

    pub fn call_resolve(&self, number: u32, outcome: ResolveOutcome, word: Word, follow: Follow) -> Call {
        let (job, request_id) = (self.id, self.request_id());
        Call::Resolve { job, number, request_id, outcome, word, body: "found".to_owned(), follow }
    }

    /// Decides about an attempt, by a word and with what may follow.
    pub async fn resolve(&self, number: u32, outcome: ResolveOutcome, word: Word, follow: Follow) -> Resolved {
        match self.send(&self.call_resolve(number, outcome, word, follow)).await {
            Answer::Resolved(resolved) => resolved,
            other => panic!("{other:?}"),
        }
    }

    /// Takes the risk, and lets the job end with it.
    pub async fn abandon(&self, number: u32) -> Resolved {
        self.resolve(number, ResolveOutcome::Abandoned, Word::Operator, Follow::End).await
    }

    pub fn call_note(&self, number: u32, remote_id: &str, event: Option<(Noted, &str)>) -> Call {
        let event = event.map(|(event, detail)| (event, detail.to_owned()));
        Call::Note { job: self.id, number, token: self.token(number), remote_id: remote_id.to_owned(), event }
    }

    /// Writes down what was learned about an attempt.
    pub async fn note(&self, number: u32, remote_id: &str, event: Option<(Noted, &str)>) -> NoteReply {
        match self.send(&self.call_note(number, remote_id, event)).await {
            Answer::Noted(noted) => noted,
            other => panic!("{other:?}"),
        }
    }

    pub fn call_cancel(&self, mode: CancelMode) -> Call {
        Call::Cancel { job: self.id, request_id: self.request_id(), mode }
    }

    pub async fn cancel(&self, mode: CancelMode) -> Canceled {
        match self.send(&self.call_cancel(mode)).await {
            Answer::Canceled(canceled) => canceled,
            other => panic!("{other:?}"),
        }
    }

    pub fn call_tick(&self) -> Call {
        Call::Tick { identity: self.id.identity() }
    }

    pub async fn tick(&self) -> Ticked {
        match self.send(&self.call_tick()).await {
            Answer::Ticked(ticked) => ticked,
            other => panic!("{other:?}"),
        }
    }

    /// What time changed.
    pub async fn tick_changes(&self) -> Vec<String> {
        match self.tick().await {
            Ticked::Job { changes, .. } => changes,
            Ticked::NotFound => panic!("no record"),
        }
    }

    pub fn call_reopen(&self, attempts: u32) -> Call {
        Call::Reopen { job: self.id, request_id: self.request_id(), attempts, deadline_ms: 0 }
    }

    pub async fn reopen(&self, attempts: u32) -> Reopened {
        match self.send(&self.call_reopen(attempts)).await {
            Answer::Reopened(reopened) => reopened,
            other => panic!("{other:?}"),
        }
    }

    pub fn call_read(&self) -> Call {
        Call::Read { identity: self.id.identity() }
    }

    pub async fn read(&self) -> Read {
        self.store.read_job(self.id.identity()).await.expect("a reply")
    }

    /// The job, which must be there.
    pub async fn job(&self) -> Job {
        match self.read().await {
            Read::Found(job) => *job,
            other => panic!("{other:?}"),
        }
    }

    /// Sends any call.
    pub async fn send(&self, call: &Call) -> Answer {
        call.send(&self.store).await.unwrap_or_else(|error| panic!("{call:?}: {error}"))
    }

    /// The record as Redis has it.
    pub async fn dump(&self) -> Dump {
        let mut pipeline = redis::pipe();
        pipeline.cmd("GET").arg(self.key()).cmd("PEXPIRETIME").arg(self.key());
        let (packed, expires_at_ms) = pipeline.query_async(&mut self.connection.clone()).await.expect("a dump");
        Dump { packed, expires_at_ms }
    }

    /// Makes the record so much older, the life of its key included: what would be if that time had passed.
    pub async fn age(&self, by_ms: u64) {
        self.edit(AGE, by_ms).await;
    }

    /// Makes it older than its lease.
    pub async fn lapse(&self) {
        self.age(2 * LEASE_MS).await;
    }

    /// Changes the unpacked `record` by some Lua, with the prelude's names at hand.
    pub async fn rewrite(&self, lua: &str) {
        self.edit(lua, 0).await;
    }

    async fn edit(&self, lua: &str, by_ms: u64) {
        let mut command = redis::cmd("EVAL");
        command.arg(edit(lua)).arg(1).arg(self.key()).arg(by_ms);
        let () = command.query_async(&mut self.connection.clone()).await.expect("an edit");
    }

    fn request_id(&self) -> String {
        format!("request-{}", self.requests.fetch_add(1, Ordering::Relaxed))
    }
}

/// The script that makes a record older, for a caller with a connection of its own: a key, and by how many ms.
pub fn ageing() -> String {
    edit(AGE)
}

/// A script that changes the unpacked record of a key.
fn edit(lua: &str) -> String {
    format!(
        "local SCRIPT = 'edit'\n{PRELUDE}
        local packed = redis.call('GET', KEYS[1])
        if not packed then return end
        local record = unpack_record(packed)
        local now = clock()
        {lua}
        local expires_at = redis.call('PEXPIRETIME', KEYS[1])
        redis.call('SET', KEYS[1], pack_record(record), 'KEEPTTL')
        if expires_at > 0 then redis.call('PEXPIREAT', KEYS[1], text(expires_at - ARGV[1])) end"
    )
}
