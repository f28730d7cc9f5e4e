//! The words for what a simulated provider does with a request. The grammar is told in `simulated.rs`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::fingerprint::sha256;

/// The longest duration in a behaviour.
const DURATION_MAX: Duration = Duration::from_secs(3600);
/// The largest answer.
const SIZE_BYTES_MAX: usize = 64 << 20;
/// Most pieces of a chat's text.
const CHUNKS_MAX: usize = 100_000;
/// The longest behaviour, in bytes.
const TEXT_BYTES_MAX: usize = 256;

/// Why a text is not a behaviour.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("behaviour {text:?}: {problem}")]
pub struct InvalidBehaviour {
    /// The text, cut to a readable length.
    pub text: String,
    /// What is wrong with it.
    pub problem: String,
}

impl InvalidBehaviour {
    pub(super) fn new(text: &str, problem: impl Into<String>) -> Self {
        InvalidBehaviour { text: text.chars().take(TEXT_BYTES_MAX).collect(), problem: problem.into() }
    }
}

/// What a simulated provider does with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behaviour {
    text: String,
    pub(super) does: Does,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Does {
    /// Treats a request so.
    Treat(Treatment),
    /// Draws a treatment for each request.
    Random { seed: u64 },
    /// Refuses connections, for a while or until told otherwise.
    Refuse { duration: Option<Duration> },
}

/// How one request is treated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Treatment {
    pub(super) executes: Executes,
    pub(super) status: u16,
    pub(super) retry_after: Option<Duration>,
    pub(super) queue: Duration,
    pub(super) delay: Duration,
    pub(super) ending: Ending,
    pub(super) framing: Framing,
    pub(super) slow_body: Duration,
    pub(super) json: Json,
    pub(super) size_bytes: usize,
    pub(super) credential: Credential,
    /// Pieces of a chat's text; `None` for as many as it has of itself.
    pub(super) chunks: Option<usize>,
    pub(super) pause: Duration,
    /// Bytes of a stream that are sent at once; 0 for an event.
    pub(super) part_bytes: usize,
    pub(super) marker: Marker,
    pub(super) job: Queued,
}

/// How a job of the queue is treated, beyond that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Queued {
    pub(super) run: Duration,
    pub(super) end: End,
    pub(super) cancels: Cancels,
    /// How long after its end it is forgotten.
    pub(super) forget: Option<Duration>,
    /// The word for its state, whatever that is.
    pub(super) report: Option<String>,
    pub(super) id: Id,
    pub(super) webhook: Webhook,
}

/// How a job ends that nobody cancels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Completed,
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cancels {
    /// A cancel stops it.
    Stop,
    /// It is acknowledged, and the job completes anyway.
    AreIgnored,
}

/// What the submit's answer says of the job's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Id {
    Plain,
    Missing,
    Hostile,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Webhook {
    /// When the job has ended.
    AtItsEnd,
    /// And the submit's answer after it.
    BeforeTheAnswer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Executes {
    Yes,
    No,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Answer,
    Drop,
    Half,
    Hang,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Length,
    Chunked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Json {
    Valid,
    Cut,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Credential {
    Kept,
    Echoed,
}

/// What a stream ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    Done,
    Missing,
    Error,
}

impl Treatment {
    const SUCCEED: Treatment = Treatment {
        executes: Executes::Yes,
        status: 200,
        retry_after: None,
        queue: Duration::ZERO,
        delay: Duration::ZERO,
        ending: Ending::Answer,
        framing: Framing::Length,
        slow_body: Duration::ZERO,
        json: Json::Valid,
        size_bytes: 0,
        credential: Credential::Kept,
        chunks: None,
        pause: Duration::ZERO,
        part_bytes: 0,
        marker: Marker::Done,
        job: Queued {
            run: Duration::ZERO,
            end: End::Completed,
            cancels: Cancels::Stop,
            forget: None,
            report: None,
            id: Id::Plain,
            webhook: Webhook::AtItsEnd,
        },
    };
}

impl Behaviour {
    /// How one request is treated, and the words for it; `None` for a behaviour that is not about requests.
    pub(super) fn treatment(&self, draw: &str) -> Option<(String, Treatment)> {
        match &self.does {
            Does::Treat(treatment) => Some((self.text.clone(), treatment.clone())),
            Does::Random { seed } => drawn(*seed, draw).treatment(draw),
            Does::Refuse { .. } => None,
        }
    }
}

impl Default for Behaviour {
    fn default() -> Self {
        Behaviour { text: "succeed".to_owned(), does: Does::Treat(Treatment::SUCCEED) }
    }
}

impl fmt::Display for Behaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Behaviour {
    type Err = InvalidBehaviour;

    fn from_str(text: &str) -> Result<Self, InvalidBehaviour> {
        let text = text.trim();
        let refused = |problem: String| InvalidBehaviour::new(text, problem);
        if text.len() > TEXT_BYTES_MAX {
            return Err(refused(format!("it has {} bytes; the limit is {TEXT_BYTES_MAX}", text.len())));
        }
        let words: Vec<(&str, Option<&str>)> = text
            .split(',')
            .map(|word| match word.split_once('=') {
                Some((name, value)) => (name.trim(), Some(value.trim())),
                None => (word.trim(), None),
            })
            .collect();
        let does = match words[..] {
            [("refuse", None)] => Does::Refuse { duration: None },
            [("refuse", Some(value))] => Does::Refuse { duration: Some(duration(value).map_err(refused)?) },
            [("random", Some(value))] => {
                Does::Random { seed: value.parse().map_err(|_| refused(format!("seed {value:?} is no whole number")))? }
            }
            _ => Does::Treat(treatment(&words).map_err(refused)?),
        };
        Ok(Behaviour { text: text.to_owned(), does })
    }
}

fn treatment(words: &[(&str, Option<&str>)]) -> Result<Treatment, String> {
    let mut treatment = Treatment::SUCCEED;
    let mut named: Vec<&str> = Vec::with_capacity(words.len());
    for &(name, value) in words {
        if named.contains(&name) {
            return Err(format!("{name} is said twice"));
        }
        let exclusive = [VERDICTS, ENDINGS, MARKERS, IDS].into_iter().find(|group| group.contains(&name));
        if let Some(other) = exclusive.and_then(|group| named.iter().find(|other| group.contains(*other))) {
            return Err(format!("{other} and {name} exclude each other"));
        }
        named.push(name);
        match (name, value) {
            ("succeed", None) => {}
            ("status", Some(value)) => treatment.status = status(value)?,
            ("refuse_status", Some(value)) => (treatment.executes, treatment.status) = (Executes::No, status(value)?),
            ("jam", None) => (treatment.executes, treatment.status) = (Executes::No, 422),
            ("unexecuted", None) => treatment.executes = Executes::No,
            ("retry_after", Some(value)) => treatment.retry_after = Some(duration(value)?),
            ("queue", Some(value)) => treatment.queue = duration(value)?,
            ("delay", Some(value)) => treatment.delay = duration(value)?,
            ("drop", None) => treatment.ending = Ending::Drop,
            ("half", None) => treatment.ending = Ending::Half,
            ("hang", None) => treatment.ending = Ending::Hang,
            ("chunked", None) => treatment.framing = Framing::Chunked,
            ("slow_body", Some(value)) => treatment.slow_body = duration(value)?,
            ("invalid_json", None) => treatment.json = Json::Cut,
            ("size", Some(value)) => treatment.size_bytes = size(value)?,
            ("chunks", Some(value)) => treatment.chunks = Some(chunks(value)?),
            ("pause", Some(value)) => treatment.pause = duration(value)?,
            ("part_bytes", Some(value)) => treatment.part_bytes = size(value)?,
            ("unmarked", None) => treatment.marker = Marker::Missing,
            ("stream_error", None) => treatment.marker = Marker::Error,
            ("echo_credential", None) => treatment.credential = Credential::Echoed,
            ("run", Some(value)) => treatment.job.run = duration(value)?,
            ("fail", None) => treatment.job.end = End::Failed,
            ("stubborn", None) => treatment.job.cancels = Cancels::AreIgnored,
            ("forget", Some(value)) => treatment.job.forget = Some(duration(value)?),
            ("report", Some(value)) => treatment.job.report = Some(value.to_owned()),
            ("no_id", None) => treatment.job.id = Id::Missing,
            ("hostile_id", None) => treatment.job.id = Id::Hostile,
            ("webhook_first", None) => treatment.job.webhook = Webhook::BeforeTheAnswer,
            ("refuse" | "random", _) => return Err(format!("{name} stands alone: {name}=…")),
            (name, Some(_)) if PLAIN.contains(&name) => return Err(format!("{name} takes no value")),
            (name, None) if VALUED.contains(&name) => return Err(format!("{name} needs a value: {name}=…")),
            (name, _) => return Err(format!("{name:?} is not a word of it; the words are {}", words_known())),
        }
    }
    Ok(treatment)
}

const VERDICTS: &[&str] = &["succeed", "status", "refuse_status", "jam"];
const ENDINGS: &[&str] = &["drop", "half", "hang"];
const MARKERS: &[&str] = &["unmarked", "stream_error"];
const IDS: &[&str] = &["no_id", "hostile_id"];
const PLAIN: &[&str] = &[
    "succeed",
    "jam",
    "unexecuted",
    "drop",
    "half",
    "hang",
    "chunked",
    "invalid_json",
    "echo_credential",
    "unmarked",
    "stream_error",
    "fail",
    "stubborn",
    "no_id",
    "hostile_id",
    "webhook_first",
];
const VALUED: &[&str] = &[
    "status",
    "refuse_status",
    "retry_after",
    "queue",
    "delay",
    "slow_body",
    "size",
    "chunks",
    "pause",
    "part_bytes",
    "run",
    "forget",
    "report",
];

fn words_known() -> String {
    let mut words = [PLAIN, VALUED, &["refuse", "random"]].concat();
    words.sort_unstable();
    words.join(", ")
}

fn duration(value: &str) -> Result<Duration, String> {
    let parsed = humantime::parse_duration(value);
    let duration = parsed.map_err(|_| format!("{value:?} is no duration such as 200ms or 2s"))?;
    if duration > DURATION_MAX { Err(format!("{value} is too long; the limit is {DURATION_MAX:?}")) } else { Ok(duration) }
}

fn status(value: &str) -> Result<u16, String> {
    let status = value.parse().ok().filter(|status| (200..600).contains(status));
    status.ok_or_else(|| format!("status {value:?} is not one from 200 to 599"))
}

fn chunks(value: &str) -> Result<usize, String> {
    let chunks = value.parse().ok().filter(|chunks| (1..=CHUNKS_MAX).contains(chunks));
    chunks.ok_or_else(|| format!("chunks {value:?} is not a number from 1 to {CHUNKS_MAX}"))
}

fn size(value: &str) -> Result<usize, String> {
    let size = value.parse().ok().filter(|size| *size <= SIZE_BYTES_MAX);
    size.ok_or_else(|| format!("size {value:?} is not a number of bytes up to {SIZE_BYTES_MAX}"))
}

/// What `random` draws from, with weights that add up to 100.
const DRAWN: &[(u8, &str)] = &[
    (60, "succeed"),
    (8, "delay=20ms"),
    (6, "refuse_status=429,retry_after=1s"),
    (6, "refuse_status=400"),
    (6, "status=500"),
    (6, "drop"),
    (4, "half"),
    (2, "unexecuted,drop"),
    (2, "invalid_json"),
];

fn drawn(seed: u64, draw: &str) -> Behaviour {
    let digest = sha256(format!("{seed}/{draw}").as_bytes());
    let mut ticket = digest[..8].iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte)) % 100;
    for (weight, text) in DRAWN {
        if ticket < u64::from(*weight) {
            return text.parse().expect("what is drawn from is valid");
        }
        ticket -= u64::from(*weight);
    }
    Behaviour::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn treated(text: &str) -> Treatment {
        text.parse::<Behaviour>().unwrap().treatment("").unwrap().1
    }

    #[test]
    fn words_combine() {
        assert_eq!(treated("succeed"), Treatment::SUCCEED);
        let expected = Treatment { delay: Duration::from_millis(200), ending: Ending::Drop, ..Treatment::SUCCEED };
        assert_eq!(treated(" delay=200ms, drop "), expected);
        let expected =
            Treatment { executes: Executes::No, status: 429, retry_after: Some(Duration::from_secs(2)), ..Treatment::SUCCEED };
        assert_eq!(treated("refuse_status=429,retry_after=2s"), expected);
        let expected = Treatment { executes: Executes::No, ending: Ending::Hang, ..Treatment::SUCCEED };
        assert_eq!(treated("unexecuted,hang"), expected);
    }

    #[test]
    fn refuse_and_random_stand_alone() {
        assert_eq!("refuse".parse::<Behaviour>().unwrap().does, Does::Refuse { duration: None });
        assert_eq!("refuse=2s".parse::<Behaviour>().unwrap().does, Does::Refuse { duration: Some(Duration::from_secs(2)) });
        assert_eq!("random=7".parse::<Behaviour>().unwrap().does, Does::Random { seed: 7 });
        for text in ["refuse,drop", "drop,random=7", "random"] {
            assert!(text.parse::<Behaviour>().unwrap_err().problem.contains("stands alone"), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, problem) in [
            ("", "is not a word"),
            ("dorp", "\"dorp\" is not a word"),
            ("drop,", "\"\" is not a word"),
            ("drop,half", "drop and half exclude each other"),
            ("jam,status=500", "jam and status exclude each other"),
            ("delay=1s,delay=2s", "delay is said twice"),
            ("delay", "delay needs a value"),
            ("drop=1", "drop takes no value"),
            ("delay=soon", "\"soon\" is no duration"),
            ("delay=2h", "the limit is 3600s"),
            ("status=99", "from 200 to 599"),
            ("size=99999999999", "up to 67108864"),
            ("random=x", "no whole number"),
            ("chunks=0", "from 1 to 100000"),
            ("unmarked,stream_error", "exclude each other"),
            ("no_id,hostile_id", "no_id and hostile_id exclude each other"),
            ("run", "run needs a value"),
            ("stubborn=1", "stubborn takes no value"),
        ] {
            let error = text.parse::<Behaviour>().unwrap_err();
            assert!(error.problem.contains(problem), "{text}: {error}");
        }
        assert!("x".repeat(TEXT_BYTES_MAX + 1).parse::<Behaviour>().is_err());
    }

    #[test]
    fn a_draw_depends_on_its_seed_and_request_alone_and_reaches_everything() {
        assert_eq!(DRAWN.iter().map(|(weight, _)| u32::from(*weight)).sum::<u32>(), 100);
        let draws = |seed| (0..1000).map(|number| drawn(seed, &number.to_string())).collect::<Vec<Behaviour>>();
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        for (_, text) in DRAWN {
            assert!(draws(7).contains(&text.parse().unwrap()), "{text} was never drawn");
        }
    }
}
