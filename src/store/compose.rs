//! How a script's text is put together from its own file and the prelude.
//!
//! Redis runs a script's whole text for every call: each table and each function of the prelude would be made anew, used or not.
//! So the names of positions (`P.state`) become numbers, and what a script does not use is left out. That is a fifth of what a
//! claim costs Redis; `docs/PERFORMANCE.md` has the figures. Nothing here knows what a script means.

use std::collections::{BTreeMap, BTreeSet};

/// The tables of the prelude whose names become numbers.
const POSITIONS: [&str; 8] = ["P", "L", "A", "B", "D", "G", "M", "C"];

/// The text that Redis gets: the script's `#!lua` line, its name, what it needs of the prelude, its body.
pub(super) fn compose(name: &str, source: &str, prelude: &str) -> String {
    let (shebang, body) = source.split_once('\n').expect("a script begins with its #!lua line");
    let parts = parts_of(prelude);
    // A prelude of jobs alone has no tables of clicks.
    let tables = POSITIONS.into_iter().filter_map(|table| {
        let part = parts.iter().find(|part| name_of(part) == Some(table))?;
        Some((table, positions(part)))
    });
    let numbers = tables.collect();
    let body = numbered(body, &numbers);
    let parts: Vec<String> = parts.iter().map(|part| numbered(part, &numbers)).collect();
    let needed = needed(&parts, &body);
    let parts: String = parts.into_iter().filter(|part| name_of(part).is_none_or(|name| needed.contains(name))).collect();
    format!("{shebang}\nlocal SCRIPT = '{name}'\n{parts}{body}")
}

/// The prelude's statements, each with the comments before it. A statement begins with `local` at the beginning of a line.
fn parts_of(prelude: &str) -> Vec<String> {
    let mut parts: Vec<String> = vec![String::new()];
    let mut commented = true;
    for line in prelude.lines() {
        let is_comment = line.starts_with("--");
        if (is_comment || line.starts_with("local ")) && !commented {
            parts.push(String::new());
        }
        commented = is_comment;
        let part = parts.last_mut().expect("there is one from the beginning");
        part.push_str(line);
        part.push('\n');
    }
    parts
}

/// What a statement defines; `None` for a comment of its own.
fn name_of(part: &str) -> Option<&str> {
    let definition = part.lines().find_map(|line| line.strip_prefix("local "))?;
    let definition = definition.strip_prefix("function ").unwrap_or(definition);
    words(definition).next()
}

/// The entries `name = number` of a table.
fn positions(part: &str) -> BTreeMap<String, String> {
    let inside = part.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(inside, _)| inside);
    let entries = inside.split(',').filter_map(|entry| entry.trim().split_once(" = "));
    entries.map(|(name, number)| (name.to_owned(), number.to_owned())).collect()
}

/// The text with numbers for the names of positions.
fn numbered(text: &str, numbers: &BTreeMap<&str, BTreeMap<String, String>>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((at, table)) = next_table(rest) {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        let field = &after[table.len() + 1..];
        let length = field.find(|c| !is_word(c)).unwrap_or(field.len());
        let number = numbers.get(table).and_then(|positions| positions.get(&field[..length]));
        let number = number.unwrap_or_else(|| panic!("{table}.{} has no position in the prelude", &field[..length]));
        out.push_str(number);
        rest = &field[length..];
    }
    out.push_str(rest);
    out
}

/// Where the next `P.name` stands.
fn next_table(text: &str) -> Option<(usize, &'static str)> {
    text.match_indices('.').find_map(|(dot, _)| {
        let (before, after) = (&text[..dot], &text[dot + 1..]);
        let table = POSITIONS.into_iter().find(|table| before.ends_with(table))?;
        let at = dot - table.len();
        let stands_alone = !before[..at].ends_with(|c| is_word(c) || c == '.');
        (stands_alone && after.starts_with(|c: char| c.is_ascii_lowercase())).then_some((at, table))
    })
}

/// Every word that the body's code says, or a statement that it needs.
fn needed(parts: &[String], body: &str) -> BTreeSet<String> {
    let said_by = |text: &str| words(&without_comments(text)).map(str::to_owned).collect::<Vec<_>>();
    let mut said: BTreeSet<String> = said_by(body).into_iter().collect();
    loop {
        let before = said.len();
        for part in parts {
            if name_of(part).is_some_and(|name| said.contains(name)) {
                said.extend(said_by(part));
            }
        }
        if said.len() == before {
            return said;
        }
    }
}

/// The code without its comments. `--` inside a text would count as one; none of ours has it.
fn without_comments(lua: &str) -> String {
    let mut code = String::with_capacity(lua.len());
    let mut rest = lua;
    while let Some((before, comment)) = rest.split_once("--") {
        code.push_str(before);
        let end = if comment.starts_with("[[") { "]]" } else { "\n" };
        rest = comment.find(end).map_or("", |at| &comment[at..]);
    }
    code.push_str(rest);
    code
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| !is_word(c)).filter(|word| !word.is_empty())
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRELUDE: &str = "\
--[[
All of it.
]]
-- The record.
local P = {
  state = 1, owner = 2,
}
local L = { release = 6 }
local A = { state = 1, token = 2 }
local B = { state = 1 }
local D = { added = 1 }
local G = { ids = 1 }
local LIMIT = 3   -- why

-- Twice.
local function double(number)
  return number * 2
end

local function owner_of(record)
  return record[P.owner]
end

-- Nobody needs it.
local function unused(record)
  return owner_of(record)
end
";

    #[test]
    fn a_script_has_numbers_for_positions_and_only_what_it_uses() {
        let body = "--[[\none: with double\n]]\nreturn owner_of(first[A.token]) .. xP.y -- unused\n";
        let composed = compose("one", &format!("#!lua flags=no-writes\n{body}"), PRELUDE);
        let expected = "#!lua flags=no-writes
local SCRIPT = 'one'
--[[
All of it.
]]
local function owner_of(record)
  return record[2]
end

--[[
one: with double
]]
return owner_of(first[2]) .. xP.y -- unused
";
        assert_eq!(composed, expected);
        // A table that somebody goes through stays.
        let composed = compose("all", "#!lua\nfor name in pairs(P) do end\n", PRELUDE);
        assert!(composed.contains("local P = {\n  state = 1, owner = 2,\n}\n") && !composed.contains("local A"), "{composed}");
        // What is needed only by what is needed is needed.
        let composed = compose("two", "#!lua\nreturn unused(LIMIT)\n", PRELUDE);
        assert!(composed.contains("local LIMIT = 3   -- why\n") && composed.contains("function owner_of"), "{composed}");
        assert!(!composed.contains("double") && !composed.contains("Twice"), "{composed}");
    }

    #[test]
    #[should_panic(expected = "A.tokn has no position in the prelude")]
    fn a_position_that_is_not_there_is_no_script() {
        compose("one", "#!lua\nreturn first[A.tokn]\n", PRELUDE);
    }
}
