//! What this Redis must be, checked at the start and by `doctor`.

use redis::Value;

use crate::error::StoreError;
use crate::metrics;
use crate::store::record::SCHEMA;
use crate::store::scripts::Script;
use crate::store::{Eviction, Store};

/// The oldest Redis that has what the scripts need (`SET NX GET`, script flags).
const VERSION_MIN: (u32, u32) = (7, 0);

/// What the check at the start found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// What Redis says of itself.
    pub facts: RedisFacts,
    /// What could not be checked, or was overridden: each must be logged.
    pub warnings: Vec<String>,
}

/// What Redis says of itself; `None` where it does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisFacts {
    /// Its version.
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
}

impl Store {
    /// Asks Redis about itself. What it is not allowed to say is `None`.
    pub async fn facts(&self) -> Result<RedisFacts, StoreError> {
        let info = match self.command(redis::cmd("INFO")).await {
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
        Ok(RedisFacts {
            version: field("redis_version"),
            maxmemory_policy: field("maxmemory_policy"),
            maxmemory_bytes: field("maxmemory").and_then(|text| text.parse().ok()),
            used_memory_bytes: field("used_memory").and_then(|text| text.parse().ok()),
            role: field("role"),
            aof_enabled: field("aof_enabled"),
        })
    }

    /// Checks version, schema and eviction.
    pub(super) async fn check(&self) -> Result<Checked, StoreError> {
        let facts = self.facts().await?;
        let mut warnings = Vec::new();
        match &facts.version {
            Some(version) if !is_supported(version) => {
                let (major, minor) = VERSION_MIN;
                return Err(StoreError::fatal("VERSION", format!("redis is {version}; onejob needs {major}.{minor} or newer")));
            }
            Some(_) => {}
            None => warnings.push("redis does not say its version: INFO is denied".to_owned()),
        }
        match &facts.maxmemory_policy {
            Some(policy) if policy == "noeviction" => metrics::eviction_allowed(0),
            Some(policy) => match self.inner.options.eviction {
                Eviction::Refused => {
                    let detail = format!(
                        "redis has maxmemory-policy {policy}, which may evict open jobs, and then they run twice; \
                         set it to noeviction (or redis.allow_eviction = true, if that is a risk you take)"
                    );
                    return Err(StoreError::fatal("EVICTION", detail));
                }
                Eviction::Allowed => {
                    metrics::eviction_allowed(1);
                    warnings.push(format!(
                        "redis has maxmemory-policy {policy} and redis.allow_eviction is set: open jobs may be evicted"
                    ));
                }
            },
            None => warnings.push("redis does not say its maxmemory-policy: make sure that it is noeviction".to_owned()),
        }
        self.check_schema().await?;
        Ok(Checked { facts, warnings })
    }

    /// Writes the schema if there is none, and refuses another one.
    async fn check_schema(&self) -> Result<(), StoreError> {
        let meta = self.inner.keys.meta();
        let mut get = redis::cmd("HGET");
        get.arg(&meta).arg("schema");
        let found = match self.command(get.clone()).await? {
            Value::Nil => {
                let mut set = redis::cmd("HSETNX");
                set.arg(&meta).arg("schema").arg(SCHEMA);
                self.command(set).await?;
                self.command(get).await?
            }
            value => value,
        };
        let found: String = redis::from_redis_value(found).map_err(|error| StoreError::fatal("BADREPLY", error))?;
        if found == SCHEMA.to_string() {
            return Ok(());
        }
        let prefix = &self.inner.options.prefix;
        let detail = format!("the records under {prefix:?} have schema {found}, this version of onejob reads {SCHEMA}");
        Err(StoreError::fatal("SCHEMA", detail))
    }

    /// Runs a script that Redis would refuse if it could not take a new job: out of memory, read-only, unable to persist, busy.
    ///
    /// It names a job that never exists, so it writes nothing. A `PING` would not tell.
    ///
    /// # Errors
    /// What a submit would meet.
    pub async fn canary(&self) -> Result<(), StoreError> {
        let absent = [0_u8; 16];
        let mut command = redis::cmd("EVALSHA");
        command.arg(Script::ReopenJob.sha1());
        let arguments = |command: &mut redis::Cmd| {
            command.arg(1).arg(self.inner.keys.canary()).arg(&absent[..]);
            command.arg("canary").arg("onejob").arg("canary").arg(1).arg(0);
        };
        arguments(&mut command);
        match self.command(command).await {
            Err(StoreError::Fatal { code, .. }) if code == "NOSCRIPT" => {
                let mut command = redis::cmd("EVAL");
                command.arg(Script::ReopenJob.code());
                arguments(&mut command);
                self.command(command).await.map(drop)
            }
            answered => answered.map(drop),
        }
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
