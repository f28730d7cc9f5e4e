//! The `http` adapter's table of outcomes, against the simulated provider and, where the wire matters, against bare sockets.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onejob::config::{ProviderEntry, Timeouts};
use onejob::job::JobId;
use onejob::provider::http::{HttpOptions, HttpProblem, HttpProvider};
use onejob::provider::simulated::{Keys, Simulated, SimulatedOptions};
use onejob::provider::{Call, Fence, Outcome, Provider, Request, Response, Telling, Told};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use crate::support::{simulated, until};

const JOB: &str = "0190b0c0-0000-8000-8000-000000000001";
const SECRET: &str = "sk-live/0123456789";
const RESULT_BYTES_MAX: usize = 1 << 20;
const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok";

pub fn options(base_url: &str) -> HttpOptions {
    let timeouts = Timeouts {
        connect: Duration::from_secs(5),
        first_byte: Duration::from_secs(10),
        idle: Duration::from_secs(10),
        total: Duration::from_secs(20),
        linger: Duration::from_secs(20),
    };
    let entry = ProviderEntry { base_url: base_url.to_owned(), timeouts, ..ProviderEntry::default() };
    HttpOptions::from_entry(&entry, None, RESULT_BYTES_MAX)
}

fn provider(base_url: &str) -> HttpProvider {
    HttpProvider::new("laser", options(base_url)).unwrap()
}

fn request() -> Request {
    Request {
        method: String::new(),
        target: "/print".to_owned(),
        content_type: "application/json".to_owned(),
        headers: Vec::new(),
        body: Arc::from(br#"{"input":{"text":"hello","n":9007199254740993}}"#.as_slice()),
    }
}

pub fn call(provider: &HttpProvider) -> Call {
    Call {
        rendered: provider.render(&request()).unwrap(),
        job_id: Some(JOB.parse::<JobId>().unwrap()),
        attempt: 1,
        idempotency_key: "attempt-key-1".to_owned(),
        traceparent: None,
        fence: Fence::until(u64::MAX),
        deadline: Instant::now() + Duration::from_secs(30),
        told: Telling::nobody(),
    }
}

/// A call that asks the simulated provider for a behaviour.
pub fn simulate(provider: &HttpProvider, behaviour: &str) -> Call {
    let mut call = call(provider);
    call.rendered.headers.push(("onejob-simulate".to_owned(), behaviour.to_owned()));
    call
}

pub fn reason(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::NotSent { reason }
        | Outcome::Rejected { reason, .. }
        | Outcome::InvalidOutput { reason }
        | Outcome::Unknown { reason } => reason,
        Outcome::Succeeded { .. } => "",
    }
}

pub fn response(outcome: &Outcome) -> &Response {
    match outcome {
        Outcome::Rejected { response, .. } | Outcome::Succeeded { response, .. } => response,
        other => panic!("no response in {other:?}"),
    }
}

#[track_caller]
pub fn assert_not_sent(outcome: &Outcome, prefix: &str) {
    assert!(matches!(outcome, Outcome::NotSent { .. }) && reason(outcome).starts_with(prefix), "{outcome:?}");
}

#[track_caller]
pub fn assert_unknown(outcome: &Outcome, prefix: &str) {
    assert!(matches!(outcome, Outcome::Unknown { .. }) && reason(outcome).starts_with(prefix), "{outcome:?}");
}

/// A server of bare sockets, with what it saw.
struct Raw {
    addr: SocketAddr,
    seen: Arc<Seen>,
    _server: AbortOnDropHandle<()>,
}

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    /// Connections whose client closed them.
    ended: AtomicUsize,
    requests: Mutex<Vec<Vec<u8>>>,
}

impl Raw {
    /// Serves each connection (numbered from 1) by a function of its own.
    async fn serve<F, S>(serve: S) -> Raw
    where
        S: Fn(usize, Wire) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let seen = Arc::new(Seen::default());
        let server = tokio::spawn({
            let seen = Arc::clone(&seen);
            async move {
                let mut connections = tokio::task::JoinSet::new();
                while let Ok((stream, _)) = listener.accept().await {
                    let number = seen.connections.fetch_add(1, Ordering::SeqCst) + 1;
                    connections.spawn(serve(number, Wire { stream, seen: Arc::clone(&seen) }));
                }
            }
        });
        Raw { addr, seen, _server: AbortOnDropHandle::new(server) }
    }

    /// Answers the first request of each connection with some bytes, then closes.
    async fn answering(bytes: &'static [u8]) -> Raw {
        Raw::serve(move |_, mut wire| async move {
            wire.request().await;
            wire.send(bytes).await;
        })
        .await
    }

    fn base_url(&self) -> String {
        format!("http://{}", self.addr)
    }

    fn requests(&self) -> Vec<Vec<u8>> {
        self.seen.requests.lock().unwrap().clone()
    }

    fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }
}

struct Wire {
    stream: TcpStream,
    seen: Arc<Seen>,
}

impl Wire {
    /// Reads one whole request, or to the client's end.
    async fn request(&mut self) -> bool {
        let mut bytes = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&bytes).to_ascii_lowercase();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
                    self.seen.requests.lock().unwrap().push(bytes);
                    return true;
                }
            }
            if !matches!(self.stream.read_buf(&mut bytes).await, Ok(1..)) {
                assert_eq!(String::from_utf8_lossy(&bytes), "", "a request was cut");
                self.seen.ended.fetch_add(1, Ordering::SeqCst);
                return false;
            }
        }
    }

    async fn send(&mut self, bytes: &[u8]) {
        // The client may have gone away, which is the point of some tests.
        let _ = self.stream.write_all(bytes).await;
    }
}

// What was sent

#[tokio::test]
async fn a_complete_answer_is_a_success_with_its_model_and_remote_id() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let outcome = provider.submit(call(&provider)).await;
    let Outcome::Succeeded { response, remote_id, model } = &outcome else { panic!("{outcome:?}") };
    assert_eq!(response.status, 200);
    assert_eq!(model.as_deref(), Some("simulated-1"));
    let body: serde_json::Value = serde_json::from_slice(&response.body).unwrap();
    assert_eq!(body["id"].as_str(), remote_id.as_deref());
    assert_eq!(body["execution"], 1);
    assert_eq!(body["input"].to_string(), r#"{"n":9007199254740993,"text":"hello"}"#);
    let names: Vec<&str> = response.headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["content-type", "date"]);

    let ledger = simulated.ledger_of(JOB);
    assert_eq!((ledger.received, ledger.accepted, ledger.executed, ledger.answered), (1, 1, 1, 1));
    assert_eq!((ledger.entries[0].attempt.as_str(), ledger.entries[0].path.as_str()), ("1", "/print"));
}

#[tokio::test]
async fn the_same_call_is_the_same_bytes_and_names_the_attempt() {
    let raw = Raw::answering(OK).await;
    let mut options = options(&format!("{}/v1/", raw.base_url()));
    options.bearer = Some(SECRET.to_owned());
    options.idempotency_header = Some("Idempotency-Key".to_owned());
    options.headers.insert("x-own".to_owned(), "1".to_owned());
    let provider = HttpProvider::new("laser", options).unwrap();
    for _ in 0..2 {
        let mut call = call(&provider);
        call.traceparent = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned());
        assert_eq!(provider.submit(call).await.word(), "succeeded");
    }
    let expected = format!(
        "POST /v1/print HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nx-own: 1\r\ncontent-length: 47\r\n\
         authorization: Bearer {SECRET}\r\nidempotency-key: attempt-key-1\r\n\
         traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nonejob-job-id: {JOB}\r\nonejob-attempt: 1\r\n\r\n\
         {{\"input\":{{\"text\":\"hello\",\"n\":9007199254740993}}}}",
        raw.addr
    );
    let requests = raw.requests();
    assert_eq!(requests.len(), 2);
    for request in requests {
        assert_eq!(String::from_utf8(request).unwrap(), expected);
    }
}

// Before the first byte: not sent

#[tokio::test]
async fn a_refused_connection_is_not_sent() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    assert_eq!(provider.submit(call(&provider)).await.word(), "succeeded");
    simulated.set_behaviour("refuse").unwrap();
    let addr = simulated.addr();
    until_refused(addr).await;
    assert_not_sent(&provider.submit(call(&provider)).await, "connect: ");
    simulated.set_behaviour("succeed").unwrap();
    until_accepted(addr).await;
    assert_eq!(provider.submit(call(&provider)).await.word(), "succeeded");
    assert_eq!(simulated.ledger().executed, 2);
}

pub async fn until_refused(addr: SocketAddr) {
    until(&format!("{addr} refuses"), async || TcpStream::connect(addr).await.is_err()).await;
}

pub async fn until_accepted(addr: SocketAddr) {
    until(&format!("{addr} accepts"), async || TcpStream::connect(addr).await.is_ok()).await;
}

#[tokio::test]
async fn a_name_that_does_not_resolve_is_not_sent() {
    let provider = provider("http://no-such-host.invalid");
    let outcome = provider.submit(call(&provider)).await;
    assert!(matches!(outcome, Outcome::NotSent { .. }), "{outcome:?}");
}

#[tokio::test]
async fn a_connect_timeout_is_not_sent() {
    // Nobody accepts and the backlog is full: the kernel leaves further connections unanswered.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let listener = socket.listen(1).unwrap();
    let addr = listener.local_addr().unwrap();
    let mut full = Vec::new();
    while let Ok(stream) = tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(addr)).await {
        full.push(stream.unwrap());
        assert!(full.len() < 64, "the backlog never fills");
    }
    let mut options = options(&format!("http://{addr}"));
    options.timeouts.connect = Duration::from_millis(200);
    let provider = HttpProvider::new("laser", options).unwrap();
    let outcome = provider.submit(call(&provider)).await;
    assert_eq!(outcome, Outcome::NotSent { reason: "timeout: connect after 200ms".to_owned() });
}

#[tokio::test]
async fn a_tls_handshake_without_an_answer_is_not_sent() {
    let raw = Raw::serve(|_, wire| async move {
        std::future::pending::<()>().await;
        drop(wire);
    })
    .await;
    let mut options = options(&format!("https://{}", raw.addr));
    options.ca_file = Some(tls_file("authority.pem"));
    options.timeouts.connect = Duration::from_millis(200);
    let provider = HttpProvider::new("laser", options).unwrap();
    let outcome = provider.submit(call(&provider)).await;
    assert_eq!(outcome, Outcome::NotSent { reason: "timeout: connect after 200ms".to_owned() });
    assert_eq!(raw.connections(), 1);
}

#[tokio::test]
async fn a_closed_fence_lets_no_byte_out() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let fenced = Outcome::NotSent { reason: "fenced: the lease ran out before the first byte".to_owned() };
    for fence in [Fence::until(0), Fence::until(onejob::provider::boottime_ms())] {
        let call = Call { fence, ..call(&provider) };
        assert_eq!(provider.submit(call).await, fenced);
    }
    // On a connection that is open already, too.
    assert_eq!(provider.submit(call(&provider)).await.word(), "succeeded");
    let closed = call(&provider);
    closed.fence.close();
    assert_eq!(provider.submit(closed).await, fenced);
    assert_eq!(simulated.ledger().received, 1);
}

#[tokio::test]
async fn a_fence_that_closes_while_connecting_lets_no_byte_out() {
    let raw = Raw::serve(|_, mut wire| async move {
        wire.request().await;
    })
    .await;
    let provider = provider(&raw.base_url());
    let call = call(&provider);
    let fence = call.fence.clone();
    let submit = provider.submit(call);
    fence.close();
    assert_not_sent(&submit.await, "fenced");
    drop(provider);
    until("the connection to end without a byte", async || raw.seen.ended.load(Ordering::SeqCst) == raw.connections()).await;
    assert_eq!(raw.requests(), Vec::<Vec<u8>>::new());
}

#[tokio::test]
async fn a_deadline_that_has_passed_is_not_sent() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let call = Call { deadline: Instant::now(), ..call(&provider) };
    assert_not_sent(&provider.submit(call).await, "timeout: total after 0");
    assert_eq!(simulated.ledger().connections, 0);
}

#[tokio::test]
async fn a_url_of_another_origin_is_not_sent() {
    let (ours, theirs) = (simulated().await, simulated().await);
    let provider = provider(&ours.base_url());
    let mut call = call(&provider);
    call.rendered.url = format!("{}/print", theirs.base_url());
    assert_not_sent(&provider.submit(call).await, "invalid: the rendered url");
    assert_eq!(theirs.ledger().connections, 0);
}

// Kept connections

#[tokio::test]
async fn connections_are_kept_and_used_again() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    for _ in 0..20 {
        assert_eq!(provider.submit(call(&provider)).await.word(), "succeeded");
    }
    let ledger = simulated.ledger();
    assert_eq!((ledger.executed, ledger.connections), (20, 1));
}

/// The server answers, then closes. The next request must find that out before it hands over a byte, however soon it comes.
#[tokio::test]
async fn a_kept_connection_closed_by_the_server_is_replaced_and_the_request_sent_once() {
    let raw = Raw::answering(OK).await;
    let provider = provider(&raw.base_url());
    for round in 1..=200 {
        assert_eq!(provider.submit(call(&provider)).await.word(), "succeeded", "round {round}");
        assert_eq!((raw.requests().len(), raw.connections()), (round, round));
        // The server has closed once the task that served the connection has dropped its reference.
        until("the connection to be closed", async || Arc::strong_count(&raw.seen) == 2).await;
    }
}

/// Nothing runs between the server's close and the next request, so only the kernel knows that the connection has ended.
#[test]
fn a_close_that_no_task_has_noticed_is_found_before_the_first_byte() {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let provider = provider(&format!("http://{addr}"));
    let (closed_sender, closed) = std::sync::mpsc::sync_channel(1);
    let (answered, answered_receiver) = std::sync::mpsc::sync_channel::<()>(1);
    let server = std::thread::spawn(move || {
        let mut requests = 0;
        for _ in 0..100 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut head = vec![0; 64 << 10];
            let mut length = 0;
            while !head[..length].windows(4).any(|window| window == b"}}\r\n") && !head[..length].ends_with(b"}}") {
                length += stream.read(&mut head[length..]).unwrap();
            }
            requests += 1;
            stream.write_all(OK).unwrap();
            answered_receiver.recv().unwrap();
            drop(stream);
            closed_sender.send(()).unwrap();
        }
        requests
    });
    runtime.block_on(async {
        for round in 1..=100 {
            let outcome = provider.submit(call(&provider)).await;
            assert_eq!(outcome.word(), "succeeded", "round {round}: {outcome:?}");
            answered.send(()).unwrap();
            // Blocks the only thread on purpose: no task of ours sees the close.
            closed.recv().unwrap();
        }
    });
    assert_eq!(server.join().unwrap(), 100);
}

#[tokio::test]
async fn a_kept_connection_lost_after_the_request_was_written_is_unknown_and_not_sent_again() {
    let raw = Raw::serve(|_, mut wire| async move {
        wire.request().await;
        wire.send(OK).await;
        wire.request().await;
    })
    .await;
    let provider = provider(&raw.base_url());
    assert_eq!(provider.submit(call(&provider)).await.word(), "succeeded");
    assert_unknown(&provider.submit(call(&provider)).await, "reset: ");
    assert_eq!((raw.requests().len(), raw.connections()), (2, 1));
    assert_eq!(provider.submit(call(&provider)).await.word(), "succeeded");
    assert_eq!((raw.requests().len(), raw.connections()), (3, 2));
}

#[tokio::test]
async fn bytes_that_nobody_asked_for_spoil_a_kept_connection() {
    let raw = Raw::serve(|_, mut wire| async move {
        while wire.request().await {
            wire.send(&[OK, OK].concat()).await;
        }
    })
    .await;
    let provider = provider(&raw.base_url());
    for round in 1..=3 {
        assert_eq!(provider.submit(call(&provider)).await.word(), "succeeded");
        assert_eq!(raw.connections(), round);
    }
}

#[tokio::test]
async fn dropping_the_provider_closes_its_connections() {
    let raw = Raw::serve(|_, mut wire| async move {
        while wire.request().await {
            wire.send(OK).await;
        }
    })
    .await;
    let provider = provider(&raw.base_url());
    let outcomes = [provider.submit(call(&provider)), provider.submit(call(&provider))];
    for outcome in futures_util::future::join_all(outcomes).await {
        assert_eq!(outcome.word(), "succeeded");
    }
    assert_eq!((raw.connections(), raw.seen.ended.load(Ordering::SeqCst)), (2, 0));
    drop(provider);
    until("both connections to end", async || raw.seen.ended.load(Ordering::SeqCst) == 2).await;
}

// After the first byte: unknown, unless the answer is complete and definite

#[tokio::test]
async fn a_connection_lost_after_the_execution_is_unknown_with_one_execution() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let outcome = provider.submit(simulate(&provider, "drop")).await;
    assert_eq!(outcome, Outcome::Unknown { reason: "reset: the connection ended before the answer's head".to_owned() });
    let ledger = simulated.ledger();
    assert_eq!((ledger.received, ledger.executed, ledger.answered), (1, 1, 0));
}

#[tokio::test]
async fn a_reset_connection_is_unknown_and_the_request_is_not_sent_again() {
    let raw = Raw::serve(|_, mut wire| async move {
        wire.request().await;
        wire.stream.set_zero_linger().unwrap();
    })
    .await;
    let provider = provider(&raw.base_url());
    assert_unknown(&provider.submit(call(&provider)).await, "reset: ");
    assert_eq!((raw.requests().len(), raw.connections()), (1, 1));
}

#[tokio::test]
async fn half_an_answer_is_unknown() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    for behaviour in ["half", "half,chunked", "half,size=500000", "refuse_status=400,half"] {
        let outcome = provider.submit(simulate(&provider, behaviour)).await;
        assert_unknown(&outcome, "truncated: ");
        assert!(!reason(&outcome).contains(" 0 bytes"), "the half must arrive: {outcome:?}");
    }
    let ledger = simulated.ledger();
    assert_eq!((ledger.received, ledger.executed, ledger.answered), (4, 3, 0));
}

#[tokio::test]
async fn what_is_not_a_complete_http_answer_is_unknown() {
    for (bytes, prefix) in [
        (b"".as_slice(), "reset: "),
        (b"HTTP/1.1 200 OK\r\n", "reset: "),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", "truncated: 200, then 0 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", "truncated: 200, then 3 bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "truncated: 200, then 3 bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx\r\nabc\r\n0\r\n\r\n", "truncated: 200, then 0 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", "truncated: 200 with a body that has neither length nor end"),
        (b"HTTP/1.1 400 Bad\r\ncontent-length: 5\r\n\r\nabc", "truncated: 400, then 3 bytes"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "malformed: "),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", "malformed: "),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", ""),
    ] {
        let raw = Raw::answering(bytes).await;
        let provider = provider(&raw.base_url());
        let outcome = provider.submit(call(&provider)).await;
        assert!(reason(&outcome).starts_with(prefix), "{:?}: {outcome:?}", String::from_utf8_lossy(bytes));
        assert_eq!(outcome.word(), "unknown", "{:?}", String::from_utf8_lossy(bytes));
        assert_eq!((raw.requests().len(), raw.connections()), (1, 1), "{:?}", String::from_utf8_lossy(bytes));
    }
}

#[tokio::test]
async fn an_endless_head_is_unknown() {
    let raw = Raw::serve(|_, mut wire| async move {
        wire.request().await;
        wire.send(b"HTTP/1.1 200 OK\r\n").await;
        while wire.stream.write_all(format!("x: {}\r\n", "y".repeat(1000)).as_bytes()).await.is_ok() {}
    })
    .await;
    let provider = provider(&raw.base_url());
    assert_unknown(&provider.submit(call(&provider)).await, "malformed: the answer's head is too large or");
}

#[tokio::test]
async fn interim_answers_are_passed_over() {
    let raw = Raw::answering(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    )
    .await;
    let provider = provider(&raw.base_url());
    assert_eq!(&*response(&provider.submit(call(&provider)).await).body, b"ok");
}

#[tokio::test]
async fn every_way_to_end_a_body_is_understood() {
    for bytes in [
        OK,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\nx-trailer: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"ok\":true}",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ] {
        let raw = Raw::answering(bytes).await;
        let provider = provider(&raw.base_url());
        let outcome = provider.submit(call(&provider)).await;
        assert_eq!(outcome.word(), "succeeded", "{:?}: {outcome:?}", String::from_utf8_lossy(bytes));
    }
}

#[tokio::test]
async fn invalid_json_is_unknown_though_it_was_executed() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    for (behaviour, status) in [("invalid_json", 200), ("refuse_status=400,invalid_json", 400)] {
        let outcome = provider.submit(simulate(&provider, behaviour)).await;
        assert_eq!(outcome, Outcome::Unknown { reason: format!("bad_json: {status} declares JSON and its body is none") });
    }
    assert_eq!(simulated.ledger().executed, 1);
}

#[tokio::test]
async fn each_status_is_judged_by_the_table() {
    let simulated = simulated().await;
    let mut options = options(&simulated.base_url());
    options.not_executed = vec![503];
    let provider = HttpProvider::new("laser", options).unwrap();
    for status in [200, 201, 202, 299] {
        let outcome = provider.submit(simulate(&provider, &format!("status={status}"))).await;
        assert_eq!((outcome.word(), response(&outcome).status), ("succeeded", status));
    }
    for status in [400, 401, 402, 403, 404, 405, 406, 410, 412, 413, 415, 422, 429, 451, 503] {
        let outcome = provider.submit(simulate(&provider, &format!("refuse_status={status}"))).await;
        assert_eq!((outcome.word(), reason(&outcome)), ("rejected", format!("status {status}").as_str()));
        assert_eq!(response(&outcome).status, status);
        assert!(response(&outcome).body.starts_with(b"{\"error\":"));
    }
    for status in [301, 302, 307, 308, 304, 408, 409, 425, 444, 499, 500, 501, 502, 504, 520, 522, 524, 529, 599] {
        let outcome = provider.submit(simulate(&provider, &format!("status={status}"))).await;
        assert_eq!(outcome, Outcome::Unknown { reason: format!("status {status}") });
    }
    let ledger = simulated.ledger();
    assert_eq!((ledger.received, ledger.executed, ledger.answered), (38, 23, 38));
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let target = simulated().await;
    let location = format!("HTTP/1.1 307 Elsewhere\r\nlocation: {}/print\r\ncontent-length: 0\r\n\r\n", target.base_url());
    let raw = Raw::answering(location.leak().as_bytes()).await;
    let provider = provider(&raw.base_url());
    assert_unknown(&provider.submit(call(&provider)).await, "status 307");
    assert_eq!(target.ledger().connections, 0);
}

#[tokio::test]
async fn retry_after_is_handed_on() {
    let simulated = simulated().await;
    let mut options = options(&simulated.base_url());
    options.not_executed = vec![503];
    let provider = HttpProvider::new("laser", options).unwrap();
    for (behaviour, expected) in [
        ("refuse_status=429,retry_after=2s", Some(2)),
        ("refuse_status=503,retry_after=1500ms", Some(2)),
        ("refuse_status=429", None),
    ] {
        let outcome = provider.submit(simulate(&provider, behaviour)).await;
        let Outcome::Rejected { retry_after, .. } = outcome else { panic!("{outcome:?}") };
        assert_eq!(retry_after, expected.map(Duration::from_secs));
    }
    assert_eq!(simulated.ledger().executed, 0);
}

#[tokio::test]
async fn an_answer_over_the_limit_is_unknown() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    for behaviour in ["size=2000000", "size=2000000,chunked"] {
        let outcome = provider.submit(simulate(&provider, behaviour)).await;
        assert_eq!(outcome, Outcome::Unknown { reason: "too_large: 200 with a body over 1048576 bytes".to_owned() });
    }
    for behaviour in ["size=1000000", "size=1000000,chunked"] {
        let outcome = provider.submit(simulate(&provider, behaviour)).await;
        assert!(response(&outcome).body.len() >= 1_000_000);
    }
    assert_eq!(simulated.ledger().executed, 4);
}

#[tokio::test]
async fn each_timeout_after_the_first_byte_is_unknown_and_says_which() {
    let simulated = simulated().await;
    let base = options(&simulated.base_url());
    let ms = Duration::from_millis;
    for (behaviour, timeouts, expected) in [
        ("hang", Timeouts { first_byte: ms(150), ..base.timeouts }, "timeout: first_byte after 150ms"),
        ("slow_body=5s", Timeouts { idle: ms(150), ..base.timeouts }, "timeout: idle after 150ms"),
        ("slow_body=100ms", Timeouts { total: ms(250), ..base.timeouts }, "timeout: total after 250ms"),
        ("hang", Timeouts { total: ms(150), ..base.timeouts }, "timeout: total after 150ms"),
    ] {
        let provider = HttpProvider::new("laser", HttpOptions { timeouts, ..base.clone() }).unwrap();
        let outcome = provider.submit(simulate(&provider, behaviour)).await;
        assert_eq!(outcome, Outcome::Unknown { reason: expected.to_owned() }, "{behaviour}");
    }
    let ledger = simulated.ledger();
    assert_eq!((ledger.received, ledger.executed, ledger.answered), (4, 4, 0));
}

/// What an adapter tells of a call that is over, and what comes of it late.
async fn late(provider: &HttpProvider, behaviour: &str) -> (Vec<Told>, Outcome) {
    let (told, mut heard) = Telling::channel();
    let outcome = provider.submit(Call { told, ..simulate(provider, behaviour) }).await;
    let mut all = Vec::new();
    while let Some(told) = heard.recv().await {
        all.push(told);
    }
    (all, outcome)
}

#[tokio::test]
async fn a_call_whose_time_is_over_says_so_once_and_listens_for_a_late_answer() {
    let simulated = simulated().await;
    let base = options(&simulated.base_url());
    let ms = Duration::from_millis;
    for (behaviour, timeouts, reason, word) in [
        ("delay=400ms", Timeouts { first_byte: ms(150), ..base.timeouts }, "timeout: first_byte after 150ms", "succeeded"),
        ("delay=400ms", Timeouts { total: ms(150), ..base.timeouts }, "timeout: total after 150ms", "succeeded"),
        ("slow_body=300ms", Timeouts { idle: ms(100), ..base.timeouts }, "timeout: idle after 100ms", "succeeded"),
        ("refuse_status=422,delay=400ms", Timeouts { total: ms(150), ..base.timeouts }, "timeout: total after 150ms", "rejected"),
        ("delay=400ms,drop", Timeouts { total: ms(150), ..base.timeouts }, "timeout: total after 150ms", "unknown"),
    ] {
        let provider = HttpProvider::new("laser", HttpOptions { timeouts, ..base.clone() }).unwrap();
        let (told, outcome) = late(&provider, behaviour).await;
        assert_eq!(told, [Told::Overdue { reason: reason.to_owned() }], "{behaviour}");
        assert_eq!(outcome.word(), word, "{behaviour}: {outcome:?}");
    }
    assert_eq!(simulated.ledger().received, 5);
}

#[tokio::test]
async fn a_late_answer_is_listened_for_no_longer_than_said_and_not_at_all_where_nobody_hears() {
    let simulated = simulated().await;
    let base = options(&simulated.base_url());
    let ms = Duration::from_millis;
    let timeouts = Timeouts { total: ms(150), linger: ms(200), ..base.timeouts };
    let provider = HttpProvider::new("laser", HttpOptions { timeouts, ..base.clone() }).unwrap();
    let begin = Instant::now();
    let (told, outcome) = late(&provider, "hang").await;
    assert_eq!((told.len(), outcome.word()), (1, "unknown"));
    assert!(begin.elapsed() < Duration::from_secs(10));
    let timeouts = Timeouts { total: ms(150), linger: Duration::ZERO, ..base.timeouts };
    let provider = HttpProvider::new("laser", HttpOptions { timeouts, ..base }).unwrap();
    let (told, outcome) = late(&provider, "delay=400ms").await;
    assert_eq!((told.len(), outcome.word()), (0, "unknown"));
}

#[tokio::test]
async fn what_was_not_sent_is_not_listened_for() {
    // Accepts nothing: the connection hangs in the kernel's queue, and then in nobody's.
    let listener = TcpSocket::new_v4().unwrap();
    listener.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let timeouts = Timeouts { connect: Duration::from_millis(200), ..options(&url).timeouts };
    let provider = HttpProvider::new("laser", HttpOptions { timeouts, ..options(&url) }).unwrap();
    let (told, outcome) = late(&provider, "succeed").await;
    assert_eq!((told.len(), outcome.word()), (0, "not_sent"));
}

#[tokio::test]
async fn the_calls_own_deadline_ends_it() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let begin = Instant::now();
    let call = Call { deadline: begin + Duration::from_millis(200), ..simulate(&provider, "hang") };
    assert_unknown(&provider.submit(call).await, "timeout: total after ");
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_slow_answer_within_its_limits_is_a_success() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let outcome = provider.submit(simulate(&provider, "delay=100ms,slow_body=50ms,chunked")).await;
    assert_eq!(outcome.word(), "succeeded");
}

#[tokio::test]
async fn a_request_that_was_written_in_part_is_unknown() {
    // Reads the head only: the rest of a large body has to stay behind.
    let raw = Raw::serve(|_, mut wire| async move {
        let _ = wire.stream.read(&mut [0; 100]).await;
        std::future::pending::<()>().await;
    })
    .await;
    let mut options = options(&raw.base_url());
    options.timeouts.first_byte = Duration::from_millis(300);
    let provider = HttpProvider::new("laser", options).unwrap();
    let mut call = call(&provider);
    call.rendered.body = vec![b'x'; 64 << 20].into();
    assert_unknown(&provider.submit(call).await, "timeout: first_byte");
}

#[tokio::test]
async fn a_call_whose_future_is_dropped_closes_its_connection() {
    let raw = Raw::serve(|_, mut wire| async move { while wire.request().await {} }).await;
    let provider = Arc::new(provider(&raw.base_url()));
    let task = tokio::spawn({
        let provider = Arc::clone(&provider);
        async move { provider.submit(call(&provider)).await }
    });
    until("the request to arrive", async || raw.requests().len() == 1).await;
    task.abort();
    until("the connection to end", async || raw.seen.ended.load(Ordering::SeqCst) == 1).await;
}

// Secrets

#[tokio::test]
async fn an_echoed_credential_is_nowhere_in_the_outcome() {
    let simulated = simulated().await;
    let mut options = options(&simulated.base_url());
    options.bearer = Some(SECRET.to_owned());
    assert!(!format!("{options:?}").contains(SECRET));
    let provider = HttpProvider::new("laser", options).unwrap();
    assert!(!format!("{provider:?}").contains(SECRET));
    assert!(!format!("{:?}", call(&provider)).contains(SECRET));
    for behaviour in
        ["echo_credential", "refuse_status=401,echo_credential", "status=500,echo_credential", "invalid_json,echo_credential"]
    {
        let outcome = provider.submit(simulate(&provider, behaviour)).await;
        let text = match &outcome {
            Outcome::Rejected { response, .. } | Outcome::Succeeded { response, .. } => {
                let body = String::from_utf8(response.body.to_vec()).unwrap();
                assert!(body.contains(r#""authorization":"Bearer [hidden]""#), "{body}");
                assert!(response.headers.contains(&("x-authorization".to_owned(), "Bearer [hidden]".to_owned())));
                format!("{outcome:?} {body}")
            }
            other => format!("{other:?}"),
        };
        assert!(!text.contains(SECRET) && !text.contains("attempt-key"), "{text}");
    }
}

#[test]
fn options_that_cannot_work_are_refused_without_their_secret() {
    let refused = |change: &dyn Fn(&mut HttpOptions)| {
        let mut options = options("http://127.0.0.1:9");
        change(&mut options);
        let error = HttpProvider::new("laser", options).unwrap_err();
        assert!(error.to_string().starts_with("provider laser: "), "{error}");
        assert!(!format!("{error} {error:?}").contains("sk"), "{error}");
        error.problem
    };
    assert_eq!(refused(&|options| options.bearer = Some("sk".to_owned())), HttpProblem::Bearer);
    assert_eq!(refused(&|options| options.bearer = Some("sk-123456\r\nx: y".to_owned())), HttpProblem::Bearer);
    assert_eq!(refused(&|options| options.not_executed = vec![503, 200]), HttpProblem::NotExecuted(200));
    assert_eq!(refused(&|options| options.method = "post".to_owned()), HttpProblem::Method("post".to_owned()));
    assert!(matches!(refused(&|options| options.path = "../x".to_owned()), HttpProblem::Path(_)));
    assert!(matches!(refused(&|options| options.ca_file = Some("/nowhere.pem".into())), HttpProblem::Authorities { .. }));
    for name in ["Authorization", "host", "a b", "onejob-attempt", "content-length"] {
        let set = |options: &mut HttpOptions| drop(options.headers.insert(name.to_owned(), "1".to_owned()));
        assert_eq!(refused(&set), HttpProblem::Header(name.to_owned()));
        let set = |options: &mut HttpOptions| options.idempotency_header = Some(name.to_owned());
        assert_eq!(refused(&set), HttpProblem::Header(name.to_owned()));
    }
}

// TLS

pub fn tls_file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/tls").join(name)
}

/// Answers each connection's first request over TLS, with the certificate in `tests/it/tls`.
fn tls_server() -> SocketAddr {
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let certificate = CertificateDer::from_pem_file(tls_file("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(tls_file("server.key.pem")).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let config = Arc::new(config);
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    // Ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let session = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
            let mut stream = rustls::StreamOwned::new(session, stream.unwrap());
            let mut bytes = Vec::new();
            let mut part = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut part) {
                bytes.extend_from_slice(&part[..length]);
                if bytes.ends_with(b"}}") {
                    bytes.clear();
                    stream.write_all(OK).unwrap();
                    stream.flush().unwrap();
                }
            }
        }
    });
    addr
}

#[tokio::test]
async fn a_trusted_certificate_is_served_and_a_strange_one_is_not_sent_to() {
    let addr = tls_server();
    for (host, authority, expected) in [
        ("localhost", "authority.pem", "succeeded"),
        ("127.0.0.1", "authority.pem", "succeeded"),
        ("localhost", "other_authority.pem", "not_sent"),
        ("127.0.0.2", "authority.pem", "not_sent"),
    ] {
        let mut options = options(&format!("https://{host}:{}", addr.port()));
        options.ca_file = Some(tls_file(authority));
        let provider = HttpProvider::new("laser", options).unwrap();
        for _ in 0..3 {
            let outcome = provider.submit(call(&provider)).await;
            assert_eq!(outcome.word(), expected, "{host} {authority}: {outcome:?}");
        }
    }
}

// One key, one execution

#[tokio::test]
async fn a_provider_that_honours_keys_answers_a_repetition_without_executing_again() {
    let options_ = SimulatedOptions { keys: Keys::Honoured, ..SimulatedOptions::default() };
    let simulated = Simulated::start(options_).await.unwrap();
    let mut options = options(&simulated.base_url());
    options.idempotency_header = Some("idempotency-key".to_owned());
    let provider = HttpProvider::new("laser", options).unwrap();
    assert_eq!(provider.submit(simulate(&provider, "drop")).await.word(), "unknown");
    let first = provider.submit(call(&provider)).await;
    let second = provider.submit(call(&provider)).await;
    assert_eq!(response(&first).body, response(&second).body);
    let ledger = simulated.ledger();
    assert_eq!((ledger.received, ledger.executed), (3, 1));
    let other = provider.submit(Call { idempotency_key: "attempt-key-2".to_owned(), ..call(&provider) }).await;
    assert_ne!(response(&first).body, response(&other).body);
    assert_eq!(simulated.ledger().executed, 2);
}
