//! Clicks: is this one new? For volumes where a job for each is too much.
//!
//! A [`Stream`] declares what makes two clicks the same and for how long that is remembered; [`Dedup`] asks, a batch at a time. A
//! click is `first` once, whoever asks, and `duplicate` from then on for a window at least. What a batch was told is kept for a
//! while, so that the same batch sent again, after a lost reply or by a client that tries again, is told the same.
//!
//! Deliberately not here: a click's payload, its job, its order. The guarantee, its bound and the sizing are `docs/DEDUP.md`; what
//! stands in Redis is `docs/PROTOCOL.md`.

mod id;
mod split;
mod stream;

use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream as futures};
use uuid::Uuid;

pub use id::{ClickId, FIELD_BYTES_MAX, FieldError, FieldValue};
pub use split::CALL_IDS_MAX;
pub use stream::{
    STREAM_FIELDS_MAX, STREAM_NAME_BYTES_MAX, STREAM_SHARDS_MAX, STREAM_SLICES_MAX, STREAM_WINDOW_MAX, Stream, StreamError,
};

use crate::error::{Refusal, StoreError};
use crate::fingerprint::{HalfBytes, second_half, sha256};
use crate::store::{DedupBatch, Deduplicated, Store};
use split::{Part, Split, split};

/// Ids of one batch. A caller with more makes several.
pub const BATCH_IDS_MAX: usize = 10_000;
/// Calls of one batch that are under way at once.
const CALLS_AT_ONCE_MAX: usize = 32;
/// How long a batch is tried, unless its caller says otherwise.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause before a call is made again; doubles.
const TRY_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause.
const TRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// What a batch is called, so that it is known when it is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchToken(HalfBytes);

impl BatchToken {
    /// One that nobody has.
    pub fn random() -> Self {
        BatchToken(*Uuid::new_v4().as_bytes())
    }

    /// From the caller's own name for the batch: a file and an offset, a message's id, a header of a request.
    pub fn named(name: &str) -> Self {
        BatchToken(second_half(&sha256(name.as_bytes())))
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &HalfBytes {
        &self.0
    }

    fn of_part(self, shard: u16, number: usize) -> Self {
        let number = u32::try_from(number).expect("a batch is bounded far below");
        let bytes = [&self.0[..], &shard.to_be_bytes(), &number.to_be_bytes()].concat();
        BatchToken(second_half(&sha256(&bytes)))
    }
}

/// What a click is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Seen for the first time within the window: it counts.
    First,
    /// It has been seen.
    Duplicate,
}

impl Verdict {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Verdict::First => "first",
            Verdict::Duplicate => "duplicate",
        }
    }
}

/// Why a batch has no verdicts, or not all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DedupError {
    /// More ids than [`BATCH_IDS_MAX`]. Nothing was asked.
    #[error("the batch has {ids} ids, of {BATCH_IDS_MAX} at most")]
    TooMany {
        /// How many.
        ids: usize,
    },
    /// The token is that of a batch with other ids. Where that batch had none in a shard, the ids of this one are remembered there.
    #[error("the token is that of a batch with other ids")]
    Conflict,
    /// Some ids have no verdict. Send the whole batch again, with the same token: those that have one are told the same.
    #[error("{unanswered} of {} ids have no verdict: {error}", verdicts.len())]
    Unanswered {
        /// What is known, in the order of the ids.
        verdicts: Vec<Option<Verdict>>,
        /// How many have none.
        unanswered: usize,
        /// What the store said last, of one of them.
        error: StoreError,
    },
}

/// Asks what of a stream is new. Cheap to clone.
#[derive(Clone)]
pub struct Dedup {
    store: Store,
    stream: Stream,
    patience: Duration,
}

impl Dedup {
    /// For a stream, in a store. What must be durable there before it is told is so here too.
    ///
    /// # Errors
    /// The first thing that is wrong with the stream.
    pub fn new(store: &Store, stream: Stream) -> Result<Self, StreamError> {
        stream.check()?;
        Ok(Dedup { store: store.committing(), stream, patience: PATIENCE })
    }

    /// The same, with batches that are tried for so long.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Dedup { patience, ..self }
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Says of each id of a batch whether it is seen for the first time, in the order of the ids. Of ids that are in it several times
    /// the one that comes first counts.
    ///
    /// The same batch with the same token is told the same for as long as [`Stream::keep`] says, whatever became of the first reply.
    /// A lost reply is asked for again within a deadline.
    ///
    /// # Errors
    /// [`DedupError::Unanswered`]: the same batch again, with the same token.
    ///
    /// # Cancel safety
    /// A batch whose future is dropped may be remembered in part. Send it again with the same token; without that, its clicks would
    /// be duplicates.
    pub async fn check(&self, ids: &[ClickId], token: BatchToken) -> Result<Vec<Verdict>, DedupError> {
        if ids.len() > BATCH_IDS_MAX {
            return Err(DedupError::TooMany { ids: ids.len() });
        }
        let Split { calls, fingerprint, repeats } = split(ids, self.stream.shards, token);
        let until = Instant::now() + self.patience;
        let asked = futures::iter(calls.iter().map(|part| self.ask(part, &fingerprint, until)));
        let answers: Vec<_> = asked.buffered(CALLS_AT_ONCE_MAX).collect().await;
        let mut verdicts = vec![None; ids.len()];
        let (mut failed, mut conflict) = (None, false);
        for (part, answer) in calls.iter().zip(answers) {
            match answer {
                Ok(Some(told)) => {
                    part.places.iter().zip(told).for_each(|(place, verdict)| verdicts[*place] = Some(verdict));
                }
                Ok(None) => conflict = true,
                Err(error) => failed = Some(error),
            }
        }
        for (place, first) in repeats {
            verdicts[place] = verdicts[first].map(|_| Verdict::Duplicate);
        }
        if conflict {
            return Err(DedupError::Conflict);
        }
        match failed {
            None => Ok(verdicts.into_iter().flatten().collect()),
            Some(error) => {
                let unanswered = verdicts.iter().filter(|verdict| verdict.is_none()).count();
                Err(DedupError::Unanswered { verdicts, unanswered, error })
            }
        }
    }

    /// Asks about one part until it is answered, as long as there is time. `None` for a conflict.
    async fn ask(&self, part: &Part, fingerprint: &HalfBytes, until: Instant) -> Result<Option<Vec<Verdict>>, StoreError> {
        let batch = DedupBatch {
            stream: &self.stream.name,
            shard: part.shard,
            token: part.token.as_bytes(),
            fingerprint,
            window_ms: self.stream.window_ms(),
            slice_ms: self.stream.slice_ms(),
            expected: self.stream.expected_in_slice(),
            keep_ms: self.stream.keep_ms(),
            ids: &part.ids,
        };
        let mut pause = TRY_PAUSE;
        loop {
            let error = match self.store.dedup_batch(&batch).await {
                Ok(Deduplicated::Checked { verdicts } | Deduplicated::Repeated { verdicts }) => {
                    return read(&verdicts, part.places.len()).map(Some);
                }
                Ok(Deduplicated::Conflict) => return Ok(None),
                Err(error) => error,
            };
            if !may_pass(&error) || Instant::now() + pause >= until {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(TRY_PAUSE_MAX);
        }
    }
}

/// Whether the same call may be answered a moment later. Memory and disk stay as full as they are.
fn may_pass(error: &StoreError) -> bool {
    match error {
        StoreError::NotExecuted { code, .. } => match code {
            Refusal::Connect | Refusal::Loading | Refusal::Busy | Refusal::Cluster | Refusal::ReadOnly => true,
            Refusal::Oom | Refusal::NoReplicas | Refusal::Misconf => false,
        },
        StoreError::Ambiguous { .. } | StoreError::NotDurable { .. } => true,
        StoreError::Fatal { .. } => false,
    }
}

fn read(verdicts: &[u8], ids: usize) -> Result<Vec<Verdict>, StoreError> {
    let bad = || StoreError::fatal("BADREPLY", format!("{} verdicts on {ids} ids", verdicts.len()));
    if verdicts.len() != ids {
        return Err(bad());
    }
    let read = verdicts.iter().map(|verdict| match verdict {
        b'1' => Ok(Verdict::First),
        b'0' => Ok(Verdict::Duplicate),
        _ => Err(bad()),
    });
    read.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_that_is_not_known_is_an_error_and_no_answer() {
        assert_eq!(read(b"10", 2).unwrap(), [Verdict::First, Verdict::Duplicate]);
        for (verdicts, ids) in [(&b"10"[..], 3), (b"10", 1), (b"12", 2), (b"", 1)] {
            assert!(read(verdicts, ids).is_err(), "{verdicts:?} {ids}");
        }
    }
}
