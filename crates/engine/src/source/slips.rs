//! What a source gets wrong on purpose, so that it is seen that this is found: `lab/faults` makes
//! these defects, and docs/reliability.md has the table.
//!
//! Only a build with the feature `test-hooks` can be told of one. Without it [`Slips`] has no size
//! and leaves nothing out, so the compiler leaves out what would follow. They strike pages that the
//! guest checks: a guest whose own program is damaged dies, and can say nothing of it.

use godwit_balloon::FreeHints;
use godwit_units::{PageIndex, PageRun};

#[cfg(feature = "test-hooks")]
use super::fault::Fault;
use super::fault::MadeUp;

/// Of a dirty page or an extent of a disk: whether it is sent.
#[derive(Clone, Debug)]
pub(super) struct Slips {
    #[cfg(feature = "test-hooks")]
    made_up: MadeUp,
    #[cfg(feature = "test-hooks")]
    chosen: std::sync::Arc<std::sync::OnceLock<(usize, PageRun)>>,
    /// Pages that are left out as free for good.
    #[cfg(feature = "test-hooks")]
    believed: std::sync::Arc<std::sync::Mutex<std::collections::BTreeSet<(usize, u64)>>>,
}

impl Slips {
    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn new(_: MadeUp) -> Self {
        Self {}
    }

    #[cfg(feature = "test-hooks")]
    pub(super) fn new(made_up: MadeUp) -> Self {
        Self { made_up, chosen: std::sync::Arc::default(), believed: std::sync::Arc::default() }
    }

    /// The pages of `written` of block `block` that the guest had said are free were written since:
    /// whether that is believed of them all the same is a fault.
    #[cfg(feature = "test-hooks")]
    pub(super) fn written(&self, block: usize, written: PageRun, hints: &FreeHints) {
        if self.made_up.is(Fault::BelieveHints) {
            let mut believed =
                self.believed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            hints.skipped(block, written, |page| {
                believed.insert((block, page.0));
            });
        }
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn written(&self, _: usize, _: PageRun, _: &FreeHints) {}

    /// Whether `page` of block `block` is left out since it is believed to be free.
    #[cfg(feature = "test-hooks")]
    pub(super) fn believes(&self, (block, page): (usize, PageIndex)) -> bool {
        self.made_up.is(Fault::BelieveHints)
            && self
                .believed
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .contains(&(block, page.0))
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn believes(&self, _: (usize, PageIndex)) -> bool {
        false
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
        let skips = (all || one)
            && crate::stamped::is_checked(page, bytes)
            && changed()
            && (all || *self.chosen.get_or_init(|| this) == this);
        if skips {
            crate::stamped::tell_struck();
        }
        skips
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
        let drops = dropped.is_some_and(|(_, run)| (run.start..run.end()).contains(&page));
        if drops {
            crate::stamped::tell_struck();
        }
        drops
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn drops(&self, _: usize, _: (PageIndex, PageRun), _: &[u8]) -> bool {
        false
    }
}
