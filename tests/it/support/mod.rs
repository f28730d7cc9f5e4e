//! Starts real parts for tests, and puts jobs into a known state through real calls.
//!
//! `Redis` is a private server; `Given` is one job in it; `Call` is any call as plain data, for tables and for random tests.
//! Nothing here sleeps to let time pass: `Given::age` makes the data older.

mod call;
pub mod gateway;
mod given;
pub mod server;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onejob::job::JobState;
use onejob::provider::simulated::{Simulated, SimulatedOptions};
use onejob::store::{CancelMode, Script, Store, StoreOptions};
use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, RedisError, Value};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::OnceCell;

pub use call::{Answer, Call, First, Submission, payload, sent};
pub use given::{Given, ageing};
use server::{Server, as_cluster};

/// How long a condition may take to become true, on a machine that does much else.
pub const SOON: Duration = Duration::from_secs(20);
/// How long a lease of the tests runs.
pub const LEASE_MS: u64 = 60_000;
/// How long an attempt of a race runs before another may begin.
pub const RACE_AFTER_MS: u64 = 60_000;
/// How long "it never happened" is not believed.
pub const QUARANTINE_MS: u64 = 260_000;
/// How long input and result are kept.
pub const RETENTION_MS: u64 = 1_060_000;
/// How long a key lives from the end of its job.
pub const KEY_LIFE_MS: u64 = 2_060_000;

/// Waits until a condition holds.
pub async fn until(what: &str, holds: impl AsyncFnMut() -> bool) {
    until_within(SOON, what, holds).await;
}

/// Waits until a condition holds that may take so long.
pub async fn until_within(within: Duration, what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !holds().await {
        assert!(Instant::now() < deadline, "not within {within:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether this is a run in which each Redis is a cluster, and a test that means nothing there: it says why, and is left out.
/// docs/VERIFICATION.md lists them.
pub fn standalone_only(why: &str) -> bool {
    let left_out = as_cluster();
    if left_out {
        println!("left out: {why}");
    }
    left_out
}

/// A simulated provider with nothing special about it.
pub async fn simulated() -> Simulated {
    Simulated::start(SimulatedOptions::default()).await.expect("a provider")
}

/// A private Redis.
pub struct Redis {
    server: Server,
    connection: MultiplexedConnection,
    store: OnceCell<Store>,
    jobs: AtomicU32,
}

impl Redis {
    /// Starts one.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Starts one with more arguments for `redis-server`.
    pub async fn start_with(arguments: &[&str]) -> Self {
        Self::of(Server::start(arguments)).await
    }

    /// Starts one that is no cluster whatever the environment says: others can follow it, or it can follow them.
    pub async fn start_alone(arguments: &[&str]) -> Self {
        Self::of(Server::start_alone(arguments)).await
    }

    async fn of(server: Server) -> Self {
        let client = redis::Client::open(server.socket()).expect("a URL");
        let patience = Some(Duration::from_secs(10));
        let config = redis::AsyncConnectionConfig::new().set_connection_timeout(patience).set_response_timeout(patience);
        let connection = client.get_multiplexed_async_connection_with_config(&config).await.expect("a connection");
        Redis { server, connection, store: OnceCell::new(), jobs: AtomicU32::new(0) }
    }

    /// Its URL.
    pub fn url(&self) -> &str {
        self.server.url()
    }

    /// The URL of its socket, whatever it is: what stands between is put before that.
    pub fn socket(&self) -> &str {
        self.server.socket()
    }

    /// Its URL for another user.
    pub fn url_of(&self, user: &str, password: &str) -> String {
        self.server.url_of(user, password)
    }

    /// Options for a store in it, more patient than the defaults: the machine may be busy.
    pub fn options(&self) -> StoreOptions {
        let patience = Duration::from_secs(10);
        StoreOptions { connect_timeout: patience, response_timeout: patience, ..StoreOptions::new(self.url()) }
    }

    /// The store that the tests share.
    pub async fn store(&self) -> Store {
        let connect = || async { Store::connect(self.options()).await.expect("a store").0 };
        self.store.get_or_init(connect).await.clone()
    }

    /// Sends one raw command.
    pub async fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_command(words).await.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// Sends one raw command that may be refused.
    pub async fn try_command<T: FromRedisValue>(&self, words: &[&str]) -> Result<T, RedisError> {
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        command.query_async(&mut self.connection.clone()).await
    }

    /// The connection of its own, for commands with bytes in them.
    pub fn connection(&self) -> MultiplexedConnection {
        self.connection.clone()
    }

    /// Stops answering, without closing a connection.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Answers again.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.server.pid().try_into().expect("a pid")).expect("a pid");
        kill_process(pid, signal).expect("a process of ours");
    }

    /// Runs one script with raw arguments.
    pub async fn eval(&self, script: Script, keys: &[&str], arguments: &[&[u8]]) -> Result<Vec<Vec<u8>>, RedisError> {
        let mut command = redis::cmd("EVAL");
        command.arg(script.code()).arg(keys.len()).arg(keys);
        for argument in arguments {
            command.arg(*argument);
        }
        command.query_async(&mut self.connection.clone()).await
    }

    /// A connection that sees every command, those of scripts among them.
    pub async fn monitor(&self) -> redis::aio::Monitor {
        redis::Client::open(self.server.socket()).expect("a URL").get_async_monitor().await.expect("a monitor")
    }

    /// What a job would be claimed with, under a key that no other job of this server has.
    pub fn submission(&self) -> Submission {
        Submission::new(&format!("key-{}", self.jobs.fetch_add(1, Ordering::Relaxed)))
    }

    /// A job that is not there yet.
    pub async fn given_absent(&self, submission: Submission) -> Given {
        Given::new(self.store().await, self.connection.clone(), submission)
    }

    /// A job, claimed.
    pub async fn given(&self, submission: Submission) -> Given {
        let given = self.given_absent(submission).await;
        given.submit().await;
        given
    }

    /// A pending job that its submitter holds.
    pub async fn given_pending(&self) -> Given {
        self.given(self.submission()).await
    }

    /// A job whose one attempt has the slot.
    pub async fn given_starting(&self) -> Given {
        self.given(Submission { first: First::Starting, ..self.submission() }).await
    }

    /// A job whose one attempt may have touched its provider.
    pub async fn given_running(&self) -> Given {
        self.given(Submission { first: First::Running, ..self.submission() }).await
    }

    /// A job whose one attempt timed out.
    pub async fn given_unknown(&self) -> Given {
        let given = self.given_running().await;
        given.lose(1).await;
        given
    }

    /// A job whose one attempt runs while somebody asked to cancel it.
    pub async fn given_canceling(&self) -> Given {
        let given = self.given_running().await;
        given.cancel(CancelMode::Graceful).await;
        given
    }

    /// A job with a result, `b"done"`.
    pub async fn given_succeeded(&self) -> Given {
        let given = self.given_running().await;
        given.succeed(1, "done").await;
        given
    }

    /// A job whose one attempt was refused, and that was that.
    pub async fn given_failed(&self) -> Given {
        let given = self.given_running().await;
        given.fail(1).await;
        given
    }

    /// A job ended by force while its attempt ran.
    pub async fn given_canceled(&self) -> Given {
        let given = self.given_running().await;
        given.cancel(CancelMode::Force).await;
        given
    }

    /// A job of which nobody will ever know whether it happened.
    pub async fn given_indeterminate(&self) -> Given {
        let given = self.given_unknown().await;
        given.abandon(1).await;
        given
    }

    /// A job in a state, by the shortest way there.
    pub async fn given_in(&self, state: JobState) -> Given {
        let given = match state {
            JobState::Pending => self.given_pending().await,
            JobState::Running => self.given_running().await,
            JobState::Unknown => self.given_unknown().await,
            JobState::Canceling => self.given_canceling().await,
            JobState::Succeeded => self.given_succeeded().await,
            JobState::Failed => self.given_failed().await,
            JobState::Canceled => self.given_canceled().await,
            JobState::Indeterminate => self.given_indeterminate().await,
        };
        assert_eq!(given.job().await.state, state);
        given
    }

    /// A race with so many attempts, all running, each for long enough that another may begin.
    pub async fn given_race(&self, attempts: u32) -> Given {
        let submission = self.submission();
        let rules = onejob::job::Rules { race_max: attempts.max(2), attempts_max: attempts + 1, ..submission.rules };
        let class = onejob::job::Class::Race;
        let mut given =
            self.given(Submission { class, rules, first: First::Running, lease_ms: 20 * LEASE_MS, ..submission }).await;
        for _ in 1..attempts {
            given.age(RACE_AFTER_MS).await;
            given.begins(First::Running).await;
        }
        given.age(RACE_AFTER_MS).await;
        given
    }

    /// The names of all keys, sorted.
    pub async fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.command(&["KEYS", "*"]).await;
        keys.sort_unstable();
        keys
    }

    /// Every record and blob with its bytes and whether it expires; hints may dangle and are left out.
    pub async fn dump(&self) -> BTreeMap<String, (Vec<u8>, bool)> {
        let mut dump = BTreeMap::new();
        let hints = ["oj:due", "oj:unknown", "oj:meta"];
        for key in self.keys().await.into_iter().filter(|key| !hints.iter().any(|hint| key.starts_with(hint))) {
            let bytes: Vec<u8> = self.command(&["GET", &key]).await;
            let ttl: i64 = self.command(&["PTTL", &key]).await;
            dump.insert(key, (bytes, ttl >= 0));
        }
        dump
    }

    /// Sends one raw command and returns whatever came.
    pub async fn value(&self, words: &[&str]) -> Value {
        self.command(words).await
    }
}

/// Both kinds of streams of clicks, one after the other: in buckets, and mirrored. What is printed says with which one a test failed.
pub fn kinds() -> impl Iterator<Item = bool> {
    [false, true].into_iter().inspect(|mirrored| println!("mirrored: {mirrored}"))
}
