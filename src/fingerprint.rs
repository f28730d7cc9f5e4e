//! Who asks for what: the digest of (owner, key), the identity cut from it, and the fingerprint of a request.
//!
//! Pure functions over bytes. Every layer can compute them too: a load balancer, a SQL query, a Python script. The contract is
//! `docs/PROTOCOL.md`, "Identity".

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest.
pub type Sha256Bytes = [u8; 32];

/// The second half of a SHA-256 digest: what a record keeps to tell keys, and requests, apart.
///
/// Of a key it stands beside the identity, which is cut from the first half: 202 bits together. Against somebody else's key that
/// is a second preimage, far out of reach; a collision of two requests can only be made by their own author, who could as well
/// have sent the first.
pub type HalfBytes = [u8; 16];

/// Cuts the second half off a digest.
pub fn second_half(digest: &Sha256Bytes) -> HalfBytes {
    let mut half = [0; 16];
    half.copy_from_slice(&digest[16..]);
    half
}

/// Computes the SHA-256 digest of some bytes.
pub fn sha256(bytes: &[u8]) -> Sha256Bytes {
    Sha256::digest(bytes).into()
}

/// Writes bytes in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Computes SHA-256(len(owner) as u32 BE ‖ owner ‖ len(key) as u32 BE ‖ key).
///
/// The lengths keep (`a`, `bc`) and (`ab`, `c`) apart. No normalization: two Unicode forms of one text are two keys.
pub fn digest(owner: &str, key: &str) -> Sha256Bytes {
    let mut hash = Sha256::new();
    for part in [owner, key] {
        let length = u32::try_from(part.len()).expect("owners and keys are bounded far below 4 GiB");
        hash.update(length.to_be_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

/// The parts of a request that make it *this* request.
#[derive(Clone, Copy, Debug)]
pub struct Fingerprinted<'a> {
    /// The route's name.
    pub route: &'a str,
    /// The HTTP method, upper case.
    pub method: &'a str,
    /// Path with query, as asked for; `""` for a job submitted by route alone.
    pub target: &'a str,
    /// The content type as sent, `""` if there was none.
    pub content_type: &'a str,
    /// The body's bytes.
    pub body: &'a [u8],
    /// JSON pointers (RFC 6901) of members that do not count.
    pub ignore: &'a [String],
}

/// Computes the fingerprint of a request: the second half of SHA-256 over its length-prefixed parts.
///
/// A JSON body counts in canonical form (see [`canonical_json`]), so white space and the order of members make no difference, but
/// every digit of a number does. A body that is not JSON, or that names a member twice, counts as its raw bytes.
pub fn fingerprint(request: Fingerprinted<'_>) -> HalfBytes {
    let canonical = is_json(request.content_type).then(|| canonical_json(request.body, request.ignore)).flatten();
    let (form, body): (&[u8], &[u8]) = match &canonical {
        Some(text) => (b"json", text.as_bytes()),
        None => (b"raw", request.body),
    };
    let parts: [&[u8]; 6] = [
        request.route.as_bytes(),
        request.method.as_bytes(),
        request.target.as_bytes(),
        request.content_type.as_bytes(),
        form,
        body,
    ];
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    second_half(&hash.finalize().into())
}

fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || essence.ends_with("+json")
}

/// Writes JSON in canonical form: members sorted by name, no white space, strings unescaped and escaped again in one way, numbers
/// as written.
///
/// Every digit of a number counts as written; only an exponent is put in one form (`1E5` as `1e+5`). RFC 8785 would round to
/// doubles, and then 9007199254740993 and 9007199254740992 would be one request. `None` for anything that is not one JSON value,
/// or that names a member twice.
pub fn canonical_json(body: &[u8], ignore: &[String]) -> Option<String> {
    let mut value = unique_json(body).ok()?;
    for pointer in ignore {
        remove(&mut value, pointer);
    }
    let mut text = String::with_capacity(body.len());
    write_canonical(&value, &mut text);
    Some(text)
}

/// Reads JSON in which no object names a member twice.
///
/// # Errors
/// It is no JSON, or an object in it names a member twice: then the error is of the category `Data`.
pub fn unique_json(body: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice(body).map(|Unique(value)| value)
}

fn remove(value: &mut Value, pointer: &str) {
    let Some((parent, member)) = pointer.rsplit_once('/') else { return };
    let member = member.replace("~1", "/").replace("~0", "~");
    match value.pointer_mut(parent) {
        Some(Value::Object(members)) => {
            members.remove(&member);
        }
        Some(Value::Array(items)) => {
            // Taking an item away would move the others onto its place; a null keeps them where they are.
            if let Some(item) = member.parse::<usize>().ok().and_then(|index| items.get_mut(index)) {
                *item = Value::Null;
            }
        }
        _ => {}
    }
}

fn write_canonical(value: &Value, text: &mut String) {
    match value {
        Value::Object(members) => {
            let sorted: BTreeMap<&String, &Value> = members.iter().collect();
            text.push('{');
            for (place, (name, member)) in sorted.into_iter().enumerate() {
                if place > 0 {
                    text.push(',');
                }
                write_string(name, text);
                text.push(':');
                write_canonical(member, text);
            }
            text.push('}');
        }
        Value::Array(items) => {
            text.push('[');
            for (place, item) in items.iter().enumerate() {
                if place > 0 {
                    text.push(',');
                }
                write_canonical(item, text);
            }
            text.push(']');
        }
        Value::String(string) => write_string(string, text),
        Value::Number(number) => {
            let _ = write!(text, "{number}");
        }
        Value::Bool(bool) => text.push_str(if *bool { "true" } else { "false" }),
        Value::Null => text.push_str("null"),
    }
}

fn write_string(string: &str, text: &mut String) {
    text.push_str(&serde_json::to_string(string).expect("a string can always be written as JSON"));
}

/// A JSON value in which no object names a member twice.
struct Unique(Value);

impl<'de> serde::Deserialize<'de> for Unique {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Unique)
    }
}

struct UniqueVisitor;

impl<'de> serde::de::Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value without repeated member names")
    }

    fn visit_bool<E>(self, bool: bool) -> Result<Value, E> {
        Ok(Value::Bool(bool))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(Value::Number(number.into()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Number(number.into()))
    }

    fn visit_str<E>(self, string: &str) -> Result<Value, E> {
        Ok(Value::String(string.to_owned()))
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Unique(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        use serde::de::Error as _;
        // With `arbitrary_precision` a number that no integer holds arrives as a map of one private member.
        let mut members = serde_json::Map::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == NUMBER_TOKEN && members.is_empty() {
                let digits: String = map.next_value()?;
                let number: serde_json::Number = digits.parse().map_err(A::Error::custom)?;
                return Ok(Value::Number(number));
            }
            let Unique(member) = map.next_value()?;
            if members.insert(name, member).is_some() {
                return Err(A::Error::custom("a member name is repeated"));
            }
        }
        Ok(Value::Object(members))
    }
}

/// How serde_json presents a number whose digits it keeps.
const NUMBER_TOKEN: &str = "$serde_json::private::Number";

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(json: &str) -> Option<String> {
        canonical_json(json.as_bytes(), &[])
    }

    #[test]
    fn order_and_white_space_make_no_difference() {
        assert_eq!(canonical(r#" {"b": [1, 2],  "a": "\u0041"} "#), canonical(r#"{"a":"A","b":[1,2]}"#));
    }

    #[test]
    fn numbers_count_as_written() {
        assert_eq!(
            canonical("[1.0,1.00,1e0,1E+0,9007199254740993,123456789012345678901234567890,-0]").unwrap(),
            "[1.0,1.00,1e+0,1e+0,9007199254740993,123456789012345678901234567890,-0]"
        );
        assert_ne!(canonical("9007199254740993"), canonical("9007199254740992"));
    }

    #[test]
    fn repeated_names_and_invalid_json_have_no_canonical_form() {
        assert_eq!(canonical(r#"{"a":1,"a":2}"#), None);
        assert_eq!(canonical(r#"{"a":{"b":1,"\u0062":2}}"#), None);
        assert_eq!(canonical("{"), None);
        assert_eq!(canonical("1 2"), None);
        assert_eq!(canonical(""), None);
    }

    #[test]
    fn ignored_members_do_not_count() {
        let ignore = ["/meta/sent_at".to_owned(), "/list/0".to_owned()];
        let one = canonical_json(br#"{"meta":{"sent_at":1,"x":2},"list":[1,2]}"#, &ignore).unwrap();
        let two = canonical_json(br#"{"meta":{"sent_at":9,"x":2},"list":[7,2]}"#, &ignore).unwrap();
        assert_eq!(one, two);
    }

    #[test]
    fn owners_and_keys_never_run_together() {
        let pairs = [("a", "bc"), ("ab", "c"), ("a", "b\0c"), ("a\0b", "c"), ("a", "\u{e9}"), ("a", "e\u{301}")];
        let digests: std::collections::BTreeSet<_> = pairs.iter().map(|(owner, key)| digest(owner, key)).collect();
        assert_eq!(digests.len(), pairs.len());
    }

    #[test]
    fn every_part_of_a_request_counts() {
        let base = Fingerprinted {
            route: "print",
            method: "POST",
            target: "/a?x=1",
            content_type: "application/json",
            body: b"{}",
            ignore: &[],
        };
        let others = [
            Fingerprinted { route: "scan", ..base },
            Fingerprinted { method: "PUT", ..base },
            Fingerprinted { target: "/a?x=2", ..base },
            Fingerprinted { content_type: "text/plain", ..base },
            Fingerprinted { body: b"{ \"a\": 1 }", ..base },
        ];
        for other in others {
            assert_ne!(fingerprint(base), fingerprint(other), "{other:?}");
        }
    }
}
