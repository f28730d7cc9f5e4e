//! Which level survives which failure: gateways as processes, a Redis at an address that a failover moves, and clients that remember
//! what they were told.
//!
//! The short forms are facts of the suite; `make durability` runs every cell and prints the table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use onejob::provider::simulated::Simulated;
use rustix::process::Signal;
use tempfile::TempDir;

use super::{follower_with, has_waitaof, leader, listen};
use crate::fleet::dice::setting;
use crate::http_support::raw;
use crate::support::gateway::{Gateway, Site};
use crate::support::{Redis, simulated, until, until_within};

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
    /// `fsync` over a file that is synced once a second, where the server says when (`WAITAOF`).
    FsyncEachSecond,
    Replicated,
}

impl Level {
    fn setting(self) -> &'static str {
        match self {
            Level::Memory => "memory",
            Level::Fsync | Level::FsyncEachSecond => "fsync",
            Level::Replicated => "{ replicated = 1 }",
        }
    }

    /// As the servers of that level are run, the replica as its master: it is to take its place.
    fn persistence(self) -> [&'static str; 4] {
        match self {
            Level::Memory | Level::FsyncEachSecond | Level::Replicated => ["--appendonly", "yes", "--appendfsync", "everysec"],
            Level::Fsync => ["--appendonly", "yes", "--appendfsync", "always"],
        }
    }

    /// `redis.durability_timeout`, and a lease that is longer than a write may take.
    fn patience(self) -> [&'static str; 2] {
        match self {
            Level::Memory | Level::Fsync | Level::Replicated => ["150ms", "5s"],
            Level::FsyncEachSecond => ["3s", "20s"],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// `kill -9` of the gateway.
    Gateway,
    /// `kill -9` of Redis. It starts again from its file; at `replicated` its replica is promoted.
    Redis,
    /// The replica gets nothing any more; then Redis dies, and the replica is promoted.
    Behind,
    /// The machine of Redis dies: what its file had not synced is gone. It starts again from the rest; at `replicated` its replica is
    /// promoted, and what is left of the old one follows it.
    Tail,
}

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Fault::Gateway => "the gateway is killed",
            Fault::Redis => "Redis is killed",
            Fault::Behind => "a replica that is behind is promoted",
            Fault::Tail => "the machine of Redis dies",
        }
    }
}

const LEVELS: [Level; 3] = [Level::Memory, Level::Fsync, Level::Replicated];
const FAULTS: [Fault; 4] = [Fault::Gateway, Fault::Redis, Fault::Behind, Fault::Tail];

/// Whether nothing that was acknowledged may be lost.
fn survives(level: Level, fault: Fault) -> bool {
    match (level, fault) {
        (Level::Memory, Fault::Behind | Fault::Tail) | (Level::Fsync, Fault::Behind) => false,
        (Level::Memory | Level::Fsync | Level::FsyncEachSecond | Level::Replicated, _) => true,
    }
}

/// How many of what was told before a failure are not so any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Gone {
    lost: usize,
    told: usize,
}

impl Gone {
    fn of<'a>(told: impl ExactSizeIterator<Item = &'a String>, holds: impl Fn(&str) -> bool) -> Gone {
        Gone { told: told.len(), lost: told.filter(|id| !holds(id)).count() }
    }
}

/// What a cell of the table says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lost {
    claims: Gone,
    results: Gone,
    cancels: Gone,
    /// Intents that were executed at all, after everybody had submitted again.
    executed: usize,
    /// Those of them that were executed more than once.
    more_than_once: usize,
    /// How often the one was that was executed most.
    most: usize,
}

impl Lost {
    fn nothing(self) -> bool {
        (self.claims.lost, self.results.lost, self.cancels.lost, self.more_than_once) == (0, 0, 0, 0)
    }

    /// Its row of the table.
    fn row(self, level: Level, fault: Fault) -> String {
        let of = |Gone { lost, told }: Gone| format!("{lost} of {told}");
        let [claims, results, cancels] = [self.claims, self.results, self.cancels].map(of);
        let Lost { executed, more_than_once, most, .. } = self;
        let (fault, level) = (fault.name(), level.setting());
        format!("| {fault} | `{level}` | {claims} | {results} | {cancels} | {more_than_once} of {executed} | {most} |")
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
        stage.replica = Some(stage.follower_of(&port).await);
        let master = stage.master.as_ref().unwrap();
        until("the replica has what the master writes", async || {
            let _heard: i64 = master.command(&["PUBLISH", "here", ""]).await;
            master.command::<i64>(&["WAIT", "1", "1000"]).await == 1
        })
        .await;
        stage
    }

    /// Where the first master keeps its file.
    fn data(&self) -> String {
        let data = self.dir.path().join("data");
        std::fs::create_dir_all(&data).unwrap();
        data.to_str().unwrap().to_owned()
    }

    async fn follower_of(&self, port: &str) -> Redis {
        follower_with(port, &self.level.persistence()).await
    }

    async fn start_master(&mut self) -> String {
        let data = self.data();
        let mut arguments = self.level.persistence().to_vec();
        arguments.extend_from_slice(&["--dir", &data]);
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
        let [timeout, lease] = self.level.patience();
        let settings = [
            ("redis.url", url.as_str()),
            ("redis.durability", self.level.setting()),
            ("redis.durability_timeout", timeout),
            ("redis.response_timeout", "400ms"),
            ("redis.connect_timeout", "100ms"),
            ("runtime.lease", lease),
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
            // Without one nothing would go on: what is left of the old master follows.
            let (port, data) = (listen(&replica).await, self.data());
            let arguments = [&self.level.persistence()[..], &["--dir", &data]].concat();
            self.replica = Some(follower_with(&port, &arguments).await);
        }
        self.point_at(&replica);
        self.master = Some(replica);
    }

    /// Waits until the disk has the whole file. From then on it gets nothing more, where the server would wait for it and say so.
    async fn hold_disk(&self) {
        if self.level == Level::FsyncEachSecond {
            let master = self.master.as_ref().unwrap();
            master.command::<()>(&["SET", "written", ""]).await;
            assert_eq!(master.command::<(u32, u32)>(&["WAITAOF", "1", "0", "9000"]).await, (1, 0));
            master.command::<()>(&["CONFIG", "SET", "appendfsync", "no"]).await;
        }
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
    let mut synced = 0;
    if fault == Fault::Tail {
        stage.hold_disk().await;
        synced = std::fs::metadata(stage.file()).unwrap().len();
    }
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
            lose_tail(&stage.file(), level, synced);
            if level == Level::Replicated {
                stage.promote_replica().await;
            } else {
                stage.start_master().await;
            }
        }
    }
    ready(&gateway).await;
    let mut jobs = BTreeMap::new();
    for id in &told.claims {
        jobs.insert(id.as_str(), answered(&gateway, id).await);
    }
    let there = |id: &str| jobs[id].status < 300;
    let ended = |id: &str| there(id) && ["succeeded", "failed", "canceled"].iter().any(|state| jobs[id].body["state"] == *state);
    let (claims, results) = (Gone::of(told.claims.iter(), there), Gone::of(told.results.iter(), ended));
    // A success may have come before the cancel.
    let cancels = Gone::of(told.cancels.iter(), |id| there(id) && (!jobs[id].body["canceled_by"].is_null() || ended(id)));
    // Whoever has no answer, or does not find its job, submits again.
    let mut open: Vec<(usize, String)> = (0..2 * intents).map(|number| (number, String::new())).collect();
    let began = Instant::now();
    while !open.is_empty() {
        assert!(began.elapsed() < SETTLED, "not settled: {open:#?}");
        let again = open.iter().map(async |(number, _)| (*number, unsettled(&gateway, *number).await));
        let again = join_all(again).await.into_iter();
        open = again.filter_map(|(number, answer)| Some((number, answer?))).collect();
    }
    let mut executed = BTreeMap::<String, usize>::new();
    for entry in stage.printer().ledger().entries.iter().filter(|entry| entry.executed) {
        *executed.entry(entry.body_sha256.clone()).or_default() += 1;
    }
    let more_than_once = executed.values().filter(|times| **times > 1).count();
    let most = executed.values().copied().max().unwrap_or(0);
    Lost { claims, results, cancels, executed: executed.len(), more_than_once, most }
}

/// What a machine that dies takes with it, simulated: where Redis syncs once a second, all that was written after a moment; where it
/// syncs before it answers, nothing that was answered, but the last command may be torn.
fn lose_tail(file: &Path, level: Level, synced: u64) {
    use std::io::Write as _;
    let mut file = std::fs::OpenOptions::new().append(true).open(file).unwrap();
    match level {
        Level::Fsync => file.write_all(b"*3\r\n$3\r\nSET\r\n$5\r\nto").unwrap(),
        Level::Memory | Level::FsyncEachSecond | Level::Replicated => file.set_len(synced).unwrap(),
    }
}

/// Submits an intent again; what was answered, unless it is settled.
async fn unsettled(gateway: &Gateway, number: usize) -> Option<String> {
    let (key, body) = (format!("key-{number}"), format!(r#"{{"route":"print","input":{}}}"#, input(number)));
    let headers = [("Idempotency-Key", key.as_str()), ("Prefer", "wait=1")];
    match gateway.send("POST", "/v1/jobs", &headers, &body).await {
        Some(answer) if answer.status == 200 || ["unknown", "canceling"].iter().any(|state| answer.body["state"] == *state) => {
            None
        }
        Some(answer) => Some(format!("{} {}", answer.status, answer.body)),
        None => Some("no answer".to_owned()),
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
    let lost = cell(Level::Memory, Fault::Behind, SHORT).await;
    assert!(lost.claims.lost > 0 && lost.results.lost > 0 && lost.most > 1, "the failure is not one: {lost:?}");
}

#[tokio::test]
async fn a_replica_that_was_behind_takes_back_what_one_disk_had() {
    let lost = cell(Level::Fsync, Fault::Behind, SHORT).await;
    assert!(lost.claims.lost > 0 && lost.results.lost > 0 && lost.most > 1, "the failure is not one: {lost:?}");
}

#[tokio::test]
async fn a_replica_that_was_behind_takes_back_nothing_that_replicated_acknowledged() {
    let lost = cell(Level::Replicated, Fault::Behind, SHORT).await;
    assert!(lost.nothing() && lost.claims.told >= SHORT / 2, "{lost:?}");
}

#[tokio::test]
async fn a_file_without_its_tail_has_all_that_fsync_acknowledged() {
    let lost = cell(Level::Fsync, Fault::Tail, SHORT).await;
    assert!(lost.nothing() && lost.claims.told >= SHORT, "{lost:?}");
}

/// The other half of it: what is on no disk yet was not acknowledged either.
#[tokio::test]
async fn a_file_that_is_synced_each_second_has_all_that_was_acknowledged_where_the_server_says_when() {
    if !has_waitaof(&Redis::start().await).await {
        return;
    }
    let lost = cell(Level::FsyncEachSecond, Fault::Tail, SHORT).await;
    assert!(lost.nothing() && lost.claims.told == SHORT && lost.executed == 2 * SHORT, "{lost:?}");
}

#[tokio::test]
async fn a_replica_has_all_that_replicated_acknowledged_when_the_tail_of_its_masters_file_is_lost() {
    let lost = cell(Level::Replicated, Fault::Tail, SHORT).await;
    assert!(lost.nothing() && lost.claims.told >= SHORT, "{lost:?}");
}

#[tokio::test]
async fn what_a_failover_took_back_is_counted_and_told() {
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
    // Somebody submits the key again, elsewhere, before it looks again: that there is a job under the key does not hide the loss.
    gateway.signal(Signal::STOP);
    stage.promote_replica().await;
    let other = stage.gateway().await;
    let mut again = Told::default();
    load(&other, 2..3, &mut again).await;
    assert!(!again.results.is_empty() && !again.results.contains(&gone), "{:?}", again.results);
    gateway.signal(Signal::CONT);
    until_within(SETTLED, "it is told", async || gateway.words().contains("redis has lost what it had acknowledged")).await;
    assert!(gateway.words().contains(&gone), "{}", gateway.words());
    let metrics = raw(gateway.addr(), b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    let lost: Vec<&str> = metrics.lines().filter(|line| line.starts_with("onejob_writes_lost_total{")).collect();
    for what in ["job", "ending", "stream"] {
        assert!(lost.contains(&format!("onejob_writes_lost_total{{what=\"{what}\"}} 1").as_str()), "{lost:?}");
    }
    assert_eq!(answered(&gateway, &gone).await.status, 404);
}

/// The head of the table, and one row for each cell.
const HEAD: &str = "\
    | failure | `redis.durability` | claims lost | results lost | cancels lost \
    | intents executed more than once | most executions of one |\n\
    |---|---|---:|---:|---:|---:|---:|\n";

#[tokio::test]
#[ignore = "takes minutes: make durability"]
async fn every_level_under_every_failure() {
    let intents = setting("ONEJOB_DURABILITY_INTENTS").map_or(LONG, |intents| usize::try_from(intents).unwrap());
    let (mut table, mut broken) = (HEAD.to_owned(), Vec::new());
    for fault in FAULTS {
        for level in LEVELS {
            let began = Instant::now();
            let lost = cell(level, fault, intents).await;
            let row = lost.row(level, fault);
            eprintln!("{:5.1?} {row}", began.elapsed());
            writeln!(table, "{row}").unwrap();
            if lost.nothing() != survives(level, fault) {
                broken.push(row);
            }
        }
    }
    println!("{table}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/verify/durability.md");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, table).unwrap();
    assert!(broken.is_empty(), "neither lost nor kept as it should be: {broken:#?}");
}

/// The table of the documentation: a row for each cell, and in each what its level promises.
#[test]
fn the_table_of_durability_has_every_cell_and_no_broken_promise() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/VERIFICATION.md")).unwrap();
    let (_, text) = text.split_once("<!-- durability -->\n").unwrap();
    let (table, _) = text.split_once("<!-- /durability -->").unwrap();
    let rows: Vec<&str> = table.trim().strip_prefix(HEAD).expect("its head").lines().collect();
    let cells = FAULTS.iter().flat_map(|fault| LEVELS.map(|level| (level, *fault)));
    assert_eq!(rows.len(), cells.clone().count());
    for (row, (level, fault)) in rows.iter().zip(cells) {
        assert!(row.starts_with(&format!("| {} | `{}` |", fault.name(), level.setting())), "{row}");
        let kept = row.matches(" 0 of ").count() == 4 && row.ends_with("| 1 |");
        assert_eq!(kept, survives(level, fault), "{row}");
    }
}
