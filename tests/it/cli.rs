//! The real program: what it prints where, with which code it ends, and that a whole gateway comes and goes with it.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use onejob::config::token_sha256;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use crate::support::Redis;

/// Longer than anything here takes, also on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);
/// A job that never was: a well-formed id.
const NO_JOB: &str = "01a228f0-9e6a-8d56-9b89-73a00fd9ccce";

/// A gateway's configuration: one printer that answers, one that is given long enough to hang.
const SHOP: &str = r#"
[server]
listen = "127.0.0.1:0"
[provider.laser]
adapter = "simulated"
timeouts = { total = "1s" }
[provider.plotter]
adapter = "simulated"
timeouts = { total = "2m" }
[route.print]
providers = ["laser"]
[route.plot]
providers = ["plotter"]
"#;

/// The program, with nothing in its environment that it would read.
pub fn onejob() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onejob"));
    for name in ["ONEJOB_CONFIG", "ONEJOB_GATEWAY", "ONEJOB_LOG", "ONEJOB_TOKEN", "USER"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// What a process left behind.
pub struct Ended {
    code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {:?}\n{}", self.stdout, self.stderr))
    }

    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }
}

pub async fn ended(mut command: Command) -> Ended {
    let output = tokio::time::timeout(DEADLINE, command.output()).await.expect("it ends").unwrap();
    Ended {
        code: output.status.code().expect("it was not killed"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

pub async fn run(arguments: &[&str]) -> Ended {
    let mut command = onejob();
    command.args(arguments);
    ended(command).await
}

/// A directory with a configuration and room for a private Redis.
struct Home {
    dir: tempfile::TempDir,
}

impl Home {
    fn new(config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = dir.path().join("data");
        std::fs::write(dir.path().join("onejob.toml"), format!("{config}\n[redis]\ndata_dir = {data_dir:?}\n")).unwrap();
        Home { dir }
    }

    fn config(&self) -> PathBuf {
        self.dir.path().join("onejob.toml")
    }

    /// Runs a command with the configuration.
    async fn run(&self, arguments: &[&str]) -> Ended {
        let mut command = onejob();
        command.arg("--config").arg(self.config()).args(arguments);
        ended(command).await
    }

    async fn serve(&self, arguments: &[&str]) -> Process {
        let mut command = onejob();
        command.arg("--config").arg(self.config()).arg("serve").args(arguments);
        Process::start(command, self.dir.path().join("serve.stderr")).await
    }
}

/// A process that says where it listens, and goes on.
pub struct Process {
    child: Child,
    pub url: String,
    stderr: PathBuf,
}

impl Process {
    pub async fn start(mut command: Command, stderr: PathBuf) -> Self {
        command.stdout(Stdio::piped()).stderr(std::fs::File::create(&stderr).unwrap());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let find = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if let Some(at) = line.find("http://") {
                    return Some(line[at..].trim().to_owned());
                }
            }
            None
        };
        let url = tokio::time::timeout(DEADLINE, find).await.expect("it says where it listens");
        let url = url.unwrap_or_else(|| panic!("it ended: {}", std::fs::read_to_string(&stderr).unwrap()));
        Process { child, url, stderr }
    }

    /// Runs a command against this gateway, with data as JSON.
    pub async fn ask(&self, arguments: &[&str]) -> Ended {
        let mut command = onejob();
        command.arg("--json").args(arguments).env("ONEJOB_GATEWAY", &self.url);
        ended(command).await
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().expect("it runs")).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    pub fn words(&self) -> String {
        std::fs::read_to_string(&self.stderr).unwrap()
    }

    /// Waits until it has said something on stderr.
    async fn says(&self, words: &str) {
        let heard = async {
            while !self.words().contains(words) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(DEADLINE, heard).await.is_err() {
            panic!("it never said {words:?}: {}", self.words());
        }
    }

    /// Waits for its end.
    async fn ended(mut self) -> Ended {
        let status = tokio::time::timeout(DEADLINE, self.child.wait()).await.expect("it ends").unwrap();
        Ended { code: status.code().expect("it was not killed"), stdout: String::new(), stderr: self.words() }
    }

    pub async fn terminate(self) -> Ended {
        self.signal(Signal::TERM);
        self.ended().await
    }
}

/// Asks an HTTP server for a document, without any client of ours.
async fn http(method: &str, url: &str, body: &str) -> Value {
    let (authority, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = TcpStream::connect(authority).await.unwrap();
    let head =
        format!("{method} /{path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(DEADLINE, stream.read_to_string(&mut answer)).await.expect("it answers").unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

#[tokio::test]
async fn help_names_every_command_and_documents_every_exit_code() {
    let help = run(&["--help"]).await.expect(0).stdout;
    for command in [
        "serve", "demo", "simulate", "submit", "get", "wait", "list", "cancel", "resolve", "reopen", "doctor", "config",
        "openapi", "script",
    ] {
        assert!(help.contains(&format!("\n  {command} ")), "{command} is not in\n{help}");
    }
    let codes = help.split_once("Exit codes:\n").unwrap().1;
    for code in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 130] {
        assert!(codes.lines().any(|line| line.trim_start().starts_with(&format!("{code}  "))), "{code} is not in\n{codes}");
    }
}

#[tokio::test]
async fn nothing_is_submitted_without_a_key() {
    let refused = run(&["submit", "print", "{}"]).await.expect(2);
    assert!(refused.stderr.contains("--key"), "{}", refused.stderr);
    run(&["submit", "print", "{}", "--key", "a", "--key-new"]).await.expect(2);
    run(&["submit", "print", "{}", "--key", "two words"]).await.expect(2);
    run(&["submit", "print", "{}", "--key", "\"half"]).await.expect(2);
    let long = run(&["submit", "print", "{}", "--key", &"k".repeat(256)]).await.expect(2);
    assert!(long.stderr.contains("256") && long.stderr.contains("255"), "{}", long.stderr);
    run(&["submit", "print", "{", "--key", "a"]).await.expect(2);
}

#[tokio::test]
async fn every_problem_of_a_configuration_is_told_at_once() {
    let home = Home::new("[route.print]\nproviders = [\"nobody\"]\nattempts = 99\n[server]\nwait_max = \"soon\"");
    let refused = home.run(&["config", "check"]).await.expect(2);
    for key in ["route.print.providers", "route.print.attempts", "server.wait_max"] {
        assert!(refused.stderr.contains(key), "{key} is not in {}", refused.stderr);
    }
    assert_eq!(refused.stdout, "");
    let refused = home.run(&["--json", "config", "check"]).await.expect(2).json();
    assert_eq!(refused["ok"], json!(false));
    let keys: Vec<&str> =
        refused["problems"].as_array().unwrap().iter().map(|problem| problem["key"].as_str().unwrap()).collect();
    assert!(keys.contains(&"route.print.attempts"), "{keys:?}");
    home.run(&["serve"]).await.expect(2);
    home.run(&["doctor"]).await.expect(2);
}

#[tokio::test]
async fn a_checked_configuration_says_what_a_job_may_cost_and_when_nothing_happened_is_believed() {
    let home = Home::new(SHOP);
    let checked = home.run(&["config", "check"]).await.expect(0);
    // 30 s of pause, 20 s of the kernel's patience, 1 s of the provider's, 1 s of a clock's step.
    assert!(checked.stdout.contains("route print: at most 3 provider calls a job; quarantine 1m 22s\n"), "{}", checked.stdout);
    let checked = home.run(&["--json", "--set", "route.print.attempts=2", "config", "check"]).await.expect(0).json();
    assert_eq!(checked["routes"]["print"]["provider_calls_max"], json!(2));
}

#[tokio::test]
async fn the_printed_configuration_has_no_secret() {
    let url = "redis.url=redis://:hunter2@127.0.0.1:1";
    for arguments in [&["config", "print"][..], &["--json", "config", "print"], &["serve"], &["doctor"], &["--json", "doctor"]] {
        let printed = run(&[&["--set", url][..], arguments].concat()).await;
        assert!(!printed.stdout.contains("hunter2") && !printed.stderr.contains("hunter2"), "{arguments:?}");
    }
}

#[tokio::test]
async fn a_token_comes_with_its_name_and_never_twice() {
    let token = run(&["--json", "config", "token"]).await.expect(0).json();
    assert_eq!(token["sha256"].as_str().unwrap(), token_sha256(token["token"].as_str().unwrap()));
    assert_ne!(token, run(&["--json", "config", "token"]).await.expect(0).json());
}

#[tokio::test]
async fn the_example_configuration_loads_as_it_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("onejob.toml");
    std::fs::write(&file, run(&["config", "example"]).await.expect(0).stdout).unwrap();
    run(&["--config", file.to_str().unwrap(), "config", "check"]).await.expect(0);
}

#[tokio::test]
async fn what_programs_read_is_printed_whole() {
    let openapi = run(&["openapi"]).await.expect(0).json();
    assert!(openapi["paths"]["/v1/jobs"]["post"].is_object());
    let script = run(&["script", "submit_job"]).await.expect(0).stdout;
    assert!(script.starts_with("#!lua"), "{script:.20}");
    assert_eq!(run(&["script", "submit_job", "--sha1"]).await.expect(0).stdout.trim().len(), 40);
    run(&["script", "nonsense"]).await.expect(2);
}

/// A result that went to a full disk is no success.
#[tokio::test]
async fn data_that_cannot_be_written_is_told_with_an_exit_code() {
    let home = Home::new(SHOP);
    let gateway = home.serve(&[]).await;
    let submit = ["--json", "submit", "print", "{}", "--key", "print", "--wait"];
    for arguments in [&["openapi"][..], &["config", "example"], &["script", "submit_job"], &submit] {
        let mut command = onejob();
        command.args(arguments).env("ONEJOB_GATEWAY", &gateway.url).stderr(Stdio::piped());
        command.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
        let child = command.spawn().unwrap();
        let output = tokio::time::timeout(DEADLINE, child.wait_with_output()).await.expect("it ends").unwrap();
        assert_eq!(output.status.code(), Some(6), "{arguments:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains("cannot write to stdout: No space left"), "{arguments:?}: {stderr}");
    }
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn an_error_says_its_cause_once() {
    let refused = run(&["--config", "/nonexistent", "config", "check"]).await.expect(2);
    assert_eq!(refused.stderr.matches("os error 2").count(), 1, "{}", refused.stderr);
    let refused = run(&["--log", "a=b=c", "config", "check"]).await.expect(2);
    assert_eq!(refused.stderr.matches("error parsing level filter").count(), 1, "{}", refused.stderr);
    let refused = run(&["serve", "--listen", "127.0.0.1:0", "--redis", "redis+unix:///nonexistent"]).await.expect(6);
    assert_eq!(refused.stderr.matches("redis did not execute").count(), 1, "{}", refused.stderr);
}

#[tokio::test]
async fn a_spool_that_cannot_be_written_is_told_at_the_start() {
    let home = Home::new(SHOP);
    let refused = home.run(&["--set", "runtime.spool_dir=/proc/spool", "serve"]).await.expect(2);
    assert!(refused.stderr.contains("cannot use the spool directory /proc/spool: making it: "), "{}", refused.stderr);
    // Without a spool there is no directory to write to.
    let gateway = home.serve(&["--set", "runtime.spool_dir=/proc/spool", "--set", "runtime.spool_bytes_max=0"]).await;
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn the_demo_keeps_every_promise_that_it_shows() {
    let dir = tempfile::tempdir().unwrap();
    // Twice on the same data: its keys are its own.
    for _ in 0..2 {
        let demo = run(&["--json", "demo", "--once", "--data-dir", dir.path().to_str().unwrap()]).await.expect(0).json();
        let situations = demo["situations"].as_array().unwrap();
        assert_eq!(situations.len(), 5);
        for situation in situations {
            assert_eq!(situation["differences"], json!([]), "{situation}");
            assert_eq!(situation["state"], json!("succeeded"), "{situation}");
        }
        let executions = |number: usize| situations[number]["executions"].clone();
        assert_eq!(executions(0), json!({ "inkjet": 0, "laser": 1 }), "two clicks, one print");
        assert_eq!(executions(2), json!({ "inkjet": 0, "laser": 1 }), "a timeout, one print");
        assert_eq!(executions(3), json!({ "inkjet": 1, "laser": 1 }), "a race");
        assert_eq!(executions(4), json!({ "inkjet": 0, "laser": 1 }), "a jam");
    }
}

#[tokio::test]
async fn the_demo_serves_on_until_it_is_told_to_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = onejob();
    command.args(["demo", "--data-dir"]).arg(dir.path().join("data"));
    command.stdout(Stdio::null()).stderr(std::fs::File::create(dir.path().join("stderr")).unwrap());
    let demo = Process { child: command.spawn().unwrap(), url: String::new(), stderr: dir.path().join("stderr") };
    demo.says("Ctrl-C ends it").await;
    let words = demo.words();
    let url = words.split_whitespace().find(|word| word.starts_with("http://")).unwrap();
    assert_eq!(http("GET", &format!("{url}/v1/jobs?state=unknown"), "").await, json!({ "jobs": [] }));
    demo.signal(Signal::INT);
    demo.says("stopped").await;
    demo.ended().await.expect(0);
}

#[tokio::test]
async fn a_simulated_provider_counts_what_it_did() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = onejob();
    command.args(["simulate", "--listen", "127.0.0.1:0", "--name", "laser", "--behaviour", "jam"]);
    let simulate = Process::start(command, dir.path().join("stderr")).await;
    assert_eq!(http("POST", &format!("{}/prints", simulate.url), "{\"simulate\":\"succeed\"}").await["provider"], json!("laser"));
    http("POST", &format!("{}/prints", simulate.url), "{}").await;
    let ledger = http("GET", &format!("{}/ledger", simulate.url), "").await;
    assert_eq!((&ledger["received"], &ledger["executed"]), (&json!(2), &json!(1)));
    let ended = simulate.terminate().await.expect(0);
    assert!(ended.stderr.contains("received 2, executed 1, answered 2"), "{}", ended.stderr);
    let refused = run(&["simulate", "--listen", "127.0.0.1:0", "--behaviour", "dorp"]).await.expect(2);
    assert!(refused.stderr.contains("dorp"), "{}", refused.stderr);
}

#[tokio::test]
async fn a_job_goes_from_the_command_line_to_the_provider_and_back() {
    let home = Home::new(SHOP);
    let gateway = home.serve(&[]).await;
    let submit = ["submit", "print", "{\"file\": 9007199254740993}", "--key", "order-1", "--wait"];
    let job = gateway.ask(&submit).await.expect(0).json();
    assert_eq!(job["state"], json!("succeeded"));
    let id = job["id"].as_str().unwrap();

    let again = gateway.ask(&submit).await.expect(0);
    assert!(again.stderr.contains("this key was there before"), "{}", again.stderr);
    assert_eq!(again.json(), job);
    let quoted = ["submit", "print", "{\"file\": 9007199254740993}", "--key", "\"order-1\""];
    assert_eq!(gateway.ask(&quoted).await.expect(0).json(), job, "a quoted key is the same key");
    assert_eq!(gateway.ask(&["get", id]).await.expect(0).json(), job);
    assert_eq!(gateway.ask(&["wait", id]).await.expect(0).json(), job);
    assert_eq!(gateway.ask(&["list", "--state", "open"]).await.expect(0).json(), json!({ "jobs": [] }));

    let conflict = gateway.ask(&["submit", "print", "{\"file\": 9007199254740992}", "--key", "order-1"]).await.expect(3);
    assert_eq!(conflict.json()["type"], json!("urn:onejob:problem:key-conflict"));

    // For people: a table, with nothing in it that could script a terminal.
    let mut get = onejob();
    get.args(["get", id]).env("ONEJOB_GATEWAY", &gateway.url);
    let shown = ended(get).await.expect(0).stdout;
    assert!(shown.contains("state         succeeded\n") && shown.contains("ATTEMPT"), "{shown}");

    let ended = gateway.terminate().await.expect(0);
    assert!(ended.stderr.contains("stopped: 0 attempts were running"), "{}", ended.stderr);
    assert!(ended.stderr.contains("route print: at most 3 provider calls a job"), "{}", ended.stderr);
}

#[tokio::test]
async fn the_exit_code_says_how_a_job_ended() {
    let home = Home::new(SHOP);
    let gateway = home.serve(&["--set", "runtime.drain=100ms"]).await;
    let id = |ended: Ended| ended.json()["id"].as_str().unwrap().to_owned();
    let submit = async |route: &str, input: &str, key: &str| gateway.ask(&["submit", route, input, "--key", key, "--wait"]).await;

    submit("print", r#"{"simulate":"jam"}"#, "failed").await.expect(1);
    let unknown = id(submit("print", r#"{"simulate":"drop"}"#, "unknown").await.expect(4));
    gateway.ask(&["wait", &unknown]).await.expect(4);
    let mut get = onejob();
    get.args(["get", &unknown]).env("ONEJOB_GATEWAY", &gateway.url);
    let shown = ended(get).await.expect(0).stdout;
    assert!(shown.contains("unknown for ") && !shown.contains("took "), "{shown}");
    // It could still end, so whoever waits for the end waits on, and is told at last how it stands.
    let waited = std::time::Instant::now();
    gateway.ask(&["wait", &unknown, "--until", "ended", "--within", "300ms"]).await.expect(4);
    assert!(waited.elapsed() >= Duration::from_millis(300));
    gateway.ask(&["get", NO_JOB]).await.expect(5);
    gateway.ask(&["submit", "nowhere", "{}", "--key", "a"]).await.expect(2);

    let plot = ["submit", "plot", r#"{"simulate":"hang"}"#, "--key", "plot"];
    let plot = id(gateway.ask(&plot).await.expect(0));
    gateway.ask(&["wait", &plot, "--within", "100ms"]).await.expect(7);
    let canceled = gateway.ask(&["cancel", &plot, "--reason", "wrong paper", "--force"]).await.expect(0).json();
    assert_eq!((&canceled["status"], &canceled["effect"]), (&json!("canceled"), &json!("unknown")));
    gateway.ask(&["wait", &plot]).await.expect(10);
    gateway.ask(&["reopen", &plot, "--reason", "please"]).await.expect(3);
    gateway.terminate().await;
}

#[tokio::test]
async fn an_operator_resolves_and_reopens() {
    let home = Home::new(SHOP);
    let gateway = home.serve(&[]).await;
    let submit = async |input: &str, key: &str, code: i32| {
        let job = gateway.ask(&["submit", "print", input, "--key", key, "--wait"]).await.expect(code).json();
        job["id"].as_str().unwrap().to_owned()
    };

    let unknown = submit(r#"{"simulate":"drop"}"#, "unknown", 4).await;
    let list = gateway.ask(&["list"]).await.expect(0).json();
    assert_eq!(list["jobs"][0]["id"], json!(unknown));
    let resolve = ["resolve", &unknown, "--attempt", "1", "--reason", "it lies in the tray"];
    // "It did not happen" is not believed yet.
    let early = gateway.ask(&[&resolve[..], &["--outcome", "failed"]].concat()).await.expect(3).json();
    assert_eq!(early["type"], json!("urn:onejob:problem:attempt-quarantined"));
    let silent = gateway.ask(&[&resolve[..], &["--outcome", "succeeded"]].concat()).await.expect(2);
    assert!(silent.stderr.contains("--no-result"), "{}", silent.stderr);
    let numbered = gateway.ask(&["resolve", &unknown, "--attempt", "x", "--reason", "r", "--outcome", "failed"]).await.expect(2);
    assert!(numbered.stderr.contains("numbered 1, 2, 3"), "{}", numbered.stderr);
    let result = ["--outcome", "succeeded", "--result", "{\"pages\": 9007199254740993}", "--actor", "ada"];
    let resolved = gateway.ask(&[&resolve[..], &result].concat()).await.expect(0).json();
    assert_eq!(resolved["status"], json!("won"));
    // The same words once more are the same decision; others are another one.
    let repeated = gateway.ask(&[&resolve[..], &result].concat()).await.expect(0).json();
    assert_eq!(repeated["status"], json!("repeated"));
    gateway.ask(&[&resolve[..], &["--outcome", "succeeded", "--no-result"]].concat()).await.expect(3);
    let job = gateway.ask(&["wait", &unknown]).await.expect(0);
    assert!(job.stdout.contains("9007199254740993"), "{}", job.stdout);
    assert!(job.json()["events"].to_string().contains("ada"), "{}", job.stdout);
    let mut get = onejob();
    get.args(["get", &unknown]).env("ONEJOB_GATEWAY", &gateway.url);
    let shown = ended(get).await.expect(0).stdout;
    let events = shown.split_once("EVENT").unwrap_or_else(|| panic!("no events in {shown}")).1;
    assert!(events.contains("ada") && events.contains("it lies in the tray"), "{shown}");
    for label in ["owner  ", "created  ", "started  ", "ended  ", "took  ", "GATEWAY"] {
        assert!(shown.contains(label), "{label} is not in {shown}");
    }
    gateway.ask(&[&resolve[..], &["--outcome", "failed", "--result", "{}"]].concat()).await.expect(2);

    let failed = submit(r#"{"simulate":"jam"}"#, "failed", 1).await;
    assert_eq!(gateway.ask(&["reopen", &failed, "--reason", "new paper"]).await.expect(0).json()["status"], json!("reopened"));
    gateway.ask(&["wait", &failed]).await.expect(1);
    let attempts = gateway.ask(&["get", &failed]).await.expect(0).json()["attempts"].as_array().unwrap().len();
    assert_eq!(attempts, 2);
    // It failed once more: the same words are about this failure, and not taken for the reopening before.
    gateway.ask(&["reopen", &failed, "--reason", "new paper"]).await.expect(0);
    gateway.ask(&["wait", &failed]).await.expect(1);
    assert_eq!(gateway.ask(&["get", &failed]).await.expect(0).json()["attempts"].as_array().unwrap().len(), 3);
    gateway.terminate().await;
}

#[tokio::test]
async fn a_token_opens_the_gateway_and_only_the_right_one() {
    let sha256 = token_sha256("ada-has-this-token");
    let owner = format!("{SHOP}\n[owner.ada]\ntokens_sha256 = [\"{sha256}\"]\n");
    let gateway = Home::new(&owner);
    let gateway = (gateway.serve(&[]).await, gateway);
    let (gateway, _home) = gateway;
    let ask = async |token: &str, arguments: &[&str]| {
        let mut command = onejob();
        command.arg("--json").args(arguments).env("ONEJOB_GATEWAY", &gateway.url).env("OTHER", token);
        command.args(["--token-env", "OTHER"]);
        ended(command).await
    };
    let nobody = gateway.ask(&["get", NO_JOB]).await.expect(8);
    assert!(nobody.stderr.contains("ONEJOB_TOKEN"), "{}", nobody.stderr);
    ask("guessed-token", &["get", NO_JOB]).await.expect(8);
    ask("ada-has-this-token", &["get", NO_JOB]).await.expect(5);
    // Her role is to submit, not to list everybody's jobs.
    ask("ada-has-this-token", &["list"]).await.expect(8);
    ask("ada-has-this-token", &["submit", "print", "{}", "--key-new", "--wait"]).await.expect(0);
    gateway.terminate().await;
}

#[tokio::test]
async fn a_terminated_gateway_lets_running_attempts_finish() {
    let home = Home::new(SHOP);
    let gateway = home.serve(&["--set", "runtime.drain=30s"]).await;
    let submit = ["submit", "plot", r#"{"simulate":"delay=1s"}"#, "--key", "plot"];
    let job = gateway.ask(&submit).await.expect(0).json();
    let ended = gateway.terminate().await.expect(0);
    assert!(ended.stderr.contains("1 attempt was running: 1 finished, 0 unknown, 0 could"), "{}", ended.stderr);

    let gateway = home.serve(&[]).await;
    let replayed = gateway.ask(&["wait", job["id"].as_str().unwrap()]).await.expect(0).json();
    assert_eq!(replayed["attempts"].as_array().unwrap().len(), 1);
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn what_a_terminated_gateway_could_not_await_is_unknown_and_never_runs_again() {
    let home = Home::new(SHOP);
    let gateway = home.serve(&["--set", "runtime.drain=100ms"]).await;
    let submit = ["submit", "plot", r#"{"simulate":"hang"}"#, "--key", "plot"];
    let job = gateway.ask(&submit).await.expect(0).json();
    let ended = gateway.terminate().await.expect(4);
    assert!(ended.stderr.contains("1 attempt was running: 0 finished, 1 unknown, 0 could"), "{}", ended.stderr);

    let gateway = home.serve(&[]).await;
    let id = job["id"].as_str().unwrap();
    let again = gateway.ask(&submit).await.expect(0).json();
    assert_eq!((&again["id"], &again["state"]), (&job["id"], &json!("unknown")));
    assert_eq!(gateway.ask(&["wait", id]).await.expect(4).json()["attempts"].as_array().unwrap().len(), 1);
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    let home = Home::new(SHOP);
    let gateway = home.serve(&["--set", "runtime.drain=1h"]).await;
    gateway.ask(&["submit", "plot", r#"{"simulate":"hang"}"#, "--key", "plot"]).await.expect(0);
    gateway.signal(Signal::TERM);
    gateway.says("SIGTERM: nothing new is accepted").await;
    gateway.signal(Signal::INT);
    let ended = gateway.ended().await.expect(130);
    assert!(ended.stderr.contains("SIGINT again: ended at once"), "{}", ended.stderr);
}

/// Otherwise its redis-server would stay behind, and with it the demo's directory.
#[tokio::test]
async fn a_terminal_that_closes_ends_it_as_sigterm_does() {
    let home = Home::new(SHOP);
    let gateway = home.serve(&["--set", "runtime.drain=30s"]).await;
    gateway.ask(&["submit", "plot", r#"{"simulate":"delay=1s"}"#, "--key", "plot"]).await.expect(0);
    gateway.signal(Signal::HUP);
    gateway.says("SIGHUP: nothing new is accepted").await;
    // The shell sends it too.
    gateway.signal(Signal::HUP);
    let ended = gateway.ended().await.expect(0);
    assert!(ended.stderr.contains("1 attempt was running: 1 finished"), "{}", ended.stderr);
    let socket = home.dir.path().join("data/redis.sock");
    assert!(std::os::unix::net::UnixStream::connect(socket).is_err(), "its redis-server is gone");
}

#[tokio::test]
async fn nohup_keeps_it_from_hearing_that_the_terminal_closes() {
    let home = Home::new(SHOP);
    let mut command = Command::new("sh");
    command.args(["-c", r#"trap '' HUP; exec "$0" "$@""#, env!("CARGO_BIN_EXE_onejob"), "--config"]);
    command.arg(home.config()).arg("serve").stdin(Stdio::null()).kill_on_drop(true);
    let gateway = Process::start(command, home.dir.path().join("serve.stderr")).await;
    gateway.signal(Signal::HUP);
    let ended = gateway.terminate().await.expect(0);
    assert!(ended.stderr.contains("SIGTERM: nothing new") && !ended.stderr.contains("SIGHUP"), "{}", ended.stderr);
}

/// Whoever flushes Redis, or loses writes in a failover, finds out from the log what was done and is not known any more.
#[tokio::test]
async fn a_result_whose_job_was_flushed_is_told() {
    let home = Home::new(SHOP);
    let gateway = home.serve(&[]).await;
    let job = gateway.ask(&["submit", "plot", r#"{"simulate":"delay=2s"}"#, "--key", "plot"]).await.expect(0).json();
    let redis = redis::Client::open(format!("redis+unix://{}", home.dir.path().join("data/redis.sock").display())).unwrap();
    let mut redis = redis.get_multiplexed_async_connection().await.unwrap();
    redis::cmd("FLUSHALL").exec_async(&mut redis).await.unwrap();
    gateway.says("an attempt ended whose job is not in the store any more").await;
    assert!(gateway.words().contains(job["id"].as_str().unwrap()), "{}", gateway.words());
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn without_redis_nothing_starts_and_it_is_said_why() {
    let refused = run(&["serve", "--listen", "127.0.0.1:0", "--redis", "redis://127.0.0.1:1"]).await.expect(6);
    assert!(refused.stderr.contains("cannot connect to redis at redis://127.0.0.1:1"), "{}", refused.stderr);
    let doctor = run(&["--json", "--set", "redis.url=redis://127.0.0.1:1", "doctor"]).await.expect(6).json();
    assert_eq!(doctor["ok"], json!(false));
}

/// Whoever looks for what would break a promise sees that one is not made.
#[tokio::test]
async fn the_doctor_warns_of_an_open_gate() {
    let config = |gate: &str| SHOP.replace("[\"laser\"]", &format!("[\"laser\", \"plotter\"]\ngate = \"{gate}\""));
    for (gate, found) in [("enforce", false), ("shadow", true), ("off", true)] {
        let home = Home::new(&config(gate));
        let doctor = home.run(&["--json", "--set", "redis.url=redis://127.0.0.1:1", "doctor"]).await.expect(6).json();
        let finding = doctor["findings"].as_array().unwrap().iter().find(|finding| finding["check"] == json!("gate"));
        assert_eq!(finding.map(|finding| &finding["verdict"]), found.then_some(&json!("warning")), "{gate}: {doctor:#}");
    }
}

#[tokio::test]
async fn the_doctor_finds_a_private_redis_well() {
    let home = Home::new(SHOP);
    let doctor = home.run(&["--json", "doctor"]).await.expect(0).json();
    assert_eq!(doctor["ok"], json!(true));
    assert!(!home.dir.path().join("data").exists(), "looking makes nothing");
    for check in [
        "configuration",
        "private redis",
        "schema",
        "version",
        "eviction",
        "role",
        "persistence",
        "memory",
        "canary script",
        "clock",
    ] {
        let finding = doctor["findings"].as_array().unwrap().iter().find(|finding| finding["check"] == json!(check));
        let finding = finding.unwrap_or_else(|| panic!("{check} is not in {doctor:#}"));
        assert_ne!(finding["verdict"], json!("bad"), "{finding}");
    }
    // Beside a running gateway it says so, and leaves it alone.
    let gateway = home.serve(&[]).await;
    let doctor = home.run(&["doctor"]).await.expect(0);
    assert!(doctor.stdout.contains("in use by process") && doctor.stdout.contains("/readyz"), "{}", doctor.stdout);
    assert!(!doctor.stderr.contains(" 0 warnings"), "{}", doctor.stderr);
    gateway.ask(&["list"]).await.expect(0);
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn the_doctor_finds_an_evicting_redis_bad_and_serve_refuses_it() {
    let redis = Redis::start_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let url = format!("redis.url={}", redis.url());

    let doctor = run(&["--json", "--set", &url, "doctor"]).await.expect(6).json();
    let finding = doctor["findings"].as_array().unwrap().iter().find(|finding| finding["check"] == json!("eviction")).unwrap();
    assert_eq!(finding["verdict"], json!("bad"));
    assert!(finding["found"].as_str().unwrap().ends_with("allkeys-lru"), "{finding}");
    let refused = run(&["--set", &url, "serve", "--listen", "127.0.0.1:0"]).await.expect(6);
    assert!(refused.stderr.contains("maxmemory-policy"), "{}", refused.stderr);
}

#[tokio::test]
async fn the_doctor_says_what_a_level_of_durability_survives_here() {
    let redis = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "everysec"]).await;
    let url = format!("redis.url={}", redis.url());
    let finding = async |level: &str, exit: i32| {
        let level = format!("redis.durability={level}");
        let doctor = run(&["--json", "--set", &url, "--set", &level, "doctor"]).await.expect(exit).json();
        doctor["findings"].as_array().unwrap().iter().find(|finding| finding["check"] == json!("durability")).unwrap().clone()
    };
    let memory = finding("memory", 0).await;
    let found = memory["found"].as_str().unwrap();
    assert!(memory["verdict"] == "good" && found.contains("appendonly yes, appendfsync everysec"), "{memory}");
    assert!(found.contains("connected replicas 0, min-replicas-to-write 0, maxmemory-policy noeviction"), "{memory}");
    assert!(found.contains("it survives a crash of redis"), "{memory}");
    let bad = finding("{ replicated = 1 }", 6).await;
    assert!(bad["verdict"] == "bad" && bad["found"].as_str().unwrap().contains("0 of 1 replicas are connected"), "{bad}");
    // Valkey, and Redis from 7.2 on, say when the disk has what they wrote; but a second is more than is waited for.
    let info: String = redis.command(&["INFO", "server"]).await;
    let (exit, verdict) = if info.contains("redis_version:7.0.") { (6, "bad") } else { (0, "warning") };
    let each_second = finding("fsync", exit).await;
    let found = each_second["found"].as_str().unwrap();
    assert!(each_second["verdict"] == verdict && found.contains("appendfsync is everysec"), "{each_second}");
    redis.command::<()>(&["CONFIG", "SET", "appendfsync", "always"]).await;
    assert_eq!(finding("fsync", 0).await["verdict"], "good");
    let doctor = run(&["--json", "--set", &url, "doctor"]).await.expect(0).json();
    let version = doctor["findings"].as_array().unwrap().iter().find(|finding| finding["check"] == json!("version")).unwrap();
    let found = version["found"].as_str().unwrap();
    let valkey = info.lines().find_map(|line| line.strip_prefix("valkey_version:"));
    match valkey {
        Some(valkey) => assert!(found.contains(&format!("Valkey {}, which does what Redis 7.", valkey.trim())), "{found}"),
        None => assert!(found.contains("Redis 7."), "{found}"),
    }
}

/// A gateway that is away, then unavailable, then there: for as long as it takes, it is the same intent.
#[tokio::test]
async fn a_submit_that_is_not_answered_is_sent_again_with_the_same_key() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let gateway = tokio::spawn(async move {
        let unavailable = r#"{"type":"urn:onejob:problem:store-unavailable","retryable":true,"detail":"the store is away"}"#;
        let accepted = json!({
            "id": NO_JOB, "owner": "default", "route": "print", "state": "succeeded", "version": 1, "revision": 3,
            "created_ms": 1, "attempts": [], "events": [],
        })
        .to_string();
        let described = r#"{"openapi":"3.1.0","info":{"title":"onejob"}}"#;
        let answers = [
            Some(("200 OK", described)),
            None,
            Some(("503 Service Unavailable", unavailable)),
            Some(("200 OK", accepted.as_str())),
        ];
        let mut requests = Vec::new();
        for (number, answer) in answers.into_iter().enumerate() {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 8192];
            let mut length = 0;
            let end = if number == 0 { "\r\n\r\n" } else { "\"input\":{}}" };
            while !String::from_utf8_lossy(&request[..length]).contains(end) {
                length += stream.read(&mut request[length..]).await.unwrap();
            }
            requests.push(String::from_utf8_lossy(&request[..length]).into_owned());
            if let Some((status, body)) = answer {
                let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n");
                let answer = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        }
        requests
    });
    let url = format!("http://{addr}");
    let submitted = run(&["submit", "print", "{}", "--key", "order-1", "--wait", "--gateway", &url]).await.expect(0);
    let requests = tokio::time::timeout(DEADLINE, gateway).await.unwrap().unwrap();
    let (probe, requests) = requests.split_first().unwrap();
    assert!(probe.starts_with("GET /openapi.json "), "{probe}");
    assert_eq!(requests.len(), 3);
    for request in requests {
        assert_eq!(request, &requests[0], "the same bytes each time");
        assert!(request.to_lowercase().contains("idempotency-key: \"order-1\"\r\n"), "{request}");
    }
    assert!(
        submitted
            .stderr
            .contains("the store is away (503 store-unavailable); sending it again, 5 times in all at most: it has the same key"),
        "{}",
        submitted.stderr
    );
}

/// Another server at the address would execute what it is sent, unguarded, and its answers prove nothing about a job.
#[tokio::test]
async fn what_is_no_gateway_is_told_and_asked_for_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = onejob();
    command.args(["simulate", "--listen", "127.0.0.1:0"]);
    let simulate = Process::start(command, dir.path().join("stderr")).await;
    for arguments in [
        &["submit", "print", "{}", "--key", "a"][..],
        &["get", NO_JOB],
        &["wait", NO_JOB],
        &["list"],
        &["cancel", NO_JOB, "--reason", "r"],
        &["reopen", NO_JOB, "--reason", "r"],
        &["resolve", NO_JOB, "--attempt", "1", "--outcome", "failed", "--reason", "r"],
    ] {
        let refused = simulate.ask(arguments).await.expect(6);
        let said = format!("this is not a onejob gateway: {}", simulate.url);
        assert!(refused.stderr.contains(&said), "{arguments:?}: {}", refused.stderr);
    }
    let ledger = http("GET", &format!("{}/ledger", simulate.url), "").await;
    let entries = ledger["entries"].as_array().unwrap();
    assert!(entries.iter().all(|entry| entry["method"] == "GET"), "{ledger}");
    simulate.terminate().await.expect(0);
}

#[tokio::test]
async fn a_gateway_that_is_not_there_is_given_up_after_a_few_tries() {
    let gone = run(&["get", NO_JOB, "--gateway", "http://127.0.0.1:1"]).await.expect(6);
    assert!(gone.stderr.contains("(sent 5 times)") && gone.stderr.contains("refused"), "{}", gone.stderr);
    assert_eq!(gone.stderr.matches("sending it again").count(), 1, "{}", gone.stderr);
    run(&["get", NO_JOB, "--gateway", "ftp://127.0.0.1"]).await.expect(2);
    run(&["get", "nonsense"]).await.expect(2);
    let submit = run(&["submit", "print", "{}", "--key", "k", "--gateway", "http://127.0.0.1:1"]).await.expect(6);
    assert!(submit.stderr.contains("nothing was submitted or changed"), "{}", submit.stderr);
}

#[tokio::test]
async fn a_gateway_is_found_by_its_configuration_unless_it_is_named() {
    let home = Home::new("[provider.laser]\nadapter = \"simulated\"\n[route.print]\nproviders = [\"laser\"]");
    let gateway = home.serve(&["--listen", "127.0.0.1:0"]).await;
    assert!(gateway.words().contains("this gateway's name is "), "{}", gateway.words());
    let listen = gateway.url.strip_prefix("http://").unwrap();
    // Whoever asks need not have the providers' credentials.
    let config = "[provider.laser]\nbase_url = \"http://127.0.0.1:9\"\nauth = { bearer_env = \"NOT_SET_HERE\" }";
    let asking = Home::new(&format!("[server]\nlisten = {listen:?}\n{config}"));
    assert!(asking.run(&["list"]).await.expect(0).stderr.contains("no unknown jobs"));
    let elsewhere = asking.run(&["list", "--gateway", "http://127.0.0.1:1"]).await.expect(6);
    assert!(elsewhere.stderr.contains("http://127.0.0.1:1"), "{}", elsewhere.stderr);
    let anywhere = home.run(&["--set", "server.listen=127.0.0.1:0", "list"]).await.expect(2);
    assert!(anywhere.stderr.contains("--gateway"), "{}", anywhere.stderr);
    gateway.terminate().await.expect(0);
}

/// Before a command, between its words and behind them.
#[tokio::test]
async fn settings_count_wherever_they_stand_and_the_last_one_wins() {
    let mut command = onejob();
    command.args(["--set", "redis.prefix=\"first\"", "--set=server.listen=\"127.0.0.1:1\"", "config"]);
    command.args(["--set", "redis.prefix=\"second\"", "print", "--set", "runtime.jobs_max=77"]);
    let told = ended(command).await.expect(0);
    for part in ["second", "127.0.0.1:1", "jobs_max = 77"] {
        assert!(told.stdout.contains(part), "{part}: {}", told.stdout);
    }
    assert!(!told.stdout.contains("first"), "{}", told.stdout);
    let mut command = onejob();
    command.args(["config", "print", "--set"]);
    assert!(ended(command).await.expect(2).stderr.contains("--set"));
}
