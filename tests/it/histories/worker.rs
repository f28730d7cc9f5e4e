//! One worker on one job: what it does next depends on what it has been told. What it believes may be long out of date.

use onejob::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::{JobId, JobState};
use onejob::store::{Begun, CancelMode, Extended, Finished, Follow, Marked, NoteReply, Read, Resolved, Submitted, Ticked, Word};

use crate::fleet::dice::Dice;
use crate::random::{GRID_MS, STEP_MS};
use crate::support::{Answer, Call, First, Submission};

/// A deadline, where there is one.
const DEADLINE_MS: u64 = 540_000;
/// What an extension adds.
const EXTENSION_MS: u64 = 160_000;

/// An attempt that is the worker's.
#[derive(Clone, Copy, Debug)]
struct Own {
    job: JobId,
    number: u32,
    token: AttemptToken,
    sequence: u64,
    running: bool,
}

pub struct Worker {
    name: usize,
    dice: Dice,
    template: Submission,
    made: u32,
    job: JobId,
    own: Option<Own>,
    /// The last attempt that was its own, whatever became of it: late words are about that.
    former: Option<Own>,
    /// An attempt of which somebody said that it is unknown.
    unknown: Option<u32>,
    ended: Option<JobState>,
    claimed: bool,
    last: Option<Call>,
    /// The last call was not answered.
    unanswered: bool,
}

impl Worker {
    pub fn new(name: usize, dice: Dice, template: Submission) -> Worker {
        let job = template.id();
        let (own, former, unknown, ended, last) = (None, None, None, None, None);
        Worker { name, dice, template, made: 0, job, own, former, unknown, ended, claimed: false, last, unanswered: false }
    }

    /// The next call.
    pub fn next(&mut self) -> Call {
        self.made += 1;
        let again = if self.unanswered { 60 } else { 7 };
        let call = match self.last.take() {
            Some(last) if self.dice.percent(again) => last,
            _ => self.choose(),
        };
        self.last = Some(call.clone());
        call
    }

    fn choose(&mut self) -> Call {
        let drawn = self.dice.below(100);
        match self.own {
            None if !self.claimed => self.submit(),
            Some(own) if !own.running => match drawn {
                0..=69 => Call::Mark { job: own.job, number: own.number, token: own.token },
                70..=77 => self.extend(own),
                78..=89 => self.finish(own, FinishOutcome::Aborted),
                _ => self.beside(),
            },
            Some(own) => match drawn {
                0..=11 => self.extend(own),
                12..=19 => Call::Mark { job: own.job, number: own.number, token: own.token },
                20..=27 => self.note(own),
                28..=50 => self.finish(own, FinishOutcome::Succeeded),
                51..=64 => self.finish(own, FinishOutcome::Failed),
                65..=84 => self.finish(own, FinishOutcome::Unknown),
                _ => self.beside(),
            },
            None => self.beside(),
        }
    }

    /// What does not need an attempt of one's own.
    fn beside(&mut self) -> Call {
        let job = self.job;
        let drawn = self.dice.below(100);
        if let Some(number) = self.unknown
            && drawn < 40
        {
            return self.resolve(number);
        }
        if let Some(own) = self.former
            && drawn >= 78
        {
            // A late word.
            let outcome = match self.dice.below(4) {
                0 | 1 => FinishOutcome::Succeeded,
                2 => FinishOutcome::Failed,
                _ => FinishOutcome::Unknown,
            };
            return self.finish(own, outcome);
        }
        match self.ended {
            Some(JobState::Failed) if drawn < 50 => {
                let deadline_ms = if self.dice.percent(30) { DEADLINE_MS } else { 0 };
                let attempts = 1 + u32::from(self.dice.percent(50));
                return Call::Reopen { job, request_id: self.word("request"), attempts, deadline_ms };
            }
            Some(_) if drawn < 40 => return self.submit(),
            _ => {}
        }
        match self.dice.below(100) {
            0..=52 => {
                let holder = self.former.or(self.own).map(|own| own.token).filter(|_| self.dice.percent(60));
                let first = if self.dice.percent(50) { First::Running } else { First::Starting };
                Call::Begin { job, token: self.token(), holder, first }
            }
            53..=68 => Call::Tick { identity: job.identity() },
            69..=82 => Call::Read { identity: job.identity() },
            83..=87 => {
                let holder = self.former.map(|own| own.token).filter(|_| self.dice.percent(60));
                let delay_ms = self.dice.below(3) as u64 * STEP_MS;
                Call::Postpone { job, token: self.token(), holder, delay_ms }
            }
            88..=93 => self.submit(),
            94..=97 => {
                let number = 1 + self.dice.below(3) as u32;
                self.resolve(number)
            }
            _ => {
                let mode = if self.dice.percent(70) { CancelMode::Graceful } else { CancelMode::Force };
                Call::Cancel { job, request_id: self.word("request"), mode }
            }
        }
    }

    /// A token that the seed determines.
    fn token(&mut self) -> AttemptToken {
        let halves = [self.dice.next(), self.dice.next()];
        let mut bytes = [0; 16];
        for (half, place) in halves.iter().zip([0, 8]) {
            bytes[place..place + 8].copy_from_slice(&half.to_be_bytes());
        }
        AttemptToken::from_bytes(bytes)
    }

    fn word(&self, what: &str) -> String {
        format!("{what}-{}-{}", self.name, self.made)
    }

    fn submit(&mut self) -> Call {
        let first = match self.dice.below(3) {
            0 => First::Pending,
            1 => First::Starting,
            _ => First::Running,
        };
        let request = if self.dice.percent(8) { "another".to_owned() } else { self.template.request.clone() };
        let deadline_ms = if self.dice.percent(25) { DEADLINE_MS } else { 0 };
        let time_ms = self.template.time_ms + u64::from(self.made) * 10 + self.name as u64;
        Call::Submit(Submission { first, request, deadline_ms, time_ms, token: self.token(), ..self.template.clone() })
    }

    fn extend(&mut self, own: Own) -> Call {
        let sequence = own.sequence + u64::from(self.dice.percent(85));
        if let Some(own) = &mut self.own {
            own.sequence = sequence;
        }
        Call::Extend { job: own.job, number: own.number, token: own.token, sequence, lease_ms: EXTENSION_MS }
    }

    fn note(&mut self, own: Own) -> Call {
        Call::Note { job: own.job, number: own.number, token: own.token, remote_id: self.word("print"), event: None }
    }

    fn finish(&mut self, own: Own, outcome: FinishOutcome) -> Call {
        let (body, follow) = (self.word("body"), self.follow());
        Call::Finish { job: own.job, number: own.number, token: own.token, outcome, body, follow }
    }

    fn resolve(&mut self, number: u32) -> Call {
        let outcome = match self.dice.below(7) {
            0 => ResolveOutcome::Succeeded,
            1..=3 => ResolveOutcome::Failed,
            4 => ResolveOutcome::Canceled,
            _ => ResolveOutcome::Abandoned,
        };
        let word = if self.dice.percent(60) { Word::Provider } else { Word::Operator };
        let (request_id, body, follow) = (self.word("request"), self.word("found"), self.follow());
        Call::Resolve { job: self.job, number, request_id, outcome, word, body, follow }
    }

    fn follow(&mut self) -> Follow {
        match self.dice.below(5) {
            0..=2 => Follow::Retry { delay_ms: 0, hold_ms: 0 },
            3 => Follow::Retry { delay_ms: GRID_MS, hold_ms: GRID_MS },
            _ => Follow::End,
        }
    }

    /// Nobody knows what became of the last call.
    pub fn left_alone(&mut self) {
        self.unanswered = true;
    }

    /// What a worker learns from an answer to its last call.
    pub fn learn(&mut self, answer: &Answer) {
        self.unanswered = false;
        let call = self.last.clone().expect("a call was made");
        match answer {
            Answer::Submitted(submitted) => {
                self.claimed = true;
                let Call::Submit(submission) = call else { return };
                match submitted {
                    Submitted::Created { id, attempt, .. } => {
                        (self.job, self.ended, self.unknown) = (*id, None, None);
                        let own = Own { job: *id, number: 1, token: submission.token, sequence: 0, running: false };
                        match attempt {
                            None => self.former = Some(own),
                            Some(state) => self.hold(own, *state),
                        }
                    }
                    Submitted::Existing(job) => self.look(job),
                    Submitted::Gone(gone) => self.ended = Some(gone.state),
                    Submitted::Conflict { .. } | Submitted::Collision => {}
                }
            }
            Answer::Begun(begun) => {
                let Call::Begin { job, token, first, .. } = call else { return };
                let own = |number: u32| Own { job, number, token, sequence: 0, running: false };
                match begun {
                    Begun::Started { number, .. } if first == First::Running => self.hold(own(*number), AttemptState::Running),
                    Begun::Started { number, .. } => self.hold(own(*number), AttemptState::Starting),
                    Begun::Repeated { number, state } => self.hold(own(*number), *state),
                    Begun::Blocked { by: AttemptState::Unknown, number } => self.unknown = Some(*number),
                    Begun::Ended { state } => self.ended = Some(*state),
                    Begun::NotFound => self.claimed = false,
                    _ => {}
                }
            }
            Answer::Marked(Marked::Running { .. } | Marked::Repeated { .. }) => {
                if let Some(own) = &mut self.own {
                    own.running = true;
                }
            }
            Answer::Marked(Marked::Fenced { .. } | Marked::NotFound)
            | Answer::Extended(Extended::Fenced { .. } | Extended::NotFound)
            | Answer::Noted(NoteReply::NotFound) => self.let_go(),
            Answer::Finished(finished) => {
                if let (Call::Finish { number, outcome: FinishOutcome::Unknown, .. }, Finished::Recorded { .. }) =
                    (&call, finished)
                {
                    self.unknown = Some(*number);
                }
                match finished {
                    Finished::Won { .. } => self.ended = Some(JobState::Succeeded),
                    Finished::Recorded { job } | Finished::Repeated { job, .. } => {
                        self.ended = Some(*job).filter(|job| job.is_ended());
                    }
                    Finished::Discarded { .. } | Finished::NotFound => {}
                }
                self.let_go();
            }
            Answer::Resolved(resolved) => match resolved {
                Resolved::Quarantine { .. } => {}
                Resolved::Won { .. } => (self.ended, self.unknown) = (Some(JobState::Succeeded), None),
                Resolved::Recorded { job } => (self.ended, self.unknown) = (Some(*job).filter(|job| job.is_ended()), None),
                _ => self.unknown = None,
            },
            Answer::Ticked(Ticked::Job { id, state, .. }) => {
                (self.job, self.ended) = (*id, Some(*state).filter(|state| state.is_ended()));
            }
            Answer::Ticked(Ticked::NotFound) | Answer::Read(Read::NotFound) => self.claimed = false,
            Answer::Read(Read::Found(job)) => self.look(job),
            Answer::Reopened(_) => self.ended = None,
            _ => {}
        }
    }

    fn look(&mut self, job: &onejob::job::Job) {
        self.job = job.id;
        self.ended = Some(job.state).filter(|state| state.is_ended());
        self.unknown = job.attempts.iter().find(|attempt| attempt.state == AttemptState::Unknown).map(|attempt| attempt.number);
    }

    fn hold(&mut self, own: Own, state: AttemptState) {
        match state {
            AttemptState::Starting => self.own = Some(own),
            AttemptState::Running => self.own = Some(Own { running: true, ..own }),
            _ => self.former = Some(own),
        }
    }

    fn let_go(&mut self) {
        self.former = self.own.take().or(self.former);
    }
}
