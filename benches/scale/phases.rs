//! Two gateways under load, then four, then four of which one is killed: what a job costs, what clients see, and what is lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures_util::stream::{self, TryStreamExt as _};
use onejob::job::JobId;
use onejob::store::{Read, Store};

use crate::arithmetic::Costs;
use crate::claims;
use crate::client::{Clients, Told};
use crate::part::Gateway;
use crate::private::Redis;
use crate::provider::Provider;
use crate::stats::Stats;
use crate::tables::{Table, grouped};

/// Clients of the run that finds out what the machine can do.
const CLIENTS: usize = 64;
const CALIBRATION: Duration = Duration::from_secs(4);
/// The part of it that is asked for in every phase, so that nothing queues for long and costs compare.
const OF_CAPACITY: f64 = 0.5;
/// From the beginning of the last phase to the kill.
const KILL_AFTER: Duration = Duration::from_secs(3);
/// Reads of the check at the end that are under way at once.
const READS_AT_ONCE: usize = 128;

struct Phase {
    name: &'static str,
    gateways: usize,
    kills: bool,
}

const PHASES: [Phase; 3] = [
    Phase { name: "2 gateways", gateways: 2, kills: false },
    Phase { name: "4 gateways", gateways: 4, kills: false },
    Phase { name: "4, one killed (-9) after 3 s", gateways: 4, kills: true },
];

pub(crate) async fn measure(length: Duration, costs: &mut Costs) -> Result<Table> {
    let redis = Redis::start().await?;
    let provider = Provider::start().await?;
    let store = claims::store(&redis.url()).await?;
    let mut gateways = Vec::new();
    for _ in 0..PHASES[0].gateways {
        gateways.push(Gateway::start(&redis, &provider.url).await?);
    }
    let clients = Arc::new(Clients::of(gateways.iter().map(|gateway| gateway.url.clone())));
    let (capacity, mut next) = clients.closed_loop(0, CLIENTS, CALIBRATION).await?;
    let rate = (capacity * OF_CAPACITY).ceil();
    let mut table = Table::new(
        "scale-gateways",
        &[
            "phase",
            "jobs/s",
            "gateways' CPU ms a job",
            "redis CPU µs a job",
            "scripts a job",
            "commands a job",
            "redis bytes in, out a job",
            "errors a client saw",
            "p50 ms",
            "p99 ms",
            "longest ms",
            "acknowledged, lost",
            "executions of an intent",
        ],
    );
    for phase in PHASES {
        while gateways.len() < phase.gateways {
            gateways.push(Gateway::start(&redis, &provider.url).await?);
        }
        let clients = Arc::new(Clients::of(gateways.iter().map(|gateway| gateway.url.clone())));
        let cpu_before = spent(&gateways)?;
        let (before, began) = (Stats::read(&redis)?, Instant::now());
        let load = clients.open_loop(next, rate, length);
        let kill = async {
            if phase.kills {
                tokio::time::sleep(KILL_AFTER).await;
                gateways.last_mut().context("there are gateways")?.kill()?;
            }
            anyhow::Ok(())
        };
        let (told, killed) = tokio::join!(load, kill);
        killed?;
        let (mut told, took) = (told?, began.elapsed());
        let (delta, cpu) = (before.until_now(&redis)?, spent(&gateways)? - cpu_before);
        next += told.len() as u64;
        let intents: Vec<u64> = told.iter().map(|told| told.intent).collect();
        let (least, most) = provider.executions(&intents);
        let (acknowledged, lost) = lost(&store, &told).await?;
        told.sort_unstable_by_key(|told| told.took);
        let jobs = told.len() as f64;
        let at = |part: f64| told[((jobs * part) as usize).min(told.len() - 1)].took.as_secs_f64() * 1e3;
        if !phase.kills {
            costs.heard_by = gateways.len() as f64;
            costs.redis_us = delta.cpu.as_secs_f64() * 1e6 / jobs;
            costs.gateway_us = cpu.as_secs_f64() * 1e6 / jobs;
            (costs.redis_bytes_in, costs.redis_bytes_out) = (delta.net_in as f64 / jobs, delta.net_out as f64 / jobs);
        }
        table.row(vec![
            phase.name.to_owned(),
            // The last answer comes late where somebody was killed; the jobs came in the phase.
            format!("{:.0}", jobs / if phase.kills { length } else { took }.as_secs_f64()),
            format!("{:.3}", cpu.as_secs_f64() * 1e3 / jobs),
            format!("{:.0}", delta.cpu.as_secs_f64() * 1e6 / jobs),
            format!("{:.2}", delta.calls("evalsha") as f64 / jobs),
            format!("{:.1}", delta.all_calls() as f64 / jobs),
            format!("{:.0}, {:.0}", delta.net_in as f64 / jobs, delta.net_out as f64 / jobs),
            told.iter().map(|told| u64::from(told.errors)).sum::<u64>().to_string(),
            format!("{:.1}", at(0.5)),
            format!("{:.1}", at(0.99)),
            format!("{:.0}", at(1.0)),
            format!("{}, {lost}", grouped(acknowledged)),
            if least == most { least.to_string() } else { format!("{least} to {most}") },
        ]);
    }
    table.note(&format!(
        "Open loop at {rate:.0} jobs a second, {:.0} % of what {CLIENTS} clients one after another got from two gateways \
         ({capacity:.0}); {} s a phase. Commands count those within scripts. Clients, provider, gateways and Redis share this \
         machine's cores: a p99 is mostly the wait for a core.",
        OF_CAPACITY * 100.0,
        length.as_secs()
    ))?;
    store.close().await;
    Ok(table)
}

fn spent(gateways: &[Gateway]) -> Result<Duration> {
    gateways.iter().map(Gateway::cpu).sum()
}

/// How many were acknowledged; how many of those are not there, or not over, or were never told to be over.
async fn lost(store: &Store, told: &[Told]) -> Result<(u64, u64)> {
    let acknowledged: Vec<&(String, String)> = told.iter().filter_map(|told| told.job.as_ref()).collect();
    let settled = stream::iter(acknowledged.iter().map(anyhow::Ok)).map_ok(async |(id, state)| {
        let id: JobId = id.parse().ok().with_context(|| format!("{id:?} is no id"))?;
        let is_there = matches!(store.read_job(id.identity()).await?, Read::Found(job) if job.id == id && job.is_ended());
        anyhow::Ok(is_there && state == "succeeded")
    });
    let settled: Vec<bool> = settled.try_buffer_unordered(READS_AT_ONCE).try_collect().await?;
    let count = |is_settled: bool| settled.iter().filter(|settled| **settled == is_settled).count() as u64;
    Ok((count(true) + count(false), count(false) + (told.len() - acknowledged.len()) as u64))
}
