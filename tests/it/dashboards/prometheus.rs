//! A private Prometheus that scrapes one gateway, and its tools.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

use crate::http_support::Client;
use crate::support::until;

const MISSING: &str = "install it, for example with `apt-get install prometheus`";

/// Runs a program to its end in the project's directory; fails with all that it said, unless it succeeded.
async fn run(program: &str, arguments: &[&str], stdin: &str, missing: &str) -> String {
    let mut child = Command::new(program)
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap_or_else(|error| panic!("cannot run {program} ({error}); {missing}"));
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{said}", output.status);
    said
}

/// Asks Prometheus' own tool; returns all that it said.
pub(super) async fn promtool(arguments: &[&str], stdin: &str) -> String {
    run("promtool", arguments, stdin, MISSING).await
}

/// What Python's client library reads from a scrape, one `name kind series` a line. Debian's python3, whatever else is on the path.
pub(super) async fn parsed(scrape: &str) -> String {
    let code = "import sys\n\
        from prometheus_client.parser import text_string_to_metric_families as families\n\
        for f in families(sys.stdin.read()): print(f.name, f.type, len(f.samples), sep=' ')";
    run("/usr/bin/python3", &["-c", code], scrape, "`apt-get install python3-prometheus-client` brings what this needs").await
}

/// A running Prometheus; killed on drop.
pub(super) struct Prometheus {
    client: Client,
    _child: Child,
    _directory: tempfile::TempDir,
}

impl Prometheus {
    /// Starts one that scrapes a gateway every second as job `onejob`, and evaluates the alerts as often.
    pub(super) async fn start(gateway: SocketAddr) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards/alerts.yml");
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\n\
             rule_files: [{rules:?}]\n\
             scrape_configs: [{{ job_name: onejob, static_configs: [{{ targets: [\"{gateway}\"] }}] }}]\n"
        );
        let (config_file, log) = (directory.path().join("prometheus.yml"), directory.path().join("prometheus.log"));
        std::fs::write(&config_file, config).unwrap();
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config_file.display()))
            .arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()))
            .args(["--web.listen-address=127.0.0.1:0", "--log.format=json"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run prometheus ({error}); {MISSING}"));
        let said = || std::fs::read_to_string(&log).unwrap();
        let listens = || {
            let lines = said();
            let line = lines.lines().find(|line| line.contains(r#""msg":"Listening on""#))?.to_owned();
            serde_json::from_str::<Value>(&line).unwrap()["address"].as_str().unwrap().parse().ok()
        };
        until("prometheus says where it listens", async || listens().is_some()).await;
        let client = Client::new(listens().unwrap());
        until("prometheus is ready", async || client.get("/-/ready").await.status == 200).await;
        Prometheus { client, _child: child, _directory: directory }
    }

    /// Asks its HTTP API; returns the data.
    pub(super) async fn ask(&self, path: &str, parameters: &[(&str, &str)]) -> Value {
        let pairs: Vec<_> = parameters.iter().map(|(name, value)| format!("{}={}", encoded(name), encoded(value))).collect();
        let path = format!("/api/v1/{path}?{}", pairs.join("&"));
        let answer = self.client.get(&path).await;
        let document = answer.json();
        assert_eq!(document["status"], "success", "{parameters:?}: {document}");
        document["data"].clone()
    }

    /// The values that a query has now, by their labels.
    pub(super) async fn values(&self, query: &str) -> Vec<(Value, f64)> {
        let data = self.ask("query", &[("query", query)]).await;
        let value = |series: &Value| (series["metric"].clone(), series["value"][1].as_str().unwrap().parse().unwrap());
        data["result"].as_array().unwrap().iter().map(value).collect()
    }
}

fn encoded(text: &str) -> String {
    let byte = |byte: u8| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(byte).collect()
}
