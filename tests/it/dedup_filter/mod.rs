//! `onejob dedup` as a process among others: what it lets through, what it refuses, how it waits.
//!
//! `resumes` has what becomes of it when it is killed, `real` a log of somebody's own.

mod declared;
mod real;
mod refusals;
mod resumes;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use onejob::dedup::{BatchToken, Claimed, ClickId, Committed, Dedup, FieldValue, Stream};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::cli::{Ended, ended, onejob};
use crate::support::{Redis, until};

const ROWS: usize = 10_000;
const DISTINCT: usize = 7_912;
/// Longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(120);

/// A click of a made-up log.
struct Click {
    time_ms: u64,
    id: String,
    user: String,
}

/// Clicks as people make them: most of them new, some twice within a second or two, some come back much later.
fn clicks() -> Vec<Click> {
    let mut state = 7_u64;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    };
    let (mut clicks, mut distinct, mut time_ms): (Vec<Click>, Vec<usize>, u64) = (Vec::new(), Vec::new(), 1_431_857_103_000);
    let mut repeats = ROWS - DISTINCT;
    while clicks.len() < ROWS {
        let left = ROWS - clicks.len();
        let is_repeat = repeats > 0 && !distinct.is_empty() && random(left) < repeats;
        let number = match (is_repeat, random(4)) {
            (false, _) => {
                distinct.push(distinct.len());
                distinct.len() - 1
            }
            (true, 0) => distinct[random(distinct.len())],
            (true, _) => distinct[distinct.len() - 1 - random(distinct.len().min(4))],
        };
        repeats -= usize::from(is_repeat);
        time_ms += if is_repeat { 40 + random(900) as u64 } else { random(3_000) as u64 };
        clicks.push(Click { time_ms, id: format!("{:016x}", number * 2_654_435_761), user: format!("u{}", number % 1_753) });
    }
    clicks
}

/// The log in a format, a record each; the header first.
fn records(format: &str) -> (String, Vec<(String, String)>) {
    let record = |click: Click| {
        let Click { time_ms, id, user } = click;
        let text = match format {
            "csv" => format!("{time_ms},{id},\"{user}, of\nhere\",GET\r\n"),
            "ndjson" => format!("{{\"at\": {time_ms}, \"click\": {{\"id\": \"{id}\"}}, \"user\":\"{user}\"}}\n"),
            _ => format!("{id}\n"),
        };
        (id, text)
    };
    let header = if format == "csv" { "time_ms,click_id,\"who\",method\r\n" } else { "" };
    (header.to_owned(), clicks().into_iter().map(record).collect())
}

/// What shall come out: the first of each, in order.
fn firsts(header: &str, records: &[(String, String)]) -> String {
    let mut seen = HashSet::new();
    let firsts = records.iter().filter(|(id, _)| seen.insert(id.as_str())).map(|(_, text)| text.as_str());
    std::iter::once(header).chain(firsts).collect()
}

fn whole(header: &str, records: &[(String, String)]) -> String {
    std::iter::once(header).chain(records.iter().map(|(_, text)| text.as_str())).collect()
}

/// A directory with a log in it, and how the filter is called there.
struct Place {
    directory: TempDir,
    url: String,
    /// Whether it has a copy of the stream.
    mirrored: bool,
    /// What comes out of it undisturbed.
    firsts: String,
}

impl Place {
    fn new(url: &str, format: &str) -> Self {
        let (header, records) = records(format);
        Self::of(url, &whole(&header, &records), firsts(&header, &records))
    }

    fn of(url: &str, input: &str, firsts: String) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("input"), input).unwrap();
        Place { directory, url: url.to_owned(), mirrored: false, firsts }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// The filter from the log to stdout, with more arguments.
    fn filter(&self, arguments: &[&str]) -> Command {
        let mut command = onejob();
        command.current_dir(self.directory.path()).args(["--set", &format!("redis.url={}", self.url), "dedup"]);
        command.args(["--summary", "json"]).args(self.mirrored.then_some("--mirrored")).args(arguments);
        command
    }

    /// The same from file to file, with a state.
    fn resumable(&self, arguments: &[&str]) -> Command {
        let mut command = self.filter(&["--input", "input", "--output", "output", "--state", "state"]);
        command.args(arguments);
        command
    }

    fn state(&self) -> Option<Value> {
        serde_json::from_str(&self.read("state")).ok()
    }

    #[track_caller]
    fn is_as_undisturbed(&self) {
        let output = self.read("output");
        let first_lines = |text: &str| text.lines().take(3).map(str::to_owned).collect::<Vec<_>>();
        assert!(output == self.firsts, "{} bytes, not {}: {:?}", output.len(), self.firsts.len(), first_lines(&output));
    }
}

/// What it says at its end.
fn summary(ended: &Ended) -> Value {
    let line = ended.stderr.lines().find(|line| line.starts_with('{')).unwrap_or_else(|| panic!("{}", ended.stderr));
    serde_json::from_str(line).unwrap()
}

fn kill(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.try_into().unwrap()));
    // It may have ended by itself.
    if let Some(pid) = pid {
        let _ = kill_process(pid, signal);
    }
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("it comes to an end")
}

#[tokio::test]
async fn the_first_of_each_stays_in_every_format_byte_for_byte_and_in_order() {
    let redis = Redis::start().await;
    for (format, key) in [("csv", Some("click_id")), ("ndjson", Some("/click/id")), ("lines", None)] {
        let place = Place::new(redis.url(), format);
        let mut command = place.filter(&["--format", format, "--stream", format, "--batch", "300"]);
        command.args(key.iter().flat_map(|key| ["--key", *key]));
        command.stdin(std::fs::File::open(place.path("input")).unwrap());
        let told = ended(command).await.expect(0);
        assert!(told.stdout == place.firsts, "{format}");
        let summary = summary(&told);
        assert_eq!((&summary["records"], &summary["first"]), (&ROWS.into(), &DISTINCT.into()), "{summary}");
        assert_eq!(summary["duplicates"], ROWS - DISTINCT);
        if format == "lines" {
            let [input, output] = [&place.read("input"), &told.stdout].map(|text| text.lines().collect::<HashSet<_>>().len());
            assert_eq!((input, output), (DISTINCT, DISTINCT));
        }
    }
}

/// Rows that are hard to read: a mark at the beginning, empty lines, quotes in quotes, one longer than what is read at once, no
/// line end.
#[tokio::test]
async fn rows_of_csv_come_as_they_came() {
    let redis = Redis::start().await;
    let long = format!("\"{}\",b\n", "x,\n\"\"".repeat(90_000));
    let rows = ["\u{feff}url,who\r\n", "a,1\r\n", "\"a\",2\n", "\n\r\n", "\"say \"\"hi\"\",\nyou\",3\r\n", &long, "A,4\n", "a,5"];
    let place = Place::of(redis.url(), &rows.concat(), [rows[0], rows[1], rows[4], &long, rows[6]].concat());
    let mut command = place.filter(&["--format", "csv", "--key", "url", "--input", "input"]);
    command.arg("--record-bytes-max=600000");
    let told = ended(command).await;
    // A value that makes a record the same has a limit of its own.
    assert!(told.expect(2).stderr.contains("the field \"url\" has"));
    let mut command = place.filter(&["--format", "csv", "--key", "who", "--input", "input", "--stream", "who"]);
    command.arg("--record-bytes-max=600000");
    let told = ended(command).await.expect(0);
    assert!(told.stdout == [rows[0], rows[1], rows[2], rows[4], &long, rows[6], rows[7]].concat());
    let tabs = Place::of(redis.url(), "a\tb\n1,1\t2\n1,1\t3\n", String::new());
    let told =
        ended(tabs.filter(&["--format", "csv", "--key", "a", "--input", "input", "--delimiter", "\\t", "--stream", "t"])).await;
    assert_eq!(told.expect(0).stdout, "a\tb\n1,1\t2\n");
}

/// What is bad is named with its number, its place and the limit; what stands before it is through.
#[tokio::test]
async fn a_bad_record_ends_it_or_is_skipped_and_everything_else_is_through() {
    let redis = Redis::start().await;
    let (csv, ndjson) = (&["--format", "csv", "--key", "id"][..], &["--key", "id"][..]);
    let long = format!("{{\"id\":1,\"x\":\"{}\"}}\n", "x".repeat(2_000));
    let columns = vec!["1"; 10_001].join(",");
    let cases: [(&[&str], &str, &str, &str, bool); 12] = [
        (ndjson, "{\"id\":1}\n", "{\"user\":2}\n", "record 2 at byte 9: the field \"id\" is missing", true),
        (ndjson, "{\"id\":1}\n", "{\"id\":null}\n", "record 2 at byte 9: the field \"id\" is missing", true),
        (ndjson, "{\"id\":1}\n", "{\"id\":1.5}\n", "a number that is not whole", true),
        (ndjson, "\n{\"id\":1}\n", "{\"id\":2\n", "record 2 at byte 10: it is no JSON", true),
        (ndjson, "{\"id\":1}\n", "[1]\n", "it is JSON, but no object", true),
        (ndjson, "{\"id\":1}\n", &long, "record 2 at byte 9: it has more than 1000 bytes", false),
        (csv, "id,b\n1,2\n", "1\n", "record 2 at byte 9: it has 1 columns, and the header 2", true),
        (csv, "id,b\n1,2\n", "1,2,3\n", "it has 3 columns, and the header 2", true),
        (csv, "id,b\n1,2\n", "3,\"2\n", "a quote that nothing closes", false),
        (csv, "user,b\n1,2\n", "", "the header: no column is named \"id\", of 2: [\"user\", \"b\"]", false),
        (csv, "id,id\n1,2\n", "", "the header: several columns are named \"id\"", false),
        (csv, &columns, "", "10001 columns, of 10000 at most", false),
    ];
    for (number, (arguments, good, bad, what, skips)) in cases.into_iter().enumerate() {
        let after = if bad.contains('"') && !bad.ends_with("\"2\n") || bad.starts_with('[') { "{\"id\":7}\n" } else { "7,7\n" };
        let after = if skips { after } else { "" };
        let place = Place::of(redis.url(), &[good, bad, after].concat(), String::new());
        let stream = format!("stop-{number}");
        let limit = if number == 11 { "100000" } else { "1000" };
        let common = ["--input", "input", "--record-bytes-max", limit, "--stream", &stream];
        let told = ended(place.filter(&[arguments, &common].concat())).await.expect(2);
        assert!(told.stderr.contains(what), "{what}: {}", told.stderr);
        let through = if what.starts_with("the header") || number == 11 { "" } else { good.trim_start() };
        assert_eq!(told.stdout, through, "{what}");
        if !skips {
            continue;
        }
        let stream = format!("skip-{number}");
        let skip = ["--on-error", "skip", "--rejects", "rejects", "--stream", &stream, "--output", "output", "--state", "state"];
        let told = ended(place.filter(&[arguments, &["--input", "input"], &skip].concat())).await.expect(0);
        let summary = summary(&told);
        assert_eq!((&summary["records"], &summary["rejected"]), (&3.into(), &1.into()), "{what}: {summary}");
        assert_eq!(place.read("output"), [good.trim_start(), after].concat(), "{what}");
        assert_eq!(place.read("rejects"), bad, "{what}");
    }
    let place = Place::of(redis.url(), "", String::new());
    std::fs::write(place.path("input"), b"a\n\xff\xfe\nb\n").unwrap();
    let told = ended(place.filter(&["--lines", "--input", "input"])).await.expect(2);
    assert!(told.stderr.contains("record 2 at byte 2: it is not UTF-8"), "{}", told.stderr);
    assert_eq!(told.stdout, "a\n");
}

#[tokio::test]
async fn arguments_that_do_not_belong_together_are_refused() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "a\n", String::new());
    std::fs::write(place.path("there"), "something\n").unwrap();
    for (arguments, what) in [
        (&["--format", "ndjson"][..], "--key"),
        (&["--key", "a", "--format", "lines"], "no --key"),
        (&["--lines", "--state", "s"], "--output"),
        (&["--lines", "--rejects", "r"], "--on-error skip"),
        (&["--lines", "--input", "input", "--output", "input"], "different files"),
        (&["--lines", "--input", "input", "--output", "there"], "there: it has 10 bytes already"),
        (&["--lines", "--input", "absent"], "absent"),
        (&["--lines", "--window", "1ms"], "window is a second"),
        (&["--lines", "--delimiter", "::"], "not one ASCII"),
        (&["--lines", "--batch", "10001"], "10001"),
        (&["--lines", "--in-flight", "65"], "65"),
        (&["--lines", "--record-bytes-max", "67108865"], "67108865"),
        (&["--lines", "--json"], "--summary json"),
    ] {
        let told = ended(place.filter(arguments)).await.expect(2);
        assert!(told.stderr.contains(what), "{what}: {}", told.stderr);
    }
    assert_eq!(place.read("there"), "something\n");
}

/// What is there is handed on before the batch is full; a signal ends it with everything written that was asked about.
#[tokio::test]
async fn a_slow_pipe_is_not_waited_for_and_a_signal_ends_it_in_order() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "", String::new());
    let mut command = place.filter(&["--lines"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap()).lines();
    for line in ["a\nb\n", "a\nc\n", "c\nd\n"] {
        stdin.write_all(line.as_bytes()).await.unwrap();
        let last = line.lines().last().unwrap();
        while within(stdout.next_line()).await.unwrap().unwrap() != last {}
    }
    kill(&child, Signal::TERM);
    let status = within(child.wait()).await.unwrap();
    assert_eq!(status.code(), Some(130));
    assert_eq!(stdout.next_line().await.unwrap(), None);
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).await.unwrap();
    assert!(stderr.contains("6 records are settled"), "{stderr}");
    drop(stdin);
}

/// As `head` does it.
#[tokio::test]
async fn a_closed_stdout_ends_it_quietly() {
    let redis = Redis::start().await;
    let place = Place::new(redis.url(), "lines");
    let mut command = place.filter(&["--lines", "--input", "input", "--batch", "500", "--in-flight", "2"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    within(stdout.read_line(&mut line)).await.unwrap();
    drop(stdout);
    let output = within(child.wait_with_output()).await.unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert!(place.firsts.starts_with(&line) && !line.is_empty());
}

fn id(stream: &Stream, line: &str) -> ClickId {
    stream.id(|_| Some(FieldValue::Text(line))).unwrap()
}

/// Of what somebody else has claimed, what is committed is a duplicate then and what is given back is not; in order, and nothing
/// before.
#[tokio::test]
async fn what_somebody_else_has_claimed_is_waited_for() {
    let redis = Redis::start().await;
    let dedup = Dedup::new(&redis.store().await, Stream::new("clicks", &["line"])).unwrap();
    let ids = ["c", "e"].map(|line| id(dedup.stream(), line));
    let token = BatchToken::random();
    assert_eq!(dedup.claim(&ids, token).await.unwrap(), [Claimed::First; 2]);
    let place = Place::of(redis.url(), "a\nb\nc\nd\ne\nf\ng\n", "a\nb\nd\ne\nf\ng\n".to_owned());
    // Claims that nobody gives back outlive this test.
    let mut command = place.resumable(&["--lines", "--batch", "4", "--lease", "1h"]);
    command.stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    until("what stands before it is through", async || place.read("output") == "a\nb\n").await;
    until("the state says so", async || place.state().is_some_and(|state| state["counts"]["records"] == 2)).await;
    // It waits with empty hands: what stands behind is anybody's, in the same batch and in another one.
    for line in ["d", "g"] {
        until(&format!("{line} is given back"), async || {
            dedup.claim(&[id(dedup.stream(), line)], BatchToken::random()).await.unwrap() == [Claimed::First]
        })
        .await;
    }
    assert_eq!(place.read("output"), "a\nb\n");
    assert_eq!(dedup.commit(&ids[..1], token).await.unwrap(), [Committed::Committed]);
    dedup.release(&ids[1..], token).await.unwrap();
    // Nobody commits "d" and "g": those claims lapse, or are given back here.
    redis.command::<u64>(&["DEL", "oj:dedup:{clicks/00}:c", "oj:dedup:{clicks/00}:l"]).await;
    let output = within(child.wait_with_output()).await.unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    place.is_as_undisturbed();
}

/// A record that is in every batch under way is claimed with the first of them. The others would find it claimed, give back what
/// they hold and ask again.
#[tokio::test]
async fn what_is_under_way_already_is_not_asked_about_again() {
    let redis = Redis::start().await;
    let lines: String = (0..50).map(|batch| format!("same\n{batch}-a\n{batch}-b\n")).collect();
    let firsts = format!("same\n{}", lines.replace("same\n", ""));
    let place = Place::of(redis.url(), &lines, firsts);
    let told = ended(place.resumable(&["--lines", "--batch", "3", "--in-flight", "8", "--lease", "1h"])).await.expect(0);
    place.is_as_undisturbed();
    let counts = summary(&told);
    assert_eq!((&counts["first"], &counts["duplicates"]), (&101.into(), &49.into()), "{counts}");
    let calls = redis.keys().await.into_iter().filter(|key| key.contains(":v:")).count();
    assert_eq!(calls, 100, "a claim and a commit for each batch, whose verdicts are kept");
}

/// Ten records of a megabyte are two batches, though two thousand fit one by their number.
#[tokio::test]
async fn a_batch_of_long_records_has_fewer() {
    let redis = Redis::start().await;
    let records: String = (0..10).map(|id| format!("{{\"id\":{id},\"x\":\"{}\"}}\n", "x".repeat(1_000_000))).collect();
    let place = Place::of(redis.url(), &records, records.clone());
    let told = ended(place.filter(&["--key", "id", "--input", "input"])).await.expect(0);
    assert!(told.stdout == records);
    let mut batches = Vec::new();
    for key in redis.keys().await.into_iter().filter(|key| key.contains(":v:")) {
        batches.push(redis.command::<u64>(&["STRLEN", &key]).await - 16);
    }
    assert_eq!(batches, [5, 5], "as many as reach four mebibytes");
}

fn lines_of(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}
