//! The packed record: its positions, and how it becomes a [`Job`].
//!
//! Only Lua packs it (`lua/prelude.lua` names the same positions); Rust only reads it. The order of the fields below *is* the
//! layout; the `tidy` test compares it with the prelude and with `docs/PROTOCOL.md`.

use std::sync::Arc;

use serde::Deserialize;
use serde_bytes::ByteBuf;

use crate::attempt::{Attempt, AttemptState, AttemptToken};
use crate::error::StoreError;
use crate::job::{Body, Class, Event, Job, JobId, JobState, Payload, Rules};

/// The schema that this version reads and writes.
pub(crate) const SCHEMA: u64 = 1;

#[derive(Deserialize)]
struct Record {
    schema: u64,
    job_id: ByteBuf,
    digest: ByteBuf,
    fingerprint: ByteBuf,
    owner: ByteBuf,
    route: ByteBuf,
    class: u8,
    state: u8,
    version: u64,
    revision: u64,
    created_ms: u64,
    updated_ms: u64,
    ended_ms: u64,
    deadline_ms: u64,
    next_at_ms: u64,
    #[expect(dead_code, reason = "a token: the scripts compare it, nobody else needs it")]
    holder: ByteBuf,
    holder_lease_ms: u64,
    completed_by: u32,
    retain_until_ms: u64,
    canceled_by: ByteBuf,
    reason: ByteBuf,
    policy: Policy,
    attempts: Vec<Row>,
    events: Vec<EventRow>,
    #[expect(dead_code, reason = "the scripts remember request ids, nobody else needs them")]
    requests: Vec<ByteBuf>,
    input_head: ByteBuf,
    input_blob_bytes: u64,
    input_body: ByteBuf,
    result_head: ByteBuf,
    result_blob_bytes: u64,
    result_body: ByteBuf,
}

#[derive(Deserialize)]
struct Policy {
    attempts_max: u32,
    race_max: u32,
    race_after_ms: u64,
    key_life_ms: u64,
    retention_ms: u64,
    release: u8,
    quarantine_ms: u64,
}

#[derive(Deserialize)]
struct Row {
    state: u8,
    token: ByteBuf,
    provider: ByteBuf,
    gateway: ByteBuf,
    version: u64,
    started_ms: u64,
    lease_ms: u64,
    sequence: u64,
    ended_ms: u64,
    reason: ByteBuf,
    url: ByteBuf,
    request_hash: ByteBuf,
    certificate: ByteBuf,
    remote_id: ByteBuf,
    model: ByteBuf,
}

#[derive(Deserialize)]
struct EventRow {
    at_ms: u64,
    event: ByteBuf,
    attempt: u32,
    actor: ByteBuf,
    detail: ByteBuf,
}

/// Reads a packed record.
///
/// # Errors
/// [`StoreError::Fatal`] that names the field: a record that cannot be read is never taken for an absent or an empty one.
pub(crate) fn unpack(packed: &[u8]) -> Result<Job, StoreError> {
    let record: Record = rmp_serde::from_slice(packed).map_err(|error| StoreError::fatal("BADRECORD", error))?;
    if record.schema != SCHEMA {
        let detail = format!("the record has schema {}, this version reads {SCHEMA}", record.schema);
        return Err(StoreError::fatal("BADSCHEMA", detail));
    }
    let policy = record.policy;
    let times = Times { created_ms: record.created_ms };
    Ok(Job {
        id: JobId::from_bytes(bytes("job_id", &record.job_id)?).map_err(|error| field("job_id", error))?,
        digest: bytes("digest", &record.digest)?,
        fingerprint: bytes("fingerprint", &record.fingerprint)?,
        owner: text("owner", record.owner)?,
        route: text("route", record.route)?,
        class: word("class", &Class::ALL, record.class)?,
        state: word("state", &JobState::ALL, record.state)?,
        version: record.version,
        revision: record.revision,
        created_ms: record.created_ms,
        updated_ms: times.at(record.updated_ms),
        ended_ms: times.at(record.ended_ms),
        deadline_ms: times.at(record.deadline_ms),
        next_at_ms: times.at(record.next_at_ms),
        holder_lease_ms: times.at(record.holder_lease_ms),
        completed_by: record.completed_by,
        retain_until_ms: times.at(record.retain_until_ms),
        canceled_by: text("canceled_by", record.canceled_by)?,
        reason: text("reason", record.reason)?,
        rules: Rules {
            attempts_max: policy.attempts_max,
            race_max: policy.race_max,
            race_after_ms: policy.race_after_ms,
            key_life_ms: policy.key_life_ms,
            retention_ms: policy.retention_ms,
            releases_on_failure: policy.release == 1,
            quarantine_ms: policy.quarantine_ms,
        },
        attempts: (1..).zip(record.attempts).map(|(number, row)| attempt(times, number, row)).collect::<Result<_, _>>()?,
        events: record.events.into_iter().map(event).collect::<Result<_, _>>()?,
        input: payload("input", record.input_head, record.input_blob_bytes, record.input_body)?,
        result: payload("result", record.result_head, record.result_blob_bytes, record.result_body)?,
    })
}

/// A packed record keeps most times as ms since `created_ms`, plus one; 0 is "none".
#[derive(Clone, Copy)]
struct Times {
    created_ms: u64,
}

impl Times {
    fn at(self, packed: u64) -> u64 {
        if packed == 0 { 0 } else { self.created_ms.saturating_add(packed - 1) }
    }
}

fn attempt(times: Times, number: u32, row: Row) -> Result<Attempt, StoreError> {
    Ok(Attempt {
        number,
        state: word("attempt.state", &AttemptState::ALL, row.state)?,
        token: AttemptToken::from_bytes(bytes("attempt.token", &row.token)?),
        provider: text("attempt.provider", row.provider)?,
        gateway: text("attempt.gateway", row.gateway)?,
        version: row.version,
        started_ms: times.at(row.started_ms),
        lease_ms: times.at(row.lease_ms),
        sequence: row.sequence,
        ended_ms: times.at(row.ended_ms),
        reason: text("attempt.reason", row.reason)?,
        url: text("attempt.url", row.url)?,
        request_hash: row.request_hash.into_vec(),
        certificate: text("attempt.certificate", row.certificate)?,
        remote_id: text("attempt.remote_id", row.remote_id)?,
        model: text("attempt.model", row.model)?,
    })
}

fn event(row: EventRow) -> Result<Event, StoreError> {
    Ok(Event {
        at_ms: row.at_ms,
        event: text("event.event", row.event)?,
        attempt: row.attempt,
        actor: text("event.actor", row.actor)?,
        detail: text("event.detail", row.detail)?,
    })
}

fn payload(name: &'static str, head: ByteBuf, blob_bytes: u64, body: ByteBuf) -> Result<Payload, StoreError> {
    let body = match blob_bytes {
        0 => Body::Inline(Arc::from(body.into_vec())),
        _ => Body::Blob { sha256: bytes(name, &body)?, bytes: blob_bytes },
    };
    Ok(Payload { head: text(name, head)?, body })
}

fn field(name: &str, why: impl std::fmt::Display) -> StoreError {
    StoreError::fatal("BADRECORD", format!("field {name}: {why}"))
}

fn bytes<const N: usize>(name: &'static str, value: &ByteBuf) -> Result<[u8; N], StoreError> {
    value.as_slice().try_into().map_err(|_| field(name, format!("{} bytes, not {N}", value.len())))
}

fn text(name: &'static str, value: ByteBuf) -> Result<String, StoreError> {
    String::from_utf8(value.into_vec()).map_err(|error| field(name, error))
}

/// A record keeps a word as its place, from 1.
fn word<W: Copy>(name: &'static str, words: &[W], place: u8) -> Result<W, StoreError> {
    let word = usize::from(place).checked_sub(1).and_then(|place| words.get(place));
    word.copied().ok_or_else(|| field(name, format!("there is no word {place} of {}", words.len())))
}
