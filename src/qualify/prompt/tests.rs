//! Templates in the manner of the families that are in use, with the idioms of Python that they have.

use serde_json::json;

use super::template::strftime_now;
use super::*;

const CHATML: &str =
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' + message['content'].strip() + '<|im_end|>' }}
{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n";

/// A beginning, roles between special tokens, a date, tools where there are any, a macro, and a loop that is left.
const HEADERS: &str = "{{- bos_token }}
{%- macro head(role) %}<|start|>{{ role }}<|end|>\n\n{% endmacro %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'].strip() %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- head('system') ~ 'Today: ' ~ strftime_now('%d %b %Y') ~ '\\n' ~ system }}
{%- if tools is not none %}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
    {%- if message.content is string and message.content.startswith('/stop') %}{% break %}{% endif %}
    {%- generation %}{{- head(message.role) + message.content.split('</think>')[-1].lstrip('\\n') }}{%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}";

fn request() -> Value {
    json!({ "messages": [{ "role": "system", "content": " be brief " }, { "role": "user", "content": "hi" }], "max_tokens": 10 })
}

fn chat(text: &str) -> ChatTemplate {
    ChatTemplate::read(text, Some("<s>"), Some("</s>")).unwrap()
}

/// A tokenizer that has a token for each word, and begins every text with `<s>`, or with nothing.
fn tokenizer(dir: &Path, begins: bool) -> std::path::PathBuf {
    let words = ["<s>", "[UNK]", "be", "brief", "hi", "user", "system", "assistant"];
    let vocabulary: serde_json::Map<_, _> = words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let added = json!({ "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } } });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
        "added_tokens": [{
            "id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        }],
        "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": if begins { added } else { json!(null) },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]" },
    });
    let file = dir.join("tokenizer.json");
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    file
}

/// What is found with a template and a tokenizer, `None` for no tokenizer.
async fn faults(template: &str, begins: Option<bool>, more: PromptEntry, request: &Value) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.jinja");
    std::fs::write(&file, template).unwrap();
    let tokenizer = begins.map(|begins| tokenizer(dir.path(), begins));
    let entry = PromptEntry { chat_template: Some(file), tokenizer, ..more };
    Prompt::of("second", &entry).unwrap().look(request.to_string().as_bytes()).await.unwrap().faults
}

fn begun_by(special_tokens: Option<SpecialTokens>) -> PromptEntry {
    PromptEntry { special_tokens, bos_token: Some("<s>".to_owned()), ..PromptEntry::default() }
}

#[test]
fn prompts_are_what_servers_of_such_models_make() {
    let prompt = chat(CHATML).render(&request(), true).unwrap();
    assert_eq!(prompt, "<|im_start|>system\nbe brief<|im_end|><|im_start|>user\nhi<|im_end|><|im_start|>assistant\n");
    let mut asked = request();
    asked["tools"] = json!([{ "name": "f", "strict": true, "n": 1 }]);
    let prompt = chat(HEADERS).render(&asked, true).unwrap();
    let today = strftime_now("%d %b %Y");
    let tools = r#"{"n": 1, "name": "f", "strict": true}"#;
    let expected = format!(
        "<s><|start|>system<|end|>\n\nToday: {today}\nbe brief{tools}<|start|>user<|end|>\n\nhi<|start|>assistant<|end|>\n\n"
    );
    assert_eq!(prompt, expected);
    asked["messages"][1]["content"] = json!("/stop");
    assert!(!chat(HEADERS).render(&asked, false).unwrap().contains("/stop"));
}

#[test]
fn a_template_that_refuses_or_wants_what_is_not_there_says_so() {
    let mut asked = request();
    asked["messages"][1]["role"] = json!("wizard");
    assert!(chat(HEADERS).render(&asked, true).unwrap_err().contains("the template refuses: unknown role wizard"));
    let wants = chat("{% for message in messages %}{{ message.text }}{% endfor %}").render(&request(), true).unwrap_err();
    assert!(wants.contains("undefined"), "{wants}");
    assert!(ChatTemplate::read("{% for %}", None, None).is_err());
}

#[test]
fn a_tokenizer_config_names_its_template_and_its_tokens() {
    let tokens =
        json!({ "bos_token": { "content": "<b>" }, "eos_token": "<e>", "chat_template": "{{ bos_token }}{{ eos_token }}" });
    assert_eq!(ChatTemplate::read(&tokens.to_string(), None, None).unwrap().render(&request(), true).unwrap(), "<b><e>");
    let named = json!({ "chat_template": [{ "name": "tool_use", "template": "t" }, { "name": "default", "template": "d" }] });
    assert_eq!(ChatTemplate::read(&named.to_string(), None, None).unwrap().render(&request(), true).unwrap(), "d");
    assert!(ChatTemplate::read("{}", None, None).is_err());
}

const WORDS: &str =
    "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}";

fn written(times: usize) -> String {
    format!("{}{WORDS}", "{{ bos_token }}".repeat(times))
}

#[tokio::test]
#[cfg(feature = "tokenizers")]
async fn what_is_commonly_wrong_with_a_prompt_is_found() {
    let limited = |context_tokens| PromptEntry { context_tokens: Some(context_tokens), ..begun_by(None) };
    assert_eq!(faults(&written(1), Some(true), begun_by(None), &request()).await, [""; 0]);
    // <s> be brief hi assistant, and ten for the answer.
    assert_eq!(faults(&written(1), Some(true), limited(15), &request()).await, [""; 0]);
    let over = "the prompt has 5 tokens and its answer may have 10; the limit is 14 together";
    assert_eq!(faults(&written(1), Some(true), limited(14), &request()).await, [over]);
    let silent = written(1).replace("add_generation_prompt", "true");
    assert_eq!(faults(&silent, Some(true), begun_by(None), &request()).await, [SILENT]);
    let alone = PromptEntry { tokenizer: Some("tokenizer.json".into()), ..PromptEntry::default() };
    assert!(Prompt::of("second", &alone).is_err_and(|what| what.contains("without a chat template")));
}

#[tokio::test]
#[cfg(feature = "tokenizers")]
async fn a_prompt_begins_once_whoever_begins_it() {
    use SpecialTokens::{Template, Tokenizer};
    let missing = "the token that begins a prompt is missing: ";
    let twice = "the token that begins a prompt is there 2 times: ";
    for (by, times, begins, expected) in [
        // The template writes it, as Gemma's does, and nobody adds it again.
        (None, 1, true, None),
        (Some(Template), 1, true, None),
        (Some(Template), 0, true, Some(format!("{missing}the template does not write it"))),
        (Some(Template), 2, true, Some(format!("{twice}the template writes it more than once"))),
        (Some(Template), 2, false, Some(format!("{twice}the template writes it more than once"))),
        // The tokenizer adds it, as llama.cpp does.
        (Some(Tokenizer), 0, true, None),
        (Some(Tokenizer), 1, true, Some(format!("{twice}the tokenizer adds it and the template writes it"))),
        // A model without a beginning, as Qwen's, and one whose tokenizer has it and adds it to nothing.
        (None, 0, false, None),
        (Some(Tokenizer), 0, false, None),
    ] {
        let found = faults(&written(times), Some(begins), begun_by(by), &request()).await;
        let as_expected = match &expected {
            None => found.is_empty(),
            Some(what) => found.len() == 1 && found[0].starts_with(what),
        };
        assert!(as_expected, "{by:?}, written {times} times, added: {begins}: {found:?}");
    }
    let unnamed = PromptEntry::default();
    assert_eq!(faults(WORDS, Some(false), unnamed, &request()).await, [""; 0]);
}

#[tokio::test]
async fn what_a_tokenizer_config_says_of_the_beginning_holds_without_a_tokenizer() {
    let config = |times: usize, adds: Value| {
        json!({ "bos_token": "<s>", "add_bos_token": adds, "chat_template": written(times) }).to_string()
    };
    let by = |special_tokens| PromptEntry { special_tokens: Some(special_tokens), ..PromptEntry::default() };
    let look = async |times, adds: Value, by| faults(&config(times, adds), None, by, &request()).await;
    assert_eq!(look(1, json!(true), by(SpecialTokens::Template)).await, [""; 0]);
    assert_eq!(look(0, json!(null), by(SpecialTokens::Template)).await, [""; 0]);
    assert_eq!(look(0, json!(false), by(SpecialTokens::Template)).await, [""; 0]);
    assert_eq!(look(0, json!(true), by(SpecialTokens::Tokenizer)).await, [""; 0]);
    assert!(look(0, json!(true), by(SpecialTokens::Template)).await[0].contains("is missing: the template"));
    assert!(look(2, json!(null), by(SpecialTokens::Template)).await[0].contains("is there 2 times: the template"));
    assert!(look(1, json!(true), by(SpecialTokens::Tokenizer)).await[0].contains("is there 2 times: the tokenizer"));
}

#[tokio::test]
async fn a_message_that_is_not_in_the_prompt_is_found() {
    let users = "{% for message in messages if message.role != 'system' %}{{ message.content | trim }} this{% endfor %}
{%- if add_generation_prompt %}assistant{% endif %}";
    let dropped = |number: usize, role: &str| format!("a message is dropped: message {number} ({role}) is not in the prompt");
    let look = async |template: &str, messages: Value| {
        faults(template, None, PromptEntry::default(), &json!({ "messages": messages })).await
    };
    let user = json!({ "role": "user", "content": " hi\n" });
    let system = |content: &str| json!({ "role": "system", "content": content });
    assert_eq!(look(users, json!([user])).await, [""; 0]);
    assert_eq!(look(users, json!([system("be brief"), user])).await, [dropped(1, "system")]);
    // Its text is there by chance: "this" has it.
    assert_eq!(look(users, json!([system("hi"), user])).await, [dropped(1, "system")]);
    assert_eq!(look(users, json!([system(" "), user])).await, [""; 0]);
    let last = "{{ messages[-1].content }}{% if add_generation_prompt %}assistant{% endif %}";
    assert_eq!(look(last, json!([user, system("be brief")])).await, [dropped(1, "user")]);
    // Thoughts are left out of earlier answers, and parts of a message are no text.
    let thought = json!({ "role": "assistant", "content": "<think>hm</think>yes" });
    let parts = json!({ "role": "user", "content": [{ "type": "text", "text": "hi" }] });
    let thoughtless = "{% for message in messages %}{{ message.content.split('</think>')[-1] if message.content is string }}
{%- endfor %}{% if add_generation_prompt %}assistant{% endif %}";
    assert_eq!(look(thoughtless, json!([user, thought, parts])).await, [""; 0]);
    // One that cuts texts is seen by the text, one that quotes them quotes all of it.
    let cut = "{% for message in messages %}{{ message.content[:20] }}{% endfor %}{% if add_generation_prompt %}a{% endif %}";
    let long = json!([{ "role": "user", "content": "a long text that a template cuts somewhere" }]);
    assert_eq!(look(cut, long).await, [dropped(1, "user")]);
    let quoting = "{{ messages | tojson }}{% if add_generation_prompt %}assistant{% endif %}";
    assert_eq!(look(quoting, json!([{ "role": "user", "content": "say \"hi\"\nthen" }])).await, [""; 0]);
}

/// A server that answers as this says, by path and body; until the test ends.
async fn server(answer: impl Fn(&str, &Value) -> Value + Send + 'static) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut read = Vec::new();
            let (head, body) = loop {
                let text = String::from_utf8_lossy(&read).into_owned();
                if let Some((head, body)) = text.split_once("\r\n\r\n") {
                    let length = head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
                    if body.len() >= length.unwrap_or(0) {
                        break (head.to_owned(), serde_json::from_str::<Value>(body).unwrap());
                    }
                }
                let mut part = [0; 4096];
                let length = client.read(&mut part).await.unwrap();
                read.extend_from_slice(&part[..length]);
            };
            let answer = answer(head.split_whitespace().nth(1).unwrap(), &body);
            let (status, body) = (if answer.is_null() { "404 Not Found" } else { "200 OK" }, answer.to_string());
            let head = format!("content-type: application/json\r\ncontent-length: {}\r\nconnection: close", body.len());
            client.write_all(format!("HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
        }
    });
    url
}

/// Their tokens: one for `<s>`, one for each word.
fn words(text: &str, adds: bool) -> Vec<u64> {
    let words = text.replace("<s>", " <s> ");
    let begin = adds.then_some(0);
    begin.into_iter().chain(words.split_whitespace().map(|word| if word == "<s>" { 0 } else { 1 + word.len() as u64 })).collect()
}

/// As llama.cpp answers: prompts without a beginning, tokens of `content`, with a beginning if it is to be.
fn llama(path: &str, body: &Value) -> Value {
    match path {
        "/apply-template" => json!({ "prompt": chat(WORDS).render(body, body["add_generation_prompt"] == true).unwrap() }),
        _ => match body["content"].as_str() {
            Some(text) => json!({ "tokens": words(text, body["add_special"] == true) }),
            None => json!({ "tokens": [] }),
        },
    }
}

#[tokio::test]
async fn llama_cpps_endpoints_are_understood() {
    let url = server(llama).await;
    let entry = |special_tokens, context_tokens| PromptEntry {
        apply_template: Some(format!("{url}/apply-template")),
        tokenize: Some(format!("{url}/tokenize")),
        special_tokens,
        context_tokens: Some(context_tokens),
        ..PromptEntry::default()
    };
    let look = async |entry: PromptEntry| Prompt::of("second", &entry).unwrap().look(request().to_string().as_bytes()).await;
    let found = look(entry(None, 15)).await.unwrap();
    assert_eq!((found.tokens, found.faults), (Some(5), Vec::new()));
    assert_eq!(look(entry(None, 14)).await.unwrap().faults.len(), 1);
    let missing = look(entry(Some(SpecialTokens::Template), 15)).await.unwrap();
    assert!(missing.faults[0].contains("is missing"), "{missing:?}");
    // It makes no tokens of messages, and says nothing of that.
    let alone = PromptEntry { tokenize: Some(format!("{url}/tokenize")), ..PromptEntry::default() };
    assert!(look(alone).await.unwrap_err().contains("it counts no tokens of messages"));
}

/// As vLLM answers: tokens of a prompt or of messages, how many, and how many it takes. Its template writes the beginning.
fn vllm(of: &'static str) -> impl Fn(&str, &Value) -> Value + Send + 'static {
    move |_, body| {
        assert_eq!(body["model"], "m");
        let text = match body["prompt"].as_str() {
            Some(text) => text.to_owned(),
            None => chat(of).render(body, body["add_generation_prompt"] == true).unwrap(),
        };
        let tokens = words(&text, body["add_special_tokens"] == true);
        json!({ "count": tokens.len(), "max_model_len": 15, "tokens": tokens })
    }
}

#[tokio::test]
async fn vllms_endpoint_is_understood() {
    let look = async |of: &'static str, answer_tokens: u64, more: PromptEntry| {
        let entry = PromptEntry { tokenize: Some(format!("{}/tokenize", server(vllm(of)).await)), ..more };
        let mut asked = request();
        asked["model"] = json!("m");
        asked["max_tokens"] = json!(answer_tokens);
        Prompt::of("second", &entry).unwrap().look(asked.to_string().as_bytes()).await.unwrap()
    };
    let good: &str = Box::leak(written(1).into_boxed_str());
    let found = look(good, 10, PromptEntry::default()).await;
    assert_eq!((found.tokens, found.faults), (Some(5), Vec::new()));
    // Its own limit, or ours.
    assert!(look(good, 11, PromptEntry::default()).await.faults[0].ends_with("the limit is 15 together"));
    let ours = PromptEntry { context_tokens: Some(14), ..PromptEntry::default() };
    assert!(look(good, 10, ours).await.faults[0].ends_with("the limit is 14 together"));
    let silent: &str = Box::leak(written(1).replace("add_generation_prompt", "true").into_boxed_str());
    assert_eq!(look(silent, 10, PromptEntry::default()).await.faults, [SILENT]);
    assert!(look(WORDS, 10, PromptEntry::default()).await.faults[0].contains("is missing"));
    let twice: &str = Box::leak(written(2).into_boxed_str());
    assert!(look(twice, 9, PromptEntry::default()).await.faults[0].contains("there 2 times"));
    // With a template of our own it is asked for the tokens of a text.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.jinja");
    std::fs::write(&file, good).unwrap();
    let own = PromptEntry { chat_template: Some(file), ..begun_by(None) };
    let found = look(WORDS, 10, own).await;
    assert_eq!((found.tokens, found.faults), (Some(5), Vec::new()));
}

#[tokio::test]
async fn an_endpoint_that_does_not_answer_so_says_nothing() {
    for answer in [json!({}), json!({ "tokens": ["be"] }), json!({ "prompt": 1 })] {
        let url = server(move |_, _| answer.clone()).await;
        let entry = PromptEntry { tokenize: Some(format!("{url}/tokenize")), ..PromptEntry::default() };
        Prompt::of("second", &entry).unwrap().look(request().to_string().as_bytes()).await.unwrap_err();
        let entry = PromptEntry { apply_template: Some(format!("{url}/apply-template")), ..PromptEntry::default() };
        Prompt::of("second", &entry).unwrap().look(request().to_string().as_bytes()).await.unwrap_err();
    }
}

#[tokio::test]
async fn an_endpoint_that_is_not_there_is_told_with_its_key_and_its_url() {
    let url = server(|_, _| Value::Null).await;
    let look = async |entry: PromptEntry| {
        Prompt::of("second", &entry).unwrap().look(request().to_string().as_bytes()).await.unwrap_err()
    };
    let template = PromptEntry { apply_template: Some(format!("{url}/apply-templat?key=secret")), ..PromptEntry::default() };
    let told = format!("provider.second.prompt.apply_template = \"{url}/apply-templat\": refused: status 404");
    assert!(look(template).await.starts_with(&told));
    let tokens = PromptEntry { tokenize: Some(format!("{url}/v2/tokenise")), ..PromptEntry::default() };
    let told = format!("provider.second.prompt.tokenize = \"{url}/v2/tokenise\": refused: status 404");
    assert!(look(tokens).await.starts_with(&told));
    let none = PromptEntry { tokenize: Some("tokenize".to_owned()), ..PromptEntry::default() };
    let what = Prompt::of("second", &none).map(drop).unwrap_err();
    assert_eq!(what, "provider.second.prompt.tokenize = \"tokenize\": it is no URL");
}

/// As templates do that put the answers of several tools into one turn.
#[test]
fn a_template_may_look_at_the_messages_beside_one() {
    let template = "{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if not loop.previtem or loop.previtem.role != 'tool' %}{{- '<tools>' }}{%- endif %}
        {{- message.content }};
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '</tools>' }}{%- endif %}
    {%- else %}{{- message.content }}{%- endif %}
{%- endfor %}";
    let tool = |content: &str| json!({ "role": "tool", "content": content });
    let user = |content: &str| json!({ "role": "user", "content": content });
    let asked = json!({ "messages": [user("a"), tool("1"), tool("2"), user("b"), tool("3")] });
    assert_eq!(chat(template).render(&asked, true).unwrap(), "a<tools>1;2;</tools>b<tools>3;</tools>");
}
