//! A suite: real inputs, and what must be true of the answers to them, in YAML beside the configuration.
//!
//! Everything that is wrong with a suite is told when it is loaded: an empty one proves nothing, and neither does a case without an
//! assertion, or one whose assertions cannot fail where the suite itself says that they must (`refuse`). Pure functions of its
//! bytes; who calls a provider is `runner.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use minijinja::{Environment, UndefinedBehavior};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use serde_saphyr::Spanned;

use crate::validate::{Answer, Check, Expression, Extract, Of, Parse, Required, Validator};

mod accepted;
mod probes;
mod written;

use accepted::{Accepted, Trial};
use written::{Written, WrittenCase, WrittenRelation, line_of};

/// Largest suite, in bytes.
pub const SUITE_BYTES_MAX: usize = 1 << 20;
/// Most cases of a suite.
pub const CASES_MAX: usize = 1000;
/// Most runs of a case.
pub const RUNS_MAX: u32 = 1000;
/// Most relations, and most known-bad outputs, of a case.
pub const RELATIONS_MAX: usize = 32;
/// Longest name of a case, in characters.
const NAME_CHARS_MAX: usize = 100;
/// The budget of one template of an input: about one unit a step.
const FUEL: u64 = 100_000;
/// What is told where an assertion or a relation adds nothing to the schema.
const WAY_OUT: &str = "if more does, name an output in refuse that the schema accepts and this must refuse";

/// What is proved, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// L0: the prompt that the model gets.
    Prompt,
    /// L1: the form of the answer.
    Structure,
    /// L2: its meaning.
    Meaning,
    /// L3: the way through the gateway.
    Gateway,
    /// L4: what the provider can be asked.
    Capabilities,
}

impl Level {
    /// All, in their order.
    pub const ALL: [Level; 5] = [Level::Prompt, Level::Structure, Level::Meaning, Level::Gateway, Level::Capabilities];

    /// The word in suites and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Prompt => "prompt",
            Level::Structure => "structure",
            Level::Meaning => "meaning",
            Level::Gateway => "gateway",
            Level::Capabilities => "capabilities",
        }
    }
}

/// A suite, checked.
#[derive(Debug)]
pub struct Suite {
    /// How often each case is run.
    pub runs: u32,
    /// How many decided runs may fail.
    pub failures_max: u32,
    /// What is proved.
    pub levels: BTreeSet<Level>,
    /// JSON pointers to what live requests may differ in; `None` for what the provider's preset says.
    pub vary: Option<Vec<String>>,
    /// JSON pointer to the model's name in a request.
    pub model: String,
    /// The path of its requests; `""` for the provider's own.
    pub path: String,
    /// Where an answer says why it ended, and which words are good.
    pub finish: Option<Finish>,
    /// The cases, 1 or more.
    pub cases: Vec<Case>,
    parameters: Map<String, Value>,
    providers: BTreeMap<String, Spanned<ForProvider>>,
    /// Every expression in it, for the certificate.
    pub assertions: Vec<String>,
}

/// Where an answer says why it ended.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finish {
    /// JSON pointer into the answer.
    pub pointer: String,
    /// The words that are good.
    pub allowed: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ForProvider {
    parameters: Map<String, Value>,
}

/// A case: an input and what must be true of answers to it.
#[derive(Debug)]
pub struct Case {
    /// Its name, unique in the suite.
    pub name: String,
    /// What the same question in other words must have in common.
    pub relations: Vec<Relation>,
    line: Option<u64>,
    values: Map<String, Value>,
    input: Value,
    validator: Validator,
}

/// The same question in other words: what must be the same of both answers.
#[derive(Debug)]
pub struct Relation {
    name: String,
    change: Change,
    /// The expression.
    pub same: Expression,
}

#[derive(Clone, Debug)]
enum Change {
    /// The items of one value in another order.
    Shuffle(String),
    /// Other values.
    Replace(Map<String, Value>),
}

impl Relation {
    /// What it changes, in words; unique in its case.
    pub fn what(&self) -> String {
        self.name.clone()
    }

    /// After those before it in its case.
    fn of(written: &WrittenRelation, values: &Map<String, Value>, before: &[Relation]) -> Result<Self, Vec<String>> {
        let change = match (&written.shuffle, &written.replace) {
            (Some(name), None) => match values.get(name) {
                Some(Value::Array(items)) if items.len() > 1 => Ok(Change::Shuffle(name.clone())),
                _ => Err(format!("shuffle = {name:?}: there is no list of two or more of that name in values")),
            },
            (None, Some(others)) if others.keys().all(|name| values.contains_key(name)) && !others.is_empty() => {
                Ok(Change::Replace(others.clone()))
            }
            (None, Some(_)) => Err("replace: it names what is not in values".to_owned()),
            (Some(_), Some(_)) | (None, None) => Err("a relation has either shuffle or replace".to_owned()),
        };
        match (Expression::compile(&written.same).map_err(|why| format!("same: {why}")), change) {
            (Ok(same), Ok(change)) => {
                let plain = match &change {
                    Change::Shuffle(name) => format!("shuffle {name}"),
                    Change::Replace(values) => format!("replace {}", values.keys().cloned().collect::<Vec<_>>().join(", ")),
                };
                let numbered = (2..).map(|number| format!("{plain} ({number})"));
                let is_free = |name: &String| before.iter().all(|other| other.name != *name);
                let name = std::iter::once(plain.clone()).chain(numbered).find(is_free).unwrap_or_default();
                Ok(Relation { name, change, same })
            }
            (same, change) => Err([same.err(), change.err()].into_iter().flatten().collect()),
        }
    }
}

/// Who judges answers beside a case's own assertions.
#[derive(Clone, Copy)]
enum Judge<'a> {
    /// The route, and what its schema accepts.
    Known { route: Option<&'a Validator>, accepted: Option<&'a Accepted> },
    /// A route that is itself refused.
    Unknown,
}

/// One thing that is wrong with a suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// On which line of it, if it is with one.
    pub line: Option<u64>,
    /// What is wrong.
    pub what: String,
}

impl Wrong {
    fn with_all(what: impl Into<String>) -> Self {
        Wrong { line: None, what: what.into() }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

impl Suite {
    /// Reads a suite, for a route that requires this of answers.
    ///
    /// # Errors
    /// Everything that is wrong with it, for whoever wrote it.
    pub fn load(bytes: &[u8], route: Option<&Validator>) -> Result<Self, Vec<Wrong>> {
        Suite::load_for(bytes, Judge::Known { route, accepted: Accepted::of(route).as_ref() })
    }

    /// What is wrong with a suite whatever a route requires: of a route that was refused itself, nothing more is known.
    pub fn wrong_in_itself(bytes: &[u8]) -> Vec<Wrong> {
        Suite::load_for(bytes, Judge::Unknown).err().unwrap_or_default()
    }

    fn load_for(bytes: &[u8], judge: Judge<'_>) -> Result<Self, Vec<Wrong>> {
        if bytes.len() > SUITE_BYTES_MAX {
            return Err(vec![Wrong::with_all(format!("it has {} bytes; the limit is {SUITE_BYTES_MAX}", bytes.len()))]);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| vec![Wrong::with_all("it is no text in UTF-8")])?;
        let written = Written::read(text).map_err(|wrong| vec![wrong])?;
        let mut wrong = Vec::new();
        if written.cases.is_empty() {
            wrong.push(Wrong::with_all("it has no cases: nothing would be proved"));
        }
        if written.cases.len() > CASES_MAX {
            wrong.push(Wrong::with_all(format!("it has {} cases; the limit is {CASES_MAX}", written.cases.len())));
        }
        if !(1..=RUNS_MAX).contains(&written.runs) {
            wrong.push(Wrong::with_all(format!("runs = {}: it must be 1 to {RUNS_MAX}", written.runs)));
        }
        let pointers = written.vary.iter().flatten().map(|one| ("vary", one)).chain([("model", &written.model)]);
        let pointers = pointers.chain(written.finish.iter().map(|finish| ("finish.pointer", &finish.pointer)));
        for (key, pointer) in pointers {
            if !pointer.is_empty() && !pointer.starts_with('/') {
                wrong.push(Wrong::with_all(format!("{key} = {pointer:?}: it is no JSON pointer (RFC 6901)")));
            }
        }
        if written.levels.as_ref().is_some_and(Vec::is_empty) {
            wrong.push(Wrong::with_all("levels is empty: nothing would be proved"));
        }
        if written.finish.as_ref().is_some_and(|finish| finish.allowed.is_empty()) {
            wrong.push(Wrong::with_all("finish.allowed is empty: no answer could pass"));
        }
        let (mut names, mut assertions, mut cases) = (BTreeSet::new(), Vec::new(), Vec::new());
        for (place, case) in written.cases.into_iter().enumerate() {
            let (line, case) = (line_of(&case), case.value);
            let called = called(&case.name, place + 1);
            if case.name.trim().is_empty() || case.name.chars().count() > NAME_CHARS_MAX {
                wrong.push(Wrong { line, what: format!("{called}: its name must have 1 to {NAME_CHARS_MAX} characters") });
            }
            if !names.insert(case.name.clone()) {
                wrong.push(Wrong { line, what: format!("{called}: another case has that name") });
            }
            assertions.extend(case.assert.iter().map(|assertion| assertion.value.clone()));
            assertions.extend(case.relations.iter().map(|relation| relation.value.same.clone()));
            match Case::of(case, line, judge) {
                Ok(case) => cases.push(case),
                Err(faults) => {
                    wrong
                        .extend(faults.into_iter().map(|Wrong { line, what }| Wrong { line, what: format!("{called}: {what}") }));
                }
            }
        }
        let suite = Suite {
            runs: written.runs,
            failures_max: written.failures_max,
            levels: written.levels.map_or_else(|| Level::ALL.into_iter().collect(), |levels| levels.into_iter().collect()),
            vary: written.vary,
            model: written.model,
            path: written.path,
            finish: written.finish,
            cases,
            parameters: written.parameters,
            providers: written.providers,
            assertions,
        };
        for (place, case) in suite.cases.iter().enumerate() {
            let mut told = BTreeSet::new();
            for relation in std::iter::once(None).chain((0..case.relations.len()).map(Some)) {
                if let Err(fault) = case.request(&suite, "", relation, 0)
                    && told.insert(fault.clone())
                {
                    wrong.push(Wrong { line: case.line, what: format!("{}: {fault}", called(&case.name, place + 1)) });
                }
            }
        }
        wrong.sort_by_key(|wrong| wrong.line);
        if wrong.is_empty() { Ok(suite) } else { Err(wrong) }
    }

    /// What is wrong with its providers, where only these exist: their parameters would go to nobody.
    pub fn unknown_providers(&self, exists: impl Fn(&str) -> bool) -> Vec<Wrong> {
        let unknown = self.providers.iter().filter(|(name, _)| !exists(name));
        let told = |(name, of): (&String, &Spanned<ForProvider>)| Wrong {
            line: line_of(of),
            what: format!("providers.{}: there is no such provider", one_line(name)),
        };
        unknown.map(told).collect()
    }
}

fn called(name: &str, number: usize) -> String {
    if name.trim().is_empty() { format!("case {number}") } else { format!("case {name:?}") }
}

impl Case {
    fn of(written: WrittenCase, line: Option<u64>, judge: Judge<'_>) -> Result<Self, Vec<Wrong>> {
        let WrittenCase { name, values, input, assert, refuse, relations } = written;
        let mut wrong = Vec::new();
        if assert.is_empty() {
            wrong.push(Wrong { line, what: "it asserts nothing: it could only pass".to_owned() });
        }
        if !input.is_object() {
            wrong.push(Wrong { line, what: "its input is no object".to_owned() });
        }
        if relations.len() > RELATIONS_MAX || refuse.len() > RELATIONS_MAX {
            let what = format!("it has more than {RELATIONS_MAX} relations or known-bad outputs, the limit");
            wrong.push(Wrong { line, what });
        }
        for (place, assertion) in assert.iter().enumerate() {
            if let Err(why) = Expression::compile(&assertion.value) {
                wrong.push(Wrong { line: line_of(assertion), what: format!("assertion {}: {why}", place + 1) });
            }
        }
        let mut compiled: Vec<Relation> = Vec::new();
        for relation in &relations {
            match Relation::of(&relation.value, &values, &compiled) {
                Ok(relation) => compiled.push(relation),
                Err(faults) => wrong.extend(faults.into_iter().map(|what| Wrong { line: line_of(relation), what })),
            }
        }
        if !wrong.is_empty() {
            return Err(wrong);
        }
        let texts: Vec<String> = assert.iter().map(|assertion| assertion.value.clone()).collect();
        let check = Check::compile(Of::Output, &Required { schema: None, assertions: &texts });
        let check = check.map_err(|refused| refused.into_iter().map(|one| Wrong { line, what: one.what }).collect::<Vec<_>>())?;
        let extract = match judge {
            Judge::Known { route, .. } => route.map(|route| route.extract.clone()).unwrap_or_default(),
            Judge::Unknown => Extract::default(),
        };
        let validator = Validator { input: None, output: Some(check), extract };
        let case = Case { name, line, relations: compiled, values, input, validator };
        let Judge::Known { route, accepted } = judge else { return Ok(case) };
        let asked = case.input.to_string();
        for (place, refused) in refuse.iter().enumerate() {
            let body = answer_with(&case.validator.extract, &refused.value.output).to_string().into_bytes();
            let answer = || Answer { content_encoding: None, body: &body };
            let passes = |validator: &Validator| validator.check_output(asked.as_bytes(), answer()).is_ok();
            if passes(&case.validator) && route.is_none_or(passes) {
                let what = format!("refuse {}: its assertions and the route accept it", place + 1);
                wrong.push(Wrong { line: line_of(refused), what });
            }
        }
        let known: Vec<&Value> = refuse.iter().map(|refused| &refused.value.output).collect();
        for (place, assertion) in assert.iter().enumerate() {
            if let Some(what) = case.proves_nothing(&assertion.value, &known, accepted) {
                let what = format!("assertion {}: {}: {what}", place + 1, one_line(&assertion.value));
                wrong.push(Wrong { line: line_of(assertion), what });
            }
        }
        for (relation, written) in case.relations.iter().zip(&relations) {
            if let Some(what) = case.is_fixed(&relation.same, &written.value.same, &known, accepted) {
                let what = format!("{}: same: {}: {what}", relation.name, one_line(&written.value.same));
                wrong.push(Wrong { line: line_of(written), what });
            }
        }
        if wrong.is_empty() { Ok(case) } else { Err(wrong) }
    }

    /// Why an assertion proves nothing, if it does not.
    fn proves_nothing(&self, text: &str, known: &[&Value], accepted: Option<&Accepted>) -> Option<String> {
        let required = Required { schema: None, assertions: &[text.to_owned()] };
        let (Ok(check), Ok(expression)) = (Check::compile(Of::Output, &required), Expression::compile(text)) else {
            return None;
        };
        let validator = Validator { input: None, output: Some(check), extract: self.validator.extract.clone() };
        let (asked, names) = (self.input.to_string(), expression.names());
        let breaks = |body: &[u8]| {
            let judged = validator.check_output(asked.as_bytes(), Answer { content_encoding: None, body });
            judged.is_err_and(|invalid| invalid.faults.iter().any(|fault| fault.rule.starts_with("assertion")))
        };
        let body_of = |output: &Value| answer_with(&validator.extract, output).to_string().into_bytes();
        if let Some(what) = accepted.and_then(|accepted| accepted.never_there(&names)) {
            return Some(what);
        }
        let trial = Trial { text, names: &names, input: &self.input, known };
        if let Some(what) = accepted.and_then(|accepted| accepted.never_holds(&trial, |output| !breaks(&body_of(output)))) {
            return Some(format!("it can never hold: {what}"));
        }
        let outputs = accepted.and_then(|accepted| accepted.outputs(&trial));
        if outputs.iter().flatten().any(|output| breaks(&body_of(output))) {
            return None;
        }
        if !probes::bodies(text, &names, &validator.extract, known).iter().any(|body| breaks(body)) {
            return Some("nothing that an answer could say breaks it; if something does, name it in refuse".to_owned());
        }
        outputs.map(|_| format!("only what the route's schema refuses anyway breaks it; {WAY_OUT}"))
    }

    /// Why an expression comes to the same for all answers, if it does, of which it can be judged.
    fn is_fixed(&self, same: &Expression, text: &str, known: &[&Value], accepted: Option<&Accepted>) -> Option<String> {
        let names = same.names();
        if let Some(what) = accepted.and_then(|accepted| accepted.never_there(&names)) {
            return Some(what);
        }
        if self.comes_to_one(same, &probes::bodies(text, &names, &self.validator.extract, known)) {
            return Some("it comes to the same whatever an answer says".to_owned());
        }
        let outputs = accepted?.outputs(&Trial { text, names: &names, input: &self.input, known })?;
        let bodies: Vec<Vec<u8>> =
            outputs.iter().map(|output| answer_with(&self.validator.extract, output).to_string().into_bytes()).collect();
        let is_one = self.comes_to_one(same, &bodies);
        is_one.then(|| format!("it comes to the same for all that the route's schema accepts; {WAY_OUT}"))
    }

    /// Whether an expression comes to one value only, for all of these answers of which it can be judged.
    fn comes_to_one(&self, expression: &Expression, bodies: &[Vec<u8>]) -> bool {
        let asked = self.input.to_string();
        let mut first = None;
        for body in bodies {
            let Ok(value) = self.comes_to(expression, asked.as_bytes(), body) else { continue };
            if *first.get_or_insert_with(|| value.clone()) != value {
                return false;
            }
        }
        first.is_some()
    }

    /// The names of what is asked in each of its runs: `""` for the case itself, then its relations'. No two are the same.
    pub fn variants(&self) -> impl Iterator<Item = &str> {
        std::iter::once("").chain(self.relations.iter().map(|relation| relation.name.as_str()))
    }

    /// The body of its request to a provider, or of the request that a relation makes of it. `turn` chooses the order of a shuffle.
    ///
    /// # Errors
    /// A template in it wants what is not in its values.
    pub fn request(&self, suite: &Suite, provider: &str, relation: Option<usize>, turn: u32) -> Result<Vec<u8>, String> {
        let mut values = self.values.clone();
        match relation.and_then(|place| self.relations.get(place)).map(|relation| &relation.change) {
            None => {}
            Some(Change::Replace(others)) => values.extend(others.clone()),
            Some(Change::Shuffle(name)) => {
                if let Some(Value::Array(items)) = values.get_mut(name) {
                    let by = 1 + turn as usize % (items.len() - 1);
                    items.rotate_left(by);
                }
            }
        }
        let mut engine = Environment::new();
        engine.set_undefined_behavior(UndefinedBehavior::Strict);
        engine.set_fuel(Some(FUEL));
        let Value::Object(own) = filled(&engine, &self.input, &values)? else { return Err("its input is no object".to_owned()) };
        let mut body = suite.parameters.clone();
        body.extend(own);
        if let Some(special) = suite.providers.get(provider) {
            body.extend(special.value.parameters.clone());
        }
        Ok(Value::Object(body).to_string().into_bytes())
    }

    /// What is wrong with an answer, beside what the route requires of all.
    pub fn faults(&self, input: &[u8], body: &[u8]) -> Vec<String> {
        match self.validator.check_output(input, Answer { content_encoding: None, body }) {
            Ok(()) => Vec::new(),
            Err(invalid) => invalid.faults.iter().map(ToString::to_string).collect(),
        }
    }

    /// What an expression comes to for an answer.
    ///
    /// # Errors
    /// It cannot be judged.
    pub fn comes_to(&self, same: &Expression, input: &[u8], body: &[u8]) -> Result<String, String> {
        self.validator.comes_to(same, input, Answer { content_encoding: None, body }).map_err(|invalid| invalid.to_string())
    }

    /// What the case takes from an answer, as a person reads it.
    pub fn shown(&self, body: &[u8]) -> String {
        let text = String::from_utf8_lossy(body).into_owned();
        let Ok(answer) = serde_json::from_str::<Value>(&text) else { return text };
        match answer.pointer(&self.validator.extract.pointer) {
            Some(Value::String(output)) => output.clone(),
            Some(output) => output.to_string(),
            None => text,
        }
    }
}

/// The template strings of an input, filled.
fn filled(engine: &Environment<'_>, value: &Value, values: &Map<String, Value>) -> Result<Value, String> {
    Ok(match value {
        Value::String(text) if text.contains("{{") || text.contains("{%") => {
            let all = crate::validate::engine_value(&Value::Object(values.clone())).ok_or("values: a number is too large")?;
            Value::String(engine.render_str(text, all).map_err(|error| not_filled(engine, text, values, &error))?)
        }
        Value::Array(items) => Value::Array(items.iter().map(|item| filled(engine, item, values)).collect::<Result<_, _>>()?),
        Value::Object(members) => {
            let member = |(name, member): (&String, &Value)| Ok((name.clone(), filled(engine, member, values)?));
            Value::Object(members.iter().map(member).collect::<Result<_, String>>()?)
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    })
}

/// What is wrong with a template of an input. A value that is not there is named, with those that are.
fn not_filled(engine: &Environment<'_>, text: &str, values: &Map<String, Value>, error: &minijinja::Error) -> String {
    let whole = format!("input: {}", one_line(&error.to_string()));
    let Ok(template) = engine.template_from_str(text) else { return whole };
    if error.kind() != minijinja::ErrorKind::UndefinedError {
        return whole;
    }
    let is_there = |name: &str| {
        let mut members = name.split('.');
        let first = members.next().unwrap_or_default();
        let Some(value) = values.get(first) else {
            return first == "loop" || engine.globals().any(|(global, _)| global == first);
        };
        // What a list or a text has is the engine's business.
        let last = members.try_fold(value, |at, member| match at {
            Value::Object(members) => members.get(member).ok_or(false),
            _ => Err(true),
        });
        last.map_or_else(|is_there| is_there, |_| true)
    };
    let missing: BTreeSet<String> = template.undeclared_variables(true).into_iter().filter(|name| !is_there(name)).collect();
    if missing.is_empty() {
        return whole;
    }
    let missing = one_line(&missing.into_iter().collect::<Vec<_>>().join(", "));
    let known = one_line(&values.keys().cloned().collect::<Vec<_>>().join(", "));
    let known = if known.is_empty() { "there are none".to_owned() } else { format!("known are {known}") };
    format!("input: there is no {missing} in values; {known}")
}

/// An answer with this output where the route looks for it.
fn answer_with(extract: &Extract, output: &Value) -> Value {
    let mut value = match extract.parse {
        Parse::AsIs => output.clone(),
        Parse::Json => Value::String(output.to_string()),
    };
    for token in extract.pointer.rsplit('/').take(extract.pointer.matches('/').count()) {
        let name = token.replace("~1", "/").replace("~0", "~");
        value = match name.parse::<usize>() {
            Ok(place) if place < 64 => {
                let mut items = vec![Value::Null; place];
                items.push(value);
                Value::Array(items)
            }
            _ => Value::Object(Map::from_iter([(name, value)])),
        };
    }
    value
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect()
}

#[cfg(test)]
mod tests;
