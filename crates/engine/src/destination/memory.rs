//! Guest memory as a place for pages.
//!
//! Invariant: a segment's pages come over its own channel only, or, where both sides can, over any:
//! in one round all over one, or each once ([`Claims`]). That is checked. The source begins no
//! round before all of the one before it is in place, so no older version of a page can land on a
//! newer one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use godwit_memory::{RamBlock, channel_of};
use godwit_units::{PageBuffer, PageIndex, PageRun};
use godwit_wire::Content;

use super::arriving::Arriving;
use super::channel::{PEER, PageSink};
use super::claims::Claims;
use super::proof::Placed;
use super::slips::Slips;
use crate::EngineError;

/// What one channel of memory fills.
pub(super) struct MemoryPlace {
    /// Of how many channels of memory which one this is.
    pub(super) number: usize,
    pub(super) channels: usize,
    /// Where pages may come over any of them: which came over which. `None`: each segment comes
    /// over its own.
    pub(super) claims: Option<Arc<Claims>>,
    /// Rounds that have ended on this channel.
    pub(super) rounds: u32,
    pub(super) blocks: Arc<Vec<RamBlock>>,
    /// The source's number of a block -> ours.
    pub(super) order: Arc<Vec<usize>>,
    /// Where what was placed is marked, so that it is read back.
    pub(super) placed: Option<Arc<Placed>>,
    /// What is read back goes through this.
    pub(super) read_back: PageBuffer,
    /// Behind the word that pages are missing: what places these.
    pub(super) arriving: Arc<OnceLock<Arc<Arriving>>>,
    /// Until that is there nothing may come.
    pub(super) closed: Arc<AtomicBool>,
    /// What is got wrong on purpose.
    pub(super) slips: Slips,
    /// A fault made up: pages are taken over any channel.
    #[cfg(test)]
    pub(super) unchecked: bool,
}

impl MemoryPlace {
    /// Our number of block `number`.
    fn own(&self, number: usize) -> Result<usize, EngineError> {
        let own = self.order.get(number).ok_or_else(|| EngineError::Protocol {
            peer: PEER,
            what: format!(
                "it sent pages of number {number} over channel {}, which carries {} RAM blocks",
                self.number,
                self.order.len()
            ),
        })?;
        Ok(*own)
    }

    fn block(&self, number: usize) -> Result<&RamBlock, EngineError> {
        self.own(number).map(|own| &self.blocks[own])
    }

    /// Whether `run` of block `number` may come over this channel now.
    fn may_come(&self, number: usize, run: PageRun) -> bool {
        match &self.claims {
            _ if self.channels == 1 => true,
            Some(claims) => claims.claim((number, run), self.number, self.rounds),
            None => belongs(number, run, self.number, self.channels),
        }
    }
}

impl PageSink for MemoryPlace {
    fn check(&self, number: usize) -> Result<(), EngineError> {
        self.block(number).map(drop)
    }

    fn is_memory(&self) -> bool {
        true
    }

    fn ended(&self) {
        // A machine that loads may wait for a page that would have come this way.
        if let Some(arriving) = self.arriving.get() {
            arriving.starve();
        }
    }

    fn name(&self, number: usize) -> String {
        format!("RAM block '{}'", self.block(number).map_or("?", RamBlock::name))
    }

    fn place(
        &mut self,
        number: usize,
        run: PageRun,
        content: Content,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        if let Some(arriving) = self.arriving.get() {
            // Each is placed once and holds the same whenever it comes, so any channel will do.
            let own = self.own(number)?;
            let pages = self.blocks[own].pages();
            if run.end().0 > pages.0 {
                let what = format!("it sent page {} of a block of {pages}", run.end());
                return Err(EngineError::Protocol { peer: PEER, what });
            }
            return arriving.place(own, run, content, bytes);
        }
        if self.closed.load(Ordering::SeqCst) {
            let what = "it sent pages behind the word that some are missing".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        #[cfg(test)]
        let unchecked = self.unchecked;
        #[cfg(not(test))]
        let unchecked = false;
        if !unchecked && !self.may_come(number, run) {
            let what =
                format!("it sent {} from {} over channel {}", run.count, run.start, self.number);
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        let own = self.own(number)?;
        let (block, mark) = (&self.blocks[own], marking(self.placed.as_deref()));
        match content {
            Content::Data => {
                self.slips.before((own, block), run, bytes)?;
                block.write(run.start, bytes)?;
                self.slips.after((own, block), run, bytes, &mut |run| mark(own, run))?;
                if let Some(placed) = &self.placed {
                    placed.placed((own, block), run, &mut self.read_back)?;
                }
            }
            Content::Zero => {
                block.zero(run)?;
                mark(own, run);
            }
        }
        Ok(())
    }

    fn end_round(&mut self, last: bool) -> Result<(), EngineError> {
        self.rounds += 1;
        let mark = marking(self.placed.as_deref());
        Ok(self.slips.end_round(&self.blocks, last, &mut |own, run| mark(own, run))?)
    }

    fn settle(&mut self) -> Result<(), EngineError> {
        Ok(())
    }

    fn rest(&mut self) -> Result<(), EngineError> {
        Ok(self.slips.rest(&self.blocks)?)
    }
}

/// Marks a run of a block as placed: behind the write, so that whoever takes the mark reads what
/// was written.
fn marking(placed: Option<&Placed>) -> impl Fn(usize, PageRun) + '_ {
    move |own, run| {
        if let Some(placed) = placed {
            placed.mark(own, run);
        }
    }
}

/// Whether all of `run` lies in segments of channel `number`, of several. A run is joined over
/// segments only where neighbours share a channel, that is where there is but one.
fn belongs(block: usize, run: PageRun, number: usize, channels: usize) -> bool {
    let last = PageIndex(run.end().0 - 1);
    channel_of(block, run.start, channels) == number
        && channel_of(block, last, channels) == number
        && run.count.0 <= godwit_memory::SEGMENT_PAGES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_must_lie_in_segments_of_its_channel() {
        let pages = godwit_memory::SEGMENT_PAGES;
        assert!(belongs(0, PageRun::new(0, pages), 0, 2));
        assert!(!belongs(0, PageRun::new(0, pages), 1, 2));
        assert!(!belongs(0, PageRun::new(pages - 1, 2), 0, 2));
        assert!(!belongs(0, PageRun::new(0, 2 * pages + 1), 0, 2));
        assert!(belongs(1, PageRun::new(0, 1), 1, 2));
    }
}
