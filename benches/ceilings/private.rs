//! A Redis of the run's own.

use anyhow::{Context as _, Result};
use tempfile::TempDir;
use tokio::process::Command;

use crate::process::{self, Part};

/// A private Redis that keeps nothing on disk.
pub(crate) struct Redis {
    pub(crate) part: Part,
    client: redis::Client,
    socket: String,
    _directory: TempDir,
}

impl Redis {
    pub(crate) async fn start() -> Result<Redis> {
        let directory = process::directory()?;
        let socket = directory.path().join("redis.sock").display().to_string();
        let mut command = Command::new("redis-server");
        command.args(["--port", "0", "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--unixsocket"]);
        command.arg(&socket).arg("--dir").arg(directory.path()).arg("--logfile").arg(directory.path().join("redis.log"));
        let part = Part::start(&mut command)?;
        let client = redis::Client::open(format!("redis+unix://{socket}"))?;
        let redis = Redis { part, client, socket, _directory: directory };
        process::until("redis answers", async || redis.ask::<String>(&["PING"]).is_ok()).await?;
        Ok(redis)
    }

    pub(crate) fn socket(&self) -> &str {
        &self.socket
    }

    pub(crate) fn url(&self) -> String {
        format!("redis+unix://{}", self.socket)
    }

    pub(crate) fn ask<T: redis::FromRedisValue>(&self, words: &[&str]) -> Result<T> {
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        Ok(command.query(&mut self.client.get_connection()?)?)
    }

    /// Forgets every key, and keeps the scripts.
    pub(crate) fn flush(&self) -> Result<()> {
        self.ask::<String>(&["FLUSHALL", "SYNC"]).map(drop)
    }

    pub(crate) fn used_memory(&self) -> Result<u64> {
        let info: String = self.ask(&["INFO", "memory"])?;
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).context("INFO tells used_memory")?;
        Ok(line.trim().parse()?)
    }
}
