//! Calls *about* an attempt: what is asked, and what an answer proves. Both adapters over HTTP use it.
//!
//! A question is a path below the base URL of the *stored* URL; an answer is read by JSON pointers, and the provider's word for a
//! state by the entry's map. A word that is not in the map, an answer of another shape, a piece of work of another id: no answer,
//! never a guess. "There is none" proves something only while the provider still remembers, and only where the entry says so.
//!
//! Deliberately not here: the exchange itself (`http.rs`), when to ask, and what evidence does to a record (the runtime's).

use std::time::Duration;

use crate::config::{self, Means, Missing};
use crate::provider::{Abilities, CancelSemantics, Evidence, Outcome, Response, Sent};

pub(crate) mod json;
pub(crate) mod template;

/// Longest id that is believed, in bytes.
const ID_BYTES_MAX: usize = 512;
/// Most characters of a provider's words that a reason repeats.
const WORDS_CHARS_MAX: usize = 300;
/// The status of a refusal that a provider told in a status' answer, for whoever is answered with it.
const REFUSED_STATUS: u16 = 422;

/// How a provider can be asked. A plain value.
#[derive(Clone, Debug, Default)]
pub struct Asking {
    /// By its own id; and how a piece of work looks.
    pub status: Option<config::Status>,
    /// By our key.
    pub find: Option<config::Find>,
    /// To stop.
    pub cancel: Option<config::Cancel>,
    /// For a result that is not in the status' answer.
    pub result: Option<config::Fetch>,
    /// For how long the same key with the same bytes is the same work.
    pub replay: Option<Duration>,
}

impl Asking {
    /// What an entry says.
    pub fn from_entry(entry: &config::ProviderEntry) -> Self {
        Asking {
            status: entry.status.clone(),
            find: entry.find.clone(),
            cancel: entry.cancel.clone(),
            result: entry.result.clone(),
            replay: entry.idempotency.as_ref().map(|idempotency| idempotency.ttl),
        }
    }

    /// What the provider can be asked.
    pub(crate) fn abilities(&self) -> Abilities {
        let remembers = self.status.as_ref().is_some_and(|status| status.retention.is_some());
        let missing = |about| if remembers { self.missing(about) } else { Missing::NoAnswer };
        Abilities {
            status: self.status.as_ref().is_some_and(|status| !status.path.is_empty()),
            status_missing: missing(About::Status),
            find: self.find.is_some(),
            find_missing: missing(About::Find),
            replay: self.replay,
            cancel: self.cancel.as_ref().map_or(CancelSemantics::None, |cancel| cancel.semantics),
            settle: self.cancel.as_ref().map_or(Duration::ZERO, |cancel| cancel.settle),
            retention: self.status.as_ref().and_then(|status| status.retention),
        }
    }

    /// What is asked about an attempt.
    ///
    /// # Errors
    /// It cannot be asked, or not about this attempt.
    pub(crate) fn question(&self, about: About, sent: &Sent) -> Result<Question, String> {
        let call = match about {
            About::Status => self.status.as_ref().map(|call| (&call.method, &call.path)),
            About::Find => self.find.as_ref().map(|call| (&call.method, &call.path)),
            About::Cancel => self.cancel.as_ref().map(|call| (&call.method, &call.path)),
            About::Result => self.result.as_ref().map(|call| (&call.method, &call.path)),
        };
        let Some((method, path)) = call.filter(|(_, path)| !path.is_empty()) else {
            return Err(format!("this provider has no {} call", about.as_str()));
        };
        Ok(Question { method: method.clone(), target: template::path(path, sent)? })
    }

    /// Reads a complete answer.
    ///
    /// # Errors
    /// It proves nothing; why.
    pub(crate) fn read(&self, about: About, sent: &Sent, status: u16, body: &[u8]) -> Result<Reading, Unread> {
        let work = self.status.as_ref().ok_or("the entry does not say how a piece of work looks")?;
        match status {
            200..=299 => {}
            410 => return Ok(Reading::Evidence(Evidence::Expired)),
            404 => return missing(self.missing(about), work.retention, sent, "404"),
            other => return Err(format!("it answered {other}").into()),
        }
        let text = std::str::from_utf8(body).ok().and_then(|text| json::at(text, ""));
        let Some(text) = text else {
            // A cancel need not say more than that it was heard.
            return match (about, self.abilities().cancel) {
                (About::Cancel, CancelSemantics::Confirmed) => Ok(Reading::Evidence(Evidence::Canceled)),
                (About::Cancel, _) => Ok(Reading::Evidence(Evidence::StillRunning)),
                (About::Status | About::Find | About::Result, _) => Err("its answer is not JSON".into()),
            };
        };
        let Some(find) = self.find.as_ref().filter(|_| about == About::Find) else { return self.read_work(sent, text) };
        let Some(item) = json::at(text, &find.item).filter(|item| *item != "null") else {
            return missing(find.missing, work.retention, sent, "there is none");
        };
        // A provider that does not know the query's parameter may answer with any piece of work.
        if json::word_at(item, &find.key).as_deref() != Some(&sent.idempotency_key) {
            return Err("what it found does not name our key".into());
        }
        self.read_work(sent, item)
    }

    /// Reads what an answer, or a webhook, says of a piece of work.
    ///
    /// # Errors
    /// It proves nothing; why.
    pub(crate) fn read_work(&self, sent: &Sent, item: &str) -> Result<Reading, Unread> {
        let work = self.status.as_ref().ok_or("the entry does not say how a piece of work looks")?;
        let id = id_at(item, &work.id);
        if let Some(id) = &id
            && !sent.remote_id.is_empty()
            && *id != sent.remote_id
        {
            return Err("it tells of another piece of work".into());
        }
        let Some(word) = json::word_at(item, &work.state) else { return Err("it tells no state".into()) };
        let Some(means) = work.states.get(&word) else { return Err(Unread::Unmapped { word: shown(&word) }) };
        let remote_id = id.unwrap_or_else(|| sent.remote_id.clone());
        Ok(match means {
            Means::Queued | Means::Running => Reading::Evidence(Evidence::StillRunning),
            Means::Canceled => Reading::Evidence(Evidence::Canceled),
            Means::Failed => {
                let why = error_at(item, &work.error).map(|why| format!(": {}", shown(&why))).unwrap_or_default();
                let outcome = Outcome::Rejected {
                    reason: format!("the provider says {}{why}", shown(&word)),
                    response: json_response(REFUSED_STATUS, item),
                    retry_after: None,
                };
                Reading::Evidence(Evidence::Settled(outcome))
            }
            Means::Succeeded if self.result.is_some() => Reading::Fetch { remote_id },
            Means::Succeeded => {
                let Some(result) = json::at(item, &work.result).filter(|result| *result != "null") else {
                    return Err("it succeeded and has no result".into());
                };
                let model = json::word_at(result, "/model").or_else(|| json::word_at(item, "/model"));
                let response = json_response(200, result);
                let remote_id = Some(remote_id).filter(|id| !id.is_empty());
                Reading::Evidence(Evidence::Settled(Outcome::Succeeded { response, remote_id, model }))
            }
        })
    }

    fn missing(&self, about: About) -> Missing {
        match about {
            About::Status => self.status.as_ref().map_or(Missing::NoAnswer, |status| status.missing),
            About::Find => self.find.as_ref().map_or(Missing::NoAnswer, |find| find.missing),
            About::Cancel | About::Result => Missing::NoAnswer,
        }
    }
}

/// "There is none": past the retention nobody can tell; without one too.
fn missing(means: Missing, retention: Option<Duration>, sent: &Sent, said: &str) -> Result<Reading, Unread> {
    match (means, retention) {
        (_, None) => Err(format!("{said}, and the entry does not say for how long it remembers").into()),
        (_, Some(retention)) if sent.age >= retention => Ok(Reading::Evidence(Evidence::Expired)),
        (Missing::NotFound, Some(_)) => Ok(Reading::Evidence(Evidence::NotFound)),
        (Missing::NoAnswer, Some(_)) => Err(format!("{said}, which proves nothing here").into()),
    }
}

/// What a question is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum About {
    Status,
    Find,
    Cancel,
    Result,
}

impl About {
    fn as_str(self) -> &'static str {
        match self {
            About::Status => "status",
            About::Find => "find",
            About::Cancel => "cancel",
            About::Result => "result",
        }
    }
}

/// A call about an attempt.
pub(crate) struct Question {
    pub(crate) method: String,
    /// Path with query, below the base URL.
    pub(crate) target: String,
}

/// What an answer says.
#[derive(Debug)]
pub(crate) enum Reading {
    /// All there is to say.
    Evidence(Evidence),
    /// It succeeded, and its result must be asked for.
    Fetch {
        /// The provider's own name for it.
        remote_id: String,
    },
}

/// Why an answer proves nothing.
#[derive(Debug)]
pub(crate) enum Unread {
    /// A word for a state that the entry does not map: a person must.
    Unmapped {
        /// The word, cut.
        word: String,
    },
    /// Anything else.
    Otherwise {
        /// In words.
        reason: String,
    },
}

impl From<String> for Unread {
    fn from(reason: String) -> Self {
        Unread::Otherwise { reason }
    }
}

impl From<&str> for Unread {
    fn from(reason: &str) -> Self {
        Unread::Otherwise { reason: reason.to_owned() }
    }
}

/// The provider's name for a piece of work; `None` for one that cannot be believed.
pub(crate) fn id_at(text: &str, pointer: &str) -> Option<String> {
    json::word_at(text, pointer).filter(|id| !id.is_empty() && id.len() <= ID_BYTES_MAX && !id.chars().any(char::is_control))
}

fn error_at(item: &str, pointer: &str) -> Option<String> {
    let found = json::at(item, pointer).filter(|found| *found != "null")?;
    let told = json::word_at(found, "").or_else(|| json::word_at(found, "/message"));
    Some(told.unwrap_or_else(|| found.to_owned()))
}

fn json_response(status: u16, body: &str) -> Response {
    let headers = vec![("content-type".to_owned(), "application/json".to_owned())];
    Response { status, headers, body: body.as_bytes().into() }
}

fn shown(text: &str) -> String {
    text.chars().take(WORDS_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Cancel, Fetch, Find, Status};

    fn asking() -> Asking {
        let states = [
            ("waiting", Means::Queued),
            ("working", Means::Running),
            ("done", Means::Succeeded),
            ("broken", Means::Failed),
            ("stopped", Means::Canceled),
        ];
        Asking {
            status: Some(Status {
                path: "/jobs/{{ remote.id }}".to_owned(),
                result: "/result".to_owned(),
                states: states.map(|(word, means)| (word.to_owned(), means)).into(),
                retention: Some(Duration::from_secs(60)),
                ..Status::default()
            }),
            find: Some(Find {
                path: "/jobs?key={{ key }}".to_owned(),
                item: "/jobs/0".to_owned(),
                key: "/key".to_owned(),
                ..Find::default()
            }),
            ..Asking::default()
        }
    }

    fn sent(age_s: u64) -> Sent {
        Sent {
            job_id: "0190b0c0-0000-8000-8000-000000000001".parse().unwrap(),
            attempt: 1,
            url: "http://a.example/jobs".to_owned(),
            remote_id: "7".to_owned(),
            idempotency_key: "our-key".to_owned(),
            age: Duration::from_secs(age_s),
        }
    }

    /// What an answer proves: a word for it.
    fn proves(asking: &Asking, about: About, age_s: u64, status: u16, body: &str) -> String {
        match asking.read(about, &sent(age_s), status, body.as_bytes()) {
            Ok(Reading::Evidence(Evidence::Settled(outcome))) => outcome.word().to_owned(),
            Ok(Reading::Evidence(evidence)) => format!("{evidence:?}"),
            Ok(Reading::Fetch { .. }) => "fetch".to_owned(),
            Err(Unread::Unmapped { word }) => format!("unmapped {word}"),
            Err(Unread::Otherwise { reason }) => format!("nothing: {reason}"),
        }
    }

    #[test]
    fn every_answer_to_a_status_call_proves_what_the_table_says() {
        for (status, body, expected) in [
            (200, r#"{"id":"7","status":"waiting"}"#, "StillRunning"),
            (200, r#"{"id":7,"status":"working"}"#, "StillRunning"),
            (200, r#"{"id":"7","status":"done","result":{"page":1}}"#, "succeeded"),
            (200, r#"{"status":"done","result":0}"#, "succeeded"),
            (200, r#"{"id":"7","status":"broken","error":"no ink"}"#, "rejected"),
            (200, r#"{"id":"7","status":"stopped"}"#, "Canceled"),
            (200, r#"{"id":"7","status":"Done"}"#, "unmapped Done"),
            (200, r#"{"id":"8","status":"done","result":1}"#, "nothing: it tells of another piece of work"),
            (200, r#"{"id":"7","status":"done"}"#, "nothing: it succeeded and has no result"),
            (200, r#"{"id":"7","status":"done","result":null}"#, "nothing: it succeeded and has no result"),
            (200, r#"{"id":"7"}"#, "nothing: it tells no state"),
            (200, r#"{"id":"7","status":"done","result":1"#, "nothing: its answer is not JSON"),
            (200, "", "nothing: its answer is not JSON"),
            (401, "{}", "nothing: it answered 401"),
            (302, "{}", "nothing: it answered 302"),
            (503, r#"{"id":"7","status":"done","result":1}"#, "nothing: it answered 503"),
            (410, "", "Expired"),
        ] {
            assert_eq!(proves(&asking(), About::Status, 1, status, body), expected, "{status} {body}");
        }
    }

    #[test]
    fn there_is_none_means_never_ran_only_within_the_retention_and_only_where_the_entry_says_so() {
        let plain = asking();
        let mut sworn = asking();
        sworn.status.as_mut().unwrap().missing = Missing::NotFound;
        let mut forgetful = asking();
        forgetful.status.as_mut().unwrap().retention = None;
        for (asking, about, age_s, status, body, expected) in [
            (&plain, About::Status, 1, 404, "", "nothing: 404, which proves nothing here"),
            (&sworn, About::Status, 59, 404, "", "NotFound"),
            (&sworn, About::Status, 60, 404, "", "Expired"),
            (&plain, About::Status, 60, 404, "", "Expired"),
            (&plain, About::Find, 59, 200, r#"{"jobs":[]}"#, "NotFound"),
            (&plain, About::Find, 60, 200, r#"{"jobs":[]}"#, "Expired"),
            (&plain, About::Find, 59, 404, "", "NotFound"),
            (&plain, About::Find, 61, 404, "", "Expired"),
            (&forgetful, About::Find, 1, 404, "", "nothing: 404, and the entry does not say for how long it remembers"),
            (&plain, About::Cancel, 1, 404, "", "nothing: 404, which proves nothing here"),
        ] {
            assert_eq!(proves(asking, about, age_s, status, body), expected, "{about:?} {age_s} {status} {body}");
        }
    }

    #[test]
    fn what_is_found_must_name_our_key() {
        let found = |key: &str| format!(r#"{{"jobs":[{{"id":"7","key":{key},"status":"done","result":1}}]}}"#);
        assert_eq!(proves(&asking(), About::Find, 1, 200, &found("\"our-key\"")), "succeeded");
        for key in ["\"other\"", "null", "[\"our-key\"]", "\"our-key \""] {
            assert_eq!(proves(&asking(), About::Find, 1, 200, &found(key)), "nothing: what it found does not name our key");
        }
    }

    #[test]
    fn a_result_elsewhere_is_asked_for() {
        let asking = Asking { result: Some(Fetch { path: "/r".to_owned(), ..Fetch::default() }), ..asking() };
        assert_eq!(proves(&asking, About::Status, 1, 200, r#"{"id":"7","status":"done"}"#), "fetch");
    }

    #[test]
    fn a_cancel_that_says_nothing_proves_nothing_unless_it_is_sworn() {
        let with = |semantics| Asking { cancel: Some(Cancel { semantics, ..Cancel::default() }), ..asking() };
        for (semantics, expected) in [
            (CancelSemantics::Confirmed, "Canceled"),
            (CancelSemantics::BestEffort, "StillRunning"),
            (CancelSemantics::QueuedOnly, "StillRunning"),
        ] {
            assert_eq!(proves(&with(semantics), About::Cancel, 1, 204, ""), expected, "{semantics:?}");
        }
        let best_effort = with(CancelSemantics::BestEffort);
        assert_eq!(proves(&best_effort, About::Cancel, 1, 200, r#"{"id":"7","status":"stopped"}"#), "Canceled");
        assert_eq!(proves(&best_effort, About::Cancel, 1, 200, r#"{"id":"7","status":"done","result":1}"#), "succeeded");
    }

    #[test]
    fn a_failure_tells_the_providers_own_words() {
        for (error, told) in [
            (r#""no ink""#, "the provider says broken: no ink"),
            (r#"{"code":1,"message":"no ink"}"#, "the provider says broken: no ink"),
            (r#"{"code":1}"#, "the provider says broken: {\"code\":1}"),
            ("null", "the provider says broken"),
        ] {
            let item = format!(r#"{{"id":"7","status":"broken","error":{error}}}"#);
            let read = asking().read(About::Status, &sent(1), 200, item.as_bytes());
            let Ok(Reading::Evidence(Evidence::Settled(Outcome::Rejected { reason, response, .. }))) = read else {
                panic!("{read:?}");
            };
            assert_eq!((reason.as_str(), response.status, &*response.body), (told, 422, item.as_bytes()));
        }
    }
}
