//! The tokens of a prompt: by the model's own tokenizer, or by its server's endpoint.
//!
//! Servers that have one speak in two ways. llama.cpp takes `content` and `add_special` and answers with `tokens`. vLLM takes `prompt`
//! and `add_special_tokens`, or messages, and says `count` and `max_model_len` too. Both leave alone what they do not know.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::why;
use crate::provider::http::{HttpOptions, HttpProvider};
use crate::provider::{Call, Fence, Outcome, Provider as _, Request, Telling};

/// How long one of a provider's own endpoints may take.
const ENDPOINT_TIME: Duration = Duration::from_secs(30);

pub(super) enum Tokens {
    #[cfg(feature = "tokenizers")]
    Local(Box<tokenizers::Tokenizer>),
    Remote(Box<Endpoint>),
}

/// The tokens of one prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Counted {
    /// How many.
    pub(super) all: u64,
    /// Which, where that was said.
    pub(super) ids: Option<Vec<u64>>,
    /// How many its server takes, where it was said.
    pub(super) limit: Option<u64>,
}

/// What begins a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begin {
    /// The token.
    pub(super) id: u64,
    /// Whether the tokenizer adds it to a text by itself, where it is let.
    pub(super) is_added: bool,
}

impl Tokens {
    #[cfg(feature = "tokenizers")]
    pub(super) fn read(file: &Path) -> Result<Self, String> {
        let tokenizer = tokenizers::Tokenizer::from_file(file).map_err(|error| error.to_string())?;
        Ok(Tokens::Local(Box::new(tokenizer)))
    }

    #[cfg(not(feature = "tokenizers"))]
    pub(super) fn read(_: &Path) -> Result<Self, String> {
        Err("this build has no tokenizers (feature \"tokenizers\")".to_owned())
    }

    /// Counts the tokens of a text, with or without what the tokenizer adds to one by itself. Special tokens in it are read as such.
    pub(super) async fn count(&self, request: &Value, text: &str, adds: bool) -> Result<Counted, String> {
        match self {
            #[cfg(feature = "tokenizers")]
            Tokens::Local(tokenizer) => {
                let encoded = tokenizer.encode_fast(text, adds).map_err(|error| format!("tokenizer: {error}"))?;
                let ids: Vec<u64> = encoded.get_ids().iter().map(|id| u64::from(*id)).collect();
                Ok(Counted { all: ids.len() as u64, ids: Some(ids), limit: None })
            }
            Tokens::Remote(endpoint) => {
                let mut asked = json!({
                    "content": text, "add_special": adds, "parse_special": true, "prompt": text, "add_special_tokens": adds,
                });
                named(&mut asked, request);
                counted(&endpoint.ask(&asked).await?).map_err(|what| endpoint.told(what))
            }
        }
    }

    /// Counts the tokens of the prompt that the server makes of a request's messages; `None` where no server does.
    pub(super) async fn count_messages(&self, request: &Value, prompts: bool, adds: bool) -> Result<Option<Counted>, String> {
        match self {
            #[cfg(feature = "tokenizers")]
            Tokens::Local(_) => Ok(None),
            Tokens::Remote(endpoint) => {
                let mut asked = json!({ "add_generation_prompt": prompts, "add_special_tokens": adds });
                for name in ["messages", "tools", "chat_template_kwargs"] {
                    if let Some(value) = request.get(name) {
                        asked[name] = value.clone();
                    }
                }
                named(&mut asked, request);
                let counted = counted(&endpoint.ask(&asked).await?).map_err(|what| endpoint.told(what))?;
                // llama.cpp answers so to what it does not know.
                if counted.all == 0 {
                    let what = "it counts no tokens of messages; name a chat_template or an apply_template too";
                    return Err(endpoint.told(what));
                }
                Ok(Some(counted))
            }
        }
    }

    /// Finds out what begins a prompt: what the tokenizer adds before a text by itself, or else the token of this name.
    pub(super) async fn begin(&self, request: &Value, bos_token: &str) -> Result<Option<Begin>, String> {
        let (with, without) = (self.count(request, "a", true).await?, self.count(request, "a", false).await?);
        if let (Some(with), Some(without)) = (with.ids, without.ids) {
            let before = (0..=with.len()).find(|place| with[*place..].starts_with(&without)).unwrap_or(0);
            if before > 0 {
                return Ok(Some(Begin { id: with[0], is_added: true }));
            }
        }
        if bos_token.is_empty() {
            return Ok(None);
        }
        let ids = self.count(request, bos_token, false).await?.ids;
        Ok(ids.filter(|ids| ids.len() == 1).map(|ids| Begin { id: ids[0], is_added: false }))
    }
}

/// A server of several models wants to know which.
fn named(asked: &mut Value, request: &Value) {
    if let Some(model) = request.get("model") {
        asked["model"] = model.clone();
    }
}

/// What an endpoint answered.
fn counted(answer: &Value) -> Result<Counted, &'static str> {
    let id = |token: &Value| token.as_u64().or_else(|| token["id"].as_u64());
    let ids = match answer.get("tokens").and_then(Value::as_array) {
        Some(tokens) => Some(tokens.iter().map(id).collect::<Option<Vec<u64>>>().ok_or("a token has no number")?),
        None => None,
    };
    let all = answer["count"].as_u64().or_else(|| ids.as_ref().map(|ids| ids.len() as u64));
    let all = all.ok_or("its answer has neither tokens nor count")?;
    Ok(Counted { all, ids, limit: answer["max_model_len"].as_u64() })
}

/// One of a provider's own endpoints.
pub(super) struct Endpoint {
    provider: HttpProvider,
    target: String,
    /// Its key in the configuration and its URL, without a query: that may be a secret.
    shown: String,
}

impl Endpoint {
    /// The one that the configuration has under this key.
    pub(super) fn of(key: String, url: &str) -> Result<Self, String> {
        let shown = format!("{key} = {:?}", url.split('?').next().unwrap_or_default());
        let at = url.find("://").map(|at| at + 3).ok_or_else(|| format!("{shown}: it is no URL"))?;
        let path = url[at..].find('/').map_or(url.len(), |path| at + path);
        let options = HttpOptions::new(&url[..path]);
        let provider = HttpProvider::new("prompt", options).map_err(|error| format!("{shown}: {error}"))?;
        let target = if path == url.len() { "/".to_owned() } else { url[path..].to_owned() };
        Ok(Endpoint { provider, target, shown })
    }

    /// What is wrong with it, with whose it is.
    pub(super) fn told(&self, what: impl std::fmt::Display) -> String {
        format!("{}: {what}", self.shown)
    }

    pub(super) async fn ask(&self, body: &Value) -> Result<Value, String> {
        let request = Request {
            method: "POST".to_owned(),
            target: self.target.clone(),
            content_type: "application/json".to_owned(),
            headers: Vec::new(),
            body: body.to_string().into_bytes().into(),
        };
        let rendered = self.provider.render(&request).map_err(|error| error.to_string())?;
        let call = Call {
            rendered,
            job_id: None,
            attempt: 0,
            idempotency_key: String::new(),
            traceparent: None,
            fence: Fence::until(u64::MAX),
            deadline: Instant::now() + ENDPOINT_TIME,
            told: Telling::nobody(),
        };
        match self.provider.submit(call).await {
            Outcome::Succeeded { response, .. } => {
                serde_json::from_slice(&response.body).map_err(|_| self.told("its answer is not JSON"))
            }
            other => Err(self.told(why(&other))),
        }
    }
}
