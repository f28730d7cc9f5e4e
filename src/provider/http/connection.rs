//! Connections to one origin: how they are made, kept, and what is known to have left through them.
//!
//! The [`Gate`] stands between the HTTP library and the socket. It lets the request's first byte pass only while the fence allows
//! it, and afterwards it can say whether a byte may have left. That word decides between "not sent" and "unknown".
//!
//! Deliberately not here: any sending again.

use std::io::{self, IoSlice};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;
use tower_service::Service as _;

use super::render::Origin;
use super::{HttpProblem, h2};
use crate::config::Http2;
use crate::failpoint::failpoint;
use crate::provider::Fence;

/// Most idle connections that one provider keeps.
const IDLE_CONNECTIONS_MAX: usize = 256;
/// How long a connection may lie idle. Below the five seconds after which common servers close: a request that meets a closing
/// connection ends as "unknown", which costs far more than a new connection.
const IDLE_LIFETIME: Duration = Duration::from_secs(4);
/// How long a kept connection may take to become ready again. It is ready at once, unless it still sends an earlier request's
/// body.
const READY_MAX: Duration = Duration::from_millis(20);
/// Largest head of an answer.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;
/// Most header lines of an answer.
pub(super) const HEADERS_MAX: usize = 128;

/// HTTP/2 in a TLS handshake (RFC 9113, 3.2).
const ALPN_HTTP2: &[u8] = b"h2";

/// Whether anything of a request may have reached the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Not one byte, and none will.
    Nothing,
    /// At least one byte was handed to the kernel, or to TLS.
    MaybeSome,
}

/// What stands between the HTTP library and the socket. At most one call holds it open.
///
/// The first write of a call happens under its lock, so that [`Gate::shut`] never sees a write half done.
#[derive(Clone)]
pub(super) struct Gate(Arc<Mutex<GateState>>);

enum GateState {
    /// No call may write.
    Shut,
    /// A call may write its first byte while its fence allows it.
    Armed(Fence),
    /// A call's first byte may have left.
    Open,
}

impl Gate {
    fn new() -> Self {
        Gate(Arc::new(Mutex::new(GateState::Shut)))
    }

    /// Lets a call's first byte pass, as long as its fence allows it.
    pub(super) fn arm(&self, fence: Fence) {
        *self.lock() = GateState::Armed(fence);
    }

    /// Shuts the gate for good or until the next call, and tells what had passed.
    pub(super) fn shut(&self) -> Left {
        match std::mem::replace(&mut *self.lock(), GateState::Shut) {
            GateState::Shut | GateState::Armed(_) => Left::Nothing,
            GateState::Open => Left::MaybeSome,
        }
    }

    /// What has passed so far.
    pub(super) fn left(&self) -> Left {
        match &*self.lock() {
            GateState::Shut | GateState::Armed(_) => Left::Nothing,
            GateState::Open => Left::MaybeSome,
        }
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection, for one request at a time. Dropping it closes it.
pub(super) struct Connection {
    pub(super) sender: SendRequest<Full<Bytes>>,
    pub(super) gate: Gate,
    /// Drives the connection. Aborted on drop: a call that was given up must not linger in a half-written request.
    _driver: AbortOnDropHandle<()>,
}

/// Idle connections, the most recently used last.
///
/// A connection past its lifetime is never used again; it is closed with the next call, or by the provider before that.
#[derive(Default)]
pub(super) struct Pool(Mutex<Vec<(Connection, Instant)>>);

impl Pool {
    /// Takes a connection that is ready for a request, if there is one.
    pub(super) async fn take(&self) -> Option<Connection> {
        loop {
            let mut connection = self.pop()?;
            if let Ok(Ok(())) = tokio::time::timeout(READY_MAX, connection.sender.ready()).await {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection for the next call, unless it is closed already or enough are kept.
    pub(super) fn put(&self, connection: Connection) {
        if connection.sender.is_closed() {
            return;
        }
        let mut idle = self.lock();
        idle.retain(|(_, since)| since.elapsed() < IDLE_LIFETIME);
        if idle.len() < IDLE_CONNECTIONS_MAX {
            idle.push((connection, Instant::now()));
        }
    }

    fn pop(&self) -> Option<Connection> {
        let mut idle = self.lock();
        let (connection, since) = idle.pop()?;
        if since.elapsed() < IDLE_LIFETIME {
            return Some(connection);
        }
        // The last one is the youngest.
        idle.clear();
        None
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Connection, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes connections to one origin.
pub(super) struct Connector {
    connector: HttpsConnector<HttpConnector>,
    pub(super) origin: http::Uri,
    http2: Http2,
}

/// A new connection, in the protocol that was agreed on.
pub(super) enum Connected {
    /// HTTP/1.1: one request at a time.
    Alone(Connection),
    /// HTTP/2: requests beside each other.
    Beside(Arc<h2::Connection>),
}

impl Connector {
    pub(super) fn new(origin: &Origin, ca_file: Option<&Path>, http2: Http2) -> Result<Self, HttpProblem> {
        let ring = Arc::new(rustls::crypto::ring::default_provider());
        let versions = ClientConfig::builder_with_provider(ring)
            .with_safe_default_protocol_versions()
            .expect("ring has suites for the default TLS versions");
        let secure = origin.is_secure();
        let trusting = match (ca_file, secure) {
            (Some(path), _) => versions.with_root_certificates(authorities(path)?),
            (None, true) => versions
                .with_native_roots()
                .map_err(|error| HttpProblem::Authorities { from: "the system".to_owned(), reason: error.to_string() })?,
            // Plain HTTP needs none, and must work on a system that has none.
            (None, false) => versions.with_root_certificates(RootCertStore::empty()),
        };
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let mut tls = trusting.with_no_client_auth();
        tls.alpn_protocols = match http2 {
            Http2::Off => Vec::new(),
            Http2::Alpn => vec![ALPN_HTTP2.to_vec(), b"http/1.1".to_vec()],
            Http2::PriorKnowledge => vec![ALPN_HTTP2.to_vec()],
        };
        // What is secure is decided by the origin's scheme, and all requests have that origin.
        Ok(Connector { connector: HttpsConnector::from((tcp, tls)), origin: origin.uri.clone(), http2 })
    }

    /// Connects: name, TCP, TLS, and for HTTP/2 the provider's settings. The error is in words that hold nothing from the request.
    pub(super) async fn connect(&self) -> Result<Connected, String> {
        let mut connector = self.connector.clone();
        std::future::poll_fn(|context| connector.poll_ready(context)).await.map_err(|error| chain(error.as_ref()))?;
        let stream = connector.call(self.origin.clone()).await.map_err(|error| chain(error.as_ref()))?;
        let agreed = match &stream {
            MaybeHttpsStream::Http(_) => None,
            MaybeHttpsStream::Https(tls) => Some(tls.inner().get_ref().1.alpn_protocol() == Some(ALPN_HTTP2)),
        };
        match (self.http2, agreed) {
            (Http2::Off, _) | (Http2::Alpn, Some(false) | None) => Self::alone(stream).await.map(Connected::Alone),
            (Http2::Alpn, Some(true)) | (Http2::PriorKnowledge, Some(true) | None) => {
                // On the heap: the handshake's state is large.
                Box::pin(h2::Connection::open(stream)).await.map(Connected::Beside)
            }
            (Http2::PriorKnowledge, Some(false)) => {
                Err("http2: the provider did not agree to it in the TLS handshake".to_owned())
            }
        }
    }

    /// Whether what it makes may be shared by several calls.
    pub(super) fn may_share(&self) -> bool {
        match self.http2 {
            Http2::Off => false,
            Http2::Alpn | Http2::PriorKnowledge => true,
        }
    }

    async fn alone(stream: MaybeHttpsStream<TokioIo<TcpStream>>) -> Result<Connection, String> {
        let gate = Gate::new();
        let gated = Gated { stream, gate: gate.clone(), used: Used::Never };
        let (sender, connection) = Builder::new()
            .max_headers(HEADERS_MAX)
            .max_header_size(HEAD_BYTES_MAX)
            .handshake(gated)
            .await
            .map_err(|error| chain(&error))?;
        // How it ends is told to the call that waits on `sender`; without one, nobody needs to know.
        let driver = tokio::spawn(async move { drop(connection.await) });
        Ok(Connection { sender, gate, _driver: AbortOnDropHandle::new(driver) })
    }
}

fn authorities(path: &Path) -> Result<RootCertStore, HttpProblem> {
    let refused = |reason: String| HttpProblem::Authorities { from: path.display().to_string(), reason };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| refused(error.to_string()))? {
        let certificate = certificate.map_err(|error| refused(error.to_string()))?;
        roots.add(certificate).map_err(|error| refused(error.to_string()))?;
    }
    if roots.is_empty() { Err(refused("it holds no certificate".to_owned())) } else { Ok(roots) }
}

/// Most causes of an error that are told.
const CAUSES_MAX: usize = 4;

fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source()).take(CAUSES_MAX);
    let mut texts: Vec<String> = causes.map(ToString::to_string).collect();
    texts.dedup();
    texts.join(": ")
}

/// Whether a request was written on this connection before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Used {
    Never,
    Before,
}

/// The socket behind the gate. The HTTP library writes requests through it and nothing else.
struct Gated {
    stream: MaybeHttpsStream<TokioIo<TcpStream>>,
    gate: Gate,
    used: Used,
}

impl Gated {
    fn write(
        &mut self,
        write: impl FnOnce(Pin<&mut MaybeHttpsStream<TokioIo<TcpStream>>>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let gate = self.gate.clone();
        let mut state = gate.lock();
        match &*state {
            GateState::Open => {
                drop(state);
                write(Pin::new(&mut self.stream))
            }
            GateState::Shut => Poll::Ready(Err(io::Error::other("no call may write"))),
            GateState::Armed(fence) => {
                if let Err(fenced) = fence.check() {
                    return Poll::Ready(Err(io::Error::other(fenced)));
                }
                if self.used == Used::Before && self.is_ended() {
                    return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
                }
                let written = write(Pin::new(&mut self.stream));
                // A system call that fails or would block has taken nothing. TLS may have sent a part of what it then failed on.
                let nothing = match (&self.stream, &written) {
                    (MaybeHttpsStream::Http(_), Poll::Pending | Poll::Ready(Err(_) | Ok(0))) => true,
                    (MaybeHttpsStream::Http(_), Poll::Ready(Ok(_))) | (MaybeHttpsStream::Https(_), _) => false,
                };
                if !nothing {
                    *state = GateState::Open;
                    self.used = Used::Before;
                    failpoint!("call.sent");
                }
                written
            }
        }
    }

    /// Whether an idle connection has anything to read: its end, an alert, or bytes that nobody asked for. It is no use then.
    ///
    /// Asks the kernel itself, because the news may not have reached the connection's task yet.
    fn is_ended(&self) -> bool {
        let tcp = match &self.stream {
            MaybeHttpsStream::Http(tcp) => tcp.inner(),
            MaybeHttpsStream::Https(tls) => tls.inner().get_ref().0.inner().inner(),
        };
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        !matches!(rustix::net::recv(tcp, &mut [0_u8; 1], flags), Err(rustix::io::Errno::AGAIN))
    }
}

impl Read for Gated {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl Write for Gated {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.write(|stream| stream.poll_write(cx, buf))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.write(|stream| stream.poll_write_vectored(cx, bufs))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;
    use crate::provider::boottime_ms;

    async fn pair(used: Used) -> (Gated, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        (Gated { stream: MaybeHttpsStream::Http(TokioIo::new(client)), gate: Gate::new(), used }, server)
    }

    async fn write(gated: &mut Gated, bytes: &[u8]) -> io::Result<usize> {
        poll_fn(|cx| Pin::new(&mut *gated).poll_write(cx, bytes)).await
    }

    async fn everything(gated: Gated, mut server: TcpStream) -> Vec<u8> {
        drop(gated);
        let mut bytes = Vec::new();
        server.read_to_end(&mut bytes).await.unwrap();
        bytes
    }

    #[tokio::test]
    async fn nothing_passes_a_gate_that_no_call_has_armed() {
        let (mut gated, server) = pair(Used::Never).await;
        assert!(write(&mut gated, b"a").await.is_err());
        assert_eq!(gated.gate.shut(), Left::Nothing);
        assert_eq!(everything(gated, server).await, b"");
    }

    #[tokio::test]
    async fn the_fence_is_asked_at_the_first_byte_and_not_again() {
        let (mut gated, server) = pair(Used::Never).await;
        let fence = Fence::until(u64::MAX);
        gated.gate.arm(fence.clone());
        fence.close();
        assert!(write(&mut gated, b"a").await.is_err());
        assert_eq!(gated.gate.shut(), Left::Nothing);

        let fence = Fence::until(boottime_ms() + 60_000);
        gated.gate.arm(fence.clone());
        assert_eq!(write(&mut gated, b"b").await.unwrap(), 1);
        // Half a request helps nobody: what has begun to leave goes on.
        fence.close();
        assert_eq!(write(&mut gated, b"c").await.unwrap(), 1);
        assert_eq!(gated.gate.shut(), Left::MaybeSome);
        assert_eq!(everything(gated, server).await, b"bc");
    }

    #[tokio::test]
    async fn nothing_passes_after_the_call_was_given_up() {
        let (mut gated, server) = pair(Used::Never).await;
        gated.gate.arm(Fence::until(u64::MAX));
        assert_eq!(gated.gate.shut(), Left::Nothing);
        assert!(write(&mut gated, b"a").await.is_err());
        assert_eq!(everything(gated, server).await, b"");
    }

    #[tokio::test]
    async fn a_write_that_the_kernel_refuses_has_let_nothing_out() {
        let (mut gated, server) = pair(Used::Never).await;
        // A close with unread bytes resets the connection.
        poll_fn(|cx| Pin::new(&mut gated.stream).poll_write(cx, b"unread")).await.unwrap();
        server.readable().await.unwrap();
        drop(server);
        gated.gate.arm(Fence::until(u64::MAX));
        assert!(write(&mut gated, b"a").await.is_err());
        assert_eq!(gated.gate.shut(), Left::Nothing);
    }

    #[tokio::test]
    async fn a_used_connection_is_not_written_to_once_there_is_anything_to_read() {
        for last_words in [b"".as_slice(), b"HTTP/1.1 408 Request Timeout\r\n\r\n"] {
            let (mut gated, server) = pair(Used::Before).await;
            server.try_write(last_words).unwrap();
            drop(server);
            gated.gate.arm(Fence::until(u64::MAX));
            assert_eq!(write(&mut gated, b"a").await.unwrap_err().kind(), io::ErrorKind::NotConnected);
            assert_eq!(gated.gate.shut(), Left::Nothing);
        }
        let (mut gated, server) = pair(Used::Before).await;
        gated.gate.arm(Fence::until(u64::MAX));
        assert_eq!(write(&mut gated, b"a").await.unwrap(), 1);
        assert_eq!(gated.gate.shut(), Left::MaybeSome);
        assert_eq!(everything(gated, server).await, b"a");
    }
}
