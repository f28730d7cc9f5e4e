//! How connections are made: the same settings for every node, and a deadline on each.

use std::time::Duration;

use deadpool_redis::{Connection, Manager, Pool, PoolError, Runtime};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ConnectionInfo, ErrorKind, IntoConnectionInfo as _, RedisError};

use crate::error::{Refusal, StoreError};
use crate::place::without_credentials;
use crate::policy::TCP_USER_TIMEOUT;
use crate::store::StoreOptions;

/// The settings of every connection.
#[derive(Clone)]
pub(crate) struct Dial {
    pool_max: usize,
    connect_timeout: Duration,
    response_timeout: Duration,
}

impl Dial {
    pub(crate) fn new(options: &StoreOptions) -> Self {
        let StoreOptions { pool_max, connect_timeout, response_timeout, .. } = *options;
        Dial { pool_max, connect_timeout, response_timeout }
    }

    fn info(&self, url: &str) -> Result<ConnectionInfo, StoreError> {
        let tcp = redis::io::tcp::TcpSettings::default()
            .set_nodelay(true)
            .set_user_timeout(TCP_USER_TIMEOUT)
            .set_keepalive(redis::io::tcp::socket2::TcpKeepalive::new().with_time(Duration::from_secs(30)));
        let info = url.into_connection_info().map_err(|error| StoreError::fatal("BADURL", format!("redis.url: {error}")))?;
        Ok(info.set_tcp_settings(tcp))
    }

    fn config(&self) -> AsyncConnectionConfig {
        AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(Some(self.response_timeout))
    }

    /// A pool of connections to one server. Opens none yet.
    pub(crate) fn pool(&self, url: &str) -> Result<Pool, StoreError> {
        let manager = Manager::new_with_config(self.info(url)?, self.config()).map_err(|error| cannot(url, &error))?;
        Pool::builder(manager)
            .max_size(self.pool_max)
            .wait_timeout(Some(self.connect_timeout))
            .create_timeout(Some(self.connect_timeout))
            .recycle_timeout(Some(self.response_timeout))
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|error| cannot(url, &error))
    }

    /// A client of one server, for connections that the pool has none of.
    pub(crate) fn client(&self, url: &str) -> Result<redis::Client, StoreError> {
        redis::Client::open(self.info(url)?).map_err(|error| cannot(url, &error))
    }

    /// Asks one server one thing, on a connection of its own.
    pub(crate) async fn ask<T: redis::FromRedisValue>(
        &self,
        url: &str,
        whom: Whom,
        command: redis::Cmd,
    ) -> Result<T, StoreError> {
        let client = self.client(url)?;
        let asked = async {
            let mut connection = client.get_multiplexed_async_connection_with_config(&self.config()).await?;
            command.query_async(&mut connection).await
        };
        match tokio::time::timeout(self.connect_timeout + self.response_timeout, asked).await {
            Ok(answer) => answer.map_err(|error| whom.cannot(url, &in_our_words(&error, whom))),
            Err(elapsed) => Err(whom.cannot(url, &elapsed)),
        }
    }
}

/// A connection of a pool, for good.
pub(crate) async fn take(pool: &Pool) -> Result<MultiplexedConnection, StoreError> {
    let detail = |error| match &error {
        PoolError::Backend(error) => in_our_words(error, Whom::Node),
        other => other.to_string(),
    };
    let taken = pool.get().await.map_err(|error| StoreError::NotExecuted { code: Refusal::Connect, detail: detail(error) });
    taken.map(Connection::take)
}

pub(crate) fn cannot(url: &str, error: &dyn std::fmt::Display) -> StoreError {
    Whom::Node.cannot(url, error)
}

/// Who is asked: each has credentials of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whom {
    Node,
    Sentinel,
}

impl Whom {
    pub(crate) fn wants_a_password(self) -> &'static str {
        match self {
            Whom::Node => "it requires a password (NOAUTH): USER:PASSWORD@ before the address in redis.url",
            Whom::Sentinel => "it requires a password (NOAUTH): sentinel_pass=… in the query of redis.url",
        }
    }

    fn cannot(self, url: &str, error: &dyn std::fmt::Display) -> StoreError {
        let (url, who) = (
            without_credentials(url),
            match self {
                Whom::Node => "connect to redis",
                Whom::Sentinel => "ask the sentinel",
            },
        );
        StoreError::NotExecuted { code: Refusal::Connect, detail: format!("cannot {who} at {url}: {error}") }
    }
}

/// The error of a connection: where it is about who we are, which part of the URL says that.
pub(crate) fn in_our_words(error: &RedisError, whom: Whom) -> String {
    let is_wrong = error.kind() == ErrorKind::AuthenticationFailed || error.code() == Some("WRONGPASS");
    let words = match whom {
        _ if error.code() == Some("NOAUTH") => whom.wants_a_password(),
        Whom::Node if is_wrong => "it refuses the user and password that stand before the address in redis.url (WRONGPASS)",
        Whom::Sentinel if is_wrong => "it refuses sentinel_user and sentinel_pass of redis.url (WRONGPASS)",
        Whom::Node | Whom::Sentinel => return error.to_string(),
    };
    words.to_owned()
}
