//! From one attempt to the next, or to none.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onejob::attempt::AttemptState::{Aborted, Discarded, Failed, Running, Succeeded, Unknown};
use onejob::attempt::{AttemptToken, ResolveOutcome};
use onejob::fingerprint::{hex, sha256};
use onejob::job::JobState;
use onejob::policy::Gate;
use onejob::provider::{Call, Outcome, Provider, ProviderFuture, RenderError, Rendered, Request};
use onejob::runtime::{CheckResult, Decision, Then};
use onejob::store::{Begun, Resolved, Word};

use super::{Shop, both, ended, race, settled, slot, states, submission, ungated, until};
use crate::support::Submission;

/// Case 16: accepted, then slow: unknown, no failover, the key keeps standing for it.
#[tokio::test]
async fn a_timeout_is_unknown_and_blocks_every_other_attempt() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let runtime = shop
        .gateway_with(|setup| {
            ungated(setup);
            setup.total = Duration::from_millis(200);
        })
        .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = settled(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Unknown, vec![Unknown]));
    assert!(job.attempts[0].reason.starts_with("timeout"), "{}", job.attempts[0].reason);

    let refused = runtime.begin_outside(id, AttemptToken::random(), "laser", Duration::from_secs(5)).await.unwrap();
    assert_eq!(refused, Begun::Blocked { by: Unknown, number: 1 });
    assert_eq!(runtime.submit(submission("order-1", "{}")).await.unwrap().job.state, JobState::Unknown);
    assert_eq!(shop.laser.ledger().executed, 0);
    assert_eq!(shop.executions(id), 1);
}

#[tokio::test]
async fn after_a_resolution_the_same_key_returns_the_truth() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let runtime = shop.gateway_with(|setup| setup.total = Duration::from_millis(200)).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    settled(&runtime, id).await;
    let printed = onejob::provider::Response { status: 200, headers: vec![], body: b"printed".to_vec().into() };
    let decision = Decision {
        number: 1,
        request_id: "decision-1".to_owned(),
        outcome: ResolveOutcome::Succeeded,
        actor: "nina".to_owned(),
        reason: "the page lies in the tray".to_owned(),
        word: Word::Operator,
        result: Some(printed.clone()),
        then: Then::End,
        check: CheckResult::Checked,
    };
    assert_eq!(runtime.resolve(id, decision).await.unwrap(), Resolved::Won { version: 1 });
    let job = runtime.submit(submission("order-1", "{}")).await.unwrap().job;
    assert_eq!(job.state, JobState::Succeeded);
    assert_eq!(runtime.result(&job).await.unwrap().unwrap(), printed);
    assert!(runtime.list(onejob::runtime::ListState::Unknown, 10).await.unwrap().jobs.is_empty());
}

/// Case 36, 37, 38.
#[tokio::test]
async fn whatever_may_have_happened_is_unknown_and_executed_once() {
    let shop = Shop::open().await;
    let runtime = shop.gateway_with(ungated).await;
    for behaviour in ["drop", "status=500", "status=504", "half", "chunked,half", "invalid_json"] {
        shop.inkjet.set_behaviour(behaviour).unwrap();
        let id = runtime.submit(submission(behaviour, "{}")).await.unwrap().job.id;
        let job = settled(&runtime, id).await;
        assert_eq!((job.state, states(&job)), (JobState::Unknown, vec![Unknown]), "{behaviour}");
        assert_eq!(shop.executions(id), 1, "{behaviour}");
        assert!(runtime.result(&job).await.unwrap().is_none(), "{behaviour}: no partial result");
    }
    assert_eq!(shop.laser.ledger().executed, 0);
}

/// Case 39.
#[tokio::test]
async fn a_refused_connection_fails_over_at_once_where_the_gate_is_off() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    let runtime = shop.gateway_with(ungated).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Aborted, Succeeded]));
    assert_eq!(job.winner().unwrap().provider, "laser");
    assert_eq!(shop.executions(id), 1);
}

#[tokio::test]
async fn a_closed_gate_denies_failover_and_says_so() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    let runtime = shop.gateway_with(both).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Failed, vec![Aborted; 8]));
    assert!(job.attempts[0].reason.contains("failover_denied"), "{}", job.attempts[0].reason);
    assert!(job.reason.contains("attempts exhausted"), "{}", job.reason);
    assert_eq!(shop.laser.ledger().received, 0);
}

/// Case 40: 400 is one call and no failover.
#[tokio::test]
async fn a_refusal_ends_the_job_and_is_its_answer() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse_status=400").unwrap();
    let runtime = shop.gateway_with(ungated).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Failed, vec![Failed]));
    assert_eq!(job.completed_by, 0);
    assert_eq!(runtime.result(&job).await.unwrap().unwrap().status, 400);
    assert_eq!((shop.inkjet.ledger().received, shop.laser.ledger().received), (1, 0));
}

/// Case 40: 429 with Retry-After.
#[tokio::test]
async fn retry_after_is_waited_out() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse_status=429,retry_after=1s").unwrap();
    let runtime = shop.gateway().await;
    let began = Instant::now();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the first refusal", async || shop.inkjet.ledger().received == 1).await;
    shop.inkjet.set_behaviour("succeed").unwrap();
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Failed, Succeeded]));
    let gap_ms = job.attempts[1].started_ms - job.attempts[0].ended_ms;
    assert!(gap_ms >= 1000, "{gap_ms} ms after the refusal, {:?} in all", began.elapsed());
}

#[tokio::test]
async fn a_retry_after_beyond_the_deadline_fails_at_once() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse_status=429,retry_after=100s").unwrap();
    let runtime = shop.gateway_with(|setup| setup.route.deadline = Some(Duration::from_secs(5))).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Failed, vec![Failed]));
    assert!(job.reason.contains("deadline"), "{}", job.reason);
}

/// Case 41.
#[tokio::test]
async fn an_always_refusing_provider_is_called_as_often_as_the_budget_says() {
    for (attempts_max, providers) in [(1, 1), (2, 1), (3, 2), (5, 2)] {
        let shop = Shop::open().await;
        shop.inkjet.set_behaviour("refuse_status=429").unwrap();
        shop.laser.set_behaviour("refuse_status=429").unwrap();
        let runtime = shop
            .gateway_with(|setup| {
                if providers == 2 {
                    both(setup);
                }
                setup.route.plan.gate = Gate::Off;
                setup.route.plan.backoff = Duration::from_millis(1);
                setup.route.rules.attempts_max = attempts_max;
            })
            .await;
        let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
        let job = ended(&runtime, id).await;
        assert_eq!(job.state, JobState::Failed);
        let calls = shop.inkjet.ledger().received + shop.laser.ledger().received;
        assert_eq!(calls, u64::from(attempts_max), "{attempts_max} attempts at {providers} providers");
    }
}

/// Case 42: one shrinking deadline.
#[tokio::test]
async fn the_second_attempt_gets_what_the_first_left_of_the_deadline() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=500ms,refuse_status=429").unwrap();
    shop.laser.set_behaviour("hang").unwrap();
    let runtime = shop
        .gateway_with(|setup| {
            ungated(setup);
            setup.route.deadline = Some(Duration::from_secs(4));
        })
        .await;
    let began = Instant::now();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = settled(&runtime, id).await;
    let took = began.elapsed();
    assert_eq!((job.state, states(&job)), (JobState::Unknown, vec![Failed, Unknown]));
    assert!(took < Duration::from_secs(15), "the provider's own 30 s do not count: {took:?}");
}

/// Case 13: the official primary stalls, the fallback wins, the primary comes back.
#[tokio::test]
async fn the_late_primary_of_a_race_is_discarded() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("delay=1500ms").unwrap();
    let runtime = shop.gateway_with(|setup| race(setup, Duration::from_millis(200))).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let won = ended(&runtime, id).await;
    assert_eq!((won.state, won.completed_by), (JobState::Succeeded, 2));
    let bytes = runtime.result(&won).await.unwrap().unwrap();

    until("the primary is judged", async || states(&runtime.read(id).await.unwrap())[0] == Discarded).await;
    let later = runtime.read(id).await.unwrap();
    assert_eq!((later.state, later.completed_by, later.version), (JobState::Succeeded, 2, won.version));
    assert_eq!(runtime.result(&later).await.unwrap().unwrap(), bytes);
    assert!(later.events.iter().any(|event| event.event == "discarded" && event.attempt == 1));
}

/// Redis' clock may see the first attempt as younger than the gateway's timer does: too young to be raced, for a moment.
#[tokio::test]
async fn a_race_that_may_not_begin_yet_begins_a_little_later() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let after = Duration::from_millis(1000);
    let runtime = shop.gateway_with(|setup| race(setup, after)).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let given = shop.redis.given_absent(Submission::new("order-1")).await;
    given.rewrite("record[P.attempts][1][A.started_ms] = now + 500").await;
    let before = runtime.read(id).await.unwrap();
    assert_eq!(states(&before), [Running], "the timer is still to come");

    let won = ended(&runtime, id).await;
    assert_eq!((won.state, won.completed_by), (JobState::Succeeded, 2));
    assert!(won.attempts[1].started_ms >= before.attempts[0].started_ms + 1000);
}

/// The result says who answered. Case 44.
#[tokio::test]
async fn the_job_names_the_provider_and_the_model_that_answered() {
    let shop = Shop::open().await;
    let runtime = shop.gateway().await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    let winner = job.winner().unwrap();
    assert_eq!(winner.provider, "inkjet");
    assert!(!winner.model.is_empty() && !winner.remote_id.is_empty());
}

/// Writes down what it is asked to send, and sends nothing.
struct Recorder {
    host: &'static str,
    sent: Arc<Mutex<Vec<Rendered>>>,
}

impl Provider for Recorder {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        let headers = vec![("x-host".to_owned(), self.host.to_owned())];
        Ok(Rendered { method: "POST".into(), url: format!("recorder://{}/", self.host), headers, body: request.body.clone() })
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        self.sent.lock().unwrap().push(call.rendered);
        Box::pin(async { Outcome::NotSent { reason: "a recorder sends nothing".to_owned() } })
    }
}

/// Case 43, 45: each attempt is rendered for its own provider, and the record keeps where it went.
#[tokio::test]
async fn the_fallback_gets_a_request_of_its_own_and_the_record_says_what_was_sent_where() {
    let shop = Shop::open().await;
    let sent = Arc::new(Mutex::new(Vec::new()));
    let recorder = |host| slot(host, Recorder { host, sent: Arc::clone(&sent) });
    let runtime = shop
        .gateway_with(|setup| {
            both(setup);
            setup.route.plan.gate = Gate::Off;
            setup.route.plan.backoff = Duration::from_millis(1);
            setup.providers = Some(vec![recorder("inkjet"), recorder("laser")]);
        })
        .await;
    let request = submission("order-1", r#"{"page":1}"#);
    let id = runtime.submit(request.clone()).await.unwrap().job.id;
    let job = ended(&runtime, id).await;
    let sent = sent.lock().unwrap();
    assert_eq!((sent.len(), job.attempts.len()), (8, 8));
    for (rendered, (host, attempt)) in sent.iter().zip(["inkjet", "laser"].into_iter().cycle().zip(&job.attempts)) {
        let fresh = Recorder { host, sent: Arc::default() }.render(&request.request).unwrap();
        assert_eq!(*rendered, fresh);
        assert_eq!((attempt.url.as_str(), &attempt.request_hash[..]), (fresh.url.as_str(), &fresh.hash()[..]));
    }
}

/// Case 43, on the wire: the schema that an answer is to have is part of it, and every digit.
#[tokio::test]
async fn the_fallback_is_sent_the_same_body_with_its_schema_byte_for_byte() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse_status=429").unwrap();
    let runtime = shop.gateway_with(ungated).await;
    let body = r#"{ "n": 9007199254740993, "messages": [],
        "response_format": {"type": "json_schema", "json_schema": {"name": "total", "schema": {"required": ["total"]}}} }"#;
    let id = runtime.submit(submission("order-1", body)).await.unwrap().job.id;
    assert_eq!(states(&*ended(&runtime, id).await), [Failed, Succeeded]);
    let expected = hex(&sha256(body.as_bytes()));
    for (printer, attempt) in [(&shop.inkjet, "1"), (&shop.laser, "2")] {
        let ledger = printer.ledger_of(&id.to_string());
        let [entry] = &ledger.entries[..] else { panic!("{ledger:?}") };
        assert_eq!((entry.attempt.as_str(), &entry.body_sha256), (attempt, &expected));
    }
}

/// Each later attempt counted the calls and delays of those before it as our own time.
#[tokio::test]
async fn the_calls_and_delays_of_earlier_attempts_are_no_overhead() {
    let recorder: &'static _ = Box::leak(Box::new(metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder()));
    let _counting = metrics::set_default_local_recorder(recorder);
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("queue=300ms,refuse_status=429").unwrap();
    let runtime = shop.gateway_with(|setup| setup.route.plan.backoff = Duration::from_millis(700)).await;
    let began = std::time::Instant::now();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    assert_eq!(states(&*ended(&runtime, id).await), [Failed, Failed, Failed]);
    assert!(began.elapsed() >= Duration::from_millis(3000), "three calls, and delays of 700 ms and 1400 ms");
    runtime.shutdown(Duration::from_secs(5)).await;
    let rendered = recorder.handle().render();
    let value = |name: &str| -> f64 {
        let line = rendered.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} is not in\n{rendered}")).parse().unwrap()
    };
    assert_eq!(value("onejob_overhead_seconds_count") as u64, 1);
    assert!(value("onejob_overhead_seconds_sum") < 0.7, "{}", value("onejob_overhead_seconds_sum"));
}

/// Known from the heartbeats.
#[tokio::test]
async fn a_running_attempt_whose_job_is_to_be_canceled_is_counted_as_canceling() {
    let recorder: &'static _ = Box::leak(Box::new(metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder()));
    let _counting = metrics::set_default_local_recorder(recorder);
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("hang").unwrap();
    let runtime = shop
        .gateway_with(|setup| {
            setup.options.lease = Duration::from_secs(3);
            setup.options.lease_margin = Duration::from_millis(500);
        })
        .await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    let counted = async |line: &str| until(line, async || recorder.handle().render().contains(line)).await;
    counted("onejob_jobs_open{state=\"running\"} 1").await;
    runtime.cancel(id, "request-1", onejob::store::CancelMode::Graceful, "ada", "wrong paper").await.unwrap();
    counted("onejob_jobs_open{state=\"canceling\"} 1").await;
    counted("onejob_jobs_open{state=\"running\"} 0").await;
}
