//! Clients over HTTP who come at a fixed rate, whatever becomes of those before them: each intent is submitted by two of them, at two
//! gateways at once, again and again with the same key until both are answered, and read by a third one until it has ended.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio_util::task::TaskTracker;

use crate::support::gateway::{Answer, Gateway};

/// Before a client that was refused asks again, elsewhere.
const AGAIN: Duration = Duration::from_millis(100);
/// Between two looks at a job.
const LOOK: Duration = Duration::from_millis(150);
/// How long a client goes on.
const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Clone)]
pub struct Visitors {
    seen: Arc<Seen>,
    clients: TaskTracker,
}

struct Seen {
    gateways: Vec<Gateway>,
    requests: Mutex<Vec<Request>>,
    wishes: Mutex<Vec<Wish>>,
    /// When each intent was acknowledged first, and as which jobs.
    acknowledged: Mutex<BTreeMap<String, Acknowledged>>,
    next: AtomicUsize,
}

/// A request over HTTP.
#[derive(Clone)]
pub struct Request {
    pub at: Instant,
    /// What was wrong with its answer.
    pub error: Option<String>,
}

/// What a client wanted: to have its intent taken, or to read a job. From when it was due to its answer, however often it asked.
#[derive(Clone, Copy)]
pub struct Wish {
    pub due: Instant,
    pub ended: Instant,
}

#[derive(Clone)]
pub struct Acknowledged {
    pub at: Instant,
    /// More than one: the first was lost.
    pub ids: Vec<String>,
}

impl Visitors {
    pub fn of(gateways: Vec<Gateway>) -> Visitors {
        let (requests, wishes, acknowledged) = (Mutex::default(), Mutex::default(), Mutex::default());
        let seen = Seen { gateways, requests, wishes, acknowledged, next: AtomicUsize::new(0) };
        Visitors { seen: Arc::new(seen), clients: TaskTracker::new() }
    }

    /// Begins so many intents a second, for so long.
    pub async fn come(&self, rate: u32, how_long: Duration) {
        let began = Instant::now();
        let mut count = 0;
        while began.elapsed() < how_long {
            let due = began + Duration::from_secs(count) / rate;
            tokio::time::sleep_until(due.into()).await;
            let number = self.seen.next.fetch_add(1, Ordering::Relaxed);
            self.want(&format!("visit-{number}"), due);
            count += 1;
        }
    }

    /// All clients of one intent.
    pub fn want(&self, key: &str, due: Instant) {
        let (seen, key) = (Arc::clone(&self.seen), key.to_owned());
        self.clients.spawn(async move {
            let first = key.bytes().map(usize::from).sum::<usize>();
            join_all([seen.visit(&key, first, due, Reads::UntilItEnds), seen.visit(&key, first + 1, due, Reads::Never)]).await;
        });
    }

    pub async fn all_are_answered(&self) {
        self.clients.close();
        self.clients.wait().await;
    }

    pub fn requests(&self) -> Vec<Request> {
        self.seen.requests.lock().unwrap().clone()
    }

    pub fn wishes(&self) -> Vec<Wish> {
        self.seen.wishes.lock().unwrap().clone()
    }

    pub fn acknowledged(&self) -> BTreeMap<String, Acknowledged> {
        self.seen.acknowledged.lock().unwrap().clone()
    }

    /// When the last error was seen.
    pub fn last_error(&self) -> Option<Instant> {
        self.seen.requests.lock().unwrap().iter().filter(|request| request.error.is_some()).map(|request| request.at).max()
    }

    pub fn gateways(&self) -> &[Gateway] {
        &self.seen.gateways
    }
}

/// What a client does once its intent is taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reads {
    UntilItEnds,
    Never,
}

/// What a gateway is asked for.
#[derive(Clone, Copy)]
enum Ask<'a> {
    ToTake(&'a str),
    ToRead(&'a str),
}

/// What each intent asks for: some of it takes a while.
fn input(key: &str) -> String {
    let delay_ms = key.bytes().map(u32::from).sum::<u32>() % 4 * 40;
    format!(r#"{{"of":"{key}","simulate":"delay={delay_ms}ms"}}"#)
}

impl Seen {
    async fn visit(&self, key: &str, mut gateway: usize, mut due: Instant, reads: Reads) {
        let began = Instant::now();
        loop {
            let answer = self.answer(&mut gateway, due, Ask::ToTake(key)).await;
            let id = answer.body["id"].as_str().unwrap_or_else(|| panic!("{key}: {answer:?}")).to_owned();
            self.note(key, &id);
            if reads == Reads::Never {
                return;
            }
            // One that is lost is submitted again.
            loop {
                tokio::time::sleep(LOOK).await;
                due = Instant::now();
                let job = self.answer(&mut gateway, due, Ask::ToRead(&id)).await;
                if job.status == 404 {
                    break;
                }
                if ["succeeded", "failed", "canceled", "indeterminate"].iter().any(|state| job.body["state"] == *state) {
                    return;
                }
                assert!(began.elapsed() < PATIENCE, "{key} does not end: {}", job.body);
            }
            due = Instant::now();
        }
    }

    fn note(&self, key: &str, id: &str) {
        let mut all = self.acknowledged.lock().unwrap();
        let known = all.entry(key.to_owned()).or_insert_with(|| Acknowledged { at: Instant::now(), ids: Vec::new() });
        if known.ids.iter().all(|known| known != id) {
            known.ids.push(id.to_owned());
        }
    }

    /// Asks one gateway after the other until one answers.
    async fn answer(&self, gateway: &mut usize, due: Instant, ask: Ask<'_>) -> Answer {
        loop {
            let asked = &self.gateways[*gateway % self.gateways.len()];
            let answer = match ask {
                Ask::ToTake(key) => asked.submit(key, &input(key)).await,
                Ask::ToRead(id) => asked.job(id).await,
            };
            *gateway += 1;
            let error = error(answer.as_ref());
            let (at, is_lost) = (Instant::now(), answer.as_ref().is_some_and(|answer| answer.status == 404));
            let is_answer = error.is_none() || is_lost;
            self.requests.lock().unwrap().push(Request { at, error });
            if let Some(answer) = answer.filter(|_| is_answer) {
                self.wishes.lock().unwrap().push(Wish { due, ended: at });
                return answer;
            }
            assert!(due.elapsed() < PATIENCE, "no answer within {PATIENCE:?}");
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// What is wrong with an answer.
fn error(answer: Option<&Answer>) -> Option<String> {
    match answer {
        None => Some("no answer".to_owned()),
        Some(answer) if answer.status < 300 => None,
        Some(answer) => {
            let kind = answer.body["type"].as_str().unwrap_or_default();
            let retryable = if answer.body["retryable"] == true { "retryable " } else { "" };
            Some(format!("{retryable}{} {}", answer.status, kind.rsplit(':').next().unwrap_or_default()))
        }
    }
}
