//! Children of the run: started, looked at through `/proc`, ended by their own handle.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// How long a part may take to be there.
const START_DEADLINE: Duration = Duration::from_secs(20);
/// How often a condition is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Clock ticks a second in `/proc/<pid>/stat`: 100 on every Linux that Rust runs on.
const TICKS_A_SECOND: u64 = 100;
/// Bytes of a page in `/proc/<pid>/statm`.
const PAGE_BYTES: u64 = 4096;

/// A child process, killed when dropped.
pub(crate) struct Part {
    _child: Child,
    pub(crate) pid: u32,
}

impl Part {
    pub(crate) fn start(command: &mut Command) -> Result<Part> {
        let child = command.kill_on_drop(true).stdin(Stdio::null()).spawn();
        let child = child.with_context(|| format!("cannot run {:?}", command.as_std().get_program()))?;
        let pid = child.id().context("a child that has just been started has an id")?;
        Ok(Part { _child: child, pid })
    }

    /// Starts a server that tells its address in a line of its output: what follows the last blank of it.
    pub(crate) async fn start_and_listen(command: &mut Command, line_has: &str) -> Result<(Part, String)> {
        let mut child = command.kill_on_drop(true).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let pid = child.id().context("a child that has just been started has an id")?;
        let mut lines = BufReader::new(child.stdout.take().context("its output is piped")?).lines();
        let find = async {
            while let Some(line) = lines.next_line().await? {
                if line.contains(line_has) {
                    return Ok(line.rsplit(' ').next().unwrap_or_default().to_owned());
                }
            }
            bail!("{:?} ended without saying {line_has:?}", command.as_std().get_program())
        };
        let address = tokio::time::timeout(START_DEADLINE, find).await.context("a server says nothing")??;
        Ok((Part { _child: child, pid }, address))
    }
}

/// Processor time that a process has spent, user and system, in all its threads.
pub(crate) fn cpu(pid: u32) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("process {pid} is gone"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |place: usize| fields.get(place).and_then(|field| field.parse::<u64>().ok()).context("/proc/<pid>/stat");
    Ok(Duration::from_millis((ticks(11)? + ticks(12)?) * 1000 / TICKS_A_SECOND))
}

/// Processor time that this process has spent.
pub(crate) fn own_cpu() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(spent).unwrap_or_default()
}

/// Resident memory of a process in bytes.
pub(crate) fn resident_bytes(pid: u32) -> Result<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).with_context(|| format!("process {pid} is gone"))?;
    let pages: u64 = statm.split_whitespace().nth(1).context("/proc/<pid>/statm")?.parse()?;
    Ok(pages * PAGE_BYTES)
}

/// As many open files as this process may allow itself; its children inherit it.
pub(crate) fn raise_descriptors() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?)
}

/// Looks again and again until something is so.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> F) -> Result<()> {
    let began = Instant::now();
    while !is_so().await {
        if began.elapsed() > START_DEADLINE {
            bail!("{what}: not so after {START_DEADLINE:?}");
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    Ok(())
}

/// A directory of the run, removed at its end; its path is short enough for a socket's.
pub(crate) fn directory() -> Result<tempfile::TempDir> {
    Ok(tempfile::Builder::new().prefix("onejob-ceilings-").tempdir_in(Path::new("/tmp"))?)
}
