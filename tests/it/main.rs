//! The integration tests: one binary, one module a file, every test with a Redis of its own.
mod contract;
mod http_attempts;
mod http_auth;
mod http_health;
mod http_jobs;
mod http_limits;
mod http_proxy;
mod http_support;
mod http_wait;
