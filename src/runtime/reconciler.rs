//! What became of attempts that are unknown: asked of their providers, on a schedule, by one gateway at a time.
//!
//! In this order, and no further than needed: its status by the provider's own id, our key, and, where the provider does the work of
//! a key once, the same request again. An answer settles the attempt through `resolve_attempt`, as a person would; no answer changes
//! nothing, and an attempt that stays unknown for too long calls a person. Whoever is not wanted any more (its job was canceled, or
//! ended without it) is stopped at its provider first, where that can be asked.
//!
//! Nothing is remembered here: when to ask follows from the record and from the lease that the last question left standing
//! (`lua/extend_ask.lua`), so a gateway that dies while it asks costs a lease. That something *never happened* is the scripts' word:
//! they believe it only after the quarantine.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::Receiver;
use uuid::Uuid;

use crate::attempt::{Attempt, AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use crate::error::StoreError;
use crate::failpoint::failpoint;
use crate::job::{Identity, Job, JobState, Payload};
use crate::metrics;
use crate::policy::{self, FailoverOn, REPLAYS_MAX, Try};
use crate::provider::{
    Abilities, Call, CancelSemantics, Evidence, Fence, Outcome, ProviderFuture, Request, Telling, Told, boottime_ms,
};
use crate::runtime::certificates::{self, Seen};
use crate::runtime::{CheckResult, Decision, Inner, Lane, Route, Then, attempt_key, checks, millis, outside, verdict};
use crate::store::{
    AskExtended, AskTaken, FinishAttempt, Follow, NoteAttempt, NoteReply, Noted, NotedEvent, Read, Resolved, Tell, Word,
};

/// Who asks, in the events.
const ACTOR: &str = "onejob/reconcile";
/// Who abandons, in the events: nobody in person.
const POLICY: &str = "policy";
/// The longest that a question by id or key may take.
const QUESTION_MAX: Duration = Duration::from_secs(30);
/// Most jobs that this gateway asks about at once; the others are due again at the next sweep.
pub(super) const ASKS_MAX: usize = 64;
/// How long an attempt that its job ended without is asked about: for what it cost.
const PROBE_MAX: Duration = Duration::from_secs(600);

/// What can be asked of a provider about an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// By its own id.
    Status,
    /// By our key.
    Find,
    /// By sending the same again.
    Replay,
    /// To stop it.
    Cancel,
}

impl Question {
    fn as_str(self) -> &'static str {
        match self {
            Question::Status => "status",
            Question::Find => "find",
            Question::Replay => "replay",
            Question::Cancel => "cancel",
        }
    }
}

/// What the questions about an attempt came to.
enum Finding {
    /// How it ended.
    Settled(Question, Outcome),
    /// It was stopped, and that is final.
    Canceled(Question),
    /// The provider has never heard of it.
    NeverHeard(Question),
    /// Nobody knows yet.
    Open,
}

/// When to look at a job for the reconciler's sake.
pub(super) enum Wish {
    /// There is nothing to ask.
    Nothing,
    /// Then.
    At(u64),
    /// Then, and it is asked about now.
    Ask(u64, Ask),
}

impl Wish {
    /// When to look, Unix ms of Redis; `None` for never.
    pub(super) fn look_ms(&self) -> Option<u64> {
        match self {
            Wish::Nothing => None,
            Wish::At(at_ms) | Wish::Ask(at_ms, _) => Some(*at_ms),
        }
    }
}

/// The right to ask about a job.
pub(super) struct Ask {
    identity: Identity,
    token: AttemptToken,
    /// When it was asked for, by [`boottime_ms`].
    lease_from_ms: u64,
    _place: OwnedSemaphorePermit,
}

/// Says when a job must be looked at for the sake of its unknown attempts, and takes the right to ask if that is now.
///
/// # Errors
/// The store's: look again later.
pub(super) async fn consider(runtime: &Arc<Inner>, job: &Job) -> Result<Wish, StoreError> {
    let Some(route) = runtime.routes.get(&job.route) else { return Ok(Wish::Nothing) };
    let now_ms = runtime.store.now_ms();
    let Some(due_ms) = open_matters(runtime, route, job, now_ms).map(|matter| matter.due_ms).min() else {
        return Ok(Wish::Nothing);
    };
    if due_ms > now_ms {
        return Ok(Wish::At(due_ms));
    }
    let later = now_ms + millis(runtime.options.sweep).max(1);
    if runtime.stopping.is_cancelled() {
        return Ok(Wish::At(later));
    }
    let Ok(place) = Arc::clone(&runtime.asks).try_acquire_owned() else { return Ok(Wish::At(later)) };
    let (identity, token, lease_from_ms) = (job.id.identity(), AttemptToken::random(), boottime_ms());
    match runtime.store.take_ask(identity, token, runtime.lease_ms()).await? {
        AskTaken::Taken => {
            let ask = Ask { identity, token, lease_from_ms, _place: place };
            // If this gateway dies meanwhile, somebody looks when its lease is over.
            Ok(Wish::Ask(now_ms + runtime.lease_ms(), ask))
        }
        AskTaken::Standing { wait_ms } => Ok(Wish::At(now_ms + wait_ms.max(1))),
    }
}

/// An attempt that something is to be asked or decided about.
struct Matter<'a> {
    attempt: &'a Attempt,
    /// When the next question or decision is due, whatever was asked before; Unix ms of Redis.
    due_ms: u64,
    /// Moments at which something more will be known, Unix ms of Redis: a question must not be put off beyond the next.
    moments_ms: [u64; 4],
}

/// The attempts of a job that something is to be asked or decided about.
fn open_matters<'a>(runtime: &'a Inner, route: &'a Route, job: &'a Job, now_ms: u64) -> impl Iterator<Item = Matter<'a>> {
    job.attempts.iter().filter_map(move |attempt| matter(runtime, route, job, attempt, now_ms))
}

fn matter<'a>(runtime: &Inner, route: &Route, job: &Job, attempt: &'a Attempt, now_ms: u64) -> Option<Matter<'a>> {
    let unknown = match attempt.state {
        AttemptState::Unknown => true,
        // Its holder knows more than we could ask, unless it is to be stopped.
        AttemptState::Running if is_unwanted(job) => false,
        _ => return None,
    };
    if job.is_ended() && now_ms >= job.ended_ms + millis(PROBE_MAX) {
        return None;
    }
    let abilities = runtime.providers.get(&attempt.provider).map(|lane| lane.slot.provider.abilities()).unwrap_or_default();
    let by_id = abilities.status && !attempt.remote_id.is_empty();
    let can_be_asked = by_id || abilities.find || (abilities.replay.is_some() && !job.is_ended());
    let (reconcile, since_ms) = (&route.reconcile, attempt.ended_ms);
    let seen_ms = happened(job, attempt, Noted::CancelSeen);
    let settled_ms = seen_ms.filter(|_| abilities.status || abilities.find).map(|at| at + millis(abilities.settle));
    let (give_up_ms, abandon_ms) = match unknown && !job.is_ended() {
        true => (
            Some(since_ms + millis(reconcile.give_up)).filter(|_| happened(job, attempt, Noted::NeedsOperator).is_none()),
            reconcile.abandon_after.map(|after| since_ms + millis(after)),
        ),
        false => (None, None),
    };
    let stop_ms = stops(job, attempt, &abilities).then_some(0);
    let first_ms = (unknown && can_be_asked).then_some(since_ms + millis(reconcile.first));
    let due_ms = [stop_ms, first_ms, settled_ms, give_up_ms, abandon_ms].into_iter().flatten().min()?;
    let believed_ms = (unknown && can_be_asked).then_some(since_ms + job.rules.quarantine_ms);
    let moments_ms = [settled_ms, give_up_ms, abandon_ms, believed_ms].map(|moment| moment.unwrap_or(0));
    Some(Matter { attempt, due_ms, moments_ms })
}

/// Whether nobody wants the job's open attempts any more.
fn is_unwanted(job: &Job) -> bool {
    job.is_ended() || !job.canceled_by.is_empty()
}

/// Whether an attempt was unknown, and its result wanted, when it was written down that it would be sent again. From then on no word
/// of its holder opens the way for another attempt; a word that came before has opened it.
fn is_still_asked_for(noted: &NoteReply) -> bool {
    match noted {
        NoteReply::Noted { attempt, job } | NoteReply::Repeated { attempt, job } => {
            *attempt == AttemptState::Unknown && *job != JobState::Canceling && !job.is_ended()
        }
        NoteReply::NotFound => false,
    }
}

/// Whether the provider is yet to be asked to stop an attempt.
fn stops(job: &Job, attempt: &Attempt, abilities: &Abilities) -> bool {
    is_unwanted(job) && abilities.cancel != CancelSemantics::None && happened(job, attempt, Noted::CancelSent).is_none()
}

/// When something was noted of an attempt for the first time, Unix ms of Redis.
fn happened(job: &Job, attempt: &Attempt, event: Noted) -> Option<u64> {
    job.happened(attempt.number, event.as_str()).next()
}

/// Asks about a job, in a task of its own.
pub(super) fn begin(runtime: &Arc<Inner>, ask: Ask) {
    let runtime = Arc::clone(runtime);
    runtime.work.clone().spawn(async move {
        let (identity, token) = (ask.identity, ask.token);
        failpoint!("ask.taken");
        let asker = Asker { fence: Fence::until(runtime.fence_ms(ask.lease_from_ms)), runtime };
        let asked = tokio::select! {
            asked = asker.ask(identity) => asked,
            // Another gateway asks from here on.
            () = asker.keep(identity, token) => return,
            // Harmless: what is unknown stays so. The lease lapses.
            () = asker.runtime.stopping.cancelled() => return,
        };
        if let Err(error) = asked {
            return tracing::debug!(%identity, %error, "an unknown job is asked about again when the lease of this is over");
        }
        failpoint!("ask.answered");
        if let Err(error) = asker.leave(identity, token).await {
            tracing::debug!(%identity, %error, "the lease of a question lapses by itself");
        }
    });
}

/// Whoever has the right to ask about a job.
struct Asker {
    runtime: Arc<Inner>,
    /// Nothing is sent again once it is another's turn.
    fence: Fence,
}

impl Asker {
    /// Extends the lease until it is lost.
    async fn keep(&self, identity: Identity, token: AttemptToken) {
        let mut lost_at = Instant::now() + self.runtime.options.lease;
        loop {
            tokio::time::sleep(self.runtime.options.lease / 3).await;
            let lease_from_ms = boottime_ms();
            match self.runtime.store.extend_ask(identity, token, self.runtime.lease_ms()).await {
                Ok(AskExtended::Extended) => {
                    self.fence.extend(self.runtime.fence_ms(lease_from_ms));
                    lost_at = Instant::now() + self.runtime.options.lease;
                }
                Ok(AskExtended::Lost) => return,
                Err(_) if Instant::now() >= lost_at => return,
                Err(error) => tracing::debug!(%identity, %error, "the lease of a question was not extended"),
            }
        }
    }

    /// Asks about every attempt that needs it, one after another.
    async fn ask(&self, identity: Identity) -> Result<(), StoreError> {
        let Some(job) = self.read(identity).await? else { return Ok(()) };
        let Some(route) = self.runtime.routes.get(&job.route) else { return Ok(()) };
        let now_ms = self.runtime.store.now_ms();
        let numbers: Vec<u32> = open_matters(&self.runtime, route, &job, now_ms)
            .filter(|matter| matter.due_ms <= now_ms)
            .map(|matter| matter.attempt.number)
            .collect();
        for number in numbers {
            // The one before may have changed the job.
            let Some(job) = self.read(identity).await? else { return Ok(()) };
            let attempt = job.attempts.get(number as usize - 1);
            if let Some(attempt) = attempt.filter(|attempt| matter(&self.runtime, route, &job, attempt, now_ms).is_some()) {
                self.ask_about(route, &job, attempt).await?;
            }
        }
        Ok(())
    }

    async fn ask_about(&self, route: &Route, job: &Job, attempt: &Attempt) -> Result<(), StoreError> {
        let lane = self.runtime.providers.get(&attempt.provider);
        let found = match lane {
            Some(lane) => self.questions(lane, job, attempt).await?,
            None => Finding::Open,
        };
        failpoint!("ask.noted");
        if settle(&self.runtime, route, job, attempt, found).await? == Settled::Yes || attempt.state != AttemptState::Unknown {
            return Ok(());
        }
        self.run_out_of_patience(route, job, attempt).await
    }

    /// Puts the questions that can be put, until one is answered.
    async fn questions(&self, lane: &Arc<Lane>, job: &Job, attempt: &Attempt) -> Result<Finding, StoreError> {
        let provider = &lane.slot.provider;
        let abilities = provider.abilities();
        let sent = self.runtime.sent(job, attempt);
        if stops(job, attempt, &abilities) {
            let evidence = self.put(lane, Question::Cancel, provider.cancel(sent.clone())).await;
            if !matches!(evidence, Evidence::NoAnswer { .. }) {
                self.note(job, attempt, Noted::CancelSent, "the provider was asked to stop it").await?;
            }
            if let Some(found) = self.weigh(&abilities, job, attempt, Question::Cancel, evidence).await? {
                return Ok(found);
            }
        }
        let unknown = attempt.state == AttemptState::Unknown;
        if !unknown && happened(job, attempt, Noted::CancelSeen).is_none() {
            return Ok(Finding::Open);
        }
        let mut not_found = None;
        let by_id = abilities.status && !attempt.remote_id.is_empty();
        for (question, can) in [(Question::Status, by_id), (Question::Find, abilities.find)] {
            if !can {
                continue;
            }
            let asked = match question {
                Question::Find => provider.find(sent.clone()),
                Question::Status | Question::Replay | Question::Cancel => provider.status(sent.clone()),
            };
            let evidence = self.put(lane, question, asked).await;
            if evidence == Evidence::NotFound {
                not_found = Some(question);
            } else if let Some(found) = self.weigh(&abilities, job, attempt, question, evidence).await? {
                return Ok(found);
            }
        }
        if unknown && self.may_replay(lane, &abilities, job, attempt, not_found) {
            if let Some(found) = self.replay(lane, job, attempt).await? {
                return Ok(found);
            }
            // Whatever was not there before may be by now.
            not_found = None;
        }
        Ok(not_found.filter(|_| self.is_believable(&abilities, job, attempt)).map_or(Finding::Open, Finding::NeverHeard))
    }

    /// What an answer means; `None`: the next question, please.
    async fn weigh(
        &self,
        abilities: &Abilities,
        job: &Job,
        attempt: &Attempt,
        question: Question,
        evidence: Evidence,
    ) -> Result<Option<Finding>, StoreError> {
        Ok(match evidence {
            Evidence::Settled(outcome) => Some(Finding::Settled(question, outcome)),
            Evidence::StillRunning if question == Question::Cancel => None,
            Evidence::StillRunning => Some(Finding::Open),
            Evidence::Canceled => {
                let seen_ms = happened(job, attempt, Noted::CancelSeen);
                let is_final = match abilities.cancel {
                    CancelSemantics::None | CancelSemantics::Confirmed => true,
                    CancelSemantics::QueuedOnly if abilities.settle.is_zero() => true,
                    // It may still turn into a result; then that counts.
                    CancelSemantics::QueuedOnly | CancelSemantics::BestEffort => seen_ms.is_some_and(|at_ms| {
                        question != Question::Cancel && self.runtime.store.now_ms() >= at_ms + millis(abilities.settle)
                    }),
                };
                if is_final {
                    return Ok(Some(Finding::Canceled(question)));
                }
                if seen_ms.is_none() {
                    self.note(job, attempt, Noted::CancelSeen, "the provider says that it was stopped").await?;
                }
                Some(Finding::Open)
            }
            Evidence::NotFound | Evidence::Expired | Evidence::NoAnswer { .. } => None,
        })
    }

    /// Whether "never heard of it" can mean that it never happened.
    fn is_believable(&self, abilities: &Abilities, job: &Job, attempt: &Attempt) -> bool {
        let age = self.runtime.age(attempt);
        let remembered = abilities.retention.is_none_or(|retention| age < retention);
        // It was sent again since: that may be on its way as the first one was.
        let replayed_ms = job.happened(attempt.number, Noted::Replayed.as_str()).max();
        let quiet = replayed_ms.is_none_or(|at_ms| self.runtime.store.now_ms() >= at_ms + job.rules.quarantine_ms);
        // Who once had a name for it had heard of it.
        remembered && quiet && attempt.remote_id.is_empty()
    }

    fn may_replay(&self, lane: &Lane, abilities: &Abilities, job: &Job, attempt: &Attempt, not_found: Option<Question>) -> bool {
        let Some(window) = abilities.replay else { return false };
        let replays = job.happened(attempt.number, Noted::Replayed.as_str()).count();
        let past_deadline = job.deadline_ms > 0 && self.runtime.store.now_ms() >= job.deadline_ms;
        !is_unwanted(job)
            && self.runtime.age(attempt) + lane.slot.total <= window
            && replays < REPLAYS_MAX
            // It would not find out what happened, it would make it happen: too late.
            && !(past_deadline && not_found.is_some())
    }

    /// Sends the attempt again, with the same key and the same bytes. Only a complete success proves anything.
    async fn replay(&self, lane: &Arc<Lane>, job: &Job, attempt: &Attempt) -> Result<Option<Finding>, StoreError> {
        let body = self.runtime.store.body(job.id.identity(), &job.input.body).await?;
        let request = Request::from_head(&job.input.head, body);
        let rendered = match lane.slot.provider.render(&request) {
            Ok(rendered) if rendered.hash()[..] == attempt.request_hash[..] => rendered,
            Ok(_) | Err(_) => {
                tracing::debug!(job = %job.id, attempt = attempt.number, "it would not be the same bytes; it is not sent again");
                return Ok(None);
            }
        };
        let Some(_room) = self.runtime.try_room(lane) else { return Ok(None) };
        // It may be the first time that it arrives: what may not be sent there may not be sent there again.
        let Some(route) = self.runtime.routes.get(&job.route) else { return Ok(None) };
        let place = route.providers.iter().position(|name| *name == attempt.provider).unwrap_or_default();
        let Ok(grant) = certificates::permit(&self.runtime, route, job.id, place, &rendered).await else { return Ok(None) };
        // Before the first byte: whoever comes after us counts it.
        let replays = job.happened(attempt.number, Noted::Replayed.as_str()).count();
        let detail = format!("{} of at most {REPLAYS_MAX}, with the same key and the same bytes", replays + 1);
        let noted = self.note(job, attempt, Noted::Replayed, &detail).await?;
        if !is_still_asked_for(&noted) {
            tracing::debug!(job = %job.id, attempt = attempt.number, ?noted, "it is settled meanwhile; it is not sent again");
            return Ok(None);
        }
        let (telling, heard) = Telling::channel();
        let call = Call {
            rendered,
            job_id: Some(job.id),
            attempt: attempt.number,
            idempotency_key: attempt_key(job.id, attempt.number),
            traceparent: None,
            fence: grant.fence(self.fence.clone()),
            deadline: Instant::now() + lane.slot.total,
            told: telling,
        };
        let bound = lane.slot.total + Duration::from_secs(1);
        let sending = tokio::time::timeout(bound, AssertUnwindSafe(lane.slot.provider.replay(call)).catch_unwind());
        let (outcome, ()) = tokio::join!(sending, self.hear(job, attempt, heard));
        let outcome = match outcome {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Outcome::Unknown { reason: "panic: the adapter panicked".to_owned() },
            Err(_) => Outcome::Unknown { reason: "timeout: the adapter did not keep its deadline".to_owned() },
        };
        let evidence = match outcome {
            Outcome::Succeeded { .. } => Evidence::Settled(outcome),
            Outcome::NotSent { reason }
            | Outcome::Rejected { reason, .. }
            | Outcome::InvalidOutput { reason }
            | Outcome::Unknown { reason } => Evidence::NoAnswer { reason },
        };
        self.count(lane, Question::Replay, &evidence);
        Ok(match evidence {
            Evidence::Settled(outcome) => Some(Finding::Settled(Question::Replay, outcome)),
            _ => None,
        })
    }

    /// A provider that takes the replay on tells its own name for it: from then on it can be asked by that.
    async fn hear(&self, job: &Job, attempt: &Attempt, mut heard: Receiver<Told>) {
        while let Some(told) = heard.recv().await {
            match told {
                Told::Accepted { remote_id } if verdict::is_name(&remote_id) => {
                    let note = NoteAttempt { remote_id: &remote_id, ..nothing(job, attempt) };
                    if let Err(error) = self.runtime.store.note_attempt(&note).await {
                        tracing::debug!(job = %job.id, %error, "a provider's name for an attempt is not noted");
                    }
                }
                Told::Accepted { .. } | Told::Overdue { .. } | Told::Head { .. } | Told::Part(_) => {}
            }
        }
    }

    /// Puts one question. Whatever goes wrong with it is no answer.
    async fn put(&self, lane: &Lane, question: Question, asked: ProviderFuture<'_, Evidence>) -> Evidence {
        let evidence = match tokio::time::timeout(QUESTION_MAX, AssertUnwindSafe(asked).catch_unwind()).await {
            Ok(Ok(evidence)) => evidence,
            Ok(Err(_)) => Evidence::NoAnswer { reason: "panic: the adapter panicked".to_owned() },
            Err(_) => Evidence::NoAnswer { reason: format!("timeout: no answer within {QUESTION_MAX:?}") },
        };
        self.count(lane, question, &evidence);
        evidence
    }

    fn count(&self, lane: &Lane, question: Question, evidence: &Evidence) {
        metrics::question(&lane.slot.name, question.as_str(), word_of(evidence));
        if let Evidence::NoAnswer { reason } = evidence {
            let provider = &lane.slot.name;
            tracing::debug!(provider, question = question.as_str(), reason, "a provider was asked and said nothing");
        }
    }

    /// Nothing settled it: time to abandon it, or to call a person?
    async fn run_out_of_patience(&self, route: &Route, job: &Job, attempt: &Attempt) -> Result<(), StoreError> {
        if job.is_ended() {
            return Ok(());
        }
        let now_ms = self.runtime.store.now_ms();
        let passed = |after: Duration| now_ms >= attempt.ended_ms + millis(after);
        if let Some(after) = route.reconcile.abandon_after.filter(|after| passed(*after)) {
            let (then, why) = follow(route, job, attempt, FailoverOn::NotSent, now_ms);
            let reason = format!("abandon_after: nobody knows after {}; doing it twice only costs{why}", shown(after));
            let decision = Decision {
                word: Word::Operator,
                actor: POLICY.to_owned(),
                ..decision(attempt, ResolveOutcome::Abandoned, reason, then)
            };
            resolve(&self.runtime, job, decision, attempt).await?;
            return Ok(());
        }
        let give_up = route.reconcile.give_up;
        if passed(give_up) && happened(job, attempt, Noted::NeedsOperator).is_none() {
            let detail = format!("unknown for longer than {}", shown(give_up));
            self.note(job, attempt, Noted::NeedsOperator, &detail).await?;
            let (number, provider, reason) = (attempt.number, &attempt.provider, &attempt.reason);
            tracing::warn!(job = %job.id, attempt = number, provider, reason, "an attempt needs an operator: {detail}");
        }
        Ok(())
    }

    async fn note(&self, job: &Job, attempt: &Attempt, event: Noted, detail: &str) -> Result<NoteReply, StoreError> {
        let note = NoteAttempt { event: Some(NotedEvent { event, actor: ACTOR, detail }), ..nothing(job, attempt) };
        self.runtime.store.note_attempt(&note).await
    }

    /// Leaves the lease standing until the next question is due, and asks for a look then.
    async fn leave(&self, identity: Identity, token: AttemptToken) -> Result<(), StoreError> {
        let store = &self.runtime.store;
        let pause_ms = match self.read(identity).await? {
            Some(job) => self.pause_ms(&job).unwrap_or(0),
            None => 0,
        };
        store.extend_ask(identity, token, pause_ms).await?;
        if pause_ms > 0 {
            store.note_due(identity, store.now_ms() + pause_ms).await?;
        }
        Ok(())
    }

    /// How long nobody needs to ask about a job; `None` if there is nothing to ask any more.
    fn pause_ms(&self, job: &Job) -> Option<u64> {
        let route = self.runtime.routes.get(&job.route)?;
        let now_ms = self.runtime.store.now_ms();
        let pause = |matter: Matter<'_>| {
            let since_ms = if matter.attempt.ended_ms > 0 { matter.attempt.ended_ms } else { job.updated_ms };
            let pause_ms = millis(route.reconcile.pause(Duration::from_millis(now_ms.saturating_sub(since_ms))));
            let ahead = matter.moments_ms.into_iter().filter(|moment| *moment > now_ms).map(|moment| moment - now_ms);
            ahead.chain([pause_ms]).min()
        };
        open_matters(&self.runtime, route, job, now_ms).filter_map(pause).min().map(|pause_ms| pause_ms.max(1))
    }

    async fn read(&self, identity: Identity) -> Result<Option<Box<Job>>, StoreError> {
        match self.runtime.store.read_job(identity).await? {
            Read::Found(job) => Ok(Some(job)),
            Read::Gone(_) | Read::NotFound => Ok(None),
        }
    }
}

/// Whether an attempt's fate was written down.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Settled {
    Yes,
    No,
}

/// Writes down what was found out about an attempt.
async fn settle(
    runtime: &Arc<Inner>,
    route: &Route,
    job: &Job,
    attempt: &Attempt,
    found: Finding,
) -> Result<Settled, StoreError> {
    let now_ms = runtime.store.now_ms();
    if attempt.state == AttemptState::Running {
        // Its holder will be told how it ended; only that it was stopped it may never hear.
        let Finding::Canceled(question) = found else { return Ok(Settled::No) };
        give_up_holding(runtime, job, attempt, question).await?;
        return settle_as(runtime, job, attempt, canceled(attempt, question)).await;
    }
    let mut seen = Seen::Nothing;
    let decision = match found {
        Finding::Open => return Ok(Settled::No),
        Finding::Canceled(question) => canceled(attempt, question),
        Finding::NeverHeard(question) => {
            let (then, why) = follow(route, job, attempt, FailoverOn::NotSent, now_ms);
            let reason = format!("{}: the provider has never heard of it{why}", question.as_str());
            // The scripts believe it after the quarantine, which a provider's own word would not wait for.
            Decision { word: Word::Operator, ..decision(attempt, ResolveOutcome::Failed, reason, then) }
        }
        Finding::Settled(question, outcome) => {
            let by = question.as_str();
            let outcome = verdict::fit(checks::checked_for(runtime, job, outcome).await?);
            seen = Seen::under(&attempt.certificate, &outcome);
            match outcome {
                Outcome::Succeeded { response, remote_id, model } => {
                    let (remote_id, model) = (remote_id.unwrap_or_default(), model.unwrap_or_default());
                    if !remote_id.is_empty() || !model.is_empty() {
                        let note = NoteAttempt { remote_id: &remote_id, model: &model, ..nothing(job, attempt) };
                        runtime.store.note_attempt(&note).await?;
                    }
                    let reason = format!("{by}: the provider did it, and this is its answer");
                    Decision { result: Some(response), ..decision(attempt, ResolveOutcome::Succeeded, reason, Then::End) }
                }
                Outcome::Rejected { reason, response, .. } => {
                    let status = response.status;
                    let (then, why) = follow(route, job, attempt, FailoverOn::Rejected { status }, now_ms);
                    let reason = format!("{} {status}: {reason}; by {by}{why}", policy::REJECTED);
                    Decision { result: Some(response), ..decision(attempt, ResolveOutcome::Failed, reason, then) }
                }
                Outcome::InvalidOutput { reason } => {
                    let (then, why) = follow(route, job, attempt, FailoverOn::InvalidOutput, now_ms);
                    let reason = format!("{}: {reason}; by {by}{why}", policy::INVALID_OUTPUT);
                    decision(attempt, ResolveOutcome::Failed, reason, then)
                }
                // No evidence of anything.
                Outcome::NotSent { .. } | Outcome::Unknown { .. } => return Ok(Settled::No),
            }
        }
    };
    let settled = settle_as(runtime, job, attempt, decision).await?;
    certificates::saw(runtime, route, &attempt.provider, &attempt.certificate, seen).await;
    Ok(settled)
}

async fn settle_as(runtime: &Arc<Inner>, job: &Job, attempt: &Attempt, decision: Decision) -> Result<Settled, StoreError> {
    match resolve(runtime, job, decision, attempt).await? {
        Resolved::Quarantine { .. } => Ok(Settled::No),
        // Whoever was faster knows as much.
        Resolved::NotUnknown { .. } | Resolved::NotFound => Ok(Settled::Yes),
        Resolved::Won { .. } | Resolved::Recorded { .. } | Resolved::Repeated { .. } | Resolved::Discarded { .. } => {
            Ok(Settled::Yes)
        }
    }
}

fn canceled(attempt: &Attempt, question: Question) -> Decision {
    let reason = format!("{}: the provider stopped it", question.as_str());
    decision(attempt, ResolveOutcome::Canceled, reason, Then::End)
}

/// The attempt of a gateway that waits for an answer which will not come: what is known of it is the provider's word alone.
async fn give_up_holding(runtime: &Arc<Inner>, job: &Job, attempt: &Attempt, question: Question) -> Result<(), StoreError> {
    let reason = format!("{}: the provider stopped it", question.as_str());
    let finish = FinishAttempt {
        job: job.id,
        number: attempt.number,
        token: attempt.token,
        outcome: FinishOutcome::Unknown,
        result: &Payload::default(),
        reason: &reason,
        remote_id: "",
        model: "",
        follow: Follow::End,
        hint_ms: None,
        strip_at_ms: None,
        tell: Tell::Nothing,
    };
    runtime.store.finish_attempt(&finish).await.map(drop)
}

async fn resolve(runtime: &Arc<Inner>, job: &Job, decision: Decision, attempt: &Attempt) -> Result<Resolved, StoreError> {
    let response = decision.result.clone();
    let outcome = decision.outcome;
    let resolved = outside::resolve(runtime, job.id, decision).await?;
    match &resolved {
        Resolved::Won { .. } | Resolved::Recorded { .. } => metrics::reconciled(outcome.as_str()),
        Resolved::Discarded { .. } => {
            metrics::reconciled("discarded");
            if let (Some(lane), Some(response)) = (runtime.providers.get(&attempt.provider), &response) {
                verdict::count_cost(lane, job.id, attempt.number, response);
            }
        }
        Resolved::Repeated { .. } | Resolved::Quarantine { .. } | Resolved::NotUnknown { .. } | Resolved::NotFound => {}
    }
    Ok(resolved)
}

fn decision(attempt: &Attempt, outcome: ResolveOutcome, reason: String, then: Then) -> Decision {
    Decision {
        number: attempt.number,
        request_id: Uuid::new_v4().to_string(),
        outcome,
        actor: ACTOR.to_owned(),
        reason,
        word: Word::Provider,
        result: None,
        then,
        // It was, before it became a decision.
        check: CheckResult::Unchecked,
    }
}

/// What may follow a failure that was found out later, and why nothing may, as the end of a reason.
fn follow(route: &Route, job: &Job, attempt: &Attempt, failure: FailoverOn, now_ms: u64) -> (Then, String) {
    let place = |name: &str| route.providers.iter().position(|provider| provider == name);
    let mut tries = policy::tries_of(&job.attempts, job.version, place);
    tries.push(Try { provider: place(&attempt.provider).unwrap_or(0), failure });
    let remaining = (job.deadline_ms > 0).then(|| Duration::from_millis(job.deadline_ms.saturating_sub(now_ms)));
    match route.plan.after_all(&tries, remaining) {
        Ok(()) => (Then::Retry, String::new()),
        Err(ending) => (Then::End, format!("; {ending}")),
    }
}

/// A note that says nothing yet.
fn nothing<'a>(job: &Job, attempt: &Attempt) -> NoteAttempt<'a> {
    NoteAttempt { job: job.id, number: attempt.number, token: attempt.token, remote_id: "", model: "", event: None }
}

fn shown(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

/// The word for an answer in metrics: a closed set.
fn word_of(evidence: &Evidence) -> &'static str {
    match evidence {
        Evidence::Settled(outcome) => match outcome {
            Outcome::Succeeded { .. } => "succeeded",
            Outcome::Rejected { .. } => "rejected",
            Outcome::InvalidOutput { .. } => "invalid_output",
            Outcome::NotSent { .. } | Outcome::Unknown { .. } => "no_answer",
        },
        Evidence::StillRunning => "running",
        Evidence::NotFound => "not_found",
        Evidence::Expired => "expired",
        Evidence::Canceled => "canceled",
        Evidence::NoAnswer { .. } => "no_answer",
    }
}
