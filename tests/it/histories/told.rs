//! What an operation tells: answers, and records as they were read, in words that the specification has too.

use onejob::job::{Job, JobId, JobState};
use onejob::store::{Read, Submitted};

use crate::model::{self, Model};
use crate::random::{local_ms, on_grid, row, text, words};
use crate::support::{Answer, Call};

/// Where "now" stands in a portrait: all its times are counted from there.
const NOW_MS: u64 = 1_000_000_000;

/// One operation of a history.
#[derive(Clone, Debug)]
pub enum Act {
    Call(Call),
    /// Time passes: the record is made older by so much.
    Age(u64),
}

impl Act {
    /// What the specification answers, having done it.
    pub fn by(&self, model: &mut Model) -> String {
        match self {
            Act::Age(by_ms) => {
                model.age(*by_ms);
                "aged".to_owned()
            }
            Act::Call(call) => {
                let words = model.answer(call);
                match words.as_str() {
                    "found" | "existing" => format!("{words} {:?}", Portrait::of_model(model)),
                    _ => words,
                }
            }
        }
    }
}

/// What a worker was told; the record as it stands in an answer is told in full.
pub fn told(answer: &Answer) -> String {
    let words = words(answer);
    match answer {
        Answer::Read(Read::Found(job)) | Answer::Submitted(Submitted::Existing(job)) => {
            format!("{words} {:?}", Some(Portrait::of_record(job, local_ms())))
        }
        _ => words,
    }
}

/// All of a record that the specification has, times counted from now and on the grid.
#[derive(Debug, PartialEq, Eq)]
pub struct Portrait {
    id: JobId,
    state: JobState,
    version: u64,
    revision: u64,
    completed_by: u32,
    canceled: bool,
    reason: String,
    input: String,
    result: String,
    attempts_max: usize,
    /// When it was changed last, ended, its deadline, when the next attempt may begin, until when somebody holds it.
    times_ms: [u64; 5],
    /// The tokens are told beside, since an attempt keeps its own to itself.
    attempts: Vec<(model::Attempt, String)>,
}

impl Portrait {
    pub fn of_record(job: &Job, now_ms: u64) -> Portrait {
        let time = |ms: u64| on_grid(ms, now_ms, NOW_MS);
        let times = [job.updated_ms, job.ended_ms, job.deadline_ms, job.next_at_ms, job.holder_lease_ms];
        Portrait {
            id: job.id,
            state: job.state,
            version: job.version,
            revision: job.revision,
            completed_by: job.completed_by,
            canceled: !job.canceled_by.is_empty(),
            reason: job.reason.clone(),
            input: text(&job.input.body),
            result: text(&job.result.body),
            attempts_max: job.rules.attempts_max as usize,
            times_ms: times.map(time),
            attempts: job.attempts.iter().map(|attempt| (row(attempt, time), attempt.token.reveal())).collect(),
        }
    }

    /// Of the specification's job, where there is one.
    pub fn of_model(model: &Model) -> Option<Portrait> {
        let job = model.job.as_ref()?;
        let time = |ms: u64| if ms == 0 { 0 } else { ms + NOW_MS - model.now_ms };
        let times = [job.updated_ms, job.ended_ms, job.deadline_ms, job.next_at_ms, job.holder_lease_ms];
        let seen = |attempt: &model::Attempt| model::Attempt {
            started_ms: time(attempt.started_ms),
            lease_ms: time(attempt.lease_ms),
            ended_ms: time(attempt.ended_ms),
            ..attempt.clone()
        };
        Some(Portrait {
            id: job.id,
            state: job.state(),
            version: job.version,
            revision: job.revision,
            completed_by: job.completed_by,
            canceled: job.canceled,
            reason: job.reason.clone(),
            input: job.submission.request.clone(),
            result: job.result.clone(),
            attempts_max: job.attempts_max,
            times_ms: times.map(time),
            attempts: job.attempts.iter().map(|attempt| (seen(attempt), attempt.token.reveal())).collect(),
        })
    }
}
