//! The only place where a metric is named: every name, label and bucket.
//!
//! Label values come from closed sets: words of the protocol, and names from the configuration. Never a key, an owner, a job id
//! or a text from outside. The gauges are kept by the runtime; a scrape reads memory and costs Redis nothing.

use std::time::Duration;

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

/// Submits by result: `created`, `existing`, `conflict`, `gone`, `collision`, `refused`, `error`.
pub const SUBMITS: &str = "onejob_submits_total";
/// Attempts by provider and outcome: `succeeded`, `rejected`, `not_sent`, `invalid_output`, `unknown`.
pub const ATTEMPTS: &str = "onejob_attempts_total";
/// Results by fate: `won`, `discarded`.
pub const RESULTS: &str = "onejob_results_total";
/// Successes that arrived after their attempt had been called unknown, failed, canceled or abandoned.
pub const LATE_RESULTS: &str = "onejob_late_results_total";
/// Jobs ended, by state.
pub const JOBS_ENDED: &str = "onejob_jobs_ended_total";
/// Open jobs: `pending`, `running` and `canceling` (as of the last heartbeat) on this gateway,
/// `unknown` and `open` in the whole store.
pub const JOBS_OPEN: &str = "onejob_jobs_open";
/// The age of the oldest unknown job in the store.
pub const OLDEST_UNKNOWN: &str = "onejob_oldest_unknown_seconds";
/// How long a script took, from this gateway, by script.
pub const SCRIPT_SECONDS: &str = "onejob_script_duration_seconds";
/// Errors of the store by class: `not_executed`, `ambiguous`, `fatal`.
pub const STORE_ERRORS: &str = "onejob_store_errors_total";
/// A job's time on this gateway besides its calls to providers and the delays between them.
pub const OVERHEAD_SECONDS: &str = "onejob_overhead_seconds";
/// Jobs of other gateways that this one went on with.
pub const ADOPTIONS: &str = "onejob_adoptions_total";
/// What the sweeper did: `aborted`, `unknown`, `poisoned`, `deadline`, `stripped`, `hint_dropped`, `hint_repaired`.
pub const SWEEPS: &str = "onejob_sweeps_total";
/// Connections to Redis built anew, by why.
pub const LANES_REBUILT: &str = "onejob_lanes_rebuilt_total";
/// Failovers that were not allowed, by route.
pub const FAILOVERS_DENIED: &str = "onejob_failovers_denied_total";
/// Attempts that were not sent because their lease had run out.
pub const FENCED: &str = "onejob_fenced_total";
/// HTTP requests by what was asked and by status class.
pub const HTTP_REQUESTS: &str = "onejob_http_requests_total";
/// Requests that wait for a job.
pub const WAITERS: &str = "onejob_waiters";
/// 1 while Redis may evict open jobs and somebody allowed it.
pub const EVICTION_ALLOWED: &str = "onejob_eviction_allowed";
/// Results in hand that the store has not taken yet.
pub const RESULTS_IN_HAND: &str = "onejob_results_in_hand";
/// Results that wait in the spool directory.
pub const SPOOL_RESULTS: &str = "onejob_spool_results";
/// Files of the spool by fate: `written`, `stored`, `bad`, `orphan`, `refused`.
pub const SPOOLED: &str = "onejob_spooled_total";

/// Upper bounds of the histograms, in seconds.
pub const SECONDS_BUCKETS: [f64; 14] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// Every metric with its kind, for dashboards and tests.
pub const ALL: [(&str, Kind); 21] = [
    (SUBMITS, Kind::Counter),
    (ATTEMPTS, Kind::Counter),
    (RESULTS, Kind::Counter),
    (LATE_RESULTS, Kind::Counter),
    (JOBS_ENDED, Kind::Counter),
    (JOBS_OPEN, Kind::Gauge),
    (OLDEST_UNKNOWN, Kind::Gauge),
    (SCRIPT_SECONDS, Kind::Histogram),
    (STORE_ERRORS, Kind::Counter),
    (OVERHEAD_SECONDS, Kind::Histogram),
    (ADOPTIONS, Kind::Counter),
    (SWEEPS, Kind::Counter),
    (LANES_REBUILT, Kind::Counter),
    (FAILOVERS_DENIED, Kind::Counter),
    (FENCED, Kind::Counter),
    (HTTP_REQUESTS, Kind::Counter),
    (WAITERS, Kind::Gauge),
    (EVICTION_ALLOWED, Kind::Gauge),
    (RESULTS_IN_HAND, Kind::Gauge),
    (SPOOL_RESULTS, Kind::Gauge),
    (SPOOLED, Kind::Counter),
];

/// What kind of metric a name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Durations in buckets.
    Histogram,
}

/// Describes every metric to the recorder. Call once, after installing one.
pub fn describe() {
    describe_counter!(SUBMITS, "Submits by result.");
    describe_counter!(ATTEMPTS, "Attempts by provider and outcome.");
    describe_counter!(RESULTS, "Results by fate: won or discarded.");
    describe_counter!(LATE_RESULTS, "Successes that arrived after their attempt had been given up.");
    describe_counter!(JOBS_ENDED, "Jobs ended by this gateway, by state.");
    describe_gauge!(JOBS_OPEN, "Open jobs: pending, running, canceling on this gateway; unknown and open in the store.");
    describe_gauge!(OLDEST_UNKNOWN, Unit::Seconds, "Age of the oldest unknown job in the store.");
    describe_histogram!(SCRIPT_SECONDS, Unit::Seconds, "Round trip of a script, by script.");
    describe_counter!(STORE_ERRORS, "Errors of the store by class.");
    describe_histogram!(
        OVERHEAD_SECONDS,
        Unit::Seconds,
        "A job's time on a gateway besides its calls to providers and the delays between them."
    );
    describe_counter!(ADOPTIONS, "Jobs of other gateways that this one went on with.");
    describe_counter!(SWEEPS, "What the sweeper did.");
    describe_counter!(LANES_REBUILT, "Connections to Redis built anew.");
    describe_counter!(FAILOVERS_DENIED, "Failovers that were not allowed, by route.");
    describe_counter!(FENCED, "Attempts not sent because their lease had run out.");
    describe_counter!(HTTP_REQUESTS, "HTTP requests by operation and status class.");
    describe_gauge!(WAITERS, "Requests that wait for a job.");
    describe_gauge!(EVICTION_ALLOWED, "1 while Redis may evict open jobs and somebody allowed it.");
    describe_gauge!(RESULTS_IN_HAND, "Results in hand that the store has not taken yet.");
    describe_gauge!(SPOOL_RESULTS, "Results that wait in the spool directory.");
    describe_counter!(SPOOLED, "Files of the spool by fate.");
}

pub(crate) fn submit(result: &'static str) {
    counter!(SUBMITS, "result" => result).increment(1);
}

pub(crate) fn attempt(provider: &str, outcome: &'static str) {
    counter!(ATTEMPTS, "provider" => provider.to_owned(), "outcome" => outcome).increment(1);
}

pub(crate) fn result(fate: &'static str) {
    counter!(RESULTS, "fate" => fate).increment(1);
}

pub(crate) fn late_result() {
    counter!(LATE_RESULTS).increment(1);
}

pub(crate) fn job_ended(state: &'static str) {
    counter!(JOBS_ENDED, "state" => state).increment(1);
}

pub(crate) fn jobs_open(state: &'static str, jobs: u64) {
    gauge!(JOBS_OPEN, "state" => state).set(jobs as f64);
}

pub(crate) fn oldest_unknown(age: Duration) {
    gauge!(OLDEST_UNKNOWN).set(age.as_secs_f64());
}

pub(crate) fn script(name: &'static str, took: Duration) {
    histogram!(SCRIPT_SECONDS, "script" => name).record(took.as_secs_f64());
}

pub(crate) fn store_error(class: &'static str) {
    counter!(STORE_ERRORS, "class" => class).increment(1);
}

pub(crate) fn overhead(took: Duration) {
    histogram!(OVERHEAD_SECONDS).record(took.as_secs_f64());
}

pub(crate) fn adoption() {
    counter!(ADOPTIONS).increment(1);
}

pub(crate) fn swept(what: &'static str, jobs: u64) {
    counter!(SWEEPS, "what" => what).increment(jobs);
}

pub(crate) fn lane_rebuilt(why: &'static str) {
    counter!(LANES_REBUILT, "why" => why).increment(1);
}

pub(crate) fn failover_denied(route: &str) {
    counter!(FAILOVERS_DENIED, "route" => route.to_owned()).increment(1);
}

pub(crate) fn fenced() {
    counter!(FENCED).increment(1);
}

#[cfg(feature = "gateway")]
pub(crate) fn http_request(operation: &'static str, status_class: &'static str) {
    counter!(HTTP_REQUESTS, "operation" => operation, "status" => status_class).increment(1);
}

pub(crate) fn waiters(waiters: usize) {
    gauge!(WAITERS).set(waiters as f64);
}

pub(crate) fn eviction_allowed(allowed: u8) {
    gauge!(EVICTION_ALLOWED).set(f64::from(allowed));
}

pub(crate) fn results_in_hand(results: usize) {
    gauge!(RESULTS_IN_HAND).set(results as f64);
}

pub(crate) fn spool_results(results: usize) {
    gauge!(SPOOL_RESULTS).set(results as f64);
}

pub(crate) fn spooled(fate: &'static str) {
    counter!(SPOOLED, "fate" => fate).increment(1);
}
