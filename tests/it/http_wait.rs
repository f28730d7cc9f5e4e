//! Waiting: across gateways, and while one of them stops.

use std::time::{Duration, Instant};

use crate::http_support::{Site, serve};
use crate::support::{SOON, standalone_only, until};

/// Created on one gateway, waited for on another: the wake-up comes by a message, not by the slow poll behind it.
#[tokio::test]
async fn who_waits_on_another_gateway_is_woken_quickly() {
    let site = Site::start().await;
    let other = serve(&site.redis, &site.provider, |_| {}).await;
    let there = other.client.with_token("alice");
    let mut quick = 0;
    for round in 0..5 {
        let key = format!("k{round}");
        let id = site.alice().submit("outside", &key, "{}").await.job_id();
        let (_, token) = site.operator().begin_running(&id, "laser").await;
        let waiting = {
            let (there, path) = (there.clone(), format!("/v1/jobs/{id}"));
            tokio::spawn(async move {
                let answer = there.send("GET", &path, &[("prefer", "wait=20")], "").await;
                (answer, Instant::now())
            })
        };
        // The follower has read the job once before it changes.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let finish = format!(r#"{{"token":"{token}","outcome":"succeeded","result":{round}}}"#);
        let finished = Instant::now();
        site.operator().post(&format!("/v1/jobs/{id}/attempts/1/finish"), &finish).await.is(200);
        let (answer, woken) = waiting.await.unwrap();
        assert_eq!(answer.is(200).json()["result"]["body"], round);
        // The poll would take up to two seconds.
        quick += u32::from(woken.duration_since(finished) < Duration::from_millis(700));
    }
    assert!(quick >= 4, "{quick} of 5 were woken quickly");
}

#[tokio::test]
async fn a_proxied_request_attaches_on_another_gateway() {
    let site = Site::start().await;
    let other = serve(&site.redis, &site.provider, |_| {}).await;
    let headers = [("content-type", "application/json"), ("idempotency-key", "k")];
    let body = r#"{"simulate":"delay=300ms"}"#;
    let (alice, there) = (site.alice(), other.client.with_token("alice"));
    let (one, two) =
        tokio::join!(alice.send("POST", "/proxy/chat/x", &headers, body), there.send("POST", "/proxy/chat/x", &headers, body));
    assert_eq!((one.status, two.status), (200, 200));
    assert_eq!(one.body, two.body);
    assert_eq!(site.provider.ledger().received, 1);
}

/// A stopping gateway keeps nobody: each is told how the job stands, and the job runs on.
#[tokio::test]
async fn waits_end_with_the_jobs_present_state_when_the_gateway_stops() {
    let site = Site::start().await;
    let other = serve(&site.redis, &site.provider, |_| {}).await;
    let alice = site.alice();
    let long = r#"{"simulate":"delay=3s"}"#;
    let submit = {
        let alice = alice.clone();
        tokio::spawn(async move { alice.submit_with("print", "a", long, &[("prefer", "wait=60")]).await })
    };
    let proxied = {
        let alice = alice.clone();
        let headers = [("content-type", "application/json"), ("idempotency-key", "b")];
        tokio::spawn(async move { alice.send("POST", "/proxy/chat/x", &headers, long).await })
    };
    until("both are at the provider", async || site.provider.ledger().received == 2).await;
    let read = {
        let (alice, id) = (alice.clone(), site.provider.ledger().entries[0].job_id.clone());
        tokio::spawn(async move { alice.send("GET", &format!("/v1/jobs/{id}"), &[("prefer", "wait=60")], "").await })
    };
    tokio::time::sleep(Duration::from_millis(200)).await;

    let began = Instant::now();
    site.gateway.stop.cancel();
    assert_eq!(submit.await.unwrap().is(202).json()["state"], "running");
    assert_eq!(read.await.unwrap().is(200).json()["state"], "running");
    let problem = proxied.await.unwrap().problem(504, "still-running");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    tokio::time::timeout(SOON, site.gateway.task).await.unwrap().unwrap();
    assert!(tokio::net::TcpStream::connect(site.gateway.addr).await.is_err());

    // The runtime of the stopped gateway finishes what it has begun; the other gateway tells.
    let there = other.client.with_token("alice");
    assert_eq!(there.ended(problem["job_id"].as_str().unwrap()).await["state"], "succeeded");
    let ledger = site.provider.ledger();
    assert_eq!((ledger.received, ledger.executed), (2, 2));
}

/// After the runtime has been stopped too, nothing new is taken; the same key meets another gateway.
#[tokio::test]
async fn a_stopped_runtime_takes_no_job() {
    let site = Site::start().await;
    site.gateway.runtime.shutdown(Duration::from_secs(1)).await;
    site.alice().submit("print", "k", "{}").await.problem(503, "stopping");
    site.alice().get("/proxy/chat/x").await.problem(503, "stopping");
    site.client("").get("/readyz").await.problem(503, "stopping");
    assert!(site.redis.dump().await.is_empty());
}

/// Who waits where the job runs is told by the call that claims its result: the record is not read at all.
#[tokio::test]
async fn a_job_that_is_waited_for_where_it_runs_is_never_read() {
    if standalone_only("no read asks for the role in a cluster") {
        return;
    }
    let site = Site::start().await;
    let alice = site.alice();
    site.redis.command::<()>(&["CONFIG", "RESETSTAT"]).await;
    for round in 0..5 {
        let answer = alice.submit_with("print", &format!("k{round}"), "{}", &[("prefer", "wait=20")]).await;
        assert_eq!(answer.is(200).json()["state"], "succeeded");
    }
    let stats: String = site.redis.command(&["INFO", "commandstats"]).await;
    // Every read asks for the role first.
    assert!(!stats.contains("cmdstat_role:"), "{stats}");
    // A duplicate is read, if it has to wait at all.
    let id = alice.submit("outside", "slow", "{}").await.job_id();
    let _ = alice.send("GET", &format!("/v1/jobs/{id}"), &[("prefer", "wait=1")], "").await;
    let stats: String = site.redis.command(&["INFO", "commandstats"]).await;
    assert!(stats.contains("cmdstat_role:"), "{stats}");
}
