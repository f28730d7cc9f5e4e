//! Many clicks, of which nothing is left when their window is over. That none of ten million is dropped: `make dedup-bench`.

use std::time::Duration;

use onejob::dedup::{BATCH_IDS_MAX, BatchToken, Claimed, Dedup, Stream, Verdict};

use super::{ids, stream};
use crate::fleet::dice::setting;
use crate::support::{Redis, kinds, until_within};

/// Clicks, unless `ONEJOB_DEDUP_IDS` says how many.
const CLICKS: u64 = 100_000;
/// Of a window, and of what else a stream keeps for a while.
const SECOND: Duration = Duration::from_secs(1);
/// Windows of a second are over by then, on a machine that does much else.
const OVER: Duration = Duration::from_secs(60);

/// Case 34. Some are asked about at once, some claimed and committed, some claimed and never heard of again.
#[tokio::test]
async fn of_many_clicks_that_have_expired_no_key_is_left() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let stream = Stream { window: SECOND, keep: SECOND, lease: SECOND, ..stream(mirrored, "clicks", 4) };
        let dedup = Dedup::new(&redis.store().await, stream).unwrap();
        let before = redis.keys().await;
        let mut most = 0;
        let all: Vec<u64> = (0..setting("ONEJOB_DEDUP_IDS").unwrap_or(CLICKS)).collect();
        for (number, users) in all.chunks(BATCH_IDS_MAX / 4).enumerate() {
            let (batch, token) = (ids(dedup.stream(), users.iter().copied()), BatchToken::random());
            if number % 4 < 2 {
                let told = dedup.check(&batch, token).await.unwrap();
                assert!(told.iter().all(|verdict| *verdict == Verdict::First), "a new click is taken for another one");
            } else {
                let told = dedup.claim(&batch, token).await.unwrap();
                assert!(told.iter().all(|verdict| *verdict == Claimed::First), "a new click is taken for another one");
            }
            if number % 4 == 2 {
                dedup.commit(&batch, token).await.unwrap();
            }
            most = most.max(redis.command::<usize>(&["DBSIZE"]).await);
        }
        assert!(most > before.len() + 10, "{most} keys");
        until_within(OVER, "only what was there before is left", async || redis.keys().await == before).await;
    }
}
