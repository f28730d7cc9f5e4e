//! The state machine, explored rather than sampled: an executable specification (layer 1), the shipped scripts against it (layer 2),
//! and planted bugs that one of the two must find.
//!
//! docs/VERIFICATION.md tells what is covered and what is not, with the figures of the long form (`make verify`). Nothing here needs
//! a server, but for `against_redis`, which holds the in-memory one against a real one.

#![expect(unreachable_pub, reason = "nothing is outside of a test binary")]

mod against_redis;
mod calls;
#[path = "../../src/store/compose.rs"]
mod compose;
mod document;
mod explore;
mod host;
#[path = "../it/model.rs"]
mod model;
mod msgpack;
mod mutants;
mod properties;
mod redis;
mod sequences;
mod support;
mod view;
mod world;
