//! Layer 4 of docs/VERIFICATION.md: what a few workers did to one job while something was broken, and whether it can be explained.
//!
//! A history is every call with what was answered, or that nothing was; `check` looks for an order in which the specification
//! (`model`) gives the same answers, real time and the record at the end included.

mod check;
mod check_cases;
mod executions;
mod file;
mod frames;
mod history;
mod house;
mod keyspace;
mod kinds;
mod mutants;
mod round;
mod told;
mod wire;
mod worker;

use std::time::Instant;

use futures_util::future::join_all;

use crate::fleet::dice::{seed, setting};
use kinds::Kind;
use round::{Figures, play};
use wire::Planted;

/// Histories of one kind in the short form.
const SHORT: usize = 30;
/// Histories that the short form has at least.
const SHORT_MIN: usize = 200;
/// Bytes of the file between the borders of calls at which the short form cuts it.
const SHORT_CUTS: usize = 20;
/// Histories of one round in the long form.
const LONG: usize = 45;
/// Rounds of one kind in the long form, unless `ONEJOB_HISTORIES_ROUNDS` says otherwise.
const LONG_ROUNDS: u64 = 7;
/// Histories that the long form has at least.
const LONG_MIN: usize = 2_000;
/// How often a round is played again that a busy machine made too long.
const TRIES_MAX: u64 = 3;

/// The share of operations that must be answered.
const ANSWERED_MIN: f64 = 0.3;
/// The share that must be of unknown outcome.
const UNKNOWN_MIN: f64 = 0.05;

/// The share of jobs that must have succeeded.
const SUCCEEDED_MIN: f64 = 0.05;

/// What everything by chance is drawn from.
type Seed = u64;

/// Plays rounds of a kind, with nothing planted.
async fn rounds(kind: Kind, seed: Seed, rounds: u64, jobs: usize) -> Figures {
    let mut figures = Figures::default();
    for round in 0..rounds {
        let mut played = None;
        for again in 0..TRIES_MAX {
            played = play(kind, seed + round * TRIES_MAX + again, jobs, Planted::default()).await;
            if played.is_some() {
                break;
            }
        }
        figures.add(played.expect("a round that is not too long"));
    }
    figures
}

/// A run in which nothing could be done shows nothing.
fn judge(what: &str, figures: &Figures) {
    let share = |part: usize, of: usize| part as f64 / of as f64;
    assert!(figures.violations.is_empty(), "{what}: {}", figures.violations.join("\n"));
    let answered = share(figures.answered, figures.operations);
    assert!(answered > ANSWERED_MIN, "{what}: only {answered:.2} of the operations were answered: {figures:?}");
    let unknown = share(figures.unknown, figures.operations);
    assert!(unknown >= UNKNOWN_MIN, "{what}: only {unknown:.3} of the operations are of unknown outcome: {figures:?}");
    let succeeded = share(figures.succeeded, figures.histories);
    // A file is whole at its last byte only.
    let least = if what == FILE { 0.0 } else { SUCCEEDED_MIN };
    assert!(succeeded > least, "{what}: only {succeeded:.2} of the jobs succeeded: {figures:?}");
    let met = what == FILE || figures.meetings > figures.histories;
    assert!(met, "{what}: hardly any calls of a job were under way at the same time: {figures:?}");
    assert!(figures.executions > figures.histories / 3, "{what}: hardly anything was executed: {figures:?}");
}

/// One round of each of these kinds, side by side: most of the time they wait.
async fn short(kinds: &[Kind]) {
    let seed = seed();
    println!("ONEJOB_SEED={seed}");
    let played = join_all(kinds.iter().map(|kind| rounds(*kind, seed, 1, SHORT))).await;
    for (kind, figures) in kinds.iter().zip(played) {
        println!("{}: {figures:?}", kind.name());
        judge(kind.name(), &figures);
    }
}

macro_rules! short {
    ($($test:ident $($kind:ident)+;)*) => {
        /// The kinds of the short form.
        const SHORT_KINDS: &[Kind] = &[$($(Kind::$kind),+),*];

        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                short(&[$(Kind::$kind),+]).await;
            }
        )*
    };
}

short! {
    histories_with_calls_lost_or_sent_twice_or_late_are_linearizable Lost Twice Held;
    histories_over_a_redis_that_dies_or_stops_or_sleeps_are_linearizable Killed Paused Slept;
    histories_over_a_redis_that_cuts_and_forgets_are_linearizable Cut Forgotten;
    histories_over_a_redis_that_refuses_are_linearizable Memory NoReplicas;
    histories_of_what_was_acknowledged_across_a_failover_are_linearizable Failover;
    histories_over_slots_that_move_are_linearizable Slots;
}

#[test]
fn the_short_form_has_every_kind_and_histories_enough() {
    assert!(Kind::ALL.iter().all(|kind| SHORT_KINDS.contains(kind)));
    assert!(SHORT_KINDS.len() * SHORT >= SHORT_MIN);
}

/// A test of its own: the server starts once a cut.
#[tokio::test]
async fn a_file_that_is_cut_at_a_byte_holds_a_state_that_the_job_was_in() {
    let seed = seed();
    println!("ONEJOB_SEED={seed}");
    let figures = file::some_cuts(seed, SHORT_CUTS).await;
    judge(FILE, &figures);
}

/// The name of what `file` does, for the table.
const FILE: &str = "the file is cut at a byte of its tail";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes: make histories"]
async fn the_long_form() {
    let seed = seed();
    println!("ONEJOB_SEED={seed}");
    let played = setting("ONEJOB_HISTORIES_ROUNDS").unwrap_or(LONG_ROUNDS);
    let mut table =
        "| kind | histories | operations | of unknown outcome | longest | configurations at most | violations |\n".to_owned();
    table.push_str("|---|---:|---:|---:|---:|---:|---:|\n");
    let (mut all, mut kinds) = (Figures::default(), Vec::new());
    let mut told = |name: &'static str, figures: &Figures| {
        let percent = 100.0 * figures.unknown as f64 / figures.operations as f64;
        let Figures { histories, operations, longest, configurations, violations, .. } = figures;
        let violations = violations.len();
        table.push_str(&format!(
            "| {name} | {histories} | {operations} | {percent:.1} % | {longest} | {configurations} | {violations} |\n"
        ));
    };
    for kind in Kind::ALL {
        let began = Instant::now();
        let figures = rounds(kind, seed, played, LONG).await;
        eprintln!("{}: {:?}: {figures:?}", kind.name(), began.elapsed());
        assert!(played < LONG_ROUNDS || figures.histories * Kind::ALL.len() >= LONG_MIN, "{} histories", figures.histories);
        kinds.push((kind.name(), figures));
    }
    kinds.push((FILE, file::every_cut(seed).await));
    for (name, figures) in &kinds {
        told(name, figures);
        all.add(figures.clone());
    }
    told("all", &all);
    println!("\n{table}");
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("target/verify");
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("histories.md"), table).unwrap();
    for (name, figures) in &kinds {
        judge(name, figures);
    }
    judge("all", &all);
}

/// The document's table has a row for each kind, where it has been filled in at all.
#[test]
fn the_document_has_every_kind_of_history() {
    let document = include_str!("../../../docs/VERIFICATION.md");
    let (_, rest) = document.split_once("<!-- histories -->\n").expect("the beginning of the table");
    let (table, _) = rest.split_once("<!-- /histories -->").expect("its end");
    let rows: Vec<&str> = table.lines().skip(2).filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).collect();
    let kinds: Vec<&str> = Kind::ALL.into_iter().map(Kind::name).chain([FILE, "all"]).collect();
    assert_eq!(rows, kinds);
}
