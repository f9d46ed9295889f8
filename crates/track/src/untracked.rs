//! A tracker that asks nobody.

use godwit_units::{PageCount, PageIndex, PageRun};

use crate::{AsOf, DirtyTracker, TrackError};

/// All memory counts as written, at any time: right for a guest of which nothing is sent while it
/// runs (post-copy at once), or whose memory stays where it is. It costs neither the VMM nor its
/// guest anything.
///
/// ```
/// use godwit_track::{DirtyTracker, Untracked};
/// use godwit_units::{PageCount, PageRun};
///
/// let all = PageRun::new(0, 100);
/// Untracked.harvest(0, all, PageCount::ZERO, &mut |_| {})?;
/// assert_eq!(Untracked.count(0, all)?, PageCount(100), "harvested or not");
/// # Ok::<(), godwit_track::TrackError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Untracked;

impl DirtyTracker for Untracked {
    fn harvest(
        &self,
        _block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let count = if limit == PageCount::ZERO { within.count } else { within.count.min(limit) };
        let run = PageRun { start: within.start, count };
        found(run);
        Ok(run.end())
    }

    fn look(
        &self,
        _block: usize,
        within: PageRun,
        _asof: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        found(within);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_dirty_however_often_it_is_harvested() {
        let within = PageRun::new(7, 100);
        for _ in 0..2 {
            let mut found = Vec::new();
            let end = Untracked.harvest(0, within, PageCount::ZERO, &mut |run| found.push(run));
            assert_eq!((end.unwrap(), found), (within.end(), vec![within]));
            let mut found = Vec::new();
            let end = Untracked.harvest(0, within, PageCount(5), &mut |run| found.push(run));
            assert_eq!((end.unwrap(), found), (PageIndex(12), vec![PageRun::new(7, 5)]));
            assert_eq!(Untracked.count(0, within).unwrap(), PageCount(100));
        }
    }
}
