//! Everything that a gateway consists of, started in order and stopped in reverse.

use std::net::SocketAddr;
use std::time::Duration;

use onejob::config::Config;
use onejob::provider::http::{HttpOptions, HttpProvider};
use onejob::provider::simulated::Simulated;
use onejob::runtime::{Drained, Proof, ProviderSlot, Route, Runtime};
use onejob::server;
use onejob::store::Store;
use onejob::store::private_redis::{PrivateRedis, PrivateRedisOptions};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::renewal::Renewals;
use super::{Exit, Failure, OrExit as _, assemble};

/// How long the keys of a qualification outlive their jobs.
const QUALIFY_LIFE_MS: u64 = 60_000;

/// A running gateway.
pub(super) struct Gateway {
    pub(super) addr: SocketAddr,
    /// What the check of Redis could not make sure of.
    pub(super) warnings: Vec<String>,
    /// The providers that were started with it.
    pub(super) simulated: Vec<(String, Simulated)>,
    runtime: Runtime,
    private_redis: Option<PrivateRedis>,
    renewals: Option<Renewals>,
    serving: JoinHandle<()>,
    stop: CancellationToken,
}

impl Gateway {
    /// Starts it; returns when it accepts connections.
    pub(super) async fn start(config: &Config) -> Result<Self, Failure> {
        let private_redis = match &config.redis.url {
            Some(_) => None,
            None => {
                let (data_dir, server) = (config.redis.data_dir.clone(), config.redis.server.clone());
                let options = PrivateRedisOptions { data_dir, server, syncs: assemble::syncs(config) };
                Some(PrivateRedis::start(options).await.or_exit(Exit::Unavailable)?)
            }
        };
        match Self::start_over(config, private_redis.as_ref()).await {
            Ok(parts) => {
                let Parts { addr, warnings, simulated, runtime, serving, stop } = parts;
                let renewals = Renewals::start(config, runtime.store());
                Ok(Gateway { addr, warnings, simulated, runtime, private_redis, renewals, serving, stop })
            }
            Err(failure) => {
                if let Some(private_redis) = private_redis {
                    private_redis.stop().await;
                }
                Err(failure)
            }
        }
    }

    async fn start_over(config: &Config, private_redis: Option<&PrivateRedis>) -> Result<Parts, Failure> {
        let url = match (&config.redis.url, private_redis) {
            (_, Some(private_redis)) => private_redis.url(),
            (Some(url), None) => url.reveal(),
            (None, None) => return Err(Failure::new(Exit::Internal, "there is no redis, neither ours nor another")),
        };
        // First: what is counted before there is a recorder is lost.
        let options = assemble::server_options(config, server::metrics_recorder().or_exit(Exit::Internal)?)?;
        let (store, checked) = Store::connect(assemble::store_options(config, url)).await.or_exit(Exit::Unavailable)?;
        let (slots, simulated) = assemble::providers(config).await?;
        let runtime =
            Runtime::start(store, assemble::runtime_options(config), slots, assemble::routes(config)).or_exit(Exit::Usage)?;
        let bound = match server::Gateway::bind(options, runtime.clone()) {
            Ok(bound) => bound,
            Err(error) => {
                runtime.shutdown(Duration::ZERO).await;
                let message = format!("cannot listen on {}: {error}", config.server.listen);
                return Err(Failure::new(Exit::Unavailable, message));
            }
        };
        let addr = bound.addr();
        let stop = CancellationToken::new();
        let serving = tokio::spawn(bound.serve(stop.clone()));
        Ok(Parts { addr, warnings: checked.warnings, simulated, runtime, serving, stop })
    }

    /// Its label with this start's nonce, as records and answers name it.
    pub(super) fn name(&self) -> &str {
        self.runtime.gateway()
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Waits until it no longer serves, which it does only if something broke.
    pub(super) async fn broken(&mut self) -> String {
        match (&mut self.serving).await {
            Ok(()) => "it stopped serving".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    /// Stops it: nothing new is accepted, running attempts have `drain` to finish, the rest becomes unknown; Redis goes last.
    pub(super) async fn stop(self, drain: Duration) -> Drained {
        let Gateway { simulated, runtime, private_redis, renewals, serving, stop, .. } = self;
        stop.cancel();
        if let Some(renewals) = renewals {
            renewals.stop().await;
        }
        // It has deadlines of its own.
        if !serving.is_finished()
            && let Err(error) = serving.await
        {
            tracing::error!(%error, "the server ended badly");
        }
        let drained = runtime.shutdown(drain).await;
        runtime.store().close().await;
        for (_, simulated) in simulated {
            simulated.shutdown().await;
        }
        if let Some(private_redis) = private_redis {
            private_redis.stop().await;
        }
        drained
    }
}

struct Parts {
    addr: SocketAddr,
    warnings: Vec<String>,
    simulated: Vec<(String, Simulated)>,
    runtime: Runtime,
    serving: JoinHandle<()>,
    stop: CancellationToken,
}

/// A gateway in front of one provider, for the time of a qualification: what is proved is the whole way.
pub(super) struct Through {
    /// The gateway, as a client sees it.
    pub(super) provider: HttpProvider,
    runtime: Runtime,
    serving: JoinHandle<()>,
    stop: CancellationToken,
}

impl Through {
    /// Starts one over the configured Redis, under a prefix of its own.
    pub(super) async fn start(config: &Config, route: &str, provider: &str) -> Result<Self, Failure> {
        let Some(url) = &config.redis.url else { return Err(Failure::new(Exit::Usage, "redis.url is not set")) };
        let mut options = assemble::store_options(config, url.reveal());
        // Inside the configured one, so that whoever may use that may use this. The prefixes of a configuration have no colon.
        options.prefix.push_str(":qualify");
        let (store, _) = Store::connect(options).await.or_exit(Exit::Unavailable)?;
        let Some(of_route) = assemble::routes(config).into_iter().find(|one| one.name == route) else {
            return Err(Failure::new(Exit::Usage, format!("there is no route {route:?}")));
        };
        // What the route asks of requests and answers is asked as ever: what is proved is what a gateway does.
        let mut of_route = Route { providers: vec![provider.to_owned()], proof: Proof::default(), ..of_route };
        of_route.plan.providers = 1;
        (of_route.rules.key_life_ms, of_route.rules.retention_ms) = (QUALIFY_LIFE_MS, QUALIFY_LIFE_MS);
        let Some(adapter) = assemble::provider(config, provider)? else {
            return Err(Failure::new(Exit::Usage, format!("there is no provider {provider:?}")));
        };
        let entry = &config.provider[provider];
        let slot = ProviderSlot { name: provider.to_owned(), provider: adapter, total: entry.timeouts.total, in_flight_max: 1 };
        let mut runtime_options = assemble::runtime_options(config);
        runtime_options.spool = None;
        let runtime = Runtime::start(store, runtime_options, vec![slot], vec![of_route]).or_exit(Exit::Usage)?;
        let options = server::ServerOptions::from_config(
            &onejob::config::Server {
                listen: SocketAddr::from(([127, 0, 0, 1], 0)),
                proxy_wait: entry.timeouts.total,
                ..onejob::config::Server::default()
            },
            server::Owners::from_config(&std::collections::BTreeMap::new(), None).or_exit(Exit::Internal)?,
        );
        let bound = server::Gateway::bind(options, runtime.clone()).or_exit(Exit::Unavailable)?;
        let mut client = HttpOptions::new(&format!("http://{}/proxy/{route}", bound.addr()));
        client.idempotency_header = Some("idempotency-key".to_owned());
        client.timeouts = entry.timeouts;
        let stop = CancellationToken::new();
        let serving = tokio::spawn(bound.serve(stop.clone()));
        let provider = HttpProvider::new("gateway", client).or_exit(Exit::Internal)?;
        Ok(Through { provider, runtime, serving, stop })
    }

    /// Stops it; its keys go by themselves.
    pub(super) async fn stop(self) {
        let Through { provider, runtime, serving, stop } = self;
        drop(provider);
        stop.cancel();
        let _ = serving.await;
        runtime.shutdown(Duration::ZERO).await;
        runtime.store().close().await;
    }
}
