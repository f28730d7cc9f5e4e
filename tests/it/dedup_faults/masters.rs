//! A stream over three masters of a cluster, one of which dies, or gives a slot away, in the middle of it.

use std::time::Duration;

use onejob::dedup::{BatchToken, ClickId, Dedup, DedupError, Verdict};
use onejob::store::{Durability, StoreOptions};

use super::{TASKS, Told, assert_remembered, check, claim_and_commit, everybody, expected, ids, run, store_with, stream};
use crate::cluster::node::{Node, ThreeMasters};
use crate::support::{kinds, until};

/// Batches of each task.
const BATCHES: u64 = 40;
/// So many that each master has some.
const SHARDS: u16 = 12;
/// How long replicas have for a write.
const TIMEOUT: Duration = Duration::from_millis(500);

async fn processes(mirrored: bool, cluster: &ThreeMasters, durability: Durability) -> [Dedup; 2] {
    let patience = Duration::from_secs(2);
    let url = cluster.url();
    let options = StoreOptions {
        durability,
        durability_timeout: TIMEOUT,
        connect_timeout: patience,
        response_timeout: patience,
        ..StoreOptions::new(&url)
    };
    super::processes(&store_with(options).await, &stream(mirrored, "clicks", SHARDS))
}

fn start<F>(
    processes: &[Dedup; 2],
    batches: u64,
    ask: impl Fn(Dedup, Vec<ClickId>, BatchToken) -> F + Copy + Send + Sync + 'static,
) -> tokio::task::JoinHandle<Told>
where
    F: Future<Output = Vec<bool>> + Send,
{
    let processes = processes.clone();
    tokio::spawn(async move { run(&processes, batches, ask).await })
}

/// Waits until each master has executed so many calls more.
async fn each_executes(masters: &[Node], more: u64) {
    for master in masters {
        let before = master.calls("evalsha").await;
        until("it executes", async || master.calls("evalsha").await >= before + more).await;
    }
}

async fn a_master_dies<F>(mirrored: bool, ask: impl Fn(Dedup, Vec<ClickId>, BatchToken) -> F + Copy + Send + Sync + 'static)
where
    F: Future<Output = Vec<bool>> + Send,
{
    let mut cluster = ThreeMasters::start(true).await;
    let processes = processes(mirrored, &cluster, Durability::Replicated(1)).await;
    let all = start(&processes, BATCHES, ask);
    each_executes(&cluster.masters, 2 * TASKS).await;
    assert!(!all.is_finished());
    cluster.masters[0].die();
    let promoted = &cluster.replicas[0];
    until("its replica takes its place", async || promoted.is_master().await).await;
    let another = Node::of_cluster().await;
    another.follow_in_cluster(promoted).await;
    assert_eq!(all.await.unwrap(), expected(BATCHES));
    for process in &processes {
        assert_remembered(process, &everybody(BATCHES)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_of_a_cluster_that_dies_in_the_middle_changes_no_verdict() {
    for mirrored in kinds() {
        a_master_dies(mirrored, check).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_of_a_cluster_that_dies_in_the_middle_of_two_phases_makes_no_click_count_twice_or_never() {
    for mirrored in kinds() {
        a_master_dies(mirrored, claim_and_commit).await;
    }
}

/// A slot in which the stream has something, there and back: half of its keys here and half there for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_there_and_back_under_load_changes_no_verdict() {
    for mirrored in kinds() {
        let cluster = ThreeMasters::start(false).await;
        let processes = processes(mirrored, &cluster, Durability::Memory).await;
        let all = start(&processes, 2 * BATCHES, check);
        each_executes(&cluster.masters, TASKS).await;
        let [first, _, third] = &cluster.masters[..] else { panic!("three") };
        let keys: Vec<String> = first.tell(&["KEYS", "*clicks*"]).await;
        let slot: u16 = first.tell(&["CLUSTER", "KEYSLOT", &keys[0]]).await;
        let mut moved = cluster.move_slot(slot, first, third, async || {}).await;
        assert!(!all.is_finished());
        each_executes(&cluster.masters, TASKS).await;
        moved += cluster.move_slot(slot, third, first, async || {}).await;
        assert!(moved >= 2, "{moved} keys moved");
        assert_eq!(all.await.unwrap(), expected(2 * BATCHES));
        for process in &processes {
            assert_remembered(process, &everybody(2 * BATCHES)).await;
        }
    }
}

/// Found where both batches have ids in one shard. Whatever else it did, it takes nothing from the batch whose token it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_of_other_ids_is_a_conflict_and_takes_nothing_from_the_batch_that_has_it() {
    for mirrored in kinds() {
        let cluster = ThreeMasters::start(false).await;
        let [dedup, other] = processes(mirrored, &cluster, Durability::Memory).await;
        let [batch, others] = [0..600, 300..900].map(|users| ids(dedup.stream(), users));
        let token = BatchToken::named("a file");
        assert_eq!(dedup.check(&batch, token).await.unwrap(), [Verdict::First; 600]);
        assert_eq!(other.check(&others, token).await, Err(DedupError::Conflict));
        assert_eq!(dedup.check(&batch, token).await.unwrap(), [Verdict::First; 600]);
        assert_remembered(&dedup, &(0..600).collect::<Vec<u64>>()).await;
        // As many ids of the other batch are new still as its shards refused: all of them, where each shard had some of the first.
        let told = dedup.check(&others[300..], BatchToken::random()).await.unwrap();
        assert_eq!(told, [Verdict::First; 300]);
    }
}
