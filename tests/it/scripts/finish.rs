//! `finish_attempt`: the state before, one call, the reply and the record after.

use onejob::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::{Job, JobState, Payload};
use onejob::store::{CancelMode, Finished, Follow, Noted, Resolved, Word};

use crate::scenes::RETRY;
use crate::support::{Answer, Call, First, KEY_LIFE_MS, LEASE_MS, RETENTION_MS, Redis, Submission, payload};

fn states(job: &Job) -> Vec<AttemptState> {
    job.attempts.iter().map(|attempt| attempt.state).collect()
}

fn last_event(job: &Job) -> (&str, u32) {
    let event = job.events.last().expect("an event");
    (&event.event, event.attempt)
}

#[tokio::test]
async fn a_success_claims_the_result_and_ends_the_job() {
    let redis = Redis::start().await;
    for given in [redis.given_running().await, redis.given_starting().await, redis.given_canceling().await] {
        let was = given.job().await.attempts[0].state;
        assert_eq!(given.succeed(1, "done").await, Finished::Won { version: 1, was, job: None });
        let job = given.job().await;
        assert_eq!((job.state, job.version, job.completed_by), (JobState::Succeeded, 1, 1));
        assert_eq!((job.result.clone(), job.reason.as_str()), (payload("done"), ""));
        assert_eq!((job.ended_ms, job.retain_until_ms), (job.updated_ms, job.ended_ms + RETENTION_MS));
        assert_eq!((job.attempts[0].state, job.attempts[0].lease_ms), (AttemptState::Succeeded, 0));
        assert_eq!((job.attempts[0].ended_ms, job.attempts[0].model.as_str()), (job.ended_ms, "laser-2"));
        assert_eq!(job.winner().map(|winner| winner.number), Some(1));
    }
}

#[tokio::test]
async fn the_keys_life_begins_with_the_end() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    given.age(10 * KEY_LIFE_MS).await;
    assert_eq!(given.dump().await.expires_at_ms, -1);
    given.succeed(1, "done").await;
    let (job, dump) = (given.job().await, given.dump().await);
    let ends = i64::try_from(job.ended_ms + KEY_LIFE_MS).unwrap();
    assert!((ends..ends + 1_000).contains(&dump.expires_at_ms), "{dump:?}");
    // A later change of a row keeps what is left of it.
    let given = redis.given_canceled().await;
    let life = given.dump().await.expires_at_ms;
    given.succeed(1, "late").await;
    assert_eq!(given.dump().await.expires_at_ms, life);
}

#[tokio::test]
async fn a_success_told_again_is_repeated() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    given.succeed(1, "done").await;
    let before = given.dump().await;
    let repeated = Finished::Repeated { attempt: AttemptState::Succeeded, job: JobState::Succeeded, completed_by: 1 };
    assert_eq!(given.succeed(1, "done").await, repeated);
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn a_failure_with_the_end_is_the_jobs_and_keeps_the_providers_refusal() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    assert_eq!(given.fail(1).await, Finished::Recorded { job: JobState::Failed });
    let job = given.job().await;
    assert_eq!((job.state, job.version, job.completed_by, job.reason.as_str()), (JobState::Failed, 1, 0, "rejected"));
    assert_eq!((states(&job), job.attempts[0].reason.as_str()), (vec![AttemptState::Failed], "rejected"));
    assert_eq!(job.result, payload("refused"));
    assert_eq!(last_event(&job), ("failed", 1));
}

#[tokio::test]
async fn a_failure_with_a_retry_leaves_the_job_to_its_holder() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    assert_eq!(given.fail_and_retry(1, 20_000, 40_000).await, Finished::Recorded { job: JobState::Pending });
    let job = given.job().await;
    assert_eq!((job.state, job.version, job.reason.as_str()), (JobState::Pending, 0, "rejected"));
    assert_eq!((job.next_at_ms, job.holder_lease_ms), (job.updated_ms + 20_000, job.updated_ms + 60_000));
    assert_eq!(job.result, Payload::default());
    assert_eq!(given.dump().await.expires_at_ms, -1);
}

#[tokio::test]
async fn a_retry_beyond_the_deadline_is_the_end() {
    let redis = Redis::start().await;
    let submission = Submission { first: First::Running, deadline_ms: LEASE_MS, ..redis.submission() };
    let given = redis.given(submission).await;
    assert_eq!(given.fail_and_retry(1, LEASE_MS, 0).await, Finished::Recorded { job: JobState::Failed });
    assert_eq!(given.job().await.reason, "rejected");
}

#[tokio::test]
async fn a_timeout_is_unknown_and_the_job_stays_open() {
    let redis = Redis::start().await;
    for given in [redis.given_running().await, redis.given_starting().await] {
        assert_eq!(given.lose(1).await, Finished::Recorded { job: JobState::Unknown });
        let job = given.job().await;
        assert_eq!((job.state, job.version, job.ended_ms, job.reason.as_str()), (JobState::Unknown, 0, 0, "timeout"));
        assert_eq!((job.attempts[0].state, job.attempts[0].ended_ms), (AttemptState::Unknown, job.updated_ms));
        assert_eq!(last_event(&job), ("unknown", 1));
        let before = given.dump().await;
        let repeated = Finished::Repeated { attempt: AttemptState::Unknown, job: JobState::Unknown, completed_by: 0 };
        assert_eq!(given.lose(1).await, repeated);
        assert_eq!(given.dump().await, before);
    }
}

#[tokio::test]
async fn a_holder_that_sent_nothing_aborts_and_another_may_begin() {
    let redis = Redis::start().await;
    for mut given in [redis.given_running().await, redis.given_starting().await] {
        assert_eq!(given.abort(1).await, Finished::Recorded { job: JobState::Pending });
        assert_eq!(states(&given.job().await), [AttemptState::Aborted]);
        assert_eq!(given.begins(First::Running).await, 2);
    }
}

#[tokio::test]
async fn a_late_success_of_an_unknown_attempt_wins() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    assert_eq!(given.succeed(1, "late").await, Finished::Won { version: 1, was: AttemptState::Unknown, job: None });
    let job = given.job().await;
    assert_eq!((job.state, job.result.clone()), (JobState::Succeeded, payload("late")));
    assert_eq!(last_event(&job), ("late_success", 1));
}

#[tokio::test]
async fn an_unknown_attempt_may_still_turn_out_to_have_failed() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    let call = given.call_finish(1, FinishOutcome::Failed, "", RETRY);
    assert_eq!(given.send(&call).await, Answer::Finished(Finished::Recorded { job: JobState::Pending }));
    assert_eq!(states(&given.job().await), [AttemptState::Failed]);
}

#[tokio::test]
async fn a_holder_that_sent_nothing_proves_that_an_unknown_attempt_failed() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    assert_eq!(given.abort(1).await, Finished::Recorded { job: JobState::Pending });
    let job = given.job().await;
    assert_eq!((states(&job), job.attempts[0].reason.as_str()), (vec![AttemptState::Failed], "not_sent"));
    let before = given.dump().await;
    let repeated = Finished::Repeated { attempt: AttemptState::Failed, job: JobState::Pending, completed_by: 0 };
    assert_eq!(given.abort(1).await, repeated);
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn a_success_of_an_attempt_judged_otherwise_wins_while_the_job_is_open() {
    let redis = Redis::start().await;
    for outcome in [ResolveOutcome::Failed, ResolveOutcome::Canceled, ResolveOutcome::Abandoned] {
        let given = redis.given_unknown().await;
        given.resolve(1, outcome, Word::Provider, RETRY).await;
        let was = given.job().await.attempts[0].state;
        assert_eq!(given.succeed(1, "after all").await, Finished::Won { version: 1, was, job: None }, "{outcome:?}");
        let job = given.job().await;
        assert_eq!((job.completed_by, job.result.clone()), (1, payload("after all")));
        assert_eq!(last_event(&job), ("contradiction", 1));
    }
}

#[tokio::test]
async fn a_success_after_the_end_is_discarded_and_its_row_says_so() {
    let redis = Redis::start().await;
    for state in [JobState::Canceled, JobState::Failed, JobState::Indeterminate] {
        let given = redis.given_in(state).await;
        let before = given.job().await;
        let discarded = Finished::Discarded { attempt: AttemptState::Discarded, completed_by: 0 };
        assert_eq!(given.succeed(1, "late").await, discarded, "{state}");
        let job = given.job().await;
        assert_eq!((job.state, job.version, job.result.clone()), (state, before.version, before.result));
        assert_eq!((states(&job), last_event(&job)), (vec![AttemptState::Discarded], ("discarded", 1)));
        let repeated = Finished::Repeated { attempt: AttemptState::Discarded, job: state, completed_by: 0 };
        assert_eq!(given.succeed(1, "late").await, repeated);
    }
}

#[tokio::test]
async fn an_attempt_from_before_a_reopening_cannot_claim_the_result() {
    let redis = Redis::start().await;
    let mut given = redis.given_failed().await;
    given.reopen(1).await;
    assert_eq!(given.begins(First::Running).await, 2);
    let discarded = Finished::Discarded { attempt: AttemptState::Discarded, completed_by: 0 };
    assert_eq!(given.succeed(1, "from before").await, discarded);
    let job = given.job().await;
    assert_eq!((job.state, job.version, job.result), (JobState::Running, 2, Payload::default()));
    assert_eq!(given.succeed(2, "from now").await, Finished::Won { version: 3, was: AttemptState::Running, job: None });
}

#[tokio::test]
async fn news_of_a_judged_attempt_changes_nothing() {
    let redis = Redis::start().await;
    let outcomes = [FinishOutcome::Failed, FinishOutcome::Unknown, FinishOutcome::Aborted];
    for outcome in outcomes {
        let given = redis.given_succeeded().await;
        let before = given.dump().await;
        let answer = given.send(&given.call_finish(1, outcome, "other", RETRY)).await;
        let discarded = Finished::Discarded { attempt: AttemptState::Succeeded, completed_by: 1 };
        assert_eq!(answer, Answer::Finished(discarded), "{outcome:?}");
        assert_eq!(given.dump().await, before);
    }
}

#[tokio::test]
async fn a_canceling_job_ends_when_its_last_attempt_settles() {
    let redis = Redis::start().await;
    let given = redis.given_canceling().await;
    let call = given.call_finish(1, FinishOutcome::Failed, "refused", RETRY);
    assert_eq!(given.send(&call).await, Answer::Finished(Finished::Recorded { job: JobState::Canceled }));
    let job = given.job().await;
    assert_eq!((job.state, job.version, job.canceled_by.as_str()), (JobState::Canceled, 1, "ada"));
    assert_eq!(job.result, Payload::default());
}

#[tokio::test]
async fn what_happens_to_an_attempt_after_a_forced_end_is_only_its_rows_matter() {
    let redis = Redis::start().await;
    let cases = [
        (FinishOutcome::Failed, AttemptState::Failed),
        (FinishOutcome::Unknown, AttemptState::Unknown),
        (FinishOutcome::Aborted, AttemptState::Aborted),
    ];
    for (outcome, state) in cases {
        let given = redis.given_canceled().await;
        let before = given.job().await;
        let answer = given.send(&given.call_finish(1, outcome, "", RETRY)).await;
        assert_eq!(answer, Answer::Finished(Finished::Recorded { job: JobState::Canceled }));
        let job = given.job().await;
        assert_eq!((states(&job), job.state, job.version), (vec![state], JobState::Canceled, before.version));
        assert_eq!((job.ended_ms, job.reason), (before.ended_ms, before.reason));
    }
}

#[tokio::test]
async fn only_the_attempts_own_token_may_finish_it() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    let before = given.dump().await;
    let (job, outcome, follow) = (given.id, FinishOutcome::Succeeded, Follow::End);
    for (number, token) in [(1, AttemptToken::random()), (2, given.token(1)), (0, given.token(1))] {
        let call = Call::Finish { job, number, token, outcome, body: "forged".to_owned(), follow };
        assert_eq!(given.send(&call).await, Answer::Finished(Finished::NotFound));
    }
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn the_last_of_a_race_to_fail_ends_the_job() {
    let redis = Redis::start().await;
    let given = redis.given_race(2).await;
    assert_eq!(given.fail(1).await, Finished::Recorded { job: JobState::Running });
    assert_eq!(given.job().await.result, Payload::default());
    assert_eq!(given.fail(2).await, Finished::Recorded { job: JobState::Failed });
    let job = given.job().await;
    assert_eq!((states(&job), job.version), (vec![AttemptState::Failed, AttemptState::Failed], 1));
}

/// The reason why results are compared and set. The primary leaves first and stalls, the fallback leaves second and answers, then
/// the primary comes back.
#[tokio::test]
async fn late_primary_cannot_overwrite_the_fallbacks_result() {
    let redis = Redis::start().await;
    let given = redis.given_race(2).await;
    assert_eq!(given.succeed(2, "by fallback").await, Finished::Won { version: 1, was: AttemptState::Running, job: None });
    let finished = given.job().await;
    let discarded = Finished::Discarded { attempt: AttemptState::Discarded, completed_by: 2 };
    assert_eq!(given.succeed(1, "by primary").await, discarded);
    // Only the loser's own row knows that it happened.
    let job = given.job().await;
    assert_eq!(states(&job), [AttemptState::Discarded, AttemptState::Succeeded]);
    assert_eq!((job.completed_by, job.version, job.result), (2, 1, finished.result));
    assert_eq!((job.state, job.ended_ms, job.retain_until_ms), (finished.state, finished.ended_ms, finished.retain_until_ms));
    assert_eq!(job.attempts[1], finished.attempts[1]);
}

#[tokio::test]
async fn an_attempt_resolved_after_the_end_is_discarded_too() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    given.cancel(CancelMode::Force).await;
    let resolved = given.resolve(1, ResolveOutcome::Succeeded, Word::Provider, Follow::End).await;
    assert_eq!(resolved, Resolved::Discarded { completed_by: 0 });
    assert_eq!(states(&given.job().await), [AttemptState::Discarded]);
}

/// Its lease lapsed, its job was asked about by sending the same again, and then its own holder woke up and knew that it had sent
/// nothing: the other one may have been executed, and another attempt would be a second execution.
#[tokio::test]
async fn a_holder_that_sent_nothing_proves_nothing_once_it_was_sent_again() {
    let redis = Redis::start().await;
    for outcome in [FinishOutcome::Aborted, FinishOutcome::Failed] {
        let given = redis.given_unknown().await;
        given.note(1, "", Some((Noted::Replayed, "1 of 5"))).await;
        let before = given.dump().await;
        let finished = given.finish(1, outcome, "", RETRY).await;
        assert!(matches!(finished, Finished::Discarded { attempt: AttemptState::Unknown, .. }), "{finished:?}");
        assert_eq!(given.dump().await, before);
    }
}
