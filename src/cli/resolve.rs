//! `onejob resolve`: what became of an unknown attempt, by somebody who looked.

use std::path::PathBuf;

use clap::ValueEnum;
use onejob::job::JobId;
use serde::Serialize;
use serde_json::value::RawValue;

use super::client::{Call, Client, GatewayArguments, SAME_REQUEST_ID, Shape};
use super::{Context, Exit, Failure, show};

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The job's id.
    job: JobId,
    /// The attempt's number, as `onejob get` shows it.
    #[arg(long, value_name = "NUMBER", value_parser = attempt)]
    attempt: u32,
    /// What became of it. "failed" and "canceled" are believed only after the quarantine, unless it is the provider's word.
    #[arg(long)]
    outcome: Outcome,
    /// How you know.
    #[arg(long)]
    reason: String,
    /// Who decides. Without: the owner that the token names.
    #[arg(long, env = "USER")]
    actor: Option<String>,
    /// For "succeeded": the result, as JSON.
    #[arg(long, group = "answer")]
    result: Option<String>,
    /// For "succeeded": the file that holds the result, as JSON.
    #[arg(long, value_name = "FILE", group = "answer")]
    result_file: Option<PathBuf>,
    /// For "succeeded": there is no result; whoever asks with the key is answered with nothing, for good.
    #[arg(long, group = "answer")]
    no_result: bool,
    /// For "succeeded": the result is taken though it may not be as the route requires.
    #[arg(long)]
    unchecked: bool,
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

#[derive(Serialize)]
struct Body {
    outcome: String,
    reason: String,
    /// Absent: the owner that the token names.
    #[serde(skip_serializing_if = "Option::is_none")]
    actor: Option<String>,
    word: String,
    /// As it is written: a number too long for a double is still the same number.
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Box<RawValue>>,
    then: String,
    /// Said only if it is so: an older gateway does not know it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unchecked: bool,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let client = Client::new(&arguments.gateway, context)?;
    let result = read_result(arguments.result, arguments.result_file)?;
    match arguments.outcome {
        Outcome::Succeeded if result.is_none() && !arguments.no_result => {
            let message = "what succeeded has a result, and it cannot be added later: --result, --result-file or --no-result";
            return Err(Failure::new(Exit::Usage, message));
        }
        Outcome::Failed | Outcome::Canceled | Outcome::Abandoned if result.is_some() || arguments.no_result => {
            return Err(Failure::new(Exit::Usage, "only what succeeded has a result"));
        }
        Outcome::Succeeded | Outcome::Failed | Outcome::Canceled | Outcome::Abandoned => {}
    }
    let body = Body {
        outcome: name(arguments.outcome),
        reason: arguments.reason,
        actor: arguments.actor.filter(|actor| !actor.is_empty()),
        word: name(arguments.word),
        result,
        then: name(arguments.then),
        unchecked: arguments.unchecked,
    };
    let path = format!("/v1/jobs/{}/attempts/{}/resolve", arguments.job, arguments.attempt);
    client.insist_on_gateway().await?;
    let outcome = client.ask(&Call::change(path, &body), SAME_REQUEST_ID, Shape::Settled).await?;
    context.print(&outcome, || show::outcome(arguments.job, &outcome));
    Ok(Exit::Done)
}

fn attempt(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "attempts are numbered 1, 2, 3 …, as `onejob get` shows them".to_owned())
}

fn read_result(argument: Option<String>, file: Option<PathBuf>) -> Result<Option<Box<RawValue>>, Failure> {
    let text = match (argument, file) {
        (Some(text), _) => text,
        (None, Some(path)) => std::fs::read_to_string(&path)
            .map_err(|error| Failure::new(Exit::Usage, format!("cannot read the result {}: {error}", path.display())))?,
        (None, None) => return Ok(None),
    };
    serde_json::from_str(&text).map(Some).map_err(|error| Failure::new(Exit::Usage, format!("the result is not JSON: {error}")))
}

fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("no word is skipped").get_name().to_owned()
}
