//! Templates of paths and bodies: strict, and with no way out of the place that a value is put in.
//!
//! In a path every value is percent-encoded; in a body every value is written as JSON. There is no filter that undoes it. A value
//! that is absent or empty is an error, never an empty text.
//!
//! What names the attempt is not known when a body is rendered, because that must come out the same for every attempt of a job.
//! Its places are marked with a byte that JSON text cannot hold, and filled when the body is sent.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use minijinja::value::{Kwargs, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};

use super::json;
use crate::provider::Sent;

/// What marks the place of a name: a control character stands in no JSON text.
const MARK: char = '\0';
/// Most instructions that one rendering may take: a loop in a template ends.
const FUEL_MAX: u64 = 100_000;

/// What names an attempt.
pub(crate) struct Names<'a> {
    pub(crate) key: &'a str,
    pub(crate) job_id: &'a str,
    pub(crate) attempt: u32,
    /// `""` where the provider does not call back.
    pub(crate) webhook_url: &'a str,
}

/// The names that a body may use, as their places are marked.
const NAMES: [&str; 4] = ["key", "job.id", "attempt", "webhook.url"];

impl Names<'_> {
    /// The name as JSON; `None` for one that there is not.
    fn written(&self, name: &str) -> Option<String> {
        match name {
            "key" => Some(json::quoted(self.key)),
            "job.id" => Some(json::quoted(self.job_id)),
            "attempt" => Some(self.attempt.to_string()),
            "webhook.url" => Some(json::quoted(self.webhook_url)).filter(|_| !self.webhook_url.is_empty()),
            _ => None,
        }
    }
}

/// Renders a path about an attempt.
///
/// # Errors
/// In words that name the template's place, never a value.
pub(super) fn path(template: &str, sent: &Sent) -> Result<String, String> {
    let mut environment = environment();
    environment.set_formatter(|out, _, value| {
        let text = plain(value)?;
        for byte in text.bytes() {
            let written = if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
                out.write_char(char::from(byte))
            } else {
                write!(out, "%{byte:02X}")
            };
            written.map_err(|_| refused("cannot be written"))?;
        }
        Ok(())
    });
    let job = sent.job_id.to_string();
    let mut context = vec![
        ("key", Value::from(sent.idempotency_key.as_str())),
        ("attempt", Value::from(sent.attempt)),
        ("job", Scope::of(vec![("id", Value::from(job))])),
    ];
    if !sent.remote_id.is_empty() {
        context.push(("remote", Scope::of(vec![("id", Value::from(sent.remote_id.as_str()))])));
    }
    environment.render_str(template, Scope::of(context)).map_err(|error| told(&error))
}

/// Renders a body around a job's own, with the places of names marked.
///
/// # Errors
/// The job's body is not JSON, or has not what the template wants.
pub(crate) fn body(template: &str, body: &[u8]) -> Result<Vec<u8>, String> {
    let text = std::str::from_utf8(body).ok().and_then(|text| json::at(text, ""));
    let text = text.ok_or("the body is not JSON, which this provider's template needs")?;
    let mut environment = environment();
    environment.set_formatter(|out, _, value| {
        let text = written(value)?;
        out.write_str(&text).map_err(|_| refused("cannot be written"))
    });
    environment.add_function("with", with);
    let context = Scope::of(vec![
        ("body", Value::from_object(Json(text.into()))),
        ("key", Value::from_object(Name("key"))),
        ("attempt", Value::from_object(Name("attempt"))),
        ("job", Scope::of(vec![("id", Value::from_object(Name("job.id")))])),
        ("webhook", Scope::of(vec![("url", Value::from_object(Name("webhook.url")))])),
    ]);
    let rendered = environment.render_str(template, context).map_err(|error| told(&error))?;
    let tried = Names { key: "k", job_id: "j", attempt: 1, webhook_url: "u" };
    let whole = filled(rendered.as_bytes(), &tried)?;
    match std::str::from_utf8(&whole).ok().and_then(|text| json::at(text, "")) {
        Some(_) => Ok(rendered.into_bytes()),
        None => Err("the body's template does not make JSON of this body".to_owned()),
    }
}

/// Fills the marked places.
///
/// # Errors
/// The provider does not call back, and the body wants to say where.
pub(crate) fn filled(body: &[u8], names: &Names<'_>) -> Result<Vec<u8>, String> {
    let Ok(text) = std::str::from_utf8(body) else { return Ok(body.to_vec()) };
    let mut out = String::with_capacity(text.len());
    for (place, part) in text.split(MARK).enumerate() {
        if place % 2 == 0 {
            out.push_str(part);
            continue;
        }
        let name = names.written(part).ok_or_else(|| format!("the body's template wants {part:?}, which there is not"))?;
        out.push_str(&name);
    }
    Ok(out.into_bytes())
}

/// The body with each marked place filled by its name's own word: the same for every attempt of every job.
///
/// The words hold the mark, escaped, so that no text that a body says by itself is taken for one of them.
pub(crate) fn unnamed(body: &[u8]) -> Vec<u8> {
    let Ok(text) = std::str::from_utf8(body) else { return body.to_vec() };
    let mut out = String::with_capacity(text.len());
    for (place, part) in text.split(MARK).enumerate() {
        match place % 2 {
            0 => out.push_str(part),
            _ => out.push_str(&json::quoted(&format!("{MARK}{part}{MARK}"))),
        }
    }
    out.into_bytes()
}

/// What is wrong with a template of a path; `None` for nothing.
pub(crate) fn problem_of_path(template: &str) -> Option<String> {
    let sent = Sent {
        job_id: "0190b0c0-0000-8000-8000-000000000001".parse().expect("it is an id"),
        attempt: 1,
        url: String::new(),
        remote_id: "id".to_owned(),
        idempotency_key: "key".to_owned(),
        age: std::time::Duration::ZERO,
    };
    path(template, &sent).err()
}

/// What is wrong with a template of a body as far as can be told without one; `None` for nothing.
pub(crate) fn problem_of_body(template: &str) -> Option<String> {
    if template.contains(MARK) {
        return Some("it holds a NUL".to_owned());
    }
    environment().template_from_str(template).err().map(|error| told(&error))
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_fuel(Some(FUEL_MAX));
    environment
}

/// An error in words that hold nothing of a job.
fn told(error: &Error) -> String {
    let line = error.line().unwrap_or(1);
    match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => format!("template, line {line}: {detail}"),
        (ErrorKind::SyntaxError, Some(detail)) => format!("template, line {line}: {detail}"),
        (kind, _) => format!("template, line {line}: {kind}"),
    }
}

fn refused(detail: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

/// A value for a path.
fn plain(value: &Value) -> Result<String, Error> {
    let text = match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        ValueKind::Number => value.to_string(),
        _ => return Err(refused("only a text or a number can stand in a path")),
    };
    if text.is_empty() { Err(refused("a value is empty")) } else { Ok(text) }
}

/// A value as JSON.
fn written(value: &Value) -> Result<String, Error> {
    if let Some(Json(text)) = value.downcast_object_ref::<Json>() {
        return Ok(text.to_string());
    }
    if let Some(Name(name)) = value.downcast_object_ref::<Name>() {
        return Ok(format!("{MARK}{name}{MARK}"));
    }
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            if text.contains(MARK) {
                Err(refused("a name of the attempt cannot be a part of a text"))
            } else {
                Ok(json::quoted(text))
            }
        }
        ValueKind::Bool => Ok(value.is_true().to_string()),
        ValueKind::Number => Ok(value.to_string()),
        ValueKind::None => Ok("null".to_owned()),
        _ => Err(refused("only a part of the body, a name, a text, a number or a truth value can be written")),
    }
}

/// `with(object, name=value, …)`: the object with these members set, the rest as it was written.
fn with(object: &Value, changes: Kwargs) -> Result<Value, Error> {
    let Some(Json(text)) = object.downcast_object_ref::<Json>() else { return Err(refused("with() takes a part of the body")) };
    let mut members = json::members(text).ok_or_else(|| refused("with() takes an object"))?;
    for name in changes.args() {
        let value = written(&changes.get::<Value>(name)?)?;
        match members.iter_mut().find(|(known, _)| known == name) {
            Some(member) => member.1 = value,
            None => members.push((name.to_owned(), value)),
        }
    }
    Ok(Value::from_object(Json(json::object(&members).into())))
}

/// Names and what they stand for.
#[derive(Debug)]
struct Scope(Vec<(&'static str, Value)>);

impl Scope {
    fn of(names: Vec<(&'static str, Value)>) -> Value {
        Value::from_object(Scope(names))
    }
}

impl Object for Scope {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let name = key.as_str()?;
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
    }
}

/// A part of the job's body, as it was written; or one that holds marks.
#[derive(Debug)]
struct Json(Box<str>);

impl Object for Json {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let token = plain(key).ok()?.replace('~', "~0").replace('/', "~1");
        json::at(&self.0, &format!("/{token}")).map(|part| Value::from_object(Json(part.into())))
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The place of a name.
#[derive(Debug)]
struct Name(&'static str);

impl Object for Name {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_assert!(NAMES.contains(&self.0), "{}", self.0);
        write!(f, "{MARK}{}{MARK}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(remote_id: &str) -> Sent {
        Sent {
            job_id: "0190b0c0-0000-8000-8000-000000000001".parse().unwrap(),
            attempt: 2,
            url: String::new(),
            remote_id: remote_id.to_owned(),
            idempotency_key: "job-2".to_owned(),
            age: std::time::Duration::ZERO,
        }
    }

    #[test]
    fn values_are_percent_encoded_in_a_path() {
        let rendered = |template: &str, id: &str| path(template, &sent(id)).unwrap();
        assert_eq!(rendered("/jobs/{{ remote.id }}", "a-b_c.~1"), "/jobs/a-b_c.~1");
        assert_eq!(rendered("/jobs/{{ remote.id }}", "../../x?y=1#z"), "/jobs/..%2F..%2Fx%3Fy%3D1%23z");
        assert_eq!(rendered("/jobs/{{ remote.id }}/x", "a b\u{e9}%2e"), "/jobs/a%20b%C3%A9%252e/x");
        assert_eq!(rendered("/jobs/{{ remote.id|safe }}", "a/b"), "/jobs/a%2Fb");
        assert_eq!(
            rendered("/jobs?key={{ key }}&job={{ job.id }}&n={{ attempt }}", ""),
            "/jobs?key=job-2&job=0190b0c0-0000-8000-8000-000000000001&n=2"
        );
    }

    #[test]
    fn what_is_absent_or_empty_is_an_error_in_a_path() {
        for (template, problem) in [
            ("/{{ remote.id }}", "undefined value"),
            ("/{{ remote.name }}", "undefined value"),
            ("/{{ nothing }}", "undefined value"),
            ("/{{ '' }}", "a value is empty"),
            ("/{{ job }}", "only a text or a number"),
            ("/{{ key", ""),
            ("/{% for x in range(1000000) %}a{% endfor %}", ""),
        ] {
            let error = path(template, &sent("")).unwrap_err();
            assert!(error.starts_with("template, line 1: ") && error.contains(problem), "{template}: {error}");
        }
    }

    #[test]
    fn a_body_keeps_its_digits_and_takes_names_in_their_places() {
        let own = br#"{"z": 9007199254740993, "simulate": "run=1s", "in": {"a": [1.50]}}"#;
        let names = Names { key: "j-1", job_id: "j", attempt: 1, webhook_url: "https://g/v1?\"x" };
        let made = |template: &str| {
            let marked = body(template, own).unwrap();
            String::from_utf8(filled(&marked, &names).unwrap()).unwrap()
        };
        assert_eq!(
            made("{{ with(body, background=true, hook=webhook.url, z=body.in) }}"),
            r#"{"z":{"a": [1.50]},"simulate":"run=1s","in":{"a": [1.50]},"background":true,"hook":"https://g/v1?\"x"}"#
        );
        assert_eq!(
            made(r#"{"n": {{ attempt }}, "k": {{ key }}, "first": {{ body.in.a[0] }}, "t": {{ "a\"b" }}}"#),
            r#"{"n": 1, "k": "j-1", "first": 1.50, "t": "a\"b"}"#
        );
        let without = Names { webhook_url: "", ..names };
        assert!(filled(&body("{{ with(body, hook=webhook.url) }}", own).unwrap(), &without).is_err());
    }

    #[test]
    fn a_body_that_does_not_come_out_is_refused() {
        for (template, own, problem) in [
            ("{{ body }}", "{", "not JSON"),
            ("{{ body.absent }}", "{}", "undefined value"),
            ("{{ with(body, a=1) }}", "[]", "takes an object"),
            ("{{ body }},", "{}", "does not make JSON"),
            ("\"{{ key }}\"", "{}", "does not make JSON"),
            ("{{ \"x\" ~ key }}", "{}", "cannot be a part of a text"),
        ] {
            let error = body(template, own.as_bytes()).unwrap_err();
            assert!(error.contains(problem), "{template}: {error}");
        }
    }
}
