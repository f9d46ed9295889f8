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

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_microvm::GUEST_IMAGE;
use godwit_qemu::monitor::Qmp;
use serde_json::{Value, json};

use crate::console::Console;
use crate::guest::{GuestConfig, target_dir};
use crate::leftovers::unique;
use crate::qemu_build::{QemuBuild, in_turn, told_builds};
use crate::skip::kvm_for;

/// What every vCPU prints when it waits.
const WAITS: char = 'G';
const LIMIT: Duration = Duration::from_secs(60);
/// How long what was made of another program is kept.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// From this version on QEMU leaves memory alone that is zero in a saved state.
const MAPPED_RAM: (u32, u32, u32) = (9, 0, 0);

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
    build: &'a QemuBuild,
    guest: &'a GuestConfig,
    cpus: u32,
    tsc_khz: u32,
    path: PathBuf,
}

impl<'a> State<'a> {
    /// Where it is, or is to be.
    pub(crate) fn of(
        build: &'a QemuBuild,
        guest: &'a GuestConfig,
        cpus: u32,
    ) -> anyhow::Result<Self> {
        let tsc_khz = tsc_khz()?;
        let mut kind = DefaultHasher::new();
        (build.version, guest.memory.0, guest.command_line(), cpus, tsc_khz).hash(&mut kind);
        let name = format!("{}{:016x}", program(), kind.finish());
        Ok(Self { build, guest, cpus, tsc_khz, path: dir().join(name) })
    }

    /// Whether it is there.
    pub(crate) fn is_kept(&self) -> bool {
        self.path.exists()
    }

    /// Puts the program into the new RAM file `ram` of a machine that is about to start.
    pub(crate) fn fill(&self, ram: &Path) -> anyhow::Result<()> {
        image::fill(ram, self.guest, self.cpus, self.tsc_khz)
    }

    /// Saves the state of that machine when its vCPUs wait.
    pub(crate) fn save(&self, qmp: &mut Qmp, console: &Console) -> anyhow::Result<()> {
        let cpus = self.cpus as usize;
        console.wait("vCPU at the gate", LIMIT, |console| {
            (console.tail().matches(WAITS).count() >= cpus).then_some(())
        })?;
        qmp.execute("stop", Value::Null)?;
        set_mapped(qmp, self.build, true)?;
        std::fs::create_dir_all(dir()).context("cannot create a directory in target/guest")?;
        remove_others();
        // Others may be saving the same one.
        let new = dir().join(format!("{}{}", program(), unique().0));
        qmp.execute("migrate", json!({ "uri": self.uri("cat >", &new) }))?;
        let saved = await_end(qmp).and_then(|()| Ok(std::fs::rename(&new, &self.path)?));
        if saved.is_err() {
            let _ = std::fs::remove_file(&new);
        }
        saved
    }

    /// Loads it into the QEMU behind `qmp`, which waits for one, and lets the guest run.
    pub(crate) fn load(&self, qmp: &mut Qmp) -> anyhow::Result<()> {
        set_mapped(qmp, self.build, true)?;
        qmp.execute("migrate-incoming", json!({ "uri": self.uri("cat", &self.path) }))?;
        await_end(qmp)?;
        set_mapped(qmp, self.build, false)?;
        qmp.execute("cont", Value::Null)?;
        qmp.forget_events();
        Ok(())
    }

    /// Older QEMUs know no files, but commands.
    fn uri(&self, command: &str, path: &Path) -> String {
        let path = path.display();
        if self.build.version >= MAPPED_RAM {
            format!("file:{path}")
        } else {
            format!("exec:{command} {path}")
        }
    }
}

fn dir() -> PathBuf {
    target_dir().join("guest").join("kvm")
}

/// What the names of all states begin with that hold this program.
fn program() -> String {
    let mut program = DefaultHasher::new();
    (FIRMWARE, GUEST_IMAGE, PLACED_BY).hash(&mut program);
    format!("{:016x}-", program.finish())
}

/// Removes what was made of other programs, a day ago or more: tests and benchmarks have programs
/// of different builds, and may run at once.
fn remove_others() {
    let own = program();
    for entry in std::fs::read_dir(dir()).into_iter().flatten().flatten() {
        let made = entry.metadata().and_then(|file| file.modified()).ok();
        let age = made.and_then(|made| made.elapsed().ok());
        let is_old = age.is_some_and(|age| age > KEPT);
        if is_old && !entry.file_name().to_string_lossy().starts_with(&own) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// How fast the time-stamp counter of a VM on KVM runs.
fn tsc_khz() -> anyhow::Result<u32> {
    let vcpu = kvm_ioctls::Kvm::new().and_then(|kvm| kvm.create_vm()?.create_vcpu(0));
    vcpu.and_then(|vcpu| vcpu.get_tsc_khz()).context("KVM tells no frequency")
}

fn set_mapped(qmp: &mut Qmp, build: &QemuBuild, state: bool) -> anyhow::Result<()> {
    if build.version < MAPPED_RAM {
        return Ok(());
    }
    let mapped = json!({ "capability": "mapped-ram", "state": state });
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": [mapped] }))?;
    Ok(())
}

fn await_end(qmp: &mut Qmp) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    loop {
        let info = qmp.execute("query-migrate", Value::Null)?;
        match info["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => anyhow::bail!("QEMU says {info}"),
            _ => ensure!(Instant::now() < until, "QEMU is not done within {LIMIT:?}: {info}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
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
