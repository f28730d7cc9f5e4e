//! What many, slow, greedy and broken clients cannot take from the others; over real HTTP, with real numbers of them.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use onejob::job::Class;
use onejob::server::ServerOptions;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::http_support::{Answer, Client, Site, raw, rest, route, slot};
use crate::support::{Redis, SOON, until};

/// How long thousands of requests may take, in a debug build beside other tests.
const PATIENCE: Duration = Duration::from_secs(60);
const SUBMIT: &str = "POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\ncontent-type: application/json\r\n";
const HEALTHZ: &str = "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n";
const HEALTHZ_ONCE: &str = "GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

/// How often Redis was asked to run a script since its statistics were reset.
async fn scripts_run(redis: &Redis) -> u64 {
    let stats: String = redis.command(&["INFO", "commandstats"]).await;
    let calls = |name: &str| {
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{name}:calls=")));
        line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse::<u64>().unwrap())
    };
    calls("eval") + calls("evalsha") + calls("eval_ro") + calls("evalsha_ro")
}

async fn all(waits: Vec<JoinHandle<Answer>>) -> Vec<Answer> {
    let mut answers = Vec::with_capacity(waits.len());
    for wait in waits {
        answers.push(tokio::time::timeout(PATIENCE, wait).await.expect("an answer").unwrap());
    }
    answers
}

/// A hundred connections with a hundred requests each: HTTP/2, as a proxy in front would send them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_waiters_on_one_job_get_its_one_result_and_redis_is_hardly_asked() {
    const WAITERS: usize = 10_000;
    let site = Site::with_setup(|setup| {
        setup.runtime.waiters_max = WAITERS;
        setup.store.response_timeout = PATIENCE;
        setup.server.wait_max = 2 * PATIENCE;
        // A client that is as busy as this one answers no ping in ten seconds.
        setup.server.head_timeout = 2 * PATIENCE;
    })
    .await;
    let id = site.alice().submit("outside", "k", "{}").await.job_id();
    let path: Arc<str> = Arc::from(format!("/v1/jobs/{id}"));
    let wait = |client: &Client| {
        let (client, path) = (client.clone(), Arc::clone(&path));
        tokio::spawn(async move { client.send("GET", &path, &[("prefer", "wait=120")], "").await })
    };
    let mut waits: Vec<_> = (0..100)
        .map(|_| site.alice().over_http2())
        .flat_map(|client| (0..100).map(|_| wait(&client)).collect::<Vec<_>>())
        .collect();
    assert_eq!(waits.len(), WAITERS);
    // One more than there are places: which of them is refused is left to chance.
    waits.push(wait(&site.alice()));
    let began = Instant::now();
    let refused = loop {
        if let Some(place) = waits.iter().position(JoinHandle::is_finished) {
            break waits.swap_remove(place).await.unwrap();
        }
        assert!(began.elapsed() < PATIENCE, "nobody is refused");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let problem = refused.problem(503, "waiters-too-many");
    assert!(problem["detail"].as_str().unwrap().contains("10000") && problem["limit"] == WAITERS, "{problem}");
    assert!(waits.iter().all(|wait| !wait.is_finished()));

    site.redis.value(&["CONFIG", "RESETSTAT"]).await;
    until("the job has been read again for all of them", async || scripts_run(&site.redis).await >= 2).await;
    let operator = site.operator();
    let (number, token) = operator.begin_running(&id, "laser").await;
    let finish = format!(r#"{{"token":"{token}","outcome":"succeeded","result":{{"page":4711}}}}"#);
    operator.post(&format!("/v1/jobs/{id}/attempts/{number}/finish"), &finish).await.is(200);
    for answer in all(waits).await {
        let job = answer.is(200).json();
        assert_eq!((job["state"].as_str(), job["result"]["body"]["page"].as_u64()), (Some("succeeded"), Some(4711)));
    }
    let asked = scripts_run(&site.redis).await;
    assert!(asked < 100, "{asked} scripts for {WAITERS} waiters");
}

/// A provider that holds its answers back until it is told.
struct Gate {
    addr: SocketAddr,
    received: Arc<AtomicUsize>,
    open: watch::Sender<bool>,
}

impl Gate {
    async fn start() -> Gate {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (addr, received, (open, opened)) =
            (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)), watch::channel(false));
        let count = Arc::clone(&received);
        let answer = move || {
            let (place, mut opened) = (count.fetch_add(1, Ordering::SeqCst), opened.clone());
            async move {
                opened.wait_for(|open| *open).await.unwrap();
                format!("answer {place}")
            }
        };
        let app = axum::Router::new().fallback(answer);
        tokio::spawn(async move { axum::serve(listener, app).await });
        Gate { addr, received, open }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_duplicates_of_a_slow_key_starve_nobody() {
    let gate = Gate::start().await;
    let site = Site::with_setup(|setup| {
        setup.providers.push(slot("gate", &format!("http://{}", gate.addr), Duration::from_secs(60)));
        setup.routes.push(route("gate", Class::Exclusive, &["gate"]));
        setup.runtime.waiters_max = 1000;
        setup.store.response_timeout = PATIENCE;
    })
    .await;
    let submit = |route: &'static str, key: String| {
        let alice = site.alice();
        tokio::spawn(async move { alice.submit_with(route, &key, "{}", &[("prefer", "wait=60")]).await })
    };
    let slow: Vec<_> = (0..50).map(|_| submit("gate", "slow".to_owned())).collect();
    until("the slow key's provider is asked", async || gate.received.load(Ordering::SeqCst) == 1).await;
    let others = (0..300).map(|key| submit("print", format!("other-{key}"))).collect();
    for answer in all(others).await {
        assert_eq!(answer.is(200).json()["state"], "succeeded");
    }
    assert!(slow.iter().all(|wait| !wait.is_finished()), "the others were not only done after the slow one");
    gate.open.send(true).unwrap();
    let answers = all(slow).await;
    let replayed = answers.iter().filter(|answer| answer.header("idempotency-replayed") == "true").count();
    assert_eq!(replayed, 49);
    for answer in answers {
        assert_eq!(answer.is(200).json()["result"]["body"], "answer 0");
    }
    assert_eq!(gate.received.load(Ordering::SeqCst), 1);
}

/// Sends a start, then a byte now and then for as long as anybody listens; returns what was answered.
async fn drip(addr: SocketAddr, start: &str, byte: &[u8]) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(start.as_bytes()).await.unwrap();
    let (mut reading, mut writing) = stream.into_split();
    let byte = byte.to_vec();
    let dripping = tokio::spawn(async move {
        while writing.write_all(&byte).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut answer = Vec::new();
    // A connection that is cut off while bytes are on their way is reset.
    let _ = tokio::time::timeout(SOON, reading.read_to_end(&mut answer)).await.expect("the connection must be closed");
    dripping.abort();
    String::from_utf8_lossy(&answer).into_owned()
}

/// Every byte is a sign of life, and none of them buys time.
#[tokio::test]
async fn who_drips_a_head_or_a_body_is_not_waited_for() {
    let limits = |options: &mut ServerOptions| {
        options.head_timeout = Duration::from_millis(400);
        options.body_timeout = Duration::from_millis(400);
        options.connections_max = 2;
    };
    let site = Site::with(limits).await;
    let addr = site.gateway.addr;
    assert_eq!(drip(addr, "GET /healthz HTTP/1.1\r\nhost: x\r\nx: ", b"x").await, "");
    let body = format!("{SUBMIT}idempotency-key: k\r\ncontent-length: 100000\r\n\r\n");
    let answer = drip(addr, &body, b" ").await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("400 ms, the limit"), "{answer}");
    let chunked = format!("{SUBMIT}idempotency-key: k\r\ntransfer-encoding: chunked\r\n\r\n");
    assert!(drip(addr, &chunked, b"1\r\n \r\n").await.starts_with("HTTP/1.1 408 "));
    // A chunk's extension is no body, and may be as long as whoever sends it likes.
    let answer = drip(addr, &format!("{chunked}1;"), b"x").await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    assert!(site.redis.dump().await.is_empty());
    assert!(raw(addr, HEALTHZ_ONCE.as_bytes()).await.starts_with("HTTP/1.1 200 "));
}

/// A connection whose buffers are full of an answer is given up, and its room is somebody else's.
#[tokio::test]
async fn who_never_reads_the_answer_is_disconnected() {
    let limits = |options: &mut ServerOptions| {
        options.head_timeout = Duration::from_millis(200);
        options.answer_read_max = Duration::from_millis(200);
        options.connections_max = 1;
    };
    let site = Site::with(limits).await;
    let headers = [("idempotency-key", "k"), ("onejob-simulate", "size=8000000"), ("content-type", "application/json")];
    let answer = site.alice().send("POST", "/proxy/chat/x", &headers, "{}").await.is(200);
    assert!(answer.body.len() >= 8_000_000);
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut deaf = socket.connect(site.gateway.addr).await.unwrap();
    let head = "POST /proxy/chat/x HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\nonejob-simulate: size=8000000\r\n\
                content-type: application/json\r\nidempotency-key: k\r\ncontent-length: 2\r\n\r\n{}";
    deaf.write_all(head.as_bytes()).await.unwrap();
    deaf.readable().await.unwrap();
    assert!(raw(site.gateway.addr, HEALTHZ_ONCE.as_bytes()).await.starts_with("HTTP/1.1 200 "));
    let mut read = Vec::new();
    let _ = tokio::time::timeout(SOON, deaf.read_to_end(&mut read)).await.expect("it is closed");
    assert!(read.starts_with(b"HTTP/1.1 200 ") && read.len() < 8_000_000, "{} bytes", read.len());
}

/// Requests that are answered keep a connection alive; beside them there may be answers that nobody reads.
#[tokio::test]
async fn a_connection_that_is_never_idle_ends_too() {
    let site = Site::with(|options| options.connection_age_max = Duration::from_millis(400)).await;
    let mut stream = TcpStream::connect(site.gateway.addr).await.unwrap();
    let (began, mut answered, mut chunk) = (Instant::now(), 0, [0; 4096]);
    loop {
        assert!(began.elapsed() < SOON, "still open");
        let sent = stream.write_all(HEALTHZ.as_bytes()).await;
        match stream.read(&mut chunk).await {
            Ok(1..) => answered += 1,
            Ok(0) | Err(_) => break,
        }
        sent.unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(began.elapsed() >= Duration::from_millis(350) && answered >= 5, "{answered} in {:?}", began.elapsed());
}

#[tokio::test]
async fn a_flood_of_silent_connections_delays_the_others_and_locks_nobody_out() {
    let limits = |options: &mut ServerOptions| {
        options.connections_max = 20;
        options.head_timeout = Duration::from_millis(300);
    };
    let site = Site::with(limits).await;
    let mut silent = Vec::new();
    for number in 0..200 {
        let mut stream = TcpStream::connect(site.gateway.addr).await.unwrap();
        // Some of them have begun to say something.
        stream.write_all(&b"GET / HTTP/1.1\r\nx: "[..number % 20]).await.unwrap();
        silent.push(stream);
    }
    assert!(raw(site.gateway.addr, HEALTHZ_ONCE.as_bytes()).await.starts_with("HTTP/1.1 200 "));
    drop(silent);
}

#[tokio::test]
async fn heads_that_are_made_to_hurt_are_refused() {
    let site = Site::start().await;
    let addr = site.gateway.addr;
    let submit = |lines: &str| {
        format!("{SUBMIT}{lines}content-length: 32\r\nconnection: close\r\n\r\n{{\"route\":\"outside\",\"input\":true}}")
    };
    assert!(raw(addr, submit("idempotency-key: fine\r\n").as_bytes()).await.starts_with("HTTP/1.1 202 "));
    let before = site.redis.dump().await;
    let many = |name: &str, count: usize| format!("{name}: k\r\n").repeat(count);
    for (what, lines, status, says) in [
        ("a key of one character too many", format!("idempotency-key: {}\r\n", "k".repeat(256)), 400, "key-invalid"),
        ("a huge key", format!("idempotency-key: {}\r\n", "k".repeat(20_000)), 400, "key-invalid"),
        ("a key beyond the head", format!("idempotency-key: {}\r\n", "k".repeat(40_000)), 431, "head-too-large"),
        ("two keys", many("idempotency-key", 2), 400, "key-invalid"),
        ("many keys", many("idempotency-key", 90), 400, "key-invalid"),
        ("more headers than there may be", many("x", 101), 431, "headers-too-many"),
        ("very many headers", many("x", 20_000), 431, ""),
        ("a folded line", "idempotency-key: k\r\n folded\r\n".to_owned(), 400, ""),
        ("a folded line at the start", " folded: x\r\nidempotency-key: k\r\n".to_owned(), 400, ""),
        ("a space before the colon", "idempotency-key : k\r\n".to_owned(), 400, ""),
        ("a control character", "idempotency-key: a\u{1}b\r\n".to_owned(), 400, ""),
        ("a zero", "idempotency-key: a\0b\r\n".to_owned(), 400, ""),
        ("another length", "idempotency-key: k\r\ncontent-length: 3\r\n".to_owned(), 400, ""),
        ("a length that is none", "idempotency-key: k\r\ncontent-length: -1\r\n".to_owned(), 400, ""),
        ("an unknown coding", "idempotency-key: k\r\ntransfer-encoding: gzip\r\n".to_owned(), 400, ""),
    ] {
        let answer = raw(addr, submit(&lines).as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(says), "{what}: {answer}");
    }
    assert_eq!(site.redis.dump().await, before);
}

#[tokio::test]
async fn a_body_of_another_length_than_declared_makes_no_job() {
    let site = Site::with(|options| options.body_timeout = Duration::from_millis(300)).await;
    let addr = site.gateway.addr;
    let body = r#"{"route":"outside","input":true}"#;
    let submit = |length: usize| format!("{SUBMIT}idempotency-key: k\r\ncontent-length: {length}\r\n\r\n{body}");
    // Too long: the rest never comes, or the client closes its side.
    assert!(raw(addr, submit(body.len() + 1).as_bytes()).await.starts_with("HTTP/1.1 408 "));
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(submit(body.len() + 1).as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{answer}");
    // Too short: what is left over is no request.
    let answer = raw(addr, submit(body.len() - 1).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(!answer.contains("202 Accepted"));
    assert!(site.redis.dump().await.is_empty());
}

#[tokio::test]
async fn who_asks_before_sending_is_told_in_time() {
    let site = Site::with(|options| options.body_bytes_max = 1000).await;
    let ask = |length: usize| {
        format!("{SUBMIT}idempotency-key: k\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n")
    };
    let refused = raw(site.gateway.addr, ask(1001).as_bytes()).await;
    assert!(refused.starts_with("HTTP/1.1 413 ") && !refused.contains("100 Continue"), "{refused}");
    let body = r#"{"route":"outside","input":true}"#;
    let mut stream = TcpStream::connect(site.gateway.addr).await.unwrap();
    stream.write_all(ask(body.len()).as_bytes()).await.unwrap();
    let mut chunk = [0; 64];
    let length = tokio::time::timeout(SOON, stream.read(&mut chunk)).await.unwrap().unwrap();
    assert_eq!(&chunk[..length], b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 202 "), "{answer}");
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_their_order() {
    let site = Site::start().await;
    let mut sent = String::new();
    for number in 0..30 {
        let body = format!("{{\"route\":\"outside\",\"input\":{number}}}");
        sent += &format!("{SUBMIT}idempotency-key: k{number}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        sent += HEALTHZ;
    }
    sent += "GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let answer = raw(site.gateway.addr, sent.as_bytes()).await;
    let statuses: Vec<&str> = answer.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
    let expected: Vec<&str> = (0..30).flat_map(|_| ["202", "200"]).chain(["404"]).collect();
    assert_eq!(statuses, expected);
    let ids: Vec<&str> = answer.split("\"id\":\"").skip(1).map(|rest| &rest[..36]).collect();
    for (number, id) in ids.iter().enumerate() {
        let job = site.gateway.runtime.read(id.parse().unwrap()).await.unwrap();
        assert_eq!(&site.gateway.runtime.input(&job).await.unwrap().body[..], number.to_string().as_bytes());
    }
    assert_eq!(ids.len(), 30);
}

/// Nothing here unpacks anything: a small body stays small, and the provider is told how to read it.
#[tokio::test]
async fn a_packed_body_is_bytes_like_any_other() {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let answer = |headers: axum::http::HeaderMap, body: axum::body::Bytes| async move {
        let coding = headers.get("content-encoding").map_or(String::new(), |coding| coding.to_str().unwrap().to_owned());
        format!("{coding} {body:?}")
    };
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    let site = Site::with_setup(|setup| {
        setup.providers.push(slot("told", &format!("http://{addr}"), Duration::from_secs(30)));
        setup.routes.push(route("told", Class::Exclusive, &["told"]));
    })
    .await;
    // An empty gzip stream, and what would be a member of it.
    let packed: &[u8] = &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let headers =
        [("idempotency-key", "k"), ("content-type", "application/json"), ("content-encoding", "gzip"), ("accept", "*/*")];
    let answer = site.alice().send("POST", "/proxy/told/x", &headers, packed).await.is(200);
    assert_eq!(answer.text(), format!("gzip {:?}", bytes::Bytes::from(packed)));
    // Where a document is expected, packed bytes are none.
    site.alice().send("POST", "/v1/jobs", &headers, packed).await.problem(400, "request-invalid");
}

/// HTTP/2 by hand: what no library would send.
mod by_hand {
    use super::*;

    pub const DATA_HEADERS: u8 = 1;
    pub const RESET: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const GOAWAY: u8 = 7;
    pub const CONTINUATION: u8 = 9;
    pub const END_STREAM: u8 = 1;
    pub const END_HEADERS: u8 = 4;
    pub const REFUSED_STREAM: u32 = 7;
    pub const CANCEL: u32 = 8;
    pub const ENHANCE_YOUR_CALM: u32 = 11;

    #[derive(Debug)]
    pub struct Frame {
        pub kind: u8,
        pub stream: u32,
        pub payload: Vec<u8>,
    }

    impl Frame {
        pub fn code(&self, at: usize) -> u32 {
            u32::from_be_bytes(self.payload[at..at + 4].try_into().unwrap())
        }
    }

    pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
        frame.extend_from_slice(&[kind, flags]);
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        frame
    }

    pub fn reset(stream: u32) -> Vec<u8> {
        frame(RESET, 0, stream, &CANCEL.to_be_bytes())
    }

    /// The head of a GET, without compression; texts shorter than 127 bytes.
    pub fn head(path: &str, lines: &[(&str, &str)]) -> Vec<u8> {
        let text = |block: &mut Vec<u8>, text: &str| {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        };
        // GET and http from the static table, then a path and an authority under their names there.
        let mut block = vec![0x82, 0x86, 0x04];
        text(&mut block, path);
        block.push(0x01);
        text(&mut block, "x");
        for (name, value) in lines {
            block.push(0x00);
            text(&mut block, name);
            text(&mut block, value);
        }
        block
    }

    pub fn get(stream: u32, path: &str, lines: &[(&str, &str)]) -> Vec<u8> {
        frame(DATA_HEADERS, END_STREAM | END_HEADERS, stream, &head(path, lines))
    }

    /// Opens a connection: the preface and no settings of our own.
    pub async fn open(addr: SocketAddr) -> TcpStream {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let mut start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        start.extend(frame(SETTINGS, 0, 0, &[]));
        stream.write_all(&start).await.unwrap();
        stream
    }

    /// The next frame; `None` once the connection is closed.
    pub async fn next(stream: &mut TcpStream) -> Option<Frame> {
        let read = async {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.ok()?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; length as usize];
            stream.read_exact(&mut payload).await.ok()?;
            Some(Frame { kind: head[3], stream: u32::from_be_bytes(head[5..].try_into().unwrap()), payload })
        };
        tokio::time::timeout(SOON, read).await.expect("a frame, or the connection's end")
    }

    /// The next frame of a kind.
    pub async fn next_of(stream: &mut TcpStream, kind: u8) -> Option<Frame> {
        loop {
            let frame = next(stream).await?;
            if frame.kind == kind {
                return Some(frame);
            }
        }
    }
}

#[tokio::test]
async fn an_http2_connection_has_a_hundred_streams_and_says_so() {
    let site = Site::start().await;
    let id = site.alice().submit("outside", "k", "{}").await.job_id();
    let mut stream = by_hand::open(site.gateway.addr).await;
    let settings = by_hand::next_of(&mut stream, by_hand::SETTINGS).await.unwrap();
    let told: Vec<(u8, [u8; 4])> = settings.payload.chunks(6).map(|one| (one[1], one[2..].try_into().unwrap())).collect();
    let value = |id: u8| told.iter().find(|(known, _)| *known == id).map(|(_, value)| u32::from_be_bytes(*value));
    // SETTINGS_MAX_CONCURRENT_STREAMS and SETTINGS_MAX_HEADER_LIST_SIZE (RFC 9113, 6.5.2).
    assert_eq!((value(3), value(6)), (Some(100), Some(64 << 10)));
    let lines = [("authorization", "Bearer alice"), ("prefer", "wait=60")];
    for number in 0..101 {
        stream.write_all(&by_hand::get(2 * number + 1, &format!("/v1/jobs/{id}"), &lines)).await.unwrap();
    }
    let refused = by_hand::next_of(&mut stream, by_hand::RESET).await.unwrap();
    assert_eq!((refused.stream, refused.code(0)), (201, by_hand::REFUSED_STREAM));
    // The others still wait, and are answered.
    site.alice().send("POST", &format!("/v1/jobs/{id}/cancel"), &[], "").await.is(200);
    let mut answered = 0;
    while answered < 100 {
        let frame = by_hand::next_of(&mut stream, by_hand::DATA_HEADERS).await.unwrap();
        assert_eq!(frame.stream % 2, 1);
        answered += 1;
    }
}

/// Requests that are taken back at once cost the client nothing and us something; the connection ends.
#[tokio::test]
async fn who_resets_streams_rapidly_is_disconnected() {
    // So that it is not disconnected for idling.
    let site = Site::with(|options| options.head_timeout = 2 * PATIENCE).await;
    let mut stream = by_hand::open(site.gateway.addr).await;
    by_hand::next_of(&mut stream, by_hand::SETTINGS).await.unwrap();
    let mut flood = Vec::new();
    for number in 0..2000 {
        flood.extend(by_hand::get(2 * number + 1, "/healthz", &[]));
        flood.extend(by_hand::reset(2 * number + 1));
    }
    // It may be cut off before all is written.
    let _ = stream.write_all(&flood).await;
    if let Some(frame) = by_hand::next_of(&mut stream, by_hand::GOAWAY).await {
        assert_eq!(frame.code(4), by_hand::ENHANCE_YOUR_CALM);
    }
    while by_hand::next(&mut stream).await.is_some() {}
    assert!(raw(site.gateway.addr, HEALTHZ_ONCE.as_bytes()).await.starts_with("HTTP/1.1 200 "));
}

/// A head in frames without an end.
#[tokio::test]
async fn who_never_ends_a_head_in_http2_is_disconnected() {
    // So that it is not disconnected for idling.
    let site = Site::with(|options| options.head_timeout = 2 * PATIENCE).await;
    let mut stream = by_hand::open(site.gateway.addr).await;
    by_hand::next_of(&mut stream, by_hand::SETTINGS).await.unwrap();
    let start = by_hand::frame(by_hand::DATA_HEADERS, by_hand::END_STREAM, 1, &by_hand::head("/healthz", &[]));
    stream.write_all(&start).await.unwrap();
    let more = by_hand::frame(by_hand::CONTINUATION, 0, 1, &by_hand::head("/", &[("x", &"x".repeat(100))])[9..]);
    let began = Instant::now();
    let mut sent = 0_usize;
    while tokio::time::timeout(SOON, stream.write_all(&more)).await.expect("it is read, or the connection is closed").is_ok() {
        sent += more.len();
        assert!(sent < 64 << 20 && began.elapsed() < SOON, "{sent} bytes of one head");
    }
    assert!(raw(site.gateway.addr, HEALTHZ_ONCE.as_bytes()).await.starts_with("HTTP/1.1 200 "));
}

/// The client is there and reads nothing: streams that are full keep neither the connection nor the others.
#[tokio::test]
async fn who_never_reads_in_http2_is_disconnected() {
    let limits = |options: &mut ServerOptions| {
        options.head_timeout = Duration::from_millis(200);
        options.answer_read_max = Duration::from_millis(200);
        options.connection_age_max = Duration::from_millis(600);
        options.connections_max = 1;
    };
    let site = Site::with(limits).await;
    let mut stream = by_hand::open(site.gateway.addr).await;
    // A stream without a window is stuck before its body.
    let none = by_hand::frame(by_hand::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]);
    stream.write_all(&none).await.unwrap();
    stream.write_all(&by_hand::get(1, "/openapi.json", &[])).await.unwrap();
    let mut number = 3;
    let began = Instant::now();
    // One answer after the other is asked for and given up, so that the connection is never idle.
    while stream.write_all(&by_hand::get(number, "/openapi.json", &[])).await.is_ok() {
        assert!(began.elapsed() < SOON, "still open");
        tokio::time::sleep(Duration::from_millis(50)).await;
        let _ = stream.write_all(&by_hand::reset(number)).await;
        number += 2;
    }
    assert!(raw(site.gateway.addr, HEALTHZ_ONCE.as_bytes()).await.starts_with("HTTP/1.1 200 "));
}

/// One client that does not take its answer holds what others need; they wait, and are told, and have it once that one is gone.
#[tokio::test]
async fn large_answers_share_one_memory_and_the_last_one_waits() {
    let limits = |options: &mut ServerOptions| {
        options.answers_bytes_max = 10 << 20;
        options.answer_room_wait = Duration::from_millis(200);
    };
    let site = Site::with(limits).await;
    let headers = [("idempotency-key", "k"), ("onejob-simulate", "size=8000000"), ("content-type", "application/json")];
    let replay = async || site.alice().send("POST", "/proxy/chat/x", &headers, "{}").await;
    replay().await.is(200);
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut deaf = socket.connect(site.gateway.addr).await.unwrap();
    let head = "POST /proxy/chat/x HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\nonejob-simulate: size=8000000\r\n\
                content-type: application/json\r\nidempotency-key: k\r\ncontent-length: 2\r\n\r\n{}";
    deaf.write_all(head.as_bytes()).await.unwrap();
    deaf.readable().await.unwrap();
    let problem = replay().await.problem(503, "overloaded");
    assert_eq!(problem["limit"], 10 << 20);
    // What the record holds is told as ever.
    site.alice().submit_with("print", "small", "{}", &[("prefer", "wait=20")]).await.is(200);
    drop(deaf);
    until("the answer has room", async || replay().await.status == 200).await;
}

/// While Redis does not answer, changes pile up; no more of them than there are places, whatever their clients do.
#[tokio::test]
async fn changes_beyond_the_limit_are_503_at_once() {
    let site = Site::with_setup(|setup| {
        setup.server.detached_max = 5;
        setup.store.response_timeout = Duration::from_secs(5);
    })
    .await;
    let alice = site.alice();
    alice.submit("outside", "before", "{}").await.is(202);
    site.redis.pause();
    let submits: Vec<_> = (0..6)
        .map(|key| {
            let alice = alice.clone();
            tokio::spawn(async move { alice.submit("outside", &format!("k{key}"), "{}").await })
        })
        .collect();
    until("one is refused", async || submits.iter().filter(|submit| submit.is_finished()).count() == 1).await;
    let problem = alice.submit("outside", "k", "{}").await.problem(503, "overloaded");
    assert_eq!(problem["limit"], 5);
    site.redis.resume();
    let statuses: Vec<u16> = all(submits).await.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 202).count(), 5, "{statuses:?}");
    alice.submit("outside", "k", "{}").await.is(202);
}

/// Reopened again and again, a job's record would grow without an end.
#[tokio::test]
async fn a_reopening_beyond_the_attempts_of_one_job_is_refused_by_name() {
    let site = Site::start().await;
    let given = site.redis.given_failed().await;
    given.rewrite("for number = 2, 950 do record[P.attempts][number] = { unpack(record[P.attempts][1]) } end").await;
    let before = given.dump().await;
    let body = r#"{"reason":"once more","attempts":100}"#;
    let problem = site.operator().post(&format!("/v1/jobs/{}/reopen", given.id), body).await.problem(409, "attempts-exhausted");
    assert!(problem["detail"].as_str().unwrap().contains("at most 50, got 100"), "{problem}");
    assert_eq!(given.dump().await, before);
    let body = r#"{"reason":"once more","attempts":50}"#;
    site.operator().post(&format!("/v1/jobs/{}/reopen", given.id), body).await.is(200);
}

/// A job that waits for its next attempt holds its request in memory; beyond the limit it is left to whoever has room.
#[tokio::test]
async fn jobs_that_wait_for_another_attempt_are_no_more_than_jobs_max() {
    let render = onejob::server::metrics_recorder().unwrap();
    let site = Site::with_setup(|setup| {
        setup.server.metrics = Some(render);
        setup.runtime.jobs_max = 1;
    })
    .await;
    let alice = site.alice();
    for key in ["one", "two", "three"] {
        let id = alice.submit("print", key, r#"{"simulate":"refuse_status=429,retry_after=60s"}"#).await.is(202).job_id();
        until("it waits for another attempt", async || {
            let job = alice.get(&format!("/v1/jobs/{id}")).await.json();
            job["state"] == "pending" && job["attempts"][0]["state"] == "failed"
        })
        .await;
    }
    let gauge = async |state: &str| {
        let scrape = site.client("").get("/metrics").await.is(200).text();
        let line = format!("onejob_jobs_open{{state=\"{state}\"}} ");
        scrape.lines().find_map(|other| other.strip_prefix(&line)).map_or(0, |count| count.parse::<u64>().unwrap())
    };
    // Both are set together.
    until("all three are counted in the store", async || gauge("open").await == 3).await;
    assert_eq!(gauge("pending").await, 1);
}
