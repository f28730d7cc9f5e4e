//! A private `redis-server`, one a test: started on a socket of its own, killed on drop.
//!
//! Stands on the standard library alone, because the library's own unit tests use this file too.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long a server may take to answer its first PING.
const START_DEADLINE: Duration = Duration::from_secs(20);
/// Between two looks at a server that starts.
const START_PAUSE: Duration = Duration::from_millis(5);

/// A running server.
pub(crate) struct Server {
    child: Child,
    url: String,
    _directory: TempDir,
}

impl Server {
    /// Starts a server that keeps nothing on disk and evicts nothing; later arguments win.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory for the socket");
        let socket = directory.path().join("redis.sock");
        let log = directory.path().join("redis.log");
        let child = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"])
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
                    "cannot run redis-server ({error}); install it, for example with `apt-get install redis-server`, 7.0 or newer"
                )
            });
        let mut server = Server { child, url: format!("redis+unix://{}", socket.display()), _directory: directory };
        let began = Instant::now();
        while !answers(&socket) {
            let ended = server.child.try_wait().expect("the state of a child");
            if ended.is_some() || began.elapsed() > START_DEADLINE {
                panic!("redis-server does not answer: {}", std::fs::read_to_string(&log).unwrap_or_default());
            }
            #[expect(clippy::disallowed_methods, reason = "waits for a process to start, outside of any runtime")]
            std::thread::sleep(START_PAUSE);
        }
        server
    }

    /// Its URL, as `StoreOptions` takes it.
    pub(crate) fn url(&self) -> &str {
        &self.url
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

fn answers(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else { return false };
    let mut reply = [0; 5];
    stream.write_all(b"PING\r\n").is_ok() && stream.read_exact(&mut reply).is_ok() && &reply == b"+PONG"
}
