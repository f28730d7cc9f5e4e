//! A ledger beside the specification: what workers would have sent, derived from what they were told.
//!
//! A worker that is told that its attempt is running calls its provider. Of an exclusive intent one such call stands at most: before
//! the next one, somebody must have said of it that nothing happened, or have taken the risk.

use onejob::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::JobId;
use onejob::store::{Begun, Marked, Submitted};

use super::check::{Event, Outcome};
use super::history::{Came, Made};
use super::told::Act;
use crate::support::{Answer, Call, First, KEY_LIFE_MS};

/// What a ledger says.
#[derive(Debug, Default)]
pub struct Ledger {
    pub executions: usize,
    pub wrong: Vec<String>,
}

/// An attempt that was called its provider for.
#[derive(Clone, Copy, Debug)]
struct Execution {
    job: JobId,
    number: u32,
    token: AttemptToken,
    /// When its worker was told first.
    at: u64,
}

pub fn ledger(made: &[Made], events: &[Event]) -> Ledger {
    let mut executions: Vec<Execution> = Vec::new();
    for one in made {
        if let Some(execution) = execution(one)
            && !executions.iter().any(|known| known.token == execution.token)
        {
            executions.push(execution);
        }
    }
    executions.sort_by_key(|execution| execution.at);
    // A key that is over is a new intent.
    let aged: u64 = events.iter().map(|event| if let Act::Age(by_ms) = event.act { by_ms } else { 0 }).sum();
    let mut wrong = Vec::new();
    for (place, next) in executions.iter().enumerate() {
        for before in executions[..place].iter().filter(|before| before.job == next.job || aged < KEY_LIFE_MS) {
            let cleared = |event: &Event| event.called < next.at && clears(event, before);
            // Each may have been told long after it was so: either may be the earlier one.
            let later = |event: &Event| event.called < before.at && clears(event, next);
            if !events.iter().any(|event| cleared(event) || later(event)) {
                wrong.push(format!("executed twice: {before:?} stands, and {next:?}"));
            }
        }
    }
    Ledger { executions: executions.len(), wrong }
}

/// Whether a worker would have called its provider now.
fn execution(made: &Made) -> Option<Execution> {
    let Came::Told { answer, .. } = &made.came else { return None };
    let at = made.at;
    match (&made.call, &**answer) {
        (Call::Submit(submission), Answer::Submitted(Submitted::Created { id, attempt: Some(AttemptState::Running), .. })) => {
            Some(Execution { job: *id, number: 1, token: submission.token, at })
        }
        (Call::Begin { job, token, first: First::Running, .. }, Answer::Begun(Begun::Started { number, .. }))
        | (Call::Begin { job, token, .. }, Answer::Begun(Begun::Repeated { number, state: AttemptState::Running }))
        | (Call::Mark { job, number, token }, Answer::Marked(Marked::Running { .. } | Marked::Repeated { .. })) => {
            Some(Execution { job: *job, number: *number, token: *token, at })
        }
        _ => None,
    }
}

/// Whether somebody may have said by this that the attempt did not happen, or that its risk is taken.
fn clears(event: &Event, of: &Execution) -> bool {
    let refused = |words: &str| ["discarded", "not_", "quarantine"].iter().any(|no| words.starts_with(no));
    if let Outcome::Told { words, .. } = &event.outcome
        && refused(words)
    {
        return false;
    }
    match &event.act {
        Act::Call(Call::Finish { token, outcome, .. }) => {
            *token == of.token && matches!(outcome, FinishOutcome::Failed | FinishOutcome::Aborted)
        }
        Act::Call(Call::Resolve { job, number, outcome, .. }) => {
            (*job, *number) == (of.job, of.number) && *outcome != ResolveOutcome::Succeeded
        }
        Act::Call(_) | Act::Age(_) => false,
    }
}

mod tests {
    use onejob::store::{Follow, Read};

    use super::*;
    use crate::support::Submission;

    fn token(number: u32) -> AttemptToken {
        AttemptToken::from_bytes([u8::try_from(number).unwrap(); 16])
    }

    fn started(job: JobId, number: u32, at: u64) -> Made {
        let call = Call::Begin { job, token: token(number), holder: None, first: First::Running };
        let answer = Box::new(Answer::Begun(Begun::Started { number, lease_until_ms: 0 }));
        Made { worker: 0, call, called: at - 1, at, came: Came::Told { words: String::new(), answer } }
    }

    fn finished(job: JobId, outcome: FinishOutcome, called: u64, words: &str) -> Event {
        let (body, follow) = (String::new(), Follow::End);
        let act = Act::Call(Call::Finish { job, number: 1, token: token(1), outcome, body, follow });
        Event { who: String::new(), act, called, outcome: Outcome::Told { at: called + 1, words: words.to_owned() } }
    }

    #[test]
    fn an_execution_stands_until_somebody_says_that_it_did_not_happen() {
        let job = Submission::new("by hand").id();
        let made = [started(job, 1, 1), started(job, 2, 9)];
        let wrong = |event: Event| ledger(&made, &[event]).wrong.len();
        assert_eq!(wrong(finished(job, FinishOutcome::Failed, 5, "recorded pending")), 0);
        assert_eq!(wrong(finished(job, FinishOutcome::Unknown, 5, "recorded unknown")), 1, "a timeout is no proof");
        assert_eq!(wrong(finished(job, FinishOutcome::Failed, 5, "discarded unknown 0")), 1, "nobody believed it");
        assert_eq!(wrong(finished(job, FinishOutcome::Failed, 10, "recorded pending")), 1, "it came too late");
        assert_eq!(ledger(&made, &[]).executions, 2);
        assert_eq!(ledger(&made[..1], &[]).wrong.len(), 0);
    }

    #[test]
    fn who_is_told_that_nothing_runs_executes_nothing() {
        let job = Submission::new("by hand").id();
        let answer = Box::new(Answer::Read(Read::NotFound));
        let call = Call::Read { identity: job.identity() };
        let read = Made { worker: 0, call, called: 0, at: 1, came: Came::Told { words: String::new(), answer } };
        assert_eq!(ledger(&[read], &[]).executions, 0);
    }
}
