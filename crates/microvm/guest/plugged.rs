//! Memory that was plugged in while the guest ran: stamped bit by bit, then written and checked by
//! vCPU 0 beside its part of the buffer.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::boot_block::{MAX_PLUGGED, PLUGGED};
use crate::stamp::Page;
use crate::workload::Workload;
use crate::{PAGE_SIZE, PageCount, serial};

/// Steps of one turn, so that a heartbeat is not held up.
const STAMPED_A_TURN: usize = 256;
const WRITES_A_TURN: usize = 4;
const CHECKS_A_TURN: usize = 32;

/// The list that the VMM writes.
#[repr(C)]
struct List {
    count: AtomicU64,
    blocks: [[AtomicU64; 2]; MAX_PLUGGED],
}

enum Block {
    Absent,
    Stamping {
        pages: &'static mut [Page],
        generations: &'static mut [u64],
        first: u64,
        done: usize,
    },
    Stamped(Workload<&'static mut [Page], &'static mut [u64]>),
}

/// All blocks that were plugged in.
pub struct Plugged {
    blocks: [Block; MAX_PLUGGED],
    count: usize,
}

impl Plugged {
    pub fn new() -> Self {
        Self { blocks: [const { Block::Absent }; MAX_PLUGGED], count: 0 }
    }

    /// Looks for new blocks, and works on those that there are; bugs found by that.
    pub fn turn(&mut self, writes: bool) -> u64 {
        // SAFETY: the page is mapped one to one, zero at the start, and accessed as atomics by the
        // VMM, too.
        let list = unsafe { &*(PLUGGED as *const List) };
        while (self.count as u64) < list.count.load(Ordering::Acquire) {
            let [start, pages] = &list.blocks[self.count];
            let (start, pages) = (start.load(Ordering::Relaxed), pages.load(Ordering::Relaxed));
            self.blocks[self.count] = Block::new(start, pages);
            self.count += 1;
        }
        self.blocks[..self.count].iter_mut().map(|block| block.turn(writes)).sum()
    }
}

impl Block {
    /// The block of `pages` pages at `start`: its generations first, 8 bytes for each page, then
    /// what is stamped.
    fn new(start: u64, pages: u64) -> Self {
        let stamped = pages * 512 / 513;
        let first = start / PAGE_SIZE + (stamped * 8).div_ceil(PAGE_SIZE);
        // SAFETY: the VMM has mapped the block one to one to memory that nothing else uses, zeroed,
        // which is a value of either type; the two parts do not overlap.
        let (pages, generations) = unsafe {
            (
                core::slice::from_raw_parts_mut((first * PAGE_SIZE) as *mut Page, stamped as usize),
                core::slice::from_raw_parts_mut(start as *mut u64, stamped as usize),
            )
        };
        Self::Stamping { pages, generations, first, done: 0 }
    }

    fn turn(&mut self, writes: bool) -> u64 {
        match self {
            Self::Absent => 0,
            Self::Stamping { pages, first, done, .. } => {
                let end = pages.len().min(*done + STAMPED_A_TURN);
                for at in *done..end {
                    pages[at] = Page::first(*first + at as u64);
                }
                *done = end;
                if end == pages.len() {
                    self.take_into_use();
                }
                0
            }
            Self::Stamped(work) => {
                if writes {
                    (0..WRITES_A_TURN).for_each(|_| work.write());
                }
                let bugs = (0..CHECKS_A_TURN).filter_map(|_| work.check());
                bugs.map(|bug| serial::print(format_args!("{bug}\n"))).count() as u64
            }
        }
    }

    fn take_into_use(&mut self) {
        let block = core::mem::replace(self, Self::Absent);
        if let Self::Stamping { pages, generations, first, .. } = block {
            let count = pages.len() as u64;
            serial::print(format_args!("PLUGGED pages={count} from={first}\n"));
            *self = Self::Stamped(Workload::over(pages, generations, first, PageCount(count)));
        }
    }
}
