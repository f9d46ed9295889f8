//! The guest that runs under QEMU on KVM: the microvm's guest program behind a firmware of our own.
//!
//! Linux does not boot under every KVM, those within virtual machines among them; a program in ring
//! 3 runs at full speed under all. So the way from a processor's reset to ring 3 is gone under TCG,
//! once for each kind of machine and work: there the vCPUs wait before the program begins, QEMU
//! saves the VM's state, and every VM on KVM starts from it as one that arrives by migration
//! (`firmware/`, [`image`]).
//!
//! Keeps two promises: a state that is kept was made of this program, for this QEMU, this machine
//! and this work; and it holds nothing but the program and its tables, so memory that the guest has
//! not yet used is as untouched as that of a guest which has just booted.

mod image;

pub use image::DISK_WORK;

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use godwit_microvm::GUEST_IMAGE;

use crate::console::Console;
use crate::guest::GuestConfig;
use crate::qemu_build::{QemuBuild, in_turn, told_builds};
use crate::saved::SavedState;
use crate::skip::kvm_for;

/// What every vCPU prints when it waits.
const WAITS: char = 'G';
const LIMIT: Duration = Duration::from_secs(60);

/// The firmware, which this crate's build script has built.
pub(crate) const FIRMWARE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/firmware"));

/// The code that puts the program into memory, of which a state holds what it did.
const PLACED_BY: [&str; 3] = [
    include_str!("kvm/image.rs"),
    include_str!("../../../crates/microvm/src/guest.rs"),
    include_str!("../../../crates/microvm/src/boot_block.rs"),
];

/// The saved state that VMs of one kind start from.
#[derive(Debug)]
pub(crate) struct State<'a> {
    guest: &'a GuestConfig,
    cpus: u32,
    tsc_khz: u32,
    saved: SavedState<'a>,
}

impl<'a> State<'a> {
    /// Where it is, or is to be.
    pub(crate) fn of(
        build: &'a QemuBuild,
        guest: &'a GuestConfig,
        (cpus, has_slots): (u32, bool),
    ) -> anyhow::Result<Self> {
        let tsc_khz = tsc_khz()?;
        let kind = (guest.memory.0, guest.command_line(), cpus, has_slots, tsc_khz);
        let saved = SavedState::new(build, "kvm", (FIRMWARE, GUEST_IMAGE, PLACED_BY), kind);
        Ok(Self { guest, cpus, tsc_khz, saved })
    }

    /// The file.
    pub(crate) fn saved(&self) -> &SavedState<'a> {
        &self.saved
    }

    /// Puts the program into the new RAM file `ram` of a machine that is about to start.
    pub(crate) fn fill(&self, ram: &Path) -> anyhow::Result<()> {
        image::fill(ram, self.guest, self.cpus, self.tsc_khz)
    }

    /// Waits until the vCPUs of that machine wait.
    pub(crate) fn await_gate(&self, console: &Console) -> anyhow::Result<()> {
        let cpus = self.cpus as usize;
        console.wait("vCPU at the gate", LIMIT, |console| {
            (console.tail().matches(WAITS).count() >= cpus).then_some(())
        })
    }
}

/// How fast the time-stamp counter of a VM on KVM runs.
fn tsc_khz() -> anyhow::Result<u32> {
    let vcpu = kvm_ioctls::Kvm::new().and_then(|kvm| kvm.create_vm()?.create_vcpu(0));
    vcpu.and_then(|vcpu| vcpu.get_tsc_khz()).context("KVM tells no frequency")
}

/// The QEMUs that `test` can run with on KVM; what is missing is told aloud.
#[must_use]
pub fn kvm_builds_for(test: &str) -> Vec<QemuBuild> {
    if !kvm_for(test) {
        return Vec::new();
    }
    told_builds(test)
}

/// The one of them that `test` runs with, as [`builds_in_turn_for`](crate::builds_in_turn_for)
/// chooses it.
#[must_use]
pub fn kvm_builds_in_turn_for(test: &str) -> Vec<QemuBuild> {
    in_turn(test, kvm_builds_for(test))
}
