//! The words for a job: its ids, its states, and the snapshot that a read returns.
//!
//! Plain data, no clock, no I/O. State changes only in `lua/`; the record's layout is `store/record.rs`; `docs/PROTOCOL.md`
//! binds.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::attempt::{Attempt, AttemptState};
use crate::fingerprint::{self, HalfBytes, Sha256Bytes};

mod untold;

/// Longest idempotency key in characters, as draft-ietf-httpapi-idempotency-key-header-07 suggests servers publish.
pub const KEY_CHARS_MAX: usize = 255;
/// Longest owner's name in bytes: it stands in every record.
pub const OWNER_BYTES_MAX: usize = 128;
/// How many shards the hints are cut into.
pub const SHARDS: u8 = 64;

/// A word that is not in the glossary.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {word:?} is not known")]
pub struct UnknownWord {
    what: &'static str,
    word: String,
}

impl UnknownWord {
    pub(crate) fn new(what: &'static str, word: &str) -> Self {
        UnknownWord { what, word: word.chars().take(64).collect() }
    }
}

/// Why a text is not an owner or a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// Nothing in it.
    #[error("the {what} is empty; it must have 1 to {max} characters")]
    Empty {
        /// Owner or key.
        what: &'static str,
        /// The limit.
        max: usize,
    },
    /// Too long.
    #[error("the {what} has {length} characters; the limit is {max}")]
    TooLong {
        /// Owner or key.
        what: &'static str,
        /// How long it is.
        length: usize,
        /// The limit.
        max: usize,
    },
    /// Not visible ASCII.
    #[error("the {what} has the character {character:?}; only visible ASCII is allowed")]
    Invisible {
        /// Owner or key.
        what: &'static str,
        /// The first such character.
        character: char,
    },
}

/// On whose behalf a job runs. Jobs of two owners never meet, whatever their keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(Arc<str>);

impl Owner {
    /// Checks a name: 1 to [`OWNER_BYTES_MAX`] visible ASCII characters.
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        if name.is_empty() {
            return Err(InvalidName::Empty { what: "owner", max: OWNER_BYTES_MAX });
        }
        if let Some(character) = name.chars().find(|c| !c.is_ascii_graphic()) {
            return Err(InvalidName::Invisible { what: "owner", character });
        }
        if name.len() > OWNER_BYTES_MAX {
            return Err(InvalidName::TooLong { what: "owner", length: name.len(), max: OWNER_BYTES_MAX });
        }
        Ok(Owner(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An idempotency key: the caller's name for one intent. Never logged, never part of a Redis key.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Arc<str>);

impl Key {
    /// Checks a key: 1 to [`KEY_CHARS_MAX`] characters of any text. What HTTP allows is narrower, see [`Key::from_header`].
    pub fn new(key: &str) -> Result<Self, InvalidName> {
        let length = key.chars().count();
        if length == 0 {
            return Err(InvalidName::Empty { what: "idempotency key", max: KEY_CHARS_MAX });
        }
        if length > KEY_CHARS_MAX {
            return Err(InvalidName::TooLong { what: "idempotency key", length, max: KEY_CHARS_MAX });
        }
        Ok(Key(key.into()))
    }

    /// Reads the value of an `Idempotency-Key` header: a structured-field string (`"abc"`), or the bare text (`abc`).
    ///
    /// Both name the same key. Only visible ASCII is a key. A value that begins with a quote must be a whole quoted string;
    /// anything else is an error, never a request without a key. Source: draft-ietf-httpapi-idempotency-key-header-07, RFC 9651.
    pub fn from_header(value: &str) -> Result<Self, InvalidKeyHeader> {
        let value = value.trim_matches([' ', '\t']);
        let key = if value.starts_with('"') {
            let item = sfv::Parser::new(value).parse::<sfv::Item>().map_err(|_| InvalidKeyHeader::Malformed)?;
            match item.bare_item {
                sfv::BareItem::String(string) => string.as_str().to_owned(),
                _ => return Err(InvalidKeyHeader::Malformed),
            }
        } else {
            value.to_owned()
        };
        if let Some(character) = key.chars().find(|c| !c.is_ascii_graphic()) {
            return Err(InvalidKeyHeader::Name(InvalidName::Invisible { what: "idempotency key", character }));
        }
        Ok(Key::new(&key)?)
    }

    /// The key's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// Why an `Idempotency-Key` header names no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKeyHeader {
    /// It begins with a quote but is not a quoted string.
    #[error("the Idempotency-Key begins with a quote but is not one quoted string")]
    Malformed,
    /// The text is no key.
    #[error(transparent)]
    Name(#[from] InvalidName),
}

/// Where a job lives: the first 74 bits of the digest of owner and key, 19 hexadecimal digits as text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity(u128);

const IDENTITY_BITS: u32 = 74;

impl Identity {
    /// Cuts the identity from a digest.
    pub fn of(digest: &Sha256Bytes) -> Self {
        let mut first = [0; 16];
        first.copy_from_slice(&digest[..16]);
        Identity(u128::from_be_bytes(first) >> (128 - IDENTITY_BITS))
    }

    /// The shard of the hints that it belongs to.
    pub fn shard(self) -> u8 {
        (self.0 % u128::from(SHARDS)) as u8
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:019x}", self.0)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({self})")
    }
}

impl FromStr for Identity {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let lower = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let bits = (text.len() == 19 && lower).then(|| u128::from_str_radix(text, 16).ok()).flatten();
        match bits {
            Some(bits) if bits >> IDENTITY_BITS == 0 => Ok(Identity(bits)),
            _ => Err(UnknownWord::new("identity", text)),
        }
    }
}

/// The name of one incarnation of a job: a UUIDv8 (RFC 9562) of 48 bits Unix ms and the 74 bits of the identity.
///
/// It sorts by time, fits a `uuid` column, and is the job's address: no look-up leads from it to the record.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(Uuid);

impl JobId {
    /// Composes an id from a time in Unix ms and an identity.
    pub fn new(time_ms: u64, identity: Identity) -> Self {
        let time = u128::from(time_ms & 0xffff_ffff_ffff);
        let high = identity.0 >> 62;
        let low = identity.0 & ((1 << 62) - 1);
        let bits = time << 80 | 0x8 << 76 | high << 64 | 0b10 << 62 | low;
        JobId(Uuid::from_u128(bits))
    }

    /// The id from the 16 bytes that a record holds.
    pub fn from_bytes(bytes: [u8; 16]) -> Result<Self, UnknownWord> {
        let uuid = Uuid::from_bytes(bytes);
        if uuid.get_version_num() != 8 || uuid.get_variant() != uuid::Variant::RFC4122 {
            return Err(UnknownWord::new("job id", &uuid.to_string()));
        }
        Ok(JobId(uuid))
    }

    /// The 16 bytes, as the scripts take it.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// When its incarnation was proposed, Unix ms of the gateway.
    pub fn time_ms(self) -> u64 {
        (self.0.as_u128() >> 80) as u64
    }

    /// Where the job lives.
    pub fn identity(self) -> Identity {
        let bits = self.0.as_u128();
        let high = (bits >> 64) & 0xfff;
        let low = bits & ((1 << 62) - 1);
        Identity(high << 62 | low)
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobId({self})")
    }
}

impl FromStr for JobId {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        // One job, one spelling: not in braces, not as a URN, not in capitals.
        let uuid: Uuid = text.parse().map_err(|_| UnknownWord::new("job id", text))?;
        if uuid.hyphenated().to_string() != text {
            return Err(UnknownWord::new("job id", text));
        }
        JobId::from_bytes(uuid.into_bytes())
    }
}

/// The states of a job. `docs/PROTOCOL.md` draws the transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// No attempt is open; another may begin.
    Pending,
    /// An attempt is starting or running.
    Running,
    /// An attempt may have happened, and nobody knows.
    Unknown,
    /// Somebody asked to cancel it; open attempts have yet to settle.
    Canceling,
    /// Ended with a result.
    Succeeded,
    /// Ended: every attempt definitely failed.
    Failed,
    /// Ended on request.
    Canceled,
    /// Ended, and nobody will ever know whether it happened.
    Indeterminate,
}

impl JobState {
    /// Every state, in the order of the documentation; a record keeps its place here.
    pub const ALL: [JobState; 8] = [
        JobState::Pending,
        JobState::Running,
        JobState::Unknown,
        JobState::Canceling,
        JobState::Succeeded,
        JobState::Failed,
        JobState::Canceled,
        JobState::Indeterminate,
    ];

    /// The word for it, the same in Lua, HTTP, metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Pending => "pending",
            JobState::Running => "running",
            JobState::Unknown => "unknown",
            JobState::Canceling => "canceling",
            JobState::Succeeded => "succeeded",
            JobState::Failed => "failed",
            JobState::Canceled => "canceled",
            JobState::Indeterminate => "indeterminate",
        }
    }

    /// Whether it is final, but for an operator's reopening of a failed job.
    pub fn is_ended(self) -> bool {
        matches!(self, JobState::Succeeded | JobState::Failed | JobState::Canceled | JobState::Indeterminate)
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for JobState {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL.into_iter().find(|state| state.as_str() == word).ok_or_else(|| UnknownWord::new("job state", word))
    }
}

/// How many attempts may be open at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// One open attempt at a time.
    #[default]
    Exclusive,
    /// Another may begin while one is running for longer than the route's `race.after`.
    Race,
}

impl Class {
    /// Every class; a record keeps its place here.
    pub const ALL: [Class; 2] = [Class::Exclusive, Class::Race];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Class::Exclusive => "exclusive",
            Class::Race => "race",
        }
    }
}

impl FromStr for Class {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL.into_iter().find(|class| class.as_str() == word).ok_or_else(|| UnknownWord::new("class", word))
    }
}

/// The route's rules that a job carries with it, as they were when it was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// How many attempts may touch a provider.
    pub attempts_max: u32,
    /// How many attempts of a race may be open at once.
    pub race_max: u32,
    /// How long an attempt of a race runs before another may begin.
    pub race_after_ms: u64,
    /// How long the key lives from the end of the job.
    pub key_life_ms: u64,
    /// How long input and result are kept from the end of the job, at most `key_life_ms`.
    pub retention_ms: u64,
    /// Whether a definite failure gives the key back to the next submit.
    pub releases_on_failure: bool,
    /// How long after becoming unknown "it never happened" is not believed.
    pub quarantine_ms: u64,
}

/// The head and the body of an input or a result.
///
/// The head is text that the scripts never look at: of an input `METHOD target`, of a result the status, then `name: value`
/// lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// What the body is, as HTTP head lines.
    pub head: String,
    /// The body, or where it is.
    pub body: Body,
}

/// A body, or where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// The bytes themselves.
    Inline(Arc<[u8]>),
    /// In a blob of its own, named by its content.
    Blob {
        /// SHA-256 of the bytes.
        sha256: Sha256Bytes,
        /// How many bytes.
        bytes: u64,
    },
}

impl Default for Body {
    fn default() -> Self {
        Body::Inline(Arc::from([]))
    }
}

impl Body {
    /// How many bytes the body has, wherever it is.
    pub fn len(&self) -> u64 {
        match self {
            Body::Inline(bytes) => bytes.len() as u64,
            Body::Blob { bytes, .. } => *bytes,
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One line of a job's history off the happy path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, Unix ms of Redis.
    pub at_ms: u64,
    /// What, a word of the protocol.
    pub event: String,
    /// The attempt's number, 0 for the job itself.
    pub attempt: u32,
    /// Who.
    pub actor: String,
    /// More.
    pub detail: String,
}

/// A job at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// This incarnation's id.
    pub id: JobId,
    /// The digest of owner and key.
    pub digest: HalfBytes,
    /// The fingerprint of the request.
    pub fingerprint: HalfBytes,
    /// On whose behalf.
    pub owner: String,
    /// By which route.
    pub route: String,
    /// How many attempts may be open at once.
    pub class: Class,
    /// The state, which always equals what follows from the attempts.
    pub state: JobState,
    /// How many hands the result slot passed through: every ending and every reopening adds one.
    pub version: u64,
    /// How many changes the record has seen: the ETag.
    pub revision: u64,
    /// Unix ms of Redis.
    pub created_ms: u64,
    /// Unix ms of Redis; never runs backwards.
    pub updated_ms: u64,
    /// Unix ms of Redis; 0 while open.
    pub ended_ms: u64,
    /// Unix ms of Redis; 0 for none.
    pub deadline_ms: u64,
    /// When the next attempt may begin, Unix ms of Redis; 0 for at once.
    pub next_at_ms: u64,
    /// Until when somebody holds the pending job, Unix ms of Redis.
    pub holder_lease_ms: u64,
    /// The attempt whose result is the job's; 0 for none.
    pub completed_by: u32,
    /// Until when input and result are kept, Unix ms of Redis; 0 while open.
    pub retain_until_ms: u64,
    /// Who asked to cancel it, `""` for nobody.
    pub canceled_by: String,
    /// Why it is not going well, `""` if it is.
    pub reason: String,
    /// The rules it carries.
    pub rules: Rules,
    /// Its attempts, in order.
    pub attempts: Vec<Attempt>,
    /// The last events off the happy path.
    pub events: Vec<Event>,
    /// What was asked for.
    pub input: Payload,
    /// What came of it: of a `succeeded` job the result, of a `failed` one the provider's refusal, if it gave one.
    pub result: Payload,
}

impl Job {
    /// Whether it is final, but for an operator's reopening.
    pub fn is_ended(&self) -> bool {
        self.state.is_ended()
    }

    /// When an event of an attempt was noted, each time, Unix ms of Redis; as far as the record remembers.
    pub fn happened(&self, attempt: u32, event: &str) -> impl Iterator<Item = u64> {
        self.events.iter().filter(move |one| one.attempt == attempt && one.event == event).map(|one| one.at_ms)
    }

    /// Whether a person must find out what became of it: nobody else could in the time that its route allows.
    pub fn needs_operator(&self) -> bool {
        let called = |number| self.happened(number, "needs_operator").next().is_some();
        !self.is_ended() && self.attempts.iter().any(|one| one.state == AttemptState::Unknown && called(one.number))
    }

    /// The attempt whose result is the job's.
    pub fn winner(&self) -> Option<&Attempt> {
        self.attempts.get(usize::try_from(self.completed_by).ok()?.checked_sub(1)?)
    }
}

/// Computes everything that names a job from its owner and key.
pub(crate) fn locate(owner: &Owner, key: &Key) -> (HalfBytes, Identity) {
    let digest = fingerprint::digest(owner.as_str(), key.as_str());
    (fingerprint::second_half(&digest), Identity::of(&digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_holds_its_time_and_its_identity() {
        let (_, identity) = locate(&Owner::new("shop").unwrap(), &Key::new("order-1").unwrap());
        let id = JobId::new(1_795_000_000_123, identity);
        assert_eq!(id.time_ms(), 1_795_000_000_123);
        assert_eq!(id.identity(), identity);
        assert_eq!(id.to_string().parse::<JobId>().unwrap(), id);
        assert_eq!(identity.to_string().parse::<Identity>().unwrap(), identity);
    }

    #[test]
    fn ids_sort_by_time() {
        let (_, identity) = locate(&Owner::new("shop").unwrap(), &Key::new("k").unwrap());
        assert!(JobId::new(1, identity) < JobId::new(2, identity));
    }

    #[test]
    fn another_kind_of_uuid_is_not_a_job_id() {
        assert!("550e8400-e29b-41d4-a716-446655440000".parse::<JobId>().is_err());
        assert!("nonsense".parse::<JobId>().is_err());
        let id = "01a2290c-513f-811f-9507-039987d16e0f";
        assert!(id.parse::<JobId>().is_ok());
        for other in [format!("{{{id}}}"), format!("urn:uuid:{id}"), id.to_uppercase(), id.replace('-', "")] {
            assert!(other.parse::<JobId>().is_err(), "{other}");
        }
    }

    #[test]
    fn quoted_and_bare_header_name_one_key() {
        assert_eq!(Key::from_header("\"abc\"").unwrap(), Key::from_header("abc").unwrap());
        assert_eq!(Key::from_header(r#""a\"b""#).unwrap().as_str(), "a\"b");
    }

    #[test]
    fn anything_else_is_no_key() {
        let long = "k".repeat(256);
        for value in ["", "\"\"", "\"abc", "\"abc\" x", "a b", "\"a b\"", "a\u{e9}", long.as_str(), "\"a\",\"b\"", "  "] {
            assert!(Key::from_header(value).is_err(), "{value:?}");
        }
        assert!(Key::from_header(&"k".repeat(255)).is_ok());
    }
}
