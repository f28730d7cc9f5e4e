//! Replies that are lost after Redis has executed what they answer, and requests that never arrive.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::join_all;
use onejob::dedup::{BatchToken, Claimed, ClickId, Committed, Dedup, DedupError, Stream, Verdict};
use onejob::store::StoreOptions;

use super::{
    PATIENT, Told, assert_remembered, check, claim_and_commit, everybody, expected, ids, release_and_claim, run, store_with,
    stream,
};
use crate::fleet::proxy::{Mode, Proxy};
use crate::support::{Redis, kinds, until};

/// Batches of each task: three hundred for all.
const BATCHES: u64 = 75;
/// Of a hundred replies, or requests, so many are lost.
const LOST: u32 = 10;
/// How many are at least, in runs of that length: where tasks wait for each other their replies come together, and are lost together.
const LOST_MIN: u64 = 5;

/// A Redis, and a wire to it that breaks.
struct Wire {
    mirrored: bool,
    redis: Redis,
    proxy: Proxy,
}

impl Wire {
    async fn open(mirrored: bool) -> Wire {
        let redis = Redis::start_alone(&[]).await;
        let socket = redis.socket().strip_prefix("redis+unix://").expect("a socket");
        let proxy = Proxy::start(PathBuf::from(socket), None);
        Wire { mirrored, redis, proxy }
    }

    /// Over the wire.
    async fn dedup(&self, name: &str, shards: u16) -> Dedup {
        self.dedup_of(stream(self.mirrored, name, shards)).await
    }

    async fn dedup_of(&self, stream: Stream) -> Dedup {
        self.dedup_with(stream, Duration::from_secs(5)).await
    }

    async fn dedup_with(&self, stream: Stream, response_timeout: Duration) -> Dedup {
        let url = self.proxy.url();
        let options = StoreOptions { connect_timeout: Duration::from_secs(5), response_timeout, ..StoreOptions::new(&url) };
        Dedup::new(&store_with(options).await, stream).unwrap().with_patience(PATIENT)
    }

    /// How many calls the server has executed.
    async fn executed(&self) -> u64 {
        let info: String = self.redis.command(&["INFO", "commandstats"]).await;
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    }

    /// Past the wire.
    async fn beside(&self, name: &str, shards: u16) -> Dedup {
        Dedup::new(&self.redis.store().await, stream(self.mirrored, name, shards)).unwrap()
    }

    /// A run over the wire as it is made worse, the same one past it in another stream, and what a map says: all are equal.
    async fn run_and_compare<F>(
        &self,
        worsen: impl Fn(&Proxy, u32),
        ask: impl Fn(Dedup, Vec<ClickId>, BatchToken) -> F + Copy + Send + 'static,
    ) where
        F: Future<Output = Vec<bool>> + Send,
    {
        let calm = run(&[self.beside("calm", 2).await, self.beside("calm", 2).await], BATCHES, ask).await;
        assert_told(&calm, &expected(BATCHES));
        let processes = [self.dedup("rough", 2).await, self.dedup("rough", 2).await];
        worsen(&self.proxy, LOST);
        let rough = run(&processes, BATCHES, ask).await;
        worsen(&self.proxy, 0);
        assert_told(&rough, &calm);
        for users in everybody(BATCHES).chunks(5_000) {
            for process in [&processes[0], &processes[1], &self.beside("rough", 2).await] {
                assert_remembered(process, users).await;
            }
        }
    }
}

/// Compares without printing thousands of verdicts.
fn assert_told(told: &Told, expected: &Told) {
    for (task, verdicts) in &expected.own {
        let wrong: Vec<usize> = (0..verdicts.len()).filter(|place| told.own[task][*place] != verdicts[*place]).collect();
        assert!(wrong.is_empty(), "task {task}: {} of {} verdicts differ, at {wrong:?}", wrong.len(), verdicts.len());
    }
    let wrong: Vec<(&u64, &usize)> = told.shared.iter().filter(|(_, times)| **times != 1).collect();
    assert!(wrong.is_empty(), "not once, but so often: {wrong:?}");
    assert_eq!(told, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_hundred_batches_every_tenth_reply_is_lost_and_no_verdict_differs() {
    for mirrored in kinds() {
        let wire = Wire::open(mirrored).await;
        wire.run_and_compare(Proxy::lose_of_a_hundred, check).await;
        assert!(wire.proxy.lost() >= LOST_MIN, "{} replies were lost", wire.proxy.lost());
    }
}

async fn claims_and_commits_every_tenth_reply_is_lost(mirrored: bool) {
    let wire = Wire::open(mirrored).await;
    wire.run_and_compare(Proxy::lose_of_a_hundred, claim_and_commit).await;
    assert!(wire.proxy.lost() >= LOST_MIN, "{} replies were lost", wire.proxy.lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_hundred_claims_and_commits_every_tenth_reply_is_lost_and_each_click_counts_once() {
    claims_and_commits_every_tenth_reply_is_lost(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_hundred_claims_and_commits_every_tenth_reply_is_lost_and_each_click_counts_once_of_a_mirrored_stream() {
    claims_and_commits_every_tenth_reply_is_lost(true).await;
}

async fn releases_every_tenth_reply_is_lost(mirrored: bool) {
    let wire = Wire::open(mirrored).await;
    wire.run_and_compare(Proxy::lose_of_a_hundred, release_and_claim).await;
    assert!(wire.proxy.lost() >= LOST_MIN, "{} replies were lost", wire.proxy.lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_hundred_releases_every_tenth_reply_is_lost_and_each_click_counts_once() {
    releases_every_tenth_reply_is_lost(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_hundred_releases_every_tenth_reply_is_lost_and_each_click_counts_once_of_a_mirrored_stream() {
    releases_every_tenth_reply_is_lost(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_hundred_batches_every_tenth_request_is_lost_and_no_verdict_differs() {
    for mirrored in kinds() {
        let wire = Wire::open(mirrored).await;
        wire.run_and_compare(Proxy::swallow_of_a_hundred, check).await;
        assert!(wire.proxy.swallowed() >= LOST_MIN, "{} requests were lost", wire.proxy.swallowed());
    }
}

async fn claims_and_commits_every_tenth_request_is_lost(mirrored: bool) {
    let wire = Wire::open(mirrored).await;
    wire.run_and_compare(Proxy::swallow_of_a_hundred, claim_and_commit).await;
    assert!(wire.proxy.swallowed() >= LOST_MIN, "{} requests were lost", wire.proxy.swallowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_hundred_claims_and_commits_every_tenth_request_is_lost_and_each_click_counts_once() {
    claims_and_commits_every_tenth_request_is_lost(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_hundred_claims_and_commits_every_tenth_request_is_lost_and_each_click_counts_once_of_a_mirrored_stream() {
    claims_and_commits_every_tenth_request_is_lost(true).await;
}

/// What a caller does whose patience has run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Again {
    SameToken,
    NewToken,
}

/// Batches one after another, each half known, during some of which every reply is lost: how many verdicts are not those of a map.
async fn wrong_verdicts(mirrored: bool, again: Again) -> usize {
    let wire = Wire::open(mirrored).await;
    let dedup = wire.dedup("clicks", 1).await;
    let (mut seen, mut wrong) = (HashSet::new(), 0);
    for batch in 0..20 {
        let users: Vec<u64> = (batch * 50..batch * 50 + 100).collect();
        let asked = ids(dedup.stream(), users.iter().copied());
        let token = BatchToken::named(&format!("batch {batch}"));
        let mut told = None;
        if batch % 4 == 2 {
            let lost = wire.proxy.lost();
            wire.proxy.lose_of_a_hundred(100);
            let unanswered = dedup.clone().with_patience(Duration::ZERO).check(&asked, token).await;
            wire.proxy.lose_of_a_hundred(0);
            assert!(wire.proxy.lost() > lost);
            let Err(DedupError::Unanswered { verdicts, unanswered, .. }) = unanswered else { panic!("{unanswered:?}") };
            assert_eq!((verdicts, unanswered), (vec![None; users.len()], users.len()));
            if again == Again::NewToken {
                told = Some(dedup.check(&asked, BatchToken::random()).await.unwrap());
            }
        }
        let told = match told {
            Some(told) => told,
            None => dedup.check(&asked, token).await.unwrap(),
        };
        for (user, verdict) in users.into_iter().zip(told) {
            let expected = if seen.insert(user) { Verdict::First } else { Verdict::Duplicate };
            wrong += usize::from(verdict != expected);
        }
    }
    wrong
}

#[tokio::test]
async fn a_batch_that_nobody_answered_in_time_is_told_right_when_it_is_sent_again() {
    for mirrored in kinds() {
        assert_eq!(wrong_verdicts(mirrored, Again::SameToken).await, 0);
    }
}

/// The reason for tokens, and the proof that the test above can fail: fifty new clicks of each such batch are lost.
#[tokio::test]
async fn a_caller_that_makes_a_new_token_for_a_lost_reply_loses_its_clicks() {
    for mirrored in kinds() {
        assert_eq!(wrong_verdicts(mirrored, Again::NewToken).await, 5 * 50);
    }
}

/// The same for each call of two phases: executed, unanswered, and sent again.
#[tokio::test]
async fn claims_commits_and_releases_that_nobody_answered_in_time_are_told_right_when_they_are_sent_again() {
    for mirrored in kinds() {
        let wire = Wire::open(mirrored).await;
        let (dedup, beside) = (wire.dedup("clicks", 1).await, wire.beside("clicks", 1).await);
        let hasty = dedup.clone().with_patience(Duration::ZERO);
        let [batch, given_back] = [0..100, 100..150].map(|users| ids(dedup.stream(), users));
        let (mine, other) = (BatchToken::named("mine"), BatchToken::named("other"));
        let none = |count: usize| (vec![None::<()>; count], count);
        // The scripts are known to the server: what is lost below is no refusal.
        release_and_claim(dedup.clone(), ids(dedup.stream(), 1_000..1_001), BatchToken::random()).await;

        wire.proxy.lose_of_a_hundred(100);
        let claimed = hasty.claim(&batch, mine).await;
        let Err(DedupError::Unanswered { verdicts, unanswered, .. }) = claimed else { panic!("{claimed:?}") };
        assert_eq!((verdicts.iter().map(|told| told.map(drop)).collect(), unanswered), none(100));
        // It was executed: others are told so.
        assert_eq!(beside.claim(&batch, other).await.unwrap(), [Claimed::Held; 100]);
        wire.proxy.lose_of_a_hundred(0);
        assert_eq!(dedup.claim(&batch, mine).await.unwrap(), [Claimed::First; 100]);

        wire.proxy.lose_of_a_hundred(100);
        let committed = hasty.commit(&batch, mine).await;
        let Err(DedupError::Unanswered { verdicts, unanswered, .. }) = committed else { panic!("{committed:?}") };
        assert_eq!((verdicts.iter().map(|told| told.map(drop)).collect(), unanswered), none(100));
        assert_eq!(beside.check(&batch, BatchToken::random()).await.unwrap(), [Verdict::Duplicate; 100]);
        wire.proxy.lose_of_a_hundred(0);
        assert_eq!(dedup.commit(&batch, mine).await.unwrap(), [Committed::Committed; 100]);

        let third = BatchToken::named("third");
        assert_eq!(dedup.claim(&given_back, third).await.unwrap(), [Claimed::First; 50]);
        wire.proxy.lose_of_a_hundred(100);
        hasty.release(&given_back, third).await.unwrap_err();
        // It was executed, and somebody has taken half meanwhile: sent again it takes nothing away.
        let fourth = BatchToken::named("fourth");
        assert_eq!(beside.claim(&given_back[..25], fourth).await.unwrap(), [Claimed::First; 25]);
        wire.proxy.lose_of_a_hundred(0);
        dedup.release(&given_back, third).await.unwrap();
        let told = beside.claim(&given_back, BatchToken::random()).await.unwrap();
        assert_eq!((&told[..25], &told[25..]), (&[Claimed::Held; 25][..], &[Claimed::First; 25][..]));
        assert_eq!(beside.commit(&given_back[..25], fourth).await.unwrap(), [Committed::Committed; 25]);
    }
}

/// Whoever asks is gone before the reply comes, and comes back.
#[tokio::test]
async fn a_batch_whose_future_was_dropped_is_told_right_when_it_is_sent_again() {
    for mirrored in kinds() {
        let wire = Wire::open(mirrored).await;
        let dedup = wire.dedup("clicks", 1).await;
        let mut seen = HashSet::new();
        for batch in 0..6 {
            let users: Vec<u64> = (batch * 20..batch * 20 + 30).collect();
            let (asked, token) = (ids(dedup.stream(), users.iter().copied()), BatchToken::named(&batch.to_string()));
            if batch > 0 {
                let before = wire.executed().await;
                wire.proxy.set(Mode::Hold(PATIENT));
                tokio::select! {
                    told = dedup.check(&asked, token) => panic!("{told:?}"),
                    () = until("it is executed", async || wire.executed().await > before) => {}
                }
                wire.proxy.set(Mode::Refuse);
                wire.proxy.set(Mode::Pass);
            }
            let told = dedup.check(&asked, token).await.unwrap();
            let expected = users.into_iter().map(|user| if seen.insert(user) { Verdict::First } else { Verdict::Duplicate });
            assert_eq!(told, expected.collect::<Vec<Verdict>>(), "batch {batch}");
        }
    }
}

/// What was told is kept no more when the wire stands again: nobody knows then whether these clicks were new, and nobody may say so.
#[tokio::test]
async fn a_batch_is_not_tried_for_longer_than_its_verdicts_are_kept() {
    for mirrored in kinds() {
        let wire = Wire::open(mirrored).await;
        let keep = Duration::from_secs(2);
        let dedup = wire.dedup_of(Stream { keep, ..stream(mirrored, "clicks", 1) }).await;
        // The scripts are known to the server.
        claim_and_commit(dedup.clone(), ids(dedup.stream(), 0..1), BatchToken::random()).await;
        check(dedup.clone(), ids(dedup.stream(), 1..2), BatchToken::random()).await;
        let (batch, written) = (ids(dedup.stream(), 100..110), ids(dedup.stream(), 200..210));
        let claim = BatchToken::random();
        assert_eq!(dedup.claim(&written, claim).await.unwrap(), [Claimed::First; 10]);
        let before = wire.executed().await;
        wire.proxy.lose_of_a_hundred(100);
        let mend = async {
            until("both are executed", async || wire.executed().await >= before + 2).await;
            // Time itself is what is asked about.
            tokio::time::sleep(keep + keep / 2).await;
            wire.proxy.lose_of_a_hundred(0);
        };
        let (checked, committed, ()) =
            tokio::join!(dedup.check(&batch, BatchToken::random()), dedup.commit(&written, claim), mend);
        assert!(matches!(checked, Err(DedupError::Unanswered { unanswered: 10, .. })), "{checked:?}");
        assert!(matches!(committed, Err(DedupError::Unanswered { unanswered: 10, .. })), "{committed:?}");
    }
}

/// The same of a mirrored stream: the call that is made again waits behind others of its process.
#[tokio::test]
async fn a_batch_that_waits_for_others_of_its_process_is_not_tried_for_longer_than_its_verdicts_are_kept() {
    let wire = Wire::open(true).await;
    let (keep, timeout) = (Duration::from_secs(4), Duration::from_millis(500));
    let dedup = wire.dedup_with(Stream { keep, ..stream(true, "clicks", 1) }, timeout).await;
    check(dedup.clone(), ids(dedup.stream(), 0..2), BatchToken::random()).await;
    // Each as many as one process asks about at once.
    let batch = |number: u64| ids(dedup.stream(), number * 100..(number + 1) * 100);
    let others = join_all((2..16).map(|number| {
        let (dedup, batch) = (dedup.clone(), batch(number));
        async move { dedup.check(&batch, BatchToken::random()).await }
    }));
    let (first, before) = (batch(1), wire.executed().await);
    wire.proxy.set(Mode::Hold(timeout + timeout / 5));
    let mend = async {
        // As often as a call is sent in twice that time. What comes from here on is in time, and takes its time.
        until("the first is executed, and unanswered", async || wire.executed().await >= before + 2).await;
        wire.proxy.set(Mode::Hold(timeout - timeout / 5));
    };
    let (told, _, ()) = tokio::join!(dedup.check(&first, BatchToken::random()), others, mend);
    match told {
        Ok(told) => assert!(told == [Verdict::First; 100], "its own clicks are somebody else's"),
        Err(told) => assert!(matches!(told, DedupError::Unanswered { unanswered: 100, .. }), "{told:?}"),
    }
}
