//! `onejob bench`: what claims, duplicates and whole jobs cost on this machine and this Redis.
//!
//! It works under a prefix of its own and takes away every key that it made, by name; keys of others are neither read nor searched
//! for. Whoever kills it at once leaves keys that begin with [`BENCH_PREFIX`].
//!
//! Deliberately not here: other people's programs. How onejob compares with them is `make bench`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use onejob::attempt::AttemptToken;
use onejob::config::Config;
use onejob::error::StoreError;
use onejob::fingerprint::{digest, second_half, sha256};
use onejob::job::{Body, Class, Identity, JobId, JobState, Key, Owner, Payload, Rules};
use onejob::policy::{Effects, Gate, Plan, Reconcile};
use onejob::provider::{Call, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request, Response};
use onejob::runtime::{ProviderSlot, Route, Runtime, RuntimeOptions, Submission, WaitFor};
use onejob::store::private_redis::{PrivateRedis, PrivateRedisOptions};
use onejob::store::{BENCH_PREFIX, Begin, Store, StoreOptions, SubmitJob, Submitted, WriteAhead};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::demo::Home;
use super::show::{self, Spinner};
use super::signals::Signals;
use super::{Context, Exit, Failure, OrExit as _, assemble, say};

/// Most operations of one measurement: some hundred MiB in Redis.
const OPS_MAX: u64 = 1_000_000;
/// Most tasks at once: the gateway's own limit of jobs.
const TASKS_MAX: u64 = 10_000;
/// Longest time of one measurement.
const SECONDS_MAX: u64 = 600;
/// How long keys are tried to be taken away, where Redis does not do it at once.
const FORGET_PATIENCE: Duration = Duration::from_secs(10);
const FORGET_PAUSE: Duration = Duration::from_millis(200);
/// How long a whole job may take.
const JOB_DEADLINE: Duration = Duration::from_secs(30);
const OWNER: &str = "bench";
const ROUTE: &str = "bench";
const PROVIDER: &str = "in-process";
const INPUT: &[u8] = br#"{"file":"invoice-000001.pdf","copies":1}"#;
const RESULT_BYTES: usize = 280;

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Each measurement ends after so many operations …
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..=OPS_MAX))]
    ops: u64,
    /// … or after so many seconds, whichever comes first.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    seconds: u64,
    /// How many tasks work at once, where it is more than one.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=TASKS_MAX))]
    tasks: u64,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let settings = context.load()?;
    if cfg!(debug_assertions) {
        say("warning: this is a debug build; what it measures is several times slower than a release build");
    }
    let mut signals = Signals::listen()?;
    let Some(url) = settings.redis.url.as_ref().map(|url| url.reveal().to_owned()) else {
        let home = Home::make(None)?;
        let options = PrivateRedisOptions {
            data_dir: home.path().to_owned(),
            server: settings.redis.server.clone(),
            syncs: assemble::syncs(&settings),
        };
        let redis = PrivateRedis::start(options).await.or_exit(Exit::Unavailable)?;
        let exit = on(redis.url(), &settings, &arguments, &mut signals, context).await;
        redis.stop().await;
        return exit;
    };
    on(&url, &settings, &arguments, &mut signals, context).await
}

async fn on(
    url: &str,
    settings: &Config,
    arguments: &Arguments,
    signals: &mut Signals,
    context: &Context,
) -> Result<Exit, Failure> {
    let nonce = uuid::Uuid::new_v4().simple().to_string();
    let prefix = format!("{BENCH_PREFIX}{}", &nonce[..12]);
    let options = StoreOptions { prefix: prefix.clone(), ..assemble::store_options(settings, url) };
    let (store, _) = Store::connect(options).await.or_exit(Exit::Unavailable)?;
    // From here on there is a key: that of the prefix itself.
    let open = match store.open_hints().await {
        Ok(open) => open,
        Err(error) => return Err(Failure::new(Exit::Unavailable, format!("{error}; {}", left(&prefix)))),
    };
    if open > 0 {
        let message = format!("there are {open} hints of open jobs under {prefix:?}, which must be new");
        return Err(Failure::new(Exit::Usage, message));
    }
    let stop = CancellationToken::new();
    let bench = Bench {
        store,
        prefix: prefix.clone(),
        owner: Owner::new(OWNER).expect("the name is visible ASCII"),
        ops: arguments.ops,
        time: Duration::from_secs(arguments.seconds),
        issued: AtomicU64::new(0),
        stop: stop.clone(),
    };
    let bench = Arc::new(bench);
    let spinner = Spinner::start(context.format, "measuring");
    let mut measuring = std::pin::pin!(measure(&bench, usize::try_from(arguments.tasks).unwrap_or(usize::MAX)));
    let (rows, signal) = tokio::select! {
        rows = measuring.as_mut() => (rows, None),
        signal = signals.next() => {
            // What is under way ends first, so that nothing is made after it was taken away.
            stop.cancel();
            (measuring.await, Some(signal))
        }
    };
    drop(spinner);
    bench.store.close().await;
    if let Some(signal) = signal {
        return Err(Failure::new(Exit::Interrupted, signal));
    }
    let rows = rows?;
    let place = if settings.redis.url.is_some() { "the configured redis" } else { "a private redis" };
    let measured: Vec<Value> = rows.iter().map(Row::to_json).collect();
    context.print(&json!({ "redis": place, "prefix": prefix, "measurements": measured }), || table(&rows));
    say(format_args!("on {place}; every key of this run is deleted"));
    if settings.redis.url.is_some() {
        say("what redis spent counts whoever it worked for meanwhile");
    }
    Ok(Exit::Done)
}

/// All measurements in order; each takes away what it made, also after an error.
async fn measure(bench: &Arc<Bench>, tasks: usize) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for (name, kind, tasks) in [
        ("submit, new keys", Kind::NewKeys, tasks),
        ("submit, new keys", Kind::NewKeys, 1),
        ("submit, one key", Kind::OneKey, tasks),
        ("whole job", Kind::WholeJob, tasks),
        ("whole job", Kind::WholeJob, 1),
    ] {
        let row = bench.run(name, kind, tasks).await;
        let forgotten = bench.forget().await;
        match (row, forgotten) {
            (Ok(row), Ok(())) => rows.push(row),
            (Err(failure), Ok(())) => return Err(failure),
            (Ok(_), Err(error)) => return Err(Failure::new(Exit::Unavailable, format!("{error}; {}", left(&bench.prefix)))),
            (Err(failure), Err(_)) => {
                let message = format!("{}; {}", failure.error, left(&bench.prefix));
                return Err(Failure::new(failure.exit, message));
            }
        }
        if bench.stop.is_cancelled() {
            break;
        }
    }
    Ok(rows)
}

/// What whoever reads it has to take away.
fn left(prefix: &str) -> String {
    format!("keys that begin with {prefix:?} may be left in redis: delete them")
}

/// What one operation is.
#[derive(Clone, Copy)]
enum Kind {
    /// A claim of a key that nobody has, its first attempt's write-ahead included.
    NewKeys,
    /// A claim of a key that somebody has: its job comes back.
    OneKey,
    /// Submit, provider, finish, answer. The provider is in this process and has its answer ready.
    WholeJob,
}

struct Bench {
    store: Store,
    prefix: String,
    owner: Owner,
    ops: u64,
    time: Duration,
    /// Keys that were given out, from 0.
    issued: AtomicU64,
    stop: CancellationToken,
}

impl Bench {
    async fn run(self: &Arc<Self>, name: &'static str, kind: Kind, tasks: usize) -> Result<Row, Failure> {
        let runtime = match kind {
            Kind::NewKeys => None,
            Kind::OneKey => {
                self.claim(&self.key(self.issued.fetch_add(1, Ordering::Relaxed))).await?;
                None
            }
            Kind::WholeJob => Some(runtime(self.store.clone(), tasks)?),
        };
        let (own_before, redis_before) = (own_cpu(), self.store.cpu_spent().await.or_exit(Exit::Unavailable)?);
        let (began, begun) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let mut working = Vec::with_capacity(tasks);
        for _ in 0..tasks {
            working.push(tokio::spawn(work(Arc::clone(self), kind, runtime.clone(), began, Arc::clone(&begun))));
        }
        let mut latencies = Vec::new();
        let mut failure = None;
        for task in working {
            match task.await.or_exit(Exit::Internal)? {
                Ok(some) => latencies.extend(some),
                Err(error) => {
                    // The others would only meet the same.
                    failure = failure.or(Some(error));
                    begun.store(self.ops, Ordering::Relaxed);
                }
            }
        }
        let took = began.elapsed();
        let own = own_cpu().saturating_sub(own_before);
        if let Some(runtime) = runtime {
            runtime.shutdown(JOB_DEADLINE).await;
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let redis = redis_before.zip(self.store.cpu_spent().await.or_exit(Exit::Unavailable)?);
        latencies.sort_unstable();
        Ok(Row { name, tasks, took, latencies, own, redis: redis.map(|(before, after)| after.saturating_sub(before)) })
    }

    /// Takes away every key of the measurement that has just been made, again and again for [`FORGET_PATIENCE`].
    async fn forget(&self) -> Result<(), StoreError> {
        let issued = self.issued.load(Ordering::Relaxed);
        let began = Instant::now();
        loop {
            let identities = (0..issued).map(|number| self.identity(number));
            match self.store.forget_benchmark(identities).await {
                Ok(()) => {
                    self.issued.store(0, Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) if error.is_retryable() && began.elapsed() < FORGET_PATIENCE => {
                    tokio::time::sleep(FORGET_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn key(&self, number: u64) -> Key {
        Key::new(&number.to_string()).expect("digits are visible ASCII")
    }

    fn identity(&self, number: u64) -> Identity {
        Identity::of(&digest(self.owner.as_str(), self.key(number).as_str()))
    }

    async fn claim(&self, key: &Key) -> Result<Submitted, Failure> {
        const LEASE_MS: u64 = 15_000;
        let digest = digest(self.owner.as_str(), key.as_str());
        let now_ms = self.store.now_ms();
        let input = Payload { head: " \ncontent-type: application/json".to_owned(), body: Body::Inline(Arc::from(INPUT)) };
        let sent = WriteAhead { url: "http://provider.example/v1/prints", request_hash: &digest, certificate: "" };
        let submit = SubmitJob {
            id: JobId::new(now_ms, Identity::of(&digest)),
            digest: second_half(&digest),
            fingerprint: second_half(&sha256(INPUT)),
            owner: &self.owner,
            route: ROUTE,
            class: Class::Exclusive,
            deadline_ms: 0,
            rules: rules(),
            input: &input,
            token: AttemptToken::random(),
            lease_ms: LEASE_MS,
            hint_ms: now_ms + LEASE_MS,
            gateway: "bench",
            begin: Begin::Running { provider: PROVIDER, sent },
        };
        self.store.submit_job(&submit).await.or_exit(Exit::Unavailable)
    }
}

/// One task of a measurement: one operation after another until there are enough, or the time is over.
async fn work(
    bench: Arc<Bench>,
    kind: Kind,
    runtime: Option<Runtime>,
    began: Instant,
    begun: Arc<AtomicU64>,
) -> Result<Vec<Duration>, Failure> {
    let mut latencies = Vec::new();
    let unexpected = |what: &dyn std::fmt::Debug| Failure::new(Exit::Internal, format!("not what this call leads to: {what:?}"));
    while began.elapsed() < bench.time && !bench.stop.is_cancelled() && begun.fetch_add(1, Ordering::Relaxed) < bench.ops {
        let number = match kind {
            Kind::NewKeys | Kind::WholeJob => bench.issued.fetch_add(1, Ordering::Relaxed),
            Kind::OneKey => 0,
        };
        let (key, called) = (bench.key(number), Instant::now());
        match (kind, &runtime) {
            (Kind::NewKeys, _) => match bench.claim(&key).await? {
                Submitted::Created { .. } => {}
                other => return Err(unexpected(&other)),
            },
            (Kind::OneKey, _) => match bench.claim(&key).await? {
                Submitted::Existing(_) => {}
                other => return Err(unexpected(&other)),
            },
            (Kind::WholeJob, Some(runtime)) => {
                let job = runtime.submit(submission(&bench.owner, key)).await.or_exit(Exit::Unavailable)?.job;
                let job = runtime.wait(job.id, WaitFor::Ended, JOB_DEADLINE).await.or_exit(Exit::Unavailable)?;
                if job.state != JobState::Succeeded {
                    return Err(unexpected(&job.state));
                }
            }
            (Kind::WholeJob, None) => return Err(unexpected(&"a whole job without a runtime")),
        }
        latencies.push(called.elapsed());
    }
    Ok(latencies)
}

fn submission(owner: &Owner, key: Key) -> Submission {
    let request = Request {
        method: String::new(),
        target: String::new(),
        content_type: "application/json".to_owned(),
        headers: Vec::new(),
        body: Arc::from(INPUT),
    };
    Submission { owner: owner.clone(), key, route: ROUTE.to_owned(), request, traceparent: None }
}

fn rules() -> Rules {
    const HOUR_MS: u64 = 3_600_000;
    Rules {
        attempts_max: 3,
        race_max: 1,
        race_after_ms: 0,
        key_life_ms: HOUR_MS,
        retention_ms: HOUR_MS,
        releases_on_failure: false,
        quarantine_ms: 0,
    }
}

fn runtime(store: Store, tasks: usize) -> Result<Runtime, Failure> {
    let headers = vec![("content-type".to_owned(), "text/plain".to_owned())];
    let response = Response { status: 200, headers, body: Arc::from(vec![b'x'; RESULT_BYTES]) };
    let slot = ProviderSlot {
        name: PROVIDER.to_owned(),
        provider: Arc::new(AtOnce { response }),
        total: JOB_DEADLINE,
        in_flight_max: tasks,
    };
    let route = Route {
        name: ROUTE.to_owned(),
        class: Class::Exclusive,
        effects: Effects::External,
        providers: vec![PROVIDER.to_owned()],
        deadline: None,
        rules: rules(),
        plan: Plan { providers: 1, attempts_max: 3, failover_on: Vec::new(), gate: Gate::default(), backoff: Duration::ZERO },
        fingerprint_ignore: Vec::new(),
        proof: onejob::runtime::Proof::default(),
        validator: None,
        reconcile: Reconcile::default(),
        tracked: None,
    };
    Runtime::start(store, RuntimeOptions::default(), vec![slot], vec![route]).or_exit(Exit::Internal)
}

/// A provider that has its answer ready.
struct AtOnce {
    response: Response,
}

impl Provider for AtOnce {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        let headers = vec![("content-type".to_owned(), request.content_type.clone())];
        let url = "http://provider.example/v1/prints".to_owned();
        Ok(Rendered { method: "POST".to_owned(), url, headers, body: Arc::clone(&request.body) })
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async move {
            match call.fence.check() {
                Ok(()) => Outcome::Succeeded { response: self.response.clone(), remote_id: None, model: None },
                Err(fenced) => Outcome::NotSent { reason: fenced.to_string() },
            }
        })
    }
}

/// Processor time of this process, user and system, in all threads.
fn own_cpu() -> Duration {
    Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime)).unwrap_or_default()
}

/// What one measurement told.
struct Row {
    name: &'static str,
    tasks: usize,
    took: Duration,
    /// Of every operation, sorted.
    latencies: Vec<Duration>,
    own: Duration,
    redis: Option<Duration>,
}

impl Row {
    fn a_second(&self) -> f64 {
        self.latencies.len() as f64 / self.took.as_secs_f64()
    }

    /// The latency in ms that so many of a hundred operations did not exceed.
    fn percentile_ms(&self, percent: usize) -> f64 {
        let place = (self.latencies.len() * percent / 100).min(self.latencies.len().saturating_sub(1));
        self.latencies.get(place).map_or(f64::NAN, |latency| latency.as_secs_f64() * 1e3)
    }

    fn per_op_us(&self, spent: Duration) -> f64 {
        spent.as_secs_f64() * 1e6 / self.latencies.len() as f64
    }

    fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "tasks": self.tasks,
            "operations": self.latencies.len(),
            "seconds": self.took.as_secs_f64(),
            "operations_a_second": self.a_second(),
            "p50_ms": self.percentile_ms(50),
            "p99_ms": self.percentile_ms(99),
            "own_cpu_us": self.per_op_us(self.own),
            "redis_cpu_us": self.redis.map(|spent| self.per_op_us(spent)),
        })
    }
}

fn table(rows: &[Row]) -> String {
    let mut table = show::table(&["what", "tasks", "operations", "a second", "p50 ms", "p99 ms", "own cpu us", "redis cpu us"]);
    for row in rows {
        table.add_row([
            row.name.to_owned(),
            row.tasks.to_string(),
            row.latencies.len().to_string(),
            format!("{:.0}", row.a_second()),
            format!("{:.2}", row.percentile_ms(50)),
            format!("{:.2}", row.percentile_ms(99)),
            format!("{:.1}", row.per_op_us(row.own)),
            row.redis.map_or_else(|| "–".to_owned(), |spent| format!("{:.1}", row.per_op_us(spent))),
        ]);
    }
    show::lines(&table)
}
