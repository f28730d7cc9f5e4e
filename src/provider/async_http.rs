//! The `async_http` adapter: hands work in, is told a name for it, and asks by that name until it is over.
//!
//! The submit is the `http` adapter's one request with its judgement. From its answer on the work is accepted: nothing but the
//! provider's own word ends the attempt. A poll that fails changes nothing; time that runs out is [`Outcome::Unknown`], and so is an
//! answer without a name. A webhook may be faster: then the runtime stops listening, and the adapter stops asking.
//!
//! Deliberately not here: asking after the deadline, or about another gateway's attempts (the runtime's reconciliation).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::{self, Poll};
use crate::provider::asking::{About, id_at, json, template};
use crate::provider::http::{HttpError, HttpOptions, HttpProvider};
use crate::provider::webhook::{Delivery, WebhookOptions, WebhookRefused, Webhooks};
use crate::provider::{
    Abilities, Call, CancelSemantics, Evidence, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request, Response,
    Sent, Told,
};

/// The status of a refusal that a provider told in a status' answer.
const CANCELED_STATUS: u16 = 409;

/// How an asynchronous provider is reached. A plain value; [`AsyncHttpProvider::new`] checks it.
#[derive(Clone, Debug)]
pub struct AsyncHttpOptions {
    /// How it is reached at all, and how it is asked.
    pub http: HttpOptions,
    /// How work is handed in.
    pub submit: config::Submit,
    /// How often it is asked while an attempt runs.
    pub poll: Poll,
    /// How it calls back, if it does.
    pub webhook: Option<WebhookOptions>,
}

impl AsyncHttpOptions {
    /// The options that a provider's configuration stands for.
    pub fn from_entry(entry: &config::ProviderEntry, http: HttpOptions, webhook: Option<WebhookOptions>) -> Self {
        AsyncHttpOptions { http, submit: entry.submit.clone().unwrap_or_default(), poll: entry.poll, webhook }
    }
}

/// A provider that works on what it was given while nobody waits on the line.
pub struct AsyncHttpProvider {
    http: HttpProvider,
    submit: config::Submit,
    poll: Poll,
    webhooks: Option<Webhooks>,
}

impl fmt::Debug for AsyncHttpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncHttpProvider").field("http", &self.http).finish_non_exhaustive()
    }
}

impl AsyncHttpProvider {
    /// Builds a provider; connects to nothing.
    ///
    /// # Errors
    /// The options are refused, naming what and why.
    pub fn new(name: &str, options: AsyncHttpOptions) -> Result<Self, HttpError> {
        let AsyncHttpOptions { http, submit, poll, webhook } = options;
        let webhooks = webhook.map(|options| Webhooks::new(name, options));
        Ok(AsyncHttpProvider { http: HttpProvider::new(name, http)?, submit, poll, webhooks })
    }

    async fn run(&self, call: Call) -> Outcome {
        let told = call.told.clone();
        tokio::select! {
            biased;
            () = told.unheard() => Outcome::Unknown { reason: "settled elsewhere while the provider was asked".to_owned() },
            outcome = self.work(call) => outcome,
        }
    }

    async fn work(&self, mut call: Call) -> Outcome {
        if let Err(reason) = self.name_attempt(&mut call) {
            return Outcome::NotSent { reason };
        }
        let (began, deadline, told) = (Instant::now(), call.deadline, call.told.clone());
        let Some(job_id) = call.job_id else { return Outcome::NotSent { reason: "work is handed in for a job only".to_owned() } };
        let mut sent = Sent {
            job_id,
            attempt: call.attempt,
            url: call.rendered.url.clone(),
            remote_id: String::new(),
            idempotency_key: call.idempotency_key.clone(),
            age: Duration::ZERO,
        };
        let answer = match self.http.call(call).await {
            Outcome::Succeeded { response, .. } => response,
            other => return other,
        };
        let text = String::from_utf8_lossy(&answer.body);
        let Some(remote_id) = id_at(&text, self.submit.id_pointer()) else {
            let (status, pointer) = (answer.status, self.submit.id_pointer());
            return Outcome::Unknown { reason: format!("the id is lost: {status} without one that can be read at {pointer:?}") };
        };
        told.tell(Told::Accepted { remote_id: remote_id.clone() }).await;
        sent.remote_id = remote_id;
        // A provider may be done at once, and say so.
        if let Evidence::Settled(outcome) = self.http.told_of(sent.clone(), &text).await {
            return outcome;
        }
        if let (Err(reason), None) = (self.http.can_ask(About::Status, &sent), &self.webhooks) {
            return Outcome::Unknown { reason: format!("it cannot be asked about: {reason}") };
        }
        self.ask_until_over(sent, began, deadline).await
    }

    /// Asks on the schedule, until the provider says that it is over or the time is.
    async fn ask_until_over(&self, mut sent: Sent, began: Instant, deadline: Instant) -> Outcome {
        let mut pause = self.poll.first;
        let mut last = "it was not asked yet".to_owned();
        let mut canceled_at = None;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            tokio::time::sleep(pause.min(left)).await;
            if pause >= left {
                return Outcome::Unknown { reason: format!("timeout: the call's time is over; the last word: {last}") };
            }
            pause = pause.mul_f64(self.poll.factor).min(self.poll.max);
            sent.age = began.elapsed();
            let asked = tokio::time::timeout_at(deadline.into(), self.http.inquire(About::Status, sent.clone())).await;
            match asked {
                Ok(Evidence::Settled(outcome)) => return outcome,
                Ok(Evidence::StillRunning) => (last, canceled_at) = ("still running".to_owned(), None),
                Ok(Evidence::Canceled) => {
                    let left = self.settle().saturating_sub(canceled_at.get_or_insert_with(Instant::now).elapsed());
                    if left.is_zero() {
                        return canceled();
                    }
                    last = "canceled, which may still change".to_owned();
                    pause = pause.min(left);
                }
                Ok(Evidence::Expired) => return Outcome::Unknown { reason: "expired: the provider no longer knows".to_owned() },
                // It gave the id itself: that there is none is not believed of a running attempt.
                Ok(Evidence::NotFound) => last = "404".to_owned(),
                Ok(Evidence::NoAnswer { reason }) => {
                    tracing::debug!(job = %sent.job_id, attempt = sent.attempt, reason, "a poll proves nothing");
                    last = reason;
                }
                Err(_) => last = "no answer".to_owned(),
            }
        }
    }

    /// How long "canceled" is not believed.
    fn settle(&self) -> Duration {
        let Abilities { cancel, settle, .. } = self.http.abilities();
        match cancel {
            CancelSemantics::None | CancelSemantics::Confirmed => Duration::ZERO,
            CancelSemantics::QueuedOnly | CancelSemantics::BestEffort => settle,
        }
    }

    /// Fills into the body what names the attempt.
    fn name_attempt(&self, call: &mut Call) -> Result<(), String> {
        if self.submit.body.is_none() {
            return Ok(());
        }
        let job_id = call.job_id.map(|id| id.to_string()).unwrap_or_default();
        let webhook_url = match (&self.webhooks, call.job_id) {
            (Some(webhooks), Some(id)) => webhooks.url(id, call.attempt),
            (None, _) | (_, None) => String::new(),
        };
        let names =
            template::Names { key: &call.idempotency_key, job_id: &job_id, attempt: call.attempt, webhook_url: &webhook_url };
        call.rendered.body = template::filled(&call.rendered.body, &names)?.into();
        Ok(())
    }
}

/// The provider says, and goes on saying, that it was stopped.
pub(crate) fn canceled() -> Outcome {
    let body = br#"{"error":{"type":"canceled","message":"the provider stopped it"}}"#;
    let headers = vec![("content-type".to_owned(), "application/json".to_owned())];
    Outcome::Rejected {
        reason: "the provider says that it was canceled".to_owned(),
        response: Response { status: CANCELED_STATUS, headers, body: body.as_slice().into() },
        retry_after: None,
    }
}

impl Provider for AsyncHttpProvider {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        let mut rendered = self.http.render(request)?;
        if let Some(template) = &self.submit.body {
            rendered.body = template::body(template, &request.body).map_err(RenderError)?.into();
        }
        Ok(rendered)
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(self.run(call))
    }

    fn replay(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        if self.http.abilities().replay.is_some() {
            return Box::pin(self.run(call));
        }
        Box::pin(std::future::ready(Outcome::Unknown { reason: "this provider does not honour keys".to_owned() }))
    }

    fn cost(&self, response: &Response) -> Option<u64> {
        self.http.cost(response)
    }

    fn abilities(&self) -> Abilities {
        self.http.abilities()
    }

    fn status(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        self.http.status(sent)
    }

    fn find(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        self.http.find(sent)
    }

    fn cancel(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        self.http.cancel(sent)
    }

    fn verify_webhook(&self, delivery: &Delivery) -> Result<(), WebhookRefused> {
        self.webhooks.as_ref().ok_or(WebhookRefused::NotConfigured)?.verify(delivery)
    }

    fn read_webhook(&self, sent: Sent, body: Arc<[u8]>) -> ProviderFuture<'_, Evidence> {
        Box::pin(async move {
            let text = String::from_utf8_lossy(&body);
            let item = self.webhooks.as_ref().and_then(|webhooks| json::at(&text, webhooks.item()));
            match item {
                Some(item) => self.http.told_of(sent, item).await,
                None => Evidence::NoAnswer { reason: "its body has no piece of work".to_owned() },
            }
        })
    }
}
