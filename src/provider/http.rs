//! The `http` adapter: one request, one answer, and a judgement of what became of it.
//!
//! An outcome is judged from what is *known* to have been handed to the network (the gate in `http/connection.rs`), never from
//! the kind of a library's error. Before the first byte: [`Outcome::NotSent`]. After it, anything but a complete answer that
//! means something definite (`http/judge.rs`) is [`Outcome::Unknown`].
//!
//! Over HTTP/1.1 a call has a connection of its own (`http/connection.rs`), over HTTP/2 calls share one and each has its own evidence
//! (`http/h2.rs`).
//!
//! Deliberately not here: repetition of any kind (a request is handed to the network at most once; only a connection that was
//! found closed *before* that is replaced), redirects, content decoding, proxies from the environment, concurrency limits
//! and circuit breaking (the runtime's). What is asked about an attempt, and what the answer proves, is `asking.rs`.
//!
//! The table of outcomes is `docs/PROTOCOL.md`, "Outcomes".

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http_body_util::Full;

use self::about::Former;
use self::connection::Connector;
use self::exchange::{Exchange, Exchanged};
pub(crate) use self::judge::refuses;
use self::judge::{Answer, Hidden, Judge};
use self::render::Origin;
use self::stream::Listener;
use crate::config::{Adapter, Http2, ProviderEntry, Stream, Timeouts};
use crate::job::JobId;
use crate::provider::asking::{About, Asking, template};
use crate::provider::{
    Abilities, Call, Evidence, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request, Response, Sent,
};

mod about;
mod connection;
mod exchange;
mod h2;
mod judge;
mod render;
mod stream;

/// Shortest bearer token: a shorter one could not be hidden in an answer without mangling ordinary text.
pub const BEARER_BYTES_MIN: usize = 8;

/// The header that names the job to the provider.
pub const JOB_ID_HEADER: &str = "onejob-job-id";
/// The header that numbers the attempt to the provider.
pub const ATTEMPT_HEADER: &str = "onejob-attempt";

/// How an HTTP provider is reached. A plain value; [`HttpProvider::new`] checks it.
#[derive(Clone)]
pub struct HttpOptions {
    /// `http://` or `https://`, host, and a path that every target is appended to. No query, no user.
    pub base_url: String,
    /// The path of a request that names none.
    pub path: String,
    /// The method of a request that names none.
    pub method: String,
    /// A template of the body, around the job's own; `None` for the job's own as it is.
    pub body: Option<String>,
    /// The bearer token. A secret: `Debug` hides it, and so does every answer that repeats it.
    pub bearer: Option<String>,
    /// Headers that every request carries; they win over the request's own. Not for credentials: they are not hidden.
    pub headers: BTreeMap<String, String>,
    /// How long each phase may take.
    pub timeouts: Timeouts,
    /// The header that carries the attempt's idempotency key, if the provider takes one.
    pub idempotency_header: Option<String>,
    /// Statuses that the provider swears mean "did nothing". Never 2xx.
    pub not_executed: Vec<u16>,
    /// How its streams of server-sent events are read.
    pub stream: Stream,
    /// JSON pointer to a number in an answer: what the work cost.
    pub cost: Option<String>,
    /// Largest body of an answer.
    pub result_bytes_max: usize,
    /// A PEM file of the authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// What it can be asked about an attempt.
    pub asking: Asking,
    /// Base URLs that it had before: attempts that were sent there are asked about there, with the same credential.
    pub former_base_urls: Vec<String>,
    /// Whether it is spoken to in HTTP/2.
    pub http2: Http2,
}

/// The base URL of whoever is not reached.
const NOWHERE: &str = "http://127.0.0.1";
/// Largest answer, unless the options say otherwise.
const RESULT_BYTES_MAX: usize = 16 << 20;

impl HttpOptions {
    /// The defaults, for a base URL.
    pub fn new(base_url: &str) -> Self {
        let entry = ProviderEntry { base_url: base_url.to_owned(), ..ProviderEntry::default() };
        HttpOptions::from_entry(&entry, None, RESULT_BYTES_MAX)
    }

    /// The options that a provider's configuration stands for, with its credential resolved by the caller.
    pub fn from_entry(entry: &ProviderEntry, bearer: Option<String>, result_bytes_max: usize) -> Self {
        HttpOptions {
            base_url: entry.base_url.clone(),
            path: entry.path.clone(),
            method: entry.method.clone(),
            // What is handed in is made by `async_http`, which knows where to call back.
            body: entry.submit.as_ref().filter(|_| !entry.is_asynchronous()).and_then(|submit| submit.body.clone()),
            bearer,
            headers: entry.headers.clone(),
            timeouts: entry.timeouts,
            idempotency_header: match (&entry.idempotency, &entry.find) {
                (Some(idempotency), _) => Some(idempotency.header.clone()),
                (None, Some(find)) => find.header.clone(),
                (None, None) => None,
            },
            not_executed: entry.not_executed.clone(),
            stream: entry.stream.clone(),
            cost: entry.cost.clone(),
            result_bytes_max,
            ca_file: entry.ca_file.clone(),
            asking: Asking::from_entry(entry),
            former_base_urls: entry.former_base_urls.clone(),
            http2: entry.http2,
        }
    }
}

impl fmt::Debug for HttpOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpOptions")
            .field("base_url", &self.base_url)
            .field("path", &self.path)
            .field("method", &self.method)
            .field("bearer", &self.bearer.as_ref().map(|_| "…"))
            .field("headers", &self.headers)
            .field("timeouts", &self.timeouts)
            .field("idempotency_header", &self.idempotency_header)
            .field("not_executed", &self.not_executed)
            .field("stream", &self.stream)
            .field("cost", &self.cost)
            .field("result_bytes_max", &self.result_bytes_max)
            .field("ca_file", &self.ca_file)
            .field("asking", &self.asking)
            .field("former_base_urls", &self.former_base_urls)
            .field("http2", &self.http2)
            .finish()
    }
}

/// Why a provider cannot be built from its options. Never says the credential.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("provider {provider}: {problem}")]
pub struct HttpError {
    /// The provider's name.
    pub provider: String,
    /// What is wrong.
    pub problem: HttpProblem,
}

/// What is wrong with a provider's options.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpProblem {
    /// Not a base that a target can be appended to.
    #[error("base_url {0:?} must be http:// or https://, a host and at most a path")]
    BaseUrl(String),
    /// Not a path.
    #[error("path: {0}")]
    Path(RenderError),
    /// Not a method.
    #[error("method {0:?} must be 1 to 32 upper case letters, and not CONNECT or TRACE")]
    Method(String),
    /// A header that cannot be sent, or that the adapter sets itself.
    #[error("header {0:?} cannot be set: it is not a header, or it is set by other means")]
    Header(String),
    /// A token that cannot be sent or hidden.
    #[error("the bearer token must be at least {BEARER_BYTES_MIN} bytes of visible ASCII")]
    Bearer,
    /// A success cannot mean "did nothing".
    #[error("not_executed holds {0}; only statuses from 300 to 599 can mean that nothing was done")]
    NotExecuted(u16),
    /// No authorities to trust.
    #[error("cannot read authorities from {from}: {reason}")]
    Authorities {
        /// The file, or the system's store.
        from: String,
        /// Why.
        reason: String,
    },
}

/// What a provider's entry makes of requests, for whoever sends none: no connection, no credential, no authorities.
pub struct Renderer(render::Base);

impl Renderer {
    /// Of an entry, whichever its adapter is. One that has its address from elsewhere, as a simulated one, is rendered without it.
    ///
    /// # Errors
    /// The entry is refused, naming what and why.
    pub fn of(entry: &ProviderEntry) -> Result<Self, HttpProblem> {
        let mut options = HttpOptions::from_entry(entry, None, RESULT_BYTES_MAX);
        options.body = entry.submit.as_ref().and_then(|submit| submit.body.clone());
        if entry.adapter == Adapter::Simulated {
            options.base_url = NOWHERE.to_owned();
        }
        let idempotency_header = options.idempotency_header.as_deref().map(own_header_name).transpose()?;
        render::Base::new(&options, idempotency_header.as_ref()).map(Renderer)
    }

    /// Renders a request as the provider itself does.
    ///
    /// # Errors
    /// It cannot be rendered.
    pub fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        self.0.render(request)
    }
}

/// A provider behind one origin.
///
/// Holds connections of its own; dropping it closes those that are idle.
pub struct HttpProvider {
    name: String,
    render: render::Base,
    authorization: Option<HeaderValue>,
    idempotency_header: Option<HeaderName>,
    judge: Judge,
    stream: Stream,
    cost: Option<String>,
    exchange: Exchange,
    asking: Asking,
    former: Vec<Former>,
}

impl fmt::Debug for HttpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpProvider").field("name", &self.name).finish_non_exhaustive()
    }
}

impl HttpProvider {
    /// Builds a provider. Reads the authorities' file (or, for `https`, the system's store); connects to nothing.
    ///
    /// # Errors
    /// The options are refused, naming what and why.
    pub fn new(name: &str, options: HttpOptions) -> Result<HttpProvider, HttpError> {
        Self::build(name, options).map_err(|problem| HttpError { provider: name.to_owned(), problem })
    }

    fn build(name: &str, options: HttpOptions) -> Result<HttpProvider, HttpProblem> {
        let idempotency_header = options.idempotency_header.as_deref().map(own_header_name).transpose()?;
        if let Some(&status) = options.not_executed.iter().find(|status| !(300..600).contains(*status)) {
            return Err(HttpProblem::NotExecuted(status));
        }
        let authorization = options.bearer.as_deref().map(authorization).transpose()?;
        let render = render::Base::new(&options, idempotency_header.as_ref())?;
        let connector = Connector::new(&render.origin, options.ca_file.as_deref(), options.http2)?;
        let former = options.former_base_urls.iter().map(|url| Former::new(url, &options)).collect::<Result<_, _>>()?;
        Ok(HttpProvider {
            name: name.to_owned(),
            render,
            authorization,
            idempotency_header,
            cost: options.cost,
            judge: Judge { hidden: Hidden::new(options.bearer.as_deref()), not_executed: options.not_executed },
            stream: options.stream,
            exchange: Exchange::new(connector, options.timeouts, options.result_bytes_max),
            asking: options.asking,
            former,
        })
    }

    /// Fills into a body that was made by a template what names the attempt.
    fn name_attempt(&self, call: &mut Call) -> Result<(), String> {
        if self.render.body.is_none() {
            return Ok(());
        }
        let job_id = call.job_id.map(|id| id.to_string()).unwrap_or_default();
        let names = template::Names { key: &call.idempotency_key, job_id: &job_id, attempt: call.attempt, webhook_url: "" };
        call.rendered.body = template::filled(&call.rendered.body, &names)?.into();
        Ok(())
    }

    /// Sends an attempt, at most once, and judges what came of it.
    pub(super) async fn call(&self, mut call: Call) -> Outcome {
        if let Err(reason) = self.name_attempt(&mut call) {
            return Outcome::NotSent { reason };
        }
        let request = match self.request(&call) {
            Ok(request) => request,
            Err(reason) => return Outcome::NotSent { reason },
        };
        let mut listener = Listener::new(&self.judge, &self.stream, &call.told);
        match self.exchange.send(&request, &call.fence, call.deadline, &mut listener).await {
            Exchanged::NotSent { reason } => Outcome::NotSent { reason },
            Exchanged::Lost { reason } => Outcome::Unknown { reason },
            Exchanged::Answered { head, body } => match listener.seen() {
                Some(seen) if request.method() != http::Method::HEAD => self.judge.judge_stream(&head, body, seen, &self.stream),
                Some(_) | None => {
                    let http::response::Parts { status, version, headers, .. } = &head;
                    let answer = Answer { status: *status, version: *version, headers, body, method: request.method() };
                    self.judge.judge(answer)
                }
            },
        }
    }

    /// The request as it is sent: what was rendered, and what names the attempt.
    fn request(&self, call: &Call) -> Result<http::Request<Full<Bytes>>, String> {
        let key = call.job_id.map(|_| call.idempotency_key.as_str());
        let names = Names { job_id: call.job_id, attempt: call.attempt, key, traceparent: call.traceparent.as_deref() };
        self.assemble(&self.render.origin, &call.rendered, &names)
    }

    /// A request to an origin of ours, with the credential.
    fn assemble(&self, origin: &Origin, rendered: &Rendered, names: &Names<'_>) -> Result<http::Request<Full<Bytes>>, String> {
        let uri: http::Uri = rendered.url.parse().map_err(|_| "invalid: the rendered url is no url".to_owned())?;
        if !origin.is_of(&uri) {
            return Err("invalid: the rendered url has another origin than this provider".to_owned());
        }
        let mut headers = HeaderMap::with_capacity(rendered.headers.len() + 8);
        headers.insert(header::HOST, origin.host.clone());
        for (name, value) in &rendered.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| format!("invalid: header name {name:?}"))?;
            let value = HeaderValue::from_str(value).map_err(|_| format!("invalid: the value of header {name}"))?;
            headers.append(name, value);
        }
        if !rendered.body.is_empty() || !matches!(rendered.method.as_str(), "GET" | "HEAD") {
            headers.insert(header::CONTENT_LENGTH, HeaderValue::from(rendered.body.len()));
        }
        if let Some(authorization) = &self.authorization {
            headers.insert(header::AUTHORIZATION, authorization.clone());
        }
        if let (Some(name), Some(key)) = (&self.idempotency_header, names.key) {
            let key = HeaderValue::from_str(key).map_err(|_| "invalid: the idempotency key".to_owned())?;
            headers.insert(name.clone(), key);
        }
        if let Some(traceparent) = names.traceparent {
            let traceparent = HeaderValue::from_str(traceparent).map_err(|_| "invalid: the traceparent".to_owned())?;
            headers.insert("traceparent", traceparent);
        }
        if let Some(job_id) = names.job_id {
            let job_id = HeaderValue::from_str(&job_id.to_string()).expect("a job id is visible ASCII");
            headers.insert(JOB_ID_HEADER, job_id);
            headers.insert(ATTEMPT_HEADER, HeaderValue::from(names.attempt));
        }

        let origin_form = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
        let mut request = http::Request::builder()
            .method(rendered.method.as_str())
            .uri(origin_form)
            .body(Full::new(Bytes::from_owner(Arc::clone(&rendered.body))))
            .map_err(|_| "invalid: the method or the url".to_owned())?;
        *request.headers_mut() = headers;
        Ok(request)
    }
}

/// What names an attempt to its provider.
struct Names<'a> {
    /// `None` for a request without a job.
    job_id: Option<JobId>,
    attempt: u32,
    /// The idempotency key, where it belongs.
    key: Option<&'a str>,
    traceparent: Option<&'a str>,
}

impl Provider for HttpProvider {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        self.render.render(request)
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(self.call(call))
    }

    fn cost(&self, response: &Response) -> Option<u64> {
        cost_at(self.cost.as_deref()?, &response.body)
    }

    fn replay(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        if self.asking.replay.is_some() {
            return Box::pin(self.call(call));
        }
        Box::pin(std::future::ready(Outcome::Unknown { reason: "this provider does not honour keys".to_owned() }))
    }

    fn abilities(&self) -> Abilities {
        self.asking.abilities()
    }

    fn status(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        Box::pin(self.inquire(About::Status, sent))
    }

    fn find(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        Box::pin(self.inquire(About::Find, sent))
    }

    fn cancel(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        Box::pin(self.inquire(About::Cancel, sent))
    }
}

/// A number of an answer, in whole units: a fraction of one counts as one.
fn cost_at(pointer: &str, body: &[u8]) -> Option<u64> {
    let answer: serde_json::Value = serde_json::from_slice(body).ok()?;
    let cost = answer.pointer(pointer)?;
    cost.as_u64().or_else(|| cost.as_f64().filter(|cost| (0.0..1e15).contains(cost)).map(|cost| cost.ceil() as u64))
}

fn own_header_name(name: &str) -> Result<HeaderName, HttpProblem> {
    let refused = || HttpProblem::Header(name.to_owned());
    let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|_| refused())?;
    if render::is_reserved(parsed.as_str()) { Err(refused()) } else { Ok(parsed) }
}

fn authorization(bearer: &str) -> Result<HeaderValue, HttpProblem> {
    if bearer.len() < BEARER_BYTES_MIN || !bearer.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(HttpProblem::Bearer);
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {bearer}")).map_err(|_| HttpProblem::Bearer)?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Adapter, Submit};
    use crate::provider::async_http::{AsyncHttpOptions, AsyncHttpProvider};

    #[test]
    fn what_is_certified_is_rendered_as_each_adapter_renders() {
        let submit = Submit { body: Some("{{ with(body, user=key, model='m') }}".to_owned()), id: None };
        let request = Request {
            method: String::new(),
            target: "/print?x=1".to_owned(),
            content_type: "application/json".to_owned(),
            headers: vec![("accept".to_owned(), "text/plain".to_owned())],
            body: b"{\"pages\":1.50}".as_slice().into(),
        };
        for adapter in [Adapter::Http, Adapter::AsyncHttp] {
            let entry = ProviderEntry {
                adapter,
                base_url: "http://a.example/v1".to_owned(),
                headers: BTreeMap::from([("x-tray".to_owned(), "a4".to_owned())]),
                submit: Some(submit.clone()),
                ..ProviderEntry::default()
            };
            let options = HttpOptions::from_entry(&entry, None, RESULT_BYTES_MAX);
            let provider: Box<dyn Provider> = match adapter {
                Adapter::AsyncHttp => {
                    Box::new(AsyncHttpProvider::new("a", AsyncHttpOptions::from_entry(&entry, options, None)).unwrap())
                }
                Adapter::Http | Adapter::Simulated => Box::new(HttpProvider::new("a", options).unwrap()),
            };
            let rendered = provider.render(&request).unwrap();
            assert_eq!(Renderer::of(&entry).unwrap().render(&request).unwrap(), rendered, "{adapter:?}");
            assert_eq!(rendered.body[..], *b"{\"pages\":1.50,\"model\":\"m\",\"user\":\0key\0}");
        }
    }

    #[test]
    fn a_cost_is_a_number_of_whole_units_at_its_place() {
        let cost = |body: &str| cost_at("/usage/total_tokens", body.as_bytes());
        assert_eq!(cost(r#"{"usage":{"total_tokens":7}}"#), Some(7));
        assert_eq!(cost(r#"{"usage":{"total_tokens":0.2}}"#), Some(1));
        for body in ["", "{}", "7", r#"{"usage":{"total_tokens":"7"}}"#, r#"{"usage":{"total_tokens":-1}}"#] {
            assert_eq!(cost(body), None, "{body}");
        }
        assert_eq!(cost(r#"{"usage":{"total_tokens":1e300}}"#), None);
    }
}
