//! What a script answers, read strictly.
//!
//! A reply is `{ status, script, echo, detail… }`, all strings. A reply of another script, or with another echo, is somebody
//! else's: an error that carries it, as is a status that this version does not know.

use std::str::FromStr;

use redis::Value;

use crate::error::StoreError;
use crate::store::scripts::Script;

/// A script's reply.
#[derive(Debug)]
pub(crate) struct Reply {
    script: Script,
    status: String,
    details: std::vec::IntoIter<Vec<u8>>,
}

impl Reply {
    /// Reads a reply, and checks that it answers this call.
    pub(crate) fn read(script: Script, echo: &[u8], value: Value) -> Result<Self, StoreError> {
        let bad = |what: &str| StoreError::fatal("BADREPLY", format!("{}: {what}", script.name()));
        let Value::Array(items) = value else { return Err(bad("not an array")) };
        let mut strings = Vec::with_capacity(items.len());
        for item in items {
            match item {
                Value::BulkString(bytes) => strings.push(bytes),
                Value::SimpleString(text) => strings.push(text.into_bytes()),
                _ => return Err(bad("an element is not a string")),
            }
        }
        let mut details = strings.into_iter();
        let status = details.next().and_then(|bytes| String::from_utf8(bytes).ok()).ok_or_else(|| bad("no status"))?;
        if details.next().as_deref() != Some(script.name().as_bytes()) {
            return Err(bad("the reply of another script"));
        }
        if details.next().as_deref() != Some(echo) {
            return Err(bad("the reply to another call"));
        }
        Ok(Reply { script, status, details })
    }

    pub(crate) fn status(&self) -> &str {
        &self.status
    }

    /// The next detail as bytes.
    pub(crate) fn bytes(&mut self) -> Result<Vec<u8>, StoreError> {
        self.details.next().ok_or_else(|| self.bad("a detail is missing"))
    }

    /// The next detail as text.
    pub(crate) fn text(&mut self) -> Result<String, StoreError> {
        let bytes = self.bytes()?;
        String::from_utf8(bytes).map_err(|_| self.bad("a detail is not text"))
    }

    /// The next detail as a number, a state or another word.
    pub(crate) fn parse<W: FromStr>(&mut self) -> Result<W, StoreError> {
        let text = self.text()?;
        text.parse().map_err(|_| self.bad(&format!("the detail {text:?} is not known")))
    }

    /// The error for a status that this version does not know.
    pub(crate) fn unknown_status(&self) -> StoreError {
        self.bad("the status is not known")
    }

    fn bad(&self, what: &str) -> StoreError {
        StoreError::fatal("BADREPLY", format!("{} answered {:?}: {what}", self.script.name(), self.status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(words: &[&str]) -> Value {
        Value::Array(words.iter().map(|word| Value::BulkString(word.as_bytes().to_vec())).collect())
    }

    #[test]
    fn a_reply_to_another_call_is_an_error_and_never_an_answer() {
        assert!(Reply::read(Script::MarkRunning, b"mine", reply(&["running", "mark_running", "mine", "7"])).is_ok());
        let others = [
            reply(&["running", "mark_running", "yours", "7"]),
            reply(&["running", "extend_lease", "mine", "7"]),
            reply(&["running"]),
            reply(&[]),
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
        ];
        for other in others {
            let shown = format!("{other:?}");
            match Reply::read(Script::MarkRunning, b"mine", other) {
                Err(StoreError::Fatal { code, .. }) => assert_eq!(code, "BADREPLY", "{shown}"),
                other => panic!("{shown}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_detail_that_is_missing_or_not_known_is_an_error_that_carries_the_status() {
        let mut answer = Reply::read(Script::MarkRunning, b"mine", reply(&["running", "mark_running", "mine", "soon"])).unwrap();
        for error in [answer.parse::<u64>().unwrap_err(), answer.text().unwrap_err(), answer.unknown_status()] {
            assert!(error.to_string().contains("running"), "{error}");
        }
    }
}
