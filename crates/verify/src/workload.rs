//! The buffer of stamped pages: writing to it at random, re-reading it in order.
//!
//! Keeps the expected generation of every page apart from the pages, so a page that is stale but consistent in itself
//! is a bug. Each bug is reported once: the page is put right after its evidence was taken. Knows no clock: when to
//! write is left to [`crate::pace`] and the guest's main loop.

use std::fmt;

use godwit_units::PageCount;

use crate::stamp::{Fault, Page, STAMPS};

/// One cheap look in this many is followed by a look at a whole page.
const LOOKS_PER_WHOLE_PAGE: u64 = 64;

/// Evidence that a page does not hold what was last written to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bug {
    /// The page's place in the buffer.
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

/// The buffer, what it should hold, and how much was done.
#[derive(Debug)]
pub struct Workload {
    pages: Vec<Page>,
    generations: Vec<u64>,
    working_set: u64,
    random: u64,
    next_look: usize,
    next_whole: usize,
    writes: u64,
    checked: u64,
}

impl Workload {
    /// Fills a buffer of `pages` pages, of which the first `working_set` are written later (at least one).
    ///
    /// `working_set` beyond the buffer is cut down to it.
    #[must_use]
    pub fn fill(pages: PageCount, working_set: PageCount) -> Self {
        let count = pages.0.max(1);
        Self {
            pages: (0..count).map(Page::first).collect(),
            generations: (0..count).map(|_| 0).collect(),
            working_set: working_set.0.clamp(1, count),
            random: 0x9e37_79b9_7f4a_7c15,
            next_look: 0,
            next_whole: 0,
            writes: 0,
            checked: 0,
        }
    }

    /// Writes the next version of a random page of the working set.
    #[inline]
    pub fn write(&mut self) {
        // Xorshift for the order, and the high half of a product instead of a division for the range.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let at = ((u128::from(self.random) * u128::from(self.working_set)) >> 64) as usize;
        let generation = self.generations[at] + 1;
        self.generations[at] = generation;
        self.pages[at].restamp(at as u64, generation);
        self.writes += 1;
    }

    /// Looks at the stamps of the next page in order, and now and then at the whole of another one.
    #[inline]
    pub fn check(&mut self) -> Option<Bug> {
        let at = self.next_look;
        self.next_look = if at + 1 == self.pages.len() { 0 } else { at + 1 };
        self.checked += 1;
        if !self.pages[at].stamps_match(at as u64, self.generations[at]) {
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
        let (index, generation) = (at as u64, self.generations[at]);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn busy(writes: usize) -> Workload {
        let mut workload = Workload::fill(PageCount(64), PageCount(16));
        (0..writes).for_each(|_| workload.write());
        workload
    }

    fn bugs_of_one_pass(workload: &mut Workload) -> Vec<Bug> {
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
        let faults: Vec<_> = bugs_of_one_pass(&mut workload).into_iter().map(|bug| bug.fault).collect();
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
            matches!(bugs[..], [Bug { page: 40, fault: Fault::Words { word: 400, .. }, .. }]),
            "{bugs:?}"
        );
    }
}
