//! What the sweeper does is bounded by its own constants, whatever stands in the store; what is missing there is found again.

use std::collections::BTreeMap;
use std::time::Duration;

use onejob::attempt::AttemptState;
use onejob::job::{Identity, JobState};
use onejob::store::Read;

use crate::http_support::{Setup, Site};
use crate::support::{First, Redis, Submission, until};

/// As `src/runtime/sweeper.rs` has them.
const SHARDS: u64 = 64;
const DUE_MAX: u64 = 32;

fn sweeping(setup: &mut Setup) {
    setup.runtime.sweep = Duration::from_millis(50);
}

/// How often Redis has run each command since its statistics were reset, those of scripts among them.
async fn commands(redis: &Redis) -> BTreeMap<String, u64> {
    let stats: String = redis.command(&["INFO", "commandstats"]).await;
    let line = |line: &str| {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((name.to_owned(), rest.split(',').next()?.parse().ok()?))
    };
    stats.lines().filter_map(line).collect()
}

/// Adds hints of jobs that are not there, all of them long due.
async fn dangling_hints(redis: &Redis, hints: u64) {
    for some in (0..hints).collect::<Vec<_>>().chunks(10_000) {
        let mut pipeline = redis::pipe();
        for number in some {
            let shard = number % SHARDS;
            let key = format!("oj:due:{{{shard:02x}}}");
            pipeline.cmd("ZADD").arg(key).arg(1 + number).arg(format!("{number:017x}{shard:02x}")).ignore();
        }
        pipeline.query_async::<()>(&mut redis.connection()).await.unwrap();
    }
}

async fn hints_left(redis: &Redis) -> u64 {
    let mut pipeline = redis::pipe();
    for shard in 0..SHARDS {
        pipeline.cmd("ZCARD").arg(format!("oj:due:{{{shard:02x}}}"));
    }
    let counts: Vec<u64> = pipeline.query_async(&mut redis.connection()).await.unwrap();
    counts.iter().sum()
}

fn due_key(identity: Identity) -> String {
    format!("oj:due:{{{:02x}}}", identity.shard())
}

/// Case 33. A sweep asks for its share and leaves the rest to the next one; each sweep scans once, which is how they are counted.
#[tokio::test]
async fn a_sweep_over_fifty_thousand_due_hints_costs_no_more_than_its_share() {
    const HINTS: u64 = 50_000;
    let site = Site::with_setup(sweeping).await;
    dangling_hints(&site.redis, HINTS).await;
    site.redis.value(&["CONFIG", "RESETSTAT"]).await;
    let calls = |stats: &BTreeMap<String, u64>, name: &str| stats.get(name).copied().unwrap_or(0);
    until("three sweeps are over", async || calls(&commands(&site.redis).await, "scan") >= 3).await;
    let stats = commands(&site.redis).await;
    // One may have begun that has not scanned yet, and one may have been under way when the statistics were reset.
    let sweeps = calls(&stats, "scan") + 2;
    let looks = sweeps * SHARDS * DUE_MAX;
    // One whether anything is due, one for the share.
    assert!(calls(&stats, "zrangebyscore") <= 2 * sweeps * SHARDS, "{stats:?}");
    // A look is a tick and a hint that is taken away.
    assert!(calls(&stats, "evalsha") + calls(&stats, "eval") <= 2 * looks + 10, "{stats:?}");
    for (name, calls) in &stats {
        assert!(*calls <= 2 * looks + sweeps * 3 * SHARDS, "{name} {calls} times in {sweeps} sweeps: {stats:?}");
    }
    assert!(hints_left(&site.redis).await >= HINTS.saturating_sub(looks), "no more looked at than its share");
    assert!(calls(&stats, "keys") == 0 && calls(&stats, "smembers") == 0 && calls(&stats, "hgetall") == 0);
}

/// Case 32. A hint without a job, a job without a hint, and an attempt whose lease nobody renewed and nobody looks at: each is found,
/// put right and counted, and the sweeper goes on.
#[tokio::test]
async fn what_is_missing_or_left_over_is_found_put_right_and_counted() {
    const DANGLING: u64 = 200;
    let render = onejob::server::metrics_recorder().unwrap();
    let site = Site::with_setup(|setup| {
        sweeping(setup);
        setup.server.metrics = Some(render);
    })
    .await;
    // Of a gateway that is gone: its attempt may have been sent, its lease is over, and Redis has lost the hint.
    let lost = site.redis.given(Submission { first: First::Running, lease_ms: 1, ..site.redis.submission() }).await;
    let identity = lost.id.identity();
    site.redis.command::<u64>(&["ZREM", &due_key(identity), &identity.to_string()]).await;
    // Nobody works on it, and Redis has lost its hint as well.
    let waiting = site.alice().submit("outside", "k", "{}").await.job_id();
    let waiting = waiting.parse::<onejob::job::JobId>().unwrap().identity();
    until("the job's hint is lost", async || {
        site.redis.command::<u64>(&["ZREM", &due_key(waiting), &waiting.to_string()]).await == 1
    })
    .await;
    dangling_hints(&site.redis, DANGLING).await;
    // What is no identity at all is not taken for one, and nobody stumbles over it.
    site.redis.value(&["ZADD", "oj:due:{00}", "1", "nonsense"]).await;

    until("the lost attempt is unknown", async || {
        let Read::Found(job) = site.redis.store().await.read_job(identity).await.unwrap() else { panic!("it is there") };
        job.state == JobState::Unknown && job.attempts[0].state == AttemptState::Unknown
    })
    .await;
    until("the waiting job has a hint again", async || {
        let hint_ms: Option<u64> = site.redis.command(&["ZSCORE", &due_key(waiting), &waiting.to_string()]).await;
        hint_ms.is_some()
    })
    .await;
    // The two jobs' own, and what is no identity.
    until("nothing dangles any more", async || hints_left(&site.redis).await == 3).await;
    let swept = async |what: &str| {
        let scrape = site.client("").get("/metrics").await.is(200).text();
        let line = format!("onejob_sweeps_total{{what=\"{what}\"}} ");
        scrape.lines().find_map(|other| other.strip_prefix(&line)).map_or(0, |count| count.parse::<u64>().unwrap())
    };
    assert!(swept("hint_repaired").await >= 2);
    assert!(swept("hint_dropped").await >= DANGLING);
    assert_eq!(swept("unknown").await, 1);
    // The loop goes on: what is due now is looked at too.
    let later = site.redis.given(Submission { first: First::Running, lease_ms: 1, ..site.redis.submission() }).await;
    until("a later one is found too", async || later.job().await.state == JobState::Unknown).await;
}
