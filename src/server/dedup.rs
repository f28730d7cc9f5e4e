//! Clicks over HTTP: which of them are new, at once or in two phases. The contract is `docs/DEDUP.md`, "Over HTTP".
//!
//! A JSON array is one batch: every click has its id before anything is asked, so that one that has none leaves nothing behind.
//! Lines of JSON are many, see [`lines`]. A batch's token is made of its owner, its key and its number alone: who sends the same
//! again is told the same, by whichever gateway.
//!
//! Deliberately not here: what is remembered, and for how long (`crate::dedup`); a click's other members, which nobody keeps.

mod lines;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Query, RawPathParams, Request, State};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{HeaderMap, StatusCode, header};
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use crate::config::Role;
use crate::dedup::{BATCH_IDS_MAX, BatchToken, Claimed, ClickId, Committed, Dedup, DedupError, FieldError, Stream, Verdict};
use crate::fingerprint::unique_json;
use crate::job::{Key, Owner};
use crate::metrics;
use crate::server::auth::Caller;
use crate::server::headers::{IdempotencyKey, single};
use crate::server::jobs::json;
use crate::server::problem::{Kind, Problem, Refusals};
use crate::server::{Activity, App, body};

/// Lines of clicks, one JSON object each.
const NDJSON: &str = "application/x-ndjson";
/// What to do after an answer that is not whole.
const SAME_CLICKS: &str = "send the same clicks with the same key again: those that have a verdict are told the same";

/// What became of each click, in the order of the clicks.
#[derive(Serialize, ToSchema)]
#[schema(as = Clicks)]
struct ClicksDocument<'a> {
    stream: &'a str,
    /// How many were sent.
    clicks: usize,
    /// How many of them have each verdict.
    counts: BTreeMap<&'static str, u64>,
    /// Of a check `first`, `duplicate`; of a claim also `held`; of a commit `committed`, `lost`.
    verdicts: Vec<&'static str>,
}

/// How clicks that come in lines are told of.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct CheckQuery {
    /// Lines that are checked at once, 1 to 1000 (the default). The same each time that the same lines are sent under the same key.
    batch: Option<usize>,
}

/// How often it is looked how full the streams are.
const LOOK_PAUSE: Duration = Duration::from_secs(15);

/// Tells how full the streams are until the gateway stops. What cannot be read stays as it was: whoever asks about clicks hears why.
pub(super) async fn watch_levels(app: Arc<App>) {
    loop {
        for (name, dedup) in &app.streams {
            // So that a gateway that few ask, or that has just started, need not read for long when somebody does.
            if let Err(error) = dedup.follow().await {
                tracing::debug!(stream = name, %error, "what others have added to a mirrored stream was not read");
            }
            match dedup.level().await {
                Ok(level) => metrics::dedup_level(name, level.ids, level.buckets, level.bytes),
                Err(error) => tracing::debug!(stream = name, %error, "it is not known how full a stream is"),
            }
        }
        tokio::select! {
            () = app.stopping.cancelled() => return,
            () = tokio::time::sleep(LOOK_PAUSE) => {}
        }
    }
}

/// Says of each click whether it is seen for the first time.
///
/// As a JSON array of objects, up to 10,000: one answer, with the verdicts in their order. As `application/x-ndjson`, an object a
/// line: an answer of lines, `{"index":0,"verdict":"first"}` for each click in order while they still come, then one with `done`.
/// Without that line, or with `"done":false` and a `problem`, the answer is not whole. The same key and clicks are told the same
/// for as long as the stream keeps verdicts; after 503 they complete what was begun.
#[utoipa::path(
    post, path = "/v1/dedup/{stream}", operation_id = "check_clicks", tag = "clicks",
    request_body(content(
        (Vec<serde_json::Map<String, serde_json::Value>> = "application/json"),
        (String = "application/x-ndjson"),
    )),
    params(
        ("stream" = String, Path, description = "The stream's name"),
        ("Idempotency-Key" = String, Header,
         description = "The client's name for these clicks: a quoted string or bare, 1 to 255 visible characters"),
        CheckQuery,
    ),
    responses(
        (status = 200, description = "What each click is", body = inline(ClicksDocument)),
        Refusals,
    ),
)]
pub(crate) async fn check_clicks(
    State(app): State<Arc<App>>,
    caller: Caller,
    IdempotencyKey(key): IdempotencyKey,
    params: RawPathParams,
    query: Result<Query<CheckQuery>, axum::extract::rejection::QueryRejection>,
    request: Request,
) -> Result<Response, Problem> {
    caller.must(Role::Submit)?;
    let dedup = stream(&app, &params)?;
    let batch_lines = lines_of_a_batch(query)?;
    let (Parts { headers, mut extensions, .. }, body) = request.into_parts();
    let batches = Batches { owner: caller.owner, key };
    match media_type(&headers)? {
        Media::Lines => {
            let lines = batch_lines.unwrap_or(lines::BATCH_LINES_MAX);
            lines::check(app, dedup, batches, lines, body, extensions.remove::<Arc<Activity>>()).await
        }
        Media::Array => {
            if batch_lines.is_some() {
                return Err(Problem::new(Kind::RequestInvalid, format!("batch is for {NDJSON}; a JSON array is one batch")));
            }
            let ids = ids(&app, &dedup, body).await?;
            let asked = dedup.clone();
            let told = app.detached(async move { asked.check(&ids, batches.token(0)).await }).await?;
            told.map(|verdicts| answer(&dedup, verdicts)).map_err(|error| refused(&app, &dedup, error))
        }
    }
}

/// Keeps those clicks that are new from everybody else for the stream's lease, without remembering them yet.
///
/// For who can die between being told `first` and having written a click down. Then commit those that were `first`, with the same
/// key. `held`: somebody else has claimed it, and whether it counts is not known yet. The same key is told the same within the
/// lease.
#[utoipa::path(
    post, path = "/v1/dedup/{stream}/claim", operation_id = "claim_clicks", tag = "clicks",
    request_body(content = Vec<serde_json::Map<String, serde_json::Value>>, content_type = "application/json"),
    params(
        ("stream" = String, Path, description = "The stream's name"),
        ("Idempotency-Key" = String, Header,
         description = "The client's name for this claim: a quoted string or bare, 1 to 255 visible characters"),
    ),
    responses(
        (status = 200, description = "What each click is", body = inline(ClicksDocument)),
        Refusals,
    ),
)]
pub(crate) async fn claim_clicks(
    State(app): State<Arc<App>>,
    caller: Caller,
    IdempotencyKey(key): IdempotencyKey,
    params: RawPathParams,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let Phase { dedup, ids, token } = phase(&app, caller, key, &params, &headers, body).await?;
    let asked = dedup.clone();
    let told = app.detached(async move { asked.claim(&ids, token).await }).await?;
    told.map(|verdicts| answer(&dedup, verdicts)).map_err(|error| refused(&app, &dedup, error))
}

/// Remembers clicks that were claimed with this key: all that were `first`, or a part of them, once for each key.
///
/// `lost`: the claim had lapsed, and somebody else was faster; what was written down of it does not count.
#[utoipa::path(
    post, path = "/v1/dedup/{stream}/commit", operation_id = "commit_clicks", tag = "clicks",
    request_body(content = Vec<serde_json::Map<String, serde_json::Value>>, content_type = "application/json"),
    params(
        ("stream" = String, Path, description = "The stream's name"),
        ("Idempotency-Key" = String, Header, description = "That of the claim"),
    ),
    responses(
        (status = 200, description = "What each click is", body = inline(ClicksDocument)),
        Refusals,
    ),
)]
pub(crate) async fn commit_clicks(
    State(app): State<Arc<App>>,
    caller: Caller,
    IdempotencyKey(key): IdempotencyKey,
    params: RawPathParams,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let Phase { dedup, ids, token } = phase(&app, caller, key, &params, &headers, body).await?;
    let asked = dedup.clone();
    let told = app.detached(async move { asked.commit(&ids, token).await }).await?;
    told.map(|verdicts| answer(&dedup, verdicts)).map_err(|error| refused(&app, &dedup, error))
}

/// Gives clicks that were claimed with this key back at once, so that they count for whoever comes next.
///
/// What is committed, or somebody else's, stays as it is. A key that was released is not to be used again.
#[utoipa::path(
    post, path = "/v1/dedup/{stream}/release", operation_id = "release_clicks", tag = "clicks",
    request_body(content = Vec<serde_json::Map<String, serde_json::Value>>, content_type = "application/json"),
    params(
        ("stream" = String, Path, description = "The stream's name"),
        ("Idempotency-Key" = String, Header, description = "That of the claim"),
    ),
    responses(
        (status = 204, description = "They are given back"),
        Refusals,
    ),
)]
pub(crate) async fn release_clicks(
    State(app): State<Arc<App>>,
    caller: Caller,
    IdempotencyKey(key): IdempotencyKey,
    params: RawPathParams,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let Phase { dedup, ids, token } = phase(&app, caller, key, &params, &headers, body).await?;
    let told = app.detached(async move { dedup.release(&ids, token).await }).await?;
    told.map_err(|error| Problem::store(&error, "send the same clicks with the same key again, or let the claims lapse"))?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// What each of the two phases, and giving back, is asked with.
struct Phase {
    dedup: Dedup,
    ids: Vec<ClickId>,
    /// The same for a claim, its commit and its release.
    token: BatchToken,
}

async fn phase(
    app: &Arc<App>,
    caller: Caller,
    key: Key,
    params: &RawPathParams,
    headers: &HeaderMap,
    body: Body,
) -> Result<Phase, Problem> {
    caller.must(Role::Submit)?;
    let dedup = stream(app, params)?;
    body::insist_on_json(headers)?;
    let ids = ids(app, &dedup, body).await?;
    let token = Batches { owner: caller.owner, key }.token(0);
    Ok(Phase { dedup, ids, token })
}

/// How the batches of one request are called.
struct Batches {
    owner: Owner,
    key: Key,
}

impl Batches {
    /// Of the batch of this number, from 0: nothing of the gateway is in it, nor of how the bytes came.
    fn token(&self, number: u64) -> BatchToken {
        // Neither an owner nor a key of a header has a line feed.
        BatchToken::named(&format!("http\n{}\n{}\n{number}", self.owner.as_str(), self.key.as_str()))
    }
}

fn stream(app: &App, params: &RawPathParams) -> Result<Dedup, Problem> {
    let name = params.iter().find(|(name, _)| *name == "stream").map_or("", |(_, name)| name);
    app.streams.get(name).cloned().ok_or_else(|| {
        let shown: String = name.chars().take(crate::dedup::STREAM_NAME_BYTES_MAX).collect();
        Problem::new(Kind::StreamUnknown, format!("there is no stream of clicks {shown:?}"))
    })
}

fn lines_of_a_batch(
    query: Result<Query<CheckQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Option<usize>, Problem> {
    let max = lines::BATCH_LINES_MAX;
    let invalid = |detail: String| Problem::new(Kind::RequestInvalid, detail);
    let Ok(Query(CheckQuery { batch })) = query else {
        return Err(invalid(format!("the query is not understood; expected: batch=1..{max}")));
    };
    match batch {
        Some(batch) if !(1..=max).contains(&batch) => Err(invalid(format!("batch {batch} is not within 1 to {max}"))),
        Some(_) | None => Ok(batch),
    }
}

enum Media {
    Array,
    Lines,
}

fn media_type(headers: &HeaderMap) -> Result<Media, Problem> {
    let content_type = single(headers, &header::CONTENT_TYPE)?.unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case(NDJSON) {
        return Ok(Media::Lines);
    }
    if body::is_json(content_type) {
        return Ok(Media::Array);
    }
    let shown: String = content_type.chars().take(64).collect();
    Err(Problem::new(Kind::MediaTypeUnsupported, format!("the content type {shown:?} is neither application/json nor {NDJSON}")))
}

/// The ids of a JSON array of clicks, all of them or none.
async fn ids(app: &Arc<App>, dedup: &Dedup, body: Body) -> Result<Vec<ClickId>, Problem> {
    let held = body::read(app, body).await?;
    let expected = "an array of clicks, JSON objects";
    let clicks: Clicks<'_> = serde_json::from_slice(&held.bytes).map_err(|error| body::unreadable(&error, expected))?;
    if clicks.count > BATCH_IDS_MAX {
        let detail = format!("there are {} clicks; the limit is {BATCH_IDS_MAX}, or send them as {NDJSON}", clicks.count);
        return Err(Problem::new(Kind::ClicksTooMany, detail).member("limit", BATCH_IDS_MAX));
    }
    let id = |(index, click): (usize, &&RawValue)| {
        let wrong = |wrong: Wrong| wrong.problem(dedup.stream(), &format!("click {index}")).member("index", index);
        click_id(dedup.stream(), click.get().as_bytes()).map_err(wrong)
    };
    clicks.first.iter().enumerate().map(id).collect()
}

/// The elements of an array, as they are written; beyond so many they are counted only.
struct Clicks<'a> {
    first: Vec<&'a RawValue>,
    count: usize,
}

impl<'de: 'a, 'a> Deserialize<'de> for Clicks<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements;

        impl<'de> Visitor<'de> for Elements {
            type Value = Clicks<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Clicks<'de>, A::Error> {
                let mut first = Vec::new();
                while first.len() < BATCH_IDS_MAX {
                    match elements.next_element::<&RawValue>()? {
                        Some(element) => first.push(element),
                        None => return Ok(Clicks { count: first.len(), first }),
                    }
                }
                let mut count = first.len();
                while elements.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Clicks { first, count })
            }
        }

        deserializer.deserialize_seq(Elements)
    }
}

/// Why a click has no id; in words that repeat nothing of it but the name of a declared field.
enum Wrong {
    /// It is no JSON: at which column.
    Syntax {
        column: usize,
    },
    Click {
        what: String,
        field: Option<String>,
    },
}

impl Wrong {
    fn problem(self, stream: &Stream, place: &str) -> Problem {
        let name = &stream.name;
        match self {
            Wrong::Syntax { column } => {
                let detail = format!("stream {name:?}: {place} is not JSON, at column {column}; expected: a JSON object");
                Problem::new(Kind::RequestInvalid, detail)
            }
            Wrong::Click { what, field } => {
                let problem = Problem::new(Kind::ClickInvalid, format!("stream {name:?}: {place}: {what}"));
                match field {
                    Some(field) => problem.member("field", field),
                    None => problem,
                }
            }
        }
    }
}

/// The id of a click.
fn click_id(stream: &Stream, text: &[u8]) -> Result<ClickId, Wrong> {
    let click = unique_json(text).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => {
            Wrong::Click { what: "an object in it names a member twice".to_owned(), field: None }
        }
        serde_json::error::Category::Io | serde_json::error::Category::Syntax | serde_json::error::Category::Eof => {
            Wrong::Syntax { column: error.column() }
        }
    })?;
    if !click.is_object() {
        let what = match click {
            Value::Null => "null",
            Value::Bool(_) => "true or false",
            Value::Number(_) => "a number",
            Value::String(_) => "a text",
            Value::Array(_) | Value::Object(_) => "an array",
        };
        return Err(Wrong::Click { what: format!("it is {what}, and a click is an object"), field: None });
    }
    stream.id_of_json(&click).map_err(|error| {
        let what = error.to_string();
        let (FieldError::Missing { field } | FieldError::Unusable { field, .. } | FieldError::TooLong { field, .. }) = error;
        Wrong::Click { what, field: Some(field) }
    })
}

/// A verdict's word, of those that there are.
trait Word: Copy {
    const WORDS: &'static [&'static str];

    fn word(self) -> &'static str;
}

impl Word for Verdict {
    const WORDS: &'static [&'static str] = &["first", "duplicate"];

    fn word(self) -> &'static str {
        match self {
            Verdict::First => "first",
            Verdict::Duplicate => "duplicate",
        }
    }
}

impl Word for Claimed {
    const WORDS: &'static [&'static str] = &["first", "duplicate", "held"];

    fn word(self) -> &'static str {
        match self {
            Claimed::First => "first",
            Claimed::Duplicate => "duplicate",
            Claimed::Held => "held",
        }
    }
}

impl Word for Committed {
    const WORDS: &'static [&'static str] = &["committed", "lost"];

    fn word(self) -> &'static str {
        match self {
            Committed::Committed => "committed",
            Committed::Lost => "lost",
        }
    }
}

/// How many clicks have each verdict, those that none has too.
struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    fn of<V: Word>() -> Self {
        Counts(V::WORDS.iter().map(|word| (*word, 0)).collect())
    }

    fn add(&mut self, word: &'static str) {
        *self.0.entry(word).or_default() += 1;
    }
}

fn answer<V: Word>(dedup: &Dedup, verdicts: Vec<V>) -> Response {
    let mut counts = Counts::of::<V>();
    let verdicts: Vec<&'static str> = verdicts.into_iter().map(V::word).collect();
    verdicts.iter().for_each(|word| counts.add(word));
    let document = ClicksDocument { stream: &dedup.stream().name, clicks: verdicts.len(), counts: counts.0, verdicts };
    let mut response = json(StatusCode::OK, &document);
    response.headers_mut().insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}

/// Why a batch has no verdicts, or not all.
fn refused<V>(app: &App, dedup: &Dedup, error: DedupError<V>) -> Problem {
    let name = &dedup.stream().name;
    match error {
        DedupError::TooMany { ids } => {
            let detail = format!("there are {ids} clicks; the limit is {BATCH_IDS_MAX}");
            Problem::new(Kind::ClicksTooMany, detail).member("limit", BATCH_IDS_MAX)
        }
        DedupError::Conflict => {
            let detail = format!("the key stands for other clicks of the stream {name:?}; use another key for these");
            Problem::new(Kind::KeyConflict, detail).status(app.options.conflict.code())
        }
        DedupError::Unanswered { verdicts, unanswered, error } if error.is_of_another_schema() => {
            tracing::error!(stream = name, %error, "others who ask about a stream declare it otherwise");
            let detail =
                format!("others who ask about the stream {name:?} declare it otherwise: it is mirrored for all, or for nobody");
            Problem::new(Kind::StoreRefused, detail).member("clicks", verdicts.len()).member("unanswered", unanswered)
        }
        DedupError::Unanswered { verdicts, unanswered, error } => {
            Problem::store(&error, SAME_CLICKS).member("clicks", verdicts.len()).member("unanswered", unanswered)
        }
    }
}
