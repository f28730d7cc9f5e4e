//! Everything that needs a real Redis, a real provider or the whole program. One binary, each module a subject; `contract` is the
//! promise in four tests, `support` starts the real parts.

#![recursion_limit = "256"]
#![expect(clippy::unwrap_used, reason = "a test's helpers may panic too")]
#![expect(unreachable_pub, reason = "nothing is outside of a test binary")]
#![expect(clippy::large_futures, reason = "a test has its stack to itself")]

mod contract;

mod bench;
mod blobs;
mod bounds;
mod bounds_record;
mod bounds_sweeps;
mod cases;
mod cli;
mod cluster;
mod config;
mod dashboards;
mod dedup;
mod dedup_edges;
mod dedup_faults;
mod dedup_filter;
mod dedup_front;
mod dedup_layer;
mod dedup_mirror;
mod duplicates;
mod durability;
mod fleet;
mod histories;
mod http_attempts;
mod http_auth;
mod http_dedup;
mod http_dedup_lines;
mod http_health;
mod http_jobs;
mod http_limits;
mod http_proxy;
mod http_streams;
mod http_support;
mod http_wait;
mod http_webhooks;
#[cfg(feature = "failpoints")]
mod killed;
mod laws;
mod log;
mod model;
mod presets;
mod private_redis;
mod processes;
mod provider_async;
mod provider_h2;
mod provider_http;
mod qualified;
mod qualify;
mod random;
mod real_model;
mod redis_faults;
mod runtime;
mod scenes;
mod scripts;
mod simulated;
mod storm;
mod support;
mod tidy;
