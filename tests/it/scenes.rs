//! Every kind of call in every situation that matters to it: what the laws are checked against.

use onejob::attempt::{AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::Rules;
use onejob::store::{CancelMode, Follow, Noted, Word};

use crate::support::{Call, First, Given, KEY_LIFE_MS, LEASE_MS, RACE_AFTER_MS, RETENTION_MS, Redis, Submission};

/// What may follow, where it does not matter.
pub const RETRY: Follow = Follow::Retry { delay_ms: 0, hold_ms: 0 };

/// A job, and a call that is about to be made.
pub struct Scene {
    pub what: &'static str,
    pub given: Given,
    pub call: Call,
}

/// A job whose first failure gives its key back.
pub fn releasing(redis: &Redis) -> Submission {
    let submission = redis.submission();
    Submission { rules: Rules { releases_on_failure: true, ..submission.rules }, first: First::Running, ..submission }
}

/// Calls that change the record, at least one for every transition.
pub async fn transitions(redis: &Redis) -> Vec<Scene> {
    let mut scenes = Vec::new();
    let mut scene = |what, given: Given, call| scenes.push(Scene { what, given, call });

    for (what, first) in
        [("submit pending", First::Pending), ("submit starting", First::Starting), ("submit running", First::Running)]
    {
        let submission = Submission { first, ..redis.submission() };
        scene(what, redis.given_absent(submission.clone()).await, Call::Submit(submission));
    }
    let given = redis.given(releasing(redis)).await;
    given.fail(1).await;
    let next = given.submission.by_another();
    scene("submit after a failure that gave the key back", given, Call::Submit(next));

    for (what, first) in [("begin starting", First::Starting), ("begin running", First::Running)] {
        let given = redis.given_pending().await;
        let call = Call::Begin { job: given.id, token: AttemptToken::random(), holder: Some(given.submission.token), first };
        scene(what, given, call);
    }
    let given = redis.given_race(1).await;
    let call = given.call_begin(First::Running);
    scene("begin a race", given, call);

    let given = redis.given_starting().await;
    let call = given.call_mark(1);
    scene("mark", given, call);

    for (what, given) in [("extend starting", redis.given_starting().await), ("extend running", redis.given_running().await)] {
        let call = given.call_extend(1, 1);
        scene(what, given, call);
    }
    let given = redis.given_running().await;
    given.lapse().await;
    let call = given.call_extend(1, 1);
    scene("extend late", given, call);

    let finishes = [
        ("finish succeeded", FinishOutcome::Succeeded, Follow::End),
        ("finish failed, the end", FinishOutcome::Failed, Follow::End),
        ("finish failed, retry", FinishOutcome::Failed, Follow::Retry { delay_ms: 20_000, hold_ms: 20_000 }),
        ("finish unknown", FinishOutcome::Unknown, Follow::End),
        ("finish aborted", FinishOutcome::Aborted, RETRY),
    ];
    for (what, outcome, follow) in finishes {
        let given = redis.given_running().await;
        let call = given.call_finish(1, outcome, "body", follow);
        scene(what, given, call);
    }
    let given = redis.given_starting().await;
    let call = given.call_finish(1, FinishOutcome::Aborted, "", Follow::End);
    scene("finish aborted while starting", given, call);
    for (what, outcome) in [
        ("finish succeeded though unknown", FinishOutcome::Succeeded),
        ("finish failed though unknown", FinishOutcome::Failed),
        ("finish aborted though unknown", FinishOutcome::Aborted),
    ] {
        let given = redis.given_unknown().await;
        let call = given.call_finish(1, outcome, "body", Follow::End);
        scene(what, given, call);
    }
    let given = redis.given_running().await;
    given.fail_and_retry(1, 0, 0).await;
    let call = given.call_finish(1, FinishOutcome::Succeeded, "body", Follow::End);
    scene("finish succeeded though failed", given, call);
    for (what, outcome) in [
        ("finish succeeded though the job was canceled", FinishOutcome::Succeeded),
        ("finish failed though the job was canceled", FinishOutcome::Failed),
        ("finish unknown though the job was canceled", FinishOutcome::Unknown),
    ] {
        let given = redis.given_canceled().await;
        let call = given.call_finish(1, outcome, "body", Follow::End);
        scene(what, given, call);
    }
    let given = redis.given_canceling().await;
    let call = given.call_finish(1, FinishOutcome::Failed, "body", RETRY);
    scene("finish failed while canceling", given, call);

    for (what, outcome) in [
        ("resolve succeeded", ResolveOutcome::Succeeded),
        ("resolve failed", ResolveOutcome::Failed),
        ("resolve canceled", ResolveOutcome::Canceled),
        ("resolve abandoned", ResolveOutcome::Abandoned),
    ] {
        for follow in [RETRY, Follow::End] {
            let given = redis.given_unknown().await;
            let call = given.call_resolve(1, outcome, Word::Provider, follow);
            scene(what, given, call);
        }
    }
    let given = redis.given_unknown().await;
    given.cancel(CancelMode::Force).await;
    let call = given.call_resolve(1, ResolveOutcome::Succeeded, Word::Provider, Follow::End);
    scene("resolve succeeded though the job was canceled", given, call);

    for (what, given) in [
        ("note running", redis.given_running().await),
        ("note unknown", redis.given_unknown().await),
        ("note canceled", redis.given_canceled().await),
    ] {
        let call = given.call_note(1, "print-7", Some((Noted::NeedsOperator, "for an hour")));
        scene(what, given, call);
    }
    let given = redis.given_running().await;
    let call = given.call_note(1, "print-7", None);
    scene("note a name alone", given, call);
    let given = redis.given_unknown().await;
    let call = given.call_note(1, "", Some((Noted::CancelSent, "")));
    scene("note an event alone", given, call);

    for (what, given, mode) in [
        ("cancel pending", redis.given_pending().await, CancelMode::Graceful),
        ("cancel starting", redis.given_starting().await, CancelMode::Graceful),
        ("cancel running", redis.given_running().await, CancelMode::Graceful),
        ("cancel unknown", redis.given_unknown().await, CancelMode::Graceful),
        ("cancel running by force", redis.given_running().await, CancelMode::Force),
        ("cancel canceling by force", redis.given_canceling().await, CancelMode::Force),
    ] {
        let call = given.call_cancel(mode);
        scene(what, given, call);
    }

    for (what, given) in [
        ("tick a lapsed starting", redis.given_starting().await),
        ("tick a lapsed running", redis.given_running().await),
        ("tick a lapsed running that was canceled", redis.given_canceled().await),
    ] {
        given.lapse().await;
        let call = given.call_tick();
        scene(what, given, call);
    }
    let given = redis.given(Submission { deadline_ms: LEASE_MS, ..redis.submission() }).await;
    given.lapse().await;
    let call = given.call_tick();
    scene("tick past the deadline", given, call);
    let given = redis.given_succeeded().await;
    given.age(RETENTION_MS).await;
    let call = given.call_tick();
    scene("tick past the retention", given, call);

    let given = redis.given_failed().await;
    let call = given.call_reopen(1);
    scene("reopen", given, call);
    scenes
}

/// Calls that change nothing, at least one for every reply that says so.
pub async fn refusals(redis: &Redis) -> Vec<Scene> {
    let mut scenes = Vec::new();
    let mut scene = |what, given: Given, call| scenes.push(Scene { what, given, call });

    let given = redis.given_running().await;
    let same = given.submission.by_another();
    scene("submit existing", given, Call::Submit(same));
    let given = redis.given_succeeded().await;
    let same = given.submission.by_another();
    scene("submit existing, ended", given, Call::Submit(same));
    let given = redis.given_running().await;
    let other = Submission { request: "print page 2".to_owned(), ..given.submission.by_another() };
    scene("submit conflict", given, Call::Submit(other));
    let given = redis.given_succeeded().await;
    given.age(RETENTION_MS).await;
    let same = given.submission.by_another();
    scene("submit gone", given, Call::Submit(same));
    let given = redis.given_running().await;
    given.rewrite("record[P.digest] = string.rep('x', 16)").await;
    let same = given.submission.by_another();
    scene("submit collision", given, Call::Submit(same));

    for (what, given) in [
        ("begin blocked by starting", redis.given_starting().await),
        ("begin blocked by running", redis.given_running().await),
        ("begin blocked by unknown", redis.given_unknown().await),
        ("begin too early", redis.given_pending().await),
        ("begin canceling", redis.given_canceling().await),
        ("begin succeeded", redis.given_succeeded().await),
        ("begin failed", redis.given_failed().await),
    ] {
        let call = given.call_begin(First::Running);
        scene(what, given, call);
    }
    let given = redis.given(Submission { deadline_ms: LEASE_MS, ..redis.submission() }).await;
    given.lapse().await;
    let call = given.call_begin(First::Running);
    scene("begin past the deadline", given, call);
    let given = redis.given_race(2).await;
    let call = given.call_begin(First::Running);
    scene("begin a third in a race of two", given, call);
    let given = exhausted(redis).await;
    let call = given.call_begin(First::Running);
    scene("begin exhausted", given, call);

    let given = redis.given_starting().await;
    let call = Call::Mark { job: given.id, number: 1, token: AttemptToken::random() };
    scene("mark with another's token", given, call);
    let given = redis.given_starting().await;
    given.lapse().await;
    let call = given.call_mark(1);
    scene("mark after the lease", given, call);
    for (what, given) in [
        ("mark unknown", redis.given_unknown().await),
        ("mark canceling", redis.given_canceling().await),
        ("mark ended", redis.given_succeeded().await),
    ] {
        let call = given.call_mark(1);
        scene(what, given, call);
    }

    let given = redis.given_running().await;
    let call = Call::Extend { job: given.id, number: 1, token: AttemptToken::random(), sequence: 1, lease_ms: KEY_LIFE_MS };
    scene("extend with another's token", given, call);
    let given = redis.given_running().await;
    given.extend(1, 2).await;
    let call = given.call_extend(1, 1);
    scene("extend with an old sequence", given, call);
    let given = redis.given_starting().await;
    given.lapse().await;
    let call = given.call_extend(1, 1);
    scene("extend starting after the lease", given, call);
    for (what, given) in [("extend unknown", redis.given_unknown().await), ("extend canceled", redis.given_canceled().await)] {
        let call = given.call_extend(1, 1);
        scene(what, given, call);
    }

    for (what, outcome, given) in [
        ("finish failed though succeeded", FinishOutcome::Failed, redis.given_succeeded().await),
        ("finish unknown though failed", FinishOutcome::Unknown, redis.given_failed().await),
        ("finish aborted though succeeded", FinishOutcome::Aborted, redis.given_succeeded().await),
    ] {
        let call = given.call_finish(1, outcome, "other", Follow::End);
        scene(what, given, call);
    }
    let given = redis.given_running().await;
    let (job, outcome, body) = (given.id, FinishOutcome::Succeeded, "forged".to_owned());
    let call = Call::Finish { job, number: 1, token: AttemptToken::random(), outcome, body, follow: Follow::End };
    scene("finish with another's token", given, call);

    for (what, outcome) in
        [("resolve failed early", ResolveOutcome::Failed), ("resolve canceled early", ResolveOutcome::Canceled)]
    {
        let given = redis.given_unknown().await;
        let call = given.call_resolve(1, outcome, Word::Operator, Follow::End);
        scene(what, given, call);
    }
    let given = redis.given_running().await;
    let call = given.call_resolve(1, ResolveOutcome::Abandoned, Word::Operator, Follow::End);
    scene("resolve running", given, call);
    let given = redis.given_unknown().await;
    let call = given.call_resolve(7, ResolveOutcome::Abandoned, Word::Operator, Follow::End);
    scene("resolve an attempt that is not there", given, call);

    let given = redis.given_unknown().await;
    given.note(1, "print-7", Some((Noted::NeedsOperator, "for an hour"))).await;
    let call = given.call_note(1, "print-8", Some((Noted::NeedsOperator, "for an hour")));
    scene("note nothing new", given, call);
    let given = redis.given_unknown().await;
    let call =
        Call::Note { job: given.id, number: 1, token: AttemptToken::random(), remote_id: "print-7".to_owned(), event: None };
    scene("note with another's token", given, call);

    for (what, given) in [
        ("cancel canceling", redis.given_canceling().await),
        ("cancel canceled", redis.given_canceled().await),
        ("cancel succeeded", redis.given_succeeded().await),
    ] {
        let call = given.call_cancel(CancelMode::Graceful);
        scene(what, given, call);
    }
    let given = redis.given_succeeded().await;
    let call = given.call_cancel(CancelMode::Force);
    scene("cancel succeeded by force", given, call);

    for (what, given) in [
        ("tick pending", redis.given_pending().await),
        ("tick running", redis.given_running().await),
        ("tick unknown", redis.given_unknown().await),
        ("tick succeeded", redis.given_succeeded().await),
    ] {
        let call = given.call_tick();
        scene(what, given, call);
    }

    for (what, given) in [("reopen succeeded", redis.given_succeeded().await), ("reopen running", redis.given_running().await)] {
        let call = given.call_reopen(1);
        scene(what, given, call);
    }
    let given = redis.given_failed().await;
    given.age(RETENTION_MS).await;
    let call = given.call_reopen(1);
    scene("reopen gone", given, call);

    let given = redis.given_succeeded().await;
    let call = given.call_read();
    scene("read", given, call);
    let given = redis.given_succeeded().await;
    given.age(RETENTION_MS).await;
    let call = given.call_read();
    scene("read gone", given, call);
    scenes
}

/// A pending job whose attempts are used up: by an old record's rules, since today's scripts would have ended it.
async fn exhausted(redis: &Redis) -> Given {
    let given = redis.given_running().await;
    given.fail_and_retry(1, 0, 0).await;
    given.rewrite("record[P.policy][L.attempts_max] = 1").await;
    given.age(RACE_AFTER_MS).await;
    given
}
