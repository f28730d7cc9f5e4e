//! Random calls of a few workers on one key, answered by Redis and by the model; both must agree after every step.
//!
//! Time passes by ageing the record, in steps of [`STEP_MS`]; every duration of the calls is a multiple of [`GRID_MS`] and none
//! of
//! [`STEP_MS`], so that the milliseconds which really pass meanwhile decide nothing. `PROPTEST_CASES` asks for more cases.

use std::time::{SystemTime, UNIX_EPOCH};

use onejob::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::{Body, Class, Job, JobId, JobState, Rules};
use onejob::store::{
    Begun, CancelMode, Canceled, Canceling, Extended, Finished, Follow, Marked, NoteReply, Postponed, Read, Reopened, Resolved,
    Submitted, Ticked, Word,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use crate::laws::derived;
use crate::model::Model;
use crate::support::{Answer, Call, First, Given, LEASE_MS, Redis, Submission};

/// How many sequences, unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 64;
/// The longest sequence.
const STEPS_MAX: usize = 50;
/// Time passes in multiples of this.
pub const STEP_MS: u64 = 100_000;
/// Times are compared on this grid.
pub const GRID_MS: u64 = 20_000;
/// How many workers there are. The last one is always about the newest attempt, whoever began it; the others keep their own, however
/// old it has become.
const WORKERS: usize = 4;

/// One step, in words that shrink well: which call it becomes depends on what has happened so far.
#[derive(Clone, Debug)]
enum Step {
    Submit {
        first: First,
        other_request: bool,
        deadline: bool,
    },
    Begin {
        first: First,
        held: bool,
    },
    Mark {
        forged: bool,
    },
    Extend {
        again: bool,
    },
    Finish {
        outcome: FinishOutcome,
        follow: Follow,
    },
    Resolve {
        number: u32,
        outcome: ResolveOutcome,
        word: Word,
        follow: Follow,
    },
    Note {
        forged: bool,
    },
    Cancel {
        mode: CancelMode,
    },
    Tick,
    Reopen {
        attempts: u32,
        deadline: bool,
    },
    Postpone {
        held: bool,
        steps: u64,
    },
    Read,
    /// The worker's last call, sent again.
    Again,
    /// Time passes.
    Age {
        steps: u64,
    },
}

fn follow() -> impl Strategy<Value = Follow> {
    prop_oneof![
        2 => Just(Follow::Retry { delay_ms: 0, hold_ms: 0 }),
        1 => Just(Follow::Retry { delay_ms: GRID_MS, hold_ms: GRID_MS }),
        1 => Just(Follow::End),
    ]
}

fn first() -> impl Strategy<Value = First> {
    prop_oneof![Just(First::Starting), Just(First::Running)]
}

fn step() -> impl Strategy<Value = Step> {
    let outcome = prop_oneof![
        2 => Just(FinishOutcome::Succeeded),
        3 => Just(FinishOutcome::Failed),
        3 => Just(FinishOutcome::Unknown),
        2 => Just(FinishOutcome::Aborted),
    ];
    let decision = prop_oneof![
        1 => Just(ResolveOutcome::Succeeded),
        2 => Just(ResolveOutcome::Failed),
        2 => Just(ResolveOutcome::Canceled),
        2 => Just(ResolveOutcome::Abandoned),
    ];
    let word = prop_oneof![Just(Word::Provider), Just(Word::Operator)];
    let mode = prop_oneof![2 => Just(CancelMode::Graceful), 1 => Just(CancelMode::Force)];
    let submit = (
        prop_oneof![Just(First::Pending), Just(First::Starting), Just(First::Running)],
        prop::bool::weighted(0.1),
        prop::bool::weighted(0.3),
    );
    prop_oneof![
        2 => submit.prop_map(|(first, other_request, deadline)| Step::Submit { first, other_request, deadline }),
        8 => (first(), any::<bool>()).prop_map(|(first, held)| Step::Begin { first, held }),
        4 => prop::bool::weighted(0.1).prop_map(|forged| Step::Mark { forged }),
        3 => prop::bool::weighted(0.2).prop_map(|again| Step::Extend { again }),
        8 => (outcome, follow()).prop_map(|(outcome, follow)| Step::Finish { outcome, follow }),
        4 => (prop_oneof![4 => Just(1_u32), 2 => Just(2), 1 => 3..=4_u32], decision, word, follow())
            .prop_map(|(number, outcome, word, follow)| Step::Resolve { number, outcome, word, follow }),
        2 => prop::bool::weighted(0.1).prop_map(|forged| Step::Note { forged }),
        1 => mode.prop_map(|mode| Step::Cancel { mode }),
        4 => Just(Step::Tick),
        2 => (1..=2_u32, any::<bool>()).prop_map(|(attempts, deadline)| Step::Reopen { attempts, deadline }),
        3 => (any::<bool>(), 0..=3_u64).prop_map(|(held, steps)| Step::Postpone { held, steps }),
        1 => Just(Step::Read),
        4 => Just(Step::Again),
        5 => prop_oneof![8 => 1..=3_u64, 1 => Just(11_u64), 1 => Just(21_u64)].prop_map(|steps| Step::Age { steps }),
    ]
}

/// What one worker remembers: it may be long out of date.
#[derive(Clone)]
struct Worker {
    job: JobId,
    number: u32,
    token: AttemptToken,
    sequence: u64,
    last: Option<Call>,
}

struct World {
    given: Given,
    model: Model,
    workers: Vec<Worker>,
    /// The id that the last reply told.
    job: JobId,
    made: u32,
}

impl World {
    fn new(given: Given) -> Self {
        let job = given.id;
        let worker = || Worker { job, number: 1, token: AttemptToken::random(), sequence: 0, last: None };
        let workers = (0..WORKERS).map(|_| worker()).collect();
        World { given, model: Model::new(), workers, job, made: 0 }
    }

    /// What a step means for a worker, now.
    fn call(&mut self, worker: usize, step: &Step) -> Option<Call> {
        self.made += 1;
        let request_id = format!("request-{}", self.made);
        let body = format!("body {}", self.made);
        let job = self.job;
        let me = self.workers[worker].clone();
        Some(match step.clone() {
            Step::Submit { first, other_request, deadline } => {
                let template = &self.given.submission;
                let request = if other_request { "another".to_owned() } else { template.request.clone() };
                let deadline_ms = if deadline { 540_000 } else { 0 };
                let time_ms = template.time_ms + u64::from(self.made);
                Call::Submit(Submission {
                    first,
                    request,
                    deadline_ms,
                    time_ms,
                    token: AttemptToken::random(),
                    ..template.clone()
                })
            }
            Step::Begin { first, held } => {
                Call::Begin { job, token: AttemptToken::random(), holder: held.then_some(me.token), first }
            }
            Step::Mark { forged } => {
                let token = if forged { AttemptToken::random() } else { me.token };
                Call::Mark { job: me.job, number: me.number, token }
            }
            Step::Extend { again } => {
                let sequence = if again { me.sequence } else { me.sequence + 1 };
                self.workers[worker].sequence = sequence;
                Call::Extend { job: me.job, number: me.number, token: me.token, sequence, lease_ms: 160_000 }
            }
            Step::Finish { outcome, follow } => {
                Call::Finish { job: me.job, number: me.number, token: me.token, outcome, body, follow }
            }
            Step::Resolve { number, outcome, word, follow } => {
                Call::Resolve { job, number, request_id, outcome, word, body, follow }
            }
            Step::Note { forged } => {
                let token = if forged { AttemptToken::random() } else { me.token };
                let remote_id = format!("print-{}", self.made);
                Call::Note { job: me.job, number: me.number, token, remote_id, event: None }
            }
            Step::Cancel { mode } => Call::Cancel { job, request_id, mode },
            Step::Tick => self.given.call_tick(),
            Step::Reopen { attempts, deadline } => {
                Call::Reopen { job, request_id, attempts, deadline_ms: if deadline { 540_000 } else { 0 } }
            }
            Step::Postpone { held, steps } => {
                let (token, holder) = (AttemptToken::random(), held.then_some(me.token));
                Call::Postpone { job, token, holder, delay_ms: steps * STEP_MS }
            }
            Step::Read => self.given.call_read(),
            Step::Again => return me.last,
            Step::Age { .. } => return None,
        })
    }

    /// What a worker learns from a reply.
    fn learn(&mut self, worker: usize, call: &Call, answer: &Answer) {
        let attempt = match (call, answer) {
            (Call::Submit(submission), Answer::Submitted(Submitted::Created { id, .. })) => {
                self.job = *id;
                Some((*id, 1, submission.token))
            }
            (Call::Submit(_), Answer::Submitted(Submitted::Existing(job))) => {
                self.job = job.id;
                None
            }
            (Call::Begin { job, token, .. }, Answer::Begun(Begun::Started { number, .. } | Begun::Repeated { number, .. })) => {
                Some((*job, *number, *token))
            }
            _ => None,
        };
        if let Some((job, number, token)) = attempt {
            for place in [worker, WORKERS - 1] {
                let last = self.workers[place].last.take();
                self.workers[place] = Worker { job, number, token, sequence: 0, last };
            }
        }
        self.workers[worker].last = Some(call.clone());
    }

    async fn step(&mut self, worker: usize, step: &Step) -> Result<(), TestCaseError> {
        if let Step::Age { steps } = step {
            self.model.age(steps * STEP_MS);
            self.given.age(steps * STEP_MS).await;
        } else if let Some(call) = self.call(worker, step) {
            let before = self.given.dump().await;
            let revision_before = self.model.job.as_ref().map(|job| (job.id, job.revision));
            let answer = self.given.send(&call).await;
            let expected = self.model.answer(&call);
            prop_assert_eq!(words(&answer), expected, "{:?}", call);
            if self.model.job.as_ref().map(|job| (job.id, job.revision)) == revision_before {
                prop_assert_eq!(self.given.dump().await, before, "{:?} changed what it must not", call);
            }
            self.learn(worker, &call, &answer);
        }
        self.compare().await
    }

    /// The record and the model, field by field.
    async fn compare(&self) -> Result<(), TestCaseError> {
        let dump = self.given.dump().await;
        let Some(model) = &self.model.job else {
            prop_assert_eq!(dump.packed, None);
            return Ok(());
        };
        let now_ms = local_ms();
        prop_assert_eq!(dump.expires_at_ms == -1, model.ended.is_none(), "an open job has no TTL, an ended one has");
        let job = match self.given.read().await {
            Read::Found(job) => job,
            Read::Gone(gone) => {
                prop_assert!(model.gone(self.model.now_ms));
                prop_assert_eq!((gone.id, gone.state), (model.id, model.state()));
                return Ok(());
            }
            Read::NotFound => return Err(TestCaseError::fail("the record is lost")),
        };
        let time = |ms: u64| on_grid(ms, now_ms, self.model.now_ms);
        prop_assert_eq!((job.id, job.state, job.state), (model.id, model.state(), derived(&job)));
        prop_assert_eq!((job.version, job.revision, job.completed_by), (model.version, model.revision, model.completed_by));
        prop_assert_eq!(&job.reason, &model.reason);
        prop_assert_eq!(job.canceled_by.is_empty(), !model.canceled);
        prop_assert_eq!(text(&job.result.body), model.result.clone());
        prop_assert_eq!(text(&job.input.body), model.submission.request.clone());
        prop_assert_eq!(job.rules.attempts_max as usize, model.attempts_max);
        prop_assert_eq!(
            [job.updated_ms, job.ended_ms, job.deadline_ms, job.next_at_ms, job.holder_lease_ms].map(time),
            [model.updated_ms, model.ended_ms, model.deadline_ms, model.next_at_ms, model.holder_lease_ms]
        );
        let rows: Vec<crate::model::Attempt> = job.attempts.iter().map(|attempt| row(attempt, time)).collect();
        prop_assert_eq!(&rows, &model.attempts);
        one_winner(&job)
    }
}

/// What holds whatever happened.
fn one_winner(job: &Job) -> Result<(), TestCaseError> {
    let succeeded: Vec<u32> =
        job.attempts.iter().filter(|attempt| attempt.state == AttemptState::Succeeded).map(|attempt| attempt.number).collect();
    let winners: Vec<u32> = Some(job.completed_by).filter(|number| *number > 0).into_iter().collect();
    prop_assert_eq!(succeeded, winners);
    prop_assert_eq!(job.state == JobState::Succeeded, job.completed_by > 0);
    Ok(())
}

pub fn row(attempt: &onejob::attempt::Attempt, time: impl Fn(u64) -> u64) -> crate::model::Attempt {
    crate::model::Attempt {
        state: attempt.state,
        token: attempt.token,
        version: attempt.version,
        started_ms: time(attempt.started_ms),
        lease_ms: time(attempt.lease_ms),
        sequence: attempt.sequence,
        ended_ms: time(attempt.ended_ms),
        reason: attempt.reason.clone(),
        remote_id: attempt.remote_id.clone(),
    }
}

/// A time of the record as a time of the model: counted from now, and on the grid. What really passed meanwhile makes it earlier, and
/// is less than a step of the grid.
pub fn on_grid(ms: u64, now_ms: u64, model_now_ms: u64) -> u64 {
    if ms == 0 {
        return 0;
    }
    let from_beginning = i128::from(ms) - i128::from(now_ms) + i128::from(model_now_ms);
    u64::try_from((from_beginning + i128::from(GRID_MS - 1_000)) / i128::from(GRID_MS)).expect("a time after the beginning")
        * GRID_MS
}

#[expect(clippy::disallowed_methods, reason = "a submit proposes the wall clock's time")]
pub fn local_ms() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis())
        .expect("before the year 500,000,000")
}

pub fn text(body: &Body) -> String {
    match body {
        Body::Inline(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Body::Blob { .. } => panic!("these bodies are small"),
    }
}

/// An answer in the model's words: the status and the details that are no times.
pub fn words(answer: &Answer) -> String {
    match answer {
        Answer::Submitted(submitted) => match submitted {
            Submitted::Created { attempt, .. } => format!("created {}", attempt.map_or("pending", AttemptState::as_str)),
            Submitted::Existing(_) => "existing".to_owned(),
            Submitted::Conflict { .. } => "conflict".to_owned(),
            Submitted::Gone(gone) => format!("gone {}", gone.state),
            Submitted::Collision => "collision".to_owned(),
        },
        Answer::Begun(begun) => match begun {
            Begun::Started { number, .. } => format!("started {number}"),
            Begun::Repeated { number, state } => format!("repeated {number} {state}"),
            Begun::Blocked { by, number } => format!("blocked {by} {number}"),
            Begun::TooEarly { .. } => "too_early".to_owned(),
            Begun::Exhausted { attempts } => format!("exhausted {attempts}"),
            Begun::Deadline => "deadline".to_owned(),
            Begun::Canceling => "canceling".to_owned(),
            Begun::Ended { state } => format!("ended {state}"),
            Begun::NotFound => "not_found".to_owned(),
        },
        Answer::Marked(marked) => match marked {
            Marked::Running { .. } => "running".to_owned(),
            Marked::Repeated { .. } => "repeated".to_owned(),
            Marked::Fenced { why } => format!("fenced {why}"),
            Marked::NotFound => "not_found".to_owned(),
        },
        Answer::Extended(extended) => match extended {
            Extended::Extended { canceling: Canceling::No, .. } => "extended".to_owned(),
            Extended::Extended { canceling: Canceling::Yes, .. } => "extended canceling".to_owned(),
            Extended::Fenced { why } => format!("fenced {why}"),
            Extended::NotFound => "not_found".to_owned(),
        },
        Answer::Finished(finished) => match finished {
            Finished::Won { version, .. } => format!("won {version}"),
            Finished::Recorded { job } => format!("recorded {job}"),
            Finished::Repeated { attempt, job, completed_by } => format!("repeated {attempt} {job} {completed_by}"),
            Finished::Discarded { attempt, completed_by } => format!("discarded {attempt} {completed_by}"),
            Finished::NotFound => "not_found".to_owned(),
        },
        Answer::Resolved(resolved) => match resolved {
            Resolved::Won { version } => format!("won {version}"),
            Resolved::Recorded { job } => format!("recorded {job}"),
            Resolved::Repeated { attempt, job, completed_by } => format!("repeated {attempt} {job} {completed_by}"),
            Resolved::Discarded { completed_by } => format!("discarded {completed_by}"),
            Resolved::Quarantine { .. } => "quarantine".to_owned(),
            Resolved::NotUnknown { state } => format!("not_unknown {state}"),
            Resolved::NotFound => "not_found".to_owned(),
        },
        Answer::Noted(noted) => match noted {
            NoteReply::Noted { attempt, job } => format!("noted {attempt} {job}"),
            NoteReply::Repeated { attempt, job } => format!("repeated {attempt} {job}"),
            NoteReply::NotFound => "not_found".to_owned(),
        },
        Answer::Canceled(canceled) => match canceled {
            Canceled::Canceled { effect, .. } => format!("canceled {effect}"),
            Canceled::Canceling { open } => format!("canceling {open}"),
            Canceled::Ended { state } => format!("ended {state}"),
            Canceled::NotFound => "not_found".to_owned(),
        },
        Answer::Ticked(ticked) => match ticked {
            Ticked::Job { state, changes, .. } => format!("ticked {state} {changes:?}"),
            Ticked::NotFound => "not_found".to_owned(),
        },
        Answer::Reopened(reopened) => match reopened {
            Reopened::Reopened { version } => format!("reopened {version}"),
            Reopened::NotFailed { state } => format!("not_failed {state}"),
            Reopened::Gone => "gone".to_owned(),
            Reopened::NotFound => "not_found".to_owned(),
        },
        Answer::Postponed(postponed) => match postponed {
            Postponed::Postponed { .. } => "postponed".to_owned(),
            Postponed::TooEarly { .. } => "too_early".to_owned(),
            Postponed::Begun => "begun".to_owned(),
            Postponed::Canceling => "canceling".to_owned(),
            Postponed::Ended { state } => format!("ended {state}"),
            Postponed::NotFound => "not_found".to_owned(),
        },
        Answer::Read(read) => match read {
            Read::Found(_) => "found".to_owned(),
            Read::Gone(gone) => format!("gone {}", gone.state),
            Read::NotFound => "not_found".to_owned(),
        },
    }
}

/// `PROPTEST_CASES` asks for more.
#[expect(clippy::disallowed_methods, reason = "a developer's own switch for a longer run")]
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(CASES)
}

/// Every call of a sequence is answered as the model says, and the record is what the model says.
fn agrees_with_the_model(class: Class) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let redis = runtime.block_on(Redis::start());
    let config = Config { cases: cases(), failure_persistence: None, max_shrink_iters: 2_000, ..Config::default() };
    let worker = prop_oneof![(0..WORKERS - 1).boxed(), Just(WORKERS - 1).boxed()];
    let steps = prop::collection::vec((worker, step()), 1..STEPS_MAX);
    let sequence = (any::<bool>(), prop::bool::weighted(0.3), first(), steps);
    let outcome = TestRunner::new(config).run(&sequence, |(releases_on_failure, deadline, first, steps)| {
        runtime.block_on(async {
            let template = redis.submission();
            let rules = Rules { releases_on_failure, ..template.rules };
            let submission = Submission { class, rules, lease_ms: LEASE_MS, ..template };
            let mut world = World::new(redis.given_absent(submission).await);
            world.step(0, &Step::Submit { first, other_request: false, deadline }).await?;
            for (worker, step) in &steps {
                world.step(*worker, step).await?;
            }
            Ok(())
        })
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

#[test]
fn random_calls_on_an_exclusive_job_agree_with_the_model() {
    agrees_with_the_model(Class::Exclusive);
}

#[test]
fn random_calls_on_a_race_agree_with_the_model() {
    agrees_with_the_model(Class::Race);
}
