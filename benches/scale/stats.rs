//! What Redis has done between two looks: its own counters, and every command as `MONITOR` shows it.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures_util::StreamExt as _;
use onejob::store::Script;

use crate::private::Redis;
use crate::process;

/// Counters of Redis at one moment.
pub(crate) struct Stats {
    /// Calls and µs of each command, those within scripts too.
    commands: BTreeMap<String, (u64, u64)>,
    medians_us: BTreeMap<String, f64>,
    net_in: u64,
    net_out: u64,
    cpu: Duration,
}

/// What has been added to them.
pub(crate) struct Delta {
    commands: BTreeMap<String, (u64, u64)>,
    medians_us: BTreeMap<String, f64>,
    pub(crate) net_in: u64,
    pub(crate) net_out: u64,
    pub(crate) cpu: Duration,
}

impl Stats {
    pub(crate) fn read(redis: &Redis) -> Result<Stats> {
        let commands: String = redis.ask(&["INFO", "commandstats"])?;
        let command = |line: &str| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let (calls, rest) = rest.split_once(",usec=")?;
            Some((name.to_owned(), (calls.parse().ok()?, rest.split(',').next()?.parse().ok()?)))
        };
        let latencies: String = redis.ask(&["INFO", "latencystats"])?;
        let median = |line: &str| {
            let (name, rest) = line.strip_prefix("latency_percentiles_usec_")?.split_once(":p50=")?;
            Some((name.to_owned(), rest.split(',').next()?.parse().ok()?))
        };
        let stats: String = redis.ask(&["INFO", "stats"])?;
        let number = |name: &str| -> Result<u64> {
            let line = stats.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("INFO tells {name}"))?;
            Ok(line.trim().parse()?)
        };
        Ok(Stats {
            commands: commands.lines().filter_map(command).collect(),
            medians_us: latencies.lines().filter_map(median).collect(),
            net_in: number("total_net_input_bytes:")?,
            net_out: number("total_net_output_bytes:")?,
            cpu: process::cpu(redis.part.pid)?,
        })
    }

    /// What has been added since this was read.
    pub(crate) fn until_now(&self, redis: &Redis) -> Result<Delta> {
        let now = Stats::read(redis)?;
        let grown = now.commands.iter().filter(|(name, _)| !name.starts_with("info")).map(|(name, (calls, us))| {
            let (calls_before, us_before) = self.commands.get(name).copied().unwrap_or_default();
            (name.clone(), (calls - calls_before, us - us_before))
        });
        Ok(Delta {
            commands: grown.collect(),
            medians_us: now.medians_us,
            net_in: now.net_in - self.net_in,
            net_out: now.net_out - self.net_out,
            cpu: now.cpu - self.cpu,
        })
    }
}

impl Delta {
    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.commands.get(name).map_or(0, |(calls, _)| *calls)
    }

    /// The median of what a call took, in µs, since the statistics were reset: of a mean, most is how busy the machine is.
    pub(crate) fn median_us(&self, name: &str) -> f64 {
        self.medians_us.get(name).copied().unwrap_or(f64::NAN)
    }

    /// All calls, those within scripts too.
    pub(crate) fn all_calls(&self) -> u64 {
        self.commands.values().map(|(calls, _)| calls).sum()
    }

    /// µs of all calls of these names. What a script calls is in the script's own time too.
    pub(crate) fn us_of(&self, names: &[&str]) -> u64 {
        names.iter().filter_map(|name| self.commands.get(*name)).map(|(_, us)| us).sum()
    }
}

/// One command that a client sent.
struct Sent {
    at: f64,
    name: String,
    /// Of a script: which, and the key it was about.
    script: Option<(String, String)>,
}

/// Everything that clients sent in a window; what scripts call is left out.
pub(crate) struct Watched {
    sent: Vec<Sent>,
}

/// One sweep of one gateway: from its look at the clock to its slow scan.
pub(crate) struct Sweep {
    pub(crate) took: Duration,
    pub(crate) commands: usize,
    /// How many jobs it looked at.
    pub(crate) looks: usize,
}

impl Watched {
    /// Watches for so long, and calls something as soon as it watches.
    pub(crate) async fn watch(redis: &Redis, window: Duration, begin: impl AsyncFnOnce() -> Result<()>) -> Result<Watched> {
        let monitor = redis::Client::open(redis.url())?.get_async_monitor().await?;
        let mut lines = Box::pin(monitor.into_on_message::<String>());
        let reading = tokio::spawn(async move {
            let end = tokio::time::Instant::now() + window;
            let mut sent = Vec::new();
            while let Ok(Some(line)) = tokio::time::timeout_at(end, lines.next()).await {
                sent.extend(read_line(&line));
            }
            sent
        });
        begin().await?;
        Ok(Watched { sent: reading.await? })
    }

    pub(crate) fn commands(&self) -> usize {
        self.sent.len()
    }

    /// How many of them have one of these names.
    pub(crate) fn named(&self, names: &[&str]) -> usize {
        self.sent.iter().filter(|sent| names.contains(&sent.name.as_str())).count()
    }

    /// How often each job was looked at.
    pub(crate) fn looks(&self) -> HashMap<&str, usize> {
        let mut looks = HashMap::new();
        for (_, key) in self.sent.iter().filter_map(|sent| sent.script.as_ref()).filter(|(sha1, _)| is_look(sha1)) {
            *looks.entry(key.as_str()).or_default() += 1;
        }
        looks
    }

    /// The whole sweeps of the one gateway that was there.
    pub(crate) fn sweeps(&self) -> Vec<Sweep> {
        let mut sweeps = Vec::new();
        let mut began: Option<(f64, usize, usize)> = None;
        for sent in &self.sent {
            if sent.name == "time" {
                began = Some((sent.at, 0, 0));
            }
            let Some((at, commands, looks)) = &mut began else { continue };
            *commands += 1;
            *looks += usize::from(sent.script.as_ref().is_some_and(|(sha1, _)| is_look(sha1)));
            if sent.name == "scan" {
                let took = Duration::from_secs_f64((sent.at - *at).max(0.0));
                sweeps.push(Sweep { took, commands: *commands, looks: *looks });
                began = None;
            }
        }
        sweeps
    }
}

fn is_look(sha1: &str) -> bool {
    sha1 == Script::TickJob.sha1()
}

/// Reads `time [db client] "command" "argument" …`.
fn read_line(line: &str) -> Option<Sent> {
    let (at, rest) = line.split_once(" [")?;
    let (client, rest) = rest.split_once("] ")?;
    if client.ends_with("lua") {
        return None;
    }
    let mut words = rest.split(' ').map(|word| word.trim_matches('"'));
    let name = words.next()?.to_ascii_lowercase();
    let script = (name == "evalsha").then(|| {
        let mut word = || words.next().unwrap_or_default().to_owned();
        let (sha1, _keys, key) = (word(), word(), word());
        (sha1, key)
    });
    Some(Sent { at: at.parse().ok()?, name, script })
}
