//! Layer 2: every sequence of calls up to a length, answered by the shipped scripts and by the specification.
//!
//! After each call both must give the same answer and the same record, field by field, its life included. A sequence that leads to a
//! state seen before is not followed twice. At every state and for every call, the laws of docs/PROTOCOL.md are tried besides:
//!
//! - a call sent again changes nothing (law 1), one that changes nothing leaves every byte (law 2);
//! - at most one write, last (law 3): with each of its commands failing in turn, the record is as it was before, to the byte, and
//!   the same call sent again afterwards does what it would have done;
//! - a clock that was set back is answered as if it stood still (law 4);
//! - a call for another incarnation finds nothing and touches nothing (law 5); a reply names its script and its call (law 6).

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher as _};

use onejob::attempt::{AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::Class;
use onejob::store::{CancelMode, Follow, Word};

use crate::calls::{arguments, echo, words};
use crate::document::leave;
use crate::host::{Host, Ran, Stored};
use crate::model::Model;
use crate::mutants;
use crate::support::{Call, DEADLINE_MS, First, LEASE_MS, Submission, TICK_MS};
use crate::view;

/// Which job is played with.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    pub class: Class,
    pub releases_on_failure: bool,
    pub has_deadline: bool,
}

/// How much was tried.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tried {
    pub states: u64,
    /// Calls answered by both.
    pub calls: u64,
    /// Sequences of calls that these stand for, of exactly the length and with repeats of whole calls.
    pub sequences: u128,
    /// Scripts that one command failed in.
    pub failed: u64,
    /// Scripts run in all.
    pub runs: u64,
}

/// One step of a sequence.
#[derive(Clone, Debug)]
pub enum Step {
    Call(Box<Call>),
    Tick,
}

/// Where a sequence has led to.
#[derive(Clone)]
struct Place {
    model: Model,
    stored: Stored,
}

const RETRY: Follow = Follow::Retry { delay_ms: 0, hold_ms: 0 };
const HELD: Follow = Follow::Retry { delay_ms: TICK_MS, hold_ms: TICK_MS };

impl Scene {
    /// The job in a few words.
    fn name(self) -> String {
        let releases = if self.releases_on_failure { ", gives its key back" } else { "" };
        format!("`{}`{releases}{}", self.class.as_str(), if self.has_deadline { ", has a deadline" } else { "" })
    }

    fn submission(self) -> Submission {
        let template = Submission::new("the key");
        let rules = onejob::job::Rules { releases_on_failure: self.releases_on_failure, ..template.rules };
        let deadline_ms = if self.has_deadline { DEADLINE_MS } else { 0 };
        Submission { class: self.class, rules, deadline_ms, lease_ms: LEASE_MS, token: token(0, 0), ..template }
    }

    /// Every sequence of `length` steps.
    ///
    /// # Errors
    /// The first disagreement, with the steps that led to it, and how much was tried before.
    pub fn explore(self, host: &Host, length: usize) -> Result<Tried, (Tried, String)> {
        let mut tried = Tried::default();
        let mut known: HashMap<u64, usize> = HashMap::new();
        let mut places = vec![Place { model: Model::new(), stored: Stored::default() }];
        let mut ways: Vec<(usize, String)> = vec![(0, String::new())];
        // Of each state that was followed, where its steps lead.
        let mut edges: Vec<Vec<u32>> = Vec::new();
        let mut layer = 0..1;
        known.insert(places[0].key(), 0);
        for _ in 0..length {
            let end = places.len();
            for from in layer.clone() {
                let mut leads = Vec::new();
                for step in self.steps(&places[from].model) {
                    let mut place = places[from].clone();
                    if let Err(what) = place.step(host, &step, &mut tried) {
                        return Err((tried, format!("{what}\n{}", way_to(&ways, from, &step))));
                    }
                    let next = places.len();
                    let to = *known.entry(place.key()).or_insert(next);
                    if to == next {
                        ways.push((from, format!("{step:?}")));
                        places.push(place);
                    }
                    leads.push(u32::try_from(to).expect("few states"));
                }
                edges.push(leads);
            }
            layer = end..places.len();
        }
        tried.states = places.len() as u64;
        tried.sequences = sequences(&edges, length);
        Ok(tried)
    }

    /// Every step worth trying in a state: of whoever has any token that ever was, of any age.
    pub fn steps(self, model: &Model) -> Vec<Step> {
        let mut calls = Vec::new();
        let template = self.submission();
        let Some(job) = &model.job else {
            for first in [First::Pending, First::Starting, First::Running] {
                calls.push(Call::Submit(Submission { first, ..template.clone() }));
            }
            return steps(calls);
        };
        let id = job.id;
        let incarnation = u8::try_from(id.time_ms() - template.time_ms).unwrap_or(u8::MAX);
        let mine = |number: u32| token(incarnation, u8::try_from(number).expect("few attempts"));
        // Somebody's token that no attempt has and nobody holds: it is fresh, or the other one is.
        let stranger = [token(incarnation, 100), token(incarnation, 101)].into_iter().find(|other| Some(*other) != job.holder);
        let stranger = stranger.expect("one of two");
        let next = job.attempts.len() as u32 + 1;

        let again = Submission { token: token(incarnation + 1, 1), first: First::Running, ..template.clone() };
        calls.push(Call::Submit(again.clone()));
        calls.push(Call::Submit(Submission { first: First::Pending, token: stranger, ..template }));
        calls.push(Call::Submit(Submission { request: "print page 2".to_owned(), ..again }));
        for first in [First::Starting, First::Running] {
            calls.push(Call::Begin { job: id, token: mine(next), holder: None, first });
        }
        if job.holder.is_some() {
            calls.push(Call::Begin { job: id, token: mine(next), holder: job.holder, first: First::Starting });
            calls.push(Call::Postpone { job: id, token: stranger, holder: job.holder, delay_ms: TICK_MS });
        }
        calls.push(Call::Postpone { job: id, token: stranger, holder: None, delay_ms: TICK_MS });
        for (number, attempt) in (1..).zip(&job.attempts) {
            let token = attempt.token;
            calls.push(Call::Mark { job: id, number, token });
            calls.push(Call::Extend { job: id, number, token, sequence: attempt.sequence + 1, lease_ms: LEASE_MS });
            calls.push(Call::Note { job: id, number, token, remote_id: "print-1".to_owned(), event: None });
            let body = format!("result {number}");
            let finish = |outcome, follow| Call::Finish { job: id, number, token, outcome, body: body.clone(), follow };
            calls.push(finish(FinishOutcome::Succeeded, Follow::End));
            calls.push(finish(FinishOutcome::Unknown, RETRY));
            calls.extend([RETRY, HELD, Follow::End].map(|follow| finish(FinishOutcome::Failed, follow)));
            calls.extend([RETRY, HELD].map(|follow| finish(FinishOutcome::Aborted, follow)));
            let request_id = format!("decision-{}", attempt.version);
            let resolve = |outcome, word, follow| {
                let (request_id, body) = (request_id.clone(), body.clone());
                Call::Resolve { job: id, number, request_id, outcome, word, body, follow }
            };
            for outcome in [ResolveOutcome::Failed, ResolveOutcome::Canceled] {
                calls.push(resolve(outcome, Word::Operator, RETRY));
                calls.push(resolve(outcome, Word::Provider, RETRY));
            }
            calls.push(resolve(ResolveOutcome::Succeeded, Word::Operator, Follow::End));
            calls.push(resolve(ResolveOutcome::Abandoned, Word::Operator, RETRY));
            calls.push(resolve(ResolveOutcome::Abandoned, Word::Operator, Follow::End));
        }
        calls.push(Call::Mark { job: id, number: 1, token: stranger });
        calls.push(Call::Extend { job: id, number: 1, token: stranger, sequence: 9, lease_ms: LEASE_MS });
        let (outcome, body) = (FinishOutcome::Succeeded, "forged".to_owned());
        calls.push(Call::Finish { job: id, number: 1, token: stranger, outcome, body, follow: Follow::End });
        for mode in [CancelMode::Graceful, CancelMode::Force] {
            calls.push(Call::Cancel { job: id, request_id: format!("cancel-{mode:?}"), mode });
        }
        let identity = id.identity();
        calls.push(Call::Tick { identity });
        let request_id = format!("reopen-{}", job.version);
        calls.push(Call::Reopen { job: id, request_id, attempts: 1, deadline_ms: 0 });
        calls.push(Call::Read { identity });
        steps(calls)
    }
}

fn steps(calls: Vec<Call>) -> Vec<Step> {
    calls.into_iter().map(|call| Step::Call(Box::new(call))).chain([Step::Tick]).collect()
}

/// A token by where it comes from, so that one state has one set of tokens.
fn token(incarnation: u8, number: u8) -> AttemptToken {
    let mut bytes = [0x5a; 16];
    (bytes[0], bytes[1]) = (incarnation, number);
    AttemptToken::from_bytes(bytes)
}

impl Place {
    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        if let Some(view) = view::of_model(&self.model) {
            view.hash_as_seen(self.model.now_ms, &mut hasher);
        }
        hasher.finish()
    }

    fn step(&mut self, host: &Host, step: &Step, tried: &mut Tried) -> Result<(), String> {
        match step {
            Step::Tick => {
                self.model.age(TICK_MS);
                self.stored.expire(self.model.now_ms);
            }
            Step::Call(call) => {
                tried.calls += 1;
                self.fail_in_turn(host, call, tried)?;
                let before = self.clone();
                self.answer(host, call, tried)?;
                before.with_the_clock_back(host, call, self, tried)?;
                before.for_another_incarnation(host, call, tried)?;
                let after = self.stored.clone();
                self.answer(host, call, tried).map_err(|what| format!("sent again: {what}"))?;
                if self.stored != after {
                    return Err("sent again, the call changes the record again".to_owned());
                }
            }
        }
        self.compare()
    }

    /// Both answer, alike.
    fn answer(&mut self, host: &Host, call: &Call, tried: &mut Tried) -> Result<(), String> {
        let revision = |model: &Model| model.job.as_ref().map(|job| (job.id, job.revision));
        let before = (revision(&self.model), self.stored.clone());
        let now_ms = self.model.now_ms;
        let reply = self.run(host, call, now_ms, 0, tried).map_err(|error| format!("the script ends with {error}"))?;
        if reply.get(1).is_none_or(|script| script != call.script().as_bytes()) || reply.get(2) != Some(&echo(call)) {
            return Err("the reply does not say what it answers".to_owned());
        }
        let (told, expected) = (words(call, &reply), self.model.answer(call));
        if told != expected {
            return Err(format!("the script answers {told:?}, the specification {expected:?}"));
        }
        if revision(&self.model) == before.0 && self.stored != before.1 {
            return Err("the script changes what it must not".to_owned());
        }
        self.compare()
    }

    fn compare(&self) -> Result<(), String> {
        let view = self.stored.packed.as_ref().map(|packed| view::of_record(packed, self.stored.expires_ms)).transpose()?;
        let expected = view::of_model(&self.model);
        if view != expected {
            return Err(format!("the record is\n{view:#?}\nthe specification has\n{expected:#?}"));
        }
        match view {
            Some(view) if view.state != view.derived() => Err("the stored state is not the derived one".to_owned()),
            _ => Ok(()),
        }
    }

    fn run(&mut self, host: &Host, call: &Call, now_ms: u64, fails: usize, tried: &mut Tried) -> Ran {
        tried.runs += 1;
        let ran = host.run(call.script(), &arguments(call), &mut self.stored, now_ms, fails);
        let (_, writes) = host.commands();
        if writes > 1 { Err(format!("{writes} writes")) } else { ran }
    }

    /// Each command of a script fails once: nothing is half written, and the call can be made again.
    fn fail_in_turn(&self, host: &Host, call: &Call, tried: &mut Tried) -> Result<(), String> {
        let now_ms = self.model.now_ms;
        let mut whole = self.clone();
        let reply = whole.run(host, call, now_ms, 0, tried).map_err(|error| format!("the script ends with {error}"))?;
        let (commands, _) = host.commands();
        for fails in 1..=commands {
            tried.failed += 1;
            let mut place = self.clone();
            let ran = place.run(host, call, now_ms, fails, tried);
            if ran.is_ok() {
                return Err(format!("its command {fails} fails, and it answers all the same"));
            }
            if place.stored != self.stored {
                return Err(format!("its command {fails} fails, and the record has changed"));
            }
            let again = place.run(host, call, now_ms, 0, tried);
            if again.as_ref() != Ok(&reply) || place.stored != whole.stored {
                return Err(format!("after its command {fails} failed, the same call does something else"));
            }
        }
        Ok(())
    }

    /// A job's clock stands still while Redis' runs behind it.
    fn with_the_clock_back(&self, host: &Host, call: &Call, after: &Place, tried: &mut Tried) -> Result<(), String> {
        let Some(job) = &self.model.job else { return Ok(()) };
        let (id, updated_ms) = (job.id, job.updated_ms);
        if after.model.job.as_ref().map(|job| job.id) != Some(id) {
            return Ok(());
        }
        let (mut behind, mut still) = (self.clone(), self.clone());
        let back = behind.run(host, call, updated_ms - 3, 0, tried);
        let stood = still.run(host, call, updated_ms, 0, tried);
        // When the key is over is Redis' own clock's to say.
        let ends = |stored: &Stored| (stored.packed.clone(), stored.expires_ms.is_some());
        if back != stood || ends(&behind.stored) != ends(&still.stored) {
            return Err(format!("with the clock set back it answers {back:?}, not {stood:?}, or writes another record"));
        }
        Ok(())
    }

    fn for_another_incarnation(&self, host: &Host, call: &Call, tried: &mut Tried) -> Result<(), String> {
        let Some(call) = call.for_another_incarnation() else { return Ok(()) };
        let mut place = self.clone();
        let (now_ms, reply) = (self.model.now_ms, "not_found");
        let ran = place.run(host, &call, now_ms, 0, tried).map_err(|error| format!("the script ends with {error}"))?;
        if words(&call, &ran) != reply || place.stored != self.stored {
            return Err(format!("for another incarnation it answers {:?}", words(&call, &ran)));
        }
        Ok(())
    }
}

/// The steps to a state, one a line, and the last one.
fn way_to(ways: &[(usize, String)], mut place: usize, last: &Step) -> String {
    let mut lines = vec![format!("{last:?}")];
    while place != 0 {
        lines.push(ways[place].1.clone());
        place = ways[place].0;
    }
    lines.reverse();
    lines.join("\n")
}

/// How many sequences of that length there are.
fn sequences(edges: &[Vec<u32>], length: usize) -> u128 {
    let mut counts: HashMap<u32, u128> = HashMap::from([(0, 1)]);
    for _ in 0..length {
        let mut next: HashMap<u32, u128> = HashMap::new();
        for (place, count) in counts {
            for to in edges.get(place as usize).into_iter().flatten() {
                *next.entry(*to).or_default() += count;
            }
        }
        counts = next;
    }
    counts.values().sum()
}

/// How long the sequences of the short form are.
pub const SHORT: usize = 4;
/// And those of the long one.
pub const LONG: usize = 6;

/// The jobs that sequences are played with, of one class.
fn scenes(class: Class) -> [Scene; 2] {
    [(false, true), (true, false)].map(|(releases_on_failure, has_deadline)| Scene { class, releases_on_failure, has_deadline })
}

fn explore_short(class: Class) {
    let host = mutants::host(None);
    for scene in scenes(class) {
        let tried = scene.explore(&host, SHORT).unwrap_or_else(|(_, what)| panic!("{scene:?}: {what}"));
        println!("{scene:?}, {SHORT} steps: {tried:?}");
        assert!(tried.sequences > 50_000, "{tried:?}");
    }
}

#[test]
fn every_short_sequence_on_an_exclusive_job_is_answered_as_specified() {
    explore_short(Class::Exclusive);
}

#[test]
fn every_short_sequence_on_a_race_is_answered_as_specified() {
    explore_short(Class::Race);
}

#[test]
#[ignore = "minutes: make verify"]
fn the_long_form() {
    let host = mutants::host(None);
    let mut table =
        "| job | steps | states | calls compared | sequences | runs of a script | of them with a command that fails |\n\
                     |---|---:|---:|---:|---:|---:|---:|\n"
            .to_owned();
    for scene in [Class::Exclusive, Class::Race].into_iter().flat_map(scenes) {
        let Tried { states, calls, sequences, failed, runs } =
            scene.explore(&host, LONG).unwrap_or_else(|(_, what)| panic!("{scene:?}: {what}"));
        table.push_str(&format!("| {} | {LONG} | {states} | {calls} | {sequences} | {runs} | {failed} |\n", scene.name()));
    }
    leave("sequences", &table);
}
