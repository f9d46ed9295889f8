//! What was sent of a disk, page by page: for the comparison with what the destination has read
//! back, and for an audit.
//!
//! Invariant: what is recorded of a page is what was put into a frame last. What did not arrive is
//! owed to the destination, and recorded anew when it is sent again.

use std::time::Instant;

use godwit_fingerprints::{Key, PageFingerprints, SegmentFingerprints};
use godwit_memory::{SEGMENT_PAGES, Segment, segments};
use godwit_units::{PageCount, PageIndex, PageRun};

use super::history::{History, SentOf};
use crate::disk_prints::within_segments;

/// See the module.
pub(super) struct DiskSent {
    key: Key,
    segments: Vec<(Segment, SegmentFingerprints, Option<History>)>,
}

impl DiskSent {
    /// Nothing of a disk of `pages`, which has `number` in frames; `audit` is when things began to
    /// be remembered for an audit, if there is to be one.
    pub(super) fn new(number: usize, pages: PageCount, key: Key, audit: Option<Instant>) -> Self {
        let prints = PageFingerprints::new();
        let pages = [pages];
        let segments = segments(&pages).map(|Segment { run, .. }| {
            let segment = Segment { block: number, run };
            let history = audit.map(|began| History::new(segment, began));
            (segment, prints.segment(run), history)
        });
        Self { key, segments: segments.collect() }
    }

    fn of(&mut self, page: u64) -> &mut (Segment, SegmentFingerprints, Option<History>) {
        &mut self.segments[(page / SEGMENT_PAGES) as usize]
    }

    /// `run` is dirty in `round`.
    pub(super) fn reported(&mut self, run: PageRun, round: u32) {
        for part in within_segments(run) {
            if let (.., Some(history)) = self.of(part.start.0) {
                history.reported(part, round);
            }
        }
    }

    /// `page` is put into frame `frame` of `round` with these `bytes`.
    pub(super) fn sent(&mut self, page: PageIndex, bytes: &[u8], of: (u32, u64)) {
        let print = self.key.page(bytes);
        let (_, prints, history) = self.of(page.0);
        prints.record(page, print);
        if let Some(history) = history {
            history.sent(PageRun::new(page.0, 1), print, of, false);
        }
    }

    /// `run` is named as zeros there.
    pub(super) fn zeros(&mut self, run: PageRun, of: (u32, u64)) {
        let zero = self.key.zero();
        for part in within_segments(run) {
            let (_, prints, history) = self.of(part.start.0);
            prints.record_run(part, zero);
            if let Some(history) = history {
                history.sent(part, zero, of, false);
            }
        }
    }

    /// The digests of its segments; those that have not changed since are at hand.
    pub(super) fn digests(&mut self) -> Vec<u128> {
        let key = self.key;
        self.segments.iter_mut().map(|(_, prints, _)| prints.digest_of_all(&key)).collect()
    }

    /// Its segments, for an audit.
    pub(super) fn parts(&self) -> impl Iterator<Item = SentOf<'_>> {
        self.segments.iter().map(|(segment, prints, history)| SentOf {
            segment: *segment,
            prints: Some(prints),
            history: history.as_ref(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_last_is_what_counts() {
        let (key, pages) = (Key::new(7), PageCount(2 * SEGMENT_PAGES + 10));
        let mut sent = DiskSent::new(3, pages, key, Some(Instant::now()));
        let nothing = sent.digests();
        // Over two borders.
        let run = PageRun::new(SEGMENT_PAGES - 5, SEGMENT_PAGES + 9);
        sent.reported(run, 0);
        sent.zeros(run, (0, 1));
        assert_eq!(sent.digests(), nothing, "what was never sent is zeros");
        sent.sent(PageIndex(SEGMENT_PAGES), &[1; 4096], (1, 2));
        let one = sent.digests();
        assert_eq!((one[0], one[2]), (nothing[0], nothing[2]));
        assert_ne!(one[1], nothing[1]);
        sent.sent(PageIndex(SEGMENT_PAGES), &[2; 4096], (2, 3));
        assert_ne!(sent.digests()[1], one[1]);
        sent.sent(PageIndex(SEGMENT_PAGES), &[1; 4096], (3, 4));
        assert_eq!(sent.digests(), one);
        let parts: Vec<_> = sent.parts().collect();
        let history = parts[1].history.unwrap();
        let rounds: Vec<u32> = history.of(SEGMENT_PAGES).map(|sent| sent.round).collect();
        assert_eq!(rounds, [3, 2, 1, 0]);
        assert_eq!(parts[1].segment.block, 3);
        assert_eq!(history.last_report(2 * SEGMENT_PAGES - 1), Some(0));
        assert_eq!(parts[2].history.unwrap().last_report(2 * SEGMENT_PAGES + 4), None);
    }
}
