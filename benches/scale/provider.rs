//! A provider in this process that answers at once, does the work of a key once, and counts what it executed for each intent.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::serve::ListenerExt as _;
use serde_json::Value;
use tokio::task::AbortHandle;

pub(crate) struct Provider {
    pub(crate) url: String,
    ledger: Arc<Mutex<Ledger>>,
    serving: AbortHandle,
}

#[derive(Default)]
struct Ledger {
    keys: HashSet<String>,
    /// By the intent's number.
    executions: Vec<u32>,
}

impl Provider {
    pub(crate) async fn start() -> Result<Provider> {
        let ledger = Arc::new(Mutex::new(Ledger::default()));
        let router = axum::Router::new().fallback(execute).with_state(Arc::clone(&ledger));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let listener = listener.tap_io(|stream| {
            // Latency only.
            let _ = stream.set_nodelay(true);
        });
        let serving = tokio::spawn(async move { axum::serve(listener, router).await }).abort_handle();
        Ok(Provider { url, ledger, serving })
    }

    /// How often some intents were executed: the least, the most.
    pub(crate) fn executions(&self, intents: &[u64]) -> (u32, u32) {
        let ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |intent: &u64| usize::try_from(*intent).ok().and_then(|at| ledger.executions.get(at)).copied().unwrap_or(0);
        (intents.iter().map(of).min().unwrap_or(0), intents.iter().map(of).max().unwrap_or(0))
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

type Answer = (StatusCode, [(header::HeaderName, &'static str); 1], String);

async fn execute(State(ledger): State<Arc<Mutex<Ledger>>>, headers: HeaderMap, body: String) -> Answer {
    let plain = [(header::CONTENT_TYPE, "application/json")];
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    let intent = serde_json::from_str::<Value>(&body).ok().and_then(|body| body["intent"].as_u64());
    let (Some(key), Some(intent)) = (key, intent.and_then(|intent| usize::try_from(intent).ok())) else {
        return (StatusCode::BAD_REQUEST, plain, "{}".to_owned());
    };
    let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
    if ledger.keys.insert(key.to_owned()) {
        if ledger.executions.len() <= intent {
            ledger.executions.resize(intent + 1024, 0);
        }
        ledger.executions[intent] += 1;
    }
    (StatusCode::OK, plain, format!(r#"{{"printed":{intent},"pages":"{}"}}"#, "x".repeat(240)))
}
