//! Layer 1: gateways, a client, an operator, providers and a network around one job, every way they can go.
//!
//! A gateway is what a gateway knows; it can die at any moment, and then it knows nothing. A call's reply can be lost, and then the
//! call is made again; a call can be held up on its way and arrive whenever it likes, its maker long gone. Time passes at any moment.
//! Providers do work when the bytes of a call leave, and this world counts it. An operator is honest: he says "it did not happen"
//! only of what has not happened so far. A failover puts an older copy in the place of the record; `Durability` says how old.
//!
//! Budgets bound how often what is rare may happen; time has none: states are told apart by what is still to come, so all of them
//! are visited. A world ends with its key's life. Not here: a call that is held up for longer than that, or a master that is
//! written to after its failover.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use onejob::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::{Class, JobId, JobState, Rules};
use onejob::store::{CancelMode, Follow, Word};

use crate::properties::{Broken, Seen};
use crate::redis::Redis;
use crate::support::{Call, DEADLINE_MS, First, LEASE_MS, Submission, TICK_MS};

/// For how many ticks a gateway can be paused between its look at the clock and the first byte; less than the quarantine.
const PAUSE_TICKS: u16 = 1;

/// What a failover may lose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// There is no failover.
    Single,
    /// Whatever the replica has not got yet; nothing is promised.
    Memory,
    /// Nothing that was acknowledged: the write-ahead of an attempt, an ending, a cancel.
    Replicated,
}

/// What a gateway does wrong, to show that somebody notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It sends although its lease is over.
    IgnoresItsLease,
    /// It sends before its write-ahead has been answered.
    SendsUnanswered,
    /// It sends with no write-ahead at all.
    SendsWhileStarting,
    /// It is paused for as long as you like before it sends.
    IsPausedForever,
    /// It calls a timeout a failure.
    TimeoutIsFailure,
    /// It acknowledges before the replica has anything.
    DoesNotWait,
    /// It takes an operator's word for the provider's.
    BelievesAtOnce,
}

/// One world.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    pub class: Class,
    pub gateways: u8,
    pub attempts_max: u32,
    pub releases_on_failure: bool,
    pub has_deadline: bool,
    pub durability: Durability,
    pub budget: Budget,
    pub fault: Option<Fault>,
}

/// How often what is rare may still happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Budget {
    pub submits: u8,
    pub begins: u8,
    /// Replies lost and calls held up.
    pub mishaps: u8,
    /// Decisions of an operator.
    pub decisions: u8,
    pub cancels: u8,
    pub reopenings: u8,
    pub heartbeats: u8,
    pub failovers: u8,
}

/// What became of a provider's work for one attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Work {
    #[default]
    NotSent,
    Done,
    /// It was refused, or stopped before it began.
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum What {
    Submit(First),
    Begin(First, Option<u8>),
    Mark,
    Extend,
    Finish(FinishOutcome, Then),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Then {
    Retry,
    End,
}

/// A call as its maker knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ask {
    what: What,
    job: JobId,
    number: u8,
    token: u8,
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fate {
    Answered,
    /// It is executed, and the reply is lost.
    Lost,
    /// It is held up.
    HeldUp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    /// It has the slot.
    Starting,
    /// Its write-ahead was acknowledged.
    Ahead,
    /// It has looked at its lease, and may be paused now.
    Armed {
        until: u16,
    },
    /// Bytes have left.
    Sent,
    /// It has told that it does not know, and listens on.
    Told,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gateway {
    phase: Phase,
    job: JobId,
    number: u8,
    token: u8,
    /// When its lease is over, by its own clock, in ticks.
    lease: u16,
    /// A token that holds the pending job.
    holds: Option<u8>,
    /// A call that it makes again until it is answered, and when it was first made.
    open: Option<(Ask, u16)>,
}

#[derive(Clone, Debug)]
pub struct World {
    pub redis: Arc<Redis>,
    replica: Arc<Redis>,
    gateways: Vec<Gateway>,
    late: Option<Ask>,
    /// By token, from 1.
    pub work: Vec<Work>,
    budget: Budget,
    ticks: u16,
    /// Attempts that an operator abandoned: risks that somebody took, by name.
    pub accepted: u8,
    /// The attempt that somebody was told has won; 0 for none.
    pub told: u64,
    /// The key's life is over, and so is this world: the next claim of the key is another intent.
    over: bool,
    /// A failover at a level that promises nothing.
    pub forgiven: bool,
    pub broken: Broken,
    /// What happened in the last step; no part of what the world is.
    pub seen: Seen,
}

impl Hash for World {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (self.redis.key, self.replica.key, self.late, &self.work, self.budget, self.accepted, self.told).hash(hasher);
        (self.over, self.forgiven, self.broken).hash(hasher);
        // One gateway is as good as another.
        let mut gateways: Vec<u64> = self.gateways.iter().map(|gateway| gateway.key(self.ticks)).collect();
        gateways.sort_unstable();
        gateways.hash(hasher);
    }
}

impl PartialEq for World {
    fn eq(&self, other: &Self) -> bool {
        let key = |world: &World| {
            let mut hasher = DefaultHasher::new();
            world.hash(&mut hasher);
            hasher.finish()
        };
        key(self) == key(other)
    }
}

/// One step of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Act {
    Tick,
    /// A sweeper looks at the job.
    Look,
    /// The replica catches up.
    Replicate,
    /// The replica is the master now.
    Failover,
    /// The call that was held up arrives.
    Arrive,
    Make(u8, What, Fate),
    MakeAgain(u8, Fate),
    Arm(u8),
    Send(u8, Work),
    /// A gateway dies, or forgets.
    Die(u8),
    Resolve(u8, Decision),
    Cancel(CancelKind),
    Reopen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CancelKind {
    Graceful,
    Force,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// The provider says that it did it.
    Done,
    /// The provider says that it refused it.
    Refused,
    /// The provider says that it stopped it.
    Stopped,
    /// Somebody looked, and it did not happen.
    NotHappened,
    /// Somebody takes the risk.
    Abandoned,
}

const RETRY: Follow = Follow::Retry { delay_ms: 0, hold_ms: 0 };

fn token(number: u8) -> AttemptToken {
    let mut bytes = [0x5a; 16];
    bytes[0] = number;
    AttemptToken::from_bytes(bytes)
}

/// The number of a token of this world.
pub fn number_of(token: AttemptToken) -> usize {
    usize::from(token.as_bytes()[0])
}

impl Scene {
    /// The world before anything has happened.
    pub fn begin(self, redis: Redis) -> World {
        let redis = Arc::new(redis);
        let job = self.submission(First::Running, 0).id();
        let idle = Gateway { phase: Phase::Idle, job, number: 0, token: 0, lease: 0, holds: None, open: None };
        World {
            replica: Arc::clone(&redis),
            redis,
            gateways: vec![idle; usize::from(self.gateways)],
            late: None,
            work: vec![Work::NotSent],
            budget: self.budget,
            ticks: 0,
            accepted: 0,
            told: 0,
            over: false,
            forgiven: false,
            broken: Broken::default(),
            seen: Seen::default(),
        }
    }

    fn submission(self, first: First, number: u8) -> Submission {
        let template = Submission::new("the key");
        let rules = Rules { releases_on_failure: self.releases_on_failure, attempts_max: self.attempts_max, ..template.rules };
        let deadline_ms = if self.has_deadline { DEADLINE_MS } else { 0 };
        let time_ms = template.time_ms + u64::from(number);
        Submission { class: self.class, rules, deadline_ms, first, time_ms, token: token(number), ..template }
    }

    fn call(self, ask: Ask) -> Call {
        let (job, number, token) = (ask.job, u32::from(ask.number), token(ask.token));
        match ask.what {
            What::Submit(first) => Call::Submit(self.submission(first, ask.token)),
            What::Begin(first, holder) => Call::Begin { job, token, holder: holder.map(crate::world::token), first },
            What::Mark => Call::Mark { job, number, token },
            What::Extend => Call::Extend { job, number, token, sequence: 1, lease_ms: LEASE_MS },
            What::Finish(outcome, then) => {
                let follow = if then == Then::End { Follow::End } else { RETRY };
                Call::Finish { job, number, token, outcome, body: format!("result {}", ask.token), follow }
            }
        }
    }

    /// What can happen next.
    pub fn acts(self, world: &World, acts: &mut Vec<Act>) {
        if world.over {
            return;
        }
        acts.push(Act::Tick);
        let budget = world.budget;
        if world.late.is_some() {
            acts.push(Act::Arrive);
        }
        if self.durability != Durability::Single && budget.failovers > 0 {
            acts.extend([Act::Replicate, Act::Failover]);
        }
        for (place, gateway) in (0..).zip(&world.gateways) {
            self.acts_of(world, place, gateway, acts);
        }
        let Some(view) = &world.redis.view else { return };
        acts.push(Act::Look);
        if budget.cancels > 0 && view.ended_ms == 0 {
            acts.extend([Act::Cancel(CancelKind::Graceful), Act::Cancel(CancelKind::Force)]);
        }
        if budget.reopenings > 0 && view.state == JobState::Failed {
            acts.push(Act::Reopen);
        }
        for (number, attempt) in (1..).zip(&view.attempts) {
            if attempt.state != AttemptState::Unknown {
                continue;
            }
            let work = world.work[number_of(attempt.token)];
            match work {
                Work::Done => acts.push(Act::Resolve(number, Decision::Done)),
                Work::Refused => {
                    acts.extend([Act::Resolve(number, Decision::Refused), Act::Resolve(number, Decision::Stopped)]);
                }
                Work::NotSent => {}
            }
            if budget.decisions > 0 {
                acts.push(Act::Resolve(number, Decision::Abandoned));
                if work != Work::Done {
                    acts.push(Act::Resolve(number, Decision::NotHappened));
                }
            }
        }
    }

    fn acts_of(self, world: &World, place: u8, gateway: &Gateway, acts: &mut Vec<Act>) {
        let budget = world.budget;
        let fates: &[Fate] = match (budget.mishaps, world.late) {
            (0, _) => &[Fate::Answered],
            (_, Some(_)) => &[Fate::Answered, Fate::Lost],
            (_, None) => &[Fate::Answered, Fate::Lost, Fate::HeldUp],
        };
        if gateway.phase != Phase::Idle || gateway.open.is_some() {
            acts.push(Act::Die(place));
        }
        if let Some((ask, _)) = gateway.open {
            acts.extend(fates.iter().map(|fate| Act::MakeAgain(place, *fate)));
            if self.fault == Some(Fault::SendsUnanswered) && ask.what == What::Mark {
                acts.push(Act::Arm(place));
            }
            return;
        }
        let mut make = |what: What| acts.extend(fates.iter().map(|fate| Act::Make(place, what, *fate)));
        match gateway.phase {
            Phase::Idle => {
                if budget.submits > 0 {
                    make(What::Submit(First::Running));
                    make(What::Submit(First::Pending));
                }
                if budget.begins > 0 && world.redis.view.as_ref().is_some_and(|view| view.ended_ms == 0) {
                    make(What::Begin(First::Starting, gateway.holds));
                    make(What::Begin(First::Running, gateway.holds));
                }
            }
            Phase::Starting | Phase::Ahead => {
                if gateway.phase == Phase::Starting {
                    make(What::Mark);
                }
                make(What::Finish(FinishOutcome::Aborted, Then::Retry));
                if budget.heartbeats > 0 {
                    make(What::Extend);
                }
                let alive = world.ticks < gateway.lease || self.fault == Some(Fault::IgnoresItsLease);
                let may = gateway.phase == Phase::Ahead || self.fault == Some(Fault::SendsWhileStarting);
                if may && alive {
                    acts.push(Act::Arm(place));
                }
            }
            Phase::Armed { until } => {
                make(What::Finish(FinishOutcome::Aborted, Then::Retry));
                if world.ticks <= until || self.fault == Some(Fault::IsPausedForever) {
                    acts.extend([Act::Send(place, Work::Done), Act::Send(place, Work::Refused)]);
                }
            }
            Phase::Sent => {
                make(What::Finish(FinishOutcome::Unknown, Then::Retry));
                match world.work[usize::from(gateway.token)] {
                    Work::Done => make(What::Finish(FinishOutcome::Succeeded, Then::End)),
                    Work::Refused | Work::NotSent => {
                        make(What::Finish(FinishOutcome::Failed, Then::Retry));
                        make(What::Finish(FinishOutcome::Failed, Then::End));
                    }
                }
                if self.fault == Some(Fault::TimeoutIsFailure) {
                    make(What::Finish(FinishOutcome::Failed, Then::Retry));
                }
            }
            Phase::Told => match world.work[usize::from(gateway.token)] {
                Work::Done => make(What::Finish(FinishOutcome::Succeeded, Then::End)),
                Work::Refused | Work::NotSent => make(What::Finish(FinishOutcome::Failed, Then::Retry)),
            },
        }
    }

    /// The world after a step; `None` where nothing has changed.
    pub fn step(self, before: &World, act: Act) -> Option<World> {
        let mut world = before.clone();
        world.seen = Seen::default();
        match act {
            Act::Tick => {
                world.ticks += 1;
                Arc::make_mut(&mut world.redis).age(TICK_MS);
                Arc::make_mut(&mut world.replica).age(TICK_MS);
                world.over |= before.redis.view.is_some() && world.redis.view.is_none();
            }
            Act::Look => {
                let identity = self.submission(First::Running, 0).identity();
                world.ask(&Call::Tick { identity });
                if Arc::ptr_eq(&world.redis, &before.redis) {
                    return None;
                }
            }
            Act::Replicate => {
                if before.replica.key == before.redis.key {
                    return None;
                }
                world.replica = Arc::clone(&world.redis);
            }
            Act::Failover => {
                world.budget.failovers -= 1;
                world.fail_over(self.durability == Durability::Memory);
            }
            Act::Arrive => {
                let ask = world.late.take().expect("a call that was held up");
                world.ask(&self.call(ask));
            }
            Act::Make(place, what, fate) => {
                let ask = world.new_ask(place, what);
                self.make(&mut world, place, ask, before.ticks, fate);
                let same = fate == Fate::Answered && world.gateways == before.gateways;
                if same && Arc::ptr_eq(&world.redis, &before.redis) && world.told == before.told {
                    return None;
                }
            }
            Act::MakeAgain(place, fate) => {
                let (ask, since) = world.gateways[usize::from(place)].open.take().expect("a call without an answer");
                self.make(&mut world, place, ask, since, fate);
            }
            Act::Arm(place) => {
                let ticks = world.ticks;
                let gateway = &mut world.gateways[usize::from(place)];
                gateway.open = None;
                gateway.phase = Phase::Armed { until: ticks + PAUSE_TICKS };
            }
            Act::Send(place, work) => {
                let gateway = &mut world.gateways[usize::from(place)];
                gateway.phase = Phase::Sent;
                world.work[usize::from(gateway.token)] = work;
            }
            Act::Die(place) => world.gateways[usize::from(place)].forget(),
            Act::Resolve(number, decision) => {
                let answer = world.ask(&self.resolve(before, number, decision));
                if Arc::ptr_eq(&world.redis, &before.redis) {
                    return None;
                }
                if matches!(decision, Decision::Abandoned | Decision::NotHappened) {
                    world.budget.decisions -= 1;
                }
                if decision == Decision::Abandoned && answer.starts_with("recorded") {
                    world.accepted += 1;
                }
            }
            Act::Cancel(kind) => {
                world.budget.cancels -= 1;
                let mode = if kind == CancelKind::Force { CancelMode::Force } else { CancelMode::Graceful };
                let job = before.redis.view.as_ref()?.id;
                world.ask(&Call::Cancel { job, request_id: format!("{kind:?}"), mode });
                self.acknowledge(&mut world);
            }
            Act::Reopen => {
                world.budget.reopenings -= 1;
                let job = before.redis.view.as_ref()?.id;
                world.ask(&Call::Reopen { job, request_id: "again".to_owned(), attempts: 1, deadline_ms: 0 });
            }
        }
        world.look_at_the_work(self);
        Some(world)
    }

    fn resolve(self, world: &World, number: u8, decision: Decision) -> Call {
        let view = world.redis.view.as_ref().expect("a job");
        let token = number_of(view.attempts[usize::from(number) - 1].token);
        let believed = self.fault == Some(Fault::BelievesAtOnce);
        let (outcome, word) = match decision {
            Decision::Done => (ResolveOutcome::Succeeded, Word::Provider),
            Decision::Refused => (ResolveOutcome::Failed, Word::Provider),
            Decision::Stopped => (ResolveOutcome::Canceled, Word::Provider),
            Decision::NotHappened => (ResolveOutcome::Failed, if believed { Word::Provider } else { Word::Operator }),
            Decision::Abandoned => (ResolveOutcome::Abandoned, Word::Operator),
        };
        let request_id = format!("{decision:?}");
        let body = format!("result {token}");
        Call::Resolve { job: view.id, number: u32::from(number), request_id, outcome, word, body, follow: RETRY }
    }

    /// A gateway's call, and what the gateway makes of the answer.
    fn make(self, world: &mut World, place: u8, ask: Ask, since: u16, fate: Fate) {
        if fate != Fate::Answered {
            world.budget.mishaps -= 1;
            if fate == Fate::Lost {
                world.ask(&self.call(ask));
            } else {
                world.late = Some(ask);
            }
            world.gateways[usize::from(place)].open = Some((ask, since));
            return;
        }
        let answer = world.ask(&self.call(ask));
        let ended = world.redis.view.as_ref().is_some_and(|view| view.ended_ms > 0);
        let is_ahead = matches!(ask.what, What::Submit(First::Running) | What::Begin(First::Running, _) | What::Mark);
        if is_ahead || ended {
            self.acknowledge(world);
        }
        if answer.starts_with("won") {
            world.told = world.redis.view.as_ref().map_or(0, |view| view.completed_by);
        }
        let job = world.redis.view.as_ref().map(|view| view.id);
        world.gateways[usize::from(place)].learn(ask, since + 1, &answer, job);
    }

    /// What a gateway or a client is told of now is kept, where that is promised.
    fn acknowledge(self, world: &mut World) {
        if self.durability == Durability::Replicated && self.fault != Some(Fault::DoesNotWait) {
            world.replica = Arc::clone(&world.redis);
        }
    }
}

impl Gateway {
    /// What it is, as seen from now.
    fn key(&self, ticks: u16) -> u64 {
        let left = |tick: u16| tick.saturating_sub(ticks);
        let phase = match self.phase {
            Phase::Armed { until } => Phase::Armed { until: left(until + 1) },
            other => other,
        };
        let open = self.open.map(|(ask, since)| (ask, left(since + 1)));
        let mut hasher = DefaultHasher::new();
        (phase, self.job, self.number, self.token, left(self.lease), self.holds, open).hash(&mut hasher);
        hasher.finish()
    }

    fn forget(&mut self) {
        (self.phase, self.number, self.token, self.lease, self.open, self.holds) = (Phase::Idle, 0, 0, 0, None, None);
    }

    fn learn(&mut self, ask: Ask, lease: u16, answer: &str, job: Option<JobId>) {
        let mut words = answer.split(' ');
        let status = words.next().unwrap_or_default();
        let (job, token) = (job.unwrap_or(ask.job), ask.token);
        let has = |gateway: &mut Self, phase, number| {
            *gateway = Gateway { phase, job, number, token, lease, holds: None, open: None };
        };
        match (ask.what, status) {
            (What::Submit(_), "created") => match words.next() {
                Some("running") => has(self, Phase::Ahead, 1),
                Some("pending") => self.holds = Some(token),
                _ => {}
            },
            (What::Begin(..), "started" | "repeated") => {
                let number = words.next().and_then(|number| number.parse().ok()).unwrap_or(0);
                match (status, ask.what, words.next()) {
                    ("started", What::Begin(First::Starting, _), _) | ("repeated", _, Some("starting")) => {
                        has(self, Phase::Starting, number);
                    }
                    ("started", ..) | (_, _, Some("running")) => has(self, Phase::Ahead, number),
                    _ => {}
                }
            }
            (What::Mark, "running" | "repeated") => self.phase = Phase::Ahead,
            (What::Extend, "extended") => self.lease = lease,
            (What::Finish(FinishOutcome::Unknown, _), "recorded" | "repeated") => self.phase = Phase::Told,
            (What::Mark | What::Finish(..), _) => self.forget(),
            _ => {}
        }
    }
}

impl World {
    fn new_ask(&mut self, place: u8, what: What) -> Ask {
        let gateway = &self.gateways[usize::from(place)];
        let (mut job, number, mut token) = (gateway.job, gateway.number, gateway.token);
        if let What::Submit(_) | What::Begin(..) = what {
            let budget = if matches!(what, What::Submit(_)) { &mut self.budget.submits } else { &mut self.budget.begins };
            *budget -= 1;
            token = u8::try_from(self.work.len()).expect("few tokens");
            self.work.push(Work::NotSent);
        }
        if let (What::Begin(..), Some(view)) = (what, &self.redis.view) {
            job = view.id;
        }
        if what == What::Extend {
            self.budget.heartbeats -= 1;
        }
        Ask { what, job, number, token }
    }

    /// Redis executes a call.
    fn ask(&mut self, call: &Call) -> String {
        let mut after = (*self.redis).clone();
        let answer = after.answer(call);
        self.broken.look_at(self.redis.view.as_ref(), after.view.as_ref(), call, &answer);
        self.seen.look_at(self.redis.view.as_ref(), after.view.as_ref(), call, &answer);
        if after.view != self.redis.view {
            self.redis = Arc::new(after);
        }
        answer
    }

    fn fail_over(&mut self, forgiven: bool) {
        // What was never copied is not there.
        let replica = (*self.replica).clone();
        self.redis = Arc::new(replica);
        self.forgiven |= forgiven;
        if forgiven {
            self.told = 0;
        }
    }
}
