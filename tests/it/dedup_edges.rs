//! The edges of a window: gateways whose clocks are wrong, a slice that is many times fuller than the last, clicks at a slice's end.

use std::time::{Duration, SystemTime};

use onejob::dedup::{BatchToken, ClickId, Dedup, FieldValue, Stream, Verdict};

use crate::support::gateway::{Gateway, Site};
use crate::support::{Redis, until_within};

const HOUR: Duration = Duration::from_secs(3_600);
const HOUR_MS: u64 = 3_600_000;
const MINUTE_MS: u64 = 60_000;

/// A window that can be waited for.
const SHORT: [&str; 2] = [
    r#"{ fields = ["user"], window = "4s", slices = 4, lease = "4s" }"#,
    r#"{ fields = ["user"], window = "4s", slices = 4, lease = "4s", mirrored = true }"#,
];
const SHORT_MS: u64 = 4_000;
/// Of a window and the slice that may come on top.
const FORGOTTEN_MS: u64 = SHORT_MS + SHORT_MS / 4;

/// The library that tells a process another time, as its own program names it.
fn faketime() -> String {
    let said = std::process::Command::new("faketime").args(["-m", "-f", "+1h", "printenv", "LD_PRELOAD"]).output();
    let said = said.unwrap_or_else(|error| panic!("cannot run faketime ({error}); `make setup` or `apt-get install faketime`"));
    let library = String::from_utf8_lossy(&said.stdout).trim().to_owned();
    assert!(said.status.success() && library.contains("faketime"), "faketime names no library: {said:?}");
    library
}

/// A gateway whose clock is wrong; what measures lengths of time is not.
async fn gateway(mirrored: bool, site: &Site, library: &str, offset: &str) -> Gateway {
    let environment =
        [("LD_PRELOAD", library), ("FAKETIME", offset), ("FAKETIME_DONT_FAKE_MONOTONIC", "1"), ("FAKETIME_DISABLE_SHM", "1")];
    site.start_in(&environment, &[("stream.clicks", SHORT[usize::from(mirrored)])]).await
}

/// What a gateway's clock says: it stamps its answers.
async fn clock(gateway: &Gateway) -> SystemTime {
    let page = gateway.page("/healthz").await.to_lowercase();
    let date = page.lines().find_map(|line| line.strip_prefix("date: ")).unwrap_or_else(|| panic!("no date: {page}"));
    let [_, day, month, year, time, _] = date.split_ascii_whitespace().collect::<Vec<_>>()[..] else { panic!("{date}") };
    let months = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
    let month = 1 + months.iter().position(|name| *name == month).unwrap_or_else(|| panic!("{date}"));
    humantime::parse_rfc3339(&format!("{year}-{month:02}-{day}T{time}Z")).unwrap_or_else(|error| panic!("{date}: {error}"))
}

/// Redis' clock, Unix ms.
async fn redis_ms(redis: &Redis) -> u64 {
    let (seconds, micros): (u64, u64) = redis.command(&["TIME"]).await;
    seconds * 1_000 + micros / 1_000
}

/// What a gateway says of one user's click, in a batch of its own.
async fn ask(gateway: &Gateway, path: &str, key: &str, user: u64) -> String {
    let body = format!(r#"[{{"user":{user}}}]"#);
    let answer = gateway.send("POST", path, &[("Idempotency-Key", key)], &body).await.expect("an answer");
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.body["verdicts"][0].as_str().unwrap_or_else(|| panic!("{answer:?}")).to_owned()
}

async fn check(gateway: &Gateway, user: u64) -> String {
    ask(gateway, "/v1/dedup/clicks", &uuid::Uuid::new_v4().to_string(), user).await
}

/// Two hours lie between the clocks of the gateways. What a click is goes by Redis' clock alone, at both.
async fn one_window_by_redis_clock(mirrored: bool) {
    let library = faketime();
    let site = Site::open().await;
    let ahead = gateway(mirrored, &site, &library, "+3600s").await;
    let behind = gateway(mirrored, &site, &library, "-3600s").await;
    let now = SystemTime::UNIX_EPOCH + Duration::from_millis(redis_ms(&site.redis).await);
    let (one, other) = (clock(&ahead).await, clock(&behind).await);
    assert!(one > now + HOUR / 2 && other < now - HOUR / 2, "{one:?} and {other:?}: both clocks are wrong");

    // So many users are first at the one gateway, as many at the other one.
    let both = [[&ahead, &behind], [&behind, &ahead]];
    let (mut began, mut within) = (Vec::new(), 0);
    for user in 0..10_u64 {
        let [one, other] = both[user as usize % 2];
        let before_ms = redis_ms(&site.redis).await;
        assert_eq!(check(one, user).await, "first", "{user}");
        let after_ms = redis_ms(&site.redis).await;
        let told = [check(other, user).await, check(one, user).await];
        if redis_ms(&site.redis).await < before_ms + SHORT_MS {
            assert_eq!(told, ["duplicate", "duplicate"], "{user}");
            within += 1;
        }
        began.push((before_ms, after_ms));
    }
    // Until the window has passed at Redis it is a duplicate at both; when the slice is out too, it is first once.
    for (user, (before_ms, after_ms)) in (0_u64..).zip(began) {
        let [other, one] = both[user as usize % 2];
        loop {
            let asked_ms = redis_ms(&site.redis).await;
            if asked_ms > after_ms + FORGOTTEN_MS {
                break;
            }
            let asked_ms = if asked_ms < before_ms + SHORT_MS {
                let told = [check(one, user).await, check(other, user).await];
                let told_ms = redis_ms(&site.redis).await;
                if told_ms < before_ms + SHORT_MS {
                    assert_eq!(told, ["duplicate", "duplicate"], "{user}");
                    within += 1;
                }
                told_ms
            } else {
                asked_ms
            };
            // Nothing but time ends a window here: it is what the test is about.
            let rest_ms = (after_ms + FORGOTTEN_MS).saturating_sub(asked_ms);
            tokio::time::sleep(Duration::from_millis(rest_ms.clamp(1, 100))).await;
        }
        let asked_ms = redis_ms(&site.redis).await;
        let told = [check(one, user).await, check(other, user).await];
        if redis_ms(&site.redis).await < asked_ms + SHORT_MS {
            assert_eq!(told, ["first", "duplicate"], "{user}");
        } else {
            assert_eq!(told[0], "first", "{user}");
        }
    }
    assert!(within > 0, "nothing was asked within its window: the machine is too slow for this test");

    // Of two who ask at once, one at each.
    for user in 100..120 {
        let (one, other) = tokio::join!(check(&ahead, user), check(&behind, user));
        assert_eq!(usize::from(one == "first") + usize::from(other == "first"), 1, "{user}: {one}, {other}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_whose_clocks_are_hours_apart_keep_one_window_by_redis_clock() {
    one_window_by_redis_clock(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_whose_clocks_are_hours_apart_keep_one_window_by_redis_clock_of_a_mirrored_stream() {
    one_window_by_redis_clock(true).await;
}

/// A claim stands for its lease by Redis' clock, and either gateway settles it.
async fn a_claim_is_held_until_its_lease_is_over(mirrored: bool) {
    let library = faketime();
    let site = Site::open().await;
    let ahead = gateway(mirrored, &site, &library, "+3600s").await;
    let behind = gateway(mirrored, &site, &library, "-3600s").await;
    for (round, [one, other]) in [[&ahead, &behind], [&behind, &ahead]].into_iter().enumerate() {
        let (settled, lapsing) = (10 * round as u64, 10 * round as u64 + 1);
        let key = |what: &str| format!("{what}-{round}");
        let (claim, commit) = ("/v1/dedup/clicks/claim", "/v1/dedup/clicks/commit");
        let before_ms = redis_ms(&site.redis).await;
        for (user, name) in [(settled, "settled"), (lapsing, "lapsing")] {
            assert_eq!(ask(one, claim, &key(name), user).await, "first");
            let told = ask(other, claim, &key(&format!("{name}-other")), user).await;
            if redis_ms(&site.redis).await < before_ms + SHORT_MS {
                assert_eq!(told, "held");
            }
        }
        assert_eq!(ask(other, commit, &key("settled"), settled).await, "committed");
        let mut tries = 0;
        // Nothing but time makes a claim lapse here: it is what the test is about.
        until_within(Duration::from_secs(60), "the other one gets it", async || {
            tries += 1;
            let told = ask(other, claim, &format!("try-{round}-{tries}"), lapsing).await;
            let is_over = redis_ms(&site.redis).await >= before_ms + SHORT_MS;
            assert!(told == "held" || is_over, "{told} while the claim stands");
            told == "first"
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_at_a_gateway_whose_clock_is_wrong_is_held_at_the_other_until_its_lease_is_over() {
    a_claim_is_held_until_its_lease_is_over(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_at_a_gateway_whose_clock_is_wrong_is_held_at_the_other_until_its_lease_is_over_of_a_mirrored_stream() {
    a_claim_is_held_until_its_lease_is_over(true).await;
}

fn ids(stream: &Stream, users: impl IntoIterator<Item = u64>) -> Vec<ClickId> {
    users.into_iter().map(|user| stream.id(|_| Some(FieldValue::Integer(user.into()))).unwrap()).collect()
}

/// How many of them are first, asked about in batches of ten thousand.
async fn firsts(dedup: &Dedup, users: std::ops::Range<u64>) -> usize {
    let mut firsts = 0;
    for batch in ids(dedup.stream(), users).chunks(10_000) {
        firsts += first_of(dedup, batch).await;
    }
    firsts
}

async fn first_of(dedup: &Dedup, ids: &[ClickId]) -> usize {
    let told = dedup.check(ids, BatchToken::random()).await.unwrap();
    told.iter().filter(|verdict| **verdict == Verdict::First).count()
}

/// Moves what a shard adds to Redis' clock. Each shard has its own, and none before something was asked about it.
async fn pass(redis: &Redis, stream: &Stream, by_ms: u64) {
    for shard in 0..stream.shards {
        pass_in(redis, stream, shard, by_ms).await;
    }
}

async fn pass_in(redis: &Redis, stream: &Stream, shard: u16, by_ms: u64) {
    let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) shard[2] = shard[2] + ARGV[1] \
                redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'";
    redis.command::<String>(&["EVAL", code, "1", &key(stream, shard), &by_ms.to_string()]).await;
}

/// As docs/PROTOCOL.md, "Ids of a stream", says it.
fn shard_of(id: ClickId, shards: u16) -> u16 {
    let bits = u32::from_be_bytes(id.as_bytes()[11..15].try_into().unwrap());
    u16::try_from((u64::from(bits) * u64::from(shards)) >> 32).unwrap()
}

fn key(stream: &Stream, shard: u16) -> String {
    format!("oj:dedup:{{{}/{shard:02x}}}", stream.name)
}

/// The running generation of a shard: when it began, the length of its slices, the number of the running one; and what is added to
/// Redis' clock. Of a mirrored one, of which each slice is a chunk, when the first of them began.
async fn running(redis: &Redis, stream: &Stream, shard: u16) -> (u64, u64, u64, u64) {
    let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) local slice_ms = tonumber(ARGV[1]) \
                if shard[1] == 3 then return { shard[4][1][2] - slice_ms, slice_ms, #shard[4] - 1, shard[2] } end \
                local last = shard[3][#shard[3]] return { last[1], last[2], last[4], shard[2] }";
    let slice_ms = stream.window.as_millis() as u64 / u64::from(stream.slices);
    redis.command(&["EVAL", code, "1", &key(stream, shard), &slice_ms.to_string()]).await
}

/// A thousand clicks, then ten times as many in the next slice, then a hundred times as many. Buckets were made for the thousand.
async fn a_slice_is_fuller_than_the_last(mirrored: bool) {
    let redis = Redis::start().await;
    let store = redis.store().await;
    for shards in [1, 4] {
        let name = format!("clicks-{shards}");
        let window = Duration::from_millis(12 * HOUR_MS);
        let stream = Stream { name, shards, window, slices: 4, expected: 1_000, mirrored, ..Stream::new("clicks", &["user"]) };
        let dedup = Dedup::new(&store, stream.clone()).unwrap();
        let slices = [0..1_000, 1_000..11_000, 11_000..111_000];
        for (number, slice) in slices.iter().enumerate() {
            if number > 0 {
                pass(&redis, &stream, 3 * HOUR_MS).await;
            }
            let clicks = usize::try_from(slice.end - slice.start).unwrap();
            assert_eq!(firsts(&dedup, slice.clone()).await, clicks, "slice {number}, {shards} shards: one was dropped");
            // Those of all slices so far: whichever generation of buckets has them.
            assert_eq!(firsts(&dedup, 0..slice.end).await, 0, "slice {number}, {shards} shards: one counted twice");
        }
        // A thin slice after the full one, and the end of the window of the first one.
        pass(&redis, &stream, 3 * HOUR_MS).await;
        assert_eq!(firsts(&dedup, 111_000..112_000).await, 1_000);
        assert_eq!(firsts(&dedup, 0..112_000).await, 0);
        // The first slice has left the window, the second one has not: fifteen hours have passed since the first click, and more.
        pass(&redis, &stream, 6 * HOUR_MS + 2 * MINUTE_MS).await;
        assert_eq!(firsts(&dedup, 1_000..112_000).await, 0);
        assert_eq!(firsts(&dedup, 0..1_000).await, 1_000);
    }
}

#[tokio::test]
async fn a_slice_ten_or_a_hundred_times_fuller_than_the_last_keeps_every_click_exact() {
    a_slice_is_fuller_than_the_last(false).await;
}

#[tokio::test]
async fn a_slice_ten_or_a_hundred_times_fuller_than_the_last_keeps_every_click_exact_of_a_mirrored_stream() {
    a_slice_is_fuller_than_the_last(true).await;
}

/// The clock of each shard comes nearer and nearer to the end of its slice, until real time passes that. Clicks before it are
/// forgotten a slice earlier than those behind it, and no slice before its end has left the window.
async fn clicks_at_the_end_of_a_slice(mirrored: bool) {
    let redis = Redis::start().await;
    let store = redis.store().await;
    for shards in [1, 4] {
        let name = format!("clicks-{shards}");
        let window = Duration::from_millis(12 * HOUR_MS);
        let stream = Stream { name, shards, window, slices: 2, expected: 1_000, mirrored, ..Stream::new("clicks", &["user"]) };
        let dedup = Dedup::new(&store, stream.clone()).unwrap();
        assert_eq!(firsts(&dedup, 1_000_000..1_000_100).await, 100, "each shard is there");
        let (mut before, mut after): (Vec<ClickId>, Vec<ClickId>) = (Vec::new(), Vec::new());
        let mut users = 0..16;
        let mut left_ms = 0;
        while after.len() < 200 {
            let batch = ids(&stream, users.clone());
            assert_eq!(dedup.check(&batch, BatchToken::random()).await.unwrap(), [Verdict::First; 16], "{users:?}");
            for shard in 0..shards {
                // A slice begins when something is asked about behind the end of the last one.
                let (begin_ms, slice_ms, slice, added_ms) = running(&redis, &stream, shard).await;
                assert!(slice_ms == 6 * HOUR_MS && slice < 2, "{slice} of {slice_ms} ms");
                let side = if slice == 0 { &mut before } else { &mut after };
                side.extend(batch.iter().filter(|id| shard_of(**id, shards) == shard));
                let rest_ms = (begin_ms + slice_ms).saturating_sub(redis_ms(&redis).await + added_ms);
                if rest_ms > 0 {
                    pass_in(&redis, &stream, shard, rest_ms / 2).await;
                    left_ms = rest_ms - rest_ms / 2;
                }
            }
            assert_eq!(first_of(&dedup, &batch).await, 0, "{users:?}");
            users = users.end..users.end + 16;
        }
        assert!(before.len() > 100 && left_ms < 10_000, "{} before, the last of them {left_ms} ms", before.len());
        assert_eq!((first_of(&dedup, &before).await, first_of(&dedup, &after).await), (0, 0));
        // The window is nearly over.
        pass(&redis, &stream, 12 * HOUR_MS - MINUTE_MS).await;
        assert_eq!((first_of(&dedup, &before).await, first_of(&dedup, &after).await), (0, 0));
        // It is over: one slice is out of it, and the other one is not.
        pass(&redis, &stream, 2 * MINUTE_MS).await;
        assert_eq!((first_of(&dedup, &after).await, first_of(&dedup, &before).await), (0, before.len()));
        pass(&redis, &stream, 6 * HOUR_MS).await;
        assert_eq!(first_of(&dedup, &after).await, after.len());
    }
}

#[tokio::test]
async fn clicks_right_before_and_right_after_the_end_of_a_slice_are_remembered_for_the_window() {
    clicks_at_the_end_of_a_slice(false).await;
}

#[tokio::test]
async fn clicks_right_before_and_right_after_the_end_of_a_slice_are_remembered_for_the_window_of_a_mirrored_stream() {
    clicks_at_the_end_of_a_slice(true).await;
}
