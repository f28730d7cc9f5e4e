//! What answers could say: very different ones, to find an assertion that none of them breaks.
//!
//! An assertion that always holds proves nothing, and neither does an expression that comes to the same whatever an answer says. That
//! cannot be decided of every expression, so it is tried: with outputs of every kind, with what the expression looks up and compares
//! with, in many combinations, and with the outputs that the suite itself names as bad.

use serde_json::{Map, Value, json};

use super::answer_with;
use crate::validate::Extract;

/// Most texts, and most numbers, of an expression that are tried: the first ones of each.
const LITERALS_TRIED: usize = 8;

/// The bodies of answers that an expression is tried with; `names` are what it looks up, `known` outputs that are named as bad.
pub(super) fn bodies(text: &str, names: &[String], extract: &Extract, known: &[&Value]) -> Vec<Vec<u8>> {
    let values = values(text);
    let paths = |variable: &str| -> Vec<Vec<&str>> {
        let split = names.iter().map(|name| name.split('.').collect::<Vec<_>>());
        split.filter(|path| path[0] == variable && path.len() > 1).map(|path| path[1..].to_vec()).collect()
    };
    let outputs = objects(&paths("output"), &values);
    let mut bodies: Vec<Value> =
        known.iter().copied().chain(&outputs).chain(&values).map(|output| answer_with(extract, output)).collect();
    // What an answer says beside its output.
    for beside in objects(&paths("answer"), &values) {
        let mut body = answer_with(extract, known.first().copied().unwrap_or(&Value::Null));
        match (&mut body, beside) {
            (Value::Object(body), Value::Object(beside)) => {
                for (name, value) in beside {
                    body.entry(name).or_insert(value);
                }
            }
            (body, beside) => *body = beside,
        }
        bodies.push(body);
    }
    bodies.iter().map(|body| body.to_string().into_bytes()).collect()
}

/// Values of every kind, and those that an expression speaks of itself, alone and in lists and objects.
pub(super) fn values(text: &str) -> Vec<Value> {
    let mut values = vec![
        json!(null),
        json!({}),
        json!([]),
        json!(""),
        json!(0),
        json!({ "zq": "what nobody asked for", "n": [7, { "m": null }] }),
        json!("what nobody asked for"),
        json!(true),
        json!(false),
        json!(1),
        json!(-1_000_000_007),
        json!(1_000_000_007),
        json!(0.5),
        json!([1, 2]),
        json!([3]),
        json!(["zq", "zq"]),
        json!([{}]),
    ];
    let (texts, numbers) = literals(text);
    for number in numbers.into_iter().take(LITERALS_TRIED) {
        values.extend([json!(number), json!(number + 1.0), json!(number - 1.0), json!([number])]);
        if number.fract() == 0.0 && number.abs() < 1e15 {
            #[expect(clippy::cast_possible_truncation, reason = "it is whole and small")]
            let whole = number as i64;
            values.extend([json!(whole), json!(whole + 1), json!(whole - 1)]);
        }
    }
    for text in texts.into_iter().take(LITERALS_TRIED) {
        let member = |value: Value| Value::Object(Map::from_iter([(text.clone(), value)]));
        values.extend([json!(text), json!(format!("zq {text} zq")), json!([text]), member(json!(1)), member(json!("zq"))]);
        values.extend([json!([member(json!(1))]), json!([member(json!(2)), member(json!(3))])]);
    }
    values
}

/// Objects with these members: one of the values in all of them, another in each, one in a single one.
fn objects(paths: &[Vec<&str>], values: &[Value]) -> Vec<Value> {
    if paths.is_empty() {
        return Vec::new();
    }
    let object = |value_of: &dyn Fn(usize) -> Option<usize>| {
        let mut object = Value::Object(Map::new());
        for (place, path) in paths.iter().enumerate() {
            if let Some(chosen) = value_of(place) {
                put(&mut object, path, values[chosen % values.len()].clone());
            }
        }
        object
    };
    let mut objects = Vec::new();
    for chosen in 0..values.len() {
        objects.push(object(&|_| Some(chosen)));
        objects.push(object(&|place| Some(chosen + place)));
        objects.extend((0..paths.len()).map(|alone| object(&|place| (place == alone).then_some(chosen))));
    }
    objects
}

/// Puts a value where a path leads; what stands in its way gives way.
pub(super) fn put(object: &mut Value, path: &[&str], value: Value) {
    let Some((name, rest)) = path.split_first() else {
        *object = value;
        return;
    };
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    if let Value::Object(members) = object {
        put(members.entry((*name).to_owned()).or_insert(Value::Null), rest, value);
    }
}

/// The texts and numbers of an expression.
pub(super) fn literals(text: &str) -> (Vec<String>, Vec<f64>) {
    let (mut texts, mut code) = (Vec::new(), String::new());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if !matches!(character, '"' | '\'') {
            code.push(character);
            continue;
        }
        let mut inner = String::new();
        while let Some(next) = characters.next().filter(|next| *next != character) {
            inner.push(if next == '\\' { characters.next().unwrap_or(next) } else { next });
        }
        texts.push(inner);
        code.push(' ');
    }
    let words = code.split(|character: char| !character.is_alphanumeric() && !matches!(character, '_' | '.'));
    (texts, words.filter_map(|word| word.parse().ok()).filter(|number: &f64| number.is_finite()).collect())
}
