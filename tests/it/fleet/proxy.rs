//! A wire to Redis that breaks on demand. It carries bytes and understands none of them: what it loses was executed. But a node of
//! a cluster says where it is, and who were called there would go past the wire: that place is the wire's own.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Replies on their way by one connection; beyond, Redis is not read.
const HELD_MAX: usize = 4096;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// How the wire is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// Each reply comes so much later.
    Hold(Duration),
    /// Each reply is held for so long, and then the connection is cut instead of delivering it.
    HoldThenCut(Duration),
    /// Connections are refused, those that stand are cut.
    Refuse,
}

struct Shared {
    upstream: PathBuf,
    /// How a node of a cluster says where it is, and how it is to say it.
    place: Option<(Vec<u8>, Vec<u8>)>,
    mode: watch::Sender<Mode>,
    /// So many replies more are lost: the connection is cut when one arrives.
    lose: AtomicU32,
    lost: AtomicU64,
    replies: Chance,
    requests: Chance,
    swallowed: AtomicU64,
    stop: CancellationToken,
}

/// Which of what passes is lost, besides: so many of a hundred. Which ones they are depends on nothing but their number.
#[derive(Default)]
struct Chance {
    percent: AtomicU32,
    passed: AtomicU64,
}

impl Chance {
    fn hits(&self) -> bool {
        let percent = self.percent.load(Ordering::SeqCst);
        let number = self.passed.fetch_add(1, Ordering::SeqCst);
        // SplitMix64: every so many-th would fall in step with what the two ends say to each other.
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % 100 < u64::from(percent)
    }
}

/// One gateway's wire.
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    _stop: DropGuard,
}

impl Proxy {
    /// `announced` is the port that a node of a cluster tells.
    pub fn start(upstream: PathBuf, announced: Option<&str>) -> Proxy {
        let socket = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a port");
        let addr = socket.local_addr().expect("a port");
        let stop = CancellationToken::new();
        let (mode, _) = watch::channel(Mode::Pass);
        let told = |port: &str| format!("$9\r\n127.0.0.1\r\n:{port}\r\n").into_bytes();
        let place = announced.map(|port| (told(port), told(&addr.port().to_string())));
        let shared = Arc::new(Shared {
            upstream,
            place,
            mode,
            lose: AtomicU32::new(0),
            lost: AtomicU64::new(0),
            replies: Chance::default(),
            requests: Chance::default(),
            swallowed: AtomicU64::new(0),
            stop: stop.clone(),
        });
        tokio::spawn(serve(socket, addr, Arc::clone(&shared)));
        Proxy { addr, shared, _stop: stop.drop_guard() }
    }

    pub fn url(&self) -> String {
        let scheme = if self.shared.place.is_some() { "redis+cluster" } else { "redis" };
        format!("{scheme}://{}", self.addr)
    }

    pub fn set(&self, mode: Mode) {
        self.shared.mode.send_replace(mode);
    }

    /// Loses the next replies, each with its connection.
    pub fn lose_replies(&self, replies: u32) {
        self.shared.lose.store(replies, Ordering::SeqCst);
    }

    /// Loses so many of a hundred replies from now on, each with its connection.
    pub fn lose_of_a_hundred(&self, percent: u32) {
        self.shared.replies.percent.store(percent, Ordering::SeqCst);
    }

    /// Loses so many of a hundred requests from now on, before Redis has them, each with its connection.
    pub fn swallow_of_a_hundred(&self, percent: u32) {
        self.shared.requests.percent.store(percent, Ordering::SeqCst);
    }

    /// How many chunks of requests were lost before Redis had them.
    pub fn swallowed(&self) -> u64 {
        self.shared.swallowed.load(Ordering::SeqCst)
    }

    /// How many chunks of replies were lost after Redis had executed what they answer.
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::SeqCst)
    }
}

impl Shared {
    /// What a node says, with the wire's own place in it. It says where it is in one piece.
    fn placed(&self, chunk: Bytes) -> Bytes {
        let Some((theirs, ours)) = &self.place else { return chunk };
        let Some(at) = chunk.windows(theirs.len()).position(|part| part == theirs) else { return chunk };
        [&chunk[..at], ours, &chunk[at + theirs.len()..]].concat().into()
    }

    /// Whether this reply is one of those to lose.
    fn loses(&self) -> bool {
        let taken = self.lose.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |lose| lose.checked_sub(1));
        let unlucky = self.replies.hits();
        taken.is_ok() || unlucky
    }
}

fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

async fn serve(mut socket: TcpSocket, addr: SocketAddr, shared: Arc<Shared>) {
    let mut mode = shared.mode.subscribe();
    loop {
        // A socket that does not listen keeps the port while connections are refused.
        let open = tokio::select! {
            () = shared.stop.cancelled() => return,
            open = mode.wait_for(|mode| *mode != Mode::Refuse) => open.map(drop),
        };
        if open.is_err() {
            return;
        }
        let listener = socket.listen(BACKLOG).expect("the port is ours");
        let connections = shared.stop.child_token();
        tokio::select! {
            () = shared.stop.cancelled() => return,
            _ = mode.wait_for(|mode| *mode == Mode::Refuse) => {}
            () = accept(&listener, &shared, &connections) => {}
        }
        connections.cancel();
        drop(listener);
        socket = bind(addr).expect("the port was ours");
    }
}

async fn accept(listener: &TcpListener, shared: &Arc<Shared>, connections: &CancellationToken) {
    while let Ok((client, _)) = listener.accept().await {
        let (shared, cut) = (Arc::clone(shared), connections.child_token());
        tokio::spawn(async move {
            tokio::select! {
                () = cut.cancelled() => {}
                () = carry(client, &shared) => {}
            }
        });
    }
}

/// What becomes of a chunk of replies when its time has come.
enum Fate {
    Deliver,
    Cut,
}

async fn carry(client: TcpStream, shared: &Shared) {
    let Ok(server) = UnixStream::connect(&shared.upstream).await else { return };
    let _ = client.set_nodelay(true);
    let (mut asking, mut asked) = client.into_split();
    let (mut answers, mut questions) = server.into_split();
    let (held, mut due) = mpsc::channel::<(Instant, Fate, Bytes)>(HELD_MAX);
    let commands = async {
        let mut bytes = BytesMut::with_capacity(64 << 10);
        while let Ok(1..) = asking.read_buf(&mut bytes).await {
            if shared.requests.hits() {
                shared.swallowed.fetch_add(1, Ordering::SeqCst);
                return;
            }
            if questions.write_all(&bytes.split()).await.is_err() {
                return;
            }
        }
    };
    let arrive = async {
        let mut bytes = BytesMut::with_capacity(64 << 10);
        while let Ok(1..) = answers.read_buf(&mut bytes).await {
            let chunk = shared.placed(bytes.split().freeze());
            let now = Instant::now();
            let (at, fate) = match *shared.mode.borrow() {
                _ if shared.loses() => (now, Fate::Cut),
                Mode::Pass | Mode::Refuse => (now, Fate::Deliver),
                Mode::Hold(hold) => (now + hold, Fate::Deliver),
                Mode::HoldThenCut(hold) => (now + hold, Fate::Cut),
            };
            if held.send((at, fate, chunk)).await.is_err() {
                return;
            }
        }
    };
    let leave = async {
        while let Some((at, fate, chunk)) = due.recv().await {
            tokio::time::sleep_until(at).await;
            match fate {
                Fate::Cut => {
                    shared.lost.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                Fate::Deliver if asked.write_all(&chunk).await.is_err() => return,
                Fate::Deliver => {}
            }
        }
    };
    // Whichever direction ends first ends both.
    tokio::select! {
        () = commands => {}
        () = arrive => {}
        () = leave => {}
    }
}
