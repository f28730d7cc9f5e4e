//! A job as JSON: what a submit and a read answer with, but for the headers.
//!
//! Plain data. A result is shown as what it is: JSON as it was written, text as text, anything else as base64. Attempts' tokens and
//! request hashes are not in it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::attempt::Attempt;
use crate::job::{Event, Job};
use crate::provider;
use crate::server::body::is_json;

/// A job, as it stands. Times are Unix ms of Redis' clock; what is absent is null.
#[derive(Serialize, ToSchema)]
#[schema(as = Job)]
pub(crate) struct JobDocument<'a> {
    /// A UUIDv8: it sorts by the time of creation.
    id: String,
    owner: &'a str,
    route: &'a str,
    /// `exclusive` or `race`.
    class: &'static str,
    /// `pending`, `running`, `unknown`, `canceling`; ended: `succeeded`, `failed`, `canceled`, `indeterminate`.
    state: &'static str,
    /// How many hands the result passed through: every ending and every reopening adds one.
    version: u64,
    /// How many changes the job has seen.
    revision: u64,
    created_ms: u64,
    updated_ms: u64,
    ended_ms: Option<u64>,
    deadline_ms: Option<u64>,
    /// When the next attempt may begin.
    next_at_ms: Option<u64>,
    /// Until when input and result are kept.
    retain_until_ms: Option<u64>,
    /// The attempt whose result is the job's.
    completed_by: Option<u32>,
    /// Which provider's result it is.
    provider: Option<&'a str>,
    /// Which model answered, if the provider said so.
    model: Option<&'a str>,
    canceled_by: Option<&'a str>,
    /// Whether a person must find out what became of it: it has been unknown for longer than its route allows.
    needs_operator: bool,
    /// Why it is not going well.
    reason: Option<&'a str>,
    attempts: Vec<AttemptDocument<'a>>,
    /// The last events off the happy path.
    events: Vec<EventDocument<'a>>,
    /// Of a job that succeeded its result; of one that failed the provider's refusal, if it gave one. Not there otherwise, and
    /// not in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<ResultDocument<'a>>,
}

/// An attempt of a job.
#[derive(Serialize, ToSchema)]
#[schema(as = Attempt)]
struct AttemptDocument<'a> {
    number: u32,
    /// `starting`, `running`, `succeeded`, `failed`, `unknown`, `aborted`, `canceled`, `abandoned`, `discarded`.
    state: &'static str,
    provider: &'a str,
    gateway: &'a str,
    started_ms: u64,
    /// When it closed or became unknown.
    ended_ms: Option<u64>,
    /// Until when its holder keeps it.
    lease_until_ms: Option<u64>,
    reason: Option<&'a str>,
    /// The provider's own name for the work.
    remote_id: Option<&'a str>,
    model: Option<&'a str>,
    /// The certificate under which it was allowed. Not there where none was needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate: Option<&'a str>,
}

/// Something that happened off the happy path.
#[derive(Serialize, ToSchema)]
#[schema(as = Event)]
struct EventDocument<'a> {
    at_ms: u64,
    event: &'a str,
    /// Which attempt; null for the job itself.
    attempt: Option<u32>,
    actor: Option<&'a str>,
    detail: Option<&'a str>,
}

/// What the provider answered.
#[derive(Serialize, ToSchema)]
#[schema(as = Result)]
struct ResultDocument<'a> {
    status: u16,
    content_type: Option<String>,
    /// `json`: the body is the provider's JSON, as it wrote it. `text`: its text. `base64`: its bytes.
    body_encoding: &'static str,
    #[schema(value_type = serde_json::Value)]
    body: BodyDocument<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum BodyDocument<'a> {
    Json(&'a RawValue),
    Text(&'a str),
    Base64(String),
}

/// Some jobs.
#[derive(Serialize, ToSchema)]
#[schema(as = JobList)]
pub(crate) struct JobList<'a> {
    pub(crate) jobs: Vec<JobDocument<'a>>,
    /// The masters of a cluster that could not be asked: jobs of theirs may be missing. Absent if none is.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub(crate) incomplete: &'a [String],
}

fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

fn some_ms(ms: u64) -> Option<u64> {
    (ms > 0).then_some(ms)
}

impl<'a> JobDocument<'a> {
    pub(crate) fn of(job: &'a Job, result: Option<&'a provider::Response>) -> Self {
        let winner = job.winner();
        JobDocument {
            id: job.id.to_string(),
            owner: &job.owner,
            route: &job.route,
            class: job.class.as_str(),
            state: job.state.as_str(),
            version: job.version,
            revision: job.revision,
            created_ms: job.created_ms,
            updated_ms: job.updated_ms,
            ended_ms: some_ms(job.ended_ms),
            deadline_ms: some_ms(job.deadline_ms),
            next_at_ms: some_ms(job.next_at_ms),
            retain_until_ms: some_ms(job.retain_until_ms),
            completed_by: (job.completed_by > 0).then_some(job.completed_by),
            provider: winner.map(|attempt| attempt.provider.as_str()),
            model: winner.and_then(|attempt| some(&attempt.model)),
            canceled_by: some(&job.canceled_by),
            needs_operator: job.needs_operator(),
            reason: some(&job.reason),
            attempts: job.attempts.iter().map(AttemptDocument::of).collect(),
            events: job.events.iter().map(EventDocument::of).collect(),
            result: result.map(ResultDocument::of),
        }
    }
}

impl<'a> AttemptDocument<'a> {
    pub(crate) fn of(attempt: &'a Attempt) -> Self {
        AttemptDocument {
            number: attempt.number,
            state: attempt.state.as_str(),
            provider: &attempt.provider,
            gateway: &attempt.gateway,
            started_ms: attempt.started_ms,
            ended_ms: some_ms(attempt.ended_ms),
            lease_until_ms: some_ms(attempt.lease_ms),
            reason: some(&attempt.reason),
            remote_id: some(&attempt.remote_id),
            model: some(&attempt.model),
            certificate: some(&attempt.certificate),
        }
    }
}

impl<'a> EventDocument<'a> {
    pub(crate) fn of(event: &'a Event) -> Self {
        EventDocument {
            at_ms: event.at_ms,
            event: &event.event,
            attempt: (event.attempt > 0).then_some(event.attempt),
            actor: some(&event.actor),
            detail: some(&event.detail),
        }
    }
}

impl<'a> ResultDocument<'a> {
    pub(crate) fn of(response: &'a provider::Response) -> Self {
        let content_type = response.headers.iter().find(|(name, _)| name == "content-type").map(|(_, value)| value.clone());
        let raw = content_type.as_deref().filter(|kind| is_json(kind)).and_then(|_| serde_json::from_slice(&response.body).ok());
        let (body_encoding, body) = match (raw, std::str::from_utf8(&response.body)) {
            (Some(raw), _) => ("json", BodyDocument::Json(raw)),
            (None, Ok(text)) => ("text", BodyDocument::Text(text)),
            (None, Err(_)) => ("base64", BodyDocument::Base64(BASE64.encode(&response.body))),
        };
        ResultDocument { status: response.status, content_type, body_encoding, body }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_result_is_shown_as_what_it_is() {
        let shown = |content_type: &str, body: &[u8]| {
            let headers = vec![("content-type".to_owned(), content_type.to_owned())];
            let response = provider::Response { status: 200, headers, body: Arc::from(body) };
            let document = serde_json::to_string(&ResultDocument::of(&response)).unwrap();
            document.split_once("\"body_encoding\":").unwrap().1.to_owned()
        };
        assert_eq!(
            shown("application/json", b"{\"n\": 1.00, \"n\":9007199254740993}"),
            "\"json\",\"body\":{\"n\": 1.00, \"n\":9007199254740993}}"
        );
        assert_eq!(shown("text/plain", b"{}"), "\"text\",\"body\":\"{}\"}");
        assert_eq!(shown("application/json", b"{"), "\"text\",\"body\":\"{\"}");
        assert_eq!(shown("image/png", &[0xff]), "\"base64\",\"body\":\"/w==\"}");
    }
}
