//! Breaks things by a schedule that the seed determines. An act begins when so many intents are done, so a storm is as dense on a
//! slow machine as on a fast one; acts overlap, but for two on one process, of which the second waits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::dice::Dice;
use super::proxy::Mode;
use super::{Fleet, LEASE};

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    Kill { gateway: usize, down: Duration },
    Pause { gateway: usize, length: Duration },
    PausePastLease { gateway: usize, length: Duration },
    Drain { gateway: usize },
    RedisPause { length: Duration },
    RedisKill { down: Duration },
    RedisShutdown { down: Duration },
    ScriptFlush,
    ClientKill,
    LoseReplies { gateway: usize, replies: u32 },
    Hold { gateway: usize, hold: Duration, length: Duration },
    HoldThenCut { gateway: usize, hold: Duration, length: Duration },
    Refuse { gateway: usize, length: Duration },
}

/// How many kinds of acts there are.
const KINDS: usize = 13;

impl Act {
    fn draw(kind: usize, gateways: usize, dice: &mut Dice) -> Act {
        let gateway = dice.below(gateways);
        let lease_ms = u64::try_from(LEASE.as_millis()).expect("a short lease");
        let (hold, length) = (dice.between_ms(550, 900), dice.between_ms(600, 1500));
        match kind {
            0 => Act::Kill { gateway, down: dice.between_ms(50, 1500) },
            1 => Act::Pause { gateway, length: dice.between_ms(200, 1500) },
            2 => Act::PausePastLease { gateway, length: dice.between_ms(lease_ms + 500, lease_ms + 1500) },
            3 => Act::Drain { gateway },
            4 => Act::RedisPause { length: dice.between_ms(300, 2500) },
            5 => Act::RedisKill { down: dice.between_ms(50, 1000) },
            6 => Act::RedisShutdown { down: dice.between_ms(50, 1000) },
            7 => Act::ScriptFlush,
            8 => Act::ClientKill,
            9 => Act::LoseReplies { gateway, replies: 1 + u32::try_from(dice.below(8)).expect("a small number") },
            10 => Act::Hold { gateway, hold, length },
            11 => Act::HoldThenCut { gateway, hold, length },
            12 => Act::Refuse { gateway, length },
            _ => unreachable!("there are {KINDS} kinds"),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Act::Kill { .. } => "gateway killed (-9)",
            Act::Pause { .. } => "gateway paused",
            Act::PausePastLease { .. } => "gateway paused past its leases",
            Act::Drain { .. } => "gateway drained (SIGTERM)",
            Act::RedisPause { .. } => "redis paused",
            Act::RedisKill { .. } => "redis killed (-9)",
            Act::RedisShutdown { .. } => "redis shut down",
            Act::ScriptFlush => "SCRIPT FLUSH",
            Act::ClientKill => "CLIENT KILL TYPE normal",
            Act::LoseReplies { .. } => "replies lost after execution",
            Act::Hold { .. } => "replies held past the timeout",
            Act::HoldThenCut { .. } => "replies held, then cut",
            Act::Refuse { .. } => "connections to redis refused",
        }
    }

    async fn perform(self, fleet: &Fleet) {
        match self {
            Act::Kill { gateway, down } => fleet.gateways[gateway].kill(down).await,
            Act::Pause { gateway, length } | Act::PausePastLease { gateway, length } => {
                fleet.gateways[gateway].pause(length).await;
            }
            Act::Drain { gateway } => {
                let code = fleet.gateways[gateway].drain().await;
                // 4: some attempts became unknown.
                assert!(matches!(code, Some(0 | 4)), "gateway {gateway} drained with {code:?}");
            }
            Act::RedisPause { length } => fleet.redis.pause(length).await,
            Act::RedisKill { down } => fleet.redis.kill(down).await,
            Act::RedisShutdown { down } => fleet.redis.shut_down(down).await,
            Act::ScriptFlush => fleet.redis.tell(&["SCRIPT", "FLUSH"]).await,
            Act::ClientKill => fleet.redis.tell(&["CLIENT", "KILL", "TYPE", "normal"]).await,
            Act::LoseReplies { gateway, replies } => fleet.gateways[gateway].proxy.lose_replies(replies),
            Act::Hold { gateway, hold, length } => wire(fleet, gateway, Mode::Hold(hold), length).await,
            Act::HoldThenCut { gateway, hold, length } => wire(fleet, gateway, Mode::HoldThenCut(hold), length).await,
            Act::Refuse { gateway, length } => wire(fleet, gateway, Mode::Refuse, length).await,
        }
    }
}

async fn wire(fleet: &Fleet, gateway: usize, mode: Mode, length: Duration) {
    fleet.gateways[gateway].proxy.set(mode);
    tokio::time::sleep(length).await;
    fleet.gateways[gateway].proxy.set(Mode::Pass);
}

/// So many acts of each kind, in an order of the seed's.
pub fn schedule(seed: u64, gateways: usize, rounds: usize) -> Vec<Act> {
    let mut dice = Dice::of(seed, "schedule", 0);
    let mut acts: Vec<Act> = (0..rounds * KINDS).map(|number| Act::draw(number % KINDS, gateways, &mut dice)).collect();
    dice.shuffle(&mut acts);
    acts
}

/// How often each kind of act is in a schedule.
pub fn census(acts: &[Act]) -> BTreeMap<&'static str, usize> {
    let mut census = BTreeMap::new();
    for act in acts {
        *census.entry(act.name()).or_default() += 1;
    }
    census
}

/// Performs a schedule, spread over so many intents; returns when all is whole again.
pub async fn conduct(fleet: Arc<Fleet>, acts: Vec<Act>, mut done: watch::Receiver<usize>, intents: usize) {
    let mut under_way = JoinSet::new();
    let count = acts.len();
    for (number, act) in acts.into_iter().enumerate() {
        // The first ones find a warm fleet, the last ones are over before the load is.
        let at = intents * (number + 1) / (count + 2);
        let _ = done.wait_for(|done| *done >= at).await;
        let fleet = Arc::clone(&fleet);
        under_way.spawn(async move { act.perform(&fleet).await });
        while let Some(ended) = under_way.try_join_next() {
            ended.expect("an act is performed");
        }
    }
    while let Some(ended) = under_way.join_next().await {
        ended.expect("an act is performed");
    }
}
