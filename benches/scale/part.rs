//! A gateway as a process of the real program, in release, on the run's Redis.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::Command;

use crate::private::Redis;
use crate::process::{self, Part};

/// The gateway, built by the same call that built this.
const ONEJOB: &str = env!("CARGO_BIN_EXE_onejob");

/// What every gateway is told. Keys that are not here are as they come; the lease is shorter, so that the job of a gateway that was
/// killed is unknown within a phase, and the provider remembers keys, so that asking it settles the job.
const CONFIGURATION: &str = r#"
[server]
listen = "127.0.0.1:0"
[redis]
response_timeout = "2s"
[runtime]
lease = "6s"
lease_margin = "1s"
[provider.works]
base_url = "PROVIDER"
idempotency = { header = "idempotency-key", ttl = "1h" }
[route.print]
providers = ["works"]
reconcile = { first = "1s", max = "5s" }
"#;
/// Where nobody answers, for gateways that call no provider.
pub(crate) const NOBODY: &str = "http://127.0.0.1:1";

pub(crate) struct Gateway {
    part: Part,
    pub(crate) url: String,
    /// What it had spent when it was killed.
    spent: Option<Duration>,
    _directory: TempDir,
}

impl Gateway {
    pub(crate) async fn start(redis: &Redis, provider: &str) -> Result<Gateway> {
        let directory = process::directory()?;
        let path = |name: &str| -> PathBuf { directory.path().join(name) };
        std::fs::write(path("onejob.toml"), CONFIGURATION.replace("PROVIDER", provider))?;
        let mut command = Command::new(ONEJOB);
        command.env_clear().arg("serve").arg("--config").arg(path("onejob.toml")).args([
            "--log",
            "warn",
            "--redis",
            &redis.url(),
        ]);
        command.arg("--set").arg(format!("redis.data_dir={}", path("data").display()));
        command.stderr(std::fs::File::create(path("gateway.log"))?);
        let started = Part::start_and_listen(&mut command, "onejob listens on").await;
        let log = || std::fs::read_to_string(path("gateway.log")).unwrap_or_default();
        let (part, url) = started.with_context(|| format!("the gateway did not start: {}", log()))?;
        Ok(Gateway { part, url, spent: None, _directory: directory })
    }

    /// Processor time that it has spent, until its death if it is dead.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        self.spent.map_or_else(|| process::cpu(self.part.pid), Ok)
    }

    /// Dies at once, in the middle of whatever it does.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.spent = Some(process::cpu(self.part.pid)?);
        let pid = Pid::from_raw(self.part.pid.try_into()?).context("a child has an id")?;
        Ok(kill_process(pid, Signal::KILL)?)
    }
}
