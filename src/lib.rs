//! One job per intent.
pub mod attempt;
pub mod config;
pub mod error;
pub mod fingerprint;
pub mod job;
pub mod metrics;
pub mod policy;
pub mod provider;
pub mod runtime;
#[cfg(feature = "gateway")]
pub mod server;
pub mod store;
