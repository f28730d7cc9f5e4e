//! How the gateway is, for whoever watches it: alive, ready, counted, described. No credential is needed: none of it tells of a
//! job.

use std::fmt;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderValue};
use http::{HeaderName, StatusCode};
use metrics_exporter_prometheus::PrometheusBuilder;

use crate::error::{StoreError, Want};
use crate::metrics;
use crate::runtime::{NotReady, SubmitError};
use crate::server::problem::{Document, Kind, Problem};
use crate::server::{App, jobs};

/// Renders every metric as Prometheus' text.
pub type RenderMetrics = Arc<dyn Fn() -> String + Send + Sync>;

/// Why metrics cannot be recorded.
#[derive(Debug, thiserror::Error)]
#[error("metrics cannot be recorded: {0}")]
pub struct MetricsError(String);

/// Installs this process' recorder of metrics, and returns how to render them. Once in a process.
///
/// What is recorded between two renderings is kept one by one; a serving [`Gateway`](crate::server::Gateway) renders now and
/// then, so that it stays bounded if nobody scrapes.
///
/// # Errors
/// There is a recorder already.
pub fn metrics_recorder() -> Result<RenderMetrics, MetricsError> {
    let failed = |error: &dyn fmt::Display| MetricsError(error.to_string());
    let builder = PrometheusBuilder::new().set_buckets(&metrics::SECONDS_BUCKETS).map_err(|error| failed(&error))?;
    let handle = builder.install_recorder().map_err(|error| failed(&error))?;
    metrics::describe();
    Ok(Arc::new(move || handle.render()))
}

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

fn text(content_type: HeaderValue, text: String) -> Response {
    let headers: [(HeaderName, HeaderValue); 2] =
        [(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, HeaderValue::from_static("no-store"))];
    (StatusCode::OK, headers, text).into_response()
}

/// Says that the process is alive. No credential.
#[utoipa::path(
    get, path = "/healthz", operation_id = "healthz", tag = "health", security(()),
    responses((status = 200, description = "Alive", body = String, content_type = "text/plain")),
)]
pub(crate) async fn healthz() -> Response {
    text(HeaderValue::from_static("text/plain; charset=utf-8"), "ok\n".to_owned())
}

/// Says whether a new job could be taken now: a script that writes is run, not a `PING`, and where a route's work changes the world a
/// write must become as durable as is required. No credential.
#[utoipa::path(
    get, path = "/readyz", operation_id = "readyz", tag = "health", security(()),
    responses(
        (status = 200, description = "Ready", body = String, content_type = "text/plain"),
        (status = 503, description = "Not now", body = Document, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn readyz(State(app): State<Arc<App>>) -> Result<Response, Problem> {
    if app.stopping.is_cancelled() {
        return Err(Problem::from(SubmitError::Stopping));
    }
    let error = match app.runtime.ready().await {
        Ok(()) => return Ok(text(HeaderValue::from_static("text/plain; charset=utf-8"), "ready\n".to_owned())),
        Err(error) => error,
    };
    tracing::debug!(%error, "not ready");
    let not_ready = |reason: String| {
        Problem::new(Kind::NotReady, format!("the store could not take a job now: {reason}")).member("reason", reason)
    };
    Err(match error {
        NotReady::Stopping => Problem::from(SubmitError::Stopping),
        NotReady::Store(StoreError::NotExecuted { code, .. }) => not_ready(code.to_string()),
        NotReady::Store(StoreError::Ambiguous { .. }) => not_ready("no reply".to_owned()),
        NotReady::Store(StoreError::NotDurable { have, want }) => not_durable(None, have, want),
        NotReady::Store(StoreError::Fatal { code, .. }) => not_ready(code),
        NotReady::NotDurable { node, have, want } => not_durable(node, have, want),
    })
}

/// Work with effects would not be begun.
fn not_durable(node: Option<String>, have: u32, want: Want) -> Problem {
    let at = node.as_ref().map(|node| format!(" at {node}")).unwrap_or_default();
    let detail = format!("a write{at} is not as durable in time as redis.durability says: {have} of {want} have it");
    let problem =
        Problem::new(Kind::NotReady, detail).member("reason", "not_durable").member("have", have).member("want", want.count());
    match node {
        Some(node) => problem.member("node", node),
        None => problem,
    }
}

/// Every metric as Prometheus' text. Reads memory; costs Redis nothing. No credential.
#[utoipa::path(
    get, path = "/metrics", operation_id = "metrics", tag = "health", security(()),
    responses(
        (status = 200, description = "Metrics", body = String, content_type = "text/plain"),
        (status = 404, description = "This gateway records none", body = Document, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn render_metrics(State(app): State<Arc<App>>) -> Result<Response, Problem> {
    match &app.options.metrics {
        Some(render) => Ok(text(TEXT, render())),
        None => Err(Problem::new(Kind::PathUnknown, "this gateway records no metrics")),
    }
}

/// This description. No credential.
#[utoipa::path(
    get, path = "/openapi.json", operation_id = "openapi", tag = "health", security(()),
    responses((status = 200, description = "OpenAPI 3.1", content_type = "application/json")),
)]
pub(crate) async fn describe(State(app): State<Arc<App>>) -> Response {
    let mut response = jobs::json(StatusCode::OK, &());
    *response.body_mut() = app.openapi.clone().into();
    response
}
