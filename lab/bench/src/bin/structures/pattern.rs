//! Which pages are dirty: at random one by one, or in clusters; the same ones in every run.

use godwit_bitmap::DirtyBitmap;
use godwit_units::{PageCount, PageRun};

/// A small generator of pseudo-random numbers (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new() -> Self {
        Self(88_172_645_463_325_252)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 1
    }

    /// Between 0, exclusive, and 1.
    fn fraction(&mut self) -> f64 {
        ((self.next() >> 10) + 1) as f64 / (1u64 << 53) as f64
    }
}

/// How the dirty pages lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pattern {
    /// Each page for itself, with this probability.
    Random(f64),
    /// In runs of 1 to 1023 pages, 512 (2 MiB) on average, with this share of all pages.
    Clustered(f64),
}

impl Pattern {
    pub(crate) fn share(self) -> f64 {
        match self {
            Self::Random(share) | Self::Clustered(share) => share,
        }
    }

    pub(crate) fn name(self) -> String {
        let kind = if matches!(self, Self::Random(_)) { "random" } else { "clustered" };
        format!("{kind} {} %", (self.share() * 1e7).round() / 1e5)
    }

    /// Calls `mark` with every run of dirty pages among `pages`, in order.
    pub(crate) fn for_each(self, pages: PageCount, mut mark: impl FnMut(PageRun)) {
        const MEAN: u64 = 512;
        let share = self.share();
        let mut random = Random::new();
        let mut at = 0;
        if share == 0.0 {
            return;
        }
        loop {
            let run = match self {
                Self::Random(_) => {
                    PageRun::new(at + (random.fraction().ln() / (1.0 - share).ln()) as u64, 1)
                }
                Self::Clustered(_) => {
                    let gap = -random.fraction().ln() * MEAN as f64 * (1.0 - share) / share;
                    PageRun::new(at + gap as u64, 1 + random.next() % (2 * MEAN - 1))
                }
            };
            if run.start.0 >= pages.0 {
                break;
            }
            mark(run);
            at = run.end().0;
        }
    }

    /// A bitmap of `pages` pages; all of its memory has been written, since reading memory that
    /// never was reads one and the same page of zeros.
    pub(crate) fn bitmap(self, pages: PageCount) -> DirtyBitmap {
        let mut bitmap = DirtyBitmap::new(pages);
        bitmap.set_all();
        bitmap.clear_all();
        self.for_each(pages, |run| {
            bitmap.set(run);
        });
        bitmap
    }
}
