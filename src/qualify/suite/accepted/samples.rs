//! Values made from a schema: different ones where an expression looks, few elsewhere.
//!
//! They are candidates: whether the schema accepts one is found out with the schema itself. Schemas that cannot be sampled well are
//! marked where it matters (`in_doubt`).

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::validate::{Answer, Check, Of, Required, Validator};

/// Most samples of one schema.
const SAMPLES_TRIED: usize = 2000;
/// Most combinations of all that is looked at in one object.
const COMBINATIONS: usize = 1000;
/// Samples of what no expression looks at.
const ASIDE: usize = 3;
/// How deep a schema is followed.
const DEPTH_TRIED: usize = 6;
/// Most texts, and most numbers, of an expression that are tried.
const LITERALS_TRIED: usize = 16;
/// Longest list or text that is made because an expression speaks of its length.
pub(super) const LENGTH_TRIED: f64 = 2000.0;
/// Longest one that is made because the schema wants it so long.
const LENGTH_MADE: usize = 2000;
/// What says nothing of a value.
const NOTES: [&str; 11] = [
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
];

/// The keywords that are understood, or that only take samples away.
const UNDERSTOOD: [&str; 42] = [
    "$comment",
    "$defs",
    "$id",
    "$ref",
    "$schema",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "default",
    "definitions",
    "deprecated",
    "description",
    "else",
    "enum",
    "examples",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "prefixItems",
    "properties",
    "readOnly",
    "required",
    "then",
    "title",
    "type",
    "unevaluatedProperties",
    "uniqueItems",
];

/// Where an expression looks in a value.
pub(super) enum Focus<'a> {
    /// At the value, and so at all in it.
    Here,
    /// At members of it.
    Along(Vec<&'a [&'a str]>),
    /// Elsewhere.
    Aside,
}

impl<'a> Focus<'a> {
    pub(super) fn of(paths: &'a [Vec<&'a str>]) -> Self {
        Focus::along(paths.iter().map(Vec::as_slice).collect())
    }

    fn along(paths: Vec<&'a [&'a str]>) -> Self {
        match (paths.is_empty(), paths.iter().any(|path| path.is_empty())) {
            (true, _) => Focus::Aside,
            (false, true) => Focus::Here,
            (false, false) => Focus::Along(paths),
        }
    }

    fn at(&self, member: &str) -> Self {
        match self {
            Focus::Here => Focus::Here,
            Focus::Aside => Focus::Aside,
            Focus::Along(paths) => Focus::along(paths.iter().filter(|path| path[0] == member).map(|path| &path[1..]).collect()),
        }
    }

    /// The items of a list are looked at by filters, under whatever name.
    fn in_items(&self) -> Self {
        if self.is_aside() { Focus::Aside } else { Focus::Here }
    }

    fn is_aside(&self) -> bool {
        matches!(self, Focus::Aside)
    }

    fn members(&self) -> Vec<&'a str> {
        match self {
            Focus::Along(paths) => paths.iter().map(|path| path[0]).collect(),
            Focus::Here | Focus::Aside => Vec::new(),
        }
    }
}

/// What makes samples of the schemas in a document.
pub(super) struct Samples<'a> {
    root: &'a Value,
    texts: Vec<String>,
    numbers: Vec<f64>,
    /// Whether they are no fair trial of what is looked at.
    pub(super) in_doubt: bool,
}

/// A member of an object that is made.
struct Member {
    name: String,
    is_required: bool,
    is_looked_at: bool,
    samples: Vec<Value>,
}

impl<'a> Samples<'a> {
    /// With these texts and numbers beside those that are always tried.
    pub(super) fn new(root: &'a Value, (texts, numbers): (Vec<String>, Vec<f64>)) -> Self {
        let texts = texts.into_iter().take(LITERALS_TRIED).collect();
        Samples { root, texts, numbers: numbers.into_iter().take(LITERALS_TRIED).collect(), in_doubt: false }
    }

    /// Samples of a schema, the most usual first.
    pub(super) fn of(&mut self, schema: &Value, focus: &Focus<'_>, depth: usize) -> Vec<Value> {
        let Some(schema) = merged(self.root, schema, DEPTH_TRIED) else {
            self.in_doubt |= !focus.is_aside();
            return Vec::new();
        };
        if schema == Value::Bool(false) {
            return Vec::new();
        }
        if depth > DEPTH_TRIED {
            self.in_doubt |= !focus.is_aside();
            return Vec::new();
        }
        let empty = Map::new();
        let schema = schema.as_object().unwrap_or(&empty);
        self.in_doubt |= !focus.is_aside() && schema.keys().any(|keyword| !UNDERSTOOD.contains(&keyword.as_str()));
        let mut samples = Vec::new();
        if schema.keys().all(|keyword| NOTES.contains(&keyword.as_str())) {
            samples = self.anything();
        } else if let Some(one) = schema.get("const") {
            samples.push(one.clone());
        } else if let Some(all) = schema.get("enum").and_then(Value::as_array) {
            samples.extend(all.iter().cloned());
        } else if let Some(branches) = ["anyOf", "oneOf"].iter().find_map(|keyword| schema.get(*keyword)?.as_array()) {
            let mut rest = schema.clone();
            rest.remove(if schema.contains_key("anyOf") { "anyOf" } else { "oneOf" });
            for branch in branches {
                samples.extend(self.both(&rest, branch, focus, depth));
            }
        } else if schema.contains_key("if") {
            let mut rest = schema.clone();
            let branches = [rest.remove("then"), rest.remove("else")];
            rest.remove("if");
            for branch in branches.into_iter().flatten().chain([Value::Bool(true)]) {
                samples.extend(self.both(&rest, &branch, focus, depth));
            }
        } else {
            samples = self.of_types(schema, focus, depth);
        }
        let most = if focus.is_aside() { ASIDE } else { SAMPLES_TRIED };
        if samples.len() > most {
            self.in_doubt |= !focus.is_aside();
            samples.truncate(most);
        }
        samples
    }

    /// Where nothing is said of a value.
    fn anything(&self) -> Vec<Value> {
        let usual =
            json!(["zq", 7, "", 0, null, {}, [], true, false, -7.5, [1, 2], ["zq", "zq"], { "zq": 1 }, "what nobody asked for"]);
        let said = self.texts.iter().map(|text| json!(text)).chain(self.numbers.iter().map(|number| json!(number)));
        usual.as_array().into_iter().flatten().cloned().chain(said).collect()
    }

    fn both(&mut self, one: &Map<String, Value>, other: &Value, focus: &Focus<'_>, depth: usize) -> Vec<Value> {
        self.of(&json!({ "allOf": [Value::Object(one.clone()), other] }), focus, depth)
    }

    fn of_types(&mut self, schema: &Map<String, Value>, focus: &Focus<'_>, depth: usize) -> Vec<Value> {
        let named = match schema.get("type") {
            Some(Value::String(one)) => vec![one.as_str()],
            Some(Value::Array(several)) => several.iter().filter_map(Value::as_str).collect(),
            _ if schema.contains_key("properties") => vec!["object", "string", "number", "boolean", "null", "array"],
            _ if schema.contains_key("items") => vec!["array", "string", "number", "boolean", "null", "object"],
            _ => vec!["string", "number", "boolean", "null", "array", "object"],
        };
        let mut samples: Vec<Value> = schema.get("examples").and_then(Value::as_array).cloned().unwrap_or_default();
        samples.extend(schema.get("default").cloned());
        for name in named {
            samples.extend(match name {
                "null" => vec![Value::Null],
                "boolean" => vec![json!(true), json!(false)],
                "integer" => self.numbers(schema, true),
                "number" => self.numbers(schema, false),
                "string" => self.texts(schema, focus),
                "array" => self.lists(schema, focus, depth),
                _ => self.objects(schema, focus, depth),
            });
        }
        samples
    }

    fn numbers(&self, schema: &Map<String, Value>, whole: bool) -> Vec<Value> {
        let bound = |keyword: &str| schema.get(keyword).and_then(Value::as_f64);
        let mut all = vec![1.0, 0.0, 7.0, 2.0, 3.0, 12.0, 100.0, -1.0, 1_000_000_007.0, -1_000_000_007.0, 0.5, 0.25, -0.125];
        let inner = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"].into_iter().filter_map(bound);
        for number in inner.chain(self.numbers.iter().copied()).collect::<Vec<_>>() {
            all.extend([number, number + 1.0, number - 1.0, number + 0.001, number - 0.001]);
        }
        if let (Some(least), Some(most)) = (bound("minimum"), bound("maximum")) {
            all.push(f64::midpoint(least, most));
        }
        if let Some(step) = bound("multipleOf").filter(|step| *step > 0.0) {
            let near: Vec<f64> =
                all.iter().flat_map(|number| [(number / step).floor() * step, (number / step).ceil() * step]).collect();
            all = near;
        }
        let fits = |number: f64| {
            bound("minimum").is_none_or(|least| number >= least)
                && bound("maximum").is_none_or(|most| number <= most)
                && bound("exclusiveMinimum").is_none_or(|least| number > least)
                && bound("exclusiveMaximum").is_none_or(|most| number < most)
                && (!whole || number.fract() == 0.0)
        };
        let mut samples = Vec::new();
        for number in all.into_iter().filter(|number| fits(*number)) {
            #[expect(clippy::cast_possible_truncation, reason = "it is whole and small")]
            let sample = if number.fract() == 0.0 && number.abs() < 1e15 { json!(number as i64) } else { json!(number) };
            if !samples.contains(&sample) {
                samples.push(sample);
            }
        }
        samples
    }

    fn texts(&mut self, schema: &Map<String, Value>, focus: &Focus<'_>) -> Vec<Value> {
        let length = |keyword: &str| schema.get(keyword).and_then(Value::as_u64).and_then(|length| usize::try_from(length).ok());
        let (least, most) = (length("minLength").unwrap_or(0).min(LENGTH_MADE), length("maxLength").unwrap_or(usize::MAX));
        let usual = ["what nobody asked for", "zq", "Zq 7", " ZQ\n\tzq. ", "7", "-7.5", "ZQ", "Ünd ß 字", "", "{\"zq\": [7]}"];
        let mut plain: Vec<String> = usual.iter().map(|text| (*text).to_owned()).collect();
        plain.extend([least, most].into_iter().filter(|length| *length <= LENGTH_MADE).map(|length| "z".repeat(length)));
        plain.push("zq. ".repeat(100));
        let fitted = |text: String| {
            let mut text: String = text.chars().take(most).collect();
            let missing = least.saturating_sub(text.chars().count());
            text.extend(std::iter::repeat_n('z', missing));
            text
        };
        plain = plain.into_iter().map(fitted).collect();
        let has_form = schema.contains_key("pattern") || schema.contains_key("format");
        if has_form {
            plain.extend(
                schema.get("format").and_then(Value::as_str).into_iter().flat_map(of_format).map(|text| (*text).to_owned()),
            );
            plain.extend(FORMS.iter().map(|text| (*text).to_owned()));
        }
        let mut said: Vec<String> = self.texts.iter().flat_map(|text| [text.clone(), format!("zq {text} zq")]).collect();
        for number in self.numbers.iter().filter(|number| number.fract() == 0.0 && (0.0..=LENGTH_TRIED).contains(*number)) {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is whole, small and not negative")]
            let length = *number as usize;
            said.extend([length.saturating_sub(1), length, length + 1].map(|length| "z".repeat(length)));
        }
        if has_form {
            let form: Map<String, Value> =
                schema.iter().filter(|(keyword, _)| FORM.contains(&keyword.as_str())).map(own).collect();
            let is_of_form = is_of(&Value::Object(form));
            plain.retain(|text| is_of_form(text));
            plain.sort_unstable();
            plain.dedup();
            self.in_doubt |= plain.len() < 2 && !focus.is_aside();
        }
        let mut samples: Vec<Value> = Vec::new();
        for text in plain.into_iter().chain(said.into_iter().map(fitted)).map(Value::String) {
            if !samples.contains(&text) {
                samples.push(text);
            }
        }
        samples
    }

    fn lists(&mut self, schema: &Map<String, Value>, focus: &Focus<'_>, depth: usize) -> Vec<Value> {
        let length = |keyword: &str| schema.get(keyword).and_then(Value::as_u64).and_then(|length| usize::try_from(length).ok());
        let (least, most) = (length("minItems").unwrap_or(0).min(LENGTH_MADE), length("maxItems").unwrap_or(usize::MAX));
        let within = focus.in_items();
        let before: Vec<Vec<Value>> = match schema.get("prefixItems").and_then(Value::as_array) {
            Some(schemas) => schemas.iter().map(|schema| self.of(schema, &within, depth + 1)).collect(),
            None => Vec::new(),
        };
        let everything = Value::Bool(true);
        let mut items = self.of(schema.get("items").unwrap_or(&everything), &within, depth + 1);
        if items.is_empty() {
            items = before.iter().flatten().take(1).cloned().collect();
        }
        let is_unique = schema.get("uniqueItems") == Some(&Value::Bool(true));
        let list = |wanted: usize, from: usize| {
            let wanted = wanted.max(least).min(most);
            let item = |place: usize| match before.get(place) {
                Some(samples) => samples.get(from % samples.len().max(1)).cloned(),
                None if is_unique || from > 0 => items.get((from + place) % items.len().max(1)).cloned(),
                None => items.first().cloned(),
            };
            Value::Array((0..wanted).map_while(item).collect())
        };
        let mut samples = vec![list(1.max(before.len()), 0), list(0, 0), list(2, 0), list(2, 1), list(3, 0), list(3, 1)];
        if focus.is_aside() {
            return samples;
        }
        samples.extend((0..items.len()).map(|from| list(1, from)));
        samples.extend((1..items.len().min(ASIDE)).map(|from| Value::Array(vec![items[from].clone(), items[0].clone()])));
        let most_samples = before.iter().map(Vec::len).max().unwrap_or(0);
        samples.extend((0..most_samples).map(|from| list(before.len(), from)));
        for number in self.numbers.iter().filter(|number| number.fract() == 0.0 && (0.0..=LENGTH_TRIED).contains(*number)) {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is whole, small and not negative")]
            let length = *number as usize;
            samples.extend([length.saturating_sub(1), length, length + 1].map(|length| list(length, 0)));
        }
        samples
    }

    fn objects(&mut self, schema: &Map<String, Value>, focus: &Focus<'_>, depth: usize) -> Vec<Value> {
        let everything = Value::Bool(true);
        let known: BTreeMap<&str, &Value> = match schema.get("properties").and_then(Value::as_object) {
            Some(members) => members.iter().map(|(name, schema)| (name.as_str(), schema)).collect(),
            None => BTreeMap::new(),
        };
        let required: Vec<&str> =
            schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let others = schema.get("additionalProperties").unwrap_or(&everything);
        let more = required.iter().copied().chain(focus.members()).filter(|name| !known.contains_key(name));
        let extra = matches!(focus, Focus::Here).then_some("zq").into_iter().filter(|_| *others != Value::Bool(false));
        let more: BTreeMap<&str, &Value> = more.chain(extra).map(|name| (name, others)).collect();
        let mut members = Vec::new();
        for (name, schema) in known.into_iter().chain(more) {
            let within = focus.at(name);
            let samples = self.of(schema, &within, depth + 1);
            let is_required = required.contains(&name);
            if !samples.is_empty() || is_required {
                members.push(Member { name: name.to_owned(), is_required, is_looked_at: !within.is_aside(), samples });
            }
        }
        let object = |chosen: &dyn Fn(usize, &Member) -> Option<usize>| {
            let chosen = members.iter().enumerate().filter_map(|(place, member)| {
                let sample = chosen(place, member)?;
                Some((member.name.clone(), member.samples.get(sample % member.samples.len().max(1))?.clone()))
            });
            Value::Object(chosen.collect())
        };
        let least = |member: &Member| member.is_required.then_some(0);
        let mut objects = vec![object(&|_, _| Some(0)), object(&|_, member| least(member))];
        let looked_at: Vec<usize> = (0..members.len()).filter(|place| members[*place].is_looked_at).collect();
        if looked_at.is_empty() {
            return objects;
        }
        for changed in looked_at.iter().copied() {
            for sample in 0..members[changed].samples.len() {
                objects.push(object(&|place, _| Some(if place == changed { sample } else { 0 })));
                if !members[changed].is_required {
                    objects.push(object(&|place, member| if place == changed { Some(sample) } else { least(member) }));
                }
            }
            objects.push(object(&|place, _| (place != changed).then_some(0)));
        }
        let all = looked_at.iter().try_fold(1, |all: usize, place| all.checked_mul(members[*place].samples.len()));
        if let Some(all) = all.filter(|all| looked_at.len() > 1 && *all <= COMBINATIONS) {
            for number in 0..all {
                let mut rest = number;
                let digits = looked_at.iter().map(|place| {
                    let samples = members[*place].samples.len().max(1);
                    let digit = rest % samples;
                    rest /= samples;
                    (*place, digit)
                });
                let digits: BTreeMap<usize, usize> = digits.collect();
                objects.push(object(&|place, _| Some(digits.get(&place).copied().unwrap_or(0))));
            }
        } else if looked_at.len() > 1 {
            let most = looked_at.iter().map(|place| members[*place].samples.len()).max().unwrap_or(0);
            for sample in 0..most {
                objects.push(object(&|_, member| Some(if member.is_looked_at { sample } else { 0 })));
                objects.push(object(&|place, member| Some(if member.is_looked_at { sample + place } else { 0 })));
            }
        }
        objects
    }
}

/// What a schema says of the form of a text.
const FORM: [&str; 4] = ["pattern", "format", "minLength", "maxLength"];
/// Short texts of forms that patterns often ask for.
const FORMS: [&str; 18] = [
    "ABC",
    "XYZ",
    "AB",
    "QZ",
    "abc",
    "qz",
    "12",
    "34",
    "123",
    "789",
    "1234",
    "4567",
    "A1",
    "B2",
    "zq-1",
    "qz-2",
    "2001-02-03",
    "0.25",
];

/// Texts of a format.
fn of_format(name: &str) -> &'static [&'static str] {
    match name {
        "date" => &["2001-02-03", "0001-01-01", "9999-12-31"],
        "date-time" => &["2001-02-03T04:05:06Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.5+01:00"],
        "time" => &["04:05:06Z", "00:00:00Z", "23:59:59+01:00"],
        "duration" => &["P1D", "PT5M", "P3Y"],
        "email" | "idn-email" => &["zq@zq.example", "Q.Z+7@example.org"],
        "hostname" | "idn-hostname" => &["zq.example", "q"],
        "ipv4" => &["192.0.2.1", "0.0.0.0"],
        "ipv6" => &["2001:db8::1", "::"],
        "uuid" => &["00000000-0000-4000-8000-000000000001", "FFFFFFFF-FFFF-4FFF-BFFF-FFFFFFFFFFFF"],
        "uri" | "iri" => &["https://zq.example/q?z#q", "urn:zq:1", "mailto:zq@zq.example"],
        "uri-reference" | "iri-reference" => &["/zq", "https://zq.example/", "#q"],
        "json-pointer" => &["", "/zq/0"],
        _ => &[],
    }
}

/// Whether a text is what a small schema says.
fn is_of(schema: &Value) -> impl Fn(&String) -> bool + use<> {
    let text = schema.to_string();
    let check = Check::compile(Of::Output, &Required { schema: Some(text.as_bytes()), assertions: &[] }).ok();
    let validator = check.map(|check| Validator { output: Some(check), ..Validator::default() });
    move |text| {
        let body = json!(text).to_string();
        let answer = Answer { content_encoding: None, body: body.as_bytes() };
        validator.as_ref().is_some_and(|validator| validator.check_output(b"", answer).is_ok())
    }
}

fn own((name, value): (&String, &Value)) -> (String, Value) {
    (name.clone(), value.clone())
}

/// What a schema says behind its reference, if it has one: as much is so of the same value. `None` where that leads out of reach.
pub(super) fn resolved<'a>(root: &'a Value, schema: &'a Value) -> Option<&'a Value> {
    let mut at = schema;
    for _ in 0..DEPTH_TRIED {
        match at.as_object().and_then(|members| members.get("$ref")) {
            None => return Some(at),
            Some(reference) => at = referred(root, reference)?,
        }
    }
    None
}

fn referred<'a>(root: &'a Value, reference: &Value) -> Option<&'a Value> {
    root.pointer(&reference.as_str()?.strip_prefix('#')?.replace("%25", "%"))
}

/// A schema with what it refers to, and with all of which it says that it must be so too. `None` where a reference is out of reach.
fn merged(root: &Value, schema: &Value, depth: usize) -> Option<Value> {
    let Value::Object(own) = schema else { return Some(schema.clone()) };
    if !own.contains_key("$ref") && !own.contains_key("allOf") {
        return Some(schema.clone());
    }
    let depth = depth.checked_sub(1)?;
    let mut all = own.clone();
    let reference = match all.remove("$ref") {
        Some(reference) => Some(referred(root, &reference)?.clone()),
        None => None,
    };
    let parts = all.remove("allOf");
    for part in reference.into_iter().chain(parts.as_ref().and_then(Value::as_array).into_iter().flatten().cloned()) {
        match merged(root, &part, depth)? {
            Value::Object(part) => add(&mut all, part),
            Value::Bool(false) => return Some(Value::Bool(false)),
            _ => {}
        }
    }
    Some(Value::Object(all))
}

/// Adds what a second schema says of the same value. What is said twice is judged by the schema itself afterwards.
fn add(all: &mut Map<String, Value>, part: Map<String, Value>) {
    for (keyword, said) in part {
        match (keyword.as_str(), all.get_mut(&keyword), said) {
            ("properties", Some(Value::Object(members)), Value::Object(others)) => {
                for (name, other) in others {
                    let both = match members.remove(&name) {
                        Some(one) if one != other => json!({ "allOf": [one, other] }),
                        _ => other,
                    };
                    members.insert(name, both);
                }
            }
            ("required", Some(Value::Array(names)), Value::Array(others)) => names.extend(others),
            ("enum", Some(Value::Array(values)), Value::Array(others)) => values.retain(|value| others.contains(value)),
            // Another choice beside the first: the second is what the schema judges.
            ("anyOf" | "oneOf", Some(_), _) => {}
            (_, _, said) => drop(all.insert(keyword, said)),
        }
    }
}
