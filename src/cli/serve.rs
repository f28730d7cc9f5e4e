//! `onejob serve`: a gateway, from its start to its orderly end.

use onejob::runtime::Drained;
use serde_json::json;

use super::gateway::Gateway;
use super::show::Spinner;
use super::signals::Signals;
use super::{Context, Exit, Failure, config, say};

const STOPPING: &str = "\
On SIGTERM, Ctrl-C or the end of its terminal nothing new is accepted, running attempts have runtime.drain to finish, and the \
rest is marked unknown and counted (exit code 4). A second signal ends it at once and leaves running attempts to their leases \
(exit code 130).";

#[derive(clap::Args)]
#[command(after_help = STOPPING)]
pub(super) struct Arguments {
    /// Where to listen; the same as --set server.listen=…
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<std::net::SocketAddr>,
    /// Which Redis; the same as --set redis.url=…. Whoever lists processes sees it: a password goes into ONEJOB_REDIS__URL.
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let mut overrides = context.overrides.clone();
    overrides.extend(arguments.listen.map(|listen| ("server.listen".to_owned(), listen.to_string())));
    overrides.extend(arguments.redis.map(|url| ("redis.url".to_owned(), url)));
    let context = Context { file: context.file.clone(), overrides, format: context.format };
    let settings = context.load()?;
    #[cfg(feature = "failpoints")]
    if let Some(point) = onejob::config::Environment::Process.get(onejob::failpoint::VARIABLE) {
        onejob::failpoint::arm(&point).map_err(|error| Failure::new(Exit::Usage, error))?;
    }
    // Signals count from here on: one that arrives while it starts is not lost.
    let mut signals = Signals::listen()?;
    let mut gateway = Gateway::start(&settings).await?;

    for warning in &gateway.warnings {
        tracing::warn!("{warning}");
    }
    config::warn_without_routes(&settings);
    if !settings.route.is_empty() {
        say(config::follows(&settings).trim_end());
    }
    for (name, simulated) in &gateway.simulated {
        say(format_args!("provider {name}: simulated, {}/ledger", simulated.base_url()));
    }
    let url = gateway.url();
    say(format_args!("this gateway's name is {}; jobs name it so", gateway.name()));
    context.print(&json!({ "url": url, "gateway": gateway.name() }), || format!("onejob listens on {url}"));

    let signal = tokio::select! {
        signal = signals.next() => Some(signal),
        why = gateway.broken() => {
            tracing::error!("the gateway is broken and stops: {why}");
            None
        }
    };
    let drain = settings.runtime.drain;
    if let Some(signal) = signal {
        say(format_args!(
            "{signal}: nothing new is accepted; running attempts have {} to finish",
            humantime::format_duration(drain)
        ));
    }
    let spinner = Spinner::start(context.format, "draining");
    let drained = tokio::select! {
        drained = gateway.stop(drain) => drained,
        again = signals.next() => {
            drop(spinner);
            say(format_args!("{again} again: ended at once; running attempts are left to their leases and become unknown"));
            return Ok(Exit::Interrupted);
        }
    };
    drop(spinner);
    say(told(drained));
    Ok(match (signal, drained) {
        (None, _) => Exit::Internal,
        (Some(_), Drained { running: _, unknown: 0, unwritten: 0, spooled: 0 }) => Exit::Done,
        (Some(_), _) => Exit::Unknown,
    })
}

fn told(drained: Drained) -> String {
    let Drained { running, unknown, unwritten, spooled } = drained;
    let finished = running.saturating_sub(unknown + unwritten + spooled);
    let was = if running == 1 { "attempt was" } else { "attempts were" };
    let kept = if spooled == 0 { String::new() } else { format!(", {spooled} kept in the spool for the next start") };
    format!(
        "stopped: {running} {was} running: {finished} finished, {unknown} unknown, {unwritten} could not be written down{kept}"
    )
}
