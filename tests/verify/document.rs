//! docs/VERIFICATION.md names what is here, and nothing else: every world, property, fault and mutant has its row.

use crate::explore::{FAULTS, LONG, SHORT};
use crate::mutants::MUTANTS;
use crate::properties::{Broken, Seen};

const DOCUMENT: &str = include_str!("../../docs/VERIFICATION.md");

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
