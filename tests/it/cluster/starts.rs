//! A gateway that starts, and whoever looks after it, while a master is away; and what a URL is told that leads to the wrong server.

use onejob::fingerprint::digest;
use onejob::job::Identity;
use onejob::server::OPEN_OWNER;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::node::{Node, ThreeMasters};
use super::turns::places;
use crate::cli::run;
use crate::support::gateway::Site;
use crate::support::until;

/// Three masters that serve their own slots whatever becomes of the others.
async fn cluster() -> ThreeMasters {
    let cluster = ThreeMasters::start(false).await;
    for node in &cluster.masters {
        node.tell::<()>(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).await;
    }
    cluster
}

/// A key whose job and whose hint are on these masters.
fn key_at(wanted: impl Fn((usize, usize)) -> bool) -> String {
    let mut keys = (0..).map(|number| format!("key-{number}"));
    keys.find(|key| wanted(places(Identity::of(&digest(OPEN_OWNER, key))))).expect("one of so many")
}

fn finding<'a>(doctor: &'a Value, check: &str, has: &str) -> &'a Value {
    let all = doctor["findings"].as_array().unwrap();
    let found = all.iter().find(|one| one["check"] == check && one["found"].as_str().is_some_and(|text| text.contains(has)));
    found.unwrap_or_else(|| panic!("no {check} with {has:?} in {doctor:#}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_starts_while_a_master_does_not_answer_and_checks_it_when_it_does() {
    let cluster = cluster().await;
    let (away, address) = (&cluster.masters[2], cluster.masters[2].address());
    away.tell::<()>(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;
    away.signal(Signal::STOP);
    let site = Site::open().await;
    let gateway = site.start(&[("redis.url", &cluster.url())], None).await;
    let words = gateway.words();
    let warning = words.lines().find(|line| line.contains("a master does not answer"));
    assert!(warning.is_some_and(|line| line.contains(&address)), "{words}");
    let there = key_at(|(record, hint)| record != 2 && hint != 2);
    assert_eq!(gateway.submit(&there, "{}").await.map(|answer| answer.status), Some(202));
    away.signal(Signal::CONT);
    until("its log says what is wrong with it", async || {
        gateway.words().contains(&format!("redis at {address} has maxmemory-policy allkeys-lru"))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_master_is_away_lists_say_what_is_missing_doctors_tell_of_each_and_sweeps_go_on() {
    let mut cluster = cluster().await;
    let url = cluster.url();
    let site = Site::open().await;
    let first = site.start(&[("redis.url", &url)], None).await;
    let (there, gone) = (key_at(|(record, hint)| record != 2 && hint != 2), key_at(|(record, hint)| record == 2 && hint != 2));
    let mut ids = Vec::new();
    for key in [&there, &gone] {
        let answer = first.submit(key, r#"{"simulate":"hang"}"#).await.unwrap();
        ids.push(answer.body["id"].as_str().unwrap().to_owned());
        until("it runs", async || first.job(ids.last().unwrap()).await.is_some_and(|job| job.body["state"] == "running")).await;
    }
    first.signal(Signal::KILL);
    let address = cluster.masters[2].address();
    cluster.masters[2].die();

    let gateway = site.start(&[("redis.url", &url)], None).await;
    until("a lapsed lease is seen", async || gateway.job(&ids[0]).await.is_some_and(|job| job.body["state"] == "unknown")).await;
    let at = format!("http://{}", gateway.addr());
    // It becomes unknown a moment before it is in the list of those.
    until("it is listed", async || {
        let list = run(&["--json", "list", "--state", "unknown", "--gateway", &at]).await.expect(6);
        list.json()["jobs"].as_array().is_some_and(|jobs| !jobs.is_empty())
    })
    .await;
    for state in ["open", "unknown"] {
        let list = run(&["--json", "list", "--state", state, "--gateway", &at]).await.expect(6);
        let list_json = list.json();
        let listed: Vec<&Value> = list_json["jobs"].as_array().unwrap().iter().map(|job| &job["id"]).collect();
        assert_eq!((listed, &list_json["incomplete"]), (vec![&json!(ids[0])], &json!([address])), "{state}");
        assert!(list.stderr.contains("INCOMPLETE") && list.stderr.contains(&address), "{}", list.stderr);
    }

    let doctor = run(&["--json", "--set", &format!("redis.url={url}"), "doctor"]).await.expect(6).json();
    assert_eq!(finding(&doctor, "redis", &address)["verdict"], "bad");
    for node in &cluster.masters[..2] {
        assert_eq!(finding(&doctor, "version", &node.address())["verdict"], "good");
    }
    assert_eq!(finding(&doctor, "schema", "")["verdict"], "good");

    // The one that has what a start needs.
    cluster.masters[0].die();
    let doctor = run(&["--json", "--set", &format!("redis.url={url}"), "doctor"]).await.expect(6).json();
    for node in [&cluster.masters[0], &cluster.masters[2]] {
        assert_eq!(finding(&doctor, "redis", &node.address())["verdict"], "bad");
    }
    assert_eq!(finding(&doctor, "version", &cluster.masters[1].address())["verdict"], "good");
    assert_eq!(finding(&doctor, "schema", &cluster.masters[0].address())["verdict"], "bad");
    let serve = run(&["--set", &format!("redis.url={url}"), "--set", "server.listen=127.0.0.1:0", "serve"]).await.expect(6);
    assert!(serve.stderr.contains(&cluster.masters[0].address()), "{}", serve.stderr);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_url_of_one_server_is_refused_where_it_leads_to_a_node_of_a_cluster() {
    let cluster = ThreeMasters::start(false).await;
    let url = format!("redis.url=redis://{}", cluster.masters[0].address());
    let serve = run(&["--set", &url, "--set", "server.listen=127.0.0.1:0", "serve"]).await.expect(6);
    let doctor = run(&["--json", "--set", &url, "doctor"]).await.expect(6).json();
    let found = finding(&doctor, "redis", "is a node of a cluster");
    assert_eq!(found["verdict"], "bad");
    for told in [serve.stderr.as_str(), found["found"].as_str().unwrap()] {
        assert!(told.contains("write redis+cluster://"), "{told}");
    }
}

/// The words of the client library name neither a server nor what to change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_told_with_the_server_that_refuses_it_and_the_setting() {
    let master = Node::start(&["requirepass of-the-master", "maxmemory-policy noeviction"]).await;
    let at = master.address();
    let doctor = async |url: String| run(&["--json", "--set", &format!("redis.url={url}"), "doctor"]).await.expect(6).json();
    for (user, what) in [(":hunter2@", "it refuses the user and password"), ("", "it requires a password")] {
        let doctor = doctor(format!("redis://{user}{at}")).await;
        let found = finding(&doctor, "redis", what)["found"].as_str().unwrap().to_owned();
        assert!(found.contains(&at) && found.contains("redis.url") && !found.contains("hunter2"), "{found}");
    }
    let monitor = format!("sentinel monitor jobs 127.0.0.1 {} 1", master.port);
    let sentinel = Node::start(&[&monitor, "sentinel auth-pass jobs of-the-master"]).await;
    let doctor = doctor(format!("redis+sentinel://:hunter2@{}/jobs", sentinel.address())).await;
    let found = finding(&doctor, "redis", "it refuses the user and password")["found"].as_str().unwrap().to_owned();
    assert!(found.contains(&at) && !found.contains("hunter2"), "{found}");
}
