//! Clicks: is this one new? For volumes where a job for each is too much.
//!
//! A [`Stream`] declares what makes two clicks the same and for how long that is remembered; [`Dedup`] asks, a batch at a time. A
//! click is `first` once, whoever asks, and `duplicate` from then on for a window at least. What a batch was told is kept for a
//! while, so that the same batch sent again, after a lost reply or by a client that tries again, is told the same.
//!
//! Deliberately not here: a click's payload, its job, its order. The guarantee, its bound and the sizing are `docs/DEDUP.md`; what
//! stands in Redis is `docs/PROTOCOL.md`.

mod front;
mod id;
pub mod layer;
mod mirror;
mod mirrored;
mod split;
mod stream;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream as futures};
use uuid::Uuid;

pub use front::{FRONT_ENTRIES_MAX, Front};
pub use id::{ClickId, FIELD_BYTES_MAX, FieldError, FieldValue};
pub use split::CALL_IDS_MAX;
pub use stream::{
    STREAM_FIELDS_MAX, STREAM_NAME_BYTES_MAX, STREAM_SHARDS_MAX, STREAM_SLICES_MAX, STREAM_WINDOW_MAX, Stream, StreamError,
};

use crate::error::{Refusal, StoreError};
use crate::fingerprint::{HalfBytes, second_half, sha256};
use crate::metrics;
use crate::store::{DedupBatch, DedupLevel, Deduplicated, MIRROR_ID_BYTES, MirrorId, MirrorView, Mirrored, Store};
use front::Known;
use id::RECORD_BYTES;
use mirrored::Copies;
use split::{Part, Purpose, Split, split};

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

    fn of_part(self, purpose: Purpose, shard: u16, number: usize) -> Self {
        let number = u32::try_from(number).expect("a batch is bounded far below");
        let bytes = [&self.0[..], purpose.as_str().as_bytes(), &shard.to_be_bytes(), &number.to_be_bytes()].concat();
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

/// What became of a click that somebody wants to claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Claimed {
    /// It is new, and kept from everybody else for the lease: write it down, then commit it.
    First,
    /// It has been seen.
    Duplicate,
    /// Somebody else has claimed it and may yet die: whether it counts is not known before that claim is committed or lapses.
    Held,
}

/// What became of a click that was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Committed {
    /// It is remembered, once and for this claim.
    Committed,
    /// The claim had lapsed, or never was, and somebody else has claimed or counted it: what was written down does not count.
    Lost,
}

/// A verdict, and how it is asked for: a byte for each id of a reply.
trait Told: Copy + Send {
    const PURPOSE: Purpose;
    /// The call that brings such verdicts.
    fn ask(
        store: &Store,
        batch: &DedupBatch<'_>,
        token: BatchToken,
    ) -> impl Future<Output = Result<Deduplicated, StoreError>> + Send;
    /// The same for a mirrored stream.
    fn ask_mirrored(
        store: &Store,
        batch: &DedupBatch<'_>,
        token: BatchToken,
        view: &MirrorView<'_>,
    ) -> impl Future<Output = Result<Mirrored, StoreError>> + Send;
    /// What an id is that stands in its batch before, with what that one is.
    fn repeated(first: Self) -> Self;
    /// Whether Redis has just begun to remember the id, if this is told for the first time.
    fn is_remembered(self) -> bool;
    fn read(byte: u8) -> Option<Self>;
    fn as_str(self) -> &'static str;
}

impl Told for Verdict {
    const PURPOSE: Purpose = Purpose::Check;

    async fn ask(store: &Store, batch: &DedupBatch<'_>, _: BatchToken) -> Result<Deduplicated, StoreError> {
        store.dedup_batch(batch).await
    }

    async fn ask_mirrored(
        store: &Store,
        batch: &DedupBatch<'_>,
        _: BatchToken,
        view: &MirrorView<'_>,
    ) -> Result<Mirrored, StoreError> {
        store.mirror_batch(batch, view).await
    }

    fn repeated(_: Self) -> Self {
        Verdict::Duplicate
    }

    fn is_remembered(self) -> bool {
        self == Verdict::First
    }

    fn read(byte: u8) -> Option<Self> {
        match byte {
            b'1' => Some(Verdict::First),
            b'0' => Some(Verdict::Duplicate),
            _ => None,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Verdict::First => "first",
            Verdict::Duplicate => "duplicate",
        }
    }
}

impl Told for Claimed {
    const PURPOSE: Purpose = Purpose::Claim;

    async fn ask(store: &Store, batch: &DedupBatch<'_>, token: BatchToken) -> Result<Deduplicated, StoreError> {
        store.dedup_claim(batch, token.as_bytes()).await
    }

    async fn ask_mirrored(
        store: &Store,
        batch: &DedupBatch<'_>,
        token: BatchToken,
        view: &MirrorView<'_>,
    ) -> Result<Mirrored, StoreError> {
        store.mirror_claim(batch, token.as_bytes(), view).await
    }

    fn repeated(first: Self) -> Self {
        match first {
            Claimed::First | Claimed::Duplicate => Claimed::Duplicate,
            Claimed::Held => Claimed::Held,
        }
    }

    /// A claim can lapse and be given back.
    fn is_remembered(self) -> bool {
        false
    }

    fn read(byte: u8) -> Option<Self> {
        match byte {
            b'1' => Some(Claimed::First),
            b'0' => Some(Claimed::Duplicate),
            b'2' => Some(Claimed::Held),
            _ => None,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Claimed::First => "claimed",
            Claimed::Duplicate => "duplicate",
            Claimed::Held => "held",
        }
    }
}

impl Told for Committed {
    const PURPOSE: Purpose = Purpose::Commit;

    async fn ask(store: &Store, batch: &DedupBatch<'_>, token: BatchToken) -> Result<Deduplicated, StoreError> {
        store.dedup_commit(batch, token.as_bytes()).await
    }

    async fn ask_mirrored(
        store: &Store,
        batch: &DedupBatch<'_>,
        token: BatchToken,
        view: &MirrorView<'_>,
    ) -> Result<Mirrored, StoreError> {
        store.mirror_commit(batch, token.as_bytes(), view).await
    }

    fn repeated(first: Self) -> Self {
        first
    }

    fn is_remembered(self) -> bool {
        self == Committed::Committed
    }

    fn read(byte: u8) -> Option<Self> {
        match byte {
            b'1' => Some(Committed::Committed),
            b'0' => Some(Committed::Lost),
            _ => None,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Committed::Committed => "committed",
            Committed::Lost => "lost",
        }
    }
}

/// What one call was told.
struct Answer<V> {
    told: Vec<V>,
    /// When it was asked, on the front's clock, if there is a front and it was told for the first time.
    asked_ms: Option<u64>,
}

/// Why a batch has no verdicts, or not all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DedupError<V = Verdict> {
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
        verdicts: Vec<Option<V>>,
        /// How many have none.
        unanswered: usize,
        /// What the store said last, of one of them.
        error: StoreError,
    },
}

/// Why a batch that was to be asked about once has no verdicts, or not all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct OnceError {
    /// What the batch was called: [`Dedup::check`] with it, and with all of its ids, completes the batch.
    pub token: BatchToken,
    /// Why.
    pub error: DedupError,
}

/// Asks what of a stream is new. Cheap to clone.
#[derive(Clone)]
pub struct Dedup {
    store: Store,
    stream: Stream,
    patience: Duration,
    front: Option<Arc<Known>>,
    /// Of a mirrored stream.
    copies: Option<Arc<Copies>>,
}

impl Dedup {
    /// For a stream, in a store. What must be durable there before it is told is so here too. Of a mirrored stream clones share their
    /// copy; it is read when it is asked about first.
    ///
    /// # Errors
    /// The first thing that is wrong with the stream.
    pub fn new(store: &Store, stream: Stream) -> Result<Self, StreamError> {
        stream.check()?;
        let copies = stream.mirrored.then(|| Arc::new(Copies::new(stream.shards)));
        Ok(Dedup { store: store.committing(), stream, patience: PATIENCE, front: None, copies })
    }

    /// The same, with batches that are tried for so long; checks and commits no longer than for half of [`Stream::keep`].
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Dedup { patience, ..self }
    }

    /// The same, with a front: ids that this process has been told of are known here for a while, and [`Dedup::check_once`] asks
    /// nobody about them. Clones share it.
    ///
    /// # Errors
    /// What is wrong with the front.
    pub fn with_front(self, front: Front) -> Result<Self, StreamError> {
        let front = Known::new(front, &self.stream)?;
        Ok(Dedup { front: Some(Arc::new(front)), ..self })
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
        self.ask_about(ids, token, token).await
    }

    /// Says of each id of a batch whether it is seen for the first time, for a caller that will not send the batch again: as
    /// [`Dedup::check`] with a token that nobody has. Where a front knows that all of them are duplicates nobody is asked.
    ///
    /// # Errors
    /// [`OnceError`] has the token with which [`Dedup::check`] completes the batch.
    ///
    /// # Cancel safety
    /// A batch whose future is dropped may be remembered in part, and nobody has its token.
    pub async fn check_once(&self, ids: &[ClickId]) -> Result<Vec<Verdict>, OnceError> {
        if (1..=BATCH_IDS_MAX).contains(&ids.len()) && self.knows(ids) {
            metrics::dedup_batch(&self.stream.name, "answered");
            return Ok(vec![Verdict::Duplicate; ids.len()]);
        }
        let token = BatchToken::random();
        self.check(ids, token).await.map_err(|error| OnceError { token, error })
    }

    /// Whether a front knows of each id that it would be a duplicate. Only for what nobody has a token of.
    pub(crate) fn knows(&self, ids: &[ClickId]) -> bool {
        let knows = self.front.as_ref().is_some_and(|front| ids.iter().all(|id| front.knows(id)));
        if knows {
            metrics::dedup_front(&self.stream.name, ids.len() as u64);
            metrics::dedup_ids(&self.stream.name, Verdict::Duplicate.as_str(), ids.len() as u64);
        }
        knows
    }

    /// Keeps the new ones of a batch from everybody else for [`Stream::lease`], without remembering them yet: for a caller that can
    /// die between being told and having written a click down. Then [`Dedup::commit`], with the same token. A claim that is not
    /// committed lapses, and the click counts for whoever comes next.
    ///
    /// Sent again within the lease it is told the same. A token that was released is not to be used again.
    ///
    /// # Errors
    /// [`DedupError::Unanswered`]: the same batch again, with the same token; or nothing, and the claims lapse.
    pub async fn claim(&self, ids: &[ClickId], token: BatchToken) -> Result<Vec<Claimed>, DedupError<Claimed>> {
        self.ask_about(ids, token, token).await
    }

    /// Remembers ids that were claimed with this token, all that were `First` or a part of them, once for each token; and says which
    /// are lost because their claim had lapsed and somebody else was faster. A claim that lapsed and that nobody missed is not lost.
    ///
    /// # Errors
    /// [`DedupError::Unanswered`]: the same ids again, with the same token.
    pub async fn commit(&self, ids: &[ClickId], token: BatchToken) -> Result<Vec<Committed>, DedupError<Committed>> {
        self.ask_about(ids, token, token).await
    }

    /// Remembers some of the ids that were claimed with a token, those of others at other times: each call has a token of its own.
    pub(crate) async fn commit_some(&self, ids: &[ClickId], claim: BatchToken) -> Result<Vec<Committed>, DedupError<Committed>> {
        self.ask_about(ids, BatchToken::random(), claim).await
    }

    /// Gives ids that were claimed with this token back at once. What is committed, or somebody else's, stays as it is.
    ///
    /// # Errors
    /// Of the first call that failed: the same again; or nothing, and the claims lapse.
    pub async fn release(&self, ids: &[ClickId], token: BatchToken) -> Result<(), StoreError> {
        let Split { calls, fingerprint, .. } = split(ids, self.stream.shards, token, Purpose::Release);
        let until = Instant::now() + self.patience;
        let asked: Vec<_> = calls.iter().map(|part| self.give_back(part, ids, &fingerprint, token, until)).collect();
        let answers: Vec<Result<(), StoreError>> = futures::iter(asked).buffered(CALLS_AT_ONCE_MAX).collect().await;
        answers.into_iter().collect()
    }

    /// Reads what others have added to a mirrored stream, so that the next batch need not wait for that; nothing for other streams. A
    /// process that has just started, or asks seldom, may want to.
    ///
    /// # Errors
    /// Of the first shard that cannot be read; the next batch reads it.
    ///
    /// # Cancel safety
    /// What was not read is read by the next batch.
    pub async fn follow(&self) -> Result<(), StoreError> {
        match &self.copies {
            None => Ok(()),
            Some(copies) => copies.follow(&self.store, &self.stream.name).await,
        }
    }

    /// How many clicks are remembered, and in how many buckets, all shards together, as they were last written to.
    ///
    /// # Errors
    /// Of the first shard that cannot be read.
    pub async fn level(&self) -> Result<DedupLevel, StoreError> {
        let shards: Vec<_> = (0..self.stream.shards).map(|shard| self.store.dedup_level(&self.stream.name, shard)).collect();
        let levels: Vec<Result<DedupLevel, StoreError>> = futures::iter(shards).buffered(CALLS_AT_ONCE_MAX).collect().await;
        levels.into_iter().try_fold(DedupLevel::default(), |sum, level| {
            let level = level?;
            Ok(DedupLevel { ids: sum.ids + level.ids, buckets: sum.buckets + level.buckets, bytes: sum.bytes + level.bytes })
        })
    }

    async fn ask_about<V: Told>(&self, ids: &[ClickId], token: BatchToken, claim: BatchToken) -> Result<Vec<V>, DedupError<V>> {
        if ids.len() > BATCH_IDS_MAX {
            return Err(DedupError::TooMany { ids: ids.len() });
        }
        let Split { calls, fingerprint, repeats } = split(ids, self.stream.shards, token, V::PURPOSE);
        let until = Instant::now() + self.patience_for(V::PURPOSE);
        // Put together before the first of them waits: a closure that is kept meanwhile could not go to another thread.
        let asked: Vec<_> = calls.iter().map(|part| self.ask(part, ids, &fingerprint, claim, until)).collect();
        let answers: Vec<Result<Option<Answer<V>>, StoreError>> =
            futures::iter(asked).buffered(CALLS_AT_ONCE_MAX).collect().await;
        let mut verdicts = vec![None; ids.len()];
        let (mut failed, mut conflict) = (None, false);
        for (part, answer) in calls.iter().zip(answers) {
            match answer {
                Ok(Some(Answer { told, asked_ms })) => {
                    for (place, verdict) in part.places.iter().zip(told) {
                        verdicts[*place] = Some(verdict);
                        if let (Some(front), Some(asked_ms), true) = (&self.front, asked_ms, verdict.is_remembered()) {
                            front.learn(&ids[*place], asked_ms);
                        }
                    }
                }
                Ok(None) => conflict = true,
                Err(error) => failed = Some(graver(failed, error)),
            }
        }
        for (place, first) in repeats {
            verdicts[place] = verdicts[first].map(V::repeated);
        }
        if conflict {
            metrics::dedup_batch(&self.stream.name, "conflict");
            return Err(DedupError::Conflict);
        }
        self.count(&verdicts);
        match failed {
            None => {
                metrics::dedup_batch(&self.stream.name, "answered");
                Ok(verdicts.into_iter().flatten().collect())
            }
            Some(error) => {
                metrics::dedup_batch(&self.stream.name, "unanswered");
                let unanswered = verdicts.iter().filter(|verdict| verdict.is_none()).count();
                Err(DedupError::Unanswered { verdicts, unanswered, error })
            }
        }
    }

    /// The verdicts on the ids of one call. `None` for a conflict.
    async fn ask<V: Told>(
        &self,
        part: &Part,
        ids: &[ClickId],
        fingerprint: &HalfBytes,
        claim: BatchToken,
        until: Instant,
    ) -> Result<Option<Answer<V>>, StoreError> {
        let batch = self.batch(part, fingerprint, V::PURPOSE);
        // Before it is sent: what Redis remembers from then on it remembers for a window from here at least.
        let asked_ms = self.front.as_ref().map(|front| front.now_ms());
        let answer = match &self.copies {
            None => self.patiently(until, || V::ask(&self.store, &batch, claim)).await?,
            Some(copies) => {
                let ids = mirror_ids(part, ids);
                // However long it waits for its turn, verdicts of an earlier try are still kept, as `patience_for` says it.
                let sent_until = (V::PURPOSE != Purpose::Claim).then(|| Instant::now() + self.stream.keep / 2);
                self.patiently(until, || copies.ask::<V>(&self.store, &batch, claim, &ids, sent_until)).await?
            }
        };
        match answer {
            Deduplicated::Checked { verdicts } => read(&verdicts, part.places.len()).map(|told| Some(Answer { told, asked_ms })),
            // Told before, nobody here knows when.
            Deduplicated::Repeated { verdicts } => {
                read(&verdicts, part.places.len()).map(|told| Some(Answer { told, asked_ms: None }))
            }
            Deduplicated::Conflict => Ok(None),
        }
    }

    /// How long calls are made again. Once the verdicts of one are kept no more it would be told that its own clicks are somebody
    /// else's; half of that time is left for the last of them to arrive. A claim that has lapsed is judged anew, and rightly.
    fn patience_for(&self, purpose: Purpose) -> Duration {
        match purpose {
            Purpose::Check | Purpose::Commit => self.patience.min(self.stream.keep / 2),
            Purpose::Claim | Purpose::Release => self.patience,
        }
    }

    async fn give_back(
        &self,
        part: &Part,
        ids: &[ClickId],
        fingerprint: &HalfBytes,
        token: BatchToken,
        until: Instant,
    ) -> Result<(), StoreError> {
        let batch = self.batch(part, fingerprint, Purpose::Release);
        let mirrored = self.copies.as_ref().map(|_| mirror_ids(part, ids));
        let (bytes, batch) = match &mirrored {
            None => (RECORD_BYTES, batch),
            Some(ids) => (MIRROR_ID_BYTES, DedupBatch { ids: ids.as_flattened(), ..batch }),
        };
        self.patiently(until, || self.store.dedup_release(&batch, token.as_bytes(), bytes)).await
    }

    fn count<V: Told>(&self, verdicts: &[Option<V>]) {
        let mut counts: Vec<(&'static str, u64)> = Vec::new();
        for verdict in verdicts.iter().flatten() {
            match counts.iter_mut().find(|(word, _)| *word == verdict.as_str()) {
                Some((_, count)) => *count += 1,
                None => counts.push((verdict.as_str(), 1)),
            }
        }
        for (word, count) in counts {
            metrics::dedup_ids(&self.stream.name, word, count);
        }
    }

    fn batch<'a>(&'a self, part: &'a Part, fingerprint: &'a HalfBytes, purpose: Purpose) -> DedupBatch<'a> {
        let keep_ms = match purpose {
            Purpose::Claim => self.stream.lease_ms(),
            Purpose::Check | Purpose::Commit | Purpose::Release => self.stream.keep_ms(),
        };
        DedupBatch {
            stream: &self.stream.name,
            shard: part.shard,
            token: part.token.as_bytes(),
            fingerprint,
            window_ms: self.stream.window_ms(),
            slice_ms: self.stream.slice_ms(),
            expected: self.stream.expected_in_shard(),
            keep_ms,
            ids: &part.ids,
        }
    }

    /// Makes a call until it is answered, as long as there is time.
    async fn patiently<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        until: Instant,
        call: impl Fn() -> F,
    ) -> Result<T, StoreError> {
        let (mut pause, mut gravest) = (TRY_PAUSE, None);
        loop {
            let error = match call().await {
                Ok(told) => return Ok(told),
                Err(error) => error,
            };
            let goes_on = may_pass(&error) && Instant::now() + pause < until;
            let error = graver(gravest, error);
            if !goes_on {
                return Err(error);
            }
            gravest = Some(error);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(TRY_PAUSE_MAX);
        }
    }
}

/// The ids of one call, as a mirrored stream has them.
fn mirror_ids(part: &Part, ids: &[ClickId]) -> Vec<MirrorId> {
    part.places.iter().map(|place| ids[*place].mirrored()).collect()
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

/// Of two errors about the same ids the one that says more of what may have happened, the later one if they say the same: that a last
/// try was not executed says nothing about the ones before it.
fn graver(before: Option<StoreError>, error: StoreError) -> StoreError {
    match before {
        Some(before) if matches!(error, StoreError::NotExecuted { .. }) => before,
        Some(_) | None => error,
    }
}

fn read<V: Told>(verdicts: &[u8], ids: usize) -> Result<Vec<V>, StoreError> {
    let bad = || StoreError::fatal("BADREPLY", format!("{} verdicts on {ids} ids, or one that is not known", verdicts.len()));
    if verdicts.len() != ids {
        return Err(bad());
    }
    verdicts.iter().map(|byte| V::read(*byte).ok_or_else(bad)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_have_happened_is_not_hidden_by_a_later_refusal() {
        let refused = || StoreError::NotExecuted { code: Refusal::Connect, detail: "down".to_owned() };
        let ambiguous = || StoreError::Ambiguous { detail: "timed out".to_owned() };
        assert_eq!(graver(None, refused()), refused());
        assert_eq!(graver(Some(ambiguous()), refused()), ambiguous());
        assert_eq!(graver(Some(refused()), ambiguous()), ambiguous());
        let fatal = || StoreError::fatal("BADRECORD", "no");
        assert_eq!(graver(Some(ambiguous()), fatal()), fatal());
    }

    #[test]
    fn a_verdict_that_is_not_known_is_an_error_and_no_answer() {
        assert_eq!(read::<Verdict>(b"10", 2).unwrap(), [Verdict::First, Verdict::Duplicate]);
        for (verdicts, ids) in [(&b"10"[..], 3), (b"10", 1), (b"12", 2), (b"", 1)] {
            assert!(read::<Verdict>(verdicts, ids).is_err(), "{verdicts:?} {ids}");
        }
    }
}
