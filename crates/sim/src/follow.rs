//! Memory that follows a guest (post-copy): what streams, what the guest waits for meanwhile, and
//! what that costs it.
//!
//! Of the guest its writes are known, so a page that it only reads is never waited for here: a
//! guest that reads much waits for more.

use crate::memory::{Memory, Region, Segment};

/// What happened within a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Step {
    /// Seconds that it took: fewer than it might where nothing is missing any more.
    pub used: f64,
    /// Pages sent.
    pub sent: f64,
    /// Those among them that the guest waited for.
    pub faults: f64,
    /// The guest's speed.
    pub speed: f64,
}

impl Memory {
    /// The guest leaves: from here on all that is left is missing there, and nothing is dirty.
    /// Returns the pages.
    pub(crate) fn leave(&mut self) -> f64 {
        let pending = std::mem::take(&mut self.pending);
        let cursor = self.cursor.min(self.segments.len());
        if let Some(segment) = self.segments[..cursor].last_mut() {
            segment.owed += pending;
        }
        for segment in &mut self.segments {
            let left = if segment.sent {
                // What did not arrive and is owed is the same.
                segment.missing.max(segment.owed) + segment.dirty + segment.taken
            } else {
                segment.data
            };
            segment.missing = left.min(segment.data);
            (segment.dirty, segment.taken, segment.owed) = (0.0, 0.0, 0.0);
            (segment.sent, segment.flight) = (true, 0.0);
        }
        self.cursor = 0;
        self.missing()
    }

    /// How often a guest that is `factor` times as busy as usual would write to a page that is
    /// missing, each second, if it never waited.
    pub(crate) fn misses(&self, factor: f64) -> f64 {
        let of = |region: &Region| {
            let segments = &self.segments[region.first..region.first + region.count];
            if region.sequential {
                let segment = &segments[region.segment()];
                region.writes * segment.awaited() / segment.written.max(1.0)
            } else {
                region.rate * segments.iter().map(Segment::awaited).sum::<f64>()
            }
        };
        self.regions.iter().map(of).sum::<f64>() * factor
    }

    /// What is missing comes, at `rate` pages each second (more than none) and for `most` seconds
    /// at most; the guest runs, and each page that it writes first takes it `wait` seconds and the
    /// time that the link takes for a page. Those that it waits for come first, and the others in
    /// their order.
    pub(crate) fn follow(&mut self, rate: f64, most: f64, factor: f64, wait: f64) -> Step {
        let missing = self.missing();
        let used = most.min(missing / rate);
        let misses = self.misses(factor);
        let speed = 1.0 / (1.0 + misses * (wait + 1.0 / rate));
        let wanted = misses * speed * used;
        let mut faults = 0.0;
        for at in 0..self.regions.len() {
            faults += self.fault(at, factor * speed * used);
        }
        debug_assert!(faults <= wanted + 1e-6 * (1.0 + wanted), "{faults} of {wanted}");
        let mut left = (rate * used - faults).max(0.0);
        let sent = left.min(self.missing()) + faults;
        while let Some(segment) = self.segments.get_mut(self.cursor) {
            let now = segment.missing.min(left);
            segment.missing -= now;
            left -= now;
            if segment.missing > 0.0 && left <= 0.0 {
                break;
            }
            self.cursor += 1;
        }
        debug_assert!(sent <= rate * used * (1.0 + 1e-9) + 1e-6, "{sent} in {used} s");
        Step { used, sent, faults, speed }
    }

    /// The guest waits for pages of the region `at`, for so much of its work.
    fn fault(&mut self, at: usize, effort: f64) -> f64 {
        let region = &mut self.regions[at];
        let here = region.segment();
        let segments = &mut self.segments[region.first..region.first + region.count];
        if region.sequential {
            let segment = &mut segments[here];
            let came = region.writes * effort * segment.awaited() / segment.written.max(1.0);
            let came = came.min(segment.awaited());
            segment.missing -= came;
            region.at = (region.at + region.writes * effort) % region.pages;
            return came;
        }
        let share = 1.0 - (-region.rate * effort).exp();
        segments
            .iter_mut()
            .map(|segment| {
                let came = segment.awaited() * share;
                segment.missing -= came;
                came
            })
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use godwit_units::ByteCount;

    use super::*;
    use crate::scenario::GuestSpec;

    const MIB: u64 = 1 << 20;

    fn left(spec: &GuestSpec) -> Memory {
        let mut memory = Memory::new(spec, false);
        assert!((memory.leave() - 131_072.0).abs() < 1.0);
        assert!(memory.remaining() < 1.0);
        memory
    }

    #[test]
    fn what_nobody_waits_for_streams_in_the_time_that_the_link_takes() {
        let mut memory = left(&GuestSpec::idle(ByteCount(1024 * MIB), ByteCount(512 * MIB)));
        let step = memory.follow(65_536.0, 10.0, 1.0, 1e-3);
        assert!((step.used - 2.0).abs() < 1e-6 && step.faults == 0.0 && step.speed == 1.0);
        assert!(memory.missing() < 1e-3, "{}", memory.missing());
    }

    #[test]
    fn a_guest_waits_for_what_it_writes_and_less_the_more_is_there() {
        let spec = GuestSpec::idle(ByteCount(1024 * MIB), ByteCount(512 * MIB))
            .writing(ByteCount(256 * MIB), 10_000.0);
        let mut memory = left(&spec);
        // At first every write is one: 10,000 a second of 1 ms each, and 0.1 ms on the link, leave
        // a twelfth.
        assert!((memory.misses(1.0) - 10_000.0).abs() < 1.0, "{}", memory.misses(1.0));
        let first = memory.follow(10_000.0, 0.1, 1.0, 1e-3);
        assert!((first.speed - 1.0 / 12.0).abs() < 1e-3, "{first:?}");
        assert!((first.faults - 10_000.0 * first.speed * 0.1).abs() < 1.0, "{first:?}");
        assert!((first.sent - 1000.0).abs() < 1e-6, "they come over the same link: {first:?}");
        let (mut faults, mut last) = (first.faults, first);
        while memory.missing() > 0.5 {
            last = memory.follow(10_000.0, 0.1, 1.0, 1e-3);
            faults += last.faults;
        }
        assert!(last.speed > 0.9 && faults < 65_536.0, "{last:?} {faults}");
    }

    #[test]
    fn a_slow_link_carries_no_more_than_it_can() {
        // Asked for 10,000 pages a second, of which it carries 256 (1 MiB/s).
        let spec = GuestSpec::idle(ByteCount(1024 * MIB), ByteCount(512 * MIB))
            .writing(ByteCount(256 * MIB), 10_000.0);
        let mut memory = left(&spec);
        let step = memory.follow(256.0, 10.0, 1.0, 1e-3);
        assert!((step.sent - 2560.0).abs() < 1e-6 && step.faults < 2560.0, "{step:?}");
        assert!((step.speed - 1.0 / (1.0 + 10_000.0 * (1e-3 + 1.0 / 256.0))).abs() < 1e-4);
        assert!((131_072.0 - memory.missing() - step.sent).abs() < 1e-3);
    }

    #[test]
    fn what_is_lost_and_owed_is_missing_once() {
        let mut memory = left(&GuestSpec::idle(ByteCount(1024 * MIB), ByteCount(512 * MIB)));
        memory.follow(65_536.0, 10.0, 1.0, 0.0);
        for segment in &mut memory.segments {
            (segment.missing, segment.owed) = (10.0, 10.0);
        }
        let pages = memory.leave();
        assert!((pages - 10.0 * memory.segments.len() as f64).abs() < 1e-6, "{pages}");
    }

    #[test]
    fn without_a_link_the_guest_comes_as_far_as_what_is_missing() {
        let spec = GuestSpec::idle(ByteCount(1024 * MIB), ByteCount(512 * MIB))
            .walking(ByteCount(256 * MIB), 100.0);
        let memory = left(&spec);
        assert!((memory.misses(1.0) - 100.0).abs() < 1e-6);
        assert!((memory.misses(0.5) - 50.0).abs() < 1e-6);
    }
}
