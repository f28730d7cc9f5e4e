//! One job per intent.
pub mod attempt;
pub mod config;
pub mod fingerprint;
pub mod job;
pub mod provider;
