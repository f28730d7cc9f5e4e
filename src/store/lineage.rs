//! Which server answers, and where its stream of replication stands: what a failover took back shows in it.

use redis::Value;

use crate::error::StoreError;
use crate::store::Store;
use crate::store::nodes::Master;

/// A server and its place in the stream of writes, as it says itself. Empty and 0 where it does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lineage {
    /// New at each start of a server.
    run: String,
    /// New with each history of writes.
    history: String,
    /// The history that this one goes on from, of a replica that was promoted.
    before: String,
    /// How far its own history has come, in bytes.
    offset: u64,
    /// With which byte the history before this one ends: whoever had more of it has lost that.
    begins: u64,
}

impl Lineage {
    /// Whether another server answers, or the same with another memory.
    pub(crate) fn is_another_than(&self, earlier: &Lineage) -> bool {
        (&self.run, &self.history) != (&earlier.run, &earlier.history)
    }

    /// How many bytes of writes were seen at the earlier server that this one, which goes on from it, does not have.
    pub(crate) fn lost_since(&self, earlier: &Lineage) -> u64 {
        let goes_on = self.before == earlier.history && self.begins > 0 && self.history != earlier.history;
        // It holds what comes before the byte that it began with.
        if goes_on { (earlier.offset + 1).saturating_sub(self.begins) } else { 0 }
    }
}

impl Store {
    /// Asks who answers: every master, one after the other.
    ///
    /// # Errors
    /// Any: ask again later. A server that may not be asked says nothing.
    pub(crate) async fn lineages(&self) -> Result<Vec<Lineage>, StoreError> {
        let mut lineages = Vec::new();
        for master in self.inner.nodes.masters() {
            lineages.push(self.lineage_of(&master).await?);
        }
        Ok(lineages)
    }

    async fn lineage_of(&self, master: &Master) -> Result<Lineage, StoreError> {
        let mut info = redis::cmd("INFO");
        info.arg("server").arg("replication");
        let text = match self.on(master, info).await {
            Ok(Value::BulkString(bytes)) => String::from_utf8_lossy(&bytes).into_owned(),
            Ok(Value::VerbatimString { text, .. }) => text,
            Ok(_) | Err(StoreError::Fatal { .. }) => return Ok(Lineage::default()),
            Err(error) => return Err(error),
        };
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(str::trim).unwrap_or_default().to_owned()
        };
        Ok(Lineage {
            run: field("run_id"),
            history: field("master_replid"),
            before: field("master_replid2"),
            offset: field("master_repl_offset").parse().unwrap_or(0),
            begins: field("second_repl_offset").parse().unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_promoted_replica_does_not_have_is_counted_in_bytes() {
        let master = Lineage { run: "m".into(), history: "h1".into(), before: "0".into(), offset: 100, begins: 0 };
        let promoted = |begins| Lineage { run: "r".into(), history: "h2".into(), before: "h1".into(), offset: 90, begins };
        assert_eq!(promoted(81).lost_since(&master), 20, "it has 80 of 100");
        assert_eq!(promoted(101).lost_since(&master), 0);
        assert_eq!(promoted(140).lost_since(&master), 0, "it had more than was seen");
        let other = Lineage { before: "h9".into(), ..promoted(81) };
        assert!(other.lost_since(&master) == 0 && other.is_another_than(&master));
        let later = Lineage { offset: 120, ..master.clone() };
        assert!(!later.is_another_than(&master) && later.lost_since(&master) == 0);
    }
}
