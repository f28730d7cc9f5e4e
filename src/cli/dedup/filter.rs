//! The filter itself: batches are asked about ahead, and settled in order.
//!
//! With a state the two phases are: claim; write what is first; write down how far that is; commit. Whoever dies before the third
//! has written nothing that stands, and what it had claimed is given back by the next start, or lapses. Whoever dies after it
//! commits at the next start. Without a state a batch is asked about once, and what is not written when the process dies is lost
//! to the output.
//!
//! A record that somebody else has claimed is neither: what stands before it is settled, everything behind it is given back, so
//! that two who wait for each other do so with empty hands, and it is asked about again.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use futures_util::future::{FutureExt as _, join_all};
use onejob::dedup::{BATCH_IDS_MAX, BatchToken, Claimed, ClickId, Committed, Dedup, DedupError, Verdict};
use onejob::store::Store;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;
use tokio::task::block_in_place;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::super::{Exit, Failure, OrExit as _};
use super::records::{BATCH_BYTES_MAX, Batch, Cutter, HEAD_BYTES, Piece, RECORD_BYTES_MAX, Stopped, fingerprint};
use super::sink::Sink;
use super::state::{Pending, State, StateFile};

/// The pause before what somebody else has claimed is asked about again; doubles.
const HELD_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause.
const HELD_PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often a claim is made anew that got too old before it was written.
const FRESH_TRIES_MAX: u32 = 10;
/// Earlier starts whose claims are given back; those of others lapse.
const SESSIONS_MAX: u64 = 4;
/// How long giving back is tried.
const RELEASE_PATIENCE: Duration = Duration::from_secs(1);

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    First,
    Duplicate,
    Held,
}

/// A batch and what was said of it.
struct Asked {
    batch: Batch,
    /// The name of its token.
    token: String,
    /// When it was sent first, on the boot clock.
    since: Duration,
    /// Of each record that is not settled.
    told: Result<Vec<Told>, Failure>,
}

impl Asked {
    /// The ids that are claimed by this, from a place on.
    fn claimed(&self, from: usize) -> Vec<ClickId> {
        let told = self.told.as_deref().unwrap_or_default();
        let firsts = told.iter().enumerate().filter(|(_, told)| **told == Told::First);
        firsts
            .map(|(place, _)| self.batch.from + place)
            .filter(|place| *place >= from)
            .map(|place| self.batch.ids[place])
            .collect()
    }
}

/// Why it goes no further.
pub(super) enum Broken {
    /// Nobody reads the output any more.
    Closed,
    Failed(Failure),
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Self {
        Broken::Failed(failure)
    }
}

/// How it ended, if it did not break.
pub(super) enum Ended {
    AtTheEnd,
    /// It was asked to stop.
    Stopped,
    /// The input cannot be read any further.
    Refused(Stopped),
}

/// What a run consists of.
pub(super) struct Filter {
    pub(super) dedup: Dedup,
    pub(super) store: Store,
    pub(super) pieces: mpsc::Receiver<Piece>,
    pub(super) output: Sink,
    pub(super) rejects: Option<Sink>,
    /// Where the state is kept, if it is.
    pub(super) file: Option<StateFile>,
    pub(super) state: State,
    /// The beginning of the input.
    pub(super) head: Vec<u8>,
    /// Batches that are asked about at once.
    pub(super) in_flight: usize,
    pub(super) stop: CancellationToken,
    /// Hears how far it is.
    pub(super) tell: Box<dyn Fn(&State) + Send>,
    /// How many records were asked about, whatever came of it.
    pub(super) asked_about: usize,
    work: Work,
}

/// What is under way.
struct Work {
    asked: VecDeque<AbortOnDropHandle<Asked>>,
    /// Batches that were given back, in order; they come before those that are not read yet.
    unclaimed: VecDeque<Batch>,
    /// The ids of batches that are not settled, each with the batch that had it first: in the others it is a duplicate.
    open: HashMap<ClickId, u64>,
    /// How many batches may be asked about now.
    room: usize,
    pause: Duration,
    batches: u64,
    settled: u64,
    ended: Option<Result<(), Stopped>>,
    stopping: bool,
}

impl Filter {
    /// Nothing is under way.
    #[expect(clippy::too_many_arguments, reason = "each is a part of its own")]
    pub(super) fn new(
        dedup: Dedup,
        store: Store,
        pieces: mpsc::Receiver<Piece>,
        output: Sink,
        rejects: Option<Sink>,
        file: Option<StateFile>,
        state: State,
        head: Vec<u8>,
        in_flight: usize,
        stop: CancellationToken,
        tell: Box<dyn Fn(&State) + Send>,
    ) -> Self {
        let work = Work {
            asked: VecDeque::new(),
            unclaimed: VecDeque::new(),
            open: HashMap::new(),
            room: in_flight,
            pause: HELD_PAUSE,
            batches: 0,
            settled: 0,
            ended: None,
            stopping: false,
        };
        Filter { dedup, store, pieces, output, rejects, file, state, head, in_flight, stop, tell, asked_about: 0, work }
    }

    /// Runs until the input's end, or until it is stopped; what was asked about before is settled.
    pub(super) async fn run(&mut self) -> Result<Ended, Broken> {
        loop {
            self.ask_ahead();
            if self.work.asked.is_empty() && self.work.ended.is_some() {
                break;
            }
            let room = self.work.ended.is_none() && self.work.unclaimed.is_empty() && self.work.asked.len() < self.work.room;
            tokio::select! {
                biased;
                () = self.stop.cancelled(), if !self.work.stopping => {
                    self.work.stopping = true;
                    self.work.ended = Some(Ok(()));
                }
                asked = next(&mut self.work.asked) => {
                    let asked = asked.or_exit(Exit::Internal)?;
                    self.work.asked.pop_front();
                    self.settle(asked).await?;
                }
                piece = self.pieces.recv(), if room => self.received(piece),
            }
        }
        let ended = match self.work.ended.take() {
            Some(Err(stopped)) => Ended::Refused(stopped),
            Some(Ok(())) | None if self.work.stopping => Ended::Stopped,
            Some(Ok(())) | None => Ended::AtTheEnd,
        };
        self.state.complete = matches!(ended, Ended::AtTheEnd);
        self.write_state()?;
        Ok(ended)
    }

    /// Waits for what was asked about, so that no call is broken off.
    pub(super) async fn wind_up(&mut self) {
        for asked in std::mem::take(&mut self.work.asked) {
            let _ = asked.await;
        }
    }

    /// Asks about as many batches as there is room for.
    fn ask_ahead(&mut self) {
        if self.work.stopping {
            self.work.unclaimed.clear();
        }
        while self.work.asked.len() < self.work.room {
            if let Some(batch) = self.work.unclaimed.pop_front() {
                self.ask(batch);
                continue;
            }
            if self.work.ended.is_some() {
                return;
            }
            match self.pieces.try_recv() {
                Ok(piece) => self.received(Some(piece)),
                Err(mpsc::error::TryRecvError::Empty) => return,
                Err(mpsc::error::TryRecvError::Disconnected) => self.received(None),
            }
        }
    }

    fn received(&mut self, piece: Option<Piece>) {
        match piece {
            Some(Piece::Batch(mut batch)) => {
                self.work.batches += 1;
                batch.serial = self.work.batches;
                self.ask(batch);
            }
            Some(Piece::End(ended)) => self.work.ended = Some(ended),
            None => {
                let error = std::io::Error::other("whoever reads it is gone");
                self.work.ended = Some(Err(Stopped::Read(error)));
            }
        }
    }

    fn ask(&mut self, batch: Batch) {
        let asked = self.asking(batch);
        self.work.asked.push_back(asked);
    }

    /// Sends a question about what of a batch is not settled, under a name that no other question has.
    fn asking(&mut self, mut batch: Batch) -> AbortOnDropHandle<Asked> {
        let begin = batch.begin();
        let token = token(&self.state, self.state.session, begin, batch.asked);
        let earlier = self.state.session.saturating_sub(SESSIONS_MAX).max(self.state.released)..self.state.session;
        let may_be_claimed = self.file.is_some() && batch.asked == 0 && batch.serial <= self.in_flight as u64;
        let before: Vec<String> = match may_be_claimed {
            true => earlier.map(|session| self::token(&self.state, session, begin, 0)).collect(),
            false => Vec::new(),
        };
        if batch.asked == 0 {
            self.asked_about += batch.ids.len();
        }
        batch.asked += 1;
        let (mut places, mut ids) = (Vec::new(), Vec::new());
        for (place, id) in batch.ids.iter().enumerate().skip(batch.from) {
            if *self.work.open.entry(*id).or_insert(batch.serial) == batch.serial {
                places.push(place - batch.from);
                ids.push(*id);
            }
        }
        let (dedup, claims) = (self.dedup.clone(), self.file.is_some());
        AbortOnDropHandle::new(tokio::spawn(async move {
            let releasing = dedup.clone().with_patience(RELEASE_PATIENCE);
            for token in &before {
                // What is not given back lapses.
                let _ = releasing.release(&ids, BatchToken::named(token)).await;
            }
            let since = boot_clock();
            let answer = match claims {
                true => claim(&dedup, &ids, &token).await,
                false => check(&dedup, &ids, &token).await,
            };
            let told = answer.map(|answer| {
                let mut told = vec![Told::Duplicate; batch.ids.len() - batch.from];
                places.iter().zip(answer).for_each(|(place, answer)| told[*place] = answer);
                told
            });
            Asked { batch, token, since, told }
        }))
    }

    /// Settles the next batch, and those behind it that are told already.
    async fn settle(&mut self, first: Asked) -> Result<(), Broken> {
        let mut group = VecDeque::from([first]);
        while group.len() < self.in_flight
            && let Some(asked) = self.work.asked.front_mut().and_then(|front| front.now_or_never())
        {
            self.work.asked.pop_front();
            group.push_back(asked.or_exit(Exit::Internal)?);
        }
        if self.file.is_some() {
            self.freshen(&mut group).await?;
        }
        let counts_before = self.state.counts;
        let mut lines = Vec::new();
        let mut rejected = Vec::new();
        let mut commits: Vec<(String, Vec<ClickId>)> = Vec::new();
        let mut failed = None;
        let mut held = None;
        while let Some(mut asked) = group.pop_front() {
            let told = match &asked.told {
                Ok(told) => told,
                Err(_) => {
                    failed = Some(asked);
                    break;
                }
            };
            let from = asked.batch.from;
            let upto = told.iter().position(|told| *told == Told::Held).map_or(asked.batch.ids.len(), |place| from + place);
            let begin = self.output.bytes + lines.len() as u64;
            let mut ids = Vec::new();
            for place in from..upto {
                if told[place - from] == Told::First {
                    lines.extend_from_slice(asked.batch.record(place));
                    ids.push(asked.batch.ids[place]);
                }
            }
            let counts = &mut self.state.counts;
            counts.first += ids.len() as u64;
            counts.duplicates += (upto - from - ids.len()) as u64;
            counts.records += (upto - from) as u64;
            asked.batch.rejects.retain(|(place, record, _)| {
                if *place > upto {
                    return true;
                }
                rejected.extend_from_slice(record);
                if !record.ends_with(b"\n") {
                    rejected.push(b'\n');
                }
                (counts.records, counts.rejected) = (counts.records + 1, counts.rejected + 1);
                false
            });
            if !ids.is_empty() {
                let end = self.output.bytes + lines.len() as u64;
                self.state.pending.push(Pending { token: asked.token.clone(), begin, end });
                commits.push((asked.token.clone(), ids));
            }
            if upto > from {
                self.work.pause = HELD_PAUSE;
            }
            if upto < asked.batch.ids.len() {
                (self.state.input_bytes, self.state.whole) = (asked.batch.offsets[upto], true);
                held = Some((asked, upto));
                break;
            }
            (self.state.input_bytes, self.state.whole) = (asked.batch.end, asked.batch.whole);
            self.work.room = self.in_flight;
            self.work.settled += 1;
            for id in &asked.batch.ids {
                if self.work.open.get(id) == Some(&asked.batch.serial) {
                    self.work.open.remove(id);
                }
            }
        }
        if let Err(broken) = self.write(&lines, &rejected) {
            // What is not written is not settled.
            self.state.counts = counts_before;
            return Err(broken);
        }
        self.commit(commits).await?;
        (self.tell)(&self.state);
        if let Some(Asked { told: Err(failure), .. }) = failed {
            return Err(failure.into());
        }
        if let Some((asked, upto)) = held {
            self.back_off(asked, upto, group).await.or_exit(Exit::Internal)?;
        }
        Ok(())
    }

    /// Makes claims anew that got too old to be written down: they would lapse before they are committed.
    async fn freshen(&mut self, group: &mut VecDeque<Asked>) -> Result<(), Failure> {
        let lease = self.dedup.stream().lease;
        let is_old = |asked: &Asked| boot_clock().saturating_sub(asked.since) > lease / 2 && !asked.claimed(0).is_empty();
        for _ in 0..FRESH_TRIES_MAX {
            let old: Vec<bool> = group.iter().map(is_old).collect();
            if !old.contains(&true) {
                return Ok(());
            }
            let given_back = group.iter().zip(&old).filter(|(_, old)| **old).map(|(asked, _)| give_back(&self.dedup, asked, 0));
            join_all(given_back).await;
            let again: Vec<_> = std::mem::take(group)
                .into_iter()
                .zip(old)
                .map(|(asked, old)| match old {
                    true => self.asking(asked.batch),
                    false => AbortOnDropHandle::new(tokio::spawn(std::future::ready(asked))),
                })
                .collect();
            for asked in again {
                group.push_back(asked.await.or_exit(Exit::Internal)?);
            }
        }
        let what = format!("claims are older than half of --lease, {lease:?}, before they can be written: make it longer");
        Err(Failure::new(Exit::Unavailable, what))
    }

    /// Writes records, and how far that is.
    fn write(&mut self, lines: &[u8], rejected: &[u8]) -> Result<(), Broken> {
        block_in_place(|| {
            if let Err(error) = self.output.write(lines) {
                return Err(match error.kind() {
                    std::io::ErrorKind::BrokenPipe => Broken::Closed,
                    _ => self.output.failed(&error).into(),
                });
            }
            if let Some(rejects) = &mut self.rejects
                && let Err(error) = rejects.write(rejected)
            {
                return Err(rejects.failed(&error).into());
            }
            Ok(self.write_state()?)
        })
    }

    /// Writes what stands before the first record.
    pub(super) fn write_header(&mut self, header: &[u8], input_bytes: u64) -> Result<(), Broken> {
        self.state.input_bytes = input_bytes;
        self.write(header, &[])
    }

    /// Writes down how far it is. What that says of other files is on the disk before.
    pub(super) fn write_state(&mut self) -> Result<(), Failure> {
        let Some(file) = &self.file else { return Ok(()) };
        self.output.sync().map_err(|error| self.output.failed(&error))?;
        if let Some(rejects) = &self.rejects {
            rejects.sync().map_err(|error| rejects.failed(&error))?;
            self.state.rejects_bytes = rejects.bytes;
        }
        self.state.output_bytes = self.output.bytes;
        let head = usize::try_from(self.state.input_bytes).unwrap_or(HEAD_BYTES).min(self.head.len());
        (self.state.head_bytes, self.state.head) = (head as u64, fingerprint(&self.head[..head]));
        if self.work.settled >= self.in_flight as u64 {
            self.state.released = self.state.session;
        }
        self.state.at_ms = self.store.now_ms();
        let failed = |error| Failure::new(Exit::Unavailable, format!("cannot write the state: {error}"));
        file.write(&self.state).map_err(failed)
    }

    /// Commits what is written. Without a state it was remembered when it was asked about.
    async fn commit(&mut self, commits: Vec<(String, Vec<ClickId>)>) -> Result<(), Failure> {
        if self.file.is_some() {
            let told = commits.iter().map(|(token, ids)| commit(&self.dedup, ids, token));
            for lost in join_all(told).await {
                self.state.counts.lost += lost?;
            }
        }
        self.state.pending.clear();
        Ok(())
    }

    /// Commits what the process before may not have committed.
    pub(super) async fn commit_again(&mut self, cutter: &Cutter) -> Result<(), Failure> {
        let pending = self.state.pending.clone();
        let age = self.store.now_ms().saturating_sub(self.state.at_ms);
        for Pending { token, begin, end } in pending {
            let wrong = |what: String| Failure::new(Exit::Usage, format!("the state and the output do not agree: {what}"));
            if begin > end || end > self.output.bytes || end - begin > (BATCH_BYTES_MAX + RECORD_BYTES_MAX) as u64 {
                return Err(wrong(format!("a batch from {begin} to {end}, in {} bytes", self.output.bytes)));
            }
            let records = self.output.read(begin, end).map_err(|error| self.output.failed(&error))?;
            let ids = cutter.between_rows().ids(records).map_err(wrong)?;
            if ids.len() > BATCH_IDS_MAX {
                return Err(wrong(format!("a batch of {} records", ids.len())));
            }
            let lost = commit(&self.dedup, &ids, &token).await?;
            match Duration::from_millis(age) < self.dedup.stream().keep {
                true => self.state.counts.lost += lost,
                false => self.state.counts.unsure += lost,
            }
        }
        self.state.pending.clear();
        Ok(())
    }

    /// Gives everything back from a record on that somebody else has claimed, and waits a moment.
    async fn back_off(&mut self, mut asked: Asked, upto: usize, behind: VecDeque<Asked>) -> Result<(), tokio::task::JoinError> {
        let mut waiting = vec![];
        for asked in std::mem::take(&mut self.work.asked) {
            waiting.push(asked.await?);
        }
        let behind: Vec<Asked> = behind.into_iter().chain(waiting).collect();
        give_back(&self.dedup, &asked, upto).await;
        join_all(behind.iter().map(|asked| give_back(&self.dedup, asked, 0))).await;
        asked.batch.from = upto;
        let again = std::iter::once(asked).chain(behind).map(|asked| asked.batch);
        self.work.unclaimed = again.chain(std::mem::take(&mut self.work.unclaimed)).collect();
        self.work.room = 1;
        // Two that met once shall not meet again and again.
        let jitter = f64::from(BatchToken::random().as_bytes()[0]) / 255.0;
        tokio::select! {
            () = self.stop.cancelled(), if !self.work.stopping => {}
            () = tokio::time::sleep(self.work.pause.mul_f64(0.5 + jitter)) => {}
        }
        self.work.pause = (self.work.pause * 2).min(HELD_PAUSE_MAX);
        Ok(())
    }
}

/// The next batch that was asked about, if there is one.
async fn next(asked: &mut VecDeque<AbortOnDropHandle<Asked>>) -> Result<Asked, tokio::task::JoinError> {
    match asked.front_mut() {
        Some(front) => front.await,
        None => std::future::pending().await,
    }
}

/// The name of a question: of a run, which start of it, where in the input it begins, and which time.
fn token(state: &State, session: u64, begin: u64, time: u32) -> String {
    format!("dedup {} {session} {begin} {time}", state.run)
}

async fn claim(dedup: &Dedup, ids: &[ClickId], token: &str) -> Result<Vec<Told>, Failure> {
    let told = dedup.claim(ids, BatchToken::named(token)).await.map_err(unanswered)?;
    let told = told.into_iter().map(|told| match told {
        Claimed::First => Told::First,
        Claimed::Duplicate => Told::Duplicate,
        Claimed::Held => Told::Held,
    });
    Ok(told.collect())
}

async fn check(dedup: &Dedup, ids: &[ClickId], token: &str) -> Result<Vec<Told>, Failure> {
    let told = dedup.check(ids, BatchToken::named(token)).await.map_err(unanswered)?;
    let told = told.into_iter().map(|told| match told {
        Verdict::First => Told::First,
        Verdict::Duplicate => Told::Duplicate,
    });
    Ok(told.collect())
}

/// How many are lost.
async fn commit(dedup: &Dedup, ids: &[ClickId], token: &str) -> Result<u64, Failure> {
    let told = dedup.commit(ids, BatchToken::named(token)).await.map_err(unanswered)?;
    Ok(told.iter().filter(|told| **told == Committed::Lost).count() as u64)
}

/// Gives claims back, from a place of the batch on. Where that cannot be told to Redis they lapse.
async fn give_back(dedup: &Dedup, asked: &Asked, from: usize) {
    let ids = asked.claimed(from);
    if !ids.is_empty() {
        let _ = dedup.clone().with_patience(RELEASE_PATIENCE).release(&ids, BatchToken::named(&asked.token)).await;
    }
}

fn unanswered<V: std::fmt::Debug + Send + Sync + 'static>(error: DedupError<V>) -> Failure
where
    DedupError<V>: std::error::Error,
{
    let exit = match &error {
        // Others declare the stream otherwise: no later try will do.
        DedupError::Unanswered { error, .. } if error.is_of_another_schema() => Exit::Usage,
        DedupError::Unanswered { .. } => Exit::Unavailable,
        DedupError::TooMany { .. } | DedupError::Conflict => Exit::Internal,
    };
    Failure::new(exit, error.to_string())
}

/// A clock that goes on while the machine sleeps, as Redis' does.
fn boot_clock() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}
