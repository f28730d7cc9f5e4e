//! Any order of checks, claims, commits, releases and repetitions, by several callers, against a map.
//!
//! The map knows what docs/DEDUP.md promises and no more. Each call was executed at some moment between its begin and its end: where
//! it is not known whether a lease or a window was over at that moment, either verdict is right, and the map goes on from it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use onejob::dedup::{BatchToken, Claimed, Committed, Dedup, DedupError, Stream, Verdict};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;

use super::{ids, processes, stream};
use crate::support::Redis;

/// Different users.
const USERS: u64 = 8;
/// Different tokens: what callers call their batches.
const TOKENS: usize = 6;
/// Redis counts whole milliseconds, and wakes up a little late.
const GRAIN: Duration = Duration::from_millis(5);

#[derive(Clone, Debug)]
enum Step {
    Check(usize, Vec<u64>),
    Claim(usize, Vec<u64>),
    Commit(usize, Vec<u64>),
    Release(usize, Vec<u64>),
    /// What a claim before was told to be its own.
    CommitOf(usize),
    ReleaseOf(usize),
    /// A call before, once more.
    Again(usize),
    /// Until every lease is over.
    Lapse,
    /// Until every window is over.
    Forget,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Purpose {
    Check,
    Claim,
    Commit,
    Release,
}

/// What all verdicts come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    /// First, or committed.
    Yes,
    /// A duplicate, or lost.
    No,
    Held,
}

/// When something was executed: not before, and not after.
#[derive(Clone, Copy, Debug)]
struct Moment(Instant, Instant);

impl Moment {
    /// Whether what was done then, for so long, is so now.
    fn stands(self, at_least: Duration, at_most: Duration, now: Moment) -> &'static [bool] {
        if now.1 + GRAIN < self.0 + at_least {
            &[true]
        } else if now.0 > self.1 + at_most + GRAIN {
            &[false]
        } else {
            &[true, false]
        }
    }
}

#[derive(Clone, Debug)]
struct Call {
    purpose: Purpose,
    token: usize,
    users: Vec<u64>,
    told: BTreeMap<u64, Word>,
}

/// What is promised of a stream, as far as it is known.
struct Map {
    stream: Stream,
    remembered: BTreeMap<u64, Moment>,
    claims: BTreeMap<u64, (usize, Moment)>,
    kept: BTreeMap<(Purpose, usize), (BTreeMap<u64, Word>, Moment)>,
    released: [bool; TOKENS],
    calls: Vec<Call>,
}

impl Map {
    fn is_remembered(&self, user: u64, now: Moment) -> &'static [bool] {
        let Some(at) = self.remembered.get(&user) else { return &[false] };
        // A slice longer at most, and a window has one at least.
        at.stands(self.stream.window, 2 * self.stream.window, now)
    }

    fn is_held_by_another(&self, user: u64, token: usize, now: Moment) -> &'static [bool] {
        match self.claims.get(&user) {
            Some((by, at)) if *by != token => at.stands(self.stream.lease, self.stream.lease, now),
            Some(_) | None => &[false],
        }
    }

    /// What may be told of a user by a call that is new.
    fn may_be_told(&self, purpose: Purpose, token: usize, user: u64, now: Moment) -> Vec<Word> {
        let mut words = Vec::new();
        for remembered in self.is_remembered(user, now) {
            for held in self.is_held_by_another(user, token, now) {
                words.push(match (purpose, remembered, held) {
                    (_, true, _) | (Purpose::Commit, _, true) => Word::No,
                    (Purpose::Claim, false, true) => Word::Held,
                    (Purpose::Check | Purpose::Release, false, _) | (Purpose::Claim | Purpose::Commit, false, false) => Word::Yes,
                });
            }
        }
        words
    }

    /// Whether what a call was told is kept still: of a claim for its lease, else for a time that no test lasts.
    fn is_kept(&self, purpose: Purpose, at: Moment, now: Moment) -> &'static [bool] {
        match purpose {
            Purpose::Claim => at.stands(self.stream.lease, self.stream.lease, now),
            Purpose::Check | Purpose::Commit | Purpose::Release => at.stands(self.stream.keep, 2 * self.stream.keep, now),
        }
    }

    /// A call that the map has nothing to say about: its token is over, or whether it conflicts depends on the shards of its ids.
    fn is_left_out(&self, purpose: Purpose, token: usize, users: &[u64]) -> bool {
        let other = self.kept.get(&(purpose, token)).is_some_and(|(told, _)| !told.keys().eq(&sorted(users)));
        (purpose == Purpose::Claim && self.released[token]) || (other && self.stream.shards > 1)
    }

    /// Takes in what a call was told, or says why that is wrong.
    fn learn(
        &mut self,
        purpose: Purpose,
        token: usize,
        told: Option<&BTreeMap<u64, Word>>,
        users: &[u64],
        now: Moment,
    ) -> Result<(), String> {
        let kept = self.kept.get(&(purpose, token)).cloned();
        let stands = kept.as_ref().map_or(&[false][..], |(_, at)| self.is_kept(purpose, *at, now));
        let same = kept.as_ref().is_none_or(|(before, _)| before.keys().eq(&sorted(users)));
        let Some(told) = told else {
            return if same || !stands.contains(&true) { Err("a conflict of nothing".to_owned()) } else { Ok(()) };
        };
        if !same && stands == [true] {
            return Err("it conflicts, and is answered".to_owned());
        }
        if !told.keys().eq(&sorted(users)) {
            return Err(format!("not of the ids that were asked about: {told:?}"));
        }
        for (user, word) in told {
            let mut allowed = Vec::new();
            if let Some((before, _)) = &kept
                && stands.contains(&true)
            {
                allowed.extend(before.get(user));
            }
            if stands.contains(&false) {
                allowed.extend(self.may_be_told(purpose, token, *user, now));
            }
            if !allowed.contains(word) {
                return Err(format!("user {user} is told {word:?}, and not one of {allowed:?}"));
            }
        }
        if stands == [true] {
            return Ok(());
        }
        // Told anew, or that is not known: what is not known of the moment is added to it.
        for (user, word) in told {
            match (purpose, word) {
                (Purpose::Check | Purpose::Commit, Word::Yes) => {
                    self.remembered.insert(*user, now);
                    if purpose == Purpose::Commit && self.claims.get(user).is_some_and(|(by, _)| *by == token) {
                        self.claims.remove(user);
                    }
                }
                (Purpose::Claim, Word::Yes) => {
                    let before = self.claims.get(user).filter(|(by, _)| *by == token && stands.contains(&true));
                    let from = before.map_or(now.0, |(_, at)| at.0);
                    self.claims.insert(*user, (token, Moment(from, now.1)));
                    if stands == [false] {
                        self.remembered.remove(user);
                    }
                }
                _ => {}
            }
        }
        let from = kept.filter(|_| stands.contains(&true)).map_or(now.0, |(_, at)| at.0);
        self.kept.insert((purpose, token), (told.clone(), Moment(from, now.1)));
        Ok(())
    }

    fn release(&mut self, token: usize, users: &[u64]) {
        self.released[token] = true;
        for user in users {
            if self.claims.get(user).is_some_and(|(by, _)| *by == token) {
                self.claims.remove(user);
            }
        }
    }
}

fn sorted(users: &[u64]) -> Vec<u64> {
    let mut users = users.to_vec();
    users.sort_unstable();
    users.dedup();
    users
}

fn token(number: usize) -> BatchToken {
    BatchToken::named(&number.to_string())
}

/// Of each user what the first place says, and whether the later ones say what follows from it.
fn by_user<V: Copy + PartialEq + std::fmt::Debug>(
    users: &[u64],
    told: Vec<V>,
    word: impl Fn(V) -> Word,
    repeated: impl Fn(V) -> V,
) -> Result<BTreeMap<u64, Word>, String> {
    let mut firsts = BTreeMap::new();
    for (user, verdict) in users.iter().zip(told) {
        match firsts.get(user) {
            None => {
                firsts.insert(*user, verdict);
            }
            Some(first) if verdict == repeated(*first) => {}
            Some(first) => return Err(format!("user {user} is told {first:?} and then {verdict:?}")),
        }
    }
    Ok(firsts.into_iter().map(|(user, verdict)| (user, word(verdict))).collect())
}

/// What is told, by user. `None` for a conflict.
async fn make(dedup: &Dedup, purpose: Purpose, number: usize, users: &[u64]) -> Result<Option<BTreeMap<u64, Word>>, String> {
    fn answered<V>(told: Result<Vec<V>, DedupError<V>>) -> Result<Option<Vec<V>>, String> {
        match told {
            Ok(told) => Ok(Some(told)),
            Err(DedupError::Conflict) => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }
    let batch = ids(dedup.stream(), users.iter().copied());
    let token = token(number);
    match purpose {
        Purpose::Check => {
            let word = |verdict| if verdict == Verdict::First { Word::Yes } else { Word::No };
            let told = answered(dedup.check(&batch, token).await)?;
            told.map(|told| by_user(users, told, word, |_| Verdict::Duplicate)).transpose()
        }
        Purpose::Claim => {
            let word = |verdict| match verdict {
                Claimed::First => Word::Yes,
                Claimed::Duplicate => Word::No,
                Claimed::Held => Word::Held,
            };
            let repeated = |first| if first == Claimed::Held { Claimed::Held } else { Claimed::Duplicate };
            let told = answered(dedup.claim(&batch, token).await)?;
            told.map(|told| by_user(users, told, word, repeated)).transpose()
        }
        Purpose::Commit => {
            let word = |verdict| if verdict == Committed::Committed { Word::Yes } else { Word::No };
            let told = answered(dedup.commit(&batch, token).await)?;
            told.map(|told| by_user(users, told, word, |first| first)).transpose()
        }
        Purpose::Release => {
            dedup.release(&batch, token).await.map_err(|error| error.to_string())?;
            Ok(Some(BTreeMap::new()))
        }
    }
}

/// Makes the calls one after another, in one process and the other by turns; the words of the first that is answered otherwise than
/// the map says, with those before.
async fn play(processes: &[Dedup; 2], steps: &[Step]) -> Result<usize, String> {
    let stream = processes[0].stream().clone();
    let (lease, window) = (stream.lease, stream.window);
    let (remembered, claims, kept) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut map = Map { stream, remembered, claims, kept, released: [false; TOKENS], calls: Vec::new() };
    for step in steps {
        let mine =
            |call: &Call| call.told.iter().filter(|(_, word)| **word == Word::Yes).map(|(user, _)| *user).collect::<Vec<u64>>();
        let of_claim = |number: usize| {
            let claims: Vec<&Call> = map.calls.iter().filter(|call| call.purpose == Purpose::Claim).collect();
            (!claims.is_empty()).then(|| claims[number % claims.len()]).map(|call| (call.token, mine(call)))
        };
        let (purpose, token, users) = match step {
            Step::Check(token, users) => (Purpose::Check, *token, users.clone()),
            Step::Claim(token, users) => (Purpose::Claim, *token, users.clone()),
            Step::Commit(token, users) => (Purpose::Commit, *token, users.clone()),
            Step::Release(token, users) => (Purpose::Release, *token, users.clone()),
            Step::CommitOf(number) | Step::ReleaseOf(number) => {
                let Some((token, users)) = of_claim(*number) else { continue };
                (if matches!(step, Step::CommitOf(_)) { Purpose::Commit } else { Purpose::Release }, token, users)
            }
            Step::Again(number) if !map.calls.is_empty() => {
                let call = &map.calls[number % map.calls.len()];
                (call.purpose, call.token, call.users.clone())
            }
            Step::Again(_) => continue,
            Step::Lapse | Step::Forget => {
                // Time itself is what is asked about.
                tokio::time::sleep(if matches!(step, Step::Lapse) { lease } else { 2 * window } + 4 * GRAIN).await;
                continue;
            }
        };
        // Of no ids nothing is asked.
        if users.is_empty() || map.is_left_out(purpose, token, &users) {
            continue;
        }
        let began = Instant::now();
        let told = make(&processes[map.calls.len() % 2], purpose, token, &users).await;
        let now = Moment(began, Instant::now());
        let learned = match &told {
            Err(problem) => Err(problem.clone()),
            Ok(_) if purpose == Purpose::Release => {
                map.release(token, &users);
                Ok(())
            }
            Ok(told) => map.learn(purpose, token, told.as_ref(), &users, now),
        };
        learned.map_err(|problem| format!("{purpose:?} by {token} of {users:?}: {problem}; after {:?}", map.calls))?;
        map.calls.push(Call { purpose, token, users, told: told.unwrap().unwrap_or_default() });
    }
    Ok(map.calls.len())
}

fn steps(timed: bool) -> impl Strategy<Value = Vec<Step>> {
    let users = || prop::collection::vec(0..USERS, 1..7);
    let call = prop_oneof![
        2 => (0..TOKENS, users()).prop_map(|(token, users)| Step::Check(token, users)),
        5 => (0..TOKENS, users()).prop_map(|(token, users)| Step::Claim(token, users)),
        2 => (0..TOKENS, users()).prop_map(|(token, users)| Step::Commit(token, users)),
        1 => (0..TOKENS, users()).prop_map(|(token, users)| Step::Release(token, users)),
        4 => any::<usize>().prop_map(Step::CommitOf),
        1 => any::<usize>().prop_map(Step::ReleaseOf),
        4 => any::<usize>().prop_map(Step::Again),
    ];
    let calls = move || prop::collection::vec(call.clone(), 3..12);
    let pause = prop_oneof![4 => Just(Step::Lapse), 1 => Just(Step::Forget)];
    let pauses = if timed { 1..4 } else { 0..1 };
    (calls(), prop::collection::vec((pause, calls()), pauses)).prop_map(|(mut all, then)| {
        for (pause, calls) in then {
            all.push(pause);
            all.extend(calls);
        }
        all
    })
}

#[test]
fn any_order_of_calls_by_several_callers_is_answered_as_a_map_does() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let redis = runtime.block_on(Redis::start());
    let store = runtime.block_on(redis.store());
    let mut runner = TestRunner::new(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() });
    let cases = std::cell::Cell::new(0);
    let played = runner.run(&(any::<bool>(), steps(false), steps(false), 0..2_u16), |(mirrored, mut before, after, shards)| {
        cases.set(cases.get() + 1);
        before.extend(after);
        let stream = stream(mirrored, &format!("clicks-{}", cases.get()), 1 + 2 * shards);
        runtime.block_on(play(&processes(&store, &stream), &before)).map(drop).map_err(TestCaseError::fail)
    });
    played.unwrap();
}

/// The same over seconds: leases that lapse and windows that pass, of many streams at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_order_of_calls_over_leases_and_windows_is_answered_as_a_map_does() {
    const CASES: usize = 120;
    let redis = Redis::start().await;
    let store = redis.store().await;
    let mut runner = TestRunner::default();
    let cases: Vec<Vec<Step>> = (0..CASES).map(|_| steps(true).new_tree(&mut runner).unwrap().current()).collect();
    let play = |(number, steps): (usize, &Vec<Step>)| {
        let (window, lease) = (Duration::from_secs(4), Duration::from_secs(1));
        let stream = Stream { window, lease, ..stream(number % 4 < 2, &format!("clicks-{number}"), 1 + 2 * (number % 2) as u16) };
        let processes = processes(&store, &stream);
        let steps = steps.clone();
        async move { play(&processes, &steps).await }
    };
    let calls = join_all(cases.iter().enumerate().map(play)).await;
    let calls: usize = calls.into_iter().map(|played| played.unwrap_or_else(|problem| panic!("{problem}"))).sum();
    assert!(calls > CASES * 6, "{calls} calls were made");
}
