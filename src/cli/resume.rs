//! Finished runs of a qualification in a file, so that one that is killed goes on where it was.
//!
//! The first line says which contract the runs are of; each further line is one finished run, appended and synchronized as it
//! ends. Nothing that stands there is ever written again: a process that is killed loses what it had not finished, and at most
//! the line that it was writing. What comes behind a line that was cut is cut off before anything is appended.
//!
//! Two processes on one file would each run what the other runs: the second is refused, by a lock of the file's that goes with
//! its process.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use onejob::qualify::runner::{Run, Verdict};
use serde_json::{Value, json};

use super::{Exit, Failure, say};

/// A file of finished runs, held for this process alone.
pub(super) struct Resume {
    /// What was decided before. What was inconclusive is run again.
    pub(super) done: Vec<Run>,
    /// What all runs there have cost, in the provider's unit.
    pub(super) cost: u64,
    open: Mutex<Open>,
}

struct Open {
    file: File,
    /// How long the file is up to its last whole line, in bytes.
    whole_bytes: u64,
}

impl Resume {
    /// Opens a file, or begins it, for the runs of these bindings.
    ///
    /// # Errors
    /// It is another contract's, or no file of runs at all; somebody else has it; it cannot be read or written. It is as it was.
    pub(super) fn open(path: &Path, bindings: &str) -> Result<Self, Failure> {
        let refused = |what: &str| Failure::new(Exit::Usage, format!("{}: {what}", path.display()));
        let wrong = |error: std::io::Error| refused(&error.to_string());
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(wrong)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(refused("another qualification writes to it")),
            Err(TryLockError::Error(error)) => return Err(wrong(error)),
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(wrong)?;
        let head = format!("{}\n", json!({ "bindings": bindings })).into_bytes();
        let begun = bytes.starts_with(&head);
        // A head that was cut is one that was never finished.
        if !begun && !head.starts_with(&bytes) {
            let first = bytes.split(|byte| *byte == b'\n').next().and_then(|line| serde_json::from_slice::<Value>(line).ok());
            let is_ours = first.is_some_and(|head| head["bindings"].is_string());
            return Err(refused(match is_ours {
                true => "it has the runs of another contract: something has changed since; take another file",
                false => "it is no resume file, and is left as it is: its first line does not say what its runs are of",
            }));
        }
        let (runs, runs_bytes) = if begun { whole_lines(&bytes[head.len()..]) } else { (Vec::new(), 0) };
        let whole_bytes = if begun { head.len() + runs_bytes } else { 0 };
        if whole_bytes < bytes.len() {
            let cut = bytes.len() - whole_bytes;
            say(format_args!("onejob: {}: its last {cut} bytes are no whole run, and are cut off", path.display()));
            file.set_len(whole_bytes as u64).map_err(wrong)?;
        }
        let mut open = Open { file, whole_bytes: whole_bytes as u64 };
        if !begun {
            open.append(&head).map_err(wrong)?;
        }
        let cost = runs.iter().map(|run| run.cost).sum();
        let done = runs.into_iter().filter(|run| run.verdict != Verdict::Inconclusive).collect();
        Ok(Resume { done, cost, open: Mutex::new(open) })
    }

    /// Keeps a run that has ended; one that was never begun is nothing to keep.
    pub(super) fn keep(&self, run: &Run) {
        if run.cut {
            return;
        }
        let Ok(mut line) = serde_json::to_vec(run) else { return };
        line.push(b'\n');
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = open.append(&line) {
            say(format_args!("onejob: a finished run is not written down: {error}"));
        }
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

/// The runs of the whole lines, and how many bytes these are. Behind one that cannot be read nothing is looked at.
fn whole_lines(bytes: &[u8]) -> (Vec<Run>, usize) {
    let (mut runs, mut whole) = (Vec::new(), 0);
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let Some(run) = line.strip_suffix(b"\n").and_then(|line| serde_json::from_slice(line).ok()) else { break };
        runs.push(run);
        whole += line.len();
    }
    (runs, whole)
}
