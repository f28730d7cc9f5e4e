//! Cancels that reach the provider, and what it makes of them.

use std::time::Duration;

use onejob::attempt::AttemptState::{Canceled, Succeeded};
use onejob::attempt::ResolveOutcome;
use onejob::job::JobState;
use onejob::provider::CancelSemantics;
use onejob::runtime::{Decision, Then};
use onejob::store::{self, CancelMode, Word};

use super::courier::{Courier, Stops};
use super::reconcile::{TOTAL, gateway};
use super::{Shop, ended, states, submission, until};

/// A person's decision that it is not worth finding out.
pub fn by_nina(number: u32) -> Decision {
    Decision {
        number,
        request_id: format!("nina-{number}"),
        outcome: ResolveOutcome::Abandoned,
        actor: "nina".to_owned(),
        reason: "the customer was called".to_owned(),
        word: Word::Operator,
        result: None,
        then: Then::End,
        check: onejob::runtime::CheckResult::Checked,
    }
}

/// The printer has it in its queue; the gateway's call waits for it.
async fn queued(
    shop: &Shop,
    courier: Courier,
) -> (onejob::runtime::Runtime, std::sync::Arc<super::courier::Log>, onejob::job::JobId) {
    let (runtime, log) = gateway(shop, courier, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the printer has it", async || shop.inkjet.ledger().accepted == 1).await;
    let canceled = runtime.cancel(id, "request-1", CancelMode::Graceful, "ada", "wrong paper").await.unwrap();
    assert_eq!(canceled, store::Canceled::Canceling { open: 1 });
    (runtime, log, id)
}

#[tokio::test]
async fn a_confirmed_cancel_ends_the_job_though_its_call_still_waits() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=60s").unwrap();
    let courier = Courier::new(&shop.inkjet, TOTAL).cancels(CancelSemantics::Confirmed, Duration::ZERO, Stops::Really);
    let (runtime, log, id) = queued(&shop, courier).await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Canceled, vec![Canceled]));
    assert_eq!((shop.executions(id), log.asked()), (0, vec!["cancel"]));
    let sent: Vec<_> = job.events.iter().filter(|event| event.event == "cancel_sent").collect();
    assert_eq!((sent.len(), sent[0].actor.as_str()), (1, "onejob/reconcile"));
}

/// Another gateway than the one that runs the attempt can be asked to cancel, and asks.
#[tokio::test]
async fn an_attempt_that_runs_elsewhere_is_stopped_too() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=60s").unwrap();
    let courier = || Courier::new(&shop.inkjet, TOTAL).cancels(CancelSemantics::Confirmed, Duration::ZERO, Stops::Really);
    let quiet = |setup: &mut super::Setup| setup.options.sweep = Duration::from_secs(60);
    let (runs, _) = gateway(&shop, courier(), quiet).await;
    let (other, log) = gateway(&shop, courier(), |_| {}).await;
    let id = runs.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the printer has it", async || shop.inkjet.ledger().accepted == 1).await;
    other.cancel(id, "request-1", CancelMode::Graceful, "ada", "wrong paper").await.unwrap();
    assert_eq!(ended(&other, id).await.state, JobState::Canceled);
    assert_eq!(log.asked(), ["cancel"]);
}

/// Case 47: acknowledged, and it says that it was stopped, then completed anyway. The result counts, once.
#[tokio::test]
async fn a_best_effort_cancel_that_was_too_late_loses_to_the_result() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=2s").unwrap();
    let settle = Duration::from_secs(30);
    let courier = Courier::new(&shop.inkjet, Duration::from_millis(200)).has_status();
    let courier = courier.cancels(CancelSemantics::BestEffort, settle, Stops::Really);
    let (runtime, log) = gateway(&shop, courier, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    super::settled(&runtime, id).await;
    runtime.cancel(id, "request-1", CancelMode::Graceful, "ada", "wrong paper").await.unwrap();
    until("the provider says that it was stopped", async || {
        runtime.read(id).await.unwrap().happened(1, "cancel_seen").count() == 1
    })
    .await;
    let asked = log.count("status");
    until("it says so again", async || log.count("status") > asked + 2).await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
    assert_eq!((shop.executions(id), log.count("cancel")), (1, 1));
}

/// Only what still says so after the settle time was stopped.
#[tokio::test]
async fn a_best_effort_cancel_is_believed_after_the_settle_time() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=60s").unwrap();
    let settle = Duration::from_millis(1200);
    let courier = Courier::new(&shop.inkjet, TOTAL).has_status().cancels(CancelSemantics::BestEffort, settle, Stops::Really);
    let (runtime, log, id) = queued(&shop, courier).await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Canceled, vec![Canceled]));
    let seen_ms = job.happened(1, "cancel_seen").next().unwrap();
    assert!(job.ended_ms >= seen_ms + 1200, "{} ms after it was told", job.ended_ms - seen_ms);
    assert_eq!((log.count("cancel"), log.asked().last()), (1, Some(&"status")));
}

#[tokio::test]
async fn an_unknown_attempt_of_a_canceled_job_is_stopped_and_then_asked_about() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=60s").unwrap();
    let courier = Courier::new(&shop.inkjet, Duration::from_millis(200)).finds();
    let courier = courier.cancels(CancelSemantics::QueuedOnly, Duration::ZERO, Stops::Really);
    let (runtime, log) = gateway(&shop, courier, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("it is asked about", async || log.count("find") > 2).await;
    assert_eq!(log.count("cancel"), 0, "nobody wants it stopped");
    runtime.cancel(id, "request-1", CancelMode::Graceful, "ada", "wrong paper").await.unwrap();
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job), log.count("cancel")), (JobState::Canceled, vec![Canceled], 1));
}

/// A provider that cannot be asked to stop is not asked; its answer decides.
#[tokio::test]
async fn without_a_cancel_call_a_canceled_job_waits_for_its_answer() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=800ms").unwrap();
    let (runtime, log, id) = queued(&shop, Courier::new(&shop.inkjet, TOTAL).finds()).await;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, log.count("cancel")), (JobState::Succeeded, 0));
}

/// The job is over at once; whoever works on it is still told to stop.
#[tokio::test]
async fn a_forced_cancel_stops_the_provider_too() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=60s").unwrap();
    let courier = Courier::new(&shop.inkjet, TOTAL).cancels(CancelSemantics::Confirmed, Duration::ZERO, Stops::Really);
    let (runtime, log) = gateway(&shop, courier, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the printer has it", async || shop.inkjet.ledger().accepted == 1).await;
    runtime.cancel(id, "request-1", CancelMode::Force, "ada", "at once").await.unwrap();
    until("its row says so", async || states(&runtime.read(id).await.unwrap()) == [Canceled]).await;
    let job = runtime.read(id).await.unwrap();
    assert_eq!((job.state, job.version, log.asked()), (JobState::Canceled, 1, vec!["cancel"]));
}

/// What stops only what has not begun may have begun it: as with every effort, "canceled" counts once it has stood for its time.
#[tokio::test]
async fn a_cancel_of_what_is_queued_is_believed_after_its_settle_time_too() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=1s").unwrap();
    let courier = Courier::new(&shop.inkjet, Duration::from_millis(200)).has_status();
    let courier = courier.cancels(CancelSemantics::QueuedOnly, Duration::from_secs(30), Stops::Really);
    let (runtime, _) = gateway(&shop, courier, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    super::settled(&runtime, id).await;
    runtime.cancel(id, "request-1", CancelMode::Graceful, "ada", "wrong paper").await.unwrap();
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job), shop.executions(id)), (JobState::Succeeded, vec![Succeeded], 1));
}
