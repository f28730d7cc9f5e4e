//! What a complete exchange means. Pure functions over an answer.
//!
//! | status | with a complete body (JSON, if it says so) | else |
//! |---|---|---|
//! | 2xx | succeeded | unknown |
//! | asserted "not executed" by the provider's entry | rejected | unknown |
//! | 400–407, 410–418, 421–424, 426, 428, 429, 431, 451 | rejected | unknown |
//! | 408, 409, 425: it may be running already | unknown | unknown |
//! | any other 4xx: unregistered, used by intermediaries for "the client went away" | unknown | unknown |
//! | 3xx: never followed, and it does not say that nothing was done | unknown | unknown |
//! | 5xx and everything else | unknown | unknown |
//!
//! A body is complete when its framing says so. One that ends with the connection does not say; it counts as complete only if it
//! is a JSON object, array or string, which name their own end. A body in a content coding is kept as it is, and neither its JSON
//! nor a secret in it can be seen; the adapter never asks for one.
//!
//! A stream of server-sent events (2xx) is complete when its end marker was there, too; without a framing, when nothing came after
//! it. One that told of an error is unknown, marker or not: the work had begun, and nothing says how much of it was done.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::header::{self, HeaderMap, HeaderName};
use http::{Method, StatusCode, Version};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

use super::stream::Seen;
use crate::config::{Stream, StreamEnd};
use crate::provider::{Outcome, Response};

/// Longest name that is believed for a remote id or a model, in bytes.
const NAME_BYTES_MAX: usize = 512;
/// The longest that a provider may ask to be left alone.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// A complete exchange's answer.
pub(super) struct Answer<'a> {
    pub(super) status: StatusCode,
    /// HTTP/2 says by itself where a body ends.
    pub(super) version: Version,
    pub(super) headers: &'a HeaderMap,
    pub(super) body: Vec<u8>,
    pub(super) method: &'a Method,
}

/// Judges answers for one provider.
pub(super) struct Judge {
    pub(super) hidden: Hidden,
    pub(super) not_executed: Vec<u16>,
}

enum Meaning {
    Done,
    Refused,
    Ambiguous,
}

/// Whether a status says by itself that nothing was done.
pub(crate) fn refuses(status: u16) -> bool {
    matches!(status, 400..=407 | 410..=418 | 421..=424 | 426 | 428 | 429 | 431 | 451)
}

impl Judge {
    pub(super) fn judge(&self, answer: Answer<'_>) -> Outcome {
        let status = answer.status.as_u16();
        let meaning = self.meaning(status);
        if matches!(meaning, Meaning::Ambiguous) {
            return Outcome::Unknown { reason: format!("status {status}") };
        }
        let bare = answer.method == Method::HEAD || matches!(status, 204 | 304);
        let body = self.hidden.hide(answer.body);
        let coded = answer.headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
        let json = if bare || coded { None } else { json(&body) };
        if !bare && !coded && declares_json(answer.headers) && json.is_none() {
            return Outcome::Unknown { reason: format!("bad_json: {status} declares JSON and its body is none") };
        }
        if !bare
            && answer.version != Version::HTTP_2
            && !is_framed(answer.headers)
            && !json.is_some_and(|text| text.starts_with(['{', '[', '"']))
        {
            return Outcome::Unknown { reason: format!("truncated: {status} with a body that has neither length nor end") };
        }
        let named = if declares_json(answer.headers) { json.map(Named::read).unwrap_or_default() } else { Named::default() };
        #[expect(clippy::disallowed_methods, reason = "an HTTP date is on everybody's wall clock")]
        let retry_after = retry_after(answer.headers, SystemTime::now());
        let response = Response { status, headers: self.kept(answer.headers), body: body.into() };
        match meaning {
            Meaning::Done => Outcome::Succeeded { response, remote_id: named.id, model: named.model },
            Meaning::Refused => Outcome::Rejected { reason: format!("status {status}"), response, retry_after },
            Meaning::Ambiguous => Outcome::Unknown { reason: format!("status {status}") },
        }
    }

    /// What a stream means that was heard to its end.
    pub(super) fn judge_stream(&self, head: &http::response::Parts, body: Vec<u8>, seen: Seen, marks: &Stream) -> Outcome {
        let (status, bytes) = (head.status.as_u16(), body.len());
        if let Some(error) = seen.failed {
            return Outcome::Unknown { reason: format!("stream_error: {status}, and its stream told of an error ({error})") };
        }
        let framed = is_framed(&head.headers);
        let whole = match framed {
            true => seen.ended || marks.end.contains(&StreamEnd::Eof),
            false => seen.ended_last,
        };
        if !whole {
            let reason = format!("truncated: the stream ended without its end marker, after {bytes} bytes");
            return Outcome::Unknown { reason };
        }
        let response = Response { status, headers: self.kept(&head.headers), body: body.into() };
        Outcome::Succeeded { response, remote_id: seen.named.id, model: seen.named.model }
    }

    fn meaning(&self, status: u16) -> Meaning {
        match status {
            200..=299 => Meaning::Done,
            _ if self.not_executed.contains(&status) => Meaning::Refused,
            _ if refuses(status) => Meaning::Refused,
            _ => Meaning::Ambiguous,
        }
    }

    /// The answer's end-to-end headers, without cookies, and without its length, which whoever passes it on computes again.
    pub(super) fn kept(&self, headers: &HeaderMap) -> Vec<(String, String)> {
        let named: Vec<String> = headers
            .get_all(header::CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .map(|name| name.trim().to_ascii_lowercase())
            .collect();
        let end_to_end = |name: &HeaderName| {
            !is_hop_by_hop(name.as_str())
                && name != header::SET_COOKIE
                && name != header::CONTENT_LENGTH
                && !named.iter().any(|other| other == name.as_str())
        };
        let kept = headers.iter().filter(|(name, _)| end_to_end(name));
        kept.map(|(name, value)| (name.to_string(), self.hidden.hide_text(&String::from_utf8_lossy(value.as_bytes())))).collect()
    }
}

/// Whether a header concerns one connection only (RFC 9110, 7.6.1).
pub(super) fn is_hop_by_hop(name: &str) -> bool {
    name.starts_with("proxy-") || matches!(name, "connection" | "keep-alive" | "te" | "trailer" | "transfer-encoding" | "upgrade")
}

fn is_framed(headers: &HeaderMap) -> bool {
    match headers.get_all(header::TRANSFER_ENCODING).iter().next_back() {
        Some(coding) => coding
            .to_str()
            .is_ok_and(|coding| coding.rsplit(',').next().is_some_and(|last| last.trim().eq_ignore_ascii_case("chunked"))),
        None => headers.contains_key(header::CONTENT_LENGTH),
    }
}

fn declares_json(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || essence.ends_with("+json")
}

/// The body as text, if it is one JSON value.
fn json(body: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(body).ok()?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text).trim_start();
    serde_json::from_str::<IgnoredAny>(text).ok().map(|_| text)
}

/// What an answer says of itself, at its top.
#[derive(Debug, Default)]
pub(super) struct Named {
    pub(super) id: Option<String>,
    pub(super) model: Option<String>,
}

impl Named {
    fn read(json: &str) -> Self {
        #[derive(Deserialize)]
        struct Top<'a> {
            #[serde(borrow)]
            id: Option<&'a RawValue>,
            #[serde(borrow)]
            model: Option<&'a RawValue>,
        }
        let name = |value: Option<&RawValue>| {
            let name: String = serde_json::from_str(value?.get()).ok()?;
            is_name(&name).then_some(name)
        };
        let Ok(top) = serde_json::from_str::<Top<'_>>(json) else { return Named::default() };
        Named { id: name(top.id), model: name(top.model) }
    }

    /// What an event of a stream says.
    pub(super) fn of(json: &Value) -> Self {
        let name = |field: &str| json.get(field).and_then(Value::as_str).filter(|name| is_name(name)).map(str::to_owned);
        Named { id: name("id"), model: name("model") }
    }

    pub(super) fn is_anonymous(&self) -> bool {
        self.id.is_none() && self.model.is_none()
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.chars().any(char::is_control)
}

/// Reads `Retry-After` in both of its forms. A date counts from the answer's own `Date`, so that the clocks need not agree.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(text.parse().map_or(RETRY_AFTER_MAX, Duration::from_secs).min(RETRY_AFTER_MAX));
    }
    let date = headers.get(header::DATE).and_then(|date| date.to_str().ok()).and_then(unix_seconds);
    let now = date.unwrap_or_else(|| now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()));
    Some(Duration::from_secs(unix_seconds(text)?.saturating_sub(now)).min(RETRY_AFTER_MAX))
}

/// Reads an IMF-fixdate, `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110, 5.6.7). The obsolete forms are not read.
fn unix_seconds(date: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (_weekday, rest) = date.trim().split_once(", ")?;
    let [day, month, year, time, "GMT"] = rest.split(' ').collect::<Vec<_>>()[..] else { return None };
    let month = MONTHS.iter().position(|name| *name == month)? as u64;
    let [hour, minute, second] = time.split(':').map(|part| part.parse::<u64>().ok()).collect::<Option<Vec<_>>>()?[..] else {
        return None;
    };
    let (day, year) = (day.parse::<u64>().ok()?, year.parse::<u64>().ok()?);
    if !(1..=31).contains(&day) || !(1970..=9999).contains(&year) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Days since 1970-01-01, with years that begin in March so that the leap day is their last.
    let (year, month) = if month < 2 { (year - 1, month + 10) } else { (year, month - 2) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1 - 719_468;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

/// What stands where a secret was.
pub(super) const HIDDEN: &str = "[hidden]";

/// The credential, in the forms in which a provider's answer may repeat it. It never reaches a result.
pub(super) struct Hidden(Vec<String>);

impl Hidden {
    pub(super) fn new(secret: Option<&str>) -> Self {
        // Some JSON writers escape the slash.
        let forms = secret.into_iter().flat_map(|secret| [secret.to_owned(), secret.replace('/', "\\/")]);
        let mut forms: Vec<String> = forms.collect();
        forms.dedup();
        Hidden(forms)
    }

    pub(super) fn forms(&self) -> &[String] {
        &self.0
    }

    pub(super) fn hide(&self, body: Vec<u8>) -> Vec<u8> {
        self.0.iter().fold(body, |body, form| replace(body, form.as_bytes()))
    }

    fn hide_text(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, form| text.replace(form, HIDDEN))
    }
}

fn replace(body: Vec<u8>, secret: &[u8]) -> Vec<u8> {
    let mut clean = Vec::new();
    let mut rest = body.as_slice();
    while let Some(place) = rest.windows(secret.len()).position(|window| window == secret) {
        clean.extend_from_slice(&rest[..place]);
        clean.extend_from_slice(HIDDEN.as_bytes());
        rest = &rest[place + secret.len()..];
    }
    if clean.is_empty() {
        return body;
    }
    clean.extend_from_slice(rest);
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(status: u16, headers: &[(&'static str, &'static str)], body: &str) -> Outcome {
        let judge = Judge { hidden: Hidden::new(Some("secret/token")), not_executed: vec![503] };
        let headers: HeaderMap =
            headers.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect();
        let status = StatusCode::from_u16(status).unwrap();
        judge.judge(Answer { status, version: Version::HTTP_11, headers: &headers, body: body.into(), method: &Method::POST })
    }

    #[test]
    fn every_status_means_what_the_table_says() {
        for status in 100..=999 {
            let expected = match status {
                200..=299 => "succeeded",
                503 => "rejected",
                408 | 409 | 419 | 420 | 425 | 427 | 430 => "unknown",
                400..=431 | 451 => "rejected",
                _ => "unknown",
            };
            assert_eq!(judged(status, &[("content-length", "2")], "{}").word(), expected, "{status}");
        }
    }

    #[test]
    fn declared_json_that_is_none_is_unknown_whatever_the_status() {
        for status in [200, 400, 429, 503] {
            for content_type in ["application/json", "Application/Problem+JSON; charset=utf-8"] {
                for body in ["", "{", "{} {}", "<html>"] {
                    let outcome = judged(status, &[("content-length", "0"), ("content-type", content_type)], body);
                    let reason = format!("bad_json: {status} declares JSON and its body is none");
                    assert_eq!(outcome, Outcome::Unknown { reason }, "{body:?}");
                }
            }
        }
        assert_eq!(
            judged(200, &[("content-length", "0"), ("content-type", "application/json")], "\u{feff} {}").word(),
            "succeeded"
        );
        assert_eq!(judged(204, &[("content-type", "application/json")], "").word(), "succeeded");
    }

    #[test]
    fn a_body_that_ends_with_the_connection_is_complete_only_if_it_names_its_end() {
        for (body, expected) in
            [("{\"a\":1}", "succeeded"), ("[1]", "succeeded"), ("\"a\"", "succeeded"), ("12", "unknown"), ("text", "unknown")]
        {
            assert_eq!(judged(200, &[], body).word(), expected, "{body}");
        }
        assert_eq!(judged(200, &[("transfer-encoding", "gzip, chunked")], "text").word(), "succeeded");
        assert_eq!(judged(200, &[("transfer-encoding", "chunked, gzip"), ("content-length", "4")], "text").word(), "unknown");
    }

    #[test]
    fn names_are_read_from_the_top_of_a_json_object_only() {
        let named = |body: &str| match judged(200, &[("content-length", "0"), ("content-type", "application/json")], body) {
            Outcome::Succeeded { remote_id, model, .. } => (remote_id, model),
            other => panic!("{other:?}"),
        };
        assert_eq!(named(r#"{"id":"a","model":"m","x":1e400}"#), (Some("a".to_owned()), Some("m".to_owned())));
        assert_eq!(named(r#"{"id":7,"model":["m"]}"#), (None, None));
        assert_eq!(named(r#"{"in":{"id":"a","model":"m"}}"#), (None, None));
        assert_eq!(named(r#"{"id":"a\n","model":""}"#), (None, None));
        assert_eq!(named("[]"), (None, None));
        assert_eq!(named(&format!(r#"{{"id":"{}"}}"#, "x".repeat(NAME_BYTES_MAX + 1))), (None, None));
    }

    #[test]
    fn dates_are_read_as_the_calendar_has_them() {
        for (date, seconds) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", Some(0)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(784_111_777)),
            ("Tue, 29 Feb 2000 23:59:59 GMT", Some(951_868_799)),
            ("Wed, 01 Mar 2000 00:00:00 GMT", Some(951_868_800)),
            ("Fri, 31 Dec 2100 00:00:00 GMT", Some(4_133_894_400)),
            ("Sunday, 06-Nov-94 08:49:37 GMT", None),
            ("Sun, 06 Nov 1994 08:49:37", None),
            ("Sun, 06 Nov 1994 25:49:37 GMT", None),
            ("", None),
        ] {
            assert_eq!(unix_seconds(date), seconds, "{date}");
        }
    }

    #[test]
    fn retry_after_is_read_in_both_forms() {
        let asked = |headers: &[(&'static str, &'static str)]| {
            let headers: HeaderMap =
                headers.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect();
            retry_after(&headers, UNIX_EPOCH + Duration::from_secs(784_111_770))
        };
        assert_eq!(asked(&[("retry-after", "2")]), Some(Duration::from_secs(2)));
        assert_eq!(asked(&[("retry-after", "99999999999999999999999")]), Some(RETRY_AFTER_MAX));
        assert_eq!(asked(&[("retry-after", "Sun, 06 Nov 1994 08:49:37 GMT")]), Some(Duration::from_secs(7)));
        assert_eq!(
            asked(&[("retry-after", "Sun, 06 Nov 1994 08:49:37 GMT"), ("date", "Sun, 06 Nov 1994 08:49:27 GMT")]),
            Some(Duration::from_secs(10))
        );
        assert_eq!(asked(&[("retry-after", "Sun, 06 Nov 1994 08:00:00 GMT")]), Some(Duration::ZERO));
        assert_eq!(asked(&[("retry-after", "soon")]), None);
        assert_eq!(asked(&[]), None);
    }

    #[test]
    fn an_echoed_secret_is_hidden_in_body_and_headers() {
        let body = r#"{"error":"bad key secret/token or secret\/token!","again":"secret/tokensecret/token"}"#;
        let Outcome::Rejected { reason, response, .. } =
            judged(401, &[("content-length", "0"), ("content-type", "application/json"), ("x-key", "is secret/token")], body)
        else {
            panic!("rejected");
        };
        assert_eq!(reason, "status 401");
        let text = String::from_utf8(response.body.to_vec()).unwrap();
        assert_eq!(text, r#"{"error":"bad key [hidden] or [hidden]!","again":"[hidden][hidden]"}"#);
        assert!(response.headers.contains(&("x-key".to_owned(), "is [hidden]".to_owned())));
    }

    #[test]
    fn only_end_to_end_headers_are_kept() {
        let headers = [
            ("content-length", "2"),
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("set-cookie", "a=b"),
            ("proxy-authenticate", "Basic"),
            ("content-type", "text/plain"),
            ("x-kept", "1"),
        ];
        let Outcome::Succeeded { response, .. } = judged(200, &headers, "ok") else { panic!("succeeded") };
        let names: Vec<&str> = response.headers.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["content-type", "x-kept"]);
    }
}
