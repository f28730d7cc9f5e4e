//! When Redis is away, or the gateway was.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onejob::attempt::AttemptState::{Aborted, Succeeded, Unknown};
use onejob::error::{Refusal, StoreError};
use onejob::job::{JobState, Key, Owner};
use onejob::provider::{Call, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request, Response};
use onejob::runtime::{ReadError, RuntimeOptions, SubmitError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixStream};

use super::{Setup, Shop, ended, settled, slot, states, submission, until};
use crate::support::standalone_only;

/// As in production: a store that does not wait for a Redis that is away.
fn impatient(setup: &mut Setup) {
    setup.store.response_timeout = Duration::from_millis(500);
    setup.store.connect_timeout = Duration::from_secs(1);
}

fn short_lease(setup: &mut Setup) {
    impatient(setup);
    setup.options = RuntimeOptions {
        lease: Duration::from_millis(1200),
        lease_margin: Duration::from_millis(300),
        sweep: Duration::from_millis(100),
        ..RuntimeOptions::default()
    };
}

/// Case 26, 29: the provider succeeded while Redis was paused; the result in hand is stored afterwards, and nothing runs again.
#[tokio::test]
async fn a_result_in_hand_is_kept_until_redis_is_back() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let runtime = shop.gateway_with(impatient).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    shop.redis.command::<()>(&["CLIENT", "PAUSE", "2500", "ALL"]).await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
    assert_eq!(shop.executions(id), 1);
}

/// It was dropped: a permission that was taken away by mistake cost the results of that time.
#[tokio::test]
async fn a_result_in_hand_is_kept_until_its_permission_is_back() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let runtime = shop.gateway().await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    shop.redis.command::<()>(&["ACL", "SETUSER", "default", "-eval", "-evalsha"]).await;
    until("its storing is refused", async || !shop.redis.command::<Vec<redis::Value>>(&["ACL", "LOG"]).await.is_empty()).await;
    assert_eq!(shop.inkjet.ledger().answered, 1);
    shop.redis.command::<()>(&["ACL", "SETUSER", "default", "+@all"]).await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
    assert_eq!(shop.executions(id), 1);
}

#[tokio::test]
async fn a_submit_while_redis_is_paused_fails_fast_and_runs_at_most_once() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(short_lease).await;
    shop.redis.command::<()>(&["CLIENT", "PAUSE", "3000", "ALL"]).await;
    let began = std::time::Instant::now();
    let refused = runtime.submit(submission("order-1", "{}")).await.unwrap_err();
    assert!(matches!(refused, SubmitError::Store(ref error) if error.is_retryable()), "{refused}");
    assert!(began.elapsed() < Duration::from_millis(2800), "{:?}", began.elapsed());
    assert_eq!(shop.inkjet.ledger().received, 0, "nothing is sent on an unconfirmed claim");

    // The pause over, the same key leads to one job, whether or not the lost claim arrived.
    let mut id = None;
    until("redis answers again", async || {
        id = runtime.submit(submission("order-1", "{}")).await.ok().map(|receipt| receipt.job.id);
        id.is_some()
    })
    .await;
    let job = ended(&runtime, id.unwrap()).await;
    assert_eq!(job.state, JobState::Succeeded, "{job:?}");
    assert_eq!(shop.executions(id.unwrap()), 1);
}

/// What is known to be unsent is given back however long Redis was away: nobody has to resolve it.
#[tokio::test]
async fn a_claim_that_arrives_after_a_pause_longer_than_the_lease_is_given_back_and_runs() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(short_lease).await;
    // Redis knows the script by then, so a claim that it reads is made, whoever waits for the reply.
    let before = runtime.submit(submission("before", "{}")).await.unwrap().job.id;
    ended(&runtime, before).await;
    shop.redis.pause();
    let refused = runtime.submit(submission("order-1", "{}")).await.unwrap_err();
    assert!(matches!(refused, SubmitError::Store(ref error) if error.is_retryable()), "{refused}");
    let away = std::time::Instant::now();
    until("the lease is long over", async || away.elapsed() > Duration::from_millis(4000)).await;
    shop.redis.resume();
    let id = locate_order(&runtime).await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, shop.executions(id)), (JobState::Succeeded, 1), "{job:?}");
}

/// The job of `order-1`, once its claim has arrived.
async fn locate_order(runtime: &onejob::runtime::Runtime) -> onejob::job::JobId {
    let (owner, key) = (Owner::new("shop").unwrap(), Key::new("order-1").unwrap());
    let mut id = None;
    until("the claim has arrived", async || {
        id = runtime.find(&owner, &key).await.ok().map(|job| job.id);
        id.is_some()
    })
    .await;
    id.unwrap()
}

/// A replica answers reads too, and may be behind.
#[tokio::test]
async fn a_job_is_not_read_from_a_replica() {
    if standalone_only("a replica in a cluster sends a reader on to its master") {
        return;
    }
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(impatient).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    ended(&runtime, id).await;
    shop.redis.command::<()>(&["REPLICAOF", "127.0.0.1", "1"]).await;
    let refused = runtime.read(id).await.unwrap_err();
    assert!(matches!(&refused, ReadError::Store(StoreError::NotExecuted { code: Refusal::ReadOnly, .. })), "{refused}");
    shop.redis.command::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    until("it is told again", async || runtime.read(id).await.is_ok()).await;
}

/// Carries everything to Redis and back, but for one reply, once it is told to swallow it: from then on each reply on that
/// connection comes a call late.
async fn swallower(socket: &str, swallow: Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (addr, socket) = (listener.local_addr().unwrap(), socket.to_owned());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, swallow) = (UnixStream::connect(&socket).await.unwrap(), Arc::clone(&swallow));
            let (mut asking, mut asked) = client.into_split();
            let (mut answers, mut questions) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut asking, &mut questions).await });
            tokio::spawn(async move {
                let mut bytes = vec![0; 64 << 10];
                while let Ok(length @ 1..) = answers.read(&mut bytes).await {
                    if !swallow.swap(false, Ordering::SeqCst) && asked.write_all(&bytes[..length]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    addr
}

/// A reply was lost on its way and the connection lived on: every later call got the one before's, results were dropped, and it
/// never ended.
#[tokio::test]
async fn replies_that_come_a_call_late_cost_a_connection_and_no_result() {
    if standalone_only("nodes are called where they say that they are, not through what stands between") {
        return;
    }
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let swallow = Arc::new(AtomicBool::new(false));
    let addr = swallower(shop.redis.url().trim_start_matches("redis+unix://"), Arc::clone(&swallow)).await;
    let runtime = shop
        .gateway_with(|setup| {
            impatient(setup);
            setup.store.url = format!("redis://{addr}");
            setup.store.lanes = 1;
        })
        .await;
    for round in 0..5 {
        let mut id = None;
        until("the job is claimed", async || {
            id = runtime.submit(submission(&format!("order-{round}"), "{}")).await.ok().map(|receipt| receipt.job.id);
            id.is_some()
        })
        .await;
        let id = id.unwrap();
        until("the call is at the provider", async || shop.inkjet.ledger_of(&id.to_string()).received == 1).await;
        swallow.store(true, Ordering::SeqCst);
        until("a reply is swallowed", async || !swallow.load(Ordering::SeqCst)).await;
        let job = ended(&runtime, id).await;
        assert_eq!((job.state, states(&job).last()), (JobState::Succeeded, Some(&Succeeded)));
        assert_eq!(shop.executions(id), 1);
    }
}

/// A provider that takes so long to connect that the lease runs out.
struct Slow {
    patience: Duration,
}

impl Provider for Slow {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        Ok(Rendered { method: "POST".into(), url: "slow://".into(), headers: vec![], body: request.body.clone() })
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async move {
            let deadline = tokio::time::Instant::now() + self.patience;
            // The first attempt connects until its fence has closed; the second one is quick.
            while call.attempt == 1 && call.fence.check().is_ok() && tokio::time::Instant::now() < deadline {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            match call.fence.check() {
                Ok(()) => Outcome::Succeeded {
                    response: Response { status: 200, headers: vec![], body: b"printed".to_vec().into() },
                    remote_id: None,
                    model: None,
                },
                Err(fenced) => Outcome::NotSent { reason: fenced.to_string() },
            }
        })
    }
}

/// Case 17: heartbeats starve, the lease runs out before the first byte: the gateway fences itself, and the job goes on.
#[tokio::test]
async fn a_gateway_that_lost_its_lease_before_the_first_byte_does_not_send() {
    let shop = Shop::open().await;
    let runtime = shop
        .gateway_with(|setup| {
            short_lease(setup);
            setup.providers = Some(vec![slot("inkjet", Slow { patience: Duration::from_secs(15) })]);
        })
        .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    shop.redis.command::<()>(&["CLIENT", "PAUSE", "2000", "ALL"]).await;
    let job = ended(&runtime, id).await;
    assert_eq!(job.state, JobState::Succeeded, "{job:?}");
    assert_eq!(job.completed_by, 2, "{job:?}");
    // Judged by whoever came first: its own gateway, or the sweeper and then its own gateway's proof.
    assert!(states(&job)[0] == Aborted || job.attempts[0].reason == "not_sent", "{job:?}");
}

/// Case 27.
#[tokio::test]
async fn a_flushed_script_cache_reaches_nobody() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    for order in 0..20 {
        shop.redis.command::<()>(&["SCRIPT", "FLUSH"]).await;
        let id = runtime.submit(submission(&format!("order-{order}"), "{}")).await.unwrap().job.id;
        shop.redis.command::<()>(&["SCRIPT", "FLUSH"]).await;
        let job = ended(&runtime, id).await;
        assert_eq!((job.state, states(&job).last()), (JobState::Succeeded, Some(&Succeeded)));
        assert_eq!(shop.executions(id), 1);
    }
}

/// Case 28.
#[tokio::test]
async fn killed_connections_are_built_anew() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    for order in 0..5 {
        shop.redis.command::<i64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
        shop.redis.command::<i64>(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
        let key = format!("order-{order}");
        let mut id = None;
        until("the gateway is connected again", async || {
            id = runtime.submit(submission(&key, "{}")).await.ok().map(|receipt| receipt.job.id);
            id.is_some()
        })
        .await;
        let job = ended(&runtime, id.unwrap()).await;
        assert_eq!(job.state, JobState::Succeeded, "{job:?}");
        assert_eq!(shop.executions(id.unwrap()), 1);
    }
}

/// Case 30.
#[tokio::test]
async fn out_of_memory_refuses_new_jobs_and_answers_everything_else() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=400ms").unwrap();
    let runtime = shop.gateway().await;
    let flying = runtime.submit(submission("flying", "{}")).await.unwrap().job.id;
    shop.redis.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = runtime.submit(submission("new", "{}")).await.unwrap_err();
    assert!(refused.to_string().contains("out of memory"), "{refused}");
    assert!(runtime.ready().await.is_err());
    assert_eq!(runtime.submit(submission("flying", "{}")).await.unwrap().job.id, flying, "a duplicate still gets its answer");
    let job = ended(&runtime, flying).await;
    assert_eq!(job.state, JobState::Succeeded);
    shop.redis.command::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    runtime.ready().await.unwrap();
    runtime.submit(submission("new", "{}")).await.unwrap();
}

/// A provider whose adapter has a bug.
struct Panics;

impl Provider for Panics {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        Ok(Rendered { method: "POST".into(), url: "bug://".into(), headers: vec![], body: request.body.clone() })
    }

    fn submit(&self, _call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async { panic!("a bug in an adapter") })
    }
}

#[tokio::test]
async fn an_adapter_that_panics_leaves_its_attempt_unknown() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(|setup| setup.providers = Some(vec![slot("inkjet", Panics)])).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = settled(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Unknown, vec![Unknown]));
    assert_eq!(job.attempts[0].reason, "panic: the adapter panicked");
}

/// Case 34, small: what ended leaves its record, and nothing else.
#[tokio::test]
async fn ended_jobs_leave_no_hints_behind() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(|setup| setup.options.sweep = Duration::from_secs(3600)).await;
    for (behaviour, orders) in [("succeed", 0..5), ("refuse_status=400", 5..10)] {
        shop.inkjet.set_behaviour(behaviour).unwrap();
        for order in orders {
            let id = runtime.submit(submission(&format!("order-{order}"), "{}")).await.unwrap().job.id;
            ended(&runtime, id).await;
            runtime.submit(submission(&format!("order-{order}"), "{}")).await.unwrap();
        }
    }
    only_records_are_left(&shop, 10).await;
}

/// A job that waited for room has its hint from the submit, not from the beginning.
#[tokio::test]
async fn jobs_that_waited_for_room_leave_no_hints_behind() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=30ms").unwrap();
    let change = |setup: &mut Setup| {
        setup.options.sweep = Duration::from_secs(3600);
        setup.in_flight_max = 1;
    };
    let runtime = shop.gateway_with(change).await;
    let mut ids = Vec::new();
    for order in 0..5 {
        ids.push(runtime.submit(submission(&format!("order-{order}"), "{}")).await.unwrap().job.id);
    }
    for id in ids {
        ended(&runtime, id).await;
    }
    only_records_are_left(&shop, 5).await;
}

async fn only_records_are_left(shop: &Shop, records: usize) {
    until("only records and the schema are left", async || {
        let keys = shop.redis.keys().await;
        keys.len() == records + 1 && !keys.iter().any(|key| key.contains("due") || key.contains("unknown"))
    })
    .await;
}
