//! The ways in for others than Rust: HTTP, and a pipe. Each beside the library and `SET NX PX` in the same turns.

use super::*;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use process::Part;

/// The program, of the same build.
const ONEJOB: &str = env!("CARGO_BIN_EXE_onejob");
/// `redis-benchmark` writes twelve digits for this, others at each place, and reads how many values they can have as an int.
const RANDOM: [&str; 2] = ["__rand_int__", "2147483647"];
/// Turns of each way.
const TURNS: usize = 9;
/// Lines of a turn through the pipe: a process is started for each.
const LINES: usize = 200_000;

/// `SET NX PX` by `redis-benchmark`: how many a second.
pub(crate) async fn set_nx_px(redis: &Redis, calls: usize, pipeline: u32) -> Result<f64> {
    let mut program = Command::new("redis-benchmark");
    program.args(["-s", redis.socket(), "-n", &calls.to_string(), "-r", RANDOM[1], "--csv", "-P", &pipeline.to_string()]);
    program.args(["SET", &format!("click:{}", RANDOM[0]), "1", "NX", "PX", "86400000"]);
    let output = program.kill_on_drop(true).output().await.context("cannot run redis-benchmark")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // "name","rps",… and five more numbers; the name is the whole command.
    let rate = text.lines().last().and_then(|line| line.rsplit(',').nth(6)).and_then(|word| word.trim_matches('"').parse().ok());
    rate.with_context(|| format!("redis-benchmark said {text:?} {:?}", String::from_utf8_lossy(&output.stderr)))
}

/// A gateway with one stream.
struct Gateway {
    part: Part,
    url: String,
    client: Client<HttpConnector, Full<Bytes>>,
    _directory: tempfile::TempDir,
}

impl Gateway {
    async fn start(redis: &Redis) -> Result<Gateway> {
        let directory = process::directory()?;
        let path = |name: &str| directory.path().join(name);
        let configuration = "[server]\nlisten = \"127.0.0.1:0\"\n[stream.clicks]\nfields = [\"user\"]\nkeep = \"1s\"\n";
        std::fs::write(path("onejob.toml"), configuration)?;
        let mut command = Command::new(ONEJOB);
        command.env_clear().arg("serve").arg("--config").arg(path("onejob.toml"));
        command.args(["--log", "warn", "--redis", &redis.url()]);
        command.arg("--set").arg(format!("redis.data_dir={}", path("data").display()));
        command.stderr(std::fs::File::create(path("gateway.log"))?);
        let started = Part::start_and_listen(&mut command, "onejob listens on").await;
        let log = || std::fs::read_to_string(path("gateway.log")).unwrap_or_default();
        let (part, url) = started.with_context(|| format!("the gateway did not start: {}", log()))?;
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Gateway { part, url, client, _directory: directory })
    }

    /// One array of new clicks.
    async fn check(&self, from: usize) -> Result<()> {
        let clicks: Vec<String> = (from..from + BATCH).map(|number| format!(r#"{{"user":{number}}}"#)).collect();
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}/v1/dedup/clicks", self.url))
            .header("content-type", "application/json")
            .header("idempotency-key", format!("from-{from}"))
            .body(Full::new(Bytes::from(format!("[{}]", clicks.join(",")))))?;
        let response = self.client.request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        ensure!(status == StatusCode::OK, "{status}: {}", String::from_utf8_lossy(&body));
        let told: serde_json::Value = serde_json::from_slice(&body)?;
        ensure!(told["counts"]["first"] == BATCH, "a new click is taken for another one: {}", told["counts"]);
        Ok(())
    }
}

/// New lines through `onejob dedup`, from a file to a file; with a state, so that it could be killed, or without.
async fn pipe(redis: &Redis, from: usize, state: bool) -> Result<()> {
    let directory = process::directory()?;
    let path = |name: &str| directory.path().join(name);
    let lines: String = (from..from + LINES).map(|number| format!("{number}\n")).collect();
    std::fs::write(path("in"), &lines)?;
    let mut command = Command::new(ONEJOB);
    command.env_clear().arg("dedup").args(["--set", &format!("redis.url={}", redis.url())]);
    command.args(["--lines", "--stream", "lines", "--summary", "json"]);
    command.arg("--input").arg(path("in")).arg("--output").arg(path("out"));
    if state {
        command.arg("--state").arg(path("state"));
    }
    let output = command.kill_on_drop(true).output().await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(std::fs::read(path("out"))? == lines.as_bytes(), "a new line is taken for another one");
    Ok(())
}

/// Clicks a second by each way, and what Redis and the gateway spend.
pub(crate) async fn ways() -> Result<Table> {
    let (set, library, http, filter) =
        (Redis::start().await?, Redis::start().await?, Redis::start().await?, Redis::start().await?);
    let (store, _) = Store::connect(StoreOptions::new(&library.url())).await?;
    let dedup = Dedup::new(&store, Stream { keep: Duration::from_secs(1), ..Stream::new("clicks", &["user"]) })?;
    let gateway = Gateway::start(&http).await?;
    let mut costs: [Costs; 5] = std::array::from_fn(|_| Costs::default());
    let mut gateway_us = Vec::new();
    for turn in 0..TURNS {
        let from = turn * TURN;
        let cpu = redis_cpu(&set)?;
        costs[0].rate.push(set_nx_px(&set, TURN, PIPELINES[1]).await?);
        costs[0].cpu_us.push((redis_cpu(&set)? - cpu).as_secs_f64() * 1e6 / TURN as f64);
        let ids: Vec<ClickId> = (from..from + TURN).map(|number| id(dedup.stream(), number)).collect::<Result<_>>()?;
        costs[1].turn(&library, TURN, all_first(&dedup, &ids)).await?;
        let spent = process::cpu(gateway.part.pid)?;
        let batches = stream::iter((from..from + TURN).step_by(BATCH).map(Ok));
        costs[2].turn(&http, TURN, batches.try_for_each_concurrent(AT_ONCE, |from| gateway.check(from))).await?;
        gateway_us.push((process::cpu(gateway.part.pid)? - spent).as_secs_f64() * 1e6 / TURN as f64);
        let from = 2 * turn * LINES;
        costs[3].turn(&filter, LINES, pipe(&filter, from, false)).await?;
        costs[4].turn(&filter, LINES, pipe(&filter, from + LINES, true)).await?;
    }
    let mut table =
        Table::new("clicks-ways", &["way", "clicks a second", "to `SET NX PX`", "µs of Redis an id", "µs of the gateway an id"]);
    let names = [
        "`SET NX PX` by 500, `redis-benchmark`",
        "library, batches of 500",
        "HTTP, arrays of 500",
        "`onejob dedup`, a file of 200,000 lines",
        "… with `--state`",
    ];
    let theirs = median(&costs[0].rate);
    for (name, costs) in names.into_iter().zip(&costs) {
        let rate = median(&costs.rate);
        let gateway = if name.starts_with("HTTP") { format!("{:.2}", median(&gateway_us)) } else { "–".to_owned() };
        let cells = [grouped(rate as u64), format!("{:.2}", rate / theirs), format!("{:.2}", median(&costs.cpu_us)), gateway];
        table.row([vec![name.to_owned()], cells.to_vec()].concat());
    }
    table.note("A turn through the pipe has a start and an end of the process in it.")?;
    Ok(table)
}

impl Costs {
    async fn turn(&mut self, redis: &Redis, ids: usize, work: impl Future<Output = Result<()>>) -> Result<()> {
        let (cpu, began) = (redis_cpu(redis)?, Instant::now());
        work.await?;
        self.rate.push(ids as f64 / began.elapsed().as_secs_f64());
        self.cpu_us.push((redis_cpu(redis)? - cpu).as_secs_f64() * 1e6 / ids as f64);
        Ok(())
    }
}
