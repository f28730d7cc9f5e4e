//! One job per intent: idempotent submission, guarded attempts and exactly one result, over Redis.
//!
//! A user clicks, the request hangs, the user clicks again. Two processes now run for one intention: double charges, duplicate
//! GPU runs, corrupted data. onejob ends that. The one sentence: **a timeout is `unknown`, never `failed`; it blocks new attempts
//! until something proves what happened; exactly one result wins.**
//!
//! - [`Runtime`](runtime::Runtime): submit an intent, wait for its result. Most users need nothing else.
//! - [`Provider`](provider::Provider): what does the work; [`HttpProvider`](provider::http::HttpProvider) is one.
//! - [`Store`](store::Store): one method per Lua script, for executors of one's own.
//!
//! # Trade-offs
//!
//! Every job costs two round trips to Redis and a record of some hundred bytes until its key expires. All state is in Redis: it
//! must not evict, and what it loses is lost. An unknown attempt blocks its key until it is resolved; that is the point, and it
//! needs somebody who resolves.
//!
//! # Example
//!
//! `examples/submit_and_wait.rs` starts a Redis, a provider and a runtime; `examples/own_provider.rs` has a provider in Rust. In
//! short:
//!
//! ```no_run
//! use std::time::Duration;
//! use onejob::runtime::{Runtime, Submission, WaitFor};
//!
//! # async fn example(runtime: Runtime, submission: Submission) -> Result<(), Box<dyn std::error::Error>> {
//! let receipt = runtime.submit(submission).await?; // the same intent, the same job
//! let job = runtime.wait(receipt.job.id, WaitFor::Settled, Duration::from_secs(60)).await?;
//! println!("{} is {}", job.id, job.state);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! `gateway` (default): the HTTP server, the command line and the programmable provider. Without it: the library alone.
//! `tokenizers` (default): prompts are counted offline with the tokenizer of their model; a heavy build.
//! `failpoints`: for the tests of deaths; a release build refuses it.

pub mod attempt;
pub mod config;
pub mod dedup;
pub mod error;
pub mod failpoint;
pub mod fingerprint;
pub mod job;
pub mod metrics;
mod place;
pub mod policy;
pub mod provider;
pub mod qualify;
pub mod runtime;
#[cfg(feature = "gateway")]
pub mod server;
pub mod store;
pub mod validate;
