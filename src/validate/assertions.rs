//! Assertions: expressions that must be true of an input and an output.
//!
//! Strict: what is not defined is a fault, not an empty text. Names of filters, tests and variables that do not exist are told when
//! an assertion is compiled, where the engine itself would wait for the first answer. An integer is exact to 128 bits; any other
//! number is a double, but `sum` adds decimals as they are written, so that `[0.1, 0.2] | sum == 0.3`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Expression as Compiled, State, UndefinedBehavior, Value};

use super::{ASSERTION_BYTES_MAX, FUEL_MAX, Fault, Of, shorten};

/// The engine, without functions: those that it has make lists out of nothing.
static ENGINE: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut engine = Environment::new();
    engine.set_undefined_behavior(UndefinedBehavior::Strict);
    engine.set_fuel(Some(FUEL_MAX));
    let globals: Vec<String> = engine.globals().map(|(name, _)| name.to_owned()).collect();
    for name in globals {
        engine.remove_global(&name);
    }
    engine.add_filter("sum", sum);
    engine
});

/// One assertion.
pub(super) struct Assertion {
    text: String,
    expression: Compiled<'static, 'static>,
    speaks_of: BTreeSet<String>,
}

impl Assertion {
    pub(super) fn compile(of: Of, text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("it is empty".to_owned());
        }
        if text.len() > ASSERTION_BYTES_MAX {
            return Err(format!("it has {} bytes; the limit is {ASSERTION_BYTES_MAX}", text.len()));
        }
        let expression = ENGINE.compile_expression_owned(text.to_owned()).map_err(|error| {
            let detail = error.detail().unwrap_or("it is no expression");
            format!("{}: {}", shorten(text), shorten(detail))
        })?;
        let speaks_of: BTreeSet<String> = expression.undeclared_variables(false).into_iter().collect();
        let known: &[&str] = match of {
            Of::Input => &["input"],
            Of::Output => &["input", "output", "answer"],
        };
        if let Some(unknown) = speaks_of.iter().find(|name| !known.contains(&name.as_str())) {
            return Err(format!("{}: there is no {}; known are {}", shorten(text), shorten(unknown), known.join(", ")));
        }
        if speaks_of.is_empty() {
            return Err(format!("{}: it speaks of nothing; known are {}", shorten(text), known.join(", ")));
        }
        for (kind, name) in called(text) {
            let exists = ENGINE.compile_expression_owned(format!("{name:?} is {kind}")).and_then(|exists| exists.eval(()));
            if !exists.is_ok_and(|exists| exists.is_true()) {
                return Err(format!("{}: there is no {kind} {}", shorten(text), shorten(&name)));
            }
        }
        Ok(Assertion { text: text.to_owned(), expression, speaks_of })
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn speaks_of(&self, name: &str) -> bool {
        self.speaks_of.contains(name)
    }

    /// What it looks up by itself, as `output.total`: variables with their members, in order.
    fn names(&self) -> Vec<String> {
        self.expression.undeclared_variables(true).into_iter().collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// What is wrong, if the assertion does not hold.
    pub(super) fn fault(&self, number: usize, context: &Context) -> Option<Fault> {
        let what = match self.expression.eval(Value::from(context.0.clone())) {
            Ok(held) if held.kind() == ValueKind::Bool && held.is_true() => return None,
            Ok(held) if held.kind() == ValueKind::Bool => "does not hold".to_owned(),
            Ok(other) => format!("comes to a {}, not to true or false", other.kind()),
            // The kind alone: details may repeat a value.
            Err(error) => format!("cannot be judged: {}", error.kind()),
        };
        Some(Fault::new("", &format!("assertion {number}"), format!("{what}: {}", self.text)))
    }
}

/// An expression over an input and an output that comes to any value.
pub struct Expression {
    assertion: Assertion,
    /// Whether a name is there, for each that it looks up by itself; none where it says what is to be if one is not.
    wanted: Vec<(String, Compiled<'static, 'static>)>,
}

impl Expression {
    /// Compiles it, as assertions are.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn compile(text: &str) -> Result<Self, String> {
        let assertion = Assertion::compile(Of::Output, text)?;
        let copes = called(text).iter().any(|(_, name)| matches!(name.as_str(), "default" | "d" | "defined" | "undefined"));
        let names = if copes { Vec::new() } else { assertion.names() };
        let wanted = names.into_iter().filter_map(|name| {
            let is_there = ENGINE.compile_expression_owned(format!("{name} is defined")).ok()?;
            Some((name, is_there))
        });
        Ok(Expression { wanted: wanted.collect(), assertion })
    }

    /// What it looks up by itself, as `output.total`.
    pub(crate) fn names(&self) -> Vec<String> {
        self.assertion.names()
    }

    pub(super) fn speaks_of(&self, name: &str) -> bool {
        self.assertion.speaks_of(name)
    }

    /// What is not there comes to nothing, not to something that could be equal to nothing else.
    pub(super) fn comes_to(&self, context: &Context) -> Result<String, String> {
        let context = Value::from(context.0.clone());
        let is_there = |expression: &Compiled<'_, '_>| expression.eval(context.clone()).is_ok_and(|is_there| is_there.is_true());
        if let Some((name, _)) = self.wanted.iter().find(|(_, expression)| !is_there(expression)) {
            return Err(format!("cannot be judged: there is no {}", shorten(name)));
        }
        match self.assertion.expression.eval(context) {
            Ok(value) if has_undefined(&value) => Err(format!("cannot be judged: {} comes to what is not there", self)),
            Ok(value) => serde_json::to_string(&value).map_err(|_| "it comes to what cannot be compared".to_owned()),
            Err(error) => Err(format!("cannot be judged: {}", error.kind())),
        }
    }
}

/// Whether something in it is not there.
fn has_undefined(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined => true,
        ValueKind::Seq | ValueKind::Iterable => value.try_iter().is_ok_and(|mut items| items.any(|item| has_undefined(&item))),
        ValueKind::Map => value.try_iter().is_ok_and(|mut keys| {
            keys.any(|key| has_undefined(&key) || value.get_item(&key).is_ok_and(|member| has_undefined(&member)))
        }),
        _ => false,
    }
}

impl std::fmt::Debug for Expression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Expression").field(&self.assertion.text).finish()
    }
}

impl std::fmt::Display for Expression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.assertion.text)
    }
}

/// What an assertion sees.
#[derive(Default)]
pub(super) struct Context(BTreeMap<&'static str, Value>);

impl Context {
    pub(super) fn with(mut self, name: &'static str, value: &serde_json::Value) -> Result<Self, Fault> {
        let value = engine_value(value).ok_or_else(|| {
            Fault::new("", "number", format!("the {name} has a number that neither 128 bits nor a double hold"))
        })?;
        self.0.insert(name, value);
        Ok(self)
    }
}

/// JSON as the engine sees it. Not by serde: it would show numbers as serde_json keeps them, as objects. `None` for a number that
/// the engine cannot hold.
pub(crate) fn engine_value(value: &serde_json::Value) -> Option<Value> {
    Some(match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(truth) => Value::from(*truth),
        serde_json::Value::Number(number) => engine_number(number.as_str())?,
        serde_json::Value::String(text) => Value::from(Arc::<str>::from(text.as_str())),
        serde_json::Value::Array(items) => Value::from(items.iter().map(engine_value).collect::<Option<Vec<_>>>()?),
        serde_json::Value::Object(members) => {
            let member = |(name, member): (&String, &serde_json::Value)| Some((name.clone(), engine_value(member)?));
            Value::from(members.iter().map(member).collect::<Option<BTreeMap<_, _>>>()?)
        }
    })
}

fn engine_number(digits: &str) -> Option<Value> {
    if digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-') {
        let small = digits.parse::<i64>().map(Value::from);
        return small.or_else(|_| digits.parse::<i128>().map(Value::from)).ok();
    }
    digits.parse::<f64>().ok().filter(|number| number.is_finite()).map(Value::from)
}

/// `sum` in place of the engine's own: decimals are added as they are written, and the sum is the double that is next to it.
fn sum(state: &State<'_, '_>, items: Value, options: Kwargs) -> Result<Value, Error> {
    options.assert_all_used()?;
    let mut exact = Some(Decimal::default());
    let (mut doubles, mut all_whole) = (0.0, true);
    for item in items.try_iter()? {
        state.consume_fuel(1)?;
        if item.kind() != ValueKind::Number {
            return Err(Error::new(ErrorKind::InvalidOperation, "sum wants numbers"));
        }
        let double = f64::try_from(item.clone())?;
        doubles += double;
        let decimal = match i128::try_from(item.clone()) {
            Ok(whole) if item.is_integer() => Some(Decimal { digits: whole, places: 0 }),
            _ => {
                all_whole = false;
                Decimal::of(double)
            }
        };
        exact = exact.zip(decimal).and_then(|(sum, item)| sum.plus(item));
    }
    match exact {
        Some(sum) if all_whole => Ok(Value::from(sum.digits)),
        Some(sum) => Ok(Value::from(sum.double())),
        // Too far apart for exact digits.
        None => Ok(Value::from(doubles)),
    }
}

/// `digits` × 10^-`places`.
#[derive(Clone, Copy, Default)]
struct Decimal {
    digits: i128,
    places: u32,
}

impl Decimal {
    /// The shortest decimal that is read as this double.
    fn of(double: f64) -> Option<Self> {
        let text = double.to_string();
        let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
        let digits = format!("{whole}{fraction}").parse().ok()?;
        Some(Decimal { digits, places: u32::try_from(fraction.len()).ok()? })
    }

    fn plus(self, other: Self) -> Option<Self> {
        let places = self.places.max(other.places);
        let scaled = |one: Decimal| one.digits.checked_mul(10_i128.checked_pow(places - one.places)?);
        Some(Decimal { digits: scaled(self)?.checked_add(scaled(other)?)?, places })
    }

    fn double(self) -> f64 {
        format!("{}e-{}", self.digits, self.places).parse().unwrap_or(f64::NAN)
    }
}

/// The filters and tests that an expression names itself: `| name`, `is name`, `is not name`.
fn called(text: &str) -> Vec<(&'static str, String)> {
    let tokens = tokens(text);
    let mut called = Vec::new();
    for (place, token) in tokens.iter().enumerate() {
        let kind = match token.as_str() {
            "|" => "filter",
            "is" if place == 0 || tokens[place - 1] != "." => "test",
            _ => continue,
        };
        let next = tokens.get(place + 1).filter(|next| kind == "filter" || *next != "not").or(tokens.get(place + 2));
        if let Some(name) = next.filter(|name| name.starts_with(is_name_start)) {
            called.push((kind, name.clone()));
        }
    }
    called
}

fn is_name_start(character: char) -> bool {
    character.is_alphabetic() || character == '_'
}

/// Names, and every other character that is no white space, for itself. Strings are left out.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        if matches!(character, '"' | '\'') {
            while let Some(inner) = characters.next() {
                match inner {
                    '\\' => drop(characters.next()),
                    _ if inner == character => break,
                    _ => {}
                }
            }
            tokens.push("\"".to_owned());
        } else if is_name_start(character) || character.is_ascii_digit() {
            let mut name = String::from(character);
            while let Some(next) = characters.next_if(|next| next.is_alphanumeric() || *next == '_') {
                name.push(next);
            }
            tokens.push(name);
        } else if !character.is_whitespace() {
            tokens.push(character.to_string());
        }
    }
    tokens
}
