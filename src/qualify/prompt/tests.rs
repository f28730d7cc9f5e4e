//! Templates in the manner of the families that are in use, with the idioms of Python that they have.

use serde_json::json;

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

/// A tokenizer that begins every prompt with `<s>`, and has a token for each word.
fn tokenizer(dir: &Path) -> std::path::PathBuf {
    let words = ["<s>", "[UNK]", "be", "brief", "hi", "user", "system", "assistant"];
    let vocabulary: serde_json::Map<_, _> = words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
        "added_tokens": [{
            "id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        }],
        "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } } },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]" },
    });
    let file = dir.join("tokenizer.json");
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    file
}

async fn faults(template: &str, context_tokens: Option<u64>, request: &Value) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.jinja");
    std::fs::write(&file, template).unwrap();
    let entry = PromptEntry {
        chat_template: Some(file),
        tokenizer: Some(tokenizer(dir.path())),
        bos_token: Some("<s>".to_owned()),
        context_tokens,
        ..PromptEntry::default()
    };
    Prompt::of(&entry).unwrap().look(request.to_string().as_bytes()).await.unwrap().faults
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

#[tokio::test]
#[cfg(feature = "tokenizers")]
async fn what_is_commonly_wrong_with_a_prompt_is_found() {
    let good =
        "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}";
    assert_eq!(faults(good, None, &request()).await, [""; 0]);
    // <s> be brief hi assistant, and ten for the answer.
    assert_eq!(faults(good, Some(15), &request()).await, [""; 0]);
    let over = "the prompt has 5 tokens and its answer may have 10; the limit is 14 together";
    assert_eq!(faults(good, Some(14), &request()).await, [over]);
    let silent = "no generation prompt: nothing tells the model to answer";
    assert_eq!(faults("{% for message in messages %}{{ message.content }} {% endfor %}", None, &request()).await, [silent]);
    let twice = "the token that begins a prompt is there 2 times";
    assert_eq!(faults(&format!("{{{{ bos_token }}}}{good}"), None, &request()).await, [twice]);
}
