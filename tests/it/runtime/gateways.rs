//! More than one gateway, and gateways that die.

use std::sync::Arc;
use std::time::Duration;

use onejob::attempt::AttemptState::{Aborted, Succeeded, Unknown};
use onejob::attempt::{AttemptToken, FinishOutcome};
use onejob::fingerprint::{Fingerprinted, digest, fingerprint, second_half};
use onejob::job::{Body, Class, Identity, JobId, JobState, Key, Owner, Payload};
use onejob::runtime::{Drained, Replayed, SubmitError, WaitFor};
use onejob::store::{Begin, FinishAttempt, Finished, Follow, Read, Store, SubmitJob, Submitted, Tell, WriteAhead};

use super::{SOON, Shop, ended, rules, settled, states, submission, until};

/// Claims a job as a gateway would that dies right afterwards.
pub async fn claimed_by_a_dead_gateway(store: &Store, key: &str, begin: Begin<'_>, lease: Duration) -> JobId {
    let owner = Owner::new("shop").unwrap();
    let digest = digest("shop", key);
    let id = JobId::new(store.now_ms(), Identity::of(&digest));
    let content_type = "application/json";
    let body = b"{}";
    let whole = Fingerprinted { route: "print", method: "", target: "", content_type, body, ignore: &[] };
    let submit = SubmitJob {
        id,
        digest: second_half(&digest),
        fingerprint: fingerprint(whole),
        owner: &owner,
        route: "print",
        class: Class::Exclusive,
        deadline_ms: 60_000,
        rules: rules(),
        input: &Payload { head: format!(" \ncontent-type: {content_type}"), body: Body::Inline(Arc::from(&body[..])) },
        token: AttemptToken::random(),
        lease_ms: u64::try_from(lease.as_millis()).unwrap(),
        hint_ms: store.now_ms() + u64::try_from(lease.as_millis()).unwrap(),
        gateway: "dead",
        begin,
    };
    assert!(matches!(store.submit_job(&submit).await.unwrap(), Submitted::Created { .. }));
    id
}

/// What the holder of a job's first attempt tells of it.
pub async fn told_by_its_holder(store: &Store, id: JobId, outcome: FinishOutcome, reason: &str) {
    let Read::Found(job) = store.read_job(id.identity()).await.unwrap() else { panic!("it is there") };
    let finish = FinishAttempt {
        job: id,
        number: 1,
        token: job.attempts[0].token,
        outcome,
        result: &Payload::default(),
        reason,
        remote_id: "",
        model: "",
        follow: Follow::Retry { delay_ms: 0, hold_ms: 0 },
        hint_ms: None,
        strip_at_ms: None,
        tell: Tell::Nothing,
    };
    let finished = store.finish_attempt(&finish).await.unwrap();
    assert!(matches!(finished, Finished::Recorded { .. }), "{finished:?}");
}

pub fn running() -> Begin<'static> {
    Begin::Running { provider: "inkjet", sent: WriteAhead { url: "http://127.0.0.1/", request_hash: &[7; 32], certificate: "" } }
}

#[tokio::test]
async fn a_waiter_on_another_gateway_is_woken() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let (here, there) = (shop.gateway().await, shop.gateway().await);
    let id = here.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let attached = there.submit(submission("order-1", "{}")).await.unwrap();
    assert_eq!((attached.job.id, attached.replayed), (id, Replayed::Yes));
    let job = there.wait(id, WaitFor::Ended, SOON).await.unwrap();
    assert_eq!(job.state, JobState::Succeeded);
    assert_eq!(shop.executions(id), 1);
}

#[tokio::test]
async fn a_pending_job_of_a_dead_gateway_is_adopted_and_runs_once() {
    let shop = Shop::open().await;
    let store = shop.redis.store().await;
    let id = claimed_by_a_dead_gateway(&store, "order-1", Begin::Pending, Duration::from_millis(200)).await;
    let gateways = [shop.gateway().await, shop.gateway().await, shop.gateway().await];
    let job = ended(&gateways[0], id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
    assert_eq!(shop.executions(id), 1);
}

#[tokio::test]
async fn an_attempt_that_only_was_starting_is_aborted_and_another_one_runs() {
    let shop = Shop::open().await;
    let store = shop.redis.store().await;
    let starting = Begin::Starting { provider: "inkjet" };
    let id = claimed_by_a_dead_gateway(&store, "order-1", starting, Duration::from_millis(200)).await;
    let runtime = shop.gateway().await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Aborted, Succeeded]));
    assert_eq!(shop.executions(id), 1);
}

#[tokio::test]
async fn an_attempt_that_may_have_been_sent_becomes_unknown_when_its_gateway_dies() {
    let shop = Shop::open().await;
    let store = shop.redis.store().await;
    let id = claimed_by_a_dead_gateway(&store, "order-1", running(), Duration::from_millis(200)).await;
    let runtime = shop.gateway().await;
    let job = settled(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Unknown, vec![Unknown]));
    assert_eq!(job.reason, "lease_lapsed");
    assert_eq!(shop.inkjet.ledger().received, 0);
    until("the job stands in the list of unknowns", async || {
        runtime.list(onejob::runtime::ListState::Unknown, 10).await.unwrap().jobs.iter().any(|job| job.id == id)
    })
    .await;
}

/// One such key stopped every sweep on every gateway, and nothing said so: jobs of gateways that died stayed `running`.
#[tokio::test]
async fn a_hint_key_of_another_type_keeps_no_other_job_from_being_looked_at() {
    let shop = Shop::open().await;
    let store = shop.redis.store().await;
    let id = claimed_by_a_dead_gateway(&store, "order-1", running(), Duration::from_millis(200)).await;
    let shard = id.identity().shard();
    for other in [shard ^ 1, shard ^ 0x20] {
        for kind in ["due", "unknown"] {
            shop.redis.command::<()>(&["SET", &format!("oj:{kind}:{{{other:02x}}}"), "not a sorted set"]).await;
        }
    }
    let _runtime = shop.gateway().await;
    // Whoever asks the gateway for a job has it looked at, so nobody asks.
    until("the sweeper has looked at the job", async || {
        let Read::Found(job) = store.read_job(id.identity()).await.unwrap() else { panic!("it is there") };
        job.state == JobState::Unknown && states(&job) == [Unknown]
    })
    .await;
}

/// A sweep takes the oldest 32 hints of a shard, and these were always the same ones.
#[tokio::test]
async fn records_that_nobody_can_read_keep_no_other_job_of_their_shard_from_being_looked_at() {
    let shop = Shop::open().await;
    let store = shop.redis.store().await;
    let id = claimed_by_a_dead_gateway(&store, "order-1", running(), Duration::from_millis(200)).await;
    let shard = id.identity().shard();
    for number in 0..40 {
        let identity = format!("{number:017x}{shard:02x}");
        shop.redis.command::<()>(&["SET", &format!("oj:{{{identity}}}"), "no record"]).await;
        shop.redis.command::<()>(&["ZADD", &format!("oj:due:{{{shard:02x}}}"), "1", &identity]).await;
    }
    let _runtime = shop.gateway().await;
    until("the sweeper has looked at the job", async || {
        let Read::Found(job) = store.read_job(id.identity()).await.unwrap() else { panic!("it is there") };
        job.state == JobState::Unknown
    })
    .await;
}

/// Case 23.
#[tokio::test]
async fn a_live_lease_is_nobody_elses_to_recover() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=1500ms").unwrap();
    let lease = |setup: &mut super::Setup| {
        setup.options.lease = Duration::from_millis(600);
        setup.options.lease_margin = Duration::from_millis(100);
    };
    let runtime = shop.gateway_with(lease).await;
    let _restarted = shop.gateway_with(lease).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
    assert!(job.events.is_empty(), "kept alive by heartbeats over two leases: {:?}", job.events);
    assert_eq!(shop.executions(id), 1);
}

/// Case 51: nobody waits, and the job runs on.
#[tokio::test]
async fn the_client_that_goes_away_stops_nothing() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let runtime = shop.gateway().await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let gone = tokio::time::timeout(Duration::from_millis(20), runtime.wait(id, WaitFor::Ended, SOON)).await;
    assert!(gone.is_err());
    assert_eq!(ended(&runtime, id).await.state, JobState::Succeeded);
}

/// Case 51: not even the claim depends on the client.
#[tokio::test]
async fn a_client_that_goes_away_during_its_submit_has_a_job_all_the_same() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    let left = tokio::time::timeout(Duration::ZERO, runtime.submit(submission("order-1", "{}"))).await;
    assert!(left.is_err(), "gone before the claim was made");
    let (owner, key) = (Owner::new("shop").unwrap(), Key::new("order-1").unwrap());
    until("the job is there", async || runtime.find(&owner, &key).await.is_ok()).await;
    let job = ended(&runtime, runtime.find(&owner, &key).await.unwrap().id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
    assert_eq!(shop.executions(job.id), 1);
}

#[tokio::test]
async fn a_stopping_gateway_lets_running_attempts_finish_and_takes_no_more() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=400ms").unwrap();
    let runtime = shop.gateway().await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    let stopping = tokio::spawn({
        let runtime = runtime.clone();
        async move { runtime.shutdown(SOON).await }
    });
    until("no more is taken", async || matches!(runtime.submit(submission("order-2", "{}")).await, Err(SubmitError::Stopping)))
        .await;
    assert_eq!(stopping.await.unwrap(), Drained { running: 1, unknown: 0, unwritten: 0, spooled: 0 });
    assert_eq!(runtime.read(id).await.unwrap().state, JobState::Succeeded);
}

/// Case 57.
#[tokio::test]
async fn what_is_left_after_the_drain_is_unknown_and_counted() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let runtime = shop.gateway().await;
    let mut ids = Vec::new();
    for order in 0..5 {
        ids.push(runtime.submit(submission(&format!("order-{order}"), "{}")).await.unwrap().job.id);
    }
    until("the calls are at the provider", async || shop.inkjet.ledger().received == 5).await;
    let drained = runtime.shutdown(Duration::from_millis(100)).await;
    assert_eq!(drained, Drained { running: 5, unknown: 5, unwritten: 0, spooled: 0 });
    for id in ids {
        assert_eq!(runtime.read(id).await.unwrap().state, JobState::Unknown);
        assert_eq!(shop.executions(id), 1);
    }
}

/// However many gateways sweep, one looks at what is due. A look at a job that needs nothing is two scripts: a tick, and its hint's
/// move.
#[tokio::test]
async fn what_is_due_at_once_is_looked_at_once_however_many_gateways_there_are() {
    const GATEWAYS: usize = 8;
    const JOBS: u64 = 400;
    let shop = Shop::open().await;
    let store = shop.redis.store().await;
    let lease = Duration::from_secs(600);
    let mut due = redis::pipe();
    for number in 0..JOBS {
        let identity = claimed_by_a_dead_gateway(&store, &format!("order-{number}"), running(), lease).await.identity();
        due.cmd("ZADD").arg(format!("oj:due:{{{:02x}}}", identity.shard())).arg("LT").arg(1).arg(identity.to_string()).ignore();
    }
    let mut gateways = Vec::new();
    for _ in 0..GATEWAYS {
        gateways.push(shop.gateway_with(|setup| setup.options.sweep = Duration::from_millis(20)).await);
    }
    let calls = async |name: &str| {
        let stats: String = shop.redis.command(&["INFO", "commandstats"]).await;
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{name}:calls="))?.split(',').next());
        line.map_or(0, |calls| calls.parse::<u64>().unwrap())
    };
    until("all sweep", async || calls("scan").await >= GATEWAYS as u64).await;
    let before = calls("evalsha").await;
    due.query_async::<()>(&mut shop.redis.connection()).await.unwrap();
    until("nothing is due any more", async || {
        let mut left = redis::pipe();
        for shard in 0..64 {
            left.cmd("ZCOUNT").arg(format!("oj:due:{{{shard:02x}}}")).arg(0).arg(1);
        }
        let left: Vec<u64> = left.query_async(&mut shop.redis.connection()).await.unwrap();
        left.iter().sum::<u64>() == 0
    })
    .await;
    // Whoever still looks in vain has done so.
    let sweeps = calls("scan").await;
    until("each has swept once more", async || calls("scan").await >= sweeps + 2 * GATEWAYS as u64).await;
    let scripts = calls("evalsha").await - before;
    assert!((2 * JOBS..3 * JOBS).contains(&scripts), "{scripts} scripts for {JOBS} jobs that were due");
}
