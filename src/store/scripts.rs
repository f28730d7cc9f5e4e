//! The Lua scripts, composed and hashed.
//!
//! What a script does stands in its own header, under `lua/`. Here: the script's `#!lua` line, then its name, then of the prelude
//! what the body needs, then the body, joined once. Nothing here knows what a script means.
//!
//! Redis runs the whole text for every call, definitions included. So positions like `P.state` are put in as the numbers that
//! they are, and what a script does not use is left out: a third of the time of a submit (docs/PERFORMANCE.md).

use std::sync::LazyLock;

const PRELUDE: &str = include_str!("../../lua/prelude.lua");

macro_rules! scripts {
    ($($variant:ident $name:literal,)*) => {
        /// One script under `lua/`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Script { $(#[doc = concat!("`lua/", $name, ".lua`")] $variant,)* }

        impl Script {
            /// Every script.
            pub const ALL: &[Script] = &[$(Script::$variant,)*];

            /// Its name: the file's, without the ending.
            pub fn name(self) -> &'static str {
                match self { $(Script::$variant => $name,)* }
            }

            fn source(self) -> &'static str {
                match self { $(Script::$variant => include_str!(concat!("../../lua/", $name, ".lua")),)* }
            }
        }
    };
}

scripts! {
    SubmitJob "submit_job",
    BeginAttempt "begin_attempt",
    MarkRunning "mark_running",
    ExtendLease "extend_lease",
    FinishAttempt "finish_attempt",
    ResolveAttempt "resolve_attempt",
    CancelJob "cancel_job",
    TickJob "tick_job",
    ReopenJob "reopen_job",
    ReadJob "read_job",
    SettleHint "settle_hint",
}

/// The tables of positions: a use of one by a field's name is put in as its number.
const POSITIONS: [&str; 3] = ["P", "L", "A"];

struct Composed {
    code: String,
    sha1: String,
}

static COMPOSED: LazyLock<Vec<Composed>> = LazyLock::new(|| {
    let definitions = definitions(PRELUDE);
    let compose = |script: &Script| {
        let code = compose(script.name(), script.source(), &definitions);
        let sha1 = redis::Script::new(&code).get_hash().to_owned();
        Composed { code, sha1 }
    };
    Script::ALL.iter().map(compose).collect()
});

/// What the prelude defines at its top level, in order: a name and its text.
fn definitions(prelude: &str) -> Vec<(&str, String)> {
    let code = prelude.split_once("\n]]\n").expect("the prelude begins with its comment").1;
    let mut found: Vec<(&str, String)> = Vec::new();
    for line in code_lines(code) {
        let defined = line.strip_prefix("local ").map(|rest| rest.strip_prefix("function ").unwrap_or(rest));
        match defined {
            Some(rest) => found.push((leading_word(rest), line.to_owned())),
            None => {
                if let Some((_, text)) = found.last_mut() {
                    text.push('\n');
                    text.push_str(line);
                }
            }
        }
    }
    found
}

/// The lines without comments, and without those that are nothing else. No text of ours has a `--`.
fn code_lines(lua: &str) -> impl Iterator<Item = &str> {
    lua.lines().map(|line| line.split("--").next().unwrap_or("").trim_end()).filter(|line| !line.is_empty())
}

fn compose(name: &str, source: &str, definitions: &[(&str, String)]) -> String {
    let (shebang, body) = source.split_once('\n').expect("a script begins with its #!lua line");
    let numbered = |text: &str| POSITIONS.iter().fold(text.to_owned(), |text, table| numbered(&text, table, definitions));
    // Its header and comments are for readers of the file.
    let body = body.split_once("\n]]\n").map_or(body, |(_, code)| code);
    let body = numbered(&code_lines(body).collect::<Vec<_>>().join("\n"));
    // From the last definition to the first: one that only later ones use is used by nothing once they are gone.
    let mut used = Vec::new();
    for (name, text) in definitions.iter().rev() {
        let text = numbered(text);
        if mentions(&body, name) || used.iter().any(|later: &String| mentions(later, name)) {
            used.push(text);
        }
    }
    used.push(format!("local SCRIPT = '{name}'"));
    used.reverse();
    format!("{shebang}\n{}\n{body}\n", used.join("\n"))
}

/// Puts the numbers of a table's fields in where the text names them.
fn numbered(text: &str, table: &str, definitions: &[(&str, String)]) -> String {
    let (_, definition) = definitions.iter().find(|(name, _)| *name == table).expect("the prelude has the table");
    let number = |field: &str| {
        let mut entries = definition.split(['{', ',', '}']).filter_map(|entry| entry.trim().split_once(" = "));
        entries.find(|(name, _)| *name == field).map(|(_, number)| number)
    };
    let begin = format!("{table}.");
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(&begin) {
        let (before, after) = (&rest[..at], &rest[at + begin.len()..]);
        let field = leading_word(after);
        out.push_str(before);
        match number(field) {
            Some(number) if !before.ends_with(is_word) => out.push_str(number),
            _ => out.extend([begin.as_str(), field]),
        }
        rest = &after[field.len()..];
    }
    out.push_str(rest);
    out
}

fn is_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

fn leading_word(text: &str) -> &str {
    &text[..text.find(|character| !is_word(character)).unwrap_or(text.len())]
}

/// Whether a name stands in the text, not as a part of another.
fn mentions(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(at, _)| !text[..at].ends_with(is_word) && !text[at + name.len()..].starts_with(is_word))
}

impl Script {
    /// The whole text, as Redis gets it.
    pub fn code(self) -> &'static str {
        &COMPOSED[self as usize].code
    }

    /// Whether the hint sent before it is the job's only one. The other scripts meet jobs that have one already, and must go
    /// through even when Redis is out of memory and refuses the hint.
    pub(crate) fn needs_its_hint(self) -> bool {
        matches!(self, Script::SubmitJob | Script::BeginAttempt | Script::ReopenJob)
    }

    /// Its SHA-1, by which Redis remembers it.
    pub fn sha1(self) -> &'static str {
        &COMPOSED[self as usize].sha1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hot script carries neither the tables of positions nor what only others use.
    #[test]
    fn a_script_has_of_the_prelude_what_it_needs_and_no_more() {
        let definitions = definitions(PRELUDE);
        assert!(definitions.len() > 30, "{}", definitions.len());
        for script in Script::ALL {
            let code = script.code();
            for (name, text) in &definitions {
                let (head, _) = text.split_at(text.find(name).expect("it begins with its name") + name.len());
                let uses = code.lines().filter(|line| !line.starts_with(head) && mentions(line, name)).count();
                let defined = code.lines().any(|line| line.starts_with(head) && mentions(line, name));
                assert_eq!(defined, uses > 0, "{}: {name}, {uses} uses", script.name());
            }
        }
        for table in POSITIONS {
            assert!(!mentions(Script::SubmitJob.code(), table), "{table}");
            assert!(mentions(Script::ReadJob.code(), table), "{table}: names are what it shows");
        }
    }

    #[test]
    fn a_position_is_put_in_as_its_number_and_nothing_else_is() {
        let prelude =
            "--[[\nx\n]]\nlocal P = {\n  state = 8, job_id = 2,\n}\n-- P.state\nlocal function f(r)\n  return r[P.state]\nend\n";
        let definitions = definitions(prelude);
        assert_eq!(definitions.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["P", "f"]);
        assert_eq!(
            numbered("a[P.state], XP.state, P.other, P.job_id2, P.job_id", "P", &definitions),
            "a[8], XP.state, P.other, P.job_id2, 2"
        );
        assert!(mentions("f(1)", "f") && mentions("x = f", "f") && !mentions("of(1)", "f") && !mentions("f_(1)", "f"));
    }
}
