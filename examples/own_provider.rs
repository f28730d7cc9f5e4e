//! A provider written in Rust: one trait, two methods, and the duty to say `unknown` wherever it cannot know.
//!
//! ```sh
//! cargo run --example own_provider                            # starts a private redis-server in ./onejob-data
//! cargo run --example own_provider -- redis://127.0.0.1:6379  # uses yours
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onejob::job::{Class, Key, Owner, Rules};
use onejob::policy::{Effects, FailoverOn, Gate, Plan, Reconcile};
use onejob::provider::{Call, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request, Response};
use onejob::runtime::{ProviderSlot, Route, Runtime, RuntimeOptions, Submission, WaitFor};
use onejob::store::private_redis::{PrivateRedis, PrivateRedisOptions, Syncs};
use onejob::store::{Store, StoreOptions};

type Error = Box<dyn std::error::Error>;

/// Rings a bell. There is no way to take a ring back.
struct Bell {
    rings: AtomicU32,
}

impl Provider for Bell {
    /// The same request gives the same bytes: their hash stands in the record before anything happens.
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        if request.body.is_empty() {
            return Err(RenderError("a bell must be told which one it is".to_owned()));
        }
        let body = Arc::clone(&request.body);
        Ok(Rendered { method: "RING".to_owned(), url: "bell:tower".to_owned(), headers: Vec::new(), body })
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async move {
            // The last moment at which it is known that nothing happened.
            if let Err(fenced) = call.fence.check() {
                return Outcome::NotSent { reason: fenced.to_string() };
            }
            let ring = self.rings.fetch_add(1, Ordering::SeqCst) + 1;
            if Instant::now() >= call.deadline {
                // The rope was pulled; whether anybody heard it in time, nobody knows. Never a failure.
                return Outcome::Unknown { reason: "the deadline passed while it rang".to_owned() };
            }
            let body = format!("ring {ring} for attempt {}", call.attempt);
            let response = Response { status: 200, headers: Vec::new(), body: body.into_bytes().into() };
            Outcome::Succeeded { response, remote_id: Some(ring.to_string()), model: None }
        })
    }
}

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

    let (store, checked) = Store::connect(StoreOptions::new(&url)).await?;
    checked.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    let bell = Arc::new(Bell { rings: AtomicU32::new(0) });
    let slot = ProviderSlot {
        name: "bell".to_owned(),
        provider: Arc::clone(&bell) as Arc<dyn Provider>,
        total: Duration::from_secs(1),
        in_flight_max: 1,
    };
    let runtime = Runtime::start(store, RuntimeOptions::default(), vec![slot], vec![route()])?;

    // A nervous finger: ten submits of one intent, all at once. The bell rings once.
    let key = Key::new(&format!("noon-{}", uuid::Uuid::new_v4()))?;
    let submission = Submission {
        owner: Owner::new("church")?,
        key,
        route: "ring".to_owned(),
        request: Request {
            method: String::new(),
            target: String::new(),
            content_type: "text/plain".to_owned(),
            headers: Vec::new(),
            body: Arc::from(&b"the big one"[..]),
        },
        traceparent: None,
    };
    let submits = (0..10).map(|_| {
        let (runtime, submission) = (runtime.clone(), submission.clone());
        tokio::spawn(async move { runtime.submit(submission).await })
    });
    let mut job = None;
    for submit in submits.collect::<Vec<_>>() {
        let receipt = submit.await??;
        println!("job {} ({:?})", receipt.job.id, receipt.replayed);
        job = Some(receipt.job.id);
    }
    let id = job.ok_or("nothing was submitted")?;
    let job = runtime.wait(id, WaitFor::Settled, Duration::from_secs(5)).await?;
    let result = runtime.result(&job).await?.ok_or("a job that succeeded has a result")?;
    println!("{}: {}", job.state, String::from_utf8_lossy(&result.body));
    println!("the bell rang {} time(s)", bell.rings.load(Ordering::SeqCst));

    runtime.shutdown(Duration::from_secs(5)).await;
    runtime.store().close().await;
    if let Some(private) = private {
        private.stop().await;
    }
    Ok(())
}

fn route() -> Route {
    Route {
        name: "ring".to_owned(),
        class: Class::Exclusive,
        effects: Effects::External,
        providers: vec!["bell".to_owned()],
        deadline: Some(Duration::from_secs(30)),
        rules: Rules {
            attempts_max: 3,
            race_max: 1,
            race_after_ms: 0,
            key_life_ms: 3_600_000,
            retention_ms: 3_600_000,
            releases_on_failure: false,
            quarantine_ms: 60_000,
        },
        plan: Plan {
            providers: 1,
            attempts_max: 3,
            failover_on: vec![FailoverOn::NotSent],
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
