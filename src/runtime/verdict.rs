//! What an outcome means: for the record, for the metrics, and for what comes next.
//!
//! A result in hand is stored before anybody is told, and kept until the store takes it: in memory, and after a moment in the spool
//! too (`spool.rs`). What may begin next is the plan's wish (`policy.rs`); whether it may is the scripts' word.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::attempt::{AttemptState, AttemptToken, FinishOutcome};
use crate::error::StoreError;
use crate::failpoint::failpoint;
use crate::job::{Body, JobId, JobState};
use crate::metrics;
use crate::policy::{self, Ending, FailoverOn, Next, Try};
use crate::provider::{Outcome, Response};
use crate::runtime::attempts::{Running, STORE_PAUSE, STORE_PAUSE_MAX, Work};
use crate::runtime::certificates::{self, Leave, Seen};
use crate::runtime::losses::{self, What};
use crate::runtime::spool::{Kept, Offer, SPOOL_AFTER, SPOOL_AGAIN};
use crate::runtime::sweeper;
use crate::runtime::{Inner, Lane, checks, millis};
use crate::store::{Durable, FinishAttempt, Finished, Follow, Hint, Keep, Store, Tell};

/// Longest reason that is taken from an adapter, in characters: it stands in the record, in the log, and is shown on one line.
const REASON_CHARS_MAX: usize = 500;
/// Longest remote id or model that is believed, in bytes. A longer one is left out: a part of a name is another name.
const NAME_BYTES_MAX: usize = 512;

/// How the reason of an attempt begins whose lease had run out.
pub(super) const FENCED: &str = "fenced: ";

/// What an outcome means for the record.
pub(super) struct Verdict {
    pub(super) outcome: FinishOutcome,
    pub(super) reason: String,
    pub(super) response: Option<Response>,
    pub(super) remote_id: String,
    pub(super) model: String,
    pub(super) follow: Follow,
    pub(super) next: Option<(usize, Duration)>,
}

/// The attempt that a verdict is about, and what storing it takes.
pub(super) struct Whose {
    pub(super) job: JobId,
    pub(super) number: u32,
    pub(super) token: AttemptToken,
    /// The hint that was written for it; `None` to leave it to a look at the job.
    pub(super) hint_ms: Option<u64>,
    /// When its retained bytes are to be stripped, from the end of the job; 0 for never.
    pub(super) strip_after_ms: u64,
    /// Where the job's input is kept.
    pub(super) input: Body,
    /// How long input and result are kept from the end of the job.
    pub(super) bytes_life: Duration,
}

impl Whose {
    /// When somebody must look at the job again after its end, if it ends now.
    fn strip_at_ms(&self, store: &Store) -> Option<u64> {
        (self.strip_after_ms > 0).then(|| store.now_ms() + self.strip_after_ms)
    }
}

impl Verdict {
    /// An end with nothing to keep but its reason, and nothing after it.
    pub(super) fn plain(outcome: FinishOutcome, reason: String) -> Self {
        Verdict {
            outcome,
            reason,
            response: None,
            remote_id: String::new(),
            model: String::new(),
            follow: Follow::End,
            next: None,
        }
    }
}

/// Records how an attempt ended, and says what comes next: a provider's place and a delay.
pub(super) async fn conclude(
    runtime: &Arc<Inner>,
    work: &mut Work,
    attempt: &Arc<Running>,
    outcome: Outcome,
) -> Option<(usize, Duration)> {
    // A result in hand, though nobody knows yet what it is worth: a stopping gateway waits for it.
    let in_hand = InHand::take(runtime, attempt);
    let outcome = checks::checked(&work.route, &work.request.body, outcome).await;
    if attempt.noted_unknown.is_cancelled() {
        if matches!(outcome, Outcome::Unknown { .. } | Outcome::NotSent { .. }) {
            // It is written down as unknown, and nothing more is known.
            return None;
        }
    } else {
        metrics::attempt(&attempt.lane.slot.name, outcome.word());
    }
    let seen = Seen::under(&attempt.certificate, &outcome);
    let leave = certificates::open_after(runtime, work, &outcome).await;
    let verdict = judge(runtime, work, attempt, outcome, &leave);
    drop(in_hand);
    let finished = store_verdict(runtime, attempt, &verdict).await;
    failpoint!("finish.stored");
    certificates::saw(runtime, &work.route, &attempt.lane.slot.name, &attempt.certificate, seen).await;
    if verdict.outcome == FinishOutcome::Unknown {
        warn_unknown(attempt, &verdict.reason);
    }
    if let (Finished::Discarded { attempt: AttemptState::Discarded, .. }, Some(response)) = (&finished, &verdict.response)
        && verdict.outcome == FinishOutcome::Succeeded
    {
        count_cost(&attempt.lane, attempt.job, attempt.number, response);
    }
    let about = About { job: attempt.job, attempt: attempt.number, provider: Some(&attempt.lane.slot.name) };
    count_finish(&finished, verdict.outcome, about);
    match finished {
        Finished::Recorded { job: JobState::Pending } | Finished::Repeated { job: JobState::Pending, .. } => {
            if verdict.next.is_none() {
                // Given back: whoever has room may begin, and that may be us.
                sweeper::look_soon(Arc::clone(runtime), attempt.job.identity()).await;
            }
            verdict.next
        }
        Finished::Won { .. } if attempt.raced.load(Ordering::Relaxed) => {
            // Whoever ran beside it is stopped, and asked what it cost.
            sweeper::look_soon(Arc::clone(runtime), attempt.job.identity()).await;
            None
        }
        Finished::Recorded { .. } | Finished::Repeated { .. } if verdict.outcome == FinishOutcome::Unknown => {
            // Its provider is asked soon, and not only when its lease would have been over.
            sweeper::look_soon(Arc::clone(runtime), attempt.job.identity()).await;
            None
        }
        Finished::Won { .. }
        | Finished::Recorded { .. }
        | Finished::Repeated { .. }
        | Finished::Discarded { .. }
        | Finished::NotFound => None,
    }
}

/// Writes down that an attempt is unknown, though its call listens on: from now on its key says so, and a late answer settles it.
pub(super) async fn overdue(runtime: &Arc<Inner>, attempt: &Running, reason: &str) {
    let verdict = Verdict::plain(FinishOutcome::Unknown, one_line(reason));
    let mut pause = STORE_PAUSE;
    loop {
        match try_store(runtime, &attempt.whose(), &verdict).await {
            Ok(Finished::Recorded { .. } | Finished::Repeated { .. }) => break,
            // Somebody else has settled it already.
            Ok(Finished::Won { .. } | Finished::Discarded { .. } | Finished::NotFound) => return,
            Err(error) if error.is_retryable() => {
                tracing::debug!(job = %attempt.job, %error, "unknown, and not written down yet");
            }
            Err(error) => {
                tracing::error!(job = %attempt.job, attempt = attempt.number, %error, "an unknown attempt cannot be written down");
                return;
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(STORE_PAUSE_MAX);
    }
    attempt.noted_unknown.cancel();
    metrics::attempt(&attempt.lane.slot.name, "unknown");
    warn_unknown(attempt, &verdict.reason);
    runtime.waiters.wake(attempt.job.identity());
    // Its provider can be asked meanwhile.
    sweeper::look_soon(Arc::clone(runtime), attempt.job.identity()).await;
}

fn warn_unknown(attempt: &Running, reason: &str) {
    let (job, provider) = (attempt.job, &attempt.lane.slot.name);
    tracing::warn!(%job, attempt = attempt.number, provider, reason, "an attempt is unknown; nothing else begins for its key");
}

fn judge(runtime: &Inner, work: &mut Work, attempt: &Running, outcome: Outcome, leave: &Leave) -> Verdict {
    let told = || attempt.remote_id.get().cloned().unwrap_or_default();
    let mut failed = None;
    let (retry_after, mut verdict) = match fit(outcome) {
        Outcome::Succeeded { response, remote_id, model } => {
            return Verdict {
                response: Some(response),
                remote_id: remote_id.unwrap_or_else(told),
                model: model.unwrap_or_default(),
                ..Verdict::plain(FinishOutcome::Succeeded, String::new())
            };
        }
        // By that name it can be asked about, whether or not it was noted meanwhile.
        Outcome::Unknown { reason } => {
            return Verdict { remote_id: told(), ..Verdict::plain(FinishOutcome::Unknown, reason) };
        }
        Outcome::NotSent { reason } if attempt.fence.lease().is_err() || reason.starts_with(FENCED) => {
            // Our own lease ran out: no failure of the provider's, and whoever has a lease may begin.
            metrics::fenced();
            let reason = if reason.starts_with(FENCED) { reason } else { format!("{FENCED}{reason}") };
            let mut verdict = Verdict::plain(FinishOutcome::Aborted, reason);
            verdict.follow = Follow::Retry { delay_ms: 0, hold_ms: 0 };
            return verdict;
        }
        // We kept it back ourselves: no try, and what comes next is what came next before it.
        Outcome::NotSent { reason } if reason.starts_with(policy::DENIED) => {
            (None, Verdict::plain(FinishOutcome::Aborted, reason))
        }
        Outcome::NotSent { reason } => {
            let reason = format!("{}: {reason}", policy::NOT_SENT);
            failed = Some(FailoverOn::NotSent);
            (None, Verdict::plain(FinishOutcome::Aborted, reason))
        }
        Outcome::Rejected { reason, response, retry_after } => {
            let status = response.status;
            let mut verdict = Verdict::plain(FinishOutcome::Failed, format!("{} {status}: {reason}", policy::REJECTED));
            verdict.response = Some(response);
            failed = Some(FailoverOn::Rejected { status });
            (retry_after, verdict)
        }
        Outcome::InvalidOutput { reason } => {
            let reason = format!("{}: {reason}", policy::INVALID_OUTPUT);
            failed = Some(FailoverOn::InvalidOutput);
            (None, Verdict::plain(FinishOutcome::Failed, reason))
        }
    };
    work.tries.extend(failed.map(|failure| Try { provider: attempt.place, failure }));
    let remaining = work.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    match work.route.plan.after(&work.tries, retry_after, remaining, &leave.open) {
        Next::Begin { provider, delay, denied } => {
            // Its own denial is told already.
            if let Some(place) = denied.filter(|place| failed.is_some() || *place != attempt.place) {
                metrics::failover_denied(&work.route.name, leave.word(place));
                verdict.reason.push_str("; ");
                verdict.reason.push_str(&leave.say(&work.route, place));
            }
            verdict.follow = Follow::Retry { delay_ms: millis(delay), hold_ms: runtime.lease_ms() };
            verdict.next = Some((provider, delay));
        }
        Next::End(why) => {
            verdict.reason.push_str("; ");
            verdict.reason.push_str(&why.to_string());
            if why != Ending::NotInFailoverOn
                && let Some(denied) = leave.denied()
            {
                verdict.reason.push_str("; ");
                verdict.reason.push_str(&leave.say(&work.route, denied));
            }
        }
    }
    verdict
}

/// What an adapter says of itself, fit for the record and the log.
pub(super) fn fit(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Succeeded { response, remote_id, model } => Outcome::Succeeded {
            response,
            remote_id: remote_id.filter(|name| is_name(name)),
            model: model.filter(|name| is_name(name)),
        },
        Outcome::Rejected { reason, response, retry_after } => {
            Outcome::Rejected { reason: one_line(&reason), response, retry_after }
        }
        Outcome::NotSent { reason } => Outcome::NotSent { reason: one_line(&reason) },
        Outcome::InvalidOutput { reason } => Outcome::InvalidOutput { reason: one_line(&reason) },
        Outcome::Unknown { reason } => Outcome::Unknown { reason: one_line(&reason) },
    }
}

pub(super) fn is_name(name: &str) -> bool {
    name.len() <= NAME_BYTES_MAX && !name.chars().any(char::is_control)
}

pub(super) fn one_line(text: &str) -> String {
    let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    let mut line: String = text.chars().take(REASON_CHARS_MAX).map(shown).collect();
    if text.chars().nth(REASON_CHARS_MAX).is_some() {
        line.push('…');
    }
    line
}

/// Stores how an attempt ended: in memory again and again, and after a moment in the spool too, until the store has it or the process
/// must stop.
async fn store_verdict(runtime: &Arc<Inner>, attempt: &Running, verdict: &Verdict) -> Finished {
    let in_hand = InHand::take(runtime, attempt);
    let whose = attempt.whose();
    let mut to_spool = ToSpool { runtime, whose: &whose, verdict, offer: Offer::First };
    let mut storing = std::pin::pin!(store_until_taken(runtime, &whose, verdict));
    let at_once = tokio::select! {
        biased;
        taken = &mut storing => Some(taken),
        () = tokio::time::sleep(SPOOL_AFTER) => None,
        () = runtime.stopped.cancelled() => None,
    };
    let (kept, taken) = match at_once {
        Some(taken) => (None, taken),
        None => {
            let mut kept = to_spool.keep().await;
            let taken = loop {
                tokio::select! {
                    biased;
                    taken = &mut storing => break taken,
                    () = runtime.stopped.cancelled() => {
                        if kept.is_none() {
                            // The last chance: room may have come free.
                            kept = to_spool.keep().await;
                        }
                        in_hand.give_up(kept);
                        return Finished::NotFound;
                    }
                    () = tokio::time::sleep(SPOOL_AGAIN), if kept.is_none() && runtime.spool.is_some() => {
                        kept = to_spool.keep().await;
                    }
                }
            };
            (kept, taken)
        }
    };
    let (job, number, outcome) = (attempt.job, attempt.number, verdict.outcome.as_str());
    match (taken, kept) {
        (Ok(Finished::NotFound), kept) => {
            attempt.miss();
            tracing::error!(%job, attempt = number, outcome, "an attempt ended whose job is not in the store any more");
            let worth_it = verdict.outcome == FinishOutcome::Succeeded;
            let kept = if kept.is_none() && worth_it { to_spool.keep().await } else { kept };
            if let Some(kept) = kept {
                kept.orphan().await;
            }
            Finished::NotFound
        }
        (Ok(finished), kept) => {
            if let Some(kept) = kept {
                kept.stored().await;
            }
            if let Finished::Won { version, .. } = finished {
                runtime.losses.remember(What::Ending, job, version, attempt.key_life);
            }
            finished
        }
        (Err(error), kept) => {
            tracing::error!(%job, attempt = number, outcome, %error, "a result cannot be stored");
            let kept = if kept.is_none() { to_spool.keep().await } else { kept };
            if let Some(kept) = kept {
                kept.leave();
            }
            Finished::NotFound
        }
    }
}

/// A verdict on its way into the spool: offered until it is there, and told once if it is refused.
struct ToSpool<'a> {
    runtime: &'a Inner,
    whose: &'a Whose,
    verdict: &'a Verdict,
    offer: Offer,
}

impl ToSpool<'_> {
    /// Writes it down, if there is a spool.
    async fn keep(&mut self) -> Option<Kept> {
        let spool = self.runtime.spool.as_ref()?;
        let offer = std::mem::replace(&mut self.offer, Offer::Again);
        spool.keep(&self.runtime.store.name(), self.whose, self.verdict, offer).await
    }
}

/// Stores a verdict, again and again until the store takes it or refuses it for good.
async fn store_until_taken(runtime: &Arc<Inner>, whose: &Whose, verdict: &Verdict) -> Result<Finished, StoreError> {
    let (mut held, mut first) = (None, None);
    let mut pause = STORE_PAUSE;
    loop {
        let offered = match offer(runtime, whose, verdict).await {
            Ok((finished, Durable::Yes)) => {
                if first.is_some() {
                    // Nobody was told yet.
                    runtime.waiters.wake(whose.job.identity());
                }
                // The call that changed something is the one that counts, unless what it wrote is lost.
                return Ok(match (first, finished) {
                    (Some(first), Finished::Repeated { .. }) => first,
                    (Some(Finished::Won { .. }), finished @ Finished::Won { .. }) => {
                        losses::lost(What::Ending, whose.job);
                        finished
                    }
                    (_, finished) => finished,
                });
            }
            Ok((finished, Durable::Short { have, want })) => {
                first.get_or_insert(finished);
                Err(StoreError::NotDurable { have, want })
            }
            Err(error) => Err(error),
        };
        match offered {
            Err(error) if error.is_retryable() || error.is_for_permission() => {
                let (job, attempt) = (whose.job, whose.number);
                // Once for each result, not for each try.
                if held.is_none() {
                    tracing::warn!(%job, attempt, %error, "a result is kept in hand until redis takes it");
                } else {
                    tracing::debug!(%job, attempt, %error, "a result is still kept in hand");
                }
                held.get_or_insert_with(Held::count);
            }
            refused => return refused,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(STORE_PAUSE_MAX);
    }
}

/// A result in hand: keeps a stopping gateway waiting until it is stored or in the spool.
struct InHand<'a> {
    runtime: &'a Inner,
    attempt: &'a Running,
    _hand: TaskTrackerToken,
}

impl<'a> InHand<'a> {
    fn take(runtime: &'a Inner, attempt: &'a Running) -> Self {
        attempt.in_hand.store(true, Ordering::Relaxed);
        InHand { runtime, attempt, _hand: runtime.hands.token() }
    }

    /// The gateway has stopped, and the store did not take it.
    fn give_up(self, kept: Option<Kept>) {
        let (job, attempt) = (self.attempt.job, self.attempt.number);
        let left = &self.runtime.left_in_hand;
        match kept {
            Some(kept) => {
                kept.leave();
                left.spooled.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%job, attempt, "stopped with a result that the store did not take; it is in the spool");
            }
            None => {
                left.lost.fetch_add(1, Ordering::Relaxed);
                tracing::error!(%job, attempt, "stopped with a result that the store did not take; it is lost");
            }
        }
    }
}

/// A result that the store was offered and has not taken.
struct Held;

impl Held {
    fn count() -> Self {
        metrics::result_held();
        Held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        metrics::result_let_go();
    }
}

pub(super) async fn try_store(runtime: &Arc<Inner>, whose: &Whose, verdict: &Verdict) -> Result<Finished, StoreError> {
    let (finished, durable) = offer(runtime, whose, verdict).await?;
    durable.settle(finished)
}

/// Offers a verdict to the store once. What may end its job must be durable; those who wait here are told only then.
async fn offer(runtime: &Arc<Inner>, whose: &Whose, verdict: &Verdict) -> Result<(Finished, Durable), StoreError> {
    let identity = whose.job.identity();
    let result = runtime.payload(identity, verdict.response.as_ref()).await?;
    failpoint!("finish.blob");
    let has_blobs = [&whose.input, &result.body].iter().any(|body| matches!(body, Body::Blob { .. }));
    let hold = if verdict.outcome == FinishOutcome::Succeeded { runtime.waiters.hold(identity) } else { None };
    let tell = if hold.is_some() { Tell::Record } else { Tell::Nothing };
    let finish = FinishAttempt {
        job: whose.job,
        number: whose.number,
        token: whose.token,
        outcome: verdict.outcome,
        result: &result,
        reason: &verdict.reason,
        remote_id: &verdict.remote_id,
        model: &verdict.model,
        follow: verdict.follow,
        // Until the blobs of an ended job are seen to, the hint must stand, or nobody would look at the job again.
        hint_ms: whose.hint_ms.filter(|_| !has_blobs),
        strip_at_ms: whose.strip_at_ms(&runtime.store),
        tell,
    };
    let (mut finished, durable) = match verdict.outcome {
        FinishOutcome::Succeeded | FinishOutcome::Failed => runtime.store.committing().finish_told(&finish).await?,
        FinishOutcome::Unknown | FinishOutcome::Aborted => runtime.store.finish_told(&finish).await?,
    };
    failpoint!("finish.recorded");
    let ends = match finished {
        Finished::Won { .. } => has_blobs,
        Finished::Recorded { job } => job.is_ended(),
        Finished::Repeated { .. } | Finished::Discarded { .. } | Finished::NotFound => false,
    };
    if ends {
        settle_ended(runtime, whose, &result.body).await;
    }
    if let Finished::Won { job, .. } = &mut finished
        && let Some(job) = job.take()
        && durable == Durable::Yes
    {
        runtime.waiters.tell(Arc::new(*job));
    }
    drop(hold);
    Ok((finished, durable))
}

/// After the attempt has ended its job: its bytes are kept as long as they can be asked for, and then its hint is not needed any more.
async fn settle_ended(runtime: &Inner, whose: &Whose, result: &Body) {
    let identity = whose.job.identity();
    let bodies = [&whose.input, result];
    if let Err(error) = runtime.store.keep_blobs(identity, &bodies, Keep::For(whose.bytes_life)).await {
        tracing::warn!(job = %whose.job, %error, "the blobs of an ended job are left to the sweeper");
        return;
    }
    if let Some(at_ms) = whose.hint_ms {
        let strip_at_ms = whose.strip_at_ms(&runtime.store).unwrap_or(0);
        // Left standing it would only cost the sweeper a look.
        let _ = runtime.store.move_due(Hint { identity, at_ms }, strip_at_ms).await;
    }
}

/// Counts what a result cost that nobody gets, if its provider says so.
pub(super) fn count_cost(lane: &Lane, job: JobId, attempt: u32, response: &Response) {
    let provider = &lane.slot.name;
    if let Some(cost) = lane.slot.provider.cost(response) {
        metrics::discarded_cost(provider, cost);
        tracing::warn!(%job, attempt, provider, cost, "what a discarded success cost");
    }
}

/// The attempt that was finished, for the log.
pub(super) struct About<'a> {
    pub(super) job: JobId,
    pub(super) attempt: u32,
    /// `None` where whoever finishes it does not know.
    pub(super) provider: Option<&'a str>,
}

/// Counts what a finish led to, and names a success that came to nothing: it may have been paid for.
pub(super) fn count_finish(finished: &Finished, outcome: FinishOutcome, about: About<'_>) {
    match finished {
        Finished::Won { was, .. } => {
            metrics::result("won");
            if *was != AttemptState::Running && *was != AttemptState::Starting {
                metrics::late_result();
            }
            metrics::job_ended(JobState::Succeeded.as_str());
        }
        Finished::Discarded { attempt: AttemptState::Discarded, .. } if outcome == FinishOutcome::Succeeded => {
            metrics::result("discarded");
            metrics::late_result();
            let About { job, attempt, provider } = about;
            tracing::warn!(%job, attempt, provider, "a success is discarded: its job had ended");
        }
        Finished::Recorded { job } if job.is_ended() => metrics::job_ended(job.as_str()),
        Finished::Recorded { .. } | Finished::Repeated { .. } | Finished::Discarded { .. } | Finished::NotFound => {}
    }
}
