//! `note_attempt`: the state before, one call, the reply and the record after.

use onejob::attempt::{AttemptState, AttemptToken};
use onejob::job::JobState;
use onejob::store::{Finished, NoteAttempt, NoteReply, Noted, Script};

use crate::support::{Call, Redis};

#[tokio::test]
async fn what_is_learned_about_an_attempt_leaves_every_state_as_it_is() {
    let redis = Redis::start().await;
    for given in [redis.given_running().await, redis.given_unknown().await, redis.given_canceling().await] {
        let before = given.job().await;
        let noted = given.note(1, "print-7", Some((Noted::CancelSent, "by id"))).await;
        let attempt = before.attempts[0].state;
        assert_eq!(noted, NoteReply::Noted { attempt, job: before.state });
        let job = given.job().await;
        assert_eq!((job.state, job.version, job.revision), (before.state, before.version, before.revision + 1));
        let named = onejob::attempt::Attempt { remote_id: "print-7".to_owned(), ..before.attempts[0].clone() };
        assert_eq!(job.attempts, [named]);
        let event = job.events.last().unwrap();
        let told = (event.event.as_str(), event.attempt, event.actor.as_str(), event.detail.as_str());
        assert_eq!(told, ("cancel_sent", 1, "ada", "by id"));
        assert_eq!(event.at_ms, job.updated_ms);
    }
}

/// A second word for it would make the work that has the first one unaskable.
#[tokio::test]
async fn the_first_name_of_an_attempt_stays() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    given.note(1, "print-7", None).await;
    let before = given.dump().await;
    let repeated = NoteReply::Repeated { attempt: AttemptState::Running, job: JobState::Running };
    for name in ["print-7", "print-8", ""] {
        assert_eq!(given.note(1, name, None).await, repeated, "{name}");
    }
    assert_eq!(given.dump().await, before);
}

#[tokio::test]
async fn an_event_is_noted_once_for_each_attempt_and_each_detail() {
    let redis = Redis::start().await;
    let given = redis.given_race(2).await;
    given.lose(1).await;
    given.lose(2).await;
    let calls = [(1, "1 of 5"), (1, "1 of 5"), (1, "2 of 5"), (2, "1 of 5"), (2, "1 of 5")];
    let mut told = Vec::new();
    for (number, detail) in calls {
        told.push(matches!(given.note(number, "", Some((Noted::Replayed, detail))).await, NoteReply::Noted { .. }));
    }
    assert_eq!(told, [true, false, true, true, false]);
    let job = given.job().await;
    assert_eq!((job.happened(1, "replayed").count(), job.happened(2, "replayed").count()), (2, 1));
}

/// Whoever is told so does not send it.
#[tokio::test]
async fn only_an_unknown_attempt_of_an_open_job_is_sent_again() {
    let redis = Redis::start().await;
    for given in [redis.given_running().await, redis.given_canceled().await] {
        let before = given.dump().await;
        let told = given.note(1, "", Some((Noted::Replayed, "1 of 5"))).await;
        assert!(matches!(told, NoteReply::Repeated { attempt, .. } if attempt != AttemptState::Unknown), "{told:?}");
        assert_eq!(given.dump().await, before);
    }
}

#[tokio::test]
async fn a_noted_name_outlives_the_attempts_end() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    given.note(1, "print-7", None).await;
    given.lose(1).await;
    assert_eq!(given.job().await.attempts[0].remote_id, "print-7");
    let finished = given.succeed(1, "done").await;
    assert!(matches!(finished, Finished::Won { .. }), "{finished:?}");
    assert_eq!(given.job().await.attempts[0].remote_id, "print-7");
}

#[tokio::test]
async fn an_ended_job_keeps_what_is_left_of_its_life() {
    let redis = Redis::start().await;
    let given = redis.given_canceled().await;
    let before = given.dump().await;
    given.note(1, "print-7", None).await;
    let after = given.dump().await;
    assert_eq!(after.expires_at_ms, before.expires_at_ms);
    assert_ne!(after.packed, before.packed);
}

#[tokio::test]
async fn only_who_has_the_token_may_note() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    let before = given.dump().await;
    let note =
        NoteAttempt { job: given.id, number: 1, token: AttemptToken::random(), remote_id: "forged", model: "", event: None };
    assert_eq!(given.store.note_attempt(&note).await.unwrap(), NoteReply::NotFound);
    let another = NoteAttempt { number: 2, token: given.token(1), ..note };
    assert_eq!(given.store.note_attempt(&another).await.unwrap(), NoteReply::NotFound);
    let call = given.call_note(1, "print-7", None).for_another_incarnation().unwrap();
    assert_eq!(format!("{:?}", given.send(&call).await), "Noted(NotFound)");
    assert_eq!(given.dump().await, before);
    assert!(matches!(call, Call::Note { .. }));
}

#[tokio::test]
async fn a_note_in_other_words_is_a_callers_bug() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    let (job, token) = (given.id.as_bytes(), *given.token(1).as_bytes());
    for (event, actor, what) in [("resolved", "ada", "event must be"), ("replayed", "", "an event has an actor")] {
        let arguments: [&[u8]; 8] = [job, b"1", &token, b"", b"", event.as_bytes(), actor.as_bytes(), b""];
        let error = redis.eval(Script::NoteAttempt, &[&given.key()], &arguments).await.expect_err("a refusal");
        assert!(error.to_string().contains(what), "{error}");
    }
}
