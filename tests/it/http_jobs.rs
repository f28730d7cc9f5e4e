//! Jobs over HTTP: the key, the answer, what a document holds and what it never holds.

use std::collections::BTreeSet;

use onejob::fingerprint::{digest, second_half};
use serde_json::{Value, json};

use crate::http_support::{PROVIDER_TOKEN, Site};
use crate::support::until;

/// What is refused is refused before anything is claimed, and the key itself is never repeated.
#[tokio::test]
async fn an_input_that_is_not_as_its_route_requires_is_422_and_no_job() {
    let site = Site::with_setup(|setup| {
        let schema = br#"{"required":["copies"],"properties":{"copies":{"maximum":9},"name":{"maxLength":3}}}"#;
        let required = onejob::validate::Required { schema: Some(schema), assertions: &[] };
        let input = onejob::validate::Check::compile(onejob::validate::Of::Input, &required).unwrap();
        let validator = onejob::validate::Validator { input: Some(input), ..Default::default() };
        setup.routes[0].validator = Some(std::sync::Arc::new(validator));
    })
    .await;
    let alice = site.alice();
    let before = site.redis.dump().await;
    let answer = alice.submit("print", "order-1", r#"{"copies":4711,"name":"private"}"#).await;
    let problem = answer.problem(422, "input-invalid");
    let mut places: Vec<String> = problem["faults"]
        .as_array()
        .unwrap()
        .iter()
        .map(|fault| format!("{} {}", fault["pointer"].as_str().unwrap(), fault["rule"].as_str().unwrap()))
        .collect();
    places.sort();
    assert_eq!(places, ["/copies maximum", "/name maxLength"]);
    assert!(!answer.text().contains("4711") && !answer.text().contains("private"), "{answer:?}");
    assert_eq!(site.redis.dump().await, before);
    // The key is free, also on the proxy.
    let proxied = alice.send("POST", "/proxy/print/x", &[("idempotency-key", "order-1")], "{}").await;
    proxied.problem(422, "input-invalid");
    let id = alice.submit("print", "order-1", r#"{"copies":9}"#).await.is(202).job_id();
    alice.ended(&id).await;
    assert_eq!(site.provider.ledger().received, 1);
}

#[tokio::test]
async fn a_missing_repeated_or_malformed_key_is_refused_and_nothing_is_claimed() {
    let site = Site::start().await;
    let alice = site.alice();
    let body = r#"{"route":"print","input":{}}"#;
    let json_type = ("content-type", "application/json");
    alice.post("/v1/jobs", body).await.problem(400, "idempotency-key-missing");

    let long = "k".repeat(256);
    for key in ["", "\"\"", "\"secret-key", "\"secret-key\" x", "secret key", "\"secret\",\"key\"", long.as_str()] {
        let answer = alice.send("POST", "/v1/jobs", &[json_type, ("idempotency-key", key)], body).await;
        let problem = answer.problem(400, "idempotency-key-invalid");
        assert!(!answer.text().contains("secret") && !answer.text().contains("kkk"), "{problem}");
    }
    let problem = alice.send("POST", "/v1/jobs", &[json_type, ("idempotency-key", &long)], body).await.json();
    assert_eq!(problem["detail"], "the idempotency key has 256 characters; the limit is 255");
    let twice = [json_type, ("idempotency-key", "a"), ("idempotency-key", "b")];
    let problem = alice.send("POST", "/v1/jobs", &twice, body).await.problem(400, "idempotency-key-invalid");
    assert_eq!(problem["detail"], "the request has 2 Idempotency-Key headers; the limit is 1");
    // The same key twice is still two.
    let same = [json_type, ("idempotency-key", "a"), ("idempotency-key", "a")];
    alice.send("POST", "/v1/jobs", &same, body).await.problem(400, "idempotency-key-invalid");

    assert!(site.redis.dump().await.is_empty());
    assert_eq!(site.provider.ledger().received, 0);
    alice.submit("print", &"k".repeat(255), "{}").await.is(202);
}

#[tokio::test]
async fn a_quoted_and_a_bare_key_are_one_key() {
    let site = Site::start().await;
    let bare = site.alice().submit("print", "order-1", "{}").await;
    let quoted = site.alice().submit("print", "\"order-1\"", "{}").await;
    assert_eq!(bare.job_id(), quoted.job_id());
    assert_eq!((bare.header("idempotency-replayed"), quoted.header("idempotency-replayed")), ("false", "true"));
}

/// Case 1.
#[tokio::test]
async fn a_hundred_concurrent_submits_are_one_job_and_one_execution_with_equal_results() {
    let site = Site::start().await;
    let submits =
        (0..100).map(|_| {
            let alice = site.alice();
            async move {
                alice.submit_with("print", "order-1", r#"{"simulate":"delay=100ms"}"#, &[("prefer", "wait=20")]).await.is(200)
            }
        });
    let answers = futures_util::future::join_all(submits).await;
    let ids: BTreeSet<String> = answers.iter().map(|answer| answer.job_id()).collect();
    let results: BTreeSet<String> = answers.iter().map(|answer| answer.json()["result"].to_string()).collect();
    let created = answers.iter().filter(|answer| answer.header("idempotency-replayed") == "false").count();
    assert_eq!((ids.len(), results.len(), created), (1, 1, 1));
    let ledger = site.provider.ledger();
    assert_eq!((ledger.received, ledger.executed), (1, 1));
}

/// Case 5, by the route alone; method, path and content type are the proxy's.
#[tokio::test]
async fn another_route_under_a_known_key_is_a_conflict() {
    let site = Site::start().await;
    let first = site.alice().submit("print", "order-1", "{}").await;
    let problem = site.alice().submit("chat", "order-1", "{}").await.problem(409, "key-conflict");
    assert_eq!(problem["job_id"], first.job_id());
}

#[tokio::test]
async fn a_conflict_is_422_where_it_is_set_so() {
    let site = Site::with(|options| options.conflict = onejob::server::ConflictStatus::UnprocessableContent).await;
    site.alice().submit("print", "order-1", "1").await;
    site.alice().submit("print", "order-1", "2").await.problem(422, "key-conflict");
}

/// Case 7: 9007199254740993 and …992 are one double and two numbers.
#[tokio::test]
async fn digits_and_repeated_names_count_and_white_space_does_not() {
    let site = Site::start().await;
    let alice = site.alice();
    let first = alice.submit("print", "n", r#"{"n":9007199254740993,"m":1}"#).await;
    alice.submit("print", "n", r#"{"n":9007199254740992,"m":1}"#).await.problem(409, "key-conflict");
    alice.submit("print", "n", r#"{"n":9007199254740993,"n":9007199254740993,"m":1}"#).await.problem(409, "key-conflict");
    let spaced = alice.submit("print", "n", "{ \"m\" : 1,\n \"n\":9007199254740993 }").await;
    assert_eq!(spaced.job_id(), first.job_id());
}

/// The provider is sent the very bytes: no number is read and written again.
#[tokio::test]
async fn the_input_reaches_the_provider_as_it_was_written() {
    let site = Site::start().await;
    let input = "{ \"n\": 1.00, \"big\":123456789012345678901234567890 ,\"n\":1e5}";
    let id = site.alice().submit("print", "bytes", input).await.is(202).job_id();
    site.alice().ended(&id).await;
    let sent = &site.provider.ledger().entries[0];
    let hash: String = onejob::fingerprint::sha256(input.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!((sent.body_sha256.as_str(), sent.method.as_str(), sent.path.as_str()), (hash.as_str(), "POST", "/work"));
}

/// Case 8, and what else an answer carries.
#[tokio::test]
async fn an_attached_submit_names_the_first_ones_job_everywhere() {
    let site = Site::start().await;
    let alice = site.alice();
    let first = alice.submit("print", "order-1", r#"{"simulate":"delay=300ms"}"#).await.is(202);
    let id = first.job_id();
    let attached = alice.submit("print", "order-1", r#"{"simulate":"delay=300ms"}"#).await.is(202);
    for answer in [&first, &attached] {
        assert_eq!(answer.job_id(), id);
        assert_eq!(answer.header("location"), format!("/v1/jobs/{id}"));
        assert_eq!(answer.header("onejob-job-id"), id);
        assert_eq!(answer.header("retry-after"), "1");
        assert!(answer.header("idempotency-expires").is_empty());
    }
    let ended = alice.ended(&id).await;
    let replay = alice.submit("print", "order-1", r#"{"simulate":"delay=300ms"}"#).await.is(200);
    assert_eq!(replay.json(), ended);
    assert_eq!(replay.header("idempotency-replayed"), "true");
    assert!(replay.header("idempotency-expires").ends_with(" GMT"));
    assert_eq!(site.provider.ledger().received, 1);
}

/// Case 44, and that nothing secret is in a document.
#[tokio::test]
async fn a_document_says_who_answered_and_holds_no_secret() {
    let site = Site::start().await;
    let alice = site.alice();
    let id = alice.submit("print", "order-1", r#"{"simulate":"echo_credential"}"#).await.job_id();
    let job = alice.ended(&id).await;
    assert_eq!(
        (job["state"].clone(), job["owner"].clone(), job["route"].clone()),
        (json!("succeeded"), json!("alice"), json!("print"))
    );
    assert_eq!((job["provider"].clone(), job["model"].clone()), (json!("patient"), json!("simulated-1")));
    assert_eq!((job["completed_by"].clone(), job["version"].clone()), (json!(1), json!(1)));
    let attempt = &job["attempts"][0];
    assert_eq!(
        (attempt["number"].clone(), attempt["state"].clone(), attempt["model"].clone()),
        (json!(1), json!("succeeded"), json!("simulated-1"))
    );
    assert!(attempt.get("token").is_none() && attempt.get("request_hash").is_none());
    assert_eq!((job["result"]["status"].clone(), job["result"]["body_encoding"].clone()), (json!(200), json!("json")));
    assert_eq!(job["result"]["body"]["execution"], 1);
    // Case 52.
    assert!(!job.to_string().contains(PROVIDER_TOKEN), "{job}");
}

/// Case 52, for a refusal: what the provider says of our key is told without the key.
#[tokio::test]
async fn a_refusal_that_echoes_the_credential_is_told_without_it() {
    let site = Site::start().await;
    let alice = site.alice();
    let input = r#"{"simulate":"refuse_status=401,echo_credential"}"#;
    let id = alice.submit("print", "order-1", input).await.job_id();
    let job = alice.ended(&id).await;
    assert_eq!((job["state"].clone(), job["result"]["status"].clone()), (json!("failed"), json!(401)));
    let replay = alice.submit("print", "order-1", input).await.is(200);
    let listed = site.operator().get("/v1/jobs?state=open").await;
    for text in [job.to_string(), replay.text(), listed.text(), format!("{:?}", replay.headers)] {
        assert!(!text.contains(PROVIDER_TOKEN), "{text}");
    }
    assert!(job.to_string().contains("[hidden]"), "{job}");
}

#[tokio::test]
async fn an_entity_tag_stands_for_one_revision() {
    let site = Site::start().await;
    let alice = site.alice();
    let id = alice.submit("outside", "order-1", "{}").await.job_id();
    let path = format!("/v1/jobs/{id}");
    let first = alice.get(&path).await.is(200);
    let tag = first.header("etag").to_owned();
    assert_eq!(tag, "\"0.1\"");
    let same = alice.send("GET", &path, &[("if-none-match", &tag)], "").await.is(304);
    assert!(same.body.is_empty() && same.header("etag") == tag);
    site.operator().begin_running(&id, "laser").await;
    let changed = alice.send("GET", &path, &[("if-none-match", &tag)], "").await.is(200);
    assert_ne!(changed.header("etag"), tag);
}

#[tokio::test]
async fn a_preference_to_wait_is_capped_and_acknowledged() {
    let site = Site::with(|options| options.wait_max = std::time::Duration::from_secs(1)).await;
    let alice = site.alice();
    let open = alice.submit_with("outside", "order-1", "{}", &[("prefer", "wait=600")]).await.is(202);
    assert_eq!(open.header("preference-applied"), "wait=1");
    let ended = alice.submit_with("print", "order-2", "{}", &[("prefer", "respond-async, wait=1")]).await;
    assert_eq!(ended.header("preference-applied"), "wait=1");
    let unasked = alice.submit("outside", "order-1", "{}").await.is(202);
    assert!(unasked.header("preference-applied").is_empty());
}

#[tokio::test]
async fn lists_are_the_operators_and_have_no_results() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let open = alice.submit("outside", "order-1", "{}").await.job_id();
    let unknown = alice.submit("hasty", "order-2", r#"{"simulate":"hang"}"#).await.job_id();
    alice.in_state(&unknown, "unknown").await;
    let ids = |list: Value| -> BTreeSet<String> {
        list["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect()
    };
    until("both are listed as open", async || {
        ids(operator.get("/v1/jobs?state=open").await.is(200).json()) == BTreeSet::from([open.clone(), unknown.clone()])
    })
    .await;
    let list = operator.get("/v1/jobs?state=unknown&limit=5").await.is(200).json();
    assert_eq!(ids(list), BTreeSet::from([unknown]));
    for query in ["", "?state=ended", "?state=open&limit=0", "?state=open&limit=1001", "?state=open&limit=x", "?state=open&x=1"] {
        operator.get(&format!("/v1/jobs{query}")).await.problem(400, "request-invalid");
    }
}

#[tokio::test]
async fn a_cancel_ends_what_has_not_begun_and_asks_what_runs() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let pending = alice.submit("outside", "order-1", "{}").await.job_id();
    let request_id = [("onejob-request-id", "cancel-1")];
    let canceled = alice.send("POST", &format!("/v1/jobs/{pending}/cancel"), &request_id, "").await.is(200);
    assert_eq!(canceled.json(), json!({"id": pending, "status": "canceled", "effect": "none"}));
    assert_eq!(canceled.header("onejob-request-id"), "cancel-1");
    let before = site.redis.dump().await;
    let again = alice.send("POST", &format!("/v1/jobs/{pending}/cancel"), &request_id, "").await.is(200);
    assert_eq!(again.json(), canceled.json());
    assert_eq!(site.redis.dump().await, before);

    let running = alice.submit("outside", "order-2", "{}").await.job_id();
    let (_, token) = operator.begin_running(&running, "laser").await;
    let by_key = [("idempotency-key", "order-2"), ("content-type", "application/json")];
    let canceling = alice.send("POST", "/v1/cancel", &by_key, r#"{"reason":"changed my mind"}"#).await.is(202);
    assert_eq!(canceling.json(), json!({"id": running, "status": "canceling", "open_attempts": 1}));
    assert!(!canceling.header("onejob-request-id").is_empty());
    // No attempt begins any more, and a success that comes all the same wins.
    let begin = r#"{"provider":"laser","lease_ms":60000}"#;
    operator.post(&format!("/v1/jobs/{running}/attempts"), begin).await.problem(409, "job-canceling");
    let finish = format!(r#"{{"token":"{token}","outcome":"succeeded","result":1}}"#);
    let finished = operator.post(&format!("/v1/jobs/{running}/attempts/1/finish"), &finish).await;
    assert_eq!(finished.is(200).json()["status"], "won");
    alice.send("POST", "/v1/cancel", &by_key, "{}").await.problem(409, "job-ended");
}

#[tokio::test]
async fn force_ends_at_once_and_is_the_operators() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("outside", "order-1", "{}").await.job_id();
    operator.begin_running(&id, "laser").await;
    let path = format!("/v1/jobs/{id}/cancel");
    let force = r#"{"mode":"force","reason":"fire"}"#;
    let before = site.redis.dump().await;
    alice.post(&path, force).await.problem(403, "forbidden");
    assert_eq!(site.redis.dump().await, before);
    let forced = operator.post(&path, force).await.is(200).json();
    assert_eq!(forced, json!({"id": id, "status": "canceled", "effect": "unknown"}));
    let job = alice.get(&format!("/v1/jobs/{id}")).await.json();
    assert_eq!(
        (job["state"].clone(), job["canceled_by"].clone(), job["reason"].clone()),
        (json!("canceled"), json!("operator"), json!("fire"))
    );
}

#[tokio::test]
async fn only_a_failed_job_is_reopened() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("print", "order-1", r#"{"simulate":"jam"}"#).await.job_id();
    assert_eq!(alice.ended(&id).await["state"], "failed");
    let path = format!("/v1/jobs/{id}/reopen");
    operator.post(&path, r#"{"reason":""}"#).await.problem(400, "request-invalid");
    for attempts in [0, 101] {
        let body = format!(r#"{{"reason":"x","attempts":{attempts}}}"#);
        operator.post(&path, &body).await.problem(400, "request-invalid");
    }
    alice.post(&path, r#"{"reason":"x"}"#).await.problem(403, "forbidden");
    assert_eq!(site.provider.ledger().received, 1);
    let reopened = operator.post(&path, r#"{"reason":"paper removed","attempts":1}"#).await.is(200).json();
    assert_eq!(reopened, json!({"id": id, "status": "reopened", "version": 2}));
    until("the provider is asked again", async || site.provider.ledger().received == 2).await;
    let done = alice.submit("print", "order-2", "{}").await.job_id();
    alice.ended(&done).await;
    let refused = operator.post(&format!("/v1/jobs/{done}/reopen"), r#"{"reason":"x"}"#).await.problem(409, "job-not-failed");
    assert_eq!(refused["state"], "succeeded");
}

#[tokio::test]
async fn bodies_that_are_not_understood_are_refused_by_place_and_never_repeated() {
    let site = Site::start().await;
    let alice = site.alice();
    let json_type = ("content-type", "application/json");
    let key = ("idempotency-key", "order-1");
    for body in [
        "",
        "{",
        "[]",
        "{}",
        r#"{"route":"print"}"#,
        r#"{"input":1}"#,
        r#"{"route":"print","input":1,"secret-member":1}"#,
        r#"{"route":7,"input":"secret"}"#,
        "\u{0}secret",
    ] {
        let answer = alice.send("POST", "/v1/jobs", &[json_type, key], body).await;
        answer.problem(400, "request-invalid");
        assert!(!answer.text().contains("secret"), "{answer:?}");
    }
    alice
        .send("POST", "/v1/jobs", &[key, ("content-type", "text/plain")], r#"{"route":"print","input":1}"#)
        .await
        .problem(415, "media-type-unsupported");
    alice.submit("nowhere", "order-1", "1").await.problem(404, "route-unknown");
    alice.submit(&"r".repeat(1000), "order-1", "1").await.problem(404, "route-unknown");
    assert!(site.redis.dump().await.is_empty());
}

/// Case 10: never an empty body, never a new run.
#[tokio::test]
async fn a_result_whose_bytes_have_vanished_is_an_error_by_name() {
    let site = Site::start().await;
    let alice = site.alice();
    let input = r#"{"simulate":"size=20000"}"#;
    let id = alice.submit("print", "order-1", input).await.job_id();
    let job = alice.ended(&id).await;
    assert!(job["result"]["body"]["padding"].as_str().unwrap().len() > 10_000);
    let mut connection = site.redis.connection();
    let blobs: Vec<String> = redis::cmd("KEYS").arg("oj:*:b:*").query_async(&mut connection).await.unwrap();
    assert_eq!(blobs.len(), 1);
    let _: () = redis::cmd("DEL").arg(&blobs).query_async(&mut connection).await.unwrap();

    let problem = alice.get(&format!("/v1/jobs/{id}")).await.problem(500, "store-corrupt");
    assert_eq!(problem["job_id"], id);
    alice.submit("print", "order-1", input).await.problem(500, "store-corrupt");
    assert_eq!(site.provider.ledger().received, 1);
}

/// What nobody may interpret is told by name, is no absent job, and starts no new run.
#[tokio::test]
async fn a_record_that_cannot_be_used_is_an_error_by_name() {
    let site = Site::start().await;
    let alice = site.alice();
    let id = alice.submit("print", "order-1", "{}").await.job_id();
    alice.ended(&id).await;
    let (record, (bytes, _)) = site.redis.dump().await.pop_first().unwrap();
    let mut connection = site.redis.connection();
    let path = format!("/v1/jobs/{id}");

    // Another owner and key, cut to the same identity.
    let digest = second_half(&digest("alice", "order-1"));
    let place = bytes.windows(16).position(|window| window == digest).unwrap();
    let mut other = bytes.clone();
    other[place + 15] ^= 1;
    let _: () = redis::cmd("SET").arg(&record).arg(&other).query_async(&mut connection).await.unwrap();
    alice.submit("print", "order-1", "{}").await.problem(409, "key-collision");

    let _: () = redis::cmd("SET").arg(&record).arg("not a record").query_async(&mut connection).await.unwrap();
    alice.get(&path).await.problem(500, "store-corrupt");
    alice.submit("print", "order-1", "{}").await.problem(500, "store-corrupt");

    let _: () = redis::cmd("DEL").arg(&record).query_async(&mut connection).await.unwrap();
    let _: () = redis::cmd("LPUSH").arg(&record).arg("1").query_async(&mut connection).await.unwrap();
    alice.get(&path).await.problem(500, "store-refused");
    alice.submit("print", "order-1", "{}").await.problem(500, "store-refused");
    assert_eq!(site.provider.ledger().received, 1);
}

/// Case 12.
#[tokio::test]
async fn a_job_that_is_no_longer_kept_is_410_and_does_not_run_again() {
    let site = Site::start().await;
    let alice = site.alice();
    let id = alice.submit("forgetful", "order-1", "{}").await.job_id();
    until("it is forgotten", async || alice.submit("forgetful", "order-1", "{}").await.status == 410).await;
    let gone = alice.submit("forgetful", "order-1", "{}").await.problem(410, "job-gone");
    assert_eq!((gone["job_id"].clone(), gone["state"].clone()), (json!(id), json!("succeeded")));
    // By its id alone it does not say whose it was.
    site.operator().get(&format!("/v1/jobs/{id}")).await.problem(410, "job-gone");
    alice.get(&format!("/v1/jobs/{id}")).await.problem(410, "job-gone");
    site.bob().get(&format!("/v1/jobs/{id}")).await.problem(404, "job-unknown");
    assert_eq!(site.provider.ledger().received, 1);
}

/// Case 51: the client is gone before the claim is answered; the job runs on as if it had stayed.
#[tokio::test]
async fn a_client_that_goes_away_changes_nothing() {
    use tokio::io::AsyncWriteExt as _;

    let site = Site::start().await;
    let body = r#"{"route":"print","input":{"simulate":"delay=50ms"}}"#;
    for round in 0..20 {
        let request = format!(
            "POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\ncontent-type: application/json\r\n\
             idempotency-key: gone-{round}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = tokio::net::TcpStream::connect(site.gateway.addr).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        // A reset rather than a polite end, at a moment that moves with the round.
        tokio::time::sleep(std::time::Duration::from_micros(round * 100)).await;
        stream.set_zero_linger().unwrap();
        drop(stream);
    }
    let alice = site.alice();
    for round in 0..20 {
        let answer =
            alice.submit_with("print", &format!("gone-{round}"), r#"{"simulate":"delay=50ms"}"#, &[("prefer", "wait=10")]).await;
        assert_eq!(answer.is(200).json()["state"], "succeeded", "round {round}");
    }
    let ledger = site.provider.ledger();
    assert_eq!((ledger.received, ledger.executed), (20, 20));
}
