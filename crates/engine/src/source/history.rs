//! What was sent of each page of a segment, for an audit: its channel writes it down as it sends.
//!
//! Invariant: versions stand in the order in which they were sent.

use std::time::{Duration, Instant};

use godwit_fingerprints::{Fingerprint, SegmentFingerprints};
use godwit_memory::Segment;
use godwit_units::{PageIndex, PageRun};

/// A version of a page that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    /// In its segment.
    pub(super) page: u32,
    pub(super) round: u32,
    pub(super) frame: u64,
    /// The channel it was sent over, of memory; a disk has one of its own.
    pub(super) channel: usize,
    pub(super) at: Duration,
    pub(super) print: Fingerprint,
    /// It was named as zero because the guest said that it is free.
    pub(super) free: bool,
}

/// What is remembered of a segment for the audit.
#[derive(Debug)]
pub(super) struct History {
    pub(super) first: u64,
    pub(super) sent: Vec<Sent>,
    /// The last round in which the tracker reported each page, plus one.
    pub(super) reported: Vec<u32>,
    /// The last round in which each page was read and held what was sent last, plus one; empty
    /// before there is one.
    unchanged: Vec<u32>,
    /// The channel that it is sent over now.
    channel: usize,
    pub(super) began: Instant,
}

impl History {
    /// Of `segment`, of which nothing was sent.
    pub(super) fn new(segment: Segment, began: Instant) -> Self {
        let reported = vec![0; segment.run.count.0 as usize];
        let (sent, unchanged) = (Vec::new(), Vec::new());
        Self { first: segment.run.start.0, sent, reported, unchanged, channel: 0, began }
    }

    /// From here on it is sent over this `channel`.
    pub(super) fn goes_over(&mut self, channel: usize) {
        self.channel = channel;
    }

    /// The tracker has reported `run` in `round`.
    pub(super) fn reported(&mut self, run: PageRun, round: u32) {
        let first = (run.start.0 - self.first) as usize;
        self.reported[first..first + run.count.0 as usize].fill(round + 1);
    }

    /// The pages of `run` are put into frame number `frame`, with this fingerprint each.
    pub(super) fn sent(
        &mut self,
        run: PageRun,
        print: Fingerprint,
        (round, frame): (u32, u64),
        free: bool,
    ) {
        let (at, channel) = (self.began.elapsed(), self.channel);
        let pages = run.start.0 - self.first..run.end().0 - self.first;
        self.sent.extend(pages.map(|page| Sent {
            page: page as u32,
            round,
            frame,
            channel,
            at,
            print,
            free,
        }));
    }

    /// The page was read in `round`, and held what was sent last.
    pub(super) fn unchanged(&mut self, page: u64, round: u32) {
        self.unchanged.resize(self.reported.len(), 0);
        self.unchanged[(page - self.first) as usize] = round + 1;
    }

    /// The versions of a page that were sent, the last first.
    pub(super) fn of(&self, page: u64) -> impl Iterator<Item = &Sent> {
        let page = (page - self.first) as u32;
        self.sent.iter().rev().filter(move |sent| sent.page == page)
    }

    /// The last round in which the page was reported.
    pub(super) fn last_report(&self, page: u64) -> Option<u32> {
        self.reported[(page - self.first) as usize].checked_sub(1)
    }

    /// The last round in which the page was read and held what was sent last.
    pub(super) fn last_unchanged(&self, page: u64) -> Option<u32> {
        self.unchanged.get((page - self.first) as usize)?.checked_sub(1)
    }
}

/// A segment of memory or of a disk, and what is known of what was sent of it.
#[derive(Clone, Copy)]
pub(super) struct SentOf<'a> {
    pub(super) segment: Segment,
    pub(super) prints: Option<&'a SegmentFingerprints>,
    pub(super) history: Option<&'a History>,
}

impl SentOf<'_> {
    /// What was sent of `page` last; `zero` where nothing was.
    pub(super) fn sent(&self, page: u64, zero: Fingerprint) -> Fingerprint {
        self.prints.and_then(|prints| prints.print(PageIndex(page))).unwrap_or(zero)
    }
}
