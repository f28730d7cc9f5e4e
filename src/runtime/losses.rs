//! Writes that Redis had acknowledged and does not have any more: they are not prevented at the level `memory`, but they are noticed.
//!
//! An attempt that runs here is missed by its next heartbeat, a job that somebody waits for by its follower. What nobody would look at
//! again, the claims and endings of the last minute, is looked at when another server answers than before. Deliberately not here:
//! making good for it. Only whoever was told can submit again.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::error::StoreError;
use crate::job::{Job, JobId};
use crate::metrics;
use crate::runtime::Inner;
use crate::store::{Lineage, Read};

/// Most writes of this gateway that are remembered: a few seconds of a busy one. A failover takes back less.
const RECENT_MAX: usize = 4096;
/// How long they are remembered.
const RECENT_AGE: Duration = Duration::from_secs(60);
/// How many are looked for side by side.
const LOOKS_AT_ONCE: usize = 16;

/// What this gateway wrote a short while ago.
#[derive(Default)]
pub(super) struct Losses {
    recent: Mutex<VecDeque<Wrote>>,
    /// Who answered last, each master; none before the first look.
    lineages: Mutex<Vec<Lineage>>,
}

#[derive(Clone, Copy)]
struct Wrote {
    what: What,
    job: JobId,
    /// The job's version after it.
    version: u64,
    /// Until when the store must have it.
    until: Instant,
}

/// What is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// A claim, or a job that was seen since.
    Job,
    /// An attempt that runs here.
    Attempt,
    /// A result that had been claimed.
    Ending,
}

impl What {
    fn word(self) -> &'static str {
        match self {
            What::Job => "job",
            What::Attempt => "attempt",
            What::Ending => "ending",
        }
    }
}

/// Counts one, and says so: somebody may have been told.
pub(super) fn lost(what: What, job: JobId) {
    let what = what.word();
    metrics::write_lost(what);
    tracing::error!(%job, what, "redis has lost what it had acknowledged; the same key may run again");
}

impl Losses {
    /// Remembers a claim, or a result that was claimed.
    pub(super) fn remember(&self, what: What, job: JobId, version: u64, key_life: Duration) {
        let until = Instant::now() + key_life.min(RECENT_AGE);
        let mut recent = self.recent();
        if recent.len() == RECENT_MAX {
            recent.pop_front();
        }
        recent.push_back(Wrote { what, job, version, until });
    }

    fn recent(&self) -> MutexGuard<'_, VecDeque<Wrote>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lineages(&self) -> MutexGuard<'_, Vec<Lineage>> {
        self.lineages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks who answers, and if that is somebody else than before, looks for what this gateway wrote last.
///
/// # Errors
/// The store's: nothing is settled, and the next time looks again.
pub(super) async fn look(runtime: &Inner) -> Result<(), StoreError> {
    let lineages = runtime.store.lineages().await?;
    let losses = &runtime.losses;
    let earlier = losses.lineages().clone();
    // A master of a cluster that was not one before may go on from any of those.
    let is_new = |lineage: &&Lineage| earlier.iter().all(|one| lineage.is_another_than(one));
    let new: Vec<&Lineage> = if earlier.is_empty() { Vec::new() } else { lineages.iter().filter(is_new).collect() };
    if !new.is_empty() {
        tracing::warn!("another redis answers than before, or the same with another memory");
        let recent: Vec<Wrote> = losses.recent().iter().copied().collect();
        let missing = |wrote: Wrote| async move {
            let read = runtime.store.read_job(wrote.job.identity()).await?;
            Ok(is_missing(&read, wrote).then_some(wrote))
        };
        let missing: Vec<Option<Wrote>> = stream::iter(recent).map(missing).buffered(LOOKS_AT_ONCE).try_collect().await?;
        losses.recent().clear();
        for wrote in missing.into_iter().flatten() {
            lost(wrote.what, wrote.job);
        }
        let bytes: u64 = new.iter().flat_map(|lineage| earlier.iter().map(|one| lineage.lost_since(one))).sum();
        if bytes > 0 {
            metrics::write_lost("stream");
            tracing::error!(bytes, "the redis that answers now does not have the last writes of the one before");
        }
    }
    *losses.lineages() = lineages;
    Ok(())
}

fn is_missing(read: &Read, wrote: Wrote) -> bool {
    if wrote.until <= Instant::now() {
        return false;
    }
    match read {
        Read::NotFound => true,
        // A later incarnation takes its place only where a failure gives the key back, and then only after that one's end.
        Read::Found(job) if job.id != wrote.job => !job.rules.releases_on_failure || job.id.as_bytes() < wrote.job.as_bytes(),
        Read::Found(job) => job.version < wrote.version,
        Read::Gone(_) => false,
    }
}

/// Whether what was read of a job is older than what was read of it before.
pub(super) fn is_older(job: &Job, seen: (JobId, u64)) -> bool {
    job.id == seen.0 && job.revision < seen.1
}
