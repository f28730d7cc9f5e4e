//! A list of jobs, by their hints. In a cluster it is made of what the masters have that answer, and says which do not.

use std::collections::BTreeSet;

use crate::error::StoreError;
use crate::job::{Job, SHARDS};
use crate::metrics;
use crate::store::hints::{self, Hint, Which};
use crate::store::nodes::Master;
use crate::store::{Read, Store};

/// Masters that could not be asked for their part, by their addresses.
#[derive(Debug, Default)]
pub(crate) struct Away(BTreeSet<String>);

impl Away {
    pub(crate) fn into_names(self) -> Vec<String> {
        self.0.into_iter().collect()
    }
}

impl Store {
    /// The first jobs that have such a hint, the oldest hint first; and whose jobs may be missing.
    ///
    /// # Errors
    /// Any where not even a part of the list can be made.
    pub(crate) async fn listed(&self, which: Which, limit: usize) -> Result<(Vec<Box<Job>>, Away), StoreError> {
        let (mut jobs, mut away) = (Vec::new(), Away::default());
        for hint in self.oldest(which, limit, &mut away).await? {
            let key = self.inner.keys.job(hint.identity);
            // Each costs its time: one that did not answer is not asked again.
            if self.name_of(&key).is_some_and(|name| away.0.contains(&name)) {
                continue;
            }
            match self.read_told(hint.identity).await {
                Ok(Read::Found(job)) => jobs.push(job),
                Ok(Read::Gone(_) | Read::NotFound) => {}
                Err(error) => self.pass_over(&key, error, &mut away)?,
            }
        }
        Ok((jobs, away))
    }

    /// The first hints of every shard, the oldest first over all shards.
    pub(crate) async fn oldest(&self, which: Which, limit: usize, away: &mut Away) -> Result<Vec<Hint>, StoreError> {
        let key = |shard: u8| match which {
            Which::Due => self.inner.keys.due(shard),
            Which::Unknown => self.inner.keys.unknown(shard),
        };
        let keys: Vec<String> = (0..SHARDS).map(key).collect();
        let ask = |key: &String| {
            let mut command = redis::cmd("ZRANGE");
            command.arg(key).arg(0).arg(limit.saturating_sub(1)).arg("WITHSCORES");
            command
        };
        let answers = self.inner.nodes.send_each(keys.iter().map(ask).collect(), self.by).await;
        let (mut hints, mut failed) = (None, None);
        for (key, answer) in keys.iter().zip(answers) {
            match answer.and_then(hints::read) {
                Ok(some) => hints.get_or_insert_with(Vec::new).extend(some),
                Err(error) => {
                    self.pass_over(key, error.clone(), away)?;
                    failed = Some(error);
                }
            }
        }
        let mut hints = match (hints, failed) {
            (None, Some(error)) => return Err(error),
            (hints, _) => hints.unwrap_or_default(),
        };
        hints.sort_unstable_by_key(|hint| (hint.at_ms, hint.identity));
        hints.truncate(limit);
        Ok(hints)
    }

    /// Notes whose part is missing, where others may have theirs.
    fn pass_over(&self, key: &str, error: StoreError, away: &mut Away) -> Result<(), StoreError> {
        metrics::store_error(error.class());
        match (error, self.name_of(key)) {
            (StoreError::NotExecuted { .. } | StoreError::Ambiguous { .. }, Some(name)) => {
                away.0.insert(name);
                Ok(())
            }
            (error, _) => Err(error),
        }
    }

    /// The master of a key, where there are several.
    fn name_of(&self, key: &str) -> Option<String> {
        match self.inner.nodes.master_of(key.as_bytes()) {
            Some(Master::Only) => None,
            Some(Master::At(node)) => Some(node.to_string()),
            None => Some("slots without a master".to_owned()),
        }
    }
}
