//! What somebody who watches a gateway is told of its cluster, or of its sentinels: who refuses, who must not be there, what was sent
//! on.

use onejob::error::{Refusal, StoreError};
use onejob::server::OPEN_OWNER;
use onejob::store::{RedisKind, Store, StoreOptions};

use super::node::{Node, ThreeMasters};
use super::{keys_of_one_slot, store};
use crate::support::gateway::{Gateway, Site};
use crate::support::until;

async fn gateway(site: &Site, url: &str) -> Gateway {
    site.start(&[("redis.url", url)], None).await
}

async fn is_not_ready_because(gateway: &Gateway, reason: &str) {
    until("it is not ready", async || {
        let page = gateway.page("/readyz").await;
        page.starts_with("HTTP/1.1 503") && page.contains(reason)
    })
    .await;
}

async fn is_ready(gateway: &Gateway) {
    until("it is ready", async || gateway.page("/readyz").await.starts_with("HTTP/1.1 200")).await;
}

/// It started with masters that evict nothing, and would have given jobs to one that does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_is_not_ready_while_a_master_that_joined_may_evict() {
    let mut cluster = ThreeMasters::start(false).await;
    let site = Site::open().await;
    let gateway = gateway(&site, &cluster.url()).await;
    is_ready(&gateway).await;
    cluster.take_in(Node::of_cluster_with("maxmemory-policy allkeys-lru").await).await;
    let (slot, keys) = keys_of_one_slot(OPEN_OWNER, 1);
    // Nobody is told of the new master until a command leads to it.
    cluster.move_slot(slot, &cluster.masters[0], &cluster.masters[3], async || {}).await;
    assert_eq!(gateway.submit(&keys[0], "{}").await.map(|answer| answer.status), Some(202));
    is_not_ready_because(&gateway, "EVICTION").await;
    let address = cluster.masters[3].address();
    until("its log says which", async || {
        gateway.words().contains(&format!("redis at {address} has maxmemory-policy allkeys-lru"))
    })
    .await;
    cluster.masters[3].tell::<()>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await;
    is_ready(&gateway).await;
}

/// The same of a master that sentinels name later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_is_not_ready_while_the_master_that_sentinels_name_may_evict() {
    let (old, new) = (Node::start(&["maxmemory-policy noeviction"]).await, Node::start(&["maxmemory-policy allkeys-lru"]).await);
    let sentinel = Node::start(&[&format!("sentinel monitor jobs 127.0.0.1 {} 1", old.port)]).await;
    let site = Site::open().await;
    let gateway = gateway(&site, &format!("redis+sentinel://{}/jobs", sentinel.address())).await;
    is_ready(&gateway).await;
    sentinel.tell::<()>(&["SENTINEL", "REMOVE", "jobs"]).await;
    sentinel.tell::<()>(&["SENTINEL", "MONITOR", "jobs", "127.0.0.1", &new.port.to_string(), "1"]).await;
    is_not_ready_because(&gateway, "EVICTION").await;
    new.tell::<()>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await;
    is_ready(&gateway).await;
}

/// Two masters that each say that a slot is the other's: nobody goes to and fro for ever, and that it happens is counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_two_masters_send_each_other_ends_as_a_refusal_and_is_counted() {
    let cluster = ThreeMasters::start(false).await;
    let site = Site::open().await;
    let gateway = gateway(&site, &cluster.url()).await;
    let (slot, keys) = keys_of_one_slot(OPEN_OWNER, 1);
    let (here, there) = (&cluster.masters[0], &cluster.masters[2]);
    for (node, owner) in [(here, there), (there, here)] {
        let id = owner.id().await;
        node.tell::<()>(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &id]).await;
    }
    let answer = gateway.submit(&keys[0], "{}").await.unwrap();
    assert_eq!((answer.status, answer.body["retryable"].as_bool()), (503, Some(true)), "{}", answer.body);
    assert!(gateway.count(r#"onejob_cluster_redirects_total{kind="exhausted"}"#).await > 0);
    assert!(gateway.count(r#"onejob_cluster_redirects_total{kind="moved"}"#).await >= 4);
    assert_eq!(gateway.count(r#"onejob_cluster_redirects_total{kind="ask"}"#).await, 0);
    until("the map was read again", async || {
        let mut read = 0;
        for result in ["same", "changed"] {
            read += gateway.count(&format!(r#"onejob_cluster_maps_total{{result="{result}"}}"#)).await;
        }
        read > 0
    })
    .await;
}

async fn connect(url: &str) -> Result<Store, StoreError> {
    Store::connect(StoreOptions::new(url)).await.map(|(store, _)| store)
}

/// Sentinels and their master each have a password of their own, and none of them is told the other's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_are_asked_with_their_own_password_and_the_master_with_its() {
    let master = Node::start(&["requirepass of-the-master", "maxmemory-policy noeviction"]).await;
    let monitor = format!("sentinel monitor jobs 127.0.0.1 {} 1", master.port);
    let sentinel = Node::start(&[&monitor, "sentinel auth-pass jobs of-the-master", "requirepass of-the-sentinel"]).await;
    sentinel.tell::<()>(&["ACL", "SETUSER", "watch", "on", ">of@the:watch", "+sentinel|get-master-addr-by-name"]).await;
    let at = sentinel.address();
    for query in ["sentinel_pass=of-the-sentinel", "sentinel_user=watch&sentinel_pass=of%40the%3Awatch"] {
        let store = store(&format!("redis+sentinel://:of-the-master@{at}/jobs?{query}")).await;
        assert_eq!(store.kind(), RedisKind::Sentinel { service: "jobs".to_owned() });
        store.canary().await.unwrap();
        store.close().await;
    }
    for (query, what) in [
        ("", "it requires a password (NOAUTH): sentinel_pass"),
        ("?sentinel_pass=of-the-master", "it refuses sentinel_user and sentinel_pass"),
        ("?sentinel_user=watch&sentinel_pass=of-the-sentinel", "it refuses sentinel_user and sentinel_pass"),
    ] {
        let Err(refused) = connect(&format!("redis+sentinel://:of-the-master@{at}/jobs{query}")).await else {
            panic!("{query:?} is taken")
        };
        let told = refused.to_string();
        assert!(
            told.contains(what) && told.contains("the sentinel at redis://") && told.contains(&at) && !told.contains("of-the"),
            "{query:?}: {told}"
        );
    }
    let Err(refused) = connect(&format!("redis+sentinel://{at}/jobs?sentinel_pass=of-the-sentinel")).await else {
        panic!("the master takes it without a password")
    };
    assert!(!refused.to_string().contains("of-the"), "{refused}");
}

/// It said what was refused, and not by whom.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_of_the_master_that_sentinels_name_says_which_it_is() {
    let master = Node::start(&["maxmemory-policy noeviction"]).await;
    let sentinel = Node::start(&[&format!("sentinel monitor jobs 127.0.0.1 {} 1", master.port)]).await;
    let store = store(&format!("redis+sentinel://{}/jobs", sentinel.address())).await;
    master.tell::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = store.canary().await.unwrap_err();
    assert!(matches!(refused, StoreError::NotExecuted { code: Refusal::Oom, .. }), "{refused}");
    assert!(refused.to_string().contains(&master.address()), "{refused}");
    store.close().await;
}
