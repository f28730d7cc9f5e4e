//! A suite as it is written in YAML, with the lines on which things stand.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use serde_saphyr::{Error, Spanned};

use super::{Finish, ForProvider, Level, Wrong, one_line};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    #[serde(default = "five")]
    pub(super) runs: u32,
    #[serde(default)]
    pub(super) failures_max: u32,
    pub(super) levels: Option<Vec<Level>>,
    pub(super) vary: Option<Vec<String>>,
    #[serde(default = "slash_model")]
    pub(super) model: String,
    #[serde(default)]
    pub(super) path: String,
    pub(super) finish: Option<Finish>,
    #[serde(default)]
    pub(super) parameters: Map<String, Value>,
    #[serde(default)]
    pub(super) providers: BTreeMap<String, Spanned<ForProvider>>,
    #[serde(default)]
    pub(super) cases: Vec<Spanned<WrittenCase>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenCase {
    pub(super) name: String,
    #[serde(default)]
    pub(super) values: Map<String, Value>,
    pub(super) input: Value,
    #[serde(default)]
    pub(super) assert: Vec<Spanned<String>>,
    #[serde(default)]
    pub(super) refuse: Vec<Spanned<Refuse>>,
    #[serde(default)]
    pub(super) relations: Vec<Spanned<WrittenRelation>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Refuse {
    pub(super) output: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenRelation {
    pub(super) shuffle: Option<String>,
    pub(super) replace: Option<Map<String, Value>>,
    pub(super) same: String,
}

fn five() -> u32 {
    5
}

fn slash_model() -> String {
    "/model".to_owned()
}

/// On which line something stands, if that is known.
pub(super) fn line_of<T>(spanned: &Spanned<T>) -> Option<u64> {
    Some(spanned.referenced.line()).filter(|line| *line > 0)
}

impl Written {
    pub(super) fn read(text: &str) -> Result<Self, Wrong> {
        serde_saphyr::from_str(text).map_err(|error| {
            let at = error.location().filter(|location| location.line() > 0);
            let error = error.without_snippet();
            let key = at.filter(|_| is_of_type(error)).and_then(|at| key_at(text, at.line(), at.column()));
            let what = match key.map(|key| (key, KEYS.iter().find(|(name, ..)| *name == key))) {
                Some((key, Some((_, kind, example)))) => format!("{key}: it must be {kind}, as in {key}: {example}"),
                Some((key, None)) => format!("{}: {}", one_line(key), one_line(&error.to_string())),
                None => one_line(&error.to_string()),
            };
            Wrong { line: at.map(|at| at.line()), what }
        })
    }
}

/// Whether what stands there is of another kind than what belongs there.
fn is_of_type(error: &Error) -> bool {
    matches!(
        error,
        Error::Unexpected { .. } | Error::InvalidScalar { .. } | Error::SerdeInvalidType { .. } | Error::SerdeInvalidValue { .. }
    )
}

/// The key to which the value at a place belongs: the last one before it on its line, or above it where a line is less indented.
fn key_at(text: &str, line: u64, column: u64) -> Option<&str> {
    let (line, column) = (usize::try_from(line).ok()?, usize::try_from(column).ok()?);
    let lines: Vec<&str> = text.lines().take(line).collect();
    let last = *lines.get(line - 1)?;
    let end = last.char_indices().nth(column.saturating_sub(1)).map_or(last.len(), |(end, _)| end);
    let mut indent = last.len() - last.trim_start_matches([' ', '-']).len();
    last_key(&last[..end]).or_else(|| {
        lines[..line - 1].iter().rev().find_map(|line| {
            let here = line.len() - line.trim_start_matches([' ', '-']).len();
            let is_above = !line.trim().is_empty() && (here < indent || line.trim_end().ends_with(':') && here <= indent);
            if !is_above {
                return None;
            }
            indent = here;
            last_key(line)
        })
    })
}

/// The last word of a line with a colon behind it.
fn last_key(line: &str) -> Option<&str> {
    let before =
        line[..line.rfind(": ").or_else(|| line.trim_end().strip_suffix(':').map(str::len))?].trim_end_matches(['"', '\'']);
    let begin = before.rfind(|character: char| !character.is_alphanumeric() && character != '_').map_or(0, |at| at + 1);
    before.get(begin..).filter(|key| !key.is_empty())
}

/// The keys of a suite, what belongs there, and an example.
const KEYS: [(&str, &str, &str); 20] = [
    ("allowed", "a list of words", "[stop]"),
    ("assert", "a list of expressions", "[output.total == 12]"),
    ("cases", "a list of cases", "[{ name: adds, input: { n: 1 }, assert: [output.total == 12] }]"),
    ("failures_max", "a whole number of 0 or more", "0"),
    ("finish", "a pointer and the words that are good", "{ pointer: /choices/0/finish_reason, allowed: [stop] }"),
    ("levels", "a list of levels", "[structure, meaning]"),
    ("model", "a JSON pointer", "/model"),
    ("name", "a text", "adds"),
    ("parameters", "members of every request", "{ temperature: 0 }"),
    ("path", "a text", "/chat/completions"),
    ("pointer", "a JSON pointer", "/choices/0/finish_reason"),
    ("providers", "parameters by the provider's name", "{ second: { parameters: { temperature: 0.01 } } }"),
    ("refuse", "a list of known-bad outputs", "[{ output: { total: 13 } }]"),
    ("relations", "a list of relations", "[{ shuffle: items, same: output.total }]"),
    ("replace", "other values", "{ items: [6, 6] }"),
    ("runs", "a whole number of 1 or more", "5"),
    ("same", "an expression", "output.total"),
    ("shuffle", "the name of a value", "items"),
    ("values", "values by their names", "{ items: [3, 4, 5] }"),
    ("vary", "a list of JSON pointers", "[/messages]"),
];
