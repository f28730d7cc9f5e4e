//! Two phases, and real processes that are killed between any two steps of them: each click is counted once.
//!
//! A pipeline claims a batch, writes down in its journal what is new, commits it, and writes down what of it counts. Started again it
//! goes on where its journal ends: what is written and not yet settled is committed, with the token that it was claimed with.

use std::collections::BTreeMap;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use onejob::dedup::{BatchToken, Claimed, Committed, Dedup, Stream};
use onejob::store::StoreOptions;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::{PATIENT, ids, store_with, stream};
use crate::fleet::dice::{Dice, seed};
use crate::support::{Redis, kinds};

/// How long a claim stands. A pipeline of a busy machine may be slower: its clicks are told as lost then.
const LEASE: Duration = Duration::from_secs(2);
/// What a test, started again by itself, is told to be: the pipeline that it kills.
const PIPELINE: &str = "ONEJOB_TEST_PIPELINE";
/// How often each pipeline is killed.
const KILLS: usize = 10;

/// A line of a journal.
#[derive(Debug, Deserialize, Serialize)]
enum Entry {
    /// These are new, and may yet turn out to be lost; these somebody else holds.
    Written { batch: usize, turn: u32, new: Vec<u64>, held: Vec<u64> },
    /// These count; these are still open.
    Settled { batch: usize, turn: u32, counted: Vec<u64>, open: Vec<u64> },
}

/// What a pipeline is to do, and where.
#[derive(Deserialize, Serialize)]
struct Task {
    url: String,
    journal: PathBuf,
    /// The users of its batches, each once in its batch.
    batches: Vec<Vec<u64>>,
    /// Of the stream.
    mirrored: bool,
    /// It stops before the step of that number, and waits to be killed.
    stops_at: Option<u32>,
}

impl Task {
    fn new(mirrored: bool, redis: &Redis, dir: &Path, name: &str, batches: Vec<Vec<u64>>) -> Task {
        Task { url: redis.socket().to_owned(), journal: dir.join(name), batches, mirrored, stops_at: None }
    }

    async fn dedup(&self) -> Dedup {
        let patience = Duration::from_secs(10);
        let options = StoreOptions { connect_timeout: patience, response_timeout: patience, ..StoreOptions::new(&self.url) };
        let stream = Stream { lease: LEASE, ..stream(self.mirrored, "clicks", 3) };
        Dedup::new(&store_with(options).await, stream).unwrap().with_patience(PATIENT)
    }

    fn entries(&self) -> Vec<Entry> {
        let text = std::fs::read_to_string(&self.journal).unwrap_or_default();
        // A line without its end was never written.
        text.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// What counts, by its journal, in order.
    fn counted(&self) -> Vec<u64> {
        let settled = self.entries().into_iter().map(|entry| match entry {
            Entry::Settled { counted, .. } => counted,
            Entry::Written { .. } => Vec::new(),
        });
        let mut counted: Vec<u64> = settled.flatten().collect();
        counted.sort_unstable();
        counted
    }

    /// Does everything that its journal does not say is done.
    async fn run(&self) {
        tokio::time::timeout(PATIENT, self.go_on()).await.expect("what others hold is theirs or lapses");
    }

    async fn go_on(&self) {
        let dedup = self.dedup().await;
        let mut journal =
            std::fs::OpenOptions::new().create(true).truncate(false).write(true).read(true).open(&self.journal).unwrap();
        let whole = std::fs::read(&self.journal).unwrap();
        journal.set_len(whole.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at as u64 + 1)).unwrap();
        journal.seek(SeekFrom::End(0)).unwrap();
        let mut write = |entry: Entry| {
            journal.write_all(format!("{}\n", serde_json::to_string(&entry).unwrap()).as_bytes()).unwrap();
            journal.sync_data().unwrap();
        };
        let mut steps = 0;
        for (batch, users) in self.batches.iter().enumerate() {
            let (mut turn, mut open, mut written) = (0, users.clone(), None);
            for entry in self.entries() {
                match entry {
                    Entry::Written { batch: of, new, held, .. } if of == batch => written = Some((new, held)),
                    Entry::Settled { batch: of, turn: last, open: left, .. } if of == batch => {
                        (turn, open, written) = (last + 1, left, None);
                    }
                    Entry::Written { .. } | Entry::Settled { .. } => {}
                }
            }
            while !open.is_empty() {
                let token = BatchToken::named(&format!("{} {batch} {turn}", self.journal.display()));
                let (new, held) = match written.take() {
                    Some(written) => written,
                    None => {
                        let told = dedup.claim(&ids(dedup.stream(), open.iter().copied()), token).await.unwrap();
                        self.perhaps_stop(&mut steps).await;
                        let of = |wanted: Claimed| open.iter().zip(&told).filter(move |(_, told)| **told == wanted);
                        let users = |wanted: Claimed| of(wanted).map(|(user, _)| *user).collect::<Vec<u64>>();
                        let (new, held) = (users(Claimed::First), users(Claimed::Held));
                        write(Entry::Written { batch, turn, new: new.clone(), held: held.clone() });
                        self.perhaps_stop(&mut steps).await;
                        (new, held)
                    }
                };
                let told = dedup.commit(&ids(dedup.stream(), new.iter().copied()), token).await.unwrap();
                self.perhaps_stop(&mut steps).await;
                let counted = new.into_iter().zip(told).filter(|(_, told)| *told == Committed::Committed).map(|(user, _)| user);
                write(Entry::Settled { batch, turn, counted: counted.collect(), open: held.clone() });
                if !held.is_empty() {
                    // Until somebody else commits, or lapses.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                (turn, open) = (turn + 1, held);
            }
        }
    }

    async fn perhaps_stop(&self, steps: &mut u32) {
        *steps += 1;
        if self.stops_at == Some(*steps) {
            println!("\nstopped");
            std::future::pending::<()>().await;
        }
    }

    /// A process of its own that does it: the test of that name, started again.
    fn start(&self, test: &str, stops_at: Option<u32>) -> Child {
        let Task { url, journal, batches, mirrored, .. } = self;
        let task = Task { url: url.clone(), journal: journal.clone(), batches: batches.clone(), mirrored: *mirrored, stops_at };
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("dedup_faults::crashes::{test}"), "--nocapture"])
            .env(PIPELINE, serde_json::to_string(&task).unwrap())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap()
    }

    /// The same, killed before the step of that number. Whether it came so far.
    async fn start_and_kill(&self, test: &str, stops_at: u32) -> bool {
        let mut child = self.start(test, Some(stops_at));
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        while let Some(line) = lines.next_line().await.unwrap() {
            if line == "stopped" {
                child.kill().await.unwrap();
                return true;
            }
        }
        assert!(child.wait().await.unwrap().success());
        false
    }

    async fn start_and_wait(&self, test: &str) {
        let ended = tokio::time::timeout(PATIENT, self.start(test, None).wait_with_output()).await;
        let output = ended.expect("what others hold is theirs or lapses").unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Whether this process is a pipeline and has done what it was told.
async fn was_a_pipeline() -> bool {
    #[expect(clippy::disallowed_methods, reason = "how the processes of these tests talk")]
    let Ok(task) = std::env::var(PIPELINE) else { return false };
    serde_json::from_str::<Task>(&task).unwrap().run().await;
    true
}

/// The steps of a batch before which a pipeline can be killed.
const WRITING: u32 = 1;
const COMMIT: u32 = 2;
const SETTLING: u32 = 3;

#[tokio::test]
async fn clicks_of_a_process_killed_between_claim_and_writing_count_for_whoever_comes_next() {
    let test = "clicks_of_a_process_killed_between_claim_and_writing_count_for_whoever_comes_next";
    if was_a_pipeline().await {
        return;
    }
    for mirrored in kinds() {
        let (redis, dir) = (Redis::start_alone(&[]).await, tempfile::tempdir().unwrap());
        let dead = Task::new(mirrored, &redis, dir.path(), "dead", vec![(0..20).collect()]);
        let next = Task::new(mirrored, &redis, dir.path(), "next", vec![(0..20).collect()]);
        let began = Instant::now();
        assert!(dead.start_and_kill(test, WRITING).await);
        assert!(dead.entries().is_empty(), "nothing was written");
        let dedup = next.dedup().await;
        let told = dedup.claim(&ids(dedup.stream(), 0..20), BatchToken::random()).await.unwrap();
        if began.elapsed() < LEASE {
            assert_eq!(told, [Claimed::Held; 20]);
        }
        next.run().await;
        assert_eq!(next.counted(), (0..20).collect::<Vec<u64>>());
        dead.start_and_wait(test).await;
        assert!(dead.counted().is_empty(), "it comes too late");
    }
}

#[tokio::test]
async fn of_what_a_killed_process_had_written_only_what_others_took_is_lost() {
    let test = "of_what_a_killed_process_had_written_only_what_others_took_is_lost";
    if was_a_pipeline().await {
        return;
    }
    for mirrored in kinds() {
        let (redis, dir) = (Redis::start_alone(&[]).await, tempfile::tempdir().unwrap());
        let late = Task::new(mirrored, &redis, dir.path(), "late", vec![(0..20).collect()]);
        let next = Task::new(mirrored, &redis, dir.path(), "next", vec![(5..12).collect()]);
        assert!(late.start_and_kill(test, COMMIT).await);
        assert!(matches!(&late.entries()[..], [Entry::Written { new, .. }] if new.len() == 20), "{:?}", late.entries());
        next.run().await;
        assert_eq!(next.counted(), (5..12).collect::<Vec<u64>>());
        // Its lease is over: what nobody else has taken is its own still.
        late.start_and_wait(test).await;
        assert_eq!(late.counted(), (0..5).chain(12..20).collect::<Vec<u64>>());
    }
}

#[tokio::test]
async fn a_commit_whose_process_was_killed_before_it_heard_is_told_the_same_again() {
    let test = "a_commit_whose_process_was_killed_before_it_heard_is_told_the_same_again";
    if was_a_pipeline().await {
        return;
    }
    for mirrored in kinds() {
        let (redis, dir) = (Redis::start_alone(&[]).await, tempfile::tempdir().unwrap());
        let killed = Task::new(mirrored, &redis, dir.path(), "killed", vec![(0..20).collect()]);
        let next = Task::new(mirrored, &redis, dir.path(), "next", vec![(0..25).collect()]);
        assert!(killed.start_and_kill(test, SETTLING).await);
        next.run().await;
        assert_eq!(next.counted(), (20..25).collect::<Vec<u64>>());
        killed.start_and_wait(test).await;
        assert_eq!(killed.counted(), (0..20).collect::<Vec<u64>>());
    }
}

/// Two pipelines with the same clicks in their batches, each killed and started again over and over, at steps that are drawn.
async fn killed_over_and_over(mirrored: bool, test: &str) {
    if was_a_pipeline().await {
        return;
    }
    let (redis, dir, seed) = (Redis::start_alone(&[]).await, tempfile::tempdir().unwrap(), seed());
    println!("ONEJOB_SEED={seed}");
    // Each user is in two batches of each pipeline.
    let batches =
        |from: u64| (0..15).map(|batch| (from + batch * 20..from + batch * 20 + 40).collect()).collect::<Vec<Vec<u64>>>();
    let pipelines = [("one", 0), ("two", 100)].map(|(name, from)| Task::new(mirrored, &redis, dir.path(), name, batches(from)));
    let run = async |number: usize| {
        let (pipeline, mut dice) = (&pipelines[number], Dice::of(seed, "kills", number));
        let mut killed = 0;
        for _ in 0..KILLS {
            killed += u32::from(pipeline.start_and_kill(test, 1 + u32::try_from(dice.below(6)).unwrap()).await);
            if dice.percent(30) {
                // It is away for so long that others get what it had claimed.
                tokio::time::sleep(LEASE).await;
            }
        }
        pipeline.start_and_wait(test).await;
        killed
    };
    let (one, two) = tokio::join!(run(0), run(1));
    assert!(one + two > 5, "{one} and {two} were killed");
    let mut counted = BTreeMap::<u64, usize>::new();
    for user in pipelines.iter().flat_map(Task::counted) {
        *counted.entry(user).or_default() += 1;
    }
    let wrong: Vec<(u64, usize)> =
        (0..420).map(|user| (user, counted.remove(&user).unwrap_or(0))).filter(|(_, times)| *times != 1).collect();
    assert!(wrong.is_empty() && counted.is_empty(), "seed {seed}: not once, but so often: {wrong:?}, {counted:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelines_that_are_killed_over_and_over_count_each_click_once() {
    killed_over_and_over(false, "pipelines_that_are_killed_over_and_over_count_each_click_once").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelines_that_are_killed_over_and_over_count_each_click_once_of_a_mirrored_stream() {
    killed_over_and_over(true, "pipelines_that_are_killed_over_and_over_count_each_click_once_of_a_mirrored_stream").await;
}
