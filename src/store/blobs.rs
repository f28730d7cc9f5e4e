//! Blobs: bytes too large for the record, in a key of their own that is named by their content.
//!
//! A blob is written before the record that names it, with a grace TTL; after the record is written it is kept as long as the record.
//! Because the name is the content, nobody can overwrite the winner's bytes, and a loser's blob simply expires. Missing or different
//! bytes are an error of the store, never an empty body.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::error::StoreError;
use crate::fingerprint::sha256;
use crate::job::{Body, Identity, Job};
use crate::store::{Store, retry};

/// How long a blob is to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// The job is open.
    Open,
    /// The job has ended, and its record has so long to live.
    For(Duration),
}

impl Store {
    /// Makes a body fit for the record: small ones as they are, larger ones written as a blob with a grace TTL.
    ///
    /// # Errors
    /// `NotExecuted`, `Ambiguous`: again; a blob that no record names expires by itself.
    pub(crate) async fn put_body(&self, identity: Identity, bytes: Arc<[u8]>) -> Result<Body, StoreError> {
        if bytes.len() <= self.inner.options.blob_bytes_min {
            return Ok(Body::Inline(bytes));
        }
        let sha256 = sha256(&bytes);
        let key = self.inner.keys.blob(identity, &sha256);
        let grace_ms = millis(self.inner.options.blob_grace);
        // NX leaves the TTL of a blob that is there alone; GT then makes sure of the grace, and never shortens a life.
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(&bytes[..]).arg("NX").arg("PX").arg(grace_ms);
        let mut expire = redis::cmd("PEXPIRE");
        expire.arg(&key).arg(grace_ms).arg("GT");
        for value in self.commands(vec![set, expire]).await? {
            if let Value::ServerError(error) = value {
                return Err(retry::of_server(&error));
            }
        }
        Ok(Body::Blob { sha256, bytes: bytes.len() as u64 })
    }

    /// Keeps the blobs that a record names as long as the record.
    ///
    /// # Errors
    /// Any: the sweeper makes it good, well before the grace is over.
    pub(crate) async fn keep_blobs(&self, identity: Identity, bodies: &[&Body], keep: Keep) -> Result<(), StoreError> {
        let commands: Vec<redis::Cmd> = bodies
            .iter()
            .filter_map(|body| match body {
                Body::Inline(_) => None,
                Body::Blob { sha256, .. } => Some(self.inner.keys.blob(identity, sha256)),
            })
            .map(|key| match keep {
                Keep::Open => {
                    let mut command = redis::cmd("PERSIST");
                    command.arg(key);
                    command
                }
                Keep::For(life) => {
                    let mut command = redis::cmd("PEXPIRE");
                    command.arg(key).arg(millis(life));
                    command
                }
            })
            .collect();
        if commands.is_empty() {
            return Ok(());
        }
        for value in self.commands(commands).await? {
            if let Value::ServerError(error) = value {
                return Err(retry::of_server(&error));
            }
        }
        Ok(())
    }

    /// Keeps every blob that a job's record names as long as the record.
    pub(crate) async fn keep_blobs_of(&self, job: &Job) -> Result<(), StoreError> {
        let keep = match job.is_ended() {
            false => Keep::Open,
            true => {
                let passed = self.now_ms().saturating_sub(job.ended_ms);
                Keep::For(Duration::from_millis(job.rules.key_life_ms.saturating_sub(passed).max(1)))
            }
        };
        self.keep_blobs(job.id.identity(), &[&job.input.body, &job.result.body], keep).await
    }

    /// The bytes of a body, wherever they are.
    ///
    /// # Errors
    /// `Fatal` (`BADBLOB`) if the bytes are missing or are not those that the record names.
    pub async fn body(&self, identity: Identity, body: &Body) -> Result<Arc<[u8]>, StoreError> {
        let (sha, size) = match body {
            Body::Inline(bytes) => return Ok(Arc::clone(bytes)),
            Body::Blob { sha256, bytes } => (sha256, *bytes),
        };
        let key = self.inner.keys.blob(identity, sha);
        let mut get = redis::cmd("GET");
        get.arg(&key);
        let bad = |what: String| {
            let error = StoreError::fatal("BADBLOB", format!("{key}: {what}"));
            crate::metrics::store_error(error.class());
            error
        };
        match self.command(get).await? {
            Value::BulkString(bytes) if bytes.len() as u64 == size && sha256(&bytes) == *sha => Ok(Arc::from(bytes)),
            Value::BulkString(bytes) => Err(bad(format!("{} bytes that are not the {size} which the record names", bytes.len()))),
            Value::Nil => Err(bad(format!("the {size} bytes that the record names are missing"))),
            other => Err(bad(format!("not bytes but {other:?}"))),
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
