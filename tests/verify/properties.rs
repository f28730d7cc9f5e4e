//! What must hold in every state of the world of layer 1, and what must happen in some.
//!
//! Everything is judged at the step that it happens in, from the record before and after and from what providers have done.

use onejob::attempt::{AttemptState, ResolveOutcome};
use onejob::job::{Class, JobState};
use onejob::store::Word;

use crate::support::Call;
use crate::view::View;
use crate::world::{Durability, Scene, Work, World, number_of};

macro_rules! flags {
    ($(#[$doc:meta])* $name:ident { $($flag:ident = $place:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name(u32);

        impl $name {
            $(pub const $flag: u32 = 1 << $place;)*
            /// Each by its name.
            pub const ALL: &[(&str, u32)] = &[$(($text, 1 << $place),)*];

            pub fn has(self, flag: u32) -> bool {
                self.0 & flag != 0
            }

            fn set(&mut self, flag: u32, holds: bool) {
                if holds {
                    self.0 |= flag;
                }
            }
        }
    };
}

flags! {
    /// What was broken so far. Nothing ever.
    Broken {
        WINNER = 0 "at most one result wins, and a job that succeeded has one",
        RESULT = 1 "a result never changes",
        FINAL = 2 "an ending is final, but for a failed job's reopening",
        UNKNOWN = 3 "nothing begins while an attempt is starting or unknown",
        ENDED = 4 "nothing begins after an end or a cancel",
        EXCLUSIVE = 5 "an exclusive job has one attempt that may have been executed, beside those that somebody abandoned",
        TIMEOUT = 6 "what may have been sent is never failed or aborted by time, nor by a timeout",
        DERIVED = 7 "a job's state follows from its attempts",
        LIFE = 8 "an open job has no time to live, an ended one has",
        REPLACED = 9 "only a failed job whose route releases keys is replaced, and none with an abandoned attempt",
        VERSION = 10 "every ending and every reopening adds one to the version, and nothing else does",
        EXECUTED = 11 "an exclusive intent is executed at most once, and once more for each risk that somebody took",
        TOLD_WRONG = 12 "what a provider did is never told as not done",
        TAKEN_BACK = 13 "a result that somebody was told stays",
        INCARNATION = 14 "a call for another incarnation changes nothing",
        CLOCK = 15 "a record's times never run backwards",
        ERROR = 16 "no script ends with an error",
    }
}

flags! {
    /// What happened in a step.
    Seen {
        LATE = 0 "a late success wins",
        FALLBACK = 1 "a fallback wins",
        CANCEL_LOSES = 2 "a cancel loses",
        CANCEL_WINS = 3 "a cancel wins",
        FENCED = 4 "a write-ahead is fenced",
        DISCARDED = 5 "a success comes too late and is discarded",
        REPEATED = 6 "a call is answered as repeated",
        BELIEVED = 7 "somebody's word is believed, after the quarantine",
        PROVED = 8 "an unknown attempt turns out to have failed",
        NOBODY_KNOWS = 9 "a job ends as indeterminate",
        TWICE = 10 "the risk that somebody took comes true",
        LOST = 11 "a failover at memory loses what was acknowledged",
    }
}

const MAY_HAVE_RUN: [AttemptState; 3] = [AttemptState::Running, AttemptState::Unknown, AttemptState::Succeeded];

impl Broken {
    /// Judges what a call did to the record.
    pub fn look_at(&mut self, before: Option<&View>, after: Option<&View>, call: &Call, answer: &str) {
        self.set(Self::ERROR, answer.starts_with("error"));
        let Some(after) = after else {
            self.set(Self::FINAL, before.is_some());
            return;
        };
        let succeeded = after.count(&[AttemptState::Succeeded]);
        let won = usize::from(after.completed_by > 0);
        self.set(Self::WINNER, succeeded != won || (after.state == JobState::Succeeded) != (won == 1));
        let abandoned = |number: usize| after.requests.contains(&format!("resolve_attempt {number} Abandoned"));
        let ran =
            (1..).zip(&after.attempts).filter(|(number, attempt)| MAY_HAVE_RUN.contains(&attempt.state) && !abandoned(*number));
        let may_have_run = ran.count();
        self.set(Self::EXCLUSIVE, after.class == Class::Exclusive && may_have_run > 1);
        self.set(Self::DERIVED, after.state != after.derived());
        self.set(Self::LIFE, after.expires_ms.is_some() != (after.ended_ms > 0));
        let Some(before) = before else { return };
        self.set(Self::CLOCK, after.updated_ms < before.updated_ms);
        if let Some(named) = named(call) {
            self.set(Self::INCARNATION, named != before.id && before != after);
        }
        if before.id != after.id {
            let abandoned = before.count(&[AttemptState::Abandoned]) > 0;
            self.set(Self::REPLACED, before.state != JobState::Failed || abandoned || !matches!(call, Call::Submit(_)));
            return;
        }
        let reopened = before.state == JobState::Failed && matches!(call, Call::Reopen { .. });
        let was_ended = before.ended_ms > 0;
        self.set(Self::FINAL, was_ended && !reopened && (after.state, after.ended_ms) != (before.state, before.ended_ms));
        let stripped = after.input.is_empty();
        let same = after.completed_by == before.completed_by && (after.result == before.result || stripped);
        self.set(Self::RESULT, before.completed_by > 0 && !same);
        let grows = u64::from((!was_ended && after.ended_ms > 0) || (was_ended && after.ended_ms == 0));
        self.set(Self::VERSION, after.version != before.version + grows);
        if after.attempts.len() > before.attempts.len() {
            self.set(Self::UNKNOWN, before.count(&[AttemptState::Unknown, AttemptState::Starting]) > 0);
            self.set(Self::ENDED, was_ended || before.canceled);
        }
        for (was, is) in before.attempts.iter().zip(&after.attempts) {
            let by_time = matches!(call, Call::Tick { .. });
            let by_timeout = matches!(call, Call::Finish { outcome: onejob::attempt::FinishOutcome::Unknown, .. });
            let touched = was.state == AttemptState::Running && is.state != was.state;
            self.set(Self::TIMEOUT, touched && (by_time || by_timeout) && is.state != AttemptState::Unknown);
        }
    }
}

/// The incarnation that a call names.
fn named(call: &Call) -> Option<onejob::job::JobId> {
    match call {
        Call::Submit(_) | Call::Tick { .. } | Call::Read { .. } => None,
        Call::Begin { job, .. }
        | Call::Mark { job, .. }
        | Call::Extend { job, .. }
        | Call::Finish { job, .. }
        | Call::Resolve { job, .. }
        | Call::Note { job, .. }
        | Call::Cancel { job, .. }
        | Call::Postpone { job, .. }
        | Call::Reopen { job, .. } => Some(*job),
    }
}

impl Seen {
    /// Sees what a call did.
    pub fn look_at(&mut self, before: Option<&View>, after: Option<&View>, call: &Call, answer: &str) {
        let marks = matches!(call, Call::Mark { .. });
        self.set(Self::FENCED, marks && answer.starts_with("fenced"));
        self.set(Self::REPEATED, answer.starts_with("repeated"));
        let (Some(before), Some(after)) = (before, after) else { return };
        if before.state != after.state && before.id == after.id {
            let won = after.state == JobState::Succeeded;
            let winner = usize::try_from(after.completed_by).ok().and_then(|number| before.attempts.get(number.wrapping_sub(1)));
            let finishes = matches!(call, Call::Finish { .. });
            self.set(Self::LATE, won && finishes && winner.is_some_and(|winner| winner.state == AttemptState::Unknown));
            self.set(Self::FALLBACK, won && after.completed_by > 1);
            self.set(Self::CANCEL_LOSES, won && before.canceled);
            self.set(Self::CANCEL_WINS, after.state == JobState::Canceled);
            self.set(Self::NOBODY_KNOWS, after.state == JobState::Indeterminate);
        }
        let discarded = |view: &View| view.count(&[AttemptState::Discarded]);
        self.set(Self::DISCARDED, discarded(after) > discarded(before));
        let proved = matches!(call, Call::Resolve { outcome: ResolveOutcome::Failed, .. });
        self.set(Self::PROVED, proved && before != after);
        let believed = matches!(call, Call::Resolve { outcome: ResolveOutcome::Failed, word: Word::Operator, .. });
        self.set(Self::BELIEVED, believed && before != after);
    }
}

impl World {
    /// Compares what providers did with what is promised and told.
    pub fn look_at_the_work(&mut self, scene: Scene) {
        let done = self.work.iter().filter(|work| **work == Work::Done).count();
        let most = match scene.class {
            Class::Exclusive => 1 + usize::from(self.accepted),
            Class::Race => self.work.len(),
        };
        self.seen.set(Seen::TWICE, done > 1 && done <= most && scene.class == Class::Exclusive);
        let mut lies = done > most;
        let mut wrong = false;
        if let Some(view) = &self.redis.view {
            for attempt in &view.attempts {
                let told = match attempt.state {
                    AttemptState::Running
                    | AttemptState::Unknown
                    | AttemptState::Succeeded
                    | AttemptState::Discarded
                    | AttemptState::Abandoned => true,
                    AttemptState::Starting | AttemptState::Failed | AttemptState::Aborted | AttemptState::Canceled => false,
                };
                wrong |= !told && self.work[number_of(attempt.token)] == Work::Done;
            }
            wrong |= view.state == JobState::Failed && done > 0;
        }
        let taken_back = self.told > 0 && self.redis.view.as_ref().is_some_and(|view| view.completed_by != self.told);
        if self.forgiven {
            self.seen.set(Seen::LOST, lies || wrong);
            (lies, wrong) = (false, false);
        }
        self.broken.set(Broken::EXECUTED, lies);
        self.broken.set(Broken::TOLD_WRONG, wrong);
        self.broken.set(Broken::TAKEN_BACK, taken_back && scene.durability != Durability::Memory);
    }
}
