//! A `tower` layer that drops duplicate requests before their handler.
//!
//! A request is what its stream's fields make of it ([`fields`], or a function of one's own). One that is new is claimed, goes to the
//! handler, and is remembered when the handler has answered with success; what fails, panics or is given up by its client is given
//! back, and the next one counts. So a click whose handler failed is not lost, at the price of a second call to Redis, and a handler
//! that must not be run twice must bear its lease ([`Remember`]).
//!
//! Requests that come while a call to Redis is under way are the next call's, so that a busy handler costs a call for many and an idle
//! one waits for nobody. Every answer has the header `onejob-dedup`. What is promised is `docs/DEDUP.md`, "As a layer".

mod batches;
mod fields;

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::{Either, Full};
use tokio_util::task::TaskTracker;
use tower_layer::Layer;
use tower_service::Service;

use crate::dedup::{ClickId, Committed, Dedup, FieldError};
use crate::metrics;
use batches::{Batches, Claim, Told};

pub use batches::{LAYER_BATCH_MAX, LAYER_WAITING_MAX};
pub use fields::{Source, fields};

/// What became of a request: `first`, `duplicate`, `held`, `invalid`, `unavailable`; `passed` without a verdict; `released` after the
/// handler failed; `lost` and `uncommitted`, which succeeded and may count twice ([`Remember::AfterSuccess`]).
pub const VERDICT: HeaderName = HeaderName::from_static("onejob-dedup");

/// When a request is remembered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remember {
    /// When the handler has succeeded: a claim before it, a commit before its answer goes out, which takes two calls. A handler that
    /// fails, panics, or whose client goes away gives its request back. One that takes longer than
    /// [`Stream::lease`](super::Stream::lease) may find that another request was faster: it has done its work all the same, and the
    /// answer says `lost`. Where the commit has no answer it says `uncommitted`, and the request may count again after the lease.
    #[default]
    AfterSuccess,
    /// Before the handler is called, which takes one call. What the handler fails at is dropped when it comes again.
    BeforeHandler,
}

/// What becomes of a request of which nobody can say whether it is new.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unavailable {
    /// It is answered 503 with `Retry-After`; the handler is not called.
    #[default]
    Refuse,
    /// The handler is called, and duplicates with it; they are counted (`onejob_dedup_requests_total`, `passed`).
    Pass,
}

type KeyOf = Arc<dyn Fn(&Parts) -> Result<ClickId, FieldError> + Send + Sync>;
type Answers = Arc<dyn Fn(&Parts) -> Response<Bytes> + Send + Sync>;

/// Drops duplicate requests. Cheap to clone; clones share their calls.
#[derive(Clone)]
pub struct DedupLayer {
    dedup: Dedup,
    key_of: KeyOf,
    remember: Remember,
    unavailable: Unavailable,
    succeeded: fn(StatusCode) -> bool,
    on_duplicate: Answers,
    on_held: Answers,
    /// Begun by the first request, so that a layer can be made where no runtime is.
    batches: Arc<OnceLock<Batches>>,
    tasks: TaskTracker,
}

impl DedupLayer {
    /// For requests that are the same when `key_of` says so. How long a request waits for Redis is the patience of `dedup`, twice at
    /// most: [`Dedup::with_patience`] of a second or two becomes an interactive client.
    ///
    /// Duplicates are answered 204, and a request whose like is with the handler 409 with `Retry-After`; a request without a field
    /// 400 with its name. The handler finds the request's [`ClickId`] among its extensions.
    pub fn new(dedup: Dedup, key_of: impl Fn(&Parts) -> Result<ClickId, FieldError> + Send + Sync + 'static) -> Self {
        DedupLayer {
            dedup,
            key_of: Arc::new(key_of),
            remember: Remember::default(),
            unavailable: Unavailable::default(),
            succeeded: |status| status.as_u16() < 400,
            on_duplicate: Arc::new(|_| plain(StatusCode::NO_CONTENT, Bytes::new())),
            on_held: Arc::new(|_| again(StatusCode::CONFLICT, "held", "The same request is being handled")),
            batches: Arc::default(),
            tasks: TaskTracker::new(),
        }
    }

    /// The same, with requests that are remembered then.
    #[must_use]
    pub fn remember(self, remember: Remember) -> Self {
        DedupLayer { remember, batches: Arc::default(), ..self }
    }

    /// The same, where Redis does not answer.
    #[must_use]
    pub fn unavailable(self, unavailable: Unavailable) -> Self {
        DedupLayer { unavailable, ..self }
    }

    /// The same, with a handler that has succeeded when it answers so; any status below 400 otherwise, for a click is often
    /// answered with a redirect.
    #[must_use]
    pub fn succeeded(self, succeeded: fn(StatusCode) -> bool) -> Self {
        DedupLayer { succeeded, ..self }
    }

    /// The same, with this answer to a duplicate: the redirect that the first one got, say.
    #[must_use]
    pub fn on_duplicate(self, answer: impl Fn(&Parts) -> Response<Bytes> + Send + Sync + 'static) -> Self {
        DedupLayer { on_duplicate: Arc::new(answer), ..self }
    }

    /// The same, with this answer to a request whose like has been claimed and not been committed yet.
    #[must_use]
    pub fn on_held(self, answer: impl Fn(&Parts) -> Response<Bytes> + Send + Sync + 'static) -> Self {
        DedupLayer { on_held: Arc::new(answer), ..self }
    }

    /// Waits until everything that was to be committed or given back has been, or cannot be. Call it once the server has stopped: it
    /// waits for every service of this layer to be gone.
    pub async fn close(self) {
        let DedupLayer { batches, tasks, .. } = self;
        drop(batches);
        tasks.close();
        tasks.wait().await;
    }

    fn batches(&self) -> &Batches {
        self.batches.get_or_init(|| Batches::start(&self.dedup, self.remember, &self.tasks))
    }

    fn count(&self, outcome: &'static str) {
        metrics::dedup_request(&self.dedup.stream().name, outcome);
    }

    /// Leads one request to its answer.
    async fn lead<S, B, R>(self, mut inner: S, request: Request<B>) -> Result<Response<Either<R, Full<Bytes>>>, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>>,
    {
        let (mut parts, body) = request.into_parts();
        let id = match (self.key_of)(&parts) {
            Ok(id) => id,
            Err(error) => {
                self.count("invalid");
                return Ok(ours("invalid", problem(StatusCode::BAD_REQUEST, "request-invalid", &error.to_string())));
            }
        };
        parts.extensions.insert(id);
        let told = if self.dedup.knows(&[id]) { Told::Duplicate } else { self.batches().ask(id).await };
        let claim = match told {
            Told::First(claim) => claim,
            Told::Duplicate => {
                self.count("duplicate");
                return Ok(ours("duplicate", (self.on_duplicate)(&parts)));
            }
            Told::Held => {
                self.count("held");
                return Ok(ours("held", (self.on_held)(&parts)));
            }
            Told::Unavailable if self.unavailable == Unavailable::Refuse => {
                self.count("refused");
                let what = "Whether the request is new cannot be said now";
                return Ok(ours("unavailable", again(StatusCode::SERVICE_UNAVAILABLE, "store-unavailable", what)));
            }
            Told::Unavailable => {
                self.count("passed");
                return inner.call(Request::from_parts(parts, body)).await.map(|response| theirs("passed", response));
            }
        };
        let answered = inner.call(Request::from_parts(parts, body)).await;
        let success = answered.as_ref().is_ok_and(|response| (self.succeeded)(response.status()));
        let verdict = settle(claim, success).await;
        self.count(verdict);
        answered.map(|response| theirs(verdict, response))
    }
}

/// Commits what succeeded and gives back what did not.
async fn settle(claim: Option<Claim>, success: bool) -> &'static str {
    match claim {
        None => "first",
        Some(claim) if success => match claim.commit().await {
            Some(Committed::Committed) => "first",
            Some(Committed::Lost) => "lost",
            None => "uncommitted",
        },
        Some(claim) => {
            claim.release().await;
            "released"
        }
    }
}

impl<S> Layer<S> for DedupLayer {
    type Service = DedupService<S>;

    fn layer(&self, inner: S) -> DedupService<S> {
        DedupService { layer: self.clone(), inner }
    }
}

/// A service behind a [`DedupLayer`].
#[derive(Clone)]
pub struct DedupService<S> {
    layer: DedupLayer,
    inner: S,
}

impl<S, B, R> Service<Request<B>> for DedupService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Send + 'static,
    R: Send + 'static,
{
    type Response = Response<Either<R, Full<Bytes>>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that is ready is taken along; the next request asks its clone.
        let next = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, next);
        Box::pin(self.layer.clone().lead(ready, request))
    }
}

fn ours<R>(verdict: &'static str, response: Response<Bytes>) -> Response<Either<R, Full<Bytes>>> {
    marked(verdict, response.map(|body| Either::Right(Full::new(body))))
}

fn theirs<R>(verdict: &'static str, response: Response<R>) -> Response<Either<R, Full<Bytes>>> {
    marked(verdict, response.map(Either::Left))
}

fn marked<R>(verdict: &'static str, mut response: Response<R>) -> Response<R> {
    response.headers_mut().insert(VERDICT, HeaderValue::from_static(verdict));
    response
}

fn plain(status: StatusCode, body: Bytes) -> Response<Bytes> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
}

/// A problem document (RFC 9457) of our types.
fn problem(status: StatusCode, kind: &str, detail: &str) -> Response<Bytes> {
    let document = serde_json::json!({
        "type": format!("urn:onejob:problem:{kind}"),
        "status": status.as_u16(),
        "title": status.canonical_reason().unwrap_or_default(),
        "detail": detail,
        "retryable": status != StatusCode::BAD_REQUEST,
    });
    let mut response = plain(status, Bytes::from(document.to_string()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response
}

/// One to come back for.
fn again(status: StatusCode, kind: &str, detail: &str) -> Response<Bytes> {
    let mut response = problem(status, kind, detail);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}
