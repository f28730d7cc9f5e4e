//! One question about an attempt, put to where the attempt was sent: the stored URL's base, whatever the configuration says now.
//!
//! A credential goes to the configured base URL and to those that the entry names as former ones, and nowhere else: of an attempt
//! that was sent elsewhere nobody is asked.

use std::time::{Duration, Instant};

use http::Method;

use super::connection::Connector;
use super::exchange::{Exchange, Exchanged};
use super::judge::Answer;
use super::render::{self, Origin};
use super::stream::Listener;
use super::{HttpOptions, HttpProblem, HttpProvider, Names};
use crate::config::Stream;
use crate::provider::asking::{About, Question, Reading, Unread};
use crate::provider::{Evidence, Fence, Outcome, Rendered, Sent, Telling};

/// The longest that one question may take, whatever the timeouts of an attempt are.
const QUESTION_TIME_MAX: Duration = Duration::from_secs(30);

/// Where a provider was reached before.
pub(super) struct Former {
    url: String,
    origin: Origin,
    exchange: Exchange,
}

impl Former {
    pub(super) fn new(base_url: &str, options: &HttpOptions) -> Result<Self, HttpProblem> {
        let origin = render::origin(base_url)?;
        let connector = Connector::new(&origin, options.ca_file.as_deref(), options.http2)?;
        let exchange = Exchange::new(connector, options.timeouts, options.result_bytes_max);
        Ok(Former { url: base_url.trim_end_matches('/').to_owned(), origin, exchange })
    }
}

/// Where an attempt can be asked about.
struct Home<'a> {
    base: String,
    origin: &'a Origin,
    exchange: &'a Exchange,
}

impl HttpProvider {
    /// Asks, once. What is no proof is [`Evidence::NoAnswer`] with the reason.
    pub(in crate::provider) async fn inquire(&self, about: About, sent: Sent) -> Evidence {
        let reason = match self.asked(about, &sent).await {
            Ok(Reading::Evidence(evidence)) => return evidence,
            Ok(Reading::Fetch { remote_id }) => match self.fetched(remote_id, &sent).await {
                Ok(evidence) => return evidence,
                Err(reason) => format!("it succeeded, and its result: {reason}"),
            },
            Err(Unread::Unmapped { word }) => {
                let (provider, job, attempt) = (&self.name, sent.job_id, sent.attempt);
                tracing::warn!(%job, attempt, provider, word, "the provider's word for a state is not in status.states: no answer");
                format!("the state {word:?} is not in status.states")
            }
            Err(Unread::Otherwise { reason }) => reason,
        };
        Evidence::NoAnswer { reason }
    }

    /// Whether a question can be put at all.
    pub(in crate::provider) fn can_ask(&self, about: About, sent: &Sent) -> Result<(), String> {
        let question = self.asking.question(about, sent)?;
        self.url_of(&question, sent).map(|_| ())
    }

    /// Fetches the result of a piece of work that succeeded.
    pub(in crate::provider) async fn fetched(&self, remote_id: String, sent: &Sent) -> Result<Evidence, String> {
        let sent = Sent { remote_id: remote_id.clone(), ..sent.clone() };
        let question = self.asking.question(About::Result, &sent)?;
        let (head, body) = self.put(&question, &sent).await?;
        let method = Method::from_bytes(question.method.as_bytes()).map_err(|_| "its method is none".to_owned())?;
        let answer = Answer { status: head.status, version: head.version, headers: &head.headers, body, method: &method };
        match self.judge.judge(answer) {
            Outcome::Succeeded { response, model, .. } => {
                let remote_id = Some(remote_id).filter(|id| !id.is_empty());
                Ok(Evidence::Settled(Outcome::Succeeded { response, remote_id, model }))
            }
            Outcome::Unknown { reason } | Outcome::Rejected { reason, .. } => Err(reason),
            Outcome::NotSent { reason } | Outcome::InvalidOutput { reason } => Err(reason),
        }
    }

    /// What a piece of work in a checked webhook says.
    pub(in crate::provider) async fn told_of(&self, sent: Sent, item: &str) -> Evidence {
        let item = String::from_utf8_lossy(&self.judge.hidden.hide(item.as_bytes().to_vec())).into_owned();
        let reason = match self.asking.read_work(&sent, &item) {
            Ok(Reading::Evidence(evidence)) => return evidence,
            Ok(Reading::Fetch { remote_id }) => match self.fetched(remote_id, &sent).await {
                Ok(evidence) => return evidence,
                Err(reason) => reason,
            },
            Err(Unread::Unmapped { word }) => format!("the state {word:?} is not in status.states"),
            Err(Unread::Otherwise { reason }) => reason,
        };
        Evidence::NoAnswer { reason }
    }

    async fn asked(&self, about: About, sent: &Sent) -> Result<Reading, Unread> {
        let question = self.asking.question(about, sent)?;
        let (head, body) = self.put(&question, sent).await?;
        self.asking.read(about, sent, head.status.as_u16(), &self.judge.hidden.hide(body))
    }

    /// Puts a question and reads the whole answer.
    async fn put(&self, question: &Question, sent: &Sent) -> Result<(http::response::Parts, Vec<u8>), String> {
        let (home, url) = self.url_of(question, sent)?;
        let rendered =
            Rendered { method: question.method.clone(), url, headers: self.render.headers.clone(), body: Vec::new().into() };
        let names = Names { job_id: Some(sent.job_id), attempt: sent.attempt, key: None, traceparent: None };
        let request = self.assemble(home.origin, &rendered, &names)?;
        // A question does nothing: no lease stands before it.
        let fence = Fence::until(u64::MAX);
        let (marks, nobody) = (Stream::default(), Telling::nobody());
        let mut listener = Listener::new(&self.judge, &marks, &nobody);
        match home.exchange.send(&request, &fence, Instant::now() + QUESTION_TIME_MAX, &mut listener).await {
            Exchanged::Answered { head, body } => Ok((head, body)),
            Exchanged::NotSent { reason } | Exchanged::Lost { reason } => Err(reason),
        }
    }

    fn url_of(&self, question: &Question, sent: &Sent) -> Result<(Home<'_>, String), String> {
        render::check_target(&question.target).map_err(|error| error.to_string())?;
        let home = self.home(&sent.url)?;
        let url = format!("{}{}", home.base, question.target);
        let limit = render::URL_BYTES_MAX;
        if url.len() > limit {
            return Err(format!("the url has {} bytes; the limit is {limit}", url.len()));
        }
        if !url.parse().is_ok_and(|uri| home.origin.is_of(&uri)) {
            return Err("the question does not make a url".to_owned());
        }
        Ok((home, url))
    }

    /// Where the attempt of a stored URL is asked about: below the same base URL, if it is one of ours, now or formerly.
    fn home(&self, stored: &str) -> Result<Home<'_>, String> {
        let now = std::iter::once((self.render.url.as_str(), &self.render.origin, &self.exchange));
        let formerly = self.former.iter().map(|former| (former.url.as_str(), &former.origin, &former.exchange));
        let homes: Vec<_> = now.chain(formerly).collect();
        let leads_there =
            |base: &str| stored.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?']));
        let under = homes.iter().filter(|(base, ..)| leads_there(base)).max_by_key(|(base, ..)| base.len());
        if let Some((base, origin, exchange)) = under {
            return Ok(Home { base: (*base).to_owned(), origin, exchange });
        }
        // The same origin under another path: the stored URL without the path that work is handed in at.
        let path = stored.split('?').next().unwrap_or_default();
        let base = path.strip_suffix(self.render.path.split('?').next().unwrap_or_default()).filter(|_| self.render.path != "/");
        let is_there = |origin: &Origin| stored.parse().is_ok_and(|uri| origin.is_of(&uri));
        let same_origin = homes.iter().find(|(_, origin, _)| is_there(origin));
        match (base, same_origin) {
            (Some(base), Some((_, origin, exchange))) => Ok(Home { base: base.to_owned(), origin, exchange }),
            _ => Err("it was sent to a base url that is not configured any more; former_base_urls can name it".to_owned()),
        }
    }
}
