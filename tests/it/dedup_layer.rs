//! `DedupLayer` in a real server, over real HTTP, before a real Redis: who reaches the handler, and what counts when it fails.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use onejob::dedup::layer::{DedupLayer, LAYER_BATCH_MAX, LAYER_WAITING_MAX, Remember, Source, Unavailable, fields};
use onejob::dedup::{ClickId, Dedup, Front, Stream};
use onejob::store::{Store, StoreOptions};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tower::{Layer as _, Service as _};

use crate::dedup_front::scripts;
use crate::fleet::redis::DurableRedis;
use crate::http_support::{Answer, Client};
use crate::support::{Redis, kinds, until};

#[path = "../../examples/dedup_layer.rs"]
#[expect(dead_code, reason = "its main has a Redis of its own")]
mod example;

/// What the handler has seen.
struct Seen {
    /// Requests that came as far as the layer.
    asked: AtomicUsize,
    /// Requests that reached the handler.
    came: AtomicUsize,
    /// Requests whose handler was not given up.
    done: AtomicUsize,
    /// A handler that is told to wait takes one of these.
    go: Semaphore,
}

impl Seen {
    fn came(&self) -> usize {
        self.came.load(Ordering::SeqCst)
    }
}

/// Does what the header `do` says.
async fn handler(State(seen): State<Arc<Seen>>, request: Request) -> StatusCode {
    seen.came.fetch_add(1, Ordering::SeqCst);
    assert!(request.extensions().get::<ClickId>().is_some());
    let status = match request.headers().get("do").map(|value| value.to_str().unwrap()) {
        Some("fail") => StatusCode::INTERNAL_SERVER_ERROR,
        Some("redirect") => StatusCode::FOUND,
        Some("panic") => panic!("as the client wished"),
        Some("wait") => {
            seen.go.acquire().await.unwrap().forget();
            StatusCode::OK
        }
        _ => StatusCode::OK,
    };
    seen.done.fetch_add(1, Ordering::SeqCst);
    status
}

struct Site {
    address: SocketAddr,
    client: Client,
    seen: Arc<Seen>,
    layer: DedupLayer,
    server: tokio::task::JoinHandle<()>,
}

impl Site {
    async fn start(
        mirrored: bool,
        store: &Store,
        change: impl FnOnce(Dedup) -> Dedup,
        with: impl FnOnce(DedupLayer) -> DedupLayer,
    ) -> Site {
        let stream = Stream { mirrored, ..Stream::new("clicks", &["user", "ad"]) };
        let sources = [("user", Source::Header("x-user".to_owned())), ("ad", Source::Query("ad".to_owned()))];
        let key_of = fields(&stream, &sources).unwrap();
        let zero = || AtomicUsize::new(0);
        let seen = Arc::new(Seen { asked: zero(), came: zero(), done: zero(), go: Semaphore::new(0) });
        let asked = Arc::clone(&seen);
        let dedup = change(Dedup::new(store, stream).unwrap());
        let layer = with(DedupLayer::new(dedup, move |parts| {
            asked.asked.fetch_add(1, Ordering::SeqCst);
            key_of(parts)
        }));
        let app = axum::Router::new().fallback(handler).layer(layer.clone()).with_state(Arc::clone(&seen));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Site { address, client: Client::new(address), seen, layer, server }
    }

    async fn plain(mirrored: bool, redis: &Redis) -> Site {
        Site::start(mirrored, &redis.store().await, |dedup| dedup, |layer| layer).await
    }

    /// One click of a user, with what the handler is to do.
    async fn click(&self, user: usize, what: &str) -> Answer {
        self.client.send("POST", "/click?ad=7", &[("x-user", &user.to_string()), ("do", what)], "").await
    }

    /// The same, by a client that may go away: nothing is read.
    async fn begin(&self, user: usize, what: &str) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).await.unwrap();
        let head = format!("POST /click?ad=7 HTTP/1.1\r\nhost: x\r\nx-user: {user}\r\ndo: {what}\r\ncontent-length: 0\r\n\r\n");
        socket.write_all(head.as_bytes()).await.unwrap();
        socket
    }

    async fn asked(&self, times: usize) {
        until("requests came to the layer", async || self.seen.asked.load(Ordering::SeqCst) >= times).await;
    }

    async fn came(&self, times: usize) {
        until("requests reached the handler", async || self.seen.came() >= times).await;
    }
}

fn told(answer: &Answer) -> (u16, &str) {
    (answer.status, answer.headers["onejob-dedup"].to_str().unwrap())
}

/// Until a request is the first: long before the lease of an earlier claim lapses.
async fn counts_again(site: &Site, user: usize) {
    until("the request counts again", async || {
        let answer = site.click(user, "").await;
        assert!(matches!(told(&answer), (200, "first") | (409, "held")), "{:?}", told(&answer));
        told(&answer).0 == 200
    })
    .await;
}

#[tokio::test]
async fn the_first_reaches_the_handler_and_a_duplicate_is_answered_without_it() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let site = Site::plain(mirrored, &redis).await;
        assert_eq!(told(&site.click(1, "").await), (200, "first"));
        let again = site.click(1, "").await;
        assert_eq!((told(&again), again.body.len()), ((204, "duplicate"), 0));
        assert_eq!(told(&site.click(2, "redirect").await), (302, "first"));
        assert_eq!(told(&site.click(2, "redirect").await), (204, "duplicate"));
        assert_eq!(site.seen.came(), 2);
        let missing = site.client.send("POST", "/click?ad=7", &[], "").await;
        assert_eq!(told(&missing), (400, "invalid"));
        let problem: serde_json::Value = serde_json::from_slice(&missing.body).unwrap();
        assert_eq!(missing.headers["content-type"], "application/problem+json");
        assert_eq!(problem["detail"], "the field \"user\" is missing");
        assert_eq!(site.seen.came(), 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_thousand_concurrent_identical_requests_one_reaches_the_handler() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let site = Site::plain(mirrored, &redis).await;
        let others = AtomicUsize::new(0);
        let answers = join_all((0..1_000).map(|_| async {
            let answer = site.click(1, "wait").await;
            // The one in the handler goes on when all others were answered.
            if told(&answer).0 == 409 && others.fetch_add(1, Ordering::SeqCst) == 998 {
                site.seen.go.add_permits(1);
            }
            let (status, verdict) = told(&answer);
            (status, verdict.to_owned(), answer.headers.contains_key("retry-after"))
        }))
        .await;
        assert_eq!(site.seen.came(), 1);
        let of = |told: (u16, &str, bool)| {
            answers.iter().filter(|(status, verdict, after)| (*status, &**verdict, *after) == told).count()
        };
        assert_eq!((of((200, "first", false)), of((409, "held", true))), (1, 999));
        assert_eq!(told(&site.click(1, "").await), (204, "duplicate"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remembered_before_the_handler_the_others_are_duplicates_and_what_fails_is_not_called_again() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let site =
            Site::start(mirrored, &redis.store().await, |dedup| dedup, |layer| layer.remember(Remember::BeforeHandler)).await;
        let answers = join_all((0..300).map(|_| site.click(1, ""))).await;
        let of = |expected: (u16, &str)| answers.iter().filter(|answer| told(answer) == expected).count();
        assert_eq!((of((200, "first")), of((204, "duplicate")), site.seen.came()), (1, 299, 1));
        assert_eq!(told(&site.click(2, "fail").await), (500, "first"));
        assert_eq!(told(&site.click(2, "").await), (204, "duplicate"));
    }
}

#[tokio::test]
async fn what_a_handler_fails_at_counts_when_it_comes_again() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let site = Site::plain(mirrored, &redis).await;
        for _ in 0..3 {
            assert_eq!(told(&site.click(1, "fail").await), (500, "released"));
        }
        assert_eq!(told(&site.click(1, "").await), (200, "first"));
        assert_eq!(told(&site.click(1, "").await), (204, "duplicate"));
        assert_eq!(site.seen.came(), 4);
        // What success is can be said.
        let strict =
            |layer: DedupLayer| layer.succeeded(|status| status.is_success()).on_held(|_| http::Response::new(Bytes::new()));
        let site = Site::start(mirrored, &redis.store().await, |dedup| dedup, strict).await;
        assert_eq!(told(&site.click(2, "redirect").await), (302, "released"));
        assert_eq!(told(&site.click(2, "").await), (200, "first"));
    }
}

#[tokio::test]
async fn a_client_that_goes_away_and_a_handler_that_panics_give_their_request_back() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let site = Site::plain(mirrored, &redis).await;
        let socket = site.begin(1, "wait").await;
        site.came(1).await;
        assert_eq!(told(&site.click(1, "").await), (409, "held"));
        drop(socket);
        counts_again(&site, 1).await;
        let mut socket = site.begin(2, "panic").await;
        let mut rest = Vec::new();
        // A connection that breaks is what a client sees of a panic.
        let _ = socket.read_to_end(&mut rest).await;
        assert_eq!(rest, b"");
        counts_again(&site, 2).await;
        assert_eq!(site.seen.done.load(Ordering::SeqCst), 2);
    }
}

/// The client goes while Redis is being asked: what is claimed for it then is given back, and one that waits gets it at once.
#[tokio::test]
async fn a_client_that_goes_away_before_the_verdict_keeps_nobody_out() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let site = Site::plain(mirrored, &redis).await;
        assert_eq!(told(&site.click(0, "").await), (200, "first"));
        redis.pause();
        let gone = site.begin(1, "").await;
        site.asked(2).await;
        drop(gone);
        redis.resume();
        counts_again(&site, 1).await;
    }
}

#[tokio::test]
async fn a_handler_that_has_succeeded_is_committed_though_its_client_has_gone() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let site = Site::plain(mirrored, &redis).await;
        let socket = site.begin(1, "wait").await;
        site.came(1).await;
        redis.pause();
        site.seen.go.add_permits(1);
        until("the handler is done", async || site.seen.done.load(Ordering::SeqCst) == 1).await;
        drop(socket);
        redis.resume();
        until("it is remembered", async || {
            let answer = site.click(1, "").await;
            assert!(matches!(told(&answer), (204, "duplicate") | (409, "held")), "{:?}", told(&answer));
            told(&answer).0 == 204
        })
        .await;
    }
}

#[tokio::test]
async fn a_handler_slower_than_its_lease_is_told_that_it_lost() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let site = Site::plain(mirrored, &redis).await;
        let slow = async {
            let answer = site.click(1, "wait").await;
            assert_eq!(told(&answer), (200, "lost"));
        };
        let meanwhile = async {
            site.came(1).await;
            // As if its lease had lapsed.
            redis.command::<u64>(&["DEL", "oj:dedup:{clicks/00}:c", "oj:dedup:{clicks/00}:l"]).await;
            assert_eq!(told(&site.click(1, "").await), (200, "first"));
            site.seen.go.add_permits(1);
        };
        tokio::join!(slow, meanwhile);
    }
}

#[tokio::test]
async fn without_redis_the_handler_is_not_called_unless_somebody_said_so() {
    for mirrored in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let redis = DurableRedis::start_with(directory.path(), &[]).await;
        let options = StoreOptions { response_timeout: Duration::from_secs(2), ..StoreOptions::new(&redis.url()) };
        let (store, _) = Store::connect(options).await.unwrap();
        let hasty = |dedup: Dedup| dedup.with_patience(Duration::from_millis(100)).with_front(Front::default()).unwrap();
        let closed = Site::start(mirrored, &store, hasty, |layer| layer).await;
        let open = Site::start(mirrored, &store, hasty, |layer| layer.unavailable(Unavailable::Pass)).await;
        assert_eq!(told(&closed.click(1, "").await), (200, "first"));
        let waits = async {
            let answer = closed.click(2, "wait").await;
            assert_eq!(told(&answer), (200, "uncommitted"));
        };
        let meanwhile = async {
            closed.came(2).await;
            redis.die().await;
            closed.seen.go.add_permits(1);
        };
        tokio::join!(waits, meanwhile);
        let refused = closed.click(3, "").await;
        assert_eq!(told(&refused), (503, "unavailable"));
        assert_eq!((&refused.headers["retry-after"], closed.seen.came()), (&"1".parse().unwrap(), 2));
        // What this process was told of needs no Redis.
        assert_eq!(told(&closed.click(1, "").await), (204, "duplicate"));
        for came in 1..3 {
            assert_eq!(told(&open.click(3, "").await), (200, "passed"));
            assert_eq!(open.seen.came(), came);
        }
        redis.revive().await;
        until("it counts", async || {
            let answer = closed.click(3, "").await;
            told(&answer) == (200, "first")
        })
        .await;
    }
}

/// While Redis does not answer one request the next ones gather, and are one call; so are their commits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_come_during_a_call_are_the_next_call() {
    for mirrored in kinds() {
        const USERS: usize = 200;
        let redis = Redis::start().await;
        let site = Site::plain(mirrored, &redis).await;
        assert_eq!(told(&site.click(USERS, "").await), (200, "first"));
        let before = scripts(&redis).await;
        redis.pause();
        let clicks = join_all((0..USERS).map(|user| site.click(user, "wait")));
        let meanwhile = async {
            site.asked(1 + USERS).await;
            redis.resume();
            site.came(1 + USERS).await;
            let claims = scripts(&redis).await - before;
            assert!((2..=6).contains(&claims), "{claims} calls for {USERS} claims");
            redis.pause();
            site.seen.go.add_permits(USERS);
            until("the handlers are done", async || site.seen.done.load(Ordering::SeqCst) == 1 + USERS).await;
            redis.resume();
            claims
        };
        let (answers, claims) = tokio::join!(clicks, meanwhile);
        assert!(answers.iter().all(|answer| told(answer) == (200, "first")));
        let commits = scripts(&redis).await - before - claims;
        assert!((2..=30).contains(&commits), "{commits} calls for {USERS} commits");
    }
}

/// The first of them may yet fail, and then none of the others may have been told that it counted.
#[tokio::test]
async fn of_equal_requests_in_one_call_one_is_first_and_the_others_are_held() {
    let redis = Redis::start().await;
    let stream = Stream::new("clicks", &["user"]);
    let key_of = fields(&stream, &[("user", Source::Query("user".to_owned()))]).unwrap();
    let layer = DedupLayer::new(Dedup::new(&redis.store().await, stream).unwrap(), key_of);
    let failing = tower::service_fn(|_: http::Request<()>| async {
        let mut response = http::Response::new(());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        Ok::<_, std::convert::Infallible>(response)
    });
    let mut service = layer.layer(failing);
    let request = |user: usize| http::Request::get(format!("/?user={user}")).body(()).unwrap();
    assert_eq!(service.call(request(0)).await.unwrap().status(), 500);
    let before = scripts(&redis).await;
    // All are asked for before the task that asks Redis has had a turn.
    let answers = join_all((0..10).map(|_| service.call(request(1)))).await;
    let told: Vec<u16> = answers.into_iter().map(|answer| answer.unwrap().status().as_u16()).collect();
    assert_eq!(scripts(&redis).await - before, 2, "a claim, and what gives it back");
    let of = |status: u16| told.iter().filter(|told| **told == status).count();
    assert_eq!((of(500), of(409)), (1, 9), "{told:?}");
}

/// One call is under way and the queue is full: nobody waits without a limit.
#[tokio::test]
async fn beyond_so_many_that_wait_a_request_is_unavailable() {
    const BEYOND: usize = 500;
    let redis = Redis::start().await;
    let stream = Stream::new("clicks", &["user"]);
    let key_of = fields(&stream, &[("user", Source::Query("user".to_owned()))]).unwrap();
    let layer = DedupLayer::new(Dedup::new(&redis.store().await, stream).unwrap(), key_of);
    let handler = tower::service_fn(|_: http::Request<()>| async { Ok::<_, std::convert::Infallible>(http::Response::new(())) });
    let mut service = layer.layer(handler);
    redis.pause();
    let request = |user: usize| http::Request::get(format!("/?user={user}")).body(()).unwrap();
    let all = LAYER_BATCH_MAX + LAYER_WAITING_MAX + BEYOND;
    let mut answers: FuturesUnordered<_> = (0..all).map(|user| service.call(request(user))).collect();
    for _ in 0..BEYOND {
        assert_eq!(answers.next().await.unwrap().unwrap().status(), 503);
    }
    redis.resume();
    let (mut first, mut refused) = (0, BEYOND);
    while let Some(answer) = answers.next().await {
        match answer.unwrap().status().as_u16() {
            200 => first += 1,
            _ => refused += 1,
        }
    }
    assert!(first >= LAYER_WAITING_MAX && first + refused == all, "{first} first, {refused} refused");
}

#[tokio::test]
async fn behind_a_front_a_duplicate_asks_nobody() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let front = |dedup: Dedup| dedup.with_front(Front::default()).unwrap();
        let site = Site::start(mirrored, &redis.store().await, front, |layer| layer).await;
        assert_eq!(told(&site.click(1, "fail").await), (500, "released"));
        assert_eq!(told(&site.click(1, "").await), (200, "first"));
        let before = scripts(&redis).await;
        for _ in 0..20 {
            assert_eq!(told(&site.click(1, "").await), (204, "duplicate"));
        }
        assert_eq!(scripts(&redis).await, before);
    }
}

/// What is given back while the server stops is given back before `close` returns.
#[tokio::test]
async fn a_layer_that_is_closed_has_given_everything_back() {
    for mirrored in kinds() {
        let redis = Redis::start().await;
        let site = Site::plain(mirrored, &redis).await;
        let sockets = join_all((0..20).map(|user| site.begin(user, "wait"))).await;
        site.came(20).await;
        let claims = "oj:dedup:{clicks/00}:c";
        assert_eq!(redis.command::<u64>(&["HLEN", claims]).await, 20);
        drop(sockets);
        site.server.abort();
        let _ = site.server.await;
        drop(site.client);
        site.layer.close().await;
        assert_eq!(redis.command::<u64>(&["HLEN", claims]).await, 0);
    }
}

#[tokio::test]
async fn the_example_counts_the_second_click_and_drops_the_third() {
    let redis = Redis::start().await;
    let told = example::three_clicks(redis.url()).await.unwrap();
    assert_eq!(told, ["502, released", "302, first", "302, duplicate", "the handler was called 2 times"]);
}
