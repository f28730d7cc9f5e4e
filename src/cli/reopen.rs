//! `onejob reopen`: new attempts for a failed job.

use onejob::job::JobId;
use serde_json::json;

use super::client::{Call, Client, GatewayArguments, SAME_REQUEST_ID};
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
    let client = Client::new(&arguments.gateway)?;
    let body = json!({ "reason": arguments.reason, "attempts": arguments.attempts });
    let call = Call::change(format!("/v1/jobs/{}/reopen", arguments.job), &body);
    let outcome = client.send_safely(&call, SAME_REQUEST_ID).await?.into_data()?;
    context.print(&outcome, || show::outcome(&outcome));
    Ok(Exit::Done)
}
