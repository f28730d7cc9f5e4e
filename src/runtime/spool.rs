//! Results in hand on disk: what Redis does not take outlives the process.
//!
//! A verdict that has been in hand for [`SPOOL_AFTER`], or that a stopping gateway cannot store, is written to a directory: one file
//! a verdict, temporary name, fsync, rename, fsync of the directory. It is tried again in memory all the while and removed when the
//! store took it. Whoever runs over that directory later stores what is left through the same call with the same token; to store
//! twice is answered `repeated`, so there is no lock and no owner, and several gateways may share one directory.
//!
//! A file is [`MAGIC`], the SHA-256 of the rest, and the rest: MessagePack with names. One that cannot be read becomes `….bad`, one
//! whose job is not in the store any more `….orphan`; both are left to a person. Each names its store: one of another store, be it
//! another Redis, another prefix or one that was wiped since, is told once and left as it is, for gateways over that store.
//!
//! Deliberately not here: what is asked of a provider again. A verdict says what happened; nothing here makes anything happen.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::attempt::{AttemptToken, FinishOutcome};
use crate::error::{Refusal, StoreError};
use crate::failpoint::failpoint;
use crate::fingerprint::{hex, sha256};
use crate::job::{Body, JobId};
use crate::metrics;
use crate::provider::Response;
use crate::runtime::attempts::{STORE_PAUSE, STORE_PAUSE_MAX};
use crate::runtime::verdict::{About, Verdict, Whose, count_finish, try_store};
use crate::runtime::{Inner, SpoolOptions, StartError, millis, sweeper};
use crate::store::{Finished, Follow};

/// How long a verdict is in hand before it is written down: longer than Redis takes for anything, shorter than anybody's patience.
pub(super) const SPOOL_AFTER: Duration = Duration::from_secs(1);
/// How long until a verdict that the spool refused is offered to it again: room may have come free.
pub(super) const SPOOL_AGAIN: Duration = Duration::from_secs(3);
/// How often the directory is looked through for what another gateway left there.
const SCAN_EVERY: Duration = Duration::from_secs(10);
/// How old a temporary file is before its writer is taken for dead: no write and fsync takes as long.
const TEMPORARY_AGE_MIN: Duration = Duration::from_secs(60);
/// Largest file that is read: a result is one value of Redis, which has this limit, and its head.
const FILE_BYTES_MAX: u64 = (512 << 20) + (1 << 20);
/// What a file begins with: whose it is, and the version of what follows.
const MAGIC: &[u8] = b"onejob verdict 1\n";
const CHECKSUM_BYTES: usize = 32;

/// What the names of the files end with.
const VERDICT: &str = ".verdict";
const TEMPORARY: &str = ".verdict.tmp";
const BAD: &str = "bad";
const ORPHAN: &str = "orphan";

/// What others may do in the directory: nothing. A result is as private as its job.
const OTHERS: u32 = 0o077;

/// The directory, as this gateway knows it.
pub(super) struct Spool {
    dir: PathBuf,
    bytes_max: u64,
    /// Of all files in it, those for a person among them. Counted anew at each scan.
    bytes: AtomicU64,
    /// Verdicts that wait in it.
    waiting: AtomicUsize,
    /// Files whose verdicts this gateway has in hand: a scan leaves them to it.
    ours: Mutex<HashSet<String>>,
    /// Files of another store, which do not wait for this one.
    foreign: Mutex<HashSet<String>>,
}

/// How often a verdict was offered to the spool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Offer {
    /// A refusal is told and counted.
    First,
    /// It was told and counted.
    Again,
}

/// A verdict that is in hand and in the spool.
pub(super) struct Kept {
    spool: Arc<Spool>,
    name: String,
    bytes: u64,
}

/// One verdict as it is written.
#[derive(Serialize, Deserialize)]
struct Sheet<'a> {
    /// The store that has its job.
    store: Cow<'a, str>,
    #[serde(borrow, with = "serde_bytes")]
    job: Cow<'a, [u8]>,
    number: u32,
    #[serde(borrow, with = "serde_bytes")]
    token: Cow<'a, [u8]>,
    outcome: FinishOutcome,
    reason: Cow<'a, str>,
    remote_id: Cow<'a, str>,
    model: Cow<'a, str>,
    /// How long to wait before another attempt; none: this failure is the job's.
    retry_delay_ms: Option<u64>,
    bytes_life_ms: u64,
    #[serde(borrow)]
    result: Option<Answer<'a>>,
}

/// A provider's answer as it is written.
#[derive(Serialize, Deserialize)]
struct Answer<'a> {
    status: u16,
    headers: Cow<'a, [(String, String)]>,
    #[serde(borrow, with = "serde_bytes")]
    body: Cow<'a, [u8]>,
}

impl Spool {
    /// Makes the directory, if it is not there, and makes sure that files can be written to it.
    pub(super) fn open(options: SpoolOptions) -> Result<Arc<Self>, StartError> {
        let SpoolOptions { dir, bytes_max } = options;
        let refuse =
            |doing: &'static str, error: &io::Error| StartError::Spool { dir: dir.clone(), doing, why: error.to_string() };
        match make(&dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {
                let about = fs::metadata(&dir).map_err(|error| refuse("looking at it", &error))?;
                let mode = about.permissions().mode() & 0o7777;
                if mode & OTHERS != 0 {
                    let why = format!(
                        "it was there and has mode {mode:04o}: group or others may enter it, and it is to hold providers' answers; \
                         chmod 700 it if it is for the spool alone, or name another one in runtime.spool_dir"
                    );
                    return Err(StartError::Spool { dir, doing: "looking at it", why });
                }
            }
            Err(error) => return Err(refuse("making it", &error)),
        }
        let probe = format!("{}{TEMPORARY}", Uuid::new_v4().simple());
        write_file(&dir.join(&probe), b"").map_err(|error| refuse("writing to it", &error))?;
        fs::remove_file(dir.join(probe)).map_err(|error| refuse("removing from it", &error))?;
        let spool = Spool {
            dir,
            bytes_max,
            bytes: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            ours: Mutex::default(),
            foreign: Mutex::default(),
        };
        // Before anything is written: the limit counts what is there already.
        spool.survey().map_err(|error| StartError::Spool {
            dir: spool.dir.clone(),
            doing: "reading it",
            why: error.to_string(),
        })?;
        Ok(Arc::new(spool))
    }

    /// Writes a verdict of a store down. `None`: it could not be, which is logged and counted the first time, and it is in memory
    /// alone.
    pub(super) async fn keep(self: &Arc<Self>, store: &str, whose: &Whose, verdict: &Verdict, offer: Offer) -> Option<Kept> {
        let name = name_of(whose);
        let body = verdict.response.as_ref().map_or(0, |response| response.body.len() as u64);
        if !self.has_room(body) {
            self.refuse_full(&name, body, offer);
            return None;
        }
        let written = encode(store, whose, verdict);
        let bytes = written.len() as u64;
        if !self.reserve(bytes) {
            self.refuse_full(&name, bytes, offer);
            return None;
        }
        self.ours().insert(name.clone());
        let (dir, file) = (self.dir.clone(), name.clone());
        match blocking(move || write_down(&dir, &file, &written)).await {
            Ok(()) => {
                metrics::spooled("written");
                self.count(self.waiting.fetch_add(1, Ordering::Relaxed) + 1);
                Some(Kept { spool: Arc::clone(self), name, bytes })
            }
            Err(error) => {
                self.free(bytes);
                self.ours().remove(&name);
                if offer == Offer::First {
                    metrics::spooled("refused");
                    let dir = self.dir.display();
                    tracing::error!(
                        file = name, %dir, %error,
                        "the spool cannot be written: a result is in memory alone, and lost with this process"
                    );
                }
                None
            }
        }
    }

    fn refuse_full(&self, file: &str, bytes: u64, offer: Offer) {
        if offer == Offer::Again {
            return;
        }
        metrics::spooled("refused");
        let (used, limit) = (self.bytes.load(Ordering::Relaxed), self.bytes_max);
        tracing::error!(
            file,
            bytes,
            used,
            limit,
            "the spool is full (runtime.spool_bytes_max): a result is in memory alone, and lost with this process"
        );
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.sum(self.bytes.load(Ordering::Relaxed), bytes).is_some()
    }

    fn reserve(&self, bytes: u64) -> bool {
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| self.sum(used, bytes)).is_ok()
    }

    fn sum(&self, used: u64, bytes: u64) -> Option<u64> {
        used.checked_add(bytes).filter(|sum| *sum <= self.bytes_max)
    }

    /// A scan may have counted anew since the bytes were reserved: never below none.
    fn free(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        let _ = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    fn ours(&self) -> MutexGuard<'_, HashSet<String>> {
        self.ours.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn foreign(&self) -> MutexGuard<'_, HashSet<String>> {
        self.foreign.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, waiting: usize) {
        metrics::spool_results(waiting);
    }

    /// One less waits.
    fn count_out(&self) {
        let before = self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
        self.count(before.unwrap_or(1) - 1);
    }

    /// Counts what is there, takes over what dead writers left behind, and returns the names of the verdicts, but for those that are
    /// known to be another store's.
    fn survey(&self) -> io::Result<Vec<String>> {
        let (mut names, mut bytes) = (Vec::new(), 0);
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            // One that is gone by now was another gateway's to remove.
            let (Ok(name), Ok(about)) = (entry.file_name().into_string(), entry.metadata()) else { continue };
            bytes += about.len();
            if let Some(stem) = name.strip_suffix(TEMPORARY) {
                let old = about.modified().ok().and_then(|at| at.elapsed().ok()).is_some_and(|age| age >= TEMPORARY_AGE_MIN);
                // It may be whole: reading it will tell.
                if old && fs::rename(entry.path(), self.dir.join(format!("{stem}{VERDICT}"))).is_ok() {
                    names.push(format!("{stem}{VERDICT}"));
                }
            } else if name.ends_with(VERDICT) {
                names.push(name);
            }
        }
        names.sort_unstable();
        {
            let mut foreign = self.foreign();
            foreign.retain(|name| names.binary_search(name).is_ok());
            names.retain(|name| !foreign.contains(name));
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        self.waiting.store(names.len(), Ordering::Relaxed);
        self.count(names.len());
        Ok(names)
    }

    /// Takes a verdict out, once it is stored or belongs to a person. Whoever was first counts it.
    async fn take_out(&self, name: &str, fate: &'static str, change: impl FnOnce(PathBuf) -> io::Result<()> + Send + 'static) {
        let path = self.dir.join(name);
        match blocking(move || change(path)).await {
            Ok(()) => {
                metrics::spooled(fate);
                self.count_out();
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::error!(file = name, %error, fate, "a file of the spool cannot be taken out"),
        }
    }

    async fn stored(&self, name: &str, bytes: u64) {
        self.take_out(name, "stored", fs::remove_file).await;
        self.free(bytes);
    }

    async fn put_aside(&self, name: &str, fate: &'static str) {
        self.take_out(name, fate, move |path| {
            let mut aside = path.clone().into_os_string();
            aside.push(format!(".{fate}"));
            fs::rename(path, aside)
        })
        .await;
    }
}

impl Kept {
    /// The store took it.
    pub(super) async fn stored(self) {
        self.spool.stored(&self.name, self.bytes).await;
        self.leave();
    }

    /// Its job is not there any more: for a person.
    pub(super) async fn orphan(self) {
        let dir = self.spool.dir.display();
        tracing::error!(file = self.name, %dir, "a verdict without a job is kept for a person, as ….orphan");
        self.spool.put_aside(&self.name, ORPHAN).await;
        self.leave();
    }

    /// No longer in hand: it stays for the next scan.
    pub(super) fn leave(self) {
        self.spool.ours().remove(&self.name);
    }
}

/// Stores what the spool holds, from the start on and now and then, until the gateway has stopped.
pub(super) async fn run(runtime: Arc<Inner>, spool: Arc<Spool>) {
    let mut told = Told { files: HashSet::new(), store: runtime.store.name() };
    let mut pause = STORE_PAUSE;
    loop {
        let pause_max = match scan(&runtime, &spool, &mut told).await {
            Scanned::Through => None,
            Scanned::StoreAway => Some(STORE_PAUSE_MAX),
            // Each time all of them are read again.
            Scanned::SomeRefused => Some(SCAN_EVERY),
        };
        let wait = if pause_max.is_some() { pause } else { SCAN_EVERY };
        pause = pause_max.map_or(STORE_PAUSE, |longest| (pause * 2).min(longest));
        tokio::select! {
            () = runtime.stopped.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

enum Scanned {
    /// Everything was looked at.
    Through,
    /// Redis is away; the rest would fare no better.
    StoreAway,
    /// Redis refused some for now, for want of memory or a permission; smaller ones it may have taken.
    SomeRefused,
}

/// What was logged already.
struct Told {
    /// Files that the store refuses for good.
    files: HashSet<String>,
    /// The store that files were compared with.
    store: Arc<str>,
}

/// Whether Redis would take no other call either.
fn is_away(error: &StoreError) -> bool {
    match error {
        StoreError::NotExecuted { code, .. } => matches!(code, Refusal::Connect | Refusal::Loading | Refusal::ReadOnly),
        StoreError::Ambiguous { .. } => true,
        StoreError::NotDurable { .. } => true,
        StoreError::Fatal { .. } => false,
    }
}

async fn scan(runtime: &Arc<Inner>, spool: &Arc<Spool>, told: &mut Told) -> Scanned {
    // While Redis does not say it is the one that it was.
    let store = runtime.store.identify().await.unwrap_or_else(|_| runtime.store.name());
    if store != told.store {
        spool.foreign().clear();
        told.store = Arc::clone(&store);
    }
    let surveyed = Arc::clone(spool);
    let names = match blocking(move || surveyed.survey()).await {
        Ok(names) => names,
        Err(error) => {
            tracing::error!(dir = %spool.dir.display(), %error, "the spool cannot be looked through");
            return Scanned::Through;
        }
    };
    told.files.retain(|name| names.contains(name));
    let mut scanned = Scanned::Through;
    for name in names {
        if runtime.stopped.is_cancelled() {
            return Scanned::Through;
        }
        if spool.ours().contains(&name) {
            continue;
        }
        let (path, expected) = (spool.dir.join(&name), Arc::clone(&store));
        let (whose, verdict, bytes) = match blocking(move || read_file(&path, &expected)).await {
            Ok(Ok(Found::Ours { whose, verdict, bytes })) => (whose, verdict, bytes),
            Ok(Ok(Found::Foreign { store: theirs })) => {
                let dir = spool.dir.display();
                tracing::warn!(file = name, %dir, theirs, ours = %store, "a file of the spool is of another store, and stays");
                spool.foreign().insert(name);
                spool.count_out();
                continue;
            }
            Ok(Err(what)) => {
                let dir = spool.dir.display();
                tracing::error!(file = name, %dir, what, "a file of the spool cannot be read; put aside as ….bad");
                spool.put_aside(&name, BAD).await;
                continue;
            }
            // Another gateway took it out.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                if told.files.insert(name.clone()) {
                    tracing::error!(file = name, %error, "a file of the spool cannot be read now and stays");
                }
                continue;
            }
        };
        match try_store(runtime, &whose, &verdict).await {
            Ok(Finished::NotFound) => {
                tracing::error!(
                    file = name, job = %whose.job, attempt = whose.number, outcome = verdict.outcome.as_str(),
                    "a verdict without a job is kept for a person, as ….orphan"
                );
                spool.put_aside(&name, ORPHAN).await;
            }
            Ok(finished) => {
                tracing::info!(job = %whose.job, attempt = whose.number, outcome = verdict.outcome.as_str(), "stored from the spool");
                count_finish(&finished, verdict.outcome, About { job: whose.job, attempt: whose.number, provider: None });
                failpoint!("spool.stored");
                spool.stored(&name, bytes).await;
                failpoint!("spool.removed");
                let identity = whose.job.identity();
                runtime.waiters.wake(identity);
                // Its hints are put right, and it goes on if it can.
                sweeper::look_soon(Arc::clone(runtime), identity).await;
            }
            Err(error) if is_away(&error) => return Scanned::StoreAway,
            Err(error) if error.is_retryable() || error.is_for_permission() => scanned = Scanned::SomeRefused,
            Err(error) => {
                if told.files.insert(name.clone()) {
                    tracing::error!(file = name, job = %whose.job, %error, "a result of the spool cannot be stored and stays");
                }
            }
        }
    }
    scanned
}

/// The token itself stands in no name: names are logged.
fn name_of(whose: &Whose) -> String {
    let token = hex(&sha256(whose.token.as_bytes())[..4]);
    format!("{}-{}-{token}{VERDICT}", whose.job, whose.number)
}

fn encode(store: &str, whose: &Whose, verdict: &Verdict) -> Vec<u8> {
    let sheet = Sheet {
        store: Cow::Borrowed(store),
        job: Cow::Borrowed(whose.job.as_bytes()),
        number: whose.number,
        token: Cow::Borrowed(whose.token.as_bytes()),
        outcome: verdict.outcome,
        reason: Cow::Borrowed(&verdict.reason),
        remote_id: Cow::Borrowed(&verdict.remote_id),
        model: Cow::Borrowed(&verdict.model),
        retry_delay_ms: match verdict.follow {
            Follow::End => None,
            Follow::Retry { delay_ms, hold_ms: _ } => Some(delay_ms),
        },
        bytes_life_ms: millis(whose.bytes_life),
        result: verdict.response.as_ref().map(|response| Answer {
            status: response.status,
            headers: Cow::Borrowed(&response.headers),
            body: Cow::Borrowed(&response.body),
        }),
    };
    let packed = rmp_serde::to_vec_named(&sheet).expect("plain data can be packed");
    [MAGIC, &sha256(&packed), &packed].concat()
}

/// What a file holds.
enum Found {
    /// A verdict for this store.
    Ours { whose: Whose, verdict: Box<Verdict>, bytes: u64 },
    /// One for another store.
    Foreign { store: String },
}

/// What a file holds, or what is wrong with it.
fn decode(bytes: &[u8], store: &str) -> Result<Found, &'static str> {
    let rest = bytes.strip_prefix(MAGIC).ok_or("it is no verdict, or one of another version")?;
    let (checksum, packed) = rest.split_at_checked(CHECKSUM_BYTES).ok_or("it is cut short")?;
    if sha256(packed) != *checksum {
        return Err("its bytes are not those that were written");
    }
    let sheet: Sheet<'_> = rmp_serde::from_slice(packed).map_err(|_| "its fields are not those of a verdict")?;
    if sheet.store != store {
        return Ok(Found::Foreign { store: sheet.store.into_owned() });
    }
    let sixteen = |bytes: &[u8]| <[u8; 16]>::try_from(bytes).map_err(|_| "an id in it is not 16 bytes");
    let whose = Whose {
        job: JobId::from_bytes(sixteen(&sheet.job)?).map_err(|_| "its job id is none")?,
        number: sheet.number,
        token: AttemptToken::from_bytes(sixteen(&sheet.token)?),
        // Whoever wrote the hint is gone; a look at the job puts it right.
        hint_ms: None,
        strip_after_ms: 0,
        // So are its blobs.
        input: Body::default(),
        bytes_life: Duration::from_millis(sheet.bytes_life_ms),
    };
    let response = sheet.result.map(|answer| Response {
        status: answer.status,
        headers: answer.headers.into_owned(),
        body: Arc::from(&answer.body[..]),
    });
    let verdict = Verdict {
        response,
        remote_id: sheet.remote_id.into_owned(),
        model: sheet.model.into_owned(),
        // Nobody holds the job for this attempt any more.
        follow: sheet.retry_delay_ms.map_or(Follow::End, |delay_ms| Follow::Retry { delay_ms, hold_ms: 0 }),
        ..Verdict::plain(sheet.outcome, sheet.reason.into_owned())
    };
    Ok(Found::Ours { whose, verdict: Box::new(verdict), bytes: bytes.len() as u64 })
}

/// Reads what this program has written, and nothing that waits for somebody or leads elsewhere.
fn read_file(path: &Path, store: &str) -> io::Result<Result<Found, &'static str>> {
    const NO_FILE: &str = "it is no regular file";
    if !fs::symlink_metadata(path)?.is_file() {
        return Ok(Err(NO_FILE));
    }
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if !file.metadata()?.is_file() {
        return Ok(Err(NO_FILE));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(if bytes.len() as u64 > FILE_BYTES_MAX { Err("it is larger than any verdict") } else { decode(&bytes, store) })
}

/// Makes a directory that is its owner's alone.
fn make(dir: &Path) -> io::Result<()> {
    if let Some(parent) = dir.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    }
    DirBuilder::new().mode(0o700).create(dir)?;
    // Whatever the umask is.
    fs::set_permissions(dir, Permissions::from_mode(0o700))
}

/// Writes a file so that it is there whole, or not at all, whatever happens to the process or the machine.
fn write_down(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let path = dir.join(name);
    let temporary = path.with_extension("verdict.tmp");
    let written = write_file(&temporary, bytes).and_then(|()| {
        failpoint!("spool.temporary");
        fs::rename(&temporary, &path)
    });
    if let Err(error) = written {
        // It may not even be there.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    failpoint!("spool.renamed");
    File::open(dir)?.sync_all()
}

fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Runs what waits for a disk where it keeps nobody else waiting.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
