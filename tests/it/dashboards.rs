//! The board and the alerts: each query names what is there, each alert has a test of its own and a way out, and all of it has data.
//!
//! Here the files are read as text, and `promtool` is asked about them; `live` puts a real gateway and a real Prometheus behind
//! them. Whether Grafana draws the board is not tried: no Grafana is installed.

mod live;
mod prometheus;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use onejob::metrics::{ALL, Kind, Metric, Values};
use serde_json::Value;

use prometheus::promtool;

/// What a query may group by though no metric of ours has it: where it was scraped, and a histogram's bound.
const OTHER_LABELS: [&str; 3] = ["job", "instance", "le"];
/// How a histogram's series end.
const HISTOGRAM_ENDINGS: [&str; 3] = ["_bucket", "_sum", "_count"];

fn file(path: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn board() -> Value {
    serde_json::from_str(&file("dashboards/onejob.json")).unwrap()
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("{name} is missing in {value}"))
}

/// A panel's title and one of its queries.
fn queries(board: &Value) -> Vec<(&str, &str)> {
    let mut queries = Vec::new();
    for panel in board["panels"].as_array().unwrap() {
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{panel}");
        queries.extend(targets.iter().map(|target| (text(panel, "title"), text(target, "expr"))));
    }
    queries
}

/// The alerts as the file has them: name, and the lines up to the next.
fn alerts() -> BTreeMap<String, String> {
    let rules = file("dashboards/alerts.yml");
    let lines = rules.lines().filter(|line| !line.trim_start().starts_with('#'));
    let mut alerts = BTreeMap::<String, String>::new();
    let mut current = None;
    for line in lines {
        if let Some(name) = line.trim().strip_prefix("- alert: ") {
            let before = alerts.insert(name.to_owned(), String::new());
            assert_eq!(before, None, "{name} is there twice");
            current = Some(name.to_owned());
        } else if let Some(name) = &current {
            let rule = alerts.get_mut(name).unwrap();
            rule.push_str(line);
            rule.push('\n');
        }
    }
    assert!(!alerts.is_empty());
    alerts
}

/// The anchors of the handbook's headings, as forges make them.
fn anchors() -> BTreeSet<String> {
    let handbook = file("docs/OPERATIONS.md");
    let headings = handbook.lines().filter_map(|line| line.strip_prefix('#')?.trim_start_matches('#').strip_prefix(' '));
    let anchor = |heading: &str| {
        let kept =
            heading.to_lowercase().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_')).collect::<String>();
        kept.replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// The metric behind a series' name, with what its kind adds to it.
fn metric_of(series: &str) -> Option<Metric> {
    ALL.into_iter().find(|metric| match metric.kind {
        Kind::Counter => metric.name == series && series.ends_with("_total"),
        Kind::Gauge => metric.name == series && !series.ends_with("_total"),
        Kind::Histogram => series.strip_prefix(metric.name).is_some_and(|ending| HISTOGRAM_ENDINGS.contains(&ending)),
    })
}

/// What is wrong with a query: metrics, labels and words that are not there, a counter without a rate, a gauge with one.
fn problems_of(query: &str, met: &mut BTreeSet<&'static str>) -> Vec<String> {
    let mut problems = Vec::new();
    let mut labels: BTreeSet<&str> = OTHER_LABELS.into();
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut places: Vec<usize> = query.match_indices("onejob_").map(|(place, _)| place).collect();
    places.retain(|place| !query[..*place].ends_with(is_of_name));
    for place in places {
        let series = query[place..].split(|c| !is_of_name(c)).next().unwrap();
        let Some(metric) = metric_of(series) else {
            problems.push(format!("{series} is not there"));
            continue;
        };
        met.insert(metric.name);
        let own: BTreeMap<&str, Values> = metric.labels.iter().copied().collect();
        labels.extend(own.keys());
        let function = query[..place].trim_end_matches('(').rsplit(|c| !is_of_name(c)).next().unwrap();
        // The last: whether it counted anything before the first scrape.
        let of_a_counter = matches!(function, "rate" | "increase" | "max_over_time");
        if of_a_counter == (metric.kind == Kind::Gauge) {
            problems.push(format!("{function}({series}) of a {:?}", metric.kind));
        }
        let Some(selector) = query[place + series.len()..].strip_prefix('{') else { continue };
        for matcher in selector.split('}').next().unwrap().split(", ") {
            let (label, word) = matcher.split_once('=').unwrap_or((matcher, ""));
            let words = word.trim_start_matches('~').trim_matches('"');
            match own.get(label) {
                Some(Values::Words(known)) => {
                    let strange = words.split('|').filter(|word| !known.contains(word));
                    problems.extend(strange.map(|word| format!("{series} has no {label}={word:?}")));
                }
                Some(Values::Providers | Values::Routes | Values::Streams) => {}
                None if matches!(label, "job" | "instance") => {}
                None => problems.push(format!("{series} has no label {label}")),
            }
        }
    }
    for grouping in query.split("by (").skip(1) {
        let strange = grouping.split(')').next().unwrap().split(", ").filter(|label| !labels.contains(label));
        problems.extend(strange.map(|label| format!("no metric in it has the label {label}")));
    }
    problems
}

#[test]
fn a_query_that_names_what_is_not_there_is_found() {
    let problems = |query| problems_of(query, &mut BTreeSet::new());
    assert_eq!(problems(r#"sum by (job, result) (rate(onejob_submits_total{result=~"created|gone", job="x"}[5m]))"#), [""; 0]);
    assert_eq!(problems("rate(onejob_submits[5m])"), ["onejob_submits is not there"]);
    assert_eq!(problems("rate(onejob_overhead_seconds[5m])"), ["onejob_overhead_seconds is not there"]);
    assert_eq!(problems("rate(onejob_waiters[5m])"), ["rate(onejob_waiters) of a Gauge"]);
    assert_eq!(problems("onejob_fenced_total > 0"), ["(onejob_fenced_total) of a Counter"]);
    assert_eq!(problems(r#"rate(onejob_fenced_total{le="1"}[5m])"#), ["onejob_fenced_total has no label le"]);
    assert_eq!(problems(r#"onejob_jobs_open{state="done"}"#), [r#"onejob_jobs_open has no state="done""#]);
    assert_eq!(problems(r#"onejob_waiters{route="x"}"#), ["onejob_waiters has no label route"]);
    assert_eq!(problems("max by (owner) (onejob_waiters)"), ["no metric in it has the label owner"]);
}

#[test]
fn board_and_alerts_name_only_what_is_there_and_the_board_shows_all_of_it() {
    let (mut problems, mut shown) = (Vec::new(), BTreeSet::new());
    let board = board();
    for (panel, query) in queries(&board) {
        problems.extend(problems_of(query, &mut shown).into_iter().map(|problem| format!("panel {panel:?}: {problem}")));
    }
    for variable in board["templating"]["list"].as_array().unwrap() {
        if let Some(query) = variable["definition"].as_str() {
            problems.extend(problems_of(query, &mut BTreeSet::new()));
        }
    }
    for (alert, rule) in alerts() {
        let queries = rule.split("annotations:").next().unwrap();
        let found = problems_of(queries, &mut BTreeSet::new());
        problems.extend(found.into_iter().map(|problem| format!("alert {alert}: {problem}")));
    }
    let hidden = ALL.iter().filter(|metric| !shown.contains(metric.name));
    problems.extend(hidden.map(|metric| format!("no panel shows {}", metric.name)));
    assert!(problems.is_empty(), "{problems:#?}");
}

#[test]
fn every_panel_says_what_it_means_and_leads_to_what_to_do() {
    let (board, anchors) = (board(), anchors());
    let (mut ids, mut titles) = (BTreeSet::new(), BTreeSet::new());
    for panel in board["panels"].as_array().unwrap() {
        let (title, description) = (text(panel, "title"), text(panel, "description"));
        assert!(ids.insert(panel["id"].as_u64().unwrap()) && titles.insert(title), "{title} is there twice");
        assert_eq!(text(&panel["datasource"], "uid"), "${datasource}", "{title}");
        let url = text(&panel["links"][0], "url");
        assert!(description.ends_with(&format!("[What to do]({url})")), "{title}");
        let anchor = url.strip_prefix("${handbook}#").unwrap();
        assert!(anchors.contains(anchor), "{title}: docs/OPERATIONS.md has no heading for {anchor}");
    }
    assert_eq!(text(&board, "uid"), "onejob");
}

#[test]
fn every_alert_says_how_bad_it_is_and_has_a_paragraph_and_two_tests() {
    let (alerts, anchors, tests) = (alerts(), anchors(), file("dashboards/alerts_test.yml"));
    let (mut fires, mut silent) = (BTreeSet::new(), BTreeSet::new());
    for test in tests.split("\n  - name: ").skip(1) {
        let alert = test.split("alertname: ").nth(1).unwrap().split([',', '\n']).next().unwrap();
        let expected = test.split("exp_alerts:").nth(1).unwrap();
        let set = if expected.trim_start().starts_with("[]") { &mut silent } else { &mut fires };
        set.insert(alert.to_owned());
    }
    let names: BTreeSet<String> = alerts.keys().cloned().collect();
    assert_eq!(fires, names, "each alert has a test in which it fires");
    assert_eq!(silent, names, "each alert has a test in which it is silent");
    let mut runbooks = BTreeSet::new();
    for (alert, rule) in &alerts {
        assert!(["critical", "warning"].iter().any(|word| rule.contains(&format!("severity: {word} }}"))), "{alert}");
        for annotation in ["summary: ", "description: "] {
            assert!(rule.contains(annotation), "{alert} has no {annotation}");
        }
        let runbook = rule.split("runbook: docs/OPERATIONS.md#").nth(1).unwrap_or_else(|| panic!("{alert} has no runbook"));
        let anchor = runbook.lines().next().unwrap();
        assert!(anchors.contains(anchor), "{alert}: docs/OPERATIONS.md has no heading for {anchor}");
        assert!(runbooks.insert(anchor.to_owned()), "{alert} shares the paragraph {anchor}");
    }
}

#[tokio::test]
async fn prometheus_accepts_the_rules_and_they_pass_their_tests() {
    let rules = promtool(&["check", "rules", "dashboards/alerts.yml"], "").await;
    assert!(rules.contains(&format!("SUCCESS: {} rules found", alerts().len())), "{rules}");
    promtool(&["test", "rules", "dashboards/alerts_test.yml"], "").await;
}
