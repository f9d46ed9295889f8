//! What the VMM tells the guest: one page at a fixed place, written before the guest starts.
//!
//! The file is compiled twice, into the VMM and into the guest program, so that the two cannot
//! disagree. It keeps to `core` for that reason. What the settings mean is the guest's to say
//! (`guest/work.rs`), where they come from the command line's.

/// Where the page is, as a guest physical address.
pub const BOOT_BLOCK: u64 = 0x1000;
/// Where the program is linked to; below it are boot block, descriptor table and page tables.
pub const PROGRAM: u64 = 0x10_0000;
/// What the page begins with; it changes with the layout.
pub const BOOT_MAGIC: u64 = 0x6f64_7769_7420_0004;
/// The most vCPUs that the guest has stacks for.
pub const MAX_CPUS: u32 = 32;
/// The port at which the guest sleeps for so many microseconds. A guest with interrupts would halt;
/// this one runs without privilege, since only that runs at full speed under every KVM, those of
/// virtual machines among them.
pub const SLEEP_PORT: u16 = 0x608;
/// Where the page tables begin.
pub const PAGE_TABLES: u64 = 0x2000;
/// Where the guest finds the blocks that were plugged in, as a guest physical address: how many
/// there are, and of each its first address and its pages, 8 bytes each. The count comes last, so
/// that what it counts is there.
pub const PLUGGED: u64 = 0x3000;
/// The most of them.
pub const MAX_PLUGGED: usize = 16;
/// The bits of an entry that are an address.
pub const TABLE_ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The virtual address at which the pages to be stamped follow each other without seams, wherever
/// they are.
pub const PAGES_WINDOW: u64 = 2 << 39;
/// The same for the numbers that say which generation each of them should have, 8 bytes each.
pub const GENERATIONS_WINDOW: u64 = 1 << 39;
/// Where the guest finds its disk, a virtio-mmio device.
pub const DISK_MMIO: u64 = 0xd000_0000;
/// The disk is on the PCI bus of another VMM: in this slot, and the guest gives it these ports.
pub const DISK_ON_PORTS: u32 = 2;
/// Its slot on the first bus.
pub const DISK_SLOT: u16 = 8;
/// The first of the ports that it is given.
pub const DISK_PORTS: u16 = 0xc000;
/// The slot of its card, where it has one, which is another VMM's as well.
pub const CARD_SLOT: u16 = 9;
/// The first of the card's ports.
pub const CARD_PORTS: u16 = 0xc100;
/// Where it finds its balloon, another one.
pub const BALLOON_MMIO: u64 = 0xd000_1000;
/// The port of the serial line, COM1.
pub const SERIAL_PORT: u16 = 0x3f8;
/// The port at which the guest switches the machine off.
pub const POWER_OFF_PORT: u16 = 0x604;

/// Counts, and otherwise sleeps.
pub const MODE_IDLE: u32 = 0;
/// Writes at a given rate; between writes it counts and checks without pause.
pub const MODE_RATE: u32 = 1;
/// Writes, counts and checks as fast as it can.
pub const MODE_FULL: u32 = 2;
/// Works for a second, then faults with no handler for it: for the test of how that is told.
pub const MODE_CRASH: u32 = 3;
/// Frees and takes back pages all the time, and checks those that it has.
pub const MODE_CHURN: u32 = 4;
/// Writes and counts for 5 ms, checks and counts for 5 ms, by turns.
pub const MODE_MIXED: u32 = 5;

/// The balloon takes hints.
pub const BALLOON_HINTS: u64 = 1;
/// The balloon takes reports.
pub const BALLOON_REPORTING: u64 = 2;

/// Pages are written at random.
pub const ORDER_RANDOM: u32 = 0;
/// Pages are written by Zipf's law.
pub const ORDER_HOT_COLD: u32 = 1;
/// Pages are written in turn.
pub const ORDER_SEQUENTIAL: u32 = 2;
/// Nine writes of ten go to the first tenth of the pages.
pub const ORDER_HOT_TENTH: u32 = 3;

/// The page itself.
#[repr(C, align(4096))]
#[derive(Clone, Copy, Debug)]
pub struct BootBlock {
    /// [`BOOT_MAGIC`].
    pub magic: u64,
    /// One of the `MODE_` constants.
    pub mode: u32,
    /// One of the `ORDER_` constants.
    pub order: u32,
    /// How many vCPUs there are.
    pub cpus: u32,
    /// Whether there is no disk (0), one at [`DISK_MMIO`] (1), or [`DISK_ON_PORTS`].
    pub disk: u32,
    /// Pages written a second, by all vCPUs together.
    pub rate: u64,
    /// Pages that are stamped at start and checked all the time.
    pub fill: u64,
    /// The part of them that is written; in [`MODE_CHURN`], the part that is in use.
    pub working_set: u64,
    /// How fast the time-stamp counter runs.
    pub tsc_khz: u64,
    /// What the balloon takes, the `BALLOON_` bits; 0: there is none.
    pub balloon: u64,
    /// The IPv4 address of the card; 0: there is none.
    pub card: u64,
    /// Nothing.
    pub rest: [u64; 503],
}

const _: () = assert!(size_of::<BootBlock>() == 4096);
