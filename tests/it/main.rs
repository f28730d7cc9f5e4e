//! Everything that needs a real Redis, a real provider or the whole program. One binary, each module a subject; `contract` is the
//! promise in four tests, `support` starts the real parts.

#![expect(clippy::unwrap_used, reason = "a test's helpers may panic too")]
#![expect(unreachable_pub, reason = "nothing is outside of a test binary")]
#![expect(clippy::large_futures, reason = "a test has its stack to itself")]

mod contract;

mod bench;
mod cases;
mod cli;
mod config;
mod http_attempts;
mod http_auth;
mod http_health;
mod http_jobs;
mod http_limits;
mod http_proxy;
mod http_support;
mod http_wait;
mod laws;
mod model;
mod private_redis;
mod provider_http;
mod random;
mod runtime;
mod scenes;
mod scripts;
mod simulated;
mod support;
mod tidy;
