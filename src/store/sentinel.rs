//! The master that sentinels name.
//!
//! They are asked when a connection is made, never for a call: a lane that breaks or finds itself on a replica is built anew, and
//! then leads to whichever server is the master now. What they name is believed once it calls itself a master. A look now and then
//! finds a failover of which no connection told.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deadpool_redis::Pool;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Value};

use crate::error::{Refusal, StoreError};
use crate::place::NodeUrl;
use crate::store::call::is_replica;
use crate::store::cluster::at;
use crate::store::dial::{self, Dial, Whom};

pub(crate) struct Sentinels {
    url: NodeUrl,
    service: String,
    dial: Dial,
    known: Mutex<Known>,
}

/// What was learned so far.
struct Known {
    /// The sentinels, the one that answered last first.
    sentinels: Vec<String>,
    master: Option<Master>,
}

#[derive(Clone)]
struct Master {
    address: Arc<str>,
    /// How many were named before it.
    server: u64,
    pool: Pool,
}

impl Master {
    /// The connection, unless it leads to a replica.
    async fn calls_itself_so(&self, mut connection: MultiplexedConnection) -> Result<(MultiplexedConnection, u64), StoreError> {
        // Where it may not be asked, the sentinels are believed.
        let role: Value = redis::cmd("ROLE").query_async(&mut connection).await.unwrap_or(Value::Nil);
        if is_replica(&role) {
            let detail = format!("{}, which the sentinels name, is a replica", self.address);
            return Err(StoreError::NotExecuted { code: Refusal::ReadOnly, detail });
        }
        Ok((connection, self.server))
    }
}

impl Sentinels {
    pub(crate) fn new(url: NodeUrl, sentinels: Vec<String>, service: String, dial: Dial) -> Self {
        Sentinels { url, service, dial, known: Mutex::new(Known { sentinels, master: None }) }
    }

    /// A connection to the master, and the how manieth master it is.
    ///
    /// # Errors
    /// `NotExecuted` while no sentinel names one that calls itself so.
    pub(crate) async fn take(&self) -> Result<(MultiplexedConnection, u64), StoreError> {
        let master = self.master().await?;
        let connection = dial::take(&master.pool).await.map_err(|error| at(&master.address, error))?;
        master.calls_itself_so(connection).await
    }

    /// A connection of its own to the master, with settings of its own, and the how manieth master it is.
    ///
    /// # Errors
    /// As [`Sentinels::take`].
    pub(crate) async fn connect(&self, config: &AsyncConnectionConfig) -> Result<(MultiplexedConnection, u64), StoreError> {
        let master = self.master().await?;
        let url = self.url.of(&master.address);
        let connected = self.dial.client(&url)?.get_multiplexed_async_connection_with_config(config).await;
        let connected = connected.map_err(|error| dial::cannot(&url, &dial::in_our_words(&error, Whom::Node)));
        master.calls_itself_so(connected?).await
    }

    /// The how manieth master was named last.
    pub(crate) fn known_server(&self) -> u64 {
        self.known().master.as_ref().map_or(0, |master| master.server)
    }

    /// The how manieth master the sentinels name.
    pub(crate) async fn look(&self) -> Result<u64, StoreError> {
        self.master().await.map(|master| master.server)
    }

    /// The URL of the master that they name.
    pub(crate) async fn url(&self) -> Result<String, StoreError> {
        self.master().await.map(|master| self.url.of(&master.address))
    }

    /// The address of the master that they named last.
    pub(crate) fn named_last(&self) -> Option<Arc<str>> {
        self.known().master.as_ref().map(|master| Arc::clone(&master.address))
    }

    pub(crate) fn service(&self) -> &str {
        &self.service
    }

    async fn master(&self) -> Result<Master, StoreError> {
        let sentinels = self.known().sentinels.clone();
        let mut failed = None;
        for sentinel in &sentinels {
            let mut command = redis::cmd("SENTINEL");
            command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
            match self.dial.ask::<Option<(String, u16)>>(&self.url.of_sentinel(sentinel), Whom::Sentinel, command).await {
                Ok(Some((host, port))) => return self.named(sentinel, &address(&host, port)),
                Ok(None) => {
                    let detail = format!("the sentinel {sentinel} knows no master {:?}", self.service);
                    failed = Some(StoreError::NotExecuted { code: Refusal::Connect, detail });
                }
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.unwrap_or_else(|| StoreError::fatal("BADURL", "redis.url names no sentinel")))
    }

    fn named(&self, sentinel: &str, address: &str) -> Result<Master, StoreError> {
        let mut known = self.known();
        if let Some(place) = known.sentinels.iter().position(|one| one == sentinel) {
            known.sentinels[..=place].rotate_right(1);
        }
        match &known.master {
            Some(master) if &*master.address == address => Ok(master.clone()),
            before => {
                let server = before.as_ref().map_or(0, |master| master.server + 1);
                if server > 0 {
                    tracing::warn!(address, service = self.service, "the sentinels name another master");
                }
                let master = Master { address: Arc::from(address), server, pool: self.dial.pool(&self.url.of(address))? };
                known.master = Some(master.clone());
                Ok(master)
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `host:port`, an IPv6 address in brackets.
pub(super) fn address(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}
