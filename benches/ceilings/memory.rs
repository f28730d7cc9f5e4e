//! What a finished job leaves in Redis, besides its input and its result.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use onejob::job::{Body, Payload};

use crate::Bounds;
use crate::claims::{self, INPUT_BYTES, JobShape, Keys};
use crate::library::{self, TASKS};
use crate::private::Redis;
use crate::report::{Aim, Report};

/// Sizes of a result's body: the allocator has classes, and one size may just fit or just not.
const RESULT_SIZES: [usize; 8] = [200, 224, 248, 272, 280, 296, 320, 344];
/// Keys whose MEMORY USAGE is asked for.
const SAMPLES: usize = 200;

pub(crate) async fn finished_jobs(bounds: Bounds, report: &mut Report) -> Result<()> {
    let (mut overheads, mut keys_bytes) = (Vec::new(), Vec::new());
    for size in RESULT_SIZES {
        let redis = Redis::start().await?;
        let store = claims::store(&redis.url()).await?;
        let (keys, left) = (Keys::new(), Arc::new(AtomicU64::new(bounds.jobs)));
        let before = redis.used_memory()?;
        let mut tasks = Vec::with_capacity(TASKS);
        for _ in 0..TASKS {
            let (store, keys, left) = (store.clone(), keys.clone(), Arc::clone(&left));
            let response = library::response(size);
            let head = response
                .headers
                .iter()
                .fold(response.status.to_string(), |head, (name, value)| format!("{head}\n{name}: {value}"));
            let result = Payload { head, body: Body::Inline(response.body) };
            let shape = JobShape::default();
            tasks.push(tokio::spawn(async move {
                while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                    let claim = claims::claim(&store, &shape, &keys.next()).await?;
                    claims::finish(&store, &claim, Some(claim.hint_ms), &result).await?;
                }
                anyhow::Ok(())
            }));
        }
        for task in tasks {
            task.await??;
        }
        let used = redis.used_memory()?.saturating_sub(before) as f64 / bounds.jobs as f64;
        let payload = (INPUT_BYTES + size) as f64;
        overheads.push((size, used - payload));
        keys_bytes.push(sampled(&redis)? - payload);
        store.close().await;
    }
    let mean = overheads.iter().map(|(_, bytes)| bytes).sum::<f64>() / overheads.len() as f64;
    let usage = keys_bytes.iter().sum::<f64>() / keys_bytes.len() as f64;
    let sizes: Vec<String> = overheads.iter().map(|(size, bytes)| format!("{size}: {bytes:.0}")).collect();
    let what = format!(
        "used_memory, besides input ({INPUT_BYTES} B) and result; {} jobs for each size of a result ({}); by MEMORY USAGE \
         {usage:.0}",
        bounds.jobs,
        sizes.join(", ")
    );
    report.bytes("bytes a finished job", &what, mean, Aim::AtMost(400.0));
    Ok(())
}

/// The mean of MEMORY USAGE over some records.
fn sampled(redis: &Redis) -> Result<f64> {
    let (mut sum, mut seen) = (0_u64, 0_usize);
    while seen < SAMPLES {
        let key: String = redis.ask(&["RANDOMKEY"])?;
        if key.starts_with("oj:{") {
            sum += redis.ask::<u64>(&["MEMORY", "USAGE", &key])?;
            seen += 1;
        }
    }
    Ok(sum as f64 / SAMPLES as f64)
}
