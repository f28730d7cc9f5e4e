//! `onejob config`: check, print or begin a configuration. Starts and connects nothing.

use onejob::config::{Config, ConfigError, Problem, token_sha256};
use serde_json::{Value, json};

use super::{Context, Exit, Failure, print, say, show};

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Checks it: every problem at once, what each provider can be asked and what its entry swears, and what one job may cost.
    Check,
    /// Prints what is in force, with where each value comes from; secrets hidden.
    Print,
    /// Makes a bearer token and the SHA-256 that names it in [owner.<name>] tokens_sha256.
    Token,
    /// Prints a commented example that loads as it is.
    Example,
}

pub(super) fn run(command: Command, context: &Context) -> Result<Exit, Failure> {
    match command {
        Command::Check => check(context),
        Command::Print => {
            let config = context.load()?;
            context.print(&config.describe_json(), || config.describe());
            Ok(Exit::Done)
        }
        Command::Token => {
            token(context);
            Ok(Exit::Done)
        }
        Command::Example => {
            print(Config::example());
            Ok(Exit::Done)
        }
    }
}

fn check(context: &Context) -> Result<Exit, Failure> {
    let config = context.load().map_err(|error| {
        let problem = json!({ "ok": false, "problems": problems(&error) });
        Failure { problem: Some(problem), ..Failure::from(error) }
    })?;
    let (providers, routes, streams) = (config.provider.len(), config.route.len(), config.stream.len());
    let assertions = config.assertions();
    let remarks = config.remarks();
    let value = json!({
        "ok": true,
        "providers": providers,
        "routes": config.describe_json()["routes"],
        "streams": streams,
        "assertions": assertions,
        "remarks": remarks,
    });
    let (providers, routes) = (show::count(providers, "provider"), show::count(routes, "route"));
    let streams = if streams == 0 { String::new() } else { format!(", {}", show::count(streams, "stream")) };
    warn_without_routes(&config);
    let [assertions, remarks] =
        [assertions, remarks].map(|lines| lines.iter().map(|line| format!("{line}\n")).collect::<String>());
    context.print(&value, || {
        format!("{assertions}{}{remarks}the configuration is good: {providers}, {routes}{streams}", follows(&config))
    });
    Ok(Exit::Done)
}

/// Says that nothing can be submitted, where that is so and clicks are not what it is for.
pub(super) fn warn_without_routes(config: &Config) {
    if config.route.is_empty() && config.stream.is_empty() {
        say("warning: there is no route, so nothing can be submitted; `onejob config example` shows one");
    }
}

/// What follows from each route's keys, a line each.
pub(super) fn follows(config: &Config) -> String {
    let line = |(name, route): (&String, &onejob::config::Route)| {
        let calls = config.provider_calls_max(route);
        let calls = show::count(calls as usize, "provider call");
        let replays = match config.provider_replays_max(route) {
            0 => String::new(),
            replays => format!(" and {}", show::count(replays as usize, "replay")),
        };
        let quarantine = humantime::format_duration(config.quarantine(route));
        format!("route {name}: at most {calls}{replays} a job; quarantine {quarantine}\n")
    };
    config.route.iter().map(line).collect()
}

fn problems(error: &ConfigError) -> Vec<Value> {
    match error {
        ConfigError::Refused { problems } => problems.iter().map(problem).collect(),
        ConfigError::Unreadable { .. } | ConfigError::Syntax { .. } => vec![json!({ "what": error.to_string() })],
    }
}

fn problem(problem: &Problem) -> Value {
    let Problem { key, value, origin, what, hint } = problem;
    json!({ "key": key, "value": value, "origin": origin, "what": what, "hint": hint })
}

fn token(context: &Context) {
    // 244 random bits: two random UUIDs.
    let token = format!("oj-{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
    let sha256 = token_sha256(&token);
    context.print(&json!({ "token": token, "sha256": sha256 }), || format!("token   {token}\nsha256  {sha256}"));
    say("The token goes to the client (ONEJOB_TOKEN), the SHA-256 into [owner.<name>] tokens_sha256. It is not shown again.");
}
