//! The promises of docs/DEDUP.md while things break, through `Dedup` alone: nothing here knows how clicks are stored.
//!
//! `replies` loses what is on the wire; `crashes` kills processes between the two phases; `failover` and `masters` take the server
//! away; `sequences` compares any order of calls by several callers with a map; `volume` has many.

mod crashes;
mod failover;
mod masters;
mod replies;
mod sequences;
mod volume;

use std::collections::BTreeMap;
use std::time::Duration;

use onejob::dedup::{BatchToken, Claimed, ClickId, Committed, Dedup, FieldValue, Stream, Verdict};
use onejob::store::{Store, StoreOptions};
use tokio::task::JoinSet;

use crate::support::until;

/// How long a batch is tried that is to be answered in the end, on a machine that does much else.
const PATIENT: Duration = Duration::from_secs(120);

/// Tasks that ask at once.
const TASKS: u64 = 4;
/// Users of a batch that no other task asks about, and of how many.
const OWN: (u64, u64) = (40, 1_500);
/// Users of a batch that every task asks about, and of how many.
const SHARED: (u64, u64) = (20, 700);
/// The first of a task's own users; those below belong to all.
const TASK_USERS: u64 = 1_000_000;

fn stream(mirrored: bool, name: &str, shards: u16) -> Stream {
    Stream { shards, mirrored, expected: 10_000, ..Stream::new(name, &["user"]) }
}

fn id(stream: &Stream, user: u64) -> ClickId {
    stream.id(|_| Some(FieldValue::Integer(user.into()))).unwrap()
}

fn ids(stream: &Stream, users: impl IntoIterator<Item = u64>) -> Vec<ClickId> {
    users.into_iter().map(|user| id(stream, user)).collect()
}

/// A store at a URL, once one can be had there.
async fn store_with(options: StoreOptions) -> Store {
    let mut store = None;
    until("a store can be had", async || {
        store = Store::connect(options.clone()).await.ok();
        store.is_some()
    })
    .await;
    store.unwrap().0
}

/// Two processes that ask in a store: of a mirrored stream each has its copy.
fn processes(store: &Store, stream: &Stream) -> [Dedup; 2] {
    [0; 2].map(|_| Dedup::new(store, stream.clone()).unwrap().with_patience(PATIENT))
}

/// The users of one batch of a task: some come again after a while.
fn users(task: u64, batch: u64) -> Vec<u64> {
    let own = (0..OWN.0).map(|n| (task + 1) * TASK_USERS + (batch * 131 + n * 17) % OWN.1);
    let shared = (0..SHARED.0).map(|n| (batch * 37 + task * 11 + n * 13) % SHARED.1);
    own.chain(shared).collect()
}

/// What a run was told: of each task's own users in their order whether they count, of the others how often each did.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    own: BTreeMap<u64, Vec<bool>>,
    shared: BTreeMap<u64, usize>,
}

/// Tasks that ask about batch after batch at once, in processes. `ask` says which places of a batch count.
async fn run<F>(
    processes: &[Dedup],
    batches: u64,
    ask: impl Fn(Dedup, Vec<ClickId>, BatchToken) -> F + Copy + Send + 'static,
) -> Told
where
    F: Future<Output = Vec<bool>> + Send,
{
    let mut tasks = JoinSet::new();
    for (task, dedup) in (0..TASKS).zip(processes.iter().cycle()) {
        let dedup = dedup.clone();
        tasks.spawn(async move {
            let mut counted = Vec::new();
            for batch in 0..batches {
                let users = users(task, batch);
                let token = BatchToken::named(&format!("task {task}, batch {batch}"));
                let told = ask(dedup.clone(), ids(dedup.stream(), users.iter().copied()), token).await;
                assert_eq!(told.len(), users.len(), "task {task}, batch {batch}");
                counted.extend(users.into_iter().zip(told));
            }
            (task, counted)
        });
    }
    let mut told = Told::default();
    while let Some(ended) = tasks.join_next().await {
        let (task, counted) = ended.unwrap();
        for (user, counts) in counted {
            if user >= TASK_USERS {
                told.own.entry(task).or_default().push(counts);
            } else {
                *told.shared.entry(user).or_default() += usize::from(counts);
            }
        }
    }
    told
}

/// What [`run`] is told where nothing breaks, by a map.
fn expected(batches: u64) -> Told {
    let (mut seen, mut told) = (std::collections::HashSet::new(), Told::default());
    for task in 0..TASKS {
        for user in (0..batches).flat_map(|batch| users(task, batch)) {
            if user >= TASK_USERS {
                told.own.entry(task).or_default().push(seen.insert(user));
            } else {
                told.shared.insert(user, 1);
            }
        }
    }
    told
}

/// Every user of a run.
fn everybody(batches: u64) -> Vec<u64> {
    let all = (0..TASKS).flat_map(|task| (0..batches).flat_map(move |batch| users(task, batch)));
    let mut all: Vec<u64> = all.collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Nothing that was told `first` is new to anybody.
async fn assert_remembered(dedup: &Dedup, users: &[u64]) {
    let batch = ids(dedup.stream(), users.iter().copied());
    let told = dedup.check(&batch, BatchToken::random()).await.unwrap();
    let new: Vec<&u64> =
        users.iter().zip(&told).filter(|(_, verdict)| **verdict == Verdict::First).map(|(user, _)| user).collect();
    assert!(new.is_empty(), "{} of {} are new again: {new:?}", new.len(), users.len());
}

/// Asks in one phase.
async fn check(dedup: Dedup, batch: Vec<ClickId>, token: BatchToken) -> Vec<bool> {
    let told = dedup.check(&batch, token).await.unwrap();
    told.into_iter().map(|verdict| verdict == Verdict::First).collect()
}

/// Asks in two, and again about what somebody else holds.
async fn claim_and_commit(dedup: Dedup, batch: Vec<ClickId>, mut token: BatchToken) -> Vec<bool> {
    let mut counted = vec![false; batch.len()];
    let mut open: Vec<usize> = (0..batch.len()).collect();
    while !open.is_empty() {
        let asked: Vec<ClickId> = open.iter().map(|place| batch[*place]).collect();
        let told = dedup.claim(&asked, token).await.unwrap();
        let places = |of: Claimed| open.iter().zip(&told).filter(move |(_, told)| **told == of).map(|(place, _)| *place);
        let (mine, held): (Vec<usize>, Vec<usize>) = (places(Claimed::First).collect(), places(Claimed::Held).collect());
        let written: Vec<ClickId> = mine.iter().map(|place| batch[*place]).collect();
        let committed = dedup.commit(&written, token).await.unwrap();
        assert!(committed.iter().all(|each| *each == Committed::Committed), "no lease has lapsed");
        mine.into_iter().for_each(|place| counted[place] = true);
        (open, token) = (held, BatchToken::random());
        // Whoever holds them commits, or gives them back.
        tokio::task::yield_now().await;
    }
    counted
}

/// Claims, gives back all that it got, twice, and claims and commits then.
async fn release_and_claim(dedup: Dedup, batch: Vec<ClickId>, token: BatchToken) -> Vec<bool> {
    let told = dedup.claim(&batch, token).await.unwrap();
    let mine: Vec<ClickId> = batch.iter().zip(told).filter(|(_, told)| *told == Claimed::First).map(|(id, _)| *id).collect();
    dedup.release(&mine, token).await.unwrap();
    dedup.release(&mine, token).await.unwrap();
    claim_and_commit(dedup, batch, BatchToken::random()).await
}
