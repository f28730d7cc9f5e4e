//! A wire to Redis that knows where a command ends: it loses whole replies, sends whole calls twice or late, holds one up until its
//! client is gone, and writes down what it delivered.
//!
//! Only scripts of jobs meet with accidents; everything else passes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use onejob::store::Script;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::frames;
use crate::fleet::dice::Dice;

/// How long a copy waits for its answer.
const COPY_PATIENCE: Duration = Duration::from_secs(3);

/// How often what happens to a call, of a thousand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Accidents {
    /// Its reply is lost, and the connection with it.
    pub lost: usize,
    /// It is sent twice at once.
    pub twice: usize,
    /// It is sent once more after a while, on a connection of its own.
    pub late: usize,
    /// It is not sent; its connection is cut, and it is sent after a while.
    pub held: usize,
    /// Redis forgets all scripts right before it.
    pub forgotten: usize,
}

/// A clock that only counts: what is called, answered and delivered when.
#[derive(Clone)]
pub struct Clock {
    count: Arc<AtomicU64>,
    began: Instant,
}

impl Clock {
    pub fn start() -> Clock {
        Clock { count: Arc::default(), began: Instant::now() }
    }

    pub fn now(&self) -> u64 {
        self.count.fetch_add(1, Ordering::SeqCst)
    }

    /// The next of the moments that are so far from each other.
    pub fn beat(&self, apart: Duration) -> Instant {
        let passed = self.began.elapsed().as_millis() / apart.as_millis();
        self.began + apart * u32::try_from(passed + 1).expect("a short round")
    }
}

/// One call as it was sent to Redis.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// By whose wire; `None` where all share one.
    pub who: Option<usize>,
    pub script: Script,
    pub arguments: Vec<Vec<u8>>,
    pub at: u64,
    /// The wire's own doing, beside what the client sent.
    pub copy: bool,
    pub fate: Fate,
}

/// What Redis said to it, as far as was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Nothing,
    Executed,
    /// An error: not executed.
    Refused,
}

/// What was delivered to each key.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<HashMap<String, Vec<Delivery>>>>);

impl Log {
    fn write(&self, key: &str, delivery: Delivery) -> usize {
        let mut log = self.0.lock().unwrap();
        let of_key = log.entry(key.to_owned()).or_default();
        of_key.push(delivery);
        of_key.len() - 1
    }

    fn fate(&self, (key, place): &(String, usize), fate: Fate) {
        self.0.lock().unwrap().get_mut(key).expect("it was written")[*place].fate = fate;
    }

    pub fn of(&self, key: &str) -> Vec<Delivery> {
        self.0.lock().unwrap().get(key).cloned().unwrap_or_default()
    }
}

/// Where Redis is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Upstream {
    Socket(PathBuf),
    Port(u16),
}

/// Texts that stand in the place of the shipped scripts.
pub type Planted = Arc<HashMap<&'static str, String>>;

/// What a wire is made with.
pub struct Making {
    pub who: Option<usize>,
    pub upstream: Upstream,
    pub accidents: Accidents,
    pub dice: Dice,
    pub clock: Clock,
    pub log: Log,
    pub planted: Planted,
}

struct Shared {
    making: Making,
    upstream: watch::Sender<Upstream>,
    dice: Mutex<Dice>,
    /// Calls that are held up, or are to be sent once more.
    waiting: AtomicUsize,
    /// Nothing happens any more.
    calm: AtomicBool,
    stop: CancellationToken,
}

pub struct Wire {
    addr: SocketAddr,
    shared: Arc<Shared>,
    _stop: DropGuard,
}

impl Wire {
    pub async fn start(making: Making) -> Wire {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let (upstream, _) = watch::channel(making.upstream.clone());
        let dice = Mutex::new(making.dice.clone());
        let shared = Arc::new(Shared {
            making,
            upstream,
            dice,
            waiting: AtomicUsize::new(0),
            calm: AtomicBool::new(false),
            stop: stop.clone(),
        });
        tokio::spawn(serve(listener, Arc::clone(&shared)));
        Wire { addr, shared, _stop: stop.drop_guard() }
    }

    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    /// Leads elsewhere from now on; what stands is cut.
    pub fn lead_to(&self, upstream: Upstream) {
        self.shared.upstream.send_replace(upstream);
    }

    /// Lets nothing happen any more.
    pub fn calm(&self) {
        self.shared.calm.store(true, Ordering::SeqCst);
    }

    /// How many calls are still to be sent by the wire itself.
    pub fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::SeqCst)
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let client = tokio::select! {
            () = shared.stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((client, _)) = client else { continue };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let mut upstream = shared.upstream.subscribe();
            let leads_to = upstream.borrow_and_update().clone();
            tokio::select! {
                () = shared.stop.cancelled() => {}
                _ = upstream.changed() => {}
                () = connection(client, &leads_to, &shared) => {}
            }
        });
    }
}

async fn connection(client: TcpStream, upstream: &Upstream, shared: &Arc<Shared>) {
    let _ = client.set_nodelay(true);
    let (asking, asked) = client.into_split();
    match upstream {
        Upstream::Socket(path) => {
            let Ok(server) = UnixStream::connect(path).await else { return };
            let (answers, questions) = server.into_split();
            carry(asking, asked, answers, questions, shared).await;
        }
        Upstream::Port(port) => {
            let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, *port)).await else { return };
            let _ = server.set_nodelay(true);
            let (answers, questions) = server.into_split();
            carry(asking, asked, answers, questions, shared).await;
        }
    }
}

/// What becomes of a reply.
struct Expected {
    entry: Option<(String, usize)>,
    then: Then,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Forward,
    Swallow,
    Cut,
}

async fn carry(
    mut asking: impl AsyncRead + Unpin,
    mut asked: impl AsyncWrite + Unpin,
    mut answers: impl AsyncRead + Unpin,
    mut questions: impl AsyncWrite + Unpin,
    shared: &Arc<Shared>,
) {
    let expected: Mutex<VecDeque<Expected>> = Mutex::default();
    let commands = async {
        let mut bytes = BytesMut::new();
        while let Ok(1..) = asking.read_buf(&mut bytes).await {
            let mut out = Vec::new();
            let mut cut = false;
            while let Some((words, length)) = (!cut).then(|| frames::command(&bytes)).flatten() {
                bytes.advance(length);
                cut = shared.pass(words, &mut out, &mut expected.lock().unwrap());
            }
            // What stands before a call that is held up is sent.
            if questions.write_all(&out).await.is_err() || cut {
                return;
            }
        }
    };
    let replies = async {
        let mut bytes = BytesMut::new();
        while let Ok(1..) = answers.read_buf(&mut bytes).await {
            let mut out = Vec::new();
            let mut cut = false;
            while let Some(length) = (!cut).then(|| frames::reply_length(&bytes)).flatten() {
                let reply = bytes.split_to(length);
                let next = expected.lock().unwrap().pop_front().expect("a reply answers a command");
                if let Some(entry) = &next.entry {
                    shared.making.log.fate(entry, fate_of(&reply));
                }
                match next.then {
                    Then::Forward => out.extend_from_slice(&reply),
                    Then::Swallow => {}
                    Then::Cut => cut = true,
                }
            }
            if asked.write_all(&out).await.is_err() || cut {
                return;
            }
        }
    };
    // Whichever direction ends first ends both.
    tokio::select! {
        () = commands => {}
        () = replies => {}
    }
}

fn fate_of(reply: &[u8]) -> Fate {
    if reply.first() == Some(&b'-') { Fate::Refused } else { Fate::Executed }
}

impl Shared {
    /// Passes one command on, with what may happen to it; whether its connection is cut here.
    fn pass(self: &Arc<Self>, words: Vec<Vec<u8>>, out: &mut Vec<u8>, expected: &mut VecDeque<Expected>) -> bool {
        let Some((script, key)) = frames::script_of(&words) else {
            out.extend(frames::packed(&words));
            expected.push_back(Expected { entry: None, then: Then::Forward });
            return false;
        };
        let arguments = words[4..].to_vec();
        let words = self.planted(words, script);
        let happens = {
            let (accidents, mut dice) = (&self.making.accidents, self.dice.lock().unwrap());
            let calm = self.calm.load(Ordering::SeqCst);
            let mut happens = |of_thousand: usize| !calm && dice.below(1000) < of_thousand;
            let drawn = [accidents.lost, accidents.twice, accidents.late, accidents.held, accidents.forgotten].map(&mut happens);
            (drawn, dice.between_ms(50, 2_000))
        };
        let ([lost, twice, late, held, forgotten], after) = happens;
        if held {
            self.send_later(words, script, key, arguments, after, false);
            return true;
        }
        if forgotten {
            out.extend(frames::packed(&["SCRIPT", "FLUSH"]));
            expected.push_back(Expected { entry: None, then: Then::Swallow });
        }
        let mut copies = vec![(false, if lost { Then::Cut } else { Then::Forward })];
        if twice {
            copies.push((true, Then::Swallow));
        }
        for (copy, then) in copies {
            let place = self.making.log.write(&key, self.delivery(script, &arguments, copy));
            expected.push_back(Expected { entry: Some((key.clone(), place)), then });
            out.extend(frames::packed(&words));
        }
        if late {
            self.send_later(words, script, key, arguments, after, true);
        }
        false
    }

    fn delivery(&self, script: Script, arguments: &[Vec<u8>], copy: bool) -> Delivery {
        let (who, at) = (self.making.who, self.making.clock.now());
        Delivery { who, script, arguments: arguments.to_vec(), at, copy, fate: Fate::Nothing }
    }

    /// The same call of the text that is planted, if one is.
    fn planted(&self, mut words: Vec<Vec<u8>>, script: Script) -> Vec<Vec<u8>> {
        if let Some(code) = self.making.planted.get(script.name()) {
            words[0] = b"EVAL".to_vec();
            words[1] = code.as_bytes().to_vec();
        }
        words
    }

    /// Sends a call after a while, for nobody.
    fn send_later(
        self: &Arc<Self>,
        words: Vec<Vec<u8>>,
        script: Script,
        key: String,
        arguments: Vec<Vec<u8>>,
        after: Duration,
        copy: bool,
    ) {
        let shared = Arc::clone(self);
        shared.waiting.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            let upstream = shared.upstream.borrow().clone();
            let sending = async {
                match upstream {
                    Upstream::Socket(path) => {
                        let stream = UnixStream::connect(path).await?;
                        shared.send_alone(stream, &words, script, &key, &arguments, copy).await
                    }
                    Upstream::Port(port) => {
                        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
                        shared.send_alone(stream, &words, script, &key, &arguments, copy).await
                    }
                }
            };
            // Where Redis is away, it never arrives.
            let _: Result<io::Result<()>, _> = tokio::time::timeout(COPY_PATIENCE, sending).await;
            shared.waiting.fetch_sub(1, Ordering::SeqCst);
        });
    }

    async fn send_alone(
        &self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
        words: &[Vec<u8>],
        script: Script,
        key: &str,
        arguments: &[Vec<u8>],
        copy: bool,
    ) -> io::Result<()> {
        let place = self.making.log.write(key, self.delivery(script, arguments, copy));
        stream.write_all(&frames::packed(words)).await?;
        let mut bytes = BytesMut::new();
        while frames::reply_length(&bytes).is_none() {
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
        }
        self.making.log.fate(&(key.to_owned(), place), fate_of(&bytes));
        Ok(())
    }
}
