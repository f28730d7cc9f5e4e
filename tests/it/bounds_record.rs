//! What comes from outside and stands in a record is short, on one line, and of a bounded number.

use std::sync::Arc;
use std::time::Duration;

use onejob::attempt::ResolveOutcome;
use onejob::job::{Class, JobState, Rules};
use onejob::provider::{Call, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request, Response};
use onejob::runtime::ProviderSlot;
use onejob::store::{Follow, Resolved, Word};

use crate::http_support::{Site, route};
use crate::support::{Answer, First, QUARANTINE_MS, Redis, Submission};

/// Whatever the outcome, an adapter that talks too much and in more lines than one.
struct Chatty;

const LONG: usize = 100_000;

impl Provider for Chatty {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        let body = request.body.clone();
        Ok(Rendered { method: "POST".into(), url: "chatty://x/".into(), headers: Vec::new(), body })
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        let word = String::from_utf8_lossy(&call.rendered.body).into_owned();
        Box::pin(async move {
            let reason = format!("one\r\ntwo \u{1b}[2J{}", "x".repeat(LONG));
            let response = Response { status: 400, headers: Vec::new(), body: Arc::from(*b"no") };
            match word.as_str() {
                "\"succeeded\"" => Outcome::Succeeded {
                    response: Response { status: 200, ..response },
                    remote_id: Some("r".repeat(LONG)),
                    model: Some("one\nmodel".to_owned()),
                },
                "\"named\"" => Outcome::Succeeded {
                    response: Response { status: 200, ..response },
                    remote_id: Some("r".repeat(512)),
                    model: Some("laser-2".to_owned()),
                },
                "\"rejected\"" => Outcome::Rejected { reason, response, retry_after: None },
                "\"invalid\"" => Outcome::InvalidOutput { reason },
                "\"unsent\"" => Outcome::NotSent { reason },
                _ => Outcome::Unknown { reason },
            }
        })
    }
}

#[tokio::test]
async fn an_adapters_texts_are_short_and_on_one_line() {
    let site = Site::with_setup(|setup| {
        let provider = Arc::new(Chatty);
        let total = Duration::from_secs(30);
        setup.providers.push(ProviderSlot { name: "chatty".to_owned(), provider, total, in_flight_max: 10 });
        setup.routes.push(route("chatty", Class::Exclusive, &["chatty"]));
    })
    .await;
    let alice = site.alice();
    for word in ["rejected", "invalid", "unsent", "unknown"] {
        let id = alice.submit("chatty", word, &format!("\"{word}\"")).await.job_id();
        let job = alice.in_state(&id, if word == "unknown" { "unknown" } else { "failed" }).await;
        for reason in [&job["reason"], &job["attempts"][0]["reason"]] {
            let reason = reason.as_str().unwrap();
            assert!((500..700).contains(&reason.chars().count()) && !reason.chars().any(char::is_control), "{word}: {reason}");
            assert!(reason.contains("one") && reason.contains('…'), "{reason}");
        }
        for event in job["events"].as_array().unwrap() {
            assert!(event["detail"].as_str().unwrap_or_default().chars().count() < 700, "{event}");
        }
    }
    // A part of a name is another name.
    let id = alice.submit("chatty", "succeeded", "\"succeeded\"").await.job_id();
    let attempt = alice.ended(&id).await["attempts"][0].clone();
    assert!(attempt["remote_id"].is_null() && attempt["model"].is_null(), "{attempt}");
    let id = alice.submit("chatty", "named", "\"named\"").await.job_id();
    let attempt = alice.ended(&id).await["attempts"][0].clone();
    assert_eq!((attempt["remote_id"].as_str().unwrap().len(), attempt["model"].as_str()), (512, Some("laser-2")));
}

#[tokio::test]
async fn texts_from_outside_have_limits_that_name_themselves() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("outside", "k", "{}").await.job_id();
    let (number, token) = operator.begin_running(&id, "laser").await;
    let before = site.redis.dump().await;
    let x = |count: usize| "x".repeat(count);
    let act = |action: &str| format!("/v1/jobs/{id}/attempts/{number}/{action}");
    let cancel = format!("/v1/jobs/{id}/cancel");
    for (path, body, says) in [
        (cancel.clone(), format!(r#"{{"reason":"{}"}}"#, x(501)), "501 characters; the limit is 500"),
        (cancel.clone(), r#"{"reason":"two\nlines"}"#.to_owned(), "control character"),
        (act("running"), format!(r#"{{"token":"{token}","url":"{}"}}"#, x(8193)), "8193 bytes; the limit is 8192"),
        (
            act("finish"),
            format!(r#"{{"token":"{token}","outcome":"succeeded","result":"x","content_type":"{}"}}"#, x(257)),
            "1 to 256",
        ),
        (act("lease"), format!(r#"{{"token":"{token}","sequence":1,"lease_ms":3600001}}"#), "100 to 3600000"),
        ("/v1/jobs?state=open&limit=1001".to_owned(), String::new(), "1 to 1000"),
    ] {
        let method = if body.is_empty() { "GET" } else { "POST" };
        let answer = operator.send(method, &path, &[("content-type", "application/json")], body).await;
        let problem = answer.problem(400, "request-invalid");
        assert!(problem["detail"].as_str().unwrap().contains(says), "{problem}");
    }
    let request_id = [("onejob-request-id", &*x(129))];
    let problem = operator.send("POST", &cancel, &request_id, "").await.problem(400, "request-invalid");
    assert!(problem["detail"].as_str().unwrap().contains("1 to 128"), "{problem}");
    let problem = alice.submit(&x(129), "other", "{}").await.problem(404, "route-unknown");
    assert!(problem["detail"].as_str().unwrap().contains("the limit is 128"), "{problem}");
    assert_eq!(site.redis.dump().await, before);
    // A trace context that is too long to be one is left out, and hurts nobody.
    let job = alice.submit_with("print", "traced", "{}", &[("traceparent", &x(257)), ("prefer", "wait=20")]).await.is(200);
    assert_eq!(job.json()["state"], "succeeded");
}

/// Twenty times unknown and resolved: forty events and twenty requests, of which the last are kept.
#[tokio::test]
async fn a_record_keeps_the_last_events_and_requests_only() {
    const ROUNDS: u32 = 20;
    let redis = Redis::start().await;
    let submission = redis.submission();
    let rules = Rules { attempts_max: ROUNDS + 1, ..submission.rules };
    let mut given = redis.given(Submission { rules, first: First::Running, ..submission }).await;
    let retry = Follow::Retry { delay_ms: 0, hold_ms: 0 };
    let mut calls = Vec::new();
    for number in 1..=ROUNDS {
        given.lose(number).await;
        given.age(QUARANTINE_MS).await;
        let call = given.call_resolve(number, ResolveOutcome::Failed, Word::Operator, retry);
        assert_eq!(given.send(&call).await, Answer::Resolved(Resolved::Recorded { job: JobState::Pending }));
        calls.push(call);
        given.begins(First::Running).await;
    }
    let job = given.job().await;
    assert_eq!((job.events.len(), job.events.last().unwrap().attempt), (32, ROUNDS));
    given.rewrite("if #record[P.requests] ~= 16 then error('requests: ' .. #record[P.requests]) end").await;
    // What is remembered is repeated; what is forgotten is refused, because the attempt is no longer unknown.
    for (call, remembered) in [(&calls[19], true), (&calls[4], true), (&calls[3], false)] {
        let answer = given.send(call).await;
        let repeated = matches!(answer, Answer::Resolved(Resolved::Repeated { .. }));
        assert_eq!(repeated, remembered, "{answer:?}");
    }
}
