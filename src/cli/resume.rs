//! Finished runs of a qualification in a file, so that one that is killed goes on where it was.
//!
//! The first line says which contract the runs are of; each further line is one finished run and when it began by Redis' clock,
//! appended and synchronized as it ends. Nothing that stands there is ever written again: a process that is killed loses what it
//! had not finished, and at most the line that it was writing. What stands behind the last whole line is cut off before anything is
//! appended; a whole line that is no run was not written by us, and the file is refused.
//!
//! A file is good for one certificate. Which one stands in it before that is issued, so that who cannot tell whether it was can
//! issue the same again; once it was, the file is used up. And only what is new is proof: a run that began more than
//! [`RUN_AGE_MAX`] ago, or before somebody last suspended or revoked a certificate of the pair, is made again.
//!
//! Two processes on one file would each run what the other runs: the second is refused, by a lock of the file's that goes with
//! its process.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use onejob::qualify::runner::{Run, Verdict};
use onejob::store::CertificateEvent;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Exit, Failure, say};

/// How long a run is proof, from its beginning: what a model was yesterday it need not be today.
const RUN_AGE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Largest file that is read.
const FILE_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Longest line in it.
const LINE_BYTES_MAX: u64 = 1024 * 1024;

/// A file of finished runs, held for this process alone.
pub(super) struct Resume {
    /// What was decided before, and is still proof. What was inconclusive is run again.
    pub(super) done: Vec<Run>,
    /// What all runs there have cost, in the provider's unit.
    pub(super) cost: u64,
    /// When the certificate was issued that was begun to be issued for these runs, Unix ms.
    pub(super) issued_ms: Option<u64>,
    open: Mutex<Open>,
}

struct Open {
    file: File,
    /// How long the file is up to its last whole line, in bytes.
    whole_bytes: u64,
}

/// A line behind the first.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
enum Line {
    /// A run that ended.
    Run {
        /// When it began, Unix ms by Redis' clock.
        at_ms: u64,
        run: Box<Run>,
    },
    /// A certificate is about to be issued at this time.
    Issuing { issued_ms: u64 },
    /// It was issued.
    Used { certificate: String },
}

/// What was there.
#[derive(Default)]
struct Found {
    runs: Vec<(u64, Run)>,
    issued_ms: Option<u64>,
    whole_bytes: u64,
}

/// Since when a run is proof, Unix ms by Redis' clock.
pub(super) fn proof_since(events: &[CertificateEvent], now_ms: u64) -> u64 {
    let against = events.iter().filter(|event| event.event == "suspended" || event.event == "revoked");
    let last = against.map(|event| event.at_ms.saturating_add(1)).max().unwrap_or(0);
    last.max(now_ms.saturating_sub(u64::try_from(RUN_AGE_MAX.as_millis()).unwrap_or(u64::MAX)))
}

impl Resume {
    /// Opens a file, or begins it, for the runs of these bindings; those that began before `since_ms` are made again.
    ///
    /// # Errors
    /// It is another contract's, or no file of runs at all; it is used up; it is too large, or has a line that is none of ours;
    /// somebody else has it; it cannot be read or written. It is as it was.
    pub(super) fn open(path: &Path, bindings: &str, since_ms: u64) -> Result<Self, Failure> {
        let refused = |what: &str| Failure::new(Exit::Usage, format!("{}: {what}", path.display()));
        let wrong = |error: std::io::Error| refused(&error.to_string());
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(wrong)?;
        let is_there = file.metadata().map_err(wrong)?;
        if !is_there.is_file() {
            return Err(refused("it is no regular file"));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(refused("another qualification writes to it")),
            Err(TryLockError::Error(error)) => return Err(wrong(error)),
        }
        let bytes = is_there.len();
        let head = format!("{{\"bindings\":\"{bindings}\",\"format\":2}}\n").into_bytes();
        let begun = read_head(&mut file, &head).map_err(wrong)?.map_err(refused)?;
        if bytes > FILE_BYTES_MAX {
            return Err(refused(&format!("it has {bytes} bytes, and the limit is {FILE_BYTES_MAX}: take another file")));
        }
        let found = if begun { read(&mut file, head.len() as u64).map_err(|what| refused(&what))? } else { Found::default() };
        if found.whole_bytes < bytes {
            let cut = bytes - found.whole_bytes;
            say(format_args!("onejob: {}: its last {cut} bytes are no whole run, and are cut off", path.display()));
            file.set_len(found.whole_bytes).map_err(wrong)?;
        }
        let mut open = Open { file, whole_bytes: found.whole_bytes };
        if !begun {
            open.append(&head).map_err(wrong)?;
        }
        let Found { runs, mut issued_ms, .. } = found;
        let cost = runs.iter().map(|(_, run)| run.cost).sum();
        let old = runs.iter().filter(|(at_ms, _)| *at_ms < since_ms).count();
        if old > 0 {
            // Another proof than the one that was to be certified.
            issued_ms = None;
            let why = "they are older than a day, or than the last suspension or revocation";
            say(format_args!("onejob: {}: {old} of its runs prove nothing any more, and are made again: {why}", path.display()));
        }
        let proves = |(at_ms, run): &(u64, Run)| *at_ms >= since_ms && run.verdict != Verdict::Inconclusive;
        let done = runs.into_iter().filter(proves).map(|(_, run)| run).collect();
        Ok(Resume { done, cost, issued_ms, open: Mutex::new(open) })
    }

    /// Keeps a run that has ended now, by Redis' clock; one that was never begun is nothing to keep.
    pub(super) fn keep(&self, run: &Run, now_ms: u64) {
        if run.cut {
            return;
        }
        let line = Line::Run { at_ms: now_ms.saturating_sub(run.took_ms), run: Box::new(run.clone()) };
        if let Err(error) = self.write(&line) {
            say(format_args!("onejob: a finished run is not written down: {error}"));
        }
    }

    /// Writes down that a certificate is about to be issued at this time.
    ///
    /// # Errors
    /// It could not be written: nothing may be issued, for it could be issued again.
    pub(super) fn issuing(&self, issued_ms: u64) -> std::io::Result<()> {
        self.write(&Line::Issuing { issued_ms })
    }

    /// Writes down that the certificate is issued: the file is used up.
    pub(super) fn used(&self, certificate: &str) {
        if let Err(error) = self.write(&Line::Used { certificate: certificate.to_owned() }) {
            // Whoever takes it again issues the same certificate, which is there.
            say(format_args!("onejob: that the file of runs is used up is not written down: {error}"));
        }
    }

    fn write(&self, line: &Line) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(line)?;
        line.push(b'\n');
        self.open.lock().unwrap_or_else(PoisonError::into_inner).append(&line)
    }
}

impl Open {
    /// Appends a line, and takes back what was written of one that could not be.
    fn append(&mut self, line: &[u8]) -> std::io::Result<()> {
        let written = self.file.write_all(line).and_then(|()| self.file.sync_data());
        match written {
            Ok(()) => self.whole_bytes += line.len() as u64,
            Err(_) => self.file.set_len(self.whole_bytes)?,
        }
        written
    }
}

/// Reads the first line: whether it is `head`, or why the file is none of ours. A head that was cut was never finished.
fn read_head(file: &mut File, head: &[u8]) -> std::io::Result<Result<bool, &'static str>> {
    let mut first = Vec::new();
    BufReader::new(file.take(LINE_BYTES_MAX)).read_until(b'\n', &mut first)?;
    if first == head || (head.starts_with(&first) && !first.ends_with(b"\n")) {
        return Ok(Ok(first == head));
    }
    let is_ours = serde_json::from_slice::<Value>(&first).is_ok_and(|head| head["bindings"].is_string());
    Ok(Err(match is_ours {
        true => "it has the runs of another contract, or of another version: something has changed since; take another file",
        false => "it is no resume file, and is left as it is: its first line does not say what its runs are of",
    }))
}

/// Reads the lines behind the first.
fn read(file: &mut File, head_bytes: u64) -> Result<Found, String> {
    use std::io::{Seek as _, SeekFrom};
    file.seek(SeekFrom::Start(head_bytes)).map_err(|error| error.to_string())?;
    let mut found = Found { whole_bytes: head_bytes, ..Found::default() };
    // What is appended meanwhile is not read either.
    let mut lines = BufReader::new(file.take(FILE_BYTES_MAX));
    let mut line = Vec::new();
    for number in 2.. {
        line.clear();
        let bytes = (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(|error| error.to_string())? as u64;
        if bytes == LINE_BYTES_MAX {
            return Err(format!("line {number} is longer than {LINE_BYTES_MAX} bytes, which no run is: take another file"));
        }
        if !line.ends_with(b"\n") {
            break;
        }
        match serde_json::from_slice(&line) {
            Ok(Line::Run { at_ms, run }) => found.runs.push((at_ms, *run)),
            Ok(Line::Issuing { issued_ms }) => found.issued_ms = Some(issued_ms),
            Ok(Line::Used { certificate }) => {
                return Err(format!("its runs are used up: certificate {certificate} was issued for them; take another file"));
            }
            Err(error) => return Err(format!("line {number} is no run ({error}): take it out, or take another file")),
        }
        found.whole_bytes += bytes;
    }
    Ok(found)
}
