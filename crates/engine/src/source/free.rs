//! Pages that the guest says are free: asked for before the first round in which memory is sent,
//! left out when their segment is first dealt with.
//!
//! Invariant: hints are asked for after tracking has begun, and only while pages are first dealt
//! with. Why a page that is left out this way is no loss is said at the head of `godwit-balloon`.
//! At the destination it is zero, because it is named so; `--verify` therefore takes it for zero
//! here as well. Pages that a balloon has given back are looked for when there are enough of them.

use super::*;

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

impl Source<'_> {
    /// Where hints will go, if this guest gives any.
    pub(super) fn make_free_hints(&mut self) -> Option<Arc<FreeHints>> {
        // Data of direct I/O lands unseen, so a page may be written though no harvest says so.
        let wanted = self.vm.was_running() && !self.direct_io && self.vm.free_pages().is_some();
        let sizes: Vec<PageCount> = self.ram.iter().map(RamBlock::pages).collect();
        wanted.then(|| Arc::new(FreeHints::new(&sizes)))
    }

    /// Asks for hints when memory is about to be sent for the first time, in `round`, and waits
    /// while they come.
    pub(super) fn ask_for_free_pages(&mut self, round: u32) -> Result<(), EngineError> {
        let Some(hints) = &self.free else { return Ok(()) };
        if self.hinted_round.is_some() || self.link_share.share() == 0 {
            return Ok(());
        }
        self.hinted_round = Some(round);
        let hints = Arc::clone(hints);
        if let (true, Some(table), Some(tracker)) = (round > 0, &self.table, &self.tracker) {
            // Disks came first. What was written meanwhile may be free by now, and none of it was
            // sent.
            table.arm(tracker.as_ref(), rounds::ARMING)?;
        }
        if !self.vm.free_pages().is_some_and(|guest| guest.start_free_page_hints(&hints)) {
            return Ok(());
        }
        let began = Instant::now();
        let (mut seen, mut until) = (PageCount::ZERO, began + FIRST_HINT);
        while !hints.is_complete() && Instant::now() < until && began.elapsed() < ALL_HINTS {
            if let Some(event) = self.next_event(LOOK)? {
                return Err(Self::out_of_place(event));
            }
            if hints.hinted() != seen {
                (seen, until) = (hints.hinted(), Instant::now() + NEXT_HINT);
            }
        }
        Ok(())
    }

    /// Whether the RAM files have become smaller since this was last so. What was given back while
    /// as much was touched for the first time is not seen; it stays at the destination as it was
    /// sent, which costs memory there and does no harm.
    pub(super) fn was_given_back(&mut self) -> bool {
        let allocated = self.ram.iter().map(RamBlock::allocated).sum::<Result<PageCount, _>>();
        let Ok(allocated) = allocated else { return false };
        let given_back = allocated + GIVEN_BACK <= self.allocated;
        self.allocated = if given_back { allocated } else { self.allocated.max(allocated) };
        given_back
    }

    /// The round is over for which hints were asked: what is hinted from now on would be looked at
    /// by nobody.
    pub(super) fn have_free_pages(&mut self, round: u32) {
        if self.hinted_round == Some(round) {
            self.vm.free_pages().into_iter().for_each(|guest| guest.stop_free_page_hints());
        }
    }
}
