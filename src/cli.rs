//! The command line: arguments, output, exit codes. One file a command in `cli/`.
//!
//! Data goes to stdout, words go to stderr; `--json` makes the data JSON, one document a call. What a program needs to know is in
//! the exit code ([`Exit`]), which `--help` documents. Commands about jobs talk HTTP to a gateway, as any client would: they have
//! no other way to a job than everybody has.
//!
//! Deliberately not here: settings of the gateway (they are keys of the configuration, and `--set` sets each), rules about jobs.

use std::ffi::OsString;
use std::fmt;
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Parser, Subcommand};
use onejob::config::{Config, ConfigError, Environment, Sources};
use onejob::qualify::Standing;
use serde_json::{Value, json};

mod assemble;
mod bench;
mod cancel;
mod certificates;
mod client;
mod config;
mod dedup;
mod demo;
mod doctor;
mod gateway;
mod get;
mod list;
mod openapi;
mod progress;
mod qualify;
mod renewal;
mod reopen;
mod resolve;
mod resume;
mod script;
mod serve;
mod show;
mod signals;
mod simulate;
mod submit;
mod wait;

/// How long after its end the process waits for threads that do not end by themselves.
const LAST_THREADS: Duration = Duration::from_millis(100);

/// One job per intent, over Redis.
#[derive(Parser)]
#[command(name = "onejob", version, about, after_help = Exit::table(), max_term_width = 120, propagate_version = true)]
struct Cli {
    /// The configuration, a TOML file.
    #[arg(long, global = true, env = "ONEJOB_CONFIG", value_name = "FILE", help_heading = "Everywhere")]
    config: Option<PathBuf>,
    /// Sets one key of the configuration, over the file and the environment: --set server.listen=127.0.0.1:8080
    #[arg(long, global = true, value_name = "KEY=VALUE", value_parser = setting, help_heading = "Everywhere")]
    set: Vec<(String, String)>,
    /// Writes data as JSON, for programs.
    #[arg(long, global = true, help_heading = "Everywhere")]
    json: bool,
    /// What is logged to stderr: error, warn, info, debug, or target=level, separated by commas.
    #[arg(long, global = true, env = "ONEJOB_LOG", value_name = "FILTER", help_heading = "Everywhere")]
    log: Option<String>,
    /// How it is logged.
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text", help_heading = "Everywhere")]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Runs a gateway until SIGTERM or Ctrl-C, then drains.
    Serve(serve::Arguments),
    /// Shows what onejob is for: a gateway, two providers, and what goes wrong between them.
    Demo(demo::Arguments),
    /// Runs a programmable provider over real HTTP, with a ledger of what it did.
    Simulate(simulate::Arguments),
    /// Submits a job under an idempotency key.
    Submit(submit::Arguments),
    /// Shows a job.
    Get(get::Arguments),
    /// Waits until a job has ended, or is unknown.
    Wait(wait::Arguments),
    /// Lists the unknown jobs, or the open ones.
    List(list::Arguments),
    /// Asks for a job to be canceled.
    Cancel(cancel::Arguments),
    /// Decides what became of an unknown attempt, and says who and why.
    Resolve(resolve::Arguments),
    /// Gives a failed job new attempts.
    Reopen(reopen::Arguments),
    /// Filters records: writes those that are seen for the first time within a window, as they came.
    Dedup(dedup::Arguments),
    /// Runs a route's suite against a provider; where it passes, jobs of the route may fail over there.
    Qualify(qualify::Arguments),
    /// Lists what providers have proved.
    Certificates(certificates::ListArguments),
    /// Takes certificates back for good: no failover goes there any more, by any gateway, within a second.
    Revoke(certificates::MarkArguments),
    /// Takes certificates back for now.
    Suspend(certificates::MarkArguments),
    /// Makes suspended certificates good again.
    Reinstate(certificates::MarkArguments),
    /// Tells whether jobs of a route may fail over, from whom to whom, and why not.
    CanFailover(certificates::CanFailoverArguments),
    /// Looks for what would keep a gateway from keeping its promises.
    Doctor,
    /// Measures what jobs cost on this machine and this Redis, and leaves nothing behind.
    Bench(bench::Arguments),
    /// Checks, prints or begins a configuration.
    #[command(subcommand)]
    Config(config::Command),
    /// Prints the OpenAPI document of the gateway.
    Openapi,
    /// Prints a Lua script as Redis gets it.
    Script(script::Arguments),
}

/// How the process ends: the documented codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    Done,
    Failed,
    Usage,
    Conflict,
    Unknown,
    NotFound,
    Unavailable,
    Timeout,
    Unauthorized,
    Internal,
    Canceled,
    Interrupted,
}

impl Exit {
    const ALL: [Exit; 12] = [
        Exit::Done,
        Exit::Failed,
        Exit::Usage,
        Exit::Conflict,
        Exit::Unknown,
        Exit::NotFound,
        Exit::Unavailable,
        Exit::Timeout,
        Exit::Unauthorized,
        Exit::Internal,
        Exit::Canceled,
        Exit::Interrupted,
    ];

    fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::Conflict => 3,
            Exit::Unknown => 4,
            Exit::NotFound => 5,
            Exit::Unavailable => 6,
            Exit::Timeout => 7,
            Exit::Unauthorized => 8,
            Exit::Internal => 9,
            Exit::Canceled => 10,
            Exit::Interrupted => 130,
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Exit::Done => "done; of a job that was waited for: succeeded",
            Exit::Failed => {
                "the job ended as failed; the demo found something not as promised; dedup wrote what somebody else counted"
            }
            Exit::Usage => "the arguments, the configuration or the request are refused",
            Exit::Conflict => "the key stands for another request, or the job's state does not allow the call",
            Exit::Unknown => "nobody knows whether it happened (unknown, indeterminate); serve left attempts unknown",
            Exit::NotFound => "there is no such job, or it is no longer kept",
            Exit::Unavailable => "the gateway, Redis or stdout cannot be reached or cannot be used; try again later",
            Exit::Timeout => "the time to wait was over; the job goes on",
            Exit::Unauthorized => "the token is missing, not known, or not allowed to do this",
            Exit::Internal => "a bug, here or in the gateway",
            Exit::Canceled => "the job ended as canceled",
            Exit::Interrupted => "a signal ended it before it was through",
        }
    }

    fn table() -> String {
        let lines = Exit::ALL.iter().map(|exit| format!("\n  {:>3}  {}", exit.code(), exit.meaning()));
        format!("Exit codes:{}", lines.collect::<String>())
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit.code())
    }
}

/// Why a command did not do what it was asked for.
struct Failure {
    exit: Exit,
    error: anyhow::Error,
    /// The gateway's own problem, for `--json`.
    problem: Option<Value>,
}

impl Failure {
    fn new(exit: Exit, message: impl fmt::Display + fmt::Debug + Send + Sync + 'static) -> Self {
        Failure { exit, error: anyhow::Error::msg(message), problem: None }
    }

    fn to_json(&self) -> Value {
        self.problem.clone().unwrap_or_else(|| json!({ "error": chain(&self.error), "exit": self.exit.code() }))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&chain(&self.error))
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Failure { exit: Exit::Usage, error: error.into(), problem: None }
    }
}

/// Says with which code the process ends if this error is the end of it.
trait OrExit<T> {
    fn or_exit(self, exit: Exit) -> Result<T, Failure>;
}

impl<T, E: Into<anyhow::Error>> OrExit<T> for Result<T, E> {
    fn or_exit(self, exit: Exit) -> Result<T, Failure> {
        self.map_err(|error| Failure { exit, error: error.into(), problem: None })
    }
}

/// How data is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    Json,
}

/// What every command may need.
struct Context {
    file: Option<PathBuf>,
    overrides: Vec<(String, String)>,
    format: Format,
}

impl Context {
    fn load(&self) -> Result<Config, ConfigError> {
        Config::load(self.sources())
    }

    fn sources(&self) -> Sources {
        Sources { file: self.file.clone(), overrides: self.overrides.clone(), environment: Environment::Process }
    }

    /// Writes data: the value for programs, the text for people.
    fn print(&self, value: &Value, text: impl FnOnce() -> String) {
        match self.format {
            Format::Text => print(&text()),
            Format::Json => print(&format!("{value:#}")),
        }
    }
}

/// Whether data was lost on its way to stdout.
static DATA_LOST: AtomicBool = AtomicBool::new(false);

/// Writes data to stdout. Whoever closed the pipe has seen enough; who reads from a full disk has not, and is
/// told.
fn print(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let written = writeln!(stdout, "{}", text.trim_end_matches('\n')).and_then(|()| stdout.flush());
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
        && !DATA_LOST.swap(true, Ordering::Relaxed)
    {
        say(format_args!("onejob: cannot write to stdout: {error}"));
    }
}

/// An error with its causes, each once: some say their cause themselves.
fn chain(error: &anyhow::Error) -> String {
    let said = error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said.as_str() {
        "" => cause,
        _ if said.contains(&cause) => said,
        _ => format!("{said}: {cause}"),
    });
    if said.contains('\n') {
        // A list: its lines may well say the same.
        return said;
    }
    let mut parts: Vec<&str> = Vec::new();
    for part in said.split(": ") {
        if !parts.contains(&part) {
            parts.push(part);
        }
    }
    parts.join(": ")
}

/// Writes words to stderr. Where nobody listens, nothing is lost.
fn say(words: impl fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{words}");
}

/// The same arguments with each `--set` behind all others, in order: of those before a command and those behind it the parser would
/// forget the first, and what they say of Redis with them.
fn with_settings_last(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments = arguments.peekable();
    let (mut others, mut settings) = (Vec::new(), Vec::new());
    while let Some(argument) = arguments.next_if(|argument| argument != "--") {
        if argument == "--set" {
            settings.push(argument);
            settings.extend(arguments.next());
        } else if argument.as_encoded_bytes().starts_with(b"--set=") {
            settings.push(argument);
        } else {
            others.push(argument);
        }
    }
    others.into_iter().chain(settings).chain(arguments).collect()
}

/// Runs the command that the arguments name.
pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse_from(with_settings_last(onejob::config::arguments()));
    let format = if cli.json { Format::Json } else { Format::Text };
    let context = Context { file: cli.config, overrides: cli.set, format };
    let outcome = start_log(cli.log.as_deref(), cli.log_format, &cli.command).and_then(|()| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().or_exit(Exit::Internal)?;
        let outcome = runtime.block_on(run(cli.command, &context));
        runtime.shutdown_timeout(LAST_THREADS);
        outcome
    });
    match outcome {
        // What the command did stands; what it had to tell about it is gone.
        Ok(Exit::Done) if DATA_LOST.load(Ordering::Relaxed) => Exit::Unavailable.into(),
        Ok(exit) => exit.into(),
        Err(failure) => {
            if format == Format::Json {
                print(&format!("{:#}", failure.to_json()));
            }
            say(format_args!("onejob: {}", chain(&failure.error)));
            failure.exit.into()
        }
    }
}

async fn run(command: Command, context: &Context) -> Result<Exit, Failure> {
    match command {
        Command::Serve(arguments) => serve::run(arguments, context).await,
        Command::Demo(arguments) => demo::run(arguments, context).await,
        Command::Simulate(arguments) => simulate::run(arguments, context).await,
        Command::Submit(arguments) => submit::run(arguments, context).await,
        Command::Get(arguments) => get::run(arguments, context).await,
        Command::Wait(arguments) => wait::run(arguments, context).await,
        Command::List(arguments) => list::run(arguments, context).await,
        Command::Cancel(arguments) => cancel::run(arguments, context).await,
        Command::Resolve(arguments) => resolve::run(arguments, context).await,
        Command::Reopen(arguments) => reopen::run(arguments, context).await,
        Command::Dedup(arguments) => dedup::run(arguments, context).await,
        Command::Qualify(arguments) => qualify::run(arguments, context).await,
        Command::Certificates(arguments) => certificates::list(arguments, context).await,
        Command::Revoke(arguments) => certificates::mark(arguments, Standing::Revoked, context).await,
        Command::Suspend(arguments) => certificates::mark(arguments, Standing::Suspended, context).await,
        Command::Reinstate(arguments) => certificates::mark(arguments, Standing::Live, context).await,
        Command::CanFailover(arguments) => certificates::can_failover(arguments, context).await,
        Command::Doctor => doctor::run(context).await,
        Command::Bench(arguments) => bench::run(arguments, context).await,
        Command::Config(command) => config::run(command, context),
        Command::Openapi => openapi::run(),
        Command::Script(arguments) => script::run(&arguments),
    }
}

fn start_log(filter: Option<&str>, format: LogFormat, command: &Command) -> Result<(), Failure> {
    let default = match command {
        Command::Serve(_) => "info",
        // What goes wrong there is its subject, and stands in its table.
        Command::Demo(_) => "error",
        Command::Simulate(_)
        | Command::Submit(_)
        | Command::Get(_)
        | Command::Wait(_)
        | Command::List(_)
        | Command::Cancel(_)
        | Command::Resolve(_)
        | Command::Reopen(_)
        | Command::Dedup(_)
        | Command::Qualify(_)
        | Command::Certificates(_)
        | Command::Revoke(_)
        | Command::Suspend(_)
        | Command::Reinstate(_)
        | Command::CanFailover(_)
        | Command::Doctor
        | Command::Bench(_)
        | Command::Config(_)
        | Command::Openapi
        | Command::Script(_) => "warn",
    };
    let filter = tracing_subscriber::EnvFilter::try_new(filter.unwrap_or(default)).or_exit(Exit::Usage)?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(())
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, as in server.listen=127.0.0.1:8080")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

/// Reads a duration such as `200ms`, `2s` or `5m`.
fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| format!("{text:?} is no duration such as 200ms, 2s or 5m"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn a_cause_is_said_once_wherever_it_stands() {
        let error = anyhow::Error::msg("not there").context("no call (connect): to a: no call (connect): not there, alas");
        assert_eq!(chain(&error), "no call (connect): to a: not there, alas");
        assert_eq!(chain(&anyhow::Error::msg("cause").context("what")), "what: cause");
    }

    #[test]
    fn each_exit_code_stands_for_one_thing() {
        let mut codes: Vec<u8> = Exit::ALL.iter().map(|exit| exit.code()).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), Exit::ALL.len());
    }
}
