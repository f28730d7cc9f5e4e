//! Whether a job may go to another provider than its route's first one, and what the answers of such a provider do to its certificate.
//!
//! The last word is asked for right before an attempt begins ([`permit`]), and once more by whoever has connected, where that is
//! longer ago than [`PERMIT_AGE_MAX`]: certificates are read from Redis anew, from the master, for the request as it is rendered for
//! that provider. So of what is sent later than that after a revoke, nothing goes there from any gateway; what had been sent goes on,
//! and its row names the certificate. What is asked earlier ([`open`]) only chooses where to go. Whoever cannot be told "yes" is told
//! "no": a store that does not answer proves nothing.
//!
//! A certificate is suspended for the whole fleet by what a provider answers under it, whoever brings the answer: by another model
//! than the one that was certified, or too often with what is not valid. That window is each gateway's own.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;

use crate::attempt::{AttemptState, AttemptToken};
use crate::error::StoreError;
use crate::job::{Job, JobId};
use crate::metrics;
use crate::policy::{DENIED, Gate, Open};
use crate::provider::{Fence, Outcome, Permit, ProviderFuture, Rendered, Request, boottime_ms};
use crate::qualify::{Bindings, Certificate, Denial, Kept, Standing, decide, in_force, stands};
use crate::runtime::attempts::Work;
use crate::runtime::{Inner, Route, Suspend, millis};
use crate::store::{Stood, Store, insist};

/// How old the word of the store may be when the first byte leaves: so long after a revoke nothing goes to a provider any more.
pub(super) const PERMIT_AGE_MAX: Duration = Duration::from_secs(1);

/// Who suspends certificates, in their events.
const ACTOR: &str = "onejob/gate";
/// How often the certificates are looked at for the gauges.
const LOOK: Duration = Duration::from_secs(5);
/// In how many events of a stream its build is looked for.
const EVENTS_MAX: usize = 16;

/// To which providers a job may go, and why not to the others.
pub(super) struct Leave {
    pub(super) open: Open,
    denials: Vec<(usize, Denial)>,
}

impl Leave {
    /// Says of a denied place, for the attempt's reason, why nothing goes there.
    pub(super) fn say(&self, route: &Route, place: usize) -> String {
        let provider = route.providers.get(place).map_or("?", String::as_str);
        match self.denials.iter().find(|(denied, _)| *denied == place) {
            Some((_, denial)) => denied(provider, denial),
            None => format!("{DENIED}{provider}"),
        }
    }

    /// The first place to which the job may not go.
    pub(super) fn denied(&self) -> Option<usize> {
        self.denials.first().map(|(place, _)| *place)
    }

    pub(super) fn word(&self, place: usize) -> &'static str {
        let found = self.denials.iter().find(|(denied, _)| *denied == place);
        found.map_or("no_certificate", |(_, denial)| denial.word())
    }
}

/// Asks where a job may go, to choose what comes next.
pub(super) async fn open(runtime: &Inner, route: &Route, request: &Request) -> Leave {
    let providers = route.providers.len();
    if route.plan.gate != Gate::Enforce {
        return Leave { open: Open::all(providers), denials: Vec::new() };
    }
    let mut leave = Leave { open: Open::first(providers), denials: Vec::new() };
    for place in 1..providers {
        let lane = route.providers.get(place).and_then(|name| runtime.providers.get(name));
        let rendered = lane.and_then(|lane| lane.slot.provider.render(request).ok());
        let Some(rendered) = rendered else { continue };
        match certified(runtime, route, place, &rendered).await {
            Ok(_) => leave.open.add(place),
            Err(denial) => leave.denials.push((place, denial)),
        }
    }
    leave
}

/// Asks where a job may go whose request nobody has looked at yet, and may not before its slot is taken: as far as can be told
/// without it. [`permit`] has the last word; where that was "no", the job does not come a second time.
pub(super) async fn open_unseen(runtime: &Inner, route: &Route, job: &Job) -> Open {
    let providers = route.providers.len();
    if route.plan.gate != Gate::Enforce {
        return Open::all(providers);
    }
    let mut open = Open::first(providers);
    for (place, contract) in route.proof.contracts.iter().enumerate().skip(1) {
        let Some(contract) = contract else { continue };
        if was_denied(job, &contract.provider) {
            continue;
        }
        let Ok(kept) = runtime.store.certificates(&route.name, &contract.provider).await else { continue };
        let now_ms = runtime.store.now_ms();
        let may_cover = |one: &Kept| {
            let Kept { certificate, standing, .. } = one;
            *standing == Standing::Live && certificate.expires_ms > now_ms && contract.may_cover(&certificate.bindings)
        };
        if in_force(&kept).any(may_cover) {
            open.add(place);
        }
    }
    open
}

/// Whether a slot at this provider was given back because the gate keeps the job from there, since the job was last reopened.
fn was_denied(job: &Job, provider: &str) -> bool {
    let is_denied = |attempt: &crate::attempt::Attempt| {
        attempt.provider == provider
            && attempt.version == job.version
            && attempt.state == AttemptState::Aborted
            && attempt.reason.starts_with(DENIED)
    };
    job.attempts.iter().any(is_denied)
}

/// A denial as a reason in the record.
fn denied(provider: &str, denial: &Denial) -> String {
    format!("{DENIED}{provider}: {denial}")
}

/// Asks where a job may go after this outcome, if it may go anywhere.
pub(super) async fn open_after(runtime: &Inner, work: &Work, outcome: &Outcome) -> Leave {
    match outcome {
        Outcome::Succeeded { .. } | Outcome::Unknown { .. } => Leave { open: Open::first(0), denials: Vec::new() },
        Outcome::NotSent { .. } | Outcome::Rejected { .. } | Outcome::InvalidOutput { .. } => {
            open(runtime, &work.route, &work.request).await
        }
    }
}

/// By what an attempt may be sent.
#[derive(Default)]
pub(super) struct Grant {
    /// The certificate's name, `""` where none is needed.
    pub(super) certificate: String,
    /// The leave that it gives, `None` where none is needed.
    pub(super) permit: Option<Arc<dyn Permit>>,
}

impl Grant {
    /// A fence that lets pass only what is permitted.
    pub(super) fn fence(&self, fence: Fence) -> Fence {
        match &self.permit {
            Some(permit) => fence.by(Arc::clone(permit)),
            None => fence,
        }
    }
}

/// Asks whether an attempt may begin at a provider, right before it does. An error is the reason why not, for the record.
pub(super) async fn permit(
    runtime: &Inner,
    route: &Route,
    job: JobId,
    place: usize,
    rendered: &Rendered,
) -> Result<Grant, String> {
    if place == 0 || route.plan.gate == Gate::Off {
        return Ok(Grant::default());
    }
    let (name, provider) = (&route.name, route.providers.get(place).map_or("?", String::as_str));
    let asked_ms = boottime_ms();
    let denial = match certified(runtime, route, place, rendered).await {
        Ok((_, _)) if route.plan.gate == Gate::Shadow => return Ok(Grant::default()),
        Ok((certificate, wanted)) => {
            let leave = Certified {
                store: runtime.store.clone(),
                job,
                route: name.clone(),
                provider: provider.to_owned(),
                certificate: certificate.id.clone(),
                wanted,
                good_until_ms: AtomicU64::new(asked_ms + millis(PERMIT_AGE_MAX)),
            };
            return Ok(Grant { certificate: certificate.id, permit: Some(Arc::new(leave)) });
        }
        Err(denial) => denial,
    };
    if route.plan.gate == Gate::Shadow {
        metrics::failover_shadowed(name, denial.word());
        tracing::warn!(%job, route = name, provider, why = %denial, "a failover that would be denied goes on: gate = \"shadow\"");
        return Ok(Grant::default());
    }
    Err(deny((name, provider), job, &denial))
}

/// Counts and logs a denial, and says it for the record.
fn deny((route, provider): (&str, &str), job: JobId, denial: &Denial) -> String {
    metrics::failover_denied(route, denial.word());
    tracing::warn!(%job, route, provider, why = %denial, "a failover is denied");
    denied(provider, denial)
}

/// The leave that a certificate gives to one attempt.
struct Certified {
    store: Store,
    job: JobId,
    route: String,
    provider: String,
    certificate: String,
    wanted: Bindings,
    /// By [`boottime_ms`].
    good_until_ms: AtomicU64,
}

impl Permit for Certified {
    fn good_until_ms(&self) -> u64 {
        self.good_until_ms.load(Ordering::Acquire)
    }

    fn ask(&self) -> ProviderFuture<'_, Result<(), String>> {
        Box::pin(async {
            let asked_ms = boottime_ms();
            let kept = self.store.certificates(&self.route, &self.provider).await;
            let kept = kept.map_err(|error| Denial::Unreadable { reason: error.to_string() });
            match kept.and_then(|kept| stands(&self.certificate, &self.wanted, &kept, self.store.now_ms())) {
                Ok(()) => {
                    self.good_until_ms.fetch_max(asked_ms + millis(PERMIT_AGE_MAX), Ordering::AcqRel);
                    Ok(())
                }
                Err(denial) => Err(deny((&self.route, &self.provider), self.job, &denial)),
            }
        })
    }
}

async fn certified(runtime: &Inner, route: &Route, place: usize, rendered: &Rendered) -> Result<(Certificate, Bindings), Denial> {
    let contract = route.proof.contracts.get(place).and_then(Option::as_ref).ok_or(Denial::NoSuite)?;
    let kept = runtime.store.certificates(&route.name, &contract.provider).await;
    let kept = kept.map_err(|error| Denial::Unreadable { reason: error.to_string() })?;
    let wanted = contract.bind(rendered);
    let certificate = decide(&wanted, &kept, runtime.store.now_ms())?.clone();
    Ok((certificate, wanted))
}

/// Whether an answer is as its route requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Valid {
    Yes,
    No,
}

/// What answers have said of certificates.
#[derive(Default)]
pub(super) struct Answers {
    /// The last ones of each provider on each route, the newest last.
    last: Mutex<HashMap<(String, String), VecDeque<Valid>>>,
    /// The certificates that are being suspended: one word on each is enough.
    suspending: Arc<Mutex<HashSet<String>>>,
}

impl Answers {
    /// Counts one more; says so if too many of the last were invalid. Then the count begins anew.
    fn count(&self, route: &Route, provider: &str, valid: Valid) -> Option<String> {
        let Suspend { invalid, of } = route.proof.suspend?;
        let mut all = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let last = all.entry((route.name.clone(), provider.to_owned())).or_default();
        last.push_back(valid);
        while last.len() > of {
            last.pop_front();
        }
        let found = last.iter().filter(|valid| **valid == Valid::No).count();
        if found < invalid {
            return None;
        }
        let answers = last.len();
        last.clear();
        Some(format!("{found} of the last {answers} answers were invalid; the limit is {invalid} of {of}"))
    }
}

/// What an answer says about the certificate under which it was asked for.
pub(super) enum Seen {
    /// Nothing.
    Nothing,
    /// It is valid.
    Valid {
        /// The model that answered, by its own word; `""` if it does not say.
        model: String,
        /// Which build of it; `""` if it does not say.
        build: String,
    },
    /// It is not.
    Invalid,
}

impl Seen {
    /// What this outcome says, if it was asked for under a certificate.
    pub(super) fn under(certificate: &str, outcome: &Outcome) -> Self {
        match outcome {
            _ if certificate.is_empty() => Seen::Nothing,
            Outcome::Succeeded { response, model, .. } => {
                Seen::Valid { model: model.clone().unwrap_or_default(), build: fingerprint_of(&response.body) }
            }
            Outcome::InvalidOutput { .. } => Seen::Invalid,
            Outcome::Rejected { .. } | Outcome::NotSent { .. } | Outcome::Unknown { .. } => Seen::Nothing,
        }
    }
}

/// Does to a certificate what an answer says of it, once the answer itself is stored.
///
/// Another model, or another build of it, than the certified one suspends it; so do invalid answers, if they are too many of the
/// last. That is said in the background, again and again until it is stored or the gateway has stopped.
pub(super) async fn saw(runtime: &Inner, route: &Route, provider: &str, certificate: &str, seen: Seen) {
    let answered = match seen {
        Seen::Nothing => return,
        Seen::Invalid => match runtime.answers.count(route, provider, Valid::No) {
            Some(reason) => Answered::Invalid(reason),
            None => return,
        },
        Seen::Valid { model, build } => {
            runtime.answers.count(route, provider, Valid::Yes);
            Answered::By { model, build }
        }
    };
    let suspicion = Suspicion {
        store: runtime.store.clone(),
        suspending: Arc::clone(&runtime.answers.suspending),
        route: route.name.clone(),
        provider: provider.to_owned(),
        certificate: certificate.to_owned(),
    };
    let stopped = runtime.stopped.clone();
    runtime.work.spawn(async move {
        if stopped.run_until_cancelled(suspicion.follow(answered)).await.is_none() {
            let Suspicion { route, provider, certificate, .. } = suspicion;
            tracing::error!(
                route,
                provider,
                certificate,
                "the gateway stops before it knows that a certificate is well or suspended"
            );
        }
    });
}

/// What an answer gives reason to look at.
enum Answered {
    /// Too many were invalid; how many.
    Invalid(String),
    /// Who answered.
    By { model: String, build: String },
}

/// A certificate that may be no longer true.
struct Suspicion {
    store: Store,
    suspending: Arc<Mutex<HashSet<String>>>,
    route: String,
    provider: String,
    certificate: String,
}

impl Suspicion {
    async fn follow(&self, answered: Answered) {
        let (why, reason) = match answered {
            Answered::Invalid(reason) => ("invalid", reason),
            Answered::By { model, build } => {
                let read = || self.store.certificates(&self.route, &self.provider);
                let kept = match insist(read, |error, pause| self.tried(error, pause)).await {
                    Ok(kept) => kept,
                    // Nor does the gate let anybody go there by what cannot be read.
                    Err(error) => {
                        let Suspicion { route, provider, .. } = self;
                        tracing::warn!(route, provider, %error, "whether the certified model answered is not known");
                        return;
                    }
                };
                let own = kept.iter().find(|one| one.certificate.id == self.certificate);
                match own.and_then(|one| one.certificate.drift(&model, &build)) {
                    Some(reason) => ("drift", reason),
                    None => return,
                }
            }
        };
        if !self.suspending.lock().unwrap_or_else(PoisonError::into_inner).insert(self.certificate.clone()) {
            return;
        }
        self.suspend(why, &reason).await;
        self.suspending.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.certificate);
    }

    async fn suspend(&self, why: &'static str, reason: &str) {
        let Suspicion { store, route, provider, certificate, .. } = self;
        let (pair, token, said) = ((route.as_str(), provider.as_str()), AttemptToken::random(), (ACTOR, reason));
        let say = || store.mark_certificate(token, pair, Some(certificate), Standing::Suspended, said);
        match insist(say, |error, pause| self.tried(error, pause)).await {
            Ok(Stood::Changed(_) | Stood::Repeated) => {
                metrics::certificate_suspended(route, why);
                tracing::error!(route, provider, certificate, reason, "a certificate is suspended: no failover goes there");
            }
            Ok(Stood::Refused | Stood::NotFound) => {
                tracing::info!(route, provider, certificate, reason, "a certificate to suspend is revoked or gone");
            }
            Err(error) => {
                tracing::error!(route, provider, certificate, reason, %error, "a certificate could not be suspended: revoke it");
            }
        }
    }

    fn tried(&self, error: &StoreError, pause: Duration) -> ControlFlow<()> {
        let Suspicion { route, provider, certificate, .. } = self;
        tracing::warn!(route, provider, certificate, %error, ?pause, "a certificate that may be untrue stands: again after a pause");
        ControlFlow::Continue(())
    }
}

/// Which build of its model answered, by its own word; `""` if it does not say. A stream says so in one of its first events.
fn fingerprint_of(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Answer {
        #[serde(default)]
        system_fingerprint: Option<String>,
    }
    let of = |json: &[u8]| serde_json::from_slice::<Answer>(json).ok()?.system_fingerprint;
    let of_stream = || {
        let events = body.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(b"data:"));
        events.take(EVENTS_MAX).find_map(of)
    };
    of(body).or_else(of_stream).unwrap_or_default()
}

/// Keeps the gauge: for how long a route's certificates are still good.
pub(super) async fn run(runtime: Arc<Inner>) {
    loop {
        for route in runtime.routes.values().filter(|route| route.plan.gate != Gate::Off) {
            let mut first = None;
            for contract in route.proof.contracts.iter().skip(1).flatten() {
                // What cannot be read is no news: the gauge stays, and the store's own alert tells.
                let Ok(kept) = runtime.store.certificates(&route.name, &contract.provider).await else { continue };
                let now_ms = runtime.store.now_ms();
                let is_good = |one: &&Kept| one.standing == Standing::Live && contract.may_cover(&one.certificate.bindings);
                let good = in_force(&kept).filter(is_good).map(|one| one.certificate.expires_ms).max();
                let left_ms = good.unwrap_or(0).saturating_sub(now_ms);
                first = Some(first.map_or(left_ms, |first: u64| first.min(left_ms)));
            }
            if let Some(left_ms) = first {
                metrics::certificate_expires(&route.name, Duration::from_millis(left_ms));
            }
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = runtime.stopped.cancelled() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_is_read_from_an_answer_that_names_one() {
        assert_eq!(fingerprint_of(br#"{"id":"1","system_fingerprint":"fp_1"}"#), "fp_1");
        let stream =
            b"data: {\"system_fingerprint\":null}\n\nevent: x\ndata: {\"system_fingerprint\":\"fp_2\"}\n\ndata: [DONE]\n\n";
        assert_eq!(fingerprint_of(stream), "fp_2");
        for body in [br#"{"system_fingerprint":null}"#.as_slice(), b"{}", b"data: {}", b""] {
            assert_eq!(fingerprint_of(body), "");
        }
    }
}
