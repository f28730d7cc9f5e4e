//! Clicks of a mirrored stream: the same questions as in `dedup.rs`, from a caller that has a copy of what is remembered.
//!
//! The rules stand in `lua/mirror_*.lua`; what a copy is, in `crate::dedup`. Nothing here remembers anything.

use std::ops::Range;

use redis::Value;
use serde::Deserialize;

use crate::error::StoreError;
use crate::fingerprint::HalfBytes;
use crate::store::call::{Around, Call};
use crate::store::reply::Reply;
use crate::store::transitions::{Argument as _, arguments};
use crate::store::{DedupBatch, DedupLevel, Script, Store};

/// The schema of a mirrored shard.
pub(super) const MIRROR_SCHEMA: u64 = 3;
/// What is kept of an id.
pub const MIRROR_ID_BYTES: usize = 10;
/// In front of the ids of a frame: their number, and the digest of what is before it.
const HEAD_BYTES: usize = 2 + DIGEST_BYTES;
const DIGEST_BYTES: usize = 12;

/// How the log of a shard is told from another one that began in the same way: hexadecimal digits.
pub type MirrorDigest = [u8; DIGEST_BYTES];
/// What is kept of an id.
pub type MirrorId = [u8; MIRROR_ID_BYTES];

/// How far the log of a shard has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorPosition {
    /// The number of the chunk; 0 if nothing was read.
    pub chunk: u64,
    /// So many bytes of it.
    pub offset: u64,
    /// Of everything up to there.
    pub digest: MirrorDigest,
}

impl MirrorPosition {
    /// Before everything.
    pub const NOWHERE: MirrorPosition = MirrorPosition { chunk: 0, offset: 0, digest: [b'0'; DIGEST_BYTES] };
}

/// What a caller knows of the ids of one call.
#[derive(Clone, Copy, Debug)]
pub struct MirrorView<'a> {
    /// How far its copy reaches.
    pub position: MirrorPosition,
    /// The oldest chunk that one of its duplicates is in; 0 if there are none.
    pub oldest: u64,
    /// Of each id `0` if the copy has it, else `1`.
    pub verdicts: &'a [u8],
    /// Those with a `1`, one after another.
    pub ids: &'a [u8],
}

/// The reply about ids of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mirrored {
    /// What each of them is, and what was new to the caller.
    Checked {
        /// As in `Deduplicated::Checked`.
        verdicts: Vec<u8>,
        /// What follows the caller's position.
        news: MirrorNews,
    },
    /// What each of them is. Nothing was added.
    Claimed {
        /// As in `Deduplicated::Checked`.
        verdicts: Vec<u8>,
    },
    /// What an earlier call with this token was told.
    Repeated {
        /// The same verdicts.
        verdicts: Vec<u8>,
    },
    /// An earlier call with this token had other ids; nothing changed.
    Conflict,
    /// The caller must read the log first; nothing changed.
    Behind {
        /// The oldest chunk that is not forgotten.
        oldest: u64,
    },
}

/// What follows a position: the frames of others, then what the call itself has added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorNews {
    /// The oldest chunk that is not forgotten.
    pub oldest: u64,
    /// The running chunk.
    pub chunk: u64,
    /// Where in it the tail ends and the call's own ids begin.
    pub offset: u64,
    /// Of everything, the call's own ids included.
    pub digest: MirrorDigest,
    /// Frames.
    pub tail: Vec<u8>,
}

/// What is known of a mirrored shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorShard {
    /// Of everything.
    pub digest: MirrorDigest,
    /// The chunks of its log, the running one last.
    pub chunks: Vec<MirrorChunk>,
}

/// One chunk of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorChunk {
    /// Its number.
    pub number: u64,
    /// So many bytes of it count.
    pub bytes: u64,
    /// In which so many ids are.
    pub ids: u64,
}

/// Ids that were added by one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorFrame<'a> {
    /// Of everything before it.
    pub digest: MirrorDigest,
    /// The ids.
    pub ids: &'a [MirrorId],
    /// How long it is.
    pub bytes: usize,
}

/// How long a frame with so many ids is; nothing is written for none.
pub fn frame_bytes(ids: usize) -> usize {
    if ids == 0 { 0 } else { HEAD_BYTES + ids * MIRROR_ID_BYTES }
}

/// The first frame of some bytes that begin with one; `None` if it is not whole.
pub fn first_frame(bytes: &[u8]) -> Option<MirrorFrame<'_>> {
    let (count, rest) = bytes.split_first_chunk::<2>()?;
    let (digest, rest) = rest.split_first_chunk::<DIGEST_BYTES>()?;
    let count = usize::from(u16::from_be_bytes(*count));
    let ids = rest.get(..count * MIRROR_ID_BYTES)?.as_chunks().0;
    Some(MirrorFrame { digest: *digest, ids, bytes: frame_bytes(count) })
}

impl Store {
    /// Says of each id whether it is seen for the first time, and remembers it.
    ///
    /// # Errors
    /// Any: the same call again, with the same token. `NotExecuted`: nothing is remembered of these ids.
    pub async fn mirror_batch(&self, batch: &DedupBatch<'_>, view: &MirrorView<'_>) -> Result<Mirrored, StoreError> {
        let arguments = arguments![
            &batch.token[..],
            &batch.fingerprint[..],
            batch.window_ms,
            batch.slice_ms,
            batch.keep_ms,
            view.position.chunk,
            view.position.offset,
            &view.position.digest[..],
            view.oldest,
            view.verdicts,
            view.ids,
        ];
        let [shard, verdicts, ..] = self.dedup_keys(batch);
        let call = Call::new(Script::MirrorBatch, &[&shard, &verdicts], arguments, batch.token.to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "checked" => Ok(Mirrored::Checked { verdicts: reply.bytes()?, news: news(&mut reply)? }),
            "behind" => Ok(Mirrored::Behind { oldest: reply.parse()? }),
            "repeated" => Ok(Mirrored::Repeated { verdicts: reply.bytes()? }),
            "conflict" => Ok(Mirrored::Conflict),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Keeps ids from everybody else for a lease, without remembering them yet.
    ///
    /// # Errors
    /// Any: the same call again, with the same token; or nothing: what may have been claimed is free after its lease.
    pub async fn mirror_claim(
        &self,
        batch: &DedupBatch<'_>,
        claim: &HalfBytes,
        view: &MirrorView<'_>,
    ) -> Result<Mirrored, StoreError> {
        let arguments = arguments![
            &batch.token[..],
            &batch.fingerprint[..],
            batch.window_ms,
            batch.slice_ms,
            batch.keep_ms,
            &claim[..],
            view.position.chunk,
            view.position.offset,
            &view.position.digest[..],
            view.oldest,
            view.verdicts,
            view.ids,
        ];
        let keys = self.dedup_keys(batch);
        let call = Call::new(Script::MirrorClaim, &keys.each_ref().map(String::as_str), arguments, batch.token.to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "claimed" => Ok(Mirrored::Claimed { verdicts: reply.bytes()? }),
            "behind" => Ok(Mirrored::Behind { oldest: reply.parse()? }),
            "repeated" => Ok(Mirrored::Repeated { verdicts: reply.bytes()? }),
            "conflict" => Ok(Mirrored::Conflict),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Remembers ids that were claimed, and says which of them are lost.
    ///
    /// # Errors
    /// Any: the same call again, with the same token.
    pub async fn mirror_commit(
        &self,
        batch: &DedupBatch<'_>,
        claim: &HalfBytes,
        view: &MirrorView<'_>,
    ) -> Result<Mirrored, StoreError> {
        let arguments = arguments![
            &batch.token[..],
            &batch.fingerprint[..],
            batch.window_ms,
            batch.slice_ms,
            batch.keep_ms,
            &claim[..],
            view.position.chunk,
            view.position.offset,
            &view.position.digest[..],
            view.oldest,
            view.verdicts,
            view.ids,
        ];
        let keys = self.dedup_keys(batch);
        let call = Call::new(Script::MirrorCommit, &keys.each_ref().map(String::as_str), arguments, batch.token.to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "committed" => Ok(Mirrored::Checked { verdicts: reply.bytes()?, news: news(&mut reply)? }),
            "behind" => Ok(Mirrored::Behind { oldest: reply.parse()? }),
            "repeated" => Ok(Mirrored::Repeated { verdicts: reply.bytes()? }),
            "conflict" => Ok(Mirrored::Conflict),
            _ => Err(reply.unknown_status()),
        }
    }

    /// What is known of a mirrored shard; `None` if nothing is.
    ///
    /// # Errors
    /// The store's; `BADSHARD` where it is not what this reads.
    pub async fn mirror_shard(&self, stream: &str, shard: u16) -> Result<Option<MirrorShard>, StoreError> {
        let mut get = redis::cmd("GET");
        get.arg(self.inner.keys.dedup_shard(stream, shard));
        match self.command(get).await? {
            Value::Nil => Ok(None),
            Value::BulkString(packed) => read(&packed).map(Some).map_err(|error| bad(stream, shard, &error)),
            _ => Err(bad(stream, shard, "it is no text")),
        }
    }

    /// Some bytes of a chunk of a log; fewer where there are no more.
    ///
    /// # Errors
    /// The store's.
    pub async fn mirror_chunk(&self, stream: &str, shard: u16, chunk: u64, bytes: Range<u64>) -> Result<Vec<u8>, StoreError> {
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        let mut range = redis::cmd("GETRANGE");
        range.arg(self.inner.keys.mirror_chunk(stream, shard, chunk)).arg(bytes.start).arg(bytes.end - 1);
        match self.command(range).await? {
            Value::BulkString(bytes) => Ok(bytes),
            _ => Err(bad(stream, shard, "a chunk is no text")),
        }
    }
}

fn bad(stream: &str, shard: u16, what: &str) -> StoreError {
    StoreError::fatal("BADSHARD", format!("{stream}, shard {shard}: {what}"))
}

fn news(reply: &mut Reply) -> Result<MirrorNews, StoreError> {
    let (oldest, chunk, offset) = (reply.parse()?, reply.parse()?, reply.parse()?);
    let digest = reply.bytes()?.try_into().map_err(|_| reply.unknown_status())?;
    Ok(MirrorNews { oldest, chunk, offset, digest, tail: reply.bytes()? })
}

/// One chunk, as the scripts keep it.
#[derive(Deserialize)]
struct Chunk {
    number: u64,
    _end_ms: f64,
    bytes: u64,
    ids: u64,
}

fn read(packed: &[u8]) -> Result<MirrorShard, String> {
    let (schema, _, digest, chunks, _, _): (u64, f64, String, Vec<Chunk>, u64, u64) =
        rmp_serde::from_slice(packed).map_err(|error| error.to_string())?;
    if schema != MIRROR_SCHEMA {
        return Err(format!("its schema is {schema}, that of a mirrored stream is {MIRROR_SCHEMA}"));
    }
    let digest = digest.into_bytes().try_into().map_err(|_| "its digest has another length".to_owned())?;
    let chunks = chunks.into_iter().map(|Chunk { number, bytes, ids, .. }| MirrorChunk { number, bytes, ids }).collect();
    Ok(MirrorShard { digest, chunks })
}

/// How many clicks a mirrored shard remembers.
pub(super) fn level(packed: &[u8]) -> Result<DedupLevel, String> {
    let chunks = read(packed)?.chunks;
    let sum = |of: fn(&MirrorChunk) -> u64| chunks.iter().map(of).sum();
    Ok(DedupLevel { ids: sum(|chunk| chunk.ids), buckets: 0, bytes: sum(|chunk| chunk.bytes) })
}
