//! Providers that struggle: who is kept from them, for how long, by the whole fleet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use onejob::attempt::AttemptState::{Failed, Succeeded, Unknown};
use onejob::attempt::AttemptToken;
use onejob::job::{Job, JobId, JobState};
use onejob::policy::{Breaker, Rate, RetryBudget};
use onejob::provider::{Call, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request, Response};
use onejob::runtime::{ProviderProtection, Runtime};
use onejob::store::{AdmitCall, Admitted, BreakerRules, CancelMode, Kind, Store};

use super::{Setup, Shop, ended, settled, slot, states, submission, ungated, until};
use crate::support::until_within;

/// Longer than any test of these.
pub(super) const LONG: Duration = Duration::from_secs(600);

/// Opens after three failures in a row.
pub(super) fn breaker(open: Duration) -> Breaker {
    Breaker { consecutive: 3, ratio: 0.0, open, open_max: open.max(Duration::from_secs(1)) * 2, ..Breaker::default() }
}

pub(super) fn protect(setup: &mut Setup, provider: &str, change: impl FnOnce(&mut ProviderProtection)) {
    change(setup.options.protection.providers.entry(provider.to_owned()).or_default());
}

/// Submits jobs to a provider that cuts its answers off, until its breaker is open. Returns how many calls that took.
async fn break_it(shop: &Shop, runtime: &Runtime) -> u64 {
    shop.inkjet.set_behaviour("half").unwrap();
    for n in 0..3 {
        let id = runtime.submit(submission(&format!("broken-{n}"), "{}")).await.unwrap().job.id;
        assert_eq!(states(&*settled(runtime, id).await), [Unknown]);
    }
    until("the fleet knows", async || stands(shop).await == "open").await;
    shop.inkjet.ledger().received
}

/// How the inkjet's breaker stands.
async fn stands(shop: &Shop) -> String {
    let code = "local packed = redis.call('HGET', KEYS[1], 'model:') return packed and cmsgpack.unpack(packed)[1] or ''";
    shop.redis.command(&["EVAL", code, "1", "oj:guard:{inkjet}"]).await
}

/// A timeout counts when it happens, and not when the call has stopped listening for a late answer.
#[tokio::test]
async fn calls_that_are_overdue_open_the_breaker_while_they_listen_on() {
    let shop = Shop::open().await;
    let setup = |setup: &mut Setup| {
        setup.total = Duration::from_millis(200);
        protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(breaker(LONG)));
    };
    let here = shop.gateway_with(setup).await;
    shop.inkjet.set_behaviour("hang").unwrap();
    for n in 0..3 {
        let id = here.submit(submission(&format!("hangs-{n}"), "{}")).await.unwrap().job.id;
        assert_eq!(states(&*settled(&here, id).await), [Unknown]);
    }
    until("the fleet knows", async || stands(&shop).await == "open").await;
}

async fn waits(runtime: &Runtime, id: JobId) -> Arc<Job> {
    until("the job says why it waits", async || {
        let job = runtime.read(id).await.unwrap();
        job.state == JobState::Pending && job.next_at_ms > 0
    })
    .await;
    runtime.read(id).await.unwrap()
}

#[tokio::test]
async fn cut_streams_open_the_breaker_of_the_whole_fleet_and_a_job_waits_without_an_attempt() {
    let shop = Shop::open().await;
    let setup = |setup: &mut Setup| protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(breaker(LONG)));
    let (here, there) = (shop.gateway_with(setup).await, shop.gateway_with(setup).await);
    let calls = break_it(&shop, &here).await;
    assert_eq!(calls, 3);
    shop.inkjet.set_behaviour("succeed").unwrap();
    for (runtime, key) in [(&here, "order-1"), (&there, "order-2")] {
        // Beyond its deadline there is no use in waiting.
        let id = runtime.submit(submission(key, "{}")).await.unwrap().job.id;
        let job = ended(runtime, id).await;
        assert_eq!((job.state, job.attempts.len()), (JobState::Failed, 0), "{job:?}");
        assert!(job.reason.starts_with("breaker: inkjet is not called until 20"), "{}", job.reason);
        assert!(job.reason.ends_with("; deadline"), "{}", job.reason);
    }
    assert_eq!(shop.inkjet.ledger().received, calls);
}

/// The price of a closed breaker that costs no question, and its limit.
#[tokio::test]
async fn a_gateway_that_believed_a_breaker_closed_knows_better_a_second_later() {
    let shop = Shop::open().await;
    let setup = |setup: &mut Setup| protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(breaker(LONG)));
    let (here, there) = (shop.gateway_with(setup).await, shop.gateway_with(setup).await);
    let id = there.submit(submission("order-1", "{}")).await.unwrap().job.id;
    assert_eq!(states(&*ended(&there, id).await), [Succeeded]);
    let code = "local b = cmsgpack.unpack(redis.call('HGET', KEYS[1], 'model:')) return b[10][1] or 0";
    let told = async || shop.redis.command::<u64>(&["EVAL", code, "1", "oj:guard:{inkjet}"]).await;
    until("it has told of its success, and was told that all is well", async || told().await == 1).await;
    let calls = break_it(&shop, &here).await;
    let opened = Instant::now();
    shop.inkjet.set_behaviour("succeed").unwrap();
    until("a second has passed", async || opened.elapsed() >= Duration::from_secs(1)).await;
    let id = there.submit(submission("order-2", "{}")).await.unwrap().job.id;
    assert_eq!(ended(&there, id).await.attempts.len(), 0);
    assert_eq!(shop.inkjet.ledger().received, calls);
}

#[tokio::test]
async fn a_job_waits_out_an_open_breaker_and_its_probe_closes_it() {
    let shop = Shop::open().await;
    let setup = |setup: &mut Setup| {
        setup.options.lease = Duration::from_secs(4);
        setup.options.lease_margin = Duration::from_secs(1);
        protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(breaker(Duration::from_secs(6))));
    };
    let (here, there) = (shop.gateway_with(setup).await, shop.gateway_with(setup).await);
    let calls = break_it(&shop, &here).await;
    let opened = Instant::now();
    shop.inkjet.set_behaviour("succeed").unwrap();
    let id = there.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let waiting = waits(&there, id).await;
    assert!(waiting.reason.starts_with("breaker: inkjet is not called until "), "{}", waiting.reason);
    assert_eq!((waiting.attempts.len(), shop.inkjet.ledger().received), (0, calls));
    let job = ended(&there, id).await;
    assert_eq!(states(&job), [Succeeded], "what it waited for is no attempt");
    assert!(opened.elapsed() >= Duration::from_secs(5), "{:?}", opened.elapsed());
    // It is closed for the other one too.
    let id = here.submit(submission("order-2", "{}")).await.unwrap().job.id;
    assert_eq!(states(&*ended(&here, id).await), [Succeeded]);
}

/// A thousand jobs wait on two gateways when the breaker's time is over: one of them is sent, and it hangs.
#[tokio::test]
async fn of_a_thousand_jobs_on_two_gateways_one_probes() {
    let shop = Shop::open().await;
    let setup = |setup: &mut Setup| {
        setup.total = Duration::from_secs(3);
        setup.in_flight_max = 2000;
        setup.route.deadline = Some(Duration::from_secs(300));
        protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(breaker(Duration::from_secs(4))));
    };
    let gateways = [shop.gateway_with(setup).await, shop.gateway_with(setup).await];
    let calls = break_it(&shop, &gateways[0]).await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let ids: Vec<JobId> = stream::iter(0..1000)
        .map(|n| {
            let runtime = gateways[n % 2].clone();
            async move { runtime.submit(submission(&format!("order-{n}"), "{}")).await.unwrap().job.id }
        })
        .buffered(64)
        .collect()
        .await;
    until_within(Duration::from_secs(60), "a probe is sent", async || shop.inkjet.ledger().received > calls).await;
    // It ends with the provider's total timeout; until then nobody else is sent.
    let unknown = async || gateways[0].list(onejob::runtime::ListState::Unknown, 10).await.unwrap().jobs.len();
    until_within(Duration::from_secs(60), "the probe is unknown", async || unknown().await > 3).await;
    assert_eq!((unknown().await, shop.inkjet.ledger().received), (4, calls + 1));
    // The next one finds it well, and all the others follow.
    shop.inkjet.set_behaviour("succeed").unwrap();
    until_within(Duration::from_secs(120), "all but the first probe succeed", async || shop.inkjet.ledger().answered >= 999)
        .await;
    let mut succeeded = 0;
    for id in ids {
        let job = settled(&gateways[0], id).await;
        assert!(job.attempts.len() == 1, "{job:?}");
        succeeded += usize::from(job.state == JobState::Succeeded);
    }
    assert_eq!(succeeded, 999);
}

fn rules(breaker: &Breaker) -> BreakerRules {
    let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap();
    BreakerRules {
        consecutive: u64::from(breaker.consecutive),
        ratio_permille: 0,
        calls_min: u64::from(breaker.min_calls),
        window_ms: ms(breaker.window),
        open_ms: ms(breaker.open),
        open_max_ms: ms(breaker.open_max),
        probe_lease_ms: ms(breaker.probe_lease.unwrap()),
    }
}

/// What a gateway asks that dies right afterwards.
fn asked<'a>() -> AdmitCall<'a> {
    AdmitCall {
        token: AttemptToken::random(),
        provider: "inkjet",
        model: "",
        breaker: None,
        permits_max: 0,
        lease_ms: 1500,
        interval_us: 0,
        burst: 1,
        hold_max_ms: 0,
    }
}

async fn dead(shop: &Shop) -> Store {
    Store::connect(shop.redis.options()).await.unwrap().0
}

/// Case 49.
#[tokio::test]
async fn a_probe_that_died_with_its_gateway_makes_room_when_its_lease_ends() {
    let shop = Shop::open().await;
    let breaker = Breaker { probe_lease: Some(Duration::from_secs(2)), ..breaker(Duration::from_secs(1)) };
    let runtime = shop.gateway_with(|setup| protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(breaker.clone()))).await;
    let calls = break_it(&shop, &runtime).await;
    shop.inkjet.set_behaviour("succeed").unwrap();
    let store = dead(&shop).await;
    let admit = async || store.admit_call(&AdmitCall { breaker: Some(rules(&breaker)), ..asked() }).await.unwrap();
    let mut probed = Instant::now();
    until("the dead one's probe", async || {
        probed = Instant::now();
        matches!(admit().await, Admitted::Admitted { kind: Kind::Probe, .. })
    })
    .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    assert_eq!(states(&*ended(&runtime, id).await), [Succeeded]);
    assert!(probed.elapsed() >= Duration::from_millis(1900), "{:?}", probed.elapsed());
    assert_eq!(shop.inkjet.ledger().received, calls + 1);
}

/// Case 50.
#[tokio::test]
async fn an_open_breaker_leads_to_the_fallback_whose_own_breaker_opens_too() {
    let shop = Shop::open().await;
    let runtime = shop
        .gateway_with(|setup| {
            ungated(setup);
            for provider in ["inkjet", "laser"] {
                protect(setup, provider, |provider| provider.breaker = Some(breaker(LONG)));
            }
        })
        .await;
    let calls = break_it(&shop, &runtime).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((states(&job), job.attempts[0].provider.as_str()), (vec![Succeeded], "laser"));
    shop.laser.set_behaviour("status=503").unwrap();
    for n in 0..3 {
        let id = runtime.submit(submission(&format!("order-2-{n}"), "{}")).await.unwrap().job.id;
        assert_eq!(states(&*settled(&runtime, id).await), [Unknown]);
    }
    // All are open: nobody is called because nobody is left.
    let id = runtime.submit(submission("order-3", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, job.attempts.len()), (JobState::Failed, 0));
    assert_eq!((shop.inkjet.ledger().received, shop.laser.ledger().received), (calls, 4));
}

#[tokio::test]
async fn refused_connections_open_a_breaker_and_definite_refusals_do_not() {
    let shop = Shop::open().await;
    let runtime = shop
        .gateway_with(|setup| {
            setup.route.rules.attempts_max = 1;
            protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(breaker(LONG)));
        })
        .await;
    for (n, behaviour) in ["refuse_status=400", "refuse_status=404", "refuse_status=429", "refuse_status=422"].iter().enumerate()
    {
        shop.inkjet.set_behaviour(behaviour).unwrap();
        let id = runtime.submit(submission(&format!("refused-{n}"), "{}")).await.unwrap().job.id;
        assert_eq!(states(&*ended(&runtime, id).await), [Failed], "{behaviour}");
    }
    shop.inkjet.set_behaviour("refuse").unwrap();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!(job.attempts.len(), 3, "not eight: {job:?}");
    assert!(job.reason.starts_with("breaker: "), "{}", job.reason);
}

#[tokio::test]
async fn a_clients_cancel_does_not_count_against_the_provider() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let once = Breaker { consecutive: 1, ..breaker(LONG) };
    let runtime = shop
        .gateway_with(|setup| {
            setup.total = Duration::from_secs(4);
            setup.options.lease = Duration::from_secs(3);
            setup.options.lease_margin = Duration::from_millis(500);
            protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(once.clone()));
        })
        .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("it is called", async || shop.inkjet.ledger().received == 1).await;
    runtime.cancel(id, "request-1", CancelMode::Graceful, "ada", "wrong paper").await.unwrap();
    until("its call has timed out", async || states(&runtime.read(id).await.unwrap()) == [Unknown]).await;
    shop.inkjet.set_behaviour("succeed").unwrap();
    let id = runtime.submit(submission("order-2", "{}")).await.unwrap().job.id;
    assert_eq!(states(&*ended(&runtime, id).await), [Succeeded]);
}

/// A hung model does not take its neighbours with it.
#[tokio::test]
async fn each_model_of_a_provider_has_a_breaker_of_its_own() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(|setup| protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(breaker(LONG)))).await;
    shop.inkjet.set_behaviour("half").unwrap();
    for n in 0..3 {
        let id = runtime.submit(submission(&format!("large-{n}"), r#"{"model":"large"}"#)).await.unwrap().job.id;
        settled(&runtime, id).await;
    }
    shop.inkjet.set_behaviour("succeed").unwrap();
    let large = runtime.submit(submission("large-4", r#"{"model":"large"}"#)).await.unwrap().job.id;
    let small = runtime.submit(submission("small", r#"{"model":"small"}"#)).await.unwrap().job.id;
    assert_eq!(ended(&runtime, small).await.state, JobState::Succeeded);
    assert_eq!(ended(&runtime, large).await.attempts.len(), 0);
    let names: Vec<String> = shop.redis.command(&["HKEYS", "oj:guard:{inkjet}"]).await;
    assert!(names.iter().all(|name| !name.contains("large") && !name.contains("small")), "{names:?}");
}

/// The fast path: two round trips a job, as without a breaker.
#[tokio::test]
async fn a_closed_breaker_costs_a_job_no_round_trip() {
    const JOBS: u64 = 200;
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(|setup| protect(setup, "inkjet", |inkjet| inkjet.breaker = Some(Breaker::default()))).await;
    let id = runtime.submit(submission("first", "{}")).await.unwrap().job.id;
    ended(&runtime, id).await;
    shop.redis.command::<String>(&["CONFIG", "RESETSTAT"]).await;
    let began = Instant::now();
    for n in 0..JOBS {
        let receipt = runtime.submit(submission(&format!("order-{n}"), "{}")).await.unwrap();
        assert_eq!(receipt.job.state, JobState::Running, "claimed with its first attempt");
        until("it has ended", async || runtime.wait(receipt.job.id, onejob::runtime::WaitFor::Ended, LONG).await.is_ok()).await;
    }
    let reports = began.elapsed().as_millis() as u64 / 250 + 2;
    let stats: String = shop.redis.command(&["INFO", "commandstats"]).await;
    let hmget = stats.lines().find_map(|line| line.strip_prefix("cmdstat_hmget:calls=")?.split(',').next()?.parse::<u64>().ok());
    let asked = hmget.unwrap_or(0);
    assert!(asked <= reports, "{asked} looks at the guard for {JOBS} jobs in {:?}", began.elapsed());
}

/// Counts how many of its calls run at once.
#[derive(Default)]
struct Counting {
    now: AtomicUsize,
    most: AtomicUsize,
    calls: AtomicUsize,
}

struct Counted(Arc<Counting>);

impl Provider for Counted {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        let url = "counting://".to_owned();
        Ok(Rendered { method: "POST".into(), url, headers: Vec::new(), body: request.body.clone() })
    }

    fn submit(&self, _call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async {
            let Counting { now, most, calls } = &*self.0;
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(30)).await;
            now.fetch_sub(1, Ordering::SeqCst);
            calls.fetch_add(1, Ordering::SeqCst);
            let response = Response { status: 200, headers: Vec::new(), body: Arc::from(&b"1"[..]) };
            Outcome::Succeeded { response, remote_id: None, model: None }
        })
    }
}

#[tokio::test]
async fn the_fleets_permits_hold_over_all_gateways() {
    let shop = Shop::open().await;
    let counting = Arc::new(Counting::default());
    let setup = |setup: &mut Setup| {
        setup.providers = Some(vec![slot("inkjet", Counted(Arc::clone(&counting)))]);
        protect(setup, "inkjet", |inkjet| inkjet.fleet_in_flight = Some(2));
    };
    let gateways = [shop.gateway_with(setup).await, shop.gateway_with(setup).await];
    let mut ids = Vec::new();
    for n in 0..40 {
        ids.push(gateways[n % 2].submit(submission(&format!("order-{n}"), "{}")).await.unwrap().job.id);
    }
    for id in ids {
        assert_eq!(states(&*ended(&gateways[0], id).await), [Succeeded]);
    }
    let (most, calls) = (counting.most.load(Ordering::SeqCst), counting.calls.load(Ordering::SeqCst));
    assert!(most <= 2 && calls == 40, "{most} at once, {calls} calls");
    until("every permit is given back", async || shop.redis.command::<u64>(&["ZCARD", "oj:permits:{inkjet}"]).await == 0).await;
}

#[tokio::test]
async fn the_permits_of_a_gateway_that_died_come_back_when_their_leases_lapse() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(|setup| protect(setup, "inkjet", |inkjet| inkjet.fleet_in_flight = Some(2))).await;
    let store = dead(&shop).await;
    let taken = Instant::now();
    for _ in 0..2 {
        let admitted = store.admit_call(&AdmitCall { permits_max: 2, ..asked() }).await.unwrap();
        assert!(matches!(admitted, Admitted::Admitted { .. }), "{admitted:?}");
    }
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    assert_eq!(states(&*ended(&runtime, id).await), [Succeeded]);
    assert!(taken.elapsed() >= Duration::from_millis(1400), "{:?}", taken.elapsed());
}

/// A call that takes longer than a permit's lease keeps its permit.
#[tokio::test]
async fn the_permit_of_a_long_call_is_extended() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=5s").unwrap();
    let setup = |setup: &mut Setup| {
        setup.options.lease = Duration::from_millis(1500);
        setup.options.lease_margin = Duration::from_millis(300);
        protect(setup, "inkjet", |inkjet| inkjet.fleet_in_flight = Some(1));
    };
    let (here, there) = (shop.gateway_with(setup).await, shop.gateway_with(setup).await);
    let first = here.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("it is called", async || shop.inkjet.ledger().received == 1).await;
    let second = there.submit(submission("order-2", "{}")).await.unwrap().job.id;
    let (first, second) = (ended(&here, first).await, ended(&there, second).await);
    assert_eq!((states(&first), states(&second)), (vec![Succeeded], vec![Succeeded]));
    assert!(second.attempts[0].started_ms >= first.ended_ms, "{first:?} {second:?}");
}

#[tokio::test]
async fn the_rate_holds_over_all_gateways() {
    let shop = Shop::open().await;
    let setup = |setup: &mut Setup| {
        protect(setup, "inkjet", |inkjet| inkjet.rate = Some(Rate { per_second: 10.0, burst: 2 }));
    };
    let gateways = [shop.gateway_with(setup).await, shop.gateway_with(setup).await];
    let mut ids = Vec::new();
    for n in 0..12 {
        ids.push(gateways[n % 2].submit(submission(&format!("order-{n}"), "{}")).await.unwrap().job.id);
    }
    let mut began = Vec::new();
    for id in ids {
        let job = ended(&gateways[0], id).await;
        assert_eq!(states(&job), [Succeeded]);
        began.push(job.attempts[0].started_ms);
    }
    began.sort_unstable();
    // Twelve calls, two of them at once: ten intervals of 100 ms.
    let took = began[11] - began[0];
    assert!(took >= 900, "{took} ms: {began:?}");
}

/// A duplicate takes no turn.
#[tokio::test]
async fn duplicates_cost_no_turn_of_the_rate() {
    let shop = Shop::open().await;
    let rate = Rate { per_second: 1.0 / 3600.0, burst: 2 };
    let runtime = shop.gateway_with(|setup| protect(setup, "inkjet", |inkjet| inkjet.rate = Some(rate))).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    ended(&runtime, id).await;
    for _ in 0..20 {
        assert_eq!(runtime.submit(submission("order-1", "{}")).await.unwrap().job.id, id);
    }
    let id = runtime.submit(submission("order-2", "{}")).await.unwrap().job.id;
    assert_eq!(states(&*ended(&runtime, id).await), [Succeeded]);
}

#[tokio::test]
async fn a_retry_after_keeps_every_gateway_away_where_that_is_configured() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse_status=429,retry_after=3s").unwrap();
    let setup = |setup: &mut Setup| {
        setup.route.rules.attempts_max = 1;
        protect(setup, "inkjet", |inkjet| inkjet.hold_max = Some(Duration::from_secs(60)));
    };
    let (here, there) = (shop.gateway_with(setup).await, shop.gateway_with(setup).await);
    let id = here.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let refused = ended(&here, id).await;
    until("the fleet knows", async || shop.redis.command(&["HEXISTS", "oj:guard:{inkjet}", "hold_ms"]).await).await;
    shop.inkjet.set_behaviour("succeed").unwrap();
    let id = there.submit(submission("order-2", "{}")).await.unwrap().job.id;
    let job = ended(&there, id).await;
    assert_eq!(states(&job), [Succeeded]);
    assert!(job.attempts[0].started_ms >= refused.ended_ms + 2900, "{refused:?} {job:?}");
}

/// Nobody says whether the provider may be called: it is not.
#[tokio::test]
async fn while_redis_does_not_say_whether_it_may_be_called_a_provider_is_not() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(|setup| protect(setup, "inkjet", |inkjet| inkjet.fleet_in_flight = Some(5))).await;
    shop.redis.command::<()>(&["ACL", "SETUSER", "default", "-zcount"]).await;
    shop.redis.command::<()>(&["ACL", "LOG", "RESET"]).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("it has asked", async || !shop.redis.command::<Vec<redis::Value>>(&["ACL", "LOG"]).await.is_empty()).await;
    assert_eq!((runtime.read(id).await.unwrap().state, shop.inkjet.ledger().received), (JobState::Pending, 0));
    shop.redis.command::<()>(&["ACL", "SETUSER", "default", "+@all"]).await;
    assert_eq!(states(&*ended(&runtime, id).await), [Succeeded]);
}

#[tokio::test]
async fn a_pause_of_redis_while_it_is_asked_costs_time_and_no_second_call() {
    let shop = Shop::open().await;
    let runtime = shop
        .gateway_with(|setup| {
            setup.store.response_timeout = Duration::from_millis(500);
            protect(setup, "inkjet", |inkjet| {
                (inkjet.fleet_in_flight, inkjet.breaker) = (Some(1), Some(breaker(LONG)));
            });
        })
        .await;
    let mut ids = Vec::new();
    for n in 0..20 {
        if n == 5 {
            shop.redis.pause();
            tokio::time::sleep(Duration::from_millis(1500)).await;
            shop.redis.resume();
        }
        if let Ok(receipt) = runtime.submit(submission(&format!("order-{n}"), "{}")).await {
            ids.push(receipt.job.id);
        }
    }
    for id in ids {
        let job = ended(&runtime, id).await;
        assert_eq!((job.state, shop.executions(id)), (JobState::Succeeded, 1), "{job:?}");
    }
}

#[tokio::test]
async fn beyond_the_retry_budget_no_further_attempt_begins_and_the_job_says_so() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse_status=429").unwrap();
    let none = RetryBudget { percent: 0, min_per_second: 0 };
    let runtime = shop
        .gateway_with(|setup| {
            setup.route.deadline = Some(Duration::from_secs(3));
            setup.options.lease = Duration::from_secs(2);
            setup.options.lease_margin = Duration::from_millis(500);
            setup.options.protection.retry_budgets.insert("print".to_owned(), none);
        })
        .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Failed, vec![Failed]));
    assert!(job.reason.contains("deadline"), "{}", job.reason);
    assert_eq!(shop.inkjet.ledger().received, 1);
}
