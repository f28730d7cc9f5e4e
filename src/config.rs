//! One schema for everything that can be set, checked once.
//!
//! The only reader of the environment. Sources, later ones win: defaults, the TOML file, `ONEJOB_…` variables, flags. Unknown keys are
//! refused; what is refused names the key, the value and the limit. The whole is documented in `docs/OPERATIONS.md`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::job::Class;

/// The whole configuration.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
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
}

/// Where and how the gateway listens, and what it accepts.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Server {
    /// Where to listen.
    pub listen: SocketAddr,
    /// The header by which a gateway in front names the owner. Whoever can reach the listener can be anybody: bind it accordingly.
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
    pub url: Option<String>,
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
    /// Start although Redis may evict open jobs. Loud.
    pub allow_eviction: bool,
}

impl Default for Redis {
    fn default() -> Self {
        Redis {
            url: None,
            data_dir: PathBuf::from("onejob-data"),
            prefix: "oj".to_owned(),
            lanes: 2,
            pool_max: 16,
            connect_timeout: Duration::from_secs(1),
            response_timeout: Duration::from_millis(500),
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
    /// Our own programmable provider, started with the gateway, over real HTTP.
    Simulated,
}

/// A provider.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProviderEntry {
    /// How it is reached.
    pub adapter: Adapter,
    /// Where. Required for `http`.
    pub base_url: String,
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
    /// Statuses that it swears mean "did nothing".
    pub not_executed: Vec<u16>,
    /// How much at once.
    pub limits: Limits,
    /// A PEM file of the authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// For `simulated`: what it does.
    pub behaviour: Option<String>,
}

impl Default for ProviderEntry {
    fn default() -> Self {
        ProviderEntry {
            adapter: Adapter::Http,
            base_url: String::new(),
            path: "/".to_owned(),
            method: "POST".to_owned(),
            auth: Auth::default(),
            headers: BTreeMap::new(),
            timeouts: Timeouts::default(),
            idempotency: None,
            not_executed: Vec::new(),
            limits: Limits::default(),
            ca_file: None,
            behaviour: None,
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

/// How long each phase of a call may take.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
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
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            connect: Duration::from_secs(2),
            first_byte: Duration::from_secs(30),
            idle: Duration::from_secs(20),
            total: Duration::from_secs(120),
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

/// How much a provider is asked to do at once, by one gateway.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Calls at once.
    pub in_flight: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { in_flight: 1000 }
    }
}

/// Whether failover needs a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// Failover only to a certified provider. There are no certificates yet, so: none.
    #[default]
    Enforce,
    /// Failover to any provider of the route. Somebody decided that they are interchangeable.
    Off,
}

/// What an attempt does to the world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effects {
    /// Nothing but compute its answer: two attempts waste money, no more.
    Pure,
    /// Something that must not happen twice.
    #[default]
    External,
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

/// Where a race begins.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Race {
    /// How long an attempt runs before another may begin.
    #[serde(with = "humantime_serde")]
    pub after: Duration,
    /// How many may be open at once.
    pub max: u32,
}

/// A route: what kind of job, by which providers, under which rules.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Route {
    /// How many attempts may be open at once.
    pub class: Class,
    /// What an attempt does to the world.
    pub effects: Effects,
    /// The providers, in order of preference.
    pub providers: Vec<String>,
    /// How many attempts may touch a provider.
    pub attempts: u32,
    /// How long a job has, all attempts together.
    #[serde(with = "humantime_serde")]
    pub deadline: Duration,
    /// After which definite failures another attempt may begin: `not_sent`, `rejected:<status>`, `invalid_output`.
    pub failover_on: Vec<String>,
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
    /// What a definite failure does to the key.
    pub on_failure: OnFailure,
    /// JSON pointers that do not count in the fingerprint.
    pub fingerprint_ignore: Vec<String>,
    /// The delay before the first repetition at the same provider; doubles, with jitter.
    #[serde(with = "humantime_serde")]
    pub backoff: Duration,
    /// Request headers that a proxied request passes on, beside content type and accept.
    pub forward_headers: Vec<String>,
}

impl Default for Route {
    fn default() -> Self {
        Route {
            class: Class::Exclusive,
            effects: Effects::External,
            providers: Vec::new(),
            attempts: 3,
            deadline: Duration::from_secs(300),
            failover_on: vec!["not_sent".to_owned(), "rejected:429".to_owned()],
            gate: Gate::Enforce,
            race: None,
            retention: Duration::from_secs(24 * 3600),
            key_life: None,
            on_failure: OnFailure::Keep,
            fingerprint_ignore: Vec::new(),
            backoff: Duration::from_millis(200),
            forward_headers: Vec::new(),
        }
    }
}
