//! Wake-ups: a gateway that changed a job says so on one of a fixed number of channels.
//!
//! A wake-up is a hint: it may be lost, and it may come for nothing. Behind it stands a slow poll. On the same channels a gateway says
//! that it has readers for a job's stream, to whichever gateway runs the job.

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;

use crate::error::{Refusal, StoreError};
use crate::job::{Identity, JobId, SHARDS};
use crate::store::Store;
use crate::store::call::Afterwards;

/// The wake-ups of all gateways, this one's own included.
pub struct Wakeups {
    messages: BoxStream<'static, redis::Msg>,
}

/// What a gateway said to all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// A job has changed.
    Changed(Identity),
    /// It has readers for the stream of a job that runs elsewhere.
    StreamWanted(JobId),
}

/// What precedes a job's id where its stream is wanted. To a gateway that does not know it, it is no identity, and says nothing.
const STREAM_WANTED: &str = "stream ";

impl Said {
    fn read(text: &str) -> Option<Self> {
        match text.strip_prefix(STREAM_WANTED) {
            Some(id) => id.parse().ok().map(Said::StreamWanted),
            None => text.parse().ok().map(Said::Changed),
        }
    }
}

impl Wakeups {
    /// What is said next; `None` once the connection is lost.
    ///
    /// # Cancel safety
    /// Cancel safe: nothing that is said is lost.
    pub(crate) async fn next(&mut self) -> Option<Said> {
        loop {
            let message = self.messages.next().await?;
            let payload: Option<String> = message.get_payload().ok();
            if let Some(said) = payload.and_then(|text| Said::read(&text)) {
                return Some(said);
            }
        }
    }
}

impl Store {
    pub(super) fn announce(&self, identity: Identity) -> Afterwards {
        Afterwards { command: self.publish(identity), whole: None }
    }

    fn publish(&self, identity: Identity) -> redis::Cmd {
        let mut command = redis::cmd("PUBLISH");
        command.arg(self.inner.keys.done(identity.shard())).arg(identity.to_string());
        command
    }

    /// Says that a job has changed, outside a script's own pipeline.
    pub(crate) async fn announce_now(&self, identity: Identity) -> Result<(), StoreError> {
        self.command(self.publish(identity)).await.map(drop)
    }

    /// Says that there are readers here for the stream of a job that runs elsewhere.
    #[cfg(feature = "gateway")]
    pub(crate) async fn want_stream(&self, job: JobId) -> Result<(), StoreError> {
        let mut command = redis::cmd("PUBLISH");
        command.arg(self.inner.keys.done(job.identity().shard())).arg(format!("{STREAM_WANTED}{job}"));
        self.command(command).await.map(drop)
    }

    /// Listens for wake-ups, on a connection of its own. In a cluster every node passes on what is published at any other.
    ///
    /// # Errors
    /// `NotExecuted` if it cannot connect; ask again later.
    pub async fn wakeups(&self) -> Result<Wakeups, StoreError> {
        let lost = |error: &dyn std::fmt::Display| StoreError::NotExecuted {
            code: Refusal::Connect,
            detail: format!("cannot subscribe: {error}"),
        };
        let channels: Vec<String> = (0..SHARDS).map(|shard| self.inner.keys.done(shard)).collect();
        let subscribe = async {
            let client = self.inner.nodes.client(&self.inner.dial).await?;
            let mut subscriber = client.get_async_pubsub().await.map_err(|error| lost(&error))?;
            subscriber.subscribe(channels).await.map_err(|error| lost(&error))?;
            Ok::<_, StoreError>(subscriber)
        };
        let within = self.inner.options.connect_timeout + self.inner.options.response_timeout;
        let subscriber = tokio::time::timeout(within, subscribe).await.map_err(|error| lost(&error))??;
        Ok(Wakeups { messages: subscriber.into_on_message().boxed() })
    }
}
