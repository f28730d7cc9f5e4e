//! What a click costs Redis, beside `SET NX PX` for the same clicks: processor time and memory an id, interleaved on two servers.
//!
//! Measured and printed, never asserted: what is asserted is that no new click is taken for another one.

use std::time::{Duration, Instant};

use onejob::dedup::{BatchToken, ClickId, Dedup, FieldValue, Stream, Verdict};
use onejob::fingerprint::hex;

use crate::support::{Redis, until_within};

/// Ids of one batch, and commands of one pipeline.
const BATCH: usize = 500;
/// Batches before it is the other one's turn.
const TURN: usize = 40;
/// Slices that are filled one after the other: the last one has two older ones behind it.
const SLICES: usize = 3;
/// Clicks of the short form.
const SHORT: usize = 60_000;
/// Clicks of the long form, unless `ONEJOB_DEDUP_IDS` says otherwise.
const LONG: usize = 10_000_000;

/// What one way has cost so far.
#[derive(Clone, Copy, Default)]
struct Cost {
    ids: u64,
    cpu_seconds: f64,
    seconds: f64,
}

impl Cost {
    fn line(self, what: &str) -> String {
        let each = |seconds: f64| seconds * 1e6 / self.ids as f64;
        format!(
            "{what:<28} {:>6.2} µs of Redis' CPU an id, {:>9.0} ids a second",
            each(self.cpu_seconds),
            self.ids as f64 / self.seconds
        )
    }
}

async fn info(redis: &Redis, section: &str, field: &str) -> f64 {
    let info: String = redis.command(&["INFO", section]).await;
    let line = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':').map(str::to_owned));
    line.unwrap_or_else(|| panic!("INFO {section} has no {field}")).parse().unwrap()
}

async fn cpu_seconds(redis: &Redis) -> f64 {
    info(redis, "cpu", "used_cpu_user_main_thread").await + info(redis, "cpu", "used_cpu_sys_main_thread").await
}

async fn measured(redis: &Redis, cost: &mut Cost, ids: usize, work: impl Future<Output = ()>) {
    let (cpu, began) = (cpu_seconds(redis).await, Instant::now());
    work.await;
    cost.seconds += began.elapsed().as_secs_f64();
    cost.cpu_seconds += cpu_seconds(redis).await - cpu;
    cost.ids += ids as u64;
}

async fn compare(clicks: usize) {
    let (redis, other) = (Redis::start().await, Redis::start().await);
    let stream =
        Stream { keep: Duration::from_secs(1), expected: clicks as u64 * 2 / 3, slices: 2, ..Stream::new("clicks", &["user"]) };
    let slice_ms = stream.window.as_millis() / 2;
    let dedup = Dedup::new(&redis.store().await, stream).unwrap();
    let (empty, other_empty) = (info(&redis, "memory", "used_memory").await, info(&other, "memory", "used_memory").await);
    let mut number: i128 = 0;
    for slice in 0..SLICES {
        let (mut ours, mut theirs) = (Cost::default(), Cost::default());
        let in_slice = clicks / SLICES;
        while (ours.ids as usize) < in_slice {
            let batches: Vec<Vec<ClickId>> = (0..TURN)
                .map(|_| {
                    let id = |_| {
                        number += 1;
                        dedup.stream().id(|_| Some(FieldValue::Integer(number))).unwrap()
                    };
                    (0..BATCH).map(id).collect()
                })
                .collect();
            let checked = async {
                for batch in &batches {
                    let verdicts = dedup.check(batch, BatchToken::random()).await.unwrap();
                    assert!(verdicts.iter().all(|verdict| *verdict == Verdict::First), "a new click is taken for another one");
                }
            };
            measured(&redis, &mut ours, TURN * BATCH, checked).await;
            let set = async {
                for batch in &batches {
                    let mut pipeline = redis::pipe();
                    for id in batch {
                        let key = format!("click:{}", hex(id.as_bytes()));
                        pipeline.cmd("SET").arg(key).arg(1).arg("NX").arg("PX").arg(86_400_000).ignore();
                    }
                    pipeline.query_async::<()>(&mut other.connection()).await.unwrap();
                }
            };
            measured(&other, &mut theirs, TURN * BATCH, set).await;
        }
        println!("{}", ours.line(&format!("clicks, {slice} older slices")));
        println!("{}", theirs.line("SET NX PX"));
        println!("ratio {:.2} of CPU, {:.2} of rate", theirs.cpu_seconds / ours.cpu_seconds, theirs.seconds / ours.seconds);
        let code = "local shard = cmsgpack.unpack(redis.call('GET', KEYS[1])) shard[2] = shard[2] + ARGV[1] \
                    redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') return 'OK'";
        let _: String = redis.command(&["EVAL", code, "1", "oj:dedup:{clicks/00}", &slice_ms.to_string()]).await;
    }
    until_within(Duration::from_secs(60), "kept verdicts are gone", async || {
        redis.command::<Vec<String>>(&["KEYS", "*:v:*"]).await.is_empty()
    })
    .await;
    let each = |bytes: f64| bytes / number as f64;
    println!(
        "{number} clicks: {:.1} bytes an id, SET NX PX {:.1}",
        each(info(&redis, "memory", "used_memory").await - empty),
        each(info(&other, "memory", "used_memory").await - other_empty)
    );
}

#[tokio::test]
async fn sixty_thousand_new_clicks_are_new() {
    compare(SHORT).await;
}

/// Zero of ten million new clicks are dropped, and what they cost: `make dedup-bench`.
#[tokio::test]
#[ignore = "minutes, and two gigabytes of memory"]
async fn ten_million_new_clicks_are_new() {
    #[expect(clippy::disallowed_methods, reason = "how much to do is a setting of the test")]
    let clicks = std::env::var("ONEJOB_DEDUP_IDS").map_or(LONG, |ids| ids.parse().expect("a number"));
    compare(clicks).await;
}
