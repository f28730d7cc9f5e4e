//! What is left out of the cluster suite is listed in docs/VERIFICATION.md, and nothing else.

use std::collections::BTreeSet;

use super::{files, read, root};

/// How a test says that it means nothing in a cluster.
const SAYS: &str = "    if standalone_only(";

/// The tests that say so, as nextest names them.
fn left_out() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (path, text) in files("tests/it", &[".rs"]) {
        let module = path.trim_start_matches("tests/it/").trim_end_matches(".rs").trim_end_matches("/mod").replace('/', "::");
        let mut test = None;
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("async fn ") {
                test = name.split('(').next();
            } else if line.starts_with(SAYS) {
                names.insert(format!("{module}::{}", test.unwrap_or_else(|| panic!("{path}: {line} stands in no test"))));
            }
        }
    }
    names
}

#[test]
fn what_is_left_out_of_the_cluster_suite_is_listed() {
    let document = read(&root().join("docs/VERIFICATION.md"));
    let chapter = document.split_once("\n## In a cluster\n").expect("the chapter").1.split("\n## ").next().unwrap_or_default();
    let listed: BTreeSet<String> =
        chapter.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned())).collect();
    let left_out = left_out();
    assert!(!left_out.is_empty());
    assert_eq!(listed, left_out, "the chapter \"In a cluster\" and the tests");
}
