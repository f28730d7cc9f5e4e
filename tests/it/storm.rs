//! The storm: a fleet under load while everything about it breaks, and a judge afterwards.
//!
//! `make storm` runs the long one. `ONEJOB_SEED` repeats one: the same intents, the same faults in the same order, the same choices
//! of each client. Threads and processes interleave as they like, so a repetition meets the same weather, not the same raindrops.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use tokio::sync::watch;

use crate::fleet::Fleet;
use crate::fleet::client::Clients;
use crate::fleet::conductor::{census, conduct, schedule};
use crate::fleet::dice::{seed, setting};
use crate::fleet::intent::Intent;
use crate::fleet::judge::{Verdict, judge, rest};

/// How large a storm is.
struct Storm {
    gateways: usize,
    intents: usize,
    at_once: usize,
    /// How many acts of each kind.
    rounds: usize,
    /// No intent begins later: a busy machine gets through fewer, and the summary says how many.
    load_max: Duration,
    /// It is over by then, or it failed.
    deadline: Duration,
    /// Of the intents that the provider does and confirms, so many of a hundred must have succeeded: a storm in which nothing
    /// works proves nothing.
    succeeded_percent_min: usize,
}

/// Begins a storm, waits until it is over and everything at rest, and judges.
async fn storm(seed: u64, storm: &Storm) -> Verdict {
    let began = Instant::now();
    let mut fleet = Fleet::start(storm.gateways, &format!("random={seed}")).await;
    println!("seed {seed}; logs in {}", fleet.keep_logs().display());
    let fleet = Arc::new(fleet);
    let intents: Vec<Intent> = (0..storm.intents).map(|number| Intent::draw(seed, number)).collect();
    let acts = schedule(seed, storm.gateways, storm.rounds);
    let faults = census(&acts);
    let clients = Clients::new();
    let (done, progress) = watch::channel(0);
    let conductor = tokio::spawn(conduct(Arc::clone(&fleet), acts, progress, storm.intents));
    let loaded = Instant::now();
    stream::iter(&intents)
        .for_each_concurrent(storm.at_once, |intent| {
            let (clients, fleet, done) = (&clients, &fleet, &done);
            async move {
                if loaded.elapsed() < storm.load_max {
                    clients.want(fleet, seed, intent).await;
                }
                done.send_modify(|done| *done += 1);
            }
        })
        .await;
    let load = loaded.elapsed();
    conductor.await.expect("every act is performed");
    let store = fleet.store().await;
    let resting = Instant::now();
    rest(&fleet, &store).await;
    let rest = resting.elapsed();
    let mut verdict = judge(&fleet, &store, &intents, &clients.told()).await;
    fleet.stop().await;
    store.close().await;
    let rows = [
        ("seed", seed.to_string()),
        ("gateways, intents at once", format!("{}, {}", storm.gateways, storm.at_once)),
        ("load, until rest, all in all", format!("{load:.1?}, {rest:.1?}, {:.1?}", began.elapsed())),
    ];
    let rows = rows.into_iter().map(|(what, value)| (what.to_owned(), value));
    let faults = faults.into_iter().map(|(name, times)| (format!("fault: {name}"), times.to_string()));
    verdict.rows = rows.chain(faults).chain(verdict.rows).collect();
    verdict
}

async fn run(size: Storm) {
    let seed = seed();
    let verdict = tokio::time::timeout(size.deadline, Box::pin(storm(seed, &size))).await;
    let verdict = verdict.unwrap_or_else(|_| panic!("seed {seed}: not over within {:?}", size.deadline));
    println!("{}", verdict.table());
    println!("seed {seed}");
    assert!(verdict.violations.is_empty(), "seed {seed}: {} violations, see above", verdict.violations.len());
    let (expected, succeeded) = verdict.good;
    assert!(verdict.accepted > 0, "seed {seed}: no intent was accepted");
    let enough = expected * size.succeeded_percent_min / 100;
    assert!(succeeded >= enough, "seed {seed}: {succeeded} of {expected} good intents succeeded, fewer than {enough}");
}

/// The short form: each kind of fault twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_done_twice_or_lost_whatever_breaks() {
    run(Storm {
        gateways: 3,
        intents: 600,
        at_once: 48,
        rounds: 2,
        load_max: Duration::from_secs(60),
        deadline: Duration::from_secs(180),
        succeeded_percent_min: 50,
    })
    .await;
}

/// The long form, by `make storm`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make storm"]
async fn nothing_is_done_twice_or_lost_in_a_long_storm() {
    let number = |name, default| setting(name).map_or(default, |number| usize::try_from(number).expect("a size"));
    run(Storm {
        gateways: number("ONEJOB_STORM_GATEWAYS", 3),
        intents: number("ONEJOB_STORM_INTENTS", 20_000),
        at_once: number("ONEJOB_STORM_AT_ONCE", 64),
        rounds: number("ONEJOB_STORM_ROUNDS", 6),
        load_max: Duration::from_secs(450),
        deadline: Duration::from_secs(600),
        succeeded_percent_min: 80,
    })
    .await;
}
