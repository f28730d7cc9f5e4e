//! `onejob certificates`, `revoke`, `suspend`, `reinstate` and `can-failover`: what providers have proved, and who says otherwise.
//!
//! They talk to Redis itself, by the configuration: a gateway need not run, and a word counts for every gateway from then on.

use std::fmt;
use std::io::Read as _;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant, UNIX_EPOCH};

use onejob::attempt::AttemptToken;
use onejob::config::{Config, Qualified, Route};
use onejob::error::StoreError;
use onejob::qualify::{Bindings, Denial, Kept, Standing, decide, in_force};
use onejob::store::{Certified, Stood, Store, StoreOptions, insist};
use serde_json::{Value, json};

use super::{Context, Exit, Failure, OrExit as _, assemble, say, show};

/// For how long a word on certificates is said again where Redis does not answer.
const INSIST: Duration = Duration::from_secs(30);
/// The last moment that has a date: the end of the year 9999, in Unix ms.
const DATES_END_MS: u64 = 253_402_300_799_999;

#[derive(clap::Args)]
pub(super) struct ListArguments {
    /// Of this route alone.
    #[arg(long)]
    route: Option<String>,
    /// Also what happened to each, and who said so.
    #[arg(long)]
    events: bool,
    /// Instead, the report that this certificate stands on: JSON, as it was kept.
    #[arg(long, value_name = "ID", value_parser = certificate_id, conflicts_with_all = ["route", "events"])]
    evidence: Option<String>,
}

#[derive(clap::Args)]
pub(super) struct MarkArguments {
    /// The route.
    #[arg(long)]
    route: String,
    /// The provider.
    #[arg(long)]
    provider: String,
    /// One certificate alone, by its name; without: every one that is kept. reinstate requires it.
    #[arg(long, value_parser = certificate_id)]
    id: Option<String>,
    /// Why.
    #[arg(long, value_parser = words)]
    reason: String,
    /// Who says so.
    #[arg(long, env = "USER", default_value = "operator", value_parser = words)]
    actor: String,
}

#[derive(clap::Args)]
pub(super) struct CanFailoverArguments {
    /// The route.
    #[arg(long)]
    route: String,
    /// The provider that fails; without: each.
    #[arg(long)]
    from: Option<String>,
    /// The provider that would take over; without: each.
    #[arg(long)]
    to: Option<String>,
    /// The body of a request, at most server.body_bytes_max; without: the suite's own requests.
    #[arg(long, value_name = "FILE")]
    input: Option<std::path::PathBuf>,
}

/// A certificate's name. Nothing that is left empty by mistake names every one.
fn certificate_id(text: &str) -> Result<String, String> {
    if text.len() != 32 || !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return Err("a certificate's name is 32 hexadecimal digits, as onejob certificates lists them".to_owned());
    }
    Ok(text.to_owned())
}

/// What stands in the events of certificates.
fn words(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("it is empty, and stays with the certificate: say who or why".to_owned());
    }
    Ok(text.to_owned())
}

/// The store that a configuration names.
pub(super) async fn store(config: &Config) -> Result<Store, Failure> {
    let (store, _) = Store::connect(store_options(config)?).await.or_exit(Exit::Unavailable)?;
    Ok(store)
}

fn store_options(config: &Config) -> Result<StoreOptions, Failure> {
    let Some(url) = &config.redis.url else {
        let what = "redis.url is not set: the gateway's own Redis is reached by nobody else; name one that both can reach";
        return Err(Failure::new(Exit::Usage, what));
    };
    Ok(assemble::store_options(config, url.reveal()))
}

/// Makes the same call again for a while, and says so, until it is answered. What must have one token has it in the call.
pub(super) async fn insisted<T, F: Future<Output = Result<T, StoreError>>>(call: impl FnMut() -> F) -> Result<T, StoreError> {
    let began = Instant::now();
    let failed = |error: &StoreError, pause: Duration| {
        if !error.is_retryable() || began.elapsed() + pause > INSIST {
            return ControlFlow::Break(());
        }
        say(format_args!("onejob: {error}: the same call again in {}", humantime::format_duration(pause)));
        ControlFlow::Continue(())
    };
    insist(call, failed).await
}

/// That there is no such route, and which there are.
pub(super) fn no_route(config: &Config, name: &str) -> String {
    let known: Vec<&str> = config.route.keys().map(String::as_str).collect();
    if known.is_empty() {
        return format!("the configuration has no route {name:?}, nor any other; --config names its file");
    }
    format!("the configuration has no route {name:?}: {}", known.join(", "))
}

/// That a route has no such provider, and which it has.
pub(super) fn no_provider(name: &str, route: &Route, provider: &str) -> String {
    format!("route {name} has no provider {provider:?} in the configuration: {}", route.providers.join(", "))
}

/// Says so, where the configuration does not know who is named: what is kept of them is there all the same.
fn say_unknown(config: &Config, name: &str, provider: Option<&str>) {
    let what = match config.route.get(name) {
        None => no_route(config, name),
        Some(route) => match provider.filter(|provider| !route.providers.iter().any(|one| one == provider)) {
            Some(provider) => no_provider(name, route, provider),
            None => return,
        },
    };
    say(format_args!("onejob: {what}"));
}

pub(super) async fn list(arguments: ListArguments, context: &Context) -> Result<Exit, Failure> {
    let config = context.load().or_exit(Exit::Usage)?;
    if let Some(id) = &arguments.evidence {
        return evidence(&config, id, context).await;
    }
    if let Some(name) = &arguments.route {
        say_unknown(&config, name, None);
    }
    let store = store(&config).await?;
    let (mut rows, mut documents, mut exit) = (Vec::new(), Vec::new(), Exit::Done);
    // What cannot be read is told, and keeps nobody from seeing the rest. The gate lets nobody go there by it.
    let mut cannot_be_read = |what: fmt::Arguments<'_>| {
        say(format_args!("onejob: cannot be read: {what}"));
        exit = Exit::Unavailable;
    };
    let Certified { pairs, unreadable } = store.certified_pairs().await.or_exit(Exit::Unavailable)?;
    for member in unreadable {
        cannot_be_read(format_args!("\"{member}\" in the list of routes and providers"));
    }
    for (route, provider) in pairs {
        if arguments.route.as_ref().is_some_and(|only| *only != route) {
            continue;
        }
        let kept = match store.certificates(&route, &provider).await {
            Err(error) if !error.is_retryable() => {
                cannot_be_read(format_args!("the certificates of {route:?}, {provider:?}: {error}"));
                continue;
            }
            kept => kept.or_exit(Exit::Unavailable)?,
        };
        let events = match store.certificate_events(&route, &provider).await {
            Err(error) if !error.is_retryable() => {
                cannot_be_read(format_args!("the events of {route:?}, {provider:?}: {error}"));
                Vec::new()
            }
            events => events.or_exit(Exit::Unavailable)?,
        };
        for one in &kept {
            let decides = in_force(&kept).any(|deciding| deciding.certificate.id == one.certificate.id);
            rows.push(row(one, decides, store.now_ms()));
            if arguments.events {
                let of_it = events.iter().filter(|event| event.id == one.certificate.id);
                rows.extend(of_it.map(|event| {
                    let words = if event.reason.is_empty() { String::new() } else { format!(": {}", event.reason) };
                    vec![String::new(), String::new(), format!("{} by {}{words}", event.event, event.by), at(event.at_ms)]
                }));
            }
            let events: Vec<_> = events.iter().filter(|event| event.id == one.certificate.id).collect();
            documents.push(json!({
                "certificate": one.certificate, "standing": one.standing, "decides": decides, "reason": one.reason, "by": one.by,
                "events": events,
            }));
        }
    }
    context.print(&json!(documents), || match rows.is_empty() {
        true => "no certificates; onejob qualify issues them".to_owned(),
        false => table(&["route", "provider", "standing", "until", "runs", "answered by", "id"], rows),
    });
    store.close().await;
    Ok(exit)
}

/// Prints what a certificate stands on.
async fn evidence(config: &Config, id: &str, context: &Context) -> Result<Exit, Failure> {
    let store = store(config).await?;
    let found = store.evidence(id).await.or_exit(Exit::Unavailable)?;
    store.close().await;
    let Some(bytes) = found else {
        return Err(Failure::new(Exit::NotFound, format!("no report of a certificate {id} is kept")));
    };
    let report: Value = serde_json::from_slice(&bytes).or_exit(Exit::Unavailable)?;
    context.print(&report, || serde_json::to_string_pretty(&report).unwrap_or_default());
    Ok(Exit::Done)
}

fn row(one: &Kept, decides: bool, now_ms: u64) -> Vec<String> {
    let Kept { certificate, standing, reason, .. } = one;
    let newer = if decides { "" } else { ", but a newer one decides" };
    let standing = match standing {
        Standing::Live if certificate.expires_ms <= now_ms => format!("expired{newer}"),
        Standing::Live => format!("live{newer}"),
        other => format!("{}{newer}: {reason}", other.as_str()),
    };
    let runs = format!("{} ({} failed, {} inconclusive)", certificate.runs, certificate.failures, certificate.inconclusive);
    vec![
        certificate.route.clone(),
        certificate.provider.clone(),
        standing,
        at(certificate.expires_ms),
        runs,
        certificate.answered_by.clone(),
        certificate.id.clone(),
    ]
}

pub(super) fn table(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = show::table(head);
    for row in rows {
        table.add_row(row.iter().map(|text| show::cell(text)).collect::<Vec<_>>());
    }
    show::lines(&table)
}

pub(super) fn at(ms: u64) -> String {
    if ms > DATES_END_MS {
        return format!("{ms} ms after 1970");
    }
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(ms)).to_string()
}

pub(super) async fn mark(arguments: MarkArguments, standing: Standing, context: &Context) -> Result<Exit, Failure> {
    let MarkArguments { route, provider, id, reason, actor } = arguments;
    if standing == Standing::Live && id.is_none() {
        // What is suspended may be so for several reasons, and nobody has looked at all of them.
        let what = format!(
            "reinstate needs --id, the one certificate that is good again: without it, those that gateways suspended by themselves \
             would be too; onejob certificates --route {route} --events lists them"
        );
        return Err(Failure::new(Exit::Usage, what));
    }
    let config = context.load().or_exit(Exit::Usage)?;
    say_unknown(&config, &route, Some(&provider));
    let (options, token) = (store_options(&config)?, AttemptToken::random());
    let (store, _) = insisted(|| Store::connect(options.clone())).await.or_exit(Exit::Unavailable)?;
    let mark = || store.mark_certificate(token, (&route, &provider), id.as_deref(), standing, (&actor, &reason));
    let stood = insisted(mark).await.or_exit(Exit::Unavailable)?;
    store.close().await;
    let (word, count, exit) = match stood {
        Stood::Changed(count) => ("changed", count, Exit::Done),
        Stood::Repeated => ("unchanged", 0, Exit::Done),
        Stood::Refused => ("refused", 0, Exit::Conflict),
        Stood::NotFound => ("not_found", 0, Exit::NotFound),
    };
    context.print(&json!({ "result": word, "count": count, "standing": standing.as_str() }), || match stood {
        Stood::Changed(count) => format!("{count} of {route}, {provider}: {}", standing.as_str()),
        Stood::Repeated => format!("{route}, {provider}: {} already", standing.as_str()),
        Stood::Refused => format!("{route}, {provider}: what is revoked stays revoked; onejob qualify issues a new certificate"),
        Stood::NotFound => format!("{route}, {provider}: there is no such certificate"),
    });
    Ok(exit)
}

pub(super) async fn can_failover(arguments: CanFailoverArguments, context: &Context) -> Result<Exit, Failure> {
    let config = context.load().or_exit(Exit::Usage)?;
    let name = &arguments.route;
    let Some(route) = config.route.get(name) else {
        return Err(Failure::new(Exit::Usage, no_route(&config, name)));
    };
    for asked in [&arguments.from, &arguments.to].into_iter().flatten() {
        if !route.providers.contains(asked) {
            return Err(Failure::new(Exit::Usage, no_provider(name, route, asked)));
        }
    }
    if let (Some(from), Some(to)) = (&arguments.from, &arguments.to)
        && from == to
    {
        let what = format!("--from and --to are both {from:?}: a failover goes to another provider");
        return Err(Failure::new(Exit::Usage, what));
    }
    let gate = serde_json::to_value(route.gate).unwrap_or(Value::Null);
    if route.providers.len() < 2 {
        let count = if route.providers.is_empty() { "no provider" } else { "one provider" };
        context.print(&json!({ "route": name, "gate": gate, "failovers": [] }), || {
            format!("route {name} has {count}: there is nothing to fail over to")
        });
        return Ok(Exit::Failed);
    }
    let input = arguments.input.as_deref().map(|file| read_input(file, config.server.body_bytes_max)).transpose()?;
    let input = arguments.input.as_deref().zip(input.as_deref());
    if let (Some((file, body)), Some(required)) = (input, config.validator(name))
        && let Err(invalid) = required.check_input(body)
    {
        let what = format!("{}: route {name} refuses it, and so does a gateway (422 input-invalid): {invalid}", file.display());
        return Err(Failure::new(Exit::Usage, what));
    }
    let store = store(&config).await?;
    let (mut rows, mut documents, mut all) = (Vec::new(), Vec::new(), true);
    for (place, to) in route.providers.iter().enumerate() {
        if arguments.to.as_ref().is_some_and(|only| only != to) {
            continue;
        }
        let answer = if place == 0 { Ok(None) } else { certified(&config, &store, (name, place), input).await?.map(Some) };
        for from in route.providers.iter().filter(|from| *from != to) {
            if arguments.from.as_ref().is_some_and(|only| only != from) {
                continue;
            }
            all &= answer.is_ok();
            let (may, why) = match &answer {
                Ok(None) => ("yes", "it is the route's first provider".to_owned()),
                Ok(Some((id, until_ms))) => ("yes", format!("certificate {id}, until {}", at(*until_ms))),
                Err(denial) => ("no", denial.to_string()),
            };
            rows.push(vec![from.clone(), to.clone(), may.to_owned(), why.clone()]);
            let reason = answer.as_ref().err().map(Denial::word);
            documents.push(json!({ "from": from, "to": to, "may": answer.is_ok(), "reason": reason, "why": why }));
        }
    }
    store.close().await;
    if gate != json!("enforce") {
        say(format_args!("route {name}: gate = {gate}: a failover happens all the same"));
    }
    context.print(&json!({ "route": name, "gate": gate, "failovers": documents }), || table(&["from", "to", "may", "why"], rows));
    Ok(if all { Exit::Done } else { Exit::Failed })
}

/// Which certificate lets jobs go to a provider, and until when.
async fn certified(
    config: &Config,
    store: &Store,
    (route, place): (&str, usize),
    input: Option<(&Path, &[u8])>,
) -> Result<Result<(String, u64), Denial>, Failure> {
    let Some(qualified) = config.qualified(route) else { return Ok(Err(Denial::NoSuite)) };
    let Some(contract) = qualified.contracts.get(place) else { return Ok(Err(Denial::NoSuite)) };
    let wanted = match input {
        Some((file, body)) => config.bound(contract, &qualified.suite.path, body).map_err(|what| {
            let (file, provider) = (file.display(), &contract.provider);
            Failure::new(Exit::Usage, format!("{file}: provider {provider} cannot be sent that: {what}"))
        })?,
        None => bound(qualified, place)?,
    };
    let kept = match store.certificates(&contract.route, &contract.provider).await {
        Ok(kept) => kept,
        Err(error) => return Ok(Err(Denial::Unreadable { reason: error.to_string() })),
    };
    Ok(decide(&wanted, &kept, store.now_ms()).map(|found| (found.id.clone(), found.expires_ms)))
}

/// The body of a request, not larger than what a gateway takes.
fn read_input(file: &Path, bytes_max: usize) -> Result<Vec<u8>, Failure> {
    let refused = |what: String| Failure::new(Exit::Usage, format!("{}: {what}", file.display()));
    let opened = std::fs::File::open(file).map_err(|error| refused(error.to_string()))?;
    let mut body = Vec::new();
    let limit = u64::try_from(bytes_max).unwrap_or(u64::MAX).saturating_add(1);
    opened.take(limit).read_to_end(&mut body).map_err(|error| refused(error.to_string()))?;
    match body.len() > bytes_max {
        true => {
            Err(refused(format!("it has more than {bytes_max} bytes, the limit: no gateway takes it (server.body_bytes_max)")))
        }
        false => Ok(body),
    }
}

/// What a suite's requests are bound to at a provider.
pub(super) fn bound(qualified: &Qualified, place: usize) -> Result<Bindings, Failure> {
    let wrong = |what: &String| Failure::new(Exit::Usage, format!("{}: {what}", qualified.contracts[place].provider));
    qualified.bound[place].as_ref().cloned().map_err(wrong)
}
