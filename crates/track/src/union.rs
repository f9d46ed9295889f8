//! Several trackers as one: a page is dirty that any of them says is dirty.
//!
//! For a VMM: KVM's log or ring for the vCPUs, a device log for everything that writes through host
//! addresses. Invariant: what one of them was made to forget is reported or kept here, whatever
//! happens to the others.

use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_bitmap::DirtyBitmap;
use godwit_units::{PageCount, PageIndex, PageRun};

use crate::collected::Collectors;
use crate::{AsOf, DirtyTracker, TrackError};

/// Combines trackers of the same RAM blocks.
///
/// ```
/// use godwit_track::{DirtyTracker, KvmLogTracker, UnionTracker, VhostLogTracker};
/// use godwit_units::PageCount;
///
/// /// What vCPUs and devices write to one block of `pages` pages.
/// fn both(pages: PageCount, vcpus: KvmLogTracker, devices: VhostLogTracker) -> impl DirtyTracker {
///     UnionTracker::new(&[pages], vec![Box::new(vcpus), Box::new(devices)])
/// }
/// ```
pub struct UnionTracker {
    trackers: Vec<Box<dyn DirtyTracker>>,
    united: United,
}

impl std::fmt::Debug for UnionTracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UnionTracker")
            .field("trackers", &self.trackers.len())
            .finish_non_exhaustive()
    }
}

impl UnionTracker {
    /// The union of `trackers`, all of which know the same RAM blocks, of the sizes `blocks`.
    #[must_use]
    pub fn new(blocks: &[PageCount], trackers: Vec<Box<dyn DirtyTracker>>) -> Self {
        Self { trackers, united: United::new(blocks) }
    }

    fn all(&self) -> impl Iterator<Item = &dyn DirtyTracker> {
        self.trackers.iter().map(AsRef::as_ref)
    }
}

impl DirtyTracker for UnionTracker {
    fn begin_round(&self) {
        self.all().for_each(DirtyTracker::begin_round);
    }

    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        self.united.harvest(self.all(), block, within, limit, found)
    }

    fn look(
        &self,
        block: usize,
        within: PageRun,
        asof: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        self.united.look(self.all(), block, within, asof, found)
    }
}

/// What it takes to ask several trackers as one.
#[derive(Debug)]
pub(crate) struct United {
    /// For each block, pages that a tracker has given away and that were not reported: they were
    /// beyond a limit, or another tracker failed.
    kept: Vec<Mutex<DirtyBitmap>>,
    collectors: Collectors,
}

impl United {
    /// Of blocks of these sizes.
    pub(crate) fn new(blocks: &[PageCount]) -> Self {
        let kept = blocks.iter().map(|&pages| Mutex::new(DirtyBitmap::new(pages))).collect();
        Self { kept, collectors: Collectors::default() }
    }

    fn kept(&self, block: usize) -> Option<MutexGuard<'_, DirtyBitmap>> {
        Some(self.kept.get(block)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The pages of `block` that are set in `pages` count as dirty until they are harvested.
    pub(crate) fn mark(&self, block: usize, pages: &DirtyBitmap) {
        if let Some(mut kept) = self.kept(block) {
            kept.merge(PageIndex(0), pages, PageRun::new(0, pages.len().0));
        }
    }

    /// All pages count as dirty until they are harvested.
    pub(crate) fn mark_all(&self) {
        for block in 0..self.kept.len() {
            if let Some(mut kept) = self.kept(block) {
                let pages = kept.len();
                kept.set(PageRun::new(0, pages.0));
            }
        }
    }

    /// Reports what is kept and what `trackers` report.
    pub(crate) fn look<'a>(
        &self,
        trackers: impl Iterator<Item = &'a dyn DirtyTracker>,
        block: usize,
        within: PageRun,
        asof: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        let mut collected = self.collectors.start(within);
        if let Some(kept) = self.kept(block) {
            collected.bitmap.merge(PageIndex(0), &kept, within);
        }
        for tracker in trackers {
            tracker.look(block, within, asof, &mut |run| {
                collected.bitmap.set(PageRun::new(run.start.0 - within.start.0, run.count.0));
            })?;
        }
        collected.report(within.count.0, found);
        Ok(())
    }

    fn keep(&self, block: usize, within: PageRun, collected: &DirtyBitmap, from: u64) {
        let rest = PageRun::new(from, within.count.0 - from);
        if let Some(mut kept) = self.kept(block) {
            kept.merge(PageIndex(within.start.0 + from), collected, rest);
        }
    }

    /// Harvests what is kept and what `trackers` have.
    pub(crate) fn harvest<'a>(
        &self,
        trackers: impl Iterator<Item = &'a dyn DirtyTracker>,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let mut collected = self.collectors.start(within);
        if let Some(mut kept) = self.kept(block) {
            collected.bitmap.merge(PageIndex(0), &kept, within);
            kept.clear(within);
        }
        let mut cut = within.count.0;
        for tracker in trackers {
            // Up to the first page beyond the limit, no further: what can stay with its tracker
            // shall.
            cut = cut.min(collected.cut(limit));
            let ask = PageRun::new(within.start.0, cut);
            let harvested = tracker.harvest(block, ask, limit, &mut |run| {
                collected.bitmap.set(PageRun::new(run.start.0 - within.start.0, run.count.0));
            });
            match harvested {
                Ok(next) => cut = cut.min(next.0.saturating_sub(within.start.0)),
                Err(error) => {
                    self.keep(block, within, &collected.bitmap, 0);
                    return Err(error);
                }
            }
        }
        let cut = cut.min(collected.cut(limit));
        self.keep(block, within, &collected.bitmap, cut);
        Ok(collected.report(cut, found))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;

    use proptest::prelude::*;

    use super::*;

    /// A bitmap as a tracker, which fails when told to.
    #[derive(Default)]
    struct Plain {
        dirty: Mutex<Vec<u64>>,
        fails: bool,
    }

    impl DirtyTracker for Plain {
        fn harvest(
            &self,
            block: usize,
            within: PageRun,
            limit: PageCount,
            found: &mut dyn FnMut(PageRun),
        ) -> Result<PageIndex, TrackError> {
            if self.fails {
                return Err(TrackError::Scan { block, source: io::ErrorKind::Other.into() });
            }
            let mut dirty = self.dirty.lock().unwrap();
            dirty.sort_unstable();
            dirty.dedup();
            let mut harvested = 0;
            for page in dirty.clone() {
                if page < within.start.0 || page >= within.end().0 {
                    continue;
                }
                found(PageRun::new(page, 1));
                dirty.retain(|other| *other != page);
                harvested += 1;
                if harvested == limit.0 {
                    return Ok(PageIndex(page + 1));
                }
            }
            Ok(within.end())
        }

        fn look(
            &self,
            _: usize,
            _: PageRun,
            _: AsOf,
            found: &mut dyn FnMut(PageRun),
        ) -> Result<(), TrackError> {
            self.dirty.lock().unwrap().iter().for_each(|page| found(PageRun::new(*page, 1)));
            Ok(())
        }
    }

    fn plain(pages: &[u64]) -> Box<Plain> {
        Box::new(Plain { dirty: Mutex::new(pages.to_vec()), fails: false })
    }

    proptest! {
        #[test]
        fn a_union_with_a_limit_loses_and_invents_nothing(
            sets in prop::collection::vec(prop::collection::vec(0u64..300, 0..40), 1..4),
            limit in 0u64..20,
        ) {
            let trackers = sets.iter().map(|set| plain(set) as Box<dyn DirtyTracker>).collect();
            let union = UnionTracker::new(&[PageCount(300)], trackers);
            let mut found = Vec::new();
            let mut at = 0;
            while at < 300 {
                let before = found.len();
                let rest = PageRun::new(at, 300 - at);
                let mut add = |run: PageRun| found.extend(run.start.0..run.end().0);
                let next = union.harvest(0, rest, PageCount(limit), &mut add).unwrap();
                prop_assert!(limit == 0 || (found.len() - before) as u64 <= limit);
                prop_assert!(found.iter().all(|page| *page < next.0));
                at = next.0;
            }
            let mut expected: Vec<u64> = sets.concat();
            expected.sort_unstable();
            expected.dedup();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn what_one_gave_away_is_kept_when_another_fails() {
        let bad = Box::new(Plain { fails: true, ..Plain::default() });
        let mut union = UnionTracker::new(&[PageCount(300)], vec![plain(&[3, 200]), bad]);
        let all = PageRun::new(0, 300);
        let mut found = Vec::new();
        assert!(union.harvest(0, all, PageCount(0), &mut |run| found.push(run)).is_err());
        assert_eq!(found, []);
        assert_eq!(union.count(0, all).unwrap(), PageCount(2));
        union.trackers.pop();
        union.harvest(0, all, PageCount(0), &mut |run| found.push(run)).unwrap();
        assert_eq!(found, [PageRun::new(3, 1), PageRun::new(200, 1)]);
    }
}
