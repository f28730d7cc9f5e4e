//! Which key belongs to which node of a cluster: slots, and the map of them.

use std::sync::Arc;

use redis::{Cmd, Value};

use crate::store::sentinel::address;

/// How many slots a cluster has.
pub(crate) const SLOTS: u16 = 16_384;
/// The slot of no master.
const NOBODY: u16 = u16::MAX;

/// CRC-16 (XMODEM) of each byte.
const CRC: [u16; 256] = {
    let mut table = [0_u16; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// What of a key its slot follows from: what stands in its first braces, if something does.
pub(crate) fn tag(key: &[u8]) -> &[u8] {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        rest.iter().position(|byte| *byte == b'}').filter(|close| *close > 0).map(|close| &rest[..close])
    });
    tag.unwrap_or(key)
}

/// The slot of a key.
pub(crate) fn slot(key: &[u8]) -> u16 {
    let crc = tag(key).iter().fold(0_u16, |crc, byte| (crc << 8) ^ CRC[usize::from((crc >> 8) as u8 ^ byte)]);
    crc % SLOTS
}

/// The first key of a command; `None` for one that any node can answer.
pub(crate) fn key_of(command: &Cmd) -> Option<&[u8]> {
    let word = |place| match command.args_iter().nth(place) {
        Some(redis::Arg::Simple(bytes)) => Some(bytes),
        _ => None,
    };
    match word(0)?.to_ascii_uppercase().as_slice() {
        b"EVALSHA" | b"EVAL" if word(2) == Some(b"0") => None,
        b"EVALSHA" | b"EVAL" => word(3),
        b"TIME" | b"INFO" | b"CONFIG" | b"ROLE" | b"PUBLISH" | b"SCAN" | b"PING" | b"SCRIPT" | b"WAIT" | b"WAITAOF" => None,
        _ => word(1),
    }
}

/// Which master has which slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotMap {
    slots: Vec<u16>,
    /// The masters' addresses.
    masters: Vec<Arc<str>>,
    /// The replicas' addresses: they know the map too.
    replicas: Vec<Arc<str>>,
}

/// What `CLUSTER SLOTS` says of a range: first and last slot, then the master and its replicas, each with host, port, and more.
type Range = Vec<Value>;

impl SlotMap {
    /// Reads the answer to `CLUSTER SLOTS` of the node `asked`, whose host is meant where none is said.
    pub(crate) fn read(asked: &str, ranges: Vec<Range>) -> Result<Self, String> {
        let mut map = SlotMap { slots: vec![NOBODY; usize::from(SLOTS)], masters: Vec::new(), replicas: Vec::new() };
        for range in ranges {
            let [Value::Int(first), Value::Int(last), nodes @ ..] = &range[..] else {
                return Err("a range has no beginning and end".to_owned());
            };
            let (Ok(first), Ok(last)) = (usize::try_from(*first), usize::try_from(*last)) else {
                return Err("a range begins or ends nowhere".to_owned());
            };
            let [master, replicas @ ..] = nodes else { return Err("a range has no master".to_owned()) };
            let master = map.master(&node(asked, master)?);
            map.slots.get_mut(first..=last).ok_or("a range ends beyond the last slot")?.fill(master);
            for replica in replicas {
                let replica = node(asked, replica)?;
                if !map.replicas.iter().any(|known| **known == *replica) {
                    map.replicas.push(Arc::from(replica));
                }
            }
        }
        if map.masters.is_empty() {
            return Err("it knows of no master with a slot".to_owned());
        }
        // The same order for whoever asks.
        let mut sorted = map.masters.clone();
        sorted.sort_unstable();
        for slot in &mut map.slots {
            if let Some(master) = map.masters.get(usize::from(*slot)) {
                *slot = sorted.binary_search(master).map_or(NOBODY, |place| place as u16);
            }
        }
        map.masters = sorted;
        Ok(map)
    }

    /// The masters, in the order of their addresses.
    pub(crate) fn masters(&self) -> &[Arc<str>] {
        &self.masters
    }

    /// Every node that is known.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Arc<str>> {
        self.masters.iter().chain(&self.replicas)
    }

    /// The master of a slot.
    pub(crate) fn of(&self, slot: u16) -> Option<&Arc<str>> {
        self.masters.get(usize::from(self.slots[usize::from(slot)]))
    }

    /// The same map, but for one slot.
    pub(crate) fn with(&self, slot: u16, address: &str) -> Self {
        let mut map = self.clone();
        let master = map.master(address);
        map.slots[usize::from(slot)] = master;
        map
    }

    fn master(&mut self, address: &str) -> u16 {
        let place = self.masters.iter().position(|known| **known == *address).unwrap_or_else(|| {
            self.masters.push(Arc::from(address));
            self.masters.len() - 1
        });
        // There are no more masters than slots.
        u16::try_from(place).unwrap_or(NOBODY)
    }
}

fn node(asked: &str, node: &Value) -> Result<String, String> {
    let Value::Array(fields) = node else { return Err("a node is no list".to_owned()) };
    let [host, Value::Int(port), ..] = &fields[..] else { return Err("a node has no host and port".to_owned()) };
    let port = u16::try_from(*port).map_err(|_| "a node's port is none")?;
    Ok(match host {
        Value::BulkString(host) if !host.is_empty() && host != b"?" => address(&String::from_utf8_lossy(host), port),
        // It does not know how it is called, or is told not to say: where it was asked, it is.
        _ => beside(asked, port),
    })
}

/// Another port of the same host.
fn beside(asked: &str, port: u16) -> String {
    let host = asked.rsplit_once(':').map_or(asked, |(host, _)| host);
    format!("{host}:{port}")
}

/// Where a node sends us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Redirect {
    /// The slot is another's.
    Moved { slot: u16, to: String },
    /// This key is another's already, the slot not yet.
    Ask { to: String },
}

impl Redirect {
    /// Reads a reply of the node `asked`.
    pub(crate) fn read(asked: &str, value: &Value) -> Option<Self> {
        let Value::ServerError(error) = value else { return None };
        let moved = match error.code() {
            "MOVED" => true,
            "ASK" => false,
            _ => return None,
        };
        let mut words = error.details()?.split_ascii_whitespace();
        let (slot, to) = (words.next()?.parse().ok().filter(|slot| *slot < SLOTS)?, words.next()?);
        let (host, port) = to.rsplit_once(':')?;
        let port = port.parse().ok()?;
        let to = if host.is_empty() || host == "?" { beside(asked, port) } else { address(host, port) };
        Some(if moved { Redirect::Moved { slot, to } } else { Redirect::Ask { to } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_what_redis_says_it_is() {
        for (key, expected) in [
            ("foo", 12_182),
            ("123456789", 12_739),
            ("{user1000}.following", 3_443),
            ("{user1000}.followers", 3_443),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
        ] {
            assert_eq!(slot(key.as_bytes()), expected, "{key}");
        }
    }

    #[test]
    fn a_command_goes_by_its_first_key() {
        let key =
            |words: &[&str]| key_of(redis::cmd(words[0]).arg(&words[1..])).map(|key| String::from_utf8(key.to_vec()).unwrap());
        assert_eq!(key(&["GET", "k"]), Some("k".to_owned()));
        assert_eq!(key(&["EVALSHA", "hash", "2", "k", "l", "x"]), Some("k".to_owned()));
        assert_eq!(key(&["EVAL", "text", "0", "x"]), None);
        assert_eq!(key(&["PUBLISH", "channel", "x"]), None);
        assert_eq!(key(&["TIME"]), None);
    }

    fn list(values: &[Value]) -> Value {
        Value::Array(values.to_vec())
    }

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn a_node_that_does_not_say_its_host_is_where_it_was_asked() {
        let (one, two) = (list(&[text(""), Value::Int(7001), text("id")]), list(&[Value::Nil, Value::Int(7002), text("id")]));
        let six = list(&[text("::1"), Value::Int(7003), text("id")]);
        let ranges = vec![vec![Value::Int(0), Value::Int(99), six.clone(), one], vec![Value::Int(100), Value::Int(16_382), two]];
        let map = SlotMap::read("host:7000", ranges).unwrap();
        let masters: Vec<&str> = map.masters().iter().map(|address| &**address).collect();
        assert_eq!(masters, ["[::1]:7003", "host:7002"]);
        assert_eq!(map.nodes().count(), 3);
        assert_eq!([0, 99, 100].map(|slot| map.of(slot).unwrap().to_string()), ["[::1]:7003", "[::1]:7003", "host:7002"]);
        assert_eq!(map.of(16_383), None);
        assert_eq!(&**map.with(16_383, "other:1").of(16_383).unwrap(), "other:1");
        assert!(SlotMap::read("host:7000", vec![vec![Value::Int(0), Value::Int(16_384), six]]).is_err());
        assert!(SlotMap::read("host:7000", vec![]).is_err());
    }

    #[test]
    fn a_redirect_names_slot_and_node() {
        let reply = |text: &str| redis::parse_redis_value(text.as_bytes()).unwrap();
        let moved = |to: &str| Some(Redirect::Moved { slot: 3999, to: to.to_owned() });
        assert_eq!(Redirect::read("a:1", &reply("-MOVED 3999 127.0.0.1:6381\r\n")), moved("127.0.0.1:6381"));
        assert_eq!(Redirect::read("a:1", &reply("-MOVED 3999 :6381\r\n")), moved("a:6381"));
        assert_eq!(Redirect::read("a:1", &reply("-ASK 3999 ::1:6381\r\n")), Some(Redirect::Ask { to: "[::1]:6381".to_owned() }));
        assert_eq!(Redirect::read("a:1", &reply("-TRYAGAIN later\r\n")), None);
        assert_eq!(Redirect::read("a:1", &reply("-MOVED 16384 a:1\r\n")), None);
    }
}
