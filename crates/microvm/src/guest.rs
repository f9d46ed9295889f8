//! Getting the guest program into memory, and the vCPUs to its first instruction.
//!
//! ```text
//!   0x0800    segment descriptors (the VMM sets the registers; a firmware needs all of them)
//!   0x1000    boot block
//!   0x2000    top-level page table
//!   0x3000    what was plugged in
//!   0x10000   task segment: which ports may be used, namely all
//!   0x100000  the program, with its stacks
//!   then      page tables, and memory to be stamped, in every block
//! ```
//!
//! All vCPUs enter the program at once, in 64-bit mode without privilege, with their number in rdi.
//! Nothing here is needed where a guest arrives by migration.
//!
//! The page tables map everything one to one, and the memory to be stamped a second time into
//! windows without seams, wherever its parts are. Accessed and dirty bits are set from the start:
//! the processor then has no reason to write the tables, and nothing changes memory behind the
//! workload's back.

use std::net::Ipv4Addr;

use godwit_balloon::Features;
use godwit_units::{ByteCount, PAGE_SIZE};
use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;

use crate::MicrovmError;
use crate::boot_block::{
    BALLOON_HINTS, BALLOON_REPORTING, BOOT_BLOCK, BOOT_MAGIC, BootBlock, DISK_ON_PORTS,
    GENERATIONS_WINDOW, MAX_PLUGGED, MODE_CHURN, MODE_CRASH, MODE_FULL, MODE_IDLE, MODE_MIXED,
    MODE_RATE, ORDER_HOT_COLD, ORDER_HOT_TENTH, ORDER_RANDOM, ORDER_SEQUENTIAL, PAGE_TABLES,
    PAGES_WINDOW, PLUGGED, PROGRAM, TABLE_ADDRESS as ADDRESS,
};
use crate::error::kvm;
use crate::layout::HOLE;
use crate::ram::GuestRam;

/// The guest program, built by this crate's build script.
pub const IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/microvm-guest"));
const DESCRIPTORS: u64 = 0x800;
const GIB: u64 = 1 << 30;
/// Present, writable, for everyone, accessed; for pages dirty, and large ones.
const TABLE: u64 = 0x27;
const PAGE: u64 = 0x67;
const LARGE_PAGE: u64 = 0xe7;
/// The task segment and its map of ports, a clear bit for each that may be used (SDM volume 1,
/// 19.5.2). The other way, the privilege level in the flags, is not honoured by every KVM.
const TASK: u64 = 0x10000;
const PORT_MAP: u16 = 104;
const TASK_SIZE: u32 = PORT_MAP as u32 + 8192 + 1;

/// Flat segments for 64-bit code and for data of ring 3, the task segment, which takes two places,
/// and, for a firmware on its way there, code and data of ring 0 (SDM volume 3, 3.4.5 and 8.2.3).
const GDT: [u64; 7] = [
    0,
    0x00af_fb00_0000_ffff,
    0x00cf_f300_0000_ffff,
    0x0000_8900_0000_0000 | TASK << 16 | (TASK_SIZE - 1) as u64,
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
];

/// How the guest spends its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum GuestMode {
    /// Counts, and otherwise sleeps.
    #[default]
    Idle,
    /// Writes at a rate, at random.
    Rate,
    /// Writes as fast as it can, at random.
    Full,
    /// Writes for 5 ms, at random, and only checks for 5 ms, by turns.
    Mixed,
    /// Writes by Zipf's law: few pages often, many seldom. At the rate, or with rate 0 as fast as
    /// it can.
    HotCold,
    /// Writes nine times of ten to the first tenth of the working set. At the rate, or with rate 0
    /// as fast as it can.
    HotTenth,
    /// Writes one page after the other. At the rate, or with rate 0 as fast as it can.
    Sequential,
    /// Frees pages and takes others for them, at the rate, or with rate 0 as fast as it can; the
    /// working set is what it has at a time, out of all memory that it has filled. It tells a
    /// balloon of what is free.
    Churn,
    /// Works for a second and then triple-faults, to show how that is told.
    Crash,
}

/// What the guest is told to do.
#[derive(Clone, Copy, Debug)]
pub struct GuestPlan {
    /// How it spends its time.
    pub mode: GuestMode,
    /// Pages written a second, by all vCPUs together.
    pub rate: u64,
    /// Memory that is stamped and checked; `None`: half of what is free.
    pub fill: Option<ByteCount>,
    /// The part of it that is written; `None`: all of it, but at most 128 MiB.
    pub working_set: Option<ByteCount>,
    /// In a machine of another VMM: it has a virtio disk for it in slot 8 of its first PCI bus, by
    /// ports, whose queue has 4 places. A page of it is written and another one read every 10 ms.
    pub disk_on_ports: bool,
    /// In a machine of another VMM: it has a virtio card for it in slot 9 of its first PCI bus, by
    /// ports, whose queues have 256 places. Who pings this address is answered, and who says
    /// anything to it over TCP is said the same.
    pub card_on_ports: Option<Ipv4Addr>,
}

/// What the guest finds beside memory and serial line.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Devices {
    pub(crate) disk: bool,
    pub(crate) balloon: Option<Features>,
}

/// Guest memory before the guest runs, all of it zero.
pub trait BootMemory {
    /// Writes `bytes` at guest address `gpa`; `None` if that is not all memory.
    #[must_use]
    fn write(&self, gpa: u64, bytes: &[u8]) -> Option<()>;

    /// Reads what was written; `None` as above.
    #[must_use]
    fn read(&self, gpa: u64, bytes: &mut [u8]) -> Option<()>;

    /// Guest address and size of each stretch of memory.
    fn stretches(&self) -> Vec<(u64, u64)>;
}

impl BootMemory for GuestRam {
    fn write(&self, gpa: u64, bytes: &[u8]) -> Option<()> {
        Self::write(self, gpa, bytes)
    }

    fn read(&self, gpa: u64, bytes: &mut [u8]) -> Option<()> {
        Self::read(self, gpa, bytes)
    }

    fn stretches(&self) -> Vec<(u64, u64)> {
        self.plans().into_iter().map(|plan| (plan.gpa, plan.size.0)).collect()
    }
}

/// Puts the guest program and what it needs into `ram`, for a machine of another VMM that has no
/// balloon for it, no disk but that of the plan, and a time-stamp counter of `tsc_khz`. Returns
/// where the program is entered: in 64-bit mode and ring 3, the vCPU's number in rdi, by way of the
/// descriptors and the page tables that are placed, too ([`BOOT_BLOCK`]'s module says where).
///
/// # Errors
/// When it does not fit.
pub fn place_guest(
    ram: &dyn BootMemory,
    plan: &GuestPlan,
    cpus: u32,
    tsc_khz: u32,
) -> Result<u64, MicrovmError> {
    place(ram, plan, cpus, Devices::default(), tsc_khz)
}

/// Puts the program and what it needs into `ram`.
pub(crate) fn place(
    ram: &dyn BootMemory,
    plan: &GuestPlan,
    cpus: u32,
    devices: Devices,
    tsc_khz: u32,
) -> Result<u64, MicrovmError> {
    let misplaced =
        || MicrovmError::Layout("the guest program does not fit into the first block".to_owned());
    let (entry, end) = place_program(ram).ok_or_else(misplaced)?;
    for (at, descriptor) in (DESCRIPTORS..).step_by(8).zip(GDT) {
        ram.write(at, &descriptor.to_le_bytes()).ok_or_else(misplaced)?;
    }
    ram.write(TASK + 102, &PORT_MAP.to_le_bytes()).ok_or_else(misplaced)?;
    ram.write(TASK + u64::from(TASK_SIZE) - 1, &[0xff]).ok_or_else(misplaced)?;
    let mut memory = FreeMemory::new(ram, end).ok_or_else(misplaced)?;
    memory.map_all().ok_or_else(misplaced)?;
    let free = memory.free();
    // Each page that is stamped takes 8 bytes of generations and 8 bytes of page table; the rest is
    // for what rounds up.
    let most = free.saturating_sub(1024) / 256 * 255;
    let fill = plan.fill.map_or(most / 2, |fill| fill.0 / PAGE_SIZE);
    if fill == 0 || fill > most || fill < cpus.into() {
        let bytes = |pages| ByteCount(pages * PAGE_SIZE);
        return Err(MicrovmError::Fill { fill: bytes(fill), free: bytes(most) });
    }
    memory.window(GENERATIONS_WINDOW, (fill * 8).div_ceil(PAGE_SIZE)).ok_or_else(misplaced)?;
    memory.window(PAGES_WINDOW, fill).ok_or_else(misplaced)?;
    let working_set = plan.working_set.map_or(32 << 10, |size| size.0 / PAGE_SIZE).clamp(1, fill);
    let paced = if plan.rate == 0 { MODE_FULL } else { MODE_RATE };
    let (mode, order) = match plan.mode {
        GuestMode::Idle => (MODE_IDLE, ORDER_RANDOM),
        GuestMode::Rate => (MODE_RATE, ORDER_RANDOM),
        GuestMode::Full => (MODE_FULL, ORDER_RANDOM),
        GuestMode::Mixed => (MODE_MIXED, ORDER_RANDOM),
        GuestMode::HotCold => (paced, ORDER_HOT_COLD),
        GuestMode::HotTenth => (paced, ORDER_HOT_TENTH),
        GuestMode::Sequential => (paced, ORDER_SEQUENTIAL),
        GuestMode::Churn => (MODE_CHURN, ORDER_RANDOM),
        GuestMode::Crash => (MODE_CRASH, ORDER_RANDOM),
    };
    let block = BootBlock {
        magic: BOOT_MAGIC,
        mode,
        order,
        cpus,
        disk: if plan.disk_on_ports { DISK_ON_PORTS } else { devices.disk.into() },
        rate: plan.rate,
        fill,
        working_set,
        tsc_khz: tsc_khz.into(),
        balloon: devices.balloon.map_or(0, |features| {
            let bit = |wanted: bool, bit| if wanted { bit } else { 0 };
            bit(features.hints, BALLOON_HINTS) | bit(features.reporting, BALLOON_REPORTING)
        }),
        card: plan.card_on_ports.map_or(0, |address| u32::from(address).into()),
        rest: [0; 503],
    };
    ram.write(BOOT_BLOCK, &boot_bytes(&block)).ok_or_else(misplaced)?;
    Ok(entry)
}

/// Maps a block that was plugged in at `gpa` for the guest, and tells it of the block. Page tables
/// that this takes come out of the block itself. The guest may run: an entry that was absent is
/// cached nowhere.
///
/// The list and the page tables lie in memory that the guest writes, so nothing that they say is
/// taken for granted: `None` if they lead nowhere. What is written then is the guest's memory.
pub(crate) fn plug(ram: &GuestRam, gpa: u64, size: u64) -> Option<()> {
    let mut count = [0; 8];
    ram.read(PLUGGED, &mut count)?;
    let count = u64::from_le_bytes(count);
    if count >= MAX_PLUGGED as u64 {
        return None;
    }
    let mut memory = FreeMemory { ram, free: vec![(gpa, size / PAGE_SIZE)] };
    memory.map_one_to_one(gpa / GIB..(gpa + size).div_ceil(GIB))?;
    let (start, pages) = *memory.free.first()?;
    let entry = PLUGGED + 8 + 16 * count;
    ram.store(entry, start)?;
    ram.store(entry + 8, pages)?;
    ram.store(PLUGGED, count + 1)
}

/// The boot block field by field, as `repr(C)` lays it out; a test compares.
fn boot_bytes(block: &BootBlock) -> Vec<u8> {
    let BootBlock {
        magic,
        mode,
        order,
        cpus,
        disk,
        rate,
        fill,
        working_set,
        tsc_khz,
        balloon,
        card,
        rest,
    } = block;
    let mut bytes = magic.to_le_bytes().to_vec();
    bytes.extend([mode, order, cpus, disk].iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend(
        [rate, fill, working_set, tsc_khz, balloon, card]
            .iter()
            .flat_map(|word| word.to_le_bytes()),
    );
    bytes.extend(rest.iter().flat_map(|word| word.to_le_bytes()));
    bytes
}

/// Copies the program's segments; its entry and its end.
fn place_program(ram: &dyn BootMemory) -> Option<(u64, u64)> {
    let word = |at: usize, len: usize| {
        let bytes = IMAGE.get(at..at + len)?;
        Some(bytes.iter().rev().fold(0_u64, |value, &byte| value << 8 | u64::from(byte)))
    };
    // ELF-64 (System V ABI, chapters 4 and 5): the entry, then the program headers.
    let (entry, headers, count) = (word(24, 8)?, word(32, 8)? as usize, word(56, 2)? as usize);
    let mut end = PROGRAM;
    for header in (0..count).map(|number| headers + 56 * number) {
        const LOAD: u64 = 1;
        if word(header, 4)? != LOAD {
            continue;
        }
        let (from, to) = (word(header + 8, 8)? as usize, word(header + 24, 8)?);
        let (in_file, in_memory) = (word(header + 32, 8)? as usize, word(header + 40, 8)?);
        ram.write(to, IMAGE.get(from..from + in_file)?)?;
        // What the file does not hold is zero, as new memory is.
        end = end.max(to + in_memory);
    }
    Some((entry, end))
}

/// Memory that is still free, and the page tables made of it.
struct FreeMemory<'a> {
    ram: &'a dyn BootMemory,
    /// Guest address and pages of each free stretch.
    free: Vec<(u64, u64)>,
}

impl<'a> FreeMemory<'a> {
    /// All memory above `low` in the first block, and all of the others.
    fn new(ram: &'a dyn BootMemory, low: u64) -> Option<Self> {
        let low = low.next_multiple_of(PAGE_SIZE);
        let stretch = |gpa: u64, size: u64| match gpa {
            0 => Some((low, size.checked_sub(low)? / PAGE_SIZE)),
            _ => Some((gpa, size / PAGE_SIZE)),
        };
        let stretches = ram.stretches().into_iter();
        let free = stretches.map(|(gpa, size)| stretch(gpa, size)).collect::<Option<_>>()?;
        Some(Self { ram, free })
    }

    fn free(&self) -> u64 {
        self.free.iter().map(|(_, pages)| pages).sum()
    }

    /// A page from the first stretch that has one.
    fn page(&mut self) -> Option<u64> {
        let (start, pages) = self.free.iter_mut().find(|(_, pages)| *pages > 0)?;
        let page = *start;
        (*start, *pages) = (*start + PAGE_SIZE, *pages - 1);
        Some(page)
    }

    /// Maps all memory and all devices one to one, with large pages.
    fn map_all(&mut self) -> Option<()> {
        let ends = self.ram.stretches().into_iter().map(|(gpa, size)| gpa + size);
        let top = ends.max()?.max(HOLE.end);
        self.map_one_to_one(0..top.div_ceil(GIB))
    }

    /// Maps these GiB one to one, with large pages, as far as they are not mapped yet.
    fn map_one_to_one(&mut self, all: std::ops::Range<u64>) -> Option<()> {
        for gib in all {
            let entries: Vec<u64> =
                (0..512).map(|page| (gib * GIB + page * (2 << 20)) | LARGE_PAGE).collect();
            let table = self.table(gib * GIB, 2)?;
            let mut first = [0; 8];
            self.ram.read(table, &mut first)?;
            if first == [0; 8] {
                self.put(table, &entries)?;
            }
        }
        Some(())
    }

    /// Maps `pages` pages from `address` on to memory of all stretches, by their sizes.
    fn window(&mut self, address: u64, pages: u64) -> Option<()> {
        // The tables first: they come out of the same stretches.
        let tables: Vec<u64> = (0..pages)
            .step_by(512)
            .map(|page| self.table(address + page * PAGE_SIZE, 1))
            .collect::<Option<_>>()?;
        let (mut left, mut total) = (pages, self.free());
        let mut frames = Vec::new();
        for (start, free) in &mut self.free {
            let share = u128::from(left) * u128::from(*free);
            let part = (share.div_ceil(u128::from(total.max(1))) as u64).min(*free).min(left);
            frames.extend((0..part).map(|page| (*start + page * PAGE_SIZE) | PAGE));
            total -= *free;
            left -= part;
            (*start, *free) = (*start + part * PAGE_SIZE, *free - part);
        }
        for (table, entries) in tables.into_iter().zip(frames.chunks(512)) {
            self.put(table, entries)?;
        }
        (left == 0).then_some(())
    }

    fn put(&self, table: u64, entries: &[u64]) -> Option<()> {
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        self.ram.write(table, &bytes)
    }

    /// The table of `level` (1: of pages, 2: of large pages) for `address`, made if there is none.
    fn table(&mut self, address: u64, level: u32) -> Option<u64> {
        let mut table = PAGE_TABLES;
        for level in (level + 1..=4).rev() {
            let at = table + (address >> (3 + 9 * level) & 511) * 8;
            let mut entry = [0; 8];
            self.ram.read(at, &mut entry)?;
            let mut entry = u64::from_le_bytes(entry);
            if entry == 0 {
                entry = self.page()? | TABLE;
                self.ram.write(at, &entry.to_le_bytes())?;
            }
            table = entry & ADDRESS;
        }
        Some(table)
    }
}

/// Sets vCPU `number` to the program's entry.
pub(crate) fn enter(vcpu: &VcpuFd, number: u32, entry: u64) -> Result<(), MicrovmError> {
    let mut sregs = vcpu.get_sregs().map_err(kvm("KVM_GET_SREGS"))?;
    let code = kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: 8 | 3,
        type_: 11,
        dpl: 3,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment { selector: 16 | 3, type_: 3, l: 0, db: 1, ..code };
    sregs.cs = code;
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *segment = data;
    }
    sregs.gdt.base = DESCRIPTORS;
    sregs.gdt.limit = 23;
    // No handler for anything: an exception ends the guest, and the VMM tells.
    sregs.idt.limit = 0;
    sregs.tr = kvm_segment {
        base: TASK,
        limit: TASK_SIZE - 1,
        selector: 24,
        type_: 11,
        present: 1,
        ..Default::default()
    };
    sregs.cr3 = PAGE_TABLES;
    // Protection, monitor coprocessor, numeric error, paging (SDM volume 3, 2.5).
    sregs.cr0 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 31;
    // Physical address extension, and SSE with its exceptions.
    sregs.cr4 = 1 << 5 | 1 << 9 | 1 << 10;
    // Long mode, enabled and active.
    sregs.efer = 1 << 8 | 1 << 10;
    vcpu.set_sregs(&sregs).map_err(kvm("KVM_SET_SREGS"))?;
    let regs = kvm_regs { rip: entry, rdi: number.into(), rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).map_err(kvm("KVM_SET_REGS"))?;
    // Without firmware nobody sends the start-up interrupt that the others would wait for.
    let runnable = kvm_bindings::kvm_mp_state { mp_state: kvm_bindings::KVM_MP_STATE_RUNNABLE };
    vcpu.set_mp_state(runnable).map_err(kvm("KVM_SET_MP_STATE"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{BlockPlan, check, plain};

    fn ram(mib: u64) -> GuestRam {
        GuestRam::new(&check(plain(ByteCount(mib << 20), None)).unwrap()).unwrap()
    }

    const PLAN: GuestPlan = GuestPlan {
        mode: GuestMode::HotCold,
        rate: 7,
        fill: None,
        working_set: None,
        disk_on_ports: false,
        card_on_ports: None,
    };

    #[test]
    fn the_boot_block_is_written_as_the_guest_reads_it() {
        let ram = ram(64);
        let features = Features { hints: false, reporting: true };
        let devices = Devices { disk: true, balloon: Some(features) };
        let entry = place(&ram, &PLAN, 3, devices, 2_000_000).unwrap();
        assert!((PROGRAM..PROGRAM + (1 << 20)).contains(&entry));
        let mut bytes = [0; 4096];
        ram.read(BOOT_BLOCK, &mut bytes).unwrap();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(word(0), BOOT_MAGIC);
        assert_eq!(
            word(std::mem::offset_of!(BootBlock, order)),
            u64::from(ORDER_HOT_COLD) | 3 << 32
        );
        assert_eq!(word(std::mem::offset_of!(BootBlock, tsc_khz)), 2_000_000);
        assert_eq!(word(std::mem::offset_of!(BootBlock, balloon)), BALLOON_REPORTING);
        let fill = word(std::mem::offset_of!(BootBlock, fill));
        assert!((6000..8192).contains(&fill), "{fill}");
    }

    #[test]
    fn windows_take_from_all_blocks_and_no_page_twice() {
        let plans = [
            "name=low,size=16MiB,gpa=0",
            "name=odd,size=8MiB,gpa=0x2003000",
            "name=high,size=8MiB,gpa=0x100000000",
        ];
        let ram = GuestRam::new(&check(plans.map(|text| text.parse().unwrap()).to_vec()).unwrap())
            .unwrap();
        let mut memory = FreeMemory::new(&ram, 2 << 20).unwrap();
        memory.map_all().unwrap();
        memory.window(PAGES_WINDOW, 4000).unwrap();
        let mut frames = std::collections::BTreeSet::new();
        for page in 0..4000 {
            let address = PAGES_WINDOW + page * PAGE_SIZE;
            let table = memory.table(address, 1).unwrap();
            let mut entry = [0; 8];
            ram.read(table + (address >> 12 & 511) * 8, &mut entry).unwrap();
            let entry = u64::from_le_bytes(entry);
            assert_eq!(entry & 0xfff, PAGE);
            assert!(frames.insert(entry & ADDRESS), "page {page}");
        }
        for BlockPlan { name, gpa, size, .. } in ram.plans() {
            let inside = frames.range(gpa..gpa + size.0).count();
            assert!(inside > 1000, "{inside} in {name}");
        }
        assert!(memory.window(GENERATIONS_WINDOW, 8000).is_none());
    }

    #[test]
    fn a_guest_that_cannot_fill_is_refused() {
        let plan = GuestPlan { fill: Some(ByteCount(64 << 20)), ..PLAN };
        let error = place(&ram(64), &plan, 1, Devices::default(), 1).unwrap_err();
        assert!(error.to_string().contains("use a smaller --fill or more --memory"), "{error}");
    }

    #[test]
    fn the_image_does_not_hold_the_beacons_magic() {
        let magic = b"GODWIT-BEACON-1\0";
        assert!(!IMAGE.windows(magic.len()).any(|window| window == magic));
    }
}
