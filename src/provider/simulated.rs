//! A programmable provider over real HTTP, with a ledger of what it did. For tests, storms and trying things out.
//!
//! Every request whose method is not GET or HEAD, on any path but those below, is "the work": executing it is counted, and the
//! answer names the execution, so that two executions of one request never look the same. How a request is treated is its
//! *behaviour*: the header `onejob-simulate`, else the member `"simulate"` of a JSON body, else the default.
//!
//! | call | does |
//! |---|---|
//! | `GET /ledger` | the [`Ledger`] as JSON; `?job=<id>` for one job's entries and totals |
//! | `DELETE /ledger` | forgets entries, totals and keys |
//! | `GET /behaviour`, `PUT /behaviour` | the default, as text |
//! | `GET /healthz` | `ok` |
//!
//! Under `/jobs` the same work goes through a queue: it is taken on, done afterwards, and can be asked about.
//!
//! | call | does |
//! |---|---|
//! | `POST /jobs` | takes a job on: 202 with its document, and does it afterwards; calls the body's member `"webhook_url"` back |
//! | `GET /jobs/{id}` | the document: `id`, `key`, `result`, `error`, `status` |
//! | `GET /jobs?key=K` | the jobs that came with that idempotency key |
//! | `POST /jobs/{id}/cancel` | stops it, as far as it can, and answers with the document |
//!
//! A job is `queued`, `running`, and then `completed`, `failed` or `canceled`. A webhook is the document, with `webhook-timestamp`
//! and `webhook-signature`: HMAC-SHA256 over time, `.` and body, in hexadecimal. It is sent again
//! until it is answered with a status below 500, a few times.
//!
//! A behaviour is a list of words, separated by commas; durations as `200ms`, `2s`, `1m`:
//!
//! | word | does |
//! |---|---|
//! | `succeed` | executes and answers 200: what happens anyway if nothing else is said |
//! | `status=N` | executes, then answers N |
//! | `refuse_status=N` | answers N and does *not* execute |
//! | `jam` | `refuse_status=422`, as a printer would say it |
//! | `unexecuted` | does not execute, whatever it answers |
//! | `retry_after=D` | adds `Retry-After`, in whole seconds |
//! | `queue=D` | waits before it executes; goes on waiting, and executes, though the client went away |
//! | `delay=D` | waits between executing and answering |
//! | `drop` | closes the connection instead of answering; over HTTP/2, resets the stream |
//! | `half` | promises the whole answer, sends half of it and closes the connection |
//! | `hang` | never answers |
//! | `chunked` | frames the answer in chunks instead of with its length; with `half`, the last chunk never comes |
//! | `slow_body=D` | sends the answer in four parts, D between them |
//! | `invalid_json` | declares JSON and cuts the answer's last byte off |
//! | `size=N` | pads the answer to at least N bytes |
//! | `echo_credential` | repeats the request's `Authorization` in body and headers |
//! | `chunks=N` | of a chat: its text in N pieces |
//! | `pause=D` | of a stream: waits D before each part but the first |
//! | `part_bytes=N` | of a stream: sends N bytes at once instead of an event |
//! | `unmarked` | of a stream: ends without its end marker, the framing complete |
//! | `stream_error` | of a stream: tells of an error in its last event, then its end marker |
//! | `run=D` | of a job: how long it runs; it has been executed when it begins to |
//! | `fail` | of a job: ends as `failed`, and does *not* execute |
//! | `stubborn` | of a job: a cancel is acknowledged, and it completes anyway |
//! | `forget=D` | of a job: D after its end it is 404 |
//! | `report=WORD` | of a job: the word for its state, whatever that is |
//! | `no_id`, `hostile_id` | of a job: the answer to its submit has no name for it; one that leads elsewhere |
//! | `webhook_first` | of a job: it is done, and has called back, before its submit is answered |
//! | `refuse`, `refuse=D` | default only: connecting is refused, for D or until told otherwise; over HTTP it needs D |
//! | `random=SEED` | alone: draws one of the above, the same for the same seed, job and attempt (without a job: the same key) |
//!
//! On a path that ends in `/chat/completions` the answer is an OpenAI-compatible chat completion, and with `"stream": true` in the
//! request's body a stream of server-sent events. `half` of a stream is half of its parts, then the connection closes.
//! It speaks HTTP/1.1, and HTTP/2 with a client that begins so.
//!
//! For example `delay=200ms,drop`: executes, waits, and closes the connection.
//!
//! Deliberately not here: persistence, authentication, TLS. It listens where it is told and believes everybody.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Serialize;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use self::behaviour::Does;
pub use self::behaviour::{Behaviour, InvalidBehaviour};

mod behaviour;
mod chat;
mod queue;
mod server;

/// Most entries that the ledger keeps; the oldest go first, and are counted in [`Ledger::dropped`].
pub const LEDGER_ENTRIES_MAX: usize = 100_000;
/// Largest body of a request.
pub const BODY_BYTES_MAX: usize = 32 << 20;
/// The header that chooses a request's behaviour.
pub const BEHAVIOUR_HEADER: &str = "onejob-simulate";
/// The header that an idempotency key is read from.
pub const KEY_HEADER: &str = "idempotency-key";

/// What webhooks are signed with, unless the options say otherwise. No secret: everybody can read it here.
pub const WEBHOOK_SECRET: &str = "simulated-webhook-secret";

/// How a simulated provider is set up.
#[derive(Clone, Debug)]
pub struct SimulatedOptions {
    /// Where to listen. Port 0: any free port.
    pub listen: SocketAddr,
    /// Its name, in every answer.
    pub name: String,
    /// The model that it says answered.
    pub model: String,
    /// The default behaviour, in the grammar above.
    pub behaviour: String,
    /// Whether a repeated idempotency key is answered as it was the first time, without another execution.
    pub keys: Keys,
    /// What it signs its webhooks with.
    pub webhook_secret: String,
}

impl Default for SimulatedOptions {
    fn default() -> Self {
        SimulatedOptions {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            name: "simulated".to_owned(),
            model: "simulated-1".to_owned(),
            behaviour: "succeed".to_owned(),
            keys: Keys::Ignored,
            webhook_secret: WEBHOOK_SECRET.to_owned(),
        }
    }
}

/// What the provider makes of idempotency keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keys {
    /// Nothing: every request is a new one.
    #[default]
    Ignored,
    /// One execution for a key; a repetition is given the first one's answer.
    Honoured,
}

/// One request and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// Its place in the order of arrival, from 1.
    pub sequence: u64,
    /// When it had arrived completely, Unix ms.
    pub at_ms: u64,
    /// `onejob-job-id`, `""` if there was none.
    pub job_id: String,
    /// `onejob-attempt`, `""` if there was none.
    pub attempt: String,
    /// The idempotency key, `""` if there was none.
    pub idempotency_key: String,
    /// The method.
    pub method: String,
    /// The path with its query.
    pub path: String,
    /// SHA-256 of the body, in hexadecimal.
    pub body_sha256: String,
    /// The behaviour that it was treated with.
    pub behaviour: String,
    /// Whether the work was taken on: not refused.
    pub accepted: bool,
    /// Whether this request executed the work. A replay by key does not.
    pub executed: bool,
    /// Whether a complete answer was handed to the connection.
    pub answered: bool,
}

/// What a simulated provider did, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ledger {
    /// Requests for work.
    pub received: u64,
    /// Of these, taken on.
    pub accepted: u64,
    /// Of these, executed.
    pub executed: u64,
    /// Requests that were answered completely.
    pub answered: u64,
    /// Entries that are no longer kept. Totals count them.
    pub dropped: u64,
    /// Connections since the start, for whatever request.
    pub connections: u64,
    /// In order of arrival.
    pub entries: Vec<Entry>,
}

/// A running simulated provider. Dropping it stops it without waiting; see [`Simulated::shutdown`].
pub struct Simulated {
    addr: SocketAddr,
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stop: DropGuard,
}

impl Simulated {
    /// Binds and serves. Returns as soon as connections are accepted.
    ///
    /// # Errors
    /// The address cannot be bound, or the behaviour is not one ([`io::ErrorKind::InvalidInput`]).
    pub async fn start(options: SimulatedOptions) -> io::Result<Simulated> {
        let behaviour: Behaviour =
            options.behaviour.parse().map_err(|error: InvalidBehaviour| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let shared = Arc::new(Shared::new(&options, behaviour));
        let tasks = TaskTracker::new();
        let stop = CancellationToken::new();
        let addr = server::start(options.listen, Arc::clone(&shared), tasks.clone(), stop.clone())?;
        Ok(Simulated { addr, shared, tasks, stop: stop.drop_guard() })
    }

    /// Where it listens, with the port that it was given.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its base URL.
    pub fn base_url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// What it did until now.
    pub fn ledger(&self) -> Ledger {
        self.shared.ledger(None)
    }

    /// What it did until now for one job.
    pub fn ledger_of(&self, job_id: &str) -> Ledger {
        self.shared.ledger(Some(job_id))
    }

    /// Forgets entries, totals and keys.
    pub fn clear_ledger(&self) {
        self.shared.clear();
    }

    /// Changes the default behaviour.
    ///
    /// # Errors
    /// It is not a behaviour; nothing has changed.
    pub fn set_behaviour(&self, behaviour: &str) -> Result<(), InvalidBehaviour> {
        self.shared.set_behaviour(behaviour.parse()?);
        Ok(())
    }

    /// Stops: closes the listener and every connection, gives up what waits, and returns when nothing runs any more.
    pub async fn shutdown(self) {
        drop(self.stop);
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// What all requests share.
struct Shared {
    name: String,
    model: String,
    keys: Keys,
    /// Sets the executions of two processes under one name apart.
    nonce: String,
    standing: watch::Sender<Standing>,
    book: Mutex<Book>,
    queue: queue::Queue,
    webhook_secret: String,
}

/// What holds for requests that say nothing themselves.
#[derive(Clone)]
struct Standing {
    default: Behaviour,
    /// Connections are refused; the default stands again afterwards.
    refusal: Option<Refusal>,
}

#[derive(Clone, Copy)]
struct Refusal {
    /// `None`: until told otherwise.
    duration: Option<Duration>,
}

impl Standing {
    fn set(&mut self, behaviour: Behaviour) {
        match behaviour.does {
            Does::Treat(_) | Does::Random { .. } => *self = Standing { default: behaviour, refusal: None },
            Does::Refuse { duration } => self.refusal = Some(Refusal { duration }),
        }
    }
}

#[derive(Default)]
struct Book {
    executions: u64,
    sequence: u64,
    totals: Totals,
    connections: u64,
    dropped: u64,
    entries: VecDeque<Entry>,
    /// By idempotency key, if keys are honoured.
    answers: BTreeMap<String, Made>,
    /// The keys in the order of their first execution, to bound them.
    answered_keys: VecDeque<String>,
}

#[derive(Clone, Copy, Default)]
struct Totals {
    received: u64,
    accepted: u64,
    executed: u64,
    answered: u64,
}

/// What an execution made: kept for replay.
#[derive(Clone)]
struct Made {
    status: u16,
    body: Bytes,
    kind: Kind,
}

/// What an answer's body is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Json,
    Events,
}

/// What happened to a request after its arrival.
#[derive(Clone, Copy)]
enum Mark {
    Accepted,
    Executed,
    Answered,
}

impl Shared {
    fn new(options: &SimulatedOptions, behaviour: Behaviour) -> Self {
        let mut standing = Standing { default: Behaviour::default(), refusal: None };
        standing.set(behaviour);
        Shared {
            name: options.name.clone(),
            model: options.model.clone(),
            keys: options.keys,
            nonce: uuid::Uuid::new_v4().simple().to_string()[..8].to_owned(),
            standing: watch::Sender::new(standing),
            book: Mutex::default(),
            queue: queue::Queue::default(),
            webhook_secret: options.webhook_secret.clone(),
        }
    }

    fn set_behaviour(&self, behaviour: Behaviour) {
        self.standing.send_modify(|standing| standing.set(behaviour));
    }

    /// Enters a request; returns its sequence number.
    fn enter(&self, mut entry: Entry) -> u64 {
        let mut book = self.book();
        book.sequence += 1;
        book.totals.received += 1;
        entry.sequence = book.sequence;
        entry.at_ms = unix_ms();
        if book.entries.len() == LEDGER_ENTRIES_MAX {
            book.entries.pop_front();
            book.dropped += 1;
        }
        book.entries.push_back(entry);
        book.sequence
    }

    fn mark(&self, sequence: u64, mark: Mark) {
        self.book().mark(sequence, mark);
    }

    /// Executes the work once, or finds what was made for this key before.
    fn execute(&self, sequence: u64, key: &str, make: impl FnOnce(u64, &str) -> Made) -> Made {
        let mut book = self.book();
        let honoured = matches!(self.keys, Keys::Honoured) && !key.is_empty();
        if honoured && let Some(made) = book.answers.get(key) {
            return made.clone();
        }
        book.executions += 1;
        let number = book.executions;
        book.mark(sequence, Mark::Executed);
        let made = make(number, &format!("{}-{}-{number}", self.name, self.nonce));
        if honoured {
            if book.answered_keys.len() == LEDGER_ENTRIES_MAX
                && let Some(oldest) = book.answered_keys.pop_front()
            {
                book.answers.remove(&oldest);
            }
            book.answered_keys.push_back(key.to_owned());
            book.answers.insert(key.to_owned(), made.clone());
        }
        made
    }

    fn ledger(&self, job_id: Option<&str>) -> Ledger {
        let book = self.book();
        let entries: Vec<Entry> =
            book.entries.iter().filter(|entry| job_id.is_none_or(|job_id| entry.job_id == job_id)).cloned().collect();
        let totals = match job_id {
            None => book.totals,
            Some(_) => Totals {
                received: entries.len() as u64,
                accepted: entries.iter().filter(|entry| entry.accepted).count() as u64,
                executed: entries.iter().filter(|entry| entry.executed).count() as u64,
                answered: entries.iter().filter(|entry| entry.answered).count() as u64,
            },
        };
        let Totals { received, accepted, executed, answered } = totals;
        Ledger { received, accepted, executed, answered, dropped: book.dropped, connections: book.connections, entries }
    }

    fn clear(&self) {
        let mut book = self.book();
        let Book { executions, sequence, connections, .. } = *book;
        // Numbers go on: an execution from before is never taken for one from after.
        *book = Book { executions, sequence, connections, ..Book::default() };
    }

    fn connected(&self) {
        self.book().connections += 1;
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn mark(&mut self, sequence: u64, mark: Mark) {
        // Entries are in order and without gaps. One that is no longer there was dropped, or cleared: then its total went too.
        let first = self.entries.front().map_or(u64::MAX, |entry| entry.sequence);
        let place = sequence.checked_sub(first).and_then(|place| usize::try_from(place).ok());
        let entry = place.and_then(|place| self.entries.get_mut(place));
        if entry.is_none() && self.dropped == 0 {
            return;
        }
        let total = match mark {
            Mark::Accepted => &mut self.totals.accepted,
            Mark::Executed => &mut self.totals.executed,
            Mark::Answered => &mut self.totals.answered,
        };
        *total += 1;
        let Some(entry) = entry else { return };
        match mark {
            Mark::Accepted => entry.accepted = true,
            Mark::Executed => entry.executed = true,
            Mark::Answered => entry.answered = true,
        }
    }
}

fn unix_ms() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "a ledger for people, on the wall clock")]
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_keeps_the_last_entries_and_the_totals_of_all() {
        let shared = Shared::new(&SimulatedOptions::default(), Behaviour::default());
        let entry = Entry {
            sequence: 0,
            at_ms: 0,
            job_id: String::new(),
            attempt: String::new(),
            idempotency_key: String::new(),
            method: String::new(),
            path: String::new(),
            body_sha256: String::new(),
            behaviour: String::new(),
            accepted: false,
            executed: false,
            answered: false,
        };
        for _ in 0..LEDGER_ENTRIES_MAX + 5 {
            shared.enter(entry.clone());
        }
        let ledger = shared.ledger(None);
        assert_eq!((ledger.entries.len(), ledger.dropped), (LEDGER_ENTRIES_MAX, 5));
        assert_eq!((ledger.received, ledger.entries[0].sequence), (LEDGER_ENTRIES_MAX as u64 + 5, 6));
    }
}
