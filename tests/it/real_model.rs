//! A real model behind a server that speaks OpenAI's API: `make real-model` with its URL.
//!
//! What is generated is counted outside of onejob, by a relay between the gateways and the server.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use onejob::config::PromptEntry;
use onejob::qualify::prompt::Prompt;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use crate::http_streams::content;
use crate::http_support::Client;
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
/// `tokenizer_config.json`, and `tokenizer.json`.
#[tokio::test]
#[ignore = "needs files of real models: make real-prompts"]
async fn it_is_found_on_the_templates_of_real_models_too() {
    let prompted = r#"{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}],"max_tokens":10}"#;
    let dir = said("PROMPT_DIR").expect("PROMPT_DIR=a directory of models");
    for model in std::fs::read_dir(dir).unwrap() {
        let model = model.unwrap().path();
        let file = ["chat_template.jinja", "tokenizer_config.json"].map(|name| model.join(name));
        let file = file.into_iter().find(|file| file.exists()).expect("a chat template");
        let text = std::fs::read_to_string(&file).unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let look = async |text: &str, limit: u64| {
            let changed = scratch.path().join("chat");
            std::fs::write(&changed, text).unwrap();
            let begins = std::fs::read_to_string(model.join("bos_token")).ok().map(|token| token.trim().to_owned());
            let entry = PromptEntry {
                chat_template: Some(changed),
                tokenizer: Some(model.join("tokenizer.json")),
                bos_token: begins,
                context_tokens: Some(limit),
                ..PromptEntry::default()
            };
            Prompt::of(&entry).unwrap().look(prompted.as_bytes()).await.unwrap()
        };
        let good = look(&text, 2048).await;
        println!("{}: {} tokens, faults {:?}\n{:?}", model.display(), good.tokens.unwrap(), good.faults, good.text.unwrap());
        assert_eq!(good.faults, [""; 0]);
        let silent = look(&text.replace("add_generation_prompt", "false"), 2048).await.faults;
        let over = look(&text, good.tokens.unwrap() + 9).await.faults;
        println!("  without its generation prompt: {silent:?}\n  with a limit of one token less: {over:?}");
        assert!(silent[0].contains("no generation prompt") && over[0].contains("the limit is"));
        let twice = look(&format!("{{{{ bos_token }}}}{text}"), 2048).await.faults;
        let twice = if twice.is_empty() {
            look(&format!("{{{{ bos_token }}}}{{{{ bos_token }}}}{text}"), 2048).await.faults
        } else {
            twice
        };
        println!("  with its beginning once more: {twice:?}");
        // Where its tokenizer begins no prompt by itself, nothing can be there twice.
        assert!(twice.is_empty() || twice[0].contains("begins a prompt"), "{twice:?}");
    }
}
