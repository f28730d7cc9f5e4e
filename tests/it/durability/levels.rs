//! Which level survives which failure: gateways as processes, a Redis at an address that a failover moves, and clients that remember
//! what they were told.
//!
//! The short forms are facts of the suite; `make durability` runs every cell and prints the table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Display, Formatter};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::join_all;
use onejob::provider::simulated::Simulated;
use rustix::process::Signal;
use tempfile::TempDir;

use super::{LEVELS, follower, leader, listen};
use crate::fleet::dice::setting;
use crate::http_support::raw;
use crate::support::gateway::{Gateway, Site};
use crate::support::{Redis, simulated, standalone_only, until, until_within};

/// How many intents the short form has before the failure begins, and as many after.
const SHORT: usize = 12;
/// The same for the table.
const LONG: usize = 100;
/// Longer than a job takes to settle whatever happened.
const SETTLED: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Memory,
    Fsync,
    Replicated,
}

impl Level {
    fn setting(self) -> &'static str {
        match self {
            Level::Memory => "memory",
            Level::Fsync => "fsync",
            Level::Replicated => "{ replicated = 1 }",
        }
    }

    /// As a master of that level is run.
    fn persistence(self) -> [&'static str; 4] {
        match self {
            Level::Memory => ["--appendonly", "yes", "--appendfsync", "everysec"],
            Level::Fsync => ["--appendonly", "yes", "--appendfsync", "always"],
            Level::Replicated => ["--appendonly", "no", "--save", ""],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// `kill -9` of the gateway.
    Gateway,
    /// `kill -9` of Redis. It starts again from its file, or its replica is promoted where it keeps none.
    Redis,
    /// The replica gets nothing any more; then Redis dies, and the replica is promoted.
    Behind,
    /// The machine of Redis dies: what its file had not synced is gone.
    Tail,
}

/// What was told before a failure and is not so any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lost {
    acknowledged: usize,
    claims: usize,
    results: usize,
    cancels: usize,
    /// Intents that were executed more than once, after everybody had submitted again.
    executed_twice: usize,
}

impl Lost {
    fn nothing(self) -> bool {
        (self.claims, self.results, self.cancels, self.executed_twice) == (0, 0, 0, 0)
    }
}

impl Display for Lost {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Lost { acknowledged, claims, results, cancels, executed_twice } = self;
        write!(f, "{claims} / {results} / {cancels}; {executed_twice} of {acknowledged}")
    }
}

/// What clients were told.
#[derive(Default)]
struct Told {
    claims: BTreeSet<String>,
    results: BTreeSet<String>,
    cancels: BTreeSet<String>,
}

/// A Redis whose address is a link, so that a failover can move it.
struct Stage {
    level: Level,
    dir: TempDir,
    /// Gateways, provider; its own Redis is not used.
    site: Site,
    master: Option<Redis>,
    replica: Option<Redis>,
}

impl Stage {
    async fn set(level: Level) -> Stage {
        let dir = tempfile::tempdir().unwrap();
        let site = Site::open_before(simulated().await).await;
        let mut stage = Stage { level, dir, site, master: None, replica: None };
        let port = stage.start_master().await;
        stage.replica = Some(follower(&port).await);
        let master = stage.master.as_ref().unwrap();
        until("the replica has what the master writes", async || {
            let _heard: i64 = master.command(&["PUBLISH", "here", ""]).await;
            master.command::<i64>(&["WAIT", "1", "1000"]).await == 1
        })
        .await;
        stage
    }

    async fn start_master(&mut self) -> String {
        let data = self.dir.path().join("data");
        std::fs::create_dir_all(&data).unwrap();
        let mut arguments = self.level.persistence().to_vec();
        arguments.extend_from_slice(&["--dir", data.to_str().unwrap()]);
        let (master, port) = leader(&arguments).await;
        self.point_at(&master);
        self.master = Some(master);
        port
    }

    fn printer(&self) -> &Simulated {
        &self.site.printer
    }

    fn link(&self) -> PathBuf {
        self.dir.path().join("redis.sock")
    }

    /// The address leads to another server from now on.
    fn point_at(&self, redis: &Redis) {
        let socket = redis.url().strip_prefix("redis+unix://").unwrap();
        let new = self.dir.path().join("redis.new");
        std::os::unix::fs::symlink(socket, &new).unwrap();
        std::fs::rename(new, self.link()).unwrap();
    }

    async fn gateway(&self) -> Gateway {
        let url = format!("redis+unix://{}", self.link().display());
        let settings = [
            ("redis.url", url.as_str()),
            ("redis.durability", self.level.setting()),
            ("redis.durability_timeout", "150ms"),
            ("redis.response_timeout", "400ms"),
            ("redis.connect_timeout", "100ms"),
            ("runtime.lease", "5s"),
        ];
        self.site.start(&settings, None).await
    }

    async fn cut_replica(&self) {
        let replica = self.replica.as_ref().unwrap();
        replica.command::<()>(&["REPLICAOF", "127.0.0.1", "1"]).await;
        let master = self.master.as_ref().unwrap();
        until("the replica is cut off", async || {
            master.command::<String>(&["INFO", "replication"]).await.contains("connected_slaves:0")
        })
        .await;
    }

    async fn promote_replica(&mut self) {
        drop(self.master.take());
        let replica = self.replica.take().unwrap();
        replica.command::<()>(&["REPLICAOF", "NO", "ONE"]).await;
        if self.level == Level::Replicated {
            // Without one nothing would go on.
            self.replica = Some(follower(&listen(&replica).await).await);
        }
        self.point_at(&replica);
        self.master = Some(replica);
    }

    /// The append-only file that grows.
    fn file(&self) -> PathBuf {
        let dir = self.dir.path().join("data/appendonlydir");
        let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.retain(|path| path.to_str().unwrap().ends_with(".incr.aof"));
        files.sort();
        files.pop().unwrap()
    }
}

async fn ready(gateway: &Gateway) {
    until_within(SETTLED, "the gateway is ready", async || {
        raw(gateway.addr(), b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.starts_with("HTTP/1.1 200")
    })
    .await;
}

fn input(number: usize) -> String {
    // Every third is slow enough to be canceled.
    let simulate = if number.is_multiple_of(3) { "delay=700ms" } else { "delay=1ms" };
    format!(r#"{{"number":{number},"simulate":"{simulate}"}}"#)
}

/// One client: submits, and cancels every third.
async fn client(gateway: &Gateway, number: usize) -> Told {
    let mut told = Told::default();
    let cancels = number.is_multiple_of(3);
    let key = format!("key-{number}");
    let body = format!(r#"{{"route":"print","input":{}}}"#, input(number));
    let wait = if cancels { "respond-async" } else { "wait=1" };
    let Some(answer) = gateway.send("POST", "/v1/jobs", &[("Idempotency-Key", &key), ("Prefer", wait)], &body).await else {
        return told;
    };
    if answer.status >= 300 {
        return told;
    }
    let id = answer.body["id"].as_str().unwrap().to_owned();
    told.claims.insert(id.clone());
    if answer.status == 200 {
        told.results.insert(id.clone());
    }
    if cancels
        && let Some(answer) = gateway.send("POST", &format!("/v1/jobs/{id}/cancel"), &[], "").await
        && answer.status < 300
    {
        told.cancels.insert(id);
    }
    told
}

async fn load(gateway: &Gateway, numbers: std::ops::Range<usize>, told: &mut Told) {
    for heard in join_all(numbers.map(|number| client(gateway, number))).await {
        told.claims.extend(heard.claims);
        told.results.extend(heard.results);
        told.cancels.extend(heard.cancels);
    }
}

async fn cell(level: Level, fault: Fault, intents: usize) -> Lost {
    let mut stage = Stage::set(level).await;
    let mut gateway = stage.gateway().await;
    let mut told = Told::default();
    load(&gateway, 0..intents, &mut told).await;
    let synced = (fault == Fault::Tail).then(|| std::fs::metadata(stage.file()).unwrap().len());
    if fault == Fault::Behind {
        stage.cut_replica().await;
    }
    load(&gateway, intents..2 * intents, &mut told).await;
    match fault {
        Fault::Gateway => {
            gateway.signal(Signal::KILL);
            gateway.ended().await;
            gateway = stage.gateway().await;
        }
        Fault::Redis if level == Level::Replicated => stage.promote_replica().await,
        Fault::Behind => stage.promote_replica().await,
        Fault::Redis => {
            drop(stage.master.take());
            stage.start_master().await;
        }
        Fault::Tail => {
            drop(stage.master.take());
            lose_tail(&stage.file(), level, synced.unwrap());
            stage.start_master().await;
        }
    }
    ready(&gateway).await;
    let mut lost = Lost { acknowledged: told.claims.len(), ..Lost::default() };
    for id in &told.claims {
        let job = answered(&gateway, id).await;
        let there = job.status < 300;
        let ended = there && ["succeeded", "failed", "canceled"].contains(&job.body["state"].as_str().unwrap());
        lost.claims += usize::from(!there);
        lost.results += usize::from(told.results.contains(id) && !ended);
        // A success may have come first.
        let canceled = there && (!job.body["canceled_by"].is_null() || ended);
        lost.cancels += usize::from(told.cancels.contains(id) && !canceled);
    }
    // Whoever has no answer, or does not find its job, submits again.
    until_within(SETTLED, "every intent is settled", async || {
        let settled = (0..2 * intents).map(async |number| {
            let (key, body) = (format!("key-{number}"), format!(r#"{{"route":"print","input":{}}}"#, input(number)));
            let answer = gateway.send("POST", "/v1/jobs", &[("Idempotency-Key", &key), ("Prefer", "wait=1")], &body).await;
            answer.is_some_and(|answer| {
                answer.status == 200 || ["unknown", "canceling"].map(Into::into).contains(&answer.body["state"])
            })
        });
        join_all(settled).await.into_iter().all(|settled| settled)
    })
    .await;
    let mut executed = BTreeMap::<String, usize>::new();
    for entry in stage.printer().ledger().entries.iter().filter(|entry| entry.executed) {
        *executed.entry(entry.body_sha256.clone()).or_default() += 1;
    }
    lost.executed_twice = executed.values().filter(|times| **times > 1).count();
    lost
}

/// What a machine that dies takes with it, simulated: where Redis syncs once a second, all that was written after that moment; where
/// it syncs before it answers, nothing that was answered, but the last command may be torn.
fn lose_tail(file: &Path, level: Level, synced: u64) {
    use std::io::Write as _;
    let mut file = std::fs::OpenOptions::new().append(true).open(file).unwrap();
    match level {
        Level::Fsync => file.write_all(b"*3\r\n$3\r\nSET\r\n$5\r\nto").unwrap(),
        Level::Memory | Level::Replicated => file.set_len(synced).unwrap(),
    }
}

async fn answered(gateway: &Gateway, id: &str) -> crate::support::gateway::Answer {
    let mut answer = None;
    until("it is answered", async || {
        answer = gateway.job(id).await;
        answer.as_ref().is_some_and(|answer| answer.status < 500)
    })
    .await;
    answer.unwrap()
}

#[tokio::test]
async fn a_replica_that_was_behind_takes_back_what_memory_acknowledged() {
    if standalone_only(LEVELS) {
        return;
    }
    let lost = cell(Level::Memory, Fault::Behind, SHORT).await;
    assert!(lost.claims > 0 && lost.results > 0 && lost.executed_twice > 0, "the failure is not one: {lost}");
}

#[tokio::test]
async fn a_replica_that_was_behind_takes_back_nothing_that_replicated_acknowledged() {
    if standalone_only(LEVELS) {
        return;
    }
    let lost = cell(Level::Replicated, Fault::Behind, SHORT).await;
    assert!(lost.nothing() && lost.acknowledged >= SHORT / 2, "{lost}");
}

#[tokio::test]
async fn a_file_without_its_tail_has_all_that_fsync_acknowledged() {
    if standalone_only(LEVELS) {
        return;
    }
    let lost = cell(Level::Fsync, Fault::Tail, SHORT).await;
    assert!(lost.nothing() && lost.acknowledged >= SHORT, "{lost}");
}

#[tokio::test]
async fn what_a_failover_took_back_is_counted_and_told() {
    if standalone_only(LEVELS) {
        return;
    }
    let mut stage = Stage::set(Level::Memory).await;
    let gateway = stage.gateway().await;
    let mut told = Told::default();
    load(&gateway, 1..2, &mut told).await;
    until("it is ready", async || !told.claims.is_empty()).await;
    stage.cut_replica().await;
    load(&gateway, 2..3, &mut told).await;
    let gone = told.results.iter().next_back().unwrap().clone();
    // Long enough for a look at who answers: more such calls than the ones made here.
    let asked = async || -> usize {
        let info: String = stage.master.as_ref().unwrap().command(&["INFO", "commandstats"]).await;
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_info:calls=")).unwrap();
        line.split(',').next().unwrap().parse().unwrap()
    };
    let (before, mut own) = (asked().await, 0);
    until("it has looked who answers", async || {
        own += 1;
        asked().await > before + own + 1
    })
    .await;
    stage.promote_replica().await;
    until_within(SETTLED, "it is told", async || gateway.words().contains("redis has lost what it had acknowledged")).await;
    assert!(gateway.words().contains(&gone), "{}", gateway.words());
    let metrics = raw(gateway.addr(), b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    let lost: Vec<&str> = metrics.lines().filter(|line| line.starts_with("onejob_writes_lost_total{")).collect();
    for what in ["job", "ending", "stream"] {
        assert!(lost.contains(&format!("onejob_writes_lost_total{{what=\"{what}\"}} 1").as_str()), "{lost:?}");
    }
    assert_eq!(answered(&gateway, &gone).await.status, 404);
}

#[tokio::test]
#[ignore = "takes minutes: make durability"]
async fn every_level_under_every_failure() {
    if standalone_only(LEVELS) {
        return;
    }
    let intents = setting("ONEJOB_DURABILITY_INTENTS").map_or(LONG, |intents| usize::try_from(intents).unwrap());
    let faults = [
        (Fault::Gateway, "gateway killed"),
        (Fault::Redis, "Redis killed"),
        (Fault::Behind, "replica behind, then promoted"),
        (Fault::Tail, "machine of Redis lost: unsynced tail of the file (simulated)"),
    ];
    let mut table = String::from(
        "| claims / results / cancels lost; executed twice, of those acknowledged | `memory` | `fsync` | `{ replicated = 1 }` |\n\
         |---|---|---|---|\n",
    );
    let mut broken = Vec::new();
    for (fault, name) in faults {
        let mut row = format!("| {name} |");
        for level in [Level::Memory, Level::Fsync, Level::Replicated] {
            if (level, fault) == (Level::Replicated, Fault::Tail) {
                row.push_str(" as Redis killed |");
                continue;
            }
            let lost = cell(level, fault, intents).await;
            row.push_str(&format!(" {lost} |"));
            let survives = match (level, fault) {
                (Level::Memory, Fault::Behind | Fault::Tail) | (Level::Fsync, Fault::Behind) => false,
                (Level::Memory | Level::Fsync | Level::Replicated, _) => true,
            };
            if survives && !lost.nothing() {
                broken.push(format!("{level:?} {fault:?}: {lost}"));
            }
        }
        eprintln!("{row}");
        table.push_str(&row);
        table.push('\n');
    }
    println!("{table}");
    assert!(broken.is_empty(), "{broken:#?}");
}
