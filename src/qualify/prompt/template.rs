//! A chat template, rendered as the servers of such models do: Python's idioms and all.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value as Jinja};
use serde_json::{Value, json};

use crate::validate::engine_value;

/// The budget of a chat template: about one unit a step.
const FUEL: u64 = 5_000_000;

/// A chat template with the tokens that it speaks of.
pub struct ChatTemplate {
    text: String,
    /// `""` where it speaks of none.
    pub(super) bos_token: String,
    eos_token: String,
    /// Whether its tokenizer is to begin every text with that token, where its file says so.
    pub(super) adds_bos: Option<bool>,
}

impl ChatTemplate {
    /// Reads a chat template: its text, or a `tokenizer_config.json` that has it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(file: &str, bos_token: Option<&str>, eos_token: Option<&str>) -> Result<Self, String> {
        let config: Option<Value> = serde_json::from_str(file).ok().filter(Value::is_object);
        // A token is a text, or an object that has it.
        let token = |name: &str| {
            let token = config.as_ref()?.get(name)?;
            token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
        };
        let text = match &config {
            None => file.to_owned(),
            Some(config) => match config.get("chat_template") {
                Some(Value::String(text)) => text.clone(),
                // Named ones: the one for plain chats.
                Some(Value::Array(named)) => {
                    let default = named.iter().find(|one| one["name"] == "default").or(named.first());
                    let text = default.and_then(|one| one["template"].as_str());
                    text.ok_or("its chat_template is a list without a template")?.to_owned()
                }
                _ => return Err("it has no chat_template".to_owned()),
            },
        };
        let chosen = |own: Option<&str>, name| own.map(str::to_owned).or_else(|| token(name)).unwrap_or_default();
        let template = ChatTemplate {
            text,
            bos_token: chosen(bos_token, "bos_token"),
            eos_token: chosen(eos_token, "eos_token"),
            adds_bos: config.as_ref().and_then(|config| config.get("add_bos_token")?.as_bool()),
        };
        template.engine()?;
        Ok(template)
    }

    fn engine(&self) -> Result<Environment<'static>, String> {
        let mut engine = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        engine.set_syntax(syntax.map_err(|error| error.to_string())?);
        engine.set_undefined_behavior(UndefinedBehavior::SemiStrict);
        engine.set_fuel(Some(FUEL));
        engine.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        engine.add_function("raise_exception", |what: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("the template refuses: {what}")))
        });
        engine.add_function("strftime_now", strftime_now);
        engine.add_filter("tojson", tojson);
        engine
            .add_template_owned("chat", without_generation_tags(&self.text))
            .map_err(|error| format!("it is no template: {}", told(&error)))?;
        Ok(engine)
    }

    /// Makes the prompt of a request's messages.
    ///
    /// # Errors
    /// The template wants what is not there, or refuses.
    pub fn render(&self, request: &Value, add_generation_prompt: bool) -> Result<String, String> {
        let mut context = serde_json::Map::new();
        for name in ["messages", "tools", "documents"] {
            context.insert(name.to_owned(), request.get(name).cloned().unwrap_or(Value::Null));
        }
        if let Some(Value::Object(more)) = request.get("chat_template_kwargs") {
            context.extend(more.clone());
        }
        context.insert("bos_token".to_owned(), json!(self.bos_token));
        context.insert("eos_token".to_owned(), json!(self.eos_token));
        context.insert("add_generation_prompt".to_owned(), json!(add_generation_prompt));
        let context = engine_value(&Value::Object(context)).ok_or("a number in the request is too large")?;
        let engine = self.engine()?;
        let template = engine.get_template("chat").map_err(|error| told(&error))?;
        template.render(context).map_err(|error| told(&error))
    }
}

/// `{% generation %}` marks what was generated, for training; it prints nothing of its own.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(begin) = rest.find("{%") {
        let Some(length) = rest[begin..].find("%}") else { break };
        let tag = &rest[begin..begin + length + 2];
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+', ' ', '\n', '\t']);
        out.push_str(&rest[..begin]);
        if word == "generation" || word == "endgeneration" {
            // What it takes away around it stays taken away.
            let dashes = |there: bool| if there { "-" } else { "" };
            let (left, right) = (dashes(tag.starts_with("{%-")), dashes(tag.ends_with("-%}")));
            out.push_str(&format!("{{%{left} if true %}}{{% endif {right}%}}"));
        } else {
            out.push_str(tag);
        }
        rest = &rest[begin + length + 2..];
    }
    out.push_str(rest);
    out
}

/// JSON as Python writes it.
fn tojson(value: Jinja) -> Result<String, Error> {
    struct Python;
    impl serde_json::ser::Formatter for Python {
        fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
            out.write_all(b": ")
        }
    }
    let mut out = Vec::new();
    let mut writer = serde_json::Serializer::with_formatter(&mut out, Python);
    let refused = |_| Error::new(ErrorKind::InvalidOperation, "tojson: it is no JSON");
    serde::Serialize::serialize(&value, &mut writer).map_err(refused)?;
    String::from_utf8(out).map_err(|_| Error::new(ErrorKind::InvalidOperation, "tojson: it is no text"))
}

/// Today, as templates ask for it.
#[expect(clippy::disallowed_methods, reason = "a prompt says which day it is, and nothing hangs on it")]
pub(super) fn strftime_now(format: &str) -> String {
    let now = std::time::SystemTime::now();
    // 2026-11-30T04:25:40Z
    let text = humantime::format_rfc3339_seconds(now).to_string();
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let month = text[5..7].parse::<usize>().ok().and_then(|month| MONTHS.get(month.saturating_sub(1))).unwrap_or(&"");
    [
        ("%Y", &text[..4]),
        ("%m", &text[5..7]),
        ("%d", &text[8..10]),
        ("%H", &text[11..13]),
        ("%M", &text[14..16]),
        ("%S", &text[17..19]),
        ("%b", month.get(..3).unwrap_or_default()),
        ("%B", month),
    ]
    .iter()
    .fold(format.to_owned(), |format, (from, to)| format.replace(from, to))
}

fn told(error: &Error) -> String {
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    let line = error.line().map(|line| format!(" (line {line} of the chat template)")).unwrap_or_default();
    format!("{}{detail}{line}", error.kind())
}
