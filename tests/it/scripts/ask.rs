//! `extend_ask`: the lease of whoever asks about a job, before, one call, the reply and the lease after.

use onejob::attempt::AttemptToken;
use onejob::store::AskExtended;

use crate::support::{Given, Redis};

/// Takes the lease as a gateway does.
async fn taken(redis: &Redis, given: &Given, token: AttemptToken) {
    let mut take = redis::cmd("SET");
    take.arg(key(given)).arg(&token.as_bytes()[..]).arg("NX").arg("PX").arg(60_000);
    let _: () = take.query_async(&mut redis.connection()).await.unwrap();
}

fn key(given: &Given) -> String {
    format!("{}:ask", given.key())
}

async fn left_ms(redis: &Redis, given: &Given) -> i64 {
    redis.command(&["PTTL", &key(given)]).await
}

#[tokio::test]
async fn who_asks_keeps_the_lease_or_leaves_it_standing() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    let (token, identity) = (AttemptToken::random(), given.id.identity());
    taken(&redis, &given, token).await;
    for lease_ms in [1_000_000, 5_000, 5_000] {
        assert_eq!(given.store.extend_ask(identity, token, lease_ms).await.unwrap(), AskExtended::Extended);
        let left = left_ms(&redis, &given).await;
        let asked = i64::try_from(lease_ms).unwrap();
        assert!((asked - 4_000..=asked).contains(&left), "{left} of {asked} ms");
    }
    assert_eq!(given.store.extend_ask(identity, token, 0).await.unwrap(), AskExtended::Extended);
    assert_eq!(left_ms(&redis, &given).await, -2, "given up");
}

#[tokio::test]
async fn another_ones_lease_is_left_alone() {
    let redis = Redis::start().await;
    let given = redis.given_unknown().await;
    let identity = given.id.identity();
    assert_eq!(given.store.extend_ask(identity, AttemptToken::random(), 5_000).await.unwrap(), AskExtended::Lost);
    assert_eq!(left_ms(&redis, &given).await, -2, "none is made");
    taken(&redis, &given, AttemptToken::random()).await;
    for lease_ms in [0, 1_000_000] {
        assert_eq!(given.store.extend_ask(identity, AttemptToken::random(), lease_ms).await.unwrap(), AskExtended::Lost);
        assert!((1..=60_000).contains(&left_ms(&redis, &given).await));
    }
}
