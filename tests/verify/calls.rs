//! A call as a script gets it, and a script's reply in the model's words.
//!
//! The order of the arguments is the scripts' headers'; that `src/store/transitions.rs` has the same is for `tidy` to see, and that
//! the words mean the same for `against_redis.rs`.

use onejob::attempt::{FinishOutcome, ResolveOutcome};
use onejob::fingerprint::{digest, second_half, sha256};
use onejob::store::{CancelMode, Follow, Word};

use crate::support::{Call, First, LEASE_MS, Submission};

const URL: &str = "https://laser.example/v1/prints";
const REQUEST_HASH: [u8; 32] = [7; 32];

macro_rules! list {
    ($($argument:expr),* $(,)?) => { vec![$($argument.argument()),*] };
}

trait Argument {
    fn argument(&self) -> Vec<u8>;
}

impl Argument for &str {
    fn argument(&self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }
}

impl Argument for String {
    fn argument(&self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }
}

impl<const N: usize> Argument for [u8; N] {
    fn argument(&self) -> Vec<u8> {
        self.to_vec()
    }
}

impl Argument for u64 {
    fn argument(&self) -> Vec<u8> {
        self.to_string().into_bytes()
    }
}

impl Argument for u32 {
    fn argument(&self) -> Vec<u8> {
        self.to_string().into_bytes()
    }
}

impl Argument for Vec<u8> {
    fn argument(&self) -> Vec<u8> {
        self.clone()
    }
}

/// What a first attempt brings with it: the word, the provider, what is sent.
fn begin(first: First) -> (&'static str, &'static str, [Vec<u8>; 3]) {
    let nothing = || [vec![], vec![], vec![]];
    match first {
        First::Pending => ("pending", "", nothing()),
        First::Starting => ("starting", "laser", nothing()),
        First::Running => ("running", "laser", [URL.argument(), REQUEST_HASH.to_vec(), "certificate-1".argument()]),
    }
}

fn follow_parts(follow: Follow) -> (&'static str, u64, u64) {
    match follow {
        Follow::End => ("end", 0, 0),
        Follow::Retry { delay_ms, hold_ms } => ("retry", delay_ms, hold_ms),
    }
}

fn submit(submission: &Submission) -> Vec<Vec<u8>> {
    let rules = &submission.rules;
    let (word, provider, [url, hash, certificate]) = begin(submission.first);
    list![
        *submission.id().as_bytes(),
        second_half(&digest(submission.owner.as_str(), &submission.key)),
        second_half(&sha256(submission.request.as_bytes())),
        submission.owner.as_str(),
        submission.route,
        submission.class.as_str(),
        submission.deadline_ms,
        rules.attempts_max,
        rules.race_max,
        rules.race_after_ms,
        rules.key_life_ms,
        rules.retention_ms,
        if rules.releases_on_failure { "release" } else { "keep" },
        rules.quarantine_ms,
        "POST /print",
        "0",
        submission.request,
        word,
        *submission.token.as_bytes(),
        submission.lease_ms,
        provider,
        "gateway-1",
        url,
        hash,
        certificate,
    ]
}

/// Its arguments, in order.
pub fn arguments(call: &Call) -> Vec<Vec<u8>> {
    match call {
        Call::Submit(submission) => submit(submission),
        Call::Begin { job, token, holder, first } => {
            let (word, provider, [url, hash, certificate]) = begin(*first);
            let holder = holder.as_ref().map_or(vec![], |token| token.as_bytes().to_vec());
            list![*job.as_bytes(), *token.as_bytes(), holder, word, LEASE_MS, provider, "gateway-1", url, hash, certificate]
        }
        Call::Mark { job, number, token } => {
            list![*job.as_bytes(), *number, *token.as_bytes(), URL, REQUEST_HASH, "certificate-1"]
        }
        Call::Extend { job, number, token, sequence, lease_ms } => {
            list![*job.as_bytes(), *number, *token.as_bytes(), *sequence, *lease_ms]
        }
        Call::Finish { job, number, token, outcome, body, follow } => {
            let (head, body, model, reason) = match outcome {
                FinishOutcome::Succeeded => ("HTTP/1.1 200 OK", body.as_str(), "laser-2", ""),
                FinishOutcome::Failed => ("HTTP/1.1 200 OK", body.as_str(), "", "rejected"),
                FinishOutcome::Unknown => ("", "", "", "timeout"),
                FinishOutcome::Aborted => ("", "", "", "no_permit"),
            };
            let (mode, delay_ms, hold_ms) = follow_parts(*follow);
            list![
                *job.as_bytes(),
                *number,
                *token.as_bytes(),
                outcome.as_str(),
                head,
                "0",
                body,
                reason,
                "",
                model,
                mode,
                delay_ms,
                hold_ms,
                "nothing"
            ]
        }
        Call::Resolve { job, number, request_id, outcome, word, body, follow } => {
            let (head, body) = match outcome {
                ResolveOutcome::Succeeded => ("HTTP/1.1 200 OK", body.as_str()),
                ResolveOutcome::Failed | ResolveOutcome::Canceled | ResolveOutcome::Abandoned => ("", ""),
            };
            let word = match word {
                Word::Provider => "provider",
                Word::Operator => "operator",
            };
            let (mode, _, _) = follow_parts(*follow);
            list![
                *job.as_bytes(),
                *number,
                request_id.as_str(),
                outcome.as_str(),
                "ada",
                "looked at the printer",
                word,
                head,
                "0",
                body,
                mode
            ]
        }
        Call::Note { job, number, token, remote_id, .. } => {
            list![*job.as_bytes(), *number, *token.as_bytes(), remote_id.as_str(), "", "", "", ""]
        }
        Call::Cancel { job, request_id, mode } => {
            let mode = match mode {
                CancelMode::Graceful => "graceful",
                CancelMode::Force => "force",
            };
            list![*job.as_bytes(), request_id.as_str(), mode, "ada", "changed my mind"]
        }
        Call::Tick { identity } => list![identity.to_string()],
        Call::Reopen { job, request_id, attempts, deadline_ms } => {
            list![*job.as_bytes(), request_id.as_str(), "ada", "paper is back", *attempts, *deadline_ms]
        }
        Call::Postpone { job, token, holder, delay_ms } => {
            let holder = holder.as_ref().map_or(vec![], |token| token.as_bytes().to_vec());
            list![*job.as_bytes(), *token.as_bytes(), holder, *delay_ms, "breaker: laser is not called"]
        }
        Call::Read { identity } => list!["record", identity.to_string()],
    }
}

/// A reply in the model's words: the status and the details that are no times.
pub fn words(call: &Call, reply: &[Vec<u8>]) -> String {
    let detail = |place: usize| String::from_utf8_lossy(reply.get(place + 3).map_or(&[], Vec::as_slice)).into_owned();
    let status = String::from_utf8_lossy(reply.first().map_or(&[], Vec::as_slice)).into_owned();
    let kept: &[usize] = match (call, status.as_str()) {
        (Call::Submit(_), "created") => &[2],
        (Call::Submit(_) | Call::Read { .. }, "gone") => &[1],
        (Call::Begin { .. }, "started" | "exhausted" | "ended") => &[0],
        (Call::Begin { .. }, "repeated" | "blocked") => &[0, 1],
        (Call::Mark { .. } | Call::Extend { .. }, "fenced") => &[0],
        (Call::Finish { .. } | Call::Resolve { .. }, "won" | "recorded" | "not_unknown") => &[0],
        (Call::Finish { .. } | Call::Resolve { .. }, "repeated") => &[0, 1, 2],
        (Call::Finish { .. }, "discarded") => &[0, 1],
        (Call::Resolve { .. }, "discarded") => &[1],
        (Call::Note { .. }, "noted" | "repeated") => &[0, 1],
        (Call::Cancel { .. }, "canceled" | "canceling" | "ended") => &[0],
        (Call::Reopen { .. }, "reopened" | "not_failed") => &[0],
        (Call::Postpone { .. }, "ended") => &[0],
        _ => &[],
    };
    match (call, status.as_str()) {
        (Call::Tick { .. }, "ticked" | "unchanged") => {
            let changes = detail(5);
            let changes: Vec<&str> = changes.split_ascii_whitespace().collect();
            format!("ticked {} {changes:?}", detail(1))
        }
        (Call::Extend { .. }, "extended") if detail(1) == "yes" => "extended canceling".to_owned(),
        (Call::Postpone { .. }, "repeated") => "postponed".to_owned(),
        _ => kept.iter().fold(status.clone(), |words, place| format!("{words} {}", detail(*place))),
    }
}

/// What a reply is recognized by.
pub fn echo(call: &Call) -> Vec<u8> {
    match call {
        Call::Submit(submission) => submission.token.as_bytes().to_vec(),
        Call::Begin { token, .. }
        | Call::Mark { token, .. }
        | Call::Extend { token, .. }
        | Call::Finish { token, .. }
        | Call::Note { token, .. }
        | Call::Postpone { token, .. } => token.as_bytes().to_vec(),
        Call::Resolve { request_id, .. } | Call::Cancel { request_id, .. } | Call::Reopen { request_id, .. } => {
            request_id.as_bytes().to_vec()
        }
        Call::Tick { identity } | Call::Read { identity } => identity.to_string().into_bytes(),
    }
}
