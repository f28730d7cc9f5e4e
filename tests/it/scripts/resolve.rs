//! `resolve_attempt`: the state before, one call, the reply and the record after.

use onejob::attempt::{AttemptState, ResolveOutcome};
use onejob::job::JobState;
use onejob::store::{CancelMode, Finished, Follow, Noted, Resolved, Word};

use crate::scenes::RETRY;
use crate::support::{Call, First, QUARANTINE_MS, Redis, payload};

#[tokio::test]
async fn evidence_of_a_success_claims_the_result() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    let resolved = given.resolve(1, ResolveOutcome::Succeeded, Word::Operator, Follow::End).await;
    assert_eq!(resolved, Resolved::Won { version: 1 });
    let job = given.job().await;
    assert_eq!((job.state, job.completed_by, job.result.clone()), (JobState::Succeeded, 1, payload("found")));
    let event = job.events.last().unwrap();
    assert_eq!((event.event.as_str(), event.attempt, event.actor.as_str()), ("resolved", 1, "ada"));
    assert_eq!(event.detail, "succeeded: looked at the printer");
}

#[tokio::test]
async fn each_decision_has_its_state_and_its_end() {
    let redis = Redis::start().await;
    let cases = [
        (ResolveOutcome::Failed, AttemptState::Failed, JobState::Failed),
        (ResolveOutcome::Canceled, AttemptState::Canceled, JobState::Failed),
        (ResolveOutcome::Abandoned, AttemptState::Abandoned, JobState::Indeterminate),
    ];
    for (outcome, attempt, end) in cases {
        let mut given = redis.given_unknown().await;
        let resolved = given.resolve(1, outcome, Word::Provider, RETRY).await;
        assert_eq!(resolved, Resolved::Recorded { job: JobState::Pending }, "{outcome:?}");
        let job = given.job().await;
        assert_eq!((job.attempts[0].state, job.attempts[0].reason.as_str()), (attempt, "looked at the printer"));
        assert_eq!((job.version, job.holder_lease_ms), (0, 0));
        assert_eq!(given.begins(First::Running).await, 2, "the way is free");

        let given = redis.given_unknown().await;
        let resolved = given.resolve(1, outcome, Word::Provider, Follow::End).await;
        assert_eq!(resolved, Resolved::Recorded { job: end }, "{outcome:?}");
        assert_eq!(given.job().await.version, 1);
    }
}

/// Whoever took the risk does not get to say later that the job failed.
#[tokio::test]
async fn a_job_with_an_abandoned_attempt_ends_as_indeterminate() {
    let redis = Redis::start().await;
    let mut given = redis.given_unknown().await;
    given.resolve(1, ResolveOutcome::Abandoned, Word::Operator, RETRY).await;
    given.begins(First::Running).await;
    assert_eq!(given.fail(2).await, Finished::Recorded { job: JobState::Indeterminate });
}

#[tokio::test]
async fn that_nothing_happened_is_believed_only_after_the_quarantine() {
    let redis = Redis::start().await;
    for outcome in [ResolveOutcome::Failed, ResolveOutcome::Canceled] {
        let given = redis.given_unknown().await;
        let unknown_since_ms = given.job().await.attempts[0].ended_ms;
        let Resolved::Quarantine { until_ms, wait_ms } = given.resolve(1, outcome, Word::Operator, RETRY).await else {
            panic!("believed")
        };
        assert_eq!(until_ms, unknown_since_ms + QUARANTINE_MS);
        assert!((QUARANTINE_MS - 10_000..=QUARANTINE_MS).contains(&wait_ms), "{wait_ms}");
        given.age(QUARANTINE_MS).await;
        let resolved = given.resolve(1, outcome, Word::Operator, RETRY).await;
        assert_eq!(resolved, Resolved::Recorded { job: JobState::Pending });
    }
}

/// It was sent again meanwhile: what a person has found out by then may not be true any more when it arrives.
#[tokio::test]
async fn what_was_sent_again_is_quarantined_anew() {
    let redis = Redis::start().await;
    for outcome in [ResolveOutcome::Failed, ResolveOutcome::Canceled] {
        let given = redis.given_unknown().await;
        given.age(QUARANTINE_MS).await;
        given.note(1, "", Some((Noted::Replayed, "1 of 5"))).await;
        let sent_ms = given.job().await.happened(1, "replayed").next().unwrap();
        let Resolved::Quarantine { until_ms, .. } = given.resolve(1, outcome, Word::Operator, RETRY).await else {
            panic!("believed")
        };
        assert_eq!(until_ms, sent_ms + QUARANTINE_MS);
        given.age(QUARANTINE_MS).await;
        let resolved = given.resolve(1, outcome, Word::Operator, RETRY).await;
        assert_eq!(resolved, Resolved::Recorded { job: JobState::Pending });
    }
}

#[tokio::test]
async fn a_risk_taken_by_name_needs_no_quarantine() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    assert_eq!(given.abandon(1).await, Resolved::Recorded { job: JobState::Indeterminate });
}

#[tokio::test]
async fn a_decision_sent_again_is_repeated() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    let call = given.call_resolve(1, ResolveOutcome::Failed, Word::Provider, RETRY);
    given.send(&call).await;
    let before = given.dump().await;
    let answer = format!("{:?}", given.send(&call).await);
    assert_eq!(answer, "Resolved(Repeated { attempt: Failed, job: Pending, completed_by: 0 })");
    assert_eq!(given.dump().await, before);
}

/// A cancel and a decision of one operator came with one request id, and the decision was told "repeated" though it was never
/// made.
#[tokio::test]
async fn a_request_id_of_another_call_is_not_a_repetition() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    let request_id = "console-1".to_owned();
    let mode = CancelMode::Graceful;
    given.send(&Call::Cancel { job: given.id, request_id: request_id.clone(), mode }).await;
    let (job, outcome, word, body) = (given.id, ResolveOutcome::Canceled, Word::Provider, String::new());
    let call = Call::Resolve { job, number: 1, request_id, outcome, word, body, follow: Follow::End };
    let answer = format!("{:?}", given.send(&call).await);
    assert_eq!(answer, "Resolved(Recorded { job: Canceled })");
    assert_eq!(given.job().await.attempts[0].state, AttemptState::Canceled);
}

#[tokio::test]
async fn only_an_unknown_attempt_can_be_decided() {
    let redis = Redis::start().await;
    let cases = [
        (redis.given_starting().await, AttemptState::Starting),
        (redis.given_running().await, AttemptState::Running),
        (redis.given_succeeded().await, AttemptState::Succeeded),
        (redis.given_failed().await, AttemptState::Failed),
    ];
    for (given, state) in cases {
        assert_eq!(given.abandon(1).await, Resolved::NotUnknown { state });
    }
    assert_eq!(redis.given_unknown().await.abandon(2).await, Resolved::NotFound);
    assert_eq!(redis.given_absent(redis.submission()).await.abandon(1).await, Resolved::NotFound);
}

#[tokio::test]
async fn the_last_decision_of_a_canceled_job_ends_it() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    given.cancel(CancelMode::Graceful).await;
    let resolved = given.resolve(1, ResolveOutcome::Canceled, Word::Provider, RETRY).await;
    assert_eq!(resolved, Resolved::Recorded { job: JobState::Canceled });
    let given = redis.given_unknown().await;
    given.cancel(CancelMode::Graceful).await;
    assert_eq!(given.abandon(1).await, Resolved::Recorded { job: JobState::Indeterminate });
}
