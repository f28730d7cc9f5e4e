//! A suite: real inputs, and what must be true of the answers to them, in YAML beside the configuration.
//!
//! Everything that is wrong with a suite is told when it is loaded: an empty one proves nothing, and neither does a case without an
//! assertion, or one whose assertions cannot fail where the suite itself says that they must (`refuse`). Pure functions of its
//! bytes; who calls a provider is `runner.rs`.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::{Environment, UndefinedBehavior};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::validate::{Answer, Check, Expression, Extract, Of, Parse, Required, Validator};

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
    providers: BTreeMap<String, ForProvider>,
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
    values: Map<String, Value>,
    input: Value,
    validator: Validator,
}

/// The same question in other words: what must be the same of both answers.
#[derive(Debug)]
pub struct Relation {
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
    /// What it changes, in words.
    pub fn what(&self) -> String {
        match &self.change {
            Change::Shuffle(name) => format!("shuffle {name}"),
            Change::Replace(values) => format!("replace {}", values.keys().cloned().collect::<Vec<_>>().join(", ")),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default = "five")]
    runs: u32,
    #[serde(default)]
    failures_max: u32,
    levels: Option<Vec<Level>>,
    vary: Option<Vec<String>>,
    #[serde(default = "slash_model")]
    model: String,
    #[serde(default)]
    path: String,
    finish: Option<Finish>,
    #[serde(default)]
    parameters: Map<String, Value>,
    #[serde(default)]
    providers: BTreeMap<String, ForProvider>,
    #[serde(default)]
    cases: Vec<WrittenCase>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenCase {
    name: String,
    #[serde(default)]
    values: Map<String, Value>,
    input: Value,
    #[serde(default)]
    assert: Vec<String>,
    #[serde(default)]
    refuse: Vec<Refuse>,
    #[serde(default)]
    relations: Vec<WrittenRelation>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Refuse {
    output: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenRelation {
    shuffle: Option<String>,
    replace: Option<Map<String, Value>>,
    same: String,
}

fn five() -> u32 {
    5
}

fn slash_model() -> String {
    "/model".to_owned()
}

impl Suite {
    /// Reads a suite, for a route that requires this of answers.
    ///
    /// # Errors
    /// Everything that is wrong with it, for whoever wrote it.
    pub fn load(bytes: &[u8], route: Option<&Validator>) -> Result<Self, Vec<String>> {
        if bytes.len() > SUITE_BYTES_MAX {
            return Err(vec![format!("it has {} bytes; the limit is {SUITE_BYTES_MAX}", bytes.len())]);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| vec!["it is no text in UTF-8".to_owned()])?;
        let written: Written = serde_saphyr::from_str(text).map_err(|error| vec![one_line(&error.to_string())])?;
        let mut wrong = Vec::new();
        if written.cases.is_empty() {
            wrong.push("it has no cases: nothing would be proved".to_owned());
        }
        if written.cases.len() > CASES_MAX {
            wrong.push(format!("it has {} cases; the limit is {CASES_MAX}", written.cases.len()));
        }
        if !(1..=RUNS_MAX).contains(&written.runs) {
            wrong.push(format!("runs = {}: it must be 1 to {RUNS_MAX}", written.runs));
        }
        let pointers = written.vary.iter().flatten().map(|one| ("vary", one)).chain([("model", &written.model)]);
        let pointers = pointers.chain(written.finish.iter().map(|finish| ("finish.pointer", &finish.pointer)));
        for (key, pointer) in pointers {
            if !pointer.is_empty() && !pointer.starts_with('/') {
                wrong.push(format!("{key} = {pointer:?}: it is no JSON pointer (RFC 6901)"));
            }
        }
        if written.levels.as_ref().is_some_and(Vec::is_empty) {
            wrong.push("levels is empty: nothing would be proved".to_owned());
        }
        if written.finish.as_ref().is_some_and(|finish| finish.allowed.is_empty()) {
            wrong.push("finish.allowed is empty: no answer could pass".to_owned());
        }
        let (mut names, mut assertions, mut cases) = (BTreeSet::new(), Vec::new(), Vec::new());
        for (place, case) in written.cases.into_iter().enumerate() {
            let called =
                if case.name.trim().is_empty() { format!("case {}", place + 1) } else { format!("case {:?}", case.name) };
            if case.name.trim().is_empty() || case.name.chars().count() > NAME_CHARS_MAX {
                wrong.push(format!("{called}: its name must have 1 to {NAME_CHARS_MAX} characters"));
            }
            if !names.insert(case.name.clone()) {
                wrong.push(format!("{called}: another case has that name"));
            }
            assertions.extend(case.assert.iter().cloned());
            assertions.extend(case.relations.iter().map(|relation| relation.same.clone()));
            match Case::of(case, route) {
                Ok(case) => cases.push(case),
                Err(faults) => wrong.extend(faults.into_iter().map(|fault| format!("{called}: {fault}"))),
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
        for case in &suite.cases {
            for relation in std::iter::once(None).chain((0..case.relations.len()).map(Some)) {
                if let Err(fault) = case.request(&suite, "", relation, 0) {
                    wrong.push(format!("case {:?}: {fault}", case.name));
                }
            }
        }
        if wrong.is_empty() { Ok(suite) } else { Err(wrong) }
    }
}

impl Case {
    fn of(written: WrittenCase, route: Option<&Validator>) -> Result<Self, Vec<String>> {
        let WrittenCase { name, values, input, assert, refuse, relations } = written;
        let mut wrong = Vec::new();
        if assert.is_empty() {
            wrong.push("it asserts nothing: it could only pass".to_owned());
        }
        if !input.is_object() {
            wrong.push("its input is no object".to_owned());
        }
        if relations.len() > RELATIONS_MAX || refuse.len() > RELATIONS_MAX {
            wrong.push(format!("it has more than {RELATIONS_MAX} relations or known-bad outputs, the limit"));
        }
        let required = Required { schema: None, assertions: &assert };
        let check = Check::compile(Of::Output, &required).map_err(|refused| {
            wrong.extend(refused.into_iter().map(|one| format!("assert: {}", one.what)));
        });
        let mut compiled = Vec::new();
        for WrittenRelation { shuffle, replace, same } in relations {
            let change = match (shuffle, replace) {
                (Some(name), None) => match values.get(&name) {
                    Some(Value::Array(items)) if items.len() > 1 => Some(Change::Shuffle(name)),
                    _ => {
                        wrong.push(format!("shuffle = {name:?}: there is no list of two or more of that name in values"));
                        None
                    }
                },
                (None, Some(others)) if others.keys().all(|name| values.contains_key(name)) && !others.is_empty() => {
                    Some(Change::Replace(others))
                }
                (None, Some(_)) => {
                    wrong.push("replace: it names what is not in values".to_owned());
                    None
                }
                (Some(_), Some(_)) | (None, None) => {
                    wrong.push("a relation has either shuffle or replace".to_owned());
                    None
                }
            };
            match (Expression::compile(&same), change) {
                (Ok(same), Some(change)) => {
                    if let Some(what) = never_there(&same, route) {
                        wrong.push(format!("same: {same}: {what}"));
                    }
                    compiled.push(Relation { change, same });
                }
                (Ok(_), None) => {}
                (Err(why), _) => wrong.push(format!("same: {why}")),
            }
        }
        let Ok(check) = check else { return Err(wrong) };
        let extract = route.map(|route| route.extract.clone()).unwrap_or_default();
        let case =
            Case { name, relations: compiled, values, input, validator: Validator { input: None, output: Some(check), extract } };
        for (place, Refuse { output }) in refuse.iter().enumerate() {
            let asked = case.input.to_string();
            let body = answer_with(&case.validator.extract, output);
            let answer = || Answer { content_encoding: None, body: &body };
            let passes = |validator: &Validator| validator.check_output(asked.as_bytes(), answer()).is_ok();
            if passes(&case.validator) && route.is_none_or(passes) {
                wrong.push(format!("refuse {}: its assertions and the route accept it", place + 1));
            }
        }
        if wrong.is_empty() { Ok(case) } else { Err(wrong) }
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
            body.extend(special.parameters.clone());
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

/// What an expression looks up that the route's schema lets no output have.
fn never_there(same: &Expression, route: Option<&Validator>) -> Option<String> {
    let schema: Value = serde_json::from_str(route?.output.as_ref()?.schema_text()).ok()?;
    same.names().iter().find_map(|name| {
        let mut members = name.split('.');
        members.next().filter(|variable| *variable == "output")?;
        let mut at = &schema;
        for member in members {
            let known = at.get("properties")?.as_object()?;
            // Elsewhere a schema may allow more, or say more of what is allowed here.
            let is_all = at["additionalProperties"] == Value::Bool(false) && at.get("patternProperties").is_none();
            match known.get(member) {
                Some(schema) => at = schema,
                None if is_all => return Some(format!("the route's schema allows no {member:?} there")),
                None => return None,
            }
        }
        None
    })
}

/// The template strings of an input, filled.
fn filled(engine: &Environment<'_>, value: &Value, values: &Map<String, Value>) -> Result<Value, String> {
    Ok(match value {
        Value::String(text) if text.contains("{{") || text.contains("{%") => Value::String(
            engine
                .render_str(
                    text,
                    crate::validate::engine_value(&Value::Object(values.clone())).ok_or("values: a number is too large")?,
                )
                .map_err(|error| format!("input: {}", one_line(&error.to_string())))?,
        ),
        Value::Array(items) => Value::Array(items.iter().map(|item| filled(engine, item, values)).collect::<Result<_, _>>()?),
        Value::Object(members) => {
            let member = |(name, member): (&String, &Value)| Ok((name.clone(), filled(engine, member, values)?));
            Value::Object(members.iter().map(member).collect::<Result<_, String>>()?)
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    })
}

/// An answer with this output where the route looks for it.
fn answer_with(extract: &Extract, output: &Value) -> Vec<u8> {
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
    value.to_string().into_bytes()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(yaml: &str) -> Result<Suite, Vec<String>> {
        Suite::load(yaml.as_bytes(), None)
    }

    const GOOD: &str = r#"
runs: 2
parameters: { temperature: 0 }
providers: { tiny: { parameters: { temperature: 0.01 } } }
cases:
  - name: adds
    values: { items: [3, 4, 5] }
    input: { messages: [{ role: user, content: "add {{ items | join(', ') }}" }] }
    assert: ["output.total == 12"]
    refuse: [{ output: { total: 13 } }]
    relations:
      - { shuffle: items, same: output.total }
      - { replace: { items: [6, 6] }, same: output.total }
"#;

    #[test]
    fn requests_are_the_input_with_its_values_and_the_parameters() {
        let suite = load(GOOD).unwrap();
        let case = &suite.cases[0];
        let body = |provider, relation, turn| String::from_utf8(case.request(&suite, provider, relation, turn).unwrap()).unwrap();
        let asks = |text: &str, temperature: &str| {
            format!(r#"{{"messages":[{{"content":"add {text}","role":"user"}}],"temperature":{temperature}}}"#)
        };
        assert_eq!(body("big", None, 0), asks("3, 4, 5", "0"));
        assert_eq!(body("tiny", None, 0), asks("3, 4, 5", "0.01"));
        assert_eq!(body("big", Some(0), 0), asks("4, 5, 3", "0"));
        assert_eq!(body("big", Some(0), 1), asks("5, 3, 4", "0"));
        assert_eq!(body("big", Some(1), 0), asks("6, 6", "0"));
    }

    #[test]
    fn what_would_prove_nothing_is_no_suite() {
        let wrong = |from: &str, to: &str| load(&GOOD.replace(from, to)).unwrap_err().join("; ");
        assert!(load("cases: []").unwrap_err()[0].contains("no cases"));
        assert!(wrong(r#"["output.total == 12"]"#, "[]").contains("asserts nothing"));
        assert!(wrong("    assert: [\"output.total == 12\"]\n", "").contains("asserts nothing"));
        assert!(wrong("total: 13", "total: 12").contains("refuse 1: its assertions and the route accept it"));
        assert!(wrong("items |", "thing |").contains("undefined"));
        assert!(wrong("shuffle: items", "shuffle: thing").contains("shuffle = \"thing\""));
        assert!(wrong("runs: 2", "runs: 0").contains("runs = 0"));
        assert!(wrong("runs: 2", "run: 2").contains("run"));
        assert!(wrong("output.total == 12", "output.total = 12").contains("assert"));
        assert!(wrong("runs: 2", "levels: []").contains("levels is empty"));
        let twice = format!("{GOOD}{}", &GOOD[GOOD.find("  - name").unwrap()..]);
        assert!(load(&twice).unwrap_err().join("; ").contains("another case has that name"));
    }

    #[test]
    fn what_is_not_there_is_not_the_same_as_what_is_not_there() {
        let suite = load(GOOD).unwrap();
        let case = &suite.cases[0];
        let comes_to = |same: &str, body: &str| case.comes_to(&Expression::compile(same).unwrap(), b"{}", body.as_bytes());
        for same in [
            "output.total",
            "output.total == 12",
            "output.total > 3",
            "[output.total, 1]",
            "{'a': [output.total]}",
            "output.inner.total",
            "output.items | map(attribute='price')",
            "output['total']",
        ] {
            let why = comes_to(same, r#"{"totl":12,"items":[{}]}"#).unwrap_err();
            assert!(why.contains("cannot be judged"), "{same}: {why}");
        }
        assert_eq!(comes_to("output.total", r#"{"total":null}"#), Ok("null".to_owned()));
        assert_eq!(comes_to("[output.total, {'a': 1}]", r#"{"total":[12]}"#), Ok(r#"[[12],{"a":1}]"#.to_owned()));
        // Where it says what is to be then, it is the author's word.
        assert_eq!(comes_to("output.note | default('')", "{}"), Ok(r#""""#.to_owned()));
        assert_eq!(comes_to("output.note is defined", "{}"), Ok("false".to_owned()));
    }

    #[test]
    fn a_relation_over_what_the_schema_never_allows_is_refused() {
        let schema = r#"{"type":"object","properties":{"total":{"type":"number"},"more":{}},"additionalProperties":false}"#;
        let required = Required { schema: Some(schema.as_bytes()), assertions: &[] };
        let route = Validator { output: Some(Check::compile(Of::Output, &required).unwrap()), ..Validator::default() };
        let load =
            |same: &str| Suite::load(GOOD.replace("same: output.total", &format!("same: {same}")).as_bytes(), Some(&route));
        assert!(load("output.total").is_ok() && load("output.more.or.less").is_ok());
        let wrong = load("output.totl").unwrap_err();
        assert!(wrong[0].contains(r#"same: output.totl: the route's schema allows no "totl" there"#), "{wrong:?}");
    }

    #[test]
    fn a_bomb_of_aliases_is_refused() {
        let mut yaml = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for n in 1..12 {
            let last = n - 1;
            yaml.push_str(&format!("a{n}: &a{n} [{}]\n", vec![format!("*a{last}"); 10].join(", ")));
        }
        assert!(load(&yaml).is_err());
    }

    #[test]
    fn an_answer_is_judged_where_the_route_looks() {
        let extract = Extract { pointer: "/choices/0/message/content".to_owned(), parse: Parse::Json };
        let route = Validator { extract, ..Validator::default() };
        let suite = Suite::load(GOOD.as_bytes(), Some(&route)).unwrap();
        let case = &suite.cases[0];
        let answer = |text: &str| serde_json::json!({ "choices": [{ "message": { "content": text } }] }).to_string();
        assert_eq!(case.faults(b"{}", answer(r#"{"total":12}"#).as_bytes()), [""; 0]);
        assert_eq!(case.faults(b"{}", answer(r#"{"total":13}"#).as_bytes()).len(), 1);
        assert_eq!(case.shown(answer("no").as_bytes()), "no");
        let same = |text: &str| case.comes_to(&case.relations[0].same, b"{}", answer(text).as_bytes());
        assert_eq!(same(r#"{"total":12}"#), same(r#"{ "total": 12 }"#));
        assert_ne!(same(r#"{"total":12}"#), same(r#"{"total":13}"#));
    }
}
