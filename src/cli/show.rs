//! How jobs look to a person: tables, ages, a spinner where somebody waits.
//!
//! Texts from outside (reasons, names, results) may hold control characters; none reaches the terminal.

use std::io::IsTerminal as _;
use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use onejob::job::JobState;
use serde_json::Value;

use super::{Exit, Format};

/// How much of a text a table shows, in characters.
const CELL_CHARS_MAX: usize = 80;
/// How much of a result is shown, in characters.
const RESULT_CHARS_MAX: usize = 2000;

/// A table with a head.
pub(super) fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head.iter().map(|name| name.to_uppercase()));
    table
}

/// The whole table, without blanks at the ends of its lines.
pub(super) fn lines(table: &Table) -> String {
    table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// A text from outside, on one line and harmless.
pub(super) fn cell(text: &str) -> String {
    shorten(text, CELL_CHARS_MAX).replace('\n', " ")
}

fn shorten(text: &str, chars_max: usize) -> String {
    let clean = |c: char| if c.is_control() && c != '\n' { '\u{fffd}' } else { c };
    let mut short: String = text.chars().take(chars_max).map(clean).collect();
    if text.chars().nth(chars_max).is_some() {
        short.push('…');
    }
    short
}

/// A member that is text or a number, `""` if it is not there.
pub(super) fn text(value: &Value, name: &str) -> String {
    match &value[name] {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(truth) => truth.to_string(),
        Value::Null | Value::Array(_) | Value::Object(_) => String::new(),
    }
}

/// A time between two moments in Unix ms, for people.
pub(super) fn span(from_ms: u64, to_ms: u64) -> String {
    let ms = to_ms.saturating_sub(from_ms);
    let duration = if ms < 10_000 { Duration::from_millis(ms) } else { Duration::from_secs(ms / 1000) };
    humantime::format_duration(duration).to_string()
}

/// A job with its attempts.
pub(super) fn job(job: &Value) -> String {
    let mut out = String::new();
    let created = job["created_ms"].as_u64().unwrap_or_default();
    let updated = job["updated_ms"].as_u64().unwrap_or_default();
    for (name, value) in [
        ("job", text(job, "id")),
        ("route", text(job, "route")),
        ("state", text(job, "state")),
        (
            "completed by",
            match job["completed_by"].as_u64() {
                Some(0) | None => String::new(),
                Some(number) => format!("attempt {number}"),
            },
        ),
        ("took", if created == 0 { String::new() } else { span(created, updated) }),
        ("reason", cell(&text(job, "reason"))),
    ] {
        if !value.is_empty() {
            out.push_str(&format!("{name:<13} {value}\n"));
        }
    }
    if let Some(attempts) = job["attempts"].as_array().filter(|attempts| !attempts.is_empty()) {
        let mut table = table(&["attempt", "state", "provider", "reason"]);
        for attempt in attempts {
            table.add_row([
                text(attempt, "number"),
                text(attempt, "state"),
                text(attempt, "provider"),
                cell(&text(attempt, "reason")),
            ]);
        }
        out.push_str(&lines(&table));
    }
    if !job["result"].is_null() {
        let body = job["result"].get("body").unwrap_or(&job["result"]);
        let body = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
        out.push_str(&format!("{:<13} {}\n", "result", shorten(&body, RESULT_CHARS_MAX)));
    }
    out
}

/// What came of a change: its plain members, a line each.
pub(super) fn outcome(document: &Value) -> String {
    let names = document.as_object().into_iter().flat_map(|members| members.keys());
    names
        .map(|name| (name, text(document, name)))
        .filter(|(_, text)| !text.is_empty())
        .fold(String::new(), |out, (name, text)| out + &format!("{:<13} {}\n", name.replace('_', " "), cell(&text)))
}

/// How a job stands for whoever waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is under way.
    Open,
    /// Nobody knows, yet.
    Unknown,
    /// It has ended, and so does the command.
    Ended(Exit),
}

/// How a job stands; `None` for a state that this version does not know.
pub(super) fn standing(job: &Value) -> Option<Standing> {
    let state: JobState = job["state"].as_str()?.parse().ok()?;
    Some(match state {
        JobState::Pending | JobState::Running | JobState::Canceling => Standing::Open,
        JobState::Unknown => Standing::Unknown,
        JobState::Succeeded => Standing::Ended(Exit::Done),
        JobState::Failed => Standing::Ended(Exit::Failed),
        JobState::Canceled => Standing::Ended(Exit::Canceled),
        JobState::Indeterminate => Standing::Ended(Exit::Unknown),
    })
}

/// Shows on stderr that something is waited for, if a person looks.
pub(super) struct Spinner(Option<ProgressBar>);

impl Spinner {
    pub(super) fn start(format: Format, words: &str) -> Self {
        if format == Format::Json || !std::io::stderr().is_terminal() {
            return Spinner(None);
        }
        let bar = ProgressBar::new_spinner();
        bar.set_style(ProgressStyle::with_template("{spinner} {msg} {elapsed}").expect("the template is one"));
        bar.set_message(words.to_owned());
        bar.enable_steady_tick(Duration::from_millis(120));
        Spinner(Some(bar))
    }

    pub(super) fn say(&self, words: String) {
        if let Some(bar) = &self.0 {
            bar.set_message(words);
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_from_outside_cannot_script_the_terminal() {
        assert_eq!(cell("jam\u{1b}[2J\r\nnow"), "jam\u{fffd}[2J\u{fffd} now");
    }
}
