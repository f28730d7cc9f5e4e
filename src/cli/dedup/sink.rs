//! Where records are written: stdout, or a file that is cut to where a run was.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use super::super::{Exit, Failure};

/// A file that is written to at its end, and how long it is.
pub(super) struct Sink {
    file: File,
    pub(super) bytes: u64,
    /// What it is called where it cannot be written.
    name: String,
    /// Where it is, if it was not there before.
    made: Option<PathBuf>,
}

/// What an earlier start has left in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// There was none.
    Nothing,
    /// It was interrupted: what is behind the bytes that its state knows is its own.
    Interrupted,
    /// It ended; what is behind them is somebody else's.
    Complete,
}

impl Sink {
    /// Stdout, without a buffer of its own.
    pub(super) fn stdout() -> io::Result<Self> {
        let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        Ok(Sink { file, bytes: 0, name: "stdout".to_owned(), made: None })
    }

    /// A file of this process alone, cut to so many bytes.
    ///
    /// # Errors
    /// It has fewer; it has more, and no run says why; somebody else has it; it cannot be written. It is as it was, and where there
    /// was none there is none.
    pub(super) fn open(path: &Path, bytes: u64, left: Left) -> Result<Self, Failure> {
        let refused = |what: &str| Failure::new(Exit::Usage, format!("{}: {what}", path.display()));
        let wrong = |error: io::Error| refused(&error.to_string());
        let mut options = OpenOptions::new();
        options.read(true).write(true).truncate(false);
        let (mut file, is_new) = match options.open(path) {
            Ok(file) => (file, false),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(wrong(error)),
            Err(_) if bytes > 0 || left == Left::Complete => {
                return Err(refused(&format!("it is not there, and the run had written {bytes} bytes")));
            }
            Err(_) => (options.create(true).open(path).map_err(wrong)?, true),
        };
        let about = file.metadata().map_err(wrong)?;
        if !about.is_file() {
            return Err(refused("it is no regular file; leave --output away and let the shell lead stdout there"));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(refused("another process writes to it")),
            Err(TryLockError::Error(error)) => return Err(wrong(error)),
        }
        let there = file.metadata().map_err(wrong)?.len();
        if there < bytes {
            return Err(refused(&format!(
                "it has {there} bytes, and the run had written {bytes}: it is another file, or was cut"
            )));
        }
        match left {
            Left::Nothing if there > 0 => {
                return Err(refused(&format!(
                    "it has {there} bytes already, and nothing is written over: name another, or remove it"
                )));
            }
            Left::Complete if there > bytes => {
                return Err(refused(&format!(
                    "it has {there} bytes, and the run was complete with {bytes}: it is another file, or somebody else wrote to it"
                )));
            }
            Left::Nothing | Left::Interrupted | Left::Complete => {}
        }
        file.set_len(bytes).map_err(wrong)?;
        file.seek(SeekFrom::Start(bytes)).map_err(wrong)?;
        let made = if is_new { path.canonicalize().ok() } else { None };
        Ok(Sink { file, bytes, name: path.display().to_string(), made })
    }

    /// Removes it, if it was not there before and nothing was written.
    pub(super) fn withdraw(self) {
        if let Some(path) = self.made.filter(|_| self.bytes == 0) {
            let _ = std::fs::remove_file(path);
        }
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
