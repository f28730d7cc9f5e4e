//! Everything that needs a real Redis, a real provider or the whole program. One binary, each module a subject.

#![expect(clippy::unwrap_used, reason = "a test's helpers may panic too")]

mod cli;
mod config;
mod private_redis;
mod tidy;
