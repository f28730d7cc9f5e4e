//! A JSON Schema 2020-12: formats asserted, patterns in linear time, references within the document alone.

use jsonschema::{Draft, PatternOptions, Retrieve, Uri, ValidationError};
use serde_json::Value;

use super::{FAULTS_MAX, Fault, Invalid, PATTERN_BYTES_MAX, SCHEMA_BYTES_MAX, json, shorten};

/// The one dialect.
const DIALECT: &str = "https://json-schema.org/draft/2020-12/schema";
/// Up to so many values every fault is looked for; of a larger document the first one is told.
const LOOKED_THROUGH_VALUES_MAX: usize = 10_000;

/// A compiled schema.
pub(super) struct Schema(jsonschema::Validator);

impl Schema {
    pub(super) fn compile(text: &[u8]) -> Result<Self, String> {
        if text.len() > SCHEMA_BYTES_MAX {
            return Err(format!("it has {} bytes; the limit is {SCHEMA_BYTES_MAX}", text.len()));
        }
        let schema = json::read(text)?;
        match schema.get("$schema") {
            None => {}
            Some(Value::String(dialect)) if dialect.trim_end_matches('#') == DIALECT => {}
            Some(other) => return Err(format!("at /$schema: {} is not known; write {DIALECT}", shorten(&other.to_string()))),
        }
        let patterns = PatternOptions::regex().size_limit(PATTERN_BYTES_MAX).dfa_size_limit(PATTERN_BYTES_MAX);
        let options = jsonschema::options()
            .with_draft(Draft::Draft202012)
            .should_validate_formats(true)
            .should_ignore_unknown_formats(false)
            .with_pattern_options(patterns)
            .with_retriever(Nowhere);
        let compiled = options.build(&schema).map_err(|error| refusal(&schema, &error))?;
        Ok(Schema(compiled))
    }

    pub(super) fn check(&self, value: &Value) -> Result<(), Invalid> {
        if values(value, LOOKED_THROUGH_VALUES_MAX) >= LOOKED_THROUGH_VALUES_MAX {
            return self.0.validate(value).map_err(|error| Invalid::of(fault(&error)));
        }
        let faults: Vec<Fault> = self.0.iter_errors(value).take(FAULTS_MAX).map(|error| fault(&error)).collect();
        if faults.is_empty() { Ok(()) } else { Err(Invalid { faults }) }
    }
}

/// How many values a document has, counted no further than `enough`.
fn values(value: &Value, enough: usize) -> usize {
    let within = |count: usize, member: &Value| if count >= enough { count } else { count + values(member, enough - count) };
    match value {
        Value::Object(members) => members.values().fold(1, within),
        Value::Array(items) => items.iter().fold(1, within),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 1,
    }
}

fn fault(error: &ValidationError<'_>) -> Fault {
    Fault::new(error.instance_path().as_str(), error.kind().keyword(), error.masked_with("the value").to_string())
}

/// Nothing is fetched for a schema.
struct Nowhere;

impl Retrieve for Nowhere {
    fn retrieve(&self, uri: &Uri<String>) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Err(format!("{uri} is not in this document, and nothing is fetched").into())
    }
}

/// Says what is wrong with a schema, and where.
fn refusal(schema: &Value, error: &ValidationError<'_>) -> String {
    let whole = error.to_string();
    let what = shorten(&whole);
    let place = match error.instance_path().as_str() {
        "" => references(schema).into_iter().find(|(_, reference)| {
            // Of a reference elsewhere the error names the document, of one within this one the place.
            let named = match reference.split_once('#') {
                Some(("", place)) => place,
                Some((document, _)) => document,
                None => reference,
            };
            !named.is_empty() && whole.contains(named)
        }),
        path => Some((path.to_owned(), String::new())),
    };
    match place {
        Some((place, reference)) if reference.is_empty() => format!("at {}: {what}", shorten(&place)),
        Some((place, reference)) if reference.starts_with('#') => {
            format!("at {}: {}: {what}", shorten(&place), shorten(&reference))
        }
        Some((place, reference)) => {
            format!("at {}: {} leads out of the document; copy it into $defs", shorten(&place), shorten(&reference))
        }
        None => what,
    }
}

/// Every reference with its place.
fn references(schema: &Value) -> Vec<(String, String)> {
    fn walk(value: &Value, place: &str, found: &mut Vec<(String, String)>) {
        match value {
            Value::Object(members) => {
                for (name, member) in members {
                    let place = format!("{place}/{}", name.replace('~', "~0").replace('/', "~1"));
                    match member {
                        Value::String(target) if matches!(name.as_str(), "$ref" | "$dynamicRef") => {
                            found.push((place, target.clone()));
                        }
                        _ => walk(member, &place, found),
                    }
                }
            }
            Value::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    walk(item, &format!("{place}/{index}"), found);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    let mut found = Vec::new();
    walk(schema, "", &mut found);
    found
}
