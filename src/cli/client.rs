//! The HTTP client of the commands about jobs.
//!
//! Every call has a deadline, and none is repeated behind the caller's back: the library's own repetition is off. What may safely
//! be sent again (a submit with its key, a change with its request id, a read) is sent again here, a bounded number of times, and
//! it is said.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use onejob::config::{Config, Environment};
use onejob::fingerprint::hex;
use onejob::job::JobId;
use onejob::server::TYPE_PREFIX;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::{Context, Exit, Failure, OrExit as _, duration, say, show};

/// How often one call is sent at most.
const SENDS_MAX: u32 = 5;
/// The pause before a call is sent again: doubles from the first to the second.
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(3);
/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Largest answer that is read: the largest result of a gateway, and its wrapping.
const ANSWER_BYTES_MAX: usize = 1 << 30;
/// The header that names a change, so that the same change sent again changes nothing.
const REQUEST_ID: HeaderName = HeaderName::from_static("onejob-request-id");

/// Which gateway, as whom.
#[derive(Clone, clap::Args)]
pub(super) struct GatewayArguments {
    /// The gateway. By default the configuration's server.listen, or http://127.0.0.1:7470.
    #[arg(long, env = "ONEJOB_GATEWAY", value_name = "URL", help_heading = "Gateway")]
    gateway: Option<String>,
    /// The environment variable that holds the bearer token, if the gateway wants one.
    #[arg(long, value_name = "NAME", default_value = "ONEJOB_TOKEN", help_heading = "Gateway")]
    token_env: String,
    /// How long one answer may take, beside what is waited for a job.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration, help_heading = "Gateway")]
    timeout: Duration,
}

/// A client of one gateway (or of a simulated provider's ledger).
pub(super) struct Client {
    http: legacy::Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    base: String,
    authorization: Option<HeaderValue>,
    /// The environment variable that the token is read from.
    token_env: Option<String>,
    timeout: Duration,
}

/// One call.
#[derive(Clone)]
pub(super) struct Call {
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
    /// How long the gateway is asked to wait.
    wait: Duration,
}

/// A complete answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// The body; a string if it is not JSON.
    pub(super) body: Value,
}

/// There is no complete answer: the call may have been executed.
#[derive(Debug, thiserror::Error)]
#[error("no answer from {gateway}: {reason}")]
pub(super) struct Unanswered {
    gateway: String,
    reason: String,
}

impl Call {
    pub(super) fn get(path: impl Into<String>) -> Self {
        Call { method: Method::GET, path: path.into(), headers: HeaderMap::new(), body: Bytes::new(), wait: Duration::ZERO }
    }

    pub(super) fn post(path: impl Into<String>, body: &impl serde::Serialize) -> Self {
        let body = serde_json::to_vec(body).expect("what is sent is plain data");
        Call::get(path).with(Method::POST, "application/json", body)
    }

    pub(super) fn put(path: impl Into<String>, text: &str) -> Self {
        Call::get(path).with(Method::PUT, "text/plain", text.to_owned().into_bytes())
    }

    fn with(mut self, method: Method, content_type: &'static str, body: Vec<u8>) -> Self {
        self.method = method;
        self.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        self.body = Bytes::from(body);
        self
    }

    /// A change by an operator or a client: named by its own words, so that the same words said twice are one decision.
    pub(super) fn change(path: impl Into<String>, body: &impl serde::Serialize) -> Self {
        Call::change_on(path, body, "")
    }

    /// The same, where the same words may be said again later and then are another decision: `occasion` tells them apart.
    pub(super) fn change_on(path: impl Into<String>, body: &impl serde::Serialize, occasion: &str) -> Self {
        let mut call = Call::post(path, body);
        let mut hash = Sha256::new();
        // Neither a path nor an occasion has a line break.
        for part in [call.path.as_bytes(), b"\n", occasion.as_bytes(), b"\n", &call.body] {
            hash.update(part);
        }
        let id = hex(&hash.finalize());
        call.headers.insert(REQUEST_ID, HeaderValue::from_str(&id).expect("digits are visible ASCII"));
        call
    }

    /// Under an idempotency key: visible ASCII, which the caller has checked.
    pub(super) fn keyed(mut self, key: &str) -> Self {
        let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
        let value = HeaderValue::from_str(&quoted).expect("a key is visible ASCII");
        self.headers.insert(HeaderName::from_static("idempotency-key"), value);
        self
    }

    /// Asks the gateway to wait for the job, in whole seconds.
    pub(super) fn waiting(mut self, wait: Duration) -> Self {
        let seconds = wait.as_secs();
        let value = HeaderValue::from_str(&format!("wait={seconds}")).expect("digits are visible ASCII");
        self.headers.insert(HeaderName::from_static("prefer"), value);
        self.wait = Duration::from_secs(seconds);
        self
    }
}

impl Client {
    pub(super) fn new(arguments: &GatewayArguments, context: &Context) -> Result<Self, Failure> {
        let gateway = match &arguments.gateway {
            Some(gateway) => gateway.clone(),
            None => reached_at(Config::listen(context.sources()).map_err(|error| {
                let error = anyhow::Error::new(error).context("cannot tell the gateway's address; name it by --gateway");
                Failure { exit: Exit::Usage, error, problem: None }
            })?)?,
        };
        let token = Environment::Process.get(&arguments.token_env).filter(|token| !token.is_empty());
        let client = Client::build(&gateway, token.as_deref(), arguments.timeout)?;
        Ok(Client { token_env: Some(arguments.token_env.clone()), ..client })
    }

    /// A client for a base URL.
    pub(super) fn build(base: &str, token: Option<&str>, timeout: Duration) -> Result<Self, Failure> {
        let base = base.trim_end_matches('/').to_owned();
        let uri: Uri =
            base.parse().map_err(|error| Failure::new(Exit::Usage, format!("the gateway {base:?} is no URL: {error}")))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            return Err(Failure::new(Exit::Usage, format!("the gateway {base:?} must be http:// or https:// and a host")));
        }
        let authorization = token.map(|token| HeaderValue::from_str(&format!("Bearer {token}"))).transpose();
        let mut authorization =
            authorization.map_err(|_| Failure::new(Exit::Usage, "the token has a character that no header may have"))?;
        if let Some(value) = &mut authorization {
            value.set_sensitive(true);
        }
        let http = legacy::Client::builder(TokioExecutor::new())
            .retry_canceled_requests(false)
            .pool_timer(TokioTimer::new())
            .build(connector(uri.scheme_str() == Some("https"))?);
        Ok(Client { http, base, authorization, token_env: None, timeout })
    }

    /// Sends a call once.
    pub(super) async fn send(&self, call: &Call) -> Result<Answer, Unanswered> {
        let within = self.timeout + call.wait;
        match tokio::time::timeout(within, self.exchange(call)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(reason)) => Err(Unanswered { gateway: self.base.clone(), reason }),
            Err(_) => {
                let reason = format!("nothing within {}", humantime::format_duration(within));
                Err(Unanswered { gateway: self.base.clone(), reason })
            }
        }
    }

    /// Sends a call that may safely be sent again, until it is answered, at most [`SENDS_MAX`] times.
    ///
    /// `same` says on stderr why sending it again is safe.
    pub(super) async fn send_safely(&self, call: &Call, same: &str) -> Result<Answer, Failure> {
        let mut pause = PAUSE_MIN;
        let mut said = String::new();
        for sends in 1.. {
            let (why, wanted) = match self.send(call).await {
                Ok(answer) if !answer.asks_to_come_again() => return Ok(answer),
                Ok(answer) if sends == SENDS_MAX => return Ok(answer),
                Ok(answer) => (answer.to_string(), answer.retry_after()),
                Err(unanswered) if sends == SENDS_MAX => {
                    return Err(Failure::new(Exit::Unavailable, format!("{unanswered} (sent {SENDS_MAX} times)")));
                }
                Err(unanswered) => (unanswered.to_string(), None),
            };
            // Once for each reason, not for each time.
            if why != said {
                say(format_args!("{why}; sending it again, {SENDS_MAX} times in all at most: {same}"));
                said = why;
            }
            tokio::time::sleep(wanted.unwrap_or(pause).min(PAUSE_MAX)).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        unreachable!("the last send returns")
    }

    /// Sends a call that may safely be sent again, and takes the answer for what it must be.
    pub(super) async fn ask(&self, call: &Call, same: &str, shape: Shape) -> Result<Value, Failure> {
        let answer = self.send_safely(call, same).await?;
        self.document(answer, shape)
    }

    /// Makes sure, before anything is changed, that it is a gateway that would be asked to: another server may take any request
    /// for one of its own, and execute it unguarded.
    pub(super) async fn insist_on_gateway(&self) -> Result<(), Failure> {
        let asked = self.ask(&Call::get("/openapi.json"), ONLY_ASKED, Shape::Description).await;
        asked.map(drop).map_err(|failure| {
            let error = anyhow::Error::msg(format!("{}; nothing was submitted or changed", failure.error));
            Failure { error, ..failure }
        })
    }

    /// The document of a success, or the failure that the answer stands for.
    ///
    /// An answer that no gateway gives comes from somebody else, whatever its status: it proves nothing about a job.
    pub(super) fn document(&self, answer: Answer, shape: Shape) -> Result<Value, Failure> {
        let foreign = if answer.status.is_success() { !shape.fits(&answer.body) } else { answer.is_foreign() };
        if foreign {
            return Err(Failure::new(Exit::Unavailable, format!("this is not a onejob gateway: {}", self.base)));
        }
        let no_token = answer.status == StatusCode::UNAUTHORIZED;
        answer.into_data().map_err(|failure| match &self.token_env {
            Some(name) if no_token => {
                let how = if self.authorization.is_some() { "has the token that was sent" } else { "must hold the token" };
                let error = anyhow::Error::msg(format!("{}; the environment variable {name} {how}", failure.error));
                Failure { error, ..failure }
            }
            Some(_) | None => failure,
        })
    }

    /// Reads until a job is as wanted, or the time is over: then as it is. The gateway is asked to wait `at_once` each time.
    pub(super) async fn wait(
        &self,
        id: &str,
        within: Duration,
        at_once: Duration,
        wanted: impl Fn(&Answer) -> bool,
        progress: impl Fn(&Answer),
    ) -> Result<Answer, Failure> {
        let deadline = Instant::now() + within;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let call = Call::get(format!("/v1/jobs/{id}")).waiting(left.min(at_once));
            let answer = self.send_safely(&call, SAME_READ).await?;
            if !answer.status.is_success() || wanted(&answer) || left.is_zero() {
                return Ok(answer);
            }
            progress(&answer);
            // A gateway that does not wait as asked is not asked in a tight loop; nor does the last second pass in one.
            tokio::time::sleep(PAUSE_MIN.min(left)).await;
        }
    }

    async fn exchange(&self, call: &Call) -> Result<Answer, String> {
        let mut request = Request::builder().method(call.method.clone()).uri(format!("{}{}", self.base, call.path));
        if let Some(headers) = request.headers_mut() {
            headers.extend(call.headers.clone());
            headers.extend(self.authorization.clone().map(|value| (header::AUTHORIZATION, value)));
        }
        let request = request.body(Full::new(call.body.clone())).map_err(|error| error.to_string())?;
        let response = self.http.request(request).await.map_err(|error| chain(&error))?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await.map_err(|error| error.to_string())?.to_bytes();
        let body = serde_json::from_slice(&body).unwrap_or_else(|_| Value::from(String::from_utf8_lossy(&body)));
        Ok(Answer { status: head.status, headers: head.headers, body })
    }
}

/// What an answer must have to be a gateway's.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    /// The gateway's description of itself.
    Description,
    Job,
    Jobs,
    /// What came of a decision about an attempt.
    Settled,
    /// What came of a request about a job.
    Changed,
}

impl Shape {
    fn fits(self, body: &Value) -> bool {
        let texts = |names: &[&str]| names.iter().all(|name| body[*name].is_string());
        let is_id = |value: &Value| value.as_str().is_some_and(|id| id.parse::<JobId>().is_ok());
        match self {
            Shape::Description => body["openapi"].is_string() && body["info"]["title"] == "onejob",
            Shape::Job => {
                is_id(&body["id"])
                    && texts(&["owner", "route", "state"])
                    && ["version", "revision", "created_ms"].iter().all(|name| body[*name].is_u64())
                    && ["attempts", "events"].iter().all(|name| body[*name].is_array())
            }
            Shape::Jobs => body["jobs"].as_array().is_some_and(|jobs| jobs.iter().all(|job| Shape::Job.fits(job))),
            Shape::Settled => texts(&["status"]),
            Shape::Changed => is_id(&body["id"]) && texts(&["status"]),
        }
    }
}

impl Answer {
    /// Whether somebody else refuses who is not even in the way to a gateway, as a proxy or its login would be.
    fn is_foreign(&self) -> bool {
        let ours = self.body["type"].as_str().is_some_and(|kind| kind.starts_with(TYPE_PREFIX));
        !ours && !matches!(self.status.as_u16(), 401 | 403 | 407 | 408 | 413 | 429 | 431 | 500..)
    }

    /// The body of a success, or the failure that the problem stands for.
    pub(super) fn into_data(self) -> Result<Value, Failure> {
        if self.status.is_success() {
            return Ok(self.body);
        }
        let error = anyhow::Error::msg(self.to_string());
        Err(Failure { exit: self.exit(), error, problem: self.body.is_object().then_some(self.body) })
    }

    /// The problem's name, `""` if it is none of ours.
    pub(super) fn problem(&self) -> &str {
        self.body["type"].as_str().and_then(|kind| kind.rsplit(':').next()).unwrap_or_default()
    }

    fn exit(&self) -> Exit {
        match (self.status.as_u16(), self.problem()) {
            (_, "key-conflict") => Exit::Conflict,
            (404, "route-unknown" | "path-unknown") => Exit::Usage,
            (401 | 403, _) => Exit::Unauthorized,
            (404 | 410, _) => Exit::NotFound,
            (409, _) => Exit::Conflict,
            (400..=407 | 411..=499, _) => Exit::Usage,
            (408 | 502..=504, _) => Exit::Unavailable,
            _ => Exit::Internal,
        }
    }

    /// Whether the same call may be answered otherwise in a moment, by this gateway or the next one.
    fn asks_to_come_again(&self) -> bool {
        let ours = self.body["retryable"].as_bool();
        matches!(self.status.as_u16(), 408 | 429 | 500 | 502..=504)
            && ours.unwrap_or(self.status != StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn retry_after(&self) -> Option<Duration> {
        self.headers.get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
    }
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.body["detail"].as_str() {
            Some(detail) => {
                // A wait is told in milliseconds; people read durations.
                let detail = match self.body["wait_ms"].as_u64() {
                    Some(ms) => detail.replace(&format!("{ms} ms"), &show::span(0, ms)),
                    None => detail.to_owned(),
                };
                write!(f, "{detail} ({} {})", self.status.as_u16(), self.problem())
            }
            None => write!(f, "the gateway answered {}", self.status),
        }
    }
}

/// Why sending a read again is safe.
pub(super) const SAME_READ: &str = "reading changes nothing";
/// The same, before anything is changed.
const ONLY_ASKED: &str = "it is only asked whether it is a gateway; nothing is submitted or changed yet";
/// Why sending a change again is safe.
pub(super) const SAME_REQUEST_ID: &str = "it has the same request id, so nothing happens twice";

/// The URL of a gateway of this machine that listens so.
fn reached_at(listen: SocketAddr) -> Result<String, Failure> {
    if listen.port() == 0 {
        return Err(Failure::new(Exit::Usage, "server.listen has port 0, which is any; name the gateway by --gateway"));
    }
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::from(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::from(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    Ok(format!("http://{}", SocketAddr::new(ip, listen.port())))
}

fn connector(tls: bool) -> Result<HttpsConnector<HttpConnector>, Failure> {
    let mut http = HttpConnector::new();
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    http.set_nodelay(true);
    http.enforce_http(false);
    let builder = HttpsConnectorBuilder::new();
    let builder = if tls {
        builder.with_provider_and_native_roots(rustls::crypto::ring::default_provider()).or_exit(Exit::Usage)?
    } else {
        // Nobody to trust, and nobody asks.
        let tls = rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .or_exit(Exit::Internal)?
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        builder.with_tls_config(tls)
    };
    Ok(builder.https_or_http().enable_http1().wrap_connector(http))
}

/// An error with its causes: hyper's own words alone say only "client error".
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: Value) -> Answer {
        Answer { status: StatusCode::from_u16(status).unwrap(), headers: HeaderMap::new(), body }
    }

    fn problem(status: u16, name: &str) -> Answer {
        answer(status, serde_json::json!({ "type": format!("urn:onejob:problem:{name}"), "retryable": status >= 500 }))
    }

    #[test]
    fn a_conflict_is_one_under_either_status() {
        assert_eq!(problem(409, "key-conflict").exit(), Exit::Conflict);
        assert_eq!(problem(422, "key-conflict").exit(), Exit::Conflict);
        assert_eq!(problem(422, "request-unrenderable").exit(), Exit::Usage);
    }

    #[test]
    fn what_is_not_there_is_told_from_what_was_mistyped() {
        assert_eq!(problem(404, "job-unknown").exit(), Exit::NotFound);
        assert_eq!(problem(410, "job-gone").exit(), Exit::NotFound);
        assert_eq!(problem(404, "route-unknown").exit(), Exit::Usage);
    }

    #[test]
    fn only_what_may_change_by_itself_is_sent_again() {
        for status in [502, 503, 504] {
            assert!(answer(status, Value::Null).asks_to_come_again(), "{status} of a proxy in between");
        }
        assert!(problem(503, "store-unavailable").asks_to_come_again());
        assert!(!problem(409, "attempt-quarantined").asks_to_come_again());
        assert!(!problem(400, "idempotency-key-missing").asks_to_come_again());
        assert!(!answer(500, Value::Null).asks_to_come_again());
    }

    #[test]
    fn the_same_words_are_the_same_decision_and_others_another() {
        let id = |path: &str, reason: &str, occasion: &str| {
            let call = Call::change_on(path, &serde_json::json!({ "reason": reason }), occasion);
            call.headers[REQUEST_ID].clone()
        };
        assert_eq!(id("/a", "jam", "1"), id("/a", "jam", "1"));
        for other in [id("/b", "jam", "1"), id("/a", "paper", "1"), id("/a", "jam", "2")] {
            assert_ne!(id("/a", "jam", "1"), other);
        }
    }

    #[test]
    fn a_gateway_that_listens_everywhere_is_reached_here() {
        let url = |listen: &str| reached_at(listen.parse().unwrap()).map_err(|failure| failure.error.to_string());
        assert_eq!(url("0.0.0.0:80").unwrap(), "http://127.0.0.1:80");
        assert_eq!(url("[::]:80").unwrap(), "http://[::1]:80");
        assert_eq!(url("10.1.2.3:80").unwrap(), "http://10.1.2.3:80");
        assert!(url("127.0.0.1:0").unwrap_err().contains("--gateway"));
    }

    #[test]
    fn a_key_goes_as_a_quoted_string() {
        let call = Call::get("/").keyed("a\"b\\c");
        assert_eq!(call.headers["idempotency-key"], "\"a\\\"b\\\\c\"");
    }
}
