//! Tests against the real things: real HTTP on loopback.
mod provider_http;
mod simulated;
