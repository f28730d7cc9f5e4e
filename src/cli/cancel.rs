//! `onejob cancel`: a request, or an end at once.

use onejob::job::JobId;
use serde_json::json;

use super::client::{Call, Client, GatewayArguments, SAME_REQUEST_ID, Shape};
use super::{Context, Exit, Failure, show};

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The job's id.
    job: JobId,
    /// Why.
    #[arg(long)]
    reason: String,
    /// Ends the job now, whatever its open attempts may still do (role operate). Without: a success that comes first wins.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    gateway: GatewayArguments,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let client = Client::new(&arguments.gateway, context)?;
    let mode = if arguments.force { "force" } else { "graceful" };
    let call = Call::change(format!("/v1/jobs/{}/cancel", arguments.job), &json!({ "mode": mode, "reason": arguments.reason }));
    client.insist_on_gateway().await?;
    let outcome = client.ask(&call, SAME_REQUEST_ID, Shape::Changed).await?;
    context.print(&outcome, || show::outcome(arguments.job, &outcome));
    Ok(Exit::Done)
}
