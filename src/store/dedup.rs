//! Clicks: what of a batch is seen for the first time within a stream's window.
//!
//! The rules stand in `lua/dedup_batch.lua`; which ids are of which shard, and their order, in `crate::dedup`. Nothing here remembers
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
    /// Ids of one slice in one shard, as long as none has told.
    pub expected: u64,
    /// How long the verdicts are kept.
    pub keep_ms: u64,
    /// 32 bytes each, in order and each once: 24 binary digits as text, 8 bytes that are stored.
    pub ids: &'a [u8],
}

/// The reply about ids of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deduplicated {
    /// What each of them is.
    Checked {
        /// `1` for the first time, `0` for a duplicate.
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
        let shard = self.inner.keys.dedup_shard(batch.stream, batch.shard);
        let verdicts = self.inner.keys.dedup_verdicts(batch.stream, batch.shard, &hex(batch.token));
        let call = Call::new(Script::DedupBatch, &[&shard, &verdicts], arguments, batch.token.to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "checked" => Ok(Deduplicated::Checked { verdicts: reply.bytes()? }),
            "repeated" => Ok(Deduplicated::Repeated { verdicts: reply.bytes()? }),
            "conflict" => Ok(Deduplicated::Conflict),
            _ => Err(reply.unknown_status()),
        }
    }
}
