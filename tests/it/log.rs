//! The log of a gateway at its most talkative: what must never be in it.

use onejob::config::token_sha256;
use onejob::provider::simulated::WEBHOOK_SECRET;
use rustix::process::Signal;

use crate::provider_async::scripted;
use crate::support::gateway::{End, Gateway, Site};
use crate::support::until;

const CREDENTIAL: &str = "sk-live/of-the-provider-0123456789";
const TOKEN: &str = "token-of-ada-0123456789-abcdef";

/// What a secret may look like in a log: as it is, with its slashes escaped, as the bytes of a frame.
fn forms(secret: &str) -> [String; 3] {
    [secret.to_owned(), secret.replace('/', "\\/"), format!("{:?}", secret.as_bytes()).trim_matches(['[', ']']).to_owned()]
}

/// Which secrets are in a text, each with a line of it.
fn secrets_in(text: &str, what: &str) -> Vec<String> {
    let secrets = [("credential", CREDENTIAL), ("token", TOKEN), ("webhook's secret", WEBHOOK_SECRET)];
    let forms = secrets.into_iter().flat_map(|(name, secret)| forms(secret).map(|form| (form, name)));
    let line_of = |(form, name): (String, &str)| {
        let line = text.lines().find(|line| line.contains(&form))?;
        Some(format!("the {name} is in {what}: {line}"))
    };
    forms.filter_map(line_of).collect()
}

async fn submit(gateway: &Gateway, route: &str, key: &str, simulate: &str) -> String {
    let (bearer, body) = (format!("Bearer {TOKEN}"), format!(r#"{{"route":"{route}","input":{{"simulate":"{simulate}"}}}}"#));
    let headers = [("Idempotency-Key", key), ("Authorization", bearer.as_str())];
    let answer = gateway.send("POST", "/v1/jobs", &headers, &body).await.unwrap();
    answer.body["id"].as_str().unwrap_or_else(|| panic!("{answer:?}")).to_owned()
}

/// Case 52: of calls that succeed, are refused, redirected, cut off, or never connected, over each version of HTTP.
#[tokio::test]
async fn a_log_of_everything_has_neither_a_providers_credential_nor_an_owners_token() {
    let site = Site::open().await;
    let (auth, tokens) = (r#"{ bearer_env = "TEST_CREDENTIAL" }"#, format!(r#"["{}"]"#, token_sha256(TOKEN)));
    let here = site.printer.base_url();
    // It says the key where a reason is made of its words: as a state, and as what went wrong.
    let (indiscreet, _) = scripted(|number, _| match number {
        1 => (202, r#"{"id":"7","status":"running"}"#.to_owned()),
        2 => (200, format!(r#"{{"id":"7","status":"{CREDENTIAL}"}}"#)),
        _ => (200, format!(r#"{{"id":"7","status":"failed","error":"the key {CREDENTIAL} is wrong"}}"#)),
    })
    .await;
    let settings = [
        ("provider.printer.auth", auth),
        ("provider.second.auth", auth),
        ("provider.second.base_url", &here),
        ("provider.second.http2", "prior_knowledge"),
        ("provider.queue.auth", auth),
        ("provider.queue.base_url", &here),
        ("provider.queue.preset", "job-queue"),
        ("provider.queue.poll", r#"{ first = "10ms", max = "50ms" }"#),
        ("provider.indiscreet.auth", auth),
        ("provider.indiscreet.base_url", &indiscreet),
        ("provider.indiscreet.preset", "job-queue"),
        ("provider.indiscreet.poll", r#"{ first = "10ms", max = "50ms" }"#),
        ("provider.away.auth", auth),
        ("provider.away.base_url", "http://127.0.0.1:9"),
        ("route.second.providers", r#"["second"]"#),
        ("route.queue.providers", r#"["queue"]"#),
        ("route.indiscreet.providers", r#"["indiscreet"]"#),
        ("route.away.providers", r#"["away"]"#),
        ("route.away.deadline", "1s"),
        ("owner.ada.tokens_sha256", &tokens),
    ];
    let variables = [("TEST_CREDENTIAL", CREDENTIAL), ("ONEJOB_LOG", "trace")];
    let mut gateway = site.start_in(&variables, &settings).await;
    let mut jobs = Vec::new();
    for route in ["print", "second"] {
        for (number, behaviour) in [
            "echo_credential",
            "refuse_status=401,echo_credential",
            "refuse_status=307,echo_credential",
            "status=500,echo_credential",
            "invalid_json,echo_credential",
            "half,echo_credential",
            "drop",
        ]
        .into_iter()
        .enumerate()
        {
            jobs.push((submit(&gateway, route, &format!("{route}-{number}"), behaviour).await, behaviour));
        }
    }
    for (route, behaviour) in
        [("queue", "run=50ms"), ("queue", "fail"), ("queue", "drop"), ("indiscreet", "succeed"), ("away", "succeed")]
    {
        jobs.push((submit(&gateway, route, &format!("{route}-{behaviour}"), behaviour).await, behaviour));
    }
    // Nobody's token, and one that is written down wrong.
    for scheme in [format!("Bearer {TOKEN}x"), format!("Basic {TOKEN}"), TOKEN.to_owned()] {
        let answer = gateway.send("GET", &format!("/v1/jobs/{}", jobs[0].0), &[("Authorization", &scheme)], "").await.unwrap();
        assert_eq!(answer.status, 401, "{scheme}");
    }
    let (bearer, mut found) = (format!("Bearer {TOKEN}"), Vec::new());
    for (id, behaviour) in &jobs {
        let mut told = String::new();
        until(&format!("{behaviour}: it is known how it went"), async || {
            let job = gateway.send("GET", &format!("/v1/jobs/{id}"), &[("Authorization", &bearer)], "").await.unwrap().body;
            told = job.to_string();
            matches!(job["state"].as_str(), Some("succeeded" | "failed" | "unknown"))
        })
        .await;
        found.extend(secrets_in(&told, "an answer"));
    }
    found.extend(secrets_in(&gateway.page("/metrics").await, "the metrics"));
    gateway.signal(Signal::TERM);
    let end = gateway.ended().await;
    let words = gateway.words();
    assert!(matches!(end, End::Code(0 | 4)), "{end:?}");
    found.extend(secrets_in(&words, "the log"));
    assert!(found.is_empty(), "{}", found.join("\n"));
    // It has said what it could: of HTTP/2, and of what the provider echoed.
    assert!(words.contains("TRACE") && words.contains(" h2::"), "no frames in the log");
    assert!(words.contains("[hidden]"), "the log has no word of what was echoed");
}
