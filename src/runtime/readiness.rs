//! Whether new work could be begun now, for whoever asks; and a look at it now and then where nobody does.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{StoreError, Want};
use crate::policy::Effects;
use crate::runtime::{Inner, Runtime};
use crate::store::{Durability, Durable};

/// How often a write is tried though nobody submits or asks: a level that does not hold is told before the next job meets it.
const TRY: Duration = Duration::from_secs(5);

/// Why no new job could be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    /// This gateway is stopping.
    #[error("this gateway is stopping")]
    Stopping,
    /// What a submit would meet.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Work with effects would not be begun: what is written is not as durable as `redis.durability` says.
    #[error("not durable{}: {have} of {want} have it", node.as_ref().map(|node| format!(" at {node}")).unwrap_or_default())]
    NotDurable {
        /// At which master; `None` for the one server of a URL.
        node: Option<String>,
        /// How many replicas have it, or whether the disk does.
        have: u32,
        /// Who must.
        want: Want,
    },
}

impl Runtime {
    /// Whether a new job could be taken now: a script that writes is run, not a `PING`; and where a route's work changes the world, a
    /// write must become as durable as is required, at every master.
    ///
    /// # Errors
    /// What a submit would meet.
    pub async fn ready(&self) -> Result<(), NotReady> {
        if self.inner.stopping.is_cancelled() {
            return Err(NotReady::Stopping);
        }
        self.inner.store.canary().await?;
        if !needs_commits(&self.inner) {
            return Ok(());
        }
        for tried in self.inner.store.try_commits().await {
            if let Durable::Short { have, want } = tried.outcome? {
                return Err(NotReady::NotDurable { node: tried.node, have, want });
            }
        }
        Ok(())
    }
}

/// Whether some of its work is begun only once its write-ahead is durable.
pub(super) fn needs_commits(runtime: &Inner) -> bool {
    runtime.store.durability() != Durability::Memory && runtime.routes.values().any(|route| route.effects == Effects::External)
}

/// Tries now and then. The lanes themselves tell what they find, each when it begins and when it ends.
pub(super) async fn run(runtime: Arc<Inner>) {
    loop {
        tokio::select! {
            () = runtime.stopped.cancelled() => return,
            () = async {
                tokio::time::sleep(TRY).await;
                runtime.store.try_commits().await;
            } => {}
        }
    }
}
