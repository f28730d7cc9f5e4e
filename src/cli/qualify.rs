//! `onejob qualify`: runs a route's suite against a provider, reports, and issues a certificate where it passes.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use onejob::config::{Config, Effects, Secret};
use onejob::fingerprint::{hex, sha256};
use onejob::provider::Provider as _;
use onejob::qualify::prompt::Prompt;
use onejob::qualify::runner::{Examined, Hidden, Ids, Report, Run, Settings, Spent, Verdict};
use onejob::qualify::suite::{Case, Level, Suite};
use onejob::qualify::{Bindings, Certificate, Contract};
use onejob::store::{EVIDENCE_BYTES_MAX, Issued, Store};
use serde_json::{Value, json};

use super::certificates::{at, bound, insisted, no_provider, no_route, store, table};
use super::gateway::Through;
use super::progress::Progress;
use super::resume::{Resume, proof_since};
use super::show::escaped;
use super::{Context, Exit, Failure, OrExit as _, assemble, say};

const CODES: &str = "\
Exit codes: 0 the suite passed, and unless --dry-run a certificate was issued, 1 the provider was refused, or a certificate of it was \
suspended or revoked meanwhile, 6 inconclusive (the provider did not answer well enough to tell), 2 the configuration or the suite is \
wrong, or an option is.";

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
    /// Begins no further run once the runs have cost so much, in the provider's unit. Refused where its entry has no `cost`.
    #[arg(long, value_name = "NUMBER")]
    cost_max: Option<u64>,
    /// Writes each finished run to this file, and goes on from what is there and at most a day old, until a certificate is issued.
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
        let Some(entry) = config.route.get(route) else { return wrong(no_route(config, route)) };
        let Some(place) = entry.providers.iter().position(|one| one == name) else {
            return wrong(no_provider(route, entry, name));
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
        let hidden = Hidden::new(config.bearer(name).map(Secret::reveal));
        Ok(Examined {
            route,
            name,
            provider,
            prompt,
            suite: self.suite,
            settings,
            spent: Spent::after(cost),
            hidden,
            ids: Ids::default(),
        })
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
    if arguments.cost_max.is_some() && config.provider[subject.name].cost.is_none() {
        let name = subject.name;
        let what = format!(
            "--cost-max: nobody knows what an answer of {name} costs: set provider.{name}.cost, a JSON pointer into its answers, \
             as in \"/usage/total_tokens\""
        );
        return Err(Failure::new(Exit::Usage, what));
    }
    // What cannot be written in the end is told now.
    let mut report_file = arguments.report.as_deref().map(open_report).transpose()?;
    let suite = subject.suite;
    let settings = Settings {
        concurrency: usize::from(arguments.concurrency),
        total: Duration::ZERO,
        time_max: arguments.time_max,
        cost_max: arguments.cost_max,
    };
    // Runs in a file have their times by Redis' clock, whatever is issued.
    let wants_store = !arguments.dry_run || arguments.resume.is_some();
    let store = if wants_store { Some(store(&config).await?) } else { None };
    // Whoever takes a certificate back from now on has not heard of what is proved here.
    let since_ms = store.as_ref().map_or(0, Store::now_ms);
    let resume = match (&arguments.resume, &store) {
        (Some(file), Some(store)) => Some(resumed(file, &subject, store).await?),
        _ => None,
    };
    let done = resume.as_ref().map(|resume| resume.done.clone()).unwrap_or_default();
    let examined = subject.examined(settings, resume.as_ref().map_or(0, |resume| resume.cost))?;
    let requests: usize = suite.cases.iter().map(|case| 1 + case.relations.len()).sum();
    let what = format!("{}, {}", subject.route, subject.name);
    let progress = Progress::start(context.format, what, requests * suite.runs as usize, done.len());
    let tell = |run: &Run| {
        progress.ended(run);
        if let (Some(resume), Some(store)) = (&resume, &store) {
            resume.keep(run, store.now_ms());
        }
    };
    let mut all = examined.run(&done, tell).await;
    let cases_pass = subject.report(all.clone()).verdict == Verdict::Passed;
    // What would be refused anyway is not asked for more.
    if cases_pass && suite.levels.contains(&Level::Gateway) {
        progress.begins("through a gateway");
        match through_gateway(&config, subject.contract, &examined).await {
            Ok(runs) => all.extend(runs),
            // What was proved until here is told all the same.
            Err(failure) => all.push(examined.no_way(failure.to_string())),
        }
    }
    if cases_pass && suite.levels.contains(&Level::Capabilities) {
        progress.begins("capabilities");
        all.extend(examined.capabilities().await);
    }
    drop(progress);
    let report = Report { parameters: examined.parameters(subject.vary()), ..subject.report(all) };
    let mut unwritten = None;
    if let (Some(path), Some(file)) = (&arguments.report, &mut report_file) {
        let whole = serde_json::to_vec(&report).or_exit(Exit::Internal)?;
        unwritten = write_report(file, &whole).err().map(|error| format!("{}: {error}", path.display()));
    }
    let (mut certificate, mut not_issued) = (None, None);
    if let Some(store) = &store {
        if report.verdict == Verdict::Passed && !arguments.dry_run {
            match certify(&subject, &report, &arguments.actor, store, resume.as_ref(), since_ms).await {
                Ok(issued) => certificate = Some(issued),
                Err(what) => not_issued = Some(what),
            }
        }
        store.close().await;
    }
    let document = json!({ "report": report, "certificate": certificate });
    let end = match &certificate {
        Some(one) => format!("certificate {} until {}", one.id, at(one.expires_ms)),
        None if matches!(not_issued, Some(NotIssued::TakenBack)) => {
            "a revoke or suspension came meanwhile: no certificate; qualify again".to_owned()
        }
        None if not_issued.is_some() => {
            let how = match &arguments.resume {
                Some(file) => format!("--resume {} again: no run that is there is made anew", file.display()),
                None => "make them again; with --resume FILE they are kept".to_owned(),
            };
            let what = match &not_issued {
                Some(NotIssued::Otherwise(what)) => what.as_str(),
                Some(NotIssued::TakenBack) | None => "",
            };
            let end = escaped(&format!("no certificate, though the runs passed: {what}; {how}"));
            say(format_args!("onejob: {end}"));
            end
        }
        None if arguments.dry_run && report.verdict == Verdict::Passed => "no certificate: --dry-run".to_owned(),
        None => "no certificate".to_owned(),
    };
    context.print(&document, || told(&report, &end, suite.cases.as_slice()));
    if let Some(what) = unwritten {
        say(format_args!("onejob: {what}"));
        return Ok(Exit::Usage);
    }
    Ok(match report.verdict {
        Verdict::Passed if matches!(not_issued, Some(NotIssued::TakenBack)) => Exit::Failed,
        Verdict::Passed if not_issued.is_some() => Exit::Unavailable,
        Verdict::Passed => Exit::Done,
        Verdict::Failed => Exit::Failed,
        Verdict::Inconclusive => Exit::Unavailable,
    })
}

/// Opens the file of a report for writing; what is in it stays until there is another.
fn open_report(path: &Path) -> Result<File, Failure> {
    let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    opened.map_err(|error| Failure::new(Exit::Usage, format!("{}: {error}", path.display())))
}

fn write_report(file: &mut File, whole: &[u8]) -> std::io::Result<()> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    file.write_all(whole)
}

/// Why there is no certificate, though the runs passed.
enum NotIssued {
    /// Somebody suspended or revoked a certificate of the pair since they began.
    TakenBack,
    /// In words: Redis stays away, or a file cannot be written.
    Otherwise(String),
}

/// Issues a certificate for a report that passed. Asked again for a while where Redis does not answer: the same one, which is there
/// once however often it is sent.
///
/// # Errors
/// Why there is none.
async fn certify(
    subject: &Subject<'_>,
    report: &Report,
    actor: &str,
    store: &Store,
    resume: Option<&Resume>,
    since_ms: u64,
) -> Result<Certificate, NotIssued> {
    // Of the same runs always the same certificate: its name comes of the time.
    let begun_ms = resume.and_then(|resume| resume.issued_ms);
    let mut issued_ms = begun_ms.unwrap_or_else(|| store.now_ms());
    let certificate =
        |issued_ms| subject.certificate(report, actor, issued_ms).map_err(|failure| NotIssued::Otherwise(failure.to_string()));
    let (mut issued, mut evidence) = certificate(issued_ms)?;
    if begun_ms.is_some() && issued.expires_ms <= store.now_ms() {
        issued_ms = store.now_ms();
        (issued, evidence) = certificate(issued_ms)?;
    }
    if let Some(resume) = resume {
        resume.issuing(issued_ms).map_err(|error| NotIssued::Otherwise(format!("its file cannot be written: {error}")))?;
    }
    let issue = || store.issue_certificate(&issued, &evidence, None, since_ms);
    match insisted(issue).await {
        Ok(Issued::Kept) => {}
        Ok(Issued::Refused) => return Err(NotIssued::TakenBack),
        Err(error) => return Err(NotIssued::Otherwise(error.to_string())),
    }
    if let Some(resume) = resume {
        resume.used(&issued.id);
    }
    Ok(issued)
}

/// The file of finished runs; of those there, what is still proof.
async fn resumed(file: &Path, subject: &Subject<'_>, store: &Store) -> Result<Resume, Failure> {
    let events = store.certificate_events(subject.route, subject.name).await.or_exit(Exit::Unavailable)?;
    let since_ms = proof_since(&events, store.now_ms());
    Resume::open(file, &subject.wanted.hash(subject.route, subject.name), since_ms)
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

/// Each case once through a gateway in front of the provider, and once more as a stream where requests may be one and the route takes
/// it.
///
/// Each under a key that nobody has used, so that no gateway, nor this one, tells what it kept; an answer that says of itself that it
/// was given before is no evidence here either, and another model or build than answered elsewhere is another one here too.
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
            let asked = asked.to_string();
            if stream && examined.route.is_some_and(|route| route.check_input(asked.as_bytes()).is_err()) {
                continue;
            }
            let request = examined.request(asked.as_bytes());
            let target =
                if request.target.is_empty() { config.provider[&contract.provider].path.clone() } else { request.target.clone() };
            let request = onejob::provider::Request { target, ..request };
            let rendered = through.provider.render(&request).or_exit(Exit::Internal)?;
            runs.push(match examined.over() {
                Some(over) => examined.not_judged(case, variant, over),
                None => examined.judged(case, variant, &body, through.provider.submit(examined.call(rendered)).await),
            });
        }
    }
    through.stop().await;
    Ok(runs)
}

fn told(report: &Report, end: &str, cases: &[Case]) -> String {
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
    let says: Vec<String> = report.says.iter().map(|says| escaped(says)).collect();
    let mut out = format!("{}, {}: {}\n", report.route, report.provider, says.join("\n  "));
    if !report.parameters.is_empty() {
        out.push_str(&format!("  each sent with {}\n", escaped(&Value::Object(report.parameters.clone()).to_string())));
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
            out.push_str(&format!("  {}\n", escaped(finding)));
        }
        if !run.input.is_empty() {
            out.push_str(&format!("  asked: {}\n", escaped(&run.input)));
        }
        if !run.got.is_empty() {
            out.push_str(&format!("  got: {:?}\n", run.got));
        }
    }
    if report.cost > 0 {
        out.push_str(&format!("\ncost: {}\n", report.cost));
    }
    out.push_str(&format!("\n{end}\n"));
    out
}
