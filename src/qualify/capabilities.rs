//! L4: whether a provider does what its entry says of it: keys, status, find, cancel. What it does not claim is not asked.
//!
//! What an entry swears decides what onejob does about an unknown attempt: a provider that does not honour the key that it is said
//! to honour executes a replay. So each claim is tried, with the suite's first case.

use std::time::Duration;

use uuid::Uuid;

use crate::provider::{Call, CancelSemantics, Evidence, Outcome, Response, Sent};
use crate::qualify::prompt::why;
use crate::qualify::runner::{Examined, Run, Verdict, nobodys};
use crate::qualify::suite::Level;

/// What a claim came to.
struct Tried {
    what: &'static str,
    verdict: Verdict,
    finding: String,
}

impl Tried {
    fn passed(what: &'static str) -> Self {
        Tried { what, verdict: Verdict::Passed, finding: String::new() }
    }

    fn failed(what: &'static str, finding: impl Into<String>) -> Self {
        Tried { what, verdict: Verdict::Failed, finding: finding.into() }
    }

    fn unknown(what: &'static str, finding: impl Into<String>) -> Self {
        Tried { what, verdict: Verdict::Inconclusive, finding: finding.into() }
    }
}

impl Examined<'_> {
    /// Tries each claim of the provider's entry once.
    pub async fn capabilities(&self) -> Vec<Run> {
        let abilities = self.provider.abilities();
        let cancels = abilities.cancel != CancelSemantics::None;
        if abilities.replay.is_none() && !abilities.status && !abilities.find && !cancels {
            return Vec::new();
        }
        let mut tried = Vec::new();
        match self.first().await {
            Err(what) => tried.push(Tried::unknown("the first call", what)),
            Ok((call, url, answer, remote_id)) => {
                if abilities.replay.is_some() {
                    tried.push(self.same_key(&call, &answer).await);
                    tried.push(self.other_body(&call, &answer).await);
                }
                let job_id = nobodys();
                let sent = |remote_id: &str, key: &str| Sent {
                    job_id,
                    attempt: 1,
                    url: url.clone(),
                    remote_id: remote_id.to_owned(),
                    idempotency_key: key.to_owned(),
                    age: Duration::from_secs(1),
                };
                if abilities.status && !remote_id.is_empty() {
                    tried.push(settled("status after it is done", &self.provider.status(sent(&remote_id, "")).await));
                    let nobody = format!("onejob-{}", Uuid::new_v4());
                    tried.push(unheard("status of an id that is none", &self.provider.status(sent(&nobody, "")).await));
                }
                if abilities.find {
                    tried.push(settled("find by our key", &self.provider.find(sent("", &call.idempotency_key)).await));
                    let nobody = format!("onejob-{}", Uuid::new_v4());
                    tried.push(unheard("find by a key that was never sent", &self.provider.find(sent("", &nobody)).await));
                }
                if cancels && !remote_id.is_empty() {
                    let what = "cancel after it is done";
                    tried.push(match self.provider.cancel(sent(&remote_id, &call.idempotency_key)).await {
                        Evidence::Canceled => Tried::failed(what, "it says that it stopped what it had done already"),
                        _ => Tried::passed(what),
                    });
                }
            }
        }
        tried.into_iter().map(Self::told).collect()
    }

    fn told(Tried { what, verdict, finding }: Tried) -> Run {
        let mut run = Run::blank(what, "capability", 1, Level::Capabilities);
        run.verdict = verdict;
        run.findings.extend(Some(finding).filter(|finding| !finding.is_empty()));
        run
    }

    async fn first(&self) -> Result<(Call, String, Response, String), String> {
        let case = self.suite.cases.first().ok_or("there is no case")?;
        let body = case.request(self.suite, self.name, None, 0)?;
        let rendered = self.provider.render(&self.request(&body)).map_err(|error| error.to_string())?;
        let url = rendered.url.clone();
        let call = self.call(rendered);
        match self.provider.submit(call.clone()).await {
            Outcome::Succeeded { response, remote_id, .. } => Ok((call, url, response, remote_id.unwrap_or_default())),
            other => Err(why(&other)),
        }
    }

    async fn same_key(&self, call: &Call, answer: &Response) -> Tried {
        let what = "the same request under the same key";
        let again = Call { deadline: std::time::Instant::now() + self.settings.total, ..call.clone() };
        match self.provider.replay(again).await {
            Outcome::Succeeded { response, .. } if response.body == answer.body => Tried::passed(what),
            Outcome::Succeeded { .. } => {
                Tried::failed(what, "another answer: it did the work twice, or does not say the same again")
            }
            Outcome::Rejected { reason, .. } => Tried::failed(what, format!("refused: {reason}")),
            other => Tried::unknown(what, why(&other)),
        }
    }

    async fn other_body(&self, call: &Call, answer: &Response) -> Tried {
        let what = "another request under the same key";
        let case = self.suite.cases.first().map(|case| case.request(self.suite, self.name, None, 0));
        let Some(Ok(mut body)) = case else { return Tried::unknown(what, "there is no case") };
        // One more member that means nothing: another request, byte for byte.
        body.pop();
        body.extend_from_slice(b",\"onejob_other\":1}");
        let rendered = match self.provider.render(&self.request(&body)) {
            Ok(rendered) => rendered,
            Err(error) => return Tried::unknown(what, error.to_string()),
        };
        let other = Call { rendered, deadline: std::time::Instant::now() + self.settings.total, ..call.clone() };
        match self.provider.submit(other).await {
            Outcome::Rejected { .. } => Tried::passed(what),
            Outcome::Succeeded { response, .. } if response.body == answer.body => Tried::passed(what),
            Outcome::Succeeded { .. } => Tried::failed(what, "it did other work under a key that it had seen"),
            other => Tried::unknown(what, why(&other)),
        }
    }
}

fn settled(what: &'static str, evidence: &Evidence) -> Tried {
    match evidence {
        Evidence::Settled(Outcome::Succeeded { .. }) => Tried::passed(what),
        Evidence::NoAnswer { reason } => Tried::unknown(what, reason.clone()),
        other => Tried::failed(what, format!("it succeeded, and the provider says {}", word(other))),
    }
}

fn unheard(what: &'static str, evidence: &Evidence) -> Tried {
    match evidence {
        Evidence::NotFound | Evidence::Expired | Evidence::NoAnswer { .. } => Tried::passed(what),
        other => Tried::failed(what, format!("nobody asked for it, and the provider says {}", word(other))),
    }
}

fn word(evidence: &Evidence) -> &'static str {
    match evidence {
        Evidence::Settled(_) => "that it is over",
        Evidence::StillRunning => "that it runs",
        Evidence::NotFound => "that it never heard of it",
        Evidence::Expired => "that it is forgotten",
        Evidence::Canceled => "that it was stopped",
        Evidence::NoAnswer { .. } => "nothing",
    }
}
