//! From files, variables and flags to one document: layers of values, merged, then read field by field.
//!
//! What cannot be read is noted and taken out, and the rest is read again, so that one start tells everything that is wrong. What
//! the values mean is not judged here: that is `check.rs`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use figment::error::{Actual, Kind};
use figment::providers::{Format, Serialized, Toml};
use figment::value::{Dict, Map, Tag, Value};
use figment::{Figment, Metadata, Profile, Provider};

use super::secret::without_credentials;
use super::{ConfigError, Document, Preset, Problem};

/// What the variables begin with that set something.
const VARIABLE_PREFIX: &str = "ONEJOB_";
/// What stands in a variable's name for the dot in a key.
const VARIABLE_DOT: &str = "__";
/// Variables with our prefix that the command line reads: no settings.
const VARIABLES_OF_THE_COMMAND_LINE: [&str; 4] = ["ONEJOB_CONFIG", "ONEJOB_GATEWAY", "ONEJOB_LOG", "ONEJOB_TOKEN"];
/// The variable that names a failpoint. Without the feature nobody reads it, and it is refused as any other.
const VARIABLE_OF_TESTS: &str = "ONEJOB_FAILPOINT";
/// Most problems that are told at once: a file of another program would otherwise fill the screen.
const PROBLEMS_MAX: usize = 100;
/// Longest value that a problem repeats, in characters.
const SHOWN_CHARS_MAX: usize = 80;

/// Where the configuration comes from.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The TOML file, if there is one.
    pub file: Option<PathBuf>,
    /// What the flags say, over everything else: a key with dots, and its value.
    pub overrides: Vec<(String, String)>,
    /// The environment: `ONEJOB_…` variables, and those that `auth` names.
    pub environment: Environment,
}

/// An environment.
#[derive(Clone, Debug)]
pub enum Environment {
    /// The process' own.
    Process,
    /// These variables and no others.
    Given(BTreeMap<String, String>),
}

impl Environment {
    /// The value of a variable.
    pub fn get(&self, name: &str) -> Option<String> {
        match self {
            Environment::Process => process_variables().find(|(known, _)| known == name).map(|(_, value)| value),
            Environment::Given(variables) => variables.get(name).cloned(),
        }
    }

    fn settings(&self) -> Vec<(String, String)> {
        let ours = |(name, _): &(String, String)| name.starts_with(VARIABLE_PREFIX);
        let mut settings: Vec<_> = match self {
            Environment::Process => process_variables().filter(ours).collect(),
            Environment::Given(variables) => variables.clone().into_iter().filter(ours).collect(),
        };
        settings.sort();
        settings
    }
}

#[expect(clippy::disallowed_methods, reason = "config is the only reader of the environment, and this is where")]
fn process_variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
}

/// What was read: everything that could be.
pub(super) struct Read {
    pub(super) document: Document,
    /// Where each value that is not a default comes from, by key.
    pub(super) origins: BTreeMap<String, String>,
    pub(super) problems: Vec<Problem>,
}

impl Read {
    /// Where a key's value, or the nearest value around it, comes from.
    pub(super) fn origin(&self, key: &str) -> Option<String> {
        let below = format!("{key}.");
        let mut at = Some(key);
        while let Some(key) = at {
            if let Some(origin) = self.origins.get(key) {
                return Some(origin.clone());
            }
            at = key.rsplit_once('.').map(|(parent, _)| parent);
        }
        self.origins.range(below.clone()..).next().filter(|(key, _)| key.starts_with(&below)).map(|(_, origin)| origin.clone())
    }
}

/// One source's values.
struct Layer {
    origin: String,
    values: Dict,
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.origin.clone())
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(Profile::Default.collect(self.values.clone()))
    }
}

/// A value that was given as text: a variable's or a flag's.
struct Text {
    path: Vec<String>,
    text: String,
}

pub(super) fn read(sources: &Sources) -> Result<Read, ConfigError> {
    let mut figment = Figment::from(Serialized::defaults(Document::default()));
    let defaults: Vec<_> = figment.metadata().map(|metadata| metadata.name.clone()).collect();
    let mut problems = Vec::new();
    let mut texts = Vec::new();
    if let Some(path) = &sources.file {
        figment = figment.merge(Layer { origin: path.display().to_string(), values: parse_file(path)? });
    }
    for (name, value) in sources.environment.settings() {
        let is_of_tests = cfg!(feature = "failpoints") && name == VARIABLE_OF_TESTS;
        if VARIABLES_OF_THE_COMMAND_LINE.contains(&name.as_str()) || is_from_kubernetes(&name) || is_of_tests {
            continue;
        }
        let path: Vec<String> = name[VARIABLE_PREFIX.len()..].to_lowercase().split(VARIABLE_DOT).map(str::to_owned).collect();
        if path.len() < 2 || path.iter().any(String::is_empty) {
            problems.push(Problem {
                key: name,
                value: None,
                origin: None,
                what: "the variable names no key".to_owned(),
                hint: format!(
                    "write two underscores for each dot: {VARIABLE_PREFIX}SERVER{VARIABLE_DOT}LISTEN sets server.listen"
                ),
            });
            continue;
        }
        figment = figment.merge(Layer { origin: name, values: nested(&path, &value) });
        texts.push(Text { path, text: value });
    }
    for (key, value) in &sources.overrides {
        let path: Vec<String> = key.split('.').map(str::to_owned).collect();
        if path.len() < 2 || path.iter().any(String::is_empty) {
            problems.push(Problem {
                key: key.clone(),
                value: None,
                origin: Some("flag".to_owned()),
                what: "the flag names no key".to_owned(),
                hint: "write a section, a dot and a key, as in server.listen".to_owned(),
            });
            continue;
        }
        figment = figment.merge(Layer { origin: format!("flag {key}"), values: nested(&path, value) });
        texts.push(Text { path, text: value.clone() });
    }

    let mut merged = figment
        .data()
        .expect("layers are plain values and defaults serialize")
        .remove(&Profile::Default)
        .expect("the defaults are in the default profile");
    fill_presets(&mut merged);
    let origin_of = |tag: Tag| {
        let name = &figment.get_metadata(tag)?.name;
        (!defaults.contains(name)).then(|| name.clone().into_owned())
    };
    let document = extract(&mut merged, &texts, &origin_of, &mut problems);
    let mut origins = BTreeMap::new();
    collect_origins(&merged, "", &origin_of, &mut origins);
    Ok(Read { document, origins, problems })
}

/// Puts what a preset says beneath what a provider's entry says itself. A word that is no preset is refused when it is read.
fn fill_presets(merged: &mut Dict) {
    let Some(Value::Dict(_, providers)) = merged.get_mut("provider") else { return };
    for entry in providers.values_mut() {
        let Value::Dict(_, entry) = entry else { continue };
        let Some(defaults) = entry.get("preset").and_then(Value::as_str).and_then(Preset::defaults) else { continue };
        let defaults = <Toml as Format>::from_str::<Dict>(defaults).expect("a preset is TOML");
        fill(entry, defaults);
    }
}

fn fill(table: &mut Dict, defaults: Dict) {
    for (name, default) in defaults {
        match (table.get_mut(&name), default) {
            (None, default) => {
                table.insert(name, default);
            }
            (Some(Value::Dict(_, table)), Value::Dict(_, defaults)) => fill(table, defaults),
            (Some(_), _) => {}
        }
    }
}

/// Kubernetes gives every container variables named after the services around it: `ONEJOB_PORT`, `ONEJOB_REDIS_SERVICE_HOST`, ….
fn is_from_kubernetes(name: &str) -> bool {
    let words = ["_SERVICE_HOST", "_SERVICE_PORT", "_PORT_"];
    !name.contains(VARIABLE_DOT) && (name.ends_with("_PORT") || words.iter().any(|word| name.contains(word)))
}

fn parse_file(path: &Path) -> Result<Dict, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
    <Toml as Format>::from_str(&text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start).min(text.len());
        let line = text.as_bytes()[..start].iter().filter(|byte| **byte == b'\n').count() + 1;
        // Only the message: the parser's own text would repeat the line, which may hold a password.
        ConfigError::Syntax { path: path.to_owned(), line, message: error.message().to_owned() }
    })
}

/// Reads a text as TOML would, else as the text that it is, and puts it under its path.
fn nested(path: &[String], text: &str) -> Dict {
    let Ok(mut value) = text.parse::<Value>();
    for name in path[1..].iter().rev() {
        value = Value::from(Dict::from([(name.clone(), value)]));
    }
    Dict::from([(path[0].clone(), value)])
}

/// Reads the document; what is refused is noted and taken out until the rest can be read.
fn extract(
    merged: &mut Dict,
    texts: &[Text],
    origin_of: &dyn Fn(Tag) -> Option<String>,
    problems: &mut Vec<Problem>,
) -> Document {
    loop {
        let error = match Value::from(merged.clone()).deserialize::<Document>() {
            Ok(document) => return document,
            Err(error) => error,
        };
        let path = path_of(merged, &error.path);
        let Some(found) = find(merged, &path) else {
            problems.push(Problem {
                key: error.path.join("."),
                value: None,
                origin: None,
                what: error.kind.to_string(),
                hint: "compare it with the example".to_owned(),
            });
            return Document::default();
        };
        // `ONEJOB_REDIS__PREFIX=1` reads as a number, but where a text is wanted it is the text "1".
        let text = texts.iter().rev().find(|text| text.path == path).filter(|_| !matches!(found, Value::String(..)));
        if let (Some(text), Kind::InvalidType(..)) = (text, &error.kind) {
            let value = Value::String(found.tag(), text.text.clone());
            *find_mut(merged, &path).expect("it was just found") = value;
            continue;
        }
        problems.push(problem_of(&error, &path, found, origin_of));
        remove(merged, &path);
        if problems.len() >= PROBLEMS_MAX {
            return Document::default();
        }
    }
}

/// The part of an error's path that leads through tables: the elements of a list are refused as one.
fn path_of(merged: &Dict, error: &[String]) -> Vec<String> {
    let mut path = Vec::new();
    let mut table = Some(merged);
    for name in error {
        let Some(value) = table.and_then(|table| table.get(name)) else { break };
        path.push(name.clone());
        table = value.as_dict();
    }
    path
}

fn find<'a>(merged: &'a Dict, path: &[String]) -> Option<&'a Value> {
    let (last, parents) = path.split_last()?;
    parents.iter().try_fold(merged, |table, name| table.get(name)?.as_dict())?.get(last)
}

fn find_mut<'a>(merged: &'a mut Dict, path: &[String]) -> Option<&'a mut Value> {
    let (last, parents) = path.split_last()?;
    table_mut(merged, parents)?.get_mut(last)
}

fn remove(merged: &mut Dict, path: &[String]) {
    if let Some((last, parents)) = path.split_last()
        && let Some(table) = table_mut(merged, parents)
    {
        table.remove(last);
    }
}

fn table_mut<'a>(merged: &'a mut Dict, path: &[String]) -> Option<&'a mut Dict> {
    path.iter().try_fold(merged, |table, name| match table.get_mut(name)? {
        Value::Dict(_, table) => Some(table),
        _ => None,
    })
}

fn problem_of(error: &figment::Error, path: &[String], found: &Value, origin_of: &dyn Fn(Tag) -> Option<String>) -> Problem {
    let key = path.join(".");
    let (what, hint) = match &error.kind {
        Kind::UnknownField(field, expected) => ("unknown key".to_owned(), near(field, expected)),
        Kind::UnknownVariant(word, expected) => (format!("{word:?} is not known here"), near(word, expected)),
        Kind::MissingField(field) => (format!("{field} is missing"), format!("set {key}.{field}")),
        Kind::InvalidType(_, expected) => {
            let what = match element_of(&error.path[path.len().min(error.path.len())..], found) {
                Some((number, element)) => {
                    format!("number {number} in it is a {}, where something else is wanted", kind(element))
                }
                None => format!("a {} stands where something else is wanted", kind(found)),
            };
            (what, format!("write {}", in_our_words(expected)))
        }
        Kind::InvalidValue(_, expected) | Kind::InvalidLength(_, expected) => {
            ("it does not fit".to_owned(), format!("write {}", in_our_words(expected)))
        }
        Kind::Message(message) => (message.clone(), "see the example for its form".to_owned()),
        Kind::DuplicateField(_)
        | Kind::ISizeOutOfRange(_)
        | Kind::USizeOutOfRange(_)
        | Kind::Unsupported(_)
        | Kind::UnsupportedKey(..) => (error.kind.to_string(), "see the example for its form".to_owned()),
    };
    // The value of an unknown key, or of one around a credential, may be a secret in the wrong place.
    let secret = matches!(error.kind, Kind::UnknownField(..)) || path.iter().any(|name| may_be_secret(name));
    let value = if secret { None } else { show(found) };
    let what = if secret && matches!(error.kind, Kind::UnknownVariant(..) | Kind::Message(_)) {
        "it does not fit".to_owned()
    } else {
        what
    };
    let key = key.escape_debug().to_string();
    Problem { key, value, origin: origin_of(found.tag()).or_else(|| origin_within(found, origin_of)), what, hint }
}

/// The element of a list that the rest of an error's path leads to, and which it is, counted from one.
fn element_of<'a>(rest: &[String], found: &'a Value) -> Option<(usize, &'a Value)> {
    let index = rest.first()?.parse::<usize>().ok()?;
    let Value::Array(_, elements) = found else { return None };
    Some((index + 1, elements.get(index)?))
}

fn origin_within(value: &Value, origin_of: &dyn Fn(Tag) -> Option<String>) -> Option<String> {
    value.as_dict()?.values().find_map(|value| origin_of(value.tag()).or_else(|| origin_within(value, origin_of)))
}

/// Whether the values of a key so named are not to be repeated.
pub(super) fn may_be_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["auth", "key", "secret", "token", "password", "cookie", "credential"].iter().any(|word| name.contains(word))
        && name != "key_life"
}

/// What serde wants, for a person.
fn in_our_words(expected: &str) -> &str {
    match expected {
        "usize" | "u64" | "u32" | "u16" => "a whole number, 0 or more",
        "a boolean" => "true or false",
        "a sequence" => "a list in [ ]",
        "a string" => "a text in quotes",
        "a duration" => "a time with its unit, as in \"30s\"",
        "path string" => "a path in quotes",
        "a time or a percentile" => "a time with its unit, as in \"10s\", or a percentile, as in \"p95\"",
        _ if expected.starts_with("enum ") => "one of its words in quotes; the example has them",
        _ if expected.starts_with("struct ") || expected == "a map" => "a table in { }",
        _ => expected,
    }
}

fn kind(value: &Value) -> &'static str {
    match value.to_actual() {
        Actual::Bool(_) => "truth value",
        Actual::Unsigned(_) | Actual::Signed(_) | Actual::Float(_) => "number",
        Actual::Char(_) | Actual::Str(_) => "text",
        Actual::Seq => "list",
        Actual::Map => "table",
        _ => "value",
    }
}

fn show(value: &Value) -> Option<String> {
    let shown = match value {
        Value::String(_, text) => format!("{:?}", without_credentials(text)),
        Value::Char(_, character) => format!("{character:?}"),
        Value::Bool(_, truth) => truth.to_string(),
        Value::Num(_, number) => number
            .to_i128()
            .map(|n| n.to_string())
            .or_else(|| number.to_u128().map(|n| n.to_string()))
            .or_else(|| number.to_f64().map(|n| n.to_string()))?,
        Value::Array(_, values) => format!("[{}]", values.iter().filter_map(show).collect::<Vec<_>>().join(", ")),
        Value::Empty(..) | Value::Dict(..) => return None,
    };
    Some(shorten(&shown))
}

pub(super) fn shorten(text: &str) -> String {
    if text.chars().count() <= SHOWN_CHARS_MAX {
        return text.to_owned();
    }
    text.chars().take(SHOWN_CHARS_MAX).chain(['…']).collect()
}

/// Says what was probably meant, and else everything that is known.
fn near(word: &str, known: &[&str]) -> String {
    if known.is_empty() {
        return "remove it".to_owned();
    }
    let best = known.iter().min_by_key(|candidate| distance(word, candidate)).expect("it is not empty");
    if distance(word, best) <= 1 + word.len() / 4 {
        return format!("did you mean {best}?");
    }
    format!("known are {}", known.join(", "))
}

/// How many letters must be added, removed or changed to make one word of another.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.chars().take(SHOWN_CHARS_MAX).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let changed = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[to.len()]
}

fn collect_origins(
    table: &Dict,
    prefix: &str,
    origin_of: &dyn Fn(Tag) -> Option<String>,
    origins: &mut BTreeMap<String, String>,
) {
    for (name, value) in table {
        let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        if let Value::Dict(_, table) = value {
            collect_origins(table, &key, origin_of, origins);
        } else if let Some(origin) = origin_of(value.tag()) {
            origins.insert(key, origin);
        }
    }
}
