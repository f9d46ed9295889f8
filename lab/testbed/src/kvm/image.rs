//! The guest program in the RAM file of a machine that is not started yet.
//!
//! Keeps one promise: guest addresses are where QEMU's machine `q35` has them: what does not fit
//! below its devices continues at 4 GiB (`pc_q35_init` in hw/i386/pc_q35.c).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, bail};
use godwit_microvm::{BootMemory, GuestMode, GuestPlan, place_guest};
use godwit_stamp::settings::{BuildWork, DiskWork, Mode};
use godwit_stamp::workload::Order;
use godwit_units::ByteCount;

use crate::guest::GuestConfig;

/// What the program does with a disk: a page of each every 10 ms, of 16 MiB.
pub const DISK_WORK: DiskWork = DiskWork {
    write: 409_600,
    read: 409_600,
    block: ByteCount(4 << 10),
    span: ByteCount(16 << 20),
    threads: 1,
};
/// Where the firmware finds the program's entry.
const ENTRY: u64 = 0x7f8;
/// A machine with this much memory has its first 2 GiB below its devices, a smaller one all of it.
const SPLIT_FROM: u64 = 0xb000_0000;
const LOW: u64 = 2 << 30;
const HIGH: u64 = 4 << 30;

/// Puts the program, told to do what `guest` says, into the new file `ram`.
pub(crate) fn fill(ram: &Path, guest: &GuestConfig, cpus: u32, tsc_khz: u32) -> anyhow::Result<()> {
    let plan = plan(guest)?;
    let file = File::options().read(true).write(true).create_new(true).open(ram);
    let file = file.with_context(|| format!("cannot create {}", ram.display()))?;
    file.set_len(guest.memory.0)?;
    let memory = Memory { file, size: guest.memory.0 };
    let entry = place_guest(&memory, &plan, cpus, tsc_khz)?;
    memory.write(ENTRY, &entry.to_le_bytes()).context("there is no memory at address 0")
}

fn plan(guest: &GuestConfig) -> anyhow::Result<GuestPlan> {
    let (mode, rate) = match (guest.mode, guest.order) {
        (Mode::Idle, _) => (GuestMode::Idle, 0),
        (Mode::Rate, Order::Random) => (GuestMode::Rate, guest.rate),
        (Mode::Full, Order::Random) => (GuestMode::Full, 0),
        (Mode::Mixed, Order::Random) => (GuestMode::Mixed, 0),
        (Mode::Mixed, order) => {
            bail!("the guest on KVM in mode 'mixed' writes at random, not {order}")
        }
        // Of these, rate 0 is full speed.
        (mode, order) => {
            let mode_of = match order {
                Order::HotTenth => GuestMode::HotTenth,
                Order::Sequential => GuestMode::Sequential,
                Order::HotCold | Order::Random => GuestMode::HotCold,
            };
            (mode_of, if mode == Mode::Rate { guest.rate.max(1) } else { 0 })
        }
    };
    if guest.build != BuildWork::default() {
        bail!("the guest on KVM has no processes");
    }
    let disk_on_ports = !guest.disk.is_idle();
    if disk_on_ports && guest.disk != DISK_WORK {
        bail!("the guest on KVM writes and reads disks at its own pace only: {DISK_WORK:?}");
    }
    let (fill, working_set) = (Some(guest.fill), Some(guest.working_set));
    let card_on_ports = guest.address.map(|address| address.host);
    Ok(GuestPlan { mode, rate, fill, working_set, disk_on_ports, card_on_ports })
}

struct Memory {
    file: File,
    size: u64,
}

impl Memory {
    /// Where in the file guest address `gpa` is, if `len` bytes from there on are memory.
    fn offset(&self, gpa: u64, len: usize) -> Option<u64> {
        let mut before = 0;
        for (start, size) in self.stretches() {
            if let Some(at) = gpa.checked_sub(start).filter(|at| *at < size) {
                return (size - at >= len as u64).then_some(before + at);
            }
            before += size;
        }
        None
    }
}

impl BootMemory for Memory {
    fn write(&self, gpa: u64, bytes: &[u8]) -> Option<()> {
        self.file.write_all_at(bytes, self.offset(gpa, bytes.len())?).ok()
    }

    fn read(&self, gpa: u64, bytes: &mut [u8]) -> Option<()> {
        self.file.read_exact_at(bytes, self.offset(gpa, bytes.len())?).ok()
    }

    fn stretches(&self) -> Vec<(u64, u64)> {
        if self.size < SPLIT_FROM {
            return vec![(0, self.size)];
        }
        vec![(0, LOW), (HIGH, self.size - LOW)]
    }
}
