//! `onejob submit`: one intent under one key. Sent again after silence, because the same key is the same job.

use std::io::{IsTerminal as _, Read as _};
use std::path::PathBuf;

use onejob::job::Key;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::client::{Call, Client, GatewayArguments, Shape};
use super::show::Standing;
use super::wait::{self, WaitArguments};
use super::{Context, Exit, Failure, OrExit as _, say, show};

/// Largest input that is read.
const INPUT_BYTES_MAX: u64 = 512 << 20;

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The route.
    route: String,
    /// The input, as JSON. Without it and without --file: what comes on stdin.
    #[arg(conflicts_with = "file")]
    input: Option<String>,
    /// The file that holds the input.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArguments,
    /// Waits for the job; the exit code then says how it ended.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    waiting: WaitArguments,
    #[command(flatten)]
    gateway: GatewayArguments,
}

/// Nothing runs without a key.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct KeyArguments {
    /// Your name for this one intent: the same key is the same job, however often it is submitted.
    #[arg(long, value_parser = key)]
    key: Option<String>,
    /// Makes a key and says it on stderr; keep it to ask again.
    #[arg(long)]
    key_new: bool,
}

#[derive(Serialize)]
struct Body<'a> {
    route: &'a str,
    input: &'a RawValue,
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    let client = Client::new(&arguments.gateway, context)?;
    let text = read_input(arguments.input, arguments.file)?;
    // As it is written: a number too long for a double is still the same number.
    let input: &RawValue =
        serde_json::from_str(&text).map_err(|error| Failure::new(Exit::Usage, format!("the input is not JSON: {error}")))?;
    let made = arguments.key.key.is_none();
    let key = arguments.key.key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    if made {
        say(format_args!("key {key}"));
    }
    let call = Call::post("/v1/jobs", &Body { route: &arguments.route, input }).keyed(&key);
    client.insist_on_gateway().await?;
    let answer = client.send_safely(&call, "it has the same key, so it is the same job").await?;
    let replayed = answer.headers.get("idempotency-replayed").is_some_and(|value| value == "true");
    let mut job = client.document(answer, Shape::Job)?;
    if replayed {
        say(format_args!("this key was there before: job {}", show::text(&job, "id")));
    }
    if arguments.wait && show::standing(&job) == Some(Standing::Open) {
        job = wait::wait(&client, &show::text(&job, "id"), arguments.waiting, context).await?;
    }
    if made && let Value::Object(members) = &mut job {
        members.insert("idempotency_key".to_owned(), json!(key));
    }
    if arguments.wait {
        return wait::finish(&job, context);
    }
    context.print(&job, || show::job(&job));
    Ok(Exit::Done)
}

fn read_input(argument: Option<String>, file: Option<PathBuf>) -> Result<String, Failure> {
    match (argument, file) {
        (Some(text), _) if text != "-" => Ok(text),
        (_, Some(path)) => std::fs::read_to_string(&path)
            .map_err(|error| Failure::new(Exit::Usage, format!("cannot read the input {}: {error}", path.display()))),
        (_, None) => {
            let mut stdin = std::io::stdin().lock();
            if stdin.is_terminal() {
                say("reading the input from the terminal; Ctrl-D ends it");
            }
            let mut text = String::new();
            std::io::Read::take(&mut stdin, INPUT_BYTES_MAX).read_to_string(&mut text).or_exit(Exit::Usage)?;
            Ok(text)
        }
    }
}

/// As the header would be read: quoted or bare, it is the same key.
fn key(text: &str) -> Result<String, String> {
    Key::from_header(text).map(|key| key.as_str().to_owned()).map_err(|error| error.to_string())
}
