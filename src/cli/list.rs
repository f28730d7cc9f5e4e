//! `onejob list`: the unknown jobs, the longest unknown first; or the open ones.

use serde_json::Value;

use super::client::{Call, Client, GatewayArguments, SAME_READ, Shape};
use super::{Context, Exit, Failure, say, show};

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Which jobs.
    #[arg(long, default_value = "unknown")]
    state: State,
    /// Most jobs to list.
    #[arg(long, default_value_t = 100)]
    limit: u32,
    #[command(flatten)]
    gateway: GatewayArguments,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum State {
    Unknown,
    Open,
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            State::Unknown => "unknown",
            State::Open => "open",
        }
    }
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let client = Client::new(&arguments.gateway, context)?;
    let state = arguments.state.as_str();
    let call = Call::get(format!("/v1/jobs?state={state}&limit={}", arguments.limit));
    let list = client.ask(&call, SAME_READ, Shape::Jobs).await?;
    let jobs = list["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let incomplete = list["incomplete"].as_array().map(Vec::as_slice).unwrap_or_default();
    if jobs.is_empty() && incomplete.is_empty() {
        say(format_args!("no {state} jobs"));
    }
    context.print(&list, || rows(jobs));
    if incomplete.is_empty() {
        return Ok(Exit::Done);
    }
    let masters: Vec<&str> = incomplete.iter().filter_map(Value::as_str).collect();
    say(format_args!("INCOMPLETE: {state} jobs may be missing here: {} could not be asked", masters.join(", ")));
    Ok(Exit::Unavailable)
}

fn rows(jobs: &[Value]) -> String {
    if jobs.is_empty() {
        return String::new();
    }
    let mut table = show::table(&["job", "state", "route", "owner", "attempts", "for", "reason"]);
    for job in jobs {
        let attempts = job["attempts"].as_array().map(Vec::as_slice).unwrap_or_default();
        let unknown = show::unknown(job);
        let reason = unknown.map_or_else(|| show::text(job, "reason"), |attempt| show::text(attempt, "reason"));
        let reason = if job["needs_operator"] == true { format!("needs an operator: {reason}") } else { reason };
        let since = unknown.and_then(|attempt| attempt["ended_ms"].as_u64()).or_else(|| job["created_ms"].as_u64());
        table.add_row([
            show::text(job, "id"),
            show::text(job, "state"),
            show::text(job, "route"),
            show::text(job, "owner"),
            attempts.len().to_string(),
            since.map_or_else(String::new, |since| show::span(since, show::now_ms())),
            show::cell(&reason),
        ]);
    }
    show::lines(&table)
}
