//! No request makes the gateway hold unbounded memory, time or connections; each limit names itself.

use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::http_support::{Site, raw, rest};
use crate::support::{SOON, until};

const HEAD: &str = "POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\ncontent-type: application/json\r\n\
                    idempotency-key: k\r\n";

#[tokio::test]
async fn a_body_over_the_limit_is_413_declared_or_not() {
    let site = Site::with(|options| options.body_bytes_max = 1000).await;
    let problem = site.alice().submit("print", "k", &format!("\"{}\"", "x".repeat(1000))).await.problem(413, "body-too-large");
    assert_eq!(problem["limit"], 1000);
    let chunked = format!("{HEAD}transfer-encoding: chunked\r\n\r\n{}", format!("200\r\n{}\r\n", "x".repeat(512)).repeat(3));
    let answer = raw(site.gateway.addr, chunked.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("body-too-large"), "{answer}");
    // A length that nobody sends is not believed, nor waited for.
    let answer = raw(site.gateway.addr, format!("{HEAD}content-length: 99999999999\r\n\r\n").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(site.redis.dump().await.is_empty());
    site.alice().submit("print", "k", "\"fits\"").await.is(202);
}

#[tokio::test]
async fn a_body_that_comes_too_slowly_is_408() {
    let site = Site::with(|options| options.body_timeout = Duration::from_millis(200)).await;
    let began = Instant::now();
    let answer = raw(site.gateway.addr, format!("{HEAD}content-length: 50\r\n\r\n{{\"route\"").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("body-timeout"), "{answer}");
    assert!(began.elapsed() >= Duration::from_millis(200));
    assert!(site.redis.dump().await.is_empty());
}

#[tokio::test]
async fn a_head_over_the_limit_is_431() {
    let site = Site::with(|options| options.head_bytes_max = 4000).await;
    let alice = site.alice();
    let problem = alice.send("GET", "/healthz", &[("x-large", &"x".repeat(4000))], "").await.problem(431, "head-too-large");
    assert_eq!(problem["limit"], 4000);
    alice.get(&format!("/healthz?{}", "x".repeat(4000))).await.problem(431, "head-too-large");
    alice.send("GET", "/healthz", &[("x-large", &"x".repeat(3000))], "").await.is(200);
    // Far over it, the connection says so without a document, and reads no further.
    let answer = raw(site.gateway.addr, format!("GET / HTTP/1.1\r\nhost: x\r\nx: {}", "x".repeat(1 << 20)).as_bytes()).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
}

#[tokio::test]
async fn too_many_headers_are_431() {
    let site = Site::with(|options| options.headers_max = 20).await;
    let lines = |count: usize| (0..count).map(|line| format!("x-{line}: 1\r\n")).collect::<String>();
    let ask = |count: usize| format!("GET /healthz HTTP/1.1\r\nconnection: close\r\n{}\r\n", lines(count));
    assert!(raw(site.gateway.addr, ask(19).as_bytes()).await.starts_with("HTTP/1.1 200 "));
    let answer = raw(site.gateway.addr, ask(20).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 431 ") && answer.contains("headers-too-many"), "{answer}");
    let bomb = raw(site.gateway.addr, ask(5000).as_bytes()).await;
    assert!(bomb.starts_with("HTTP/1.1 431 "), "{bomb}");
}

/// Nothing at all, half a head, half an HTTP/2 preface, a kept connection that nobody uses: all end by themselves.
#[tokio::test]
async fn who_sends_no_whole_head_is_disconnected() {
    let site = Site::with(|options| options.head_timeout = Duration::from_millis(300)).await;
    for start in ["", "GET / HT", "GET /healthz HTTP/1.1\r\nhost: x\r\n", "PRI * HT", "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"]
    {
        let began = Instant::now();
        let mut stream = TcpStream::connect(site.gateway.addr).await.unwrap();
        stream.write_all(start.as_bytes()).await.unwrap();
        rest(&mut stream).await;
        assert!(began.elapsed() >= Duration::from_millis(250), "{start:?} ended after {:?}", began.elapsed());
    }
}

/// A connection whose request waits is not idle.
#[tokio::test]
async fn who_waits_for_an_answer_is_not_disconnected() {
    let site = Site::with(|options| options.head_timeout = Duration::from_millis(200)).await;
    let alice = site.alice();
    let answer = alice.submit_with("print", "k", r#"{"simulate":"delay=1500ms"}"#, &[("prefer", "wait=20")]).await;
    assert_eq!(answer.header("connection"), "");
    assert_eq!(answer.is(200).json()["state"], "succeeded");
}

#[tokio::test]
async fn connections_over_the_limit_wait_for_room() {
    let site = Site::with(|options| options.connections_max = 2).await;
    let ask = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let one = TcpStream::connect(site.gateway.addr).await.unwrap();
    let two = TcpStream::connect(site.gateway.addr).await.unwrap();
    let mut third = TcpStream::connect(site.gateway.addr).await.unwrap();
    third.write_all(ask).await.unwrap();
    let mut byte = [0];
    let early = tokio::time::timeout(Duration::from_millis(300), third.peek(&mut byte)).await;
    assert!(early.is_err(), "answered although two connections are open");
    drop(one);
    assert!(rest(&mut third).await.starts_with("HTTP/1.1 200 "));
    drop(two);
}

#[tokio::test]
async fn more_waits_than_the_limit_are_503_and_the_job_is_untouched() {
    let site = Site::start().await;
    let alice = site.alice();
    let id = alice.submit("outside", "k", "{}").await.job_id();
    let path = format!("/v1/jobs/{id}");
    let waits: Vec<_> = (0..230)
        .map(|_| {
            let (alice, path) = (alice.clone(), path.clone());
            tokio::spawn(async move { alice.send("GET", &path, &[("prefer", "wait=60")], "").await.status })
        })
        .collect();
    until("thirty are refused", async || waits.iter().filter(|wait| wait.is_finished()).count() == 30).await;
    let problem = alice.send("GET", &path, &[("prefer", "wait=1")], "").await.problem(503, "waiters-too-many");
    assert_eq!(problem["job_id"], id);
    // Without waiting it is told as ever.
    alice.get(&path).await.is(200);
    alice.send("POST", &format!("{path}/cancel"), &[], "").await.is(200);
    let mut statuses = Vec::new();
    for wait in waits {
        statuses.push(tokio::time::timeout(SOON, wait).await.unwrap().unwrap());
    }
    statuses.sort_unstable();
    assert_eq!((&statuses[..200], &statuses[200..]), (&[200; 200][..], &[503; 30][..]));
}

#[tokio::test]
async fn unknown_paths_and_methods_are_problems_too() {
    let site = Site::start().await;
    let alice = site.alice();
    for path in ["/", "/v1", "/v1/jobs/x/y", "/proxy", "/proxy/print", "/v2/jobs", "/v1/jobs/"] {
        alice.get(path).await.problem(404, "path-unknown");
    }
    for (method, path) in
        [("PUT", "/v1/jobs"), ("DELETE", "/v1/jobs/x"), ("POST", "/healthz"), ("OPTIONS", "/proxy/print/x"), ("BREW", "/v1/jobs")]
    {
        let answer = alice.send(method, path, &[("idempotency-key", "k")], "").await;
        answer.problem(405, "method-not-allowed");
        assert!(!answer.header("allow").is_empty(), "{method} {path}");
    }
}

#[tokio::test]
async fn browsers_of_configured_origins_may_call_and_see_our_headers() {
    let site = Site::with(|options| options.cors_origins = vec!["https://shop.example".to_owned()]).await;
    let preflight = [
        ("origin", "https://shop.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "idempotency-key"),
    ];
    let anybody = site.client("");
    let answer = anybody.send("OPTIONS", "/v1/jobs", &preflight, "").await.is(200);
    assert_eq!(answer.header("access-control-allow-origin"), "https://shop.example");
    assert!(answer.header("access-control-allow-headers").contains("idempotency-key"));
    let answer = site.alice().submit_with("print", "k", "{}", &[("origin", "https://shop.example")]).await.is(202);
    assert_eq!(answer.header("access-control-allow-origin"), "https://shop.example");
    for name in ["idempotency-replayed", "onejob-job-id", "x-should-retry", "preference-applied", "location", "etag"] {
        assert!(answer.header("access-control-expose-headers").contains(name), "{name}");
    }
    let other = site.alice().submit_with("print", "k", "{}", &[("origin", "https://evil.example")]).await;
    assert!(other.header("access-control-allow-origin").is_empty());
    let closed = Site::start().await;
    let answer = closed.client("").send("OPTIONS", "/v1/jobs", &preflight, "").await;
    assert!(answer.header("access-control-allow-origin").is_empty());
    for origin in ["*", "shop.example", "https://shop.example/x", "https://*.example"] {
        let mut options = crate::http_support::options();
        options.cors_origins = vec![origin.to_owned()];
        assert!(onejob::server::Gateway::bind(options, closed.gateway.runtime.clone()).is_err(), "{origin}");
    }
}

/// Each body fits, and so do a few; what does not fit beside the others is refused at once and can come again.
#[tokio::test]
async fn bodies_that_do_not_fit_in_memory_together_are_503() {
    let site = Site::with(|options| options.bodies_bytes_max = 64 << 10).await;
    let body = format!("\"{}\"", "x".repeat(40_000));
    let mut slow = TcpStream::connect(site.gateway.addr).await.unwrap();
    slow.write_all(format!("{HEAD}content-length: 60000\r\n\r\n{}", &body[..30_000]).as_bytes()).await.unwrap();
    until("another body does not fit", async || site.alice().submit("outside", "other", &body).await.status == 503).await;
    site.alice().submit("outside", "other", &body).await.problem(503, "overloaded");
    site.alice().submit("outside", "small", "{}").await.is(202);
    drop(slow);
    until("the other body fits", async || site.alice().submit("outside", "other", &body).await.status == 202).await;
}

/// HTTP/2 without TLS, as a proxy in front speaks it: many requests on one connection, and the same limits.
#[tokio::test]
async fn http2_is_spoken_too() {
    let site = Site::with(|options| options.head_bytes_max = 4000).await;
    let alice = site.alice().over_http2();
    let submits = (0..20).map(|_| alice.submit_with("print", "k", "{}", &[("prefer", "wait=20")]));
    for answer in futures_util::future::join_all(submits).await {
        assert_eq!(answer.is(200).json()["state"], "succeeded");
    }
    assert_eq!(site.provider.ledger().received, 1);
    alice.send("GET", "/healthz", &[("x-large", &"x".repeat(4000))], "").await.problem(431, "head-too-large");
    site.gateway.stop.cancel();
    tokio::time::timeout(SOON, site.gateway.task).await.unwrap().unwrap();
}
