//! What went wrong elsewhere, and is right here, as far as the store can show it.

use futures_util::stream::{self, StreamExt as _};
use onejob::attempt::{AttemptState, FinishOutcome, ResolveOutcome};
use onejob::error::StoreError;
use onejob::job::{JobState, Rules};
use onejob::store::{
    Begun, CancelMode, Canceled, Eviction, Finished, Follow, Marked, Read, Resolved, Store, StoreOptions, Submitted, Tell, Word,
};

use crate::support::{
    Answer, Call, First, Given, KEY_LIFE_MS, LEASE_MS, QUARANTINE_MS, RETENTION_MS, Redis, Submission, payload,
};

async fn submit(given: &Given, submission: Submission) -> Submitted {
    match given.send(&Call::Submit(submission)).await {
        Answer::Submitted(submitted) => submitted,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn of_many_submits_at_once_one_is_created_and_the_others_attach() {
    let redis = Redis::start().await;
    let given = redis.given_absent(Submission { first: First::Running, ..redis.submission() }).await;
    let submits = (0..100).map(|_| submit(&given, given.submission.by_another()));
    let replies = futures_util::future::join_all(submits).await;
    let created = replies.iter().filter(|reply| matches!(reply, Submitted::Created { .. })).count();
    let attached = replies.iter().filter(|reply| matches!(reply, Submitted::Existing(_))).count();
    assert_eq!((created, attached), (1, 99));
    let job = given.job().await;
    assert_eq!((job.revision, job.attempts.len()), (1, 1));
    for reply in replies {
        match reply {
            Submitted::Created { id, .. } => assert_eq!(id, job.id),
            Submitted::Existing(existing) => assert_eq!(*existing, job),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn of_two_submits_with_different_bodies_one_is_created_and_nothing_is_overwritten() {
    let redis = Redis::start().await;
    for round in 0..50 {
        let given = redis.given_absent(redis.submission()).await;
        let one = given.submission.by_another();
        let two = Submission { request: "print page 2".to_owned(), ..given.submission.by_another() };
        let (one, two) = match round % 2 {
            0 => tokio::join!(submit(&given, one), submit(&given, two)),
            _ => {
                let (two, one) = tokio::join!(submit(&given, two), submit(&given, one));
                (one, two)
            }
        };
        let winner = match (&one, &two) {
            (Submitted::Created { id, .. }, Submitted::Conflict { id: known }) if id == known => "print page 1",
            (Submitted::Conflict { id: known }, Submitted::Created { id, .. }) if id == known => "print page 2",
            other => panic!("{other:?}"),
        };
        let job = given.job().await;
        assert_eq!((job.input, job.revision), (payload(winner), 1));
        assert_eq!(given.dump().await.expires_at_ms, -1);
    }
}

#[tokio::test]
async fn a_submit_repeated_after_the_end_replays_and_never_runs_again() {
    let redis = Redis::start().await;
    for state in [JobState::Succeeded, JobState::Failed, JobState::Canceled, JobState::Indeterminate] {
        let given = redis.given_in(state).await;
        let before = given.dump().await;
        for submission in [given.submission.clone(), given.submission.by_another()] {
            match submit(&given, submission).await {
                // The first caller's own token: it learns that its attempt is over.
                Submitted::Created { id, attempt, .. } => {
                    assert_eq!(id, given.id);
                    assert_ne!(attempt, Some(AttemptState::Starting));
                }
                Submitted::Existing(job) => assert_eq!((job.id, job.state), (given.id, state)),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(given.dump().await, before);
    }
}

#[tokio::test]
async fn the_fingerprint_survives_every_transition() {
    let redis = Redis::start().await;
    for scene in crate::scenes::transitions(&redis).await {
        scene.given.send(&scene.call).await;
        // Claims have been told apart from their repetitions already.
        if scene.call.script() == "submit_job" {
            continue;
        }
        let other = Submission { request: "another".to_owned(), ..scene.given.submission.by_another() };
        assert_eq!(submit(&scene.given, other).await, Submitted::Conflict { id: scene.given.id }, "{}", scene.what);
        let same = submit(&scene.given, scene.given.submission.by_another()).await;
        assert!(matches!(same, Submitted::Existing(_) | Submitted::Gone(_)), "{}: {same:?}", scene.what);
    }
}

#[tokio::test]
async fn of_a_refused_submit_at_most_a_hint_is_left() {
    let redis = Redis::start().await;
    let given = redis.given_succeeded().await;
    let before = (given.dump().await, redis.keys().await);
    submit(&given, Submission { request: "another".to_owned(), ..given.submission.by_another() }).await;
    submit(&given, given.submission.by_another()).await;
    assert_eq!((given.dump().await, redis.keys().await), before);
}

#[tokio::test]
async fn a_job_that_is_unknown_for_longer_than_every_life_still_holds_its_key() {
    let redis = Redis::start().await;
    for state in [JobState::Pending, JobState::Running, JobState::Unknown, JobState::Canceling] {
        let given = redis.given_in(state).await;
        given.age(100 * KEY_LIFE_MS).await;
        assert_eq!(given.dump().await.expires_at_ms, -1, "{state}");
        assert!(matches!(submit(&given, given.submission.by_another()).await, Submitted::Existing(_)));
    }
}

#[tokio::test]
async fn a_retry_is_gone_until_the_keys_life_ends_and_a_new_job_after_it() {
    let redis = Redis::start().await;
    let given = redis.given_succeeded().await;
    given.age(RETENTION_MS).await;
    given.tick().await;
    for _ in 0..3 {
        let gone = submit(&given, given.submission.by_another()).await;
        assert!(matches!(&gone, Submitted::Gone(gone) if gone.state == JobState::Succeeded), "{gone:?}");
        given.age(200_000).await;
    }
    given.age(KEY_LIFE_MS - RETENTION_MS - 600_000).await;
    let created = submit(&given, given.submission.by_another()).await;
    assert!(matches!(created, Submitted::Created { .. }), "{created:?}");
}

#[tokio::test]
async fn an_attempt_past_its_deadline_loses_to_the_one_that_took_over() {
    let redis = Redis::start().await;
    let given = redis.given_race(2).await;
    given.succeed(2, "by B").await;
    let won = given.job().await;
    assert_eq!(given.succeed(1, "by A").await, Finished::Discarded { attempt: AttemptState::Discarded, completed_by: 2 });
    let job = given.job().await;
    assert_eq!((job.result, job.completed_by, job.version), (won.result, 2, 1));
    let event = job.events.last().unwrap();
    assert_eq!((event.event.as_str(), event.attempt), ("discarded", 1));
}

#[tokio::test]
async fn an_attempt_that_fails_after_another_won_leaves_the_result_intact() {
    let redis = Redis::start().await;
    for outcome in [FinishOutcome::Failed, FinishOutcome::Unknown, FinishOutcome::Aborted] {
        let given = redis.given_race(2).await;
        given.succeed(2, "by B").await;
        let won = given.job().await;
        given.send(&given.call_finish(1, outcome, "refused", Follow::End)).await;
        let job = given.job().await;
        assert_eq!((job.state, job.version, job.completed_by), (JobState::Succeeded, 1, 2), "{outcome:?}");
        assert_eq!((job.result, job.reason, job.attempts[1].clone()), (won.result, won.reason, won.attempts[1].clone()));
    }
}

#[tokio::test]
async fn a_success_past_the_deadline_counts_if_nobody_took_over() {
    let redis = Redis::start().await;
    let submission = Submission { first: First::Running, deadline_ms: LEASE_MS, ..redis.submission() };
    let given = redis.given(submission).await;
    given.age(10 * LEASE_MS).await;
    assert_eq!(given.succeed(1, "late").await, Finished::Won { version: 1, was: AttemptState::Running, job: None });
    assert_eq!(given.job().await.state, JobState::Succeeded);
}

/// Case 18. Both orders by force, and as it comes; many at once, so that the races of one job meet those of others.
#[tokio::test]
async fn a_success_once_told_is_never_followed_by_canceled() {
    const ROUNDS: usize = 10_000;
    const AT_ONCE: usize = 64;
    let redis = Redis::start().await;
    redis.store().await;
    let fates: Vec<JobState> =
        stream::iter(0..ROUNDS).map(|round| cancel_and_succeed(&redis, round)).buffer_unordered(AT_ONCE).collect().await;
    let succeeded = fates.iter().filter(|fate| **fate == JobState::Succeeded).count();
    assert!(fates.len() == ROUNDS && succeeded > ROUNDS / 2 && succeeded < ROUNDS, "{succeeded} of {ROUNDS} succeeded");
}

/// One race, and how its job ended.
async fn cancel_and_succeed(redis: &Redis, round: usize) -> JobState {
    let given = redis.given_running().await;
    let mode = if round.is_multiple_of(2) { CancelMode::Force } else { CancelMode::Graceful };
    let (canceled, finished) = match round % 4 / 2 + round % 3 {
        0 => {
            let canceled = given.cancel(mode).await;
            (canceled, given.succeed(1, "done").await)
        }
        1 => {
            let finished = given.succeed(1, "done").await;
            (given.cancel(mode).await, finished)
        }
        2 => tokio::join!(given.cancel(mode), given.succeed(1, "done")),
        _ => {
            let (finished, canceled) = tokio::join!(given.succeed(1, "done"), given.cancel(mode));
            (canceled, finished)
        }
    };
    let job = given.job().await;
    match &finished {
        Finished::Won { version: 1, .. } => {
            assert_eq!((job.state, job.completed_by), (JobState::Succeeded, 1));
            let told = matches!(canceled, Canceled::Ended { state: JobState::Succeeded } | Canceled::Canceling { open: 1 });
            assert!(told, "{canceled:?}");
        }
        Finished::Discarded { completed_by: 0, .. } => {
            assert_eq!((job.state, job.completed_by, mode), (JobState::Canceled, 0, CancelMode::Force));
            assert!(matches!(&canceled, Canceled::Canceled { effect, .. } if effect == "unknown"), "{canceled:?}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(job.version, 1);
    job.state
}

#[tokio::test]
async fn a_cancel_aborts_what_starts_and_waits_for_what_may_have_happened() {
    let redis = Redis::start().await;
    let mut given = redis.given_race(3).await;
    given.lose(2).await;
    // The only way to a starting one beside the others is an old record.
    given.rewrite("record[P.attempts][3][A.state] = 'starting'").await;
    assert_eq!(given.cancel(CancelMode::Graceful).await, Canceled::Canceling { open: 2 });
    let states = |job: &onejob::job::Job| job.attempts.iter().map(|attempt| attempt.state).collect::<Vec<_>>();
    let expected = [AttemptState::Running, AttemptState::Unknown, AttemptState::Aborted];
    assert_eq!(states(&given.job().await), expected);
    assert_eq!(given.begin(First::Running).await, Begun::Canceling);
    given.fail(1).await;
    assert_eq!(given.job().await.state, JobState::Canceling);
    given.resolve(2, ResolveOutcome::Canceled, Word::Provider, Follow::End).await;
    let job = given.job().await;
    assert_eq!(job.state, JobState::Canceled);
    assert!(job.attempts.iter().all(|attempt| !attempt.state.is_open()), "{job:?}");
}

#[tokio::test]
async fn a_gateway_paused_over_a_cancel_never_sends() {
    let redis = Redis::start().await;
    for mode in [CancelMode::Graceful, CancelMode::Force] {
        let given = redis.given_starting().await;
        given.cancel(mode).await;
        let before = given.dump().await;
        assert!(matches!(given.mark(1).await, Marked::Fenced { .. }), "{mode:?}");
        assert_eq!(given.dump().await, before);
    }
}

#[tokio::test]
async fn a_stale_owners_failure_changes_its_own_row_alone() {
    let redis = Redis::start().await;
    let mut given = redis.given_unknown().await;
    given.age(QUARANTINE_MS).await;
    given.resolve(1, ResolveOutcome::Failed, Word::Operator, Follow::Retry { delay_ms: 0, hold_ms: 0 }).await;
    given.begins(First::Running).await;
    let before = given.dump().await;
    // While a newer one runs.
    assert_eq!(
        given.fail(1).await,
        Finished::Repeated { attempt: AttemptState::Failed, job: JobState::Running, completed_by: 0 }
    );
    assert_eq!(given.lose(1).await, Finished::Discarded { attempt: AttemptState::Failed, completed_by: 0 });
    assert_eq!(given.dump().await, before);
    // And once it has won.
    given.succeed(2, "done").await;
    let before = given.dump().await;
    given.fail(1).await;
    given.lose(1).await;
    assert_eq!(given.dump().await, before);
}

/// The reply of each is lost and the call is sent again, then answered by the same facts.
#[tokio::test]
async fn a_lost_reply_costs_nothing() {
    let redis = Redis::start().await;
    let given = redis.given_pending().await;
    let begin = Call::Begin {
        job: given.id,
        token: onejob::attempt::AttemptToken::random(),
        holder: Some(given.submission.token),
        first: First::Running,
    };
    given.send(&begin).await;
    let again = given.send(&begin).await;
    assert_eq!(again, Answer::Begun(Begun::Repeated { number: 1, state: AttemptState::Running }));

    let given = redis.given_unknown().await;
    let resolve = given.call_resolve(1, ResolveOutcome::Succeeded, Word::Provider, Follow::End);
    assert_eq!(given.send(&resolve).await, Answer::Resolved(Resolved::Won { version: 1 }));
    let repeated = Resolved::Repeated { attempt: AttemptState::Succeeded, job: JobState::Succeeded, completed_by: 1 };
    assert_eq!(given.send(&resolve).await, Answer::Resolved(repeated));

    let given = redis.given_running().await;
    let cancel = given.call_cancel(CancelMode::Force);
    let first = given.send(&cancel).await;
    assert_eq!(given.send(&cancel).await, first);
}

#[tokio::test]
async fn an_evicting_redis_is_refused_unless_somebody_takes_the_risk() {
    let redis = Redis::start_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    match Store::connect(redis.options()).await.map(|(_, checked)| checked) {
        Err(StoreError::Fatal { code, detail }) => {
            assert_eq!(code, "EVICTION");
            assert!(detail.contains("allkeys-lru") && detail.contains("noeviction"), "{detail}");
        }
        other => panic!("{other:?}"),
    }
    let options = StoreOptions { eviction: Eviction::Allowed, ..redis.options() };
    let (_, checked) = Store::connect(options).await.expect("the risk is taken");
    assert!(checked.warnings.iter().any(|warning| warning.contains("allkeys-lru")), "{:?}", checked.warnings);
}

/// The password of a socket's URL stands in its query, and was told with it.
#[tokio::test]
async fn a_redis_that_is_not_there_is_told_without_its_password() {
    for url in ["redis+unix:///nowhere/redis.sock?user=app&pass=hunter2", "redis://app:hunter2@127.0.0.1:1"] {
        let Err(refused) = Store::connect(StoreOptions::new(url)).await else { panic!("nothing is there") };
        assert!(refused.to_string().contains("cannot connect") && !refused.to_string().contains("hunter2"), "{refused}");
    }
}

#[tokio::test]
async fn a_redis_that_does_not_talk_about_itself_is_a_warning() {
    let redis = Redis::start().await;
    redis.value(&["ACL", "SETUSER", "gateway", "on", ">secret", "~*", "&*", "+@all", "-info", "-config"]).await;
    let options = StoreOptions { url: redis.url_of("gateway", "secret"), ..redis.options() };
    let (store, checked) = Store::connect(options).await.expect("a store");
    assert_eq!(checked.warnings.len(), 2, "{:?}", checked.warnings);
    assert!(checked.warnings.iter().any(|warning| warning.contains("noeviction")), "{:?}", checked.warnings);
    assert_eq!(store.read_job(redis.submission().identity()).await, Ok(Read::NotFound));
}

#[tokio::test]
async fn another_schema_is_refused_by_name() {
    let redis = Redis::start().await;
    redis.store().await;
    redis.value(&["HSET", "oj:meta", "schema", "2"]).await;
    match Store::connect(redis.options()).await.map(|(_, checked)| checked) {
        Err(StoreError::Fatal { code, detail }) => {
            assert_eq!(code, "SCHEMA");
            assert!(detail.contains("schema 2"), "{detail}");
        }
        other => panic!("{other:?}"),
    }
}

/// Case 34, with two thousand jobs where a million would tell the same. Created, run, ended, expired: the number of keys is back
/// where it was. `blobs` has the same with large bodies, and with the memory.
#[tokio::test]
async fn jobs_that_have_expired_leave_nothing_behind() {
    const JOBS: usize = 2000;
    const AT_ONCE: usize = 64;
    let redis = Redis::start().await;
    redis.store().await;
    let before = redis.keys().await;
    stream::iter(0..JOBS).for_each_concurrent(AT_ONCE, |_| live_and_expire(&redis)).await;
    assert_eq!(redis.keys().await, before);
}

async fn live_and_expire(redis: &Redis) {
    let submission = redis.submission();
    let rules = Rules { retention_ms: KEY_LIFE_MS, ..submission.rules };
    let given = redis.given(Submission { rules, first: First::Running, ..submission }).await;
    let identity = given.id.identity();
    let due = format!("oj:due:{{{:02x}}}", identity.shard());
    let hint_ms: u64 = redis.command(&["ZSCORE", &due, &identity.to_string()]).await;
    let (job, token, result) = (given.id, given.token(1), payload("done"));
    let finish = onejob::store::FinishAttempt {
        job,
        number: 1,
        token,
        outcome: FinishOutcome::Succeeded,
        result: &result,
        reason: "",
        remote_id: "",
        model: "",
        follow: Follow::End,
        hint_ms: Some(hint_ms),
        strip_at_ms: None,
        tell: Tell::Nothing,
    };
    assert_eq!(
        given.store.finish_attempt(&finish).await,
        Ok(Finished::Won { version: 1, was: AttemptState::Running, job: None })
    );
    assert!(given.dump().await.packed.is_some());
    given.age(KEY_LIFE_MS).await;
}
