//! One job per intent.
pub mod attempt;
pub mod config;
pub mod fingerprint;
pub mod job;
#[path = "store/private_redis.rs"]
pub mod private_redis;
pub mod provider;
