//! One round: workers on many jobs at once, a clock that ages the records, and a fault; then a history a job.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use onejob::error::StoreError;
use onejob::job::{Class, JobState, Rules};
use onejob::store::{Read, Store};
use tokio::task::JoinSet;

use super::check::{Event, Outcome, Verdict, linearize};
use super::history::{Assembled, Came, Made, assemble};
use super::house::House;
use super::kinds::Kind;
use super::told::{Act, told};
use super::wire::{Clock, Log, Making, Planted};
use super::worker::Worker;
use super::{executions, keyspace};
use crate::cluster::slot_of;
use crate::fleet::dice::Dice;
use crate::random::STEP_MS;
use crate::support::{Answer, Call, Submission, until};

/// Workers of a round; each job has three of them, or all.
const WORKERS: usize = 4;
/// More really passes in no round: the specification's clock stands still meanwhile.
const ROUND: Duration = Duration::from_secs(17);

/// What was seen of a round, or of all rounds of a kind.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    pub histories: usize,
    pub operations: usize,
    pub answered: usize,
    pub unknown: usize,
    pub longest: usize,
    pub configurations: usize,
    /// Pairs of calls of one job that were under way at the same time.
    pub meetings: usize,
    /// Histories that ended in a success.
    pub succeeded: usize,
    /// Attempts that a worker was told to be running.
    pub executions: usize,
    pub violations: Vec<String>,
}

impl Figures {
    pub fn add(&mut self, more: Figures) {
        self.histories += more.histories;
        self.operations += more.operations;
        self.answered += more.answered;
        self.unknown += more.unknown;
        self.longest = self.longest.max(more.longest);
        self.configurations = self.configurations.max(more.configurations);
        self.meetings += more.meetings;
        self.succeeded += more.succeeded;
        self.executions += more.executions;
        self.violations.extend(more.violations);
    }
}

/// Between two moments at which workers call together.
const BEAT: Duration = Duration::from_millis(120);

/// Plays one round and judges it. `None` where the machine was so busy that the clock of the specification is of no use.
pub async fn play(kind: Kind, seed: u64, jobs: usize, planted: Planted) -> Option<Figures> {
    let (told_seed, seed) = (seed, Dice::of(seed, kind.name(), 0).next());
    let house = House::start(kind).await;
    let (clock, log) = (Clock::start(), Log::default());
    let making = |place: usize, who, upstream| Making {
        who,
        upstream,
        accidents: kind.accidents(),
        dice: Dice::of(seed, "wire", place),
        clock: clock.clone(),
        log: log.clone(),
        planted: Planted::clone(&planted),
    };
    let wires = house.wires(WORKERS, making).await;
    let stores = join_all((0..WORKERS).map(|worker| house.store(kind, worker, &wires))).await;
    let submissions: Vec<Submission> = (0..jobs).map(|number| submission(kind, seed, number)).collect();
    let began = Instant::now();
    let (over, left) = (AtomicBool::new(false), AtomicUsize::new(jobs));
    let playing = join_all(submissions.iter().enumerate().map(|(number, submission)| {
        let (house, stores, clock, over, left) = (&house, &stores, &clock, &over, &left);
        async move {
            let seen = work(house, stores, clock, seed, number, submission).await;
            over.store(left.fetch_sub(1, Ordering::SeqCst) == 1, Ordering::SeqCst);
            seen
        }
    }));
    let mut dice = Dice::of(seed, "weather", 0);
    let (seen, ()) = tokio::join!(playing, house.weather(kind, &mut dice, &wires, &submissions, &over));
    for wire in &wires {
        wire.calm();
    }
    until("nothing is held up any more", async || wires.iter().all(|wire| wire.waiting() == 0)).await;
    let judge = house.judge(&wires).await;
    let mut figures = Figures::default();
    for (number, (submission, (made, mut events))) in submissions.iter().zip(seen).enumerate() {
        let call = Call::Read { identity: submission.identity() };
        let called = clock.now();
        let answer = call.send(&judge).await.expect("all is calm");
        events.push(Event {
            who: "judge".to_owned(),
            act: Act::Call(call),
            called,
            outcome: Outcome::Told { at: clock.now(), words: told(&answer) },
        });
        let Assembled { events: calls, unknown, mut wrong } =
            assemble(&made, &log.of(&format!("oj:{{{}}}", submission.identity())));
        let ages = events.iter().filter(|event| matches!(event.act, Act::Age(_)));
        let aged = ages.clone().count();
        let unknown = unknown + ages.filter(|event| event.outcome == Outcome::Unknown).count();
        events.extend(calls);
        let found = linearize(&events);
        if found.verdict != Verdict::Linearizable {
            wrong.push(format!("{:?}\n{}", found.verdict, found.explain(&events)));
        }
        let ledger = executions::ledger(&made, &events);
        if submission.class == Class::Exclusive {
            wrong.extend(ledger.wrong);
        }
        figures.add(Figures {
            histories: 1,
            operations: aged + made.len(),
            answered: made.iter().filter(|made| matches!(made.came, Came::Told { .. })).count(),
            unknown,
            longest: aged + made.len(),
            configurations: found.configurations,
            meetings: meetings(&made),
            succeeded: usize::from(ended_well(&answer, &made)),
            executions: ledger.executions,
            violations: wrong.into_iter().map(|what| format!("{} seed {told_seed}, job {number}: {what}", kind.name())).collect(),
        });
    }
    if began.elapsed() > ROUND {
        return None;
    }
    let identities = submissions.iter().map(Submission::identity).collect();
    figures.violations.extend(keyspace::judge(&house.servers(), &judge, &identities).await);
    for store in stores.iter().chain([&judge]) {
        store.close().await;
    }
    Some(figures)
}

/// What a job of a round is claimed with.
fn submission(kind: Kind, seed: u64, number: usize) -> Submission {
    let mut dice = Dice::of(seed, "job", number);
    // The slots that move are of the first third.
    let fits = |one: &Submission| kind != Kind::Slots || slot_of(&one.identity().to_string()) < 5_461;
    let mut keys = (0..).map(|turn| Submission::new(&format!("key-{seed}-{number}-{turn}")));
    let template = keys.find(fits).expect("one of them fits");
    let class = if dice.percent(80) { Class::Exclusive } else { Class::Race };
    let rules = Rules { releases_on_failure: dice.percent(45), ..template.rules };
    Submission { class, rules, ..template }
}

/// All that happens to one job.
async fn work(
    house: &House,
    stores: &[Store],
    clock: &Clock,
    seed: u64,
    number: usize,
    submission: &Submission,
) -> (Vec<Made>, Vec<Event>) {
    let mut dice = Dice::of(seed, "calls", number);
    let workers = WORKERS - usize::from(dice.percent(50));
    let working = join_all((0..workers).map(|worker| {
        let calls = 6 + dice.below(5);
        let own = Dice::of(seed, "worker", number * WORKERS + worker);
        call_by_call(&stores[worker], clock, worker, Worker::new(worker, own.clone(), submission.clone()), own, calls)
    }));
    let (made, events) = tokio::join!(working, ageing(house, clock, Dice::of(seed, "age", number), submission));
    (made.into_iter().flatten().collect(), events)
}

async fn call_by_call(store: &Store, clock: &Clock, name: usize, mut worker: Worker, mut dice: Dice, calls: usize) -> Vec<Made> {
    let (mut made, mut unheard) = (Vec::new(), JoinSet::new());
    for _ in 0..calls {
        if dice.percent(65) {
            // All workers of all jobs at one moment, so that their calls meet.
            let beat = clock.beat(BEAT);
            tokio::time::sleep_until(beat).await;
        } else {
            tokio::time::sleep(dice.between_ms(0, 300)).await;
        }
        let call = worker.next();
        let called = clock.now();
        let answer = match dice.below(100) {
            // A caller that goes away as soon as its call has left; it may still arrive.
            0..=5 => call.send(store).now_or_never(),
            // One that never hears of what its call was answered.
            6..=16 => {
                let (call, store) = (call.clone(), store.clone());
                unheard.spawn(async move { drop(call.send(&store).await) });
                None
            }
            _ => Some(call.send(store).await),
        };
        let came = match answer {
            Some(Ok(answer)) => {
                worker.learn(&answer);
                Came::Told { words: told(&answer), answer: Box::new(answer) }
            }
            Some(Err(error)) => {
                worker.left_alone();
                match error {
                    StoreError::NotExecuted { .. } => Came::Refused(error.to_string()),
                    StoreError::Ambiguous { .. } | StoreError::NotDurable { .. } => Came::Unknown,
                    StoreError::Fatal { .. } => panic!("{call:?}: {error}"),
                }
            }
            None => {
                worker.left_alone();
                Came::Unknown
            }
        };
        made.push(Made { worker: name, call, called, at: clock.now(), came });
    }
    unheard.join_all().await;
    made
}

/// The clock of one job: time passes now and then.
async fn ageing(house: &House, clock: &Clock, mut dice: Dice, submission: &Submission) -> Vec<Event> {
    let key = format!("oj:{{{}}}", submission.identity());
    let mut events = Vec::new();
    for _ in 0..2 + dice.below(3) {
        tokio::time::sleep(dice.between_ms(100, 700)).await;
        let steps = match dice.below(20) {
            0..=10 => 1,
            11..=15 => 2,
            16..=18 => 3,
            _ => [11, 21][dice.below(2)],
        };
        let called = clock.now();
        let known = house.age(&key, steps * STEP_MS).await;
        let at = clock.now();
        let outcome = if known { Outcome::Told { at, words: "aged".to_owned() } } else { Outcome::Unknown };
        events.push(Event { who: "clock".to_owned(), act: Act::Age(steps * STEP_MS), called, outcome });
    }
    events
}

/// How many pairs of calls were under way at the same time.
fn meetings(made: &[Made]) -> usize {
    let pairs = made.iter().enumerate().flat_map(|(place, one)| made[..place].iter().map(move |other| (one, other)));
    pairs.filter(|(one, other)| one.called < other.at && other.called < one.at).count()
}

/// Whether the job has succeeded at the end, or somebody was told that it had.
fn ended_well(last: &Answer, made: &[Made]) -> bool {
    let is_success = |answer: &Answer| matches!(answer, Answer::Read(Read::Found(job)) if job.state == JobState::Succeeded);
    let won = |made: &Made| matches!(&made.came, Came::Told { words, .. } if words.starts_with("won "));
    is_success(last) || made.iter().any(won)
}
