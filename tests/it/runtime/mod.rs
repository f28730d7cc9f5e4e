//! The runtime over a real Redis and real providers: what happens to an intent from its submission to its one result.

use std::sync::Arc;
use std::time::Duration;

use onejob::attempt::AttemptState;
use onejob::job::{Class, Job, JobId, Key, Owner, Rules};
use onejob::policy::{Effects, FailoverOn, Gate, Plan, Reconcile};
use onejob::provider::http::{HttpOptions, HttpProvider};
use onejob::provider::simulated::{Simulated, SimulatedOptions};
use onejob::provider::{Provider, Request};
use onejob::runtime::{ProviderSlot, Route, Runtime, RuntimeOptions, Submission, WaitFor};
use onejob::store::{Store, StoreOptions};

use crate::support::{Redis, SOON, until};

mod attempts;
mod certificates;
mod claims;
mod courier;
mod faults;
mod gateways;
mod grid;
mod protection;
mod races;
mod reconcile;
mod revokes;
mod spool;
mod stops;
mod validation;

/// A Redis, and a print shop with two printers.
struct Shop {
    redis: Redis,
    inkjet: Arc<Simulated>,
    laser: Arc<Simulated>,
}

/// What a test changes before its gateway starts.
struct Setup {
    options: RuntimeOptions,
    route: Route,
    total: Duration,
    in_flight_max: usize,
    /// Instead of the print shop's own two.
    providers: Option<Vec<ProviderSlot>>,
    store: StoreOptions,
}

impl Shop {
    async fn open() -> Self {
        let printer = |name: &str| SimulatedOptions { name: name.to_owned(), ..SimulatedOptions::default() };
        Shop {
            redis: Redis::start().await,
            inkjet: Arc::new(Simulated::start(printer("inkjet")).await.unwrap()),
            laser: Arc::new(Simulated::start(printer("laser")).await.unwrap()),
        }
    }

    async fn gateway(&self) -> Runtime {
        self.gateway_with(|_| {}).await
    }

    async fn gateway_with(&self, change: impl FnOnce(&mut Setup)) -> Runtime {
        let plan = Plan {
            providers: 1,
            attempts_max: 3,
            failover_on: vec![FailoverOn::NotSent, FailoverOn::Rejected { status: 429 }],
            gate: Gate::Enforce,
            backoff: Duration::from_millis(20),
        };
        let mut setup = Setup {
            options: RuntimeOptions { sweep: Duration::from_millis(100), ..RuntimeOptions::default() },
            route: Route {
                name: "print".to_owned(),
                class: Class::Exclusive,
                effects: Effects::External,
                providers: vec!["inkjet".to_owned()],
                deadline: Some(Duration::from_secs(60)),
                rules: rules(),
                plan,
                fingerprint_ignore: Vec::new(),
                proof: onejob::runtime::Proof::default(),
                validator: None,
                reconcile: Reconcile::default(),
                tracked: None,
            },
            total: Duration::from_secs(30),
            in_flight_max: 100,
            providers: None,
            store: self.redis.options(),
        };
        change(&mut setup);
        setup.route.plan.providers = setup.route.providers.len();
        setup.route.plan.attempts_max = setup.route.rules.attempts_max;
        let providers = setup.providers.unwrap_or_else(|| {
            let slot = |name: &str, printer: &Simulated| ProviderSlot {
                name: name.to_owned(),
                provider: Arc::new(http(name, printer, setup.total)),
                total: setup.total,
                in_flight_max: setup.in_flight_max,
            };
            vec![slot("inkjet", &self.inkjet), slot("laser", &self.laser)]
        });
        let (store, _) = Store::connect(setup.store).await.unwrap();
        Runtime::start(store, setup.options, providers, vec![setup.route]).unwrap()
    }

    fn executions(&self, id: JobId) -> u64 {
        self.inkjet.ledger_of(&id.to_string()).executed + self.laser.ledger_of(&id.to_string()).executed
    }
}

fn http(name: &str, printer: &Simulated, total: Duration) -> HttpProvider {
    let mut options = HttpOptions::new(&printer.base_url());
    options.timeouts.first_byte = total;
    options.timeouts.total = total;
    HttpProvider::new(name, options).unwrap()
}

fn slot(name: &str, provider: impl Provider) -> ProviderSlot {
    ProviderSlot { name: name.to_owned(), provider: Arc::new(provider), total: Duration::from_secs(30), in_flight_max: 100 }
}

/// The rules of the print shop.
fn rules() -> Rules {
    Rules {
        attempts_max: 3,
        race_max: 1,
        race_after_ms: 0,
        key_life_ms: 3_600_000,
        retention_ms: 3_600_000,
        releases_on_failure: false,
        quarantine_ms: 100_000,
    }
}

fn race(setup: &mut Setup, after: Duration) {
    setup.route.class = Class::Race;
    setup.route.rules.race_max = 2;
    setup.route.rules.race_after_ms = u64::try_from(after.as_millis()).unwrap();
    ungated(setup);
}

fn both(setup: &mut Setup) {
    setup.route.providers = vec!["inkjet".to_owned(), "laser".to_owned()];
}

/// Both printers, and none needs a certificate to follow the other.
fn ungated(setup: &mut Setup) {
    both(setup);
    setup.route.plan.gate = Gate::Off;
}

fn submission(key: &str, body: &str) -> Submission {
    Submission {
        owner: Owner::new("shop").unwrap(),
        key: Key::new(key).unwrap(),
        route: "print".to_owned(),
        request: Request {
            method: String::new(),
            target: String::new(),
            content_type: "application/json".to_owned(),
            headers: Vec::new(),
            body: Arc::from(body.as_bytes()),
        },
        traceparent: None,
    }
}

async fn settled(runtime: &Runtime, id: JobId) -> Arc<Job> {
    let job = runtime.wait(id, WaitFor::Settled, SOON).await.unwrap();
    assert!(job.is_ended() || job.state == onejob::job::JobState::Unknown, "not settled in time: {job:?}");
    job
}

async fn ended(runtime: &Runtime, id: JobId) -> Arc<Job> {
    let job = runtime.wait(id, WaitFor::Ended, SOON).await.unwrap();
    assert!(job.is_ended(), "not ended in time: {job:?}");
    job
}

fn states(job: &Job) -> Vec<AttemptState> {
    job.attempts.iter().map(|attempt| attempt.state).collect()
}
