//! What a job costs Redis while ten thousand, a hundred thousand and a million others are kept there and fifty thousand are open;
//! what a sweep costs over them; what they take, and what is left of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use futures_util::stream::{self, TryStreamExt as _};
use onejob::job::{Body, Identity, Payload, Rules, SHARDS};
use onejob::store::{Begin, BeginAttempt, Begun, Extended, Marked, Read, Script, Store, Submitted, Ticked, WriteAhead};

use crate::arithmetic::Costs;
use crate::claims::{self, Claim, JobShape, Keys, RESULT_BYTES};
use crate::part::{self, Gateway};
use crate::private::Redis;
use crate::process;
use crate::stats::{Delta, Stats, Watched};
use crate::tables::{Table, grouped};

/// Tasks that fill.
const TASKS: usize = 256;
/// Calls of one script whose time is taken.
const CALLS: usize = 2_000;
/// Most jobs that are open meanwhile.
const OPEN_MAX: u64 = 50_000;
/// The lease of an open job: longer than the run.
const LEASE_MS: u64 = 3_600_000;
/// How long the jobs live whose expiry is waited for.
const SHORT_LIFE_MS: u64 = 5_000;
/// How long they may take to be gone: Redis looks for them at its leisure.
const EXPIRY_PATIENCE: Duration = Duration::from_secs(60);
/// How many sweeps are watched.
const SWEEPS: u32 = 3;
/// How long one takes to come, jitter included.
const SWEEP: Duration = Duration::from_millis(1_300);

/// Open jobs: all alike, with a lease that outlasts the run.
pub(crate) fn open_shape(lease_ms: u64) -> JobShape {
    JobShape { lease_ms, deadline_ms: 0, ..JobShape::default() }
}

/// Calls something so many times, from many tasks; returns what came of each.
pub(crate) async fn many<T, F>(count: u64, work: impl Fn() -> F + Clone + Send + 'static) -> Result<Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let left = Arc::new(AtomicU64::new(count));
    let tasks = (0..TASKS).map(|_| {
        let (left, work) = (Arc::clone(&left), work.clone());
        tokio::spawn(async move {
            let mut made = Vec::new();
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                made.push(work().await?);
            }
            anyhow::Ok(made)
        })
    });
    let mut all = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        all.extend(task.await??);
    }
    Ok(all)
}

/// Claims so many keys; their attempts run.
pub(crate) async fn open(store: &Store, keys: &Keys, count: u64, lease_ms: u64) -> Result<Vec<Claim>> {
    let (store, keys, shape) = (store.clone(), keys.clone(), Arc::new(open_shape(lease_ms)));
    many(count, move || {
        let (store, key, shape) = (store.clone(), keys.next(), Arc::clone(&shape));
        async move { created(claims::claim(&store, &shape, &key).await?) }
    })
    .await
}

fn created(claim: Claim) -> Result<Claim> {
    match claim.submitted {
        Submitted::Created { .. } => Ok(claim),
        other => bail!("a new key was answered {other:?}"),
    }
}

/// Claims and ends so many jobs, which are kept for `rules.key_life_ms`.
async fn finished(store: &Store, keys: &Keys, count: u64, rules: Rules) -> Result<()> {
    let (store, keys) = (store.clone(), keys.clone());
    let (shape, result) = (Arc::new(JobShape { rules, ..JobShape::default() }), Arc::new(result()));
    many(count, move || {
        let (store, key, shape, result) = (store.clone(), keys.next(), Arc::clone(&shape), Arc::clone(&result));
        async move {
            let claim = created(claims::claim(&store, &shape, &key).await?)?;
            claims::finish(&store, &claim, Some(claim.hint_ms), &result).await
        }
    })
    .await
    .map(drop)
}

fn result() -> Payload {
    let frame = r#"{"printed":""}"#.len();
    let body = format!(r#"{{"printed":"{}"}}"#, "x".repeat(RESULT_BYTES - frame));
    Payload { head: "200\ncontent-type: application/json".to_owned(), body: Body::Inline(Arc::from(body.into_bytes())) }
}

/// The key of a shard's due hints.
pub(crate) fn due_key(identity: Identity) -> String {
    format!("oj:due:{{{:02x}}}", identity.shard())
}

/// Makes jobs due at a moment, as whoever wants them looked at does.
pub(crate) async fn make_due(redis: &Redis, jobs: &[Identity], at_ms: u64) -> Result<()> {
    let mut connection = redis::Client::open(redis.url())?.get_multiplexed_async_connection().await?;
    for some in jobs.chunks(1_000) {
        let mut pipeline = redis::pipe();
        for identity in some {
            pipeline.cmd("ZADD").arg(due_key(*identity)).arg("LT").arg(at_ms).arg(identity.to_string()).ignore();
        }
        pipeline.query_async::<()>(&mut connection).await?;
    }
    Ok(())
}

fn hints(redis: &Redis) -> Result<u64> {
    (0..SHARDS).map(|shard| redis.ask::<u64>(&["ZCARD", &format!("oj:due:{{{shard:02x}}}")])).sum()
}

/// How many hints are due.
fn due_now(redis: &Redis, now_ms: u64) -> Result<u64> {
    let now_ms = now_ms.to_string();
    (0..SHARDS).map(|shard| redis.ask::<u64>(&["ZCOUNT", &format!("oj:due:{{{shard:02x}}}"), "0", &now_ms])).sum()
}

/// The tables of this part: scripts, sweeps, memory.
pub(crate) async fn measure(jobs: u64, costs: &mut Costs) -> Result<Vec<Table>> {
    let redis = Redis::start().await?;
    let (store, keys) = (claims::store(&redis.url()).await?, Keys::new());
    let mut scripts = Table::new(
        "scale-scripts",
        &[
            "finished jobs",
            "open",
            "submit",
            "its hint",
            "duplicate",
            "begin",
            "mark",
            "extend",
            "finish",
            "settle hint",
            "read",
            "tick",
        ],
    );
    let mut sweeps = Table::new(
        "scale-sweeps",
        &[
            "finished jobs",
            "open",
            "due",
            "looked at in one sweep",
            "commands in one sweep",
            "longest sweep, ms",
            "redis µs a sweep",
        ],
    );
    let mut memory =
        Table::new("scale-memory", &["jobs", "of which open", "keys", "hints", "used_memory, MB", "bytes a job added"]);
    let (keys_before, used_before) = (redis.ask::<u64>(&["DBSIZE"])?, redis.used_memory()?);
    let open_jobs = OPEN_MAX.min(jobs / 20);
    let opened = open(&store, &keys, open_jobs, LEASE_MS).await?;
    let identities: Vec<Identity> = opened.iter().map(|claim| claim.id.identity()).collect();
    let (mut there, mut used) = (0, redis.used_memory()?);
    let row = |all: u64, added: u64, grown: u64| -> Result<Vec<String>> {
        let keys = redis.ask::<u64>(&["DBSIZE"])? - keys_before;
        let used = redis.used_memory()?;
        let bytes = grown as f64 / added as f64;
        Ok(vec![grouped(all), grouped(open_jobs), grouped(keys), grouped(hints(&redis)?), mb(used), format!("{bytes:.0}")])
    };
    memory.row(row(open_jobs, open_jobs, used - used_before)?);
    costs.open_bytes = (used - used_before) as f64 / open_jobs as f64;
    let began = Instant::now();
    let mut filling = Duration::ZERO;
    for level in [jobs / 100, jobs / 10, jobs] {
        let (added, began) = (level - there, Instant::now());
        finished(&store, &keys, added, claims::rules()).await?;
        filling += began.elapsed();
        there = level;
        let grown = redis.used_memory()?.saturating_sub(used);
        memory.row(row(level + open_jobs, added, grown)?);
        costs.kept_bytes = grown as f64 / added as f64;
        scripts.row([vec![grouped(level), grouped(open_jobs)], time_scripts(&redis, &store, &keys).await?].concat());
        time_sweeps(&redis, &store, &identities, level, &mut sweeps).await?;
        used = redis.used_memory()?;
    }
    let rate = jobs as f64 / filling.as_secs_f64();
    scripts.note(&format!(
        "Median µs of one call in Redis (`INFO latencystats`), of {CALLS} calls of each through the store; {} jobs were filled in at \
         {rate:.0} a second.",
        grouped(jobs)
    ))?;
    sweeps.note(&format!(
        "One gateway that has nothing else to do, watched by `MONITOR`; the sweep that looked at most. Redis' µs: the mean of all \
         sweeps meanwhile. {:.0} s for this part.",
        began.elapsed().as_secs_f64()
    ))?;
    let expired = expire(jobs / 10).await?;
    memory.note(&expired)?;
    store.close().await;
    Ok(vec![scripts, sweeps, memory])
}

fn mb(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e6)
}

/// Does something about each of some things, many at once; µs of the one script that each of them calls.
async fn timed<T>(redis: &Redis, things: &[T], work: impl AsyncFn(&T) -> Result<()>) -> Result<Delta> {
    redis.ask::<String>(&["CONFIG", "RESETSTAT"])?;
    let before = Stats::read(redis)?;
    stream::iter(things.iter().map(anyhow::Ok)).try_for_each_concurrent(TASKS, |thing| work(thing)).await?;
    let spent = before.until_now(redis)?;
    if spent.calls("evalsha") != things.len() as u64 {
        bail!("{} scripts were run where {} are measured", spent.calls("evalsha"), things.len());
    }
    Ok(spent)
}

/// µs of a call of each script, over jobs that are made for it and have no hints any more afterwards.
async fn time_scripts(redis: &Redis, store: &Store, keys: &Keys) -> Result<Vec<String>> {
    let (shape, result) = (open_shape(LEASE_MS), result());
    let expected = |is_so: bool, what: &dyn std::fmt::Debug| if is_so { Ok(()) } else { bail!("a call was answered {what:?}") };
    let named: Vec<_> = (0..CALLS).map(|_| keys.next()).collect();
    let jobs = Mutex::new(Vec::with_capacity(CALLS));
    let submit = timed(redis, &named, async |key| {
        let claim = created(claims::claim(store, &shape, key).await?)?;
        jobs.lock().unwrap_or_else(PoisonError::into_inner).push(claim);
        Ok(())
    });
    let submit = submit.await?;
    let jobs = jobs.into_inner().unwrap_or_else(PoisonError::into_inner);
    let duplicate = timed(redis, &named, async |key| {
        let again = claims::claim(store, &shape, key).await?.submitted;
        expected(matches!(again, Submitted::Existing(_)), &again)
    });
    let duplicate = duplicate.await?;
    let extend = timed(redis, &jobs, async |job| {
        let extended = store.extend_lease(job.id, 1, job.token, 1, LEASE_MS).await?;
        expected(matches!(extended, Extended::Extended { .. }), &extended)
    });
    let extend = extend.await?;
    let tick = timed(redis, &jobs, async |job| {
        let ticked = store.tick_job(job.id.identity()).await?;
        expected(matches!(ticked, Ticked::Job { .. }), &ticked)
    });
    let tick = tick.await?;
    let finish = timed(redis, &jobs, async |job| claims::finish(store, job, None, &result).await).await?;
    let read = timed(redis, &jobs, async |job| {
        let read = store.read_job(job.id.identity()).await?;
        expected(matches!(read, Read::Found(_)), &read)
    });
    let read = read.await?;
    let connection = redis::Client::open(redis.url())?.get_multiplexed_async_connection().await?;
    let settle = timed(redis, &jobs, async |job| {
        let identity = job.id.identity();
        let mut command = redis::cmd("EVALSHA");
        command.arg(Script::SettleHint.sha1()).arg(1).arg(due_key(identity)).arg(identity.to_string()).arg(job.hint_ms).arg(0);
        let settled: Vec<String> = command.query_async(&mut connection.clone()).await?;
        expected(settled[0] == "settled", &settled)
    });
    let settle = settle.await?;
    let (begin, mark) = time_beginnings(redis, store, keys, &shape).await?;
    let scripts = [&duplicate, &begin, &mark, &extend, &finish, &settle, &read, &tick].map(|spent| spent.median_us("evalsha"));
    let cells = [submit.median_us("evalsha"), submit.median_us("zadd")].into_iter().chain(scripts);
    Ok(cells.map(|us| format!("{us:.1}")).collect())
}

/// The two scripts of an attempt that did not begin with the claim.
async fn time_beginnings(redis: &Redis, store: &Store, keys: &Keys, shape: &JobShape) -> Result<(Delta, Delta)> {
    let (keys, store_too) = (keys.clone(), store.clone());
    let pending = many(CALLS as u64, move || {
        let (store, key) = (store_too.clone(), keys.next());
        async move { created(claims::claim_as(&store, &open_shape(LEASE_MS), &key, Begin::Pending).await?) }
    });
    let pending = pending.await?;
    let begin = timed(redis, &pending, async |job| {
        let begin = BeginAttempt {
            job: job.id,
            token: job.token,
            holder: Some(job.token),
            lease_ms: LEASE_MS,
            hint_ms: job.hint_ms,
            gateway: shape.gateway,
            begin: Begin::Starting { provider: shape.provider },
        };
        match store.begin_attempt(&begin).await? {
            Begun::Started { .. } => Ok(()),
            other => bail!("a beginning was answered {other:?}"),
        }
    });
    let begin = begin.await?;
    let mark = timed(redis, &pending, async |job| {
        let sent = WriteAhead { url: shape.url, request_hash: &[7; 32], certificate: "" };
        match store.mark_running(job.id, 1, job.token, sent).await? {
            Marked::Running { .. } => Ok(()),
            other => bail!("a write-ahead was answered {other:?}"),
        }
    });
    let mark = mark.await?;
    let result = result();
    for job in &pending {
        claims::finish(store, job, Some(job.hint_ms), &result).await?;
    }
    Ok((begin, mark))
}

/// Sweeps over all open jobs: with none due, with a hundredth, and with a fifth.
async fn time_sweeps(redis: &Redis, store: &Store, open: &[Identity], level: u64, table: &mut Table) -> Result<()> {
    let gateway = Gateway::start(redis, part::NOBODY).await?;
    for due in [0, open.len() / 100, open.len() / 5] {
        let window = SWEEP * SWEEPS;
        let before = Stats::read(redis)?;
        let watched = Watched::watch(redis, window, async || make_due(redis, &open[..due], store.now_ms()).await).await?;
        let spent = before.until_now(redis)?;
        let sweeps = watched.sweeps();
        let most = sweeps.iter().max_by_key(|sweep| (sweep.looks, sweep.commands));
        let (Some(most), Some(longest)) = (most, sweeps.iter().map(|sweep| sweep.took).max()) else {
            bail!("{} commands in {window:?}, and no sweep among them", watched.commands());
        };
        let us = spent.us_of(&["time", "zrangebyscore", "evalsha", "scan", "pttl", "zrange", "zcard", "zscore"]);
        table.row(vec![
            grouped(level),
            grouped(open.len() as u64),
            grouped(due as u64),
            grouped(most.looks as u64),
            grouped(most.commands as u64),
            format!("{:.1}", longest.as_secs_f64() * 1e3),
            format!("{:.0}", us as f64 / spent.calls("scan") as f64),
        ]);
        process::until("all that was due is looked at", async || due_now(redis, store.now_ms()).is_ok_and(|due| due == 0))
            .await?;
    }
    drop(gateway);
    Ok(())
}

/// Jobs that live a few seconds: what is left of them. On a Redis of their own: beside many keys that live, Redis leaves some of the
/// dead ones for minutes.
async fn expire(jobs: u64) -> Result<String> {
    let redis = Redis::start().await?;
    let store = claims::store(&redis.url()).await?;
    let rules = Rules { key_life_ms: SHORT_LIFE_MS, retention_ms: SHORT_LIFE_MS, ..claims::rules() };
    let (keys_before, used_before) = (redis.ask::<u64>(&["DBSIZE"])?, redis.used_memory()?);
    finished(&store, &Keys::new(), jobs, rules).await?;
    let (used, most, ended) = (redis.used_memory()?, redis.ask::<u64>(&["DBSIZE"])?, Instant::now());
    while redis.ask::<u64>(&["DBSIZE"])? != keys_before {
        if ended.elapsed() > EXPIRY_PATIENCE {
            bail!("{} keys are there, {keys_before} were, {EXPIRY_PATIENCE:?} after their end", redis.ask::<u64>(&["DBSIZE"])?);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let told = format!(
        "On another Redis {} jobs lived {} s each: keys {keys_before} before, {} when the last one ended, {keys_before} again \
         {:.0} s later; hints {}; used memory {}, {} and {} MB.",
        grouped(jobs),
        SHORT_LIFE_MS / 1000,
        grouped(most),
        ended.elapsed().as_secs_f64(),
        hints(&redis)?,
        mb(used_before),
        mb(used),
        mb(redis.used_memory()?),
    );
    store.close().await;
    Ok(told)
}
