//! Requests beside each other on one HTTP/2 connection, each with evidence of its own.
//!
//! What became of a request is the word of the `Witness` (`h2/witness.rs`), which has seen the frames, never the kind of the
//! library's error: a request whose first frame never left is "not sent", so is one that the provider refused
//! (`REFUSED_STREAM`) or that lies above the last stream of its `GOAWAY`. Anything else that went wrong after the first frame had
//! left is unknown.
//!
//! A request waits for room on the connection *outside* the library, with its fence still to be asked. One connection takes new
//! calls; others are those that are going away, for as long as a call is on them.
//!
//! Deliberately not here: any sending again, pushes, priorities.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use ::h2::client::{Builder, ResponseFuture, SendRequest};
use ::h2::{Ping, PingPong, Reason, RecvStream, SendStream};
use bytes::Bytes;
use http::header::{self, HeaderMap};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Full};
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

use super::connection::{HEAD_BYTES_MAX, HEADERS_MAX};
use crate::provider::Fence;

mod witness;

pub(super) use self::witness::Fate;
use self::witness::{Wire, Witness};

/// How much of one answer, and of all answers together, may be on its way and not yet read.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// As above, of all answers of a connection: who reads one slowly does not stop the others.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// How much of requests' bodies is in the library at once: the rest waits in the request.
const SEND_BUFFER_BYTES_MAX: usize = 256 << 10;
/// After how much silence of a connection with calls on it the provider is asked whether it is there.
const PING_AFTER: Duration = Duration::from_secs(10);
/// How long the answer may take.
const PING_ANSWER_MAX: Duration = Duration::from_secs(10);
/// After how much silence a connection is asked before it takes another call, as HTTP/1.1's are given up by then.
const QUIET_MAX: Duration = Duration::from_secs(4);
/// How long that answer may take; then there is a new connection.
const PROBE_ANSWER_MAX: Duration = Duration::from_millis(500);
/// How long a connection may lie idle. Below the minute after which common servers close.
const IDLE_LIFETIME: Duration = Duration::from_secs(50);

/// A request as HTTP/2 has it: its target whole, and no header of the connection. Its body apart.
pub(super) async fn request(
    request: &http::Request<Full<Bytes>>,
    origin: &http::Uri,
) -> Result<(http::Request<()>, Bytes), String> {
    let mut parts = origin.clone().into_parts();
    parts.path_and_query = request.uri().path_and_query().cloned();
    let uri = http::Uri::from_parts(parts).map_err(|_| "invalid: the rendered url is no url".to_owned())?;
    let mut asked = http::Request::new(());
    *asked.method_mut() = request.method().clone();
    *asked.uri_mut() = uri;
    *asked.version_mut() = http::Version::HTTP_2;
    *asked.headers_mut() = request.headers().clone();
    // It is in the target.
    asked.headers_mut().remove(header::HOST);
    let body = match request.body().clone().collect().await {
        Ok(body) => body.to_bytes(),
        Err(never) => match never {},
    };
    Ok((asked, body))
}

/// A connection. Dropping it closes it.
pub(super) struct Connection {
    /// Its lock is held from the announcement of a stream to its request: the numbers follow one another.
    opener: Mutex<Opener>,
    witness: Witness,
    /// Asks for a ping.
    probe: Arc<Notify>,
    _driver: AbortOnDropHandle<()>,
}

struct Opener {
    sender: SendRequest<Bytes>,
    next: u32,
}

/// The highest number of a stream.
const STREAM_ID_MAX: u32 = u32::MAX >> 1;

impl Connection {
    /// Speaks HTTP/2 on a stream, and waits for the provider's settings. The error is in words that hold nothing from a request.
    pub(super) async fn open(stream: MaybeHttpsStream<TokioIo<TcpStream>>) -> Result<Arc<Self>, String> {
        let witness = Witness::new();
        let wire = Wire::new(stream, witness.clone());
        let (sender, connection) = Builder::new()
            .enable_push(false)
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_header_list_size(u32::try_from(HEAD_BYTES_MAX).expect("it is far below"))
            .max_send_buffer_size(SEND_BUFFER_BYTES_MAX)
            .handshake::<_, Bytes>(wire)
            .await
            .map_err(|error| format!("http2: {error}"))?;
        let probe = Arc::new(Notify::new());
        let driver = tokio::spawn(drive(connection, witness.clone(), Arc::clone(&probe)));
        let opener = Mutex::new(Opener { sender, next: 1 });
        let connection = Connection { opener, witness, probe, _driver: AbortOnDropHandle::new(driver) };
        if connection.witness.settled().await {
            Ok(Arc::new(connection))
        } else {
            Err("http2: the connection ended before the provider's settings came".to_owned())
        }
    }

    /// Whether it takes another call, if there is room.
    fn is_open(&self) -> bool {
        self.witness.is_open() && (self.witness.is_busy() || self.witness.quiet() < IDLE_LIFETIME)
    }

    /// Whether the provider is still there: asked, if it has been silent.
    async fn is_alive(&self) -> bool {
        let asked = Instant::now();
        if self.witness.quiet() < QUIET_MAX {
            return true;
        }
        self.probe.notify_one();
        matches!(tokio::time::timeout(PROBE_ANSWER_MAX, self.witness.heard_after(asked)).await, Ok(true))
    }

    /// Waits for room for a call; `None` if it takes no more.
    pub(super) async fn place(self: &Arc<Self>) -> Option<Place> {
        self.witness.begin().await.then(|| Place { connection: Arc::clone(self), id: None })
    }
}

/// Drives a connection until it ends, and asks whether the provider is there.
async fn drive(mut connection: ::h2::client::Connection<Wire, Bytes>, witness: Witness, probe: Arc<Notify>) {
    let pings = connection.ping_pong().expect("it is asked for once");
    tokio::select! {
        // How it ends is told to the calls on it.
        _ = connection => {}
        () = keep_alive(pings, &witness, &probe) => {}
    }
    witness.end();
}

/// Ends when the provider does not answer any more.
async fn keep_alive(mut pings: PingPong, witness: &Witness, probe: &Notify) {
    loop {
        let wanted = tokio::select! {
            () = probe.notified() => true,
            () = tokio::time::sleep(PING_AFTER) => witness.is_busy() && witness.quiet() >= PING_AFTER,
        };
        if wanted && !matches!(tokio::time::timeout(PING_ANSWER_MAX, pings.ping(Ping::opaque())).await, Ok(Ok(_))) {
            return;
        }
    }
}

/// Room for one call on a connection, and then its stream. Dropping it ends the stream.
pub(super) struct Place {
    connection: Arc<Connection>,
    id: Option<u32>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            // A call that is dropped has been given up: what has not left by now never will.
            self.connection.witness.give_up(id);
        }
        self.connection.witness.over(self.id);
    }
}

/// A request under way.
pub(super) struct Asked {
    place: Place,
    id: u32,
    response: ResponseFuture,
    upload: Option<Upload>,
    withheld: Arc<Notify>,
}

impl Place {
    /// Hands a request to the connection. Its first frame leaves when the fence allows it, or never.
    pub(super) fn ask(mut self, request: http::Request<()>, body: Bytes, fence: &Fence) -> Result<Asked, String> {
        let connection = Arc::clone(&self.connection);
        let mut opener = connection.opener.lock().unwrap_or_else(PoisonError::into_inner);
        let id = opener.next;
        if id > STREAM_ID_MAX {
            connection.witness.end();
            return Err("http2: the connection has had all its streams".to_owned());
        }
        let withheld = connection.witness.announce(id, fence.clone());
        self.id = Some(id);
        // Of a clone: one handle would refuse a second request while the first waits to be written.
        let opened = opener.sender.clone().send_request(request, body.is_empty());
        let (response, stream) = match opened {
            Ok(opened) if opened.0.stream_id().as_u32() == id => opened,
            Ok(_) => {
                connection.witness.end();
                return Err("http2: a stream has another number than announced".to_owned());
            }
            Err(error) => {
                // Whether it has used up the number is not known.
                connection.witness.end();
                return Err(format!("http2: {error}"));
            }
        };
        opener.next += 2;
        drop(opener);
        let upload = (!body.is_empty()).then_some(Upload { stream, rest: body });
        Ok(Asked { place: self, id, response, upload, withheld })
    }
}

impl Asked {
    /// Waits for the answer's head, sending the body meanwhile. The error is in our own words.
    pub(super) async fn head(&mut self) -> Result<(http::response::Parts, RecvStream), String> {
        let Asked { response, upload, withheld, .. } = self;
        let uploading = std::future::poll_fn(|cx| {
            if let Some(sending) = upload
                && sending.poll(cx).is_ready()
            {
                *upload = None;
            }
            // How it went is told by the answer, or by there being none.
            Poll::<Infallible>::Pending
        });
        let head = tokio::select! {
            biased;
            head = response => head,
            () = withheld.notified() => return Err("fenced".to_owned()),
            never = uploading => match never {},
        };
        let head = head.map_err(|error| self.lost(&error))?;
        let (head, body) = head.into_parts();
        if head.headers.len() > HEADERS_MAX {
            return Err(format!("malformed: the answer has {} headers; the limit is {HEADERS_MAX}", head.headers.len()));
        }
        Ok((head, body))
    }

    /// What may have become of it, now that it is given up.
    pub(super) fn give_up(&self) -> Fate {
        self.place.connection.witness.give_up(self.id)
    }

    /// The answer's body, for whoever reads it to its end.
    pub(super) fn body(self, head: &http::response::Parts, body: RecvStream) -> Answer {
        let declared = if body.is_end_stream() { 0 } else { content_length(&head.headers) };
        Answer { asked: self, body, part: Part::Data, declared }
    }

    fn lost(&self, error: &::h2::Error) -> String {
        match self.place.connection.witness.reset_code(self.id) {
            Some(code) => {
                format!("reset: the provider reset the stream before the answer's head ({})", Reason::from(code).description())
            }
            None if error.is_io() => "reset: the connection ended before the answer's head".to_owned(),
            None => "malformed: the answer's head is too large or not HTTP/2, or the connection ended before it".to_owned(),
        }
    }
}

fn content_length(headers: &HeaderMap) -> u64 {
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    declared.unwrap_or_default()
}

/// A request's body on its way, as the provider's window allows.
struct Upload {
    stream: SendStream<Bytes>,
    rest: Bytes,
}

impl Upload {
    /// Ready when all of it is handed over, or none of it will be any more.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while !self.rest.is_empty() {
            self.stream.reserve_capacity(self.rest.len());
            let room = match ready!(self.stream.poll_capacity(cx)) {
                Some(Ok(room)) => room,
                Some(Err(_)) | None => return Poll::Ready(()),
            };
            let part = self.rest.split_to(room.min(self.rest.len()));
            let last = self.rest.is_empty();
            if part.is_empty() && !last {
                continue;
            }
            if self.stream.send_data(part, last).is_err() {
                return Poll::Ready(());
            }
        }
        Poll::Ready(())
    }
}

/// An answer's body. Complete only if the provider said so: a stream that ends in any other way is an error.
pub(super) struct Answer {
    asked: Asked,
    body: RecvStream,
    part: Part,
    declared: u64,
}

#[derive(Clone, Copy)]
enum Part {
    Data,
    Trailers,
    Done,
}

/// An answer broke off.
#[derive(Clone, Copy, Debug)]
pub(super) struct BrokenOff;

impl Answer {
    /// A provider that has answered need not read the rest of the request, and says so with an error that is none (RFC 9113, 8.1).
    fn ending(&self, error: &::h2::Error) -> Option<Result<Frame<Bytes>, BrokenOff>> {
        let whole = self.asked.place.connection.witness.has_whole_answer(self.asked.id);
        if whole && error.reason() == Some(Reason::NO_ERROR) { None } else { Some(Err(BrokenOff)) }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let this = &mut *self;
        if let Some(upload) = &mut this.asked.upload
            && upload.poll(cx).is_ready()
        {
            this.asked.upload = None;
        }
        loop {
            match this.part {
                Part::Data => match ready!(this.body.poll_data(cx)) {
                    Some(Ok(data)) => {
                        // It fails only for a stream that is over.
                        let _ = this.body.flow_control().release_capacity(data.len());
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                    Some(Err(error)) => {
                        this.part = Part::Done;
                        return Poll::Ready(this.ending(&error));
                    }
                    None => this.part = Part::Trailers,
                },
                // They say nothing that is kept, but the answer is not complete without them.
                Part::Trailers => {
                    this.part = Part::Done;
                    match ready!(this.body.poll_trailers(cx)) {
                        Ok(_) => return Poll::Ready(None),
                        Err(error) => return Poll::Ready(this.ending(&error)),
                    }
                }
                Part::Done => return Poll::Ready(None),
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::new();
        hint.set_lower(self.declared);
        hint
    }
}

/// The one connection of a provider that takes new calls.
#[derive(Default)]
pub(super) struct Live {
    connection: Mutex<Option<Arc<Connection>>>,
    /// Who has it makes the next one; the others wait for that.
    pub(super) turn: tokio::sync::Mutex<()>,
}

impl Live {
    /// The connection, if it takes another call and the provider is still there.
    pub(super) async fn get(&self) -> Option<Arc<Connection>> {
        let connection = self.lock().clone()?;
        if connection.is_open() && connection.is_alive().await {
            return Some(connection);
        }
        self.retire(&connection);
        None
    }

    pub(super) fn put(&self, connection: &Arc<Connection>) {
        *self.lock() = Some(Arc::clone(connection));
    }

    /// Takes no more calls on a connection; those on it go on.
    pub(super) fn retire(&self, connection: &Arc<Connection>) {
        let mut live = self.lock();
        if live.as_ref().is_some_and(|live| Arc::ptr_eq(live, connection)) {
            *live = None;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<Connection>>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
