//! A store in a private Redis, for the unit tests of what is not public. Everything public is tested in `tests/it`.

use redis::FromRedisValue;

use crate::attempt::AttemptToken;
use crate::fingerprint::{digest, second_half, sha256};
use crate::job::{Class, Identity, JobId, Owner, Payload, Rules};
use crate::store::{Begin, Store, StoreOptions, SubmitJob, Submitted};

#[expect(dead_code, reason = "the tests outside also send signals to its process, and are other users")]
#[path = "../../tests/it/support/server.rs"]
mod server;

/// How long a key of these tests lives from the end of its job: longer than the grace of a blob.
pub(crate) const KEY_LIFE_MS: u64 = 86_400_000;
/// How long a lease of these tests runs.
pub(crate) const LEASE_MS: u64 = 60_000;

pub(crate) struct Fixture {
    pub(crate) store: Store,
    connection: redis::aio::MultiplexedConnection,
    _server: server::Server,
}

impl Fixture {
    pub(crate) async fn start() -> Self {
        let server = server::Server::start(&[]);
        let patience = std::time::Duration::from_secs(10);
        let options = StoreOptions { connect_timeout: patience, response_timeout: patience, ..StoreOptions::new(server.url()) };
        let (store, _) = Store::connect(options).await.expect("a store");
        let client = redis::Client::open(server.socket()).expect("a URL");
        let connection = client.get_multiplexed_async_connection().await.expect("a connection");
        Fixture { store, connection, _server: server }
    }

    /// Sends one raw command.
    pub(crate) async fn query<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        command.query_async(&mut self.connection.clone()).await.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub(crate) fn identity(&self, key: &str) -> Identity {
        Identity::of(&digest("shop", key))
    }

    /// Claims a free key.
    pub(crate) async fn submit(&self, key: &str, token: AttemptToken, input: &Payload, begin: Begin<'_>) -> JobId {
        let submit = SubmitJob {
            id: JobId::new(1_795_000_000_000, self.identity(key)),
            digest: second_half(&digest("shop", key)),
            fingerprint: second_half(&sha256(key.as_bytes())),
            owner: &Owner::new("shop").expect("an owner"),
            route: "print",
            class: Class::Exclusive,
            deadline_ms: 0,
            rules: Rules {
                attempts_max: 3,
                race_max: 1,
                race_after_ms: 0,
                key_life_ms: KEY_LIFE_MS,
                retention_ms: KEY_LIFE_MS,
                releases_on_failure: false,
                quarantine_ms: 0,
            },
            input,
            token,
            lease_ms: LEASE_MS,
            hint_ms: self.store.now_ms() + LEASE_MS,
            gateway: "gateway-1",
            begin,
        };
        match self.store.submit_job(&submit).await.expect("a reply") {
            Submitted::Created { id, .. } => id,
            other => panic!("{other:?}"),
        }
    }
}
