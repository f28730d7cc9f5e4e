//! Hints: when to look at a job, and which jobs have an unknown attempt.
//!
//! A hint is never the truth about a job. A dangling one is harmless and taken away when somebody looks; a missing one is
//! repaired by a slow scan. It is written before the transition that needs it, and only ever moved to an earlier time by a
//! caller: a client that submits again and again cannot put off the look at its job.

use redis::Value;

use crate::error::StoreError;
use crate::job::{Identity, SHARDS};
use crate::store::call::Afterwards;
use crate::store::scripts::Script;
use crate::store::{Store, retry};

/// Most keys that one step of the slow scan asks for.
const SCAN_COUNT: usize = 128;

/// Where the slow scan stands: which master, in the order of their addresses, and its cursor. The default is the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScanPlace {
    master: usize,
    cursor: u64,
}

/// How long one gateway may look at what is due of a shard before another one does too: many times what it takes. One that dies
/// meanwhile puts those looks off by as much.
const TURN_MS: u64 = 5_000;

/// Due hints, and the shards whose turn the caller has until it gives them back.
#[derive(Default)]
pub(crate) struct Turn {
    pub(crate) hints: Vec<Hint>,
    shards: Vec<u8>,
}

impl Turn {
    pub(crate) fn add(&mut self, other: Turn) {
        self.hints.extend(other.hints);
        self.shards.extend(other.shards);
    }
}

/// A hint as it was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// Which job.
    pub identity: Identity,
    /// Its score: when to look, or since when unknown, Unix ms of Redis.
    pub at_ms: u64,
}

impl Store {
    pub(super) fn hint_due(&self, identity: Identity, at_ms: u64) -> redis::Cmd {
        add(&self.inner.keys.due(identity.shard()), identity, at_ms)
    }

    pub(super) fn hint_unknown(&self, identity: Identity, since_ms: u64) -> redis::Cmd {
        add(&self.inner.keys.unknown(identity.shard()), identity, since_ms)
    }

    pub(super) fn settle_due(&self, identity: Identity, seen_ms: u64, due_ms: u64) -> Afterwards {
        let hint = Hint { identity, at_ms: seen_ms };
        let key = self.inner.keys.due(identity.shard());
        Afterwards { command: settle(&key, hint, due_ms, Form::Hash), whole: Some(settle(&key, hint, due_ms, Form::Whole)) }
    }

    /// Writes that a job has, or is about to have, an unknown attempt.
    pub(crate) async fn note_unknown(&self, identity: Identity, since_ms: u64) -> Result<(), StoreError> {
        self.command(self.hint_unknown(identity, since_ms)).await.map(drop)
    }

    /// Asks for a job to be looked at no later than at a moment.
    pub(crate) async fn note_due(&self, identity: Identity, at_ms: u64) -> Result<(), StoreError> {
        self.command(self.hint_due(identity, at_ms)).await.map(drop)
    }

    /// Takes turns at some shards: those that have something due and that no other gateway looks at just now. Tells their due
    /// hints, at most `limit` of each shard, the oldest first.
    ///
    /// A turn saves looks and decides nothing. It may lapse while its gateway looks, and where Redis refuses it (it is out of memory,
    /// the command is not allowed) the caller does without.
    pub(crate) async fn take_turns(&self, shards: &[u8], limit: usize) -> Result<Turn, StoreError> {
        let keys = &self.inner.keys;
        let now_ms = self.now_ms();
        let due = |shard: u8, limit: usize| {
            let mut command = redis::cmd("ZRANGEBYSCORE");
            command.arg(keys.due(shard)).arg(0).arg(now_ms).arg("WITHSCORES").arg("LIMIT").arg(0).arg(limit);
            command
        };
        let firsts = self.commands(shards.iter().map(|shard| due(*shard, 1)).collect()).await?;
        let mut some = Vec::new();
        for (shard, first) in shards.iter().zip(firsts) {
            match first {
                Value::Array(first) if first.is_empty() => {}
                Value::ServerError(error) => return Err(retry::of_server(&error)),
                _ => some.push(*shard),
            }
        }
        if some.is_empty() {
            return Ok(Turn::default());
        }
        let turns = some.iter().map(|shard| {
            let mut command = redis::cmd("SET");
            command.arg(keys.due_turn(*shard)).arg("").arg("NX").arg("PX").arg(TURN_MS);
            command
        });
        let turns = self.commands(turns.collect()).await?;
        // Read again: what was due of them may have been looked at before the turn was taken.
        let free = some.iter().zip(turns).filter(|(_, turn)| *turn != Value::Nil);
        let shards: Vec<u8> = free.map(|(shard, _)| *shard).collect();
        if shards.is_empty() {
            return Ok(Turn::default());
        }
        let hints = self.hints(shards.iter().map(|shard| due(*shard, limit)).collect()).await?;
        Ok(Turn { hints, shards })
    }

    /// Gives turns back. Where that is refused they lapse.
    pub(crate) async fn give_turns_back(&self, turn: Turn) -> Result<(), StoreError> {
        let unlink = |shard: &u8| {
            let mut command = redis::cmd("UNLINK");
            command.arg(self.inner.keys.due_turn(*shard));
            command
        };
        let commands: Vec<redis::Cmd> = turn.shards.iter().map(unlink).collect();
        if commands.is_empty() { Ok(()) } else { self.commands(commands).await.map(drop) }
    }

    /// Some unknown hints of one shard, the oldest first, from a place on.
    pub(crate) async fn unknown_page(&self, shard: u8, from: usize, limit: usize) -> Result<Vec<Hint>, StoreError> {
        let mut command = redis::cmd("ZRANGE");
        command.arg(self.inner.keys.unknown(shard)).arg(from).arg(from + limit.saturating_sub(1)).arg("WITHSCORES");
        self.hints(vec![command]).await
    }

    /// How many hints of each kind there are, and since when the oldest job is unknown.
    pub(crate) async fn hint_counts(&self) -> Result<HintCounts, StoreError> {
        let mut commands = Vec::with_capacity(usize::from(SHARDS) * 3);
        for shard in 0..SHARDS {
            for key in [self.inner.keys.due(shard), self.inner.keys.unknown(shard)] {
                let mut command = redis::cmd("ZCARD");
                command.arg(key);
                commands.push(command);
            }
            let mut command = redis::cmd("ZRANGE");
            command.arg(self.inner.keys.unknown(shard)).arg(0).arg(0).arg("WITHSCORES");
            commands.push(command);
        }
        let values = self.commands(commands).await?;
        let mut counts = HintCounts::default();
        for shard in values.chunks(3) {
            let [open, unknown, oldest] = shard else { continue };
            counts.open += number(open)?;
            counts.unknown += number(unknown)?;
            let oldest = read(oldest.clone())?.first().map(|hint| hint.at_ms);
            counts.unknown_since_ms = [counts.unknown_since_ms, oldest].into_iter().flatten().min();
        }
        Ok(counts)
    }

    /// Moves a due hint to another time, or takes it away (0), unless somebody has moved it since it was seen.
    pub(crate) async fn move_due(&self, hint: Hint, due_ms: u64) -> Result<(), StoreError> {
        self.settle_now(self.inner.keys.due(hint.identity.shard()), hint, due_ms).await
    }

    /// Takes an unknown hint away, unless somebody has moved it since it was seen.
    pub(crate) async fn drop_unknown(&self, hint: Hint) -> Result<(), StoreError> {
        self.settle_now(self.inner.keys.unknown(hint.identity.shard()), hint, 0).await
    }

    /// Since when a job stands among the unknown ones, if it does.
    pub(crate) async fn unknown_hint(&self, identity: Identity) -> Result<Option<Hint>, StoreError> {
        let mut command = redis::cmd("ZSCORE");
        command.arg(self.inner.keys.unknown(identity.shard())).arg(identity.to_string());
        let score: Option<f64> =
            redis::from_redis_value(self.command(command).await?).map_err(|error| StoreError::fatal("BADREPLY", error))?;
        Ok(score.map(|score| Hint { identity, at_ms: score as u64 }))
    }

    async fn settle_now(&self, key: String, hint: Hint, due_ms: u64) -> Result<(), StoreError> {
        match self.command(settle(&key, hint, due_ms, Form::Hash)).await {
            Err(StoreError::Fatal { code, .. }) if code == "NOSCRIPT" => {
                self.command(settle(&key, hint, due_ms, Form::Whole)).await.map(drop)
            }
            settled => settled.map(drop),
        }
    }

    /// One step of the slow scan for open jobs without a hint: repairs what it finds.
    ///
    /// Returns where to go on (at the beginning: once around) and how many hints it wrote. Ended jobs have a TTL and are skipped.
    pub(crate) async fn repair_hints(&self, place: ScanPlace) -> Result<(ScanPlace, u64), StoreError> {
        let ScanPlace { master, cursor } = place;
        let masters = self.inner.nodes.masters();
        // One that is gone meanwhile: from the beginning.
        let Some(at) = masters.get(master) else { return Ok((ScanPlace::default(), 0)) };
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(self.inner.keys.job_pattern()).arg("COUNT").arg(SCAN_COUNT).arg("TYPE").arg("string");
        let (next, keys): (u64, Vec<Vec<u8>>) =
            redis::from_redis_value(self.on(at, scan).await?).map_err(|error| StoreError::fatal("BADREPLY", error))?;
        let next = match next {
            0 if master + 1 < masters.len() => ScanPlace { master: master + 1, cursor: 0 },
            0 => ScanPlace::default(),
            cursor => ScanPlace { master, cursor },
        };
        let jobs: Vec<(Identity, Vec<u8>)> =
            keys.into_iter().filter_map(|key| Some((self.inner.keys.identity_of(&key)?, key))).collect();
        if jobs.is_empty() {
            return Ok((next, 0));
        }
        // The hint is looked for before the job: a job that ends in between has a TTL, and one that has none had no hint before.
        let looks = jobs.iter().flat_map(|(identity, key)| {
            let (mut hint, mut life) = (redis::cmd("ZSCORE"), redis::cmd("PTTL"));
            hint.arg(self.inner.keys.due(identity.shard())).arg(identity.to_string());
            life.arg(key);
            [hint, life]
        });
        let looks = self.commands(looks.collect()).await?;
        let missing = jobs.iter().zip(looks.chunks(2)).filter(|(_, look)| matches!(look, [Value::Nil, Value::Int(-1)]));
        let now_ms = self.now_ms();
        let repair: Vec<redis::Cmd> = missing
            .map(|((identity, _), _)| {
                let mut command = redis::cmd("ZADD");
                command.arg(self.inner.keys.due(identity.shard())).arg("NX").arg(now_ms).arg(identity.to_string());
                command
            })
            .collect();
        if repair.is_empty() {
            return Ok((next, 0));
        }
        let mut repaired = 0;
        for value in self.commands(repair).await? {
            repaired += number(&value)?;
        }
        Ok((next, repaired))
    }

    async fn hints(&self, commands: Vec<redis::Cmd>) -> Result<Vec<Hint>, StoreError> {
        let values = self.commands(commands).await?;
        let lists: Vec<Vec<Hint>> = values.into_iter().map(read).collect::<Result<_, _>>()?;
        Ok(lists.into_iter().flatten().collect())
    }
}

/// One of the two kinds of hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Due,
    Unknown,
}

/// How many hints of each kind there are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HintCounts {
    pub(crate) open: u64,
    pub(crate) unknown: u64,
    pub(crate) unknown_since_ms: Option<u64>,
}

/// LT: never put off.
fn add(key: &str, identity: Identity, at_ms: u64) -> redis::Cmd {
    let mut command = redis::cmd("ZADD");
    command.arg(key).arg("LT").arg(at_ms).arg(identity.to_string());
    command
}

/// How a script is named to Redis.
#[derive(Clone, Copy)]
enum Form {
    Hash,
    Whole,
}

fn settle(key: &str, hint: Hint, due_ms: u64, form: Form) -> redis::Cmd {
    let mut command = match form {
        Form::Hash => redis::cmd("EVALSHA"),
        Form::Whole => redis::cmd("EVAL"),
    };
    match form {
        Form::Hash => command.arg(Script::SettleHint.sha1()),
        Form::Whole => command.arg(Script::SettleHint.code()),
    };
    command.arg(1).arg(key).arg(hint.identity.to_string()).arg(hint.at_ms).arg(due_ms);
    command
}

fn number(value: &Value) -> Result<u64, StoreError> {
    match value {
        Value::Int(number) => Ok(u64::try_from(*number).unwrap_or(0)),
        Value::ServerError(error) => Err(retry::of_server(error)),
        other => Err(StoreError::fatal("BADREPLY", format!("a number was expected, not {other:?}"))),
    }
}

/// Reads `member score member score …`; a member that is no identity is skipped, it cannot be ours.
pub(super) fn read(value: Value) -> Result<Vec<Hint>, StoreError> {
    if let Value::ServerError(error) = &value {
        return Err(retry::of_server(error));
    }
    let pairs: Vec<(String, f64)> = redis::from_redis_value(value).map_err(|error| StoreError::fatal("BADREPLY", error))?;
    Ok(pairs
        .into_iter()
        .filter_map(|(member, score)| Some(Hint { identity: member.parse().ok()?, at_ms: score as u64 }))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attempt::AttemptToken;
    use crate::job::Payload;
    use crate::store::listing::Away;
    use crate::store::testing::{Fixture, LEASE_MS};
    use crate::store::{Begin, CancelMode};

    async fn due_ms(fixture: &Fixture, identity: Identity) -> Option<u64> {
        fixture.query(&["ZSCORE", &fixture.store.inner.keys.due(identity.shard()), &identity.to_string()]).await
    }

    async fn unhint(fixture: &Fixture, identity: Identity) {
        fixture.query::<u64>(&["ZREM", &fixture.store.inner.keys.due(identity.shard()), &identity.to_string()]).await;
    }

    /// The whole slow scan: how many hints it wrote.
    async fn repair(fixture: &Fixture) -> u64 {
        let (mut cursor, mut repaired) = fixture.store.repair_hints(ScanPlace::default()).await.unwrap();
        while cursor != ScanPlace::default() {
            let (next, more) = fixture.store.repair_hints(cursor).await.unwrap();
            (cursor, repaired) = (next, repaired + more);
        }
        repaired
    }

    #[tokio::test]
    async fn only_what_is_due_is_handed_out_and_no_more_than_asked_for() {
        let fixture = Fixture::start().await;
        let shard = fixture.identity("0").shard();
        let same_shard: Vec<Identity> =
            (0..).map(|n| fixture.identity(&n.to_string())).filter(|identity| identity.shard() == shard).take(4).collect();
        let now_ms = fixture.store.now_ms();
        let moments = [now_ms - 1_000, now_ms - 3_000, now_ms - 2_000, now_ms + LEASE_MS];
        for (identity, at_ms) in same_shard.iter().zip(moments) {
            fixture.store.note_due(*identity, at_ms).await.unwrap();
        }
        let hint = |place: usize| Hint { identity: same_shard[place], at_ms: moments[place] };
        let due = fixture.store.take_turns(&[shard], 10).await.unwrap();
        assert_eq!(due.hints, [hint(1), hint(2), hint(0)]);
        fixture.store.give_turns_back(due).await.unwrap();
        assert_eq!(fixture.store.take_turns(&[shard], 2).await.unwrap().hints, [hint(1), hint(2)]);
        let other = (0..SHARDS).find(|other| *other != shard).unwrap();
        assert_eq!(fixture.store.take_turns(&[other], 10).await.unwrap().hints, []);
        let oldest = async |limit: usize| fixture.store.oldest(Which::Due, limit, &mut Away::default()).await.unwrap();
        assert_eq!(oldest(10).await.len(), 4);
        assert_eq!(oldest(1).await, [hint(1)]);
    }

    #[tokio::test]
    async fn what_is_due_of_a_shard_is_handed_to_one_at_a_time() {
        let fixture = Fixture::start().await;
        let identity = fixture.identity("k");
        let (shard, other) = (identity.shard(), (identity.shard() + 1) % SHARDS);
        let hint = Hint { identity, at_ms: fixture.store.now_ms() - 1 };
        let turn_ms = async || fixture.query::<i64>(&["PTTL", &fixture.store.inner.keys.due_turn(shard)]).await;
        // Where nothing is due there is no turn to take, and no key.
        assert_eq!(fixture.store.take_turns(&[shard, other], 10).await.unwrap().hints, []);
        assert_eq!(turn_ms().await, -2);
        fixture.store.note_due(identity, hint.at_ms).await.unwrap();
        let turn = fixture.store.take_turns(&[shard, other], 10).await.unwrap();
        assert_eq!((&turn.hints[..], &turn.shards[..]), (&[hint][..], &[shard][..]));
        assert!((1..=TURN_MS as i64).contains(&turn_ms().await));
        assert_eq!(fixture.store.take_turns(&[shard], 10).await.unwrap().hints, []);
        fixture.store.give_turns_back(turn).await.unwrap();
        assert_eq!(fixture.store.take_turns(&[shard], 10).await.unwrap().hints, [hint]);
        // Of a gateway that has died meanwhile, it lapses.
        fixture.query::<u64>(&["PEXPIRE", &fixture.store.inner.keys.due_turn(shard), "0"]).await;
        assert_eq!(fixture.store.take_turns(&[shard], 10).await.unwrap().hints, [hint]);
    }

    /// A turn saves looks: where it cannot be taken, one looks without it.
    #[tokio::test]
    async fn where_a_turn_is_refused_what_is_due_is_handed_out_without() {
        let fixture = Fixture::start().await;
        let hint = Hint { identity: fixture.identity("k"), at_ms: fixture.store.now_ms() - 1 };
        fixture.store.note_due(hint.identity, hint.at_ms).await.unwrap();
        fixture.query::<String>(&["CONFIG", "SET", "maxmemory", "1"]).await;
        for _ in 0..2 {
            let turn = fixture.store.take_turns(&[hint.identity.shard()], 10).await.unwrap();
            assert_eq!(turn.hints, [hint]);
            fixture.store.give_turns_back(turn).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_look_is_never_put_off() {
        let fixture = Fixture::start().await;
        let identity = fixture.identity("k");
        for (at_ms, expected) in [(2_000, 2_000), (3_000, 2_000), (1_000, 1_000), (1_000, 1_000)] {
            fixture.store.note_due(identity, at_ms).await.unwrap();
            assert_eq!(due_ms(&fixture, identity).await, Some(expected));
        }
    }

    #[tokio::test]
    async fn a_hint_is_moved_only_as_it_was_seen() {
        let fixture = Fixture::start().await;
        let identity = fixture.identity("k");
        fixture.store.note_due(identity, 2_000).await.unwrap();
        let seen = Hint { identity, at_ms: 2_000 };
        fixture.store.move_due(Hint { at_ms: 1_999, ..seen }, 0).await.unwrap();
        assert_eq!(due_ms(&fixture, identity).await, Some(2_000));
        fixture.store.move_due(seen, 5_000).await.unwrap();
        assert_eq!(due_ms(&fixture, identity).await, Some(5_000));
        fixture.store.move_due(seen, 0).await.unwrap();
        assert_eq!(due_ms(&fixture, identity).await, Some(5_000));
        // Redis has forgotten the script.
        fixture.query::<String>(&["SCRIPT", "FLUSH"]).await;
        fixture.store.move_due(Hint { at_ms: 5_000, ..seen }, 0).await.unwrap();
        assert_eq!(due_ms(&fixture, identity).await, None);
    }

    #[tokio::test]
    async fn unknown_jobs_are_listed_since_when_and_counted() {
        let fixture = Fixture::start().await;
        let (one, two) = (fixture.identity("one"), fixture.identity("two"));
        fixture.store.note_unknown(one, 2_000).await.unwrap();
        fixture.store.note_unknown(two, 1_000).await.unwrap();
        // Since the first time.
        fixture.store.note_unknown(two, 9_000).await.unwrap();
        let hint = Hint { identity: two, at_ms: 1_000 };
        assert_eq!(fixture.store.unknown_hint(two).await.unwrap(), Some(hint));
        assert_eq!(fixture.store.oldest(Which::Unknown, 1, &mut Away::default()).await.unwrap(), [hint]);
        let counts = fixture.store.hint_counts().await.unwrap();
        assert_eq!((counts.open, counts.unknown, counts.unknown_since_ms), (0, 2, Some(1_000)));
        fixture.store.drop_unknown(Hint { at_ms: 999, ..hint }).await.unwrap();
        assert_eq!(fixture.store.unknown_hint(two).await.unwrap(), Some(hint));
        fixture.store.drop_unknown(hint).await.unwrap();
        assert_eq!(fixture.store.unknown_hint(two).await.unwrap(), None);
    }

    #[tokio::test]
    async fn the_slow_scan_finds_open_jobs_without_a_hint_and_no_others() {
        const JOBS: usize = 300;
        let fixture = Fixture::start().await;
        let input = Payload::default();
        let mut jobs = Vec::new();
        for n in 0..JOBS {
            jobs.push(fixture.submit(&n.to_string(), AttemptToken::random(), &input, Begin::Pending).await);
        }
        assert_eq!(repair(&fixture).await, 0, "every job has its hint");
        // Ended, and nobody needs to look any more.
        fixture.store.cancel_job(jobs[0], "request-1", CancelMode::Force, "ada", "").await.unwrap();
        // A blob's key looks like a record's from afar.
        let large = std::sync::Arc::from(vec![1; 9_000]);
        fixture.store.put_body(jobs[1].identity(), large).await.unwrap();
        for job in &jobs[..3] {
            unhint(&fixture, job.identity()).await;
        }
        let kept = due_ms(&fixture, jobs[3].identity()).await;
        assert_eq!(repair(&fixture).await, 2);
        assert_eq!(due_ms(&fixture, jobs[0].identity()).await, None);
        let now_ms = fixture.store.now_ms();
        for job in &jobs[1..3] {
            let at_ms = due_ms(&fixture, job.identity()).await.expect("a hint");
            assert!(at_ms.abs_diff(now_ms) < 10_000, "to be looked at soon");
        }
        assert_eq!(due_ms(&fixture, jobs[3].identity()).await, kept, "a hint that is there stays");
        assert_eq!(repair(&fixture).await, 0);
    }

    #[tokio::test]
    async fn a_job_that_ends_during_the_slow_scan_is_not_taken_for_one_without_a_hint() {
        const JOBS: usize = 400;
        let fixture = Fixture::start().await;
        let input = Payload::default();
        let mut jobs = Vec::new();
        for n in 0..JOBS {
            jobs.push(fixture.submit(&n.to_string(), AttemptToken::random(), &input, Begin::Pending).await);
        }
        let ending = async {
            for (n, job) in jobs.iter().enumerate() {
                fixture.store.cancel_job(*job, &format!("request-{n}"), CancelMode::Force, "ada", "").await.unwrap();
                unhint(&fixture, job.identity()).await;
            }
        };
        let scanning = async {
            let mut repaired = 0;
            for _ in 0..JOBS / 4 {
                repaired += repair(&fixture).await;
            }
            repaired
        };
        let ((), repaired) = tokio::join!(ending, scanning);
        assert_eq!(repaired, 0);
    }
}
