//! Everything that a gateway consists of, started in order and stopped in reverse.

use std::net::SocketAddr;
use std::time::Duration;

use onejob::config::Config;
use onejob::provider::simulated::Simulated;
use onejob::runtime::{Drained, Runtime};
use onejob::server;
use onejob::store::Store;
use onejob::store::private_redis::{PrivateRedis, PrivateRedisOptions};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{Exit, Failure, OrExit as _, assemble};

/// A running gateway.
pub(super) struct Gateway {
    pub(super) addr: SocketAddr,
    /// What the check of Redis could not make sure of.
    pub(super) warnings: Vec<String>,
    /// The providers that were started with it.
    pub(super) simulated: Vec<(String, Simulated)>,
    runtime: Runtime,
    private_redis: Option<PrivateRedis>,
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
                Some(PrivateRedis::start(PrivateRedisOptions { data_dir, server }).await.or_exit(Exit::Unavailable)?)
            }
        };
        match Self::start_over(config, private_redis.as_ref()).await {
            Ok(parts) => {
                let Parts { addr, warnings, simulated, runtime, serving, stop } = parts;
                Ok(Gateway { addr, warnings, simulated, runtime, private_redis, serving, stop })
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
        let Gateway { simulated, runtime, private_redis, serving, stop, .. } = self;
        stop.cancel();
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
