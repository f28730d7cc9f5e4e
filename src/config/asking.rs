//! How a provider is asked about an attempt, as it is written in its entry. What it means is `provider/asking.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::provider::CancelSemantics;

/// A set of defaults for a provider's entry; what the entry says itself wins. `docs/PROVIDERS.md` tells each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// `POST /chat/completions`, one answer.
    OpenaiChat,
    /// `POST /responses` in the background, polled.
    OpenaiResponses,
    /// `POST /embeddings`, one answer.
    OpenaiEmbeddings,
    /// A generic queue of jobs: `POST /jobs`, polled, findable by our key.
    JobQueue,
}

impl Preset {
    /// The preset of that word, as an entry has it, and the entry's keys that it fills.
    pub(super) fn defaults(word: &str) -> Option<&'static str> {
        Some(match word {
            "openai-chat" => include_str!("../provider/presets/openai-chat.toml"),
            "openai-responses" => include_str!("../provider/presets/openai-responses.toml"),
            "openai-embeddings" => include_str!("../provider/presets/openai-embeddings.toml"),
            "job-queue" => include_str!("../provider/presets/job-queue.toml"),
            _ => return None,
        })
    }
}

/// What a word of a provider for the state of a piece of work means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Means {
    /// It is done, and there is a result.
    Succeeded,
    /// It is over, definitely without one.
    Failed,
    /// It was stopped.
    Canceled,
    /// It has not begun.
    Queued,
    /// It is being worked on.
    Running,
}

/// What "there is none" means while a provider still remembers all it did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// It never came there. Believed after the quarantine alone.
    NotFound,
    /// Nothing.
    #[default]
    NoAnswer,
}

/// Asking by the provider's own id; and how a piece of work looks in every answer of it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Status {
    /// Template of the path below the base URL.
    pub path: String,
    /// The method.
    pub method: String,
    /// JSON pointer to the provider's id for the work.
    pub id: String,
    /// JSON pointer to the word for its state.
    pub state: String,
    /// JSON pointer to its result; `""`: all of it.
    pub result: String,
    /// JSON pointer to why it failed.
    pub error: String,
    /// What each word for a state means. Another word is no answer.
    pub states: BTreeMap<String, Means>,
    /// How long the provider remembers, counted from the attempt's beginning.
    #[serde(with = "humantime_serde")]
    pub retention: Option<Duration>,
    /// What 404 means within the retention.
    pub missing: Missing,
}

impl Default for Status {
    fn default() -> Self {
        Status {
            path: String::new(),
            method: "GET".to_owned(),
            id: "/id".to_owned(),
            state: "/status".to_owned(),
            result: String::new(),
            error: "/error".to_owned(),
            states: BTreeMap::new(),
            retention: None,
            missing: Missing::NoAnswer,
        }
    }
}

/// Asking by our key.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Find {
    /// Template of the path below the base URL.
    pub path: String,
    /// The method.
    pub method: String,
    /// JSON pointer to the piece of work in the answer; nothing there: there is none.
    pub item: String,
    /// JSON pointer, in the piece of work, to our key. Without that proof it is no answer.
    pub key: String,
    /// The header that brings our key with the submit, where `idempotency` names none.
    pub header: Option<String>,
    /// What "there is none" means within the retention.
    pub missing: Missing,
}

impl Default for Find {
    fn default() -> Self {
        Find {
            path: String::new(),
            method: "GET".to_owned(),
            item: String::new(),
            key: String::new(),
            header: None,
            missing: Missing::NotFound,
        }
    }
}

/// Asking to stop it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cancel {
    /// Template of the path below the base URL.
    pub path: String,
    /// The method.
    pub method: String,
    /// What it means there.
    pub semantics: CancelSemantics,
    /// How long "canceled" may still turn into a result.
    #[serde(with = "humantime_serde")]
    pub settle: Duration,
}

impl Default for Cancel {
    fn default() -> Self {
        Cancel {
            path: String::new(),
            method: "POST".to_owned(),
            semantics: CancelSemantics::BestEffort,
            settle: Duration::from_secs(60),
        }
    }
}

/// Asking for a result that is not in the status' answer.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fetch {
    /// Template of the path below the base URL.
    pub path: String,
    /// The method.
    pub method: String,
}

impl Default for Fetch {
    fn default() -> Self {
        Fetch { path: String::new(), method: "GET".to_owned() }
    }
}

/// How work is handed in.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Submit {
    /// Template of the body; absent: the job's body as it is.
    pub body: Option<String>,
    /// JSON pointer to the provider's id in the answer; absent: `/id`. Not for `http`, whose one answer is all that there is.
    pub id: Option<String>,
}

impl Submit {
    /// Returns the JSON pointer to the provider's id in the answer.
    pub fn id_pointer(&self) -> &str {
        self.id.as_deref().unwrap_or("/id")
    }
}

/// How often the status is asked for while an attempt runs.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Poll {
    /// Before the first time.
    #[serde(with = "humantime_serde")]
    pub first: Duration,
    /// By how much each pause is longer than the one before.
    pub factor: f64,
    /// The longest pause.
    #[serde(with = "humantime_serde")]
    pub max: Duration,
}

impl Default for Poll {
    fn default() -> Self {
        Poll { first: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(30) }
    }
}

/// How the provider calls back.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Webhook {
    /// The environment variable that holds the secret.
    pub secret_env: String,
    /// The header with the time of the signature, Unix seconds.
    pub timestamp_header: String,
    /// The header with HMAC-SHA256 over time, `.` and body, in hexadecimal.
    pub signature_header: String,
    /// What stands before the signature.
    pub prefix: String,
    /// How far the time may be from ours.
    #[serde(with = "humantime_serde")]
    pub tolerance: Duration,
    /// JSON pointer to the piece of work in the body.
    pub item: String,
}

impl Default for Webhook {
    fn default() -> Self {
        Webhook {
            secret_env: String::new(),
            timestamp_header: "webhook-timestamp".to_owned(),
            signature_header: "webhook-signature".to_owned(),
            prefix: String::new(),
            tolerance: Duration::from_secs(300),
            item: String::new(),
        }
    }
}
