//! A tiny bare-metal guest on /dev/kvm, for tests and benchmarks of the trackers: vCPUs in 64-bit
//! mode that write pages, either those of a list or random ones until stopped.
//!
//! Its RAM blocks may be cut into any memory slots at any guest frames; the guest's page tables
//! show all pages of all blocks one after the other, so a page has one number for both sides: its
//! index counted through all blocks. It runs without privilege, since only that runs at full speed
//! under every KVM, those inside of virtual machines among them. Code, page tables and control
//! blocks lie in a slot of their own, which is no tracker's business. No interrupts, no devices, no
//! operating system: a real VMM is the microvm's business.
#![allow(unsafe_code)]

mod program;
mod ram;
mod vcpu;

pub use ram::Ram;
pub use vcpu::Wander;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use godwit_memslots::{Slot, SlotFlags, SlotId};
use godwit_units::{Gfn, Hva, PAGE_SIZE, PageCount, PageIndex};
use kvm_bindings::{KVM_API_VERSION, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::{DirtyRingSize, KvmDirtyRings, KvmLogTracker, KvmRingTracker, LogMode, TrackError};

/// Where the blocks' pages begin in the guest's virtual address space: the second entry of the top
/// table.
const VIRTUAL: u64 = 1 << 39;
/// Guest frames below this one are code, tables and control blocks.
const FIRST_FREE: Gfn = Gfn(0x1_0000);
const CODE: u64 = 0x8000;
/// One page for each vCPU.
const CONTROL: u64 = 0x1_0000;
/// The tables, and after them for each vCPU a list of pages to touch.
const TABLES: u64 = 0x4_0000;
/// Bits of an entry: present, writable, for user mode; accessed and dirty from the start, so that
/// nothing ever writes to the tables.
const ENTRY: u64 = 0x1 | 0x2 | 0x4 | 0x20 | 0x40;
const LARGE: u64 = 0x80;

/// One memory slot to be made: which pages of which block, and at which guest frame.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// The block.
    pub block: u32,
    /// The first page in it.
    pub first: u64,
    /// How many pages.
    pub pages: u64,
    /// The first guest frame, beyond [`Shape::FIRST_FRAME`].
    pub frame: u64,
}

/// What a bare machine looks like.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Pages of each RAM block.
    pub blocks: Vec<u64>,
    /// The memory slots, numbered from 0. Every page of every block should be in one.
    pub slots: Vec<Cut>,
    /// How many vCPUs.
    pub vcpus: usize,
    /// Entries of the dirty ring of each vCPU; the dirty log without.
    pub ring: Option<u32>,
}

impl Shape {
    /// The first guest frame that slots may use.
    pub const FIRST_FRAME: u64 = FIRST_FREE.0;
}

/// A virtual machine.
#[derive(Debug)]
pub struct BareMachine {
    // Before the memory that it uses.
    vcpus: Vec<Mutex<VcpuFd>>,
    rings: Option<Arc<KvmDirtyRings>>,
    vm: VmFd,
    control: Ram,
    lists: u64,
    blocks: Vec<Ram>,
    slots: Vec<Slot>,
}

/// Whether there is a /dev/kvm to be used at all.
#[must_use]
pub fn kvm_is_usable() -> bool {
    Kvm::new().is_ok_and(|kvm| kvm.get_api_version() == KVM_API_VERSION.cast_signed())
}

fn kvm_error(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

impl BareMachine {
    /// Makes a machine of this shape, its vCPUs not running.
    ///
    /// # Errors
    /// When KVM refuses, or the shape is impossible.
    pub fn new(shape: &Shape) -> io::Result<Self> {
        let kvm = Kvm::new().map_err(kvm_error)?;
        let vm = kvm.create_vm().map_err(kvm_error)?;
        let ring = shape.ring.map(|entries| DirtyRingSize::enable(fd(&vm), entries));
        let ring = ring.transpose().map_err(io::Error::other)?;
        let blocks: Vec<Ram> = shape
            .blocks
            .iter()
            .map(|&pages| Ram::new(PageCount(pages)))
            .collect::<io::Result<_>>()?;
        let slots: Vec<Slot> =
            (0..).zip(&shape.slots).map(|(id, cut)| slot(id, *cut, &blocks)).collect();
        let total: u64 = shape.blocks.iter().sum();
        let lists = tables_end(total);
        let end = lists + shape.vcpus as u64 * list_bytes(total);
        if end > FIRST_FREE.0 * PAGE_SIZE {
            return Err(io::Error::other(
                "page tables and lists do not fit below the first free frame",
            ));
        }
        let control = Ram::new(PageCount(end.div_ceil(PAGE_SIZE)))?;
        let own = Slot {
            id: SlotId(slots.len() as u32),
            flags: SlotFlags::NONE,
            gfn: Gfn(0),
            pages: control.pages(),
            hva: control.mapping().address,
            block: u32::MAX,
            first: PageIndex(0),
        };
        for slot in slots.iter().chain([&own]) {
            // SAFETY: the host address is that of a mapping of this size, which is owned by the
            // machine and unmapped after the VM has gone.
            unsafe { vm.set_user_memory_region(region(slot)) }.map_err(kvm_error)?;
        }
        control.write(CODE, program::bytes())?;
        write_tables(&control, total, &shape.blocks, &slots)?;
        let vcpus = (0..shape.vcpus).map(|number| vcpu::make(&kvm, &vm, number));
        let vcpus: Vec<VcpuFd> = vcpus.collect::<io::Result<_>>()?;
        let rings = match ring {
            None => None,
            Some(size) => {
                let fds: Vec<BorrowedFd<'_>> = vcpus.iter().map(|vcpu| fd(vcpu)).collect();
                Some(KvmDirtyRings::new(fd(&vm), size, &fds).map_err(io::Error::other)?)
            }
        };
        let vcpus = vcpus.into_iter().map(Mutex::new).collect();
        Ok(Self { vcpus, rings, vm, control, lists, blocks, slots })
    }

    /// The VM, for a tracker.
    #[must_use]
    pub fn vm(&self) -> BorrowedFd<'_> {
        fd(&self.vm)
    }

    /// Its slots, for a tracker.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The sizes of its RAM blocks, for a tracker.
    #[must_use]
    pub fn block_sizes(&self) -> Vec<PageCount> {
        self.blocks.iter().map(Ram::pages).collect()
    }

    /// Its RAM blocks.
    #[must_use]
    pub fn blocks(&self) -> &[Ram] {
        &self.blocks
    }

    /// Its dirty rings, if it was made with them.
    #[must_use]
    pub fn rings(&self) -> Option<&Arc<KvmDirtyRings>> {
        self.rings.as_ref()
    }

    /// The guest frame at which `page` of block `block` lies.
    #[must_use]
    pub fn frame(&self, block: usize, page: u64) -> Option<Gfn> {
        let shows = |slot: &&Slot| {
            slot.block as usize == block
                && page.checked_sub(slot.first.0).is_some_and(|at| at < slot.pages.0)
        };
        self.slots.iter().find(shows).map(|slot| Gfn(slot.gfn.0 + page - slot.first.0))
    }

    /// Tracks all its slots by the dirty log.
    ///
    /// # Errors
    /// As [`KvmLogTracker::start_in`].
    pub fn log_tracker(&self, mode: LogMode) -> Result<KvmLogTracker, TrackError> {
        // SAFETY: these are the slots of the VM, and nobody can change them. Should the tracker
        // outlive the machine, the VM lives on by the tracker's descriptor, with the same slots and
        // no vCPU.
        unsafe { KvmLogTracker::start_in(mode, self.vm(), &self.block_sizes(), self.slots()) }
    }

    /// Tracks all its slots by the dirty rings.
    ///
    /// # Errors
    /// As [`KvmRingTracker::start`], or when it was made without rings.
    pub fn ring_tracker(&self) -> Result<KvmRingTracker, TrackError> {
        let rings = self.rings.as_ref().ok_or(TrackError::KvmLacks {
            missing: "dirty rings in this machine",
            cure: "make it with rings",
        })?;
        // SAFETY: as for the log.
        unsafe { KvmRingTracker::start(rings, &self.block_sizes(), self.slots()) }
    }
}

fn fd<T: AsRawFd>(owner: &T) -> BorrowedFd<'_> {
    // SAFETY: `owner` owns the descriptor, and the result borrows `owner`.
    unsafe { BorrowedFd::borrow_raw(owner.as_raw_fd()) }
}

fn slot(id: u32, cut: Cut, blocks: &[Ram]) -> Slot {
    let block = &blocks[cut.block as usize];
    assert!(
        cut.first + cut.pages <= block.pages().0 && cut.frame >= FIRST_FREE.0,
        "{cut:?} is impossible"
    );
    Slot {
        id: SlotId(id),
        flags: SlotFlags::NONE,
        gfn: Gfn(cut.frame),
        pages: PageCount(cut.pages),
        hva: Hva(block.mapping().address.0 + cut.first * PAGE_SIZE),
        block: cut.block,
        first: PageIndex(cut.first),
    }
}

fn region(slot: &Slot) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot: slot.id.0,
        flags: slot.flags.0,
        guest_phys_addr: slot.gfn.0 * PAGE_SIZE,
        memory_size: slot.pages.bytes().0,
        userspace_addr: slot.hva.0,
    }
}

/// Tables of the lowest level for `total` pages, and of the one above.
fn table_counts(total: u64) -> (u64, u64) {
    let lowest = total.div_ceil(512);
    (lowest, lowest.div_ceil(512))
}

fn tables_end(total: u64) -> u64 {
    let (lowest, middle) = table_counts(total);
    TABLES + (4 + middle + lowest) * PAGE_SIZE
}

fn list_bytes(total: u64) -> u64 {
    (total * 4).next_multiple_of(PAGE_SIZE)
}

/// The guest's page tables: what lies below [`FIRST_FREE`] at its own address, in large pages; all
/// pages of all blocks, in small pages, from [`VIRTUAL`] on.
fn write_tables(control: &Ram, total: u64, blocks: &[u64], slots: &[Slot]) -> io::Result<()> {
    let table = |number: u64| TABLES + number * PAGE_SIZE;
    let entry = |at: u64, value: u64| control.store(at, value | ENTRY);
    let (lowest, middle) = table_counts(total);
    let (top, low, low_middle, high) = (table(0), table(1), table(2), table(3));
    entry(top, low);
    entry(top + 8, high);
    entry(low, low_middle);
    for large in 0..(FIRST_FREE.0 * PAGE_SIZE) >> 21 {
        entry(low_middle + large * 8, large << 21 | LARGE);
    }
    for number in 0..middle {
        entry(high + number * 8, table(4 + number));
    }
    for number in 0..lowest {
        entry(table(4) + number * 8, table(4 + middle + number));
    }
    let mut before = vec![0; blocks.len()];
    for block in 1..blocks.len() {
        before[block] = before[block - 1] + blocks[block - 1];
    }
    for slot in slots {
        let first = before[slot.block as usize] + slot.first.0;
        for page in 0..slot.pages.0 {
            entry(table(4 + middle) + (first + page) * 8, (slot.gfn.0 + page) * PAGE_SIZE);
        }
    }
    Ok(())
}
