//! Going on with a job that nobody holds: another gateway's, or one whose moment has come.

use std::sync::Arc;
use std::time::Instant;

use crate::attempt::{AttemptToken, FinishOutcome};
use crate::error::StoreError;
use crate::failpoint::failpoint;
use crate::job::{JobId, Payload};
use crate::metrics;
use crate::policy::{self, Effects, Next, Open, Try};
use crate::provider::{Fence, Rendered, Request, boottime_ms};
use crate::runtime::attempts::{
    Room, Running, STORE_PAUSE, STORE_PAUSE_MAX, Work, drive, give_back, lane_of, settle_beginning, unconfirmed,
};
use crate::runtime::certificates::{self, Grant};
use crate::runtime::{Inner, Lane, Route, millis, protection, sweeper, verdict};
use crate::store::{Begin, BeginAttempt, Begun, Durability, Marked, WriteAhead};

/// A pending job that nobody holds, as its record has it.
pub(crate) struct Found {
    pub(crate) job: JobId,
    pub(crate) input: Payload,
    pub(crate) route: Arc<Route>,
    pub(crate) tries: Vec<Try>,
    pub(crate) deadline: Option<Instant>,
}

/// Goes on with a job that nobody holds.
///
/// Whoever held it may have died of it. So the slot is taken before anything is done with its input: an attempt that was `starting`
/// when its lease lapsed is counted, and after a few the scripts end the job instead of the next gateway.
pub(crate) async fn adopt(runtime: Arc<Inner>, found: Found, place: usize, room: Room) {
    let Some(lane) = lane_of(&runtime, &found.route, place) else { return };
    if let Some(reason) = keeps_it_from_being_durable(&runtime, &found).await {
        protection::put_off(&runtime, found.job, None, runtime.options.lease / 2, &reason).await;
        return;
    }
    let began = Instant::now();
    let (token, lease_from_ms) = (AttemptToken::random(), boottime_ms());
    let hint_ms = runtime.store.now_ms() + runtime.lease_ms();
    let begin = BeginAttempt {
        job: found.job,
        token,
        holder: None,
        lease_ms: runtime.lease_ms(),
        hint_ms,
        gateway: &runtime.gateway,
        begin: Begin::Starting { provider: &lane.slot.name },
    };
    let number = match runtime.store.begin_attempt(&begin).await {
        Ok(Begun::Started { number, .. }) => number,
        Ok(refused) => {
            tracing::debug!(job = %found.job, ?refused, "no attempt began");
            return;
        }
        Err(error @ (StoreError::Ambiguous { .. } | StoreError::NotDurable { .. })) => {
            tracing::warn!(job = %found.job, %error, "a beginning is not confirmed; it is not sent");
            return settle_beginning(&runtime, &begin, &error).await;
        }
        Err(error) => {
            tracing::warn!(job = %found.job, %error, "no attempt began; the sweeper will go on");
            return;
        }
    };
    failpoint!("adopt.made");
    metrics::adoption();
    let slot = Slot { job: found.job, number, token, fence: Fence::until(runtime.fence_ms(lease_from_ms)) };
    // Where the gate keeps it from here, it goes on as if nobody had thought of going here.
    let without = found.route.plan.after(&found.tries, None, None, &Open::first(found.route.providers.len()));
    let (work, rendered, grant) = match prepare(&runtime, found, &lane, &slot).await {
        Ok(prepared) => prepared,
        Err(reason) => {
            tracing::warn!(job = %slot.job, provider = lane.slot.name, reason, "an adopted job cannot be sent");
            let delay_ms = match without {
                Next::Begin { delay, .. } if reason.starts_with(policy::DENIED) => millis(delay),
                // Not at once: it would fare no better here, and another gateway may know more.
                Next::Begin { .. } | Next::End(_) => runtime.lease_ms(),
            };
            give_back_surely(&runtime, &slot, &reason, delay_ms).await;
            sweeper::look_soon(Arc::clone(&runtime), slot.job.identity()).await;
            return;
        }
    };
    failpoint!("adopt.marked");
    let attempt = Running::new(&runtime, &work, lane, (number, token), grant, lease_from_ms, Some(hint_ms));
    drive(runtime, work, attempt, rendered, room, began).await;
}

/// Whether too few would have a write-ahead now. Each attempt that is begun in vain would be one less for the time when they are back.
async fn keeps_it_from_being_durable(runtime: &Inner, found: &Found) -> Option<String> {
    if runtime.store.durability() == Durability::Memory || found.route.effects == Effects::Pure {
        return None;
    }
    match runtime.ahead(&found.route).read_job(found.job.identity()).await {
        Err(error @ StoreError::NotDurable { .. }) => Some(unconfirmed(&error, "")),
        // Whatever else is wrong, the beginning will meet it.
        Ok(_) | Err(_) => None,
    }
}

/// The slot that an adopted job's attempt has, before there is anything to send.
struct Slot {
    job: JobId,
    number: u32,
    token: AttemptToken,
    fence: Fence,
}

/// Reads and renders what an adopted job asks for, and writes ahead. An error is the reason why nothing will be sent.
async fn prepare(runtime: &Inner, found: Found, lane: &Lane, slot: &Slot) -> Result<(Work, Rendered, Grant), String> {
    let Found { job, input, route, tries, deadline } = found;
    let read = || runtime.store.body(job.identity(), &input.body);
    let body = while_ours(slot, read).await?.map_err(|error| format!("input: {error}"))?;
    let request = Request::from_head(&input.head, body);
    failpoint!("adopt.render");
    let rendered = lane.slot.provider.render(&request).map_err(|error| format!("unrenderable: {error}"))?;
    let hash = rendered.hash();
    let place = route.providers.iter().position(|name| *name == lane.slot.name).unwrap_or_default();
    let grant = certificates::permit(runtime, &route, job, place, &rendered).await?;
    let sent = WriteAhead { url: &rendered.url, request_hash: &hash, certificate: &grant.certificate };
    let ahead = runtime.ahead(&route);
    let mark = || ahead.mark_running(job, slot.number, slot.token, sent);
    match while_ours(slot, mark).await? {
        Ok(Marked::Running { .. } | Marked::Repeated { .. }) => {}
        Ok(Marked::Fenced { why }) => return Err(format!("fenced: {why}")),
        Ok(Marked::NotFound) => return Err("fenced: the job is not there any more".to_owned()),
        Err(error) => return Err(unconfirmed(&error, &format!("write-ahead: {error}"))),
    }
    let (request, input) = (Arc::new(request), input.body);
    let work = Work { job, route, request, input, traceparent: None, tries, deadline, hint_ms: None };
    Ok((work, rendered, grant))
}

/// Makes a call to the store, and the same call again while Redis is away and the slot is ours; an error is why it is not any more.
async fn while_ours<T, F>(slot: &Slot, mut call: impl FnMut() -> F) -> Result<Result<T, StoreError>, String>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut pause = STORE_PAUSE;
    loop {
        let error = match call().await {
            Err(error) if error.is_retryable() => error,
            done => return Ok(done),
        };
        tracing::debug!(job = %slot.job, %error, "an adopted job waits for redis");
        if slot.fence.lease().is_err() {
            return Err(unconfirmed(&error, "fenced: the lease ran out while redis was away"));
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(STORE_PAUSE_MAX);
    }
}

/// Gives a slot back, again and again for a lease: one that is not would count as a gateway that died of its job.
async fn give_back_surely(runtime: &Arc<Inner>, slot: &Slot, reason: &str, delay_ms: u64) {
    let until = Instant::now() + runtime.options.lease;
    let mut pause = STORE_PAUSE;
    while Instant::now() < until && !runtime.stopped.is_cancelled() {
        match give_back(runtime, slot.job, slot.number, slot.token, reason, delay_ms).await {
            Err(error) if error.is_retryable() => tracing::debug!(job = %slot.job, %error, "a slot is not given back yet"),
            Ok(finished) => {
                let about = verdict::About { job: slot.job, attempt: slot.number, provider: None };
                return verdict::count_finish(&finished, FinishOutcome::Aborted, about);
            }
            Err(_) => return,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(STORE_PAUSE_MAX);
    }
}
