//! What providers have proved: certificates, their standing, and the reports that are their evidence.
//!
//! One HASH for a route and provider, whatever the number of jobs; the rules stand in `lua/issue_certificate.lua` and
//! `lua/mark_certificate.lua`. Nothing here remembers anything: whoever decides about a failover reads what stands at that moment.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Duration;

use redis::Value;
use serde::Deserialize;

use crate::attempt::AttemptToken;
use crate::error::StoreError;
use crate::fingerprint::{hex, sha256};
use crate::qualify::{Certificate, Kept, Standing};
use crate::store::call::{Around, Call};
use crate::store::calls::AskTaken;
use crate::store::transitions::{Argument as _, arguments};
use crate::store::{Script, Store};

/// Largest report that is kept as evidence, in bytes.
pub const EVIDENCE_BYTES_MAX: usize = 1 << 20;
/// Longest reason and longest name of who said so, in characters.
const WORDS_CHARS_MAX: usize = 500;
/// How long evidence outlives its certificate, in ms: as long as the certificate is known.
const EVIDENCE_KEEP_MS: u64 = 30 * 24 * 3_600_000;
/// Most routes and providers that are listed.
const PAIRS_MAX: usize = 10_000;
/// The pause after the first call that failed: a connection that was cut is built anew by then. Each later one is twice as long.
const INSIST_PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest pause between two calls, so that a word counts soon after Redis is back.
const INSIST_PAUSE_MAX: Duration = Duration::from_secs(10);

/// What came of a word on certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stood {
    /// So many stand otherwise than before.
    Changed(u64),
    /// They stood so already.
    Repeated,
    /// Revoked ones stay revoked.
    Refused,
    /// There is none of that name.
    NotFound,
}

/// What came of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Issued {
    /// It is kept.
    Kept,
    /// The one that it renews is not live any more, or one of the same route and provider was suspended or revoked since the runs
    /// began: nothing was issued.
    Refused,
}

/// The routes and providers that have had certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certified {
    /// Route and provider, sorted.
    pub pairs: Vec<(String, String)>,
    /// Members of the index that name nobody, escaped.
    pub unreadable: Vec<String>,
}

/// Who renews a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewalLease {
    /// This caller, until its lease ends.
    Held,
    /// Somebody else does, or did a short while ago.
    Elsewhere,
}

/// What happened to a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, serde::Serialize)]
pub struct CertificateEvent {
    /// When, Unix ms, by Redis' clock.
    pub at_ms: u64,
    /// `issued`, `suspended`, `reinstated` or `revoked`.
    pub event: String,
    /// Which certificate.
    pub id: String,
    /// Who said so.
    pub by: String,
    /// Why.
    pub reason: String,
}

/// A route and provider, as a name in keys.
fn pair(route: &str, provider: &str) -> String {
    hex(&sha256(format!("{route}\n{provider}").as_bytes())[..16])
}

impl Store {
    /// Keeps a certificate, live from now on, and its evidence; one that renews another only if that one is live at this moment.
    ///
    /// Whoever suspended or revoked the one that is renewed, while the provider was examined, has the last word; so has who did so to
    /// any of this route and provider at `since_ms` or later, by Redis' clock: that is when the examination began, 0 for never.
    ///
    /// # Errors
    /// Any: the same call again ([`insist`]). `Fatal` (`BADARG`) for a report beyond [`EVIDENCE_BYTES_MAX`].
    pub async fn issue_certificate(
        &self,
        certificate: &Certificate,
        evidence: &[u8],
        renews: Option<&str>,
        since_ms: u64,
    ) -> Result<Issued, StoreError> {
        if evidence.len() > EVIDENCE_BYTES_MAX {
            let what = format!("the report has {} bytes; the limit is {EVIDENCE_BYTES_MAX}", evidence.len());
            return Err(StoreError::fatal("BADARG", what));
        }
        let Certificate { id, route, provider, issued_ms, expires_ms, issued_by, .. } = certificate;
        let life_ms = expires_ms.saturating_sub(*issued_ms).max(1);
        // A hint, written first: one that leads nowhere is harmless.
        let mut index = redis::cmd("ZADD");
        index.arg(self.inner.keys.certified()).arg(*expires_ms).arg(format!("{route}\n{provider}"));
        self.command(index).await?;
        let mut keep = redis::cmd("SET");
        keep.arg(self.inner.keys.evidence(id)).arg(evidence).arg("PX").arg(life_ms + EVIDENCE_KEEP_MS);
        self.command(keep).await?;
        let json = serde_json::to_string(certificate).map_err(|error| StoreError::fatal("BADARG", error))?;
        let token = AttemptToken::random();
        let by = shortened(issued_by);
        let renews = renews.unwrap_or_default();
        let arguments = arguments![token, id.as_str(), json.as_str(), by.as_str(), life_ms, renews, since_ms];
        let key = self.inner.keys.certificates(&pair(route, provider));
        let call = Call::new(Script::IssueCertificate, &[&key], arguments, token.as_bytes().to_vec());
        let reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "issued" | "repeated" => Ok(Issued::Kept),
            "refused" => Ok(Issued::Refused),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Takes the right to renew the certificate of a route and provider, if nobody has it.
    ///
    /// # Errors
    /// Any: look again later. A lease that was taken and not answered for lapses by itself.
    pub async fn take_renewal(
        &self,
        (route, provider): (&str, &str),
        token: AttemptToken,
        lease_ms: u64,
    ) -> Result<RenewalLease, StoreError> {
        let key = self.inner.keys.renewal(&pair(route, provider));
        Ok(match self.take_lease(&key, token, lease_ms).await? {
            AskTaken::Taken => RenewalLease::Held,
            AskTaken::Standing { .. } => RenewalLease::Elsewhere,
        })
    }

    /// Keeps the right to renew, or leaves it standing so long that nobody begins earlier.
    ///
    /// # Errors
    /// Any: it lapses by itself.
    pub async fn extend_renewal(
        &self,
        (route, provider): (&str, &str),
        token: AttemptToken,
        lease_ms: u64,
    ) -> Result<RenewalLease, StoreError> {
        let key = self.inner.keys.renewal(&pair(route, provider));
        let call = Call::new(Script::ExtendAsk, &[&key], arguments![token, lease_ms], token.as_bytes().to_vec());
        let reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "extended" => Ok(RenewalLease::Held),
            "lost" => Ok(RenewalLease::Elsewhere),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Says how certificates of a route and provider stand: one of them, or all that are kept. Sent again under its token, it changes
    /// nothing a second time, whatever was said in between.
    ///
    /// # Errors
    /// Any: the same call again ([`insist`]). `Fatal` (`BADARG`) for an empty name.
    pub async fn mark_certificate(
        &self,
        token: AttemptToken,
        (route, provider): (&str, &str),
        id: Option<&str>,
        standing: Standing,
        (by, reason): (&str, &str),
    ) -> Result<Stood, StoreError> {
        if id == Some("") {
            return Err(StoreError::fatal("BADARG", "no certificate has an empty name"));
        }
        let (by, reason) = (shortened(by), shortened(reason));
        let arguments = arguments![token, id.unwrap_or_default(), standing.as_str(), by.as_str(), reason.as_str()];
        let key = self.inner.keys.certificates(&pair(route, provider));
        let call = Call::new(Script::MarkCertificate, &[&key], arguments, token.as_bytes().to_vec());
        let mut reply = self.run(&call, &Around::default()).await?;
        match reply.status() {
            "marked" => Ok(Stood::Changed(reply.parse()?)),
            "repeated" => Ok(Stood::Repeated),
            "refused" => Ok(Stood::Refused),
            "not_found" => Ok(Stood::NotFound),
            _ => Err(reply.unknown_status()),
        }
    }

    /// Reads the certificates of a route and provider from the master, the newest first.
    ///
    /// # Errors
    /// `Fatal` (`BADCERTIFICATE`) for what cannot be read: then nothing is proved.
    pub async fn certificates(&self, route: &str, provider: &str) -> Result<Vec<Kept>, StoreError> {
        let fields = self.certificate_fields(route, provider).await?;
        let text = |name: &str| fields.get(name).map(String::as_str).unwrap_or_default();
        let ids = text("ids").split(' ').filter(|id| !id.is_empty());
        ids.map(|id| {
            let bad = |what: String| StoreError::fatal("BADCERTIFICATE", format!("{route}, {provider}, {id}: {what}"));
            let json = text(&format!("certificate:{id}"));
            let certificate: Certificate = serde_json::from_str(json).map_err(|error| bad(error.to_string()))?;
            if (certificate.route.as_str(), certificate.provider.as_str(), certificate.id.as_str()) != (route, provider, id) {
                return Err(bad("it is another one's".to_owned()));
            }
            let standing = text(&format!("standing:{id}"));
            let standing = Standing::of(standing).ok_or_else(|| bad(format!("it stands {standing:?}")))?;
            let (by, reason) = (text(&format!("by:{id}")).to_owned(), text(&format!("reason:{id}")).to_owned());
            Ok(Kept { certificate, standing, reason, by })
        })
        .collect()
    }

    /// Reads what happened to the certificates of a route and provider, the oldest first.
    ///
    /// # Errors
    /// As [`Store::certificates`].
    pub async fn certificate_events(&self, route: &str, provider: &str) -> Result<Vec<CertificateEvent>, StoreError> {
        let fields = self.certificate_fields(route, provider).await?;
        let Some(events) = fields.get("events") else { return Ok(Vec::new()) };
        serde_json::from_str(events).map_err(|error| StoreError::fatal("BADCERTIFICATE", format!("{route}, {provider}: {error}")))
    }

    /// Lists the routes and providers that have had certificates, and what in the index names none.
    ///
    /// # Errors
    /// The store's.
    pub async fn certified_pairs(&self) -> Result<Certified, StoreError> {
        let mut range = redis::cmd("ZREVRANGE");
        range.arg(self.inner.keys.certified()).arg(0).arg(PAIRS_MAX - 1);
        let bad = |_| StoreError::fatal("BADCERTIFICATE", "the index is no list of texts");
        let members: Vec<Vec<u8>> = redis::from_redis_value(self.command(range).await?).map_err(bad)?;
        let mut certified = Certified::default();
        for member in members {
            match std::str::from_utf8(&member).ok().and_then(|member| member.split_once('\n')) {
                Some((route, provider)) => certified.pairs.push((route.to_owned(), provider.to_owned())),
                None => certified.unreadable.push(member.escape_ascii().to_string()),
            }
        }
        certified.pairs.sort();
        Ok(certified)
    }

    /// Reads the report that is a certificate's evidence; `None` once it is forgotten.
    ///
    /// # Errors
    /// The store's.
    pub async fn evidence(&self, id: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let mut get = redis::cmd("GET");
        get.arg(self.inner.keys.evidence(id));
        match self.command(get).await? {
            Value::Nil => Ok(None),
            Value::BulkString(bytes) => Ok(Some(bytes)),
            _ => Err(StoreError::fatal("BADCERTIFICATE", "the evidence is no text")),
        }
    }

    async fn certificate_fields(&self, route: &str, provider: &str) -> Result<HashMap<String, String>, StoreError> {
        let mut read = redis::cmd("HGETALL");
        read.arg(self.inner.keys.certificates(&pair(route, provider)));
        let fields = self.command_of_master(read).await?;
        let bad = |error| StoreError::fatal("BADCERTIFICATE", format!("{route}, {provider}: {error}"));
        redis::from_redis_value(fields).map_err(bad)
    }
}

/// Makes the same call again until it is answered, with growing pauses. `failed` hears of each failure and of the pause that follows,
/// and may give up.
///
/// # Errors
/// The last failure: the one that `failed` gave up at, or a `Fatal` one that no permission mends.
///
/// # Cancel safety
/// What is dropped may have been executed, or be executed still.
pub async fn insist<T, F: Future<Output = Result<T, StoreError>>>(
    mut call: impl FnMut() -> F,
    mut failed: impl FnMut(&StoreError, Duration) -> ControlFlow<()>,
) -> Result<T, StoreError> {
    let mut pause = INSIST_PAUSE_MIN;
    loop {
        let error = match call().await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        if !(error.is_retryable() || error.is_for_permission()) || failed(&error, pause).is_break() {
            return Err(error);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(INSIST_PAUSE_MAX);
    }
}

fn shortened(words: &str) -> String {
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    words.chars().take(WORDS_CHARS_MAX).map(shown).collect()
}
