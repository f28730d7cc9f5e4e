//! The presets over real HTTP: what each sends, where it asks, and what it makes of the words that its vendor documents.

use std::collections::BTreeMap;
use std::time::Duration;

use onejob::config::{Config, Environment, ProviderEntry, Sources};
use onejob::provider::async_http::{AsyncHttpOptions, AsyncHttpProvider};
use onejob::provider::http::{HttpOptions, HttpProvider};
use onejob::provider::{Abilities, CancelSemantics, Evidence, Outcome, Provider, Sent};

use crate::provider_async::{call, json, scripted, sent, succeeded};

const SECRET: &str = "sk-live/0123456789";

fn entry(preset: &str, base_url: &str) -> ProviderEntry {
    let overrides = [("preset", preset), ("base_url", base_url), ("poll", r#"{ first = "10ms", max = "50ms" }"#)]
        .map(|(key, value)| (format!("provider.model.{key}"), value.to_owned()));
    let sources = Sources { file: None, overrides: overrides.into(), environment: Environment::Given(BTreeMap::new()) };
    Config::load(sources).unwrap().provider.remove("model").unwrap()
}

fn options(entry: &ProviderEntry) -> HttpOptions {
    HttpOptions::from_entry(entry, Some(SECRET.to_owned()), 1 << 20)
}

fn responses(base_url: &str) -> AsyncHttpProvider {
    let entry = entry("openai-responses", base_url);
    AsyncHttpProvider::new("model", AsyncHttpOptions::from_entry(&entry, options(&entry), None)).unwrap()
}

/// A response that was handed in so long ago.
fn handed_in(base_url: &str, age: Duration) -> Sent {
    Sent { url: format!("{base_url}/responses"), ..sent(base_url, "resp_1", age) }
}

fn line(request: &str) -> &str {
    request.lines().next().unwrap_or_default()
}

#[tokio::test]
async fn chat_and_embeddings_are_one_request_about_which_nothing_can_be_asked() {
    for (preset, path) in [("openai-chat", "/v1/chat/completions"), ("openai-embeddings", "/v1/embeddings")] {
        let (origin, seen) = scripted(|_, _| (200, r#"{"id":"x-1","model":"m-1","data":[]}"#.to_owned())).await;
        let base_url = format!("{origin}/v1");
        let provider = HttpProvider::new("model", options(&entry(preset, &base_url))).unwrap();
        let outcome = provider.submit(call(&provider, "succeed")).await;
        assert_eq!(json(succeeded(&outcome).0)["id"], "x-1", "{preset}");
        assert_eq!(provider.abilities(), Abilities::default(), "{preset}");
        let asked = sent(&base_url, "x-1", Duration::ZERO);
        for evidence in
            [provider.status(asked.clone()).await, provider.find(asked.clone()).await, provider.cancel(asked.clone()).await]
        {
            assert!(matches!(evidence, Evidence::NoAnswer { .. }), "{preset}: {evidence:?}");
        }
        let seen = seen.lock().unwrap().clone();
        assert_eq!(seen.len(), 1, "{preset}: nobody asked: {seen:?}");
        assert_eq!(line(&seen[0]), format!("POST {path} HTTP/1.1"));
        let head = seen[0].to_ascii_lowercase();
        assert!(head.contains(&format!("authorization: bearer {SECRET}\r\n")), "{head}");
        assert!(!head.contains("idempotency-key"), "no key is sent to whom it is not documented for: {head}");
    }
}

#[tokio::test]
async fn a_response_is_made_in_the_background_and_asked_about_until_it_is_there() {
    let (origin, seen) = scripted(|number, _| {
        let status = ["queued", "in_progress", "completed"][number.min(3) - 1];
        (200, format!(r#"{{"id":"resp_1","object":"response","status":"{status}","error":null,"output":[{number}]}}"#))
    })
    .await;
    let base_url = format!("{origin}/v1");
    let provider = responses(&base_url);
    let outcome = provider.submit(call(&provider, "succeed")).await;
    let (response, remote_id) = succeeded(&outcome);
    assert_eq!((remote_id, json(response)["output"][0].as_u64()), ("resp_1", Some(3)), "all of the last answer");
    let seen = seen.lock().unwrap().clone();
    let lines: Vec<&str> = seen.iter().map(|request| line(request)).collect();
    let asked = "GET /v1/responses/resp_1 HTTP/1.1";
    assert_eq!(lines, ["POST /v1/responses HTTP/1.1", asked, asked]);
    assert!(seen[0].ends_with(r#"{"input":{"n":9007199254740993},"background":true}"#), "{}", seen[0]);
}

#[tokio::test]
async fn each_word_of_a_response_means_what_its_vendor_documents() {
    let say = async |status: u16, body: &str, age: Duration| {
        let body = body.to_owned();
        let (origin, _) = scripted(move |_, _| (status, body.clone())).await;
        let base_url = format!("{origin}/v1");
        responses(&base_url).status(handed_in(&base_url, age)).await
    };
    let young = Duration::from_secs(60);
    let state = |word: &str| {
        format!(r#"{{"id":"resp_1","status":"{word}","error":{{"code":"server_error","message":"the model is away"}}}}"#)
    };
    for word in ["queued", "in_progress"] {
        assert_eq!(say(200, &state(word), young).await, Evidence::StillRunning, "{word}");
    }
    for word in ["completed", "incomplete"] {
        let evidence = say(200, &state(word), young).await;
        assert!(matches!(evidence, Evidence::Settled(Outcome::Succeeded { .. })), "{word}: it was computed: {evidence:?}");
    }
    let failed = say(200, &state("failed"), young).await;
    let Evidence::Settled(Outcome::Rejected { reason, .. }) = &failed else { panic!("{failed:?}") };
    assert!(reason.contains("the model is away"), "{reason}");
    assert_eq!(say(200, &state("cancelled"), young).await, Evidence::Canceled);
    let stranger = say(200, &state("paused"), young).await;
    assert!(matches!(stranger, Evidence::NoAnswer { .. }), "{stranger:?}");
    // It is not said that what is not there never came: neither while it is remembered nor afterwards.
    let absent = say(404, "{}", young).await;
    assert!(matches!(absent, Evidence::NoAnswer { .. }), "{absent:?}");
    assert_eq!(say(404, "{}", Duration::from_secs(601)).await, Evidence::Expired);
}

#[tokio::test]
async fn a_response_is_canceled_by_its_id_and_the_cancel_is_only_an_effort() {
    let (origin, seen) = scripted(|_, _| (200, r#"{"id":"resp_1","status":"cancelled"}"#.to_owned())).await;
    let base_url = format!("{origin}/v1");
    let provider = responses(&base_url);
    let abilities = provider.abilities();
    assert_eq!((abilities.status, abilities.find, abilities.replay), (true, false, None));
    assert_eq!((abilities.cancel, abilities.settle), (CancelSemantics::BestEffort, Duration::from_secs(300)));
    assert_eq!(abilities.retention, Some(Duration::from_secs(600)));
    assert_eq!(provider.cancel(handed_in(&base_url, Duration::from_secs(1))).await, Evidence::Canceled);
    let seen = seen.lock().unwrap().clone();
    assert_eq!(line(&seen[0]), "POST /v1/responses/resp_1/cancel HTTP/1.1");
}
