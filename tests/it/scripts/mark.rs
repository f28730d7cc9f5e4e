//! `mark_running`: the state before, one call, the reply and the record after.

use onejob::attempt::{AttemptState, AttemptToken};
use onejob::job::JobState;
use onejob::store::{CancelMode, Marked};

use crate::support::{Answer, Call, LEASE_MS, Redis, sent};

fn fenced(why: &str) -> Marked {
    Marked::Fenced { why: why.to_owned() }
}

#[tokio::test]
async fn the_write_ahead_holds_everything_that_a_status_call_needs() {
    let redis = Redis::start().await;
    let given = redis.given_starting().await;
    let before = given.job().await;
    let marked = given.mark(1).await;
    let job = given.job().await;
    let attempt = &job.attempts[0];
    assert_eq!(marked, Marked::Running { lease_until_ms: attempt.lease_ms });
    assert_eq!((job.state, job.revision, attempt.state), (JobState::Running, before.revision + 1, AttemptState::Running));
    // It does not renew the lease.
    assert_eq!(attempt.lease_ms, before.attempts[0].lease_ms);
    assert_eq!((attempt.url.as_str(), &attempt.request_hash[..]), (sent().url, sent().request_hash));
    assert_eq!(attempt.certificate, sent().certificate);
}

#[tokio::test]
async fn a_write_ahead_sent_again_is_repeated_while_the_lease_runs() {
    let redis = Redis::start().await;
    let given = redis.given_starting().await;
    let Marked::Running { lease_until_ms } = given.mark(1).await else { panic!("not running") };
    assert_eq!(given.mark(1).await, Marked::Repeated { lease_until_ms });
    given.age(LEASE_MS).await;
    assert_eq!(given.mark(1).await, fenced("lease"));
}

#[tokio::test]
async fn a_gateway_that_slept_through_its_lease_is_fenced_before_it_sends() {
    let redis = Redis::start().await;
    let given = redis.given_starting().await;
    given.age(LEASE_MS).await;
    // Nobody has judged it yet.
    assert_eq!(given.mark(1).await, fenced("lease"));
    given.tick().await;
    assert_eq!(given.mark(1).await, fenced("state"));
    assert_eq!(given.job().await.attempts[0].state, AttemptState::Aborted);
}

#[tokio::test]
async fn only_the_attempts_own_token_may_send() {
    let redis = Redis::start().await;
    let given = redis.given_starting().await;
    for (number, token) in [(1, AttemptToken::random()), (2, given.token(1)), (0, given.token(1))] {
        let marked = given.send(&Call::Mark { job: given.id, number, token }).await;
        assert_eq!(marked, Answer::Marked(fenced("token")));
    }
}

#[tokio::test]
async fn nothing_is_sent_for_a_job_that_is_canceled_or_ended() {
    let redis = Redis::start().await;
    assert_eq!(redis.given_canceling().await.mark(1).await, fenced("canceling"));
    assert_eq!(redis.given_canceled().await.mark(1).await, fenced("ended"));
    assert_eq!(redis.given_succeeded().await.mark(1).await, fenced("ended"));
    assert_eq!(redis.given_unknown().await.mark(1).await, fenced("state"));
    let given = redis.given_starting().await;
    given.cancel(CancelMode::Graceful).await;
    assert_eq!(given.mark(1).await, fenced("ended"));
}

#[tokio::test]
async fn no_job_no_sending() {
    let redis = Redis::start().await;
    let given = redis.given_starting().await;
    redis.value(&["DEL", &given.key()]).await;
    assert_eq!(given.mark(1).await, Marked::NotFound);
}
