//! The library's side: claims by `Store::submit_job`, duplicates, and whole jobs through a runtime with a provider in this process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use onejob::job::{Class, JobState, Key};
use onejob::policy::{Effects, Gate, Plan, Reconcile};
use onejob::provider::{Call, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request, Response};
use onejob::runtime::{ProviderSlot, Route, Runtime, RuntimeOptions, Submission, WaitFor};
use onejob::store::{Store, Submitted};

use crate::claims::{JobShape, Keys, PATIENCE, RESULT_BYTES, claim, rules, store};
use crate::private::Redis;
use crate::redis_side::{self, MANY, ONE};
use crate::report::{Aim, Report, Side};
use crate::{Bounds, constant, process};

/// Tasks that submit at once.
pub(crate) const TASKS: usize = 256;
/// Calls that warm up connections and caches before anything is measured.
const WARM_UP: Duration = Duration::from_millis(200);

/// Runs something in so many tasks, again and again until the window is over; tells rate, latencies and what each process spent.
pub(crate) async fn load<F, W>(tasks: usize, window: Duration, servers: &[(&str, u32)], work: W) -> Result<Side>
where
    F: Future<Output = Result<()>> + Send + 'static,
    W: Fn() -> F + Clone + Send + 'static,
{
    let own_before = process::own_cpu();
    let before = servers.iter().map(|(_, pid)| process::cpu(*pid)).collect::<Result<Vec<_>>>()?;
    let began = Instant::now();
    let mut running = Vec::with_capacity(tasks);
    for _ in 0..tasks {
        let work = work.clone();
        running.push(tokio::spawn(async move {
            let mut latencies = Vec::new();
            while began.elapsed() < window {
                let called = Instant::now();
                work().await?;
                latencies.push(called.elapsed());
            }
            anyhow::Ok(latencies)
        }));
    }
    let mut latencies = Vec::new();
    for task in running {
        latencies.extend(task.await??);
    }
    let took = began.elapsed();
    let per_call = |spent: Duration| spent.as_secs_f64() * 1e6 / latencies.len() as f64;
    let mut cpu_us = BTreeMap::from([("library".to_owned(), per_call(process::own_cpu() - own_before))]);
    for ((name, pid), before) in servers.iter().zip(before) {
        cpu_us.insert((*name).to_owned(), per_call(process::cpu(*pid)? - before));
    }
    latencies.sort_unstable();
    let at = |part: f64| latencies.get((latencies.len() as f64 * part) as usize).map_or(0.0, |wait| wait.as_secs_f64() * 1e6);
    Ok(Side { ops_a_second: latencies.len() as f64 / took.as_secs_f64(), p50_us: at(0.5), p99_us: at(0.99), cpu_us })
}

async fn submits(store: &Store, keys: &Keys, tasks: usize, window: Duration, redis: &Redis) -> Result<Side> {
    let (store, keys, shape) = (store.clone(), keys.clone(), Arc::new(JobShape::default()));
    load(tasks, window, &[("redis", redis.part.pid)], move || {
        let (store, key, shape) = (store.clone(), keys.next(), Arc::clone(&shape));
        async move {
            match claim(&store, &shape, &key).await?.submitted {
                Submitted::Created { .. } => Ok(()),
                other => bail!("a new key was answered {other:?}"),
            }
        }
    })
    .await
}

/// `Store::submit_job` with its hint, against `redis-benchmark` that calls the same script and sends no hint.
pub(crate) async fn against_redis_benchmark(bounds: Bounds, report: &mut Report) -> Result<()> {
    let redis = Redis::start().await?;
    redis_side::redis_scripts(&redis)?;
    let (store, keys, command) = (store(&redis.url()).await?, Keys::new(), redis_side::submit_job());
    submits(&store, &keys, TASKS, WARM_UP, &redis).await?;
    same_records(&redis, &store, &keys, &command).await?;
    for (name, tasks, clients) in [("library, 256 tasks", TASKS, MANY), ("library, 1 task", 1, ONE)] {
        let calls = redis.calls_in(bounds.window, clients, &command).await?;
        let mut rounds = Vec::new();
        for _ in 0..bounds.rounds {
            redis.flush()?;
            let ours = submits(&store, &keys, tasks, bounds.window, &redis).await?;
            redis.flush()?;
            let theirs = redis.benchmark(calls, clients, &command).await?;
            let created: u64 = redis.ask(&["DBSIZE"])?;
            // Keys are drawn at random: a few meet a key that is there.
            if created < calls * 99 / 100 {
                bail!("redis-benchmark made {calls} calls and {created} keys: it does not measure claims");
            }
            rounds.push((ours, theirs));
        }
        let pipeline = if tasks == 1 { "-c 1 -P 1" } else { "-c 50 -P 16" };
        report.comparison(name, &format!("redis-benchmark {pipeline} EVALSHA submit_job"), Aim::AtLeast(0.8), rounds);
    }
    store.close().await;
    Ok(())
}

/// Both sides must leave records of one size, or they do not do the same.
async fn same_records(redis: &Redis, store: &Store, keys: &Keys, command: &[String]) -> Result<()> {
    const CALLS: u64 = 100;
    let size = || -> Result<u64> {
        let keys: Vec<String> = redis.ask(&["KEYS", "oj:{*"])?;
        let key = keys.first().context("a claim leaves a record")?;
        redis.ask(&["STRLEN", key])
    };
    redis.flush()?;
    claim(store, &JobShape::default(), &keys.next()).await?;
    let ours = size()?;
    redis.flush()?;
    redis.benchmark(CALLS, ONE, command).await?;
    let theirs = size()?;
    if ours.abs_diff(theirs) > 4 {
        bail!("the library's record has {ours} bytes, redis-benchmark's {theirs}: they do not make the same claim");
    }
    redis.flush()
}

/// The same key and request again and again, from 256 tasks: a finished job with its result comes back.
pub(crate) async fn duplicates(bounds: Bounds, report: &mut Report) -> Result<()> {
    let redis = Redis::start().await?;
    let runtime = runtime(&redis).await?;
    let key = Keys::new().next();
    let job = runtime.submit(submission(key.clone())).await?.job;
    runtime.wait(job.id, WaitFor::Ended, PATIENCE).await?;
    let mut sides = Vec::new();
    for _ in 0..bounds.rounds {
        let (runtime, key) = (runtime.clone(), key.clone());
        let servers = [("redis", redis.part.pid)];
        let side = load(TASKS, bounds.window, &servers, move || {
            let (runtime, key) = (runtime.clone(), key.clone());
            async move {
                let receipt = runtime.submit(submission(key)).await?;
                if receipt.job.state != JobState::Succeeded {
                    bail!("a duplicate was told {}", receipt.job.state);
                }
                Ok(())
            }
        });
        sides.push(side.await?);
    }
    report.alone("duplicate of a finished job, library, 256 tasks", sides);
    runtime.shutdown(PATIENCE).await;
    Ok(())
}

/// Submit, provider, finish, answer: by 256 tasks.
pub(crate) async fn whole_jobs(bounds: Bounds, report: &mut Report) -> Result<()> {
    let redis = Redis::start().await?;
    let (runtime, keys) = (runtime(&redis).await?, Keys::new());
    let mut sides = Vec::new();
    for round in 0..=bounds.rounds {
        let (runtime, keys) = (runtime.clone(), keys.clone());
        let window = if round == 0 { WARM_UP } else { bounds.window };
        let servers = [("redis", redis.part.pid)];
        let side = load(TASKS, window, &servers, move || {
            let (runtime, key) = (runtime.clone(), keys.next());
            async move {
                let job = runtime.submit(submission(key)).await?.job;
                let job = runtime.wait(job.id, WaitFor::Ended, PATIENCE).await?;
                if job.state != JobState::Succeeded {
                    bail!("job {} is {}", job.id, job.state);
                }
                Ok(())
            }
        });
        let side = side.await?;
        if round > 0 {
            sides.push(side);
        }
    }
    report.alone("whole job, library, provider in the process, 256 tasks", sides);
    runtime.shutdown(PATIENCE).await;
    Ok(())
}

async fn runtime(redis: &Redis) -> Result<Runtime> {
    let provider = ProviderSlot {
        name: "laser".to_owned(),
        provider: Arc::new(AtOnce { response: response(RESULT_BYTES) }),
        total: PATIENCE,
        in_flight_max: 4 * TASKS,
    };
    let route = Route {
        name: "print".to_owned(),
        class: Class::Exclusive,
        effects: Effects::External,
        providers: vec!["laser".to_owned()],
        deadline: Some(Duration::from_secs(300)),
        rules: rules(),
        plan: Plan { providers: 1, attempts_max: 3, failover_on: Vec::new(), gate: Gate::default(), backoff: Duration::ZERO },
        fingerprint_ignore: Vec::new(),
        proof: onejob::runtime::Proof::default(),
        validator: None,
        reconcile: Reconcile::default(),
        tracked: None,
    };
    Ok(Runtime::start(store(&redis.url()).await?, RuntimeOptions::default(), vec![provider], vec![route])?)
}

fn submission(key: Key) -> Submission {
    let shape = JobShape::default();
    let request = Request {
        method: String::new(),
        target: String::new(),
        content_type: "application/json".to_owned(),
        headers: Vec::new(),
        body: shape.input,
    };
    Submission { owner: shape.owner, key, route: shape.route.to_owned(), request, traceparent: None }
}

/// A provider's answer with a body of so many bytes.
pub(crate) fn response(bytes: usize) -> Response {
    let answer = constant::Answer::json(bytes);
    Response { status: answer.status, headers: answer.headers, body: Arc::from(answer.body.into_bytes()) }
}

/// A provider that has its answer ready.
struct AtOnce {
    response: Response,
}

impl Provider for AtOnce {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        let headers = vec![("content-type".to_owned(), request.content_type.clone())];
        let url = JobShape::default().url.to_owned();
        Ok(Rendered { method: "POST".to_owned(), url, headers, body: Arc::clone(&request.body) })
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async move {
            if let Err(fenced) = call.fence.check() {
                return Outcome::NotSent { reason: fenced.to_string() };
            }
            Outcome::Succeeded { response: self.response.clone(), remote_id: None, model: None }
        })
    }
}
