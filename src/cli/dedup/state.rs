//! How far a run is, in a file, so that one that is killed goes on where it was.
//!
//! The file is replaced as a whole: a temporary one beside it, synced, then renamed. It says how much of the input is settled and how
//! long the output was then, and which batches of that output may not have been committed. Whoever starts again cuts the output off
//! there, commits those batches once more and goes on.
//!
//! Two processes on one file would write one output: the second is refused, by a lock on a file beside it that goes with its process.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::super::{Exit, Failure};

/// Which version of the file this is.
const FORMAT: u32 = 1;
/// Largest file that is read: it has some lines.
pub(super) const STATE_BYTES_MAX: u64 = 1 << 20;

/// What a run is of. Whoever goes on with it must say the same.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Parameters {
    pub(super) stream: String,
    pub(super) key: Vec<String>,
    pub(super) window_ms: u64,
    pub(super) shards: u16,
    pub(super) format: String,
    pub(super) delimiter: String,
    pub(super) on_error: String,
    pub(super) rejects: bool,
    /// What the keys in Redis begin with.
    pub(super) prefix: String,
}

/// A batch whose records are in the output, and of which it is not known whether it was committed.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pending {
    /// The name of the token that it was claimed with.
    pub(super) token: String,
    /// Where in the output its records begin and end.
    pub(super) begin: u64,
    pub(super) end: u64,
}

/// What came of the records so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Counts {
    pub(super) records: u64,
    pub(super) first: u64,
    pub(super) duplicates: u64,
    /// Bad ones that were skipped.
    pub(super) rejected: u64,
    /// In the output, and counted by somebody else too: their claims had lapsed.
    pub(super) lost: u64,
    /// Committed again after what became of the first time was no longer kept: either ours or lost.
    pub(super) unsure: u64,
}

/// How far a run is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    format: u32,
    /// The run, for its whole life.
    pub(super) run: String,
    /// How often it was started.
    pub(super) session: u64,
    /// Claims of earlier sessions than this were given back, or have been settled.
    pub(super) released: u64,
    pub(super) parameters: Parameters,
    pub(super) input_bytes: u64,
    /// The beginning of the input: so many bytes, and their hash.
    pub(super) head_bytes: u64,
    pub(super) head: String,
    /// The last record of it had its line end.
    pub(super) whole: bool,
    pub(super) output_bytes: u64,
    pub(super) rejects_bytes: u64,
    pub(super) counts: Counts,
    pub(super) pending: Vec<Pending>,
    /// When this was written, Unix ms by Redis' clock.
    pub(super) at_ms: u64,
    /// The input was at its end.
    pub(super) complete: bool,
}

impl State {
    pub(super) fn begin(parameters: Parameters) -> Self {
        State {
            format: FORMAT,
            run: uuid::Uuid::new_v4().simple().to_string(),
            session: 0,
            released: 0,
            parameters,
            input_bytes: 0,
            head_bytes: 0,
            head: String::new(),
            whole: true,
            output_bytes: 0,
            rejects_bytes: 0,
            counts: Counts::default(),
            pending: Vec::new(),
            at_ms: 0,
            complete: false,
        }
    }
}

/// The file, held for this process alone.
pub(super) struct StateFile {
    path: PathBuf,
    temporary: PathBuf,
    directory: File,
    /// Held as long as it is open.
    _lock: File,
}

impl StateFile {
    /// Takes the lock and reads what is there.
    ///
    /// # Errors
    /// Another process has it; it is no such file; it is of a run with other parameters. Nothing has changed.
    pub(super) fn open(path: &Path, parameters: &Parameters) -> Result<(Self, Option<State>), Failure> {
        let refused = |what: &str| Failure::new(Exit::Usage, format!("{}: {what}", path.display()));
        let wrong = |error: io::Error| refused(&error.to_string());
        if path.file_name().is_none() {
            return Err(refused("it is no name of a file"));
        }
        let lock = OpenOptions::new().create(true).append(true).open(beside(path, ".lock")).map_err(wrong)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(refused("another process works with it")),
            Err(TryLockError::Error(error)) => return Err(wrong(error)),
        }
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let directory = File::open(parent).map_err(wrong)?;
        let file = StateFile { path: path.to_owned(), temporary: beside(path, ".new"), directory, _lock: lock };
        let mut text = Vec::new();
        match File::open(path) {
            Ok(there) => there.take(STATE_BYTES_MAX + 1).read_to_end(&mut text).map_err(wrong)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((file, None)),
            Err(error) => return Err(wrong(error)),
        };
        if text.len() as u64 > STATE_BYTES_MAX {
            return Err(refused(&format!("it has more than {STATE_BYTES_MAX} bytes, and is no state of a run")));
        }
        let state: State = serde_json::from_slice(&text)
            .map_err(|error| refused(&format!("it is no state of a run ({error}): name another file, or remove it")))?;
        if state.format != FORMAT {
            return Err(refused(&format!("it is of version {}, and this program reads {FORMAT}", state.format)));
        }
        if let Some(differs) = difference(&state.parameters, parameters) {
            return Err(refused(&format!("{differs}: go on with what it was begun with, or begin a new one")));
        }
        Ok((file, Some(state)))
    }

    /// Writes it down, so that it stands whatever happens next.
    pub(super) fn write(&self, state: &State) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(state)?;
        text.push(b'\n');
        let mut file = File::create(&self.temporary)?;
        file.write_all(&text)?;
        file.sync_data()?;
        std::fs::rename(&self.temporary, &self.path)?;
        self.directory.sync_data()
    }
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// The first parameter that differs.
fn difference(was: &Parameters, is: &Parameters) -> Option<String> {
    let all = |of: &Parameters| match serde_json::to_value(of) {
        Ok(serde_json::Value::Object(members)) => members,
        _ => serde_json::Map::new(),
    };
    let (was, is) = (all(was), all(is));
    let name = was.keys().find(|name| was.get(*name) != is.get(*name))?;
    Some(format!("its run has {name} = {}, and now it is {}", was[name], is.get(name)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters() -> Parameters {
        Parameters {
            stream: "clicks".to_owned(),
            key: vec!["user".to_owned()],
            window_ms: 1000,
            shards: 1,
            format: "csv".to_owned(),
            delimiter: ",".to_owned(),
            on_error: "stop".to_owned(),
            rejects: false,
            prefix: "oj".to_owned(),
        }
    }

    #[test]
    fn a_state_comes_back_and_a_large_a_foreign_or_a_differing_one_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        let state = {
            let (file, none) = StateFile::open(&path, &parameters()).unwrap_or_else(|failure| panic!("{failure}"));
            assert!(none.is_none());
            let pending = vec![Pending { token: "t".to_owned(), begin: 1, end: 2 }];
            let state = State { pending, input_bytes: 7, ..State::begin(parameters()) };
            file.write(&state).unwrap();
            let refused = StateFile::open(&path, &parameters()).err().unwrap().to_string();
            assert!(refused.contains("another process"), "{refused}");
            state
        };
        let (_, found) = StateFile::open(&path, &parameters()).unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(found, Some(state));
        let refused = |parameters: &Parameters| StateFile::open(&path, parameters).err().unwrap().to_string();
        let other = refused(&Parameters { window_ms: 2000, ..parameters() });
        assert!(other.contains("window_ms = 1000") && other.contains("2000"), "{other}");
        for (text, what) in [("{}", "no state"), ("", "no state"), (&" ".repeat(STATE_BYTES_MAX as usize + 1), "more than")] {
            std::fs::write(&path, text).unwrap();
            assert!(refused(&parameters()).contains(what));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
