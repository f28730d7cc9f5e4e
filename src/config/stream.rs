//! What a provider's stream of server-sent events must end with, and what in it means that it failed.
//!
//! Written as they stand on the wire: `data: [DONE]`, `event: message_stop`. Plain words; `provider/http/stream.rs` looks for them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest word that is looked for in a stream, in bytes: markers are short, and each event is compared with each of them.
pub const STREAM_WORD_BYTES_MAX: usize = 256;

/// How a stream is read.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Stream {
    /// Its end marker, or several of which one must be there.
    #[serde(deserialize_with = "one_or_many")]
    pub end: Vec<StreamEnd>,
    /// What means that it failed, whatever its status was.
    #[serde(deserialize_with = "one_or_many")]
    pub error: Vec<StreamError>,
}

impl Default for Stream {
    /// As OpenAI-compatible APIs have it.
    fn default() -> Self {
        Stream {
            end: vec![StreamEnd::Data("[DONE]".to_owned())],
            error: vec![
                StreamError::Event("error".to_owned()),
                StreamError::Event("response.failed".to_owned()),
                StreamError::Pointer("/error".to_owned()),
            ],
        }
    }
}

/// What shows that a stream is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// `data: …`: an event whose data is exactly this.
    Data(String),
    /// `event: …`: an event of this type.
    Event(String),
    /// `eof`: that its framing is complete. A body that ends with its connection never is.
    Eof,
}

/// What shows that a stream failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamError {
    /// `event: …`: an event of this type.
    Event(String),
    /// `/…`: an event whose data is JSON and has something but null at this pointer (RFC 6901).
    Pointer(String),
}

/// A text that is no end marker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither \"data: …\" nor \"event: …\", each of 1 to {STREAM_WORD_BYTES_MAX} bytes on one line, nor \"eof\"")]
pub struct InvalidStreamEnd(String);

/// A text that names no error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither \"event: …\" nor a JSON pointer \"/…\", each of 1 to {STREAM_WORD_BYTES_MAX} bytes on one line")]
pub struct InvalidStreamError(String);

impl FromStr for StreamEnd {
    type Err = InvalidStreamEnd;

    fn from_str(text: &str) -> Result<Self, InvalidStreamEnd> {
        if text == "eof" {
            return Ok(StreamEnd::Eof);
        }
        let data = || after("data:", text).map(StreamEnd::Data);
        after("event:", text).map(StreamEnd::Event).or_else(data).ok_or_else(|| InvalidStreamEnd(shown(text)))
    }
}

impl FromStr for StreamError {
    type Err = InvalidStreamError;

    fn from_str(text: &str) -> Result<Self, InvalidStreamError> {
        let pointer = || (text.starts_with('/') && is_word(text)).then(|| StreamError::Pointer(text.to_owned()));
        after("event:", text).map(StreamError::Event).or_else(pointer).ok_or_else(|| InvalidStreamError(shown(text)))
    }
}

/// What follows a field's name, without the one blank that a stream leaves out too.
fn after(field: &str, text: &str) -> Option<String> {
    let value = text.strip_prefix(field)?;
    let value = value.strip_prefix(' ').unwrap_or(value);
    is_word(value).then(|| value.to_owned())
}

fn is_word(text: &str) -> bool {
    (1..=STREAM_WORD_BYTES_MAX).contains(&text.len()) && !text.chars().any(char::is_control)
}

fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

impl fmt::Display for StreamEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamEnd::Data(data) => write!(f, "data: {data}"),
            StreamEnd::Event(event) => write!(f, "event: {event}"),
            StreamEnd::Eof => f.write_str("eof"),
        }
    }
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamError::Event(event) => write!(f, "event: {event}"),
            StreamError::Pointer(pointer) => f.write_str(pointer),
        }
    }
}

macro_rules! as_text {
    ($($name:ident)*) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

as_text! { StreamEnd StreamError }

/// Reads a text, or a list of texts.
fn one_or_many<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        One(String),
        Many(Vec<String>),
    }
    let texts = match Written::deserialize(deserializer)? {
        Written::One(text) => vec![text],
        Written::Many(texts) => texts,
    };
    texts.iter().map(|text| text.parse().map_err(serde::de::Error::custom)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_written_as_they_stand_on_the_wire() {
        for (text, end) in [
            ("data: [DONE]", StreamEnd::Data("[DONE]".to_owned())),
            ("data:[DONE]", StreamEnd::Data("[DONE]".to_owned())),
            ("event: message_stop", StreamEnd::Event("message_stop".to_owned())),
            ("eof", StreamEnd::Eof),
        ] {
            assert_eq!(text.parse(), Ok(end.clone()), "{text}");
            assert_eq!(end.to_string().parse(), Ok(end));
        }
        for text in ["", "[DONE]", "data:", "data: ", "event:", "data: a\nb", "EOF"] {
            assert!(text.parse::<StreamEnd>().is_err(), "{text:?}");
        }
        assert_eq!("/error".parse(), Ok(StreamError::Pointer("/error".to_owned())));
        assert_eq!("event: error".parse(), Ok(StreamError::Event("error".to_owned())));
        for text in ["error", "", "event:", "data: x"] {
            assert!(text.parse::<StreamError>().is_err(), "{text:?}");
        }
        assert!(format!("data: {}", "x".repeat(STREAM_WORD_BYTES_MAX + 1)).parse::<StreamEnd>().is_err());
    }
}
