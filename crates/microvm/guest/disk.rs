//! The disk: a virtio block device (virtio 1.2, 4.2 and 5.2), driven without interrupts, and its self-checking work.
//!
//! One request at a time. Each turn writes the next version of a random page of the disk and reads another one that
//! was written before; which version that must be is kept in memory, so a disk and a memory that do not belong
//! together are found as well.

use core::cell::UnsafeCell;
use core::ptr::{read_volatile, write_volatile};
use core::sync::atomic::{Ordering, fence};

use crate::boot_block::DISK_MMIO;
use crate::heartbeat::BUG;
use crate::serial;
use crate::stamp::{Page, WORDS, mix};

/// At most so many pages of the disk are used: 16 MiB.
const PAGES: usize = 4096;
const QUEUE: u16 = 4;
const SECTORS_PER_PAGE: u64 = 8;
const READ: u32 = 0;
const WRITE: u32 = 1;
const NEXT: u16 = 1;
const DEVICE_WRITES: u16 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

#[repr(C, align(4096))]
struct Ring {
    descriptors: [Descriptor; QUEUE as usize],
    available_flags: u16,
    available_index: u16,
    available: [u16; QUEUE as usize],
    _gap: [u8; 52],
    used_flags: u16,
    used_index: u16,
    used: [[u32; 2]; QUEUE as usize],
    header: [u64; 2],
    status: u8,
}

struct Shared<T>(UnsafeCell<T>);
// SAFETY: used by vCPU 0 only, and by the device while a request is under way.
unsafe impl<T> Sync for Shared<T> {}

static RING: Shared<Ring> = Shared(UnsafeCell::new(Ring {
    descriptors: [Descriptor { address: 0, len: 0, flags: 0, next: 0 }; QUEUE as usize],
    available_flags: 1,
    available_index: 0,
    available: [0; QUEUE as usize],
    _gap: [0; 52],
    used_flags: 0,
    used_index: 0,
    used: [[0; 2]; QUEUE as usize],
    header: [0; 2],
    status: 0,
}));
static DATA: Shared<Page> = Shared(UnsafeCell::new(Page([0; WORDS])));
/// The version of each page that was written last; 0: none.
static GENERATIONS: Shared<[u64; PAGES]> = Shared(UnsafeCell::new([0; PAGES]));

fn register(offset: u64) -> u32 {
    // SAFETY: a register of the device, which the VMM has put there.
    unsafe { read_volatile((DISK_MMIO + offset) as *const u32) }
}

fn set_register(offset: u64, value: u32) {
    // SAFETY: as above.
    unsafe { write_volatile((DISK_MMIO + offset) as *mut u32, value) }
}

/// The device and the work on it.
pub struct DiskWork {
    pages: u64,
    random: u64,
    bugs_printed: u64,
}

impl DiskWork {
    /// Brings the device up (virtio 1.2, 3.1.1).
    pub fn start() -> Self {
        if register(0) != 0x7472_6976 || register(4) != 2 || register(8) != 2 {
            panic!("there is no virtio block device");
        }
        set_register(0x70, 0);
        set_register(0x70, 1 | 2);
        // VIRTIO_F_VERSION_1 and nothing else.
        for (select, features) in [(0, 0), (1, 1)] {
            set_register(0x24, select);
            set_register(0x20, features);
        }
        set_register(0x70, 1 | 2 | 8);
        if register(0x70) & 8 == 0 {
            panic!("the disk does not take the features");
        }
        set_register(0x30, 0);
        if register(0x34) < u32::from(QUEUE) {
            panic!("the disk has no queue");
        }
        set_register(0x38, u32::from(QUEUE));
        let ring = RING.0.get();
        // SAFETY: takes addresses only.
        let parts = unsafe {
            [
                &raw const (*ring).descriptors as u64,
                &raw const (*ring).available_flags as u64,
                &raw const (*ring).used_flags as u64,
            ]
        };
        for (offset, address) in [0x80, 0x90, 0xa0].into_iter().zip(parts) {
            set_register(offset, address as u32);
            set_register(offset + 4, (address >> 32) as u32);
        }
        set_register(0x44, 1);
        set_register(0x70, 1 | 2 | 8 | 4);
        let sectors = u64::from(register(0x104)) << 32 | u64::from(register(0x100));
        let pages = (sectors / SECTORS_PER_PAGE).min(PAGES as u64);
        if pages == 0 {
            panic!("the disk is smaller than a page");
        }
        Self { pages, random: 1, bugs_printed: 0 }
    }

    /// One write and one check; how many bugs were found.
    pub fn turn(&mut self) -> u64 {
        let generations = GENERATIONS.0.get();
        let at = self.next();
        // SAFETY: vCPU 0 alone; `at` lies within.
        let generation = unsafe { (*generations)[at as usize] } + 1;
        // SAFETY: as above, and no request is under way.
        unsafe { *DATA.0.get() = Page::expected(at, generation) };
        self.request(WRITE, at);
        // SAFETY: as above.
        unsafe { (*generations)[at as usize] = generation };
        let at = self.next();
        // SAFETY: as above.
        let generation = unsafe { (*generations)[at as usize] };
        if generation == 0 {
            return 0;
        }
        self.request(READ, at);
        // SAFETY: as above; the request is over.
        let Err(fault) = (unsafe { (*DATA.0.get()).inspect(at, generation) }) else { return 0 };
        self.bugs_printed += 1;
        if self.bugs_printed < 100 {
            serial::print(format_args!(
                "{BUG} disk page={at} expected=generation {generation} found={fault}\n"
            ));
        }
        1
    }

    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.random) % self.pages
    }

    fn request(&mut self, kind: u32, page: u64) {
        let ring = RING.0.get();
        // SAFETY: vCPU 0 alone, and the device has returned the request before; what the device writes is read with
        // volatile reads after its index has moved.
        unsafe {
            (*ring).header = [u64::from(kind), page * SECTORS_PER_PAGE];
            (*ring).status = 0xff;
            let data_flags = if kind == READ { NEXT | DEVICE_WRITES } else { NEXT };
            (*ring).descriptors[0] =
                Descriptor { address: &raw const (*ring).header as u64, len: 16, flags: NEXT, next: 1 };
            (*ring).descriptors[1] =
                Descriptor { address: DATA.0.get() as u64, len: 4096, flags: data_flags, next: 2 };
            (*ring).descriptors[2] = Descriptor {
                address: &raw const (*ring).status as u64,
                len: 1,
                flags: DEVICE_WRITES,
                next: 0,
            };
            let index = (*ring).available_index;
            (*ring).available[(index % QUEUE) as usize] = 0;
            fence(Ordering::SeqCst);
            write_volatile(&raw mut (*ring).available_index, index.wrapping_add(1));
            fence(Ordering::SeqCst);
            set_register(0x50, 0);
            while read_volatile(&raw const (*ring).used_index) != index.wrapping_add(1) {
                core::hint::spin_loop();
            }
            fence(Ordering::SeqCst);
            let status = read_volatile(&raw const (*ring).status);
            if status != 0 {
                panic!("the disk answers {status} to a request for page {page}");
            }
        }
    }
}
