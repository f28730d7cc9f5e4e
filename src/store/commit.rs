//! The commit lane: calls whose writes must survive more than one server's memory before anybody hears of them.
//!
//! `WAIT` counts only what its own connection wrote, and blocks whatever comes behind it. So calls that must be durable share one
//! connection of their own: the scripts of all that are there, then one `WAIT` for all of them, in one pipeline; whoever comes
//! meanwhile is in the next batch. A connection that breaks takes the proof with it: the same calls are made again on the next one,
//! with the same tokens, and waited for there. A `WAIT` by itself on a new connection would say yes to what a new master never had.
//!
//! A call that changed nothing may tell what another one wrote, so each batch ends with a write of its own (the *fence*): what stands
//! before it in the stream of replication is where the fence is.
//!
//! There is one lane for each master, and a call is waited for by the one that executed it: a node that sends a call on (`MOVED`,
//! `ASK`) proves nothing of it. The lane of a master that sentinels name is built anew as soon as they name another one.
//!
//! Deliberately not here: when a call must be durable (`runtime/`). At the level `memory` there is no such lane.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, Cmd, Pipeline, Value};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::error::{Refusal, StoreError, Want};
use crate::metrics;
use crate::store::nodes::Came;
use crate::store::retry;
use crate::store::sentinel::Sentinels;
use crate::store::slots::{key_of, tag};

/// Most calls in one batch: Redis runs them one after the other before anybody else's.
const COMMIT_BATCH_MAX: usize = 256;
/// Most calls that wait for the next batches; more are refused at once, as by a store that is away.
const COMMIT_QUEUE_MAX: usize = 4096;
/// How old the word of Redis about its settings may be, where they are the proof.
const SETTINGS_AGE: Duration = Duration::from_secs(1);
/// The fence: a write also to a Redis that is out of memory, whose key stands for a minute.
const FENCE: &str = "#!lua flags=allow-oom\nredis.call('SET', KEYS[1], '', 'PX', 60000)";
/// The first Redis that has `WAITAOF`.
const WAITAOF_VERSION: (u32, u32) = (7, 2);

/// What a write must have survived before it counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The memory of one server: nothing is promised across a failover or a crash of Redis.
    #[default]
    Memory,
    /// The append-only file, on the disk of one server.
    Fsync,
    /// The memory of so many replicas beside the master's, 1 or more.
    Replicated(u32),
}

impl Durability {
    /// As it is written in the configuration.
    pub fn describe(self) -> String {
        match self {
            Durability::Memory => "memory".to_owned(),
            Durability::Fsync => "fsync".to_owned(),
            Durability::Replicated(replicas) => format!("{{ replicated = {replicas} }}"),
        }
    }
}

/// Whether what a reply tells is as durable as is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durable {
    /// It is, or nothing is required.
    Yes,
    /// It happened, and too few have it: it may yet be lost.
    Short {
        /// How many replicas have it, or whether the disk does.
        have: u32,
        /// Who must.
        want: Want,
    },
}

impl Durable {
    /// The value, or that it is not durable.
    pub(crate) fn settle<T>(self, value: T) -> Result<T, StoreError> {
        match self {
            Durable::Yes => Ok(value),
            Durable::Short { have, want } => Err(StoreError::NotDurable { have, want }),
        }
    }
}

/// The way to a commit lane. All clones lead to the same one.
#[derive(Clone)]
pub(crate) struct Commit {
    queue: mpsc::Sender<Ask>,
    deadline: Duration,
    distrusted: Arc<AtomicBool>,
}

struct Ask {
    commands: Vec<Cmd>,
    reply: oneshot::Sender<Result<(Vec<Value>, Durable), StoreError>>,
}

/// The server that a commit lane leads to.
pub(super) enum Leads {
    /// This one; its address, where there are others.
    To { client: Box<Client>, node: Option<Arc<str>> },
    /// Whichever sentinels name.
    ToNamed(Arc<Sentinels>),
}

/// What the key of the fence is called.
#[derive(Clone)]
pub(super) enum Fence {
    /// So.
    One(String),
    /// So, and it is in the slot of a call of its batch: a node of a cluster takes no other.
    InSlot(String),
}

/// How a commit lane is to work.
#[derive(Clone)]
pub(super) struct CommitOptions {
    pub(super) durability: Durability,
    /// How long replicas or the disk may take for one batch.
    pub(super) timeout: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) fence: Fence,
}

impl CommitOptions {
    /// How long one batch may take from the moment it is sent.
    pub(super) fn batch(&self) -> Duration {
        self.timeout + self.response_timeout + self.response_timeout / 2
    }

    /// How long a call may take at most: the batch before it, a new connection, its own batch.
    pub(super) fn deadline(&self) -> Duration {
        self.batch() * 2 + self.connect_timeout
    }
}

impl Commit {
    /// The way to a lane, and the lane, to be run by a task of its own.
    pub(super) fn new(leads: Leads, options: CommitOptions) -> (Self, CommitLane) {
        let (queue, asks) = mpsc::channel(COMMIT_QUEUE_MAX);
        let distrusted = Arc::new(AtomicBool::new(false));
        let commit = Commit { queue, deadline: options.deadline(), distrusted: Arc::clone(&distrusted) };
        (commit, CommitLane { leads, options, asks, distrusted, held: None, short: false })
    }

    /// Sends commands with the next batch.
    ///
    /// # Errors
    /// `NotExecuted` if they were not sent, `Ambiguous` if their replies did not come.
    pub(super) async fn send(&self, commands: Vec<Cmd>) -> Result<(Vec<Value>, Came), StoreError> {
        let (reply, told) = oneshot::channel();
        self.queue.try_send(Ask { commands, reply }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                let detail = format!("{COMMIT_QUEUE_MAX} calls wait to be committed already");
                StoreError::NotExecuted { code: Refusal::Busy, detail }
            }
            mpsc::error::TrySendError::Closed(_) => {
                StoreError::NotExecuted { code: Refusal::Connect, detail: "the commit lane is closed".to_owned() }
            }
        })?;
        match tokio::time::timeout(self.deadline, told).await {
            Ok(Ok(committed)) => committed.map(|(values, durable)| (values, Came::Commit(self.clone(), durable))),
            Ok(Err(_)) => Err(StoreError::Ambiguous { detail: "the commit lane was closed".to_owned() }),
            Err(_) => Err(StoreError::Ambiguous { detail: format!("not committed within {:?}", self.deadline) }),
        }
    }

    /// What came by the connection is not to be believed, or is not the master's: the next batch has another one.
    pub(super) fn distrust(&self) {
        self.distrusted.store(true, Ordering::Relaxed);
    }
}

/// The connection that commits.
pub(super) struct CommitLane {
    leads: Leads,
    options: CommitOptions,
    asks: mpsc::Receiver<Ask>,
    distrusted: Arc<AtomicBool>,
    held: Option<Held>,
    /// Whether the last batch fell short, which has been said.
    short: bool,
}

struct Held {
    connection: MultiplexedConnection,
    /// The how manieth server it leads to, where sentinels name it.
    server: u64,
    proof: Proof,
}

/// What shows that a batch is durable.
enum Proof {
    /// `WAIT`: the count of replicas.
    Wait { replicas: u32 },
    /// `WAITAOF`.
    WaitAof,
    /// Redis answers only after its file is on disk, as long as its settings say so. When they were read last, and what they said.
    Settings { read: Instant, hold: bool },
}

impl CommitLane {
    /// Commits batch after batch, until the store is closed.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                came = self.asks.recv_many(&mut batch, COMMIT_BATCH_MAX) => {
                    if came == 0 {
                        return;
                    }
                }
            }
            // Whoever has given up makes the same call again: it need not be made twice.
            batch.retain(|ask: &Ask| !ask.reply.is_closed());
            if batch.is_empty() {
                continue;
            }
            let elsewhere = self.held.as_ref().is_some_and(|held| held.server != self.leads.server());
            if self.distrusted.swap(false, Ordering::Relaxed) || elsewhere {
                self.held = None;
            }
            match self.commit(&batch).await {
                Ok((values, durable)) => {
                    metrics::commit(match durable {
                        Durable::Yes => "durable",
                        Durable::Short { .. } => "short",
                    });
                    self.tell(durable);
                    let mut values = values.into_iter();
                    for ask in batch.drain(..) {
                        let values = values.by_ref().take(ask.commands.len()).collect();
                        let _ = ask.reply.send(Ok((values, durable)));
                    }
                }
                Err(error) => {
                    metrics::commit("error");
                    self.held = None;
                    for ask in batch.drain(..) {
                        let _ = ask.reply.send(Err(error.clone()));
                    }
                }
            }
        }
    }

    /// Says that commits begin to fall short, and that they do no more: once each.
    fn tell(&mut self, durable: Durable) {
        let (node, level) = (self.leads.node(), self.options.durability.describe());
        let node = node.as_deref();
        match durable {
            Durable::Short { have, want } if !self.short => {
                tracing::warn!(
                    node,
                    level,
                    have,
                    want = want.count(),
                    "writes are not durable here: work with effects is not begun, no ending is told"
                );
            }
            Durable::Yes if self.short => tracing::info!(node, level, "writes are durable here again"),
            Durable::Short { .. } | Durable::Yes => {}
        }
        self.short = durable != Durable::Yes;
    }

    /// Sends one batch with its fence and its proof.
    async fn commit(&mut self, batch: &[Ask]) -> Result<(Vec<Value>, Durable), StoreError> {
        if self.held.is_none() {
            self.held = Some(self.connect().await?);
        }
        let within = self.options.batch();
        let held = self.held.as_mut().expect("it was connected just now");
        let mut pipeline = Pipeline::new();
        let commands = batch.iter().flat_map(|ask| &ask.commands);
        let scripts = commands.clone().count();
        for command in commands {
            pipeline.add_command(command.clone());
        }
        let proofs = held.proof.commands(&self.options, batch);
        let replies = scripts + proofs.len();
        for command in proofs {
            pipeline.add_command(command);
        }
        let sent = held.connection.req_packed_commands(&pipeline, 0, replies);
        let mut values = match tokio::time::timeout(within, sent).await {
            Ok(Ok(values)) => values,
            Ok(Err(error)) => return Err(retry::of_connection(&error)),
            Err(_) => return Err(StoreError::Ambiguous { detail: format!("not committed within {within:?}") }),
        };
        let proofs = values.split_off(scripts);
        let durable = held.proof.read(&proofs);
        if values.iter().chain(&proofs).any(is_readonly) {
            // It is no master any more.
            self.held = None;
        }
        Ok((values, durable))
    }

    async fn connect(&self) -> Result<Held, StoreError> {
        let not_yet = |detail: String| StoreError::NotExecuted { code: Refusal::Connect, detail };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.options.connect_timeout))
            // The batch has a deadline of its own.
            .set_response_timeout(None);
        let connecting = async {
            match &self.leads {
                Leads::To { client, .. } => {
                    let connection = client.get_multiplexed_async_connection_with_config(&config).await;
                    connection.map(|connection| (connection, 0)).map_err(|error| not_yet(error.to_string()))
                }
                Leads::ToNamed(sentinels) => sentinels.connect(&config).await,
            }
        };
        let (mut connection, server) = match tokio::time::timeout(self.options.connect_timeout, connecting).await {
            Ok(connected) => connected?,
            Err(_) => return Err(not_yet(format!("no connection within {:?}", self.options.connect_timeout))),
        };
        let proof = match self.options.durability {
            Durability::Replicated(replicas) => Proof::Wait { replicas },
            Durability::Memory | Durability::Fsync => {
                let mut pipeline = Pipeline::new();
                pipeline.cmd("INFO").arg("server").add_command(settings());
                let asked = connection.req_packed_commands(&pipeline, 0, 2);
                let values = match tokio::time::timeout(self.options.batch(), asked).await {
                    Ok(Ok(values)) => values,
                    Ok(Err(error)) => return Err(not_yet(error.to_string())),
                    Err(_) => return Err(not_yet("it does not say how it persists".to_owned())),
                };
                if version_in(&values[0]).is_some_and(|version| has_waitaof(&version)) {
                    Proof::WaitAof
                } else {
                    Proof::Settings { read: Instant::now(), hold: values.get(1).is_some_and(answers_after_fsync) }
                }
            }
        };
        tracing::debug!("a commit lane stands");
        Ok(Held { connection, server, proof })
    }
}

impl Leads {
    /// The how manieth server it is, as far as anybody has asked.
    fn server(&self) -> u64 {
        match self {
            Leads::To { .. } => 0,
            Leads::ToNamed(sentinels) => sentinels.known_server(),
        }
    }

    /// Its address, where there may be others.
    fn node(&self) -> Option<Arc<str>> {
        match self {
            Leads::To { node, .. } => node.clone(),
            Leads::ToNamed(sentinels) => sentinels.named_last(),
        }
    }
}

impl Fence {
    /// A write of its own, since a wait counts from the last one of its connection. In a cluster a message would be none: newer
    /// servers pass it on beside the replication.
    fn write(&self, batch: &[Ask]) -> Vec<Cmd> {
        let (key, asking) = self.key(batch);
        let mut fence = redis::cmd("EVAL");
        fence.arg(FENCE).arg(1).arg(key);
        if asking { vec![redis::cmd("ASKING"), fence] } else { vec![fence] }
    }

    /// The key, and whether its slot is being moved to this server, so that it takes it only when asked to (`ASKING`).
    fn key(&self, batch: &[Ask]) -> (Vec<u8>, bool) {
        let (Fence::One(name) | Fence::InSlot(name)) = self;
        let name = name.as_bytes().to_vec();
        let Fence::InSlot(_) = self else { return (name, false) };
        let mut before = None;
        for command in batch.iter().flat_map(|ask| &ask.commands) {
            if let Some(key) = key_of(command) {
                return ([&name[..], b":{", tag(key), b"}"].concat(), before.is_some_and(is_asking));
            }
            before = Some(command);
        }
        (name, false)
    }
}

fn is_asking(command: &Cmd) -> bool {
    matches!(command.args_iter().next(), Some(redis::Arg::Simple(b"ASKING")))
}

impl Proof {
    /// What follows a batch: the last two are the fence and the wait, where there is one.
    fn commands(&self, options: &CommitOptions, batch: &[Ask]) -> Vec<Cmd> {
        let timeout_ms = u64::try_from(options.timeout.as_millis()).unwrap_or(u64::MAX);
        match self {
            Proof::Wait { replicas } => {
                let (mut commands, mut wait) = (options.fence.write(batch), redis::cmd("WAIT"));
                wait.arg(*replicas).arg(timeout_ms);
                commands.push(wait);
                commands
            }
            Proof::WaitAof => {
                let (mut commands, mut wait) = (options.fence.write(batch), redis::cmd("WAITAOF"));
                wait.arg(1).arg(0).arg(timeout_ms);
                commands.push(wait);
                commands
            }
            Proof::Settings { read, hold } if *hold && read.elapsed() < SETTINGS_AGE => Vec::new(),
            Proof::Settings { .. } => vec![settings()],
        }
    }

    /// What the answers to them prove.
    fn read(&mut self, answers: &[Value]) -> Durable {
        let count = |value: Option<&Value>| match value {
            Some(Value::Int(count)) => u32::try_from(*count).unwrap_or(0),
            _ => 0,
        };
        let (fenced, wait) = match answers {
            [.., fence, wait] => (!matches!(fence, Value::ServerError(_)), Some(wait)),
            _ => (false, None),
        };
        let (have, want) = match self {
            Proof::Wait { replicas } => (if fenced { count(wait) } else { 0 }, Want::Replicas(*replicas)),
            Proof::WaitAof => match wait {
                Some(Value::Array(counts)) if fenced => (count(counts.first()), Want::Disk),
                _ => (0, Want::Disk),
            },
            Proof::Settings { read, hold } => {
                if let Some(settings) = answers.first() {
                    (*read, *hold) = (Instant::now(), answers_after_fsync(settings));
                }
                (u32::from(*hold), Want::Disk)
            }
        };
        if have >= want.count() { Durable::Yes } else { Durable::Short { have, want } }
    }
}

fn settings() -> Cmd {
    let mut get = redis::cmd("CONFIG");
    get.arg("GET").arg("appendonly").arg("appendfsync").arg("no-appendfsync-on-rewrite");
    get
}

/// Whether a Redis with these settings answers only after what it says is on its disk.
fn answers_after_fsync(settings: &Value) -> bool {
    let Ok(settings) = redis::from_redis_value_ref::<HashMap<String, String>>(settings) else { return false };
    let is = |name: &str, value: &str| settings.get(name).is_some_and(|found| found == value);
    is("appendonly", "yes") && is("appendfsync", "always") && is("no-appendfsync-on-rewrite", "no")
}

/// The version that `INFO` tells.
fn version_in(info: &Value) -> Option<String> {
    let text = match info {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::VerbatimString { text, .. } => text.clone(),
        _ => return None,
    };
    text.lines().find_map(|line| line.strip_prefix("redis_version:")).map(|version| version.trim().to_owned())
}

/// Whether a Redis of that version has `WAITAOF`.
pub(super) fn has_waitaof(version: &str) -> bool {
    let mut parts = version.split('.').map_while(|part| part.parse::<u32>().ok());
    matches!((parts.next(), parts.next()), (Some(major), Some(minor)) if (major, minor) >= WAITAOF_VERSION)
}

fn is_readonly(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if matches!(error.code(), "READONLY" | "UNBLOCKED"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_answers_before_the_disk_has_it_is_no_proof() {
        let settings = |values: [&str; 3]| {
            let names = ["appendonly", "appendfsync", "no-appendfsync-on-rewrite"];
            let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
            Value::Array(names.iter().zip(values).flat_map(|(name, value)| [text(name), text(value)]).collect())
        };
        assert!(answers_after_fsync(&settings(["yes", "always", "no"])));
        for short in [["no", "always", "no"], ["yes", "everysec", "no"], ["yes", "always", "yes"]] {
            assert!(!answers_after_fsync(&settings(short)), "{short:?}");
        }
        assert!(!answers_after_fsync(&Value::Nil), "what it does not say is no proof");
    }

    #[test]
    fn waitaof_is_used_from_the_version_that_has_it() {
        assert!(["7.2.0", "7.10.1", "8.0.2"].iter().all(|version| has_waitaof(version)));
        assert!(["7.0.15", "6.2.0", ""].iter().all(|version| !has_waitaof(version)));
        let info = Value::BulkString(b"# Server\r\nredis_version:7.2.4\r\nx:y\r\n".to_vec());
        assert_eq!(version_in(&info).as_deref(), Some("7.2.4"));
    }

    #[test]
    fn a_count_below_the_wanted_one_is_short() {
        let mut wait = Proof::Wait { replicas: 2 };
        assert_eq!(wait.read(&[Value::Int(0), Value::Int(1)]), Durable::Short { have: 1, want: Want::Replicas(2) });
        assert_eq!(wait.read(&[Value::Int(0), Value::Int(2)]), Durable::Yes);
        assert_eq!(wait.read(&[]), Durable::Short { have: 0, want: Want::Replicas(2) });
        let mut aof = Proof::WaitAof;
        assert_eq!(
            aof.read(&[Value::Okay, Value::Array(vec![Value::Int(0), Value::Int(0)])]),
            Durable::Short { have: 0, want: Want::Disk }
        );
        assert_eq!(aof.read(&[Value::Okay, Value::Array(vec![Value::Int(1), Value::Int(0)])]), Durable::Yes);
    }
}
