//! `redis-benchmark` on a Redis of the run's own, with the very same script and arguments that the library sends.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use onejob::store::Script;
use tokio::process::Command;

use crate::Bounds;
use crate::claims::JobShape;
use crate::private::Redis;
use crate::process;
use crate::report::{Report, Side};

/// `redis-benchmark` writes twelve digits for this, others at each place.
const RANDOM: &str = "__rand_int__";
/// How many values those digits can have: `redis-benchmark` reads an int.
const RANDOM_RANGE: &str = "2147483647";
/// Calls of the run that finds out how many fit into a window.
const CALIBRATION: u64 = 4_000;

impl Redis {
    /// Calls of `redis-benchmark` that fit into a window.
    pub(crate) async fn calls_in(&self, window: Duration, clients: Clients, command: &[String]) -> Result<u64> {
        let side = self.benchmark(CALIBRATION, clients, command).await?;
        self.flush()?;
        Ok(((side.ops_a_second * window.as_secs_f64()) as u64).max(CALIBRATION))
    }

    /// One run of `redis-benchmark`.
    pub(crate) async fn benchmark(&self, calls: u64, clients: Clients, command: &[String]) -> Result<Side> {
        let mut program = Command::new("redis-benchmark");
        program.args(["-s", self.socket(), "-n", &calls.to_string(), "-r", RANDOM_RANGE, "--csv"]);
        program.args(["-c", &clients.connections.to_string(), "-P", &clients.pipeline.to_string()]);
        let before = process::cpu(self.part.pid)?;
        let output = program.args(command).kill_on_drop(true).output().await.context("cannot run redis-benchmark")?;
        let spent = process::cpu(self.part.pid)? - before;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().last().unwrap_or_default();
        // "name","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms"; the
        // name is the whole command.
        let numbers: Vec<f64> = line.rsplit(',').take(7).filter_map(|word| word.trim_matches('"').parse().ok()).collect();
        let [_max, p99, _p95, p50, _min, _average, rps] = numbers[..] else {
            bail!("redis-benchmark said {:?} {:?}", text, String::from_utf8_lossy(&output.stderr));
        };
        let per_call = |spent: Duration| spent.as_secs_f64() * 1e6 / calls as f64;
        Ok(Side {
            ops_a_second: rps,
            p50_us: p50 * 1000.0,
            p99_us: p99 * 1000.0,
            cpu_us: [("redis".to_owned(), per_call(spent))].into(),
        })
    }
}

/// How `redis-benchmark` asks.
#[derive(Clone, Copy)]
pub(crate) struct Clients {
    pub(crate) connections: u32,
    pub(crate) pipeline: u32,
}

/// As many calls under way as it takes to keep Redis busy all the time.
pub(crate) const MANY: Clients = Clients { connections: 50, pipeline: 16 };
/// One call after another.
pub(crate) const ONE: Clients = Clients { connections: 1, pipeline: 1 };

/// The call that the library makes for a new job, every argument of the same length; key, id, digest and token are others each time.
///
/// The script compares key, digest and token with nothing while the key is free, so they need not belong together.
pub(crate) fn submit_job() -> Vec<String> {
    let job = JobShape::default();
    let mut command = vec!["EVALSHA".to_owned(), Script::SubmitJob.sha1().to_owned(), "1".to_owned()];
    command.push(format!("oj:{{{RANDOM}0000000}}"));
    command.extend(submit_arguments(&job));
    command
}

fn submit_arguments(job: &JobShape) -> Vec<String> {
    let rules = job.rules;
    let input = String::from_utf8_lossy(&job.input).into_owned();
    let arguments = [
        format!("time{RANDOM}"),
        format!("dige{RANDOM}"),
        "f".repeat(16),
        job.owner.as_str().to_owned(),
        job.route.to_owned(),
        "exclusive".to_owned(),
        job.deadline_ms.to_string(),
        rules.attempts_max.to_string(),
        rules.race_max.to_string(),
        rules.race_after_ms.to_string(),
        rules.key_life_ms.to_string(),
        rules.retention_ms.to_string(),
        "keep".to_owned(),
        rules.quarantine_ms.to_string(),
        job.input_head.to_owned(),
        "0".to_owned(),
        input,
        "running".to_owned(),
        format!("tokn{RANDOM}"),
        job.lease_ms.to_string(),
        job.provider.to_owned(),
        job.gateway.to_owned(),
        job.url.to_owned(),
        "h".repeat(32),
        String::new(),
    ];
    arguments.to_vec()
}

/// The hint that goes before the claim.
fn hint() -> Vec<String> {
    let member = format!("{RANDOM}0000000");
    ["ZADD", "oj:due:{00}", "LT", "1795000000000", &member].map(str::to_owned).to_vec()
}

/// What Redis spends on which step of a claim: each alone, by `redis-benchmark`.
pub(crate) async fn steps(bounds: Bounds, report: &mut Report) -> Result<()> {
    let redis = Redis::start().await?;
    let load = |code: &str| redis.ask::<String>(&["SCRIPT", "LOAD", code]);
    redis_scripts(&redis)?;
    let arguments = submit_arguments(&JobShape::default());
    let script = |sha1: String| {
        let mut command = vec!["EVALSHA".to_owned(), sha1, "1".to_owned(), format!("oj:{{{RANDOM}0000000}}")];
        command.extend(arguments.iter().cloned());
        command
    };
    let plain = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let key = format!("oj:{{{RANDOM}0000000}}");
    let record = "r".repeat(330);
    let nothing = load("#!lua\nreturn 1")?;
    let time = load("#!lua\nreturn redis.call('TIME')[1]")?;
    let set = load("#!lua\nreturn redis.call('SET', KEYS[1], ARGV[17], 'NX', 'GET')")?;
    let pack = load("#!lua\nreturn #cmsgpack.pack(ARGV)")?;
    // The prelude, without anything that is done with it.
    let prelude = Script::SubmitJob.code().split("\nECHO = ARGV").next().unwrap_or_default().to_owned();
    let prelude = load(&format!("{prelude}\nreturn 1"))?;
    for (name, command) in [
        ("PING", plain(&["PING"])),
        ("SET key record NX GET", plain(&["SET", &key, &record, "NX", "GET"])),
        ("ZADD LT: the hint", hint()),
        ("a script that does nothing, with all arguments", script(nothing)),
        ("… that calls TIME", script(time)),
        ("… that calls SET NX GET", script(set)),
        ("… that packs its arguments", script(pack)),
        ("… that only has the prelude", script(prelude)),
        ("submit_job as it is, without its hint", submit_job()),
    ] {
        let calls = redis.calls_in(bounds.window, MANY, &command).await?;
        let mut sides = Vec::new();
        for _ in 0..3 {
            redis.flush()?;
            sides.push(redis.benchmark(calls, MANY, &command).await?);
        }
        report.step(name, sides);
    }
    Ok(())
}

/// Makes sure that Redis knows the scripts that `redis-benchmark` calls.
pub(crate) fn redis_scripts(redis: &Redis) -> Result<()> {
    let sha1: String = redis.ask(&["SCRIPT", "LOAD", Script::SubmitJob.code()])?;
    if sha1 != Script::SubmitJob.sha1() {
        bail!("redis hashes submit_job as {sha1}, the library as {}", Script::SubmitJob.sha1());
    }
    Ok(())
}
