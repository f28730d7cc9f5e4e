//! The library without the gateway: submit one intent to an HTTP provider, wait for its one result, submit it again.
//!
//! ```sh
//! cargo run --example submit_and_wait                            # starts a private redis-server in ./onejob-data
//! cargo run --example submit_and_wait -- redis://127.0.0.1:6379  # uses yours
//! ```
//!
//! The provider is the programmable one that comes with onejob, over real HTTP. With yours: another `base_url`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use onejob::config::Timeouts;
use onejob::job::{Class, Key, Owner, Rules};
use onejob::policy::{Effects, FailoverOn, Gate, Plan, Reconcile};
use onejob::provider::Request;
use onejob::provider::http::{HttpOptions, HttpProvider};
use onejob::provider::simulated::{Simulated, SimulatedOptions};
use onejob::runtime::{ProviderSlot, Route, Runtime, RuntimeOptions, Submission, WaitFor};
use onejob::store::private_redis::{PrivateRedis, PrivateRedisOptions, Syncs};
use onejob::store::{Store, StoreOptions};

type Error = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let private = match std::env::args().nth(1) {
        Some(_) => None,
        None => {
            let syncs = Syncs::EverySecond;
            Some(PrivateRedis::start(PrivateRedisOptions { data_dir: "onejob-data".into(), server: None, syncs }).await?)
        }
    };
    let url = private.as_ref().map_or_else(|| std::env::args().nth(1).unwrap_or_default(), |private| private.url().to_owned());
    let printer = Simulated::start(SimulatedOptions { name: "laser".to_owned(), ..SimulatedOptions::default() }).await?;

    let (store, checked) = Store::connect(StoreOptions::new(&url)).await?;
    checked.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    let timeouts = Timeouts::default();
    let provider = HttpProvider::new(
        "laser",
        HttpOptions {
            base_url: printer.base_url(),
            path: "/prints".to_owned(),
            method: "POST".to_owned(),
            bearer: None,
            headers: BTreeMap::new(),
            timeouts,
            idempotency_header: Some("Idempotency-Key".to_owned()),
            not_executed: vec![429],
            stream: onejob::config::Stream::default(),
            cost: None,
            result_bytes_max: 16 << 20,
            ca_file: None,
            ..HttpOptions::new(&printer.base_url())
        },
    )?;
    let slot = ProviderSlot { name: "laser".to_owned(), provider: Arc::new(provider), total: timeouts.total, in_flight_max: 64 };
    let runtime = Runtime::start(store, RuntimeOptions::default(), vec![slot], vec![route(timeouts.total)])?;

    let order = Submission {
        owner: Owner::new("shop")?,
        key: Key::new(&format!("order-{}", uuid::Uuid::new_v4()))?,
        route: "print".to_owned(),
        request: Request {
            method: String::new(),
            target: String::new(),
            content_type: "application/json".to_owned(),
            headers: Vec::new(),
            body: Arc::from(&br#"{"file": "invoice.pdf", "simulate": "delay=100ms"}"#[..]),
        },
        traceparent: None,
    };
    let receipt = runtime.submit(order.clone()).await?;
    println!("submitted: job {} is {}", receipt.job.id, receipt.job.state);

    let job = runtime.wait(receipt.job.id, WaitFor::Settled, Duration::from_secs(10)).await?;
    let result = runtime.result(&job).await?.ok_or("a job that succeeded has a result")?;
    println!("{} by attempt {}: {}", job.state, job.completed_by, String::from_utf8_lossy(&result.body));

    let again = runtime.submit(order).await?;
    println!("submitted again: job {} is {}, replayed: {:?}", again.job.id, again.job.state, again.replayed);
    println!("the printer printed {} time(s)", printer.ledger().executed);

    runtime.shutdown(Duration::from_secs(5)).await;
    runtime.store().close().await;
    printer.shutdown().await;
    if let Some(private) = private {
        private.stop().await;
    }
    Ok(())
}

fn route(provider_total: Duration) -> Route {
    // How long a paused process, the kernel and the provider may take to make "it never happened" untrue, and a step of a clock.
    let quarantine = Duration::from_secs(30 + 20 + 1) + provider_total;
    Route {
        name: "print".to_owned(),
        class: Class::Exclusive,
        effects: Effects::External,
        providers: vec!["laser".to_owned()],
        deadline: Some(Duration::from_secs(300)),
        rules: Rules {
            attempts_max: 3,
            race_max: 1,
            race_after_ms: 0,
            key_life_ms: 86_400_000,
            retention_ms: 86_400_000,
            releases_on_failure: false,
            quarantine_ms: u64::try_from(quarantine.as_millis()).unwrap_or(u64::MAX),
        },
        plan: Plan {
            providers: 1,
            attempts_max: 3,
            failover_on: vec![FailoverOn::NotSent, FailoverOn::Rejected { status: 429 }],
            gate: Gate::Enforce,
            backoff: Duration::from_millis(200),
        },
        fingerprint_ignore: Vec::new(),
        proof: onejob::runtime::Proof::default(),
        validator: None,
        reconcile: Reconcile::default(),
        tracked: None,
    }
}
