//! Requests of one layer, put together into calls: while one is under way, the next ones gather.
//!
//! Two tasks, begun by the layer's first request and ended with its last service: one asks, the other commits and gives back. A
//! request that is claimed holds a [`Claim`]; one that is dropped, by a panic or because its client has gone, gives its request back.

use std::collections::HashMap;

use futures_util::{StreamExt as _, stream as futures};
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;

use super::Remember;
use crate::dedup::{BatchToken, Claimed, ClickId, Committed, Dedup, DedupError, Verdict};

/// Requests of one call.
pub const LAYER_BATCH_MAX: usize = 1_000;
/// Requests that wait for a call to be made, and as many that wait to be committed or given back.
pub const LAYER_WAITING_MAX: usize = 10_000;
/// Commits and releases under way at once: a call for each batch that they were claimed in.
const ENDS_AT_ONCE: usize = 32;

/// What a request is.
pub(super) enum Told {
    /// New; with a claim unless it is remembered already.
    First(Option<Claim>),
    Duplicate,
    /// Another one like it has been claimed.
    Held,
    /// Nobody can say: Redis does not answer, or too many wait.
    Unavailable,
}

struct Ask {
    id: ClickId,
    told: oneshot::Sender<Told>,
}

/// The end of a claim.
struct End {
    id: ClickId,
    claim: BatchToken,
    how: How,
}

enum How {
    Commit(oneshot::Sender<Option<Committed>>),
    /// Who is gone does not hear of it.
    Release(Option<oneshot::Sender<()>>),
}

/// Of one batch of claims.
type ToCommit = (ClickId, oneshot::Sender<Option<Committed>>);
type ToRelease = (ClickId, Option<oneshot::Sender<()>>);

/// The way to both tasks.
pub(super) struct Batches {
    asks: mpsc::Sender<Ask>,
}

impl Batches {
    pub(super) fn start(dedup: &Dedup, remember: Remember, tasks: &TaskTracker) -> Self {
        let (asks, asked) = mpsc::channel(LAYER_WAITING_MAX);
        let (ends, ended) = mpsc::channel(LAYER_WAITING_MAX);
        tasks.spawn(answer(dedup.clone(), remember, asked, ends));
        tasks.spawn(end(dedup.clone(), ended));
        Batches { asks }
    }

    /// What a request is. Dropped, it gives back what was claimed for it.
    pub(super) async fn ask(&self, id: ClickId) -> Told {
        let (told, answer) = oneshot::channel();
        if self.asks.try_send(Ask { id, told }).is_err() {
            return Told::Unavailable;
        }
        answer.await.unwrap_or(Told::Unavailable)
    }
}

/// A request that is this process' to handle, until it is committed or given back.
pub(super) struct Claim {
    id: ClickId,
    claim: BatchToken,
    ends: mpsc::Sender<End>,
    is_open: bool,
}

impl Claim {
    /// Remembers the request; `None` if nobody says whether it is. Once this is polled, it goes on when its future is dropped.
    pub(super) async fn commit(mut self) -> Option<Committed> {
        let (told, answer) = oneshot::channel();
        self.is_open = false;
        self.ends.try_send(End { id: self.id, claim: self.claim, how: How::Commit(told) }).ok()?;
        answer.await.ok().flatten()
    }

    /// Gives the request back, and waits until the next one like it counts; or its lease lapses.
    pub(super) async fn release(mut self) {
        let (told, answer) = oneshot::channel();
        self.is_open = false;
        if self.ends.try_send(End { id: self.id, claim: self.claim, how: How::Release(Some(told)) }).is_ok() {
            // Not told: it lapses.
            let _ = answer.await;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.is_open {
            // Too many wait, or none takes it any more: it lapses.
            let _ = self.ends.try_send(End { id: self.id, claim: self.claim, how: How::Release(None) });
        }
    }
}

/// Asks about everything that has gathered, again and again.
async fn answer(dedup: Dedup, remember: Remember, mut asked: mpsc::Receiver<Ask>, ends: mpsc::Sender<End>) {
    let mut gathered = Vec::new();
    while asked.recv_many(&mut gathered, LAYER_BATCH_MAX).await > 0 {
        let mut waiting: HashMap<ClickId, Vec<oneshot::Sender<Told>>> = HashMap::new();
        // Whoever has gone needs no claim.
        for Ask { id, told } in gathered.drain(..).filter(|ask| !ask.told.is_closed()) {
            waiting.entry(id).or_default().push(told);
        }
        let ids: Vec<ClickId> = waiting.keys().copied().collect();
        let token = BatchToken::random();
        let claim = |id: &ClickId| Claim { id: *id, claim: token, ends: ends.clone(), is_open: true };
        match remember {
            Remember::AfterSuccess => {
                let verdicts = known(&dedup, dedup.claim(&ids, token).await, ids.len());
                for (id, verdict) in ids.iter().zip(verdicts) {
                    let told = waiting.remove(id).unwrap_or_default();
                    match verdict {
                        Some(Claimed::First) => tell_one(told, Told::First(Some(claim(id))), || Told::Held),
                        Some(Claimed::Duplicate) => tell(told, || Told::Duplicate),
                        Some(Claimed::Held) => tell(told, || Told::Held),
                        None => {
                            // It may have been claimed: better given back than left to its lease.
                            drop(claim(id));
                            tell(told, || Told::Unavailable);
                        }
                    }
                }
            }
            Remember::BeforeHandler => {
                let verdicts = known(&dedup, dedup.check(&ids, token).await, ids.len());
                for (id, verdict) in ids.iter().zip(verdicts) {
                    let told = waiting.remove(id).unwrap_or_default();
                    match verdict {
                        Some(Verdict::First) => tell_one(told, Told::First(None), || Told::Duplicate),
                        Some(Verdict::Duplicate) => tell(told, || Told::Duplicate),
                        None => tell(told, || Told::Unavailable),
                    }
                }
            }
        }
    }
}

/// What is known of each id of a call.
fn known<V: Copy>(dedup: &Dedup, told: Result<Vec<V>, DedupError<V>>, ids: usize) -> Vec<Option<V>>
where
    DedupError<V>: std::fmt::Display,
{
    match told {
        Ok(verdicts) => verdicts.into_iter().map(Some).collect(),
        Err(error) => {
            tracing::warn!(stream = dedup.stream().name, ids, %error, "requests have no verdict");
            match error {
                DedupError::Unanswered { verdicts, .. } => verdicts,
                DedupError::TooMany { .. } | DedupError::Conflict => vec![None; ids],
            }
        }
    }
}

fn tell(waiting: Vec<oneshot::Sender<Told>>, told: impl Fn() -> Told) {
    for waits in waiting {
        // Gone: it is nothing to anybody.
        let _ = waits.send(told());
    }
}

/// Tells one that is still there, and the others something else. If nobody is there, what was for one is dropped.
fn tell_one(waiting: Vec<oneshot::Sender<Told>>, one: Told, others: impl Fn() -> Told) {
    let mut one = Some(one);
    for waits in waiting {
        match one.take() {
            Some(told) => one = waits.send(told).err(),
            None => drop(waits.send(others())),
        }
    }
}

/// Commits and gives back everything that has gathered, again and again: a call for each batch in which it was claimed.
async fn end(dedup: Dedup, mut ended: mpsc::Receiver<End>) {
    let mut gathered = Vec::new();
    while ended.recv_many(&mut gathered, LAYER_BATCH_MAX).await > 0 {
        let mut commits: HashMap<BatchToken, Vec<ToCommit>> = HashMap::new();
        let mut releases: HashMap<BatchToken, Vec<ToRelease>> = HashMap::new();
        for End { id, claim, how } in gathered.drain(..) {
            match how {
                How::Commit(told) => commits.entry(claim).or_default().push((id, told)),
                How::Release(told) => releases.entry(claim).or_default().push((id, told)),
            }
        }
        let commits: Vec<_> = commits.into_iter().map(|(claim, some)| commit(&dedup, claim, some)).collect();
        let releases: Vec<_> = releases.into_iter().map(|(claim, some)| release(&dedup, claim, some)).collect();
        let committed = futures::iter(commits).buffer_unordered(ENDS_AT_ONCE).collect::<Vec<()>>();
        let released = futures::iter(releases).buffer_unordered(ENDS_AT_ONCE).collect::<Vec<()>>();
        tokio::join!(committed, released);
    }
}

async fn commit(dedup: &Dedup, claim: BatchToken, some: Vec<ToCommit>) {
    let ids: Vec<ClickId> = some.iter().map(|(id, _)| *id).collect();
    let verdicts = known(dedup, dedup.commit_some(&ids, claim).await, ids.len());
    for ((_, told), verdict) in some.into_iter().zip(verdicts) {
        if verdict == Some(Committed::Lost) {
            tracing::warn!(
                stream = dedup.stream().name,
                "a request was handled for longer than its lease, and another one counts"
            );
        }
        let _ = told.send(verdict);
    }
}

async fn release(dedup: &Dedup, claim: BatchToken, some: Vec<ToRelease>) {
    let ids: Vec<ClickId> = some.iter().map(|(id, _)| *id).collect();
    if let Err(error) = dedup.release(&ids, claim).await {
        tracing::warn!(stream = dedup.stream().name, ids = ids.len(), %error, "requests are not given back before their lease lapses");
    }
    for told in some.into_iter().filter_map(|(_, told)| told) {
        let _ = told.send(());
    }
}
