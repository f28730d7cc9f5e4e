//! A Redis that loses nothing it has answered: an append-only file synced at each write, a process that may be killed and
//! started again on the same socket and data. Where each Redis of a run is a cluster, it is one of one node.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use redis::FromRedisValue;
use rustix::process::Signal;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::signal;
use crate::support::SOON;
use crate::support::server::{as_cluster, free_ports, program};

/// How long an administrator's command may take.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Between two looks at a server that starts.
const START_PAUSE: Duration = Duration::from_millis(5);

/// The server; whoever changes how it is holds it meanwhile.
pub struct DurableRedis {
    directory: PathBuf,
    /// Its port and its bus, if it is a cluster.
    ports: Option<(String, String)>,
    /// More for its command line.
    arguments: Vec<String>,
    child: Mutex<Option<Child>>,
}

impl DurableRedis {
    /// A fleet's: a cluster, where the suite's are.
    pub async fn start(directory: &Path) -> DurableRedis {
        Self::start_at(directory, as_cluster().then(free_ports), &[]).await
    }

    /// A server of its own in every suite, with more arguments for `redis-server`.
    pub async fn start_with(directory: &Path, arguments: &[&str]) -> DurableRedis {
        Self::start_at(directory, None, arguments).await
    }

    async fn start_at(directory: &Path, ports: Option<(String, String)>, arguments: &[&str]) -> DurableRedis {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let redis = DurableRedis { directory: directory.to_owned(), ports, arguments, child: Mutex::new(None) };
        redis.run(&mut *redis.child.lock().await).await;
        redis
    }

    /// The port where it says that it is, if it is a cluster.
    pub fn announced(&self) -> Option<&str> {
        self.ports.as_ref().map(|(port, _)| port.as_str())
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.join("redis.sock")
    }

    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    async fn run(&self, child: &mut Option<Child>) {
        let mut command = Command::new(program());
        command
            .args(["--save", "", "--appendonly", "yes", "--appendfsync", "always"])
            .args(["--maxmemory-policy", "noeviction", "--unixsocket"])
            .arg(self.socket())
            .arg("--dir")
            .arg(&self.directory)
            .arg("--logfile")
            .arg(self.directory.join("redis.log"))
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        match &self.ports {
            None => command.args(["--port", "0"]),
            Some((port, bus)) => command
                .args(["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1", "--bind", "127.0.0.1"])
                .args(["--port", port, "--cluster-port", bus]),
        };
        *child = Some(command.spawn().expect("redis-server, 7.0 or newer, is installed"));
        let deadline = Instant::now() + SOON;
        while !self.ask::<String>(&["PING"]).await.is_ok_and(|pong| pong == "PONG") {
            assert!(Instant::now() < deadline, "redis does not answer within {SOON:?}, see {}", self.directory.display());
            tokio::time::sleep(START_PAUSE).await;
        }
        if self.ports.is_some() {
            // Refused if it has them already.
            let _ = self.ask::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).await;
            while self.ask::<()>(&["EXISTS", "{test}"]).await.is_err() {
                assert!(Instant::now() < deadline, "the cluster does not take its slots, see {}", self.directory.display());
                tokio::time::sleep(START_PAUSE).await;
            }
        }
    }

    /// Sends one command on a connection of its own.
    pub async fn ask<T: FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        redis::cmd(words[0]).arg(&words[1..]).query_async(&mut self.connect().await?).await
    }

    /// Sends the same command about many keys, in one pipeline.
    pub async fn ask_of_each<T: FromRedisValue>(&self, command: &str, keys: &[String], rest: &[&str]) -> Vec<T> {
        let mut pipeline = redis::pipe();
        for key in keys {
            pipeline.cmd(command).arg(key).arg(rest);
        }
        pipeline.query_async(&mut self.connect().await.unwrap()).await.unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    async fn connect(&self) -> redis::RedisResult<redis::aio::MultiplexedConnection> {
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(ADMIN_TIMEOUT))
            .set_response_timeout(Some(ADMIN_TIMEOUT));
        redis::Client::open(self.url())?.get_multiplexed_async_connection_with_config(&config).await
    }

    /// Sends one command that must be obeyed, while nobody else changes how the server is.
    pub async fn tell(&self, words: &[&str]) {
        let _child = self.child.lock().await;
        let _: redis::Value = self.ask(words).await.unwrap_or_else(|error| panic!("{words:?}: {error}"));
    }

    /// Stops answering for a while, without closing a connection.
    pub async fn pause(&self, length: Duration) {
        let child = self.child.lock().await;
        send(&child, Signal::STOP);
        tokio::time::sleep(length).await;
        send(&child, Signal::CONT);
    }

    /// Stops answering, without closing a connection, until it is thawed.
    pub async fn freeze(&self) {
        send(&*self.child.lock().await, Signal::STOP);
    }

    pub async fn thaw(&self) {
        send(&*self.child.lock().await, Signal::CONT);
    }

    /// Dies at once, and is started again after a while.
    pub async fn kill(&self, down: Duration) {
        let mut child = self.child.lock().await;
        die(&mut child).await;
        tokio::time::sleep(down).await;
        self.run(&mut child).await;
    }

    /// Dies at once, until it is revived.
    pub async fn die(&self) {
        die(&mut *self.child.lock().await).await;
    }

    pub async fn revive(&self) {
        self.run(&mut *self.child.lock().await).await;
    }

    /// Is shut down in order, and started again after a while.
    pub async fn shut_down(&self, down: Duration) {
        let mut child = self.child.lock().await;
        // The reply to it is a closed connection.
        let _ = self.ask::<redis::Value>(&["SHUTDOWN"]).await;
        let ended = tokio::time::timeout(ADMIN_TIMEOUT, child.take().expect("it runs").wait()).await;
        assert!(ended.is_ok_and(|status| status.is_ok_and(|status| status.success())), "redis shuts down in order");
        tokio::time::sleep(down).await;
        self.run(&mut child).await;
    }
}

fn send(child: &Option<Child>, what: Signal) {
    signal(child.as_ref().and_then(Child::id).expect("it runs"), what);
}

async fn die(child: &mut Option<Child>) {
    child.take().expect("it runs").kill().await.expect("a process of ours");
}
