//! The words for one attempt of a job: its states, its token, and how it ended.
//!
//! Plain data. What may follow what is decided in `lua/`, and nowhere else.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::job::UnknownWord;

/// The states of an attempt. `docs/PROTOCOL.md` draws the transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttemptState {
    /// It has the job's slot; the provider has not been touched.
    Starting,
    /// Written before the first byte may leave: from here on the provider may have been touched.
    Running,
    /// Its result is the job's result.
    Succeeded,
    /// A definite failure: the provider refused, or it is proved that nothing happened.
    Failed,
    /// Nobody knows: a timeout, a reset, an ambiguous answer, a lapsed lease. Blocks every new attempt.
    Unknown,
    /// Never sent.
    Aborted,
    /// The provider, or an external process, confirms that it was stopped.
    Canceled,
    /// Somebody took the risk of going on without knowing, by name.
    Abandoned,
    /// It succeeded, but the job had ended.
    Discarded,
}

impl AttemptState {
    /// Every state, in the order of the documentation; a record keeps its place here.
    pub const ALL: [AttemptState; 9] = [
        AttemptState::Starting,
        AttemptState::Running,
        AttemptState::Succeeded,
        AttemptState::Failed,
        AttemptState::Unknown,
        AttemptState::Aborted,
        AttemptState::Canceled,
        AttemptState::Abandoned,
        AttemptState::Discarded,
    ];

    /// The word for it, the same in Lua, HTTP, metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            AttemptState::Starting => "starting",
            AttemptState::Running => "running",
            AttemptState::Succeeded => "succeeded",
            AttemptState::Failed => "failed",
            AttemptState::Unknown => "unknown",
            AttemptState::Aborted => "aborted",
            AttemptState::Canceled => "canceled",
            AttemptState::Abandoned => "abandoned",
            AttemptState::Discarded => "discarded",
        }
    }

    /// Whether it may still do something at the provider, or may have.
    pub fn is_open(self) -> bool {
        matches!(self, AttemptState::Starting | AttemptState::Running | AttemptState::Unknown)
    }
}

impl fmt::Display for AttemptState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for AttemptState {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL.into_iter().find(|state| state.as_str() == word).ok_or_else(|| UnknownWord::new("attempt state", word))
    }
}

/// How the holder of an attempt says it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishOutcome {
    /// The provider did it and answered completely.
    Succeeded,
    /// The provider refused, definitely.
    Failed,
    /// It may have happened.
    Unknown,
    /// The caller knows that it sent nothing.
    Aborted,
}

impl FinishOutcome {
    /// The word for it on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishOutcome::Succeeded => "succeeded",
            FinishOutcome::Failed => "failed",
            FinishOutcome::Unknown => "unknown",
            FinishOutcome::Aborted => "aborted",
        }
    }
}

/// What an external process decides about an unknown attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResolveOutcome {
    /// It happened, and this is its result.
    Succeeded,
    /// It did not happen.
    Failed,
    /// It was stopped.
    Canceled,
    /// Nobody knows, and somebody takes the risk.
    Abandoned,
}

impl ResolveOutcome {
    /// The word for it on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            ResolveOutcome::Succeeded => "succeeded",
            ResolveOutcome::Failed => "failed",
            ResolveOutcome::Canceled => "canceled",
            ResolveOutcome::Abandoned => "abandoned",
        }
    }
}

/// What makes an attempt its holder's: who has the token may finish it. Secret from other owners; never logged.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttemptToken(Uuid);

impl AttemptToken {
    /// Draws a new random token.
    pub fn random() -> Self {
        AttemptToken(Uuid::new_v4())
    }

    /// The token's 16 bytes, as the scripts take it.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// The token from its 16 bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        AttemptToken(Uuid::from_bytes(bytes))
    }

    /// The token as text, for an executor outside our process. The one way to read it: `Debug` hides it.
    pub fn reveal(&self) -> String {
        self.0.to_string()
    }
}

impl fmt::Debug for AttemptToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AttemptToken(…)")
    }
}

impl FromStr for AttemptToken {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        // The text is a secret: the error does not repeat it.
        text.parse().map(AttemptToken).map_err(|_| UnknownWord::new("attempt token", "(hidden)"))
    }
}

/// One attempt, as the record had it when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Its place in the job, from 1.
    pub number: u32,
    /// Its state.
    pub state: AttemptState,
    /// Its holder's token.
    pub token: AttemptToken,
    /// The provider's name.
    pub provider: String,
    /// The gateway that began it: a label, not ownership.
    pub gateway: String,
    /// The job's version when it began: it can win only while that still stands.
    pub version: u64,
    /// When it began, Unix ms of Redis.
    pub started_ms: u64,
    /// Until when its holder keeps it, Unix ms of Redis; 0 once closed.
    pub lease_ms: u64,
    /// The last extension of its lease.
    pub sequence: u64,
    /// When it closed or became unknown, Unix ms of Redis; 0 before.
    pub ended_ms: u64,
    /// Why it did not succeed, `""` if there is nothing to say.
    pub reason: String,
    /// The resolved URL that it was sent to, `""` while starting.
    pub url: String,
    /// SHA-256 of the rendered request, empty while starting.
    pub request_hash: Vec<u8>,
    /// The certificate under which it was allowed, `""` for none.
    pub certificate: String,
    /// The provider's own name for the work, `""` if it gave none.
    pub remote_id: String,
    /// The model that answered, `""` if the provider did not say.
    pub model: String,
}
