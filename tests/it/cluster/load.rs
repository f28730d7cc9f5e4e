//! Callers that claim keys, two at a time, "execute" what is theirs, and finish it, whatever Redis does meanwhile.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onejob::attempt::FinishOutcome;
use onejob::error::StoreError;
use onejob::job::{Body, JobState};
use onejob::store::{FinishAttempt, Finished, Follow, Read, Store, Submitted, Tell};
use tokio::task::JoinSet;

use crate::support::{Answer, Call, First, LEASE_MS, Submission, payload, until_within};

/// Intents that are under way at once.
const AT_ONCE: usize = 6;
/// How long one caller goes on asking.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether an error reaches a caller, or it asks again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Errors {
    AskAgain,
    Never,
}

pub struct Load {
    seen: Arc<Seen>,
    workers: JoinSet<()>,
    store: Store,
}

struct Seen {
    name: &'static str,
    errors: Errors,
    /// How often each intent was executed.
    executed: Mutex<BTreeMap<String, u32>>,
    /// The longest that one caller waited for an answer.
    longest: Mutex<Duration>,
    refused: AtomicUsize,
    started: AtomicUsize,
    done: AtomicUsize,
    stop: AtomicBool,
}

/// What was seen of a load.
#[derive(Debug)]
#[expect(dead_code, reason = "printed")]
pub struct Figures {
    intents: usize,
    executions: u32,
    errors: usize,
    longest_answer: Duration,
}

impl Load {
    pub fn start(store: &Store, name: &'static str, errors: Errors) -> Load {
        let seen = Arc::new(Seen {
            name,
            errors,
            executed: Mutex::default(),
            longest: Mutex::default(),
            refused: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let mut workers = JoinSet::new();
        for _ in 0..AT_ONCE {
            let (store, seen) = (store.clone(), Arc::clone(&seen));
            workers.spawn(async move {
                while !seen.stop.load(Ordering::Relaxed) {
                    let number = seen.started.fetch_add(1, Ordering::Relaxed);
                    seen.intent(&store, &format!("{}-{number}", seen.name)).await;
                }
            });
        }
        Load { seen, workers, store: store.clone() }
    }

    /// Waits until so many more intents are done.
    pub async fn goes_on(&self, more: usize) {
        let from = self.seen.done.load(Ordering::Relaxed);
        until_within(PATIENCE, "the load goes on", async || self.seen.done.load(Ordering::Relaxed) >= from + more).await;
    }

    /// Stops, and judges every intent: its job is there, it has its own result, and it was executed once.
    pub async fn judged(mut self) -> Figures {
        self.seen.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.workers.join_next().await {
            ended.unwrap();
        }
        let executed = self.seen.executed.lock().unwrap().clone();
        let started = self.seen.started.load(Ordering::Relaxed);
        assert_eq!(executed.len(), started, "each intent was executed");
        for (key, times) in &executed {
            assert_eq!(*times, 1, "{key}");
            match self.store.read_job(Submission::new(key).identity()).await.unwrap() {
                Read::Found(job) => {
                    assert_eq!(job.state, JobState::Succeeded, "{key}");
                    assert!(
                        matches!(&job.result.body, Body::Inline(bytes) if **bytes == *key.as_bytes()),
                        "{key}: another result"
                    );
                }
                other => panic!("{key} is lost: {other:?}"),
            }
        }
        Figures {
            intents: started,
            executions: executed.values().sum(),
            errors: self.seen.refused.load(Ordering::Relaxed),
            longest_answer: *self.seen.longest.lock().unwrap(),
        }
    }
}

impl Seen {
    async fn intent(&self, store: &Store, key: &str) {
        let one = Submission { first: First::Running, ..Submission::new(key) };
        let other = one.by_another();
        let mine = tokio::join!(self.caller(store, &one), self.caller(store, &other));
        assert_eq!(u32::from(mine.0) + u32::from(mine.1), 1, "{key}: one of two is told that it is its");
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Claims and, if the key is its, executes and finishes.
    async fn caller(&self, store: &Store, submission: &Submission) -> bool {
        let call = Call::Submit(submission.clone());
        let id = match self.answer(|| call.send(store)).await {
            Answer::Submitted(Submitted::Created { id, .. }) => id,
            Answer::Submitted(Submitted::Existing(_)) => return false,
            other => panic!("{other:?}"),
        };
        *self.executed.lock().unwrap().entry(submission.key.clone()).or_default() += 1;
        let finish = FinishAttempt {
            job: id,
            number: 1,
            token: submission.token,
            outcome: FinishOutcome::Succeeded,
            result: &payload(&submission.key),
            reason: "",
            remote_id: "",
            model: "laser-2",
            follow: Follow::End,
            hint_ms: Some(store.now_ms() + LEASE_MS),
            strip_at_ms: None,
            tell: Tell::Nothing,
        };
        match self.answer(|| store.finish_attempt(&finish)).await {
            Finished::Won { .. } | Finished::Repeated { .. } => true,
            other => panic!("{other:?}"),
        }
    }

    /// Makes the same call until it is answered.
    async fn answer<T, F: Future<Output = Result<T, StoreError>>>(&self, call: impl Fn() -> F) -> T {
        let began = Instant::now();
        loop {
            match call().await {
                Ok(answer) => {
                    let mut longest = self.longest.lock().unwrap();
                    *longest = longest.max(began.elapsed());
                    return answer;
                }
                Err(error) => {
                    assert!(error.is_retryable() && self.errors == Errors::AskAgain, "{error}");
                    assert!(began.elapsed() < PATIENCE, "no answer within {PATIENCE:?}: {error}");
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }
}
