//! `mirror_batch`, `mirror_claim`, `mirror_commit`: what a caller has read of a log, one call, the reply and the log after.

use onejob::error::StoreError;
use onejob::store::{
    DedupBatch, DedupLevel, Deduplicated, MirrorId, MirrorNews, MirrorPosition, MirrorView, Mirrored, Store, first_frame,
    frame_bytes,
};

use crate::support::Redis;

const SHARD: &str = "oj:dedup:{clicks/00}";
const MINUTE_MS: i64 = 60_000;
const HOUR_MS: i64 = 60 * MINUTE_MS;
/// Two slices of five hours each.
const WINDOW_MS: u64 = 36_000_000;
const KEEP_MS: u64 = 600_000;
const NOWHERE: MirrorPosition = MirrorPosition::NOWHERE;

/// One mirrored shard.
struct Log {
    redis: Redis,
    store: Store,
}

/// What a caller says of a call's ids: how far it has read, its oldest evidence, a verdict each.
struct Says<'a> {
    position: MirrorPosition,
    oldest: u64,
    verdicts: &'a str,
}

fn from(position: MirrorPosition) -> Says<'static> {
    Says { position, oldest: 0, verdicts: "" }
}

fn ids(numbers: impl IntoIterator<Item = u64>) -> Vec<MirrorId> {
    let id = |number: u64| {
        let mut id = [7; 10];
        id[..8].copy_from_slice(&number.to_be_bytes());
        id
    };
    numbers.into_iter().map(id).collect()
}

fn token(number: u8) -> [u8; 16] {
    [number; 16]
}

impl Log {
    async fn open() -> Self {
        let redis = Redis::start().await;
        let store = redis.store().await;
        Log { redis, store }
    }

    /// A check with a token of its own; every id is unknown to the caller, unless it says otherwise.
    async fn check(&self, says: Says<'_>, ids: &[MirrorId]) -> Mirrored {
        self.call(*uuid::Uuid::new_v4().as_bytes(), says, ids).await.expect("a reply")
    }

    async fn call(&self, token: [u8; 16], says: Says<'_>, ids: &[MirrorId]) -> Result<Mirrored, StoreError> {
        self.ask(token, says, ids, async |batch, view| self.store.mirror_batch(batch, view).await).await
    }

    async fn claim(&self, token: [u8; 16], says: Says<'_>, ids: &[MirrorId]) -> Mirrored {
        let claim = async |batch: &DedupBatch<'_>, view: &MirrorView<'_>| self.store.mirror_claim(batch, &token, view).await;
        self.ask(*uuid::Uuid::new_v4().as_bytes(), says, ids, claim).await.expect("a reply")
    }

    async fn commit(&self, token: [u8; 16], says: Says<'_>, ids: &[MirrorId]) -> Mirrored {
        let commit = async |batch: &DedupBatch<'_>, view: &MirrorView<'_>| self.store.mirror_commit(batch, &token, view).await;
        self.ask(*uuid::Uuid::new_v4().as_bytes(), says, ids, commit).await.expect("a reply")
    }

    async fn release(&self, token: [u8; 16], ids: &[MirrorId]) {
        let own = *uuid::Uuid::new_v4().as_bytes();
        let batch = DedupBatch { ids: ids.as_flattened(), ..batch(&own, &[0; 16]) };
        self.store.dedup_release(&batch, &token, 10).await.unwrap();
    }

    async fn ask(
        &self,
        token: [u8; 16],
        says: Says<'_>,
        ids: &[MirrorId],
        ask: impl AsyncFn(&DedupBatch<'_>, &MirrorView<'_>) -> Result<Mirrored, StoreError>,
    ) -> Result<Mirrored, StoreError> {
        let fingerprint = onejob::fingerprint::second_half(&onejob::fingerprint::sha256(ids.as_flattened()));
        let verdicts = if says.verdicts.is_empty() { "1".repeat(ids.len()) } else { says.verdicts.to_owned() };
        let unknown = ids.iter().zip(verdicts.bytes()).filter(|(_, verdict)| *verdict == b'1');
        let unknown: Vec<u8> = unknown.flat_map(|(id, _)| *id).collect();
        let Says { position, oldest, .. } = says;
        let view = MirrorView { position, oldest, verdicts: verdicts.as_bytes(), ids: &unknown };
        ask(&batch(&token, &fingerprint), &view).await
    }

    /// The position behind ids that are checked now.
    async fn add(&self, position: MirrorPosition, ids: &[MirrorId]) -> MirrorPosition {
        let (verdicts, news) = checked(self.check(from(position), ids).await);
        behind(&news, verdicts.matches('1').count())
    }

    /// Somebody adds ids who has the stream with a window of one hour, and slices of half an hour.
    async fn add_for_an_hour(&self, says: Says<'_>, ids: &[MirrorId]) -> Mirrored {
        let check = async |batch: &DedupBatch<'_>, view: &MirrorView<'_>| {
            let batch = DedupBatch { window_ms: 3_600_000, slice_ms: 1_800_000, ..*batch };
            self.store.mirror_batch(&batch, view).await
        };
        self.ask(*uuid::Uuid::new_v4().as_bytes(), says, ids, check).await.expect("a reply")
    }

    /// Lets so much time pass for the stream, or, below zero, sets Redis' clock back.
    async fn pass(&self, by_ms: i64) {
        self.change("shard[2] = shard[2] + ARGV[1]", &by_ms.to_string()).await;
    }

    async fn change(&self, change: &str, argument: &str) {
        let code = format!(
            "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) {change} \
             redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'"
        );
        self.redis.command::<String>(&["EVAL", &code, "1", SHARD, argument]).await;
    }

    async fn chunk(&self, number: u64) -> Vec<u8> {
        self.redis.command(&["GET", &format!("{SHARD}:m:{number}")]).await
    }

    async fn level(&self) -> u64 {
        self.store.dedup_level("clicks", 0).await.unwrap().ids
    }

    /// Everything that is known, byte for byte.
    async fn dump(&self) -> Vec<(String, Vec<u8>)> {
        let mut dump = Vec::new();
        for key in self.redis.keys().await.into_iter().filter(|key| key.starts_with(SHARD)) {
            dump.push((key.clone(), self.redis.command(&["DUMP", &key]).await));
        }
        dump
    }
}

fn batch<'a>(token: &'a [u8; 16], fingerprint: &'a [u8; 16]) -> DedupBatch<'a> {
    DedupBatch {
        stream: "clicks",
        shard: 0,
        token,
        fingerprint,
        window_ms: WINDOW_MS,
        slice_ms: WINDOW_MS / 2,
        expected: 0,
        keep_ms: KEEP_MS,
        ids: &[],
    }
}

fn checked(reply: Mirrored) -> (String, MirrorNews) {
    match reply {
        Mirrored::Checked { verdicts, news } => (String::from_utf8(verdicts).unwrap(), news),
        other => panic!("{other:?}"),
    }
}

fn claimed(reply: Mirrored) -> String {
    match reply {
        Mirrored::Claimed { verdicts } => String::from_utf8(verdicts).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// The position behind what was told and the caller's own ids.
fn behind(news: &MirrorNews, own: usize) -> MirrorPosition {
    MirrorPosition { chunk: news.chunk, offset: news.offset + frame_bytes(own) as u64, digest: news.digest }
}

#[tokio::test]
async fn new_ids_stand_one_behind_another_and_who_has_read_them_goes_on() {
    let log = Log::open().await;
    let (verdicts, first) = checked(log.check(from(NOWHERE), &ids(0..3)).await);
    assert_eq!((&verdicts[..], first.oldest, first.chunk, first.offset, &first.tail[..]), ("111", 1, 1, 0, &[][..]));
    let says = Says { position: behind(&first, 3), oldest: 1, verdicts: "101" };
    let (verdicts, second) = checked(log.check(says, &ids([9, 1, 8])).await);
    assert_eq!((&verdicts[..], second.offset, &second.tail[..]), ("101", frame_bytes(3) as u64, &[][..]));
    let chunk = log.chunk(1).await;
    let one = first_frame(&chunk).unwrap();
    let two = first_frame(&chunk[one.bytes..]).unwrap();
    assert_eq!((one.digest, one.ids), (NOWHERE.digest, &ids(0..3)[..]));
    assert_eq!((two.digest, two.ids, one.bytes + two.bytes), (first.digest, &ids([9, 8])[..], chunk.len()));
    assert_ne!(first.digest, second.digest);
    // Only duplicates: nothing is added.
    let says = Says { position: behind(&second, 2), oldest: 1, verdicts: "00" };
    let (verdicts, third) = checked(log.check(says, &ids([9, 1])).await);
    assert_eq!((&verdicts[..], third.digest, log.level().await), ("00", second.digest, 5));
    assert_eq!(log.store.dedup_level("clicks", 0).await.unwrap(), DedupLevel { ids: 5, buckets: 0, bytes: chunk.len() as u64 });
    let life_ms: i64 = log.redis.command(&["PTTL", &format!("{SHARD}:m:1")]).await;
    assert!((15 * HOUR_MS - MINUTE_MS..=15 * HOUR_MS + MINUTE_MS).contains(&life_ms), "{life_ms}");
}

#[tokio::test]
async fn what_others_have_added_since_is_looked_through_and_told() {
    let log = Log::open().await;
    let read = log.add(NOWHERE, &ids(0..10)).await;
    let other = log.add(read, &ids(10..15)).await;
    log.add(other, &ids(20..22)).await;
    for (position, skipped) in [(NOWHERE, 0), (read, frame_bytes(10)), (other, frame_bytes(10) + frame_bytes(5))] {
        let log_before = log.chunk(1).await;
        let says = Says { position, oldest: 0, verdicts: "11111" };
        let asked = ids([30 + skipped as u64, 12, 20, 21, 31 + skipped as u64]);
        let (verdicts, news) = checked(log.check(says, &asked).await);
        // What it had read already it says itself.
        assert_eq!(verdicts, if position == other { "11001" } else { "10001" });
        assert_eq!(news.tail, log_before[skipped..], "from {skipped}");
        assert_eq!(news.offset, log_before.len() as u64);
    }
}

#[tokio::test]
async fn a_batch_sent_again_is_told_the_same_whatever_its_caller_has_read_since() {
    let log = Log::open().await;
    let read = log.add(NOWHERE, &ids(0..3)).await;
    let batch = ids(2..6);
    let says = || Says { position: read, oldest: 1, verdicts: "0111" };
    let (verdicts, news) = checked(log.call(token(1), says(), &batch).await.unwrap());
    assert_eq!(verdicts, "0111");
    let before = log.dump().await;
    let unread = MirrorPosition { offset: 5, ..NOWHERE };
    for says in [says(), from(unread), Says { position: behind(&news, 3), oldest: 1, verdicts: "0000" }] {
        let again = log.call(token(1), says, &batch).await.unwrap();
        assert_eq!(again, Mirrored::Repeated { verdicts: b"0111".to_vec() });
    }
    assert_eq!(log.call(token(1), from(read), &batch[1..]).await.unwrap(), Mirrored::Conflict);
    assert_eq!(log.dump().await, before);
}

#[tokio::test]
async fn a_copy_that_is_not_the_beginning_of_the_log_is_behind_and_changes_nothing() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..10)).await;
    let two = log.add(one, &ids(10..20)).await;
    let before = log.dump().await;
    let other = *b"0123456789ab";
    for position in [
        MirrorPosition { digest: other, ..one },
        MirrorPosition { digest: other, ..two },
        MirrorPosition { digest: one.digest, ..two },
        MirrorPosition { offset: two.offset + 24, ..two },
        MirrorPosition { chunk: 2, ..two },
        MirrorPosition { chunk: 2, offset: 0, ..two },
        MirrorPosition { offset: one.offset + 1, ..one },
    ] {
        let reply = log.check(from(position), &ids(30..31)).await;
        assert_eq!(reply, Mirrored::Behind { oldest: 1 }, "{position:?}");
        assert_eq!(log.claim(token(1), from(position), &ids(30..31)).await, Mirrored::Behind { oldest: 1 }, "{position:?}");
        assert_eq!(log.commit(token(1), from(position), &ids(30..31)).await, Mirrored::Behind { oldest: 1 }, "{position:?}");
    }
    assert_eq!(log.dump().await, before);
    assert_eq!(checked(log.check(from(two), &ids(30..31)).await).0, "1");
}

#[tokio::test]
async fn a_caller_that_lacks_too_much_is_behind() {
    let log = Log::open().await;
    let first = log.add(NOWHERE, &ids(0..1)).await;
    let mut position = first;
    let mut calls = 0;
    while position.offset - first.offset + frame_bytes(1_000) as u64 <= 65_536 {
        position = log.add(position, &ids(1_000 * (calls + 1)..1_000 * (calls + 2))).await;
        calls += 1;
    }
    let (verdicts, news) = checked(log.check(from(first), &ids([1_000, 1_000 * calls, 1])).await);
    assert_eq!((&verdicts[..], calls), ("001", 6));
    log.add(behind(&news, 1), &ids(100_000..101_000)).await;
    assert_eq!(log.check(from(first), &ids([1_000])).await, Mirrored::Behind { oldest: 1 });
    // Who has read nothing cannot be answered by a look at the end either.
    assert_eq!(log.check(from(NOWHERE), &ids([1_000])).await, Mirrored::Behind { oldest: 1 });
}

#[tokio::test]
async fn an_id_is_forgotten_when_its_slice_has_left_the_window_and_no_earlier() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..10)).await;
    log.pass(5 * HOUR_MS + MINUTE_MS).await;
    // Another slice, and the caller has read to the end of the one before.
    let (verdicts, news) = checked(log.check(Says { position: one, oldest: 1, verdicts: "011" }, &ids([0, 10, 11])).await);
    assert_eq!((&verdicts[..], news.oldest, news.chunk, news.offset, &news.tail[..]), ("011", 1, 2, 0, &[][..]));
    assert_eq!(behind(&news, 2).offset, frame_bytes(2) as u64);
    // Somebody who stopped at the end of the first slice is told of the beginning of the next one; who has read less is not.
    let (verdicts, news) = checked(log.check(from(one), &ids([10, 12])).await);
    assert_eq!(verdicts, "01");
    let two = behind(&news, 1);
    for position in [NOWHERE, MirrorPosition { offset: 0, ..one }] {
        assert_eq!(log.check(from(position), &ids([13])).await, Mirrored::Behind { oldest: 1 });
    }
    log.pass(10 * HOUR_MS - 3 * MINUTE_MS).await;
    let says = |oldest, verdicts| Says { position: two, oldest, verdicts };
    let reply = log.check(says(1, "00"), &ids([0, 10])).await;
    let (verdicts, news) = checked(reply);
    assert_eq!((&verdicts[..], news.oldest, news.chunk), ("00", 1, 3));
    let three = behind(&news, 0);
    log.pass(4 * MINUTE_MS).await;
    let says = |oldest, verdicts| Says { position: three, oldest, verdicts };
    assert_eq!(log.check(says(1, "0"), &ids([0])).await, Mirrored::Behind { oldest: 2 });
    assert_eq!(log.claim(token(1), says(1, "0"), &ids([0])).await, Mirrored::Behind { oldest: 2 });
    assert_eq!(log.commit(token(1), says(1, "0"), &ids([0])).await, Mirrored::Behind { oldest: 2 });
    let (verdicts, news) = checked(log.check(says(2, "10"), &ids([0, 10])).await);
    assert_eq!((&verdicts[..], news.oldest), ("10", 2));
}

#[tokio::test]
async fn a_clock_set_back_unsees_no_id_and_stops_no_slice() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..10)).await;
    for back_ms in [MINUTE_MS, 72 * HOUR_MS] {
        log.pass(-back_ms).await;
        let (verdicts, news) = checked(log.check(Says { position: one, oldest: 1, verdicts: "0" }, &ids([0])).await);
        assert_eq!((&verdicts[..], news.chunk), ("0", 1));
    }
    let life_ms: i64 = log.redis.command(&["PTTL", SHARD]).await;
    assert!((15 * HOUR_MS - MINUTE_MS..=15 * HOUR_MS + MINUTE_MS).contains(&life_ms), "{life_ms}");
    log.pass(5 * HOUR_MS + MINUTE_MS).await;
    let (_, news) = checked(log.check(from(one), &ids([1])).await);
    assert_eq!(news.chunk, 2);
}

/// What was read is forgotten, and Redis has not been told yet: there is nothing that could be read.
#[tokio::test]
async fn who_has_read_a_log_that_is_forgotten_by_now_is_not_behind() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..10)).await;
    log.pass(15 * HOUR_MS + MINUTE_MS).await;
    let other = MirrorPosition { digest: [b'f'; 12], ..one };
    assert_eq!(log.check(from(other), &ids([0])).await, Mirrored::Behind { oldest: 2 });
    let (verdicts, news) = checked(log.check(from(one), &ids([0])).await);
    assert_eq!((&verdicts[..], news.oldest, news.chunk, news.offset), ("1", 2, 2, 0));
}

/// A window is being shortened: some have the new one already.
#[tokio::test]
async fn shorter_slices_of_others_are_no_clock_that_was_set_back() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..10)).await;
    log.pass(5 * HOUR_MS + MINUTE_MS).await;
    let two = log.add(one, &ids(10..20)).await;
    assert_eq!(two.chunk, 2);
    let says = Says { position: two, oldest: 1, verdicts: "01" };
    let (verdicts, news) = checked(log.add_for_an_hour(says, &ids([0, 20])).await);
    assert_eq!((&verdicts[..], news.oldest, news.chunk), ("01", 1, 2));
    let three = behind(&news, 1);
    let (verdicts, news) = checked(log.check(Says { position: three, oldest: 1, verdicts: "0" }, &ids([0])).await);
    assert_eq!((&verdicts[..], news.oldest, news.chunk), ("0", 1, 2));
    // Nor does the stream's time stand still for them; and where the clock is set back indeed, it goes on where the chunk began.
    let chunk_after = async |by_ms: i64| {
        log.pass(by_ms).await;
        checked(log.add_for_an_hour(Says { position: three, oldest: 2, verdicts: "0" }, &ids([20])).await).1.chunk
    };
    assert_eq!(chunk_after(-72 * HOUR_MS).await, 2);
    assert_eq!(chunk_after(2 * HOUR_MS).await, 2);
    assert_eq!(chunk_after(3 * HOUR_MS + MINUTE_MS).await, 3);
}

/// A window is being made longer: some have the old one still.
#[tokio::test]
async fn a_chunk_lives_as_long_as_the_longest_window_of_those_who_add_to_it() {
    let log = Log::open().await;
    let life_ms = async || log.redis.command::<i64>(&["PTTL", &format!("{SHARD}:m:1")]).await;
    let (_, news) = checked(log.add_for_an_hour(from(NOWHERE), &ids(0..10)).await);
    let short_ms = life_ms().await;
    assert!((HOUR_MS..2 * HOUR_MS).contains(&short_ms), "{short_ms}");
    let two = log.add(behind(&news, 10), &ids(10..20)).await;
    let long_ms = life_ms().await;
    assert!((10 * HOUR_MS..11 * HOUR_MS).contains(&long_ms), "{long_ms}");
    let (_, news) = checked(log.add_for_an_hour(from(two), &ids(20..30)).await);
    assert!((long_ms - MINUTE_MS..=long_ms).contains(&life_ms().await), "{long_ms}");
    // The next one is as its own callers want it.
    log.pass(31 * MINUTE_MS).await;
    let (_, news) = checked(log.add_for_an_hour(from(behind(&news, 10)), &ids(30..40)).await);
    assert_eq!(news.chunk, 2);
    let next_ms: i64 = log.redis.command(&["PTTL", &format!("{SHARD}:m:2")]).await;
    assert!((HOUR_MS..2 * HOUR_MS).contains(&next_ms), "{next_ms}");
    log.pass(31 * MINUTE_MS).await;
    let (_, news) = checked(log.check(from(behind(&news, 10)), &ids(40..50)).await);
    let three = behind(&news, 10);
    for chunk_after_ms in [0, 4 * HOUR_MS] {
        log.pass(chunk_after_ms).await;
        let (verdicts, news) = checked(log.check(Says { position: three, oldest: 3, verdicts: "0" }, &ids([40])).await);
        assert_eq!((&verdicts[..], news.chunk), ("0", 3));
    }
}

#[tokio::test]
async fn a_chunk_that_is_full_is_followed_by_another_one() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..10)).await;
    let full: u64 = 16_760_832;
    log.redis.command::<u64>(&["SETRANGE", &format!("{SHARD}:m:1"), &(full - 1).to_string(), "x"]).await;
    for (bytes, chunk) in [(full - 1, 1), (full, 2)] {
        log.change("shard[4][1][3] = tonumber(ARGV[1])", &bytes.to_string()).await;
        let digest = log.store.mirror_shard("clicks", 0).await.unwrap().unwrap().digest;
        let (_, news) = checked(log.check(from(MirrorPosition { offset: bytes, digest, ..one }), &ids([bytes])).await);
        assert_eq!(news.chunk, chunk);
    }
}

#[tokio::test]
async fn behind_what_redis_has_lost_another_chunk_begins() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..10)).await;
    log.redis.command::<u64>(&["DEL", &format!("{SHARD}:m:1")]).await;
    // Who knows it still knows it.
    let (verdicts, news) = checked(log.check(Says { position: one, oldest: 1, verdicts: "01" }, &ids([0, 10])).await);
    assert_eq!((&verdicts[..], news.chunk, news.offset), ("01", 2, 0));
    assert_eq!(first_frame(&log.chunk(2).await).unwrap().ids, ids([10]));
}

#[tokio::test]
async fn a_chunk_that_has_ended_takes_no_more_than_it_needs() {
    let log = Log::open().await;
    let memory = async || log.redis.command::<Option<u64>>(&["MEMORY", "USAGE", &format!("{SHARD}:m:1")]).await.unwrap_or(0);
    let mut position = NOWHERE;
    // A STRING that has just grown has as much set aside again.
    while memory().await < position.offset * 3 / 2 || position.offset < 300_000 {
        position = log.add(position, &ids(position.offset..position.offset + 1_000)).await;
    }
    let life_ms: i64 = log.redis.command(&["PTTL", &format!("{SHARD}:m:1")]).await;
    let content = log.chunk(1).await;
    log.pass(5 * HOUR_MS + MINUTE_MS).await;
    position = log.add(position, &ids([1])).await;
    assert_eq!(position.chunk, 2);
    assert!(memory().await < content.len() as u64 * 13 / 10, "{} for {}", memory().await, content.len());
    assert_eq!(log.chunk(1).await, content);
    let left_ms: i64 = log.redis.command(&["PTTL", &format!("{SHARD}:m:1")]).await;
    assert!((life_ms - MINUTE_MS..=life_ms).contains(&left_ms), "{left_ms} of {life_ms}");
    let keys = log.redis.keys().await;
    assert!(!keys.iter().any(|key| key.ends_with(":copy")), "{keys:?}");
}

/// Few ids are looked for one by one, many by a table: both find what others have added.
#[tokio::test]
async fn few_ids_and_many_are_looked_for_in_what_others_have_added() {
    let log = Log::open().await;
    let mut position = log.add(NOWHERE, &ids(0..1)).await;
    let read = position;
    for n in 0..3 {
        position = log.add(position, &ids(100 * n + 100..100 * n + 200)).await;
    }
    for (asked, new) in [(ids(399..401), "01"), (ids(300..400), ""), (ids(300..500), "")] {
        let (verdicts, news) = checked(log.check(from(read), &asked).await);
        if !new.is_empty() {
            assert_eq!(verdicts, new);
        }
        let added = if asked.len() == 200 { 99 } else { usize::from(asked.len() == 2) };
        assert_eq!(verdicts.matches('1').count(), added, "{verdicts}");
        assert_eq!(
            first_frame(&log.chunk(1).await[usize::try_from(news.offset).unwrap_or(0)..]).map_or(0, |f| f.ids.len()),
            added
        );
    }
}

/// A call that fails half way is made good by the next one: what it left behind does not count.
#[tokio::test]
async fn what_a_failed_call_has_written_does_not_count() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..2)).await;
    assert_eq!(claimed(log.claim(token(1), from(one), &ids(5..9)).await), "1111");
    let [lapses, away] = ["l", "away"].map(|of| format!("{SHARD}:{of}"));
    log.redis.command::<String>(&["RENAME", &lapses, &away]).await;
    log.redis.command::<String>(&["SET", &lapses, "no sorted set"]).await;
    let commit = async |ids: &[MirrorId]| {
        let committed =
            async |batch: &DedupBatch<'_>, view: &MirrorView<'_>| log.store.mirror_commit(batch, &token(1), view).await;
        log.ask(token(2), from(one), ids, committed).await
    };
    assert!(commit(&ids(5..9)).await.is_err());
    assert_eq!(log.level().await, 2);
    assert_eq!(log.redis.command::<u64>(&["EXISTS", &format!("{SHARD}:v:{}", "02".repeat(16))]).await, 0);
    assert!(log.chunk(1).await.len() > usize::try_from(one.offset).unwrap());
    // Others go on over it, with less than it wrote.
    let two = log.add(one, &ids([20])).await;
    log.redis.command::<String>(&["RENAME", &away, &lapses]).await;
    let (verdicts, news) = checked(commit(&ids(5..9)).await.unwrap());
    assert_eq!((&verdicts[..], news.offset), ("1111", two.offset));
    let chunk = log.chunk(1).await;
    let tail = first_frame(&chunk[usize::try_from(one.offset).unwrap()..]).unwrap();
    assert_eq!((tail.digest, tail.ids), (one.digest, &ids([20])[..]));
    assert_eq!(log.level().await, 7);
}

#[tokio::test]
async fn a_claim_is_kept_from_others_and_counts_when_it_is_committed() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..2)).await;
    let two = log.add(one, &ids(2..4)).await;
    let says = |verdicts| Says { position: one, oldest: 1, verdicts };
    // 0 is read, 2 is not.
    assert_eq!(claimed(log.claim(token(1), says("0111"), &ids([0, 2, 10, 11])).await), "0011");
    assert_eq!(claimed(log.claim(token(2), says("111"), &ids([10, 2, 12])).await), "201");
    assert_eq!(claimed(log.claim(token(1), says("11"), &ids([10, 11])).await), "11");
    assert_eq!(log.level().await, 4);
    log.release(token(2), &ids([10, 12])).await;
    log.release(token(1), &ids([11])).await;
    assert_eq!(claimed(log.claim(token(2), says("111"), &ids([10, 11, 12])).await), "211");
    // Its own, somebody else's, nobody's, what was counted meanwhile.
    let (verdicts, news) = checked(log.commit(token(1), from(one), &ids([10, 11, 13, 3])).await);
    assert_eq!((&verdicts[..], news.offset), ("1010", two.offset));
    let frame = log.chunk(1).await;
    assert_eq!(first_frame(&frame[usize::try_from(two.offset).unwrap()..]).unwrap().ids, ids([10, 13]));
    assert_eq!(claimed(log.claim(token(3), from(two), &ids([10, 11, 13])).await), "020");
    let claims: u64 = log.redis.command(&["HLEN", &format!("{SHARD}:c")]).await;
    let lapses: u64 = log.redis.command(&["ZCARD", &format!("{SHARD}:l")]).await;
    assert_eq!((claims, lapses), (2, 2), "11 and 12 of the second");
}

#[tokio::test]
async fn a_claim_and_its_commit_sent_again_are_told_the_same() {
    let log = Log::open().await;
    let one = log.add(NOWHERE, &ids(0..2)).await;
    let claim = async |batch: &DedupBatch<'_>, view: &MirrorView<'_>| log.store.mirror_claim(batch, &token(1), view).await;
    let commit = async |batch: &DedupBatch<'_>, view: &MirrorView<'_>| log.store.mirror_commit(batch, &token(1), view).await;
    assert_eq!(claimed(log.ask(token(2), from(one), &ids(1..4), claim).await.unwrap()), "111");
    // Somebody else counts one of them, and the caller reads that.
    let two = log.add(one, &ids(3..4)).await;
    let says = || Says { position: two, oldest: 1, verdicts: "110" };
    let again = log.ask(token(2), says(), &ids(1..4), claim).await.unwrap();
    assert_eq!(again, Mirrored::Repeated { verdicts: b"111".to_vec() });
    let (verdicts, news) = checked(log.ask(token(3), says(), &ids(1..4), commit).await.unwrap());
    assert_eq!(verdicts, "110");
    let before = log.dump().await;
    let says = || Says { position: behind(&news, 2), oldest: 1, verdicts: "000" };
    let again = log.ask(token(3), says(), &ids(1..4), commit).await.unwrap();
    assert_eq!(again, Mirrored::Repeated { verdicts: b"110".to_vec() });
    assert_eq!(log.ask(token(3), says(), &ids([1, 2, 9]), commit).await.unwrap(), Mirrored::Conflict);
    assert_eq!(log.ask(token(2), says(), &ids([1, 2, 9]), claim).await.unwrap(), Mirrored::Conflict);
    assert_eq!(log.dump().await, before);
}

#[tokio::test]
async fn a_shard_of_the_other_kind_is_refused_and_so_is_what_makes_no_sense() {
    let log = Log::open().await;
    log.add(NOWHERE, &ids(0..1)).await;
    let digits = [&b"0".repeat(24)[..], &[1; 7]].concat();
    let (token, fingerprint) = (token(1), [0; 16]);
    let in_buckets = DedupBatch { ids: &digits, ..batch(&token, &fingerprint) };
    let refused = log.store.dedup_batch(&in_buckets).await.unwrap_err().to_string();
    assert!(refused.contains("schema 3, this script reads 2: the stream is mirrored"), "{refused}");
    log.redis.command::<u64>(&["DEL", SHARD]).await;
    assert!(matches!(log.store.dedup_batch(&in_buckets).await, Ok(Deduplicated::Checked { .. })));
    let before = log.dump().await;
    let refused = log.call([2; 16], from(NOWHERE), &ids(0..1)).await.unwrap_err().to_string();
    assert!(refused.contains("schema 2, this script reads 3: the stream is not mirrored"), "{refused}");
    assert!(log.store.mirror_shard("clicks", 0).await.unwrap_err().to_string().contains("BADSHARD"));
    let id = ids(0..1);
    for (verdicts, ids) in [(&b"11"[..], id.as_flattened()), (b"0", id.as_flattened()), (b"2", &[]), (b"1", &id[0][1..])] {
        let view = MirrorView { position: NOWHERE, oldest: 0, verdicts, ids };
        let refused = log.store.mirror_batch(&batch(&[3; 16], &fingerprint), &view).await.unwrap_err().to_string();
        assert!(refused.contains("BADARG"), "{verdicts:?}: {refused}");
    }
    assert_eq!(log.dump().await, before);
}
