//! A private `redis-server`, one a test: started on a socket of its own, killed on drop.
//!
//! With [`AS_CLUSTER`] in the environment it is a cluster of one node, which has every slot, and its URL says so: the same tests
//! go another way. With [`PROGRAM`] it is another program that speaks as `redis-server` does.
//!
//! Stands on the standard library alone, because the library's own unit tests use this file too.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The variable that makes a cluster of each server. Not one of the program's own, which refuses what it does not know.
const AS_CLUSTER: &str = "TEST_REDIS_CLUSTER";
/// The variable that names another server program, such as Valkey's.
const PROGRAM: &str = "TEST_REDIS_SERVER";
/// How often a server is tried on other ports, if somebody else was faster.
const PORTS_TRIES: usize = 5;

/// How long a server may take to answer its first PING.
const START_DEADLINE: Duration = Duration::from_secs(20);
/// Between two looks at a server that starts.
const START_PAUSE: Duration = Duration::from_millis(5);

/// The program of every server that the tests start themselves.
pub(crate) fn program() -> PathBuf {
    #[expect(clippy::disallowed_methods, reason = "a setting of the tests, not of the program")]
    let named = std::env::var_os(PROGRAM).filter(|text| !text.is_empty());
    named.map_or_else(|| PathBuf::from("redis-server"), PathBuf::from)
}

/// A running server.
pub(crate) struct Server {
    child: Child,
    url: String,
    socket: String,
    _directory: TempDir,
}

impl Server {
    /// Starts a server that keeps nothing on disk and evicts nothing; later arguments win.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        if !as_cluster() {
            return Self::start_alone(arguments);
        }
        let mut told = String::new();
        for _ in 0..PORTS_TRIES {
            let (port, bus) = free_ports();
            let node = ["--cluster-enabled", "yes", "--bind", "127.0.0.1", "--port", &port, "--cluster-port", &bus];
            match Self::start_on(&node, arguments) {
                Ok(mut server) => {
                    let socket = PathBuf::from(server.socket.trim_start_matches("redis+unix://"));
                    assert_eq!(ask(&socket, "CLUSTER ADDSLOTSRANGE 0 16383"), "+OK");
                    let began = Instant::now();
                    while !ask(&socket, "SET {test} x").starts_with("+OK") {
                        assert!(began.elapsed() < START_DEADLINE, "the cluster does not take its slots");
                        #[expect(clippy::disallowed_methods, reason = "waits for a process to start, outside of any runtime")]
                        std::thread::sleep(START_PAUSE);
                    }
                    ask(&socket, "DEL {test}");
                    server.url = format!("redis+cluster://127.0.0.1:{port}");
                    return server;
                }
                Err(why) => told = why,
            }
        }
        panic!("{told}");
    }

    /// Starts a server that is no cluster whatever the environment says.
    pub(crate) fn start_alone(arguments: &[&str]) -> Self {
        Self::start_on(&["--port", "0"], arguments).unwrap_or_else(|told| panic!("{told}"))
    }

    fn start_on(place: &[&str], arguments: &[&str]) -> Result<Self, String> {
        let directory = tempfile::tempdir().expect("a directory for the socket");
        let socket = directory.path().join("redis.sock");
        let log = directory.path().join("redis.log");
        let child = Command::new(program())
            .args(place)
            .args(["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"])
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(directory.path())
            .arg("--logfile")
            .arg(&log)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| {
                panic!(
                    "cannot run {} ({error}); install it, for example with `apt-get install redis-server`, 7.0 or newer",
                    program().display()
                )
            });
        let url = format!("redis+unix://{}", socket.display());
        let mut server = Server { child, socket: url.clone(), url, _directory: directory };
        let began = Instant::now();
        while !answers(&socket) {
            let ended = server.child.try_wait().expect("the state of a child");
            if ended.is_some() || began.elapsed() > START_DEADLINE {
                return Err(format!("redis-server does not answer: {}", std::fs::read_to_string(&log).unwrap_or_default()));
            }
            #[expect(clippy::disallowed_methods, reason = "waits for a process to start, outside of any runtime")]
            std::thread::sleep(START_PAUSE);
        }
        Ok(server)
    }

    /// Its URL, as `StoreOptions` takes it.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Its URL for another user.
    pub(crate) fn url_of(&self, user: &str, password: &str) -> String {
        match self.url.split_once("redis+cluster://") {
            Some((_, address)) => format!("redis+cluster://{user}:{password}@{address}"),
            None => format!("{}?user={user}&pass={password}", self.url),
        }
    }

    /// The URL of its socket, for commands of the test's own.
    pub(crate) fn socket(&self) -> &str {
        &self.socket
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have died already; there is nothing to save.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether this run is one in which each Redis is a cluster.
pub(crate) fn as_cluster() -> bool {
    #[expect(clippy::disallowed_methods, reason = "a setting of the tests, not of the program")]
    let text = std::env::var_os(AS_CLUSTER);
    text.is_some_and(|text| !text.is_empty())
}

fn answers(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else { return false };
    let mut reply = [0; 5];
    stream.write_all(b"PING\r\n").is_ok() && stream.read_exact(&mut reply).is_ok() && &reply == b"+PONG"
}

/// The first line of the answer to a command without blanks in its words.
fn ask(socket: &Path, command: &str) -> String {
    let mut stream = UnixStream::connect(socket).expect("a connection");
    stream.write_all(format!("{command}\r\n").as_bytes()).expect("a command is written");
    let (mut line, mut byte) = (Vec::new(), [0]);
    while !line.ends_with(b"\r\n") && stream.read_exact(&mut byte).is_ok() {
        line.extend(byte);
    }
    String::from_utf8_lossy(&line).trim_end().to_owned()
}

/// Two ports that nobody has at the moment.
pub(crate) fn free_ports() -> (String, String) {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    let [port, bus] = listeners.map(|listener| listener.local_addr().expect("its port").port().to_string());
    (port, bus)
}
