//! `extend_lease`: the state before, one call, the reply and the record after.

use onejob::attempt::AttemptToken;
use onejob::store::{Canceling, Extended};

use crate::support::{Answer, Call, LEASE_MS, Redis};

fn fenced(why: &str) -> Extended {
    Extended::Fenced { why: why.to_owned() }
}

#[tokio::test]
async fn a_heartbeat_prolongs_the_lease_and_nothing_else() {
    let redis = Redis::start().await;
    for given in [redis.given_starting().await, redis.given_running().await] {
        let before = given.job().await;
        let extended = given.extend(1, 1).await;
        let job = given.job().await;
        let (lease_until_ms, canceling) = (job.attempts[0].lease_ms, Canceling::No);
        assert_eq!(extended, Extended::Extended { lease_until_ms, canceling });
        assert_eq!(lease_until_ms, job.updated_ms + 2 * LEASE_MS);
        assert_eq!((job.state, job.version, job.revision), (before.state, before.version, before.revision + 1));
        assert_eq!((job.attempts[0].state, job.attempts[0].sequence), (before.attempts[0].state, 1));
    }
}

#[tokio::test]
async fn heartbeats_out_of_order_and_again_change_nothing() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    let extended = given.extend(1, 5).await;
    let before = given.dump().await;
    for sequence in [5, 4, 1, 0] {
        assert_eq!(given.extend(1, sequence).await, extended);
    }
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn a_heartbeat_never_shortens_a_lease() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    given.extend(1, 1).await;
    let lease_ms = given.job().await.attempts[0].lease_ms;
    let (job, token) = (given.id, given.token(1));
    given.send(&Call::Extend { job, number: 1, token, sequence: 2, lease_ms: 1 }).await;
    let attempt = &given.job().await.attempts[0];
    assert_eq!((attempt.lease_ms, attempt.sequence), (lease_ms, 2));
}

#[tokio::test]
async fn a_heartbeat_learns_of_a_cancel() {
    let redis = Redis::start().await;
    let extended = redis.given_canceling().await.extend(1, 1).await;
    assert!(matches!(extended, Extended::Extended { canceling: Canceling::Yes, .. }), "{extended:?}");
}

#[tokio::test]
async fn a_running_attempt_may_be_late_and_a_starting_one_may_not() {
    let redis = Redis::start().await;
    let (running, starting) = (redis.given_running().await, redis.given_starting().await);
    running.lapse().await;
    starting.lapse().await;
    assert!(matches!(running.extend(1, 1).await, Extended::Extended { .. }));
    assert_eq!(running.tick_changes().await, Vec::<String>::new());
    assert_eq!(starting.extend(1, 1).await, fenced("lease"));
}

#[tokio::test]
async fn a_judged_attempt_is_fenced() {
    let redis = Redis::start().await;
    assert_eq!(redis.given_unknown().await.extend(1, 1).await, fenced("state"));
    assert_eq!(redis.given_canceled().await.extend(1, 1).await, fenced("ended"));
    assert_eq!(redis.given_succeeded().await.extend(1, 1).await, fenced("ended"));
    let given = redis.given_running().await;
    let call = Call::Extend { job: given.id, number: 1, token: AttemptToken::random(), sequence: 1, lease_ms: 1 };
    assert_eq!(given.send(&call).await, Answer::Extended(fenced("token")));
}

#[tokio::test]
async fn no_job_no_lease() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    redis.value(&["DEL", &given.key()]).await;
    assert_eq!(given.extend(1, 1).await, Extended::NotFound);
    assert_eq!(given.dump().await.packed, None);
}
