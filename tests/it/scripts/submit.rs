//! `submit_job`: the state before, one call, the reply and the record after.

use onejob::attempt::AttemptState;
use onejob::error::StoreError;
use onejob::job::{Class, JobId, JobState, Owner};
use onejob::store::{CancelMode, Gone, Script, Submitted};

use crate::scenes::releasing;
use crate::support::{Answer, Call, First, Given, KEY_LIFE_MS, LEASE_MS, RETENTION_MS, Redis, Submission, payload, sent};

/// Sends another caller's claim of the same key.
async fn submit(given: &Given, submission: &Submission) -> Submitted {
    match given.send(&Call::Submit(submission.clone())).await {
        Answer::Submitted(submitted) => submitted,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_free_key_becomes_a_pending_job_that_its_submitter_holds() {
    let redis = Redis::start().await;
    let given = redis.given_absent(redis.submission()).await;
    let Submitted::Created { id, created_ms, attempt } = given.submit().await else { panic!("not created") };
    assert_eq!((id, attempt), (given.submission.id(), None));
    let job = given.job().await;
    assert_eq!(job.id, id);
    assert_eq!((job.state, job.version, job.revision), (JobState::Pending, 0, 1));
    assert_eq!((job.created_ms, job.updated_ms, job.ended_ms, job.deadline_ms), (created_ms, created_ms, 0, 0));
    assert_eq!((job.holder_lease_ms, job.next_at_ms), (created_ms + LEASE_MS, 0));
    assert_eq!((job.owner.as_str(), job.route.as_str(), job.class), ("shop", "print", Class::Exclusive));
    assert_eq!(job.rules, given.submission.rules);
    assert_eq!(job.input, payload("print page 1"));
    assert_eq!((job.attempts.len(), job.events.len(), job.completed_by), (0, 0, 0));
    assert_eq!(given.dump().await.expires_at_ms, -1);
}

#[tokio::test]
async fn a_claim_with_the_write_ahead_holds_everything_that_a_status_call_needs() {
    let redis = Redis::start().await;
    let submission = Submission { first: First::Running, deadline_ms: 5 * LEASE_MS, ..redis.submission() };
    let given = redis.given_absent(submission).await;
    let Submitted::Created { created_ms, attempt, .. } = given.submit().await else { panic!("not created") };
    assert_eq!(attempt, Some(AttemptState::Running));
    let job = given.job().await;
    assert_eq!((job.state, job.deadline_ms, job.holder_lease_ms), (JobState::Running, created_ms + 5 * LEASE_MS, 0));
    let [attempt] = &job.attempts[..] else { panic!("{:?}", job.attempts) };
    assert_eq!((attempt.number, attempt.state, attempt.token), (1, AttemptState::Running, given.submission.token));
    assert_eq!((attempt.provider.as_str(), attempt.gateway.as_str(), attempt.version), ("laser", "gateway-1", 0));
    assert_eq!((attempt.started_ms, attempt.lease_ms, attempt.ended_ms), (created_ms, created_ms + LEASE_MS, 0));
    assert_eq!(attempt.url, sent().url);
    assert_eq!(attempt.request_hash, sent().request_hash);
    assert_eq!(attempt.certificate, sent().certificate);
}

#[tokio::test]
async fn a_claim_with_the_slot_only_has_touched_nothing() {
    let redis = Redis::start().await;
    let given = redis.given_starting().await;
    let job = given.job().await;
    assert_eq!((job.state, job.attempts[0].state), (JobState::Running, AttemptState::Starting));
    assert_eq!((job.attempts[0].url.as_str(), job.attempts[0].request_hash.len()), ("", 0));
}

#[tokio::test]
async fn a_claim_sent_again_is_told_what_its_attempt_is_now() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    let created = given.submit().await;
    assert!(matches!(created, Submitted::Created { attempt: Some(AttemptState::Running), .. }), "{created:?}");
    given.lose(1).await;
    let created = given.submit().await;
    assert!(matches!(created, Submitted::Created { attempt: Some(AttemptState::Unknown), .. }), "{created:?}");
    given.succeed(1, "done").await;
    let created = given.submit().await;
    assert!(matches!(created, Submitted::Created { attempt: Some(AttemptState::Succeeded), .. }), "{created:?}");
}

#[tokio::test]
async fn the_same_request_attaches_with_the_whole_snapshot() {
    let redis = Redis::start().await;
    for state in JobState::ALL {
        let given = redis.given_in(state).await;
        let existing = submit(&given, &given.submission.by_another()).await;
        assert_eq!(existing, Submitted::Existing(Box::new(given.job().await)), "{state}");
    }
}

#[tokio::test]
async fn another_request_under_the_key_is_a_conflict_in_every_state() {
    let redis = Redis::start().await;
    for state in JobState::ALL {
        let given = redis.given_in(state).await;
        let other = Submission { request: "print page 2".to_owned(), ..given.submission.by_another() };
        assert_eq!(submit(&given, &other).await, Submitted::Conflict { id: given.id }, "{state}");
    }
}

#[tokio::test]
async fn after_the_retention_the_key_tells_the_outcome_and_runs_nothing() {
    let redis = Redis::start().await;
    let given = redis.given_succeeded().await;
    given.age(RETENTION_MS).await;
    let before = given.dump().await;
    let Submitted::Gone(Gone { id, state, ended_ms, owner }) = submit(&given, &given.submission.by_another()).await else {
        panic!("not gone")
    };
    assert_eq!((id, state, owner.as_str()), (given.id, JobState::Succeeded, "shop"));
    assert!(ended_ms > 0);
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn after_the_keys_life_the_key_is_free() {
    let redis = Redis::start().await;
    let given = redis.given_succeeded().await;
    given.age(KEY_LIFE_MS).await;
    assert_eq!(given.dump().await.packed, None);
    let created = submit(&given, &given.submission.by_another()).await;
    assert!(matches!(created, Submitted::Created { id, .. } if id != given.id), "{created:?}");
}

#[tokio::test]
async fn equal_identity_and_another_digest_is_refused_by_name() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    given.rewrite("record[P.digest] = string.rep('x', 16)").await;
    assert_eq!(submit(&given, &given.submission.by_another()).await, Submitted::Collision);
    // Not even the holder's own token makes it the same job.
    assert_eq!(submit(&given, &given.submission).await, Submitted::Collision);
}

#[tokio::test]
async fn a_released_failure_gives_its_key_to_the_next_submit() {
    let redis = Redis::start().await;
    let given = redis.given(releasing(&redis)).await;
    given.fail(1).await;
    // The clock of the next gateway runs a minute late.
    let next =
        Submission { time_ms: given.id.time_ms() - LEASE_MS, request: "another".to_owned(), ..given.submission.by_another() };
    let Submitted::Created { id, attempt, .. } = submit(&given, &next).await else { panic!("not created") };
    assert_eq!(attempt, Some(AttemptState::Running));
    assert_eq!(id, JobId::new(given.id.time_ms() + 1, given.id.identity()));
    let job = given.job().await;
    assert_eq!((job.id, job.state, job.version, job.revision, job.attempts.len()), (id, JobState::Running, 0, 1, 1));
    assert_eq!(given.dump().await.expires_at_ms, -1);
    // And the attempt before has nothing to say any more.
    assert_eq!(given.succeed(1, "late").await, onejob::store::Finished::NotFound);
}

#[tokio::test]
async fn only_a_failure_is_released() {
    let redis = Redis::start().await;
    let given = redis.given(releasing(&redis)).await;
    given.lose(1).await;
    let next = given.submission.by_another();
    assert!(matches!(submit(&given, &next).await, Submitted::Existing(_)));
    // Nobody knows whether it happened: never released.
    given.abandon(1).await;
    let existing = submit(&given, &next).await;
    assert!(matches!(&existing, Submitted::Existing(job) if job.state == JobState::Indeterminate), "{existing:?}");

    let given = redis.given(releasing(&redis)).await;
    given.succeed(1, "done").await;
    assert!(matches!(submit(&given, &given.submission.by_another()).await, Submitted::Existing(_)));
    let given = redis.given(releasing(&redis)).await;
    given.cancel(CancelMode::Force).await;
    assert!(matches!(submit(&given, &given.submission.by_another()).await, Submitted::Existing(_)));
}

#[tokio::test]
async fn two_owners_with_one_key_have_two_jobs() {
    let redis = Redis::start().await;
    let given = redis.given_succeeded().await;
    let other = Submission { owner: Owner::new("bank").unwrap(), ..given.submission.by_another() };
    let created = submit(&given, &other).await;
    assert!(matches!(created, Submitted::Created { id, .. } if id.identity() != given.id.identity()), "{created:?}");
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_an_error_and_never_a_free_key() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    let cases = [
        ("BADSCHEMA", "record[P.schema] = 2"),
        ("BADRECORD", "record[32] = 'more'"),
        ("BADRECORD", "record[P.result_body] = nil"),
    ];
    let intact = given.dump().await.packed.unwrap();
    for (code, damage) in cases {
        given.rewrite(damage).await;
        let damaged = given.dump().await;
        for call in [Call::Submit(given.submission.by_another()), given.call_read(), given.call_tick(), given.call_mark(1)] {
            match call.send(&given.store).await {
                Err(StoreError::Fatal { code: found, .. }) => assert_eq!(found, code, "{damage}"),
                other => panic!("{damage}: {other:?}"),
            }
        }
        assert_eq!(given.dump().await, damaged);
        restore(&redis, &given, &intact).await;
    }
}

async fn restore(redis: &Redis, given: &Given, packed: &[u8]) {
    let put = "return redis.call('SET', KEYS[1], (ARGV[1]:gsub('..', function(hex) return string.char(tonumber(hex, 16)) end)))";
    let hex: String = packed.iter().map(|byte| format!("{byte:02x}")).collect();
    redis.value(&["EVAL", put, "1", &given.key(), &hex]).await;
}

/// No attempts at all made a job that nobody could begin or end; a class that no reader knows made one that nobody could read.
#[tokio::test]
async fn arguments_that_make_no_job_are_refused() {
    let redis = Redis::start().await;
    let submission = redis.submission();
    let (id, token) = (submission.id(), submission.token);
    let good: [&[u8]; 25] = [
        id.as_bytes(),
        &[1; 16],
        &[2; 16],
        b"shop",
        b"print",
        b"exclusive",
        b"0",
        b"1",
        b"1",
        b"0",
        b"1000",
        b"1000",
        b"keep",
        b"0",
        b"",
        b"0",
        b"",
        b"pending",
        token.as_bytes(),
        b"1",
        b"",
        b"",
        b"",
        b"",
        b"",
    ];
    // Counted from 1, as the script's header does.
    let bad: [(usize, &[u8]); 16] = [
        (1, b"short"),
        (2, b"short"),
        (3, b"short"),
        (6, b"mutual"),
        (7, b"-1"),
        (8, b"0"),
        (8, b"4294967296"),
        (9, b"0"),
        (10, b"1.5"),
        (11, b"0"),
        (12, b"1001"),
        (13, b"yes"),
        (14, b"soon"),
        (18, b"done"),
        (19, b""),
        (20, b"9007199254740992"),
    ];
    for (position, value) in bad {
        let mut arguments = good;
        arguments[position - 1] = value;
        let error = redis.eval(Script::SubmitJob, &["oj:{key}"], &arguments).await.expect_err("a refusal");
        assert_eq!(error.code(), Some("BADARG"), "ARGV[{position}]: {error}");
        assert_eq!(redis.keys().await, Vec::<String>::new(), "ARGV[{position}]");
    }
    redis.eval(Script::SubmitJob, &["oj:{key}"], &good).await.expect("a job");
}
