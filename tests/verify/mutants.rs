//! Planted bugs: edits of the shipped scripts that one of the two layers must notice.
//!
//! An edit replaces a text that stands in its file exactly once; one that is not found fails, so no mutant dies of old age. Every
//! mutant is killed by layer 2, which compares it with the specification. Where a property of layer 1 forbids it, layer 1 kills it
//! too, without the specification: there, the mutant itself keeps the job, and the world finds the harm.

use onejob::job::Class;
use onejob::store::Script;
use stateright::HasDiscoveries;

use crate::compose::compose;
use crate::document::leave;
use crate::explore::{Play, SHORT, explore};
use crate::host::Host;
use crate::properties::Broken;
use crate::redis::Redis;
use crate::sequences;

/// One planted bug.
pub struct Mutant {
    pub name: &'static str,
    /// The file under `lua/`, without its ending.
    pub file: &'static str,
    from: &'static str,
    to: &'static str,
    /// The small world in which it does harm, and the property of `Broken` that it breaks there.
    harm: Option<(&'static str, u32)>,
}

impl Mutant {
    /// The property of layer 1 that it breaks.
    pub fn breaks(&self) -> Option<&'static str> {
        self.harm.map(|(_, flag)| property(flag))
    }
}

/// Every one.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "the write-ahead is not fenced by its lease",
        file: "mark_running",
        from: "if attempt[A.lease_ms] <= now then",
        to: "if false then",
        harm: None,
    },
    Mutant {
        name: "the write-ahead is not fenced by a cancel",
        file: "mark_running",
        from: "if record[P.canceled_by] ~= '' then",
        to: "if false then",
        harm: None,
    },
    Mutant {
        name: "the write-ahead is written twice",
        file: "mark_running",
        from: "attempt[A.state] = 'running'\n",
        to: "attempt[A.state] = 'running'\nwrite(KEYS[1], record, now)\n",
        harm: None,
    },
    Mutant {
        name: "a token is not compared",
        file: "prelude",
        from: "if attempt and attempt[A.token] == token then",
        to: "if attempt then",
        harm: None,
    },
    Mutant {
        name: "unknown does not block",
        file: "begin_attempt",
        from: "ipairs({ 'unknown', 'starting' })",
        to: "ipairs({ 'starting' })",
        harm: Some(("an operator decides", Broken::EXECUTED)),
    },
    Mutant {
        name: "an attempt that is starting does not block",
        file: "begin_attempt",
        from: "ipairs({ 'unknown', 'starting' })",
        to: "ipairs({ 'unknown' })",
        harm: None,
    },
    Mutant {
        name: "an exclusive job races",
        file: "begin_attempt",
        from: "local raced = record[P.class] == 'race' and now",
        to: "local raced = now",
        harm: Some(("an operator decides", Broken::EXCLUSIVE)),
    },
    Mutant {
        name: "attempts begin after the end",
        file: "begin_attempt",
        from: "if ended(record) then",
        to: "if false then",
        harm: None,
    },
    Mutant {
        name: "attempts begin after a cancel",
        file: "begin_attempt",
        from: "if record[P.canceled_by] ~= '' then",
        to: "if false then",
        harm: None,
    },
    Mutant {
        name: "attempts begin past the deadline",
        file: "begin_attempt",
        from: "if deadline_passed(record, now) then",
        to: "if false then",
        harm: None,
    },
    Mutant {
        name: "another's hold is no obstacle",
        file: "begin_attempt",
        from: "if record[P.holder] ~= holder then",
        to: "if false then",
        harm: None,
    },
    Mutant {
        name: "a lapsed running attempt has failed",
        file: "tick_job",
        from: "local becomes = state == 'starting' and 'aborted' or 'unknown'",
        to: "local becomes = state == 'starting' and 'aborted' or 'failed'",
        harm: Some(("an operator decides", Broken::EXECUTED)),
    },
    Mutant {
        name: "a lease lapses a moment late",
        file: "tick_job",
        from: "attempt[A.lease_ms] <= now then",
        to: "attempt[A.lease_ms] < now then",
        harm: None,
    },
    Mutant {
        name: "a timeout is a failure",
        file: "finish_attempt",
        from: "close(attempt, now, 'unknown', reason)",
        to: "close(attempt, now, 'failed', reason)",
        harm: Some(("an operator decides", Broken::EXECUTED)),
    },
    Mutant {
        name: "a late success overwrites the result",
        file: "prelude",
        from: "return not ended(record) and record[P.completed_by] == 0 and attempt[A.version] == record[P.version]",
        to: "return true",
        harm: Some(("an operator decides", Broken::FINAL)),
    },
    Mutant {
        name: "a late success is ignored",
        file: "finish_attempt",
        from: "if judged or (",
        to: "if judged or was == 'unknown' or (",
        harm: None,
    },
    Mutant {
        name: "a success of a job that somebody cancels vanishes",
        file: "prelude",
        from: "return not ended(record) and",
        to: "return not ended(record) and record[P.canceled_by] == '' and",
        harm: None,
    },
    Mutant {
        name: "a finish sent again is another finish",
        file: "finish_attempt",
        from: "local same = was == outcome\n",
        to: "local same = false\n",
        harm: None,
    },
    Mutant {
        name: "a cancel is immediate",
        file: "cancel_job",
        from: "if mode == 'force' then\n  end_job",
        to: "if mode ~= '' then\n  end_job",
        harm: None,
    },
    Mutant {
        name: "there is no quarantine",
        file: "resolve_attempt",
        from: "if until_ms > now then",
        to: "if false then",
        harm: Some(("an operator decides", Broken::EXECUTED)),
    },
    Mutant {
        name: "a decision sent again is another decision",
        file: "resolve_attempt",
        from: "if remembers(record, request_id, number) then",
        to: "if false then",
        harm: None,
    },
    Mutant {
        name: "an open job expires",
        file: "prelude",
        from: "    redis.call('SET', key, packed)\n",
        to: "    redis.call('SET', key, packed, 'PX', text(record[P.policy][L.key_life_ms]))\n",
        harm: Some(("an operator decides", Broken::LIFE)),
    },
    Mutant {
        name: "an ended job lives for ever once it is touched",
        file: "prelude",
        from: "redis.call('SET', key, packed, 'KEEPTTL')",
        to: "redis.call('SET', key, packed)",
        harm: Some(("a cancel", Broken::LIFE)),
    },
    Mutant {
        name: "another incarnation is taken for this one",
        file: "prelude",
        from: "if job_id and record[P.job_id] ~= job_id then",
        to: "if false then",
        harm: None,
    },
    Mutant {
        name: "the clock runs backwards",
        file: "prelude",
        from: "if record and now < record[P.updated_ms] then",
        to: "if false then",
        harm: None,
    },
    Mutant {
        name: "an ending keeps the version",
        file: "prelude",
        from: "  record[P.version] = record[P.version] + 1\n  record[P.retain_until_ms]",
        to: "  record[P.retain_until_ms]",
        harm: Some(("an operator decides", Broken::VERSION)),
    },
    Mutant {
        name: "an abandoned attempt has failed",
        file: "prelude",
        from: "  if count.abandoned > 0 then\n",
        to: "  if false then\n",
        harm: Some(("an operator decides", Broken::TOLD_WRONG)),
    },
    Mutant {
        name: "a job that succeeded is replaced",
        file: "submit_job",
        from: "local released = known[P.state] == 'failed' and",
        to: "local released = ended(known) and",
        harm: Some(("a key is released", Broken::REPLACED)),
    },
    Mutant {
        name: "every job can be reopened",
        file: "reopen_job",
        from: "if record[P.state] ~= 'failed' then",
        to: "if not ended(record) then",
        harm: None,
    },
    Mutant {
        name: "a heartbeat revives what has lapsed before it was sent",
        file: "extend_lease",
        from: "if state == 'starting' and attempt[A.lease_ms] <= now then",
        to: "if false then",
        harm: None,
    },
];

const PRELUDE: &str = concat!(
    include_str!("../../lua/prelude.lua"),
    "\n",
    include_str!("../../lua/dedup_prelude.lua"),
    "\n",
    include_str!("../../lua/mirror_prelude.lua"),
);

macro_rules! sources {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../lua/", $name, ".lua")))),*] };
}

/// The scripts of a job.
const SOURCES: &[(&str, &str)] = sources!["submit_job" "begin_attempt" "mark_running" "extend_lease" "finish_attempt"
    "resolve_attempt" "note_attempt" "cancel_job" "tick_job" "reopen_job" "postpone_job" "read_job"];

/// The scripts of a job with a planted bug, or as they are sent to Redis.
pub fn host(mutant: Option<usize>) -> Host {
    let mutant = mutant.map(|place| &MUTANTS[place]);
    let edited = |name: &str, text: &'static str| match mutant {
        Some(mutant) if mutant.file == name => {
            assert_eq!(text.matches(mutant.from).count(), 1, "{}: {:?} in {name}", mutant.name, mutant.from);
            text.replace(mutant.from, mutant.to)
        }
        _ => text.to_owned(),
    };
    let prelude = edited("prelude", PRELUDE);
    Host::new(SOURCES.iter().map(|(name, source)| {
        let code = compose(name, &edited(name, source), &prelude);
        let shipped = Script::ALL.iter().find(|script| script.name() == *name).expect("a script");
        assert!(mutant.is_some() || code == shipped.code(), "{name} is not what is sent to Redis");
        (*name, code)
    }))
}

/// After how many calls layer 2 notices, and what.
fn noticed(place: usize) -> Option<(u64, String)> {
    let host = host(Some(place));
    let mut calls = 0;
    for (class, releases_on_failure, has_deadline) in
        [(Class::Exclusive, true, false), (Class::Exclusive, false, true), (Class::Race, false, false)]
    {
        let scene = sequences::Scene { class, releases_on_failure, has_deadline };
        match scene.explore(&host, sequences::SHORT) {
            Ok(tried) => calls += tried.calls,
            Err((tried, what)) => return Some((calls + tried.calls, what)),
        }
    }
    None
}

/// The name of a property.
fn property(flag: u32) -> &'static str {
    Broken::ALL.iter().find(|(_, known)| *known == flag).expect("a property").0
}

/// How many steps layer 1 tries at most before it takes a mutant for harmless.
const HARM_STEPS: usize = 400_000;

/// How many states layer 1 needs to find the harm, and the way there.
fn harmful(place: usize, world: &str, flag: u32) -> Option<(usize, String)> {
    let named = SHORT.iter().find(|named| named.name == world).expect("a small world");
    let play = Play { scene: named.scene, redis: Redis::scripts(Some(place)) };
    let explored = explore(play, HARM_STEPS, HasDiscoveries::AllOf([property(flag)].into()));
    let way = explored.broken.into_iter().find(|(name, _)| *name == property(flag))?.1;
    Some((explored.states, way))
}

#[test]
fn layer_2_notices_every_mutant() {
    let alive: Vec<&str> =
        (0..MUTANTS.len()).filter(|place| noticed(*place).is_none()).map(|place| MUTANTS[place].name).collect();
    assert!(alive.is_empty(), "they live: {alive:#?}");
}

#[test]
fn layer_1_finds_every_mutant_that_makes_an_intent_be_executed_twice() {
    let mut harmless = Vec::new();
    for (place, mutant) in MUTANTS.iter().enumerate() {
        match mutant.harm {
            Some((world, Broken::EXECUTED)) if harmful(place, world, Broken::EXECUTED).is_none() => harmless.push(mutant.name),
            _ => {}
        }
    }
    assert!(harmless.is_empty(), "they do no harm: {harmless:#?}");
}

#[test]
#[ignore = "minutes: make verify"]
fn the_table_of_mutants() {
    let mut table = String::from("| mutant | file | layer 2, after | layer 1, what breaks |\n|---|---|---:|---|\n");
    for (place, mutant) in MUTANTS.iter().enumerate() {
        let (calls, _) = noticed(place).unwrap_or_else(|| panic!("{} lives", mutant.name));
        let harm = mutant.harm.map_or("–".to_owned(), |(world, flag)| {
            let found = harmful(place, world, flag);
            let (states, _) = found.unwrap_or_else(|| panic!("in {world:?}, {} does no harm", mutant.name));
            format!("{} ({states} states of {world:?})", mutant.breaks().unwrap_or_default())
        });
        table.push_str(&format!("| {} | `{}` | {calls} calls | {harm} |\n", mutant.name, mutant.file));
    }
    leave("mutants", &table);
    println!("{} of {0} killed", MUTANTS.len());
}
