//! `onejob bench`: it measures what it says, and leaves a Redis as it found it.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::support::{Redis, standalone_only, until};

/// Longer than it takes, also on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

async fn bench(arguments: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onejob"));
    command.args(["--json", "bench", "--ops", "100", "--seconds", "30", "--tasks", "8"]).args(arguments);
    command.args(["--set", "redis.connect_timeout=10s", "--set", "redis.response_timeout=2s"]);
    command.env_remove("ONEJOB_CONFIG").stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(DEADLINE, command.output()).await.expect("it ends").unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"))
}

#[tokio::test]
async fn a_benchmark_measures_every_operation_and_leaves_a_redis_as_it_was() {
    let redis = Redis::start().await;
    redis.command::<String>(&["SET", "somebody:else", "kept"]).await;
    let url = format!("redis.url={}", redis.url());
    let measured = bench(&["--set", &url]).await;
    let rows = measured["measurements"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    for row in rows {
        assert_eq!(row["operations"], 100, "{row}");
        assert!(row["operations_a_second"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["p99_ms"].as_f64() >= row["p50_ms"].as_f64(), "{row}");
    }
    assert_eq!(redis.command::<Vec<String>>(&["KEYS", "*"]).await, ["somebody:else"]);
}

/// Whoever cannot take away what was made says what it is called.
#[tokio::test]
async fn a_benchmark_that_cannot_tidy_up_names_its_keys() {
    let redis = Redis::start().await;
    let () = redis.command(&["ACL", "SETUSER", "default", "-unlink"]).await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_onejob"));
    command.args(["bench", "--ops", "10", "--tasks", "2", "--set", &format!("redis.url={}", redis.url())]);
    command.env_remove("ONEJOB_CONFIG").stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(DEADLINE, command.output()).await.expect("it ends").unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{told}");
    let keys = redis.keys().await;
    let meta = keys.iter().find(|key| key.ends_with(":meta")).unwrap();
    assert!(told.contains(meta.trim_end_matches(":meta")), "{meta}: {told}");
}

/// After a failover, say: what was made is taken away a little later.
#[tokio::test]
async fn a_benchmark_whose_redis_fails_meanwhile_still_tidies_up() {
    if standalone_only("REPLICAOF is not for nodes of a cluster") {
        return;
    }
    let redis = Redis::start().await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_onejob"));
    command.args(["bench", "--ops", "1000000", "--seconds", "60", "--tasks", "2"]);
    command.args(["--set", &format!("redis.url={}", redis.url())]);
    command.env_remove("ONEJOB_CONFIG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let mut bench = command.spawn().unwrap();
    until("it has begun", async || redis.command::<u64>(&["DBSIZE"]).await > 20).await;
    let () = redis.command(&["REPLICAOF", "127.0.0.1", "1"]).await;
    until("its tidying is refused", async || {
        let info: String = redis.command(&["INFO", "commandstats"]).await;
        info.lines().any(|line| line.starts_with("cmdstat_unlink:") && !line.contains("rejected_calls=0,"))
    })
    .await;
    let () = redis.command(&["REPLICAOF", "NO", "ONE"]).await;
    let status = tokio::time::timeout(DEADLINE, bench.wait()).await.expect("it ends").unwrap();
    assert_eq!(status.code(), Some(6));
    assert_eq!(redis.keys().await, Vec::<String>::new());
}

#[tokio::test]
async fn without_a_configured_redis_a_benchmark_starts_one_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let data_dir = format!("redis.data_dir={}", directory.path().join("data").display());
    assert_eq!(bench(&["--set", &data_dir]).await["redis"], "a private redis");
    assert!(!directory.path().join("data").exists(), "a gateway's own data directory is left alone");
}

#[tokio::test]
async fn a_benchmark_takes_no_more_than_its_limits() {
    for (flag, value, limit) in [("--ops", "1000001", "1000000"), ("--tasks", "10001", "10000"), ("--seconds", "601", "600")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_onejob"));
        command.args(["bench", flag, value]).env_remove("ONEJOB_CONFIG").stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(DEADLINE, command.output()).await.expect("it ends").unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flag}: {told}");
        assert!([flag, value, limit].iter().all(|word| told.contains(word)), "{flag}: {told}");
    }
}
