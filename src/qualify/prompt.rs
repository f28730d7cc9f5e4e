//! L0: the prompt that a provider's model gets, found out without asking it for an answer.
//!
//! A chat template is rendered as the servers of such models do, its prompt is counted with the model's own tokenizer, and what is
//! commonly wrong is told: a variable that is not there, a message that is not in the prompt, no prompt to begin an answer, a
//! beginning that is there twice or not at all, more tokens than fit. Or the provider's own endpoints say what they would do.

use std::path::Path;

use serde_json::{Value, json};

use crate::config::{PromptEntry, SpecialTokens};
use crate::provider::Outcome;

mod template;
mod tokens;

pub use template::ChatTemplate;

use tokens::{Begin, Counted, Endpoint, Tokens};

/// What a model is prompted with.
pub struct Prompt {
    template: Option<Template>,
    tokens: Option<Tokens>,
    special_tokens: SpecialTokens,
    /// `""` where nothing says it.
    bos_token: String,
    context_tokens: Option<u64>,
}

enum Template {
    Local(Box<ChatTemplate>),
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

impl Prompt {
    /// What an entry says of the prompts of the provider of this name.
    ///
    /// # Errors
    /// What is wrong with its files.
    pub fn of(provider: &str, entry: &PromptEntry) -> Result<Self, String> {
        let endpoint = |key: &str, url: &str| Endpoint::of(format!("provider.{provider}.prompt.{key}"), url).map(Box::new);
        let told = |key: &str, file: &Path, what: &str| format!("provider.{provider}.prompt.{key} = {file:?}: {what}");
        let template = match (&entry.chat_template, &entry.apply_template) {
            (Some(file), _) => {
                let told = |what: &str| told("chat_template", file, what);
                let text = std::fs::read_to_string(file).map_err(|error| told(&error.to_string()))?;
                let template = ChatTemplate::read(&text, entry.bos_token.as_deref(), entry.eos_token.as_deref());
                Some(Template::Local(Box::new(template.map_err(|what| told(&what))?)))
            }
            (None, Some(url)) => Some(Template::Remote(endpoint("apply_template", url)?)),
            (None, None) => None,
        };
        let tokens = match (&entry.tokenizer, &entry.tokenize) {
            (Some(file), _) if template.is_none() => {
                return Err(told("tokenizer", file, "without a chat template it counts nothing"));
            }
            (Some(file), _) => Some(Tokens::read(file).map_err(|what| told("tokenizer", file, &what))?),
            (None, Some(url)) => Some(Tokens::Remote(endpoint("tokenize", url)?)),
            (None, None) => None,
        };
        // A server that shows its own prompts has taken the beginning off that its tokenizer adds again.
        let usual = match &template {
            Some(Template::Remote(_)) => SpecialTokens::Tokenizer,
            Some(Template::Local(_)) | None => SpecialTokens::Template,
        };
        let bos_token = match &template {
            Some(Template::Local(template)) => template.bos_token.clone(),
            Some(Template::Remote(_)) | None => entry.bos_token.clone().unwrap_or_default(),
        };
        let special_tokens = entry.special_tokens.unwrap_or(usual);
        Ok(Prompt { template, tokens, special_tokens, bos_token, context_tokens: entry.context_tokens })
    }

    /// Finds out what is wrong with the prompt of a request.
    ///
    /// # Errors
    /// A provider's own endpoint did not say: nothing is known.
    ///
    /// # Cancel safety
    /// Cancel safe: nothing is changed by it, here or there.
    pub async fn look(&self, body: &[u8]) -> Result<Prompted, String> {
        let request: Value = serde_json::from_slice(body).map_err(|_| "the request is not JSON".to_owned())?;
        let mut found = Prompted::default();
        let adds = self.special_tokens == SpecialTokens::Tokenizer;
        let counted = match (&self.template, &self.tokens) {
            (None, None) => return Ok(found),
            (None, Some(tokens)) => {
                let Some(counted) = tokens.count_messages(&request, true, adds).await? else { return Ok(found) };
                if tokens.count_messages(&request, false, adds).await?.as_ref() == Some(&counted) {
                    found.faults.push(SILENT.to_owned());
                }
                Some(counted)
            }
            (Some(template), tokens) => {
                let text = match template.render(&request, true).await? {
                    Ok(text) => text,
                    Err(what) => {
                        found.faults.push(what);
                        return Ok(found);
                    }
                };
                if template.render(&request, false).await?.is_ok_and(|without| without == text) {
                    found.faults.push(SILENT.to_owned());
                }
                found.faults.extend(dropped(template, &request, &text).await?);
                let counted = match tokens {
                    Some(tokens) => Some(tokens.count(&request, &text, adds).await?),
                    None => None,
                };
                found.text = Some(text);
                counted
            }
        };
        match (&counted, &self.tokens) {
            (Some(Counted { ids: Some(ids), .. }), Some(tokens)) => {
                if let Some(begin) = tokens.begin(&request, &self.bos_token).await? {
                    let times = ids.iter().take_while(|id| **id == begin.id).count();
                    found.faults.extend(self.beginning(times, Some(begin)));
                }
            }
            _ if !self.bos_token.is_empty() => {
                let text = found.text.as_deref().unwrap_or_default();
                let mut rest = text;
                while let Some(after) = rest.strip_prefix(&self.bos_token) {
                    rest = after;
                }
                let written = (text.len() - rest.len()) / self.bos_token.len();
                let added = usize::from(adds && self.adds_bos() == Some(true));
                if found.text.is_some() {
                    found.faults.extend(self.beginning(written + added, None));
                }
            }
            _ => {}
        }
        if let Some(Counted { all, limit, .. }) = counted {
            found.tokens = Some(all);
            let names = ["max_tokens", "max_completion_tokens"];
            let answer = names.iter().find_map(|name| request.get(*name)?.as_u64()).unwrap_or(0);
            if let Some(limit) = self.context_tokens.or(limit)
                && all.saturating_add(answer) > limit
            {
                let what = format!("the prompt has {all} tokens and its answer may have {answer}; the limit is {limit} together");
                found.faults.push(what);
            }
        }
        Ok(found)
    }

    fn adds_bos(&self) -> Option<bool> {
        match &self.template {
            Some(Template::Local(template)) => template.adds_bos,
            Some(Template::Remote(_)) | None => None,
        }
    }

    /// What is wrong with a prompt that begins so many times.
    fn beginning(&self, times: usize, begin: Option<Begin>) -> Option<String> {
        let is_added = begin.is_some_and(|begin| begin.is_added);
        match times {
            0 => {
                let is_wanted = self.adds_bos().unwrap_or(is_added);
                let whose = match self.special_tokens {
                    SpecialTokens::Template => {
                        "the template does not write it; if the server adds it, special_tokens is \"tokenizer\""
                    }
                    SpecialTokens::Tokenizer => "neither the template nor the tokenizer adds it",
                };
                is_wanted.then(|| format!("the token that begins a prompt is missing: {whose}"))
            }
            1 => None,
            _ => {
                let whose = match self.special_tokens {
                    SpecialTokens::Tokenizer if is_added || begin.is_none() => "the tokenizer adds it and the template writes it",
                    SpecialTokens::Tokenizer | SpecialTokens::Template => "the template writes it more than once",
                };
                Some(format!("the token that begins a prompt is there {times} times: {whose}"))
            }
        }
    }
}

/// What is told of a template that ignores `add_generation_prompt`.
const SILENT: &str = "no generation prompt: nothing tells the model to answer";

impl Template {
    /// The prompt of a request, or why the template makes none.
    async fn render(&self, request: &Value, prompts: bool) -> Result<Result<String, String>, String> {
        match self {
            Template::Local(template) => Ok(template.render(request, prompts)),
            Template::Remote(endpoint) => {
                let mut asked = request.clone();
                asked["add_generation_prompt"] = json!(prompts);
                let answer = endpoint.ask(&asked).await?;
                let prompt = answer["prompt"].as_str().ok_or_else(|| endpoint.told("its answer has no prompt"))?;
                Ok(Ok(prompt.to_owned()))
            }
        }
    }
}

/// The messages that are not in the prompt, of those that are texts of a user or of a system.
///
/// A short text may be in a prompt by chance, so it is asked for once more with a mark in the place of each.
async fn dropped(template: &Template, request: &Value, text: &str) -> Result<Vec<String>, String> {
    let (mut marked, mut said) = (request.clone(), Vec::new());
    let Some(messages) = marked.get_mut("messages").and_then(Value::as_array_mut) else { return Ok(Vec::new()) };
    for (place, message) in messages.iter_mut().enumerate() {
        let Some(role) =
            message["role"].as_str().filter(|role| ["system", "developer", "user"].contains(role)).map(str::to_owned)
        else {
            continue;
        };
        let Some(content) = message["content"].as_str().map(|content| content.trim().to_owned()) else { continue };
        if !content.is_empty() {
            let mark = format!("zq{place}mark{place}qz");
            message["content"] = json!(mark);
            said.push((place + 1, role, content, mark));
        }
    }
    if said.is_empty() {
        return Ok(Vec::new());
    }
    // A template may refuse such a text; then the text itself must do.
    let marked = template.render(&marked, true).await?.ok();
    let is_dropped = |content: &str, mark: &str| {
        let quoted = json!(content).to_string();
        let is_there = text.contains(content) || text.contains(quoted.trim_matches('"'));
        !is_there || marked.as_ref().is_some_and(|marked| !marked.contains(mark))
    };
    let dropped = said.iter().filter(|(_, _, content, mark)| is_dropped(content, mark));
    Ok(dropped
        .map(|(number, role, ..)| format!("a message is dropped: message {number} ({role}) is not in the prompt"))
        .collect())
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

#[cfg(test)]
mod tests;
