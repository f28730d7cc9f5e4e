//! What changes as the work grows: the cost of a job beside a million others, the cost of sweeps, gateways that come and one that
//! dies, and gateways that have nothing to do.
//!
//! Everything here is private to the run: Redis on a Unix socket, gateways as processes of the release build, a provider in this
//! process; all of it ends with the run. `docs/SCALING.md` says what the figures lead to. Deliberately not here: a pass or a fail.
//! What must not grow is held by tests that count commands.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

mod arithmetic;
#[path = "../ceilings/claims.rs"]
mod claims;
mod client;
mod cost;
mod idle;
mod part;
mod phases;
#[expect(dead_code, reason = "the other benchmark has a program that wants its socket, and forgets keys between rounds")]
#[path = "../ceilings/private.rs"]
mod private;
#[expect(dead_code, reason = "the other benchmark measures memory and its own processor time too")]
#[path = "../ceilings/process.rs"]
mod process;
mod provider;
mod stats;
mod tables;

use arithmetic::Costs;
use tables::Table;

/// The least that a level of a hundredth of them makes sense with.
const JOBS_MIN: u64 = 10_000;

const USAGE: &str = "\
cargo bench --bench scale -- [--jobs N] [--seconds N] [--only PART]… [--markdown FILE] [--json FILE] [--document FILE]
  --jobs N          finished jobs at the last level, 1000000 if nothing is said
  --seconds N       of each phase with gateways under load, 20 if nothing is said
  --only PART       cost, gateways or sweepers
  --markdown FILE   also writes the tables there
  --json FILE       also writes what was measured, for programs
  --document FILE   replaces the tables between their marker lines there";

struct Arguments {
    jobs: u64,
    phase: Duration,
    only: Vec<String>,
    markdown: Option<PathBuf>,
    json: Option<PathBuf>,
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
    if let Some(path) = &arguments.json {
        let json = serde_json::Value::Array(tables.iter().map(Table::to_json).collect());
        std::fs::write(path, format!("{json:#}\n")).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = &arguments.document {
        tables.iter().try_for_each(|table| table.write_into(path))?;
    }
    Ok(())
}

fn arguments(mut words: impl Iterator<Item = String>) -> Result<Option<Arguments>> {
    let mut arguments = Arguments {
        jobs: 1_000_000,
        phase: Duration::from_secs(20),
        only: Vec::new(),
        markdown: None,
        json: None,
        document: None,
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} needs a value\n{USAGE}"));
        match word.as_str() {
            "--jobs" => arguments.jobs = value()?.parse()?,
            "--seconds" => arguments.phase = Duration::from_secs(value()?.parse()?),
            "--only" => arguments.only.push(value()?),
            "--markdown" => arguments.markdown = Some(PathBuf::from(value()?)),
            "--json" => arguments.json = Some(PathBuf::from(value()?)),
            "--document" => arguments.document = Some(PathBuf::from(value()?)),
            // What cargo itself says to every benchmark.
            "--bench" => {}
            "--help" => return Ok(None),
            _ => bail!("{word:?} is not understood\n{USAGE}"),
        }
    }
    if arguments.jobs < JOBS_MIN || arguments.phase < Duration::from_secs(5) {
        bail!("--jobs must be {JOBS_MIN} or more, --seconds 5 or more");
    }
    Ok(Some(arguments))
}

async fn run(arguments: &Arguments) -> Result<Vec<Table>> {
    let wanted = |part: &str| arguments.only.is_empty() || arguments.only.iter().any(|only| only == part);
    let (mut tables, mut costs) = (Vec::new(), Costs::default());
    for part in ["cost", "gateways", "sweepers"].into_iter().filter(|part| wanted(part)) {
        eprintln!("{part} …");
        match part {
            "cost" => tables.extend(cost::measure(arguments.jobs, &mut costs).await?),
            "gateways" => tables.push(phases::measure(arguments.phase, &mut costs).await?),
            _ => tables.extend(idle::measure(arguments.jobs, &mut costs).await?),
        }
    }
    if arguments.only.is_empty() {
        tables.push(arithmetic::table(&costs));
    }
    if tables.is_empty() {
        bail!("there is no part {:?}\n{USAGE}", arguments.only);
    }
    Ok(tables)
}
