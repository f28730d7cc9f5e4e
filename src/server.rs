//! The HTTP gateway: the router, and the loop that accepts connections.
//!
//! What is asked goes to the runtime and comes back; nothing is decided here but who may ask and in which words it is answered.
//! The client's going away changes nothing: what changes a job runs on a task of its own. Every limit has a name: head, headers,
//! body, bodies together, connections, streams, waits, and how long a client may be idle, slow or deaf.
//!
//! Deliberately not here: TLS (something in front has it), sessions, a list of all jobs, HTML. The contract is
//! `docs/PROTOCOL.md`, "HTTP";
//! [`openapi`] describes it for programs.
//!
//! A head that is larger than twice its limit, or that does not come in time, is answered below this code: with a bare 431, or by
//! closing.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use http::header::{self, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;
use tower_http::cors::{AllowOrigin, CorsLayer};
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config;
use crate::dedup::{Dedup, Stream};
use crate::metrics;
use crate::runtime::Runtime;

mod answer;
mod attempts;
mod auth;
mod body;
mod dedup;
mod document;
mod headers;
mod health;
mod jobs;
mod problem;
mod proxy;
mod streamed;
mod webhooks;

pub use auth::{InvalidOwners, OPEN_OWNER, Owners, Tokens};
pub use health::{MetricsError, RenderMetrics, metrics_recorder};
pub use problem::{TYPE_PREFIX, problem_types};

use problem::{Kind, Problem};

/// Connections that the kernel keeps while we are not accepting, because there are too many already.
const BACKLOG: u32 = 1024;
/// How long to wait after an accept that failed, such as for too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Bytes of request bodies that are held at once, unless the options say otherwise; or four bodies of the largest size, if that
/// is more.
const BODIES_BYTES_MAX: usize = 256 << 20;
/// Bytes of large stored answers that are held at once, unless the options say otherwise.
const ANSWERS_BYTES_MAX: usize = 512 << 20;
/// How long a stored answer waits for its share of the memory for answers, unless the options say otherwise.
const ANSWER_ROOM_WAIT: Duration = Duration::from_secs(10);
/// Changes at once that go on though their client goes away, unless the options say otherwise.
const DETACHED_MAX: usize = 16_384;
/// Requests at once on one HTTP/2 connection.
const STREAMS_MAX: u32 = 100;
/// Requests of one HTTP/2 connection that were taken back before anybody looked at them; with one more it ends.
const STREAMS_RESET_MAX: usize = 20;
/// Requests of one HTTP/2 connection that broke the protocol and were reset by us; with one more it ends.
const STREAMS_FAULTY_MAX: usize = 100;
/// How long a client may take to read its answer once nothing else happens on its connection, unless the options say otherwise.
const ANSWER_READ_MAX: Duration = Duration::from_secs(300);
/// How long a connection lives that is never idle, unless the options say otherwise: beside answers that are read there may be
/// others that nobody reads.
const CONNECTION_AGE_MAX: Duration = Duration::from_secs(3600);
/// How long requests have to be answered once the gateway stops. Waits end at once.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How long clicks are asked about while Redis does not answer: less than detached work has when the gateway stops.
const CLICKS_PATIENCE: Duration = Duration::from_secs(5);
/// How often the recorder of metrics is read though nobody scrapes.
const METRICS_UPKEEP: Duration = Duration::from_secs(30);
/// The least buffer that an HTTP/1 connection reads with: the library's own minimum.
const READ_BUFFER_BYTES_MIN: usize = 8 << 10;

/// Where and how the gateway listens, and what it accepts.
#[derive(Clone)]
pub struct ServerOptions {
    /// Where to listen. Port 0: any free port.
    pub listen: SocketAddr,
    /// How a request names its owner.
    pub owners: Owners,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// Most bytes of request bodies held at once, all requests together, until their jobs are claimed. Beyond: 503.
    pub bodies_bytes_max: usize,
    /// Most bytes of stored answers larger than a record holds, all requests together, until their clients have taken them. Beyond
    /// they wait.
    pub answers_bytes_max: usize,
    /// How long they wait. Beyond: 503.
    pub answer_room_wait: Duration,
    /// Most changes at once: submits until their claim, cancels, attempts from outside. Each goes on though its client goes away.
    /// Beyond: 503.
    pub detached_max: usize,
    /// Largest request head.
    pub head_bytes_max: usize,
    /// Most header lines of a request.
    pub headers_max: usize,
    /// Most connections at once. More wait to be accepted.
    pub connections_max: usize,
    /// How long a client may take for a request's head, and how long a connection may be idle.
    pub head_timeout: Duration,
    /// How long a client may take for a request's body.
    pub body_timeout: Duration,
    /// How long a client may take to read its last answers, once nothing else happens on its connection.
    pub answer_read_max: Duration,
    /// How long a connection lives; then it is told to close, and its requests in flight are still answered.
    pub connection_age_max: Duration,
    /// The longest `Prefer: wait`.
    pub wait_max: Duration,
    /// How long `/proxy` waits for a result before 504.
    pub proxy_wait: Duration,
    /// The status for another request under a known key.
    pub conflict: ConflictStatus,
    /// Origins that browsers may call from.
    pub cors_origins: Vec<String>,
    /// By route: request headers that a proxied request passes on, beside content type, content encoding and `accept`. Never a
    /// credential.
    pub forward_headers: BTreeMap<String, Vec<String>>,
    /// Streams of clicks that it may be asked about.
    pub streams: Vec<Stream>,
    /// Renders `/metrics`.
    pub metrics: Option<RenderMetrics>,
}

/// The status for another request under a known key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConflictStatus {
    /// 409.
    #[default]
    Conflict,
    /// 422, as draft-ietf-httpapi-idempotency-key-header-07 has it.
    UnprocessableContent,
}

impl ConflictStatus {
    fn code(self) -> StatusCode {
        match self {
            ConflictStatus::Conflict => StatusCode::CONFLICT,
            ConflictStatus::UnprocessableContent => StatusCode::UNPROCESSABLE_ENTITY,
        }
    }
}

impl ServerOptions {
    /// The options that a configuration stands for; no headers are forwarded, no clicks checked and no metrics rendered unless the
    /// caller says so.
    pub fn from_config(server: &config::Server, owners: Owners) -> Self {
        ServerOptions {
            listen: server.listen,
            owners,
            body_bytes_max: server.body_bytes_max,
            bodies_bytes_max: BODIES_BYTES_MAX.max(server.body_bytes_max.saturating_mul(4)),
            answers_bytes_max: ANSWERS_BYTES_MAX,
            answer_room_wait: ANSWER_ROOM_WAIT,
            detached_max: DETACHED_MAX,
            head_bytes_max: server.head_bytes_max,
            headers_max: server.headers_max,
            connections_max: server.connections_max,
            head_timeout: server.head_timeout,
            body_timeout: server.body_timeout,
            answer_read_max: ANSWER_READ_MAX,
            connection_age_max: CONNECTION_AGE_MAX,
            wait_max: server.wait_max,
            proxy_wait: server.proxy_wait,
            conflict: if server.conflict_status == 422 { ConflictStatus::UnprocessableContent } else { ConflictStatus::Conflict },
            cors_origins: server.cors_origins.clone(),
            forward_headers: BTreeMap::new(),
            streams: Vec::new(),
            metrics: None,
        }
    }
}

impl fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerOptions").field("listen", &self.listen).field("owners", &self.owners).finish_non_exhaustive()
    }
}

/// What all requests share.
pub(crate) struct App {
    pub(crate) runtime: Runtime,
    pub(crate) options: ServerOptions,
    pub(crate) stopping: CancellationToken,
    /// The memory for request bodies, in steps of [`body::BODY_STEP_BYTES`].
    pub(crate) bodies: Arc<Semaphore>,
    /// The memory for stored answers, in steps of [`answer::ANSWER_STEP_BYTES`].
    pub(crate) answers: Arc<Semaphore>,
    /// Streams of clicks by name.
    pub(crate) streams: BTreeMap<String, Dedup>,
    /// Places for changes.
    detached: Arc<Semaphore>,
    pub(crate) openapi: String,
    /// Connections and detached work. Joined when the gateway stops.
    tasks: TaskTracker,
}

impl App {
    /// A place for a change.
    ///
    /// # Errors
    /// Too much is under way already: nothing was begun.
    pub(crate) fn place(&self) -> Result<OwnedSemaphorePermit, Problem> {
        Arc::clone(&self.detached).try_acquire_owned().map_err(|_| {
            let limit = self.options.detached_max;
            let detail = format!("{limit} changes are under way, the limit of this gateway; nothing happened");
            Problem::new(Kind::Overloaded, detail).member("limit", limit)
        })
    }

    /// Runs something to its end, whether or not the client stays for the answer.
    ///
    /// # Errors
    /// Too much runs already: nothing was begun. It panicked.
    pub(crate) async fn detached<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Result<T, Problem> {
        let place = self.place()?;
        let work = async move {
            let done = work.await;
            drop(place);
            done
        };
        self.tasks.spawn(work).await.map_err(|error| {
            tracing::error!(%error, "a request's work broke");
            Problem::new(Kind::Internal, "something broke here; the same request again may tell what came of it")
        })
    }
}

/// A gateway that listens. It serves once [`Gateway::serve`] is awaited; until then connections queue.
pub struct Gateway {
    listener: TcpListener,
    addr: SocketAddr,
    app: Arc<App>,
    router: Router,
}

impl Gateway {
    /// Binds. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The address cannot be bound, an origin is none, a stream of clicks cannot be, or the gateway would be open to others than this
    /// machine.
    pub fn bind(options: ServerOptions, runtime: Runtime) -> io::Result<Gateway> {
        let refused = |problem: String| io::Error::new(io::ErrorKind::InvalidInput, problem);
        if matches!(options.owners, Owners::Open) && !options.listen.ip().is_loopback() {
            let listen = options.listen;
            return Err(refused(format!("server.listen {listen} is not a loopback address, and no owner has a token")));
        }
        let cors = cors(&options.cors_origins).map_err(refused)?;
        let mut streams = BTreeMap::new();
        for stream in &options.streams {
            let dedup = Dedup::new(runtime.store(), stream.clone()).map_err(|error| refused(error.to_string()))?;
            if streams.insert(stream.name.clone(), dedup.with_patience(CLICKS_PATIENCE)).is_some() {
                return Err(refused(format!("stream {:?} is there twice", stream.name)));
            }
        }
        let socket = if options.listen.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(options.listen)?;
        let listener = socket.listen(BACKLOG)?;
        let addr = listener.local_addr()?;
        let bodies = options.bodies_bytes_max.div_ceil(body::BODY_STEP_BYTES);
        let answers = options.answers_bytes_max.div_ceil(answer::ANSWER_STEP_BYTES).min(Semaphore::MAX_PERMITS);
        let detached = Arc::new(Semaphore::new(options.detached_max.min(Semaphore::MAX_PERMITS)));
        metrics::start_requests_at_zero();
        metrics::start_streams_at_zero(&streams.keys().map(String::as_str).collect::<Vec<_>>());
        let app = Arc::new(App {
            runtime,
            options,
            stopping: CancellationToken::new(),
            bodies: Arc::new(Semaphore::new(bodies.min(Semaphore::MAX_PERMITS))),
            answers: Arc::new(Semaphore::new(answers)),
            streams,
            detached,
            openapi: openapi(),
            tasks: TaskTracker::new(),
        });
        let (router, _) = documented_router();
        let router = router
            // The path that a base URL with a slash at its end alone makes; documented with the longer ones.
            .route("/proxy/{route}/", proxy_methods())
            .fallback(path_unknown)
            .method_not_allowed_fallback(method_not_allowed)
            .layer(middleware::from_fn_with_state(Arc::clone(&app), observe));
        let router = match cors {
            Some(cors) => router.layer(cors),
            None => router,
        };
        Ok(Gateway { listener, addr, router: router.with_state(Arc::clone(&app)), app })
    }

    /// Where it listens, with the port that it was given.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Serves until told to stop; then no connection is accepted, waits end with the jobs as they stand, requests in flight have
    /// a few seconds to be answered, and what is left is cut off. Stop the runtime after it.
    ///
    /// # Cancel safety
    /// Dropping the future stops the accepting, not the connections.
    pub async fn serve(self, shutdown: CancellationToken) {
        let Gateway { listener, app, router, .. } = self;
        let cut = CancellationToken::new();
        let room = Arc::new(Semaphore::new(app.options.connections_max.clamp(1, Semaphore::MAX_PERMITS)));
        if let Some(render) = app.options.metrics.clone() {
            app.tasks.spawn(upkeep(render, app.stopping.clone()));
        }
        if !app.streams.is_empty() {
            app.tasks.spawn(dedup::watch_levels(Arc::clone(&app)));
        }
        loop {
            let permit = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                permit = Arc::clone(&room).acquire_owned() => permit.expect("the semaphore is never closed"),
            };
            let accepted = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => {
                    let connection = connection(stream, Arc::clone(&app), router.clone(), cut.clone());
                    app.tasks.spawn(async move {
                        connection.await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "the gateway cannot accept");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(listener);
        app.stopping.cancel();
        app.tasks.close();
        if tokio::time::timeout(STOP_GRACE, app.tasks.wait()).await.is_err() {
            tracing::warn!(tasks = app.tasks.len(), "requests were not answered in time and are cut off");
            cut.cancel();
            // Detached work has deadlines of its own, all below this.
            let _ = tokio::time::timeout(STOP_GRACE, app.tasks.wait()).await;
        }
    }
}

/// Reads the recorder now and then: it keeps what it was told until somebody reads it.
async fn upkeep(render: RenderMetrics, stopping: CancellationToken) {
    loop {
        tokio::select! {
            () = stopping.cancelled() => return,
            () = tokio::time::sleep(METRICS_UPKEEP) => drop(render()),
        }
    }
}

/// What happens on a connection: enough to end one that does nothing.
pub(crate) struct Activity {
    in_flight: AtomicUsize,
    last: Mutex<Instant>,
}

impl Activity {
    fn new() -> Arc<Self> {
        Arc::new(Activity { in_flight: AtomicUsize::new(0), last: Mutex::new(Instant::now()) })
    }

    fn touch(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// How long nothing has been asked; `None` while something is being answered.
    fn idle(&self) -> Option<Duration> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        (self.in_flight.load(Ordering::Acquire) == 0).then(|| last.elapsed())
    }
}

/// A request that is being answered.
pub(crate) struct InFlight(Arc<Activity>);

impl InFlight {
    pub(crate) fn begin(activity: &Arc<Activity>) -> Self {
        activity.in_flight.fetch_add(1, Ordering::AcqRel);
        InFlight(Arc::clone(activity))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.touch();
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn connection(stream: TcpStream, app: Arc<App>, router: Router, cut: CancellationToken) {
    // Latency only: without it everything works too.
    let _ = stream.set_nodelay(true);
    let activity = Activity::new();
    // Of answers that come in parts: such a one is still being answered when its head is there.
    let streams = Activity::new();
    let (seen, parts) = (Arc::clone(&activity), Arc::clone(&streams));
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        let (router, in_flight) = (router.clone(), InFlight::begin(&seen));
        request.extensions_mut().insert(Arc::clone(&parts));
        async move {
            let response = router.oneshot(request.map(Body::new)).await;
            drop(in_flight);
            response
        }
    });
    let options = &app.options;
    let mut builder = auto::Builder::new(TokioExecutor::new());
    // Twice the limits: up to there the answer is a problem document, beyond it the library's bare 431.
    let head_bytes = (2 * options.head_bytes_max).max(READ_BUFFER_BYTES_MIN);
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(options.head_timeout)
        .max_headers(2 * options.headers_max)
        .max_buf_size(head_bytes);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_pending_accept_reset_streams(STREAMS_RESET_MAX)
        .max_local_error_reset_streams(STREAMS_FAULTY_MAX)
        .max_header_list_size(u32::try_from(head_bytes).unwrap_or(u32::MAX))
        .keep_alive_interval(options.head_timeout)
        .keep_alive_timeout(options.head_timeout);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    // The library's own timer begins with the first byte of a head; this also ends who sends nothing, or half a preface.
    let idle_max = options.head_timeout;
    let mut look_in = idle_max;
    let mut old = pin!(tokio::time::sleep(options.connection_age_max));
    loop {
        tokio::select! {
            // What a client does to its connection is its own affair.
            _ = connection.as_mut() => return,
            () = app.stopping.cancelled() => break,
            () = old.as_mut() => break,
            () = tokio::time::sleep(look_in) => match activity.idle().zip(streams.idle()).map(|(one, other)| one.min(other)) {
                Some(idle) if idle >= idle_max => break,
                Some(idle) => look_in = idle_max - idle,
                None => look_in = idle_max,
            },
        }
    }
    connection.as_mut().graceful_shutdown();
    let read_max = options.answer_read_max;
    let mut look_in = read_max;
    streams.touch();
    loop {
        tokio::select! {
            _ = connection.as_mut() => return,
            () = cut.cancelled() => return,
            // Nothing but a stream that is read puts the end off: it has an end of its own.
            () = tokio::time::sleep(look_in) => match streams.idle() {
                Some(idle) if idle >= read_max => return,
                Some(idle) => look_in = read_max - idle,
                None => look_in = read_max,
            },
        }
    }
}

/// Every request passes here: its head is measured, its answer counted.
async fn observe(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let operation = operation(request.method(), path);
    let response = match check_head(&app.options, &request) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    };
    metrics::http_request(operation, status_class(response.status()));
    response
}

fn check_head(options: &ServerOptions, request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    let (lines, limit) = (headers.len(), options.headers_max);
    if lines > limit {
        let detail = format!("the request has {lines} headers; the limit is {limit}");
        return Err(Problem::new(Kind::HeadersTooMany, detail).member("limit", limit));
    }
    // `name: value` and a line break each, and the request line.
    let target = request.uri().path_and_query().map_or(1, |target| target.as_str().len());
    let line = request.method().as_str().len() + target + " HTTP/1.1\r\n ".len();
    let bytes = headers.iter().fold(line, |sum, (name, value)| sum + name.as_str().len() + value.len() + 4);
    let limit = options.head_bytes_max;
    if bytes > limit {
        let detail = format!("the request's head has {bytes} bytes; the limit is {limit}");
        return Err(Problem::new(Kind::HeadTooLarge, detail).member("limit", limit));
    }
    Ok(())
}

/// What was asked, in a word of a closed set, for the metrics: the operation ids of the description.
fn operation(method: &Method, path: &str) -> &'static str {
    let safe = matches!(*method, Method::GET | Method::HEAD);
    match path {
        "/v1/jobs" if safe => "list_jobs",
        "/v1/jobs" => "submit_job",
        "/v1/jobs/{id}" => "read_job",
        "/v1/jobs/{id}/cancel" => "cancel_job",
        "/v1/cancel" => "cancel_by_key",
        "/v1/jobs/{id}/reopen" => "reopen_job",
        "/v1/jobs/{id}/attempts" => "begin_attempt",
        "/v1/jobs/{id}/attempts/{number}/running" => "mark_running",
        "/v1/jobs/{id}/attempts/{number}/lease" => "extend_lease",
        "/v1/jobs/{id}/attempts/{number}/finish" => "finish_attempt",
        "/v1/jobs/{id}/attempts/{number}/resolve" => "resolve_attempt",
        "/v1/webhooks/{provider}/{id}/{number}" => "take_webhook",
        "/v1/dedup/{stream}" => "check_clicks",
        "/v1/dedup/{stream}/claim" => "claim_clicks",
        "/v1/dedup/{stream}/commit" => "commit_clicks",
        "/v1/dedup/{stream}/release" => "release_clicks",
        PROXY_PATH | "/proxy/{route}/" if safe => "pass_through",
        PROXY_PATH | "/proxy/{route}/" => "proxy",
        "/healthz" => "healthz",
        "/readyz" => "readyz",
        "/metrics" => "metrics",
        "/openapi.json" => "openapi",
        _ => "none",
    }
}

fn status_class(status: StatusCode) -> &'static str {
    match status.as_u16() / 100 {
        1 => "1xx",
        2 => "2xx",
        3 => "3xx",
        4 => "4xx",
        _ => "5xx",
    }
}

async fn path_unknown() -> Problem {
    Problem::new(Kind::PathUnknown, "there is nothing at this path; /openapi.json lists what there is")
}

async fn method_not_allowed(method: Method) -> Problem {
    let shown: String = method.as_str().chars().take(32).collect();
    Problem::new(Kind::MethodNotAllowed, format!("{shown} is not among the methods of this path"))
}

/// How the router names the path of the proxy; the description says `{rest}`, because OpenAPI knows no path within a path.
const PROXY_PATH: &str = "/proxy/{route}/{*rest}";

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "onejob", description = "One job per intent: idempotent submission, guarded attempts and exactly one result."),
    tags(
        (name = "jobs", description = "Submit, read, wait, cancel"),
        (name = "clicks", description = "Which clicks of a stream are new"),
        (name = "proxy", description = "A provider's base URL, with exactly one result for each key"),
        (name = "attempts", description = "Attempts driven from outside (role `operate`)"),
        (name = "webhooks", description = "What providers say by themselves (signed, no credential)"),
        (name = "operation", description = "For who operates it (role `operate`)"),
        (name = "health", description = "For who watches it (no credential)"),
    ),
    security(("bearer" = [])),
    components(schemas(problem::Document)),
    modifiers(&Bearer),
)]
struct Description;

struct Bearer;

impl utoipa::Modify for Bearer {
    fn modify(&self, openapi: &mut OpenApi) {
        use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
        let bearer = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some(
                "Names the owner. Where a gateway in front names it by a header, and where no owner is configured, no \
                 token is needed.",
            ))
            .build();
        openapi.components.get_or_insert_default().add_security_scheme("bearer", SecurityScheme::Http(bearer));
    }
}

fn documented_router() -> (Router<Arc<App>>, OpenApi) {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(jobs::submit_job, jobs::list_jobs))
        .routes(routes!(jobs::read_job))
        .routes(routes!(jobs::cancel_job))
        .routes(routes!(jobs::cancel_by_key))
        .routes(routes!(jobs::reopen_job))
        .routes(routes!(attempts::begin_attempt))
        .routes(routes!(attempts::mark_running))
        .routes(routes!(attempts::extend_lease))
        .routes(routes!(attempts::finish_attempt))
        .routes(routes!(attempts::resolve_attempt))
        .routes(routes!(webhooks::take_webhook))
        .routes(routes!(dedup::check_clicks))
        .routes(routes!(dedup::claim_clicks))
        .routes(routes!(dedup::commit_clicks))
        .routes(routes!(dedup::release_clicks))
        .routes(routes!(proxy::proxy, proxy::pass_through))
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(health::render_metrics))
        .routes(routes!(health::describe))
        .split_for_parts()
}

fn proxy_methods() -> MethodRouter<Arc<App>> {
    let (_, _, methods) = routes!(proxy::proxy, proxy::pass_through);
    methods
}

/// Describes the HTTP interface: OpenAPI 3.1 as JSON, for programs, for `/openapi.json` and for the documentation.
pub fn openapi() -> String {
    let (_, mut openapi) = documented_router();
    if let Some(item) = openapi.paths.paths.remove(PROXY_PATH) {
        openapi.paths.paths.insert("/proxy/{route}/{rest}".to_owned(), item);
    }
    openapi.to_pretty_json().expect("a description is plain data")
}

/// Lets browsers of the given origins call, and see the headers that onejob answers with.
fn cors(origins: &[String]) -> Result<Option<CorsLayer>, String> {
    if origins.is_empty() {
        return Ok(None);
    }
    let mut allowed = Vec::with_capacity(origins.len());
    for origin in origins {
        let sound = origin.split_once("://").is_some_and(|(_, host)| !host.is_empty() && !host.contains(['/', '*']));
        match HeaderValue::from_str(origin) {
            Ok(value) if sound => allowed.push(value),
            Ok(_) | Err(_) => return Err(format!("server.cors_origins holds {origin:?}, which is not scheme://host[:port]")),
        }
    }
    let exposed: [HeaderName; 11] = [
        header::ETAG,
        header::LOCATION,
        header::RETRY_AFTER,
        headers::IDEMPOTENCY_REPLAYED,
        headers::IDEMPOTENCY_EXPIRES,
        headers::JOB_ID,
        headers::PROVIDER,
        headers::REQUEST_ID,
        headers::PREFERENCE_APPLIED,
        problem::SHOULD_RETRY,
        header::WWW_AUTHENTICATE,
    ];
    let accepted: [HeaderName; 8] = [
        header::AUTHORIZATION,
        header::CONTENT_TYPE,
        header::ACCEPT,
        header::IF_NONE_MATCH,
        headers::IDEMPOTENCY_KEY,
        headers::PREFER,
        headers::REQUEST_ID,
        HeaderName::from_static("traceparent"),
    ];
    let methods = [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
    let layer = CorsLayer::new()
        .allow_origin(AllowOrigin::list(allowed))
        .allow_methods(methods)
        .allow_headers(accepted)
        .expose_headers(exposed);
    Ok(Some(layer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_documented_operation_has_its_word_in_the_metrics() {
        let (_, openapi) = documented_router();
        for (path, item) in &openapi.paths.paths {
            let operations =
                [(Method::GET, &item.get), (Method::POST, &item.post), (Method::PUT, &item.put), (Method::DELETE, &item.delete)];
            for (method, described) in operations {
                if let Some(described) = described {
                    assert_eq!(Some(operation(&method, path)), described.operation_id.as_deref(), "{method} {path}");
                    assert!(metrics::OPERATIONS.contains(&operation(&method, path)), "{method} {path}");
                }
            }
        }
        assert_eq!(operation(&Method::GET, ""), "none");
    }
}
