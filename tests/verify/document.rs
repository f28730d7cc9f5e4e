//! docs/VERIFICATION.md names what is here, and nothing else: every world, property, fault and mutant has its row.
//!
//! The long forms leave their tables in [`tables`], and the last step of `make verify` puts them into the document, each between
//! the comments with its name.

use std::path::PathBuf;
use std::time::Duration;

use crate::explore::{FAULTS, LONG, SHORT};
use crate::mutants::MUTANTS;
use crate::properties::{Broken, Seen};

const DOCUMENT: &str = include_str!("../../docs/VERIFICATION.md");

/// The tables that one `make verify` makes.
const TABLES: [&str; 5] = ["worlds", "sequences", "mutants", "histories", "durability"];

/// Where the long forms leave their tables. `make verify` empties it first.
fn tables() -> PathBuf {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    target.parent().expect("a directory in the target directory").join("verify")
}

/// Prints a table of the document, and leaves it for it.
pub fn leave(name: &str, table: &str) {
    assert!(TABLES.contains(&name), "{name}");
    println!("\n{table}");
    std::fs::create_dir_all(tables()).expect("a directory");
    std::fs::write(tables().join(name).with_extension("md"), table).expect("a file");
}

/// The document with another text in the place of that name.
fn with(document: &str, name: &str, text: &str) -> String {
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->"));
    let place = document.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
    let (before, after) = place.unwrap_or_else(|| panic!("no place {name:?} in the document"));
    format!("{before}{begin}{text}\n{end}{after}")
}

/// The cells of a chapter's tables, without their heads.
fn rows(chapter: &str) -> Vec<Vec<&'static str>> {
    let begin = format!("## {chapter}\n");
    let text = DOCUMENT.split_once(&begin).unwrap_or_else(|| panic!("no chapter {chapter:?}")).1;
    let text = text.split("\n## ").next().unwrap_or(text);
    let lines = text.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    lines.filter_map(|line| line.strip_prefix("| ")).map(|line| line.trim_end_matches(" |").split(" | ").collect()).collect()
}

fn first(chapter: &str) -> Vec<&'static str> {
    rows(chapter).into_iter().map(|row| row[0]).collect()
}

#[test]
fn the_document_has_every_world_property_and_fault() {
    let worlds: Vec<&str> = SHORT.iter().chain(LONG).map(|named| named.name).chain(["all"]).collect();
    assert_eq!(first("Worlds"), worlds);
    assert_eq!(first("What must hold"), Broken::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    assert_eq!(first("What must happen"), Seen::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    assert_eq!(first("Gateways that break the rules"), FAULTS.iter().map(|fault| fault.name).collect::<Vec<_>>());
}

#[test]
fn the_document_has_every_mutant_and_what_it_breaks() {
    let rows = rows("Mutants");
    assert_eq!(rows.len(), MUTANTS.len());
    for (row, mutant) in rows.iter().zip(MUTANTS) {
        assert_eq!((row[0], row[1]), (mutant.name, format!("`{}`", mutant.file).as_str()));
        assert!(row[2].ends_with(" calls"), "{row:?}");
        assert_eq!(row[3].split_once(" (").map_or(row[3], |(harm, _)| harm), mutant.breaks().unwrap_or("–"), "{row:?}");
    }
}

#[test]
fn a_table_takes_the_place_of_the_one_before() {
    let document = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n<!-- y -->\nstays\n<!-- /y -->\n";
    assert_eq!(with(document, "x", "new"), document.replace("old", "new"));
    for name in TABLES.iter().chain(&["run"]) {
        assert_ne!(with(DOCUMENT, name, "new"), DOCUMENT);
    }
}

#[test]
#[ignore = "the last step of make verify"]
fn the_tables_are_written() {
    let mut document = DOCUMENT.to_owned();
    for name in TABLES {
        let file = tables().join(name).with_extension("md");
        let table = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("the table {name:?} was not made: {error}"));
        document = with(&document, name, table.trim());
    }
    let began = std::fs::metadata(tables().join("began")).and_then(|began| began.modified()).expect("when it began");
    let minutes = began.elapsed().unwrap_or_default().div_duration_f64(Duration::from_secs(60));
    let cores = std::thread::available_parallelism().expect("a number of cores");
    let run = format!("The tables of this page were made in one run, of {minutes:.0} minutes, on {cores} cores.");
    document = with(&document, "run", &run);
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/VERIFICATION.md");
    std::fs::write(file, document).expect("a file");
}
