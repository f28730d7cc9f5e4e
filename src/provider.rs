//! What onejob asks of a provider, and what an outcome is.
//!
//! The [`Provider`] trait is the seam between the runtime and the world that does the work. An adapter's whole duty is to judge
//! an outcome *from what it knows was sent*: a timeout after the first byte may have left is [`Outcome::Unknown`], never a
//! failure. Adapters know nothing of Redis or of the state machine; they are given a [`Call`] and return an [`Outcome`].
//!
//! The table of outcomes is `docs/PROTOCOL.md`, "Outcomes".

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::config::Missing;
use crate::fingerprint::{Sha256Bytes, sha256};
use crate::job::JobId;

pub mod asking;
pub mod async_http;
pub mod http;
#[cfg(feature = "gateway")]
pub mod simulated;
pub mod webhook;

/// What a job asks for, as it was submitted, independent of any provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Upper case. Empty: the provider's own default.
    pub method: String,
    /// Path with query, appended to the provider's base URL. Empty: the provider's own default.
    pub target: String,
    /// The content type as sent; `""` for none.
    pub content_type: String,
    /// Further headers that go to the provider, in order; names lower case. Never a credential.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Arc<[u8]>,
}

impl Request {
    /// The head as the record keeps it: `METHOD target`, then one `name: value` line for each header.
    pub(crate) fn head(&self) -> String {
        let mut head = format!("{} {}", self.method, self.target);
        if !self.content_type.is_empty() {
            push_header(&mut head, CONTENT_TYPE, &self.content_type);
        }
        for (name, value) in &self.headers {
            push_header(&mut head, name, value);
        }
        head
    }

    /// The request from its kept head and body.
    pub(crate) fn from_head(head: &str, body: Arc<[u8]>) -> Self {
        let mut lines = head.split('\n');
        let (method, target) = lines.next().unwrap_or_default().split_once(' ').unwrap_or_default();
        let mut request = Request {
            method: method.to_owned(),
            target: target.to_owned(),
            content_type: String::new(),
            headers: Vec::new(),
            body,
        };
        for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
            match name {
                CONTENT_TYPE => request.content_type = value.to_owned(),
                _ => request.headers.push((name.to_owned(), value.to_owned())),
            }
        }
        request
    }
}

const CONTENT_TYPE: &str = "content-type";

/// A header's value cannot hold a line break; one that does is not written.
fn push_header(head: &mut String, name: &str, value: &str) {
    if value.contains(['\n', '\r']) {
        return;
    }
    head.push('\n');
    head.push_str(name);
    head.push_str(": ");
    head.push_str(value);
}

/// A request as it will go to one provider, byte for byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// Upper case.
    pub method: String,
    /// The resolved URL. It is stored with the attempt; status calls will use it though the configuration has changed.
    pub url: String,
    /// In order, names lower case, without credentials and without what names the attempt: the adapter adds those when it sends.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Arc<[u8]>,
}

impl Rendered {
    /// Computes SHA-256 over method, URL, headers and body: what the attempt's record says was sent.
    pub fn hash(&self) -> Sha256Bytes {
        let mut text = format!("{} {}\n", self.method, self.url);
        for (name, value) in &self.headers {
            text.push_str(name);
            text.push_str(": ");
            text.push_str(value);
            text.push('\n');
        }
        text.push('\n');
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(&self.body);
        sha256(&bytes)
    }
}

/// Why a request cannot be rendered for a provider. Nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RenderError(pub String);

/// One attempt's one call to its provider.
#[derive(Clone, Debug)]
pub struct Call {
    /// What to send.
    pub rendered: Rendered,
    /// The job, for the provider's logs. `None` for a safe request that is passed through without a job.
    pub job_id: Option<JobId>,
    /// The attempt's number, from 1; 0 without a job.
    pub attempt: u32,
    /// The attempt's own idempotency key: the same for every repetition of this attempt, another for every other attempt.
    pub idempotency_key: String,
    /// W3C trace context, passed on unchanged.
    pub traceparent: Option<String>,
    /// Must be asked, after connecting and just before the first byte.
    pub fence: Fence,
    /// When the call must be over: the provider's total timeout or the job's deadline, whichever comes first.
    pub deadline: Instant,
    /// Whoever wants to hear of the call before it ends.
    pub told: Telling,
}

/// What a provider says before its answer is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// It took the work on, and this is its own name for it: another gateway can ask by it if this one dies.
    Accepted {
        /// The name; never empty.
        remote_id: String,
    },
    /// Its time is over, and it may have happened: the attempt is unknown from now on. The call listens on for a late answer, which
    /// is the outcome if it comes.
    Overdue {
        /// Why, without secrets.
        reason: String,
    },
    /// An answer that comes in parts has begun.
    Head {
        /// The HTTP status.
        status: u16,
        /// End-to-end headers in order, names lower case.
        headers: Vec<(String, String)>,
    },
    /// The next part of that answer's body.
    Part(Bytes),
}

/// Where an adapter tells what comes before the outcome. Bounded: whoever listens slowly slows the call down, and nobody else.
#[derive(Clone, Debug, Default)]
pub struct Telling(Option<mpsc::Sender<Told>>);

/// How much may be told and not yet heard.
const TOLD_AT_ONCE: usize = 16;

impl Telling {
    /// To somebody who listens.
    pub fn channel() -> (Self, mpsc::Receiver<Told>) {
        let (sender, receiver) = mpsc::channel(TOLD_AT_ONCE);
        (Telling(Some(sender)), receiver)
    }

    /// To nobody.
    pub fn nobody() -> Self {
        Telling(None)
    }

    /// Whether anybody listens.
    pub fn is_heard(&self) -> bool {
        self.0.as_ref().is_some_and(|sender| !sender.is_closed())
    }

    /// Waits until whoever listened does so no more: the attempt is settled, and what is still told changes nothing. Never, if
    /// nobody listened from the start.
    pub async fn unheard(&self) {
        match &self.0 {
            Some(sender) => sender.closed().await,
            None => std::future::pending().await,
        }
    }

    /// Tells it. That nobody listens any more is no matter.
    pub async fn tell(&self, told: Told) {
        if let Some(sender) = &self.0 {
            let _ = sender.send(told).await;
        }
    }
}

/// A provider's complete answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// The HTTP status, or 200 from a provider that has none.
    pub status: u16,
    /// End-to-end headers in order, names lower case.
    pub headers: Vec<(String, String)>,
    /// The complete body.
    pub body: Arc<[u8]>,
}

impl Response {
    /// The head as the record keeps it: the status, then one `name: value` line for each header.
    pub(crate) fn head(&self) -> String {
        let mut head = self.status.to_string();
        for (name, value) in &self.headers {
            push_header(&mut head, name, value);
        }
        head
    }

    /// The response from its kept head and body; `None` for a head that is none.
    pub(crate) fn from_head(head: &str, body: Arc<[u8]>) -> Option<Self> {
        let mut lines = head.split('\n');
        let status = lines.next()?.parse().ok()?;
        let headers = lines.filter_map(|line| line.split_once(": ")).map(|(name, value)| (name.to_owned(), value.to_owned()));
        Some(Response { status, headers: headers.collect(), body })
    }
}

/// How an attempt ended, judged from what is known to have been sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing left for the provider: no connection, no TLS, fenced, refused by our own limits. Another provider may try.
    NotSent {
        /// Why, without secrets.
        reason: String,
    },
    /// The provider refused: a definite failure.
    Rejected {
        /// Why, without secrets.
        reason: String,
        /// What it answered.
        response: Response,
        /// How long it wants to be left alone.
        retry_after: Option<Duration>,
    },
    /// The provider did it, but what it made is not valid for the route: a definite failure.
    InvalidOutput {
        /// Why, without secrets.
        reason: String,
    },
    /// It may have happened. No other attempt begins until something proves what happened.
    Unknown {
        /// Why, without secrets.
        reason: String,
    },
    /// It happened, and this is the complete answer.
    Succeeded {
        /// The answer.
        response: Response,
        /// The provider's own name for the work, if it gave one.
        remote_id: Option<String>,
        /// The model that answered, if it said so.
        model: Option<String>,
    },
}

impl Outcome {
    /// The word for it in metrics and in `failover_on`: a closed set.
    pub fn word(&self) -> &'static str {
        match self {
            Outcome::NotSent { .. } => "not_sent",
            Outcome::Rejected { .. } => "rejected",
            Outcome::InvalidOutput { .. } => "invalid_output",
            Outcome::Unknown { .. } => "unknown",
            Outcome::Succeeded { .. } => "succeeded",
        }
    }
}

/// What a provider says of an earlier attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// It settled: this is its outcome (never [`Outcome::Unknown`] or [`Outcome::NotSent`]).
    Settled(Outcome),
    /// It is still being worked on.
    StillRunning,
    /// The provider has never heard of it; believed only after the quarantine.
    NotFound,
    /// The provider no longer knows: past its retention.
    Expired,
    /// It was stopped.
    Canceled,
    /// This provider cannot be asked, or did not answer. Changes nothing.
    NoAnswer {
        /// Why.
        reason: String,
    },
}

/// An earlier attempt, as the record has it: what a status call needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The job.
    pub job_id: JobId,
    /// The attempt's number, from 1.
    pub attempt: u32,
    /// The stored URL it was sent to.
    pub url: String,
    /// The provider's own name for the work, `""` if it gave none.
    pub remote_id: String,
    /// The attempt's idempotency key.
    pub idempotency_key: String,
    /// How long ago it began.
    pub age: Duration,
}

/// What a provider can be asked, and for how long its answers mean anything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Whether [`Provider::status`] asks by the provider's own id.
    pub status: bool,
    /// What "there is none" means, asked by the provider's own id.
    pub status_missing: Missing,
    /// Whether [`Provider::find`] asks by our key.
    pub find: bool,
    /// What "there is none" means, asked by our key.
    pub find_missing: Missing,
    /// For how long the same key with the same bytes is the same work, counted from the first time; `None`: never.
    pub replay: Option<Duration>,
    /// What a cancel means there.
    pub cancel: CancelSemantics,
    /// How long after a cancel it was told "canceled" may still turn into a result.
    pub settle: Duration,
    /// How long it remembers a finished piece of work; after that its "not found" means nothing.
    pub retention: Option<Duration>,
}

/// What a provider's cancel call means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelSemantics {
    /// It has none.
    #[default]
    None,
    /// It stops what has not begun.
    QueuedOnly,
    /// It tries; what it says afterwards may change.
    BestEffort,
    /// What it says it stopped is stopped.
    Confirmed,
}

/// A future that a provider returns.
pub type ProviderFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A provider: something outside that does the work once for each attempt.
///
/// `submit` is called at most once for an attempt. It must ask [`Fence::check`] just before the first byte leaves, must end by
/// [`Call::deadline`], and must return [`Outcome::Unknown`] wherever it cannot *know*. Its future runs to its end: onejob never
/// drops it because a client went away; it may be dropped when the process stops, and the attempt is then marked unknown.
pub trait Provider: Send + Sync + 'static {
    /// Renders the request for this provider. Pure: the same request gives the same bytes, and nothing is sent.
    ///
    /// # Errors
    /// The request makes no sense to this provider; the attempt is not begun.
    fn render(&self, request: &Request) -> Result<Rendered, RenderError>;

    /// Sends one attempt and waits for its outcome.
    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome>;

    /// Sends the same attempt again, with the same key and the same bytes: not a new attempt, because this provider does the work
    /// of a key once. Called only within [`Abilities::replay`]. Only a complete success proves anything.
    fn replay(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        drop(call);
        Box::pin(std::future::ready(Outcome::Unknown { reason: "this provider does not honour keys".to_owned() }))
    }

    /// What a complete answer says that the work cost, in the provider's own unit; `None` if it does not say.
    fn cost(&self, response: &Response) -> Option<u64> {
        let _ = response;
        None
    }

    /// What it can be asked.
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// Asks what became of an attempt, by the provider's own id for it.
    fn status(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        drop(sent);
        no_answer("this provider has no status call")
    }

    /// Asks what became of an attempt, by our idempotency key.
    fn find(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        drop(sent);
        no_answer("this provider cannot find an attempt by its key")
    }

    /// Asks the provider to stop an attempt.
    fn cancel(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        drop(sent);
        no_answer("this provider has no cancel call")
    }

    /// Checks that a webhook is this provider's own, before anybody looks at the job that it names.
    ///
    /// # Errors
    /// It does not call back, or it did not sign this.
    fn verify_webhook(&self, delivery: &webhook::Delivery) -> Result<(), webhook::WebhookRefused> {
        let _ = delivery;
        Err(webhook::WebhookRefused::NotConfigured)
    }

    /// Reads what a checked webhook says of an attempt.
    fn read_webhook(&self, sent: Sent, body: Arc<[u8]>) -> ProviderFuture<'_, Evidence> {
        drop((sent, body));
        no_answer("this provider does not call back")
    }
}

fn no_answer<'a>(reason: &'static str) -> ProviderFuture<'a, Evidence> {
    Box::pin(std::future::ready(Evidence::NoAnswer { reason: reason.to_owned() }))
}

/// The last check before the first byte: is the attempt still ours to send, and is it still permitted?
///
/// The lease clock starts before the first send of the call that granted the lease, and runs on `CLOCK_BOOTTIME`, which goes on
/// while the machine sleeps. Past lease minus margin, nothing may be sent any more. See `docs/PROTOCOL.md`, "A paused gateway".
/// A call that goes somewhere by a [`Permit`] is not sent either once that is too old: [`Fence::pass`] asks anew.
#[derive(Clone)]
pub struct Fence {
    sendable_until_ms: Arc<AtomicU64>,
    permit: Option<Arc<dyn Permit>>,
}

/// What is left of a permit must be enough to send in, in ms; else it is asked for anew.
const SENDING_MS: u64 = 500;

/// A leave that somebody may take back at any moment, as of the moment at which it was last asked for.
pub trait Permit: Send + Sync {
    /// Until when it can be relied on, by [`boottime_ms`].
    fn good_until_ms(&self) -> u64;

    /// Asks anew.
    ///
    /// # Errors
    /// It is taken back, or nobody can tell: why, in words. It stays so.
    ///
    /// # Cancel safety
    /// Cancel safe: what was asked before stands.
    fn ask(&self) -> ProviderFuture<'_, Result<(), String>>;
}

/// Nothing may be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fenced {
    /// The lease has run out, or the attempt was fenced.
    #[error("fenced: the lease ran out before the first byte")]
    Lease,
    /// Its permit is too old to be relied on.
    #[error("fenced: the permit grew old before the first byte")]
    Old,
    /// Its permit was taken back.
    #[error("{0}")]
    Denied(String),
}

impl Fence {
    /// A fence that lets pass until a moment of [`boottime_ms`].
    pub fn until(boottime_ms: u64) -> Self {
        Fence { sendable_until_ms: Arc::new(AtomicU64::new(boottime_ms)), permit: None }
    }

    /// The same, for a call that needs a permit too.
    #[must_use]
    pub fn by(self, permit: Arc<dyn Permit>) -> Self {
        Fence { permit: Some(permit), ..self }
    }

    /// Whether the lease still lets the first byte leave.
    ///
    /// # Errors
    /// It does not.
    pub fn lease(&self) -> Result<(), Fenced> {
        if boottime_ms() < self.sendable_until_ms.load(Ordering::Acquire) { Ok(()) } else { Err(Fenced::Lease) }
    }

    /// Whether the first byte may leave now.
    ///
    /// # Errors
    /// It may not: return [`Outcome::NotSent`].
    pub fn check(&self) -> Result<(), Fenced> {
        self.lease()?;
        match &self.permit {
            Some(permit) if boottime_ms() >= permit.good_until_ms() => Err(Fenced::Old),
            Some(_) | None => Ok(()),
        }
    }

    /// The same, after a permit that is about to grow old was asked for anew: whoever has just connected calls this, and has half a
    /// second to send in.
    ///
    /// # Errors
    /// As [`Fence::check`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn pass(&self) -> Result<(), Fenced> {
        self.lease()?;
        if let Some(permit) = &self.permit
            && boottime_ms() + SENDING_MS >= permit.good_until_ms()
        {
            permit.ask().await.map_err(Fenced::Denied)?;
        }
        self.check()
    }

    /// Moves the fence after the lease was extended.
    pub fn extend(&self, boottime_ms: u64) {
        self.sendable_until_ms.fetch_max(boottime_ms, Ordering::AcqRel);
    }

    /// Closes the fence for good.
    pub fn close(&self) {
        self.sendable_until_ms.store(0, Ordering::Release);
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fence")
    }
}

/// Milliseconds on `CLOCK_BOOTTIME`: monotonic, and counting while the machine is suspended.
pub fn boottime_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    u64::try_from(now.tv_sec).expect("the boot clock is positive") * 1000
        + u64::try_from(now.tv_nsec).expect("nanoseconds are positive") / 1_000_000
}
