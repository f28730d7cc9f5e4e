//! An answer that is a stream of server-sent events: told part by part as it comes, kept whole, and whole only with its end marker.
//!
//! The part that completes the end marker, and what follows it, is not told: clients take the marker for the end, and the end is
//! told when the result is stored. A secret is hidden wherever it stands, also across two parts; what is kept is what was told.
//!
//! Events are read as WHATWG HTML, "Server-sent events", has it, with one difference: one that has a type and no data counts too.
//! Deliberately not here: what becomes of the parts (the runtime's), and whether an answer without a stream is one (`judge.rs`).

use bytes::Bytes;
use http::header::{self, HeaderMap};
use serde_json::Value;

use super::judge::{HIDDEN, Hidden, Judge, Named};
use crate::config::{Stream, StreamEnd, StreamError};
use crate::provider::{Telling, Told};

/// Largest event that is looked into for an error, an id and a model, in bytes.
const EVENT_JSON_BYTES_MAX: usize = 1 << 20;

/// Hears an answer while it is read, and tells its parts if it is a stream.
pub(super) struct Listener<'a> {
    judge: &'a Judge,
    marks: &'a Stream,
    told: &'a Telling,
    hearing: Option<Hearing<'a>>,
}

/// A stream that is being read.
struct Hearing<'a> {
    hiding: Hiding<'a>,
    /// `None` for one in a content coding, in which no event can be seen.
    events: Option<Events>,
    seen: Seen,
}

/// What was seen of a stream until now.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Whether there was an end marker.
    pub(super) ended: bool,
    /// Whether it was the last of all, with nothing begun after it.
    pub(super) ended_last: bool,
    /// What told of an error, as the configuration names it.
    pub(super) failed: Option<String>,
    /// What it says of itself.
    pub(super) named: Named,
}

impl<'a> Listener<'a> {
    pub(super) fn new(judge: &'a Judge, marks: &'a Stream, told: &'a Telling) -> Self {
        Listener { judge, marks, told, hearing: None }
    }

    /// Whoever is told.
    pub(super) fn told(&self) -> &Telling {
        self.told
    }

    /// The head has come.
    pub(super) async fn head(&mut self, head: &http::response::Parts) {
        let has_body = head.status.is_success() && head.status != http::StatusCode::NO_CONTENT;
        if !has_body || !declares_events(&head.headers) {
            return;
        }
        let coded = head.headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
        let events = (!coded).then(Events::default);
        self.hearing = Some(Hearing { hiding: Hiding::new(&self.judge.hidden), events, seen: Seen::default() });
        if self.told.is_heard() {
            let (status, headers) = (head.status.as_u16(), self.judge.kept(&head.headers));
            self.told.tell(Told::Head { status, headers }).await;
        }
    }

    /// A part of the body has come: adds to the body what is kept of it.
    pub(super) async fn part(&mut self, part: Bytes, body: &mut Vec<u8>) {
        let Some(hearing) = &mut self.hearing else { return body.extend_from_slice(&part) };
        let clean = hearing.hiding.clean(part);
        if clean.is_empty() {
            return;
        }
        body.extend_from_slice(&clean);
        hearing.look(&clean, self.marks);
        if !hearing.seen.ended && self.told.is_heard() {
            self.told.tell(Told::Part(clean)).await;
        }
    }

    /// The body is complete: adds what was kept back because a secret might have begun in it.
    pub(super) fn end(&mut self, body: &mut Vec<u8>) {
        let Some(hearing) = &mut self.hearing else { return };
        let rest = std::mem::take(&mut hearing.hiding.begun);
        body.extend_from_slice(&rest);
        hearing.look(&rest, self.marks);
    }

    /// What was seen, if it was a stream.
    pub(super) fn seen(self) -> Option<Seen> {
        let Hearing { events, mut seen, .. } = self.hearing?;
        seen.ended_last &= events.is_none_or(|events| events.is_between());
        Some(seen)
    }
}

impl Hearing<'_> {
    fn look(&mut self, clean: &[u8], marks: &Stream) {
        let Some(events) = &mut self.events else { return };
        let seen = &mut self.seen;
        events.read(clean, |event, data| seen.event(event, data, marks));
    }
}

impl Seen {
    fn event(&mut self, event: &[u8], data: &[u8], marks: &Stream) {
        self.ended_last = marks.end.iter().any(|end| match end {
            StreamEnd::Data(marker) => data == marker.as_bytes(),
            StreamEnd::Event(marker) => event == marker.as_bytes(),
            StreamEnd::Eof => false,
        });
        self.ended |= self.ended_last;
        let json = if data.len() <= EVENT_JSON_BYTES_MAX { json_object(data) } else { None };
        if self.failed.is_none() {
            let failed = marks.error.iter().find(|error| match error {
                StreamError::Event(marker) => event == marker.as_bytes(),
                StreamError::Pointer(pointer) => {
                    json.as_ref().and_then(|json| json.pointer(pointer)).is_some_and(|value| !value.is_null())
                }
            });
            self.failed = failed.map(ToString::to_string);
        }
        if let Some(json) = json
            && self.named.is_anonymous()
        {
            // At its top in each chunk of a chat; one level down in the first event of other APIs.
            let within = [Some(&json), json.get("response"), json.get("message")];
            let named = within.into_iter().flatten().map(Named::of).find(|named| !named.is_anonymous());
            self.named = named.unwrap_or_default();
        }
    }
}

/// Whether an answer's content type is that of a stream.
fn declares_events(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    content_type.split(';').next().is_some_and(|essence| essence.trim().eq_ignore_ascii_case("text/event-stream"))
}

fn json_object(data: &[u8]) -> Option<Value> {
    data.trim_ascii_start().starts_with(b"{").then(|| serde_json::from_slice(data).ok()).flatten()
}

/// Takes a stream apart into events, wherever its parts are cut.
#[derive(Default)]
struct Events {
    /// The line that has begun.
    line: Vec<u8>,
    /// Whether the last byte was a CR: an LF after it belongs to it.
    after_cr: bool,
    /// Whether a line has ended: only the first may begin with a byte order mark.
    began: bool,
    event: Vec<u8>,
    /// Its lines, each with a line break after it.
    data: Vec<u8>,
}

impl Events {
    fn read(&mut self, bytes: &[u8], mut seen: impl FnMut(&[u8], &[u8])) {
        let mut rest = bytes;
        if self.after_cr && !rest.is_empty() {
            self.after_cr = false;
            rest = rest.strip_prefix(b"\n").unwrap_or(rest);
        }
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
            self.line.extend_from_slice(&rest[..end]);
            self.line_ended(&mut seen);
            let is_cr = rest[end] == b'\r';
            rest = &rest[end + 1..];
            if is_cr {
                self.after_cr = rest.is_empty();
                rest = rest.strip_prefix(b"\n").unwrap_or(rest);
            }
        }
        self.line.extend_from_slice(rest);
    }

    fn line_ended(&mut self, seen: &mut impl FnMut(&[u8], &[u8])) {
        let whole = std::mem::take(&mut self.line);
        let mut line = whole.as_slice();
        if !std::mem::replace(&mut self.began, true) {
            line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        }
        if line.is_empty() {
            if !self.event.is_empty() || !self.data.is_empty() {
                let data = self.data.strip_suffix(b"\n").unwrap_or(&self.data);
                seen(&self.event, data);
            }
            self.event.clear();
            self.data.clear();
            return;
        }
        let (field, value) = match line.iter().position(|byte| *byte == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &b""[..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                self.data.extend_from_slice(value);
                self.data.push(b'\n');
            }
            b"event" => {
                self.event.clear();
                self.event.extend_from_slice(value);
            }
            // Comments (no name at all), ids, times to reconnect, and what nobody knows.
            _ => {}
        }
    }

    /// Whether no event has begun.
    fn is_between(&self) -> bool {
        self.line.is_empty() && self.event.is_empty() && self.data.is_empty()
    }
}

/// Hides a secret in what comes in parts.
struct Hiding<'a> {
    forms: &'a [String],
    /// The end of what came, if a secret may have begun in it.
    begun: Vec<u8>,
}

impl<'a> Hiding<'a> {
    fn new(hidden: &'a Hidden) -> Self {
        Hiding { forms: hidden.forms(), begun: Vec::new() }
    }

    /// What can be told of everything that has come.
    fn clean(&mut self, part: Bytes) -> Bytes {
        if self.forms.is_empty() {
            return part;
        }
        let mut text = std::mem::take(&mut self.begun);
        text.extend_from_slice(&part);
        let mut clean = Vec::with_capacity(text.len());
        let mut rest = text.as_slice();
        let may_begin = |byte: &u8| self.forms.iter().any(|form| form.as_bytes().first() == Some(byte));
        loop {
            let plain = rest.iter().position(may_begin).unwrap_or(rest.len());
            clean.extend_from_slice(&rest[..plain]);
            rest = &rest[plain..];
            let Some(first) = rest.first() else { break };
            let whole = self.forms.iter().find(|form| rest.starts_with(form.as_bytes()));
            if let Some(form) = whole {
                clean.extend_from_slice(HIDDEN.as_bytes());
                rest = &rest[form.len()..];
            } else if self.forms.iter().any(|form| form.as_bytes().starts_with(rest)) {
                self.begun = rest.to_vec();
                break;
            } else {
                clean.push(*first);
                rest = &rest[1..];
            }
        }
        clean.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events_of(parts: &[&[u8]]) -> Vec<(String, String)> {
        let mut events = Events::default();
        let mut seen = Vec::new();
        for part in parts {
            events.read(part, |event, data| {
                seen.push((String::from_utf8(event.to_vec()).unwrap(), String::from_utf8(data.to_vec()).unwrap()));
            });
        }
        seen
    }

    fn pair(event: &str, data: &str) -> (String, String) {
        (event.to_owned(), data.to_owned())
    }

    #[test]
    fn events_are_the_same_wherever_their_bytes_are_cut() {
        let whole = "\u{feff}: a comment\r\ndata: one\r\ndata:two\r\n\r\nevent: named\rdata\rdata:  x\r\rid: 7\nretry: 3\n\n\
                     event: bare\n\ndata: [DONE]\n\ndata: not ended";
        let expected = vec![pair("", "one\ntwo"), pair("named", "\n x"), pair("bare", ""), pair("", "[DONE]")];
        let bytes = whole.as_bytes();
        assert_eq!(events_of(&[bytes]), expected);
        for cut in 1..bytes.len() {
            assert_eq!(events_of(&[&bytes[..cut], &bytes[cut..]]), expected, "cut at {cut}");
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(events_of(&single), expected);
    }

    #[test]
    fn a_byte_order_mark_counts_as_one_only_at_the_very_beginning() {
        assert_eq!(events_of(&["\u{feff}data: a\n\n\u{feff}data: b\n\n".as_bytes()]), [pair("", "a")]);
    }

    fn seen_of(marks: &Stream, text: &str) -> Seen {
        let (mut events, mut seen) = (Events::default(), Seen::default());
        events.read(text.as_bytes(), |event, data| seen.event(event, data, marks));
        seen.ended_last &= events.is_between();
        seen
    }

    #[test]
    fn the_default_understands_an_openai_compatible_stream() {
        let marks = Stream::default();
        let seen = seen_of(&marks, "data: {\"id\":\"c-1\",\"model\":\"m\",\"error\":null}\n\ndata: [DONE]\n\n");
        assert!(seen.ended && seen.ended_last && seen.failed.is_none());
        assert_eq!((seen.named.id.as_deref(), seen.named.model.as_deref()), (Some("c-1"), Some("m")));
        let seen = seen_of(&marks, "data: {\"error\":{\"message\":\"overloaded\"}}\n\ndata: [DONE]\n\n");
        assert_eq!(seen.failed.as_deref(), Some("/error"));
        assert_eq!(seen_of(&marks, "event: error\ndata: {}\n\n").failed.as_deref(), Some("event: error"));
        // A text that speaks of the marker is none.
        for text in ["data: [DONE] \n\n", "data: \"[DONE]\"\n\n", ": [DONE]\n\n", "data: [DONE]\ndata: x\n\n", "data: [DONE]\n"] {
            assert!(!seen_of(&marks, text).ended, "{text:?}");
        }
        let after = seen_of(&marks, "data: [DONE]\n\ndata: more");
        assert!(after.ended && !after.ended_last);
    }

    #[test]
    fn the_name_of_an_event_can_be_the_marker() {
        let marks = Stream { end: vec!["event: response.completed".parse().unwrap()], ..Stream::default() };
        let begins = "event: response.created\ndata: {\"response\":{\"id\":\"r-1\",\"model\":\"m\",\"error\":null}}\n\n";
        let seen = seen_of(&marks, begins);
        assert!(!seen.ended && seen.failed.is_none());
        assert_eq!(seen.named.id.as_deref(), Some("r-1"));
        assert!(seen_of(&marks, "event: response.completed\ndata: {}\n\n").ended);
        assert!(!seen_of(&marks, "data: [DONE]\n\n").ended);
        assert!(seen_of(&marks, "event: response.failed\ndata: {}\n\n").failed.is_some());
    }

    #[test]
    fn a_secret_is_hidden_wherever_its_bytes_are_cut() {
        let hidden = Hidden::new(Some("sk-live/12"));
        let text = b"a sk-live/12, sk-sk-live\\/12 and sk-live/1";
        let expected = "a [hidden], sk-[hidden] and sk-live/1";
        let cleaned = |parts: &[&[u8]]| {
            let mut hiding = Hiding::new(&hidden);
            let mut clean = Vec::new();
            for part in parts {
                let told = hiding.clean(Bytes::copy_from_slice(part));
                // Not one byte of a secret's beginning is told before it is known not to be one.
                clean.extend_from_slice(&told);
                assert!(!String::from_utf8_lossy(&clean).contains("sk-live/12"));
            }
            clean.extend_from_slice(&hiding.begun);
            String::from_utf8(clean).unwrap()
        };
        for one in 0..text.len() {
            for two in one..text.len() {
                assert_eq!(cleaned(&[&text[..one], &text[one..two], &text[two..]]), expected, "{one} {two}");
            }
        }
        let mut hiding = Hiding::new(&hidden);
        assert_eq!(hiding.clean(Bytes::from_static(b"nothing is kept back")), "nothing is kept back");
        assert_eq!(hiding.clean(Bytes::from_static(b"but sk-li")), "but ");
        assert_eq!(hiding.clean(Bytes::from_static(b"ghtning")), "sk-lightning");
    }
}
