//! `onejob qualify`, the real program against a real provider: what is counted, what is asked, and what comes of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use onejob::provider::simulated::{Entry, Keys, Simulated, SimulatedOptions};
use onejob::qualify::{Certificate, Standing};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};

mod certificates;

use crate::cli::{Process, onejob};
use crate::support::{Redis, simulated, until};

mod answers;

/// Longer than anything here takes, also on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Two cases, each asked twice in each of three runs: 12 requests.
const SUITE: &str = r#"
runs: 3
levels: [structure, meaning]
parameters: { temperature: 0 }
vary: [/messages, /stream]
cases:
  - name: one
    values: { words: [a, b, c] }
    input: &ask { messages: [{ role: user, content: "{{ words | join(' ') }}" }] }
    assert: ["output.choices[0].finish_reason == 'stop'"]
    relations: [{ shuffle: words, same: "output.choices[0].finish_reason" }]
  - name: two
    values: { words: [d, e] }
    input: *ask
    assert: ["output.choices[0].finish_reason == 'stop'"]
    relations: [{ shuffle: words, same: "output.choices[0].finish_reason" }]
"#;
/// How many requests that suite makes.
const REQUESTS: u64 = 12;

/// A Redis, a provider, and a configuration in which it is a route's second one.
struct Site {
    redis: Redis,
    second: Simulated,
    dir: tempfile::TempDir,
}

/// How a call of the program ended.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ended {
    #[track_caller]
    fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {:?}\n{}", self.stdout, self.stderr))
    }
}

impl Site {
    async fn open() -> Self {
        Self::open_with(simulated().await, SUITE, "").await
    }

    /// `more` goes into the provider's entry.
    async fn open_with(second: Simulated, suite: &str, more: &str) -> Self {
        let site = Site { redis: Redis::start().await, second, dir: tempfile::tempdir().unwrap() };
        site.write(suite, more, &site.second.base_url());
        site
    }

    fn write(&self, suite: &str, more: &str, base_url: &str) {
        std::fs::write(self.path("suite.yaml"), suite).unwrap();
        let toml = format!(
            r#"
            [server]
            listen = "127.0.0.1:0"
            [redis]
            url = "{}"
            data_dir = "{}"
            [runtime]
            lease = "2s"
            lease_margin = "500ms"
            [provider.first]
            base_url = "http://127.0.0.1:9"
            [provider.second]
            base_url = "{base_url}"
            path = "/chat/completions"
            cost = "/usage/total_tokens"
            idempotency = {{ header = "idempotency-key", ttl = "1h" }}
            {more}
            [route.city]
            effects = "pure"
            providers = ["first", "second"]
            qualify = {{ suite = "{}", life = "1h", renew = "30m" }}
            "#,
            self.redis.url(),
            self.path("data").display(),
            self.path("suite.yaml").display(),
        );
        std::fs::write(self.path("onejob.toml"), toml).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = onejob();
        command.arg("--config").arg(self.path("onejob.toml")).arg("--json").args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    async fn run(&self, arguments: &[&str]) -> Ended {
        ended(self.command(arguments).spawn().unwrap()).await
    }

    async fn qualify(&self, more: &[&str]) -> Ended {
        self.run(&[&["qualify", "--route", "city", "--provider", "second"], more].concat()).await
    }

    /// What the provider was asked, in order.
    fn asked(&self) -> Vec<Entry> {
        self.second.ledger().entries
    }
}

async fn ended(child: Child) -> Ended {
    let output = tokio::time::timeout(DEADLINE, child.wait_with_output()).await.expect("it ends").unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// How often each run was decided, by its case, variant and number.
fn decided(report: &Value) -> BTreeMap<String, usize> {
    let mut decided = BTreeMap::new();
    for run in report["all"].as_array().unwrap().iter().filter(|run| run["verdict"] != "inconclusive") {
        *decided.entry(format!("{}, {}, {}", run["case"], run["variant"], run["number"])).or_default() += 1;
    }
    decided
}

/// Runs of each case through a gateway and what a provider can be asked are no samples of what its model answers.
#[tokio::test]
async fn the_failure_rate_is_of_the_runs_of_cases_alone() {
    let keys = SimulatedOptions { keys: Keys::Honoured, ..SimulatedOptions::default() };
    let suite = SUITE.replace("[structure, meaning]", "[meaning, gateway, capabilities]");
    let site = Site::open_with(Simulated::start(keys).await.unwrap(), &suite, "").await;
    let report = site.qualify(&[]).await.expect(0).json()["report"].clone();
    assert_eq!((report["runs"].as_u64(), report["interval"][0].as_f64()), (Some(REQUESTS), Some(0.0)));
    assert_eq!(report["gateway"], json!({ "held": 4, "failed": 0, "open": 0 }), "each case, and once more as a stream");
    assert_eq!(report["capabilities"], json!({ "held": 2, "failed": 0, "open": 0 }));
    assert!(report["says"][1].as_str().unwrap().contains("at most 3/12 = 25.0 %"), "{}", report["says"]);
}

/// More than half of every case was decided, and all of it well: it stopped all the same.
#[tokio::test]
async fn what_is_cut_short_is_no_proof_however_much_was_decided() {
    let site = Site::open().await;
    let cut = site.qualify(&["--cost-max", "18"]).await.expect(6).json();
    assert_eq!((&cut["report"]["verdict"], &cut["certificate"]), (&json!("inconclusive"), &Value::Null));
    assert_eq!(cut["report"]["says"][0], "inconclusive: it was cut short: 3 requests were not made");
    assert_eq!((site.asked().len(), decided(&cut["report"]).len()), (9, 9), "each costs 2");
    let late = site.qualify(&["--time-max", "1ms"]).await.expect(6).json();
    assert_eq!((&late["report"]["verdict"], &late["certificate"]), (&json!("inconclusive"), &Value::Null));
    assert!(late["report"]["all"].to_string().contains("not run: the time was over"));
    let whole = site.qualify(&["--cost-max", "25", "--time-max", "1h"]).await.expect(0).json();
    assert_eq!(whole["report"]["verdict"], "passed");
}

/// A limit that nothing counts towards limits nothing.
#[tokio::test]
async fn a_limit_of_cost_is_refused_where_nobody_knows_what_an_answer_costs() {
    let site = Site::open().await;
    let toml = std::fs::read_to_string(site.path("onejob.toml")).unwrap().replace("cost = \"/usage/total_tokens\"", "");
    std::fs::write(site.path("onejob.toml"), toml).unwrap();
    let refused = site.qualify(&["--cost-max", "10"]).await.expect(2);
    assert!(refused.stderr.contains("set provider.second.cost"), "{}", refused.stderr);
    assert_eq!(site.asked().len(), 0);
}

/// What a person needs to see what is wrong, and what was asked for.
#[tokio::test]
async fn a_report_shows_what_was_asked_what_was_expected_and_what_came() {
    // The cases ask the same: what varies is no parameter all the same.
    let suite =
        SUITE.replace("output.choices[0].finish_reason == 'stop'", "output.model == 'another'").replace("[d, e]", "[a, b, c]");
    let site = Site::open_with(simulated().await, &suite, "submit = { body = \"{{ with(body, model='m-1') }}\" }").await;
    let report = site.qualify(&[]).await.expect(1).json()["report"].clone();
    assert_eq!(
        report["parameters"],
        json!({ "model": "m-1", "temperature": 0 }),
        "as sent: the provider's own name for its model"
    );
    let run = &report["all"][0];
    let (asked, got) = (run["input"].as_str().unwrap(), run["got"].as_str().unwrap());
    assert!(asked.contains(r#""content":"a b c""#) && got.contains("simulated-1"), "{run}");
    let mut command = site.command(&["qualify", "--route", "city", "--provider", "second"]);
    command = {
        let mut plain = onejob();
        plain.args(command.as_std().get_args().filter(|argument| *argument != "--json"));
        plain.stdout(Stdio::piped()).stderr(Stdio::piped());
        plain
    };
    let told = ended(command.spawn().unwrap()).await.expect(1).stdout;
    for part in [
        "city, second: refused: 12 of 12 runs failed; 0 may\n",
        "each sent with {\"model\":\"m-1\",\"temperature\":0}\n",
        "one, at level meaning:\n",
        "assertion 1: does not hold: output.model == 'another'\n",
        "asked: {\"messages\":[{\"content\":\"a b c\",\"role\":\"user\"}],\"temperature\":0}\n",
        "got: \"{",
        "no certificate\n",
    ] {
        assert!(told.contains(part), "{part:?} is not in\n{told}");
    }
}

/// Nobody who waits for minutes is left without a word, nor told that a certificate is there where none is.
#[tokio::test]
async fn how_far_a_qualification_is_stands_on_stderr() {
    let site = Site::open_with(simulated().await, &SUITE.replace("[structure, meaning]", "[meaning, gateway]"), "").await;
    for json in [&["--json"][..], &[]] {
        let mut command = onejob();
        command.arg("--config").arg(site.path("onejob.toml")).args(json);
        command.args(["qualify", "--route", "city", "--provider", "second", "--dry-run"]);
        let told = ended(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()).await.expect(0);
        let lines: Vec<&str> = told.stderr.lines().filter(|line| line.starts_with("onejob: city, second: ")).collect();
        assert_eq!(lines[0], "onejob: city, second: 12 requests");
        assert!(lines.len() >= 12 && lines[1].starts_with("onejob: city, second: 2 of 12 requests, "), "{lines:?}");
        assert!(lines[lines.len() - 2].starts_with("onejob: city, second: 12 of 12 requests, "), "{lines:?}");
        assert_eq!(lines[lines.len() - 1], "onejob: city, second: through a gateway");
        if json.is_empty() {
            assert!(told.stdout.ends_with("\nno certificate: --dry-run\n"), "{}", told.stdout);
        }
    }
    assert_eq!(site.certificates().await, []);
}

/// Whom to look at, and what it said; nothing of what may be a secret.
#[tokio::test]
async fn a_run_that_was_not_answered_names_the_address_and_what_came_of_it() {
    let site = Site::open().await;
    site.second.set_behaviour("refuse_status=404").unwrap();
    let findings = async |url: &str| {
        site.write(SUITE, "", url);
        let report = site.qualify(&[]).await.expect(6).json()["report"].clone();
        report["all"][0]["findings"][0].as_str().unwrap().to_owned()
    };
    let url = site.second.base_url();
    assert_eq!(findings(&url).await, format!("POST {url}/chat/completions: refused: status 404"));
    let away = findings("http://127.0.0.1:9/v1").await;
    assert!(away.starts_with("POST http://127.0.0.1:9/v1/chat/completions: not sent: connect: "), "{away}");
    let toml = std::fs::read_to_string(site.path("onejob.toml")).unwrap().replace("/chat/completions", "/chat?key=secret");
    std::fs::write(site.path("onejob.toml"), toml).unwrap();
    let report = site.qualify(&[]).await.expect(6);
    assert!(report.stdout.contains("POST http://127.0.0.1:9/v1/chat: not sent") && !report.stdout.contains("secret"));
}

/// Killed again and again, between a case and its variant too: each is decided once, and asked once but for what was under way.
#[tokio::test]
async fn a_qualification_that_is_killed_goes_on_where_it_was_and_counts_nothing_twice() {
    let site = Site::open().await;
    let file = site.path("runs.jsonl");
    let resume = ["--resume", file.to_str().unwrap()];
    site.second.set_behaviour("delay=50ms").unwrap();
    let mut lost = 0;
    for _ in 0..3 {
        let before = site.asked().len();
        let mut killed = site.command(&[&["qualify", "--route", "city", "--provider", "second"], &resume[..]].concat());
        let mut killed = killed.spawn().unwrap();
        until("three more are asked", async || site.asked().len() >= before + 3).await;
        killed.kill().await.unwrap();
        lost = site.asked().len() - lines(&file);
    }
    assert!(lines(&file) >= 6 && lost <= 3, "{} kept, {lost} lost", lines(&file));
    site.second.set_behaviour("succeed").unwrap();
    let report = site.qualify(&resume).await.expect(0).json()["report"].clone();
    let decided = decided(&report);
    assert_eq!((decided.len() as u64, decided.values().max()), (REQUESTS, Some(&1)), "{decided:?}");
    assert_eq!(report["runs"].as_u64(), Some(REQUESTS));
    let asked = site.asked();
    assert_eq!(asked.len() as u64, REQUESTS + lost as u64, "nothing that was kept is asked again");
    let keys: BTreeSet<&str> = asked.iter().map(|entry| entry.idempotency_key.as_str()).collect();
    assert!(keys.len() == asked.len() && !keys.contains(""), "each under a key of its own: {keys:?}");
}

/// What was proved once is not proved again by what stands in a file.
#[tokio::test]
async fn a_file_of_runs_is_good_for_one_certificate() {
    let site = Site::open().await;
    let file = site.path("runs.jsonl");
    let resume = ["--resume", file.to_str().unwrap()];
    site.qualify(&[&resume[..], &["--dry-run"]].concat()).await.expect(0);
    let issued = site.qualify(&resume).await.expect(0).json();
    assert_eq!((site.asked().len() as u64, site.certificates().await.len()), (REQUESTS, 1), "a dry run uses nothing up");
    let refused = site.qualify(&resume).await.expect(2);
    let named = format!("its runs are used up: certificate {} was issued", issued["certificate"]["id"].as_str().unwrap());
    assert!(refused.stderr.contains(&named), "{}", refused.stderr);
    assert_eq!((site.asked().len() as u64, site.certificates().await.len()), (REQUESTS, 1));
    // Killed right after it was issued: the same one again, and no other.
    let whole = std::fs::read_to_string(&file).unwrap();
    let used = whole.trim_end().rfind('\n').unwrap() + 1;
    std::fs::write(&file, &whole[..used]).unwrap();
    let again = site.qualify(&resume).await.expect(0).json();
    assert_eq!((&again["certificate"]["id"], site.certificates().await.len()), (&issued["certificate"]["id"], 1));
}

/// Runs that began before somebody had doubts, or too long ago, are made again.
#[tokio::test]
async fn runs_from_before_a_revoke_or_of_another_day_are_made_again() {
    let site = Site::open().await;
    let file = site.path("runs.jsonl");
    let resume = ["--resume", file.to_str().unwrap(), "--dry-run"];
    site.qualify(&resume).await.expect(0);
    let of_today = std::fs::read_to_string(&file).unwrap();
    site.certified().await;
    site.qualify(&resume).await.expect(0);
    assert_eq!(site.asked().len(), 0, "an issue is no doubt");
    site.mark("revoke").await.expect(0);
    let made_again = site.qualify(&resume).await.expect(0);
    assert!(made_again.stderr.contains("12 of its runs prove nothing any more, and are made again"), "{}", made_again.stderr);
    assert_eq!(site.asked().len() as u64, REQUESTS);
    site.qualify(&resume).await.expect(0);
    assert_eq!(site.asked().len() as u64, REQUESTS, "those made since count");

    let other = Site { redis: Redis::start().await, ..site };
    other.write(SUITE, "", &other.second.base_url());
    let day_ms = 24 * 3600 * 1000;
    for (older_ms, again) in [(day_ms - 600_000, 0), (day_ms, REQUESTS)] {
        let aged = |line: &str| match serde_json::from_str::<Value>(line).unwrap() {
            mut line if line["run"].is_object() => {
                line["run"]["at_ms"] = json!(line["run"]["at_ms"].as_u64().unwrap() - older_ms);
                line.to_string() + "\n"
            }
            _ => line.to_owned() + "\n",
        };
        std::fs::write(&file, of_today.lines().map(aged).collect::<String>()).unwrap();
        other.second.clear_ledger();
        other.qualify(&resume).await.expect(0);
        assert_eq!(other.second.ledger().received, again, "{older_ms} ms older");
    }
}

/// Nothing is read that is no file of runs, and nothing is lost of one.
#[tokio::test]
async fn a_file_of_runs_is_refused_before_it_is_read_where_it_is_none() {
    let site = Site::open().await;
    let file = site.path("runs.jsonl");
    let refused = async |file: &Path| site.qualify(&["--dry-run", "--resume", file.to_str().unwrap()]).await.expect(2).stderr;
    site.qualify(&["--dry-run", "--resume", file.to_str().unwrap()]).await.expect(0);
    let whole = std::fs::read_to_string(&file).unwrap();
    let asked = site.asked().len();
    assert!(refused(Path::new("/dev/zero")).await.contains("it is no regular file"));
    let pipe = site.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().await.unwrap().success());
    assert!(refused(&pipe).await.contains("it is no regular file"));
    // Sparse: nobody could read it.
    std::fs::File::options().write(true).open(&file).unwrap().set_len(1 << 40).unwrap();
    assert!(refused(&file).await.contains("it has 1099511627776 bytes, and the limit is 268435456"));
    // A line in the middle, and good ones behind it.
    let mut lines: Vec<&str> = whole.lines().collect();
    for (line, told) in [("not json", "line 3 is no run"), (&"x".repeat(1 << 20), "line 3 is longer than 1048576 bytes")] {
        lines[2] = line;
        let bad = lines.join("\n") + "\n";
        std::fs::write(&file, &bad).unwrap();
        let said = refused(&file).await;
        assert!(said.contains(told), "{said}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), bad, "it is as it was");
    }
    assert_eq!(site.asked().len(), asked);
}

/// How many runs a file has, without its first line.
fn lines(file: &Path) -> usize {
    std::fs::read(file).unwrap_or_default().iter().filter(|byte| **byte == b'\n').count().saturating_sub(1)
}

#[tokio::test]
async fn a_file_of_runs_is_read_up_to_where_it_was_cut() {
    let site = Site::open_with(simulated().await, &SUITE.replace("name: two", "name: zwölf"), "").await;
    let file = site.path("runs.jsonl");
    let resume = ["--resume", file.to_str().unwrap(), "--dry-run"];
    site.qualify(&resume).await.expect(0);
    let whole = std::fs::read(&file).unwrap();
    let (last, head) = (whole[..whole.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap() + 1, 10);
    let in_a_letter = last + whole[last..].iter().position(|byte| !byte.is_ascii()).unwrap() + 1;
    assert!(std::str::from_utf8(&whole[..in_a_letter]).is_err());
    for (cut, again) in [(in_a_letter, 1), (whole.len() - 1, 1), (last, 1), (head, REQUESTS), (0, REQUESTS), (whole.len(), 0)] {
        std::fs::write(&file, &whole[..cut]).unwrap();
        site.second.clear_ledger();
        let report = site.qualify(&resume).await.expect(0).json()["report"].clone();
        assert_eq!((site.second.ledger().received, report["runs"].as_u64()), (again, Some(REQUESTS)), "cut at {cut}");
        // And what was appended is whole.
        site.qualify(&resume).await.expect(0);
        assert_eq!((site.second.ledger().received, lines(&file) as u64), (again, REQUESTS), "cut at {cut}");
    }
}

#[tokio::test]
async fn a_file_of_another_contract_or_in_another_hand_is_refused_and_left_as_it_is() {
    let site = Site::open().await;
    let file = site.path("runs.jsonl");
    let resume = ["--resume", file.to_str().unwrap()];
    site.qualify(&resume).await.expect(0);
    let before = std::fs::read(&file).unwrap();
    site.write(&SUITE.replace("runs: 3", "runs: 2"), "", &site.second.base_url());
    let refused = site.qualify(&resume).await.expect(2);
    assert!(refused.stderr.contains("of another contract, or of another version"), "{}", refused.stderr);
    assert_eq!(std::fs::read(&file).unwrap(), before);
    std::fs::write(&file, "my notes").unwrap();
    assert!(site.qualify(&resume).await.expect(2).stderr.contains("it is no resume file"));
    assert_eq!(std::fs::read(&file).unwrap(), b"my notes");
    // Two at once.
    std::fs::remove_file(&file).unwrap();
    site.second.clear_ledger();
    site.second.set_behaviour("hang").unwrap();
    let command = [&["qualify", "--route", "city", "--provider", "second"], &resume[..]].concat();
    let first = site.command(&command).spawn().unwrap();
    until("the first has asked", async || site.second.ledger().received == 1).await;
    let refused = site.qualify(&resume).await.expect(2);
    assert!(refused.stderr.contains("another qualification writes to it"), "{}", refused.stderr);
    assert_eq!(site.second.ledger().received, 1, "the second asks nothing");
    drop(first);
}

/// What a provider answers: a status, more headers (a line each), a body; by the number of the request, from 1, and its body.
type Answers = fn(u64, &str) -> (&'static str, &'static str, String);

/// A provider that executes each request, and answers as it is told to.
async fn answering(answers: Answers) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let asked_before = Arc::new(AtomicU64::new(0));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let asked_before = Arc::clone(&asked_before);
            tokio::spawn(async move {
                let (from, mut to) = stream.into_split();
                let mut lines = BufReader::new(from);
                loop {
                    let (mut line, mut length) = (String::new(), 0);
                    while line != "\r\n" {
                        line.clear();
                        if lines.read_line(&mut line).await.unwrap_or(0) == 0 {
                            return;
                        }
                        if let Some(bytes) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                            length = bytes.trim().parse().unwrap();
                        }
                    }
                    let mut asked = vec![0; length];
                    lines.read_exact(&mut asked).await.unwrap();
                    let number = asked_before.fetch_add(1, Ordering::Relaxed) + 1;
                    let (status, headers, body) = answers(number, &String::from_utf8_lossy(&asked));
                    let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Type: application/json\r\nContent-Length");
                    to.write_all(format!("{head}: {}\r\n\r\n{body}", body.len()).as_bytes()).await.unwrap();
                }
            });
        }
    });
    format!("http://{addr}")
}

/// An answer that passes, with more members.
fn good(more: &str) -> String {
    format!(r#"{{{more}"choices":[{{"finish_reason":"stop"}}]}}"#)
}

/// A provider that answers every request with the same bytes, as a model at temperature 0 may. `strict`: it says for each what it is,
/// and takes no member that it does not know.
async fn always_alike(strict: bool) -> String {
    if !strict {
        return answering(|_, _| ("200 OK", "", good(""))).await;
    }
    answering(|number, asked| match asked.contains("onejob_other") {
        true => ("400 Bad Request", "", r#"{"error":"unknown member"}"#.to_owned()),
        false => ("200 OK", "", good(&format!(r#""id":"{number}","#))),
    })
    .await
}

/// What came of each claim.
fn claims(report: &Value) -> Vec<(String, String)> {
    let runs = report["all"].as_array().unwrap().iter().filter(|run| run["level"] == "capabilities");
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    runs.map(|run| (word(&run["case"]), word(&run["verdict"]))).collect()
}

/// It refuses another request under the key, and would under any: it may never have looked at the key.
#[tokio::test]
async fn who_refuses_a_request_whatever_its_key_has_not_shown_that_it_looks_at_keys() {
    let suite = SUITE.replace("[structure, meaning]", "[meaning, capabilities]");
    let site = Site::open_with(simulated().await, &suite, "").await;
    site.write(&suite, "", &always_alike(true).await);
    let report = site.qualify(&[]).await.json()["report"].clone();
    let other = ("another request under the same key".to_owned(), "inconclusive".to_owned());
    assert!(claims(&report).contains(&other), "{report}");
    assert!(report["all"].to_string().contains("and under a new key, refused"), "{report}");
}

/// Whether it honours keys, nobody can tell: it executed the same key twice, and said the same.
#[tokio::test]
async fn equal_answers_under_one_key_prove_nothing_where_another_key_gets_them_too() {
    let suite = SUITE.replace("[structure, meaning]", "[meaning, capabilities]");
    let site = Site::open_with(simulated().await, &suite, "").await;
    site.write(&suite, "", &always_alike(false).await);
    let report = site.qualify(&[]).await.expect(6).json()["report"].clone();
    assert_eq!((&report["runs"], &report["failures"], &report["verdict"]), (&json!(12), &json!(0), &json!("inconclusive")));
    let open = |what: &str| (what.to_owned(), "inconclusive".to_owned());
    assert_eq!(claims(&report), [open("the same request under the same key"), open("another request under the same key")]);
    assert!(report["all"].to_string().contains("equal answers prove nothing"), "{report}");
    // One that executes it twice, and says so by its answers.
    site.write(&suite, "", &site.second.base_url());
    let report = site.qualify(&[]).await.expect(1).json()["report"].clone();
    assert_eq!(claims(&report)[0], ("the same request under the same key".to_owned(), "failed".to_owned()));
}

#[tokio::test]
async fn a_queue_that_knows_what_it_never_heard_of_keeps_its_word() {
    let keys = SimulatedOptions { keys: Keys::Honoured, ..SimulatedOptions::default() };
    let suite = SUITE
        .replace("[structure, meaning]", "[meaning, capabilities]")
        .replace("output.choices[0].finish_reason", "output.model");
    let suite = suite.replace("== 'stop'", "== 'simulated-1'");
    let site = Site::open_with(Simulated::start(keys).await.unwrap(), &suite, "").await;
    let toml = std::fs::read_to_string(site.path("onejob.toml")).unwrap();
    let toml = toml.replace(
        "path = \"/chat/completions\"",
        "preset = \"job-queue\"\npoll = { first = \"5ms\" }\nstatus = { missing = \"not_found\" }",
    );
    std::fs::write(site.path("onejob.toml"), toml).unwrap();
    let report = site.qualify(&[]).await.expect(0).json()["report"].clone();
    let held: Vec<String> =
        claims(&report).into_iter().filter(|(_, verdict)| verdict == "passed").map(|(what, _)| what).collect();
    let expected = [
        "the same request under the same key",
        "another request under the same key",
        "status after it is done",
        "status of an id that is none",
        "find by our key",
        "find by a key that was never sent",
        "cancel after it is done",
    ];
    assert_eq!(held, expected);
}

#[tokio::test]
async fn two_qualifications_through_a_gateway_both_call_the_provider() {
    let site = Site::open_with(simulated().await, &SUITE.replace("[structure, meaning]", "[meaning, gateway]"), "").await;
    for all in [1, 2] {
        site.qualify(&[]).await.expect(0);
        let ledger = site.second.ledger();
        let each = REQUESTS + 4;
        assert_eq!((ledger.received, ledger.executed), (all * each, all * each), "nothing that was kept is told again");
    }
    let asked = site.asked();
    let keys: BTreeSet<&str> = asked.iter().map(|entry| entry.idempotency_key.as_str()).collect();
    assert_eq!(keys.len(), asked.len());
}

impl Site {
    /// A certificate of the route's second provider, of which only a little is left.
    async fn certified(&self) -> String {
        self.certified_as("simulated-1").await
    }

    /// One that is said to be of this model.
    async fn certified_as(&self, model: &str) -> String {
        let issued = self.qualify(&[]).await.expect(0).json()["certificate"].clone();
        let id = issued["id"].as_str().unwrap().to_owned();
        let mut old = issued.clone();
        old["answered_by"] = json!(model);
        old["expires_ms"] = json!(issued["expires_ms"].as_u64().unwrap() - 40 * 60_000);
        let key = self.redis.keys().await.into_iter().find(|key| key.contains(":certificate:")).unwrap();
        let _: i64 = self.redis.command(&["HSET", &key, &format!("certificate:{id}"), &old.to_string()]).await;
        self.second.clear_ledger();
        id
    }

    /// The certificates, the newest first: the id, how it stands, and whether it is good for most of an hour.
    async fn certificates(&self) -> Vec<(String, Standing, bool)> {
        let store = self.redis.store().await;
        let kept = store.certificates("city", "second").await.unwrap();
        let lasts = |one: &Certificate| one.expires_ms > store.now_ms() + 50 * 60_000;
        kept.iter().map(|one| (one.certificate.id.clone(), one.standing, lasts(&one.certificate))).collect()
    }

    async fn serve(&self, name: &str) -> Process {
        let mut command = onejob();
        command.arg("--config").arg(self.path("onejob.toml")).arg("serve");
        Process::start(command, self.path(name)).await
    }

    async fn mark(&self, word: &str) -> Ended {
        self.run(&[word, "--route", "city", "--provider", "second", "--reason", "doubts", "--actor", "ada"]).await
    }
}

/// Without a name it would also make good what a gateway suspended for a reason of its own.
#[tokio::test]
async fn only_a_certificate_that_is_named_is_reinstated() {
    let site = Site::open().await;
    let (one, two) = (site.certified().await, site.certified().await);
    site.mark("suspend").await.expect(0);
    let refused = site.mark("reinstate").await.expect(2);
    assert!(refused.stderr.contains("reinstate needs --id"), "{}", refused.stderr);
    let standings = async || site.certificates().await.into_iter().map(|(id, standing, _)| (id, standing)).collect::<Vec<_>>();
    assert_eq!(standings().await, [(two.clone(), Standing::Suspended), (one.clone(), Standing::Suspended)]);
    let named = ["reinstate", "--route", "city", "--provider", "second", "--reason", "looked at", "--id", &two];
    assert_eq!(site.run(&named).await.expect(0).json()["count"], 1);
    assert_eq!(standings().await, [(two, Standing::Live), (one, Standing::Suspended)]);
}

/// It is live and lets nobody through: the newest of a contract decides.
#[tokio::test]
async fn a_certificate_that_a_newer_one_decides_over_is_listed_as_such() {
    let site = Site::open().await;
    let (one, two) = (site.certified().await, site.certified().await);
    let suspend = ["suspend", "--route", "city", "--provider", "second", "--reason", "doubts", "--id", &two];
    site.run(&suspend).await.expect(0);
    site.run(&["can-failover", "--route", "city", "--to", "second"]).await.expect(1);
    let listed = site.run(&["certificates"]).await.expect(0).json();
    let told = |place: usize| (listed[place]["certificate"]["id"].as_str().unwrap(), listed[place]["decides"].as_bool().unwrap());
    assert_eq!([told(0), told(1)], [(two.as_str(), true), (one.as_str(), false)]);
    let mut plain = onejob();
    plain.arg("--config").arg(site.path("onejob.toml")).arg("certificates").stdout(Stdio::piped()).stderr(Stdio::piped());
    let listed = ended(plain.spawn().unwrap()).await.expect(0).stdout;
    assert_eq!(listed.matches("live, but a newer one decides").count(), 1, "{listed}");
    assert_eq!(listed.matches("suspended: doubts").count(), 1, "{listed}");
    // What another contract's newest certificate says is said of that one.
    site.write(&SUITE.replace("runs: 3", "runs: 2"), "", &site.second.base_url());
    site.qualify(&[]).await.expect(0);
    let listed = site.run(&["certificates"]).await.expect(0).json();
    let decides: Vec<_> = listed.as_array().unwrap().iter().map(|one| one["decides"].as_bool().unwrap()).collect();
    assert_eq!(decides, [true, true, false]);
}

/// Of two gateways one renews, once.
#[tokio::test]
async fn a_certificate_is_renewed_before_it_ends_by_one_of_all_gateways() {
    let site = Site::open().await;
    let old = site.certified().await;
    site.second.set_behaviour("delay=50ms").unwrap();
    let (one, two) = tokio::join!(site.serve("one.log"), site.serve("two.log"));
    until("it is renewed", async || site.certificates().await.len() == 2).await;
    let renewed = site.certificates().await;
    assert_eq!((renewed[0].1, renewed[0].2), (Standing::Live, true));
    assert_eq!((&renewed[1].0, renewed[1].1, renewed[1].2), (&old, Standing::Live, false));
    one.terminate().await.expect(0);
    two.terminate().await.expect(0);
    assert_eq!(site.second.ledger().received, REQUESTS, "the other one left it alone");
    let events = site.redis.store().await.certificate_events("city", "second").await.unwrap();
    let events: Vec<(&str, &str)> = events.iter().map(|event| (event.event.as_str(), event.by.as_str())).collect();
    assert_eq!(events, [("issued", "operator"), ("issued", "onejob/renewal")]);
}

#[tokio::test]
async fn a_certificate_that_is_revoked_while_it_is_renewed_has_no_heir() {
    let site = Site::open().await;
    let old = site.certified().await;
    site.second.set_behaviour("delay=100ms").unwrap();
    let gateway = site.serve("serve.log").await;
    until("a renewal is under way", async || site.second.ledger().received >= 2).await;
    site.mark("revoke").await.expect(0);
    until("the renewal has ended", async || gateway.words().contains("taken back while it was renewed")).await;
    assert_eq!(site.certificates().await, [(old, Standing::Revoked, false)]);
    assert_eq!(site.second.ledger().answered, REQUESTS, "it proved everything all the same");
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn a_renewal_that_fails_suspends_and_one_that_proves_nothing_changes_nothing() {
    let strict = "'padding' not in output";
    let suite = SUITE.replace("output.choices[0].finish_reason == 'stop'", strict);
    let site = Site::open_with(simulated().await, &suite, "").await;
    let old = site.certified().await;
    site.second.set_behaviour("refuse_status=503").unwrap();
    let gateway = site.serve("away.log").await;
    until("the renewal has ended", async || gateway.words().contains("a renewal proves nothing")).await;
    assert_eq!(site.certificates().await, [(old.clone(), Standing::Live, false)]);
    // Not before a pause, on any gateway.
    let key = site.redis.keys().await.into_iter().find(|key| key.contains(":renewal:")).unwrap();
    until("the pause has begun", async || site.redis.command::<i64>(&["PTTL", &key]).await > 60_000).await;
    gateway.terminate().await.expect(0);
    let _: i64 = site.redis.command(&["DEL", &key]).await;

    site.second.set_behaviour("size=2000").unwrap();
    let gateway = site.serve("other.log").await;
    until("it is suspended", async || site.certificates().await == [(old.clone(), Standing::Suspended, false)]).await;
    let kept = site.redis.store().await.certificates("city", "second").await.unwrap();
    assert_eq!(
        (kept[0].by.as_str(), kept[0].reason.as_str()),
        ("onejob/renewal", "renewal refused: 12 of 12 runs failed; 0 may")
    );
    assert!(gateway.words().contains("a certificate is suspended"));
    gateway.terminate().await.expect(0);
}

/// It passes the suite, and is not what was certified: as any such answer of a job, this suspends.
#[tokio::test]
async fn a_renewal_that_another_model_answers_suspends() {
    let site = Site::open().await;
    let old = site.certified_as("simulated-0").await;
    let gateway = site.serve("serve.log").await;
    until("it is suspended", async || site.certificates().await == [(old.clone(), Standing::Suspended, false)]).await;
    let kept = site.redis.store().await.certificates("city", "second").await.unwrap();
    assert_eq!(kept[0].reason, "renewal refused: model \"simulated-1\" answered, \"simulated-0\" is certified");
    gateway.terminate().await.expect(0);
}
