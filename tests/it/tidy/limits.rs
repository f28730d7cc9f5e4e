//! The table of limits in the handbook: what it names exists, in the code and among the tests.

use std::collections::BTreeSet;

use super::{files, none, read, root};

const SECTION: &str = "\n## Limits\n";

/// The rows of the table, each as its cells.
fn rows() -> Vec<Vec<String>> {
    let handbook = read(&root().join("docs/OPERATIONS.md"));
    let (_, after) = handbook.split_once(SECTION).expect("docs/OPERATIONS.md has a section \"Limits\"");
    let section = after.split("\n## ").next().unwrap_or(after);
    let lines = section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| what | "));
    lines.map(|line| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// What stands between backticks.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

fn code(under: &str, ending: &str) -> String {
    files(under, &[ending]).into_iter().map(|(_, text)| text).collect()
}

#[test]
fn every_limit_of_the_handbook_is_in_the_code() {
    let (rust, lua) = (code("src", ".rs"), code("lua", ".lua"));
    let config = read(&root().join("src/config.rs"));
    let mut problems = Vec::new();
    let mut met = 0;
    for row in rows() {
        let [what, limit, ..] = &row[..] else { panic!("{row:?} has no limit") };
        for name in quoted(limit) {
            met += 1;
            let exists = match name.rsplit_once('.') {
                Some((_, key)) => config.contains(&format!("pub {key}: ")),
                None => rust.contains(&format!("const {name}: ")) || lua.contains(&format!("local {name} = ")),
            };
            if !exists {
                problems.push(format!("{what}: {name} is neither a constant nor a key of the configuration"));
            }
        }
        if quoted(limit).is_empty() {
            problems.push(format!("{what}: no limit is named"));
        }
    }
    assert!(met > 60, "{met} limits");
    none(&problems);
}

#[test]
fn every_limit_of_the_handbook_has_its_test() {
    let code = code("src", ".rs") + &code("tests", ".rs");
    let tests: BTreeSet<&str> = code
        .split("#[test]")
        .chain(code.split("#[tokio::test"))
        .skip(1)
        .filter_map(|rest| rest.split_once("fn ").and_then(|(_, name)| name.split('(').next()))
        .collect();
    let mut problems = Vec::new();
    for row in rows() {
        let [what, _, then, named] = &row[..] else { panic!("{row:?} has not four cells") };
        // What cannot be seen from outside has no test, and the row says why.
        if then.is_empty() || (quoted(named).is_empty() && !named.starts_with("none: ")) {
            problems.push(format!("{what}: nothing is said of what happens, or no test is named"));
        }
        problems
            .extend(quoted(named).into_iter().filter(|name| !tests.contains(name)).map(|name| format!("{what}: no test {name}")));
    }
    none(&problems);
}

/// A limit that nobody can look up: what is a limit by its name stands in the table.
#[test]
fn every_limit_of_the_code_is_in_the_handbook() {
    let named: BTreeSet<String> =
        rows().iter().flat_map(|row| quoted(&row[1]).into_iter().map(str::to_owned).collect::<Vec<_>>()).collect();
    let mut problems = Vec::new();
    for (path, text) in files("src", &[".rs"]).into_iter().chain(files("lua", &[".lua"])) {
        let body = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(&text);
        for line in body.lines() {
            let line = line.trim_start();
            let line =
                ["pub(crate) ", "pub(super) ", "pub "].into_iter().find_map(|word| line.strip_prefix(word)).unwrap_or(line);
            let name = line.strip_prefix("const ").or_else(|| line.strip_prefix("local "));
            let name = name.and_then(|rest| rest.split([':', ' ']).next()).unwrap_or_default();
            let is_limit = name.ends_with("_MAX") || name.contains("_MAX_");
            if is_limit && name.chars().all(|c| c.is_ascii_uppercase() || c == '_') && !named.contains(name) {
                problems.push(format!("{path}: {name} is not in the table of limits"));
            }
        }
    }
    none(&problems);
}
