//! Asking about a mirrored stream: from the copy of a shard that a process has, which is read from the log where it lacks too much.
//!
//! A log is read by a task of its own, so that a long one gets read however short the patience of those is who wait for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Semaphore;

use crate::dedup::mirror::{Mirror, View};
use crate::dedup::{BatchToken, Told};
use crate::error::{Refusal, StoreError};
use crate::store::{DedupBatch, Deduplicated, MirrorId, MirrorPosition, MirrorShard, MirrorView, Mirrored, Store};

/// What is read of a log at once.
const READ_BYTES: u64 = 256 << 10;
/// How often a call is made that others are faster than, before it counts as one that failed.
const ROUNDS: usize = 16;
/// Ids that are asked about at once; a call with more is made alone. Each call looks through what the others add meanwhile.
const AT_ONCE: u32 = 64;

/// A process's copies of the shards of a stream.
pub(crate) struct Copies {
    shards: Vec<Arc<Copy>>,
}

struct Copy {
    stream: String,
    shard: u16,
    mirror: Mutex<Mirror>,
    /// Who reads the log: one at a time.
    reader: tokio::sync::Mutex<()>,
    /// Ids that may be asked about.
    asking: Semaphore,
}

impl Copies {
    pub(crate) fn new(stream: &str, shards: u16) -> Self {
        let copy = |shard| Copy {
            stream: stream.to_owned(),
            shard,
            mirror: Mutex::new(Mirror::new()),
            reader: tokio::sync::Mutex::new(()),
            asking: Semaphore::new(AT_ONCE as usize),
        };
        Copies { shards: (0..shards).map(|shard| Arc::new(copy(shard))).collect() }
    }

    /// The verdicts on ids of one shard. Waits for others of this process, and for the log to be read, until then at most.
    ///
    /// # Cancel safety
    /// The call may have been made; the copy is as good as before.
    pub(crate) async fn ask<V: Told>(
        &self,
        store: &Store,
        batch: &DedupBatch<'_>,
        claim: BatchToken,
        ids: &[MirrorId],
        until: Instant,
    ) -> Result<Deduplicated, StoreError> {
        let copy = &self.shards[usize::from(batch.shard)];
        let permits = u32::try_from(ids.len()).map_or(AT_ONCE, |ids| ids.min(AT_ONCE));
        let asking = tokio::time::timeout_at(until.into(), copy.asking.acquire_many(permits)).await;
        let _asking = asking.map_err(|_| copy.busy("calls of this process wait for one another"))?;
        for _ in 0..ROUNDS {
            let View { position, oldest, verdicts, ids: fresh } = match copy.view(ids) {
                Ok(view) => view,
                Err(position) => {
                    copy.catch_up_until(store, position, until).await?;
                    continue;
                }
            };
            let view = MirrorView { position, oldest, verdicts: &verdicts, ids: &fresh };
            match V::ask_mirrored(store, batch, claim, &view).await? {
                Mirrored::Checked { verdicts, news } => {
                    let own: Vec<MirrorId> =
                        ids.iter().zip(&verdicts).filter(|(_, verdict)| **verdict == b'1').map(|(id, _)| *id).collect();
                    copy.mirror().hear(position, &news, &own);
                    return Ok(Deduplicated::Checked { verdicts });
                }
                Mirrored::Claimed { verdicts } => return Ok(Deduplicated::Checked { verdicts }),
                Mirrored::Repeated { verdicts } => return Ok(Deduplicated::Repeated { verdicts }),
                Mirrored::Conflict => return Ok(Deduplicated::Conflict),
                Mirrored::Behind { oldest } => {
                    copy.mirror().is_behind(position, oldest);
                    copy.catch_up_until(store, position, until).await?;
                }
            }
        }
        Err(copy.busy("others add clicks faster than they are read here"))
    }

    /// Reads what others have added.
    ///
    /// # Cancel safety
    /// It is read all the same.
    pub(crate) async fn follow(&self, store: &Store) -> Result<(), StoreError> {
        for copy in &self.shards {
            let position = copy.mirror().position();
            copy.catch_up(store, position).await?;
        }
        Ok(())
    }
}

impl Copy {
    fn mirror(&self) -> MutexGuard<'_, Mirror> {
        // Nothing here panics half way; if it did, the script would notice.
        self.mirror.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn busy(&self, why: &str) -> StoreError {
        let detail = format!("{}, shard {}: {why}", self.stream, self.shard);
        StoreError::NotExecuted { code: Refusal::Busy, detail }
    }

    /// What it says of ids; or where it stood, if it must be read first.
    fn view(&self, ids: &[MirrorId]) -> Result<View, MirrorPosition> {
        let mirror = self.mirror();
        if mirror.is_torn() { Err(mirror.position()) } else { Ok(mirror.view(ids)) }
    }

    async fn catch_up_until(self: &Arc<Self>, store: &Store, position: MirrorPosition, until: Instant) -> Result<(), StoreError> {
        let read = tokio::time::timeout_at(until.into(), self.catch_up(store, position)).await;
        read.unwrap_or_else(|_| Err(self.busy("the log is still being read")))
    }

    /// Reads what is behind a position, unless somebody else has done so meanwhile.
    async fn catch_up(self: &Arc<Self>, store: &Store, position: MirrorPosition) -> Result<(), StoreError> {
        let (copy, store) = (Arc::clone(self), store.clone());
        let reading = tokio::spawn(async move { copy.read_on(&store, position).await });
        reading.await.unwrap_or_else(|error| Err(self.busy(&error.to_string())))
    }

    async fn read_on(&self, store: &Store, position: MirrorPosition) -> Result<(), StoreError> {
        let _reader = self.reader.lock().await;
        let is_torn = {
            let mirror = self.mirror();
            if !mirror.is_torn() && mirror.position() != position {
                return Ok(());
            }
            mirror.is_torn()
        };
        let Some(known) = store.mirror_shard(&self.stream, self.shard).await? else {
            let mut mirror = self.mirror();
            mirror.tear(true);
            mirror.mend(MirrorPosition::NOWHERE, 0);
            return Ok(());
        };
        // Whoever tore it has died, and what it had read may be of a master that is no more.
        if is_torn || !self.read(store, &known, position).await? {
            self.mirror().tear(true);
            self.read(store, &known, MirrorPosition::NOWHERE).await?;
        }
        Ok(())
    }

    /// Reads a log from a position on. `false` if it is not the one that was read before.
    async fn read(&self, store: &Store, known: &MirrorShard, from: MirrorPosition) -> Result<bool, StoreError> {
        self.mirror().tear(false);
        // The digest of the first frame that comes, unless nothing was read before.
        let mut expected = (from.chunk > 0).then_some(from.digest);
        let mut is_next = |digest: &[u8]| expected.take().is_none_or(|expected| expected == digest);
        for chunk in known.chunks.iter().filter(|chunk| chunk.number >= from.chunk) {
            let mut at = if chunk.number == from.chunk { from.offset } else { 0 };
            while at < chunk.bytes {
                let until = chunk.bytes.min(at + READ_BYTES);
                let bytes = store.mirror_chunk(&self.stream, self.shard, chunk.number, at..until).await?;
                match self.mirror().read(chunk.number, &bytes, &mut is_next) {
                    None => return Ok(false),
                    // Redis has lost the rest, or has forgotten it since.
                    Some(0) => break,
                    Some(read) => at += read as u64,
                }
            }
        }
        if !is_next(&known.digest) {
            return Ok(false);
        }
        let (Some(oldest), Some(running)) = (known.chunks.first(), known.chunks.last()) else { return Ok(false) };
        let position = MirrorPosition { chunk: running.number, offset: running.bytes, digest: known.digest };
        self.mirror().mend(position, oldest.number);
        Ok(true)
    }
}
