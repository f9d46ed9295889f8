//! Which pages are dirty: at random one by one, or in clusters; the same ones in every run.

use godwit_bitmap::DirtyBitmap;
use godwit_units::{PageCount, PageRun};

/// What is random in a run is the same in the next.
pub(crate) fn rng() -> fastrand::Rng {
    fastrand::Rng::with_seed(1)
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
        let mut rng = rng();
        // Above 0, of which there is no logarithm.
        let logarithm = |rng: &mut fastrand::Rng| (1.0 - rng.f64()).ln();
        let mut at = 0;
        if share == 0.0 {
            return;
        }
        loop {
            let run = match self {
                Self::Random(_) => {
                    PageRun::new(at + (logarithm(&mut rng) / (1.0 - share).ln()) as u64, 1)
                }
                Self::Clustered(_) => {
                    let gap = -logarithm(&mut rng) * MEAN as f64 * (1.0 - share) / share;
                    PageRun::new(at + gap as u64, rng.u64(1..2 * MEAN))
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
