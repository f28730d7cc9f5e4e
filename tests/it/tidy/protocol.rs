//! One protocol in three places: the scripts, the Rust code and `docs/PROTOCOL.md` have the same positions, states, words, replies
//! and numbers of arguments.

use std::collections::{BTreeMap, BTreeSet};

use onejob::attempt::AttemptState;
use onejob::job::{Class, JobState};

use super::{Script, documented, entries, none, positions, read, root, scripts, without_comments};

/// The tables of positions: what the prelude, `src/store/record.rs` and the protocol call each, and the one that the protocol draws.
const TABLES: [(&str, &str, &str); 3] = [("P", "Record", "## The record"), ("L", "Policy", "Policy:"), ("A", "Row", "Attempt:")];
/// The script that changes hints instead of jobs: `src/store/hints.rs` calls it, in pipelines that ignore its reply.
const HINTS_SCRIPT: &str = "settle_hint";

fn words<const N: usize>(words: [&'static str; N]) -> BTreeSet<String> {
    words.into_iter().map(str::to_owned).collect()
}

fn job_words() -> BTreeSet<String> {
    words(JobState::ALL.map(JobState::as_str))
}

fn attempt_words() -> BTreeSet<String> {
    words(AttemptState::ALL.map(AttemptState::as_str))
}

/// What stands between two texts.
fn between<'a>(text: &'a str, begin: &str, end: &str) -> &'a str {
    let (_, rest) = text.split_once(begin).unwrap_or_else(|| panic!("there is no {begin:?}"));
    rest.split_once(end).unwrap_or_else(|| panic!("{begin:?} has no {end:?}")).0
}

fn protocol() -> String {
    read(&root().join("docs/PROTOCOL.md"))
}

/// What stands in backticks.
fn ticked(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The rows of the table under a header row, each as its cells.
fn table(header: &str) -> Vec<Vec<String>> {
    let text = protocol();
    let rows = between(&text, &format!("\n{header}\n"), "\n\n").lines().skip(1);
    rows.map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// The fields of a struct of `src/store/record.rs`, in order.
fn fields(of: &str) -> Vec<String> {
    let record = read(&root().join("src/store/record.rs"));
    let body = between(&record, &format!("\nstruct {of} {{\n"), "\n}\n");
    let field = |line: &str| Some(line.trim().split_once(": ").filter(|_| !line.contains("#["))?.0.to_owned());
    body.lines().filter_map(field).collect()
}

/// The names of one of the protocol's running lists, `Attempt: 1 \`state\` · 2 …`, whose numbers must be in order.
fn listed(begin: &str) -> Vec<String> {
    let text = protocol();
    let list = between(&text, &format!("\n{begin} "), ".\n").replace('\n', " ");
    let entries = list.split(" · ").enumerate().map(|(place, entry)| {
        let (number, rest) = entry.trim().split_once(' ').unwrap_or_else(|| panic!("{begin} {entry}"));
        assert_eq!(number, (place + 1).to_string(), "{begin} {entry}");
        ticked(rest).swap_remove(0)
    });
    entries.collect()
}

/// The arguments of every call in some Lua, each as its text; a definition is no call.
fn calls<'a>(lua: &'a str, name: &str) -> Vec<Vec<&'a str>> {
    let begin = format!("{name}(");
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (at, _) in lua.match_indices(&begin) {
        let before = &lua[..at];
        if !before.ends_with(is_word) && !before.ends_with("function ") {
            found.push(arguments(&lua[at + begin.len()..]));
        }
    }
    found
}

/// The texts between the commas up to the bracket that closes; commas and brackets inside of brackets do not count.
fn arguments(text: &str) -> Vec<&str> {
    let (mut depth, mut begin, mut found) = (0, 0, Vec::new());
    for (at, character) in text.char_indices() {
        match character {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 0 => {
                found.push(text[begin..at].trim());
                break;
            }
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(text[begin..at].trim());
                begin = at + 1;
            }
            _ => {}
        }
    }
    found.retain(|argument| !argument.is_empty());
    found
}

/// The words that a Lua expression can be: its own texts, or those that its name is given or compared with. A text that the
/// expression only compares with is none.
fn values(script: &Script, expression: &str) -> BTreeSet<String> {
    let texts = |expression: &str| -> BTreeSet<String> {
        let pieces: Vec<&str> = expression.split('\'').collect();
        let pairs = pieces.chunks(2).filter(|pair| pair.len() == 2 && !pair[0].ends_with("= "));
        pairs.map(|pair| pair[1].to_owned()).collect()
    };
    if expression.contains('\'') {
        return texts(expression);
    }
    if expression == "attempt[A.state]" {
        // What a branch that names its outcome has not written down itself already.
        let branches: BTreeSet<_> = after(&script.body, "if outcome == ").into_iter().collect();
        let branched = |outcome: &String| script.body.contains(&format!("if outcome == '{outcome}' then\n"));
        let outcomes = values(script, "outcome");
        assert!(branches.iter().any(branched), "{}: which outcomes come here?", script.name);
        return outcomes.into_iter().filter(|outcome| !branched(outcome)).collect();
    }
    let mut found: BTreeSet<_> = after(&script.body, &format!("{expression} ~= ")).into_iter().collect();
    for line in script.body.lines() {
        found.extend(line.trim().strip_prefix(&format!("local {expression} = ")).map(texts).unwrap_or_default());
    }
    assert!(!found.is_empty(), "lua/{}.lua: what can {expression} be?", script.name);
    found
}

/// The texts that directly follow something.
fn after(code: &str, begin: &str) -> Vec<String> {
    let begin = format!("{begin}'");
    let pieces = code.split(&begin).skip(1);
    pieces.filter_map(|rest| rest.split('\'').next()).map(str::to_owned).collect()
}

/// Every script, and the prelude as one more.
fn lua() -> Vec<Script> {
    let body = without_comments(&read(&root().join("lua/prelude.lua")));
    let prelude = Script {
        name: "prelude".to_owned(),
        first_line: String::new(),
        sentence: String::new(),
        sections: BTreeMap::new(),
        order: Vec::new(),
        body,
    };
    let mut all = scripts();
    all.push(prelude);
    all
}

/// Every word that some calls give in one of their arguments.
fn given(call: &str, place: usize) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for script in lua() {
        for arguments in calls(&script.body, call) {
            let passed_on = script.name == "prelude" && !arguments[place].contains('\'');
            assert!(!passed_on, "the prelude passes {} on to {call}", arguments[place]);
            found.extend(values(&script, arguments[place]));
        }
    }
    found
}

/// One method of `src/store/`'s transitions, protection, certificates, dedup or mirror, named as its script.
fn method(script: &Script) -> String {
    let methods = ["transitions", "protection", "certificates", "dedup", "mirror"]
        .map(|file| read(&root().join(format!("src/store/{file}.rs"))))
        .concat();
    let body = between(&methods, &format!("pub async fn {}(", script.name), "\n    }\n");
    // One whose caller may want to know how durable its answer is stands in a method of its own.
    match body.split_once("let (").filter(|_| body.contains("durable.settle(")) {
        Some((_, told)) => between(&methods, &format!("async fn {}(", between(told, "self.", "(")), "\n    }\n").to_owned(),
        None => body.to_owned(),
    }
}

#[test]
fn the_record_has_the_same_fields_in_lua_in_rust_and_in_the_protocol() {
    for (table_name, of, begin) in TABLES {
        let in_lua: Vec<_> = positions(table_name).into_values().collect();
        assert_eq!(in_lua, fields(of), "lua/prelude.lua {table_name}, src/store/record.rs {of}");
        let in_protocol = match begin.strip_prefix("## ") {
            Some(_) => table("| # | field | what |")
                .into_iter()
                .enumerate()
                .map(|(place, row)| {
                    assert_eq!(row[0], (place + 1).to_string(), "docs/PROTOCOL.md {begin}: {row:?}");
                    row[1].trim_matches('`').to_owned()
                })
                .collect(),
            None => listed(begin),
        };
        assert_eq!(in_lua, in_protocol, "lua/prelude.lua {table_name}, docs/PROTOCOL.md {begin}");
    }
}

#[test]
fn a_breaker_has_the_same_fields_in_lua_and_in_the_protocol() {
    assert_eq!(positions("B").into_values().collect::<Vec<_>>(), listed("Breaker:"));
}

#[test]
fn a_generation_of_buckets_has_the_same_fields_in_lua_and_in_the_protocol() {
    assert_eq!(positions("G").into_values().collect::<Vec<_>>(), listed("Generation:"));
}

#[test]
fn a_record_keeps_words_by_the_same_places_in_lua_in_rust_and_in_the_protocol() {
    let (prelude, protocol) = (read(&root().join("lua/prelude.lua")), protocol());
    let lists: [(&str, &str, Vec<&str>); 3] = [
        ("CLASSES", "Classes", Class::ALL.map(Class::as_str).to_vec()),
        ("JOB_STATES", "Job states", JobState::ALL.map(JobState::as_str).to_vec()),
        ("ATTEMPT_STATES", "Attempt states", AttemptState::ALL.map(AttemptState::as_str).to_vec()),
    ];
    for (in_lua, in_protocol, words) in lists {
        let list = between(&prelude, &format!("\nlocal {in_lua} = {{"), "}\n");
        let listed: Vec<_> = list.split('\'').skip(1).step_by(2).collect();
        assert_eq!(listed, words, "lua/prelude.lua {in_lua}");
        assert_eq!(ticked(between(&protocol, &format!("\n{in_protocol}: "), ".\n")), words, "docs/PROTOCOL.md {in_protocol}");
    }
}

#[test]
fn an_event_has_the_same_fields_in_lua_in_rust_and_in_the_protocol() {
    let prelude = read(&root().join("lua/prelude.lua"));
    let expected = fields("EventRow");
    assert_eq!(listed("Event:"), expected, "docs/PROTOCOL.md");
    let said: Vec<_> = between(&prelude, "\n-- One event: { ", " }.\n").split(", ").map(str::to_owned).collect();
    assert_eq!(said, expected, "lua/prelude.lua, the comment");
    let written = between(&prelude, "\n  events[#events + 1] = { ", " }\n").replace("now", "at_ms").replace("number", "attempt");
    assert_eq!(written, expected.join(", "), "lua/prelude.lua, note");
    let numbered: Vec<_> = (1..).zip(&expected).map(|(place, name)| format!("{name} = {place}")).collect();
    let shown = read(&root().join("lua/read_job.lua"));
    assert!(shown.contains(&format!("list({{ {} }}, event, ", numbered.join(", "))), "lua/read_job.lua numbers them otherwise");
}

#[test]
fn the_states_of_a_job_are_the_same_words_everywhere() {
    let prelude = read(&root().join("lua/prelude.lua"));
    let ended = given("end_job", 2);
    let is_ended = JobState::ALL.into_iter().filter(|state| state.is_ended());
    assert_eq!(ended, is_ended.map(|state| state.as_str().to_owned()).collect(), "lua: end_job");
    let derive = between(&prelude, "\nlocal function derive(record)\n", "\nend\n");
    let derived: BTreeSet<_> = derive.split('\'').skip(1).step_by(2).filter(|word| !word.is_empty()).map(str::to_owned).collect();
    assert_eq!(derived.union(&ended).cloned().collect::<BTreeSet<_>>(), job_words(), "lua: derive and end_job");

    let text = protocol();
    let in_protocol = ticked(between(&text, "\nJob, by precedence: an ended state", " Endings are final"));
    assert_eq!(in_protocol.into_iter().collect::<BTreeSet<_>>(), derived, "docs/PROTOCOL.md, by precedence");
    let in_protocol = table("| ended state | when |").iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
    assert_eq!(ended, in_protocol, "docs/PROTOCOL.md, ended states");
}

#[test]
fn the_states_of_an_attempt_are_the_same_words_everywhere() {
    let mut in_lua = given("close", 2);
    for script in lua() {
        in_lua.extend(after(&script.body, "attempt[A.state] = "));
        // A new row's state is what the caller may begin with; a pending job has no row.
        if script.body.contains("{\n    begin, token, ") || script.body.contains("{\n  begin, token, ") {
            in_lua.extend(values(&script, "begin").into_iter().filter(|begin| begin != "pending"));
        }
    }
    assert_eq!(in_lua, attempt_words(), "lua");
    let transitions = table("| from | to | by |");
    let in_protocol = transitions.iter().flat_map(|row| ticked(&row[..2].join(" "))).collect();
    assert_eq!(attempt_words(), in_protocol, "docs/PROTOCOL.md, from and to");
}

/// A misspelled word would never be equal to anything.
#[test]
fn the_scripts_compare_states_only_with_words_that_exist() {
    let mut problems = Vec::new();
    let (jobs, attempts) = (job_words(), attempt_words());
    let compared = [("[P.state]", &jobs), ("[A.state]", &attempts), (" state", &attempts), ("was", &attempts)];
    for script in lua() {
        for (what, known) in compared {
            let words = [" == ", " ~= "].map(|how| after(&script.body, &format!("{what}{how}"))).concat();
            let unknown = words.into_iter().filter(|word| !known.contains(word));
            problems.extend(unknown.map(|word| format!("lua/{}.lua: {what} is never {word:?}", script.name)));
        }
    }
    none(&problems);
}

#[test]
fn the_events_are_the_same_words_in_lua_and_in_the_protocol() {
    let text = protocol();
    let in_protocol = ticked(between(&text, "(0: the job) · 4 `actor` · 5 `detail`. Words:", ".\n"));
    assert!(in_protocol.is_sorted(), "{in_protocol:?}");
    assert_eq!(given("note", 2), in_protocol.into_iter().collect());
}

#[test]
fn every_reply_is_the_same_word_in_its_script_in_rust_and_in_the_protocol() {
    let mut rows = table("| script | does | replies |");
    let in_protocol: BTreeMap<_, BTreeSet<_>> =
        rows.iter_mut().map(|row| (row[0].trim_matches('`').to_owned(), ticked(&row[2]).into_iter().collect())).collect();
    let in_lua: BTreeMap<_, BTreeSet<_>> = scripts()
        .iter()
        .map(|script| (script.name.clone(), entries(script, "REPLY").into_iter().map(str::to_owned).collect()))
        .collect();
    assert_eq!(in_lua, in_protocol, "lua, docs/PROTOCOL.md");
    for script in scripts().iter().filter(|script| script.name != HINTS_SCRIPT) {
        let body = method(script);
        let matched = between(&body, "match reply.status() {\n", "\n            _ => ");
        let arms = matched.lines().filter_map(|line| line.strip_prefix("            \"")?.split_once(" =>"));
        let words: BTreeSet<_> =
            arms.flat_map(|(words, _)| words.split(" | ")).map(|word| word.trim_matches('"').to_owned()).collect();
        assert_eq!(words, in_lua[&script.name], "src/store {}", script.name);
    }
}

#[test]
fn every_script_is_called_with_as_many_arguments_as_it_documents() {
    for script in scripts() {
        let sent = if script.name == HINTS_SCRIPT {
            let hints = read(&root().join("src/store/hints.rs"));
            between(&hints, "command.arg(1).arg(key)", ";\n").matches(".arg(").count()
        } else {
            arguments(&between(&method(&script), "arguments![", ";").replace("&[..]", "")).len()
        };
        assert_eq!(sent, documented(&script, "ARGV").len(), "{}", script.name);
    }
}

#[test]
fn every_script_is_known_by_its_name() {
    let files: BTreeSet<_> = scripts().into_iter().map(|script| script.name).collect();
    let known: Vec<_> = onejob::store::Script::ALL.iter().map(|script| script.name().to_owned()).collect();
    assert_eq!(known.iter().cloned().collect::<BTreeSet<_>>(), files);
    let in_protocol: Vec<_> =
        table("| script | does | replies |").iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
    assert_eq!(known, in_protocol, "docs/PROTOCOL.md, in this order");
}
