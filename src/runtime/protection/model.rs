//! Which model a request is for, as far as a breaker wants to know.

use std::borrow::Cow;

use serde::Deserialize;

use crate::fingerprint::{hex, sha256};

/// A model's name, hashed: 16 hexadecimal digits, or none. Text from users appears in no key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Model(String);

#[derive(Deserialize)]
struct Named<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
}

impl Model {
    /// The model that a JSON request names in its member `model`; none if it is no such request.
    pub(crate) fn of(body: &[u8]) -> Self {
        match serde_json::from_slice(body) {
            Ok(Named { model: Some(model) }) => Model(hex(&sha256(model.as_bytes()))[..16].to_owned()),
            Ok(Named { model: None }) | Err(_) => Model::default(),
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_known_by_its_name_alone_and_never_by_its_text() {
        let large = Model::of(br#"{"messages":[{"model":"other"}],"model":"large"}"#);
        assert_eq!(large, Model::of(br#" {"model" : "l\u0061rge"} "#));
        assert_ne!(large, Model::of(br#"{"model":"small"}"#));
        assert!(large.as_str().len() == 16 && large.as_str().bytes().all(|byte| byte.is_ascii_hexdigit()), "{large:?}");
        for body in ["", "{}", "[]", r#"{"model":7}"#, r#"{"model":null}"#, r#"{"model":"a","model":"b"}"#, r#"{"model":"a"#] {
            assert_eq!(Model::of(body.as_bytes()), Model::default(), "{body}");
        }
    }
}
