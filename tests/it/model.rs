//! The state machine once more, small and pure: what docs/PROTOCOL.md says, over a clock that only tests move.
//!
//! Written to disagree: it shares no line with `lua/`, keeps no state of a job but derives it, and knows nothing of packing, of
//! TTLs other than the key's life, or of Redis. Times are virtual ms; `Call` and the words of states are the tests' own. It is the
//! specification of `tests/verify` too, which explores it, and the scripts against it, on a clock of its own.

use std::sync::Arc;

use onejob::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::{Class, JobId, JobState};
use onejob::store::{CancelMode, Follow, Word};

use crate::support::{Call, First, LEASE_MS, Submission};

/// Attempts that touched no provider, beyond the route's own.
const ABORTED_MAX: usize = 8;
/// The reason of an attempt that nobody kept alive.
const LAPSED: &str = "lease_lapsed";
/// Attempts that may lapse before anything is sent, under one version.
const STARTING_LOST_MAX: usize = 3;
/// Whatever virtual time begins with: 0 means "never" in a record.
const BEGINNING_MS: u64 = 1_000_000_000;

/// One key, and what it stands for.
#[derive(Clone, Debug)]
pub struct Model {
    pub now_ms: u64,
    pub job: Option<Job>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub state: AttemptState,
    pub token: AttemptToken,
    pub version: u64,
    pub started_ms: u64,
    pub lease_ms: u64,
    pub sequence: u64,
    pub ended_ms: u64,
    pub reason: String,
    pub remote_id: String,
}

#[derive(Clone, Debug)]
pub struct Job {
    pub id: JobId,
    pub submission: Arc<Submission>,
    pub ended: Option<JobState>,
    pub version: u64,
    pub revision: u64,
    pub updated_ms: u64,
    pub ended_ms: u64,
    pub deadline_ms: u64,
    pub next_at_ms: u64,
    pub holder: Option<AttemptToken>,
    pub holder_lease_ms: u64,
    pub completed_by: u32,
    pub canceled: bool,
    pub attempts_max: usize,
    pub attempts: Vec<Attempt>,
    pub reason: String,
    pub result: String,
    /// Input and result are no longer kept.
    pub stripped: bool,
    /// The requests that were carried out: which, on which attempt (0: the job), by which id.
    pub requests: Vec<(&'static str, u32, String)>,
}

impl Job {
    fn new(submission: &Submission, id: JobId, now_ms: u64) -> Self {
        let pending = submission.first == First::Pending;
        let mut job = Job {
            id,
            submission: Arc::new(submission.clone()),
            ended: None,
            version: 0,
            revision: 1,
            updated_ms: now_ms,
            ended_ms: 0,
            deadline_ms: if submission.deadline_ms > 0 { now_ms + submission.deadline_ms } else { 0 },
            next_at_ms: 0,
            holder: pending.then_some(submission.token),
            holder_lease_ms: if pending { now_ms + submission.lease_ms } else { 0 },
            completed_by: 0,
            canceled: false,
            attempts_max: submission.rules.attempts_max as usize,
            attempts: vec![],
            reason: String::new(),
            result: String::new(),
            stripped: false,
            requests: vec![],
        };
        if !pending {
            job.start(submission.first, submission.token, now_ms, submission.lease_ms);
        }
        job
    }

    fn start(&mut self, first: First, token: AttemptToken, now_ms: u64, lease_ms: u64) {
        let state = if first == First::Starting { AttemptState::Starting } else { AttemptState::Running };
        let (version, reason) = (self.version, String::new());
        let lease_ms = now_ms + lease_ms;
        let remote_id = String::new();
        self.attempts.push(Attempt {
            state,
            token,
            version,
            started_ms: now_ms,
            lease_ms,
            sequence: 0,
            ended_ms: 0,
            reason,
            remote_id,
        });
    }

    pub fn state(&self) -> JobState {
        match self.ended {
            Some(ended) => ended,
            None if self.canceled => JobState::Canceling,
            None if self.count(&[AttemptState::Starting, AttemptState::Running]) > 0 => JobState::Running,
            None if self.count(&[AttemptState::Unknown]) > 0 => JobState::Unknown,
            None => JobState::Pending,
        }
    }

    fn count(&self, states: &[AttemptState]) -> usize {
        self.attempts.iter().filter(|attempt| states.contains(&attempt.state)).count()
    }

    fn open(&self) -> usize {
        self.attempts.iter().filter(|attempt| attempt.state.is_open()).count()
    }

    pub fn gone(&self, now_ms: u64) -> bool {
        self.ended.is_some() && now_ms >= self.ended_ms + self.submission.rules.retention_ms
    }

    fn past_deadline(&self, at_ms: u64) -> bool {
        self.deadline_ms > 0 && at_ms >= self.deadline_ms
    }

    fn lost(&self) -> usize {
        let is_lost = |attempt: &&Attempt| attempt.state == AttemptState::Aborted && attempt.reason == LAPSED;
        self.attempts.iter().filter(is_lost).filter(|attempt| attempt.version == self.version).count()
    }

    fn exhausted(&self) -> bool {
        let is_unsent = |attempt: &&Attempt| {
            attempt.state == AttemptState::Aborted || (attempt.state == AttemptState::Failed && attempt.reason == "not_sent")
        };
        let (unsent, touched): (Vec<_>, Vec<_>) = self.attempts.iter().partition(is_unsent);
        let unsent = unsent.iter().filter(|attempt| attempt.version == self.version).count();
        touched.len() >= self.attempts_max || touched.len() + unsent >= self.attempts_max + ABORTED_MAX
    }

    fn end(&mut self, state: JobState, reason: &str, now_ms: u64) {
        self.ended = Some(state);
        self.ended_ms = now_ms;
        self.version += 1;
        (self.next_at_ms, self.holder, self.holder_lease_ms) = (0, None, 0);
        self.reason = reason.to_owned();
    }

    fn close(&mut self, place: usize, state: AttemptState, reason: &str, now_ms: u64) {
        let attempt = &mut self.attempts[place];
        (attempt.state, attempt.ended_ms, attempt.lease_ms) = (state, now_ms, 0);
        attempt.reason = reason.to_owned();
    }

    /// A success: the result if it is still free for this attempt, else a row of its own.
    fn succeed(&mut self, place: usize, body: &str, now_ms: u64) -> bool {
        let wins = self.ended.is_none() && self.attempts[place].version == self.version;
        if wins {
            self.close(place, AttemptState::Succeeded, "", now_ms);
            self.completed_by = place as u32 + 1;
            self.result = body.to_owned();
            self.end(JobState::Succeeded, "", now_ms);
        } else {
            let state = self.state().to_string();
            self.close(place, AttemptState::Discarded, &state, now_ms);
        }
        wins
    }

    /// What becomes of the job once an attempt has closed without a success.
    fn settle(&mut self, follow: Follow, holder: Option<AttemptToken>, reason: &str, now_ms: u64) {
        if self.ended.is_some() {
            return;
        }
        self.reason = reason.to_owned();
        if self.open() > 0 {
            return;
        }
        let abandoned = self.count(&[AttemptState::Abandoned]) > 0;
        match follow {
            Follow::Retry { delay_ms, hold_ms }
                if !self.canceled && !self.exhausted() && !self.past_deadline(now_ms + delay_ms) =>
            {
                self.next_at_ms = now_ms + delay_ms;
                self.holder = holder;
                self.holder_lease_ms = if holder.is_some() { now_ms + delay_ms + hold_ms } else { 0 };
            }
            Follow::Retry { .. } | Follow::End => {
                let state = match (abandoned, self.canceled) {
                    (true, _) => JobState::Indeterminate,
                    (false, true) => JobState::Canceled,
                    (false, false) => JobState::Failed,
                };
                self.end(state, reason, now_ms);
            }
        }
    }

    fn changed(&mut self, now_ms: u64) {
        self.revision += 1;
        self.updated_ms = now_ms;
    }

    fn told(&self, place: usize) -> String {
        format!("repeated {} {} {}", self.attempts[place].state, self.state(), self.completed_by)
    }

    /// Whether this very request was carried out before.
    fn knows(&self, request: &(&'static str, u32, String)) -> bool {
        self.requests.contains(request)
    }
}

impl Model {
    pub fn new() -> Self {
        Model { now_ms: BEGINNING_MS, job: None }
    }

    /// Lets time pass.
    pub fn age(&mut self, by_ms: u64) {
        self.now_ms += by_ms;
        let life_over = |job: &Job| job.ended.is_some() && self.now_ms >= job.ended_ms + job.submission.rules.key_life_ms;
        if self.job.as_ref().is_some_and(life_over) {
            self.job = None;
        }
    }

    /// Answers a call: its status and the details that are no times.
    pub fn answer(&mut self, call: &Call) -> String {
        let now_ms = self.now_ms;
        if let Call::Submit(submission) = call {
            return self.submit(submission);
        }
        let Some(job) = self.job.as_mut() else { return "not_found".to_owned() };
        let same = match call {
            Call::Submit(_) | Call::Tick { .. } | Call::Read { .. } => true,
            Call::Begin { job: id, .. }
            | Call::Mark { job: id, .. }
            | Call::Extend { job: id, .. }
            | Call::Finish { job: id, .. }
            | Call::Resolve { job: id, .. }
            | Call::Note { job: id, .. }
            | Call::Cancel { job: id, .. }
            | Call::Postpone { job: id, .. }
            | Call::Reopen { job: id, .. } => *id == job.id,
        };
        if !same {
            return "not_found".to_owned();
        }
        let before = job.clone();
        let (changed, answer) = match call {
            Call::Submit(_) => unreachable!("answered above"),
            Call::Begin { token, holder, first, .. } => begin(job, *token, *holder, *first, now_ms),
            Call::Mark { number, token, .. } => mark(job, *number, *token, now_ms),
            Call::Extend { number, token, sequence, lease_ms, .. } => extend(job, *number, *token, *sequence, *lease_ms, now_ms),
            Call::Finish { number, token, outcome, body, follow, .. } => {
                finish(job, *number, *token, *outcome, body, *follow, now_ms)
            }
            Call::Resolve { number, request_id, outcome, word, body, follow, .. } => {
                resolve(job, *number, request_id, *outcome, *word, body, *follow, now_ms)
            }
            Call::Note { number, token, remote_id, .. } => note(job, *number, *token, remote_id),
            Call::Cancel { request_id, mode, .. } => cancel(job, request_id, *mode, now_ms),
            Call::Tick { .. } => tick(job, now_ms),
            Call::Reopen { request_id, attempts, deadline_ms, .. } => reopen(job, request_id, *attempts, *deadline_ms, now_ms),
            Call::Postpone { token, holder, delay_ms, .. } => postpone(job, *token, *holder, *delay_ms, now_ms),
            Call::Read { .. } if job.gone(now_ms) => (false, format!("gone {}", job.state())),
            Call::Read { .. } => (false, "found".to_owned()),
        };
        match changed {
            true => job.changed(now_ms),
            false => *job = before,
        }
        answer
    }

    fn submit(&mut self, submission: &Submission) -> String {
        let now_ms = self.now_ms;
        let created = |attempt: Option<AttemptState>| format!("created {}", attempt.map_or("pending", AttemptState::as_str));
        let mut id = submission.id();
        if let Some(job) = &self.job {
            let own = job.attempts.first().filter(|own| own.token == submission.token);
            if own.is_some() || job.holder == Some(submission.token) {
                return created(job.attempts.first().map(|own| own.state));
            }
            let released = job.ended == Some(JobState::Failed) && job.submission.rules.releases_on_failure;
            if !released {
                return match () {
                    () if job.submission.request != submission.request => "conflict".to_owned(),
                    () if job.gone(now_ms) => format!("gone {}", job.state()),
                    () => "existing".to_owned(),
                };
            }
            id = JobId::new(id.time_ms().max(job.id.time_ms() + 1), id.identity());
        }
        let job = Job::new(submission, id, now_ms);
        let attempt = job.attempts.first().map(|attempt| attempt.state);
        self.job = Some(job);
        created(attempt)
    }
}

/// Whether the record changed, and the answer.
type Outcome = (bool, String);

fn no(answer: impl Into<String>) -> Outcome {
    (false, answer.into())
}

fn yes(answer: impl Into<String>) -> Outcome {
    (true, answer.into())
}

fn place_of(job: &Job, number: u32, token: AttemptToken) -> Option<usize> {
    let place = (number as usize).checked_sub(1)?;
    (job.attempts.get(place)?.token == token).then_some(place)
}

fn begin(job: &mut Job, token: AttemptToken, holder: Option<AttemptToken>, first: First, now_ms: u64) -> Outcome {
    if let Some(place) = job.attempts.iter().position(|attempt| attempt.token == token) {
        return no(format!("repeated {} {}", place + 1, job.attempts[place].state));
    }
    if job.ended.is_some() {
        return no(format!("ended {}", job.state()));
    }
    if job.canceled {
        return no("canceling");
    }
    for state in [AttemptState::Unknown, AttemptState::Starting] {
        if let Some(place) = job.attempts.iter().position(|attempt| attempt.state == state) {
            return no(format!("blocked {state} {}", place + 1));
        }
    }
    let rules = job.submission.rules;
    let running: Vec<usize> =
        (0..job.attempts.len()).filter(|&place| job.attempts[place].state == AttemptState::Running).collect();
    let young = |place: &&usize| now_ms < job.attempts[**place].started_ms + rules.race_after_ms;
    let blocker = match job.submission.class {
        Class::Exclusive => running.first(),
        Class::Race => running.iter().find(young).or(running.get(rules.race_max as usize - 1)),
    };
    if let Some(place) = blocker {
        return no(format!("blocked running {}", place + 1));
    }
    if job.past_deadline(now_ms) {
        return no("deadline");
    }
    if job.exhausted() {
        return no(format!("exhausted {}", job.attempts.len()));
    }
    let held_until_ms = if job.holder == holder { 0 } else { job.holder_lease_ms };
    if running.is_empty() && now_ms < job.next_at_ms.max(held_until_ms) {
        return no("too_early");
    }
    job.start(first, token, now_ms, LEASE_MS);
    (job.next_at_ms, job.holder, job.holder_lease_ms) = (0, None, 0);
    job.reason.clear();
    yes(format!("started {}", job.attempts.len()))
}

fn postpone(job: &mut Job, token: AttemptToken, holder: Option<AttemptToken>, delay_ms: u64, now_ms: u64) -> Outcome {
    if job.ended.is_some() {
        return no(format!("ended {}", job.state()));
    }
    if job.canceled {
        return no("canceling");
    }
    if job.open() > 0 {
        return no("begun");
    }
    if job.holder == Some(token) {
        return no("postponed");
    }
    let holds = holder.is_some() && job.holder == holder;
    if !holds && now_ms < job.next_at_ms.max(if job.holder == holder { 0 } else { job.holder_lease_ms }) {
        return no("too_early");
    }
    let late = if job.past_deadline(now_ms + delay_ms) { "; deadline" } else { "" };
    let reason = format!("breaker: laser is not called{late}");
    job.settle(Follow::Retry { delay_ms, hold_ms: 0 }, Some(token), &reason, now_ms);
    yes(if job.ended.is_some() { format!("ended {}", job.state()) } else { "postponed".to_owned() })
}

fn mark(job: &mut Job, number: u32, token: AttemptToken, now_ms: u64) -> Outcome {
    let Some(place) = place_of(job, number, token) else { return no("fenced token") };
    if job.ended.is_some() {
        return no("fenced ended");
    }
    if job.canceled {
        return no("fenced canceling");
    }
    let alive = job.attempts[place].lease_ms > now_ms;
    match (job.attempts[place].state, alive) {
        (AttemptState::Starting, true) => {
            job.attempts[place].state = AttemptState::Running;
            yes("running")
        }
        (AttemptState::Running, true) => no("repeated"),
        (AttemptState::Starting | AttemptState::Running, false) => no("fenced lease"),
        _ => no("fenced state"),
    }
}

fn extend(job: &mut Job, number: u32, token: AttemptToken, sequence: u64, lease_ms: u64, now_ms: u64) -> Outcome {
    let Some(place) = place_of(job, number, token) else { return no("fenced token") };
    if job.ended.is_some() {
        return no("fenced ended");
    }
    let answer = if job.canceled { "extended canceling" } else { "extended" };
    let attempt = &mut job.attempts[place];
    match attempt.state {
        AttemptState::Starting if attempt.lease_ms <= now_ms => no("fenced lease"),
        AttemptState::Starting | AttemptState::Running if sequence <= attempt.sequence => no(answer),
        AttemptState::Starting | AttemptState::Running => {
            attempt.sequence = sequence;
            attempt.lease_ms = attempt.lease_ms.max(now_ms + lease_ms);
            yes(answer)
        }
        _ => no("fenced state"),
    }
}

fn finish(
    job: &mut Job,
    number: u32,
    token: AttemptToken,
    outcome: FinishOutcome,
    body: &str,
    follow: Follow,
    now_ms: u64,
) -> Outcome {
    let Some(place) = place_of(job, number, token) else { return no("not_found") };
    let was = job.attempts[place].state;
    let unsent = was == AttemptState::Failed && job.attempts[place].reason == "not_sent";
    let told_before = match outcome {
        FinishOutcome::Succeeded => matches!(was, AttemptState::Succeeded | AttemptState::Discarded),
        FinishOutcome::Failed => was == AttemptState::Failed,
        FinishOutcome::Unknown => was == AttemptState::Unknown,
        FinishOutcome::Aborted => was == AttemptState::Aborted || unsent,
    };
    if told_before {
        let reason = match outcome {
            FinishOutcome::Aborted => "no_permit",
            FinishOutcome::Unknown => "timeout",
            FinishOutcome::Succeeded | FinishOutcome::Failed => LAPSED,
        };
        let told = job.told(place);
        if job.attempts[place].reason != LAPSED || reason == LAPSED {
            return no(told);
        }
        // Its own holder knows better than that nobody kept it alive.
        job.attempts[place].reason = reason.to_owned();
        if job.ended.is_none() && job.reason == LAPSED {
            job.reason = reason.to_owned();
        }
        return yes(told);
    }
    let winner = job.completed_by;
    if outcome != FinishOutcome::Succeeded && !was.is_open() {
        return no(format!("discarded {was} {winner}"));
    }
    match outcome {
        FinishOutcome::Succeeded if job.succeed(place, body, now_ms) => yes(format!("won {}", job.version)),
        FinishOutcome::Succeeded => yes(format!("discarded discarded {winner}")),
        FinishOutcome::Unknown => {
            job.close(place, AttemptState::Unknown, "timeout", now_ms);
            if job.ended.is_none() {
                job.reason = "timeout".to_owned();
            }
            yes(format!("recorded {}", job.state()))
        }
        FinishOutcome::Failed | FinishOutcome::Aborted => {
            let reason = if outcome == FinishOutcome::Failed { "rejected" } else { "no_permit" };
            let open_before = job.ended.is_none();
            match (outcome, was) {
                (FinishOutcome::Aborted, AttemptState::Unknown) => job.close(place, AttemptState::Failed, "not_sent", now_ms),
                (FinishOutcome::Aborted, _) => job.close(place, AttemptState::Aborted, reason, now_ms),
                _ => job.close(place, AttemptState::Failed, reason, now_ms),
            }
            job.settle(follow, Some(token), reason, now_ms);
            if open_before && job.ended == Some(JobState::Failed) && outcome == FinishOutcome::Failed {
                job.result = body.to_owned();
            }
            yes(format!("recorded {}", job.state()))
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "a call has as many parts")]
fn resolve(
    job: &mut Job,
    number: u32,
    request_id: &str,
    outcome: ResolveOutcome,
    word: Word,
    body: &str,
    follow: Follow,
    now_ms: u64,
) -> Outcome {
    let Some(place) = (number as usize).checked_sub(1).filter(|place| *place < job.attempts.len()) else {
        return no("not_found");
    };
    let request = ("resolve", number, request_id.to_owned());
    if job.knows(&request) {
        return no(job.told(place));
    }
    let attempt = &job.attempts[place];
    if attempt.state != AttemptState::Unknown {
        return no(format!("not_unknown {}", attempt.state));
    }
    let nothing_happened = match outcome {
        ResolveOutcome::Failed | ResolveOutcome::Canceled => true,
        ResolveOutcome::Succeeded | ResolveOutcome::Abandoned => false,
    };
    if nothing_happened && word == Word::Operator && now_ms < attempt.ended_ms + job.submission.rules.quarantine_ms {
        return no("quarantine");
    }
    job.requests.push(request);
    let state = match outcome {
        ResolveOutcome::Succeeded if job.succeed(place, body, now_ms) => return yes(format!("won {}", job.version)),
        ResolveOutcome::Succeeded => return yes(format!("discarded {}", job.completed_by)),
        ResolveOutcome::Failed => AttemptState::Failed,
        ResolveOutcome::Canceled => AttemptState::Canceled,
        ResolveOutcome::Abandoned => AttemptState::Abandoned,
    };
    let reason = "looked at the printer";
    job.close(place, state, reason, now_ms);
    let follow = match follow {
        Follow::Retry { .. } => Follow::Retry { delay_ms: 0, hold_ms: 0 },
        Follow::End => Follow::End,
    };
    job.settle(follow, None, reason, now_ms);
    yes(format!("recorded {}", job.state()))
}

/// Names alone: events are none of the model's.
fn note(job: &mut Job, number: u32, token: AttemptToken, remote_id: &str) -> Outcome {
    let Some(place) = place_of(job, number, token) else { return no("not_found") };
    let stands = |how: &str| format!("{how} {} {}", job.attempts[place].state, job.state());
    if remote_id.is_empty() || !job.attempts[place].remote_id.is_empty() {
        return no(stands("repeated"));
    }
    let answer = stands("noted");
    job.attempts[place].remote_id = remote_id.to_owned();
    yes(answer)
}

fn cancel(job: &mut Job, request_id: &str, mode: CancelMode, now_ms: u64) -> Outcome {
    let answer = |job: &Job| match job.state() {
        JobState::Canceled => format!("canceled {}", if job.open() > 0 { "unknown" } else { "none" }),
        JobState::Canceling => format!("canceling {}", job.open()),
        other => format!("ended {other}"),
    };
    if job.ended.is_some() || (job.canceled && mode == CancelMode::Graceful) {
        return no(answer(job));
    }
    job.requests.push(("cancel", 0, request_id.to_owned()));
    job.canceled = true;
    job.reason = "changed my mind".to_owned();
    for place in 0..job.attempts.len() {
        if job.attempts[place].state == AttemptState::Starting {
            job.close(place, AttemptState::Aborted, "canceled", now_ms);
        }
    }
    match mode {
        CancelMode::Force => job.end(JobState::Canceled, "changed my mind", now_ms),
        CancelMode::Graceful => job.settle(Follow::End, None, "changed my mind", now_ms),
    }
    yes(answer(job))
}

fn tick(job: &mut Job, now_ms: u64) -> Outcome {
    let mut changes: Vec<&str> = vec![];
    for place in 0..job.attempts.len() {
        let state = match job.attempts[place].state {
            AttemptState::Starting => AttemptState::Aborted,
            AttemptState::Running => AttemptState::Unknown,
            _ => continue,
        };
        if now_ms < job.attempts[place].lease_ms {
            continue;
        }
        job.close(place, state, LAPSED, now_ms);
        if changes.last() != Some(&state.as_str()) {
            changes.push(state.as_str());
        }
        let lost = job.lost();
        if state == AttemptState::Aborted && lost >= STARTING_LOST_MAX && job.open() == 0 {
            let reason = format!("poison: {lost} attempts lost their holders before anything was sent");
            job.settle(Follow::End, None, &reason, now_ms);
            changes.push("poisoned");
        } else {
            job.settle(Follow::Retry { delay_ms: 0, hold_ms: 0 }, None, LAPSED, now_ms);
        }
    }
    if job.ended.is_none() && job.open() == 0 && job.past_deadline(now_ms) {
        job.settle(Follow::End, None, "deadline", now_ms);
        changes.push("deadline");
    }
    if job.gone(now_ms) && !job.stripped {
        job.stripped = true;
        changes.push("stripped");
    }
    let answer = format!("ticked {} {changes:?}", job.state());
    (!changes.is_empty(), answer)
}

fn reopen(job: &mut Job, request_id: &str, attempts: u32, deadline_ms: u64, now_ms: u64) -> Outcome {
    let request = ("reopen", 0, request_id.to_owned());
    if job.knows(&request) {
        return no(format!("reopened {}", job.version));
    }
    if job.ended != Some(JobState::Failed) {
        return no(format!("not_failed {}", job.state()));
    }
    if job.gone(now_ms) {
        return no("gone");
    }
    job.requests.push(request);
    job.attempts_max = job.attempts.len() - job.count(&[AttemptState::Aborted]) + attempts as usize;
    job.version += 1;
    (job.ended, job.ended_ms) = (None, 0);
    job.deadline_ms = if deadline_ms > 0 { now_ms + deadline_ms } else { 0 };
    job.reason = "paper is back".to_owned();
    job.result.clear();
    yes(format!("reopened {}", job.version))
}
