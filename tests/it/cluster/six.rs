//! Six nodes, two gateways and clients over HTTP at a fixed rate, in one run: a slot moves there and back, a master is killed and
//! its replica promoted by the cluster itself, and between them it is calm. What clients saw, as a table, and what became of every
//! intent.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use onejob::fingerprint::digest;
use onejob::job::{Identity, JobId, JobState};
use onejob::server::OPEN_OWNER;
use onejob::store::Read;

use super::node::{Node, ThreeMasters};
use super::visitors::Visitors;
use super::{keys_of_one_slot, store};
use crate::fleet::dice::setting;
use crate::support::gateway::Site;
use crate::support::{simulated, until_within};

/// How long a cluster may take to see that a master is gone, promote its replica and serve again.
const PROMOTION: Duration = Duration::from_secs(60);
/// So long without an error, and it is over.
const WHOLE: Duration = Duration::from_secs(1);
/// What was acknowledged so shortly before a master died may have died with it.
const LAST_INSTANTS: Duration = Duration::from_secs(1);

/// How an error begins that a client answers with the same request.
const RETRYABLE: &str = "retryable 503";

/// What is counted meanwhile.
const COUNTED: [(&str, &str); 5] = [
    ("MOVED", r#"onejob_cluster_redirects_total{kind="moved"}"#),
    ("ASK", r#"onejob_cluster_redirects_total{kind="ask"}"#),
    ("TRYAGAIN", r#"onejob_cluster_redirects_total{kind="tryagain"}"#),
    ("sent on too often", r#"onejob_cluster_redirects_total{kind="exhausted"}"#),
    ("maps that had changed", r#"onejob_cluster_maps_total{result="changed"}"#),
];

/// How large a run is.
struct Run {
    /// New intents a second.
    rate: u32,
    calm: Duration,
    /// Intents whose jobs are in the slot that moves.
    hot: usize,
    /// How long it stays as it is after each key that has moved.
    after_each: Duration,
    dies: Dies,
    /// How long a gateway waits for a node.
    patience: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Dies {
    /// As it is.
    AtOnce,
    /// Once its replica has all that it acknowledged: what follows is the gateway's own to lose.
    HavingTold,
}

struct Phase {
    name: &'static str,
    from: Instant,
    to: Instant,
    disturbed: bool,
}

/// What became of the intents.
#[derive(Default)]
struct Fate {
    intents: usize,
    /// No client saw an error before the master died.
    unmoved: bool,
    /// What the gateways counted: commands that were sent on, by why, and readings of the map.
    counted: BTreeMap<&'static str, u64>,
    /// What clients were told besides answers and retryable 503.
    strange: BTreeSet<String>,
    /// Acknowledged, and not there or another job at the end; those of the master's last instants.
    lost: (usize, usize),
    /// Executed more than once; those of the last instants.
    twice: (usize, usize),
    never: usize,
    executions: usize,
    /// Not succeeded, and why, but for those of the last instants; these.
    unsettled: (Vec<String>, usize),
}

async fn run(run: &Run) -> (String, Fate) {
    let mut cluster = ThreeMasters::start(true).await;
    let site = Site::open_before(simulated().await).await;
    let url = cluster.url();
    let settings = [
        ("redis.url", url.as_str()),
        ("redis.connect_timeout", run.patience),
        ("redis.response_timeout", run.patience),
        ("runtime.lease", "3s"),
    ];
    let visitors = Visitors::of(vec![site.start(&settings, None).await, site.start(&settings, None).await]);
    let (slot, hot) = keys_of_one_slot(OPEN_OWNER, run.hot);
    for key in &hot[..run.hot / 2] {
        visitors.want(key, Instant::now());
    }
    let mut phases: Vec<Phase> = Vec::new();
    let mut end = |name, from, disturbed| phases.push(Phase { name, from, to: Instant::now(), disturbed });

    let from = Instant::now();
    visitors.come(run.rate, run.calm).await;
    end("calm", from, false);

    let from = Instant::now();
    let moves = async {
        let mut moved = 0;
        for (from, to) in [(0, 2), (2, 0)] {
            let mut steps = 0;
            moved += cluster
                .move_slot(slot, &cluster.masters[from], &cluster.masters[to], async || {
                    // Old ones and new ones, some here and some there.
                    visitors.want(&hot[steps % hot.len()], Instant::now());
                    visitors.want(&hot[hot.len() - 1 - steps % hot.len()], Instant::now());
                    steps += 1;
                    tokio::time::sleep(run.after_each).await;
                })
                .await;
        }
        moved
    };
    let moved = while_they_come(&visitors, run.rate, moves).await;
    assert!(moved >= run.hot, "{moved} keys moved");
    let stats: String = cluster.masters[2].tell(&["INFO", "commandstats"]).await;
    assert!(stats.contains("cmdstat_asking"), "somebody was sent there before the slot was");
    let unmoved = visitors.last_error().is_none();
    end("a slot moves there and back", from, true);

    let from = Instant::now();
    visitors.come(run.rate, run.calm).await;
    end("calm", from, false);

    let killed = Instant::now();
    let ThreeMasters { masters, replicas } = &mut cluster;
    let promoted =
        while_they_come(&visitors, run.rate, die_and_be_replaced(&visitors, run.dies, &mut masters[0], &replicas[0])).await;
    end("a master is killed", killed, true);

    let from = Instant::now();
    visitors.come(run.rate, run.calm).await;
    end("calm", from, false);
    visitors.all_are_answered().await;
    let resting = Instant::now();
    let mut counted = BTreeMap::new();
    for (what, series) in COUNTED {
        for gateway in visitors.gateways() {
            *counted.entry(what).or_default() += gateway.count(series).await;
        }
    }
    let fate = Fate { unmoved, counted, ..judge(&visitors, &cluster, &site, killed).await };
    let rest = resting.elapsed();
    let mut text = table(&phases, &visitors);
    let counted: Vec<String> = fate.counted.iter().map(|(what, times)| format!("{times} {what}")).collect();
    let _ = write!(
        text,
        "\n{} intents at {} a second, each submitted twice; {moved} keys moved; promoted {promoted:.1?} after the kill; at rest after \
         {rest:.1?}. Acknowledged and lost: {} ({} of them in the last second of the master). Executed: {} times; more than once: {} \
         ({}); never: {}. Not settled: {}. Of both gateways: {}.\n",
        fate.intents,
        run.rate,
        fate.lost.0,
        fate.lost.1,
        fate.executions,
        fate.twice.0,
        fate.twice.1,
        fate.never,
        fate.unsettled.0.len() + fate.unsettled.1,
        counted.join(", ")
    );
    (text, fate)
}

/// Does something while new intents come, and until it is done.
async fn while_they_come<T>(visitors: &Visitors, rate: u32, does: impl Future<Output = T>) -> T {
    tokio::select! {
        done = does => done,
        () = visitors.come(rate, Duration::MAX) => unreachable!("they come for ever"),
    }
}

/// How long it took until the replica was master; returns when nobody has seen an error for a while.
async fn die_and_be_replaced(visitors: &Visitors, dies: Dies, master: &mut Node, replica: &Node) -> Duration {
    let began = Instant::now();
    match dies {
        Dies::AtOnce => master.die(),
        Dies::HavingTold => master.die_having_told(replica).await,
    }
    until_within(PROMOTION, "the replica is promoted", async || replica.is_master().await).await;
    let promoted = began.elapsed();
    let from = Instant::now();
    until_within(PROMOTION, "no client sees an error", async || {
        visitors.last_error().map_or(from, |at| at.max(from)).elapsed() > WHOLE
    })
    .await;
    promoted
}

/// Compares what clients were told, what is stored and what was executed.
async fn judge(visitors: &Visitors, cluster: &ThreeMasters, site: &Site, killed: Instant) -> Fate {
    let store = store(&cluster.url()).await;
    let acknowledged = visitors.acknowledged();
    let mut executed: BTreeMap<Identity, usize> = BTreeMap::new();
    let settled = async || {
        let mut open = BTreeMap::new();
        for key in acknowledged.keys() {
            match store.read_job(Identity::of(&digest(OPEN_OWNER, key))).await {
                Ok(Read::Found(job)) if job.state == JobState::Succeeded => {}
                other => {
                    open.insert(key.clone(), format!("{key}: {other:?}"));
                }
            }
        }
        open
    };
    let mut open = settled().await;
    let deadline = Instant::now() + PROMOTION;
    while !open.is_empty() && Instant::now() < deadline {
        tokio::time::sleep(WHOLE / 4).await;
        open = settled().await;
    }
    let ledger = site.printer.ledger();
    assert_eq!(ledger.dropped, 0, "the ledger has every execution");
    for entry in ledger.entries.iter().filter(|entry| entry.executed) {
        *executed.entry(entry.job_id.parse::<JobId>().unwrap().identity()).or_default() += 1;
    }
    let errors = visitors.requests().into_iter().filter_map(|request| request.error);
    let strange = errors.filter(|error| !error.starts_with(RETRYABLE)).collect();
    let mut fate = Fate { intents: acknowledged.len(), strange, ..Fate::default() };
    for (key, known) in &acknowledged {
        let identity = Identity::of(&digest(OPEN_OWNER, key));
        let last = usize::from(known.at < killed && killed - known.at < LAST_INSTANTS);
        match open.remove(key) {
            Some(_) if last > 0 => fate.unsettled.1 += 1,
            Some(why) => fate.unsettled.0.push(why),
            None => {}
        }
        let found = match store.read_job(identity).await.unwrap() {
            Read::Found(job) => Some(job.id.to_string()),
            _ => None,
        };
        if known.ids.len() > 1 || found.as_ref() != known.ids.last() {
            fate.lost = (fate.lost.0 + 1, fate.lost.1 + last);
        }
        let times = executed.remove(&identity).unwrap_or_default();
        fate.executions += times;
        fate.never += usize::from(times == 0);
        if times > 1 {
            fate.twice = (fate.twice.0 + 1, fate.twice.1 + last);
        }
    }
    assert!(executed.is_empty(), "executed, and nobody was told: {executed:?}");
    store.close().await;
    fate
}

/// A wish is of the disturbance that it met, or of the calm that it ended in; an error is of its moment.
fn table(phases: &[Phase], visitors: &Visitors) -> String {
    let mut text = "| phase | seconds | requests | retryable 503 | other errors | p50 | p99 | longest |\n".to_owned();
    text.push_str("|---|---|---|---|---|---|---|---|\n");
    let mut wishes: Vec<Vec<Duration>> = phases.iter().map(|_| Vec::new()).collect();
    for wish in visitors.wishes() {
        let met = phases.iter().position(|phase| phase.disturbed && wish.due < phase.to && wish.ended >= phase.from);
        let ended = phases.iter().position(|phase| wish.ended < phase.to).unwrap_or(phases.len() - 1);
        wishes[met.unwrap_or(ended)].push(wish.ended - wish.due);
    }
    let requests = visitors.requests();
    for (place, (phase, mut took)) in phases.iter().zip(wishes).enumerate() {
        took.sort_unstable();
        let at = |hundredths: usize| took.get((took.len() * hundredths / 100).min(took.len().saturating_sub(1))).copied();
        let ms = |time: Option<Duration>| time.map_or("–".to_owned(), |time| format!("{} ms", time.as_millis()));
        let last = place + 1 == phases.len();
        let own = requests.iter().filter(|request| request.at >= phase.from && (request.at < phase.to || last));
        let (mut count, mut refused, mut others) = (0, 0, BTreeMap::<&str, usize>::new());
        for request in own {
            count += 1;
            match request.error.as_deref() {
                None => {}
                Some(kind) if kind.starts_with(RETRYABLE) => refused += 1,
                Some(kind) => *others.entry(kind).or_default() += 1,
            }
        }
        let others: Vec<String> = others.into_iter().map(|(kind, times)| format!("{times} × {kind}")).collect();
        let others = if others.is_empty() { "0".to_owned() } else { others.join(", ") };
        let seconds = (phase.to - phase.from).as_secs_f64();
        let _ = writeln!(
            text,
            "| {} | {seconds:.1} | {count} | {refused} | {others} | {} | {} | {} |",
            phase.name,
            ms(at(50)),
            ms(at(99)),
            ms(took.last().copied())
        );
    }
    text
}

/// Judges what must be so in every run.
fn accept(fate: &Fate) {
    assert!(fate.unsettled.0.is_empty(), "not settled: {:?}", fate.unsettled.0);
    assert_eq!(fate.never, 0, "intents that were never executed");
    assert_eq!(fate.lost.0, fate.lost.1, "acknowledged jobs are lost only with their master");
    assert_eq!(fate.twice.0, fate.twice.1, "and only those are executed twice");
    let missed = ["404 job-unknown", "410 job-gone"];
    let strange: Vec<&String> = fate.strange.iter().filter(|told| fate.lost.0 == 0 || !missed.contains(&told.as_str())).collect();
    assert!(strange.is_empty(), "clients were told {strange:?}");
}

/// The short form: what a master that dies takes with it is excluded, and so is any loss.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_six_nodes_lose_nothing_while_a_slot_moves_and_a_master_dies() {
    let second = Duration::from_secs(1);
    let short = Run { rate: 10, calm: second, hot: 4, after_each: second / 10, dies: Dies::HavingTold, patience: "1s" };
    let (text, fate) = run(&short).await;
    eprintln!("{text}");
    accept(&fate);
    assert_eq!((fate.lost.0, fate.twice.0, fate.unsettled.1), (0, 0, 0), "{text}");
    assert!(fate.unmoved, "{text}");
    assert!(["MOVED", "ASK", "maps that had changed"].iter().all(|what| fate.counted[what] > 0), "{text}");
}

/// The long form, by `make cluster-storm`: the master dies as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make cluster-storm"]
async fn the_table_of_six_nodes() {
    let rate = setting("ONEJOB_CLUSTER_RATE").map_or(50, |rate| u32::try_from(rate).expect("a rate"));
    let long = Run {
        rate,
        calm: Duration::from_secs(15),
        hot: 12,
        after_each: Duration::from_millis(400),
        dies: Dies::AtOnce,
        patience: "500ms",
    };
    let (text, fate) = run(&long).await;
    println!("{text}");
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/verify");
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("cluster.md"), &text).unwrap();
    accept(&fate);
}
