//! Jobs over HTTP: submit, read, wait, list, cancel, reopen.
//!
//! A job is answered as a JSON document that says how it stands; its `state` decides, not the status. Attempts' tokens and
//! request hashes are not in it. An owner sees its own jobs; another's is as absent as one that never was.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{FromRequestParts, Query, RawPathParams, State};
use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::OwnedSemaphorePermit;
use utoipa::{IntoParams, ToSchema};

use crate::config::Role;
use crate::error::StoreError;
use crate::job::{Job, JobId, JobState};
use crate::provider;
use crate::runtime::{Came, Expected, ListState, ReadError, Receipt, Replayed, Submission, SubmitError, WaitFor};
use crate::server::App;
use crate::server::answer;
use crate::server::auth::Caller;
use crate::server::body;
use crate::server::document::{JobDocument, JobList};
use crate::server::headers::{
    IDEMPOTENCY_EXPIRES, IDEMPOTENCY_REPLAYED, IdempotencyKey, JOB_ID, RequestId, Wait, etag, http_date, none_match, single,
};
use crate::server::problem::{Kind, Problem, Refusals, SAME_REQUEST};
use crate::store::{CancelMode, Canceled, Reopened};

/// Longest reason, actor or provider's name in characters: they stand in the record.
pub(crate) const TEXT_CHARS_MAX: usize = 500;
/// Longest route's name that is looked up.
pub(crate) const ROUTE_CHARS_MAX: usize = 128;
/// Most jobs in one list.
pub(crate) const LIST_MAX: usize = 1000;
/// How many jobs a list has if nobody says.
const LIST_DEFAULT: usize = 100;
/// Most new attempts that one reopening gives.
const REOPEN_ATTEMPTS_MAX: u32 = 100;
/// When to ask again for a job that is under way.
const AGAIN_RUNNING: Duration = Duration::from_secs(1);
/// When to ask again for a job that waits for somebody's knowledge.
const AGAIN_UNKNOWN: Duration = Duration::from_secs(5);

/// One intent: what to ask of which route.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Submit)]
pub(crate) struct SubmitBody<'a> {
    /// The route's name.
    #[serde(borrow)]
    route: Cow<'a, str>,
    /// Any JSON. The provider is sent exactly these bytes.
    #[serde(borrow)]
    #[schema(value_type = serde_json::Value)]
    input: &'a RawValue,
}

/// Submits an intent.
///
/// The same owner, key and request lead to the same job, however often they are sent. 202 while the job is open (`unknown`
/// included), 200 when it has ended (failed too): `state` decides. After 503 the job may exist: send the same request with the
/// same key again.
#[utoipa::path(
    post, path = "/v1/jobs", operation_id = "submit_job", tag = "jobs",
    request_body(content = inline(SubmitBody), content_type = "application/json"),
    params(
        ("Idempotency-Key" = String, Header,
         description = "The client's name for the intent: a quoted string or bare, 1 to 255 visible characters"),
        ("Prefer" = Option<String>, Header,
         description = "`wait=N`: answer when the job has ended, after N seconds at the latest"),
    ),
    responses(
        (status = 200, description = "The job has ended", body = inline(JobDocument)),
        (status = 202, description = "The job is open", body = inline(JobDocument)),
        Refusals,
    ),
)]
pub(crate) async fn submit_job(
    State(app): State<Arc<App>>,
    caller: Caller,
    IdempotencyKey(key): IdempotencyKey,
    wait: Wait,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    caller.must(Role::Submit)?;
    body::insist_on_json(&headers)?;
    let held = body::read(&app, body).await?;
    let came = Instant::now();
    let expected = "{\"route\": text, \"input\": any JSON}";
    let asked: SubmitBody<'_> = serde_json::from_slice(&held.bytes).map_err(|error| body::unreadable(&error, expected))?;
    check_route(&asked.route)?;
    let submission = Submission {
        owner: caller.owner,
        key,
        route: asked.route.into_owned(),
        request: provider::Request {
            method: String::new(),
            target: String::new(),
            content_type: "application/json".to_owned(),
            headers: Vec::new(),
            body: Arc::from(asked.input.get().as_bytes()),
        },
        traceparent: traceparent(&headers),
    };
    let expected = wait.0.and_then(|_| app.runtime.expect(&submission.owner, &submission.key));
    let receipt = submit(&app, submission, held.share).await?;
    let replayed = receipt.replayed;
    let job = match wait.0 {
        // What the claim took, to be durable perhaps, is part of the wait.
        Some(within) if !receipt.job.is_ended() => {
            wait_for(&app, expected, receipt, WaitFor::Ended, within.saturating_sub(came.elapsed())).await?
        }
        Some(_) | None => receipt.job,
    };
    let mut response = document(&app, &job, Answered::Submit).await?;
    wait.applied(response.headers_mut());
    replayed_header(response.headers_mut(), replayed);
    Ok(response)
}

/// Submits; the body's share of memory and the place among the changes are kept until the claim is made, though the client goes away.
pub(crate) async fn submit(app: &App, submission: Submission, share: Option<OwnedSemaphorePermit>) -> Result<Receipt, Problem> {
    let place = app.place()?;
    let receipt = app.runtime.submit_holding(submission, (share, place)).await;
    receipt.map_err(|error| match error {
        SubmitError::Conflict(_) => Problem::from(error).status(app.options.conflict.code()),
        SubmitError::UnknownRoute(_)
        | SubmitError::Unrenderable(_)
        | SubmitError::InvalidInput(_)
        | SubmitError::Gone(_)
        | SubmitError::Collision
        | SubmitError::Stopping
        | SubmitError::Store(_) => error.into(),
    })
}

/// Waits for a job; when this gateway stops, or all places are taken by a limit, the job is answered as it stands.
pub(crate) async fn wait_for(
    app: &App,
    expected: Option<Expected>,
    receipt: Receipt,
    wait_for: WaitFor,
    within: Duration,
) -> Result<Arc<Job>, Problem> {
    let job = &receipt.job;
    let waited = tokio::select! {
        waited = app.runtime.wait_expected(expected, &receipt, wait_for, within) => waited,
        () = app.stopping.cancelled() => app.runtime.read(job.id).await,
    };
    waited.map_err(|error| waited_in_vain(error, job.id))
}

/// Waits as [`wait_for`] does for a job to settle, or until its answer begins to come in parts.
pub(crate) async fn wait_or_read(
    app: &App,
    expected: Option<Expected>,
    receipt: Receipt,
    within: Duration,
) -> Result<Came, Problem> {
    let job = &receipt.job;
    let waited = tokio::select! {
        waited = app.runtime.wait_or_read(expected, &receipt, within) => waited,
        () = app.stopping.cancelled() => app.runtime.read(job.id).await.map(Came::Job),
    };
    waited.map_err(|error| waited_in_vain(error, job.id))
}

fn waited_in_vain(error: ReadError, id: JobId) -> Problem {
    match error {
        // A released key has meanwhile been given to another incarnation: this one is what it was.
        ReadError::NotFound => Problem::job_unknown(),
        ReadError::TooManyWaiters { .. } | ReadError::Gone(_) | ReadError::Store(_) => Problem::from(error).job(id),
    }
}

/// Reads a job; with `Prefer: wait=N`, waits until it has ended.
#[utoipa::path(
    get, path = "/v1/jobs/{id}", operation_id = "read_job", tag = "jobs",
    params(
        ("id" = String, Path, description = "The job's id"),
        ("Prefer" = Option<String>, Header,
         description = "`wait=N`: answer when the job has ended, after N seconds at the latest"),
        ("If-None-Match" = Option<String>, Header, description = "The ETag that is known: 304 if the job has not changed"),
    ),
    responses(
        (status = 200, description = "The job", body = inline(JobDocument)),
        (status = 202, description = "The job has ended, and how is not durable yet", body = inline(JobDocument)),
        (status = 304, description = "The job has not changed"),
        Refusals,
    ),
)]
pub(crate) async fn read_job(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathJob(id): PathJob,
    wait: Wait,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let job = visible(&app, &caller, id).await?;
    let job = match wait.0 {
        Some(within) if !job.is_ended() => {
            wait_for(&app, None, Receipt { job, replayed: Replayed::Yes }, WaitFor::Ended, within).await?
        }
        Some(_) | None => job,
    };
    let mut response = if none_match(&headers, &etag(&job)) {
        let mut response = StatusCode::NOT_MODIFIED.into_response();
        response.headers_mut().insert(header::ETAG, value(&etag(&job)));
        response
    } else {
        document(&app, &job, Answered::Read).await?
    };
    wait.applied(response.headers_mut());
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    Ok(response)
}

/// A job that this caller may see; another's is as absent as one that never was.
pub(crate) async fn visible(app: &App, caller: &Caller, id: JobId) -> Result<Arc<Job>, Problem> {
    let operates = caller.may(Role::Operate);
    if !operates {
        caller.must(Role::Submit)?;
    }
    match app.runtime.read(id).await {
        Ok(job) if operates || job.owner == caller.owner.as_str() => Ok(job),
        Err(ReadError::Gone(gone)) if !operates && gone.owner != caller.owner.as_str() => Err(Problem::job_unknown()),
        Ok(_) => Err(Problem::job_unknown()),
        Err(error) => Err(error.into()),
    }
}

/// What to list.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// `unknown`: jobs with an unknown attempt, the longest unknown first. `open`: jobs that have not ended, the one due first
    /// first.
    state: String,
    /// At most this many jobs, 1 to 1000; 100 if not given.
    limit: Option<usize>,
}

/// Lists unknown or open jobs of all owners, without results; `incomplete` if a master could not be asked for its part. Role
/// `operate`.
#[utoipa::path(
    get, path = "/v1/jobs", operation_id = "list_jobs", tag = "operation", params(ListQuery),
    responses(
        (status = 200, description = "The jobs", body = inline(JobList)),
        Refusals,
    ),
)]
pub(crate) async fn list_jobs(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: Result<Query<ListQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Problem> {
    caller.must(Role::Operate)?;
    let invalid = |detail: String| Problem::new(Kind::RequestInvalid, detail);
    let expected = "expected: state=unknown|open, limit=1..1000";
    let Ok(Query(ListQuery { state, limit })) = query else {
        return Err(invalid(format!("the query is not understood; {expected}")));
    };
    let state = match state.as_str() {
        "unknown" => ListState::Unknown,
        "open" => ListState::Open,
        _ => return Err(invalid(format!("state {:?} is not known; {expected}", state.chars().take(32).collect::<String>()))),
    };
    let limit = limit.unwrap_or(LIST_DEFAULT);
    if !(1..=LIST_MAX).contains(&limit) {
        return Err(invalid(format!("limit {limit} is not within 1 to {LIST_MAX}")));
    }
    let listed = app.runtime.list(state, limit).await.map_err(|error| Problem::store(&error, SAME_REQUEST))?;
    let jobs = listed.jobs.iter().map(|job| JobDocument::of(job, None)).collect();
    let list = JobList { jobs, incomplete: &listed.incomplete };
    let mut response = json(StatusCode::OK, &list);
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// How to cancel, and why. The body may be left out.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Cancel)]
pub(crate) struct CancelBody {
    /// `graceful` (default): the job ends when its open attempts have settled, and a success that comes first wins. `force`: now,
    /// whatever its attempts may still do; role `operate`.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    mode: Mode,
    /// Why, up to 500 characters.
    #[serde(default)]
    reason: String,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    #[default]
    Graceful,
    Force,
}

/// Asks for a job to be canceled.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/cancel", operation_id = "cancel_job", tag = "jobs",
    request_body(content = inline(Option<CancelBody>), content_type = "application/json"),
    params(
        ("id" = String, Path, description = "The job's id"),
        ("Onejob-Request-Id" = Option<String>, Header, description = "Sent again, the same id cancels nothing twice"),
    ),
    responses(
        (status = 200, description = "The job ended as canceled", body = inline(CancelDocument)),
        (status = 202, description = "It will, when its open attempts have settled", body = inline(CancelDocument)),
        Refusals,
    ),
)]
pub(crate) async fn cancel_job(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathJob(id): PathJob,
    request_id: RequestId,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let asked = read_cancel(&app, &caller, &headers, body).await?;
    visible(&app, &caller, id).await?;
    cancel(&app, &caller, id, request_id, asked).await
}

/// Asks for the job of one of the caller's keys to be canceled.
#[utoipa::path(
    post, path = "/v1/cancel", operation_id = "cancel_by_key", tag = "jobs",
    request_body(content = inline(Option<CancelBody>), content_type = "application/json"),
    params(
        ("Idempotency-Key" = String, Header, description = "The key whose job is to be canceled"),
        ("Onejob-Request-Id" = Option<String>, Header, description = "Sent again, the same id cancels nothing twice"),
    ),
    responses(
        (status = 200, description = "The job ended as canceled", body = inline(CancelDocument)),
        (status = 202, description = "It will, when its open attempts have settled", body = inline(CancelDocument)),
        Refusals,
    ),
)]
pub(crate) async fn cancel_by_key(
    State(app): State<Arc<App>>,
    caller: Caller,
    IdempotencyKey(key): IdempotencyKey,
    request_id: RequestId,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    caller.must(Role::Submit)?;
    let asked = read_cancel(&app, &caller, &headers, body).await?;
    let job = app.runtime.find(&caller.owner, &key).await?;
    cancel(&app, &caller, job.id, request_id, asked).await
}

async fn read_cancel(app: &Arc<App>, caller: &Caller, headers: &HeaderMap, body: Body) -> Result<CancelBody, Problem> {
    let held = body::read(app, body).await?;
    let asked = if held.bytes.is_empty() {
        CancelBody::default()
    } else {
        body::insist_on_json(headers)?;
        body::parse(&held.bytes, "{\"mode\": \"graceful\" or \"force\", \"reason\": text}")?
    };
    check_text("reason", &asked.reason, Empty::Allowed)?;
    if matches!(asked.mode, Mode::Force) {
        caller.must(Role::Operate)?;
    }
    Ok(asked)
}

/// How a cancel stands.
#[derive(Serialize, ToSchema)]
#[schema(as = Canceled)]
pub(crate) struct CancelDocument {
    /// The job's id.
    id: String,
    /// `canceled` or `canceling`.
    status: &'static str,
    /// For `canceled`: `none`, or `unknown` if attempts were open.
    #[serde(skip_serializing_if = "Option::is_none")]
    effect: Option<String>,
    /// For `canceling`: how many attempts have yet to settle.
    #[serde(skip_serializing_if = "Option::is_none")]
    open_attempts: Option<u32>,
}

async fn cancel(
    app: &Arc<App>,
    caller: &Caller,
    id: JobId,
    request_id: RequestId,
    asked: CancelBody,
) -> Result<Response, Problem> {
    let mode = match asked.mode {
        Mode::Graceful => CancelMode::Graceful,
        Mode::Force => CancelMode::Force,
    };
    let (runtime, actor, request) = (app.runtime.clone(), caller.owner.clone(), request_id.0.clone());
    let canceled = app
        .detached(async move { runtime.cancel(id, &request, mode, actor.as_str(), &asked.reason).await })
        .await?
        .map_err(|error| Problem::store(&error, SAME_REQUEST).job(id))?;
    let told = |status, effect, open_attempts| CancelDocument { id: id.to_string(), status, effect, open_attempts };
    let mut response = match canceled {
        Canceled::Canceled { effect } => json(StatusCode::OK, &told("canceled", Some(effect), None)),
        Canceled::Canceling { open } => json(StatusCode::ACCEPTED, &told("canceling", None, Some(open))),
        Canceled::Ended { state } => return Err(job_ended(id, state)),
        Canceled::NotFound => return Err(Problem::job_unknown()),
    };
    request_id.echo(response.headers_mut());
    Ok(response)
}

/// Why a failed job is to be tried again.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Reopen)]
pub(crate) struct ReopenBody {
    /// Why, 1 to 500 characters.
    reason: String,
    /// How many more attempts, 1 to 100.
    #[serde(default = "one")]
    attempts: u32,
}

fn one() -> u32 {
    1
}

/// A job that was reopened.
#[derive(Serialize, ToSchema)]
#[schema(as = Reopened)]
pub(crate) struct ReopenDocument {
    /// The job's id.
    id: String,
    /// `reopened`.
    status: &'static str,
    /// The job's version now: results of earlier attempts no longer count.
    version: u64,
}

/// Gives a failed job new attempts. Role `operate`.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/reopen", operation_id = "reopen_job", tag = "operation",
    request_body(content = inline(ReopenBody), content_type = "application/json"),
    params(
        ("id" = String, Path, description = "The job's id"),
        ("Onejob-Request-Id" = Option<String>, Header, description = "Sent again, the same id reopens nothing twice"),
    ),
    responses(
        (status = 200, description = "The job is pending again", body = inline(ReopenDocument)),
        Refusals,
    ),
)]
pub(crate) async fn reopen_job(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathJob(id): PathJob,
    request_id: RequestId,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    caller.must(Role::Operate)?;
    body::insist_on_json(&headers)?;
    let held = body::read(&app, body).await?;
    let asked: ReopenBody = body::parse(&held.bytes, "{\"reason\": text, \"attempts\": number}")?;
    check_text("reason", &asked.reason, Empty::Refused)?;
    if !(1..=REOPEN_ATTEMPTS_MAX).contains(&asked.attempts) {
        let detail = format!("attempts {} is not within 1 to {REOPEN_ATTEMPTS_MAX}", asked.attempts);
        return Err(Problem::new(Kind::RequestInvalid, detail));
    }
    let (runtime, actor, request) = (app.runtime.clone(), caller.owner.clone(), request_id.0.clone());
    let reopened = app
        .detached(async move { runtime.reopen(id, &request, actor.as_str(), &asked.reason, asked.attempts).await })
        .await?
        .map_err(|error| match error {
            // The one argument that is not checked above is how many there would be together with those that were made.
            StoreError::Fatal { code, detail } if code == "BADARG" => {
                Problem::new(Kind::AttemptsExhausted, format!("job {id} cannot be reopened: {detail}")).job(id)
            }
            error => Problem::store(&error, SAME_REQUEST).job(id),
        })?;
    let mut response = match reopened {
        Reopened::Reopened { version } => {
            json(StatusCode::OK, &ReopenDocument { id: id.to_string(), status: "reopened", version })
        }
        Reopened::NotFailed { state } => {
            let detail = format!("job {id} is {state}; only a failed job can be reopened");
            return Err(Problem::new(Kind::JobNotFailed, detail).job(id).member("state", state.as_str()));
        }
        Reopened::Gone => {
            return Err(Problem::new(Kind::JobGone, format!("job {id} ended long ago and its input is no longer kept")).job(id));
        }
        Reopened::NotFound => return Err(Problem::job_unknown()),
    };
    request_id.echo(response.headers_mut());
    Ok(response)
}

/// For what a job's document is the answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answered {
    Submit,
    Read,
}

/// A job with its result as a response: 202 to a submit while it is open, and to whoever may not know yet how it ended; else 200.
async fn document(app: &App, job: &Job, answered: Answered) -> Result<Response, Problem> {
    let (result, share) = result_of(app, job).await?.map_or((None, None), |stored| (Some(stored.response), stored.share));
    let open = match answered {
        Answered::Submit => !job.is_ended(),
        Answered::Read => job.is_untold(),
    };
    let status = if open { StatusCode::ACCEPTED } else { StatusCode::OK };
    let document = serde_json::to_vec(&JobDocument::of(job, result.as_ref())).expect("documents are plain data");
    let mut response = json_of(status, Body::from(answer::hold(document, share)));
    let headers = response.headers_mut();
    headers.insert(header::ETAG, value(&etag(job)));
    headers.insert(JOB_ID, value(&job.id.to_string()));
    if answered == Answered::Submit {
        headers.insert(header::LOCATION, value(&format!("/v1/jobs/{}", job.id)));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    if job.is_ended() {
        expires_header(headers, job);
    } else {
        let again = if job.state == JobState::Unknown { AGAIN_UNKNOWN } else { AGAIN_RUNNING };
        headers.insert(header::RETRY_AFTER, HeaderValue::from(again.as_secs()));
    }
    Ok(response)
}

/// The result of a job that has one. A success without its bytes is an error of the store, never an empty body.
pub(crate) async fn result_of(app: &App, job: &Job) -> Result<Option<Stored>, Problem> {
    if !job.is_ended() {
        return Ok(None);
    }
    let share = answer::share(app, &job.result.body).await?;
    let result = match app.runtime.result(job).await {
        Ok(result) => result,
        Err(error) => {
            // Since the record was read, its bytes may have come to their end, and then nothing is wrong with the store.
            return Err(match app.runtime.read(job.id).await {
                Err(gone @ (ReadError::Gone(_) | ReadError::NotFound)) => Problem::from(gone),
                Ok(_) | Err(ReadError::TooManyWaiters { .. } | ReadError::Store(_)) => {
                    Problem::store(&error, SAME_REQUEST).job(job.id)
                }
            });
        }
    };
    if result.is_none() && job.state == JobState::Succeeded {
        let detail = format!("job {} succeeded, and the head of its result cannot be read", job.id);
        tracing::error!(job = %job.id, "the head of a result cannot be read");
        return Err(Problem::new(Kind::StoreCorrupt, detail).job(job.id));
    }
    Ok(result.map(|response| Stored { response, share }))
}

/// A stored answer, and its share of the memory for them.
pub(crate) struct Stored {
    pub(crate) response: provider::Response,
    pub(crate) share: Option<OwnedSemaphorePermit>,
}

pub(crate) fn replayed_header(headers: &mut HeaderMap, replayed: Replayed) {
    let word = match replayed {
        Replayed::Yes => "true",
        Replayed::No => "false",
    };
    headers.insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static(word));
}

/// Says until when the key stands for an ended job.
pub(crate) fn expires_header(headers: &mut HeaderMap, job: &Job) {
    let date = http_date(job.ended_ms.saturating_add(job.rules.key_life_ms));
    headers.insert(IDEMPOTENCY_EXPIRES, value(&date));
}

pub(crate) fn job_ended(id: JobId, state: JobState) -> Problem {
    Problem::new(Kind::JobEnded, format!("job {id} has ended as {state}")).job(id).member("state", state.as_str())
}

pub(crate) fn json<T: Serialize>(status: StatusCode, document: &T) -> Response {
    json_of(status, Body::from(serde_json::to_vec(document).expect("documents are plain data")))
}

fn json_of(status: StatusCode, body: Body) -> Response {
    (status, [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
}

fn value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).expect("ids, tags and dates are visible ASCII")
}

/// The W3C trace context, if it can be passed on.
pub(crate) fn traceparent(headers: &HeaderMap) -> Option<String> {
    /// A traceparent has 55 characters; later versions may have more.
    const TRACEPARENT_CHARS_MAX: usize = 256;
    let value = headers.get("traceparent")?.to_str().ok()?;
    (value.len() <= TRACEPARENT_CHARS_MAX).then(|| value.to_owned())
}

pub(crate) fn check_route(route: &str) -> Result<(), Problem> {
    let length = route.chars().count();
    if length <= ROUTE_CHARS_MAX {
        return Ok(());
    }
    Err(Problem::new(Kind::RouteUnknown, format!("the route has {length} characters; the limit is {ROUTE_CHARS_MAX}")))
}

/// Whether a text may be empty.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Empty {
    Allowed,
    Refused,
}

/// Checks a text that will stand in the record.
pub(crate) fn check_text(name: &str, text: &str, empty: Empty) -> Result<(), Problem> {
    let length = text.chars().count();
    if length == 0 && empty == Empty::Refused {
        return Err(Problem::new(
            Kind::RequestInvalid,
            format!("{name} is empty; it must have 1 to {TEXT_CHARS_MAX} characters"),
        ));
    }
    if let Some(character) = text.chars().find(|character| character.is_control()) {
        let detail = format!("{name} has the control character {character:?}; it is shown to people, on one line");
        return Err(Problem::new(Kind::RequestInvalid, detail));
    }
    if length > TEXT_CHARS_MAX {
        let detail = format!("{name} has {length} characters; the limit is {TEXT_CHARS_MAX}");
        return Err(Problem::new(Kind::RequestInvalid, detail));
    }
    Ok(())
}

/// The job of a path. What is no job id names no job.
pub(crate) struct PathJob(pub(crate) JobId);

impl FromRequestParts<Arc<App>> for PathJob {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let params = RawPathParams::from_request_parts(parts, app).await.map_err(|_| Problem::job_unknown())?;
        let id = params.iter().find(|(name, _)| *name == "id").and_then(|(_, id)| id.parse().ok());
        id.map(PathJob).ok_or_else(Problem::job_unknown)
    }
}

/// Reads a header that may be there once, as text that can be sent on.
pub(crate) fn content_type(headers: &HeaderMap) -> Result<String, Problem> {
    Ok(single(headers, &header::CONTENT_TYPE)?.unwrap_or_default().to_owned())
}
