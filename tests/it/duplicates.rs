//! The D series: executions are counted at the provider, not answers at the client.
//!
//! Each scenario is a named test, and a row of the table that `make duplicates-report` prints. Gateways are processes of their own,
//! configured as anybody would; the provider is the simulated one over real HTTP, and its ledger is the judge.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use futures_util::future::join_all;
use onejob::provider::simulated::{Keys, Simulated, SimulatedOptions};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::gateway::{Answer, End, Gateway, Site, WEBHOOK_VARIABLE};
use crate::support::{simulated, until};

/// How often the client of each scenario repeats its intent, one after another, after its first answer.
const AGAIN: usize = 3;

/// What became of one scenario.
struct Row {
    name: &'static str,
    scenario: &'static str,
    /// What the clients were told, and how often.
    answers: Answers,
    executions: u64,
    state: String,
}

/// Statuses with the job's state, and how often each was told.
#[derive(Default)]
struct Answers(BTreeMap<String, usize>);

impl Answers {
    fn told(&mut self, answer: Option<&Answer>) {
        let words = match answer {
            None => "none".to_owned(),
            Some(Answer { status, body }) => format!("{status} {}", body["state"].as_str().unwrap_or("?")),
        };
        *self.0.entry(words).or_default() += 1;
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (words, times) in &self.0 {
            let separator = if text.is_empty() { "" } else { ", " };
            write!(text, "{separator}{times} × {words}").expect("a string takes it");
        }
        text
    }
}

/// One intent at one site.
struct Intent<'a> {
    gateway: &'a Gateway,
    key: &'a str,
    input: Value,
    answers: Answers,
}

impl<'a> Intent<'a> {
    fn new(gateway: &'a Gateway, key: &'a str, input: Value) -> Self {
        Intent { gateway, key, input, answers: Answers::default() }
    }

    /// Sends it, and waits for its end.
    async fn send(&self) -> Option<Answer> {
        self.send_and_wait(10).await
    }

    /// What comes of it so far.
    async fn now(&self) -> Answer {
        self.send_and_wait(0).await.expect("an answer")
    }

    async fn send_and_wait(&self, seconds: u32) -> Option<Answer> {
        let body = json!({ "route": "print", "input": self.input }).to_string();
        let headers = [("Idempotency-Key", self.key), ("Prefer", &format!("wait={seconds}"))];
        self.gateway.send("POST", "/v1/jobs", &headers, &body).await
    }

    /// Sends it, and what its impatient user sends after the first answer.
    async fn clicked(&mut self) -> Answer {
        let mut last = None;
        for click in 0..=AGAIN {
            let answer = self.send_and_wait(if click == 0 { 1 } else { 0 }).await;
            self.answers.told(answer.as_ref());
            last = answer;
        }
        last.expect("an answer")
    }

    /// Tries what a program would that ignores every warning: a further attempt of its own.
    async fn pushed(&self, id: &str) -> u16 {
        let path = format!("/v1/jobs/{id}/attempts");
        let body = json!({ "provider": "printer", "token": "0123456789abcdef0123456789abcdef", "lease_ms": 1000 }).to_string();
        self.gateway.send("POST", &path, &[], &body).await.expect("an answer").status
    }

    async fn row(self, name: &'static str, scenario: &'static str, executions: u64) -> Row {
        let last = self.now().await;
        Row { name, scenario, answers: self.answers, executions, state: state(&last).to_owned() }
    }
}

fn state(answer: &Answer) -> &str {
    answer.body["state"].as_str().unwrap_or("?")
}

fn id(answer: &Answer) -> String {
    answer.body["id"].as_str().expect("a job's id").to_owned()
}

fn executed(site: &Site) -> u64 {
    site.printer.ledger().executed
}

/// A provider that nobody can ask does its work and lies about it in one way: one execution, and the job stays unknown.
async fn lies(name: &'static str, scenario: &'static str, behaviour: &str, settings: &[(&str, &str)]) -> Row {
    let site = Site::open().await;
    let gateway = site.start(settings, None).await;
    let mut intent = Intent::new(&gateway, name, json!({ "simulate": behaviour }));
    let last = intent.clicked().await;
    assert_eq!((last.status, state(&last)), (202, "unknown"), "{:?}", last.body);
    assert_eq!(intent.pushed(&id(&last)).await, 409);
    intent.row(name, scenario, executed(&site)).await
}

async fn d01() -> Row {
    let row = lies("D01", "executes, drops the connection before headers", "drop", &[]).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "unknown"));
    row
}

#[tokio::test]
async fn d01_a_connection_dropped_before_headers_is_one_execution_and_unknown() {
    d01().await;
}

async fn d02() -> Row {
    let row = lies("D02", "executes, 504 from an intermediary", "status=504", &[]).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "unknown"));
    row
}

#[tokio::test]
async fn d02_a_504_of_an_intermediary_is_one_execution_and_unknown() {
    d02().await;
}

async fn d03() -> Row {
    let row = lies("D03", "executes, 500", "status=500", &[]).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "unknown"));
    row
}

#[tokio::test]
async fn d03_a_500_of_the_provider_is_one_execution_and_unknown() {
    d03().await;
}

async fn d04() -> Row {
    let row = lies("D04", "executes, headers and half a body", "half", &[]).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "unknown"));
    row
}

#[tokio::test]
async fn d04_half_a_body_is_one_execution_and_unknown() {
    d04().await;
}

async fn d05() -> Row {
    let site = Site::open().await;
    let gateway =
        site.start(&[("provider.printer.timeouts.total", "500ms"), ("provider.printer.timeouts.linger", "30s")], None).await;
    let mut intent = Intent::new(&gateway, "D05", json!({ "simulate": "delay=3500ms" }));
    let last = intent.clicked().await;
    assert_eq!((last.status, state(&last)), (202, "unknown"), "{:?}", last.body);
    assert_eq!(intent.pushed(&id(&last)).await, 409);
    until("the late answer wins", async || state(&intent.now().await) == "succeeded").await;
    let last = intent.clicked().await;
    assert_eq!((last.status, &last.body["result"]["body"]["execution"]), (200, &json!(1)));
    let row = intent.row("D05", "answers 3 s after the total timeout", executed(&site)).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "succeeded"));
    row
}

#[tokio::test]
async fn d05_an_answer_after_the_timeout_is_one_execution_and_wins_late() {
    d05().await;
}

async fn d07() -> Row {
    let site = Site::open().await;
    let gateway = site.start(&[], None).await;
    let mut intent = Intent::new(&gateway, "D07", json!({ "simulate": "delay=1s" }));
    let told = join_all((0..100).map(|_| intent.send())).await;
    let ids: Vec<String> = told.iter().flatten().map(id).collect();
    assert!(ids.len() == 100 && ids.iter().all(|id| *id == ids[0]), "one job for all");
    let results: Vec<&Value> = told.iter().flatten().map(|answer| &answer.body["result"]).collect();
    assert!(results.iter().all(|result| *result == results[0] && !result.is_null()), "one result for all: {results:?}");
    for answer in &told {
        intent.answers.told(answer.as_ref());
    }
    let row = intent.row("D07", "the client repeats an in-flight key 100 times", executed(&site)).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "succeeded"));
    row
}

#[tokio::test]
async fn d07_a_hundred_repetitions_in_flight_are_one_execution_and_one_answer() {
    d07().await;
}

async fn d08() -> Row {
    let site = Site::open().await;
    let mut mortal = site.start(&[], Some("call.sent")).await;
    let mut answers = Answers::default();
    let first = Intent::new(&mortal, "D08", json!({ "simulate": "queue=200ms" })).send().await;
    answers.told(first.as_ref());
    assert_eq!(mortal.ended().await, End::Signal(Signal::KILL.as_raw()));
    let heir = site.start(&[], None).await;
    let mut intent = Intent::new(&heir, "D08", json!({ "simulate": "queue=200ms" }));
    intent.answers = answers;
    until("the heir finds the attempt unknown", async || state(&intent.now().await) == "unknown").await;
    intent.clicked().await;
    let row = intent.row("D08", "the gateway is killed between write-ahead and answer", executed(&site)).await;
    assert_eq!(row.state, "unknown");
    assert!(row.executions <= 1, "{}", row.executions);
    row
}

#[tokio::test]
async fn d08_a_gateway_killed_in_the_call_leaves_at_most_one_execution_and_unknown() {
    d08().await;
}

/// How many keys the two gateways of D09 race for.
const RACES: usize = 1000;
/// How many of these at once.
const RACES_AT_ONCE: usize = 50;

async fn d09() -> Row {
    let site = Site::open().await;
    let (left, right) = tokio::join!(site.start(&[], None), site.start(&[], None));
    let mut answers = Answers::default();
    let keys: Vec<String> = (0..RACES).map(|race| format!("D09-{race}")).collect();
    for some in keys.chunks(RACES_AT_ONCE) {
        let races = some.iter().map(|key| {
            let (left, right) = (&left, &right);
            async move {
                let (one, other) =
                    (Intent::new(left, key, json!({ "page": key })), Intent::new(right, key, json!({ "page": key })));
                tokio::join!(one.send(), other.send())
            }
        });
        for (one, other) in join_all(races).await {
            let (one, other) = (one.expect("an answer"), other.expect("an answer"));
            assert_eq!((id(&one), &one.body["result"]), (id(&other), &other.body["result"]));
            answers.told(Some(&one));
            answers.told(Some(&other));
        }
    }
    let ledger = site.printer.ledger();
    let mut jobs: Vec<&str> = ledger.entries.iter().map(|entry| entry.job_id.as_str()).collect();
    jobs.sort_unstable();
    jobs.dedup();
    assert_eq!((jobs.len(), ledger.executed), (RACES, RACES as u64), "each key once");
    Row {
        name: "D09",
        scenario: "two gateways, one key, 1,000 races: executions per key",
        answers,
        executions: 1,
        state: "succeeded".to_owned(),
    }
}

#[tokio::test]
async fn d09_two_gateways_that_race_for_a_key_a_thousand_times_execute_each_once() {
    d09().await;
}

/// One gateway before two providers, of which the first answers in its own time and the second at once.
async fn before_two(site: &Site, spare: &Simulated, settings: &[(&str, &str)]) -> Gateway {
    let url = spare.base_url();
    let mut all = vec![
        ("provider.spare.base_url", url.as_str()),
        ("route.print.providers", r#"["printer", "spare"]"#),
        ("route.print.gate", "off"),
    ];
    all.extend_from_slice(settings);
    site.start(&all, None).await
}

async fn d12() -> Row {
    let site = Site::open().await;
    let spare = simulated().await;
    let settings = [("provider.printer.timeouts.total", "500ms"), ("provider.printer.timeouts.linger", "30s")];
    let gateway = before_two(&site, &spare, &settings).await;
    site.printer.set_behaviour("delay=5s").expect("a behaviour");
    let mut intent = Intent::new(&gateway, "D12", json!({ "page": 1 }));
    let last = intent.clicked().await;
    assert_eq!((last.status, state(&last)), (202, "unknown"), "{:?}", last.body);
    let id = id(&last);
    let reason = "their console shows nothing";
    let decision = |word: &str| json!({ "outcome": "failed", "actor": "ops", "reason": reason, "then": "retry", "word": word });
    let path = format!("/v1/jobs/{id}/attempts/1/resolve");
    let resolve = async |word: &str| {
        let key = format!("decision-{word}");
        gateway.send("POST", &path, &[("Idempotency-Key", &key)], &decision(word).to_string()).await.expect("an answer")
    };
    // A guess is not believed while the original may still be on its way.
    assert_eq!(resolve("operator").await.status, 409);
    let resolved = resolve("provider").await;
    assert_eq!(resolved.status, 200, "{:?}", resolved.body);
    until("the fallback wins", async || state(&intent.now().await) == "succeeded").await;
    let won = intent.clicked().await;
    until("the original returns, and is discarded", async || {
        let job = gateway.job(&id).await.expect("an answer").body;
        job["attempts"][0]["state"] == "discarded"
    })
    .await;
    let last = intent.clicked().await;
    assert_eq!(last.body["result"], won.body["result"], "the winner's bytes stay");
    let executions = executed(&site) + spare.ledger().executed;
    let row =
        intent.row("D12", "resolved as \"never happened\" (wrongly), the fallback wins, the original returns", executions).await;
    assert_eq!((row.executions, row.state.as_str()), (2, "succeeded"), "one, and the one that the operator accepted");
    row
}

#[tokio::test]
async fn d12_after_a_wrong_decision_the_fallback_wins_and_the_original_is_discarded() {
    d12().await;
}

/// What a gateway is told beside the rest, to ask soon.
const SOON_ASKED: (&str, &str) = ("route.print.reconcile", r#"{ first = "300ms", max = "1s" }"#);

async fn d01_asked() -> Row {
    let options = SimulatedOptions { keys: Keys::Honoured, ..SimulatedOptions::default() };
    let site = Site::open_before(Simulated::start(options).await.expect("a provider")).await;
    let honours = ("provider.printer.idempotency", r#"{ header = "Idempotency-Key", ttl = "24h" }"#);
    let gateway = site.start(&[honours, SOON_ASKED], None).await;
    let mut intent = Intent::new(&gateway, "D01a", json!({ "page": 1 }));
    site.printer.set_behaviour("drop").expect("a behaviour");
    until("it is executed, and nobody knows", async || state(&intent.now().await) == "unknown").await;
    intent.clicked().await;
    site.printer.set_behaviour("succeed").expect("a behaviour");
    until("the same request again brings the answer", async || state(&intent.now().await) == "succeeded").await;
    let last = intent.clicked().await;
    assert_eq!((last.status, &last.body["result"]["body"]["execution"]), (200, &json!(1)));
    let row = intent.row("D01a", "as D01, and the provider honours our key", executed(&site)).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "succeeded"));
    row
}

#[tokio::test]
async fn d01a_a_provider_that_honours_keys_is_asked_again_and_executes_once() {
    d01_asked().await;
}

/// A queue of jobs at the printer's address.
async fn before_a_queue(site: &Site, settings: &[(&str, &str)]) -> Gateway {
    let url = site.printer.base_url();
    let mut all = vec![
        ("provider.press.preset", "job-queue"),
        ("provider.press.base_url", url.as_str()),
        ("provider.press.poll", r#"{ first = "200ms", factor = 1.0, max = "200ms" }"#),
        ("route.print.providers", r#"["press"]"#),
        SOON_ASKED,
    ];
    all.extend_from_slice(settings);
    site.start(&all, None).await
}

async fn d06() -> Row {
    let site = Site::open().await;
    let gateway = before_a_queue(&site, &[]).await;
    // Taken on, and the answer with its id is lost.
    let mut intent = Intent::new(&gateway, "D06", json!({ "simulate": "run=1s,drop" }));
    let last = intent.clicked().await;
    assert!(["unknown", "succeeded"].contains(&state(&last)), "{:?}", last.body);
    until("it is found by our key", async || state(&intent.now().await) == "succeeded").await;
    let last = intent.clicked().await;
    assert_eq!(last.body["attempts"].as_array().map(Vec::len), Some(1), "no other attempt began: {:?}", last.body);
    let row = intent.row("D06", "accepted asynchronously, the id is lost", executed(&site)).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "succeeded"));
    row
}

#[tokio::test]
async fn d06_a_lost_id_is_one_execution_found_by_our_key() {
    d06().await;
}

async fn d10() -> Row {
    let site = Site::open().await;
    let gateway = before_a_queue(&site, &[]).await;
    let mut intent = Intent::new(&gateway, "D10", json!({ "simulate": "run=3s,stubborn" }));
    let first = intent.now().await;
    intent.answers.told(Some(&first));
    until("it runs at the provider", async || executed(&site) == 1).await;
    let path = format!("/v1/jobs/{}/cancel", id(&first));
    let body = json!({ "mode": "graceful", "reason": "the customer called" }).to_string();
    let canceled = gateway.send("POST", &path, &[("Idempotency-Key", "cancel-1")], &body).await.expect("an answer");
    assert_eq!((canceled.status, &canceled.body["status"]), (202, &json!("canceling")), "{:?}", canceled.body);
    until("it completes anyway, and that wins", async || state(&intent.now().await) == "succeeded").await;
    intent.clicked().await;
    let row = intent.row("D10", "cancel acknowledged, completes anyway", executed(&site)).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "succeeded"));
    row
}

#[tokio::test]
async fn d10_what_completes_after_its_cancel_was_acknowledged_is_one_execution_and_wins() {
    d10().await;
}

async fn d11() -> Row {
    let site = Site::open().await;
    // The provider must know the gateway's address before the gateway has one; a free port is kept until it listens.
    let reserved = tokio::net::TcpSocket::new_v4().expect("a socket");
    reserved.set_reuseaddr(true).expect("an option");
    reserved.bind(([127, 0, 0, 1], 0).into()).expect("a port");
    let listen = reserved.local_addr().expect("an address").to_string();
    let (public_url, hook) = (format!("http://{listen}"), format!(r#"{{ secret_env = "{WEBHOOK_VARIABLE}" }}"#));
    let settings = [
        ("server.listen", listen.as_str()),
        ("server.public_url", public_url.as_str()),
        ("provider.press.webhook", hook.as_str()),
        ("provider.press.submit", r#"{ id = "/id", body = "{{ with(body, webhook_url=webhook.url) }}" }"#),
    ];
    let gateway = before_a_queue(&site, &settings).await;
    // It has called back before its submit is answered; the polls that follow say the same.
    let mut intent = Intent::new(&gateway, "D11", json!({ "simulate": "webhook_first,delay=1s" }));
    let first = intent.send().await.expect("an answer");
    intent.answers.told(Some(&first));
    assert_eq!((first.status, state(&first)), (200, "succeeded"), "{:?}", first.body);
    let last = intent.clicked().await;
    let winner = (&last.body["result"], last.body["version"].as_u64());
    assert_eq!(winner, (&first.body["result"], Some(1)), "one winner: {:?}", last.body);
    let row = intent.row("D11", "webhook and poll both deliver, the webhook first", executed(&site)).await;
    assert_eq!((row.executions, row.state.as_str()), (1, "succeeded"));
    row
}

#[tokio::test]
async fn d11_a_webhook_before_its_submits_answer_and_the_polls_after_it_are_one_result() {
    d11().await;
}

#[tokio::test]
#[ignore = "prints the table: make duplicates-report"]
async fn the_duplicates_report() {
    let lies = [d01().await, d01_asked().await, d02().await, d03().await, d04().await, d05().await, d06().await];
    let races = [d07().await, d08().await, d09().await, d10().await, d11().await, d12().await];
    println!("| | scenario | answers the clients got | executions | final state |");
    println!("|---|---|---|--:|---|");
    for Row { name, scenario, answers, executions, state } in lies.into_iter().chain(races) {
        println!("| {name} | {scenario} | {} | {executions} | {state} |", answers.text());
    }
}
