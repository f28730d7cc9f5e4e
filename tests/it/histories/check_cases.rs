//! Histories made by hand: what the check must let pass, and what it must not.

use onejob::attempt::{AttemptToken, FinishOutcome};
use onejob::job::{Class, JobId};
use onejob::store::Follow;

use super::check::{Event, Outcome, Verdict, linearize};
use super::told::Act;
use crate::model::Model;
use crate::support::{Call, First, RACE_AFTER_MS, Submission};

/// A history that grows; the clock is one's own.
#[derive(Default)]
struct History(Vec<Event>);

impl History {
    /// An operation that was answered.
    fn told(mut self, from: u64, to: u64, act: &Act, words: &str) -> Self {
        let outcome = Outcome::Told { at: to, words: words.to_owned() };
        self.0.push(Event { who: "somebody".to_owned(), act: act.clone(), called: from, outcome });
        self
    }

    /// One of which nobody knows.
    fn unknown(mut self, from: u64, act: &Act) -> Self {
        self.0.push(Event { who: "somebody".to_owned(), act: act.clone(), called: from, outcome: Outcome::Unknown });
        self
    }

    fn is(&self, verdict: Verdict) {
        let found = linearize(&self.0);
        assert_eq!(found.verdict, verdict, "{}", found.explain(&self.0));
    }
}

/// What the specification says at last, having done all that one after the other.
fn after(acts: &[&Act], last: &Act) -> String {
    let mut model = Model::new();
    for act in acts {
        act.by(&mut model);
    }
    last.by(&mut model)
}

fn token(number: u8) -> AttemptToken {
    AttemptToken::from_bytes([number; 16])
}

fn claim(class: Class, first: First) -> (Act, JobId) {
    let submission = Submission { class, first, token: token(1), ..Submission::new("by hand") };
    let id = submission.id();
    (Act::Call(Call::Submit(submission)), id)
}

fn begin(job: JobId, number: u8, holder: Option<u8>) -> Act {
    Act::Call(Call::Begin { job, token: token(number), holder: holder.map(token), first: First::Running })
}

fn finish(job: JobId, number: u8, body: &str) -> Act {
    let (outcome, follow) = (FinishOutcome::Succeeded, Follow::End);
    Act::Call(Call::Finish { job, number: number.into(), token: token(number), outcome, body: body.to_owned(), follow })
}

fn note(job: JobId, remote_id: &str) -> Act {
    let remote_id = remote_id.to_owned();
    Act::Call(Call::Note { job, number: 1, token: token(1), remote_id, event: None })
}

fn read(job: JobId) -> Act {
    Act::Call(Call::Read { identity: job.identity() })
}

#[test]
fn operations_at_the_same_time_may_have_been_in_either_order() {
    let (submit, job) = claim(Class::Exclusive, First::Running);
    let (one, read) = (finish(job, 1, "one"), read(job));
    for seen in [after(&[&submit], &read), after(&[&submit, &one], &read)] {
        History::default()
            .told(0, 1, &submit, "created running")
            .told(2, 9, &one, "won 1")
            .told(3, 4, &read, &seen)
            .is(Verdict::Linearizable);
    }
}

#[test]
fn what_was_answered_is_not_forgotten() {
    let (submit, job) = claim(Class::Exclusive, First::Running);
    let (noted, read) = (note(job, "print-1"), read(job));
    let history = |seen: &str| {
        History::default()
            .told(0, 1, &submit, "created running")
            .told(2, 3, &noted, "noted running running")
            .told(4, 5, &read, seen)
    };
    history(&after(&[&submit, &noted], &read)).is(Verdict::Linearizable);
    history(&after(&[&submit], &read)).is(Verdict::Not);
}

#[test]
fn two_attempts_do_not_both_win() {
    let (submit, job) = claim(Class::Race, First::Running);
    let (time, second) = (Act::Age(RACE_AFTER_MS), begin(job, 2, None));
    let history = |told: &str| {
        History::default()
            .told(0, 1, &submit, "created running")
            .told(2, 3, &time, "aged")
            .told(4, 5, &second, "started 2")
            .told(6, 9, &finish(job, 1, "one"), "won 1")
            .told(7, 8, &finish(job, 2, "two"), told)
    };
    history("discarded discarded 1").is(Verdict::Linearizable);
    history("won 1").is(Verdict::Not);
}

#[test]
fn two_attempts_are_not_both_the_first() {
    let (submit, job) = claim(Class::Exclusive, First::Pending);
    let history = |told: &str| {
        History::default().told(0, 1, &submit, "created pending").told(2, 9, &begin(job, 1, Some(1)), "started 1").told(
            3,
            8,
            &begin(job, 2, Some(1)),
            told,
        )
    };
    history("blocked running 1").is(Verdict::Linearizable);
    history("started 1").is(Verdict::Not);
}

#[test]
fn a_result_does_not_change() {
    let (submit, job) = claim(Class::Exclusive, First::Running);
    let (one, other, read) = (finish(job, 1, "one"), finish(job, 1, "other"), read(job));
    let [seen_one, seen_other] = [&one, &other].map(|finish| after(&[&submit, finish], &read));
    let history = |last: &str| {
        History::default()
            .told(0, 1, &submit, "created running")
            .unknown(2, &one)
            .unknown(3, &other)
            .told(4, 5, &read, &seen_one)
            .told(6, 7, &read, last)
    };
    history(&seen_one).is(Verdict::Linearizable);
    history(&seen_other).is(Verdict::Not);
}

#[test]
fn an_answer_from_before_is_not_the_answer_now() {
    let (submit, job) = claim(Class::Exclusive, First::Pending);
    let again = begin(job, 1, Some(1));
    let history = |told: &str| {
        History::default().told(0, 1, &submit, "created pending").told(2, 3, &again, "started 1").told(4, 5, &again, told)
    };
    history("repeated 1 running").is(Verdict::Linearizable);
    history("started 1").is(Verdict::Not);
}

#[test]
fn an_unknown_outcome_takes_effect_at_any_later_moment_or_never() {
    let (submit, job) = claim(Class::Exclusive, First::Running);
    let (one, read) = (finish(job, 1, "one"), read(job));
    let [open, won] = [after(&[&submit], &read), after(&[&submit, &one], &read)];
    let claimed = || History::default().told(0, 1, &submit, "created running");
    for seen in [[&open, &open], [&open, &won], [&won, &won]] {
        claimed().unknown(2, &one).told(3, 4, &read, seen[0]).told(5, 6, &read, seen[1]).is(Verdict::Linearizable);
    }
    claimed().unknown(2, &one).told(3, 4, &read, &won).told(5, 6, &read, &open).is(Verdict::Not);
    // Not before it was called.
    claimed().told(2, 3, &read, &won).unknown(4, &one).is(Verdict::Not);
}

#[test]
fn an_unknown_outcome_takes_effect_once() {
    let (submit, job) = claim(Class::Exclusive, First::Running);
    let (time, read) = (Act::Age(100_000), read(job));
    let [once, twice] = [after(&[&submit, &time], &read), after(&[&submit, &time, &time], &read)];
    let history =
        |seen: &str| History::default().told(0, 1, &submit, "created running").unknown(2, &time).told(3, 4, &read, seen);
    history(&once).is(Verdict::Linearizable);
    history(&twice).is(Verdict::Not);
}

#[test]
fn what_was_answered_before_another_call_comes_before_it() {
    let (submit, job) = claim(Class::Exclusive, First::Running);
    let (one, noted) = (finish(job, 1, "one"), note(job, "print-1"));
    let history = |called: u64| {
        History::default().told(0, 1, &submit, "created running").told(2, 3, &one, "won 1").told(
            called,
            9,
            &noted,
            "noted running running",
        )
    };
    history(2).is(Verdict::Linearizable);
    history(4).is(Verdict::Not);
}

#[test]
fn an_explanation_has_the_history_and_the_longest_prefix() {
    let (submit, job) = claim(Class::Exclusive, First::Running);
    let history = History::default().told(0, 1, &submit, "created running").told(2, 3, &finish(job, 1, "one"), "won 7");
    let found = linearize(&history.0);
    assert_eq!((found.verdict, &found.prefix[..]), (Verdict::Not, &[0][..]));
    let text = found.explain(&history.0);
    assert!(text.contains("→ won 7") && text.contains("would be won 1"), "{text}");
}
