//! What a client costs the gateway that waits for a job: resident memory with thousands of them on connections of their own.

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::Bounds;
use crate::http::{self, Gateway};
use crate::process;
use crate::report::{Aim, Report};

/// Connections opened at once: the kernel keeps so many that nobody has accepted yet, and more.
const OPENED_AT_ONCE: usize = 200;

/// Asked for, a wait of no time: answered at once, and the connection is kept.
const KEPT: u32 = 0;

/// For what the clients wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    /// For nothing: answered, and their connections kept. What a connection costs by itself.
    Nothing,
    OneJob,
    AJobEach,
}

pub(crate) async fn resident(bounds: Bounds, report: &mut Report) -> Result<()> {
    for of in [Of::Nothing, Of::OneJob, Of::AJobEach] {
        // A process of its own each: an allocator does not give back what another measurement made it take.
        let gateway = Gateway::start().await?;
        http::ask_once(gateway.address(), &request("warm-up", KEPT).replace("Host: bench", "Host: bench\r\nConnection: close"))
            .await?;
        let before = process::resident_bytes(gateway.part.pid)?;
        let mut clients = Vec::with_capacity(bounds.waiters);
        while clients.len() < bounds.waiters {
            for _ in 0..OPENED_AT_ONCE.min(bounds.waiters - clients.len()) {
                let key = match of {
                    Of::Nothing | Of::OneJob => "the-one".to_owned(),
                    Of::AJobEach => format!("client-{}", clients.len()),
                };
                let mut stream = TcpStream::connect(gateway.address()).await?;
                let wait_seconds = if of == Of::Nothing { KEPT } else { 60 };
                stream.write_all(request(&key, wait_seconds).as_bytes()).await?;
                if of == Of::Nothing {
                    stream.read_exact(&mut [0; 12]).await?;
                }
                clients.push(stream);
            }
            let all = if of == Of::Nothing { 0 } else { clients.len() };
            process::until("all clients wait", async || waiting(&gateway).await.is_ok_and(|waiting| waiting == all)).await?;
        }
        let bytes = process::resident_bytes(gateway.part.pid)?.saturating_sub(before) as f64 / clients.len() as f64;
        let what = match of {
            Of::Nothing => "answered, none waits: what a connection costs by itself",
            Of::OneJob => "all wait for one job",
            Of::AJobEach => "each waits for a job of its own",
        };
        let what = format!("resident memory of the gateway; {} clients on connections of their own, {what}", clients.len());
        report.bytes("bytes a client", &what, bytes, Aim::AtMost(12_000.0));
    }
    Ok(())
}

/// A submit to a route whose job nobody works on.
fn request(key: &str, wait_seconds: u32) -> String {
    let body = r#"{"route":"outside","input":{"file":"invoice-000001.pdf","copies":1}}"#;
    let length = body.len();
    format!(
        "POST /v1/jobs HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nPrefer: wait={wait_seconds}\r\n\
         Content-Length: {length}\r\nIdempotency-Key: {key}\r\n\r\n{body}"
    )
}

/// How many requests the gateway says are waiting.
async fn waiting(gateway: &Gateway) -> Result<usize> {
    let metrics = http::ask_once(gateway.address(), "GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n").await?;
    let line = metrics.lines().find_map(|line| line.strip_prefix("onejob_waiters ")).context("the gateway counts waiters")?;
    Ok(line.trim().parse::<f64>()? as usize)
}
