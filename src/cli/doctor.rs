//! `onejob doctor`: looks for what would keep a gateway from keeping its promises, says what it means and what to do.
//!
//! It changes nothing but the notes of the schema and of the store's name, which a first start would write too. Providers are not
//! called.

use std::time::{Duration, Instant};

use comfy_table::Cell;
use onejob::config::Config;
use onejob::error::StoreError;
use onejob::provider::http::HttpProvider;
use onejob::store::private_redis::{PrivateRedis, PrivateRedisError, PrivateRedisOptions};
use onejob::store::{Durability, Durable, Eviction, RedisFacts, RedisKind, Store, StoreOptions, Tried};
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};

use super::{Context, Exit, Failure, assemble, chain, config, demo, say, show};

/// How often the canary sings.
const CANARY_RUNS: usize = 20;
/// A slower median shows in every job's overhead: two round trips each.
const CANARY_MEDIAN_MAX: Duration = Duration::from_millis(5);
/// Record times come from Redis; clocks further apart make logs and job ids hard to compare.
const CLOCK_OFFSET_MAX_MS: u64 = 500;
/// A fuller Redis is near to refusing new jobs.
const MEMORY_PERCENT_MAX: u64 = 80;
/// Descriptors that a gateway needs beside those of its clients.
const DESCRIPTORS_RESERVED: u64 = 256;

/// What was found of one thing.
struct Finding {
    check: &'static str,
    verdict: Verdict,
    found: String,
    /// What it means, and what to do; empty if it is well.
    advice: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Good,
    Warning,
    Bad(Exit),
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Good => "good",
            Verdict::Warning => "warning",
            Verdict::Bad(_) => "bad",
        }
    }
}

impl Finding {
    fn good(check: &'static str, found: impl Into<String>) -> Self {
        Finding { check, verdict: Verdict::Good, found: found.into(), advice: String::new() }
    }

    fn warning(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Finding { check, verdict: Verdict::Warning, found: found.into(), advice: advice.into() }
    }

    fn bad(check: &'static str, exit: Exit, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Finding { check, verdict: Verdict::Bad(exit), found: found.into(), advice: advice.into() }
    }

    fn to_json(&self) -> Value {
        json!({ "check": self.check, "verdict": self.verdict.word(), "found": self.found, "advice": self.advice })
    }
}

pub(super) async fn run(context: &Context) -> Result<Exit, Failure> {
    let mut findings = Vec::new();
    match context.load() {
        Err(error) => findings.push(Finding::bad(
            "configuration",
            Exit::Usage,
            error.to_string(),
            "correct it; `onejob config example` prints one that loads",
        )),
        Ok(config) => {
            check_configuration(&config, &mut findings);
            check_providers(&config, &mut findings);
            check_descriptors(&config, &mut findings);
            check_redis(&config, &mut findings).await;
        }
    }
    let bad = findings.iter().find_map(|finding| match finding.verdict {
        Verdict::Bad(exit) => Some(exit),
        Verdict::Good | Verdict::Warning => None,
    });
    let exit = bad.unwrap_or(Exit::Done);
    let value = json!({ "ok": bad.is_none(), "findings": findings.iter().map(Finding::to_json).collect::<Vec<_>>() });
    context.print(&value, || rows(&findings));
    let count = |word: &str| findings.iter().filter(|finding| finding.verdict.word() == word).count();
    say(format_args!("{} good, {}, {} bad", count("good"), show::count(count("warning"), "warning"), count("bad")));
    Ok(exit)
}

fn rows(findings: &[Finding]) -> String {
    let mut table = show::table(&["check", "verdict", "found"]);
    for finding in findings {
        let mut text = finding.found.clone();
        if !finding.advice.is_empty() {
            text = format!("{text}\n→ {}", finding.advice);
        }
        table.add_row([Cell::new(finding.check), Cell::new(finding.verdict.word()), Cell::new(text)]);
    }
    show::lines(&table)
}

fn check_configuration(settings: &Config, findings: &mut Vec<Finding>) {
    let (providers, routes) = (settings.provider.len(), settings.route.len());
    if routes == 0 {
        let advice = "nothing can be submitted; `onejob config example` shows a route";
        findings.push(Finding::warning("configuration", "it has no route", advice));
    } else {
        findings.push(Finding::good(
            "configuration",
            format!("{}\n{}", show::count(providers, "provider"), config::follows(settings).trim_end()),
        ));
    }
    for open in settings.open_gates() {
        let advice = "leave gate out and have the providers certified (onejob qualify), if it matters which of them answers";
        findings.push(Finding::warning("gate", open, advice));
    }
    let listen = settings.server.listen;
    if settings.owner.is_empty() {
        let found = format!("nobody needs a token at {listen}");
        findings.push(Finding::warning("owners", found, "whoever reaches the address may do everything; add an [owner.<name>]"));
    } else {
        findings.push(Finding::good("owners", show::count(settings.owner.len(), "owner")));
    }
}

fn check_providers(settings: &Config, findings: &mut Vec<Finding>) {
    for (name, entry) in &settings.provider {
        let options = assemble::http_options(settings, name, entry);
        if entry.adapter == onejob::config::Adapter::Http
            && let Err(error) = HttpProvider::new(name, options)
        {
            findings.push(Finding::bad("provider", Exit::Usage, error.to_string(), "correct its entry; it was not called"));
        }
    }
}

fn check_descriptors(settings: &Config, findings: &mut Vec<Finding>) {
    let providers: usize = settings.provider.values().map(|provider| provider.limits.in_flight).sum();
    let wanted = (settings.server.connections_max + providers + settings.redis.pool_max) as u64 + DESCRIPTORS_RESERVED;
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < wanted => findings.push(Finding::warning(
            "descriptors",
            format!("this shell allows {limit} open files; the limits of the configuration add up to {wanted}"),
            format!("ulimit -n {wanted} (LimitNOFILE={wanted}), or lower server.connections_max and limits.in_flight"),
        )),
        Some(limit) => {
            findings.push(Finding::good("descriptors", format!("{limit} open files are allowed, {wanted} may be needed")));
        }
        None => findings.push(Finding::good("descriptors", "open files have no limit")),
    }
}

async fn check_redis(settings: &Config, findings: &mut Vec<Finding>) {
    if let Some(url) = &settings.redis.url {
        return check_store(settings, url.reveal(), findings).await;
    }
    let (data_dir, server) = (settings.redis.data_dir.clone(), settings.redis.server.clone());
    // A directory that is not there is not made: a first start does that.
    let temporary = if data_dir.exists() {
        None
    } else {
        match demo::Home::make(None) {
            Ok(home) => Some(home),
            Err(failure) => {
                let found = format!("cannot try redis-server in a temporary directory: {}", failure.error);
                return findings.push(Finding::bad("private redis", failure.exit, found, "see that /tmp can be written to"));
            }
        }
    };
    let tried = temporary.as_ref().map_or(data_dir.as_path(), demo::Home::path).to_owned();
    match PrivateRedis::start(PrivateRedisOptions { data_dir: tried, server, syncs: assemble::syncs(settings) }).await {
        Ok(private_redis) => {
            let found = match &temporary {
                None => format!("redis-server runs in {}", data_dir.display()),
                Some(_) => format!("redis-server runs (tried elsewhere: a first start makes {})", data_dir.display()),
            };
            findings.push(Finding::good("private redis", found));
            check_store(settings, private_redis.url(), findings).await;
            private_redis.stop().await;
        }
        Err(PrivateRedisError::InUse { data_dir, pid }) => {
            let user = if pid == 0 { "another process".to_owned() } else { format!("process {pid}") };
            let found = format!("{} is in use by {user}, so its redis was not looked at", data_dir.display());
            let listen = settings.server.listen;
            let advice = format!("if that is your gateway, it knows how it is: curl http://{listen}/readyz; if not, stop it");
            findings.push(Finding::warning("private redis", found, advice));
        }
        Err(error) => findings.push(Finding::bad(
            "private redis",
            Exit::Unavailable,
            error.to_string(),
            "a private redis-server is for one machine; with redis.url the gateway uses yours",
        )),
    }
}

async fn check_store(settings: &Config, url: &str, findings: &mut Vec<Finding>) {
    // One that evicts, or falls short of the level of durability, is looked at like any other; the verdict is told below.
    let options =
        StoreOptions { eviction: Eviction::Allowed, durability: Durability::Memory, ..assemble::store_options(settings, url) };
    let store = match Store::open(options).await {
        Ok(store) => store,
        Err(error) => return findings.push(unusable(&error)),
    };
    findings.push(Finding::good("kind", store.kind().to_string()));
    let checked = store.check().await;
    let facts = store.facts().await;
    match &checked {
        Ok(_) => {
            findings.push(Finding::good("schema", format!("the records under {:?} are ours to read", settings.redis.prefix)));
        }
        // One that does not answer is told of once: here, or below with its address.
        Err(error) if error.is_retryable() && facts.iter().any(Result::is_ok) => {
            let advice = "its slot tells which schema the records have: a gateway does not start without";
            findings.push(Finding::bad("schema", Exit::Unavailable, error.to_string(), advice));
        }
        Err(error) if !error.is_retryable() => findings.push(unusable(error)),
        Err(_) => {}
    }
    let options = StoreOptions { eviction: Eviction::Allowed, ..assemble::store_options(settings, url) };
    // Whoever cannot be reached is told of by its facts.
    let tried = Store::try_durability(options).await.unwrap_or_default();
    for facts in &facts {
        match facts {
            Ok(facts) => {
                let from = findings.len();
                check_facts(settings, facts, findings);
                findings.push(durability(settings, facts, &store.kind(), &tried));
                if let Some(node) = &facts.node {
                    findings[from..].iter_mut().for_each(|finding| finding.found = format!("{node}: {}", finding.found));
                }
            }
            Err(error) if checked.is_ok() => {
                let advice =
                    "see that it runs: its jobs are 503 until it answers; a gateway starts, and serves those of the others";
                findings.push(Finding::bad("redis", Exit::Unavailable, error.to_string(), advice));
            }
            Err(error) => findings.push(unusable(error)),
        }
    }
    if checked.is_ok() {
        check_canary(&store, findings).await;
        check_clock(&store, findings);
    }
    store.close().await;
}

fn unusable(error: &StoreError) -> Finding {
    let advice = match error {
        StoreError::NotExecuted { .. } | StoreError::Ambiguous { .. } | StoreError::NotDurable { .. } => {
            "see that redis runs and that redis.url leads to it; a gateway does not start without"
        }
        StoreError::Fatal { .. } => "a gateway does not start on it as it is",
    };
    Finding::bad("redis", Exit::Unavailable, chain(&anyhow::Error::new(error.clone())), advice)
}

fn check_facts(settings: &Config, facts: &RedisFacts, findings: &mut Vec<Finding>) {
    let unsaid =
        |check| Finding::warning(check, "redis does not say (INFO is denied)", "look for yourself, or allow +info to its user");
    findings.push(match (&facts.server, &facts.version) {
        (Some(server), Some(version)) if !server.ends_with(version.as_str()) => {
            Finding::good("version", format!("{server}, which does what Redis {version} does"))
        }
        (Some(server), _) => Finding::good("version", server.as_str()),
        (None, _) => unsaid("version"),
    });
    findings.push(match facts.maxmemory_policy.as_deref() {
        Some("noeviction") => Finding::good("eviction", "noeviction"),
        Some(policy) if settings.redis.allow_eviction => {
            let found = format!("{policy}, and redis.allow_eviction is set");
            Finding::warning(
                "eviction",
                found,
                "open jobs may be evicted, and then they run twice: CONFIG SET maxmemory-policy noeviction",
            )
        }
        Some(policy) => Finding::bad(
            "eviction",
            Exit::Unavailable,
            policy,
            "open jobs may be evicted, and then they run twice; a gateway does not start: CONFIG SET maxmemory-policy noeviction",
        ),
        None => unsaid("eviction"),
    });
    findings.push(match facts.role.as_deref() {
        Some("master") => Finding::good("role", "master"),
        Some(role) => Finding::bad("role", Exit::Unavailable, role, "a replica takes no jobs: let redis.url lead to the master"),
        None => unsaid("role"),
    });
    findings.push(persistence(facts).unwrap_or_else(|| unsaid("persistence")));
    findings.push(memory(facts));
}

/// What the configured level survives on this very server, as it is set now, if a write is as durable as that.
fn durability(settings: &Config, facts: &RedisFacts, kind: &RedisKind, tried: &[Tried]) -> Finding {
    const CHECK: &str = "durability";
    let (level, timeout) = (assemble::durability(settings), settings.redis.durability_timeout);
    let said = |name: &str, value: Option<String>| format!("{name} {}", value.unwrap_or_else(|| "not told".to_owned()));
    let aof = facts.aof_enabled.as_deref().map(|on| if on == "1" { "yes" } else { "no" }.to_owned());
    let save = facts.save.as_deref().map(|save| if save.is_empty() { "never".to_owned() } else { save.to_owned() });
    let said = [
        said("appendonly", aof),
        said("appendfsync", facts.appendfsync.clone()),
        said("save", save),
        said("connected replicas", facts.replicas.map(|replicas| replicas.to_string())),
        said("min-replicas-to-write", facts.min_replicas_to_write.map(|replicas| replicas.to_string())),
        said("maxmemory-policy", facts.maxmemory_policy.clone()),
    ];
    let found = format!("{}\n{}", level.describe(), said.join(", "));
    let held = match kind {
        RedisKind::One | RedisKind::Sentinel { .. } => {
            "a gateway starts, and begins no work with effects and tells no ending until they are: see the replicas"
        }
        RedisKind::Cluster { .. } => {
            "a gateway starts, and of the jobs of this master begins no work with effects and tells no ending until they are: \
             see its replicas"
        }
    };
    if let Some(short) = facts.falls_short_of(level) {
        let advice = match level {
            Durability::Replicated(_) => held,
            Durability::Memory | Durability::Fsync if facts.has_waitaof() => {
                "a gateway does not start: CONFIG SET appendonly yes, appendfsync everysec"
            }
            Durability::Memory | Durability::Fsync => {
                "a gateway does not start: CONFIG SET appendonly yes, appendfsync always, no-appendfsync-on-rewrite no"
            }
        };
        return Finding::bad(CHECK, Exit::Unavailable, format!("{found}\n{short}"), advice);
    }
    match tried.iter().find(|tried| tried.node == facts.node).map(|tried| &tried.outcome) {
        Some(Ok(Durable::Short { have, want })) => {
            let within = humantime::format_duration(timeout);
            let found = format!("{found}\na write was tried: after {within} {have} of {want} had it");
            let advice = match level {
                Durability::Replicated(_) => held,
                Durability::Memory | Durability::Fsync => {
                    "no work with effects is begun, and no ending is told, while the disk does not have it: \
                     see the disk, INFO persistence"
                }
            };
            return Finding::bad(CHECK, Exit::Unavailable, found, advice);
        }
        Some(Err(error)) => {
            let found = format!("{found}\na write was tried: {error}");
            return Finding::bad(CHECK, Exit::Unavailable, found, "work with effects would meet this too");
        }
        Some(Ok(Durable::Yes)) | None => {}
    }
    let (aof, syncs) = (facts.aof_enabled.as_deref() == Some("1"), facts.appendfsync.as_deref() == Some("always"));
    let survives = match level {
        Durability::Memory if aof && syncs => {
            "a crash of redis, and of its machine; a failover to a replica that is behind takes writes back"
        }
        Durability::Memory if aof => {
            "a crash of redis; a crash of its machine, or a failover to a replica that is behind, takes the last writes back"
        }
        Durability::Memory => "a crash of the gateway alone: whatever redis had in memory is lost with it",
        Durability::Fsync => {
            "a crash of redis, and of its machine, but for its disk; a failover to a replica that is behind takes writes back"
        }
        Durability::Replicated(_) => "a failover to a replica that has what was waited for: promote by offset",
    };
    let shown = match level {
        Durability::Fsync if facts.has_waitaof() => "; each write is waited for (WAITAOF)",
        Durability::Fsync => "; it answers after the disk has what it says",
        Durability::Replicated(_) => "; each write is waited for (WAIT)",
        Durability::Memory => "",
    };
    let found = format!("{found}\nit survives {survives}{shown}");
    match facts.waits_too_short(level, timeout) {
        Some(short) => Finding::warning(
            CHECK,
            format!("{found}\n{short}"),
            "raise redis.durability_timeout, or CONFIG SET appendfsync always",
        ),
        None => Finding::good(CHECK, found),
    }
}

/// What outlives a Redis that goes down; `None` if it does not say.
fn persistence(facts: &RedisFacts) -> Option<Finding> {
    const CHECK: &str = "persistence";
    if facts.aof_enabled.as_deref()? != "1" {
        return Some(Finding::warning(
            CHECK,
            "appendonly is off",
            "jobs since the last snapshot, if it makes any, are lost when redis goes down, and may run twice: \
             CONFIG SET appendonly yes",
        ));
    }
    Some(match facts.appendfsync.as_deref() {
        Some("always") => Finding::good(CHECK, "it appends to a file, which is on disk before it answers"),
        Some("everysec") => Finding::good(CHECK, "it appends to a file, which is on disk after a second"),
        Some("no") => Finding::warning(
            CHECK,
            "it appends to a file, and the system decides when it is on disk",
            "if the machine goes down, jobs of the last half minute or so may be lost, and may run twice: \
             CONFIG SET appendfsync everysec",
        ),
        Some(_) | None => Finding::warning(
            CHECK,
            "it appends to a file, and does not say when it is on disk (CONFIG is denied)",
            "see that appendfsync is everysec or always",
        ),
    })
}

fn memory(facts: &RedisFacts) -> Finding {
    const MIB: u64 = 1 << 20;
    match (facts.used_memory_bytes, facts.maxmemory_bytes) {
        (Some(used), Some(0)) => Finding::good("memory", format!("{} MiB used, no limit of its own", used / MIB)),
        (Some(used), Some(max)) if used.saturating_mul(100) / max > MEMORY_PERCENT_MAX => Finding::warning(
            "memory",
            format!("{} of {} MiB used", used / MIB, max / MIB),
            "when it is full, new jobs are refused (503) and running ones still end: raise maxmemory, or lower retention",
        ),
        (Some(used), Some(max)) => Finding::good("memory", format!("{} of {} MiB used", used / MIB, max / MIB)),
        (None, _) | (_, None) => {
            Finding::warning("memory", "redis does not say", "look for yourself: a full redis refuses new jobs")
        }
    }
}

async fn check_canary(store: &Store, findings: &mut Vec<Finding>) {
    let mut times = Vec::with_capacity(CANARY_RUNS);
    for _ in 0..CANARY_RUNS {
        let began = Instant::now();
        if let Err(error) = store.canary().await {
            let advice = "PING may work all the same; a submit would meet this too";
            return findings.push(Finding::bad("canary script", Exit::Unavailable, error.to_string(), advice));
        }
        times.push(began.elapsed());
    }
    times.sort_unstable();
    let (median, slowest) = (times[times.len() / 2], times[times.len() - 1]);
    let found =
        format!("median {:.2} ms, slowest {:.2} ms of {CANARY_RUNS}", median.as_secs_f64() * 1e3, slowest.as_secs_f64() * 1e3);
    findings.push(if median > CANARY_MEDIAN_MAX {
        Finding::warning(
            "canary script",
            found,
            "each job takes two such round trips: bring the gateway nearer to redis, or see its SLOWLOG",
        )
    } else {
        Finding::good("canary script", found)
    });
}

fn check_clock(store: &Store, findings: &mut Vec<Finding>) {
    let (theirs, ours) = (store.now_ms(), show::now_ms());
    let found = format!("redis' clock is {} ms {} ours", theirs.abs_diff(ours), if theirs < ours { "behind" } else { "before" });
    findings.push(if theirs.abs_diff(ours) > CLOCK_OFFSET_MAX_MS {
        let advice = "nothing depends on it but the ids' order and your reading of logs; still, let NTP run on both";
        Finding::warning("clock", found, advice)
    } else {
        Finding::good("clock", found)
    });
}
