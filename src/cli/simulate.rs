//! `onejob simulate`: the programmable provider on its own, until a signal.

use std::net::SocketAddr;

use onejob::config::Environment;
use onejob::provider::simulated::{Keys, Simulated, SimulatedOptions, WEBHOOK_SECRET};
use serde_json::json;

use super::signals::Signals;
use super::{Context, Exit, Failure, say};

const BEHAVIOURS: &str = "\
Behaviours: words separated by commas, for example delay=200ms,drop. The header onejob-simulate or the member \"simulate\" of a \
JSON body chooses one for a request; PUT /behaviour changes the default.
  succeed            executes and answers 200: what happens anyway if nothing else is said
  status=N           executes, then answers N
  refuse_status=N    answers N and does not execute
  jam                refuse_status=422, as a printer would say it
  unexecuted         does not execute, whatever it answers
  retry_after=D      adds Retry-After, in whole seconds
  queue=D            waits before it executes, and executes though the client went away
  delay=D            waits between executing and answering
  drop, half, hang   closes the connection instead of answering; closes it half-way; never answers
  chunked            frames the answer in chunks
  slow_body=D        sends the answer in four parts, D between them
  invalid_json       cuts the answer's last byte off
  size=N             pads the answer to at least N bytes
  run=D              of a job under /jobs: how long it runs after it was taken on
  fail               of a job: ends as failed and does not execute
  stubborn           of a job: a cancel is acknowledged, and it completes anyway
  forget=D           of a job: D after its end it is 404
  report=WORD        of a job: the word for its state, whatever that is
  no_id, hostile_id  of a job: its submit is answered without a name for it; with one that leads elsewhere
  webhook_first      of a job: it calls back before its submit is answered
  echo_credential    repeats the request's Authorization
  chunks=N           of a chat: its text in N pieces
  pause=D            of a stream: waits D before each part but the first
  part_bytes=N       of a stream: sends N bytes at once instead of an event
  unmarked           of a stream: ends without its end marker
  stream_error       of a stream: tells of an error in its last event
  refuse, refuse=D   alone: connecting is refused, for D
  random=SEED        alone: draws one of the above for each request";

#[derive(clap::Args)]
#[command(after_help = BEHAVIOURS)]
pub(super) struct Arguments {
    /// Where to listen. Port 0: any free port.
    #[arg(long, default_value = "127.0.0.1:7480")]
    listen: SocketAddr,
    /// Its name, in every answer.
    #[arg(long, default_value = "simulated")]
    name: String,
    /// The model that it says answered.
    #[arg(long, default_value = "simulated-1")]
    model: String,
    /// What it does with a request that says nothing itself.
    #[arg(long, default_value = "succeed")]
    behaviour: String,
    /// Answers a repeated idempotency key as the first time, without another execution.
    #[arg(long)]
    honour_keys: bool,
    /// The variable with the secret that it signs its webhooks with. Without one: simulated-webhook-secret.
    #[arg(long, value_name = "NAME")]
    webhook_secret_env: Option<String>,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let mut signals = Signals::listen()?;
    let webhook_secret = match &arguments.webhook_secret_env {
        None => WEBHOOK_SECRET.to_owned(),
        Some(name) => Environment::Process.get(name).ok_or_else(|| {
            Failure::new(Exit::Usage, format!("the variable {name} is not set; it should hold the webhooks' secret"))
        })?,
    };
    let simulated = Simulated::start(SimulatedOptions {
        listen: arguments.listen,
        name: arguments.name.clone(),
        model: arguments.model,
        behaviour: arguments.behaviour,
        keys: if arguments.honour_keys { Keys::Honoured } else { Keys::Ignored },
        webhook_secret,
    })
    .await
    .map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidInput => Failure::new(Exit::Usage, error),
        _ => Failure::new(Exit::Unavailable, format!("cannot listen on {}: {error}", arguments.listen)),
    })?;
    let url = simulated.base_url();
    let data =
        json!({ "name": arguments.name, "url": url, "ledger": format!("{url}/ledger"), "behaviour": format!("{url}/behaviour") });
    context.print(&data, || format!("provider   {url}\nledger     {url}/ledger\nbehaviour  {url}/behaviour"));
    say(format_args!("try: curl -d '{{\"simulate\":\"delay=1s\"}}' {url}/prints   (Ctrl-C ends it)"));
    signals.next().await;
    let ledger = simulated.ledger();
    say(format_args!("received {}, executed {}, answered {}", ledger.received, ledger.executed, ledger.answered));
    simulated.shutdown().await;
    Ok(Exit::Done)
}
