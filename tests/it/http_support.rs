//! What the tests over HTTP stand on: a Redis of their own, a simulated provider, gateways in front, and a client that hides nothing.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use onejob::config::{ProviderEntry, Role};
use onejob::fingerprint::sha256;
use onejob::job::{Class, Owner, Rules};
use onejob::policy::{Effects, FailoverOn, Gate, Plan, Reconcile};
use onejob::provider::http::{HttpOptions, HttpProvider};
use onejob::provider::simulated::Simulated;
use onejob::runtime::{ProviderSlot, Route, Runtime, RuntimeOptions};
use onejob::server::{Gateway, Owners, ServerOptions, Tokens};
use onejob::store::{Store, StoreOptions};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::support::{Redis, SOON, simulated, until};

/// The provider's credential; it must never come out.
pub const PROVIDER_TOKEN: &str = "sk-provider-credential-0001";
/// Quarantine of every route: longer than any test.
pub const QUARANTINE_MS: u64 = 600_000;

/// One gateway that serves.
pub struct Served {
    pub addr: SocketAddr,
    pub runtime: Runtime,
    pub stop: CancellationToken,
    pub task: tokio::task::JoinHandle<()>,
    pub client: Client,
}

/// A Redis, a provider, and one gateway in front.
pub struct Site {
    pub redis: Redis,
    pub provider: Simulated,
    pub gateway: Served,
}

impl Site {
    pub async fn start() -> Site {
        Site::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut ServerOptions)) -> Site {
        Site::with_setup(|setup| change(&mut setup.server)).await
    }

    pub async fn with_setup(change: impl FnOnce(&mut Setup)) -> Site {
        let redis = Redis::start().await;
        let provider = simulated().await;
        let gateway = serve_with(&redis, &provider, change).await;
        Site { redis, provider, gateway }
    }

    /// A client of this owner's.
    pub fn client(&self, token: &str) -> Client {
        self.gateway.client.with_token(token)
    }

    /// The submitter that most tests are.
    pub fn alice(&self) -> Client {
        self.client("alice")
    }

    /// Another owner.
    pub fn bob(&self) -> Client {
        self.client("bob")
    }

    /// An operator who submits nothing.
    pub fn operator(&self) -> Client {
        self.client("operator")
    }
}

pub fn tokens() -> Tokens {
    let mut tokens = Tokens::default();
    for (owner, roles) in
        [("alice", &[Role::Submit][..]), ("bob", &[Role::Submit]), ("operator", &[Role::Operate]), ("nobody", &[])]
    {
        tokens.insert(sha256(owner.as_bytes()), Owner::new(owner).unwrap(), roles);
    }
    tokens
}

pub fn options() -> ServerOptions {
    let mut options = ServerOptions::from_config(&onejob::config::Server::default(), Owners::Tokens(tokens()));
    options.listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    options.forward_headers = BTreeMap::from([(
        "chat".to_owned(),
        ["openai-beta", "onejob-simulate", "authorization", "cookie"].map(str::to_owned).to_vec(),
    )]);
    options
}

/// What a test changes before its gateway starts.
pub struct Setup {
    pub server: ServerOptions,
    pub runtime: RuntimeOptions,
    pub store: StoreOptions,
    pub providers: Vec<ProviderSlot>,
    pub routes: Vec<Route>,
}

/// One more gateway before the same Redis and provider.
pub async fn serve(redis: &Redis, provider: &Simulated, change: impl FnOnce(&mut ServerOptions)) -> Served {
    serve_with(redis, provider, |setup| change(&mut setup.server)).await
}

/// One more gateway before the same Redis and provider, changed in any way.
pub async fn serve_with(redis: &Redis, provider: &Simulated, change: impl FnOnce(&mut Setup)) -> Served {
    serve_at(redis.url(), provider, change).await
}

/// The same, by the URL of whatever stands there.
pub async fn serve_at(url: &str, provider: &Simulated, change: impl FnOnce(&mut Setup)) -> Served {
    let mut store = StoreOptions::new(url);
    store.response_timeout = Duration::from_secs(2);
    store.connect_timeout = SOON;
    let runtime_options = RuntimeOptions { sweep: Duration::from_millis(100), waiters_max: 200, ..RuntimeOptions::default() };
    let providers = vec![
        slot("patient", &provider.base_url(), Duration::from_secs(30)),
        slot("hasty", &provider.base_url(), Duration::from_millis(300)),
        silent().await,
    ];
    let routes = vec![
        route("print", Class::Exclusive, &["patient"]),
        route("chat", Class::Exclusive, &["patient"]),
        route("hasty", Class::Exclusive, &["hasty"]),
        route("outside", Class::Exclusive, &[]),
        route("race", Class::Race, &[]),
        Route { rules: Rules { attempts_max: 1, ..rules(Class::Exclusive) }, ..route("once", Class::Exclusive, &[]) },
        Route { deadline: Some(Duration::from_millis(1500)), ..route("brief", Class::Race, &[]) },
        route("silent", Class::Exclusive, &["silent"]),
        Route {
            rules: Rules { retention_ms: 1, ..rules(Class::Exclusive) },
            ..route("forgetful", Class::Exclusive, &["patient"])
        },
    ];
    let mut setup = Setup { server: options(), runtime: runtime_options, store, providers, routes };
    change(&mut setup);
    let (store, _) = Store::connect(setup.store).await.unwrap();
    let runtime = Runtime::start(store, setup.runtime, setup.providers, setup.routes).unwrap();
    let gateway = Gateway::bind(setup.server, runtime.clone()).unwrap();
    let addr = gateway.addr();
    let stop = CancellationToken::new();
    let task = tokio::spawn(gateway.serve(stop.clone()));
    Served { addr, runtime, stop, task, client: Client::new(addr) }
}

/// A provider that hangs up on whatever it is asked.
async fn silent() -> ProviderSlot {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let base_url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 1024]).await;
        }
    });
    slot("silent", &base_url, Duration::from_secs(30))
}

pub fn slot(name: &str, base_url: &str, first_byte: Duration) -> ProviderSlot {
    let mut entry = ProviderEntry { base_url: base_url.to_owned(), path: "/work".to_owned(), ..ProviderEntry::default() };
    entry.timeouts.first_byte = first_byte;
    let options = HttpOptions::from_entry(&entry, Some(PROVIDER_TOKEN.to_owned()), 16 << 20);
    let provider = Arc::new(HttpProvider::new(name, options).unwrap());
    ProviderSlot { name: name.to_owned(), provider, total: Duration::from_secs(60), in_flight_max: 1000 }
}

pub fn rules(class: Class) -> Rules {
    Rules {
        attempts_max: 3,
        race_max: if class == Class::Race { 2 } else { 1 },
        race_after_ms: 1,
        key_life_ms: 3_600_000,
        retention_ms: 3_600_000,
        releases_on_failure: false,
        quarantine_ms: QUARANTINE_MS,
    }
}

pub fn route(name: &str, class: Class, providers: &[&str]) -> Route {
    Route {
        name: name.to_owned(),
        class,
        effects: Effects::External,
        providers: providers.iter().map(|name| (*name).to_owned()).collect(),
        deadline: Some(Duration::from_secs(120)),
        rules: rules(class),
        plan: Plan {
            providers: providers.len().max(1),
            attempts_max: 3,
            failover_on: vec![FailoverOn::NotSent, FailoverOn::Rejected { status: 429 }],
            gate: Gate::Off,
            backoff: Duration::from_millis(50),
        },
        fingerprint_ignore: Vec::new(),
        proof: onejob::runtime::Proof::default(),
        validator: None,
        reconcile: Reconcile::default(),
        tracked: None,
    }
}

/// An answer, whole.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The id of the job that is told of.
    pub fn job_id(&self) -> String {
        self.json()["id"].as_str().unwrap_or_else(|| panic!("{self:?}")).to_owned()
    }

    /// Checks that this is a problem of that type, in every respect that all problems share; returns the document.
    #[track_caller]
    pub fn problem(&self, status: u16, name: &str) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/problem+json", "{self:?}");
        let document = self.json();
        assert_eq!(document["type"], format!("urn:onejob:problem:{name}"), "{document}");
        assert_eq!(document["status"].to_string(), status.to_string());
        assert!(!document["title"].as_str().unwrap().is_empty() && !document["detail"].as_str().unwrap().is_empty());
        assert_eq!(self.header("x-should-retry"), document["retryable"].to_string(), "{document}");
        assert!(["gateway", "store", "provider", "job"].contains(&document["source"].as_str().unwrap()));
        assert!(status != 503 || !self.header("retry-after").is_empty(), "{self:?}");
        document
    }

    #[track_caller]
    pub fn is(self, status: u16) -> Answer {
        assert_eq!(self.status, status, "{self:?}");
        self
    }
}

/// An answer whose body is still to come. Dropping it closes its connection.
pub struct Opened {
    pub status: u16,
    pub headers: http::HeaderMap,
    body: hyper::body::Incoming,
    /// What was read of it.
    pub read: Vec<u8>,
}

impl Opened {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Reads on until the body has this text; false if it ends before, in whatever way.
    pub async fn reads(&mut self, text: &str) -> bool {
        let has = |read: &[u8]| read.windows(text.len()).any(|window| window == text.as_bytes());
        while !has(&self.read) {
            match tokio::time::timeout(SOON, self.body.frame()).await.expect("something comes, or it ends") {
                Some(Ok(frame)) => self.read.extend_from_slice(&frame.into_data().unwrap()),
                Some(Err(_)) | None => return false,
            }
        }
        true
    }

    /// Reads to the end: the whole body, or what was read of one that was broken off.
    pub async fn end(mut self) -> Result<Vec<u8>, Vec<u8>> {
        loop {
            match tokio::time::timeout(SOON, self.body.frame()).await.expect("something comes, or it ends") {
                Some(Ok(frame)) => self.read.extend_from_slice(&frame.into_data().unwrap()),
                Some(Err(_)) => return Err(self.read),
                None => return Ok(self.read),
            }
        }
    }
}

/// A request whose body is sent in parts, and whose answer may come meanwhile.
pub struct Feed {
    parts: mpsc::Sender<Result<Frame<Bytes>, std::io::Error>>,
    answer: tokio::task::JoinHandle<Opened>,
}

impl Feed {
    /// Sends a part. One that nobody takes any more is lost.
    pub async fn send(&self, part: impl Into<Bytes>) {
        let sent = self.parts.send(Ok(Frame::data(part.into())));
        let _ = tokio::time::timeout(SOON, sent).await.expect("it is taken, or the answer is over");
    }

    /// Waits for the answer's head; the body may still be sent.
    pub async fn opened(self) -> (mpsc::Sender<Result<Frame<Bytes>, std::io::Error>>, Opened) {
        let opened = tokio::time::timeout(SOON, self.answer).await.expect("there is an answer").unwrap();
        (self.parts, opened)
    }

    /// Ends the body and returns the answer, whole.
    pub async fn end(self) -> Answer {
        let Feed { parts, answer } = self;
        drop(parts);
        let opened = tokio::time::timeout(SOON, answer).await.expect("there is an answer").unwrap();
        let (status, headers) = (opened.status, opened.headers.clone());
        Answer { status, headers, body: opened.end().await.expect("it ends well").into() }
    }
}

/// A client of one owner at one gateway.
#[derive(Clone)]
pub struct Client {
    addr: SocketAddr,
    token: String,
    http: HyperClient<HttpConnector, Full<Bytes>>,
}

impl Client {
    pub fn new(addr: SocketAddr) -> Client {
        let http = HyperClient::builder(TokioExecutor::new()).retry_canceled_requests(false).build_http();
        Client { addr, token: String::new(), http }
    }

    pub fn with_token(&self, token: &str) -> Client {
        Client { token: token.to_owned(), ..self.clone() }
    }

    /// The same client, by HTTP/2 from the first byte.
    pub fn over_http2(&self) -> Client {
        let http = HyperClient::builder(TokioExecutor::new()).http2_only(true).retry_canceled_requests(false).build_http();
        Client { http, ..self.clone() }
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Answer {
        let mut request = http::Request::builder().method(method).uri(format!("http://{}{path}", self.addr));
        if !self.token.is_empty() {
            request = request.header("authorization", format!("Bearer {}", self.token));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).unwrap();
        let response = self.http.request(request).await.unwrap();
        let (head, body) = response.into_parts();
        Answer { status: head.status.as_u16(), headers: head.headers, body: body.collect().await.unwrap().to_bytes() }
    }

    /// Posts JSON under a key, and returns as soon as the answer's head is there.
    pub async fn open(&self, path: &str, key: &str, json: &str) -> Opened {
        let mut request = http::Request::builder().method("POST").uri(format!("http://{}{path}", self.addr));
        if !self.token.is_empty() {
            request = request.header("authorization", format!("Bearer {}", self.token));
        }
        request = request.header("content-type", "application/json").header("idempotency-key", key);
        let request = request.body(Full::new(Bytes::from(json.to_owned()))).unwrap();
        let (head, body) = self.http.request(request).await.unwrap().into_parts();
        Opened { status: head.status.as_u16(), headers: head.headers, body, read: Vec::new() }
    }

    /// Posts a body that is yet to come, by a connection of its own.
    pub fn feed(&self, path: &str, headers: &[(&str, &str)]) -> Feed {
        let (parts, coming) = mpsc::channel::<Result<Frame<Bytes>, std::io::Error>>(1);
        let mut request = http::Request::builder().method("POST").uri(format!("http://{}{path}", self.addr));
        if !self.token.is_empty() {
            request = request.header("authorization", format!("Bearer {}", self.token));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = futures_util::stream::unfold(coming, |mut coming| async { Some((coming.recv().await?, coming)) });
        let request = request.body(StreamBody::new(Box::pin(body))).unwrap();
        let http = HyperClient::builder(TokioExecutor::new()).retry_canceled_requests(false).build_http();
        let answer = tokio::spawn(async move {
            let (head, body) = http.request(request).await.unwrap().into_parts();
            Opened { status: head.status.as_u16(), headers: head.headers, body, read: Vec::new() }
        });
        Feed { parts, answer }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], "").await
    }

    /// Posts JSON.
    pub async fn post(&self, path: &str, json: &str) -> Answer {
        self.send("POST", path, &[("content-type", "application/json")], json.to_owned()).await
    }

    /// Submits an input under a key.
    pub async fn submit(&self, route: &str, key: &str, input: &str) -> Answer {
        self.submit_with(route, key, input, &[]).await
    }

    pub async fn submit_with(&self, route: &str, key: &str, input: &str, headers: &[(&str, &str)]) -> Answer {
        let mut all = vec![("content-type", "application/json"), ("idempotency-key", key)];
        all.extend_from_slice(headers);
        self.send("POST", "/v1/jobs", &all, format!("{{\"route\":\"{route}\",\"input\":{input}}}")).await
    }

    /// A job that ended.
    pub async fn ended(&self, id: &str) -> Value {
        self.send("GET", &format!("/v1/jobs/{id}"), &[("prefer", "wait=20")], "").await.is(200).json()
    }

    /// A job, once it is in this state.
    pub async fn in_state(&self, id: &str, state: &str) -> Value {
        let path = format!("/v1/jobs/{id}");
        until(&format!("job {id} is {state}"), async || self.get(&path).await.is(200).json()["state"] == state).await;
        self.get(&path).await.json()
    }

    /// Begins an attempt from outside and marks it as running; returns its token.
    pub async fn begin_running(&self, id: &str, provider: &str) -> (u64, String) {
        let begin = format!("{{\"provider\":\"{provider}\",\"lease_ms\":60000}}");
        let begun = self.post(&format!("/v1/jobs/{id}/attempts"), &begin).await.is(201).json();
        let (number, token) = (begun["number"].as_u64().unwrap(), begun["token"].as_str().unwrap().to_owned());
        let path = format!("/v1/jobs/{id}/attempts/{number}/running");
        self.post(&path, &format!("{{\"token\":\"{token}\"}}")).await.is(200);
        (number, token)
    }
}

/// Sends bytes as they are and returns what comes until the connection closes.
pub async fn raw(addr: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    // The other side may answer and close before it has read everything.
    let _ = stream.write_all(bytes).await;
    rest(&mut stream).await
}

/// What comes until the connection closes.
pub async fn rest(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let mut chunk = [0; 4096];
    let read = async {
        while let Ok(length @ 1..) = stream.read(&mut chunk).await {
            answer.extend_from_slice(&chunk[..length]);
        }
    };
    tokio::time::timeout(SOON, read).await.expect("the connection must be closed");
    String::from_utf8_lossy(&answer).into_owned()
}
