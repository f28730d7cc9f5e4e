//! Bugs planted in the scripts while they are on the wire: histories under faults must find each.
//!
//! `tests/verify` has more of them, and finds each without a server; here it is the check of histories that is to be shown to work.

use std::sync::Arc;

use onejob::store::Script;

use super::kinds::Kind;
use super::round::play;
use super::wire::Planted;
use crate::fleet::dice::seed;

/// Jobs of one round.
const JOBS: usize = 40;
/// Rounds until a bug must have been found.
const ROUNDS_MAX: u64 = 8;

const PRELUDE: &str = concat!(
    include_str!("../../../lua/prelude.lua"),
    "\n",
    include_str!("../../../lua/dedup_prelude.lua"),
    "\n",
    include_str!("../../../lua/mirror_prelude.lua"),
);

/// A bug: an edit of one file, by which all the scripts that contain it are wrong.
struct Mutant {
    /// The file under `lua/`, without its ending.
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

macro_rules! sources {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../../lua/", $name, ".lua")))),*] };
}

/// The scripts of a job that change it.
const SOURCES: &[(&str, &str)] = sources!["submit_job" "begin_attempt" "mark_running" "extend_lease" "finish_attempt"
    "resolve_attempt" "note_attempt" "cancel_job" "tick_job" "reopen_job" "postpone_job"];

impl Mutant {
    /// The texts to be sent in the place of the shipped ones.
    fn planted(&self) -> Planted {
        let edited = |name: &str, text: &str| {
            if name != self.file {
                return text.to_owned();
            }
            assert_eq!(text.matches(self.from).count(), 1, "{:?} in {name}", self.from);
            text.replace(self.from, self.to)
        };
        let prelude = edited("prelude", PRELUDE);
        let wrong = SOURCES.iter().filter(|(name, _)| [*name, "prelude"].contains(&self.file));
        Arc::new(
            wrong
                .map(|(name, source)| {
                    assert!(Script::ALL.iter().any(|script| script.name() == *name), "{name} is not sent to Redis");
                    let source = edited(name, source);
                    let (shebang, body) = source.split_once('\n').expect("a script begins with its #!lua line");
                    (*name, format!("{shebang}\nlocal SCRIPT = '{name}'\n{prelude}{body}"))
                })
                .collect(),
        )
    }
}

/// How a history that cannot be explained is told.
const NOT_LINEARIZABLE: &str = ": Not\n";

/// Plays rounds until something is found that is told so.
async fn is_found(kind: Kind, planted: Planted, told: &str) {
    let seed = seed();
    let mut histories = 0;
    for round in 0..ROUNDS_MAX {
        let Some(figures) = play(kind, seed + round, JOBS, Planted::clone(&planted)).await else { continue };
        histories += figures.histories;
        if let Some(found) = figures.violations.iter().find(|found| found.contains(told)) {
            println!("found in {histories} histories; {} violations in the last round\n{found}", figures.violations.len());
            return;
        }
    }
    panic!("seed {seed}: {histories} histories, and nothing is told as {told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn histories_find_that_nobody_waits_for_the_replica() {
    is_found(Kind::Loses, Planted::default(), NOT_LINEARIZABLE).await;
}

macro_rules! mutants {
    ($($test:ident $kind:ident $told:expr, $file:literal $from:literal => $to:literal)*) => { $(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            is_found(Kind::$kind, Mutant { file: $file, from: $from, to: $to }.planted(), $told).await;
        }
    )* };
}

mutants! {
    histories_find_that_unknown_does_not_block Lost NOT_LINEARIZABLE,
        "begin_attempt" "ipairs({ 'unknown', 'starting' })" => "ipairs({ 'starting' })"
    histories_find_that_a_lapsed_attempt_is_taken_for_failed Paused NOT_LINEARIZABLE,
        "tick_job" "local becomes = state == 'starting' and 'aborted' or 'unknown'"
            => "local becomes = state == 'starting' and 'aborted' or 'failed'"
    histories_find_that_a_late_success_overwrites_the_result Lost NOT_LINEARIZABLE,
        "prelude" "return not ended(record) and record[P.completed_by] == 0 and attempt[A.version] == record[P.version]"
            => "return true"
    histories_find_that_a_finish_sent_again_is_another_finish Twice NOT_LINEARIZABLE,
        "finish_attempt" "local same = was == outcome\n" => "local same = false\n"
    histories_find_that_another_incarnation_is_taken_for_this_one Held NOT_LINEARIZABLE,
        "prelude" "if job_id and record[P.job_id] ~= job_id then" => "if false then"
    the_keys_at_the_end_show_that_open_jobs_expire Forgotten " and lives for ",
        "prelude" "    redis.call('SET', key, packed)\n"
            => "    redis.call('SET', key, packed, 'PX', text(record[P.policy][L.key_life_ms]))\n"
    the_keys_at_the_end_show_that_a_state_is_not_what_follows Cut " follows from its attempts",
        "prelude" "  record[P.state] = derive(record)\n  record[P.updated_ms] = now" => "  record[P.updated_ms] = now"
    the_ledger_shows_that_an_exclusive_job_races Lost "executed twice",
        "begin_attempt" "local raced = record[P.class] == 'race' and now" => "local raced = now"
}
