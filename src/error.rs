//! Errors, sorted by what the caller does next.
//!
//! Losing a race is not an error but a variant of a reply. An error is "not done" or "not known".

use std::fmt;

/// Why a call did not reach the store, or why its fate is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Redis did not execute the call. Nothing happened; the same call may be made again, later or elsewhere.
    #[error("redis did not execute the call ({code}): {detail}")]
    NotExecuted {
        /// Why not.
        code: Refusal,
        /// Redis' own words, or ours.
        detail: String,
    },
    /// The call may have been executed. Make the same call again, with the same token: it will not be executed twice.
    #[error("redis may have executed the call: {detail}")]
    Ambiguous {
        /// What was seen.
        detail: String,
    },
    /// The call was executed, and what it wrote or told may yet be lost: too few have it (`redis.durability`). Nobody may hear of it
    /// before the same call, with the same token, has been answered.
    #[error("not durable: {have} of {want} have it")]
    NotDurable {
        /// How many replicas have it, or whether the disk does.
        have: u32,
        /// Who must.
        want: Want,
    },
    /// Again would not help: a record that nobody may interpret, a missing permission, a key of another type, a bug.
    #[error("the store refuses ({code}): {detail}")]
    Fatal {
        /// Redis' code, or ours: `BADRECORD`, `BADSCHEMA`, `BADREPLY`, `BADBLOB`, `BADARG`.
        code: String,
        /// More.
        detail: String,
    },
}

/// Who must have a write before anybody hears of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The disk of the server.
    Disk,
    /// So many replicas.
    Replicas(u32),
}

impl Want {
    /// How many they are.
    pub fn count(self) -> u32 {
        match self {
            Want::Disk => 1,
            Want::Replicas(count) => count,
        }
    }
}

impl fmt::Display for Want {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Want::Disk => f.write_str("1 disk"),
            Want::Replicas(count) => write!(f, "{count} replicas"),
        }
    }
}

impl StoreError {
    /// The class, for metrics: a closed set.
    pub fn class(&self) -> &'static str {
        match self {
            StoreError::NotExecuted { .. } => "not_executed",
            StoreError::Ambiguous { .. } => "ambiguous",
            StoreError::NotDurable { .. } => "not_durable",
            StoreError::Fatal { .. } => "fatal",
        }
    }

    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, StoreError::Fatal { .. })
    }

    /// Whether somebody who gives a permission back makes the same call succeed.
    pub(crate) fn is_for_permission(&self) -> bool {
        matches!(self, StoreError::Fatal { code, .. } if matches!(code.as_str(), "NOPERM" | "NOAUTH"))
    }

    /// Whether what stands in Redis was written by another version, or, of a stream of clicks, for a stream of the other kind.
    pub fn is_of_another_schema(&self) -> bool {
        matches!(self, StoreError::Fatal { code, .. } if code == "BADSCHEMA")
    }

    pub(crate) fn fatal(code: &str, detail: impl fmt::Display) -> Self {
        StoreError::Fatal { code: code.to_owned(), detail: detail.to_string() }
    }
}

/// Why Redis did not execute a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// No connection, or none free.
    Connect,
    /// Out of memory.
    Oom,
    /// Fewer replicas than it insists on.
    NoReplicas,
    /// It is a replica.
    ReadOnly,
    /// It cannot persist.
    Misconf,
    /// It is loading its data.
    Loading,
    /// A script runs too long.
    Busy,
    /// The cluster moves or has no master.
    Cluster,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::Connect => "connect",
            Refusal::Oom => "out of memory",
            Refusal::NoReplicas => "not enough replicas",
            Refusal::ReadOnly => "read-only replica",
            Refusal::Misconf => "cannot persist",
            Refusal::Loading => "loading",
            Refusal::Busy => "busy",
            Refusal::Cluster => "cluster",
        })
    }
}
