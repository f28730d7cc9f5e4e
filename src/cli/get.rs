//! `onejob get`: a job as it is.

use onejob::job::JobId;

use super::client::{Call, Client, GatewayArguments, SAME_READ, Shape};
use super::{Context, Exit, Failure, show};

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The job's id.
    job: JobId,
    #[command(flatten)]
    gateway: GatewayArguments,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let client = Client::new(&arguments.gateway, context)?;
    let call = Call::get(format!("/v1/jobs/{}", arguments.job));
    let job = client.ask(&call, SAME_READ, Shape::Job).await?;
    context.print(&job, || show::job(&job));
    Ok(Exit::Done)
}
