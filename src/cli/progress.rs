//! How far a qualification is, on stderr: a bar where a person looks on, lines where stderr goes to a file or data is JSON.

use std::io::IsTerminal as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use onejob::qualify::runner::{Run, Verdict};

use super::{Format, say, show};

/// Of so many parts of the whole each is a line when it is done: a short whole has as many lines as a long one.
const PARTS: usize = 10;
/// A part that takes longer has a line each time something has ended and this has passed.
const PAUSE: Duration = Duration::from_secs(30);

/// What is done of a known number of requests.
pub(super) struct Progress {
    what: String,
    requests: usize,
    began: Instant,
    /// None where lines are written.
    bar: Option<ProgressBar>,
    seen: Mutex<Seen>,
}

struct Seen {
    done: usize,
    failed: usize,
    inconclusive: usize,
    told: Instant,
}

impl Progress {
    /// Of so many requests, of which some were done before.
    pub(super) fn start(format: Format, what: String, requests: usize, done: usize) -> Self {
        let bar = (format == Format::Text && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} requests, {elapsed} {msg}");
            let bar = ProgressBar::with_draw_target(Some(requests as u64), ProgressDrawTarget::stderr());
            bar.set_position(done as u64);
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        if bar.is_none() {
            let before = if done > 0 { format!(", {done} done before") } else { String::new() };
            say(format_args!("onejob: {what}: {}{before}", show::count(requests, "request")));
        }
        let began = Instant::now();
        let seen = Mutex::new(Seen { done, failed: 0, inconclusive: 0, told: began });
        Progress { what, requests, began, bar, seen }
    }

    /// A request has ended. One that was not made is none.
    pub(super) fn ended(&self, run: &Run) {
        if run.cut {
            return;
        }
        if let Some(bar) = &self.bar {
            bar.inc(1);
            bar.set_message(run.case.clone());
            return;
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let part = |done: usize| done * PARTS / self.requests.max(1);
        seen.done += 1;
        match run.verdict {
            Verdict::Passed => {}
            Verdict::Failed => seen.failed += 1,
            Verdict::Inconclusive => seen.inconclusive += 1,
        }
        if part(seen.done) == part(seen.done - 1) && seen.told.elapsed() < PAUSE {
            return;
        }
        seen.told = Instant::now();
        let bad = [(seen.failed, "failed"), (seen.inconclusive, "inconclusive")];
        let bad: String = bad.iter().filter(|(count, _)| *count > 0).map(|(count, word)| format!(", {count} {word}")).collect();
        let took = humantime::format_duration(Duration::from_secs(self.began.elapsed().as_secs()));
        say(format_args!("onejob: {}: {} of {}{bad}, {took}", self.what, seen.done, show::count(self.requests, "request")));
    }

    /// What comes behind the cases begins.
    pub(super) fn begins(&self, level: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(level.to_owned()),
            None => say(format_args!("onejob: {}: {level}", self.what)),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
