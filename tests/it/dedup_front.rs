//! Fronts before a real Redis: what they save is counted there.

use onejob::dedup::{BatchToken, ClickId, Dedup, FieldValue, Front, Stream, Verdict};

use crate::support::Redis;

/// Scripts that Redis has run.
pub async fn scripts(redis: &Redis) -> u64 {
    let stats: String = redis.command(&["INFO", "commandstats"]).await;
    let calls = |line: &str| {
        let counted = ["cmdstat_eval:calls=", "cmdstat_evalsha:calls="].into_iter().find_map(|begin| line.strip_prefix(begin))?;
        counted.split(',').next()?.parse::<u64>().ok()
    };
    stats.lines().filter_map(calls).sum()
}

fn ids(stream: &Stream, users: impl IntoIterator<Item = u64>) -> Vec<ClickId> {
    users.into_iter().map(|user| stream.id(|_| Some(FieldValue::Integer(user.into()))).unwrap()).collect()
}

#[tokio::test]
async fn a_double_click_costs_no_round_trip_and_a_click_that_is_not_known_here_does() {
    let redis = Redis::start().await;
    let stream = Stream::new("clicks", &["user"]);
    let without = Dedup::new(&redis.store().await, stream.clone()).unwrap();
    let [one, other] = [(); 2].map(|()| without.clone().with_front(Front::default()).unwrap());
    let batch = ids(&stream, 0..100);
    assert_eq!(one.check_once(&batch).await.unwrap(), [Verdict::First; 100]);
    let before = scripts(&redis).await;
    assert!(before > 0);
    for id in &batch {
        assert_eq!(one.check_once(&[*id]).await.unwrap(), [Verdict::Duplicate]);
    }
    // A clone shares what is known.
    assert_eq!(one.clone().check_once(&batch).await.unwrap(), [Verdict::Duplicate; 100]);
    assert_eq!(scripts(&redis).await, before, "double clicks asked nobody");
    // On another gateway each is a question, and again, since a duplicate says nothing about how long it will be one.
    for (round, of) in [&other, &other, &without].into_iter().enumerate() {
        assert_eq!(of.check_once(&batch).await.unwrap(), [Verdict::Duplicate; 100]);
        assert_eq!(scripts(&redis).await, before + round as u64 + 1);
    }
    // One that is not known makes the batch a question as a whole.
    assert_eq!(one.check_once(&ids(&stream, 99..101)).await.unwrap(), [Verdict::Duplicate, Verdict::First]);
    // A batch with a name is a question always.
    one.check(&batch, BatchToken::named("clicks.ndjson at 0")).await.unwrap();
    assert_eq!(scripts(&redis).await, before + 5);
}

/// What a front was told was counted, and is so after Redis has lost it.
#[tokio::test]
async fn a_front_knows_what_a_redis_that_was_emptied_has_forgotten() {
    let redis = Redis::start().await;
    let stream = Stream::new("clicks", &["user"]);
    let without = Dedup::new(&redis.store().await, stream.clone()).unwrap();
    let one = without.clone().with_front(Front::default()).unwrap();
    let batch = ids(&stream, [1]);
    assert_eq!(one.check_once(&batch).await.unwrap(), [Verdict::First]);
    redis.command::<String>(&["FLUSHALL"]).await;
    assert_eq!(one.check_once(&batch).await.unwrap(), [Verdict::Duplicate]);
    assert_eq!(without.check_once(&batch).await.unwrap(), [Verdict::First]);
}
