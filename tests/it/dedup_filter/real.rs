//! A log of somebody's own: `make real-clicks CLICKS=FILE`.

use std::process::Stdio;

use rustix::process::Signal;

use super::resumes::killed_until_complete;
use super::{Place, summary};
use crate::cli::ended;
use crate::support::Redis;

/// The columns that the log has; the second one makes a click the same.
const HEADER: &str = "time_ms,click_id,visitor,method";

#[expect(clippy::disallowed_methods, reason = "which log is read is said from outside")]
fn said(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[tokio::test]
#[ignore = "needs a log: make real-clicks CLICKS=FILE"]
async fn a_real_log_is_filtered_as_sort_does_it() {
    let path = said("CLICKS").expect("CLICKS names a file");
    let log = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let (header, rows) = log.split_once('\n').expect("a header");
    assert_eq!(header.trim_end(), HEADER);
    // What sort and awk make of it: neither knows quotes, and the log has none.
    let script = r#"awk -F, 'NR == 1 || !seen[$2]++' "$0""#;
    let firsts = std::process::Command::new("sh").args(["-c", script, &path]).output().unwrap();
    let sorted =
        std::process::Command::new("sh").args(["-c", r#"tail -n +2 "$0" | cut -d, -f2 | sort -u"#, &path]).output().unwrap();
    let firsts = String::from_utf8(firsts.stdout).unwrap();
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), &log, firsts);
    let arguments = ["--format", "csv", "--key", "click_id"];
    let mut command = place.filter(&arguments);
    command.args(["--stream", "undisturbed", "--input", "input"]).stdout(Stdio::piped());
    let told = ended(command).await.expect(0);
    assert!(told.stdout == place.firsts, "the first of each, byte for byte and in order");
    let mut ids: Vec<&str> = told.stdout.lines().skip(1).filter_map(|row| row.split(',').nth(1)).collect();
    ids.sort_unstable();
    assert!(ids.join("\n") + "\n" == String::from_utf8(sorted.stdout).unwrap(), "the same set as sort -u");
    let counts = summary(&told);
    assert_eq!(counts["records"], rows.lines().count());
    println!("undisturbed: {counts}");
    let batches = [&arguments[..], &["--batch", "200", "--in-flight", "3", "--lease", "5s"]].concat();
    let kills = killed_until_complete(&place, &batches, Signal::KILL).await;
    place.is_as_undisturbed();
    let counts = summary(&ended(place.resumable(&batches)).await.expect(0));
    println!("killed {kills} times: {counts}");
}
