//! Streamed answers through the proxy: as they come, from the beginning for everybody, once at the provider, and never half.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use onejob::config::ProviderEntry;
use onejob::job::Class;
use onejob::policy::Gate;
use onejob::provider::http::{HttpOptions, HttpProvider};
use onejob::runtime::{ProviderSlot, Route};
use onejob::validate::{Check, Extract, Of, Parse, Required, Validator};
use rustix::process::Signal;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::http_support::{PROVIDER_TOKEN, Setup, Site, route, serve_with, slot};
use crate::support::{SOON, gateway, simulated, until};

const CHAT: &str = "/proxy/chat/v1/chat/completions";
/// A stream of the tap's.
const TAP: &str = "/proxy/tap/v1/chat/completions";
/// Most steps that a test is ahead of its tap.
const STEPS_MAX: usize = 64;
const DONE: &str = "data: [DONE]\n\n";

fn streamed(behaviour: &str) -> String {
    format!(r#"{{"model":"x","messages":[],"stream":true,"simulate":"{behaviour}"}}"#)
}

/// The text that the events of a stream make together.
pub fn content(stream: &[u8]) -> String {
    let events = std::str::from_utf8(stream).unwrap().split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let chunks = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    chunks.filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned)).collect()
}

/// A provider whose stream the test writes.
struct Tap {
    addr: SocketAddr,
    steps: mpsc::Sender<Step>,
    received: Arc<AtomicUsize>,
    _server: AbortOnDropHandle<()>,
}

enum Step {
    Part(Vec<u8>),
    End,
    Cut,
}

impl Tap {
    async fn open() -> Tap {
        Tap::with_head("transfer-encoding: chunked\r\n").await
    }

    /// Serves one request after another, each until a step ends it.
    async fn with_head(framing: &'static str) -> Tap {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (steps, mut taken) = mpsc::channel(STEPS_MAX);
        let received = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&received);
        let server = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = Vec::new();
                while !request.windows(4).any(|window| window == b"\r\n\r\n") {
                    if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
                        break;
                    }
                }
                count.fetch_add(1, Ordering::SeqCst);
                let head = format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-kept: yes\r\n{framing}\r\n");
                stream.write_all(head.as_bytes()).await.unwrap();
                while let Some(step) = taken.recv().await {
                    let bytes = match step {
                        Step::Part(part) if framing.is_empty() => part,
                        Step::Part(part) => [format!("{:x}\r\n", part.len()).as_bytes(), &part, b"\r\n"].concat(),
                        Step::End => {
                            let last: &[u8] = if framing.is_empty() { b"" } else { b"0\r\n\r\n" };
                            stream.write_all(last).await.unwrap();
                            break;
                        }
                        Step::Cut => break,
                    };
                    // Who was cut off reads no more.
                    let _ = stream.write_all(&bytes).await;
                }
            }
        });
        Tap { addr, steps, received, _server: AbortOnDropHandle::new(server) }
    }

    fn part(&self, text: &str) {
        self.steps.try_send(Step::Part(text.as_bytes().to_vec())).unwrap();
    }

    fn end(&self) {
        self.steps.try_send(Step::End).unwrap();
    }

    fn cut(&self) {
        self.steps.try_send(Step::Cut).unwrap();
    }

    fn setup(&self, setup: &mut Setup) {
        setup.providers.push(slot("tap", &format!("http://{}", self.addr), Duration::from_secs(30)));
        setup.routes.push(route("tap", Class::Exclusive, &["tap"]));
    }
}

#[tokio::test]
async fn a_streamed_answer_comes_as_it_is_made_and_is_replayed_byte_for_byte() {
    let site = Site::start().await;
    let alice = site.alice();
    let body = streamed("chunks=5,pause=150ms");
    let mut first = alice.open(CHAT, "k", &body).await;
    assert_eq!((first.status, first.header("content-type")), (200, "text/event-stream; charset=utf-8"));
    assert_eq!((first.header("idempotency-replayed"), first.header("onejob-provider")), ("false", "patient"));
    assert!(first.headers.get("content-length").is_none());
    assert!(first.reads("execution 1").await);
    assert_eq!(site.provider.ledger().answered, 0, "the provider is not done yet");
    let id = first.header("onejob-job-id").to_owned();
    let whole = first.end().await.expect("a whole stream");
    assert!(whole.ends_with(DONE.as_bytes()));
    assert_eq!(content(&whole), "execution 1 by simulated 1 2 3 4");
    // Told whole, it is stored.
    let job = alice.get(&format!("/v1/jobs/{id}")).await.is(200).json();
    assert_eq!(job["state"], "succeeded", "{job}");
    let again = alice.open(CHAT, "k", &body).await;
    assert_eq!((again.status, again.header("content-type")), (200, "text/event-stream; charset=utf-8"));
    assert_eq!((again.header("idempotency-replayed"), again.header("onejob-job-id")), ("true", id.as_str()));
    assert_eq!(again.end().await.unwrap(), whole);
    let ledger = site.provider.ledger();
    assert_eq!((ledger.received, ledger.executed), (1, 1));
    // Which model answered is read from the stream.
    let attempt = site.operator().get(&format!("/v1/jobs/{id}")).await.json()["attempts"][0].clone();
    assert_eq!(attempt["model"], "simulated-1", "{attempt}");
}

#[tokio::test]
async fn of_two_readers_one_may_go_in_the_middle_and_the_provider_is_asked_once() {
    let tap = Tap::open().await;
    let site = Site::with_setup(|setup| tap.setup(setup)).await;
    let alice = site.alice();
    let mut one = alice.open(TAP, "k", "{}").await;
    tap.part("data: a\n\n");
    assert!(one.reads("data: a").await);
    let mut two = alice.open(TAP, "k", "{}").await;
    assert_eq!((two.header("idempotency-replayed"), two.header("x-kept")), ("true", "yes"));
    assert!(two.reads("data: a").await, "it begins at the beginning");
    tap.part("data: b\n\n");
    assert!(two.reads("data: b").await);
    drop(one);
    tap.part("data: c\n\n");
    assert!(two.reads("data: c").await);
    let mut three = alice.open(TAP, "k", "{}").await;
    assert!(three.reads("data: a\n\ndata: b\n\ndata: c").await);
    tap.part(DONE);
    tap.end();
    let whole = two.end().await.unwrap();
    assert_eq!(whole, b"data: a\n\ndata: b\n\ndata: c\n\ndata: [DONE]\n\n");
    assert_eq!(three.end().await.unwrap(), whole);
    assert_eq!(alice.open(TAP, "k", "{}").await.end().await.unwrap(), whole);
    assert_eq!(tap.received.load(Ordering::SeqCst), 1);
}

/// Clients take the marker for the end. So it is told only when the result is stored.
#[tokio::test]
async fn the_end_marker_is_told_only_when_the_result_is_stored() {
    let tap = Tap::open().await;
    let site = Site::with_setup(|setup| tap.setup(setup)).await;
    let mut reader = site.alice().open(TAP, "k", "{}").await;
    tap.part("data: a\n\n");
    assert!(reader.reads("data: a").await);
    // Then the connection breaks, though the marker was there.
    tap.part(DONE);
    tap.cut();
    let id = reader.header("onejob-job-id").to_owned();
    assert_eq!(reader.end().await, Err(b"data: a\n\n".to_vec()));
    assert_eq!(site.alice().in_state(&id, "unknown").await["result"], Value::Null);
}

#[tokio::test]
async fn a_reader_on_another_gateway_reads_from_the_beginning_as_it_comes() {
    let tap = Tap::open().await;
    let site = Site::with_setup(|setup| tap.setup(setup)).await;
    let other = serve_with(&site.redis, &site.provider, |setup| tap.setup(setup)).await;
    let there = other.client.with_token("alice");
    let mut one = site.alice().open(TAP, "k", "{}").await;
    tap.part("data: a\n\n");
    assert!(one.reads("data: a").await);
    let mut two = there.open(TAP, "k", "{}").await;
    assert_eq!((two.status, two.header("idempotency-replayed"), two.header("x-kept")), (200, "true", "yes"));
    assert_eq!((two.header("onejob-provider"), two.header("content-type")), ("tap", "text/event-stream"));
    assert!(two.reads("data: a").await);
    tap.part("data: b\n\n");
    assert!(two.reads("data: b").await, "it comes as it is made");
    drop(one);
    let large = format!("data: {}\n\n", "x".repeat(600 << 10));
    tap.part(&large);
    tap.part("data: c\n\n");
    assert!(two.reads("data: c").await);
    tap.part(DONE);
    tap.end();
    let whole = two.end().await.unwrap();
    assert_eq!(whole, format!("data: a\n\ndata: b\n\n{large}data: c\n\n{DONE}").into_bytes());
    assert_eq!(site.alice().open(TAP, "k", "{}").await.end().await.unwrap(), whole);
    assert_eq!(tap.received.load(Ordering::SeqCst), 1);
    until("the parts are taken away", async || !site.redis.keys().await.iter().any(|key| key.contains(":s:"))).await;
}

/// A stream that nobody elsewhere reads is nothing to Redis but its claim and its end.
#[tokio::test]
async fn a_stream_without_readers_elsewhere_costs_redis_nothing() {
    let tap = Tap::open().await;
    let site = Site::with_setup(|setup| tap.setup(setup)).await;
    let mut one = site.alice().open(TAP, "k", "{}").await;
    tap.part("data: a\n\n");
    assert!(one.reads("data: a").await);
    let two = site.alice().open(TAP, "k", "{}").await;
    tap.part(DONE);
    tap.end();
    one.end().await.unwrap();
    two.end().await.unwrap();
    let stats: String = site.redis.command(&["INFO", "commandstats"]).await;
    assert!(!stats.contains("cmdstat_xadd") && !stats.contains("cmdstat_xrange"), "{stats}");
}

/// A key that waits elsewhere before the answer has begun gets the stream all the same.
#[tokio::test]
async fn a_reader_elsewhere_may_come_before_the_answer() {
    let site = Site::start().await;
    let other = serve_with(&site.redis, &site.provider, |_| {}).await;
    let body = streamed("delay=1s,chunks=40,pause=100ms");
    let one = tokio::spawn({
        let (alice, body) = (site.alice(), body.clone());
        async move { alice.open(CHAT, "k", &body).await.end().await }
    });
    until("the job runs", async || site.provider.ledger().executed == 1).await;
    let mut two = other.client.with_token("alice").open(CHAT, "k", &body).await;
    assert!(two.reads("execution 1").await);
    assert_eq!(site.provider.ledger().answered, 0, "the provider is not done yet");
    let whole = two.end().await.unwrap();
    assert_eq!(one.await.unwrap().unwrap(), whole);
    assert_eq!(site.provider.ledger().executed, 1);
}

/// Case 38, and its siblings: whatever is missing, nothing partial is ever told whole, or stored.
#[tokio::test]
async fn a_stream_that_is_not_whole_is_unknown_and_its_readers_are_broken_off() {
    let site = Site::start().await;
    let alice = site.alice();
    for (behaviour, reason) in [
        ("unmarked", "truncated: the stream ended without its end marker"),
        ("half", "truncated: 200, then"),
        ("stream_error", "stream_error: 200, and its stream told of an error (/error)"),
        ("size=17000000", "too_large: 200"),
    ] {
        let body = streamed(&format!("{behaviour},chunks=6,pause=20ms"));
        let mut reader = alice.open(CHAT, behaviour, &body).await;
        assert_eq!(reader.status, 200);
        assert!(reader.reads("execution").await, "{behaviour}");
        let id = reader.header("onejob-job-id").to_owned();
        let broken = reader.end().await.expect_err(behaviour);
        assert!(!String::from_utf8_lossy(&broken).contains("[DONE]"), "{behaviour}");
        let job = alice.in_state(&id, "unknown").await;
        assert!(job["reason"].as_str().unwrap().contains(reason), "{behaviour}: {job}");
        assert_eq!(job["result"], Value::Null, "{behaviour}");
        let again = alice.send("POST", CHAT, &[("content-type", "application/json"), ("idempotency-key", behaviour)], body).await;
        again.problem(504, "attempt-unknown");
    }
    assert_eq!(site.provider.ledger().executed, 4);
}

/// What ends with its connection has no framing: the marker alone tells its end, and nothing may come after it.
#[tokio::test]
async fn a_stream_that_ends_with_its_connection_is_whole_by_its_marker() {
    let tap = Tap::with_head("").await;
    let site = Site::with_setup(|setup| tap.setup(setup)).await;
    let alice = site.alice();
    for (key, parts, whole) in
        [("a", ["data: a\n\n", DONE], true), ("b", ["data: a\n\n", "data: [DO"], false), ("c", [DONE, "data: more"], false)]
    {
        let reader = alice.open(TAP, key, "{}").await;
        parts.iter().for_each(|part| tap.part(part));
        tap.end();
        assert_eq!(reader.end().await.is_ok(), whole, "{key}");
    }
}

#[tokio::test]
async fn a_callers_going_away_stops_nothing() {
    let tap = Tap::open().await;
    let site = Site::with_setup(|setup| tap.setup(setup)).await;
    let alice = site.alice();
    let mut reader = alice.open(TAP, "k", "{}").await;
    tap.part("data: a\n\n");
    assert!(reader.reads("data: a").await);
    let id = reader.header("onejob-job-id").to_owned();
    drop(reader);
    tap.part("data: b\n\n");
    tap.part(DONE);
    tap.end();
    assert_eq!(alice.ended(&id).await["state"], "succeeded");
    let whole = alice.open(TAP, "k", "{}").await.end().await.unwrap();
    assert_eq!(whole, b"data: a\n\ndata: b\n\ndata: [DONE]\n\n");
}

/// The bytes that a reader does not take wait for it; the provider does not.
#[tokio::test]
async fn a_slow_reader_keeps_nobody_waiting_and_gets_everything() {
    let site = Site::start().await;
    let alice = site.alice();
    let body = streamed("chunks=100,size=9000000");
    let slow = alice.open(CHAT, "k", &body).await;
    let id = slow.header("onejob-job-id").to_owned();
    // Not a byte of its body has been read but what a socket holds.
    assert_eq!(alice.ended(&id).await["state"], "succeeded");
    let quick = alice.open(CHAT, "k", &body).await.end().await.unwrap();
    assert!(quick.len() >= 9_000_000 && quick.ends_with(DONE.as_bytes()));
    assert_eq!(slow.end().await.unwrap(), quick);
    assert_eq!(site.provider.ledger().executed, 1);
}

async fn opened_raw(site: &Site, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(site.gateway.addr).await.unwrap();
    let length = body.len();
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\nidempotency-key: k\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_reader_that_never_reads_is_disconnected_and_the_job_goes_on() {
    let site = Site::with(|options| {
        options.head_timeout = Duration::from_millis(200);
        options.answer_read_max = Duration::from_millis(300);
    })
    .await;
    let body = streamed("chunks=100,size=12000000");
    let mut stream = opened_raw(&site, &body).await;
    until("the job ended", async || site.provider.ledger().answered == 1).await;
    let readers = async || {
        let mut stream = TcpStream::connect(site.gateway.addr).await.unwrap();
        stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        stream.read_to_end(&mut Vec::new()).await.unwrap()
    };
    assert!(readers().await > 0, "others are served");
    // Cut off: what comes out of it then is not the whole.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let mut rest = Vec::new();
    let read = tokio::time::timeout(SOON, stream.read_to_end(&mut rest)).await.expect("it is closed");
    assert!(read.is_err() || !rest.ends_with(b"0\r\n\r\n"), "{} bytes", rest.len());
    assert!(rest.len() < 12_000_000);
    let whole = site.alice().open(CHAT, "k", &body).await.end().await.unwrap();
    assert!(whole.len() >= 12_000_000);
}

/// Longer than a connection may be idle, and longer than an answer may take to be read: it is read, as it comes.
#[tokio::test]
async fn a_long_stream_is_not_taken_for_an_idle_connection() {
    let site = Site::with(|options| {
        options.head_timeout = Duration::from_millis(150);
        options.answer_read_max = Duration::from_millis(200);
        options.connection_age_max = Duration::from_millis(400);
    })
    .await;
    let whole = site.alice().open(CHAT, "k", &streamed("chunks=4,pause=400ms")).await.end().await.unwrap();
    assert!(whole.ends_with(DONE.as_bytes()));
}

#[tokio::test]
async fn markers_and_secrets_may_be_cut_anywhere() {
    let site = Site::start().await;
    let alice = site.alice();
    for part_bytes in [1, 2, 3, 7, 64] {
        let key = format!("k{part_bytes}");
        let body = streamed(&format!("echo_credential,part_bytes={part_bytes}"));
        let whole = alice.open(CHAT, &key, &body).await.end().await.expect("a whole stream");
        assert!(whole.ends_with(DONE.as_bytes()));
        let said = content(&whole);
        assert!(said.ends_with("Bearer [hidden]"), "{said}");
        assert!(!String::from_utf8_lossy(&whole).contains(PROVIDER_TOKEN));
        assert_eq!(alice.open(CHAT, &key, &body).await.end().await.unwrap(), whole);
    }
    for (key, (value, _)) in site.redis.dump().await {
        let text = String::from_utf8_lossy(&value).into_owned();
        assert!(!text.contains(PROVIDER_TOKEN), "{key:?}");
    }
}

/// Nothing of the first provider's was told, so the second one's stream is the answer.
#[tokio::test]
async fn after_a_refusal_the_next_attempts_stream_is_read() {
    let refusing = simulated().await;
    refusing.set_behaviour("refuse_status=429").unwrap();
    let site = Site::with_setup(|setup| {
        setup.providers.push(slot("refusing", &refusing.base_url(), Duration::from_secs(30)));
        let mut both = route("both", Class::Exclusive, &["refusing", "patient"]);
        both.plan.gate = Gate::Off;
        setup.routes.push(both);
    })
    .await;
    let body = r#"{"stream":true}"#;
    let reader = site.alice().open("/proxy/both/v1/chat/completions", "k", body).await;
    assert_eq!(reader.header("onejob-provider"), "patient");
    assert!(content(&reader.end().await.unwrap()).starts_with("execution 1 by"));
    assert_eq!((refusing.ledger().received, site.provider.ledger().executed), (1, 1));
}

/// In a race its reader follows who began first. Another one's bytes never follow: the same key has the winner's.
#[tokio::test]
async fn a_reader_whose_attempt_loses_a_race_is_broken_off() {
    let tap = Tap::open().await;
    let site = Site::with_setup(|setup| {
        setup.providers.push(slot("tap", &format!("http://{}", tap.addr), Duration::from_secs(30)));
        let mut race = route("raced", Class::Race, &["tap", "patient"]);
        race.plan.gate = Gate::Off;
        race.rules.race_after_ms = 300;
        setup.routes.push(race);
    })
    .await;
    let alice = site.alice();
    let path = "/proxy/raced/v1/chat/completions";
    let body = r#"{"stream":true}"#;
    let mut reader = alice.open(path, "k", body).await;
    tap.part("data: slow\n\n");
    assert!(reader.reads("data: slow").await);
    let id = reader.header("onejob-job-id").to_owned();
    let job = alice.ended(&id).await;
    assert_eq!((job["state"].clone(), job["completed_by"].clone()), ("succeeded".into(), 2.into()), "{job}");
    // The first one ends well, too late.
    tap.part(DONE);
    tap.end();
    assert_eq!(reader.end().await, Err(b"data: slow\n\n".to_vec()));
    let again = alice.open(path, "k", body).await;
    assert_eq!(again.header("onejob-provider"), "patient");
    assert!(content(&again.end().await.unwrap()).starts_with("execution 1 by"));
}

#[tokio::test]
async fn a_job_with_a_streamed_answer_has_the_whole_of_it_as_its_result() {
    let site = Site::start().await;
    let input = r#"{"stream":true}"#;
    let entry =
        ProviderEntry { base_url: site.provider.base_url(), path: "/v1/chat/completions".to_owned(), ..ProviderEntry::default() };
    let provider = HttpProvider::new("chatty", HttpOptions::from_entry(&entry, None, 1 << 20)).unwrap();
    let other = serve_with(&site.redis, &site.provider, |setup| {
        setup.providers.push(ProviderSlot {
            name: "chatty".to_owned(),
            provider: Arc::new(provider),
            total: Duration::from_secs(30),
            in_flight_max: 10,
        });
        setup.routes.push(Route { ..route("chatty", Class::Exclusive, &["chatty"]) });
    })
    .await;
    let alice = other.client.with_token("alice");
    let id = alice.submit("chatty", "k", input).await.job_id();
    let job = alice.ended(&id).await;
    assert_eq!(job["state"], "succeeded", "{job}");
    let result = job["result"].to_string();
    assert!(result.contains("execution 1 by") && result.contains("[DONE]"), "{result}");
}

#[tokio::test]
async fn readers_beyond_the_limit_of_waiters_are_503_and_the_stream_goes_on() {
    let tap = Tap::open().await;
    let site = Site::with_setup(|setup| {
        tap.setup(setup);
        setup.runtime.waiters_max = 2;
    })
    .await;
    let alice = site.alice();
    let mut one = alice.open(TAP, "k", "{}").await;
    tap.part("data: a\n\n");
    assert!(one.reads("data: a").await);
    let mut two = alice.open(TAP, "k", "{}").await;
    assert!(two.reads("data: a").await);
    let three = alice.send("POST", TAP, &[("content-type", "application/json"), ("idempotency-key", "k")], "{}").await;
    three.problem(503, "waiters-too-many");
    drop(two);
    until("its place is free", async || alice.open(TAP, "k", "{}").await.status == 200).await;
    tap.part(DONE);
    tap.end();
    one.end().await.unwrap();
}

/// The gateway that runs the attempt dies in the middle: readers here and elsewhere are broken off, and nobody runs it again.
#[tokio::test]
async fn a_gateway_killed_in_the_middle_leaves_an_unknown_attempt_and_nothing_partial() {
    let site = gateway::Site::open().await;
    let mut one = site.start(&[], None).await;
    let two = site.start(&[], None).await;
    let path = "/proxy/print/v1/chat/completions";
    let body = streamed("chunks=1000,pause=50ms");
    let mut reader = one.open(path, "k", &body).await;
    reader.reads("execution 1").await;
    let mut elsewhere = two.open(path, "k", &body).await;
    elsewhere.reads("execution 1").await;
    one.signal(Signal::KILL);
    one.ended().await;
    assert!(!reader.end().await, "the reader's connection breaks");
    assert!(!elsewhere.end().await, "so does the one elsewhere");
    let mut answer = None;
    until("the attempt is unknown", async || {
        answer = two.send("POST", path, &[("Idempotency-Key", "k")], &body).await;
        answer.as_ref().is_some_and(|answer| answer.body["type"] == "urn:onejob:problem:attempt-unknown")
    })
    .await;
    let id = answer.unwrap().body["job_id"].as_str().unwrap().to_owned();
    let job = two.job(&id).await.unwrap().body;
    assert_eq!((job["state"].as_str(), job["result"].clone()), (Some("unknown"), Value::Null), "{job}");
    assert_eq!(site.printer.ledger().executed, 1);
}

/// Its time was over and its key said unknown; whoever read on gets the end that came after all.
#[tokio::test]
async fn a_stream_that_ends_well_after_its_time_is_whole_for_who_read_on() {
    let tap = Tap::open().await;
    let site = Site::with_setup(|setup| {
        let base_url = format!("http://{}", tap.addr);
        let mut entry = ProviderEntry { base_url, path: "/work".to_owned(), ..ProviderEntry::default() };
        (entry.timeouts.total, entry.timeouts.linger) = (Duration::from_millis(300), SOON);
        let provider = HttpProvider::new("tap", HttpOptions::from_entry(&entry, None, 1 << 20)).unwrap();
        let total = entry.timeouts.total;
        setup.providers.push(ProviderSlot { name: "tap".to_owned(), provider: Arc::new(provider), total, in_flight_max: 10 });
        setup.routes.push(route("tap", Class::Exclusive, &["tap"]));
    })
    .await;
    let alice = site.alice();
    let mut reader = alice.open(TAP, "k", "{}").await;
    tap.part("data: a\n\n");
    assert!(reader.reads("data: a").await);
    let id = reader.header("onejob-job-id").to_owned();
    alice.in_state(&id, "unknown").await;
    tap.part("data: b\n\n");
    tap.part(DONE);
    tap.end();
    let whole = reader.end().await.expect("a whole stream");
    assert_eq!(whole, b"data: a\n\ndata: b\n\ndata: [DONE]\n\n");
    assert_eq!(alice.ended(&id).await["state"], "succeeded");
    assert_eq!(alice.open(TAP, "k", "{}").await.end().await.unwrap(), whole);
}

/// What a stream says in parts is judged at its end as if it had been said at once; an invalid one is nobody's result, and no reader
/// is told its end.
#[tokio::test]
async fn a_stream_on_a_route_that_requires_something_is_judged_whole() {
    let tap = Tap::open().await;
    let site = Site::with_setup(|setup| {
        tap.setup(setup);
        let schema = br#"{"required":["city"],"properties":{"city":{"type":"string"}}}"#;
        let assertions = ["answer.choices[0].finish_reason == 'stop'".to_owned()];
        let check = Check::compile(Of::Output, &Required { schema: Some(schema), assertions: &assertions }).unwrap();
        let extract = Extract { pointer: "/choices/0/message/content".to_owned(), parse: Parse::Json };
        let route = setup.routes.iter_mut().find(|route| route.name == "tap").unwrap();
        route.validator = Some(Arc::new(Validator { output: Some(check), extract, ..Validator::default() }));
    })
    .await;
    let alice = site.alice();
    let chunk = |content: &str, finish: Value| {
        let choice = serde_json::json!({ "index": 0, "delta": { "content": content }, "finish_reason": finish });
        tap.part(&format!("data: {}\n\n", serde_json::json!({ "object": "chat.completion.chunk", "choices": [choice] })));
    };
    for (key, city, is_valid) in [("right", "Osaka\"", true), ("wrong", "Osaka", false)] {
        let mut reader = alice.open(TAP, key, "{}").await;
        chunk("{\"city\":", Value::Null);
        assert!(reader.reads("city").await, "it comes as it is made");
        chunk(&format!("\"{city}}}"), "stop".into());
        tap.part(DONE);
        tap.end();
        let id = reader.header("onejob-job-id").to_owned();
        let read = reader.end().await;
        assert_eq!(read.as_ref().is_ok_and(|whole| whole.ends_with(DONE.as_bytes())), is_valid, "{key}");
        let job = alice.in_state(&id, if is_valid { "succeeded" } else { "failed" }).await;
        let reason = job["reason"].as_str().unwrap_or_default();
        assert_eq!(reason.contains("invalid_output: /choices/0/message/content: json"), !is_valid, "{job}");
    }
}
