//! Runs a suite against a provider, and says what it proves.
//!
//! Calls go to the provider itself, each with a key of its own, and never through the job store: no answer is one that was given
//! before. An answer that says of itself that it is a cached one, or that comes twice under one id, is no evidence. Nor is an error:
//! a run of which nothing can be said is inconclusive, never passed. Every finished run is told at once, so that a run that is
//! interrupted can go on where it stopped.
//!
//! Deliberately not here: where finished runs are written, the way through a gateway (L3), and who issues certificates (`cli/`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::fingerprint::{hex, sha256};
use crate::job::{Identity, JobId};
use crate::provider::{Call, Fence, Outcome, Provider, Request, Response, Telling};
use crate::qualify::prompt::{Prompt, why};
use crate::qualify::suite::{Case, Level, Relation, Suite};
use crate::validate::{Answer, Validator, gathered};

pub(super) mod evidence;
mod report;

pub use evidence::{Hidden, Ids};
use evidence::{Named, cached, text_at};
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
    /// What was asked, shortened; `""` where it passed.
    pub input: String,
    /// What was got instead, shortened; `""` where it passed.
    pub got: String,
    /// Whether a whole answer came.
    pub answered: bool,
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
    /// The answer's own name, by which it is known if it comes again; `""` if it has none.
    pub answer_id: String,
    /// What each of the case's relations looks at came to, or why it cannot be judged; of a variant, its own relation alone.
    pub compared: Vec<Result<String, String>>,
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
            input: String::new(),
            got: String::new(),
            answered: false,
            model: String::new(),
            build: String::new(),
            cost: 0,
            took_ms: 0,
            sent: String::new(),
            answer_id: String::new(),
            compared: Vec::new(),
        }
    }

    /// Takes what is wrong with what was got; nothing: it passed.
    fn judged(&mut self, findings: Vec<String>, got: &str) {
        if findings.is_empty() {
            self.verdict = Verdict::Passed;
            self.input.clear();
        } else {
            self.verdict = Verdict::Failed;
            self.got = shortened(got);
        }
        self.findings = findings;
    }

    fn is(&self, case: &str, variant: &str, number: u32) -> bool {
        self.number == number && self.variant == variant && self.case == case
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
    /// What answers must not be kept with.
    pub hidden: Hidden,
    /// The answers that came, by any way.
    pub ids: Ids,
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
    /// Each case, variant and number is in what is returned once, as it was decided first. Once the time is over, or the cost
    /// reached, what is left is not begun, and told as such: such runs prove nothing.
    ///
    /// # Cancel safety
    /// Cancel safe: what was told is done, the rest is not.
    pub async fn run(&self, done: &[Run], tell: impl Fn(&Run)) -> Vec<Run> {
        // What answered before it was interrupted is known again as well.
        self.ids.know(done);
        let cases = self.suite.cases.len();
        let all: Vec<(usize, u32)> =
            (1..=self.suite.runs).flat_map(|number| (0..cases).map(move |place| (place, number))).collect();
        let tell = &tell;
        let runs = futures_util::stream::iter(
            all.into_iter().map(|(place, number)| self.one(&self.suite.cases[place], number, done, tell)),
        )
        .buffer_unordered(self.settings.concurrency.max(1))
        .collect::<Vec<_>>()
        .await;
        runs.into_iter().flatten().collect()
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

    /// A case once, and the same question in other words; each that is not done yet.
    async fn one(&self, case: &Case, number: u32, done: &[Run], tell: &impl Fn(&Run)) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::with_capacity(1 + case.relations.len());
        for place in std::iter::once(None).chain((0..case.relations.len()).map(Some)) {
            let variant = variant(case, place);
            if let Some(run) = done.iter().find(|run| run.is(&case.name, &variant, number)) {
                runs.push(run.clone());
                continue;
            }
            let mut run = self.ask(case, number, place).await;
            if let (Some(place), Verdict::Passed) = (place, run.verdict) {
                let expected = runs[0].compared.get(place).cloned();
                compare(&mut run, &case.relations[place], expected);
                if run.verdict != Verdict::Passed {
                    let body = case.request(self.suite, self.name, Some(place), number - 1).unwrap_or_default();
                    run.input = shortened(&String::from_utf8_lossy(&body));
                }
            }
            self.hidden.clean(&mut run);
            tell(&run);
            runs.push(run);
        }
        runs
    }

    /// One request.
    async fn ask(&self, case: &Case, number: u32, relation: Option<usize>) -> Run {
        let mut run = Run::blank(&case.name, &variant(case, relation), number, Level::Structure);
        if let Some(over) = self.over() {
            run.cut = true;
            run.findings.push(over.to_owned());
            return run;
        }
        let began = Instant::now();
        let body = match case.request(self.suite, self.name, relation, number - 1) {
            Ok(body) => body,
            Err(what) => {
                run.findings.push(what);
                return run;
            }
        };
        // Taken back where it passes.
        run.input = shortened(&String::from_utf8_lossy(&body));
        let request = self.request(&body);
        let rendered = match self.provider.render(&request) {
            Ok(rendered) => rendered,
            Err(error) => {
                run.findings.push(error.to_string());
                return run;
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
                    return run;
                }
                Err(what) => {
                    run.findings.push(what);
                    return run;
                }
            }
        }
        // What stands behind the path may be a secret.
        let address = format!("{} {}", rendered.method, rendered.url.split('?').next().unwrap_or_default());
        let outcome = self.provider.submit(self.call(rendered)).await;
        run.took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        run.level = Level::Structure;
        let (response, model) = match outcome {
            Outcome::Succeeded { response, model, .. } => (response, model),
            other => {
                run.findings.push(format!("{address}: {}", why(&other)));
                return run;
            }
        };
        run.cost = self.spend(&response);
        let answer = self.hidden.hide_in(&response.body);
        if let Some(what) = self.came(&mut run, &response, &answer, model) {
            run.findings.push(what);
            return run;
        }
        let Judged { mut findings, mut level } = self.judge(case, &body, &answer);
        let counted = serde_json::from_slice::<Value>(&answer).ok();
        let counted = counted.and_then(|answer| answer.pointer("/usage/prompt_tokens")?.as_u64());
        if let (Some(ours), Some(theirs)) = (tokens, counted)
            && ours != theirs
        {
            findings.insert(0, format!("the prompt has {ours} tokens by our count, {theirs} by the provider's"));
            level = Level::Prompt;
        }
        run.level = level;
        run.judged(findings, &case.shown(&answer));
        let relations = case.relations.iter().enumerate().filter(|(place, _)| relation.is_none_or(|only| only == *place));
        run.compared = relations.map(|(_, relation)| case.comes_to(&relation.same, &body, &answer).map(kept)).collect();
        run
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

    /// Notes who made an answer; says why it is no evidence, if it is none. `answer`: its body, gathered and hidden.
    fn came(&self, run: &mut Run, response: &Response, answer: &[u8], model: Option<String>) -> Option<String> {
        let named = Named::of(answer, model, &self.hidden);
        (run.answered, run.model, run.build, run.answer_id) = (true, named.model, named.build, named.id);
        cached(response, &run.answer_id, &self.ids)
    }

    /// Judges what came of a case asked another way: through a gateway, whole or as a stream.
    pub fn judged(&self, case: &Case, variant: &str, input: &[u8], outcome: Outcome) -> Run {
        let mut run = Run::blank(&case.name, variant, 1, Level::Gateway);
        run.input = shortened(&String::from_utf8_lossy(input));
        match outcome {
            Outcome::Succeeded { response, model, .. } => {
                run.cost = self.spend(&response);
                let whole = gathered(&response.body);
                let answer = self.hidden.hide_in(whole.as_deref().unwrap_or(&response.body));
                match self.came(&mut run, &response, &answer, model) {
                    Some(what) => run.findings.push(what),
                    None => run.judged(self.judge(case, input, &answer).findings, &case.shown(&answer)),
                }
            }
            other => run.findings.push(why(&other)),
        }
        self.hidden.clean(&mut run);
        run
    }

    /// A request of a case asked another way that was not made: no more may be.
    pub fn not_judged(&self, case: &Case, variant: &str, over: &str) -> Run {
        let mut run = Run::blank(&case.name, variant, 1, Level::Gateway);
        (run.cut, run.findings) = (true, vec![over.to_owned()]);
        run
    }

    /// That the way through a gateway could not be gone.
    pub fn no_way(&self, what: String) -> Run {
        let mut run = Run::blank("through a gateway", "", 1, Level::Gateway);
        run.findings.push(what);
        self.hidden.clean(&mut run);
        run
    }

    /// What every request has in common, as it is sent: its members beside what `vary` points to, and beside those in which the
    /// suite's cases differ. A long one is shortened.
    pub fn parameters(&self, vary: &[String]) -> Map<String, Value> {
        let mut common: Option<Map<String, Value>> = None;
        for case in &self.suite.cases {
            let body = case.request(self.suite, self.name, None, 0).ok();
            let rendered = body.and_then(|body| self.provider.render(&self.request(&body)).ok());
            let sent = rendered.and_then(|rendered| serde_json::from_slice::<Map<String, Value>>(&rendered.body).ok());
            let sent = sent.unwrap_or_default();
            match &mut common {
                None => common = Some(sent),
                Some(common) => common.retain(|name, value| sent.get(name) == Some(value)),
            }
        }
        let mut common = common.unwrap_or_default();
        common.retain(|name, _| !vary.iter().any(|pointer| pointer.strip_prefix('/') == Some(name)));
        for value in common.values_mut() {
            let text = value.to_string();
            if text.chars().count() > GOT_CHARS_MAX {
                *value = Value::String(shortened(&text));
            }
        }
        common
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

/// What a relation makes of a case, in words that no other of the case's relations has.
pub(super) fn variant(case: &Case, relation: Option<usize>) -> String {
    let Some(place) = relation else { return String::new() };
    let what = case.relations[place].what();
    match case.relations[..place].iter().filter(|earlier| earlier.what() == what).count() {
        0 => what,
        earlier => format!("{what} ({})", earlier + 1),
    }
}

/// Judges whether the same question in other words came to the same.
fn compare(run: &mut Run, relation: &Relation, expected: Option<Result<String, String>>) {
    let expected = expected.unwrap_or_else(|| Err("there is no answer to compare it with".to_owned()));
    let got = run.compared.first().cloned().unwrap_or_else(|| Err("there is no answer".to_owned()));
    match expected.and_then(|expected| Ok((expected, got?))) {
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

/// What something came to, as it is kept: what is long is told apart by its hash.
fn kept(what: String) -> String {
    let short = shortened(&what);
    if short == what { what } else { format!("{short} (sha256 {})", hex(&sha256(what.as_bytes()))) }
}

fn shortened(text: &str) -> String {
    shortened_to(text, GOT_CHARS_MAX)
}

fn shortened_to(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
