//! `tick_job`: the state before, one call, the reply and the record after.

use onejob::attempt::{AttemptState, FinishOutcome, ResolveOutcome};
use onejob::fingerprint::{second_half, sha256};
use onejob::job::{Class, JobState, Payload, Rules};
use onejob::store::{Follow, HasBlobs, Read, Ticked, Word};

use crate::scenes::RETRY;
use crate::support::{First, Given, KEY_LIFE_MS, LEASE_MS, RETENTION_MS, Redis, Submission};

fn ticked(given: &Given, state: JobState, due_ms: u64, changes: &[&str]) -> Ticked {
    let open = u32::from(matches!(state, JobState::Running | JobState::Unknown));
    Ticked::Job {
        id: given.id,
        state,
        due_ms,
        blobs: HasBlobs::No,
        open,
        changes: changes.iter().map(|&word| word.to_owned()).collect(),
    }
}

#[tokio::test]
async fn a_lapsed_attempt_that_was_starting_never_happened() {
    let redis = Redis::start().await;
    let given = redis.given_starting().await;
    given.lapse().await;
    let tick = given.tick().await;
    let job = given.job().await;
    // Due at once, for anybody.
    assert_eq!(tick, ticked(&given, JobState::Pending, job.updated_ms, &["aborted"]));
    assert_eq!((job.state, job.holder_lease_ms, job.reason.as_str()), (JobState::Pending, 0, "lease_lapsed"));
    assert_eq!((job.attempts[0].state, job.attempts[0].reason.as_str()), (AttemptState::Aborted, "lease_lapsed"));
}

#[tokio::test]
async fn a_lapsed_attempt_that_was_running_is_unknown_and_never_failed() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    given.lapse().await;
    assert_eq!(given.tick().await, ticked(&given, JobState::Unknown, 0, &["unknown"]));
    let job = given.job().await;
    assert_eq!((job.state, job.version, job.ended_ms), (JobState::Unknown, 0, 0));
    assert_eq!((job.attempts[0].state, job.attempts[0].ended_ms), (AttemptState::Unknown, job.updated_ms));
    let event = job.events.last().unwrap();
    assert_eq!((event.event.as_str(), event.attempt, event.actor.as_str()), ("unknown", 1, "gateway-1"));
}

#[tokio::test]
async fn a_lease_that_runs_is_left_alone_and_tells_when_to_look_again() {
    let redis = Redis::start().await;
    let given = redis.given(Submission { first: First::Running, deadline_ms: 5 * LEASE_MS, ..redis.submission() }).await;
    let before = given.dump().await;
    let lease_ms = given.job().await.attempts[0].lease_ms;
    assert_eq!(given.tick().await, ticked(&given, JobState::Running, lease_ms, &[]));
    assert_eq!(given.dump().await, before);
    let given = redis.given_pending().await;
    let holder_lease_ms = given.job().await.holder_lease_ms;
    assert_eq!(given.tick().await, ticked(&given, JobState::Pending, holder_lease_ms, &[]));
}

/// Case 24: each of them may have taken its gateway with it.
#[tokio::test]
async fn three_attempts_that_lapsed_before_anything_was_sent_are_poison() {
    let redis = Redis::start().await;
    let mut given = redis.given_starting().await;
    for next in [2, 3] {
        given.lapse().await;
        assert_eq!(given.tick_changes().await, ["aborted"]);
        assert_eq!(given.begins(First::Starting).await, next);
    }
    given.lapse().await;
    assert_eq!(given.tick_changes().await, ["aborted", "poisoned"]);
    let job = given.job().await;
    assert_eq!((job.state, job.version), (JobState::Failed, 1));
    assert_eq!(job.reason, "poison: 3 attempts lost their holders before anything was sent");
    let event = job.events.last().unwrap();
    assert_eq!((event.event.as_str(), event.attempt, event.detail.as_str()), ("poisoned", 0, job.reason.as_str()));
    assert_eq!(given.tick_changes().await, [""; 0], "once");

    // An operator lets it run again, and it is counted anew.
    given.reopen(1).await;
    for next in [4, 5] {
        assert_eq!(given.begins(First::Starting).await, next);
        given.lapse().await;
        assert_eq!(given.tick_changes().await, ["aborted"]);
    }
    assert_eq!(given.job().await.state, JobState::Pending);
}

#[tokio::test]
async fn a_slot_that_was_given_back_counts_as_no_death() {
    let redis = Redis::start().await;
    let mut given = redis.given_starting().await;
    for number in 1..=4 {
        let call = given.call_finish(number, FinishOutcome::Aborted, "", RETRY);
        given.send(&call).await;
        assert_eq!(given.begins(First::Starting).await, number + 1);
    }
    given.lapse().await;
    assert_eq!(given.tick_changes().await, ["aborted"]);
    assert_eq!(given.job().await.state, JobState::Pending);
}

/// Redis stood still, or the executor was slow: it says itself, late, that it lives and sent nothing.
#[tokio::test]
async fn a_slot_that_was_given_back_late_counts_as_no_death() {
    let redis = Redis::start().await;
    let mut given = redis.given_starting().await;
    for number in 1..=2 {
        given.lapse().await;
        assert_eq!(given.tick_changes().await, ["aborted"]);
        let call = given.call_finish(number, FinishOutcome::Aborted, "", RETRY);
        given.send(&call).await;
        assert_eq!(given.begins(First::Starting).await, number + 1);
    }
    given.lapse().await;
    assert_eq!(given.tick_changes().await, ["aborted"]);
    assert_eq!(given.job().await.state, JobState::Pending);
}

#[tokio::test]
async fn both_of_a_race_become_unknown_in_one_tick() {
    let redis = Redis::start().await;
    let given = redis.given_race(2).await;
    given.age(100 * LEASE_MS).await;
    assert_eq!(given.tick_changes().await, ["unknown"]);
    let job = given.job().await;
    assert_eq!(
        (job.state, job.attempts[0].state, job.attempts[1].state),
        (JobState::Unknown, AttemptState::Unknown, AttemptState::Unknown)
    );
}

#[tokio::test]
async fn a_job_past_its_deadline_fails_if_nothing_is_open() {
    let redis = Redis::start().await;
    let given = redis.given(Submission { deadline_ms: LEASE_MS, ..redis.submission() }).await;
    given.lapse().await;
    assert_eq!(given.tick().await, ticked(&given, JobState::Failed, given.job().await.retain_until_ms, &["deadline"]));
    let job = given.job().await;
    assert_eq!((job.state, job.version, job.reason.as_str()), (JobState::Failed, 1, "deadline"));
    assert_eq!(job.events.last().unwrap().event, "deadline");
    let life = given.dump().await.expires_at_ms - i64::try_from(job.ended_ms).unwrap();
    assert!(life >= i64::try_from(KEY_LIFE_MS).unwrap(), "{life}");
}

#[tokio::test]
async fn a_lapsed_starting_attempt_past_the_deadline_ends_the_job() {
    let redis = Redis::start().await;
    let submission = Submission { first: First::Starting, deadline_ms: LEASE_MS, ..redis.submission() };
    let given = redis.given(submission).await;
    given.lapse().await;
    assert_eq!(given.tick_changes().await, ["aborted"]);
    assert_eq!(given.job().await.state, JobState::Failed);
}

#[tokio::test]
async fn an_unknown_job_past_its_deadline_stays_unknown() {
    let redis = Redis::start().await;
    let submission = Submission { first: First::Running, deadline_ms: LEASE_MS, ..redis.submission() };
    let given = redis.given(submission).await;
    given.age(100 * LEASE_MS).await;
    assert_eq!(given.tick().await, ticked(&given, JobState::Unknown, 0, &["unknown"]));
    let before = given.dump().await;
    given.tick().await;
    assert_eq!(given.dump().await, before);
    // Once somebody knows, the deadline is what ends it.
    given.resolve(1, ResolveOutcome::Failed, Word::Provider, RETRY).await;
    assert_eq!(given.job().await.state, JobState::Failed);
}

#[tokio::test]
async fn an_abandoned_attempt_past_the_deadline_leaves_the_job_indeterminate() {
    let redis = Redis::start().await;
    let submission = Submission { first: First::Running, deadline_ms: 10 * LEASE_MS, ..redis.submission() };
    let given = redis.given(submission).await;
    given.lose(1).await;
    given.resolve(1, ResolveOutcome::Abandoned, Word::Operator, RETRY).await;
    given.age(10 * LEASE_MS).await;
    assert_eq!(given.tick_changes().await, ["deadline"]);
    assert_eq!(given.job().await.state, JobState::Indeterminate);
}

#[tokio::test]
async fn past_the_retention_the_bytes_are_stripped_and_the_key_stays() {
    let redis = Redis::start().await;
    let given = redis.given_succeeded().await;
    let retain_until_ms = given.job().await.retain_until_ms;
    assert_eq!(given.tick().await, ticked(&given, JobState::Succeeded, retain_until_ms, &[]));
    given.age(RETENTION_MS).await;
    let before = given.dump().await;
    assert_eq!(given.tick().await, ticked(&given, JobState::Succeeded, 0, &["stripped"]));
    let after = given.dump().await;
    assert_eq!(after.expires_at_ms, before.expires_at_ms);
    assert!(matches!(given.read().await, Read::Gone(_)));
    // What is left, seen as if it were not gone.
    given.rewrite("record[P.retain_until_ms] = now + 60000").await;
    let job = given.job().await;
    assert_eq!((job.input, job.result, job.state), (Payload::default(), Payload::default(), JobState::Succeeded));
    assert_eq!((job.fingerprint, job.completed_by), (second_half(&sha256(b"print page 1")), 1));
}

#[tokio::test]
async fn a_route_that_keeps_bytes_as_long_as_keys_is_never_due_again() {
    let redis = Redis::start().await;
    let submission = redis.submission();
    let rules = Rules { retention_ms: KEY_LIFE_MS, ..submission.rules };
    let given = redis.given(Submission { rules, first: First::Running, ..submission }).await;
    given.succeed(1, "done").await;
    assert_eq!(given.tick().await, ticked(&given, JobState::Succeeded, 0, &[]));
}

#[tokio::test]
async fn the_row_of_an_attempt_left_behind_by_force_is_judged_too() {
    let redis = Redis::start().await;
    let given = redis.given_canceled().await;
    let before = given.job().await;
    given.lapse().await;
    assert_eq!(given.tick_changes().await, ["unknown"]);
    let job = given.job().await;
    assert_eq!((job.state, job.version, job.reason), (JobState::Canceled, before.version, before.reason));
    assert_eq!(job.attempts[0].state, AttemptState::Unknown);
}

/// The loser's row said `running` for as long as the record lived, if its gateway died: nobody looked at an ended job.
#[tokio::test]
async fn an_ended_race_is_due_until_its_last_attempt_is_judged() {
    let redis = Redis::start().await;
    let given = redis.given_race(2).await;
    given.succeed(2, "done").await;
    let job = given.job().await;
    let next_ms = job.attempts[0].lease_ms.min(job.retain_until_ms);
    let Ticked::Job { state, due_ms, open, changes, .. } = given.tick().await else { panic!("no record") };
    assert_eq!((state, due_ms, open, changes.len()), (JobState::Succeeded, next_ms, 1, 0));
    given.rewrite("record[P.attempts][1][A.lease_ms] = now + 1000").await;
    let Ticked::Job { due_ms, .. } = given.tick().await else { panic!("no record") };
    assert_eq!(due_ms, given.job().await.attempts[0].lease_ms, "before its bytes are stripped");
    given.rewrite("record[P.attempts][1][A.lease_ms] = now").await;
    assert_eq!(given.tick_changes().await, ["unknown"]);
    let job = given.job().await;
    assert_eq!((job.state, job.completed_by, job.attempts[0].state), (JobState::Succeeded, 2, AttemptState::Unknown));
    let Ticked::Job { due_ms, open, .. } = given.tick().await else { panic!("no record") };
    assert_eq!((due_ms, open), (job.retain_until_ms, 1), "that it may be asked about is the gateways' affair");
}

#[tokio::test]
async fn a_race_with_one_lapsed_and_one_running_is_still_running() {
    let redis = Redis::start().await;
    let submission = Submission { class: Class::Race, first: First::Running, ..redis.submission() };
    let mut given = redis.given(submission).await;
    given.age(LEASE_MS).await;
    given.begins(First::Running).await;
    assert_eq!(given.tick_changes().await, ["unknown"]);
    let job = given.job().await;
    assert_eq!((job.state, job.attempts[0].state), (JobState::Running, AttemptState::Unknown));
    assert_eq!(given.fail(2).await, onejob::store::Finished::Recorded { job: JobState::Unknown });
    given.resolve(1, ResolveOutcome::Failed, Word::Provider, Follow::End).await;
    assert_eq!(given.job().await.state, JobState::Failed);
}

#[tokio::test]
async fn no_job_no_tick() {
    let redis = Redis::start().await;
    let given = redis.given_absent(redis.submission()).await;
    assert_eq!(given.tick().await, Ticked::NotFound);
    assert_eq!(given.dump().await.packed, None);
}
