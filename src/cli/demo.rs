//! `onejob demo`: a gateway on a Redis of its own, a print shop with two simulated printers over real HTTP, and what goes wrong
//! between a client and a printer. What it claims it checks: against the gateway's answers and against the printers' own ledgers.
//!
//! Everything goes through the front door: the gateway is asked over HTTP, and so are the ledgers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use onejob::config::{Config, Environment, Sources};
use onejob::provider::simulated::{Simulated, SimulatedOptions};
use serde_json::{Value, json};

use super::client::{Answer, Call, Client};
use super::gateway::Gateway;
use super::show::{Spinner, Standing};
use super::signals::Signals;
use super::{Context, Exit, Failure, OrExit as _, say, show};

/// How long one answer may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long a situation may take to come about.
const SITUATION_DEADLINE: Duration = Duration::from_secs(10);
/// How long the gateway waits for a printer before it does not know: the laser's is waited out, the inkjet's is never reached.
const LASER_TOTAL: &str = "1500ms";
const INKJET_TOTAL: &str = "10s";
/// How long a printer takes that is slow, but not too slow: much longer than the other one takes to be sent for and to print.
const SLOW: &str = "delay=1500ms";
/// Where temporary data directories are made.
const TEMPORARY: &str = "/tmp";
/// How long the demo's end waits for what still runs.
const DRAIN: Duration = Duration::from_secs(2);

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Ends after the table instead of serving on.
    #[arg(long)]
    once: bool,
    /// Where the gateway listens. Port 0: any free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Where its Redis keeps its data. A temporary directory by default, removed at the end.
    #[arg(long, value_name = "DIRECTORY")]
    data_dir: Option<PathBuf>,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let mut signals = Signals::listen()?;
    let home = Home::make(arguments.data_dir)?;
    let shop = tokio::select! {
        shop = Shop::open(arguments.listen, home.path()) => shop?,
        signal = signals.next() => return Err(Failure::new(Exit::Interrupted, signal)),
    };
    let spinner = Spinner::start(context.format, "five situations");
    let rows = tokio::select! {
        rows = shop.situations() => rows,
        signal = signals.next() => Err(Failure::new(Exit::Interrupted, signal)),
    };
    drop(spinner);
    let exit = rows.map(|rows| report(&rows, context));
    if !arguments.once && matches!(exit, Ok(Exit::Done)) {
        shop.invite();
        let signal = signals.next().await;
        shop.close().await;
        say(format_args!("{signal}: stopped"));
        return exit;
    }
    shop.close().await;
    exit
}

fn report(rows: &[Row], context: &Context) -> Exit {
    let data: Vec<Value> = rows.iter().map(Row::to_json).collect();
    context.print(&json!({ "situations": data }), || {
        let mut table = show::table(&["situation", "what came of it", "job", "state", "printed"]);
        for row in rows {
            table.add_row([row.situation, row.shown(), &row.job, &row.state, &row.printed()]);
        }
        show::lines(&table)
    });
    let differences: Vec<String> = rows
        .iter()
        .flat_map(|row| row.differences.iter().map(move |difference| format!("{}: {difference}", row.situation)))
        .collect();
    if differences.is_empty() {
        say("every row was checked against the gateway's answers and the printers' ledgers");
        return Exit::Done;
    }
    say(format_args!("not as promised:\n  {}", differences.join("\n  ")));
    Exit::Failed
}

/// The data directory; a temporary one goes when this does.
pub(super) enum Home {
    Given(PathBuf),
    Temporary(PathBuf),
}

impl Home {
    pub(super) fn make(given: Option<PathBuf>) -> Result<Self, Failure> {
        if let Some(path) = given {
            return Ok(Home::Given(path));
        }
        let path = Path::new(TEMPORARY).join(format!("onejob-demo-{}", uuid::Uuid::new_v4().simple()));
        std::fs::DirBuilder::new().mode(0o700).create(&path).or_exit(Exit::Unavailable)?;
        Ok(Home::Temporary(path))
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Home::Given(path) | Home::Temporary(path) => path,
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Home::Temporary(path) = self
            && let Err(error) = std::fs::remove_dir_all(&path)
        {
            say(format_args!("cannot remove {}: {error}", path.display()));
        }
    }
}

/// The print shop: a gateway, and two printers as its providers.
struct Shop {
    gateway: Gateway,
    client: Client,
    inkjet: Printer,
    laser: Printer,
    /// Sets the keys of this run apart from those of an earlier one in the same data directory.
    run: String,
}

struct Printer {
    name: &'static str,
    simulated: Simulated,
    client: Client,
}

impl Printer {
    async fn start(name: &'static str, behaviour: &str) -> Result<Self, Failure> {
        let options = SimulatedOptions { name: name.to_owned(), behaviour: behaviour.to_owned(), ..SimulatedOptions::default() };
        let simulated = Simulated::start(options).await.or_exit(Exit::Unavailable)?;
        let client = Client::build(&simulated.base_url(), None, TIMEOUT)?;
        Ok(Printer { name, simulated, client })
    }

    /// How often this printer printed for a job: its own word, not the gateway's.
    async fn executions(&self, job: &str) -> Result<u64, Failure> {
        let ledger = self.client.send(&Call::get(format!("/ledger?job={job}"))).await.or_exit(Exit::Internal)?.into_data()?;
        ledger["executed"].as_u64().ok_or_else(|| Failure::new(Exit::Internal, "the ledger does not count executions"))
    }

    async fn behave(&self, behaviour: &str) -> Result<(), Failure> {
        self.client.send(&Call::put("/behaviour", behaviour)).await.or_exit(Exit::Internal)?.into_data().map(drop)
    }
}

/// One situation, and what came of it.
struct Row {
    situation: &'static str,
    outcome: String,
    job: String,
    state: String,
    executions: BTreeMap<&'static str, u64>,
    /// What is not as promised: nothing, unless there is a bug.
    differences: Vec<String>,
}

impl Row {
    fn new(situation: &'static str) -> Self {
        Row {
            situation,
            outcome: String::new(),
            job: String::new(),
            state: String::new(),
            executions: BTreeMap::new(),
            differences: Vec::new(),
        }
    }

    fn expect<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, actual: T, promised: T) {
        if actual != promised {
            self.differences.push(format!("{what} is {actual:?}, promised is {promised:?}"));
        }
    }

    fn shown(&self) -> &str {
        if self.differences.is_empty() { &self.outcome } else { "NOT AS PROMISED, see below" }
    }

    fn printed(&self) -> String {
        let printers: Vec<String> = self.executions.iter().map(|(printer, count)| format!("{printer} {count}")).collect();
        printers.join(", ")
    }

    fn to_json(&self) -> Value {
        json!({
            "situation": self.situation,
            "outcome": self.outcome,
            "job": self.job,
            "state": self.state,
            "executions": self.executions,
            "differences": self.differences,
        })
    }
}

impl Shop {
    async fn open(listen: SocketAddr, data_dir: &Path) -> Result<Self, Failure> {
        let inkjet = Printer::start("inkjet", "jam").await?;
        let laser = Printer::start("laser", "succeed").await?;
        let config = configuration(listen, data_dir, &inkjet, &laser)?;
        let gateway = Gateway::start(&config).await?;
        let client = Client::build(&gateway.url(), None, TIMEOUT)?;
        let run = uuid::Uuid::new_v4().simple().to_string()[..8].to_owned();
        Ok(Shop { gateway, client, inkjet, laser, run })
    }

    async fn close(self) {
        self.gateway.stop(DRAIN).await;
        self.inkjet.simulated.shutdown().await;
        self.laser.simulated.shutdown().await;
    }

    async fn situations(&self) -> Result<Vec<Row>, Failure> {
        Ok(vec![
            self.double_click().await?,
            self.other_request().await?,
            self.timeout().await?,
            self.reverse_order().await?,
            self.jam().await?,
        ])
    }

    /// Two clicks at the same moment.
    async fn double_click(&self) -> Result<Row, Failure> {
        let mut row = Row::new("double click");
        let order = self.order("photo", "double-click", json!({ "file": "invoice.pdf", "simulate": "delay=200ms" }));
        let (first, second) = tokio::join!(self.client.send(&order), self.client.send(&order));
        let (first, second) = (first.or_exit(Exit::Unavailable)?, second.or_exit(Exit::Unavailable)?);
        let mut replayed = [replayed(&first), replayed(&second)];
        replayed.sort();
        row.expect("Idempotency-Replayed of both answers", replayed, ["false".to_owned(), "true".to_owned()]);
        let (first, second) = (first.into_data()?, second.into_data()?);
        row.expect("the second click's job", id(&second), id(&first));
        let job = self.settled(&id(&first)).await?;
        self.check(&mut row, &job, "succeeded", [0, 1]).await?;
        row.outcome = "two requests, one job, one print".to_owned();
        Ok(row)
    }

    /// The key of the double click, for another file.
    async fn other_request(&self) -> Result<Row, Failure> {
        let mut row = Row::new("same key, other request");
        let before = self
            .submitted(&self.order("photo", "double-click", json!({ "file": "invoice.pdf", "simulate": "delay=200ms" })))
            .await?;
        let refused = self
            .client
            .send(&self.order("photo", "double-click", json!({ "file": "holiday.jpg" })))
            .await
            .or_exit(Exit::Unavailable)?;
        row.expect("the status", refused.status.as_u16(), 409);
        row.expect("the problem", refused.problem(), "key-conflict");
        let job = self.read(&id(&before)).await?;
        row.expect("the job afterwards", &job, &before);
        self.check(&mut row, &job, "succeeded", [0, 1]).await?;
        row.outcome = format!("{} {}, nothing changed", refused.status.as_u16(), refused.problem());
        Ok(row)
    }

    /// The printer prints and says nothing.
    async fn timeout(&self) -> Result<Row, Failure> {
        let mut row = Row::new("timeout");
        let order = self.order("photo", "timeout", json!({ "file": "contract.pdf", "simulate": "hang" }));
        let submitted = self.submitted(&order).await?;
        let job = self.settled(&id(&submitted)).await?;
        row.expect("the state after the timeout", show::text(&job, "state"), "unknown".to_owned());

        let another = Call::change(format!("/v1/jobs/{}/attempts", id(&job)), &json!({ "provider": "laser", "lease_ms": 5000 }));
        let refused = self.client.send(&another).await.or_exit(Exit::Unavailable)?;
        row.expect("the status of another attempt", refused.status.as_u16(), 409);
        row.expect("the problem of another attempt", refused.problem(), "attempt-blocked");

        // Somebody looks at the printer: it has printed.
        row.expect("prints before anybody decided", self.laser.executions(&id(&job)).await?, 1);
        let decision = json!({
            "outcome": "succeeded",
            "reason": "it lies in the tray",
            "actor": "operator",
            "result": { "pages": 3 },
            "then": "end",
            "word": "operator",
        });
        let resolve = Call::change(format!("/v1/jobs/{}/attempts/1/resolve", id(&job)), &decision);
        self.client.send(&resolve).await.or_exit(Exit::Unavailable)?.into_data()?;

        let again = self.submitted(&order).await?;
        row.expect("the same key's job", id(&again), id(&job));
        row.expect("the same key's result", result(&again), json!({ "pages": 3 }));
        self.check(&mut row, &again, "succeeded", [0, 1]).await?;
        row.outcome = "unknown; next attempt 409; resolved by a person; the key tells the truth".to_owned();
        Ok(row)
    }

    /// Two attempts race; the first one is still printing when the second one has finished.
    async fn reverse_order(&self) -> Result<Row, Failure> {
        let mut row = Row::new("reverse order");
        self.inkjet.behave(SLOW).await?;
        let submitted = self.submitted(&self.order("preview", "reverse-order", json!({ "file": "poster.pdf" }))).await?;
        let won = self.ended(&id(&submitted)).await?;
        row.expect("the winner", show::text(&won, "provider"), "laser".to_owned());
        row.expect("the winning attempt", won["completed_by"].as_u64(), Some(2));
        let is_late = |answer: &Answer| answer.body["attempts"][0]["state"] == "discarded";
        let job = self.until(&id(&submitted), is_late).await?;
        self.inkjet.behave("jam").await?;
        row.expect("the late attempt", show::text(&job["attempts"][0], "state"), "discarded".to_owned());
        row.expect("the result afterwards", result(&job), result(&won));
        self.check(&mut row, &job, "succeeded", [1, 1]).await?;
        row.outcome = "the second attempt won, the first came late: discarded".to_owned();
        Ok(row)
    }

    /// The first printer jams, and says so.
    async fn jam(&self) -> Result<Row, Failure> {
        let mut row = Row::new("jam");
        let submitted = self.submitted(&self.order("print", "jam", json!({ "file": "letter.pdf" }))).await?;
        let job = self.ended(&id(&submitted)).await?;
        row.expect("the first attempt", show::text(&job["attempts"][0], "state"), "failed".to_owned());
        row.expect("the winner", show::text(&job, "provider"), "laser".to_owned());
        self.check(&mut row, &job, "succeeded", [0, 1]).await?;
        row.outcome = "a definite refusal, so the other printer took over".to_owned();
        Ok(row)
    }

    /// What every row ends with: the state, and the printers' own count of what they did.
    async fn check(&self, row: &mut Row, job: &Value, state: &str, [inkjet, laser]: [u64; 2]) -> Result<(), Failure> {
        (row.job, row.state) = (id(job), show::text(job, "state"));
        row.expect("the state", row.state.clone(), state.to_owned());
        for (printer, promised) in [(&self.inkjet, inkjet), (&self.laser, laser)] {
            let executions = printer.executions(&row.job).await?;
            row.expect(&format!("prints by {}", printer.name), executions, promised);
            row.executions.insert(printer.name, executions);
        }
        if !row.differences.is_empty() {
            row.differences.push(format!("the job is {job}"));
        }
        Ok(())
    }

    fn order(&self, route: &str, key: &str, input: Value) -> Call {
        Call::post("/v1/jobs", &json!({ "route": route, "input": input })).keyed(&format!("{key}-{}", self.run))
    }

    async fn submitted(&self, order: &Call) -> Result<Value, Failure> {
        self.client.send(order).await.or_exit(Exit::Unavailable)?.into_data()
    }

    async fn read(&self, id: &str) -> Result<Value, Failure> {
        self.client.send(&Call::get(format!("/v1/jobs/{id}"))).await.or_exit(Exit::Unavailable)?.into_data()
    }

    /// Waits until a job has ended, or is unknown.
    async fn settled(&self, id: &str) -> Result<Value, Failure> {
        self.until(id, |answer| show::standing(&answer.body) != Some(Standing::Open)).await
    }

    async fn ended(&self, id: &str) -> Result<Value, Failure> {
        self.until(id, |answer| !answer.body["ended_ms"].is_null()).await
    }

    /// Reads until a job is as wanted, or for so long that it never will be.
    async fn until(&self, id: &str, wanted: impl Fn(&Answer) -> bool) -> Result<Value, Failure> {
        /// How often a condition is looked at again.
        const LOOK_AGAIN: Duration = Duration::from_millis(20);
        let read = async {
            loop {
                let answer = self.client.send(&Call::get(format!("/v1/jobs/{id}"))).await.or_exit(Exit::Unavailable)?;
                if !answer.status.is_success() || wanted(&answer) {
                    return answer.into_data();
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        match tokio::time::timeout(SITUATION_DEADLINE, read).await {
            Ok(read) => read,
            // As it is: the row's expectations say what is wrong with it.
            Err(_) => self.read(id).await,
        }
    }

    fn invite(&self) {
        let (url, inkjet, laser) = (self.gateway.url(), self.inkjet.simulated.base_url(), self.laser.simulated.base_url());
        // It need not be on PATH.
        let onejob = std::env::current_exe().map_or_else(|_| "onejob".to_owned(), |path| path.display().to_string());
        say(format_args!(
            r#"
the gateway  {url}   routes: print (inkjet, then laser), photo (laser), preview (a race)
the ledgers  {inkjet}/ledger  {laser}/ledger

try, more than once:
  curl -i {url}/v1/jobs -H 'content-type: application/json' -H 'idempotency-key: "mine-1"' \
    -d '{{"route":"print","input":{{"file":"a.pdf"}}}}'
  curl -i {url}/v1/jobs -H 'content-type: application/json' -H 'idempotency-key: "mine-2"' \
    -d '{{"route":"photo","input":{{"simulate":"hang"}}}}'
  {onejob} list --gateway {url}
the second one's printer hangs: after 2 s its job is unknown, and listed.
Ctrl-C ends it."#
        ));
    }
}

/// The shop's configuration: what a person would write, and nothing from the environment.
fn configuration(listen: SocketAddr, data_dir: &Path, inkjet: &Printer, laser: &Printer) -> Result<Config, Failure> {
    let timeouts = |total: &str| format!("{{ total = \"{total}\" }}");
    let settings = [
        ("server.listen", listen.to_string()),
        ("redis.data_dir", data_dir.display().to_string()),
        ("provider.inkjet.base_url", inkjet.simulated.base_url()),
        ("provider.inkjet.path", "/prints".to_owned()),
        ("provider.inkjet.timeouts", timeouts(INKJET_TOTAL)),
        ("provider.laser.base_url", laser.simulated.base_url()),
        ("provider.laser.path", "/prints".to_owned()),
        ("provider.laser.timeouts", timeouts(LASER_TOTAL)),
        // A jam is a definite refusal: these two printers are interchangeable, says whoever writes gate = "off".
        ("route.print.providers", r#"["inkjet", "laser"]"#.to_owned()),
        ("route.print.failover_on", r#"["not_sent", "rejected:422"]"#.to_owned()),
        ("route.print.gate", "off".to_owned()),
        ("route.photo.providers", r#"["laser"]"#.to_owned()),
        ("route.preview.class", "race".to_owned()),
        ("route.preview.effects", "pure".to_owned()),
        ("route.preview.providers", r#"["inkjet", "laser"]"#.to_owned()),
        ("route.preview.race", r#"{ after = "100ms", max = 2 }"#.to_owned()),
        ("route.preview.gate", "off".to_owned()),
    ];
    let overrides = settings.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    Ok(Config::load(Sources { file: None, overrides, environment: Environment::Given(BTreeMap::new()) })?)
}

fn id(job: &Value) -> String {
    show::text(job, "id")
}

fn result(job: &Value) -> Value {
    job["result"]["body"].clone()
}

fn replayed(answer: &Answer) -> String {
    let value = answer.headers.get("idempotency-replayed").and_then(|value| value.to_str().ok());
    value.unwrap_or_default().to_owned()
}
