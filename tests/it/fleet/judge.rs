//! Compares, when all is quiet, what clients were told, what the records say and what the provider executed.
//!
//! It trusts none of the three: each promise is checked against another's word. What it holds about states is written down here a
//! second time, on purpose.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use onejob::attempt::{Attempt, AttemptState};
use onejob::fingerprint::{Sha256Bytes, digest, hex, sha256};
use onejob::job::{Body, Class, Identity, Job, JobState, SHARDS};
use onejob::provider::simulated::Entry;
use onejob::server::OPEN_OWNER;
use onejob::store::{Read, Store};
use serde_json::Value;

use super::Fleet;
use super::client::{Asked, Told};
use super::intent::{Expect, Intent};

/// How long the fleet may take to come to rest: leases lapse, attempts end, hints are put right.
const REST_DEADLINE: Duration = Duration::from_secs(90);
/// Between two looks at a fleet that comes to rest.
const REST_PAUSE: Duration = Duration::from_millis(100);
/// When an unknown job is looked at again; until then the hint of one that has ended meanwhile may stand.
const UNKNOWN_LOOK_MS: u64 = 60_000;
/// How much later than it is due a hint may be seen to, while sweepers are not paused.
const SWEEP_LATE_MS: u64 = 5_000;
/// The grace of a blob that no record names.
const BLOB_GRACE_MS: i64 = 3_600_000;
/// Records read side by side.
const READS_AT_ONCE: usize = 32;
/// Violations that are told one by one.
const TOLD_MAX: usize = 40;

/// What the judge found.
#[derive(Default)]
pub struct Verdict {
    pub violations: Vec<String>,
    pub rows: Vec<(String, String)>,
    /// Jobs by state and why, with how often each was executed (0, 1, 2 or more).
    pub ends: BTreeMap<(String, String), [usize; 3]>,
    /// Intents that the provider does and confirms, and how many of them succeeded.
    pub good: (usize, usize),
    pub accepted: usize,
}

impl Verdict {
    fn violation(&mut self, what: impl Into<String>) {
        self.violations.push(what.into());
    }

    fn row(&mut self, what: &str, value: impl ToString) {
        self.rows.push((what.to_owned(), value.to_string()));
    }

    /// The summary, for people.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for (what, value) in &self.rows {
            let _ = writeln!(text, "  {what:<46} {value}");
        }
        let _ =
            writeln!(text, "\n  intents by how their jobs ended, and how often the provider executed each: 0 times, once, more");
        let _ = writeln!(text, "  {:<12} {:<52} {:>7} {:>7} {:>7}", "state", "reason", "0 times", "once", "more");
        for ((state, reason), executed) in &self.ends {
            let [never, once, more] = executed;
            let _ = writeln!(text, "  {state:<12} {reason:<52} {never:>7} {once:>7} {more:>7}");
        }
        for violation in self.violations.iter().take(TOLD_MAX) {
            let _ = writeln!(text, "  VIOLATION {violation}");
        }
        let _ = write!(text, "  {} violations", self.violations.len());
        text
    }
}

/// The hints as they stand.
#[derive(Default)]
struct Hints {
    due: HashMap<Identity, u64>,
    unknown: HashMap<Identity, u64>,
}

async fn hints(fleet: &Fleet) -> Hints {
    let mut hints = Hints::default();
    for (name, all) in [("due", &mut hints.due), ("unknown", &mut hints.unknown)] {
        let keys: Vec<String> = (0..SHARDS).map(|shard| format!("oj:{name}:{{{shard:02x}}}")).collect();
        let shards: Vec<Vec<(String, f64)>> = fleet.redis.ask_of_each("ZRANGE", &keys, &["0", "-1", "WITHSCORES"]).await;
        for (shard, pairs) in (0..).zip(shards) {
            for (member, score) in pairs {
                let identity: Identity = member.parse().expect("an identity");
                assert_eq!(identity.shard(), shard, "a hint in its shard");
                all.insert(identity, score as u64);
            }
        }
    }
    hints
}

async fn read_all(store: &Store, identities: impl IntoIterator<Item = Identity>) -> HashMap<Identity, Job> {
    let read = |identity| async move {
        match store.read_job(identity).await.expect("redis is whole again") {
            Read::Found(job) => Some((identity, *job)),
            Read::NotFound => None,
            Read::Gone(gone) => panic!("{gone:?}: nothing here is old enough"),
        }
    };
    stream::iter(identities).map(read).buffer_unordered(READS_AT_ONCE).filter_map(async |job| job).collect().await
}

/// Waits until nothing is under way any more and every hint stands as it will stand.
pub async fn rest(fleet: &Fleet, store: &Store) {
    let deadline = Instant::now() + REST_DEADLINE;
    while let Some(why) = restless(fleet, store).await {
        assert!(Instant::now() < deadline, "not at rest within {REST_DEADLINE:?}: {why}");
        tokio::time::sleep(REST_PAUSE).await;
    }
}

/// What is still under way, if anything is.
async fn restless(fleet: &Fleet, store: &Store) -> Option<String> {
    let now_ms = store.now_ms();
    let hints = hints(fleet).await;
    let late = hints.due.values().filter(|at_ms| **at_ms + SWEEP_LATE_MS < now_ms).count();
    if late > 0 {
        return Some(format!("{late} hints are overdue"));
    }
    let jobs = read_all(store, hints.due.keys().chain(hints.unknown.keys()).copied().collect::<BTreeSet<_>>()).await;
    let open = |job: &&Job| matches!(job.state, JobState::Pending | JobState::Running | JobState::Canceling);
    if let Some(job) = jobs.values().find(open) {
        return Some(format!("job {} is {}", job.id, job.state));
    }
    // A hint without a record is taken away when it is due.
    let dangling = hints.due.keys().filter(|identity| !jobs.contains_key(identity)).count();
    let has_unknown = |job: &Job| job.attempts.iter().any(|attempt| attempt.state == AttemptState::Unknown);
    let settled = hints.unknown.keys().filter(|identity| !jobs.get(identity).is_some_and(has_unknown)).count();
    let why = format!("{dangling} hints have no job, {settled} on the list of unknown jobs are not unknown");
    (dangling + settled > 0).then_some(why)
}

/// Judges a fleet at rest.
pub async fn judge(fleet: &Fleet, store: &Store, intents: &[Intent], told: &[Told]) -> Verdict {
    let mut verdict = Verdict::default();
    let identity_of = |intent: &Intent| Identity::of(&digest(OPEN_OWNER, &intent.key));
    let jobs = read_all(store, intents.iter().map(identity_of)).await;
    let hints = hints(fleet).await;
    let ledger = fleet.provider.ledger();
    assert_eq!(ledger.dropped, 0, "the ledger has every execution");
    let mut executions: HashMap<Identity, Vec<&Entry>> = HashMap::new();
    for entry in &ledger.entries {
        match entry.job_id.parse::<onejob::job::JobId>() {
            Ok(id) => executions.entry(id.identity()).or_default().push(entry),
            Err(error) => verdict.violation(format!("the provider was called without a job: {error}")),
        }
    }
    let mut told_of: Vec<Vec<&Told>> = vec![Vec::new(); intents.len()];
    for told in told {
        told_of[told.intent].push(told);
    }

    for intent in intents {
        let identity = identity_of(intent);
        let entries = executions.remove(&identity).unwrap_or_default();
        let (job, told) = (jobs.get(&identity), &told_of[intent.number]);
        let result = match job {
            Some(job) if !job.result.head.is_empty() => {
                Some(store.body(identity, &job.result.body).await.expect("every result's bytes are there"))
            }
            Some(_) | None => None,
        };
        check_told(&mut verdict, intent, job, result.as_deref(), told);
        let Some(job) = job else {
            if !entries.is_empty() {
                verdict.violation(format!("{}: executed without a record", intent.key));
            }
            continue;
        };
        check_job(&mut verdict, intent, job, &hints);
        check_executions(&mut verdict, intent, job, &entries);
        if let (JobState::Succeeded, Some(result)) = (job.state, &result) {
            check_result(&mut verdict, intent, result);
        }
        if intent.expect == Expect::Success {
            verdict.good.0 += 1;
            verdict.good.1 += usize::from(job.state == JobState::Succeeded);
        }
        let executed = entries.iter().filter(|entry| entry.executed).count();
        let state = if job.class == Class::Race { format!("{} (race)", job.state) } else { job.state.to_string() };
        verdict.ends.entry((state, short(&job.reason))).or_default()[executed.min(2)] += 1;
    }
    for (identity, entries) in &executions {
        verdict.violation(format!("{identity}: {} calls for nobody's intent", entries.len()));
    }
    check_keys(&mut verdict, fleet, store, &jobs, &hints).await;

    let count = |of: &dyn Fn(&Told) -> bool| told.iter().filter(|told| of(told)).count();
    verdict.accepted = jobs.len();
    verdict.row("intents, of these accepted", format!("{}, {}", intents.len(), jobs.len()));
    verdict.row("intents submitted twice or more at once", intents.iter().filter(|intent| intent.callers > 1).count());
    verdict.row("answers told to clients", told.len());
    verdict.row("  200, 202", format!("{}, {}", count(&|told| told.status == 200), count(&|told| told.status == 202)));
    verdict.row("  503, none", format!("{}, {}", count(&|told| told.status == 503), count(&|told| told.status == 0)));
    verdict.row("  of submits: replayed", count(&|told| told.replayed == Some(true)));
    verdict.row("provider: called, executed", format!("{}, {}", ledger.received, ledger.executed));
    verdict.row("attempts of all jobs", jobs.values().map(|job| job.attempts.len()).sum::<usize>());
    verdict.row("good intents, of these succeeded", format!("{}, {}", verdict.good.0, verdict.good.1));
    verdict.row("late successes", count_events(&jobs, "late_success"));
    verdict.row("results discarded", count_events(&jobs, "discarded"));
    verdict.row("replies lost after execution", fleet.gateways.iter().map(|gateway| gateway.proxy.lost()).sum::<u64>());
    verdict
}

fn count_events(jobs: &HashMap<Identity, Job>, event: &str) -> usize {
    jobs.values().flat_map(|job| &job.events).filter(|seen| seen.event == event).count()
}

/// A reason without what differs from job to job.
fn short(reason: &str) -> String {
    let text: String = reason.chars().filter(|c| !c.is_ascii_digit()).take(52).collect();
    text.trim().to_owned()
}

/// What clients were told fits together, and is what the record says.
fn check_told(verdict: &mut Verdict, intent: &Intent, job: Option<&Job>, result: Option<&[u8]>, told: &[&Told]) {
    let key = &intent.key;
    for told in told {
        if !matches!(told.status, 0 | 200 | 202 | 503) {
            verdict.violation(format!("{key}: gateway {} answered {} {}", told.gateway, told.status, told.problem));
        }
        if told.status == 503 && !told.retry_after {
            verdict.violation(format!("{key}: 503 without Retry-After ({})", told.problem));
        }
    }
    let accepted: Vec<&&Told> = told.iter().filter(|told| told.is_accepted()).collect();
    let ids: BTreeSet<&str> = accepted.iter().map(|told| told.job_id.as_str()).collect();
    if ids.len() > 1 {
        verdict.violation(format!("{key}: told of {} jobs: {ids:?}", ids.len()));
    }
    let created = accepted.iter().filter(|told| told.asked == Asked::Submit && told.replayed == Some(false)).count();
    if created > 1 {
        verdict.violation(format!("{key}: {created} callers were told that they had created it"));
    }
    let Some(job) = job else {
        if !accepted.is_empty() {
            verdict.violation(format!("{key}: accepted as {ids:?}, and lost"));
        }
        return;
    };
    if ids.iter().any(|id| *id != job.id.to_string()) {
        verdict.violation(format!("{key}: told of {ids:?}, the record is {}", job.id));
    }
    let result: Option<Sha256Bytes> = result.map(sha256);
    for told in accepted.iter().filter(|told| told.is_ended()) {
        if told.state != job.state.as_str() {
            verdict.violation(format!("{key}: told {}, the record says {}", told.state, job.state));
        }
        if told.result != result {
            let named = |hash: Option<Sha256Bytes>| hash.map_or("none".to_owned(), |hash| hex(&hash)[..12].to_owned());
            verdict.violation(format!("{key}: told result {}, the record has {}", named(told.result), named(result)));
        }
    }
}

/// The state that follows from the attempts: written a second time, on purpose.
fn derived(job: &Job) -> JobState {
    let any = |state| job.attempts.iter().any(|attempt| attempt.state == state);
    match () {
        () if job.ended_ms > 0 => job.state,
        () if !job.canceled_by.is_empty() => JobState::Canceling,
        () if any(AttemptState::Starting) || any(AttemptState::Running) => JobState::Running,
        () if any(AttemptState::Unknown) => JobState::Unknown,
        () => JobState::Pending,
    }
}

/// The record is sound: ended, or unknown with a reason and on the list; open jobs have their hint.
fn check_job(verdict: &mut Verdict, intent: &Intent, job: &Job, hints: &Hints) {
    let (key, identity) = (&intent.key, job.id.identity());
    if job.state != derived(job) || job.is_ended() != (job.ended_ms > 0) {
        verdict.violation(format!("{key}: state {} is not what follows from its attempts ({})", job.state, derived(job)));
    }
    let succeeded = job.attempts.iter().filter(|attempt| attempt.state == AttemptState::Succeeded).count();
    let won = job.winner().is_some_and(|winner| winner.state == AttemptState::Succeeded);
    if (job.state == JobState::Succeeded) != won || succeeded > 1 {
        verdict.violation(format!("{key}: {}, completed by {}, {succeeded} winners", job.state, job.completed_by));
    }
    match job.state {
        JobState::Succeeded => {}
        JobState::Failed | JobState::Canceled | JobState::Indeterminate | JobState::Unknown if job.reason.is_empty() => {
            verdict.violation(format!("{key}: {} without a reason", job.state));
        }
        JobState::Failed | JobState::Unknown => {}
        JobState::Canceled | JobState::Indeterminate | JobState::Pending | JobState::Running | JobState::Canceling => {
            verdict.violation(format!("{key}: {} at rest", job.state));
        }
    }
    if job.state == JobState::Unknown && !hints.unknown.contains_key(&identity) {
        verdict.violation(format!("{key}: unknown, and not on the list of unknown jobs"));
    }
    if !job.is_ended() && !hints.due.contains_key(&identity) {
        verdict.violation(format!("{key}: {} without a hint", job.state));
    }
}

/// What the provider did is what the attempts say.
fn check_executions(verdict: &mut Verdict, intent: &Intent, job: &Job, entries: &[&Entry]) {
    let key = &intent.key;
    let executed = entries.iter().filter(|entry| entry.executed).count();
    if job.class == Class::Exclusive && executed > 1 {
        verdict.violation(format!("{key}: executed {executed} times, {}", attempts(job)));
    }
    if job.state == JobState::Failed && executed > 0 {
        verdict.violation(format!("{key}: failed ({}), and executed {executed} times", job.reason));
    }
    let input = hex(&sha256(intent.input.as_bytes()));
    for entry in entries {
        if entry.job_id != job.id.to_string() {
            verdict.violation(format!("{key}: executed as {}, the record is {}", entry.job_id, job.id));
        }
        if entry.body_sha256 != input {
            verdict.violation(format!("{key}: the provider was sent something else"));
        }
        if !job.attempts.iter().any(|attempt| attempt.number.to_string() == entry.attempt) {
            verdict.violation(format!("{key}: attempt {} was sent without a write-ahead", entry.attempt));
        }
    }
    for attempt in &job.attempts {
        let own: Vec<_> = entries.iter().filter(|entry| entry.attempt == attempt.number.to_string()).collect();
        let executed = own.iter().filter(|entry| entry.executed).count();
        let number = attempt.number;
        if own.len() > 1 {
            verdict.violation(format!("{key}: attempt {number} was sent {} times", own.len()));
        }
        let right = match attempt.state {
            AttemptState::Succeeded | AttemptState::Discarded => executed == 1,
            AttemptState::Failed if attempt.reason == "not_sent" => own.is_empty(),
            AttemptState::Failed => executed == 0,
            AttemptState::Aborted => own.is_empty(),
            AttemptState::Unknown => true,
            // Of a gateway that died after its race had been won: nobody looks at an ended job again.
            AttemptState::Running if job.class == Class::Race && job.is_ended() => true,
            AttemptState::Starting | AttemptState::Running | AttemptState::Canceled | AttemptState::Abandoned => false,
        };
        if !right {
            let sent = own.len();
            verdict.violation(format!("{key}: attempt {number} is {}, sent {sent} times, executed {executed}", told(attempt)));
        }
    }
}

fn told(attempt: &Attempt) -> String {
    format!("{} ({})", attempt.state, attempt.reason)
}

fn attempts(job: &Job) -> String {
    job.attempts.iter().map(told).collect::<Vec<_>>().join(", ")
}

/// The result is this intent's, and nobody else's.
fn check_result(verdict: &mut Verdict, intent: &Intent, result: &[u8]) {
    let document: Value = serde_json::from_slice(result).unwrap_or_default();
    if document["body_sha256"] != hex(&sha256(intent.input.as_bytes())) {
        verdict.violation(format!("{}: its result is another's", intent.key));
    }
}

/// Nothing is in Redis but records, the blobs that they name, hints of jobs that need them, and the note of the schema.
async fn check_keys(verdict: &mut Verdict, fleet: &Fleet, store: &Store, jobs: &HashMap<Identity, Job>, hints: &Hints) {
    let keys: Vec<String> = fleet.redis.ask(&["KEYS", "*"]).await.unwrap();
    let named: BTreeSet<String> = jobs
        .iter()
        .flat_map(|(identity, job)| {
            [&job.input.body, &job.result.body].into_iter().filter_map(move |body| match body {
                Body::Blob { sha256, .. } => Some(format!("oj:{{{identity}}}:b:{}", hex(sha256))),
                Body::Inline(_) => None,
            })
        })
        .collect();
    let records: BTreeSet<String> = jobs.keys().map(|identity| format!("oj:{{{identity}}}")).collect();
    let (mut blobs, mut waiting) = (0, 0);
    for key in &keys {
        let hint = key.starts_with("oj:due:{") || key.starts_with("oj:unknown:{");
        if hint || key == "oj:meta" || records.contains(key) {
            continue;
        }
        if named.contains(key) {
            blobs += 1;
            continue;
        }
        let life_ms: i64 = fleet.redis.ask(&["PTTL", key]).await.unwrap();
        // Somebody asks about the job, or asked a short while ago.
        if key.strip_suffix(":ask").is_some_and(|record| records.contains(record)) && life_ms >= 0 {
            continue;
        }
        if key.contains(":b:") && (0..=BLOB_GRACE_MS).contains(&life_ms) {
            waiting += 1;
        } else {
            verdict.violation(format!("key {key} belongs to nothing and lives for {life_ms} ms"));
        }
    }
    let known: Vec<(&Identity, &Job)> = jobs.iter().collect();
    let keys_of_records: Vec<String> = known.iter().map(|(identity, _)| format!("oj:{{{identity}}}")).collect();
    let lives: Vec<i64> = fleet.redis.ask_of_each("PTTL", &keys_of_records, &[]).await;
    for ((identity, job), life_ms) in known.into_iter().zip(lives) {
        if job.is_ended() != (life_ms >= 0) {
            verdict.violation(format!("{identity}: {} and lives for {life_ms} ms", job.state));
        }
    }
    let mut standing = 0;
    for (identity, at_ms) in &hints.due {
        match jobs.get(identity) {
            None => verdict.violation(format!("a hint for {identity}, and no job")),
            Some(job) if job.is_ended() => {
                standing += 1;
                if *at_ms > store.now_ms() + UNKNOWN_LOOK_MS {
                    verdict.violation(format!("{identity}: {} and hinted for later than anybody looks", job.state));
                }
            }
            Some(_) => {}
        }
    }
    verdict.row("keys, blobs, blobs in their grace", format!("{}, {blobs}, {waiting}", keys.len()));
    verdict.row("hints: due, of ended jobs, unknown", format!("{}, {standing}, {}", hints.due.len(), hints.unknown.len()));
}
