//! What the route's schema accepts: outputs of many kinds that it lets through, to find an assertion that it makes true by itself.
//!
//! Such an assertion refuses nothing that the route would not refuse anyway, so it proves nothing. It is tried with outputs that are
//! made from the schema and are checked with it. Where that is no fair trial (a pattern for which no text is known, a keyword that is
//! not understood here, a member that no output of them has), nothing is said: a good assertion must not be called a bad one.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::one_line;
use super::probes::{literals, put, values};
use crate::validate::{Answer, Check, Of, Required, Validator};

mod samples;

use samples::{Focus, Samples};

/// Most combinations of values that an assertion is tried with to find one that makes it true.
const COMBINATIONS_TRIED: usize = 4096;
/// Most values of a member that are told.
const VALUES_TOLD: usize = 8;

/// The schema of a route's outputs.
pub(super) struct Accepted {
    schema: Value,
    validator: Validator,
}

/// Outputs that the schema accepts, and what an expression looks up in one.
pub(super) struct Trial<'a> {
    /// The expression.
    pub(super) text: &'a str,
    /// What it looks up by itself, as `output.total`.
    pub(super) names: &'a [String],
    /// What is asked, from which texts are tried where the expression speaks of it.
    pub(super) input: &'a Value,
    /// Outputs that are named as bad.
    pub(super) known: &'a [&'a Value],
}

impl Trial<'_> {
    fn paths(&self) -> Vec<Vec<&str>> {
        let split = self.names.iter().map(|name| name.split('.').collect::<Vec<_>>());
        split.filter(|path| path[0] == "output").map(|path| path[1..].to_vec()).collect()
    }

    fn speaks_of(&self, variable: &str) -> bool {
        self.names.iter().any(|name| name.split('.').next() == Some(variable))
    }
}

impl Accepted {
    /// The schema that a route requires of outputs, if it does.
    pub(super) fn of(route: Option<&Validator>) -> Option<Self> {
        let text = route?.output.as_ref()?.schema_text();
        let schema = serde_json::from_str(text).ok()?;
        let check = Check::compile(Of::Output, &Required { schema: Some(text.as_bytes()), assertions: &[] }).ok()?;
        Some(Accepted { schema, validator: Validator { output: Some(check), ..Validator::default() } })
    }

    fn accepts(&self, output: &Value) -> bool {
        let body = output.to_string();
        self.validator.check_output(b"", Answer { content_encoding: None, body: body.as_bytes() }).is_ok()
    }

    /// Outputs that the schema accepts, to try an expression with; `None` where they are no fair trial of it.
    pub(super) fn outputs(&self, trial: &Trial<'_>) -> Option<Vec<Value>> {
        let paths = trial.paths();
        // Of what an answer says beside its output, the schema says nothing.
        if paths.is_empty() || trial.speaks_of("answer") {
            return None;
        }
        let (mut texts, numbers) = literals(trial.text);
        if trial.text.contains("length") && numbers.iter().any(|number| *number > samples::LENGTH_TRIED) {
            return None;
        }
        let focus = Focus::of(&paths);
        let mut plain = Samples::new(&self.schema, (Vec::new(), Vec::new()));
        let mut outputs: Vec<Value> = plain.of(&self.schema, &focus, 0);
        outputs.retain(|output| self.accepts(output));
        if plain.in_doubt || !paths.iter().all(|path| self.is_covered(path, &outputs)) {
            return None;
        }
        if trial.speaks_of("input") {
            texts_of(trial.input, &mut texts);
        }
        let mut special = Samples::new(&self.schema, (texts, numbers)).of(&self.schema, &focus, 0);
        // What the schema leaves open may be anything that the expression speaks of.
        let bases = outputs.iter().take(2).cloned().collect::<Vec<_>>();
        for value in values(trial.text) {
            for (base, path) in bases.iter().flat_map(|base| paths.iter().map(move |path| (base, path))) {
                let mut changed = base.clone();
                put(&mut changed, path, value.clone());
                special.push(changed);
            }
        }
        special.extend(trial.known.iter().map(|known| (*known).clone()));
        outputs.extend(special.into_iter().filter(|output| self.accepts(output)));
        Some(outputs)
    }

    /// Whether outputs differ in what stands there, or the schema lets only one thing stand there.
    fn is_covered(&self, path: &[&str], outputs: &[Value]) -> bool {
        let there: BTreeSet<String> = outputs.iter().filter_map(|output| Some(at(output, path)?.to_string())).collect();
        there.len() > 1 || (there.len() == 1 && self.schema_at(path).and_then(choices).is_some_and(|all| all.len() == 1))
    }

    /// What an expression looks up that the schema lets no output have.
    pub(super) fn never_there(&self, names: &[String]) -> Option<String> {
        names.iter().find_map(|name| {
            let mut members = name.split('.');
            members.next().filter(|variable| *variable == "output")?;
            let mut at = samples::resolved(&self.schema, &self.schema)?;
            for member in members {
                let known = at.get("properties")?.as_object()?;
                // Elsewhere a schema may allow more, or say more of what is allowed here.
                let is_all = at.get("additionalProperties") == Some(&Value::Bool(false)) && at.get("patternProperties").is_none();
                match known.get(member) {
                    Some(schema) => at = samples::resolved(&self.schema, schema)?,
                    None if is_all => return Some(format!("the route's schema allows no {member:?} there")),
                    None => return None,
                }
            }
            None
        })
    }

    /// Why an assertion holds for no output that the schema accepts, if that is so for certain.
    pub(super) fn never_holds(&self, trial: &Trial<'_>, holds: impl Fn(&Value) -> bool) -> Option<String> {
        let paths = trial.paths();
        if paths.is_empty() || paths.len() < trial.names.len() {
            return None;
        }
        let overlap = |one: &[&str]| paths.iter().filter(|path| path.starts_with(one)).count() > 1;
        if paths.iter().any(|path| path.is_empty() || overlap(path)) {
            return None;
        }
        if let ([path], Some(value)) = (&paths[..], compared_with(trial.text, &trial.names[0]))
            && let Some(types) = self.schema_at(path).and_then(|schema| excluded_by_type(schema, &value))
        {
            return Some(format!("the route's schema has {types} there"));
        }
        let choices: Vec<Vec<&Value>> =
            paths.iter().map(|path| self.schema_at(path).and_then(choices)).collect::<Option<Vec<_>>>()?;
        // Each may also be absent.
        let combinations = choices.iter().try_fold(1, |product: usize, choices| product.checked_mul(choices.len() + 1));
        if combinations.is_none_or(|combinations| combinations > COMBINATIONS_TRIED) {
            return None;
        }
        for mut chosen in 0..combinations.unwrap_or_default() {
            let mut output = Value::Object(Map::new());
            for (path, choices) in paths.iter().zip(&choices) {
                let of_this = chosen % (choices.len() + 1);
                chosen /= choices.len() + 1;
                if let Some(value) = choices.get(of_this) {
                    put(&mut output, path, (*value).clone());
                }
            }
            if holds(&output) {
                return None;
            }
        }
        let told = paths.iter().zip(&choices).map(|(path, choices)| {
            let mut words: Vec<String> = choices.iter().take(VALUES_TOLD).map(|value| one_line(&value.to_string())).collect();
            words.extend((choices.len() > VALUES_TOLD).then(|| "…".to_owned()));
            format!("output.{} is {}", path.join("."), words.join(" or "))
        });
        Some(format!("in the route's schema {}", told.collect::<Vec<_>>().join(", ")))
    }

    /// The schema of a member, where it is said of it directly.
    fn schema_at(&self, path: &[&str]) -> Option<&Value> {
        path.iter().try_fold(samples::resolved(&self.schema, &self.schema)?, |at, member| {
            samples::resolved(&self.schema, at.get("properties")?.get(member)?)
        })
    }
}

/// All values that a schema allows, if it lists them.
fn choices(schema: &Value) -> Option<Vec<&Value>> {
    static NULL: Value = Value::Null;
    static BOTH: [Value; 2] = [Value::Bool(false), Value::Bool(true)];
    match (schema.get("const"), schema.get("enum").and_then(Value::as_array), schema.get("type").and_then(Value::as_str)) {
        (Some(one), ..) => Some(vec![one]),
        (None, Some(all), _) => Some(all.iter().collect()),
        (None, None, Some("null")) => Some(vec![&NULL]),
        (None, None, Some("boolean")) => Some(BOTH.iter().collect()),
        (None, None, _) => None,
    }
}

/// The value with which `name == value` compares, where an expression is nothing else.
fn compared_with(text: &str, name: &str) -> Option<Value> {
    let (left, right) = text.split_once("==")?;
    let (left, right) = (left.trim(), right.trim());
    let literal = if left == name { right } else { Some(left).filter(|_| right == name)? };
    let quoted = |quote: char| literal.strip_prefix(quote)?.strip_suffix(quote).filter(|text| !text.contains([quote, '\\']));
    match quoted('\'').or_else(|| quoted('"')) {
        Some(text) => Some(Value::String(text.to_owned())),
        None => serde_json::from_str(literal).ok().filter(|value| matches!(value, Value::Number(_))),
    }
}

/// The types that a schema allows, in words, if a text or a number is of none of them.
fn excluded_by_type(schema: &Value, value: &Value) -> Option<String> {
    let types: Vec<&str> = match schema.get("type")? {
        Value::String(one) => vec![one],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        _ => return None,
    };
    let of: &[&str] = if value.is_string() { &["string"] } else { &["number", "integer", "boolean"] };
    if types.iter().any(|one| of.contains(one)) { None } else { Some(format!("type {}", types.join(" or "))) }
}

/// What stands where a path leads, in objects and by number in lists.
fn at<'a>(value: &'a Value, path: &[&str]) -> Option<&'a Value> {
    path.iter().try_fold(value, |at, member| match at {
        Value::Array(items) => items.get(member.parse::<usize>().ok()?),
        other => other.get(member),
    })
}

/// The texts in what is asked.
fn texts_of(value: &Value, texts: &mut Vec<String>) {
    match value {
        Value::String(text) => texts.push(text.clone()),
        Value::Array(items) => items.iter().for_each(|item| texts_of(item, texts)),
        Value::Object(members) => members.values().for_each(|member| texts_of(member, texts)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
