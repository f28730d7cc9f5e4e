//! What an answer says of itself: who made it, whether it was given before. And what must not be kept of it.
//!
//! An answer is from outside: what is kept of it is bounded, and never the credential that it was asked with.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use super::Run;
use crate::fingerprint::{hex, sha256};
use crate::provider::Response;

/// Longest name of an answer or a build that is kept as it is, in bytes; a longer one is told apart by its hash.
const NAMED_BYTES_MAX: usize = 512;
/// Longest finding that is kept, in characters.
const FINDING_CHARS_MAX: usize = 1000;
/// What stands where a secret was.
const HIDDEN: &str = "[hidden]";

/// The names of the answers that were given.
#[derive(Debug, Default)]
pub struct Ids(Mutex<HashSet<String>>);

impl Ids {
    /// Knows the answers of earlier runs.
    pub fn of<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Self {
        let ids = Ids::default();
        ids.know(runs);
        ids
    }

    pub(super) fn know<'a>(&self, runs: impl IntoIterator<Item = &'a Run>) {
        let given = runs.into_iter().map(|run| run.answer_id.clone()).filter(|id| !id.is_empty());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(given);
    }

    fn is_new(&self, id: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned())
    }
}

/// A provider's credential, as its answers may repeat it: as it stands, or escaped as JSON escapes, at any depth.
#[derive(Default)]
pub struct Hidden(Vec<char>);

impl Hidden {
    /// Of what is sent as the credential, if anything is.
    pub fn new(secret: Option<&str>) -> Self {
        Hidden(secret.unwrap_or_default().chars().collect())
    }

    /// The text without it.
    pub(super) fn hide(&self, text: &str) -> String {
        let mut clean = String::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            match self.repeated(rest) {
                Some(after) => {
                    clean.push_str(HIDDEN);
                    rest = after;
                }
                None => {
                    clean.push(first);
                    rest = &rest[first.len_utf8()..];
                }
            }
        }
        clean
    }

    /// The body without it; it stays JSON if it was.
    pub(crate) fn hide_in(&self, body: &[u8]) -> Vec<u8> {
        match std::str::from_utf8(body) {
            Ok(text) if !self.0.is_empty() => self.hide(text).into_bytes(),
            _ => body.to_vec(),
        }
    }

    /// What stands behind the secret, if the text begins with it.
    fn repeated<'t>(&self, text: &'t str) -> Option<&'t str> {
        let mut rest = text;
        for wanted in &self.0 {
            let bare = rest.trim_start_matches('\\');
            let escaped = || {
                let code = bare.strip_prefix('u').filter(|_| bare.len() < rest.len())?;
                let number = u32::from_str_radix(code.get(..4)?, 16).ok()?;
                (number == u32::from(*wanted)).then(|| &code[4..])
            };
            rest = match rest.strip_prefix(*wanted).or_else(escaped) {
                Some(after) => after,
                None => bare.strip_prefix(*wanted)?,
            };
        }
        (!self.0.is_empty()).then_some(rest)
    }

    /// A finished run, without the secret in anything that came from outside, and with findings that are not too long.
    pub(crate) fn clean(&self, run: &mut Run) {
        let texts = [&mut run.input, &mut run.got, &mut run.model, &mut run.build, &mut run.answer_id];
        let compared = run.compared.iter_mut().map(|come| match come {
            Ok(text) | Err(text) => text,
        });
        for text in texts.into_iter().chain(&mut run.findings).chain(compared) {
            *text = self.hide(text);
        }
        for finding in &mut run.findings {
            *finding = super::shortened_to(finding, FINDING_CHARS_MAX);
        }
    }
}

/// Who made an answer, by its own word, and its name; each `""` if it does not say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) model: String,
    pub(crate) build: String,
    pub(crate) id: String,
}

impl Named {
    /// Reads it from a whole answer; `model`: as the provider's adapter read it.
    pub(crate) fn of(body: &[u8], model: Option<String>, hidden: &Hidden) -> Self {
        let answer: Option<Value> = serde_json::from_slice(body).ok();
        let at = |pointer: &str| bounded(hidden.hide(&word_at(answer.as_ref(), pointer)));
        let model = model.map_or_else(|| at("/model"), |model| bounded(hidden.hide(&model)));
        Named { model, build: at("/system_fingerprint"), id: at("/id") }
    }
}

fn bounded(text: String) -> String {
    if text.len() <= NAMED_BYTES_MAX { text } else { format!("sha256:{}", hex(&sha256(text.as_bytes()))) }
}

/// Why an answer is no evidence, if it was given before: by its headers, or by its name.
pub(super) fn cached(response: &Response, id: &str, ids: &Ids) -> Option<String> {
    for (name, value) in &response.headers {
        if is_hit(&name.to_ascii_lowercase(), &value.to_ascii_lowercase()) {
            return Some(format!("a cached answer is no evidence: {name}: {value}"));
        }
    }
    let known = !id.is_empty() && !ids.is_new(id);
    known.then(|| format!("a cached answer is no evidence: the id {id:?} came before"))
}

/// Whether a header says that a cache answered; in lower case. Where several caches were asked, one is enough.
fn is_hit(name: &str, value: &str) -> bool {
    let mut words = value.split([',', ' ', '\t', ';']).map(|word| word.trim_matches('"')).filter(|word| !word.is_empty());
    match name {
        "cf-cache-status" | "x-vercel-cache" => words.any(|word| matches!(word, "hit" | "stale" | "updating" | "prerender")),
        // Each cache says it in its own words: TCP_HIT, HIT-CLUSTER, "Hit from cloudfront".
        "x-cache" | "x-cache-status" | "x-proxy-cache" | "x-nginx-cache" | "x-cache-lookup" => {
            words.any(|word| word.split(['-', '_', ':']).any(|part| matches!(part, "hit" | "stale" | "updating" | "refreshhit")))
        }
        "cache-status" => words.any(|word| word == "hit" || word == "hit=?1"),
        "x-litellm-cache-hit" | "x-cache-hit" | "x-cached" => words.any(|word| matches!(word, "true" | "1" | "hit")),
        "age" => words.any(|word| word.chars().any(|c| c != '0')),
        "idempotency-replayed" | "idempotent-replayed" => words.any(|word| matches!(word, "true" | "1" | "?1")),
        _ => false,
    }
}

/// What stands at a place of an answer, as text; `""` for `null` or nothing.
pub(crate) fn text_at(body: &[u8], pointer: &str) -> String {
    let answer: Option<Value> = serde_json::from_slice(body).ok();
    word_at(answer.as_ref(), pointer)
}

fn word_at(answer: Option<&Value>, pointer: &str) -> String {
    match answer.and_then(|answer| answer.pointer(pointer)) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qualify::suite::Level;

    fn response(headers: &[(&str, &str)]) -> Response {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Response { status: 200, headers, body: b"{}"[..].into() }
    }

    #[test]
    fn a_cached_answer_is_seen_by_its_headers_or_its_id() {
        let ids = Ids::default();
        let by_headers = |name, value| cached(&response(&[(name, value)]), "", &ids).is_some();
        for (name, value) in [
            ("x-cache", "HIT"),
            ("x-cache", "MISS, HIT"),
            ("x-cache", "Hit from cloudfront"),
            ("x-cache", "TCP_HIT"),
            ("x-cache-status", "HIT"),
            ("x-proxy-cache", "hit"),
            ("x-vercel-cache", "STALE"),
            ("cf-cache-status", "HIT"),
            ("cf-cache-status", "STALE"),
            ("cf-cache-status", "UPDATING"),
            ("cache-status", "ExampleCache; hit; ttl=30"),
            ("cache-status", "Origin; fwd=miss, \"Edge\"; hit"),
            ("x-litellm-cache-hit", "True"),
            ("age", "7"),
            ("idempotent-replayed", "True"),
            ("idempotency-replayed", "true"),
        ] {
            assert!(by_headers(name, value), "{name}: {value}");
        }
        for status in ["DYNAMIC", "BYPASS", "EXPIRED", "MISS", "REVALIDATED", "NONE/UNKNOWN"] {
            assert!(!by_headers("cf-cache-status", status), "{status}");
        }
        for (name, value) in [
            ("x-cache", "MISS"),
            ("x-cache", "Miss from cloudfront"),
            ("x-cache", "MISS, MISS"),
            ("cache-status", "Hitlist; fwd=miss"),
            ("x-litellm-cache-hit", "False"),
            ("x-litellm-cache-key", "abc"),
            ("age", "0"),
            ("idempotent-replayed", "false"),
        ] {
            assert!(!by_headers(name, value), "{name}: {value}");
        }
        let by_id = |id| cached(&response(&[]), id, &ids).is_some();
        assert!(!by_id("1") && by_id("1") && !by_id("2"));
        assert!(!by_id("") && !by_id(""));
    }

    #[test]
    fn what_is_null_was_not_said() {
        let named = |body: &[u8]| Named::of(body, None, &Hidden::default());
        assert_eq!(named(br#"{"id":null,"system_fingerprint":null,"model":null}"#), Named::default());
        assert_eq!(text_at(br#"{"id":7}"#, "/id"), "7");
    }

    #[test]
    fn names_of_answers_that_are_too_long_are_kept_by_their_hashes() {
        let named =
            |id: &str| Named::of(format!(r#"{{"id":"{id}","system_fingerprint":"{id}"}}"#).as_bytes(), None, &Hidden::default());
        let (short, long, other) = ("x".repeat(NAMED_BYTES_MAX), "x".repeat(1_000_000), format!("{}y", "x".repeat(999_999)));
        assert_eq!((named(&short).id, named(&short).build), (short.clone(), short));
        assert!(named(&long).id.starts_with("sha256:") && named(&long).build.len() == 71);
        assert_ne!(named(&long).id, named(&other).id);
        let mut run = Run::blank("a", "", 1, Level::Meaning);
        run.findings.push("x".repeat(1_000_000));
        Hidden::default().clean(&mut run);
        assert!(run.findings[0].chars().count() <= FINDING_CHARS_MAX + 1);
    }

    #[test]
    fn a_credential_is_hidden_however_json_escapes_it() {
        let hidden = Hidden::new(Some("sk-a/b"));
        for echoed in ["sk-a/b", r"sk-a\/b", r"\u0073k-a/b", r"\u0073\u006B-\u0061\/\u0062", r"\\u0073k-a\\\/b"] {
            assert_eq!(hidden.hide(&format!("<{echoed}>")), "<[hidden]>", "{echoed}");
            let body = format!(r#"{{"system_fingerprint":"{echoed}","id":"é{echoed}"}}"#);
            let clean = String::from_utf8(hidden.hide_in(body.as_bytes())).unwrap();
            assert_eq!(clean, r#"{"system_fingerprint":"[hidden]","id":"é[hidden]"}"#);
        }
        for other in ["sk-a", r"\u0074k-a/b", "sk-a/", r"\", r"\u00", "uk-a/b"] {
            assert_eq!(hidden.hide(other), other);
        }
        assert_eq!(Hidden::default().hide("a"), "a");
        let mut run = Run::blank("a", "", 1, Level::Meaning);
        (run.model, run.build, run.answer_id) = ("sk-a/b".to_owned(), "sk-a/b".to_owned(), "sk-a/b".to_owned());
        (run.got, run.input) = ("sk-a/b".to_owned(), "sk-a/b".to_owned());
        run.findings.push("sk-a/b".to_owned());
        run.compared = vec![Ok("sk-a/b".to_owned()), Err(r"sk-\u0061/b".to_owned())];
        hidden.clean(&mut run);
        assert!(!serde_json::to_string(&run).unwrap().contains("sk-"), "{run:?}");
    }
}
