//! A page allocator whose pages come and go: the ones in use are stamped and checked, the free ones
//! may hold anything.
//!
//! Keeps one promise: a page in use holds what was written when it was taken, whole. So a page that
//! a migration has left out though it was in use is a bug that is found. What is done with free
//! pages is left to `balloon`.

use crate::boot_block::{PAGE_TABLES, TABLE_ADDRESS};
use crate::stamp::{Page, STAMPS, mix};
use crate::workload::Bug;

/// In the number of a page's generation: it is free.
const FREE: u64 = 1 << 63;
/// It is free, and the VMM was told so for good.
const REPORTED: u64 = 1 << 62;
/// It is free, and in the balloon: not to be used.
const GIVEN: u64 = 1 << 61;
const FLAGS: u64 = FREE | REPORTED | GIVEN;
/// Pages that are taken or freed together at first.
const CLUSTER: u64 = 16;
/// Tries to find a page at random that is free, or is not.
const TRIES: usize = 64;
/// Free pages that one look for a page in use passes by.
const PASSED: usize = 32;
/// One cheap look in this many is followed by a look at a whole page.
const LOOKS_PER_WHOLE_PAGE: u64 = 64;

/// One vCPU's part of the buffer.
pub struct Churn {
    pages: &'static mut [Page],
    generations: &'static mut [u64],
    first: u64,
    random: u64,
    next_look: usize,
    next_report: usize,
    writes: u64,
    checked: u64,
}

impl Churn {
    /// Takes over `pages`, filled by [`Page::first`] with their numbers from `first` on, and frees
    /// all but about `in_use`.
    pub fn over(
        pages: &'static mut [Page],
        generations: &'static mut [u64],
        first: u64,
        in_use: u64,
    ) -> Self {
        let count = pages.len() as u64;
        for (at, generation) in (0..).zip(generations.iter_mut()) {
            if mix(at / CLUSTER) % count >= in_use {
                *generation |= FREE;
            }
        }
        let random = 0x9e37_79b9_7f4a_7c15 ^ first;
        Self {
            pages,
            generations,
            first,
            random,
            next_look: 0,
            next_report: 0,
            writes: 0,
            checked: 0,
        }
    }

    fn next_random(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (((u128::from(self.random)) * self.pages.len() as u128) >> 64) as usize
    }

    fn find(&mut self, free: bool) -> Option<usize> {
        for _ in 0..TRIES {
            let at = self.next_random();
            let fits = if free { self.is_free(at) } else { self.generations[at] & FREE == 0 };
            if fits {
                return Some(at);
            }
        }
        None
    }

    /// Frees a page and takes another one.
    pub fn turn_over(&mut self) {
        if let Some(at) = self.find(false) {
            self.generations[at] |= FREE;
        }
        if let Some(at) = self.find(true) {
            self.take(at);
        }
        self.writes += 1;
    }

    /// Takes page `at`, and frees another one for it if there is one.
    pub fn take_back(&mut self, at: usize) {
        self.take(at);
        if let Some(other) = self.find(false) {
            self.generations[other] |= FREE;
        }
    }

    fn take(&mut self, at: usize) {
        let generation = (self.generations[at] & !FLAGS) + 1;
        self.pages[at] = Page::expected(self.first + at as u64, generation);
        self.generations[at] = generation;
    }

    /// Looks at the next page in use.
    pub fn check(&mut self) -> Option<Bug> {
        for _ in 0..PASSED {
            let at = self.next_look;
            self.next_look = (at + 1) % self.pages.len();
            let generation = self.generations[at];
            if generation & FREE != 0 {
                continue;
            }
            self.checked += 1;
            let index = self.first + at as u64;
            let whole = self.checked.is_multiple_of(LOOKS_PER_WHOLE_PAGE);
            if whole || !self.pages[at].stamps_match(index, generation) {
                return self.inspect(at, index, generation);
            }
            return None;
        }
        None
    }

    fn inspect(&mut self, at: usize, index: u64, generation: u64) -> Option<Bug> {
        let page = &mut self.pages[at];
        let fault = page.inspect(index, generation).err()?;
        let stamps = STAMPS.map(|at| [page.0[at], page.0[at + 1], page.0[at + 2]]);
        *page = Page::expected(index, generation);
        Some(Bug { page: index, generation, fault, stamps })
    }

    pub fn writes(&self) -> u64 {
        self.writes
    }

    pub fn checked(&self) -> u64 {
        self.checked
    }

    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Whether it may be taken.
    pub fn is_free(&self, at: usize) -> bool {
        self.generations[at] & (FREE | GIVEN) == FREE
    }

    pub fn free_pages(&self) -> usize {
        (0..self.pages()).filter(|at| self.is_free(*at)).count()
    }

    /// Puts a free page into the balloon, from `from` on.
    pub fn give(&mut self, from: usize) -> Option<usize> {
        let at = (from..self.pages()).find(|at| self.is_free(*at))?;
        self.generations[at] |= GIVEN;
        Some(at)
    }

    /// Finds a page in the balloon, from `from` on; [`Self::get_back`] takes it out.
    pub fn given(&self, from: usize) -> Option<usize> {
        (from..self.pages()).find(|at| self.generations[*at] & GIVEN != 0)
    }

    pub fn get_back(&mut self, at: usize) {
        self.generations[at] &= !GIVEN;
    }

    /// The next page that is free and was not reported, among the next `looks`.
    pub fn next_unreported(&mut self, looks: &mut usize) -> Option<usize> {
        while *looks > 0 {
            *looks -= 1;
            let at = self.next_report;
            self.next_report = (at + 1) % self.pages.len();
            if self.generations[at] & FLAGS == FREE {
                return Some(at);
            }
        }
        None
    }

    pub fn mark_reported(&mut self, at: usize) {
        self.generations[at] |= REPORTED;
    }

    /// The guest address of page `at`, as the page tables have it, which are mapped one to one.
    pub fn address(&self, at: usize) -> u64 {
        let page = &raw const self.pages[at] as u64;
        let mut table = PAGE_TABLES;
        for level in (1..=4).rev() {
            let entry = table + (page >> (3 + 9 * level) & 511) * 8;
            // SAFETY: the VMM made the tables before any vCPU started and never changes them.
            table = unsafe { *(entry as *const u64) } & TABLE_ADDRESS;
        }
        table
    }
}
