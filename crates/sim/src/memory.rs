//! Memory by segment: how many pages of each are dirty, and a cursor that walks over them and
//! sends.
//!
//! A region that is written at random gets dirty as `N·(1 − exp(−λt))`, exactly and for any step of
//! time. Pages that are harvested and not yet sent are dirty again when written, and found by the
//! next round.

use godwit_policy::Delayed;

use crate::scenario::GuestSpec;

const PAGE: f64 = 4096.0;
/// No more segments than this, however large the VM.
const SEGMENTS: f64 = 512.0;
const SEGMENT_PAGES: f64 = 4096.0;

#[derive(Clone, Debug, Default)]
pub(crate) struct Segment {
    /// Pages with data, all to be sent once.
    pub(crate) data: f64,
    /// Of them, pages that are written.
    pub(crate) written: f64,
    pub(crate) dirty: f64,
    pub(crate) sent: bool,
    /// It was harvested since the guest is governed.
    governed: bool,
    /// Taken by a harvest at the start of the round.
    pub(crate) taken: f64,
    /// Sent, and not known to have arrived.
    pub(crate) flight: f64,
    /// To be sent again, as the source believes.
    pub(crate) owed: f64,
    /// The destination lacks them: lost on the way, and not sent again; or left to follow the
    /// guest.
    pub(crate) missing: f64,
}

impl Segment {
    /// Of the pages that are missing, those that the guest writes: as many as there can be, since
    /// they were dirty.
    pub(crate) fn awaited(&self) -> f64 {
        self.missing.min(self.written)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Region {
    /// Writes to a page each second.
    pub(crate) rate: f64,
    pub(crate) sequential: bool,
    /// Where a sequential writer is, in pages of the region, and its speed.
    pub(crate) at: f64,
    pub(crate) pages: f64,
    pub(crate) writes: f64,
    pub(crate) first: usize,
    pub(crate) count: usize,
}

impl Region {
    /// The segment in which a sequential writer is, of those of the region.
    pub(crate) fn segment(&self) -> usize {
        let size = self.pages / self.count as f64;
        ((self.at / size) as usize).min(self.count - 1)
    }
}

/// The memory of a guest that is being copied.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    pub(crate) segments: Vec<Segment>,
    pub(crate) regions: Vec<Region>,
    segment_pages: f64,
    /// The segment whose turn it is, and what is left to send of the one before it.
    pub(crate) cursor: usize,
    pub(crate) pending: f64,
    /// Harvested at the start of each round.
    at_once: bool,
    /// The guest is governed, in segments from their next harvest on.
    governs: bool,
    looked: Vec<u32>,
}

impl Memory {
    pub(crate) fn new(spec: &GuestSpec, at_once: bool) -> Self {
        let pages = spec.memory.0 as f64 / PAGE;
        let segment_pages = (pages / SEGMENTS).max(SEGMENT_PAGES.min(pages / 16.0)).ceil();
        let count = (pages / segment_pages).ceil() as usize;
        let mut segments = Vec::with_capacity(count);
        let mut regions = Vec::new();
        for region in &spec.regions {
            let room = count - segments.len();
            let wanted = region.size.0 as f64 / PAGE;
            let take = ((wanted / segment_pages).ceil().max(1.0) as usize).min(room);
            let pages = wanted.min(take as f64 * segment_pages).max(1.0);
            if take == 0 {
                break;
            }
            regions.push(Region {
                rate: region.writes / pages,
                sequential: region.sequential,
                at: 0.0,
                pages,
                writes: region.writes,
                first: segments.len(),
                count: take,
            });
            for _ in 0..take {
                let written = pages / take as f64;
                segments.push(Segment { data: written, written, ..Segment::default() });
            }
        }
        // What else holds data is spread over all, first into the segments that are never written.
        let mut rest =
            (spec.data.0 as f64 / PAGE - segments.iter().map(|s| s.data).sum::<f64>()).max(0.0);
        let still = count - segments.len();
        let share = if still > 0 { (rest / still as f64).min(segment_pages) } else { 0.0 };
        for _ in 0..still {
            segments.push(Segment { data: share, ..Segment::default() });
            rest -= share;
        }
        let more = rest.max(0.0) / count as f64;
        for segment in &mut segments {
            segment.data = (segment.data + more).min(segment_pages);
        }
        Self {
            segments,
            regions,
            segment_pages,
            cursor: 0,
            pending: 0.0,
            at_once,
            governs: false,
            looked: Vec::new(),
        }
    }

    /// The guest runs for `time` seconds at the share `speed`, `factor` times as busy as usual.
    pub(crate) fn advance(&mut self, time: f64, speed: f64, factor: f64) {
        let effort = time * speed * factor;
        if effort <= 0.0 {
            return;
        }
        for region in &mut self.regions {
            let segments = &mut self.segments[region.first..region.first + region.count];
            if region.sequential {
                walk(region, segments, effort);
                continue;
            }
            let clean = (-region.rate * effort).exp();
            for segment in segments {
                segment.dirty = segment.written - (segment.written - segment.dirty) * clean;
            }
        }
    }

    /// Whether the guest is governed from now on.
    pub(crate) fn govern(&mut self, governs: bool) {
        self.governs = governs;
        if !governs {
            self.segments.iter_mut().for_each(|segment| segment.governed = false);
        }
    }

    /// The share of its speed that is left to a guest that may make `dirty_rate_limit` clean pages
    /// dirty each second: all of its work waits for them, in proportion.
    pub(crate) fn governed_speed(&self, dirty_rate_limit: f64, factor: f64) -> f64 {
        let mut wanted = 0.0;
        for region in &self.regions {
            let segments = &self.segments[region.first..region.first + region.count];
            let clean = |segment: &&Segment| segment.governed;
            if region.sequential {
                // Where it is, pages are clean, or it goes over dirty ones at no cost.
                let here = &segments[region.segment()];
                let clean = here.governed && here.dirty < 0.5 * here.written;
                wanted += if clean { region.writes } else { 0.0 };
            } else {
                let clean: f64 = segments
                    .iter()
                    .filter(clean)
                    .map(|s| (s.written - s.dirty - s.taken).max(0.0))
                    .sum();
                wanted += region.rate * clean;
            }
        }
        (dirty_rate_limit / (wanted * factor).max(1e-9)).min(1.0)
    }

    /// A round begins.
    pub(crate) fn begin(&mut self) {
        self.cursor = 0;
        self.pending = 0.0;
        if self.at_once {
            for segment in &mut self.segments {
                // A page that was taken before and left for later may have been written again: it
                // is sent once.
                let taken = segment.taken + std::mem::take(&mut segment.dirty);
                segment.taken = taken.min(segment.data);
            }
        }
    }

    /// Sends for at most `most` seconds at `rate` pages each second while the guest runs. Returns
    /// the seconds used and the pages sent; less than `most` when the round is through.
    pub(crate) fn send(
        &mut self,
        rate: f64,
        most: f64,
        effort: (f64, f64),
        delayed: &Delayed,
    ) -> (f64, f64) {
        let (mut used, mut sent) = (0.0, 0.0);
        while used < most {
            if self.pending <= 0.0 && !self.harvest(delayed) {
                break;
            }
            if rate <= 0.0 {
                self.advance(most - used, effort.0, effort.1);
                return (most, sent);
            }
            let time = (self.pending / rate).min(most - used);
            self.advance(time, effort.0, effort.1);
            used += time;
            sent += time * rate;
            if let Some(segment) = self.segments.get_mut(self.cursor.wrapping_sub(1)) {
                segment.flight += time * rate;
            }
            self.pending -= time * rate;
            if self.pending < 1e-6 {
                self.pending = 0.0;
            }
        }
        (used, sent)
    }

    /// All that was sent has arrived.
    pub(crate) fn placed(&mut self) {
        self.segments.iter_mut().for_each(|segment| segment.flight = 0.0);
    }

    /// The link breaks: the pages that were sent last, up to `window`, do not arrive.
    pub(crate) fn lose(&mut self, window: f64) {
        let mut left = window;
        let cursor = self.cursor.min(self.segments.len());
        for segment in self.segments[..cursor].iter_mut().rev() {
            let lost = segment.flight.min(left);
            left -= lost;
            segment.missing = (segment.missing + lost).min(segment.data);
        }
    }

    /// Pages that the destination lacks, but for those that are still to be sent.
    pub(crate) fn missing(&self) -> f64 {
        self.segments.iter().map(|segment| segment.missing).sum()
    }

    /// The connections are lost, and with them the pages that were sent last, up to `window`: they
    /// are to be sent again, and so is what was harvested and not sent.
    pub(crate) fn take_back(&mut self, window: f64) {
        let mut left = window;
        let harvested = std::mem::take(&mut self.pending);
        let cursor = self.cursor.min(self.segments.len());
        for (back, segment) in self.segments[..cursor].iter_mut().rev().enumerate() {
            let lost = segment.flight.min(left);
            left -= lost;
            let rest = if back == 0 { harvested } else { 0.0 };
            segment.owed = (segment.owed + lost + rest).min(segment.data);
        }
        self.placed();
    }

    /// Takes the next segment with anything to send; false when there is none in this round.
    fn harvest(&mut self, delayed: &Delayed) -> bool {
        while let Some(segment) = self.segments.get_mut(self.cursor) {
            let number = self.cursor;
            self.cursor += 1;
            if delayed.contains(number) {
                continue;
            }
            let dirty = if self.at_once { &mut segment.taken } else { &mut segment.dirty };
            let found = std::mem::take(dirty);
            let lost = std::mem::take(&mut segment.owed);
            segment.missing = (segment.missing - lost).max(0.0);
            // A page that was lost and written since is sent once.
            self.pending =
                if segment.sent { (found + lost).min(segment.data) } else { segment.data };
            segment.sent = true;
            segment.governed = self.governs;
            if self.pending >= 0.5 {
                return true;
            }
            // Parts of a page stay dirty.
            segment.dirty += std::mem::take(&mut self.pending);
        }
        false
    }

    /// All that is still to be sent, in pages.
    pub(crate) fn remaining(&self) -> f64 {
        let all = |segment: &Segment| {
            if segment.sent {
                (segment.dirty + segment.taken + segment.owed).min(segment.data)
            } else {
                segment.data
            }
        };
        self.segments.iter().map(all).sum::<f64>() + self.pending
    }

    /// Written pages by segment.
    pub(crate) fn look(&mut self) -> &[u32] {
        self.looked.clear();
        self.looked.extend(
            self.segments.iter().map(|s| (s.dirty + s.taken).min(s.written).round() as u32),
        );
        &self.looked
    }

    /// All memory, of which segments are a part each.
    pub(crate) fn all_pages(&self) -> u64 {
        (self.segment_pages * self.segments.len() as f64) as u64
    }
}

fn walk(region: &mut Region, segments: &mut [Segment], effort: f64) {
    let length = region.writes * effort;
    let size = region.pages / region.count as f64;
    if length >= region.pages {
        for segment in segments {
            segment.dirty = segment.written;
        }
    } else {
        // By the number of the segment, since adding to a large position may not move it.
        let mut number = region.segment();
        let mut room = ((number + 1) as f64 * size - region.at).max(0.0);
        let mut left = length;
        while left > 0.0 {
            let step = room.min(left);
            let segment = &mut segments[number];
            segment.dirty = (segment.dirty + step).min(segment.written);
            left -= step;
            number = (number + 1) % segments.len();
            room = size;
        }
    }
    region.at = (region.at + length) % region.pages;
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_units::ByteCount;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_is_written_gets_dirty_and_what_is_sent_gets_clean() {
        let spec = GuestSpec::idle(ByteCount(1024 * MIB), ByteCount(512 * MIB))
            .writing(ByteCount(256 * MIB), 65_536.0);
        let mut memory = Memory::new(&spec, false);
        assert!((memory.remaining() - 131_072.0).abs() < 1.0);
        memory.begin();
        let (used, sent) = memory.send(131_072.0, 10.0, (0.0, 1.0), &Delayed::default());
        assert!((used - 1.0).abs() < 1e-6 && (sent - 131_072.0).abs() < 1.0);
        memory.advance(1.0, 1.0, 1.0);
        let expected = 65_536.0 * (1.0 - (-1.0_f64).exp());
        assert!((memory.remaining() - expected).abs() < 1.0, "{}", memory.remaining());
    }

    #[test]
    fn a_sequential_writer_dirties_what_it_walks_over() {
        let spec = GuestSpec::idle(ByteCount(1024 * MIB), ByteCount(0))
            .walking(ByteCount(256 * MIB), 10_000.0);
        let mut memory = Memory::new(&spec, false);
        for _ in 0..10 {
            memory.advance(0.1, 1.0, 1.0);
        }
        let dirty: u32 = memory.look().iter().sum();
        assert!((9_990..10_010).contains(&dirty), "{dirty}");
        memory.advance(100.0, 1.0, 1.0);
        assert_eq!(memory.look().iter().sum::<u32>(), 65_536);
    }
}
