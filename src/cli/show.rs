//! How jobs look to a person: tables, ages, a spinner where somebody waits.
//!
//! Texts from outside (reasons, names, results) may hold control characters; none reaches the terminal.

use std::io::IsTerminal as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use onejob::job::{JobId, JobState};
use serde_json::Value;

use super::{Exit, Format};

/// How wide a text is in a table, in characters: a longer one goes on in the next line.
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

/// A text from outside in a table: whole, for its end may be what matters, and harmless. A long one is wrapped.
pub(super) fn cell(text: &str) -> String {
    let (mut out, mut width) = (String::new(), 0);
    for (place, word) in line(text).split(' ').enumerate() {
        if place > 0 && width > 0 && width + 1 + word.chars().count() > CELL_CHARS_MAX {
            out.push('\n');
            width = 0;
        } else if place > 0 {
            out.push(' ');
            width += 1;
        }
        for c in word.chars() {
            if width == CELL_CHARS_MAX {
                out.push('\n');
                width = 0;
            }
            out.push(c);
            width += 1;
        }
    }
    out
}

/// A text from outside, whole, on one line and harmless.
pub(super) fn line(text: &str) -> String {
    harmless(text).replace('\n', " ")
}

/// A text from outside, whole, on one line, and nothing of it unseen: what would begin a line, steer the terminal, or stand elsewhere
/// than it is written is escaped.
pub(super) fn escaped(text: &str) -> String {
    let escape = |c: char| if c.is_control() || is_unseen(c) { c.escape_default().collect() } else { String::from(c) };
    text.chars().map(escape).collect()
}

/// Whether a character is not seen itself, and changes how others look: their order, their line, their place.
fn is_unseen(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// A text from outside, whole and harmless.
pub(super) fn harmless(text: &str) -> String {
    shorten(text, usize::MAX)
}

fn shorten(text: &str, chars_max: usize) -> String {
    let clean = |c: char| {
        if (c.is_control() && c != '\n') || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}') {
            '\u{fffd}'
        } else {
            c
        }
    };
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

/// A moment in Unix ms as UTC (RFC 3339), `""` if there is none.
fn moment(value: &Value, name: &str) -> String {
    let time = value[name].as_u64().and_then(|ms| UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
    // Later than the year 9999 is no time that anybody reads.
    let is_shown = |time: &SystemTime| time.duration_since(UNIX_EPOCH).is_ok_and(|since| since.as_secs() < 253_402_300_800);
    time.filter(is_shown).map_or_else(String::new, |time| humantime::format_rfc3339_millis(time).to_string())
}

/// How many of something, in words.
pub(super) fn count(number: usize, one: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {one}s") }
}

/// A column: its name, and how it is read from a row's document.
type Column = (&'static str, fn(&Value) -> String);

/// A table of texts, without the columns that nobody has anything in.
fn rows_of(values: &[Value], columns: &[Column]) -> String {
    let filled = |read: &fn(&Value) -> String| values.iter().any(|value| !read(value).is_empty());
    let columns: Vec<_> = columns.iter().filter(|(_, read)| filled(read)).collect();
    let mut table = table(&columns.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    for value in values {
        table.add_row(columns.iter().map(|(_, read)| cell(&read(value))));
    }
    lines(&table)
}

/// A job with its attempts, and what happened to it off the happy path: who decided, and why.
pub(super) fn job(job: &Value) -> String {
    let array = |name: &str| job[name].as_array().map(Vec::as_slice).unwrap_or_default();
    let (attempts, events) = (array("attempts"), array("events"));
    let created_ms = job["created_ms"].as_u64().unwrap_or_default();
    let (mut took, mut unknown_for) = (String::new(), String::new());
    if let Some(ended_ms) = job["ended_ms"].as_u64() {
        took = span(created_ms, ended_ms);
    } else if let Some(since_ms) = unknown(job).and_then(|attempt| attempt["ended_ms"].as_u64()) {
        unknown_for = span(since_ms, now_ms());
    }
    let mut out = String::new();
    for (name, value) in [
        ("job", text(job, "id")),
        ("route", text(job, "route")),
        ("state", text(job, "state")),
        ("owner", text(job, "owner")),
        ("created", moment(job, "created_ms")),
        ("started", attempts.first().map_or_else(String::new, |attempt| moment(attempt, "started_ms"))),
        ("ended", moment(job, "ended_ms")),
        ("took", took),
        ("unknown for", unknown_for),
        ("completed by", job["completed_by"].as_u64().map_or_else(String::new, |number| format!("attempt {number}"))),
        ("canceled by", text(job, "canceled_by")),
        ("reason", text(job, "reason")),
    ] {
        if !value.is_empty() {
            out.push_str(&format!("{name:<13} {}\n", line(&value)));
        }
    }
    if !attempts.is_empty() {
        out.push('\n');
        out.push_str(&rows_of(
            attempts,
            &[
                ("attempt", |attempt| text(attempt, "number")),
                ("state", |attempt| text(attempt, "state")),
                ("provider", |attempt| text(attempt, "provider")),
                ("model", |attempt| text(attempt, "model")),
                ("gateway", |attempt| text(attempt, "gateway")),
                ("started", |attempt| moment(attempt, "started_ms")),
                ("ended", |attempt| moment(attempt, "ended_ms")),
                ("reason", |attempt| text(attempt, "reason")),
            ],
        ));
    }
    if !events.is_empty() {
        out.push('\n');
        out.push_str(&rows_of(
            events,
            &[
                ("time", |event| moment(event, "at_ms")),
                ("event", |event| text(event, "event")),
                ("attempt", |event| text(event, "attempt")),
                ("actor", |event| text(event, "actor")),
                ("detail", |event| text(event, "detail")),
            ],
        ));
    }
    if !job["result"].is_null() {
        let body = job["result"].get("body").unwrap_or(&job["result"]);
        let body = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
        out.push_str(&format!(
            "\n{:<13} {}\n",
            "result",
            if body.is_empty() { "none".to_owned() } else { shorten(&body, RESULT_CHARS_MAX) }
        ));
    }
    out
}

/// The attempt that nobody knows of whether it happened, if there is one.
pub(super) fn unknown(job: &Value) -> Option<&Value> {
    job["attempts"].as_array()?.iter().find(|attempt| attempt["state"] == "unknown")
}

/// This machine's time, in Unix ms: only for what a person is told.
#[expect(clippy::disallowed_methods, reason = "for people: how old a job is, and how far the clocks are apart")]
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// What came of a change to a job: its plain members, a line each, labelled as everywhere.
pub(super) fn outcome(job: JobId, document: &Value) -> String {
    let names = document.as_object().into_iter().flat_map(|members| members.keys());
    let label = |name: &str| match name {
        "status" if text(document, "status").parse::<JobState>().is_ok() => "state".to_owned(),
        "status" => "outcome".to_owned(),
        // In a decision's answer these are how the two stand.
        "job" => "state".to_owned(),
        "attempt" => "attempt is".to_owned(),
        name => name.replace('_', " "),
    };
    names
        .filter(|name| *name != "id")
        .map(|name| (label(name), text(document, name)))
        .filter(|(_, text)| !text.is_empty())
        .fold(format!("{:<13} {job}\n", "job"), |out, (label, text)| out + &format!("{label:<13} {}\n", line(&text)))
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
        // Only somebody's word ends it: to wait for that is to wait for good.
        JobState::Canceling if unknown(job).is_some() && !is_running(job) => Standing::Unknown,
        JobState::Pending | JobState::Running | JobState::Canceling => Standing::Open,
        JobState::Unknown => Standing::Unknown,
        JobState::Succeeded => Standing::Ended(Exit::Done),
        JobState::Failed => Standing::Ended(Exit::Failed),
        JobState::Canceled => Standing::Ended(Exit::Canceled),
        JobState::Indeterminate => Standing::Ended(Exit::Unknown),
    })
}

/// Whether an attempt may still end by itself.
fn is_running(job: &Value) -> bool {
    let mut attempts = job["attempts"].as_array().into_iter().flatten();
    attempts.any(|attempt| attempt["state"] == "starting" || attempt["state"] == "running")
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
    fn a_canceling_job_whose_attempt_is_unknown_waits_for_somebody() {
        let job = |attempts: &[&str]| {
            let attempts: Vec<Value> = attempts.iter().map(|state| serde_json::json!({ "state": state })).collect();
            serde_json::json!({ "state": "canceling", "attempts": attempts })
        };
        assert_eq!(standing(&job(&["unknown"])), Some(Standing::Unknown));
        assert_eq!(standing(&job(&["unknown", "running"])), Some(Standing::Open));
        assert_eq!(standing(&job(&["running"])), Some(Standing::Open));
    }

    #[test]
    fn durations_and_moments_are_for_people() {
        assert_eq!(span(0, 126_854), "2m 6s");
        assert_eq!(moment(&serde_json::json!({ "at_ms": 1_000 }), "at_ms"), "1970-01-01T00:00:01.000Z");
        assert_eq!(moment(&serde_json::json!({ "at_ms": u64::MAX }), "at_ms"), "");
        assert_eq!((count(1, "route"), count(2, "route")), ("1 route".to_owned(), "2 routes".to_owned()));
    }

    /// What it ends with is why nobody took over.
    #[test]
    fn a_reason_is_shown_to_its_end_wherever_it_is_shown() {
        let reason = "not_sent: connect: tcp connect error: Connection refused (os error 111); failover_denied: second: its \
                      certificate is suspended: 3 of the last 20 answers were invalid";
        let (attempts, events) =
            (serde_json::json!([{ "number": 1, "reason": reason }]), serde_json::json!([{ "event": "note", "detail": reason }]));
        let shown = job(&serde_json::json!({ "id": "1", "reason": reason, "attempts": attempts, "events": events }));
        let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words.matches(reason).count(), 3, "{shown}");
        assert!(shown.lines().skip(3).all(|line| line.chars().count() < CELL_CHARS_MAX + 30), "{shown}");
        let long = "x".repeat(2 * CELL_CHARS_MAX + 1);
        let lines: Vec<usize> = cell(&format!("a {long} b")).lines().map(str::len).collect();
        assert_eq!(lines, [1, CELL_CHARS_MAX, CELL_CHARS_MAX, 3]);
    }

    #[test]
    fn a_text_from_outside_cannot_script_the_terminal() {
        assert_eq!(cell("jam\u{1b}[2J\r\nnow"), "jam\u{fffd}[2J\u{fffd} now");
        assert_eq!(line("a\u{202e}b"), "a\u{fffd}b");
        assert_eq!(escaped("é \"a\"\ncertificate\u{1b}[2J\u{202e}\u{2028}"), "é \"a\"\\ncertificate\\u{1b}[2J\\u{202e}\\u{2028}");
    }
}
