//! Pages that the guest says are free, or that its balloon has given back. It is asked before the
//! first round in which memory is sent; what it says is left out when its segment is first dealt
//! with.
//!
//! Invariant: hints are asked for after tracking has begun, and only while pages are first dealt
//! with. Why a page that is left out this way is no loss is said at the head of `godwit-balloon`.
//! At the destination it is zero, because it is named so; `--verify` therefore takes it for zero
//! here as well. Pages that a balloon has given back are looked for when there are enough of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_balloon::FreeHints;
use godwit_memory::RamBlock;
use godwit_track::DirtyTracker;
use godwit_units::PageCount;

use super::segment_table::{ARMING, SegmentTable};
use super::session::Session;
use crate::EngineError;
use crate::vm::SourceVm;

/// How long the guest may take to begin, and to go on, before the first round starts without more
/// hints. What comes later counts as far as it comes in time.
const FIRST_HINT: Duration = Duration::from_millis(100);
const NEXT_HINT: Duration = Duration::from_millis(20);
/// And in all: a guest of a TiB need not be waited for.
const ALL_HINTS: Duration = Duration::from_secs(1);
/// Memory that must have been given back before it is worth a search for where it was: that takes a
/// look at all extents of data.
const GIVEN_BACK: PageCount = PageCount(1024);
const LOOK: Duration = Duration::from_millis(1);

pub(super) struct FreeMemory {
    ram: Arc<Vec<RamBlock>>,
    /// Where hints go, if this guest gives any.
    hints: Option<Arc<FreeHints>>,
    /// The round before which the guest was asked for them.
    asked: Option<u32>,
    /// The most that the RAM files took since holes were last looked for.
    allocated: PageCount,
}

impl FreeMemory {
    /// Of a guest. Where its writes are `unseen` hints are of no use: with direct I/O a page may be
    /// written though no harvest says so.
    pub(super) fn new(vm: &mut dyn SourceVm, unseen: bool) -> Self {
        let ram = vm.ram();
        let wanted = vm.was_running() && !unseen && vm.free_pages().is_some();
        let sizes: Vec<PageCount> = ram.iter().map(RamBlock::pages).collect();
        let hints = wanted.then(|| Arc::new(FreeHints::new(&sizes)));
        let mut free = Self { ram, hints, asked: None, allocated: PageCount::ZERO };
        free.was_given_back();
        free
    }

    /// What the guest says is free, if it says anything.
    pub(super) fn hints(&self) -> Option<&Arc<FreeHints>> {
        self.hints.as_ref()
    }

    /// Asks for hints before `round`, if memory is about to be sent in it for the first time, and
    /// waits while they come.
    pub(super) fn ask(
        &mut self,
        vm: &mut dyn SourceVm,
        session: &mut Session,
        (segments, tracker): (&SegmentTable, &dyn DirtyTracker),
        round: u32,
    ) -> Result<(), EngineError> {
        let Some(hints) = &self.hints else { return Ok(()) };
        if self.asked.is_some() {
            return Ok(());
        }
        self.asked = Some(round);
        if round > 0 {
            // Disks came first. What was written meanwhile may be free by now, and none of it was
            // sent.
            segments.arm(tracker, ARMING)?;
        }
        if !vm.free_pages().is_some_and(|guest| guest.start_free_page_hints(hints)) {
            return Ok(());
        }
        let began = Instant::now();
        let (mut seen, mut until) = (PageCount::ZERO, began + FIRST_HINT);
        while !hints.is_complete() && Instant::now() < until && began.elapsed() < ALL_HINTS {
            session.pause(vm, LOOK)?;
            if hints.hinted() != seen {
                (seen, until) = (hints.hinted(), Instant::now() + NEXT_HINT);
            }
        }
        Ok(())
    }

    /// Whether the RAM files have become smaller since this was last so. What was given back while
    /// as much was touched for the first time is not seen; it stays at the destination as it was
    /// sent, which costs memory there and does no harm.
    ///
    /// Not to be asked as long as memory with data has not had its turn: pages that were made clean
    /// and never touched are marked, the kernel reports these marks as pages in the swap, and when
    /// a page is read it is a hole again.
    pub(super) fn was_given_back(&mut self) -> bool {
        let allocated = self.ram.iter().map(RamBlock::allocated).sum::<Result<PageCount, _>>();
        let Ok(allocated) = allocated else { return false };
        let given_back = allocated + GIVEN_BACK <= self.allocated;
        self.allocated = if given_back { allocated } else { self.allocated.max(allocated) };
        given_back
    }

    /// The round was cut off: what is hinted from now on would be looked at by nobody.
    pub(super) fn stop(&self, vm: &mut dyn SourceVm) {
        if let (Some(_), Some(guest)) = (self.asked, vm.free_pages()) {
            guest.stop_free_page_hints();
        }
    }

    /// `round` is over. If hints were asked for before it: what is hinted from now on would be
    /// looked at by nobody.
    pub(super) fn end_round(&self, vm: &mut dyn SourceVm, round: u32) {
        if self.asked == Some(round)
            && let Some(guest) = vm.free_pages()
        {
            guest.stop_free_page_hints();
        }
    }
}
