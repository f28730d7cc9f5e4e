//! Levels of durability over a real master and real replicas: what too few have is not sent, not told and not acknowledged.

use std::time::{Duration, Instant};

use onejob::error::StoreError;
use onejob::job::Class;
use onejob::policy::Effects;
use onejob::provider::simulated::Simulated;
use onejob::runtime::Route;
use onejob::store::{Durability, Store, StoreOptions};
use serde_json::Value;

use crate::http_support::{Client, Served, route, serve_with};
use crate::support::{Redis, SOON, simulated, until};

mod levels;

/// How long replicas have for a write. A healthy one takes a millisecond; the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(1);
/// So long that twice is told from once.
const SLOW: Duration = Duration::from_secs(2);

/// A master and its replica, a provider, and gateways in front that wait for the replica.
struct Pair {
    master: Redis,
    replica: Redis,
    provider: Simulated,
}

/// A server that others can follow, and its port.
async fn leader(arguments: &[&str]) -> (Redis, String) {
    let mut all = vec!["--repl-diskless-sync-delay", "0", "--bind", "127.0.0.1"];
    all.extend_from_slice(arguments);
    let redis = Redis::start_alone(&all).await;
    let port = listen(&redis).await;
    (redis, port)
}

/// Lets others follow a server; its port.
async fn listen(redis: &Redis) -> String {
    loop {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        drop(listener);
        // Somebody else may have taken it meanwhile.
        if redis.try_command::<()>(&["CONFIG", "SET", "port", &port]).await.is_ok() {
            return port;
        }
    }
}

/// A replica that has all that its master has.
async fn follower(port: &str) -> Redis {
    follower_with(port, &[]).await
}

/// The same, with more arguments for `redis-server`.
async fn follower_with(port: &str, arguments: &[&str]) -> Redis {
    let follow = ["--replicaof", "127.0.0.1", port, "--replica-serve-stale-data", "yes"];
    let redis = Redis::start_alone(&[&follow, arguments].concat()).await;
    until("the replica follows", async || {
        let info: String = redis.command(&["INFO", "replication"]).await;
        info.contains("master_link_status:up")
    })
    .await;
    redis
}

impl Pair {
    async fn start() -> Pair {
        let (master, port) = leader(&[]).await;
        let replica = follower(&port).await;
        until("the replica has what the master writes", async || {
            let _heard: i64 = master.command(&["PUBLISH", "here", ""]).await;
            master.command::<i64>(&["WAIT", "1", "1000"]).await == 1
        })
        .await;
        Pair { master, replica, provider: simulated().await }
    }

    /// A gateway that waits for one replica.
    async fn gateway(&self) -> Served {
        self.gateway_at(Durability::Replicated(1)).await
    }

    /// The same, and gives it so long that it shows who waits twice.
    async fn slow_gateway(&self) -> Served {
        serve_with(&self.master, &self.provider, |setup| {
            (setup.store.durability, setup.store.durability_timeout) = (Durability::Replicated(1), SLOW);
            setup.routes.push(Route { effects: Effects::Pure, ..route("compute", Class::Exclusive, &["patient"]) });
        })
        .await
    }

    async fn gateway_at(&self, durability: Durability) -> Served {
        gateway(&self.master, &self.provider, durability).await
    }

    fn executed(&self) -> u64 {
        self.provider.ledger().executed
    }
}

async fn gateway(redis: &Redis, provider: &Simulated, durability: Durability) -> Served {
    serve_with(redis, provider, |setup| {
        (setup.store.durability, setup.store.durability_timeout) = (durability, TIMEOUT);
        setup.routes.push(Route { effects: Effects::Pure, ..route("compute", Class::Exclusive, &["patient"]) });
    })
    .await
}

/// The job that a problem or a document names, as it is in the store, whatever may be told of it.
async fn stored(served: &Served, id: &str) -> Value {
    let job = served.runtime.store().read_job(id.parse::<onejob::job::JobId>().unwrap().identity()).await.unwrap();
    let onejob::store::Read::Found(job) = job else { panic!("{job:?}") };
    serde_json::json!({
        "state": job.state.as_str(),
        "attempts": job.attempts.iter().map(|attempt| (attempt.state.as_str(), attempt.reason.clone())).collect::<Vec<_>>(),
    })
}

/// Submits as clients do: the same request until it is taken. A busy machine may keep a healthy replica.
async fn take(client: &Client, route: &str, key: &str) -> String {
    until("it is taken", async || client.submit(route, key, "1").await.status < 300).await;
    client.submit(route, key, "1").await.job_id()
}

/// The one job of the store.
async fn only_job(redis: &Redis) -> onejob::job::Identity {
    let keys: Vec<String> = redis.command(&["KEYS", "oj:{*}"]).await;
    let [key] = &keys[..] else { panic!("{keys:?}") };
    key.strip_prefix("oj:{").unwrap().strip_suffix('}').unwrap().parse().unwrap()
}

#[tokio::test]
async fn what_no_replica_has_is_not_sent() {
    let pair = Pair::start().await;
    let gateway = pair.gateway().await;
    let alice = gateway.client.with_token("alice");
    pair.replica.pause();
    let refused = alice.submit("print", "order-1", "1").await.problem(503, "not-durable");
    assert_eq!((refused["have"].as_u64(), refused["want"].as_u64()), (Some(0), Some(1)), "{refused}");
    assert!(refused["retryable"].as_bool().unwrap());
    let identity = only_job(&pair.master).await;
    // The claim is given back unsent, and says why.
    until("the first attempt is given back", async || {
        let read = gateway.runtime.store().read_job(identity).await.unwrap();
        let onejob::store::Read::Found(job) = read else { panic!("{read:?}") };
        let first = &job.attempts[0];
        first.state.as_str() == "aborted" && first.reason.starts_with("not_durable: 0 of 1")
    })
    .await;
    alice.submit("print", "order-1", "1").await.problem(503, "not-durable");
    assert_eq!(pair.executed(), 0, "a byte left before its write-ahead was durable");
    pair.replica.resume();
    let id = take(&alice, "print", "order-1").await;
    assert_eq!(alice.ended(&id).await["state"], "succeeded");
    assert_eq!(pair.executed(), 1);
}

/// However long it takes: what cannot be sent is not begun either, and so it is not used up.
#[tokio::test]
async fn a_job_outlasts_the_time_without_its_replica() {
    const LOOKS: usize = 3;
    let pair = Pair::start().await;
    let gateway = serve_with(&pair.master, &pair.provider, |setup| {
        (setup.store.durability, setup.store.durability_timeout) = (Durability::Replicated(1), Duration::from_millis(100));
        (setup.runtime.lease, setup.runtime.lease_margin) = (Duration::from_secs(2), Duration::from_millis(200));
    })
    .await;
    let alice = gateway.client.with_token("alice");
    pair.replica.pause();
    alice.submit("print", "order-1", "1").await.problem(503, "not-durable");
    let identity = only_job(&pair.master).await;
    let job = async || match gateway.runtime.store().read_job(identity).await.unwrap() {
        onejob::store::Read::Found(job) => job,
        other => panic!("{other:?}"),
    };
    let mut put_off = std::collections::BTreeSet::new();
    until("it is put off again and again", async || {
        let job = job().await;
        if job.reason.starts_with("not_durable: 0 of 1") {
            put_off.insert(job.next_at_ms);
        }
        assert_eq!(job.attempts.len(), 1, "{job:?}");
        put_off.len() >= LOOKS
    })
    .await;
    assert_eq!(pair.executed(), 0);
    pair.replica.resume();
    until("it goes on by itself", async || job().await.is_ended()).await;
    let id = take(&alice, "print", "order-1").await;
    assert_eq!(alice.ended(&id).await["state"], "succeeded");
    assert_eq!(pair.executed(), 1);
}

#[tokio::test]
async fn an_ending_that_no_replica_has_is_not_told() {
    let pair = Pair::start().await;
    let gateway = pair.gateway().await;
    let (alice, operator) = (gateway.client.with_token("alice"), gateway.client.with_token("operator"));
    let id = take(&alice, "outside", "order-1").await;
    let (number, token) = operator.begin_running(&id, "printer").await;
    let before = alice.get(&format!("/v1/jobs/{id}")).await.is(200);
    pair.replica.pause();
    let finish =
        format!("{{\"token\":\"{token}\",\"outcome\":\"succeeded\",\"result\":{{\"status\":200,\"body\":{{\"secret\":1}}}}}}");
    let path = format!("/v1/jobs/{id}/attempts/{number}/finish");
    operator.post(&path, &finish).await.problem(503, "not-durable");
    assert_eq!(stored(&gateway, &id).await["state"], "succeeded", "it is there");
    // Nor by a gateway whose connections have written nothing yet.
    let other = pair.gateway().await;
    let elsewhere = other.client.with_token("alice");
    for client in [&alice, &elsewhere] {
        let read = client.get(&format!("/v1/jobs/{id}")).await.is(202);
        let waited = client.send("GET", &format!("/v1/jobs/{id}"), &[("prefer", "wait=1")], "").await.is(202);
        let again = client.submit("outside", "order-1", "1").await.is(202);
        for answer in [read, waited, again] {
            let job = answer.json();
            assert_eq!(
                (&job["state"], &job["result"], &job["completed_by"]),
                (&"running".into(), &Value::Null, &Value::Null),
                "{job}"
            );
            assert_eq!(job["attempts"][0]["state"], "running", "{job}");
            assert!(job["reason"].as_str().unwrap().starts_with("not_durable: "), "{job}");
            assert!(!answer.text().contains("secret") && !answer.text().contains("succeeded"), "{}", answer.text());
            assert_eq!(answer.header("etag"), before.header("etag"), "it is the job as it was before");
        }
    }
    pair.replica.resume();
    let told = alice.ended(&id).await;
    assert!(told["state"] == "succeeded" && told["result"].to_string().contains("secret"), "{told}");
    let repeated = operator.post(&path, &finish).await.is(200).json();
    assert_eq!(repeated["status"], "repeated", "{repeated}");
}

#[tokio::test]
async fn a_result_is_kept_in_hand_until_a_replica_has_it() {
    let pair = Pair::start().await;
    let gateway = pair.gateway().await;
    let alice = gateway.client.with_token("alice");
    pair.provider.set_behaviour("delay=1s").unwrap();
    let id = take(&alice, "print", "order-1").await;
    until("the work is done", async || pair.executed() == 1).await;
    pair.replica.pause();
    until("its end is stored", async || stored(&gateway, &id).await["state"] == "succeeded").await;
    let waited = alice.send("GET", &format!("/v1/jobs/{id}"), &[("prefer", "wait=1")], "").await.is(202).json();
    assert_eq!(waited["state"], "running", "{waited}");
    // Whoever uses it in the provider's place is not told either.
    let waiting = tokio::spawn({
        let alice = alice.clone();
        let id = id.clone();
        async move { alice.ended(&id).await }
    });
    pair.replica.resume();
    let told = tokio::time::timeout(SOON, waiting).await.expect("it is told").unwrap();
    assert_eq!(told["state"], "succeeded");
    assert_eq!(pair.executed(), 1);
}

#[tokio::test]
async fn a_cancel_that_no_replica_has_is_not_acknowledged() {
    let pair = Pair::start().await;
    let gateway = pair.gateway().await;
    let alice = gateway.client.with_token("alice");
    let id = take(&alice, "outside", "order-1").await;
    pair.replica.pause();
    let path = format!("/v1/jobs/{id}/cancel");
    let headers = [("onejob-request-id", "cancel-1")];
    alice.send("POST", &path, &headers, "").await.problem(503, "not-durable");
    assert_eq!(alice.get(&format!("/v1/jobs/{id}")).await.is(202).json()["state"], "canceling");
    pair.replica.resume();
    until("the cancel is acknowledged", async || alice.send("POST", &path, &headers, "").await.status == 200).await;
    assert_eq!(alice.ended(&id).await["state"], "canceled");
}

#[tokio::test]
async fn work_without_effects_is_begun_without_a_replica() {
    let pair = Pair::start().await;
    let gateway = pair.gateway().await;
    let alice = gateway.client.with_token("alice");
    pair.replica.pause();
    let id = alice.submit("compute", "sum-1", "1").await.is(202).job_id();
    until("the work is done", async || pair.executed() == 1).await;
    until("its end is stored", async || stored(&gateway, &id).await["state"] == "succeeded").await;
    assert_eq!(alice.get(&format!("/v1/jobs/{id}")).await.is(202).json()["state"], "running");
    pair.replica.resume();
    assert_eq!(alice.ended(&id).await["state"], "succeeded");
    assert_eq!(pair.executed(), 1);
}

/// A claim takes as long as the replicas have; whoever asks to wait does not wait for that besides.
#[tokio::test]
async fn what_a_claim_takes_to_be_durable_is_part_of_the_wait() {
    let pair = Pair::start().await;
    let gateway = pair.slow_gateway().await;
    let alice = gateway.client.with_token("alice");
    pair.replica.pause();
    let began = Instant::now();
    let answer = alice.submit_with("compute", "sum-1", "{\"simulate\":\"hang\"}", &[("prefer", "wait=3")]).await.is(202);
    let took = began.elapsed();
    assert!(took >= SLOW && took < SLOW + Duration::from_secs(3), "{took:?}: {}", answer.text());
}

/// A call waits for the batch before it and for its own; whoever reads waits for one.
#[tokio::test]
async fn a_reader_waits_once_for_the_replicas_and_is_told_why_there_is_no_ending() {
    let pair = Pair::start().await;
    let gateway = pair.slow_gateway().await;
    let alice = gateway.client.with_token("alice");
    let path = format!("/v1/jobs/{}", take(&alice, "compute", "sum-1").await);
    until("it has ended", async || alice.get(&path).await.status == 200).await;
    pair.replica.pause();
    // The master has something that the replica has not.
    let _one: i64 = pair.master.command(&["INCR", "here"]).await;
    let id = alice.submit("compute", "sum-2", "1").await.is(202).job_id();
    until("its end is stored", async || stored(&gateway, &id).await["state"] == "succeeded").await;
    let path = format!("/v1/jobs/{id}");
    let before = tokio::spawn({
        let (alice, path) = (alice.clone(), path.clone());
        async move { alice.get(&path).await.is(202) }
    });
    tokio::time::sleep(SLOW / 10).await;
    let began = Instant::now();
    let answer = alice.get(&path).await.is(202);
    let took = began.elapsed();
    assert!(took < SLOW.mul_f64(1.6), "{took:?}");
    assert!(answer.json()["reason"].as_str().is_some_and(|reason| reason.starts_with("not_durable: ")), "{}", answer.text());
    before.await.unwrap();
}

#[tokio::test]
async fn many_calls_wait_for_the_replica_together() {
    const CALLS: usize = 64;
    let pair = Pair::start().await;
    let gateway = pair.gateway().await;
    let alice = gateway.client.with_token("alice");
    pair.master.command::<()>(&["CONFIG", "RESETSTAT"]).await;
    // While the first waits in vain, the others gather.
    pair.replica.pause();
    let submits = (0..CALLS).map(|number| {
        let alice = alice.clone();
        tokio::spawn(async move { alice.submit("outside", &format!("order-{number}"), "1").await.status })
    });
    let mut statuses = Vec::new();
    for submit in submits.collect::<Vec<_>>() {
        statuses.push(submit.await.unwrap());
    }
    assert!(statuses.iter().all(|status| *status == 503), "{statuses:?}");
    let waits = async || -> usize {
        let info: String = pair.master.command(&["INFO", "commandstats"]).await;
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_wait:calls=")).unwrap_or("0,");
        line.split(',').next().unwrap().parse().unwrap()
    };
    let made = waits().await;
    assert!(made < CALLS / 4, "{CALLS} calls waited {made} times");
    pair.replica.resume();
    until("all are taken", async || {
        let mut taken = 0;
        for number in 0..CALLS {
            taken += usize::from(alice.submit("outside", &format!("order-{number}"), "1").await.status == 202);
        }
        taken == CALLS
    })
    .await;
}

#[tokio::test]
async fn a_commit_lane_that_breaks_is_built_anew_and_proves_again() {
    let pair = Pair::start().await;
    let gateway = pair.gateway().await;
    let alice = gateway.client.with_token("alice");
    take(&alice, "outside", "order-0").await;
    for number in 1..6 {
        let _killed: i64 = pair.master.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
        take(&alice, "outside", &format!("order-{number}")).await;
    }
    // The next connection has written nothing, and the replica has nothing of what is written now.
    pair.replica.pause();
    let _killed: i64 = pair.master.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    let refused = alice.submit("outside", "order-7", "1").await;
    assert_eq!(refused.status, 503, "{refused:?}");
    pair.replica.resume();
}

async fn connect(redis: &Redis, durability: Durability) -> Result<Vec<String>, StoreError> {
    let options = StoreOptions { durability, durability_timeout: TIMEOUT, ..redis.options() };
    let (store, checked) = Store::connect(options).await?;
    store.close().await;
    Ok(checked.warnings)
}

/// Whether this server says when its file is on disk: Redis from 7.2 on, Valkey. Facts of such servers are left out elsewhere, and
/// facts of the others here; `make valkey-suite` runs those.
async fn has_waitaof(redis: &Redis) -> bool {
    let known: Vec<redis::Value> = redis.command(&["COMMAND", "INFO", "WAITAOF"]).await;
    let has = !matches!(known[..], [redis::Value::Nil]);
    eprintln!("this server has {} WAITAOF", if has { "a" } else { "no" });
    has
}

/// Changes a setting while the gateway runs: it notices within a second, and goes on once it is right again.
async fn noticed(redis: &Redis, alice: &Client, provider: &Simulated, id: &str, [name, wrong, right]: [&str; 3]) {
    redis.command::<()>(&["CONFIG", "SET", name, wrong]).await;
    until("it is noticed", async || {
        let answer = alice.get(&format!("/v1/jobs/{id}")).await;
        answer.status == 202 && answer.json()["state"] == "running"
    })
    .await;
    let executed = provider.ledger().executed;
    let refused = alice.submit("print", &format!("order-{name}"), "2").await.problem(503, "not-durable");
    assert!(refused["detail"].as_str().unwrap().starts_with("it is not known to be on the disk yet; "), "{refused}");
    assert_eq!(provider.ledger().executed, executed);
    redis.command::<()>(&["CONFIG", "SET", name, right]).await;
    until("it is right again", async || alice.get(&format!("/v1/jobs/{id}")).await.status == 200).await;
}

#[tokio::test]
async fn a_file_that_is_not_on_disk_first_is_not_durable() {
    let redis = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "everysec"]).await;
    if has_waitaof(&redis).await {
        return;
    }
    let refused = connect(&redis, Durability::Fsync).await.unwrap_err();
    assert!(refused.to_string().contains("appendfsync is everysec"), "{refused}");
    redis.command::<()>(&["CONFIG", "SET", "appendfsync", "always"]).await;
    assert_eq!(connect(&redis, Durability::Fsync).await.unwrap(), Vec::<String>::new());
    let provider = simulated().await;
    let gateway = gateway(&redis, &provider, Durability::Fsync).await;
    let alice: Client = gateway.client.with_token("alice");
    let id = take(&alice, "print", "order-1").await;
    assert_eq!(alice.ended(&id).await["state"], "succeeded");
    for setting in [["appendfsync", "everysec", "always"], ["no-appendfsync-on-rewrite", "yes", "no"]] {
        noticed(&redis, &alice, &provider, &id, setting).await;
    }
    redis.command::<()>(&["CONFIG", "SET", "appendonly", "no"]).await;
    let refused = connect(&redis, Durability::Fsync).await.unwrap_err();
    assert!(refused.to_string().contains("appendonly is off"), "{refused}");
}

#[tokio::test]
async fn a_file_that_is_synced_each_second_is_waited_for_where_the_server_says_when() {
    let redis = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "everysec"]).await;
    if !has_waitaof(&redis).await {
        return;
    }
    let warnings = connect(&redis, Durability::Fsync).await.unwrap();
    assert!(
        warnings.iter().any(|warning| warning.contains("redis.durability_timeout is 1000 ms: 3 s are enough")),
        "{warnings:?}"
    );
    let provider = simulated().await;
    let gateway = gateway(&redis, &provider, Durability::Fsync).await;
    let alice: Client = gateway.client.with_token("alice");
    let id = take(&alice, "print", "order-1").await;
    assert_eq!(alice.ended(&id).await["state"], "succeeded");
    let stats: String = redis.command(&["INFO", "commandstats"]).await;
    assert!(stats.contains("cmdstat_waitaof:"), "{stats}");
    // Without room for a key it waits all the same.
    redis.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    until("it is told", async || alice.get(&format!("/v1/jobs/{id}")).await.status == 200).await;
    redis.command::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    // Nobody says when that one is on disk.
    noticed(&redis, &alice, &provider, &id, ["appendfsync", "no", "everysec"]).await;
    redis.command::<()>(&["CONFIG", "SET", "appendfsync", "no"]).await;
    let refused = connect(&redis, Durability::Fsync).await.unwrap_err();
    assert!(refused.to_string().contains("appendfsync is no"), "{refused}");
    redis.command::<()>(&["CONFIG", "SET", "appendonly", "no"]).await;
    let refused = connect(&redis, Durability::Fsync).await.unwrap_err();
    assert!(refused.to_string().contains("appendonly is off"), "{refused}");
}

#[tokio::test]
async fn without_its_replicas_a_gateway_starts_and_says_so() {
    let redis = Redis::start().await;
    let warnings = connect(&redis, Durability::Replicated(2)).await.unwrap();
    assert!(warnings.iter().any(|warning| warning.contains("0 of 2 replicas are connected")), "{warnings:?}");
    assert_eq!(connect(&redis, Durability::Memory).await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn at_memory_nothing_waits_and_nothing_is_written_besides() {
    let pair = Pair::start().await;
    pair.master.command::<()>(&["CONFIG", "RESETSTAT"]).await;
    let gateway = pair.gateway_at(Durability::Memory).await;
    pair.replica.pause();
    let alice = gateway.client.with_token("alice");
    let id = take(&alice, "print", "order-1").await;
    assert_eq!(alice.ended(&id).await["state"], "succeeded");
    let info: String = pair.master.command(&["INFO", "commandstats"]).await;
    assert!(!info.contains("cmdstat_wait"), "{info}");
    pair.replica.resume();
}

/// Asks until it is not ready any more: a try of a moment ago may be what it is told.
async fn not_ready(anybody: &Client) -> Value {
    until("it is not ready", async || anybody.get("/readyz").await.status == 503).await;
    anybody.get("/readyz").await.problem(503, "not-ready")
}

#[tokio::test]
async fn a_gateway_whose_replica_hangs_is_not_ready_and_says_so_in_time() {
    let pair = Pair::start().await;
    let gateway = pair.gateway().await;
    let anybody = &gateway.client;
    until("it is ready", async || anybody.get("/readyz").await.status == 200).await;
    pair.replica.pause();
    let problem = not_ready(anybody).await;
    assert_eq!(
        (&problem["reason"], &problem["have"], &problem["want"]),
        (&"not_durable".into(), &0.into(), &1.into()),
        "{problem}"
    );
    assert!(problem["detail"].as_str().unwrap().contains("redis.durability"), "{problem}");
    // However many ask, they are told by the same try.
    let answers = futures_util::future::join_all((0..20).map(|_| anybody.get("/readyz")));
    let answers = tokio::time::timeout(SOON, answers).await.expect("they are answered");
    assert!(answers.iter().all(|answer| answer.status == 503), "{answers:?}");
    pair.replica.resume();
    until("it is ready again", async || anybody.get("/readyz").await.status == 200).await;
}

#[tokio::test]
async fn a_gateway_with_pure_work_alone_is_ready_without_its_replica() {
    let redis = Redis::start().await;
    let provider = simulated().await;
    let served = serve_with(&redis, &provider, |setup| {
        (setup.store.durability, setup.store.durability_timeout) = (Durability::Replicated(1), TIMEOUT);
        setup.routes.retain(|route| route.effects == Effects::Pure);
        setup.routes.push(Route { effects: Effects::Pure, ..route("compute", Class::Exclusive, &["patient"]) });
    })
    .await;
    for _ in 0..3 {
        served.client.get("/readyz").await.is(200);
    }
}

#[tokio::test]
async fn a_gateway_whose_file_is_not_on_disk_first_is_not_ready() {
    let redis = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await;
    let provider = simulated().await;
    let gateway = gateway(&redis, &provider, Durability::Fsync).await;
    let anybody = &gateway.client;
    until("it is ready", async || anybody.get("/readyz").await.status == 200).await;
    redis.command::<()>(&["CONFIG", "SET", "appendfsync", "no"]).await;
    assert_eq!(not_ready(anybody).await["reason"], "not_durable");
    redis.command::<()>(&["CONFIG", "SET", "appendfsync", "always"]).await;
    until("it is ready again", async || anybody.get("/readyz").await.status == 200).await;
}
