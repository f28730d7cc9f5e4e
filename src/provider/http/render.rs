//! How a job's request becomes a provider's: pure, the same bytes each time.
//!
//! A target can only lead to below the base URL. Credentials and what names the attempt are not here: the adapter adds them when
//! it sends.

use http::header::{HeaderName, HeaderValue};
use http::uri::Scheme;

use super::judge::is_hop_by_hop;
use super::{ATTEMPT_HEADER, HttpOptions, HttpProblem, JOB_ID_HEADER};
use crate::provider::asking::template;
use crate::provider::{RenderError, Rendered, Request};

/// Longest URL in bytes: what servers commonly accept as a request line.
pub(super) const URL_BYTES_MAX: usize = 8 << 10;
/// Longest method in bytes.
const METHOD_BYTES_MAX: usize = 32;

/// Scheme, host and port.
pub(super) struct Origin {
    pub(super) uri: http::Uri,
    pub(super) host: HeaderValue,
}

impl Origin {
    pub(super) fn is_secure(&self) -> bool {
        self.uri.scheme() == Some(&Scheme::HTTPS)
    }

    pub(super) fn is_of(&self, uri: &http::Uri) -> bool {
        self.uri.scheme() == uri.scheme() && self.uri.authority() == uri.authority()
    }
}

/// What every request of a provider is rendered onto.
pub(super) struct Base {
    pub(super) origin: Origin,
    /// The base URL without a slash at its end.
    pub(super) url: String,
    pub(super) path: String,
    method: String,
    pub(super) headers: Vec<(String, String)>,
    idempotency_header: Option<String>,
    /// A template of the body, around the request's own.
    pub(super) body: Option<String>,
}

impl Base {
    pub(super) fn new(options: &HttpOptions, idempotency_header: Option<&HeaderName>) -> Result<Self, HttpProblem> {
        let origin = origin(&options.base_url)?;
        check_target(&options.path).map_err(HttpProblem::Path)?;
        if !is_method(&options.method) {
            return Err(HttpProblem::Method(options.method.clone()));
        }
        let mut headers = Vec::with_capacity(options.headers.len());
        for (name, value) in &options.headers {
            let refused = || HttpProblem::Header(name.clone());
            let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|_| refused())?;
            if is_reserved(parsed.as_str()) || Some(&parsed) == idempotency_header || !is_value(value) {
                return Err(refused());
            }
            headers.push((parsed.to_string(), value.clone()));
        }
        Ok(Base {
            origin,
            url: options.base_url.trim_end_matches('/').to_owned(),
            path: options.path.clone(),
            method: options.method.clone(),
            headers,
            idempotency_header: idempotency_header.map(ToString::to_string),
            body: options.body.clone(),
        })
    }

    pub(super) fn render(&self, request: &Request) -> Result<Rendered, RenderError> {
        let method = if request.method.is_empty() { &self.method } else { &request.method };
        if !is_method(method) {
            return Err(RenderError(format!("method {:?} is none that can be sent", shown(method))));
        }
        let target = if request.target.is_empty() { &self.path } else { &request.target };
        check_target(target)?;
        let url = format!("{}{target}", self.url);
        if url.len() > URL_BYTES_MAX {
            return Err(RenderError(format!("the url has {} bytes; the limit is {URL_BYTES_MAX}", url.len())));
        }
        if !url.parse().is_ok_and(|uri| self.origin.is_of(&uri)) {
            return Err(RenderError(format!("target {:?} does not make a url", shown(target))));
        }
        let headers = self.headers(request)?;
        let body = match self.body.as_ref().filter(|_| !request.body.is_empty()) {
            Some(template) => template::body(template, &request.body).map_err(RenderError)?.into(),
            None => request.body.clone(),
        };
        Ok(Rendered { method: method.clone(), url, headers, body })
    }

    /// Content type, then the provider's own headers, then the request's, without those that are set by other means.
    fn headers(&self, request: &Request) -> Result<Vec<(String, String)>, RenderError> {
        let mut headers = Vec::with_capacity(1 + self.headers.len() + request.headers.len());
        if !request.content_type.is_empty() {
            if !is_value(&request.content_type) {
                return Err(RenderError("the content type holds characters that a header cannot".to_owned()));
            }
            headers.push(("content-type".to_owned(), request.content_type.clone()));
        }
        headers.extend(self.headers.iter().cloned());
        let connection = request.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("connection"));
        let hops: Vec<&str> = connection.flat_map(|(_, value)| value.split(',')).map(str::trim).collect();
        for (name, value) in &request.headers {
            let name = HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| RenderError(format!("header name {:?} is none", shown(name))))?
                .to_string();
            if !is_value(value) {
                return Err(RenderError(format!("header {name} holds characters that a header cannot")));
            }
            let dropped = is_reserved(&name)
                || self.idempotency_header.as_ref() == Some(&name)
                || hops.iter().any(|hop| hop.eq_ignore_ascii_case(&name))
                || self.headers.iter().any(|(own, _)| *own == name);
            if !dropped {
                headers.push((name, value.clone()));
            }
        }
        Ok(headers)
    }
}

/// Whether a header is set by other means, or concerns one connection only: no request and no configuration sets it.
///
/// Without `accept-encoding` a body comes, and is stored, as it is.
pub(super) fn is_reserved(name: &str) -> bool {
    is_hop_by_hop(name)
        || name == JOB_ID_HEADER
        || name == ATTEMPT_HEADER
        || matches!(
            name,
            "accept-encoding"
                | "authorization"
                | "content-length"
                | "content-type"
                | "cookie"
                | "expect"
                | "host"
                | "traceparent"
        )
}

pub(super) fn origin(base_url: &str) -> Result<Origin, HttpProblem> {
    let refused = || HttpProblem::BaseUrl(base_url.to_owned());
    let uri: http::Uri = base_url.parse().map_err(|_| refused())?;
    let mut parts = uri.into_parts();
    let sound = matches!(&parts.scheme, Some(scheme) if *scheme == Scheme::HTTP || *scheme == Scheme::HTTPS);
    let authority = parts.authority.clone().filter(|authority| !authority.as_str().contains('@')).ok_or_else(refused)?;
    let path = parts.path_and_query.as_ref().map_or("/", |path| path.path());
    let has_query = base_url.contains(['?', '#']);
    if !sound || has_query || authority.host().is_empty() || check_target(path).is_err() {
        return Err(refused());
    }
    parts.path_and_query = Some(http::uri::PathAndQuery::from_static("/"));
    let host = HeaderValue::from_str(authority.as_str()).map_err(|_| refused())?;
    Ok(Origin { uri: http::Uri::from_parts(parts).map_err(|_| refused())?, host })
}

fn is_method(method: &str) -> bool {
    (1..=METHOD_BYTES_MAX).contains(&method.len())
        && method.bytes().all(|byte| byte.is_ascii_uppercase())
        && !matches!(method, "CONNECT" | "TRACE")
}

fn is_value(value: &str) -> bool {
    value.bytes().all(|byte| byte == b'\t' || (b' '..=b'~').contains(&byte))
}

/// Refuses a target that is not a path with an optional query, or that could lead out of the base URL.
///
/// Servers differ in what they decode and normalize, so the path is judged as the most eager of them would read it: decoded until
/// nothing changes, `\` as `/`, `;…` cut off each segment.
pub(super) fn check_target(target: &str) -> Result<(), RenderError> {
    let refused = |why: &str| Err(RenderError(format!("target {:?} {why}", shown(target))));
    if !target.starts_with('/') || target.starts_with("//") {
        return refused("must begin with one slash");
    }
    if !target.bytes().all(|byte| byte.is_ascii_graphic()) {
        return refused("holds a character that must be percent-encoded");
    }
    if target.contains(['\\', '#']) {
        return refused("holds a backslash or a fragment");
    }
    let mut path = target.split('?').next().unwrap_or_default().as_bytes().to_vec();
    loop {
        let decoded = percent_decoded(&path);
        if decoded == path {
            break;
        }
        path = decoded;
    }
    if path.iter().any(u8::is_ascii_control) {
        return refused("holds an encoded control character");
    }
    for segment in path.split(|byte| matches!(byte, b'/' | b'\\')) {
        let bare = segment.split(|byte| *byte == b';').next().unwrap_or_default();
        if matches!(bare, b"." | b"..") {
            return refused("holds a dot segment");
        }
    }
    Ok(())
}

/// Each call makes the text shorter or leaves it.
fn percent_decoded(text: &[u8]) -> Vec<u8> {
    let hex = |byte: u8| char::from(byte).to_digit(16);
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let pair = match (first, tail) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)),
            _ => None,
        };
        match pair {
            Some((high, low)) => {
                decoded.push(u8::try_from(high * 16 + low).expect("two hexadecimal digits are a byte"));
                rest = &tail[2..];
            }
            None => {
                decoded.push(first);
                rest = tail;
            }
        }
    }
    decoded
}

/// Most characters of a refused text that an error repeats.
const SHOWN_CHARS_MAX: usize = 64;

fn shown(text: &str) -> String {
    text.chars().take(SHOWN_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::config::ProviderEntry;

    fn options(base_url: &str) -> HttpOptions {
        let mut options = HttpOptions::from_entry(&ProviderEntry::default(), None, 1 << 20);
        options.base_url = base_url.to_owned();
        options
    }

    fn base(base_url: &str) -> Result<Base, HttpProblem> {
        Base::new(&options(base_url), Some(&HeaderName::from_static("idempotency-key")))
    }

    fn request(target: &str) -> Request {
        Request {
            method: String::new(),
            target: target.to_owned(),
            content_type: "application/json".to_owned(),
            headers: Vec::new(),
            body: Arc::from(b"{}".as_slice()),
        }
    }

    #[test]
    fn targets_are_appended_to_the_base() {
        for (base_url, target, url) in [
            ("http://a.example", "", "http://a.example/"),
            ("http://a.example/", "/x", "http://a.example/x"),
            ("https://a.example:8443/v1/", "/x/y?z=../1", "https://a.example:8443/v1/x/y?z=../1"),
            ("http://[::1]:80/v1", "/a%2Fb", "http://[::1]:80/v1/a%2Fb"),
            ("http://a.example", "/a..b/...", "http://a.example/a..b/..."),
        ] {
            let rendered = base(base_url).unwrap().render(&request(target)).unwrap();
            assert_eq!(rendered.url, url);
            assert_eq!(rendered.method, "POST");
        }
    }

    #[test]
    fn a_target_cannot_leave_the_base() {
        let base = base("http://a.example/v1").unwrap();
        for target in [
            "http://b.example/",
            "//b.example/",
            "x",
            "?x=1",
            "@b.example/",
            ".b.example/",
            ":81/",
            "/..",
            "/../x",
            "/x/../../y",
            "/x/./y",
            "/%2e%2e/x",
            "/.%2E/x",
            "/%252e%252e/x",
            "/%25252e./x",
            "/x%2f..%2fy",
            "/x%5c..%5cy",
            "/..;a=b/x",
            "/x\\..\\y",
            "/x y",
            "/x\r\nhost: b",
            "/x\ty",
            "/x%0d%0ay",
            "/%00",
            "/x#y",
            "/\u{e9}",
        ] {
            assert!(base.render(&request(target)).is_err(), "{target:?}");
        }
    }

    #[test]
    fn bases_that_are_none_are_refused() {
        for base_url in [
            "",
            "/v1",
            "a.example",
            "ftp://a.example",
            "http://",
            "http://user:pw@a.example",
            "http://a.example/?x=1",
            "http://a.example/#x",
            "http://a.example/../x",
        ] {
            assert_eq!(base(base_url).err(), Some(HttpProblem::BaseUrl(base_url.to_owned())));
        }
    }

    #[test]
    fn headers_keep_their_order_and_lose_what_is_not_theirs_to_set() {
        let mut options = options("http://a.example");
        options.headers = BTreeMap::from([("X-Own".to_owned(), "1".to_owned()), ("Accept".to_owned(), "own".to_owned())]);
        let base = Base::new(&options, Some(&HeaderName::from_static("idempotency-key"))).unwrap();
        let headers = [
            ("Z-Last", "z"),
            ("authorization", "Bearer x"),
            ("proxy-authorization", "Basic x"),
            ("cookie", "a=b"),
            ("host", "b.example"),
            ("content-length", "7"),
            ("content-type", "text/plain"),
            ("transfer-encoding", "chunked"),
            ("connection", "keep-alive, X-Hop"),
            ("x-hop", "1"),
            ("accept-encoding", "gzip"),
            ("expect", "100-continue"),
            ("idempotency-key", "k"),
            ("onejob-job-id", "j"),
            ("onejob-attempt", "9"),
            ("traceparent", "t"),
            ("accept", "theirs"),
            ("a-first", "a"),
        ];
        let mut request = request("/");
        request.headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let rendered = base.render(&request).unwrap();
        let expected =
            [("content-type", "application/json"), ("accept", "own"), ("x-own", "1"), ("z-last", "z"), ("a-first", "a")];
        assert_eq!(rendered.headers, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(base.render(&request).unwrap().hash(), rendered.hash());
    }

    #[test]
    fn headers_and_methods_that_cannot_be_sent_are_refused() {
        let base = base("http://a.example").unwrap();
        for (name, value) in [("a b", "1"), ("", "1"), ("a", "1\r\nb: 2"), ("a", "\u{e9}")] {
            let mut request = request("/");
            request.headers = vec![(name.to_owned(), value.to_owned())];
            assert!(base.render(&request).is_err(), "{name:?}: {value:?}");
        }
        for method in ["post", "CONNECT", "TRACE", "GET /", "P\r\n"] {
            let request = Request { method: method.to_owned(), ..request("/") };
            assert!(base.render(&request).is_err(), "{method:?}");
        }
    }
}
