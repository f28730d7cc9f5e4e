//! A whole fleet of real parts: gateways as processes of the real program, each behind a wire to Redis that breaks on demand; one
//! Redis that loses nothing it has answered; a provider that outlives them all and keeps a ledger of what it executed.
//!
//! `client` submits intents and writes down what it is told; `conductor` breaks things by a schedule; `judge` compares what was
//! told, what is stored and what was executed. What is drawn, is drawn from one seed: the intents, the schedule, the choices of
//! each client. What is not determined by it: how threads and processes interleave, and what a fault therefore hits.

pub mod client;
pub mod conductor;
pub mod dice;
pub mod gateway;
pub mod intent;
pub mod judge;
pub mod proxy;
pub mod redis;

use std::path::{Path, PathBuf};
use std::time::Duration;

use onejob::provider::simulated::{Simulated, SimulatedOptions};
use onejob::store::{Store, StoreOptions};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use gateway::Gateway;
use proxy::Proxy;
use redis::DurableRedis;

/// How long a lease of a fleet runs: short, so that one lapses often.
pub const LEASE: Duration = Duration::from_millis(2500);
/// How long a provider of a fleet has.
pub const PROVIDER_TOTAL: Duration = Duration::from_secs(3);

/// What every gateway of a fleet is told; the wire to Redis and the provider's address are its own.
fn config(provider: &str) -> String {
    format!(
        r#"
[server]
listen = "127.0.0.1:0"
[runtime]
lease = "{lease_ms}ms"
lease_margin = "500ms"
sweep = "200ms"
drain = "1s"
[provider.works]
base_url = "{provider}"
timeouts = {{ connect = "1s", total = "{total_ms}ms" }}
[route.print]
providers = ["works"]
backoff = "50ms"
[route.race]
class = "race"
effects = "pure"
race = {{ after = "200ms", max = 2 }}
providers = ["works"]
backoff = "50ms"
"#,
        lease_ms = LEASE.as_millis(),
        total_ms = PROVIDER_TOTAL.as_millis(),
    )
}

/// Gateways, their Redis and their provider.
pub struct Fleet {
    pub redis: DurableRedis,
    pub gateways: Vec<Gateway>,
    pub provider: Simulated,
    directory: Option<TempDir>,
}

impl Fleet {
    /// Starts everything. `behaviour` is the provider's default.
    pub async fn start(gateways: usize, behaviour: &str) -> Fleet {
        let directory = tempfile::Builder::new().prefix("fleet-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let options = SimulatedOptions { name: "works".to_owned(), behaviour: behaviour.to_owned(), ..Default::default() };
        let provider = Simulated::start(options).await.expect("a provider");
        let config_file = directory.path().join("onejob.toml");
        std::fs::write(&config_file, config(&provider.base_url())).expect("a file");
        let redis = DurableRedis::start(directory.path()).await;
        let mut started = Vec::new();
        for number in 0..gateways {
            let proxy = Proxy::start(redis.socket(), redis.announced());
            started.push(Gateway::start(number, directory.path(), config_file.clone(), proxy).await);
        }
        Fleet { redis, gateways: started, provider, directory: Some(directory) }
    }

    /// Where its logs are.
    pub fn directory(&self) -> &Path {
        self.directory.as_ref().expect("it is there until the end").path()
    }

    /// Keeps the logs beyond the end.
    pub fn keep_logs(&mut self) -> PathBuf {
        self.directory.as_mut().expect("it is there until the end").disable_cleanup(true);
        self.directory().to_owned()
    }

    /// A store that reads the records past all wires, and patiently.
    pub async fn store(&self) -> Store {
        let patience = Duration::from_secs(10);
        let options =
            StoreOptions { connect_timeout: patience, response_timeout: patience, ..StoreOptions::new(&self.redis.url()) };
        Store::connect(options).await.expect("a store").0
    }

    /// Every gateway drains and ends; with nothing under way none leaves anything behind.
    pub async fn stop(&self) {
        for gateway in &self.gateways {
            let code = gateway.stop().await;
            assert_eq!(code, Some(0), "gateway {} at rest, logs in {}", gateway.number, self.directory().display());
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let logs = self.keep_logs();
            eprintln!("the logs of this fleet are kept in {}", logs.display());
        }
    }
}

/// Sends a signal to a process of ours.
pub fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.try_into().expect("a pid")).expect("a pid");
    kill_process(pid, signal).expect("a process of ours");
}
