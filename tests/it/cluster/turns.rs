//! Cases 27 and 28 in a cluster: one node has forgotten the scripts, one node is no master any more, one is not there.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use onejob::attempt::FinishOutcome;
use onejob::job::Identity;
use onejob::store::{FinishAttempt, Finished, Follow, Store, Tell};
use tokio::net::TcpListener;

use super::load::{Errors, Load};
use super::node::{Node, ThreeMasters};
use super::{slot_of, store};
use crate::support::{Call, First, Submission, payload, until, until_within};

/// Lanes of a store to each node (`redis.lanes`).
const LANES: usize = 2;
/// The pause between two attempts to build a lane is capped at two seconds; so many are made before it is.
const BUILT_FIRST: usize = 7;
/// Readings of the map before their pause has grown to a second.
const READ_FIRST: usize = 7;

/// Which of three masters has a slot.
fn third(slot: u16) -> usize {
    usize::from(slot) / 5_462
}

/// Where a job's record is, and where its hint.
pub fn places(identity: Identity) -> (usize, usize) {
    (third(slot_of(&identity.to_string())), third(slot_of(&format!("{:02x}", identity.shard()))))
}

async fn hint_of(node: &Node, identity: Identity) -> Option<u64> {
    let key = format!("oj:due:{{{:02x}}}", identity.shard());
    node.tell::<Option<f64>>(&["ZSCORE", &key, &identity.to_string()]).await.map(|at_ms| at_ms as u64)
}

/// Finishes a job that nobody has to look at any more.
async fn finish(store: &Store, submission: &Submission, hint_ms: u64) -> Finished {
    let finish = FinishAttempt {
        job: submission.id(),
        number: 1,
        token: submission.token,
        outcome: FinishOutcome::Succeeded,
        result: &payload("done"),
        reason: "",
        remote_id: "",
        model: "laser-2",
        follow: Follow::End,
        hint_ms: Some(hint_ms),
        strip_at_ms: None,
        tell: Tell::Nothing,
    };
    store.finish_attempt(&finish).await.expect("no caller sees that a script was forgotten")
}

/// Case 27. A finish is two scripts: the job's, and behind it the hint's, in one pipeline or on another node. Whichever node has
/// forgotten, it alone is sent the whole text, and what stands behind the first is done once and behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_node_forgot_is_sent_whole_to_that_one_alone_and_in_its_order() {
    let cluster = ThreeMasters::start(false).await;
    let store = store(&cluster.url()).await;
    // Record and hint on the node that forgets; the record alone; the hint alone. With the whole texts that each node is sent, and the
    // scripts by their hash.
    let cases = [((0, 0), [2, 0, 0], [2, 0, 0]), ((0, 1), [1, 0, 0], [1, 1, 0]), ((1, 0), [1, 0, 0], [1, 1, 0])];
    // Every node knows every script.
    for number in 0..24 {
        let one = Submission { first: First::Running, ..Submission::new(&format!("warm-{number}")) };
        Call::Submit(one.clone()).send(&store).await.unwrap();
        finish(&store, &one, 1).await;
    }
    for (wanted, whole, hashed) in cases {
        let mut all = (0..).map(|number| Submission::new(&format!("turn-{number}")));
        let one = Submission { first: First::Running, ..all.find(|one| places(one.identity()) == wanted).unwrap() };
        Call::Submit(one.clone()).send(&store).await.unwrap();
        let hint_ms = hint_of(&cluster.masters[wanted.1], one.identity()).await.expect("it has a hint");
        for node in &cluster.masters {
            node.tell::<()>(&["CONFIG", "RESETSTAT"]).await;
        }
        cluster.masters[0].tell::<()>(&["SCRIPT", "FLUSH"]).await;
        let finished = finish(&store, &one, hint_ms).await;
        assert!(matches!(finished, Finished::Won { .. }), "{wanted:?}: {finished:?}");
        assert_eq!(hint_of(&cluster.masters[wanted.1], one.identity()).await, None, "{wanted:?}: its hint is settled");
        for (place, node) in cluster.masters.iter().enumerate() {
            let seen = (node.calls("eval").await, node.calls("evalsha").await);
            assert_eq!(seen, (whole[place], hashed[place]), "{wanted:?}: node {place}");
        }
        // The next case finds it as it was.
        for number in 0..24 {
            let one = Submission { first: First::Running, ..Submission::new(&format!("again-{wanted:?}-{number}")) };
            Call::Submit(one.clone()).send(&store).await.unwrap();
            finish(&store, &one, 1).await;
        }
    }
    store.close().await;
}

/// Case 27, under load: one node forgets again and again, and nobody else is sent a whole text for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_node_that_forgets_under_load_is_noticed_by_nobody() {
    let cluster = ThreeMasters::start(false).await;
    let store = store(&cluster.url()).await;
    let load = Load::start(&store, "one", Errors::Never);
    load.goes_on(30).await;
    for node in &cluster.masters {
        node.tell::<()>(&["CONFIG", "RESETSTAT"]).await;
    }
    for _ in 0..20 {
        cluster.masters[1].tell::<()>(&["SCRIPT", "FLUSH"]).await;
        load.goes_on(3).await;
    }
    let [first, second, third] = &cluster.masters[..] else { panic!("three masters") };
    assert!(second.calls("eval").await >= 20, "it has forgotten");
    assert_eq!((first.calls("eval").await, third.calls("eval").await), (0, 0), "the others have not");
    let figures = load.judged().await;
    eprintln!("scripts flushed twenty times on one of three masters: {figures:?}");
    store.close().await;
}

/// The replica asks to be the master, and again: the others give their votes once in two timeouts, and it gives up after five seconds.
async fn take_over(master: &Node, replica: &Node) {
    const GIVES_UP: Duration = Duration::from_secs(6);
    let mut asked: Option<Instant> = None;
    until_within(4 * GIVES_UP, "they have changed places", async || {
        if asked.is_none_or(|at| at.elapsed() > GIVES_UP) && replica.ask::<()>(&["CLUSTER", "FAILOVER"]).await.is_ok() {
            asked = Some(Instant::now());
        }
        replica.is_master().await && !master.is_master().await
    })
    .await;
}

/// Case 28. Nodes of one slot change places, and back: whoever is no master any more is left alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_made_a_replica_under_load_is_left_alone() {
    let cluster = ThreeMasters::start(true).await;
    let store = store(&cluster.url()).await;
    let load = Load::start(&store, "turn", Errors::AskAgain);
    load.goes_on(20).await;
    let (one, other) = (&cluster.masters[0], &cluster.replicas[0]);
    for (master, replica) in [(one, other), (other, one)] {
        take_over(master, replica).await;
        load.goes_on(20).await;
        let clients = async || {
            let all: String = master.tell(&["CLIENT", "LIST", "TYPE", "normal"]).await;
            // But the test's own, which asks.
            all.lines().filter(|line| !line.contains("cmd=client|list")).map(str::to_owned).collect::<Vec<_>>()
        };
        until("no lane leads to it", async || clients().await.is_empty()).await;
        let dialed = async || -> u64 { master.info("stats", "total_connections_received").await.unwrap().parse().unwrap() };
        let before = dialed().await;
        load.goes_on(60).await;
        let own = 1;
        let dialed = dialed().await - before - own;
        // Somebody may have asked it for the map.
        assert!(dialed <= 3, "it was dialed {dialed} times");
    }
    let figures = load.judged().await;
    eprintln!("two orderly failovers under load: {figures:?}");
    store.close().await;
}

/// Case 28. A master that is gone and has no replica stays in the map; who asks for its slots again and again does not dial it each
/// time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_is_gone_is_dialed_ever_more_seldom() {
    const LOOK: Duration = Duration::from_secs(5);
    let mut cluster = ThreeMasters::start(false).await;
    for node in &cluster.masters {
        node.tell::<()>(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).await;
    }
    let store = store(&cluster.url()).await;
    cluster.masters[0].die();
    // Who comes there is counted, and gets no further.
    let listener = TcpListener::bind(cluster.masters[0].address()).await.unwrap();
    let dialed = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&dialed);
    let counting = tokio::spawn(async move {
        while listener.accept().await.is_ok() {
            counted.fetch_add(1, Ordering::Relaxed);
        }
    });
    let mut asked = 0;
    let mut all = (0..).map(|number| Submission::new(&format!("gone-{number}"))).filter(|one| places(one.identity()).0 == 0);
    let began = Instant::now();
    while began.elapsed() < LOOK {
        let refused = Call::Submit(all.next().unwrap()).send(&store).await.unwrap_err();
        assert!(refused.is_retryable(), "{refused}");
        asked += 1;
    }
    let seconds = began.elapsed().as_secs() as usize;
    let dialed = dialed.load(Ordering::Relaxed);
    let bound = LANES * (BUILT_FIRST + seconds.div_ceil(2)) + READ_FIRST + seconds;
    assert!((4..=bound).contains(&dialed), "{asked} calls: it was dialed {dialed} times in {seconds} s, {bound} are allowed");
    assert!(asked > bound, "{asked} calls are too few to tell");
    // The others serve on.
    let mut all = (0..).map(|number| Submission::new(&format!("there-{number}"))).filter(|one| {
        let (record, hint) = places(one.identity());
        record != 0 && hint != 0
    });
    until("a job of another master is taken", async || Call::Submit(all.next().unwrap()).send(&store).await.is_ok()).await;
    eprintln!("{asked} calls, dialed {dialed} times in {seconds} s");
    counting.abort();
    store.close().await;
}
