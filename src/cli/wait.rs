//! `onejob wait`: until a job has ended or is unknown; the exit code says how.

use std::time::Duration;

use onejob::job::JobId;
use serde_json::Value;

use super::client::{Answer, Client, GatewayArguments, Shape};
use super::show::{Spinner, Standing};
use super::{Context, Exit, Failure, duration, say, show};

/// How long the gateway is asked to wait at once for the end: below what proxies cut off.
const ENDED_AT_ONCE: Duration = Duration::from_secs(25);
/// The same where `unknown` is an answer too: a gateway waits for the end alone, so it is looked at as often.
const SETTLED_AT_ONCE: Duration = Duration::from_secs(1);

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The job's id.
    job: JobId,
    #[command(flatten)]
    wait: WaitArguments,
    #[command(flatten)]
    gateway: GatewayArguments,
}

/// How long to wait, and for what.
#[derive(Clone, Copy, clap::Args)]
pub(super) struct WaitArguments {
    /// How long to wait.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration)]
    within: Duration,
    /// For what: settled is ended or unknown; an unknown job may still end, by evidence or by somebody's decision.
    #[arg(long, default_value = "settled")]
    until: Until,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Until {
    Settled,
    Ended,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let client = Client::new(&arguments.gateway, context)?;
    let job = wait(&client, &arguments.job.to_string(), arguments.wait, context).await?;
    finish(&job, context)
}

/// Waits for a job.
pub(super) async fn wait(client: &Client, id: &str, arguments: WaitArguments, context: &Context) -> Result<Value, Failure> {
    let spinner = Spinner::start(context.format, "waiting");
    let wanted = |answer: &Answer| match show::standing(&answer.body) {
        Some(Standing::Open) => false,
        Some(Standing::Unknown) => arguments.until == Until::Settled,
        Some(Standing::Ended(_)) | None => true,
    };
    let progress = |answer: &Answer| spinner.say(format!("job {id} is {}", show::text(&answer.body, "state")));
    let at_once = match arguments.until {
        Until::Settled => SETTLED_AT_ONCE,
        Until::Ended => ENDED_AT_ONCE,
    };
    let answer = client.wait(id, arguments.within, at_once, wanted, progress).await?;
    client.document(answer, Shape::Job)
}

/// Prints a job that was waited for, and says with which code the process ends.
pub(super) fn finish(job: &Value, context: &Context) -> Result<Exit, Failure> {
    context.print(job, || show::job(job));
    let state = show::text(job, "state");
    match show::standing(job) {
        Some(Standing::Open) => {
            say(format_args!("the job is still {state}; it goes on, and `onejob wait {}` waits on", show::text(job, "id")));
            Ok(Exit::Timeout)
        }
        Some(Standing::Unknown) => {
            let number =
                show::unknown(job).map_or_else(String::new, |attempt| format!(" --attempt {}", show::text(attempt, "number")));
            say("nobody knows yet whether it happened; nothing is sent again until that is known");
            let id = show::text(job, "id");
            if job["needs_operator"] != true {
                say(format_args!("where its provider can be asked it is asked: onejob wait {id} --until ended"));
            }
            say(format_args!("else the job is {state} until somebody looks and says: onejob resolve {id}{number} …"));
            Ok(Exit::Unknown)
        }
        Some(Standing::Ended(exit)) => Ok(exit),
        None => Err(Failure::new(Exit::Internal, format!("the gateway says a state that is not known: {state:?}"))),
    }
}
