//! What a source gets wrong on purpose, so that it is seen that this is found: `lab/faults` makes
//! these defects, and docs/reliability.md has the table.
//!
//! Only a build with the feature `test-hooks` can be told of one. Without it [`Slips`] has no size
//! and leaves nothing out, so the compiler leaves out what would follow. They strike pages that the
//! guest checks: a guest whose own program is damaged dies, and can say nothing of it.

use godwit_units::{PageIndex, PageRun};

use super::fault::{Fault, MadeUp};

/// Of a dirty page or an extent of a disk: whether it is sent.
#[derive(Clone, Debug)]
pub(super) struct Slips {
    made_up: MadeUp,
    #[cfg(feature = "test-hooks")]
    chosen: std::sync::Arc<std::sync::OnceLock<(usize, PageRun)>>,
}

impl Slips {
    pub(super) fn new(made_up: MadeUp) -> Self {
        Self {
            made_up,
            #[cfg(feature = "test-hooks")]
            chosen: std::sync::Arc::default(),
        }
    }

    /// Whether hints are believed of pages that were written since.
    pub(super) fn believes_hints(&self) -> bool {
        self.made_up.is(Fault::BelieveHints)
    }

    /// Whether `page` of block `block` is left out of the last round, which holds `bytes`, if that
    /// is not what was sent.
    #[cfg(feature = "test-hooks")]
    pub(super) fn skips(
        &self,
        (block, page): (usize, PageIndex),
        bytes: &[u8],
        changed: impl FnOnce() -> bool,
    ) -> bool {
        let this = (block, PageRun::new(page.0, 1));
        let (all, one) =
            (self.made_up.is(Fault::ForgetLastRound), self.made_up.is(Fault::SkipDirtyPage));
        (all || one)
            && crate::stamped::is_checked(page, bytes)
            && changed()
            && (all || *self.chosen.get_or_init(|| this) == this)
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn skips(&self, _: (usize, PageIndex), _: &[u8], _: impl FnOnce() -> bool) -> bool {
        false
    }

    /// Whether `page` of disk `disk` is left out, which holds `bytes` and is read with `run`.
    #[cfg(feature = "test-hooks")]
    pub(super) fn drops(
        &self,
        disk: usize,
        (page, run): (PageIndex, PageRun),
        bytes: &[u8],
    ) -> bool {
        if !self.made_up.is(Fault::DropExtent) {
            return false;
        }
        if crate::stamped::is_stamped(bytes) {
            let _ = self.chosen.set((disk, run));
        }
        let dropped = self.chosen.get().filter(|(of, _)| *of == disk);
        dropped.is_some_and(|(_, run)| (run.start..run.end()).contains(&page))
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn drops(&self, _: usize, _: (PageIndex, PageRun), _: &[u8]) -> bool {
        false
    }
}
