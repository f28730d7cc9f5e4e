//! The real program among others of its kind: stopped, continued, terminated, killed and started again.

use std::collections::BTreeMap;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::gateway::{Answer, End, Gateway, Site};
use crate::support::until;

const SIGKILL: i32 = 9;

fn id(answer: &Answer) -> String {
    answer.body["id"].as_str().unwrap_or_else(|| panic!("{answer:?}")).to_owned()
}

fn states(job: &Value) -> Vec<&str> {
    job["attempts"].as_array().unwrap().iter().map(|attempt| attempt["state"].as_str().unwrap()).collect()
}

/// The job, once it stands so.
async fn once(gateway: &Gateway, id: &str, state: &str) -> Value {
    let mut job = Value::Null;
    until(&format!("the job is {state}"), async || {
        job = gateway.job(id).await.unwrap().body;
        job["state"] == state
    })
    .await;
    job
}

/// Case 17: the process stood still for longer than its lease, on its way to the provider. Awake again it does not send.
#[tokio::test]
async fn a_gateway_that_slept_through_its_lease_does_not_send() {
    let site = Site::open().await;
    // The first attempt is refused, so that the second one waits; asleep, nobody begins it.
    site.printer.set_behaviour("refuse_status=429,retry_after=1s").unwrap();
    let mut sleeper = site.start(&[("route.print.attempts", "2")], None).await;
    let id = id(&sleeper.submit("order-1", "{}").await.unwrap());
    until("the first attempt is refused", async || site.printer.ledger().answered == 1).await;
    once(&sleeper, &id, "pending").await;
    sleeper.signal(Signal::STOP);
    site.printer.set_behaviour("delay=3s").unwrap();
    let other = site.start(&[("route.print.attempts", "2")], None).await;
    until("another gateway went on with it", async || site.printer.ledger().executed == 1).await;
    sleeper.signal(Signal::CONT);
    let job = once(&other, &id, "succeeded").await;
    assert_eq!(states(&job), ["failed", "succeeded"]);
    assert_eq!(site.printer.ledger().executed, 1);
    sleeper.signal(Signal::TERM);
    assert_eq!(sleeper.ended().await, End::Code(0), "{}", sleeper.words());
}

/// Case 17: it cost its attempt the authority, not the evidence.
#[tokio::test]
async fn a_result_that_was_on_its_way_to_a_sleeping_gateway_is_accepted() {
    let site = Site::open().await;
    let sleeper = site.start(&[], None).await;
    let id = id(&sleeper.submit("order-1", r#"{"simulate":"delay=1s"}"#).await.unwrap());
    until("the printer has it", async || site.printer.ledger().received == 1).await;
    sleeper.signal(Signal::STOP);
    let other = site.start(&[], None).await;
    once(&other, &id, "unknown").await;
    until("the printer has answered", async || site.printer.ledger().answered == 1).await;
    assert_eq!(other.submit("order-1", r#"{"simulate":"delay=1s"}"#).await.unwrap().status, 202, "nothing else begins meanwhile");
    sleeper.signal(Signal::CONT);
    let job = once(&other, &id, "succeeded").await;
    assert_eq!(states(&job), ["succeeded"]);
    assert!(job["events"].to_string().contains("late_success"), "{job}");
    assert_eq!(site.printer.ledger().executed, 1);
}

/// Case 57: what could end ends, what could not is unknown, both are counted, and nothing is lost or done twice.
#[tokio::test]
async fn a_gateway_that_is_terminated_under_load_loses_and_doubles_nothing() {
    let site = Site::open().await;
    let mut gateway = site.start(&[("runtime.drain", "4s")], None).await;
    let mut jobs = BTreeMap::new();
    for order in 0..40 {
        let simulate = if order % 4 == 0 { "hang" } else { "delay=1s" };
        let (key, input) = (format!("order-{order}"), format!(r#"{{"simulate":"{simulate}"}}"#));
        jobs.insert(key.clone(), (id(&gateway.submit(&key, &input).await.unwrap()), input));
    }
    until("the printer has them", async || site.printer.ledger().received >= 30).await;
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, End::Code(4), "{}", gateway.words());
    let words = gateway.words();
    let told = words.lines().find(|line| line.contains("stopped: ")).unwrap_or_else(|| panic!("{words}"));
    assert!(told.contains("10 unknown, 0 could not be written down"), "{told}");

    let next = site.start(&[], None).await;
    for (key, (id, input)) in &jobs {
        let state = if input.contains("hang") { "unknown" } else { "succeeded" };
        let job = once(&next, id, state).await;
        assert_eq!(states(&job), [state]);
        let again = next.submit(key, input).await.unwrap();
        assert_eq!((again.body["id"].as_str(), again.body["state"].as_str()), (Some(id.as_str()), Some(state)));
    }
    assert_eq!(site.printer.ledger().executed, 40);
}

/// Case 23: a lease that lives is nobody else's, whoever starts.
#[tokio::test]
async fn a_restarted_gateway_recovers_nothing_that_a_live_one_is_doing() {
    let site = Site::open().await;
    let alive = site.start(&[], None).await;
    let id = id(&alive.submit("order-1", r#"{"simulate":"delay=5s"}"#).await.unwrap());
    until("the printer has it", async || site.printer.ledger().received == 1).await;
    for _ in 0..2 {
        let mut restarted = site.start(&[], None).await;
        assert_eq!(restarted.job(&id).await.unwrap().body["state"], "running");
        restarted.signal(Signal::KILL);
        assert_eq!(restarted.ended().await, End::Signal(SIGKILL));
    }
    let last = site.start(&[], None).await;
    let job = once(&last, &id, "succeeded").await;
    assert_eq!(states(&job), ["succeeded"]);
    assert_eq!(job["events"].as_array().map(Vec::len), Some(0), "never unknown, over two leases: {job}");
    assert_eq!(site.printer.ledger().executed, 1);
}

/// Case 26: Redis stood still, the provider answered, and the gateway was killed. The next one stores what it had in hand.
#[tokio::test]
async fn a_result_in_the_spool_of_a_killed_gateway_is_stored_by_the_next_one() {
    let site = Site::open().await;
    let mut gateway = site.start(&[], None).await;
    let input = r#"{"simulate":"delay=300ms,size=20000"}"#;
    let id = id(&gateway.submit("order-1", input).await.unwrap());
    until("the printer has it", async || site.printer.ledger().received == 1).await;
    site.redis.pause();
    until("the result is in the spool", async || site.spooled(".verdict") == 1).await;
    gateway.signal(Signal::KILL);
    assert_eq!(gateway.ended().await, End::Signal(SIGKILL));
    site.redis.resume();
    let next = site.start(&[], None).await;
    let job = once(&next, &id, "succeeded").await;
    assert_eq!(states(&job), ["succeeded"]);
    assert!(job["result"].to_string().len() >= 20_000);
    assert_eq!(next.submit("order-1", input).await.unwrap().body["state"], "succeeded");
    assert_eq!(site.printer.ledger().executed, 1);
    until("the spool is empty", async || site.spooled("") == 0).await;
}

/// What is known of it is written down. What it may still hear is not worth keeping a deployment waiting for.
#[tokio::test]
async fn a_stop_does_not_wait_for_a_call_that_only_listens_on() {
    let site = Site::open().await;
    let timeouts = ("provider.printer.timeouts", r#"{ total = "300ms", linger = "1h" }"#);
    let mut gateway = site.start(&[timeouts, ("runtime.drain", "10m")], None).await;
    let submitted = gateway.submit("order-1", r#"{"simulate":"hang"}"#).await.expect("an answer").body;
    let id = submitted["id"].as_str().expect("an id").to_owned();
    until("it is unknown", async || gateway.job(&id).await.expect("an answer").body["state"] == "unknown").await;
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, End::Code(0), "{}", gateway.words());
}
