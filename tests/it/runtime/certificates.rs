//! The gate: who may take a job over, as of which moment, and what takes that back.

use std::collections::BTreeMap;

use onejob::attempt::AttemptState::{Aborted, Succeeded};
use onejob::attempt::AttemptToken;
use onejob::fingerprint::{hex, sha256};
use onejob::job::JobState;
use onejob::provider::Provider as _;
use onejob::qualify::{Bindings, Certificate, Contract, Part, Standing, in_force};
use onejob::runtime::{Proof, Suspend};
use onejob::store::{Issued, Stood};
use onejob::validate::{Check, Of, Required, Validator};

use super::*;

const BODY: &str = r#"{"model":"m"}"#;

/// What the laser printer must have proved.
pub fn contract() -> Contract {
    Contract {
        route: "print".to_owned(),
        provider: "laser".to_owned(),
        fixed: BTreeMap::from([(Part::Suite, "suite".to_owned()), (Part::Schema, "schema".to_owned())]),
        model: "/model".to_owned(),
        vary: vec!["/pages".to_owned()],
        free_headers: Vec::new(),
        has_template: false,
    }
}

/// Both printers; the laser needs a certificate.
pub fn gated(setup: &mut Setup) {
    both(setup);
    setup.route.proof = Proof { contracts: vec![None, Some(Arc::new(contract()))], suspend: Some(Suspend { invalid: 2, of: 5 }) };
}

impl Shop {
    fn bound(&self, body: &str) -> Bindings {
        let laser = http("laser", &self.laser, Duration::from_secs(30));
        contract().bind(&laser.render(&submission("any", body).request).unwrap())
    }

    /// Certifies the laser for requests like this one.
    pub async fn certify(&self, body: &str, answered_by: &str) -> String {
        self.certify_as(self.bound(body), answered_by).await
    }

    /// Certifies the laser for requests that are bound like this.
    pub async fn certify_as(&self, bindings: Bindings, answered_by: &str) -> String {
        let store = self.redis.store().await;
        let id = hex(&sha256(format!("{bindings:?}{answered_by}{}", store.now_ms()).as_bytes())[..16]);
        let certificate = Certificate {
            id: id.clone(),
            route: "print".to_owned(),
            provider: "laser".to_owned(),
            bindings,
            answered_by: answered_by.to_owned(),
            fingerprint: String::new(),
            issued_ms: store.now_ms(),
            expires_ms: store.now_ms() + 3_600_000,
            issued_by: "ada".to_owned(),
            runs: 5,
            failures: 0,
            inconclusive: 0,
            evidence: String::new(),
        };
        assert_eq!(store.issue_certificate(&certificate, b"{}", None, 0).await.unwrap(), Issued::Kept);
        id
    }

    pub async fn standing(&self, id: &str) -> (Standing, String) {
        let kept = self.redis.store().await.certificates("print", "laser").await.unwrap();
        let one = kept.into_iter().find(|one| one.certificate.id == id).unwrap();
        (one.standing, one.reason)
    }
}

pub async fn run(runtime: &Runtime, key: &str, body: &str) -> Arc<Job> {
    let id = runtime.submit(submission(key, body)).await.unwrap().job.id;
    ended(runtime, id).await
}

#[tokio::test]
async fn a_job_fails_over_to_a_certified_provider_and_its_attempt_names_the_certificate() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    let id = shop.certify(r#"{"model":"m","pages":1}"#, "").await;
    let runtime = shop.gateway_with(gated).await;
    let job = run(&runtime, "order-1", r#"{"pages":7,"model":"m"}"#).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Aborted, Succeeded]));
    assert_eq!((job.attempts[1].provider.as_str(), job.attempts[1].certificate.as_str()), ("laser", id.as_str()));
    assert_eq!(job.attempts[0].certificate, "");
}

/// Case 53: each with its reason, and the provider is never called.
#[tokio::test]
async fn whoever_is_not_certified_for_this_very_request_is_never_called() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    let runtime = shop.gateway_with(gated).await;
    let denied = async |key: &str, body: &str, why: &str| {
        let job = run(&runtime, key, body).await;
        assert_eq!(job.state, JobState::Failed, "{key}");
        for said in [&job.attempts[0].reason, &job.reason] {
            assert!(said.contains(&format!("failover_denied: laser: {why}")), "{key}: {said}");
        }
        assert!(job.attempts.iter().all(|attempt| attempt.provider == "inkjet"), "{key}");
    };
    denied("none", r#"{"model":"m"}"#, "it has no certificate").await;
    let id = shop.certify(r#"{"model":"m","copies":1}"#, "").await;
    denied("model", r#"{"model":"n","copies":1}"#, "its certificate is for another model").await;
    denied("parameters", r#"{"model":"m","copies":2}"#, "its certificate is for other parameters").await;
    let store = shop.redis.store().await;
    let say = async |standing| {
        store.mark_certificate(AttemptToken::random(), ("print", "laser"), Some(&id), standing, ("ada", "doubts")).await.unwrap()
    };
    assert_eq!(say(Standing::Suspended).await, Stood::Changed(1));
    denied("suspended", r#"{"model":"m","copies":1}"#, "its certificate is suspended: doubts").await;
    assert_eq!(say(Standing::Live).await, Stood::Changed(1));
    assert_eq!(run(&runtime, "live", r#"{"model":"m","copies":1}"#).await.state, JobState::Succeeded);
    let called = shop.laser.ledger().received;
    assert_eq!(say(Standing::Revoked).await, Stood::Changed(1));
    denied("revoked", r#"{"model":"m","copies":1}"#, "its certificate is revoked: doubts").await;
    assert_eq!(say(Standing::Live).await, Stood::Refused);
    assert_eq!((called, shop.laser.ledger().received), (1, 1));
}

#[tokio::test]
async fn a_shadow_lets_pass_what_it_would_deny() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    let runtime = shop
        .gateway_with(|setup| {
            gated(setup);
            setup.route.plan.gate = Gate::Shadow;
        })
        .await;
    let job = run(&runtime, "order-1", r#"{"model":"m"}"#).await;
    assert_eq!((job.state, job.attempts[1].certificate.as_str()), (JobState::Succeeded, ""));
}

/// The decision is made twice: where to go when the first provider fails, and again right before the attempt begins. A revoke between
/// the two counts, on whatever gateway it is made.
#[tokio::test]
async fn a_revoke_while_a_failover_waits_for_room_stops_it() {
    let shop = Shop::open().await;
    let id = shop.certify(r#"{"model":"m"}"#, "").await;
    let runtime = shop
        .gateway_with(|setup| {
            gated(setup);
            setup.in_flight_max = 1;
        })
        .await;
    // The laser's only place is taken by another job.
    shop.inkjet.set_behaviour("refuse").unwrap();
    shop.laser.set_behaviour("delay=1500ms").unwrap();
    let first = runtime.submit(submission("first", r#"{"model":"m"}"#)).await.unwrap().job.id;
    until("the laser has the first job", async || shop.laser.ledger().received == 1).await;
    // The second one is on its way there, and waits.
    let second = runtime.submit(submission("second", r#"{"model":"m"}"#)).await.unwrap().job.id;
    until("the second has failed at the inkjet", async || {
        runtime.read(second).await.unwrap().attempts.iter().any(|attempt| attempt.state == Aborted)
    })
    .await;
    let reason = runtime.read(second).await.unwrap().attempts[0].reason.clone();
    assert!(!reason.contains("failover_denied"), "the wish was to go: {reason}");
    let other_gateway = shop.redis.store().await;
    let revoked = other_gateway
        .mark_certificate(AttemptToken::random(), ("print", "laser"), None, Standing::Revoked, ("ada", "it lies"))
        .await;
    assert_eq!(revoked.unwrap(), Stood::Changed(1));
    // What had begun goes on, under the certificate that it names.
    let first = ended(&runtime, first).await;
    assert_eq!((first.state, first.attempts[1].certificate.as_str()), (JobState::Succeeded, id.as_str()));
    let second = ended(&runtime, second).await;
    assert_eq!(second.state, JobState::Failed);
    assert!(second.reason.contains("failover_denied: laser: its certificate is revoked: it lies"), "{}", second.reason);
    assert_eq!(shop.laser.ledger().received, 1);
}

/// Case 55.
#[tokio::test]
async fn an_answer_of_another_model_suspends_the_certificate_and_the_next_failover_is_denied() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    let id = shop.certify(r#"{"model":"m"}"#, "a model that is not there any more").await;
    let runtime = shop.gateway_with(gated).await;
    assert_eq!(run(&runtime, "first", r#"{"model":"m"}"#).await.state, JobState::Succeeded);
    until("it is suspended", async || shop.standing(&id).await.0 == Standing::Suspended).await;
    assert!(shop.standing(&id).await.1.contains("is certified"));
    assert_eq!(run(&runtime, "second", r#"{"model":"m"}"#).await.state, JobState::Failed);
    assert_eq!(shop.laser.ledger().received, 1);
}

/// It was tried once, and the certificate stayed live though another model is known to answer.
#[tokio::test]
async fn a_suspension_that_cannot_be_stored_is_made_once_it_can() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    let id = shop.certify(r#"{"model":"m"}"#, "a model that is not there any more").await;
    let runtime = shop.gateway_with(gated).await;
    // Certificates can be read, and nobody may change them.
    let only_read = ["ACL", "SETUSER", "default", "resetkeys", "~oj:[^c]*", "~oj:canary", "%R~oj:certificate:*"];
    shop.redis.command::<()>(&only_read).await;
    assert_eq!(run(&runtime, "first", r#"{"model":"m"}"#).await.state, JobState::Succeeded);
    until("it is refused", async || !shop.redis.command::<Vec<redis::Value>>(&["ACL", "LOG"]).await.is_empty()).await;
    assert_eq!(shop.standing(&id).await.0, Standing::Live);
    shop.redis.command::<()>(&["ACL", "SETUSER", "default", "allkeys"]).await;
    until("it is suspended", async || shop.standing(&id).await.0 == Standing::Suspended).await;
}

#[tokio::test]
async fn too_many_invalid_answers_suspend_the_certificate() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    let id = shop.certify(r#"{"model":"m"}"#, "").await;
    let runtime = shop
        .gateway_with(|setup| {
            gated(setup);
            let never = ["output.no_such_member == 1".to_owned()];
            let check = Check::compile(Of::Output, &Required { schema: None, assertions: &never }).unwrap();
            setup.route.validator = Some(Arc::new(Validator { output: Some(check), ..Validator::default() }));
        })
        .await;
    for (key, standing) in [("first", Standing::Live), ("second", Standing::Suspended)] {
        assert_eq!(run(&runtime, key, r#"{"model":"m"}"#).await.state, JobState::Failed);
        until("the answer counts", async || shop.standing(&id).await.0 == standing).await;
    }
    assert!(shop.standing(&id).await.1.contains("2 of the last 2 answers were invalid"));
    run(&runtime, "third", r#"{"model":"m"}"#).await;
    assert_eq!(shop.laser.ledger().received, 2);
}

#[tokio::test]
async fn certificates_are_kept_marked_and_told() {
    let shop = Shop::open().await;
    let store = shop.redis.store().await;
    let mut ids = Vec::new();
    for n in 0..9 {
        ids.push(shop.certify(&format!(r#"{{"model":"m{n}"}}"#), "").await);
    }
    let kept = store.certificates("print", "laser").await.unwrap();
    let kept: Vec<&str> = kept.iter().map(|one| one.certificate.id.as_str()).collect();
    let expected: Vec<&str> = ids.iter().skip(1).rev().map(String::as_str).collect();
    assert_eq!(kept, expected, "the newest eight, the newest first");
    assert_eq!(store.evidence(&ids[8]).await.unwrap().as_deref(), Some(b"{}".as_slice()));
    assert_eq!(store.certified_pairs().await.unwrap().pairs, [("print".to_owned(), "laser".to_owned())]);
    let say = async |id: Option<&str>, standing| {
        store.mark_certificate(AttemptToken::random(), ("print", "laser"), id, standing, ("ada", "why")).await.unwrap()
    };
    assert_eq!(say(Some(&ids[0]), Standing::Revoked).await, Stood::NotFound);
    assert_eq!(say(Some(&ids[8]), Standing::Suspended).await, Stood::Changed(1));
    assert_eq!(say(Some(&ids[8]), Standing::Suspended).await, Stood::Repeated);
    let token = AttemptToken::random();
    let suspend = async |token| {
        store.mark_certificate(token, ("print", "laser"), Some(&ids[7]), Standing::Suspended, ("ada", "why")).await.unwrap()
    };
    assert_eq!(suspend(token).await, Stood::Changed(1));
    assert_eq!(say(Some(&ids[7]), Standing::Live).await, Stood::Changed(1));
    assert_eq!(suspend(token).await, Stood::Repeated, "its reply was lost, and it comes once more");
    assert_eq!(shop.standing(&ids[7]).await.0, Standing::Live);
    assert_eq!(suspend(AttemptToken::random()).await, Stood::Changed(1));
    assert_eq!(say(None, Standing::Revoked).await, Stood::Changed(8));
    let events = store.certificate_events("print", "laser").await.unwrap();
    let words: Vec<&str> = events.iter().map(|event| event.event.as_str()).collect();
    assert_eq!(
        words,
        [["issued"; 9].as_slice(), &["suspended", "suspended", "reinstated", "suspended"], &["revoked"; 8],].concat()
    );
    let life: i64 = shop
        .redis
        .command(&["PTTL", &shop.redis.keys().await.into_iter().find(|key| key.contains(":certificate:")).unwrap()])
        .await;
    assert!(life > 30 * 86_400_000, "{life}");
}

/// What is told before a failover is wanted is what would be decided then: a newer certificate that is suspended counts, and not the
/// older one that is still live.
#[tokio::test]
async fn of_several_certificates_for_one_contract_the_newest_decides() {
    let shop = Shop::open().await;
    shop.inkjet.set_behaviour("refuse").unwrap();
    shop.certify(BODY, "").await;
    let newest = shop.certify(BODY, "again").await;
    let store = shop.redis.store().await;
    let suspend = ("ada", "doubts");
    store
        .mark_certificate(AttemptToken::random(), ("print", "laser"), Some(&newest), Standing::Suspended, suspend)
        .await
        .unwrap();
    let kept = store.certificates("print", "laser").await.unwrap();
    let standing: Vec<Standing> = kept.iter().map(|one| one.standing).collect();
    assert_eq!(standing, [Standing::Suspended, Standing::Live]);
    let in_force: Vec<&str> = in_force(&kept).map(|one| one.certificate.id.as_str()).collect();
    assert_eq!(in_force, [newest.as_str()]);
    let runtime = shop.gateway_with(gated).await;
    let job = run(&runtime, "order-1", BODY).await;
    assert!(job.reason.contains("failover_denied: laser: its certificate is suspended: doubts"), "{}", job.reason);
    assert_eq!(shop.laser.ledger().received, 0);
}
