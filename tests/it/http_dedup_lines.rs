//! Clicks over HTTP in lines: told while they come, cut by their number, the same when they are sent again, never half a whole answer.

use std::time::Duration;

use onejob::dedup::Stream;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::http_dedup::{CLICKS, click, with_clicks, with_clicks_of};
use crate::http_support::{Answer, Client, Feed, Site, raw, serve};
use crate::support::gateway::Site as Processes;
use crate::support::{kinds, until};

const BATCH_LINES: u64 = 1000;

fn lines(users: impl IntoIterator<Item = u64>) -> String {
    users.into_iter().map(|user| format!("{}\n", click(user))).collect()
}

fn headers(key: &str) -> [(&str, &str); 2] {
    [("content-type", "application/x-ndjson"), ("idempotency-key", key)]
}

async fn post(client: &Client, path: &str, key: &str, body: impl Into<bytes::Bytes>) -> Answer {
    client.send("POST", path, &headers(key), body).await
}

fn feed(client: &Client, key: &str) -> Feed {
    client.feed(CLICKS, &headers(key))
}

/// The lines of an answer: the verdicts, whose places are in order from 0, and the last one.
fn told(body: &[u8]) -> (Vec<String>, Value) {
    let text = std::str::from_utf8(body).unwrap();
    assert!(text.ends_with('\n'), "{text}");
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = lines.pop().unwrap();
    assert!(last["done"].is_boolean(), "{last}");
    assert_eq!(last["clicks"], lines.len(), "{last}");
    let verdict = |(place, line): (usize, &Value)| {
        assert_eq!(line["index"], place, "{line}");
        line["verdict"].as_str().unwrap().to_owned()
    };
    (lines.iter().enumerate().map(verdict).collect(), last)
}

/// The verdicts of an answer that is whole.
fn whole(answer: Answer) -> Vec<String> {
    let answer = answer.is(200);
    assert_eq!(answer.header("content-type"), "application/x-ndjson");
    let (verdicts, last) = told(&answer.body);
    assert_eq!(last["done"], true, "{last}");
    for (word, count) in last["counts"].as_object().unwrap() {
        assert_eq!(*count, verdicts.iter().filter(|verdict| *verdict == word).count(), "{last}");
    }
    verdicts
}

fn firsts(verdicts: &[String]) -> usize {
    verdicts.iter().filter(|verdict| *verdict == "first").count()
}

#[tokio::test]
async fn ten_thousand_lines_are_told_while_they_still_come() {
    let site = Site::with(with_clicks).await;
    let feed = feed(&site.alice(), "k");
    feed.send(lines(0..BATCH_LINES)).await;
    // Half a click more.
    let (half, rest) = (&click(BATCH_LINES)[..7], &click(BATCH_LINES)[7..]);
    feed.send(half.to_owned()).await;
    let (parts, mut opened) = feed.opened().await;
    assert_eq!((opened.status, opened.header("content-type")), (200, "application/x-ndjson"));
    assert!(opened.reads("{\"index\":999,\"verdict\":\"first\"}\n").await, "the first batch is told");
    let rest = format!("{rest}\n{}", lines(BATCH_LINES + 1..10_000));
    parts.send(Ok(hyper::body::Frame::data(rest.into()))).await.unwrap();
    drop(parts);
    let (verdicts, last) = told(&opened.end().await.unwrap());
    assert_eq!(verdicts, vec!["first"; 10_000]);
    assert_eq!(last, json!({"done": true, "clicks": 10_000, "counts": {"first": 10_000, "duplicate": 0}}));
}

/// Batches are cut by their lines, whatever arrives together; and a batch is the same as an array.
#[tokio::test]
async fn the_same_lines_in_other_pieces_are_told_the_same() {
    for mirrored in kinds() {
        let site = Site::with(with_clicks_of(mirrored)).await;
        let alice = site.alice();
        let body = lines((0..2500).map(|user| user / 2));
        let first = whole(post(&alice, CLICKS, "k", body.clone()).await);
        assert_eq!((first.len(), firsts(&first)), (2500, 1250));
        for (number, size) in [7, 300, 65_536].into_iter().enumerate() {
            // The tiniest pieces of a part only: each is a frame of its own.
            let cut = if size == 7 { 7000 } else { body.len() };
            let feed = feed(&alice, "k");
            for piece in body.as_bytes()[..cut].chunks(size) {
                feed.send(piece.to_vec()).await;
            }
            feed.send(body.as_bytes()[cut..].to_vec()).await;
            assert_eq!(whole(feed.end().await), first, "number {number}");
        }
        // Blank lines are none, other ends of lines are the same, and the last one needs none.
        let dressed = format!("\n{}", body.replace('\n', "\r\n\n").trim_end());
        assert_eq!(whole(post(&alice, CLICKS, "k", dressed).await), first);
        assert_eq!(firsts(&whole(post(&alice, CLICKS, "other", body.clone()).await)), 0);

        let array = |users: std::ops::Range<u64>| {
            let clicks: Vec<_> = users.map(click).collect();
            format!("[{}]", clicks.join(","))
        };
        let json = |key: &'static str| [("content-type", "application/json"), ("idempotency-key", key)];
        assert_eq!(whole(post(&alice, CLICKS, "small", lines(5000..5003)).await), ["first"; 3]);
        let same = alice.send("POST", CLICKS, &json("small"), array(5000..5003)).await.is(200).json();
        assert_eq!(same["verdicts"], json!(["first", "first", "first"]));
        // Never silently something else.
        alice.send("POST", CLICKS, &json("k"), array(0..1250)).await.problem(409, "key-conflict");
        post(&alice, &format!("{CLICKS}?batch=10"), "k", body).await.problem(409, "key-conflict");
    }
}

#[tokio::test]
async fn of_equal_clicks_the_first_line_counts_whatever_is_under_way() {
    for mirrored in kinds() {
        let site = Site::with(with_clicks_of(mirrored)).await;
        let users = (0..600).map(|line| line % 3);
        let verdicts = whole(post(&site.alice(), &format!("{CLICKS}?batch=2"), "k", lines(users)).await);
        assert_eq!(verdicts[..3], ["first"; 3]);
        assert_eq!(firsts(&verdicts), 3);
    }
}

#[tokio::test]
async fn a_wrong_line_ends_the_answer_after_the_batches_before_it_and_the_same_key_goes_on() {
    let site = Site::with(with_clicks).await;
    let alice = site.alice();
    let with = |line: &str| format!("{}{line}\n{}", lines(0..1500), lines(1500..2500));
    for (wrong, status, kind, member) in [
        ("{\"user\":1", 400, "request-invalid", json!(1501)),
        ("{\"user\":1}", 422, "click-invalid", json!(1501)),
        ("[1]", 422, "click-invalid", json!(1501)),
        (&"x".repeat(70_000), 413, "body-too-large", json!(1501)),
    ] {
        let answer = post(&alice, CLICKS, "k", with(wrong)).await.is(200);
        let (verdicts, last) = told(&answer.body);
        assert_eq!((verdicts, &last["done"]), (vec!["first".to_owned(); 1000], &json!(false)), "{last}");
        let problem = &last["problem"];
        assert_eq!(problem["type"], format!("urn:onejob:problem:{kind}"), "{problem}");
        assert_eq!((&problem["status"], &problem["line"]), (&json!(status), &member), "{problem}");
        assert_eq!(problem["retryable"], false);
        // In the first batch it has a status of its own.
        let problem = post(&alice, CLICKS, "l", format!("{}\n{wrong}\n", click(1))).await.problem(status, kind);
        assert_eq!(problem["line"], 2, "{problem}");
    }
    // Nothing of the second batch was asked about.
    assert_eq!(whole(post(&alice, CLICKS, "k", lines(0..2500)).await), vec!["first"; 2500]);
}

#[tokio::test]
async fn a_client_that_goes_away_in_the_middle_and_sends_again_loses_nothing() {
    for mirrored in kinds() {
        let site = Site::with(with_clicks_of(mirrored)).await;
        let other = serve(&site.redis, &site.provider, with_clicks_of(mirrored)).await;
        let feed = feed(&site.alice(), "k");
        feed.send(lines(0..2700)).await;
        let (parts, mut opened) = feed.opened().await;
        assert!(opened.reads("{\"index\":0,").await);
        let broken = parts.send(Err(std::io::Error::other("the client is gone"))).await;
        drop((opened, broken));
        let again = whole(post(&other.client.with_token("alice"), CLICKS, "k", lines(0..5000)).await);
        assert_eq!(again, vec!["first"; 5000]);
    }
}

#[tokio::test]
async fn a_gateway_that_is_killed_in_the_middle_costs_no_click() {
    let site = Processes::open().await;
    let settings = [("stream.clicks.fields", r#"["user", "/ad/id"]"#)];
    let (mut one, two) = (site.start(&settings, None).await, site.start(&settings, None).await);
    let feed = feed(&Client::new(one.addr()), "k");
    feed.send(lines(0..2700)).await;
    let (parts, mut opened) = feed.opened().await;
    assert!(opened.reads("{\"index\":999,").await);
    one.signal(Signal::KILL);
    one.ended().await;
    let cut = opened.end().await.expect_err("it breaks off");
    assert!(!String::from_utf8(cut).unwrap().contains("done"));
    drop(parts);
    let client = Client::new(two.addr());
    assert_eq!(whole(post(&client, CLICKS, "k", lines(0..5000)).await), vec!["first"; 5000]);
    assert_eq!(firsts(&whole(post(&client, CLICKS, "other", lines(0..5000)).await)), 0);
}

#[tokio::test]
async fn while_redis_is_away_lines_end_in_a_problem_and_the_same_key_completes_them() {
    let site = Site::with_setup(|setup| {
        with_clicks(&mut setup.server);
        setup.store.response_timeout = Duration::from_millis(300);
    })
    .await;
    let alice = site.alice();
    let feed = feed(&alice, "k");
    feed.send(lines(0..BATCH_LINES)).await;
    let (parts, mut opened) = feed.opened().await;
    assert!(opened.reads("{\"index\":999,").await);
    site.redis.pause();
    parts.send(Ok(hyper::body::Frame::data(lines(BATCH_LINES..3000).into()))).await.unwrap();
    drop(parts);
    let (verdicts, last) = told(&opened.end().await.unwrap());
    assert_eq!((verdicts.len(), &last["done"]), (1000, &json!(false)), "{last}");
    let problem = &last["problem"];
    assert_eq!((&problem["status"], &problem["retryable"]), (&json!(503), &json!(true)), "{problem}");
    assert_eq!(problem["index"], 1000, "{problem}");
    // Before the first verdict it has a status of its own.
    post(&alice, CLICKS, "k", lines(0..3000)).await.problem(503, "store-unavailable");
    site.redis.resume();
    let mut verdicts = Vec::new();
    until("it is answered again", async || {
        let answer = post(&alice, CLICKS, "k", lines(0..3000)).await;
        let is_whole = answer.status == 200 && answer.text().contains("\"done\":true");
        if is_whole {
            verdicts = whole(answer);
        }
        is_whole
    })
    .await;
    assert_eq!(verdicts, vec!["first"; 3000]);
}

#[tokio::test]
async fn a_stopping_gateway_says_so_in_the_last_line() {
    let site = Site::with(with_clicks).await;
    let feed = feed(&site.alice(), "k");
    feed.send(lines(0..BATCH_LINES + 1)).await;
    let (parts, mut opened) = feed.opened().await;
    assert!(opened.reads("{\"index\":999,").await);
    site.gateway.stop.cancel();
    let (verdicts, last) = told(&opened.end().await.unwrap());
    assert_eq!((verdicts.len(), &last["done"]), (1000, &json!(false)), "{last}");
    assert_eq!(last["problem"]["type"], "urn:onejob:problem:stopping", "{last}");
    drop(parts);
}

#[tokio::test]
async fn a_batch_that_comes_too_slowly_is_408_and_a_smaller_one_is_told() {
    let site = Site::with(|options| {
        with_clicks(options);
        options.body_timeout = Duration::from_millis(500);
    })
    .await;
    let slow = feed(&site.alice(), "k");
    slow.send(lines(0..10)).await;
    let (parts, opened) = slow.opened().await;
    assert_eq!((opened.status, opened.header("content-type")), (408, "application/problem+json"));
    drop((parts, opened));
    assert!(site.redis.dump().await.is_empty(), "half a batch is asked nothing");
    let feed = site.alice().feed(&format!("{CLICKS}?batch=5"), &headers("k"));
    feed.send(lines(0..10)).await;
    let (parts, mut opened) = feed.opened().await;
    assert!(opened.reads("{\"index\":9,\"verdict\":\"first\"}\n").await);
    drop(parts);
    assert_eq!(told(&opened.end().await.unwrap()).1["done"], true);
}

/// Whoever sends and never reads is neither read from without end nor waited for without end.
#[tokio::test]
async fn a_client_that_never_reads_is_not_read_from_and_hung_up_on() {
    let site = Site::with(|options| {
        with_clicks(options);
        options.head_timeout = Duration::from_millis(300);
        options.answer_read_max = Duration::from_millis(300);
    })
    .await;
    let mut stream = TcpStream::connect(site.gateway.addr).await.unwrap();
    let head = format!(
        "POST {CLICKS}?batch=1000 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\nidempotency-key: k\r\n\
         content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let part = lines((0..BATCH_LINES).map(|_| 1));
    let chunk = format!("{:x}\r\n{part}\r\n", part.len());
    let mut sent = 0_u64;
    let hung_up = async {
        while stream.write_all(chunk.as_bytes()).await.is_ok() {
            sent += BATCH_LINES;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), hung_up).await.expect("it is hung up on");
    // What two kernels and a gateway hold at most, far below what was on offer.
    assert!(sent < 5_000_000, "{sent} lines were taken");
    site.alice().get("/healthz").await.is(200);
}

#[tokio::test]
async fn requests_of_lines_share_the_memory_for_bodies() {
    let site = Site::with(|options| {
        with_clicks(options);
        options.bodies_bytes_max = 100 << 10;
    })
    .await;
    let alice = site.alice();
    let one = feed(&alice, "one");
    one.send(lines(0..1)).await;
    until("the first has its share", async || post(&alice, CLICKS, "two", lines(0..1)).await.status == 503).await;
    let problem = post(&alice, CLICKS, "two", lines(0..1)).await.problem(503, "overloaded");
    assert_eq!(problem["limit"], 100 << 10);
    assert_eq!(whole(one.end().await), ["first"]);
    until("it is given back", async || post(&alice, CLICKS, "two", lines(0..1)).await.status == 200).await;
}

#[tokio::test]
async fn a_request_of_lines_ends_when_a_connection_would() {
    let site = Site::with(|options| {
        options.streams = vec![Stream::new("clicks", &["user"])];
        options.connection_age_max = Duration::from_millis(700);
        options.body_timeout = Duration::from_secs(60);
    })
    .await;
    let feed = site.alice().feed(&format!("{CLICKS}?batch=1"), &headers("k"));
    feed.send(lines(0..2)).await;
    let (parts, opened) = feed.opened().await;
    let (verdicts, last) = told(&opened.end().await.unwrap());
    assert_eq!((verdicts.len(), &last["done"]), (2, &json!(false)), "{last}");
    assert_eq!(last["problem"]["type"], "urn:onejob:problem:body-timeout", "{last}");
    drop(parts);
}

#[tokio::test]
async fn lines_without_a_key_or_of_an_unknown_stream_are_refused_before_they_are_read() {
    let site = Site::with(with_clicks).await;
    let head = |path: &str, key: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer alice\r\n{key}\
             content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
        )
    };
    let answer = raw(site.gateway.addr, head(CLICKS, "").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("idempotency-key-missing"), "{answer}");
    let answer = raw(site.gateway.addr, head("/v1/dedup/views", "idempotency-key: k\r\n").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 404 ") && answer.contains("stream-unknown"), "{answer}");
    post(&site.alice(), &format!("{CLICKS}/claim"), "k", "").await.problem(415, "media-type-unsupported");
    for batch in ["0", "1001"] {
        post(&site.alice(), &format!("{CLICKS}?batch={batch}"), "k", "").await.problem(400, "request-invalid");
    }
    assert_eq!(whole(post(&site.alice(), CLICKS, "k", "\n").await), [""; 0]);
}
