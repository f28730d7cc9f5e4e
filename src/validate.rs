//! What a route requires of its inputs and of its providers' answers: a JSON Schema, and assertions over both.
//!
//! Everything is compiled once, when a configuration is loaded, and what is wrong with it is told then. A check is a pure function
//! of the bytes: no clock, no I/O, nothing remembered. Each is bounded: bytes, values, depth, patterns in linear time, a budget for
//! expressions, how much is told. What is told names the place and the rule, and never repeats a value: it may be private.
//!
//! Deliberately not here: where the texts come from (`config`), what an invalid answer means (`runtime/checks.rs`), and schemas from
//! elsewhere. A reference leads within its own document or nowhere.
//!
//! The schema is JSON Schema 2020-12 with formats asserted. Assertions are expressions of Jinja over `input`, `output` and
//! `answer`; each must come to true or false.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

mod assertions;
mod json;
mod schema;
mod stream;

pub use assertions::Expression;
pub(crate) use assertions::engine_value;
pub use stream::gathered;

use assertions::{Assertion, Context};
use schema::Schema;

/// Largest body that is checked: a tree of it takes many times its size in memory. A larger one is invalid.
pub const CHECKED_BYTES_MAX: usize = 16 << 20;
/// Most values in a body that is checked, for the same reason.
pub const VALUES_MAX: usize = 1 << 20;
/// Longest number in a body that is checked, in characters: arithmetic grows with the square of it. Every double fits.
pub const NUMBER_CHARS_MAX: usize = 1100;
/// Largest schema: more is no schema that a person wrote.
pub const SCHEMA_BYTES_MAX: usize = 1 << 20;
/// Largest compiled pattern of a schema, in bytes of the regular expression's program.
pub const PATTERN_BYTES_MAX: usize = 1 << 20;
/// Most assertions of one list, and the longest one.
pub const ASSERTIONS_MAX: usize = 64;
/// Longest assertion, in bytes.
pub const ASSERTION_BYTES_MAX: usize = 4 << 10;
/// The budget of one assertion: about one unit for each step and each item that it looks at. Some seconds at the most.
pub const FUEL_MAX: u64 = 10_000_000;
/// Most faults that are told of one body.
pub const FAULTS_MAX: usize = 5;
/// Longest part of one fault that is told, in characters.
pub const FAULT_CHARS_MAX: usize = 160;

/// What is required of a document, as it is written.
#[derive(Clone, Debug, Default)]
pub struct Required<'a> {
    /// A JSON Schema's text.
    pub schema: Option<&'a [u8]>,
    /// Expressions that must be true.
    pub assertions: &'a [String],
}

/// Where in an answer the output is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extract {
    /// A JSON pointer; `""` for the whole answer.
    pub pointer: String,
    /// What stands there.
    pub parse: Parse,
}

/// What stands where an output is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Parse {
    /// The output itself.
    #[default]
    AsIs,
    /// A text that is the output in JSON, as language models answer.
    Json,
}

/// What is wrong with what is required.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Of which part.
    pub part: Part,
    /// What is wrong, with its place.
    pub what: String,
}

/// A part of what is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The schema.
    Schema,
    /// The assertions.
    Assertions,
}

/// Whose document it is: decides what assertions may speak of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// What a client asks for; its assertions see `input`.
    Input,
    /// What a provider answered; its assertions see `input`, `output` and `answer`.
    Output,
}

/// What is required of one kind of document, compiled.
pub struct Check {
    schema: Option<Schema>,
    schema_text: String,
    assertions: Vec<Assertion>,
}

impl Check {
    /// Compiles what is required.
    ///
    /// # Errors
    /// Everything that is wrong with it, for whoever wrote it.
    pub fn compile(of: Of, required: &Required<'_>) -> Result<Self, Vec<Refused>> {
        let mut refused = Vec::new();
        let schema = required.schema.and_then(|text| match Schema::compile(text) {
            Ok(schema) => Some(schema),
            Err(what) => {
                refused.push(Refused { part: Part::Schema, what });
                None
            }
        });
        if required.assertions.len() > ASSERTIONS_MAX {
            let what = format!("there are {}; the limit is {ASSERTIONS_MAX}", required.assertions.len());
            return Err(vec![Refused { part: Part::Assertions, what }]);
        }
        let mut assertions = Vec::new();
        for (place, text) in required.assertions.iter().enumerate() {
            match Assertion::compile(of, text) {
                Ok(assertion) => assertions.push(assertion),
                Err(what) => refused.push(Refused { part: Part::Assertions, what: format!("assertion {}: {what}", place + 1) }),
            }
        }
        let schema_text = required.schema.map(|text| String::from_utf8_lossy(text).into_owned()).unwrap_or_default();
        if refused.is_empty() { Ok(Check { schema, schema_text, assertions }) } else { Err(refused) }
    }

    /// The schema as it was written; `""` for none.
    pub fn schema_text(&self) -> &str {
        &self.schema_text
    }

    /// The assertions as they were written.
    pub fn assertion_texts(&self) -> Vec<&str> {
        self.assertions.iter().map(Assertion::text).collect()
    }

    fn speaks_of(&self, name: &str) -> bool {
        self.assertions.iter().any(|assertion| assertion.speaks_of(name))
    }

    fn check(&self, value: &Value, context: impl FnOnce() -> Result<Context, Fault>) -> Result<(), Invalid> {
        if let Some(schema) = &self.schema {
            schema.check(value)?;
        }
        if self.assertions.is_empty() {
            return Ok(());
        }
        let context = context().map_err(Invalid::of)?;
        let broken = |(place, assertion): (usize, &Assertion)| assertion.fault(place + 1, &context);
        let faults: Vec<Fault> = self.assertions.iter().enumerate().filter_map(broken).take(FAULTS_MAX).collect();
        if faults.is_empty() { Ok(()) } else { Err(Invalid { faults }) }
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (schema, assertions) = (self.schema.is_some(), self.assertions.len());
        f.debug_struct("Check").field("schema", &schema).field("assertions", &assertions).finish()
    }
}

/// A provider's answer, as far as it is checked.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// Its content coding, if it is in one: then it cannot be read.
    pub content_encoding: Option<&'a str>,
    /// Its body.
    pub body: &'a [u8],
}

/// What a route requires, compiled.
#[derive(Debug, Default)]
pub struct Validator {
    /// Of what is asked for.
    pub input: Option<Check>,
    /// Of what is answered.
    pub output: Option<Check>,
    /// Where in the answer the output is.
    pub extract: Extract,
}

impl Validator {
    /// Whether anything is required of answers.
    pub fn is_for_outputs(&self) -> bool {
        self.output.is_some()
    }

    /// Checks a request's body, before anything is done about it.
    ///
    /// An output's assertions may speak of the input; then it must be JSON too.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_input(&self, input: &[u8]) -> Result<(), Invalid> {
        let spoken_of = self.output.as_ref().is_some_and(|output| output.speaks_of("input"));
        if self.input.is_none() && !spoken_of {
            return Ok(());
        }
        let value = json::read(input).map_err(|what| Invalid::of(Fault::new("", "json", what)))?;
        let context = || Context::default().with("input", &value);
        match &self.input {
            Some(check) => check.check(&value, context),
            // What the assertions will need of it later is found out now.
            None => context().map(drop).map_err(Invalid::of),
        }
    }

    /// Checks a complete answer to a request.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_output(&self, input: &[u8], answer: Answer<'_>) -> Result<(), Invalid> {
        let Some(check) = &self.output else { return Ok(()) };
        self.with_output(answer, |whole, output| {
            check.check(output, || context_of(input, output, whole, |name| check.speaks_of(name)))
        })
    }

    /// What an expression comes to for a complete answer to a request, written in one way: equal texts are equal values.
    ///
    /// # Errors
    /// It cannot be judged.
    pub fn comes_to(&self, expression: &Expression, input: &[u8], answer: Answer<'_>) -> Result<String, Invalid> {
        self.with_output(answer, |whole, output| {
            let context = context_of(input, output, whole, |name| expression.speaks_of(name)).map_err(Invalid::of)?;
            expression.comes_to(&context).map_err(|what| Invalid::of(Fault::new("", "expression", what)))
        })
    }

    /// Judges the output of an answer, beside the whole of it.
    fn with_output<T>(&self, answer: Answer<'_>, judge: impl FnOnce(&Value, &Value) -> Result<T, Invalid>) -> Result<T, Invalid> {
        if let Some(coding) = answer.content_encoding {
            return Err(Invalid::of(Fault::new("", "json", format!("its body is in the content coding {coding}"))));
        }
        // What a stream says in parts is judged as if it had been said at once.
        let gathered = gathered(answer.body);
        let body = gathered.as_deref().unwrap_or(answer.body);
        let whole = json::read(body).map_err(|what| Invalid::of(Fault::new("", "json", what)))?;
        match self.extract.find(&whole).map_err(Invalid::of)? {
            Found::Value(output) => judge(&whole, output),
            Found::Text(text) => {
                let broken = |what| Invalid::of(Fault::new(&self.extract.pointer, "json", format!("the text there: {what}")));
                judge(&whole, &json::read(text.as_bytes()).map_err(broken)?)
            }
        }
    }
}

fn context_of(input: &[u8], output: &Value, whole: &Value, speaks_of: impl Fn(&str) -> bool) -> Result<Context, Fault> {
    let mut context = Context::default().with("output", output)?;
    if speaks_of("answer") {
        context = context.with("answer", whole)?;
    }
    if speaks_of("input") {
        let input = json::read(input).map_err(|what| Fault::new("", "input", what))?;
        context = context.with("input", &input)?;
    }
    Ok(context)
}

enum Found<'a> {
    Value(&'a Value),
    Text(&'a str),
}

impl Extract {
    fn find<'a>(&self, answer: &'a Value) -> Result<Found<'a>, Fault> {
        let Some(value) = answer.pointer(&self.pointer) else {
            return Err(Fault::new(&self.pointer, "pointer", "nothing is there".to_owned()));
        };
        match (self.parse, value) {
            (Parse::AsIs, value) => Ok(Found::Value(value)),
            (Parse::Json, Value::String(text)) => Ok(Found::Text(text)),
            (Parse::Json, _) => Err(Fault::new(&self.pointer, "pointer", "what is there is no text".to_owned())),
        }
    }
}

/// One thing that is wrong with a document. It repeats no value of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// Where, as a JSON pointer into the document; `""` for all of it.
    pub pointer: String,
    /// The rule that it breaks: a keyword of the schema, `assertion 1`, `json` for what is no JSON, `pointer` for what is not where it
    /// should be.
    pub rule: String,
    /// What is wrong, in words.
    pub what: String,
}

impl Fault {
    fn new(pointer: &str, rule: &str, what: String) -> Self {
        Fault { pointer: shorten(pointer), rule: shorten(rule), what: shorten(&what) }
    }

    /// Of a check that could not be made at all.
    pub(crate) fn broken() -> Self {
        Fault::new("", "check", "it broke".to_owned())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { pointer, rule, what } = self;
        if pointer.is_empty() { write!(f, "{rule}: {what}") } else { write!(f, "{pointer}: {rule}: {what}") }
    }
}

/// A document that breaks what is required of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// What is wrong with it, 1 to [`FAULTS_MAX`].
    pub faults: Vec<Fault>,
}

impl Invalid {
    /// Of one fault.
    pub fn of(fault: Fault) -> Self {
        Invalid { faults: vec![fault] }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, fault) in self.faults.iter().enumerate() {
            let between = if place == 0 { "" } else { "; " };
            write!(f, "{between}{fault}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Invalid {}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(FAULT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests;
