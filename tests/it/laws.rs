//! The six laws that every script keeps, each checked against every scene.

use std::collections::BTreeSet;

use futures_util::StreamExt as _;
use onejob::attempt::{AttemptState, AttemptToken};
use onejob::error::{Refusal, StoreError};
use onejob::job::{Job, JobState};
use onejob::store::{Begun, Finished, Marked, NoteReply, Read, Resolved, Script, Ticked};

use crate::scenes::{refusals, transitions};
use crate::support::{Answer, Call, Given, Redis};

/// What the answer to the same call, sent again, must be.
fn again(first: &Answer, job: Option<&Job>) -> Answer {
    match first.clone() {
        Answer::Begun(Begun::Started { number, .. }) => {
            let state = job.expect("a job").attempts[number as usize - 1].state;
            Answer::Begun(Begun::Repeated { number, state })
        }
        Answer::Marked(Marked::Running { lease_until_ms }) => Answer::Marked(Marked::Repeated { lease_until_ms }),
        Answer::Finished(Finished::Won { .. } | Finished::Recorded { .. } | Finished::Discarded { .. }) => {
            let job = job.expect("a job");
            Answer::Finished(Finished::Repeated {
                attempt: job.attempts[0].state,
                job: job.state,
                completed_by: job.completed_by,
            })
        }
        Answer::Resolved(Resolved::Won { .. } | Resolved::Recorded { .. } | Resolved::Discarded { .. }) => {
            let job = job.expect("a job");
            Answer::Resolved(Resolved::Repeated {
                attempt: job.attempts[0].state,
                job: job.state,
                completed_by: job.completed_by,
            })
        }
        Answer::Noted(NoteReply::Noted { attempt, job }) => Answer::Noted(NoteReply::Repeated { attempt, job }),
        Answer::Ticked(Ticked::Job { id, state, due_ms, open, .. }) => {
            let blobs = onejob::store::HasBlobs::No;
            Answer::Ticked(Ticked::Job { id, state, due_ms, blobs, open, changes: vec![] })
        }
        same => same,
    }
}

#[tokio::test]
async fn a_call_sent_again_changes_nothing_and_answers_equivalently() {
    let redis = Redis::start().await;
    for scene in transitions(&redis).await {
        let before = scene.given.dump().await;
        let first = scene.given.send(&scene.call).await;
        let after = scene.given.dump().await;
        assert_ne!(before, after, "{}: the first call must change something", scene.what);
        let job = match scene.given.read().await {
            Read::Found(job) => Some(*job),
            Read::Gone(_) | Read::NotFound => None,
        };

        let second = scene.given.send(&scene.call).await;

        match (&first, &second) {
            // A pending job is due at once, whenever that is.
            (
                Answer::Ticked(Ticked::Job { state: JobState::Pending, .. }),
                Answer::Ticked(Ticked::Job { state, changes, .. }),
            ) => {
                assert_eq!((*state, changes.len()), (JobState::Pending, 0), "{}", scene.what);
            }
            _ => assert_eq!(second, again(&first, job.as_ref()), "{}", scene.what),
        }
        assert_eq!(scene.given.dump().await, after, "{}", scene.what);
    }
}

#[tokio::test]
async fn a_refused_call_leaves_the_record_untouched_and_its_life_too() {
    let redis = Redis::start().await;
    for scene in refusals(&redis).await {
        let before = scene.given.dump().await;
        scene.given.send(&scene.call).await;
        assert_eq!(scene.given.dump().await, before, "{}", scene.what);
    }
}

/// What a script reads; every other command of a script writes.
const READS: [&str; 3] = ["GET", "TIME", "ZSCORE"];

#[tokio::test]
async fn a_script_writes_at_most_once_and_last() {
    let redis = Redis::start().await;
    let (transitions, refusals) = (transitions(&redis).await, refusals(&redis).await);
    let calls = transitions.iter().map(|scene| (scene, 1)).chain(refusals.iter().map(|scene| (scene, 0)));
    let mut monitor = redis.monitor().await.into_on_message::<String>();
    for (scene, writes) in calls {
        let before = scene.given.dump().await;
        scene.given.send(&scene.call).await;
        redis.value(&["ECHO", "done"]).await;
        let mut commands = Vec::new();
        loop {
            let line = monitor.next().await.expect("the monitor stands");
            if line.contains("\"ECHO\" \"done\"") {
                break;
            }
            if line.contains(" lua] ") {
                let (_, rest) = line.split_once(" lua] \"").expect("a command of a script");
                let name = rest.split('"').next().expect("a command").to_uppercase();
                // A claim of a key that is taken only reads it.
                let reads = line.ends_with("\"NX\" \"GET\"") && before.packed.is_some();
                commands.push(if reads { "GET".to_owned() } else { name });
            }
        }
        let written = commands.iter().filter(|name| !READS.contains(&name.as_str())).count();
        assert_eq!(written, writes, "{}: {commands:?}", scene.what);
        let last = commands.last().expect("a script runs commands");
        assert_eq!(!READS.contains(&last.as_str()), writes == 1, "{}: {commands:?}", scene.what);
    }
}

#[tokio::test]
async fn a_jobs_times_never_run_backwards() {
    let redis = Redis::start().await;
    for scene in transitions(&redis).await {
        if matches!(scene.call, Call::Submit(_)) {
            continue;
        }
        // Redis' clock was set back by ten seconds since the last change.
        scene.given.rewrite("record[P.updated_ms] = now + 10000").await;
        let before = updated_ms(&redis, &scene.given).await;
        scene.given.send(&scene.call).await;
        assert_eq!(updated_ms(&redis, &scene.given).await, before, "{}", scene.what);
        let Read::Found(job) = scene.given.read().await else { continue };
        if job.is_ended() && scene.what.starts_with("finish succeeded") && job.completed_by == 1 {
            assert_eq!((job.ended_ms, job.attempts[0].ended_ms), (before, before), "{}", scene.what);
        }
        for event in &job.events {
            assert!(event.at_ms <= before, "{}: {event:?}", scene.what);
        }
        if scene.call.script() == "begin_attempt" {
            assert_eq!(job.attempts.last().expect("an attempt").started_ms, before, "{}", scene.what);
        }
    }
}

/// As the record has it, be it gone or not.
async fn updated_ms(redis: &Redis, given: &Given) -> u64 {
    let code =
        "local record = cmsgpack.unpack(redis.call('GET', KEYS[1])) return string.format('%.0f', record[11] + record[12] - 1)";
    let text: String = redis.command(&["EVAL", code, "1", &given.key()]).await;
    text.parse().expect("a time")
}

#[tokio::test]
async fn a_call_for_another_incarnation_finds_nothing_and_touches_nothing() {
    let redis = Redis::start().await;
    let scenes = transitions(&redis).await.into_iter().chain(refusals(&redis).await);
    let mut scripts = BTreeSet::new();
    for scene in scenes {
        let Some(call) = scene.call.for_another_incarnation() else { continue };
        let before = scene.given.dump().await;
        let answer = format!("{:?}", scene.given.send(&call).await);
        assert!(answer.ends_with("(NotFound)"), "{}: {answer}", scene.what);
        assert_eq!(scene.given.dump().await, before, "{}", scene.what);
        scripts.insert(call.script());
    }
    assert_eq!(scripts.len(), 9, "{scripts:?}");
}

/// Every reply begins with its status, the script's name and what the caller recognizes it by. That the store refuses another
/// echo is checked where replies are read.
#[tokio::test]
async fn replies_echo_script_and_caller() {
    let redis = Redis::start().await;
    let given = redis.given_running().await;
    let (job, token) = (given.id.as_bytes(), AttemptToken::random());
    let token = token.as_bytes();
    let arguments = |script: Script| -> Vec<&[u8]> {
        let list: &[&[u8]] = match script {
            Script::SubmitJob => &[
                job,
                &[1; 16],
                &[2; 16],
                b"shop",
                b"print",
                b"exclusive",
                b"0",
                b"1",
                b"1",
                b"0",
                b"1",
                b"1",
                b"keep",
                b"0",
                b"",
                b"0",
                b"",
                b"pending",
                token,
                b"1",
                b"",
                b"",
                b"",
                b"",
                b"",
            ],
            Script::BeginAttempt => &[job, token, b"", b"starting", b"1", b"laser", b"gateway-1", b"", b"", b""],
            Script::MarkRunning => &[job, b"1", token, b"", b"", b""],
            Script::ExtendLease => &[job, b"1", token, b"1", b"1"],
            Script::FinishAttempt => {
                &[job, b"1", token, b"unknown", b"", b"0", b"", b"", b"", b"", b"end", b"0", b"0", b"nothing"]
            }
            Script::ResolveAttempt => &[job, b"1", token, b"failed", b"ada", b"why", b"operator", b"", b"0", b"", b"end"],
            Script::NoteAttempt => &[job, b"1", token, b"", b"", b"replayed", b"ada", b""],
            Script::CancelJob => &[job, token, b"graceful", b"ada", b"why"],
            Script::TickJob => &[token],
            Script::ReopenJob => &[job, token, b"ada", b"why", b"1", b"0"],
            Script::ReadJob => &[b"record", token],
            Script::SettleHint => &[token, b"1", b"0"],
            Script::PostponeJob => &[job, token, b"", b"1", b"why"],
            Script::AdmitCall => &[token, b"", b"on", b"1", b"0", b"1", b"0", b"1", b"0"],
            Script::ReportCall => {
                let rules: [&[u8]; 7] = [b"1", b"0", b"1", b"1000", b"1", b"1", b"1"];
                let tally: [&[u8]; 9] = [token, b"model:", b"1", b"1", b"1", b"1", b"1", b"1", b""];
                return [&tally[..], &[b""], &rules, &[b"0", b"0"]].concat();
            }
            Script::ExtendPermits => &[token, token, b"", b"1"],
            Script::ExtendAsk => &[token, b"1"],
            Script::IssueCertificate => &[token, &[b'a'; 32], b"{}", b"ada", b"1", b"", b"0"],
            Script::MarkCertificate => &[token, b"", b"revoked", b"ada", b"why"],
            Script::DedupBatch => &[token, &[1; 16], b"1000", b"1000", b"1", b"1000", &[b'0'; 31]],
            Script::DedupClaim | Script::DedupCommit => {
                &[token, &[1; 16], b"1000", b"1000", b"1", b"1000", &[3; 16], &[b'0'; 31]]
            }
            Script::DedupRelease => &[token, &[3; 16], b"31", &[b'0'; 31]],
            Script::MirrorBatch => {
                &[token, &[1; 16], b"1000", b"1000", b"1000", b"0", b"0", b"000000000000", b"0", b"1", &[7; 10]]
            }
            Script::MirrorClaim | Script::MirrorCommit => {
                &[token, &[1; 16], b"1000", b"1000", b"1000", &[3; 16], b"0", b"0", b"000000000000", b"0", b"1", &[7; 10]]
            }
        };
        list.to_vec()
    };
    for script in Script::ALL {
        for key in [given.key(), "oj:absent".to_owned()] {
            let key = match script {
                Script::SettleHint => "oj:due:{00}".to_owned(),
                Script::AdmitCall | Script::ReportCall => "oj:guard:{laser}".to_owned(),
                Script::IssueCertificate | Script::MarkCertificate => "oj:certificate:{0}".to_owned(),
                Script::ExtendPermits => "oj:permits:{laser}".to_owned(),
                Script::DedupBatch | Script::DedupClaim | Script::DedupCommit | Script::DedupRelease => {
                    "oj:dedup:{clicks/00}".to_owned()
                }
                Script::MirrorBatch | Script::MirrorClaim | Script::MirrorCommit => "oj:dedup:{mirrored/00}".to_owned(),
                _ => key,
            };
            let [verdicts, claims, lapses] = ["v:0", "c", "l"].map(|of| format!("{key}:{of}"));
            let keys: &[&str] = match script {
                Script::DedupBatch | Script::MirrorBatch => &[&key, &verdicts],
                Script::DedupClaim | Script::DedupCommit | Script::MirrorClaim | Script::MirrorCommit => {
                    &[&key, &verdicts, &claims, &lapses]
                }
                Script::DedupRelease => &[&claims, &lapses],
                _ => &[&key],
            };
            let reply = redis.eval(*script, keys, &arguments(*script)).await.expect("a reply");
            assert_eq!(reply[1], script.name().as_bytes());
            assert_eq!(reply[2], token, "{}", script.name());
        }
        redis.value(&["DEL", "oj:absent"]).await;
    }
}

/// Attempts in flight still store their results when memory is short; only new work is refused.
#[tokio::test]
async fn out_of_memory_refuses_new_work_alone() {
    let redis = Redis::start().await;
    let (transitions, refusals) = (transitions(&redis).await, refusals(&redis).await);
    redis.value(&["CONFIG", "SET", "maxmemory", "1"]).await;
    for scene in transitions.into_iter().chain(refusals) {
        let before = scene.given.dump().await;
        let answer = scene.call.send(&scene.given.store).await;
        match &scene.call {
            Call::Submit(_) | Call::Begin { .. } | Call::Reopen { .. } => {
                let refused = matches!(answer, Err(StoreError::NotExecuted { code: Refusal::Oom, .. }));
                assert!(refused, "{}: {answer:?}", scene.what);
                assert_eq!(scene.given.dump().await, before, "{}", scene.what);
            }
            Call::Mark { .. }
            | Call::Extend { .. }
            | Call::Finish { .. }
            | Call::Resolve { .. }
            | Call::Note { .. }
            | Call::Cancel { .. }
            | Call::Tick { .. }
            | Call::Postpone { .. }
            | Call::Read { .. } => assert!(answer.is_ok(), "{}: {answer:?}", scene.what),
        }
    }
}

/// The state that follows from the attempts, with the precedence ended > canceling > running > unknown > pending.
pub fn derived(job: &Job) -> JobState {
    if job.ended_ms > 0 {
        return job.state;
    }
    if !job.canceled_by.is_empty() {
        return JobState::Canceling;
    }
    let has = |states: &[AttemptState]| job.attempts.iter().any(|attempt| states.contains(&attempt.state));
    if has(&[AttemptState::Starting, AttemptState::Running]) {
        JobState::Running
    } else if has(&[AttemptState::Unknown]) {
        JobState::Unknown
    } else {
        JobState::Pending
    }
}

#[tokio::test]
async fn the_stored_state_is_the_derived_one_after_every_call() {
    let redis = Redis::start().await;
    for scene in transitions(&redis).await {
        scene.given.send(&scene.call).await;
        let Read::Found(job) = scene.given.read().await else { continue };
        assert_eq!(job.state, derived(&job), "{}", scene.what);
        assert_eq!(job.state.is_ended(), job.ended_ms > 0, "{}", scene.what);
        assert_eq!(job.state == JobState::Succeeded, job.completed_by > 0, "{}", scene.what);
    }
}

/// Redis forgets every script before every call: no caller sees an error, and each transition happens once.
#[tokio::test]
async fn a_lost_script_cache_is_never_seen() {
    let redis = Redis::start().await;
    for scene in transitions(&redis).await {
        let revision_before = revision(&redis, &scene.given).await;
        redis.value(&["SCRIPT", "FLUSH"]).await;
        scene.given.send(&scene.call).await;
        let released = scene.what == "submit after a failure that gave the key back";
        let expected = if released { 1 } else { revision_before + 1 };
        assert_eq!(revision(&redis, &scene.given).await, expected, "{}", scene.what);
    }
    for scene in refusals(&redis).await {
        let before = scene.given.dump().await;
        redis.value(&["SCRIPT", "FLUSH"]).await;
        scene.given.send(&scene.call).await;
        assert_eq!(scene.given.dump().await, before, "{}", scene.what);
    }
}

/// How many changes the record has seen, 0 if there is none.
async fn revision(redis: &Redis, given: &Given) -> u64 {
    let code = "local packed = redis.call('GET', KEYS[1]) return packed and cmsgpack.unpack(packed)[10] or 0";
    redis.command(&["EVAL", code, "1", &given.key()]).await
}
