//! One gateway of a fleet: a process of the real program, behind a wire of its own, that a supervisor starts again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{Mutex, watch};

use super::proxy::Proxy;
use super::signal;

/// How long a supervisor tries to start it: Redis may be away.
const START_DEADLINE: Duration = Duration::from_secs(90);
/// Between two tries.
const START_PAUSE: Duration = Duration::from_millis(200);
/// How long it may take to stop, with its drain and its last words.
const STOP_DEADLINE: Duration = Duration::from_secs(30);

/// The real program, without what this process' environment says.
pub fn onejob() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onejob"));
    command.env_clear().stdin(Stdio::null()).kill_on_drop(true);
    command
}

pub struct Gateway {
    pub number: usize,
    pub proxy: Proxy,
    config: PathBuf,
    log: PathBuf,
    /// Where it listened last; it may be dead.
    addr: watch::Sender<String>,
    /// Whoever changes how it is holds it meanwhile.
    child: Mutex<Option<Running>>,
}

struct Running {
    child: Child,
    // Held, or its next word would end it.
    _stdout: BufReader<ChildStdout>,
}

impl Gateway {
    pub async fn start(number: usize, directory: &Path, config: PathBuf, proxy: Proxy) -> Gateway {
        let log = directory.join(format!("gateway-{number}.log"));
        let gateway = Gateway { number, proxy, config, log, addr: watch::Sender::new(String::new()), child: Mutex::new(None) };
        gateway.run(&mut *gateway.child.lock().await).await;
        gateway
    }

    /// Where it listens, or did.
    pub fn addr(&self) -> String {
        self.addr.borrow().clone()
    }

    /// The command line of this gateway, for a command of the program.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = onejob();
        command.arg("--config").arg(&self.config).arg("--set").arg(format!("redis.url={}", self.proxy.url())).args(words);
        command
    }

    /// Starts it as a supervisor does: again and again until it listens.
    async fn run(&self, running: &mut Option<Running>) {
        let began = Instant::now();
        while !self.try_run(running).await {
            assert!(began.elapsed() < START_DEADLINE, "gateway {} does not start, see {}", self.number, self.log.display());
            tokio::time::sleep(START_PAUSE).await;
        }
    }

    async fn try_run(&self, running: &mut Option<Running>) -> bool {
        let log = File::options().create(true).append(true).open(&self.log).expect("a log file");
        let mut command = self.command(&["serve"]);
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().expect("the program");
        let mut stdout = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut line = String::new();
        while let Ok(1..) = stdout.read_line(&mut line).await {
            if let Some((_, addr)) = line.trim().split_once("http://") {
                self.addr.send_replace(addr.to_owned());
                *running = Some(Running { child, _stdout: stdout });
                return true;
            }
            line.clear();
        }
        let _ = child.wait().await;
        false
    }

    /// Dies at once, and is started again after a while.
    pub async fn kill(&self, down: Duration) {
        let mut running = self.child.lock().await;
        running.take().expect("it runs").child.kill().await.expect("a process of ours");
        tokio::time::sleep(down).await;
        self.run(&mut running).await;
    }

    /// Does nothing for a while, without closing a connection.
    pub async fn pause(&self, length: Duration) {
        let running = self.child.lock().await;
        let pid = running.as_ref().and_then(|running| running.child.id()).expect("it runs");
        signal(pid, Signal::STOP);
        tokio::time::sleep(length).await;
        signal(pid, Signal::CONT);
    }

    /// Drains, ends, and is started again. Returns its exit code.
    pub async fn drain(&self) -> Option<i32> {
        let mut running = self.child.lock().await;
        let code = stop(running.take()).await;
        self.run(&mut running).await;
        code
    }

    /// Drains and ends. Returns its exit code.
    pub async fn stop(&self) -> Option<i32> {
        stop(self.child.lock().await.take()).await
    }
}

async fn stop(running: Option<Running>) -> Option<i32> {
    let mut running = running.expect("it runs");
    signal(running.child.id().expect("it runs"), Signal::TERM);
    let ended = tokio::time::timeout(STOP_DEADLINE, running.child.wait()).await.expect("it stops within its drain");
    ended.expect("a process of ours").code()
}
