//! The constant server: an axum handler that reads a request's body and answers the same bytes to everybody.
//!
//! A process of its own (this program, called with a hidden argument), so that what it spends is seen apart. It is both the ceiling
//! of the gateway and the provider behind it.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::serve::ListenerExt as _;
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::process::Part;

/// The first argument of this program when it is to be the constant server.
pub(crate) const HIDDEN: &str = "--constant-server";

/// What is answered.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Answer {
    /// A provider's answer, with a body of so many bytes.
    pub(crate) fn json(bytes: usize) -> Answer {
        let frame = r#"{"printed":""}"#.len();
        let body = format!(r#"{{"printed":"{}"}}"#, "x".repeat(bytes.saturating_sub(frame)));
        Answer { status: 200, headers: vec![("content-type".to_owned(), "application/json".to_owned())], body }
    }

    /// Reads an answer as it came over the wire; what the server adds by itself is left out.
    pub(crate) fn from_wire(text: &str) -> Result<Answer> {
        let (head, body) = text.split_once("\r\n\r\n").context("an answer has a head")?;
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("an answer has a status")?.parse()?;
        let headers =
            lines.filter_map(|line| line.split_once(": ")).map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()));
        let own = ["connection", "content-length", "date", "transfer-encoding"];
        Ok(Answer { status, headers: headers.filter(|(name, _)| !own.contains(&name.as_str())).collect(), body: body.to_owned() })
    }
}

/// A running constant server.
pub(crate) struct Constant {
    pub(crate) part: Part,
    /// `http://…`
    pub(crate) url: String,
}

impl Constant {
    pub(crate) async fn start(answer: &Answer, directory: &Path) -> Result<Constant> {
        let file: PathBuf = directory.join(format!("answer-{}.json", uuid::Uuid::new_v4().simple()));
        std::fs::write(&file, serde_json::to_vec(answer)?)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(HIDDEN).arg(&file);
        let (part, url) = Part::start_and_listen(&mut command, "http://").await?;
        Ok(Constant { part, url })
    }
}

struct Ready {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

pub(crate) async fn serve(answer: &Path) -> Result<()> {
    let answer: Answer = serde_json::from_slice(&std::fs::read(answer)?)?;
    let mut headers = HeaderMap::new();
    for (name, value) in &answer.headers {
        headers.append(HeaderName::try_from(name)?, HeaderValue::try_from(value)?);
    }
    let ready = Ready { status: StatusCode::from_u16(answer.status)?, headers, body: Bytes::from(answer.body) };
    let router = Router::new().fallback(constant).with_state(std::sync::Arc::new(ready));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("the constant server listens on http://{}", listener.local_addr()?);
    let listener = listener.tap_io(|stream| {
        // Latency only.
        let _ = stream.set_nodelay(true);
    });
    Ok(axum::serve(listener, router).await?)
}

async fn constant(State(ready): State<std::sync::Arc<Ready>>, _request: Bytes) -> (StatusCode, HeaderMap, Bytes) {
    (ready.status, ready.headers.clone(), ready.body.clone())
}
