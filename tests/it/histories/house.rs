//! The servers of a round: one that loses nothing it has answered, a chain of three, or a cluster; and what is done to them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onejob::store::{Durability, Store, StoreOptions};
use redis::{RedisResult, Value};
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::sync::Mutex;

use super::kinds::Kind;
use super::wire::{Making, Upstream, Wire};
use crate::cluster::node::{Node, ThreeMasters};
use crate::cluster::slot_of;
use crate::fleet::dice::Dice;
use crate::fleet::redis::DurableRedis;
use crate::fleet::signal;
use crate::support::{Submission, ageing, until};

/// How long a worker waits for a reply.
const PATIENCE: Duration = Duration::from_millis(400);
/// How long a replica has for a write.
const REPLICA_PATIENCE: Duration = Duration::from_millis(200);
/// The same, as `WAIT` takes it.
const REPLICA_PATIENCE_MS: &str = "200";
/// How long the judge waits.
const CALM_PATIENCE: Duration = Duration::from_secs(10);

/// The settings of each server of a chain.
const CHAINED: [&str; 3] = ["save \"\"", "maxmemory-policy noeviction", "repl-diskless-sync-delay 0"];

pub enum House {
    One {
        redis: DurableRedis,
        _directory: TempDir,
    },
    /// A master, its replica, and a replica of that one, so that it has one too when it is the master.
    Chain {
        master: Mutex<Option<Node>>,
        heir: Node,
        _last: Node,
        promoted: AtomicBool,
    },
    Cluster(ThreeMasters),
}

impl House {
    pub async fn start(kind: Kind) -> House {
        match kind {
            Kind::Failover | Kind::Loses => {
                let master = Node::start(&CHAINED).await;
                let heir = follower(&master).await;
                let last = follower(&heir).await;
                until("the replica has what the master writes", async || {
                    let (mut publish, mut wait) = (redis::cmd("PUBLISH"), redis::cmd("WAIT"));
                    publish.arg("here").arg("");
                    wait.arg(1).arg(1_000);
                    matches!(send(&url(&master), &[publish, wait]).await.as_deref(), Ok([_, Value::Int(1..)]))
                })
                .await;
                House::Chain { master: Mutex::new(Some(master)), heir, _last: last, promoted: AtomicBool::new(false) }
            }
            Kind::Slots => House::Cluster(ThreeMasters::start(false).await),
            _ => {
                let directory = tempfile::tempdir().unwrap();
                let redis = DurableRedis::start_with(directory.path(), &["--enable-debug-command", "yes"]).await;
                House::One { redis, _directory: directory }
            }
        }
    }

    /// The wires of so many workers: one each, or one for each node of a cluster.
    pub async fn wires(&self, workers: usize, making: impl Fn(usize, Option<usize>, Upstream) -> Making) -> Vec<Wire> {
        let mut wires = Vec::new();
        match self {
            House::One { redis, .. } => {
                for worker in 0..workers {
                    wires.push(Wire::start(making(worker, Some(worker), Upstream::Socket(redis.socket()))).await);
                }
            }
            House::Chain { master, .. } => {
                let upstream = Upstream::Port(master.lock().await.as_ref().expect("it lives").port);
                for worker in 0..workers {
                    wires.push(Wire::start(making(worker, Some(worker), upstream.clone())).await);
                }
            }
            House::Cluster(cluster) => {
                for (place, master) in cluster.masters.iter().enumerate() {
                    let wire = Wire::start(making(place, None, Upstream::Port(master.port))).await;
                    master.tell::<()>(&["CONFIG", "SET", "cluster-announce-port", &wire.port().to_string()]).await;
                    wires.push(wire);
                }
                until("every node is known by its wire", async || {
                    for master in &cluster.masters {
                        let nodes: String = master.tell(&["CLUSTER", "NODES"]).await;
                        if !wires.iter().all(|wire| nodes.contains(&format!(":{}@", wire.port()))) {
                            return false;
                        }
                    }
                    true
                })
                .await;
            }
        }
        wires
    }

    /// A worker's store.
    pub async fn store(&self, kind: Kind, worker: usize, wires: &[Wire]) -> Store {
        let url = match self {
            House::One { .. } | House::Chain { .. } => format!("redis://127.0.0.1:{}", wires[worker].port()),
            House::Cluster(_) => {
                let seeds: Vec<String> = wires.iter().map(|wire| format!("127.0.0.1:{}", wire.port())).collect();
                format!("redis+cluster://{}", seeds.join(","))
            }
        };
        let durability = match self {
            House::One { .. } => Durability::Fsync,
            House::Chain { .. } => Durability::Replicated(1),
            House::Cluster(_) => Durability::Memory,
        };
        let options = StoreOptions {
            lanes: 3,
            response_timeout: PATIENCE,
            durability,
            durability_timeout: REPLICA_PATIENCE,
            ..StoreOptions::new(&url)
        };
        // Nothing is broken yet, but the machine may be busy.
        let mut connected = None;
        until("a worker is connected", async || {
            connected = Store::connect(options.clone()).await.ok();
            connected.is_some()
        })
        .await;
        let (store, _) = connected.expect("it was waited for");
        match kind {
            // What a replica does not have yet is lost with its master: there, only such answers bind.
            Kind::Failover => store.committing(),
            Kind::Loses => store,
            // Both ways to the same record.
            _ if worker.is_multiple_of(2) => store.committing(),
            _ => store,
        }
    }

    /// The judge's store, once all is calm.
    pub async fn judge(&self, wires: &[Wire]) -> Store {
        let url = match self {
            House::One { redis, .. } => redis.url(),
            House::Chain { heir, .. } => url(heir),
            House::Cluster(_) => format!("redis+cluster://127.0.0.1:{}", wires[0].port()),
        };
        let options = StoreOptions { connect_timeout: CALM_PATIENCE, response_timeout: CALM_PATIENCE, ..StoreOptions::new(&url) };
        Store::connect(options).await.expect("all is calm").0
    }

    /// The URLs of the servers that have the records now.
    pub fn servers(&self) -> Vec<String> {
        match self {
            House::One { redis, .. } => vec![redis.url()],
            House::Chain { heir, .. } => vec![url(heir)],
            House::Cluster(cluster) => cluster.masters.iter().map(url).collect(),
        }
    }

    /// Lets time pass for one record; whether that is known to have happened, and to stay.
    pub async fn age(&self, key: &str, by_ms: u64) -> bool {
        let mut command = redis::cmd("EVAL");
        command.arg(ageing()).arg(1).arg(key).arg(by_ms);
        match self {
            House::One { redis, .. } => send(&redis.url(), &[command]).await.is_ok(),
            House::Chain { master, heir, promoted, .. } => {
                let old = master.lock().await.as_ref().map(url);
                let now = if promoted.load(Ordering::SeqCst) { url(heir) } else { old.unwrap_or_default() };
                let mut wait = redis::cmd("WAIT");
                wait.arg(1).arg(REPLICA_PATIENCE_MS);
                matches!(send(&now, &[command, wait]).await.as_deref(), Ok([_, Value::Int(1..)]))
            }
            House::Cluster(cluster) => {
                let mut asking = None;
                for master in &cluster.masters {
                    match send(&url(master), &[command.clone()]).await {
                        Ok(_) => return true,
                        Err(error) if error.code() == Some("ASK") => asking = Some(()),
                        Err(_) => {}
                    }
                }
                if asking.is_some() {
                    for master in &cluster.masters {
                        let asked = [redis::cmd("ASKING"), command.clone()];
                        if send(&url(master), &asked).await.is_ok() {
                            return true;
                        }
                    }
                }
                false
            }
        }
    }

    /// What is done to it while the workers work; ends when they have ended, with all that was broken whole again.
    pub async fn weather(&self, kind: Kind, dice: &mut Dice, wires: &[Wire], jobs: &[Submission], over: &AtomicBool) {
        let mut turn = 0;
        while !over.load(Ordering::SeqCst) {
            turn += 1;
            match self {
                House::One { redis, .. } => {
                    tokio::time::sleep(dice.between_ms(250, 600)).await;
                    let length = dice.between_ms(150, 700);
                    match kind {
                        Kind::Killed => redis.kill(length / 4).await,
                        Kind::Paused => redis.pause(length).await,
                        Kind::Slept => {
                            redis.tell(&["DEBUG", "SLEEP", &length.as_secs_f64().to_string()]).await;
                        }
                        Kind::Cut => redis.tell(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await,
                        Kind::Forgotten => redis.tell(&["SCRIPT", "FLUSH"]).await,
                        Kind::Memory => {
                            redis.tell(&["CONFIG", "SET", "maxmemory", "1"]).await;
                            tokio::time::sleep(length / 4).await;
                            redis.tell(&["CONFIG", "SET", "maxmemory", "0"]).await;
                        }
                        Kind::NoReplicas => {
                            redis.tell(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
                            tokio::time::sleep(length / 4).await;
                            redis.tell(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await;
                        }
                        Kind::Lost | Kind::Twice | Kind::Held | Kind::Failover | Kind::Loses | Kind::Slots => {}
                    }
                }
                House::Chain { master, heir, promoted, .. } if turn == 1 => {
                    tokio::time::sleep(dice.between_ms(500, 900)).await;
                    signal(heir.pid(), Signal::STOP);
                    // What is on its way the heir may still read when it goes on; what comes after the cut is lost with the master.
                    if kind == Kind::Loses || dice.percent(50) {
                        let master = master.lock().await;
                        master.as_ref().expect("it lives").tell::<u64>(&["CLIENT", "KILL", "TYPE", "replica"]).await;
                    }
                    tokio::time::sleep(dice.between_ms(300, 700)).await;
                    drop(master.lock().await.take());
                    signal(heir.pid(), Signal::CONT);
                    heir.tell::<()>(&["REPLICAOF", "NO", "ONE"]).await;
                    promoted.store(true, Ordering::SeqCst);
                    for wire in wires {
                        wire.lead_to(Upstream::Port(heir.port));
                    }
                }
                House::Cluster(cluster) if turn <= 2 => {
                    let (from, to) = if turn == 1 { (0, 2) } else { (2, 0) };
                    // Two jobs may share one.
                    let slots: BTreeSet<u16> = jobs.iter().map(|job| slot_of(&job.identity().to_string())).collect();
                    for slot in slots {
                        move_slot(cluster, from, to, slot).await;
                    }
                }
                House::Chain { .. } | House::Cluster(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }
}

/// A server that has all that another one has.
async fn follower(of: &Node) -> Node {
    let replica_of = format!("replicaof 127.0.0.1 {}", of.port);
    let node = Node::start(&[&CHAINED[..], &[&replica_of]].concat()).await;
    until("the replica follows", async || {
        node.info("replication", "master_link_status").await.is_some_and(|status| status == "up")
    })
    .await;
    node
}

fn url(node: &Node) -> String {
    format!("redis://{}", node.address())
}

/// Moves one slot, with calls for its keys between any two of the steps.
async fn move_slot(cluster: &ThreeMasters, from: usize, to: usize, slot: u16) {
    let (from, to, slot) = (&cluster.masters[from], &cluster.masters[to], slot.to_string());
    let (from_id, to_id, port) = (from.id().await, to.id().await, to.port.to_string());
    to.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await;
    from.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await;
    loop {
        let some: Vec<String> = from.tell(&["CLUSTER", "GETKEYSINSLOT", &slot, "1"]).await;
        let Some(key) = some.first() else { break };
        from.tell::<String>(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]).await;
    }
    for node in [to, from, &cluster.masters[1]] {
        node.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).await;
    }
}

/// Sends commands by a connection of their own, once.
async fn send(url: &str, commands: &[redis::Cmd]) -> RedisResult<Vec<Value>> {
    let config =
        redis::AsyncConnectionConfig::new().set_connection_timeout(Some(PATIENCE)).set_response_timeout(Some(CALM_PATIENCE));
    let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await?;
    let mut pipeline = redis::pipe();
    for command in commands {
        pipeline.add_command(command.clone());
    }
    pipeline.query_async(&mut connection).await
}
