//! From what was measured of one job to a thousand, …, a million jobs a second. Nothing here is measured.

use crate::tables::{Table, grouped};

/// What one job costs here.
#[derive(Clone, Copy, Default)]
pub(crate) struct Costs {
    /// Processor time of Redis, in µs, with [`Costs::heard_by`] gateways to be told of each end.
    pub(crate) redis_us: f64,
    /// Gateways at which that was measured.
    pub(crate) heard_by: f64,
    /// Processor time of the gateways, in µs.
    pub(crate) gateway_us: f64,
    pub(crate) redis_bytes_in: f64,
    pub(crate) redis_bytes_out: f64,
    /// What a job that is kept takes, and one that is open, in bytes.
    pub(crate) kept_bytes: f64,
    pub(crate) open_bytes: f64,
    /// What each gateway that is told of an end costs Redis, and itself, in µs.
    pub(crate) told_redis_us: f64,
    pub(crate) told_gateway_us: f64,
}

const RATES: [f64; 4] = [1e3, 1e4, 1e5, 1e6];
/// Redis does one thing at a time: half of a core leaves room for peaks, for a replica that reads all of it and for a failover.
const REDIS_BUSY: f64 = 0.5;
const GATEWAY_BUSY: f64 = 0.6;
/// A gateway of the arithmetic.
const GATEWAY_CORES: f64 = 4.0;
/// How long a job of the arithmetic is open: a call of a model.
const OPEN_SECONDS: f64 = 10.0;
/// As `redis.lanes` comes.
const LANES: f64 = 2.0;

/// How many gateways it takes, each busy with its own jobs and with hearing of all others.
fn gateways(costs: &Costs, rate: f64) -> Option<f64> {
    // What is left of a gateway when it has heard of every job.
    let left = GATEWAY_CORES * GATEWAY_BUSY - rate * costs.told_gateway_us / 1e6;
    (left > 0.0).then(|| (rate * costs.gateway_us / 1e6 / left).ceil())
}

pub(crate) fn table(costs: &Costs) -> Table {
    let mut table = Table::new("scale-arithmetic", &["jobs a second", "1 000", "10 000", "100 000", "1 000 000"]);
    let mut row = |what: &str, figure: &dyn Fn(f64) -> String| {
        table.row([vec![what.to_owned()], RATES.map(figure).to_vec()].concat());
    };
    let alone_us = (costs.redis_us - costs.heard_by * costs.told_redis_us).max(0.0);
    let job_cores = |rate: f64| rate * alone_us / 1e6;
    let gateways_alone = |rate: f64| (rate * costs.gateway_us / 1e6 / (GATEWAY_CORES * GATEWAY_BUSY)).ceil();
    let masters = |rate: f64| (job_cores(rate) / REDIS_BUSY).ceil();
    let whole = |figure: f64| grouped(figure.round() as u64);
    let giga = |bytes: f64| format!("{:.1}", bytes / 1e9);
    row("cores of Redis for the jobs themselves", &|rate| format!("{:.1}", job_cores(rate)));
    row("masters at half of a core each", &|rate| whole(masters(rate)));
    row("gateways of four cores at 60 %, for the jobs themselves", &|rate| whole(gateways_alone(rate)));
    row("… that also hear of every job", &|rate| gateways(costs, rate).map_or("none is enough".to_owned(), whole));
    row("cores of Redis to tell those of every end, one server", &|rate| {
        let told = gateways(costs, rate).map(|gateways| rate * gateways * costs.told_redis_us / 1e6);
        told.map_or("–".to_owned(), |cores| format!("{cores:.1}"))
    });
    row("MB/s into and out of Redis for the jobs themselves", &|rate| {
        format!("{:.0}, {:.0}", rate * costs.redis_bytes_in / 1e6, rate * costs.redis_bytes_out / 1e6)
    });
    row("open jobs, at 10 s a call; GB of them", &|rate| {
        let open = rate * OPEN_SECONDS;
        format!("{}; {}", whole(open), giga(open * costs.open_bytes))
    });
    row("GB of finished jobs kept for an hour", &|rate| giga(rate * 3_600.0 * costs.kept_bytes));
    row("GB of finished jobs kept for a day", &|rate| giga(rate * 86_400.0 * costs.kept_bytes));
    row("connections of each master, lanes alone", &|rate| {
        gateways(costs, rate).map_or("–".to_owned(), |gateways| whole(gateways * LANES))
    });
    row("connections of each gateway, lanes alone", &|rate| whole(masters(rate) * LANES));
    table
}
