//! What a route requires of inputs and answers: before a claim, and before an answer is anybody's result.

use std::sync::Arc;
use std::time::Duration;

use onejob::attempt::AttemptState::{Aborted, Failed, Succeeded, Unknown};
use onejob::attempt::{AttemptState, AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::job::{JobId, JobState};
use onejob::policy::FailoverOn;
use onejob::provider::Response;
use onejob::runtime::{CheckResult, Decision, Replayed, Report, Runtime, SettleError, SubmitError, Then};
use onejob::store::{Begun, Finished, Resolved, Word};
use onejob::validate::{Check, Extract, Of, Required, Validator};

use super::{Setup, Shop, both, ended, race, settled, states, submission, ungated, until};

/// The simulated printers repeat `input`: here it is what they made of it.
const TOTAL: &str = r#"output.total == output.items | map(attribute="price") | sum"#;
const RIGHT: &str = r#"{"input":{"total":25.3,"items":[{"price":20.1},{"price":5.2}]}}"#;
const WRONG: &str = r#"{"input":{"total":26,"items":[{"price":20.1},{"price":5.2}]}}"#;

fn check(of: Of, schema: &str, assertions: &[&str]) -> Check {
    let assertions: Vec<String> = assertions.iter().map(|text| (*text).to_owned()).collect();
    let schema = (!schema.is_empty()).then_some(schema.as_bytes());
    Check::compile(of, &Required { schema, assertions: &assertions }).unwrap()
}

/// Outputs whose total must be right.
fn totals(setup: &mut Setup) {
    setup.route.validator = Some(Arc::new(Validator {
        output: Some(check(Of::Output, r#"{"required":["total","items"]}"#, &[TOTAL])),
        extract: Extract { pointer: "/input".to_owned(), ..Extract::default() },
        ..Validator::default()
    }));
}

/// Inputs with few pages.
fn pages(setup: &mut Setup) {
    let pages = r#"{"required":["pages"],"properties":{"pages":{"maximum":9}}}"#;
    setup.route.validator = Some(Arc::new(Validator { input: Some(check(Of::Input, pages, &[])), ..Validator::default() }));
}

fn answered(body: &str) -> Response {
    let headers = vec![("content-type".to_owned(), "application/json".to_owned())];
    Response { status: 200, headers, body: body.as_bytes().into() }
}

/// Case 56.
#[tokio::test]
async fn an_answer_that_is_not_valid_fails_its_attempt_and_is_no_result() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(totals).await;
    for (key, simulate) in [("small", "succeed"), ("large", "size=200000")] {
        shop.inkjet.set_behaviour(simulate).unwrap();
        let id = runtime.submit(submission(key, WRONG)).await.unwrap().job.id;
        let job = ended(&runtime, id).await;
        assert_eq!((job.state, states(&job), job.completed_by), (JobState::Failed, vec![Failed], 0));
        let reason = &job.attempts[0].reason;
        assert!(reason.starts_with("invalid_output: assertion 1: does not hold: output.total == "), "{reason}");
        assert!(runtime.result(&job).await.unwrap().is_none(), "{key}: nothing of it is kept");
        assert_eq!(shop.executions(id), 1, "{key}");
        // The key stands for it: asked again, it is told again and not done again.
        let again = runtime.submit(submission(key, WRONG)).await.unwrap();
        assert_eq!((again.job.id, again.job.state, shop.executions(id)), (id, JobState::Failed, 1));
    }
    let right = runtime.submit(submission("right", RIGHT)).await.unwrap().job.id;
    let job = ended(&runtime, right).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
    assert!(runtime.result(&job).await.unwrap().is_some());
}

#[tokio::test]
async fn an_answer_that_is_not_valid_fails_over_only_where_the_route_says_so() {
    let by_laser = |setup: &mut Setup| {
        ungated(setup);
        let output = Some(check(Of::Output, "", &["output.provider == 'laser'"]));
        setup.route.validator = Some(Arc::new(Validator { output, ..Validator::default() }));
    };
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(by_laser).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Failed, vec![Failed]));
    assert!(job.attempts[0].reason.ends_with("not in failover_on"), "{}", job.attempts[0].reason);

    let runtime = shop
        .gateway_with(|setup| {
            by_laser(setup);
            setup.route.plan.failover_on.push(FailoverOn::InvalidOutput);
        })
        .await;
    let id = runtime.submit(submission("order-2", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Failed, Succeeded]));
    assert_eq!(job.winner().unwrap().provider, "laser");
}

/// Whichever of the two answers first with what the route does not take.
#[tokio::test]
async fn of_a_race_the_first_valid_answer_wins() {
    let raced = async |wanted: &str, expected: [AttemptState; 2]| {
        let shop = Shop::open().await;
        // Long after the second has begun; where the first is to be the quicker one, long before the second.
        let second = if wanted == "laser" { "delay=8s" } else { "succeed" };
        shop.inkjet.set_behaviour("delay=4s").unwrap();
        shop.laser.set_behaviour(second).unwrap();
        let runtime = shop
            .gateway_with(|setup| {
                race(setup, Duration::from_millis(100));
                setup.route.rules.attempts_max = 2;
                let output = Some(check(Of::Output, "", &[&format!("output.provider == '{wanted}'")]));
                setup.route.validator = Some(Arc::new(Validator { output, ..Validator::default() }));
            })
            .await;
        let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
        let job = ended(&runtime, id).await;
        assert_eq!((job.state, states(&job).as_slice()), (JobState::Succeeded, &expected[..]), "{job:?}");
        assert_eq!(job.winner().unwrap().provider, wanted);
        let invalid = job.attempts.iter().find(|attempt| attempt.state == Failed).unwrap();
        assert!(invalid.reason.starts_with("invalid_output: "), "{}", invalid.reason);
        assert_eq!(shop.executions(id), 2);
    };
    tokio::join!(raced("laser", [Failed, Succeeded]), raced("inkjet", [Succeeded, Failed]));
}

#[tokio::test]
async fn a_late_answer_that_is_not_valid_settles_the_unknown_and_is_no_result() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=600ms").unwrap();
    let runtime = shop.gateway_with(totals).await;
    for (key, body, expected) in [("wrong", WRONG, Failed), ("right", RIGHT, Succeeded)] {
        let id = runtime.submit(submission(key, body)).await.unwrap().job.id;
        until("it is at the provider", async || shop.executions(id) == 1).await;
        let token = runtime.read(id).await.unwrap().attempts[0].token;
        let lapsed = Report { outcome: FinishOutcome::Unknown, result: None, reason: "lapsed".to_owned(), then: Then::End };
        runtime.finish_outside(id, 1, token, lapsed).await.unwrap();
        assert_eq!(states(&runtime.read(id).await.unwrap()), [Unknown]);
        let job = ended(&runtime, id).await;
        assert_eq!((states(&job), shop.executions(id)), (vec![expected], 1), "{key}");
        assert_eq!(runtime.result(&job).await.unwrap().is_some(), expected == Succeeded);
    }
}

#[tokio::test]
async fn an_input_that_is_not_valid_is_refused_before_anything_is_claimed() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(pages).await;
    let before = shop.redis.dump().await;
    let large = format!(r#"{{"text":"{}"}}"#, "x".repeat(100_000));
    for body in ["{}", r#"{"pages":10}"#, "no json", "", &large] {
        let refused = runtime.submit(submission("order-1", body)).await;
        let Err(SubmitError::InvalidInput(invalid)) = refused else { panic!("{body}: {refused:?}") };
        assert!(!invalid.faults.is_empty());
    }
    assert_eq!(shop.redis.dump().await, before);
    assert_eq!(shop.inkjet.ledger().received, 0);
    // The key is free for what is valid.
    let receipt = runtime.submit(submission("order-1", r#"{"pages":9}"#)).await.unwrap();
    assert_eq!((receipt.replayed, ended(&runtime, receipt.job.id).await.state), (Replayed::No, JobState::Succeeded));
}

/// A schema became stricter: whoever retries a job from before would have been told that there is none.
#[tokio::test]
async fn a_job_that_is_there_is_answered_though_its_input_is_no_longer_valid() {
    let shop = Shop::open().await;
    let before = shop.gateway().await;
    let id = before.submit(submission("order-1", r#"{"pages":99}"#)).await.unwrap().job.id;
    ended(&before, id).await;

    let runtime = shop.gateway_with(pages).await;
    let receipt = runtime.submit(submission("order-1", r#"{"pages":99}"#)).await.unwrap();
    assert_eq!((receipt.replayed, receipt.job.id, receipt.job.state), (Replayed::Yes, id, JobState::Succeeded));
    let other = runtime.submit(submission("order-1", r#"{"pages":98}"#)).await;
    assert!(matches!(other, Err(SubmitError::Conflict(there)) if there == id), "{other:?}");
    let fresh = runtime.submit(submission("order-2", r#"{"pages":99}"#)).await;
    assert!(matches!(fresh, Err(SubmitError::InvalidInput(_))), "{fresh:?}");
    assert_eq!(shop.executions(id), 1);
}

#[tokio::test]
async fn a_released_key_is_no_way_around_what_is_required() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse_status=400").unwrap();
    let before = shop.gateway_with(|setup| setup.route.rules.releases_on_failure = true).await;
    let id = before.submit(submission("order-1", r#"{"pages":99}"#)).await.unwrap().job.id;
    assert_eq!(ended(&before, id).await.state, JobState::Failed);
    let runtime = shop.gateway_with(pages).await;
    let again = runtime.submit(submission("order-1", r#"{"pages":99}"#)).await;
    assert!(matches!(again, Err(SubmitError::InvalidInput(_))), "{again:?}");
}

async fn begun_outside(runtime: &Runtime, key: &str) -> (JobId, AttemptToken) {
    let id = runtime.submit(submission(key, "{}")).await.unwrap().job.id;
    let token = AttemptToken::random();
    let begun = runtime.begin_outside(id, token, "somebody", Duration::from_secs(60)).await.unwrap();
    assert!(matches!(begun, Begun::Started { .. }), "{begun:?}");
    runtime.mark_outside(id, 1, token, "", &[]).await.unwrap();
    (id, token)
}

fn report(body: &str) -> Report {
    let result = Some(answered(body));
    Report { outcome: FinishOutcome::Succeeded, result, reason: String::new(), then: Then::End }
}

#[tokio::test]
async fn what_an_executor_outside_brings_is_checked_as_a_providers_answer_is() {
    let shop = Shop::open().await;
    let outside = |setup: &mut Setup| {
        totals(setup);
        setup.route.providers.clear();
    };
    let runtime = shop.gateway_with(outside).await;
    let (id, token) = begun_outside(&runtime, "wrong").await;
    let finished = runtime.finish_outside(id, 1, token, report(WRONG)).await.unwrap();
    assert_eq!(finished, Finished::Recorded { job: JobState::Failed });
    let job = runtime.read(id).await.unwrap();
    assert!(job.attempts[0].reason.starts_with("invalid_output: assertion 1: "), "{}", job.attempts[0].reason);
    assert!(runtime.result(&job).await.unwrap().is_none());
    // The reply was lost, and the same call comes again.
    let again = runtime.finish_outside(id, 1, token, report(WRONG)).await.unwrap();
    assert!(matches!(again, Finished::Repeated { attempt: Failed, .. }), "{again:?}");

    let (id, token) = begun_outside(&runtime, "right").await;
    assert!(matches!(runtime.finish_outside(id, 1, token, report(RIGHT)).await.unwrap(), Finished::Won { .. }));

    let again = shop
        .gateway_with(|setup| {
            outside(setup);
            setup.route.plan.failover_on.push(FailoverOn::InvalidOutput);
        })
        .await;
    let (id, token) = begun_outside(&again, "again").await;
    assert_eq!(again.finish_outside(id, 1, token, report(WRONG)).await.unwrap(), Finished::Recorded { job: JobState::Pending });
    assert_eq!(states(&again.read(id).await.unwrap()), [Failed]);
}

#[tokio::test]
async fn an_operators_result_is_checked_unless_somebody_answers_for_it() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let runtime = shop
        .gateway_with(|setup| {
            totals(setup);
            setup.total = Duration::from_millis(200);
        })
        .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    settled(&runtime, id).await;
    let decision = |body: &str, check: CheckResult| Decision {
        number: 1,
        request_id: format!("{body}{check:?}").chars().rev().take(100).collect(),
        outcome: ResolveOutcome::Succeeded,
        actor: "nina".to_owned(),
        reason: "it lies in the tray".to_owned(),
        word: Word::Operator,
        result: Some(answered(body)),
        then: Then::End,
        check,
    };
    let before = shop.redis.dump().await;
    let refused = runtime.resolve(id, decision(WRONG, CheckResult::Checked)).await;
    assert!(matches!(refused, Err(SettleError::InvalidOutput(_))), "{refused:?}");
    assert_eq!(shop.redis.dump().await, before, "nothing is decided");

    let taken = runtime.resolve(id, decision(WRONG, CheckResult::Unchecked)).await.unwrap();
    assert_eq!(taken, Resolved::Won { version: 1 });
    let job = runtime.read(id).await.unwrap();
    assert_eq!(runtime.result(&job).await.unwrap().unwrap(), answered(WRONG));
}

/// The gateway closes while a job waits: another one, over the same requirements, goes on and checks as well.
#[tokio::test]
async fn an_adopted_jobs_answer_is_checked_against_its_own_input() {
    let shop = Shop::open().await;
    let same = |setup: &mut Setup| {
        both(setup);
        let output = Some(check(Of::Output, "", &["output.input.pages == input.input.pages", "input.input.pages == 3"]));
        setup.route.validator = Some(Arc::new(Validator { output, ..Validator::default() }));
    };
    shop.inkjet.set_behaviour("refuse").unwrap();
    let first = shop
        .gateway_with(|setup| {
            same(setup);
            // Long enough to stop the gateway before it begins again, short enough to wait for.
            setup.route.plan.backoff = Duration::from_secs(5);
            setup.options.lease = Duration::from_millis(600);
            setup.options.lease_margin = Duration::from_millis(100);
        })
        .await;
    let id = first.submit(submission("order-1", r#"{"input":{"pages":3}}"#)).await.unwrap().job.id;
    until("the first attempt is over", async || states(&first.read(id).await.unwrap()) == [Aborted]).await;
    first.shutdown(Duration::ZERO).await;
    shop.inkjet.set_behaviour("succeed").unwrap();
    let second = shop.gateway_with(same).await;
    let job = ended(&second, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Aborted, Succeeded]));
}
