//! Whether a provider has proved a route's contract: what was proved, by which certificate, and whether that covers *this* request.
//!
//! Two models behind one schema are not interchangeable. A route fails over only to a provider with a live certificate, and a
//! certificate speaks of one contract: one route and provider, and every [`Part`] of what is sent there and of how answers are
//! judged. What differs in one byte is another contract, and nothing is known of it. Unknown is "no".
//!
//! Plain data and pure functions; no clock, no I/O. Where certificates are kept is the store's business, who asks for them the
//! runtime's (`runtime/certificates.rs`). How a certificate is earned: `qualify/suite.rs` is what a suite says, `qualify/runner.rs`
//! runs it.

pub mod capabilities;
pub mod prompt;
pub mod runner;
pub mod statistics;
pub mod suite;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::fingerprint::{canonical_json, hex, sha256, unique_json};
use crate::provider::Rendered;
use crate::provider::asking::template::unnamed;

/// Longest endpoint or model name in a certificate, in characters. A longer one is bound by its hash.
const SHOWN_CHARS_MAX: usize = 200;

/// Headers that change nothing about an answer: who asks, where it is traced, what form is liked.
pub const HARMLESS: [&str; 8] =
    ["accept", "baggage", "cache-control", "traceparent", "tracestate", "user-agent", "x-correlation-id", "x-request-id"];

/// A part of what was proved.
///
/// In this order a denial names them: what a reader would look at first comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Where requests go: method and URL, the query by its hash.
    Endpoint,
    /// The model that is asked for, as the request names it.
    Model,
    /// How a request is made for the provider: method, path, headers, template of its body.
    Template,
    /// The chat template that its model is prompted with, and what else the provider's entry says of its prompts.
    ChatTemplate,
    /// The tokenizer of its model.
    Tokenizer,
    /// The JSON Schemas of inputs and outputs, and where the output stands.
    Schema,
    /// The route's assertions and those of the suite's cases.
    Assertions,
    /// Everything in the request's body beside the model that does not vary from request to request; its media type, if that is not
    /// JSON; and the headers that came with it.
    Parameters,
    /// The suite as a whole.
    Suite,
}

impl Part {
    /// All parts, in the order of denials.
    pub const ALL: [Part; 9] = [
        Part::Endpoint,
        Part::Model,
        Part::Template,
        Part::ChatTemplate,
        Part::Tokenizer,
        Part::Schema,
        Part::Assertions,
        Part::Parameters,
        Part::Suite,
    ];

    /// The word in certificates, metrics and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Part::Endpoint => "endpoint",
            Part::Model => "model",
            Part::Template => "template",
            Part::ChatTemplate => "chat_template",
            Part::Tokenizer => "tokenizer",
            Part::Schema => "schema",
            Part::Assertions => "assertions",
            Part::Parameters => "parameters",
            Part::Suite => "suite",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a route asks of one of its providers, as far as the configuration tells: the parts that are the same for every request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contract {
    /// The route.
    pub route: String,
    /// The provider.
    pub provider: String,
    /// SHA-256 in hexadecimal of each part that the configuration fixes; `""` for a part that it does not have.
    pub fixed: BTreeMap<Part, String>,
    /// JSON pointer to the model's name in a request.
    pub model: String,
    /// JSON pointers into a request's body to what varies from request to request; `""` for all of it.
    pub vary: Vec<String>,
    /// Names of headers, in lower case, that are not bound beside [`HARMLESS`]: those of the provider's own entry, which its template
    /// is bound to, and what the route lets requests differ in.
    pub free_headers: Vec<String>,
    /// Whether the provider's template makes the body: then the places of what names the attempt are marked in it, not yet filled.
    pub has_template: bool,
}

/// Every part of a contract for one request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Bindings(BTreeMap<Part, String>);

impl Contract {
    /// The contract for one request, as it is rendered for the provider: before what names the attempt is filled in, which is
    /// another for each attempt and is bound by the template alone.
    pub fn bind(&self, rendered: &Rendered) -> Bindings {
        let mut parts = self.fixed.clone();
        // What stands behind the path may be a secret, and may say what is done all the same.
        let (url, query) = rendered.url.split_once('?').unwrap_or((&rendered.url, ""));
        let query = if query.is_empty() { String::new() } else { format!("?sha256:{}", hex(&sha256(query.as_bytes())[..16])) };
        parts.insert(Part::Endpoint, shown(&format!("{} {url}{query}", rendered.method)));
        let body = if self.has_template { Cow::Owned(unnamed(&rendered.body)) } else { Cow::Borrowed(&rendered.body[..]) };
        // Where a member is named twice, nobody knows which one the provider reads.
        let value: Option<Value> = unique_json(&body).ok();
        let model = value.as_ref().and_then(|value| value.pointer(&self.model)?.as_str()).unwrap_or_default();
        parts.insert(Part::Model, shown(model));
        let mut parameters = self.parameters(&body);
        let headers = self.bound_headers(&rendered.headers);
        if !headers.is_empty() {
            parameters = hex(&sha256(format!("{parameters}\n{headers}").as_bytes()));
        }
        parts.insert(Part::Parameters, parameters);
        Bindings(parts)
    }

    /// What headers say beside that the body is JSON; `""` for nothing.
    fn bound_headers(&self, headers: &[(String, String)]) -> String {
        let (mut bound, mut types) = (Vec::new(), Vec::new());
        for (name, value) in headers {
            let name = name.to_ascii_lowercase();
            match name.as_str() {
                "content-type" => types.push(media_type(value)),
                free if HARMLESS.contains(&free) || self.free_headers.iter().any(|one| one == free) => {}
                _ => bound.push(format!("{name}: {value}")),
            }
        }
        if types != ["application/json"] {
            bound.push(format!("content-type: {}", types.join(", ")));
        }
        bound.sort();
        bound.join("\n")
    }

    /// Whether these bindings are of this contract, as far as the configuration fixes it.
    pub fn may_cover(&self, bindings: &Bindings) -> bool {
        self.fixed.iter().all(|(part, hash)| bindings.get(*part) == hash)
    }

    /// JSON pointers to the members of two bodies that differ and are bound as parameters. Lists are told as a whole.
    pub(crate) fn members_that_differ(&self, one: &Value, other: &Value) -> Vec<String> {
        fn look(
            place: &str,
            one: Option<&Value>,
            other: Option<&Value>,
            is_bound: &dyn Fn(&str) -> bool,
            found: &mut Vec<String>,
        ) {
            if one == other || !is_bound(place) {
                return;
            }
            let (Some(Value::Object(one)), Some(Value::Object(other))) = (one, other) else {
                found.push(place.to_owned());
                return;
            };
            let names: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
            for name in names {
                let place = format!("{place}/{}", name.replace('~', "~0").replace('/', "~1"));
                look(&place, one.get(name), other.get(name), is_bound, found);
            }
        }
        let is_bound = |place: &str| *place != self.model && self.vary.iter().all(|pointer| pointer != place);
        let mut found = Vec::new();
        look("", Some(one), Some(other), &is_bound, &mut found);
        found
    }

    fn parameters(&self, body: &[u8]) -> String {
        if self.vary.iter().any(String::is_empty) {
            return String::new();
        }
        let mut ignored = self.vary.clone();
        ignored.push(self.model.clone());
        match canonical_json(body, &ignored) {
            Some(text) => hex(&sha256(text.as_bytes())),
            // Nothing in it can be told apart.
            None => hex(&sha256(body)),
        }
    }
}

impl Bindings {
    /// What a part is bound to; `""` for a part that is not there.
    pub fn get(&self, part: Part) -> &str {
        self.0.get(&part).map_or("", String::as_str)
    }

    /// The parts in which these differ from others.
    pub fn differ(&self, other: &Bindings) -> Vec<Part> {
        Part::ALL.into_iter().filter(|part| self.get(*part) != other.get(*part)).collect()
    }

    /// Names these bindings: SHA-256 over route, provider and every part, in hexadecimal.
    pub fn hash(&self, route: &str, provider: &str) -> String {
        let mut text = format!("{route}\n{provider}\n");
        for part in Part::ALL {
            text.push_str(&format!("{part} {}\n", self.get(part)));
        }
        hex(&sha256(text.as_bytes()))
    }
}

/// A media type as it counts: without a charset that is JSON's own.
fn media_type(content_type: &str) -> String {
    let mut parts = content_type.split(';').map(|part| part.trim().to_ascii_lowercase());
    let essence = parts.next().unwrap_or_default();
    let is_own =
        |part: &String| part.is_empty() || ["charset=utf-8", "charset=\"utf-8\"", "charset=us-ascii"].contains(&part.as_str());
    std::iter::once(essence).chain(parts.filter(|part| !is_own(part))).collect::<Vec<_>>().join(";")
}

fn shown(text: &str) -> String {
    let is_plain = text.chars().count() <= SHOWN_CHARS_MAX && !text.chars().any(char::is_control);
    if is_plain { text.to_owned() } else { format!("sha256:{}", hex(&sha256(text.as_bytes()))) }
}

/// A proof that a provider kept a contract.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Certificate {
    /// Its name, 32 hexadecimal digits: attempts that it allowed carry it.
    pub id: String,
    /// The route.
    pub route: String,
    /// The provider.
    pub provider: String,
    /// What was proved.
    pub bindings: Bindings,
    /// The model that answered, by its own word; `""` if it names none.
    pub answered_by: String,
    /// Which build of it answered (`system_fingerprint`), if it says so; `""` if not.
    pub fingerprint: String,
    /// When it was issued, Unix ms.
    pub issued_ms: u64,
    /// From when on it proves nothing, Unix ms.
    pub expires_ms: u64,
    /// Who had it issued.
    pub issued_by: String,
    /// Runs that were decided.
    pub runs: u32,
    /// Of these, how many failed.
    pub failures: u32,
    /// Runs of which nothing can be said, for the provider did not answer.
    pub inconclusive: u32,
    /// SHA-256 of the report that is its evidence, in hexadecimal.
    pub evidence: String,
}

impl Certificate {
    /// How what answered differs from what is certified, in words; `None` where it does not, or one of the two is not named.
    pub fn drift(&self, model: &str, build: &str) -> Option<String> {
        let pairs = [("model", model, self.answered_by.as_str()), ("build", build, self.fingerprint.as_str())];
        let differs =
            |(_, answers, certified): &(_, &str, &str)| !answers.is_empty() && !certified.is_empty() && answers != certified;
        let (what, answers, certified) = pairs.into_iter().find(differs)?;
        Some(format!("{what} {answers:?} answered, {certified:?} is certified"))
    }
}

/// Whether a certificate is good, beside its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It is.
    Live,
    /// Not for now: the provider has changed, or its answers have, or somebody has doubts.
    Suspended,
    /// Never again.
    Revoked,
}

impl Standing {
    /// The word in the store and in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Standing::Live => "live",
            Standing::Suspended => "suspended",
            Standing::Revoked => "revoked",
        }
    }

    /// The standing of that word.
    pub fn of(word: &str) -> Option<Self> {
        [Standing::Live, Standing::Suspended, Standing::Revoked].into_iter().find(|standing| standing.as_str() == word)
    }
}

/// A certificate as the store has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// What was issued.
    pub certificate: Certificate,
    /// Whether it is good.
    pub standing: Standing,
    /// Why it is not, in words; `""` while it is.
    pub reason: String,
    /// Who said so; `""` while it is.
    pub by: String,
}

/// Why a provider may not take a job over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denial {
    /// Nothing was ever proved, or it is so long ago that nobody remembers.
    NoCertificate,
    /// Something else was proved: these parts differ.
    Other {
        /// In the order of [`Part::ALL`], 1 or more.
        parts: Vec<Part>,
    },
    /// The proof is too old.
    Expired {
        /// Since when, Unix ms.
        since_ms: u64,
    },
    /// Its certificate is suspended.
    Suspended {
        /// Why.
        reason: String,
    },
    /// Its certificate is revoked.
    Revoked {
        /// Why.
        reason: String,
    },
    /// Nobody can tell: the store does not answer, or what it has cannot be read.
    Unreadable {
        /// Why.
        reason: String,
    },
    /// The route has no suite, so nothing can be proved.
    NoSuite,
}

impl Denial {
    /// The words of the metric's label, one for each kind; what differs is named by its first part.
    pub const REASONS: [&str; 15] = [
        "no_certificate",
        "expired",
        "suspended",
        "revoked",
        "unreadable",
        "no_suite",
        "endpoint",
        "model",
        "template",
        "chat_template",
        "tokenizer",
        "schema",
        "assertions",
        "parameters",
        "suite",
    ];

    /// The word for the metric's label.
    pub fn word(&self) -> &'static str {
        match self {
            Denial::NoCertificate => "no_certificate",
            Denial::Expired { .. } => "expired",
            Denial::Suspended { .. } => "suspended",
            Denial::Revoked { .. } => "revoked",
            Denial::Unreadable { .. } => "unreadable",
            Denial::NoSuite => "no_suite",
            Denial::Other { parts } => parts.first().map_or("no_certificate", |part| part.as_str()),
        }
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Denial::NoCertificate => f.write_str("it has no certificate"),
            Denial::NoSuite => f.write_str("the route has no suite by which it could be certified"),
            Denial::Expired { .. } => f.write_str("its certificate has expired"),
            Denial::Suspended { reason } => write!(f, "its certificate is suspended: {reason}"),
            Denial::Revoked { reason } => write!(f, "its certificate is revoked: {reason}"),
            Denial::Unreadable { reason } => write!(f, "its certificate cannot be read: {reason}"),
            Denial::Other { parts } => {
                f.write_str("its certificate is for ")?;
                for (place, part) in parts.iter().enumerate() {
                    let between = match place {
                        0 => "",
                        last if last + 1 == parts.len() => " and ",
                        _ => ", ",
                    };
                    let another = if matches!(part, Part::Assertions | Part::Parameters) { "other" } else { "another" };
                    write!(f, "{between}{another} {part}")?;
                }
                Ok(())
            }
        }
    }
}

/// Decides whether what is kept of a route and provider covers a request.
///
/// `kept` is in the store's order, the newest first. A revoked or suspended certificate for the very same contract decides, whatever
/// else was issued for it before. Of several for other contracts the nearest one explains the denial.
///
/// # Errors
/// Why not.
pub fn decide<'a>(wanted: &Bindings, kept: &'a [Kept], now_ms: u64) -> Result<&'a Certificate, Denial> {
    let Some(newest) = in_force(kept).find(|one| one.certificate.bindings == *wanted) else {
        let nearest = kept.iter().map(|one| wanted.differ(&one.certificate.bindings)).min_by_key(Vec::len);
        return Err(nearest.map_or(Denial::NoCertificate, |parts| Denial::Other { parts }));
    };
    match newest.standing {
        Standing::Revoked => Err(Denial::Revoked { reason: newest.reason.clone() }),
        Standing::Suspended => Err(Denial::Suspended { reason: newest.reason.clone() }),
        Standing::Live if newest.certificate.expires_ms <= now_ms => {
            Err(Denial::Expired { since_ms: newest.certificate.expires_ms })
        }
        Standing::Live => Ok(&newest.certificate),
    }
}

/// Of certificates in the store's order, those that decide: the newest of each contract.
pub fn in_force(kept: &[Kept]) -> impl Iterator<Item = &Kept> {
    let of = |place: usize| &kept[place].certificate.bindings;
    let is_newest = move |place: usize| (0..place).all(|newer| of(newer) != of(place));
    (0..kept.len()).filter(move |place| is_newest(*place)).map(|place| &kept[place])
}

/// Whether a certificate of this name still lets a request go there: it is good itself, and so is the last word on its contract.
///
/// # Errors
/// Why not.
pub fn stands(id: &str, wanted: &Bindings, kept: &[Kept], now_ms: u64) -> Result<(), Denial> {
    let own = kept.iter().find(|one| one.certificate.id == id).ok_or(Denial::NoCertificate)?;
    decide(wanted, std::slice::from_ref(own), now_ms)?;
    decide(wanted, kept, now_ms).map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::provider::asking::template;

    fn contract() -> Contract {
        let fixed = [(Part::Template, "t"), (Part::Schema, "s"), (Part::Assertions, "a"), (Part::Suite, "u")];
        Contract {
            route: "chat".to_owned(),
            provider: "laser".to_owned(),
            fixed: fixed.into_iter().map(|(part, hash)| (part, hash.to_owned())).collect(),
            model: "/model".to_owned(),
            vary: vec!["/messages".to_owned(), "/stream".to_owned()],
            free_headers: Vec::new(),
            has_template: false,
        }
    }

    fn rendered(url: &str, body: &str) -> Rendered {
        let headers = vec![("content-type".to_owned(), "application/json".to_owned())];
        Rendered { method: "POST".to_owned(), url: url.to_owned(), headers, body: Arc::from(body.as_bytes()) }
    }

    const URL: &str = "https://laser.example/v1/chat";
    const BODY: &str = r#"{"model":"m-1","temperature":0,"messages":[{"role":"user","content":"hi"}]}"#;

    fn kept(bindings: &Bindings, standing: Standing) -> Kept {
        let certificate = Certificate {
            id: "0".repeat(32),
            route: "chat".to_owned(),
            provider: "laser".to_owned(),
            bindings: bindings.clone(),
            answered_by: "m-1".to_owned(),
            fingerprint: String::new(),
            issued_ms: 1_000,
            expires_ms: 2_000,
            issued_by: "alice".to_owned(),
            runs: 3,
            failures: 0,
            inconclusive: 0,
            evidence: String::new(),
        };
        Kept { certificate, standing, reason: "doubts".to_owned(), by: "bob".to_owned() }
    }

    #[test]
    fn what_varies_is_covered_and_one_byte_of_anything_else_is_not() {
        let contract = contract();
        let certified = contract.bind(&rendered(URL, BODY));
        let kept = [kept(&certified, Standing::Live)];
        let asked = |url: &str, body: &str| decide(&contract.bind(&rendered(url, body)), &kept, 1_500).map(|one| one.id.clone());
        assert!(asked(URL, BODY).is_ok());
        assert!(asked(URL, r#"{"stream":true,"messages":[],"temperature":0,"model":"m-1"}"#).is_ok());
        let other = |parts: &[Part]| Err(Denial::Other { parts: parts.to_vec() });
        assert_eq!(asked("https://laser.example/v2/chat", BODY), other(&[Part::Endpoint]));
        assert_eq!(asked(&format!("{URL}?api-version=2"), BODY), other(&[Part::Endpoint]));
        let bound = contract.bind(&rendered(&format!("{URL}?key=secret"), BODY));
        assert!(bound.get(Part::Endpoint).starts_with(&format!("POST {URL}?sha256:")), "{bound:?}");
        for (content_type, is_json) in [
            ("Application/JSON; charset=utf-8", true),
            ("application/json;charset=\"UTF-8\"", true),
            ("text/plain", false),
            ("application/json; charset=utf-16", false),
        ] {
            let mut typed = rendered(URL, BODY);
            typed.headers = vec![("Content-Type".to_owned(), content_type.to_owned())];
            let decided = decide(&contract.bind(&typed), &kept, 1_500).map(|one| one.id.clone());
            assert_eq!(decided.is_ok(), is_json, "{content_type}");
        }
        assert_eq!(asked(URL, &BODY.replace("m-1", "m-2")), other(&[Part::Model]));
        assert_eq!(asked(URL, &BODY.replace(":0", ":1")), other(&[Part::Parameters]));
        assert_eq!(asked(URL, "not json"), other(&[Part::Model, Part::Parameters]));
        for part in [Part::Template, Part::ChatTemplate, Part::Tokenizer, Part::Schema, Part::Assertions, Part::Suite] {
            let mut changed = contract.clone();
            changed.fixed.insert(part, "other".to_owned());
            let denied = decide(&changed.bind(&rendered(URL, BODY)), &kept, 1_500).unwrap_err();
            assert_eq!(denied, Denial::Other { parts: vec![part] });
            assert_eq!(denied.word(), part.as_str());
        }
    }

    #[test]
    fn what_names_the_attempt_is_no_part_of_a_contract_and_one_byte_beside_it_is() {
        let contract = Contract { has_template: true, ..contract() };
        let template = "{{ with(body, user=key, metadata=job.id, n=attempt) }}";
        let bound = |template: &str, body: &str| {
            let made = template::body(template, body.as_bytes()).unwrap();
            // Every attempt of every job has this body until it is sent; what is sent differs.
            let sent = |key, job_id, attempt| {
                template::filled(&made, &template::Names { key, job_id, attempt, webhook_url: "" }).unwrap()
            };
            assert_ne!(sent("job-1", "1", 1), sent("job-2", "2", 2));
            contract.bind(&rendered(URL, std::str::from_utf8(&made).unwrap()))
        };
        let certified = bound(template, BODY);
        assert_eq!(certified.get(Part::Model), "m-1");
        assert_eq!(bound(template, &BODY.replace("hi", "another job")), certified);
        let other = |template: &str, body: &str| certified.differ(&bound(template, body));
        assert_eq!(other(template, &BODY.replace(":0", ":1")), [Part::Parameters]);
        assert_eq!(other(template, &BODY.replace("m-1", "m-2")), [Part::Model]);
        assert_eq!(other(&template.replace("n=attempt", "m=attempt"), BODY), [Part::Parameters]);
        assert_eq!(other(&template.replace("user=key", "user=job.id"), BODY), [Part::Parameters]);
        assert_eq!(other(&template.replace("n=attempt", "n='attempt'"), BODY), [Part::Parameters]);
        // Without a template a mark is no place of a name, but a byte that JSON does not have.
        let marked = BODY.replace("\"hi\"", "\0key\0");
        let plain = Contract { has_template: false, ..contract.clone() };
        assert_ne!(plain.bind(&rendered(URL, &marked)), plain.bind(&rendered(URL, &marked.replace("role", "rule"))));
    }

    #[test]
    fn what_comes_with_a_request_is_bound_with_it() {
        let mut contract = contract();
        contract.free_headers = vec!["x-user".to_owned()];
        let kept = [kept(&contract.bind(&rendered(URL, BODY)), Standing::Live)];
        let with = |name: &str, value: &str| {
            let mut asked = rendered(URL, BODY);
            asked.headers.push((name.to_owned(), value.to_owned()));
            decide(&contract.bind(&asked), &kept, 1_500).map(|one| one.id.clone())
        };
        for (name, value) in [("X-User", "7"), ("traceparent", "00-1-2-01"), ("Accept", "text/event-stream")] {
            assert!(with(name, value).is_ok(), "{name}");
        }
        let denied = Err(Denial::Other { parts: vec![Part::Parameters] });
        for (name, value) in
            [("x-model", "other"), ("OpenAI-Beta", "v9"), ("content-encoding", "gzip"), ("content-type", "text/plain")]
        {
            assert_eq!(with(name, value), denied, "{name}");
        }
        let mut untyped = rendered(URL, BODY);
        untyped.headers.clear();
        assert_eq!(decide(&contract.bind(&untyped), &kept, 1_500).map(|one| one.id.clone()), denied);
        // Of two models, nobody knows which one is asked.
        contract.vary = vec![String::new()];
        let two = contract.bind(&rendered(URL, r#"{"model":"m-2","model":"m-1"}"#));
        assert_eq!(two.get(Part::Model), "");
    }

    #[test]
    fn only_a_live_certificate_in_its_time_is_a_yes() {
        let wanted = contract().bind(&rendered(URL, BODY));
        let decided = |standing, now_ms| decide(&wanted, &[kept(&wanted, standing)], now_ms).map(|one| one.expires_ms);
        assert_eq!(decided(Standing::Live, 1_999), Ok(2_000));
        assert_eq!(decided(Standing::Live, 2_000), Err(Denial::Expired { since_ms: 2_000 }));
        assert_eq!(decided(Standing::Suspended, 1_500), Err(Denial::Suspended { reason: "doubts".to_owned() }));
        assert_eq!(decided(Standing::Revoked, 1_500), Err(Denial::Revoked { reason: "doubts".to_owned() }));
        assert_eq!(decide(&wanted, &[], 1_500), Err(Denial::NoCertificate));
    }

    #[test]
    fn a_newer_word_on_the_same_contract_decides() {
        let wanted = contract().bind(&rendered(URL, BODY));
        let old = kept(&wanted, Standing::Revoked);
        let mut new = kept(&wanted, Standing::Live);
        new.certificate.id = "1".repeat(32);
        // The store's order counts, and no gateway's clock.
        new.certificate.issued_ms -= 1;
        assert!(decide(&wanted, &[new.clone(), old.clone()], 1_500).is_ok());
        (new.standing, new.reason) = (Standing::Suspended, "drift".to_owned());
        assert_eq!(decide(&wanted, &[new, old], 1_500), Err(Denial::Suspended { reason: "drift".to_owned() }));
    }

    #[test]
    fn a_certificate_stands_while_it_and_the_last_word_on_its_contract_are_good() {
        let wanted = contract().bind(&rendered(URL, BODY));
        let (mut own, mut newer) = (kept(&wanted, Standing::Live), kept(&wanted, Standing::Live));
        newer.certificate.id = "1".repeat(32);
        let id = own.certificate.id.clone();
        assert_eq!(stands(&id, &wanted, &[newer.clone(), own.clone()], 1_500), Ok(()));
        assert_eq!(stands(&id, &wanted, &[newer.clone()], 1_500), Err(Denial::NoCertificate));
        assert_eq!(stands(&id, &wanted, &[own.clone()], 2_000), Err(Denial::Expired { since_ms: 2_000 }));
        let doubts = || "doubts".to_owned();
        newer.standing = Standing::Suspended;
        assert_eq!(stands(&id, &wanted, &[newer.clone(), own.clone()], 1_500), Err(Denial::Suspended { reason: doubts() }));
        (newer.standing, own.standing) = (Standing::Live, Standing::Revoked);
        assert_eq!(stands(&id, &wanted, &[newer, own], 1_500), Err(Denial::Revoked { reason: doubts() }));
    }

    #[test]
    fn a_denial_of_another_contract_names_each_part_of_it() {
        let told = |parts: &[Part]| Denial::Other { parts: parts.to_vec() }.to_string();
        assert_eq!(told(&[Part::Parameters]), "its certificate is for other parameters");
        assert_eq!(told(&[Part::Assertions, Part::Suite]), "its certificate is for other assertions and another suite");
        let all = [Part::Model, Part::Template, Part::Parameters];
        assert_eq!(told(&all), "its certificate is for another model, another template and other parameters");
    }

    #[test]
    fn every_denial_has_a_word_of_the_metric() {
        for part in Part::ALL {
            assert!(Denial::REASONS.contains(&part.as_str()), "{part}");
        }
        for denial in [Denial::NoCertificate, Denial::NoSuite, Denial::Expired { since_ms: 0 }] {
            assert!(Denial::REASONS.contains(&denial.word()), "{denial}");
        }
    }
}
