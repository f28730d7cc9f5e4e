//! `onejob resolve`: what became of an unknown attempt, by somebody who looked.

use std::path::PathBuf;

use clap::ValueEnum;
use onejob::job::JobId;
use serde_json::{Value, json};

use super::client::{Call, Client, GatewayArguments, SAME_REQUEST_ID};
use super::{Context, Exit, Failure, OrExit as _, show};

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The job's id.
    job: JobId,
    /// The attempt's number, as `onejob get` shows it.
    #[arg(long)]
    attempt: u32,
    /// What became of it. "failed" and "canceled" are believed only after the quarantine, unless it is the provider's word.
    #[arg(long)]
    outcome: Outcome,
    /// How you know.
    #[arg(long)]
    reason: String,
    /// Who decides.
    #[arg(long, env = "USER")]
    actor: String,
    /// For "succeeded": the result, as JSON.
    #[arg(long, conflicts_with = "result_file")]
    result: Option<String>,
    /// For "succeeded": the file that holds the result, as JSON.
    #[arg(long, value_name = "FILE")]
    result_file: Option<PathBuf>,
    /// Whether another attempt may begin.
    #[arg(long, default_value = "end")]
    then: Then,
    /// Whose word it is.
    #[arg(long, default_value = "operator")]
    word: Word,
    #[command(flatten)]
    gateway: GatewayArguments,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Outcome {
    /// It happened.
    Succeeded,
    /// It did not happen.
    Failed,
    /// It was stopped.
    Canceled,
    /// Nobody knows, and you take the risk.
    Abandoned,
}

#[derive(Clone, Copy, ValueEnum)]
enum Then {
    /// The job ends with it.
    End,
    /// Another attempt may begin.
    Retry,
}

#[derive(Clone, Copy, ValueEnum)]
enum Word {
    /// Yours.
    Operator,
    /// The provider's own.
    Provider,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let client = Client::new(&arguments.gateway)?;
    let mut body = json!({
        "outcome": name(arguments.outcome),
        "reason": arguments.reason,
        "actor": arguments.actor,
        "then": name(arguments.then),
        "word": name(arguments.word),
    });
    if let Some(result) = read_result(arguments.result, arguments.result_file)? {
        if arguments.outcome != Outcome::Succeeded {
            return Err(Failure::new(Exit::Usage, "only what succeeded has a result"));
        }
        body["result"] = result;
    }
    let path = format!("/v1/jobs/{}/attempts/{}/resolve", arguments.job, arguments.attempt);
    let job = client.send_safely(&Call::change(path, &body), SAME_REQUEST_ID).await?.into_data()?;
    context.print(&job, || show::job(&job));
    Ok(Exit::Done)
}

fn read_result(argument: Option<String>, file: Option<PathBuf>) -> Result<Option<Value>, Failure> {
    let text = match (argument, file) {
        (Some(text), _) => text,
        (None, Some(path)) => std::fs::read_to_string(path).or_exit(Exit::Usage)?,
        (None, None) => return Ok(None),
    };
    serde_json::from_str(&text).map(Some).map_err(|error| Failure::new(Exit::Usage, format!("the result is not JSON: {error}")))
}

fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("no word is skipped").get_name().to_owned()
}
