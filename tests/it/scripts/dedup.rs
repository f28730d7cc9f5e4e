//! `dedup_batch`: what a shard of a stream knows before, one call, the reply and what it knows after.

use onejob::error::{Refusal, StoreError};
use onejob::store::{DedupBatch, Deduplicated, Store};

use crate::support::{Redis, until};

const SHARD: &str = "oj:dedup:{clicks/00}";
const MINUTE_MS: i64 = 60_000;
const HOUR_MS: i64 = 60 * MINUTE_MS;
/// Two slices of five hours each.
const WINDOW_MS: u64 = 36_000_000;

/// An id: the digits that choose its bucket, and what is stored.
type Id = ([u8; 24], [u8; 7]);

/// One generation of buckets.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
struct Generation {
    begin_ms: f64,
    slice_ms: u64,
    bits: u32,
    slice: u32,
    ids: Vec<u64>,
}

/// One shard of a stream of clicks.
struct Clicks {
    redis: Redis,
    store: Store,
    window_ms: u64,
    expected: u64,
}

/// The id of a number, spread as a hash is.
fn id(number: u64) -> Id {
    // SplitMix64.
    let mixed = |number: u64| {
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    (digits(u32::try_from(mixed(number + 1) >> 40).unwrap()), *mixed(number + (1 << 40)).to_be_bytes().last_chunk().unwrap())
}

fn digits(bits: u32) -> [u8; 24] {
    std::array::from_fn(|place| if bits >> (23 - place) & 1 == 1 { b'1' } else { b'0' })
}

fn ids(numbers: impl IntoIterator<Item = u64>) -> Vec<Id> {
    let mut ids: Vec<Id> = numbers.into_iter().map(id).collect();
    ids.sort_unstable();
    ids
}

fn firsts(ids: usize) -> Deduplicated {
    Deduplicated::Checked { verdicts: vec![b'1'; ids] }
}

fn duplicates(ids: usize) -> Deduplicated {
    Deduplicated::Checked { verdicts: vec![b'0'; ids] }
}

impl Clicks {
    async fn open() -> Self {
        let redis = Redis::start().await;
        let store = redis.store().await;
        Clicks { redis, store, window_ms: WINDOW_MS, expected: 100 }
    }

    /// One call with a token of its own.
    async fn check(&self, ids: &[Id]) -> Deduplicated {
        self.call(*uuid::Uuid::new_v4().as_bytes(), ids).await.expect("a reply")
    }

    async fn call(&self, token: [u8; 16], ids: &[Id]) -> Result<Deduplicated, StoreError> {
        let bytes: Vec<u8> = ids.iter().flat_map(|(digits, stored)| [&digits[..], stored].concat()).collect();
        let fingerprint = onejob::fingerprint::second_half(&onejob::fingerprint::sha256(&bytes));
        let batch = DedupBatch {
            stream: "clicks",
            shard: 0,
            token: &token,
            fingerprint: &fingerprint,
            window_ms: self.window_ms,
            slice_ms: self.window_ms / 2,
            expected: self.expected,
            keep_ms: 1_000.max(self.window_ms / 60),
            ids: &bytes,
        };
        self.store.dedup_batch(&batch).await
    }

    /// Lets so much time pass for the stream, or, below zero, sets Redis' clock back.
    async fn pass(&self, by_ms: i64) {
        let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) shard[2] = shard[2] + ARGV[1] \
                    redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'";
        self.redis.command::<String>(&["EVAL", code, "1", SHARD, &by_ms.to_string()]).await;
    }

    /// The generations that are looked at.
    async fn generations(&self) -> Vec<Generation> {
        let shard: Vec<u8> = self.redis.command(&["GET", SHARD]).await;
        let (_, _, generations): (u8, i64, Vec<Generation>) = rmp_serde::from_slice(&shard).expect("a shard");
        generations
    }

    /// Lets so much time pass and says of each slice that begins meanwhile what it is asked about, an id of its own.
    async fn pass_in_steps(&self, steps: u64, by_ms: i64) {
        for step in 0..steps {
            self.pass(by_ms).await;
            self.check(&ids(1_000_000 + step..1_000_001 + step)).await;
        }
    }

    /// Everything that is known, byte for byte.
    async fn dump(&self) -> Vec<(String, Vec<u8>)> {
        let mut dump = Vec::new();
        for key in self.keys().await {
            dump.push((key.clone(), self.redis.command(&["DUMP", &key]).await));
        }
        dump
    }

    async fn keys(&self) -> Vec<String> {
        self.redis.keys().await.into_iter().filter(|key| key.starts_with(SHARD)).collect()
    }
}

#[tokio::test]
async fn an_id_is_first_once_and_a_duplicate_until_the_window_has_passed() {
    let clicks = Clicks::open().await;
    let batch = ids(0..50);
    assert_eq!(clicks.check(&batch).await, firsts(50));
    assert_eq!(clicks.check(&batch).await, duplicates(50));
    clicks.pass(10 * HOUR_MS - MINUTE_MS).await;
    assert_eq!(clicks.check(&batch).await, duplicates(50));
    // Until their slice has left the window as a whole; having been asked about does not prolong it.
    clicks.pass(5 * HOUR_MS).await;
    assert_eq!(clicks.check(&batch).await, duplicates(50));
    clicks.pass(2 * MINUTE_MS).await;
    assert_eq!(clicks.check(&batch).await, firsts(50));
    // One generation all the time, and what is forgotten is not counted any more.
    let generations = clicks.generations().await;
    assert_eq!((generations.len(), generations[0].slice, &generations[0].ids[..]), (1, 3, &[50, 0, 0][..]), "{generations:?}");
}

#[tokio::test]
async fn ids_on_both_sides_of_the_border_of_slices_are_remembered_for_the_window() {
    let clicks = Clicks::open().await;
    let (begin, before, after) = (ids(0..10), ids(10..20), ids(20..30));
    assert_eq!(clicks.check(&begin).await, firsts(10));
    clicks.pass(5 * HOUR_MS - MINUTE_MS).await;
    assert_eq!(clicks.check(&before).await, firsts(10));
    clicks.pass(2 * MINUTE_MS).await;
    assert_eq!(clicks.check(&after).await, firsts(10));
    assert_eq!(clicks.generations().await[0].ids, [10, 20]);
    assert_eq!(clicks.check(&before).await, duplicates(10));
    // Nearly a window after the later ones.
    clicks.pass(10 * HOUR_MS - 3 * MINUTE_MS).await;
    assert_eq!(clicks.check(&before).await, duplicates(10));
    assert_eq!(clicks.check(&after).await, duplicates(10));
    // Now the first slice is out, and the second one is not.
    clicks.pass(2 * MINUTE_MS + MINUTE_MS / 2).await;
    assert_eq!(clicks.check(&after).await, duplicates(10));
    assert_eq!(clicks.check(&before).await, firsts(10));
}

#[tokio::test]
async fn a_clock_set_back_unsees_no_id_and_stops_no_slice() {
    let clicks = Clicks::open().await;
    let batch = ids(0..50);
    clicks.check(&batch).await;
    clicks.pass(-MINUTE_MS).await;
    assert_eq!(clicks.check(&batch).await, duplicates(50));
    let began = clicks.generations().await;
    clicks.pass(-72 * HOUR_MS).await;
    assert_eq!(clicks.check(&batch).await, duplicates(50));
    assert_eq!(clicks.generations().await, began);
    let life_ms: i64 = clicks.redis.command(&["PTTL", SHARD]).await;
    assert!((15 * HOUR_MS - MINUTE_MS..=15 * HOUR_MS + MINUTE_MS).contains(&life_ms), "{life_ms}");
    // Three days later would be too late for the window.
    clicks.pass(15 * HOUR_MS + MINUTE_MS).await;
    assert_eq!(clicks.check(&batch).await, firsts(50));
}

#[tokio::test]
async fn a_batch_sent_again_is_told_the_same_and_changes_nothing() {
    let clicks = Clicks::open().await;
    clicks.check(&ids(0..10)).await;
    let (token, batch) = ([7; 16], ids(5..15));
    let Deduplicated::Checked { verdicts } = clicks.call(token, &batch).await.unwrap() else { panic!("it is new") };
    let duplicate = ids(5..10);
    let expected: Vec<u8> = batch.iter().map(|id| if duplicate.contains(id) { b'0' } else { b'1' }).collect();
    assert_eq!(verdicts, expected);
    let before = clicks.dump().await;
    assert_eq!(clicks.call(token, &batch).await.unwrap(), Deduplicated::Repeated { verdicts });
    assert_eq!(clicks.call(token, &batch[1..]).await.unwrap(), Deduplicated::Conflict);
    assert_eq!(clicks.dump().await, before);
}

/// One bucket has all of them: it was made for one id.
#[tokio::test]
async fn a_slice_a_thousand_times_fuller_than_expected_stays_exact() {
    let clicks = Clicks { expected: 1, ..Clicks::open().await };
    let batches: Vec<Vec<Id>> = (0..12).map(|batch| ids(batch * 1_000..(batch + 1) * 1_000)).collect();
    for batch in &batches {
        assert_eq!(clicks.check(batch).await, firsts(1_000));
        assert_eq!(clicks.check(batch).await, duplicates(1_000));
    }
    for batch in &batches {
        assert_eq!(clicks.check(batch).await, duplicates(1_000));
    }
}

/// A generation is made for some hundred ids, and ten times as many come.
#[tokio::test]
async fn a_generation_that_is_too_full_is_followed_by_one_with_more_buckets_and_looked_at_for_a_window() {
    let clicks = Clicks { expected: 500, ..Clicks::open().await };
    clicks.check(&ids(0..400)).await;
    let first = clicks.generations().await[0].clone();
    assert_eq!((first.bits, first.slice_ms, &first.ids[..]), (4, WINDOW_MS / 2, &[400][..]));
    clicks.pass(HOUR_MS).await;
    for batch in 0..4 {
        clicks.check(&ids(1_000 * (batch + 1)..1_000 * (batch + 2))).await;
    }
    let generations = clicks.generations().await;
    assert_eq!(generations.len(), 2, "{generations:?}");
    assert!(generations[1].bits > first.bits && generations[0].ids[0] + generations[1].ids[0] == 4_400, "{generations:?}");
    assert_eq!(clicks.check(&ids(0..400)).await, duplicates(400));
    for batch in 0..4 {
        assert_eq!(clicks.check(&ids(1_000 * (batch + 1)..1_000 * (batch + 2))).await, duplicates(1_000));
    }
    // The first one's slice is out after a window, and the second one's is not.
    clicks.pass(14 * HOUR_MS + MINUTE_MS).await;
    assert_eq!(clicks.check(&ids(4_000..5_000)).await, duplicates(1_000));
    assert_eq!(clicks.generations().await.len(), 1);
    assert_eq!(clicks.check(&ids(0..400)).await, firsts(400));
}

/// What comes in the first moments is no measure of a window.
#[tokio::test]
async fn a_generation_that_is_full_at_once_is_followed_by_one_sixteen_times_as_large() {
    let clicks = Clicks { expected: 500, ..Clicks::open().await };
    clicks.check(&ids(0..1_000)).await;
    clicks.check(&ids(1_000..1_100)).await;
    clicks.pass(10).await;
    clicks.check(&ids(2_000..2_001)).await;
    // 16 × 1,100 ids, 32 a bucket.
    assert_eq!(clicks.generations().await.iter().map(|each| each.bits).collect::<Vec<_>>(), [4, 10]);
}

/// However full: with so many generations that each id is looked for in, none more is begun.
#[tokio::test]
async fn no_more_than_so_many_generations_are_looked_at() {
    let clicks = Clicks { expected: 1, ..Clicks::open().await };
    clicks.check(&ids(0..1)).await;
    let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) local running = shard[3][1] \
                for n = 1, 7 do table.insert(shard[3], n, { running[1] - 8 + n, running[2], 0, 0, { 0 } }) end \
                running[5] = { 1000 } redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'";
    clicks.redis.command::<String>(&["EVAL", code, "1", SHARD]).await;
    clicks.pass(MINUTE_MS).await;
    assert_eq!(clicks.check(&ids(0..500)).await, {
        let verdicts = ids(0..500).iter().map(|each| if *each == id(0) { b'0' } else { b'1' }).collect();
        Deduplicated::Checked { verdicts }
    });
    assert_eq!(clicks.generations().await.len(), 8);
}

/// A slice's number is a byte: behind the last one another generation begins, and nothing is forgotten early or late for it.
#[tokio::test]
async fn a_generation_has_so_many_slices() {
    let clicks = Clicks::open().await;
    clicks.check(&ids(0..10)).await;
    clicks.pass_in_steps(250, 5 * HOUR_MS).await;
    let last = clicks.generations().await;
    assert_eq!((last.len(), last[0].slice), (1, 250));
    clicks.check(&ids(10..20)).await;
    clicks.pass_in_steps(1, 5 * HOUR_MS).await;
    assert_eq!(clicks.generations().await.iter().map(|each| each.slice).collect::<Vec<_>>(), [250, 0]);
    assert_eq!(clicks.check(&ids(10..20)).await, duplicates(10));
    clicks.pass(10 * HOUR_MS + MINUTE_MS).await;
    assert_eq!(clicks.check(&ids(0..20)).await, firsts(20));
    assert_eq!(clicks.generations().await.len(), 1);
}

/// Nobody came for longer than a generation has slices: it begins anew, as large as was declared.
#[tokio::test]
async fn a_stream_that_was_silent_for_long_begins_anew() {
    let clicks = Clicks { expected: 500, ..Clicks::open().await };
    clicks.check(&ids(0..10)).await;
    clicks.pass(5 * HOUR_MS * 300).await;
    assert_eq!(clicks.check(&ids(0..10)).await, firsts(10));
    let generations = clicks.generations().await;
    assert_eq!((generations.len(), generations[0].bits, generations[0].slice), (1, 4, 0), "{generations:?}");
}

#[tokio::test]
async fn a_generation_that_is_nearly_empty_is_followed_by_a_smaller_one() {
    let clicks = Clicks { expected: 32 << 11, ..Clicks::open().await };
    clicks.check(&ids(0..100)).await;
    clicks.pass_in_steps(2, 5 * HOUR_MS).await;
    assert_eq!(clicks.generations().await.iter().map(|each| each.bits).collect::<Vec<_>>(), [11]);
    clicks.pass_in_steps(1, 5 * HOUR_MS).await;
    assert_eq!(clicks.generations().await.iter().map(|each| each.bits).collect::<Vec<_>>(), [11, 0]);
    assert_eq!(clicks.check(&ids(1_000_001..1_000_002)).await, duplicates(1));
}

/// With another window or other slices nothing is unseen; the next slice is as long as is declared now.
#[tokio::test]
async fn a_stream_that_is_declared_anew_forgets_nothing() {
    let mut clicks = Clicks { expected: 1_000, ..Clicks::open().await };
    clicks.check(&ids(0..10)).await;
    clicks.window_ms = WINDOW_MS * 2;
    assert_eq!(
        clicks.check(&ids(0..20)).await,
        Deduplicated::Checked {
            verdicts: ids(0..20).iter().map(|each| if ids(0..10).contains(each) { b'0' } else { b'1' }).collect(),
        }
    );
    assert_eq!(clicks.generations().await.len(), 1);
    clicks.pass(5 * HOUR_MS + MINUTE_MS).await;
    assert_eq!(clicks.check(&ids(0..20)).await, duplicates(20));
    assert_eq!(clicks.generations().await.iter().map(|each| each.slice_ms).collect::<Vec<_>>(), [WINDOW_MS / 2, WINDOW_MS]);
    // Twenty in some hours do not say that a window has less than was declared.
    assert_eq!(clicks.generations().await[1].bits, 5);
    clicks.pass(19 * HOUR_MS).await;
    assert_eq!(clicks.check(&ids(0..20)).await, duplicates(20));
    clicks.pass(2 * HOUR_MS).await;
    assert_eq!(clicks.check(&ids(0..20)).await, firsts(20));
}

/// What is forgotten leaves its bucket when something is added to it, and what is not stays.
#[tokio::test]
async fn a_bucket_lets_go_of_what_is_forgotten() {
    let clicks = Clicks { expected: 1, ..Clicks::open().await };
    clicks.check(&ids(0..20)).await;
    let key = format!("{SHARD}:{}:", clicks.generations().await[0].begin_ms);
    let bytes = async || clicks.redis.command::<u64>(&["HSTRLEN", &key, ""]).await;
    assert_eq!(bytes().await, 20 * 8);
    clicks.pass(5 * HOUR_MS + MINUTE_MS).await;
    clicks.check(&ids(20..25)).await;
    assert_eq!(bytes().await, 25 * 8);
    clicks.pass(10 * HOUR_MS).await;
    assert_eq!(clicks.check(&ids(20..25)).await, duplicates(5));
    assert_eq!(clicks.check(&ids(30..31)).await, firsts(1));
    assert_eq!(bytes().await, 6 * 8);
}

/// Sixty-one buckets, and in the sixtieth so many ids that it would be cut in the middle if ids were counted.
#[tokio::test]
async fn a_call_reads_as_many_buckets_at_once_as_fit_a_reply() {
    let clicks = Clicks { expected: 32 << 12, ..Clicks::open().await };
    let mut all: Vec<Id> = (0..61).map(|bucket| (digits(bucket << 12), id(bucket.into()).1)).collect();
    all.extend((100..200).map(|number| (digits(59 << 12), id(number).1)));
    all.sort_unstable();
    let reads = async || {
        let stats: String = clicks.redis.command(&["INFO", "commandstats"]).await;
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_hmget:calls=")).map(str::to_owned);
        line.map_or(0, |line| line.split(',').next().unwrap().parse::<u64>().unwrap())
    };
    assert_eq!(clicks.check(&all).await, firsts(161));
    assert_eq!(reads().await, 2);
    assert_eq!(clicks.check(&all).await, duplicates(161));
}

/// A later onejob may keep a shard in another way.
#[tokio::test]
async fn a_shard_of_another_schema_is_refused_and_left_as_it_is() {
    let clicks = Clicks::open().await;
    clicks.check(&ids(0..10)).await;
    let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) shard[1] = 3 \
                redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'";
    clicks.redis.command::<String>(&["EVAL", code, "1", SHARD]).await;
    let before = clicks.dump().await;
    let refused = clicks.call([7; 16], &ids(0..10)).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Fatal { code, .. } if code == "BADSCHEMA"), "{refused:?}");
    assert_eq!(clicks.dump().await, before);
}

/// Also those that nothing is added to: what is in them is remembered for a window from the end of its slice.
#[tokio::test]
async fn when_a_slice_begins_all_buckets_live_as_long_as_it_needs_them() {
    let clicks = Clicks { expected: 32 << 16, ..Clicks::open().await };
    clicks.check(&ids(0..200)).await;
    let begin_ms = clicks.generations().await[0].begin_ms;
    let lives = async || {
        let mut lives = Vec::new();
        for name in ["00", "01", "10", "11"] {
            lives.push(clicks.redis.command::<i64>(&["PTTL", &format!("{SHARD}:{begin_ms}:{name}")]).await);
        }
        lives
    };
    let about = |lives: &[i64], hours: i64| {
        let (least, most) = (hours * HOUR_MS - 2 * MINUTE_MS, hours * HOUR_MS + 2 * MINUTE_MS);
        assert!(lives.iter().all(|life_ms| (least..=most).contains(life_ms)), "{lives:?}, about {hours} hours");
    };
    about(&lives().await, 15);
    // Redis does not know of the hours that pass here: without a word to it, the lives would stay as they are or shrink.
    clicks.pass(4 * HOUR_MS).await;
    clicks.check(&ids(200..201)).await;
    clicks.pass(HOUR_MS + MINUTE_MS).await;
    for name in ["00", "01", "10", "11"] {
        clicks.redis.command::<i64>(&["PEXPIRE", &format!("{SHARD}:{begin_ms}:{name}"), "3600000"]).await;
    }
    clicks.check(&ids(201..202)).await;
    about(&lives().await, 15);
}

/// Each of the bits that an id has of its hash tells it from the others, in a generation that uses all digits that it can.
#[tokio::test]
async fn each_bit_of_an_id_tells_it_from_others() {
    let clicks = Clicks { expected: 32 << 12, ..Clicks::open().await };
    let (bits, stored) = (0x5a_5a5a_u32, [0x3c, 0x99, 0, 0xff, 0x42, 7, 0x81]);
    let mut all = vec![(digits(bits), stored)];
    all.extend((12..24).map(|bit| (digits(bits ^ 1 << bit), stored)));
    for bit in 0..56 {
        let mut other = stored;
        other[bit / 8] ^= 1 << (bit % 8);
        all.push((digits(bits), other));
    }
    all.sort_unstable();
    assert_eq!(clicks.check(&all).await, firsts(1 + 12 + 56));
    assert_eq!(clicks.generations().await[0].bits, 12);
    assert_eq!(clicks.check(&all).await, duplicates(1 + 12 + 56));
}

/// Both halves of what tells ids apart: what is stored, and where.
#[tokio::test]
async fn ids_with_the_same_stored_bits_in_other_buckets_are_two() {
    let clicks = Clicks { expected: 32 << 12, ..Clicks::open().await };
    let stored = *b"similar";
    // Twelve digits count.
    let (one, two, same) = (digits(0), digits(1 << 12), digits(1));
    assert_eq!(clicks.check(&[(one, stored), (two, stored)]).await, firsts(2));
    assert_eq!(clicks.generations().await[0].bits, 12);
    assert_eq!(clicks.check(&[(same, stored)]).await, duplicates(1));
}

/// Bytes that begin in one id and end in the next are no id.
#[tokio::test]
async fn an_id_is_not_found_between_two_others() {
    let clicks = Clicks::open().await;
    let bucket = digits(0);
    assert_eq!(clicks.check(&[(bucket, *b"aaaabbb"), (bucket, *b"ccccddd")]).await, firsts(2));
    // Behind each of them stands the number of its slice.
    let between = *b"bbb\0ccc";
    assert_eq!(clicks.check(&[(bucket, between)]).await, firsts(1));
    assert_eq!(clicks.check(&[(bucket, between), (bucket, *b"ccccddd")]).await, duplicates(2));
    // And where both are there, the one between is found behind.
    assert_eq!(clicks.check(&[(bucket, *b"ddd\0bbb")]).await, firsts(1));
}

#[tokio::test]
async fn ids_that_are_not_in_order_are_refused_and_nothing_is_remembered() {
    let clicks = Clicks { expected: 32 << 16, ..Clicks::open().await };
    let (low, high, other) = ((digits(0), [1; 7]), (digits(1 << 10), [2; 7]), (digits(1 << 23), [3; 7]));
    for wrong in [&[high, low][..], &[other, low], &[low, high, low]] {
        let refused = clicks.call([7; 16], wrong).await.unwrap_err();
        assert!(matches!(&refused, StoreError::Fatal { detail, .. } if detail.contains("not in order")), "{refused}");
        assert_eq!(clicks.keys().await, Vec::<String>::new());
    }
}

/// What a call wrote before it failed would be duplicates when it is made again.
#[tokio::test]
async fn a_call_that_fails_half_way_takes_back_what_it_wrote() {
    let clicks = Clicks { expected: 32 << 16, ..Clicks::open().await };
    // In four HASHes, the last of which is somebody else's STRING.
    let before = ids(1_000..1_200);
    assert_eq!(clicks.check(&before).await, firsts(200));
    let begin = clicks.generations().await[0].begin_ms;
    let key = format!("{SHARD}:{begin}:11");
    let kept: Vec<u8> = clicks.redis.command(&["DUMP", &key]).await;
    clicks.redis.command::<String>(&["SET", &key, "mine"]).await;
    let dump = clicks.dump().await;
    let (token, batch) = ([7; 16], ids(0..200));
    clicks.call(token, &batch).await.expect_err("it cannot be completed");
    assert_eq!(clicks.dump().await, dump);
    let mut restore = redis::cmd("RESTORE");
    restore.arg(&key).arg(0).arg(kept).arg("REPLACE");
    restore.query_async::<()>(&mut clicks.redis.connection()).await.unwrap();
    assert_eq!(clicks.call(token, &batch).await.unwrap(), firsts(200));
    assert_eq!(clicks.check(&before).await, duplicates(200));
}

/// As above, where what cannot be written comes last.
#[tokio::test]
async fn ids_without_kept_verdicts_are_not_remembered() {
    let clicks = Clicks::open().await;
    clicks.check(&ids(0..10)).await;
    let batch = ids(5..20);
    clicks.redis.command::<String>(&["ACL", "SETUSER", "default", "-set"]).await;
    let buckets = clicks.redis.command::<Vec<String>>(&["KEYS", &format!("{}:[1-9]*", SHARD.replace('{', "\\{"))]).await;
    let before: Vec<u8> = clicks.redis.command(&["HGET", &buckets[0], "0"]).await;
    clicks.call([7; 16], &batch).await.expect_err("verdicts cannot be kept");
    assert_eq!(clicks.redis.command::<Vec<u8>>(&["HGET", &buckets[0], "0"]).await, before);
    clicks.redis.command::<String>(&["ACL", "SETUSER", "default", "+@all"]).await;
    let Deduplicated::Checked { verdicts } = clicks.call([7; 16], &batch).await.unwrap() else { panic!("nothing was kept") };
    assert_eq!(verdicts.iter().filter(|verdict| **verdict == b'1').count(), 10);
}

#[tokio::test]
async fn out_of_memory_nothing_is_remembered_and_the_same_call_is_right_later() {
    let clicks = Clicks::open().await;
    clicks.check(&ids(0..10)).await;
    let before = clicks.dump().await;
    clicks.redis.command::<String>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let (token, batch) = ([7; 16], ids(10..500));
    let refused = clicks.call(token, &batch).await.unwrap_err();
    assert!(matches!(refused, StoreError::NotExecuted { code: Refusal::Oom, .. }), "{refused}");
    assert_eq!(clicks.dump().await, before);
    clicks.redis.command::<String>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert_eq!(clicks.call(token, &batch).await.unwrap(), firsts(490));
}

#[tokio::test]
async fn every_key_of_a_stream_expires_and_none_is_left() {
    let clicks = Clicks { window_ms: 1_000, expected: 32 << 16, ..Clicks::open().await };
    for batch in 0..5 {
        clicks.check(&ids(batch * 1_000..batch * 1_000 + 1_000)).await;
        for key in clicks.keys().await {
            let life_ms: i64 = clicks.redis.command(&["PTTL", &key]).await;
            assert!((-2..=2_600).contains(&life_ms) && life_ms != -1, "{key}: {life_ms}");
        }
    }
    assert!(clicks.keys().await.len() >= 6);
    until("every key is gone", async || clicks.keys().await.is_empty()).await;
}
