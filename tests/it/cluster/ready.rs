//! What a gateway of a cluster tells while writes at one of the masters are not as durable as they must be: to whoever asks whether it
//! is ready, to the log, to whoever counts, and what `doctor` finds meanwhile.

use onejob::fingerprint::digest;
use onejob::job::Identity;
use onejob::server::OPEN_OWNER;
use serde_json::Value;

use super::node::ThreeMasters;
use super::slot_of;
use crate::cli::run;
use crate::support::gateway::{Gateway, Site};
use crate::support::until;

async fn gateway(site: &Site, url: &str, level: &str) -> Gateway {
    let (timeout, lease) = (("redis.durability_timeout", "1s"), ("runtime.lease", "20s"));
    site.start(&[("redis.url", url), ("redis.durability", level), timeout, lease], None).await
}

async fn is_ready(gateway: &Gateway) {
    until("it is ready", async || gateway.page("/readyz").await.starts_with("HTTP/1.1 200")).await;
}

/// The lines of its log that say this of a node.
fn said(gateway: &Gateway, words: &str, node: &str) -> usize {
    gateway.words().lines().filter(|line| line.contains(words) && line.contains(node)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_whose_replica_hangs_is_named_by_readyz_the_log_and_the_doctor() {
    let cluster = ThreeMasters::start(true).await;
    let site = Site::open().await;
    let level = "{ replicated = 1 }";
    let gateway = gateway(&site, &cluster.url(), level).await;
    is_ready(&gateway).await;
    let master = cluster.masters[0].address();
    cluster.replicas[0].pause();
    let mut page = String::new();
    until("it is not ready", async || {
        page = gateway.page("/readyz").await;
        page.starts_with("HTTP/1.1 503") && page.contains("not_durable")
    })
    .await;
    let problem: Value = serde_json::from_str(page.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(
        (&problem["node"], &problem["have"], &problem["want"]),
        (&master.clone().into(), &0.into(), &1.into()),
        "{problem}"
    );
    // The replica is connected still, and counted by whoever counts.
    assert_eq!(cluster.masters[0].info("replication", "connected_slaves").await.unwrap(), "1");
    let (url, level) = (format!("redis.url={}", cluster.url()), format!("redis.durability={level}"));
    let doctor = run(&["--json", "--set", &url, "--set", &level, "doctor"]).await.expect(6).json();
    let of_durability = doctor["findings"].as_array().unwrap().iter().filter(|finding| finding["check"] == "durability");
    let (bad, good): (Vec<_>, Vec<_>) = of_durability.partition(|finding| finding["verdict"] == "bad");
    assert!(bad.len() == 1 && good.len() == 2, "{doctor:#}");
    let found = bad[0]["found"].as_str().unwrap();
    assert!(found.starts_with(&master) && found.contains("{ replicated = 1 }"), "{found}");
    assert!(found.contains("a write was tried: after 1s 0 of 1 replicas had it"), "{found}");
    // A job of that master is not taken, and that is counted.
    let at_it = |key: &String| slot_of(&Identity::of(&digest(OPEN_OWNER, key)).to_string()) <= 5460;
    let key = (0..).map(|number| format!("order-{number}")).find(at_it).unwrap();
    let refused = gateway.submit(&key, "{}").await.unwrap();
    assert_eq!((refused.status, &refused.body["title"]), (503, &"It is not as durable yet as it must be".into()), "{refused:?}");
    assert!(refused.body["detail"].as_str().unwrap().starts_with("0 of 1 replicas have it yet; "), "{refused:?}");
    assert!(gateway.count("onejob_store_errors_total{class=\"not_durable\"}").await > 0);
    let short = "writes are not durable here";
    assert_eq!(said(&gateway, short, &master), 1, "{}", gateway.words());
    assert_eq!(said(&gateway, short, &cluster.masters[1].address()), 0, "{}", gateway.words());
    cluster.replicas[0].resume();
    is_ready(&gateway).await;
    assert_eq!(said(&gateway, "writes are durable here again", &master), 1, "{}", gateway.words());
}

/// Nobody asks this gateway, and nobody submits: it looks by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_setting_that_is_wrong_from_now_on_is_said_once_with_its_node_and_that_it_is_right_again() {
    let cluster = ThreeMasters::start(false).await;
    for master in &cluster.masters {
        master.tell::<()>(&["CONFIG", "SET", "appendonly", "yes", "appendfsync", "always"]).await;
    }
    let site = Site::open().await;
    let gateway = gateway(&site, &cluster.url(), "fsync").await;
    let (wrong, node) = (&cluster.masters[1], cluster.masters[1].address());
    wrong.tell::<()>(&["CONFIG", "SET", "appendfsync", "no"]).await;
    until("its log says so", async || said(&gateway, "writes are not durable here", &node) == 1).await;
    let url = format!("redis.url={}", cluster.url());
    let level = ["--set", &url, "--set", "redis.durability=fsync"];
    let refused = run(&[&level[..], &["serve", "--listen", "127.0.0.1:0"]].concat()).await.expect(6);
    assert!(refused.stderr.contains(&format!("{node}: redis.durability is fsync, and appendfsync is no")), "{}", refused.stderr);
    wrong.tell::<()>(&["CONFIG", "SET", "appendfsync", "always"]).await;
    until("its log says that too", async || said(&gateway, "writes are durable here again", &node) == 1).await;
    // A connection that breaks is said with its node too.
    wrong.tell::<i64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    until("its log says which", async || said(&gateway, "a connection to redis is given up", &node) > 0).await;
    for other in [&cluster.masters[0], &cluster.masters[2]] {
        assert_eq!(said(&gateway, "durable here", &other.address()), 0, "{}", gateway.words());
    }
}
