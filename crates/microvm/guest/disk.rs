//! The disk: a virtio block device (virtio 1.2, 4.2 and 5.2), and its self-checking work.
//!
//! One request at a time. Each turn writes the next version of a random page of the disk and reads
//! another one that was written before; which version that must be is kept in memory, so a disk and
//! a memory that do not belong together are found as well.

use core::cell::UnsafeCell;
use core::ptr::read_volatile;

use crate::boot_block::{DISK_MMIO, DISK_ON_PORTS, DISK_PORTS, DISK_SLOT};
use crate::heartbeat::BUG;
use crate::ports::Ports;
use crate::serial;
use crate::stamp::{Page, WORDS, mix};
use crate::virtio::{DEVICE_WRITES, Descriptor, Device, NEXT, Queue, Shared};

/// At most so many pages of the disk are used: 16 MiB.
const PAGES: usize = 4096;
const BLOCK_DEVICE: u32 = 2;
const SECTORS_PER_PAGE: u64 = 8;
const READ: u32 = 0;
const WRITE: u32 = 1;

#[repr(C)]
struct Request {
    header: [u64; 2],
    status: u8,
}

static QUEUE: Queue<4> = Queue::new();
static REQUEST: Shared<Request> = Shared(UnsafeCell::new(Request { header: [0; 2], status: 0 }));
static DATA: Shared<Page> = Shared(UnsafeCell::new(Page([0; WORDS])));
/// The version of each page that was written last; 0: none.
static GENERATIONS: Shared<[u64; PAGES]> = Shared(UnsafeCell::new([0; PAGES]));

/// How the device is reached.
enum Way {
    /// The microvm's.
    Mmio(Device),
    /// QEMU's.
    Ports(Ports),
}

impl Way {
    fn notify(&self) {
        match self {
            Self::Mmio(device) => device.notify(0),
            Self::Ports(ports) => ports.notify(0),
        }
    }
}

/// The device and the work on it.
pub struct DiskWork {
    device: Way,
    pages: u64,
    random: u64,
    bugs_printed: u64,
}

impl DiskWork {
    /// Brings the device up that is there in the way `disk`, as the boot block says.
    pub fn start(disk: u32) -> Self {
        let (device, sectors) = if disk == DISK_ON_PORTS {
            let ports = Ports::begin(BLOCK_DEVICE, DISK_SLOT, DISK_PORTS);
            ports.show(0, &QUEUE);
            ports.ready();
            let sectors = ports.config();
            (Way::Ports(ports), sectors)
        } else {
            let device = Device(DISK_MMIO);
            device.begin(BLOCK_DEVICE, 0);
            device.show(0, &QUEUE);
            device.ready();
            let half = |offset| u64::from(device.register(offset));
            (Way::Mmio(device), half(0x104) << 32 | half(0x100))
        };
        let pages = (sectors / SECTORS_PER_PAGE).min(PAGES as u64);
        if pages == 0 {
            panic!("the disk is smaller than a page");
        }
        Self { device, pages, random: 1, bugs_printed: 0 }
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
        let own = REQUEST.0.get();
        let data_flags = if kind == READ { NEXT | DEVICE_WRITES } else { NEXT };
        // SAFETY: vCPU 0 alone, and the device has given the request before back; what the device
        // writes is read with a volatile read after that.
        unsafe {
            (*own).header = [u64::from(kind), page * SECTORS_PER_PAGE];
            (*own).status = 0xff;
            let header = &raw const (*own).header as u64;
            let status = &raw const (*own).status;
            QUEUE.describe(0, Descriptor { address: header, len: 16, flags: NEXT, next: 1 });
            QUEUE.describe(
                1,
                Descriptor { address: DATA.0.get() as u64, len: 4096, flags: data_flags, next: 2 },
            );
            QUEUE.describe(
                2,
                Descriptor { address: status as u64, len: 1, flags: DEVICE_WRITES, next: 0 },
            );
            QUEUE.add(0);
            self.device.notify();
            QUEUE.await_all();
            let status = read_volatile(status);
            if status != 0 {
                panic!("the disk answers {status} to a request for page {page}");
            }
        }
    }
}
