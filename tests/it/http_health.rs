//! What watches the gateway: alive, ready, counted, described.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::cli::onejob;
use crate::http_support::Site;
use crate::support::{Redis, until};

#[tokio::test]
async fn health_needs_no_credential() {
    let site = Site::start().await;
    let anybody = site.client("");
    assert_eq!(anybody.get("/healthz").await.is(200).text(), "ok\n");
    assert_eq!(anybody.get("/readyz").await.is(200).text(), "ready\n");
    anybody.get("/openapi.json").await.is(200);
    // This gateway was given nothing to render.
    anybody.get("/metrics").await.problem(404, "path-unknown");
}

/// Case 59: `PING` would still work.
#[tokio::test]
async fn readiness_fails_when_no_job_could_be_taken_though_redis_answers() {
    let site = Site::start().await;
    let () = site.redis.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let pong: String = site.redis.command(&["PING"]).await;
    assert_eq!(pong, "PONG");
    let anybody = site.client("");
    let problem = anybody.get("/readyz").await.problem(503, "not-ready");
    assert_eq!(problem["reason"], "out of memory");
    assert_eq!(anybody.get("/healthz").await.is(200).text(), "ok\n");
    let refused = site.alice().submit("print", "k", "{}").await.problem(503, "store-unavailable");
    assert!(refused["detail"].as_str().unwrap().contains("send the same request with the same key again"), "{refused}");
    assert_eq!((refused["source"].clone(), refused["retryable"].clone()), ("store".into(), true.into()));
    let () = site.redis.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    anybody.get("/readyz").await.is(200);
    site.alice().submit("print", "k", "{}").await.is(202);
}

/// Each command of a submit may be denied by itself; a script that needs none of them still runs.
#[tokio::test]
async fn readiness_and_the_doctor_know_every_command_that_a_submit_needs() {
    let site = Site::start().await;
    let anybody = site.client("");
    let url = format!("redis.url={}", site.redis.url());
    let doctor = async || {
        let mut command = onejob();
        command.args(["--json", "--set", &url, "doctor"]);
        command.output().await.unwrap()
    };
    assert!(doctor().await.status.success());
    for denied in ["get", "set", "time", "zadd", "zscore", "zrem", "pexpire", "persist", "publish"] {
        let () = site.redis.command(&["ACL", "SETUSER", "default", &format!("-{denied}")]).await;
        let problem = anybody.get("/readyz").await.problem(503, "not-ready");
        assert_eq!(problem["reason"], "NOPERM", "{denied}");
        let output = doctor().await;
        let told = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(6), "{denied}: {told}");
        assert!(told.contains("NOPERM") && told.contains(denied), "{denied}: {told}");
        let () = site.redis.command(&["ACL", "SETUSER", "default", "+@all"]).await;
        anybody.get("/readyz").await.is(200);
    }
    let canary = |key: &String| key.contains("canary");
    assert!(!site.redis.keys().await.iter().any(canary), "none is left");
}

#[tokio::test]
async fn the_doctor_tells_when_what_redis_appends_is_on_disk() {
    let redis = Redis::start().await;
    let url = format!("redis.url={}", redis.url());
    for (appendonly, appendfsync, verdict, words) in [
        ("no", "everysec", "warning", "appendonly is off"),
        ("yes", "no", "warning", "the system decides when"),
        ("yes", "everysec", "good", "after a second"),
        ("yes", "always", "good", "before it answers"),
    ] {
        let () = redis.command(&["CONFIG", "SET", "appendfsync", appendfsync]).await;
        let () = redis.command(&["CONFIG", "SET", "appendonly", appendonly]).await;
        let output = onejob().args(["--json", "--set", &url, "doctor"]).output().await.unwrap();
        let doctor: Value = serde_json::from_slice(&output.stdout).unwrap();
        let findings = doctor["findings"].as_array().unwrap();
        let finding = findings.iter().find(|finding| finding["check"] == "persistence").unwrap();
        assert_eq!(finding["verdict"], verdict, "{finding}");
        assert!(finding["found"].as_str().unwrap().contains(words), "{finding}");
    }
}

/// Cases 29 and 30: what was claimed before is still told.
#[tokio::test]
async fn out_of_memory_a_duplicate_still_gets_its_answer() {
    let site = Site::start().await;
    let id = site.alice().submit("print", "k", "{}").await.job_id();
    site.alice().ended(&id).await;
    let () = site.redis.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    assert_eq!(site.alice().submit("print", "k", "{}").await.is(200).job_id(), id);
}

/// The same for one whose body has a key of its own.
#[tokio::test]
async fn out_of_memory_a_large_duplicate_still_gets_its_answer() {
    let site = Site::start().await;
    let large = format!(r#"{{"pad":"{}"}}"#, "x".repeat(9000));
    let id = site.alice().submit("print", "k", &large).await.job_id();
    site.alice().ended(&id).await;
    let () = site.redis.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    assert_eq!(site.alice().submit("print", "k", &large).await.is(200).job_id(), id);
}

/// A password was set and the gateway's connections were made anew: an outage like any other for who asks, and no word about the key.
#[tokio::test]
async fn a_redis_that_wants_a_password_is_503_and_the_same_key_runs_once_it_wants_none() {
    let site = Site::start().await;
    let (alice, anybody) = (site.alice(), site.client(""));
    let () = site.redis.command(&["CONFIG", "SET", "requirepass", "open-sesame"]).await;
    // All but the connection that says so.
    let () = site.redis.command(&["CLIENT", "KILL", "SKIPME", "yes"]).await;
    let reason = async || anybody.get("/readyz").await.text();
    until("its connections are anew", async || reason().await.contains("NOAUTH")).await;
    let refused = alice.submit("print", "k", "{}").await.problem(503, "store-unavailable");
    assert!(refused["detail"].as_str().unwrap().contains("(NOAUTH): nothing happened"), "{refused}");
    assert_eq!((refused["source"].clone(), refused["retryable"].clone()), ("store".into(), true.into()));
    assert_eq!(site.provider.ledger().received, 0);
    let () = site.redis.command(&["CONFIG", "SET", "requirepass", ""]).await;
    until("the same key is taken", async || alice.submit("print", "k", "{}").await.status < 300).await;
    alice.submit_with("print", "k", "{}", &[("prefer", "wait=20")]).await.is(200);
    assert_eq!(site.provider.ledger().executed, 1);
}

#[tokio::test]
async fn a_redis_that_does_not_answer_is_503_and_the_provider_is_not_called() {
    let site = Site::start().await;
    let alice = site.alice();
    site.redis.pause();
    let answer = alice.submit("print", "k", "{}").await;
    site.redis.resume();
    let problem = answer.problem(503, "store-unavailable");
    assert!(problem["detail"].as_str().unwrap().contains("the job may exist"), "{problem}");
    assert_eq!(site.provider.ledger().received, 0);
    // The same key again leads to one job, whether or not the first call arrived.
    until("the same key is answered", async || {
        alice.submit_with("print", "k", "{}", &[("prefer", "wait=20")]).await.status == 200
    })
    .await;
    assert_eq!(site.provider.ledger().executed, 1);
}

/// Case 58: whatever the keys, owners, jobs and paths, the labels are words of closed sets; and a scrape asks Redis nothing.
#[tokio::test]
async fn labels_are_bounded_and_a_scrape_costs_redis_nothing() {
    let render = onejob::server::metrics_recorder().unwrap();
    let site = Site::with(|options| options.metrics = Some(render)).await;
    let alice = site.alice();
    let secret = "very-secret-key";
    for place in 0..30 {
        let id = alice.submit("print", &format!("{secret}-{place}"), "{}").await.job_id();
        alice.ended(&id).await;
        alice.get(&format!("/nowhere/{place}")).await.problem(404, "path-unknown");
        alice.send("BREW", &format!("/v1/jobs/{place}"), &[], "").await.problem(405, "method-not-allowed");
        alice.get(&format!("/proxy/route-{place}/x")).await.problem(404, "route-unknown");
        site.client(&format!("mallory-{place}")).get("/v1/jobs?state=open").await.problem(401, "unauthorized");
    }
    let scrape = site.client("").get("/metrics").await.is(200);
    assert!(scrape.header("content-type").starts_with("text/plain; version=0.0.4"));
    let text = scrape.text();
    let counted = |line: &&str| line.starts_with("onejob_http_requests_total{") && !line.ends_with(" 0");
    let requests: BTreeSet<&str> = text.lines().filter(counted).collect();
    let labels: BTreeSet<&str> = requests.iter().map(|line| line.rsplit_once(' ').unwrap().0).collect();
    let expected = BTreeSet::from([
        r#"onejob_http_requests_total{operation="submit_job",status="2xx"}"#,
        r#"onejob_http_requests_total{operation="read_job",status="2xx"}"#,
        r#"onejob_http_requests_total{operation="read_job",status="4xx"}"#,
        r#"onejob_http_requests_total{operation="none",status="4xx"}"#,
        r#"onejob_http_requests_total{operation="pass_through",status="4xx"}"#,
        r#"onejob_http_requests_total{operation="list_jobs",status="4xx"}"#,
    ]);
    assert_eq!(labels, expected);
    for word in [secret, "mallory", "alice", "route-", "nowhere"] {
        assert!(!text.contains(word), "{word}");
    }
    assert!(text.contains(r#"onejob_submits_total{result="created"} 30"#), "{text}");

    let calls = async || {
        let info: String = site.redis.command(&["INFO", "commandstats"]).await;
        info.lines()
            .filter(|line| line.starts_with("cmdstat_evalsha:") || line.starts_with("cmdstat_eval:"))
            .map(|line| line.split("calls=").nth(1).unwrap().split(',').next().unwrap().parse::<u64>().unwrap())
            .sum::<u64>()
    };
    let before = calls().await;
    for _ in 0..50 {
        site.client("").get("/metrics").await.is(200);
    }
    let scripts = calls().await - before;
    // The sweeper goes on meanwhile; fifty scrapes add nothing to it.
    assert!(scripts < 50, "{scripts} scripts ran during 50 scrapes");
}

/// What is documented is there, and what is there is documented.
#[tokio::test]
async fn the_description_and_the_router_have_the_same_paths() {
    let site = Site::start().await;
    let description: Value = serde_json::from_str(&onejob::server::openapi()).unwrap();
    assert_eq!(site.client("").get("/openapi.json").await.is(200).json(), description);
    // Every reference leads somewhere.
    let text = description.to_string();
    for reference in text.split("\"$ref\":\"#").skip(1) {
        let pointer = reference.split('"').next().unwrap();
        assert!(description.pointer(pointer).is_some(), "{pointer}");
    }
    let mut operations = BTreeSet::new();
    for (path, item) in description["paths"].as_object().unwrap() {
        let concrete = path
            .replace("{id}", "0198c0de-0000-8000-8000-000000000000")
            .replace("{number}", "1")
            .replace("{route}", "print")
            .replace("{provider}", "patient")
            .replace("{rest}", "x");
        for (method, operation) in item.as_object().unwrap() {
            let method = method.to_uppercase();
            let answer = site.client("").send(&method, &concrete, &[], "").await;
            // Without a token: 401, or for what needs none an answer; never "nothing is here".
            let found = answer.status == 401 || !operation["security"].is_null();
            assert!(found, "{method} {path}: {answer:?}");
            operations.insert(format!("{method} {path}"));
        }
        // A method that is not documented is not there.
        for method in ["GET", "POST", "PUT", "PATCH", "DELETE"] {
            if item.get(method.to_lowercase()).is_none() {
                site.alice().send(method, &concrete, &[], "").await.problem(405, "method-not-allowed");
            }
        }
    }
    let expected = [
        "DELETE /proxy/{route}/{rest}",
        "GET /healthz",
        "GET /metrics",
        "GET /openapi.json",
        "GET /proxy/{route}/{rest}",
        "GET /readyz",
        "GET /v1/jobs",
        "GET /v1/jobs/{id}",
        "HEAD /proxy/{route}/{rest}",
        "PATCH /proxy/{route}/{rest}",
        "POST /proxy/{route}/{rest}",
        "POST /v1/cancel",
        "POST /v1/dedup/{stream}",
        "POST /v1/dedup/{stream}/claim",
        "POST /v1/dedup/{stream}/commit",
        "POST /v1/dedup/{stream}/release",
        "POST /v1/jobs",
        "POST /v1/jobs/{id}/attempts",
        "POST /v1/jobs/{id}/attempts/{number}/finish",
        "POST /v1/jobs/{id}/attempts/{number}/lease",
        "POST /v1/jobs/{id}/attempts/{number}/resolve",
        "POST /v1/jobs/{id}/attempts/{number}/running",
        "POST /v1/jobs/{id}/cancel",
        "POST /v1/jobs/{id}/reopen",
        "POST /v1/webhooks/{provider}/{id}/{number}",
        "PUT /proxy/{route}/{rest}",
    ];
    assert_eq!(operations, expected.map(str::to_owned).into_iter().collect());
}
