//! What a program can check of docs/STYLE.md and docs/PROTOCOL.md: headers that lie, words that differ, notes that were left.
//!
//! Each check reads the sources as text and tells every place at once. A check that finds nothing to look at fails. `protocol`
//! compares the protocol's three places, `borders` looks at who knows what, `limits` at the handbook's table of limits, `cluster` at
//! the list of tests that mean nothing in a cluster.

mod borders;
mod cluster;
mod limits;
mod protocol;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What a script's header has, in this order, after its sentence.
const HEADER_SECTIONS: [&str; 5] = ["KEYS", "ARGV", "REPLY", "WRITES", "COST"];
/// The flags that Redis knows, of those that we use.
const SCRIPT_FLAGS: [&str; 2] = ["no-writes", "allow-oom"];
/// The tables of positions in the prelude, and what each is of.
const POSITIONS: [(&str, &str); 8] = [
    ("P", "the record"),
    ("L", "the rules"),
    ("A", "an attempt"),
    ("B", "a breaker"),
    ("D", "a shard of clicks"),
    ("G", "a generation of buckets"),
    ("M", "a mirrored shard"),
    ("C", "a chunk"),
];
/// The longest line, as in rustfmt.toml, with room for what cannot be broken.
const LINE_CHARS_MAX: usize = 135;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files under a directory with one of these endings, without what is built.
fn files(under: &str, endings: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut directories = vec![root().join(under)];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display())) {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !matches!(name.as_str(), "target" | ".git" | "onejob-data") {
                    directories.push(path);
                }
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push((path.strip_prefix(root()).unwrap().display().to_string(), read(&path)));
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "nothing under {under} ends in {endings:?}");
    found
}

/// Fails with all of them, one a line.
fn none(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

/// A script, taken apart.
struct Script {
    name: String,
    first_line: String,
    sentence: String,
    /// The lines of each section of the header, by its name.
    sections: BTreeMap<&'static str, Vec<String>>,
    /// The names of the sections as they come.
    order: Vec<&'static str>,
    body: String,
}

fn scripts() -> Vec<Script> {
    let scripts = files("lua", &[".lua"]).into_iter().filter(|(path, _)| !path.ends_with("prelude.lua"));
    scripts.map(|(path, text)| take_apart(&path, &text)).collect()
}

fn take_apart(path: &str, text: &str) -> Script {
    let name = path.trim_start_matches("lua/").trim_end_matches(".lua").to_owned();
    let (first_line, rest) = text.split_once('\n').unwrap_or((text, ""));
    let (header, body) = rest.strip_prefix("--[[\n").and_then(|rest| rest.split_once("\n]]\n")).unwrap_or(("", rest));
    let mut lines = header.lines();
    let sentence = lines.next().unwrap_or("").to_owned();
    let (mut sections, mut order, mut current) = (BTreeMap::<_, Vec<String>>::new(), Vec::new(), None);
    for line in lines {
        let word = line.split_whitespace().next().unwrap_or("");
        let begins = HEADER_SECTIONS.into_iter().find(|section| *section == word && line.starts_with(section));
        if let Some(section) = begins {
            order.push(section);
            current = Some(section);
        }
        if let Some(section) = current {
            sections.entry(section).or_default().push(line.to_owned());
        }
    }
    Script { name, first_line: first_line.to_owned(), sentence, sections, order, body: without_comments(body) }
}

fn without_comments(lua: &str) -> String {
    // `--` inside a text would be cut too; none of ours has it.
    lua.lines().map(|line| line.split_once("--").map_or(line, |(code, _)| code)).collect::<Vec<_>>().join("\n")
}

/// The numbers in `[n]` at the beginning of a section's lines.
fn documented(script: &Script, section: &str) -> Vec<usize> {
    let lines = script.sections.get(section).into_iter().flatten();
    lines.filter_map(|line| line.trim_start().strip_prefix('[')?.split_once(']')?.0.parse().ok()).collect()
}

/// The numbers in `NAME[n]` in the code.
fn used(script: &Script, name: &str) -> BTreeSet<usize> {
    let begin = format!("{name}[");
    let pieces = script.body.split(&begin).skip(1).map(|rest| rest.split(']').next().unwrap_or(""));
    pieces.map(|index| index.parse().unwrap_or_else(|_| panic!("{}: {name}[{index}] is no number", script.name))).collect()
}

/// The texts in quotes that directly follow a call.
fn texts_after<'a>(code: &'a str, call: &str) -> BTreeSet<&'a str> {
    let begin = format!("{call}('");
    code.split(&begin).skip(1).filter_map(|rest| rest.split('\'').next()).collect()
}

/// The first word of each line of a section that stands as far left as its entries do.
fn entries<'a>(script: &'a Script, section: &str) -> BTreeSet<&'a str> {
    let lines = script.sections.get(section).into_iter().flatten().skip(1);
    let entry = |line: &'a String| {
        let rest = line.strip_prefix("  ")?;
        (!rest.starts_with(' ')).then(|| rest.split([',', ' ']).next()).flatten()
    };
    lines.filter_map(entry).collect()
}

/// What the scripts share.
fn prelude() -> String {
    ["lua/prelude.lua", "lua/dedup_prelude.lua", "lua/mirror_prelude.lua"].map(|path| read(&root().join(path))).join("\n")
}

/// The positions that the prelude gives the fields of a table.
fn positions(table: &str) -> BTreeMap<usize, String> {
    let prelude = prelude();
    let begin = format!("\nlocal {table} = {{");
    let (_, rest) = prelude.split_once(&begin).unwrap_or_else(|| panic!("the prelude has no table {table}"));
    let (inside, _) = rest.split_once('}').unwrap_or_else(|| panic!("the table {table} has no end"));
    let mut positions = BTreeMap::new();
    for entry in inside.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let (name, position) = entry.split_once(" = ").unwrap_or_else(|| panic!("{table}: {entry}"));
        let position = position.parse().unwrap_or_else(|_| panic!("{table}: {entry}"));
        let before = positions.insert(position, name.to_owned());
        assert!(before.is_none(), "{table}: {name} and {before:?} are both at {position}");
    }
    positions
}

#[test]
fn every_script_begins_with_its_shebang_and_flags_that_redis_knows() {
    let mut problems = Vec::new();
    for script in scripts() {
        let flags = match script.first_line.strip_prefix("#!lua") {
            Some("") => Vec::new(),
            Some(rest) => rest.strip_prefix(" flags=").map(|flags| flags.split(',').collect()).unwrap_or_else(|| vec!["?"]),
            None => vec!["?"],
        };
        if !flags.iter().all(|flag| SCRIPT_FLAGS.contains(flag)) {
            problems.push(format!("lua/{}.lua:1: {:?}", script.name, script.first_line));
        }
        let writes_nothing = script.sections.get("WRITES").is_some_and(|lines| lines[0].trim() == "WRITES nothing");
        if writes_nothing != flags.contains(&"no-writes") {
            problems.push(format!("lua/{}.lua: WRITES and the flag no-writes differ", script.name));
        }
    }
    none(&problems);
}

#[test]
fn every_script_has_its_header_in_order() {
    let mut problems = Vec::new();
    for script in scripts() {
        let begins = script.sentence.starts_with(&format!("{}: ", script.name)) && script.sentence.ends_with('.');
        if !begins {
            problems.push(format!("lua/{}.lua: its sentence is {:?}", script.name, script.sentence));
        }
        if script.order != HEADER_SECTIONS {
            problems.push(format!("lua/{}.lua: its header has {:?}", script.name, script.order));
        }
    }
    none(&problems);
}

#[test]
fn every_argument_and_key_is_documented_and_used() {
    let mut problems = Vec::new();
    for script in scripts() {
        for name in ["KEYS", "ARGV"] {
            let documented = documented(&script, name);
            let in_order: Vec<_> = (1..=documented.len()).collect();
            if documented != in_order {
                problems.push(format!("lua/{}.lua: {name} are numbered {documented:?}", script.name));
            }
            let used = used(&script, name);
            let documented: BTreeSet<_> = documented.into_iter().collect();
            if documented.is_empty() || documented != used {
                problems.push(format!("lua/{}.lua: {name} documents {documented:?} and uses {used:?}", script.name));
            }
        }
    }
    none(&problems);
}

#[test]
fn every_status_of_a_reply_is_documented_and_given() {
    let mut problems = Vec::new();
    for script in scripts() {
        let (documented, given) = (entries(&script, "REPLY"), texts_after(&script.body, "reply"));
        if documented.is_empty() || documented != given {
            problems.push(format!("lua/{}.lua: REPLY documents {documented:?}, the code gives {given:?}", script.name));
        }
        if script.body.matches("reply(").count()
            != ["return reply('", "local out = reply('"].map(|plain| script.body.matches(plain).count()).iter().sum::<usize>()
        {
            problems.push(format!(
                "lua/{}.lua: a reply is neither returned at once nor filled and returned, or its status is not a plain text",
                script.name
            ));
        }
        if !script.body.contains("\nECHO = ") && !script.body.starts_with("ECHO = ") {
            problems.push(format!("lua/{}.lua: sets no ECHO, so its caller cannot recognize the reply", script.name));
        }
    }
    none(&problems);
}

#[test]
fn the_positions_of_the_record_have_no_gap_and_every_one_is_used() {
    let code: String = files("lua", &[".lua"]).into_iter().map(|(_, text)| without_comments(&text)).collect();
    let mut problems = Vec::new();
    for (table, what) in POSITIONS {
        let positions = positions(table);
        let expected: Vec<_> = (1..=positions.len()).collect();
        if positions.len() < 2 || positions.keys().copied().collect::<Vec<_>>() != expected {
            problems.push(format!("lua: the positions of {what} are {positions:?}"));
        }
    }
    // A name that no table has would read as nil, which no test may happen to notice.
    for (table, _) in POSITIONS {
        let known: BTreeSet<_> = positions(table).into_values().collect();
        for rest in code.split(&format!("[{table}.")).skip(1) {
            let name = rest.split(']').next().unwrap_or("");
            if !known.contains(name) {
                problems.push(format!("lua: {table}.{name} has no position"));
            }
        }
    }
    none(&problems);
}

#[test]
fn everything_in_the_prelude_is_needed() {
    let prelude = without_comments(&prelude());
    let bodies: String = scripts().into_iter().map(|script| script.body).collect();
    let mut names = BTreeSet::new();
    for line in prelude.lines() {
        let name = line.strip_prefix("local function ").or_else(|| line.strip_prefix("local "));
        names.extend(name.and_then(|rest| rest.split(['(', ' ']).next()));
    }
    assert!(names.len() > 20, "{names:?}");
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let count = |code: &str, name: &str| code.split(|c| !is_word(c)).filter(|word| *word == name).count();
    let unused: Vec<_> =
        names.iter().filter(|name| count(&bodies, name) + count(&prelude, name) < 2).map(|name| (*name).to_owned()).collect();
    none(&unused);
}

#[test]
fn every_source_file_says_what_it_is_for() {
    let silent = files("src", &[".rs"]).into_iter().chain(files("tests", &[".rs"]));
    let silent: Vec<_> = silent.filter(|(_, text)| !text.starts_with("//! ")).map(|(path, _)| path).collect();
    none(&silent);
}

/// The words are composed here, so that this file does not find itself.
fn unwelcome() -> Vec<String> {
    let marks = [("TO", "DO"), ("FIX", "ME"), ("X", "XX"), ("HA", "CK")].map(|(a, b)| format!("{a}{b}"));
    let outside = [("../", "shared"), ("/work", "/"), ("DESIGN", ".md"), ("CASES", ".md")].map(|(a, b)| format!("{a}{b}"));
    marks.into_iter().chain(outside).collect()
}

#[test]
fn nothing_is_left_to_do_and_nothing_points_outside() {
    let unwelcome = unwelcome();
    let mut problems = Vec::new();
    for (path, text) in
        files(".", &[".rs", ".lua", ".md", ".toml", ".sh", ".yaml", ".yml", ".json", "Makefile", "run", "package"])
    {
        for (number, line) in text.lines().enumerate() {
            let found = unwelcome.iter().find(|word| line.contains(*word));
            problems.extend(found.map(|word| format!("{path}:{}: {word}", number + 1)));
        }
    }
    none(&problems);
}

#[test]
fn lines_fit_the_screen() {
    let mut problems = Vec::new();
    for (path, text) in files(".", &[".rs", ".lua", ".toml"]) {
        let long =
            text.lines().enumerate().filter(|(_, line)| line.chars().count() > LINE_CHARS_MAX && !path.ends_with("Cargo.toml"));
        problems.extend(long.map(|(number, _)| format!("{path}:{}", number + 1)));
    }
    none(&problems);
}

#[test]
fn relative_links_of_the_documents_lead_somewhere() {
    let mut problems = Vec::new();
    for (path, text) in files(".", &[".md"]) {
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or("");
            let outside = target.contains("://") || target.starts_with("mailto:") || file.is_empty();
            if !outside && !root().join(&path).with_file_name("").join(file).exists() {
                problems.push(format!("{path}: {target}"));
            }
        }
    }
    none(&problems);
}
