//! The `async_http` adapter and the questions about attempts, against the simulated provider's queue: executions are counted there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onejob::config::{Cancel, Config, Environment, Means, Missing, Poll, ProviderEntry, Sources, Status, Timeouts};
use onejob::job::JobId;
use onejob::provider::async_http::{AsyncHttpOptions, AsyncHttpProvider};
use onejob::provider::http::{HttpOptions, HttpProvider};
use onejob::provider::simulated::{Keys, Simulated, SimulatedOptions};
use onejob::provider::{Call, CancelSemantics, Evidence, Fence, Outcome, Provider, Request, Response, Sent, Telling, Told};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::support::{simulated, until};

const JOB: &str = "0190b0c0-0000-8000-8000-000000000001";
const SECRET: &str = "sk-live/0123456789";

/// The entry that the preset `job-queue` makes, at a base URL, quick enough for tests.
pub fn entry(base_url: &str) -> ProviderEntry {
    entry_with(base_url, &[])
}

pub fn entry_with(base_url: &str, settings: &[(&str, &str)]) -> ProviderEntry {
    let mut overrides = vec![
        ("provider.queue.preset".to_owned(), "job-queue".to_owned()),
        ("provider.queue.base_url".to_owned(), base_url.to_owned()),
        ("provider.queue.timeouts".to_owned(), r#"{ total = "20s" }"#.to_owned()),
        ("provider.queue.poll".to_owned(), r#"{ first = "10ms", factor = 1.5, max = "100ms" }"#.to_owned()),
        ("provider.queue.cancel.settle".to_owned(), "1s".to_owned()),
    ];
    overrides.extend(settings.iter().map(|(key, value)| (format!("provider.queue.{key}"), (*value).to_owned())));
    let sources = Sources { file: None, overrides, environment: Environment::Given(BTreeMap::new()) };
    Config::load(sources).unwrap().provider.remove("queue").unwrap()
}

fn of_entry(entry: &ProviderEntry) -> AsyncHttpProvider {
    let http = HttpOptions::from_entry(entry, Some(SECRET.to_owned()), 1 << 20);
    AsyncHttpProvider::new("queue", AsyncHttpOptions::from_entry(entry, http, None)).unwrap()
}

fn provider(base_url: &str) -> AsyncHttpProvider {
    of_entry(&entry(base_url))
}

fn request(body: &str) -> Request {
    Request {
        method: String::new(),
        target: String::new(),
        content_type: "application/json".to_owned(),
        headers: Vec::new(),
        body: Arc::from(body.as_bytes()),
    }
}

pub fn call(provider: &dyn Provider, behaviour: &str) -> Call {
    let mut rendered = provider.render(&request(r#"{"input":{"n":9007199254740993}}"#)).unwrap();
    rendered.headers.push(("onejob-simulate".to_owned(), behaviour.to_owned()));
    Call {
        rendered,
        job_id: Some(JOB.parse::<JobId>().unwrap()),
        attempt: 1,
        idempotency_key: format!("{JOB}-1"),
        traceparent: None,
        fence: Fence::until(u64::MAX),
        deadline: Instant::now() + Duration::from_secs(20),
        told: Telling::nobody(),
    }
}

fn within(call: Call, time: Duration) -> Call {
    Call { deadline: Instant::now() + time, ..call }
}

pub fn sent(base_url: &str, remote_id: &str, age: Duration) -> Sent {
    Sent {
        job_id: JOB.parse().unwrap(),
        attempt: 1,
        url: format!("{base_url}/jobs"),
        remote_id: remote_id.to_owned(),
        idempotency_key: format!("{JOB}-1"),
        age,
    }
}

/// Hands a job in that nobody waits for; returns the provider's name for it.
async fn hand_in(simulated: &Simulated, behaviour: &str) -> String {
    let provider = provider(&simulated.base_url());
    let (telling, mut heard) = Telling::channel();
    let call = Call { told: telling, ..within(call(&provider, behaviour), Duration::from_secs(10)) };
    let asking = tokio::spawn(async move { provider.submit(call).await });
    let Some(Told::Accepted { remote_id }) = heard.recv().await else { panic!("it was not accepted") };
    drop(heard);
    asking.await.unwrap();
    remote_id
}

/// Hands a job in and waits until it is done; returns the provider's name for it.
async fn hand_in_and_wait(simulated: &Simulated) -> String {
    let id = hand_in(simulated, "succeed").await;
    let base_url = simulated.base_url();
    let provider = provider(&base_url);
    until("it is done", async || provider.status(sent(&base_url, &id, Duration::ZERO)).await != Evidence::StillRunning).await;
    id
}

#[track_caller]
pub fn succeeded(outcome: &Outcome) -> (&Response, &str) {
    match outcome {
        Outcome::Succeeded { response, remote_id, .. } => (response, remote_id.as_deref().unwrap_or_default()),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_unknown(outcome: &Outcome, words: &str) {
    assert!(matches!(outcome, Outcome::Unknown { reason } if reason.contains(words)), "{outcome:?}");
}

#[track_caller]
fn assert_no_answer(evidence: &Evidence, words: &str) {
    assert!(matches!(evidence, Evidence::NoAnswer { reason } if reason.contains(words)), "{evidence:?}");
}

pub fn json(response: &Response) -> Value {
    serde_json::from_slice(&response.body).unwrap()
}

/// A provider of bare sockets: what it answers, by the number of the request from 1 and its first line. It keeps what it was sent.
pub async fn scripted<A>(answer: A) -> (String, Arc<std::sync::Mutex<Vec<String>>>)
where
    A: Fn(usize, &str) -> (u16, String) + Send + 'static,
{
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let base_url = format!("http://{}", listener.local_addr().unwrap());
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let kept = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut bytes = Vec::new();
            let text = loop {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                if let Some((head, body)) = text.split_once("\r\n\r\n") {
                    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                    if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
                        break text;
                    }
                }
                if !matches!(stream.read_buf(&mut bytes).await, Ok(1..)) {
                    break text;
                }
            };
            let number = {
                let mut kept = kept.lock().unwrap();
                kept.push(text.clone());
                kept.len()
            };
            let (status, body) = answer(number, text.lines().next().unwrap_or_default());
            let length = body.len();
            let head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-type: application/json\r\n");
            let _ = stream.write_all(format!("{head}content-length: {length}\r\n\r\n{body}").as_bytes()).await;
        }
    });
    (base_url, seen)
}

#[tokio::test]
async fn work_is_handed_in_once_told_at_once_and_asked_about_until_it_is_done() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let (telling, mut heard) = Telling::channel();
    let call = Call { told: telling, ..call(&provider, "run=200ms") };
    let outcome = tokio::spawn(async move { provider.submit(call).await });
    let Some(Told::Accepted { remote_id }) = heard.recv().await else { panic!("it was not accepted") };
    assert!(!outcome.is_finished(), "it was told when the work was taken on, not at its end");
    let outcome = outcome.await.unwrap();
    let (response, named) = succeeded(&outcome);
    assert_eq!((named, json(response)["execution"].as_u64()), (remote_id.as_str(), Some(1)));
    let ledger = simulated.ledger();
    assert_eq!((ledger.received, ledger.executed), (1, 1));
    assert_eq!(ledger.entries[0].idempotency_key, format!("{JOB}-1"), "what it can be found by");
}

#[tokio::test]
async fn an_id_that_is_lost_is_unknown_and_the_work_is_done_once() {
    for (behaviour, words) in
        [("drop", "reset"), ("no_id", "the id is lost"), ("half", "truncated"), ("status=500", "status 500")]
    {
        let simulated = simulated().await;
        let provider = provider(&simulated.base_url());
        assert_unknown(&provider.submit(call(&provider, behaviour)).await, words);
        // Our key still leads to it.
        let asked = async || provider.find(sent(&simulated.base_url(), "", Duration::from_secs(1))).await;
        until("it is done", async || asked().await != Evidence::StillRunning).await;
        let evidence = asked().await;
        let Evidence::Settled(outcome) = &evidence else { panic!("{behaviour}: {evidence:?}") };
        assert_eq!(json(succeeded(outcome).0)["execution"].as_u64(), Some(1));
        assert_eq!(simulated.ledger().executed, 1, "{behaviour}");
    }
}

#[tokio::test]
async fn an_id_that_cannot_be_believed_is_lost() {
    for id in ["\"\"", "null", "[7]", "{}", "\"a\\nb\"", &format!("{:?}", "x".repeat(513))] {
        let answer = format!("{{\"id\":{id},\"status\":\"queued\"}}");
        let (base_url, seen) = scripted(move |_, _| (202, answer.clone())).await;
        let provider = provider(&base_url);
        assert_unknown(&provider.submit(call(&provider, "succeed")).await, "the id is lost");
        assert_eq!(seen.lock().unwrap().len(), 1, "{id}");
    }
}

#[tokio::test]
async fn a_refused_submit_is_a_definite_failure() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let outcome = provider.submit(call(&provider, "refuse_status=422")).await;
    assert!(matches!(outcome, Outcome::Rejected { .. }), "{outcome:?}");
    assert_eq!(simulated.ledger().executed, 0);
}

#[tokio::test]
async fn work_that_failed_is_rejected_with_the_providers_words() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let outcome = provider.submit(call(&provider, "fail")).await;
    let Outcome::Rejected { reason, response, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason, "the provider says failed: the paper is jammed; nothing was printed");
    assert_eq!((response.status, json(&response)["status"].as_str()), (422, Some("failed")));
}

#[tokio::test]
async fn time_that_runs_out_while_it_works_is_unknown() {
    let simulated = simulated().await;
    let provider = provider(&simulated.base_url());
    let outcome = provider.submit(within(call(&provider, "run=30s"), Duration::from_millis(300))).await;
    assert_unknown(&outcome, "timeout: the call's time is over; the last word: still running");
}

#[tokio::test]
async fn polls_that_fail_change_nothing() {
    let (base_url, seen) = scripted(|number, _| match number {
        1 => (202, r#"{"id":"7","status":"queued"}"#.to_owned()),
        2 => (500, "{}".to_owned()),
        3 => (404, "{}".to_owned()),
        4 => (200, "<html>".to_owned()),
        5 => (200, r#"{"id":"8","status":"completed","result":1}"#.to_owned()),
        6 => (429, "{}".to_owned()),
        7 => (200, r#"{"id":"7","status":"completed"}"#.to_owned()),
        _ => (200, r#"{"id":"7","status":"completed","result":{"page":1}}"#.to_owned()),
    })
    .await;
    let provider = provider(&base_url);
    let outcome = provider.submit(call(&provider, "succeed")).await;
    assert_eq!(&*succeeded(&outcome).0.body, br#"{"page":1}"#);
    let posts = seen.lock().unwrap().iter().filter(|request| request.starts_with("POST")).count();
    assert_eq!(posts, 1, "it was handed in once");
}

/// At 50, 150, 350 ms and every 200 ms from then on; a busy machine asks less often, never more.
#[tokio::test]
async fn the_pause_between_two_polls_grows_to_its_limit() {
    let (base_url, seen) = scripted(|_, _| (202, r#"{"id":"7","status":"running"}"#.to_owned())).await;
    let poll = [("poll", r#"{ first = "50ms", factor = 2.0, max = "200ms" }"#)];
    let provider = of_entry(&entry_with(&base_url, &poll));
    let outcome = provider.submit(within(call(&provider, "succeed"), Duration::from_millis(1500))).await;
    assert_unknown(&outcome, "timeout: the call's time is over; the last word: still running");
    let polls = seen.lock().unwrap().len() - 1;
    assert!((2..=8).contains(&polls), "{polls}");
}

/// Without its limit the fifth pause would be of 100 seconds, and the call would be over by then.
#[tokio::test]
async fn the_pause_between_two_polls_is_no_longer_than_its_limit() {
    let (base_url, seen) = scripted(|number, _| match number {
        1..6 => (202, r#"{"id":"7","status":"running"}"#.to_owned()),
        _ => (200, r#"{"id":"7","status":"completed","result":{"page":1}}"#.to_owned()),
    })
    .await;
    let provider = of_entry(&entry_with(&base_url, &[("poll", r#"{ first = "10ms", factor = 10.0, max = "20ms" }"#)]));
    let outcome = provider.submit(within(call(&provider, "succeed"), Duration::from_secs(60))).await;
    assert_eq!(&*succeeded(&outcome).0.body, br#"{"page":1}"#);
    assert_eq!(seen.lock().unwrap().len(), 6);
}

#[tokio::test]
async fn a_word_that_is_not_mapped_is_no_answer_and_never_a_guess() {
    let simulated = simulated().await;
    let base_url = simulated.base_url();
    let provider = provider(&base_url);
    let outcome = provider.submit(within(call(&provider, "report=COMPLETED"), Duration::from_millis(300))).await;
    assert_unknown(&outcome, "the state \"COMPLETED\" is not in status.states");
    let id = hand_in(&simulated, "report=COMPLETED").await;
    assert_no_answer(&provider.status(sent(&base_url, &id, Duration::ZERO)).await, "\"COMPLETED\"");
}

#[tokio::test]
async fn a_cancel_that_is_acknowledged_and_not_kept_ends_as_the_success_that_it_was() {
    let simulated = simulated().await;
    let base_url = simulated.base_url();
    let asking = Arc::new(provider(&base_url));
    let (telling, mut heard) = Telling::channel();
    let call = Call { told: telling, ..call(&*asking, "run=600ms,stubborn") };
    let running = tokio::spawn({
        let asking = Arc::clone(&asking);
        async move { asking.submit(call).await }
    });
    let Some(Told::Accepted { remote_id }) = heard.recv().await else { panic!("it was not accepted") };
    until("it runs", async || simulated.ledger().executed == 1).await;
    assert_eq!(asking.cancel(sent(&base_url, &remote_id, Duration::ZERO)).await, Evidence::Canceled);
    // "canceled" may still turn into a result until `cancel.settle` is over.
    let outcome = running.await.unwrap();
    assert_eq!(json(succeeded(&outcome).0)["execution"].as_u64(), Some(1));
    assert_eq!(simulated.ledger().executed, 1);
}

#[tokio::test]
async fn a_cancel_that_is_kept_ends_as_canceled_once_it_has_settled() {
    let simulated = simulated().await;
    let base_url = simulated.base_url();
    let asking = Arc::new(provider(&base_url));
    let (telling, mut heard) = Telling::channel();
    let call = Call { told: telling, ..call(&*asking, "queue=30s") };
    let running = tokio::spawn({
        let asking = Arc::clone(&asking);
        async move { asking.submit(call).await }
    });
    let Some(Told::Accepted { remote_id }) = heard.recv().await else { panic!("it was not accepted") };
    assert_eq!(asking.cancel(sent(&base_url, &remote_id, Duration::ZERO)).await, Evidence::Canceled);
    let canceled = Instant::now();
    let outcome = running.await.unwrap();
    assert!(matches!(&outcome, Outcome::Rejected { reason, .. } if reason.contains("canceled")), "{outcome:?}");
    assert!(canceled.elapsed() >= Duration::from_millis(900), "not before it had settled: {:?}", canceled.elapsed());
    assert_eq!(simulated.ledger().executed, 0);
}

#[tokio::test]
async fn an_id_that_leads_elsewhere_is_never_asked_for() {
    let simulated = simulated().await;
    let base_url = simulated.base_url();
    let provider = provider(&base_url);
    let outcome = provider.submit(call(&provider, "hostile_id,run=30s")).await;
    assert_unknown(&outcome, "it cannot be asked about");
    for hostile in ["..", ".", "../ledger", "..%2fledger", "%2e%2e", "a/../../ledger", "\\..\\x", "..;x=1", "a\nb"] {
        for asked in [
            provider.status(sent(&base_url, hostile, Duration::ZERO)).await,
            provider.cancel(sent(&base_url, hostile, Duration::ZERO)).await,
        ] {
            assert_no_answer(&asked, "");
        }
    }
    let (base_url, seen) = scripted(|_, _| (404, "{}".to_owned())).await;
    let provider = self::provider(&base_url);
    for strange in ["a/b", "x?key=1", "x#y", "http://b.example/", "\u{e9}"] {
        provider.status(sent(&base_url, strange, Duration::ZERO)).await;
    }
    let seen = seen.lock().unwrap().clone();
    let targets: Vec<_> = seen.iter().map(|request| request.split(' ').nth(1).unwrap()).collect();
    let expected = ["/jobs/a%2Fb", "/jobs/x%3Fkey%3D1", "/jobs/x%23y", "/jobs/http%3A%2F%2Fb.example%2F", "/jobs/%C3%A9"];
    assert_eq!(targets, expected);
}

#[tokio::test]
async fn what_is_not_there_means_something_only_while_it_is_remembered() {
    let simulated = simulated().await;
    let base_url = simulated.base_url();
    let id = hand_in(&simulated, "forget=1ms").await;
    let plain = provider(&base_url);
    let mut sworn = entry(&base_url);
    sworn.status.as_mut().unwrap().missing = Missing::NotFound;
    let sworn = of_entry(&sworn);
    let (young, old) = (Duration::from_secs(60), Duration::from_secs(3600));
    until("it is forgotten", async || plain.status(sent(&base_url, &id, old)).await == Evidence::Expired).await;
    assert_no_answer(&plain.status(sent(&base_url, &id, young)).await, "404");
    assert_eq!(sworn.status(sent(&base_url, &id, young)).await, Evidence::NotFound);
    assert_eq!(sworn.status(sent(&base_url, &id, old)).await, Evidence::Expired);
    assert_eq!(plain.find(sent(&base_url, "", young)).await, Evidence::NotFound);
    assert_eq!(plain.find(sent(&base_url, "", old)).await, Evidence::Expired);
}

#[tokio::test]
async fn status_calls_go_to_where_it_was_sent_though_the_configuration_changed() {
    let (before, now) = (simulated().await, simulated().await);
    let id = hand_in_and_wait(&before).await;
    let stored = sent(&before.base_url(), &id, Duration::from_secs(1));

    // The base URL is another one now, and nobody said that the credential may still go to the old one.
    let connections = before.ledger().connections;
    let stranger = provider(&now.base_url());
    assert_no_answer(&stranger.status(stored.clone()).await, "a base url that is not configured any more");
    assert_no_answer(&stranger.cancel(stored.clone()).await, "a base url that is not configured any more");
    assert_eq!((before.ledger().connections, now.ledger().connections), (connections, 0), "nobody was asked");

    let former = format!("[{:?}]", before.base_url());
    let told = of_entry(&entry_with(&now.base_url(), &[("former_base_urls", &former)]));
    let evidence = told.status(stored).await;
    let Evidence::Settled(outcome) = &evidence else { panic!("{evidence:?}") };
    assert_eq!(succeeded(outcome).1, id);
    assert_eq!(now.ledger().connections, 0);
}

#[tokio::test]
async fn another_path_of_the_same_origin_is_asked_where_it_was_sent() {
    let (origin, seen) = scripted(|_, _| (404, "{}".to_owned())).await;
    let provider = provider(&format!("{origin}/v2"));
    provider.status(Sent { url: format!("{origin}/v1/jobs"), ..sent("", "7", Duration::ZERO) }).await;
    provider.status(Sent { url: format!("{origin}/v2/jobs?x=1"), ..sent("", "7", Duration::ZERO) }).await;
    // Neither below a base nor ending in the path of a submit: nobody can tell.
    let lost = provider.status(Sent { url: format!("{origin}/v20/other"), ..sent("", "7", Duration::ZERO) }).await;
    assert_no_answer(&lost, "not configured any more");
    let seen = seen.lock().unwrap().clone();
    let targets: Vec<_> = seen.iter().map(|request| request.split(' ').nth(1).unwrap()).collect();
    assert_eq!(targets, ["/v1/jobs/7", "/v2/jobs/7"]);
}

#[tokio::test]
async fn questions_carry_the_credential_and_no_answer_repeats_it() {
    let (base_url, seen) =
        scripted(|_, _| (200, r#"{"id":"7","status":"failed","error":"bad token sk-live/0123456789"}"#.to_owned())).await;
    let evidence = provider(&base_url).status(sent(&base_url, "7", Duration::ZERO)).await;
    assert!(!format!("{evidence:?}").contains(SECRET), "{evidence:?}");
    let Evidence::Settled(Outcome::Rejected { reason, response, .. }) = evidence else { panic!("{evidence:?}") };
    assert_eq!(reason, "the provider says failed: bad token [hidden]");
    assert!(!String::from_utf8_lossy(&response.body).contains(SECRET));
    let seen = seen.lock().unwrap().clone();
    assert!(seen[0].contains(&format!("authorization: Bearer {SECRET}\r\n")), "{}", seen[0]);
    assert!(seen[0].contains(&format!("onejob-job-id: {JOB}\r\nonejob-attempt: 1\r\n")), "{}", seen[0]);
}

#[tokio::test]
async fn a_result_that_is_elsewhere_is_fetched() {
    let (base_url, seen) = scripted(|_, line| match line.split(' ').next() {
        Some("POST") => (202, r#"{"id":"7","status":"queued"}"#.to_owned()),
        _ if line.contains("/result") => (200, "[1,2]".to_owned()),
        _ => (200, r#"{"id":"7","status":"completed"}"#.to_owned()),
    })
    .await;
    let settings = [("result", r#"{ path = "/jobs/{{ remote.id }}/result" }"#)];
    let provider = of_entry(&entry_with(&base_url, &settings));
    let outcome = provider.submit(call(&provider, "succeed")).await;
    assert_eq!((&*succeeded(&outcome).0.body, succeeded(&outcome).1), (b"[1,2]".as_slice(), "7"));
    assert_eq!(seen.lock().unwrap().len(), 3);
}

#[tokio::test]
async fn a_body_is_made_by_its_template_and_what_names_the_attempt_is_not_in_its_hash() {
    let simulated = simulated().await;
    let template = r#"{{ with(body, background=true, reference=key, simulate="run=1ms") }}"#;
    let provider = of_entry(&entry_with(&simulated.base_url(), &[("submit.body", template)]));
    let rendered = |body: &str| provider.render(&request(body));
    assert_eq!(rendered("{\"a\":1}").unwrap().hash(), rendered("{\"a\":1}").unwrap().hash());
    assert_ne!(rendered("{\"a\":1}").unwrap().hash(), rendered("{\"a\":2}").unwrap().hash());
    assert!(rendered("not json").unwrap_err().to_string().contains("not JSON"));

    let mut call = call(&provider, "succeed");
    call.rendered.headers.pop();
    let outcome = provider.submit(call).await;
    let sent = format!(r#"{{"input":{{"n":9007199254740993}},"background":true,"reference":"{JOB}-1","simulate":"run=1ms"}}"#);
    let sha256 = onejob::fingerprint::sha256(sent.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(json(succeeded(&outcome).0)["body_sha256"], sha256, "{sent}");
}

#[tokio::test]
async fn whoever_is_not_listened_to_any_more_stops_asking() {
    let simulated = simulated().await;
    let asking = provider(&simulated.base_url());
    let (telling, mut heard) = Telling::channel();
    let call = Call { told: telling, ..call(&asking, "run=60s") };
    let running = tokio::spawn(async move { asking.submit(call).await });
    assert!(matches!(heard.recv().await, Some(Told::Accepted { .. })));
    drop(heard);
    let outcome = tokio::time::timeout(Duration::from_secs(5), running).await.expect("it stops at once").unwrap();
    assert_unknown(&outcome, "settled elsewhere");
}

#[tokio::test]
async fn a_provider_that_honours_keys_does_a_replay_once() {
    let options = SimulatedOptions { keys: Keys::Honoured, ..SimulatedOptions::default() };
    let simulated = Simulated::start(options).await.unwrap();
    let honours = [("idempotency", r#"{ header = "idempotency-key", ttl = "24h" }"#)];
    let provider = of_entry(&entry_with(&simulated.base_url(), &honours));
    assert_eq!(provider.abilities().replay, Some(Duration::from_secs(24 * 3600)));
    assert_unknown(&provider.submit(call(&provider, "drop")).await, "reset");
    let outcome = provider.replay(call(&provider, "succeed")).await;
    assert_eq!(json(succeeded(&outcome).0)["execution"].as_u64(), Some(1));
    assert_eq!(simulated.ledger().executed, 1);

    let ignores = self::provider(&simulated.base_url());
    let received = simulated.ledger().received;
    assert_unknown(&ignores.replay(call(&ignores, "succeed")).await, "does not honour keys");
    assert_eq!(simulated.ledger().received, received, "nothing was sent");
}

#[tokio::test]
async fn an_http_provider_can_be_asked_too() {
    let simulated = simulated().await;
    let base_url = simulated.base_url();
    let id = hand_in_and_wait(&simulated).await;
    let entry = entry(&base_url);
    let options = HttpOptions::from_entry(&entry, None, 1 << 20);
    let provider = HttpProvider::new("queue", options).unwrap();
    let abilities = provider.abilities();
    assert_eq!((abilities.status, abilities.find, abilities.replay), (true, true, None));
    assert_eq!((abilities.cancel, abilities.settle), (CancelSemantics::BestEffort, Duration::from_secs(1)));
    assert_eq!(abilities.retention, Some(Duration::from_secs(3600)));
    for evidence in [
        provider.status(sent(&base_url, &id, Duration::ZERO)).await,
        provider.find(sent(&base_url, "", Duration::ZERO)).await,
        provider.cancel(sent(&base_url, &id, Duration::ZERO)).await,
    ] {
        let Evidence::Settled(outcome) = &evidence else { panic!("{evidence:?}") };
        assert_eq!(succeeded(outcome).1, id);
    }
    // Nothing can be asked by an id that is not known.
    assert_no_answer(&provider.status(sent(&base_url, "", Duration::ZERO)).await, "undefined value");

    let silent = HttpProvider::new("queue", HttpOptions::new(&base_url)).unwrap();
    assert_eq!(silent.abilities(), onejob::provider::Abilities::default());
    assert_no_answer(&silent.status(sent(&base_url, &id, Duration::ZERO)).await, "no status call");
}

#[tokio::test]
async fn an_entry_may_be_made_in_rust() {
    let simulated = simulated().await;
    let states = [("queued", Means::Queued), ("running", Means::Running), ("completed", Means::Succeeded)];
    let entry = ProviderEntry {
        base_url: simulated.base_url(),
        path: "/jobs".to_owned(),
        timeouts: Timeouts { total: Duration::from_secs(10), ..Timeouts::default() },
        poll: Poll { first: Duration::from_millis(5), ..Poll::default() },
        status: Some(Status {
            path: "/jobs/{{ remote.id }}".to_owned(),
            result: "/result".to_owned(),
            states: states.map(|(word, means)| (word.to_owned(), means)).into(),
            ..Status::default()
        }),
        cancel: Some(Cancel { path: "/jobs/{{ remote.id }}/cancel".to_owned(), ..Cancel::default() }),
        ..ProviderEntry::default()
    };
    let provider = of_entry(&entry);
    assert_eq!(succeeded(&provider.submit(call(&provider, "run=20ms")).await).0.status, 200);
}

#[tokio::test]
async fn what_work_that_was_handed_in_cost_is_read_from_its_result() {
    let simulated = simulated().await;
    let provider = of_entry(&entry_with(&simulated.base_url(), &[("cost", "/execution")]));
    let outcome = provider.submit(call(&provider, "run=10ms")).await;
    assert_eq!(provider.cost(succeeded(&outcome).0), Some(1));
}
