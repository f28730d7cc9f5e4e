//! onejob against its ceilings: what the same machine gives when nothing is promised.
//!
//! Each comparison runs its two sides by turns (A B A B …) on the same machine in the same minutes and tells the median of the
//! rounds' ratios; a slower minute slows both. Beside the rates stands what each process spent per operation, which a busy machine
//! disturbs less. `docs/PERFORMANCE.md` says what is compared with what, and why.
//!
//! Everything here is private to the run: Redis on a Unix socket, gateways, nginx and the constant server on free loopback ports,
//! all children of this process. Deliberately not here: a pass or a fail. Figures of one machine are no test.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

mod claims;
mod constant;
mod http;
mod library;
mod memory;
mod private;
mod process;
mod redis_side;
mod report;
mod waiters;

use report::Report;

/// How the run is bounded.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// How often each side of a comparison runs.
    pub(crate) rounds: usize,
    /// How long one side of one round runs.
    pub(crate) window: Duration,
    /// Finished jobs for each size of a result.
    pub(crate) jobs: u64,
    /// Clients that wait at once.
    pub(crate) waiters: usize,
}

const WHOLE: Bounds = Bounds { rounds: 7, window: Duration::from_millis(2500), jobs: 20_000, waiters: 5_000 };
const SHORT: Bounds = Bounds { rounds: 5, window: Duration::from_millis(600), jobs: 20_000, waiters: 2_000 };

/// Which parts to run.
const PARTS: [&str; 9] = ["library", "http", "proxy", "overhead", "jobs", "duplicates", "redis", "memory", "waiters"];

const USAGE: &str = "\
cargo bench --bench ceilings -- [--short] [--only PART]… [--rounds N] [--json FILE]
  --short       about two minutes instead of eight
  --only PART   library, http, proxy, overhead, jobs, duplicates, redis, memory or waiters
  --json FILE   also writes what was measured, for programs";

struct Arguments {
    bounds: Bounds,
    only: Vec<String>,
    json: Option<PathBuf>,
}

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    if let Some(first) = std::env::args().nth(1)
        && first == constant::HIDDEN
    {
        let answer = words.nth(1).context("the constant server needs its answer")?;
        return runtime()?.block_on(constant::serve(&PathBuf::from(answer)));
    }
    let Some(arguments) = arguments(words)? else {
        println!("{USAGE}");
        return Ok(());
    };
    process::raise_descriptors()?;
    let report = runtime()?.block_on(run(&arguments))?;
    println!("{}", report.markdown());
    if let Some(path) = &arguments.json {
        std::fs::write(path, format!("{:#}\n", report.to_json())).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

fn arguments(mut words: impl Iterator<Item = String>) -> Result<Option<Arguments>> {
    let mut arguments = Arguments { bounds: WHOLE, only: Vec::new(), json: None };
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} needs a value\n{USAGE}"));
        match word.as_str() {
            "--short" => arguments.bounds = SHORT,
            "--rounds" => arguments.bounds.rounds = value()?.parse()?,
            "--only" => {
                let part = value()?;
                if !PARTS.contains(&part.as_str()) {
                    bail!("there is no part {part:?}\n{USAGE}");
                }
                arguments.only.push(part);
            }
            "--json" => arguments.json = Some(PathBuf::from(value()?)),
            // What cargo itself says to every benchmark.
            "--bench" => {}
            "--help" => return Ok(None),
            _ => bail!("{word:?} is not understood\n{USAGE}"),
        }
    }
    if arguments.bounds.rounds == 0 {
        bail!("--rounds must be 1 or more");
    }
    Ok(Some(arguments))
}

async fn run(arguments: &Arguments) -> Result<Report> {
    let bounds = arguments.bounds;
    let wanted = |part: &str| arguments.only.is_empty() || arguments.only.iter().any(|only| only == part);
    let mut report = Report::new(bounds)?;
    for part in PARTS.into_iter().filter(|part| wanted(part)) {
        eprintln!("{part} …");
        match part {
            "library" => library::against_redis_benchmark(bounds, &mut report).await?,
            "http" => http::submit_against_constant(bounds, &mut report).await?,
            "proxy" => http::proxy_against_nginx(bounds, &mut report).await?,
            "overhead" => http::overhead(bounds, &mut report).await?,
            "jobs" => {
                library::whole_jobs(bounds, &mut report).await?;
                http::whole_jobs(bounds, &mut report).await?;
            }
            "duplicates" => {
                library::duplicates(bounds, &mut report).await?;
                http::duplicates(bounds, &mut report).await?;
            }
            "redis" => redis_side::steps(bounds, &mut report).await?,
            "memory" => memory::finished_jobs(bounds, &mut report).await?,
            "waiters" => waiters::resident(bounds, &mut report).await?,
            _ => bail!("part {part:?} has no measurement"),
        }
    }
    Ok(report)
}
