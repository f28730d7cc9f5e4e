//! `[stream.<name>]`: streams of clicks that the gateway is asked about (`docs/DEDUP.md`).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::dedup;

/// Most streams of clicks: each is a label of metrics.
pub const CLICK_STREAMS_MAX: usize = 256;
/// Most clicks that a window is sized for: more than a trillion is a slip of the pen.
pub const EXPECTED_MAX: u64 = 1_000_000_000_000;

/// A stream of clicks.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct StreamEntry {
    /// What makes two clicks the same, in order: names of members, or JSON pointers. Required.
    pub fields: Vec<String>,
    /// How long a click is remembered at least.
    #[serde(with = "humantime_serde")]
    pub window: Duration,
    /// In how many slices the window is cut.
    pub slices: u32,
    /// Over how many hash slots it is spread.
    pub shards: u16,
    /// How many different clicks a window has, roughly.
    pub expected: u64,
    /// How long the verdicts under a key are kept.
    #[serde(with = "humantime_serde")]
    pub keep: Duration,
    /// How long a claim stands that is neither committed nor released.
    #[serde(with = "humantime_serde")]
    pub lease: Duration,
    /// Whether each process that asks has a copy of what is remembered.
    pub mirrored: bool,
}

impl Default for StreamEntry {
    fn default() -> Self {
        let dedup::Stream { fields, window, slices, shards, expected, keep, lease, mirrored, .. } = dedup::Stream::new("", &[]);
        StreamEntry { fields, window, slices, shards, expected, keep, lease, mirrored }
    }
}

impl StreamEntry {
    /// The stream of that name.
    pub fn stream(&self, name: &str) -> dedup::Stream {
        let StreamEntry { fields, window, slices, shards, expected, keep, lease, mirrored } = self.clone();
        let of_library = dedup::Stream::new(name, &[]);
        dedup::Stream { fields, window, slices, shards, expected, keep, lease, mirrored, ..of_library }
    }
}
