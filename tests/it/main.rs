//! Everything that needs a real Redis, a real provider or the whole program. One binary, each module a subject.

mod config;
