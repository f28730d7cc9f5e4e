//! `/proxy/{route}/…`: a base URL to put in the place of the provider's, and nothing else changes.
//!
//! A request that may change something needs an `Idempotency-Key` and becomes a job; the answer is the provider's own, status,
//! headers and body, as it is stored, and it is replayed byte for byte. There is no 202 here: a client of the provider would take
//! it for the result. So it waits, and then says 504 with whether the same request again may help. An answer that is a stream of
//! server-sent events passes through as it comes; the same request meanwhile reads it from its beginning, on any gateway. `GET` and
//! `HEAD` pass through without a job.
//!
//! `Authorization` names the owner and stops here; the provider's credential comes from the configuration.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{RawPathParams, Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderName, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Method, StatusCode, Uri};
use tokio::sync::OwnedSemaphorePermit;

use crate::config::Role;
use crate::job::{Job, JobState};
use crate::provider::{self, Outcome};
use crate::runtime::{Came, Reader, Submission};
use crate::server::answer;
use crate::server::auth::Caller;
use crate::server::body;
use crate::server::headers::{IDEMPOTENCY_EXPIRES, IDEMPOTENCY_REPLAYED, IdempotencyKey, JOB_ID, PROVIDER};
use crate::server::jobs::{
    check_route, content_type, expires_header, replayed_header, result_of, submit, traceparent, wait_or_read,
};
use crate::server::problem::{Document, Kind, Problem, SHOULD_RETRY};
use crate::server::{Activity, App, streamed};

const PREFIX: &str = "/proxy/";
/// What is always sent on: which answers are understood, and how the body's bytes are to be read.
const ALWAYS_FORWARDED: [&str; 2] = ["accept", "content-encoding"];

/// Sends a request to a route's provider as a job, and answers with the provider's own answer.
///
/// The same key attaches to the same job and is answered the same, byte for byte, with `Idempotency-Replayed: true`. 504 if there
/// is no answer yet: `attempt-unknown` (only a resolution or a late answer changes it) or `still-running` (the same request again
/// waits on).
///
/// A stream of server-sent events is passed on as it comes, and ends well only once it is stored as the result; a response that is
/// broken off was not, and the same request again tells what became of it.
#[utoipa::path(
    method(post, put, patch, delete), path = "/proxy/{route}/{*rest}", operation_id = "proxy", tag = "proxy",
    params(
        ("route" = String, Path, description = "The route's name"),
        ("rest" = String, Path,
         description = "Appended to the provider's base URL as it is, with its query; may be empty and hold slashes"),
        ("Idempotency-Key" = String, Header,
         description = "The client's name for the intent: a quoted string or bare, 1 to 255 visible characters"),
    ),
    responses(
        (status = "default", description = "The provider's own answer, or a problem document"),
        (status = "4XX", description = "The provider's refusal, or a problem document",
         body = Document, content_type = "application/problem+json"),
        (status = "5XX", description = "No answer", body = Document, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn proxy(
    State(app): State<Arc<App>>,
    caller: Caller,
    IdempotencyKey(key): IdempotencyKey,
    params: RawPathParams,
    request: Request,
) -> Result<Response, Problem> {
    caller.must(Role::Submit)?;
    let (Parts { method, uri, headers, mut extensions, .. }, body) = request.into_parts();
    let route = route_of(&params)?;
    let content_type = content_type(&headers)?;
    let forwarded = forwarded(&app, &route, &headers)?;
    let held = body::read(&app, body).await?;
    let submission = Submission {
        owner: caller.owner,
        key,
        route,
        request: provider::Request {
            method: method.as_str().to_owned(),
            target: target_of(&uri),
            content_type,
            headers: forwarded,
            body: Arc::from(held.bytes),
        },
        traceparent: traceparent(&headers),
    };
    let expected = app.runtime.expect(&submission.owner, &submission.key);
    let receipt = submit(&app, submission, held.share).await?;
    let replayed = receipt.replayed;
    let settled = receipt.job.is_ended() || receipt.job.state == JobState::Unknown;
    let within = app.options.proxy_wait;
    let id = receipt.job.id;
    let came = if settled { Came::Job(receipt.job) } else { wait_or_read(&app, expected, receipt, within).await? };
    let mut response = match came {
        Came::Stream(reader) => stream(&app, reader, extensions.remove::<Arc<Activity>>())?,
        Came::Job(job) => {
            let mut response = match answer(&app, &job).await {
                Ok(response) => response,
                Err(problem) => problem.job(id).into_response(),
            };
            if job.is_ended() {
                expires_header(response.headers_mut(), &job);
            }
            response
        }
    };
    let headers = response.headers_mut();
    replayed_header(headers, replayed);
    headers.insert(JOB_ID, HeaderValue::from_str(&id.to_string()).expect("a job id is visible ASCII"));
    Ok(response)
}

/// An answer that comes in parts: its head now, its body as it comes.
fn stream(app: &Arc<App>, reader: Reader, activity: Option<Arc<Activity>>) -> Result<Response, Problem> {
    let mut response = replay(reader.head().clone(), None)?;
    provider_header(&mut response, reader.provider());
    *response.body_mut() = streamed::body(Arc::clone(app), reader, activity);
    Ok(response)
}

fn provider_header(response: &mut Response, provider: &str) {
    if let Ok(provider) = HeaderValue::from_str(provider) {
        response.headers_mut().insert(PROVIDER, provider);
    }
}

/// What a job is answered with: its stored answer, or why there is none.
async fn answer(app: &App, job: &Job) -> Result<Response, Problem> {
    let because = |text: String| if job.reason.is_empty() { text } else { format!("{text}: {}", job.reason) };
    match job.state {
        JobState::Succeeded | JobState::Failed => {}
        JobState::Unknown => {
            let detail =
                because("an attempt may have happened and nobody knows yet; the same key answers once it is known".to_owned());
            return Err(Problem::new(Kind::AttemptUnknown, detail).member("state", job.state.as_str()));
        }
        JobState::Pending | JobState::Running | JobState::Canceling => {
            let detail = format!("the job is still {}; the same request with the same key goes on waiting", job.state);
            return Err(Problem::new(Kind::StillRunning, detail).member("state", job.state.as_str()));
        }
        JobState::Canceled => return Err(Problem::new(Kind::JobCanceled, because("the job was canceled".to_owned()))),
        JobState::Indeterminate => {
            return Err(Problem::new(Kind::JobIndeterminate, because("nobody will ever know whether it happened".to_owned())));
        }
    }
    let Some(stored) = result_of(app, job).await? else {
        return Err(Problem::new(Kind::JobFailed, because("every attempt definitely failed".to_owned())));
    };
    let mut response = replay(stored.response, stored.share)?;
    if let Some(attempt) = job.winner().or_else(|| job.attempts.last()) {
        provider_header(&mut response, &attempt.provider);
    }
    if job.state == JobState::Failed && !job.rules.releases_on_failure {
        // The key stands for this refusal: whatever the provider says, the same request again is answered the same.
        response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    Ok(response)
}

/// Passes a safe request through, without a job and without a key.
#[utoipa::path(
    method(get, head), path = "/proxy/{route}/{*rest}", operation_id = "pass_through", tag = "proxy",
    params(
        ("route" = String, Path, description = "The route's name"),
        ("rest" = String, Path,
         description = "Appended to the provider's base URL as it is, with its query; may be empty and hold slashes"),
    ),
    responses(
        (status = "default", description = "The provider's own answer, or a problem document"),
        (status = "4XX", description = "The provider's refusal, or a problem document",
         body = Document, content_type = "application/problem+json"),
        (status = "5XX", description = "No answer", body = Document, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn pass_through(
    State(app): State<Arc<App>>,
    caller: Caller,
    params: RawPathParams,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    caller.must(Role::Submit)?;
    let route = route_of(&params)?;
    let request = provider::Request {
        method: method.as_str().to_owned(),
        target: target_of(&uri),
        content_type: String::new(),
        headers: forwarded(&app, &route, &headers)?,
        body: Arc::from([]),
    };
    match app.runtime.pass_through(&route, &request).await? {
        Outcome::Succeeded { response, .. } | Outcome::Rejected { response, .. } => replay(response, None),
        Outcome::NotSent { reason } => Err(Problem::new(Kind::ProviderUnreachable, reason)),
        Outcome::InvalidOutput { reason } | Outcome::Unknown { reason } => Err(Problem::new(Kind::ProviderTimeout, reason)),
    }
}

fn route_of(params: &RawPathParams) -> Result<String, Problem> {
    let route = params.iter().find(|(name, _)| *name == "route").map_or("", |(_, route)| route);
    check_route(route)?;
    Ok(route.to_owned())
}

/// What follows the route in the path, with the query, exactly as it was sent.
fn target_of(uri: &Uri) -> String {
    let whole = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    let after = whole.strip_prefix(PREFIX).unwrap_or_default();
    after.find('/').map_or_else(|| "/".to_owned(), |slash| after[slash..].to_owned())
}

/// The headers that go on to the provider: [`ALWAYS_FORWARDED`], and what the route names; never those of this connection.
fn forwarded(app: &App, route: &str, headers: &HeaderMap) -> Result<Vec<(String, String)>, Problem> {
    let own = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let own: Vec<&str> = own.flat_map(|value| value.split(',')).map(str::trim).collect();
    let configured = app.options.forward_headers.get(route).into_iter().flatten().map(String::as_str);
    let mut forwarded = Vec::new();
    let always = |name: &&str| ALWAYS_FORWARDED.iter().any(|always| always.eq_ignore_ascii_case(name));
    for name in ALWAYS_FORWARDED.into_iter().chain(configured.filter(|name| !always(name))) {
        // Names from the configuration may be none at all, and a credential is never forwarded whatever they say.
        let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else { continue };
        if is_never_forwarded(&name) || own.iter().any(|hop| hop.eq_ignore_ascii_case(name.as_str())) {
            continue;
        }
        for value in headers.get_all(&name) {
            let Ok(value) = value.to_str() else {
                return Err(Problem::new(Kind::RequestInvalid, format!("the header {name} is not visible ASCII")));
            };
            forwarded.push((name.as_str().to_owned(), value.to_owned()));
        }
    }
    Ok(forwarded)
}

fn is_never_forwarded(name: &HeaderName) -> bool {
    is_hop_by_hop(name) || matches!(name.as_str(), "authorization" | "cookie" | "idempotency-key" | "content-type")
}

fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "content-length"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-connection"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// A stored answer as it came. Left out: what concerns another connection, and what only this gateway may say of itself.
fn replay(stored: provider::Response, share: Option<OwnedSemaphorePermit>) -> Result<Response, Problem> {
    let corrupt = || Problem::new(Kind::StoreCorrupt, "the stored answer is not an HTTP answer");
    let status = StatusCode::from_u16(stored.status).map_err(|_| corrupt())?;
    let mut response = Response::new(Body::from(answer::hold(stored.body, share)));
    *response.status_mut() = status;
    for (name, value) in &stored.headers {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| corrupt())?;
        let ours = [JOB_ID, PROVIDER, IDEMPOTENCY_REPLAYED, IDEMPOTENCY_EXPIRES].contains(&name);
        if is_hop_by_hop(&name) || ours || name.as_str().starts_with("access-control-") {
            continue;
        }
        response.headers_mut().append(name, HeaderValue::from_str(value).map_err(|_| corrupt())?);
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_what_was_sent_after_the_route() {
        for (path, target) in [
            ("/proxy/chat/v1/x?a=%2F&b", "/v1/x?a=%2F&b"),
            ("/proxy/chat/a%2Fb//c", "/a%2Fb//c"),
            ("/proxy/ch%61t/", "/"),
            ("/proxy/chat/?q=/x", "/?q=/x"),
        ] {
            assert_eq!(target_of(&path.parse().unwrap()), target, "{path}");
        }
    }
}
