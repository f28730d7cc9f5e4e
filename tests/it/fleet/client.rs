//! Clients that want their intents done: they submit, go to another gateway when one is dead or answers 503, wait, and write down
//! every answer that they were told.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use onejob::fingerprint::{Sha256Bytes, sha256};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Fleet;
use super::dice::Dice;
use super::intent::Intent;

/// How long a gateway is asked to wait for a job, in seconds.
const WAIT_SECONDS: u64 = 1;
/// How long a request may take; a gateway that does nothing keeps the connection open.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);
/// How long a client tries at all.
const PATIENCE: Duration = Duration::from_secs(90);
/// How often a client looks at a job that is unknown, at most.
const UNKNOWN_LOOKS: u32 = 2;

/// One answer that somebody was told, or that there was none.
#[derive(Clone, Debug)]
pub struct Told {
    pub intent: usize,
    pub gateway: usize,
    pub asked: Asked,
    /// 0: no answer.
    pub status: u16,
    /// When it was asked.
    pub at: Instant,
    pub took: Duration,
    /// `""`: none was told.
    pub job_id: String,
    pub state: String,
    pub result: Option<Sha256Bytes>,
    /// `Idempotency-Replayed`, of a submit.
    pub replayed: Option<bool>,
    pub retry_after: bool,
    /// The type of the problem, or why there was no answer.
    pub problem: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Submit,
    Read,
}

impl Told {
    pub fn is_accepted(&self) -> bool {
        matches!(self.status, 200 | 202) && !self.job_id.is_empty()
    }

    pub fn is_ended(&self) -> bool {
        self.is_accepted() && matches!(self.state.as_str(), "succeeded" | "failed" | "canceled" | "indeterminate")
    }
}

#[derive(Deserialize)]
struct Document<'a> {
    #[serde(default)]
    id: String,
    #[serde(default)]
    state: String,
    #[serde(borrow)]
    result: Option<ResultDocument<'a>>,
    #[serde(rename = "type", default)]
    kind: String,
}

#[derive(Deserialize)]
struct ResultDocument<'a> {
    body_encoding: &'a str,
    #[serde(borrow)]
    body: &'a RawValue,
}

impl ResultDocument<'_> {
    /// The hash of the provider's own bytes.
    fn sha256(&self) -> Sha256Bytes {
        match self.body_encoding {
            "json" => sha256(self.body.get().as_bytes()),
            _ => sha256(serde_json::from_str::<String>(self.body.get()).unwrap_or_default().as_bytes()),
        }
    }
}

/// Keep-alive connections to every gateway, and what came back.
pub struct Clients {
    http: HyperClient<HttpConnector, Full<Bytes>>,
    told: Mutex<Vec<Told>>,
}

impl Clients {
    pub fn new() -> Clients {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(Duration::from_secs(1)));
        connector.set_nodelay(true);
        // Who sends again is the client of the test, not its library.
        let http = HyperClient::builder(TokioExecutor::new()).retry_canceled_requests(false).build(connector);
        Clients { http, told: Mutex::default() }
    }

    /// Everything that was told until now.
    pub fn told(&self) -> Vec<Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All callers of one intent, and who comes late.
    pub async fn want(&self, fleet: &Fleet, seed: u64, intent: &Intent) {
        let callers = (0..intent.callers).map(|caller| {
            let dice = Dice::of(seed, "caller", intent.number * 16 + caller);
            self.pursue(fleet, intent, dice)
        });
        join_all(callers).await;
        if intent.latecomer {
            self.pursue(fleet, intent, Dice::of(seed, "caller", intent.number * 16 + 15)).await;
        }
    }

    /// One caller: until it is told how the job ended, or that nobody knows.
    async fn pursue(&self, fleet: &Fleet, intent: &Intent, mut dice: Dice) {
        let until = Instant::now() + PATIENCE;
        let mut gateway = dice.below(fleet.gateways.len());
        let mut known: Option<String> = None;
        let mut unknowns = 0;
        while Instant::now() < until {
            let told = match known.as_ref().filter(|_| dice.percent(50)) {
                Some(id) => self.read(fleet, gateway, intent, id).await,
                None => self.submit(fleet, gateway, intent).await,
            };
            match told.status {
                200 | 202 if told.is_ended() => return,
                200 | 202 => {
                    if told.state == "unknown" {
                        unknowns += 1;
                        if unknowns == UNKNOWN_LOOKS || dice.percent(70) {
                            return;
                        }
                    }
                    known = Some(told.job_id);
                }
                0 | 503 => {
                    gateway = (gateway + 1) % fleet.gateways.len();
                    tokio::time::sleep(dice.between_ms(20, 200)).await;
                }
                // Nothing else is an answer to a good request; the judge will say so.
                _ => return,
            }
        }
    }

    pub async fn submit(&self, fleet: &Fleet, gateway: usize, intent: &Intent) -> Told {
        let request = http::Request::post(format!("http://{}/v1/jobs", fleet.gateways[gateway].addr()))
            .header("content-type", "application/json")
            .header("idempotency-key", &intent.key)
            .header("prefer", format!("wait={WAIT_SECONDS}"))
            .body(Full::from(intent.body()))
            .unwrap();
        self.ask(gateway, intent, Asked::Submit, request).await
    }

    async fn read(&self, fleet: &Fleet, gateway: usize, intent: &Intent, id: &str) -> Told {
        let request = http::Request::get(format!("http://{}/v1/jobs/{id}", fleet.gateways[gateway].addr()))
            .header("prefer", format!("wait={WAIT_SECONDS}"))
            .body(Full::default())
            .unwrap();
        self.ask(gateway, intent, Asked::Read, request).await
    }

    async fn ask(&self, gateway: usize, intent: &Intent, asked: Asked, request: http::Request<Full<Bytes>>) -> Told {
        let began = Instant::now();
        let answer = tokio::time::timeout(REQUEST_TIMEOUT, self.send(request)).await;
        let mut told = Told {
            intent: intent.number,
            gateway,
            asked,
            status: 0,
            at: began,
            took: began.elapsed(),
            job_id: String::new(),
            state: String::new(),
            result: None,
            replayed: None,
            retry_after: false,
            problem: String::new(),
        };
        match answer {
            Err(_) => "no answer in time".clone_into(&mut told.problem),
            Ok(Err(why)) => told.problem = why,
            Ok(Ok((head, body))) => {
                told.status = head.status.as_u16();
                let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
                told.replayed = header("idempotency-replayed").map(|value| value == "true");
                told.retry_after = header("retry-after").is_some();
                match serde_json::from_slice::<Document<'_>>(&body) {
                    Ok(document) => {
                        told.result = document.result.as_ref().map(ResultDocument::sha256);
                        (told.job_id, told.state, told.problem) = (document.id, document.state, document.kind);
                    }
                    Err(error) => told.problem = format!("an answer that is no document: {error}"),
                }
            }
        }
        self.told.lock().unwrap_or_else(PoisonError::into_inner).push(told.clone());
        told
    }

    async fn send(&self, request: http::Request<Full<Bytes>>) -> Result<(http::response::Parts, Bytes), String> {
        let response = self.http.request(request).await.map_err(|error| format!("{error:?}"))?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(|error| format!("{error:?}"))?.to_bytes();
        Ok((head, body))
    }

    /// A page that is not about jobs: its status and text, 0 if there is none in time.
    pub async fn page(&self, fleet: &Fleet, gateway: usize, path: &str) -> (u16, String) {
        let url = format!("http://{}{path}", fleet.gateways[gateway].addr());
        let request = http::Request::get(url).body(Full::default()).unwrap();
        match tokio::time::timeout(REQUEST_TIMEOUT, self.send(request)).await {
            Ok(Ok((head, body))) => (head.status.as_u16(), String::from_utf8_lossy(&body).into_owned()),
            Ok(Err(_)) | Err(_) => (0, String::new()),
        }
    }
}
