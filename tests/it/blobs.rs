//! Bytes too large for the record: they come back as they were, the winner's are never lost, and nobody's are kept for ever.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use axum::extract::RawQuery;
use axum::http::header::CONTENT_TYPE;
use onejob::attempt::{AttemptState, AttemptToken};
use onejob::fingerprint::{Fingerprinted, digest, fingerprint, hex, second_half, sha256};
use onejob::job::{Body, Class, Identity, JobId, JobState, Key, Owner, Payload, Rules};
use onejob::runtime::Route;
use onejob::store::{Begin, Read, SubmitJob, Submitted};

use crate::http_support::{Client, Setup, Site, route, rules, serve_with, slot};
use crate::support::{Redis, until};

/// How long a blob that no record names is kept in these tests.
const GRACE: Duration = Duration::from_millis(1500);
/// The largest body that the record itself holds.
const INLINE_BYTES_MAX: usize = 8 << 10;
const BODY_BYTES_MAX: usize = 4 << 20;
const RESULT_BYTES_MAX: usize = 16 << 20;

/// Bytes that no compression and no mistake of order survives.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut noise = Vec::with_capacity(bytes + 8);
    while noise.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        noise.extend_from_slice(&(state >> 16).to_le_bytes()[..6]);
    }
    noise.truncate(bytes);
    noise
}

/// A JSON text of so many bytes.
fn text(seed: char, bytes: usize) -> String {
    format!("\"{}\"", seed.to_string().repeat(bytes - 2))
}

/// A provider that answers with what it was sent, or with so many bytes of noise as the query says, 404 if it starts with a minus.
async fn echo() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let answer = |RawQuery(query): RawQuery, body: axum::body::Bytes| async move {
        let (status, body) = match query.as_deref().map(str::parse::<i64>) {
            Some(Ok(bytes)) if bytes < 0 => (404, noise(7, usize::try_from(-bytes).unwrap()).into()),
            Some(Ok(bytes)) => (200, noise(7, usize::try_from(bytes).unwrap()).into()),
            Some(Err(_)) | None => (200, body),
        };
        (axum::http::StatusCode::from_u16(status).unwrap(), [(CONTENT_TYPE, "application/octet-stream")], body)
    };
    let app = axum::Router::new().fallback(answer).layer(axum::extract::DefaultBodyLimit::disable());
    tokio::spawn(async move { axum::serve(listener, app).await });
    addr
}

/// A short grace, a provider that echoes, and routes to it whose jobs live for different times.
fn blobs(setup: &mut Setup, echo: SocketAddr) {
    setup.store.blob_grace = GRACE;
    // Thousands of large bodies at once, on a machine that does much else.
    setup.store.response_timeout = Duration::from_secs(10);
    setup.providers.push(slot("echo", &format!("http://{echo}"), Duration::from_secs(30)));
    let life = |name: &str, retention_ms: u64, key_life_ms: u64| Route {
        rules: Rules { retention_ms, key_life_ms, ..rules(Class::Exclusive) },
        ..route(name, Class::Exclusive, &["echo"])
    };
    setup.routes.push(life("echo", 3_600_000, 3_600_000));
    setup.routes.push(life("brief_bytes", 60_000, 3_600_000));
    setup.routes.push(life("fleeting", 2000, 2000));
}

async fn site() -> Site {
    site_with(|_| {}).await
}

async fn site_with(change: impl FnOnce(&mut Setup)) -> Site {
    let echo = echo().await;
    Site::with_setup(|setup| {
        blobs(setup, echo);
        change(setup);
    })
    .await
}

fn blob_key(id: &str, bytes: &[u8]) -> String {
    let identity = id.parse::<JobId>().unwrap().identity();
    format!("oj:{{{identity}}}:b:{}", hex(&sha256(bytes)))
}

async fn blob_keys(redis: &Redis) -> Vec<String> {
    redis.keys().await.into_iter().filter(|key| key.contains(":b:")).collect()
}

/// How long a key has to live in ms: -1 for ever, -2 it is not there.
async fn life_ms(redis: &Redis, key: &str) -> i64 {
    redis.command(&["PTTL", key]).await
}

async fn is_gone(redis: &Redis, key: &str) {
    until(&format!("{key} is gone"), async || life_ms(redis, key).await == -2).await;
}

/// Waits until a blob that was written now, and that nobody keeps, would be gone.
async fn grace_is_over(redis: &Redis) {
    let grace_ms = GRACE.as_millis().to_string();
    redis.value(&["SET", "companion", "x", "PX", &grace_ms]).await;
    is_gone(redis, "companion").await;
}

async fn proxied(client: &Client, key: &str, target: &str, body: impl Into<bytes::Bytes>) -> crate::http_support::Answer {
    let headers = [("idempotency-key", key), ("content-type", "application/octet-stream")];
    client.send("POST", target, &headers, body).await
}

#[tokio::test]
async fn inputs_of_every_size_come_back_byte_for_byte() {
    let site = site().await;
    let alice = site.alice();
    let sizes = [1, INLINE_BYTES_MAX - 1, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 100_000, BODY_BYTES_MAX];
    let mut blobs = 0;
    for (place, bytes) in sizes.into_iter().enumerate() {
        let sent = noise(bytes as u64, bytes);
        let key = format!("k{place}");
        for replayed in ["false", "true"] {
            let answer = proxied(&alice, &key, "/proxy/echo/x", sent.clone()).await.is(200);
            assert_eq!(answer.header("idempotency-replayed"), replayed);
            assert!(answer.body == sent, "{bytes} bytes came back as {}", answer.body.len());
        }
        let job = site.gateway.runtime.find(&Owner::new("alice").unwrap(), &Key::new(&key).unwrap()).await.unwrap();
        assert!(site.gateway.runtime.input(&job).await.unwrap().body[..] == sent[..]);
        blobs += usize::from(bytes > INLINE_BYTES_MAX);
        assert_eq!(blob_keys(&site.redis).await.len(), blobs, "input and result are one blob, from {bytes} bytes");
    }
    proxied(&alice, "over", "/proxy/echo/x", noise(1, BODY_BYTES_MAX + 1)).await.problem(413, "body-too-large");
}

#[tokio::test]
async fn results_of_every_size_come_back_byte_for_byte() {
    let site = site().await;
    let alice = site.alice();
    for bytes in [0, 1, INLINE_BYTES_MAX - 1, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 1 << 20, RESULT_BYTES_MAX] {
        let expected = noise(7, bytes);
        for replayed in ["false", "true"] {
            let answer = proxied(&alice, &format!("k{bytes}"), &format!("/proxy/echo/x?{bytes}"), "x").await.is(200);
            assert_eq!(answer.header("idempotency-replayed"), replayed);
            assert!(answer.body == expected, "{bytes} bytes came back as {}", answer.body.len());
        }
    }
    let target = format!("/proxy/echo/x?{}", RESULT_BYTES_MAX + 1);
    let problem = proxied(&alice, "over", &target, "x").await.problem(504, "attempt-unknown");
    let limit = RESULT_BYTES_MAX.to_string();
    assert!(problem["detail"].as_str().unwrap().contains(&limit), "{problem}");
    // As JSON too, in a job's document.
    let (id, sent) = (alice.submit("echo", "json", &text('x', 50_000)).await.job_id(), text('x', 50_000));
    assert_eq!(alice.ended(&id).await["result"]["body"], sent);
}

/// Input and result of a job that ended are kept as long as it can be asked for, and no longer: the input's blob, which has no end
/// while the job is open, was kept for ever.
#[tokio::test]
async fn the_blobs_of_an_ended_job_go_with_it() {
    let site = site().await;
    let alice = site.alice();
    let hour = 3_600_000;
    for (route, target, life, state) in [
        ("echo", "/x?20000", hour, "succeeded"),
        ("echo", "/x?-20000", hour, "failed"),
        ("brief_bytes", "/x?20000", 60_000, "succeeded"),
        ("brief_bytes", "/x?-20000", 60_000, "failed"),
    ] {
        let key = format!("{route}{target}");
        let answer = proxied(&alice, &key, &format!("/proxy/{route}{target}"), noise(1, 10_000)).await;
        let id = answer.header("onejob-job-id");
        for bytes in [noise(1, 10_000), noise(7, 20_000)] {
            let key = blob_key(id, &bytes);
            let kept = life - 50_000;
            until("the blob lives as long as its bytes are kept", async || {
                (kept..=life).contains(&life_ms(&site.redis, &key).await)
            })
            .await;
        }
        grace_is_over(&site.redis).await;
        assert!(answer.body == noise(7, 20_000));
        assert!(proxied(&alice, &key, &format!("/proxy/{route}{target}"), noise(1, 10_000)).await.body == answer.body);
        assert_eq!(alice.get(&format!("/v1/jobs/{id}")).await.is(200).json()["state"], state);
    }
}

/// The memory of Redis after the lives of jobs with large bodies, and its keys.
#[tokio::test]
async fn jobs_with_blobs_that_have_expired_leave_nothing_behind() {
    const JOBS: usize = 60;
    // Nobody dies here, and a busy machine may take longer than the short grace from the bytes to the record.
    let site = site_with(|setup| setup.store.blob_grace = Duration::from_secs(60)).await;
    let alice = site.alice();
    let used = async || {
        let info: String = site.redis.command(&["INFO", "memory"]).await;
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory_dataset:")).unwrap();
        line.trim().parse::<u64>().unwrap()
    };
    // What is allocated once: scripts, connections, their buffers.
    proxied(&alice, "first", "/proxy/fleeting/x?200000", noise(0, 200_000)).await.is(200);
    until("the first job is forgotten", async || site.redis.keys().await == ["oj:meta"]).await;
    let before = used().await;
    let jobs = (0..JOBS).map(|job| {
        let alice = alice.clone();
        let (key, body) = (format!("k{job}"), noise(job as u64, 100_000));
        async move {
            let bytes = if job % 3 == 0 { -100_000 } else { 100_000 };
            proxied(&alice, &key, &format!("/proxy/fleeting/x?{bytes}"), body).await.status
        }
    });
    let statuses = futures_util::future::join_all(jobs).await;
    // Whoever asks too late is told so; nobody is told that the store is damaged.
    assert!(statuses.iter().all(|status| [200, 404, 410].contains(status)), "{statuses:?}");
    until("only the schema is left", async || site.redis.keys().await == ["oj:meta"]).await;
    let limit = before + 1_000_000;
    until("the memory is given back", async || used().await < limit).await;
}

/// Which of the two is first is left to chance, in both orders of sending.
#[tokio::test]
async fn of_two_conflicting_submits_the_winners_bytes_stay_and_the_losers_go() {
    let site = site().await;
    let alice = site.alice();
    for round in 0..6 {
        let key = format!("k{round}");
        let inputs = [text('a', 200_000), text('b', 200_000)];
        let (one, two) = (round % 2, 1 - round % 2);
        let (first, second) =
            tokio::join!(alice.submit("outside", &key, &inputs[one]), alice.submit("outside", &key, &inputs[two]));
        let (winner, loser, answer) = match (first.status, second.status) {
            (202, 409) => (one, two, first),
            (409, 202) => (two, one, second),
            other => panic!("{other:?}"),
        };
        let id = answer.job_id();
        let (kept, orphan) = (blob_key(&id, inputs[winner].as_bytes()), blob_key(&id, inputs[loser].as_bytes()));
        assert!((-2..=i64::try_from(GRACE.as_millis()).unwrap()).contains(&life_ms(&site.redis, &orphan).await));
        is_gone(&site.redis, &orphan).await;
        assert_eq!(life_ms(&site.redis, &kept).await, -1);
        let job = site.gateway.runtime.read(id.parse().unwrap()).await.unwrap();
        assert!(site.gateway.runtime.input(&job).await.unwrap().body[..] == *inputs[winner].as_bytes());
    }
}

#[tokio::test]
async fn bytes_that_two_submits_of_a_key_share_are_not_lost_with_one_of_them() {
    let site = site().await;
    let alice = site.alice();
    let input = text('a', 100_000);
    let submits = (0..8).map(|_| alice.submit("outside", "k", &input));
    let answers = futures_util::future::join_all(submits).await;
    let id = answers[0].job_id();
    assert!(answers.iter().all(|answer| answer.status == 202 && answer.job_id() == id));
    until("the job's bytes have no end", async || life_ms(&site.redis, &blob_key(&id, input.as_bytes())).await == -1).await;
    alice.submit("outside", "k", &input).await.is(202);
    grace_is_over(&site.redis).await;
    assert_eq!(life_ms(&site.redis, &blob_key(&id, input.as_bytes())).await, -1);
    assert_eq!(blob_keys(&site.redis).await.len(), 1);
}

#[tokio::test]
async fn a_large_result_that_came_too_late_goes_and_the_winners_stays() {
    let site = site().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("race", "k", "{}").await.job_id();
    let (_, one) = operator.begin_running(&id, "laser").await;
    // The other one may begin a millisecond later.
    let (_, other) = operator.begin_running(&id, "inkjet").await;
    let finish = async |number: u32, token: &str, result: &str| {
        let body = format!(r#"{{"token":"{token}","outcome":"succeeded","result":{result}}}"#);
        operator.post(&format!("/v1/jobs/{id}/attempts/{number}/finish"), &body).await
    };
    let (winner, loser) = (text('w', 50_000), text('l', 50_000));
    assert_eq!(finish(1, &one, &winner).await.is(200).json()["status"], "won");
    assert_eq!(finish(2, &other, &loser).await.is(200).json()["status"], "discarded");
    is_gone(&site.redis, &blob_key(&id, loser.as_bytes())).await;
    grace_is_over(&site.redis).await;
    assert!(life_ms(&site.redis, &blob_key(&id, winner.as_bytes())).await > 3_000_000);
    assert!(alice.ended(&id).await["result"]["body"].as_str().unwrap().starts_with("www"));
}

/// The blob is written before the record: a gateway that dies between them leaves bytes that nobody names, for as long as the grace.
#[tokio::test]
async fn bytes_whose_record_was_never_written_go_and_the_key_is_free() {
    let site = site().await;
    let alice = site.alice();
    let input = text('a', 100_000);
    let deny = ["ACL", "SETUSER", "default", "-eval", "-evalsha"];
    site.redis.value(&deny).await;
    let refused = alice.submit("outside", "k", &input).await;
    assert!(refused.status >= 500, "{refused:?}");
    let orphans = blob_keys(&site.redis).await;
    assert_eq!(orphans.len(), 1);
    is_gone(&site.redis, &orphans[0]).await;
    site.redis.value(&["ACL", "SETUSER", "default", "+eval", "+evalsha"]).await;
    let cancel = alice.send("POST", "/v1/cancel", &[("idempotency-key", "k")], "").await;
    cancel.problem(404, "job-unknown");
    let answer = alice.submit("outside", "k", &input).await.is(202);
    assert_eq!(answer.header("idempotency-replayed"), "false");
    assert_eq!(blob_keys(&site.redis).await, [blob_key(&answer.job_id(), input.as_bytes())]);
}

/// A gateway that dies with a result whose bytes are stored and whose record is not: its attempt is unknown, and the bytes go.
#[tokio::test]
async fn a_result_whose_record_was_never_written_goes_and_its_job_is_unknown() {
    let brief = |setup: &mut Setup| {
        setup.runtime.lease = Duration::from_millis(900);
        setup.runtime.lease_margin = Duration::from_millis(100);
    };
    let site = site_with(brief).await;
    let id = site.alice().submit("print", "k", r#"{"simulate":"delay=400ms,size=50000"}"#).await.is(202).job_id();
    site.redis.value(&["ACL", "SETUSER", "default", "-eval", "-evalsha"]).await;
    until("the result's bytes are stored", async || blob_keys(&site.redis).await.len() == 1).await;
    let orphan = blob_keys(&site.redis).await.remove(0);
    let drained = site.gateway.runtime.shutdown(Duration::ZERO).await;
    assert_eq!((drained.running, drained.unwritten), (1, 1));
    site.redis.value(&["ACL", "SETUSER", "default", "+eval", "+evalsha"]).await;
    let other = serve_with(&site.redis, &site.provider, brief).await;
    other.client.with_token("alice").in_state(&id, "unknown").await;
    is_gone(&site.redis, &orphan).await;
    assert_eq!(site.provider.ledger_of(&id).executed, 1);
}

/// Claims a job with a large input as a gateway would that dies right afterwards, before it has said that the bytes are to be kept.
async fn claimed_by_a_dead_gateway(site: &Site, route: &str, key: &str, input: &[u8]) -> JobId {
    let store = site.redis.store().await;
    let owner = Owner::new("alice").unwrap();
    let digest = digest("alice", key);
    let id = JobId::new(store.now_ms(), Identity::of(&digest));
    let content_type = "application/json";
    let whole = Fingerprinted { route, method: "", target: "", content_type, body: input, ignore: &[] };
    let blob = blob_key(&id.to_string(), input);
    let grace_ms = GRACE.as_millis().to_string();
    site.redis.command::<()>(&["SET", &blob, std::str::from_utf8(input).unwrap(), "PX", &grace_ms]).await;
    let submit = SubmitJob {
        id,
        digest: second_half(&digest),
        fingerprint: fingerprint(whole),
        owner: &owner,
        route,
        class: Class::Exclusive,
        deadline_ms: 60_000,
        rules: rules(Class::Exclusive),
        input: &Payload {
            head: format!(" \ncontent-type: {content_type}"),
            body: Body::Blob { sha256: sha256(input), bytes: input.len() as u64 },
        },
        token: AttemptToken::random(),
        lease_ms: 300,
        hint_ms: store.now_ms() + 300,
        gateway: "dead",
        begin: Begin::Pending,
    };
    assert!(matches!(store.submit_job(&submit).await.unwrap(), Submitted::Created { .. }));
    id
}

#[tokio::test]
async fn an_open_job_outlives_the_grace_of_its_input() {
    let site = site().await;
    let input = text('a', 100_000);
    let held = claimed_by_a_dead_gateway(&site, "outside", "held", input.as_bytes()).await;
    let ran = claimed_by_a_dead_gateway(&site, "echo", "ran", input.as_bytes()).await;
    grace_is_over(&site.redis).await;
    assert_eq!(life_ms(&site.redis, &blob_key(&held.to_string(), input.as_bytes())).await, -1);
    let job = site.gateway.runtime.read(held).await.unwrap();
    assert_eq!(job.state, JobState::Pending);
    assert!(site.gateway.runtime.input(&job).await.unwrap().body[..] == *input.as_bytes());
    assert_eq!(site.alice().ended(&ran.to_string()).await["result"]["body"], input);
}

/// Case 10. Never an empty body, never a new run.
#[tokio::test]
async fn bytes_that_are_missing_or_altered_are_an_error_by_name_and_counted() {
    let render = onejob::server::metrics_recorder().unwrap();
    let site = site_with(|setup| setup.server.metrics = Some(render)).await;
    let alice = site.alice();
    let simulated = r#"{"simulate":"size=50000"}"#;
    for (key, damage) in [("missing", None), ("emptied", Some(String::new())), ("altered", Some("x".repeat(50_000)))] {
        let id = alice.submit("print", key, simulated).await.job_id();
        alice.ended(&id).await;
        let blob = blob_keys(&site.redis).await.into_iter().find(|blob| blob.starts_with(&blob_key(&id, b"")[..25])).unwrap();
        match damage {
            None => site.redis.command::<()>(&["DEL", &blob]).await,
            Some(bytes) => site.redis.command::<()>(&["SET", &blob, &bytes]).await,
        }
        for _ in 0..2 {
            let problem = alice.submit("print", key, simulated).await.problem(500, "store-corrupt");
            assert!(problem["detail"].as_str().unwrap().contains("BADBLOB") && problem["job_id"] == id, "{problem}");
            alice.get(&format!("/v1/jobs/{id}")).await.problem(500, "store-corrupt");
        }
        assert_eq!(site.provider.ledger_of(&id).received, 1, "{key}");
    }
    let scrape = site.client("").get("/metrics").await.is(200).text();
    let counted = scrape.lines().find_map(|line| line.strip_prefix("onejob_store_errors_total{class=\"fatal\"} "));
    assert!(counted.unwrap().parse::<u64>().unwrap() >= 12, "{counted:?}");
}

/// What cannot be sent as it was asked for is not sent at all: whoever takes the job gives it back and says why.
#[tokio::test]
async fn a_job_whose_input_is_missing_is_never_run() {
    let site = site().await;
    let store = site.redis.store().await;
    let input = format!("{{\"simulate\":\"succeed\",\"page\":{}}}", text('a', 20_000));
    let id = claimed_by_a_dead_gateway(&site, "print", "k", input.as_bytes()).await;
    site.redis.command::<()>(&["DEL", &blob_key(&id.to_string(), input.as_bytes())]).await;
    let job = async || match store.read_job(id.identity()).await.unwrap() {
        Read::Found(job) => job,
        other => panic!("{other:?}"),
    };
    until("somebody has given it back", async || job().await.attempts.iter().any(|attempt| !attempt.state.is_open())).await;
    let job = job().await;
    assert_eq!((job.attempts[0].state, job.is_ended()), (AttemptState::Aborted, false));
    assert!(job.attempts[0].reason.starts_with("input: "), "{}", job.attempts[0].reason);
    assert_eq!(site.provider.ledger().received, 0);
}
