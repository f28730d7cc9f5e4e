//! Webhooks over HTTP, from the simulated provider's queue and from whoever pretends to be it.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use onejob::config::Webhook;
use onejob::job::{Class, Job, JobId};
use onejob::provider::async_http::{AsyncHttpOptions, AsyncHttpProvider};
use onejob::provider::http::HttpOptions;
use onejob::provider::simulated::{Simulated, WEBHOOK_SECRET};
use onejob::provider::webhook::{self, WebhookOptions, sign};
use onejob::provider::{Evidence, Outcome, Response};
use onejob::runtime::{Delivered, ProviderSlot, RuntimeOptions};
use onejob::store::{CancelMode, NoteAttempt, Noted, NotedEvent};
use serde_json::{Value, json};
use tokio::net::TcpSocket;

use crate::http_support::{Answer, Client, Served, Setup, route, serve_with};
use crate::provider_async::entry_with;
use crate::support::{Redis, simulated, until};

/// A shop whose provider calls back: one Redis, one queue, one gateway, and perhaps another.
struct Shop {
    redis: Redis,
    provider: Simulated,
    gateway: Served,
}

impl Shop {
    async fn open() -> Shop {
        Shop::open_with(&[]).await
    }

    async fn open_with(settings: &[(&str, &str)]) -> Shop {
        let (redis, provider) = (Redis::start().await, simulated().await);
        let gateway = gateway(&redis, &provider, settings).await;
        Shop { redis, provider, gateway }
    }

    async fn submit(&self, key: &str, behaviour: &str) -> String {
        let input = format!("{{\"simulate\":\"{behaviour}\"}}");
        self.gateway.client.with_token("alice").submit("queue", key, &input).await.job_id()
    }

    async fn job(&self, id: &str) -> Arc<Job> {
        self.gateway.runtime.read(id.parse().unwrap()).await.unwrap()
    }

    async fn ended(&self, id: &str) -> Value {
        self.gateway.client.with_token("alice").ended(id).await
    }

    /// Stops the gateway, and checks that nothing was left to do there: polls are so rare that one still waiting would be seen.
    async fn asks_no_more(&self) {
        let (began, drain) = (Instant::now(), Duration::from_secs(15));
        let drained = self.gateway.runtime.shutdown(drain).await;
        assert!(began.elapsed() < drain, "somebody still asks: {drained:?}");
        assert_eq!((drained.unknown, drained.unwritten, drained.spooled), (0, 0, 0), "{drained:?}");
    }

    /// The job's document at the provider.
    async fn at_the_provider(&self, id: &str) -> Value {
        let provider = Client::new(self.provider.addr());
        let path = format!("/jobs?key={id}-1");
        until("the provider has it", async || !provider.get(&path).await.json()["jobs"][0].is_null()).await;
        provider.get(&path).await.json()["jobs"][0].clone()
    }
}

/// A gateway whose providers call it back. Polls are rare unless the settings say otherwise.
async fn gateway(redis: &Redis, provider: &Simulated, settings: &[(&str, &str)]) -> Served {
    // The address must be known before the gateway listens there: until then this socket keeps it from everybody else.
    let reserved = TcpSocket::new_v4().unwrap();
    reserved.set_reuseaddr(true).unwrap();
    reserved.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let port = reserved.local_addr().unwrap().port();
    let public_url = format!("http://127.0.0.1:{port}");
    serve_with(redis, provider, |setup| calls_back(setup, provider, port, &public_url, settings)).await
}

fn calls_back(setup: &mut Setup, provider: &Simulated, port: u16, public_url: &str, settings: &[(&str, &str)]) {
    let rarely = r#"{ first = "30s", factor = 1.0, max = "30s" }"#;
    let mut all = vec![("poll", rarely), ("timeouts", r#"{ total = "60s" }"#)];
    all.extend_from_slice(settings);
    let mut entry = entry_with(&provider.base_url(), &all);
    entry.submit.as_mut().unwrap().body = Some("{{ with(body, webhook_url=webhook.url) }}".to_owned());
    let webhook =
        WebhookOptions { public_url: public_url.to_owned(), secret: WEBHOOK_SECRET.to_owned(), entry: Webhook::default() };
    let http = HttpOptions::from_entry(&entry, None, 1 << 20);
    let options = AsyncHttpOptions::from_entry(&entry, http, Some(webhook));
    setup.server.listen.set_port(port);
    setup.runtime =
        RuntimeOptions { lease: Duration::from_secs(3), lease_margin: Duration::from_millis(500), ..setup.runtime.clone() };
    setup.providers.push(ProviderSlot {
        name: "queue".to_owned(),
        provider: Arc::new(AsyncHttpProvider::new("queue", options).unwrap()),
        total: Duration::from_secs(60),
        in_flight_max: 100,
    });
    setup.routes.push(route("queue", Class::Exclusive, &["queue"]));
}

/// The address that the provider was given for a job's first attempt.
fn address(id: &str) -> String {
    let (public_url, secret) = (String::new(), WEBHOOK_SECRET.to_owned());
    webhook::address(&WebhookOptions { public_url, secret, entry: Webhook::default() }, "queue", id.parse().unwrap(), 1)
}

fn now_s() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "a webhook is signed with the time on everybody's wall clock")]
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

async fn deliver(client: &Client, path: &str, secret: &str, signed_s: u64, body: &str) -> Answer {
    let (time, signature) = (signed_s.to_string(), sign(secret, signed_s, body.as_bytes()));
    client.send("POST", path, &[("webhook-timestamp", &time), ("webhook-signature", &signature)], body.to_owned()).await
}

/// What the provider would say of a job that is done.
fn done(remote_id: &str, page: u32) -> String {
    json!({ "id": remote_id, "status": "completed", "result": { "page": page } }).to_string()
}

#[tokio::test]
async fn a_webhook_ends_the_job_without_a_poll() {
    let shop = Shop::open().await;
    let id = shop.submit("k", "run=100ms").await;
    let job = shop.ended(&id).await;
    assert_eq!((job["state"].as_str(), job["result"]["body"]["execution"].as_u64()), (Some("succeeded"), Some(1)));
    assert_eq!(shop.provider.ledger().executed, 1);
    shop.asks_no_more().await;
}

#[tokio::test]
async fn a_webhook_that_comes_before_the_submits_answer_wins_once() {
    let shop = Shop::open_with(&[("poll", r#"{ first = "5ms", factor = 1.0, max = "5ms" }"#)]).await;
    let ids = futures_util::future::join_all((0..20).map(|n| {
        let shop = &shop;
        async move { shop.submit(&format!("k{n}"), "webhook_first,delay=50ms").await }
    }))
    .await;
    for id in ids {
        let job = shop.ended(&id).await;
        assert_eq!((job["state"].as_str(), job["version"].as_u64()), (Some("succeeded"), Some(1)), "{job}");
        assert_eq!(job["attempts"].as_array().unwrap().len(), 1);
        assert_eq!(shop.provider.ledger_of(&id).executed, 1);
    }
    shop.asks_no_more().await;
}

#[tokio::test]
async fn a_webhook_and_a_poll_race_and_one_wins() {
    let shop = Shop::open_with(&[("poll", r#"{ first = "5ms", factor = 1.0, max = "5ms" }"#)]).await;
    let ids = futures_util::future::join_all((0..40).map(|n| {
        let shop = &shop;
        async move { shop.submit(&format!("k{n}"), "run=30ms").await }
    }))
    .await;
    for id in &ids {
        let job = shop.ended(id).await;
        assert_eq!((job["state"].as_str(), job["version"].as_u64()), (Some("succeeded"), Some(1)), "{job}");
        assert_eq!(job["events"].as_array().map_or(0, Vec::len), 0, "nothing off the happy path: {job}");
    }
    assert_eq!(shop.provider.ledger().executed, 40);
}

#[tokio::test]
async fn a_webhook_at_another_gateway_ends_the_job_and_its_poll() {
    let shop = Shop::open().await;
    let other = gateway(&shop.redis, &shop.provider, &[]).await;
    // The job is handed in by one gateway, and runs for longer than the test.
    let id = shop.submit("k", "run=60s").await;
    let remote_id = shop.at_the_provider(&id).await["id"].as_str().unwrap().to_owned();
    let answer = deliver(&other.client, &address(&id), WEBHOOK_SECRET, now_s(), &done(&remote_id, 1)).await;
    assert_eq!(answer.is(200).json()["status"], "won");
    let job = shop.ended(&id).await;
    assert_eq!(job["result"]["body"]["page"], 1);
    assert_eq!(shop.job(&id).await.completed_by, 1);
    shop.asks_no_more().await;
}

#[tokio::test]
async fn the_same_webhook_again_changes_nothing() {
    let shop = Shop::open().await;
    let id = shop.submit("k", "run=60s").await;
    let remote_id = shop.at_the_provider(&id).await["id"].as_str().unwrap().to_owned();
    let path = address(&id);
    let client = &shop.gateway.client;
    assert_eq!(deliver(client, &path, WEBHOOK_SECRET, now_s(), &done(&remote_id, 1)).await.is(200).json()["status"], "won");
    let before = shop.redis.dump().await;
    for page in [1, 2] {
        let again = deliver(client, &path, WEBHOOK_SECRET, now_s(), &done(&remote_id, page)).await;
        assert_eq!(again.is(200).json()["status"], "repeated");
    }
    let failed = json!({ "id": remote_id, "status": "failed" }).to_string();
    assert_eq!(deliver(client, &path, WEBHOOK_SECRET, now_s(), &failed).await.is(200).json()["status"], "discarded");
    assert_eq!(shop.redis.dump().await, before);
    assert_eq!(shop.ended(&id).await["result"]["body"]["page"], 1);
}

#[tokio::test]
async fn a_webhook_that_is_not_the_providers_own_is_401_and_touches_nothing() {
    let shop = Shop::open().await;
    let id = shop.submit("k", "run=60s").await;
    let remote_id = shop.at_the_provider(&id).await["id"].as_str().unwrap().to_owned();
    let other = shop.submit("other", "run=60s").await;
    let (path, client, body) = (address(&id), &shop.gateway.client, done(&remote_id, 1));
    let before = shop.redis.dump().await;
    let refused = async |answer: Answer| {
        answer.problem(401, "webhook-refused");
    };
    refused(deliver(client, &path, "another-secret-of-length", now_s(), &body).await).await;
    refused(deliver(client, &path, WEBHOOK_SECRET, now_s() - 301, &body).await).await;
    refused(deliver(client, &path, WEBHOOK_SECRET, now_s() + 400, &body).await).await;
    refused(client.send("POST", &path, &[], body.clone()).await).await;
    let bearer = [("authorization", "Bearer operator")];
    refused(client.send("POST", &path, &bearer, body.clone()).await).await;
    // Signed for one attempt, and used for another.
    let (_, code) = path.split_once('?').unwrap();
    let elsewhere = format!("/v1/webhooks/queue/{other}/1?{code}");
    refused(deliver(client, &elsewhere, WEBHOOK_SECRET, now_s(), &body).await).await;
    refused(deliver(client, path.split('?').next().unwrap(), WEBHOOK_SECRET, now_s(), &body).await).await;
    let (time, signature) = (now_s().to_string(), sign(WEBHOOK_SECRET, now_s(), body.as_bytes()));
    let headers = [("webhook-timestamp", time.as_str()), ("webhook-signature", signature.as_str())];
    refused(client.send("POST", &path, &headers, format!("{body} ")).await).await;
    let running = |dump: &std::collections::BTreeMap<String, (Vec<u8>, bool)>| dump.keys().cloned().collect::<Vec<_>>();
    assert_eq!(running(&shop.redis.dump().await), running(&before));
    assert_eq!(shop.job(&id).await.state.as_str(), "running");
}

#[tokio::test]
async fn what_is_not_there_is_404() {
    let shop = Shop::open().await;
    let absent = "0190b0c0-0000-8000-8000-000000000001";
    let client = &shop.gateway.client;
    deliver(client, &address(absent), WEBHOOK_SECRET, now_s(), "{}").await.problem(404, "job-unknown");
    let id = shop.submit("k", "run=60s").await;
    for path in [
        format!("/v1/webhooks/patient/{id}/1?code=00"),
        format!("/v1/webhooks/nobody/{id}/1?code=00"),
        format!("/v1/webhooks/{}/{id}/1", "x".repeat(4000)),
        "/v1/webhooks/queue/x/1".to_owned(),
        format!("/v1/webhooks/queue/{id}/x"),
        format!("/v1/webhooks/queue/%ff/{id}"),
    ] {
        deliver(client, &path, WEBHOOK_SECRET, now_s(), "{}").await.problem(404, "job-unknown");
    }
}

#[tokio::test]
async fn a_webhook_that_settles_nothing_is_ignored() {
    let shop = Shop::open().await;
    let id = shop.submit("k", "run=60s").await;
    let remote_id = shop.at_the_provider(&id).await["id"].as_str().unwrap().to_owned();
    let (path, client) = (address(&id), &shop.gateway.client);
    for body in [
        json!({ "id": remote_id, "status": "running" }).to_string(),
        json!({ "id": remote_id, "status": "celebrating" }).to_string(),
        json!({ "id": remote_id, "status": "canceled" }).to_string(),
        json!({ "id": remote_id, "status": "completed" }).to_string(),
        "not json".to_owned(),
        String::new(),
    ] {
        let answer = deliver(client, &path, WEBHOOK_SECRET, now_s(), &body).await;
        assert_eq!(answer.is(200).json()["status"], "ignored", "{body}");
    }
    assert_eq!(shop.job(&id).await.state.as_str(), "running");
}

#[tokio::test]
async fn a_failure_that_the_provider_tells_is_the_jobs_with_its_words() {
    let shop = Shop::open().await;
    let id = shop.submit("k", "fail,run=20ms").await;
    let job = shop.ended(&id).await;
    assert_eq!(job["state"], "failed", "{job}");
    let reason = job["reason"].as_str().unwrap();
    assert!(reason.contains("rejected 422: the provider says failed: the paper is jammed"), "{reason}");
    assert_eq!(shop.provider.ledger().executed, 0);
}

#[tokio::test]
async fn a_webhook_settles_an_attempt_that_is_unknown() {
    let shop = Shop::open_with(&[("timeouts", r#"{ total = "300ms" }"#)]).await;
    // The submit's answer never comes; by then the attempt is unknown.
    let id = shop.submit("k", "run=1500ms,hang").await;
    let client = shop.gateway.client.with_token("alice");
    client.in_state(&id, "unknown").await;
    let job = client.in_state(&id, "succeeded").await;
    assert_eq!(job["events"].as_array().unwrap().last().unwrap()["event"], "late_success", "{job}");
    assert_eq!(shop.provider.ledger_of(&id).executed, 1);
}

/// Whatever was told by a webhook may be about the call before. The next question is about what is so now.
#[tokio::test]
async fn a_failure_told_of_an_attempt_that_was_sent_again_waits_for_the_next_question() {
    let shop = Shop::open_with(&[("timeouts", r#"{ total = "300ms" }"#)]).await;
    let id = shop.submit("k", "fail,run=4s,hang").await;
    let client = shop.gateway.client.with_token("alice");
    let remote_id = shop.at_the_provider(&id).await["id"].as_str().unwrap().to_owned();
    client.in_state(&id, "unknown").await;
    let (store, job) = (shop.redis.store().await, shop.job(&id).await);
    let event = Some(NotedEvent { event: Noted::Replayed, actor: "onejob/reconcile", detail: "" });
    let token = job.attempts[0].token;
    store.note_attempt(&NoteAttempt { job: job.id, number: 1, token, remote_id: "", model: "", event }).await.unwrap();
    let failed = json!({ "id": remote_id, "status": "failed" }).to_string();
    let told = async || deliver(&shop.gateway.client, &address(&id), WEBHOOK_SECRET, now_s(), &failed).await;
    assert_eq!(told().await.is(200).json()["status"], "discarded");
    assert_eq!(shop.job(&id).await.state.as_str(), "unknown");
    let job = client.in_state(&id, "failed").await;
    assert!(job["reason"].as_str().unwrap().contains("the paper is jammed"), "{job}");
    assert_eq!(job["attempts"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn evidence_from_elsewhere_is_recorded_as_the_attempts_own() {
    let shop = Shop::open().await;
    let runtime = &shop.gateway.runtime;
    let id: JobId = shop.submit("k", "run=60s").await.parse().unwrap();
    for nothing in [
        Evidence::StillRunning,
        Evidence::NotFound,
        Evidence::Expired,
        Evidence::NoAnswer { reason: "it is closed".to_owned() },
        Evidence::Settled(Outcome::Unknown { reason: "nobody knows".to_owned() }),
    ] {
        assert_eq!(runtime.delivered(id, 1, nothing).await.unwrap(), Delivered::Ignored);
    }
    // A body that has a blob of its own.
    let response = Response { status: 200, headers: Vec::new(), body: vec![b'x'; 20_000].into() };
    let outcome = Outcome::Succeeded { response: response.clone(), remote_id: None, model: Some("m".to_owned()) };
    assert_eq!(runtime.delivered(id, 1, Evidence::Settled(outcome)).await.unwrap(), Delivered::Won);
    let job = runtime.read(id).await.unwrap();
    assert_eq!((job.attempts[0].model.as_str(), job.state.as_str()), ("m", "succeeded"));
    assert_eq!(runtime.result(&job).await.unwrap().unwrap().body, response.body);
    until("its blob lives as long as the job", async || {
        let keys = shop.redis.keys().await;
        let blob = keys.iter().find(|key| key.contains(":b:")).expect("a blob");
        shop.redis.command::<i64>(&["PTTL", blob]).await > 0
    })
    .await;
    runtime.delivered(id, 2, Evidence::StillRunning).await.unwrap_err();
}

/// Nobody wants it any more, and it was paid for: its provider's entry says where its answers tell for how much.
#[tokio::test]
async fn what_a_discarded_success_cost_is_counted_when_a_webhook_brings_it() {
    let recorder: &'static _ = Box::leak(Box::new(metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder()));
    let _counting = metrics::set_default_local_recorder(recorder);
    let shop = Shop::open_with(&[("cost", "/page")]).await;
    let id = shop.submit("k", "run=60s").await;
    let remote_id = shop.at_the_provider(&id).await["id"].as_str().unwrap().to_owned();
    let runtime = &shop.gateway.runtime;
    runtime.cancel(id.parse().unwrap(), "request-1", CancelMode::Force, "ada", "at once").await.unwrap();
    let answer = deliver(&shop.gateway.client, &address(&id), WEBHOOK_SECRET, now_s(), &done(&remote_id, 7)).await;
    assert_eq!(answer.is(200).json()["status"], "discarded");
    let counted = "onejob_discarded_cost_total{provider=\"queue\"} 7";
    until(counted, async || recorder.handle().render().contains(counted)).await;
}
