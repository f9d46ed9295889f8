//! The buffer of stamped pages: writing to it at random, re-reading it in order.
//!
//! Keeps the expected generation of every page apart from the pages, so a page that is stale but
//! consistent in itself is a bug. Each bug is reported once: the page is put right after its
//! evidence was taken. Knows no clock: when to write is left to [`crate::pace`] and the guest's
//! main loop.

use core::fmt;
use core::ops::DerefMut;

use godwit_units::PageCount;

use crate::stamp::{Fault, Page, STAMPS};

/// One cheap look in this many is followed by a look at a whole page.
const LOOKS_PER_WHOLE_PAGE: u64 = 64;

/// Evidence that a page does not hold what was last written to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bug {
    /// The page's number.
    pub page: u64,
    /// The generation it should have.
    pub generation: u64,
    /// What is wrong.
    pub fault: Fault,
    /// The three stamps as found.
    pub stamps: [[u64; 3]; 3],
}

impl fmt::Display for Bug {
    /// One line; a test looks for `BUG` at its start.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { page, generation, fault, stamps } = self;
        write!(f, "BUG page={page} expected=generation {generation} found={fault} (stamps")?;
        for [index, generation, check] in stamps {
            write!(f, " {index:x}/{generation:x}/{check:016x}")?;
        }
        write!(f, ")")
    }
}

/// In which order pages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Order {
    /// At random, each page as likely as any other.
    #[default]
    Random,
    /// At random by Zipf's law, with the exponent 1: page `n` about `1/n` as often as the first.
    HotCold,
    /// At random, nine writes of ten to the first tenth of the pages.
    HotTenth,
    /// One after the other, and from the start again.
    Sequential,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Random => "random",
            Self::HotCold => "hot-cold",
            Self::HotTenth => "hot-tenth",
            Self::Sequential => "sequential",
        })
    }
}

/// The buffer, what it should hold, and how much was done.
///
/// The buffer is a `Vec` in a program that has a heap ([`crate::heap`]), and a slice of bare memory
/// in one that has none.
#[derive(Debug)]
pub struct Workload<P, G> {
    pages: P,
    generations: G,
    /// The number of the first page; the others follow.
    first: u64,
    working_set: u64,
    order: Order,
    random: u64,
    next_look: usize,
    next_whole: usize,
    writes: u64,
    checked: u64,
}

impl<P: DerefMut<Target = [Page]>, G: DerefMut<Target = [u64]>> Workload<P, G> {
    /// Takes over `pages`, not none, each filled by [`Page::first`] with its number, from `first`
    /// on, and as many `generations`, all 0. The first `working_set` pages are written later;
    /// beyond the buffer it is cut down to it.
    #[must_use]
    pub fn over(pages: P, generations: G, first: u64, working_set: PageCount) -> Self {
        let count = pages.len() as u64;
        Self {
            pages,
            generations,
            first,
            working_set: working_set.0.clamp(1, count),
            order: Order::default(),
            random: 0x9e37_79b9_7f4a_7c15,
            next_look: 0,
            next_whole: 0,
            writes: 0,
            checked: 0,
        }
    }

    /// The same, written in another order.
    #[must_use]
    pub fn in_order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Writes the next version of a page of the working set.
    #[inline]
    pub fn write(&mut self) {
        let at = self.next_write() as usize;
        let generation = self.generations[at] + 1;
        self.generations[at] = generation;
        self.pages[at].restamp(self.first + at as u64, generation);
        self.writes += 1;
    }

    #[inline]
    fn next_write(&mut self) -> u64 {
        if self.order == Order::Sequential {
            return self.writes % self.working_set;
        }
        let random = self.next_random();
        if self.order == Order::Random {
            return below(random, self.working_set);
        }
        if self.order == Order::HotTenth {
            let hot = self.working_set.div_ceil(10);
            let at = self.next_random();
            let is_hot = hot == self.working_set || below(random, 10) < 9;
            return if is_hot { below(at, hot) } else { hot + below(at, self.working_set - hot) };
        }
        // Each power of two as likely as any other, and within it each page: that is a staircase
        // under 1/n, and takes no floating point.
        let steps = u64::from(self.working_set.ilog2()) + 1;
        let first = 1 << below(random, steps);
        let width = first.min(self.working_set + 1 - first);
        first - 1 + below(self.next_random(), width)
    }

    #[inline]
    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Looks at the stamps of the next page in order, and now and then at the whole of another one.
    #[inline]
    pub fn check(&mut self) -> Option<Bug> {
        let at = self.next_look;
        self.next_look = if at + 1 == self.pages.len() { 0 } else { at + 1 };
        self.checked += 1;
        if !self.pages[at].stamps_match(self.first + at as u64, self.generations[at]) {
            return self.inspect(at);
        }
        if self.checked.is_multiple_of(LOOKS_PER_WHOLE_PAGE) { self.check_whole() } else { None }
    }

    /// Looks at every word of the next page in order.
    pub fn check_whole(&mut self) -> Option<Bug> {
        let at = self.next_whole;
        self.next_whole = (at + 1) % self.pages.len();
        self.inspect(at)
    }

    fn inspect(&mut self, at: usize) -> Option<Bug> {
        let (index, generation) = (self.first + at as u64, self.generations[at]);
        let page = &mut self.pages[at];
        let fault = page.inspect(index, generation).err()?;
        let stamps = STAMPS.map(|at| [page.0[at], page.0[at + 1], page.0[at + 2]]);
        *page = Page::expected(index, generation);
        Some(Bug { page: index, generation, fault, stamps })
    }

    /// Pages in the buffer.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        PageCount(self.pages.len() as u64)
    }

    /// Pages in the working set.
    #[must_use]
    pub fn working_set(&self) -> PageCount {
        PageCount(self.working_set)
    }

    /// Page writes so far, the filling not counted.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// Cheap looks so far.
    #[must_use]
    pub fn checked(&self) -> u64 {
        self.checked
    }
}

/// Maps a random word to `0..limit`: the high half of a product instead of a division.
#[inline]
fn below(random: u64, limit: u64) -> u64 {
    ((u128::from(random) * u128::from(limit)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::HeapWorkload;

    fn busy(writes: usize) -> HeapWorkload {
        let mut workload = HeapWorkload::fill(PageCount(64), PageCount(16));
        (0..writes).for_each(|_| workload.write());
        workload
    }

    fn bugs_of_one_pass(workload: &mut HeapWorkload) -> Vec<Bug> {
        (0..workload.pages.len()).filter_map(|_| workload.check()).collect()
    }

    #[test]
    fn an_undamaged_buffer_has_no_bug() {
        let mut workload = busy(0);
        for _ in 0..20_000 {
            workload.write();
            assert_eq!(workload.check(), None);
        }
        assert!((0..64).all(|_| workload.check_whole().is_none()));
    }

    #[test]
    fn writes_reach_the_whole_working_set_and_nothing_else() {
        let workload = busy(2000);
        assert!(workload.generations[..16].iter().all(|&generation| generation > 0));
        assert!(workload.generations[16..].iter().all(|&generation| generation == 0));
        assert_eq!(workload.generations.iter().sum::<u64>(), workload.writes());
    }

    #[test]
    fn hot_pages_are_written_more_often_and_cold_ones_too() {
        let mut workload =
            HeapWorkload::fill(PageCount(64), PageCount(50)).in_order(Order::HotCold);
        (0..60_000).for_each(|_| workload.write());
        let written = &workload.generations;
        assert!(written[..50].iter().all(|&generation| generation > 0));
        assert!(written[50..].iter().all(|&generation| generation == 0));
        // Six steps of 1, 2, 4, 8, 16 and 19 pages, 10,000 writes each.
        assert!((9_000..11_000).contains(&written[0]), "{}", written[0]);
        assert!((8_000..12_000).contains(&written[31..50].iter().sum::<u64>()));
    }

    #[test]
    fn nine_writes_of_ten_go_to_a_tenth() {
        let mut workload =
            HeapWorkload::fill(PageCount(64), PageCount(50)).in_order(Order::HotTenth);
        (0..60_000).for_each(|_| workload.write());
        let written = &workload.generations;
        assert!((53_000..55_000).contains(&written[..5].iter().sum::<u64>()));
        assert!(written[5..50].iter().all(|&generation| generation > 0));
        assert!(written[50..].iter().all(|&generation| generation == 0));
    }

    #[test]
    fn sequential_writes_take_turns() {
        let mut workload =
            HeapWorkload::fill(PageCount(64), PageCount(16)).in_order(Order::Sequential);
        (0..40).for_each(|_| workload.write());
        assert!(workload.generations[..8].iter().all(|&generation| generation == 3));
        assert!(workload.generations[8..16].iter().all(|&generation| generation == 2));
    }

    #[test]
    fn a_lost_write_is_a_bug_with_evidence_and_reported_once() {
        let mut workload = busy(200);
        let old = workload.pages[3].clone();
        let generation = workload.generations[3];
        workload.generations[3] += 1;
        workload.pages[3].restamp(3, generation + 1);
        workload.pages[3] = old;

        let bugs = bugs_of_one_pass(&mut workload);

        assert_eq!(bugs.len(), 1);
        assert_eq!((bugs[0].page, bugs[0].generation), (3, generation + 1));
        assert_eq!(bugs[0].fault, Fault::OtherGeneration { found: generation });
        assert!(bugs[0].to_string().starts_with("BUG page=3 expected=generation "));
        assert!(bugs_of_one_pass(&mut workload).is_empty());
    }

    #[test]
    fn swapped_pages_are_two_bugs() {
        let mut workload = busy(200);
        workload.pages.swap(20, 30);
        let faults: Vec<_> =
            bugs_of_one_pass(&mut workload).into_iter().map(|bug| bug.fault).collect();
        assert_eq!(faults, [Fault::OtherPage { found: 30 }, Fault::OtherPage { found: 20 }]);
    }

    #[test]
    fn a_zeroed_page_is_a_bug() {
        let mut workload = busy(200);
        workload.pages[40].0 = [0; 512];
        let bugs = bugs_of_one_pass(&mut workload);
        assert!(matches!(bugs[..], [Bug { page: 40, fault: Fault::Zeroed, .. }]), "{bugs:?}");
    }

    #[test]
    fn damage_between_the_stamps_is_found_by_the_looks_at_whole_pages() {
        let mut workload = busy(200);
        workload.pages[40].0[400] = 1;
        let looks = 64 * LOOKS_PER_WHOLE_PAGE;
        let bugs: Vec<_> = (0..looks).filter_map(|_| workload.check()).collect();
        assert!(
            matches!(bugs[..], [Bug { page: 40, fault: Fault::FlippedBit { word: 400, .. }, .. }]),
            "{bugs:?}"
        );
    }
}
