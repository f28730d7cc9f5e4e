//! Which kind of Redis stands behind a store, and what that means for a command: one server, or each to its node.

use std::fmt;
use std::sync::Arc;

use futures_util::FutureExt as _;
use redis::{Cmd, Pipeline, Value};

use crate::error::StoreError;
use crate::store::cluster::{Before, Cluster, at};
use crate::store::commit::{Commit, Durable};
use crate::store::lanes::{self, Lanes};
use crate::store::sentinel::Sentinels;
use crate::store::{By, retry};

/// What only a cluster or sentinels need is boxed: calls to one server carry none of it, and no type of a caller's grows by it.
pub(crate) enum Nodes {
    /// One server.
    One { lanes: Arc<Lanes>, commit: Option<Commit>, client: Box<redis::Client> },
    /// Whichever server sentinels name.
    Sentinel { lanes: Arc<Lanes>, commit: Option<Commit>, sentinels: Arc<Sentinels> },
    /// The masters of a cluster.
    Cluster(Arc<Cluster>),
}

/// The connection that replies came by.
#[derive(Clone)]
pub(crate) enum Came {
    Lane(lanes::Came),
    /// A lane that commits, and what it proved of them.
    Commit(Commit, Durable),
}

impl Came {
    /// Whether what came is as durable as the caller's handle requires.
    pub(crate) fn durable(&self) -> Durable {
        match self {
            Came::Lane(_) => Durable::Yes,
            Came::Commit(_, durable) => *durable,
        }
    }

    /// A reply came that answers somebody else's call.
    pub(crate) fn distrust(&self) {
        match self {
            Came::Lane(came) => came.distrust(),
            Came::Commit(commit, _) => commit.distrust(),
        }
    }

    /// A reader found itself on a replica.
    pub(crate) fn on_replica(&self) {
        match self {
            Came::Lane(came) => came.on_replica(),
            Came::Commit(commit, _) => commit.distrust(),
        }
    }
}

/// Which kind of Redis it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One server.
    One,
    /// The master of this name, as sentinels know it.
    Sentinel {
        /// Its name.
        service: String,
    },
    /// A cluster.
    Cluster {
        /// How many of its masters have slots.
        masters: usize,
    },
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::One => f.write_str("one server"),
            Kind::Sentinel { service } => write!(f, "the master that sentinels call {service}"),
            Kind::Cluster { masters: 1 } => f.write_str("a cluster of 1 master"),
            Kind::Cluster { masters } => write!(f, "a cluster of {masters} masters"),
        }
    }
}

/// Some of the masters: each where there are more than one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Master {
    /// The only one.
    Only,
    /// One of a cluster's, by its address.
    At(Arc<str>),
}

impl Nodes {
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Nodes::One { .. } => Kind::One,
            Nodes::Sentinel { sentinels, .. } => Kind::Sentinel { service: sentinels.service().to_owned() },
            Nodes::Cluster(cluster) => Kind::Cluster { masters: cluster.masters().len() },
        }
    }

    /// Whether there may be several masters, so that one may be away while others serve.
    pub(crate) fn are_many(&self) -> bool {
        matches!(self, Nodes::Cluster(_))
    }

    /// Every master, in the same order for whoever asks.
    pub(crate) fn masters(&self) -> Vec<Master> {
        match self {
            Nodes::One { .. } | Nodes::Sentinel { .. } => vec![Master::Only],
            Nodes::Cluster(cluster) => cluster.masters().into_iter().map(Master::At).collect(),
        }
    }

    /// Every master with its address; none of a single server's.
    pub(crate) fn addresses(&self) -> Vec<(Master, Option<Arc<str>>)> {
        match self {
            Nodes::One { .. } => vec![(Master::Only, None)],
            Nodes::Sentinel { sentinels, .. } => vec![(Master::Only, sentinels.named_last())],
            Nodes::Cluster(cluster) => {
                cluster.masters().into_iter().map(|node| (Master::At(Arc::clone(&node)), Some(node))).collect()
            }
        }
    }

    /// The master of a key; `None` if the map has none.
    pub(crate) fn master_of(&self, key: &[u8]) -> Option<Master> {
        match self {
            Nodes::One { .. } | Nodes::Sentinel { .. } => Some(Master::Only),
            Nodes::Cluster(cluster) => cluster.master_of(key).map(Master::At),
        }
    }

    /// Whether a server that is no master may answer a read: in a cluster it sends us on.
    pub(crate) fn may_answer_as_replica(&self) -> bool {
        match self {
            Nodes::One { .. } | Nodes::Sentinel { .. } => true,
            Nodes::Cluster(_) => false,
        }
    }

    /// Sends a command to one master; an error of Redis is an error.
    pub(crate) async fn on(&self, master: &Master, command: Cmd) -> Result<Value, StoreError> {
        match (self, master) {
            (Nodes::Cluster(cluster), Master::At(node)) => cluster.on(node, &command).boxed().await,
            _ => match self.send(vec![command], By::Lanes).await?.swap_remove(0) {
                Value::ServerError(error) => Err(retry::of_server(&error)),
                value => Ok(value),
            },
        }
    }

    /// Sends commands that do not depend on each other unless they are of one key; an error of Redis is a value.
    pub(crate) async fn send(&self, commands: Vec<Cmd>, by: By) -> Result<Vec<Value>, StoreError> {
        match self {
            Nodes::One { lanes, commit, .. } => in_one(lanes, commit.as_ref(), commands, by).await.map(|(values, _)| values),
            Nodes::Sentinel { lanes, commit, sentinels } => {
                named(sentinels, in_one(lanes, commit.as_ref(), commands, by).await).map(|(values, _)| values)
            }
            Nodes::Cluster(cluster) => cluster.send(&commands, by).boxed().await,
        }
    }

    /// The same, and an error for each command that brought no answer.
    pub(crate) async fn send_each(&self, commands: Vec<Cmd>, by: By) -> Vec<Result<Value, StoreError>> {
        let count = commands.len();
        match self {
            Nodes::One { .. } | Nodes::Sentinel { .. } => match self.send(commands, by).await {
                Ok(values) => values.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error); count],
            },
            Nodes::Cluster(cluster) => cluster.send_each(&commands, by).boxed().await,
        }
    }

    /// Sends commands of which one is the `main` one: what stands before it is done before it. By which way its reply came.
    pub(crate) async fn send_around(
        &self,
        commands: Vec<Cmd>,
        main: usize,
        before: Before,
        by: By,
    ) -> Result<(Vec<Value>, Came), StoreError> {
        match self {
            Nodes::One { lanes, commit, .. } => in_one(lanes, commit.as_ref(), commands, by).await,
            Nodes::Sentinel { lanes, commit, sentinels } => named(sentinels, in_one(lanes, commit.as_ref(), commands, by).await),
            Nodes::Cluster(cluster) => cluster.send_around(&commands, main, before, by).boxed().await,
        }
    }

    /// A client for a connection of its own, to a server by which every message comes.
    pub(crate) async fn client(&self, dial: &crate::store::dial::Dial) -> Result<redis::Client, StoreError> {
        match self {
            Nodes::One { client, .. } => Ok(redis::Client::clone(client)),
            Nodes::Sentinel { sentinels, .. } => dial.client(&Box::pin(sentinels.url()).await?),
            Nodes::Cluster(cluster) => dial.client(&cluster.some_url()),
        }
    }

    /// Looks whether the master is another one, of which no connection told.
    pub(crate) async fn look_again(&self) {
        if let Nodes::Sentinel { lanes, .. } = self {
            Box::pin(lanes.look_again()).await;
        }
    }

    /// Makes no connection any more.
    pub(crate) fn close(&self) {
        match self {
            Nodes::One { lanes, .. } | Nodes::Sentinel { lanes, .. } => lanes.close(),
            Nodes::Cluster(_) => {}
        }
    }
}

type Sent = Result<(Vec<Value>, Came), StoreError>;

/// The same, with the master's address in what it refused.
fn named(sentinels: &Sentinels, sent: Sent) -> Sent {
    let Some(address) = sentinels.named_last() else { return sent };
    let (values, came) = sent.map_err(|error| at(&address, error))?;
    let value = |value| match value {
        Value::ServerError(error) => retry::told_by(&address, &error),
        value => value,
    };
    Ok((values.into_iter().map(value).collect(), came))
}

/// Sends commands to one server by one of the two ways.
pub(super) async fn in_one(lanes: &Arc<Lanes>, commit: Option<&Commit>, commands: Vec<Cmd>, by: By) -> Sent {
    if let (By::Commit, Some(commit)) = (by, commit) {
        return commit.send(commands).await;
    }
    let replies = commands.len();
    let mut pipeline = Pipeline::with_capacity(replies);
    for command in commands {
        pipeline.add_command(command);
    }
    lanes.send(&pipeline, replies).await.map(|(values, came)| (values, Came::Lane(came)))
}
