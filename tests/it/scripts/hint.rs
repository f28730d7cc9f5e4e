//! `hints`: the state before, one call, the reply and the record after.

use onejob::attempt::AttemptState;
use onejob::attempt::FinishOutcome;
use onejob::job::{Identity, JobState};
use onejob::store::{FinishAttempt, Finished, Follow, Script, Tell};

use crate::scenes::releasing;
use crate::support::{Call, Given, LEASE_MS, Redis, Submission, payload};

fn due_key(identity: Identity) -> String {
    format!("oj:due:{{{:02x}}}", identity.shard())
}

async fn due_ms(redis: &Redis, given: &Given) -> Option<u64> {
    let identity = given.id.identity();
    redis.command(&["ZSCORE", &due_key(identity), &identity.to_string()]).await
}

async fn settle(redis: &Redis, given: &Given, seen_ms: u64, due_ms: u64) -> String {
    let identity = given.id.identity();
    let arguments = [identity.to_string(), seen_ms.to_string(), due_ms.to_string()];
    let arguments: Vec<&[u8]> = arguments.iter().map(String::as_bytes).collect();
    let reply = redis.eval(Script::SettleHint, &[&due_key(identity)], &arguments).await.unwrap();
    String::from_utf8(reply[0].clone()).unwrap()
}

/// Reports a success, with the hint that the attempt's gateway believes is its own.
async fn succeed(given: &Given, hint_ms: Option<u64>) -> Finished {
    let finish = FinishAttempt {
        job: given.id,
        number: 1,
        token: given.token(1),
        outcome: FinishOutcome::Succeeded,
        result: &payload("done"),
        reason: "",
        remote_id: "",
        model: "",
        follow: Follow::End,
        hint_ms,
        strip_at_ms: None,
        tell: Tell::Nothing,
    };
    given.store.finish_attempt(&finish).await.unwrap()
}

#[tokio::test]
async fn a_hint_is_moved_or_removed_only_as_it_was_seen() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    let seen_ms = due_ms(&redis, &given).await.unwrap();
    assert_eq!(settle(&redis, &given, seen_ms + 1, 0).await, "moved");
    assert_eq!(due_ms(&redis, &given).await, Some(seen_ms));
    assert_eq!(settle(&redis, &given, seen_ms, seen_ms + LEASE_MS).await, "settled");
    assert_eq!(due_ms(&redis, &given).await, Some(seen_ms + LEASE_MS));
    // The same call again finds another score.
    assert_eq!(settle(&redis, &given, seen_ms, seen_ms + LEASE_MS).await, "moved");
    assert_eq!(settle(&redis, &given, seen_ms + LEASE_MS, 0).await, "settled");
    assert_eq!(due_ms(&redis, &given).await, None);
    assert_eq!(settle(&redis, &given, seen_ms + LEASE_MS, 0).await, "moved");
}

/// Each open job keeps a hint, from its first call on.
#[tokio::test]
async fn every_claim_is_hinted_at_its_lease() {
    let redis = Redis::start().await;
    for given in [redis.given_pending().await, redis.given_starting().await, redis.given_running().await] {
        let due_ms = due_ms(&redis, &given).await.expect("a hint");
        let lease_until_ms = given.job().await.created_ms + LEASE_MS;
        assert!(due_ms.abs_diff(lease_until_ms) < 10_000, "{due_ms} {lease_until_ms}");
    }
}

#[tokio::test]
async fn submitting_again_and_again_cannot_put_off_the_look_at_a_job() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    let before = due_ms(&redis, &given).await;
    let patient = Submission { lease_ms: 100 * LEASE_MS, ..given.submission.by_another() };
    for _ in 0..3 {
        given.send(&Call::Submit(patient.clone())).await;
    }
    assert_eq!(due_ms(&redis, &given).await, before);
    // An earlier one counts.
    let eager = Submission { lease_ms: 1, ..given.submission.by_another() };
    given.send(&Call::Submit(eager)).await;
    assert!(due_ms(&redis, &given).await < before);
}

#[tokio::test]
async fn a_success_takes_its_own_hint_away_and_no_other() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    let hint_ms = due_ms(&redis, &given).await;
    assert_eq!(
        succeed(&given, hint_ms.map(|ms| ms + 1)).await,
        Finished::Won { version: 1, was: AttemptState::Running, job: None }
    );
    assert_eq!(due_ms(&redis, &given).await, hint_ms);
    let given = redis.given_running().await;
    let hint_ms = due_ms(&redis, &given).await;
    assert_eq!(succeed(&given, hint_ms).await, Finished::Won { version: 1, was: AttemptState::Running, job: None });
    assert_eq!(due_ms(&redis, &given).await, None);
}

#[tokio::test]
async fn an_unknown_job_stands_among_the_unknown() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    let identity = given.id.identity();
    let key = format!("oj:unknown:{{{:02x}}}", identity.shard());
    assert_eq!(redis.command::<Option<u64>>(&["ZSCORE", &key, &identity.to_string()]).await, None);
    given.lose(1).await;
    let since_ms: u64 = redis.command(&["ZSCORE", &key, &identity.to_string()]).await;
    assert!(since_ms.abs_diff(given.job().await.attempts[0].ended_ms) < 10_000);
}

/// A late success from before a reopening was discarded, and took the hint of the open job with it: nobody would have looked
/// again.
#[tokio::test]
async fn a_discarded_success_leaves_the_open_job_its_hint() {
    let redis = Redis::start().await;
    let given = redis.given_failed().await;
    given.reopen(1).await;
    let hint_ms = due_ms(&redis, &given).await;
    assert!(hint_ms.is_some());
    assert!(matches!(succeed(&given, hint_ms).await, Finished::Discarded { .. }));
    assert_eq!(given.job().await.state, JobState::Pending);
    assert_eq!(due_ms(&redis, &given).await, hint_ms);
}

/// The same for a key that was released and claimed anew.
#[tokio::test]
async fn a_success_for_an_incarnation_that_is_no_more_leaves_the_next_one_its_hint() {
    let redis = Redis::start().await;
    let given = redis.given(releasing(&redis)).await;
    given.fail(1).await;
    given.send(&Call::Submit(given.submission.by_another())).await;
    let hint_ms = due_ms(&redis, &given).await;
    assert_eq!(succeed(&given, hint_ms).await, Finished::NotFound);
    assert_eq!(due_ms(&redis, &given).await, hint_ms);
}
