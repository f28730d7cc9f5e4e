//! Attempts driven from outside: an executor that is not a provider of this process begins, marks, extends and finishes them, and
//! somebody who knows resolves what is unknown. Role `operate`.
//!
//! The same guards stand as for attempts from inside, because they stand in the scripts: what is refused here is refused there,
//! with a problem type for each reason. Losing a race is no refusal: a result that came too late is answered `discarded`. Every
//! call may be sent again: by the attempt's token, or by `Onejob-Request-Id`, onejob knows it and changes nothing twice.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, RawPathParams, State};
use axum::response::Response;
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use crate::config::Role;
use crate::error::StoreError;
use crate::job::{JobId, JobState};
use crate::provider;
use crate::runtime::{CheckResult, Decision, ReadError, Report, SettleError, Then};
use crate::server::App;
use crate::server::auth::{Caller, from_hex};
use crate::server::body::{self, is_json};
use crate::server::headers::RequestId;
use crate::server::jobs::{Empty, PathJob, check_text, job_ended, json};
use crate::server::problem::{Document, Kind, Problem, Refusals, SAME_REQUEST, whole_seconds};
use crate::store::{Begun, Canceling, Extended, Finished, Marked, Resolved, Word};

/// Shortest lease: below, it is over before the next call arrives.
const LEASE_MS_MIN: u64 = 100;
/// Longest lease: a job waits so long for an executor that died.
const LEASE_MS_MAX: u64 = 3_600_000;
/// Longest URL in bytes, as for attempts from inside.
const URL_BYTES_MAX: usize = 8 << 10;
/// Longest content type in bytes.
const CONTENT_TYPE_BYTES_MAX: usize = 256;
/// The statuses whose answers end with their head.
const BODILESS: [u16; 3] = [204, 205, 304];

/// A new attempt.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Begin)]
pub(crate) struct BeginBody {
    /// Who will do it: a name for people, 1 to 500 characters.
    provider: String,
    /// The attempt's token, a UUID that only its holder knows: sent again, the same token begins nothing twice. Left out: a new
    /// one.
    token: Option<String>,
    /// How long the attempt is its holder's without an extension, 100 ms to 1 h.
    lease_ms: u64,
}

/// An attempt that began.
#[derive(Serialize, ToSchema)]
#[schema(as = Begun)]
struct BeginDocument {
    /// `started`, or `repeated` for a token that began it before.
    status: &'static str,
    number: u32,
    /// The attempt's state now.
    state: &'static str,
    /// What makes it the caller's. It is told here and nowhere else.
    token: String,
    /// Until when it is the caller's; null if it no longer is.
    lease_until_ms: Option<u64>,
}

/// Begins an attempt: takes the job's one free slot. Nothing may be sent before it is marked as running.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/attempts", operation_id = "begin_attempt", tag = "attempts",
    request_body(content = inline(BeginBody), content_type = "application/json"),
    params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, description = "An earlier call with this token began it", body = inline(BeginDocument)),
        (status = 201, description = "The slot is this attempt's", body = inline(BeginDocument)),
        Refusals,
    ),
)]
pub(crate) async fn begin_attempt(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathJob(id): PathJob,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let expected = "{\"provider\": text, \"token\": UUID, \"lease_ms\": number}";
    let asked: BeginBody = read(&app, &caller, &headers, body, expected).await?;
    check_text("provider", &asked.provider, Empty::Refused)?;
    let lease = lease(asked.lease_ms)?;
    let token = match &asked.token {
        Some(text) => token(text)?,
        None => AttemptToken::random(),
    };
    let runtime = app.runtime.clone();
    let begun = app.detached(async move { runtime.begin_outside(id, token, &asked.provider, lease).await }).await?;
    let told = |status, number, state: AttemptState, lease_until_ms| BeginDocument {
        status,
        number,
        state: state.as_str(),
        token: token.reveal(),
        lease_until_ms,
    };
    match begun.map_err(|error| undecided(&error, id))? {
        Begun::Started { number, lease_until_ms } => {
            Ok(json(StatusCode::CREATED, &told("started", number, AttemptState::Starting, Some(lease_until_ms))))
        }
        Begun::Repeated { number, state } => {
            let job = app.runtime.read(id).await;
            let job = match job {
                Ok(job) => job,
                Err(ReadError::Gone(gone)) => return Err(Problem::gone(&gone)),
                Err(error @ (ReadError::NotFound | ReadError::TooManyWaiters { .. } | ReadError::Store(_))) => {
                    return Err(Problem::from(error));
                }
            };
            let lease_ms = job.attempts.iter().find(|attempt| attempt.number == number).map_or(0, |attempt| attempt.lease_ms);
            Ok(json(StatusCode::OK, &told("repeated", number, state, (lease_ms > 0).then_some(lease_ms))))
        }
        Begun::Blocked { by, number } => {
            let detail = format!("attempt {number} is {by}; no other begins before it is settled");
            Err(Problem::new(Kind::AttemptBlocked, detail).job(id).member("attempt", number).member("state", by.as_str()))
        }
        Begun::TooEarly { wait_ms } => {
            let detail = format!("another attempt may begin in {wait_ms} ms");
            let wait = Duration::from_millis(wait_ms);
            Err(Problem::new(Kind::AttemptTooEarly, detail).job(id).member("wait_ms", wait_ms).retry_after(wait))
        }
        Begun::Exhausted { attempts } => {
            let detail = format!("{attempts} attempts were made, and the route allows no more");
            Err(Problem::new(Kind::AttemptsExhausted, detail).job(id).member("attempts", attempts))
        }
        Begun::Deadline => Err(Problem::new(Kind::JobDeadline, "the job's deadline has passed").job(id)),
        Begun::Canceling => Err(Problem::new(Kind::JobCanceling, "somebody asked to cancel the job").job(id)),
        Begun::Ended { state } => Err(job_ended(id, state)),
        Begun::NotFound => Err(Problem::job_unknown()),
    }
}

/// What is about to be sent, and whose attempt it is.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Mark)]
pub(crate) struct MarkBody {
    /// The attempt's token.
    token: String,
    /// Where it is sent to, up to 8192 bytes.
    #[serde(default)]
    url: String,
    /// SHA-256 of what is sent, 64 hexadecimal digits.
    request_hash: Option<String>,
}

/// A lease that runs.
#[derive(Serialize, ToSchema)]
#[schema(as = Lease)]
struct LeaseDocument {
    /// `running`, `repeated` or `extended`.
    status: &'static str,
    /// Until when the attempt is the caller's.
    lease_until_ms: u64,
    /// For `extended`: whether somebody asked to cancel the job.
    #[serde(skip_serializing_if = "Option::is_none")]
    canceling: Option<bool>,
}

/// The write-ahead: from here on the provider may have been touched. Only after 200 may the first byte leave.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/attempts/{number}/running", operation_id = "mark_running", tag = "attempts",
    request_body(content = inline(MarkBody), content_type = "application/json"),
    params(("id" = String, Path, description = "The job's id"), ("number" = u32, Path, description = "The attempt's number")),
    responses(
        (status = 200, description = "Send", body = inline(LeaseDocument)),
        (status = "4XX", description = "Do not send", body = Document, content_type = "application/problem+json"),
        (status = "5XX", description = "Do not send before the same call has been answered",
         body = Document, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn mark_running(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathAttempt { id, number }: PathAttempt,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let expected = "{\"token\": UUID, \"url\": text, \"request_hash\": 64 hexadecimal digits}";
    let asked: MarkBody = read(&app, &caller, &headers, body, expected).await?;
    let token = token(&asked.token)?;
    if asked.url.len() > URL_BYTES_MAX {
        return Err(invalid(format!("url has {} bytes; the limit is {URL_BYTES_MAX}", asked.url.len())));
    }
    let hash = match &asked.request_hash {
        None => Vec::new(),
        Some(text) => from_hex(text).ok_or_else(|| invalid("request_hash is not 64 hexadecimal digits".to_owned()))?.to_vec(),
    };
    let runtime = app.runtime.clone();
    let marked = app.detached(async move { runtime.mark_outside(id, number, token, &asked.url, &hash).await }).await?;
    let told = |status, lease_until_ms| json(StatusCode::OK, &LeaseDocument { status, lease_until_ms, canceling: None });
    match marked.map_err(|error| undecided(&error, id))? {
        Marked::Running { lease_until_ms } => Ok(told("running", lease_until_ms)),
        Marked::Repeated { lease_until_ms } => Ok(told("repeated", lease_until_ms)),
        Marked::Fenced { why } => Err(fenced(id, number, &why)),
        Marked::NotFound => Err(Problem::job_unknown()),
    }
}

/// A heartbeat.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Extend)]
pub(crate) struct ExtendBody {
    /// The attempt's token.
    token: String,
    /// 1, 2, 3 …: one more for each new extension.
    sequence: u64,
    /// How long from now, 100 ms to 1 h.
    lease_ms: u64,
}

/// Extends an attempt's lease.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/attempts/{number}/lease", operation_id = "extend_lease", tag = "attempts",
    request_body(content = inline(ExtendBody), content_type = "application/json"),
    params(("id" = String, Path, description = "The job's id"), ("number" = u32, Path, description = "The attempt's number")),
    responses(
        (status = 200, description = "The lease runs on", body = inline(LeaseDocument)),
        (status = "4XX", description = "The attempt is no longer the caller's",
         body = Document, content_type = "application/problem+json"),
        (status = "5XX", description = "Not now", body = Document, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn extend_lease(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathAttempt { id, number }: PathAttempt,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let expected = "{\"token\": UUID, \"sequence\": number, \"lease_ms\": number}";
    let asked: ExtendBody = read(&app, &caller, &headers, body, expected).await?;
    let (token, lease) = (token(&asked.token)?, lease(asked.lease_ms)?);
    let runtime = app.runtime.clone();
    let extended = app.detached(async move { runtime.extend_outside(id, number, token, asked.sequence, lease).await }).await?;
    match extended.map_err(|error| undecided(&error, id))? {
        Extended::Extended { lease_until_ms, canceling } => {
            let canceling = Some(canceling == Canceling::Yes);
            Ok(json(StatusCode::OK, &LeaseDocument { status: "extended", lease_until_ms, canceling }))
        }
        Extended::Fenced { why } => Err(fenced(id, number, &why)),
        Extended::NotFound => Err(Problem::job_unknown()),
    }
}

/// How an attempt ended.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Finish)]
pub(crate) struct FinishBody {
    /// The attempt's token.
    token: String,
    /// `succeeded`, `failed` (definitely), `unknown` (it may have happened), `aborted` (nothing was sent).
    #[schema(value_type = String)]
    outcome: FinishOutcome,
    /// Of a success its result, of a failure the refusal: any JSON, kept as written; a string if `content_type` is not JSON's.
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// The result's type; `application/json` if left out.
    content_type: Option<String>,
    /// The result's HTTP status for a proxied request; 200, or 422 for a refusal.
    status: Option<u16>,
    /// Why it did not succeed, up to 500 characters; required then.
    #[serde(default)]
    reason: String,
    /// After a failure: `end` (default), the job fails with it; `retry`, another attempt may begin.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    then: After,
}

/// How an attempt, and its job, stand after a report or a decision.
#[derive(Serialize, ToSchema)]
#[schema(as = Settled)]
struct SettledDocument {
    /// `won`: this result is the job's. `recorded`: the attempt's row is as reported. `repeated`: an earlier call did the same.
    /// `discarded`: the job had ended, or the attempt was already judged; the result does not count.
    status: &'static str,
    /// For `won`: the job's version now.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u64>,
    /// The attempt's state now.
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<&'static str>,
    /// The job's state now.
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<&'static str>,
    /// The attempt whose result the job has.
    #[serde(skip_serializing_if = "Option::is_none")]
    completed_by: Option<u32>,
}

impl SettledDocument {
    fn new(status: &'static str) -> Self {
        SettledDocument { status, version: None, attempt: None, job: None, completed_by: None }
    }

    fn won(version: u64) -> Self {
        let (attempt, job) = (Some(AttemptState::Succeeded.as_str()), Some(JobState::Succeeded.as_str()));
        SettledDocument { version: Some(version), attempt, job, ..Self::new("won") }
    }

    fn recorded(job: JobState) -> Self {
        SettledDocument { job: Some(job.as_str()), ..Self::new("recorded") }
    }

    fn repeated(attempt: AttemptState, job: JobState, completed_by: u32) -> Self {
        let (attempt, job) = (Some(attempt.as_str()), Some(job.as_str()));
        SettledDocument { attempt, job, completed_by: whose(completed_by), ..Self::new("repeated") }
    }

    fn discarded(attempt: AttemptState, completed_by: u32) -> Self {
        SettledDocument { attempt: Some(attempt.as_str()), completed_by: whose(completed_by), ..Self::new("discarded") }
    }
}

fn whose(completed_by: u32) -> Option<u32> {
    (completed_by > 0).then_some(completed_by)
}

/// Records how an attempt ended. A success claims the job's result at most once.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/attempts/{number}/finish", operation_id = "finish_attempt", tag = "attempts",
    request_body(content = inline(FinishBody), content_type = "application/json"),
    params(("id" = String, Path, description = "The job's id"), ("number" = u32, Path, description = "The attempt's number")),
    responses(
        (status = 200, description = "Settled", body = inline(SettledDocument)),
        (status = "4XX", description = "Refused", body = Document, content_type = "application/problem+json"),
        (status = "5XX", description = "Keep the result and send the same request again",
         body = Document, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn finish_attempt(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathAttempt { id, number }: PathAttempt,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let expected = "{\"token\": UUID, \"outcome\": text, \"result\": any JSON, \"content_type\": text, \
        \"status\": number, \"reason\": text, \"then\": text}";
    let asked: FinishBody = read(&app, &caller, &headers, body, expected).await?;
    let token = token(&asked.token)?;
    let (empty, status) = match asked.outcome {
        FinishOutcome::Succeeded => (Empty::Allowed, Some(200)),
        FinishOutcome::Failed => (Empty::Refused, Some(422)),
        FinishOutcome::Unknown | FinishOutcome::Aborted => (Empty::Refused, None),
    };
    check_text("reason", &asked.reason, empty)?;
    let answer = Answer { result: asked.result, content_type: asked.content_type, status: asked.status };
    let result = match (asked.outcome, status) {
        (_, None) => answer.none()?,
        (FinishOutcome::Succeeded, Some(status)) => Some(answer.complete(status)?),
        (FinishOutcome::Failed | FinishOutcome::Unknown | FinishOutcome::Aborted, Some(status)) => answer.some(status)?,
    };
    let report = Report { outcome: asked.outcome, result, reason: asked.reason, then: asked.then.into() };
    let runtime = app.runtime.clone();
    let finished = app.detached(async move { runtime.finish_outside(id, number, token, report).await }).await?;
    let document = match finished.map_err(|error| undecided(&error, id))? {
        Finished::Won { version, .. } => SettledDocument::won(version),
        Finished::Recorded { job } => SettledDocument::recorded(job),
        Finished::Repeated { attempt, job, completed_by } => SettledDocument::repeated(attempt, job, completed_by),
        Finished::Discarded { attempt, completed_by } => SettledDocument::discarded(attempt, completed_by),
        Finished::NotFound => return Err(Problem::job_unknown()),
    };
    Ok(json(StatusCode::OK, &document))
}

/// What became of an unknown attempt, who says so and why.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Resolve)]
pub(crate) struct ResolveBody {
    /// `succeeded` (with the result), `failed` (it did not happen), `canceled` (it was stopped), `abandoned` (somebody takes the
    /// risk).
    #[schema(value_type = String)]
    outcome: ResolveOutcome,
    /// Why, 1 to 500 characters.
    reason: String,
    /// Who decides; the caller if left out.
    actor: Option<String>,
    /// Whose word it is: `provider`, believed at once; `operator` (default), "it did not happen" is believed only after the
    /// quarantine.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    word: Says,
    /// The result of a success: any JSON, kept as written; a string if `content_type` is not JSON's.
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// The result's type; `application/json` if left out.
    content_type: Option<String>,
    /// The result's HTTP status for a proxied request; 200 if left out.
    status: Option<u16>,
    /// `end` (default): the job ends with this. `retry`: another attempt may begin.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    then: After,
    /// The result is taken though it may not be as the route requires. Without: it must be, or nothing is decided.
    #[serde(default)]
    unchecked: bool,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum After {
    #[default]
    End,
    Retry,
}

impl From<After> for Then {
    fn from(after: After) -> Self {
        match after {
            After::End => Then::End,
            After::Retry => Then::Retry,
        }
    }
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Says {
    Provider,
    #[default]
    Operator,
}

/// Decides what became of an unknown attempt.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/attempts/{number}/resolve", operation_id = "resolve_attempt", tag = "operation",
    request_body(content = inline(ResolveBody), content_type = "application/json"),
    params(
        ("id" = String, Path, description = "The job's id"), ("number" = u32, Path, description = "The attempt's number"),
        ("Onejob-Request-Id" = Option<String>, Header, description = "Sent again, the same id decides nothing twice"),
    ),
    responses(
        (status = 200, description = "Settled", body = inline(SettledDocument)),
        (status = "4XX", description = "Refused", body = Document, content_type = "application/problem+json"),
        (status = "5XX", description = "Send the same request again", body = Document, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn resolve_attempt(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathAttempt { id, number }: PathAttempt,
    request_id: RequestId,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let expected = "{\"outcome\": text, \"reason\": text, \"actor\": text, \"word\": text, \"result\": any JSON, \
        \"content_type\": text, \"status\": number, \"then\": text, \"unchecked\": true or false}";
    let asked: ResolveBody = read(&app, &caller, &headers, body, expected).await?;
    check_text("reason", &asked.reason, Empty::Refused)?;
    let actor = asked.actor.unwrap_or_else(|| caller.owner.as_str().to_owned());
    check_text("actor", &actor, Empty::Refused)?;
    let answer = Answer { result: asked.result, content_type: asked.content_type, status: asked.status };
    let result = match asked.outcome {
        ResolveOutcome::Succeeded => Some(answer.complete(200)?),
        ResolveOutcome::Failed | ResolveOutcome::Canceled | ResolveOutcome::Abandoned => answer.none()?,
    };
    let decision = Decision {
        number,
        request_id: request_id.0.clone(),
        outcome: asked.outcome,
        actor,
        reason: asked.reason,
        word: match asked.word {
            Says::Provider => Word::Provider,
            Says::Operator => Word::Operator,
        },
        result,
        then: asked.then.into(),
        check: if asked.unchecked { CheckResult::Unchecked } else { CheckResult::Checked },
    };
    let runtime = app.runtime.clone();
    let resolved = app.detached(async move { runtime.resolve(id, decision).await }).await?;
    let resolved = resolved.map_err(|error| match error {
        SettleError::InvalidOutput(ref invalid) => {
            let detail = format!("{error}; nothing is decided. Correct it, or say that it is unchecked");
            Problem::new(Kind::OutputInvalid, detail).job(id).member("attempt", number).faults(invalid)
        }
        SettleError::Store(error) => undecided(&error, id),
    })?;
    let document = match resolved {
        Resolved::Won { version } => SettledDocument::won(version),
        Resolved::Recorded { job } => SettledDocument::recorded(job),
        Resolved::Repeated { attempt, job, completed_by } => SettledDocument::repeated(attempt, job, completed_by),
        Resolved::Discarded { completed_by } => SettledDocument::discarded(AttemptState::Discarded, completed_by),
        Resolved::Quarantine { until_ms, wait_ms } => {
            let wait = Duration::from_millis(wait_ms);
            let detail =
                format!("that nothing happened is believed in {wait_ms} ms; the provider's own word would be believed at once");
            return Err(Problem::new(Kind::AttemptQuarantined, detail)
                .job(id)
                .member("attempt", number)
                .member("until_ms", until_ms)
                .member("wait_ms", wait_ms)
                .member("wait_seconds", whole_seconds(wait))
                .retry_after(wait));
        }
        Resolved::NotUnknown { state } => {
            let detail = format!("attempt {number} is {state}; only an unknown one can be resolved");
            let problem = Problem::new(Kind::AttemptNotUnknown, detail).job(id);
            return Err(problem.member("attempt", number).member("state", state.as_str()));
        }
        Resolved::NotFound => return Err(Problem::job_unknown()),
    };
    let mut response = json(StatusCode::OK, &document);
    request_id.echo(response.headers_mut());
    Ok(response)
}

/// What an executor or an operator says that the provider answered.
struct Answer {
    result: Option<Box<RawValue>>,
    content_type: Option<String>,
    status: Option<u16>,
}

impl Answer {
    /// A whole answer: 204 if there is nothing to tell.
    fn complete(self, status: u16) -> Result<provider::Response, Problem> {
        let empty = provider::Response { status: 204, headers: Vec::new(), body: Arc::from([]) };
        Ok(self.some(status)?.unwrap_or(empty))
    }

    /// An answer, if there is one.
    fn some(self, status: u16) -> Result<Option<provider::Response>, Problem> {
        let Some(result) = self.result else { return Answer { result: None, ..self }.none() };
        let status = self.status.unwrap_or(status);
        if !(200..600).contains(&status) {
            return Err(invalid(format!("status {status} is not within 200 to 599")));
        }
        if BODILESS.contains(&status) {
            return Err(invalid(format!("status {status} has no body in HTTP; leave result out, or give another status")));
        }
        let content_type = self.content_type.unwrap_or_else(|| "application/json".to_owned());
        let sound = (1..=CONTENT_TYPE_BYTES_MAX).contains(&content_type.len())
            && content_type.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        if !sound {
            return Err(invalid(format!("content_type must be 1 to {CONTENT_TYPE_BYTES_MAX} visible characters")));
        }
        let body: Arc<[u8]> = if is_json(&content_type) {
            Arc::from(result.get().as_bytes())
        } else {
            let text: String = serde_json::from_str(result.get())
                .map_err(|_| invalid("result must be a string, because content_type is not JSON's".to_owned()))?;
            Arc::from(text.into_bytes())
        };
        Ok(Some(provider::Response { status, headers: vec![("content-type".to_owned(), content_type)], body }))
    }

    /// Insists that there is no answer.
    fn none(self) -> Result<Option<provider::Response>, Problem> {
        if self.result.is_some() || self.content_type.is_some() || self.status.is_some() {
            return Err(invalid(
                "only a success has a result, or a failure a refusal; content_type and status belong to it".to_owned(),
            ));
        }
        Ok(None)
    }
}

async fn read<T: serde::de::DeserializeOwned>(
    app: &Arc<App>,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
    expected: &str,
) -> Result<T, Problem> {
    caller.must(Role::Operate)?;
    body::insist_on_json(headers)?;
    let held = body::read(app, body).await?;
    body::parse(&held.bytes, expected)
}

fn invalid(detail: String) -> Problem {
    Problem::new(Kind::RequestInvalid, detail)
}

fn undecided(error: &StoreError, id: JobId) -> Problem {
    Problem::store(error, SAME_REQUEST).job(id)
}

fn fenced(id: JobId, number: u32, why: &str) -> Problem {
    let detail = format!("attempt {number} is no longer the caller's ({why}); nothing may be sent for it");
    Problem::new(Kind::AttemptFenced, detail).job(id).member("attempt", number).member("why", why)
}

fn token(text: &str) -> Result<AttemptToken, Problem> {
    text.parse().map_err(|_| invalid("token is not a UUID".to_owned()))
}

fn lease(lease_ms: u64) -> Result<Duration, Problem> {
    if (LEASE_MS_MIN..=LEASE_MS_MAX).contains(&lease_ms) {
        return Ok(Duration::from_millis(lease_ms));
    }
    Err(invalid(format!("lease_ms {lease_ms} is not within {LEASE_MS_MIN} to {LEASE_MS_MAX}")))
}

/// The attempt of a path. What is no number names no attempt.
pub(crate) struct PathAttempt {
    id: JobId,
    number: u32,
}

impl FromRequestParts<Arc<App>> for PathAttempt {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let PathJob(id) = PathJob::from_request_parts(parts, app).await?;
        let params = RawPathParams::from_request_parts(parts, app).await.map_err(|_| Problem::job_unknown())?;
        let number = params.iter().find(|(name, _)| *name == "number").and_then(|(_, number)| number.parse().ok());
        // The scripts count from 1.
        let number = number.filter(|number| *number > 0).ok_or_else(Problem::job_unknown)?;
        Ok(PathAttempt { id, number })
    }
}
