//! What a benchmark needs besides jobs: what Redis spends, and a way to take away what the benchmark made.
//!
//! Jobs are deleted nowhere else. Here it takes a prefix that no gateway has by accident, and names that the caller knows: nothing
//! is searched for, so nothing of anybody else's can be met.

use std::time::Duration;

use redis::Value;

use crate::error::StoreError;
use crate::job::{Identity, SHARDS};
use crate::store::Store;

/// What the prefix of a benchmark's keys begins with.
pub const BENCH_PREFIX: &str = "oj-bench-";

/// Keys that are deleted in one pipeline.
const FORGET_AT_ONCE: usize = 256;

impl Store {
    /// Processor time that Redis has spent since its start, user and system, all masters of a cluster, whoever they worked for;
    /// `None` if one does not say.
    ///
    /// # Errors
    /// The store's: ask again.
    pub async fn cpu_spent(&self) -> Result<Option<Duration>, StoreError> {
        let mut sum = Duration::ZERO;
        for master in self.inner.nodes.masters() {
            let mut command = redis::cmd("INFO");
            command.arg("cpu");
            let info = match self.on(&master, command).await {
                Ok(Value::BulkString(bytes)) => String::from_utf8_lossy(&bytes).into_owned(),
                Ok(Value::VerbatimString { text, .. }) => text,
                Ok(_) | Err(StoreError::Fatal { .. }) => return Ok(None),
                Err(error) => return Err(error),
            };
            let seconds = |name: &str| -> Option<f64> {
                info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?.trim().parse().ok()
            };
            let spent = seconds("used_cpu_user").zip(seconds("used_cpu_sys")).map(|(user, system)| user + system);
            let Some(spent) = spent.and_then(|spent| Duration::try_from_secs_f64(spent).ok()) else { return Ok(None) };
            sum += spent;
        }
        Ok(Some(sum))
    }

    /// How many hints of open and of unknown jobs there are under this prefix.
    ///
    /// # Errors
    /// The store's: ask again.
    pub async fn open_hints(&self) -> Result<u64, StoreError> {
        let counts = self.hint_counts().await?;
        Ok(counts.open + counts.unknown)
    }

    /// Deletes jobs of a benchmark and every key that they all share.
    ///
    /// # Errors
    /// `Fatal` (`NOTBENCH`) where the prefix is no benchmark's: nothing was deleted. Others: the same call again.
    pub async fn forget_benchmark(&self, jobs: impl Iterator<Item = Identity>) -> Result<(), StoreError> {
        let prefix = &self.inner.options.prefix;
        if !prefix.starts_with(BENCH_PREFIX) {
            let detail = format!("the prefix {prefix:?} does not begin with {BENCH_PREFIX:?}: its jobs are not deleted");
            return Err(StoreError::fatal("NOTBENCH", detail));
        }
        let keys = &self.inner.keys;
        let shared =
            (0..SHARDS).flat_map(|shard| [keys.due(shard), keys.due_turn(shard), keys.unknown(shard)]).chain([keys.meta()]);
        let mut all = shared.chain(jobs.map(|identity| keys.job(identity)));
        loop {
            let some: Vec<redis::Cmd> = all.by_ref().take(FORGET_AT_ONCE).map(|key| unlink(&key)).collect();
            if some.is_empty() {
                return Ok(());
            }
            for value in self.commands(some).await? {
                if let Value::ServerError(error) = value {
                    return Err(crate::store::retry::of_server(&error));
                }
            }
        }
    }
}

fn unlink(key: &str) -> redis::Cmd {
    let mut command = redis::cmd("UNLINK");
    command.arg(key);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attempt::AttemptToken;
    use crate::job::Payload;
    use crate::store::Begin;
    use crate::store::testing::Fixture;

    #[tokio::test]
    async fn jobs_under_a_gateways_prefix_are_not_deleted() {
        let fixture = Fixture::start().await;
        let job = fixture.submit("k", AttemptToken::random(), &Payload::default(), Begin::Pending).await;
        let keys = fixture.query::<Vec<String>>(&["KEYS", "*"]).await.len();
        match fixture.store.forget_benchmark([job.identity()].into_iter()).await {
            Err(StoreError::Fatal { code, detail }) => {
                assert!(code == "NOTBENCH" && detail.contains("\"oj\""), "{code} {detail}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(fixture.query::<Vec<String>>(&["KEYS", "*"]).await.len(), keys);
    }
}
