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
type Id = ([u8; 24], [u8; 8]);

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
    (digits(u32::try_from(mixed(number + 1) >> 40).unwrap()), mixed(number + (1 << 40)).to_be_bytes())
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
        let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) shard[1] = shard[1] + ARGV[1] \
                    redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'";
        self.redis.command::<String>(&["EVAL", code, "1", SHARD, &by_ms.to_string()]).await;
    }

    /// The slices that are looked at: begin, end, bits, ids.
    async fn slices(&self) -> Vec<[u64; 4]> {
        let code = "local out = {} for _, slice in ipairs(cmsgpack.unpack(redis.call('GET', KEYS[1]))[2]) do \
                    out[#out + 1] = { string.format('%.0f', slice[1]), string.format('%.0f', slice[2]), \
                    string.format('%.0f', slice[3]), string.format('%.0f', slice[4]) } end return out";
        let slices: Vec<Vec<String>> = self.redis.command(&["EVAL", code, "1", SHARD]).await;
        slices.into_iter().map(|slice| std::array::from_fn(|place| slice[place].parse().unwrap())).collect()
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
    assert_eq!(clicks.slices().await.len(), 3);
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
    assert_eq!(clicks.slices().await.len(), 2);
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
    let began = clicks.slices().await;
    clicks.pass(-72 * HOUR_MS).await;
    assert_eq!(clicks.check(&batch).await, duplicates(50));
    assert_eq!(clicks.slices().await, began);
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

#[tokio::test]
async fn a_slice_that_is_too_full_is_cut_short_and_followed_by_one_with_more_buckets() {
    let clicks = Clicks { expected: 400, ..Clicks::open().await };
    clicks.check(&ids(0..400)).await;
    let [[begin, end, bits, 400]] = clicks.slices().await[..] else { panic!("{:?}", clicks.slices().await) };
    assert_eq!((bits, end - begin), (4, WINDOW_MS / 2));
    clicks.pass(HOUR_MS).await;
    for batch in 0..4 {
        clicks.check(&ids(1_000 * (batch + 1)..1_000 * (batch + 2))).await;
    }
    let slices = clicks.slices().await;
    let [[_, cut, ..], [next, ends, more, _]] = slices[..] else { panic!("{slices:?}") };
    assert!(cut == next && ends == end && cut < end && more > bits, "{slices:?}");
    assert_eq!(clicks.check(&ids(0..400)).await, duplicates(400));
    for batch in 0..4 {
        assert_eq!(clicks.check(&ids(1_000 * (batch + 1)..1_000 * (batch + 2))).await, duplicates(1_000));
    }
    // The next slice is made for what this one had in its time.
    clicks.pass(5 * HOUR_MS).await;
    clicks.check(&ids(9_000..9_001)).await;
    assert!(clicks.slices().await.last().unwrap()[2] >= more - 1, "{:?}", clicks.slices().await);
}

/// However full: with so many slices that each id is looked for in, none more is begun.
#[tokio::test]
async fn no_more_than_so_many_slices_are_looked_at() {
    let clicks = Clicks { expected: 1, ..Clicks::open().await };
    clicks.check(&ids(0..1)).await;
    let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) local running = shard[2][1] \
                for n = 1, 7 do table.insert(shard[2], n, { running[1] - 8 + n, running[2], 0, 0 }) end running[4] = 1000 \
                redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'";
    clicks.redis.command::<String>(&["EVAL", code, "1", SHARD]).await;
    clicks.pass(MINUTE_MS).await;
    assert_eq!(clicks.check(&ids(0..500)).await, {
        let verdicts = ids(0..500).iter().map(|each| if *each == id(0) { b'0' } else { b'1' }).collect();
        Deduplicated::Checked { verdicts }
    });
    assert_eq!(clicks.slices().await.len(), 8);
}

/// Both halves of what tells ids apart: what is stored, and where.
#[tokio::test]
async fn ids_with_the_same_stored_bits_in_other_buckets_are_two() {
    let clicks = Clicks { expected: 40 << 12, ..Clicks::open().await };
    let stored = *b"the same";
    // Twelve digits count.
    let (one, two, same) = (digits(0), digits(1 << 12), digits(1));
    assert_eq!(clicks.check(&[(one, stored), (two, stored)]).await, firsts(2));
    let bits = clicks.slices().await[0][2];
    assert_eq!(bits, 12);
    assert_eq!(clicks.check(&[(same, stored)]).await, duplicates(1));
}

/// Eight bytes that begin in one id and end in the next are no id.
#[tokio::test]
async fn an_id_is_not_found_between_two_others() {
    let clicks = Clicks::open().await;
    let bucket = digits(0);
    assert_eq!(clicks.check(&[(bucket, *b"aaaabbbb"), (bucket, *b"ccccdddd")]).await, firsts(2));
    assert_eq!(clicks.check(&[(bucket, *b"bbbbcccc")]).await, firsts(1));
    assert_eq!(clicks.check(&[(bucket, *b"bbbbcccc"), (bucket, *b"ccccdddd")]).await, duplicates(2));
    // And where both are there, the one between is found behind.
    assert_eq!(clicks.check(&[(bucket, *b"ddddbbbb")]).await, firsts(1));
}

#[tokio::test]
async fn ids_that_are_not_in_order_are_refused_and_nothing_is_remembered() {
    let clicks = Clicks { expected: 40 << 14, ..Clicks::open().await };
    let (low, high, other) = ((digits(0), [1; 8]), (digits(1 << 10), [2; 8]), (digits(1 << 23), [3; 8]));
    for wrong in [&[high, low][..], &[other, low], &[low, high, low]] {
        let refused = clicks.call([7; 16], wrong).await.unwrap_err();
        assert!(matches!(&refused, StoreError::Fatal { detail, .. } if detail.contains("not in order")), "{refused}");
        assert_eq!(clicks.keys().await, Vec::<String>::new());
    }
}

/// What a call wrote before it failed would be duplicates when it is made again.
#[tokio::test]
async fn a_call_that_fails_half_way_takes_back_what_it_wrote() {
    let clicks = Clicks { expected: 40 << 14, ..Clicks::open().await };
    // In four HASHes, the last of which is somebody else's STRING.
    let before = ids(1_000..1_200);
    assert_eq!(clicks.check(&before).await, firsts(200));
    let begin = clicks.slices().await[0][0];
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
    let clicks = Clicks { window_ms: 1_000, expected: 40 << 14, ..Clicks::open().await };
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
