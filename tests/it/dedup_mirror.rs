//! Mirrored streams through `Dedup`: copies that are new, old, of a log that is no more, or read in part; no verdict depends on them.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use onejob::dedup::{BatchToken, ClickId, Dedup, DedupError, FieldValue, Stream, Verdict};
use onejob::store::{DedupLevel, Store, StoreOptions};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::fleet::proxy::{Mode, Proxy};
use crate::support::{Redis, until};

const SHARD: &str = "oj:dedup:{clicks/00}";

fn stream(shards: u16) -> Stream {
    Stream { shards, mirrored: true, ..Stream::new("clicks", &["user"]) }
}

fn ids(stream: &Stream, users: impl IntoIterator<Item = u64>) -> Vec<ClickId> {
    let id = |user: u64| stream.id(|_| Some(FieldValue::Integer(user.into()))).unwrap();
    users.into_iter().map(id).collect()
}

/// How many of these are told to be first.
async fn firsts(dedup: &Dedup, users: impl IntoIterator<Item = u64>) -> usize {
    let verdicts = dedup.check(&ids(dedup.stream(), users), BatchToken::random()).await.unwrap();
    verdicts.iter().filter(|verdict| **verdict == Verdict::First).count()
}

/// What stands in Redis of the stream, to be put back later.
async fn saved(redis: &Redis) -> Vec<(String, String)> {
    let code =
        "local dump = redis.call('DUMP', KEYS[1]) return (dump:gsub('.', function(c) return ('%02x'):format(c:byte()) end))";
    let mut saved = Vec::new();
    for key in redis.keys().await {
        let dump = redis.command(&["EVAL", code, "1", &key]).await;
        saved.push((key, dump));
    }
    saved
}

/// Redis has lost what came since: a replica that did not have it was promoted.
async fn put_back(redis: &Redis, saved: &[(String, String)]) {
    let code =
        "return redis.call('RESTORE', KEYS[1], 0, (ARGV[1]:gsub('..', function(c) return string.char(tonumber(c, 16)) end)))";
    redis.command::<String>(&["FLUSHALL"]).await;
    for (key, dump) in saved {
        redis.command::<String>(&["EVAL", code, "1", key, dump]).await;
    }
}

#[tokio::test]
async fn several_processes_that_have_copies_are_told_first_once() {
    let redis = Redis::start().await;
    let store = redis.store().await;
    let process = || Dedup::new(&store, stream(1)).unwrap();
    let (one, two) = (process(), process());
    assert_eq!(firsts(&one, 0..1_000).await, 1_000);
    assert_eq!(firsts(&one, 0..1_000).await, 0);
    assert_eq!(firsts(&two, 500..1_500).await, 500);
    assert_eq!(firsts(&one, 0..1_500).await, 0);
    // More than a call looks through.
    for batch in 0..20_u64 {
        assert_eq!(firsts(&two, 2_000 + batch * 1_000..3_000 + batch * 1_000).await, 1_000);
    }
    assert_eq!(firsts(&one, 0..10_000).await, 500);
    // One that has just started reads all of it.
    let three = process();
    assert_eq!(firsts(&three, 15_000..25_000).await, 3_000);
    assert_eq!(firsts(&one, 15_000..25_000).await, 0);
    let DedupLevel { ids, bytes, .. } = store.dedup_level("clicks", 0).await.unwrap();
    assert_eq!((ids, (250_000..251_000).contains(&bytes)), (25_000, true), "{bytes}");
}

#[tokio::test]
async fn of_many_who_ask_at_once_one_is_told_first() {
    let redis = Redis::start().await;
    let store = redis.store().await;
    let processes: Vec<Dedup> = (0..3).map(|_| Dedup::new(&store, stream(3)).unwrap()).collect();
    let all = ids(processes[0].stream(), 0..3_000);
    let asked = (0..12).map(|n| {
        let (dedup, all) = (&processes[n % 3], &all);
        async move { dedup.check(all, BatchToken::random()).await.unwrap() }
    });
    let told = join_all(asked).await;
    for user in 0..all.len() {
        assert_eq!(told.iter().filter(|verdicts| verdicts[user] == Verdict::First).count(), 1, "{user}");
    }
}

/// The master dies, and a replica goes on that lacks its last writes. Copies that have them are of a log that is no more.
#[tokio::test]
async fn a_copy_of_writes_that_were_lost_is_thrown_away() {
    let redis = Redis::start().await;
    let store = redis.store().await;
    let process = || Dedup::new(&store, stream(1)).unwrap();
    let (one, two) = (process(), process());
    assert_eq!(firsts(&one, 0..100).await, 100);
    assert_eq!(firsts(&two, 0..50).await, 0);
    for others in [0, 50, 100, 150] {
        let before = saved(&redis).await;
        let lost = 10_000 + others * 10..10_100 + others * 10;
        assert_eq!(firsts(&one, lost.clone()).await, 100);
        put_back(&redis, &before).await;
        // Less than what was lost, as much, more; somebody else's, who knows nothing of it.
        assert_eq!(firsts(&two, 1_000 * others..1_000 * others + others).await, usize::try_from(others).unwrap());
        assert_eq!(firsts(&one, lost.clone()).await, 100, "{others}");
        assert_eq!(firsts(&two, lost).await, 0, "{others}");
        assert_eq!(firsts(&one, 0..100).await, 0, "{others}");
        assert_eq!(firsts(&one, 1_000 * others..1_000 * others + others).await, 0, "{others}");
    }
    redis.command::<String>(&["FLUSHALL"]).await;
    assert_eq!(firsts(&one, 0..100).await, 100);
    assert_eq!(firsts(&two, 0..100).await, 0);
}

/// The wire goes while a copy is read: what was read of it is not believed.
#[tokio::test]
async fn a_copy_that_was_read_in_part_is_read_anew() {
    let directory = tempfile::tempdir().unwrap();
    let redis = crate::fleet::redis::DurableRedis::start_with(directory.path(), &[]).await;
    let direct = Store::connect(StoreOptions::new(&redis.url())).await.unwrap().0;
    let writer = Dedup::new(&direct, stream(1)).unwrap();
    // Several reads of 256 KiB.
    for batch in 0..10 {
        assert_eq!(firsts(&writer, batch * 10_000..(batch + 1) * 10_000).await, 10_000);
    }
    let proxy = Proxy::start(redis.socket(), redis.announced());
    let patience = Duration::from_secs(1);
    let options = StoreOptions { connect_timeout: patience, response_timeout: patience, ..StoreOptions::new(&proxy.url()) };
    until("the wire stands", async || Store::connect(options.clone()).await.is_ok()).await;
    let (store, _) = Store::connect(options).await.unwrap();
    let reader = Dedup::new(&store, stream(1)).unwrap().with_patience(Duration::from_secs(60));
    for lost in 1..=6 {
        proxy.lose_replies(lost);
        assert_eq!(firsts(&reader, (0..100_000).step_by(97)).await, 0, "{lost}");
        assert_eq!(firsts(&reader, 200_000 + lost as u64..200_001 + lost as u64).await, 1, "{lost}");
    }
    // A caller that goes away while it reads leaves the copy to the next one.
    let reader = Dedup::new(&direct, stream(1)).unwrap();
    for wait_us in [0, 100, 300, 1_000, 3_000, 10_000] {
        let asked = firsts(&reader, 0..1_000);
        let _ = tokio::time::timeout(Duration::from_micros(wait_us), asked).await;
    }
    assert_eq!(firsts(&reader, 0..10_000).await, 0);
}

/// The master dies while a copy is read, and what had been read of it is not what its replica has.
#[tokio::test]
async fn what_was_read_of_a_master_that_died_meanwhile_is_not_believed() {
    let redis = Redis::start_alone(&[]).await;
    let store = redis.store().await;
    let writer = Dedup::new(&store, stream(1)).unwrap();
    assert_eq!(firsts(&writer, 0..9_000).await, 9_000);
    let replica = saved(&redis).await;
    for batch in 1..10 {
        assert_eq!(firsts(&writer, batch * 9_000..(batch + 1) * 9_000).await, 9_000);
    }
    let socket = redis.socket().strip_prefix("redis+unix://").expect("a socket");
    let proxy = Proxy::start(socket.into(), None);
    let wire = Duration::from_secs(1);
    let options = StoreOptions { connect_timeout: wire, response_timeout: wire, ..StoreOptions::new(&proxy.url()) };
    until("the wire stands", async || Store::connect(options.clone()).await.is_ok()).await;
    let (slow, _) = Store::connect(options).await.unwrap();
    let reader = Dedup::new(&slow, stream(1)).unwrap();
    assert_eq!(slow.dedup_level("clicks", 0).await.unwrap().ids, 90_000);
    let ranges = calls(&redis, "getrange").await;
    proxy.set(Mode::Hold(Duration::from_millis(200)));
    let dies = async {
        until("it reads the second piece", async || calls(&redis, "getrange").await >= ranges + 2).await;
        proxy.set(Mode::Refuse);
        put_back(&redis, &replica).await;
    };
    let (told, ()) = tokio::join!(reader.follow(), dies);
    told.unwrap_err();
    proxy.set(Mode::Pass);
    assert_eq!(firsts(&reader, 8_990..9_010).await, 10);
}

#[tokio::test]
async fn a_log_is_read_once_for_all_who_wait() {
    let redis = Redis::start_alone(&[]).await;
    let store = redis.store().await;
    let writer = Dedup::new(&store, stream(1)).unwrap();
    for batch in 0..10 {
        assert_eq!(firsts(&writer, batch * 10_000..(batch + 1) * 10_000).await, 10_000);
    }
    let reader = Dedup::new(&store, stream(1)).unwrap();
    let before = calls(&redis, "getrange").await;
    let told = join_all((0..16_u64).map(|user| firsts(&reader, user..user + 1))).await;
    assert_eq!(told, [0; 16]);
    // A megabyte, 256 KiB at once.
    let read = calls(&redis, "getrange").await - before;
    assert!((4..=8).contains(&read), "{read}");
}

/// How often a command was executed.
async fn calls(redis: &Redis, command: &str) -> u64 {
    let info: String = redis.command(&["INFO", "commandstats"]).await;
    let line = info.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

/// Whoever waits gives up, and the log is read all the same.
#[tokio::test]
async fn a_log_that_takes_longer_to_read_than_anybody_waits_is_read() {
    let redis = Redis::start().await;
    let store = redis.store().await;
    let writer = Dedup::new(&store, stream(1)).unwrap();
    for batch in 0..10 {
        assert_eq!(firsts(&writer, batch * 10_000..(batch + 1) * 10_000).await, 10_000);
    }
    let reader = Dedup::new(&store, stream(1)).unwrap().with_patience(Duration::from_millis(5));
    let batch = ids(reader.stream(), 0..10);
    let gave_up = reader.check(&batch, BatchToken::random()).await.unwrap_err();
    assert!(gave_up.to_string().contains("the log is still being read"), "{gave_up}");
    until("it is read", async || reader.check(&batch, BatchToken::random()).await.is_ok()).await;
    // And for somebody who does not wait at all.
    let follower = Dedup::new(&store, stream(1)).unwrap();
    follower.follow().await.unwrap();
    let follower = follower.with_patience(Duration::from_millis(5));
    until("it answers", async || follower.check(&batch, BatchToken::random()).await.is_ok()).await;
}

#[tokio::test]
async fn calls_wait_for_one_another_as_long_as_their_own_patience() {
    let redis = Redis::start().await;
    let wire = Duration::from_millis(500);
    let options = StoreOptions { connect_timeout: wire, response_timeout: wire, ..StoreOptions::new(redis.url()) };
    let (store, _) = Store::connect(options).await.unwrap();
    let dedup = Dedup::new(&store, stream(1)).unwrap();
    assert_eq!(firsts(&dedup, 0..1_000).await, 1_000);
    redis.pause();
    let stuck = tokio::spawn({
        let dedup = dedup.clone().with_patience(Duration::from_secs(60));
        async move { firsts(&dedup, 0..2_000).await }
    });
    let hasty = dedup.clone().with_patience(Duration::from_millis(300));
    let mut refused = String::new();
    until("it waits for the other one", async || {
        let told = hasty.check(&ids(hasty.stream(), 0..100), BatchToken::random()).await;
        refused = told.expect_err("redis is paused").to_string();
        refused.contains("calls of this process wait for one another")
    })
    .await;
    redis.resume();
    assert_eq!(stuck.await.unwrap(), 1_000);
    assert_eq!(firsts(&dedup, 0..2_000).await, 0);
}

/// Its window is over, and Redis has not forgotten it yet.
#[tokio::test]
async fn a_stream_that_nobody_asked_about_for_a_window_is_asked_about_again_by_old_copies_and_new_ones() {
    let redis = Redis::start().await;
    let store = redis.store().await;
    let process = || Dedup::new(&store, stream(1)).unwrap().with_patience(Duration::from_secs(2));
    let (one, late) = (process(), process());
    assert_eq!(firsts(&late, 0..5).await, 5);
    assert_eq!(firsts(&one, 5..10).await, 5);
    let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) shard[2] = shard[2] + ARGV[1] \
                redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'";
    redis.command::<String>(&["EVAL", code, "1", SHARD, &(2 * 86_400_000).to_string()]).await;
    for (dedup, users, new) in [(&one, 0..3, 3), (&late, 0..6, 3), (&process(), 0..10, 4)] {
        let told = dedup.check(&ids(dedup.stream(), users.clone()), BatchToken::random()).await;
        let told = told.unwrap_or_else(|error| panic!("{users:?}: {error}"));
        assert_eq!(told.iter().filter(|verdict| **verdict == Verdict::First).count(), new, "{users:?}");
    }
}

/// A copy is read while the master dies: how long the log is was said by the old one, which had a click more than the new one. Who
/// had asked about that click asks again, and the log is as long as it was said to be.
#[tokio::test]
async fn a_copy_that_was_read_from_two_masters_has_no_gap() {
    let redis = Redis::start_alone(&[]).await;
    let store = redis.store().await;
    let writer = Dedup::new(&store, stream(1)).unwrap();
    // More than a call looks through: a new copy must read it.
    assert_eq!(firsts(&writer, 0..9_000).await, 9_000);
    let before = saved(&redis).await;
    let (batch, token) = (ids(writer.stream(), 9_000..9_010), BatchToken::named("a click more"));
    assert_eq!(writer.check(&batch, token).await.unwrap(), [Verdict::First; 10]);

    let socket = redis.socket().strip_prefix("redis+unix://").expect("a socket");
    let proxy = Proxy::start(socket.into(), None);
    let options = StoreOptions { response_timeout: Duration::from_secs(10), ..StoreOptions::new(&proxy.url()) };
    until("the wire stands", async || Store::connect(options.clone()).await.is_ok()).await;
    let (slow, _) = Store::connect(options).await.unwrap();
    let reader = Dedup::new(&slow, stream(1)).unwrap();
    // The first of what it sends, so that all of it is on its way from here on.
    assert_eq!(slow.dedup_level("clicks", 0).await.unwrap().ids, 9_010);
    let (gets, ranges) = (calls(&redis, "get").await, calls(&redis, "getrange").await);
    proxy.set(Mode::Hold(Duration::from_millis(700)));
    let master_dies = async {
        // Two in the script, and one for the shard.
        until("it has been told how long the log is", async || calls(&redis, "get").await >= gets + 3).await;
        put_back(&redis, &before).await;
        until("it has read all that there is", async || calls(&redis, "getrange").await >= ranges + 2).await;
        let writer = Dedup::new(&store, stream(1)).unwrap();
        assert_eq!(writer.check(&batch, token).await.unwrap(), [Verdict::First; 10], "its first answer was lost");
    };
    let (told, ()) = tokio::join!(firsts(&reader, 8_990..9_010), master_dies);
    assert_eq!(told, 0);
}

#[tokio::test]
async fn a_stream_is_mirrored_by_all_who_ask_or_by_nobody() {
    let redis = Redis::start().await;
    let store = redis.store().await;
    let (mirrored, plain) = (stream(1), Stream { mirrored: false, ..stream(1) });
    for (first, second) in [(mirrored.clone(), plain.clone()), (plain, mirrored)] {
        redis.command::<String>(&["FLUSHALL"]).await;
        let (first, second) = (Dedup::new(&store, first).unwrap(), Dedup::new(&store, second).unwrap());
        assert_eq!(firsts(&first, 0..10).await, 10);
        let refused = second.check(&ids(second.stream(), 0..10), BatchToken::random()).await.unwrap_err();
        let DedupError::Unanswered { unanswered: 10, error, .. } = refused else { panic!("{refused}") };
        assert!(error.to_string().contains("BADSCHEMA"), "{error}");
        assert_eq!(firsts(&first, 0..20).await, 10);
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A process asks about users.
    Ask(usize, Vec<u64>),
    /// One of them ends, and another one starts.
    Restart(usize),
    /// Redis' clock goes on by so much of a slice.
    Pass(u64),
    /// What Redis has is kept, as a replica has it.
    Save,
    /// The replica goes on.
    Fail,
}

/// Any order of these, against a map of when each user was last first.
#[test]
fn copies_that_are_old_new_or_wrong_change_no_verdict() {
    let step = prop_oneof![
        12 => (0_usize..3, prop::collection::vec(0_u64..60, 1..40)).prop_map(|(process, users)| Step::Ask(process, users)),
        1 => (0_usize..3).prop_map(Step::Restart),
        3 => (1_u64..150).prop_map(Step::Pass),
        1 => Just(Step::Save),
        1 => Just(Step::Fail),
    ];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let redis = runtime.block_on(Redis::start());
    let store = runtime.block_on(redis.store());
    let cases = ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() };
    TestRunner::new(cases)
        .run(&prop::collection::vec(step, 1..60), |steps| {
            runtime.block_on(any_order(&redis, &store, steps));
            Ok(())
        })
        .unwrap();
}

async fn any_order(redis: &Redis, store: &Store, steps: Vec<Step>) {
    redis.command::<String>(&["FLUSHALL"]).await;
    let stream = stream(1);
    let (window_ms, slice_ms) = (86_400_000, 5_400_000);
    let process = || Dedup::new(store, stream.clone()).unwrap();
    let mut processes = [process(), process(), process()];
    // When each user was first, in the time of the stream, and what is kept of that.
    let (mut now_ms, mut first_ms) = (0_u64, std::collections::HashMap::<u64, u64>::new());
    let mut kept = None;
    for step in steps {
        match step {
            Step::Ask(asker, users) => {
                let told = processes[asker].check(&ids(&stream, users.iter().copied()), BatchToken::random()).await.unwrap();
                let mut in_batch = BTreeSet::new();
                for (user, verdict) in users.into_iter().zip(told) {
                    let again = !in_batch.insert(user);
                    let age_ms = first_ms.get(&user).map(|first_ms| now_ms - first_ms);
                    // The wall clock runs too, by some seconds.
                    match (age_ms, verdict) {
                        (_, Verdict::Duplicate) if again => {}
                        (None, Verdict::First) => drop(first_ms.insert(user, now_ms)),
                        (Some(age_ms), Verdict::First) if age_ms + 60_000 > window_ms => drop(first_ms.insert(user, now_ms)),
                        (Some(age_ms), Verdict::Duplicate) if age_ms < window_ms + slice_ms + 60_000 => {}
                        (age_ms, verdict) => panic!("{user} is {verdict:?}, first {age_ms:?} ms ago"),
                    }
                }
            }
            Step::Restart(which) => processes[which] = process(),
            Step::Pass(percent) => {
                let by_ms = slice_ms * percent / 100;
                let code = "local shard = redis.call('GET', KEYS[1]) if not shard then return 0 end \
                            shard = cmsgpack.unpack(shard) shard[2] = shard[2] + ARGV[1] \
                            redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 1";
                let passed: u64 = redis.command(&["EVAL", code, "1", SHARD, &by_ms.to_string()]).await;
                now_ms += passed * by_ms;
            }
            Step::Save => kept = Some((saved(redis).await, now_ms, first_ms.clone())),
            Step::Fail => {
                if let Some((saved, at_ms, first)) = &kept {
                    put_back(redis, saved).await;
                    (now_ms, first_ms) = (*at_ms, first.clone());
                }
            }
        }
    }
}
