//! A real gateway, a real Redis, a real provider, a real Prometheus: what the board's queries answer, and how many series there are.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use onejob::metrics::{ALL, Kind, SECONDS_BUCKETS};
use serde_json::Value;

use super::prometheus::{Prometheus, parsed, promtool};
use super::{alerts, board, queries, text};
use crate::cli::{Process, onejob};
use crate::http_support::Client;
use crate::support::{Redis, until, until_within};

/// Providers for every outcome, and routes for every way to meet them.
const SHOP: &str = r#"
[server]
listen = "127.0.0.1:0"
trusted_owner_header = "x-owner"
[owner.operator]
tokens_sha256 = ["OPERATOR"]
roles = ["operate"]
[runtime]
sweep = "200ms"
[provider.laser]
adapter = "simulated"
breaker = { consecutive = 50 }
[provider.hasty]
adapter = "simulated"
limits = { fleet_in_flight = 100 }
timeouts = { first_byte = "300ms" }
[provider.slow]
adapter = "simulated"
behaviour = "queue=1500ms,refuse_status=429"
[provider.nowhere]
base_url = "http://127.0.0.1:9"
[route.print]
providers = ["laser"]
[route.hasty]
providers = ["hasty"]
[route.guarded]
providers = ["slow", "laser"]
attempts = 2
backoff = "100ms"
[route.nowhere]
providers = ["nowhere"]
deadline = "2s"
backoff = "10ms"
[route.outside]
executors = "outside"
[stream.clicks]
fields = ["user"]
"#;
/// How long the slow provider thinks before it refuses.
const SLOW: Duration = Duration::from_millis(1500);
/// Submits at once while series are counted.
const AT_ONCE: usize = 32;

/// A gateway's process, and the Redis that it stands on.
struct Shop {
    gateway: Process,
    addr: SocketAddr,
    client: Client,
    redis: Redis,
    _directory: tempfile::TempDir,
}

impl Shop {
    /// With a store that a busy machine does not make impatient.
    async fn open() -> Self {
        Shop::open_with("redis.response_timeout=5s").await
    }

    async fn open_with(setting: &str) -> Self {
        let (redis, directory) = (Redis::start().await, tempfile::tempdir().unwrap());
        let config = directory.path().join("onejob.toml");
        let token = onejob::config::token_sha256("operator");
        std::fs::write(&config, SHOP.replace("OPERATOR", &token)).unwrap();
        let mut command = onejob();
        command.arg("--config").arg(&config).args(["--set", setting, "serve", "--redis", redis.url()]);
        let gateway = Process::start(command, directory.path().join("serve.stderr")).await;
        let addr = gateway.url.strip_prefix("http://").unwrap().parse().unwrap();
        Shop { gateway, addr, client: Client::new(addr), redis, _directory: directory }
    }

    async fn submit(&self, owner: &str, route: &str, key: &str, input: &str, status: u16) -> Value {
        let headers = [("x-owner", owner), ("prefer", "wait=20")];
        self.client.submit_with(route, key, input, &headers).await.is(status).json()
    }

    /// Claims a job that nobody here works on.
    async fn claim(&self, owner: &str, key: &str) -> String {
        let answer = self.client.submit_with("outside", key, "{}", &[("x-owner", owner)]).await;
        answer.is(202).job_id()
    }

    /// Says how an attempt went that an operator drives.
    async fn report(&self, id: &str, token: &str, outcome: &str) -> Value {
        let body = format!(r#"{{"token":"{token}",{outcome}}}"#);
        self.operator().post(&format!("/v1/jobs/{id}/attempts/1/finish"), &body).await.is(200).json()
    }

    fn operator(&self) -> Client {
        self.client.with_token("operator")
    }

    async fn scrape(&self) -> String {
        self.client.get("/metrics").await.is(200).text()
    }

    /// What a series says.
    async fn says(&self, series: &str) -> f64 {
        let scrape = self.scrape().await;
        let line = scrape.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{series} is not in\n{scrape}")).parse().unwrap()
    }

    async fn close(self) {
        self.gateway.terminate().await.expect(0);
    }
}

fn series(scrape: &str) -> usize {
    scrape.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).count()
}

/// A little of everything that happens in an ordinary day.
async fn load(shop: &Shop) {
    for place in 0..10 {
        assert_eq!(shop.submit("alice", "print", &format!("order-{place}"), "{}", 200).await["state"], "succeeded");
    }
    shop.submit("alice", "print", "order-0", "{}", 200).await;
    shop.submit("alice", "print", "order-0", r#"{"copies":2}"#, 409).await;
    assert_eq!(shop.submit("alice", "print", "jammed", r#"{"simulate":"jam"}"#, 200).await["state"], "failed");
    until("a call that hangs is unknown", async || {
        let headers = [("x-owner", "alice"), ("prefer", "wait=1")];
        let lost = shop.client.submit_with("hasty", "lost", r#"{"simulate":"hang"}"#, &headers).await;
        lost.is(202).json()["state"] == "unknown"
    })
    .await;
    assert_eq!(shop.submit("alice", "nowhere", "unreachable", "{}", 200).await["state"], "failed");

    let canceled = shop.claim("bob", "canceled").await;
    shop.client.send("POST", &format!("/v1/jobs/{canceled}/cancel"), &[("x-owner", "bob")], "").await.is(200);

    let (unknown, succeeded) = (r#""outcome":"unknown","reason":"no answer""#, r#""outcome":"succeeded","result":1"#);
    let late = shop.claim("bob", "late").await;
    let (_, token) = shop.operator().begin_running(&late, "plotter").await;
    shop.report(&late, &token, unknown).await;
    assert_eq!(shop.report(&late, &token, succeeded).await["status"], "won");

    let given_up = shop.claim("bob", "given-up").await;
    let (_, token) = shop.operator().begin_running(&given_up, "plotter").await;
    shop.report(&given_up, &token, unknown).await;
    let abandon = r#"{"outcome":"abandoned","reason":"nobody answers the phone"}"#;
    shop.operator().post(&format!("/v1/jobs/{given_up}/attempts/1/resolve"), abandon).await.is(200);
    assert_eq!(shop.report(&given_up, &token, succeeded).await["status"], "discarded");

    let check = [("x-owner", "alice"), ("idempotency-key", "clicks"), ("content-type", "application/json")];
    shop.client.send("POST", "/v1/dedup/clicks", &check, r#"[{"user":1},{"user":1}]"#).await.is(200);

    shop.client.get("/readyz").await.is(200);
    shop.client.get("/nowhere").await.is(404);
}

/// What the load brings about.
const MET: [&str; 22] = [
    r#"onejob_submits_total{result="created"}"#,
    r#"onejob_submits_total{result="existing"}"#,
    r#"onejob_submits_total{result="conflict"}"#,
    r#"onejob_attempts_total{provider="laser",outcome="succeeded"}"#,
    r#"onejob_attempts_total{provider="laser",outcome="rejected"}"#,
    r#"onejob_attempts_total{provider="hasty",outcome="unknown"}"#,
    r#"onejob_attempts_total{provider="nowhere",outcome="not_sent"}"#,
    r#"onejob_results_total{fate="won"}"#,
    r#"onejob_results_total{fate="discarded"}"#,
    "onejob_late_results_total",
    r#"onejob_jobs_ended_total{state="succeeded"}"#,
    r#"onejob_jobs_ended_total{state="failed"}"#,
    r#"onejob_jobs_ended_total{state="canceled"}"#,
    r#"onejob_failovers_denied_total{route="guarded",reason="no_suite"}"#,
    r#"onejob_http_requests_total{operation="submit_job",status="2xx"}"#,
    r#"onejob_http_requests_total{operation="submit_job",status="4xx"}"#,
    r#"onejob_http_requests_total{operation="none",status="4xx"}"#,
    r#"onejob_script_duration_seconds_count{script="resolve_attempt"}"#,
    "onejob_overhead_seconds_count",
    r#"onejob_dedup_ids_total{stream="clicks",verdict="first"}"#,
    r#"onejob_dedup_ids_total{stream="clicks",verdict="duplicate"}"#,
    r#"onejob_dedup_batches_total{stream="clicks",outcome="answered"}"#,
];

#[tokio::test]
async fn every_panel_has_data_from_a_fresh_gateway_under_an_ordinary_load() {
    let shop = Shop::open().await;
    let prometheus = Prometheus::start(shop.addr).await;
    until("the fresh gateway is scraped", async || {
        let up = prometheus.values(r#"up{job="onejob"} == 1"#).await;
        up.len() == 1 && !prometheus.values("onejob_results_total").await.is_empty()
    })
    .await;
    load(&shop).await;
    assert!(shop.gateway.words().contains("a success is discarded"), "{}", shop.gateway.words());
    the_slow_provider_is_no_overhead(&shop).await;
    for series in MET {
        assert!(shop.says(series).await > 0.0, "{series}");
    }

    let board = board();
    let variables = variables(&board, &prometheus).await;
    let queries = queries(&board);
    let mut empty = Vec::new();
    for (panel, query) in &queries {
        let query = variables.iter().fold((*query).to_owned(), |query, (name, value)| query.replace(name, value));
        assert!(!query.contains('$'), "{panel}: {query}");
        let has_data = async || prometheus.values(&query).await.iter().any(|(_, value)| !value.is_nan());
        let found = tokio::time::timeout(Duration::from_secs(20), async {
            while !has_data().await {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        if found.await.is_err() {
            empty.push(format!("{panel}: {query}"));
        }
    }
    let panels = board["panels"].as_array().unwrap().len();
    println!("panels {panels}, queries {}, empty {}", queries.len(), empty.len());
    assert!(empty.is_empty(), "{empty:#?}");

    // Looked at from time to time.
    until_within(Duration::from_secs(60), "how full a stream is has been told", async || {
        shop.says(r#"onejob_dedup_remembered_ids{stream="clicks"}"#).await > 0.0
    })
    .await;
    prometheus_is_content(&prometheus).await;
    shop.close().await;
}

/// A first attempt that took long and was refused is no overhead of the second.
async fn the_slow_provider_is_no_overhead(shop: &Shop) {
    let before = shop.says("onejob_overhead_seconds_sum").await;
    let job = shop.submit("alice", "guarded", "slow", "{}", 200).await;
    assert_eq!((job["state"].as_str(), job["attempts"].as_array().map(Vec::len)), (Some("failed"), Some(2)), "{job}");
    let overhead = shop.says("onejob_overhead_seconds_sum").await - before;
    assert!(overhead < SLOW.as_secs_f64(), "{overhead} s of overhead beside two attempts of {SLOW:?}");
}

/// The board's variables as Grafana would put them in.
async fn variables(board: &Value, prometheus: &Prometheus) -> BTreeMap<String, String> {
    let mut values = BTreeMap::from([("$__rate_interval".to_owned(), "1m".to_owned())]);
    for variable in board["templating"]["list"].as_array().unwrap() {
        let Some(definition) = variable["definition"].as_str() else { continue };
        let arguments = definition.strip_prefix("label_values(").unwrap().strip_suffix(')').unwrap();
        let (selector, label) = arguments.rsplit_once(", ").unwrap();
        let selector = values.iter().fold(selector.to_owned(), |selector, (name, value)| selector.replace(name, value));
        let found = prometheus.ask(&format!("label/{label}/values"), &[("match[]", &selector)]).await;
        let found: Vec<_> = found.as_array().unwrap().iter().map(|value| value.as_str().unwrap().replace('.', "\\\\.")).collect();
        assert_eq!(found.len(), 1, "{definition}: {found:?}");
        values.insert(format!("${}", text(variable, "name")), found.join("|"));
    }
    values
}

/// It reads all that we say, evaluates every rule, and the first discarded result that it ever sees fires.
async fn prometheus_is_content(prometheus: &Prometheus) {
    let targets = prometheus.ask("targets", &[]).await;
    let target = &targets["activeTargets"][0];
    assert_eq!((target["health"].as_str(), target["lastError"].as_str()), (Some("up"), Some("")), "{target}");
    until("every rule is evaluated", async || {
        let rules = prometheus.ask("rules", &[]).await;
        let rules = rules["groups"][0]["rules"].as_array().unwrap();
        assert_eq!(rules.len(), alerts().len());
        rules.iter().all(|rule| rule["health"] == "ok")
    })
    .await;
    let mut firing = Vec::new();
    until("the discarded result is told", async || {
        let alerts = prometheus.ask("alerts", &[]).await;
        let alerts = alerts["alerts"].as_array().unwrap();
        let named = |alert: &Value| alert["labels"]["alertname"].as_str().unwrap().to_owned();
        firing = alerts.iter().filter(|alert| alert["state"] == "firing").map(named).collect();
        firing.iter().any(|name| name == "OnejobResultsDiscarded")
    })
    .await;
    assert_eq!(firing, ["OnejobResultsDiscarded"], "what fires on an ordinary day");
}

#[tokio::test]
async fn results_that_redis_does_not_take_and_requests_that_wait_are_counted_until_they_are_not() {
    let shop = Shop::open_with("redis.response_timeout=200ms").await;
    let says = async |series: &str, value: f64| until(series, async || shop.says(series).await == value).await;

    let job = shop.submit("alice", "print", "slow", r#"{"simulate":"delay=3s"}"#, 200);
    let meanwhile = async {
        says("onejob_waiters", 1.0).await;
        says("onejob_submits_total{result=\"created\"}", 1.0).await;
        assert_eq!(shop.says("onejob_results_in_hand").await, 0.0);
        shop.redis.pause();
        says("onejob_results_in_hand", 1.0).await;
        shop.redis.resume();
    };
    let (job, ()) = tokio::join!(job, meanwhile);
    assert_eq!(job["state"], "succeeded");
    says("onejob_results_in_hand", 0.0).await;
    says("onejob_waiters", 0.0).await;
    assert_eq!(shop.says("onejob_waiters_limit").await, 10_000.0);
    shop.close().await;
}

/// Three parsers: Prometheus' library with its linter, Python's, and (above) Prometheus' own scrape.
#[tokio::test]
async fn a_scrape_is_accepted_by_every_parser_and_is_what_the_list_says() {
    let shop = Shop::open().await;
    shop.submit("alice", "print", "order-1", "{}", 200).await;
    until("the gauges are set", async || shop.scrape().await.contains("onejob_jobs_open{")).await;

    // Whoever prefers OpenMetrics gets the text that is told: what writes it cannot write OpenMetrics.
    let accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
    let answer = shop.client.send("GET", "/metrics", &[("accept", accept)], "").await.is(200);
    assert_eq!(answer.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    let scrape = answer.text();
    assert!(!scrape.contains("# EOF"));

    assert_eq!(promtool(&["check", "metrics"], &scrape).await, "", "what the linter says");
    let found = parsed(&scrape).await;
    let found: BTreeMap<&str, &str> = found.lines().map(|line| line.split_once(' ').unwrap()).collect();
    let mut expected = BTreeMap::new();
    for metric in ALL {
        let (kind, each) = match metric.kind {
            Kind::Counter => ("counter", 1),
            Kind::Gauge => ("gauge", 1),
            // The bounds, the infinite one, sum and count.
            Kind::Histogram => ("histogram", SECONDS_BUCKETS.len() + 3),
        };
        let values = |values: &onejob::metrics::Values| match values {
            onejob::metrics::Values::Words(words) => words.len(),
            onejob::metrics::Values::Providers => 4,
            onejob::metrics::Values::Routes => 5,
            onejob::metrics::Values::Streams => 1,
        };
        let series: usize = metric.labels.iter().map(|(_, of)| values(of)).product();
        expected.insert(metric.name.trim_end_matches("_total"), format!("{kind} {}", series * each));
    }
    let found: BTreeMap<&str, String> = found.into_iter().map(|(name, rest)| (name, rest.to_owned())).collect();
    assert_eq!(found, expected);
    shop.close().await;
}

/// Each of them its own key, and every tenth of another owner.
async fn submit_keys(shop: &Shop, from: usize, to: usize) {
    let one = |place: usize| async move {
        let owner = format!("owner-{}", place / 10);
        shop.claim(&owner, &format!("key-{place}")).await;
    };
    stream::iter(from..to).for_each_concurrent(AT_ONCE, one).await;
}

async fn series_after(keys: usize) {
    let shop = Shop::open().await;
    load(&shop).await;
    submit_keys(&shop, 0, 1_000).await;
    until("the gauges are set", async || shop.scrape().await.contains("onejob_jobs_open{")).await;
    let first = series(&shop.scrape().await);
    submit_keys(&shop, 1_000, keys).await;
    let created = shop.says(r#"onejob_submits_total{result="created"}"#).await;
    assert!(created >= keys as f64, "{created}");
    let last = series(&shop.scrape().await);
    println!("{first} series after 1000 keys, {last} after {keys}");
    assert_eq!(last, first);
    shop.close().await;
}

#[tokio::test]
async fn the_number_of_series_does_not_grow_with_keys_and_owners() {
    series_after(5_000).await;
}

#[tokio::test]
#[ignore = "takes minutes in a debug build: `make series`"]
async fn the_number_of_series_is_the_same_after_a_hundred_thousand_keys() {
    series_after(100_000).await;
}
