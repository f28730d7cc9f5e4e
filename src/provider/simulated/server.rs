//! The simulated provider's wire: listener, connections, answers.
//!
//! Connections are served one by one rather than by axum's own loop, because a behaviour must be able to close them without an
//! answer.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use super::behaviour::{Behaviour, Credential, Does, Ending, Executes, Framing, InvalidBehaviour, Json, Treatment};
use super::chat::{self, Said};
use super::{BEHAVIOUR_HEADER, BODY_BYTES_MAX, Entry, KEY_HEADER, Kind, Made, Mark, Refusal, Shared, Standing, queue};
use crate::fingerprint::{hex, sha256};
use crate::provider::http::{ATTEMPT_HEADER, JOB_ID_HEADER};

/// Connections that the kernel keeps while we are not accepting.
const BACKLOG: u32 = 1024;
/// How long a client may take for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait after an accept that failed, such as for too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Most requests at once on a connection of HTTP/2.
const STREAMS_MAX: u32 = 1000;
/// In how many parts `slow_body` sends an answer.
const SLOW_BODY_PARTS: usize = 4;

#[derive(Clone)]
pub(super) struct App {
    pub(super) shared: Arc<Shared>,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

/// Binds, and serves until told to stop. Connections are accepted when this returns, unless the default is to refuse them.
pub(super) fn start(
    listen: SocketAddr,
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stop: CancellationToken,
) -> io::Result<SocketAddr> {
    let socket = bind(listen)?;
    let addr = socket.local_addr()?;
    let standing = shared.standing.subscribe();
    let door = if standing.borrow().refusal.is_some() { Door::Closed(socket) } else { Door::Open(socket.listen(BACKLOG)?) };
    let app = App { shared, tasks: tasks.clone(), stop };
    tasks.spawn(async move {
        if let Err(error) = serve(door, addr, &app, standing).await {
            tracing::error!(%addr, %error, "the simulated provider lost its port");
        }
    });
    Ok(addr)
}

fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

/// The listener, or a socket that keeps its port while connections are refused.
enum Door {
    Open(TcpListener),
    Closed(TcpSocket),
}

async fn serve(mut door: Door, addr: SocketAddr, app: &App, mut standing: watch::Receiver<Standing>) -> io::Result<()> {
    let router = router(app.clone());
    loop {
        door = match door {
            Door::Open(listener) => {
                let closing = app.stop.child_token();
                tokio::select! {
                    biased;
                    () = app.stop.cancelled() => return Ok(()),
                    _ = standing.wait_for(|standing| standing.refusal.is_some()) => {}
                    () = accept(&listener, &router, app, &closing) => {}
                }
                closing.cancel();
                drop(listener);
                Door::Closed(bind(addr)?)
            }
            Door::Closed(socket) => {
                tokio::select! {
                    biased;
                    () = app.stop.cancelled() => return Ok(()),
                    () = refuse(app, &mut standing) => {}
                }
                Door::Open(socket.listen(BACKLOG)?)
            }
        };
    }
}

/// Waits until connections are welcome again.
async fn refuse(app: &App, standing: &mut watch::Receiver<Standing>) {
    loop {
        let Some(Refusal { duration }) = standing.borrow_and_update().refusal else { return };
        tokio::select! {
            () = sleep_or_forever(duration) => {
                app.shared.standing.send_modify(|standing| standing.refusal = None);
            }
            // It cannot fail: `app` has the sender.
            _ = standing.changed() => {}
        }
    }
}

async fn accept(listener: &TcpListener, router: &Router, app: &App, closing: &CancellationToken) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                app.shared.connected();
                app.tasks.spawn(connection(stream, router.clone(), app.stop.clone(), closing.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "the simulated provider cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, router: Router, stop: CancellationToken, closing: CancellationToken) {
    // Latency only: without it everything works too.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: http::Request<Incoming>| {
        let router = router.clone();
        async move {
            let response = router.oneshot(request.map(Body::new)).await.unwrap_or_else(|never| match never {});
            // The error closes the connection; nobody reads it.
            if response.extensions().get::<Dropped>().is_some() { Err(io::Error::other("dropped")) } else { Ok(response) }
        }
    });
    // Both versions of HTTP, as the client begins.
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(STREAMS_MAX);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        () = stop.cancelled() => return,
        // What a client does to its connection is its own affair.
        _ = connection.as_mut() => return,
        () = closing.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        () = stop.cancelled() => {}
        _ = connection => {}
    }
}

/// Marks a response that is not sent: the connection is closed instead.
#[derive(Clone)]
struct Dropped;

pub(super) fn dropped() -> Response {
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(Dropped);
    response
}

fn router(app: App) -> Router {
    Router::new()
        .route("/ledger", get(read_ledger).delete(clear_ledger))
        .route("/behaviour", get(read_behaviour).put(set_behaviour))
        .route("/healthz", get(async || "ok\n"))
        .route("/jobs", get(queue::list).post(queue::submit))
        .route("/jobs/{id}", get(queue::read))
        .route("/jobs/{id}/cancel", axum::routing::post(queue::cancel))
        .fallback(work)
        .layer(DefaultBodyLimit::disable())
        .with_state(app)
}

#[derive(Deserialize)]
struct LedgerQuery {
    job: Option<String>,
}

async fn read_ledger(State(app): State<App>, Query(query): Query<LedgerQuery>) -> Response {
    axum::Json(app.shared.ledger(query.job.as_deref())).into_response()
}

async fn clear_ledger(State(app): State<App>) -> StatusCode {
    app.shared.clear();
    StatusCode::NO_CONTENT
}

async fn read_behaviour(State(app): State<App>) -> String {
    let standing = app.shared.standing.borrow();
    format!("{}\n", standing.default)
}

async fn set_behaviour(State(app): State<App>, text: String) -> Response {
    let behaviour = match text.parse::<Behaviour>() {
        Ok(behaviour) if behaviour.does == (Does::Refuse { duration: None }) => {
            return invalid(&InvalidBehaviour::new(&text, "over HTTP say for how long: refuse=2s, or nobody can end it"));
        }
        Ok(behaviour) => behaviour,
        Err(error) => return invalid(&error),
    };
    app.shared.set_behaviour(behaviour);
    StatusCode::NO_CONTENT.into_response()
}

fn invalid(error: &InvalidBehaviour) -> Response {
    (StatusCode::BAD_REQUEST, axum::Json(refusal("invalid_behaviour", &error.to_string()))).into_response()
}

pub(super) fn refusal(kind: &str, message: &str) -> Value {
    json!({ "error": { "type": kind, "message": message } })
}

/// A request for work, as it arrived.
pub(super) struct Order {
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

impl Order {
    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    pub(super) fn json(&self) -> Map<String, Value> {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The behaviour that the request itself asks for, else the default.
    fn behaviour(&self, default: &Behaviour) -> Result<Behaviour, InvalidBehaviour> {
        if self.headers.contains_key(BEHAVIOUR_HEADER) {
            return self.header(BEHAVIOUR_HEADER).parse();
        }
        match self.json().get("simulate") {
            Some(Value::String(text)) => text.parse(),
            Some(other) => Err(InvalidBehaviour::new(&other.to_string(), "\"simulate\" must be a string")),
            None => Ok(default.clone()),
        }
    }

    fn entry(&self, behaviour: String) -> Entry {
        Entry {
            sequence: 0,
            at_ms: 0,
            job_id: self.header(JOB_ID_HEADER).to_owned(),
            attempt: self.header(ATTEMPT_HEADER).to_owned(),
            idempotency_key: self.header(KEY_HEADER).to_owned(),
            method: self.method.to_string(),
            path: self.path.clone(),
            body_sha256: self.body_sha256(),
            behaviour,
            accepted: false,
            executed: false,
            answered: false,
        }
    }

    fn body_sha256(&self) -> String {
        hex(&sha256(&self.body))
    }

    /// What `random` draws by.
    fn draw(&self) -> String {
        let (job_id, attempt, key) = (self.header(JOB_ID_HEADER), self.header(ATTEMPT_HEADER), self.header(KEY_HEADER));
        match (job_id, key) {
            ("", "") => uuid::Uuid::new_v4().to_string(),
            ("", key) => key.to_owned(),
            (job_id, _) => format!("{job_id}/{attempt}"),
        }
    }
}

/// A request for work that is in the ledger.
pub(super) struct Received {
    pub(super) order: Order,
    pub(super) treatment: Treatment,
    pub(super) sequence: u64,
    pub(super) authorization: Option<HeaderValue>,
}

async fn work(State(app): State<App>, request: Request) -> Response {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        let path = request.uri().path_and_query().map_or_else(String::new, ToString::to_string);
        return axum::Json(json!({ "provider": app.shared.name, "path": path })).into_response();
    }
    let Received { order, treatment, sequence, authorization } = match receive(&app, request).await {
        Ok(received) => received,
        Err(refused) => return *refused,
    };
    // On its own: once taken on, the work is done though the client goes away.
    let made = app.tasks.spawn(execute(app.clone(), order, treatment.clone(), sequence)).await;
    let Ok(Some(made)) = made else { return dropped() };
    finish(&app, made, &treatment, sequence, authorization).await
}

/// Reads a request for work, and enters it into the ledger.
pub(super) async fn receive(app: &App, request: Request) -> Result<Received, Box<Response>> {
    let (head, body) = request.into_parts();
    let path = head.uri.path_and_query().map_or_else(String::new, ToString::to_string);
    let body = match Limited::new(body, BODY_BYTES_MAX).collect().await {
        Ok(body) => body.to_bytes(),
        Err(_) => return Err(Box::new(StatusCode::PAYLOAD_TOO_LARGE.into_response())),
    };
    let order = Order { method: head.method, path, headers: head.headers, body };
    let standing = app.shared.standing.borrow().default.clone();
    let chosen = order.behaviour(&standing).and_then(|behaviour| {
        let treatment = behaviour.treatment(&order.draw());
        treatment.ok_or_else(|| InvalidBehaviour::new(&behaviour.to_string(), "it is not about one request; make it the default"))
    });
    let (text, treatment) = match chosen {
        Ok(chosen) => chosen,
        Err(error) => {
            let sequence = app.shared.enter(order.entry("invalid".to_owned()));
            app.shared.mark(sequence, Mark::Answered);
            return Err(Box::new(invalid(&error)));
        }
    };
    let sequence = app.shared.enter(order.entry(text));
    let authorization = order.headers.get(header::AUTHORIZATION).cloned();
    Ok(Received { order, treatment, sequence, authorization })
}

/// Answers with what was made, or does not. From here on all is for the client, and ends with it.
pub(super) async fn finish(
    app: &App,
    made: Made,
    treatment: &Treatment,
    sequence: u64,
    authorization: Option<HeaderValue>,
) -> Response {
    tokio::time::sleep(treatment.delay).await;
    match treatment.ending {
        Ending::Drop => dropped(),
        Ending::Hang => std::future::pending().await,
        Ending::Answer | Ending::Half => answer(app, made, treatment, sequence, authorization),
    }
}

/// Does the work as it is to be treated. `None`: the provider stops.
async fn execute(app: App, order: Order, treatment: Treatment, sequence: u64) -> Option<Made> {
    if treatment.executes == Executes::Yes {
        app.shared.mark(sequence, Mark::Accepted);
    }
    tokio::select! {
        biased;
        () = app.stop.cancelled() => return None,
        () = tokio::time::sleep(treatment.queue) => {}
    }
    let status = treatment.status;
    Some(match treatment.executes {
        Executes::Yes => app.shared.execute(sequence, order.header(KEY_HEADER), |number, id| {
            if chat::is_chat(&order.path) {
                return chatted(&app, &order, number, id, &treatment);
            }
            made(executed(&app, &order, number, id), &order, &treatment)
        }),
        Executes::No if status == 422 => made(refusal("jam", "the paper is jammed; nothing was printed"), &order, &treatment),
        Executes::No => made(refusal("refused", "nothing was done"), &order, &treatment),
    })
}

/// What an execution says of itself.
pub(super) fn executed(app: &App, order: &Order, number: u64, id: &str) -> Value {
    let mut value = json!({
        "id": id,
        "object": "execution",
        "provider": app.shared.name,
        "model": app.shared.model,
        "execution": number,
        "body_sha256": order.body_sha256(),
    });
    if let Some(input) = order.json().remove("input") {
        value["input"] = input;
    }
    value
}

/// An execution as OpenAI-compatible APIs answer it.
fn chatted(app: &App, order: &Order, number: u64, id: &str, treatment: &Treatment) -> Made {
    let (model, provider) = (app.shared.model.as_str(), app.shared.name.as_str());
    let said = Said { id, model, provider, number, authorization: order.header("authorization") };
    let created = super::unix_ms() / 1000;
    if (200..300).contains(&treatment.status) && chat::wants_stream(&order.json()) {
        return Made { status: treatment.status, body: said.stream(created, treatment), kind: Kind::Events };
    }
    let mut value = executed(app, order, number, id);
    said.complete(&mut value, created, treatment);
    made(value, order, treatment)
}

pub(super) fn made(mut value: Value, order: &Order, treatment: &Treatment) -> Made {
    if treatment.credential == Credential::Echoed {
        value["authorization"] = json!(order.header("authorization"));
    }
    let length = value.to_string().len();
    if let Some(missing) = treatment.size_bytes.checked_sub(length) {
        value["padding"] = json!("x".repeat(missing));
    }
    let mut body = value.to_string().into_bytes();
    if treatment.json == Json::Cut {
        body.pop();
    }
    Made { status: treatment.status, body: body.into(), kind: Kind::Json }
}

fn answer(app: &App, made: Made, treatment: &Treatment, sequence: u64, authorization: Option<HeaderValue>) -> Response {
    let status = StatusCode::from_u16(made.status).expect("statuses are checked when a behaviour is read");
    let whole = if matches!(made.status, 204 | 304) { Bytes::new() } else { made.body };
    let half = |length: usize| match treatment.ending {
        Ending::Half => length / 2,
        Ending::Answer | Ending::Drop | Ending::Hang => length,
    };
    let (parts, pause): (Vec<Bytes>, _) = match made.kind {
        Kind::Json => {
            let sent = whole.slice(..half(whole.len()));
            let count = if treatment.slow_body.is_zero() { 1 } else { SLOW_BODY_PARTS };
            let part_bytes = sent.len().div_ceil(count).max(1);
            (sent.chunks(part_bytes).map(|part| sent.slice_ref(part)).collect(), treatment.slow_body)
        }
        Kind::Events => {
            let mut parts = chat::parts(&whole, treatment);
            parts.truncate(half(parts.len()));
            (parts, treatment.pause)
        }
    };

    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    let content_type = match made.kind {
        Kind::Json => "application/json",
        Kind::Events => "text/event-stream; charset=utf-8",
    };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    if treatment.framing == Framing::Length && made.kind == Kind::Json {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(whole.len()));
    }
    if let Some(retry_after) = treatment.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(retry_after.as_millis().div_ceil(1000) as u64));
    }
    if treatment.credential == Credential::Echoed
        && let Some(authorization) = authorization
    {
        headers.insert("x-authorization", authorization);
    }
    if parts.is_empty() {
        app.shared.mark(sequence, Mark::Answered);
        return response;
    }
    let (last, shared) = (parts.len() - 1, Arc::clone(&app.shared));
    let whole_sent = treatment.ending != Ending::Half;
    let parts = stream::iter(parts.into_iter().enumerate()).then(move |(place, part)| {
        let shared = Arc::clone(&shared);
        async move {
            if place > 0 {
                tokio::time::sleep(pause).await;
            }
            if place == last && whole_sent {
                shared.mark(sequence, Mark::Answered);
            }
            Ok(part)
        }
    });
    *response.body_mut() =
        if whole_sent { Body::from_stream(parts) } else { Body::from_stream(parts.chain(stream::once(cut()))) };
    response
}

/// Ends a body by closing the connection, after what was written has been flushed.
async fn cut() -> io::Result<Bytes> {
    tokio::task::yield_now().await;
    Err(io::Error::other("cut"))
}

async fn sleep_or_forever(duration: Option<Duration>) {
    match duration {
        Some(duration) => tokio::time::sleep(duration).await,
        None => std::future::pending().await,
    }
}
