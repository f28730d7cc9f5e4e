//! Gateways as processes of their own: to be killed, stopped and started again, while Redis and the provider live on.

use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use onejob::provider::simulated::{Simulated, WEBHOOK_SECRET};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use super::{Redis, simulated};
use crate::http_support::raw;

/// Longer than a start or an end takes, also on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Each gateway has the secret of the simulated provider's webhooks in this variable.
pub const WEBHOOK_VARIABLE: &str = "TEST_WEBHOOK_SECRET";

/// What outlives the gateways: a Redis, a provider, and a directory for spool and logs.
pub struct Site {
    pub redis: Redis,
    pub printer: Simulated,
    dir: TempDir,
    started: AtomicU32,
}

/// A gateway process. Killed on drop.
pub struct Gateway {
    child: Child,
    url: String,
    log: PathBuf,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Code(i32),
    Signal(i32),
}

/// An answer over HTTP.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Value,
}

impl Site {
    pub async fn open() -> Self {
        Self::open_before(simulated().await).await
    }

    pub async fn open_before(printer: Simulated) -> Self {
        Site { redis: Redis::start().await, printer, dir: tempfile::tempdir().expect("a directory"), started: AtomicU32::new(0) }
    }

    /// Where the gateways spool.
    pub fn spool(&self) -> PathBuf {
        self.dir.path().join("data/spool")
    }

    /// How many files of the spool end so.
    pub fn spooled(&self, ending: &str) -> usize {
        let Ok(entries) = std::fs::read_dir(self.spool()) else { return 0 };
        entries.filter(|entry| entry.as_ref().expect("an entry").file_name().to_string_lossy().ends_with(ending)).count()
    }

    /// Starts a gateway with leases of two seconds and one route, `print`; later settings win.
    pub async fn start(&self, settings: &[(&str, &str)], failpoint: Option<&str>) -> Gateway {
        self.start_with(settings, failpoint, &[]).await
    }

    /// The same, with these variables.
    pub async fn start_with(&self, settings: &[(&str, &str)], failpoint: Option<&str>, variables: &[(&str, &str)]) -> Gateway {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let (config, log) = (self.dir.path().join(format!("{number}.toml")), self.dir.path().join(format!("{number}.log")));
        let toml = format!(
            r#"
            [server]
            listen = "127.0.0.1:0"
            [redis]
            url = "{}"
            data_dir = "{}"
            response_timeout = "600ms"
            [runtime]
            lease = "2s"
            lease_margin = "500ms"
            sweep = "100ms"
            drain = "20s"
            [provider.printer]
            base_url = "{}"
            timeouts = {{ total = "60s" }}
            [route.print]
            providers = ["printer"]
            backoff = "20ms"
            "#,
            self.redis.url(),
            self.dir.path().join("data").display(),
            self.printer.base_url(),
        );
        std::fs::write(&config, toml).expect("a configuration");
        let mut command = Command::new(env!("CARGO_BIN_EXE_onejob"));
        for name in ["ONEJOB_GATEWAY", "ONEJOB_LOG", "ONEJOB_TOKEN", "ONEJOB_FAILPOINT", "ONEJOB_DURABILITY_INTENTS"] {
            command.env_remove(name);
        }
        command.env(WEBHOOK_VARIABLE, WEBHOOK_SECRET).envs(variables.iter().copied());
        if let Some(failpoint) = failpoint {
            command.env("ONEJOB_FAILPOINT", failpoint);
        }
        command.arg("--config").arg(&config);
        for (key, value) in settings {
            command.arg("--set").arg(format!("{key}={value}"));
        }
        command.arg("serve").stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        command.stderr(std::fs::File::create(&log).expect("a log"));
        let mut child = command.spawn().expect("the program");
        let mut lines = BufReader::new(child.stdout.take().expect("its stdout")).lines();
        let says = async {
            while let Some(line) = lines.next_line().await.expect("text") {
                if let Some(at) = line.find("http://") {
                    return Some(line[at..].trim().to_owned());
                }
            }
            None
        };
        let url = tokio::time::timeout(DEADLINE, says).await.expect("it says where it listens");
        // One that is to die at once may not get so far as to say anything.
        let url = url.unwrap_or_else(|| {
            assert!(failpoint.is_some(), "it ended: {}", std::fs::read_to_string(&log).unwrap_or_default());
            String::new()
        });
        Gateway { child, url, log }
    }
}

/// An answer in chunks that is still coming.
pub struct Opened {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Opened {
    /// Reads on until this text has come.
    pub async fn reads(&mut self, text: &str) {
        let has = |read: &[u8]| read.windows(text.len()).any(|window| window == text.as_bytes());
        while !has(&self.read) {
            let read = tokio::time::timeout(DEADLINE, self.stream.read_buf(&mut self.read)).await.expect("something comes");
            assert!(read.is_ok_and(|bytes| bytes > 0), "it ends: {}", String::from_utf8_lossy(&self.read));
        }
    }

    /// Reads to the end; whether it was the end of the chunks too.
    pub async fn end(mut self) -> bool {
        let read = tokio::time::timeout(DEADLINE, self.stream.read_to_end(&mut self.read)).await.expect("it ends");
        read.is_ok() && self.read.ends_with(b"0\r\n\r\n")
    }
}

impl Gateway {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.url.strip_prefix("http://").and_then(|authority| authority.parse().ok()).expect("it listens")
    }

    /// Posts JSON under a key, and leaves the answer to be read.
    pub async fn open(&self, path: &str, key: &str, json: &str) -> Opened {
        let authority = self.url.strip_prefix("http://").expect("it listens");
        let mut stream = TcpStream::connect(authority).await.expect("it accepts");
        let head = format!("POST {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\nIdempotency-Key: {key}\r\n");
        let length = json.len();
        let request = format!("{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{json}");
        stream.write_all(request.as_bytes()).await.expect("it reads");
        Opened { stream, read: Vec::new() }
    }

    /// Sends a request and returns the answer; `None` if there came none, or not the whole of it.
    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Option<Answer> {
        let authority = self.url.strip_prefix("http://")?;
        let exchange = async {
            let mut stream = TcpStream::connect(authority).await.ok()?;
            let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n");
            for (name, value) in headers {
                head.push_str(&format!("{name}: {value}\r\n"));
            }
            head.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len()));
            stream.write_all(format!("{head}{body}").as_bytes()).await.ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.ok()?;
            let (head, body) = answer.split_once("\r\n\r\n")?;
            let status = head.split_ascii_whitespace().nth(1)?.parse().ok()?;
            Some(Answer { status, body: serde_json::from_str(body).ok()? })
        };
        tokio::time::timeout(DEADLINE, exchange).await.expect("an answer, or an end")
    }

    /// Submits an input to the route `print`.
    pub async fn submit(&self, key: &str, input: &str) -> Option<Answer> {
        let body = format!(r#"{{"route":"print","input":{input}}}"#);
        self.send("POST", "/v1/jobs", &[("Idempotency-Key", key)], &body).await
    }

    /// A job's document.
    pub async fn job(&self, id: &str) -> Option<Answer> {
        self.send("GET", &format!("/v1/jobs/{id}"), &[], "").await
    }

    /// A page that is not about jobs, with its head.
    pub async fn page(&self, path: &str) -> String {
        raw(self.addr(), format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await
    }

    /// What it has counted in one series.
    pub async fn count(&self, series: &str) -> u64 {
        let page = self.page("/metrics").await;
        let count = page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
        count.unwrap_or_else(|| panic!("{series} is not there: {page}"))
    }

    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().expect("it runs")).expect("a pid");
        kill_process(Pid::from_raw(pid).expect("a pid"), signal).expect("a process of ours");
    }

    /// What it has said so far.
    pub fn words(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> End {
        let status = tokio::time::timeout(DEADLINE, self.child.wait()).await;
        let status = status.unwrap_or_else(|_| panic!("it does not end: {}", self.words())).expect("a child");
        match (status.code(), status.signal()) {
            (Some(code), _) => End::Code(code),
            (None, Some(signal)) => End::Signal(signal),
            (None, None) => panic!("{status:?}"),
        }
    }
}
