//! What the values must be, alone and together. Every check runs, so that one start tells everything that is wrong.
//!
//! Each limit is a named constant with its reason; a problem tells the key, the value and the limit.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue, Uri};

use super::qualify::Qualified;
use super::secret::without_credentials;
use super::sources::{Environment, Read, shorten};
use super::{
    ATTEMPTS_MAX, Adapter, Breaker, Document, Durability, Effects, Executors, Http2, LINGER_MAX, Limits, NAME_BYTES_MAX,
    PROVIDERS_MAX, Problem, ProviderEntry, ROUTES_MAX, RaceAfter, Reconcile, Redis, RetryBudget, Role, Route, Runtime, Secret,
    Server, quarantine_min,
};
use crate::job::{Class, Owner};
use crate::place::Place;
use crate::policy::PERCENTILES;
use crate::validate::Validator;

mod asking;
mod clicks;

/// Longest time of any kind: sums of several still fit every clock, and more is a slip of the pen.
const DURATION_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Shortest time of any kind but where zero has a meaning: records keep whole milliseconds.
pub(super) const DURATION_MIN: Duration = Duration::from_millis(1);
/// Shortest deadline of a route: less does not suffice for one call over a network and its record.
const DEADLINE_MIN: Duration = Duration::from_millis(100);
/// How far two clocks drift apart in a second, at most: twice the 500 ppm by which NTP slews.
const CLOCK_DRIFT_PER_SECOND: Duration = Duration::from_millis(1);
/// The longest time from the last look at the lease clock to the write of the first byte, when the process is not paused.
const CHECK_TO_WRITE: Duration = Duration::from_millis(50);
/// Shortest grace of a blob: it is written before the record that names it, and the record's write may be repeated for a while.
const BLOB_GRACE_MIN: Duration = Duration::from_secs(60);
/// Largest body, and largest answer: Redis' limit for one value.
const BODY_BYTES_MAX: usize = 512 << 20;
/// Largest threshold for blobs: decoding a record costs more than a second key from 8 KiB on, and blocks Redis meanwhile.
const BLOB_THRESHOLD_BYTES_MAX: usize = 1 << 20;
/// Largest spool: what every file system and every counter of ours takes.
const SPOOL_BYTES_MAX: u64 = 1 << 50;
/// Smallest and largest request head. hyper cannot read with a smaller buffer.
const HEAD_BYTES_MIN: usize = 8 << 10;
const HEAD_BYTES_MAX: usize = 1 << 20;
/// Most header lines of a request: hyper keeps a table of that size for each connection.
const HEADERS_MAX: usize = 1000;
/// Most connections, waiters, jobs or calls at once in one process: each costs some KiB.
const AT_ONCE_MAX: usize = 1_000_000;
/// Most calls a second of a provider, and at once after a pause: the fleet asks Redis about each of them.
const PER_SECOND_MAX: f64 = 1_000_000.0;
/// Fewest calls a second: one in a day.
const PER_SECOND_MIN: f64 = 1.0 / 86_400.0;
/// Longest that a breaker is open, looks back or leaves a probe alone, and that a provider may hold the fleet off: what the fleet
/// knows of a provider is forgotten after four times as long.
const PROTECTION_DURATION_MAX: Duration = Duration::from_secs(12 * 3600);
/// Shortest window of a breaker: it is looked at in ten parts, and reports are gathered for a quarter of a second.
const WINDOW_MIN: Duration = Duration::from_secs(1);
/// Most percent of a retry budget: ten further attempts for each first one.
const PERCENT_MAX: u32 = 1000;
/// Most multiplexed connections: Redis runs one script at a time.
const LANES_MAX: usize = 64;
/// Most replicas that a write waits for: a Redis with more does not answer in time.
const REPLICAS_MAX: u32 = 16;
/// Most connections of the pool: Redis' own `maxclients` is 10,000 for all gateways together.
const POOL_MAX: usize = 1024;
/// Longest prefix of keys: it stands in every key.
const PREFIX_BYTES_MAX: usize = 16;
/// Most owners, and most tokens of one: every request is compared with all tokens' table.
const OWNERS_MAX: usize = 10_000;
const TOKENS_MAX: usize = 16;
/// Longest credential: it goes into one header line.
const SECRET_BYTES_MAX: usize = 8 << 10;
/// Most entries of any list of a route or provider.
const LIST_MAX: usize = 64;
/// Headers that frame a message or belong to one connection: never set or passed on by configuration.
const HEADERS_OF_THE_CONNECTION: [&str; 10] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
/// Headers that hold a credential of whoever sends them: never in the file, never passed on.
const HEADERS_OF_CREDENTIALS: [&str; 3] = ["authorization", "cookie", "proxy-authorization"];
/// Headers that onejob itself gives a meaning.
const HEADERS_OF_OURS: [&str; 2] = ["idempotency-key", "traceparent"];

/// What the document names and does not hold itself.
pub(super) struct Resolved {
    /// The credentials, by provider.
    pub(super) bearers: BTreeMap<String, Secret>,
    /// What webhooks are signed with, by provider.
    pub(super) webhook_secrets: BTreeMap<String, Secret>,
    /// What is required of inputs and outputs, by route.
    pub(super) validators: BTreeMap<String, Arc<Validator>>,
    pub(super) qualified: BTreeMap<String, Arc<Qualified>>,
}

/// The credentials that it names, by provider.
#[derive(Default)]
struct Secrets {
    bearers: BTreeMap<String, Secret>,
    webhook_secrets: BTreeMap<String, Secret>,
}

/// Checks the whole document, notes every problem, and resolves what it names.
pub(super) fn check(read: &mut Read, environment: &Environment) -> Resolved {
    for owner in read.document.owner.values_mut() {
        owner.tokens_sha256.iter_mut().for_each(|token| token.make_ascii_lowercase());
    }
    let mut checker = Checker { read, found: Vec::new() };
    checker.server(&checker.read.document.server);
    checker.access(&checker.read.document);
    checker.owners(&checker.read.document);
    checker.redis(&checker.read.document.redis);
    checker.runtime(&checker.read.document);
    let Secrets { bearers, webhook_secrets } = checker.providers(&checker.read.document, environment);
    let (validators, qualified) = checker.routes(&checker.read.document);
    checker.click_streams(&checker.read.document);
    let found = checker.found;
    read.problems.extend(found);
    Resolved { bearers, webhook_secrets, validators, qualified }
}

pub(super) struct Checker<'a> {
    read: &'a Read,
    found: Vec<Problem>,
}

impl Checker<'_> {
    /// Notes a problem, unless the key could not even be read: that has been told.
    pub(super) fn refuse(&mut self, key: &str, value: Option<&dyn Display>, what: impl Into<String>, hint: impl Into<String>) {
        let touches = |told: &Problem| is_within(&told.key, key) || is_within(key, &told.key);
        if self.read.problems.iter().any(touches) {
            return;
        }
        self.found.push(Problem {
            key: key.escape_debug().to_string(),
            value: value.map(|value| shorten(&value.to_string())),
            origin: self.read.origin(key),
            what: what.into(),
            hint: hint.into(),
        });
    }

    /// Whether something at or below the key could not be read.
    fn told_within(&self, key: &str) -> bool {
        self.read.problems.iter().any(|told| is_within(&told.key, key))
    }

    /// Whether something at or below the key was refused, or could not be read.
    pub(super) fn told_of(&self, key: &str) -> bool {
        self.told_within(key) || self.found.iter().any(|told| is_within(&told.key, key))
    }

    pub(super) fn number(&mut self, key: &str, value: usize, min: usize, max: usize) {
        if value < min || value > max {
            self.refuse(key, Some(&value), format!("it must be {min} to {max}"), "choose a number in this range");
        }
    }

    pub(super) fn time(&mut self, key: &str, value: Duration, min: Duration) {
        if value < min || value > DURATION_MAX {
            let what = format!("it must be {} to {}", shown(min), shown(DURATION_MAX));
            self.refuse(key, Some(&shown(value)), what, "choose a time in this range");
        }
    }

    fn count(&mut self, key: &str, length: usize, max: usize) {
        if length > max {
            self.refuse(key, None, format!("there are {length}; the limit is {max}"), "remove some");
        }
    }

    fn repeated<T: Ord + Display>(&mut self, key: &str, values: &[T]) {
        let mut seen = BTreeSet::new();
        if let Some(twice) = values.iter().find(|value| !seen.insert(*value)) {
            self.refuse(key, Some(twice), "it is there twice", "write it once");
        }
    }

    /// A name that becomes a label of metrics and a part of URLs.
    fn name(&mut self, section: &str, name: &str) {
        let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let bytes = name.as_bytes();
        let first = bytes.first().is_some_and(|byte| fits(*byte));
        if !first || bytes.len() > NAME_BYTES_MAX || !bytes.iter().all(|byte| fits(*byte) || matches!(byte, b'_' | b'-')) {
            let what = format!("the name must be 1 to {NAME_BYTES_MAX} of a-z, 0-9, _ and -, and begin with a letter or digit");
            self.refuse(
                &format!("{section}.{}", shorten(name)),
                None,
                what,
                "rename it: it is a label of metrics and a part of URLs",
            );
        }
    }

    fn header_name(&mut self, key: &str, name: &str, refused: &[&[&str]]) {
        match HeaderName::from_bytes(name.as_bytes()) {
            Err(_) => self.refuse(key, Some(&name.escape_debug()), "it is no name of a header", "use letters, digits and -"),
            Ok(header) if refused.iter().any(|names| names.contains(&header.as_str())) => {
                self.refuse(
                    key,
                    Some(&name),
                    "this header has a meaning of its own and cannot be used here",
                    "choose another header",
                );
            }
            Ok(_) => {}
        }
    }

    fn server(&mut self, server: &Server) {
        self.number("server.body_bytes_max", server.body_bytes_max, 1, BODY_BYTES_MAX);
        self.number("server.head_bytes_max", server.head_bytes_max, HEAD_BYTES_MIN, HEAD_BYTES_MAX);
        self.number("server.headers_max", server.headers_max, 1, HEADERS_MAX);
        self.number("server.connections_max", server.connections_max, 1, AT_ONCE_MAX);
        self.number("server.waiters_max", server.waiters_max, 1, AT_ONCE_MAX);
        self.time("server.head_timeout", server.head_timeout, DURATION_MIN);
        self.time("server.body_timeout", server.body_timeout, DURATION_MIN);
        self.time("server.wait_max", server.wait_max, DURATION_MIN);
        self.time("server.proxy_wait", server.proxy_wait, DURATION_MIN);
        if let Some(url) = &server.public_url {
            self.base_url("server.public_url", url);
        }
        if !matches!(server.conflict_status, 409 | 422) {
            self.refuse("server.conflict_status", Some(&server.conflict_status), "it must be 409 or 422", "leave it out for 409");
        }
        self.count("server.cors_origins", server.cors_origins.len(), LIST_MAX);
        self.repeated("server.cors_origins", &server.cors_origins);
        for origin in server.cors_origins.iter().filter(|origin| !is_origin(origin)) {
            self.refuse(
                "server.cors_origins",
                Some(origin),
                "it is no origin",
                "write scheme, host and port alone, as in https://shop.example",
            );
        }
    }

    fn access(&mut self, document: &Document) {
        let server = &document.server;
        if let Some(header) = &server.trusted_owner_header {
            let key = "server.trusted_owner_header";
            let refused = [
                &HEADERS_OF_THE_CONNECTION[..],
                &HEADERS_OF_CREDENTIALS,
                &HEADERS_OF_OURS,
                &["content-type", "accept", "prefer"],
            ];
            self.header_name(key, header, &refused);
        } else if document.owner.is_empty() && !self.told_within("owner") && !is_loopback(server.listen.ip()) {
            let what = "without owners everybody may submit, which is allowed on a loopback address only";
            self.refuse("server.listen", Some(&server.listen), what, "add an [owner.<name>], or listen on 127.0.0.1");
        }
    }

    fn owners(&mut self, document: &Document) {
        self.count("owner", document.owner.len(), OWNERS_MAX);
        let by_header = document.server.trusted_owner_header.is_some();
        let mut holders: BTreeMap<&str, &str> = BTreeMap::new();
        for (name, owner) in &document.owner {
            let key = format!("owner.{}", shorten(&name.escape_debug().to_string()));
            if let Err(error) = Owner::new(name) {
                self.refuse(&key, None, error.to_string(), "rename it");
            }
            let tokens = format!("{key}.tokens_sha256");
            if owner.tokens_sha256.is_empty() && !by_header {
                self.refuse(&tokens, None, "it has no token, so nobody can be this owner", "add one: onejob config token");
            }
            if owner.tokens_sha256.is_empty() && by_header && owner.roles.contains(&Role::Operate) {
                let what = "whom the trusted header names may submit alone; to operate takes a token, sent without that header";
                self.refuse(&tokens, None, what, "add one: onejob config token");
            }
            self.count(&tokens, owner.tokens_sha256.len(), TOKENS_MAX);
            for token in &owner.tokens_sha256 {
                if token.len() != 64 || !token.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                    // It may be the token itself, so it is not repeated.
                    let what = format!("an entry has {} characters and is not 64 hexadecimal digits", token.chars().count());
                    self.refuse(&tokens, None, what, "write the token's SHA-256: onejob config token");
                } else if let Some(holder) = holders.insert(token, name) {
                    let what = format!("a token also stands for the owner {holder}, so it names nobody");
                    self.refuse(&tokens, None, what, "give each owner a token of its own");
                }
            }
            if owner.roles.is_empty() {
                self.refuse(
                    &format!("{key}.roles"),
                    None,
                    "it has no role, so it may do nothing",
                    "leave it out for [\"submit\"]",
                );
            }
        }
    }

    fn redis(&mut self, redis: &Redis) {
        if let Some(url) = &redis.url
            && let Err(what) = Place::of(url.reveal())
        {
            let hint = "as in redis://127.0.0.1:6379, redis+unix:///run/redis.sock, redis+cluster://one:6379,two:6379 \
                        or redis+sentinel://one:26379,two:26379/NAME";
            self.refuse("redis.url", Some(url), what, hint);
        }
        if redis.data_dir.as_os_str().is_empty() {
            self.refuse("redis.data_dir", None, "it is empty", "name a directory");
        }
        let prefix = redis.prefix.as_str();
        let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-');
        if prefix.is_empty() || prefix.len() > PREFIX_BYTES_MAX || !prefix.bytes().all(fits) {
            let what = format!("it must be 1 to {PREFIX_BYTES_MAX} of a-z, 0-9, _ and -");
            self.refuse("redis.prefix", Some(&prefix.escape_debug()), what, "leave it out for oj");
        }
        self.number("redis.lanes", redis.lanes, 1, LANES_MAX);
        self.number("redis.pool_max", redis.pool_max, 1, POOL_MAX);
        if redis.pool_max <= redis.lanes {
            let what = format!("the lanes are taken from the pool, and there are {}", redis.lanes);
            self.refuse("redis.pool_max", Some(&redis.pool_max), what, format!("set {} or more", redis.lanes.saturating_add(1)));
        }
        self.time("redis.connect_timeout", redis.connect_timeout, DURATION_MIN);
        self.time("redis.response_timeout", redis.response_timeout, DURATION_MIN);
        self.time("redis.durability_timeout", redis.durability_timeout, DURATION_MIN);
        if let Durability::Replicated(replicas) = redis.durability {
            const KEY: &str = "redis.durability";
            let shown = format!("{{ replicated = {replicas} }}");
            if !(1..=REPLICAS_MAX).contains(&replicas) {
                let what = format!("it must be 1 to {REPLICAS_MAX} replicas");
                self.refuse(KEY, Some(&shown), what, "write \"memory\" to wait for none");
            } else if redis.url.is_none() {
                let what = "a private Redis has no replica";
                self.refuse(KEY, Some(&shown), what, "set redis.url to one that has, or \"fsync\"");
            }
        }
    }

    /// A beginning is sent only once it is durable, and only while its lease lasts. It waits at most for the batch before it, for its
    /// own, and for their replies.
    fn durability(&mut self, redis: &Redis, lease: Duration, margin: Duration) {
        let takes = redis.durability_timeout.saturating_add(redis.response_timeout.mul_f64(1.5)).saturating_mul(2);
        let takes = takes.saturating_add(redis.connect_timeout);
        let left = lease.saturating_sub(margin);
        if redis.durability != Durability::Memory && takes >= left {
            let what = format!(
                "with redis.response_timeout and redis.connect_timeout a write may take {} to be durable, and runtime.lease without \
                 its margin is {}: nothing could be sent any more",
                shown(takes),
                shown(left)
            );
            self.refuse(
                "redis.durability_timeout",
                Some(&shown(redis.durability_timeout)),
                what,
                "set less, or a longer runtime.lease",
            );
        }
    }

    fn runtime(&mut self, document: &Document) {
        let Runtime { lease, lease_margin, sweep, drain, jobs_max, pause_max, clock_step_max, .. } = document.runtime;
        self.time("runtime.lease", lease, DURATION_MIN);
        self.durability(&document.redis, lease, lease_margin);
        let renewal = lease / 3;
        if document.redis.response_timeout > renewal {
            let what = format!(
                "it is renewed at a third, {}, and one renewal may wait for redis.response_timeout, {}",
                shown(renewal),
                shown(document.redis.response_timeout)
            );
            let hint = format!("set {} or more", shown(document.redis.response_timeout.saturating_mul(3)));
            self.refuse("runtime.lease", Some(&shown(lease)), what, hint);
        }
        let margin_min = CLOCK_DRIFT_PER_SECOND.mul_f64(lease.min(DURATION_MAX).as_secs_f64()) + CHECK_TO_WRITE;
        if lease_margin < margin_min || lease_margin >= lease / 2 {
            let what = format!(
                "it must be {} (the clocks' drift over a lease, and the time from the check to the write) or more, \
                 and less than half of runtime.lease, {}",
                shown(margin_min),
                shown(lease / 2)
            );
            self.refuse("runtime.lease_margin", Some(&shown(lease_margin)), what, "a fifth of the lease is a good margin");
        }
        self.time("runtime.sweep", sweep, DURATION_MIN);
        self.time("runtime.drain", drain, Duration::ZERO);
        self.time("runtime.pause_max", pause_max, DURATION_MIN);
        self.time("runtime.clock_step_max", clock_step_max, Duration::ZERO);
        let blob_grace = document.runtime.blob_grace;
        self.time("runtime.blob_grace", blob_grace, BLOB_GRACE_MIN);
        // Whoever finds a job whose gateway died right after its claim finds it a lease later.
        let grace_min = lease.saturating_mul(2).saturating_add(sweep);
        if blob_grace >= BLOB_GRACE_MIN && blob_grace < grace_min {
            let what = "the input of a job whose gateway died would be gone before another one looks at it";
            let hint = format!("set {} (twice runtime.lease, and runtime.sweep) or more", shown(grace_min));
            self.refuse("runtime.blob_grace", Some(&shown(blob_grace)), what.to_owned(), hint);
        }
        self.number("runtime.jobs_max", jobs_max, 1, AT_ONCE_MAX);
        self.number("runtime.result_bytes_max", document.runtime.result_bytes_max, 1, BODY_BYTES_MAX);
        self.spool(&document.runtime);
        self.number("runtime.blob_bytes_min", document.runtime.blob_bytes_min, 1, BLOB_THRESHOLD_BYTES_MAX);
    }

    fn spool(&mut self, runtime: &Runtime) {
        let (bytes_max, key) = (runtime.spool_bytes_max, "runtime.spool_bytes_max");
        let result_bytes_max = runtime.result_bytes_max as u64;
        if bytes_max > SPOOL_BYTES_MAX {
            self.refuse(key, Some(&bytes_max), format!("it must be at most {SPOOL_BYTES_MAX}"), "choose a smaller number");
        } else if bytes_max > 0 && bytes_max < result_bytes_max {
            let what = format!("the largest result, runtime.result_bytes_max = {result_bytes_max}, would not fit");
            self.refuse(key, Some(&bytes_max), what, "choose a larger number, or 0 for no spool");
        }
        if runtime.spool_dir.as_ref().is_some_and(|dir| dir.as_os_str().is_empty()) {
            self.refuse("runtime.spool_dir", Some(&"\"\""), "it must not be empty", "leave it out for spool in redis.data_dir");
        }
    }

    fn providers(&mut self, document: &Document, environment: &Environment) -> Secrets {
        let providers = &document.provider;
        self.count("provider", providers.len(), PROVIDERS_MAX);
        let mut secrets = Secrets::default();
        for (name, provider) in providers {
            let key = format!("provider.{name}");
            self.name("provider", name);
            self.provider(&key, provider);
            self.asking(&key, provider);
            if let Some(bearer) = self.bearer(&format!("{key}.auth"), provider, environment) {
                secrets.bearers.insert(name.clone(), bearer);
            }
            let public_url = document.server.public_url.as_deref();
            if let Some(secret) = self.webhook(&format!("{key}.webhook"), provider, public_url, environment) {
                secrets.webhook_secrets.insert(name.clone(), secret);
            }
        }
        secrets
    }

    fn provider(&mut self, key: &str, provider: &ProviderEntry) {
        match provider.adapter {
            Adapter::Http | Adapter::AsyncHttp => {
                self.base_url(&format!("{key}.base_url"), &provider.base_url);
                if let Some(behaviour) = &provider.behaviour {
                    self.refuse(&format!("{key}.behaviour"), Some(behaviour), "only a simulated provider has one", "remove it");
                }
            }
            Adapter::Simulated => {
                if !provider.base_url.is_empty() {
                    let shown = without_credentials(&provider.base_url);
                    self.refuse(
                        &format!("{key}.base_url"),
                        Some(&shown),
                        "a simulated provider has an address of its own",
                        "remove it",
                    );
                }
            }
        }
        let path_fits =
            provider.path.starts_with('/') && provider.path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
        if !path_fits {
            let what = "it must begin with / and have visible ASCII alone";
            self.refuse(&format!("{key}.path"), Some(&provider.path.escape_debug()), what, "percent-encode the rest");
        }
        let method = provider.method.as_str();
        if method.is_empty() || !method.bytes().all(|byte| byte.is_ascii_uppercase()) || method == "CONNECT" {
            self.refuse(
                &format!("{key}.method"),
                Some(&method.escape_debug()),
                "it is no method in capital letters",
                "as in POST",
            );
        }
        self.headers(&format!("{key}.headers"), provider);
        self.timeouts(&format!("{key}.timeouts"), provider);
        if let Some(idempotency) = &provider.idempotency {
            let refused = [&HEADERS_OF_THE_CONNECTION[..], &HEADERS_OF_CREDENTIALS, &["traceparent", "content-type"]];
            self.header_name(&format!("{key}.idempotency.header"), &idempotency.header, &refused);
            self.time(&format!("{key}.idempotency.ttl"), idempotency.ttl, DURATION_MIN);
        }
        let not_executed = format!("{key}.not_executed");
        self.repeated(&not_executed, &provider.not_executed);
        for status in provider.not_executed.iter().filter(|status| !(400..=599).contains(*status)) {
            self.refuse(&not_executed, Some(status), "only statuses from 400 to 599 can mean that nothing was done", "remove it");
        }
        if let Some(pointer) = &provider.cost {
            self.body_pointer(&format!("{key}.cost"), pointer, "as in /usage/total_tokens");
        }
        self.limits(&format!("{key}.limits"), &provider.limits);
        if let Some(breaker) = &provider.breaker {
            self.breaker(&format!("{key}.breaker"), breaker);
        }
        self.stream(&format!("{key}.stream"), provider);
        let secure = provider.base_url.get(..8).is_some_and(|scheme| scheme.eq_ignore_ascii_case("https://"));
        if provider.http2 == Http2::Alpn && !secure {
            let what = "the protocol is agreed on in a TLS handshake, and base_url is not https://";
            let hint = "write prior_knowledge if it speaks HTTP/2 from the first byte, or leave it out";
            self.refuse(&format!("{key}.http2"), Some(&"alpn"), what, hint);
        }
        if let Some(file) = &provider.ca_file
            && let Err(error) = std::fs::File::open(file)
        {
            self.refuse(
                &format!("{key}.ca_file"),
                Some(&file.display()),
                format!("it cannot be read: {error}"),
                "name a PEM file",
            );
        }
    }

    fn limits(&mut self, key: &str, limits: &Limits) {
        self.number(&format!("{key}.in_flight"), limits.in_flight, 1, AT_ONCE_MAX);
        if let Some(fleet) = limits.fleet_in_flight {
            self.number(&format!("{key}.fleet_in_flight"), fleet as usize, 1, AT_ONCE_MAX);
        }
        if let Some(rate) = limits.per_second
            && !(PER_SECOND_MIN..=PER_SECOND_MAX).contains(&rate)
        {
            let what = format!("it must be {PER_SECOND_MIN:.7} (one a day) to {PER_SECOND_MAX}");
            self.refuse(&format!("{key}.per_second"), Some(&rate), what, "leave it out for no limit");
        }
        if let Some(burst) = limits.burst {
            let key = format!("{key}.burst");
            self.number(&key, burst as usize, 1, AT_ONCE_MAX);
            if limits.per_second.is_none() {
                self.refuse(&key, Some(&burst), "it belongs to per_second, which is not set", "set per_second, or remove it");
            }
        }
        if let Some(hold) = limits.hold_max {
            self.protection_time(&format!("{key}.hold_max"), hold, DURATION_MIN);
        }
    }

    fn breaker(&mut self, key: &str, breaker: &Breaker) {
        if !(0.0..=1.0).contains(&breaker.ratio) {
            let what = "it must be 0 (no share opens it) to 1";
            self.refuse(&format!("{key}.ratio"), Some(&breaker.ratio), what, "as in 0.5");
        }
        if breaker.consecutive == 0 && breaker.ratio == 0.0 {
            let what = "neither consecutive nor ratio ever opens it";
            self.refuse(key, None, what, "set one of them, or remove the breaker");
        }
        self.number(&format!("{key}.consecutive"), breaker.consecutive as usize, 0, AT_ONCE_MAX);
        self.number(&format!("{key}.min_calls"), breaker.min_calls as usize, 1, AT_ONCE_MAX);
        self.protection_time(&format!("{key}.window"), breaker.window, WINDOW_MIN);
        self.protection_time(&format!("{key}.open"), breaker.open, DURATION_MIN);
        self.protection_time(&format!("{key}.open_max"), breaker.open_max, DURATION_MIN);
        if breaker.open_max < breaker.open {
            let what = format!("it must be open, {}, or more", shown(breaker.open));
            self.refuse(&format!("{key}.open_max"), Some(&shown(breaker.open_max)), what, "lengthen it, or shorten open");
        }
        if let Some(lease) = breaker.probe_lease {
            self.protection_time(&format!("{key}.probe_lease"), lease, DURATION_MIN);
        }
        let statuses = format!("{key}.statuses");
        self.count(&statuses, breaker.statuses.len(), LIST_MAX);
        self.repeated(&statuses, &breaker.statuses);
        for status in breaker.statuses.iter().filter(|status| !(400..=599).contains(*status)) {
            self.refuse(&statuses, Some(status), "only refusals, 400 to 599, can count as failures", "remove it");
        }
    }

    fn protection_time(&mut self, key: &str, value: Duration, min: Duration) {
        if value < min || value > PROTECTION_DURATION_MAX {
            let what = format!("it must be {} to {}", shown(min), shown(PROTECTION_DURATION_MAX));
            self.refuse(key, Some(&shown(value)), what, "choose a time in this range");
        }
    }

    fn retry_budget(&mut self, key: &str, budget: RetryBudget) {
        self.number(&format!("{key}.percent"), budget.percent as usize, 0, PERCENT_MAX as usize);
        self.number(&format!("{key}.min_per_second"), budget.min_per_second as usize, 0, AT_ONCE_MAX);
    }

    fn base_url(&mut self, key: &str, url: &str) {
        let shown = without_credentials(url);
        if url.is_empty() {
            return self.refuse(key, None, "it is missing, and an adapter over HTTP needs one", "as in https://laser.example/v1");
        }
        let uri = match url.parse::<Uri>() {
            Ok(uri) if matches!(uri.scheme_str(), Some("http" | "https")) => uri,
            Ok(_) | Err(_) => {
                return self.refuse(key, Some(&shown), "it is no http:// or https:// URL", "as in https://laser.example/v1");
            }
        };
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        if authority.contains('@') {
            return self.refuse(key, Some(&shown), "it holds a credential", "remove it and use auth = { bearer_env = \"…\" }");
        }
        if uri.host().is_none_or(str::is_empty) {
            return self.refuse(key, Some(&shown), "it names no host", "as in https://laser.example/v1");
        }
        if url.contains(['?', '#']) {
            self.refuse(key, Some(&shown), "it has a query or a fragment, and paths are appended to it", "end it with the path");
        }
    }

    fn headers(&mut self, key: &str, provider: &ProviderEntry) {
        self.count(key, provider.headers.len(), LIST_MAX);
        let mut seen = BTreeSet::new();
        for (name, value) in &provider.headers {
            let key = format!("{key}.{}", shorten(name));
            let lower = name.to_ascii_lowercase();
            if HEADERS_OF_CREDENTIALS.contains(&lower.as_str()) {
                self.refuse(
                    &key,
                    None,
                    "a credential must not be in the file",
                    "use auth = { bearer_env = \"…\" } or bearer_file",
                );
            } else {
                self.header_name(&key, name, &[&HEADERS_OF_THE_CONNECTION, &HEADERS_OF_OURS]);
            }
            if !value.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) || HeaderValue::from_str(value).is_err() {
                self.refuse(&key, None, "the value is not visible ASCII", "remove what is not");
            }
            if !seen.insert(lower) {
                self.refuse(&key, None, "the header is there twice, in other letters", "write it once");
            }
        }
    }

    fn stream(&mut self, key: &str, provider: &ProviderEntry) {
        let super::Stream { end, error } = &provider.stream;
        let key_of_end = format!("{key}.end");
        self.count(&key_of_end, end.len(), LIST_MAX);
        self.count(&format!("{key}.error"), error.len(), LIST_MAX);
        if end.is_empty() {
            self.refuse(&key_of_end, None, "it is empty, so no stream would ever be whole", "name the marker, or \"eof\"");
        }
        if end.len() > 1 && end.contains(&super::StreamEnd::Eof) {
            self.refuse(&key_of_end, Some(&"eof"), "beside eof no marker would be asked for", "keep one of them");
        }
    }

    fn timeouts(&mut self, key: &str, provider: &ProviderEntry) {
        let timeouts = provider.timeouts;
        self.time(&format!("{key}.total"), timeouts.total, DURATION_MIN);
        for (phase, value) in [("connect", timeouts.connect), ("first_byte", timeouts.first_byte), ("idle", timeouts.idle)] {
            let key = format!("{key}.{phase}");
            self.time(&key, value, DURATION_MIN);
            if value > timeouts.total {
                let what = format!("it is longer than the whole call may take, total = {}", shown(timeouts.total));
                self.refuse(&key, Some(&shown(value)), what, "shorten it, or lengthen total");
            }
        }
        if timeouts.linger > LINGER_MAX {
            let what = format!("it is longer than {}, the limit", shown(LINGER_MAX));
            self.refuse(&format!("{key}.linger"), Some(&shown(timeouts.linger)), what, "shorten it; 0s listens for nothing");
        }
    }

    /// Resolves a credential. The error names the variable or the file, never what is in it.
    fn bearer(&mut self, key: &str, provider: &ProviderEntry, environment: &Environment) -> Option<Secret> {
        let (key, from, found) = match (&provider.auth.bearer_env, &provider.auth.bearer_file) {
            (None, None) => return None,
            (Some(_), Some(_)) => {
                self.refuse(key, None, "bearer_env and bearer_file are both set", "keep one of them");
                return None;
            }
            (Some(variable), None) => {
                let found = environment.get(variable).ok_or_else(|| "it is not set".to_owned());
                (format!("{key}.bearer_env"), format!("the variable {}", variable.escape_debug()), found)
            }
            (None, Some(file)) => (format!("{key}.bearer_file"), format!("the file {}", file.display()), read_secret(file)),
        };
        let refused = match found {
            Ok(text) if text.is_empty() => "it is empty".to_owned(),
            Ok(text) if text.len() > SECRET_BYTES_MAX => format!("it has {} bytes; the limit is {SECRET_BYTES_MAX}", text.len()),
            Ok(text) if !text.bytes().all(|byte| byte.is_ascii_graphic()) => "it holds more than visible ASCII".to_owned(),
            Ok(text) => return Some(Secret::new(text)),
            Err(why) => why,
        };
        self.refuse(
            &key,
            None,
            format!("no bearer token can be taken from {from}: {refused}"),
            "put the token there, and nothing else",
        );
        None
    }

    fn routes(&mut self, document: &Document) -> (BTreeMap<String, Arc<Validator>>, BTreeMap<String, Arc<Qualified>>) {
        self.count("route", document.route.len(), ROUTES_MAX);
        let (mut validators, mut qualified) = (BTreeMap::new(), BTreeMap::new());
        for (name, route) in &document.route {
            let key = format!("route.{name}");
            self.name("route", name);
            self.route_providers(&format!("{key}.providers"), route, document);
            let attempts = usize::try_from(route.attempts).unwrap_or(usize::MAX);
            self.number(&format!("{key}.attempts"), attempts, 1, ATTEMPTS_MAX as usize);
            self.time(&format!("{key}.deadline"), route.deadline, DEADLINE_MIN);
            self.repeated(&format!("{key}.failover_on"), &route.failover_on);
            self.race(&key, route);
            self.lives(&key, route);
            self.quarantine(&format!("{key}.quarantine"), route, document);
            self.reconcile(&key, route);
            self.time(&format!("{key}.backoff"), route.backoff, DURATION_MIN);
            self.pointers(&format!("{key}.fingerprint_ignore"), &route.fingerprint_ignore);
            if let Some(budget) = route.retry_budget {
                self.retry_budget(&format!("{key}.retry_budget"), budget);
            }
            let forward = format!("{key}.forward_headers");
            self.count(&forward, route.forward_headers.len(), LIST_MAX);
            self.repeated(&forward, &route.forward_headers.iter().map(|name| name.to_ascii_lowercase()).collect::<Vec<_>>());
            for header in &route.forward_headers {
                self.header_name(&forward, header, &[&HEADERS_OF_THE_CONNECTION, &HEADERS_OF_CREDENTIALS, &HEADERS_OF_OURS]);
            }
            let validator = self.required(&key, route);
            if let Some(of_route) = self.qualified(&key, (name, route), document, validator.as_ref()) {
                qualified.insert(name.clone(), Arc::new(of_route));
            }
            if let Some(validator) = validator {
                validators.insert(name.clone(), Arc::new(validator));
            }
        }
        (validators, qualified)
    }

    fn route_providers(&mut self, key: &str, route: &Route, document: &Document) {
        match (route.executors, route.providers.is_empty()) {
            (Executors::Gateway, true) => {
                let hint = "name one or more, in order of preference; or set executors = \"outside\"";
                self.refuse(key, None, "it names no provider", hint);
            }
            (Executors::Outside, false) => {
                let problem = "executors outside make the attempts of this route";
                self.refuse(key, None, problem, "leave the providers out, or executors");
            }
            (Executors::Gateway, false) | (Executors::Outside, true) => {}
        }
        self.count(key, route.providers.len(), LIST_MAX);
        self.repeated(key, &route.providers);
        for name in route.providers.iter().filter(|name| !document.provider.contains_key(*name)) {
            let known: Vec<_> = document.provider.keys().map(String::as_str).take(10).collect();
            let hint = if known.is_empty() {
                "there is no [provider.…] yet".to_owned()
            } else {
                format!("known are {}", known.join(", "))
            };
            if !self.told_within(&format!("provider.{name}")) {
                self.refuse(key, Some(&name.escape_debug()), "there is no such provider", hint);
            }
        }
    }

    fn race(&mut self, key: &str, route: &Route) {
        let Some(race) = route.race else {
            if route.class == Class::Race {
                self.refuse(
                    &format!("{key}.race"),
                    None,
                    "class = \"race\" needs it",
                    "as in race = { after = \"10s\", max = 2 }",
                );
            }
            return;
        };
        let (after, max) = (format!("{key}.race.after"), format!("{key}.race.max"));
        if route.class == Class::Exclusive {
            let what = "class = \"exclusive\" has one open attempt at a time and cannot race";
            return self.refuse(&format!("{key}.race"), None, what, "remove it, or set class = \"race\"");
        }
        if route.effects != Effects::Pure {
            let what = "class = \"race\" may do the work more than once and needs effects = \"pure\"";
            self.refuse(
                &format!("{key}.effects"),
                Some(&"external"),
                what,
                "set class = \"exclusive\", or effects = \"pure\" if that is true",
            );
        }
        let (fallback, deadline) = (format!("{key}.race.after_fallback"), route.deadline);
        match (race.after, race.after_fallback) {
            (RaceAfter::Fixed(fixed), None) => self.race_after(&after, fixed, deadline),
            (RaceAfter::Fixed(_), Some(set)) => {
                self.refuse(&fallback, Some(&shown(set)), "race.after is fixed and needs none", "remove it");
            }
            (RaceAfter::Percentile(percentile), set) => {
                if !PERCENTILES.contains(&percentile) {
                    let (min, max) = PERCENTILES.into_inner();
                    let what = format!("a percentile must be p{min} to p{max}");
                    self.refuse(&after, Some(&race.after), what, "as in p95");
                }
                match set {
                    Some(set) => self.race_after(&fallback, set, deadline),
                    None => {
                        let what = "a percentile needs a time for as long as there are too few latencies";
                        self.refuse(&fallback, None, what, "as in race = { after = \"p95\", after_fallback = \"10s\", max = 2 }");
                    }
                }
            }
        }
        if race.max < 2 || race.max > route.attempts {
            let what = format!("it must be 2 or more, and at most attempts, {}", route.attempts);
            self.refuse(&max, Some(&race.max), what, "two are a race");
        }
    }

    fn race_after(&mut self, key: &str, after: Duration, deadline: Duration) {
        self.time(key, after, DURATION_MIN);
        if after >= deadline {
            let what = format!("the second attempt would begin after the deadline, {}", shown(deadline));
            self.refuse(key, Some(&shown(after)), what, "shorten it");
        }
    }

    fn reconcile(&mut self, key: &str, route: &Route) {
        let Reconcile { first, max, give_up } = route.reconcile;
        let within = format!("{key}.reconcile");
        self.time(&format!("{within}.first"), first, DURATION_MIN);
        self.time(&format!("{within}.max"), max, DURATION_MIN);
        self.time(&format!("{within}.give_up"), give_up, DURATION_MIN);
        if max < first {
            let what = format!("the longest pause is shorter than the shortest, first = {}", shown(first));
            self.refuse(&format!("{within}.max"), Some(&shown(max)), what, "lengthen it, or shorten first");
        }
        if give_up < first {
            let what = format!("a person would be called before anything was asked, first = {}", shown(first));
            self.refuse(&format!("{within}.give_up"), Some(&shown(give_up)), what, "lengthen it, or shorten first");
        }
        let Some(abandon_after) = route.abandon_after else { return };
        let key = format!("{key}.abandon_after");
        self.time(&key, abandon_after, DURATION_MIN);
        if route.effects != Effects::Pure {
            let what = "what may have happened to the world is abandoned by a person alone; it needs effects = \"pure\"";
            self.refuse(&key, Some(&shown(abandon_after)), what, "remove it, or set effects = \"pure\" if that is true");
        }
    }

    fn lives(&mut self, key: &str, route: &Route) {
        self.time(&format!("{key}.retention"), route.retention, DURATION_MIN);
        if let Some(key_life) = route.key_life {
            let key = format!("{key}.key_life");
            self.time(&key, key_life, DURATION_MIN);
            if key_life < route.retention {
                let what = format!("the key must stand as long as the result is kept, retention = {}", shown(route.retention));
                self.refuse(&key, Some(&shown(key_life)), what, "lengthen it, or shorten retention");
            }
        }
    }

    fn quarantine(&mut self, key: &str, route: &Route, document: &Document) {
        let Some(quarantine) = route.quarantine else { return };
        self.time(key, quarantine, DURATION_MIN);
        let min = quarantine_min(&document.runtime, &document.provider, route);
        if quarantine < min {
            let what = format!(
                "a paused gateway may still send for {} (runtime.pause_max, the TCP user timeout, the longest total timeout \
                 of its providers and runtime.clock_step_max together)",
                shown(min)
            );
            self.refuse(key, Some(&shown(quarantine)), what, format!("leave it out for {}, or set more", shown(min)));
        }
    }

    fn pointers(&mut self, key: &str, pointers: &[String]) {
        self.count(key, pointers.len(), LIST_MAX);
        self.repeated(key, pointers);
        for pointer in pointers {
            self.body_pointer(key, pointer, "as in /client/clicked_at");
        }
    }

    fn body_pointer(&mut self, key: &str, pointer: &str, hint: &str) {
        if !is_pointer(pointer) {
            let what = "it is no JSON pointer to a part of the body (RFC 6901)";
            self.refuse(key, Some(&pointer.escape_debug()), what, hint);
        }
    }
}

/// Whether a text is a JSON pointer to a part of a document (RFC 6901).
pub(super) fn is_pointer(pointer: &str) -> bool {
    pointer.starts_with('/') && pointer.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']))
}

fn is_within(inner: &str, outer: &str) -> bool {
    inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn shown(duration: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(duration)
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

fn is_origin(origin: &str) -> bool {
    let Ok(uri) = origin.parse::<Uri>() else { return false };
    let Some(authority) = uri.authority() else { return false };
    matches!(uri.scheme_str(), Some("http" | "https"))
        && !authority.as_str().contains('@')
        && !authority.host().is_empty()
        && origin == format!("{}://{authority}", uri.scheme_str().unwrap_or_default())
}

fn read_secret(file: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}
