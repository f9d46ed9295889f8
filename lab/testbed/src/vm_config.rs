//! Which machine is to be started: the QEMU, the guest in it, and what it is made of.

use std::path::{Path, PathBuf};

use godwit_units::ByteCount;

use crate::disk::DiskImage;
use crate::guest::GuestConfig;
use crate::image::Boot;
use crate::qemu_build::QemuBuild;

/// Where the guest's RAM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Backend {
    /// A named file under /dev/shm, mapped shared: what Godwit needs.
    #[default]
    SharedFile,
    /// The same file mapped privately: the guest's writes do not reach it.
    PrivateFile,
    /// Anonymous memory.
    Anonymous,
    /// Shared memory without a name.
    Memfd,
    /// The same in huge pages of 2 MiB, which must be there.
    HugeMemfd,
    /// The same in huge pages of 1 GiB.
    GiantMemfd,
    /// Anonymous memory of two NUMA nodes.
    Nodes,
}

/// What runs the guest's instructions, and so which guest it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Accelerator {
    /// QEMU, and the guest is Linux.
    #[default]
    Tcg,
    /// The processor, and the guest is the microvm's program.
    Kvm,
    /// QEMU, and the guest is that program, in memory that somebody has filled: on its way to the
    /// state that guests on KVM start from.
    Firmware,
}

/// Which machine to start.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// The QEMU.
    pub build: QemuBuild,
    /// The guest in it.
    pub guest: GuestConfig,
    /// What runs the guest.
    pub accelerator: Accelerator,
    /// What it boots, under [`Accelerator::Tcg`].
    pub boot: Boot,
    /// It does boot, also where tests start guests from the state of one that has.
    pub boots: bool,
    /// Virtual processors. Linux does its work on one of them, the guest on KVM on all.
    pub cpus: u32,
    /// Where its RAM is.
    pub backend: Backend,
    /// The directory of its RAM file, where it is not /dev/shm.
    pub ram_in: Option<PathBuf>,
    /// Places in the ring by which KVM tells of pages that were written; `None`: by bitmaps.
    pub dirty_ring: Option<u32>,
    /// On KVM: memory in modules beside its RAM, which its guest does not use; `None`: it has no
    /// slots for them.
    pub modules: Option<ByteCount>,
    /// More arguments for QEMU.
    pub extra: Vec<String>,
}

impl VmConfig {
    /// One virtual processor, RAM in a shared file, nothing extra.
    #[must_use]
    pub fn new(build: &QemuBuild, guest: GuestConfig) -> Self {
        let (build, backend) = (build.clone(), Backend::default());
        let (accelerator, boot) = (Accelerator::default(), Boot::default());
        let (ram_in, dirty_ring, modules, extra) = (None, None, None, Vec::new());
        let (boots, cpus) = (false, 1);
        Self {
            build,
            guest,
            accelerator,
            boot,
            boots,
            cpus,
            backend,
            ram_in,
            dirty_ring,
            modules,
            extra,
        }
    }

    /// The same on KVM, with a guest of its own that does the same work.
    #[must_use]
    pub fn on_kvm(mut self) -> Self {
        self.accelerator = Accelerator::Kvm;
        self
    }

    /// The same on KVM with a ring of so many places, a power of two.
    #[must_use]
    pub fn with_dirty_ring(mut self, places: u32) -> Self {
        self.dirty_ring = Some(places);
        self
    }

    /// The same on KVM with so much more memory of QEMU's own in two modules, whole MiB each.
    #[must_use]
    pub fn with_modules(mut self, size: ByteCount) -> Self {
        self.modules = Some(size);
        self
    }

    /// The same with RAM elsewhere.
    #[must_use]
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// The same with one more disk, whose block node is called `name`; on KVM the only one, and
    /// said behind [`Self::on_kvm`].
    #[must_use]
    pub fn with_disk(mut self, name: &str, image: &DiskImage) -> Self {
        self.extra.extend(match self.accelerator {
            Accelerator::Kvm => image.arguments_on_kvm(name),
            _ => image.arguments(name),
        });
        self
    }

    /// The same that boots something else.
    #[must_use]
    pub fn with_boot(mut self, boot: Boot) -> Self {
        self.boot = boot;
        self
    }

    /// The same whose guest boots in any case: where that is what is tested, or that memory is as
    /// untouched as it is then (a state that QEMU 7.2 loads touches all of it).
    #[must_use]
    pub fn booting(mut self) -> Self {
        self.boots = true;
        self
    }

    /// The same with its RAM file in `dir`.
    #[must_use]
    pub fn with_ram_in(mut self, dir: &Path) -> Self {
        self.ram_in = Some(dir.to_owned());
        self
    }

    /// The same with more arguments for QEMU.
    #[must_use]
    pub fn with_extra(mut self, extra: &[&str]) -> Self {
        self.extra.extend(extra.iter().map(|&argument| argument.to_owned()));
        self
    }
}
