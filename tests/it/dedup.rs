//! `Dedup`, the way into a stream of clicks: verdicts in the order of the ids, batches sent again, stores that fail.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use onejob::dedup::{
    BATCH_IDS_MAX, BatchToken, CALL_IDS_MAX, Claimed, ClickId, Committed, Dedup, DedupError, FieldValue, Stream, Verdict,
};
use onejob::store::{DedupLevel, Store, StoreOptions};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rustix::process::{Pid, Signal, kill_process};

use crate::cluster::node::ThreeMasters;
use crate::fleet::proxy::Proxy;
use crate::fleet::redis::DurableRedis;
use crate::support::{Redis, kinds, until};

fn stream(mirrored: bool, shards: u16) -> Stream {
    Stream { shards, mirrored, ..Stream::new("clicks", &["user"]) }
}

fn id(stream: &Stream, user: u64) -> ClickId {
    stream.id(|_| Some(FieldValue::Integer(user.into()))).unwrap()
}

fn ids(stream: &Stream, users: impl IntoIterator<Item = u64>) -> Vec<ClickId> {
    users.into_iter().map(|user| id(stream, user)).collect()
}

async fn check(dedup: &Dedup, users: impl IntoIterator<Item = u64>) -> Vec<Verdict> {
    dedup.check(&ids(dedup.stream(), users), BatchToken::random()).await.unwrap()
}

fn firsts(verdicts: &[Verdict]) -> usize {
    verdicts.iter().filter(|verdict| **verdict == Verdict::First).count()
}

#[tokio::test]
async fn verdicts_come_in_the_order_of_the_ids_and_the_first_of_a_batch_counts() {
    for mirrored in kinds() {
        use Verdict::{Duplicate, First};
        let redis = Redis::start().await;
        for shards in [1, 5] {
            let stream = Stream { name: format!("clicks-{shards}"), ..stream(mirrored, shards) };
            let dedup = Dedup::new(&redis.store().await, stream).unwrap();
            assert_eq!(check(&dedup, [3, 1, 3, 2, 1, 3]).await, [First, First, Duplicate, First, Duplicate, Duplicate]);
            assert_eq!(check(&dedup, [4, 2, 4, 0]).await, [First, Duplicate, Duplicate, First]);
            assert_eq!(check(&dedup, []).await, []);
        }
    }
}

#[tokio::test]
async fn a_batch_of_several_calls_is_told_once_and_the_same_when_sent_again() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let dedup = Dedup::new(&redis.store().await, stream(mirrored, 2)).unwrap();
        let batch = ids(dedup.stream(), (0..BATCH_IDS_MAX as u64).map(|user| user / 2));
        let token = BatchToken::named("clicks.ndjson at 0");
        let told = dedup.check(&batch, token).await.unwrap();
        assert_eq!(firsts(&told), BATCH_IDS_MAX / 2);
        assert!(told.chunks(2).all(|pair| pair == [Verdict::First, Verdict::Duplicate]));
        assert_eq!(dedup.check(&batch, BatchToken::named("clicks.ndjson at 0")).await.unwrap(), told);
        assert_eq!(dedup.check(&batch[2..], token).await, Err(DedupError::Conflict));
        assert_eq!(firsts(&dedup.check(&batch, BatchToken::random()).await.unwrap()), 0);
        let many = vec![batch[0]; BATCH_IDS_MAX + 1];
        assert_eq!(dedup.check(&many, token).await, Err(DedupError::TooMany { ids: BATCH_IDS_MAX + 1 }));
    }
}

/// Of many who ask about the same clicks at once each click is told to be the first one time.
#[tokio::test]
async fn of_many_who_ask_at_once_one_is_told_first() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let dedup = Dedup::new(&redis.store().await, stream(mirrored, 3)).unwrap();
        let other = Dedup::new(&redis.store().await, stream(mirrored, 3)).unwrap();
        let told = join_all((0..8).map(|n| check(if n % 2 == 0 { &dedup } else { &other }, 0..2_000))).await;
        for user in 0..2_000 {
            assert_eq!(told.iter().filter(|verdicts| verdicts[user] == Verdict::First).count(), 1, "{user}");
        }
    }
}

/// The wire loses the reply to every third batch, after Redis has executed it.
async fn replies_are_lost(mirrored: bool) {
    let directory = tempfile::tempdir().unwrap();
    let redis = DurableRedis::start_with(directory.path(), &[]).await;
    let proxy = Proxy::start(redis.socket(), redis.announced());
    let patience = Duration::from_secs(2);
    let options = StoreOptions { connect_timeout: patience, response_timeout: patience, ..StoreOptions::new(&proxy.url()) };
    until("the wire stands", async || Store::connect(options.clone()).await.is_ok()).await;
    let (store, _) = Store::connect(options).await.unwrap();
    let dedup = Dedup::new(&store, stream(mirrored, 2)).unwrap().with_patience(Duration::from_secs(60));
    let mut seen = std::collections::HashSet::new();
    for batch in 0..60_u64 {
        // Users come again after a while.
        let users: Vec<u64> = (0..200).map(|n| (batch * 131 + n * 17) % 5_000).collect();
        if batch % 3 == 0 {
            proxy.lose_replies(1);
        }
        let expected: Vec<Verdict> =
            users.iter().map(|user| if seen.insert(*user) { Verdict::First } else { Verdict::Duplicate }).collect();
        assert_eq!(check(&dedup, users).await, expected, "batch {batch}");
    }
    assert!(proxy.lost() >= 15, "{} replies were lost", proxy.lost());
}

#[tokio::test]
async fn lost_replies_change_no_verdict() {
    replies_are_lost(false).await;
}

#[tokio::test]
async fn lost_replies_change_no_verdict_of_a_mirrored_stream() {
    replies_are_lost(true).await;
}

/// Killed without a word after it has told; what it had told is on its disk.
#[tokio::test]
async fn a_redis_that_was_killed_tells_the_same_batch_the_same() {
    for mirrored in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let redis = DurableRedis::start_with(directory.path(), &[]).await;
        let options = StoreOptions { response_timeout: Duration::from_secs(2), ..StoreOptions::new(&redis.url()) };
        let (store, _) = Store::connect(options).await.unwrap();
        let dedup = Dedup::new(&store, stream(mirrored, 1)).unwrap().with_patience(Duration::from_secs(30));
        let (batch, token) = (ids(dedup.stream(), 0..500), BatchToken::random());
        assert_eq!(firsts(&dedup.check(&batch, token).await.unwrap()), 500);
        redis.die().await;
        let again = async { dedup.check(&batch, token).await.unwrap() };
        let (again, ()) = tokio::join!(again, redis.revive());
        assert_eq!(firsts(&again), 500);
        assert_eq!(firsts(&check(&dedup, 0..500).await), 0);
    }
}

/// Three masters, one of which does not answer for a while: which ids have no verdict is said, and the same batch completes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_one_master_is_silent_the_others_verdicts_are_told_and_the_same_batch_completes_them() {
    for mirrored in kinds() {
        let cluster = ThreeMasters::start(false).await;
        let options = StoreOptions {
            connect_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_millis(500),
            ..StoreOptions::new(&cluster.url())
        };
        let (store, _) = Store::connect(options).await.unwrap();
        let dedup = Dedup::new(&store, stream(mirrored, 12)).unwrap();
        assert_eq!(firsts(&check(&dedup, 0..1_000).await), 1_000);
        let nodes = &cluster.masters;
        for node in nodes {
            assert!(node.ask::<u64>(&["DBSIZE"]).await.unwrap() > 1, "each master has a shard");
        }
        let pid = Pid::from_raw(nodes[1].pid().try_into().unwrap()).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        let (batch, token) = (ids(dedup.stream(), 500..1_500), BatchToken::random());
        let asked = dedup.clone().with_patience(Duration::from_millis(100)).check(&batch, token).await;
        kill_process(pid, Signal::CONT).unwrap();
        let Err(DedupError::Unanswered { verdicts, unanswered, .. }) = asked else { panic!("{asked:?}") };
        assert_eq!(verdicts.iter().filter(|verdict| verdict.is_none()).count(), unanswered);
        assert!(unanswered > 0 && unanswered < 1_000, "{unanswered}");
        let told = dedup.with_patience(Duration::from_secs(30)).check(&batch, token).await.unwrap();
        for (place, (before, after)) in verdicts.iter().zip(&told).enumerate() {
            assert!(before.is_none_or(|before| before == *after), "{place}");
            assert_eq!(*after == Verdict::First, place >= 500, "{place}");
        }
    }
}

/// Random batches and pauses against a map. A click is a duplicate within the window, and first again once its slice is out as well.
#[test]
fn random_batches_and_pauses_are_answered_as_a_map_does() {
    const HOUR_MS: u64 = 3_600_000;
    /// Real time that may pass during one case.
    const SLACK_MS: u64 = 60_000;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let redis = runtime.block_on(Redis::start());
    let store = runtime.block_on(redis.store());
    let step = (prop::collection::vec(0_u64..40, 1..30), prop_oneof![Just(0), 0..8 * HOUR_MS]);
    let strategy = (any::<bool>(), 1_u32..=3, prop::collection::vec(step, 1..25));
    let cases = AtomicU32::new(0);
    let mut runner = TestRunner::new(ProptestConfig { cases: 80, failure_persistence: None, ..ProptestConfig::default() });
    let outcome = runner.run(&strategy, |(mirrored, slices, steps)| {
        let case = cases.fetch_add(1, Ordering::Relaxed);
        let name = format!("clicks-{case}");
        let stream = Stream { name, slices, window: Duration::from_millis(12 * HOUR_MS), expected: 20, ..stream(mirrored, 1) };
        let slice_ms = 12 * HOUR_MS / u64::from(slices);
        let dedup = Dedup::new(&store, stream).unwrap();
        let mut first_seen: HashMap<u64, u64> = HashMap::new();
        let mut now_ms = 0;
        for (users, pause_ms) in steps {
            let told = runtime.block_on(check(&dedup, users.clone()));
            for (user, verdict) in users.into_iter().zip(told) {
                match first_seen.get(&user).map(|at_ms| now_ms - at_ms) {
                    None => prop_assert_eq!(verdict, Verdict::First),
                    Some(age_ms) if age_ms + SLACK_MS < 12 * HOUR_MS => prop_assert_eq!(verdict, Verdict::Duplicate),
                    Some(age_ms) if age_ms > 12 * HOUR_MS + slice_ms + SLACK_MS => prop_assert_eq!(verdict, Verdict::First),
                    Some(_) => {}
                }
                if verdict == Verdict::First {
                    first_seen.insert(user, now_ms);
                }
            }
            let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) shard[2] = shard[2] + ARGV[1] \
                        redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'";
            let key = format!("oj:dedup:{{clicks-{case}/00}}");
            let _: String = runtime.block_on(redis.command(&["EVAL", code, "1", &key, &pause_ms.to_string()]));
            now_ms += pause_ms;
        }
        Ok(())
    });
    outcome.unwrap();
}

#[tokio::test]
async fn a_batch_takes_calls_of_so_many_ids() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let dedup = Dedup::new(&redis.store().await, stream(mirrored, 1)).unwrap();
        check(&dedup, 0..(2 * CALL_IDS_MAX as u64 + 1)).await;
        let verdicts = redis.keys().await.into_iter().filter(|key| key.contains(":v:"));
        let mut lengths = Vec::new();
        for key in verdicts {
            lengths.push(redis.command::<usize>(&["STRLEN", &key]).await - 16);
        }
        lengths.sort_unstable();
        assert_eq!(lengths, [1, CALL_IDS_MAX, CALL_IDS_MAX]);
    }
}

async fn claim(dedup: &Dedup, users: std::ops::Range<u64>, token: BatchToken) -> Vec<Claimed> {
    dedup.claim(&ids(dedup.stream(), users), token).await.unwrap()
}

async fn commit(dedup: &Dedup, users: std::ops::Range<u64>, token: BatchToken) -> Vec<Committed> {
    dedup.commit(&ids(dedup.stream(), users), token).await.unwrap()
}

/// Lets the claims of a shard lapse, as if their time had passed.
async fn lapse(redis: &Redis) {
    let code = "for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do redis.call('ZADD', KEYS[2], 1, id) \
                redis.call('HSET', KEYS[1], id, string.sub(redis.call('HGET', KEYS[1], id), 1, 16) .. '1') end return 'OK'";
    let keys = ["c", "l"].map(|of| format!("oj:dedup:{{clicks/00}}:{of}"));
    redis.command::<String>(&["EVAL", code, "2", &keys[0], &keys[1]]).await;
}

#[tokio::test]
async fn a_click_that_is_claimed_is_held_for_others_and_counts_when_it_is_committed() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let dedup = Dedup::new(&redis.store().await, stream(mirrored, 1)).unwrap();
        let (mine, others) = (BatchToken::random(), BatchToken::random());
        assert_eq!(claim(&dedup, 0..3, mine).await, [Claimed::First; 3]);
        assert_eq!(claim(&dedup, 2..4, others).await, [Claimed::Held, Claimed::First]);
        // Sent again, both are told the same.
        assert_eq!(claim(&dedup, 0..3, mine).await, [Claimed::First; 3]);
        assert_eq!(claim(&dedup, 2..4, others).await, [Claimed::Held, Claimed::First]);
        assert_eq!(dedup.claim(&ids(dedup.stream(), 0..2), mine).await, Err(DedupError::Conflict));
        assert_eq!(commit(&dedup, 0..3, mine).await, [Committed::Committed; 3]);
        assert_eq!(commit(&dedup, 0..3, mine).await, [Committed::Committed; 3]);
        assert_eq!(claim(&dedup, 0..3, BatchToken::random()).await, [Claimed::Duplicate; 3]);
        assert_eq!(check(&dedup, 0..3).await, [Verdict::Duplicate; 3]);
        // What is only claimed may yet count for somebody who does not claim.
        assert_eq!(check(&dedup, 3..4).await, [Verdict::First]);
        assert_eq!(commit(&dedup, 3..4, others).await, [Committed::Lost]);
        let twice = ids(dedup.stream(), [7, 7]);
        let token = BatchToken::random();
        assert_eq!(dedup.claim(&twice, token).await.unwrap(), [Claimed::First, Claimed::Duplicate]);
        assert_eq!(dedup.commit(&twice, token).await.unwrap(), [Committed::Committed; 2]);
    }
}

/// Whoever claimed is never heard of again.
#[tokio::test]
async fn a_crash_between_claim_and_commit_does_not_lose_the_click() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let dedup = Dedup::new(&redis.store().await, stream(mirrored, 1)).unwrap();
        let (dead, next, late) = (BatchToken::random(), BatchToken::random(), BatchToken::random());
        claim(&dedup, 0..10, dead).await;
        claim(&dedup, 10..20, late).await;
        assert_eq!(claim(&dedup, 0..10, next).await, [Claimed::Held; 10]);
        lapse(&redis).await;
        let next = BatchToken::random();
        assert_eq!(claim(&dedup, 0..10, next).await, [Claimed::First; 10]);
        // Not dead after all: somebody else has half of it.
        assert_eq!(commit(&dedup, 0..10, dead).await, [Committed::Lost; 10]);
        assert_eq!(commit(&dedup, 0..10, next).await, [Committed::Committed; 10]);
        // And whom nobody missed has lost nothing.
        assert_eq!(commit(&dedup, 10..20, late).await, [Committed::Committed; 10]);
        assert_eq!(check(&dedup, 0..20).await, [Verdict::Duplicate; 20]);
    }
}

#[tokio::test]
async fn what_is_released_counts_for_whoever_comes_next() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let dedup = Dedup::new(&redis.store().await, stream(mirrored, 1)).unwrap();
        let (mine, others) = (BatchToken::random(), BatchToken::random());
        claim(&dedup, 0..10, mine).await;
        commit(&dedup, 0..2, mine).await;
        claim(&dedup, 10..12, others).await;
        let all = ids(dedup.stream(), 0..12);
        dedup.release(&all, mine).await.unwrap();
        dedup.release(&all, mine).await.unwrap();
        let told = claim(&dedup, 0..12, BatchToken::random()).await;
        assert_eq!(told[..2], [Claimed::Duplicate; 2]);
        assert_eq!(told[2..10], [Claimed::First; 8]);
        assert_eq!(told[10..], [Claimed::Held; 2]);
    }
}

#[tokio::test]
async fn claims_that_lapse_leave_nothing_behind() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let dedup = Dedup::new(&redis.store().await, stream(mirrored, 1)).unwrap();
        claim(&dedup, 0..900, BatchToken::random()).await;
        let (claims, lapses) = ("oj:dedup:{clicks/00}:c", "oj:dedup:{clicks/00}:l");
        for key in [claims, lapses] {
            let life_ms: i64 = redis.command(&["PTTL", key]).await;
            assert!((1..=61_000).contains(&life_ms), "{key}: {life_ms}");
        }
        lapse(&redis).await;
        claim(&dedup, 2_000..2_001, BatchToken::random()).await;
        assert_eq!(redis.command::<u64>(&["HLEN", claims]).await, 1);
        assert_eq!(redis.command::<u64>(&["ZCARD", lapses]).await, 1);
    }
}

/// A commit is of clicks that were written down: memory that is short must not make them count twice.
#[tokio::test]
async fn out_of_memory_commits_go_through_and_claims_do_not() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let dedup = Dedup::new(&redis.store().await, stream(mirrored, 1)).unwrap();
        let token = BatchToken::random();
        claim(&dedup, 0..10, token).await;
        redis.command::<String>(&["CONFIG", "SET", "maxmemory", "1"]).await;
        let refused = dedup.claim(&ids(dedup.stream(), 10..20), BatchToken::random()).await;
        assert!(matches!(refused, Err(DedupError::Unanswered { unanswered: 10, .. })), "{refused:?}");
        assert_eq!(commit(&dedup, 0..10, token).await, [Committed::Committed; 10]);
        dedup.release(&ids(dedup.stream(), 0..10), token).await.unwrap();
    }
}

/// Many who claim the same clicks, and of whom a half dies: each click counts once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_who_claim_and_commit_one_counts_each_click() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let store = redis.store().await;
        let processes = [0; 2].map(|_| Dedup::new(&store, stream(mirrored, 2)).unwrap());
        let worker = |number: u64| {
            let dedup = processes[usize::from(number.is_multiple_of(2))].clone();
            tokio::spawn(async move {
                let mut counted = Vec::new();
                for batch in 0..10 {
                    let users: Vec<u64> = (0..50).map(|n| (number * 7 + batch * 31 + n) % 300).collect();
                    let (batch, token) = (ids(dedup.stream(), users.iter().copied()), BatchToken::random());
                    let told = dedup.claim(&batch, token).await.unwrap();
                    let mine: Vec<usize> = (0..50).filter(|place| told[*place] == Claimed::First).collect();
                    let claimed: Vec<ClickId> = mine.iter().map(|place| batch[*place]).collect();
                    if (number + users[0]).is_multiple_of(2) {
                        dedup.release(&claimed, token).await.unwrap();
                        continue;
                    }
                    let committed = dedup.commit(&claimed, token).await.unwrap();
                    assert!(committed.iter().all(|each| *each == Committed::Committed), "no lease has lapsed");
                    counted.extend(mine.into_iter().map(|place| users[place]));
                }
                counted
            })
        };
        let mut counted: Vec<u64> = join_all((0..6).map(worker)).await.into_iter().flat_map(Result::unwrap).collect();
        let all = counted.len();
        counted.sort_unstable();
        counted.dedup();
        assert_eq!(all, counted.len());
        assert!(all > 100, "{all}");
    }
}

#[tokio::test]
async fn how_full_a_stream_is_can_be_told() {
    let redis = Redis::start().await;
    let dedup = Dedup::new(&redis.store().await, Stream { expected: 3_200, ..stream(false, 3) }).unwrap();
    assert_eq!(dedup.level().await.unwrap(), DedupLevel::default());
    check(&dedup, 0..1_000).await;
    check(&dedup, 500..1_500).await;
    // Some 1,067 ids a shard in a window and 32 in a bucket.
    assert_eq!(dedup.level().await.unwrap(), DedupLevel { ids: 1_500, buckets: 3 * 64, bytes: 1_500 * 8 + 3 * 64 * 60 });
    redis.command::<String>(&["SET", "oj:dedup:{clicks/01}", "mine"]).await;
    let refused = dedup.level().await.unwrap_err();
    assert!(refused.to_string().contains("clicks, shard 1"), "{refused}");
}
