//! Whether an input or an answer is as its route requires: before a claim, and before an answer can become a result.
//!
//! Whoever brings an answer, it comes through here before it is stored: a call of this gateway (in time or late), what a provider says
//! of an earlier attempt, an executor outside, an operator. What counts is what the judging gateway's configuration requires at that
//! moment. An answer that is not valid was given all the same: its attempt is `failed (invalid_output)`, and none of it is kept.
//!
//! A check takes time and memory with the size of what it checks: a large one runs beside the runtime, a few at once.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::error::StoreError;
use crate::job::Job;
use crate::metrics;
use crate::provider::{Outcome, Response};
use crate::runtime::{Inner, Route};
use crate::validate::{Answer, Fault, Invalid, Validator};

/// Up to so many bytes of input and answer together are checked on the spot: that is done in less than a millisecond.
const ON_THE_SPOT_BYTES_MAX: usize = 32 << 10;
/// Most large checks at once, in the whole process: each may take hundreds of megabytes while it runs.
const LARGE_CHECKS_MAX: usize = 4;

static LARGE_CHECKS: Semaphore = Semaphore::const_new(LARGE_CHECKS_MAX);

/// Checks a request's body.
pub(super) async fn check_input(route: &Route, input: &Arc<[u8]>) -> Result<(), Invalid> {
    let Some(validator) = &route.validator else { return Ok(()) };
    let (validator, body) = (Arc::clone(validator), Arc::clone(input));
    run(input.len(), move || validator.check_input(&body)).await
}

/// An outcome as it counts for the route: a success that is not valid is none.
pub(super) async fn checked(route: &Route, input: &Arc<[u8]>, outcome: Outcome) -> Outcome {
    let Outcome::Succeeded { response, remote_id, model } = outcome else { return outcome };
    match check_output(route, input, &response).await {
        Ok(()) => Outcome::Succeeded { response, remote_id, model },
        Err(invalid) => Outcome::InvalidOutput { reason: invalid.to_string() },
    }
}

/// What is wrong with an answer to a job, if somebody brings it who does not have the job's input in hand.
///
/// # Errors
/// The store's: the input cannot be read, so nothing can be said of the answer.
pub(super) async fn fault_of(runtime: &Inner, job: &Job, response: &Response) -> Result<Option<Invalid>, StoreError> {
    let Some(route) = runtime.routes.get(&job.route) else { return Ok(None) };
    if !is_for_outputs(route) {
        return Ok(None);
    }
    let input = runtime.store.body(job.id.identity(), &job.input.body).await?;
    Ok(check_output(route, &input, response).await.err())
}

/// An outcome as it counts for the job, if somebody brings it who does not have the job's input in hand: what a provider says of an
/// earlier attempt.
///
/// # Errors
/// The store's: ask again later, nothing is known of the outcome.
pub(super) async fn checked_for(runtime: &Inner, job: &Job, outcome: Outcome) -> Result<Outcome, StoreError> {
    let Outcome::Succeeded { response, remote_id, model } = outcome else { return Ok(outcome) };
    Ok(match fault_of(runtime, job, &response).await? {
        None => Outcome::Succeeded { response, remote_id, model },
        Some(invalid) => Outcome::InvalidOutput { reason: invalid.to_string() },
    })
}

/// Whether answers of any route are checked.
pub(super) fn any(runtime: &Inner) -> bool {
    runtime.routes.values().any(|route| is_for_outputs(route))
}

fn is_for_outputs(route: &Route) -> bool {
    route.validator.as_ref().is_some_and(|validator| validator.is_for_outputs())
}

async fn check_output(route: &Route, input: &Arc<[u8]>, response: &Response) -> Result<(), Invalid> {
    let Some(validator) = route.validator.as_ref().filter(|validator| validator.is_for_outputs()) else { return Ok(()) };
    let coding = response.headers.iter().find(|(name, value)| name == "content-encoding" && value != "identity");
    let coding = coding.map(|(_, coding)| coding.clone());
    let (validator, input, body) = (Arc::clone(validator), Arc::clone(input), Arc::clone(&response.body));
    let bytes = input.len() + body.len();
    let check = move || check_answer(&validator, &input, coding.as_deref(), &body);
    let checked = run(bytes, check).await;
    if checked.is_err() {
        metrics::output_invalid(&route.name);
    }
    checked
}

fn check_answer(validator: &Validator, input: &[u8], content_encoding: Option<&str>, body: &[u8]) -> Result<(), Invalid> {
    validator.check_output(input, Answer { content_encoding, body })
}

/// Runs a check where it disturbs nobody. One that panics has found nothing valid.
async fn run(bytes: usize, check: impl FnOnce() -> Result<(), Invalid> + Send + 'static) -> Result<(), Invalid> {
    let check = move || std::panic::catch_unwind(AssertUnwindSafe(check)).ok();
    let checked = if bytes <= ON_THE_SPOT_BYTES_MAX {
        check()
    } else {
        let _place = LARGE_CHECKS.acquire().await.expect("it is never closed");
        tokio::task::spawn_blocking(check).await.ok().flatten()
    };
    checked.unwrap_or_else(|| {
        tracing::error!("a check panicked; what it checked counts as invalid");
        Err(Invalid::of(Fault::broken()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_check_that_panics_finds_nothing_valid() {
        for bytes in [0, ON_THE_SPOT_BYTES_MAX + 1] {
            let invalid = run(bytes, || panic!("for the test")).await.unwrap_err();
            assert_eq!(invalid.to_string(), "check: it broke");
        }
    }

    #[tokio::test]
    async fn a_large_check_runs_beside_the_runtime() {
        let here = std::thread::current().id();
        for (bytes, expected_here) in [(ON_THE_SPOT_BYTES_MAX, true), (ON_THE_SPOT_BYTES_MAX + 1, false)] {
            let ran = run(bytes, move || {
                let fault = Fault::broken();
                if std::thread::current().id() == here { Ok(()) } else { Err(Invalid::of(fault)) }
            });
            assert_eq!(ran.await.is_ok(), expected_here, "{bytes}");
        }
    }
}
