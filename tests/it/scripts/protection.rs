//! `admit_call`, `report_call`, `extend_permits`: what the fleet knows before, one call, the reply and what it knows after.

use futures_util::future::join_all;
use onejob::attempt::AttemptToken;
use onejob::store::{
    AdmitCall, Admitted, BreakerRules, Counted, Failed, Kind, Opened, ProbeOutcome, Refused, ReportCall, Reported, Stands, Store,
    Tally,
};

use crate::support::Redis;

const GUARD: &str = "oj:guard:{laser}";
const PERMITS: &str = "oj:permits:{laser}";
const OPEN_MS: u64 = 60_000;
const RULES: BreakerRules = BreakerRules {
    consecutive: 3,
    ratio_permille: 500,
    calls_min: 10,
    window_ms: 60_000,
    open_ms: OPEN_MS,
    open_max_ms: 3 * OPEN_MS,
    probe_lease_ms: 30_000,
};
/// Less than a test may take to be told a wait.
const SLACK_MS: u64 = 20_000;

/// A fleet's one provider, `laser`.
struct Laser {
    redis: Redis,
    store: Store,
}

impl Laser {
    async fn open() -> Self {
        let redis = Redis::start().await;
        let store = redis.store().await;
        Laser { redis, store }
    }

    async fn ask(&self, change: impl FnOnce(&mut AdmitCall<'_>)) -> Admitted {
        let mut admit = AdmitCall {
            token: AttemptToken::random(),
            provider: "laser",
            model: "",
            breaker: Some(RULES),
            permits_max: 0,
            lease_ms: 60_000,
            interval_us: 0,
            burst: 1,
            hold_max_ms: 0,
        };
        change(&mut admit);
        self.store.admit_call(&admit).await.unwrap()
    }

    async fn report(&self, change: impl FnOnce(&mut ReportCall<'_>)) -> Reported {
        let mut report = ReportCall {
            token: AttemptToken::random(),
            provider: "laser",
            place: "model:",
            generation: 0,
            tally: Tally::default(),
            probe: None,
            breaker: Some(RULES),
            hold_ms: 0,
            hold_max_ms: 0,
        };
        change(&mut report);
        self.store.report_call(&report).await.unwrap()
    }

    /// What a call that is admitted is told: its kind and generation.
    async fn admitted(&self) -> (Kind, u64) {
        match self.ask(|_| {}).await {
            Admitted::Admitted { kind, generation, place, .. } => {
                assert_eq!(place, "model:");
                (kind, generation)
            }
            refused @ Admitted::Refused { .. } => panic!("{refused:?}"),
        }
    }

    /// Opens the breaker, and returns the generation under which it had been closed.
    async fn broken(&self) -> u64 {
        let (kind, generation) = self.admitted().await;
        assert_eq!(kind, Kind::Call);
        let reported = self.report(|report| (report.generation, report.tally) = (generation, tally("xxx"))).await;
        assert_eq!((reported.counted, reported.stands, reported.opened), (Counted::Yes, Stands::Open, Opened::Yes));
        generation
    }

    /// Moves the breaker's times, as if so much time had passed, or, below zero, the clock had been set back.
    async fn age(&self, by_ms: i64) {
        let code = "local b = cmsgpack.unpack(redis.call('HGET', KEYS[1], 'model:')) \
                    for _, at in ipairs({4, 7}) do if b[at] > 0 then b[at] = b[at] - ARGV[1] end end \
                    redis.call('HSET', KEYS[1], 'model:', cmsgpack.pack(b)) return 'OK'";
        self.redis.command::<String>(&["EVAL", code, "1", GUARD, &by_ms.to_string()]).await;
    }

    /// How long the breaker is open, in ms.
    async fn open_for(&self) -> u64 {
        let asked = self.ask(|_| {}).await;
        let Admitted::Refused { why: Refused::Breaker, wait_ms, .. } = asked else { panic!("{asked:?}") };
        wait_ms
    }

    /// Takes the one probe of a breaker whose time is over.
    async fn probe(&self) -> (AttemptToken, u64) {
        let token = AttemptToken::random();
        let asked = self.ask(|admit| admit.token = token).await;
        let Admitted::Admitted { kind: Kind::Probe, generation, .. } = asked else { panic!("{asked:?}") };
        (token, generation)
    }

    async fn probed(&self, (token, generation): (AttemptToken, u64), outcome: ProbeOutcome) -> Reported {
        self.report(|report| (report.generation, report.probe) = (generation, Some((token, outcome)))).await
    }

    async fn fields(&self) -> Vec<Vec<u8>> {
        let mut fields: Vec<Vec<u8>> = self.redis.command(&["HGETALL", GUARD]).await;
        fields.sort_unstable();
        fields
    }
}

/// `x` for a failure, `.` for a success.
fn tally(calls: &str) -> Tally {
    let mut tally = Tally::default();
    calls.chars().for_each(|call| tally.count(if call == 'x' { Failed::Yes } else { Failed::No }));
    tally
}

#[tokio::test]
async fn failures_in_a_row_open_a_breaker_however_they_are_reported() {
    for reports in [vec!["xxx"], vec!["x", "x", "x"], vec!["..xx", "x"], vec![".xxx."], vec!["xx", "x."]] {
        let laser = Laser::open().await;
        let (_, generation) = laser.admitted().await;
        let mut last = None;
        for calls in &reports {
            last = Some(laser.report(|report| (report.generation, report.tally) = (generation, tally(calls))).await);
        }
        let last = last.unwrap();
        assert_eq!((last.stands, last.opened), (Stands::Open, Opened::Yes), "{reports:?}");
        assert!(last.generation > generation && last.wait_ms.abs_diff(OPEN_MS) < SLACK_MS, "{last:?}");
    }
    for reports in [vec!["xx", ".xx"], vec!["xx.", "xx"], vec!["x.x.x.xx"]] {
        let laser = Laser::open().await;
        let (_, generation) = laser.admitted().await;
        for calls in &reports {
            let reported = laser.report(|report| (report.generation, report.tally) = (generation, tally(calls))).await;
            assert_eq!((reported.stands, reported.generation), (Stands::Closed, generation), "{reports:?}");
        }
    }
}

#[tokio::test]
async fn a_share_of_failures_opens_a_breaker_once_there_are_enough_calls() {
    let laser = Laser::open().await;
    let (_, generation) = laser.admitted().await;
    let told =
        async |calls: &str| laser.report(|report| (report.generation, report.tally) = (generation, tally(calls))).await.stands;
    assert_eq!(told("x.x.x.x.").await, Stands::Closed, "half of them, but only eight");
    assert_eq!(told(".").await, Stands::Closed);
    assert_eq!(told(".").await, Stands::Closed, "ten, and four of them failed");
    assert_eq!(told("x.").await, Stands::Closed);
    assert_eq!(told("x").await, Stands::Closed, "thirteen, and six");
    assert_eq!(told("x").await, Stands::Open, "fourteen, and seven");
}

#[tokio::test]
async fn what_is_older_than_the_window_counts_no_more() {
    let laser = Laser::open().await;
    let (_, generation) = laser.admitted().await;
    let told =
        async |calls: &str| laser.report(|report| (report.generation, report.tally) = (generation, tally(calls))).await.stands;
    assert_eq!(told("x.x.x.x.").await, Stands::Closed);
    let code = "local b = cmsgpack.unpack(redis.call('HGET', KEYS[1], 'model:')) b[9] = b[9] - 10 \
                redis.call('HSET', KEYS[1], 'model:', cmsgpack.pack(b)) return 'OK'";
    laser.redis.command::<String>(&["EVAL", code, "1", GUARD]).await;
    assert_eq!(told("x.x.x.x.").await, Stands::Closed, "eight, not sixteen");
    assert_eq!(told("x.").await, Stands::Open);
}

/// The one that must be shown: of a thousand that come at once when a breaker's time is over, one is let through.
#[tokio::test]
async fn of_a_thousand_at_half_open_one_is_admitted() {
    let laser = Laser::open().await;
    laser.broken().await;
    laser.age(OPEN_MS as i64).await;
    let answers = join_all((0..1000).map(|_| laser.ask(|_| {}))).await;
    let probes = answers.iter().filter(|answer| matches!(answer, Admitted::Admitted { kind: Kind::Probe, .. })).count();
    let waiting = answers.iter().filter(|answer| matches!(answer, Admitted::Refused { why: Refused::Probe, .. })).count();
    assert_eq!((probes, waiting), (1, 999));
}

#[tokio::test]
async fn a_probe_that_is_never_heard_of_again_makes_room_when_its_lease_ends() {
    let laser = Laser::open().await;
    laser.broken().await;
    laser.age(OPEN_MS as i64).await;
    let lost = laser.probe().await;
    let asked = laser.ask(|_| {}).await;
    let Admitted::Refused { why: Refused::Probe, wait_ms, .. } = asked else { panic!("{asked:?}") };
    assert!(wait_ms <= RULES.probe_lease_ms && wait_ms + SLACK_MS > RULES.probe_lease_ms, "{wait_ms}");
    laser.age(RULES.probe_lease_ms as i64).await;
    let next = laser.probe().await;
    // What the lost one says now decides nothing: another one holds the place.
    for outcome in [ProbeOutcome::Succeeded, ProbeOutcome::Failed, ProbeOutcome::GivenBack] {
        let before = laser.fields().await;
        assert_eq!(laser.probed(lost, outcome).await.counted, Counted::Stale);
        assert_eq!(laser.fields().await, before);
    }
    let closed = laser.probed(next, ProbeOutcome::Succeeded).await;
    assert_eq!((closed.counted, closed.stands), (Counted::Yes, Stands::Closed));
    assert!(closed.generation > next.1);
    assert_eq!(laser.admitted().await, (Kind::Call, closed.generation));
}

#[tokio::test]
async fn a_probe_that_was_not_sent_makes_room_at_once() {
    let laser = Laser::open().await;
    laser.broken().await;
    laser.age(OPEN_MS as i64).await;
    let probe = laser.probe().await;
    let back = laser.probed(probe, ProbeOutcome::GivenBack).await;
    assert_eq!((back.counted, back.stands, back.wait_ms), (Counted::Yes, Stands::HalfOpen, 0));
    laser.probe().await;
}

#[tokio::test]
async fn a_probe_that_fails_opens_for_twice_as_long_up_to_a_limit_and_one_that_succeeds_begins_anew() {
    let laser = Laser::open().await;
    laser.broken().await;
    for expected in [2 * OPEN_MS, 3 * OPEN_MS, 3 * OPEN_MS] {
        laser.age(4 * OPEN_MS as i64).await;
        let probe = laser.probe().await;
        let failed = laser.probed(probe, ProbeOutcome::Failed).await;
        assert_eq!((failed.stands, failed.opened), (Stands::Open, Opened::Yes));
        assert!(failed.wait_ms <= expected && failed.wait_ms + SLACK_MS > expected, "{} of {expected}", failed.wait_ms);
    }
    laser.age(4 * OPEN_MS as i64).await;
    let probe = laser.probe().await;
    laser.probed(probe, ProbeOutcome::Succeeded).await;
    laser.broken().await;
    assert!(laser.open_for().await <= OPEN_MS);
}

#[tokio::test]
async fn what_was_admitted_before_can_neither_shorten_nor_lengthen_nor_close() {
    let laser = Laser::open().await;
    let old = laser.broken().await;
    let before = laser.fields().await;
    for calls in ["x", "xxxxx", ".", "....................", "x.x."] {
        let late = laser.report(|report| (report.generation, report.tally) = (old, tally(calls))).await;
        assert_eq!((late.counted, late.stands), (Counted::Stale, Stands::Open), "{calls}");
        assert_eq!(laser.fields().await, before, "{calls}");
    }
    // Nor after it has closed again.
    laser.age(OPEN_MS as i64).await;
    let probe = laser.probe().await;
    let closed = laser.probed(probe, ProbeOutcome::Succeeded).await;
    let before = laser.fields().await;
    let late = laser.report(|report| (report.generation, report.tally) = (old, tally("xxxxx"))).await;
    assert_eq!((late.counted, late.stands, late.generation), (Counted::Stale, Stands::Closed, closed.generation));
    assert_eq!(laser.fields().await, before);
}

#[tokio::test]
async fn a_report_sent_again_counts_once() {
    let laser = Laser::open().await;
    let (_, generation) = laser.admitted().await;
    let token = AttemptToken::random();
    let send = async || {
        let change = |report: &mut ReportCall<'_>| {
            (report.token, report.generation, report.tally) = (token, generation, tally("x"));
        };
        laser.report(change).await
    };
    assert_eq!(send().await.counted, Counted::Yes);
    let before = laser.fields().await;
    for _ in 0..5 {
        let again = send().await;
        assert_eq!((again.counted, again.stands), (Counted::Before, Stands::Closed));
    }
    assert_eq!(laser.fields().await, before);
}

#[tokio::test]
async fn a_question_asked_again_is_answered_alike() {
    let laser = Laser::open().await;
    let token = AttemptToken::random();
    let ask = async || {
        laser
            .ask(|admit| {
                (admit.token, admit.permits_max, admit.interval_us, admit.burst) = (token, 2, 60_000_000, 1);
            })
            .await
    };
    let first = ask().await;
    assert!(matches!(first, Admitted::Admitted { permits: 1, .. }), "{first:?}");
    let before =
        (laser.fields().await, laser.redis.command::<Vec<(Vec<u8>, f64)>>(&["ZRANGE", PERMITS, "0", "-1", "WITHSCORES"]).await);
    assert_eq!(ask().await, first);
    let after =
        (laser.fields().await, laser.redis.command::<Vec<(Vec<u8>, f64)>>(&["ZRANGE", PERMITS, "0", "-1", "WITHSCORES"]).await);
    assert_eq!(before, after);
    // A probe, too.
    let laser = Laser::open().await;
    laser.broken().await;
    laser.age(OPEN_MS as i64).await;
    let (token, _) = laser.probe().await;
    let before = laser.fields().await;
    assert!(matches!(laser.ask(|admit| admit.token = token).await, Admitted::Admitted { kind: Kind::Probe, .. }));
    assert_eq!(laser.fields().await, before);
}

#[tokio::test]
async fn a_refused_call_takes_nothing() {
    let laser = Laser::open().await;
    let full = |admit: &mut AdmitCall<'_>| (admit.permits_max, admit.interval_us, admit.burst) = (1, 60_000_000, 5);
    laser.ask(full).await;
    laser.broken().await;
    laser.age(OPEN_MS as i64).await;
    let before = laser.fields().await;
    let asked = laser.ask(full).await;
    assert!(matches!(asked, Admitted::Refused { why: Refused::Permits, .. }), "{asked:?}");
    assert_eq!(laser.fields().await, before, "neither the probe nor a turn");
    laser.probe().await;
}

#[tokio::test]
async fn permits_are_the_fleets_and_come_back_given_or_lapsed() {
    let laser = Laser::open().await;
    let take = async |token: AttemptToken| laser.ask(|admit| (admit.token, admit.permits_max) = (token, 2)).await;
    let tokens: Vec<AttemptToken> = (0..4).map(|_| AttemptToken::random()).collect();
    assert!(matches!(take(tokens[0]).await, Admitted::Admitted { permits: 1, .. }));
    assert!(matches!(take(tokens[1]).await, Admitted::Admitted { permits: 2, .. }));
    assert!(matches!(take(tokens[2]).await, Admitted::Refused { why: Refused::Permits, .. }));
    assert_eq!(laser.store.extend_permits("laser", &[tokens[1]], &[tokens[0]], 60_000).await.unwrap(), 1);
    assert!(matches!(take(tokens[2]).await, Admitted::Admitted { permits: 2, .. }));
    // Two gateways die, one of them with more permits than anybody takes away at once.
    for n in 0..100 {
        laser.redis.command::<u64>(&["ZADD", PERMITS, "1", &format!("lapsed-{n}")]).await;
    }
    let member = redis::cmd("ZADD").arg(PERMITS).arg(1).arg(&tokens[2].as_bytes()[..]).to_owned();
    member.query_async::<u64>(&mut laser.redis.connection()).await.unwrap();
    assert!(matches!(take(tokens[3]).await, Admitted::Admitted { permits: 2, .. }), "those that lapsed do not count");
    let left: u64 = laser.redis.command(&["ZCARD", PERMITS]).await;
    assert_eq!(left, 103 - 32, "some of them are gone");
    // A call whose permit lapsed though it runs counts again.
    assert_eq!(laser.store.extend_permits("laser", &[tokens[2], tokens[1]], &[], 60_000).await.unwrap(), 3);
    let ttl: i64 = laser.redis.command(&["PTTL", PERMITS]).await;
    assert!(ttl > 0, "a fleet that is gone leaves nothing behind");
}

#[tokio::test]
async fn the_rate_is_the_fleets_with_a_burst_after_a_pause() {
    let laser = Laser::open().await;
    let ask = async || laser.ask(|admit| (admit.breaker, admit.interval_us, admit.burst) = (None, 60_000_000, 3)).await;
    for _ in 0..3 {
        assert!(matches!(ask().await, Admitted::Admitted { kind: Kind::Call, .. }));
    }
    let before = laser.fields().await;
    let Admitted::Refused { why: Refused::Rate, wait_ms, .. } = ask().await else { panic!("a fourth") };
    assert!(wait_ms <= 60_000 && wait_ms + SLACK_MS > 60_000, "{wait_ms}");
    assert_eq!(laser.fields().await, before);
}

#[tokio::test]
async fn a_provider_that_wants_to_be_left_alone_is_left_alone_by_all_and_not_for_longer_than_allowed() {
    let laser = Laser::open().await;
    let ask = async || laser.ask(|admit| (admit.breaker, admit.hold_max_ms) = (None, 60_000)).await;
    let tell = async |hold_ms: u64| {
        let change = |report: &mut ReportCall<'_>| {
            (report.place, report.breaker, report.hold_ms, report.hold_max_ms) = ("", None, hold_ms, 60_000);
        };
        laser.report(change).await
    };
    assert!(matches!(ask().await, Admitted::Admitted { .. }));
    let held = tell(3_600_000).await;
    assert_eq!((held.counted, held.stands), (Counted::Yes, Stands::Hold));
    let Admitted::Refused { why: Refused::Hold, wait_ms, .. } = ask().await else { panic!("it is left alone") };
    assert!(wait_ms <= 60_000 && wait_ms + SLACK_MS > 60_000, "{wait_ms}");
    // A shorter wish does not shorten it.
    assert!(tell(1).await.wait_ms + SLACK_MS > 60_000);
}

/// What a clock that was set back leaves too far ahead is over, not in the way for as long as it was set back.
#[tokio::test]
async fn a_clock_that_is_set_back_keeps_nobody_out_for_longer_than_the_rules_say() {
    const BACK_MS: i64 = -3_600_000;
    let laser = Laser::open().await;
    laser.broken().await;
    laser.age(BACK_MS).await;
    laser.probe().await;
    laser.age(BACK_MS).await;
    laser.probe().await;
    let later_us = (laser.store.now_ms() + 3_600_000) * 1000;
    laser.redis.command::<u64>(&["HSET", GUARD, "rate_us", &later_us.to_string()]).await;
    laser.redis.command::<u64>(&["HSET", GUARD, "hold_ms", &(later_us / 1000).to_string()]).await;
    let change = |admit: &mut AdmitCall<'_>| {
        (admit.breaker, admit.interval_us, admit.burst, admit.hold_max_ms) = (None, 1_000_000, 5, 60_000);
    };
    let Admitted::Refused { why: Refused::Rate, wait_ms, .. } = laser.ask(change).await else { panic!("no turn yet") };
    assert!(wait_ms <= 1000, "{wait_ms}");
}

#[tokio::test]
async fn each_model_has_a_breaker_and_beyond_a_number_the_rest_share_one() {
    let laser = Laser::open().await;
    let ask = async |n: usize| match laser.ask(|admit| admit.model = Box::leak(format!("{n:016x}").into_boxed_str())).await {
        Admitted::Admitted { place, generation, .. } => (place, generation),
        refused @ Admitted::Refused { .. } => panic!("{refused:?}"),
    };
    let mut places = std::collections::BTreeSet::new();
    for n in 0..100 {
        places.insert(ask(n).await.0);
    }
    assert_eq!(places.len(), 33);
    assert!(places.contains("model:rest"));
    // One model's trouble is not another's.
    let (place, generation) = ask(0).await;
    let place: &'static str = place.leak();
    laser.report(|report| (report.place, report.generation, report.tally) = (place, generation, tally("xxx"))).await;
    let asked = laser.ask(|admit| admit.model = "0000000000000000").await;
    assert!(matches!(asked, Admitted::Refused { why: Refused::Breaker, .. }), "{asked:?}");
    ask(1).await;
    // A model that nobody asks for gives its place to one that somebody does; an open breaker does not.
    let code = "for _, f in ipairs({'model:0000000000000000', 'model:0000000000000001'}) do \
                local b = cmsgpack.unpack(redis.call('HGET', KEYS[1], f)) b[8] = b[8] - 700000 \
                redis.call('HSET', KEYS[1], f, cmsgpack.pack(b)) end return 'OK'";
    laser.redis.command::<String>(&["EVAL", code, "1", GUARD]).await;
    let (place, _) = ask(500).await;
    assert_eq!(place, format!("model:{:016x}", 500));
    assert_eq!(ask(501).await.0, "model:rest");
    let asked = laser.ask(|admit| admit.model = "0000000000000000").await;
    assert!(matches!(asked, Admitted::Refused { why: Refused::Breaker, .. }), "{asked:?}");
    let life: i64 = laser.redis.command(&["PTTL", GUARD]).await;
    assert!(life > 0);
}

/// Generations are times: what is told of a breaker that was forgotten is not taken for its successor's.
#[tokio::test]
async fn a_breaker_that_was_forgotten_begins_a_generation_of_its_own() {
    let laser = Laser::open().await;
    let (_, old) = laser.admitted().await;
    laser.redis.command::<u64>(&["DEL", GUARD]).await;
    let late = laser.report(|report| (report.generation, report.tally) = (old, tally("xxx"))).await;
    assert_eq!((late.counted, late.stands, late.generation), (Counted::Stale, Stands::Closed, 0));
    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    assert!(laser.admitted().await.1 > old);
}
