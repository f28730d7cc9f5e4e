//! Who may do what: another owner's job is as absent as one that never was.

use http::header::HeaderName;
use onejob::server::{Gateway, Owners};

use crate::http_support::{Answer, Site, options, tokens};

/// Every call that names a job, as its operator would make it.
fn calls(id: &str) -> Vec<(&'static str, String, &'static str)> {
    let attempt = |what| format!("/v1/jobs/{id}/attempts/1/{what}");
    vec![
        ("GET", format!("/v1/jobs/{id}"), ""),
        ("POST", format!("/v1/jobs/{id}/cancel"), ""),
        ("POST", format!("/v1/jobs/{id}/reopen"), r#"{"reason":"x"}"#),
        ("POST", format!("/v1/jobs/{id}/attempts"), r#"{"provider":"laser","lease_ms":60000}"#),
        ("POST", attempt("running"), r#"{"token":"00000000-0000-4000-8000-000000000000"}"#),
        ("POST", attempt("lease"), r#"{"token":"00000000-0000-4000-8000-000000000000","sequence":1,"lease_ms":60000}"#),
        ("POST", attempt("finish"), r#"{"token":"00000000-0000-4000-8000-000000000000","outcome":"succeeded","result":1}"#),
        ("POST", attempt("resolve"), r#"{"outcome":"abandoned","reason":"x"}"#),
        ("GET", "/v1/jobs?state=open".to_owned(), ""),
        ("POST", "/v1/cancel".to_owned(), ""),
        ("POST", "/v1/jobs".to_owned(), r#"{"route":"outside","input":1}"#),
        ("POST", "/proxy/chat/v1/x".to_owned(), "{}"),
        ("GET", "/proxy/chat/v1/models".to_owned(), ""),
    ]
}

const HEADERS: [(&str, &str); 2] = [("content-type", "application/json"), ("idempotency-key", "other")];

#[tokio::test]
async fn without_a_known_token_nothing_is_answered() {
    let site = Site::start().await;
    let id = site.alice().submit("outside", "order-1", "{}").await.job_id();
    let before = site.redis.dump().await;
    for token in ["", "mallory", "alicex"] {
        let mallory = site.client(token);
        for (method, path, body) in calls(&id) {
            let answer = mallory.send(method, &path, &HEADERS, body).await;
            answer.problem(401, "unauthorized");
            assert_eq!(answer.header("www-authenticate"), "Bearer", "{method} {path}");
        }
    }
    let nobody = site.client("");
    for value in ["Basic YWxpY2U6", "alice", "Bearer", "Bearer  ", "bearer\tmallory"] {
        nobody.send("GET", &format!("/v1/jobs/{id}"), &[("authorization", value)], "").await.problem(401, "unauthorized");
    }
    let twice = [("authorization", "Bearer alice"), ("authorization", "Bearer alice")];
    nobody.send("GET", &format!("/v1/jobs/{id}"), &twice, "").await.problem(401, "unauthorized");
    nobody.send("GET", &format!("/v1/jobs/{id}"), &[("authorization", "bearer alice")], "").await.is(200);
    assert_eq!(site.redis.dump().await, before);
    assert_eq!(site.provider.ledger().received, 0);
}

#[tokio::test]
async fn a_missing_role_is_told_and_nothing_is_done() {
    let site = Site::start().await;
    let id = site.alice().submit("outside", "order-1", "{}").await.job_id();
    let before = site.redis.dump().await;
    // Alice submits: what is the operators' is not hers, not even for her own job.
    for (method, path, body) in &calls(&id)[2..9] {
        let problem = site.alice().send(method, path, &HEADERS, *body).await.problem(403, "forbidden");
        assert_eq!(problem["role"], "operate", "{path}");
    }
    // The operator submits nothing; who has no role does nothing at all.
    for (method, path, body) in &calls(&id)[9..] {
        let problem = site.operator().send(method, path, &HEADERS, *body).await.problem(403, "forbidden");
        assert_eq!(problem["role"], "submit", "{path}");
    }
    for (method, path, body) in calls(&id) {
        site.client("nobody").send(method, &path, &HEADERS, body).await.problem(403, "forbidden");
    }
    assert_eq!(site.redis.dump().await, before);
    assert_eq!(site.provider.ledger().received, 0);
}

/// Case 6, and that the two answers cannot be told apart.
#[tokio::test]
async fn another_owners_job_looks_like_one_that_never_was() {
    let site = Site::start().await;
    let (alice, bob) = (site.alice(), site.bob());
    let id = alice.submit("print", "order-1", "{}").await.job_id();
    alice.ended(&id).await;
    let before = site.redis.dump().await;
    let absent = "0198c0de-0000-8000-8000-000000000000";
    let bare = |answer: Answer| {
        let mut headers = answer.headers.clone();
        headers.remove("date");
        headers.remove("onejob-request-id");
        (answer.status, headers, answer.body)
    };
    for (method, path) in [("GET", ""), ("POST", "/cancel")] {
        let theirs = bob.send(method, &format!("/v1/jobs/{id}{path}"), &[], "").await;
        theirs.problem(404, "job-unknown");
        assert!(!theirs.text().contains(&id));
        for other in [absent, "nonsense"] {
            let none = bob.send(method, &format!("/v1/jobs/{other}{path}"), &[], "").await;
            assert_eq!(bare(theirs.clone()), bare(none), "{method} {path}");
        }
    }
    let waited = bob.send("GET", &format!("/v1/jobs/{id}"), &[("prefer", "wait=5"), ("if-none-match", "*")], "").await;
    waited.problem(404, "job-unknown");
    // The same key is another job of his own; alice's key cancels nothing of hers.
    bob.send("POST", "/v1/cancel", &[("idempotency-key", "order-1")], "").await.problem(404, "job-unknown");
    assert_eq!(site.redis.dump().await, before);
    let own = bob.submit("print", "order-1", "{}").await.is(202);
    assert_ne!(own.job_id(), id);
    assert_eq!(own.header("idempotency-replayed"), "false");
    assert_eq!(site.operator().get(&format!("/v1/jobs/{id}")).await.is(200).json()["owner"], "alice");
}

#[tokio::test]
async fn a_trusted_header_names_the_owner_and_gives_no_role_but_submit() {
    let header = HeaderName::from_static("x-owner");
    let site = Site::with(|options| options.owners = Owners::TrustedHeader { header, tokens: tokens() }).await;
    let front = site.client("");
    let submit = [("content-type", "application/json"), ("idempotency-key", "k"), ("x-owner", "carol")];
    let job = front.send("POST", "/v1/jobs", &submit, r#"{"route":"outside","input":1}"#).await.is(202);
    assert_eq!(job.json()["owner"], "carol");
    let path = format!("/v1/jobs/{}", job.job_id());
    front.send("GET", &path, &[("x-owner", "dave")], "").await.problem(404, "job-unknown");
    front.send("GET", "/v1/jobs?state=open", &[("x-owner", "carol")], "").await.problem(403, "forbidden");
    // An operator's token beside the header does not add to it; without the header it is the operator.
    site.operator().send("GET", "/v1/jobs?state=open", &[("x-owner", "carol")], "").await.problem(403, "forbidden");
    site.operator().get("/v1/jobs?state=open").await.is(200);
    front.get(&path).await.problem(401, "unauthorized");
    for name in ["", "a b", &"x".repeat(129)] {
        front.send("GET", &path, &[("x-owner", name)], "").await.problem(401, "unauthorized");
    }
    front.send("GET", &path, &[("x-owner", "carol"), ("x-owner", "carol")], "").await.problem(401, "unauthorized");
}

#[tokio::test]
async fn without_owners_the_gateway_is_open_to_this_machine_alone() {
    let site = Site::with(|options| options.owners = Owners::Open).await;
    let anybody = site.client("");
    assert_eq!(anybody.submit("outside", "k", "1").await.is(202).json()["owner"], "local");
    anybody.get("/v1/jobs?state=open").await.is(200);

    let mut everywhere = options();
    everywhere.owners = Owners::Open;
    everywhere.listen = ([0, 0, 0, 0], 0).into();
    let error = Gateway::bind(everywhere, site.gateway.runtime.clone()).err().unwrap();
    assert!(error.to_string().contains("0.0.0.0:0 is not a loopback address"), "{error}");
    let mut guarded = options();
    guarded.listen = ([0, 0, 0, 0], 0).into();
    Gateway::bind(guarded, site.gateway.runtime.clone()).unwrap();
}

#[test]
fn a_configuration_with_a_token_of_two_owners_is_refused() {
    use onejob::config::{OwnerEntry, Role};
    let digest = "ab".repeat(32);
    let entry = |digest: &str| OwnerEntry { tokens_sha256: vec![digest.to_owned()], roles: vec![Role::Submit] };
    let owners = |entries: &[(&str, &str)]| {
        let owners = entries.iter().map(|(name, digest)| ((*name).to_owned(), entry(digest))).collect();
        Owners::from_config(&owners, None).map(|owners| format!("{owners:?}")).map_err(|error| error.to_string())
    };
    assert_eq!(owners(&[]), Ok("Open".to_owned()));
    assert_eq!(owners(&[("a", &digest)]), Ok("Tokens(…)".to_owned()));
    assert_eq!(owners(&[("a", &digest), ("b", &digest)]), Err("owners \"a\" and \"b\" have the same token".to_owned()));
    assert!(owners(&[("a", "abc")]).unwrap_err().contains("3 characters; it must be 64"));
    assert!(owners(&[("a b", &digest)]).unwrap_err().contains("owner \"a b\""));
    assert!(Owners::from_config(&Default::default(), Some("authorization")).is_err());
    assert!(Owners::from_config(&Default::default(), Some("a b")).is_err());
}
