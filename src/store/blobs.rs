//! Blobs: bytes too large for the record, in a key of their own that is named by their content.
//!
//! A blob is written before the record that names it, with a grace TTL; after the record is written it is kept as long as the
//! record names it: without an end while the job is open, and from its end for as long as its bytes are retained. Because
//! the name is the content, nobody can overwrite the winner's bytes, and a loser's blob simply expires. Missing or different bytes
//! are an error of the store, never an empty body.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::error::StoreError;
use crate::fingerprint::sha256;
use crate::job::{Body, Identity, Job, Rules};
use crate::store::{Store, retry};

/// How long a blob is to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// The job is open.
    Open,
    /// The job has ended, and so long its bytes can be asked for.
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
        // GT makes sure of the grace of a blob that is there, and never shortens a life; NX then leaves it alone. In this order,
        // or one could expire between the two.
        let mut expire = redis::cmd("PEXPIRE");
        expire.arg(&key).arg(grace_ms).arg("GT");
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(&bytes[..]).arg("NX").arg("PX").arg(grace_ms);
        for value in self.commands(vec![expire, set]).await? {
            if let Value::ServerError(error) = value {
                return Err(retry::of_server(&error));
            }
        }
        Ok(Body::Blob { sha256, bytes: bytes.len() as u64 })
    }

    /// Keeps the blobs that a record names as long as the record names them.
    ///
    /// # Errors
    /// Any: the sweeper makes it good, well before the grace is over, if the job still has its hint.
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

    /// Keeps every blob that a job's record names as long as the record names it.
    pub(crate) async fn keep_blobs_of(&self, job: &Job) -> Result<(), StoreError> {
        let keep = match job.is_ended() {
            false => Keep::Open,
            true => {
                let passed = self.now_ms().saturating_sub(job.ended_ms);
                Keep::For(bytes_life(&job.rules).saturating_sub(Duration::from_millis(passed)).max(Duration::from_millis(1)))
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

/// How long input and result can be asked for, from the end of their job.
pub(crate) fn bytes_life(rules: &Rules) -> Duration {
    Duration::from_millis(rules.retention_ms.min(rules.key_life_ms))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attempt::{AttemptToken, FinishOutcome};
    use crate::error::StoreError;
    use crate::job::{JobState, Payload};
    use crate::store::testing::{Fixture, KEY_LIFE_MS};
    use crate::store::{Begin, FinishAttempt, Finished, Follow, Read, WriteAhead};

    const GRACE_MS: i64 = 3_600_000;

    fn large(byte: u8) -> Arc<[u8]> {
        Arc::from(vec![byte; (8 << 10) + 1])
    }

    fn key_of(fixture: &Fixture, identity: Identity, body: &Body) -> String {
        match body {
            Body::Blob { sha256, .. } => fixture.store.inner.keys.blob(identity, sha256),
            Body::Inline(_) => panic!("not a blob"),
        }
    }

    async fn life_ms(fixture: &Fixture, key: &str) -> i64 {
        fixture.query(&["PTTL", key]).await
    }

    #[tokio::test]
    async fn eight_kibibytes_stay_in_the_record_and_one_byte_more_does_not() {
        let fixture = Fixture::start().await;
        let identity = fixture.identity("k");
        let small: Arc<[u8]> = Arc::from(vec![1; 8 << 10]);
        let body = fixture.store.put_body(identity, Arc::clone(&small)).await.unwrap();
        assert_eq!(body, Body::Inline(small));
        assert_eq!(fixture.query::<u64>(&["DBSIZE"]).await, 1, "the schema alone");
        let body = fixture.store.put_body(identity, large(1)).await.unwrap();
        assert_eq!(body, Body::Blob { sha256: sha256(&large(1)), bytes: (8 << 10) + 1 });
        assert_eq!(fixture.store.body(identity, &body).await.unwrap(), large(1));
        let life_ms = life_ms(&fixture, &key_of(&fixture, identity, &body)).await;
        assert!((GRACE_MS - 60_000..=GRACE_MS).contains(&life_ms), "{life_ms}");
    }

    #[tokio::test]
    async fn putting_a_blob_again_never_shortens_its_life() {
        let fixture = Fixture::start().await;
        let identity = fixture.identity("k");
        let body = fixture.store.put_body(identity, large(1)).await.unwrap();
        let key = key_of(&fixture, identity, &body);

        fixture.query::<i64>(&["PEXPIRE", &key, "1000"]).await;
        fixture.store.put_body(identity, large(1)).await.unwrap();
        assert!(life_ms(&fixture, &key).await > GRACE_MS - 60_000, "a life shorter than the grace grows to it");

        let kept = Duration::from_secs(7200);
        fixture.store.keep_blobs(identity, &[&body], Keep::For(kept)).await.unwrap();
        fixture.store.put_body(identity, large(1)).await.unwrap();
        assert!(life_ms(&fixture, &key).await > 2 * GRACE_MS - 60_000, "a longer one stays");

        fixture.store.keep_blobs(identity, &[&body], Keep::Open).await.unwrap();
        fixture.store.put_body(identity, large(1)).await.unwrap();
        assert_eq!(life_ms(&fixture, &key).await, -1, "one without an end stays without");
    }

    #[tokio::test]
    async fn missing_or_different_bytes_are_an_error_and_never_an_empty_body() {
        let fixture = Fixture::start().await;
        let identity = fixture.identity("k");
        let body = fixture.store.put_body(identity, large(1)).await.unwrap();
        let key = key_of(&fixture, identity, &body);
        let expect_bad = async |what: &str| match fixture.store.body(identity, &body).await {
            Err(StoreError::Fatal { code, detail }) => {
                assert_eq!(code, "BADBLOB", "{what}");
                assert!(detail.contains(&key), "{detail}");
            }
            other => panic!("{what}: {other:?}"),
        };
        fixture.query::<String>(&["SET", &key, ""]).await;
        expect_bad("emptied").await;
        fixture.query::<String>(&["SET", &key, &"x".repeat((8 << 10) + 1)]).await;
        expect_bad("other bytes of the same length").await;
        fixture.query::<i64>(&["DEL", &key]).await;
        expect_bad("missing").await;
        fixture.query::<i64>(&["RPUSH", &key, "x"]).await;
        let answer = fixture.store.body(identity, &body).await;
        assert!(matches!(&answer, Err(StoreError::Fatal { code, .. }) if code == "WRONGTYPE"), "{answer:?}");
    }

    /// Written before the record with a grace, without an end while the job is open, and as long as the record from the end on. A
    /// loser's bytes expire by themselves.
    #[tokio::test]
    async fn the_winners_blob_lives_as_long_as_the_record() {
        let fixture = Fixture::start().await;
        let identity = fixture.identity("k");
        let input = Payload { head: String::new(), body: fixture.store.put_body(identity, large(1)).await.unwrap() };
        let token = AttemptToken::random();
        let begin = Begin::Running { provider: "laser", sent: WriteAhead::default() };
        let job = fixture.submit("k", token, &input, begin).await;
        let Read::Found(open) = fixture.store.read_job(identity).await.unwrap() else { panic!("no job") };
        fixture.store.keep_blobs_of(&open).await.unwrap();
        let input_key = key_of(&fixture, identity, &input.body);
        assert_eq!(life_ms(&fixture, &input_key).await, -1);

        let loser = fixture.store.put_body(identity, large(3)).await.unwrap();
        let result = Payload { head: String::new(), body: fixture.store.put_body(identity, large(2)).await.unwrap() };
        let finish = FinishAttempt {
            job,
            number: 1,
            token,
            outcome: FinishOutcome::Succeeded,
            result: &result,
            reason: "",
            remote_id: "",
            model: "",
            follow: Follow::End,
            hint_ms: None,
            strip_at_ms: None,
            tell: crate::store::Tell::Nothing,
        };
        assert_eq!(
            fixture.store.finish_attempt(&finish).await,
            Ok(Finished::Won { version: 1, was: crate::attempt::AttemptState::Running, job: None })
        );
        let Read::Found(ended) = fixture.store.read_job(identity).await.unwrap() else { panic!("no job") };
        assert_eq!((ended.state, ended.result.clone()), (JobState::Succeeded, result.clone()));
        fixture.store.keep_blobs_of(&ended).await.unwrap();
        let record_life_ms = life_ms(&fixture, &fixture.store.inner.keys.job(identity)).await;
        for key in [input_key, key_of(&fixture, identity, &result.body)] {
            let life_ms = life_ms(&fixture, &key).await;
            assert!(life_ms > GRACE_MS && life_ms.abs_diff(record_life_ms) < 60_000, "{life_ms} {record_life_ms}");
        }
        assert!(record_life_ms <= KEY_LIFE_MS as i64);
        assert!(life_ms(&fixture, &key_of(&fixture, identity, &loser)).await <= GRACE_MS);
        assert_eq!(fixture.store.body(identity, &ended.result.body).await.unwrap(), large(2));
        assert_eq!(fixture.store.body(identity, &ended.input.body).await.unwrap(), large(1));
    }
}
