//! What /proc tells of the QEMUs of this host.
//!
//! A command line may be read by anybody, mappings and descriptors by root and the process's own
//! user alone: what cannot be seen is left out.

use std::io;
use std::path::Path;

use godwit_units::ByteCount;
use procfs::process::{MMPermissions, MMapPath, Process};
use rustix::fs::{StatFs, statfs};

use super::kinds::{Owner, RamKind};
use crate::command_line::{Given, find};
use crate::find::given;
use crate::mark::start_time;
use crate::process::{Descriptor, descriptors};

/// What QEMU gives a guest that nobody gave any.
const DEFAULT_RAM: ByteCount = ByteCount(128 << 20);
/// HUGETLBFS_MAGIC of linux/magic.h.
const HUGETLBFS: u64 = 0x9584_58f6;

/// A QEMU, by its process.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) pid: i32,
    started: Option<u64>,
    pub(super) options: Vec<Given>,
    pub(super) name: Option<String>,
    pub(super) owner: Owner,
}

/// All QEMUs that can be seen.
pub(super) fn all() -> io::Result<Vec<Found>> {
    let entries = std::fs::read_dir("/proc")?.flatten();
    let mut pids: Vec<i32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    Ok(pids.into_iter().filter_map(Found::of).collect())
}

/// Why there may be QEMUs that cannot be seen.
pub(super) fn hidden() -> Option<&'static str> {
    // The first process is always there, and its command line is everybody's (proc(5), hidepid).
    std::fs::read("/proc/1/cmdline").err().map(|_| {
        "processes of other users are hidden on this host (/proc is mounted with hidepid): run \
         godwit as root to see their VMs"
    })
}

/// Whether a program of this name is a QEMU that runs a machine.
fn is_qemu(program: &str) -> bool {
    let name = program.rsplit('/').next().unwrap_or_default();
    name.starts_with("qemu-system-") || matches!(name, "qemu-kvm" | "kvm")
}

impl Found {
    fn of(pid: i32) -> Option<Self> {
        let process = Process::new(pid).ok()?;
        let words = process.cmdline().ok()?;
        if !is_qemu(words.first()?) {
            return None;
        }
        let started = start_time(pid.unsigned_abs());
        let options = given(&process, &words);
        let (name, owner) = identity(&options);
        // A QEMU that tells what it can do is no machine.
        let asks = |it: &Given| matches!(it.name.as_str(), "version" | "help" | "h");
        (!options.iter().any(asks)).then_some(Self { pid, started, options, name, owner })
    }

    /// Whether it still is the process that was found.
    pub(super) fn is_there(&self) -> bool {
        start_time(self.pid.unsigned_abs()) == self.started
    }

    /// The values of the options called `name`.
    pub(super) fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let named = self.options.iter().filter(move |it| it.name == name);
        named.filter_map(|it| it.value.as_deref())
    }

    /// What runs the guest, as the command line says.
    pub(super) fn accelerator(&self) -> Option<String> {
        // The descriptor of a virtual machine says it more surely.
        let is_machine = |it: Descriptor| {
            it.target().is_some_and(|target| target.as_os_str() == "anon_inode:kvm-vm")
        };
        if descriptors(self.pid).is_ok_and(|mut open| open.any(is_machine)) {
            return Some("kvm".to_owned());
        }
        if self.options.iter().any(|it| it.name == "enable-kvm") {
            return Some("kvm".to_owned());
        }
        let first = |value: String| value.split(':').next().map(str::to_owned);
        let accel = self.values("accel").find_map(|value| find(value, "accel", "accel"));
        let machines = || self.values("machine").chain(self.values("M"));
        let of_machine = || machines().find_map(|value| find(value, "accel", ""));
        accel.or_else(of_machine).and_then(first).or_else(|| Some("tcg".to_owned()))
    }

    /// The size of its RAM, as the command line says.
    pub(super) fn ram(&self) -> Option<ByteCount> {
        match self.values("m").filter_map(|value| find(value, "size", "size")).last() {
            None => Some(DEFAULT_RAM),
            // QEMU counts in MiB where no unit is given.
            Some(text) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                text.parse::<u64>().ok()?.checked_mul(1 << 20).map(ByteCount)
            }
            Some(text) => size(&text),
        }
    }

    /// What kind of memory its RAM is: of the mappings that are as large as it or as a part of it,
    /// or as the command line says.
    pub(super) fn ram_kind(&self) -> Option<RamKind> {
        let maps = Process::new(self.pid).and_then(|process| process.maps()).ok();
        let sizes = self.sizes();
        let writable = maps.into_iter().flatten().filter(|map| {
            let size = map.address.1 - map.address.0;
            map.perms.contains(MMPermissions::WRITE) && sizes.contains(&size)
        });
        let kinds: Vec<RamKind> = writable
            .map(|map| match map.pathname {
                MMapPath::Path(path) => self.kind_of_file(&path),
                _ => RamKind::Anonymous,
            })
            .collect();
        // Others than anonymous ones are as large by no accident.
        let first = kinds.iter().find(|kind| **kind != RamKind::Anonymous).or(kinds.first());
        first.copied().or_else(|| self.told_kind())
    }

    /// The sizes of RAM and of its parts, in bytes.
    fn sizes(&self) -> Vec<u64> {
        let parts = self.values("object").filter_map(|value| find(value, "size", ""));
        let parts = parts.filter_map(|text| size(&text)).map(|size| size.0);
        self.ram().map(|size| size.0).into_iter().chain(parts).collect()
    }

    fn kind_of_file(&self, path: &Path) -> RamKind {
        let text = path.to_string_lossy();
        if text.starts_with("/memfd:") {
            return RamKind::Memfd;
        }
        // As /proc shows memory in huge pages that no file holds (mm/hugetlb.c).
        if text.starts_with("/anon_hugepage") {
            return RamKind::Anonymous;
        }
        let directory = path.parent().unwrap_or(path).strip_prefix("/").unwrap_or(path);
        let directory = Path::new("/proc").join(self.pid.to_string()).join("root").join(directory);
        match statfs(&directory) {
            Ok(file_system) if is_hugetlbfs(&file_system) => RamKind::Hugetlbfs,
            _ => RamKind::File,
        }
    }

    fn told_kind(&self) -> Option<RamKind> {
        let types = self.values("object").filter_map(|value| find(value, "qom-type", "qom-type"));
        let mut backends = types.filter(|kind| kind.starts_with("memory-backend-"));
        let on_path = self.values("mem-path").next();
        match (backends.next().as_deref(), on_path) {
            (Some("memory-backend-memfd"), _) => Some(RamKind::Memfd),
            (Some("memory-backend-file"), _) | (None, Some(_)) => Some(RamKind::File),
            (Some("memory-backend-ram") | None, _) => Some(RamKind::Anonymous),
            (Some(_), _) => None,
        }
    }

    /// How much memory it has in huge pages of its own (`HugetlbPages` of proc_pid_status(5)).
    pub(super) fn huge_pages(&self) -> Option<ByteCount> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(ByteCount(kib * 1024)).filter(|bytes| bytes.0 > 0)
    }
}

fn is_hugetlbfs(file_system: &StatFs) -> bool {
    #[allow(clippy::unnecessary_cast, reason = "the kind of number depends on the platform")]
    let kind = file_system.f_type as u64;
    kind == HUGETLBFS
}

/// A size as QEMU writes it: `1G`, `131072k`.
pub(super) fn size(text: &str) -> Option<ByteCount> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text.get(digits.len()..)?.to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).map(ByteCount)
}

/// What a QEMU is called, and by whom.
fn identity(options: &[Given]) -> (Option<String>, Owner) {
    let values = |name: &'static str| {
        let named = options.iter().filter(move |it| it.name == name);
        named.filter_map(|it| it.value.as_deref())
    };
    let name = values("name").filter_map(|value| find(value, "guest", "guest")).next_back();
    let chardev = |id: &str| values("chardev").find(|it| find(it, "id", "").as_deref() == Some(id));
    let mut paths = values("pidfile").map(str::to_owned);
    let mut under = |directory: &str| paths.find(|path| path.contains(directory));
    let owner = if chardev("charmonitor").is_some() {
        Owner::Libvirt(name.clone().unwrap_or_default())
    } else if let Some(path) = under("/qemu-server/") {
        let file = Path::new(&path).file_stem().unwrap_or_default();
        Owner::Proxmox(file.to_string_lossy().into_owned())
    } else if let Some(path) = values("readconfig").find(|path| is_of_incus(path)) {
        // With the project in front, where that is not the default one.
        let own = Path::new(path).parent().and_then(Path::file_name).unwrap_or_default();
        Owner::Incus(own.to_string_lossy().into_owned())
    } else {
        Owner::Plain
    };
    (name, owner)
}

/// Whether Incus, or LXD from which it came, has written this file of settings.
fn is_of_incus(path: &str) -> bool {
    let of = |word: &str| path.contains(&format!("/{word}/"));
    path.ends_with("/qemu.conf") && (of("incus") || of("lxd"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::options;

    fn found(line: &str) -> Found {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let options = options(&words);
        let (name, owner) = identity(&options);
        // No process has this number, so all comes from the command line.
        Found { pid: i32::MAX, started: None, options, name, owner }
    }

    #[test]
    fn who_keeps_a_qemu_shows_on_its_command_line() {
        let libvirt = found(
            "/usr/bin/qemu-system-x86_64 -name guest=web01,debug-threads=on -accel kvm -m \
             size=4194304k -object {\"qom-type\":\"memory-backend-ram\",\"id\":\"pc.ram\",\
             \"size\":4294967296} -chardev socket,id=charmonitor,fd=33,server=on,wait=off -mon \
             chardev=charmonitor,id=monitor,mode=control",
        );
        assert_eq!(libvirt.owner, Owner::Libvirt("web01".to_owned()));
        assert_eq!(libvirt.accelerator().as_deref(), Some("kvm"));
        assert_eq!(
            (libvirt.ram(), libvirt.told_kind()),
            (Some(ByteCount(4 << 30)), Some(RamKind::Anonymous))
        );
        assert_eq!(libvirt.sizes(), [4 << 30, 4 << 30]);

        let proxmox = found(
            "/usr/bin/kvm -id 100 -name vm,debug-threads=on -chardev \
             socket,id=qmp,path=/var/run/qemu-server/100.qmp,server=on,wait=off -mon \
             chardev=qmp,mode=control -pidfile /var/run/qemu-server/100.pid -daemonize -m 2048",
        );
        assert_eq!(proxmox.owner, Owner::Proxmox("100".to_owned()));
        assert_eq!(
            (proxmox.name.as_deref(), proxmox.ram()),
            (Some("vm"), Some(ByteCount(2 << 30)))
        );

        let incus = found(
            "/opt/incus/bin/qemu-system-x86_64 -S -name v1 -nodefaults -readconfig \
             /run/incus/v1/qemu.conf -pidfile /run/incus/v1/qemu.pid",
        );
        assert_eq!(incus.owner, Owner::Incus("v1".to_owned()));

        let plain = found(
            "qemu-system-x86_64 -machine q35,accel=kvm:tcg -object \
                           memory-backend-memfd,id=mem,size=1G",
        );
        assert_eq!((&plain.owner, plain.name.as_deref()), (&Owner::Plain, None));
        assert_eq!((plain.accelerator().as_deref(), plain.ram()), (Some("kvm"), Some(DEFAULT_RAM)));
        assert_eq!(plain.told_kind(), Some(RamKind::Memfd));
        assert_eq!(found("qemu-system-x86_64 -m 1G").accelerator().as_deref(), Some("tcg"));
    }

    #[test]
    fn programs_that_run_no_machine_are_passed_over() {
        for program in ["/usr/bin/qemu-system-x86_64", "kvm", "/usr/libexec/qemu-kvm"] {
            assert!(is_qemu(program), "{program}");
        }
        for program in ["qemu-img", "qemu-storage-daemon", "libvirtd", "kvm-tool", ""] {
            assert!(!is_qemu(program), "{program}");
        }
        assert_eq!((size("131072k"), size("1.5G")), (Some(ByteCount(128 << 20)), None));
    }
}
