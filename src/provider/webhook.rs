//! Webhooks: how a provider says by itself what became of an attempt, and how it is known that it was the provider.
//!
//! The address that a provider is given names job and attempt, and carries a code that only holders of the secret can make for
//! them; the call itself carries a time and a signature over time and body. So a webhook cannot be made, cannot be used for
//! another attempt, and cannot be kept for later. One that comes twice is harmless: what it says is recorded once.
//!
//! Deliberately not here: the HTTP side (`server/webhooks.rs`) and what evidence does to a record (`runtime/delivered.rs`).

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::config;
use crate::fingerprint::hex;
use crate::job::JobId;

/// Shortest secret, in bytes: below it a signature can be guessed off line.
pub const SECRET_BYTES_MIN: usize = 16;
/// The name, in an address, of the code that binds it to its attempt.
const CODE: &str = "code";

/// A webhook as it came.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// Which provider's, by the address.
    pub provider: String,
    /// Which job, by the address.
    pub job_id: JobId,
    /// Which attempt, by the address.
    pub attempt: u32,
    /// The query of the address.
    pub query: String,
    /// Names lower case.
    pub headers: Vec<(String, String)>,
    /// The body, as it was signed.
    pub body: std::sync::Arc<[u8]>,
}

/// Why a webhook is not believed. Never says a secret or a signature.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WebhookRefused {
    /// This provider does not call back.
    #[error("this provider has no webhook")]
    NotConfigured,
    /// A header is missing, or is not what it should be.
    #[error("the header {0} is missing or cannot be read")]
    Header(String),
    /// Too old, or from the future.
    #[error("it was signed {0} s away from now; the limit is {1} s")]
    Time(u64, u64),
    /// Not by who has the secret, or not for this address.
    #[error("the signature does not fit")]
    Signature,
}

/// How a provider calls back. A plain value.
#[derive(Clone)]
pub struct WebhookOptions {
    /// Where providers reach the gateways, without a slash at its end: `https://jobs.example`.
    pub public_url: String,
    /// What both sides sign with.
    pub secret: String,
    /// Headers, tolerance, place of the work in the body.
    pub entry: config::Webhook,
}

impl fmt::Debug for WebhookOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookOptions").field("public_url", &self.public_url).field("entry", &self.entry).finish_non_exhaustive()
    }
}

/// A provider's webhooks.
pub(crate) struct Webhooks {
    provider: String,
    options: WebhookOptions,
}

impl Webhooks {
    pub(crate) fn new(provider: &str, options: WebhookOptions) -> Self {
        Webhooks { provider: provider.to_owned(), options }
    }

    /// JSON pointer to the piece of work in a body.
    pub(crate) fn item(&self) -> &str {
        &self.options.entry.item
    }

    /// The address for one attempt.
    pub(crate) fn url(&self, job_id: JobId, attempt: u32) -> String {
        address(&self.options, &self.provider, job_id, attempt)
    }

    /// Whether a delivery is the provider's own, for this attempt, and of now.
    pub(crate) fn verify(&self, delivery: &Delivery) -> Result<(), WebhookRefused> {
        #[expect(clippy::disallowed_methods, reason = "a webhook is signed with the time on everybody's wall clock")]
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        self.verify_at(delivery, now.as_secs())
    }

    fn verify_at(&self, delivery: &Delivery, now_s: u64) -> Result<(), WebhookRefused> {
        let entry = &self.options.entry;
        let given = delivery.query.split('&').find_map(|part| part.strip_prefix(CODE)?.strip_prefix('='));
        let given = given.and_then(bytes).ok_or(WebhookRefused::Signature)?;
        code(&self.options.secret, &self.provider, delivery.job_id, delivery.attempt)
            .verify_slice(&given)
            .map_err(|_| WebhookRefused::Signature)?;
        let (name, time) = single(delivery, &entry.timestamp_header)?;
        let signed_s: u64 = time.trim().parse().map_err(|_| WebhookRefused::Header(name))?;
        let (name, signature) = single(delivery, &entry.signature_header)?;
        let signature = signature.trim().strip_prefix(entry.prefix.as_str()).and_then(bytes);
        let signature = signature.ok_or(WebhookRefused::Header(name))?;
        signed(&self.options.secret, time.trim(), &delivery.body)
            .verify_slice(&signature)
            .map_err(|_| WebhookRefused::Signature)?;
        let (away, tolerance) = (now_s.abs_diff(signed_s), entry.tolerance.as_secs());
        if away > tolerance { Err(WebhookRefused::Time(away, tolerance)) } else { Ok(()) }
    }
}

/// The address that a provider is given for one attempt.
pub fn address(options: &WebhookOptions, provider: &str, job_id: JobId, attempt: u32) -> String {
    let code = hex(&code(&options.secret, provider, job_id, attempt).finalize().into_bytes());
    format!("{}/v1/webhooks/{provider}/{job_id}/{attempt}?{CODE}={code}", options.public_url)
}

/// What binds an address to its attempt. No signature of a webhook covers such a text: those begin with a number.
fn code(secret: &str, provider: &str, job_id: JobId, attempt: u32) -> Hmac<Sha256> {
    let mut mac = mac(secret);
    mac.update(format!("webhook address {provider} {job_id} {attempt}").as_bytes());
    mac
}

/// Signs a webhook as a provider would: HMAC-SHA256 over the time, `.` and the body, in hexadecimal.
pub fn sign(secret: &str, timestamp_s: u64, body: &[u8]) -> String {
    hex(&signed(secret, &timestamp_s.to_string(), body).finalize().into_bytes())
}

fn signed(secret: &str, timestamp: &str, body: &[u8]) -> Hmac<Sha256> {
    let mut mac = mac(secret);
    mac.update(timestamp.as_bytes());
    mac.update(b".");
    mac.update(body);
    mac
}

fn mac(secret: &str) -> Hmac<Sha256> {
    Hmac::new_from_slice(secret.as_bytes()).expect("HMAC takes a key of any length")
}

/// The one header of that name.
fn single<'a>(delivery: &'a Delivery, name: &str) -> Result<(String, &'a str), WebhookRefused> {
    let mut found = delivery.headers.iter().filter(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value);
    match (found.next(), found.next()) {
        (Some(value), None) => Ok((name.to_owned(), value)),
        (None, _) | (Some(_), Some(_)) => Err(WebhookRefused::Header(name.to_owned())),
    }
}

/// Bytes from pairs of hexadecimal digits.
fn bytes(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| if let [high, low] = pair { Some(digit(*high)? << 4 | digit(*low)?) } else { None }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec-0123456789abcdef";
    const JOB: &str = "0190b0c0-0000-8000-8000-000000000001";
    const OTHER_JOB: &str = "0190b0c0-0000-8000-8000-000000000002";
    const NOW_S: u64 = 1_800_000_000;

    fn webhooks() -> Webhooks {
        let entry = config::Webhook { prefix: "sha256=".to_owned(), ..config::Webhook::default() };
        let options = WebhookOptions { public_url: "https://g.example".to_owned(), secret: SECRET.to_owned(), entry };
        Webhooks::new("laser", options)
    }

    fn delivery(secret: &str, signed_s: u64, body: &str) -> Delivery {
        let job_id = JOB.parse().unwrap();
        let url = webhooks().url(job_id, 1);
        let headers = [
            ("webhook-timestamp", signed_s.to_string()),
            ("webhook-signature", format!("sha256={}", sign(secret, signed_s, body.as_bytes()))),
        ];
        Delivery {
            provider: "laser".to_owned(),
            job_id,
            attempt: 1,
            query: url.split_once('?').unwrap().1.to_owned(),
            headers: headers.map(|(name, value)| (name.to_owned(), value)).into(),
            body: body.as_bytes().into(),
        }
    }

    #[test]
    fn a_signature_is_what_rfc_4231_says_of_time_and_body() {
        // Test case 2 of RFC 4231, whose text has no point: the time would be a part of it.
        let mut mac = mac("Jefe");
        mac.update(b"what do ya want for nothing?");
        assert_eq!(hex(&mac.finalize().into_bytes()), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        assert_ne!(sign("Jefe", 1, b"2.3"), sign("Jefe", 12, b".3"));
    }

    #[test]
    fn only_the_providers_own_word_for_this_attempt_and_of_now_is_believed() {
        let verified = |delivery: &Delivery| webhooks().verify_at(delivery, NOW_S);
        let good = delivery(SECRET, NOW_S, "{}");
        assert_eq!(verified(&good), Ok(()));
        assert_eq!(verified(&delivery(SECRET, NOW_S - 300, "{}")), Ok(()));
        assert_eq!(verified(&delivery(SECRET, NOW_S - 301, "{}")), Err(WebhookRefused::Time(301, 300)));
        assert_eq!(verified(&delivery(SECRET, NOW_S + 301, "{}")), Err(WebhookRefused::Time(301, 300)));
        assert_eq!(verified(&delivery("whsec-another-secret", NOW_S, "{}")), Err(WebhookRefused::Signature));

        let refused = |change: fn(&mut Delivery)| {
            let mut changed = good.clone();
            change(&mut changed);
            verified(&changed).unwrap_err()
        };
        assert_eq!(refused(|delivery| delivery.body = b"{ }".as_slice().into()), WebhookRefused::Signature);
        assert_eq!(refused(|delivery| delivery.attempt = 2), WebhookRefused::Signature);
        assert_eq!(refused(|delivery| delivery.job_id = OTHER_JOB.parse().unwrap()), WebhookRefused::Signature);
        assert_eq!(refused(|delivery| delivery.query.clear()), WebhookRefused::Signature);
        assert_eq!(refused(|delivery| delivery.query.truncate(7)), WebhookRefused::Signature);
        // Another time under the same signature.
        assert_eq!(refused(|delivery| delivery.headers[0].1 = (NOW_S + 1).to_string()), WebhookRefused::Signature);
        for (place, name) in [(0, "webhook-timestamp"), (1, "webhook-signature")] {
            let mut without = good.clone();
            without.headers.remove(place);
            assert_eq!(verified(&without), Err(WebhookRefused::Header(name.to_owned())));
            let mut twice = good.clone();
            twice.headers.push(twice.headers[place].clone());
            assert_eq!(verified(&twice), Err(WebhookRefused::Header(name.to_owned())));
        }
        let mut short = good.clone();
        short.headers[1].1.truncate("sha256=".len() + 10);
        assert_eq!(verified(&short), Err(WebhookRefused::Signature));
        short.headers[1].1 = "sha256=xyz".to_owned();
        assert_eq!(verified(&short), Err(WebhookRefused::Header("webhook-signature".to_owned())));
    }
}
