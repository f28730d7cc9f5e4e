//! L0: the prompt that a provider's model gets, found out without asking it for an answer.
//!
//! A chat template is rendered as the servers of such models do (Python's idioms and all), its prompt is counted with the model's
//! own tokenizer, and what is commonly wrong is told: a variable that is not there, no prompt to begin an answer, a beginning that
//! is there twice, more tokens than fit. Or the provider's own endpoints say what they would do.

use std::path::Path;
use std::time::{Duration, Instant};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value as Jinja};
use serde_json::{Value, json};

use crate::config::PromptEntry;
use crate::provider::http::{HttpOptions, HttpProvider};
use crate::provider::{Call, Fence, Outcome, Provider as _, Request, Telling};
use crate::validate::engine_value;

/// The budget of a chat template: about one unit a step.
const FUEL: u64 = 5_000_000;
/// How long one of a provider's own endpoints may take.
const ENDPOINT_TIME: Duration = Duration::from_secs(30);

/// What a model is prompted with.
pub struct Prompt {
    template: Option<Template>,
    tokens: Option<Tokens>,
    context_tokens: Option<u64>,
}

enum Template {
    Local(Box<ChatTemplate>),
    Remote(Box<Endpoint>),
}

enum Tokens {
    #[cfg(feature = "tokenizers")]
    Local(Box<tokenizers::Tokenizer>),
    Remote(Box<Endpoint>),
}

/// What was found out about a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompted {
    /// The prompt, if it could be made.
    pub text: Option<String>,
    /// How many tokens it has, if they could be counted.
    pub tokens: Option<u64>,
    /// What is wrong with it.
    pub faults: Vec<String>,
}

/// A chat template with the tokens that it speaks of.
pub struct ChatTemplate {
    text: String,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Reads a chat template: its text, or a `tokenizer_config.json` that has it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(file: &str, bos_token: Option<&str>, eos_token: Option<&str>) -> Result<Self, String> {
        let config: Option<Value> = serde_json::from_str(file).ok().filter(Value::is_object);
        // A token is a text, or an object that has it.
        let token = |name: &str| {
            let token = config.as_ref()?.get(name)?;
            token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
        };
        let text = match &config {
            None => file.to_owned(),
            Some(config) => match config.get("chat_template") {
                Some(Value::String(text)) => text.clone(),
                // Named ones: the one for plain chats.
                Some(Value::Array(named)) => {
                    let default = named.iter().find(|one| one["name"] == "default").or(named.first());
                    let text = default.and_then(|one| one["template"].as_str());
                    text.ok_or("its chat_template is a list without a template")?.to_owned()
                }
                _ => return Err("it has no chat_template".to_owned()),
            },
        };
        let chosen = |own: Option<&str>, name| own.map(str::to_owned).or_else(|| token(name)).unwrap_or_default();
        let template =
            ChatTemplate { text, bos_token: chosen(bos_token, "bos_token"), eos_token: chosen(eos_token, "eos_token") };
        template.engine()?;
        Ok(template)
    }

    fn engine(&self) -> Result<Environment<'static>, String> {
        let mut engine = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        engine.set_syntax(syntax.map_err(|error| error.to_string())?);
        engine.set_undefined_behavior(UndefinedBehavior::SemiStrict);
        engine.set_fuel(Some(FUEL));
        engine.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        engine.add_function("raise_exception", |what: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("the template refuses: {what}")))
        });
        engine.add_function("strftime_now", strftime_now);
        engine.add_filter("tojson", tojson);
        engine
            .add_template_owned("chat", without_generation_tags(&self.text))
            .map_err(|error| format!("it is no template: {}", told(&error)))?;
        Ok(engine)
    }

    /// Makes the prompt of a request's messages.
    ///
    /// # Errors
    /// The template wants what is not there, or refuses.
    pub fn render(&self, request: &Value, add_generation_prompt: bool) -> Result<String, String> {
        let mut context = serde_json::Map::new();
        for name in ["messages", "tools", "documents"] {
            context.insert(name.to_owned(), request.get(name).cloned().unwrap_or(Value::Null));
        }
        if let Some(Value::Object(more)) = request.get("chat_template_kwargs") {
            context.extend(more.clone());
        }
        context.insert("bos_token".to_owned(), json!(self.bos_token));
        context.insert("eos_token".to_owned(), json!(self.eos_token));
        context.insert("add_generation_prompt".to_owned(), json!(add_generation_prompt));
        let context = engine_value(&Value::Object(context)).ok_or("a number in the request is too large")?;
        let engine = self.engine()?;
        let template = engine.get_template("chat").map_err(|error| told(&error))?;
        template.render(context).map_err(|error| told(&error))
    }
}

impl Prompt {
    /// What an entry says of a provider's prompts.
    ///
    /// # Errors
    /// What is wrong with its files.
    pub fn of(entry: &PromptEntry) -> Result<Self, String> {
        let read = |file: &Path| std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()));
        let template = match (&entry.chat_template, &entry.apply_template) {
            (Some(file), _) => {
                let template = ChatTemplate::read(&read(file)?, entry.bos_token.as_deref(), entry.eos_token.as_deref());
                Some(Template::Local(Box::new(template.map_err(|what| format!("{}: {what}", file.display()))?)))
            }
            (None, Some(url)) => Some(Template::Remote(Box::new(Endpoint::of(url)?))),
            (None, None) => None,
        };
        let tokens = match (&entry.tokenizer, &entry.tokenize) {
            (Some(file), _) => Some(Tokens::read(file)?),
            (None, Some(url)) => Some(Tokens::Remote(Box::new(Endpoint::of(url)?))),
            (None, None) => None,
        };
        Ok(Prompt { template, tokens, context_tokens: entry.context_tokens })
    }

    /// Finds out what is wrong with the prompt of a request.
    ///
    /// # Errors
    /// A provider's own endpoint did not say: nothing is known.
    pub async fn look(&self, body: &[u8]) -> Result<Prompted, String> {
        let request: Value = serde_json::from_slice(body).map_err(|_| "the request is not JSON".to_owned())?;
        let Some(template) = &self.template else { return Ok(Prompted::default()) };
        let mut found = Prompted::default();
        let [with, without] = match template {
            Template::Local(template) => [template.render(&request, true), template.render(&request, false)],
            Template::Remote(endpoint) => {
                let mut prompts = Vec::new();
                for add in [true, false] {
                    let mut asked = request.clone();
                    asked["add_generation_prompt"] = json!(add);
                    let answer = endpoint.ask(&asked).await?;
                    prompts.push(
                        answer["prompt"].as_str().map(str::to_owned).ok_or("apply_template: its answer has no prompt".to_owned()),
                    );
                }
                let without = prompts.pop().unwrap_or_else(|| Err(String::new()));
                [prompts.pop().unwrap_or_else(|| Err(String::new())), without]
            }
        };
        let text = match with {
            Ok(text) => text,
            Err(what) => {
                found.faults.push(what);
                return Ok(found);
            }
        };
        if without.is_ok_and(|without| without == text) {
            found.faults.push("no generation prompt: nothing tells the model to answer".to_owned());
        }
        if let Some(tokens) = &self.tokens {
            let counted = tokens.count(&text).await?;
            found.tokens = Some(counted.all);
            if counted.begins > 1 {
                found.faults.push(format!("the token that begins a prompt is there {} times", counted.begins));
            }
            let answer =
                ["max_tokens", "max_completion_tokens"].iter().find_map(|name| request.get(*name)?.as_u64()).unwrap_or(0);
            if let Some(limit) = self.context_tokens
                && counted.all + answer > limit
            {
                let all = counted.all;
                found
                    .faults
                    .push(format!("the prompt has {all} tokens and its answer may have {answer}; the limit is {limit} together"));
            }
        }
        if let Template::Local(template) = template
            && !template.bos_token.is_empty()
            && self.tokens.is_none()
            && text.matches(&template.bos_token).count() > 1
        {
            found.faults.push(format!("{} is there {} times", template.bos_token, text.matches(&template.bos_token).count()));
        }
        found.text = Some(text);
        Ok(found)
    }
}

struct Counted {
    all: u64,
    /// How often the token is there that begins a prompt.
    begins: usize,
}

impl Tokens {
    #[cfg(feature = "tokenizers")]
    fn read(file: &Path) -> Result<Self, String> {
        let tokenizer = tokenizers::Tokenizer::from_file(file).map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(Tokens::Local(Box::new(tokenizer)))
    }

    #[cfg(not(feature = "tokenizers"))]
    fn read(file: &Path) -> Result<Self, String> {
        Err(format!("{}: this build has no tokenizers (feature \"tokenizers\")", file.display()))
    }

    /// Counts as a server does that adds what the tokenizer adds to every prompt.
    async fn count(&self, text: &str) -> Result<Counted, String> {
        let (all, none): (Vec<u64>, Vec<u64>) = match self {
            #[cfg(feature = "tokenizers")]
            Tokens::Local(tokenizer) => {
                let ids = |text: &str| {
                    let encoded = tokenizer.encode_fast(text, true).map_err(|error| format!("tokenizer: {error}"))?;
                    Ok::<_, String>(encoded.get_ids().iter().map(|id| u64::from(*id)).collect())
                };
                (ids(text)?, ids("")?)
            }
            Tokens::Remote(endpoint) => {
                let mut ids = Vec::new();
                for text in [text, ""] {
                    // As its own chat endpoint does: what begins a prompt is added, and special tokens in it are read as such.
                    let asked = json!({ "content": text, "prompt": text, "add_special": true, "parse_special": true });
                    let answer = endpoint.ask(&asked).await?;
                    let tokens = answer["tokens"].as_array().ok_or("tokenize: its answer has no tokens")?;
                    ids.push(tokens.iter().filter_map(|token| token.as_u64().or_else(|| token["id"].as_u64())).collect());
                }
                let none = ids.pop().unwrap_or_default();
                (ids.pop().unwrap_or_default(), none)
            }
        };
        let begins = none.first().map_or(0, |begin| all.iter().take_while(|id| *id == begin).count());
        Ok(Counted { all: all.len() as u64, begins })
    }
}

/// One of a provider's own endpoints.
struct Endpoint {
    provider: HttpProvider,
    target: String,
}

impl Endpoint {
    fn of(url: &str) -> Result<Self, String> {
        let at = url.find("://").map(|at| at + 3).ok_or_else(|| format!("{url:?} is no URL"))?;
        let path = url[at..].find('/').map_or(url.len(), |path| at + path);
        let options = HttpOptions::new(&url[..path]);
        let provider = HttpProvider::new("prompt", options).map_err(|error| format!("{url:?}: {error}"))?;
        Ok(Endpoint { provider, target: if path == url.len() { "/".to_owned() } else { url[path..].to_owned() } })
    }

    async fn ask(&self, body: &Value) -> Result<Value, String> {
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
                serde_json::from_slice(&response.body).map_err(|_| format!("{}: its answer is not JSON", self.target))
            }
            other => Err(format!("{}: {}", self.target, why(&other))),
        }
    }
}

/// Why there is no answer, in words.
pub fn why(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Succeeded { .. } => String::new(),
        Outcome::Rejected { reason, .. } => format!("refused: {reason}"),
        Outcome::NotSent { reason } => format!("not sent: {reason}"),
        Outcome::InvalidOutput { reason } => format!("invalid: {reason}"),
        Outcome::Unknown { reason } => format!("unknown: {reason}"),
    }
}

/// `{% generation %}` marks what was generated, for training; it prints nothing of its own.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(begin) = rest.find("{%") {
        let Some(length) = rest[begin..].find("%}") else { break };
        let tag = &rest[begin..begin + length + 2];
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+', ' ', '\n', '\t']);
        out.push_str(&rest[..begin]);
        if word == "generation" || word == "endgeneration" {
            // What it takes away around it stays taken away.
            let dashes = |there: bool| if there { "-" } else { "" };
            let (left, right) = (dashes(tag.starts_with("{%-")), dashes(tag.ends_with("-%}")));
            out.push_str(&format!("{{%{left} if true %}}{{% endif {right}%}}"));
        } else {
            out.push_str(tag);
        }
        rest = &rest[begin + length + 2..];
    }
    out.push_str(rest);
    out
}

/// JSON as Python writes it.
fn tojson(value: Jinja) -> Result<String, Error> {
    struct Python;
    impl serde_json::ser::Formatter for Python {
        fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
            out.write_all(b": ")
        }
    }
    let mut out = Vec::new();
    let mut writer = serde_json::Serializer::with_formatter(&mut out, Python);
    let refused = |_| Error::new(ErrorKind::InvalidOperation, "tojson: it is no JSON");
    serde::Serialize::serialize(&value, &mut writer).map_err(refused)?;
    String::from_utf8(out).map_err(|_| Error::new(ErrorKind::InvalidOperation, "tojson: it is no text"))
}

/// Today, as templates ask for it.
#[expect(clippy::disallowed_methods, reason = "a prompt says which day it is, and nothing hangs on it")]
fn strftime_now(format: &str) -> String {
    let now = std::time::SystemTime::now();
    // 2026-11-30T04:25:40Z
    let text = humantime::format_rfc3339_seconds(now).to_string();
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let month = text[5..7].parse::<usize>().ok().and_then(|month| MONTHS.get(month.saturating_sub(1))).unwrap_or(&"");
    [
        ("%Y", &text[..4]),
        ("%m", &text[5..7]),
        ("%d", &text[8..10]),
        ("%H", &text[11..13]),
        ("%M", &text[14..16]),
        ("%S", &text[17..19]),
        ("%b", month.get(..3).unwrap_or_default()),
        ("%B", month),
    ]
    .iter()
    .fold(format.to_owned(), |format, (from, to)| format.replace(from, to))
}

fn told(error: &Error) -> String {
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    let line = error.line().map(|line| format!(" (line {line} of the chat template)")).unwrap_or_default();
    format!("{}{detail}{line}", error.kind())
}

#[cfg(test)]
mod tests;
