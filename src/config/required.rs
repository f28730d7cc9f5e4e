//! What a route requires of inputs and outputs, as it is written: files and expressions, read and compiled with the configuration.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize, Serializer};

use super::Route;
use super::check::{Checker, is_pointer};
use crate::validate::{
    ASSERTION_BYTES_MAX, ASSERTIONS_MAX, Check, Extract, Of, Parse, Part, Required, SCHEMA_BYTES_MAX, Validator,
};

/// Largest file of assertions: all that there may be, and as much again for comments.
const ASSERTIONS_BYTES_MAX: usize = 2 * ASSERTIONS_MAX * ASSERTION_BYTES_MAX;

/// What is required of a request before its job is made.
#[derive(Clone, Debug, Default, DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct InputEntry {
    /// A file with a JSON Schema (2020-12).
    pub schema: Option<PathBuf>,
    /// Expressions over `input` that must be true.
    pub assertions: Assertions,
}

/// What is required of an answer before it becomes the job's result.
#[derive(Clone, Debug, Default, DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutputEntry {
    /// A file with a JSON Schema (2020-12).
    pub schema: Option<PathBuf>,
    /// Expressions over `input`, `output` and `answer` that must be true.
    pub assertions: Assertions,
    /// Where in the answer the output is, as a JSON pointer. Absent: the whole answer.
    pub pointer: Option<String>,
    /// What stands there.
    pub parse: Parse,
}

/// Expressions: in a list, or in a file with one on each line, where a line that begins with `#` is a comment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Assertions {
    /// Written in the configuration.
    List(Vec<String>),
    /// Written in a file.
    File(PathBuf),
}

impl Default for Assertions {
    fn default() -> Self {
        Assertions::List(Vec::new())
    }
}

impl Assertions {
    fn is_empty(&self) -> bool {
        matches!(self, Assertions::List(list) if list.is_empty())
    }
}

impl Serialize for Assertions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Assertions::List(list) => list.serialize(serializer),
            Assertions::File(file) => file.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Assertions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AssertionsVisitor)
    }
}

struct AssertionsVisitor;

impl<'de> Visitor<'de> for AssertionsVisitor {
    type Value = Assertions;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of texts in [ ], or the name of a file in quotes")
    }

    fn visit_str<E: de::Error>(self, file: &str) -> Result<Assertions, E> {
        Ok(Assertions::File(PathBuf::from(file)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Assertions, A::Error> {
        let mut list = Vec::new();
        while let Some(text) = items.next_element::<String>()? {
            list.push(text);
        }
        Ok(Assertions::List(list))
    }
}

impl Checker<'_> {
    /// Reads and compiles what a route requires.
    pub(super) fn required(&mut self, key: &str, route: &Route) -> Option<Validator> {
        let mut validator = Validator::default();
        if let Some(InputEntry { schema, assertions }) = &route.input {
            validator.input = self.compiled(&format!("{key}.input"), Of::Input, schema.as_deref(), assertions);
        }
        if let Some(OutputEntry { schema, assertions, pointer, parse }) = &route.output {
            let key = format!("{key}.output");
            validator.output = self.compiled(&key, Of::Output, schema.as_deref(), assertions);
            if let Some(pointer) = pointer.as_deref().filter(|pointer| !is_pointer(pointer)) {
                let what = "it is no JSON pointer to a part of the answer (RFC 6901)";
                self.refuse(&format!("{key}.pointer"), Some(&pointer.escape_debug()), what, "as in /choices/0/message/content");
            }
            if *parse == Parse::Json && pointer.is_none() {
                let what = "the answer itself is JSON; it is a text in it that is to be parsed";
                self.refuse(&format!("{key}.parse"), Some(&"json"), what, "name its place by pointer, or leave it out");
            }
            validator.extract = Extract { pointer: pointer.clone().unwrap_or_default(), parse: *parse };
        }
        (validator.input.is_some() || validator.output.is_some()).then_some(validator)
    }

    fn compiled(&mut self, key: &str, of: Of, schema: Option<&Path>, assertions: &Assertions) -> Option<Check> {
        if schema.is_none() && assertions.is_empty() {
            self.refuse(key, None, "nothing is required", "name a schema or assertions, or leave it out");
            return None;
        }
        let (schema_key, assertions_key) = (format!("{key}.schema"), format!("{key}.assertions"));
        let text = match schema.map(|file| read(file, SCHEMA_BYTES_MAX)).transpose() {
            Ok(text) => text,
            Err(why) => {
                let shown = schema.map(|file| file.display().to_string()).unwrap_or_default();
                self.refuse(&schema_key, Some(&shown), why, "name a file with a JSON Schema");
                return None;
            }
        };
        let list = match assertions {
            Assertions::List(list) => list.clone(),
            Assertions::File(file) => match read(file, ASSERTIONS_BYTES_MAX).and_then(|text| lines(&text)) {
                Ok(list) => list,
                Err(why) => {
                    self.refuse(&assertions_key, Some(&file.display()), why, "name a file with one expression on each line");
                    return None;
                }
            },
        };
        match Check::compile(of, &Required { schema: text.as_deref(), assertions: &list }) {
            Ok(check) => Some(check),
            Err(refused) => {
                for one in refused {
                    match one.part {
                        Part::Schema => {
                            let shown = schema.map(|file| file.display().to_string()).unwrap_or_default();
                            self.refuse(&schema_key, Some(&shown), one.what, "correct the schema");
                        }
                        Part::Assertions => {
                            let shown = match assertions {
                                Assertions::List(_) => None,
                                Assertions::File(file) => Some(file.display().to_string()),
                            };
                            let shown = shown.as_ref().map(|shown| shown as &dyn fmt::Display);
                            self.refuse(&assertions_key, shown, one.what, "correct the assertion");
                        }
                    }
                }
                None
            }
        }
    }
}

/// Reads a file within a limit.
pub(super) fn read(file: &Path, bytes_max: usize) -> Result<Vec<u8>, String> {
    let refused = |error: std::io::Error| format!("it cannot be read{}: {error}", from_where(file));
    let open = std::fs::File::open(file).map_err(refused)?;
    let mut text = Vec::new();
    open.take(bytes_max as u64 + 1).read_to_end(&mut text).map_err(refused)?;
    if text.len() > bytes_max { Err(format!("it has more than {bytes_max} bytes, the limit")) } else { Ok(text) }
}

/// From where a path is looked up, if it does not say so itself.
fn from_where(file: &Path) -> String {
    let from = if file.is_absolute() { None } else { std::env::current_dir().ok() };
    from.map_or_else(String::new, |from| format!(" from the working directory {}", from.display()))
}

/// The expressions of a file.
fn lines(text: &[u8]) -> Result<Vec<String>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "it is no text in UTF-8".to_owned())?;
    let list: Vec<String> =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect();
    if list.is_empty() { Err("it has no expression".to_owned()) } else { Ok(list) }
}
