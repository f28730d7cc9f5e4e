//! A process's copy of what a shard of a mirrored stream remembers: which ids, each with the chunk of the log in which it came, and
//! how far the log has been read.
//!
//! Plain data. A copy only proposes: what it says counts where the script finds that it is the beginning of what Redis has, and looks
//! through the rest itself. Deliberately not here: reading the log, which is `mirrored.rs`.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::store::{MirrorId, MirrorNews, MirrorPosition, first_frame, frame_bytes};

/// A table is cut in so many: one that grows, or is swept, keeps its callers waiting for that part of the time.
const PARTS: usize = 64;

/// Ids are hashes: some of their bits are as good as any hash of them.
#[derive(Default)]
struct Bits(u64);

impl Hasher for Bits {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(bits) = bytes.first_chunk() {
            self.0 = u64::from_be_bytes(*bits);
        }
    }
}

/// Ids, and the last 16 bits of the numbers of their chunks. Those that are looked at are few, and all numbers before are swept away.
type Part = HashMap<MirrorId, u16, BuildHasherDefault<Bits>>;

/// A copy of one shard.
pub(crate) struct Mirror {
    parts: Vec<Part>,
    position: MirrorPosition,
    /// The oldest chunk that is not forgotten.
    oldest: u64,
    /// Parts that may have ids of forgotten chunks.
    unswept: usize,
    /// Somebody is reading, or died while reading: it has ids from behind its position.
    is_torn: bool,
}

/// What a copy says of the ids of a call.
pub(crate) struct View {
    pub(crate) position: MirrorPosition,
    /// The oldest chunk of a duplicate; 0 if there are none.
    pub(crate) oldest: u64,
    /// `0` or `1` for each id.
    pub(crate) verdicts: Vec<u8>,
    /// Those with a `1`.
    pub(crate) ids: Vec<u8>,
}

impl Mirror {
    pub(crate) fn new() -> Self {
        let parts = (0..PARTS).map(|_| Part::default()).collect();
        Mirror { parts, position: MirrorPosition::NOWHERE, oldest: 0, unswept: 0, is_torn: false }
    }

    pub(crate) fn position(&self) -> MirrorPosition {
        self.position
    }

    pub(crate) fn is_torn(&self) -> bool {
        self.is_torn
    }

    /// What it says of these ids.
    pub(crate) fn view(&self, ids: &[MirrorId]) -> View {
        let mut view = View {
            position: self.position,
            oldest: 0,
            verdicts: Vec::with_capacity(ids.len()),
            ids: Vec::with_capacity(size_of_val(ids)),
        };
        for id in ids {
            match self.parts[part_of(id)].get(id).map(|chunk| number(self.position.chunk, *chunk)) {
                Some(chunk) if chunk >= self.oldest => {
                    view.oldest = if view.oldest == 0 { chunk } else { view.oldest.min(chunk) };
                    view.verdicts.push(b'0');
                }
                Some(_) | None => {
                    view.verdicts.push(b'1');
                    view.ids.extend(id);
                }
            }
        }
        view
    }

    /// Takes in what a call was told that was made from a position: what others have added since, then its own ids.
    pub(crate) fn hear(&mut self, asked_at: MirrorPosition, news: &MirrorNews, own: &[MirrorId]) {
        let from = news.offset.checked_sub(news.tail.len() as u64);
        let follows = self.position == asked_at
            || from.is_some_and(|from| self.position.chunk == news.chunk && self.position.offset >= from);
        let offset = news.offset + frame_bytes(own.len()) as u64;
        let is_new = (news.chunk, offset) > (self.position.chunk, self.position.offset);
        // Another call's reply was faster, or has been overtaken: what is missing comes with the next one.
        if self.is_torn || !follows || !is_new {
            return;
        }
        let mut rest = &news.tail[..];
        while let Some(frame) = first_frame(rest) {
            self.add(frame.ids, news.chunk);
            rest = &rest[frame.bytes..];
        }
        self.add(own, news.chunk);
        self.position = MirrorPosition { chunk: news.chunk, offset, digest: news.digest };
        self.forget(news.oldest);
    }

    fn add(&mut self, ids: &[MirrorId], chunk: u64) {
        for id in ids {
            self.parts[part_of(id)].insert(*id, last_bits(chunk));
        }
    }

    /// A call that was made from a position was told to read first, and what is the oldest chunk there. That may be another log's by
    /// now, whose chunks have other numbers: then nothing follows from it.
    pub(crate) fn is_behind(&mut self, asked_at: MirrorPosition, oldest: u64) {
        if self.position == asked_at && asked_at != MirrorPosition::NOWHERE {
            self.forget(oldest);
        }
    }

    /// What is older is known no more. Sweeps a part of what was forgotten before.
    fn forget(&mut self, oldest: u64) {
        if oldest > self.oldest {
            (self.oldest, self.unswept) = (oldest, PARTS);
        }
        if self.unswept > 0 && !self.is_torn {
            self.unswept -= 1;
            let (newest, oldest, part) = (self.position.chunk, self.oldest, &mut self.parts[self.unswept]);
            part.retain(|_, chunk| number(newest, *chunk) >= oldest);
            if part.len() < part.capacity() / 4 {
                part.shrink_to(part.len() * 2);
            }
        }
    }

    /// From here on it is being read into, from its position or, if `anew`, from nothing.
    pub(crate) fn tear(&mut self, anew: bool) {
        if anew {
            *self = Mirror::new();
        }
        self.is_torn = true;
    }

    /// Reads the whole frames of a chunk that some bytes begin with, and says how long they are. `is_next` is asked about the digest
    /// of each; a `false` ends it.
    pub(crate) fn read(&mut self, chunk: u64, bytes: &[u8], mut is_next: impl FnMut(&[u8]) -> bool) -> Option<usize> {
        let mut at = 0;
        while let Some(frame) = first_frame(&bytes[at..]) {
            if !is_next(&frame.digest) {
                return None;
            }
            self.add(frame.ids, chunk);
            at += frame.bytes;
        }
        Some(at)
    }

    /// It has been read up to here.
    pub(crate) fn mend(&mut self, position: MirrorPosition, oldest: u64) {
        (self.position, self.is_torn) = (position, false);
        self.forget(oldest);
    }
}

fn part_of(id: &MirrorId) -> usize {
    usize::from(id[id.len() - 1]) % PARTS
}

fn last_bits(chunk: u64) -> u16 {
    (chunk & u64::from(u16::MAX)) as u16
}

/// The number of a chunk by its last bits: none is newer than the newest.
fn number(newest: u64, bits: u16) -> u64 {
    newest.saturating_sub(u64::from(last_bits(newest).wrapping_sub(bits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(numbers: std::ops::Range<u64>) -> Vec<MirrorId> {
        numbers.map(|number| [&number.to_be_bytes()[..], &[0, (number % 251) as u8]].concat().try_into().unwrap()).collect()
    }

    fn len(mirror: &Mirror) -> usize {
        mirror.parts.iter().map(Part::len).sum()
    }

    /// What a call is told that stands at an offset, with what others have added before it.
    fn news(oldest: u64, chunk: u64, offset: usize, tail: &[&[MirrorId]]) -> MirrorNews {
        let frame = |ids: &&[MirrorId]| [&(ids.len() as u16).to_be_bytes()[..], &[b'0'; 12], ids.as_flattened()].concat();
        MirrorNews { oldest, chunk, offset: offset as u64, digest: [b'1'; 12], tail: tail.iter().flat_map(frame).collect() }
    }

    fn verdicts(mirror: &Mirror, ids: &[MirrorId]) -> String {
        String::from_utf8(mirror.view(ids).verdicts).unwrap()
    }

    #[test]
    fn replies_in_any_order_are_taken_in_once() {
        let (one, two, three) = (ids(0..2), ids(2..5), ids(5..6));
        let start = MirrorPosition::NOWHERE;
        let (at_two, at_three) = (frame_bytes(2), frame_bytes(2) + frame_bytes(3));
        // Three calls that were all made from the beginning.
        let told =
            [(news(1, 1, 0, &[]), &one), (news(1, 1, at_two, &[&one]), &two), (news(1, 1, at_three, &[&one, &two]), &three)];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut mirror = Mirror::new();
            order.into_iter().for_each(|call| mirror.hear(start, &told[call].0, told[call].1));
            assert_eq!(verdicts(&mirror, &ids(0..7)), "0000001", "{order:?}");
            let offset = (at_three + frame_bytes(1)) as u64;
            assert_eq!(mirror.position(), MirrorPosition { chunk: 1, offset, digest: [b'1'; 12] }, "{order:?}");
        }
    }

    #[test]
    fn what_does_not_follow_is_not_taken_in() {
        let mut mirror = Mirror::new();
        mirror.hear(MirrorPosition::NOWHERE, &news(1, 1, 0, &[]), &ids(0..2));
        let before = mirror.position();
        // From somewhere else, with a gap before it.
        mirror.hear(MirrorPosition { offset: 500, ..before }, &news(1, 1, 500, &[]), &ids(10..11));
        assert_eq!((mirror.position(), &verdicts(&mirror, &ids(10..11))[..]), (before, "1"));
        // While somebody reads.
        mirror.tear(false);
        mirror.hear(before, &news(1, 1, frame_bytes(2), &[]), &ids(10..11));
        assert_eq!(mirror.position(), before);
    }

    /// Redis has forgotten everything, and another log has begun, when a call is answered that was made long before.
    #[test]
    fn what_another_log_has_forgotten_is_not_forgotten() {
        let mut mirror = Mirror::new();
        mirror.hear(MirrorPosition::NOWHERE, &news(8, 8, 0, &[]), &ids(0..2));
        let before = mirror.position();
        for late in [
            |mirror: &mut Mirror, before| mirror.is_behind(before, 8),
            |mirror: &mut Mirror, before| mirror.hear(before, &news(8, 8, frame_bytes(2), &[]), &ids(9..10)),
            |mirror: &mut Mirror, _| mirror.is_behind(MirrorPosition::NOWHERE, 8),
        ] {
            mirror.tear(true);
            mirror.mend(MirrorPosition::NOWHERE, 0);
            late(&mut mirror, before);
            mirror.hear(MirrorPosition::NOWHERE, &news(1, 1, 0, &[]), &ids(0..2));
            late(&mut mirror, before);
            assert_eq!(verdicts(&mirror, &ids(0..2)), "00");
        }
        let here = mirror.position();
        mirror.is_behind(here, 2);
        assert_eq!(verdicts(&mirror, &ids(0..2)), "11");
    }

    #[test]
    fn a_forgotten_chunk_is_known_no_more_and_is_swept_a_part_at_a_time() {
        let mut mirror = Mirror::new();
        // More chunks than the 16 bits that are kept of their numbers tell apart.
        for chunk in 65_530..65_545 {
            let position = mirror.position();
            mirror.hear(position, &news(65_530, chunk, 0, &[]), &ids(chunk * 1_000..chunk * 1_000 + 600));
        }
        let old = ids(65_530_000..65_530_600);
        let view = mirror.view(&ids(65_532_000..65_532_001));
        assert_eq!((&view.verdicts[..], view.oldest), (&b"0"[..], 65_532));
        assert_eq!(mirror.view(&[old[0], ids(65_540_000..65_540_001)[0]]).oldest, 65_530);
        mirror.forget(65_540);
        assert_eq!(verdicts(&mirror, &old[..3]), "111");
        assert_eq!(mirror.view(&old[..3]).ids, old[..3].as_flattened());
        assert!(len(&mirror) > 8_500, "{}", len(&mirror));
        for _ in 1..PARTS {
            mirror.forget(65_540);
        }
        assert_eq!(len(&mirror), 5 * 600);
        assert_eq!(verdicts(&mirror, &ids(65_540_000..65_540_003)), "000");
        // What has become much too large is made smaller.
        let before = mirror.parts.iter().map(Part::capacity).sum::<usize>();
        for _ in 0..PARTS {
            mirror.forget(65_544);
        }
        let after = mirror.parts.iter().map(Part::capacity).sum::<usize>();
        assert!(len(&mirror) == 600 && after < before / 2, "{before} {after}");
    }
}
