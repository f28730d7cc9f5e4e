//! The integration tests, one binary. Each test has a Redis of its own; `support` starts it.

mod support;

mod cases;
mod laws;
mod model;
mod random;
mod scenes;
mod scripts;
