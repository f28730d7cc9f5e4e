//! Each fault of Redis on its own, under steady load over HTTP: what clients see meanwhile, whether `/readyz` and `onejob doctor` tell
//! the truth, and that afterwards nothing is lost or done twice.
//!
//! The short forms are facts of the suite. `make faults` runs the long ones and prints the table of docs/OPERATIONS.md.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use onejob::fingerprint::{hex, sha256};
use onejob::provider::simulated::Entry;
use serde_json::Value;

use crate::fleet::Fleet;
use crate::fleet::client::{Clients, Told};
use crate::fleet::dice::setting;
use crate::fleet::intent::{Expect, Intent};
use crate::fleet::judge::{judge, rest};
use crate::fleet::proxy::Mode;
use crate::support::{SOON, standalone_only, until, until_within};

/// Clients that submit at once.
const CLIENTS: usize = 4;
/// Between two submits of one client.
const PAUSE: Duration = Duration::from_millis(40);
/// How long the load runs before a fault and after it.
const WARM: Duration = Duration::from_millis(700);
/// Between two looks at `/readyz`.
const LOOK: Duration = Duration::from_millis(50);
/// Lanes of the gateway (`redis.lanes`).
const LANES: f64 = 2.0;
/// The pause between two rebuildings of a lane is capped at two seconds; the first few are shorter.
const REBUILT_FIRST: f64 = 7.0;
/// A client is answered by then, whatever Redis does: two response timeouts, the wait that it asked for, and a busy machine.
const ANSWER_MAX: Duration = Duration::from_millis(3500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Restart,
    Pause,
    ScriptFlush,
    ClientKill,
    OutOfMemory,
    NoReplicas,
    Replica,
    /// Replies come so much later.
    Slow(Duration),
    /// A reply is lost, with its connection, ten times a second.
    LostReplies,
}

/// Whether new jobs are taken during a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    All,
    Some,
    None,
}

impl Fault {
    const ALL: [Fault; 10] = [
        Fault::Restart,
        Fault::Pause,
        Fault::ScriptFlush,
        Fault::ClientKill,
        Fault::OutOfMemory,
        Fault::NoReplicas,
        Fault::Replica,
        Fault::Slow(Duration::from_millis(300)),
        Fault::Slow(Duration::from_millis(800)),
        Fault::LostReplies,
    ];

    fn name(self) -> String {
        match self {
            Fault::Restart => "killed, started again after the fault".to_owned(),
            Fault::Pause => "paused (SIGSTOP)".to_owned(),
            Fault::ScriptFlush => "`SCRIPT FLUSH`, ten times a second".to_owned(),
            Fault::ClientKill => "`CLIENT KILL TYPE normal`, once a second".to_owned(),
            Fault::OutOfMemory => "out of memory".to_owned(),
            Fault::NoReplicas => "`min-replicas-to-write 1`, and none".to_owned(),
            Fault::Replica => "made a replica (`READONLY`)".to_owned(),
            Fault::Slow(hold) => format!("replies {} ms late", hold.as_millis()),
            Fault::LostReplies => "replies lost after execution, ten times a second".to_owned(),
        }
    }

    fn takes(self) -> Takes {
        match self {
            Fault::ScriptFlush => Takes::All,
            Fault::Slow(hold) if hold < Duration::from_millis(500) => Takes::All,
            Fault::ClientKill | Fault::LostReplies => Takes::Some,
            Fault::Restart | Fault::Pause | Fault::OutOfMemory | Fault::NoReplicas | Fault::Replica | Fault::Slow(_) => {
                Takes::None
            }
        }
    }

    /// Whether Redis still answers who asks about a job that it has.
    fn answers_duplicates(self) -> bool {
        matches!(self, Fault::OutOfMemory | Fault::NoReplicas)
    }

    /// What `doctor` and `/readyz` must name while no job can be taken.
    fn cause(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Fault::OutOfMemory => ("out of memory", &["out of memory"]),
            Fault::NoReplicas => ("not enough replicas", &["not enough replicas"]),
            Fault::Replica => ("a replica takes no jobs", &["read-only replica"]),
            Fault::Restart | Fault::Pause | Fault::Slow(_) => ("see that redis runs", &["connect", "no reply", "loading"]),
            Fault::ScriptFlush | Fault::ClientKill | Fault::LostReplies => ("", &[]),
        }
    }

    async fn begin(self, fleet: &Fleet) {
        match self {
            Fault::Restart => fleet.redis.die().await,
            Fault::Pause => fleet.redis.freeze().await,
            // Less than it uses, so that nothing new fits.
            Fault::OutOfMemory => fleet.redis.tell(&["CONFIG", "SET", "maxmemory", "1"]).await,
            Fault::NoReplicas => fleet.redis.tell(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await,
            // Of a master that is not there: it keeps what it has, and takes nothing.
            Fault::Replica => fleet.redis.tell(&["REPLICAOF", "127.0.0.1", "1"]).await,
            Fault::Slow(hold) => fleet.gateways[0].proxy.set(Mode::Hold(hold)),
            Fault::ScriptFlush | Fault::ClientKill | Fault::LostReplies => {}
        }
    }

    /// What happens again and again during the fault, and how often.
    async fn go_on(self, fleet: &Fleet, turn: u32) {
        match self {
            Fault::ScriptFlush => fleet.redis.tell(&["SCRIPT", "FLUSH"]).await,
            Fault::ClientKill if turn.is_multiple_of(10) => fleet.redis.tell(&["CLIENT", "KILL", "TYPE", "normal"]).await,
            Fault::LostReplies => fleet.gateways[0].proxy.lose_replies(1),
            Fault::ClientKill
            | Fault::Restart
            | Fault::Pause
            | Fault::OutOfMemory
            | Fault::NoReplicas
            | Fault::Replica
            | Fault::Slow(_) => {}
        }
    }

    async fn end(self, fleet: &Fleet) {
        match self {
            Fault::Restart => fleet.redis.revive().await,
            Fault::Pause => fleet.redis.thaw().await,
            Fault::OutOfMemory => fleet.redis.tell(&["CONFIG", "SET", "maxmemory", "0"]).await,
            Fault::NoReplicas => fleet.redis.tell(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await,
            Fault::Replica => fleet.redis.tell(&["REPLICAOF", "NO", "ONE"]).await,
            Fault::Slow(_) => fleet.gateways[0].proxy.set(Mode::Pass),
            Fault::LostReplies => fleet.gateways[0].proxy.lose_replies(0),
            Fault::ScriptFlush | Fault::ClientKill => {}
        }
    }
}

/// The job that has ended before the fault begins.
const BEFORE: usize = 0;
/// The job that is at its provider while the fault begins.
const BESIDE: usize = 1;
/// The first job of the load.
const LOAD: usize = 2;

/// An intent that the provider does after a while.
fn intent(number: usize) -> Intent {
    let delay_ms = if number == BESIDE { 900 } else { 30 };
    Intent {
        number,
        key: format!("order-{number}"),
        route: "print",
        input: format!("{{\"order\":{number},\"simulate\":\"delay={delay_ms}ms\"}}"),
        expect: Expect::Success,
        callers: 1,
        latecomer: false,
    }
}

/// What was seen of one fault.
struct Seen {
    length: Duration,
    /// Statuses of submits that were sent during the fault.
    statuses: BTreeMap<u16, usize>,
    longest: Duration,
    /// From the end of the fault until a client was told that it had created a job.
    taken_after: Duration,
    ready_after: Duration,
    /// Answers of `/readyz` during the fault: 200, and 503 by reason.
    ready: BTreeMap<String, usize>,
    doctor: (i32, String),
    rebuilt: f64,
    /// Jobs of the whole run by state, and whether they were executed.
    ends: BTreeMap<String, usize>,
}

async fn rebuilt(clients: &Clients, fleet: &Fleet) -> f64 {
    counted(clients, fleet, "onejob_lanes_rebuilt_total").await
}

/// The sum of the counters that begin so.
async fn counted(clients: &Clients, fleet: &Fleet, name: &str) -> f64 {
    let (_, page) = clients.page(fleet, 0, "/metrics").await;
    let lines = page.lines().filter(|line| line.starts_with(name));
    lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

/// What `/readyz` says, in a word.
async fn ready(clients: &Clients, fleet: &Fleet) -> String {
    let (status, page) = clients.page(fleet, 0, "/readyz").await;
    match status {
        200 => "ready".to_owned(),
        503 => serde_json::from_str::<Value>(&page).unwrap()["reason"].as_str().unwrap_or("no reason").to_owned(),
        other => other.to_string(),
    }
}

async fn doctor(fleet: &Fleet) -> (i32, String) {
    let output = fleet.gateways[0].command(&["doctor"]).output().await.expect("the program");
    // A table breaks lines where it likes.
    let text = String::from_utf8_lossy(&output.stdout).replace('│', " ");
    (output.status.code().expect("it ends"), text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// A load of many clients, a fault in the middle of it, and a look at everything. Panics where a promise is broken.
async fn endure(fault: Fault, length: Duration) -> Seen {
    let fleet = Fleet::start(1, "succeed").await;
    let (clients, count, over) = (Clients::new(), AtomicUsize::new(LOAD), AtomicBool::new(false));
    let load = async {
        join_all((0..CLIENTS).map(|_| async {
            while !over.load(Ordering::SeqCst) {
                clients.submit(&fleet, 0, &intent(count.fetch_add(1, Ordering::SeqCst))).await;
                tokio::time::sleep(PAUSE).await;
            }
        }))
        .await;
    };
    let weather = async {
        let weather = break_and_mend(fault, length, &fleet, &clients).await;
        over.store(true, Ordering::SeqCst);
        weather
    };
    let ((), weather) = tokio::join!(load, weather);
    let told = clients.told();
    let during: Vec<&Told> = told.iter().filter(|told| told.at >= weather.from && told.at < weather.until).collect();
    let after = told.iter().filter(|told| told.at + told.took >= weather.until && told.replayed == Some(false));
    let taken_after = after.map(|told| (told.at + told.took).duration_since(weather.until)).min().expect("jobs are taken again");
    let mut statuses = BTreeMap::new();
    for told in &during {
        *statuses.entry(told.status).or_default() += 1;
    }
    check_answers(fault, &weather, &told, &during);

    // Whoever was not told the end asks again, with the same key.
    let intents: Vec<Intent> = (0..count.load(Ordering::SeqCst)).map(intent).collect();
    let ended: BTreeSet<usize> = told.iter().filter(|told| told.is_ended()).map(|told| told.intent).collect();
    for some in intents.chunks(16) {
        let again = some.iter().filter(|intent| !ended.contains(&intent.number));
        join_all(again.map(|intent| clients.want(&fleet, 0, intent))).await;
    }
    let store = fleet.store().await;
    rest(&fleet, &store).await;
    let verdict = judge(&fleet, &store, &intents, &clients.told()).await;
    assert!(verdict.violations.is_empty(), "{fault:?}\n{}", verdict.table());
    // Nothing was lost, so nothing may be told of as repaired. It was, where replies were slow and a job ended in between.
    let repaired = counted(&clients, &fleet, r#"onejob_sweeps_total{what="hint_repaired"}"#).await;
    assert_eq!(repaired, 0.0, "{fault:?}: hints were repaired that nobody had lost");
    let mut ends = BTreeMap::new();
    for ((state, _), executed) in &verdict.ends {
        for (jobs, how) in executed.iter().zip([", not executed", "", ", executed again"]) {
            if *jobs > 0 {
                *ends.entry(format!("{state}{how}")).or_default() += jobs;
            }
        }
    }
    fleet.stop().await;
    store.close().await;
    Seen {
        length: weather.until - weather.from,
        statuses,
        longest: told.iter().map(|told| told.took).max().unwrap_or_default(),
        taken_after,
        ready_after: weather.ready_after,
        ready: weather.ready,
        doctor: weather.doctor,
        rebuilt: weather.rebuilt,
        ends,
    }
}

/// When the fault was there, and what was seen of it from outside.
struct Weather {
    /// From here on it was seen.
    from: Instant,
    until: Instant,
    ready: BTreeMap<String, usize>,
    ready_after: Duration,
    doctor: (i32, String),
    rebuilt: f64,
}

async fn break_and_mend(fault: Fault, length: Duration, fleet: &Fleet, clients: &Clients) -> Weather {
    tokio::time::sleep(WARM).await;
    let (before, beside) = (intent(BEFORE), intent(BESIDE));
    until("the first job has ended", async || clients.submit(fleet, 0, &before).await.is_ended()).await;
    let rebuilt_before = rebuilt(clients, fleet).await;
    // It waits for a second at most, and is told that the job runs.
    let begin = async {
        until("it is at its provider", async || fleet.provider.ledger().entries.iter().any(is_beside)).await;
        fault.begin(fleet).await;
    };
    tokio::join!(clients.submit(fleet, 0, &beside), begin);
    if fault.takes() == Takes::None {
        until("the fault is seen", async || ready(clients, fleet).await != "ready").await;
    }
    let from = Instant::now();
    let executed = settled_executions(fault, fleet).await;
    let mut seen = BTreeMap::new();
    let looks = async {
        let mut turn = 0;
        while from.elapsed() < length {
            fault.go_on(fleet, turn).await;
            *seen.entry(ready(clients, fleet).await).or_insert(0) += 1;
            tokio::time::sleep(LOOK * 2).await;
            turn += 1;
        }
    };
    let (doctor, ()) = tokio::join!(doctor(fleet), looks);
    if fault.answers_duplicates() {
        let told = clients.submit(fleet, 0, &before).await;
        assert!(told.is_ended(), "{fault:?}: a duplicate still gets its answer, not {told:?}");
    }
    if fault == Fault::Replica {
        let told = clients.submit(fleet, 0, &before).await;
        assert_eq!(told.status, 503, "{fault:?}: what a replica says of a job is not told: {told:?}");
    }
    if fault == Fault::OutOfMemory {
        let told = clients.submit(fleet, 0, &beside).await;
        assert_eq!(told.state, "succeeded", "{fault:?}: a result that comes during the fault is stored: {told:?}");
    }
    if let Some(executed) = executed {
        assert_eq!(
            fleet.provider.ledger().received,
            executed,
            "{fault:?}: the provider is not called for a job that is not taken"
        );
    }
    let rebuilt = rebuilt(clients, fleet).await - rebuilt_before;
    let until = Instant::now();
    fault.end(fleet).await;
    until_within(SOON, "it is ready again", async || ready(clients, fleet).await == "ready").await;
    let ready_after = until.elapsed();
    tokio::time::sleep(WARM).await;
    Weather { from, until, ready: seen, ready_after, doctor, rebuilt }
}

fn is_beside(entry: &Entry) -> bool {
    entry.body_sha256 == hex(&sha256(intent(BESIDE).input.as_bytes()))
}

/// How often the provider had been called, once what was under way when the fault began is through.
async fn settled_executions(fault: Fault, fleet: &Fleet) -> Option<u64> {
    match fault {
        Fault::Restart | Fault::Pause | Fault::OutOfMemory | Fault::NoReplicas | Fault::Replica => {
            tokio::time::sleep(WARM).await;
            Some(fleet.provider.ledger().received)
        }
        // A claim may still be confirmed in time.
        Fault::Slow(_) | Fault::ScriptFlush | Fault::ClientKill | Fault::LostReplies => None,
    }
}

/// The truth of what clients, `/readyz` and `doctor` said.
fn check_answers(fault: Fault, weather: &Weather, told: &[Told], during: &[&Told]) {
    for told in told {
        assert!(matches!(told.status, 200 | 202 | 503), "{fault:?}: a client always gets an answer, not {told:?}");
        assert!(told.status != 503 || told.retry_after, "{fault:?}: 503 says when to come again: {told:?}");
        assert!(told.took < ANSWER_MAX, "{fault:?}: an answer takes {:?}: {told:?}", told.took);
    }
    let (doctor_code, doctor_text) = &weather.doctor;
    let (cause, reasons) = fault.cause();
    let created = |told: &&&Told| told.replayed == Some(false) && told.at + told.took < weather.until;
    match fault.takes() {
        Takes::None => {
            let taken = during.iter().filter(created).count();
            assert_eq!(taken, 0, "{fault:?}: no job can be taken");
            assert!(during.iter().any(|told| told.status == 503), "{fault:?}: clients are told so");
            for reason in weather.ready.keys() {
                assert!(reasons.contains(&reason.as_str()), "{fault:?}: /readyz says {reason:?}");
            }
            assert_eq!(*doctor_code, 6, "{fault:?}: {doctor_text}");
            assert!(doctor_text.contains(cause), "{fault:?}: {doctor_text}");
        }
        // Most of them: on a machine that does much else, a reply is late now and then all the same.
        Takes::All => {
            let accepted = during.iter().filter(|told| told.is_accepted()).count();
            assert!(accepted * 2 > during.len(), "{fault:?}: jobs are taken, {accepted} of {}", during.len());
            let (ready, looks) = (weather.ready.get("ready").copied().unwrap_or(0), weather.ready.values().sum::<usize>());
            assert!(ready * 2 > looks, "{fault:?}: /readyz says {:?}", weather.ready);
        }
        Takes::Some => assert!(during.iter().any(|told| told.is_accepted()), "{fault:?}: some jobs are taken"),
    }
    // Half of a second at least between two, once they are many.
    let seconds = (weather.until - weather.from).as_secs_f64();
    let bound = LANES * (REBUILT_FIRST + seconds);
    assert!(weather.rebuilt <= bound, "{fault:?}: {} lanes were rebuilt in {seconds:.1} s", weather.rebuilt);
}

/// Short enough for the suite.
const SHORT: Duration = Duration::from_secs(3);

#[tokio::test]
async fn while_redis_is_down_submits_answer_503_and_the_provider_is_not_called() {
    endure(Fault::Restart, SHORT).await;
}

#[tokio::test]
async fn while_redis_is_paused_submits_answer_503_and_the_provider_is_not_called() {
    endure(Fault::Pause, SHORT).await;
}

#[tokio::test]
async fn forgotten_scripts_are_noticed_by_nobody() {
    endure(Fault::ScriptFlush, SHORT).await;
}

#[tokio::test]
async fn cut_connections_cost_a_moment_and_nothing_else() {
    endure(Fault::ClientKill, SHORT).await;
}

#[tokio::test]
async fn out_of_memory_new_jobs_are_refused_and_old_ones_are_answered() {
    endure(Fault::OutOfMemory, SHORT).await;
}

#[tokio::test]
async fn without_replicas_that_it_insists_on_new_jobs_are_refused() {
    endure(Fault::NoReplicas, SHORT).await;
}

/// A lane that found itself on a replica was built anew at every call, forty times a second.
#[tokio::test]
async fn a_replica_is_not_connected_to_again_and_again() {
    if standalone_only("REPLICAOF is not for nodes of a cluster") {
        return;
    }
    endure(Fault::Replica, SHORT).await;
}

#[tokio::test]
async fn slow_replies_are_waited_for() {
    endure(Fault::Slow(Duration::from_millis(300)), SHORT).await;
}

#[tokio::test]
async fn replies_slower_than_the_timeout_are_503_and_nothing_runs_twice() {
    endure(Fault::Slow(Duration::from_millis(800)), SHORT).await;
}

#[tokio::test]
async fn lost_replies_are_asked_for_again_and_nothing_runs_twice() {
    endure(Fault::LostReplies, SHORT).await;
}

/// Longer than the patience of anybody who waits for an answer.
const LONG_SECONDS: u64 = 30;

/// The long form, by `make faults`: prints the table of docs/OPERATIONS.md.
#[tokio::test]
#[ignore = "takes minutes: make faults"]
async fn every_fault_for_half_a_minute() {
    let mut table =
        "| fault, half a minute | submits meanwhile | longest answer | ready, first new job after | `/readyz` meanwhile \
                     | `doctor` | lanes rebuilt a minute | jobs at the end |\n|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    let length = Duration::from_secs(setting("ONEJOB_FAULT_SECONDS").unwrap_or(LONG_SECONDS));
    for fault in Fault::ALL {
        let seen = endure(fault, length).await;
        let listed = |counts: Vec<String>| counts.join(", ");
        let cells = [
            fault.name(),
            listed(seen.statuses.iter().map(|(status, times)| format!("{status}: {times}")).collect()),
            format!("{:.1} s", seen.longest.as_secs_f64()),
            format!("{:.2} s, {:.2} s", seen.ready_after.as_secs_f64(), seen.taken_after.as_secs_f64()),
            listed(seen.ready.iter().map(|(reason, times)| format!("{reason}: {times}")).collect()),
            format!("exit code {}", seen.doctor.0),
            format!("{:.0}", seen.rebuilt * 60.0 / seen.length.as_secs_f64()),
            listed(seen.ends.iter().map(|(state, jobs)| format!("{jobs} {state}")).collect()),
        ];
        let row = format!("| {} |\n", cells.join(" | "));
        print!("{row}");
        table.push_str(&row);
    }
    println!("\n{table}");
}
