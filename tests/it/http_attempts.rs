//! Attempts driven from outside: every refusal has its type, says what is in the way, and changes nothing.

use serde_json::json;

use crate::http_support::{Answer, Client, QUARANTINE_MS, Site};
use crate::support::until;

const BEGIN: &str = r#"{"provider":"laser","lease_ms":60000}"#;

async fn begin(operator: &Client, id: &str) -> Answer {
    operator.post(&format!("/v1/jobs/{id}/attempts"), BEGIN).await
}

async fn act(operator: &Client, id: &str, number: u64, what: &str, body: &str) -> Answer {
    operator.post(&format!("/v1/jobs/{id}/attempts/{number}/{what}"), body).await
}

#[tokio::test]
async fn an_executor_outside_does_a_job_from_begin_to_result() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("outside", "order-1", r#"{"copies":1}"#).await.is(202).job_id();
    let begun = begin(&operator, &id).await.is(201).json();
    assert_eq!(
        (begun["status"].clone(), begun["number"].clone(), begun["state"].clone()),
        (json!("started"), json!(1), json!("starting"))
    );
    let token = begun["token"].as_str().unwrap().to_owned();
    // Sent again with its token: the same attempt, and nothing written.
    let before = site.redis.dump().await;
    let repeat = format!(r#"{{"provider":"laser","lease_ms":60000,"token":"{token}"}}"#);
    let repeated = operator.post(&format!("/v1/jobs/{id}/attempts"), &repeat).await.is(200).json();
    assert_eq!((repeated["status"].clone(), repeated["number"].clone()), (json!("repeated"), json!(1)));
    assert_eq!(repeated["lease_until_ms"], begun["lease_until_ms"]);
    assert_eq!(site.redis.dump().await, before);

    let hash = "ab".repeat(32);
    let mark = format!(r#"{{"token":"{token}","url":"https://laser.example/print","request_hash":"{hash}"}}"#);
    let marked = act(&operator, &id, 1, "running", &mark).await.is(200).json();
    assert_eq!(marked["status"], "running");
    assert_eq!(act(&operator, &id, 1, "running", &mark).await.is(200).json()["status"], "repeated");
    let extended =
        act(&operator, &id, 1, "lease", &format!(r#"{{"token":"{token}","sequence":1,"lease_ms":120000}}"#)).await.is(200).json();
    assert_eq!((extended["status"].clone(), extended["canceling"].clone()), (json!("extended"), json!(false)));
    assert!(extended["lease_until_ms"].as_u64() > marked["lease_until_ms"].as_u64());

    let finish = format!(r#"{{"token":"{token}","outcome":"succeeded","result":{{"n":1.00}}}}"#);
    assert_eq!(act(&operator, &id, 1, "finish", &finish).await.is(200).json()["status"], "won");
    let job = alice.get(&format!("/v1/jobs/{id}")).await.is(200);
    assert!(job.text().contains(r#""body":{"n":1.00}"#), "{job:?}");
    assert_eq!(job.json()["provider"], "laser");
    // Neither token nor hash is told to anybody.
    assert!(!job.text().contains(&token) && !job.text().contains(&hash));
}

#[tokio::test]
async fn every_reason_not_to_begin_has_its_type_and_changes_nothing() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let refused = async |id: &str, kind: &str| {
        let before = site.redis.dump().await;
        let problem = begin(&operator, id).await.problem(409, kind);
        assert_eq!(site.redis.dump().await, before, "{kind}");
        assert_eq!(problem["job_id"], id);
        problem
    };

    let id = alice.submit("outside", "blocked", "{}").await.job_id();
    let token = begin(&operator, &id).await.is(201).json()["token"].as_str().unwrap().to_owned();
    let problem = refused(&id, "attempt-blocked").await;
    assert_eq!((problem["attempt"].clone(), problem["state"].clone()), (json!(1), json!("starting")));
    act(&operator, &id, 1, "running", &format!(r#"{{"token":"{token}"}}"#)).await.is(200);
    assert_eq!(refused(&id, "attempt-blocked").await["state"], "running");
    act(&operator, &id, 1, "finish", &format!(r#"{{"token":"{token}","outcome":"unknown","reason":"no answer"}}"#)).await.is(200);
    assert_eq!(refused(&id, "attempt-blocked").await["state"], "unknown");

    let id = alice.submit("once", "exhausted", "{}").await.job_id();
    let (_, token) = operator.begin_running(&id, "laser").await;
    act(&operator, &id, 1, "finish", &format!(r#"{{"token":"{token}","outcome":"failed","reason":"jam"}}"#)).await.is(200);
    assert_eq!(refused(&id, "job-ended").await["state"], "failed");

    // While an attempt runs past the deadline the job stays, and takes no other beside it.
    let id = alice.submit("brief", "deadline", "{}").await.job_id();
    operator.begin_running(&id, "laser").await;
    let running = operator.post(&format!("/v1/jobs/{id}/attempts"), BEGIN).await.is(201).json();
    let token = running["token"].as_str().unwrap();
    let unsent = format!(r#"{{"token":"{token}","outcome":"aborted","reason":"no paper","then":"retry"}}"#);
    act(&operator, &id, 2, "finish", &unsent).await.is(200);
    tokio::time::sleep(std::time::Duration::from_millis(1600)).await;
    refused(&id, "job-deadline").await;

    let absent = "0198c0de-0000-8000-8000-000000000000";
    begin(&operator, absent).await.problem(404, "job-unknown");
    begin(&operator, "nonsense").await.problem(404, "job-unknown");
}

#[tokio::test]
async fn a_resolution_with_a_result_that_is_not_valid_decides_nothing_unless_it_is_unchecked() {
    let site = Site::with_setup(|setup| {
        let assertions = ["output.page == input.page".to_owned()];
        let required = onejob::validate::Required { schema: None, assertions: &assertions };
        let output = onejob::validate::Check::compile(onejob::validate::Of::Output, &required).unwrap();
        let validator = std::sync::Arc::new(onejob::validate::Validator { output: Some(output), ..Default::default() });
        for route in &mut setup.routes {
            route.validator = Some(std::sync::Arc::clone(&validator));
        }
    })
    .await;
    let (alice, operator) = (site.alice(), site.operator());
    let resolve = |rest: &str| format!(r#"{{"outcome":"succeeded","reason":"found it","result":{{"page":2}}{rest}}}"#);
    let id = alice.submit("outside", "order-1", r#"{"page":1}"#).await.job_id();
    let (_, token) = operator.begin_running(&id, "laser").await;
    act(&operator, &id, 1, "finish", &format!(r#"{{"token":"{token}","outcome":"unknown","reason":"no answer"}}"#)).await.is(200);
    let before = site.redis.dump().await;
    let problem = act(&operator, &id, 1, "resolve", &resolve("")).await.problem(422, "output-invalid");
    assert_eq!((problem["job_id"].clone(), problem["faults"][0]["rule"].clone()), (json!(id), json!("assertion 1")));
    assert_eq!(site.redis.dump().await, before);
    let taken = act(&operator, &id, 1, "resolve", &resolve(r#","unchecked":true"#)).await.is(200).json();
    assert_eq!(taken["status"], "won");

    // An executor's is recorded as what it is.
    let id = alice.submit("outside", "order-2", r#"{"page":1}"#).await.job_id();
    let (_, token) = operator.begin_running(&id, "laser").await;
    let finish = format!(r#"{{"token":"{token}","outcome":"succeeded","result":{{"page":2}}}}"#);
    let finished = act(&operator, &id, 1, "finish", &finish).await.is(200).json();
    assert_eq!(finished["status"], "recorded");
    let job = alice.get(&format!("/v1/jobs/{id}")).await.is(200).json();
    assert_eq!(job["state"], "failed");
    assert!(job["reason"].as_str().unwrap().starts_with("invalid_output: "), "{job}");
}

/// A pending job is its gateway's for a lease: nobody from outside overtakes it.
#[tokio::test]
async fn a_job_that_its_gateway_is_about_to_try_again_is_too_early_for_others() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("print", "order-1", r#"{"simulate":"refuse_status=429,retry_after=30s"}"#).await.job_id();
    alice.in_state(&id, "pending").await;
    let answer = begin(&operator, &id).await;
    let problem = answer.problem(409, "attempt-too-early");
    assert!(problem["wait_ms"].as_u64().unwrap() > 10_000, "{problem}");
    assert!(answer.header("retry-after").parse::<u64>().unwrap() >= 10);
    assert_eq!(site.provider.ledger().received, 1);
}

#[tokio::test]
async fn who_does_not_hold_an_attempt_is_fenced() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("outside", "order-1", "{}").await.job_id();
    begin(&operator, &id).await.is(201);
    let other = "00000000-0000-4000-8000-000000000000";
    let before = site.redis.dump().await;
    let mark = act(&operator, &id, 1, "running", &format!(r#"{{"token":"{other}"}}"#)).await.problem(409, "attempt-fenced");
    assert_eq!((mark["why"].clone(), mark["attempt"].clone()), (json!("token"), json!(1)));
    let extend = format!(r#"{{"token":"{other}","sequence":1,"lease_ms":60000}}"#);
    act(&operator, &id, 1, "lease", &extend).await.problem(409, "attempt-fenced");
    let finish = format!(r#"{{"token":"{other}","outcome":"succeeded","result":1}}"#);
    act(&operator, &id, 1, "finish", &finish).await.problem(404, "job-unknown");
    act(&operator, &id, 7, "finish", &finish).await.problem(404, "job-unknown");
    act(&operator, &id, 0, "finish", &finish).await.problem(404, "job-unknown");
    assert_eq!(site.redis.dump().await, before);
}

#[tokio::test]
async fn nothing_happened_is_believed_after_the_quarantine_or_on_the_providers_word() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("outside", "order-1", "{}").await.job_id();
    let (_, token) = operator.begin_running(&id, "laser").await;
    let before = site.redis.dump().await;
    let resolve = r#"{"outcome":"failed","reason":"empty tray","then":"retry"}"#;
    let refused = act(&operator, &id, 1, "resolve", resolve).await.problem(409, "attempt-not-unknown");
    assert_eq!(refused["state"], "running");
    assert_eq!(site.redis.dump().await, before);
    act(&operator, &id, 1, "finish", &format!(r#"{{"token":"{token}","outcome":"unknown","reason":"no answer"}}"#)).await.is(200);

    let before = site.redis.dump().await;
    for outcome in ["failed", "canceled"] {
        let body = format!(r#"{{"outcome":"{outcome}","reason":"empty tray","then":"retry"}}"#);
        let answer = act(&operator, &id, 1, "resolve", &body).await;
        let problem = answer.problem(409, "attempt-quarantined");
        let wait_ms = problem["wait_ms"].as_u64().unwrap();
        assert!(wait_ms <= QUARANTINE_MS && wait_ms > QUARANTINE_MS - 60_000, "{problem}");
        assert_eq!(problem["wait_seconds"].as_u64().unwrap(), wait_ms.div_ceil(1000));
        assert_eq!(answer.header("retry-after"), problem["wait_seconds"].to_string());
        assert!(problem["until_ms"].as_u64().unwrap() > 1_700_000_000_000);
    }
    assert_eq!(site.redis.dump().await, before);

    let path = format!("/v1/jobs/{id}/attempts/1/resolve");
    let headers = [("content-type", "application/json"), ("onejob-request-id", "decision-1")];
    let word = r#"{"outcome":"canceled","reason":"the provider stopped it","word":"provider","actor":"laser","then":"retry"}"#;
    let resolved = operator.send("POST", &path, &headers, word).await.is(200);
    assert_eq!(resolved.json(), json!({"status": "recorded", "job": "pending"}));
    assert_eq!(resolved.header("onejob-request-id"), "decision-1");
    let repeated = operator.send("POST", &path, &headers, word).await.is(200);
    assert_eq!(repeated.json()["status"], "repeated");
    let job = alice.get(&format!("/v1/jobs/{id}")).await.json();
    let events: Vec<_> = job["events"].as_array().unwrap().iter().filter(|event| event["event"] == "resolved").collect();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0]["actor"], "laser");
    begin(&operator, &id).await.is(201);
}

#[tokio::test]
async fn an_unknown_attempt_is_resolved_as_succeeded_with_its_result() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("hasty", "order-1", r#"{"simulate":"hang"}"#).await.job_id();
    alice.in_state(&id, "unknown").await;
    let body = r#"{"outcome":"succeeded","reason":"seen in the tray","result":"page","content_type":"text/plain","status":201}"#;
    let resolved = act(&operator, &id, 1, "resolve", body).await.is(200).json();
    assert_eq!(resolved["status"], "won");
    let job = alice.get(&format!("/v1/jobs/{id}")).await.json();
    assert_eq!(job["result"], json!({"status": 201, "content_type": "text/plain", "body_encoding": "text", "body": "page"}));
}

#[tokio::test]
async fn abandoning_is_by_name_and_leaves_the_job_indeterminate() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("hasty", "order-1", r#"{"simulate":"hang"}"#).await.job_id();
    alice.in_state(&id, "unknown").await;
    let resolved = act(&operator, &id, 1, "resolve", r#"{"outcome":"abandoned","reason":"nobody answers the phone"}"#).await;
    assert_eq!(resolved.is(200).json()["job"], "indeterminate");
    let job = alice.get(&format!("/v1/jobs/{id}")).await.json();
    assert_eq!(job["events"].as_array().unwrap().last().unwrap()["actor"], "operator");
}

#[tokio::test]
async fn what_an_executor_says_is_checked_before_it_is_passed_on() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("outside", "order-1", "{}").await.job_id();
    let before = site.redis.dump().await;
    for body in [
        "{}",
        r#"{"provider":"","lease_ms":60000}"#,
        r#"{"provider":"laser","lease_ms":99}"#,
        r#"{"provider":"laser","lease_ms":3600001}"#,
        r#"{"provider":"laser","lease_ms":"1s"}"#,
        r#"{"provider":"laser","lease_ms":60000,"token":"mine"}"#,
    ] {
        operator.post(&format!("/v1/jobs/{id}/attempts"), body).await.problem(400, "request-invalid");
    }
    assert_eq!(site.redis.dump().await, before);
    let (_, token) = operator.begin_running(&id, "laser").await;
    let before = site.redis.dump().await;
    for rest in [
        r#""outcome":"won""#,
        r#""outcome":"failed""#,
        r#""outcome":"failed","reason":"\u001b[2J""#,
        r#""outcome":"failed","reason":"two\nlines""#,
        r#""outcome":"unknown","reason":"x","result":1"#,
        r#""outcome":"succeeded","result":1,"status":99"#,
        r#""outcome":"succeeded","result":{"a":1},"status":204"#,
        r#""outcome":"succeeded","result":{"a":1},"status":205"#,
        r#""outcome":"succeeded","result":{"a":1},"status":304"#,
        r#""outcome":"succeeded","result":1,"content_type":"text/plain""#,
        r#""outcome":"succeeded","result":"x","content_type":"text/plain\r\nx: y""#,
        r#""outcome":"succeeded","status":200"#,
    ] {
        act(&operator, &id, 1, "finish", &format!(r#"{{"token":"{token}",{rest}}}"#)).await.problem(400, "request-invalid");
    }
    let long = "x".repeat(501);
    let body = format!(r#"{{"token":"{token}","outcome":"failed","reason":"{long}"}}"#);
    act(&operator, &id, 1, "finish", &body).await.problem(400, "request-invalid");
    act(&operator, &id, 1, "running", &format!(r#"{{"token":"{token}","request_hash":"ab"}}"#))
        .await
        .problem(400, "request-invalid");
    assert_eq!(site.redis.dump().await, before);
    // Nothing to tell is 204, not an absent result.
    act(&operator, &id, 1, "finish", &format!(r#"{{"token":"{token}","outcome":"succeeded"}}"#)).await.is(200);
    assert_eq!(alice.get(&format!("/v1/jobs/{id}")).await.json()["result"]["status"], 204);
}

#[tokio::test]
async fn attempts_that_are_used_up_are_told_so() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("race", "order-1", "{}").await.job_id();
    // Three touch a provider; the third may still be running beside the second while the fourth is refused.
    for number in 1..=2 {
        let (begun, token) = operator.begin_running(&id, "laser").await;
        assert_eq!(begun, number);
        let failed = format!(r#"{{"token":"{token}","outcome":"failed","reason":"jam","then":"retry"}}"#);
        act(&operator, &id, number, "finish", &failed).await.is(200);
    }
    operator.begin_running(&id, "laser").await;
    until("the race may go on", async || {
        let answer = begin(&operator, &id).await;
        answer.json()["type"] == "urn:onejob:problem:attempts-exhausted"
    })
    .await;
    let problem = begin(&operator, &id).await.problem(409, "attempts-exhausted");
    assert_eq!(problem["attempts"], 3);
}
