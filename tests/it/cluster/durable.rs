//! Levels of durability where there are several masters, or one that a sentinel names: each call is waited for by the node that
//! executed it, and what a replica did not have when it was promoted was acknowledged to nobody.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use onejob::attempt::FinishOutcome;
use onejob::error::{StoreError, Want};
use onejob::fingerprint::digest;
use onejob::job::{Identity, JobState, Owner};
use onejob::provider::simulated::Simulated;
use onejob::store::{Durability, Follow, Read, Store, StoreOptions, Submitted};
use serde_json::{Value, json};

use super::node::{Node, ThreeMasters};
use super::{keys_of_one_slot, slot_of};
use crate::cli::run;
use crate::http_support::{Client, Served, serve_at};
use crate::support::{Answer, Call, First, Submission, simulated, until};

/// How long replicas, or a disk, have for a write.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Intents before the replica is cut off, and as many after.
const INTENTS: usize = 9;

async fn gateway(url: &str, provider: &Simulated, durability: Durability) -> Served {
    serve_at(url, provider, |setup| {
        (setup.store.durability, setup.store.durability_timeout) = (durability, TIMEOUT);
        (setup.store.response_timeout, setup.store.connect_timeout) = (Duration::from_secs(1), Duration::from_secs(1));
    })
    .await
}

async fn store(url: &str, durability: Durability) -> Result<(Store, Vec<String>), StoreError> {
    let patience = Duration::from_secs(2);
    let options = StoreOptions {
        durability,
        durability_timeout: TIMEOUT,
        connect_timeout: patience,
        response_timeout: patience,
        ..StoreOptions::new(url)
    };
    Store::connect(options).await.map(|(store, checked)| (store, checked.warnings))
}

/// Which of the three masters has the job of a key of alice's.
fn master_of(key: &str) -> usize {
    usize::from(slot_of(&Identity::of(&digest("alice", key)).to_string())).min(16_383) / 5_462
}

/// Keys whose jobs are at one of the three masters, and keys whose jobs are not.
fn keys_at(master: usize, count: usize) -> (Vec<String>, Vec<String>) {
    let keys = |here: bool| {
        let keys = (0..).map(move |number| format!("order-{number}"));
        keys.filter(|key| (master_of(key) == master) == here).take(count).collect()
    };
    (keys(true), keys(false))
}

async fn submit(alice: &Client, key: &str) -> (u16, Value) {
    let answer = alice.submit_with("print", key, &format!("{{\"key\":\"{key}\"}}"), &[("prefer", "wait=10")]).await;
    (answer.status, answer.json())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_masters_replica_does_not_have_is_not_sent_and_other_masters_go_on() {
    let cluster = ThreeMasters::start(true).await;
    let provider = simulated().await;
    let served = gateway(&cluster.url(), &provider, Durability::Replicated(1)).await;
    let alice = served.client.with_token("alice");
    let (here, elsewhere) = keys_at(0, 4);
    assert_eq!(submit(&alice, &here[0]).await.0, 200);
    cluster.replicas[0].cut_from(&cluster.masters[0]).await;
    let (status, problem) = submit(&alice, &here[1]).await;
    assert_eq!((status, &problem["have"], &problem["want"]), (503, &json!(0), &json!(1)), "{problem}");
    assert_eq!(provider.ledger().executed, 1, "a byte left before its write-ahead was durable");
    for key in &elsewhere {
        assert_eq!(submit(&alice, key).await.0, 200, "{key}");
    }
    // What had ended is not told either: its replica may be promoted now.
    let id = alice.submit("print", &here[0], &format!("{{\"key\":\"{}\"}}", here[0])).await.is(202).job_id();
    assert_eq!(alice.get(&format!("/v1/jobs/{id}")).await.is(202).json()["state"], "running");
    let url = format!("redis.url={}", cluster.url());
    let doctor = run(&["--json", "--set", &url, "--set", "redis.durability={ replicated = 1 }", "doctor"]).await.expect(6).json();
    let findings = doctor["findings"].as_array().unwrap().iter().filter(|finding| finding["check"] == "durability");
    let verdicts: BTreeMap<String, &str> =
        findings.map(|finding| (finding["found"].as_str().unwrap().to_owned(), finding["verdict"].as_str().unwrap())).collect();
    let bad: Vec<&String> = verdicts.iter().filter(|(_, verdict)| **verdict == "bad").map(|(found, _)| found).collect();
    assert!(verdicts.len() == 3 && bad.len() == 1, "{verdicts:?}");
    assert!(bad[0].starts_with(&cluster.masters[0].address()) && bad[0].contains("0 of 1 replicas"), "{bad:?}");
    let advice = doctor["findings"].as_array().unwrap().iter().filter_map(|finding| finding["advice"].as_str());
    assert!(advice.into_iter().any(|advice| advice.contains("of the jobs of this master")), "{doctor:#}");
    let (looking, warnings) = store(&cluster.url(), Durability::Replicated(1)).await.unwrap();
    looking.close().await;
    let held = "0 of 1 replicas are connected: no work with effects is begun for jobs of this master until they are";
    assert!(
        warnings.len() == 1 && warnings[0].contains(held) && warnings[0].starts_with(&cluster.masters[0].address()),
        "{warnings:?}"
    );
    cluster.replicas[0].resume();
    until("it goes on", async || submit(&alice, &here[1]).await.0 == 200).await;
    assert_eq!(alice.get(&format!("/v1/jobs/{id}")).await.is(200).json()["state"], "succeeded");
    assert_eq!(provider.ledger().executed as usize, 2 + elsewhere.len());
}

/// The replica is there, as far as its master knows, and has stopped. Whoever has written nothing himself is told nothing either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ending_is_not_read_before_the_replica_has_it_by_whoever_did_not_write_it() {
    let cluster = ThreeMasters::start(true).await;
    let (writer, _) = store(&cluster.url(), Durability::Memory).await.unwrap();
    let (reader, _) = store(&cluster.url(), Durability::Replicated(1)).await.unwrap();
    let submission = Submission { first: First::Running, ..Submission::new("order-1") };
    Call::Submit(submission.clone()).send(&writer).await.unwrap();
    let (job, token) = (submission.id(), submission.token);
    for replica in &cluster.replicas {
        replica.pause();
    }
    let (number, outcome, body, follow) = (1, FinishOutcome::Succeeded, "done".to_owned(), Follow::End);
    Call::Finish { job, number, token, outcome, body, follow }.send(&writer).await.unwrap();
    let told = async || match reader.read_told(job.identity()).await.unwrap() {
        Read::Found(job) => job.state,
        other => panic!("{other:?}"),
    };
    assert_eq!(told().await, JobState::Running);
    for replica in &cluster.replicas {
        replica.resume();
    }
    until("it is told", async || told().await == JobState::Succeeded).await;
}

/// While a slot moves, and once it has: a node that sends a call on proves nothing of it, whatever its own replica has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_sent_on_is_waited_for_by_the_node_that_executed_it() {
    let cluster = ThreeMasters::start(true).await;
    let (store, _) = store(&cluster.url(), Durability::Replicated(1)).await.unwrap();
    let committing = store.committing();
    let (slot, keys) = keys_of_one_slot("shop", 4);
    let submit = async |key: &str| {
        let submission = Submission { first: First::Running, ..Submission::new(key) };
        Call::Submit(submission).send(&committing).await
    };
    let (from, to) = (&cluster.masters[0], &cluster.masters[2]);
    let (from_id, to_id, slot) = (from.id().await, to.id().await, slot.to_string());
    to.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await;
    from.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await;
    let created = |answer: Result<Answer, StoreError>| {
        assert!(matches!(answer, Ok(Answer::Submitted(Submitted::Created { .. }))), "{answer:?}");
    };
    // ASK: the replica of the node that it is sent to is the one that counts.
    cluster.replicas[2].cut_from(to).await;
    let short = submit(&keys[0]).await.unwrap_err();
    assert_eq!(short, StoreError::NotDurable { have: 0, want: Want::Replicas(1) });
    cluster.replicas[2].resume();
    until("the replica is back", async || to.info("replication", "connected_slaves").await.is_some_and(|count| count == "1"))
        .await;
    cluster.replicas[0].cut_from(from).await;
    created(submit(&keys[1]).await);
    // MOVED.
    for node in [to, from, &cluster.masters[1]] {
        node.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).await;
    }
    created(submit(&keys[2]).await);
    cluster.replicas[2].cut_from(to).await;
    let short = submit(&keys[3]).await.unwrap_err();
    assert_eq!(short, StoreError::NotDurable { have: 0, want: Want::Replicas(1) });
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_fsync_every_master_of_a_cluster_must_have_its_file_on_disk() {
    let cluster = ThreeMasters::start(false).await;
    for (number, master) in cluster.masters.iter().enumerate() {
        let Err(refused) = store(&cluster.url(), Durability::Fsync).await else { panic!("{number}: it starts") };
        assert!(refused.to_string().contains("appendonly is off"), "{refused}");
        let wrong = &cluster.masters[number..];
        assert!(wrong.iter().any(|master| refused.to_string().contains(&master.address())), "{refused}");
        master.tell::<()>(&["CONFIG", "SET", "appendonly", "yes", "appendfsync", "always"]).await;
    }
    let (store, warnings) = store(&cluster.url(), Durability::Fsync).await.unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    let committing = store.committing();
    let (here, elsewhere) = keys_at(0, 4);
    let claim = async |key: &str| {
        let submission = Submission { owner: Owner::new("alice").unwrap(), ..Submission::new(key) };
        Call::Submit(submission).send(&committing).await
    };
    for key in here[..2].iter().chain(&elsewhere[..2]) {
        until("it is on disk", async || claim(key).await.is_ok()).await;
    }
    // So has one that a slot is being moved to.
    let (slot, moving) = keys_of_one_slot("shop", 1);
    let (from, to, slot) = (&cluster.masters[0], &cluster.masters[2], slot.to_string());
    to.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from.id().await]).await;
    from.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to.id().await]).await;
    Call::Submit(Submission::new(&moving[0])).send(&committing).await.unwrap();
    from.tell::<()>(&["CONFIG", "SET", "appendfsync", "no"]).await;
    until("it is noticed", async || {
        claim(&here[2]).await.is_err_and(|error| error == StoreError::NotDurable { have: 0, want: Want::Disk })
    })
    .await;
    for key in &elsewhere[2..] {
        claim(key).await.unwrap();
    }
    store.close().await;
}

/// What must be durable has a connection of its own, which works on: it leaves the old master all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_commit_lane_leaves_a_master_that_the_sentinel_does_not_name_any_more() {
    let settings = ["save \"\"", "maxmemory-policy noeviction", "appendonly yes", "appendfsync always"];
    let (old, new) = (Node::start(&settings).await, Node::start(&settings).await);
    let sentinel = Node::start(&[&format!("sentinel monitor jobs 127.0.0.1 {} 1", old.port)]).await;
    let url = format!("redis+sentinel://{}/jobs", sentinel.address());
    let (store, _) = store(&url, Durability::Fsync).await.unwrap();
    let committing = store.committing();
    let mut number = 0;
    let mut claim = async || {
        number += 1;
        Call::Submit(Submission::new(&format!("key-{number}"))).send(&committing).await
    };
    claim().await.unwrap();
    let clients: String = old.tell(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    let id = |line: &str| line.strip_prefix("id=")?.split(' ').next().map(str::to_owned);
    let commit =
        clients.lines().find(|line| line.contains("cmd=config") || line.contains("cmd=waitaof") || line.contains("cmd=eval"));
    let commit = commit.and_then(id).unwrap_or_else(|| panic!("{clients}"));
    sentinel.tell::<()>(&["SENTINEL", "REMOVE", "jobs"]).await;
    sentinel.tell::<()>(&["SENTINEL", "MONITOR", "jobs", "127.0.0.1", &new.port.to_string(), "1"]).await;
    // Whatever else is there breaks, and asks the sentinel anew.
    for other in clients.lines().filter_map(id).filter(|other| *other != commit) {
        let _gone: Result<i64, _> = old.ask(&["CLIENT", "KILL", "ID", &other]).await;
    }
    let claims = async |redis: &Node| -> usize {
        let keys: Vec<String> = redis.tell(&["KEYS", "oj:{*}"]).await;
        keys.len()
    };
    until("a job comes to the new master", async || {
        let _ = (store.read_job(Submission::new("key-1").identity()).await, claim().await);
        claims(&new).await > 0
    })
    .await;
    let before = claims(&old).await;
    for _ in 0..10 {
        claim().await.unwrap();
    }
    assert_eq!(claims(&old).await, before, "no job came to the old one");
    store.close().await;
}

/// A master and the replica that will take its place, with what promotes it.
struct Behind {
    url: String,
    master: Node,
    replica: Node,
    /// The other masters and their replicas, or the sentinel.
    others: Vec<Node>,
    /// Keys whose jobs are at that master.
    keys: Vec<String>,
}

/// What was told of jobs, and is so no more.
#[derive(Debug)]
struct Seen {
    claims_lost: usize,
    results_lost: usize,
    /// How many were not acknowledged while the replica was behind.
    refused: usize,
    /// How many of those that were not were executed meanwhile.
    executed_meanwhile: u64,
    /// How often the intent was executed that was most.
    most: usize,
    executed: usize,
    metrics: String,
}

impl Behind {
    async fn in_a_cluster() -> Behind {
        let ThreeMasters { mut masters, mut replicas } = ThreeMasters::start(true).await;
        let seeds: Vec<String> = masters.iter().map(Node::address).collect();
        let (master, replica) = (masters.remove(0), replicas.remove(0));
        masters.append(&mut replicas);
        let url = format!("redis+cluster://{}", seeds.join(","));
        Behind { url, master, replica, others: masters, keys: keys_at(0, 2 * INTENTS).0 }
    }

    async fn named_by_a_sentinel() -> Behind {
        let settings = ["save \"\"", "maxmemory-policy noeviction", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"];
        let master = Node::start(&settings).await;
        let follow = format!("replicaof 127.0.0.1 {}", master.port);
        let replica = Node::start(&[&settings[..], &[&follow]].concat()).await;
        let monitor = format!("sentinel monitor jobs 127.0.0.1 {} 1", master.port);
        let down = "sentinel down-after-milliseconds jobs 1000";
        let sentinel = Node::start(&[&monitor, down, "sentinel failover-timeout jobs 4000"]).await;
        until("the sentinel knows the replica", async || {
            sentinel.info("sentinel", "master0").await.is_some_and(|line| line.contains("slaves=1"))
        })
        .await;
        let url = format!("redis+sentinel://{}/jobs", sentinel.address());
        let keys = (0..2 * INTENTS).map(|number| format!("order-{number}")).collect();
        Behind { url, master, replica, others: vec![sentinel], keys }
    }

    /// Another replica, for the master that has lost its own.
    async fn another_replica(&self) -> Node {
        if self.url.starts_with("redis+cluster:") {
            let node = Node::of_cluster().await;
            node.follow_in_cluster(&self.replica).await;
            return node;
        }
        let follow = format!("replicaof 127.0.0.1 {}", self.replica.port);
        Node::start(&["save \"\"", "maxmemory-policy noeviction", &follow]).await
    }

    /// Half of the intents, then the replica gets nothing any more; the other half; the master dies and the replica is promoted.
    /// Whoever was told something asks for it, and everybody submits again.
    async fn then_promoted(mut self, durability: Durability, metrics: Option<PrometheusHandle>) -> Seen {
        let provider = simulated().await;
        let served = gateway(&self.url, &provider, durability).await;
        let alice = served.client.with_token("alice");
        until("the replica has what the master writes", async || {
            let _heard: i64 = self.master.tell(&["PUBLISH", "here", ""]).await;
            self.master.info("replication", "connected_slaves").await.is_some_and(|count| count == "1")
        })
        .await;
        let (before, after) = self.keys.split_at(INTENTS);
        let mut told = join_all(before.iter().map(|key| submit(&alice, key))).await;
        assert!(told.iter().all(|(status, _)| *status == 200), "{told:?}");
        let executed_before = provider.ledger().executed;
        self.replica.cut_from(&self.master).await;
        told.extend(join_all(after.iter().map(|key| submit(&alice, key))).await);
        let executed_meanwhile = provider.ledger().executed - executed_before;
        let refused = told.iter().filter(|(status, _)| *status == 503).count();
        self.looked_at().await;
        self.master.die();
        self.replica.resume();
        until("the replica is promoted", async || self.replica.is_master().await).await;
        let _another = if durability == Durability::Memory { None } else { Some(self.another_replica().await) };
        let mut seen =
            Seen { claims_lost: 0, results_lost: 0, refused, executed_meanwhile, most: 0, executed: 0, metrics: String::new() };
        for (status, job) in told.iter().filter(|(status, _)| *status < 300) {
            let path = format!("/v1/jobs/{}", job["id"].as_str().unwrap());
            let mut now = alice.get(&path).await;
            until("it is answered", async || {
                now = alice.get(&path).await;
                // What has ended is told once the new master's replica has it.
                matches!(now.status, 404) || (now.status == 200) || (now.status == 202 && *status != 200)
            })
            .await;
            seen.claims_lost += usize::from(now.status == 404);
            seen.results_lost += usize::from(*status == 200 && now.status != 200);
        }
        if let Some(render) = metrics {
            until("it is counted", async || {
                seen.metrics = render.render();
                seen.metrics.contains("onejob_writes_lost_total{what=\"stream\"} 1")
            })
            .await;
        }
        for key in &self.keys {
            until("it is settled", async || submit(&alice, key).await.0 == 200).await;
        }
        let mut executed = BTreeMap::<String, usize>::new();
        for entry in provider.ledger().entries.iter().filter(|entry| entry.executed) {
            *executed.entry(entry.body_sha256.clone()).or_default() += 1;
        }
        (seen.executed, seen.most) = (executed.len(), executed.values().copied().max().unwrap_or(0));
        assert!(!self.others.is_empty());
        seen
    }

    /// Waits until the gateway has looked who answers here, more often than is looked in this test.
    async fn looked_at(&self) {
        let asked = async || -> usize {
            let stats = self.master.info("commandstats", "cmdstat_info").await.unwrap();
            stats.strip_prefix("calls=").unwrap().split(',').next().unwrap().parse().unwrap()
        };
        let (before, mut own) = (asked().await, 0);
        until("it has looked who answers", async || {
            own += 1;
            asked().await > before + own + 1
        })
        .await;
    }
}

fn assert_kept(seen: &Seen) {
    assert_eq!((seen.claims_lost, seen.results_lost, seen.most), (0, 0, 1), "{seen:?}");
    assert_eq!((seen.refused, seen.executed_meanwhile, seen.executed), (INTENTS, 0, 2 * INTENTS), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_of_a_cluster_that_was_behind_takes_back_nothing_that_replicated_acknowledged() {
    assert_kept(&Behind::in_a_cluster().await.then_promoted(Durability::Replicated(1), None).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_a_sentinel_promotes_takes_back_nothing_that_replicated_acknowledged() {
    assert_kept(&Behind::named_by_a_sentinel().await.then_promoted(Durability::Replicated(1), None).await);
}

/// The same failure where nothing is waited for: it is one, and it is noticed at the master that has taken over.
#[tokio::test]
async fn what_one_master_of_a_cluster_takes_back_at_memory_is_counted() {
    // The test has one thread, and whatever runs on it is counted here.
    let recorder: &'static _ = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
    let _counting = metrics::set_default_local_recorder(recorder);
    let seen = Behind::in_a_cluster().await.then_promoted(Durability::Memory, Some(recorder.handle())).await;
    assert_eq!((seen.claims_lost, seen.results_lost, seen.refused, seen.most), (INTENTS, INTENTS, 0, 2), "{seen:?}");
    for what in ["job", "ending"] {
        let line = format!("onejob_writes_lost_total{{what=\"{what}\"}} {INTENTS}");
        assert!(seen.metrics.contains(&line), "{line}: {}", seen.metrics);
    }
}
