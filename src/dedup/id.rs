//! What makes two clicks the same: the fields that a stream declares, in order, in one canonical form; and the id cut from its hash.
//!
//! Pure functions over bytes, so that every layer can compute them. The contract is `docs/PROTOCOL.md`, "Ids of a stream".

use sha2::{Digest as _, Sha256};

use crate::fingerprint::Sha256Bytes;
use crate::store::{MIRROR_ID_BYTES, MirrorId};

/// The longest value of a field that is hashed: what is longer is no name of anything.
pub const FIELD_BYTES_MAX: usize = 64 << 10;

/// How an id is laid out for a script: so many binary digits as text, then the bytes that are stored.
const DIGITS: usize = 24;
/// How many bytes of it are stored.
const STORED: usize = 7;
/// What one id takes in a call.
pub(crate) const RECORD_BYTES: usize = DIGITS + STORED;

/// A value of a field. The type counts: the text `1` and the number 1 are two values, and nothing is guessed. Where all ways in say
/// texts, as CSV does, JSON says texts too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldValue<'a> {
    /// A text. No normalization: two Unicode forms of one text are two values, and so are two cases of a letter.
    Text(&'a str),
    /// A whole number.
    Integer(i128),
    /// Yes or no.
    Boolean(bool),
}

/// Why no id can be made of a click.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// It has no such field, or none with a value. An empty text is a value.
    #[error("the field {field:?} is missing")]
    Missing {
        /// Which.
        field: String,
    },
    /// It is neither a text nor a whole number nor yes or no.
    #[error("the field {field:?} is {what}; a text, a whole number, true or false makes a click the same")]
    Unusable {
        /// Which.
        field: String,
        /// What it is.
        what: &'static str,
    },
    /// Its value is longer than [`FIELD_BYTES_MAX`].
    #[error("the field {field:?} has {bytes} bytes, of {FIELD_BYTES_MAX} at most")]
    TooLong {
        /// Which.
        field: String,
        /// How many.
        bytes: usize,
    },
}

/// One click of a stream: 128 bits of a SHA-256 over the stream's name, its fields' names and their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClickId([u8; 16]);

impl ClickId {
    /// From its bytes, as [`ClickId::as_bytes`] gave them.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        ClickId(bytes)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The shard that it is of: bits that neither choose its bucket nor are stored.
    pub(crate) fn shard(&self, shards: u16) -> u16 {
        let bits = u32::from_be_bytes([self.0[11], self.0[12], self.0[13], self.0[14]]);
        u16::try_from((u64::from(bits) * u64::from(shards)) >> 32).expect("less than the number of shards")
    }

    /// How a script is told of it: the digits that choose its bucket, then the bytes that are stored there.
    pub(crate) fn record(&self) -> [u8; RECORD_BYTES] {
        let bits = u32::from_be_bytes([0, self.0[8], self.0[9], self.0[10]]);
        let mut record = [0; RECORD_BYTES];
        for (place, digit) in record[..DIGITS].iter_mut().enumerate() {
            *digit = if bits >> (DIGITS - 1 - place) & 1 == 1 { b'1' } else { b'0' };
        }
        record[DIGITS..].copy_from_slice(&self.0[..STORED]);
        record
    }

    /// What is kept of it in a mirrored stream: the same bits.
    pub(crate) fn mirrored(&self) -> MirrorId {
        let mut id = [0; MIRROR_ID_BYTES];
        id[..STORED].copy_from_slice(&self.0[..STORED]);
        id[STORED..].copy_from_slice(&self.0[8..11]);
        id
    }
}

/// Collects the values of a click's fields, in the order in which its stream declares them.
#[derive(Clone)]
pub(crate) struct IdBuilder(Sha256);

impl IdBuilder {
    /// Begins with the stream's name and the names of its fields, in order: the same click in two streams is two ids, and so is one
    /// of which something else is to be the same.
    pub(crate) fn new<F: AsRef<str>>(stream: &str, fields: &[F]) -> Self {
        let mut hash = Sha256::new();
        add(&mut hash, b's', stream.as_bytes());
        fields.iter().for_each(|field| add(&mut hash, b'f', field.as_ref().as_bytes()));
        IdBuilder(hash)
    }

    /// Adds the value of the next field: a byte for its type, its length, its bytes.
    pub(crate) fn add(&mut self, field: &str, value: FieldValue<'_>) -> Result<(), FieldError> {
        match value {
            FieldValue::Text(text) if text.len() > FIELD_BYTES_MAX => {
                return Err(FieldError::TooLong { field: field.to_owned(), bytes: text.len() });
            }
            FieldValue::Text(text) => add(&mut self.0, b't', text.as_bytes()),
            FieldValue::Integer(number) => add(&mut self.0, b'i', number.to_string().as_bytes()),
            FieldValue::Boolean(yes) => add(&mut self.0, b'b', if yes { b"1" } else { b"0" }),
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> ClickId {
        let digest: Sha256Bytes = self.0.finalize().into();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        ClickId(bytes)
    }
}

fn add(hash: &mut Sha256, kind: u8, bytes: &[u8]) {
    let length = u32::try_from(bytes.len()).expect("values are bounded far below 4 GiB");
    hash.update([kind]);
    hash.update(length.to_be_bytes());
    hash.update(bytes);
}

/// The value of a field of a JSON object: a member of this name, or, where the name begins with `/`, what a JSON pointer (RFC 6901)
/// leads to.
pub(crate) fn of_json<'a>(record: &'a serde_json::Value, field: &str) -> Result<FieldValue<'a>, FieldError> {
    let unusable = |what| FieldError::Unusable { field: field.to_owned(), what };
    let value = if field.starts_with('/') { record.pointer(field) } else { record.get(field) };
    match value {
        None | Some(serde_json::Value::Null) => Err(FieldError::Missing { field: field.to_owned() }),
        Some(serde_json::Value::String(text)) => Ok(FieldValue::Text(text)),
        Some(serde_json::Value::Bool(yes)) => Ok(FieldValue::Boolean(*yes)),
        Some(serde_json::Value::Number(number)) => match number.to_string().parse() {
            Ok(number) => Ok(FieldValue::Integer(number)),
            // 1.0 and 1 would be one number and two texts.
            Err(_) => Err(unusable("a number that is not whole, or too long")),
        },
        Some(serde_json::Value::Array(_)) => Err(unusable("an array")),
        Some(serde_json::Value::Object(_)) => Err(unusable("an object")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    fn id(stream: &str, values: &[FieldValue<'_>]) -> ClickId {
        id_of(stream, &["f"], values)
    }

    fn id_of(stream: &str, fields: &[&str], values: &[FieldValue<'_>]) -> ClickId {
        let mut builder = IdBuilder::new(stream, fields);
        values.iter().for_each(|value| builder.add("f", *value).unwrap());
        builder.finish()
    }

    #[test]
    fn what_differs_in_anything_has_another_id() {
        use FieldValue::{Boolean, Integer, Text};
        let different: &[(&str, &[FieldValue<'_>])] = &[
            ("clicks", &[Text("a"), Text("bc")]),
            ("clicks", &[Text("ab"), Text("c")]),
            ("clicks", &[Text("abc")]),
            ("clicks", &[Text("abc"), Text("")]),
            ("clicks", &[Text(""), Text("abc")]),
            ("views", &[Text("abc")]),
            ("clicks", &[Text("ABC")]),
            ("clicks", &[Text("1")]),
            ("clicks", &[Integer(1)]),
            ("clicks", &[Integer(-1)]),
            ("clicks", &[Boolean(true)]),
            ("clicks", &[Text("true")]),
            ("clicks", &[Text("\u{e9}")]),
            ("clicks", &[Text("e\u{301}")]),
            ("clicks", &[]),
        ];
        let mut met = BTreeMap::new();
        for (stream, values) in different {
            let before = met.insert(*id(stream, values).as_bytes(), (stream, values));
            assert_eq!(before, None, "{stream} {values:?}");
        }
        for fields in [&["ad"][..], &[], &["f", "f"], &["ff"]] {
            let (stream, values) = &different[2];
            let before = met.insert(*id_of(stream, fields, values).as_bytes(), (stream, values));
            assert_eq!(before, None, "{fields:?}");
        }
        assert_ne!(id_of("clicks", &["a", "b"], &[Text("x"), Text("y")]), id_of("clicks", &["b", "a"], &[Text("x"), Text("y")]));
        assert_eq!(id("clicks", &[Text("a"), Integer(7)]), id("clicks", &[Text("a"), Integer(7)]));
    }

    /// What other programs compute: a byte for the type, the length as 4 bytes, the bytes; the stream's name first, then the fields'.
    #[test]
    fn an_id_is_the_beginning_of_a_hash_that_anybody_can_compute() {
        let mut bytes = Vec::new();
        for (kind, part) in [(b's', &b"clicks"[..]), (b'f', b"f"), (b't', b"ada"), (b'i', b"-7"), (b'b', b"1")] {
            bytes.push(kind);
            bytes.extend(u32::try_from(part.len()).unwrap().to_be_bytes());
            bytes.extend(part);
        }
        let made = id("clicks", &[FieldValue::Text("ada"), FieldValue::Integer(-7), FieldValue::Boolean(true)]);
        assert_eq!(made.as_bytes()[..], crate::fingerprint::sha256(&bytes)[..16]);
    }

    #[test]
    fn a_field_is_a_text_a_whole_number_or_a_boolean_and_never_guessed() {
        let record = json!({
            "user": "ada", "n": 7, "big": 18446744073709551615u64, "yes": true, "none": null, "empty": "", "half": 0.5,
            "list": [1], "deep": {"ad": "x"},
        });
        let of = |field: &str| of_json(&record, field);
        assert_eq!(of("user"), Ok(FieldValue::Text("ada")));
        assert_eq!(of("n"), Ok(FieldValue::Integer(7)));
        assert_eq!(of("big"), Ok(FieldValue::Integer(18_446_744_073_709_551_615)));
        assert_eq!(of("yes"), Ok(FieldValue::Boolean(true)));
        assert_eq!(of("empty"), Ok(FieldValue::Text("")));
        assert_eq!(of("/deep/ad"), Ok(FieldValue::Text("x")));
        for missing in ["none", "absent", "/deep/absent"] {
            assert_eq!(of(missing), Err(FieldError::Missing { field: missing.to_owned() }));
        }
        for (field, what) in [("half", "not whole"), ("list", "an array"), ("deep", "an object")] {
            let error = of(field).unwrap_err().to_string();
            assert!(error.contains(field) && error.contains(what), "{error}");
        }
        let whole: serde_json::Value = serde_json::from_str(r#"{"a":1.0,"b":1e2}"#).unwrap();
        assert!(of_json(&whole, "a").is_err() && of_json(&whole, "b").is_err());
    }

    #[test]
    fn a_value_that_is_too_long_is_refused() {
        let mut builder = IdBuilder::new("clicks", &["url"]);
        let long = "x".repeat(FIELD_BYTES_MAX + 1);
        builder.add("ok", FieldValue::Text(&long[1..])).unwrap();
        let refused = builder.add("url", FieldValue::Text(&long)).unwrap_err();
        assert_eq!(refused, FieldError::TooLong { field: "url".to_owned(), bytes: FIELD_BYTES_MAX + 1 });
    }

    /// Shard, bucket and what is stored are cut from different bits.
    #[test]
    fn a_record_is_digits_and_then_what_is_stored() {
        let id = ClickId::from_bytes([1, 2, 3, 4, 5, 6, 7, 8, 0b1010_0000, 0, 1, 0x80, 0, 0, 0, 0]);
        let record = id.record();
        assert_eq!(&record[..24], b"101000000000000000000001");
        assert_eq!(record[24..], [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!((id.shard(1), id.shard(2), id.shard(16)), (0, 1, 8));
        assert_eq!(ClickId::from_bytes([0xff; 16]).shard(256), 255);
    }
}
