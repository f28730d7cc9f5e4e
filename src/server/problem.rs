//! Every answer that is not what was asked for: RFC 9457 problem documents with stable types.
//!
//! A type is forever: clients match on it. Texts may change. A problem says what the caller does next: `retryable` (and the
//! header
//! `x-should-retry`, which the official SDKs of several providers obey) means that the same request, with the same key, may
//! succeed. Never in a problem: a key, a token, a payload, a credential, or where Redis is.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, StatusCode};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::{StoreError, Want};
use crate::job::JobId;
use crate::runtime::{ReadError, SubmitError};
use crate::store::Gone;
use crate::validate::Invalid;

/// What precedes a problem's name in its type.
pub const TYPE_PREFIX: &str = "urn:onejob:problem:";

/// Tells SDKs whether to send the same request again.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// When to come back to a gateway that could not do it now.
const RETRY_AFTER: Duration = Duration::from_secs(1);

macro_rules! kinds {
    ($($kind:ident $name:literal $status:ident $source:ident $retry:ident $title:literal;)*) => {
        /// What kind of problem it is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Kind { $($kind),* }

        impl Kind {
            /// Every kind, in the order of the documentation.
            const ALL: &[Kind] = &[$(Kind::$kind),*];

            fn facts(self) -> Facts {
                match self {
                    $(Kind::$kind => Facts {
                        name: $name,
                        title: $title,
                        status: StatusCode::$status,
                        source: Source::$source,
                        retry: Retry::$retry,
                    }),*
                }
            }
        }
    };
}

kinds! {
    // The request.
    KeyMissing "idempotency-key-missing" BAD_REQUEST Gateway No "An Idempotency-Key is required";
    KeyInvalid "idempotency-key-invalid" BAD_REQUEST Gateway No "The Idempotency-Key is not one key";
    RequestInvalid "request-invalid" BAD_REQUEST Gateway No "The request is not understood";
    Unauthorized "unauthorized" UNAUTHORIZED Gateway No "No known owner";
    WebhookRefused "webhook-refused" UNAUTHORIZED Gateway No "The webhook is not the provider's own";
    Forbidden "forbidden" FORBIDDEN Gateway No "The owner lacks a role";
    PathUnknown "path-unknown" NOT_FOUND Gateway No "Nothing is here";
    RouteUnknown "route-unknown" NOT_FOUND Gateway No "There is no such route";
    StreamUnknown "stream-unknown" NOT_FOUND Gateway No "There is no such stream of clicks";
    JobUnknown "job-unknown" NOT_FOUND Job No "There is no such job";
    MethodNotAllowed "method-not-allowed" METHOD_NOT_ALLOWED Gateway No "Not this method here";
    BodyTimeout "body-timeout" REQUEST_TIMEOUT Gateway Yes "The body came too slowly";
    BodyTooLarge "body-too-large" PAYLOAD_TOO_LARGE Gateway No "The body is too large";
    ClicksTooMany "clicks-too-many" PAYLOAD_TOO_LARGE Gateway No "There are too many clicks";
    MediaTypeUnsupported "media-type-unsupported" UNSUPPORTED_MEDIA_TYPE Gateway No "Not this media type here";
    RequestUnrenderable "request-unrenderable" UNPROCESSABLE_ENTITY Gateway No "No provider of the route can be asked this";
    InputInvalid "input-invalid" UNPROCESSABLE_ENTITY Gateway No "The input is not as the route requires";
    ClickInvalid "click-invalid" UNPROCESSABLE_ENTITY Gateway No "A click is not as its stream requires";
    OutputInvalid "output-invalid" UNPROCESSABLE_ENTITY Gateway No "The result is not as the route requires";
    HeadTooLarge "head-too-large" REQUEST_HEADER_FIELDS_TOO_LARGE Gateway No "The request's head is too large";
    HeadersTooMany "headers-too-many" REQUEST_HEADER_FIELDS_TOO_LARGE Gateway No "The request has too many headers";
    // The key.
    KeyConflict "key-conflict" CONFLICT Job No "The key stands for another request";
    KeyCollision "key-collision" CONFLICT Job No "Use another key";
    JobGone "job-gone" GONE Job No "The job ended and is no longer kept";
    // Attempts.
    AttemptBlocked "attempt-blocked" CONFLICT Job No "Another attempt is in the way";
    AttemptTooEarly "attempt-too-early" CONFLICT Job Yes "Another attempt may not begin yet";
    AttemptsExhausted "attempts-exhausted" CONFLICT Job No "The attempts are used up";
    AttemptFenced "attempt-fenced" CONFLICT Job No "The attempt is no longer the caller's";
    AttemptQuarantined "attempt-quarantined" CONFLICT Job Yes "It is too early to believe that nothing happened";
    AttemptNotUnknown "attempt-not-unknown" CONFLICT Job No "The attempt is not unknown";
    // The job.
    JobDeadline "job-deadline" CONFLICT Job No "The job's time is over";
    JobCanceling "job-canceling" CONFLICT Job No "The job is being canceled";
    JobEnded "job-ended" CONFLICT Job No "The job has ended";
    JobNotFailed "job-not-failed" CONFLICT Job No "Only a failed job can be reopened";
    JobFailed "job-failed" BAD_GATEWAY Provider No "The job failed";
    JobCanceled "job-canceled" CONFLICT Job No "The job was canceled";
    JobIndeterminate "job-indeterminate" CONFLICT Job No "Nobody will ever know whether it happened";
    AttemptUnknown "attempt-unknown" GATEWAY_TIMEOUT Provider No "An attempt may have happened, and nobody knows yet";
    StillRunning "still-running" GATEWAY_TIMEOUT Provider Yes "The job is still running";
    // What is behind.
    ProviderUnreachable "provider-unreachable" BAD_GATEWAY Provider Yes "The provider was not reached";
    ProviderTimeout "provider-timeout" GATEWAY_TIMEOUT Provider Yes "The provider did not answer completely";
    StoreUnavailable "store-unavailable" SERVICE_UNAVAILABLE Store Yes "The store cannot be used now";
    NotDurable "not-durable" SERVICE_UNAVAILABLE Store Yes "It is not as durable yet as it must be";
    StoreCorrupt "store-corrupt" INTERNAL_SERVER_ERROR Store No "The store holds something that nobody may interpret";
    StoreRefused "store-refused" INTERNAL_SERVER_ERROR Store No "The store refuses";
    NotReady "not-ready" SERVICE_UNAVAILABLE Store Yes "No new job could be taken now";
    WaitersTooMany "waiters-too-many" SERVICE_UNAVAILABLE Gateway Yes "Too many requests wait already";
    Overloaded "overloaded" SERVICE_UNAVAILABLE Gateway Yes "Too much is in flight";
    Stopping "stopping" SERVICE_UNAVAILABLE Gateway Yes "This gateway is stopping";
    Internal "internal" INTERNAL_SERVER_ERROR Gateway Yes "Something broke here";
}

struct Facts {
    name: &'static str,
    title: &'static str,
    status: StatusCode,
    source: Source,
    retry: Retry,
}

/// Who has the problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Gateway,
    Store,
    Provider,
    Job,
}

impl Source {
    fn as_str(self) -> &'static str {
        match self {
            Source::Gateway => "gateway",
            Source::Store => "store",
            Source::Provider => "provider",
            Source::Job => "job",
        }
    }
}

/// Whether the same request may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retry {
    Yes,
    No,
}

/// Lists every type of problem that this gateway may answer with.
pub fn problem_types() -> Vec<String> {
    Kind::ALL.iter().map(|kind| format!("{TYPE_PREFIX}{}", kind.facts().name)).collect()
}

/// How an operation may refuse, where there is no more to say of it.
#[derive(utoipa::IntoResponses)]
#[expect(dead_code, reason = "a description; the answers are made from a `Problem`")]
pub(crate) enum Refusals {
    /// Refused
    #[response(status = "4XX", content_type = "application/problem+json")]
    Refused(Document),
    /// Not now
    #[response(status = "5XX", content_type = "application/problem+json")]
    NotNow(Document),
}

/// A problem document (RFC 9457), `application/problem+json`. Further members depend on the type.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Problem)]
pub(crate) struct Document {
    /// `urn:onejob:problem:<name>`: stable.
    #[serde(rename = "type")]
    kind: String,
    /// The type in words.
    title: &'static str,
    /// The HTTP status.
    status: u16,
    /// This occurrence, for people.
    detail: String,
    /// The same once more, where official clients of model providers look for it.
    message: String,
    /// Whether the same request with the same key may succeed later.
    retryable: bool,
    /// Who has the problem: `gateway`, `store`, `provider` or `job`.
    source: &'static str,
    /// The job, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    job_id: Option<String>,
    #[serde(flatten)]
    #[schema(ignore)]
    members: Map<String, Value>,
}

/// A problem on its way out.
#[derive(Debug)]
pub(crate) struct Problem(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: Kind,
    status: StatusCode,
    detail: String,
    job: Option<JobId>,
    retry_after: Option<Duration>,
    members: Map<String, Value>,
    headers: HeaderMap,
}

impl Problem {
    pub(crate) fn new(kind: Kind, detail: impl Into<String>) -> Self {
        let status = kind.facts().status;
        let retry_after = (status == StatusCode::SERVICE_UNAVAILABLE).then_some(RETRY_AFTER);
        Problem(Box::new(Inner {
            kind,
            status,
            detail: detail.into(),
            job: None,
            retry_after,
            members: Map::new(),
            headers: HeaderMap::new(),
        }))
    }

    pub(crate) fn job(mut self, id: JobId) -> Self {
        self.0.job = Some(id);
        self
    }

    pub(crate) fn member(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.members.insert(name.to_owned(), value.into());
        self
    }

    /// What is wrong with a document, each fault with its place and its rule.
    pub(crate) fn faults(self, invalid: &Invalid) -> Self {
        let faults = serde_json::to_value(&invalid.faults).expect("faults are plain texts");
        self.member("faults", faults)
    }

    pub(crate) fn retry_after(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    pub(crate) fn status(mut self, status: StatusCode) -> Self {
        self.0.status = status;
        self
    }

    pub(crate) fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.0.headers.insert(name, value);
        self
    }

    /// The document, as it is answered.
    pub(crate) fn document(&self) -> Document {
        let Inner { kind, status, detail, job, members, .. } = &*self.0;
        let facts = kind.facts();
        Document {
            kind: format!("{TYPE_PREFIX}{}", facts.name),
            title: facts.title,
            status: status.as_u16(),
            message: detail.clone(),
            detail: detail.clone(),
            retryable: facts.retry == Retry::Yes,
            source: facts.source.as_str(),
            job_id: job.map(|id| id.to_string()),
            members: members.clone(),
        }
    }

    /// No job of that id for this caller: absent and another owner's look the same.
    pub(crate) fn job_unknown() -> Self {
        Problem::new(Kind::JobUnknown, "there is no such job or attempt, or it is not yours")
    }

    pub(crate) fn gone(gone: &Gone) -> Self {
        Problem::new(
            Kind::JobGone,
            format!("job {} ended as {} and is no longer kept; it does not run again", gone.id, gone.state),
        )
        .job(gone.id)
        .member("state", gone.state.as_str())
        .member("ended_ms", gone.ended_ms)
    }

    /// An error of the store that was met while doing something about a job.
    pub(crate) fn store(error: &StoreError, again: &str) -> Self {
        match error {
            StoreError::NotExecuted { code, .. } => {
                tracing::debug!(%error, "answered 503");
                Problem::new(
                    Kind::StoreUnavailable,
                    format!(
                        "the store did not take the call ({code}): nothing happened; send the same request with the same key again"
                    ),
                )
            }
            StoreError::Ambiguous { .. } => {
                tracing::debug!(%error, "answered 503");
                Problem::new(Kind::StoreUnavailable, format!("the store may have taken the call; {again}"))
            }
            StoreError::NotDurable { have, want } => {
                tracing::debug!(%error, "answered 503");
                let detail = match want {
                    Want::Disk => format!("it is not known to be on the disk yet; {again}"),
                    Want::Replicas(_) => format!("{have} of {want} have it yet; {again}"),
                };
                Problem::new(Kind::NotDurable, detail).member("have", *have).member("want", want.count())
            }
            StoreError::Fatal { code, .. } => {
                tracing::error!(%error, "the store holds or refuses something that needs a person");
                match code.as_str() {
                    // It is said before anything is looked at: once the gateway has its password, the same request succeeds.
                    "NOAUTH" => Problem::new(
                        Kind::StoreUnavailable,
                        "the store did not take the call (NOAUTH): nothing happened; send the same request with the same key again",
                    ),
                    "BADBLOB" => {
                        Problem::new(Kind::StoreCorrupt, "bytes that the record names are missing or are others (BADBLOB)")
                    }
                    "BADRECORD" | "BADSCHEMA" => {
                        Problem::new(Kind::StoreCorrupt, format!("the job's record cannot be read ({code})"))
                    }
                    _ => Problem::new(Kind::StoreRefused, format!("the store refuses the call ({code})")),
                }
            }
        }
    }
}

/// What to do after an error of the store that may have left a call undecided.
pub(crate) const SAME_REQUEST: &str = "send the same request again";
const SAME_KEY: &str = "the job may exist: send the same request with the same key again";

impl From<SubmitError> for Problem {
    fn from(error: SubmitError) -> Self {
        let detail = error.to_string();
        match error {
            SubmitError::UnknownRoute(_) => Problem::new(Kind::RouteUnknown, detail),
            SubmitError::Unrenderable(_) => Problem::new(Kind::RequestUnrenderable, detail),
            SubmitError::InvalidInput(invalid) => Problem::new(Kind::InputInvalid, detail).faults(&invalid),
            SubmitError::Conflict(id) => Problem::new(Kind::KeyConflict, detail).job(id),
            SubmitError::Gone(gone) => Problem::gone(&gone),
            SubmitError::Collision => Problem::new(Kind::KeyCollision, detail),
            SubmitError::Stopping => {
                Problem::new(Kind::Stopping, "this gateway is stopping; the same request again meets another")
            }
            SubmitError::Store(error) => Problem::store(&error, SAME_KEY),
        }
    }
}

impl From<ReadError> for Problem {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::NotFound => Problem::job_unknown(),
            ReadError::Gone(gone) => Problem::gone(&gone),
            ReadError::TooManyWaiters { limit } => {
                let detail = format!("{limit} requests wait already, the limit of this gateway");
                Problem::new(Kind::WaitersTooMany, detail).member("limit", limit)
            }
            ReadError::Store(error) => Problem::store(&error, SAME_REQUEST),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let document = self.document();
        let Inner { status, retry_after, headers, .. } = *self.0;
        let body = serde_json::to_vec(&document).expect("a problem is plain data");
        let mut response = (status, body).into_response();
        let out = response.headers_mut();
        out.extend(headers);
        out.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        out.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        out.insert(SHOULD_RETRY, HeaderValue::from_static(if document.retryable { "true" } else { "false" }));
        if let Some(after) = retry_after {
            out.insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(after)));
        }
        response
    }
}

/// Whole seconds, rounded up: coming back a little late is better than a little early.
pub(crate) fn whole_seconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis().div_ceil(1000)).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_type_is_another_and_plain_lower_case() {
        let types = problem_types();
        assert_eq!(types.iter().collect::<BTreeSet<_>>().len(), types.len());
        for name in types {
            let name = name.strip_prefix(TYPE_PREFIX).unwrap();
            assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{name}");
        }
    }

    #[test]
    fn where_redis_is_stays_inside() {
        let error = StoreError::Ambiguous { detail: "10.0.0.7:6379 broke".to_owned() };
        let problem = format!("{:?}", Problem::store(&error, SAME_REQUEST));
        assert!(!problem.contains("10.0.0.7"), "{problem}");
    }
}
