//! The sweeper: looks at jobs whose time has come, on whichever gateway gets there first.
//!
//! Correctness never depends on it: the scripts decide, a second look finds nothing to do, and a hint that is wrong costs one
//! look. Its work is bounded by [`DUE_MAX`] and [`UNKNOWN_PAGE`], whatever the number of jobs. What Redis refuses for good in one
//! place (a key of another type, a command that is not allowed) is told and passed over; it keeps nobody from the others.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt as _};

use crate::attempt::AttemptState;
use crate::error::StoreError;
use crate::failpoint::failpoint;
use crate::job::{Identity, Job, JobState, SHARDS};
use crate::metrics;
use crate::policy::{self, Next};
use crate::runtime::adopt::{self, Found};
use crate::runtime::protection::{self, Kept, Turn};
use crate::runtime::reconciler::{self, Wish};
use crate::runtime::{Inner, certificates, losses, millis};
use crate::store::{DueTurn, HasBlobs, Hint, Read, RedisKind, ScanPlace, Ticked};

/// Most due hints taken of one shard in one sweep.
const DUE_MAX: usize = 32;
/// How many shards are asked in one pipeline.
const SHARDS_AT_ONCE: usize = 16;
/// How many jobs are looked at side by side.
const LOOKS_AT_ONCE: usize = 16;
/// When to look again at a job that waits for nothing but somebody's knowledge.
const UNKNOWN_LOOK: Duration = Duration::from_secs(60);
/// Most unknown hints checked in one sweep.
const UNKNOWN_PAGE: usize = 32;
/// How often the gauges are set.
const GAUGES: Duration = Duration::from_secs(5);

/// What the sweeper remembers between two sweeps.
#[derive(Default)]
struct Progress {
    /// Where the slow scan for missing hints stands.
    scan: ScanPlace,
    /// Which shard of the unknown hints comes next, and from which place.
    unknown: (u8, usize),
    /// How many jobs were found that need a person: in this round of the unknown ones, and in the whole one before.
    need_operator: (u64, u64),
    gauges_at: Option<Instant>,
}

/// What one sweep passed over: the first of what Redis refused for good.
#[derive(Default)]
struct PassedOver {
    refused: Option<StoreError>,
    /// Whether others may serve where one does not: a master of several is away.
    in_part: bool,
}

impl PassedOver {
    /// The value, or `None` where it was refused for good, or a master of several is away. What else may fare better later ends the
    /// sweep.
    fn over<T>(&mut self, result: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error @ StoreError::Fatal { .. }) => {
                self.refused.get_or_insert(error);
                Ok(None)
            }
            Err(error) if self.in_part => {
                tracing::debug!(%error, "a sweep passes something over until the next one");
                Ok(None)
            }
            Err(error @ (StoreError::NotExecuted { .. } | StoreError::Ambiguous { .. } | StoreError::NotDurable { .. })) => {
                Err(error)
            }
        }
    }
}

pub(crate) async fn run(runtime: Arc<Inner>) {
    let mut progress = Progress::default();
    let mut turn: u32 = 0;
    let mut told = None;
    loop {
        // Gateways that were started together must not sweep together.
        let jitter = runtime.options.sweep.mul_f64(f64::from(random_byte()) / 512.0);
        tokio::select! {
            () = runtime.stopped.cancelled() => return,
            () = tokio::time::sleep(runtime.options.sweep.mul_f64(0.75) + jitter) => {}
        }
        turn = turn.wrapping_add(1);
        match sweep(&runtime, &mut progress).await {
            Ok(PassedOver { refused, .. }) => {
                // Once, not at every sweep.
                if let Some(error) = refused.as_ref().filter(|_| told != refused) {
                    tracing::error!(%error, "sweeps pass something over that needs a person");
                }
                told = refused;
            }
            Err(error) => tracing::debug!(%error, turn, "a sweep was cut short"),
        }
    }
}

fn random_byte() -> u8 {
    uuid::Uuid::new_v4().as_bytes()[0]
}

async fn sweep(runtime: &Arc<Inner>, progress: &mut Progress) -> Result<PassedOver, StoreError> {
    let mut passed = PassedOver { in_part: matches!(runtime.store.kind(), RedisKind::Cluster { .. }), ..PassedOver::default() };
    runtime.store.synchronize_clock().await?;
    passed.over(runtime.store.check_newcomers().await)?;
    passed.over(losses::look(runtime).await)?;
    if progress.gauges_at.is_none_or(|at| at.elapsed() >= GAUGES) {
        passed.over(set_gauges(runtime).await)?;
        progress.gauges_at = Some(Instant::now());
    }
    let first = random_byte() % SHARDS;
    let shards: Vec<u8> = (0..SHARDS).map(|step| (first + step) % SHARDS).collect();
    for some in shards.chunks(SHARDS_AT_ONCE) {
        let turn = match passed.over(runtime.store.take_turns(some, DUE_MAX).await)? {
            Some(turn) => turn,
            None => turns_one_by_one(runtime, some, &mut passed).await?,
        };
        stream::iter(turn.hints.iter().copied())
            .for_each_concurrent(LOOKS_AT_ONCE, |hint| async move {
                if let Err(error) = look_after(runtime, hint.identity, Some(hint)).await {
                    look_failed(runtime, hint, &error).await;
                }
            })
            .await;
        passed.over(runtime.store.give_turns_back(turn).await)?;
        if runtime.stopped.is_cancelled() {
            return Ok(passed);
        }
    }
    if passed.over(check_unknown(runtime, progress).await)?.is_none() {
        progress.unknown = ((progress.unknown.0 + 1) % SHARDS, 0);
    }
    let (scan, repaired) = passed.over(runtime.store.repair_hints(progress.scan).await)?.unwrap_or((progress.scan, 0));
    progress.scan = scan;
    if repaired > 0 {
        tracing::warn!(jobs = repaired, "open jobs had no hint; repaired");
        metrics::swept("hint_repaired", repaired);
    }
    Ok(passed)
}

/// A look did not succeed. One that never will is put off, or [`DUE_MAX`] of them would be all that is seen of their shard.
async fn look_failed(runtime: &Inner, hint: Hint, error: &StoreError) {
    let identity = hint.identity;
    if error.is_retryable() {
        tracing::debug!(%identity, %error, "a look at a job failed; again at the next sweep");
        return;
    }
    tracing::error!(%identity, %error, "a job cannot be looked at and needs a person");
    let later = runtime.store.now_ms() + runtime.lease_ms();
    if let Err(error) = runtime.store.move_due(hint, later).await {
        tracing::debug!(%identity, %error, "its hint stays where it is");
    }
}

/// Takes turns at shards, each on its own: one of them is refused.
async fn turns_one_by_one(runtime: &Inner, shards: &[u8], passed: &mut PassedOver) -> Result<DueTurn, StoreError> {
    let mut turn = DueTurn::default();
    for shard in shards {
        turn.add(passed.over(runtime.store.take_turns(&[*shard], DUE_MAX).await)?.unwrap_or_default());
    }
    Ok(turn)
}

/// Looks at a job without being led there by a hint; a look that fails is left to the next sweep.
///
/// Boxed: a look may adopt a job, and an adopted job's attempt may end with a look.
pub(crate) fn look_soon(runtime: Arc<Inner>, identity: Identity) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        if let Err(error) = look_after(&runtime, identity, None).await {
            tracing::debug!(%identity, %error, "left to the sweeper");
        }
    })
}

/// Looks at one job: lets time act on it, goes on with it if it is pending, and puts its hints right.
///
/// `hint` is the due hint that led here, if one did.
pub(crate) async fn look_after(runtime: &Arc<Inner>, identity: Identity, hint: Option<Hint>) -> Result<(), StoreError> {
    let store = &runtime.store;
    let (id, state, due_ms, blobs, open, changes) = match store.tick_job(identity).await? {
        Ticked::Job { id, state, due_ms, blobs, open, changes } => (id, state, due_ms, blobs, open, changes),
        Ticked::NotFound => {
            // A hint is due a lease after it was written: a record that is absent now will not come any more.
            if let Some(hint) = hint {
                store.move_due(hint, 0).await?;
                metrics::swept("hint_dropped", 1);
            }
            return Ok(());
        }
    };
    failpoint!("tick.made");
    for change in &changes {
        match change.as_str() {
            "aborted" => metrics::swept("aborted", 1),
            "poisoned" => {
                metrics::swept("poisoned", 1);
                tracing::error!(job = %id, "a job took gateway after gateway with it before anything was sent: it has failed");
            }
            "unknown" => {
                metrics::swept("unknown", 1);
                tracing::warn!(job = %id, "the lease of a running attempt lapsed: it is unknown");
            }
            "deadline" => metrics::swept("deadline", 1),
            "stripped" => metrics::swept("stripped", 1),
            _ => {}
        }
    }
    if !changes.is_empty() {
        store.announce_now(identity).await?;
        runtime.waiters.wake(identity);
        if state.is_ended() && changes.iter().any(|change| change != "stripped") {
            metrics::job_ended(state.as_str());
        }
    }
    let now_ms = store.now_ms();
    let tells_more = blobs == HasBlobs::Yes
        || match state {
            JobState::Pending | JobState::Unknown | JobState::Canceling => true,
            // One of a race may be unknown beside the one that runs.
            JobState::Running => open > 1,
            JobState::Succeeded | JobState::Failed | JobState::Canceled | JobState::Indeterminate => open > 0,
        };
    let job = if tells_more { read(runtime, identity).await? } else { None };
    let unknown = |job: &Job| !job.is_ended() && has_unknown(job);
    if state == JobState::Unknown || job.as_deref().is_some_and(unknown) {
        store.note_unknown(identity, now_ms).await?;
    }
    if let Some(job) = job.as_ref().filter(|_| blobs == HasBlobs::Yes) {
        store.keep_blobs_of(job).await?;
    }
    let wish = match job.as_deref() {
        Some(job) if open > 0 => reconciler::consider(runtime, job).await?,
        Some(_) | None => Wish::Nothing,
    };
    let look_ms = match state {
        JobState::Succeeded | JobState::Failed | JobState::Canceled | JobState::Indeterminate => {
            if let Some(unknown) = store.unknown_hint(identity).await? {
                store.drop_unknown(unknown).await?;
            }
            due_ms
        }
        JobState::Pending if due_ms <= now_ms => match job {
            Some(job) => adopt(runtime, &job).await?,
            None => now_ms,
        },
        JobState::Pending | JobState::Running if due_ms > 0 => due_ms,
        JobState::Pending | JobState::Running | JobState::Unknown | JobState::Canceling => {
            let look = now_ms + millis(UNKNOWN_LOOK);
            if due_ms > now_ms { look.min(due_ms) } else { look }
        }
    };
    let look_ms = match wish.look_ms() {
        Some(wished_ms) if look_ms == 0 => wished_ms,
        Some(wished_ms) => look_ms.min(wished_ms),
        None => look_ms,
    };
    match hint {
        Some(hint) => {
            store.move_due(hint, look_ms).await?;
            if look_ms == 0 {
                metrics::swept("hint_dropped", 1);
            }
        }
        None if look_ms > 0 => store.note_due(identity, look_ms).await?,
        None => {}
    }
    if let Wish::Ask(_, ask) = wish {
        reconciler::begin(runtime, ask);
    }
    Ok(())
}

fn has_unknown(job: &Job) -> bool {
    job.attempts.iter().any(|attempt| attempt.state == AttemptState::Unknown)
}

async fn read(runtime: &Inner, identity: Identity) -> Result<Option<Box<Job>>, StoreError> {
    match runtime.store.read_job(identity).await? {
        Read::Found(job) => Ok(Some(job)),
        Read::Gone(_) | Read::NotFound => Ok(None),
    }
}

/// Goes on with a pending job that nobody holds. Returns when to look at it again.
async fn adopt(runtime: &Arc<Inner>, job: &Job) -> Result<u64, StoreError> {
    let now_ms = runtime.store.now_ms();
    let later = now_ms + millis(runtime.options.lease);
    if runtime.stopping.is_cancelled() {
        return Ok(now_ms);
    }
    let Some(route) = runtime.routes.get(&job.route) else {
        tracing::warn!(job = %job.id, route = job.route, "a pending job's route is not configured here; left to other gateways");
        return Ok(later);
    };
    if route.providers.is_empty() {
        // Its attempts come from outside.
        return Ok(later);
    }
    let tries = policy::tries_of(&job.attempts, job.version, |name| route.providers.iter().position(|provider| provider == name));
    let remaining = (job.deadline_ms > 0).then(|| Duration::from_millis(job.deadline_ms.saturating_sub(now_ms)));
    // The record says that another attempt may begin; the plan only says where.
    let open = certificates::open_unseen(runtime, route, job).await;
    let place = match route.plan.after(&tries, None, None, &open) {
        Next::Begin { provider, .. } => provider,
        Next::End(_) => tries.last().map_or(0, |last| last.provider),
    };
    let model = runtime.model_of_kept(route, job.id, &job.input.body).await;
    let (place, room) = match runtime.enter_now(route, place, (&model, &open), Turn::after(&tries)).await {
        Ok(entered) => entered,
        Err(Kept::Full) => return Ok(now_ms + millis(runtime.options.sweep)),
        Err(Kept::Refused(refusal)) => return Ok(protection::postpone(runtime, job.id, None, &refusal).await.max(now_ms)),
    };
    let found = Found {
        job: job.id,
        input: job.input.clone(),
        route: Arc::clone(route),
        tries,
        deadline: remaining.map(|remaining| Instant::now() + remaining),
    };
    runtime.work.spawn(adopt::adopt(Arc::clone(runtime), found, place, room));
    Ok(later)
}

/// Checks some of the unknown hints: a job that has no unknown attempt any more is taken from the list.
async fn check_unknown(runtime: &Inner, progress: &mut Progress) -> Result<(), StoreError> {
    let (shard, from) = progress.unknown;
    let page = runtime.store.unknown_page(shard, from, UNKNOWN_PAGE).await?;
    let mut kept = 0;
    for hint in &page {
        let job = read(runtime, hint.identity).await?;
        if job.as_ref().is_some_and(|job| has_unknown(job)) {
            kept += 1;
            progress.need_operator.0 += u64::from(job.is_some_and(|job| job.needs_operator()));
        } else {
            runtime.store.drop_unknown(*hint).await?;
            metrics::swept("hint_dropped", 1);
        }
    }
    progress.unknown = match page.len() {
        UNKNOWN_PAGE => (shard, from + kept),
        _ => ((shard + 1) % SHARDS, 0),
    };
    if progress.unknown == (0, 0) {
        progress.need_operator = (0, progress.need_operator.0);
    }
    let (so_far, before) = progress.need_operator;
    metrics::need_operator(so_far.max(before));
    Ok(())
}

async fn set_gauges(runtime: &Inner) -> Result<(), StoreError> {
    let counts = runtime.store.hint_counts().await?;
    metrics::jobs_open("open", counts.open);
    metrics::jobs_open("unknown", counts.unknown);
    let (canceling, running): (Vec<bool>, Vec<bool>) =
        runtime.running().values().map(|attempt| attempt.canceling.load(Ordering::Relaxed)).partition(|canceling| *canceling);
    metrics::jobs_open("running", running.len() as u64);
    metrics::jobs_open("canceling", canceling.len() as u64);
    metrics::jobs_open("pending", runtime.pending.load(Ordering::Relaxed) as u64);
    let age_ms = counts.unknown_since_ms.map_or(0, |since| runtime.store.now_ms().saturating_sub(since));
    metrics::oldest_unknown(Duration::from_millis(age_ms));
    Ok(())
}
