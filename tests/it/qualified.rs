//! From a suite to a failover, with the real program: what is certified is covered, one byte of anything else is not.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onejob::provider::simulated::Simulated;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cli::{Ended, Process, ended, onejob};
use crate::http_support::Client;
use crate::support::{Redis, simulated, until};

const CONFIG: &str = r#"
[server]
listen = "127.0.0.1:0"
[redis]
url = "@REDIS@"
data_dir = "@DIR@/data"
response_timeout = "5s"
[provider.first]
base_url = "@FIRST@"
path = "/print"
[provider.second]
base_url = "@SECOND@"
path = "/print"
headers = { "x-tray" = "a4" }
submit = { body = "{{ with(body, user=key, job=job.id, turn=attempt) }}" }
[provider.second.prompt]
chat_template = "@DIR@/chat.jinja"
tokenizer = "@DIR@/tokenizer.json"
bos_token = "<s>"
[route.print]
effects = "pure"
providers = ["first", "second"]
attempts = 2
backoff = "10ms"
qualify = { suite = "@DIR@/suite.yaml" }
output = { schema = "@DIR@/schema.json", assertions = ["output.execution > 0"] }
[route.alone]
providers = ["first"]
"#;

const SUITE: &str = r#"
runs: 1
levels: [structure, meaning, gateway]
vary: [/pages]
parameters: { model: printer-1, copies: 1 }
cases:
  - name: one page
    values: { pages: [a, b] }
    input: { pages: "{{ pages | join(' ') }}" }
    assert: ["output.execution > 0"]
    refuse: [{ output: { execution: 0 } }]
    relations: [{ shuffle: pages, same: output.model }]
"#;

const SCHEMA: &str = r#"{"type":"object","required":["execution"]}"#;
const CHAT: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";
const TOKENIZER: &str = r#"{"version":"1.0","truncation":null,"padding":null,"normalizer":null,"decoder":null,"added_tokens":[],
"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"model":{"type":"WordLevel","vocab":{"[UNK]":0},"unk_token":"[UNK]"}}"#;

/// What a client asks for that the suite's requests cover.
const ASKED: &str = r#"{"copies":1,"model":"printer-1","pages":"c"}"#;

/// A Redis, two printers, and a directory with everything that a certificate is bound to.
struct Shop {
    redis: Redis,
    first: Simulated,
    second: Simulated,
    dir: TempDir,
}

impl Shop {
    async fn open() -> Self {
        let shop = Shop {
            redis: Redis::start().await,
            first: simulated().await,
            second: simulated().await,
            dir: tempfile::tempdir().unwrap(),
        };
        for (file, text) in [
            ("onejob.toml", CONFIG),
            ("suite.yaml", SUITE),
            ("schema.json", SCHEMA),
            ("chat.jinja", CHAT),
            ("tokenizer.json", TOKENIZER),
        ] {
            let places = [
                ("@REDIS@", shop.redis.url().to_owned()),
                ("@FIRST@", shop.first.base_url()),
                ("@SECOND@", shop.second.base_url()),
                ("@DIR@", shop.dir.path().display().to_string()),
            ];
            let text = places.iter().fold(text.to_owned(), |text, (name, value)| text.replace(name, value));
            std::fs::write(shop.file(file), text).unwrap();
        }
        shop
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Changes a file's one such place; returns what it was.
    fn change(&self, file: &str, from: &str, to: &str) -> String {
        let was = std::fs::read_to_string(self.file(file)).unwrap();
        assert_eq!(was.matches(from).count(), 1, "{file}: {from}");
        std::fs::write(self.file(file), was.replace(from, to)).unwrap();
        was
    }

    async fn run(&self, arguments: &[&str]) -> Ended {
        let mut command = onejob();
        command.arg("--json").arg("--config").arg(self.file("onejob.toml")).args(arguments);
        ended(command).await
    }

    /// Has the second printer certified; returns the certificate.
    async fn qualify(&self, more: &[&str]) -> Value {
        let arguments = [more, &["qualify", "--route", "print", "--provider", "second", "--actor", "ada"]].concat();
        let document = self.run(&arguments).await.expect(0).json();
        assert_eq!(document["report"]["verdict"], "passed", "{document}");
        document["certificate"].clone()
    }

    /// Why a job may or may not go from the first printer to the second, as the code of the program's end says it.
    async fn may(&self, code: i32, more: &[&str]) -> String {
        let asked = [&["can-failover", "--route", "print", "--from", "first", "--to", "second"], more].concat();
        let document = self.run(&asked).await.expect(code).json();
        let failovers = document["failovers"].as_array().unwrap();
        assert_eq!((failovers.len(), &failovers[0]["may"]), (1, &json!(code == 0)), "{document}");
        failovers[0]["why"].as_str().unwrap().to_owned()
    }

    async fn serve(&self) -> Process {
        let mut command = onejob();
        command.arg("--config").arg(self.file("onejob.toml")).arg("serve");
        Process::start(command, self.file("serve.stderr")).await
    }

    /// How often the second printer was called.
    fn called(&self) -> u64 {
        self.second.ledger().received
    }
}

/// Has a job done that its first provider refuses; returns how it ended.
async fn job(gateway: &Process, key: &str, input: &str) -> Value {
    let submitted = gateway.ask(&["submit", "print", input, "--key", key]).await.expect(0).json();
    let id = submitted["id"].as_str().unwrap();
    let ended = gateway.ask(&["wait", id]).await.json();
    assert!(ended["ended_ms"].is_u64(), "{ended}");
    gateway.ask(&["get", id]).await.json()
}

#[tokio::test]
async fn one_byte_of_whatever_was_proved_is_another_contract_and_undone_it_is_the_same() {
    let shop = Shop::open().await;
    assert_eq!(shop.may(1, &[]).await, "it has no certificate");
    let certificate = shop.qualify(&[]).await;
    let yes = format!("certificate {}", certificate["id"].as_str().unwrap());
    assert!(shop.may(0, &[]).await.starts_with(&yes));
    for (file, from, to, parts) in [
        ("onejob.toml", "{{ with(body", "{{with(body", "another template"),
        ("onejob.toml", "turn=attempt", "turn=key", "another template and other parameters"),
        ("onejob.toml", "tray\" = \"a4", "tray\" = \"a5", "another template"),
        ("onejob.toml", "path = \"/print\"\nheaders", "path = \"/prind\"\nheaders", "another endpoint"),
        ("onejob.toml", "output.execution > 0", "output.execution > 1", "other assertions"),
        ("onejob.toml", "\"<s>\"", "\"<S>\"", "another chat_template"),
        ("schema.json", "\"type\":", "\"type\" :", "another schema"),
        (
            "suite.yaml",
            "assert: [\"output.execution > 0",
            "assert: [\"output.execution >= 1",
            "other assertions and another suite",
        ),
        ("suite.yaml", "same: output.model", "same: output.mode", "other assertions and another suite"),
        ("suite.yaml", "printer-1", "printer-2", "another model and another suite"),
        ("suite.yaml", "copies: 1", "copies: 2", "other parameters and another suite"),
        ("suite.yaml", "runs: 1", "runs: 2", "another suite"),
        ("suite.yaml", "name: one page", "name: ona page", "another suite"),
        ("chat.jinja", "message.content }}", "message.content}}", "another chat_template"),
        ("tokenizer.json", "[UNK]\":0", "[UNK]\": 0", "another tokenizer"),
    ] {
        let was = shop.change(file, from, to);
        assert_eq!(shop.may(1, &[]).await, format!("its certificate is for {parts}"), "{file}: {to}");
        std::fs::write(shop.file(file), was).unwrap();
        assert!(shop.may(0, &[]).await.starts_with(&yes), "{file}: {to} is undone");
    }
}

#[tokio::test]
async fn a_gateway_fails_over_for_what_was_proved_and_for_nothing_else() {
    let shop = Shop::open().await;
    let certificate = shop.qualify(&[]).await;
    shop.first.set_behaviour("refuse_status=429").unwrap();
    shop.second.clear_ledger();
    let denied = async |gateway: &Process, key: &str, input: &str, parts: &str| {
        let job = job(gateway, key, input).await;
        let why = format!("; failover_denied: second: its certificate is for {parts}");
        let ends_so = |attempt: &Value| attempt["provider"] == "first" && attempt["reason"].as_str().unwrap().ends_with(&why);
        assert!(job["state"] == "failed" && job["attempts"].as_array().unwrap().iter().all(ends_so), "{key}: {job}");
        assert_eq!(shop.called(), 0, "{key}");
    };
    for (key, file, from, to, parts) in [
        ("template", "onejob.toml", "{{ with(body", "{{with(body", "another template"),
        ("schema", "schema.json", "\"type\":", "\"type\" :", "another schema"),
        ("assertion", "onejob.toml", "output.execution > 0", "output.execution > 1", "other assertions"),
        (
            "case",
            "suite.yaml",
            "assert: [\"output.execution > 0",
            "assert: [\"output.execution >= 1",
            "other assertions and another suite",
        ),
    ] {
        let was = shop.change(file, from, to);
        let gateway = shop.serve().await;
        denied(&gateway, key, ASKED, parts).await;
        gateway.terminate().await.expect(0);
        std::fs::write(shop.file(file), was).unwrap();
    }
    let gateway = shop.serve().await;
    denied(&gateway, "model", &ASKED.replace("printer-1", "printer-2"), "another model").await;
    denied(&gateway, "parameter", &ASKED.replace(":1", ":2"), "other parameters").await;
    denied(&gateway, "another-parameter", &ASKED.replace("\"copies\"", "\"duplex\":true,\"copies\""), "other parameters").await;
    let job = job(&gateway, "unchanged", ASKED).await;
    assert_eq!((&job["state"], &job["provider"], shop.called()), (&json!("succeeded"), &json!("second"), 1), "{job}");
    let attempts = job["attempts"].as_array().unwrap();
    assert!(attempts[0].get("certificate").is_none(), "{job}");
    assert_eq!(attempts[1]["certificate"], certificate["id"], "{job}");
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn a_certificate_ends_by_the_clock() {
    let shop = Shop::open().await;
    let life = ["--set", "route.print.qualify.life=2s"];
    let short = shop.qualify(&life).await;
    assert_eq!(short["expires_ms"].as_u64().unwrap() - short["issued_ms"].as_u64().unwrap(), 2_000);
    let yes = format!("certificate {}", short["id"].as_str().unwrap());
    let asked = ["can-failover", "--route", "print", "--to", "second"];
    until("the certificate has expired", async || {
        let document = shop.run(&asked).await.json();
        let why = document["failovers"][0]["why"].as_str().unwrap();
        assert!(why.starts_with(&yes) || why == "its certificate has expired", "{document}");
        why == "its certificate has expired"
    })
    .await;
    shop.may(1, &[]).await;
    shop.first.set_behaviour("refuse_status=429").unwrap();
    shop.second.clear_ledger();
    let gateway = shop.serve().await;
    let late = job(&gateway, "late", ASKED).await;
    let reason = late["attempts"][0]["reason"].as_str().unwrap();
    assert!(reason.ends_with("failover_denied: second: its certificate has expired"), "{reason}");
    assert_eq!((&late["state"], shop.called()), (&json!("failed"), 0));
    // Proved anew, it is allowed: by the gateway that said no, too.
    shop.qualify(&[]).await;
    shop.second.clear_ledger();
    assert_eq!(job(&gateway, "again", ASKED).await["state"], "succeeded");
    assert_eq!(shop.called(), 1);
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn who_asks_about_a_failover_that_cannot_be_is_told_so() {
    let shop = Shop::open().await;
    shop.qualify(&[]).await;
    let itself = shop.run(&["can-failover", "--route", "print", "--from", "first", "--to", "first"]).await.expect(2);
    assert!(itself.stderr.contains("--from and --to are both \"first\""), "{}", itself.stderr);
    let alone = shop.run(&["can-failover", "--route", "alone"]).await.expect(1).json();
    assert_eq!(alone["failovers"], json!([]));
    let mut command = onejob();
    command.arg("--config").arg(shop.file("onejob.toml")).args(["can-failover", "--route", "alone"]);
    let told = ended(command).await.expect(1).stdout;
    assert!(told.contains("route alone has one provider: there is nothing to fail over to"), "{told}");
    let all = shop.run(&["can-failover", "--route", "print"]).await.expect(0).json();
    let pairs: Vec<_> = all["failovers"].as_array().unwrap().iter().map(|one| (&one["from"], &one["to"])).collect();
    assert_eq!(pairs, [(&json!("second"), &json!("first")), (&json!("first"), &json!("second"))]);
    // About a request of one's own.
    let input = shop.file("input.json");
    let file = input.to_str().unwrap();
    std::fs::write(&input, ASKED).unwrap();
    shop.may(0, &["--input", file]).await;
    let exactly = format!("server.body_bytes_max={}", ASKED.len());
    shop.may(0, &["--input", file, "--set", &exactly]).await;
    let one_less = format!("server.body_bytes_max={}", ASKED.len() - 1);
    let large = shop.run(&["can-failover", "--route", "print", "--input", file, "--set", &one_less]).await.expect(2);
    assert!(large.stderr.contains(&format!("it has more than {} bytes, the limit", ASKED.len() - 1)), "{}", large.stderr);
    std::fs::write(&input, ASKED.replace("printer-1", "printer-2")).unwrap();
    assert_eq!(shop.may(1, &["--input", file]).await, "its certificate is for another model");
}

/// The race as operators have it: two gateways fail jobs over while somebody revokes from a third place. What is sent in the second
/// that follows is sent once and counts; after it nothing goes there, and each job has an end.
#[tokio::test]
async fn a_revoke_by_the_command_line_stops_the_failovers_of_all_gateways() {
    let shop = Shop::open().await;
    shop.qualify(&[]).await;
    shop.first.set_behaviour("refuse_status=429").unwrap();
    shop.second.clear_ledger();
    let gateways = [shop.serve().await, shop.serve().await];
    let stop = AtomicBool::new(false);
    let client = async |place: usize| {
        let client = Client::new(gateways[place].url.trim_start_matches("http://").trim_end_matches('/').parse().unwrap());
        let mut jobs = Vec::new();
        while !stop.load(Ordering::SeqCst) {
            let key = format!("{place}-{}", jobs.len());
            jobs.push(client.submit("print", &key, ASKED).await.job_id());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        (client, jobs)
    };
    let operator = async {
        until("failovers happen", async || shop.called() >= 20).await;
        shop.run(&["revoke", "--route", "print", "--provider", "second", "--reason", "it lies"]).await.expect(0);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let called = shop.called();
        let before = shop.first.ledger().received;
        until("more jobs have failed at the first", async || shop.first.ledger().received > before + 20).await;
        stop.store(true, Ordering::SeqCst);
        called
    };
    let (one, two, called) = tokio::join!(client(0), client(1), operator);
    let mut kept = 0;
    for (client, id) in [&one, &two].into_iter().flat_map(|(client, jobs)| jobs.iter().map(move |id| (client, id))) {
        let job = client.ended(id).await;
        let executed = shop.second.ledger_of(id).executed;
        assert_eq!(executed, u64::from(job["state"] == "succeeded"), "{job}");
        if job["state"] == "failed" {
            kept += 1;
            assert!(job["reason"].as_str().unwrap().contains("its certificate is revoked: it lies"), "{job}");
        }
    }
    assert_eq!(called, shop.called());
    assert!(kept > 0);
    for gateway in gateways {
        gateway.terminate().await.expect(0);
    }
}

/// A misspelt name is told, and what is kept is told and marked all the same: the configuration may have lost it meanwhile.
#[tokio::test]
async fn names_that_the_configuration_does_not_know_are_told_with_those_it_knows() {
    let shop = Shop::open().await;
    shop.qualify(&[]).await;
    let colour = "the configuration has no route \"colour\": alone, print";
    for command in [&["can-failover"][..], &["qualify", "--provider", "second"]] {
        let refused = shop.run(&[command, &["--route", "colour"]].concat()).await.expect(2);
        assert!(refused.stderr.contains(colour), "{}", refused.stderr);
    }
    let listed = shop.run(&["certificates", "--route", "colour"]).await.expect(0);
    assert!(listed.json() == json!([]) && listed.stderr.contains(colour), "{}", listed.stderr);
    let qwn = "route print has no provider \"qwn\" in the configuration: first, second";
    let suspend = |provider| ["suspend", "--route", "print", "--provider", provider, "--reason", "doubts", "--actor", "ada"];
    let refused = shop.run(&suspend("qwn")).await.expect(5);
    assert!(refused.stderr.contains(qwn), "{}", refused.stderr);
    shop.change("onejob.toml", "providers = [\"first\", \"second\"]", "providers = [\"first\"]");
    let marked = shop.run(&suspend("second")).await.expect(0);
    assert_eq!(marked.json()["count"], 1);
    assert!(marked.stderr.contains("route print has no provider \"second\" in the configuration: first"), "{}", marked.stderr);
}

#[tokio::test]
async fn an_input_that_cannot_be_sent_is_told_with_its_file_and_provider() {
    let shop = Shop::open().await;
    let input = shop.file("input.json");
    std::fs::write(&input, "two pages, please").unwrap();
    let file = input.to_str().unwrap();
    let refused = shop.run(&["can-failover", "--route", "print", "--input", file]).await.expect(2);
    assert!(refused.stderr.contains(&format!("{file}: provider second cannot be sent that: ")), "{}", refused.stderr);
}

/// A question about what nobody could ask is none.
#[tokio::test]
async fn an_input_that_its_route_refuses_is_no_question() {
    let shop = Shop::open().await;
    shop.change("onejob.toml", "[route.alone]", "input = { assertions = [\"input.copies < 3\"] }\n[route.alone]");
    shop.qualify(&[]).await;
    let input = shop.file("input.json");
    let file = input.to_str().unwrap();
    std::fs::write(&input, ASKED).unwrap();
    shop.may(0, &["--input", file]).await;
    std::fs::write(&input, ASKED.replace(":1", ":3")).unwrap();
    let refused = shop.run(&["can-failover", "--route", "print", "--input", file]).await.expect(2);
    let said = format!("{file}: route print refuses it, and so does a gateway (422 input-invalid): ");
    assert!(refused.stderr.contains(&said), "{}", refused.stderr);
}
