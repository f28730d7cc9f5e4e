//! What providers must have proved before a job fails over to them: a route's suite, and what a provider's model is prompted with.
//!
//! Files are read and hashed once, with the configuration: what is certified, and what a request is compared with, is what was read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::check::{Checker, DURATION_MIN};
use super::required::read;
use super::{Config, Document, Effects, Preset, ProviderEntry, Route};
use crate::fingerprint::{hex, sha256};
use crate::provider::asking::template::unnamed;
use crate::provider::http::Renderer;
use crate::provider::{Rendered, Request};
use crate::qualify::suite::{SUITE_BYTES_MAX, Suite, Wrong};
use crate::qualify::{Bindings, Contract, Part};
use crate::validate::{Check, Expression, Validator};

/// Largest file with a chat template or a tokenizer, in bytes.
pub const PROMPT_BYTES_MAX: usize = 64 << 20;
/// Longest life of a certificate.
pub const LIFE_MAX: Duration = Duration::from_secs(90 * 86_400);
/// How long a certificate for a model of a dated name is good, unless the route says otherwise.
pub const LIFE_DATED: Duration = Duration::from_secs(30 * 86_400);
/// How long one for a model of a floating name is.
pub const LIFE_FLOATING: Duration = Duration::from_secs(7 * 86_400);
/// Most answers that a suspension looks back on.
pub const ANSWERS_MAX: usize = 1000;

/// Most members that are told of two requests that differ.
const MEMBERS_TOLD: usize = 8;

/// What providers after a route's first one must have proved.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct QualifyEntry {
    /// The file with its suite.
    pub suite: PathBuf,
    /// How long a certificate is good. Absent: 30 days for a model of a dated name, 7 for a floating one.
    #[serde(default, with = "humantime_serde")]
    pub life: Option<Duration>,
    /// So long before a certificate ends, gateways begin to renew it. Absent: they never do.
    #[serde(default, with = "humantime_serde")]
    pub renew: Option<Duration>,
    /// Of the headers that the route forwards, those in which live requests may differ.
    #[serde(default)]
    pub vary_headers: Vec<String>,
    /// When invalid answers suspend a certificate. Absent: 3 of the last 20.
    #[serde(default)]
    pub suspend: SuspendEntry,
}

/// How many of a provider's last answers may be invalid, less one.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SuspendEntry {
    /// So many invalid ones suspend.
    pub invalid: usize,
    /// Of so many.
    pub of: usize,
}

impl Default for SuspendEntry {
    fn default() -> Self {
        SuspendEntry { invalid: 3, of: 20 }
    }
}

/// What a provider's model is prompted with: files, or the provider's own endpoints.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptEntry {
    /// A file with its chat template, or with the `tokenizer_config.json` that has it.
    pub chat_template: Option<PathBuf>,
    /// Its `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// The token that begins every prompt, where the chat template's file does not say.
    pub bos_token: Option<String>,
    /// The token that ends every answer, where the chat template's file does not say.
    pub eos_token: Option<String>,
    /// Who adds the token that begins every prompt. Absent: the template, as in the chat endpoints of vLLM and transformers; the
    /// tokenizer where `apply_template` makes the prompts, as llama.cpp does.
    pub special_tokens: Option<SpecialTokens>,
    /// How many tokens prompt and answer may have together. Absent: what the provider's own `tokenize` says, if it does.
    pub context_tokens: Option<u64>,
    /// The URL of the provider's own endpoint that makes a prompt of messages, as llama.cpp has it.
    pub apply_template: Option<String>,
    /// The URL of the provider's own endpoint that counts tokens, as llama.cpp and vLLM have it.
    pub tokenize: Option<String>,
}

/// Who adds the token that begins every prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SpecialTokens {
    /// The chat template writes it; the tokenizer adds nothing to a prompt.
    Template,
    /// The tokenizer adds it to every prompt; the chat template leaves it out.
    Tokenizer,
}

/// A route's suite, and the contract of each of its providers.
#[derive(Debug)]
pub struct Qualified {
    /// The suite.
    pub suite: Suite,
    /// By the provider's place in the route.
    pub contracts: Vec<Contract>,
    /// What every request of the suite is bound to, by the provider's place in the route. Only of the first, which needs no
    /// certificate, it may be that there is no such thing; then it is said why.
    pub bound: Vec<Result<Bindings, String>>,
}

/// Why the requests of a suite are not one contract of a provider: what is wrong, and what to do.
struct NotOne {
    what: String,
    hint: String,
}

impl Config {
    /// Returns a route's suite and contracts, if it has a suite.
    pub fn qualified(&self, route: &str) -> Option<&Qualified> {
        self.qualified.get(route).map(AsRef::as_ref)
    }

    /// Computes what a request with this body and path is bound to.
    ///
    /// # Errors
    /// The provider cannot be sent such a request, or there is none.
    pub fn bound(&self, contract: &Contract, path: &str, body: &[u8]) -> Result<Bindings, String> {
        let entry =
            self.provider.get(&contract.provider).ok_or_else(|| format!("there is no provider {:?}", contract.provider))?;
        let renderer = Renderer::of(entry).map_err(|problem| format!("provider {}: {problem}", contract.provider))?;
        rendered(&renderer, path, body).map(|rendered| contract.bind(&rendered))
    }

    /// Returns when invalid answers suspend certificates of a route.
    pub fn suspend(&self, route: &str) -> Option<SuspendEntry> {
        Some(self.route.get(route)?.qualify.as_ref()?.suspend)
    }

    /// Returns how long a certificate of a route is good, for a model of this name.
    pub fn certificate_life(&self, route: &str, model: &str) -> Duration {
        let said = self.route.get(route).and_then(|route| route.qualify.as_ref()?.life);
        said.unwrap_or(if is_dated(model) { LIFE_DATED } else { LIFE_FLOATING })
    }
}

/// A time as people write it: whole days as days, however many they are.
fn in_days(time: Duration) -> String {
    let (days, rest) = (time.as_secs() / 86_400, time.as_secs() % 86_400);
    if days > 0 && rest == 0 && time.subsec_nanos() == 0 {
        format!("{days}d")
    } else {
        humantime::format_duration(time).to_string()
    }
}

/// Whether a model's name says of which day it is: then it is meant to stay as it is.
fn is_dated(model: &str) -> bool {
    let digits: Vec<char> = model.chars().collect();
    let year =
        |at: usize| digits[at..].iter().take(4).collect::<String>().parse::<u16>().is_ok_and(|year| (2000..2100).contains(&year));
    let number = |at: usize, len: usize| {
        let text: String = digits.iter().skip(at).take(len).collect();
        if text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse::<u32>().ok() } else { None }
    };
    let is_day = |month: Option<u32>, day: Option<u32>| {
        month.is_some_and(|month| (1..=12).contains(&month)) && day.is_some_and(|day| (1..=31).contains(&day))
    };
    (0..digits.len()).filter(|at| digits[*at] == '2' && (*at == 0 || !digits[at - 1].is_ascii_digit()) && year(*at)).any(|at| {
        let dashed = digits.get(at + 4) == Some(&'-') && digits.get(at + 7) == Some(&'-');
        let plain = !digits.get(at + 8).is_some_and(char::is_ascii_digit);
        (plain && is_day(number(at + 4, 2), number(at + 6, 2))) || (dashed && is_day(number(at + 5, 2), number(at + 8, 2)))
    })
}

impl Checker<'_> {
    /// Nobody is asked before a renewal: it must be of no consequence, and a certificate must have a time in which it is not renewed.
    fn renew(&mut self, key: &str, renew: Duration, life: Duration, effects: Effects) {
        let shown = in_days(renew);
        self.time(key, renew, DURATION_MIN);
        if renew >= life {
            let what = format!("it is not shorter than a certificate's life, {}", in_days(life));
            self.refuse(key, Some(&shown), what, "shorten it, or set life");
        }
        if effects == Effects::External {
            let what =
                "effects = \"external\": what the provider does in a renewal would happen for real, and nobody would be asked";
            self.refuse(key, Some(&shown), what, "leave it out, and let a person run onejob qualify");
        }
    }

    /// Reads a route's suite, and what its providers' models are prompted with.
    pub(super) fn qualified(
        &mut self,
        key: &str,
        (name, route): (&str, &Route),
        document: &Document,
        validator: Option<&Validator>,
    ) -> Option<Qualified> {
        let entry = route.qualify.as_ref()?;
        let key = format!("{key}.qualify");
        if let Some(life) = entry.life {
            if life > LIFE_MAX {
                let what = format!("it is longer than {}, the limit", in_days(LIFE_MAX));
                self.refuse(&format!("{key}.life"), Some(&in_days(life)), what, "shorten it");
            } else {
                self.time(&format!("{key}.life"), life, DURATION_MIN);
            }
        }
        if let Some(renew) = entry.renew {
            self.renew(&format!("{key}.renew"), renew, entry.life.unwrap_or(LIFE_FLOATING), route.effects);
        }
        let SuspendEntry { invalid, of } = entry.suspend;
        self.number(&format!("{key}.suspend.of"), of, 1, ANSWERS_MAX);
        self.number(&format!("{key}.suspend.invalid"), invalid, 1, of.max(1));
        if route.providers.is_empty() {
            self.refuse(&key, None, "executors outside make the attempts of this route", "leave it out");
            return None;
        }
        let shown = entry.suite.display().to_string();
        let suite_key = format!("{key}.suite");
        let bytes = match read(&entry.suite, SUITE_BYTES_MAX) {
            Ok(bytes) => bytes,
            Err(why) => {
                self.refuse(&suite_key, Some(&shown), why, "name a file with a suite");
                return None;
            }
        };
        // What a refused route would make of a suite is no news.
        let suite = if self.told_of(&format!("route.{name}.output")) {
            Err(Suite::wrong_in_itself(&bytes))
        } else {
            Suite::load(&bytes, validator)
        };
        let wrong = match &suite {
            Ok(suite) => suite.unknown_providers(|name| document.provider.contains_key(name)),
            Err(wrong) => wrong.clone(),
        };
        for Wrong { line, what } in wrong {
            let what = line.map_or_else(|| what.clone(), |line| format!("{shown}:{line}: {what}"));
            self.refuse(&suite_key, Some(&shown), what, "correct the suite");
        }
        let suite = suite.ok()?;
        if let Some((what, hint)) = whole_answer(route, document, &suite) {
            self.refuse(&suite_key, Some(&shown), what, hint);
        }
        let (mut contracts, mut of_suite) = (Vec::new(), Vec::new());
        for (place, provider) in route.providers.iter().enumerate() {
            let Some(entry) = document.provider.get(provider) else { continue };
            let mut fixed = BTreeMap::from([
                (Part::Suite, hex(&sha256(&bytes))),
                (Part::Schema, schema(validator)),
                (Part::Assertions, assertions(validator, &suite)),
                (Part::Template, template(entry, route)),
            ]);
            let prompt = entry.prompt.clone().unwrap_or_default();
            for (part, what, file, url) in [
                (Part::ChatTemplate, "chat_template", &prompt.chat_template, &prompt.apply_template),
                (Part::Tokenizer, "tokenizer", &prompt.tokenizer, &prompt.tokenize),
            ] {
                let bound = match (file, url) {
                    (Some(file), _) => match read(file, PROMPT_BYTES_MAX) {
                        Ok(bytes) => hex(&sha256(&bytes)),
                        Err(why) => {
                            let key = format!("provider.{provider}.prompt.{what}");
                            self.refuse(&key, Some(&file.display()), why, "name a file that can be read");
                            continue;
                        }
                    },
                    (None, Some(url)) => hex(&sha256(url.as_bytes())),
                    (None, None) => String::new(),
                };
                fixed.insert(part, bound);
            }
            if let Some(prompt) = &entry.prompt {
                fixed.entry(Part::ChatTemplate).and_modify(|template| *template = hashed([template.as_str(), &beside(prompt)]));
            }
            let vary = suite.vary.clone().unwrap_or_else(|| varies(entry.preset));
            let contract = Contract {
                route: name.to_owned(),
                provider: provider.clone(),
                fixed,
                model: suite.model.clone(),
                vary,
                free_headers: free_headers(entry, route),
                has_template: entry.submit.as_ref().is_some_and(|submit| submit.body.is_some()),
            };
            let one = one_contract(entry, &contract, &suite);
            if let Err(NotOne { what, hint }) = &one
                && place > 0
                && !self.told_of(&format!("provider.{provider}"))
            {
                self.refuse(&suite_key, Some(&shown), format!("at provider {provider}: {what}"), hint);
            }
            of_suite.push(one.map_err(|NotOne { what, hint }| format!("{what}; {hint}")));
            contracts.push(contract);
        }
        (contracts.len() == route.providers.len()).then_some(Qualified { suite, contracts, bound: of_suite })
    }
}

/// What all requests of a suite are bound to at a provider: those of its cases and of their relations.
fn one_contract(entry: &ProviderEntry, contract: &Contract, suite: &Suite) -> Result<Bindings, NotOne> {
    if suite.vary.is_none() && contract.vary.iter().any(String::is_empty) {
        let why = match entry.preset {
            Some(_) => "the body is the user's own with its preset",
            None => "it has no preset",
        };
        return Err(NotOne {
            what: format!("vary is missing, and {why}: nothing would be known of what requests may differ in"),
            hint: "list the JSON pointers to what differs from request to request, as in vary: [/messages]".to_owned(),
        });
    }
    let renderer = Renderer::of(entry).map_err(|problem| NotOne {
        what: format!("no request can be made: {problem}"),
        hint: "correct the provider's entry".to_owned(),
    })?;
    let mut first: Option<(Bindings, Option<Value>, String)> = None;
    let mut nowhere: BTreeSet<&str> = suite.vary.iter().flatten().map(String::as_str).collect();
    for case in &suite.cases {
        for relation in std::iter::once(None).chain((0..case.relations.len()).map(Some)) {
            let named = match relation {
                Some(place) => format!("{:?}: {}", case.name, case.relations[place].what()),
                None => format!("{:?}", case.name),
            };
            let body = case.request(suite, &contract.provider, relation, 0);
            let rendered = body.and_then(|body| rendered(&renderer, &suite.path, &body));
            let rendered = rendered.map_err(|what| NotOne {
                what: format!("case {named}: {what}"),
                hint: "correct the case, or submit.body of the provider".to_owned(),
            })?;
            let (found, body) = (contract.bind(&rendered), serde_json::from_slice(&unnamed(&rendered.body)).ok());
            nowhere.retain(|pointer| body.as_ref().is_none_or(|body: &Value| body.pointer(pointer).is_none()));
            match &first {
                None => first = Some((found, body, named)),
                Some((one, of_one, other)) if *one != found => {
                    let members = of_one.as_ref().zip(body.as_ref()).map(|(one, body)| contract.members_that_differ(one, body));
                    let parts: Vec<String> = one.differ(&found).iter().map(|part| part_that_differs(*part, &members)).collect();
                    let nowhere = if nowhere.is_empty() { String::new() } else { format!("; {}", leads_nowhere(&nowhere)) };
                    return Err(NotOne {
                        what: format!("cases {other} and {named} differ in what is bound ({}){nowhere}", parts.join(", ")),
                        hint: "a certificate is for one contract: name what varies in vary, or make two suites".to_owned(),
                    });
                }
                Some(_) => {}
            }
        }
    }
    if suite.vary.as_ref().is_some_and(|vary| !vary.is_empty() && vary.len() == nowhere.len()) {
        return Err(NotOne {
            what: format!("{} in any request of the suite: live requests could differ in nothing", leads_nowhere(&nowhere)),
            hint: "list the JSON pointers to what differs from request to request, as in vary: [/messages]".to_owned(),
        });
    }
    let none = || NotOne { what: "the suite has no cases".to_owned(), hint: "add one".to_owned() };
    first.map(|(found, ..)| found).ok_or_else(none)
}

/// What a suite speaks of as if it were the output, where the route names no place of it and a provider's answers have no such member.
fn whole_answer(route: &Route, document: &Document, suite: &Suite) -> Option<(String, String)> {
    if route.output.as_ref().is_some_and(|output| output.pointer.is_some()) {
        return None;
    }
    let mut presets = route.providers.iter().filter_map(|name| document.provider.get(name)?.preset);
    let (members, place) = presets.find_map(members_of_answers)?;
    let expressions = suite.assertions.iter().filter_map(|text| Expression::compile(text).ok());
    let names: Vec<String> = expressions.flat_map(|expression| expression.names()).collect();
    let mut spoken_of = names.iter().filter_map(|name| name.strip_prefix("output.")?.split('.').next());
    let absent = spoken_of.find(|member| !members.contains(member))?;
    let what = format!(
        "its assertions speak of output.{absent}, but the route names no place of the output: then it is the whole answer, \
         which has no {absent}"
    );
    let hint = format!(
        "say where it is, as in output = {{ schema = …, pointer = \"{place}\", parse = \"json\" }}, or write answer.{absent}"
    );
    Some((what, hint))
}

/// The members of a preset's answers, and where the text is in one.
fn members_of_answers(preset: Preset) -> Option<(&'static [&'static str], &'static str)> {
    match preset {
        Preset::OpenaiChat => Some((
            &["choices", "created", "id", "model", "object", "service_tier", "system_fingerprint", "usage"],
            "/choices/0/message/content",
        )),
        // Of theirs there are too many, or they hold no text.
        Preset::OpenaiResponses | Preset::OpenaiEmbeddings | Preset::JobQueue => None,
    }
}

fn leads_nowhere(pointers: &BTreeSet<&str>) -> String {
    let told: Vec<&str> = pointers.iter().copied().collect();
    format!("vary: {} {} nowhere", told.join(", "), if told.len() == 1 { "leads" } else { "lead" })
}

/// A part of a contract in which two requests differ, with the members of their bodies that do.
fn part_that_differs(part: Part, members: &Option<Vec<String>>) -> String {
    match members.as_deref().filter(|members| part == Part::Parameters && !members.is_empty()) {
        Some(members) => {
            let more = if members.len() > MEMBERS_TOLD { ", …" } else { "" };
            let told = members.iter().take(MEMBERS_TOLD).map(String::as_str).collect::<Vec<_>>().join(", ");
            format!("{part}: {told}{more}")
        }
        None => part.to_string(),
    }
}

fn rendered(renderer: &Renderer, path: &str, body: &[u8]) -> Result<Rendered, String> {
    let request = Request {
        method: String::new(),
        target: path.to_owned(),
        content_type: "application/json".to_owned(),
        headers: Vec::new(),
        body: body.into(),
    };
    renderer.render(&request).map_err(|error| error.to_string())
}

/// What requests differ in, unless a suite says so itself: all of the body, where nothing is known of it.
fn varies(preset: Option<Preset>) -> Vec<String> {
    let pointers: &[&str] = match preset {
        Some(Preset::OpenaiChat) => &["/messages", "/stream", "/stream_options", "/user", "/metadata"],
        Some(Preset::OpenaiResponses) => &["/input", "/instructions", "/user", "/metadata"],
        Some(Preset::OpenaiEmbeddings) => &["/input", "/user"],
        Some(Preset::JobQueue) | None => &[""],
    };
    pointers.iter().map(|pointer| (*pointer).to_owned()).collect()
}

/// What an entry says of prompts beside where their template and their tokenizer are, which parts of their own are bound to. A
/// further key of the entry is in it by itself.
fn beside(prompt: &PromptEntry) -> String {
    let rest = PromptEntry { chat_template: None, tokenizer: None, apply_template: None, tokenize: None, ..prompt.clone() };
    let mut said = serde_json::to_value(&rest).expect("an entry is plain data");
    if let Some(said) = said.as_object_mut() {
        said.retain(|_, value| !value.is_null());
    }
    said.to_string()
}

fn hashed<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend_from_slice(&(part.len() as u64).to_be_bytes());
        bytes.extend_from_slice(part.as_bytes());
    }
    hex(&sha256(&bytes))
}

fn schema(validator: Option<&Validator>) -> String {
    let Some(validator) = validator else { return String::new() };
    let of = |check: &Option<Check>| check.as_ref().map(|check| check.schema_text().to_owned()).unwrap_or_default();
    let parse = format!("{:?}", validator.extract.parse);
    hashed([of(&validator.input).as_str(), &of(&validator.output), &validator.extract.pointer, &parse])
}

fn assertions(validator: Option<&Validator>, suite: &Suite) -> String {
    let checks = validator.into_iter().flat_map(|validator| [&validator.input, &validator.output]);
    let own: Vec<String> =
        checks.map(|check| check.as_ref().map(|check| check.assertion_texts().join("\n")).unwrap_or_default()).collect();
    hashed(own.iter().map(String::as_str).chain(["suite"]).chain(suite.assertions.iter().map(String::as_str)))
}

/// The headers of a provider's requests that are not bound one by one: its own, and what the route says.
fn free_headers(entry: &ProviderEntry, route: &Route) -> Vec<String> {
    let vary = route.qualify.iter().flat_map(|qualify| &qualify.vary_headers);
    entry.headers.keys().chain(vary).map(|name| name.to_ascii_lowercase()).collect()
}

/// How a provider's requests are made of a route's.
fn template(entry: &ProviderEntry, route: &Route) -> String {
    let body = entry.submit.as_ref().and_then(|submit| submit.body.clone()).unwrap_or_default();
    let adapter = format!("{:?} {}", entry.adapter, entry.method);
    // Their names alone where a value may be a secret: it may change without the contract changing.
    let headers: Vec<String> = entry
        .headers
        .iter()
        .map(|(name, value)| if super::sources::may_be_secret(name) { name.clone() } else { format!("{name}: {value}") })
        .collect();
    hashed([adapter.as_str(), &body, &headers.join("\n"), &route.forward_headers.join("\n")])
}

#[cfg(test)]
mod tests {
    use super::is_dated;

    #[test]
    fn a_dated_name_has_a_day_in_it() {
        for name in ["gpt-4o-2024-08-06", "claude-sonnet-4-20250514", "m-20240806-preview"] {
            assert!(is_dated(name), "{name}");
        }
        for name in ["gpt-4o", "qwen2.5-coder-0.5b", "m-20249999", "m-2024-13-01", "m-202408061", "model-2024", ""] {
            assert!(!is_dated(name), "{name}");
        }
    }
}
