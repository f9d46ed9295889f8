//! The guest's files and what it is told to do.
//!
//! Keeps one promise: where a file is missing, the error names the command that makes it.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use godwit_stamp::settings::{BuildWork, CardAddress, DiskWork, Mode, Settings};
use godwit_stamp::workload::Order;
use godwit_units::ByteCount;

/// `quiet` keeps the console for the guest's own lines; a panic still shows, and ends QEMU by a
/// reboot. Without `tsc=reliable` the kernel may give up on the time-stamp counter after a pause,
/// and then every look at the clock leaves the emulated processor. The mitigations cost time and
/// protect nobody here, and a host that is slow is no bug of the guest: on a busy one the kernel
/// may count too few ticks in its check of the timer, and panics at boot.
pub(crate) const KERNEL: &str =
    "console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off nosoftlockup no_timer_check";

const MIB: u64 = 1 << 20;

/// The workspace's `target/`, where `make guest` and `make qemu` put their results whatever
/// CARGO_TARGET_DIR says.
pub(crate) fn target_dir() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir).join("target")
}

/// Kernel and initramfs.
#[derive(Clone, Debug)]
pub struct GuestFiles {
    /// The kernel image.
    pub kernel: PathBuf,
    /// The initramfs with the guest program.
    pub initramfs: PathBuf,
}

impl GuestFiles {
    /// Finds what `make guest` made.
    ///
    /// # Errors
    /// When it was not run yet.
    pub fn find() -> anyhow::Result<Self> {
        let dir = target_dir().join("guest");
        let files = Self { kernel: dir.join("vmlinuz"), initramfs: dir.join("initramfs.cpio") };
        for file in [&files.kernel, &files.initramfs] {
            ensure!(file.exists(), "{} is missing: run `make guest`", file.display());
        }
        Ok(files)
    }

    /// What QEMU is told so that it boots them with this command line.
    pub(crate) fn arguments(&self, append: &str) -> Vec<String> {
        let (kernel, initramfs) = (self.kernel.display(), self.initramfs.display());
        let words = ["-kernel", &kernel.to_string(), "-initrd", &initramfs.to_string()];
        words.into_iter().chain(["-append", append]).map(str::to_owned).collect()
    }
}

/// A guest: its size and its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestConfig {
    /// RAM of the virtual machine.
    pub memory: ByteCount,
    /// How it spends its time.
    pub mode: Mode,
    /// Pages written a second in rate mode.
    pub rate: u64,
    /// Pages checked a second in that mode and when it is idle, for which its processor rests for
    /// 2 ms at a time; `None`: as [`Settings`] says. Nothing of it on KVM.
    pub checks: Option<u64>,
    /// In which order pages are written.
    pub order: Order,
    /// The part of the buffer that is written.
    pub working_set: ByteCount,
    /// The buffer that is stamped and checked.
    pub fill: ByteCount,
    /// What it does with its virtio disks, if it has some.
    pub disk: DiskWork,
    /// Processes that it runs beside that.
    pub build: BuildWork,
    /// The address of its network card, if it has one that is to be used.
    pub address: Option<CardAddress>,
}

impl GuestConfig {
    /// The guest of the demo and of the benchmarks: 1 GiB, 512 MiB of it filled, 2,000 pages a
    /// second over 128 MiB.
    #[must_use]
    pub fn standard() -> Self {
        Self {
            memory: ByteCount(1024 * MIB),
            mode: Mode::Rate,
            rate: 2000,
            checks: None,
            order: Order::Random,
            working_set: ByteCount(128 * MIB),
            fill: ByteCount(512 * MIB),
            disk: DiskWork::default(),
            build: BuildWork::default(),
            address: None,
        }
    }

    /// A small guest for tests: 256 MiB, 64 MiB of it filled, a working set of 16 MiB. Ready in
    /// three seconds. In rate mode and when it is idle it looks at everything six times a second
    /// and leaves its processor to others for most of the time, so that tests beside each other
    /// hold up none.
    #[must_use]
    pub fn small(mode: Mode) -> Self {
        Self {
            memory: ByteCount(256 * MIB),
            mode,
            working_set: ByteCount(16 * MIB),
            fill: ByteCount(64 * MIB),
            checks: Some(100_000),
            ..Self::standard()
        }
    }

    /// The same that does not rest between its checks, so that whoever looks on sees within 0.1 ms
    /// whether it runs.
    #[must_use]
    pub fn without_rest(self) -> Self {
        Self { checks: None, ..self }
    }

    /// The kernel command line.
    #[must_use]
    pub fn command_line(&self) -> String {
        format!("{KERNEL} {}", self.settings())
    }

    /// What the guest is told.
    pub(crate) fn settings(&self) -> Settings {
        let Self { memory: _, mode, rate, checks, order, working_set, fill, .. } = *self;
        let Self { disk, build, address, .. } = *self;
        Settings { mode, rate, checks, order, working_set, fill, disk, build, address }
    }
}
