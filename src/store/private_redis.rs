//! A `redis-server` of our own, for one machine: started in a data directory, watched, and stopped with everything on disk.
//!
//! Reached by a Unix socket alone, appending to a file that is synced every second, never evicting. One process at a time may use
//! a data directory, which a lock on `lock` ensures. The lock is the server's standard input too, so it is held as long as
//! *either* of the two lives: a server that outlived its gateway (`kill -9`) is found by it, shut down, and a new one started on
//! the same data.
//!
//! Deliberately not here: replication, passwords, TCP. Whoever needs more than one machine runs a Redis and sets `redis.url`.
//! Dying with the gateway at once (`PR_SET_PDEATHSIG`) needs unsafe code and misfires when a thread ends; the lock does without.

use std::fmt::Write as _;
use std::fs::{File, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The oldest Redis whose scripts may say what they do in their first line.
pub const REDIS_VERSION_MIN: (u32, u32) = (7, 0);
/// The program that is looked for in `PATH`.
const PROGRAM: &str = "redis-server";
/// Longest path of a Unix socket in bytes: `sun_path` has 108, with the NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Where a socket goes whose own directory has too long a path.
const SHORT_DIR: &str = "/tmp";
/// What the names of those directories begin with.
const SHORT_DIR_PREFIX: &str = "onejob-";
/// How long a server may take to say its version.
const VERSION_DEADLINE: Duration = Duration::from_secs(5);
/// How long a started server may say nothing.
const READY_DEADLINE: Duration = Duration::from_secs(10);
/// How long a started server may be busy reading its data: a data directory of some 10 GiB.
const LOADING_DEADLINE: Duration = Duration::from_secs(300);
/// How long one answer to a PING may take.
const PING_DEADLINE: Duration = Duration::from_secs(1);
/// How long a server may take to write everything and end before it is killed.
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// How often a condition is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How long to wait before a server that died is started again: doubles from the first to the second.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// How long a server must have lived for its death to be the first of a new series.
const LIVED_LONG: Duration = Duration::from_secs(60);
/// How much of the log an error shows.
const LOG_TAIL_LINES: usize = 12;
const LOG_TAIL_BYTES: u64 = 8 << 10;
/// The size at which the log is put aside at a start: two of them are kept.
const LOG_BYTES_MAX: u64 = 4 << 20;

/// Where and which.
#[derive(Clone, Debug)]
pub struct PrivateRedisOptions {
    /// Where it keeps its data, its log and its socket. Made if it is not there; only its owner may enter it.
    pub data_dir: PathBuf,
    /// The program. None: `redis-server`, found in `PATH`.
    pub server: Option<PathBuf>,
    /// When its file is on disk.
    pub syncs: Syncs,
}

/// When the append-only file of a private Redis is on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Syncs {
    /// Every second: what is lost in a crash of the machine is a second old at most.
    #[default]
    EverySecond,
    /// Before it answers.
    Always,
}

impl Syncs {
    fn setting(self) -> &'static str {
        match self {
            Syncs::EverySecond => "appendfsync everysec",
            Syncs::Always => "appendfsync always",
        }
    }
}

/// Why there is no private Redis.
#[derive(Debug, thiserror::Error)]
pub enum PrivateRedisError {
    /// There is no such program.
    #[error("there is no {}: install it (apt-get install redis-server), set redis.server, or set redis.url", program.display())]
    NotInstalled {
        /// What was looked for.
        program: PathBuf,
    },
    /// It is too old.
    #[error("{} is version {version}; {}.{} or newer is needed", program.display(), REDIS_VERSION_MIN.0, REDIS_VERSION_MIN.1)]
    TooOld {
        /// Which program.
        program: PathBuf,
        /// What it says.
        version: String,
    },
    /// It does not say its version, so it is no Redis.
    #[error("{} does not say its version as a redis-server does: {said:?}", program.display())]
    NoVersion {
        /// Which program.
        program: PathBuf,
        /// What it says instead.
        said: String,
    },
    /// The data directory cannot be used.
    #[error("cannot use the data directory {}: {doing}: {source}", data_dir.display())]
    DataDir {
        /// Which.
        data_dir: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// Another gateway uses the data directory.
    #[error("the data directory {} is in use by process {pid}: set redis.url for all who share one redis, or stop it; another \
             redis.data_dir is another memory", data_dir.display())]
    InUse {
        /// Which.
        data_dir: PathBuf,
        /// The other process, as it wrote itself down; 0 if it did not.
        pid: u32,
    },
    /// The program cannot be run.
    #[error("cannot run {}: {source}", program.display())]
    Run {
        /// Which program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It ended before it was ready.
    #[error("redis-server ended at its start, {status}; its log {} ends with:{log_tail}", log.display())]
    Ended {
        /// How.
        status: ExitStatus,
        /// Where its log is.
        log: PathBuf,
        /// The log's last lines, each after a line break.
        log_tail: String,
    },
    /// It was not ready in time.
    #[error("redis-server was not ready after {} s; its log {} ends with:{log_tail}", waited.as_secs(), log.display())]
    NotReady {
        /// How long it was waited for.
        waited: Duration,
        /// Where its log is.
        log: PathBuf,
        /// The log's last lines, each after a line break.
        log_tail: String,
    },
}

/// A running `redis-server` with its data directory.
///
/// A server that dies is started again on the same data, at the same address. Dropped without [`PrivateRedis::stop`] it is
/// killed; then too nothing is lost that it had answered, unless the machine goes down within the second that the disk is behind.
#[derive(Debug)]
pub struct PrivateRedis {
    url: String,
    pid: watch::Receiver<Option<u32>>,
    stopping: CancellationToken,
    supervisor: Option<JoinHandle<()>>,
}

impl PrivateRedis {
    /// Starts a server on a data directory and waits until it answers.
    ///
    /// # Errors
    /// Each says what to do. Nothing is left running.
    ///
    /// # Cancel safety
    /// Dropped, it kills what it has started.
    pub async fn start(options: PrivateRedisOptions) -> Result<Self, PrivateRedisError> {
        let program = options.server.clone().unwrap_or_else(|| PathBuf::from(PROGRAM));
        check_version(&program).await?;
        let home = Home::open(&options.data_dir, options.syncs).await?;
        let server = Server { program, home };
        let child = server.run().await?;
        let (pid_sender, pid) = watch::channel(child.id());
        let url = url_of(&server.home.socket);
        let stopping = CancellationToken::new();
        let supervisor = tokio::spawn(supervise(server, child, pid_sender, stopping.clone()));
        Ok(PrivateRedis { url, pid, stopping, supervisor: Some(supervisor) })
    }

    /// Its address, `redis+unix:///…`: the same as long as this lives.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The server's process, none while it is being started again.
    pub fn pid(&self) -> Option<u32> {
        *self.pid.borrow()
    }

    /// Stops the server and waits until everything is on disk and the data directory is free.
    pub async fn stop(mut self) {
        self.stopping.cancel();
        let supervisor = self.supervisor.take().expect("only stop takes it");
        if let Err(error) = supervisor.await {
            tracing::error!(%error, "the supervisor of the private redis-server ended badly");
        }
    }
}

impl Drop for PrivateRedis {
    fn drop(&mut self) {
        if let Some(supervisor) = self.supervisor.take() {
            // Its child goes with it.
            supervisor.abort();
        }
    }
}

async fn check_version(program: &Path) -> Result<(), PrivateRedisError> {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(VERSION_DEADLINE, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
            return Err(PrivateRedisError::NotInstalled { program: program.to_owned() });
        }
        Ok(Err(source)) => return Err(PrivateRedisError::Run { program: program.to_owned(), source }),
        Err(_) => return Err(PrivateRedisError::Run { program: program.to_owned(), source: io::ErrorKind::TimedOut.into() }),
    };
    let said = String::from_utf8_lossy(&output.stdout).trim().chars().take(200).collect::<String>();
    let version = said.split_whitespace().find_map(|word| word.strip_prefix("v="));
    let numbers = version.and_then(|version| {
        let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
        Some((parts.next()??, parts.next()??))
    });
    match (version, numbers) {
        (Some(_), Some(numbers)) if numbers >= REDIS_VERSION_MIN => Ok(()),
        (Some(version), Some(_)) => Err(PrivateRedisError::TooOld { program: program.to_owned(), version: version.to_owned() }),
        _ => Err(PrivateRedisError::NoVersion { program: program.to_owned(), said }),
    }
}

/// A data directory that is ours.
#[derive(Debug)]
struct Home {
    data_dir: PathBuf,
    lock: File,
    socket: PathBuf,
}

impl Home {
    async fn open(wanted: &Path, syncs: Syncs) -> Result<Self, PrivateRedisError> {
        let failed = |doing| move |source| PrivateRedisError::DataDir { data_dir: wanted.to_owned(), doing, source };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(wanted).map_err(failed("making it"))?;
        std::fs::set_permissions(wanted, std::fs::Permissions::from_mode(0o700)).map_err(failed("closing it to others"))?;
        let data_dir = wanted.canonicalize().map_err(failed("finding it"))?;
        let mut lock = private_file(&lock_path(&data_dir)).map_err(failed("opening the lock"))?;
        take(&mut lock, &data_dir).await?;
        let socket = socket_path(&data_dir).map_err(failed("making room for the socket"))?;
        put_log_aside(&data_dir.join("redis.log")).map_err(failed("putting the log aside"))?;
        let home = Home { data_dir, lock, socket };
        let mut conf = private_file(&home.conf()).map_err(failed("writing redis.conf"))?;
        conf.set_len(0).and_then(|()| conf.write_all(&home.settings(syncs))).map_err(failed("writing redis.conf"))?;
        Ok(home)
    }

    fn conf(&self) -> PathBuf {
        conf_path(&self.data_dir)
    }

    fn log(&self) -> PathBuf {
        self.data_dir.join("redis.log")
    }

    fn settings(&self, syncs: Syncs) -> Vec<u8> {
        let mut settings = b"# Written by onejob at every start: changes are lost.\n".to_vec();
        for (name, path) in [("dir", &self.data_dir), ("unixsocket", &self.socket), ("logfile", &self.log())] {
            settings.extend_from_slice(name.as_bytes());
            settings.extend_from_slice(b" \"");
            for byte in path.as_os_str().as_bytes() {
                settings.extend_from_slice(format!("\\x{byte:02x}").as_bytes());
            }
            settings.extend_from_slice(b"\"\n");
        }
        for line in [
            "unixsocketperm 700",
            "port 0",
            "daemonize no",
            "supervised no",
            // The command line stays as it is: it is how an orphan is recognized.
            "set-proc-title no",
            "appendonly yes",
            syncs.setting(),
            "save \"\"",
            "maxmemory-policy noeviction",
        ] {
            settings.extend_from_slice(line.as_bytes());
            settings.push(b'\n');
        }
        settings
    }

    fn log_tail(&self) -> String {
        let read = || {
            let mut file = File::open(self.log())?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
            let mut bytes = Vec::new();
            file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
            Ok::<_, io::Error>(String::from_utf8_lossy(&bytes).into_owned())
        };
        let text = read().unwrap_or_else(|error| format!("(it cannot be read: {error})"));
        let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].iter().fold(String::new(), |mut tail, line| {
            write!(tail, "\n  {line}").expect("a string takes every write");
            tail
        })
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if self.socket.parent() != Some(self.data_dir.as_path()) {
            remove_short_dir(&self.socket);
        }
    }
}

fn conf_path(data_dir: &Path) -> PathBuf {
    data_dir.join("redis.conf")
}

fn lock_path(data_dir: &Path) -> PathBuf {
    data_dir.join("lock")
}

fn private_file(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Takes the lock. A server whose gateway is gone is shut down for it; a gateway that lives is left alone.
async fn take(lock: &mut File, data_dir: &Path) -> Result<(), PrivateRedisError> {
    let failed = |doing| move |source| PrivateRedisError::DataDir { data_dir: data_dir.to_owned(), doing, source };
    let begun = Instant::now();
    let mut asked_to_end = None;
    loop {
        match lock.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(source)) => return Err(failed("locking it")(source)),
        }
        let gateway = written_pid(lock);
        let server = find_server(data_dir);
        let held_by_a_gateway = match &server {
            Some(server) => server.parent == gateway,
            None => is_alive(gateway),
        };
        if held_by_a_gateway || begun.elapsed() > STOP_DEADLINE * 2 {
            return Err(PrivateRedisError::InUse { data_dir: data_dir.to_owned(), pid: gateway });
        }
        if let Some(orphan) = server {
            let signal = if begun.elapsed() > STOP_DEADLINE { Signal::KILL } else { Signal::TERM };
            if asked_to_end != Some((orphan.pid, signal)) {
                tracing::warn!(
                    pid = orphan.pid.as_raw_nonzero().get(),
                    "a redis-server outlived its gateway: it is shut down first"
                );
                // Gone in between is as good.
                let _ = kill_process(orphan.pid, signal);
                asked_to_end = Some((orphan.pid, signal));
            }
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    let pid = format!("{}\n", std::process::id());
    lock.set_len(0)
        .and_then(|()| lock.seek(SeekFrom::Start(0)))
        .and_then(|_| lock.write_all(pid.as_bytes()))
        .map_err(failed("writing the lock"))
}

/// The process that wrote itself into the lock, 0 for none.
fn written_pid(lock: &mut File) -> u32 {
    let mut text = String::new();
    let read = lock.seek(SeekFrom::Start(0)).and_then(|_| lock.take(16).read_to_string(&mut text));
    read.ok().and_then(|_| text.trim().parse().ok()).unwrap_or(0)
}

fn is_alive(pid: u32) -> bool {
    pid != 0 && Path::new(&format!("/proc/{pid}")).exists()
}

struct Found {
    pid: Pid,
    parent: u32,
}

/// The server of a data directory, whatever its program is called: it works there, was given the settings from there, and has the
/// lock as its standard input. An editor of the settings has not.
fn find_server(data_dir: &Path) -> Option<Found> {
    let (conf, lock) = (conf_path(data_dir), lock_path(data_dir));
    let processes = std::fs::read_dir("/proc").ok()?.filter_map(Result::ok);
    processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).find_map(|pid| {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let command = std::fs::read(process.join("cmdline")).ok()?;
        let mut arguments = command.split(|byte| *byte == 0);
        let is_ours = arguments.nth(1)? == conf.as_os_str().as_bytes()
            && std::fs::read_link(process.join("cwd")).ok()? == data_dir
            && std::fs::read_link(process.join("fd/0")).ok()? == lock;
        let status = std::fs::read_to_string(process.join("status")).ok()?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
        is_ours.then_some(Found { pid: Pid::from_raw(pid.try_into().ok()?)?, parent })
    })
}

/// Where the socket goes: into the data directory, or, where that has too long a path, into a fresh private one that has not.
fn socket_path(data_dir: &Path) -> io::Result<PathBuf> {
    let note = data_dir.join("redis.socket");
    if let Ok(left_over) = std::fs::read_to_string(&note) {
        remove_short_dir(Path::new(left_over.trim_end()));
        std::fs::remove_file(&note)?;
    }
    let socket = data_dir.join("redis.sock");
    let length = socket.as_os_str().len();
    if length <= SOCKET_PATH_BYTES_MAX {
        return Ok(socket);
    }
    let short = Path::new(SHORT_DIR).join(format!("{SHORT_DIR_PREFIX}{}", uuid::Uuid::new_v4().simple()));
    let short_socket = short.join("redis.sock");
    writeln!(private_file(&note)?, "{}", short_socket.display())?;
    std::fs::DirBuilder::new().mode(0o700).create(&short)?;
    tracing::info!(
        socket = %short_socket.display(),
        "the data directory's path makes a socket of {length} bytes; the limit is {SOCKET_PATH_BYTES_MAX}, so it is elsewhere"
    );
    Ok(short_socket)
}

/// Removes a directory that [`socket_path`] made, with the socket in it and nothing else.
fn remove_short_dir(socket: &Path) {
    let Some(dir) = socket.parent() else { return };
    let name = dir.file_name().map(|name| name.as_bytes()).unwrap_or_default();
    if dir.parent() == Some(Path::new(SHORT_DIR)) && name.starts_with(SHORT_DIR_PREFIX.as_bytes()) {
        // It may be gone already; if not, it is empty but for the socket.
        let _ = std::fs::remove_file(socket);
        let _ = std::fs::remove_dir(dir);
    }
}

fn put_log_aside(log: &Path) -> io::Result<()> {
    match std::fs::metadata(log) {
        Ok(metadata) if metadata.len() > LOG_BYTES_MAX => std::fs::rename(log, log.with_extension("log.old")),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// The address as a URL: every byte that has a meaning there is escaped.
fn url_of(socket: &Path) -> String {
    let mut url = "redis+unix://".to_owned();
    for byte in socket.as_os_str().as_bytes() {
        match byte {
            b'/' | b'-' | b'_' | b'.' | b'~' => url.push(char::from(*byte)),
            byte if byte.is_ascii_alphanumeric() => url.push(char::from(*byte)),
            byte => write!(url, "%{byte:02X}").expect("a string takes every write"),
        }
    }
    url
}

/// What it takes to run a server once more.
#[derive(Debug)]
struct Server {
    program: PathBuf,
    home: Home,
}

impl Server {
    /// Starts a process and waits until it answers.
    async fn run(&self) -> Result<Child, PrivateRedisError> {
        let mut child = self.spawn().map_err(|source| PrivateRedisError::Run { program: self.program.clone(), source })?;
        let begun = Instant::now();
        loop {
            let (log, log_tail) = (self.home.log(), || self.home.log_tail());
            if let Ok(Some(status)) = child.try_wait() {
                return Err(PrivateRedisError::Ended { status, log, log_tail: log_tail() });
            }
            let deadline = match ping(&self.home.socket).await {
                Ping::Ready => return Ok(child),
                Ping::Loading => LOADING_DEADLINE,
                Ping::Silent => READY_DEADLINE,
            };
            if begun.elapsed() > deadline {
                stop(&mut child).await;
                return Err(PrivateRedisError::NotReady { waited: begun.elapsed(), log, log_tail: log_tail() });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    fn spawn(&self) -> io::Result<Child> {
        Command::new(&self.program)
            .arg(self.home.conf())
            .current_dir(&self.home.data_dir)
            // The lock, so that it is held as long as the server lives.
            .stdin(Stdio::from(self.home.lock.try_clone()?))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C is for the gateway, which still needs Redis to stop well.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
    }
}

enum Ping {
    Ready,
    Loading,
    Silent,
}

async fn ping(socket: &Path) -> Ping {
    let exchange = async {
        let mut stream = UnixStream::connect(socket).await?;
        stream.write_all(b"*1\r\n$4\r\nPING\r\n").await?;
        let mut reply = [0; 8];
        stream.read_exact(&mut reply[..7]).await?;
        Ok::<_, io::Error>(reply)
    };
    match tokio::time::timeout(PING_DEADLINE, exchange).await {
        Ok(Ok(reply)) if reply.starts_with(b"+PONG\r\n") => Ping::Ready,
        Ok(Ok(reply)) if reply.starts_with(b"-LOADIN") => Ping::Loading,
        Ok(Ok(_)) | Ok(Err(_)) | Err(_) => Ping::Silent,
    }
}

/// Asks a server to write everything and end; kills it if it does not.
async fn stop(child: &mut Child) {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
    if let Some(pid) = pid
        && let Err(error) = kill_process(pid, Signal::TERM)
    {
        tracing::warn!(%error, "cannot ask the private redis-server to end");
    }
    match tokio::time::timeout(STOP_DEADLINE, child.wait()).await {
        Ok(Ok(status)) => tracing::debug!(%status, "the private redis-server has ended"),
        Ok(Err(error)) => tracing::warn!(%error, "cannot see whether the private redis-server has ended"),
        Err(_) => {
            tracing::warn!("the private redis-server did not end within {} s and is killed", STOP_DEADLINE.as_secs());
            if let Err(error) = child.kill().await {
                tracing::error!(%error, "cannot kill the private redis-server");
            }
        }
    }
}

async fn wait_until_gone(data_dir: &Path) {
    let begun = Instant::now();
    while find_server(data_dir).is_some() && begun.elapsed() < STOP_DEADLINE {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Starts the server again whenever it dies, until it is told to stop.
async fn supervise(server: Server, mut child: Child, pid: watch::Sender<Option<u32>>, stopping: CancellationToken) {
    let mut backoff = BACKOFF_MIN;
    let mut born = Instant::now();
    loop {
        tokio::select! {
            () = stopping.cancelled() => return stop(&mut child).await,
            status = child.wait() => {
                let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                tracing::error!(status, log = %server.home.log().display(), "the private redis-server died and is started again");
            }
        }
        pid.send_replace(None);
        if born.elapsed() > LIVED_LONG {
            backoff = BACKOFF_MIN;
        }
        child = loop {
            let again = async {
                tokio::time::sleep(backoff).await;
                server.run().await
            };
            let run = tokio::select! {
                () = stopping.cancelled() => None,
                run = again => Some(run),
            };
            // Stopped while starting: what was being started is killed, and wrote nothing of ours.
            let Some(run) = run else { return wait_until_gone(&server.home.data_dir).await };
            backoff = (backoff * 2).min(BACKOFF_MAX);
            match run {
                Ok(child) => break child,
                Err(error) => tracing::error!(%error, "the private redis-server cannot be started again yet"),
            }
        };
        born = Instant::now();
        pid.send_replace(child.id());
    }
}
