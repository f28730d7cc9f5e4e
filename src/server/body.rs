//! Request bodies: complete, in time, within one limit each and one for all together.

use std::sync::Arc;

use axum::body::Body;
use http::HeaderMap;
use http::header;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use serde::de::DeserializeOwned;
use tokio::sync::OwnedSemaphorePermit;

use crate::server::App;
use crate::server::headers::single;
use crate::server::problem::{Kind, Problem};

/// In which steps a body's share of the memory for bodies grows.
pub(crate) const BODY_STEP_BYTES: usize = 16 << 10;

/// A body, and its share of the memory for bodies.
pub(crate) struct Held {
    pub(crate) bytes: Vec<u8>,
    pub(crate) share: Option<OwnedSemaphorePermit>,
}

/// Reads a whole body.
///
/// # Errors
/// Too large, too slow, broken off, or too many bodies at once. The connection ends with the answer: the rest is not read.
pub(crate) async fn read(app: &Arc<App>, body: Body) -> Result<Held, Problem> {
    let limit = app.options.body_bytes_max;
    let too_large = |bytes: u64| {
        let detail = format!("the body has {bytes} bytes or more; the limit is {limit}");
        Problem::new(Kind::BodyTooLarge, detail).member("limit", limit)
    };
    let declared = body.size_hint().lower();
    if declared > limit as u64 {
        return Err(too_large(declared));
    }
    let deadline = tokio::time::Instant::now() + app.options.body_timeout;
    let mut held = Held { bytes: Vec::new(), share: None };
    let mut body = body;
    loop {
        let frame = match tokio::time::timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => return Ok(held),
            Ok(Some(Err(_))) => return Err(Problem::new(Kind::RequestInvalid, "the body broke off")),
            Err(_) => {
                let limit_ms = app.options.body_timeout.as_millis();
                let detail = format!("the body was not complete after {limit_ms} ms, the limit");
                return Err(Problem::new(Kind::BodyTimeout, detail));
            }
        };
        // What is not data is trailers; nothing here reads them.
        let Ok(data) = frame.into_data() else { continue };
        let length = held.bytes.len() + data.len();
        if length > limit {
            return Err(too_large(length as u64));
        }
        held.grow(app, length)?;
        held.bytes.extend_from_slice(&data);
    }
}

impl Held {
    /// Takes what is missing for a length from the memory for bodies.
    fn grow(&mut self, app: &App, length: usize) -> Result<(), Problem> {
        let has = self.share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = length.div_ceil(BODY_STEP_BYTES).saturating_sub(has);
        if missing == 0 {
            return Ok(());
        }
        let more = room(app, missing * BODY_STEP_BYTES)?;
        match &mut self.share {
            Some(share) => share.merge(more),
            None => self.share = Some(more),
        }
        Ok(())
    }
}

/// Takes so many bytes of the memory for bodies, at once or not at all: who waited would hold what others need.
///
/// # Errors
/// There are too many bodies at once.
pub(crate) fn room(app: &App, bytes: usize) -> Result<OwnedSemaphorePermit, Problem> {
    let steps = u32::try_from(bytes.div_ceil(BODY_STEP_BYTES)).unwrap_or(u32::MAX);
    Arc::clone(&app.bodies).try_acquire_many_owned(steps).map_err(|_| {
        let limit = app.options.bodies_bytes_max;
        let detail = format!("the request bodies in flight fill the {limit} bytes that are meant for them; nothing happened");
        Problem::new(Kind::Overloaded, detail).member("limit", limit)
    })
}

/// Insists that a body, if there is one, is declared as JSON: a browser's form cannot send that without asking first.
pub(crate) fn insist_on_json(headers: &HeaderMap) -> Result<(), Problem> {
    let content_type = single(headers, &header::CONTENT_TYPE)?.unwrap_or_default();
    if is_json(content_type) {
        return Ok(());
    }
    let shown: String = content_type.chars().take(64).collect();
    Err(Problem::new(Kind::MediaTypeUnsupported, format!("the content type {shown:?} is not application/json")))
}

/// Whether a content type is JSON's.
pub(crate) fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || essence.ends_with("+json")
}

/// Reads a JSON document. What is wrong is told by place, never by repeating the text.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8], expected: &str) -> Result<T, Problem> {
    serde_json::from_slice(bytes).map_err(|error| unreadable(&error, expected))
}

pub(crate) fn unreadable(error: &serde_json::Error, expected: &str) -> Problem {
    let what = match error.classify() {
        serde_json::error::Category::Data => "the body has other members or values than expected",
        serde_json::error::Category::Io | serde_json::error::Category::Syntax => "the body is not JSON",
        serde_json::error::Category::Eof => "the body's JSON is not complete",
    };
    let (line, column) = (error.line(), error.column());
    Problem::new(Kind::RequestInvalid, format!("{what}, at line {line}, column {column}; expected: {expected}"))
}
