//! Clicks over HTTP that count once: an axum server whose handler never sees a duplicate.
//!
//! ```sh
//! cargo run --example dedup_layer                            # starts a private redis-server in ./onejob-data
//! cargo run --example dedup_layer -- redis://127.0.0.1:6379  # uses yours
//! ```
//!
//! The handler fails at the first click, so its client may click again; it redirects from the second one, which counts; the third is a
//! duplicate and gets the same redirect.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::header::LOCATION;
use axum::http::{HeaderValue, StatusCode};
use axum::routing::post;
use bytes::Bytes;
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use onejob::dedup::layer::{DedupLayer, Source, VERDICT, fields};
use onejob::dedup::{Dedup, Front, Stream};
use onejob::store::private_redis::{PrivateRedis, PrivateRedisOptions, Syncs};
use onejob::store::{Store, StoreOptions};

type Error = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    if let Some(url) = std::env::args().nth(1) {
        return three_clicks(&url).await.map(|told| println!("{}", told.join("\n")));
    }
    let syncs = Syncs::EverySecond;
    let private = PrivateRedis::start(PrivateRedisOptions { data_dir: "onejob-data".into(), server: None, syncs }).await?;
    let told = three_clicks(private.url()).await;
    private.stop().await;
    told.map(|told| println!("{}", told.join("\n")))
}

/// The handler: counts, and fails the first time.
async fn click(State(clicks): State<Arc<AtomicU32>>) -> (StatusCode, [(http::HeaderName, &'static str); 1]) {
    let status = if clicks.fetch_add(1, Ordering::Relaxed) == 0 { StatusCode::BAD_GATEWAY } else { StatusCode::FOUND };
    (status, [(LOCATION, "/thanks")])
}

/// Serves, clicks three times, and says what became of each click.
pub async fn three_clicks(redis: &str) -> Result<Vec<String>, Error> {
    let (store, checked) = Store::connect(StoreOptions::new(redis)).await?;
    checked.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));

    let stream = Stream { window: Duration::from_secs(3_600), ..Stream::new("clicks", &["user", "ad"]) };
    let key_of = fields(&stream, &[("user", Source::Header("x-user".to_owned())), ("ad", Source::Query("ad".to_owned()))])?;
    let dedup = Dedup::new(&store, stream)?.with_patience(Duration::from_secs(2)).with_front(Front::default())?;
    let layer = DedupLayer::new(dedup, key_of).on_duplicate(|_| {
        let mut redirect = http::Response::new(Bytes::new());
        *redirect.status_mut() = StatusCode::FOUND;
        redirect.headers_mut().insert(LOCATION, HeaderValue::from_static("/thanks"));
        redirect
    });

    let handled = Arc::new(AtomicU32::new(0));
    let app = axum::Router::new().route("/click", post(click)).layer(layer.clone()).with_state(Arc::clone(&handled));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server =
        tokio::spawn(async move { axum::serve(listener, app).with_graceful_shutdown(async { drop(stopped.await) }).await });

    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    // Another run with the same Redis is another user.
    let user = uuid::Uuid::new_v4().to_string();
    let mut told = Vec::new();
    for _ in 0..3 {
        let request = http::Request::post(format!("http://{address}/click?ad=7")).header("x-user", &user);
        let answer = client.request(request.body(Full::new(Bytes::new()))?).await?;
        told.push(format!("{}, {}", answer.status().as_u16(), answer.headers()[VERDICT].to_str()?));
    }
    told.push(format!("the handler was called {} times", handled.load(Ordering::Relaxed)));

    drop((client, stop));
    server.await??;
    layer.close().await;
    store.close().await;
    Ok(told)
}
