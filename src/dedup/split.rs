//! A batch, cut into calls: by shard, in the order that the scripts want, each id once.
//!
//! Pure. The same ids give the same calls whatever their order, so that a batch that is sent again meets its own verdicts.

use crate::dedup::BatchToken;
use crate::dedup::id::{ClickId, RECORD_BYTES};
use crate::fingerprint::{HalfBytes, second_half, sha256};

/// Ids of one call: Redis does nothing else meanwhile, some milliseconds at most.
pub const CALL_IDS_MAX: usize = 1_000;

/// A batch, cut into calls.
#[derive(Debug)]
pub(crate) struct Split {
    pub(crate) calls: Vec<Part>,
    /// Of all its ids: a token with others is a conflict.
    pub(crate) fingerprint: HalfBytes,
    /// Places whose id stands in the batch before, each with the first place of that id.
    pub(crate) repeats: Vec<(usize, usize)>,
}

/// What is asked: the same batch has other calls for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Check,
    Claim,
    Commit,
    Release,
}

impl Purpose {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Purpose::Check => "check",
            Purpose::Claim => "claim",
            Purpose::Commit => "commit",
            Purpose::Release => "release",
        }
    }
}

/// One call: ids of one shard.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) shard: u16,
    /// Its own, from the batch's.
    pub(crate) token: BatchToken,
    /// The records of its ids, one after another, in order.
    pub(crate) ids: Vec<u8>,
    /// Where each of them stands in the batch.
    pub(crate) places: Vec<usize>,
}

/// Cuts a batch into calls.
pub(crate) fn split(ids: &[ClickId], shards: u16, token: BatchToken, purpose: Purpose) -> Split {
    let mut ordered: Vec<(u16, [u8; RECORD_BYTES], usize)> =
        ids.iter().enumerate().map(|(place, id)| (id.shard(shards), id.record(), place)).collect();
    ordered.sort_unstable();
    let mut calls: Vec<Part> = Vec::new();
    let mut repeats = Vec::new();
    let mut all = Vec::with_capacity(ordered.len() * RECORD_BYTES);
    let mut last: Option<(u16, [u8; RECORD_BYTES], usize)> = None;
    let mut of_shard = 0;
    for (shard, record, place) in ordered {
        match last {
            Some((before, same, first)) if (before, same) == (shard, record) => {
                repeats.push((place, first));
                continue;
            }
            Some((before, ..)) if before == shard => {}
            Some(_) | None => of_shard = 0,
        }
        if of_shard % CALL_IDS_MAX == 0 {
            let number = of_shard / CALL_IDS_MAX;
            calls.push(Part { shard, token: token.of_part(purpose, shard, number), ids: Vec::new(), places: Vec::new() });
        }
        let part = calls.last_mut().expect("one was begun");
        part.ids.extend(record);
        part.places.push(place);
        all.extend(record);
        of_shard += 1;
        last = Some((shard, record, place));
    }
    Split { calls, fingerprint: second_half(&sha256(&all)), repeats }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dedup::id::{FieldValue, IdBuilder};

    fn id(number: i128) -> ClickId {
        let mut builder = IdBuilder::new("clicks", &["n"]);
        builder.add("n", FieldValue::Integer(number)).unwrap();
        builder.finish()
    }

    proptest! {
        /// Each id is in one call of its shard, once, in order, and every place of the batch is told of.
        #[test]
        fn every_place_is_in_a_call_or_repeats_one(numbers in prop::collection::vec(0_i128..3_000, 0..6_000), shards in 1_u16..9) {
            let ids: Vec<ClickId> = numbers.iter().map(|number| id(*number)).collect();
            let token = BatchToken::random();
            let split = split(&ids, shards, token, Purpose::Check);
            let mut told = vec![0; ids.len()];
            for part in &split.calls {
                prop_assert!(!part.places.is_empty() && part.places.len() <= CALL_IDS_MAX);
                let records: Vec<&[u8]> = part.ids.chunks(RECORD_BYTES).collect();
                prop_assert!(records.is_sorted_by(|a, b| a < b));
                for (record, place) in records.iter().zip(&part.places) {
                    prop_assert_eq!(*record, &ids[*place].record()[..]);
                    prop_assert_eq!(ids[*place].shard(shards), part.shard);
                    told[*place] += 1;
                }
            }
            for (place, first) in &split.repeats {
                prop_assert!(first < place && ids[*first] == ids[*place]);
                told[*place] += 1;
            }
            prop_assert!(told.iter().all(|times| *times == 1));
            let mut tokens: Vec<_> = split.calls.iter().map(|part| part.token.as_bytes().to_owned()).collect();
            tokens.sort_unstable();
            tokens.dedup();
            prop_assert_eq!(tokens.len(), split.calls.len());
        }
    }

    #[test]
    fn the_order_of_a_batch_changes_no_call() {
        let token = BatchToken::random();
        let ids: Vec<ClickId> = (0..2_500).map(id).collect();
        let turned: Vec<ClickId> = ids.iter().rev().copied().collect();
        let (one, two) = (split(&ids, 2, token, Purpose::Check), split(&turned, 2, token, Purpose::Check));
        assert_eq!(one.fingerprint, two.fingerprint);
        assert!(one.calls.iter().map(|part| (part.token, &part.ids)).eq(two.calls.iter().map(|part| (part.token, &part.ids))));
        assert_ne!(one.fingerprint, split(&ids[1..], 2, token, Purpose::Check).fingerprint);
    }
}
