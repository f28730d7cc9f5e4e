//! Many submits, one job.

use std::time::Duration;

use onejob::job::JobState;
use onejob::provider::Request;
use onejob::runtime::{Replayed, RuntimeOptions, SubmitError, WaitFor};

use super::{Shop, ended, settled, submission};

/// Case 1.
#[tokio::test]
async fn a_hundred_concurrent_submits_of_one_key_are_one_job_and_one_execution() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    let submits = (0..100).map(|_| {
        let runtime = runtime.clone();
        tokio::spawn(async move { runtime.submit(submission("order-1", r#"{"page":1}"#)).await.unwrap() })
    });
    let mut receipts = Vec::new();
    for submit in submits.collect::<Vec<_>>() {
        receipts.push(submit.await.unwrap());
    }
    let id = receipts[0].job.id;
    assert!(receipts.iter().all(|receipt| receipt.job.id == id));
    assert_eq!(receipts.iter().filter(|receipt| receipt.replayed == Replayed::No).count(), 1);
    let job = ended(&runtime, id).await;
    assert_eq!(job.state, JobState::Succeeded);
    assert_eq!(shop.executions(id), 1);
}

/// Case 3, 4: the same request after the end is the same job, answered again.
#[tokio::test]
async fn a_submit_after_the_end_replays_and_executes_nothing() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    let first = runtime.submit(submission("order-1", r#"{"page":1}"#)).await.unwrap();
    let done = ended(&runtime, first.job.id).await;
    let again = runtime.submit(submission("order-1", r#" { "page" : 1 } "#)).await.unwrap();
    assert_eq!(again.replayed, Replayed::Yes);
    assert_eq!(again.job, done);
    assert_eq!(shop.executions(first.job.id), 1);
}

/// Case 5.
#[tokio::test]
async fn another_request_under_the_key_is_a_conflict() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    let first = runtime.submit(submission("order-1", r#"{"page":1}"#)).await.unwrap();
    ended(&runtime, first.job.id).await;
    let mut other = submission("order-1", r#"{"page":1}"#);
    other.request.target = "/elsewhere".to_owned();
    for other in [submission("order-1", r#"{"page":2}"#), other] {
        let refused = runtime.submit(other).await.unwrap_err();
        assert!(matches!(refused, SubmitError::Conflict(id) if id == first.job.id), "{refused}");
    }
    assert_eq!(shop.executions(first.job.id), 1);
}

/// Case 6.
#[tokio::test]
async fn two_owners_with_one_key_have_two_jobs() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    let mine = runtime.submit(submission("order-1", r#"{"page":1}"#)).await.unwrap();
    let mut theirs = submission("order-1", r#"{"page":1}"#);
    theirs.owner = onejob::job::Owner::new("other").unwrap();
    let theirs = runtime.submit(theirs).await.unwrap();
    assert_ne!(mine.job.id, theirs.job.id);
    assert_eq!(theirs.replayed, Replayed::No);
}

#[tokio::test]
async fn a_large_input_and_a_large_result_come_back_byte_for_byte() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("size=100000").unwrap();
    let runtime = shop.gateway().await;
    let page = "x".repeat(50_000);
    let body = format!(r#"{{"page":"{page}"}}"#);
    let receipt = runtime.submit(submission("order-1", &body)).await.unwrap();
    let job = ended(&runtime, receipt.job.id).await;
    let input: Request = runtime.input(&job).await.unwrap();
    assert_eq!(&input.body[..], body.as_bytes());
    let result = runtime.result(&job).await.unwrap().unwrap();
    assert!(result.body.len() >= 100_000);
    serde_json::from_slice::<serde_json::Value>(&result.body).unwrap();
}

/// More than there is room for: nobody is refused, and nobody is run twice.
#[tokio::test]
async fn jobs_beyond_the_providers_limit_wait_and_run_once() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=20ms").unwrap();
    let runtime = shop.gateway_with(|setup| setup.in_flight_max = 2).await;
    let mut ids = Vec::new();
    for order in 0..20 {
        ids.push(runtime.submit(submission(&format!("order-{order}"), "{}")).await.unwrap().job.id);
    }
    for id in ids {
        let job = settled(&runtime, id).await;
        assert_eq!(job.state, JobState::Succeeded);
        assert_eq!(shop.executions(id), 1);
    }
}

/// Looking at it sooner is three calls for nothing, and could take a hint for a dangling one whose claim is still on its way.
#[tokio::test]
async fn a_job_for_executors_outside_is_looked_at_after_a_lease() {
    let shop = Shop::open().await;
    let lease = RuntimeOptions::default().lease;
    let runtime = shop.gateway_with(|setup| setup.route.providers = Vec::new()).await;
    let job = runtime.submit(submission("order-1", "{}")).await.unwrap().job;
    assert_eq!(job.state, JobState::Pending);
    let identity = job.id.identity();
    let due = format!("oj:due:{{{:02x}}}", identity.shard());
    let at_ms: u64 = shop.redis.command(&["ZSCORE", &due, &identity.to_string()]).await;
    let after_ms = at_ms.saturating_sub(job.created_ms);
    assert!(u128::from(after_ms).abs_diff(lease.as_millis()) < 5_000, "{after_ms} ms");
}

#[tokio::test]
async fn an_unknown_route_is_refused_by_name() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    let mut astray = submission("order-1", "{}");
    astray.route = "scan".to_owned();
    let refused = runtime.submit(astray).await.unwrap_err();
    assert_eq!(refused.to_string(), r#"there is no route "scan""#);
    assert!(shop.redis.keys().await.iter().all(|key| key.ends_with("meta")), "nothing was written");
}

#[tokio::test]
async fn who_submits_and_waits_is_told_the_end_without_a_read() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    shop.redis.command::<()>(&["CONFIG", "RESETSTAT"]).await;
    let receipt = runtime.submit_and_wait(submission("order-1", "{}"), WaitFor::Ended, Duration::from_secs(20)).await.unwrap();
    assert_eq!((receipt.job.state, receipt.replayed), (JobState::Succeeded, Replayed::No));
    let stats: String = shop.redis.command(&["INFO", "commandstats"]).await;
    // Every read asks for the role first.
    assert!(!stats.contains("cmdstat_role:"), "{stats}");
    let again = runtime.submit_and_wait(submission("order-1", "{}"), WaitFor::Ended, Duration::from_secs(20)).await.unwrap();
    assert_eq!((again.job, again.replayed), (receipt.job, Replayed::Yes));
}
