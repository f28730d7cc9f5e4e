//! A master is killed with batches in flight, and a sentinel promotes its replica, which was behind.

use std::time::Duration;

use onejob::dedup::{BatchToken, Claimed, ClickId, Committed, Dedup, Verdict};
use onejob::store::{Durability, StoreOptions};

use super::{TASKS, assert_remembered, check, claim_and_commit, everybody, expected, ids, processes, run, store_with, stream};
use crate::cluster::node::Node;
use crate::support::{kinds, until};

/// Batches of each task.
const BATCHES: u64 = 25;
/// How long the replica has for a write.
const TIMEOUT: Duration = Duration::from_millis(500);

struct Pair {
    master: Node,
    replica: Node,
    sentinel: Node,
}

impl Pair {
    async fn start() -> Pair {
        let settings = ["save \"\"", "maxmemory-policy noeviction", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"];
        let master = Node::start(&settings).await;
        let follow = format!("replicaof 127.0.0.1 {}", master.port);
        let replica = Node::start(&[&settings[..], &[&follow]].concat()).await;
        let monitor = format!("sentinel monitor clicks 127.0.0.1 {} 1", master.port);
        let down = "sentinel down-after-milliseconds clicks 1000";
        let sentinel = Node::start(&[&monitor, down, "sentinel failover-timeout clicks 4000"]).await;
        until("the sentinel knows the replica", async || {
            sentinel.info("sentinel", "master0").await.is_some_and(|line| line.contains("slaves=1"))
        })
        .await;
        until("the replica has what the master writes", async || {
            let _heard: i64 = master.tell(&["PUBLISH", "here", ""]).await;
            master.tell::<i64>(&["WAIT", "1", "1000"]).await == 1
        })
        .await;
        Pair { master, replica, sentinel }
    }

    async fn processes(&self, mirrored: bool, durability: Durability) -> [Dedup; 2] {
        let patience = Duration::from_secs(2);
        let url = format!("redis+sentinel://{}/clicks", self.sentinel.address());
        let options = StoreOptions {
            durability,
            durability_timeout: TIMEOUT,
            connect_timeout: patience,
            response_timeout: patience,
            ..StoreOptions::new(&url)
        };
        processes(&store_with(options).await, &stream(mirrored, "clicks", 2))
    }

    /// Waits until the master has executed so many calls more.
    async fn executes(&self, more: u64) {
        let before = self.master.calls("evalsha").await;
        until("it executes", async || self.master.calls("evalsha").await >= before + more).await;
    }

    /// The replica gets nothing any more.
    async fn cut(&self) {
        self.replica.cut_from(&self.master).await;
    }

    /// Kills the master. The promoted one has a replica too; it is to live as long.
    async fn fail_over(&mut self) -> Node {
        self.master.die();
        self.replica.resume();
        until("the replica is promoted", async || self.replica.is_master().await).await;
        let follow = format!("replicaof 127.0.0.1 {}", self.replica.port);
        Node::start(&["save \"\"", "maxmemory-policy noeviction", "repl-diskless-sync-delay 0", &follow]).await
    }
}

/// Batches go on all the while. Those that the master executes while its replica is cut off are told to nobody.
async fn go_on_through_a_failover<F>(mirrored: bool, ask: impl Fn(Dedup, Vec<ClickId>, BatchToken) -> F + Copy + Send + 'static)
where
    F: Future<Output = Vec<bool>> + Send,
{
    let mut pair = Pair::start().await;
    let processes = pair.processes(mirrored, Durability::Replicated(1)).await;
    let dedup = &processes[0];
    let (before, token) = (ids(dedup.stream(), 900_000..900_200), BatchToken::named("before"));
    let told = dedup.check(&before, token).await.unwrap();
    assert_eq!(told, [Verdict::First; 200]);
    let all = tokio::spawn({
        let processes = processes.clone();
        async move { run(&processes, BATCHES, ask).await }
    });
    pair.executes(4 * TASKS).await;
    pair.cut().await;
    // In flight: executed, and neither durable nor told.
    pair.executes(TASKS).await;
    assert!(!all.is_finished());
    let _another = pair.fail_over().await;
    assert_eq!(all.await.unwrap(), expected(BATCHES));
    assert_eq!(dedup.check(&before, token).await.unwrap(), told);
    for process in &processes {
        assert_remembered(process, &everybody(BATCHES)).await;
        assert_remembered(process, &(900_000..900_200).collect::<Vec<u64>>()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_in_flight_when_their_master_dies_are_told_right_by_the_replica_that_was_behind() {
    for mirrored in kinds() {
        go_on_through_a_failover(mirrored, check).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_and_commits_in_flight_when_their_master_dies_count_each_click_once() {
    for mirrored in kinds() {
        go_on_through_a_failover(mirrored, claim_and_commit).await;
    }
}

/// The same failure where nothing is waited for, and the proof that the tests above can fail.
#[tokio::test]
async fn at_memory_clicks_that_a_replica_never_had_count_twice() {
    for mirrored in kinds() {
        let mut pair = Pair::start().await;
        let [dedup, _] = pair.processes(mirrored, Durability::Memory).await;
        pair.cut().await;
        let batch = ids(dedup.stream(), 0..100);
        assert_eq!(dedup.check(&batch, BatchToken::random()).await.unwrap(), [Verdict::First; 100]);
        let _another = pair.fail_over().await;
        assert_eq!(dedup.check(&batch, BatchToken::random()).await.unwrap(), [Verdict::First; 100]);
    }
}

/// At memory, with copies that have what was lost: one of all of it, one of a part, and both of what came while the replica was cut
/// off. Whoever asks goes on, and of what all know after it nobody says anything else.
#[tokio::test]
async fn copies_that_have_what_a_failover_lost_agree_again_with_what_is_left() {
    let mut pair = Pair::start().await;
    let processes = pair.processes(true, Durability::Memory).await;
    let firsts = async |process: usize, users: std::ops::Range<u64>| {
        let dedup = &processes[process];
        let told = dedup.check(&ids(dedup.stream(), users), BatchToken::random()).await.unwrap();
        told.into_iter().filter(|verdict| *verdict == Verdict::First).count()
    };
    let (kept, claims) = (0..1_000, 5_000..5_100);
    assert_eq!((firsts(0, kept.clone()).await, firsts(1, kept.clone()).await), (1_000, 0));
    until("the replica has them", async || {
        let at = pair.master.info("replication", "master_repl_offset").await;
        at.is_some() && at == pair.replica.info("replication", "slave_repl_offset").await
    })
    .await;
    pair.cut().await;
    // Lost: what one adds, what both know, what the other adds, what is only claimed.
    assert_eq!((firsts(0, 1_000..1_500).await, firsts(1, 1_200..1_700).await, firsts(1, 2_000..2_010).await), (500, 200, 10));
    let (dedup, token) = (&processes[0], BatchToken::named("claim"));
    let claimed = ids(dedup.stream(), claims.clone());
    assert_eq!(dedup.claim(&claimed, token).await.unwrap(), [Claimed::First; 100]);
    let _another = pair.fail_over().await;
    // The log is longer again than the copies are that have what was lost.
    assert_eq!(firsts(1, 10_000..11_000).await, 1_000);
    // They go on at once: with what is new, what was lost and what was not.
    let (one, other) = tokio::join!(firsts(0, 900..1_600), firsts(1, 1_300..2_200));
    assert_eq!(one + other, 2_200 - 1_000, "each that was lost counts again, once");
    assert_eq!(dedup.commit(&claimed, token).await.unwrap(), [Committed::Committed; 100]);
    let everybody = [(0, 0..2_500), (1, 0..2_500), (0, 10_000..11_000), (1, claims.clone()), (0, claims)];
    let mut told = Vec::new();
    for (process, users) in everybody {
        told.push(firsts(process, users).await);
    }
    assert_eq!(told, [300, 0, 0, 0, 0], "nobody had asked about the last three hundred");
}
