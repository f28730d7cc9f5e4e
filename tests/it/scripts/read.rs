//! `read_job`: the state before, one call, the reply and the record after.

use onejob::job::JobState;
use onejob::store::{Gone, Read, Script};

use crate::support::{RETENTION_MS, Redis};

#[tokio::test]
async fn a_read_tells_every_state_and_changes_none() {
    let redis = Redis::start().await;
    for state in JobState::ALL {
        let given = redis.given_in(state).await;
        let before = given.dump().await;
        assert_eq!(given.job().await.state, state);
        assert_eq!(given.dump().await, before);
    }
}

#[tokio::test]
async fn past_the_retention_a_read_tells_the_outcome_alone() {
    let redis = Redis::start().await;
    let given = redis.given_succeeded().await;
    given.age(RETENTION_MS - 20_000).await;
    let ended_ms = given.job().await.ended_ms - 20_000;
    given.age(20_000).await;
    assert_eq!(
        given.read().await,
        Read::Gone(Gone { id: given.id, state: JobState::Succeeded, ended_ms, owner: "shop".to_owned() })
    );
}

#[tokio::test]
async fn no_job_nothing_to_read() {
    let redis = Redis::start().await;
    assert_eq!(redis.given_absent(redis.submission()).await.read().await, Read::NotFound);
}

#[tokio::test]
async fn a_person_reads_names_and_values_and_no_bytes_of_bodies() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    let reply = redis.eval(Script::ReadJob, &[&given.key()], &[b"names"]).await.unwrap();
    let words: Vec<String> = reply.into_iter().map(|word| String::from_utf8(word).expect("text for a person")).collect();
    assert_eq!(words[..3], ["found", "read_job", ""]);
    let value = |name: &str| {
        let place = words[3..].chunks(2).find(|pair| pair[0] == name).unwrap_or_else(|| panic!("no {name}"));
        place[1].clone()
    };
    assert_eq!(value("state"), "unknown");
    assert_eq!(value("job_id"), given.id.to_string().replace('-', ""));
    assert_eq!(value("input_body"), "12 bytes here");
    assert_eq!(value("policy.attempts_max"), "3");
    assert_eq!(value("attempt.1.state"), "unknown");
    assert_eq!(value("attempt.1.reason"), "timeout");
    assert_eq!(value("event.1.event"), "unknown");
    assert_eq!(value("created_ms"), given.job().await.created_ms.to_string());
}

/// Lua returns a few thousand values at most, and a job that was reopened often enough had more names than that.
#[tokio::test]
async fn a_person_can_read_a_job_with_many_attempts() {
    const ATTEMPTS: usize = 500;
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    given.rewrite("for number = 2, 500 do record[P.attempts][number] = { unpack(record[P.attempts][1]) } end").await;
    let reply = redis.eval(Script::ReadJob, &[&given.key()], &[b"names"]).await.unwrap();
    let last = format!("attempt.{ATTEMPTS}.state");
    assert!(reply.iter().any(|word| word == last.as_bytes()), "{} words", reply.len());
}
