//! Who may know what: the borders between the modules of `src`, and the names of the metrics.

use super::{files, none, read, root};

/// Where a name of somebody else's may stand: in files whose path begins with one of these, and nowhere else.
const ONLY_IN: [(&str, &[&str], &str); 6] = [
    ("redis::", &["src/store.rs", "src/store/"], "only the store speaks to Redis"),
    ("deadpool_redis::", &["src/store.rs", "src/store/"], "only the store speaks to Redis"),
    ("std::env", &["src/config.rs", "src/config/"], "only the configuration reads the environment, besides clap"),
    ("current_exe", &["src/cli/demo.rs"], "only the demo says where its own program is"),
    ("clap::", &["src/cli.rs", "src/cli/", "src/main.rs"], "only the command line reads arguments"),
    ("metrics!", &["src/metrics.rs"], "a metric is named in one place"),
];
/// The macros of the `metrics` crate.
const METRICS_MACROS: [&str; 6] =
    ["counter!", "gauge!", "histogram!", "describe_counter!", "describe_gauge!", "describe_histogram!"];
/// What must not be known where: paths, then names.
const NEVER_IN: [(&[&str], &[&str], &str); 2] = [
    (
        &["src/job.rs", "src/attempt.rs", "src/fingerprint.rs", "src/policy.rs", "src/validate.rs", "src/validate/"],
        &["tokio::", "redis::", "SystemTime", "Instant", "std::env"],
        "plain data: no clock, no I/O",
    ),
    (&["src/provider.rs", "src/provider/"], &["crate::store", "crate::runtime"], "a provider knows its calls, not the jobs"),
];

/// The code of a file without its comments.
fn code(text: &str) -> String {
    // The path of our own program is nothing that the environment says; it has a line of its own in the table.
    let text = text.replace("std::env::current_exe", "current_exe");
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Whether a name stands in some code, and not only as the end of a longer one.
fn names(code: &str, name: &str) -> bool {
    code.match_indices(name).any(|(at, _)| !code[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_'))
}

fn under(path: &str, places: &[&str]) -> bool {
    places.iter().any(|place| path.starts_with(place))
}

#[test]
fn everything_outside_is_spoken_to_in_one_place() {
    let mut problems = Vec::new();
    let mut met = 0;
    for (path, text) in files("src", &[".rs"]) {
        let code = code(&text);
        for (name, places, why) in ONLY_IN {
            let found = match name {
                "metrics!" => METRICS_MACROS.iter().any(|name| names(&code, name)),
                name => names(&code, name),
            };
            if found && under(&path, places) {
                met += 1;
            } else if found {
                problems.push(format!("{path}: {name}: {why}"));
            }
        }
    }
    assert!(met >= ONLY_IN.len(), "the names are not found even where they must be");
    none(&problems);
}

#[test]
fn nobody_knows_what_is_not_theirs() {
    let sources = files("src", &[".rs"]);
    let mut problems = Vec::new();
    for (places, unwanted, why) in NEVER_IN {
        for place in places {
            assert!(sources.iter().any(|(path, _)| path.starts_with(place)), "there is no {place}");
        }
        for (path, text) in sources.iter().filter(|(path, _)| under(path, places)) {
            let code = code(text);
            let found = unwanted.iter().filter(|name| names(&code, name));
            problems.extend(found.map(|name| format!("{path}: {name}: {why}")));
        }
    }
    none(&problems);
}

#[test]
fn every_metric_is_in_the_list_and_in_the_handbook() {
    let source = read(&root().join("src/metrics.rs"));
    let constants: Vec<_> = source
        .lines()
        .filter_map(|line| line.strip_prefix("pub const ")?.split_once(": &str = \"onejob_")?.1.split('"').next())
        .map(|name| format!("onejob_{name}"))
        .collect();
    let all: Vec<_> = onejob::metrics::ALL.iter().map(|metric| metric.name.to_owned()).collect();
    assert_eq!(constants, all, "the constants of src/metrics.rs and its ALL, in this order");
    let handbook = root().join("docs/OPERATIONS.md");
    let handbook = read(&handbook);
    none(&all.into_iter().filter(|name| !handbook.contains(&format!("`{name}`"))).collect::<Vec<_>>());
}
