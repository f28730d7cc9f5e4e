//! What this Redis must be, checked at the start and by `doctor`.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use redis::Value;
use uuid::Uuid;

use crate::error::StoreError;
use crate::place::without_credentials;
use crate::store::commit::{Durability, has_waitaof};
use crate::store::dial::Whom;
use crate::store::nodes::{Kind as RedisKind, Master};
use crate::store::record::SCHEMA;
use crate::store::scripts::Script;
use crate::store::{Eviction, Store, retry};

/// The oldest Redis that has what the scripts need (`SET NX GET`, script flags).
const VERSION_MIN: (u32, u32) = (7, 0);

/// So long a write may wait for a file that is synced once a second, and for its disk.
const EVERYSEC_WAIT: Duration = Duration::from_secs(3);

/// What the check at the start found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// Which kind of Redis it is.
    pub kind: RedisKind,
    /// What Redis says of itself, each master of a cluster that answers.
    pub facts: Vec<RedisFacts>,
    /// What could not be checked, or was overridden: each must be logged.
    pub warnings: Vec<String>,
}

/// What a Redis says of itself; `None` where it does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisFacts {
    /// Where it is; `None` for the one server of a URL.
    pub node: Option<String>,
    /// Whether it is a node of a cluster: `0` or `1`.
    pub cluster_enabled: Option<String>,
    /// Which server it is, with its own version: `Redis 7.0.15`, `Valkey 9.1.2`.
    pub server: Option<String>,
    /// The version of Redis that it is compatible with.
    pub version: Option<String>,
    /// What it does when memory is short.
    pub maxmemory_policy: Option<String>,
    /// How much memory it may use, 0 for no limit.
    pub maxmemory_bytes: Option<u64>,
    /// How much it uses.
    pub used_memory_bytes: Option<u64>,
    /// `master` or `slave`.
    pub role: Option<String>,
    /// Whether it writes an append-only file: `0` or `1`.
    pub aof_enabled: Option<String>,
    /// When that file is on disk: `always`, `everysec` or `no`.
    pub appendfsync: Option<String>,
    /// Whether it is not, while the file is rewritten: `yes` or `no`.
    pub no_appendfsync_on_rewrite: Option<String>,
    /// When it takes a snapshot; `""` for never.
    pub save: Option<String>,
    /// How many replicas are connected.
    pub replicas: Option<u32>,
    /// With fewer replicas than this it takes no write.
    pub min_replicas_to_write: Option<u32>,
}

impl RedisFacts {
    /// What keeps a level of durability from holding on this server as it is now; `None` if nothing does.
    pub fn falls_short_of(&self, durability: Durability) -> Option<String> {
        match durability {
            Durability::Memory => None,
            Durability::Replicated(wanted) => match self.replicas {
                Some(replicas) if replicas >= wanted => None,
                Some(replicas) => Some(format!("{replicas} of {wanted} replicas are connected")),
                None => Some("it does not say how many replicas it has: INFO is denied".to_owned()),
            },
            Durability::Fsync => match (self.aof_enabled.as_deref(), self.appendfsync.as_deref()) {
                (Some("1"), Some("no")) if self.has_waitaof() => {
                    Some("appendfsync is no: it never says that its file is on disk".to_owned())
                }
                (Some("1"), _) if self.has_waitaof() => None,
                (Some("1"), Some("always")) => match self.no_appendfsync_on_rewrite.as_deref() {
                    Some("no") => None,
                    Some(_) => {
                        Some("no-appendfsync-on-rewrite is yes: it answers before its file is on disk, now and then".to_owned())
                    }
                    None => Some("it does not say its no-appendfsync-on-rewrite: CONFIG is denied".to_owned()),
                },
                (Some("1"), Some(other)) => Some(format!("appendfsync is {other}: it answers before its file is on disk")),
                (Some("1"), None) => Some("it does not say its appendfsync: CONFIG is denied".to_owned()),
                (Some(_), _) => Some("appendonly is off: it keeps no file".to_owned()),
                (None, _) => Some("it does not say whether it keeps a file: INFO is denied".to_owned()),
            },
        }
    }
}

impl RedisFacts {
    /// Whether it says when its file is on disk (`WAITAOF`); else it must answer only afterwards.
    pub fn has_waitaof(&self) -> bool {
        self.version.as_deref().is_some_and(has_waitaof)
    }

    /// Whether writes are waited for that reach the disk once a second, and for less time than that takes.
    pub fn waits_too_short(&self, durability: Durability, timeout: Duration) -> Option<String> {
        let each_second = self.has_waitaof() && self.appendfsync.as_deref() == Some("everysec");
        (durability == Durability::Fsync && each_second && timeout < EVERYSEC_WAIT).then(|| {
            let (timeout, wait) = (timeout.as_millis(), EVERYSEC_WAIT.as_secs());
            format!(
                "appendfsync is everysec, a write may wait a second for it, and redis.durability_timeout is {timeout} ms: \
                 {wait} s are enough"
            )
        })
    }
}

impl Store {
    /// Asks Redis about itself, each master of a cluster; one that does not answer is an error, which names it. What it is not
    /// allowed to say is `None`.
    pub async fn facts(&self) -> Vec<Result<RedisFacts, StoreError>> {
        let addresses = self.inner.nodes.addresses();
        join_all(addresses.iter().map(|(master, address)| self.facts_of(master, address.as_deref()))).await
    }

    pub(super) async fn facts_of(&self, master: &Master, address: Option<&str>) -> Result<RedisFacts, StoreError> {
        let info = match self.on(master, redis::cmd("INFO")).await {
            Ok(Value::BulkString(bytes)) => String::from_utf8_lossy(&bytes).into_owned(),
            Ok(Value::VerbatimString { text, .. }) => text,
            Ok(_) => String::new(),
            Err(StoreError::Fatal { .. }) => String::new(),
            Err(error) => return Err(error),
        };
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(|value| value.trim().to_owned())
        };
        let version = field("redis_version");
        let server = match (field("valkey_version"), &version) {
            (Some(valkey), _) => Some(format!("Valkey {valkey}")),
            (None, Some(redis)) => Some(format!("Redis {redis}")),
            (None, None) => None,
        };
        Ok(RedisFacts {
            node: address.map(str::to_owned),
            cluster_enabled: field("cluster_enabled"),
            server,
            version,
            maxmemory_policy: field("maxmemory_policy"),
            maxmemory_bytes: field("maxmemory").and_then(|text| text.parse().ok()),
            used_memory_bytes: field("used_memory").and_then(|text| text.parse().ok()),
            role: field("role"),
            aof_enabled: field("aof_enabled"),
            appendfsync: self.setting(master, "appendfsync").await?,
            no_appendfsync_on_rewrite: self.setting(master, "no-appendfsync-on-rewrite").await?,
            save: self.setting(master, "save").await?,
            replicas: field("connected_slaves").and_then(|text| text.parse().ok()),
            min_replicas_to_write: self.setting(master, "min-replicas-to-write").await?.and_then(|text| text.parse().ok()),
        })
    }

    /// What Redis is configured to; `None` if it does not say.
    async fn setting(&self, master: &Master, name: &str) -> Result<Option<String>, StoreError> {
        let mut get = redis::cmd("CONFIG");
        get.arg("GET").arg(name);
        match self.on(master, get).await {
            Ok(value) => Ok(redis::from_redis_value::<HashMap<String, String>>(value).ok().and_then(|mut all| all.remove(name))),
            Err(StoreError::Fatal { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Checks that this Redis can keep the promises: version, schema, eviction. A master of a cluster that does not answer is a
    /// warning: it is checked when it does, as one that joins.
    ///
    /// # Errors
    /// `NotExecuted` while Redis cannot be reached; `Fatal` with the reason if it cannot be used.
    pub async fn check(&self) -> Result<Checked, StoreError> {
        let (mut facts, mut warnings) = (Vec::new(), Vec::new());
        for answer in self.facts().await {
            match answer {
                Ok(said) => {
                    let evicts = self.check_facts(&said, &mut warnings)?;
                    self.inner.masters.is_sound(said.node.as_deref(), evicts);
                    facts.push(said);
                }
                Err(error) if error.is_retryable() && self.inner.nodes.are_many() => {
                    warnings.push(format!("a master does not answer, its jobs are 503, and it is checked when it does: {error}"));
                }
                Err(error) => return Err(error),
            }
        }
        self.check_schema().await.map_err(|error| match error {
            StoreError::Fatal { code, .. } if code == "NOAUTH" => {
                let url = without_credentials(&self.inner.options.url);
                StoreError::fatal("NOAUTH", format!("{url}: {}", Whom::Node.wants_a_password()))
            }
            error => error,
        })?;
        self.identify().await?;
        self.synchronize_clock().await?;
        Ok(Checked { kind: self.kind(), facts, warnings })
    }

    /// Checks version, eviction and durability of one master. Whether it may evict, and somebody allowed that.
    pub(super) fn check_facts(&self, facts: &RedisFacts, warnings: &mut Vec<String>) -> Result<bool, StoreError> {
        let redis = facts.node.as_ref().map_or_else(|| "redis".to_owned(), |node| format!("redis at {node}"));
        match &facts.version {
            Some(version) if !is_supported(version) => {
                let (major, minor) = VERSION_MIN;
                return Err(StoreError::fatal("VERSION", format!("{redis} is {version}; onejob needs {major}.{minor} or newer")));
            }
            Some(_) => {}
            None => warnings.push(format!("{redis} does not say its version: INFO is denied")),
        }
        if facts.cluster_enabled.as_deref() == Some("1") && !self.inner.nodes.are_many() {
            let url = without_credentials(&self.inner.options.url);
            let detail = format!("{url} is a node of a cluster: write redis+cluster://… (or rediss+cluster://…) in redis.url");
            return Err(StoreError::fatal("CLUSTER", detail));
        }
        let mut evicts = false;
        match &facts.maxmemory_policy {
            Some(policy) if policy == "noeviction" => {}
            Some(policy) => match self.inner.options.eviction {
                Eviction::Refused => {
                    let detail = format!(
                        "{redis} has maxmemory-policy {policy}, which may evict open jobs, and then they run twice; \
                         set it to noeviction (or redis.allow_eviction = true, if that is a risk you take)"
                    );
                    return Err(StoreError::fatal("EVICTION", detail));
                }
                Eviction::Allowed => {
                    evicts = true;
                    warnings.push(format!(
                        "{redis} has maxmemory-policy {policy} and redis.allow_eviction is set: open jobs may be evicted"
                    ));
                }
            },
            None => warnings.push(format!("{redis} does not say its maxmemory-policy: make sure that it is noeviction")),
        }
        let durability = self.inner.options.durability;
        if let Some(short) = facts.falls_short_of(durability) {
            let at = facts.node.as_ref().map(|node| format!("{node}: ")).unwrap_or_default();
            let short = format!("{at}redis.durability is {}, and {short}", durability.describe());
            match durability {
                // They come and go, and each write counts them.
                Durability::Replicated(_) => {
                    let which = match self.kind() {
                        RedisKind::One | RedisKind::Sentinel { .. } => "",
                        RedisKind::Cluster { .. } => " for jobs of this master",
                    };
                    warnings.push(format!("{short}: no work with effects is begun{which} until they are"));
                }
                Durability::Memory | Durability::Fsync => return Err(StoreError::fatal("DURABILITY", short)),
            }
        }
        if let Some(short) = facts.waits_too_short(durability, self.inner.options.durability_timeout) {
            warnings.push(format!("{redis}: {short}"));
        }
        Ok(evicts)
    }

    /// Writes the schema if there is none, and refuses another one.
    async fn check_schema(&self) -> Result<(), StoreError> {
        let found = self.meta_or("schema", &SCHEMA.to_string()).await?;
        if found == SCHEMA.to_string() {
            return Ok(());
        }
        let prefix = &self.inner.options.prefix;
        let detail = format!("the records under {prefix:?} have schema {found}, this version of onejob reads {SCHEMA}");
        Err(StoreError::fatal("SCHEMA", detail))
    }

    /// Reads which store this is, and gives it a name if it has none. A Redis that was wiped gets back the name that its gateways
    /// know, from the first who asks.
    pub(crate) async fn identify(&self) -> Result<Arc<str>, StoreError> {
        let known = self.id();
        let first = if known.is_empty() { Arc::from(Uuid::new_v4().simple().to_string()) } else { known };
        let found: Arc<str> = Arc::from(self.meta_or("store", &first).await?);
        *self.inner.id.lock().unwrap_or_else(PoisonError::into_inner) = found;
        Ok(self.name())
    }

    /// Which store this is, and no other has that name: the prefix, and what was drawn when the first gateway started over it.
    pub(crate) fn name(&self) -> Arc<str> {
        Arc::from(format!("{}/{}", self.inner.options.prefix, self.id()))
    }

    fn id(&self) -> Arc<str> {
        Arc::clone(&self.inner.id.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What the meta key says, which is the first that anybody said. It is written only if it is not there: writing may be refused.
    async fn meta_or(&self, field: &str, first: &str) -> Result<String, StoreError> {
        let meta = self.inner.keys.meta();
        let mut get = redis::cmd("HGET");
        get.arg(&meta).arg(field);
        let found = match self.command(get.clone()).await? {
            Value::Nil => {
                let mut set = redis::cmd("HSETNX");
                set.arg(&meta).arg(field).arg(first);
                self.command(set).await?;
                self.command(get).await?
            }
            value => value,
        };
        redis::from_redis_value(found).map_err(|error| StoreError::fatal("BADREPLY", error))
    }

    /// Does what Redis would refuse if it could not take a new job: out of memory, read-only, unable to persist, busy, or not
    /// allowed to this user. A `PING` would not tell.
    ///
    /// A script that writes, and each command of a job, all of them about what never exists: nothing is written, and no key is
    /// left. In a cluster every master is asked: a job comes to any of them.
    ///
    /// # Errors
    /// What a submit would meet, or what is wrong with a master that came later: what a start would refuse.
    pub async fn canary(&self) -> Result<(), StoreError> {
        self.inner.masters.all_sound()?;
        let absent = [0_u8; 16];
        let numbers: Vec<String> = self.one_of_each_master().into_iter().map(|(_, number)| number).collect();
        let script = |number: &str, command: &str, script: &str| {
            let mut command = redis::cmd(command);
            command.arg(script).arg(1).arg(self.inner.keys.canary(number)).arg(&absent[..]);
            command.arg("canary").arg("onejob").arg("canary").arg(1).arg(0);
            command
        };
        let mut commands = Vec::new();
        for number in &numbers {
            commands.extend(self.commands_of_a_job(number));
            commands.push(script(number, "EVALSHA", Script::ReopenJob.sha1()));
        }
        let each = commands.len() / numbers.len().max(1);
        for (place, value) in self.commands(commands).await?.into_iter().enumerate() {
            match value {
                Value::ServerError(error) if retry::is_noscript(&error) => {
                    self.command(script(&numbers[place / each], "EVAL", Script::ReopenJob.code())).await?;
                }
                Value::ServerError(error) => return Err(retry::of_server(&error)),
                _ => {}
            }
        }
        Ok(())
    }

    /// What to add to the canary's keys, so that every master has one of them. One whose few slots none falls into is not asked.
    pub(super) fn one_of_each_master(&self) -> Vec<(Option<Master>, String)> {
        /// So many tries for each master find one of any that has a hundredth of the slots.
        const TRIES: usize = 500;
        let masters = self.inner.nodes.masters();
        let mut found: Vec<(Option<Master>, String)> = Vec::with_capacity(masters.len());
        for number in 0..TRIES * masters.len() {
            if found.len() == masters.len() {
                break;
            }
            let number = if number == 0 { String::new() } else { number.to_string() };
            let master = self.inner.nodes.master_of(self.inner.keys.canary(&number).as_bytes());
            if !found.iter().any(|(known, _)| *known == master) {
                found.push((master, number));
            }
        }
        found
    }

    /// Every command that a job needs from its submit to its end, by itself or in a script, each so that it changes nothing.
    fn commands_of_a_job(&self, number: &str) -> Vec<redis::Cmd> {
        const MEMBER: &str = "canary";
        let keys = &self.inner.keys;
        let (record, due, done) = (keys.canary(number), keys.due_canary(number), keys.done_canary());
        let command = |words: &[&str]| {
            let mut command = redis::cmd(words[0]);
            command.arg(&words[1..]);
            command
        };
        vec![
            command(&["TIME"]),
            command(&["GET", &record]),
            // `XX`: only if it is there.
            command(&["SET", &record, "", "XX", "PX", "1"]),
            command(&["PEXPIRE", &record, "1"]),
            command(&["PERSIST", &record]),
            command(&["ZADD", &due, "XX", "0", MEMBER]),
            command(&["ZSCORE", &due, MEMBER]),
            command(&["ZREM", &due, MEMBER]),
            command(&["PUBLISH", &done, ""]),
        ]
    }
}

fn is_supported(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(major), Some(minor)) => (major, minor) >= VERSION_MIN,
        // A fork's own way to count: its INFO still has redis_version.
        _ => true,
    }
}
