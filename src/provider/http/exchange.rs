//! One request handed to the network at most once, and what came back.
//!
//! The word on what was sent is the gate's (`connection.rs`) or, on a connection that calls share, the witness' (`h2.rs`), never an
//! error's kind. What a complete answer *means* is not decided
//! here but in `judge.rs`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::Body;
use http_body_util::{BodyExt as _, Full};

use super::connection::{Connected, Connection, Connector, Left, Pool};
use super::h2;
use super::stream::Listener;
use crate::config::Timeouts;
use crate::failpoint::failpoint;
use crate::provider::{Fence, Telling, Told};

/// Most memory that is reserved on the word of a `content-length`; the rest as it comes.
const BODY_RESERVE_BYTES_MAX: usize = 1 << 20;

/// Where a connection came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reused {
    Yes,
    No,
}

/// Whether a call that is over listens for a late answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Late {
    Listens,
    GivesUp,
}

/// Why there is no head of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// The connection, or this request's part in it.
    Connection,
    /// The time for it.
    Patience,
}

/// What came of a request.
pub(super) enum Exchanged {
    /// Not one byte of it left.
    NotSent {
        /// Why.
        reason: String,
    },
    /// It may have arrived, and there is no complete answer.
    Lost {
        /// Why.
        reason: String,
    },
    /// A complete answer, as its framing says.
    Answered {
        /// Status and headers.
        head: http::response::Parts,
        /// The whole body.
        body: Vec<u8>,
    },
}

/// How an exchange went, for whoever may begin another one.
enum Tried {
    /// It is over.
    Over(Exchanged),
    /// Nothing left: its connection had ended before.
    Nothing {
        /// Why.
        reason: String,
    },
}

/// Requests to one origin.
pub(super) struct Exchange {
    connector: Connector,
    /// Idle connections of HTTP/1.1.
    pool: Pool,
    /// The connection of HTTP/2, if the provider speaks it.
    live: h2::Live,
    timeouts: Timeouts,
    result_bytes_max: usize,
}

impl Exchange {
    pub(super) fn new(connector: Connector, timeouts: Timeouts, result_bytes_max: usize) -> Self {
        Exchange { connector, pool: Pool::default(), live: h2::Live::default(), timeouts, result_bytes_max }
    }

    /// Sends a request and reads its whole answer, which the listener hears as it comes.
    ///
    /// Once its time is over though something may have left, that is told, and a late answer is listened for.
    pub(super) async fn send(
        &self,
        request: &http::Request<Full<Bytes>>,
        fence: &Fence,
        deadline: Instant,
        listener: &mut Listener<'_>,
    ) -> Exchanged {
        let mut clock = Clock::start(self.timeouts, deadline);
        let mut kept = self.kept(&clock).await;
        loop {
            // A kept connection that turns out to be closed before a byte was handed to it is replaced by a new one, once.
            let (connection, reused) = match kept.take() {
                Some(connection) => (connection, Reused::Yes),
                None => match self.connect(&clock).await {
                    Ok(connected) => connected,
                    Err(reason) => return Exchanged::NotSent { reason },
                },
            };
            failpoint!("call.connected");
            let tried = match connection {
                Connected::Alone(connection) => self.alone(connection, request, fence, &mut clock, listener).await,
                Connected::Beside(connection) => self.beside(&connection, request, fence, &mut clock, listener).await,
            };
            match (tried, reused) {
                (Tried::Over(exchanged), Reused::Yes | Reused::No) => return exchanged,
                (Tried::Nothing { .. }, Reused::Yes) => {}
                (Tried::Nothing { reason }, Reused::No) => {
                    let reason = fence.check().map_or_else(|fenced| fenced.to_string(), |()| reason);
                    return Exchanged::NotSent { reason };
                }
            }
        }
    }

    /// A connection that is there, if there is one.
    async fn kept(&self, clock: &Clock) -> Option<Connected> {
        match clock.connect(self.live.get()).await {
            Ok(Some(connection)) => Some(Connected::Beside(connection)),
            Ok(None) | Err(_) => self.pool.take().await.map(Connected::Alone),
        }
    }

    /// A new connection; or, of HTTP/2, one that another call has just made.
    async fn connect(&self, clock: &Clock) -> Result<(Connected, Reused), String> {
        let connecting = async {
            // One at a time, where calls may share what it makes.
            let turn = self.connector.may_share().then(|| self.live.turn.lock());
            let _turn = match turn {
                Some(turn) => Some(turn.await),
                None => None,
            };
            if let Some(connection) = self.live.get().await {
                return Ok((Connected::Beside(connection), Reused::Yes));
            }
            let connected = self.connector.connect().await?;
            if let Connected::Beside(connection) = &connected {
                self.live.put(connection);
            }
            Ok((connected, Reused::No))
        };
        clock.connect(connecting).await?.map_err(|error: String| format!("connect: {error}"))
    }

    /// Sends a request on a connection that is its own meanwhile.
    async fn alone(
        &self,
        mut connection: Connection,
        request: &http::Request<Full<Bytes>>,
        fence: &Fence,
        clock: &mut Clock,
        listener: &mut Listener<'_>,
    ) -> Tried {
        if let Err(reason) = passed(fence, clock).await {
            return Tried::Over(Exchanged::NotSent { reason });
        }
        connection.gate.arm(fence.clone());
        let mut sending = std::pin::pin!(connection.sender.send_request(request.clone()));
        let mut head = clock.first_byte(&mut sending).await;
        if let Err(timeout) = &head
            && connection.gate.left() == Left::MaybeSome
            && clock.linger(listener.told(), timeout).await == Late::Listens
        {
            head = clock.first_byte(sending).await;
        }
        let reason = match head {
            Ok(Ok(head)) => {
                let (head, body) = head.into_parts();
                let exchanged = self.receive(head, body, clock, listener).await;
                if let Exchanged::Answered { .. } = exchanged {
                    if connection.gate.shut() == Left::Nothing {
                        let reason = "reset: the provider answered before it was asked".to_owned();
                        return Tried::Over(Exchanged::NotSent { reason });
                    }
                    self.pool.put(connection);
                }
                return Tried::Over(exchanged);
            }
            Ok(Err(error)) => lost(&error),
            Err(timeout) => timeout,
        };
        match connection.gate.shut() {
            Left::MaybeSome => Tried::Over(Exchanged::Lost { reason }),
            Left::Nothing => Tried::Nothing { reason },
        }
    }

    /// Sends a request on a connection that it shares.
    async fn beside(
        &self,
        connection: &Arc<h2::Connection>,
        request: &http::Request<Full<Bytes>>,
        fence: &Fence,
        clock: &mut Clock,
        listener: &mut Listener<'_>,
    ) -> Tried {
        let not_sent = |reason: String| Tried::Over(Exchanged::NotSent { reason });
        let place = match clock.rest(connection.place()).await {
            Ok(Some(place)) => place,
            Ok(None) => {
                self.live.retire(connection);
                return Tried::Nothing { reason: "http2: the connection takes no more requests".to_owned() };
            }
            Err(timeout) => return not_sent(format!("{timeout}, waiting for room among the provider's streams")),
        };
        if let Err(reason) = passed(fence, clock).await {
            return not_sent(reason);
        }
        let (request, body) = match h2::request(request, &self.connector.origin).await {
            Ok(request) => request,
            Err(reason) => return not_sent(reason),
        };
        let mut asked = match place.ask(request, body, fence) {
            Ok(asked) => asked,
            Err(reason) => {
                self.live.retire(connection);
                return Tried::Nothing { reason };
            }
        };
        let mut head = clock.first_byte(asked.head()).await;
        // What has not left by now never will; of what has, an answer may still come.
        if let Err(timeout) = &head
            && asked.give_up() == h2::Fate::MaybeArrived
            && clock.linger(listener.told(), timeout).await == Late::Listens
        {
            head = clock.first_byte(asked.head()).await;
        }
        let (reason, ended) = match head {
            Ok(Ok((head, body))) => {
                let body = asked.body(&head, body);
                return Tried::Over(self.receive(head, body, clock, listener).await);
            }
            Ok(Err(reason)) => (reason, Ended::Connection),
            Err(timeout) => (timeout, Ended::Patience),
        };
        match asked.give_up() {
            h2::Fate::NeverLeft => match fence.check() {
                Ok(()) => {
                    if ended == Ended::Connection {
                        self.live.retire(connection);
                    }
                    Tried::Nothing { reason }
                }
                Err(fenced) => not_sent(fenced.to_string()),
            },
            h2::Fate::Refused => not_sent("refused: the provider did not look at the stream (REFUSED_STREAM)".to_owned()),
            h2::Fate::GoneAway => not_sent("refused: the provider went away before it looked at the stream (GOAWAY)".to_owned()),
            h2::Fate::MaybeArrived => Tried::Over(Exchanged::Lost { reason }),
        }
    }

    /// Reads the answer's body.
    async fn receive(
        &self,
        head: http::response::Parts,
        mut body: impl Body<Data = Bytes> + Unpin,
        clock: &mut Clock,
        listener: &mut Listener<'_>,
    ) -> Exchanged {
        let declared = body.size_hint().lower();
        let mut bytes = Vec::with_capacity(usize::try_from(declared).unwrap_or(usize::MAX).min(BODY_RESERVE_BYTES_MAX));
        if declared > self.result_bytes_max as u64 {
            return Exchanged::Lost { reason: self.too_large(head.status) };
        }
        listener.head(&head).await;
        loop {
            let frame = match clock.idle(body.frame()).await {
                Ok(None) => break,
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(_))) => {
                    let reason = format!("truncated: {}, then {} bytes of a longer body", head.status.as_u16(), bytes.len());
                    return Exchanged::Lost { reason };
                }
                Err(reason) => match clock.linger(listener.told(), &reason).await {
                    Late::Listens => continue,
                    Late::GivesUp => return Exchanged::Lost { reason },
                },
            };
            // What is not data is trailers; they say nothing that is kept.
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > self.result_bytes_max {
                return Exchanged::Lost { reason: self.too_large(head.status) };
            }
            listener.part(data, &mut bytes).await;
        }
        listener.end(&mut bytes);
        Exchanged::Answered { head, body: bytes }
    }

    fn too_large(&self, status: http::StatusCode) -> String {
        format!("too_large: {} with a body over {} bytes", status.as_u16(), self.result_bytes_max)
    }
}

/// Waits until a call's fence lets it pass.
async fn passed(fence: &Fence, clock: &Clock) -> Result<(), String> {
    match clock.rest(fence.pass()).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(fenced)) => Err(fenced.to_string()),
        Err(timeout) => Err(format!("{timeout}, waiting for leave to send")),
    }
}

/// Says in our own words how a connection was lost before the answer's head.
fn lost(error: &hyper::Error) -> String {
    let what = if error.is_parse() {
        "malformed: the answer's head is too large or not HTTP/1.1"
    } else {
        "reset: the connection ended before the answer's head"
    };
    what.to_owned()
}

/// The limits of one call's phases. Each phase ends at its own limit or at the call's, whichever comes first.
struct Clock {
    timeouts: Timeouts,
    began: Instant,
    over: Instant,
    late: bool,
}

impl Clock {
    fn start(timeouts: Timeouts, deadline: Instant) -> Self {
        let began = Instant::now();
        let over = began.checked_add(timeouts.total).map_or(deadline, |total| total.min(deadline));
        Clock { timeouts, began, over, late: false }
    }

    /// The time is over, and what was sent may have happened. Tells it, once, and gives the answer more time if anybody listens.
    async fn linger(&mut self, told: &Telling, reason: &str) -> Late {
        if self.late || self.timeouts.linger.is_zero() || !told.is_heard() {
            return Late::GivesUp;
        }
        told.tell(Told::Overdue { reason: reason.to_owned() }).await;
        self.late = true;
        let now = Instant::now();
        self.over = now.checked_add(self.timeouts.linger).unwrap_or(now);
        (self.timeouts.first_byte, self.timeouts.idle) = (self.timeouts.linger, self.timeouts.linger);
        Late::Listens
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.over
    }

    async fn connect<F: Future>(&self, phase: F) -> Result<F::Output, String> {
        self.limit("connect", self.timeouts.connect, phase).await
    }

    async fn first_byte<F: Future>(&self, phase: F) -> Result<F::Output, String> {
        self.limit("first_byte", self.timeouts.first_byte, phase).await
    }

    async fn idle<F: Future>(&self, phase: F) -> Result<F::Output, String> {
        self.limit("idle", self.timeouts.idle, phase).await
    }

    /// For whatever may take all that is left.
    async fn rest<F: Future>(&self, phase: F) -> Result<F::Output, String> {
        self.limit("total", Duration::MAX, phase).await
    }

    async fn limit<F: Future>(&self, name: &str, limit: Duration, phase: F) -> Result<F::Output, String> {
        let own = Instant::now().checked_add(limit).filter(|own| *own < self.over);
        let end = own.unwrap_or(self.over);
        // A call whose time is over does not begin another phase, not even one that would end at once.
        if self.is_over() {
            return Err(self.total());
        }
        match tokio::time::timeout_at(end.into(), phase).await {
            Ok(output) => Ok(output),
            Err(_) if own.is_some() => Err(format!("timeout: {name} after {limit:?}")),
            Err(_) => Err(self.total()),
        }
    }

    fn total(&self) -> String {
        let limit = Duration::from_millis(u64::try_from((self.over - self.began).as_millis()).unwrap_or(u64::MAX));
        format!("timeout: total after {limit:?}")
    }
}
