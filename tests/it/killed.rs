//! A gateway dies, by SIGKILL, at every place of an attempt's life; another one lives on. Nothing is done twice, nothing is lost, and
//! what the record says is true.

use std::time::{Duration, Instant};

use onejob::attempt::AttemptState;
use onejob::failpoint::POINTS;
use onejob::fingerprint::hex;
use onejob::job::{Body, Job, JobState};
use onejob::store::{Read, Store};

use crate::support::gateway::{Answer, End, Gateway, Site};
use crate::support::until;

const SIGKILL: i32 = 9;
/// Leases of two seconds lapse, one after another, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const KEY: &str = "order-1";
const REQUEST_ID: &str = "decision-1";
const RESOLVE: &str = r#"{"outcome":"succeeded","reason":"it lies in the tray","result":{"page":1}}"#;
/// Executed, and nobody hears of it.
const DROPPED: &str = r#"{"simulate":"drop"}"#;
/// A person is called soon.
const ASKING: &[(&str, &str)] = &[("route.print.reconcile", r#"{ first = "50ms", max = "500ms", give_up = "300ms" }"#)];
/// Larger than what a record holds itself.
const LARGE: usize = 9000;

/// One way to die.
struct Scene {
    /// One gateway after another dies here; the next one lives.
    points: &'static [&'static str],
    /// What the printer does unless the input says something else; once the first gateway is dead it does what it is asked.
    printer: &'static str,
    input: String,
    then: Then,
    /// How the job may stand in the end.
    state: JobState,
    attempts: &'static [AttemptState],
    executions: u64,
    /// What every gateway is told besides.
    settings: &'static [(&'static str, &'static str)],
}

/// What happens to the first gateway, and once more to the last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// A submit, and no more.
    Submit,
    /// A cancel while the attempt runs.
    Cancel,
    /// A decision about an attempt that is unknown.
    Resolve,
    /// Redis takes nothing more once the printer has the request.
    Refuse,
}

impl Scene {
    fn new(points: &'static [&'static str]) -> Self {
        Scene {
            points,
            printer: "succeed",
            input: "{}".to_owned(),
            then: Then::Submit,
            state: JobState::Unknown,
            attempts: &[AttemptState::Unknown],
            executions: 0,
            settings: &[],
        }
    }

    fn printed(self) -> Self {
        Scene { executions: 1, ..self }
    }

    fn succeeded(self) -> Self {
        Scene { state: JobState::Succeeded, attempts: &[AttemptState::Succeeded], executions: 1, ..self }
    }

    /// The first attempt is refused, so that there is a second one.
    fn refused_first(self) -> Self {
        Scene { printer: "refuse_status=429", ..self }
    }
}

fn derived(job: &Job) -> JobState {
    let any = |states: &[AttemptState]| job.attempts.iter().any(|attempt| states.contains(&attempt.state));
    match () {
        () if job.ended_ms > 0 => job.state,
        () if !job.canceled_by.is_empty() => JobState::Canceling,
        () if any(&[AttemptState::Starting, AttemptState::Running]) => JobState::Running,
        () if any(&[AttemptState::Unknown]) => JobState::Unknown,
        () => JobState::Pending,
    }
}

async fn the_job(site: &Site, store: &Store) -> Option<Job> {
    let records = site.redis.keys().await.into_iter().filter(|key| key.starts_with("oj:{") && key.ends_with('}'));
    let records: Vec<String> = records.collect();
    assert!(records.len() <= 1, "one key, one job: {records:?}");
    let identity = records.first()?.trim_start_matches("oj:{").trim_end_matches('}').parse().unwrap();
    match store.read_job(identity).await.unwrap() {
        Read::Found(job) => Some(*job),
        other => panic!("{other:?}"),
    }
}

/// The call that is made while the first gateway dies, and to the last one again, with the same request id.
async fn decide(gateway: &Gateway, then: Then, id: &str) -> Option<Answer> {
    let headers = [("Onejob-Request-Id", REQUEST_ID)];
    match then {
        Then::Submit | Then::Refuse => None,
        Then::Cancel => gateway.send("POST", &format!("/v1/jobs/{id}/cancel"), &headers, "{}").await,
        Then::Resolve => gateway.send("POST", &format!("/v1/jobs/{id}/attempts/1/resolve"), &headers, RESOLVE).await,
    }
}

async fn play(scene: Scene) {
    let site = Site::open().await;
    let store = site.redis.store().await;
    site.printer.set_behaviour(scene.printer).unwrap();
    let mut points = scene.points.iter();
    let mut first = site.start(scene.settings, points.next().copied()).await;
    // It may die before it answers.
    let submitted = first.submit(KEY, &scene.input).await;
    match scene.then {
        Then::Submit => {}
        Then::Cancel => {
            until("the printer has it", async || site.printer.ledger().received == 1).await;
            let id = submitted.as_ref().unwrap().body["id"].as_str().unwrap().to_owned();
            assert!(decide(&first, scene.then, &id).await.is_none(), "it dies before it answers");
        }
        Then::Resolve => {
            until("the attempt is unknown", async || {
                the_job(&site, &store).await.is_some_and(|job| job.state == JobState::Unknown)
            })
            .await;
            let id = submitted.as_ref().unwrap().body["id"].as_str().unwrap().to_owned();
            assert!(decide(&first, scene.then, &id).await.is_none(), "it dies before it answers");
        }
        Then::Refuse => {
            until("the printer has it", async || site.printer.ledger().received == 1).await;
            site.redis.command::<()>(&["ACL", "SETUSER", "default", "-eval", "-evalsha"]).await;
        }
    }
    assert_eq!(first.ended().await, End::Signal(SIGKILL), "{}", first.words());
    if scene.then == Then::Refuse {
        site.redis.command::<()>(&["ACL", "SETUSER", "default", "+@all"]).await;
    }
    site.printer.set_behaviour("succeed").unwrap();
    for point in points {
        let mut next = site.start(scene.settings, Some(point)).await;
        assert_eq!(next.ended().await, End::Signal(SIGKILL), "{point}: {}", next.words());
    }

    let last = site.start(scene.settings, None).await;
    let again = last.submit(KEY, &scene.input).await.unwrap();
    let id = again.body["id"].as_str().unwrap_or_else(|| panic!("{again:?}")).to_owned();
    if let Some(submitted) = submitted {
        assert_eq!(submitted.body["id"], again.body["id"], "the same key, the same job");
    }
    let decided = decide(&last, scene.then, &id).await;
    assert!(decided.as_ref().is_none_or(|answer| answer.status < 300), "{decided:?}");
    let began = Instant::now();
    let job = loop {
        let job = the_job(&site, &store).await.unwrap();
        assert_eq!(job.state, derived(&job), "the stored state is the derived one: {job:?}");
        assert_eq!(job.id.to_string(), id);
        let settled = job.attempts.iter().all(|attempt| !matches!(attempt.state, AttemptState::Starting | AttemptState::Running));
        if job.state == scene.state && settled {
            break job;
        }
        assert!(began.elapsed() < PATIENCE, "not {}: {job:?}\n{}", scene.state, last.words());
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let states: Vec<AttemptState> = job.attempts.iter().map(|attempt| attempt.state).collect();
    assert_eq!(states, scene.attempts, "{job:?}");
    assert_eq!(site.printer.ledger().executed, scene.executions);
    if job.state != JobState::Succeeded {
        assert!(!job.reason.is_empty(), "a job that did not succeed says why: {job:?}");
    }

    if scene.settings == ASKING {
        until("a person is called", async || the_job(&site, &store).await.is_some_and(|job| job.needs_operator())).await;
        let job = the_job(&site, &store).await.unwrap();
        assert_eq!(job.happened(1, "needs_operator").count(), 1, "once: {job:?}");
        assert_eq!(last.job(&id).await.unwrap().body["needs_operator"], true);
    }

    // The same key tells the truth, once more and for good.
    let truth = last.submit(KEY, &scene.input).await.unwrap();
    assert_eq!((truth.body["id"].as_str(), truth.body["state"].as_str()), (Some(id.as_str()), Some(job.state.as_str())));
    assert_eq!(truth.status, if job.is_ended() { 200 } else { 202 });
    if job.completed_by > 0 {
        let result = &last.job(&id).await.unwrap().body["result"];
        assert!(!result.is_null(), "the result is there");
    }
    assert_eq!(site.printer.ledger().executed, scene.executions);
    // Nobody has to know of a job by chance.
    let (due, unknown) =
        (format!("oj:due:{{{:02x}}}", job.id.identity().shard()), format!("oj:unknown:{{{:02x}}}", job.id.identity().shard()));
    let identity = job.id.identity().to_string();
    until("the job has the hints that it needs", async || {
        let due: Option<f64> = site.redis.command(&["ZSCORE", &due, &identity]).await;
        let unknown: Option<f64> = site.redis.command(&["ZSCORE", &unknown, &identity]).await;
        job.is_ended() || (due.is_some() && unknown.is_some())
    })
    .await;
    assert_eq!(site.spooled(".verdict"), 0, "what is stored is no longer in the spool");
    // Blobs live as long as the record that names them: -1 is for ever, as long as the job is open.
    let record = format!("oj:{{{identity}}}");
    let named = [&job.input.body, &job.result.body].into_iter().filter_map(|body| match body {
        Body::Inline(_) => None,
        Body::Blob { sha256, .. } => Some(format!("{record}:b:{}", hex(sha256))),
    });
    for blob in named {
        until("a blob lives as long as its record", async || {
            let blob_ms: i64 = site.redis.command(&["PTTL", &blob]).await;
            let record_ms: i64 = site.redis.command(&["PTTL", &record]).await;
            (blob_ms - record_ms).abs() < 60_000
        })
        .await;
    }
}

fn large() -> String {
    format!(r#"{{"text":"{}","simulate":"size={LARGE}"}}"#, "x".repeat(LARGE))
}

macro_rules! scenes {
    ($($name:ident: $scene:expr;)*) => {
        $(#[tokio::test]
        async fn $name() {
            play($scene).await;
        })*

        /// Every scene's points.
        fn played() -> Vec<&'static str> {
            [$($scene.points),*].concat()
        }
    };
}

use AttemptState::{Aborted, Failed, Unknown};

scenes! {
    before_the_claim: Scene { input: large(), ..Scene::new(&["claim.blob"]) }.succeeded();
    after_the_claim: Scene::new(&["claim.made"]);
    after_the_claim_with_a_blob: Scene { input: large(), ..Scene::new(&["claim.made"]) };
    after_the_connect: Scene::new(&["call.connected"]);
    after_the_first_byte: Scene { input: r#"{"simulate":"unexecuted,hang"}"#.to_owned(), ..Scene::new(&["call.sent"]) };
    after_the_answer: Scene::new(&["call.answered"]).printed();
    before_the_result_is_recorded: Scene::new(&["finish.blob"]).printed();
    between_the_results_blob_and_its_record: Scene { input: large(), ..Scene::new(&["finish.blob"]) }.printed();
    between_the_results_record_and_its_blobs_life: Scene { input: large(), ..Scene::new(&["finish.recorded"]) }.succeeded();
    after_the_result: Scene::new(&["finish.stored"]).succeeded();
    after_a_refusal: Scene {
        printer: "refuse_status=400", state: JobState::Failed, attempts: &[Failed], ..Scene::new(&["finish.stored"])
    };
    before_the_second_attempt: Scene { attempts: &[Failed, AttemptState::Succeeded], ..Scene::new(&["begin.before"]).succeeded() }
        .refused_first();
    after_the_second_attempt_began: Scene { attempts: &[Failed, Unknown], ..Scene::new(&["begin.made"]) }.refused_first();
    after_a_look: Scene {
        attempts: &[Failed, AttemptState::Succeeded], ..Scene::new(&["begin.before", "tick.made"]).succeeded()
    }.refused_first();
    after_an_adoption: Scene {
        attempts: &[Failed, Aborted, AttemptState::Succeeded], ..Scene::new(&["begin.before", "adopt.made"]).succeeded()
    }.refused_first();
    while_an_adopted_job_is_rendered: Scene {
        attempts: &[Failed, Aborted, Aborted, AttemptState::Succeeded],
        ..Scene::new(&["begin.before", "adopt.render", "adopt.render"]).succeeded()
    }.refused_first();
    after_an_adopted_job_is_written_ahead: Scene {
        attempts: &[Failed, Unknown], ..Scene::new(&["begin.before", "adopt.marked"])
    }.refused_first();
    // Case 24: the fourth gateway lives.
    by_poison: Scene {
        state: JobState::Failed, attempts: &[Failed, Aborted, Aborted, Aborted],
        ..Scene::new(&["begin.before", "adopt.render", "adopt.render", "adopt.render"])
    }.refused_first();
    before_a_cancel: Scene {
        then: Then::Cancel, input: r#"{"simulate":"hang"}"#.to_owned(), state: JobState::Canceling, ..Scene::new(&["cancel.before"])
    }.printed();
    after_a_cancel: Scene {
        then: Then::Cancel, input: r#"{"simulate":"hang"}"#.to_owned(), state: JobState::Canceling, ..Scene::new(&["cancel.made"])
    }.printed();
    before_a_decision: Scene {
        then: Then::Resolve, input: r#"{"simulate":"drop"}"#.to_owned(), ..Scene::new(&["resolve.before"])
    }.succeeded();
    after_a_decision: Scene {
        then: Then::Resolve, input: r#"{"simulate":"drop"}"#.to_owned(), ..Scene::new(&["resolve.made"])
    }.succeeded();
    while_it_has_the_right_to_ask: Scene { settings: ASKING, input: DROPPED.to_owned(), ..Scene::new(&["ask.taken"]) }.printed();
    after_it_has_asked: Scene { settings: ASKING, input: DROPPED.to_owned(), ..Scene::new(&["ask.noted"]) }.printed();
    after_a_person_is_called: Scene { settings: ASKING, input: DROPPED.to_owned(), ..Scene::new(&["ask.answered"]) }.printed();
    // A minute later its file would be taken over; here it is still somebody's who may be writing.
    before_the_spool_has_it: Scene {
        then: Then::Refuse, input: r#"{"simulate":"delay=300ms"}"#.to_owned(), ..Scene::new(&["spool.temporary"])
    }.printed();
    after_the_spool_has_it: Scene {
        then: Then::Refuse, input: r#"{"simulate":"delay=300ms"}"#.to_owned(), ..Scene::new(&["spool.renamed"])
    }.succeeded();
    between_the_store_and_the_spool: Scene {
        then: Then::Refuse, input: r#"{"simulate":"delay=300ms"}"#.to_owned(), ..Scene::new(&["spool.renamed", "spool.stored"])
    }.succeeded();
    after_the_spool_is_empty: Scene {
        then: Then::Refuse, input: r#"{"simulate":"delay=300ms"}"#.to_owned(), ..Scene::new(&["spool.renamed", "spool.removed"])
    }.succeeded();
}

#[test]
fn every_point_is_played() {
    let played = played();
    let missing: Vec<_> = POINTS.iter().filter(|point| !played.contains(point)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
