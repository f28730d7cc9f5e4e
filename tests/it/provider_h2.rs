//! The `http` adapter over HTTP/2: what is known of each stream, against frames made by hand and against the simulated provider.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use onejob::config::Http2;
use onejob::provider::http::HttpProvider;
use onejob::provider::{Call, Fence, Outcome, Provider};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::provider_http::{assert_not_sent, assert_unknown, call, options, response, simulate, tls_file};
use crate::support::{SOON, simulated};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

const MAX_CONCURRENT_STREAMS: u16 = 3;
const INITIAL_WINDOW_SIZE: u16 = 4;

/// `:status 200`, from the static table.
const STATUS_200: &[u8] = &[0x88];

fn frame(kind: u8, flags: u8, id: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(id.to_be_bytes());
    frame.extend(payload);
    frame
}

fn settings(settings: &[(u16, u32)]) -> Vec<u8> {
    let payload: Vec<u8> =
        settings.iter().flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()).collect();
    frame(SETTINGS, 0, 0, &payload)
}

fn goaway(last: u32, code: u32) -> Vec<u8> {
    frame(GOAWAY, 0, 0, &[last.to_be_bytes(), code.to_be_bytes()].concat())
}

fn reset(id: u32, code: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, id, &code.to_be_bytes())
}

/// A whole answer: 200 and `ok`.
fn answer(id: u32) -> Vec<u8> {
    [frame(HEADERS, END_HEADERS, id, STATUS_200), frame(DATA, END_STREAM, id, b"ok")].concat()
}

/// 200 with a length, and no end.
fn head_with_length(id: u32, length: &str) -> Vec<u8> {
    // A literal without indexing, its name the static table's 28th.
    let field = [&[0x0f, 0x0d, u8::try_from(length.len()).unwrap()], length.as_bytes()].concat();
    frame(HEADERS, END_HEADERS, id, &[STATUS_200, &field].concat())
}

/// Whether a block of headers can be read by who has read none before it (RFC 7541): it names nothing beyond the static table.
fn stands_alone(mut block: &[u8]) -> bool {
    fn number(block: &mut &[u8], prefix: u32) -> usize {
        let most = (1 << prefix) - 1;
        let first = usize::from(block[0]) & most;
        *block = &block[1..];
        if first < most {
            return first;
        }
        let (mut number, mut shift) = (first, 0);
        loop {
            let byte = block[0];
            *block = &block[1..];
            number += usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                return number;
            }
        }
    }
    fn skip_text(block: &mut &[u8]) {
        let length = number(block, 7);
        *block = &block[length..];
    }
    while let Some(first) = block.first() {
        let (prefix, literal) = match first {
            0x80.. => (7, false),
            0x40.. => (6, true),
            0x20.. => {
                number(&mut block, 5);
                continue;
            }
            _ => (4, true),
        };
        let name = number(&mut block, prefix);
        if name > 61 {
            return false;
        }
        if literal {
            if name == 0 {
                skip_text(&mut block);
            }
            skip_text(&mut block);
        }
    }
    true
}

/// A provider of bare sockets.
struct Peer {
    listener: TcpListener,
}

/// One connection at it.
struct Line {
    stream: TcpStream,
    /// The streams whose headers came, in order.
    begun: Vec<u32>,
}

struct Seen {
    kind: u8,
    flags: u8,
    id: u32,
    payload: Vec<u8>,
}

impl Peer {
    async fn listen() -> Peer {
        Peer { listener: TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap() }
    }

    fn provider(&self) -> Arc<HttpProvider> {
        self.provider_with(|_| {})
    }

    fn provider_with(&self, change: impl FnOnce(&mut onejob::provider::http::HttpOptions)) -> Arc<HttpProvider> {
        let mut options = options(&format!("http://{}", self.listener.local_addr().unwrap()));
        options.http2 = Http2::PriorKnowledge;
        change(&mut options);
        Arc::new(HttpProvider::new("laser", options).unwrap())
    }

    async fn accept(&self, first: &[(u16, u32)]) -> Line {
        let (mut stream, _) = tokio::time::timeout(SOON, self.listener.accept()).await.expect("a connection").unwrap();
        stream.set_nodelay(true).unwrap();
        let mut preface = [0; 24];
        stream.read_exact(&mut preface).await.unwrap();
        assert_eq!(&preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        stream.write_all(&settings(first)).await.unwrap();
        Line { stream, begun: Vec::new() }
    }

    /// Whether nobody connects within a moment.
    async fn is_left_alone(&self) -> bool {
        tokio::time::timeout(Duration::from_millis(100), self.listener.accept()).await.is_err()
    }
}

impl Line {
    async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// The next frame; `None` once the client has closed.
    async fn next(&mut self) -> Option<Seen> {
        let mut head = [0; 9];
        tokio::time::timeout(SOON, self.stream.read_exact(&mut head)).await.expect("a frame, or the end").ok()?;
        let [a, b, c, kind, flags, id @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.stream.read_exact(&mut payload).await.ok()?;
        let seen = Seen { kind, flags, id: u32::from_be_bytes(id), payload };
        match seen.kind {
            HEADERS => {
                self.begun.push(seen.id);
                assert!(stands_alone(&seen.payload), "a block that depends on one before it: {:?}", seen.payload);
            }
            PING if seen.flags & ACK == 0 => self.send(&frame(PING, ACK, 0, &seen.payload)).await,
            _ => {}
        }
        Some(seen)
    }

    /// The next request, once all of it is here.
    async fn request(&mut self) -> u32 {
        loop {
            let seen = self.next().await.expect("a request");
            if matches!(seen.kind, HEADERS | DATA) && seen.flags & END_STREAM != 0 {
                return seen.id;
            }
        }
    }

    /// Reads on until the client closes; the streams that ever began.
    async fn rest(mut self) -> Vec<u32> {
        while self.next().await.is_some() {}
        self.begun
    }
}

fn submit(provider: &Arc<HttpProvider>) -> JoinHandle<Outcome> {
    submit_with(provider, |_| {})
}

fn submit_with(provider: &Arc<HttpProvider>, change: impl FnOnce(&mut Call)) -> JoinHandle<Outcome> {
    let mut call = call(provider);
    change(&mut call);
    let provider = Arc::clone(provider);
    tokio::spawn(async move { provider.submit(call).await })
}

#[track_caller]
fn assert_ok(outcome: &Outcome) {
    assert_eq!(outcome.word(), "succeeded", "{outcome:?}");
    assert_eq!(&*response(outcome).body, b"ok");
}

#[tokio::test]
async fn calls_share_a_connection_and_each_is_executed_once() {
    let simulated = simulated().await;
    let mut options = options(&simulated.base_url());
    options.http2 = Http2::PriorKnowledge;
    let provider = Arc::new(HttpProvider::new("laser", options).unwrap());
    let calls: Vec<_> = (0..50).map(|_| submit(&provider)).collect();
    for call in calls {
        let outcome = call.await.unwrap();
        assert_eq!(outcome.word(), "succeeded", "{outcome:?}");
    }
    let ledger = simulated.ledger();
    assert_eq!((ledger.connections, ledger.received, ledger.executed), (1, 50, 50));
    let entry = &ledger.entries[0];
    assert_eq!((entry.method.as_str(), entry.path.as_str(), entry.attempt.as_str()), ("POST", "/print", "1"));
}

#[tokio::test]
async fn each_behaviour_is_judged_as_over_http_1() {
    let simulated = simulated().await;
    let mut options = options(&simulated.base_url());
    options.http2 = Http2::PriorKnowledge;
    let provider = HttpProvider::new("laser", options.clone()).unwrap();
    options.timeouts.first_byte = Duration::from_millis(400);
    let hasty = HttpProvider::new("laser", options).unwrap();
    assert_unknown(&hasty.submit(simulate(&hasty, "hang")).await, "timeout: first_byte");
    drop(hasty);
    for (behaviour, word, reason) in [
        ("succeed", "succeeded", ""),
        ("chunked", "succeeded", ""),
        ("slow_body=20ms", "succeeded", ""),
        ("size=900000", "succeeded", ""),
        ("size=2000000", "unknown", "too_large"),
        ("drop", "unknown", "reset: the provider reset the stream"),
        ("half", "unknown", "truncated: 200"),
        ("chunked,half", "unknown", "truncated: 200"),
        ("status=503", "unknown", "status 503"),
        ("refuse_status=429", "rejected", "status 429"),
        ("invalid_json", "unknown", "bad_json"),
    ] {
        simulated.clear_ledger();
        let outcome = provider.submit(simulate(&provider, behaviour)).await;
        assert_eq!(outcome.word(), word, "{behaviour}: {outcome:?}");
        if word == "unknown" {
            assert_unknown(&outcome, reason);
        }
        let expected = u64::from(word != "rejected");
        assert_eq!((simulated.ledger().received, simulated.ledger().executed), (1, expected), "{behaviour}");
    }
    assert_eq!(simulated.ledger().connections, 2, "one each: no reset costs the connection");
}

#[tokio::test]
async fn large_bodies_pass_in_both_directions() {
    let simulated = simulated().await;
    let mut options = options(&simulated.base_url());
    options.http2 = Http2::PriorKnowledge;
    options.result_bytes_max = 8 << 20;
    let provider = HttpProvider::new("laser", options).unwrap();
    let mut call = simulate(&provider, "size=5000000");
    call.rendered.body = Bytes::from(vec![b'x'; 3_000_000]).to_vec().into();
    let sent = onejob::fingerprint::sha256(&call.rendered.body);
    let outcome = provider.submit(call).await;
    assert!(response(&outcome).body.len() >= 5_000_000);
    let entry = &simulated.ledger().entries[0];
    assert_eq!(entry.body_sha256, sent.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
}

/// The bytes left, and the provider says that it has not looked at them.
#[tokio::test]
async fn a_goaway_below_the_stream_is_not_sent() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let outcome = submit(&provider);
    let mut line = peer.accept(&[]).await;
    assert_eq!(line.request().await, 1);
    line.send(&goaway(0, 0)).await;
    assert_not_sent(&outcome.await.unwrap(), "refused: the provider went away");
    // It is for whoever plans the attempts to send it again.
    assert!(peer.is_left_alone().await);
}

#[tokio::test]
async fn of_two_streams_goaway_refuses_the_one_above_its_last_and_the_other_is_answered() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let first = submit(&provider);
    let mut line = peer.accept(&[]).await;
    assert_eq!(line.request().await, 1);
    let second = submit(&provider);
    assert_eq!(line.request().await, 3);
    // As a provider goes away gracefully: first it says that it will, then where.
    line.send(&goaway(u32::MAX >> 1, 0)).await;
    line.send(&goaway(1, 0)).await;
    assert_not_sent(&second.await.unwrap(), "refused: the provider went away");
    // What comes meanwhile goes elsewhere.
    let third = submit(&provider);
    let mut other = peer.accept(&[]).await;
    assert_eq!(other.request().await, 1);
    other.send(&answer(1)).await;
    assert_ok(&third.await.unwrap());
    line.send(&answer(1)).await;
    assert_ok(&first.await.unwrap());
    assert_eq!(line.rest().await, [1, 3]);
}

#[tokio::test]
async fn a_stream_below_goaways_last_that_is_never_answered_is_unknown() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let outcome = submit(&provider);
    let mut line = peer.accept(&[]).await;
    assert_eq!(line.request().await, 1);
    line.send(&goaway(1, 2)).await;
    drop(line);
    assert!(matches!(outcome.await.unwrap(), Outcome::Unknown { .. }));
    assert!(peer.is_left_alone().await);
}

#[tokio::test]
async fn a_refused_stream_is_not_sent_however_many_and_costs_no_connection() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let calls: Vec<_> = (0..200).map(|_| submit(&provider)).collect();
    let mut line = peer.accept(&[]).await;
    for _ in 0..200 {
        let id = line.request().await;
        line.send(&reset(id, 7)).await;
    }
    for call in calls {
        assert_not_sent(&call.await.unwrap(), "refused: the provider did not look at the stream");
    }
    let after = submit(&provider);
    let id = line.request().await;
    line.send(&answer(id)).await;
    assert_ok(&after.await.unwrap());
    assert!(peer.is_left_alone().await);
}

#[tokio::test]
async fn any_other_reset_is_unknown() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let mut calls = Vec::new();
    let mut line = None;
    for code in [0, 1, 2, 3, 5, 8, 11, 13, 99] {
        calls.push(submit(&provider));
        let line = match &mut line {
            Some(line) => line,
            none => none.insert(peer.accept(&[]).await),
        };
        let id = line.request().await;
        line.send(&reset(id, code)).await;
        let outcome = calls.pop().unwrap().await.unwrap();
        assert_unknown(&outcome, "reset: the provider reset the stream before the answer's head");
    }
    assert!(peer.is_left_alone().await);
}

/// A library that takes a reset for the end of a body would call these answers complete.
#[tokio::test]
async fn an_answer_that_breaks_off_is_unknown() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let mut line = None;
    let head = |id: u32| frame(HEADERS, END_HEADERS, id, STATUS_200);
    let part = |id: u32| frame(DATA, 0, id, b"o");
    let endings: [&dyn Fn(u32) -> Vec<u8>; 6] = [
        &|id| [head(id), part(id), reset(id, 8)].concat(),
        &|id| [head(id), part(id), reset(id, 0)].concat(),
        &|id| [head(id), reset(id, 0)].concat(),
        &|id| [head(id), part(id), reset(id, 7)].concat(),
        &|id| [head_with_length(id, "2"), frame(DATA, END_STREAM, id, b"o")].concat(),
        &|id| [head_with_length(id, "2"), part(id), reset(id, 0)].concat(),
    ];
    for ending in endings {
        let outcome = submit(&provider);
        let line = match &mut line {
            Some(line) => line,
            none => none.insert(peer.accept(&[]).await),
        };
        let id = line.request().await;
        line.send(&ending(id)).await;
        assert_unknown(&outcome.await.unwrap(), "truncated: 200");
    }
    let outcome = submit(&provider);
    let mut line = line.unwrap();
    let id = line.request().await;
    line.send(&[head(id), part(id)].concat()).await;
    drop(line);
    assert_unknown(&outcome.await.unwrap(), "truncated: 200");
}

#[tokio::test]
async fn a_whole_answer_before_the_end_of_the_request_is_an_answer() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    // A window that holds the body back.
    let outcome = submit(&provider);
    let mut line = peer.accept(&[(INITIAL_WINDOW_SIZE, 0)]).await;
    while line.begun.is_empty() {
        line.next().await.unwrap();
    }
    line.send(&[answer(1), reset(1, 0)].concat()).await;
    assert_ok(&outcome.await.unwrap());
}

#[tokio::test]
async fn trailers_end_an_answer_and_interim_answers_do_not_begin_it() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let outcome = submit(&provider);
    let mut line = peer.accept(&[]).await;
    let id = line.request().await;
    // `:status: 103`, a literal with the static table's 8th name; then a trailer `a: b`.
    line.send(&frame(HEADERS, END_HEADERS, id, &[0x08, 3, b'1', b'0', b'3'])).await;
    line.send(&frame(HEADERS, END_HEADERS, id, STATUS_200)).await;
    line.send(&frame(DATA, 0, id, b"ok")).await;
    line.send(&frame(HEADERS, END_HEADERS | END_STREAM, id, &[0x00, 1, b'a', 1, b'b'])).await;
    assert_ok(&outcome.await.unwrap());
}

#[tokio::test]
async fn a_connection_cut_after_the_request_is_unknown_and_not_sent_again() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let outcome = submit(&provider);
    let mut line = peer.accept(&[]).await;
    line.request().await;
    drop(line);
    assert_unknown(&outcome.await.unwrap(), "reset: the connection ended");
    assert!(peer.is_left_alone().await);
}

#[tokio::test]
async fn a_kept_connection_that_ended_before_the_request_is_replaced() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    for round in 0..20 {
        let mut first = submit(&provider);
        let mut line = tokio::select! {
            line = peer.accept(&[]) => line,
            outcome = &mut first => panic!("{round}: {outcome:?}"),
        };
        let id = line.request().await;
        line.send(&answer(id)).await;
        assert_ok(&first.await.unwrap());
        if round % 2 == 0 {
            line.send(&goaway(id, 0)).await;
        }
        // The news may or may not have reached the client's task by the next call.
        let begun = line.begun.clone();
        drop(line);
        assert_eq!(begun, [1], "one connection, one request");
    }
}

#[tokio::test]
async fn what_is_not_http_2_is_not_sent() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    for words in [b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n".as_slice(), b"", &[0xff; 64]] {
        let outcome = submit(&provider);
        let (mut stream, _) = peer.listener.accept().await.unwrap();
        stream.write_all(words).await.unwrap();
        drop(stream);
        assert_not_sent(&outcome.await.unwrap(), "connect: http2: ");
    }
    // One who never says anything.
    let patient = peer.provider_with(|options| options.timeouts.connect = Duration::from_millis(200));
    assert_not_sent(&submit(&patient).await.unwrap(), "timeout: connect");
}

#[tokio::test]
async fn no_more_streams_are_open_than_the_provider_allows() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let calls: Vec<_> = (0..5).map(|_| submit(&provider)).collect();
    let mut line = peer.accept(&[(MAX_CONCURRENT_STREAMS, 1)]).await;
    for number in 1..=5 {
        let id = line.request().await;
        assert_eq!(line.begun.len(), number, "one at a time");
        line.send(&answer(id)).await;
    }
    for call in calls {
        assert_ok(&call.await.unwrap());
    }
    assert!(peer.is_left_alone().await);
}

#[tokio::test]
async fn who_waits_for_room_too_long_or_behind_a_closed_fence_is_not_sent() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let first = submit(&provider);
    let mut line = peer.accept(&[(MAX_CONCURRENT_STREAMS, 1)]).await;
    assert_eq!(line.request().await, 1);
    let hasty = submit_with(&provider, |call| call.deadline = Instant::now() + Duration::from_millis(150));
    let outcome = hasty.await.unwrap();
    assert_not_sent(&outcome, "timeout: total");
    assert!(format!("{outcome:?}").contains("waiting for room among the provider's streams"), "{outcome:?}");

    let fence = Fence::until(u64::MAX);
    let fenced = submit_with(&provider, |call| call.fence = fence.clone());
    let given_up = submit(&provider);
    tokio::task::yield_now().await;
    fence.close();
    given_up.abort();
    line.send(&answer(1)).await;
    assert_ok(&first.await.unwrap());
    assert_not_sent(&fenced.await.unwrap(), "fenced");
    // The connection serves on, and nothing of theirs ever came.
    let last = submit(&provider);
    let id = line.request().await;
    line.send(&answer(id)).await;
    assert_ok(&last.await.unwrap());
    assert_eq!(line.begun.len(), 2);
}

#[tokio::test]
async fn a_limit_that_is_raised_lets_the_waiting_go() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let calls: Vec<_> = (0..3).map(|_| submit(&provider)).collect();
    let mut line = peer.accept(&[(MAX_CONCURRENT_STREAMS, 0)]).await;
    line.send(&settings(&[(MAX_CONCURRENT_STREAMS, 3)])).await;
    for _ in 0..3 {
        let id = line.request().await;
        line.send(&answer(id)).await;
    }
    for call in calls {
        assert_ok(&call.await.unwrap());
    }
}

/// The socket takes no more, so a request lies in the library's buffers. Given up there, or fenced there, it would still leave once
/// the provider reads on; and to break the connection would make every other call on it unknown.
#[tokio::test]
async fn a_request_that_is_given_up_before_it_left_never_leaves_and_the_others_go_on() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let large = submit_with(&provider, |call| call.rendered.body = vec![b'x'; 24 << 20].into());
    let mut line = peer.accept(&[(INITIAL_WINDOW_SIZE, u32::MAX >> 1)]).await;
    line.send(&frame(WINDOW_UPDATE, 0, 0, &0x7000_0000_u32.to_be_bytes())).await;
    while line.begun.is_empty() {
        line.next().await.unwrap();
    }
    // Nothing is read from here on: the kernel's buffers fill.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let fence = Fence::until(u64::MAX);
    let soon = Instant::now() + Duration::from_millis(200);
    let hasty: Vec<_> = (0..3).map(|_| submit_with(&provider, |call| call.deadline = soon)).collect();
    let fenced = submit_with(&provider, |call| call.fence = fence.clone());
    let dropped = submit(&provider);
    for call in hasty {
        assert_not_sent(&call.await.unwrap(), "timeout: total");
    }
    dropped.abort();
    fence.close();
    assert_eq!(line.request().await, 1, "the large one");
    assert_not_sent(&fenced.await.unwrap(), "fenced");
    line.send(&answer(1)).await;
    assert_ok(&large.await.unwrap());
    let after = submit(&provider);
    let id = line.request().await;
    assert_eq!(line.begun, [1, id], "none of the others");
    line.send(&answer(id)).await;
    assert_ok(&after.await.unwrap());
    assert!(peer.is_left_alone().await, "all on one connection");
}

#[tokio::test]
async fn a_call_that_is_dropped_resets_its_stream_and_no_other() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let dropped = submit(&provider);
    let mut line = peer.accept(&[]).await;
    let first = line.request().await;
    let other = submit(&provider);
    let second = line.request().await;
    dropped.abort();
    loop {
        let seen = line.next().await.expect("a reset");
        if seen.kind == RST_STREAM {
            assert_eq!(seen.id, first);
            break;
        }
    }
    line.send(&answer(second)).await;
    assert_ok(&other.await.unwrap());
}

#[tokio::test]
async fn an_endless_head_over_http_2_is_unknown() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let outcome = submit(&provider);
    let mut line = peer.accept(&[]).await;
    let id = line.request().await;
    let field = [&[0x00, 1, b'a', 0x7f, 0x81, 0x7c][..], &[b'b'; 16_000]].concat();
    line.send(&frame(HEADERS, 0, id, &[STATUS_200, &field].concat())).await;
    for _ in 0..8 {
        // The client may have hung up.
        let _ = line.stream.write_all(&frame(9, 0, id, &field)).await;
    }
    assert!(matches!(outcome.await.unwrap(), Outcome::Unknown { .. }));
}

/// It was silent for longer than a call may trust it: asked, it does not answer, and the call goes to a new one.
#[tokio::test]
async fn a_connection_that_is_silent_and_does_not_answer_is_given_up_before_the_call() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let first = submit(&provider);
    let mut line = peer.accept(&[]).await;
    let id = line.request().await;
    line.send(&answer(id)).await;
    assert_ok(&first.await.unwrap());
    // It is time itself that has to pass.
    tokio::time::sleep(Duration::from_millis(4100)).await;
    let second = submit(&provider);
    let mut other = peer.accept(&[]).await;
    let id = other.request().await;
    other.send(&answer(id)).await;
    assert_ok(&second.await.unwrap());
    assert_eq!(line.rest().await, [1], "the silent one was asked, and no more");
}

/// What stands between a client and a provider, and cuts each connection after some bytes.
async fn cutting(target: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut dice = 88_172_645_463_325_252_u64;
        while let Ok((mut near, _)) = listener.accept().await {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            let (there, back) = (dice % 12_000, (dice >> 20) % 12_000);
            tokio::spawn(async move {
                let mut far = TcpStream::connect(target).await.unwrap();
                let (mut near_in, mut near_out) = near.split();
                let (mut far_in, mut far_out) = far.split();
                let there = async { tokio::io::copy(&mut (&mut near_in).take(there), &mut far_out).await };
                let back = async { tokio::io::copy(&mut (&mut far_in).take(back), &mut near_out).await };
                tokio::select! {
                    _ = there => {}
                    _ = back => {}
                }
            });
        }
    });
    addr
}

/// The provider's ledger is the truth. Connections end at any byte, calls are dropped, fences close, time runs out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_what_is_not_sent_was_never_received_and_nothing_came_twice() {
    let simulated = simulated().await;
    let mut options = options(&format!("http://{}", cutting(simulated.addr()).await));
    options.http2 = Http2::PriorKnowledge;
    options.idempotency_header = Some("idempotency-key".to_owned());
    let provider = Arc::new(HttpProvider::new("laser", options).unwrap());
    let (mut words, mut dropped) = (Vec::new(), Vec::new());
    for round in 0..60 {
        let mut calls = Vec::new();
        for number in 0..8_u64 {
            let key = format!("{round}-{number}");
            let fence = Fence::until(u64::MAX);
            let task = submit_with(&provider, |call| {
                call.idempotency_key.clone_from(&key);
                call.fence = fence.clone();
                if number % 4 == 1 {
                    call.rendered.body = vec![b' '; 3000].into();
                }
                if number == 2 {
                    call.deadline = Instant::now() + Duration::from_millis(2);
                }
            });
            if number == 3 {
                fence.close();
            }
            if number == 5 {
                tokio::task::yield_now().await;
                task.abort();
            }
            calls.push((key, task));
        }
        for (key, task) in calls {
            match task.await {
                Ok(outcome) => words.push((key, outcome)),
                Err(_) => dropped.push(key),
            }
        }
    }
    let ledger = simulated.ledger();
    let received = |key: &str| ledger.entries.iter().filter(|entry| entry.idempotency_key == key).count();
    let (mut not_sent, mut unknown, mut succeeded) = (0, 0, 0);
    for (key, outcome) in &words {
        match outcome {
            Outcome::NotSent { .. } => {
                not_sent += 1;
                assert_eq!(received(key), 0, "{key}: {outcome:?}");
            }
            Outcome::Unknown { .. } => {
                unknown += 1;
                assert!(received(key) <= 1, "{key}: {outcome:?}");
            }
            Outcome::Succeeded { .. } => {
                succeeded += 1;
                assert_eq!(received(key), 1, "{key}: {outcome:?}");
            }
            Outcome::Rejected { .. } | Outcome::InvalidOutput { .. } => panic!("{key}: {outcome:?}"),
        }
    }
    assert!(dropped.iter().all(|key| received(key) <= 1));
    assert!(not_sent > 10 && unknown > 10 && succeeded > 100, "{not_sent} not sent, {unknown} unknown, {succeeded} succeeded");
}

// TLS

/// Serves each connection over TLS: HTTP/2 by hand if that is agreed on, else HTTP/1.1.
fn tls_server(protocols: &[&str]) -> SocketAddr {
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let certificate = CertificateDer::from_pem_file(tls_file("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(tls_file("server.key.pem")).unwrap();
    let mut config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    let config = Arc::new(config);
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    // Ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let session = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
            let mut stream = rustls::StreamOwned::new(session, stream.unwrap());
            std::thread::spawn(move || {
                while stream.conn.is_handshaking() {
                    if stream.conn.complete_io(&mut stream.sock).is_err() {
                        return;
                    }
                }
                let _ = if stream.conn.alpn_protocol() == Some(b"h2") { serve_h2(&mut stream) } else { serve_h1(&mut stream) };
            });
        }
    });
    addr
}

fn serve_h2(stream: &mut (impl Read + Write)) -> std::io::Result<()> {
    stream.read_exact(&mut [0; 24])?;
    stream.write_all(&settings(&[]))?;
    stream.flush()?;
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head)?;
        let [a, b, c, kind, flags, id @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        stream.read_exact(&mut payload)?;
        if matches!(kind, HEADERS | DATA) && flags & END_STREAM != 0 {
            stream.write_all(&answer(u32::from_be_bytes(id)))?;
            stream.flush()?;
        }
    }
}

fn serve_h1(stream: &mut (impl Read + Write)) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    loop {
        let length = stream.read(&mut part)?;
        if length == 0 {
            return Ok(());
        }
        bytes.extend_from_slice(&part[..length]);
        if bytes.ends_with(b"}}") {
            bytes.clear();
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none")?;
            stream.flush()?;
        }
    }
}

#[tokio::test]
async fn over_tls_the_protocol_is_what_both_agree_on() {
    for (protocols, http2, expected) in [
        (&["h2", "http/1.1"][..], Http2::Alpn, "ok"),
        (&["http/1.1"], Http2::Alpn, "one"),
        (&[], Http2::Alpn, "one"),
        (&["h2", "http/1.1"], Http2::Off, "one"),
        (&["h2"], Http2::PriorKnowledge, "ok"),
        (&["http/1.1"], Http2::PriorKnowledge, "not_sent"),
        (&[], Http2::PriorKnowledge, "not_sent"),
    ] {
        let addr = tls_server(protocols);
        let mut options = options(&format!("https://localhost:{}", addr.port()));
        options.ca_file = Some(tls_file("authority.pem"));
        options.http2 = http2;
        let provider = HttpProvider::new("laser", options).unwrap();
        for _ in 0..2 {
            let outcome = provider.submit(call(&provider)).await;
            match &outcome {
                Outcome::Succeeded { response, .. } => {
                    assert_eq!(&*response.body, expected.as_bytes(), "{protocols:?} {http2:?}");
                }
                other => assert_eq!(other.word(), expected, "{protocols:?} {http2:?}: {other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn dropping_the_provider_closes_its_shared_connection() {
    let peer = Peer::listen().await;
    let provider = peer.provider();
    let outcome = submit(&provider);
    let mut line = peer.accept(&[]).await;
    let id = line.request().await;
    line.send(&answer(id)).await;
    assert_ok(&outcome.await.unwrap());
    drop(provider);
    assert_eq!(line.rest().await, [1]);
}
