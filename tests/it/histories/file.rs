//! The append-only file cut at a byte of its tail, as a crash of the machine may leave it: what is read from it is a state that the
//! job was in, nothing half written, and everything that was answered before the cut.

use std::path::{Path, PathBuf};

use onejob::attempt::{AttemptToken, FinishOutcome, ResolveOutcome};
use onejob::store::{Follow, Read, Store, StoreOptions, Word};
use tempfile::TempDir;

use super::round::Figures;
use super::told::Portrait;
use super::{Seed, keyspace};
use crate::fleet::dice::Dice;
use crate::fleet::redis::DurableRedis;
use crate::model::Model;
use crate::random::{local_ms, words};
use crate::support::{Call, First, SOON, Submission};

/// The call from which on the file is cut: those before only make it longer.
const TAIL_CALLS: usize = 5;
/// Servers that start side by side.
const AT_ONCE: usize = 4;

/// One job's calls, the file that they left, and how far it reached after each.
struct Written {
    directory: TempDir,
    submission: Submission,
    /// When it was written, unix ms: as of then the specification tells its times.
    at_ms: u64,
    /// After each call, from none: how long the file was, the record's bytes, and what the specification says of it.
    states: Vec<State>,
}

struct State {
    length: u64,
    packed: Option<Vec<u8>>,
    portrait: Option<Portrait>,
}

/// The file of the records: the one that grows.
fn file(directory: &Path) -> PathBuf {
    directory.join("appendonlydir/appendonly.aof.1.incr.aof")
}

/// The calls of a job with a timeout, a decision, another attempt and a late success.
fn calls(submission: &Submission) -> Vec<Call> {
    let job = submission.id();
    let token = submission.token;
    let other = AttemptToken::from_bytes([2; 16]);
    let finish = |number, token, outcome| Call::Finish {
        job,
        number,
        token,
        outcome,
        body: "a result".to_owned(),
        follow: Follow::Retry { delay_ms: 0, hold_ms: 0 },
    };
    vec![
        Call::Submit(submission.clone()),
        Call::Note { job, number: 1, token, remote_id: "print-1".to_owned(), event: None },
        Call::Extend { job, number: 1, token, sequence: 1, lease_ms: 160_000 },
        finish(1, token, FinishOutcome::Unknown),
        Call::Resolve {
            job,
            number: 1,
            request_id: "request-1".to_owned(),
            outcome: ResolveOutcome::Failed,
            word: Word::Provider,
            body: String::new(),
            follow: Follow::Retry { delay_ms: 0, hold_ms: 0 },
        },
        Call::Begin { job, token: other, holder: None, first: First::Starting },
        Call::Mark { job, number: 2, token: other },
        finish(2, other, FinishOutcome::Succeeded),
    ]
}

async fn write(seed: Seed) -> Written {
    let directory = tempfile::tempdir().unwrap();
    let redis = DurableRedis::start_with(directory.path(), &[]).await;
    let store = connect(&redis.url()).await;
    let token = AttemptToken::from_bytes([1; 16]);
    let submission = Submission { first: First::Running, token, ..Submission::new(&format!("file-{seed}")) };
    let key = format!("oj:{{{}}}", submission.identity());
    let mut model = Model::new();
    let mut states = Vec::new();
    for call in [None].into_iter().chain(calls(&submission).into_iter().map(Some)) {
        if let Some(call) = call {
            let answer = call.send(&store).await.expect("nothing is broken yet");
            assert_eq!(words(&answer), model.answer(&call), "{call:?}");
        }
        let length = std::fs::metadata(file(directory.path())).unwrap().len();
        states.push(State { length, packed: redis.ask(&["GET", &key]).await.unwrap(), portrait: Portrait::of_model(&model) });
    }
    store.close().await;
    redis.die().await;
    Written { directory, submission, at_ms: local_ms(), states }
}

async fn connect(url: &str) -> Store {
    let options = StoreOptions { connect_timeout: SOON, response_timeout: SOON, ..StoreOptions::new(url) };
    Store::connect(options).await.expect("a store").0
}

impl Written {
    /// The first byte of the tail that is cut, and the end of the file.
    fn tail(&self) -> std::ops::RangeInclusive<u64> {
        let last = self.states.len() - 1;
        self.states[last - TAIL_CALLS].length..=self.states[last].length
    }

    /// What is wrong with what a server finds in the file as far as a byte.
    async fn cut(&self, at: u64) -> Vec<String> {
        let copy = tempfile::tempdir().unwrap();
        let from = self.directory.path().join("appendonlydir");
        std::fs::create_dir(copy.path().join("appendonlydir")).unwrap();
        for entry in std::fs::read_dir(&from).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), copy.path().join("appendonlydir").join(entry.file_name())).unwrap();
        }
        std::fs::OpenOptions::new().write(true).open(file(copy.path())).unwrap().set_len(at).unwrap();
        let redis = DurableRedis::start_with(copy.path(), &[]).await;
        let identity = self.submission.identity();
        let key = format!("oj:{{{identity}}}");
        let packed: Option<Vec<u8>> = redis.ask(&["GET", &key]).await.unwrap();
        // All calls whose bytes are there were executed; of the next one the record may be there, and its hint not.
        let whole = self.states.iter().rposition(|state| state.length <= at).expect("the first state has no call");
        let next = (whole + 1).min(self.states.len() - 1);
        let Some(state) = self.states[whole..=next].iter().find(|state| state.packed == packed) else {
            return vec![format!("cut at {at}: the record is neither that of {whole} calls nor that of {next}: {packed:?}")];
        };
        let store = connect(&redis.url()).await;
        let seen = match store.read_job(identity).await.unwrap() {
            Read::Found(job) => Some(Portrait::of_record(&job, self.at_ms)),
            Read::NotFound => None,
            Read::Gone(gone) => panic!("{gone:?}: nothing here is old enough"),
        };
        let mut wrong = keyspace::judge(&[redis.url()], &store, &[identity].into()).await;
        if seen != state.portrait {
            wrong.push(format!("{seen:?} is read, and it was {:?}", state.portrait));
        }
        store.close().await;
        redis.die().await;
        wrong.into_iter().map(|what| format!("cut at {at}: {what}")).collect()
    }

    /// Cuts it at each of these bytes.
    async fn cuts(&self, places: &[u64]) -> Figures {
        let mut figures = Figures::default();
        let calls = self.states.len() - 1;
        for some in places.chunks(AT_ONCE) {
            let wrong = futures_util::future::join_all(some.iter().map(|at| self.cut(*at))).await;
            for (at, wrong) in some.iter().zip(wrong) {
                let answered = self.states.iter().filter(|state| state.length <= *at).count() - 1;
                figures.add(Figures {
                    histories: 1,
                    operations: calls,
                    answered,
                    unknown: calls - answered,
                    longest: calls,
                    configurations: 2,
                    meetings: 0,
                    succeeded: usize::from(answered == calls),
                    executions: 2,
                    violations: wrong,
                });
            }
        }
        figures
    }

    /// The end of every call in the tail, a byte before and a byte after, and some bytes in between.
    fn borders(&self, dice: &mut Dice, between: usize) -> Vec<u64> {
        let tail = self.tail();
        let ends = self.states.iter().flat_map(|state| [state.length.saturating_sub(1), state.length, state.length + 1]);
        let mut places: Vec<u64> = ends.filter(|at| tail.contains(at)).collect();
        let length = usize::try_from(tail.end() - tail.start()).expect("a short file");
        places.extend((0..between).map(|_| tail.start() + dice.below(length) as u64));
        places.sort_unstable();
        places.dedup();
        places
    }
}

/// Cuts at the borders of calls and at so many bytes between them.
pub async fn some_cuts(seed: Seed, between: usize) -> Figures {
    let written = write(seed).await;
    written.cuts(&written.borders(&mut Dice::of(seed, "cuts", 0), between)).await
}

/// Cuts at each byte of the tail.
pub async fn every_cut(seed: Seed) -> Figures {
    let written = write(seed).await;
    let places: Vec<u64> = written.tail().collect();
    written.cuts(&places).await
}
