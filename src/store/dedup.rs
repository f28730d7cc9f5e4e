//! Clicks: what of a batch is seen for the first time within a stream's window, at once or in two phases.
//!
//! The rules stand in `lua/dedup_*.lua`; which ids are of which shard, and their order, in `crate::dedup`. Nothing here remembers
//! anything.

use crate::error::StoreError;
use crate::fingerprint::{HalfBytes, hex};
use crate::store::call::{Around, Call};
use crate::store::transitions::{Argument as _, arguments};
use crate::store::{Script, Store};

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
    /// 31 bytes each, in order and each once: 24 binary digits as text, 7 bytes that are stored.
    pub ids: &'a [u8],
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
    pub async fn dedup_release(&self, batch: &DedupBatch<'_>, claim: &HalfBytes) -> Result<(), StoreError> {
        let arguments = arguments![&batch.token[..], &claim[..], batch.ids];
        let [_, _, claims, lapses] = self.dedup_keys(batch);
        let call = Call::new(Script::DedupRelease, &[&claims, &lapses], arguments, batch.token.to_vec());
        let reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "released" => Ok(()),
            _ => Err(reply.unknown_status()),
        }
    }

    fn dedup_keys(&self, batch: &DedupBatch<'_>) -> [String; 4] {
        let (keys, stream, shard) = (&self.inner.keys, batch.stream, batch.shard);
        [
            keys.dedup_shard(stream, shard),
            keys.dedup_verdicts(stream, shard, &hex(batch.token)),
            keys.dedup_claims(stream, shard),
            keys.dedup_lapses(stream, shard),
        ]
    }
}
