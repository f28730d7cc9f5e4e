//! Clicks in lines: read, checked a batch at a time and told while they still come.
//!
//! Batches are cut by their number of lines, never by what arrived together, so that the same lines are the same batches whatever
//! the network makes of them. Some are under way at once, and told in order; one that has a click in common with an earlier one
//! waits for it, so that of equal clicks the line that comes first counts. What is held of a request is bounded: a line, the ids of
//! a few batches, their verdicts. Who does not read is not read from.
//!
//! An answer is whole if its last line says `"done":true`, and nothing else ends so.

use std::collections::{HashSet, VecDeque};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use futures_util::stream::{self, FuturesOrdered};
use http::header::{self, HeaderValue};
use http_body_util::BodyExt as _;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{Batches, Counts, NDJSON, Word as _, Wrong, click_id, refused};
use crate::dedup::{ClickId, Dedup, DedupError, Verdict};
use crate::server::problem::{Kind, Problem};
use crate::server::{Activity, App, InFlight, body};

/// Lines of one batch: one call to each shard.
///
/// A client that sends the same lines again to a gateway of another version would be told of a conflict if this changed.
pub(super) const BATCH_LINES_MAX: usize = 1_000;
/// The longest line. Each request has so much of the memory for bodies.
const CLICK_LINE_BYTES_MAX: usize = 64 << 10;
/// Batches of one request that are under way at once.
const BATCHES_AT_ONCE_MAX: usize = 4;
/// Batches whose verdicts wait to be sent.
const TOLD_AHEAD_MAX: usize = 4;
/// What is still read, and thrown away, of a request whose answer is over: a client that sends on would else lose the end of it.
const REST_BYTES_MAX: usize = 1 << 20;
/// How long that is waited for.
const REST_WAIT_MAX: Duration = Duration::from_secs(2);

type Answered = Result<Vec<Verdict>, DedupError>;

/// What the request's task tells the answer.
enum Told {
    /// Verdicts.
    Lines(Bytes),
    /// The last line of an answer that is whole.
    Done(Bytes),
    /// Why no more comes, and the last line that says so.
    Refused { problem: Problem, line: Bytes },
}

/// An answer that ends without its last line is broken off. Nobody reads this: it closes the connection, or resets the stream.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the answer was broken off")]
struct BrokenOff;

/// Checks clicks in lines. The answer's head waits for the first batch: a problem before that has a status of its own.
pub(super) async fn check(
    app: Arc<App>,
    dedup: Dedup,
    batches: Batches,
    batch_lines: usize,
    body: Body,
    activity: Option<Arc<Activity>>,
) -> Result<Response, Problem> {
    let room = body::room(&app, CLICK_LINE_BYTES_MAX)?;
    let place = app.place()?;
    let (tell, mut told) = mpsc::channel(TOLD_AHEAD_MAX);
    let source = Lines {
        stream: dedup.stream().clone(),
        body,
        batch_lines,
        patience: app.options.body_timeout,
        arrived: Bytes::new(),
        line: Vec::new(),
        line_number: 1,
        clicks: 0,
        ids: Vec::new(),
        until: None,
        is_over: false,
    };
    let tasks = app.tasks.clone();
    let checking = Checking {
        app,
        dedup,
        batches,
        source,
        asked: 0,
        waiting: None,
        under_way: FuturesOrdered::new(),
        ids_under_way: VecDeque::new(),
        clicks: 0,
        counts: Counts::of::<Verdict>(),
    };
    tasks.spawn(async move {
        // Whoever waits for this request's clicks, or to be read by its client, is not idle.
        let in_flight = activity.as_ref().map(InFlight::begin);
        checking.run(tell).await;
        drop((room, place, in_flight));
    });
    let first = match told.recv().await {
        Some(Told::Refused { problem, .. }) => return Err(problem),
        Some(first) => first,
        None => return Err(Problem::new(Kind::Internal, "something broke here; the same request again may be answered")),
    };
    let lines = stream::unfold(Some((Some(first), told)), |state| async {
        let (first, mut told) = state?;
        let next = match first {
            Some(first) => Some(first),
            None => told.recv().await,
        };
        Some(match next {
            Some(Told::Lines(lines)) => (Ok(lines), Some((None, told))),
            Some(Told::Done(line) | Told::Refused { line, .. }) => (Ok(line), None),
            None => (Err(BrokenOff), None),
        })
    });
    let mut response = Body::from_stream(lines).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(NDJSON));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// Why the answer is not whole.
enum Cut {
    /// Nobody is there to be told.
    Gone,
    Because(Problem),
}

/// One request.
struct Checking {
    app: Arc<App>,
    dedup: Dedup,
    batches: Batches,
    source: Lines,
    /// How many batches were asked about.
    asked: u64,
    /// The batch that is read and not asked about yet.
    waiting: Option<Vec<ClickId>>,
    /// Tasks of their own, so that nobody holds a connection to Redis while he waits for his client.
    under_way: FuturesOrdered<JoinHandle<Answered>>,
    /// The clicks of each of them.
    ids_under_way: VecDeque<HashSet<ClickId>>,
    /// How many were told.
    clicks: u64,
    counts: Counts,
}

impl Checking {
    async fn run(mut self, tell: mpsc::Sender<Told>) {
        let age_max = self.app.options.connection_age_max;
        let stopping = self.app.stopping.clone();
        let checked = tokio::select! {
            biased;
            checked = self.check(&tell) => checked,
            () = tell.closed() => Err(Cut::Gone),
            () = stopping.cancelled() => {
                Err(Cut::Because(Problem::new(Kind::Stopping, "this gateway is stopping; the same request again meets another")))
            }
            () = tokio::time::sleep(age_max) => {
                let detail = format!("the request took longer than {age_max:?}, the limit; send what is left as another one");
                Err(Cut::Because(Problem::new(Kind::BodyTimeout, detail)))
            }
        };
        let last = match checked {
            Ok(()) => Told::Done(line(&json!({ "done": true, "clicks": self.clicks, "counts": self.counts.0 }))),
            Err(Cut::Gone) => return,
            Err(Cut::Because(problem)) => {
                let line = line(&json!({ "done": false, "clicks": self.clicks, "problem": problem.document() }));
                Told::Refused { problem, line }
            }
        };
        let read_max = self.app.options.answer_read_max;
        if tell.send_timeout(last, read_max).await.is_ok() {
            drop(tell);
            self.source.throw_away_the_rest().await;
        }
    }

    async fn check(&mut self, tell: &mpsc::Sender<Told>) -> Result<(), Cut> {
        let mut wrong = None;
        loop {
            self.ask();
            let reads = self.waiting.is_none() && !self.source.is_over;
            tokio::select! {
                biased;
                Some(answered) = self.under_way.next(), if !self.under_way.is_empty() => {
                    self.ids_under_way.pop_front();
                    self.tell(answered, tell).await?;
                }
                read = self.source.batch(), if reads => match read {
                    Ok(ids) if ids.is_empty() => {}
                    Ok(ids) => self.waiting = Some(ids),
                    // What came before it is told first.
                    Err(problem) => wrong = Some(problem),
                },
                else => return wrong.map_or(Ok(()), |problem| Err(Cut::Because(problem))),
            }
        }
    }

    /// Asks about the batch that waits, if it may be.
    fn ask(&mut self) {
        if self.under_way.len() >= BATCHES_AT_ONCE_MAX {
            return;
        }
        let Some(ids) = self.waiting.take() else { return };
        // Of equal clicks the first line counts: who came later waits until that is decided.
        if ids.iter().any(|id| self.ids_under_way.iter().any(|earlier| earlier.contains(id))) {
            self.waiting = Some(ids);
            return;
        }
        self.ids_under_way.push_back(ids.iter().copied().collect());
        let (dedup, token) = (self.dedup.clone(), self.batches.token(self.asked));
        self.asked += 1;
        self.under_way.push_back(self.app.tasks.spawn(async move { dedup.check(&ids, token).await }));
    }

    /// Tells the verdicts of the oldest batch.
    async fn tell(&mut self, answered: Result<Answered, tokio::task::JoinError>, tell: &mpsc::Sender<Told>) -> Result<(), Cut> {
        let answered = answered.map_err(|error| {
            tracing::error!(%error, "a batch of clicks broke");
            Cut::Because(Problem::new(Kind::Internal, "something broke here; the same request again may be answered"))
        })?;
        let verdicts =
            answered.map_err(|error| Cut::Because(refused(&self.app, &self.dedup, error).member("index", self.clicks)))?;
        let mut lines = String::with_capacity(verdicts.len() * 40);
        for (index, verdict) in (self.clicks..).zip(&verdicts) {
            writeln!(lines, "{{\"index\":{index},\"verdict\":\"{}\"}}", verdict.word()).expect("a string takes every write");
        }
        let began = Instant::now();
        let sent = tell.send_timeout(Told::Lines(lines.into()), self.app.options.answer_read_max).await;
        // Meanwhile nothing was read: that is not the sender's slowness.
        self.source.until = self.source.until.map(|until| until + began.elapsed());
        sent.map_err(|_| Cut::Gone)?;
        self.clicks += verdicts.len() as u64;
        verdicts.iter().for_each(|verdict| self.counts.add(verdict.word()));
        Ok(())
    }
}

fn line(value: &serde_json::Value) -> Bytes {
    format!("{value}\n").into()
}

/// The clicks of a body, as they come.
struct Lines {
    stream: crate::dedup::Stream,
    body: Body,
    batch_lines: usize,
    /// How long a batch may take to come.
    patience: Duration,
    /// What of the last part of the body has not been looked at.
    arrived: Bytes,
    /// What is there of the line that is not complete.
    line: Vec<u8>,
    /// Its number, from 1; lines without a click count too.
    line_number: u64,
    /// How many clicks were read.
    clicks: u64,
    /// Those of the batch that is not complete.
    ids: Vec<ClickId>,
    /// Until when the batch must be complete.
    until: Option<Instant>,
    /// Nothing more is read: it has ended, or something was wrong with it.
    is_over: bool,
}

impl Lines {
    /// The next batch; an empty one at the end. It may be dropped and asked for again: nothing is lost.
    async fn batch(&mut self) -> Result<Vec<ClickId>, Problem> {
        let read = self.read_batch().await;
        self.is_over |= read.is_err();
        read
    }

    async fn read_batch(&mut self) -> Result<Vec<ClickId>, Problem> {
        let until = *self.until.get_or_insert_with(|| Instant::now() + self.patience);
        loop {
            while let Some(end) = self.arrived.iter().position(|byte| *byte == b'\n') {
                let part = self.arrived.split_to(end + 1);
                self.lengthen(&part[..end])?;
                self.end_line()?;
                if self.ids.len() == self.batch_lines {
                    return Ok(self.take());
                }
            }
            let part = std::mem::take(&mut self.arrived);
            self.lengthen(&part)?;
            match tokio::time::timeout_at(until, self.body.frame()).await {
                // What is not data is trailers; nothing here reads them.
                Ok(Some(Ok(frame))) => self.arrived = frame.into_data().unwrap_or_default(),
                Ok(None) => {
                    self.end_line()?;
                    self.is_over = true;
                    return Ok(self.take());
                }
                Ok(Some(Err(_))) => return Err(Problem::new(Kind::RequestInvalid, "the body broke off")),
                Err(_) => {
                    let (has, wants, limit_ms) = (self.ids.len(), self.batch_lines, self.patience.as_millis());
                    let detail =
                        format!("{has} of {wants} lines came in {limit_ms} ms, the limit; send smaller batches (batch=N)");
                    return Err(Problem::new(Kind::BodyTimeout, detail).member("line", self.line_number));
                }
            }
        }
    }

    fn take(&mut self) -> Vec<ClickId> {
        self.until = None;
        std::mem::take(&mut self.ids)
    }

    fn lengthen(&mut self, part: &[u8]) -> Result<(), Problem> {
        if self.line.len() + part.len() > CLICK_LINE_BYTES_MAX {
            let number = self.line_number;
            let detail = format!("line {number} has more than {CLICK_LINE_BYTES_MAX} bytes, the limit");
            return Err(Problem::new(Kind::BodyTooLarge, detail).member("limit", CLICK_LINE_BYTES_MAX).member("line", number));
        }
        self.line.extend_from_slice(part);
        Ok(())
    }

    /// A click, unless the line is blank.
    fn end_line(&mut self) -> Result<(), Problem> {
        if !self.line.iter().all(u8::is_ascii_whitespace) {
            let id = click_id(&self.stream, &self.line).map_err(|wrong: Wrong| {
                let place = format!("line {}", self.line_number);
                wrong.problem(&self.stream, &place).member("line", self.line_number).member("index", self.clicks)
            })?;
            self.ids.push(id);
            self.clicks += 1;
        }
        self.line.clear();
        self.line_number += 1;
        Ok(())
    }

    async fn throw_away_the_rest(mut self) {
        let mut bytes = 0;
        let rest = async {
            while let Some(Ok(frame)) = self.body.frame().await {
                bytes += frame.into_data().map_or(0, |data| data.len());
                if bytes > REST_BYTES_MAX {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(REST_WAIT_MAX, rest).await;
    }
}
