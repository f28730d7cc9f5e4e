//! All chance of a storm, from one seed: what is drawn for one thing never depends on what was drawn for another.

use std::time::Duration;

use onejob::fingerprint::sha256;

/// A stream of numbers (splitmix64) that its seed and its name determine.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The stream of one thing.
    pub fn of(seed: u64, what: &str, number: usize) -> Dice {
        let digest = sha256(format!("{seed}/{what}/{number}").as_bytes());
        Dice(digest[..8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0, below another.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("it is below a usize")
    }

    /// Whether something happens that does so in so many of a hundred cases.
    pub fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// A duration between two, in ms.
    pub fn between_ms(&mut self, from_ms: u64, to_ms: u64) -> Duration {
        Duration::from_millis(from_ms + self.next() % (to_ms - from_ms + 1))
    }

    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        for place in (1..things.len()).rev() {
            things.swap(place, self.below(place + 1));
        }
    }
}

/// `ONEJOB_SEED`, or a new one.
pub fn seed() -> u64 {
    setting("ONEJOB_SEED").unwrap_or_else(|| u64::from_be_bytes(uuid::Uuid::new_v4().as_bytes()[..8].try_into().unwrap()) >> 32)
}

/// A number from the environment: how large a storm is.
#[expect(clippy::disallowed_methods, reason = "how large a storm is, is said where it is started")]
pub fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no whole number")))
}
