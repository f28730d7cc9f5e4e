//! What a stream of clicks is: what makes two of them the same, and how long that is remembered.

use std::time::Duration;

use crate::dedup::id::{ClickId, FieldError, FieldValue, IdBuilder, of_json};

/// The longest name of a stream.
pub const STREAM_NAME_BYTES_MAX: usize = 64;
/// Fields that make a click the same.
pub const STREAM_FIELDS_MAX: usize = 16;
/// Slices of a window. A generation of buckets has 251 of them.
pub const STREAM_SLICES_MAX: u32 = 64;
/// Shards of a stream: a batch is a call to each.
pub const STREAM_SHARDS_MAX: u16 = 256;
/// The longest window.
pub const STREAM_WINDOW_MAX: Duration = Duration::from_secs(366 * 86_400);

/// A stream of clicks, as it is declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Its name: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// What makes a click the same, in order: names of fields, or JSON pointers. Another order is another stream's.
    pub fields: Vec<String>,
    /// How long a click is remembered at least; at most for a slice longer.
    pub window: Duration,
    /// In how many slices the window is cut. Clicks are forgotten a whole slice at a time: more slices, less memory.
    pub slices: u32,
    /// Over how many hash slots it is spread; one for each master of a cluster is enough. Another number is another stream's.
    pub shards: u16,
    /// How many different clicks a window has, roughly, as long as none has told.
    pub expected: u64,
    /// How long the verdicts of a batch are kept for whoever sends it again.
    pub keep: Duration,
    /// How long a claim stands that is neither committed nor released.
    pub lease: Duration,
    /// Whether each process that asks has a copy of what is remembered: a tenth of the work for Redis, for memory in each of them
    /// (`docs/DEDUP.md`). Everybody who asks about a stream must say the same; who does not is refused.
    pub mirrored: bool,
}

/// Why a stream cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stream {name:?}: {what}")]
pub struct StreamError {
    /// Its name.
    pub name: String,
    /// What is wrong.
    pub what: String,
}

impl Stream {
    /// A stream with a window of a day in 16 slices, one shard, and a million clicks expected.
    pub fn new(name: &str, fields: &[&str]) -> Self {
        Stream {
            name: name.to_owned(),
            fields: fields.iter().map(|field| (*field).to_owned()).collect(),
            window: Duration::from_secs(86_400),
            slices: 16,
            shards: 1,
            expected: 1_000_000,
            keep: Duration::from_secs(600),
            lease: Duration::from_secs(60),
            mirrored: false,
        }
    }

    /// Checks what is declared.
    ///
    /// # Errors
    /// The first thing that is wrong, in words.
    pub fn check(&self) -> Result<(), StreamError> {
        let wrong = |what: String| Err(StreamError { name: self.name.clone(), what });
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.name.is_empty() || self.name.len() > STREAM_NAME_BYTES_MAX || !self.name.chars().all(is_plain) {
            return wrong(format!("a name has 1 to {STREAM_NAME_BYTES_MAX} letters, digits, \"-\", \"_\" and \".\""));
        }
        if self.fields.is_empty() || self.fields.len() > STREAM_FIELDS_MAX || self.fields.iter().any(String::is_empty) {
            return wrong(format!("1 to {STREAM_FIELDS_MAX} fields with names make a click the same"));
        }
        if let Some(twice) = self.fields.iter().enumerate().find(|(place, field)| self.fields[..*place].contains(field)) {
            return wrong(format!("the field {:?} is named twice", twice.1));
        }
        if self.slices == 0 || self.slices > STREAM_SLICES_MAX {
            return wrong(format!("slices is 1 to {STREAM_SLICES_MAX}, not {}", self.slices));
        }
        if self.shards == 0 || self.shards > STREAM_SHARDS_MAX {
            return wrong(format!("shards is 1 to {STREAM_SHARDS_MAX}, not {}", self.shards));
        }
        if self.window < Duration::from_secs(1) || self.window > STREAM_WINDOW_MAX {
            return wrong(format!("window is a second to {} days", STREAM_WINDOW_MAX.as_secs() / 86_400));
        }
        if self.keep < Duration::from_secs(1) || self.keep > self.window.max(Duration::from_secs(600)) {
            return wrong("keep is a second to the window, or to ten minutes where that is less".to_owned());
        }
        if self.lease < Duration::from_secs(1) || self.lease > self.window {
            return wrong("lease is a second to the window".to_owned());
        }
        Ok(())
    }

    /// The id of a click, by what a caller knows of its fields.
    ///
    /// # Errors
    /// The first field without a value that can be used.
    pub fn id<'a>(&self, value_of: impl Fn(&str) -> Option<FieldValue<'a>>) -> Result<ClickId, FieldError> {
        self.build(|field| value_of(field).ok_or_else(|| FieldError::Missing { field: field.to_owned() }))
    }

    /// The id of a click that is a JSON object.
    ///
    /// # Errors
    /// The first field that is missing, `null`, or neither a text nor a whole number nor `true` or `false`.
    pub fn id_of_json(&self, click: &serde_json::Value) -> Result<ClickId, FieldError> {
        self.build(|field| of_json(click, field))
    }

    fn build<'a>(&self, value_of: impl Fn(&str) -> Result<FieldValue<'a>, FieldError>) -> Result<ClickId, FieldError> {
        let mut builder = IdBuilder::new(&self.name, &self.fields);
        for field in &self.fields {
            builder.add(field, value_of(field)?)?;
        }
        Ok(builder.finish())
    }

    pub(crate) fn window_ms(&self) -> u64 {
        milliseconds(self.window)
    }

    /// Rounded up: the slices are no shorter than the window together.
    pub(crate) fn slice_ms(&self) -> u64 {
        self.window_ms().div_ceil(u64::from(self.slices))
    }

    /// Clicks of a window in one shard.
    pub(crate) fn expected_in_shard(&self) -> u64 {
        self.expected.div_ceil(u64::from(self.shards))
    }

    pub(crate) fn keep_ms(&self) -> u64 {
        milliseconds(self.keep)
    }

    pub(crate) fn lease_ms(&self) -> u64 {
        milliseconds(self.lease)
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_stream_cannot_be_is_said_with_its_name() {
        assert_eq!(Stream::new("clicks.v2", &["user", "ad"]).check(), Ok(()));
        type Change = fn(&mut Stream);
        let wrong: [(&str, Change); 14] = [
            ("a name", |stream| stream.name = "cl{ic}ks".to_owned()),
            ("a name", |stream| stream.name = String::new()),
            ("a name", |stream| stream.name = "x".repeat(STREAM_NAME_BYTES_MAX + 1)),
            ("fields", |stream| stream.fields.clear()),
            ("fields", |stream| stream.fields = (0..=STREAM_FIELDS_MAX).map(|n| n.to_string()).collect()),
            ("twice", |stream| stream.fields = vec!["user".to_owned(), "user".to_owned()]),
            ("slices", |stream| stream.slices = 0),
            ("slices", |stream| stream.slices = STREAM_SLICES_MAX + 1),
            ("shards", |stream| stream.shards = STREAM_SHARDS_MAX + 1),
            ("window", |stream| stream.window = STREAM_WINDOW_MAX + Duration::from_secs(1)),
            ("window", |stream| stream.window = Duration::from_millis(999)),
            ("keep", |stream| stream.keep = Duration::from_secs(86_401)),
            ("lease", |stream| stream.lease = Duration::from_secs(86_401)),
            ("lease", |stream| stream.lease = Duration::ZERO),
        ];
        for (what, change) in wrong {
            let mut stream = Stream::new("clicks", &["user", "ad"]);
            change(&mut stream);
            let error = stream.check().expect_err(what).to_string();
            assert!(error.contains(what) && error.contains(&stream.name), "{error}");
        }
    }

    #[test]
    fn a_click_is_its_fields_in_order_and_nothing_else() {
        let stream = Stream::new("clicks", &["user", "/ad/id"]);
        let click = |user: &str, ad: u64, at: u64| stream.id_of_json(&json!({"user": user, "ad": {"id": ad}, "at": at})).unwrap();
        assert_eq!(click("ada", 7, 1), click("ada", 7, 2));
        assert_ne!(click("ada", 7, 1), click("ada", 8, 1));
        let by_hand = |field: &str| match field {
            "user" => Some(FieldValue::Text("ada")),
            "/ad/id" => Some(FieldValue::Integer(7)),
            _ => None,
        };
        assert_eq!(stream.id(by_hand).unwrap(), click("ada", 7, 1));
        let missing = stream.id_of_json(&json!({"user": "ada", "ad": {}})).unwrap_err();
        assert_eq!(missing, FieldError::Missing { field: "/ad/id".to_owned() });
        assert_eq!(stream.id(|_| None).unwrap_err(), FieldError::Missing { field: "user".to_owned() });
    }

    #[test]
    fn slices_are_together_no_shorter_than_the_window() {
        let stream = Stream {
            window: Duration::from_millis(10_001),
            slices: 2,
            shards: 2,
            expected: 101,
            ..Stream::new("clicks", &["user"])
        };
        assert_eq!((stream.window_ms(), stream.slice_ms(), stream.expected_in_shard()), (10_001, 5_001, 51));
    }
}
