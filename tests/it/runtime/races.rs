//! Races: when the second attempt begins, and what becomes of the loser. And a chain of attempts under one deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onejob::attempt::AttemptState::{Canceled, Discarded, Failed, Succeeded, Unknown};
use onejob::job::JobState;
use onejob::policy::{Gate, Tracked};
use onejob::provider::CancelSemantics;
use onejob::runtime::Runtime;

use super::courier::{Courier, Log, Stops};
use super::reconcile::{TOTAL, eager};
use super::{Setup, Shop, both, ended, race, states, submission, until};

/// A gateway with both printers, each reached by a courier.
async fn racing(shop: &Shop, inkjet: Courier, laser: Courier, change: impl FnOnce(&mut Setup)) -> (Runtime, [Arc<Log>; 2]) {
    let ((inkjet, one), (laser, other)) = (inkjet.slot("inkjet", TOTAL), laser.slot("laser", TOTAL));
    let runtime = shop
        .gateway_with(|setup| {
            race(setup, Duration::from_millis(200));
            setup.route.reconcile = eager();
            setup.providers = Some(vec![inkjet, laser]);
            change(setup);
        })
        .await;
    (runtime, [one, other])
}

#[tokio::test]
async fn the_loser_of_a_race_is_stopped_at_its_provider() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=60s").unwrap();
    let inkjet = Courier::new(&shop.inkjet, TOTAL).cancels(CancelSemantics::Confirmed, Duration::ZERO, Stops::Really);
    let (runtime, [inkjet, laser]) = racing(&shop, inkjet, Courier::new(&shop.laser, TOTAL).finds(), |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let won = ended(&runtime, id).await;
    assert_eq!((won.state, won.completed_by), (JobState::Succeeded, 2));
    until("the loser is stopped", async || states(&runtime.read(id).await.unwrap()) == [Canceled, Succeeded]).await;
    let job = runtime.read(id).await.unwrap();
    assert_eq!((job.state, job.version, job.completed_by), (JobState::Succeeded, won.version, 2));
    assert_eq!((inkjet.asked(), laser.asked()), (vec!["cancel"], vec![]));
    assert_eq!(shop.inkjet.ledger().executed, 0);
}

/// It was paid for, so it is said what for.
#[tokio::test]
async fn a_loser_that_was_lost_is_asked_what_it_cost() {
    let recorder: &'static _ = Box::leak(Box::new(metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder()));
    let _counting = metrics::set_default_local_recorder(recorder);
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let inkjet = Courier::new(&shop.inkjet, Duration::from_millis(900)).has_status();
    let (runtime, [inkjet, _]) = racing(&shop, inkjet, Courier::new(&shop.laser, TOTAL), |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let won = ended(&runtime, id).await;
    assert_eq!((won.state, states(&won)[1]), (JobState::Succeeded, Succeeded));
    until("the loser is judged", async || states(&runtime.read(id).await.unwrap()) == [Discarded, Succeeded]).await;
    assert_eq!(inkjet.asked(), ["status"]);
    let counted = "onejob_discarded_cost_total{provider=\"inkjet\"} 7";
    until(counted, async || recorder.handle().render().contains(counted)).await;
    assert!(recorder.handle().render().contains("onejob_results_total{fate=\"discarded\"} 1"));
}

#[tokio::test]
async fn a_loser_that_answers_after_all_says_what_it_cost() {
    let recorder: &'static _ = Box::leak(Box::new(metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder()));
    let _counting = metrics::set_default_local_recorder(recorder);
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=900ms").unwrap();
    let (runtime, _) = racing(&shop, Courier::new(&shop.inkjet, TOTAL), Courier::new(&shop.laser, TOTAL), |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    assert_eq!(ended(&runtime, id).await.completed_by, 2);
    let counted = "onejob_discarded_cost_total{provider=\"inkjet\"} 2";
    until(counted, async || recorder.handle().render().contains(counted)).await;
}

/// An unknown attempt blocks beginnings, never endings; and in a race it is asked about while the other one runs.
#[tokio::test]
async fn one_of_a_race_that_is_unknown_is_asked_about_while_the_other_runs() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=500ms,drop").unwrap();
    shop.laser.set_behaviour("queue=60s").unwrap();
    let laser = Courier::new(&shop.laser, TOTAL).cancels(CancelSemantics::Confirmed, Duration::ZERO, Stops::Really);
    let (runtime, _) = racing(&shop, Courier::new(&shop.inkjet, TOTAL).finds(), laser, |_| {}).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, job.completed_by), (JobState::Succeeded, 1));
    until("the other is stopped", async || states(&runtime.read(id).await.unwrap()) == [Succeeded, Canceled]).await;
}

/// By what its provider took for the last ones, and not after the half minute that counts while nobody knows.
#[tokio::test]
async fn a_tracked_race_begins_when_an_attempt_is_slower_than_nearly_all_before() {
    let shop = Shop::open().await;
    let tracked = Tracked { percentile: 90, fallback: Duration::from_secs(30) };
    let couriers = [&shop.inkjet, &shop.laser].map(|printer| Courier::new(printer, TOTAL));
    let [inkjet, laser] = couriers;
    let (runtime, _) = racing(&shop, inkjet, laser, |setup| {
        setup.route.tracked = Some(tracked);
        setup.route.rules.race_after_ms = 10;
    })
    .await;
    for order in 0..tracked.samples_min() {
        let id = runtime.submit(submission(&format!("order-{order}"), "{}")).await.unwrap().job.id;
        assert_eq!(states(&*ended(&runtime, id).await), [Succeeded], "none is raced while too little is known");
    }
    shop.inkjet.set_behaviour("queue=25s").unwrap();
    let began = Instant::now();
    let id = runtime.submit(submission("slow", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, job.completed_by), (JobState::Succeeded, 2));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

/// Case 42: ten seconds for the job and eight for a call, scaled to one half.
#[tokio::test]
async fn every_attempt_of_a_chain_gets_what_is_left_of_the_one_deadline() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=3s,refuse_status=429").unwrap();
    shop.laser.set_behaviour("hang").unwrap();
    let total = Duration::from_secs(4);
    let ((inkjet, one), (laser, other)) =
        (Courier::new(&shop.inkjet, total).slot("inkjet", total), Courier::new(&shop.laser, total).slot("laser", total));
    let runtime = shop
        .gateway_with(|setup| {
            both(setup);
            setup.route.plan.gate = Gate::Off;
            setup.route.deadline = Some(Duration::from_secs(5));
            setup.providers = Some(vec![inkjet, laser]);
        })
        .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = super::settled(&runtime, id).await;
    assert_eq!(states(&job), [Failed, Unknown]);
    let ([first], [second]) = (&one.deadlines()[..], &other.deadlines()[..]) else { panic!("one call each") };
    assert!((Duration::from_millis(2500)..=total).contains(first), "{first:?}");
    assert!(*second <= Duration::from_secs(2), "the call alone would have {total:?}, the job has left {second:?}");
    let overdue_ms = job.attempts[1].ended_ms.saturating_sub(job.deadline_ms);
    assert!(overdue_ms < 2000, "it was given up {overdue_ms} ms after the deadline");
}
