//! `postpone_job`: the state before, one call, the reply and the record after.

use onejob::job::JobState;
use onejob::store::Postponed;

use crate::support::{Answer, First, Given, LEASE_MS, Redis, Submission};

async fn postpone(given: &Given, call: &crate::support::Call) -> Postponed {
    match given.send(call).await {
        Answer::Postponed(postponed) => postponed,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_wait_is_written_down_with_its_reason_and_counts_as_no_attempt() {
    let redis = Redis::start().await;
    let mut given = redis.given_pending().await;
    let before = given.job().await;
    let call = given.call_postpone(Some(given.submission.token), LEASE_MS / 2);
    let postponed = postpone(&given, &call).await;
    let job = given.job().await;
    assert_eq!(postponed, Postponed::Postponed { next_at_ms: job.next_at_ms });
    assert_eq!(job.next_at_ms, job.updated_ms + LEASE_MS / 2);
    assert_eq!((job.state, job.version, job.revision), (JobState::Pending, before.version, before.revision + 1));
    assert_eq!((job.reason.as_str(), job.attempts.len()), ("breaker: laser is not called", 0));
    // Whoever has room may go on then, and nobody before.
    given.age(LEASE_MS / 2).await;
    given.begins(First::Running).await;
    assert_eq!(given.job().await.reason, "");
}

#[tokio::test]
async fn nobody_puts_off_what_another_holds() {
    let redis = Redis::start().await;
    let given = redis.given_pending().await;
    let before = given.dump().await;
    let refused = postpone(&given, &given.call_postpone(None, 1)).await;
    assert!(matches!(refused, Postponed::TooEarly { wait_ms } if wait_ms <= LEASE_MS), "{refused:?}");
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn a_wait_beyond_the_deadline_ends_the_job_and_says_why() {
    let redis = Redis::start().await;
    let given = redis.given(Submission { deadline_ms: LEASE_MS, ..redis.submission() }).await;
    let call = given.call_postpone(Some(given.submission.token), LEASE_MS);
    assert_eq!(postpone(&given, &call).await, Postponed::Ended { state: JobState::Failed });
    let job = given.job().await;
    assert_eq!((job.state, job.reason.as_str()), (JobState::Failed, "breaker: laser is not called; deadline"));
}
