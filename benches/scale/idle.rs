//! Gateways that have nothing to do but to sweep: what one, two, four and eight of them ask of Redis over fifty thousand open jobs,
//! and how often a job is looked at when a thousand of them are due at the same moment.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures_util::future::try_join_all;
use onejob::job::{Identity, JobState, SHARDS};
use onejob::store::Read;

use crate::arithmetic::Costs;
use crate::claims::{self, Keys};
use crate::cost;
use crate::part::{self, Gateway};
use crate::private::Redis;
use crate::process;
use crate::stats::{Stats, Watched};
use crate::tables::{Table, grouped};

const GATEWAYS: [usize; 4] = [1, 2, 4, 8];
const OPEN_MAX: u64 = 50_000;
const LEASE_MS: u64 = 3_600_000;
/// Jobs whose leases lapse at the same moment.
const LAPSED: u64 = 1_000;
/// From their claim to that moment: all are claimed by then, and being watched.
const LAPSE_MS: u64 = 2_000;
const WINDOW: Duration = Duration::from_secs(4);
/// What gateways send beyond what idle ones do.
const LOOKING: [&str; 6] = ["evalsha", "zadd", "publish", "set", "unlink", "eval"];
/// Ends of jobs that are told.
const MESSAGES: u64 = 100_000;
/// Lanes of the store here.
const OWN_LANES: usize = 2;

pub(crate) async fn measure(jobs: u64, costs: &mut Costs) -> Result<[Table; 2]> {
    let redis = Redis::start().await?;
    let (store, keys) = (claims::store(&redis.url()).await?, Keys::new());
    let open_jobs = OPEN_MAX.min(jobs / 20);
    cost::open(&store, &keys, open_jobs, LEASE_MS).await?;
    let mut table = Table::new(
        "scale-sweepers",
        &[
            "gateways",
            "idle: commands a second",
            "redis µs a second",
            "a second, each gateway",
            "due at once",
            "looks at each (mean)",
            "most at one",
            "scripts and writes for each due",
        ],
    );
    let mut wakeups = Table::new(
        "scale-wakeups",
        &[
            "gateways",
            "redis CPU µs a message",
            "all gateways' CPU µs a message",
            "bytes out a message",
            "connections of each gateway",
        ],
    );
    let mut told = Vec::new();
    for count in GATEWAYS {
        let gateways = try_join_all((0..count).map(|_| Gateway::start(&redis, part::NOBODY))).await?;
        // Each has swept once, so that beginnings are not measured.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let before = Stats::read(&redis)?;
        let idle = Watched::watch(&redis, WINDOW, async || Ok(())).await?;
        let spent = before.until_now(&redis)?;
        if !idle.looks().is_empty() {
            bail!("{} jobs were looked at that are not due", idle.looks().len());
        }
        let a_second = idle.commands() as f64 / WINDOW.as_secs_f64();
        let us = spent.us_of(&["time", "zrangebyscore", "scan", "pttl", "zrange", "zcard", "zscore", "evalsha"]);
        let lapsing = cost::open(&store, &keys, LAPSED, LAPSE_MS).await?;
        let lapsing: Vec<Identity> = lapsing.iter().map(|claim| claim.id.identity()).collect();
        let busy = Watched::watch(&redis, Duration::from_millis(LAPSE_MS) + WINDOW, async || Ok(())).await?;
        process::until("every lapsed attempt is unknown", async || {
            let reads = try_join_all(lapsing.iter().map(|identity| store.read_job(*identity))).await;
            let is_unknown = |read: &Read| matches!(read, Read::Found(job) if job.state == JobState::Unknown);
            reads.is_ok_and(|reads| reads.iter().all(is_unknown))
        })
        .await?;
        let looks = busy.looks();
        let of_each = || lapsing.iter().map(|identity| looks.get(format!("oj:{{{identity}}}").as_str()).copied().unwrap_or(0));
        table.row(vec![
            count.to_string(),
            format!("{a_second:.0}"),
            format!("{:.0}", us as f64 / WINDOW.as_secs_f64()),
            format!("{:.0}", a_second / count as f64),
            grouped(LAPSED),
            format!("{:.2}", of_each().sum::<usize>() as f64 / LAPSED as f64),
            of_each().max().unwrap_or(0).to_string(),
            format!("{:.1}", busy.named(&LOOKING) as f64 / LAPSED as f64),
        ]);
        let (redis_us, gateways_us, row) = told_to_all(&redis, &gateways).await?;
        told.push((count as f64, redis_us, gateways_us));
        wakeups.row(row);
        drop(gateways);
    }
    table.note(&format!(
        "{} jobs are open and not due. A look is a call of `tick_job`; commands are those that clients send, as `MONITOR` shows \
         them. A hint may be due a moment before its lease lapses; then there are two looks.",
        grouped(open_jobs)
    ))?;
    wakeups.note(&format!(
        "{} messages of the kind that each end of a job is told to all gateways by; nobody waits for any of these jobs.",
        grouped(MESSAGES)
    ))?;
    if let (Some(fewest), Some(most)) = (told.first(), told.last()) {
        costs.told_redis_us = ((most.1 - fewest.1) / (most.0 - fewest.0)).max(0.0);
        costs.told_gateway_us = most.2 / most.0;
    }
    store.close().await;
    Ok([table, wakeups])
}

/// What it costs that every gateway hears of every job: processor time of Redis and of all gateways, bytes, connections.
async fn told_to_all(redis: &Redis, gateways: &[Gateway]) -> Result<(f64, f64, Vec<String>)> {
    let mut connection = redis::Client::open(redis.url())?.get_multiplexed_async_connection().await?;
    let spent = || gateways.iter().map(Gateway::cpu).sum::<Result<Duration>>();
    let (cpu_before, before) = (spent()?, Stats::read(redis)?);
    let numbers: Vec<u64> = (0..MESSAGES).collect();
    for some in numbers.chunks(100) {
        let mut pipeline = redis::pipe();
        for number in some {
            let shard = number % u64::from(SHARDS);
            pipeline.cmd("PUBLISH").arg(format!("oj:done:{{{shard:02x}}}")).arg(format!("{number:017x}{shard:02x}")).ignore();
        }
        pipeline.query_async::<()>(&mut connection).await?;
    }
    // What is on its way is read and forgotten.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (delta, cpu) = (before.until_now(redis)?, spent()? - cpu_before);
    let of_each = |spent: Duration| spent.as_secs_f64() * 1e6 / MESSAGES as f64;
    let clients: String = redis.ask(&["INFO", "clients"])?;
    let connected = clients.lines().find_map(|line| line.strip_prefix("connected_clients:")).context("INFO tells its clients")?;
    // This connection, the one that asks, and the store's own.
    let theirs = connected.trim().parse::<usize>()?.saturating_sub(2 + OWN_LANES);
    let row = vec![
        gateways.len().to_string(),
        format!("{:.1}", of_each(delta.cpu)),
        format!("{:.1}", of_each(cpu)),
        format!("{:.0}", delta.net_out as f64 / MESSAGES as f64),
        format!("{:.1}", theirs as f64 / gateways.len() as f64),
    ];
    Ok((of_each(delta.cpu), of_each(cpu), row))
}
