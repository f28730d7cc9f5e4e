//! A certificate that is taken back while somebody is on his way: what was sent goes on, and a second later nothing goes there.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use onejob::attempt::AttemptState::{Aborted, Failed, Succeeded};
use onejob::attempt::{AttemptToken, FinishOutcome};
use onejob::error::{Refusal, StoreError};
use onejob::job::JobState;
use onejob::policy::DENIED;
use onejob::provider::{Abilities, Call, Evidence, Outcome, ProviderFuture, RenderError, Rendered, Response, Sent};
use onejob::qualify::Standing;
use tokio::sync::watch;

use super::certificates::{gated, run};
use super::gateways::{claimed_by_a_dead_gateway, running, told_by_its_holder};
use super::*;
use crate::support::standalone_only;

const BODY: &str = r#"{"model":"m"}"#;
/// Longer than a permit is good.
const OLD: Duration = Duration::from_millis(1100);

/// The laser printer at the end of a line that takes its time to connect.
struct Far {
    http: HttpProvider,
    /// How many calls are on their way.
    waiting: Arc<AtomicU64>,
    open: watch::Receiver<bool>,
}

impl Provider for Far {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        self.http.render(request)
    }

    fn submit(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async move {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            self.open.clone().wait_for(|open| *open).await.unwrap();
            self.http.submit(call).await
        })
    }
}

/// A gateway whose first printer refuses, and whose second one is far away; its line, and how many are on it.
async fn far(shop: &Shop) -> (Runtime, watch::Sender<bool>, Arc<AtomicU64>) {
    shop.inkjet.set_behaviour("refuse").unwrap();
    let (line, open) = watch::channel(false);
    let waiting = Arc::new(AtomicU64::new(0));
    let runtime = shop
        .gateway_with(|setup| {
            gated(setup);
            let http = |name, printer| http(name, printer, Duration::from_secs(30));
            let laser = Far { http: http("laser", &shop.laser), waiting: Arc::clone(&waiting), open };
            setup.providers = Some(vec![slot("inkjet", http("inkjet", &shop.inkjet)), slot("laser", laser)]);
        })
        .await;
    (runtime, line, waiting)
}

async fn revoke(shop: &Shop) {
    let other_gateway = shop.redis.store().await;
    other_gateway
        .mark_certificate(AttemptToken::random(), ("print", "laser"), None, Standing::Revoked, ("ada", "it lies"))
        .await
        .unwrap();
}

/// The write-ahead is there and the connection is slow: what is not sent within a second of the last look asks once more.
#[tokio::test]
async fn whoever_connects_for_longer_than_a_permit_is_good_asks_once_more() {
    let shop = Shop::open().await;
    let id = shop.certify(BODY, "").await;
    let (runtime, line, waiting) = far(&shop).await;
    for (key, revoked) in [("before", false), ("after", true)] {
        line.send_replace(false);
        let before = waiting.load(Ordering::SeqCst);
        let job = runtime.submit(submission(key, BODY)).await.unwrap().job.id;
        until("it is on its way", async || waiting.load(Ordering::SeqCst) > before).await;
        if revoked {
            revoke(&shop).await;
        }
        tokio::time::sleep(OLD).await;
        line.send_replace(true);
        let job = ended(&runtime, job).await;
        let second = &job.attempts[1];
        assert_eq!((second.provider.as_str(), second.certificate.as_str()), ("laser", id.as_str()));
        if !revoked {
            assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Aborted, Succeeded]));
            continue;
        }
        assert_eq!((job.state, second.state), (JobState::Failed, Aborted));
        assert_eq!(second.reason, format!("{DENIED}laser: its certificate is revoked: it lies"));
        assert!(job.attempts.iter().skip(2).all(|attempt| attempt.provider == "inkjet"), "{:?}", job.attempts);
    }
    assert_eq!(shop.laser.ledger().received, 1);
}

/// The race, as often as it can be had: jobs fail over on two gateways while a third party revokes. Each job has an end, none is
/// sent twice, and what the provider gets it gets within a second of the revoke.
#[tokio::test]
async fn a_second_after_a_revoke_nothing_goes_there_from_any_gateway() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    shop.certify(BODY, "").await;
    let gateways = [shop.gateway_with(gated).await, shop.gateway_with(gated).await];
    let stop = AtomicBool::new(false);
    let client = async |place: usize| {
        let mut jobs = Vec::new();
        for number in 0.. {
            if stop.load(Ordering::SeqCst) {
                break;
            }
            let key = format!("{place}-{number}");
            jobs.push(gateways[place].submit(submission(&key, BODY)).await.unwrap().job.id);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        jobs
    };
    let operator = async {
        until("failovers happen", async || shop.laser.ledger().received >= 20).await;
        revoke(&shop).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let received = shop.laser.ledger().received;
        tokio::time::sleep(OLD).await;
        stop.store(true, Ordering::SeqCst);
        received
    };
    let (first, second, received) = tokio::join!(client(0), client(1), operator);
    let (mut sent, mut kept) = (0, 0);
    for (gateway, id) in
        [(&gateways[0], first), (&gateways[1], second)].into_iter().flat_map(|(g, ids)| ids.into_iter().map(move |id| (g, id)))
    {
        let job = ended(gateway, id).await;
        let executed = shop.laser.ledger_of(&id.to_string()).executed;
        assert_eq!(executed, u64::from(job.state == JobState::Succeeded), "{job:?}");
        sent += executed;
        kept += u64::from(job.state == JobState::Failed);
    }
    assert_eq!((sent, received), (received, shop.laser.ledger().received));
    assert!(kept > 0);
}

/// What the job asks for is read only once its slot is taken. Where the gate then says "no", it does not come back there again and
/// again until its slots are used up.
#[tokio::test]
async fn an_adopted_job_that_is_denied_for_its_own_request_goes_on_without_that_provider() {
    let shop = Shop::open().await;
    shop.certify(r#"{"model":"another"}"#, "").await;
    let store = shop.redis.store().await;
    let id = claimed_by_a_dead_gateway(&store, "order-1", running(), Duration::from_millis(200)).await;
    told_by_its_holder(&store, id, FinishOutcome::Failed, "rejected 429: not now").await;
    let runtime = shop.gateway_with(gated).await;
    let job = ended(&runtime, id).await;
    let attempts: Vec<(&str, _)> = job.attempts.iter().map(|attempt| (attempt.provider.as_str(), attempt.state)).collect();
    assert_eq!(attempts, [("inkjet", Failed), ("laser", Aborted), ("inkjet", Succeeded)]);
    assert_eq!(job.attempts[1].reason, format!("{DENIED}laser: its certificate is for another model"));
    assert_eq!(shop.laser.ledger().received, 0);
}

#[tokio::test]
async fn certificates_are_not_read_from_a_replica() {
    if standalone_only("a replica in a cluster sends a reader on to its master") {
        return;
    }
    let shop = Shop::open().await;
    shop.certify(BODY, "").await;
    let store = shop.redis.store().await;
    assert_eq!(store.certificates("print", "laser").await.unwrap().len(), 1);
    shop.redis.command::<()>(&["REPLICAOF", "127.0.0.1", "1"]).await;
    let refused = store.certificates("print", "laser").await.unwrap_err();
    assert!(matches!(&refused, StoreError::NotExecuted { code: Refusal::ReadOnly, .. }), "{refused}");
    shop.redis.command::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    until("they are read again", async || store.certificates("print", "laser").await.is_ok()).await;
}

fn answer(model: &str) -> Outcome {
    let response = Response { status: 200, headers: Vec::new(), body: Arc::from(&b"{}"[..]) };
    Outcome::Succeeded { response, remote_id: None, model: Some(model.to_owned()) }
}

/// Case 55, where the answer comes by another way than the call's own.
#[tokio::test]
async fn what_a_provider_tells_by_itself_counts_for_its_certificate() {
    let shop = Shop::open().await;
    let id = shop.certify(BODY, "m-1").await;
    let (runtime, _line, waiting) = far(&shop).await;
    let job = runtime.submit(submission("order-1", BODY)).await.unwrap().job.id;
    until("it is on its way", async || waiting.load(Ordering::SeqCst) > 0).await;
    runtime.delivered(job, 2, Evidence::Settled(answer("m-2"))).await.unwrap();
    assert_eq!(ended(&runtime, job).await.state, JobState::Succeeded);
    assert_eq!(shop.standing(&id).await, (Standing::Suspended, r#"model "m-2" answered, "m-1" is certified"#.to_owned()));
}

/// A printer that takes a job, hangs up, and says later what became of it.
struct Forgetful;

impl Provider for Forgetful {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        Ok(Rendered { method: "POST".into(), url: "far://laser/".into(), headers: Vec::new(), body: request.body.clone() })
    }

    fn submit(&self, _: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async { Outcome::Unknown { reason: "it hung up".to_owned() } })
    }

    fn abilities(&self) -> Abilities {
        Abilities { find: true, ..Abilities::default() }
    }

    fn find(&self, _: Sent) -> ProviderFuture<'_, Evidence> {
        Box::pin(async { Evidence::Settled(answer("m-2")) })
    }
}

#[tokio::test]
async fn what_a_provider_says_when_it_is_asked_counts_for_its_certificate() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    let certified = super::certificates::contract();
    let bound = certified.bind(&Forgetful.render(&submission("any", BODY).request).unwrap());
    let id = shop.certify_as(bound, "m-1").await;
    let runtime = shop
        .gateway_with(|setup| {
            gated(setup);
            let inkjet = slot("inkjet", http("inkjet", &shop.inkjet, Duration::from_secs(30)));
            setup.providers = Some(vec![inkjet, slot("laser", Forgetful)]);
        })
        .await;
    let job = run(&runtime, "order-1", BODY).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Aborted, Succeeded]));
    until("it is suspended", async || shop.standing(&id).await.0 == Standing::Suspended).await;
}

/// A printer that does the work of a key once, hangs up on whoever hands it in, and cannot be asked otherwise.
struct Replays {
    http: HttpProvider,
    asked: Arc<AtomicU64>,
    replayed: Arc<AtomicU64>,
}

impl Provider for Replays {
    fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        self.http.render(request)
    }

    fn submit(&self, _: Call) -> ProviderFuture<'_, Outcome> {
        Box::pin(async { Outcome::Unknown { reason: "it hung up".to_owned() } })
    }

    fn replay(&self, call: Call) -> ProviderFuture<'_, Outcome> {
        self.replayed.fetch_add(1, Ordering::SeqCst);
        self.http.submit(call)
    }

    fn abilities(&self) -> Abilities {
        Abilities { find: true, replay: Some(Duration::from_secs(3600)), ..Abilities::default() }
    }

    fn find(&self, _: Sent) -> ProviderFuture<'_, Evidence> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        Box::pin(async { Evidence::NoAnswer { reason: "it does not know".to_owned() } })
    }
}

/// The first request may never have arrived: then a replay is the first one that does.
#[tokio::test]
async fn an_unknown_attempt_is_not_sent_again_under_a_certificate_that_was_taken_back() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    shop.certify(BODY, "").await;
    let (asked, replayed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let runtime = shop
        .gateway_with(|setup| {
            gated(setup);
            setup.route.reconcile.first = Duration::from_millis(300);
            let http = |name, printer| http(name, printer, Duration::from_secs(30));
            let (asked, replayed) = (Arc::clone(&asked), Arc::clone(&replayed));
            let laser = Replays { http: http("laser", &shop.laser), asked, replayed };
            setup.providers = Some(vec![slot("inkjet", http("inkjet", &shop.inkjet)), slot("laser", laser)]);
        })
        .await;
    // As long as it is good, the replay tells what became of it.
    assert_eq!(run(&runtime, "before", BODY).await.state, JobState::Succeeded);
    assert_eq!((replayed.load(Ordering::SeqCst), shop.laser.ledger().received), (1, 1));
    let id = runtime.submit(submission("after", BODY)).await.unwrap().job.id;
    until("it is unknown", async || runtime.read(id).await.unwrap().state == JobState::Unknown).await;
    revoke(&shop).await;
    let before = asked.load(Ordering::SeqCst);
    until("it was asked about, twice", async || asked.load(Ordering::SeqCst) >= before + 2).await;
    assert_eq!(runtime.read(id).await.unwrap().state, JobState::Unknown);
    assert_eq!((replayed.load(Ordering::SeqCst), shop.laser.ledger().received), (1, 1));
}
