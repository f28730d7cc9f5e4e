//! What must hold of all keys when all is calm, whatever happened.

use std::collections::{BTreeMap, BTreeSet};

use onejob::job::{Identity, SHARDS};
use onejob::store::{Read, Store};
use redis::{FromRedisValue, RedisResult};

use crate::laws::derived;

/// The violations: what a record says of itself, how long keys live, which hints there are, and keys that are nobody's.
pub async fn judge(servers: &[String], store: &Store, identities: &BTreeSet<Identity>) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut lives: BTreeMap<String, i64> = BTreeMap::new();
    let mut due: BTreeSet<Identity> = BTreeSet::new();
    for url in servers {
        for key in ask::<Vec<String>>(url, &["KEYS", "*"]).await.unwrap() {
            let life_ms: i64 = ask(url, &["PTTL", &key]).await.unwrap();
            if key.starts_with("oj:due:{") {
                let members: Vec<String> = ask(url, &["ZRANGE", &key, "0", "-1"]).await.unwrap();
                due.extend(members.iter().map(|member| member.parse::<Identity>().expect("an identity")));
            }
            if lives.insert(key.clone(), life_ms).is_some() {
                wrong.push(format!("{key} is at two masters"));
            }
        }
    }
    let hints: BTreeSet<String> =
        (0..SHARDS).flat_map(|shard| ["due", "unknown"].map(|kind| format!("oj:{kind}:{{{shard:02x}}}"))).collect();
    let records: BTreeMap<String, Identity> =
        identities.iter().map(|identity| (format!("oj:{{{identity}}}"), *identity)).collect();
    for (key, life_ms) in &lives {
        let Some(identity) = records.get(key) else {
            if !hints.contains(key) && !key.starts_with("oj:meta") && !key.starts_with("oj:commit") {
                wrong.push(format!("{key} belongs to nothing"));
            }
            continue;
        };
        match store.read_job(*identity).await.expect("all is calm") {
            Read::Found(job) => {
                if job.state != derived(&job) {
                    wrong.push(format!("{key} is {}, and {} follows from its attempts", job.state, derived(&job)));
                }
                if (*life_ms >= 0) != job.is_ended() {
                    wrong.push(format!("{key} is {} and lives for {life_ms} ms", job.state));
                }
                if !job.is_ended() && !due.contains(identity) {
                    wrong.push(format!("{key} is {} without a hint", job.state));
                }
            }
            Read::Gone(_) if *life_ms < 0 => wrong.push(format!("{key} is gone and lives for ever")),
            Read::Gone(_) => {}
            // It went in between.
            Read::NotFound => {}
        }
    }
    wrong
}

async fn ask<T: FromRedisValue>(url: &str, words: &[&str]) -> RedisResult<T> {
    let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
    redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connection).await
}
