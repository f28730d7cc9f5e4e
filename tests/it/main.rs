//! Everything that needs a real Redis, a real provider or the whole program. One binary, each module a subject.

#![expect(clippy::unwrap_used, reason = "a test's helpers may panic too")]

mod cli;
mod config;
mod contract;
mod http_attempts;
mod http_auth;
mod http_health;
mod http_jobs;
mod http_limits;
mod http_proxy;
mod http_support;
mod http_wait;
mod private_redis;
mod tidy;
