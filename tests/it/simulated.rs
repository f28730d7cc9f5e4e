//! The simulated provider, judged over the wire by a bare client: it must be right before others are judged by it.

use std::time::{Duration, Instant};

use onejob::provider::http::HttpProvider;
use onejob::provider::simulated::{Keys, Simulated, SimulatedOptions};
use onejob::provider::{Call, Provider};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::provider_http::{call, options, simulate, until_accepted, until_refused};
use crate::support::until;

async fn start(behaviour: &str) -> Simulated {
    Simulated::start(SimulatedOptions { behaviour: behaviour.to_owned(), ..SimulatedOptions::default() }).await.unwrap()
}

/// One request on a connection of its own; the answer's status (0 for none) and body.
async fn send(simulated: &Simulated, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(simulated.addr()).await.unwrap();
    let length = body.len();
    let request =
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let status = head.split(' ').nth(1).map_or(0, |status| status.parse().unwrap());
    (status, body.to_owned())
}

async fn ledger(simulated: &Simulated, query: &str) -> Value {
    let (status, body) = send(simulated, "GET", &format!("/ledger{query}"), "", "").await;
    assert_eq!(status, 200);
    serde_json::from_str(&body).unwrap()
}

#[tokio::test]
async fn the_ledger_tells_what_was_received_accepted_executed_and_answered() {
    let simulated = start("succeed").await;
    for (behaviour, job) in
        [("succeed", "a"), ("status=500", "a"), ("jam", "b"), ("drop", "b"), ("half", "b"), ("unexecuted,drop", "c")]
    {
        let headers =
            format!("onejob-simulate: {behaviour}\r\nonejob-job-id: {job}\r\nonejob-attempt: 1\r\nidempotency-key: k\r\n");
        send(&simulated, "POST", "/print?x=1", &headers, "{}").await;
    }
    let all = ledger(&simulated, "").await;
    let totals = ["received", "accepted", "executed", "answered", "dropped"].map(|total| all[total].as_u64().unwrap());
    assert_eq!(totals, [6, 4, 4, 3, 0]);
    let b = ledger(&simulated, "?job=b").await;
    let totals = ["received", "accepted", "executed", "answered"].map(|total| b[total].as_u64().unwrap());
    assert_eq!(totals, [3, 2, 2, 1]);
    let entry = &b["entries"][0];
    assert_eq!(
        (entry["sequence"].as_u64(), entry["behaviour"].as_str(), entry["path"].as_str()),
        (Some(3), Some("jam"), Some("/print?x=1"))
    );
    assert_eq!(
        (entry["accepted"].as_bool(), entry["executed"].as_bool(), entry["answered"].as_bool()),
        (Some(false), Some(false), Some(true))
    );

    assert_eq!(send(&simulated, "DELETE", "/ledger", "", "").await.0, 204);
    assert_eq!(ledger(&simulated, "").await["received"], 0);
    let (_, body) = send(&simulated, "POST", "/", "", "").await;
    assert_eq!(serde_json::from_str::<Value>(&body).unwrap()["execution"], 5, "numbers go on");
}

#[tokio::test]
async fn the_header_wins_over_the_body_and_the_body_over_the_default() {
    let simulated = start("status=500").await;
    assert_eq!(send(&simulated, "POST", "/", "", "{}").await.0, 500);
    assert_eq!(send(&simulated, "PUT", "/", "", r#"{"simulate":"status=502"}"#).await.0, 502);
    assert_eq!(send(&simulated, "POST", "/", "onejob-simulate: status=201\r\n", r#"{"simulate":"status=502"}"#).await.0, 201);
    assert_eq!(send(&simulated, "PUT", "/behaviour", "", "status=503").await.0, 204);
    assert_eq!(send(&simulated, "GET", "/behaviour", "", "").await, (200, "status=503\n".to_owned()));
    assert_eq!(send(&simulated, "POST", "/", "", "{}").await.0, 503);
    assert_eq!(send(&simulated, "GET", "/healthz", "", "").await, (200, "ok\n".to_owned()));
    assert_eq!(simulated.ledger().executed, 4);
}

#[tokio::test]
async fn a_wrong_behaviour_is_refused_and_changes_nothing() {
    let simulated = start("succeed").await;
    for text in ["dorp", "refuse", "drop,half"] {
        let (status, body) = send(&simulated, "PUT", "/behaviour", "", text).await;
        assert_eq!(status, 400, "{text}");
        assert!(body.contains("invalid_behaviour"), "{body}");
    }
    for headers in ["onejob-simulate: dorp\r\n", "onejob-simulate: refuse=1s\r\n"] {
        assert_eq!(send(&simulated, "POST", "/", headers, "{}").await.0, 400);
    }
    assert_eq!(send(&simulated, "POST", "/", "", r#"{"simulate":7}"#).await.0, 400);
    let ledger = simulated.ledger();
    assert_eq!((ledger.received, ledger.executed, ledger.answered), (3, 0, 3));
    assert_eq!(send(&simulated, "POST", "/", "", "{}").await.0, 200);
    let error =
        Simulated::start(SimulatedOptions { behaviour: "dorp".to_owned(), ..SimulatedOptions::default() }).await.err().unwrap();
    assert!(error.to_string().contains("\"dorp\" is not a word of it"), "{error}");
}

#[tokio::test]
async fn work_that_was_taken_on_is_done_though_the_client_goes_away() {
    let simulated = start("succeed").await;
    let provider = HttpProvider::new("laser", options(&simulated.base_url())).unwrap();
    let call = Call { deadline: Instant::now() + Duration::from_millis(400), ..simulate(&provider, "queue=1500ms") };
    assert_eq!(provider.submit(call).await.word(), "unknown");
    assert_eq!((simulated.ledger().accepted, simulated.ledger().executed), (1, 0));
    until("the execution", async || simulated.ledger().executed == 1).await;
    assert_eq!(simulated.ledger().answered, 0);
}

#[tokio::test]
async fn refusing_for_a_while_closes_the_port_and_opens_it_again() {
    let simulated = start("status=201").await;
    assert_eq!(send(&simulated, "PUT", "/behaviour", "", "refuse=1s").await.0, 204);
    until_refused(simulated.addr()).await;
    until_accepted(simulated.addr()).await;
    assert_eq!(send(&simulated, "POST", "/", "", "{}").await.0, 201, "as before");
}

#[tokio::test]
async fn it_can_start_refusing_and_be_told_otherwise() {
    let simulated = start("refuse").await;
    until_refused(simulated.addr()).await;
    simulated.set_behaviour("status=201").unwrap();
    until_accepted(simulated.addr()).await;
    assert_eq!(send(&simulated, "POST", "/", "", "{}").await.0, 201);
}

#[tokio::test]
async fn concurrent_repetitions_of_one_key_are_one_execution() {
    let options_ = SimulatedOptions { keys: Keys::Honoured, behaviour: "queue=20ms".to_owned(), ..SimulatedOptions::default() };
    let simulated = Simulated::start(options_).await.unwrap();
    let sends = (0..20).map(|_| send(&simulated, "POST", "/", "idempotency-key: k\r\n", "{}"));
    let answers = futures_util::future::join_all(sends).await;
    assert!(answers.iter().all(|answer| *answer == answers[0] && answer.0 == 200), "{answers:?}");
    let ledger = simulated.ledger();
    assert_eq!((ledger.received, ledger.accepted, ledger.executed, ledger.answered), (20, 20, 1, 20));
}

#[tokio::test]
async fn chat_completions_are_answered_in_their_shape() {
    let simulated = start("succeed").await;
    let (status, body) = send(&simulated, "POST", "/v1/chat/completions", "", "{}").await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, body["object"].as_str()), (200, Some("chat.completion")));
    assert_eq!(body["choices"][0]["message"]["content"], "execution 1 by simulated");
}

#[tokio::test]
async fn shutdown_ends_what_hangs_and_frees_the_port() {
    let simulated = start("hang").await;
    let addr = simulated.addr();
    let provider = HttpProvider::new("laser", options(&simulated.base_url())).unwrap();
    let submit = tokio::spawn(async move { provider.submit(call(&provider)).await });
    until("the execution", async || simulated.ledger().executed == 1).await;
    simulated.shutdown().await;
    assert_eq!(submit.await.unwrap().word(), "unknown");
    assert!(TcpStream::connect(addr).await.is_err());
    Simulated::start(SimulatedOptions { listen: addr, ..SimulatedOptions::default() }).await.unwrap().shutdown().await;
}

#[tokio::test]
async fn a_storm_gives_the_same_outcomes_for_the_same_seed() {
    let mut outcomes = Vec::new();
    for _ in 0..2 {
        let simulated = start("random=7").await;
        let provider = HttpProvider::new("laser", options(&simulated.base_url())).unwrap();
        let calls = (1..=60).map(|attempt| provider.submit(Call { attempt, ..call(&provider) }));
        let words: Vec<&str> = futures_util::future::join_all(calls).await.iter().map(|outcome| outcome.word()).collect();
        let ledger = simulated.ledger();
        let succeeded = words.iter().filter(|word| **word == "succeeded").count() as u64;
        assert!(ledger.executed > succeeded && ledger.executed < 60, "{ledger:?}");
        assert!(["succeeded", "rejected", "unknown"].iter().all(|word| words.contains(word)), "{words:?}");
        outcomes.push(words);
    }
    assert_eq!(outcomes[0], outcomes[1]);
}
