//! A real model behind a server that speaks OpenAI's API: `make real-model` with its URL.
//!
//! What is generated is counted outside of onejob, by a relay between the gateways and the server.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use onejob::config::{PromptEntry, SpecialTokens};
use onejob::qualify::prompt::Prompt;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use crate::cli::{Process, onejob};
use crate::http_streams::content;
use crate::http_support::Client;
use crate::support::Redis;
use crate::support::gateway::Site;

const PATH: &str = "/v1/chat/completions";

/// Passes connections on, and counts the requests for a completion.
struct Relay {
    addr: SocketAddr,
    asked: Arc<AtomicUsize>,
    _server: AbortOnDropHandle<()>,
}

impl Relay {
    async fn open(to: SocketAddr) -> Relay {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (addr, asked) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&asked);
        let server = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(relay(client, to, Arc::clone(&count)));
            }
        });
        Relay { addr, asked, _server: AbortOnDropHandle::new(server) }
    }
}

async fn relay(client: TcpStream, to: SocketAddr, asked: Arc<AtomicUsize>) {
    let Ok(server) = TcpStream::connect(to).await else { return };
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client.into_split(), server.into_split());
    let back = tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
    let mut part = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from_client.read(&mut part).await {
        let begins = format!("POST {PATH}");
        asked.fetch_add(usize::from(part[..length].starts_with(begins.as_bytes())), Ordering::SeqCst);
        if to_server.write_all(&part[..length]).await.is_err() {
            break;
        }
    }
    back.abort();
}

#[expect(clippy::disallowed_methods, reason = "which server is asked is said from outside")]
fn said(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Two readers at the gateway that runs it, of which one goes in the middle, and one at another gateway.
#[tokio::test]
#[ignore = "needs a server with a model: make real-model"]
async fn three_readers_of_one_generation_get_what_a_direct_stream_says() {
    let url = said("MODEL_URL").expect("MODEL_URL=http://127.0.0.1:8080");
    let server: SocketAddr = url.trim_start_matches("http://").trim_end_matches('/').parse().expect("http://address:port");
    let model = said("MODEL").unwrap_or_else(|| "default".to_owned());
    let body = serde_json::json!({
        "model": model, "stream": true, "temperature": 0, "seed": 7, "max_tokens": 40,
        "messages": [{ "role": "user", "content": "Count from one to twenty in words, separated by commas." }],
    })
    .to_string();

    let mut contents = Vec::new();
    for _ in 0..2 {
        let began = Instant::now();
        // Anew each time: a server may close a connection that was used.
        let whole = Client::new(server).open(PATH, "unused", &body).await.end().await.expect("a whole stream");
        println!("direct: {} bytes in {:.1?}: {:?}", whole.len(), began.elapsed(), content(&whole));
        contents.push(content(&whole));
    }
    assert_eq!(contents[0], contents[1], "this server does not answer the same twice, so nothing can be compared");

    let relay = Relay::open(server).await;
    let site = Site::open().await;
    let base_url = format!("http://{}", relay.addr);
    let settings = [("provider.printer.base_url", base_url.as_str()), ("provider.printer.timeouts.total", "5m")];
    let settings = [&settings[..], &[("route.print.deadline", "10m")]].concat();
    let (here, there) = (site.start(&settings, None).await, site.start(&settings, None).await);
    let (path, began) = (format!("/proxy/print{PATH}"), Instant::now());
    let (here, there) = (Client::new(here.addr()), Client::new(there.addr()));
    let mut one = here.open(&path, "k", &body).await;
    assert!(one.reads("\"content\":").await);
    let first = began.elapsed();
    let mut two = here.open(&path, "k", &body).await;
    let mut three = there.open(&path, "k", &body).await;
    assert!(two.reads("\"content\":").await && three.reads("\"content\":").await);
    assert_eq!((two.header("idempotency-replayed"), three.header("idempotency-replayed")), ("true", "true"));
    let left_bytes = one.read.len();
    drop(one);
    let (two, three) = (two.end().await.expect("a whole stream"), three.end().await.expect("a whole stream"));
    println!("onejob: {} bytes in {:.1?}, the first after {first:.1?}", two.len(), began.elapsed());
    println!("        one reader gone after {left_bytes} bytes; one on the same gateway and one on another to the end");
    let again = there.open(&path, "k", &body).await.end().await.expect("a whole stream");
    assert!(left_bytes < two.len(), "it went in the middle");
    assert_eq!(two, three);
    assert_eq!(two, again);
    assert_eq!(content(&two), contents[0]);
    let asked = relay.asked.load(Ordering::SeqCst);
    println!("        generations: {asked}; contents equal to the direct stream's: {}", content(&two) == contents[0]);
    assert_eq!(asked, 1);
}

/// On the templates and tokenizers of real models: a directory for each in `PROMPT_DIR`, with `chat_template.jinja` or
/// `tokenizer_config.json`, and `tokenizer.json`; and `bos_token`, a file with it, where neither names it.
#[tokio::test]
#[ignore = "needs files of real models: make real-prompts"]
async fn it_is_found_on_the_templates_of_real_models_too() {
    let prompted = r#"{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}],"max_tokens":10}"#;
    let dir = said("PROMPT_DIR").expect("PROMPT_DIR=a directory of models");
    let mut models: Vec<_> = std::fs::read_dir(dir).unwrap().map(|model| model.unwrap().path()).collect();
    models.sort();
    assert!(!models.is_empty(), "there is no model");
    for model in models {
        let file = ["chat_template.jinja", "tokenizer_config.json"].map(|name| model.join(name));
        let file = file.into_iter().find(|file| file.exists()).expect("a chat template");
        let config = std::fs::read_to_string(model.join("tokenizer_config.json")).ok();
        let config: serde_json::Value = config.map(|text| serde_json::from_str(&text).unwrap()).unwrap_or_default();
        let told = |name: &str| config[name].as_str().or(config[name]["content"].as_str()).map(str::to_owned);
        let begins = std::fs::read_to_string(model.join("bos_token")).ok().map(|token| token.trim().to_owned());
        let (begins, ends) = (begins.or_else(|| told("bos_token")), told("eos_token"));
        let text = std::fs::read_to_string(&file).unwrap();
        let text = if file.ends_with("chat_template.jinja") { text } else { told("chat_template").expect("a chat template") };
        let scratch = tempfile::tempdir().unwrap();
        let look = async |text: &str, limit: u64, special_tokens: SpecialTokens| {
            let changed = scratch.path().join("chat");
            std::fs::write(&changed, text).unwrap();
            let entry = PromptEntry {
                chat_template: Some(changed),
                tokenizer: Some(model.join("tokenizer.json")),
                bos_token: begins.clone(),
                eos_token: ends.clone(),
                context_tokens: Some(limit),
                special_tokens: Some(special_tokens),
                ..PromptEntry::default()
            };
            Prompt::of("second", &entry).unwrap().look(prompted.as_bytes()).await.unwrap()
        };
        let good = look(&text, 2048, SpecialTokens::Template).await;
        let (tokens, prompt) = (good.tokens.unwrap(), good.text.unwrap());
        println!("{}: {tokens} tokens, faults {:?}\n  {prompt:?}", model.display(), good.faults);
        assert_eq!(good.faults, [""; 0]);
        let fits = look(&text, tokens + 10, SpecialTokens::Template).await.faults;
        assert_eq!(fits, [""; 0]);
        let silent = look(&text.replace("add_generation_prompt", "false"), 2048, SpecialTokens::Template).await.faults;
        let over = look(&text, tokens + 9, SpecialTokens::Template).await.faults;
        println!("  without its generation prompt: {silent:?}\n  with a limit of one token less: {over:?}");
        assert!(silent.len() == 1 && silent[0].contains("no generation prompt"));
        assert!(over.len() == 1 && over[0].contains("the limit is"));
        let users = format!("{{%- set messages = messages[1:] %}}{text}");
        let dropped = look(&users, 2048, SpecialTokens::Template).await.faults;
        println!("  without its system message: {dropped:?}");
        assert!(dropped.iter().any(|fault| fault.contains("a message is dropped: message 1 (system)")));
        let Some(begins) = &begins else {
            println!("  it has no token that begins a prompt");
            let by_tokenizer = look(&text, 2048, SpecialTokens::Tokenizer).await.faults;
            assert_eq!(by_tokenizer, [""; 0]);
            continue;
        };
        // Twice by the template; by the template and the tokenizer; by nobody; by the tokenizer alone, as llama.cpp has it.
        let written = format!("{{{{- bos_token }}}}{text}");
        let without = text.replace("bos_token", "''");
        assert!(prompt.starts_with(begins) && !prompt[begins.len()..].starts_with(begins));
        let twice = look(&written, 2048, SpecialTokens::Template).await.faults;
        let both = look(&text, 2048, SpecialTokens::Tokenizer).await.faults;
        let missing = look(&without, 2048, SpecialTokens::Template).await.faults;
        let added = look(&without, 2048, SpecialTokens::Tokenizer).await;
        println!("  written twice: {twice:?}\n  written and added: {both:?}\n  neither: {missing:?}");
        println!("  added alone: {} tokens, {:?}", added.tokens.unwrap(), added.faults);
        assert!(twice.len() == 1 && twice[0].contains("2 times: the template writes it more than once"));
        assert!(both.len() == 1 && both[0].contains("2 times: the tokenizer adds it and the template writes it"));
        assert!(missing.len() == 1 && missing[0].contains("is missing"));
        assert_eq!((added.tokens, added.faults), (Some(tokens), Vec::new()));
    }
}

/// What llama.cpp's own endpoints say of a prompt, and what it bills for it.
#[tokio::test]
#[ignore = "needs a server with a model: make real-model"]
async fn a_prompt_has_as_many_tokens_as_its_server_counts() {
    let url = said("MODEL_URL").expect("MODEL_URL=http://127.0.0.1:8080");
    let url = url.trim_end_matches('/');
    let body = serde_json::json!({
        "model": said("MODEL").unwrap_or_else(|| "default".to_owned()), "max_tokens": 1,
        "messages": [{ "role": "system", "content": "be brief" }, { "role": "user", "content": "hi" }],
    });
    let entry = PromptEntry {
        apply_template: Some(format!("{url}/apply-template")),
        tokenize: Some(format!("{url}/tokenize")),
        ..PromptEntry::default()
    };
    let found = Prompt::of("second", &entry).unwrap().look(body.to_string().as_bytes()).await.unwrap();
    let server: SocketAddr = url.trim_start_matches("http://").parse().expect("http://address:port");
    let answer = Client::new(server).open(PATH, "unused", &body.to_string()).await.end().await.expect("a whole answer");
    let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
    println!("{found:?}\nby the server: {}", answer["usage"]);
    assert_eq!((found.tokens, found.faults), (answer["usage"]["prompt_tokens"].as_u64(), Vec::new()));
}

/// The example of `docs/QUALIFY.md`, with real models: one keeps the contract and takes over, the other one is never called.
#[tokio::test]
#[ignore = "needs two servers with models: make real-qualify"]
async fn the_model_that_keeps_the_contract_takes_over_and_the_other_one_is_never_called() {
    let server = |name: &str| -> SocketAddr {
        let url = said(name).unwrap_or_else(|| panic!("{name}=http://127.0.0.1:8081"));
        url.trim_start_matches("http://").trim_end_matches('/').parse().expect("http://address:port")
    };
    let (first, second) = (Relay::open(server("FIRST_URL")).await, Relay::open(server("SECOND_URL")).await);
    let (redis, dir) = (Redis::start().await, tempfile::tempdir().unwrap());
    let example = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/qualify");
    let mut text = std::fs::read_to_string(example.join("onejob.toml")).unwrap();
    for (from, to) in [
        ("127.0.0.1:7470", "127.0.0.1:0".to_owned()),
        ("redis://127.0.0.1:7471", redis.url().to_owned()),
        ("127.0.0.1:8081", first.addr.to_string()),
        ("127.0.0.1:8082", second.addr.to_string()),
        ("suites/city.yaml", example.join("suites/city.yaml").display().to_string()),
        ("schemas/city.json", example.join("schemas/city.json").display().to_string()),
    ] {
        assert!(text.contains(from), "{from}");
        text = text.replace(from, &to);
    }
    let config = dir.path().join("onejob.toml");
    std::fs::write(&config, text).unwrap();
    let run = async |arguments: &[&str]| {
        let output = onejob().arg("--config").arg(&config).args(arguments).output().await.unwrap();
        println!("$ onejob {}", arguments.join(" "));
        println!("{}{}(exit code {:?})\n", said_by(&output.stdout), said_by(&output.stderr), output.status.code().unwrap());
        output.status.code().unwrap()
    };
    let swapped = ["--set", "route.city.providers=[\"second\",\"first\"]"];
    assert_eq!(run(&["qualify", "--route", "city", "--provider", "second", "--actor", "alice"]).await, 0);
    assert_eq!(run(&[&swapped[..], &["qualify", "--route", "city", "--provider", "first"]].concat()).await, 1);
    assert_eq!(run(&["can-failover", "--route", "city"]).await, 0);
    assert_eq!(run(&[&swapped[..], &["can-failover", "--route", "city"]].concat()).await, 1);

    let system = "You extract facts. Answer with one JSON object and nothing else, of this form: {\"city\": \"...\", \
        \"country\": \"...\"} If the text names no city, answer {\"city\": \"none\", \"country\": \"none\"}.";
    let body = serde_json::json!({
        "temperature": 0, "max_tokens": 60,
        "messages": [
            { "role": "system", "content": system },
            { "role": "user", "content": "She lives in Osaka, Japan." },
        ],
    })
    .to_string();
    let down = "http://127.0.0.1:1/v1";
    for (order, broken, status) in [(&[][..], "first", 200), (&swapped[..], "second", 502)] {
        let before = (first.asked.load(Ordering::SeqCst), second.asked.load(Ordering::SeqCst));
        let mut command = onejob();
        command.arg("--config").arg(&config).args(order);
        command.arg("--set").arg(format!("provider.{broken}.base_url=\"{down}\"")).arg("serve");
        let gateway = Process::start(command, dir.path().join("stderr")).await;
        let client = Client::new(gateway.url.trim_start_matches("http://").trim_end_matches('/').parse().unwrap());
        let headers = [("idempotency-key", broken), ("content-type", "application/json")];
        let answer = client.send("POST", "/proxy/city/chat/completions", &headers, body.clone()).await;
        let asked = (first.asked.load(Ordering::SeqCst) - before.0, second.asked.load(Ordering::SeqCst) - before.1);
        println!(
            "{broken} down: {}, by {:?}, calls of (first, second): {asked:?}",
            answer.status,
            answer.header("onejob-provider")
        );
        println!("  {}", answer.text());
        let metrics = client.get("/metrics").await.text();
        let denied: Vec<&str> =
            metrics.lines().filter(|line| line.starts_with("onejob_failovers_denied_total{") && !line.ends_with(" 0")).collect();
        println!("  {}", denied.join("\n  "));
        assert_eq!(answer.status, status);
        if status == 200 {
            assert_eq!((asked, denied.len()), ((0, 1), 0));
        } else {
            assert!(asked == (0, 0) && denied.len() == 1 && denied[0].contains("no_certificate"), "{asked:?} {denied:?}");
        }
        gateway.terminate().await;
    }
}

fn said_by(output: &[u8]) -> String {
    String::from_utf8_lossy(output).into_owned()
}
