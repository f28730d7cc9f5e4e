//! Renews certificates before they end, in the background of a gateway, where a route's `qualify.renew` says so.
//!
//! A renewal runs the suite against the provider as `onejob qualify` does, without the way through a gateway (L3), which is this
//! process' own. Of all gateways one renews at a time: whoever has the lease (`oj:renewal:{pair}`), and its last extension is the
//! pause before anybody tries again. A gateway that dies meanwhile lets it lapse.
//!
//! A renewal stands on the certificate that it renews. Was that one suspended or revoked meanwhile, nothing is issued. A suite that
//! fails suspends it: what was proved is not true any more. What cannot be decided changes nothing; the old certificate runs out.
//! So it is where the certificate names a model or a build and the answers name none: a new one would be for less.
//!
//! Each certificate is looked after for itself, so that a provider that hangs keeps no other one's from being renewed.
//!
//! Deliberately not here: a first certificate, or one for a contract that has changed. Those are a person's to ask for.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use onejob::attempt::AttemptToken;
use onejob::config::Config;
use onejob::error::StoreError;
use onejob::metrics;
use onejob::qualify::runner::{Report, Run, Settings, Verdict};
use onejob::qualify::suite::Level;
use onejob::qualify::{Certificate, Standing, decide};
use onejob::store::{Issued, RenewalLease, Stood, Store, insist};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::qualify::Subject;
use super::{Exit, Failure, OrExit as _};

/// Who renews and suspends, in the events of certificates.
const ACTOR: &str = "onejob/renewal";
/// How often the certificates are looked at.
const LOOK: Duration = Duration::from_secs(5);
/// How long a renewal is kept from others without being extended; it is extended three times as often.
const LEASE: Duration = Duration::from_secs(30);
/// How many providers a gateway examines at once, each for one route: its jobs come first.
const RENEWALS_AT_ONCE_MAX: usize = 8;
/// Between two tries of one renewal, an eighth of `renew`: at least a minute, so that who is in trouble is left alone, but never more
/// than half of what is left of the certificate.
const RENEWAL_PAUSE_MIN: Duration = Duration::from_secs(60);
/// At most an hour, so that there are several tries before most certificates end.
const RENEWAL_PAUSE_MAX: Duration = Duration::from_secs(3600);

/// The renewals of a gateway.
pub(super) struct Renewals {
    task: JoinHandle<()>,
    stop: CancellationToken,
}

impl Renewals {
    /// Begins to look after the certificates of a configuration; `None` if no route has them renewed.
    pub(super) fn start(config: &Config, store: &Store) -> Option<Self> {
        config.route.values().find_map(|route| route.qualify.as_ref()?.renew)?;
        let (config, store, stop) = (config.clone(), store.clone(), CancellationToken::new());
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            run(Arc::new(config), &store, &stopped).await;
        });
        Some(Renewals { task, stop })
    }

    /// Stops: a renewal under way is given up, and what it renews stays as it is.
    pub(super) async fn stop(self) {
        self.stop.cancel();
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the renewals ended badly");
        }
    }
}

/// Looks after each certificate in a task of its own, until they are stopped.
async fn run(config: Arc<Config>, store: &Store, stopped: &CancellationToken) {
    let (mut tasks, mut examined) = (JoinSet::new(), BTreeMap::new());
    let at_once = Arc::new(Semaphore::new(RENEWALS_AT_ONCE_MAX));
    for (name, route) in &config.route {
        let Some(renew) = route.qualify.as_ref().and_then(|qualify| qualify.renew) else { continue };
        // The first provider needs no certificate.
        for provider in route.providers.iter().skip(1) {
            let room = Room {
                provider: Arc::clone(examined.entry(provider.clone()).or_insert_with(|| Arc::new(Semaphore::new(1)))),
                at_once: Arc::clone(&at_once),
            };
            let (config, store, name, provider) = (Arc::clone(&config), store.clone(), name.clone(), provider.clone());
            tasks.spawn(async move {
                match Subject::of(&config, &name, &provider) {
                    Ok(subject) => Renewal { subject, renew, room }.keep(&store).await,
                    Err(error) => tracing::error!(route = name, provider, %error, "its certificates cannot be renewed"),
                }
            });
        }
    }
    while let Some(Some(ended)) = stopped.run_until_cancelled(tasks.join_next()).await {
        if let Err(error) = ended {
            tracing::error!(%error, "the renewals of a certificate ended badly");
        }
    }
    // What is not finished is dropped: the certificate stays as it is, and the lease lapses.
    tasks.shutdown().await;
}

/// Who may examine now: a provider is examined for one route at a time, so that one that hangs takes one place.
struct Room {
    provider: Arc<Semaphore>,
    at_once: Arc<Semaphore>,
}

/// A certificate's subject, and how long before its end it is renewed.
struct Renewal<'a> {
    subject: Subject<'a>,
    renew: Duration,
    room: Room,
}

impl Renewal<'_> {
    async fn keep(&self, store: &Store) {
        let Subject { route, name, .. } = self.subject;
        loop {
            if let Err(error) = self.look(store).await {
                metrics::certificate_renewal(route, "error");
                tracing::error!(route, provider = name, %error, "a certificate could not be renewed: it stays as it is");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Renews the certificate, if there is a live one that soon ends and nobody else renews it.
    async fn look(&self, store: &Store) -> Result<(), Failure> {
        // What cannot be read is no news: the store's own alert tells.
        let Ok(Some(_)) = self.due(store).await else { return Ok(()) };
        // Before the lease is taken: meanwhile another gateway may have room.
        let _provider = self.room.provider.acquire().await.or_exit(Exit::Internal)?;
        let _at_once = self.room.at_once.acquire().await.or_exit(Exit::Internal)?;
        let (pair, token) = ((self.subject.route, self.subject.name), AttemptToken::random());
        let lease = store.take_renewal(pair, token, millis(LEASE)).await.or_exit(Exit::Unavailable)?;
        if lease == RenewalLease::Elsewhere {
            return Ok(());
        }
        // Somebody else may have renewed it between the two.
        let Some(standing) = self.due(store).await? else { return Ok(()) };
        let since_ms = store.now_ms();
        let report = tokio::select! {
            report = self.examine(store, &standing) => report,
            error = held(store, pair, token) => Err(error),
        };
        // What was found is said also where the lease is lost meanwhile.
        let done = match report {
            Ok(report) => self.conclude(store, &standing, &report, since_ms).await,
            Err(error) => Err(error),
        };
        let left = Duration::from_millis(standing.expires_ms.saturating_sub(store.now_ms()));
        let pause = pause(self.renew, left);
        store.extend_renewal(pair, token, millis(pause)).await.or_exit(Exit::Unavailable)?;
        done
    }

    /// The certificate that covers what requests are now, if it soon ends.
    async fn due(&self, store: &Store) -> Result<Option<Certificate>, Failure> {
        let Subject { route, name, .. } = self.subject;
        let kept = store.certificates(route, name).await.or_exit(Exit::Unavailable)?;
        let now_ms = store.now_ms();
        let live = decide(&self.subject.wanted, &kept, now_ms).ok();
        Ok(live.filter(|live| live.expires_ms.saturating_sub(now_ms) <= millis(self.renew)).cloned())
    }

    async fn examine(&self, store: &Store, standing: &Certificate) -> Result<Report, Failure> {
        let Subject { route, name, suite, .. } = self.subject;
        tracing::info!(route, provider = name, certificate = standing.id, "a certificate soon ends, and is renewed");
        let left = Duration::from_millis(standing.expires_ms.saturating_sub(store.now_ms()));
        // What takes longer than it is good is no renewal.
        let settings = Settings { concurrency: 1, total: Duration::ZERO, time_max: Some(left), cost_max: None };
        let examined = self.subject.examined(settings, 0)?;
        let mut all = examined.run(&[], tell_nobody).await;
        if self.subject.report(all.clone()).verdict == Verdict::Passed && suite.levels.contains(&Level::Capabilities) {
            all.extend(examined.capabilities().await);
        }
        Ok(Report { parameters: examined.parameters(self.subject.vary()), ..self.subject.report(all) })
    }

    async fn conclude(&self, store: &Store, standing: &Certificate, report: &Report, since_ms: u64) -> Result<(), Failure> {
        match (report.verdict, answers(standing, report)) {
            (Verdict::Passed, Answers::AsCertified) => self.issue(store, standing, report, since_ms).await,
            (Verdict::Passed, Answers::Otherwise(other)) => self.suspend(store, standing, &other).await,
            (Verdict::Failed, _) => self.suspend(store, standing, report.says.first().map_or("", String::as_str)).await,
            (Verdict::Passed, Answers::Unnamed(what)) => {
                self.proves_nothing(standing, &what);
                Ok(())
            }
            (Verdict::Inconclusive, _) => {
                self.proves_nothing(standing, &report.says.join("; "));
                Ok(())
            }
        }
    }

    fn proves_nothing(&self, standing: &Certificate, why: &str) {
        let Subject { route, name, .. } = self.subject;
        metrics::certificate_renewal(route, "inconclusive");
        let until_ms = standing.expires_ms;
        tracing::error!(route, provider = name, certificate = standing.id, until_ms, why, "a renewal proves nothing");
    }

    async fn issue(&self, store: &Store, standing: &Certificate, report: &Report, since_ms: u64) -> Result<(), Failure> {
        let Subject { route, name, .. } = self.subject;
        let (certificate, evidence) = self.subject.certificate(report, ACTOR, store.now_ms())?;
        let issue = || store.issue_certificate(&certificate, &evidence, Some(&standing.id), since_ms);
        let failed = |error: &StoreError, pause| {
            tracing::warn!(route, provider = name, %error, ?pause, "a renewed certificate is not stored: again after a pause");
            // Then the next one to look finds nothing to renew, and neither does this one.
            if store.now_ms() >= standing.expires_ms { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let issued = insist(issue, failed).await.or_exit(Exit::Unavailable)?;
        let (old, new) = (&standing.id, &certificate.id);
        match issued {
            Issued::Kept => {
                metrics::certificate_renewal(route, "renewed");
                tracing::info!(route, provider = name, old, new, until_ms = certificate.expires_ms, "a certificate is renewed");
            }
            Issued::Refused => {
                metrics::certificate_renewal(route, "overtaken");
                tracing::warn!(route, provider = name, old, "a certificate was taken back while it was renewed: no new one");
            }
        }
        Ok(())
    }

    /// What was proved is not true any more: said until it is stored, or the gateway stops.
    async fn suspend(&self, store: &Store, standing: &Certificate, why: &str) -> Result<(), Failure> {
        let Subject { route, name, .. } = self.subject;
        let reason = format!("renewal refused: {}", why.strip_prefix("refused: ").unwrap_or(why));
        let (certificate, token) = (&standing.id, AttemptToken::random());
        let said = (ACTOR, reason.as_str());
        let say = || store.mark_certificate(token, (route, name), Some(certificate), Standing::Suspended, said);
        let failed = |error: &StoreError, pause| {
            tracing::warn!(
                route, provider = name, certificate, reason, %error, ?pause,
                "a certificate that is not true still stands: again after a pause"
            );
            ControlFlow::Continue(())
        };
        let stood = insist(say, failed).await.or_exit(Exit::Unavailable)?;
        metrics::certificate_renewal(route, "refused");
        match stood {
            Stood::Changed(_) | Stood::Repeated => {
                metrics::certificate_suspended(route, "renewal");
                tracing::error!(
                    route,
                    provider = name,
                    certificate,
                    reason,
                    "a certificate is suspended: no failover goes there"
                );
            }
            Stood::Refused | Stood::NotFound => {
                tracing::info!(route, provider = name, certificate, reason, "a certificate to suspend is revoked or gone");
            }
        }
        Ok(())
    }
}

/// The pause before the next try of a renewal.
fn pause(renew: Duration, left: Duration) -> Duration {
    (renew / 8).clamp(RENEWAL_PAUSE_MIN, RENEWAL_PAUSE_MAX).min(left / 2)
}

fn tell_nobody(_: &Run) {}

/// Who answers, as far as it is certified.
enum Answers {
    AsCertified,
    /// Another model or build: such answers suspend a certificate in any job, so they do here.
    Otherwise(String),
    /// The certificate names one and the answers do not: by a new certificate nobody would notice another one.
    Unnamed(String),
}

fn answers(standing: &Certificate, report: &Report) -> Answers {
    if let Some(drift) = standing.drift(&report.model, &report.build) {
        return Answers::Otherwise(drift);
    }
    let pairs = [("model", &report.model, &standing.answered_by), ("build", &report.build, &standing.fingerprint)];
    match pairs.into_iter().find(|(_, answers, certified)| answers.is_empty() && !certified.is_empty()) {
        Some((what, _, certified)) => Answers::Unnamed(format!("{what} {certified:?} is certified, and the answers name none")),
        None => Answers::AsCertified,
    }
}

/// Keeps the lease; ends when it is lost.
async fn held(store: &Store, pair: (&str, &str), token: AttemptToken) -> Failure {
    loop {
        tokio::time::sleep(LEASE / 3).await;
        match store.extend_renewal(pair, token, millis(LEASE)).await {
            Ok(RenewalLease::Held) => {}
            Ok(RenewalLease::Elsewhere) => return Failure::new(Exit::Unavailable, "its lease was lost"),
            // It is lost when it has lapsed, and the next call says so.
            Err(error) => tracing::warn!(%error, "the lease of a renewal could not be extended"),
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A renewal of half a minute was tried once, and its certificate ended in the pause.
    #[test]
    fn the_pause_between_two_tries_is_shorter_than_what_is_left() {
        let seconds = Duration::from_secs;
        assert_eq!(pause(seconds(30), seconds(28)), seconds(14));
        assert_eq!(pause(seconds(1800), seconds(1200)), seconds(225));
        assert_eq!(pause(seconds(1800), seconds(100)), seconds(50));
        assert_eq!(pause(seconds(86_400 * 7), seconds(86_400)), RENEWAL_PAUSE_MAX);
    }
}
