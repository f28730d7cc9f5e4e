//! Gateways that have nothing to do but to sweep: what one, two, four and eight of them ask of Redis over fifty thousand open jobs,
//! and how often a job is looked at when a thousand of them are due at the same moment.

use std::time::Duration;

use anyhow::{Result, bail};
use futures_util::future::try_join_all;
use onejob::job::{Identity, JobState};
use onejob::store::Read;

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

pub(crate) async fn measure(jobs: u64) -> Result<Table> {
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
            "commands for each due",
        ],
    );
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
        let all_seconds = (Duration::from_millis(LAPSE_MS) + WINDOW).as_secs_f64();
        table.row(vec![
            count.to_string(),
            format!("{a_second:.0}"),
            format!("{:.0}", us as f64 / WINDOW.as_secs_f64()),
            format!("{:.0}", a_second / count as f64),
            grouped(LAPSED),
            format!("{:.2}", of_each().sum::<usize>() as f64 / LAPSED as f64),
            of_each().max().unwrap_or(0).to_string(),
            format!("{:.1}", (busy.commands() as f64 - a_second * all_seconds) / LAPSED as f64),
        ]);
        drop(gateways);
    }
    table.note(&format!(
        "{} jobs are open and not due. A look is a call of `tick_job`; commands are those that clients send, as `MONITOR` shows them.",
        grouped(open_jobs)
    ))?;
    store.close().await;
    Ok(table)
}
