//! The headers that onejob reads and writes: key, preferences, request id, entity tags, dates.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use uuid::Uuid;

use crate::job::{InvalidKeyHeader, InvalidName, Job, KEY_CHARS_MAX, Key};
use crate::server::App;
use crate::server::problem::{Kind, Problem};

pub(crate) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
pub(crate) const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
pub(crate) const IDEMPOTENCY_EXPIRES: HeaderName = HeaderName::from_static("idempotency-expires");
pub(crate) const JOB_ID: HeaderName = HeaderName::from_static("onejob-job-id");
pub(crate) const PROVIDER: HeaderName = HeaderName::from_static("onejob-provider");
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("onejob-request-id");
pub(crate) const PREFER: HeaderName = HeaderName::from_static("prefer");
pub(crate) const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// Longest request id: a record remembers the last few.
const REQUEST_ID_CHARS_MAX: usize = 128;

/// The request's idempotency key: there, once, and well formed; anything else is refused rather than run without a key.
pub(crate) struct IdempotencyKey(pub(crate) Key);

impl FromRequestParts<Arc<App>> for IdempotencyKey {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Problem> {
        let mut values = parts.headers.get_all(&IDEMPOTENCY_KEY).iter();
        let value = match (values.next(), values.next()) {
            (Some(value), None) => value,
            (None, _) => {
                let detail =
                    format!("the request has no Idempotency-Key; it must have one of 1 to {KEY_CHARS_MAX} visible characters");
                return Err(Problem::new(Kind::KeyMissing, detail));
            }
            (Some(_), Some(_)) => {
                let detail = format!("the request has {} Idempotency-Key headers; the limit is 1", 2 + values.count());
                return Err(Problem::new(Kind::KeyInvalid, detail));
            }
        };
        let invalid = |detail: String| Problem::new(Kind::KeyInvalid, detail);
        let Ok(value) = value.to_str() else {
            return Err(invalid("the Idempotency-Key has a character that is not visible ASCII".to_owned()));
        };
        Key::from_header(value).map(IdempotencyKey).map_err(|error| match error {
            // A character of the key is part of the key: the answer does not repeat it.
            InvalidKeyHeader::Name(InvalidName::Invisible { .. }) => {
                invalid("the Idempotency-Key has a character that is not visible ASCII".to_owned())
            }
            InvalidKeyHeader::Malformed | InvalidKeyHeader::Name(InvalidName::Empty { .. } | InvalidName::TooLong { .. }) => {
                invalid(error.to_string())
            }
        })
    }
}

/// How long the client would like to wait (`Prefer: wait=N`, RFC 7240), cut to the gateway's limit; `None` if it did not say.
///
/// A preference that cannot be read is ignored, as the RFC has it.
#[derive(Clone, Copy)]
pub(crate) struct Wait(pub(crate) Option<Duration>);

impl FromRequestParts<Arc<App>> for Wait {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Infallible> {
        Ok(Wait(preferred_wait(&parts.headers).map(|wait| wait.min(app.options.wait_max))))
    }
}

impl Wait {
    /// Says what was done about the preference.
    pub(crate) fn applied(self, headers: &mut HeaderMap) {
        if let Some(wait) = self.0 {
            let value = HeaderValue::from_str(&format!("wait={}", wait.as_secs())).expect("digits are visible ASCII");
            headers.insert(PREFERENCE_APPLIED, value);
        }
    }
}

fn preferred_wait(headers: &HeaderMap) -> Option<Duration> {
    let lines = headers.get_all(&PREFER).iter().filter_map(|line| line.to_str().ok());
    let preferences = lines.flat_map(|line| line.split(','));
    let mut waits = preferences.filter_map(|preference| {
        // Parameters of a preference come after a semicolon.
        let (name, value) = preference.split(';').next()?.split_once('=')?;
        name.trim().eq_ignore_ascii_case("wait").then(|| value.trim().trim_matches('"').to_owned())
    });
    // The first of equal preferences counts.
    let seconds: u32 = waits.next()?.parse().ok()?;
    Some(Duration::from_secs(seconds.into()))
}

/// The client's name for one request that changes something, so that it may be sent again: `Onejob-Request-Id`, else a new one.
pub(crate) struct RequestId(pub(crate) String);

impl FromRequestParts<Arc<App>> for RequestId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Problem> {
        let Some(value) = single(&parts.headers, &REQUEST_ID)? else {
            return Ok(RequestId(Uuid::new_v4().to_string()));
        };
        let sound = (1..=REQUEST_ID_CHARS_MAX).contains(&value.len()) && value.bytes().all(|byte| byte.is_ascii_graphic());
        if !sound {
            let detail =
                format!("{REQUEST_ID} has {} characters; it must be 1 to {REQUEST_ID_CHARS_MAX} visible ones", value.len());
            return Err(Problem::new(Kind::RequestInvalid, detail));
        }
        Ok(RequestId(value.to_owned()))
    }
}

impl RequestId {
    pub(crate) fn echo(&self, headers: &mut HeaderMap) {
        headers.insert(REQUEST_ID, HeaderValue::from_str(&self.0).expect("it came in as a header, or is a UUID"));
    }
}

/// A header that may be there once.
pub(crate) fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Problem> {
    let mut values = headers.get_all(name).iter();
    let refused = |why: &str| Problem::new(Kind::RequestInvalid, format!("the header {name} {why}"));
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| refused("is not visible ASCII")),
        (Some(_), Some(_)) => Err(refused("is there more than once")),
    }
}

/// A job's entity tag: it changes with every change of the record.
pub(crate) fn etag(job: &Job) -> String {
    format!("\"{}.{}\"", job.version, job.revision)
}

/// Whether `If-None-Match` names this tag (RFC 9110, weak comparison).
pub(crate) fn none_match(headers: &HeaderMap, etag: &str) -> bool {
    let lines = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).any(|tag| tag == "*" || tag.trim_start_matches("W/") == etag)
}

/// Writes a moment as HTTP does (RFC 9110, 5.6.7).
pub(crate) fn http_date(unix_ms: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let seconds = unix_ms / 1000;
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Days since 1 March of the year 0, in eras of 400 years that all have the same calendar.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    // March is 0; January and February belong to the year before.
    let (month, year) = if month < 10 { (month + 2, era * 400 + year_of_era) } else { (month - 10, era * 400 + year_of_era + 1) };
    let weekday = DAYS[usize::try_from(days % 7).expect("below 7")];
    let month = MONTHS[usize::try_from(month).expect("below 12")];
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{weekday}, {day:02} {month} {year:04} {hour:02}:{minute:02}:{second:02} GMT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_as_the_calendar_has_them() {
        for (seconds, date) in [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (951_868_799, "Tue, 29 Feb 2000 23:59:59 GMT"),
            (951_868_800, "Wed, 01 Mar 2000 00:00:00 GMT"),
            (4_133_894_400, "Fri, 31 Dec 2100 00:00:00 GMT"),
        ] {
            assert_eq!(http_date(seconds * 1000 + 999), date);
        }
    }

    #[test]
    fn a_preference_to_wait_is_found_among_others() {
        let wait = |lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(PREFER, line.parse().unwrap());
            }
            preferred_wait(&headers).map(|wait| wait.as_secs())
        };
        assert_eq!(wait(&["wait=10"]), Some(10));
        assert_eq!(wait(&["respond-async, Wait = \"5\"; x=1"]), Some(5));
        assert_eq!(wait(&["return=minimal", "wait=3", "wait=9"]), Some(3));
        assert_eq!(wait(&["wait=soon"]), None);
        assert_eq!(wait(&["wait=-1"]), None);
        assert_eq!(wait(&["wait"]), None);
        assert_eq!(wait(&[]), None);
    }

    #[test]
    fn tags_are_compared_weakly() {
        let matches = |line: &str| none_match(&HeaderMap::from_iter([(header::IF_NONE_MATCH, line.parse().unwrap())]), "\"1.7\"");
        assert!(matches("\"1.7\"") && matches("W/\"1.7\"") && matches("\"0.1\", \"1.7\"") && matches("*"));
        assert!(!matches("\"1.8\"") && !matches("1.7"));
    }
}
