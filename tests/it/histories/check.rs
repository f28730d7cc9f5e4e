//! Whether a history is linearizable: whether its operations have an order, as real time allows it, in which the specification gives
//! every answer that was given.
//!
//! The search of Wing and Gong with the memory of Lowe: depth first, and no configuration (what is placed, and what the
//! specification then says) is entered twice. An operation that was answered has its place between its call and its answer. One whose
//! outcome nobody knows may take effect at any moment after its call, or never; where it would change nothing, it is not tried.

use std::collections::HashSet;
use std::fmt::{self, Write as _};
use std::hash::{DefaultHasher, Hash, Hasher as _};

use super::told::Act;
use crate::model::Model;

/// More configurations than any history needs; beyond, the search has gone astray.
const CONFIGURATIONS_MAX: usize = 4_000_000;
/// What one word of the mask has room for.
const EVENTS_MAX: usize = 128;

/// One operation, seen from outside.
#[derive(Clone, Debug)]
pub struct Event {
    /// Who made it.
    pub who: String,
    pub act: Act,
    /// Its call, on a clock that only counts.
    pub called: u64,
    pub outcome: Outcome,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was answered, then.
    Told { at: u64, words: String },
    /// Nobody knows: it takes effect at any later moment, or never.
    Unknown,
}

/// What a search found.
#[derive(Debug)]
pub struct Found {
    pub configurations: usize,
    /// The longest prefix, as places of events; of a linearizable history, an order of all that must have one.
    pub prefix: Vec<usize>,
    pub verdict: Verdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Linearizable,
    Not,
    /// Too many configurations to say.
    Astray,
}

struct Search<'a> {
    events: &'a [Event],
    entered: HashSet<(u128, u64)>,
    order: Vec<usize>,
    longest: Vec<usize>,
    longest_told: usize,
}

/// Looks for an order of a job's history, from no record at all.
pub fn linearize(events: &[Event]) -> Found {
    assert!(events.len() <= EVENTS_MAX, "{} operations in one history", events.len());
    let mut search = Search { events, entered: HashSet::new(), order: vec![], longest: vec![], longest_told: 0 };
    let verdict = search.go(0, &Model::new(), 0);
    let prefix = if verdict == Verdict::Linearizable { search.order } else { search.longest };
    Found { configurations: search.entered.len(), prefix, verdict }
}

impl Search<'_> {
    /// Whether the rest can be placed, once those of the mask are.
    fn go(&mut self, placed: u128, model: &Model, told: usize) -> Verdict {
        if told > self.longest_told || self.longest.is_empty() {
            (self.longest_told, self.longest) = (told, self.order.clone());
        }
        let events = self.events;
        let free = |place: &usize| placed & (1 << *place) == 0;
        let mut first_answer = u64::MAX;
        for place in (0..events.len()).filter(free) {
            if let Outcome::Told { at, .. } = events[place].outcome {
                first_answer = first_answer.min(at);
            }
        }
        if first_answer == u64::MAX {
            return Verdict::Linearizable;
        }
        if !self.entered.insert((placed, print_of(model))) {
            return Verdict::Not;
        }
        if self.entered.len() > CONFIGURATIONS_MAX {
            return Verdict::Astray;
        }
        // What was answered comes first: mostly that is all.
        let may_be_next = |place: &usize| free(place) && events[*place].called < first_answer;
        let answered = |place: &usize| matches!(events[*place].outcome, Outcome::Told { .. });
        let (sure, unsure): (Vec<usize>, Vec<usize>) = (0..events.len()).filter(may_be_next).partition(answered);
        for place in sure.into_iter().chain(unsure) {
            let mut after = model.clone();
            let words = events[place].act.by(&mut after);
            let (fits, more) = match &events[place].outcome {
                Outcome::Told { words: told, .. } => (words == *told, 1),
                Outcome::Unknown => (print_of(&after) != print_of(model), 0),
            };
            if fits {
                self.order.push(place);
                match self.go(placed | 1 << place, &after, told + more) {
                    Verdict::Not => {}
                    found @ (Verdict::Linearizable | Verdict::Astray) => return found,
                }
                self.order.pop();
            }
        }
        Verdict::Not
    }
}

/// All of the specification's state, in a number.
fn print_of(model: &Model) -> u64 {
    let mut hasher = DefaultHasher::new();
    model.now_ms.hash(&mut hasher);
    if let Some(job) = &model.job {
        (job.id, job.version, job.revision, job.ended, job.completed_by, job.canceled).hash(&mut hasher);
        [job.updated_ms, job.ended_ms, job.deadline_ms, job.next_at_ms, job.holder_lease_ms].hash(&mut hasher);
        (job.holder, job.attempts_max, &job.reason, &job.result, job.stripped, &job.requests).hash(&mut hasher);
        (&job.submission.request, job.submission.token, job.submission.class.as_str()).hash(&mut hasher);
        for attempt in &job.attempts {
            (attempt.state, attempt.token, attempt.version, attempt.sequence).hash(&mut hasher);
            (attempt.started_ms, attempt.lease_ms, attempt.ended_ms).hash(&mut hasher);
            (&attempt.reason, &attempt.remote_id).hash(&mut hasher);
        }
    }
    hasher.finish()
}

impl Found {
    /// The history and how far it could be explained, for people.
    pub fn explain(&self, events: &[Event]) -> String {
        let mut text = "the history, by when each operation was called\n".to_owned();
        let mut by_call: Vec<usize> = (0..events.len()).collect();
        by_call.sort_by_key(|place| events[*place].called);
        for place in by_call {
            let mark = if self.prefix.contains(&place) { ' ' } else { '*' };
            let _ = writeln!(text, " {mark}{place:>3} {}", events[place]);
        }
        let _ = writeln!(text, "{:?}, {} configurations; the longest prefix:", self.verdict, self.configurations);
        let mut model = Model::new();
        for place in &self.prefix {
            let words = events[*place].act.by(&mut model);
            let _ = writeln!(text, "  {place:>3} {} → {words}", events[*place].name());
        }
        let _ = writeln!(text, "from there, of what may be next:");
        for (place, event) in events.iter().enumerate().filter(|(place, _)| !self.prefix.contains(place)) {
            if matches!(event.outcome, Outcome::Told { .. }) {
                let _ = writeln!(text, "  {place:>3} {} would be {}", event.name(), event.act.by(&mut model.clone()));
            }
        }
        text
    }
}

impl Event {
    fn name(&self) -> String {
        match &self.act {
            Act::Age(by_ms) => format!("{} age by {by_ms}", self.who),
            Act::Call(call) => format!("{} {}", self.who, super::frames::name(call)),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Outcome::Told { at, words } => write!(f, "[{}, {at}] {} → {words}", self.called, self.name()),
            Outcome::Unknown => write!(f, "[{}, …] {} → unknown", self.called, self.name()),
        }
    }
}
