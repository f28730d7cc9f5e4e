//! `begin_attempt`: the state before, one call, the reply and the record after.

use onejob::attempt::{AttemptState, AttemptToken, FinishOutcome};
use onejob::job::{Class, JobState, Rules};
use onejob::store::{Begun, CancelMode};

use crate::scenes::RETRY;
use crate::support::{Answer, Call, First, Given, LEASE_MS, RACE_AFTER_MS, Redis, Submission, sent};

/// Begins for a caller that holds nothing.
async fn begin(given: &Given) -> Begun {
    match given.send(&given.call_begin(First::Running)).await {
        Answer::Begun(begun) => begun,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_holder_begins_at_once() {
    let redis = Redis::start().await;
    let mut given = redis.given_pending().await;
    let begun = given.begin(First::Running).await;
    let job = given.job().await;
    let [attempt] = &job.attempts[..] else { panic!("{:?}", job.attempts) };
    assert_eq!(begun, Begun::Started { number: 1, lease_until_ms: attempt.lease_ms });
    assert_eq!((job.state, job.version, job.revision), (JobState::Running, 0, 2));
    assert_eq!((job.holder_lease_ms, job.next_at_ms), (0, 0));
    assert_eq!((attempt.state, attempt.version), (AttemptState::Running, 0));
    assert_eq!((attempt.started_ms, attempt.lease_ms), (job.updated_ms, job.updated_ms + LEASE_MS));
    assert_eq!((attempt.url.as_str(), attempt.certificate.as_str()), (sent().url, sent().certificate));
}

#[tokio::test]
async fn a_beginning_sent_again_is_told_what_its_attempt_is_now() {
    let redis = Redis::start().await;
    let given = redis.given_pending().await;
    let token = AttemptToken::random();
    let call = Call::Begin { job: given.id, token, holder: Some(given.submission.token), first: First::Starting };
    assert!(matches!(given.send(&call).await, Answer::Begun(Begun::Started { number: 1, .. })));
    let repeated = |state| Answer::Begun(Begun::Repeated { number: 1, state });
    assert_eq!(given.send(&call).await, repeated(AttemptState::Starting));
    given.lapse().await;
    given.tick().await;
    assert_eq!(given.send(&call).await, repeated(AttemptState::Aborted));
}

#[tokio::test]
async fn a_holder_is_not_overtaken_until_its_lease_lapsed() {
    let redis = Redis::start().await;
    let given = redis.given_pending().await;
    let Begun::TooEarly { wait_ms } = begin(&given).await else { panic!("not too early") };
    assert!((LEASE_MS - 10_000..=LEASE_MS).contains(&wait_ms), "{wait_ms}");
    given.lapse().await;
    assert!(matches!(begin(&given).await, Begun::Started { number: 1, .. }));
}

/// `Retry-After` binds the holder too.
#[tokio::test]
async fn a_delay_binds_the_holder_and_then_the_holder_goes_first() {
    let redis = Redis::start().await;
    let mut given = redis.given_running().await;
    given.fail_and_retry(1, 20_000, 20_000).await;
    let Begun::TooEarly { wait_ms } = given.begin(First::Running).await else { panic!("not too early") };
    assert!((10_000..=20_000).contains(&wait_ms), "{wait_ms}");
    given.age(20_000).await;
    let Begun::TooEarly { wait_ms } = begin(&given).await else { panic!("not too early") };
    assert!((10_000..=20_000).contains(&wait_ms), "{wait_ms}");
    assert_eq!(given.begins(First::Running).await, 2);
}

#[tokio::test]
async fn starting_running_and_unknown_block_an_exclusive_job() {
    let redis = Redis::start().await;
    let cases = [
        (redis.given_starting().await, AttemptState::Starting),
        (redis.given_running().await, AttemptState::Running),
        (redis.given_unknown().await, AttemptState::Unknown),
    ];
    for (given, by) in cases {
        assert_eq!(begin(&given).await, Begun::Blocked { by, number: 1 });
        // No lease and no patience changes that: only a judgement does.
        given.age(100 * LEASE_MS).await;
        assert_eq!(begin(&given).await, Begun::Blocked { by, number: 1 });
    }
}

#[tokio::test]
async fn a_race_begins_another_only_after_the_first_has_run_for_long_enough() {
    let redis = Redis::start().await;
    let submission = Submission { class: Class::Race, first: First::Running, ..redis.submission() };
    let mut given = redis.given(submission).await;
    assert_eq!(given.begin(First::Running).await, Begun::Blocked { by: AttemptState::Running, number: 1 });
    given.age(RACE_AFTER_MS).await;
    assert_eq!(given.begins(First::Running).await, 2);
    assert_eq!(given.job().await.attempts.len(), 2);
    assert_eq!(given.begin(First::Running).await, Begun::Blocked { by: AttemptState::Running, number: 2 });
    given.age(RACE_AFTER_MS).await;
    // Two run for long enough, and two is the most.
    assert_eq!(given.begin(First::Running).await, Begun::Blocked { by: AttemptState::Running, number: 2 });
}

#[tokio::test]
async fn a_race_begins_nothing_while_one_is_starting() {
    let redis = Redis::start().await;
    let submission = Submission { class: Class::Race, first: First::Starting, ..redis.submission() };
    let mut given = redis.given(submission).await;
    given.age(RACE_AFTER_MS).await;
    assert_eq!(given.begin(First::Running).await, Begun::Blocked { by: AttemptState::Starting, number: 1 });
}

#[tokio::test]
async fn a_race_begins_nothing_while_one_is_unknown() {
    let redis = Redis::start().await;
    let mut given = redis.given_race(2).await;
    given.lose(2).await;
    assert_eq!(given.begin(First::Running).await, Begun::Blocked { by: AttemptState::Unknown, number: 2 });
}

#[tokio::test]
async fn nothing_begins_past_the_deadline() {
    let redis = Redis::start().await;
    let given = redis.given(Submission { deadline_ms: LEASE_MS, ..redis.submission() }).await;
    given.lapse().await;
    assert_eq!(begin(&given).await, Begun::Deadline);
}

#[tokio::test]
async fn attempts_that_touched_a_provider_are_bounded() {
    let redis = Redis::start().await;
    let mut given = redis.given_running().await;
    for number in 1..=2 {
        given.fail_and_retry(number, 0, 0).await;
        given.begins(First::Running).await;
    }
    // The third was the last: the job ends with it.
    given.fail_and_retry(3, 0, 0).await;
    assert_eq!(begin(&given).await, Begun::Ended { state: JobState::Failed });
}

#[tokio::test]
async fn a_record_with_more_attempts_than_allowed_is_exhausted() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    given.fail_and_retry(1, 0, 0).await;
    given.rewrite("record[P.policy][L.attempts_max] = 1").await;
    assert_eq!(begin(&given).await, Begun::Exhausted { attempts: 1 });
}

/// An attempt that kills its gateway again and again, before it sends anything, stops after a limit too.
#[tokio::test]
async fn attempts_that_touched_no_provider_are_bounded_too() {
    let redis = Redis::start().await;
    let submission = redis.submission();
    let rules = Rules { attempts_max: 1, ..submission.rules };
    let mut given = redis.given(Submission { rules, first: First::Starting, ..submission }).await;
    let mut begun = 1;
    loop {
        let unsent = given.call_finish(begun, FinishOutcome::Aborted, "", RETRY);
        given.send(&unsent).await;
        if given.job().await.is_ended() {
            break;
        }
        begun = given.begins(First::Starting).await;
        assert!(begun < 100, "it never stops");
    }
    assert_eq!(begun, 9);
    let job = given.job().await;
    assert_eq!((job.state, job.reason.as_str()), (JobState::Failed, "no_permit"));
}

#[tokio::test]
async fn nothing_begins_on_a_job_that_is_canceled_or_ended() {
    let redis = Redis::start().await;
    let given = redis.given_canceling().await;
    assert_eq!(begin(&given).await, Begun::Canceling);
    given.cancel(CancelMode::Force).await;
    assert_eq!(begin(&given).await, Begun::Ended { state: JobState::Canceled });
    for state in [JobState::Succeeded, JobState::Failed, JobState::Indeterminate] {
        assert_eq!(begin(&redis.given_in(state).await).await, Begun::Ended { state });
    }
}

#[tokio::test]
async fn nothing_begins_where_no_job_is() {
    let redis = Redis::start().await;
    let given = redis.given_absent(redis.submission()).await;
    assert_eq!(begin(&given).await, Begun::NotFound);
    assert_eq!(given.dump().await.packed, None);
}
