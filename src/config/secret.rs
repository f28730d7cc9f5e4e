//! What must not be printed: each type hides itself from `Debug`, `Display` and `Serialize`, and is read by a call that says so.

use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

/// What stands for a secret in every print.
pub(super) const HIDDEN: &str = "(hidden)";

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

/// The text of a URL with its user information and its query hidden: both may hold a password.
///
/// Works on texts that are no URLs too; where it is not clear which part is the password, nothing after the scheme is shown.
pub(super) fn without_credentials(url: &str) -> String {
    let after_scheme = url.find("://").map_or(0, |at| at + "://".len());
    let (scheme, rest) = url.split_at(after_scheme);
    let (query, user) = (rest.find('?'), rest.rfind('@'));
    match (query, user) {
        (None, None) => url.to_owned(),
        (Some(query), None) => format!("{scheme}{}?{HIDDEN}", &rest[..query]),
        (None, Some(user)) => format!("{scheme}{HIDDEN}{}", &rest[user..]),
        (Some(query), Some(user)) if user < query => format!("{scheme}{HIDDEN}{}?{HIDDEN}", &rest[user..query]),
        (Some(_), Some(_)) => format!("{scheme}{HIDDEN}"),
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
