//! One schema for everything that can be set, checked once.
//!
//! The only reader of the environment. Sources, later ones win: defaults, the TOML file, `ONEJOB_…` variables, flags. Unknown
//! keys are refused; what is refused names the key, the value and the limit, and everything that is wrong is told at once.
//!
//! Deliberately not here: nothing is connected or started; files that hold credentials and authorities are only looked at. There
//! is no reloading: a [`Config`] is what a process has from its start to its end. `docs/OPERATIONS.md` documents every key.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::fingerprint::{hex, sha256};
use crate::job::{Class, Rules};
use crate::policy::{self, REPLAYS_MAX, TRACKED_AFTER_MIN, Tracked};
use crate::validate::Validator;

mod asking;
mod check;
mod clicks;
mod describe;
mod qualify;
mod required;
mod secret;
mod sources;
mod stream;

pub use crate::policy::{Breaker, Effects, FailoverOn, Gate, LINGER_MAX, RetryBudget, TCP_USER_TIMEOUT};
pub use crate::validate::Parse;
pub use asking::{Cancel, Fetch, Find, Means, Missing, Poll, Preset, Status, Submit, Webhook};
pub use clicks::{CLICK_STREAMS_MAX, EXPECTED_MAX, StreamEntry};
pub use qualify::{
    ANSWERS_MAX, LIFE_DATED, LIFE_FLOATING, LIFE_MAX, PROMPT_BYTES_MAX, PromptEntry, Qualified, QualifyEntry, SpecialTokens,
    SuspendEntry,
};
pub use required::{Assertions, InputEntry, OutputEntry};
pub use secret::{RedisUrl, Secret};
pub use sources::{Environment, Sources};
pub use stream::{InvalidStreamEnd, InvalidStreamError, STREAM_WORD_BYTES_MAX, Stream, StreamEnd, StreamError};

/// Most attempts of a route: what one job may cost stays a number that a person takes in at a glance.
pub const ATTEMPTS_MAX: u32 = 32;
/// Most routes: each is a label of metrics.
pub const ROUTES_MAX: usize = 256;
/// Most providers: each is a label of metrics.
pub const PROVIDERS_MAX: usize = 256;
/// Longest name of a route, a provider or a stream of clicks in bytes: it is a label of metrics and a part of URLs.
pub const NAME_BYTES_MAX: usize = 32;

/// The whole configuration, checked: [`Config::load`] is the one way to get it.
#[derive(Clone, Debug, Serialize)]
pub struct Config {
    /// Where and how the gateway listens.
    pub server: Server,
    /// Which Redis.
    pub redis: Redis,
    /// Leases, sweeps, drain.
    pub runtime: Runtime,
    /// Who may submit and operate. None: open, on loopback only.
    pub owner: BTreeMap<String, OwnerEntry>,
    /// The providers by name.
    pub provider: BTreeMap<String, ProviderEntry>,
    /// The routes by name.
    pub route: BTreeMap<String, Route>,
    /// The streams of clicks by name.
    pub stream: BTreeMap<String, StreamEntry>,
    /// The credentials that `auth` names, by provider.
    #[serde(skip)]
    bearers: BTreeMap<String, Secret>,
    /// What routes require of inputs and outputs, compiled, by route.
    #[serde(skip)]
    validators: BTreeMap<String, Arc<Validator>>,
    /// What providers must have proved, by route.
    #[serde(skip)]
    qualified: BTreeMap<String, Arc<Qualified>>,
    /// The secrets that `webhook` names, by provider.
    #[serde(skip)]
    webhook_secrets: BTreeMap<String, Secret>,
    /// Where each value that is not a default comes from, by key.
    #[serde(skip)]
    origins: BTreeMap<String, String>,
}

/// The configuration as it is written, unchecked.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct Document {
    server: Server,
    redis: Redis,
    runtime: Runtime,
    owner: BTreeMap<String, OwnerEntry>,
    provider: BTreeMap<String, ProviderEntry>,
    route: BTreeMap<String, Route>,
    stream: BTreeMap<String, StreamEntry>,
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("the configuration {} is not TOML: line {line}: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where, from 1.
        line: usize,
        /// What the parser says, without the text of the line.
        message: String,
    },
    /// Something in it is refused: all of it, each on its line.
    #[error("the configuration is refused, {} to correct:{}", count(problems), lines(problems))]
    Refused {
        /// Everything that was found.
        problems: Vec<Problem>,
    },
}

fn count(problems: &[Problem]) -> String {
    if problems.len() == 1 { "1 problem".to_owned() } else { format!("{} problems", problems.len()) }
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}

/// One thing in the configuration that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The key, with dots.
    pub key: String,
    /// The value, unless it may be a secret.
    pub value: Option<String>,
    /// The file, variable or flag that it comes from; none for a default and for what is missing.
    pub origin: Option<String>,
    /// What is wrong with it, with the limit.
    pub what: String,
    /// What to do.
    pub hint: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)?;
        if let Some(value) = &self.value {
            write!(f, " = {value}")?;
        }
        if let Some(origin) = &self.origin {
            write!(f, " ({origin})")?;
        }
        write!(f, ": {}; {}", self.what, self.hint)
    }
}

/// What the program was called with, its own name first.
pub fn arguments() -> std::env::ArgsOs {
    std::env::args_os()
}

impl Config {
    /// Reads all sources, checks them together and resolves the credentials that they name.
    ///
    /// # Errors
    /// The file cannot be read or parsed, or something is refused: then every problem that was found, for a person to correct.
    pub fn load(sources: Sources) -> Result<Self, ConfigError> {
        let mut read = sources::read(&sources)?;
        let check::Resolved { bearers, webhook_secrets, validators, qualified } = check::check(&mut read, &sources.environment);
        if !read.problems.is_empty() {
            return Err(ConfigError::Refused { problems: read.problems });
        }
        let Document { server, redis, runtime, owner, provider, route, stream } = read.document;
        Ok(Config {
            server,
            redis,
            runtime,
            owner,
            provider,
            route,
            stream,
            bearers,
            webhook_secrets,
            validators,
            qualified,
            origins: read.origins,
        })
    }

    /// Where a gateway with these sources would listen, for whoever wants to reach it and need not have its credentials.
    ///
    /// # Errors
    /// The file cannot be read or parsed, or the address is refused.
    pub fn listen(sources: Sources) -> Result<SocketAddr, ConfigError> {
        let sources::Read { document, mut problems, .. } = sources::read(&sources)?;
        problems.retain(|problem| matches!(problem.key.as_str(), "server" | "server.listen"));
        if problems.is_empty() { Ok(document.server.listen) } else { Err(ConfigError::Refused { problems }) }
    }

    /// Returns the text of a commented example that loads as it is.
    pub fn example() -> &'static str {
        include_str!("../deploy/onejob.example.toml")
    }

    /// Returns the bearer token of a provider, if its entry names one.
    pub fn bearer(&self, provider: &str) -> Option<&Secret> {
        self.bearers.get(provider)
    }

    /// Returns what a route requires of inputs and outputs, if it requires anything.
    pub fn validator(&self, route: &str) -> Option<&Arc<Validator>> {
        self.validators.get(route)
    }

    /// Returns the secret that a provider signs its webhooks with, if its entry has any.
    pub fn webhook_secret(&self, provider: &str) -> Option<&Secret> {
        self.webhook_secrets.get(provider)
    }

    /// Returns how long after becoming unknown "it never happened" is not believed: what the route says, or else the shortest
    /// safe time.
    ///
    /// See `docs/PROTOCOL.md`, "A paused gateway".
    pub fn quarantine(&self, route: &Route) -> Duration {
        route.quarantine.unwrap_or_else(|| quarantine_min(&self.runtime, &self.provider, route))
    }

    /// Returns the most calls of providers that one job of the route can cause. Nothing below an attempt calls again.
    pub fn provider_calls_max(&self, route: &Route) -> u32 {
        route.attempts
    }

    /// Returns how often one job of the route can be sent again, beside those calls, to find out what became of an attempt: at
    /// providers that do the work of a key once, and only while they remember it.
    pub fn provider_replays_max(&self, route: &Route) -> u32 {
        let honours = |name: &String| self.provider.get(name).is_some_and(|provider| provider.idempotency.is_some());
        let replays = u32::try_from(REPLAYS_MAX).expect("a few");
        if route.providers.iter().any(honours) { route.attempts * replays } else { 0 }
    }

    /// Returns the rules that a job of the route carries with it.
    pub fn rules(&self, route: &Route) -> Rules {
        Rules {
            attempts_max: route.attempts,
            race_max: route.race.map_or(1, |race| race.max),
            // Where it is tracked, the record says how early it may be.
            race_after_ms: route.race.map_or(0, |race| whole_ms(race.after.fixed().unwrap_or(TRACKED_AFTER_MIN))),
            key_life_ms: whole_ms(route.key_life()),
            retention_ms: whole_ms(route.retention),
            releases_on_failure: route.on_failure == OnFailure::Release,
            quarantine_ms: whole_ms(self.quarantine(route)),
        }
    }
}

impl Route {
    /// Returns when providers are asked about unknown attempts.
    pub fn reconcile(&self) -> policy::Reconcile {
        let Reconcile { first, max, give_up } = self.reconcile;
        policy::Reconcile { first, max, give_up, abandon_after: self.abandon_after }
    }

    /// Returns when a race's next attempt begins, if that is tracked.
    pub fn tracked(&self) -> Option<Tracked> {
        match self.race? {
            Race { after: RaceAfter::Percentile(percentile), after_fallback: Some(fallback), .. } => {
                Some(Tracked { percentile, fallback })
            }
            Race { .. } => None,
        }
    }

    /// Returns how long the key stands for the job from its end.
    pub fn key_life(&self) -> Duration {
        self.key_life.unwrap_or(self.retention)
    }
}

/// Computes the name that a bearer token has in the configuration: SHA-256 in hexadecimal.
pub fn token_sha256(token: &str) -> String {
    hex(&sha256(token.as_bytes()))
}

/// The shortest safe quarantine of a route: a gateway may pause after its last check, then hand its request to the kernel, which
/// may deliver it late, to a provider that may work on it for its whole timeout, while the clock that we measure by is set.
fn quarantine_min(runtime: &Runtime, providers: &BTreeMap<String, ProviderEntry>, route: &Route) -> Duration {
    let totals = route.providers.iter().filter_map(|name| providers.get(name)).map(|provider| {
        // While the connection is open for a late answer, the provider may begin as well.
        provider.timeouts.total.saturating_add(provider.timeouts.linger)
    });
    // What an executor outside takes for one attempt is not known here; the job's deadline bounds it.
    let total = totals.max().unwrap_or(route.deadline);
    [runtime.pause_max, TCP_USER_TIMEOUT, total, runtime.clock_step_max]
        .into_iter()
        .fold(Duration::ZERO, |sum, term| sum.saturating_add(term))
}

/// A checked duration in whole milliseconds, rounded up: a limit is never shortened.
fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).expect("durations are checked against DURATION_MAX")
}

/// Where and how the gateway listens, and what it accepts.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Server {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Where providers reach the gateways with their webhooks: scheme, host, port, and at most a path. No default.
    pub public_url: Option<String>,
    /// The header by which a gateway in front names the owner. Whoever can reach the listener can be anybody: bind it
    /// accordingly.
    pub trusted_owner_header: Option<String>,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// Largest request head.
    pub head_bytes_max: usize,
    /// Most header lines of a request.
    pub headers_max: usize,
    /// Most connections at once.
    pub connections_max: usize,
    /// How long a client may take for a request's head.
    #[serde(with = "humantime_serde")]
    pub head_timeout: Duration,
    /// How long a client may take for a request's body.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// The longest `Prefer: wait`.
    #[serde(with = "humantime_serde")]
    pub wait_max: Duration,
    /// Most requests that wait for a job at once.
    pub waiters_max: usize,
    /// How long `/proxy` waits for a result before 504.
    #[serde(with = "humantime_serde")]
    pub proxy_wait: Duration,
    /// The status for another request under a known key: 409, or 422 as the draft has it.
    pub conflict_status: u16,
    /// Origins that browsers may call from; none by default.
    pub cors_origins: Vec<String>,
}

impl Default for Server {
    fn default() -> Self {
        Server {
            listen: SocketAddr::from(([127, 0, 0, 1], 7470)),
            public_url: None,
            trusted_owner_header: None,
            body_bytes_max: 4 << 20,
            head_bytes_max: 32 << 10,
            headers_max: 100,
            connections_max: 10_000,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            wait_max: Duration::from_secs(60),
            waiters_max: 10_000,
            proxy_wait: Duration::from_secs(120),
            conflict_status: 409,
            cors_origins: Vec::new(),
        }
    }
}

/// Which Redis, and how patient with it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Redis {
    /// `redis://`, `rediss://` or `redis+unix://`. Absent: a private `redis-server` in `data_dir`.
    pub url: Option<RedisUrl>,
    /// The program for a private Redis. Absent: `redis-server`, found in `PATH`.
    pub server: Option<PathBuf>,
    /// Where a private Redis keeps its data, and the gateway its spool.
    pub data_dir: PathBuf,
    /// The prefix of every key.
    pub prefix: String,
    /// How many multiplexed connections carry scripts.
    pub lanes: usize,
    /// How many connections serve what must be isolated.
    pub pool_max: usize,
    /// How long to wait for a connection.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// How long to wait for a reply.
    #[serde(with = "humantime_serde")]
    pub response_timeout: Duration,
    /// What a write must have survived before anybody hears of it.
    pub durability: Durability,
    /// How long the replicas, or the disk, may take for it.
    #[serde(with = "humantime_serde")]
    pub durability_timeout: Duration,
    /// Start although Redis may evict open jobs. Loud.
    pub allow_eviction: bool,
}

/// What a write must have survived before anybody hears of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// The memory of one Redis.
    #[default]
    Memory,
    /// Its append-only file, on disk.
    Fsync,
    /// The memory of so many replicas, beside its own.
    Replicated(u32),
}

impl Default for Redis {
    fn default() -> Self {
        Redis {
            url: None,
            server: None,
            data_dir: PathBuf::from("onejob-data"),
            prefix: "oj".to_owned(),
            lanes: 2,
            pool_max: 16,
            connect_timeout: Duration::from_secs(1),
            response_timeout: Duration::from_millis(500),
            durability: Durability::Memory,
            durability_timeout: Duration::from_secs(1),
            allow_eviction: false,
        }
    }
}

/// How the runtime keeps its promises.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Runtime {
    /// How long an attempt belongs to its gateway without a heartbeat. Renewed at a third.
    #[serde(with = "humantime_serde")]
    pub lease: Duration,
    /// How long before the lease's end nothing is sent any more.
    #[serde(with = "humantime_serde")]
    pub lease_margin: Duration,
    /// How often the hints are looked through.
    #[serde(with = "humantime_serde")]
    pub sweep: Duration,
    /// How long a stopping gateway waits for its running attempts.
    #[serde(with = "humantime_serde")]
    pub drain: Duration,
    /// Most jobs that this gateway works on at once.
    pub jobs_max: usize,
    /// The longest pause of a gateway that the quarantine allows for.
    #[serde(with = "humantime_serde")]
    pub pause_max: Duration,
    /// The largest step of Redis' clock that the quarantine allows for.
    #[serde(with = "humantime_serde")]
    pub clock_step_max: Duration,
    /// Largest answer of a provider.
    pub result_bytes_max: usize,
    /// Bodies over this size are kept in a blob of their own.
    pub blob_bytes_min: usize,
    /// How long a blob that no record names is kept.
    #[serde(with = "humantime_serde")]
    pub blob_grace: Duration,
    /// Where results go that Redis does not take. Absent: `spool` in `redis.data_dir`.
    pub spool_dir: Option<PathBuf>,
    /// Most bytes there; 0: results are in memory alone.
    pub spool_bytes_max: u64,
}

impl Default for Runtime {
    fn default() -> Self {
        Runtime {
            lease: Duration::from_secs(15),
            lease_margin: Duration::from_secs(3),
            sweep: Duration::from_secs(1),
            drain: Duration::from_secs(20),
            jobs_max: 10_000,
            pause_max: Duration::from_secs(30),
            clock_step_max: Duration::from_secs(1),
            result_bytes_max: 16 << 20,
            blob_bytes_min: 8 << 10,
            blob_grace: Duration::from_secs(3600),
            spool_dir: None,
            spool_bytes_max: 1 << 30,
        }
    }
}

/// What an owner may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Submit, read, wait, cancel its own jobs.
    Submit,
    /// Also list, resolve, reopen, force, and drive attempts from outside.
    Operate,
}

/// An owner and its credentials.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OwnerEntry {
    /// SHA-256 of each bearer token, in hexadecimal (`onejob config token`).
    pub tokens_sha256: Vec<String>,
    /// What it may do.
    #[serde(default = "submit_only")]
    pub roles: Vec<Role>,
}

fn submit_only() -> Vec<Role> {
    vec![Role::Submit]
}

/// How a provider is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Adapter {
    /// One request, one answer.
    #[default]
    Http,
    /// Hand in, ask until it is over; called back, if the provider does.
    AsyncHttp,
    /// Our own programmable provider, started with the gateway, over real HTTP.
    Simulated,
}

/// Whether a provider is spoken to in HTTP/2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Http2 {
    /// Never: a call has a connection of its own.
    #[default]
    Off,
    /// If it agrees in the TLS handshake.
    Alpn,
    /// From the first byte: it is known to speak nothing else.
    PriorKnowledge,
}

/// A provider.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProviderEntry {
    /// Defaults for everything below.
    pub preset: Option<Preset>,
    /// How it is reached.
    pub adapter: Adapter,
    /// Where. Required for `http` and `async_http`.
    pub base_url: String,
    /// Where it was before: attempts that were sent there are asked about there, with the same credential.
    pub former_base_urls: Vec<String>,
    /// The path of a job submitted by route alone.
    pub path: String,
    /// The method of a job submitted by route alone.
    pub method: String,
    /// The credential.
    pub auth: Auth,
    /// Headers that every call carries.
    pub headers: BTreeMap<String, String>,
    /// How long each phase may take.
    pub timeouts: Timeouts,
    /// How it honours our key, if it does.
    pub idempotency: Option<Idempotency>,
    /// How work is handed in; for `http` its body alone.
    pub submit: Option<Submit>,
    /// How it is asked by its own id, and how a piece of work looks in its answers.
    pub status: Option<Status>,
    /// How it is asked by our key.
    pub find: Option<Find>,
    /// How it is asked to stop.
    pub cancel: Option<Cancel>,
    /// How a result is fetched that is not in the status' answer.
    pub result: Option<Fetch>,
    /// How often it is asked while an attempt runs; not for `http`.
    pub poll: Poll,
    /// How it calls back; not for `http`.
    pub webhook: Option<Webhook>,
    /// Statuses that it swears mean "did nothing".
    pub not_executed: Vec<u16>,
    /// What its model is prompted with.
    pub prompt: Option<PromptEntry>,
    /// JSON pointer to a number in its answer: what the work cost, in its own unit.
    pub cost: Option<String>,
    /// How its streams of server-sent events are read.
    pub stream: Stream,
    /// How much at once, and how often.
    pub limits: Limits,
    /// When it is left alone for a while. Absent: never.
    pub breaker: Option<Breaker>,
    /// A PEM file of the authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Whether it is spoken to in HTTP/2.
    pub http2: Http2,
    /// For `simulated`: what it does.
    pub behaviour: Option<String>,
}

impl Default for ProviderEntry {
    fn default() -> Self {
        ProviderEntry {
            preset: None,
            adapter: Adapter::Http,
            base_url: String::new(),
            former_base_urls: Vec::new(),
            path: "/".to_owned(),
            method: "POST".to_owned(),
            auth: Auth::default(),
            headers: BTreeMap::new(),
            timeouts: Timeouts::default(),
            idempotency: None,
            submit: None,
            status: None,
            find: None,
            cancel: None,
            result: None,
            poll: Poll::default(),
            webhook: None,
            not_executed: Vec::new(),
            stream: Stream::default(),
            prompt: None,
            cost: None,
            limits: Limits::default(),
            breaker: None,
            ca_file: None,
            http2: Http2::Off,
            behaviour: None,
        }
    }
}

impl ProviderEntry {
    /// Whether it is handed work and asked about it, rather than answering at once.
    pub fn is_asynchronous(&self) -> bool {
        match self.adapter {
            Adapter::Http => false,
            Adapter::AsyncHttp => true,
            Adapter::Simulated => self.submit.is_some(),
        }
    }
}

/// A provider's credential: always by reference, never in the file.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Auth {
    /// The environment variable that holds a bearer token.
    pub bearer_env: Option<String>,
    /// The file that holds a bearer token.
    pub bearer_file: Option<PathBuf>,
}

/// How long each phase of a call may take. A phase that is not set is at most the total; the first byte may take all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(from = "WrittenTimeouts")]
pub struct Timeouts {
    /// DNS, TCP and TLS.
    #[serde(with = "humantime_serde")]
    pub connect: Duration,
    /// From the request's first byte to the answer's.
    #[serde(with = "humantime_serde")]
    pub first_byte: Duration,
    /// Between two parts of the answer.
    #[serde(with = "humantime_serde")]
    pub idle: Duration,
    /// All of it.
    #[serde(with = "humantime_serde")]
    pub total: Duration,
    /// How long after that a late answer is still listened for. The attempt is unknown meanwhile; a late success settles it.
    #[serde(with = "humantime_serde")]
    pub linger: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            connect: Duration::from_secs(2),
            first_byte: Duration::from_secs(120),
            idle: Duration::from_secs(20),
            total: Duration::from_secs(120),
            linger: Duration::from_secs(30),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct WrittenTimeouts {
    #[serde(with = "humantime_serde")]
    connect: Option<Duration>,
    #[serde(with = "humantime_serde")]
    first_byte: Option<Duration>,
    #[serde(with = "humantime_serde")]
    idle: Option<Duration>,
    #[serde(with = "humantime_serde")]
    total: Option<Duration>,
    #[serde(with = "humantime_serde")]
    linger: Option<Duration>,
}

impl From<WrittenTimeouts> for Timeouts {
    fn from(written: WrittenTimeouts) -> Self {
        let default = Timeouts::default();
        let total = written.total.unwrap_or(default.total);
        Timeouts {
            connect: written.connect.unwrap_or(default.connect.min(total)),
            // A provider that answers all at once sends its first byte when it is done.
            first_byte: written.first_byte.unwrap_or(total),
            idle: written.idle.unwrap_or(default.idle.min(total)),
            total,
            linger: written.linger.unwrap_or(default.linger),
        }
    }
}

/// How a provider honours our idempotency key.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Idempotency {
    /// The header that it reads it from.
    pub header: String,
    /// How long it remembers it.
    #[serde(with = "humantime_serde")]
    pub ttl: Duration,
}

/// How much a provider is asked to do.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Calls at once, by one gateway.
    pub in_flight: usize,
    /// Calls at once, by the whole fleet. Absent: no limit.
    pub fleet_in_flight: Option<u32>,
    /// Calls a second, by the whole fleet. Absent: no limit.
    pub per_second: Option<f64>,
    /// Calls that may come at once after a pause. Absent: those of one second.
    pub burst: Option<u32>,
    /// How long a 429's `Retry-After` keeps the whole fleet away, at most. Absent: only the job that met it waits.
    #[serde(with = "humantime_serde")]
    pub hold_max: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { in_flight: 1000, fleet_in_flight: None, per_second: None, burst: None, hold_max: None }
    }
}

/// What a definite failure does to the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// The key keeps standing for the failed job, and replays it.
    #[default]
    Keep,
    /// The next submit replaces it.
    Release,
}

/// Who makes a route's attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Executors {
    /// Gateways, at the route's providers.
    #[default]
    Gateway,
    /// Executors outside, over `/v1/jobs/{id}/attempts`; the route names no provider.
    Outside,
}

/// Where a race begins.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Race {
    /// How long an attempt runs before another may begin.
    pub after: RaceAfter,
    /// For a percentile: what counts until there are enough latencies.
    #[serde(default, with = "humantime_serde")]
    pub after_fallback: Option<Duration>,
    /// How many may be open at once.
    pub max: u32,
}

/// How long an attempt of a race runs before another may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RaceAfter {
    /// Always so long: `"10s"`.
    Fixed(Duration),
    /// As long as that percentile of the provider's latencies on this route: `"p95"`.
    Percentile(u8),
}

impl RaceAfter {
    /// The time, if it is fixed.
    pub fn fixed(self) -> Option<Duration> {
        match self {
            RaceAfter::Fixed(after) => Some(after),
            RaceAfter::Percentile(_) => None,
        }
    }
}

impl fmt::Display for RaceAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RaceAfter::Fixed(after) => humantime::format_duration(*after).fmt(f),
            RaceAfter::Percentile(percentile) => write!(f, "p{percentile}"),
        }
    }
}

impl Serialize for RaceAfter {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RaceAfter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(RaceAfterText)
    }
}

struct RaceAfterText;

impl Visitor<'_> for RaceAfterText {
    type Value = RaceAfter;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a time or a percentile")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<RaceAfter, E> {
        if let Some(percentile) = text.strip_prefix('p').and_then(|digits| digits.parse().ok()) {
            return Ok(RaceAfter::Percentile(percentile));
        }
        let fixed = humantime::parse_duration(text)
            .map_err(|error| E::custom(format!("{error}; it must be a time, as \"10s\", or a percentile, as \"p95\"")));
        fixed.map(RaceAfter::Fixed)
    }
}

/// When providers are asked what became of an unknown attempt.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Reconcile {
    /// From the moment it became unknown to the first question; also the shortest pause between two.
    #[serde(with = "humantime_serde")]
    pub first: Duration,
    /// The longest pause between two questions.
    #[serde(with = "humantime_serde")]
    pub max: Duration,
    /// How long it may stay unknown before a person is called.
    #[serde(with = "humantime_serde")]
    pub give_up: Duration,
}

impl Default for Reconcile {
    fn default() -> Self {
        let policy::Reconcile { first, max, give_up, .. } = policy::Reconcile::default();
        Reconcile { first, max, give_up }
    }
}

/// A route: what kind of job, by which providers, under which rules.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Route {
    /// How many attempts may be open at once.
    pub class: Class,
    /// What an attempt does to the world.
    pub effects: Effects,
    /// Who makes the attempts.
    pub executors: Executors,
    /// The providers, in order of preference.
    pub providers: Vec<String>,
    /// How many attempts may touch a provider.
    pub attempts: u32,
    /// How long a job has, all attempts together.
    #[serde(with = "humantime_serde")]
    pub deadline: Duration,
    /// After which definite failures another attempt may begin: `not_sent`, `rejected:<status>`, `invalid_output`.
    pub failover_on: Vec<FailoverOn>,
    /// Whether failover needs a certificate.
    pub gate: Gate,
    /// For `class = "race"`.
    pub race: Option<Race>,
    /// How long input and result are kept from the end of the job.
    #[serde(with = "humantime_serde")]
    pub retention: Duration,
    /// How long the key stands for the job from its end. Absent: as `retention`.
    #[serde(with = "humantime_serde")]
    pub key_life: Option<Duration>,
    /// How long after becoming unknown "it never happened" is not believed. Absent: the shortest safe time; less is refused.
    #[serde(with = "humantime_serde")]
    pub quarantine: Option<Duration>,
    /// When providers are asked about unknown attempts.
    pub reconcile: Reconcile,
    /// For `effects = "pure"`: how long an attempt may stay unknown before it is abandoned. Absent: for ever.
    #[serde(with = "humantime_serde")]
    pub abandon_after: Option<Duration>,
    /// What a definite failure does to the key.
    pub on_failure: OnFailure,
    /// JSON pointers that do not count in the fingerprint.
    pub fingerprint_ignore: Vec<String>,
    /// The delay before the first repetition at the same provider; doubles, with jitter.
    #[serde(with = "humantime_serde")]
    pub backoff: Duration,
    /// How many further attempts its jobs may begin beside their first ones. Absent: as many as the jobs want.
    pub retry_budget: Option<RetryBudget>,
    /// Request headers that a proxied request passes on, beside content type, content encoding and accept.
    pub forward_headers: Vec<String>,
    /// What providers after the first must have proved before a job fails over to them.
    pub qualify: Option<QualifyEntry>,
    /// What is required of a request before its job is made.
    pub input: Option<InputEntry>,
    /// What is required of an answer before it becomes the job's result.
    pub output: Option<OutputEntry>,
}

impl Default for Route {
    fn default() -> Self {
        Route {
            class: Class::Exclusive,
            effects: Effects::External,
            executors: Executors::Gateway,
            providers: Vec::new(),
            attempts: 3,
            deadline: Duration::from_secs(300),
            failover_on: vec![FailoverOn::NotSent, FailoverOn::Rejected { status: 429 }],
            gate: Gate::Enforce,
            race: None,
            retention: Duration::from_secs(24 * 3600),
            key_life: None,
            quarantine: None,
            reconcile: Reconcile::default(),
            abandon_after: None,
            on_failure: OnFailure::Keep,
            fingerprint_ignore: Vec::new(),
            backoff: Duration::from_millis(200),
            retry_budget: None,
            forward_headers: Vec::new(),
            qualify: None,
            input: None,
            output: None,
        }
    }
}
