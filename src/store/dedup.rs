//! Clicks: what of a batch is seen for the first time within a stream's window, at once or in two phases.
//!
//! The rules stand in `lua/dedup_*.lua`; which ids are of which shard, and their order, in `crate::dedup`. Nothing here remembers
//! anything.

use redis::Value;
use serde::Deserialize;

use crate::error::StoreError;
use crate::fingerprint::{HalfBytes, hex};
use crate::store::call::{Around, Call};
use crate::store::mirror::{self, MIRROR_SCHEMA};
use crate::store::transitions::{Argument as _, arguments};
use crate::store::{Script, Store};

/// The schema of a shard that this reads.
const SHARD_SCHEMA: u64 = 2;

/// What an id takes in a bucket, and what a bucket takes beside them.
const ID_BYTES: u64 = 8;
const BUCKET_BYTES: u64 = 60;

/// One call about ids of one shard.
#[derive(Clone, Copy, Debug)]
pub struct DedupBatch<'a> {
    /// The stream's name.
    pub stream: &'a str,
    /// The shard of the ids.
    pub shard: u16,
    /// The same for the same ids sent again, else new.
    pub token: &'a HalfBytes,
    /// Of all ids of the batch that these are of.
    pub fingerprint: &'a HalfBytes,
    /// How long an id is remembered at least.
    pub window_ms: u64,
    /// Of the window.
    pub slice_ms: u64,
    /// Ids of a window in one shard, as long as none has told.
    pub expected: u64,
    /// How long the verdicts are kept; of a claim, how long it stands too.
    pub keep_ms: u64,
    /// 31 bytes each, in order and each once: 24 binary digits as text, 7 bytes that are stored. For a mirrored stream 10 each where
    /// ids are given back, and elsewhere what the caller's view has instead.
    pub ids: &'a [u8],
}

/// How many clicks a stream remembers, and in how many buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DedupLevel {
    /// Clicks that the window still reaches.
    pub ids: u64,
    /// Buckets that they can be in; none in a mirrored stream.
    pub buckets: u64,
    /// Memory of Redis that they take, about.
    pub bytes: u64,
}

/// One generation of buckets, as the scripts keep it.
#[derive(Deserialize)]
struct Generation {
    _begin_ms: f64,
    _slice_ms: f64,
    bits: u32,
    _slice: f64,
    ids: Vec<u64>,
}

/// The reply about ids of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deduplicated {
    /// What each of them is.
    Checked {
        /// `1` for the first time, or committed; `0` for a duplicate, or lost; `2` for what somebody else has claimed.
        verdicts: Vec<u8>,
    },
    /// What an earlier call with this token was told.
    Repeated {
        /// The same verdicts.
        verdicts: Vec<u8>,
    },
    /// An earlier call with this token had other ids; nothing changed.
    Conflict,
}

impl Store {
    /// Says of each id whether it is seen for the first time, and remembers it.
    ///
    /// # Errors
    /// Any: the same call again, with the same token. `NotExecuted`: nothing is remembered of these ids.
    pub async fn dedup_batch(&self, batch: &DedupBatch<'_>) -> Result<Deduplicated, StoreError> {
        let arguments = arguments![
            &batch.token[..],
            &batch.fingerprint[..],
            batch.window_ms,
            batch.slice_ms,
            batch.expected,
            batch.keep_ms,
            batch.ids,
        ];
        let [shard, verdicts, ..] = self.dedup_keys(batch);
        let call = Call::new(Script::DedupBatch, &[&shard, &verdicts], arguments, batch.token.to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "checked" => Ok(Deduplicated::Checked { verdicts: reply.bytes()? }),
            "repeated" => Ok(Deduplicated::Repeated { verdicts: reply.bytes()? }),
            "conflict" => Ok(Deduplicated::Conflict),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Keeps ids from everybody else for a lease, without remembering them yet.
    ///
    /// # Errors
    /// Any: the same call again, with the same token; or nothing: what may have been claimed is free after its lease.
    pub async fn dedup_claim(&self, batch: &DedupBatch<'_>, claim: &HalfBytes) -> Result<Deduplicated, StoreError> {
        let arguments = arguments![
            &batch.token[..],
            &batch.fingerprint[..],
            batch.window_ms,
            batch.slice_ms,
            batch.expected,
            batch.keep_ms,
            &claim[..],
            batch.ids,
        ];
        let keys = self.dedup_keys(batch);
        let call = Call::new(Script::DedupClaim, &keys.each_ref().map(String::as_str), arguments, batch.token.to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "claimed" => Ok(Deduplicated::Checked { verdicts: reply.bytes()? }),
            "repeated" => Ok(Deduplicated::Repeated { verdicts: reply.bytes()? }),
            "conflict" => Ok(Deduplicated::Conflict),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Remembers ids that were claimed, and says which of them are lost.
    ///
    /// # Errors
    /// Any: the same call again, with the same token.
    pub async fn dedup_commit(&self, batch: &DedupBatch<'_>, claim: &HalfBytes) -> Result<Deduplicated, StoreError> {
        let arguments = arguments![
            &batch.token[..],
            &batch.fingerprint[..],
            batch.window_ms,
            batch.slice_ms,
            batch.expected,
            batch.keep_ms,
            &claim[..],
            batch.ids,
        ];
        let keys = self.dedup_keys(batch);
        let call = Call::new(Script::DedupCommit, &keys.each_ref().map(String::as_str), arguments, batch.token.to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "committed" => Ok(Deduplicated::Checked { verdicts: reply.bytes()? }),
            "repeated" => Ok(Deduplicated::Repeated { verdicts: reply.bytes()? }),
            "conflict" => Ok(Deduplicated::Conflict),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Gives ids that were claimed back at once.
    ///
    /// # Errors
    /// Any: the same call again; or nothing: they are free after their lease.
    pub async fn dedup_release(&self, batch: &DedupBatch<'_>, claim: &HalfBytes, id_bytes: usize) -> Result<(), StoreError> {
        let arguments = arguments![&batch.token[..], &claim[..], id_bytes as u64, batch.ids];
        let [_, _, claims, lapses] = self.dedup_keys(batch);
        let call = Call::new(Script::DedupRelease, &[&claims, &lapses], arguments, batch.token.to_vec());
        let reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "released" => Ok(()),
            _ => Err(reply.unknown_status()),
        }
    }

    /// How full a shard of a stream was when it was last written to; nothing where nothing is known of it.
    ///
    /// # Errors
    /// The store's; `BADSHARD` where a shard is not what this reads.
    pub async fn dedup_level(&self, stream: &str, shard: u16) -> Result<DedupLevel, StoreError> {
        let mut get = redis::cmd("GET");
        get.arg(self.inner.keys.dedup_shard(stream, shard));
        let packed = match self.command(get).await? {
            Value::Nil => return Ok(DedupLevel::default()),
            Value::BulkString(packed) => packed,
            _ => return Err(StoreError::fatal("BADSHARD", format!("{stream}, shard {shard}: it is no text"))),
        };
        let bad = |error: String| StoreError::fatal("BADSHARD", format!("{stream}, shard {shard}: {error}"));
        if schema_of(&packed) == Some(MIRROR_SCHEMA) {
            return mirror::level(&packed).map_err(bad);
        }
        let (schema, _, generations): (u64, f64, Vec<Generation>) =
            rmp_serde::from_slice(&packed).map_err(|error| bad(error.to_string()))?;
        if schema != SHARD_SCHEMA {
            return Err(bad(format!("its schema is {schema}, not {SHARD_SCHEMA}")));
        }
        let ids = generations.iter().flat_map(|generation| &generation.ids).sum();
        let buckets = generations.iter().map(|generation| 1 << generation.bits.min(32)).sum();
        Ok(DedupLevel { ids, buckets, bytes: ids * ID_BYTES + buckets.min(ids) * BUCKET_BYTES })
    }

    pub(super) fn dedup_keys(&self, batch: &DedupBatch<'_>) -> [String; 4] {
        let (keys, stream, shard) = (&self.inner.keys, batch.stream, batch.shard);
        [
            keys.dedup_shard(stream, shard),
            keys.dedup_verdicts(stream, shard, &hex(batch.token)),
            keys.dedup_claims(stream, shard),
            keys.dedup_lapses(stream, shard),
        ]
    }
}

/// The first field of a packed array.
fn schema_of(packed: &[u8]) -> Option<u64> {
    match packed {
        [0x90..=0x9f, schema @ 0..=0x7f, ..] => Some(u64::from(*schema)),
        _ => None,
    }
}
