//! The names of the keys. Nothing else composes one; user text never appears in one.

use crate::fingerprint::{Sha256Bytes, hex};
use crate::job::Identity;
use crate::store::StreamOf;

/// The keys under one prefix.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    prefix: String,
}

impl Keys {
    pub(crate) fn new(prefix: &str) -> Self {
        Keys { prefix: prefix.to_owned() }
    }

    /// The record of a job: STRING.
    pub(crate) fn job(&self, identity: Identity) -> String {
        format!("{}:{{{identity}}}", self.prefix)
    }

    /// Bytes too large for the record, named by their content: STRING.
    pub(crate) fn blob(&self, identity: Identity, sha256: &Sha256Bytes) -> String {
        format!("{}:{{{identity}}}:b:{}", self.prefix, hex(sha256))
    }

    /// The parts of an attempt's answer while it comes: STREAM.
    pub(crate) fn stream(&self, of: StreamOf) -> String {
        let StreamOf { job, attempt } = of;
        format!("{}:{{{}}}:s:{job}-{attempt}", self.prefix, job.identity())
    }

    /// Who asks providers about a job: STRING.
    pub(crate) fn ask(&self, identity: Identity) -> String {
        format!("{}:{{{identity}}}:ask", self.prefix)
    }

    /// When to look at a job: ZSET.
    pub(crate) fn due(&self, shard: u8) -> String {
        format!("{}:due:{{{shard:02x}}}", self.prefix)
    }

    /// That somebody looks at what is due of a shard: STRING.
    pub(crate) fn due_turn(&self, shard: u8) -> String {
        format!("{}:due:{{{shard:02x}}}:turn", self.prefix)
    }

    /// Jobs with an unknown attempt: ZSET.
    pub(crate) fn unknown(&self, shard: u8) -> String {
        format!("{}:unknown:{{{shard:02x}}}", self.prefix)
    }

    /// Where the end of a job is announced: a channel.
    pub(crate) fn done(&self, shard: u8) -> String {
        format!("{}:done:{{{shard:02x}}}", self.prefix)
    }

    /// What the fleet knows of a provider: HASH. A provider's name is one of the configuration's.
    pub(crate) fn guard(&self, provider: &str) -> String {
        format!("{}:guard:{{{provider}}}", self.prefix)
    }

    /// The fleet's permits of a provider: ZSET.
    pub(crate) fn permits(&self, provider: &str) -> String {
        format!("{}:permits:{{{provider}}}", self.prefix)
    }

    /// What was proved of a route and provider: HASH.
    pub(crate) fn certificates(&self, pair: &str) -> String {
        format!("{}:certificate:{{{pair}}}", self.prefix)
    }

    /// Who renews the certificate of a route and provider: STRING.
    pub(crate) fn renewal(&self, pair: &str) -> String {
        format!("{}:renewal:{{{pair}}}", self.prefix)
    }

    /// The report that is a certificate's evidence: STRING.
    pub(crate) fn evidence(&self, id: &str) -> String {
        format!("{}:evidence:{{{id}}}", self.prefix)
    }

    /// Which routes and providers have certificates, a hint: ZSET.
    pub(crate) fn certified(&self) -> String {
        format!("{}:certificates", self.prefix)
    }

    /// What is known of a stream of clicks in one shard: STRING. A stream's name is one of the configuration's.
    pub(crate) fn dedup_shard(&self, stream: &str, shard: u16) -> String {
        format!("{}:dedup:{{{stream}/{shard:02x}}}", self.prefix)
    }

    /// A chunk of the log of a mirrored stream: STRING.
    pub(crate) fn mirror_chunk(&self, stream: &str, shard: u16, number: u64) -> String {
        format!("{}:m:{number}", self.dedup_shard(stream, shard))
    }

    /// What a batch of clicks was told: STRING.
    pub(crate) fn dedup_verdicts(&self, stream: &str, shard: u16, token: &str) -> String {
        format!("{}:v:{token}", self.dedup_shard(stream, shard))
    }

    /// Who has claimed which clicks: HASH.
    pub(crate) fn dedup_claims(&self, stream: &str, shard: u16) -> String {
        format!("{}:c", self.dedup_shard(stream, shard))
    }

    /// When the claims of clicks lapse: ZSET.
    pub(crate) fn dedup_lapses(&self, stream: &str, shard: u16) -> String {
        format!("{}:l", self.dedup_shard(stream, shard))
    }

    /// The schema, and which store this is: HASH.
    pub(crate) fn meta(&self) -> String {
        format!("{}:meta", self.prefix)
    }

    /// What follows a batch of calls that must be durable: a channel; where the disk is waited for, STRING.
    pub(crate) fn commit(&self) -> String {
        format!("{}:commit", self.prefix)
    }

    /// A record that never exists, for the canary. With a number, it is of another slot.
    pub(crate) fn canary(&self, number: &str) -> String {
        format!("{}:{{canary{number}}}", self.prefix)
    }

    /// A hint that never exists, for the canary.
    pub(crate) fn due_canary(&self, number: &str) -> String {
        format!("{}:due:{{canary{number}}}", self.prefix)
    }

    /// A channel that nobody listens to, for the canary.
    pub(crate) fn done_canary(&self) -> String {
        format!("{}:done:{{canary}}", self.prefix)
    }

    /// What a record's key looks like to SCAN.
    pub(crate) fn job_pattern(&self) -> String {
        format!("{}:{{{}}}", self.prefix, "?".repeat(19))
    }

    /// The identity in a record's key.
    pub(crate) fn identity_of(&self, key: &[u8]) -> Option<Identity> {
        let key = std::str::from_utf8(key).ok()?;
        key.strip_prefix(self.prefix.as_str())?.strip_prefix(":{")?.strip_suffix('}')?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fingerprint::digest;
    use crate::job::JobId;
    use crate::store::slots::slot;

    /// What is called with a name of one thing alone is in the slot of that thing: so is what one script is given.
    #[test]
    fn every_key_of_a_script_is_in_one_slot() {
        let keys = Keys::new("oj");
        let identity = Identity::of(&digest("shop", "k"));
        let of_job = StreamOf { job: JobId::new(1_795_000_000_000, identity), attempt: 1 };
        let same = |tag: &str, keys: &[String]| {
            for key in keys {
                assert_eq!(slot(key.as_bytes()), slot(tag.as_bytes()), "{key}");
            }
        };
        same(
            &identity.to_string(),
            &[keys.job(identity), keys.blob(identity, &[7; 32]), keys.stream(of_job), keys.ask(identity)],
        );
        same("laser", &[keys.guard("laser"), keys.permits("laser")]);
        same("0f", &[keys.due(15), keys.due_turn(15), keys.unknown(15), keys.done(15)]);
        same("pair", &[keys.certificates("pair"), keys.renewal("pair")]);
        same("clicks/0a", &[keys.dedup_shard("clicks", 10), keys.dedup_verdicts("clicks", 10, "00ff")]);
        same(
            "clicks/0a",
            &[keys.dedup_claims("clicks", 10), keys.dedup_lapses("clicks", 10), keys.mirror_chunk("clicks", 10, 7)],
        );
        same("canary7", &[keys.canary("7"), keys.due_canary("7")]);
    }
}
