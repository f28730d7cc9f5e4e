//! L4: whether a provider does what its entry says of it: keys, status, find, cancel. What it does not claim is not asked.
//!
//! What an entry swears decides what onejob does about an unknown attempt: a provider that does not honour the key that it is said
//! to honour executes a replay. So each claim is tried, with the suite's first case.
//!
//! That two answers are equal is no evidence that one execution made both: a model at temperature 0 says the same twice. So the same
//! request is also sent under another key, which is another execution for certain, and only what tells that one apart (the
//! provider's own id, the answer's bytes, its word that it replays) can show that the others are one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::config::Missing;
use crate::provider::{Call, CancelSemantics, Evidence, Outcome, ProviderFuture, Response, Sent};
use crate::qualify::prompt::why;
use crate::qualify::runner::evidence::{Named, text_at};
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

/// An answer, as far as it says which execution made it.
struct Made {
    /// The provider's own name for the work; `""` if it gave none.
    remote_id: String,
    /// The answer's own name; `""` if it has none.
    id: String,
    body: Arc<[u8]>,
    /// Whether it says of itself that it was given before.
    replayed: bool,
}

/// Whether one execution made two answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Executed {
    Once,
    Twice,
    /// They do not say.
    Unsaid,
}

impl Made {
    fn of(response: &Response, remote_id: Option<String>) -> Self {
        let says = |(name, value): &(String, String)| {
            matches!(name.as_str(), "idempotency-replayed" | "idempotent-replayed") && value.eq_ignore_ascii_case("true")
        };
        Made {
            remote_id: remote_id.unwrap_or_default(),
            id: text_at(&response.body, "/id"),
            body: Arc::clone(&response.body),
            replayed: response.headers.iter().any(says),
        }
    }

    /// By what another execution, `control`, has otherwise.
    fn and(&self, again: &Made, control: &Made) -> Executed {
        let names: [fn(&Made) -> &[u8]; 3] = [|made| made.remote_id.as_bytes(), |made| made.id.as_bytes(), |made| &made.body];
        for name in names {
            match (name(self), name(again)) {
                ([], _) | (_, []) => {}
                (first, second) if first != second => return Executed::Twice,
                // Equal, as those of another execution are too: no name of an execution.
                (first, _) if first == name(control) => {}
                _ => return Executed::Once,
            }
        }
        if again.replayed && !control.replayed { Executed::Once } else { Executed::Unsaid }
    }
}

const ALIKE: &str =
    "it answers alike under another key, without an id of its own or a word that it replays: equal answers prove nothing";

impl Examined<'_> {
    /// Tries each claim of the provider's entry once. Once the time is over, or the cost reached, nothing more is asked, and what is
    /// left is told as cut.
    pub async fn capabilities(&self) -> Vec<Run> {
        let abilities = self.provider.abilities();
        let cancels = abilities.cancel != CancelSemantics::None;
        if abilities.replay.is_none() && !abilities.status && !abilities.find && !cancels {
            return Vec::new();
        }
        let mut claims = Claims { examined: self, since: Since::default(), runs: Vec::new() };
        match claims.first().await {
            Err(what) => claims.told(Tried::unknown("the first call", what)),
            Ok((call, made)) => claims.each(&call, made).await,
        }
        claims.runs
    }
}

/// Claims that are tried one after the other.
struct Claims<'e, 'x> {
    examined: &'e Examined<'x>,
    since: Since,
    runs: Vec<Run>,
}

/// What came since the last claim was told.
#[derive(Default)]
struct Since {
    cost: u64,
    /// Something was not asked any more.
    cut: bool,
    answered: bool,
    models: BTreeSet<String>,
    builds: BTreeSet<String>,
}

impl Claims<'_, '_> {
    /// Tries each claim with what came of the first call.
    async fn each(&mut self, call: &Call, made: Made) {
        let provider = &self.examined.provider;
        let abilities = provider.abilities();
        if abilities.replay.is_some() {
            self.keys(call, &made).await;
        }
        let (job_id, url, remote_id) = (nobodys(), call.rendered.url.clone(), made.remote_id);
        let sent = |remote_id: &str, key: &str| Sent {
            job_id,
            attempt: 1,
            url: url.clone(),
            remote_id: remote_id.to_owned(),
            idempotency_key: key.to_owned(),
            age: Duration::from_secs(1),
        };
        if abilities.status && !remote_id.is_empty() {
            let evidence = self.asked(provider.status(sent(&remote_id, ""))).await;
            self.told(settled("status after it is done", &evidence));
            let nobody = format!("onejob-{}", Uuid::new_v4());
            let evidence = self.asked(provider.status(sent(&nobody, ""))).await;
            self.told(unheard("status of an id that is none", &evidence, abilities.status_missing));
        }
        if abilities.find {
            let evidence = self.asked(provider.find(sent("", &call.idempotency_key))).await;
            self.told(settled("find by our key", &evidence));
            let nobody = format!("onejob-{}", Uuid::new_v4());
            let evidence = self.asked(provider.find(sent("", &nobody))).await;
            self.told(unheard("find by a key that was never sent", &evidence, abilities.find_missing));
        }
        if abilities.cancel != CancelSemantics::None && !remote_id.is_empty() {
            let what = "cancel after it is done";
            let evidence = self.asked(provider.cancel(sent(&remote_id, &call.idempotency_key))).await;
            self.told(match evidence {
                Evidence::Canceled => Tried::failed(what, "it says that it stopped what it had done already"),
                _ => Tried::passed(what),
            });
        }
    }

    /// Enters what a claim came to, with what was asked and answered for it.
    fn told(&mut self, Tried { what, verdict, finding }: Tried) {
        let Since { cost, cut, answered, models, builds } = std::mem::take(&mut self.since);
        let mut run = Run::blank(what, "capability", 1, Level::Capabilities);
        (run.verdict, run.cut, run.cost, run.answered) = (verdict, cut, cost, answered);
        run.findings.extend(Some(finding).filter(|finding| !finding.is_empty()));
        for (what, names) in [("model", &models), ("build", &builds)] {
            if names.len() > 1 {
                run.findings.push(format!("its answers do not name one {what}: {names:?}"));
            }
        }
        if cut || (models.len().max(builds.len()) > 1 && verdict == Verdict::Passed) {
            run.verdict = Verdict::Inconclusive;
        }
        // None, which is the least, is no name.
        (run.model, run.build) = (models.last().cloned().unwrap_or_default(), builds.last().cloned().unwrap_or_default());
        self.examined.hidden.clean(&mut run);
        self.runs.push(run);
    }

    /// Asks for evidence, unless no more may be asked.
    async fn asked(&mut self, question: ProviderFuture<'_, Evidence>) -> Evidence {
        if let Some(over) = self.examined.over() {
            self.since.cut = true;
            return Evidence::NoAnswer { reason: over.to_owned() };
        }
        let evidence = question.await;
        if let Evidence::Settled(Outcome::Succeeded { response, model, .. }) = &evidence {
            // It need not say again who made it.
            let named = self.named(response, model.clone());
            self.since.models.extend(Some(named.model).filter(|name| !name.is_empty()));
            self.since.builds.extend(Some(named.build).filter(|name| !name.is_empty()));
        }
        evidence
    }

    /// Has work done, unless no more may be.
    async fn made(&mut self, work: ProviderFuture<'_, Outcome>) -> Result<Made, Outcome> {
        if let Some(over) = self.examined.over() {
            self.since.cut = true;
            return Err(Outcome::NotSent { reason: over.to_owned() });
        }
        match work.await {
            Outcome::Succeeded { response, remote_id, model } => {
                self.since.cost += self.examined.spend(&response);
                self.since.answered = true;
                let named = self.named(&response, model);
                self.since.models.insert(named.model);
                self.since.builds.insert(named.build);
                Ok(Made::of(&response, remote_id))
            }
            other => Err(other),
        }
    }

    fn named(&self, response: &Response, model: Option<String>) -> Named {
        let hidden = &self.examined.hidden;
        Named::of(&hidden.hide_in(&response.body), model, hidden)
    }

    async fn first(&mut self) -> Result<(Call, Made), String> {
        let examined = self.examined;
        let case = examined.suite.cases.first().ok_or("there is no case")?;
        let body = case.request(examined.suite, examined.name, None, 0)?;
        let rendered = examined.provider.render(&examined.request(&body)).map_err(|error| error.to_string())?;
        let call = examined.call(rendered);
        let made = self.made(examined.provider.submit(call.clone())).await.map_err(|outcome| why(&outcome))?;
        Ok((call, made))
    }

    /// Whether one key is one execution: of the same request, and of another one.
    async fn keys(&mut self, call: &Call, first: &Made) {
        let (same, other) = ("the same request under the same key", "another request under the same key");
        let examined = self.examined;
        let control = match self.made(examined.provider.submit(examined.call(call.rendered.clone()))).await {
            Ok(control) => control,
            Err(outcome) => {
                let what = format!("the same request under another key: {}", why(&outcome));
                self.told(Tried::unknown(same, what.clone()));
                return self.told(Tried::unknown(other, what));
            }
        };
        let again = Call { deadline: Instant::now() + examined.settings.total, ..call.clone() };
        let tried = match self.made(examined.provider.replay(again)).await {
            Ok(again) => match first.and(&again, &control) {
                Executed::Once => Tried::passed(same),
                Executed::Twice => Tried::failed(same, "another answer: it did the work twice, or does not say the same again"),
                Executed::Unsaid => Tried::unknown(same, ALIKE),
            },
            Err(Outcome::Rejected { reason, .. }) => Tried::failed(same, format!("refused: {reason}")),
            Err(outcome) => Tried::unknown(same, why(&outcome)),
        };
        self.told(tried);
        let tried = self.other_body(other, call, first, &control).await;
        self.told(tried);
    }

    async fn other_body(&mut self, what: &'static str, call: &Call, first: &Made, control: &Made) -> Tried {
        let examined = self.examined;
        let case = examined.suite.cases.first().map(|case| case.request(examined.suite, examined.name, None, 0));
        let Some(Ok(mut body)) = case else { return Tried::unknown(what, "there is no case") };
        // One more member that means nothing: another request, byte for byte.
        body.pop();
        body.extend_from_slice(b",\"onejob_other\":1}");
        let rendered = match examined.provider.render(&examined.request(&body)) {
            Ok(rendered) => rendered,
            Err(error) => return Tried::unknown(what, error.to_string()),
        };
        let other = rendered.clone();
        let under_its_key = Call { rendered, deadline: Instant::now() + examined.settings.total, ..call.clone() };
        match self.made(examined.provider.submit(under_its_key)).await {
            Ok(made) => match first.and(&made, control) {
                Executed::Once => Tried::passed(what),
                Executed::Twice => Tried::failed(what, "it did other work under a key that it had seen"),
                Executed::Unsaid => Tried::unknown(what, ALIKE),
            },
            // One that refuses it whatever its key has not looked at the key.
            Err(Outcome::Rejected { reason, .. }) => {
                let anew = Call { rendered: other, ..examined.call(call.rendered.clone()) };
                match self.made(examined.provider.submit(anew)).await {
                    Ok(_) => Tried::passed(what),
                    Err(outcome) => {
                        let under_another = why(&outcome);
                        Tried::unknown(what, format!("refused: {reason}; and under a new key, {under_another}"))
                    }
                }
            }
            Err(outcome) => Tried::unknown(what, why(&outcome)),
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

/// `missing`: what the entry says that "there is none" means.
fn unheard(what: &'static str, evidence: &Evidence, missing: Missing) -> Tried {
    match (evidence, missing) {
        (Evidence::NotFound | Evidence::Expired, _) | (Evidence::NoAnswer { .. }, Missing::NoAnswer) => Tried::passed(what),
        (Evidence::NoAnswer { reason }, Missing::NotFound) => {
            Tried::unknown(what, format!("the entry says that it knows what it never heard of, and it says nothing: {reason}"))
        }
        (other, _) => Tried::failed(what, format!("nobody asked for it, and the provider says {}", word(other))),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn made(remote_id: &str, body: &str, replayed: bool) -> Made {
        let headers = if replayed { vec![("idempotency-replayed".to_owned(), "true".to_owned())] } else { Vec::new() };
        let response = Response { status: 200, headers, body: body.as_bytes().into() };
        Made::of(&response, Some(remote_id.to_owned()).filter(|id| !id.is_empty()))
    }

    #[test]
    fn equal_answers_are_one_execution_only_by_what_another_execution_has_otherwise() {
        let plain = |body: &str| made("", body, false);
        for (first, again, control, executed) in [
            // The answers' bytes.
            (plain("a"), plain("a"), plain("b"), Executed::Once),
            (plain("a"), plain("b"), plain("c"), Executed::Twice),
            (plain("a"), plain("a"), plain("a"), Executed::Unsaid),
            // Their own names: what else is in them may differ.
            (plain(r#"{"id":1,"at":1}"#), plain(r#"{"id":1,"at":2}"#), plain(r#"{"id":2,"at":3}"#), Executed::Once),
            (plain(r#"{"id":1,"a":1}"#), plain(r#"{"id":2,"a":1}"#), plain(r#"{"id":3,"a":1}"#), Executed::Twice),
            (plain(r#"{"id":1}"#), plain(r#"{"id":1}"#), plain(r#"{"id":1}"#), Executed::Unsaid),
            // The work's.
            (made("1", "a", false), made("1", "a", false), made("2", "a", false), Executed::Once),
            (made("1", "a", false), made("2", "a", false), made("3", "a", false), Executed::Twice),
            // The provider's word.
            (plain("a"), made("", "a", true), plain("a"), Executed::Once),
            (plain("a"), made("", "a", true), made("", "a", true), Executed::Unsaid),
            (plain("a"), made("", "b", true), plain("a"), Executed::Twice),
        ] {
            assert_eq!(first.and(&again, &control), executed, "{:?} {:?}", first.id, again.replayed);
        }
    }

    #[test]
    fn who_says_nothing_of_what_it_never_heard_of_has_not_kept_its_word() {
        let nothing = Evidence::NoAnswer { reason: "it answered 500".to_owned() };
        assert_eq!(unheard("", &Evidence::NotFound, Missing::NotFound).verdict, Verdict::Passed);
        assert_eq!(unheard("", &nothing, Missing::NotFound).verdict, Verdict::Inconclusive);
        assert_eq!(unheard("", &nothing, Missing::NoAnswer).verdict, Verdict::Passed, "its entry claims no more");
        assert_eq!(unheard("", &Evidence::StillRunning, Missing::NoAnswer).verdict, Verdict::Failed);
    }
}
