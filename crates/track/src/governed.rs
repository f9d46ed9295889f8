//! Which segments the governor has, and how one changes hands while the guest writes.
//!
//! A mapping belongs to one userfaultfd, and what that does is fixed when it is made
//! (userfaultfd.rst). So a segment goes from one descriptor to another, at its harvest:
//!
//! ```text
//!   unregister ─── register ─── protect ─── reported as dirty, all of it ─── its bytes are read
//!        └── a write in here leaves no trace ──┘
//! ```
//!
//! Invariant: *no write is lost*. A write in the gap comes before the segment is reported, and so
//! before its bytes are read. Whoever remembers what was sent (page fingerprints) sends what is
//! different, and no more. Outside the gap, a page that is not protected is dirty, whichever
//! descriptor protects it: the page tables are the log of both, and the governor's answers show
//! there like any other write.
//!
//! What was rejected: to keep a log of the answers. It would not see pages that lose their
//! protection otherwise.

use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_bitmap::DirtyBitmap;
use godwit_memory::SEGMENT_PAGES;
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};

use crate::TrackError;
use crate::governor::Governor;
use crate::mappings::BlockMapping;
use crate::protected::{Protected, Then};
use crate::uapi;

/// How many mappings a process may have where nothing else is set.
const MAPPINGS: usize = 65_530;

/// Who has a segment, and what of it is still to be reported since it changed hands.
#[derive(Debug)]
struct Segment {
    governed: bool,
    /// Pages, counted from the first of the segment, that count as dirty.
    unseen: Option<Box<DirtyBitmap>>,
}

/// The segments of all blocks, and their governor.
#[derive(Debug)]
pub(crate) struct Governed {
    pub(crate) governor: Governor,
    wanted: AtomicBool,
    /// A segment could not be handed over: all stay where they are.
    stuck: AtomicBool,
    count: AtomicUsize,
    cuts: Mutex<Cuts>,
    /// By block.
    segments: Vec<Vec<Mutex<Segment>>>,
    failure: Mutex<Option<String>>,
}

impl Governed {
    /// All segments of `blocks`, none of which is governed.
    pub(crate) fn new(pid: i32, governor: Governor, blocks: &[Vec<BlockMapping>]) -> Self {
        let free = || Mutex::new(Segment { governed: false, unseen: None });
        let of_block = |mapped: &Vec<BlockMapping>| {
            let pages = mapped.last().map_or(0, |mapping| mapping.pages.end().0);
            (0..pages.div_ceil(SEGMENT_PAGES)).map(|_| free()).collect()
        };
        let segments: Vec<Vec<_>> = blocks.iter().map(of_block).collect();
        let cuts =
            Cuts::new(room_for_cuts(pid), &segments.iter().map(Vec::len).collect::<Vec<_>>());
        Self {
            governor,
            wanted: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
            count: AtomicUsize::new(0),
            cuts: Mutex::new(cuts),
            segments,
            failure: Mutex::new(None),
        }
    }

    /// Whether segments are to be governed from their next harvest on, and at which rate.
    pub(crate) fn govern(&self, dirty_rate_limit: Option<f64>) {
        self.governor.set_rate(dirty_rate_limit.unwrap_or(f64::INFINITY));
        self.wanted.store(dirty_rate_limit.is_some(), Ordering::Relaxed);
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    pub(crate) fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn harvest(
        &self,
        memory: &Protected,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let mut left = limit.0;
        let mut at = within.start.0;
        let mut joined = Joined::new(found);
        while at < within.end().0 {
            let number = at / SEGMENT_PAGES;
            let end = ((number + 1) * SEGMENT_PAGES).min(within.end().0);
            let part = PageRun::new(at, end - at);
            let mut segment = self.segment(block, number);
            self.change_hands(memory, block, number, &mut segment)?;
            let (pages, next) =
                segment.harvest(self, memory, block, part, left, &mut |run| joined.add(run))?;
            drop(segment);
            at = next;
            if limit.0 > 0 {
                left = left.saturating_sub(pages);
                if left == 0 {
                    break;
                }
            }
        }
        joined.end();
        Ok(PageIndex(at))
    }

    pub(crate) fn look(
        &self,
        memory: &Protected,
        block: usize,
        within: PageRun,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        // Few segments have anything unseen; between those all is one scan.
        let mut joined = Joined::new(found);
        let mut at = within.start.0;
        for number in within.start.0 / SEGMENT_PAGES..within.end().0.div_ceil(SEGMENT_PAGES) {
            let segment = self.segment(block, number);
            let end = ((number + 1) * SEGMENT_PAGES).min(within.end().0);
            // What lies before this segment and was not reported yet goes with the next scan.
            let mut from = at.max(number * SEGMENT_PAGES);
            while from < end
                && let Some(unseen) = segment.next_unseen(from..end)
            {
                memory.scan(
                    block,
                    run_of(at..unseen.start),
                    Then::NothingIfGoverned,
                    0,
                    &mut |run| joined.add(run),
                )?;
                joined.add(run_of(unseen.clone()));
                (at, from) = (unseen.end, unseen.end);
            }
        }
        memory.scan(block, run_of(at..within.end().0), Then::NothingIfGoverned, 0, &mut |run| {
            joined.add(run)
        })?;
        joined.end();
        Ok(())
    }

    fn segment(&self, block: usize, number: u64) -> MutexGuard<'_, Segment> {
        self.segments[block][number as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a segment to the governor, or back, if that is wanted.
    fn change_hands(
        &self,
        memory: &Protected,
        block: usize,
        number: u64,
        segment: &mut Segment,
    ) -> Result<(), TrackError> {
        let wanted = self.wanted.load(Ordering::Relaxed);
        let pages = pages_of(memory, block, number);
        if wanted == segment.governed || self.stuck.load(Ordering::Relaxed) {
            return Ok(());
        }
        if wanted && !is_written(memory, block, &pages)? {
            return Ok(());
        }
        if !self.cuts().change(block, number as usize, wanted) {
            self.give_up(TOO_MANY);
            return Ok(());
        }
        let (from, to) =
            if wanted { (Hand::Tracker, Hand::Governor) } else { (Hand::Governor, Hand::Tracker) };
        let mut unseen = DirtyBitmap::new(PageCount(SEGMENT_PAGES));
        unseen.set(PageRun::new(0, pages.end - pages.start));
        segment.unseen = Some(Box::new(unseen));
        let moved = self.pass(memory, block, &pages, from, to);
        let Err(source) = moved else {
            segment.governed = wanted;
            if wanted {
                self.count.fetch_add(1, Ordering::Relaxed);
            } else {
                self.count.fetch_sub(1, Ordering::Relaxed);
            }
            return Ok(());
        };
        self.give_up(&source.to_string());
        self.cuts().change(block, number as usize, !wanted);
        // Back to where it was; what of it was not passed on yet has never left.
        self.pass(memory, block, &pages, to, from).map_err(|source| TrackError::Switch {
            block,
            pages,
            source,
        })
    }

    /// No other segment changes hands. Whoever governs next is told so, and takes to other means.
    fn give_up(&self, why: &str) {
        self.stuck.store(true, Ordering::Relaxed);
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_owned());
    }

    fn cuts(&self) -> MutexGuard<'_, Cuts> {
        self.cuts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From one descriptor to the other.
    fn pass(
        &self,
        memory: &Protected,
        block: usize,
        pages: &Range<u64>,
        from: Hand,
        to: Hand,
    ) -> io::Result<()> {
        let descriptor = |hand| match hand {
            Hand::Tracker => memory.attachment.userfaultfd(),
            Hand::Governor => self.governor.userfaultfd(),
        };
        for (address, length) in addresses(memory, block, run_of(pages.clone())) {
            match uapi::uffd_unregister(descriptor(from), address, length) {
                // It is the other's (fs/userfaultfd.c, `userfaultfd_unregister`), which is where it
                // is to be.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                result => result?,
            }
            uapi::uffd_register_wp(descriptor(to), address, length)?;
            // The tracker's part is protected by the harvest that follows.
            if to == Hand::Governor {
                uapi::uffd_write_protect(descriptor(to), address, length, true)?;
            }
        }
        Ok(())
    }

    /// Protects `run` again.
    fn protect(&self, memory: &Protected, block: usize, run: PageRun) -> Result<(), TrackError> {
        addresses(memory, block, run).try_for_each(|(address, length)| {
            uapi::uffd_write_protect(self.governor.userfaultfd(), address, length, true)
                .map_err(|source| TrackError::Scan { block, source })
        })
    }
}

/// A segment that nobody writes is left as it is: to hand it over would have all of it read again.
fn is_written(memory: &Protected, block: usize, pages: &Range<u64>) -> Result<bool, TrackError> {
    let mut written = false;
    memory
        .scan(block, run_of(pages.clone()), Then::NothingIfGoverned, 1, &mut |_| written = true)?;
    Ok(written)
}

const TOO_MANY: &str = "the process would have more mappings than it may (vm.max_map_count): raise \
                        that, or let vCPUs be throttled";

/// Where mappings are cut in two, since a segment and its neighbour belong to different
/// descriptors. The kernel makes neighbours of one descriptor one mapping again (mm/vma.c,
/// `vma_modify_flags_uffd`), so a guest that is governed as a whole is not cut at all, however
/// large it is.
#[derive(Debug)]
struct Cuts {
    /// By block and segment.
    governed: Vec<Vec<bool>>,
    count: usize,
    most: usize,
}

impl Cuts {
    /// No segment is governed; `segments` says how many each block has.
    fn new(most: usize, segments: &[usize]) -> Self {
        Self {
            governed: segments.iter().map(|&count| vec![false; count]).collect(),
            count: 0,
            most,
        }
    }

    /// Takes note that a segment is governed from now on, or not any more; `false`, and nothing
    /// noted, if that would be too many cuts. To take one back is never refused.
    fn change(&mut self, block: usize, segment: usize, governed: bool) -> bool {
        let of_block = &self.governed[block];
        if of_block[segment] == governed {
            return true;
        }
        let before = segment.checked_sub(1).and_then(|before| of_block.get(before));
        let neighbours = [before, of_block.get(segment + 1)];
        let others =
            neighbours.iter().flatten().filter(|&&&neighbour| neighbour != governed).count();
        let same = neighbours.iter().flatten().count() - others;
        let count = (self.count + others).saturating_sub(same);
        if governed && count > self.most {
            return false;
        }
        self.count = count;
        self.governed[block][segment] = governed;
        true
    }
}

/// How many cuts process `pid` can take: half of the mappings that it may still make, since it
/// makes some by itself.
fn room_for_cuts(pid: i32) -> usize {
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    let most = most.trim().parse().unwrap_or(MAPPINGS);
    let now =
        std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default().lines().count();
    most.saturating_sub(now) / 2
}

/// The two descriptors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hand {
    Tracker,
    Governor,
}

impl Segment {
    /// Harvests `part` of this segment, in order; how many pages were reported, and the page to go
    /// on from.
    fn harvest(
        &mut self,
        governed: &Governed,
        memory: &Protected,
        block: usize,
        part: PageRun,
        limit: u64,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(u64, u64), TrackError> {
        let (mut at, end) = (part.start.0, part.end().0);
        let mut pages = 0;
        while at < end && (limit == 0 || pages < limit) {
            let left = if limit == 0 { 0 } else { limit - pages };
            let unseen = self.next_unseen(at..end);
            let known = run_of(at..unseen.as_ref().map_or(end, |unseen| unseen.start));
            if known.count > PageCount::ZERO {
                let (found_here, next) = self.scan(governed, memory, block, known, left, found)?;
                (pages, at) = (pages + found_here, next);
            } else if let Some(unseen) = unseen {
                let most = if left == 0 { u64::MAX } else { left };
                let reported = run_of(at..unseen.end.min(at.saturating_add(most)));
                // Protected before it is read, like all that is reported.
                self.scan(governed, memory, block, reported, 0, &mut |_| {})?;
                found(reported);
                self.see(reported);
                (pages, at) = (pages + reported.count.0, reported.end().0);
            }
        }
        Ok((pages, at))
    }

    /// The first stretch of pages of the block, within `pages` and this segment, that count as
    /// dirty.
    fn next_unseen(&self, pages: Range<u64>) -> Option<Range<u64>> {
        let unseen = self.unseen.as_ref()?;
        let first = pages.start / SEGMENT_PAGES * SEGMENT_PAGES;
        let within = run_of(pages.start - first..(pages.end - first).min(SEGMENT_PAGES));
        let found = unseen.try_for_each_run_in(within, ControlFlow::Break).break_value()?;
        Some(first + found.start.0..first + found.end().0)
    }

    /// `run` was reported.
    fn see(&mut self, run: PageRun) {
        if let Some(unseen) = &mut self.unseen {
            unseen.clear(PageRun::new(run.start.0 % SEGMENT_PAGES, run.count.0));
            if unseen.count() == PageCount::ZERO {
                self.unseen = None;
            }
        }
    }

    /// Reports what is not protected in `part` and protects it.
    fn scan(
        &self,
        governed: &Governed,
        memory: &Protected,
        block: usize,
        part: PageRun,
        limit: u64,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(u64, u64), TrackError> {
        let mut pages = 0;
        let mut note = |run: PageRun| {
            pages += run.count.0;
            found(run);
        };
        let next = if self.governed {
            let mut result = Ok(());
            let next = memory.scan(block, part, Then::NothingIfGoverned, limit, &mut |run| {
                // Between the scan and this, more may have been written: those pages stay as they
                // are, for next time.
                if result.is_ok() {
                    result = governed.protect(memory, block, run);
                }
                note(run);
            })?;
            result?;
            next
        } else {
            memory.scan(block, part, Then::Protect, limit, &mut note)?
        };
        Ok((pages, next.0))
    }
}

/// The pages of segment `number` of a block.
fn pages_of(memory: &Protected, block: usize, number: u64) -> Range<u64> {
    let end = memory.blocks[block].last().map_or(0, |mapping| mapping.pages.end().0);
    number * SEGMENT_PAGES..((number + 1) * SEGMENT_PAGES).min(end)
}

/// Where `run` is mapped: addresses and lengths in bytes.
fn addresses(
    memory: &Protected,
    block: usize,
    run: PageRun,
) -> impl Iterator<Item = (u64, u64)> + '_ {
    memory.blocks[block].iter().filter_map(move |mapping| {
        let part = mapping.pages.intersect(run)?;
        let offset = (part.start.0 - mapping.pages.start.0) * PAGE_SIZE;
        Some((mapping.address.0 + offset, part.count.bytes().0))
    })
}

fn run_of(pages: Range<u64>) -> PageRun {
    PageRun::new(pages.start, pages.end.saturating_sub(pages.start))
}

/// Makes runs that touch into one: reports are maximal runs, whatever they were put together from.
struct Joined<'a> {
    last: Option<PageRun>,
    found: &'a mut dyn FnMut(PageRun),
}

impl<'a> Joined<'a> {
    fn new(found: &'a mut dyn FnMut(PageRun)) -> Self {
        Self { last: None, found }
    }

    fn add(&mut self, run: PageRun) {
        if run.count == PageCount::ZERO {
            return;
        }
        match &mut self.last {
            Some(last) if last.end() == run.start => last.count += run.count,
            last => {
                if let Some(before) = last.replace(run) {
                    (self.found)(before);
                }
            }
        }
    }

    fn end(self) {
        if let Some(last) = self.last {
            (self.found)(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_is_governed_as_a_whole_is_not_cut() {
        // A terabyte; the limit that counted segments was 16,384.
        let mut cuts = Cuts::new(4, &[65_536]);
        for segment in 0..65_536 {
            assert!(cuts.change(0, segment, true), "{segment}");
        }
        assert_eq!(cuts.count, 0);
        assert!((0..65_536).all(|segment| cuts.change(0, segment, false)));
        assert_eq!(cuts.count, 0);
    }

    #[test]
    fn cuts_are_counted_and_bounded() {
        let mut cuts = Cuts::new(4, &[10, 2]);
        assert!(cuts.change(0, 1, true) && cuts.change(0, 3, true));
        assert_eq!(cuts.count, 4);
        assert!(!cuts.change(0, 6, true), "a third island has two more");
        assert!(cuts.change(0, 2, true), "one that joins two takes two away");
        assert_eq!(cuts.count, 2);
        assert!(cuts.change(1, 1, true));
        assert_eq!(cuts.count, 3);
        // Taking back is never refused, whatever it cuts.
        assert!(cuts.change(0, 2, false) && cuts.count == 5);
        assert!(cuts.change(0, 1, false) && cuts.change(0, 3, false) && cuts.change(1, 1, false));
        assert_eq!(cuts.count, 0);
    }
}
