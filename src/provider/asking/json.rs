//! Parts of JSON texts, as they were written: numbers keep their digits, members their order.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

/// Finds what a JSON pointer (RFC 6901) leads to; `""` is the whole text. Of members of one name the last counts.
pub(crate) fn at<'a>(text: &'a str, pointer: &str) -> Option<&'a str> {
    let mut found: &'a RawValue = serde_json::from_str(text).ok()?;
    for token in pointer.split('/').skip(1) {
        let token = token.replace("~1", "/").replace("~0", "~");
        let inside = found.get().trim_start();
        found = if inside.starts_with('{') {
            let mut members: HashMap<Cow<'a, str>, &'a RawValue> = serde_json::from_str(inside).ok()?;
            members.remove(token.as_str())?
        } else {
            let is_index = token == "0" || (!token.starts_with('0') && token.bytes().all(|byte| byte.is_ascii_digit()));
            let elements: Vec<&'a RawValue> = serde_json::from_str(inside).ok().filter(|_| is_index)?;
            elements.get(token.parse::<usize>().ok()?).copied()?
        };
    }
    Some(found.get())
}

/// A string's or a number's text; `None` for anything else.
pub(super) fn word_at(text: &str, pointer: &str) -> Option<String> {
    let found = at(text, pointer)?;
    match found.as_bytes().first()? {
        b'"' => serde_json::from_str(found).ok(),
        b'-' | b'0'..=b'9' => Some(found.to_owned()),
        _ => None,
    }
}

/// Whether a pointer is one.
pub(crate) fn is_pointer(pointer: &str) -> bool {
    let escapes = pointer.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    pointer.is_empty() || (pointer.starts_with('/') && escapes)
}

/// The members of an object in their order; of one name the last stays, at its first place.
pub(super) fn members(object: &str) -> Option<Vec<(String, String)>> {
    struct InOrder(Vec<(String, String)>);
    struct Reader;
    impl<'de> Visitor<'de> for Reader {
        type Value = InOrder;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<InOrder, A::Error> {
            let mut members = Vec::new();
            let mut places: HashMap<String, usize> = HashMap::new();
            while let Some((name, value)) = map.next_entry::<String, Box<RawValue>>()? {
                let member = (name.clone(), value.get().to_owned());
                match places.get(&name) {
                    Some(place) => members[*place] = member,
                    None => {
                        places.insert(name, members.len());
                        members.push(member);
                    }
                }
            }
            Ok(InOrder(members))
        }
    }
    impl<'de> Deserialize<'de> for InOrder {
        fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_map(Reader)
        }
    }
    serde_json::from_str::<InOrder>(object).ok().map(|found| found.0)
}

/// An object of these members.
pub(super) fn object(members: &[(String, String)]) -> String {
    let member = |(name, value): &(String, String)| format!("{}:{value}", quoted(name));
    format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(","))
}

/// A text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a text is a JSON string")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_finds_a_part_as_it_was_written() {
        let text = r#" {"a": [1, {"b/c": 9007199254740993, "~": "x"}], "a2": 1e400, "s": "t\u00e9"} "#;
        assert_eq!(at(text, ""), Some(text.trim()));
        assert_eq!(at(text, "/a/1/b~1c"), Some("9007199254740993"));
        assert_eq!(at(text, "/a/1/~0"), Some("\"x\""));
        assert_eq!(at(text, "/a2"), Some("1e400"));
        assert_eq!(word_at(text, "/s").as_deref(), Some("t\u{e9}"));
        assert_eq!(word_at(text, "/a/1/b~1c").as_deref(), Some("9007199254740993"));
        for nothing in ["/b", "/a/2", "/a/01", "/a/-", "/a/x", "/s/0", "/a2/x"] {
            assert_eq!(at(text, nothing), None, "{nothing}");
        }
        assert_eq!((at("{", ""), at("{} {}", ""), word_at(text, "/a")), (None, None, None));
        assert_eq!(at(r#"{"a":1,"a":2}"#, "/a"), Some("2"));
    }

    #[test]
    fn members_keep_their_order_and_their_digits() {
        let written = r#"{"z":1.50,"a":{"y":9007199254740993},"z":2}"#;
        let members = members(written).unwrap();
        assert_eq!(object(&members), r#"{"z":2,"a":{"y":9007199254740993}}"#);
        assert!(super::members("[1]").is_none() && super::members("{").is_none());
    }
}
