//! The gateway's side, loaded by `wrk` over loopback: submits against an axum handler that answers a constant, `/proxy` against
//! nginx, what each of the two adds to a direct call, duplicates and whole jobs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use crate::Bounds;
use crate::claims::RESULT_BYTES;
use crate::constant::{Answer, Constant};
use crate::private::Redis;
use crate::process::{self, Part};
use crate::report::{Aim, Report, Side};

/// Connections of `wrk`, kept alive.
const CONNECTIONS: u32 = 64;
/// Connections of the comparison with a direct call: one call after another, and many at once.
const OVERHEAD_CONNECTIONS: [u32; 2] = [1, 64];
/// The gateway, built by the same call that built this.
const ONEJOB: &str = env!("CARGO_BIN_EXE_onejob");
const WRK_SCRIPT: &str = include_str!("submit.lua");
/// The routes that the measured gateway has.
const CONFIGURATION: &str = r#"
[server]
listen = "127.0.0.1:0"
connections_max = 20000
waiters_max = 20000
[redis]
response_timeout = "2s"
[provider.constant]
adapter = "http"
limits = { in_flight = 1024 }
[route.outside]
executors = "outside"
[route.constant]
providers = ["constant"]
"#;
/// The request's input is as large as the library's.
const INPUT: &str = r#"{"file":"invoice-000001.pdf","copies":1}"#;
const WARM_UP: Duration = Duration::from_secs(1);

/// A gateway with its Redis and its provider, each a process of its own.
pub(crate) struct Gateway {
    pub(crate) part: Part,
    pub(crate) url: String,
    pub(crate) redis: Redis,
    pub(crate) provider: Constant,
    directory: TempDir,
}

impl Gateway {
    pub(crate) async fn start() -> Result<Gateway> {
        let directory = process::directory()?;
        let redis = Redis::start().await?;
        let provider = Constant::start(&Answer::json(RESULT_BYTES), directory.path()).await?;
        let file = directory.path().join("onejob.toml");
        std::fs::write(&file, CONFIGURATION)?;
        let mut command = Command::new(ONEJOB);
        command.arg("serve").arg("--config").arg(&file).args(["--log", "warn", "--redis", &redis.url()]);
        command.args(["--set", &format!("provider.constant.base_url={}", provider.url)]);
        command.stderr(std::fs::File::create(directory.path().join("gateway.log"))?);
        let started = Part::start_and_listen(&mut command, "onejob listens on").await;
        let log = || std::fs::read_to_string(directory.path().join("gateway.log")).unwrap_or_default();
        let (part, url) = started.with_context(|| format!("the gateway did not start: {}", log()))?;
        Ok(Gateway { part, url, redis, provider, directory })
    }

    pub(crate) fn address(&self) -> &str {
        self.url.trim_start_matches("http://")
    }
}

/// What `wrk` asks for.
struct Ask<'a> {
    url: &'a str,
    path: &'a str,
    body: &'a str,
    keys: &'a str,
    wait_seconds: u32,
    connections: u32,
}

/// One run of `wrk`. Anything but answers below 400 ends the measurement: a refusal is fast, and no figure.
async fn wrk(directory: &Path, ask: &Ask<'_>, window: Duration, servers: &[(&str, u32)]) -> Result<Side> {
    let script: PathBuf = directory.join("submit.lua");
    std::fs::write(&script, WRK_SCRIPT)?;
    let run = uuid::Uuid::new_v4().simple().to_string();
    let run = if ask.keys == "same" { "same" } else { &run[..12] };
    let before = servers.iter().map(|(_, pid)| process::cpu(*pid)).collect::<Result<Vec<_>>>()?;
    let mut command = Command::new("wrk");
    // Whole seconds are the least that it knows.
    let seconds = window.as_secs_f64().ceil() as u64;
    command.args(["-t", "1", "-c", &ask.connections.to_string(), "-d", &format!("{seconds}s"), "--timeout", "20s"]);
    command.arg("-s").arg(&script).arg(ask.url).args(["--", ask.path, run, ask.keys, &ask.wait_seconds.to_string(), ask.body]);
    let output = command.kill_on_drop(true).output().await.context("cannot run wrk")?;
    let after = servers.iter().map(|(_, pid)| process::cpu(*pid)).collect::<Result<Vec<_>>>()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with('{'));
    let told: Value = serde_json::from_str(line.with_context(|| format!("wrk said {text:?}"))?)?;
    let number = |name: &str| told[name].as_f64().with_context(|| format!("wrk does not tell {name}"));
    let requests = number("requests")?;
    if requests == 0.0 || number("refused")? > 0.0 || number("broken")? > 0.0 {
        bail!("{}{}: {told}", ask.url, ask.path);
    }
    let spent = |at: usize| (after[at] - before[at]).as_secs_f64() * 1e6 / requests;
    Ok(Side {
        ops_a_second: requests / (number("us")? / 1e6),
        p50_us: number("p50_us")?,
        p99_us: number("p99_us")?,
        cpu_us: servers.iter().enumerate().map(|(at, (name, _))| ((*name).to_owned(), spent(at))).collect(),
    })
}

/// One request on a connection of its own, and its answer as it came.
pub(crate) async fn ask_once(address: &str, request: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

fn submit_request(body: &str) -> String {
    let length = body.len();
    format!(
        "POST /v1/jobs HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
         Idempotency-Key: the-first\r\n\r\n{body}"
    )
}

fn submit_body(route: &str) -> String {
    format!(r#"{{"route":"{route}","input":{INPUT}}}"#)
}

/// `POST /v1/jobs` with new keys, to a route whose attempts come from outside: nothing but the claim, against an axum handler that
/// reads the body and answers the gateway's own answer, byte for byte but the date.
pub(crate) async fn submit_against_constant(bounds: Bounds, report: &mut Report) -> Result<()> {
    let gateway = Gateway::start().await?;
    let body = submit_body("outside");
    let answer = Answer::from_wire(&ask_once(gateway.address(), &submit_request(&body)).await?)?;
    if answer.status != 202 {
        bail!("a submit was answered {answer:?}");
    }
    let constant = Constant::start(&answer, gateway.directory.path()).await?;
    let ask = |url| Ask { url, path: "/v1/jobs", body: &body, keys: "new", wait_seconds: 0, connections: CONNECTIONS };
    let ours = [("gateway", gateway.part.pid), ("redis", gateway.redis.part.pid)];
    let theirs = [("axum", constant.part.pid)];
    let directory = gateway.directory.path();
    wrk(directory, &ask(&gateway.url), WARM_UP, &ours).await?;
    wrk(directory, &ask(&constant.url), WARM_UP, &theirs).await?;
    let mut rounds = Vec::new();
    for _ in 0..bounds.rounds {
        gateway.redis.flush()?;
        let one = wrk(directory, &ask(&gateway.url), bounds.window, &ours).await?;
        let other = wrk(directory, &ask(&constant.url), bounds.window, &theirs).await?;
        rounds.push((one, other));
    }
    report.comparison("HTTP submit, 64 connections", "axum, the same answer as a constant", Aim::AtLeast(0.40), rounds);
    Ok(())
}

/// `POST /proxy/{route}/…` with new keys: a whole job with its provider, against nginx that passes the request to the same provider.
pub(crate) async fn proxy_against_nginx(bounds: Bounds, report: &mut Report) -> Result<()> {
    let gateway = Gateway::start().await?;
    let directory = gateway.directory.path();
    let nginx = Nginx::start(&gateway.provider.url, directory).await?;
    let through_us = Ask {
        url: &gateway.url,
        path: "/proxy/constant/v1/prints",
        body: INPUT,
        keys: "new",
        wait_seconds: 0,
        connections: CONNECTIONS,
    };
    let through_nginx =
        Ask { url: &nginx.url, path: "/v1/prints", body: INPUT, keys: "new", wait_seconds: 0, connections: CONNECTIONS };
    let provider = ("provider", gateway.provider.part.pid);
    let ours = [("gateway", gateway.part.pid), ("redis", gateway.redis.part.pid), provider];
    let theirs = [("nginx", nginx.part.pid), provider];
    wrk(directory, &through_us, WARM_UP, &ours).await?;
    wrk(directory, &through_nginx, WARM_UP, &theirs).await?;
    let mut rounds = Vec::new();
    for _ in 0..bounds.rounds {
        gateway.redis.flush()?;
        let one = wrk(directory, &through_us, bounds.window, &ours).await?;
        let other = wrk(directory, &through_nginx, bounds.window, &theirs).await?;
        rounds.push((one, other));
    }
    report.comparison("/proxy, 64 connections", "nginx proxy_pass, one process", Aim::AtLeast(0.25), rounds);
    Ok(())
}

/// What `/proxy`, and nginx, add to a direct call of the same provider: latencies by one connection and by many, by turns.
pub(crate) async fn overhead(bounds: Bounds, report: &mut Report) -> Result<()> {
    let gateway = Gateway::start().await?;
    let directory = gateway.directory.path();
    let nginx = Nginx::start(&gateway.provider.url, directory).await?;
    for connections in OVERHEAD_CONNECTIONS {
        let ask = |url, path| Ask { url, path, body: INPUT, keys: "new", wait_seconds: 0, connections };
        let direct = ask(&gateway.provider.url, "/v1/prints");
        let through_nginx = ask(&nginx.url, "/v1/prints");
        let through_us = ask(&gateway.url, "/proxy/constant/v1/prints");
        let provider = ("provider", gateway.provider.part.pid);
        let theirs = [("nginx", nginx.part.pid), provider];
        let ours = [("gateway", gateway.part.pid), ("redis", gateway.redis.part.pid), provider];
        let mut rounds = Vec::new();
        // The first round warms up.
        for round in 0..=bounds.rounds {
            gateway.redis.flush()?;
            let sides = [
                wrk(directory, &direct, bounds.window, &[provider]).await?,
                wrk(directory, &through_nginx, bounds.window, &theirs).await?,
                wrk(directory, &through_us, bounds.window, &ours).await?,
            ];
            if round > 0 {
                rounds.push(sides);
            }
        }
        report.overhead(connections, rounds);
    }
    Ok(())
}

/// `POST /v1/jobs` with `Prefer: wait`: submit, provider, finish, answer.
pub(crate) async fn whole_jobs(bounds: Bounds, report: &mut Report) -> Result<()> {
    let gateway = Gateway::start().await?;
    let body = submit_body("constant");
    let ask = Ask { url: &gateway.url, path: "/v1/jobs", body: &body, keys: "new", wait_seconds: 10, connections: CONNECTIONS };
    let name = "whole job, HTTP with Prefer: wait, 64 connections";
    alone(&gateway, &ask, name, bounds, report).await
}

/// The same key again and again: a finished job with its result comes back.
pub(crate) async fn duplicates(bounds: Bounds, report: &mut Report) -> Result<()> {
    let gateway = Gateway::start().await?;
    let body = submit_body("constant");
    let ask = Ask { url: &gateway.url, path: "/v1/jobs", body: &body, keys: "same", wait_seconds: 10, connections: CONNECTIONS };
    alone(&gateway, &ask, "duplicate of a finished job, HTTP, 64 connections", bounds, report).await
}

async fn alone(gateway: &Gateway, ask: &Ask<'_>, name: &str, bounds: Bounds, report: &mut Report) -> Result<()> {
    let provider = ("provider", gateway.provider.part.pid);
    let servers = [("gateway", gateway.part.pid), ("redis", gateway.redis.part.pid), provider];
    wrk(gateway.directory.path(), ask, WARM_UP, &servers).await?;
    let mut sides = Vec::new();
    for _ in 0..bounds.rounds {
        sides.push(wrk(gateway.directory.path(), ask, bounds.window, &servers).await?);
    }
    report.alone(name, sides);
    Ok(())
}

/// nginx as a reverse proxy that keeps its connections to the upstream: one process, no log of requests.
struct Nginx {
    part: Part,
    url: String,
}

impl Nginx {
    async fn start(upstream: &str, directory: &Path) -> Result<Nginx> {
        // The port is free now; whoever takes it in between makes nginx fail, and the run.
        let port = TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port();
        let home = directory.join("nginx");
        std::fs::create_dir_all(&home)?;
        let (home, upstream) = (home.display().to_string(), upstream.trim_start_matches("http://"));
        let configuration = format!(
            "daemon off; master_process off; worker_processes 1; pid {home}/pid; error_log {home}/error.log warn;\n\
             events {{ worker_connections 4096; }}\n\
             http {{\n\
               access_log off; keepalive_requests 1000000000; tcp_nodelay on;\n\
               client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;\n\
               uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;\n\
               upstream provider {{ server {upstream}; keepalive 128; keepalive_requests 1000000000; }}\n\
               server {{ listen 127.0.0.1:{port}; location / {{\n\
                 proxy_pass http://provider; proxy_http_version 1.1; proxy_set_header Connection \"\";\n\
               }} }}\n\
             }}\n"
        );
        let file = directory.join("nginx.conf");
        std::fs::write(&file, configuration)?;
        let mut command = Command::new("nginx");
        command.arg("-c").arg(&file).args(["-p", &home]).stderr(std::process::Stdio::null());
        let part = Part::start(&mut command)?;
        let address = format!("127.0.0.1:{port}");
        process::until("nginx listens", async || TcpStream::connect(&address).await.is_ok()).await?;
        Ok(Nginx { part, url: format!("http://{address}") })
    }
}
