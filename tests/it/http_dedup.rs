//! Clicks over HTTP, a JSON array at a time: verdicts, keys, what is refused, two phases, stores that are away.

use std::fmt::Write as _;
use std::time::Duration;

use futures_util::future::join_all;
use onejob::dedup::{BATCH_IDS_MAX, Stream};
use onejob::server::{ConflictStatus, ServerOptions};
use serde_json::{Value, json};

use crate::http_support::{Answer, Client, Site, serve};
use crate::support::{kinds, until};

pub const CLICKS: &str = "/v1/dedup/clicks";

pub fn with_clicks(options: &mut ServerOptions) {
    options.streams = vec![Stream::new("clicks", &["user", "/ad/id"])];
}

/// The same, of either kind.
pub fn with_clicks_of(mirrored: bool) -> impl Fn(&mut ServerOptions) + Copy {
    move |options| {
        with_clicks(options);
        options.streams[0].mirrored = mirrored;
    }
}

pub fn click(user: u64) -> String {
    format!("{{\"user\":{user},\"ad\":{{\"id\":\"a\"}},\"at\":\"now\"}}")
}

fn clicks(users: impl IntoIterator<Item = u64>) -> String {
    let clicks: Vec<_> = users.into_iter().map(click).collect();
    format!("[{}]", clicks.join(","))
}

async fn post(client: &Client, path: &str, key: &str, body: impl Into<bytes::Bytes>) -> Answer {
    client.send("POST", path, &[("content-type", "application/json"), ("idempotency-key", key)], body).await
}

/// What each click was told.
fn verdicts(answer: Answer) -> Vec<String> {
    let document = answer.is(200).json();
    let verdicts: Vec<String> = serde_json::from_value(document["verdicts"].clone()).unwrap();
    assert_eq!(document["clicks"], verdicts.len());
    for (word, count) in document["counts"].as_object().unwrap() {
        assert_eq!(*count, verdicts.iter().filter(|verdict| *verdict == word).count(), "{document}");
    }
    verdicts
}

#[tokio::test]
async fn clicks_are_told_in_their_order_and_the_same_when_they_are_sent_again() {
    for mirrored in kinds() {
        let site = Site::with(with_clicks_of(mirrored)).await;
        let (alice, bob) = (site.alice(), site.bob());
        let first = post(&alice, CLICKS, "k", clicks([3, 1, 3, 2])).await.is(200);
        assert_eq!(first.header("cache-control"), "no-store");
        let expected = json!({
            "stream": "clicks", "clicks": 4, "counts": {"duplicate": 1, "first": 3},
            "verdicts": ["first", "first", "duplicate", "first"],
        });
        assert_eq!(first.json(), expected);
        assert_eq!(post(&alice, CLICKS, "\"k\"", clicks([3, 1, 3, 2])).await.json(), expected);
        assert_eq!(verdicts(post(&alice, CLICKS, "l", clicks([3, 4])).await), ["duplicate", "first"]);
        // The key is the owner's, the click the stream's.
        assert_eq!(verdicts(post(&bob, CLICKS, "k", clicks([3, 5])).await), ["duplicate", "first"]);
        assert!(verdicts(post(&alice, CLICKS, "none", "[]").await).is_empty());
        // Nothing but its fields makes a click the same; the type of a value counts.
        let other = r#"[{"user":3,"ad":{"id":"a"},"at":7},{"user":"3","ad":{"id":"a"}},{"user":3,"ad":{"id":""}}]"#;
        assert_eq!(verdicts(post(&alice, CLICKS, "m", other).await), ["duplicate", "first", "first"]);
    }
}

#[tokio::test]
async fn a_key_with_other_clicks_is_a_conflict_and_nothing_of_them_is_remembered() {
    for (status, code) in [(ConflictStatus::Conflict, 409), (ConflictStatus::UnprocessableContent, 422)] {
        let site = Site::with(|options| {
            with_clicks(options);
            options.conflict = status;
        })
        .await;
        let alice = site.alice();
        post(&alice, CLICKS, "k", clicks(0..3)).await.is(200);
        let problem = post(&alice, CLICKS, "k", clicks(0..4)).await.problem(code, "key-conflict");
        assert!(problem["detail"].as_str().unwrap().contains("\"clicks\""), "{problem}");
        assert_eq!(verdicts(post(&alice, CLICKS, "l", clicks([3])).await), ["first"]);
    }
}

#[tokio::test]
async fn a_click_without_an_id_is_told_by_its_place_and_field_and_nothing_is_remembered() {
    let site = Site::with(with_clicks).await;
    let alice = site.alice();
    for (second, field, what) in [
        (r#"{"user":1}"#, Some("/ad/id"), "is missing"),
        (r#"{"user":null,"ad":{"id":1}}"#, Some("user"), "is missing"),
        (r#"{"user":1.5,"ad":{"id":1}}"#, Some("user"), "not whole"),
        (r#"{"user":[],"ad":{"id":1}}"#, Some("user"), "an array"),
        (r#"{"user":1,"user":2,"ad":{"id":1}}"#, None, "twice"),
        ("7", None, "a number, and a click is an object"),
    ] {
        let problem = post(&alice, CLICKS, "k", format!("[{},{second}]", click(1))).await.problem(422, "click-invalid");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains("stream \"clicks\": click 1: ") && detail.contains(what), "{problem}");
        assert_eq!((&problem["index"], problem["field"].as_str()), (&json!(1), field), "{problem}");
    }
    let long = format!("[{{\"user\":\"{}\",\"ad\":{{\"id\":1}}}}]", "x".repeat(65_537));
    let problem = post(&alice, CLICKS, "k", long).await.problem(422, "click-invalid");
    assert!(problem["detail"].as_str().unwrap().contains("65537 bytes, of 65536 at most"), "{problem}");
    assert!(site.redis.dump().await.is_empty());
    post(&alice, CLICKS, "k", clicks(0..2)).await.is(200);
}

#[tokio::test]
async fn what_is_no_batch_of_clicks_is_refused_and_nothing_is_remembered() {
    let site = Site::with(|options| {
        with_clicks(options);
        options.body_bytes_max = 1 << 20;
    })
    .await;
    let alice = site.alice();
    for path in ["", "/claim", "/commit", "/release"] {
        let path = format!("{CLICKS}{path}");
        let json = [("content-type", "application/json")];
        alice.send("POST", &path, &json, "[]").await.problem(400, "idempotency-key-missing");
        post(&alice, &path, "two words", "[]").await.problem(400, "idempotency-key-invalid");
        post(&alice, &path, "k", "[{]").await.problem(400, "request-invalid");
        post(&alice, &path, "k", "{}").await.problem(400, "request-invalid");
        post(&alice, &path, "k", format!("[{}]", "[".repeat(1000))).await.problem(400, "request-invalid");
        post(&site.gateway.client, &path, "k", "[]").await.problem(401, "unauthorized");
        post(&site.client("nobody"), &path, "k", "[]").await.problem(403, "forbidden");
        let absent = path.replace("clicks", "views");
        let problem = post(&alice, &absent, "k", "[]").await.problem(404, "stream-unknown");
        assert!(problem["detail"].as_str().unwrap().contains("\"views\""), "{problem}");
        let headers = [("content-type", "text/plain"), ("idempotency-key", "k")];
        alice.send("POST", &path, &headers, "[]").await.problem(415, "media-type-unsupported");
        alice.get(&path).await.problem(405, "method-not-allowed");
        let many = format!("[{}0]", "0,".repeat(BATCH_IDS_MAX));
        let problem = post(&alice, &path, "k", many).await.problem(413, "clicks-too-many");
        assert_eq!(problem["limit"], BATCH_IDS_MAX, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains("10001"), "{problem}");
        post(&alice, &path, "k", format!("[{}]", " ".repeat(1 << 20))).await.problem(413, "body-too-large");
    }
    for query in ["?batch=10", "?batch=0", "?batch=x", "?shards=1"] {
        post(&alice, &format!("{CLICKS}{query}"), "k", "[]").await.problem(400, "request-invalid");
    }
    assert!(site.redis.dump().await.is_empty());
}

#[tokio::test]
async fn of_two_hundred_posts_of_one_click_at_two_gateways_one_is_told_first() {
    for mirrored in kinds() {
        let site = Site::with(with_clicks_of(mirrored)).await;
        let other = serve(&site.redis, &site.provider, with_clicks_of(mirrored)).await;
        let clients = [site.alice(), other.client.with_token("bob")];
        let posts = (0..200).map(|place| {
            let client = clients[place % 2].clone();
            async move { verdicts(post(&client, CLICKS, &format!("k-{place}"), clicks([7])).await).remove(0) }
        });
        let told = join_all(posts).await;
        assert_eq!(told.iter().filter(|verdict| *verdict == "first").count(), 1);
        assert_eq!(told.iter().filter(|verdict| *verdict == "duplicate").count(), 199);
    }
}

#[tokio::test]
async fn a_gateway_that_declares_a_stream_otherwise_is_told_so() {
    let site = Site::with(with_clicks_of(false)).await;
    let other = serve(&site.redis, &site.provider, with_clicks_of(true)).await;
    assert_eq!(verdicts(post(&site.alice(), CLICKS, "k", clicks([7])).await), ["first"]);
    let problem = post(&other.client.with_token("alice"), CLICKS, "l", clicks([7, 8])).await.problem(500, "store-refused");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("the stream \"clicks\" declare it otherwise"), "{problem}");
    assert_eq!(verdicts(post(&site.alice(), CLICKS, "m", clicks([7, 8])).await), ["duplicate", "first"]);
}

#[tokio::test]
async fn a_claim_keeps_clicks_until_it_is_committed_or_released_under_its_key() {
    for mirrored in kinds() {
        let site = Site::with(with_clicks_of(mirrored)).await;
        let (alice, bob) = (site.alice(), site.bob());
        let ask = async |client: &Client, what: &str, key: &str, users: &[u64]| {
            verdicts(post(client, &format!("{CLICKS}/{what}"), key, clicks(users.iter().copied())).await)
        };
        assert_eq!(ask(&alice, "claim", "a", &[1, 2, 3]).await, ["first"; 3]);
        assert_eq!(ask(&alice, "claim", "a", &[1, 2, 3]).await, ["first"; 3], "again");
        assert_eq!(ask(&bob, "claim", "a", &[3, 4]).await, ["held", "first"]);
        // A part of what was claimed, with the clicks themselves; and again.
        for _ in 0..2 {
            assert_eq!(ask(&alice, "commit", "a", &[1, 2]).await, ["committed"; 2]);
        }
        let path = format!("{CLICKS}/release");
        let released = post(&alice, &path, "a", clicks([3])).await.is(204);
        assert!(released.body.is_empty());
        post(&alice, &path, "a", clicks([3])).await.is(204);
        assert_eq!(ask(&bob, "claim", "b", &[1, 2, 3]).await, ["duplicate", "duplicate", "first"]);
        assert_eq!(ask(&bob, "commit", "b", &[3]).await, ["committed"]);
        // Somebody else counted it meanwhile.
        assert_eq!(verdicts(post(&alice, CLICKS, "c", clicks([4])).await), ["first"]);
        assert_eq!(ask(&bob, "commit", "a", &[4]).await, ["lost"]);
        post(&bob, &format!("{CLICKS}/commit"), "a", clicks([5])).await.problem(409, "key-conflict");
    }
}

#[tokio::test]
async fn while_redis_is_away_clicks_are_503_and_the_same_key_completes_them() {
    let site = Site::with_setup(|setup| {
        with_clicks(&mut setup.server);
        setup.store.response_timeout = Duration::from_millis(300);
    })
    .await;
    let alice = site.alice();
    post(&alice, CLICKS, "before", clicks([0])).await.is(200);
    site.redis.pause();
    for path in [CLICKS.to_owned(), format!("{CLICKS}/claim"), format!("{CLICKS}/commit")] {
        let problem = post(&alice, &path, "k", clicks(0..3)).await.problem(503, "store-unavailable");
        assert_eq!((&problem["clicks"], &problem["unanswered"]), (&json!(3), &json!(3)), "{problem}");
        assert_eq!((&problem["retryable"], &problem["source"]), (&json!(true), &json!("store")), "{problem}");
    }
    post(&alice, &format!("{CLICKS}/release"), "k", clicks(0..3)).await.problem(503, "store-unavailable");
    site.redis.resume();
    let mut told = Vec::new();
    until("it is answered again", async || {
        let answer = post(&alice, CLICKS, "k", clicks(0..3)).await;
        let is_answered = answer.status == 200;
        if is_answered {
            told = verdicts(answer);
        }
        is_answered
    })
    .await;
    assert_eq!(told, ["duplicate", "first", "first"]);
}

/// A shard that refuses keeps the others from nothing, and the same key completes it.
#[tokio::test]
async fn clicks_of_which_some_have_no_verdict_are_503_and_the_same_key_completes_them() {
    let site = Site::with(|options| {
        options.streams = vec![Stream { shards: 2, ..Stream::new("clicks", &["user", "/ad/id"]) }];
    })
    .await;
    let alice = site.alice();
    // One of the two shards holds what nobody wrote.
    site.redis.command::<()>(&["SET", "oj:dedup:{clicks/01}", "no shard"]).await;
    let problem = post(&alice, CLICKS, "k", clicks(0..40)).await.problem(500, "store-refused");
    let unanswered = problem["unanswered"].as_u64().unwrap();
    assert!((1..40).contains(&unanswered), "{problem}");
    site.redis.command::<()>(&["DEL", "oj:dedup:{clicks/01}"]).await;
    assert_eq!(verdicts(post(&alice, CLICKS, "k", clicks(0..40)).await), vec!["first"; 40]);
}

#[tokio::test]
async fn a_large_array_is_told_whole_at_its_limit() {
    let site = Site::with(with_clicks).await;
    let mut body = String::from("[");
    for user in 0..BATCH_IDS_MAX as u64 {
        write!(body, "{}{}", if user == 0 { "" } else { "," }, click(user / 2)).unwrap();
    }
    body.push(']');
    let document: Value = post(&site.alice(), CLICKS, "k", body).await.is(200).json();
    assert_eq!(document["counts"], json!({"first": BATCH_IDS_MAX / 2, "duplicate": BATCH_IDS_MAX / 2}));
}
