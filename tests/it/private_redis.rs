//! A Redis of the gateway's own: its data survives whatever ends it, and a data directory is used by one at a time.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use onejob::store::private_redis::{PrivateRedis, PrivateRedisError, PrivateRedisOptions, Syncs};
use redis::AsyncCommands as _;

use crate::support::until;

fn on(data_dir: &Path) -> PrivateRedisOptions {
    PrivateRedisOptions {
        data_dir: data_dir.to_owned(),
        server: Some(crate::support::server::program()),
        syncs: Syncs::EverySecond,
    }
}

async fn start(data_dir: &Path) -> PrivateRedis {
    PrivateRedis::start(on(data_dir)).await.unwrap()
}

async fn connect(url: &str) -> redis::RedisResult<redis::aio::MultiplexedConnection> {
    redis::Client::open(url)?.get_multiplexed_async_connection().await
}

async fn set(redis: &PrivateRedis, key: &str, value: &str) {
    let () = connect(redis.url()).await.unwrap().set(key, value).await.unwrap();
}

async fn get(redis: &PrivateRedis, key: &str) -> Option<String> {
    connect(redis.url()).await.unwrap().get(key).await.unwrap()
}

fn kill_9(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

fn is_gone(pid: u32) -> bool {
    // A zombie has ended too; it only waits for its parent.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

#[tokio::test]
async fn data_survives_a_stop_and_a_start() {
    let home = tempfile::tempdir().unwrap();
    let data_dir = home.path().join("deep/data");
    let redis = start(&data_dir).await;
    let (url, pid) = (redis.url().to_owned(), redis.pid().unwrap());
    assert_eq!(url, format!("redis+unix://{}/redis.sock", data_dir.canonicalize().unwrap().display()));
    assert_eq!(std::fs::metadata(&data_dir).unwrap().permissions().mode() & 0o777, 0o700);
    set(&redis, "oj:1", "kept").await;
    redis.stop().await;
    assert!(is_gone(pid));
    assert!(connect(&url).await.is_err());

    let redis = start(&data_dir).await;
    assert_eq!(redis.url(), url);
    assert_eq!(get(&redis, "oj:1").await.as_deref(), Some("kept"));
    redis.stop().await;
}

#[tokio::test]
async fn it_never_evicts_appends_to_a_file_and_has_no_port() {
    let home = tempfile::tempdir().unwrap();
    let redis = start(home.path()).await;
    let mut connection = connect(redis.url()).await.unwrap();
    for (name, value) in
        [("maxmemory-policy", "noeviction"), ("appendonly", "yes"), ("appendfsync", "everysec"), ("port", "0"), ("save", "")]
    {
        let found: Vec<String> = redis::cmd("CONFIG").arg("GET").arg(name).query_async(&mut connection).await.unwrap();
        assert_eq!(found, [name, value]);
    }
    redis.stop().await;
}

/// Ctrl-C in a terminal goes to the gateway's whole process group, and the gateway needs Redis until it has drained.
#[tokio::test]
async fn a_signal_for_the_gateways_group_does_not_reach_the_server() {
    let home = tempfile::tempdir().unwrap();
    let redis = start(home.path()).await;
    let pid = rustix::process::Pid::from_raw(redis.pid().unwrap().try_into().unwrap()).unwrap();
    assert_eq!(rustix::process::getpgid(Some(pid)).unwrap(), pid);
    redis.stop().await;
}

#[tokio::test]
async fn a_killed_server_comes_back_with_its_data_at_the_same_address() {
    let home = tempfile::tempdir().unwrap();
    let redis = start(home.path()).await;
    let url = redis.url().to_owned();
    for round in 0..3 {
        let pid = redis.pid().unwrap();
        set(&redis, "oj:1", &format!("round {round}")).await;
        kill_9(pid);
        until("another server", async || redis.pid().is_some_and(|now| now != pid)).await;
        assert_eq!(get(&redis, "oj:1").await, Some(format!("round {round}")));
        assert_eq!(redis.url(), url);
    }
    redis.stop().await;
}

#[tokio::test]
async fn a_stop_while_the_server_is_dead_ends_and_frees_the_data_directory() {
    let home = tempfile::tempdir().unwrap();
    let redis = start(home.path()).await;
    let pid = redis.pid().unwrap();
    kill_9(pid);
    until("its death", async || is_gone(pid)).await;
    redis.stop().await;
    start(home.path()).await.stop().await;
}

#[tokio::test]
async fn a_data_directory_is_used_by_one_at_a_time() {
    let home = tempfile::tempdir().unwrap();
    let redis = start(home.path()).await;
    let error = PrivateRedis::start(on(home.path())).await.unwrap_err();
    assert!(matches!(error, PrivateRedisError::InUse { pid, .. } if pid == std::process::id()), "{error}");
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    set(&redis, "oj:1", "undisturbed").await;
    assert_eq!(get(&redis, "oj:1").await.as_deref(), Some("undisturbed"));
    redis.stop().await;
    start(home.path()).await.stop().await;
}

#[tokio::test]
async fn of_two_that_start_at_once_one_wins() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = tokio::join!(PrivateRedis::start(on(home.path())), PrivateRedis::start(on(home.path())));
    let (winner, loser) = match (one, other) {
        (Ok(winner), Err(loser)) | (Err(loser), Ok(winner)) => (winner, loser),
        (one, other) => panic!("{one:?} {other:?}"),
    };
    assert!(matches!(loser, PrivateRedisError::InUse { .. }), "{loser}");
    set(&winner, "oj:1", "x").await;
    winner.stop().await;
}

#[tokio::test]
async fn dropped_it_is_killed_and_loses_nothing_that_it_answered() {
    let home = tempfile::tempdir().unwrap();
    let redis = start(home.path()).await;
    let pid = redis.pid().unwrap();
    set(&redis, "oj:1", "kept").await;
    drop(redis);
    until("its death", async || is_gone(pid)).await;
    let redis = start(home.path()).await;
    assert_eq!(get(&redis, "oj:1").await.as_deref(), Some("kept"));
    redis.stop().await;
}

#[tokio::test]
async fn a_path_too_long_for_a_socket_works_and_leaves_nothing_behind() {
    let home = tempfile::tempdir().unwrap();
    let data_dir = home.path().join("d".repeat(100)).join("\u{e9} \"quoted\" %20");
    let redis = start(&data_dir).await;
    let socket = PathBuf::from(redis.url().strip_prefix("redis+unix://").unwrap());
    assert!(socket.as_os_str().len() <= 107 && socket.exists(), "{}", socket.display());
    let short_dir = socket.parent().unwrap().to_owned();
    assert_eq!(std::fs::metadata(&short_dir).unwrap().permissions().mode() & 0o777, 0o700);
    set(&redis, "oj:1", "kept").await;
    redis.stop().await;
    assert!(!short_dir.exists());
    assert!(data_dir.join("appendonlydir").is_dir());
    let redis = start(&data_dir).await;
    assert_eq!(get(&redis, "oj:1").await.as_deref(), Some("kept"));
    redis.stop().await;
}

#[tokio::test]
async fn a_path_with_spaces_and_signs_is_a_url_that_clients_understand() {
    let home = tempfile::tempdir().unwrap();
    let redis = start(&home.path().join("a b%20?c=\u{e9}#")).await;
    set(&redis, "oj:1", "kept").await;
    assert_eq!(get(&redis, "oj:1").await.as_deref(), Some("kept"));
    redis.stop().await;
}

#[tokio::test]
async fn without_a_redis_server_it_says_how_to_install_one() {
    let home = tempfile::tempdir().unwrap();
    let missing = home.path().join("no/redis-server");
    let options =
        PrivateRedisOptions { data_dir: home.path().join("data"), server: Some(missing.clone()), syncs: Syncs::EverySecond };
    let error = PrivateRedis::start(options).await.unwrap_err().to_string();
    assert!(error.contains("apt-get install redis-server") && error.contains(missing.to_str().unwrap()), "{error}");
    assert_eq!(error.lines().count(), 1);
}

/// A program in place of `redis-server`.
fn program(home: &Path, script: &str) -> PathBuf {
    let path = home.join("redis-server");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

async fn refusal(home: &Path, script: &str) -> PrivateRedisError {
    let options =
        PrivateRedisOptions { data_dir: home.join("data"), server: Some(program(home, script)), syncs: Syncs::EverySecond };
    PrivateRedis::start(options).await.unwrap_err()
}

#[tokio::test]
async fn a_redis_that_is_too_old_is_refused_by_its_version() {
    let home = tempfile::tempdir().unwrap();
    let error = refusal(home.path(), "echo 'Redis server v=6.2.14 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64'").await;
    assert!(matches!(&error, PrivateRedisError::TooOld { version, .. } if version == "6.2.14"), "{error}");
    assert!(error.to_string().contains("7.0 or newer"), "{error}");
    let error = refusal(home.path(), "echo 'a kettle'").await;
    assert!(matches!(error, PrivateRedisError::NoVersion { .. }), "{error}");
}

#[tokio::test]
async fn a_server_that_ends_at_its_start_is_told_with_its_log() {
    let home = tempfile::tempdir().unwrap();
    start(home.path()).await.stop().await;
    // The real server refuses data that it cannot read.
    let manifest = home.path().join("appendonlydir/appendonly.aof.manifest");
    std::fs::write(manifest, "nonsense\n").unwrap();
    let error = PrivateRedis::start(on(home.path())).await.unwrap_err();
    assert!(matches!(error, PrivateRedisError::Ended { .. }), "{error}");
    assert!(error.to_string().contains("AOF manifest"), "{error}");
}

/// What makes the next test, started again by itself, the gateway that it kills.
const GATEWAY_OF: &str = "ONEJOB_TEST_GATEWAY_OF";

async fn be_the_gateway(data_dir: &Path) -> ! {
    let redis = start(data_dir).await;
    set(&redis, "oj:1", "kept").await;
    println!("\nserver {}", redis.pid().unwrap());
    std::future::pending().await
}

/// The reason why the server holds the lock too: a second server on the same files would ruin them.
#[tokio::test]
async fn a_server_that_outlived_its_killed_gateway_is_replaced_with_its_data() {
    #[expect(clippy::disallowed_methods, reason = "how the two processes of this test talk")]
    if let Some(data_dir) = std::env::var_os(GATEWAY_OF) {
        be_the_gateway(Path::new(&data_dir)).await;
    }
    for name in ["data".to_owned(), "d".repeat(110)] {
        let home = tempfile::tempdir().unwrap();
        let data_dir = home.path().join(name);
        let mut gateway = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "private_redis::a_server_that_outlived_its_killed_gateway_is_replaced_with_its_data",
                "--nocapture",
            ])
            .env(GATEWAY_OF, &data_dir)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(gateway.stdout.take().unwrap()).lines().map_while(Result::ok);
        let orphan: u32 = lines.into_iter().find_map(|line| line.strip_prefix("server ")?.parse().ok()).unwrap();

        let error = PrivateRedis::start(on(&data_dir)).await.unwrap_err();
        assert!(matches!(error, PrivateRedisError::InUse { pid, .. } if pid == gateway.id()), "{error}");
        gateway.kill().unwrap();
        gateway.wait().unwrap();
        assert!(!is_gone(orphan));

        let redis = start(&data_dir).await;
        assert!(is_gone(orphan));
        assert_ne!(redis.pid(), Some(orphan));
        assert_eq!(get(&redis, "oj:1").await.as_deref(), Some("kept"));
        redis.stop().await;
    }
}
