//! The kinds of rounds: what happens to calls on their way, and to the servers.

use super::wire::Accidents;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Lost,
    Twice,
    Held,
    Killed,
    Paused,
    Slept,
    Cut,
    Forgotten,
    Memory,
    NoReplicas,
    Failover,
    /// The same, and nobody waits for the replica: what was answered is lost.
    Loses,
    Slots,
}

impl Kind {
    /// Those in which every history must be linearizable.
    pub const ALL: [Kind; 12] = [
        Kind::Lost,
        Kind::Twice,
        Kind::Held,
        Kind::Killed,
        Kind::Paused,
        Kind::Slept,
        Kind::Cut,
        Kind::Forgotten,
        Kind::Memory,
        Kind::NoReplicas,
        Kind::Failover,
        Kind::Slots,
    ];

    /// For the table.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Lost => "replies are lost, and their connections",
            Kind::Twice => "calls are sent twice, at once or late",
            Kind::Held => "calls are held up until their client is gone",
            Kind::Killed => "Redis is killed and started again",
            Kind::Paused => "Redis is stopped and goes on",
            Kind::Slept => "Redis sleeps",
            Kind::Cut => "Redis cuts all connections",
            Kind::Forgotten => "Redis forgets its scripts",
            Kind::Memory => "Redis is out of memory",
            Kind::NoReplicas => "Redis insists on a replica",
            Kind::Failover => "replication stalls, then a failover",
            Kind::Loses => "replication stalls, then a failover, and nobody waits",
            Kind::Slots => "slots move to another master and back",
        }
    }

    /// What happens to calls on their way, beside what is done to the servers.
    pub fn accidents(self) -> Accidents {
        let some = Accidents { lost: 10, ..Accidents::default() };
        match self {
            Kind::Lost => Accidents { lost: 60, ..some },
            Kind::Twice => Accidents { twice: 120, late: 120, ..some },
            Kind::Held => Accidents { held: 40, ..some },
            Kind::Forgotten => Accidents { forgotten: 120, ..some },
            Kind::Killed
            | Kind::Paused
            | Kind::Slept
            | Kind::Cut
            | Kind::Memory
            | Kind::NoReplicas
            | Kind::Failover
            | Kind::Loses
            | Kind::Slots => some,
        }
    }
}
