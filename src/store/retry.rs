//! The three classes of errors, and how often a call is made again.
//!
//! *Not executed*: nothing happened, again. *Ambiguous*: the same call with the same token, which the scripts answer
//! equivalently.
//! *Fatal*: again would not help. The table is `docs/PROTOCOL.md`, "Errors of the store".

use std::time::Duration;

use redis::{RedisError, ServerError, Value};

use crate::error::{Refusal, StoreError};

/// How often one call is sent at most.
pub(crate) const TRIES_MAX: u32 = 3;
/// The pause before a call is sent again; doubles.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// How Redis says inside of a script what it calls `NOPERM` outside.
const DENIED_IN_SCRIPT: [&str; 2] = ["The user executing the script can't run this command", "ACL failure in script"];

/// So many times the response timeout, and no further try begins: a caller fails fast while Redis is away.
pub(crate) const PATIENCE: u32 = 2;

/// Whether the same call may fare better a moment later. Memory, role and disk stay what they are.
pub(crate) fn is_worth_it(error: &StoreError) -> bool {
    match error {
        StoreError::NotExecuted { code, .. } => match code {
            Refusal::Connect | Refusal::Busy | Refusal::Loading | Refusal::Cluster => true,
            Refusal::Oom | Refusal::NoReplicas | Refusal::ReadOnly | Refusal::Misconf => false,
        },
        StoreError::Ambiguous { .. } => true,
        // It was executed: waiting for it once more is the caller's to decide.
        StoreError::NotDurable { .. } | StoreError::Fatal { .. } => false,
    }
}

/// Classifies what Redis answered.
pub(crate) fn of_server(error: &ServerError) -> StoreError {
    let code = error.code();
    let detail = error.details().unwrap_or_default().to_owned();
    let refusal = match code {
        "OOM" => Refusal::Oom,
        "NOREPLICAS" => Refusal::NoReplicas,
        "READONLY" => Refusal::ReadOnly,
        "MISCONF" => Refusal::Misconf,
        "LOADING" => Refusal::Loading,
        "BUSY" => Refusal::Busy,
        "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" => Refusal::Cluster,
        // A script met the limit before its first line; Redis 7.0 wraps some of these refusals.
        _ if detail.contains("OOM ") || detail.contains("used memory > 'maxmemory'") => Refusal::Oom,
        // A script ran into what its user may not do: the older and the newer words for it.
        "ERR" if DENIED_IN_SCRIPT.iter().any(|words| detail.contains(words)) => return StoreError::fatal("NOPERM", detail),
        _ => return StoreError::fatal(code, detail),
    };
    StoreError::NotExecuted { code: refusal, detail }
}

/// The same error of Redis, with the node that it came from in its words.
pub(crate) fn told_by(node: &str, error: &ServerError) -> Value {
    // Such an error is made in no other way.
    let line = format!("-{} {node}: {}\r\n", error.code(), error.details().unwrap_or_default());
    redis::parse_redis_value(line.as_bytes()).unwrap_or_else(|_| Value::ServerError(error.clone()))
}

/// Whether Redis has forgotten the script.
pub(crate) fn is_noscript(error: &ServerError) -> bool {
    error.code() == "NOSCRIPT"
}

/// Classifies what happened to a connection after the call was handed to it.
pub(crate) fn of_connection(error: &RedisError) -> StoreError {
    if error.is_connection_refusal() {
        return StoreError::NotExecuted { code: Refusal::Connect, detail: error.to_string() };
    }
    if let Some(server) = error.clone().into_server_errors().and_then(|errors| errors.first().map(|(_, error)| error.clone())) {
        return of_server(&server);
    }
    StoreError::Ambiguous { detail: error.to_string() }
}

#[cfg(test)]
mod tests {
    use crate::store::testing::Fixture;

    /// Redis calls it `ERR` there; whoever gives the permission back makes the same call succeed.
    #[tokio::test]
    async fn what_a_script_may_not_do_is_a_missing_permission() {
        let fixture = Fixture::start().await;
        fixture.query::<()>(&["ACL", "SETUSER", "default", "-get"]).await;
        let refused = fixture.store.read_job(fixture.identity("k")).await.expect_err("it may not read");
        assert!(refused.is_for_permission(), "{refused}");
        fixture.query::<()>(&["ACL", "SETUSER", "default", "+@all"]).await;
        fixture.store.read_job(fixture.identity("k")).await.expect("a reply");
    }
}
