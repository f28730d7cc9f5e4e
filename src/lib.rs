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
pub mod store;
