//! The words of `failover_on`: after which definite failures another attempt may begin. Pure; what they lead to is `policy.rs`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The statuses that can be refusals.
const STATUSES: RangeInclusive<u16> = 400..=599;

/// A definite failure after which another attempt may begin. What is unknown is none, and has no word here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FailoverOn {
    /// `not_sent`: nothing left for the provider.
    NotSent,
    /// `rejected:<status>`: the provider refused with this status, 400 to 599.
    Rejected {
        /// The status.
        status: u16,
    },
    /// `invalid_output`: it answered, but not as the route requires.
    InvalidOutput,
}

/// A text is no word of `failover_on`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is not one of not_sent, rejected:<status from 400 to 599>, invalid_output")]
pub struct InvalidFailover {
    word: String,
}

impl FromStr for FailoverOn {
    type Err = InvalidFailover;

    fn from_str(word: &str) -> Result<Self, InvalidFailover> {
        let status = || {
            let digits = word.strip_prefix("rejected:")?;
            let three_digits = digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit());
            three_digits.then(|| digits.parse().ok()).flatten().filter(|status| STATUSES.contains(status))
        };
        match word {
            "not_sent" => Ok(FailoverOn::NotSent),
            "invalid_output" => Ok(FailoverOn::InvalidOutput),
            _ => match status() {
                Some(status) => Ok(FailoverOn::Rejected { status }),
                None => Err(InvalidFailover { word: word.chars().take(64).collect() }),
            },
        }
    }
}

impl fmt::Display for FailoverOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailoverOn::NotSent => f.write_str("not_sent"),
            FailoverOn::Rejected { status } => write!(f, "rejected:{status}"),
            FailoverOn::InvalidOutput => f.write_str("invalid_output"),
        }
    }
}

impl Serialize for FailoverOn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for FailoverOn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
