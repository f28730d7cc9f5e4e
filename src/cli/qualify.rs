//! `onejob qualify`: runs a route's suite against a provider, reports, and issues a certificate where it passes.

use std::path::PathBuf;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use onejob::config::{Config, Effects};
use onejob::fingerprint::{hex, sha256};
use onejob::provider::{Outcome, Provider as _};
use onejob::qualify::prompt::{Prompt, why};
use onejob::qualify::runner::{Examined, Report, Run, Settings, Spent, Verdict};
use onejob::qualify::suite::{Case, Level, Suite};
use onejob::qualify::{Bindings, Certificate, Contract};
use onejob::store::EVIDENCE_BYTES_MAX;
use serde_json::{Value, json};

use super::certificates::{at, bound, store, table};
use super::gateway::Through;
use super::resume::Resume;
use super::show::harmless;
use super::{Context, Exit, Failure, Format, OrExit as _, assemble};

const CODES: &str = "\
Exit codes: 0 a certificate was issued, 1 the provider was refused, 6 inconclusive (the provider did not answer well enough to \
tell), 2 the configuration or the suite is wrong.";

#[derive(clap::Args)]
#[command(after_help = CODES)]
pub(super) struct Arguments {
    /// The route.
    #[arg(long)]
    route: String,
    /// The provider.
    #[arg(long)]
    provider: String,
    /// Runs at once.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    concurrency: u16,
    /// Begins no further run after this time.
    #[arg(long, value_name = "DURATION", value_parser = super::duration)]
    time_max: Option<Duration>,
    /// Begins no further run once the runs have cost so much, in the provider's unit (`cost` in its entry).
    #[arg(long, value_name = "NUMBER")]
    cost_max: Option<u64>,
    /// Writes each finished run to this file, and goes on from what is there.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Writes the whole report to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Reports alone: issues no certificate.
    #[arg(long)]
    dry_run: bool,
    /// Runs it though what the provider does happens for real: the route's effects are "external".
    #[arg(long)]
    accept_effects: bool,
    /// Who has the certificate issued.
    #[arg(long, env = "USER", default_value = "operator")]
    actor: String,
}

/// What is proved: that a provider keeps a route's contract.
pub(super) struct Subject<'a> {
    config: &'a Config,
    pub(super) route: &'a str,
    pub(super) name: &'a str,
    contract: &'a Contract,
    pub(super) suite: &'a Suite,
    /// What all requests of the suite are bound to.
    pub(super) wanted: Bindings,
}

impl<'a> Subject<'a> {
    /// Finds it in a configuration.
    pub(super) fn of(config: &'a Config, route: &'a str, name: &'a str) -> Result<Self, Failure> {
        let wrong = |what: String| Err(Failure::new(Exit::Usage, what));
        let Some(entry) = config.route.get(route) else { return wrong(format!("there is no route {route:?}")) };
        let Some(place) = entry.providers.iter().position(|one| one == name) else {
            return wrong(format!("route {route} has no provider {name:?}: {}", entry.providers.join(", ")));
        };
        let Some(qualified) = config.qualified(route) else {
            let what = format!("route {route} has no suite: set route.{route}.qualify = {{ suite = \"suites/{route}.yaml\" }}");
            return wrong(what);
        };
        let (contract, suite) = (&qualified.contracts[place], &qualified.suite);
        let wanted = bound(qualified, place)?;
        Ok(Subject { config, route, name, contract, suite, wanted })
    }

    /// The provider, about to be examined; `settings.total` is its own.
    pub(super) fn examined(&self, settings: Settings, cost: u64) -> Result<Examined<'a>, Failure> {
        let (config, name) = (self.config, self.name);
        let Some(provider) = assemble::provider(config, name)? else {
            return Err(Failure::new(Exit::Usage, format!("there is no provider {name:?}")));
        };
        let entry = &config.provider[name];
        let prompt = entry.prompt.as_ref().map(|prompt| Prompt::of(name, prompt)).transpose();
        let prompt = prompt.map_err(|what| Failure::new(Exit::Usage, what))?;
        let route = config.validator(self.route).map(AsRef::as_ref);
        let settings = Settings { total: entry.timeouts.total, ..settings };
        Ok(Examined { route, name, provider, prompt, suite: self.suite, settings, spent: Spent::after(cost) })
    }

    /// JSON pointers to what its requests may differ in.
    pub(super) fn vary(&self) -> &'a [String] {
        &self.contract.vary
    }

    pub(super) fn report(&self, all: Vec<Run>) -> Report {
        Report::of(self.route, self.name, self.suite, all)
    }

    /// A certificate for a report that passed, with what is kept of it as evidence.
    pub(super) fn certificate(&self, report: &Report, by: &str, now_ms: u64) -> Result<(Certificate, Vec<u8>), Failure> {
        let mut evidence = serde_json::to_vec(report).or_exit(Exit::Internal)?;
        if evidence.len() > EVIDENCE_BYTES_MAX {
            // The runs that passed say nothing that their number does not.
            let all = report.all.iter().filter(|run| run.verdict != Verdict::Passed).cloned().collect();
            evidence = serde_json::to_vec(&Report { all, ..report.clone() }).or_exit(Exit::Internal)?;
        }
        Ok((issue(self.config, report, self.wanted.clone(), &evidence, by, now_ms), evidence))
    }
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let config = context.load().or_exit(Exit::Usage)?;
    let subject = Subject::of(&config, &arguments.route, &arguments.provider)?;
    if config.route[subject.route].effects == Effects::External && !arguments.accept_effects {
        let what =
            "effects = \"external\": what its provider does happens for real, each run anew; --accept-effects if that is well";
        return Err(Failure::new(Exit::Usage, format!("route {}: {what}", subject.route)));
    }
    let suite = subject.suite;
    let settings = Settings {
        concurrency: usize::from(arguments.concurrency),
        total: Duration::ZERO,
        time_max: arguments.time_max,
        cost_max: arguments.cost_max,
    };
    let store = if arguments.dry_run { None } else { Some(store(&config).await?) };
    let bindings = subject.wanted.hash(subject.route, subject.name);
    let resume = arguments.resume.as_deref().map(|file| Resume::open(file, &bindings)).transpose()?;
    let done = resume.as_ref().map(|resume| resume.done.clone()).unwrap_or_default();
    let examined = subject.examined(settings, resume.as_ref().map_or(0, |resume| resume.cost))?;
    let requests: usize = suite.cases.iter().map(|case| 1 + case.relations.len()).sum();
    let bar = progress(context.format, requests * suite.runs as usize);
    bar.set_position(done.len() as u64);
    let tell = |run: &Run| {
        bar.inc(1);
        bar.set_message(run.case.clone());
        if let Some(resume) = &resume {
            resume.keep(run);
        }
    };
    let mut all = examined.run(&done, tell).await;
    let cases_pass = subject.report(all.clone()).verdict == Verdict::Passed;
    // What would be refused anyway is not asked for more.
    if cases_pass && suite.levels.contains(&Level::Gateway) {
        bar.set_message("through a gateway");
        all.extend(through_gateway(&config, subject.contract, &examined).await?);
    }
    if cases_pass && suite.levels.contains(&Level::Capabilities) {
        bar.set_message("capabilities");
        all.extend(examined.capabilities().await);
    }
    bar.finish_and_clear();
    let report = Report { parameters: examined.parameters(subject.vary()), ..subject.report(all) };
    if let Some(file) = &arguments.report {
        let whole = serde_json::to_vec(&report).or_exit(Exit::Internal)?;
        std::fs::write(file, whole).map_err(|error| Failure::new(Exit::Usage, format!("{}: {error}", file.display())))?;
    }
    let mut certificate = None;
    if let Some(store) = &store {
        if report.verdict == Verdict::Passed {
            let (issued, evidence) = subject.certificate(&report, &arguments.actor, store.now_ms())?;
            store.issue_certificate(&issued, &evidence, None).await.or_exit(Exit::Unavailable)?;
            certificate = Some(issued);
        }
        store.close().await;
    }
    let document = json!({ "report": report, "certificate": certificate });
    context.print(&document, || told(&report, certificate.as_ref(), suite.cases.as_slice()));
    Ok(match report.verdict {
        Verdict::Passed => Exit::Done,
        Verdict::Failed => Exit::Failed,
        Verdict::Inconclusive => Exit::Unavailable,
    })
}

fn issue(config: &Config, report: &Report, bindings: Bindings, evidence: &[u8], actor: &str, now_ms: u64) -> Certificate {
    let asked = bindings.get(onejob::qualify::Part::Model);
    let model = if report.model.is_empty() { asked } else { &report.model };
    let life = config.certificate_life(&report.route, model);
    let name = format!("{}{now_ms}", bindings.hash(&report.route, &report.provider));
    Certificate {
        id: hex(&sha256(name.as_bytes())[..16]),
        route: report.route.clone(),
        provider: report.provider.clone(),
        answered_by: report.model.clone(),
        fingerprint: report.build.clone(),
        issued_ms: now_ms,
        expires_ms: now_ms + u64::try_from(life.as_millis()).unwrap_or(u64::MAX / 2),
        issued_by: actor.to_owned(),
        runs: report.runs,
        failures: report.failures,
        inconclusive: report.inconclusive,
        evidence: hex(&sha256(evidence)),
        bindings,
    }
}

/// Each case once through a gateway in front of the provider, and once more as a stream where requests may be one.
///
/// Each under a key that nobody has used, so that no gateway, nor this one, tells what it kept; an answer that says of itself that it
/// was given before is no evidence here either.
async fn through_gateway(config: &Config, contract: &Contract, examined: &Examined<'_>) -> Result<Vec<Run>, Failure> {
    let streams = contract.vary.iter().any(|pointer| pointer == "/stream");
    let through = Through::start(config, &contract.route, &contract.provider).await?;
    let mut runs = Vec::new();
    for case in &examined.suite.cases {
        for stream in [false, true].into_iter().filter(|stream| !stream || streams) {
            let variant = if stream { "through a gateway, streamed" } else { "through a gateway" };
            let body = case.request(examined.suite, examined.name, None, 0).map_err(|what| Failure::new(Exit::Usage, what))?;
            let mut asked: Value = serde_json::from_slice(&body).or_exit(Exit::Internal)?;
            if stream {
                asked["stream"] = json!(true);
            }
            let request = examined.request(asked.to_string().as_bytes());
            let target =
                if request.target.is_empty() { config.provider[&contract.provider].path.clone() } else { request.target.clone() };
            let request = onejob::provider::Request { target, ..request };
            let rendered = through.provider.render(&request).or_exit(Exit::Internal)?;
            let mut run = examined.judged(case, 1, variant, (&body, b""));
            if let Some(over) = examined.over() {
                (run.verdict, run.cut, run.findings) = (Verdict::Inconclusive, true, vec![over.to_owned()]);
                runs.push(run);
                continue;
            }
            match through.provider.submit(examined.call(rendered)).await {
                Outcome::Succeeded { response, .. } if examined.is_cached(&response).is_some() => {
                    (run.verdict, run.findings) = (Verdict::Inconclusive, examined.is_cached(&response).into_iter().collect());
                }
                Outcome::Succeeded { response, .. } => {
                    let answer = if stream { gathered(&response.body) } else { response.body.to_vec() };
                    run = examined.judged(case, 1, variant, (&body, &answer));
                    run.cost = examined.spend(&response);
                }
                other => (run.verdict, run.findings) = (Verdict::Inconclusive, vec![why(&other)]),
            }
            runs.push(run);
        }
    }
    through.stop().await;
    Ok(runs)
}

/// The answer that a stream of a chat completion says in parts.
fn gathered(stream: &[u8]) -> Vec<u8> {
    let (mut content, mut finish) = (String::new(), Value::Null);
    for line in String::from_utf8_lossy(stream).lines() {
        let Some(event) = line.strip_prefix("data:").and_then(|data| serde_json::from_str::<Value>(data.trim()).ok()) else {
            continue;
        };
        content.push_str(event.pointer("/choices/0/delta/content").and_then(Value::as_str).unwrap_or_default());
        if let Some(reason @ Value::String(_)) = event.pointer("/choices/0/finish_reason") {
            finish = reason.clone();
        }
    }
    json!({ "choices": [{ "message": { "role": "assistant", "content": content }, "finish_reason": finish }] })
        .to_string()
        .into_bytes()
}

fn progress(format: Format, runs: usize) -> ProgressBar {
    let target = if format == Format::Json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} requests, {elapsed} {msg}");
    ProgressBar::with_draw_target(Some(runs as u64), target).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn told(report: &Report, certificate: Option<&Certificate>, cases: &[Case]) -> String {
    let mut rows = Vec::new();
    let count = |runs: &[&Run]| {
        let of = |verdict| runs.iter().filter(|run| run.verdict == verdict).count().to_string();
        vec![of(Verdict::Passed), of(Verdict::Failed), of(Verdict::Inconclusive)]
    };
    let mut names: Vec<(&str, &str)> = Vec::new();
    for run in &report.all {
        let name = (run.case.as_str(), run.variant.as_str());
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.sort_by_key(|(case, _)| cases.iter().position(|one| one.name == *case).unwrap_or(usize::MAX));
    for (case, variant) in names {
        let runs: Vec<&Run> =
            report.all.iter().filter(|run| (run.case.as_str(), run.variant.as_str()) == (case, variant)).collect();
        let name = if variant.is_empty() { case.to_owned() } else { format!("{case}: {variant}") };
        rows.push([vec![name], count(&runs)].concat());
    }
    let mut out = format!("{}, {}: {}\n", report.route, report.provider, report.says.join("\n  "));
    if !report.parameters.is_empty() {
        out.push_str(&format!("  each sent with {}\n", harmless(&Value::Object(report.parameters.clone()).to_string())));
    }
    out.push_str(&table(&["case", "passed", "failed", "inconclusive"], rows));
    let bad = report.all.iter().filter(|run| run.verdict != Verdict::Passed);
    let mut seen = std::collections::BTreeSet::new();
    for run in bad {
        // The same fault of the same case is told once.
        if !seen.insert((&run.case, &run.variant, &run.findings)) {
            continue;
        }
        let variant = if run.variant.is_empty() { String::new() } else { format!(" ({})", run.variant) };
        out.push_str(&format!("\n{}{variant}, at level {}:\n", run.case, run.level.as_str()));
        for finding in &run.findings {
            out.push_str(&format!("  {}\n", harmless(finding)));
        }
        if !run.input.is_empty() {
            out.push_str(&format!("  asked: {}\n", harmless(&run.input)));
        }
        if !run.got.is_empty() {
            out.push_str(&format!("  got: {:?}\n", run.got));
        }
    }
    if report.cost > 0 {
        out.push_str(&format!("\ncost: {}\n", report.cost));
    }
    match certificate {
        Some(one) => out.push_str(&format!("\ncertificate {} until {}\n", one.id, at(one.expires_ms))),
        None => out.push_str("\nno certificate\n"),
    }
    out
}
