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
        let configuration = "[server]\nlisten = \"127.0.0.1:0\"\n[stream.clicks]\nfields = [\"user\"]\nkeep = \"1s\"\n\
                             [stream.mirrored]\nfields = [\"user\"]\nkeep = \"1s\"\nmirrored = true\n";
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

    /// One array of clicks that are new to a stream.
    async fn check(&self, stream: &str, from: usize) -> Result<()> {
        let clicks: Vec<String> = (from..from + BATCH).map(|number| format!(r#"{{"user":{number}}}"#)).collect();
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}/v1/dedup/{stream}", self.url))
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
async fn pipe(redis: &Redis, from: usize, mirrored: bool, state: bool) -> Result<()> {
    let directory = process::directory()?;
    let path = |name: &str| directory.path().join(name);
    let lines: String = (from..from + LINES).map(|number| format!("{number}\n")).collect();
    std::fs::write(path("in"), &lines)?;
    let mut command = Command::new(ONEJOB);
    command.env_clear().arg("dedup").args(["--set", &format!("redis.url={}", redis.url())]);
    command.args(["--lines", "--stream", if mirrored { "mirrored" } else { "lines" }, "--summary", "json"]);
    if mirrored {
        command.arg("--mirrored");
    }
    command.arg("--input").arg(path("in")).arg("--output").arg(path("out"));
    if state {
        command.arg("--state").arg(path("state"));
    }
    let output = command.kill_on_drop(true).output().await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(std::fs::read(path("out"))? == lines.as_bytes(), "a new line is taken for another one");
    Ok(())
}

/// The ways.
const WAYS: [&str; 10] = [
    "`SET NX PX` by 16, `redis-benchmark`",
    "`SET NX PX` by 500",
    "library, batches of 500",
    "… mirrored",
    "HTTP, arrays of 500",
    "… mirrored",
    "`onejob dedup`, a file of 200,000 lines",
    "… with `--mirrored`",
    "… with `--state`",
    "… with both",
];

/// Clicks a second by each way, and what Redis and the gateway spend.
pub(crate) async fn ways() -> Result<Table> {
    let (set, library, http, filter) =
        (Redis::start().await?, Redis::start().await?, Redis::start().await?, Redis::start().await?);
    let (store, _) = Store::connect(StoreOptions::new(&library.url())).await?;
    let stream = |mirrored| {
        let name = if mirrored { "mirrored" } else { "clicks" };
        Stream { keep: Duration::from_secs(1), mirrored, ..Stream::new(name, &["user"]) }
    };
    let streams = [Dedup::new(&store, stream(false))?, Dedup::new(&store, stream(true))?];
    let gateway = Gateway::start(&http).await?;
    let mut costs: [Costs; WAYS.len()] = std::array::from_fn(|_| Costs::default());
    let mut gateway_us: [Vec<f64>; WAYS.len()] = Default::default();
    for turn in 0..TURNS {
        let from = turn * TURN;
        for (costs, pipeline) in costs.iter_mut().zip(PIPELINES) {
            let cpu = redis_cpu(&set)?;
            costs.rate.push(set_nx_px(&set, TURN, pipeline).await?);
            costs.cpu_us.push((redis_cpu(&set)? - cpu).as_secs_f64() * 1e6 / TURN as f64);
        }
        for (costs, dedup) in costs[2..].iter_mut().zip(&streams) {
            let ids: Vec<ClickId> = (from..from + TURN).map(|number| id(dedup.stream(), number)).collect::<Result<_>>()?;
            costs.turn(&library, TURN, all_first(dedup, &ids)).await?;
        }
        for ((costs, gateway_us), dedup) in costs[4..].iter_mut().zip(&mut gateway_us[4..]).zip(&streams) {
            let spent = process::cpu(gateway.part.pid)?;
            let batches = stream::iter((from..from + TURN).step_by(BATCH).map(Ok));
            let name = &dedup.stream().name;
            costs.turn(&http, TURN, batches.try_for_each_concurrent(AT_ONCE, |from| gateway.check(name, from))).await?;
            gateway_us.push((process::cpu(gateway.part.pid)? - spent).as_secs_f64() * 1e6 / TURN as f64);
        }
        let from = 2 * turn * LINES;
        for (costs, (mirrored, state)) in costs[6..].iter_mut().zip([(false, false), (true, false), (false, true), (true, true)])
        {
            let from = if state { from + LINES } else { from };
            costs.turn(&filter, LINES, pipe(&filter, from, mirrored, state)).await?;
        }
    }
    let head = ["way", "clicks a second", "to `SET`", "µs of Redis an id", "µs of the gateway an id"];
    let mut table = Table::new("clicks-ways", &head);
    let theirs = [median(&costs[0].rate), median(&costs[1].rate)];
    for ((name, costs), gateway_us) in WAYS.into_iter().zip(&costs).zip(&gateway_us) {
        let rate = median(&costs.rate);
        let gateway = if gateway_us.is_empty() { "–".to_owned() } else { format!("{:.2}", median(gateway_us)) };
        let to_set = format!("{:.2} · {:.2}", rate / theirs[0], rate / theirs[1]);
        table.row(vec![name.to_owned(), grouped(rate as u64), to_set, format!("{:.2}", median(&costs.cpu_us)), gateway]);
    }
    table.note("`SET` is by 16, then by 500. A turn through the pipe has a start and an end of the process in it.")?;
    Ok(table)
}
