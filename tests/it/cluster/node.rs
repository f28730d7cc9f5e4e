//! A `redis-server` on a port of its own, as a node of a cluster, a replica or a sentinel; killed on drop.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::{FromRedisValue, RedisResult};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::server::program;
use crate::support::{SOON, until};

/// How long a command of the test's own may take.
const PATIENCE: Duration = Duration::from_secs(10);

pub struct Node {
    child: Child,
    pub port: u16,
    bus: u16,
    /// `:password@`, where it requires one.
    user: String,
    directory: TempDir,
}

impl Node {
    /// Starts a server with these settings, and waits until it answers.
    pub async fn start(settings: &[&str]) -> Node {
        let [port, bus] = free_ports();
        let directory = tempfile::tempdir().unwrap();
        let mut text = format!("port {port}\nbind 127.0.0.1\ndir {}\nlogfile redis.log\n", directory.path().display());
        for setting in settings {
            text.push_str(&setting.replace("{bus}", &bus.to_string()));
            text.push('\n');
        }
        let file = directory.path().join("redis.conf");
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(program());
        command.arg(&file);
        if settings.iter().any(|setting| setting.starts_with("sentinel ")) {
            command.arg("--sentinel");
        }
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let password = settings.iter().find_map(|setting| setting.strip_prefix("requirepass "));
        let user = password.map_or(String::new(), |password| format!(":{password}@"));
        let node = Node { child: command.spawn().expect("redis-server, 7.0 or newer, is installed"), port, bus, user, directory };
        until("a node answers", async || node.ask::<String>(&["PING"]).await.is_ok()).await;
        node
    }

    /// Starts a node of a cluster, without a slot yet.
    pub async fn of_cluster() -> Node {
        Node::of_cluster_with("maxmemory-policy noeviction").await
    }

    pub async fn of_cluster_with(setting: &str) -> Node {
        Node::start(&[
            "save \"\"",
            setting,
            "cluster-enabled yes",
            "cluster-port {bus}",
            "cluster-node-timeout 1000",
            "cluster-replica-validity-factor 0",
            "repl-diskless-sync-delay 0",
            "repl-ping-replica-period 1",
        ])
        .await
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Sends one command on a connection of its own.
    pub async fn ask<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let config =
            redis::AsyncConnectionConfig::new().set_connection_timeout(Some(PATIENCE)).set_response_timeout(Some(PATIENCE));
        let client = redis::Client::open(format!("redis://{}{}", self.user, self.address()))?;
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connection).await
    }

    /// Sends one command that must be obeyed.
    pub async fn tell<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.ask(words).await.unwrap_or_else(|error| panic!("{words:?}: {error}; see {}", self.directory.path().display()))
    }

    pub async fn id(&self) -> String {
        self.tell(&["CLUSTER", "MYID"]).await
    }

    /// A line of `INFO`.
    pub async fn info(&self, section: &str, name: &str) -> Option<String> {
        let info: String = self.ask(&["INFO", section]).await.ok()?;
        info.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
    }

    /// How often it was called by one command since its statistics were reset.
    pub async fn calls(&self, command: &str) -> u64 {
        let line = self.info("commandstats", &format!("cmdstat_{command}")).await.unwrap_or_default();
        let calls = line.strip_prefix("calls=").and_then(|rest| rest.split(',').next());
        calls.map_or(0, |calls| calls.parse().unwrap())
    }

    pub async fn is_master(&self) -> bool {
        self.info("replication", "role").await.is_some_and(|role| role == "master")
    }

    /// Takes no write any more, waits until this replica has all there was, and dies: nothing that was acknowledged is lost.
    pub async fn die_having_told(&mut self, replica: &Node) {
        self.tell::<()>(&["CLIENT", "PAUSE", "60000", "WRITE"]).await;
        until("the replica has everything", async || {
            let here = self.info("replication", "master_repl_offset").await.unwrap();
            replica.info("replication", "slave_repl_offset").await.is_some_and(|there| there == here)
        })
        .await;
        self.die();
    }

    /// Dies at once.
    pub fn die(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Its master tells it nothing any more, not even what is on its way.
    pub async fn cut_from(&self, master: &Node) {
        self.pause();
        master.tell::<i64>(&["CLIENT", "KILL", "TYPE", "REPLICA"]).await;
        until("it is cut off", async || master.info("replication", "connected_slaves").await.is_some_and(|count| count == "0"))
            .await;
    }

    /// It hangs; for its master it is there still.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// It goes on, and asks its master again.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Joins a master's cluster and follows it.
    pub async fn follow_in_cluster(&self, master: &Node) {
        self.tell::<()>(&["CLUSTER", "MEET", "127.0.0.1", &master.port.to_string(), &master.bus.to_string()]).await;
        let id = master.id().await;
        until("it follows", async || self.ask::<()>(&["CLUSTER", "REPLICATE", &id]).await.is_ok()).await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have died already; there is nothing to save.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Three masters with a third of the slots each, every one with a replica if that is wanted.
pub struct ThreeMasters {
    pub masters: Vec<Node>,
    pub replicas: Vec<Node>,
}

impl ThreeMasters {
    pub async fn start(replicated: bool) -> ThreeMasters {
        let mut masters = Vec::new();
        let mut replicas = Vec::new();
        for _ in 0..3 {
            masters.push(Node::of_cluster().await);
            if replicated {
                replicas.push(Node::of_cluster().await);
            }
        }
        for (master, slots) in masters.iter().zip([["0", "5460"], ["5461", "10922"], ["10923", "16383"]]) {
            master.tell::<()>(&["CLUSTER", "ADDSLOTSRANGE", slots[0], slots[1]]).await;
        }
        let first = &masters[0];
        for node in masters[1..].iter().chain(&replicas) {
            let (port, bus) = (node.port.to_string(), node.bus.to_string());
            first.tell::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]).await;
        }
        for (master, replica) in masters.iter().zip(&replicas) {
            let id = master.id().await;
            until("a replica follows its master", async || replica.ask::<()>(&["CLUSTER", "REPLICATE", &id]).await.is_ok()).await;
        }
        for (master, replica) in masters.iter().zip(&replicas) {
            until("a replica is in step", async || {
                replica.info("replication", "master_link_status").await.is_some_and(|status| status == "up")
                    && master.info("replication", "connected_slaves").await.is_some_and(|count| count == "1")
            })
            .await;
        }
        let cluster = ThreeMasters { masters, replicas };
        cluster.agree().await;
        cluster
    }

    /// Takes a node in, without a slot yet.
    pub async fn take_in(&mut self, node: Node) {
        let (port, bus) = (node.port.to_string(), node.bus.to_string());
        self.masters[0].tell::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]).await;
        self.masters.push(node);
        self.agree().await;
    }

    /// Waits until every node that lives has every slot in its map.
    pub async fn agree(&self) {
        let began = Instant::now();
        for node in self.masters.iter().chain(&self.replicas) {
            loop {
                let Ok(info) = node.ask::<String>(&["CLUSTER", "INFO"]).await else { break };
                let nodes = format!("cluster_known_nodes:{}", self.masters.len() + self.replicas.len());
                if info.contains("cluster_state:ok") && info.contains(&nodes) {
                    break;
                }
                assert!(began.elapsed() < SOON, "the cluster does not agree: {info}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// Moves a slot from one master to another, key by key, as `redis-cli --cluster reshard` does; so many keys were moved. The one
    /// that takes it knows no script.
    pub async fn move_slot(&self, slot: u16, from: &Node, to: &Node, mut after_each: impl AsyncFnMut()) -> usize {
        let (slot, port) = (slot.to_string(), to.port.to_string());
        let (from_id, to_id) = (from.id().await, to.id().await);
        to.tell::<()>(&["SCRIPT", "FLUSH"]).await;
        to.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await;
        from.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await;
        let mut moved = 0;
        loop {
            let some: Vec<String> = from.tell(&["CLUSTER", "GETKEYSINSLOT", &slot, "1"]).await;
            let Some(key) = some.first() else { break };
            from.tell::<String>(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]).await;
            moved += 1;
            after_each().await;
        }
        // The new owner first: the old one would send to one that does not know it yet.
        let others = self.masters.iter().filter(|node| node.port != from.port && node.port != to.port);
        for node in [to, from].into_iter().chain(others) {
            node.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).await;
        }
        moved
    }

    pub fn url(&self) -> String {
        let seeds: Vec<String> = self.masters.iter().map(Node::address).collect();
        format!("redis+cluster://{}", seeds.join(","))
    }
}

/// Two ports that nobody has at the moment.
fn free_ports() -> [u16; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}
