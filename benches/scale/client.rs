//! Clients over HTTP on kept connections: an intent arrives at its time whatever has become of the others, is submitted to one
//! gateway after another until one answers, and is waited for until its job has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Most intents under way. Beyond, they begin later than they arrive, and that is in how long they took.
const UNDER_WAY_MAX: usize = 4_000;
/// How long one request may take; longer than the wait that it asks for.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
const WAIT_SECONDS: u32 = 10;
/// How long an intent may take in all.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a gateway that did not answer is left alone, as a load balancer does.
const DOWN: Duration = Duration::from_secs(1);
const RETRY_PAUSE: Duration = Duration::from_millis(20);
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// What clients share.
pub(crate) struct Clients {
    client: Client<HttpConnector, Full<Bytes>>,
    gateways: Vec<Target>,
    next: AtomicUsize,
    began: Instant,
}

struct Target {
    url: String,
    /// Until when it is left alone, in ms since the beginning.
    down_until_ms: AtomicU64,
}

/// What became of one intent.
pub(crate) struct Told {
    pub(crate) intent: u64,
    /// From the moment it was to arrive to the answer with the job's end.
    pub(crate) took: Duration,
    /// Requests that were not answered, or answered with 5xx.
    pub(crate) errors: u32,
    /// The job that a gateway acknowledged, and how it ended as far as the client was told.
    pub(crate) job: Option<(String, String)>,
}

impl Clients {
    pub(crate) fn of(gateways: impl Iterator<Item = String>) -> Clients {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Clients {
            client: Client::builder(TokioExecutor::new()).build(connector),
            gateways: gateways.map(|url| Target { url, down_until_ms: AtomicU64::new(0) }).collect(),
            next: AtomicUsize::new(0),
            began: Instant::now(),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The next gateway that is not left alone.
    fn pick(&self) -> &Target {
        let (first, now_ms) = (self.next.fetch_add(1, Ordering::Relaxed), self.now_ms());
        let turn = (0..self.gateways.len()).map(|step| &self.gateways[(first + step) % self.gateways.len()]);
        let mut up = turn.filter(|target| target.down_until_ms.load(Ordering::Relaxed) <= now_ms);
        up.next().unwrap_or(&self.gateways[first % self.gateways.len()])
    }

    async fn ask(&self, method: Method, target: &Target, path: &str, intent: u64, body: String) -> Result<Value> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", target.url))
            .header("content-type", "application/json")
            .header("idempotency-key", format!("intent-{intent}"))
            .header("prefer", format!("wait={WAIT_SECONDS}"))
            .body(Full::new(Bytes::from(body)))?;
        let exchange = async {
            let answer = self.client.request(request).await?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|error| anyhow::anyhow!("a body broke off: {error}"))?.to_bytes();
            if !status.is_success() {
                bail!("{status}: {}", String::from_utf8_lossy(&body));
            }
            Ok(serde_json::from_slice(&body)?)
        };
        tokio::time::timeout(REQUEST_TIMEOUT, exchange).await.context("no answer in time")?
    }

    /// One intent, from its arrival to its job's end.
    async fn intend(&self, intent: u64, arrived: Instant) -> Told {
        let mut told = Told { intent, took: Duration::ZERO, errors: 0, job: None };
        while arrived.elapsed() < PATIENCE {
            let target = self.pick();
            let asked = match &told.job {
                None => {
                    let body = format!(r#"{{"route":"print","input":{{"intent":{intent},"file":"invoice.pdf"}}}}"#);
                    self.ask(Method::POST, target, "/v1/jobs", intent, body).await
                }
                Some((id, _)) => self.ask(Method::GET, target, &format!("/v1/jobs/{id}"), intent, String::new()).await,
            };
            match asked {
                Ok(job) => {
                    let word = |name: &str| job[name].as_str().unwrap_or_default().to_owned();
                    let state = word("state");
                    let is_over = ["succeeded", "failed", "canceled", "indeterminate"].contains(&state.as_str());
                    told.job = Some((word("id"), state));
                    if is_over {
                        break;
                    }
                    // An unknown job is answered at once, however long one would wait.
                    tokio::time::sleep(RETRY_PAUSE * 10).await;
                }
                Err(_) => {
                    told.errors += 1;
                    target.down_until_ms.store(self.now_ms() + DOWN.as_millis() as u64, Ordering::Relaxed);
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
        told.took = arrived.elapsed();
        told
    }

    /// So many intents a second for so long, each at its time; returns when the last of them is over.
    pub(crate) async fn open_loop(self: &Arc<Self>, first: u64, rate: f64, window: Duration) -> Result<Vec<Told>> {
        let count = (rate * window.as_secs_f64()) as u64;
        let began = Instant::now();
        let room = Arc::new(tokio::sync::Semaphore::new(UNDER_WAY_MAX));
        let mut under_way = tokio::task::JoinSet::new();
        for number in 0..count {
            let arrives = began + Duration::from_secs_f64(number as f64 / rate);
            tokio::time::sleep_until(arrives.into()).await;
            let room = Arc::clone(&room).acquire_owned().await?;
            let clients = Arc::clone(self);
            under_way.spawn(async move {
                let told = clients.intend(first + number, arrives).await;
                drop(room);
                told
            });
        }
        Ok(under_way.join_all().await)
    }

    /// As many as so many clients make, each one after another; how many a second that were.
    pub(crate) async fn closed_loop(self: &Arc<Self>, first: u64, clients: usize, window: Duration) -> Result<(f64, u64)> {
        let (began, next) = (Instant::now(), Arc::new(AtomicU64::new(first)));
        let mut working = tokio::task::JoinSet::new();
        for _ in 0..clients {
            let (clients, next) = (Arc::clone(self), Arc::clone(&next));
            working.spawn(async move {
                while began.elapsed() < window {
                    clients.intend(next.fetch_add(1, Ordering::Relaxed), Instant::now()).await;
                }
            });
        }
        working.join_all().await;
        let made = next.load(Ordering::Relaxed) - first;
        if made == 0 {
            bail!("no job in {window:?}");
        }
        Ok((made as f64 / began.elapsed().as_secs_f64(), made))
    }
}
