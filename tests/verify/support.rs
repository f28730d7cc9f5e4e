//! What the two models and the calls of `tests/it` need of their surroundings, on a clock that passes in whole ticks.
//!
//! Every duration is a whole number of ticks, so each limit is met exactly, a tick before and a tick after.

#[expect(dead_code, reason = "the calls are shared with tests/it, which sends them to a real Redis")]
#[path = "../it/support/call.rs"]
mod call;

#[expect(dead_code, reason = "its process is for tests/it")]
#[path = "../it/support/server.rs"]
pub mod server;

pub use call::{Call, First, Submission};

/// Time passes in steps of this.
pub const TICK_MS: u64 = 100_000;
/// How long a lease runs.
pub const LEASE_MS: u64 = TICK_MS;
/// How long an attempt of a race runs before another may begin.
pub const RACE_AFTER_MS: u64 = TICK_MS;
/// How long "it never happened" is not believed: longer than a gateway is ever paused before it sends.
pub const QUARANTINE_MS: u64 = 2 * TICK_MS;
/// How long input and result are kept.
pub const RETENTION_MS: u64 = 3 * TICK_MS;
/// How long a key lives from the end of its job.
pub const KEY_LIFE_MS: u64 = 4 * TICK_MS;
/// A deadline, where there is one.
pub const DEADLINE_MS: u64 = 2 * TICK_MS;
