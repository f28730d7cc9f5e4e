//! The only place where a metric is named: every name, label and bucket.
//!
//! Label values come from closed sets: words of the protocol, and names from the configuration. Never a key, an owner, a job id
//! or a text from outside. Every counter and histogram is there from the start, with each combination of its labels at zero: a
//! rate sees the first event, an alert too, and the number of series does not grow. The gauges are kept by the runtime; a scrape
//! reads memory and costs Redis nothing.
//!
//! `dashboards/` draws and watches them; `docs/OPERATIONS.md` says what each means.

use std::time::Duration;

use crate::qualify::Denial;
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
/// Unknown jobs in the store that nobody but a person can settle any more.
pub const NEED_OPERATOR: &str = "onejob_jobs_need_operator";
/// Questions about earlier attempts by provider, question (`status`, `find`, `replay`, `cancel`) and answer.
pub const QUESTIONS: &str = "onejob_questions_total";
/// Unknown attempts that were settled without a person, by outcome: `succeeded`, `failed`, `canceled`, `abandoned`, `discarded`.
pub const RECONCILED: &str = "onejob_reconciled_total";
/// What discarded successes cost, in the unit of the provider.
pub const DISCARDED_COST: &str = "onejob_discarded_cost_total";
/// How long a script took, from this gateway, by script.
pub const SCRIPT_SECONDS: &str = "onejob_script_duration_seconds";
/// Errors of the store by class: `not_executed`, `ambiguous`, `not_durable`, `fatal`.
pub const STORE_ERRORS: &str = "onejob_store_errors_total";
/// Batches of calls that must be durable, by how they ended: `durable`, `short` of replicas or of the disk, `error`.
pub const COMMITS: &str = "onejob_commits_total";
/// Writes that Redis had acknowledged to this gateway and lost: `job`, `attempt`, `ending`; `stream`, a failover to a server that
/// says itself that it has not all of it.
pub const WRITES_LOST: &str = "onejob_writes_lost_total";
/// Verdicts on clicks by stream and verdict: `first`, `duplicate`; of claims `claimed`, `held`; of commits `committed`, `lost`.
pub const DEDUP_IDS: &str = "onejob_dedup_ids_total";
/// Batches of clicks by stream and by how they ended: `answered`, `unanswered` in part or as a whole, `conflict` of their tokens.
pub const DEDUP_BATCHES: &str = "onejob_dedup_batches_total";
/// Ids of clicks that were known here to be duplicates, so that nobody was asked, by stream.
pub const DEDUP_REMEMBERED: &str = "onejob_dedup_remembered_ids";
/// See [`ALL`].
pub const DEDUP_BUCKET: &str = "onejob_dedup_bucket_ids";
/// See [`ALL`].
pub const DEDUP_BYTES: &str = "onejob_dedup_bytes";
/// See [`ALL`].
pub const DEDUP_FRONT: &str = "onejob_dedup_front_total";
/// Requests to a `DedupLayer` by stream and by what became of them: `first`, `duplicate`, `held` by another one, `invalid`; `refused`
/// and `passed` without a verdict; of what was claimed `released`, `lost`, `uncommitted`.
pub const DEDUP_REQUESTS: &str = "onejob_dedup_requests_total";
/// A job's time on this gateway besides its calls to providers and the delays between them.
pub const OVERHEAD_SECONDS: &str = "onejob_overhead_seconds";
/// Jobs of other gateways that this one went on with.
pub const ADOPTIONS: &str = "onejob_adoptions_total";
/// What the sweeper did: `aborted`, `unknown`, `poisoned`, `deadline`, `stripped`, `hint_dropped`, `hint_repaired`.
pub const SWEEPS: &str = "onejob_sweeps_total";
/// Connections to Redis that stand again after they were given up, by why: `broken`, `readonly`, `timeouts`, `foreign`, `elsewhere`.
pub const LANES_REBUILT: &str = "onejob_lanes_rebuilt_total";
/// What nodes of a cluster answered instead of doing a command: `moved` and `ask`, it was sent on to another node; `tryagain`, half
/// of its keys are elsewhere; `exhausted`, it was sent on too often, and the refusal is the answer.
pub const CLUSTER_REDIRECTS: &str = "onejob_cluster_redirects_total";
/// Readings of a cluster's map of slots after the first, by what they brought: `same`, `changed`, `failed`: no node told.
pub const CLUSTER_MAPS: &str = "onejob_cluster_maps_total";
/// Failovers that were not allowed, by route and reason.
pub const FAILOVERS_DENIED: &str = "onejob_failovers_denied_total";
/// Failovers that would not have been allowed, had the gate not been `shadow`, by route and reason.
pub const FAILOVERS_SHADOWED: &str = "onejob_failovers_shadowed_total";
/// 1 while a route's failovers need no certificate, by route.
pub const GATE_OPEN: &str = "onejob_gate_open";
/// For how long failovers of a route may still go to each of its providers, the shortest of them, by route; 0: to one they may not.
pub const CERTIFICATE_EXPIRES: &str = "onejob_certificate_expires_seconds";
/// Certificates that this gateway suspended, by route and why: `drift`, `invalid`, `renewal`.
pub const CERTIFICATES_SUSPENDED: &str = "onejob_certificates_suspended_total";
/// Renewals of certificates by this gateway, by route and what came of them.
pub const CERTIFICATE_RENEWALS: &str = "onejob_certificate_renewals_total";
/// Answers that were not as their route requires, by route.
pub const OUTPUTS_INVALID: &str = "onejob_outputs_invalid_total";
/// Attempts that were not sent because their lease had run out.
pub const FENCED: &str = "onejob_fenced_total";
/// HTTP requests by what was asked and by status class.
pub const HTTP_REQUESTS: &str = "onejob_http_requests_total";
/// Requests that wait for a job.
pub const WAITERS: &str = "onejob_waiters";
/// Most requests that may wait for a job at once.
pub const WAITERS_LIMIT: &str = "onejob_waiters_limit";
/// Requests that read a stream.
pub const STREAM_READERS: &str = "onejob_stream_readers";
/// Readings of streams by how they ended: `whole`, `broken`, `left`.
pub const STREAM_READS: &str = "onejob_stream_reads_total";
/// 1 while Redis may evict open jobs and somebody allowed it.
pub const EVICTION_ALLOWED: &str = "onejob_eviction_allowed";
/// Results in hand that the store was offered and has not taken.
pub const RESULTS_IN_HAND: &str = "onejob_results_in_hand";
/// Results that wait in the spool directory.
pub const SPOOL_RESULTS: &str = "onejob_spool_results";
/// Files of the spool by fate: `written`, `stored`, `bad`, `orphan`, `refused`.
pub const SPOOLED: &str = "onejob_spooled_total";

/// What our own protection kept from beginning, by provider and why.
pub const REFUSED: &str = "onejob_refused_total";
/// The worst breaker of a provider, as this gateway was told last: 0 closed, 1 half open, 2 open.
pub const BREAKER_STATE: &str = "onejob_breaker_state";
/// Breakers that a report of this gateway opened, by provider.
pub const BREAKERS_OPENED: &str = "onejob_breakers_opened_total";
/// Permits of the whole fleet that are taken at a provider, as this gateway was told last.
pub const FLEET_PERMITS: &str = "onejob_fleet_permits";

/// Upper bounds of the histograms, in seconds.
pub const SECONDS_BUCKETS: [f64; 14] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

const SUBMIT_RESULTS: &[&str] = &["created", "existing", "conflict", "gone", "collision", "refused", "error"];
const OUTCOMES: &[&str] = &["succeeded", "rejected", "not_sent", "invalid_output", "unknown"];
const FATES: &[&str] = &["won", "discarded"];
const ENDED_STATES: &[&str] = &["succeeded", "failed", "canceled", "indeterminate"];
const QUESTION_KINDS: &[&str] = &["status", "find", "replay", "cancel"];
const ANSWERS: &[&str] = &["succeeded", "rejected", "invalid_output", "running", "not_found", "expired", "canceled", "no_answer"];
const RECONCILED_AS: &[&str] = &["succeeded", "failed", "canceled", "abandoned", "discarded"];
const OPEN_STATES: &[&str] = &["pending", "running", "canceling", "unknown", "open"];
const SCRIPTS: &[&str] = &[
    "submit_job",
    "begin_attempt",
    "mark_running",
    "extend_lease",
    "finish_attempt",
    "resolve_attempt",
    "note_attempt",
    "cancel_job",
    "tick_job",
    "reopen_job",
    "read_job",
    "settle_hint",
    "postpone_job",
    "admit_call",
    "report_call",
    "extend_permits",
    "extend_ask",
    "issue_certificate",
    "mark_certificate",
    "dedup_batch",
    "dedup_claim",
    "dedup_commit",
    "dedup_release",
    "mirror_batch",
    "mirror_claim",
    "mirror_commit",
];
const CLICKS_ARE: &[&str] = &["first", "duplicate", "claimed", "held", "committed", "lost"];
const BATCHES_AS: &[&str] = &["answered", "unanswered", "conflict"];
const REQUESTS_AS: &[&str] = &["first", "duplicate", "held", "invalid", "refused", "passed", "released", "lost", "uncommitted"];
const ERROR_CLASSES: &[&str] = &["not_executed", "ambiguous", "not_durable", "fatal"];
const LOST: &[&str] = &["job", "attempt", "ending", "stream"];
const COMMITS_AS: &[&str] = &["durable", "short", "error"];
const SWEPT: &[&str] = &["aborted", "unknown", "poisoned", "deadline", "stripped", "hint_dropped", "hint_repaired"];
const SPOOL_FATES: &[&str] = &["written", "stored", "bad", "orphan", "refused"];
const READ_ENDS: &[&str] = &["whole", "broken", "left"];
const REBUILT_WHY: &[&str] = &["broken", "readonly", "timeouts", "foreign", "elsewhere"];
const REDIRECTS: &[&str] = &["moved", "ask", "tryagain", "exhausted"];
const MAPS: &[&str] = &["same", "changed", "failed"];
/// What a request asks for: the operation ids of the description, and `none`.
pub(crate) const OPERATIONS: &[&str] = &[
    "list_jobs",
    "submit_job",
    "read_job",
    "cancel_job",
    "cancel_by_key",
    "reopen_job",
    "begin_attempt",
    "mark_running",
    "extend_lease",
    "finish_attempt",
    "resolve_attempt",
    "take_webhook",
    "check_clicks",
    "claim_clicks",
    "commit_clicks",
    "release_clicks",
    "pass_through",
    "proxy",
    "healthz",
    "readyz",
    "metrics",
    "openapi",
    "none",
];
/// What keeps a call from a provider.
const REFUSED_WHY: &[&str] = &["hold", "breaker", "probe", "permits", "rate", "budget", "store"];
const SUSPENDED_WHY: &[&str] = &["drift", "invalid", "renewal"];
const RENEWED: &[&str] = &["renewed", "refused", "inconclusive", "overtaken", "error"];
const STATUS_CLASSES: &[&str] = &["1xx", "2xx", "3xx", "4xx", "5xx"];

/// One metric, as dashboards, alerts and tests know it.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its whole name.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// One sentence for who meets it in a scrape.
    pub help: &'static str,
    /// Its labels, besides a histogram's `le`.
    pub labels: &'static [(&'static str, Values)],
}

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

/// What a label may say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// One of these words.
    Words(&'static [&'static str]),
    /// The name of a provider.
    Providers,
    /// The name of a route.
    Routes,
    /// The name of a stream of clicks.
    Streams,
}

impl Metric {
    const fn counter(name: &'static str, help: &'static str, labels: &'static [(&'static str, Values)]) -> Self {
        Metric { name, kind: Kind::Counter, help, labels }
    }

    const fn gauge(name: &'static str, help: &'static str, labels: &'static [(&'static str, Values)]) -> Self {
        Metric { name, kind: Kind::Gauge, help, labels }
    }

    const fn histogram(name: &'static str, help: &'static str, labels: &'static [(&'static str, Values)]) -> Self {
        Metric { name, kind: Kind::Histogram, help, labels }
    }

    /// Every combination of what its labels may say.
    fn combinations(&self, providers: &[&str], routes: &[&str], streams: &[&str]) -> Vec<Vec<metrics::Label>> {
        let mut combinations = vec![Vec::new()];
        for (label, values) in self.labels {
            let values = match values {
                Values::Words(words) => words,
                Values::Providers => providers,
                Values::Routes => routes,
                Values::Streams => streams,
            };
            let longer = |shorter: &Vec<metrics::Label>| {
                let of = |value: &&str| [&shorter[..], &[metrics::Label::new(*label, (*value).to_owned())]].concat();
                values.iter().map(of).collect::<Vec<_>>()
            };
            combinations = combinations.iter().flat_map(longer).collect();
        }
        combinations
    }

    fn start_at_zero(&self, providers: &[&str], routes: &[&str], streams: &[&str]) {
        for labels in self.combinations(providers, routes, streams) {
            match self.kind {
                Kind::Counter => counter!(self.name, labels).increment(0),
                Kind::Histogram => drop(histogram!(self.name, labels)),
                // What nobody has measured yet is not 0.
                Kind::Gauge => {}
            }
        }
    }
}

/// Every metric, for dashboards and tests, in the order of their names above.
pub const ALL: [Metric; 49] = [
    Metric::counter(SUBMITS, "Submits by result.", &[("result", Values::Words(SUBMIT_RESULTS))]),
    Metric::counter(
        ATTEMPTS,
        "Attempts by provider and outcome.",
        &[("provider", Values::Providers), ("outcome", Values::Words(OUTCOMES))],
    ),
    Metric::counter(RESULTS, "Results by fate: won or discarded.", &[("fate", Values::Words(FATES))]),
    Metric::counter(LATE_RESULTS, "Successes that arrived after their attempt had been given up.", &[]),
    Metric::counter(JOBS_ENDED, "Jobs ended by this gateway, by state.", &[("state", Values::Words(ENDED_STATES))]),
    Metric::gauge(
        JOBS_OPEN,
        "Open jobs: pending, running and canceling on this gateway; unknown and open in the whole store.",
        &[("state", Values::Words(OPEN_STATES))],
    ),
    Metric::gauge(OLDEST_UNKNOWN, "Age of the oldest unknown job in the store.", &[]),
    Metric::gauge(NEED_OPERATOR, "Unknown jobs in the store that nobody but a person can settle any more.", &[]),
    Metric::counter(
        QUESTIONS,
        "Questions about earlier attempts by provider, question and answer.",
        &[("provider", Values::Providers), ("question", Values::Words(QUESTION_KINDS)), ("answer", Values::Words(ANSWERS))],
    ),
    Metric::counter(
        RECONCILED,
        "Unknown attempts that were settled without a person, by outcome.",
        &[("outcome", Values::Words(RECONCILED_AS))],
    ),
    Metric::counter(DISCARDED_COST, "What discarded successes cost, in the provider's unit.", &[("provider", Values::Providers)]),
    Metric::histogram(SCRIPT_SECONDS, "Round trip of a script, by script.", &[("script", Values::Words(SCRIPTS))]),
    Metric::counter(STORE_ERRORS, "Errors of the store by class.", &[("class", Values::Words(ERROR_CLASSES))]),
    Metric::counter(COMMITS, "Batches of calls that must be durable, by outcome.", &[("outcome", Values::Words(COMMITS_AS))]),
    Metric::counter(WRITES_LOST, "Writes that Redis had acknowledged and lost.", &[("what", Values::Words(LOST))]),
    Metric::counter(
        DEDUP_IDS,
        "Verdicts on clicks by stream.",
        &[("stream", Values::Streams), ("verdict", Values::Words(CLICKS_ARE))],
    ),
    Metric::counter(
        DEDUP_BATCHES,
        "Batches of clicks by stream and by how they ended.",
        &[("stream", Values::Streams), ("outcome", Values::Words(BATCHES_AS))],
    ),
    Metric::gauge(DEDUP_REMEMBERED, "Clicks that are remembered, by stream.", &[("stream", Values::Streams)]),
    Metric::gauge(DEDUP_BUCKET, "Clicks a bucket on average, by stream.", &[("stream", Values::Streams)]),
    Metric::gauge(DEDUP_BYTES, "Memory of Redis that they take, about, by stream.", &[("stream", Values::Streams)]),
    Metric::counter(DEDUP_FRONT, "Clicks that were known here to be duplicates, by stream.", &[("stream", Values::Streams)]),
    Metric::counter(
        DEDUP_REQUESTS,
        "Requests to a layer that drops duplicates, by stream and by what became of them.",
        &[("stream", Values::Streams), ("outcome", Values::Words(REQUESTS_AS))],
    ),
    Metric::histogram(
        OVERHEAD_SECONDS,
        "A job's time on a gateway besides its calls to providers and the delays between them.",
        &[],
    ),
    Metric::counter(ADOPTIONS, "Jobs of other gateways that this one went on with.", &[]),
    Metric::counter(SWEEPS, "What the sweeper did.", &[("what", Values::Words(SWEPT))]),
    Metric::counter(LANES_REBUILT, "Connections to Redis built anew.", &[("why", Values::Words(REBUILT_WHY))]),
    Metric::counter(
        CLUSTER_REDIRECTS,
        "Commands that a node of a cluster did not do, by what it said.",
        &[("kind", Values::Words(REDIRECTS))],
    ),
    Metric::counter(CLUSTER_MAPS, "Readings of a cluster's map of slots.", &[("result", Values::Words(MAPS))]),
    Metric::counter(
        FAILOVERS_DENIED,
        "Failovers that were not allowed, by route and reason.",
        &[("route", Values::Routes), ("reason", Values::Words(&Denial::REASONS))],
    ),
    Metric::counter(
        FAILOVERS_SHADOWED,
        "Failovers that gate = shadow let pass and enforce would not, by route and reason.",
        &[("route", Values::Routes), ("reason", Values::Words(&Denial::REASONS))],
    ),
    Metric::gauge(GATE_OPEN, "1 while a route's failovers need no certificate.", &[("route", Values::Routes)]),
    Metric::gauge(
        CERTIFICATE_EXPIRES,
        "For how long a route's certificates are still good, the one that ends first; 0 if a provider has none.",
        &[("route", Values::Routes)],
    ),
    Metric::counter(
        CERTIFICATES_SUSPENDED,
        "Certificates that this gateway suspended.",
        &[("route", Values::Routes), ("why", Values::Words(SUSPENDED_WHY))],
    ),
    Metric::counter(
        CERTIFICATE_RENEWALS,
        "Renewals of certificates by what came of them.",
        &[("route", Values::Routes), ("result", Values::Words(RENEWED))],
    ),
    Metric::counter(OUTPUTS_INVALID, "Answers that were not as their route requires.", &[("route", Values::Routes)]),
    Metric::counter(FENCED, "Attempts not sent because their lease had run out.", &[]),
    Metric::counter(
        HTTP_REQUESTS,
        "HTTP requests by operation and status class.",
        &[("operation", Values::Words(OPERATIONS)), ("status", Values::Words(STATUS_CLASSES))],
    ),
    Metric::gauge(WAITERS, "Requests that wait for a job.", &[]),
    Metric::gauge(WAITERS_LIMIT, "Most requests that may wait for a job at once.", &[]),
    Metric::gauge(STREAM_READERS, "Requests that read a stream.", &[]),
    Metric::counter(STREAM_READS, "Readings of streams by how they ended.", &[("end", Values::Words(READ_ENDS))]),
    Metric::gauge(EVICTION_ALLOWED, "1 while Redis may evict open jobs and somebody allowed it.", &[]),
    Metric::gauge(RESULTS_IN_HAND, "Results in hand that the store was offered and has not taken.", &[]),
    Metric::gauge(SPOOL_RESULTS, "Results that wait in the spool directory.", &[]),
    Metric::counter(SPOOLED, "Files of the spool by fate.", &[("fate", Values::Words(SPOOL_FATES))]),
    Metric::counter(
        REFUSED,
        "What our own protection kept from beginning, by provider and why.",
        &[("provider", Values::Providers), ("why", Values::Words(REFUSED_WHY))],
    ),
    Metric::gauge(
        BREAKER_STATE,
        "The worst breaker of a provider as this gateway was told last: 0 closed, 1 half open, 2 open.",
        &[("provider", Values::Providers)],
    ),
    Metric::counter(BREAKERS_OPENED, "Breakers opened by a report of this gateway.", &[("provider", Values::Providers)]),
    Metric::gauge(
        FLEET_PERMITS,
        "Permits of the whole fleet that are taken at a provider, as this gateway was told last.",
        &[("provider", Values::Providers)],
    ),
];

/// Describes every metric to the recorder. Call once, after installing one and before starting a runtime.
pub fn describe() {
    for Metric { name, kind, help, .. } in ALL {
        let unit = if name.ends_with("_seconds") { Unit::Seconds } else { Unit::Count };
        match kind {
            Kind::Counter => describe_counter!(name, unit, help),
            Kind::Gauge => describe_gauge!(name, unit, help),
            Kind::Histogram => describe_histogram!(name, unit, help),
        }
    }
}

/// Sets at zero what a runtime with these providers and routes may count.
pub(crate) fn start_at_zero(providers: &[&str], routes: &[&str]) {
    for metric in ALL.iter().filter(|metric| metric.name != HTTP_REQUESTS) {
        // Streams of clicks are declared by whoever asks.
        metric.start_at_zero(providers, routes, &[]);
    }
    for provider in providers {
        breaker_state(provider, 0);
        fleet_permits(provider, 0);
    }
    for route in routes {
        gate_open(route, false);
        certificate_expires(route, Duration::ZERO);
    }
    // Gauges that are changed, not set.
    for gauge in [WAITERS, STREAM_READERS, RESULTS_IN_HAND] {
        gauge!(gauge).increment(0.0);
    }
}

/// Sets at zero what a server may count.
#[cfg(feature = "gateway")]
pub(crate) fn start_requests_at_zero() {
    for metric in ALL.iter().filter(|metric| metric.name == HTTP_REQUESTS) {
        metric.start_at_zero(&[], &[], &[]);
    }
}

/// Sets at zero what is counted of these streams of clicks.
#[cfg(feature = "gateway")]
pub(crate) fn start_streams_at_zero(streams: &[&str]) {
    for metric in ALL.iter().filter(|metric| metric.labels.iter().any(|(_, values)| *values == Values::Streams)) {
        metric.start_at_zero(&[], &[], streams);
    }
}

pub(crate) fn submit(result: &'static str) {
    debug_assert!(SUBMIT_RESULTS.contains(&result), "{result}");
    counter!(SUBMITS, "result" => result).increment(1);
}

pub(crate) fn attempt(provider: &str, outcome: &'static str) {
    debug_assert!(OUTCOMES.contains(&outcome), "{outcome}");
    counter!(ATTEMPTS, "provider" => provider.to_owned(), "outcome" => outcome).increment(1);
}

pub(crate) fn result(fate: &'static str) {
    debug_assert!(FATES.contains(&fate), "{fate}");
    counter!(RESULTS, "fate" => fate).increment(1);
}

pub(crate) fn late_result() {
    counter!(LATE_RESULTS).increment(1);
}

pub(crate) fn job_ended(state: &'static str) {
    debug_assert!(ENDED_STATES.contains(&state), "{state}");
    counter!(JOBS_ENDED, "state" => state).increment(1);
}

pub(crate) fn jobs_open(state: &'static str, jobs: u64) {
    debug_assert!(OPEN_STATES.contains(&state), "{state}");
    gauge!(JOBS_OPEN, "state" => state).set(jobs as f64);
}

pub(crate) fn oldest_unknown(age: Duration) {
    gauge!(OLDEST_UNKNOWN).set(age.as_secs_f64());
}

pub(crate) fn need_operator(jobs: u64) {
    gauge!(NEED_OPERATOR).set(jobs as f64);
}

pub(crate) fn question(provider: &str, question: &'static str, answer: &'static str) {
    debug_assert!(QUESTION_KINDS.contains(&question) && ANSWERS.contains(&answer), "{question} {answer}");
    counter!(QUESTIONS, "provider" => provider.to_owned(), "question" => question, "answer" => answer).increment(1);
}

pub(crate) fn reconciled(outcome: &'static str) {
    debug_assert!(RECONCILED_AS.contains(&outcome), "{outcome}");
    counter!(RECONCILED, "outcome" => outcome).increment(1);
}

pub(crate) fn discarded_cost(provider: &str, cost: u64) {
    counter!(DISCARDED_COST, "provider" => provider.to_owned()).increment(cost);
}

pub(crate) fn script(name: &'static str, took: Duration) {
    debug_assert!(SCRIPTS.contains(&name), "{name}");
    histogram!(SCRIPT_SECONDS, "script" => name).record(took.as_secs_f64());
}

pub(crate) fn store_error(class: &'static str) {
    debug_assert!(ERROR_CLASSES.contains(&class), "{class}");
    counter!(STORE_ERRORS, "class" => class).increment(1);
}

pub(crate) fn commit(outcome: &'static str) {
    debug_assert!(COMMITS_AS.contains(&outcome), "{outcome}");
    counter!(COMMITS, "outcome" => outcome).increment(1);
}

pub(crate) fn write_lost(what: &'static str) {
    debug_assert!(LOST.contains(&what), "{what}");
    counter!(WRITES_LOST, "what" => what).increment(1);
}

pub(crate) fn dedup_ids(stream: &str, verdict: &'static str, ids: u64) {
    counter!(DEDUP_IDS, "stream" => stream.to_owned(), "verdict" => verdict).increment(ids);
}

pub(crate) fn dedup_batch(stream: &str, outcome: &'static str) {
    counter!(DEDUP_BATCHES, "stream" => stream.to_owned(), "outcome" => outcome).increment(1);
}

/// How full a stream is. One that is mirrored has no buckets, nor has one that nobody has asked about.
#[cfg(feature = "gateway")]
pub(crate) fn dedup_level(stream: &str, ids: u64, buckets: u64, bytes: u64) {
    gauge!(DEDUP_REMEMBERED, "stream" => stream.to_owned()).set(ids as f64);
    let of_a_bucket = if buckets > 0 { ids as f64 / buckets as f64 } else { 0.0 };
    gauge!(DEDUP_BUCKET, "stream" => stream.to_owned()).set(of_a_bucket);
    gauge!(DEDUP_BYTES, "stream" => stream.to_owned()).set(bytes as f64);
}

pub(crate) fn dedup_front(stream: &str, ids: u64) {
    counter!(DEDUP_FRONT, "stream" => stream.to_owned()).increment(ids);
}

pub(crate) fn dedup_request(stream: &str, outcome: &'static str) {
    debug_assert!(REQUESTS_AS.contains(&outcome), "{outcome}");
    counter!(DEDUP_REQUESTS, "stream" => stream.to_owned(), "outcome" => outcome).increment(1);
}

pub(crate) fn overhead(took: Duration) {
    histogram!(OVERHEAD_SECONDS).record(took.as_secs_f64());
}

pub(crate) fn adoption() {
    counter!(ADOPTIONS).increment(1);
}

pub(crate) fn swept(what: &'static str, jobs: u64) {
    debug_assert!(SWEPT.contains(&what), "{what}");
    counter!(SWEEPS, "what" => what).increment(jobs);
}

pub(crate) fn redirect(kind: &'static str) {
    debug_assert!(REDIRECTS.contains(&kind), "{kind}");
    counter!(CLUSTER_REDIRECTS, "kind" => kind).increment(1);
}

pub(crate) fn map_read(result: &'static str) {
    debug_assert!(MAPS.contains(&result), "{result}");
    counter!(CLUSTER_MAPS, "result" => result).increment(1);
}

pub(crate) fn lane_rebuilt(why: &'static str) {
    debug_assert!(REBUILT_WHY.contains(&why), "{why}");
    counter!(LANES_REBUILT, "why" => why).increment(1);
}

pub(crate) fn failover_denied(route: &str, reason: &'static str) {
    debug_assert!(Denial::REASONS.contains(&reason), "{reason}");
    counter!(FAILOVERS_DENIED, "route" => route.to_owned(), "reason" => reason).increment(1);
}

pub(crate) fn failover_shadowed(route: &str, reason: &'static str) {
    debug_assert!(Denial::REASONS.contains(&reason), "{reason}");
    counter!(FAILOVERS_SHADOWED, "route" => route.to_owned(), "reason" => reason).increment(1);
}

pub(crate) fn gate_open(route: &str, open: bool) {
    gauge!(GATE_OPEN, "route" => route.to_owned()).set(f64::from(u8::from(open)));
}

pub(crate) fn certificate_expires(route: &str, left: Duration) {
    gauge!(CERTIFICATE_EXPIRES, "route" => route.to_owned()).set(left.as_secs_f64());
}

/// Counts a renewal that has ended, by one of the words of [`CERTIFICATE_RENEWALS`].
pub fn certificate_renewal(route: &str, result: &'static str) {
    debug_assert!(RENEWED.contains(&result), "{result}");
    counter!(CERTIFICATE_RENEWALS, "route" => route.to_owned(), "result" => result).increment(1);
}

/// Counts a certificate that this gateway suspended.
pub fn certificate_suspended(route: &str, why: &'static str) {
    debug_assert!(SUSPENDED_WHY.contains(&why), "{why}");
    counter!(CERTIFICATES_SUSPENDED, "route" => route.to_owned(), "why" => why).increment(1);
}

pub(crate) fn output_invalid(route: &str) {
    counter!(OUTPUTS_INVALID, "route" => route.to_owned()).increment(1);
}

pub(crate) fn fenced() {
    counter!(FENCED).increment(1);
}

#[cfg(feature = "gateway")]
pub(crate) fn http_request(operation: &'static str, status_class: &'static str) {
    debug_assert!(OPERATIONS.contains(&operation) && STATUS_CLASSES.contains(&status_class), "{operation} {status_class}");
    counter!(HTTP_REQUESTS, "operation" => operation, "status" => status_class).increment(1);
}

/// Somebody begins to wait. Changed, not set: what two threads set in the wrong order would stay wrong.
pub(crate) fn waiter_came() {
    gauge!(WAITERS).increment(1.0);
}

pub(crate) fn waiter_left() {
    gauge!(WAITERS).decrement(1.0);
}

pub(crate) fn waiters_limit(limit: usize) {
    gauge!(WAITERS_LIMIT).set(limit as f64);
}

#[cfg(feature = "gateway")]
pub(crate) fn stream_reader_came() {
    gauge!(STREAM_READERS).increment(1.0);
}

#[cfg(feature = "gateway")]
pub(crate) fn stream_reader_left(end: &'static str) {
    debug_assert!(READ_ENDS.contains(&end), "{end}");
    gauge!(STREAM_READERS).decrement(1.0);
    counter!(STREAM_READS, "end" => end).increment(1);
}

pub(crate) fn eviction_allowed(allowed: u8) {
    gauge!(EVICTION_ALLOWED).set(f64::from(allowed));
}

/// The store did not take a result; it is kept in hand.
pub(crate) fn result_held() {
    gauge!(RESULTS_IN_HAND).increment(1.0);
}

/// A result that was in hand is no longer.
pub(crate) fn result_let_go() {
    gauge!(RESULTS_IN_HAND).decrement(1.0);
}

pub(crate) fn spool_results(results: usize) {
    gauge!(SPOOL_RESULTS).set(results as f64);
}

pub(crate) fn refused(provider: &str, why: &'static str) {
    debug_assert!(REFUSED_WHY.contains(&why), "{why}");
    counter!(REFUSED, "provider" => provider.to_owned(), "why" => why).increment(1);
}

pub(crate) fn breaker_state(provider: &str, state: u8) {
    gauge!(BREAKER_STATE, "provider" => provider.to_owned()).set(f64::from(state));
}

pub(crate) fn breaker_opened(provider: &str) {
    counter!(BREAKERS_OPENED, "provider" => provider.to_owned()).increment(1);
}

pub(crate) fn fleet_permits(provider: &str, permits: u64) {
    gauge!(FLEET_PERMITS, "provider" => provider.to_owned()).set(permits as f64);
}

pub(crate) fn spooled(fate: &'static str) {
    counter!(SPOOLED, "fate" => fate).increment(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::JobState;
    use crate::store::Script;

    #[test]
    fn words_of_labels_are_those_of_the_protocol() {
        let scripts: Vec<_> = Script::ALL.iter().map(|script| script.name()).collect();
        assert_eq!(SCRIPTS, scripts);
        let ended: Vec<_> = JobState::ALL.iter().filter(|state| state.is_ended()).map(|state| state.as_str()).collect();
        assert_eq!(ENDED_STATES, ended);
    }

    #[test]
    fn a_metric_has_a_series_for_every_combination_of_its_labels() {
        let attempts = ALL.iter().find(|metric| metric.name == ATTEMPTS).unwrap();
        let combinations = attempts.combinations(&["laser", "inkjet"], &["print"], &[]);
        assert_eq!(combinations.len(), 2 * OUTCOMES.len());
        let told = |label: &metrics::Label| format!("{}={}", label.key(), label.value());
        let first: Vec<_> = combinations[0].iter().map(told).collect();
        assert_eq!(first, ["provider=laser", "outcome=succeeded"]);
    }
}
