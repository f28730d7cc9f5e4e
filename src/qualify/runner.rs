//! Runs a suite against a provider, and says what it proves.
//!
//! Calls go to the provider itself, each with a key of its own, and never through the job store: no answer is one that was given
//! before. An answer that says of itself that it is a cached one, or that comes twice under one id, is no evidence. Nor is an error:
//! a run of which nothing can be said is inconclusive, never passed. Every finished run is told at once, so that a run that is
//! interrupted can go on where it stopped.
//!
//! Deliberately not here: where finished runs are written, the way through a gateway (L3), and who issues certificates (`cli/`).

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use crate::fingerprint::{hex, sha256};
use crate::job::{Identity, JobId};
use crate::provider::{Call, Fence, Outcome, Provider, Request, Response, Telling};
use crate::qualify::prompt::{Prompt, why};
use crate::qualify::suite::{Case, Level, Suite};
use crate::validate::{Answer, Validator};

mod report;

pub use report::{Apart, Report};

/// Longest excerpt of an answer in a report, in characters.
const GOT_CHARS_MAX: usize = 400;

/// How a suite is run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Runs at once.
    pub concurrency: usize,
    /// How long one call may take.
    pub total: Duration,
    /// When no further run begins; `None` for never.
    pub time_max: Option<Duration>,
    /// What the runs may cost together, in the provider's unit; `None` for anything.
    pub cost_max: Option<u64>,
}

/// What came of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It is as it must be.
    Passed,
    /// It is not.
    Failed,
    /// Nothing can be said.
    Inconclusive,
}

/// One request and what came of it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The case's name; for a capability, what was asked.
    pub case: String,
    /// What a relation made of it; `""` for the case itself.
    pub variant: String,
    /// Which run of the case, from 1.
    pub number: u32,
    /// How far it got: the level that failed, or the last one.
    pub level: Level,
    /// What came of it.
    pub verdict: Verdict,
    /// Whether it was not begun, because the time was over or the cost reached.
    pub cut: bool,
    /// What is wrong, or why nothing can be said.
    pub findings: Vec<String>,
    /// What was got instead, shortened; `""` where it passed.
    pub got: String,
    /// The model that answered, by its own word.
    pub model: String,
    /// Which build of it.
    pub build: String,
    /// What it cost, in the provider's unit.
    pub cost: u64,
    /// How long it took.
    pub took_ms: u64,
    /// SHA-256 of the request's body, as it was sent.
    pub sent: String,
}

impl Run {
    /// One of which nothing is known yet.
    pub(super) fn blank(case: &str, variant: &str, number: u32, level: Level) -> Self {
        Run {
            case: case.to_owned(),
            variant: variant.to_owned(),
            number,
            level,
            verdict: Verdict::Inconclusive,
            cut: false,
            findings: Vec::new(),
            got: String::new(),
            model: String::new(),
            build: String::new(),
            cost: 0,
            took_ms: 0,
            sent: String::new(),
        }
    }
}

/// A provider under examination.
pub struct Examined<'a> {
    /// What is required of every answer of the route.
    pub route: Option<&'a Validator>,
    /// The provider's name.
    pub name: &'a str,
    /// The provider.
    pub provider: Arc<dyn Provider>,
    /// What its model is prompted with.
    pub prompt: Option<Prompt>,
    /// The suite.
    pub suite: &'a Suite,
    /// How it is run.
    pub settings: Settings,
    /// What it has taken until now.
    pub spent: Spent,
}

/// What an examination has taken until now: time from its beginning, and cost.
#[derive(Debug)]
pub struct Spent {
    began: Instant,
    cost: AtomicU64,
}

impl Spent {
    /// From now on, after so much cost.
    pub fn after(cost: u64) -> Self {
        Spent { began: Instant::now(), cost: AtomicU64::new(cost) }
    }
}

/// An answer, as far as it is judged.
pub struct Judged {
    findings: Vec<String>,
    level: Level,
}

impl Examined<'_> {
    /// Runs what is not done yet, and tells each run as it ends.
    ///
    /// Once the time is over, or the cost reached, what is left is not begun, and told as such: such runs prove nothing.
    ///
    /// # Cancel safety
    /// Cancel safe: what was told is done, the rest is not.
    pub async fn run(&self, done: &[Run], tell: impl Fn(&Run)) -> Vec<Run> {
        let ids = Mutex::new(HashSet::new());
        let is_done = |case: &Case, variant: &str, number: u32| {
            done.iter().any(|run| run.case == case.name && run.variant == variant && run.number == number)
        };
        let all = (1..=self.suite.runs).flat_map(|number| self.suite.cases.iter().map(move |case| (case, number)));
        let left = all.filter(|(case, number)| {
            let variants = case.relations.iter().map(crate::qualify::suite::Relation::what).chain([String::new()]);
            !variants.into_iter().all(|variant| is_done(case, &variant, *number))
        });
        let (tell, ids) = (&tell, &ids);
        let runs = futures_util::stream::iter(left.map(|(case, number)| self.one(case, number, ids, tell)))
            .buffer_unordered(self.settings.concurrency.max(1))
            .collect::<Vec<_>>()
            .await;
        let mut all: Vec<Run> = done.to_vec();
        all.extend(runs.into_iter().flatten());
        all
    }

    /// Why no further request begins, if none does.
    pub fn over(&self) -> Option<&'static str> {
        let Settings { time_max, cost_max, .. } = self.settings;
        if time_max.is_some_and(|max| self.spent.began.elapsed() >= max) {
            return Some("not run: the time was over");
        }
        let dear = cost_max.is_some_and(|max| self.spent.cost.load(Ordering::Relaxed) >= max);
        dear.then_some("not run: it would have cost more than it may")
    }

    /// Counts what an answer cost; returns it.
    pub fn spend(&self, response: &Response) -> u64 {
        let cost = self.provider.cost(response).unwrap_or(0);
        self.spent.cost.fetch_add(cost, Ordering::Relaxed);
        cost
    }

    /// A case once, and the same question in other words.
    async fn one(&self, case: &Case, number: u32, ids: &Mutex<HashSet<String>>, tell: &impl Fn(&Run)) -> Vec<Run> {
        let (first, answer) = self.ask(case, number, None, ids).await;
        tell(&first);
        let mut runs = vec![first];
        for (place, relation) in case.relations.iter().enumerate() {
            let (mut run, other) = self.ask(case, number, Some(place), ids).await;
            if run.verdict == Verdict::Passed {
                let compared = match (&answer, &other) {
                    (Some(answer), Some(other)) => {
                        let comes_to = |(input, body): &(Vec<u8>, Arc<[u8]>)| case.comes_to(&relation.same, input, body);
                        comes_to(answer).and_then(|answer| Ok((answer, comes_to(other)?)))
                    }
                    _ => Err("there is no answer to compare it with".to_owned()),
                };
                match compared {
                    Ok((expected, got)) if expected == got => {}
                    Ok((expected, got)) => {
                        run.verdict = Verdict::Failed;
                        run.level = Level::Meaning;
                        run.findings.push(format!("{} was {expected}, and is another after {}", relation.same, relation.what()));
                        run.got = shortened(&got);
                    }
                    Err(what) => {
                        run.verdict = Verdict::Inconclusive;
                        run.findings.push(what);
                    }
                }
            }
            tell(&run);
            runs.push(run);
        }
        runs
    }

    /// One request. Returns also what was asked and answered, if it was.
    async fn ask(
        &self,
        case: &Case,
        number: u32,
        relation: Option<usize>,
        ids: &Mutex<HashSet<String>>,
    ) -> (Run, Option<(Vec<u8>, Arc<[u8]>)>) {
        let variant = relation.map(|place| case.relations[place].what()).unwrap_or_default();
        let mut run = Run::blank(&case.name, &variant, number, Level::Structure);
        if let Some(over) = self.over() {
            run.cut = true;
            run.findings.push(over.to_owned());
            return (run, None);
        }
        let began = Instant::now();
        let body = match case.request(self.suite, self.name, relation, number - 1) {
            Ok(body) => body,
            Err(what) => {
                run.findings.push(what);
                return (run, None);
            }
        };
        let request = self.request(&body);
        let rendered = match self.provider.render(&request) {
            Ok(rendered) => rendered,
            Err(error) => {
                run.findings.push(error.to_string());
                return (run, None);
            }
        };
        run.sent = hex(&sha256(&rendered.body));
        let mut tokens = None;
        if let Some(prompt) = self.prompt.as_ref().filter(|_| self.suite.levels.contains(&Level::Prompt)) {
            run.level = Level::Prompt;
            match prompt.look(&rendered.body).await {
                Ok(found) if found.faults.is_empty() => tokens = found.tokens,
                Ok(found) => {
                    // It is not asked: whatever it answers, it was not asked what it should be.
                    run.verdict = Verdict::Failed;
                    run.findings = found.faults;
                    run.got = shortened(&found.text.unwrap_or_default());
                    return (run, None);
                }
                Err(what) => {
                    run.findings.push(what);
                    return (run, None);
                }
            }
        }
        let outcome = self.provider.submit(self.call(rendered)).await;
        run.took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        run.level = Level::Structure;
        let (response, model) = match outcome {
            Outcome::Succeeded { response, model, .. } => (response, model),
            other => {
                run.findings.push(why(&other));
                return (run, None);
            }
        };
        run.cost = self.spend(&response);
        run.model = model.unwrap_or_default();
        run.build = text_at(&response.body, "/system_fingerprint");
        if let Some(what) = cached(&response, ids) {
            run.findings.push(what);
            return (run, None);
        }
        let Judged { mut findings, mut level } = self.judge(case, &body, &response.body);
        let counted = serde_json::from_slice::<Value>(&response.body).ok();
        let counted = counted.and_then(|answer| answer.pointer("/usage/prompt_tokens")?.as_u64());
        if let (Some(ours), Some(theirs)) = (tokens, counted)
            && ours != theirs
        {
            findings.insert(0, format!("the prompt has {ours} tokens by our count, {theirs} by the provider's"));
            level = Level::Prompt;
        }
        run.level = level;
        run.verdict = if findings.is_empty() { Verdict::Passed } else { Verdict::Failed };
        if !findings.is_empty() {
            run.got = shortened(&case.shown(&response.body));
        }
        run.findings = findings;
        (run, Some((body, response.body)))
    }

    /// Judges an answer: its form, then its meaning.
    pub fn judge(&self, case: &Case, input: &[u8], body: &[u8]) -> Judged {
        let mut findings = Vec::new();
        if let Some(finish) = &self.suite.finish {
            let ended = text_at(body, &finish.pointer);
            if !finish.allowed.contains(&ended) {
                findings.push(format!("it ended by {ended:?}; good is {}", finish.allowed.join(", ")));
            }
        }
        if let Some(route) = self.route
            && let Err(invalid) = route.check_output(input, Answer { content_encoding: None, body })
        {
            if case.shown(body).trim_start().starts_with("```") {
                findings.push("it is fenced: ``` around what should be JSON alone".to_owned());
            }
            findings.extend(invalid.faults.iter().map(ToString::to_string));
        }
        if !findings.is_empty() {
            return Judged { findings, level: Level::Structure };
        }
        Judged { findings: case.faults(input, body), level: Level::Meaning }
    }

    /// Judges an answer that came another way.
    pub fn judged(&self, case: &Case, number: u32, variant: &str, (input, body): (&[u8], &[u8])) -> Run {
        let Judged { findings, .. } = self.judge(case, input, body);
        let mut run = Run::blank(&case.name, variant, number, Level::Gateway);
        run.verdict = if findings.is_empty() { Verdict::Passed } else { Verdict::Failed };
        run.got = if findings.is_empty() { String::new() } else { shortened(&case.shown(body)) };
        run.findings = findings;
        run
    }

    /// The request of a body, as it comes to the provider through the gateway.
    pub fn request(&self, body: &[u8]) -> Request {
        Request {
            method: String::new(),
            target: self.suite.path.clone(),
            content_type: "application/json".to_owned(),
            headers: vec![("cache-control".to_owned(), "no-cache".to_owned())],
            body: body.into(),
        }
    }

    /// A call under a new key.
    pub fn call(&self, rendered: crate::provider::Rendered) -> Call {
        Call {
            rendered,
            job_id: Some(nobodys()),
            attempt: 1,
            idempotency_key: format!("qualify-{}", Uuid::new_v4()),
            traceparent: None,
            fence: Fence::until(u64::MAX),
            deadline: Instant::now() + self.settings.total,
            told: Telling::nobody(),
        }
    }
}

/// A job id for calls that belong to no job.
pub(super) fn nobodys() -> JobId {
    JobId::new(1, Identity::of(&sha256(Uuid::new_v4().as_bytes())))
}

/// Whether an answer is one that was given before.
fn cached(response: &Response, ids: &Mutex<HashSet<String>>) -> Option<String> {
    for (name, value) in &response.headers {
        let hit = match name.as_str() {
            "x-cache" | "cf-cache-status" | "x-litellm-cache-key" => !value.to_ascii_lowercase().contains("miss"),
            "age" => value != "0",
            "idempotency-replayed" | "idempotent-replayed" => value == "true",
            _ => false,
        };
        if hit {
            return Some(format!("a cached answer is no evidence: {name}: {value}"));
        }
    }
    let id = text_at(&response.body, "/id");
    let known = !id.is_empty() && !ids.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone());
    known.then(|| format!("a cached answer is no evidence: the id {id:?} came before"))
}

fn text_at(body: &[u8], pointer: &str) -> String {
    let answer: Option<Value> = serde_json::from_slice(body).ok();
    let found = answer.as_ref().and_then(|answer| answer.pointer(pointer));
    found.map(|found| found.as_str().map_or_else(|| found.to_string(), str::to_owned)).unwrap_or_default()
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(GOT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_answer_is_seen_by_its_headers_or_its_id() {
        let ids = Mutex::new(HashSet::new());
        let answer = |headers: &[(&str, &str)], body: &str| {
            let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            cached(&Response { status: 200, headers, body: body.as_bytes().into() }, &ids).is_some()
        };
        assert!(!answer(&[("x-cache", "MISS"), ("age", "0")], r#"{"id":"1"}"#));
        assert!(answer(&[], r#"{"id":"1"}"#));
        for (name, value) in [("x-cache", "HIT"), ("age", "7"), ("idempotent-replayed", "true")] {
            assert!(answer(&[(name, value)], "{}"), "{name}");
        }
        assert!(!answer(&[], "{}") && !answer(&[], "{}"));
    }
}
