//! The four sentences that everything else serves, over real HTTP.

use serde_json::json;

use crate::http_support::{Site, serve};
use crate::support::until;

/// Whatever the network does to the second click: one job, one call at the provider.
#[tokio::test]
async fn two_simultaneous_submits_of_one_key_are_one_job_and_one_execution() {
    let site = Site::start().await;
    let other = serve(&site.redis, &site.provider, |_| {}).await;
    let (here, there) = (site.alice(), other.client.with_token("alice"));
    for round in 0..20 {
        site.provider.clear_ledger();
        let key = format!("click-{round}");
        let input = r#"{"simulate":"delay=20ms"}"#;
        let (one, two) = tokio::join!(here.submit("print", &key, input), there.submit("print", &key, input));
        assert_eq!(one.job_id(), two.job_id());
        assert_eq!(one.header("location"), two.header("location"));
        let mut replayed = [one.header("idempotency-replayed"), two.header("idempotency-replayed")];
        replayed.sort_unstable();
        assert_eq!(replayed, ["false", "true"]);
        let ended = here.ended(&one.job_id()).await;
        assert_eq!(ended["state"], "succeeded");
        let ledger = site.provider.ledger();
        assert_eq!((ledger.received, ledger.executed), (1, 1), "{ledger:?}");
        assert_eq!(ledger.entries[0].job_id, one.job_id());
    }
}

#[tokio::test]
async fn another_request_under_a_known_key_is_a_conflict_and_changes_nothing() {
    let site = Site::start().await;
    let alice = site.alice();
    let first = alice.submit("print", "order-1", r#"{"copies":1}"#).await;
    alice.ended(&first.job_id()).await;
    let before = site.redis.dump().await;

    let second = alice.submit("print", "order-1", r#"{"copies":2}"#).await;

    let problem = second.problem(409, "key-conflict");
    assert_eq!(problem["job_id"], first.job_id());
    assert_eq!(site.redis.dump().await, before);
    assert_eq!(site.provider.ledger().received, 1);
}

/// A timeout is `unknown`, never `failed`: nobody may begin again before somebody knows.
#[tokio::test]
async fn a_timeout_is_unknown_and_blocks_every_attempt_until_it_is_resolved() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let submitted = alice.submit("hasty", "order-1", r#"{"simulate":"hang"}"#).await.is(202);
    let id = submitted.job_id();
    let job = alice.in_state(&id, "unknown").await;
    assert_eq!(job["attempts"][0]["state"], "unknown");

    // The client clicks again; an executor tries; an operator says "it failed" too early: nothing begins.
    let again = alice.submit("hasty", "order-1", r#"{"simulate":"hang"}"#).await.is(202);
    assert_eq!((again.job_id(), again.json()["state"].clone()), (id.clone(), json!("unknown")));
    let before = site.redis.dump().await;
    let begin = r#"{"provider":"laser","lease_ms":60000}"#;
    let refused = operator.post(&format!("/v1/jobs/{id}/attempts"), begin).await.problem(409, "attempt-blocked");
    assert_eq!((refused["attempt"].clone(), refused["state"].clone()), (json!(1), json!("unknown")));
    let resolve = format!("/v1/jobs/{id}/attempts/1/resolve");
    let early = operator.post(&resolve, r#"{"outcome":"failed","reason":"the tray is empty","then":"retry"}"#).await;
    early.problem(409, "attempt-quarantined");
    assert_eq!(site.redis.dump().await, before);
    assert_eq!(site.provider.ledger().received, 1);

    // The provider's own word is believed; only then does the next attempt begin.
    site.provider.set_behaviour("succeed").unwrap();
    let word = r#"{"outcome":"failed","reason":"the provider says it printed nothing","word":"provider","then":"end"}"#;
    let resolved = operator.post(&resolve, word).await.is(200).json();
    assert_eq!((resolved["status"].clone(), resolved["job"].clone()), (json!("recorded"), json!("failed")));
    assert_eq!(site.provider.ledger().received, 1);
    let reopened = operator.post(&format!("/v1/jobs/{id}/reopen"), r#"{"reason":"print it now"}"#).await;
    assert_eq!(reopened.is(200).json()["status"], "reopened");
    until_second_attempt(&site, &id).await;
}

async fn until_second_attempt(site: &Site, id: &str) {
    until("the provider is asked a second time", async || site.provider.ledger_of(id).received == 2).await;
}

/// The reason why results are compared and set: the first one out, the official primary, comes back last.
#[tokio::test]
async fn of_two_attempts_that_finish_in_reverse_order_the_late_one_loses_even_as_the_primary() {
    let site = Site::start().await;
    let (alice, operator) = (site.alice(), site.operator());
    let id = alice.submit("race", "order-1", "{}").await.is(202).job_id();
    let (primary, primary_token) = operator.begin_running(&id, "primary").await;
    let (fallback, fallback_token) = operator.begin_running(&id, "fallback").await;
    assert_eq!((primary, fallback), (1, 2));
    let finish = |token: &str, by: &str| format!(r#"{{"token":"{token}","outcome":"succeeded","result":{{"by":"{by}"}}}}"#);

    let won = operator.post(&format!("/v1/jobs/{id}/attempts/2/finish"), &finish(&fallback_token, "fallback")).await;
    assert_eq!(won.is(200).json(), json!({"status": "won", "version": 1, "attempt": "succeeded", "job": "succeeded"}));
    let late = operator.post(&format!("/v1/jobs/{id}/attempts/1/finish"), &finish(&primary_token, "primary")).await;
    assert_eq!(late.is(200).json(), json!({"status": "discarded", "attempt": "discarded", "completed_by": 2}));

    let job = alice.get(&format!("/v1/jobs/{id}")).await.is(200).json();
    assert_eq!((job["completed_by"].clone(), job["result"]["body"].clone()), (json!(2), json!({"by": "fallback"})));
    assert_eq!((job["version"].clone(), job["provider"].clone()), (json!(1), json!("fallback")));
    assert_eq!(job["attempts"][0]["state"], "discarded");
    // Told again, it loses again.
    let again = operator.post(&format!("/v1/jobs/{id}/attempts/1/finish"), &finish(&primary_token, "primary")).await;
    assert_eq!(again.is(200).json()["status"], "repeated");
}
