//! `onejob reopen`: new attempts for a failed job.

use onejob::job::JobId;
use serde_json::{Value, json};

use super::client::{Call, Client, GatewayArguments, SAME_READ, SAME_REQUEST_ID, Shape};
use super::{Context, Exit, Failure, show};

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The job's id.
    job: JobId,
    /// Why.
    #[arg(long)]
    reason: String,
    /// How many attempts it gets, beside those that it had.
    #[arg(long, default_value_t = 1)]
    attempts: u32,
    #[command(flatten)]
    gateway: GatewayArguments,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let client = Client::new(&arguments.gateway, context)?;
    let body = json!({ "reason": arguments.reason, "attempts": arguments.attempts });
    let path = format!("/v1/jobs/{}", arguments.job);
    client.insist_on_gateway().await?;
    let job = client.ask(&Call::get(path.clone()), SAME_READ, Shape::Job).await?;
    let call = Call::change_on(format!("{path}/reopen"), &body, &failure(&job).to_string());
    let outcome = client.ask(&call, SAME_REQUEST_ID, Shape::Changed).await?;
    context.print(&outcome, || show::outcome(arguments.job, &outcome));
    Ok(Exit::Done)
}

/// The version of the failure that a reopening is about: every ending and every reopening adds one. A job that failed once more
/// is reopened once more with the same words; one that has been reopened with them is not.
fn failure(job: &Value) -> u64 {
    let version = job["version"].as_u64().unwrap_or_default();
    if job["ended_ms"].is_null() { version.saturating_sub(1) } else { version }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_words_are_about_the_same_failure_until_it_fails_again() {
        let before = failure(&json!({ "version": 1, "ended_ms": 5 }));
        assert_eq!(failure(&json!({ "version": 2, "ended_ms": null })), before, "reopened");
        assert_ne!(failure(&json!({ "version": 3, "ended_ms": 9 })), before, "failed again");
    }
}
