//! Who asks: the owner, and what it may do.
//!
//! A bearer token is looked up by its SHA-256: what is compared is a digest, so how long the look-up takes says nothing about how
//! much of a guessed token is right. `Authorization` stops here: it is never stored, logged or forwarded to a provider.
//!
//! Role `submit` is for an owner's own jobs; role `operate` may see and act on all owners' jobs. Neither implies the other.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::header::{self, HeaderName, HeaderValue};
use http::request::Parts;

use crate::config::{OwnerEntry, Role};
use crate::fingerprint::{Sha256Bytes, sha256};
use crate::job::Owner;
use crate::server::App;
use crate::server::problem::{Kind, Problem};

/// The owner where nobody says who asks.
pub const OPEN_OWNER: &str = "local";

/// How a request names its owner.
#[derive(Clone)]
pub enum Owners {
    /// By a bearer token.
    Tokens(Tokens),
    /// By a header that a gateway in front sets on every request; role `submit`. Whoever reaches the listener can be anybody. A
    /// request without that header may come with a token instead: so an operator reaches the gateway.
    TrustedHeader {
        /// The header.
        header: HeaderName,
        /// For requests without it.
        tokens: Tokens,
    },
    /// Not at all: everybody is the owner `local` and may do everything. On a loopback address only.
    Open,
}

/// Why owners cannot be taken from a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidOwners(String);

impl Owners {
    /// The owners of a configuration.
    ///
    /// # Errors
    /// A name, a digest or a header that is none, or one token of two owners.
    pub fn from_config(owners: &BTreeMap<String, OwnerEntry>, trusted_header: Option<&str>) -> Result<Self, InvalidOwners> {
        let tokens = Tokens::from_config(owners)?;
        match trusted_header {
            Some(name) => {
                let header = HeaderName::from_bytes(name.as_bytes())
                    .map_err(|_| InvalidOwners(format!("server.trusted_owner_header {name:?} is not a header's name")))?;
                if header == header::AUTHORIZATION {
                    return Err(InvalidOwners("server.trusted_owner_header cannot be authorization".to_owned()));
                }
                Ok(Owners::TrustedHeader { header, tokens })
            }
            None if tokens.0.is_empty() => Ok(Owners::Open),
            None => Ok(Owners::Tokens(tokens)),
        }
    }

    fn caller(&self, parts: &Parts) -> Result<Caller, Problem> {
        match self {
            Owners::Tokens(tokens) => tokens.caller(parts),
            Owners::TrustedHeader { header, tokens } => {
                let mut named = parts.headers.get_all(header).iter();
                match (named.next(), named.next()) {
                    (None, _) => tokens.caller(parts),
                    (Some(name), None) => {
                        let owner = name.to_str().ok().and_then(|name| Owner::new(name).ok());
                        let owner = owner.ok_or_else(|| unauthorized(format!("the header {header} does not name an owner")))?;
                        Ok(Caller { owner, roles: Arc::from([Role::Submit]) })
                    }
                    (Some(_), Some(_)) => Err(unauthorized(format!("the header {header} is there more than once"))),
                }
            }
            Owners::Open => {
                let owner = Owner::new(OPEN_OWNER).expect("the name is visible ASCII");
                Ok(Caller { owner, roles: Arc::from([Role::Submit, Role::Operate]) })
            }
        }
    }
}

/// Never says a digest.
impl fmt::Debug for Owners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Owners::Tokens(_) => "Tokens(…)",
            Owners::TrustedHeader { .. } => "TrustedHeader(…)",
            Owners::Open => "Open",
        })
    }
}

/// Owners by the SHA-256 of their bearer tokens.
#[derive(Clone, Default)]
pub struct Tokens(HashMap<Sha256Bytes, Caller>);

impl Tokens {
    /// Adds a token of an owner, by its digest. An earlier owner of the same token is replaced.
    pub fn insert(&mut self, sha256: Sha256Bytes, owner: Owner, roles: &[Role]) {
        self.0.insert(sha256, Caller { owner, roles: Arc::from(roles) });
    }

    fn from_config(owners: &BTreeMap<String, OwnerEntry>) -> Result<Self, InvalidOwners> {
        let mut tokens = Tokens::default();
        for (name, entry) in owners {
            let owner = Owner::new(name).map_err(|error| InvalidOwners(format!("owner {name:?}: {error}")))?;
            for text in &entry.tokens_sha256 {
                let digest = from_hex(text).ok_or_else(|| {
                    let problem = format!("a token's sha256 has {} characters; it must be 64 hexadecimal digits", text.len());
                    InvalidOwners(format!("owner {name:?}: {problem}"))
                })?;
                let caller = Caller { owner: owner.clone(), roles: Arc::from(entry.roles.as_slice()) };
                if let Some(other) = tokens.0.insert(digest, caller) {
                    return Err(InvalidOwners(format!("owners {:?} and {name:?} have the same token", other.owner.as_str())));
                }
            }
        }
        Ok(tokens)
    }

    fn caller(&self, parts: &Parts) -> Result<Caller, Problem> {
        let mut values = parts.headers.get_all(header::AUTHORIZATION).iter();
        let value = match (values.next(), values.next()) {
            (Some(value), None) => value,
            (None, _) => return Err(unauthorized("the request has no bearer token".to_owned())),
            (Some(_), Some(_)) => return Err(unauthorized("the request has Authorization more than once".to_owned())),
        };
        let token = value
            .to_str()
            .ok()
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let Some((_, token)) = token else {
            return Err(unauthorized("the Authorization is not a bearer token".to_owned()));
        };
        let caller = self.0.get(&sha256(token.trim_start_matches(' ').as_bytes()));
        caller.cloned().ok_or_else(|| unauthorized("the bearer token is not known".to_owned()))
    }
}

fn unauthorized(detail: String) -> Problem {
    Problem::new(Kind::Unauthorized, detail).header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
}

/// Bytes from 64 hexadecimal digits.
pub(crate) fn from_hex(text: &str) -> Option<Sha256Bytes> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut bytes = [0; 32];
    let text = text.as_bytes();
    if text.len() != 64 {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.chunks(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

/// Who asks, and what it may do.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) owner: Owner,
    roles: Arc<[Role]>,
}

impl Caller {
    pub(crate) fn may(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }

    /// Insists on a role.
    pub(crate) fn must(&self, role: Role) -> Result<(), Problem> {
        if self.may(role) {
            return Ok(());
        }
        let word = match role {
            Role::Submit => "submit",
            Role::Operate => "operate",
        };
        Err(Problem::new(Kind::Forbidden, format!("this needs the role {word}")).member("role", word))
    }
}

impl FromRequestParts<Arc<App>> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        app.options.owners.caller(parts)
    }
}
