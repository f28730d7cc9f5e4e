//! From a checked configuration to the options of each part. Starts nothing but simulated providers.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use onejob::config::{self, Adapter, Config};
use onejob::policy::{Plan, Rate};
use onejob::provider::Provider;
use onejob::provider::async_http::{AsyncHttpOptions, AsyncHttpProvider};
use onejob::provider::http::{HttpOptions, HttpProvider};
use onejob::provider::simulated::{Keys, Simulated, SimulatedOptions};
use onejob::provider::webhook::WebhookOptions;
use onejob::runtime::{Proof, Protection, ProviderProtection, ProviderSlot, Route, RuntimeOptions, SpoolOptions, Suspend};
use onejob::server::{Owners, RenderMetrics, ServerOptions};
use onejob::store::private_redis::Syncs;
use onejob::store::{Durability, Eviction, StoreOptions};

use super::{Exit, Failure, OrExit as _};

pub(super) fn store_options(config: &Config, url: &str) -> StoreOptions {
    let config::Redis { prefix, lanes, pool_max, connect_timeout, response_timeout, durability_timeout, allow_eviction, .. } =
        &config.redis;
    StoreOptions {
        url: url.to_owned(),
        prefix: prefix.clone(),
        lanes: *lanes,
        pool_max: *pool_max,
        connect_timeout: *connect_timeout,
        response_timeout: *response_timeout,
        durability: durability(config),
        durability_timeout: *durability_timeout,
        eviction: if *allow_eviction { Eviction::Allowed } else { Eviction::Refused },
        blob_bytes_min: config.runtime.blob_bytes_min,
        blob_grace: config.runtime.blob_grace,
    }
}

/// What a write must have survived before anybody hears of it.
pub(super) fn durability(config: &Config) -> Durability {
    match config.redis.durability {
        config::Durability::Memory => Durability::Memory,
        config::Durability::Fsync => Durability::Fsync,
        config::Durability::Replicated(replicas) => Durability::Replicated(replicas),
    }
}

/// When a private Redis has its file on disk.
pub(super) fn syncs(config: &Config) -> Syncs {
    match config.redis.durability {
        config::Durability::Memory | config::Durability::Replicated(_) => Syncs::EverySecond,
        config::Durability::Fsync => Syncs::Always,
    }
}

pub(super) fn runtime_options(config: &Config) -> RuntimeOptions {
    RuntimeOptions {
        gateway: host_name(),
        lease: config.runtime.lease,
        lease_margin: config.runtime.lease_margin,
        sweep: config.runtime.sweep,
        jobs_max: config.runtime.jobs_max,
        waiters_max: config.server.waiters_max,
        spool: spool_options(config),
        protection: protection(config),
    }
}

fn protection(config: &Config) -> Protection {
    let provider = |(name, entry): (&String, &config::ProviderEntry)| {
        let limits = &entry.limits;
        // Those of one second, as the handbook says.
        let burst = |per_second: f64| limits.burst.unwrap_or_else(|| per_second.ceil().max(1.0) as u32);
        let rate = limits.per_second.map(|per_second| Rate { per_second, burst: burst(per_second) });
        let rules = ProviderProtection {
            fleet_in_flight: limits.fleet_in_flight,
            rate,
            breaker: entry.breaker.clone(),
            hold_max: limits.hold_max,
        };
        (name.clone(), rules)
    };
    let budget = |(name, route): (&String, &config::Route)| Some((name.clone(), route.retry_budget?));
    Protection {
        providers: config.provider.iter().map(provider).collect(),
        retry_budgets: config.route.iter().filter_map(budget).collect(),
    }
}

fn spool_options(config: &Config) -> Option<SpoolOptions> {
    let dir = config.runtime.spool_dir.clone().unwrap_or_else(|| config.redis.data_dir.join("spool"));
    let bytes_max = config.runtime.spool_bytes_max;
    (bytes_max > 0).then_some(SpoolOptions { dir, bytes_max })
}

pub(super) fn server_options(config: &Config, metrics: RenderMetrics) -> Result<ServerOptions, Failure> {
    let trusted_header = config.server.trusted_owner_header.as_deref();
    let owners = Owners::from_config(&config.owner, trusted_header).or_exit(Exit::Usage)?;
    let forward = |(name, route): (&String, &config::Route)| (name.clone(), route.forward_headers.clone());
    Ok(ServerOptions {
        forward_headers: config.route.iter().map(forward).collect(),
        streams: config.stream.iter().map(|(name, entry)| entry.stream(name)).collect(),
        metrics: Some(metrics),
        ..ServerOptions::from_config(&config.server, owners)
    })
}

pub(super) fn routes(config: &Config) -> Vec<Route> {
    config.route.iter().map(|(name, route)| self::route(config, name, route)).collect()
}

fn route(config: &Config, name: &str, route: &config::Route) -> Route {
    Route {
        name: name.to_owned(),
        class: route.class,
        effects: route.effects,
        providers: route.providers.clone(),
        deadline: Some(route.deadline),
        rules: config.rules(route),
        plan: Plan {
            providers: route.providers.len(),
            attempts_max: route.attempts,
            failover_on: route.failover_on.clone(),
            gate: route.gate,
            backoff: route.backoff,
        },
        fingerprint_ignore: route.fingerprint_ignore.clone(),
        proof: Proof {
            contracts: config
                .qualified(name)
                .map(|of| of.contracts.iter().cloned().map(Arc::new).map(Some).collect())
                .unwrap_or_default(),
            suspend: config.suspend(name).map(|config::SuspendEntry { invalid, of }| Suspend { invalid, of }),
        },
        validator: config.validator(name).cloned(),
        reconcile: route.reconcile(),
        tracked: route.tracked(),
    }
}

/// Builds every provider. One of adapter `simulated` is started here, on a loopback port, and reached over HTTP as any other.
pub(super) async fn providers(config: &Config) -> Result<(Vec<ProviderSlot>, Vec<(String, Simulated)>), Failure> {
    let (mut slots, mut started) = (Vec::new(), Vec::new());
    for (name, entry) in &config.provider {
        let mut options = http_options(config, name, entry);
        match entry.adapter {
            Adapter::Http | Adapter::AsyncHttp => {}
            Adapter::Simulated => {
                let simulated = simulate(config, name, entry).await?;
                options.base_url = simulated.base_url();
                started.push((name.clone(), simulated));
            }
        }
        let provider = adapter(config, name, entry, options)?;
        slots.push(ProviderSlot {
            name: name.clone(),
            provider,
            total: entry.timeouts.total,
            in_flight_max: entry.limits.in_flight,
        });
    }
    Ok((slots, started))
}

fn adapter(
    config: &Config,
    name: &str,
    entry: &config::ProviderEntry,
    options: HttpOptions,
) -> Result<Arc<dyn Provider>, Failure> {
    Ok(if entry.is_asynchronous() {
        let options = AsyncHttpOptions::from_entry(entry, options, webhook_options(config, name, entry));
        Arc::new(AsyncHttpProvider::new(name, options).or_exit(Exit::Usage)?)
    } else {
        Arc::new(HttpProvider::new(name, options).or_exit(Exit::Usage)?)
    })
}

/// Builds one provider that is reached at its own address; `None` if there is none of that name.
pub(super) fn provider(config: &Config, name: &str) -> Result<Option<Arc<dyn Provider>>, Failure> {
    let Some(entry) = config.provider.get(name) else { return Ok(None) };
    if entry.adapter == Adapter::Simulated {
        let what =
            format!("provider {name} is started with each gateway, at an address of its own each time: it cannot be certified");
        return Err(Failure::new(Exit::Usage, what));
    }
    adapter(config, name, entry, http_options(config, name, entry)).map(Some)
}

pub(super) fn http_options(config: &Config, name: &str, entry: &config::ProviderEntry) -> HttpOptions {
    let bearer = config.bearer(name).map(|secret| secret.reveal().to_owned());
    HttpOptions::from_entry(entry, bearer, config.runtime.result_bytes_max)
}

fn webhook_options(config: &Config, name: &str, entry: &config::ProviderEntry) -> Option<WebhookOptions> {
    let (entry, public_url) = (entry.webhook.clone()?, config.server.public_url.as_ref()?);
    let secret = config.webhook_secret(name)?.reveal().to_owned();
    Some(WebhookOptions { public_url: public_url.trim_end_matches('/').to_owned(), secret, entry })
}

async fn simulate(config: &Config, name: &str, entry: &config::ProviderEntry) -> Result<Simulated, Failure> {
    let default = SimulatedOptions::default();
    let options = SimulatedOptions {
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        name: name.to_owned(),
        behaviour: entry.behaviour.clone().unwrap_or(default.behaviour),
        keys: if entry.idempotency.is_some() { Keys::Honoured } else { Keys::Ignored },
        model: default.model,
        webhook_secret: config.webhook_secret(name).map_or(default.webhook_secret, |secret| secret.reveal().to_owned()),
    };
    Simulated::start(options).await.map_err(|error| Failure::new(Exit::Usage, format!("provider.{name}: {error}")))
}

/// This gateway's label. Ownership hangs on tokens: two of one name do no harm.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: String = name.trim().chars().filter(char::is_ascii_graphic).take(64).collect();
    if name.is_empty() { "gateway".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use onejob::config::{Environment, Sources};
    use onejob::job::Class;
    use onejob::policy::{FailoverOn, Gate, Reconcile, Tracked};

    use super::*;

    fn load(settings: &[(&str, &str)]) -> Config {
        let overrides = settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Config::load(Sources { file: None, overrides, environment: Environment::Given(BTreeMap::new()) }).unwrap()
    }

    #[test]
    fn a_route_keeps_every_rule_that_its_configuration_says() {
        let config = load(&[
            ("provider.laser.base_url", "http://127.0.0.1:1"),
            ("provider.inkjet.base_url", "http://127.0.0.1:2"),
            ("provider.laser.timeouts", r#"{ total = "7s" }"#),
            ("route.print.providers", r#"["inkjet", "laser"]"#),
            ("route.print.class", "race"),
            ("route.print.effects", "pure"),
            ("route.print.race", r#"{ after = "2s", max = 2 }"#),
            ("route.print.attempts", "5"),
            ("route.print.deadline", "90s"),
            ("route.print.gate", "off"),
            ("route.print.failover_on", r#"["rejected:503", "invalid_output"]"#),
            ("route.print.backoff", "50ms"),
            ("route.print.retention", "1h"),
            ("route.print.key_life", "2h"),
            ("route.print.on_failure", "release"),
            ("route.print.fingerprint_ignore", r#"["/at"]"#),
            ("route.print.reconcile", r#"{ first = "3s", max = "1m", give_up = "10m" }"#),
            ("route.print.abandon_after", "20m"),
        ]);
        let [route] = <[Route; 1]>::try_from(routes(&config)).unwrap();
        assert_eq!(route.class, Class::Race);
        assert_eq!(route.providers, ["inkjet", "laser"]);
        assert_eq!(route.deadline, Some(Duration::from_secs(90)));
        assert_eq!(route.fingerprint_ignore, ["/at"]);
        let [first, max, give_up, abandon_after] = [3, 60, 600, 1200].map(Duration::from_secs);
        assert_eq!(route.reconcile, Reconcile { first, max, give_up, abandon_after: Some(abandon_after) });
        assert_eq!(route.tracked, None);
        assert_eq!(
            route.plan,
            Plan {
                providers: 2,
                attempts_max: 5,
                failover_on: vec![FailoverOn::Rejected { status: 503 }, FailoverOn::InvalidOutput],
                gate: Gate::Off,
                backoff: Duration::from_millis(50),
            }
        );
        let rules = route.rules;
        assert_eq!((rules.attempts_max, rules.race_max, rules.race_after_ms), (5, 2, 2000));
        assert_eq!((rules.key_life_ms, rules.retention_ms, rules.releases_on_failure), (7_200_000, 3_600_000, true));
        let tracked = load(&[
            ("provider.laser.base_url", "http://127.0.0.1:1"),
            ("route.print.providers", r#"["laser"]"#),
            ("route.print.class", "race"),
            ("route.print.effects", "pure"),
            ("route.print.race", r#"{ after = "p95", after_fallback = "4s", max = 2 }"#),
        ]);
        let [tracked] = <[Route; 1]>::try_from(routes(&tracked)).unwrap();
        assert_eq!(tracked.tracked, Some(Tracked { percentile: 95, fallback: Duration::from_secs(4) }));
        assert_eq!(tracked.rules.race_after_ms, 10, "how early it may be");
        // The pause, the kernel's patience, the slowest provider, the clock's step: 30 s + 20 s + 120 s + 1 s.
        assert_eq!(rules.quarantine_ms, 201_000);
    }
}
