//! What must not be printed: each type hides itself from `Debug`, `Display` and `Serialize`, and is read by a call that says so.

use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

pub(super) use crate::place::{HIDDEN, without_credentials};

/// A provider's credential.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub(super) fn new(text: String) -> Self {
        Secret(text)
    }

    /// The text itself. The one way to read it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(HIDDEN)
    }
}

/// The address of a Redis, which may carry a password. Printed without it.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct RedisUrl(String);

impl RedisUrl {
    /// The whole URL, with its password. The one way to read it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_credentials(&self.0))
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for RedisUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_print_of_a_url_shows_its_password() {
        for (url, shown) in [
            ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
            ("redis://:hunter2@host/1", "redis://(hidden)@host/1"),
            ("rediss://app:hunter2@host", "rediss://(hidden)@host"),
            ("redis://app:hunt@er2@host", "redis://(hidden)@host"),
            ("redis+unix:///run/redis.sock?pass=hunter2", "redis+unix:///run/redis.sock?(hidden)"),
            ("redis+unix:///run/redis.sock?user=a&pass=hunt@er2", "redis+unix://(hidden)"),
            ("redis://app:hun?ter2@host", "redis://(hidden)"),
            ("redis://app:hunter2@host?db=1", "redis://(hidden)@host?(hidden)"),
            ("app:hunter2@host", "(hidden)@host"),
        ] {
            assert_eq!(RedisUrl(url.to_owned()).to_string(), shown, "{url}");
        }
    }
}
