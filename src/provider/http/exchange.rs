//! One request handed to the network at most once, and what came back.
//!
//! The word on what was sent is the gate's (`connection.rs`), never an error's kind. What a complete answer *means* is not decided
//! here but in `judge.rs`.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::Body as _;
use http_body_util::{BodyExt as _, Full};

use super::connection::{Connection, Connector, Left, Pool};
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

/// Requests to one origin.
pub(super) struct Exchange {
    connector: Connector,
    pool: Pool,
    timeouts: Timeouts,
    result_bytes_max: usize,
}

impl Exchange {
    pub(super) fn new(connector: Connector, timeouts: Timeouts, result_bytes_max: usize) -> Self {
        Exchange { connector, pool: Pool::default(), timeouts, result_bytes_max }
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
        let mut idle = self.pool.take().await;
        loop {
            // An idle connection that turns out to be closed before a byte was handed to it is replaced by a new one, once.
            let (mut connection, reused) = match idle.take() {
                Some(connection) => (connection, Reused::Yes),
                None => match self.connect(&clock).await {
                    Ok(connection) => (connection, Reused::No),
                    Err(reason) => return Exchanged::NotSent { reason },
                },
            };
            failpoint!("call.connected");
            if let Err(fenced) = fence.check() {
                return Exchanged::NotSent { reason: fenced.to_string() };
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
                Ok(Ok(head)) => return self.receive(connection, head, clock, listener).await,
                Ok(Err(error)) => lost(&error),
                Err(timeout) => timeout,
            };
            match (connection.gate.shut(), reused) {
                (Left::MaybeSome, Reused::Yes | Reused::No) => return Exchanged::Lost { reason },
                (Left::Nothing, Reused::Yes) => {}
                (Left::Nothing, Reused::No) => {
                    let reason = fence.check().map_or_else(|fenced| fenced.to_string(), |()| reason);
                    return Exchanged::NotSent { reason };
                }
            }
        }
    }

    async fn connect(&self, clock: &Clock) -> Result<Connection, String> {
        clock.connect(self.connector.connect()).await?.map_err(|error| format!("connect: {error}"))
    }

    /// Reads the answer's body.
    async fn receive(
        &self,
        connection: Connection,
        head: http::Response<hyper::body::Incoming>,
        mut clock: Clock,
        listener: &mut Listener<'_>,
    ) -> Exchanged {
        let (head, mut body) = head.into_parts();
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
                Err(reason) if connection.gate.left() == Left::Nothing => return Exchanged::Lost { reason },
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
        if connection.gate.shut() == Left::Nothing {
            return Exchanged::NotSent { reason: "reset: the provider answered before it was asked".to_owned() };
        }
        self.pool.put(connection);
        Exchanged::Answered { head, body: bytes }
    }

    fn too_large(&self, status: http::StatusCode) -> String {
        format!("too_large: {} with a body over {} bytes", status.as_u16(), self.result_bytes_max)
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
