//! Where records are written: stdout, or a file that is cut to where a run was.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;

use super::super::{Exit, Failure};

/// A file that is written to at its end, and how long it is.
pub(super) struct Sink {
    file: File,
    pub(super) bytes: u64,
    /// What it is called where it cannot be written.
    name: String,
}

impl Sink {
    /// Stdout, without a buffer of its own.
    pub(super) fn stdout() -> io::Result<Self> {
        let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        Ok(Sink { file, bytes: 0, name: "stdout".to_owned() })
    }

    /// A file of this process alone, cut to so many bytes.
    ///
    /// # Errors
    /// It has fewer; it has more, and no run says why; somebody else has it; it cannot be written. It is as it was.
    pub(super) fn open(path: &Path, bytes: u64, is_ours: bool) -> Result<Self, Failure> {
        let refused = |what: &str| Failure::new(Exit::Usage, format!("{}: {what}", path.display()));
        let wrong = |error: io::Error| refused(&error.to_string());
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(wrong)?;
        let about = file.metadata().map_err(wrong)?;
        if !about.is_file() {
            return Err(refused("it is no regular file; leave --output away and let the shell lead stdout there"));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(refused("another process writes to it")),
            Err(TryLockError::Error(error)) => return Err(wrong(error)),
        }
        let there = about.len();
        if there < bytes {
            return Err(refused(&format!(
                "it has {there} bytes, and the run had written {bytes}: it is another file, or was cut"
            )));
        }
        if there > 0 && !is_ours {
            return Err(refused(&format!(
                "it has {there} bytes already, and nothing is written over: name another, or remove it"
            )));
        }
        file.set_len(bytes).map_err(wrong)?;
        file.seek(SeekFrom::Start(bytes)).map_err(wrong)?;
        Ok(Sink { file, bytes, name: path.display().to_string() })
    }

    /// Writes all of it.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Returns when what was written is on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// What was written before.
    pub(super) fn read(&mut self, begin: u64, end: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(begin))?;
        (&self.file).take(end.saturating_sub(begin)).read_to_end(&mut bytes)?;
        self.file.seek(SeekFrom::Start(self.bytes))?;
        Ok(bytes)
    }

    /// The failure to write to it.
    pub(super) fn failed(&self, error: &io::Error) -> Failure {
        Failure::new(Exit::Unavailable, format!("cannot write to {}: {error}", self.name))
    }
}
