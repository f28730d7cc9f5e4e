//! Where Redis is: what a URL names, one server, a cluster, or the master that sentinels name. Plain text, no connection.

/// The port of a Redis that does not say.
const PORT: u16 = 6379;
/// The port of a sentinel that does not say.
const SENTINEL_PORT: u16 = 26379;

/// What stands for a secret in every print.
pub(crate) const HIDDEN: &str = "(hidden)";

/// What begins the URLs that are understood.
pub(crate) const SCHEMES: [&str; 7] =
    ["redis", "rediss", "redis+unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"];

/// The parameters of a server's URL, and of a socket's.
const OF_A_NODE: [&str; 1] = ["protocol"];
const OF_A_SOCKET: [&str; 4] = ["db", "user", "pass", "protocol"];
/// What `protocol` may be.
const PROTOCOLS: [&str; 4] = ["resp2", "resp3", "2", "3"];

/// What a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// One server.
    One,
    /// A cluster, and some of its nodes: the others are learned from them.
    Cluster { url: NodeUrl, seeds: Vec<String> },
    /// The master of this name, as these sentinels know it.
    Sentinel { url: NodeUrl, sentinels: Vec<String>, service: String },
}

/// What the URLs of the nodes have in common: scheme and credentials before the address, query and fragment behind it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct NodeUrl {
    scheme: &'static str,
    user: String,
    /// The same for sentinels: what is a master's is not for them.
    sentinel_user: String,
    rest: String,
}

/// Without credentials.
impl std::fmt::Debug for NodeUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.scheme)
    }
}

impl NodeUrl {
    /// The URL of a node.
    pub(crate) fn of(&self, address: &str) -> String {
        let NodeUrl { scheme, user, rest, .. } = self;
        format!("{scheme}://{user}{address}/{rest}")
    }

    /// The URL of a sentinel, with the credentials that are for it.
    pub(crate) fn of_sentinel(&self, address: &str) -> String {
        let fragment = self.rest.find('#').map_or("", |at| &self.rest[at..]);
        format!("{}://{}{address}/{fragment}", self.scheme, self.sentinel_user)
    }
}

impl Place {
    /// Reads a URL.
    ///
    /// # Errors
    /// What is wrong with it, without its credentials.
    pub(crate) fn of(url: &str) -> Result<Self, String> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        if !SCHEMES.contains(&scheme) {
            return Err(format!("it must begin with {}", SCHEMES.map(|scheme| format!("{scheme}://")).join(", ")));
        }
        let Some((node, kind)) = scheme.split_once('+').filter(|(_, kind)| *kind != "unix") else {
            let nameless = rest.is_empty() || rest.starts_with(['?', '#']) || (scheme != "redis+unix" && rest.starts_with('/'));
            if nameless {
                return Err("it names no server".to_owned());
            }
            knows_each_parameter(if scheme == "redis+unix" { &OF_A_SOCKET } else { &OF_A_NODE }, rest)?;
            return Ok(Place::One);
        };
        let node = if node == "rediss" { "rediss" } else { "redis" };
        let (before, rest) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
        let (user, before) = before.split_at(before.rfind('@').map_or(0, |at| at + 1));
        let (hosts, path) = before.split_once('/').unwrap_or((before, ""));
        let (sentinel_user, rest) = sentinel_user(kind, rest)?;
        // Those of sentinels are taken out.
        let known = if kind == "sentinel" { &["protocol", "sentinel_user", "sentinel_pass"][..] } else { &OF_A_NODE };
        knows_each_parameter(known, &rest)?;
        let url = NodeUrl { scheme: node, user: user.to_owned(), sentinel_user, rest };
        let port = if kind == "sentinel" { SENTINEL_PORT } else { PORT };
        let addresses: Vec<String> = hosts.split(',').map(|host| address(host, port)).collect::<Result<_, _>>()?;
        match (kind, path) {
            ("sentinel", "") => Err("it does not say which master: /NAME after the sentinels".to_owned()),
            ("sentinel", path) if path.contains('/') => Err("the master's name has no / in it".to_owned()),
            ("sentinel", service) => Ok(Place::Sentinel { url, sentinels: addresses, service: service.to_owned() }),
            (_, "" | "0") => Ok(Place::Cluster { url, seeds: addresses }),
            _ => Err("a cluster has only database 0".to_owned()),
        }
    }
}

/// Refuses a parameter that nobody would read: a password that is misspelt there would be missed much later, by another name.
fn knows_each_parameter(known: &[&str], rest: &str) -> Result<(), String> {
    let before_fragment = &rest[..rest.find('#').unwrap_or(rest.len())];
    let query = before_fragment.split_once('?').map_or("", |(_, query)| query);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let Some((name, value)) = pair.split_once('=') else { return Err("one of its parameters is no NAME=VALUE".to_owned()) };
        if !known.contains(&name) {
            let name: String = name.chars().take(32).collect();
            return Err(format!("nobody knows its parameter {name:?}; known are {}", known.join(", ")));
        }
        if name == "protocol" && !PROTOCOLS.contains(&value) {
            return Err(format!("its parameter protocol is none of {}", PROTOCOLS.join(", ")));
        }
        if name == "db" && value.parse::<u32>().is_err() {
            return Err("its parameter db is no number".to_owned());
        }
    }
    Ok(())
}

/// Takes `sentinel_user` and `sentinel_pass` out of a query: what stands before a sentinel's address in its URL, and the rest.
fn sentinel_user(kind: &str, rest: &str) -> Result<(String, String), String> {
    let (query, fragment) = rest.split_at(rest.find('#').unwrap_or(rest.len()));
    let (mut user, mut pass, mut others) = ("", None, Vec::new());
    for pair in query.trim_start_matches('?').split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("sentinel_user", text)) => user = text,
            Some(("sentinel_pass", text)) => pass = Some(text),
            _ => others.push(pair),
        }
    }
    let others = if others.is_empty() { String::new() } else { format!("?{}", others.join("&")) };
    let rest = format!("{others}{fragment}");
    match pass {
        None if user.is_empty() => return Ok((String::new(), rest)),
        _ if kind != "sentinel" => return Err("sentinel_user and sentinel_pass are for redis+sentinel:// alone".to_owned()),
        None => return Err("it has a sentinel_user without a sentinel_pass".to_owned()),
        Some(_) => {}
    }
    let pass = pass.unwrap_or_default();
    if [user, pass].iter().any(|text| text.contains(['@', ':', '/', '?', '[', ']', '+', ' '])) {
        return Err("sentinel_user and sentinel_pass must be percent-encoded".to_owned());
    }
    Ok((format!("{user}:{pass}@"), rest))
}

/// `host:port`, an IPv6 address in brackets.
fn address(host: &str, port: u16) -> Result<String, String> {
    let (name, after) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, after)) if !name.is_empty() => (format!("[{name}]"), after),
        _ => {
            let (name, after) = host.split_at(host.find(':').unwrap_or(host.len()));
            (name.to_owned(), after)
        }
    };
    if name.is_empty() {
        return Err("it names no server".to_owned());
    }
    let port = match after.strip_prefix(':') {
        None if after.is_empty() => port,
        Some(digits) => digits.parse().ok().filter(|port| *port > 0).ok_or("one of its ports is no port")?,
        None => return Err("one of its servers is no host:port".to_owned()),
    };
    Ok(format!("{name}:{port}"))
}

/// The text of a URL with its user information and its query hidden: both may hold a password.
///
/// Works on texts that are no URLs too; where it is not clear which part is the password, nothing after the scheme is shown.
pub(crate) fn without_credentials(url: &str) -> String {
    let after_scheme = url.find("://").map_or(0, |at| at + "://".len());
    let (scheme, rest) = url.split_at(after_scheme);
    let (query, user) = (rest.find('?'), rest.rfind('@'));
    match (query, user) {
        (None, None) => url.to_owned(),
        (Some(query), None) => format!("{scheme}{}?{HIDDEN}", &rest[..query]),
        (None, Some(user)) => format!("{scheme}{HIDDEN}{}", &rest[user..]),
        (Some(query), Some(user)) if user < query => format!("{scheme}{HIDDEN}{}?{HIDDEN}", &rest[user..query]),
        (Some(_), Some(_)) => format!("{scheme}{HIDDEN}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_one_server_a_cluster_or_a_master() {
        for url in [
            "redis://127.0.0.1",
            "rediss://app:pw@host:7000/2?protocol=resp3#insecure",
            "redis+unix:///run/redis.sock?db=1&pass=pw",
        ] {
            assert_eq!(Place::of(url), Ok(Place::One), "{url}");
        }
        let Ok(Place::Cluster { url, seeds }) = Place::of("rediss+cluster://app:p%40w@one:7000,[::1]:7001,three?protocol=resp3")
        else {
            panic!("a cluster")
        };
        assert_eq!(seeds, ["one:7000", "[::1]:7001", "three:6379"]);
        assert_eq!(url.of("two:7002"), "rediss://app:p%40w@two:7002/?protocol=resp3");
        assert!(!format!("{url:?}").contains("p%40w"));
        let Ok(Place::Sentinel { url, sentinels, service }) = Place::of("redis+sentinel://:pw@one,two:5000/jobs") else {
            panic!("sentinels")
        };
        assert_eq!((&sentinels[..], service.as_str()), (&["one:26379".to_owned(), "two:5000".to_owned()][..], "jobs"));
        assert_eq!(
            (url.of("m:1"), url.of_sentinel("one:26379")),
            ("redis://:pw@m:1/".to_owned(), "redis://one:26379/".to_owned())
        );
    }

    #[test]
    fn what_sentinels_are_asked_with_is_theirs_alone() {
        let url = "redis+sentinel://app:pw@one/jobs?sentinel_user=watch&protocol=resp3&sentinel_pass=hunter%402#insecure";
        let Ok(Place::Sentinel { url, .. }) = Place::of(url) else { panic!("sentinels") };
        assert_eq!(url.of_sentinel("one:1"), "redis://watch:hunter%402@one:1/#insecure");
        assert_eq!(url.of("m:1"), "redis://app:pw@m:1/?protocol=resp3#insecure");
        assert!(!format!("{url:?}").contains("hunter"));
        // One that has but a `requirepass`.
        let Ok(Place::Sentinel { url, .. }) = Place::of("redis+sentinel://one/jobs?sentinel_pass=pw") else {
            panic!("sentinels")
        };
        assert_eq!((url.of_sentinel("one:1"), url.of("m:1")), ("redis://:pw@one:1/".to_owned(), "redis://m:1/".to_owned()));
    }

    #[test]
    fn what_a_url_does_not_name_is_said_without_its_password() {
        for (url, what) in [
            ("http://host", "must begin with"),
            ("redis://", "names no server"),
            ("redis:///0", "names no server"),
            ("redis+cluster://", "names no server"),
            ("redis+cluster://:hunter2@one:1,,two:2", "names no server"),
            ("redis+cluster://:hunter2@one:0", "no port"),
            ("redis+cluster://:hunter2@one:70000", "no port"),
            ("redis+cluster://one/3", "only database 0"),
            ("redis+sentinel://:hunter2@one:26379", "which master"),
            ("redis+sentinel://one/jobs/2", "no / in it"),
            ("redis+sentinel://one/jobs?sentinel_user=hunter2", "without a sentinel_pass"),
            ("redis+sentinel://one/jobs?sentinel_pass=hunter2@x", "percent-encoded"),
            ("redis+cluster://one?sentinel_pass=hunter2", "redis+sentinel:// alone"),
            ("redis+sentinel://one/jobs?sentinel_password=hunter2", "known are protocol, sentinel_user, sentinel_pass"),
            ("redis+sentinel://one/jobs?sentinel_pass=pw&sentinel_password=hunter2#insecure", "\"sentinel_password\""),
            ("redis://one?timeout=hunter2", "\"timeout\"; known are protocol"),
            ("rediss+cluster://one,two?db=0", "\"db\"; known are protocol"),
            ("redis+unix:///run/redis.sock?database=1", "known are db, user, pass, protocol"),
            ("redis+unix:///run/redis.sock?db=hunter2", "no number"),
            ("redis+cluster://one?protocol=hunter2", "none of resp2"),
            ("redis://one?hunter2", "no NAME=VALUE"),
        ] {
            let told = Place::of(url).expect_err(url);
            assert!(told.contains(what) && !told.contains("hunter2"), "{url}: {told}");
        }
    }
}
