//! A cluster of three masters, and a master that a sentinel replaces: under load nothing is lost and nothing is done twice.
//!
//! That a master takes with it what it had acknowledged and not yet told its replica is Redis' own, and not looked at here: it is
//! made to tell before it is killed.

mod durable;
mod load;
pub mod node;
mod ready;
mod six;
mod starts;
mod turns;
mod visitors;
mod watched;

use std::time::Instant;

use futures_util::StreamExt as _;
use onejob::error::{Refusal, StoreError};
use onejob::fingerprint::digest;
use onejob::job::Identity;
use onejob::store::{Extended, Read, RedisKind, Store, StoreOptions, Submitted};
use tokio::sync::mpsc;

use crate::support::{Answer, Call, First, LEASE_MS, SOON, Submission, until};
use load::{Errors, Load};
use node::{Node, ThreeMasters};

async fn store(url: &str) -> Store {
    // On a machine that does much else a connection and a reply take their time.
    let patience = std::time::Duration::from_secs(2);
    let options = StoreOptions { connect_timeout: patience, response_timeout: patience, ..StoreOptions::new(url) };
    Store::connect(options).await.expect("a store").0
}

/// CRC-16 (XMODEM), a bit at a time.
pub fn slot_of(tag: &str) -> u16 {
    let byte = |crc: u16, byte: u8| {
        let bit = |crc: u16, _| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        (0..8).fold(crc ^ (u16::from(byte) << 8), bit)
    };
    tag.bytes().fold(0, byte) % 16_384
}

/// Some keys of an owner whose jobs are in one slot of the first third.
fn keys_of_one_slot(owner: &str, count: usize) -> (u16, Vec<String>) {
    let slot = |number: usize| slot_of(&Identity::of(&digest(owner, &format!("hot-{number}"))).to_string());
    let chosen = (0..).map(slot).find(|slot| *slot < 5_461).unwrap();
    (chosen, (0..).filter(|number| slot(*number) == chosen).map(|number| format!("hot-{number}")).take(count).collect())
}

/// While a slot moves to another master and back, half of its keys there and half here for a while, and the scripts unknown to
/// the one that takes it, every heartbeat of a job in it is answered, every duplicate is told, and no caller sees an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_both_ways_under_load_moves_no_job_out_of_reach() {
    let cluster = ThreeMasters::start(false).await;
    let store = store(&cluster.url()).await;
    assert_eq!(store.kind(), RedisKind::Cluster { masters: 3 });
    store.canary().await.unwrap();
    let load = Load::start(&store, "slot", Errors::Never);
    let (slot, keys) = keys_of_one_slot("shop", 4);
    let mut beating = Vec::new();
    let (beat, mut beats) = mpsc::channel(1);
    for key in &keys {
        let submission = Submission { first: First::Running, ..Submission::new(key) };
        let (store, beat) = (store.clone(), beat.clone());
        Call::Submit(submission.clone()).send(&store).await.unwrap();
        beating.push(tokio::spawn(async move {
            let duplicate = Call::Submit(submission.by_another());
            for sequence in 1.. {
                let job = submission.id();
                let extend = Call::Extend { job, number: 1, token: submission.token, sequence, lease_ms: LEASE_MS };
                let extended = extend.send(&store).await.unwrap();
                assert!(matches!(extended, Answer::Extended(Extended::Extended { .. })), "{extended:?}");
                let told = duplicate.send(&store).await.unwrap();
                assert!(format!("{told:?}").contains("Existing"), "{told:?}");
                if beat.send(()).await.is_err() {
                    return;
                }
            }
        }));
    }
    let began = Instant::now();
    for (from, to) in [(0, 2), (2, 0)] {
        let (from, to) = (&cluster.masters[from], &cluster.masters[to]);
        // Every job is asked for meanwhile, some here and some there.
        let moved = cluster.move_slot(slot, from, to, async || {
            for _ in 0..12 {
                beats.recv().await.unwrap();
            }
        });
        let moved = moved.await;
        assert!(moved >= keys.len(), "{moved} keys moved");
        for _ in 0..12 {
            beats.recv().await.unwrap();
        }
        let stats: String = to.tell(&["INFO", "commandstats"]).await;
        assert!(stats.contains("cmdstat_asking"), "somebody was sent there before the slot was");
    }
    let took = began.elapsed();
    load.goes_on(20).await;
    drop(beats);
    for task in beating {
        task.await.unwrap();
    }
    eprintln!("a slot there and back in {took:?}: {:?}", load.judged().await);
    store.close().await;
}

/// Every wake-up reaches a listener at any node, and while every master forgets the scripts again and again no caller sees an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_forgotten_by_every_master_are_sent_again_and_every_end_is_heard_at_any_node() {
    let cluster = ThreeMasters::start(false).await;
    let store = store(&cluster.url()).await;
    let client = redis::Client::open(format!("redis://{}", cluster.masters[1].address())).unwrap();
    let mut listener = client.get_async_pubsub().await.unwrap();
    listener.psubscribe("oj:done:*").await.unwrap();
    let load = Load::start(&store, "flush", Errors::Never);
    for _ in 0..10 {
        for master in &cluster.masters {
            master.tell::<()>(&["SCRIPT", "FLUSH"]).await;
        }
        load.goes_on(3).await;
    }
    let figures = load.judged().await;
    let last = Submission { first: First::Running, ..Submission::new("heard") };
    Call::Submit(last.clone()).send(&store).await.unwrap();
    let cancel = onejob::store::CancelMode::Force;
    Call::Cancel { job: last.id(), request_id: "r".to_owned(), mode: cancel }.send(&store).await.unwrap();
    let wanted = last.identity().to_string();
    let mut messages = listener.on_message();
    let heard = async {
        let mut count = 1;
        while messages.next().await.unwrap().get_payload::<String>().unwrap() != wanted {
            count += 1;
        }
        count
    };
    let heard = tokio::time::timeout(SOON, heard).await.expect("its end is heard");
    assert!(heard > 30, "{heard} ends were heard");
    eprintln!("scripts flushed ten times on each of three masters: {figures:?}");
    store.close().await;
}

/// A hint is written first: where its master refuses it, a claim at another one is not made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_hint_another_master_refuses_is_not_made() {
    let cluster = ThreeMasters::start(false).await;
    let store = store(&cluster.url()).await;
    let third = |slot: u16| usize::from(slot).min(16_383) / 5_462;
    let mut submissions = (0..).map(|number| Submission::new(&format!("hint-{number}")));
    let elsewhere = |one: &Submission| {
        let hint = slot_of(&format!("{:02x}", one.identity().shard()));
        third(hint) == 0 && third(slot_of(&one.identity().to_string())) != 0
    };
    let claim = Submission { first: First::Running, ..submissions.find(elsewhere).unwrap() };
    // Every master knows the script: one that does not would refuse it too.
    for number in 0..16 {
        Call::Submit(Submission::new(&format!("warm-{number}"))).send(&store).await.unwrap();
    }
    // Less than it uses, so that nothing new fits.
    cluster.masters[0].tell::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = Call::Submit(claim.clone()).send(&store).await.unwrap_err();
    assert!(matches!(refused, StoreError::NotExecuted { code: Refusal::Oom, .. }), "{refused}");
    let who = cluster.masters[0].address();
    assert!(refused.to_string().contains(&who), "{refused} names {who}");
    assert_eq!(store.read_job(claim.identity()).await.unwrap(), Read::NotFound);
    let refused = store.canary().await.unwrap_err();
    assert!(refused.to_string().contains(&who), "{refused} names {who}");
    cluster.masters[0].tell::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    store.canary().await.unwrap();
    let created = Call::Submit(claim).send(&store).await.unwrap();
    assert!(matches!(created, Answer::Submitted(Submitted::Created { .. })), "{created:?}");
    store.close().await;
}

/// A master is killed and its replica takes over: callers ask again until then, and nothing is lost or done twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_takes_over_from_a_killed_master_has_every_job_once() {
    let mut cluster = ThreeMasters::start(true).await;
    let store = store(&cluster.url()).await;
    let load = Load::start(&store, "kill", Errors::AskAgain);
    load.goes_on(30).await;
    let began = Instant::now();
    cluster.masters[0].die_having_told(&cluster.replicas[0]).await;
    let killed = began.elapsed();
    until("the replica takes over", async || cluster.replicas[0].is_master().await).await;
    let promoted = began.elapsed();
    load.goes_on(1).await;
    let served = began.elapsed();
    load.goes_on(60).await;
    let figures = load.judged().await;
    store.canary().await.unwrap();
    assert_eq!(store.kind(), RedisKind::Cluster { masters: 3 });
    eprintln!("killed after {killed:?}, replica promoted after {promoted:?}, jobs end again after {served:?}: {figures:?}");
    store.close().await;
}

/// The same where a sentinel decides who is the master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_a_sentinel_names_has_every_job_of_the_killed_one_once() {
    let settings = ["save \"\"", "maxmemory-policy noeviction", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"];
    let mut master = Node::start(&settings).await;
    let replica_of = format!("replicaof 127.0.0.1 {}", master.port);
    let replica = Node::start(&[&settings[..], &[&replica_of]].concat()).await;
    until("the replica is in step", async || {
        replica.info("replication", "master_link_status").await.is_some_and(|status| status == "up")
    })
    .await;
    let monitor = format!("sentinel monitor jobs 127.0.0.1 {} 1", master.port);
    let sentinel =
        Node::start(&[&monitor, "sentinel down-after-milliseconds jobs 1000", "sentinel failover-timeout jobs 4000"]).await;
    until("the sentinel knows the replica", async || {
        sentinel.info("sentinel", "master0").await.is_some_and(|line| line.contains("slaves=1"))
    })
    .await;
    // The first one is not there: the next is asked.
    let store = store(&format!("redis+sentinel://127.0.0.1:1,{}/jobs", sentinel.address())).await;
    assert_eq!(store.kind(), RedisKind::Sentinel { service: "jobs".to_owned() });
    let load = Load::start(&store, "sentinel", Errors::AskAgain);
    load.goes_on(30).await;
    let began = Instant::now();
    master.die_having_told(&replica).await;
    until("the replica is promoted", async || replica.is_master().await).await;
    let promoted = began.elapsed();
    load.goes_on(1).await;
    let served = began.elapsed();
    load.goes_on(60).await;
    let figures = load.judged().await;
    store.canary().await.unwrap();
    eprintln!("promoted after {promoted:?}, jobs end again after {served:?}: {figures:?}");
    store.close().await;
}

/// Once one lane was led to the master that the sentinel names now, no other takes jobs to the old one, though that one still would.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lane_stays_at_a_master_that_the_sentinel_does_not_name_any_more() {
    let settings = ["save \"\"", "maxmemory-policy noeviction"];
    let (old, new) = (Node::start(&settings).await, Node::start(&settings).await);
    let sentinel = Node::start(&[&format!("sentinel monitor jobs 127.0.0.1 {} 1", old.port)]).await;
    let store = store(&format!("redis+sentinel://{}/jobs", sentinel.address())).await;
    sentinel.tell::<()>(&["SENTINEL", "REMOVE", "jobs"]).await;
    sentinel.tell::<()>(&["SENTINEL", "MONITOR", "jobs", "127.0.0.1", &new.port.to_string(), "1"]).await;
    // One of the two lanes breaks.
    let clients: String = old.tell(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    let lane =
        clients.lines().find(|line| line.contains("cmd=evalsha") || line.contains("cmd=hget") || line.contains("cmd=time"));
    let id = lane.and_then(|line| line.strip_prefix("id=")?.split(' ').next()).unwrap_or_else(|| panic!("{clients}"));
    old.tell::<u64>(&["CLIENT", "KILL", "ID", id]).await;
    let mut number = 0;
    let mut claim = async || {
        number += 1;
        // Refused while the lanes are built.
        let _ = Call::Submit(Submission::new(&format!("key-{number}"))).send(&store).await;
    };
    until("a job comes to the new master", async || {
        claim().await;
        new.tell::<u64>(&["DBSIZE"]).await > 1
    })
    .await;
    let before: u64 = old.tell(&["DBSIZE"]).await;
    for _ in 0..20 {
        claim().await;
    }
    assert_eq!(old.tell::<u64>(&["DBSIZE"]).await, before, "no job came to the old one");
    store.close().await;
}
