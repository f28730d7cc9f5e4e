//! A provider that can be asked: it sends over real HTTP, and answers from the printer's own ledger.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onejob::provider::http::{HttpOptions, HttpProvider};
use onejob::provider::simulated::Simulated;
use onejob::provider::{
    Abilities, Call, CancelSemantics, Evidence, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request, Response,
    Sent, Told,
};
use onejob::runtime::ProviderSlot;

/// What a courier can do, and what it was asked.
pub struct Courier {
    http: HttpProvider,
    printer: Arc<Simulated>,
    pub abilities: Abilities,
    /// Whether it tells a name for the work before it sends it.
    pub names: Names,
    /// What it says of a job that it stopped.
    pub stops: Stops,
    /// Whether a render is the same every time.
    pub renders: Renders,
    pub log: Arc<Log>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Names {
    None,
    AtOnce,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stops {
    /// It says so, and the printer goes on.
    InWords,
    /// What has not been printed is not printed any more, as far as it says.
    Really,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Renders {
    Same,
    EachTimeAnother,
}

/// What was asked.
#[derive(Default)]
pub struct Log {
    asked: Mutex<Vec<&'static str>>,
    at_once: AtomicUsize,
    most_at_once: AtomicUsize,
    rendered: AtomicUsize,
    /// How long an answer takes.
    pub takes: Mutex<Duration>,
    canceled: Mutex<Vec<(String, u32)>>,
    deadlines: Mutex<Vec<Duration>>,
}

impl Log {
    pub fn asked(&self) -> Vec<&'static str> {
        self.asked.lock().unwrap().clone()
    }

    pub fn count(&self, question: &str) -> usize {
        self.asked().iter().filter(|asked| **asked == question).count()
    }

    pub fn most_at_once(&self) -> usize {
        self.most_at_once.load(Ordering::SeqCst)
    }

    /// How long each call had.
    pub fn deadlines(&self) -> Vec<Duration> {
        self.deadlines.lock().unwrap().clone()
    }

    async fn ask(&self, question: &'static str) {
        let at_once = self.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_at_once.fetch_max(at_once, Ordering::SeqCst);
        self.asked.lock().unwrap().push(question);
        let takes = *self.takes.lock().unwrap();
        tokio::time::sleep(takes).await;
        self.at_once.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Courier {
    /// One that cannot be asked anything yet.
    pub fn new(printer: &Arc<Simulated>, total: Duration) -> Self {
        let mut options = HttpOptions::new(&printer.base_url());
        options.timeouts.first_byte = total;
        options.timeouts.total = total;
        // These tests are about being asked, not about answers that come late by themselves.
        options.timeouts.linger = Duration::ZERO;
        options.idempotency_header = Some("idempotency-key".to_owned());
        options.cost = Some("/usage/total_tokens".to_owned());
        options.path = "/chat/completions".to_owned();
        Courier {
            http: HttpProvider::new("courier", options).unwrap(),
            printer: Arc::clone(printer),
            abilities: Abilities::default(),
            names: Names::None,
            stops: Stops::InWords,
            renders: Renders::Same,
            log: Arc::default(),
        }
    }

    pub fn finds(mut self) -> Self {
        self.abilities.find = true;
        self
    }

    pub fn has_status(mut self) -> Self {
        self.abilities.status = true;
        self.names = Names::AtOnce;
        self
    }

    pub fn replays(mut self, within: Duration) -> Self {
        self.abilities.replay = Some(within);
        self
    }

    pub fn cancels(mut self, cancel: CancelSemantics, settle: Duration, stops: Stops) -> Self {
        (self.abilities.cancel, self.abilities.settle, self.stops) = (cancel, settle, stops);
        self
    }

    /// Answers from another printer's ledger.
    pub fn ask_instead(&mut self, printer: &Arc<Simulated>) {
        self.printer = Arc::clone(printer);
    }

    /// As a provider of the gateway, and what it is asked.
    pub fn slot(self, name: &str, total: Duration) -> (ProviderSlot, Arc<Log>) {
        let log = Arc::clone(&self.log);
        (ProviderSlot { name: name.to_owned(), provider: Arc::new(self), total, in_flight_max: 100 }, log)
    }

    /// What the printer's ledger says of an attempt.
    fn look(&self, sent: &Sent) -> Evidence {
        let ledger = self.printer.ledger_of(&sent.job_id.to_string());
        let entry = ledger.entries.iter().rfind(|entry| entry.attempt == sent.attempt.to_string());
        let stopped = self.stops == Stops::Really && self.was_canceled(sent);
        match entry {
            None => Evidence::NotFound,
            Some(entry) if entry.executed => {
                let body = format!(r#"{{"execution":"{}","usage":{{"total_tokens":7}}}}"#, entry.sequence);
                let headers = vec![("content-type".to_owned(), "application/json".to_owned())];
                let response = Response { status: 200, headers, body: body.into_bytes().into() };
                Evidence::Settled(Outcome::Succeeded { response, remote_id: None, model: Some("courier-1".to_owned()) })
            }
            Some(entry) if entry.accepted && stopped => Evidence::Canceled,
            Some(entry) if entry.accepted => Evidence::StillRunning,
            Some(_) => {
                let response = Response { status: 422, headers: vec![], body: b"{\"error\":\"jam\"}".to_vec().into() };
                let reason = "the paper is jammed".to_owned();
                Evidence::Settled(Outcome::Rejected { reason, response, retry_after: None })
            }
        }
    }

    fn was_canceled(&self, sent: &Sent) -> bool {
        self.log.canceled.lock().unwrap().contains(&(sent.job_id.to_string(), sent.attempt))
    }
}

impl Provider for Courier {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        let mut rendered = self.http.render(request)?;
        if self.renders == Renders::EachTimeAnother {
            let number = self.log.rendered.fetch_add(1, Ordering::SeqCst);
            rendered.headers.push(("x-number".to_owned(), number.to_string()));
        }
        Ok(rendered)
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async move {
            let left = call.deadline.saturating_duration_since(std::time::Instant::now());
            self.log.deadlines.lock().unwrap().push(left);
            if self.names == Names::AtOnce {
                call.told.tell(Told::Accepted { remote_id: format!("print-{}", call.attempt) }).await;
            }
            self.http.submit(call).await
        })
    }

    fn replay(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async move {
            self.log.ask("replay").await;
            self.http.submit(call).await
        })
    }

    fn cost(&self, response: &Response) -> Option<u64> {
        self.http.cost(response)
    }

    fn abilities(&self) -> Abilities {
        self.abilities.clone()
    }

    fn status(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        assert_eq!(sent.remote_id, format!("print-{}", sent.attempt));
        Box::pin(async move {
            self.log.ask("status").await;
            self.look(&sent)
        })
    }

    fn find(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        assert_eq!(sent.idempotency_key, format!("{}-{}", sent.job_id, sent.attempt));
        Box::pin(async move {
            self.log.ask("find").await;
            self.look(&sent)
        })
    }

    fn cancel(&self, sent: Sent) -> ProviderFuture<'_, Evidence> {
        Box::pin(async move {
            self.log.ask("cancel").await;
            self.log.canceled.lock().unwrap().push((sent.job_id.to_string(), sent.attempt));
            match self.look(&sent) {
                Evidence::Settled(outcome) => Evidence::Settled(outcome),
                _ => Evidence::Canceled,
            }
        })
    }
}
