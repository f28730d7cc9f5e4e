//! Layer 1, run: the worlds of `world.rs` as `stateright` explores them, breadth first.
//!
//! The short form's worlds are small enough to be explored to their last state, in every run of the tests; those of the long form
//! (`make verify`) are explored to their last state or to a number of states.

use std::collections::BTreeSet;

use onejob::job::Class;
use stateright::{Checker as _, HasDiscoveries, Model, Property};

use crate::document::leave;
use crate::properties::{Broken, Seen};
use crate::redis::Redis;
use crate::world::{Act, Budget, Durability, Fault, Scene, World};

/// A scene, and who keeps the job in it.
#[derive(Clone)]
pub struct Play {
    pub scene: Scene,
    pub redis: Redis,
}

impl Model for Play {
    type State = World;
    type Action = Act;

    fn init_states(&self) -> Vec<World> {
        vec![self.scene.begin(self.redis.clone())]
    }

    fn actions(&self, world: &World, acts: &mut Vec<Act>) {
        self.scene.acts(world, acts);
    }

    fn next_state(&self, world: &World, act: Act) -> Option<World> {
        self.scene.step(world, act)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        macro_rules! always {
            ($($place:literal)*) => {
                vec![$(Property::always(Broken::ALL[$place].0, |_, world: &World| !world.broken.has(Broken::ALL[$place].1))),*]
            };
        }
        macro_rules! sometimes {
            ($($place:literal)*) => {
                vec![$(Property::sometimes(Seen::ALL[$place].0, |_, world: &World| world.seen.has(Seen::ALL[$place].1))),*]
            };
        }
        let mut all = always![0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16];
        all.extend(sometimes![0 1 2 3 4 5 6 7 8 9 10 11]);
        assert_eq!(all.len(), Broken::ALL.len() + Seen::ALL.len(), "every property is checked");
        all
    }
}

/// A world by its name.
pub struct Named {
    pub name: &'static str,
    pub scene: Scene,
}

const NONE: Budget =
    Budget { submits: 1, begins: 1, mishaps: 0, decisions: 0, cancels: 0, reopenings: 0, heartbeats: 0, failovers: 0 };

/// What the worlds are made from.
const SCENE: Scene = Scene {
    class: Class::Exclusive,
    gateways: 2,
    attempts_max: 2,
    releases_on_failure: false,
    has_deadline: false,
    durability: Durability::Single,
    budget: NONE,
    fault: None,
};

/// Explored whole, in every run of the tests.
pub const SHORT: &[Named] = &[
    Named { name: "a reply is lost", scene: Scene { budget: Budget { mishaps: 1, ..NONE }, ..SCENE } },
    Named { name: "an operator decides", scene: Scene { budget: Budget { decisions: 1, ..NONE }, ..SCENE } },
    Named { name: "a cancel", scene: Scene { budget: Budget { cancels: 1, ..NONE }, ..SCENE } },
    Named { name: "a race", scene: Scene { class: Class::Race, ..SCENE } },
    Named {
        name: "a failover of what was acknowledged",
        scene: Scene { durability: Durability::Replicated, budget: Budget { failovers: 1, ..NONE }, ..SCENE },
    },
    Named {
        name: "a failover that loses",
        scene: Scene { durability: Durability::Memory, budget: Budget { failovers: 1, submits: 2, begins: 0, ..NONE }, ..SCENE },
    },
    Named {
        name: "a key is released",
        scene: Scene { releases_on_failure: true, budget: Budget { submits: 2, begins: 0, reopenings: 1, ..NONE }, ..SCENE },
    },
    Named { name: "a deadline", scene: Scene { has_deadline: true, ..SCENE } },
];

/// The long form's, larger.
pub const LONG: &[Named] = &[
    Named {
        name: "lost, then decided",
        scene: Scene { budget: Budget { begins: 2, mishaps: 1, decisions: 1, ..NONE }, ..SCENE },
    },
    Named { name: "lost, then canceled", scene: Scene { budget: Budget { begins: 2, mishaps: 1, cancels: 1, ..NONE }, ..SCENE } },
    Named {
        name: "three gateways, three attempts",
        scene: Scene { gateways: 3, attempts_max: 3, budget: Budget { begins: 3, decisions: 1, ..NONE }, ..SCENE },
    },
    Named {
        name: "three gateways race",
        scene: Scene {
            class: Class::Race,
            gateways: 3,
            attempts_max: 3,
            budget: Budget { begins: 2, mishaps: 1, ..NONE },
            ..SCENE
        },
    },
    Named {
        name: "a race, canceled and decided",
        scene: Scene { class: Class::Race, budget: Budget { begins: 2, cancels: 1, decisions: 1, ..NONE }, ..SCENE },
    },
    Named {
        name: "failovers of what was acknowledged, a reply lost",
        scene: Scene {
            durability: Durability::Replicated,
            budget: Budget { mishaps: 1, decisions: 1, failovers: 2, ..NONE },
            ..SCENE
        },
    },
    Named {
        name: "failovers that lose, decided",
        scene: Scene { durability: Durability::Memory, budget: Budget { decisions: 1, failovers: 2, ..NONE }, ..SCENE },
    },
    Named {
        name: "released, lost, reopened",
        scene: Scene { releases_on_failure: true, budget: Budget { submits: 3, mishaps: 1, reopenings: 1, ..NONE }, ..SCENE },
    },
    Named {
        name: "a deadline, heartbeats, lost",
        scene: Scene { has_deadline: true, budget: Budget { mishaps: 1, heartbeats: 1, begins: 2, ..NONE }, ..SCENE },
    },
];

/// A bug of a gateway, and the world in which it is noticed.
pub struct Faulty {
    pub name: &'static str,
    pub scene: Scene,
}

/// Each makes an exclusive intent be executed once more than anybody accepted.
pub const FAULTS: &[Faulty] = &[
    Faulty { name: "a gateway sends although its lease is over", scene: faulty(Fault::IgnoresItsLease, DECIDED) },
    Faulty {
        name: "a gateway sends before its write-ahead is answered",
        scene: Scene { gateways: 1, ..faulty(Fault::SendsUnanswered, UNSENT) },
    },
    Faulty {
        name: "a gateway sends without a write-ahead",
        scene: faulty(Fault::SendsWhileStarting, Budget { mishaps: 0, ..UNSENT }),
    },
    Faulty { name: "a gateway is paused for longer than the quarantine", scene: faulty(Fault::IsPausedForever, DECIDED) },
    Faulty { name: "a gateway calls a timeout a failure", scene: faulty(Fault::TimeoutIsFailure, DECIDED) },
    Faulty { name: "an operator's word is taken for the provider's", scene: faulty(Fault::BelievesAtOnce, DECIDED) },
    Faulty {
        name: "a write-ahead is acknowledged before the replica has it",
        scene: Scene {
            durability: Durability::Replicated,
            budget: Budget { submits: 2, begins: 0, failovers: 1, ..NONE },
            fault: Some(Fault::DoesNotWait),
            ..SCENE
        },
    },
];

const DECIDED: Budget = Budget { decisions: 1, ..NONE };
const UNSENT: Budget = Budget { begins: 2, mishaps: 1, ..NONE };

const fn faulty(fault: Fault, budget: Budget) -> Scene {
    Scene { budget, fault: Some(fault), ..SCENE }
}

/// What was seen of a world.
pub struct Explored {
    pub states: usize,
    pub depth: usize,
    /// Explored to its last state.
    pub whole: bool,
    /// The properties that must hold, and did not, each with a way there.
    pub broken: Vec<(&'static str, String)>,
    pub seen: BTreeSet<&'static str>,
}

/// Explores a world, to a number of steps tried at most, until everything is seen or `until` is.
pub fn explore(play: Play, steps_max: usize, until: HasDiscoveries) -> Explored {
    let checker = play.checker().target_state_count(steps_max).finish_when(until).threads(2).spawn_bfs().join();
    let (mut broken, mut seen) = (Vec::new(), BTreeSet::new());
    for (name, path) in checker.discoveries() {
        if Broken::ALL.iter().any(|(known, _)| *known == name) {
            let way: Vec<String> = path.into_actions().iter().map(|act| format!("{act:?}")).collect();
            broken.push((name, way.join("\n")));
        } else {
            seen.insert(name);
        }
    }
    broken.sort_unstable();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    Explored { states, depth, whole: checker.state_count() < steps_max, broken, seen }
}

/// Explores a world of the specification, and fails with the way to whatever is broken.
pub fn explore_whole(named: &Named, steps_max: usize) -> Explored {
    let play = Play { scene: named.scene, redis: Redis::specification() };
    let explored = explore(play, steps_max, HasDiscoveries::All);
    if let Some((name, way)) = explored.broken.first() {
        panic!("in the world {:?} it is not so that {name}:\n{way}", named.name);
    }
    explored
}

/// A bound for worlds that must end by themselves.
const SMALL: usize = 2_000_000;

/// Explores a part of the small worlds whole; returns how many states they have, and what happened in them.
fn explore_small(worlds: &[Named]) -> (usize, BTreeSet<&'static str>) {
    let (mut states, mut seen) = (0, BTreeSet::new());
    for named in worlds {
        let began = std::time::Instant::now();
        let explored = explore_whole(named, SMALL);
        assert!(explored.whole, "the world {:?} is not small: {} states", named.name, explored.states);
        println!(
            "{}: {} states, {} steps deep, {:?}: {:?}",
            named.name,
            explored.states,
            explored.depth,
            began.elapsed(),
            explored.seen
        );
        states += explored.states;
        seen.extend(explored.seen);
    }
    (states, seen)
}

#[test]
fn nothing_is_broken_in_small_worlds() {
    let (states, seen) = explore_small(SHORT);
    assert!(states >= 100_000, "{states} states are too few to say something");
    let missing: Vec<&str> = Seen::ALL.iter().map(|(name, _)| *name).filter(|name| !seen.contains(name)).collect();
    assert!(missing.is_empty(), "never seen: {missing:?}");
}

#[test]
fn the_shipped_scripts_make_the_same_worlds() {
    for named in [&SHORT[1], &SHORT[5], &SHORT[6]] {
        let specified = explore_whole(named, SMALL);
        let play = Play { scene: named.scene, redis: Redis::scripts(None) };
        let explored = explore(play, SMALL, HasDiscoveries::All);
        assert_eq!(explored.broken, [], "in the world {:?}", named.name);
        assert_eq!((explored.states, explored.seen), (specified.states, specified.seen), "in the world {:?}", named.name);
    }
}

#[test]
fn a_gateway_that_breaks_the_rules_makes_an_intent_be_executed_twice() {
    let executed = Broken::ALL.iter().find(|(_, flag)| *flag == Broken::EXECUTED).expect("a property").0;
    for Faulty { name, scene } in FAULTS {
        let play = Play { scene: *scene, redis: Redis::specification() };
        let explored = explore(play, SMALL, HasDiscoveries::AllOf([executed].into()));
        assert!(
            explored.broken.iter().any(|(broken, _)| *broken == executed),
            "nobody notices that {name}: {:?}",
            explored.broken
        );
        println!("{name}: {} states", explored.states);
    }
}

/// How many steps the long form tries in a world at most.
const LONG_STEPS: usize = 4_000_000;

#[test]
#[ignore = "minutes: make verify"]
fn the_long_form() {
    let mut total = 0;
    let mut table = String::from("| world | states | steps deep | explored | violations |\n|---|---:|---:|---|---:|\n");
    for named in SHORT.iter().chain(LONG) {
        let explored = explore_whole(named, LONG_STEPS);
        let how = if explored.whole { "whole" } else { "in part" };
        table.push_str(&format!("| {} | {} | {} | {how} | 0 |\n", named.name, explored.states, explored.depth));
        total += explored.states;
    }
    leave("worlds", &format!("{table}| all | {total} | | | 0 |\n"));
    assert!(total >= 1_000_000, "{total} states are too few for the long form");
}
