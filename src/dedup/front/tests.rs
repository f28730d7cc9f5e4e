//! A front beside a stream that has none: the same verdicts, whatever happened in which order and on which process.

use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::*;
use crate::dedup::{BatchToken, Claimed, Committed, Dedup, FieldValue, OnceError, Verdict};
use crate::store::testing::Fixture;

const HOUR_MS: u64 = 3_600_000;
const WINDOW_MS: u64 = 12 * HOUR_MS;

fn stream(name: &str) -> Stream {
    Stream { window: Duration::from_millis(WINDOW_MS), expected: 10_000, ..Stream::new(name, &["user"]) }
}

fn ids(stream: &Stream, users: impl IntoIterator<Item = u64>) -> Vec<ClickId> {
    users.into_iter().map(|user| stream.id(|_| Some(FieldValue::Integer(user.into()))).unwrap()).collect()
}

/// One that would never forget by itself.
fn endless() -> Front {
    Front { entries: 10_000, ttl: Duration::from_millis(100 * WINDOW_MS) }
}

fn knows(dedup: &Dedup, user: u64) -> bool {
    dedup.front.as_ref().unwrap().knows(&ids(&dedup.stream, [user])[0])
}

async fn check(dedup: &Dedup, user: u64) -> Verdict {
    dedup.check(&ids(&dedup.stream, [user]), BatchToken::random()).await.unwrap()[0]
}

/// Lets time pass: in Redis, and here.
async fn pass(fixture: &Fixture, of: &[&Dedup], ms: u64) {
    let code = "local packed = redis.call('GET', KEYS[1]) if packed then local shard = cmsgpack.unpack(packed) \
                shard[2] = shard[2] + ARGV[1] redis.call('SET', KEYS[1], cmsgpack.pack(shard), 'KEEPTTL') end return 'OK'";
    let mut names: Vec<&str> = of.iter().map(|dedup| dedup.stream.name.as_str()).collect();
    names.dedup();
    for name in names {
        let key = format!("oj:dedup:{{{name}/00}}");
        fixture.query::<String>(&["EVAL", code, "1", &key, &ms.to_string()]).await;
    }
    for front in of.iter().filter_map(|dedup| dedup.front.as_ref()) {
        front.passed_ms.fetch_add(ms, Ordering::Relaxed);
    }
}

#[test]
fn a_front_that_cannot_be_is_refused_with_its_streams_name() {
    for (what, front) in [
        ("entries, not 0", Front { entries: 0, ..Front::default() }),
        ("entries, not 10000001", Front { entries: FRONT_ENTRIES_MAX + 1, ..Front::default() }),
        ("not 0ns", Front { ttl: Duration::ZERO, ..Front::default() }),
    ] {
        let error = Known::new(front, &stream("clicks")).err().unwrap().to_string();
        assert!(error.contains(what) && error.contains("clicks"), "{error}");
    }
}

#[test]
fn a_front_is_no_larger_than_it_says_and_knows_the_newest() {
    let stream = stream("clicks");
    let front = Known::new(Front { entries: 100_000, ttl: Duration::from_secs(3_600) }, &stream).unwrap();
    let all = ids(&stream, 0..300_000);
    all.iter().for_each(|id| front.learn(id, front.now_ms()));
    assert!(front.ids.len() <= 100_000, "{}", front.ids.len());
    let bytes = front.ids.memory_used().total() as f64 / 100_000.0;
    println!("{bytes} bytes an entry");
    assert!(bytes < 96.0, "{bytes} bytes an entry");
    let newest = all[220_000..].iter().filter(|id| front.knows(id)).count();
    assert!(newest > 76_000, "of the 80,000 newest {newest} are known");
}

#[tokio::test]
async fn only_what_redis_begins_to_remember_is_known_and_only_for_half_a_window() {
    let fixture = Fixture::start().await;
    let here = Dedup::new(&fixture.store, stream("clicks")).unwrap().with_front(endless()).unwrap();
    let there = Dedup::new(&fixture.store, stream("clicks")).unwrap();
    // A duplicate may be forgotten a moment later.
    check(&there, 1).await;
    assert_eq!(check(&here, 1).await, Verdict::Duplicate);
    assert!(!knows(&here, 1));
    // What is told again was remembered at some time before.
    let named = BatchToken::named("a file at 0");
    there.check(&ids(&here.stream, [2]), named).await.unwrap();
    assert_eq!(here.check(&ids(&here.stream, [2]), named).await.unwrap(), [Verdict::First]);
    assert!(!knows(&here, 2));
    // A claim can lapse.
    let token = BatchToken::random();
    assert_eq!(here.claim(&ids(&here.stream, [3, 1]), token).await.unwrap(), [Claimed::First, Claimed::Duplicate]);
    assert_eq!(here.claim(&ids(&here.stream, [3]), BatchToken::random()).await.unwrap(), [Claimed::Held]);
    assert!(!knows(&here, 3) && !knows(&here, 1));
    assert_eq!(here.commit(&ids(&here.stream, [3, 1]), token).await.unwrap(), [Committed::Committed, Committed::Lost]);
    assert!(knows(&here, 3) && !knows(&here, 1));
    // A first one, for half a window.
    assert_eq!(check(&here, 4).await, Verdict::First);
    pass(&fixture, &[&here], WINDOW_MS / 2 - HOUR_MS).await;
    assert!(knows(&here, 4) && knows(&here, 3));
    pass(&fixture, &[&here], HOUR_MS).await;
    assert!(!knows(&here, 4) && !knows(&here, 3));
}

/// A reply that is late by half a window leaves nothing to know: Redis may have begun to remember at the moment of the question.
#[tokio::test]
async fn the_time_that_a_question_takes_is_taken_from_what_it_makes_known() {
    let fixture = Fixture::start().await;
    let here = Dedup::new(&fixture.store, stream("clicks")).unwrap().with_front(endless()).unwrap();
    for (user, late_ms, known) in [(1, WINDOW_MS / 2, false), (2, WINDOW_MS / 2 - HOUR_MS, true)] {
        let one = ids(&here.stream, [user]);
        let mut asking = std::pin::pin!(here.check_once(&one));
        assert!(futures_util::poll!(&mut asking).is_pending());
        here.front.as_ref().unwrap().passed_ms.fetch_add(late_ms, Ordering::Relaxed);
        assert_eq!(asking.await.unwrap(), [Verdict::First]);
        assert_eq!(knows(&here, user), known, "{late_ms} ms late");
    }
}

#[tokio::test]
async fn a_batch_that_can_be_sent_again_is_never_asked_of_a_front() {
    let fixture = Fixture::start().await;
    let here = Dedup::new(&fixture.store, stream("clicks")).unwrap().with_front(endless()).unwrap();
    let one = ids(&here.stream, [1]);
    let token = BatchToken::random();
    assert_eq!(here.check(&one, token).await.unwrap(), [Verdict::First]);
    assert_eq!(here.check_once(&one).await.unwrap(), [Verdict::Duplicate]);
    assert_eq!(here.check(&one, token).await.unwrap(), [Verdict::First]);
    // Neither does it hide a conflict.
    let other = ids(&here.stream, [2]);
    here.check(&other, BatchToken::random()).await.unwrap();
    assert!(here.check(&other, token).await.is_err());
}

/// A batch that only half is known of goes to Redis as a whole, and its error says how to complete it.
#[tokio::test]
async fn a_batch_without_a_name_that_is_not_answered_is_completed_by_its_token() {
    let fixture = Fixture::start().await;
    let here = Dedup::new(&fixture.store, stream("clicks")).unwrap().with_front(endless()).unwrap();
    let here = here.with_patience(Duration::ZERO);
    check(&here, 1).await;
    let both = ids(&here.stream, [1, 2]);
    fixture.query::<String>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let OnceError { token, error } = here.check_once(&both).await.unwrap_err();
    assert!(error.to_string().contains("2 of 2"), "{error}");
    assert_eq!(here.check_once(&both[..1]).await.unwrap(), [Verdict::Duplicate], "known, whatever Redis can do");
    fixture.query::<String>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert_eq!(here.check(&both, token).await.unwrap(), [Verdict::Duplicate, Verdict::First]);
    assert_eq!(here.check(&both, token).await.unwrap(), [Verdict::Duplicate, Verdict::First]);
}

/// What two processes do with a stream.
#[derive(Clone, Debug)]
enum Step {
    /// A batch that is asked about once.
    Once { process: usize, users: Vec<u64> },
    /// A batch with a name, maybe for the second time.
    Named { process: usize, name: u64 },
    /// A claim with a name, maybe for the second time; then a commit of it, or its release, or neither.
    Claimed { process: usize, name: u64, end: u8 },
    /// Time passes.
    Pause { ms: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let users = prop::collection::vec(0_u64..12, 1..3);
    let step = prop_oneof![
        6 => (0_usize..2, users).prop_map(|(process, users)| Step::Once { process, users }),
        2 => (0_usize..2, 0_u64..6).prop_map(|(process, name)| Step::Named { process, name }),
        2 => (0_usize..2, 0_u64..6, 0_u8..3).prop_map(|(process, name, end)| Step::Claimed { process, name, end }),
        3 => prop_oneof![2 => Just(HOUR_MS / 60), 1 => 0..10 * HOUR_MS].prop_map(|ms| Step::Pause { ms }),
    ];
    prop::collection::vec(step, 1..40)
}

/// What a step was told.
async fn told(dedup: &Dedup, step: &Step) -> String {
    let of_name = |name: &u64| ids(&dedup.stream, [name % 12, (name * 5 + 3) % 12]);
    match step {
        Step::Once { users, .. } => format!("{:?}", dedup.check_once(&ids(&dedup.stream, users.iter().copied())).await.unwrap()),
        Step::Named { name, .. } => {
            format!("{:?}", dedup.check(&of_name(name), BatchToken::named(&format!("batch {name}"))).await.unwrap())
        }
        Step::Claimed { name, end, .. } => {
            let (both, token) = (of_name(name), BatchToken::named(&format!("claim {name}")));
            let told = format!("{:?}", dedup.claim(&both, token).await.unwrap());
            match end {
                0 => told + &format!("{:?}", dedup.commit(&both, token).await.unwrap()),
                1 => {
                    dedup.release(&both, token).await.unwrap();
                    told
                }
                _ => told,
            }
        }
        Step::Pause { .. } => String::new(),
    }
}

/// Two processes with fronts, and the same steps on a stream without any: nobody can tell them apart by their verdicts.
#[test]
fn verdicts_with_fronts_are_those_without_in_random_interleavings_of_two_processes() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let fixture = runtime.block_on(Fixture::start());
    let (cases, known) = (AtomicU32::new(0), AtomicU32::new(0));
    let mut runner = TestRunner::new(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() });
    let outcome = runner.run(&(1_u32..=3, steps()), |(slices, steps)| {
        let case = cases.fetch_add(1, Ordering::Relaxed);
        let make = |kind: &str| Dedup::new(&fixture.store, Stream { slices, ..stream(&format!("{kind}-{case}")) }).unwrap();
        let without = make("without");
        let with = [(); 2].map(|()| make("with").with_front(endless()).unwrap());
        // Both streams begin their slices at the same time, nearly.
        for dedup in [&without, &with[0]] {
            runtime.block_on(check(dedup, 99));
        }
        for step in &steps {
            match step {
                Step::Pause { ms } => runtime.block_on(pass(&fixture, &[&without, &with[0], &with[1]], *ms)),
                Step::Once { process, .. } | Step::Named { process, .. } | Step::Claimed { process, .. } => {
                    let here = &with[*process];
                    if let Step::Once { users, .. } = step
                        && users.iter().all(|user| knows(here, *user))
                    {
                        known.fetch_add(1, Ordering::Relaxed);
                    }
                    let expected = runtime.block_on(told(&without, step));
                    prop_assert_eq!(runtime.block_on(told(here, step)), expected, "{:?}", step);
                }
            }
        }
        Ok(())
    });
    outcome.unwrap();
    println!("known: {known:?}");
    assert!(known.load(Ordering::Relaxed) > 40, "the fronts had too little to say: {known:?}");
}
