//! The parts of a streamed answer, for readers on other gateways than the one that receives it.
//!
//! A gateway whose clients wait for a job that runs elsewhere says so (a *want*, on the channel of wake-ups); the one that runs it
//! then writes what has come so far, and each batch that comes, to a key of the attempt's own. Where nobody asks, nothing is written.
//! The key is a convenience that may be lost at any time: the result is the record's, and only the record says whether a stream was
//! whole.
//!
//! The first entry has the answer's head. The id of each other one is where its bytes begin, plus one: so a batch that is written
//! again is refused as a repetition, and a reader sees a gap as a gap.

use std::time::Duration;

use redis::Value;

use crate::error::StoreError;
use crate::job::JobId;
use crate::store::{Store, retry};

/// How long the parts outlive the last word of the gateway that writes them.
pub(crate) const STREAM_LIFE: Duration = Duration::from_secs(60);
/// Most batches that are read at once.
#[cfg(feature = "gateway")]
const BATCHES_MAX: usize = 16;
/// The entry that has the answer's head: before every byte.
const HEAD_ID: &str = "0-1";

/// Which stream: an attempt's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamOf {
    pub(crate) job: JobId,
    pub(crate) attempt: u32,
}

/// What came of writing a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Appended {
    /// It is there.
    There,
    /// What came before it is not there any more: begin again from the first byte.
    Lost,
}

/// Batches that follow one another without a gap.
#[cfg(feature = "gateway")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Batches {
    /// The answer's head, if they were read from the beginning.
    pub(crate) head: Option<String>,
    /// The bytes.
    pub(crate) bytes: Vec<u8>,
}

/// The fields of an entry, in order.
#[cfg(feature = "gateway")]
type Fields = Vec<(String, Vec<u8>)>;

impl Store {
    /// Writes the answer's head: the parts follow it.
    ///
    /// # Errors
    /// Any: again.
    pub(crate) async fn begin_stream(&self, of: StreamOf, head: &str) -> Result<(), StoreError> {
        let key = self.inner.keys.stream(of);
        let mut add = redis::cmd("XADD");
        add.arg(&key).arg(HEAD_ID).arg("head").arg(head);
        self.add(&key, add).await.map(drop)
    }

    /// Writes a batch, which begins at this byte of the stream. Renews the key's life.
    ///
    /// # Errors
    /// Any: the same batch again.
    pub(crate) async fn append_stream(&self, of: StreamOf, at: usize, bytes: &[u8]) -> Result<Appended, StoreError> {
        debug_assert!(!bytes.is_empty(), "an empty batch would take the place of the next");
        let key = self.inner.keys.stream(of);
        let mut add = redis::cmd("XADD");
        add.arg(&key).arg("NOMKSTREAM").arg(format!("{}-0", at + 1)).arg("bytes").arg(bytes);
        self.add(&key, add).await
    }

    async fn add(&self, key: &str, add: redis::Cmd) -> Result<Appended, StoreError> {
        let mut values = self.commands(vec![add, renew(key)]).await?;
        match values.swap_remove(0) {
            Value::Nil => Ok(Appended::Lost),
            // It is there from an earlier try.
            Value::ServerError(error) if error.details().is_some_and(|text| text.contains("equal or smaller")) => {
                Ok(Appended::There)
            }
            Value::ServerError(error) => Err(retry::of_server(&error)),
            _ => Ok(Appended::There),
        }
    }

    /// Keeps the parts of a stream that is silent.
    ///
    /// # Errors
    /// Any: again.
    pub(crate) async fn renew_stream(&self, of: StreamOf) -> Result<(), StoreError> {
        self.command(renew(&self.inner.keys.stream(of))).await.map(drop)
    }

    /// Takes the parts away: the record has the whole.
    ///
    /// # Errors
    /// Any: they expire.
    pub(crate) async fn remove_stream(&self, of: StreamOf) -> Result<(), StoreError> {
        let mut unlink = redis::cmd("UNLINK");
        unlink.arg(self.inner.keys.stream(of));
        self.command(unlink).await.map(drop)
    }

    /// Reads what there is from this byte on, at most a few batches; `None` after a gap: what is there does not begin where the
    /// reader stands.
    ///
    /// # Errors
    /// Any: again. `Fatal` (`BADSTREAM`) for what is no batch.
    #[cfg(feature = "gateway")]
    pub(crate) async fn read_stream(&self, of: StreamOf, from: usize) -> Result<Option<Batches>, StoreError> {
        let key = self.inner.keys.stream(of);
        let mut range = redis::cmd("XRANGE");
        let first = if from == 0 { HEAD_ID.to_owned() } else { format!("{}-0", from + 1) };
        range.arg(&key).arg(first).arg("+").arg("COUNT").arg(BATCHES_MAX);
        let bad = |what: &str| StoreError::fatal("BADSTREAM", format!("{key}: {what}"));
        let entries: Vec<(String, Fields)> =
            redis::from_redis_value(self.command(range).await?).map_err(|_| bad("not a stream of batches"))?;
        let mut batches = Batches::default();
        for (id, fields) in entries {
            let [(field, value)] = <[_; 1]>::try_from(fields).map_err(|_| bad("an entry has other than one field"))?;
            if id == HEAD_ID && field == "head" {
                batches.head = Some(String::from_utf8(value).map_err(|_| bad("its head is no text"))?);
                continue;
            }
            let at: usize =
                id.strip_suffix("-0").and_then(|at| at.parse().ok()).ok_or_else(|| bad("an entry's id is no place"))?;
            if at != from + batches.bytes.len() + 1 {
                return Ok(None);
            }
            batches.bytes.extend_from_slice(&value);
        }
        Ok(Some(batches))
    }
}

fn renew(key: &str) -> redis::Cmd {
    let mut expire = redis::cmd("PEXPIRE");
    expire.arg(key).arg(u64::try_from(STREAM_LIFE.as_millis()).expect("a minute in ms"));
    expire
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::Fixture;

    fn of(fixture: &Fixture) -> StreamOf {
        StreamOf { job: JobId::new(1, fixture.identity("k")), attempt: 1 }
    }

    #[tokio::test]
    async fn a_batch_written_again_is_there_once() {
        let fixture = Fixture::start().await;
        let (of, store) = (of(&fixture), &fixture.store);
        assert_eq!(store.read_stream(of, 0).await, Ok(Some(Batches::default())), "nothing yet");
        for _ in 0..2 {
            store.begin_stream(of, "200\nx: y").await.unwrap();
        }
        let head = Batches { head: Some("200\nx: y".to_owned()), bytes: Vec::new() };
        assert_eq!(store.read_stream(of, 0).await, Ok(Some(head)), "a head without a byte");
        for (at, bytes) in [(0, b"one"), (0, b"one"), (3, b"two"), (3, b"two"), (0, b"one")] {
            assert_eq!(store.append_stream(of, at, bytes).await, Ok(Appended::There));
        }
        let whole = Batches { head: Some("200\nx: y".to_owned()), bytes: b"onetwo".to_vec() };
        assert_eq!(store.read_stream(of, 0).await, Ok(Some(whole)));
        let rest = Batches { head: None, bytes: b"two".to_vec() };
        assert_eq!(store.read_stream(of, 3).await, Ok(Some(rest)));
        let life_ms: i64 = fixture.query(&["PTTL", &store.inner.keys.stream(of)]).await;
        assert!((1..=60_000).contains(&life_ms), "{life_ms}");
    }

    /// Redis lost what it had: no batch stands alone, and no reader takes a later byte for an earlier one.
    #[tokio::test]
    async fn a_gap_is_seen_by_who_writes_and_by_who_reads() {
        let fixture = Fixture::start().await;
        let (of, store) = (of(&fixture), &fixture.store);
        assert_eq!(store.append_stream(of, 3, b"two").await, Ok(Appended::Lost));
        assert_eq!(fixture.query::<u64>(&["EXISTS", &store.inner.keys.stream(of)]).await, 0);
        // Written again, in other batches than a reader has read.
        store.begin_stream(of, "200").await.unwrap();
        store.append_stream(of, 0, b"onetwo").await.unwrap();
        store.append_stream(of, 6, b"three").await.unwrap();
        assert_eq!(store.read_stream(of, 3).await, Ok(None));
        store.remove_stream(of).await.unwrap();
        assert_eq!(fixture.query::<u64>(&["EXISTS", &store.inner.keys.stream(of)]).await, 0);
    }
}
