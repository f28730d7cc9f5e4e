//! What becomes of attempts that are unknown, where their provider can be asked.

use std::sync::Arc;
use std::time::Duration;

use onejob::attempt::AttemptState::{Abandoned, Failed, Succeeded, Unknown};
use onejob::attempt::FinishOutcome;
use onejob::job::{Job, JobState};
use onejob::policy::{FailoverOn, REPLAYS_MAX, Reconcile};
use onejob::provider::simulated::{Keys, Simulated, SimulatedOptions};
use onejob::provider::{Provider as _, Request};
use onejob::runtime::{ListState, Runtime};
use onejob::store::{Begin, WriteAhead};

use super::courier::{Courier, Log, Renders};
use super::gateways::{claimed_by_a_dead_gateway, told_by_its_holder};
use super::{Setup, Shop, ended, settled, states, submission, until};
use crate::support::Submission;

pub const TOTAL: Duration = Duration::from_secs(30);

/// Asks at once and again and again.
pub fn eager() -> Reconcile {
    Reconcile {
        first: Duration::from_millis(20),
        max: Duration::from_millis(100),
        give_up: Duration::from_secs(3600),
        abandon_after: None,
    }
}

/// A gateway whose one printer is reached by this courier.
pub async fn gateway(shop: &Shop, courier: Courier, change: impl FnOnce(&mut Setup)) -> (Runtime, Arc<Log>) {
    let (slot, log) = courier.slot("inkjet", TOTAL);
    let runtime = shop
        .gateway_with(|setup| {
            setup.route.reconcile = eager();
            setup.providers = Some(vec![slot]);
            change(setup);
        })
        .await;
    (runtime, log)
}

async fn honouring_keys() -> Arc<Simulated> {
    Arc::new(Simulated::start(SimulatedOptions { keys: Keys::Honoured, ..SimulatedOptions::default() }).await.unwrap())
}

fn decided_by<'a>(job: &'a Job, actor: &str) -> Vec<&'a str> {
    let decisions = job.events.iter().filter(|event| event.event == "resolved" && event.actor == actor);
    decisions.map(|event| event.detail.as_str()).collect()
}

/// Case 36: the answer was lost, the work was done; the provider knows, and whoever waits is told.
#[tokio::test]
async fn a_lost_answer_is_found_by_our_key_and_whoever_waits_gets_it() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("drop").unwrap();
    let (runtime, log) = gateway(&shop, Courier::new(&shop.inkjet, TOTAL).finds(), |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job), job.completed_by), (JobState::Succeeded, vec![Succeeded], 1));
    assert_eq!(decided_by(&job, "onejob/reconcile"), ["succeeded: find: the provider did it, and this is its answer"]);
    assert_eq!(job.winner().unwrap().model, "courier-1");
    assert!(runtime.result(&job).await.unwrap().unwrap().body.starts_with(b"{\"execution\""));
    let again = runtime.submit(submission("order-1", "{}")).await.unwrap().job;
    assert_eq!((again.id, again.state), (id, JobState::Succeeded));
    assert!(runtime.list(ListState::Unknown, 10).await.unwrap().jobs.is_empty());
    assert_eq!((shop.executions(id), log.asked()), (1, vec!["find"]));
}

/// The provider's own id is asked by first, and it is in the record before the call has ended.
#[tokio::test]
async fn an_accepted_attempt_is_asked_about_by_the_providers_own_name_for_it() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=600ms,drop").unwrap();
    let courier = Courier::new(&shop.inkjet, TOTAL).has_status().finds();
    let (runtime, log) = gateway(&shop, courier, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the name is noted while the call runs", async || {
        let job = runtime.read(id).await.unwrap();
        job.state == JobState::Running && job.attempts[0].remote_id == "print-1"
    })
    .await;
    let job = ended(&runtime, id).await;
    assert_eq!(states(&job), [Succeeded]);
    assert_eq!((shop.executions(id), log.asked()), (1, vec!["status"]));
}

#[tokio::test]
async fn what_still_runs_stays_unknown_and_is_asked_about_again_until_it_ends() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=1500ms").unwrap();
    let courier = Courier::new(&shop.inkjet, Duration::from_millis(200)).finds();
    let (runtime, log) = gateway(&shop, courier, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    assert_eq!(settled(&runtime, id).await.state, JobState::Unknown);
    until("it was asked about while it ran", async || log.count("find") > 2).await;
    let job = ended(&runtime, id).await;
    assert_eq!((states(&job), shop.executions(id)), (vec![Succeeded], 1));
}

/// Status, then our key, then the same again; the provider does the work of a key once.
#[tokio::test]
async fn a_replay_comes_last_and_executes_nothing_twice() {
    let shop = Shop::open().await;
    let printer = honouring_keys().await;
    printer.set_behaviour("drop").unwrap();
    // It is asked in vain: these ledgers know nothing of the job.
    let mut courier = Courier::new(&printer, TOTAL).has_status().finds().replays(Duration::from_secs(3600));
    courier.ask_instead(&shop.laser);
    let (runtime, log) = gateway(&shop, courier, |setup| setup.route.reconcile.first = Duration::from_millis(500)).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    assert_eq!(settled(&runtime, id).await.state, JobState::Unknown);
    printer.set_behaviour("succeed").unwrap();
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
    assert_eq!(log.asked(), ["status", "find", "replay"]);
    let ledger = printer.ledger_of(&id.to_string());
    assert_eq!((ledger.received, ledger.executed), (2, 1));
    let keys: Vec<_> = ledger.entries.iter().map(|entry| (&entry.idempotency_key, &entry.body_sha256, &entry.attempt)).collect();
    assert_eq!(keys[0], keys[1], "the same key, the same bytes, the same attempt");
    assert_eq!(job.happened(1, "replayed").count(), 1);
}

#[tokio::test]
async fn an_attempt_whose_bytes_would_be_others_is_not_sent_again() {
    let shop = Shop::open().await;
    let printer = honouring_keys().await;
    printer.set_behaviour("drop").unwrap();
    let mut courier = Courier::new(&printer, TOTAL).finds().replays(Duration::from_secs(3600));
    courier.renders = Renders::EachTimeAnother;
    courier.ask_instead(&shop.laser);
    let (runtime, log) = gateway(&shop, courier, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("it was asked about", async || log.count("find") > 3).await;
    assert_eq!(runtime.read(id).await.unwrap().state, JobState::Unknown);
    assert_eq!((log.count("replay"), printer.ledger().received), (0, 1));
}

/// A provider remembers a key for so long; a call that could end later is not made.
#[tokio::test]
async fn nothing_is_sent_again_that_the_provider_may_have_forgotten() {
    let shop = Shop::open().await;
    let printer = honouring_keys().await;
    printer.set_behaviour("drop").unwrap();
    let mut courier = Courier::new(&printer, TOTAL).finds().replays(TOTAL + Duration::from_millis(1));
    courier.ask_instead(&shop.laser);
    let (runtime, log) = gateway(&shop, courier, |_| {}).await;
    runtime.submit(submission("order-1", "{}")).await.unwrap();
    until("it was asked about", async || log.count("find") > 3).await;
    assert_eq!((log.count("replay"), printer.ledger().received), (0, 1));
}

#[tokio::test]
async fn replays_of_one_attempt_are_bounded() {
    let shop = Shop::open().await;
    let printer = honouring_keys().await;
    printer.set_behaviour("drop").unwrap();
    let mut courier = Courier::new(&printer, TOTAL).finds().replays(Duration::from_secs(3600));
    courier.ask_instead(&shop.laser);
    let (runtime, log) = gateway(&shop, courier, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("all replays were made", async || log.count("replay") == REPLAYS_MAX).await;
    let asked = log.count("find");
    until("it was asked about since", async || log.count("find") > asked + 3).await;
    assert_eq!(log.count("replay"), REPLAYS_MAX);
    let ledger = printer.ledger_of(&id.to_string());
    assert_eq!((ledger.received, ledger.executed), (1 + REPLAYS_MAX as u64, 1));
    assert_eq!(runtime.read(id).await.unwrap().happened(1, "replayed").count(), REPLAYS_MAX);
}

/// Between the question and the replay its holder says that nothing was sent, and another attempt begins: the first one's key must
/// not be used any more.
#[tokio::test]
async fn what_its_holder_gave_up_meanwhile_is_not_sent_again() {
    let shop = Shop::open().await;
    let printer = honouring_keys().await;
    let mut courier = Courier::new(&printer, TOTAL).finds().replays(Duration::from_secs(3600));
    courier.ask_instead(&shop.laser);
    *courier.log.takes.lock().unwrap() = Duration::from_secs(1);
    let request = Request {
        method: String::new(),
        target: String::new(),
        content_type: "application/json".to_owned(),
        headers: vec![],
        body: Arc::from(&b"{}"[..]),
    };
    let request_hash = courier.render(&request).unwrap().hash();
    let sent = WriteAhead { url: &printer.base_url(), request_hash: &request_hash, certificate: "" };
    let store = shop.redis.store().await;
    let begin = Begin::Running { provider: "inkjet", sent };
    let id = claimed_by_a_dead_gateway(&store, "order-1", begin, Duration::from_millis(200)).await;
    let (runtime, log) = gateway(&shop, courier, |_| {}).await;
    until("it is asked about", async || log.count("find") == 1).await;
    told_by_its_holder(&store, id, FinishOutcome::Aborted, "not_sent").await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Failed, Succeeded]));
    let ask = format!("oj:{{{}}}:ask", id.identity());
    until("nobody asks any more", async || !shop.redis.command::<bool>(&["EXISTS", &ask]).await).await;
    assert_eq!((printer.ledger_of(&id.to_string()).executed, log.asked()), (1, vec!["find"]));
}

/// Claimed and written ahead, then its gateway died: nobody knows whether it was sent. That the provider has never heard of it is
/// believed only when nothing can be on its way any more.
#[tokio::test]
async fn never_heard_of_is_believed_after_the_quarantine_and_another_attempt_runs() {
    let shop = Shop::open().await;
    let store = shop.redis.store().await;
    let sent = super::gateways::running();
    let id = claimed_by_a_dead_gateway(&store, "order-1", sent, Duration::from_millis(200)).await;
    let (runtime, log) = gateway(&shop, Courier::new(&shop.inkjet, TOTAL).finds(), |_| {}).await;
    until("it was asked about", async || log.count("find") > 2).await;
    let job = runtime.read(id).await.unwrap();
    assert_eq!((job.state, states(&job)), (JobState::Unknown, vec![Unknown]), "too early to believe");
    let given = shop.redis.given_absent(Submission::new("order-1")).await;
    given.rewrite("record[P.policy][L.quarantine_ms] = now - record[P.attempts][1][A.ended_ms]").await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Failed, Succeeded]));
    assert_eq!(decided_by(&job, "onejob/reconcile"), ["failed: find: the provider has never heard of it"]);
    assert_eq!(shop.executions(id), 1);
}

/// Who once had a name for the work has forgotten it; it had heard of it.
#[tokio::test]
async fn never_heard_of_is_not_believed_of_who_has_accepted() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("drop").unwrap();
    let mut courier = Courier::new(&shop.inkjet, TOTAL).has_status().finds();
    courier.ask_instead(&shop.laser);
    let (runtime, log) = gateway(&shop, courier, |setup| setup.route.rules.quarantine_ms = 0).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("it was asked about", async || log.count("find") > 3).await;
    assert_eq!(states(&runtime.read(id).await.unwrap()), [Unknown]);
}

/// A definite failure found out later is one: within the budget another attempt runs, else the job has the provider's refusal.
#[tokio::test]
async fn a_refusal_found_out_later_is_followed_as_any_refusal() {
    for (retried, expected) in [(false, vec![Failed]), (true, vec![Failed, Succeeded])] {
        let shop = Shop::open().await;
        // Refused, and the answer comes too late.
        shop.inkjet.set_behaviour("refuse_status=422,slow_body=400ms").unwrap();
        let courier = Courier::new(&shop.inkjet, Duration::from_millis(300)).finds();
        let (runtime, _) = gateway(&shop, courier, |setup| {
            if retried {
                setup.route.plan.failover_on.push(FailoverOn::Rejected { status: 422 });
            }
            setup.route.reconcile.first = Duration::from_millis(500);
        })
        .await;
        let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
        assert_eq!(settled(&runtime, id).await.state, JobState::Unknown);
        shop.inkjet.set_behaviour("succeed").unwrap();
        let job = ended(&runtime, id).await;
        assert_eq!(states(&job), expected);
        let reason = &job.attempts[0].reason;
        assert!(reason.starts_with("rejected 422: the paper is jammed; by find"), "{reason}");
        if !retried {
            assert_eq!(runtime.result(&job).await.unwrap().unwrap().status, 422, "the provider's own refusal is replayed");
        }
    }
}

/// However many gateways look at a job, one asks.
#[tokio::test]
async fn of_many_gateways_one_asks_at_a_time_and_the_pause_is_shared() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=20s").unwrap();
    let courier = Courier::new(&shop.inkjet, Duration::from_millis(200)).finds();
    *courier.log.takes.lock().unwrap() = Duration::from_millis(50);
    let (slot, log) = courier.slot("inkjet", TOTAL);
    let (first, pause) = (Duration::from_millis(20), Duration::from_millis(400));
    let mut gateways = Vec::new();
    for _ in 0..4 {
        let slot = slot.clone();
        let gateway = shop
            .gateway_with(|setup| {
                setup.route.reconcile = Reconcile { first, max: pause, ..eager() };
                setup.providers = Some(vec![slot]);
                setup.options.sweep = Duration::from_millis(20);
            })
            .await;
        gateways.push(gateway);
    }
    let id = gateways[0].submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("it is asked about for a while", async || {
        // Whoever sends it again has it looked at; that makes nobody ask earlier.
        let hint = format!("oj:due:{{{:02x}}}", id.identity().shard());
        shop.redis.command::<()>(&["ZADD", &hint, "LT", "1", &id.identity().to_string()]).await;
        log.count("find") >= 8
    })
    .await;
    assert_eq!(log.most_at_once(), 1);
    let job = gateways[1].read(id).await.unwrap();
    let unknown_for = Duration::from_millis(gateways[1].store().now_ms() - job.attempts[0].ended_ms);
    // 8 questions: pauses of 20 ms and more at first, 400 ms in the end, 50 ms for each answer.
    assert!(unknown_for > Duration::from_millis(1000), "eight questions within {unknown_for:?}");
}

#[tokio::test]
async fn what_nobody_can_find_out_calls_a_person_once() {
    let recorder: &'static _ = Box::leak(Box::new(metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder()));
    let _counting = metrics::set_default_local_recorder(recorder);
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    // It is asked on and on, in vain.
    let mut courier = Courier::new(&shop.inkjet, Duration::from_millis(200)).finds();
    courier.ask_instead(&shop.laser);
    let (runtime, log) = gateway(&shop, courier, |setup| {
        setup.route.reconcile.give_up = Duration::from_millis(400);
        setup.options.sweep = Duration::from_millis(10);
    })
    .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    assert!(!settled(&runtime, id).await.needs_operator());
    until("a person is called", async || runtime.read(id).await.unwrap().needs_operator()).await;
    let asked = log.count("find");
    until("it is asked on", async || log.count("find") > asked + 3).await;
    let listed = runtime.list(ListState::Unknown, 10).await.unwrap().jobs;
    assert!(listed.iter().any(|job| job.id == id && job.needs_operator()));
    until("it is counted", async || recorder.handle().render().contains("onejob_jobs_need_operator 1")).await;
    let job = runtime.read(id).await.unwrap();
    let calls: Vec<_> = job.events.iter().filter(|event| event.event == "needs_operator").collect();
    assert_eq!((calls.len(), calls[0].actor.as_str()), (1, "onejob/reconcile"));
    assert_eq!(calls[0].detail, "unknown for longer than 400ms");
    assert_eq!(job.state, JobState::Unknown, "nothing else has changed");
    until("nobody is needed any more", async || {
        let decision = super::stops::by_nina(1);
        let _ = runtime.resolve(id, decision).await;
        recorder.handle().render().contains("onejob_jobs_need_operator 0")
    })
    .await;
}

/// The events name the policy, and not a person.
#[tokio::test]
async fn a_pure_attempt_is_abandoned_after_its_time_and_another_one_runs() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let (runtime, _) = gateway(&shop, Courier::new(&shop.inkjet, Duration::from_millis(200)), |setup| {
        setup.route.reconcile.abandon_after = Some(Duration::from_millis(500));
    })
    .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    assert_eq!(settled(&runtime, id).await.state, JobState::Unknown);
    shop.inkjet.set_behaviour("succeed").unwrap();
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Abandoned, Succeeded]));
    assert_eq!(decided_by(&job, "policy"), ["abandoned: abandon_after: nobody knows after 500ms; doing it twice only costs"]);
    let gone_ms = job.attempts[0].ended_ms - job.attempts[0].started_ms;
    assert!(gone_ms >= 700, "{gone_ms} ms after it began");
}

#[tokio::test]
async fn questions_and_what_they_settle_are_counted() {
    let recorder: &'static _ = Box::leak(Box::new(metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder()));
    let _counting = metrics::set_default_local_recorder(recorder);
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("drop").unwrap();
    let (runtime, _) = gateway(&shop, Courier::new(&shop.inkjet, TOTAL).finds(), |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    ended(&runtime, id).await;
    for line in [
        "onejob_questions_total{provider=\"inkjet\",question=\"find\",answer=\"succeeded\"} 1",
        "onejob_questions_total{provider=\"inkjet\",question=\"status\",answer=\"succeeded\"} 0",
        "onejob_reconciled_total{outcome=\"succeeded\"} 1",
        "onejob_jobs_ended_total{state=\"succeeded\"} 1",
        "onejob_late_results_total 1",
    ] {
        until(line, async || recorder.handle().render().contains(line)).await;
    }
}

/// A pending claim of a gateway that died is nothing to be asked about.
#[tokio::test]
async fn what_never_left_is_never_asked_about() {
    let shop = Shop::open().await;
    let store = shop.redis.store().await;
    let id = claimed_by_a_dead_gateway(&store, "order-1", Begin::Pending, Duration::from_millis(200)).await;
    let (runtime, log) = gateway(&shop, Courier::new(&shop.inkjet, TOTAL).finds(), |_| {}).await;
    assert_eq!(states(&*ended(&runtime, id).await), [Succeeded]);
    assert_eq!(log.asked(), [""; 0]);
}
