//! Renews certificates before they end, in the background of a gateway, where a route's `qualify.renew` says so.
//!
//! A renewal runs the suite against the provider as `onejob qualify` does, without the way through a gateway (L3), which is this
//! process' own. Of all gateways one renews at a time: whoever has the lease (`oj:renewal:{pair}`), and its last extension is the
//! pause before anybody tries again. A gateway that dies meanwhile lets it lapse.
//!
//! A renewal stands on the certificate that it renews. Was that one suspended or revoked meanwhile, nothing is issued. A suite that
//! fails suspends it: what was proved is not true any more. What cannot be decided changes nothing; the old certificate runs out.
//!
//! Deliberately not here: a first certificate, or one for a contract that has changed. Those are a person's to ask for.

use std::time::Duration;

use onejob::attempt::AttemptToken;
use onejob::config::Config;
use onejob::metrics;
use onejob::qualify::runner::{Report, Run, Settings, Verdict};
use onejob::qualify::suite::Level;
use onejob::qualify::{Certificate, Standing, decide};
use onejob::store::{Issued, RenewalLease, Store};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::qualify::Subject;
use super::{Exit, Failure, OrExit as _};

/// Who renews and suspends, in the events of certificates.
const ACTOR: &str = "onejob/renewal";
/// How often the certificates are looked at.
const LOOK: Duration = Duration::from_secs(5);
/// How long a renewal is kept from others without being extended; it is extended three times as often.
const LEASE: Duration = Duration::from_secs(30);
/// Between two tries of one renewal, an eighth of `renew`: at least a minute, so that who is in trouble is left alone.
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
            // What is not finished is dropped: the certificate stays as it is, and the lease lapses.
            let _ = stopped.run_until_cancelled(run(&config, &store)).await;
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

/// A certificate's subject, and how long before its end it is renewed.
struct Renewal<'a> {
    subject: Subject<'a>,
    renew: Duration,
}

async fn run(config: &Config, store: &Store) {
    let mut renewals = Vec::new();
    for (name, route) in &config.route {
        let Some(renew) = route.qualify.as_ref().and_then(|qualify| qualify.renew) else { continue };
        // The first provider needs no certificate.
        for provider in route.providers.iter().skip(1) {
            match Subject::of(config, name, provider) {
                Ok(subject) => renewals.push(Renewal { subject, renew }),
                Err(error) => tracing::error!(route = name, provider, %error, "its certificates cannot be renewed"),
            }
        }
    }
    loop {
        for renewal in &renewals {
            let Subject { route, name, .. } = renewal.subject;
            if let Err(error) = renewal.look(store).await {
                metrics::certificate_renewal(route, "error");
                tracing::error!(route, provider = name, %error, "a certificate could not be renewed: it stays as it is");
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

impl Renewal<'_> {
    /// Renews the certificate, if there is a live one that soon ends and nobody else renews it.
    async fn look(&self, store: &Store) -> Result<(), Failure> {
        // What cannot be read is no news: the store's own alert tells.
        let Ok(Some(_)) = self.due(store).await else { return Ok(()) };
        let (pair, token) = ((self.subject.route, self.subject.name), AttemptToken::random());
        let lease = store.take_renewal(pair, token, millis(LEASE)).await.or_exit(Exit::Unavailable)?;
        if lease == RenewalLease::Elsewhere {
            return Ok(());
        }
        // Somebody else may have renewed it between the two.
        let Some(standing) = self.due(store).await? else { return Ok(()) };
        let done = tokio::select! {
            done = self.renew(store, &standing) => done,
            error = held(store, pair, token) => Err(error),
        };
        let pause = (self.renew / 8).clamp(RENEWAL_PAUSE_MIN, RENEWAL_PAUSE_MAX);
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

    async fn renew(&self, store: &Store, standing: &Certificate) -> Result<(), Failure> {
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
        let report = Report { parameters: examined.parameters(self.subject.vary()), ..self.subject.report(all) };
        match (report.verdict, otherwise(standing, &report)) {
            (Verdict::Passed, None) => self.issue(store, standing, &report).await,
            (Verdict::Passed, Some(other)) => self.suspend(store, standing, &other).await,
            (Verdict::Failed, _) => self.suspend(store, standing, report.says.first().map_or("", String::as_str)).await,
            (Verdict::Inconclusive, _) => {
                let (why, until_ms) = (report.says.join("; "), standing.expires_ms);
                metrics::certificate_renewal(route, "inconclusive");
                tracing::error!(route, provider = name, certificate = standing.id, until_ms, why, "a renewal proves nothing");
                Ok(())
            }
        }
    }

    async fn issue(&self, store: &Store, standing: &Certificate, report: &Report) -> Result<(), Failure> {
        let Subject { route, name, .. } = self.subject;
        let (certificate, evidence) = self.subject.certificate(report, ACTOR, store.now_ms())?;
        let issued = store.issue_certificate(&certificate, &evidence, Some(&standing.id)).await.or_exit(Exit::Unavailable)?;
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

    /// What was proved is not true any more.
    async fn suspend(&self, store: &Store, standing: &Certificate, why: &str) -> Result<(), Failure> {
        let Subject { route, name, .. } = self.subject;
        let reason = format!("renewal refused: {}", why.strip_prefix("refused: ").unwrap_or(why));
        metrics::certificate_renewal(route, "refused");
        metrics::certificate_suspended(route, "renewal");
        tracing::error!(
            route,
            provider = name,
            certificate = standing.id,
            reason,
            "a certificate is suspended: no failover goes there"
        );
        let said = (ACTOR, reason.as_str());
        store
            .mark_certificate(AttemptToken::random(), (route, name), Some(&standing.id), Standing::Suspended, said)
            .await
            .map(drop)
            .or_exit(Exit::Unavailable)
    }
}

fn tell_nobody(_: &Run) {}

/// How what answered differs from what is certified: such answers suspend a certificate in any job, so they do here.
fn otherwise(standing: &Certificate, report: &Report) -> Option<String> {
    let pairs = [("model", &report.model, &standing.answered_by), ("build", &report.build, &standing.fingerprint)];
    let differs =
        |(_, answers, certified): &(_, &String, &String)| !answers.is_empty() && !certified.is_empty() && answers != certified;
    let (what, answers, certified) = pairs.into_iter().find(differs)?;
    Some(format!("{what} {answers:?} answered, {certified:?} is certified"))
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
