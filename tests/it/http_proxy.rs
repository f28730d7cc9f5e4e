//! The drop-in base URL: the provider's own answer, byte for byte, once for each key.

use std::time::Duration;

use onejob::job::{Key, Owner};
use onejob::runtime::ProviderProtection;

use crate::http_support::{PROVIDER_TOKEN, Site};
use crate::support::until;

const CHAT: &str = "/proxy/chat/v1/chat/completions";
const JSON: (&str, &str) = ("content-type", "application/json");

fn key(key: &str) -> (&str, &str) {
    ("idempotency-key", key)
}

#[tokio::test]
async fn the_providers_answer_is_replayed_byte_for_byte() {
    let site = Site::start().await;
    let alice = site.alice();
    let body = r#"{"model":"x","messages":[]}"#;
    let first = alice.send("POST", CHAT, &[JSON, key("k")], body).await.is(200);
    assert_eq!(first.json()["object"], "chat.completion");
    assert_eq!((first.header("idempotency-replayed"), first.header("onejob-provider")), ("false", "patient"));
    let id = first.header("onejob-job-id").to_owned();
    assert!(!first.header("idempotency-expires").is_empty());
    let again = alice.send("POST", CHAT, &[JSON, key("k")], body).await.is(200);
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!((&again.body, again.header("content-type")), (&first.body, first.header("content-type")));
    assert_eq!(again.header("onejob-job-id"), id);
    let ledger = site.provider.ledger();
    assert_eq!((ledger.received, ledger.executed), (1, 1));
    assert_eq!((ledger.entries[0].path.as_str(), ledger.entries[0].method.as_str()), ("/v1/chat/completions", "POST"));
    assert_eq!(ledger.entries[0].job_id, id);
}

#[tokio::test]
async fn path_query_and_method_reach_the_provider_as_they_were_sent() {
    let site = Site::start().await;
    let alice = site.alice();
    for (place, (method, target)) in
        [("POST", "/v1/x?b=2&a=%2F%20"), ("PUT", "/a%20b/c"), ("PATCH", "/"), ("DELETE", "/v1/files/7")].into_iter().enumerate()
    {
        let key = format!("k{place}");
        alice.send(method, &format!("/proxy/chat{target}"), &[("idempotency-key", &key)], "raw").await.is(200);
        let entry = site.provider.ledger().entries[place].clone();
        assert_eq!((entry.method.as_str(), entry.path.as_str()), (method, target));
    }
}

/// Case 5: each part of a request makes it another one.
#[tokio::test]
async fn another_method_path_query_or_type_under_a_key_is_a_conflict() {
    let site = Site::start().await;
    let alice = site.alice();
    alice.send("POST", CHAT, &[JSON, key("k")], "{}").await.is(200);
    let before = site.redis.dump().await;
    for (method, path, content_type, body) in [
        ("PUT", CHAT, "application/json", "{}"),
        ("POST", "/proxy/chat/v1/other", "application/json", "{}"),
        ("POST", "/proxy/chat/v1/chat/completions?a=1", "application/json", "{}"),
        ("POST", "/proxy/print/v1/chat/completions", "application/json", "{}"),
        ("POST", CHAT, "text/plain", "{}"),
        ("POST", CHAT, "application/json", "{\"a\":1}"),
    ] {
        let answer = alice.send(method, path, &[("content-type", content_type), key("k")], body).await;
        answer.problem(409, "key-conflict");
    }
    assert_eq!(site.redis.dump().await, before);
    assert_eq!(site.provider.ledger().received, 1);
}

#[tokio::test]
async fn what_may_change_something_needs_a_key() {
    let site = Site::start().await;
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        site.alice().send(method, CHAT, &[JSON], "{}").await.problem(400, "idempotency-key-missing");
    }
    assert_eq!(site.provider.ledger().received, 0);
    assert!(site.redis.dump().await.is_empty());
}

#[tokio::test]
async fn safe_requests_pass_through_without_a_job() {
    let site = Site::start().await;
    let alice = site.alice();
    let models = alice.get("/proxy/chat/v1/models?limit=1").await.is(200);
    assert_eq!(models.json()["path"], "/v1/models?limit=1");
    let head = alice.send("HEAD", "/proxy/chat/v1/models", &[], "").await.is(200);
    assert!(head.body.is_empty());
    assert!(site.redis.dump().await.is_empty());
    alice.get("/proxy/nowhere/v1/models").await.problem(404, "route-unknown");
    alice.get("/proxy/outside/v1/models").await.problem(422, "request-unrenderable");
    alice.get("/proxy/silent/v1/models").await.problem(504, "provider-timeout");
    site.provider.set_behaviour("refuse").unwrap();
    until("the provider refuses connections", async || tokio::net::TcpStream::connect(site.provider.addr()).await.is_err()).await;
    alice.get("/proxy/chat/v1/models").await.problem(502, "provider-unreachable");
}

/// Nobody leaves the base URL, however it is written.
#[tokio::test]
async fn a_path_that_leads_out_of_the_base_is_refused() {
    let site = Site::start().await;
    for path in ["/proxy/chat/%2e%2e/x", "/proxy/chat/x/%252e%252e/y", "/proxy/chat//evil.example/"] {
        site.alice().send("POST", path, &[key("k")], "").await.problem(422, "request-unrenderable");
    }
    assert!(site.redis.dump().await.is_empty());
}

/// The owner's credential stops here, though the configuration asks for it; the provider's own comes from the configuration.
#[tokio::test]
async fn authorization_and_cookies_are_never_forwarded() {
    let site = Site::start().await;
    let headers = [JSON, key("k"), ("cookie", "session=1"), ("onejob-simulate", "refuse_status=400,echo_credential")];
    let answer = site.alice().send("POST", CHAT, &headers, "{}").await.is(400);
    // The configured header got there: it made the provider refuse. What it echoes is its own credential, hidden.
    assert_eq!(answer.json()["authorization"], "Bearer [hidden]");
    assert!(!answer.text().contains("alice") && !answer.text().contains(PROVIDER_TOKEN));
    assert!(!format!("{:?}", answer.headers).contains(PROVIDER_TOKEN));
    // Nor are they kept with the job.
    let record = site.redis.dump().await.pop_first().unwrap().1.0;
    let record = String::from_utf8_lossy(&record).into_owned();
    assert!(record.contains("onejob-simulate: refuse_status=400"), "{record}");
    assert!(!record.contains("Bearer alice") && !record.contains("session=1"), "{record}");
    // A route that names no headers passes none on.
    let other = [JSON, key("k2"), ("onejob-simulate", "refuse_status=400")];
    site.alice().send("POST", "/proxy/print/x", &other, "{}").await.is(200);
}

#[tokio::test]
async fn a_header_of_this_connection_is_not_forwarded() {
    let site = Site::start().await;
    let headers = [key("k"), ("connection", "onejob-simulate"), ("onejob-simulate", "refuse_status=400")];
    site.alice().send("POST", CHAT, &headers, "{}").await.is(200);
}

#[tokio::test]
async fn a_refusal_is_replayed_as_the_provider_said_it_and_is_not_to_be_retried() {
    let site = Site::start().await;
    let alice = site.alice();
    let body = r#"{"simulate":"jam"}"#;
    let first = alice.send("POST", CHAT, &[JSON, key("k")], body).await.is(422);
    assert_eq!(first.json()["error"]["type"], "jam");
    let again = alice.send("POST", CHAT, &[JSON, key("k")], body).await.is(422);
    assert_eq!(again.body, first.body);
    for (answer, replayed) in [(&first, "false"), (&again, "true")] {
        assert_eq!((answer.header("x-should-retry"), answer.header("idempotency-replayed")), ("false", replayed));
        assert_eq!(answer.header("content-type"), "application/json");
    }
    assert_eq!(site.provider.ledger().received, 1);
}

#[tokio::test]
async fn an_unknown_attempt_is_504_at_once_and_the_same_key_answers_once_it_is_known() {
    let site = Site::start().await;
    let alice = site.alice();
    let body = r#"{"simulate":"drop"}"#;
    let first = alice.send("POST", "/proxy/chat/x", &[JSON, key("k")], body).await;
    let problem = first.problem(504, "attempt-unknown");
    assert_eq!((problem["source"].clone(), problem["retryable"].clone()), ("provider".into(), false.into()));
    assert_eq!(first.header("idempotency-replayed"), "false");
    let id = first.header("onejob-job-id").to_owned();
    assert_eq!(problem["job_id"], id);
    // The SDK that retries all the same is answered the same, and nothing runs.
    let again = alice.send("POST", "/proxy/chat/x", &[JSON, key("k")], body).await;
    assert_eq!(again.problem(504, "attempt-unknown")["job_id"], id);
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(site.provider.ledger().received, 1);

    let resolve = r#"{"outcome":"succeeded","reason":"seen","result":{"by":"hand"},"status":201}"#;
    site.operator().post(&format!("/v1/jobs/{id}/attempts/1/resolve"), resolve).await.is(200);
    let known = alice.send("POST", "/proxy/chat/x", &[JSON, key("k")], body).await.is(201);
    assert_eq!(known.text(), r#"{"by":"hand"}"#);
}

#[tokio::test]
async fn a_job_that_still_runs_is_504_and_the_same_key_attaches() {
    let site = Site::with(|options| options.proxy_wait = Duration::from_millis(100)).await;
    let alice = site.alice();
    let body = r#"{"simulate":"delay=1s"}"#;
    let first = alice.send("POST", "/proxy/chat/x", &[JSON, key("k")], body).await;
    let problem = first.problem(504, "still-running");
    assert_eq!((problem["state"].clone(), problem["retryable"].clone()), ("running".into(), true.into()));
    alice.ended(first.header("onejob-job-id")).await;
    alice.send("POST", "/proxy/chat/x", &[JSON, key("k")], body).await.is(200);
    assert_eq!(site.provider.ledger().received, 1);
}

#[tokio::test]
async fn endings_without_an_answer_have_their_types() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    // Canceled, while the proxied request waits.
    let waiting = {
        let alice = alice.clone();
        tokio::spawn(async move { alice.send("POST", "/proxy/outside/x", &[key("a")], "").await })
    };
    until("the job is there", async || alice.send("POST", "/v1/cancel", &[key("a")], "").await.status == 200).await;
    waiting.await.unwrap().problem(409, "job-canceled");
    // Failed without a refusal.
    let id = alice.submit("outside", "b", "{}").await.job_id();
    let (_, token) = operator.begin_running(&id, "laser").await;
    let failed = format!(r#"{{"token":"{token}","outcome":"failed","reason":"jam in tray 2"}}"#);
    operator.post(&format!("/v1/jobs/{id}/attempts/1/finish"), &failed).await.is(200);
    // The proxy's own request under that key is another one; so the job is made by the proxy.
    let path = "/proxy/outside/y";
    let waiting = {
        let alice = alice.clone();
        tokio::spawn(async move { alice.send("POST", path, &[key("c")], "").await })
    };
    let mut id = String::new();
    until("the job is listed", async || {
        let list = operator.get("/v1/jobs?state=open").await.is(200).json();
        id = list["jobs"][0]["id"].as_str().unwrap_or_default().to_owned();
        !id.is_empty()
    })
    .await;
    let (_, token) = operator.begin_running(&id, "laser").await;
    let failed = format!(r#"{{"token":"{token}","outcome":"failed","reason":"jam in tray 2"}}"#);
    operator.post(&format!("/v1/jobs/{id}/attempts/1/finish"), &failed).await.is(200);
    let problem = waiting.await.unwrap().problem(502, "job-failed");
    assert!(problem["detail"].as_str().unwrap().contains("jam in tray 2"), "{problem}");
    assert_eq!(problem["source"], "provider");
    // Nobody will ever know.
    let unknown = alice.send("POST", "/proxy/chat/z", &[JSON, key("d")], r#"{"simulate":"drop"}"#).await;
    let id = unknown.header("onejob-job-id").to_owned();
    let abandon = r#"{"outcome":"abandoned","reason":"lost"}"#;
    operator.post(&format!("/v1/jobs/{id}/attempts/1/resolve"), abandon).await.is(200);
    let again = alice.send("POST", "/proxy/chat/z", &[JSON, key("d")], r#"{"simulate":"drop"}"#).await;
    again.problem(409, "job-indeterminate");
}

/// Case 51, by phase: before the head, waiting for its turn, in the middle of the answer. There is room for one call at a time, here
/// and in the fleet: what a call held has come back when the next one goes in.
#[tokio::test]
async fn a_caller_that_goes_away_in_any_phase_stops_nothing_and_keeps_no_room() {
    let site = Site::with_setup(|setup| {
        setup.providers[0].in_flight_max = 1;
        let one = ProviderProtection { fleet_in_flight: Some(1), ..ProviderProtection::default() };
        setup.runtime.protection.providers.insert("patient".to_owned(), one);
    })
    .await;
    let alice = site.alice();
    let body = |behaviour: &str| format!(r#"{{"model":"x","messages":[],"stream":true,"simulate":"{behaviour}"}}"#);
    let opening = |key: &'static str, behaviour: &str| {
        let (alice, body) = (alice.clone(), body(behaviour));
        tokio::spawn(async move { alice.open(CHAT, key, &body).await })
    };
    let job = async |key: &str| {
        let found = site.gateway.runtime.find(&Owner::new("alice").unwrap(), &Key::new(key).unwrap()).await;
        found.ok().map(|job| job.id.to_string())
    };
    let headless = opening("head", "queue=1s");
    until("it is at the provider", async || site.provider.ledger().received == 1).await;
    headless.abort();
    let waiting = opening("turn", "chunks=3");
    until("it is claimed", async || job("turn").await.is_some()).await;
    waiting.abort();
    let mut reader = alice.open(CHAT, "middle", &body("chunks=4,pause=200ms")).await;
    assert!(reader.reads("data: ").await);
    drop(reader);
    for key in ["head", "turn", "middle"] {
        let id = job(key).await.unwrap();
        assert_eq!(alice.ended(&id).await["state"], "succeeded", "{key}");
    }
    let taken = async || site.redis.command::<u64>(&["ZCARD", "oj:permits:{patient}"]).await;
    until("the fleet's permit is back", async || taken().await == 0).await;
    alice.send("POST", CHAT, &[JSON, key("next")], r#"{"model":"x","messages":[]}"#).await.is(200);
    let ledger = site.provider.ledger();
    assert_eq!((ledger.received, ledger.executed), (4, 4));
}
