//! What a job looks like from outside, read from a packed record or told by the specification: one form, to be compared.

use std::hash::{Hash, Hasher};

use onejob::attempt::{AttemptState, AttemptToken};
use onejob::job::{Class, JobId, JobState};

use crate::model::{Attempt, Model};
use crate::msgpack::{Value, unpack};
use crate::support::{KEY_LIFE_MS, RETENTION_MS, TICK_MS};

/// A job. Times are in the clear, 0 is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub id: JobId,
    pub class: Class,
    pub state: JobState,
    pub version: u64,
    pub revision: u64,
    pub updated_ms: u64,
    pub ended_ms: u64,
    pub deadline_ms: u64,
    pub next_at_ms: u64,
    pub holder: Option<AttemptToken>,
    pub holder_lease_ms: u64,
    pub completed_by: u64,
    pub retain_until_ms: u64,
    pub canceled: bool,
    pub reason: String,
    pub attempts_max: u64,
    pub attempts: Vec<Attempt>,
    pub requests: Vec<String>,
    pub input: String,
    pub result: String,
    /// When the key is over; `None` for never.
    pub expires_ms: Option<u64>,
}

impl View {
    pub fn count(&self, states: &[AttemptState]) -> usize {
        self.attempts.iter().filter(|attempt| states.contains(&attempt.state)).count()
    }

    /// What follows from the attempts, for a job that has not ended.
    pub fn derived(&self) -> JobState {
        match () {
            () if self.ended_ms > 0 => self.state,
            () if self.canceled => JobState::Canceling,
            () if self.count(&[AttemptState::Starting, AttemptState::Running]) > 0 => JobState::Running,
            () if self.count(&[AttemptState::Unknown]) > 0 => JobState::Unknown,
            () => JobState::Pending,
        }
    }

    /// Everything that what comes next may depend on; times as seen from now, those long past all the same. How often a record was
    /// changed and when last decides nothing, and words for people neither, `LAPSED` and `not_sent` excepted.
    pub fn hash_as_seen(&self, now_ms: u64, hasher: &mut impl Hasher) {
        let far = i128::from(5 * TICK_MS);
        let seen = |ms: u64| if ms == 0 { i128::MIN } else { (i128::from(ms) - i128::from(now_ms)).max(-far) };
        (self.id, self.class, self.state, self.version, self.completed_by).hash(hasher);
        [self.ended_ms, self.deadline_ms, self.next_at_ms, self.holder_lease_ms].map(seen).hash(hasher);
        (self.holder, self.canceled, self.attempts_max, self.reason == "lease_lapsed").hash(hasher);
        (&self.requests, self.input.is_empty(), &self.result, self.expires_ms.map(seen)).hash(hasher);
        for attempt in &self.attempts {
            (attempt.state, attempt.token, attempt.version, attempt.sequence, attempt.remote_id.is_empty()).hash(hasher);
            let times = match attempt.state {
                AttemptState::Starting | AttemptState::Running => [attempt.started_ms, attempt.lease_ms],
                AttemptState::Unknown => [attempt.ended_ms, 0],
                _ => [0, 0],
            };
            times.map(seen).hash(hasher);
            (attempt.reason == "lease_lapsed", attempt.reason == "not_sent").hash(hasher);
        }
    }
}

/// What the specification says of its job.
pub fn of_model(model: &Model) -> Option<View> {
    let job = model.job.as_ref()?;
    let ended = job.ended.is_some();
    let request = |(what, number, id): &(&str, u32, String)| {
        let script = if *what == "resolve" { "resolve_attempt".to_owned() } else { format!("{what}_job") };
        format!("{script} {number} {id}")
    };
    Some(View {
        id: job.id,
        class: job.submission.class,
        state: job.state(),
        version: job.version,
        revision: job.revision,
        updated_ms: job.updated_ms,
        ended_ms: job.ended_ms,
        deadline_ms: job.deadline_ms,
        next_at_ms: job.next_at_ms,
        holder: job.holder,
        holder_lease_ms: job.holder_lease_ms,
        completed_by: u64::from(job.completed_by),
        retain_until_ms: if ended { job.ended_ms + RETENTION_MS } else { 0 },
        canceled: job.canceled,
        reason: job.reason.clone(),
        attempts_max: job.attempts_max as u64,
        attempts: job.attempts.clone(),
        requests: job.requests.iter().map(request).collect(),
        input: if job.stripped { String::new() } else { job.submission.request.clone() },
        result: if job.stripped { String::new() } else { job.result.clone() },
        expires_ms: ended.then_some(job.ended_ms + KEY_LIFE_MS),
    })
}

/// What a packed record says.
///
/// # Errors
/// In words: a record that is not as docs/PROTOCOL.md has it.
pub fn of_record(packed: &[u8], expires_ms: Option<u64>) -> Result<View, String> {
    let Value::Array(fields) = unpack(packed)? else { return Err("no array".to_owned()) };
    if fields.len() != 31 {
        return Err(format!("{} fields", fields.len()));
    }
    let record = Row(&fields, 0);
    let created_ms = record.number(11)?;
    let record = Row(&fields, created_ms);
    let rules = Row(record.list(22)?, 0);
    let attempt = |value: &Value| {
        let Value::Array(fields) = value else { return Err("an attempt is no array".to_owned()) };
        let row = Row(fields, created_ms);
        Ok(Attempt {
            state: word(&AttemptState::ALL, row.number(1)?)?,
            token: AttemptToken::from_bytes(row.bytes(2)?.try_into().map_err(|_| "a token of another length")?),
            version: row.number(5)?,
            started_ms: row.time(6)?,
            lease_ms: row.time(7)?,
            sequence: row.number(8)?,
            ended_ms: row.time(9)?,
            reason: row.text(10)?,
            remote_id: row.text(14)?,
        })
    };
    let request = |value: &Value| match value {
        Value::Bytes(bytes) => Ok(String::from_utf8_lossy(bytes).into_owned()),
        other => Err(format!("a request is {other:?}")),
    };
    let holder = record.bytes(16)?;
    let holder = if holder.is_empty() { None } else { Some(holder.try_into().map_err(|_| "a holder of another length")?) };
    Ok(View {
        id: JobId::from_bytes(record.bytes(2)?.try_into().map_err(|_| "an id of another length")?).map_err(|e| e.to_string())?,
        class: word(&Class::ALL, record.number(7)?)?,
        state: word(&JobState::ALL, record.number(8)?)?,
        version: record.number(9)?,
        revision: record.number(10)?,
        updated_ms: record.time(12)?,
        ended_ms: record.time(13)?,
        deadline_ms: record.time(14)?,
        next_at_ms: record.time(15)?,
        holder: holder.map(AttemptToken::from_bytes),
        holder_lease_ms: record.time(17)?,
        completed_by: record.number(18)?,
        retain_until_ms: record.time(19)?,
        canceled: !record.bytes(20)?.is_empty(),
        reason: record.text(21)?,
        attempts_max: rules.number(1)?,
        attempts: record.list(23)?.iter().map(attempt).collect::<Result<_, _>>()?,
        requests: record.list(25)?.iter().map(request).collect::<Result<_, _>>()?,
        input: record.text(28)?,
        result: record.text(31)?,
        expires_ms,
    })
}

/// A row of values, and what its times count from.
struct Row<'a>(&'a [Value], u64);

impl<'a> Row<'a> {
    fn at(&self, place: usize) -> Result<&'a Value, String> {
        self.0.get(place - 1).ok_or_else(|| format!("no field {place}"))
    }

    fn number(&self, place: usize) -> Result<u64, String> {
        match self.at(place)? {
            Value::Number(number) => Ok(*number),
            other => Err(format!("field {place} is {other:?}")),
        }
    }

    fn bytes(&self, place: usize) -> Result<&'a [u8], String> {
        match self.at(place)? {
            Value::Bytes(bytes) => Ok(bytes),
            other => Err(format!("field {place} is {other:?}")),
        }
    }

    fn list(&self, place: usize) -> Result<&'a [Value], String> {
        match self.at(place)? {
            Value::Array(values) => Ok(values),
            other => Err(format!("field {place} is {other:?}")),
        }
    }

    fn text(&self, place: usize) -> Result<String, String> {
        self.bytes(place).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    fn time(&self, place: usize) -> Result<u64, String> {
        self.number(place).map(|ms| if ms == 0 { 0 } else { self.1 + ms - 1 })
    }
}

fn word<W: Copy>(words: &[W], place: u64) -> Result<W, String> {
    let place = usize::try_from(place).ok().and_then(|place| place.checked_sub(1));
    place.and_then(|place| words.get(place)).copied().ok_or_else(|| "a word that is none".to_owned())
}
