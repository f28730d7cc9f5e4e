//! What is known of each stream of an HTTP/2 connection, from the frames that went into the socket and came out of it.
//!
//! The library above decides which frame it wants to write; the [`Wire`] decides, frame by frame and at the moment of the write,
//! whether a request's first frame may leave: only while its call has not been given up and its fence allows it. What may not
//! leave is swallowed, with everything after it on its stream, and the other streams go on. That needs blocks of headers that do
//! not depend on those before them, so the table of headers is kept at size 0: a peer's setting for it is changed on its way in.
//!
//! A stream's number is announced before the library is asked for it: a frame that nobody announced breaks the connection.
//!
//! Deliberately not here: what follows from what is known (`h2.rs`).

use std::collections::{HashMap, HashSet};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf as _, BytesMut};
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::failpoint::failpoint;
use crate::provider::Fence;

/// What every connection of a client begins with (RFC 9113, 3.4).
const PREFACE_BYTES: usize = 24;
const HEAD_BYTES: usize = 9;
/// Largest frame of settings that is read: as large as any frame may be that we have not agreed to.
const SETTINGS_BYTES_MAX: usize = 16 << 10;
/// How much is read at once.
const READ_BYTES_MAX: usize = 16 << 10;
/// Most streams of one connection that were given up before they left. Beyond, it takes no more calls.
const WITHHELD_MAX: usize = 1000;

/// How often a request waits for what there is to read. More often than a runtime runs tasks between two looks at its sockets; and
/// it ends, because a library that wants to write before it reads on would wait for ever.
const DEFERRED_MAX: u32 = 200;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const FLAG_END_STREAM: u8 = 1;
const FLAG_ACK: u8 = 1;
const SETTING_HEADER_TABLE_SIZE: u16 = 1;
const SETTING_STREAMS: u16 = 3;

/// What may have become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::provider::http) enum Fate {
    /// Not one byte of it left, and none will.
    NeverLeft,
    /// It left, and the provider says that it did nothing with it (RFC 9113, 8.7).
    Refused,
    /// It left, and the provider said that it takes no stream so high (RFC 9113, 6.8).
    GoneAway,
    /// It may have arrived.
    MaybeArrived,
}

/// What one connection's frames have told. Cheap to clone.
#[derive(Clone)]
pub(super) struct Witness(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Something changed that decides whether a stream can begin: a stream ended, the peer's limit, the connection's end.
    room: Notify,
    /// Something was read.
    heard: Notify,
}

struct State {
    streams: HashMap<u32, Stream>,
    /// Streams that must never be seen by the peer.
    withheld: HashSet<u32>,
    /// How many calls are at the peer, or on their way.
    begun: usize,
    /// The peer's limit for that; none until its settings came.
    streams_max: Option<u32>,
    /// The highest stream that the peer will look at, once it said that it goes away.
    last: Option<u32>,
    ended: bool,
    /// A part of a body was swallowed: the library counts it against a window that the peer will never give back.
    leaks: bool,
    heard_at: Instant,
    /// A block of headers must leave before one may be left out: it tells the peer of the table's size.
    owes_a_block: bool,
}

struct Stream {
    stage: Stage,
    /// The code that the peer reset it with.
    reset: Option<u32>,
    /// The peer's last frame on it has come.
    ended: bool,
    /// Told when it will never leave.
    withheld: Arc<Notify>,
}

enum Stage {
    /// May leave while its fence allows it.
    Waiting(Fence),
    Left,
    Withheld,
}

/// RST_STREAM's code for "not processed".
const REFUSED_STREAM: u32 = 7;

impl Witness {
    pub(super) fn new() -> Self {
        let state = State {
            streams: HashMap::new(),
            withheld: HashSet::new(),
            begun: 0,
            streams_max: None,
            last: None,
            ended: false,
            leaks: false,
            heard_at: Instant::now(),
            owes_a_block: true,
        };
        Witness(Arc::new(Shared { state: Mutex::new(state), room: Notify::new(), heard: Notify::new() }))
    }

    /// Waits until the peer's first settings came; `false` if the connection ended before.
    pub(super) async fn settled(&self) -> bool {
        self.wait_for(&self.0.room, |state| match state.streams_max {
            Some(_) => Some(true),
            None if state.ended => Some(false),
            None => None,
        })
        .await
    }

    /// Waits for room for one more stream; `false` if none will begin on this connection any more.
    pub(super) async fn begin(&self) -> bool {
        self.wait_for(&self.0.room, |state| {
            if !state.is_open() {
                return Some(false);
            }
            let max = state.streams_max.unwrap_or(0) as usize;
            (state.begun < max).then(|| state.begun += 1).map(|()| true)
        })
        .await
    }

    /// A stream that had begun, or was about to, is over.
    pub(super) fn over(&self, id: Option<u32>) {
        let mut state = self.lock();
        state.begun = state.begun.saturating_sub(1);
        // One that is withheld stays among those: its frames may still come.
        id.and_then(|id| state.streams.remove(&id));
        drop(state);
        self.0.room.notify_one();
    }

    /// Announces a request that is about to be handed to the library. The notification comes if it is withheld.
    pub(super) fn announce(&self, id: u32, fence: Fence) -> Arc<Notify> {
        let withheld = Arc::new(Notify::new());
        let stream = Stream { stage: Stage::Waiting(fence), reset: None, ended: false, withheld: Arc::clone(&withheld) };
        self.lock().streams.insert(id, stream);
        withheld
    }

    /// Gives a call up: what has not left by now never will. Tells what may have become of it.
    pub(super) fn give_up(&self, id: u32) -> Fate {
        let mut state = self.lock();
        let last = state.last;
        let Some(stream) = state.streams.get_mut(&id) else { return Fate::NeverLeft };
        match stream.stage {
            Stage::Waiting(_) => {
                stream.stage = Stage::Withheld;
                state.withheld.insert(id);
                Fate::NeverLeft
            }
            Stage::Withheld => Fate::NeverLeft,
            Stage::Left if stream.reset == Some(REFUSED_STREAM) => Fate::Refused,
            Stage::Left if last.is_some_and(|last| id > last) => Fate::GoneAway,
            Stage::Left => Fate::MaybeArrived,
        }
    }

    /// Whether the last frame of an answer has come.
    pub(super) fn has_whole_answer(&self, id: u32) -> bool {
        self.lock().streams.get(&id).is_some_and(|stream| stream.ended)
    }

    /// The code that the peer reset a stream with.
    pub(super) fn reset_code(&self, id: u32) -> Option<u32> {
        self.lock().streams.get(&id)?.reset
    }

    /// The connection is over.
    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.0.room.notify_waiters();
        self.0.heard.notify_waiters();
    }

    /// Whether a new stream may begin here, if there is room.
    pub(super) fn is_open(&self) -> bool {
        self.lock().is_open()
    }

    /// Whether any call is at the peer.
    pub(super) fn is_busy(&self) -> bool {
        self.lock().begun > 0
    }

    /// For how long nothing was heard of the peer.
    pub(super) fn quiet(&self) -> Duration {
        self.lock().heard_at.elapsed()
    }

    /// Waits until something is heard that came after a moment; `false` if the connection ended instead.
    pub(super) async fn heard_after(&self, moment: Instant) -> bool {
        self.wait_for(&self.0.heard, |state| match () {
            () if state.heard_at > moment => Some(true),
            () if state.ended => Some(false),
            () => None,
        })
        .await
    }

    async fn wait_for<T>(&self, notify: &Notify, mut met: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let notified = notify.notified();
            let mut notified = std::pin::pin!(notified);
            // Before the look: what changes after it is not missed.
            notified.as_mut().enable();
            if let Some(found) = met(&mut self.lock()) {
                return found;
            }
            notified.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, frame: &Heard) {
        let mut state = self.lock();
        match *frame {
            Heard::Settings { streams_max, table } => {
                // A peer that names no limit has none.
                state.streams_max = streams_max.or(state.streams_max).or(Some(u32::MAX));
                state.owes_a_block |= table;
            }
            Heard::Reset { id, code } => {
                if let Some(stream) = state.streams.get_mut(&id) {
                    stream.reset.get_or_insert(code);
                }
            }
            Heard::GoAway { last } => state.last = Some(state.last.map_or(last, |before| before.min(last))),
            Heard::EndOf { id } => {
                if let Some(stream) = state.streams.get_mut(&id) {
                    stream.ended = true;
                }
            }
        }
        drop(state);
        if matches!(frame, Heard::Settings { .. } | Heard::GoAway { .. }) {
            self.0.room.notify_waiters();
        }
    }

    fn heard_something(&self) {
        self.lock().heard_at = Instant::now();
        self.0.heard.notify_waiters();
    }
}

impl State {
    fn is_open(&self) -> bool {
        !self.ended && !self.leaks && self.last.is_none() && self.withheld.len() < WITHHELD_MAX
    }
}

/// What a frame of the peer's says that is kept.
enum Heard {
    Settings { streams_max: Option<u32>, table: bool },
    Reset { id: u32, code: u32 },
    GoAway { last: u32 },
    EndOf { id: u32 },
}

/// A frame's head (RFC 9113, 4.1).
#[derive(Clone, Copy)]
struct Head {
    payload_bytes: usize,
    kind: u8,
    flags: u8,
    id: u32,
}

impl Head {
    fn read(bytes: [u8; HEAD_BYTES]) -> Self {
        let [a, b, c, kind, flags, id @ ..] = bytes;
        Head {
            payload_bytes: u32::from_be_bytes([0, a, b, c]) as usize,
            kind,
            flags,
            id: u32::from_be_bytes(id) & (u32::MAX >> 1),
        }
    }

    fn write(self) -> [u8; HEAD_BYTES] {
        let [_, a, b, c] = u32::try_from(self.payload_bytes).expect("a frame's length has 24 bits").to_be_bytes();
        let [d, e, f, g] = self.id.to_be_bytes();
        [a, b, c, self.kind, self.flags, d, e, f, g]
    }

    fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

type Socket = TokioIo<MaybeHttpsStream<TokioIo<TcpStream>>>;

/// The socket behind the witness. The library writes and reads through it and nothing else.
pub(super) struct Wire {
    socket: Socket,
    witness: Witness,
    out: Out,
    incoming: Incoming,
}

/// Where the writer is in what it writes.
struct Out {
    preface_left: usize,
    /// The head of the frame that is being written: how much of it is here, and how much of that has left.
    head: [u8; HEAD_BYTES],
    head_here: usize,
    head_left: usize,
    payload_left: usize,
    course: Course,
    /// How often the head that is here has waited for something to be read first.
    deferred: u32,
}

/// What is done with a frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Course {
    Pass,
    Swallow,
    /// Not yet: there is something to read, and it may be that the peer is going away.
    Defer,
}

/// What the kernel has for us.
enum Unread {
    Nothing,
    Bytes,
    End,
}

impl Wire {
    pub(super) fn new(stream: MaybeHttpsStream<TokioIo<TcpStream>>, witness: Witness) -> Self {
        let out = Out {
            preface_left: PREFACE_BYTES,
            head: [0; HEAD_BYTES],
            head_here: 0,
            head_left: 0,
            payload_left: 0,
            course: Course::Pass,
            deferred: 0,
        };
        Wire { socket: TokioIo::new(stream), witness, out, incoming: Incoming::default() }
    }

    /// Whether a write to the socket that does not return success has certainly taken nothing: TLS may have sent a part.
    fn is_plain(&self) -> bool {
        matches!(self.socket.inner(), MaybeHttpsStream::Http(_))
    }

    /// Writes what is here of a frame's head, and of the payload behind it. Returns how much of the payload was taken; the head is
    /// done when none of it is left here.
    fn write_head(&mut self, cx: &mut Context<'_>, payload: &[u8]) -> Poll<io::Result<usize>> {
        let head = Head::read(self.out.head);
        let untouched = self.out.head_left == 0;
        let witness = self.witness.clone();
        let mut state = witness.lock();
        let begins = untouched
            && head.kind == HEADERS
            && matches!(state.streams.get(&head.id), Some(Stream { stage: Stage::Waiting(_), .. }));
        let course = if untouched { self.course_of(&mut state, head)? } else { Course::Pass };
        match course {
            Course::Pass => {}
            Course::Swallow => {
                drop(state);
                self.head_done(head, Course::Swallow);
                return Poll::Ready(Ok(0));
            }
            Course::Defer => {
                drop(state);
                self.out.deferred += 1;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        if !begins {
            drop(state);
            return self.write_through(cx, head, payload);
        }
        // Under the lock: whoever gives the call up sees it before its first byte or after it.
        let plain = self.is_plain();
        let written = self.write_through(cx, head, payload);
        let nothing = plain && self.out.head_left == 0 && self.out.head_here == HEAD_BYTES;
        if !nothing {
            if let Some(stream) = state.streams.get_mut(&head.id) {
                stream.stage = Stage::Left;
            }
            state.owes_a_block = false;
            drop(state);
            failpoint!("call.sent");
        }
        written
    }

    fn write_through(&mut self, cx: &mut Context<'_>, head: Head, payload: &[u8]) -> Poll<io::Result<usize>> {
        let head_bytes = self.out.head;
        let payload = &payload[..payload.len().min(head.payload_bytes)];
        let rest = &head_bytes[self.out.head_left..];
        let slices = [IoSlice::new(rest), IoSlice::new(payload)];
        let written = ready!(Pin::new(&mut self.socket).poll_write_vectored(cx, &slices))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        let of_head = written.min(rest.len());
        self.out.head_left += of_head;
        let of_payload = written - of_head;
        if self.out.head_left == HEAD_BYTES {
            self.head_done(head, Course::Pass);
            self.out.payload_left -= of_payload;
        }
        Poll::Ready(Ok(of_payload))
    }

    fn head_done(&mut self, head: Head, course: Course) {
        (self.out.head_here, self.out.head_left, self.out.deferred) = (0, 0, 0);
        (self.out.payload_left, self.out.course) = (head.payload_bytes, course);
    }

    /// Decides what becomes of a frame, before its first byte.
    fn course_of(&self, state: &mut State, head: Head) -> io::Result<Course> {
        if head.id == 0 {
            return Ok(Course::Pass);
        }
        if state.withheld.contains(&head.id) {
            state.leaks |= head.kind == DATA && head.payload_bytes > 0;
            // A block that is left out must not be the one that tells the peer of the table's size.
            if head.kind == HEADERS && state.owes_a_block {
                return Err(io::Error::other("a block of headers that was owed is withheld"));
            }
            return Ok(Course::Swallow);
        }
        let Some(stream) = state.streams.get_mut(&head.id) else {
            // What a call left behind when it was over: a reset, a window. No request begins unannounced.
            let unannounced = || io::Error::other("nobody announced this stream");
            return if head.kind == HEADERS { Err(unannounced()) } else { Ok(Course::Pass) };
        };
        match &stream.stage {
            Stage::Left => Ok(Course::Pass),
            Stage::Withheld => Ok(Course::Swallow),
            // A frame of a stream that never began, and will not.
            Stage::Waiting(_) if head.kind != HEADERS => Ok(Course::Swallow),
            Stage::Waiting(fence) => {
                if fence.check().is_err() {
                    stream.stage = Stage::Withheld;
                    stream.withheld.notify_one();
                    state.withheld.insert(head.id);
                    return self.course_of(state, head);
                }
                match self.unread() {
                    Unread::End => Err(io::ErrorKind::NotConnected.into()),
                    Unread::Bytes if self.out.deferred < DEFERRED_MAX => Ok(Course::Defer),
                    Unread::Bytes | Unread::Nothing => Ok(Course::Pass),
                }
            }
        }
    }

    /// What there is to read, as the kernel knows it: the news may not have reached the connection's task yet.
    fn unread(&self) -> Unread {
        let tcp = match self.socket.inner() {
            MaybeHttpsStream::Http(tcp) => tcp.inner(),
            MaybeHttpsStream::Https(tls) => tls.inner().get_ref().0.inner().inner(),
        };
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        match rustix::net::recv(tcp, &mut [0_u8; 1], flags) {
            Ok((_, 0)) => Unread::End,
            Ok(_) => Unread::Bytes,
            Err(rustix::io::Errno::AGAIN) => Unread::Nothing,
            Err(_) => Unread::End,
        }
    }

    /// Writes the head that is here, if there is a whole one.
    fn drive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.out.head_here == HEAD_BYTES {
            ready!(self.write_head(cx, &[]))?;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if buf.is_empty() {
            return Poll::Ready(Ok(0));
        }
        if self.out.preface_left > 0 {
            let part = &buf[..buf.len().min(self.out.preface_left)];
            let written = ready!(Pin::new(&mut self.socket).poll_write(cx, part))?;
            self.out.preface_left -= written;
            return Poll::Ready(Ok(written));
        }
        ready!(self.drive(cx))?;
        if self.out.payload_left > 0 {
            let part = &buf[..buf.len().min(self.out.payload_left)];
            let written = match self.out.course {
                Course::Swallow => part.len(),
                Course::Pass | Course::Defer => ready!(Pin::new(&mut self.socket).poll_write(cx, part))?,
            };
            self.out.payload_left -= written;
            return Poll::Ready(Ok(written));
        }
        let here = self.out.head_here;
        let part = &buf[..buf.len().min(HEAD_BYTES - here)];
        self.out.head[here..here + part.len()].copy_from_slice(part);
        self.out.head_here += part.len();
        if self.out.head_here < HEAD_BYTES {
            return Poll::Ready(Ok(part.len()));
        }
        match self.write_head(cx, &buf[part.len()..]) {
            Poll::Ready(Ok(of_payload)) => Poll::Ready(Ok(part.len() + of_payload)),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            // The head is here and goes with the next call.
            Poll::Pending => Poll::Ready(Ok(part.len())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.drive(cx))?;
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.drive(cx))?;
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

/// Where the reader is in what it reads, and what it has for the library.
#[derive(Default)]
struct Incoming {
    /// Read and looked at.
    ready: BytesMut,
    /// Read and not looked at: less than a head, or a part of settings.
    raw: BytesMut,
    /// The frame whose payload is passing, and how much of it is still to come.
    passing: Option<(Head, usize)>,
    /// The first bytes of that payload.
    first: Vec<u8>,
}

/// How much of a payload is looked at.
const LOOKED_AT_BYTES: usize = 8;

impl Incoming {
    /// Takes what was read.
    fn take(&mut self, bytes: &[u8], mut hear: impl FnMut(Heard)) -> io::Result<()> {
        self.raw.extend_from_slice(bytes);
        loop {
            if let Some((head, left)) = self.passing {
                let part = self.raw.split_to(left.min(self.raw.len()));
                let wanted = LOOKED_AT_BYTES.saturating_sub(self.first.len()).min(part.len());
                self.first.extend_from_slice(&part[..wanted]);
                self.ready.extend_from_slice(&part);
                let left = left - part.len();
                if left > 0 {
                    self.passing = Some((head, left));
                    return Ok(());
                }
                self.passing = None;
                if let Some(heard) = told(head, &self.first) {
                    hear(heard);
                }
            }
            let Some(head) = self.raw.first_chunk::<HEAD_BYTES>().map(|head| Head::read(*head)) else { return Ok(()) };
            if head.kind == SETTINGS && head.id == 0 && !head.has(FLAG_ACK) {
                if head.payload_bytes > SETTINGS_BYTES_MAX {
                    let bytes = head.payload_bytes;
                    return Err(io::Error::other(format!("settings of {bytes} bytes; the limit is {SETTINGS_BYTES_MAX}")));
                }
                if self.raw.len() < HEAD_BYTES + head.payload_bytes {
                    return Ok(());
                }
                self.raw.advance(HEAD_BYTES);
                let payload = self.raw.split_to(head.payload_bytes);
                hear(self.settings(head, &payload));
                continue;
            }
            self.ready.extend_from_slice(&self.raw.split_to(HEAD_BYTES));
            self.first.clear();
            self.passing = Some((head, head.payload_bytes));
        }
    }

    /// Passes settings on with a table of size 0, whatever the peer would keep.
    fn settings(&mut self, head: Head, payload: &[u8]) -> Heard {
        let (mut streams_max, mut table, mut kept) = (None, false, Vec::with_capacity(payload.len() + 6));
        let (settings, rest) = payload.as_chunks::<6>();
        for setting in settings {
            let [a, b, value @ ..] = *setting;
            match u16::from_be_bytes([a, b]) {
                SETTING_HEADER_TABLE_SIZE => {
                    table = true;
                    continue;
                }
                SETTING_STREAMS => streams_max = Some(u32::from_be_bytes(value)),
                _ => {}
            }
            kept.extend_from_slice(setting);
        }
        kept.extend_from_slice(&SETTING_HEADER_TABLE_SIZE.to_be_bytes());
        kept.extend_from_slice(&[0; 4]);
        // A part of a setting is an error, and the library's to find.
        kept.extend_from_slice(rest);
        self.ready.extend_from_slice(&Head { payload_bytes: kept.len(), ..head }.write());
        self.ready.extend_from_slice(&kept);
        Heard::Settings { streams_max, table }
    }
}

/// What a frame says, once it has passed.
fn told(head: Head, first: &[u8]) -> Option<Heard> {
    let number = |at: usize| first.get(at..at + 4)?.first_chunk::<4>().map(|bytes| u32::from_be_bytes(*bytes));
    match head.kind {
        DATA | HEADERS if head.has(FLAG_END_STREAM) => Some(Heard::EndOf { id: head.id }),
        RST_STREAM => Some(Heard::Reset { id: head.id, code: number(0)? }),
        GOAWAY => Some(Heard::GoAway { last: number(0)? & (u32::MAX >> 1) }),
        _ => None,
    }
}

impl AsyncRead for Wire {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.incoming.ready.is_empty() {
            let mut chunk = [std::mem::MaybeUninit::uninit(); READ_BYTES_MAX];
            let mut chunk = ReadBuf::uninit(&mut chunk);
            ready!(Pin::new(&mut this.socket).poll_read(cx, &mut chunk))?;
            if chunk.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            let witness = &this.witness;
            this.incoming.take(chunk.filled(), |heard| witness.hear(&heard))?;
            witness.heard_something();
        }
        let part = this.incoming.ready.len().min(buf.remaining());
        buf.put_slice(&this.incoming.ready.split_to(part));
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, id: u32, payload: &[u8]) -> Vec<u8> {
        let mut frame = Head { payload_bytes: payload.len(), kind, flags, id }.write().to_vec();
        frame.extend_from_slice(payload);
        frame
    }

    fn setting(id: u16, value: u32) -> Vec<u8> {
        [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()
    }

    /// What passes on, and what the witness knows, when bytes come in parts of this size.
    fn taken(bytes: &[u8], part_bytes: usize) -> (Vec<u8>, Witness) {
        let (mut incoming, witness) = (Incoming::default(), Witness::new());
        for id in [1, 3, 5] {
            witness.announce(id, Fence::until(u64::MAX));
            witness.lock().streams.get_mut(&id).unwrap().stage = Stage::Left;
        }
        for part in bytes.chunks(part_bytes) {
            incoming.take(part, |heard| witness.hear(&heard)).unwrap();
        }
        (incoming.ready.to_vec(), witness)
    }

    #[test]
    fn what_comes_in_is_understood_however_it_is_cut_and_only_settings_are_changed() {
        let (concurrent, table) = (SETTING_STREAMS, SETTING_HEADER_TABLE_SIZE);
        let data = frame(DATA, 0, 3, &[7; 300]);
        let end = frame(HEADERS, FLAG_END_STREAM | 4, 3, &[0x88]);
        let reset = frame(RST_STREAM, 0, 1, &REFUSED_STREAM.to_be_bytes());
        let goes = frame(GOAWAY, 0, 0, &[[0x7f, 0xff, 0xff, 0xff], [0; 4]].concat());
        let gone = frame(GOAWAY, 0, 0, &[0, 0, 0, 3, 0, 0, 0, 0, b'x']);
        let ack = frame(SETTINGS, FLAG_ACK, 0, &[]);
        let asked = frame(SETTINGS, 0, 0, &[setting(table, 4096), setting(concurrent, 7)].concat());
        let told = frame(SETTINGS, 0, 0, &[setting(concurrent, 7), setting(table, 0)].concat());
        // It may not take back what it said: the lower word stands, whichever comes last.
        let rest = [&ack[..], &data, &end, &reset, &gone, &goes].concat();
        let bytes = [&asked[..], &rest].concat();
        for part_bytes in [1, 2, 8, 9, 10, 100, bytes.len()] {
            let (passed, witness) = taken(&bytes, part_bytes);
            assert_eq!(passed, [&told[..], &rest].concat(), "in parts of {part_bytes}");
            assert_eq!(witness.lock().streams_max, Some(7));
            assert!(witness.has_whole_answer(3) && !witness.has_whole_answer(1));
            assert_eq!([1, 3, 5].map(|id| witness.give_up(id)), [Fate::Refused, Fate::MaybeArrived, Fate::GoneAway]);
        }
    }

    #[test]
    fn settings_beyond_the_limit_end_the_connection() {
        let mut incoming = Incoming::default();
        let head = Head { payload_bytes: SETTINGS_BYTES_MAX + 6, kind: SETTINGS, flags: 0, id: 0 }.write();
        let error = incoming.take(&head, |_| {}).unwrap_err();
        assert_eq!(error.to_string(), "settings of 16390 bytes; the limit is 16384");
    }

    #[test]
    fn a_connection_with_many_streams_that_never_left_takes_no_more() {
        let witness = Witness::new();
        for number in 0..WITHHELD_MAX {
            assert!(witness.is_open());
            let id = 2 * u32::try_from(number).unwrap() + 1;
            witness.announce(id, Fence::until(u64::MAX));
            assert_eq!(witness.give_up(id), Fate::NeverLeft);
            witness.over(Some(id));
        }
        assert!(!witness.is_open());
    }
}
