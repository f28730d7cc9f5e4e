//! What a click costs beside `SET NX PX`, which `redis-benchmark` sends in pipelines: processor time of Redis, memory, and clicks a
//! second through the library, through HTTP and through a pipe.
//!
//! Everything here is private to the run: each way has a Redis of its own, the same program with the same settings; the ways take
//! turns of some ten thousand clicks, so that what else the machine does meets all of them. A figure is the median of its turns.
//! Deliberately not here: a pass or a fail of the speed. That no new click is dropped is asserted for each of them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::{TryStreamExt as _, stream};
use onejob::dedup::{BatchToken, ClickId, Dedup, FieldValue, Stream, Verdict};
use onejob::store::{Store, StoreOptions};
use tokio::process::Command;

#[expect(dead_code, reason = "the other benchmarks forget keys between rounds and want the socket of a program")]
#[path = "../ceilings/private.rs"]
mod private;
#[expect(dead_code, reason = "the other benchmarks measure memory and their own processor time too")]
#[path = "../ceilings/process.rs"]
mod process;
#[expect(dead_code, reason = "the other benchmark writes its tables for programs too")]
#[path = "../scale/tables.rs"]
mod tables;
mod ways;

use private::Redis;
use tables::{Table, grouped};

/// Ids of one batch, and commands of the deepest pipeline.
const BATCH: usize = 500;
/// Clicks of one turn of a way.
const TURN: usize = 50_000;
/// Batches under way at once, in the library and over HTTP.
const AT_ONCE: usize = 8;
/// How deep `redis-benchmark`'s pipelines are: what its handbook shows, and as deep as our batches.
const PIPELINES: [u32; 2] = [16, 500];
/// Levels that the ids are cut in.
const LEVELS: usize = 5;

const USAGE: &str = "\
cargo bench --bench clicks -- [--ids N] [--markdown FILE] [--document FILE]
  --ids N           different clicks, 10000000 if nothing is said
  --markdown FILE   also writes the tables there
  --document FILE   replaces the tables between their marker lines there";

struct Arguments {
    ids: usize,
    markdown: Option<PathBuf>,
    document: Option<PathBuf>,
}

fn main() -> Result<()> {
    let Some(arguments) = arguments(std::env::args().skip(1))? else {
        println!("{USAGE}");
        return Ok(());
    };
    process::raise_descriptors()?;
    let tables = tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run(&arguments))?;
    let markdown = tables.iter().map(Table::markdown).collect::<Vec<_>>().join("\n");
    println!("{markdown}");
    if let Some(path) = &arguments.markdown {
        std::fs::write(path, &markdown).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = &arguments.document {
        tables.iter().try_for_each(|table| table.write_into(path))?;
    }
    Ok(())
}

fn arguments(mut words: impl Iterator<Item = String>) -> Result<Option<Arguments>> {
    let mut arguments = Arguments { ids: 10_000_000, markdown: None, document: None };
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} needs a value\n{USAGE}"));
        match word.as_str() {
            "--ids" => arguments.ids = value()?.parse().context("--ids is a number")?,
            "--markdown" => arguments.markdown = Some(value()?.into()),
            "--document" => arguments.document = Some(value()?.into()),
            "--help" => return Ok(None),
            // `cargo bench` says it to every benchmark.
            "--bench" => {}
            _ => bail!("{word} is not known\n{USAGE}"),
        }
    }
    ensure!(arguments.ids >= LEVELS * TURN, "--ids is {} or more, not {}", LEVELS * TURN, arguments.ids);
    Ok(Some(arguments))
}

async fn run(arguments: &Arguments) -> Result<Vec<Table>> {
    let engine = engine(arguments.ids).await?;
    Ok(vec![engine, ways::ways().await?])
}

/// What one way has cost in the turns of a level.
#[derive(Default)]
struct Costs {
    /// µs of Redis' processor time an id.
    cpu_us: Vec<f64>,
    /// Ids a second.
    rate: Vec<f64>,
}

impl Costs {
    /// What some work on so many ids has cost.
    async fn turn(&mut self, redis: &Redis, ids: usize, work: impl Future<Output = Result<()>>) -> Result<()> {
        let (cpu, began) = (redis_cpu(redis)?, Instant::now());
        work.await?;
        self.rate.push(ids as f64 / began.elapsed().as_secs_f64());
        self.cpu_us.push((redis_cpu(redis)? - cpu).as_secs_f64() * 1e6 / ids as f64);
        Ok(())
    }
}

fn median(figures: &[f64]) -> f64 {
    let mut ordered = figures.to_vec();
    ordered.sort_by(f64::total_cmp);
    ordered.get(ordered.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Processor time of the thread that executes commands.
fn redis_cpu(redis: &Redis) -> Result<Duration> {
    let info: String = redis.ask(&["INFO", "cpu"])?;
    let spent = |name: &str| -> Result<f64> {
        let line = info.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("INFO tells {name}"))?;
        Ok(line.trim().parse()?)
    };
    Ok(Duration::from_secs_f64(spent("used_cpu_user_main_thread:")? + spent("used_cpu_sys_main_thread:")?))
}

/// The ways that are compared: streams of both kinds, then `SET NX PX` in pipelines of both depths.
const WAYS: [&str; 4] = ["buckets", "mirrored", "`SET` by 16", "`SET` by 500"];

/// New clicks through the library, and as many `SET NX PX`, by turns.
async fn engine(ids: usize) -> Result<Table> {
    let servers = [Redis::start().await?, Redis::start().await?, Redis::start().await?, Redis::start().await?];
    let [buckets, mirrored, by_16, by_500] = &servers;
    let mut streams = Vec::new();
    for (redis, mirrored) in [(buckets, false), (mirrored, true)] {
        let (store, _) = Store::connect(StoreOptions::new(&redis.url())).await?;
        let stream = Stream { expected: ids as u64, keep: Duration::from_secs(1), ..Stream::new("clicks", &["user"]) };
        streams.push(Dedup::new(&store, Stream { mirrored, ..stream })?);
    }
    let empty = servers.each_ref().map(Redis::used_memory);
    let head = ["clicks", "way", "µs of Redis an id", "less than `SET`", "clicks a second", "to `SET`", "bytes an id"];
    let mut table = Table::new("clicks-engine", &head);
    let (mut number, mut all) = (0, [(0.0, 0.0); 4]);
    for level in 1..=LEVELS {
        let mut costs = [const { Costs { cpu_us: Vec::new(), rate: Vec::new() } }; 4];
        while number < ids / LEVELS * level {
            let turn: Vec<ClickId> =
                (number..number + TURN).map(|number| id(streams[0].stream(), number)).collect::<Result<_>>()?;
            number += TURN;
            for ((redis, dedup), costs) in servers.iter().zip(&streams).zip(&mut costs) {
                costs.turn(redis, TURN, all_first(dedup, &turn)).await?;
            }
            for ((redis, pipeline), costs) in [by_16, by_500].into_iter().zip(PIPELINES).zip(&mut costs[2..]) {
                let cpu = redis_cpu(redis)?;
                costs.rate.push(ways::set_nx_px(redis, TURN, pipeline).await?);
                costs.cpu_us.push((redis_cpu(redis)? - cpu).as_secs_f64() * 1e6 / TURN as f64);
            }
        }
        for (all, costs) in all.iter_mut().zip(&costs) {
            all.0 += costs.cpu_us.iter().sum::<f64>();
            all.1 += costs.rate.iter().map(|rate| 1.0 / rate).sum::<f64>();
        }
        // What is kept of the last batches is not a click's.
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        let mut bytes = Vec::new();
        for ((redis, empty), place) in servers.iter().zip(&empty).zip(0..) {
            let ids = if place < streams.len() { number as u64 } else { redis.ask(&["DBSIZE"])? };
            let empty = *empty.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
            bytes.push(format!("{:.1}", (redis.used_memory()? - empty) as f64 / ids as f64));
        }
        let figures = costs.each_ref().map(|costs| (median(&costs.cpu_us), median(&costs.rate)));
        rows(&mut table, &grouped(number as u64), figures, &bytes);
    }
    let turns = (number / TURN) as f64;
    rows(
        &mut table,
        "all, together",
        all.map(|(cpu_us, seconds)| (cpu_us / turns, turns / seconds)),
        &[const { String::new() }; 4],
    );
    table.note(&format!(
        "Batches of {BATCH}, {AT_ONCE} under way; turns of {}, medians of the turns since the row before; of all together the mean. \
         What is said of `SET` is by 16, then by 500. No click of {} was dropped.",
        grouped(TURN as u64),
        grouped(number as u64)
    ))?;
    Ok(table)
}

/// A row for each way.
fn rows(table: &mut Table, clicks: &str, figures: [(f64, f64); 4], bytes: &[String]) {
    let [.., (cpu_16, rate_16), (cpu_500, rate_500)] = figures;
    for ((way, (cpu, rate)), bytes) in WAYS.into_iter().zip(figures).zip(bytes) {
        let pair = |one: f64, other: f64| format!("{one:.2} · {other:.2}");
        let row = [way.to_owned(), format!("{cpu:.2}"), pair(cpu_16 / cpu, cpu_500 / cpu), grouped(rate as u64)];
        table.row([&[clicks.to_owned()], &row[..], &[pair(rate / rate_16, rate / rate_500), bytes.clone()]].concat());
    }
}

fn id(stream: &Stream, number: usize) -> Result<ClickId> {
    Ok(stream.id(|_| Some(FieldValue::Integer(number as i128)))?)
}

/// Asks about new clicks, and fails if one is taken for another.
async fn all_first(dedup: &Dedup, ids: &[ClickId]) -> Result<()> {
    stream::iter(ids.chunks(BATCH).map(Ok))
        .try_for_each_concurrent(AT_ONCE, async |batch| {
            let verdicts = dedup.check(batch, BatchToken::random()).await?;
            ensure!(verdicts.iter().all(|verdict| *verdict == Verdict::First), "a new click is taken for another one");
            Ok(())
        })
        .await
}
