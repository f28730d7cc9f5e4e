//! `reopen_job`: the state before, one call, the reply and the record after.

use onejob::error::StoreError;
use onejob::job::{JobState, Payload};
use onejob::store::{Begun, Reopened};

use crate::support::{Call, First, LEASE_MS, RETENTION_MS, Redis};

#[tokio::test]
async fn a_failed_job_gets_new_attempts_and_a_new_version() {
    let redis = Redis::start().await;
    let mut given = redis.given_failed().await;
    assert_eq!(given.reopen(2).await, Reopened::Reopened { version: 2 });
    let job = given.job().await;
    assert_eq!((job.state, job.version, job.ended_ms, job.retain_until_ms), (JobState::Pending, 2, 0, 0));
    assert_eq!((job.rules.attempts_max, job.deadline_ms, job.reason.as_str()), (3, 0, "paper is back"));
    assert_eq!(job.result, Payload::default());
    assert_eq!(job.events.last().unwrap().event, "reopened");
    assert_eq!(given.dump().await.expires_at_ms, -1);
    // Two more, and no third.
    for number in [2, 3] {
        assert_eq!(given.begins(First::Running).await, number);
        given.fail_and_retry(number, 0, 0).await;
    }
    assert_eq!(given.begin(First::Running).await, Begun::Ended { state: JobState::Failed });
}

#[tokio::test]
async fn the_new_deadline_counts_from_the_reopening() {
    let redis = Redis::start().await;
    let given = redis.given_failed().await;
    let request_id = "reopen-1".to_owned();
    given.send(&Call::Reopen { job: given.id, request_id, attempts: 1, deadline_ms: LEASE_MS }).await;
    let job = given.job().await;
    assert_eq!(job.deadline_ms, job.updated_ms + LEASE_MS);
}

#[tokio::test]
async fn a_reopening_sent_again_is_reopened_again() {
    let redis = Redis::start().await;
    let mut given = redis.given_failed().await;
    let call = given.call_reopen(1);
    given.send(&call).await;
    let before = given.dump().await;
    assert_eq!(format!("{:?}", given.send(&call).await), "Reopened(Reopened { version: 2 })");
    assert_eq!(given.dump().await, before);
    // Even once it has failed anew: the same request is no second reopening.
    given.begins(First::Running).await;
    given.fail(2).await;
    let before = given.dump().await;
    given.send(&call).await;
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn only_a_definite_failure_can_be_reopened() {
    let redis = Redis::start().await;
    for state in JobState::ALL {
        if state == JobState::Failed {
            continue;
        }
        let given = redis.given_in(state).await;
        let before = given.dump().await;
        assert_eq!(given.reopen(1).await, Reopened::NotFailed { state });
        assert_eq!(given.dump().await, before);
    }
}

#[tokio::test]
async fn a_job_without_its_input_cannot_be_reopened() {
    let redis = Redis::start().await;
    let given = redis.given_failed().await;
    given.age(RETENTION_MS).await;
    assert_eq!(given.reopen(1).await, Reopened::Gone);
    assert_eq!(redis.given_absent(redis.submission()).await.reopen(1).await, Reopened::NotFound);
}

/// A reopening with 4,294,967,295 more attempts made a record that nobody could read, and many reopenings one that nobody would.
#[tokio::test]
async fn more_attempts_than_one_job_may_have_are_refused() {
    let redis = Redis::start().await;
    let given = redis.given_failed().await;
    let before = given.dump().await;
    for attempts in [1000, u32::MAX] {
        let answer = given.call_reopen(attempts).send(&given.store).await;
        assert!(
            matches!(&answer, Err(StoreError::Fatal { code, detail }) if code == "BADARG" && detail.contains("999")),
            "{answer:?}"
        );
        assert_eq!(given.dump().await, before);
    }
    assert_eq!(given.reopen(999).await, Reopened::Reopened { version: 2 });
    assert_eq!(given.job().await.rules.attempts_max, 1000);
}

/// What never touched a provider under an earlier version uses up nothing of what an operator gives.
#[tokio::test]
async fn a_job_that_was_poisoned_again_and_again_can_still_be_reopened() {
    let redis = Redis::start().await;
    let mut given = redis.given_starting().await;
    for reopening in 1..=4 {
        for _ in 0..2 {
            given.lapse().await;
            given.tick().await;
            given.begins(First::Starting).await;
        }
        given.lapse().await;
        given.tick().await;
        assert_eq!(given.job().await.state, JobState::Failed);
        given.reopen(1).await;
        assert!(matches!(given.begin(First::Starting).await, Begun::Started { .. }), "reopening {reopening} gave an attempt");
    }
}
