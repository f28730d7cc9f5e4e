//! `cancel_job`: the state before, one call, the reply and the record after.

use onejob::attempt::AttemptState;
use onejob::job::JobState;
use onejob::store::{CancelMode, Canceled, Extended};

use crate::support::{KEY_LIFE_MS, Redis};

fn canceled(effect: &str) -> Canceled {
    Canceled::Canceled { effect: effect.to_owned() }
}

#[tokio::test]
async fn a_job_that_nobody_works_on_is_canceled_at_once() {
    let redis = Redis::start().await;
    for (given, attempts) in [(redis.given_pending().await, vec![]), (redis.given_starting().await, vec![AttemptState::Aborted])]
    {
        assert_eq!(given.cancel(CancelMode::Graceful).await, canceled("none"));
        let job = given.job().await;
        assert_eq!((job.state, job.version, job.canceled_by.as_str()), (JobState::Canceled, 1, "ada"));
        assert_eq!((job.reason.as_str(), job.holder_lease_ms, job.next_at_ms), ("changed my mind", 0, 0));
        assert_eq!(job.attempts.iter().map(|attempt| attempt.state).collect::<Vec<_>>(), attempts);
        let life = given.dump().await.expires_at_ms - i64::try_from(job.ended_ms).unwrap();
        assert!(life >= i64::try_from(KEY_LIFE_MS).unwrap(), "{life}");
    }
}

#[tokio::test]
async fn a_cancel_is_a_request_while_something_may_have_happened() {
    let redis = Redis::start().await;
    for (given, state) in
        [(redis.given_running().await, AttemptState::Running), (redis.given_unknown().await, AttemptState::Unknown)]
    {
        assert_eq!(given.cancel(CancelMode::Graceful).await, Canceled::Canceling { open: 1 });
        let job = given.job().await;
        assert_eq!((job.state, job.version, job.ended_ms), (JobState::Canceling, 0, 0));
        assert_eq!(job.attempts[0].state, state);
        let event = job.events.last().unwrap();
        assert_eq!((event.event.as_str(), event.actor.as_str()), ("cancel_requested", "ada"));
        assert_eq!(given.dump().await.expires_at_ms, -1);
    }
}

#[tokio::test]
async fn force_ends_the_job_now_and_says_that_the_effect_is_unknown() {
    let redis = Redis::start().await;
    for given in [redis.given_running().await, redis.given_unknown().await, redis.given_canceling().await] {
        assert_eq!(given.cancel(CancelMode::Force).await, canceled("unknown"));
        let job = given.job().await;
        assert_eq!((job.state, job.version), (JobState::Canceled, 1));
        assert!(job.attempts[0].state.is_open());
        assert_eq!(given.extend(1, 1).await, Extended::Fenced { why: "ended".to_owned() });
    }
    assert_eq!(redis.given_starting().await.cancel(CancelMode::Force).await, canceled("none"));
    assert_eq!(redis.given_pending().await.cancel(CancelMode::Force).await, canceled("none"));
}

#[tokio::test]
async fn a_second_request_changes_nothing() {
    let redis = Redis::start().await;
    let given = redis.given_canceling().await;
    let before = given.dump().await;
    assert_eq!(given.cancel(CancelMode::Graceful).await, Canceled::Canceling { open: 1 });
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn what_has_ended_stays_as_it_ended() {
    let redis = Redis::start().await;
    for state in [JobState::Succeeded, JobState::Failed, JobState::Indeterminate] {
        for mode in [CancelMode::Graceful, CancelMode::Force] {
            let given = redis.given_in(state).await;
            let before = given.dump().await;
            assert_eq!(given.cancel(mode).await, Canceled::Ended { state });
            assert_eq!(given.dump().await, before);
        }
    }
    let given = redis.given_canceled().await;
    let before = given.dump().await;
    assert_eq!(given.cancel(CancelMode::Graceful).await, canceled("unknown"));
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn no_job_no_cancel() {
    let redis = Redis::start().await;
    let given = redis.given_absent(redis.submission()).await;
    assert_eq!(given.cancel(CancelMode::Force).await, Canceled::NotFound);
    assert_eq!(given.dump().await.packed, None);
}
