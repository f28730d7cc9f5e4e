//! Commands and replies as they are on the wire, and which call of the store a command is.

use std::collections::HashMap;
use std::sync::LazyLock;

use onejob::attempt::{AttemptToken, FinishOutcome};
use onejob::store::{Follow, Script};

use crate::support::Call;

/// The scripts of a job, by their hash and by their text.
static SCRIPTS: LazyLock<HashMap<&'static [u8], Script>> = LazyLock::new(|| {
    let of_a_job = |script: &&Script| ["job", "attempt", "running", "lease"].iter().any(|what| script.name().ends_with(what));
    let scripts = Script::ALL.iter().filter(of_a_job);
    scripts.flat_map(|script| [(script.sha1().as_bytes(), *script), (script.code().as_bytes(), *script)]).collect()
});

/// The length of the first reply, if it is all there.
pub fn reply_length(bytes: &[u8]) -> Option<usize> {
    let line = bytes.windows(2).position(|two| two == b"\r\n")? + 2;
    let count = || std::str::from_utf8(&bytes[1..line - 2]).ok()?.parse::<i64>().ok();
    match bytes[0] {
        b'$' | b'!' | b'=' => {
            let body = usize::try_from(count()?).map_or(0, |length| length + 2);
            (bytes.len() >= line + body).then_some(line + body)
        }
        kind @ (b'*' | b'~' | b'>' | b'%') => {
            let items = usize::try_from(count()?).unwrap_or(0) * if kind == b'%' { 2 } else { 1 };
            let mut length = line;
            for _ in 0..items {
                length += reply_length(&bytes[length..])?;
            }
            Some(length)
        }
        _ => Some(line),
    }
}

/// The first command and its length, if it is all there.
pub fn command(bytes: &[u8]) -> Option<(Vec<Vec<u8>>, usize)> {
    let length = reply_length(bytes)?;
    assert_eq!(bytes[0], b'*', "clients send lists of texts");
    let mut rest = &bytes[bytes.windows(2).position(|two| two == b"\r\n")? + 2..length];
    let mut words = Vec::new();
    while !rest.is_empty() {
        let line = rest.windows(2).position(|two| two == b"\r\n")? + 2;
        let word = reply_length(rest)?;
        words.push(rest[line..word - 2].to_vec());
        rest = &rest[word..];
    }
    Some((words, length))
}

/// A command as bytes.
pub fn packed<T: AsRef<[u8]>>(words: &[T]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.as_ref().len()).into_bytes());
        bytes.extend(word.as_ref());
        bytes.extend(b"\r\n");
    }
    bytes
}

/// The script of a job that a command calls, and the job's key.
pub fn script_of(words: &[Vec<u8>]) -> Option<(Script, String)> {
    let is_call = |name: &Vec<u8>| name.eq_ignore_ascii_case(b"EVALSHA") || name.eq_ignore_ascii_case(b"EVAL");
    let [name, script, _, key, ..] = words else { return None };
    let script = *SCRIPTS.get(&script[..]).filter(|_| is_call(name))?;
    Some((script, String::from_utf8_lossy(key).into_owned()))
}

/// What tells the call from others of its script: arguments, by their places from 0.
pub fn marks(call: &Call) -> Vec<(usize, Vec<u8>)> {
    let token = |place: usize, token: &AttemptToken| (place, token.as_bytes().to_vec());
    match call {
        Call::Submit(submission) => vec![token(18, &submission.token)],
        Call::Begin { token: own, .. } | Call::Postpone { token: own, .. } => vec![token(1, own)],
        Call::Mark { token: own, .. } => vec![token(2, own)],
        Call::Extend { token: own, sequence, .. } => vec![token(2, own), (3, sequence.to_string().into())],
        Call::Finish { token: own, outcome, body, follow, .. } => {
            let body = match outcome {
                FinishOutcome::Succeeded | FinishOutcome::Failed => body.as_bytes().to_vec(),
                FinishOutcome::Unknown | FinishOutcome::Aborted => vec![],
            };
            let (follow, delay_ms) = match follow {
                Follow::End => ("end", 0),
                Follow::Retry { delay_ms, .. } => ("retry", *delay_ms),
            };
            let outcome = (3, outcome.as_str().into());
            vec![token(2, own), outcome, (6, body), (10, follow.into()), (11, delay_ms.to_string().into())]
        }
        Call::Note { token: own, remote_id, .. } => vec![token(2, own), (3, remote_id.as_bytes().to_vec())],
        Call::Resolve { request_id, .. } => vec![(2, request_id.as_bytes().to_vec())],
        Call::Cancel { request_id, .. } | Call::Reopen { request_id, .. } => vec![(1, request_id.as_bytes().to_vec())],
        Call::Tick { .. } | Call::Read { .. } => vec![],
    }
}

/// A call in a few words.
pub fn name(call: &Call) -> String {
    let short = |token: &AttemptToken| token.reveal()[..6].to_owned();
    match call {
        Call::Submit(one) => {
            format!("submit {:?} {:?} by {} until {}", one.request, one.first, short(&one.token), one.deadline_ms)
        }
        Call::Begin { job, token, holder, first } => {
            let holder = holder.as_ref().map(short);
            format!("begin {first:?} {} for {holder:?} in {}", short(token), job.time_ms())
        }
        Call::Mark { number, token, job } => format!("mark {number} {} in {}", short(token), job.time_ms()),
        Call::Extend { number, token, sequence, job, .. } => {
            format!("extend {number} {} #{sequence} in {}", short(token), job.time_ms())
        }
        Call::Finish { number, token, outcome, body, follow, job } => {
            format!("finish {number} {} {} {body:?} {follow:?} in {}", short(token), outcome.as_str(), job.time_ms())
        }
        Call::Resolve { number, request_id, outcome, word, follow, .. } => {
            format!("resolve {number} {} by {word:?} {follow:?} ({request_id})", outcome.as_str())
        }
        Call::Note { number, token, remote_id, .. } => format!("note {number} {} {remote_id}", short(token)),
        Call::Cancel { request_id, mode, .. } => format!("cancel {mode:?} ({request_id})"),
        Call::Tick { .. } => "tick".to_owned(),
        Call::Reopen { request_id, attempts, deadline_ms, .. } => format!("reopen {attempts} until {deadline_ms} ({request_id})"),
        Call::Postpone { token, holder, delay_ms, .. } => {
            format!("postpone by {delay_ms} {} for {:?}", short(token), holder.as_ref().map(short))
        }
        Call::Read { .. } => "read".to_owned(),
    }
}
