//! What is tried and looked at on a host, one after the other.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use godwit_memory::{ProcessBacking, RamBlock};
use godwit_track::{DirtyTracker, PagemapTracker, TrackError, Way};
use godwit_units::{ByteCount, PAGE_SIZE, PageIndex};
use kvm_ioctls::Kvm;
use procfs::{Current, Meminfo};

use crate::finding::Finding;
use crate::subject::{FILLED, PAGES, Subject};

/// The pages that a subject is told to write, in that order.
const WRITTEN: [u64; 3] = [9, 3, 4];
/// What a governed subject may write in a second, in pages: more than it does.
const LIMIT: f64 = 1000.0;
/// Clocks that a guest reads without leaving KVM (kernel: arch/x86/kvm/x86.c, "master clock").
const GOOD_CLOCKS: [&str; 2] = ["tsc", "hyperv_clocksource_tsc_page"];

/// What lets another process be looked into (ptrace(2), "Ptrace access mode checking").
const MAY_TRACE: &str = "run godwit as root, or give it CAP_SYS_PTRACE; in a container, and under \
                         SELinux or AppArmor, ptrace must be allowed";
/// The cure where a guest's writes cannot be governed (userfaultfd(2)).
pub const MAY_GOVERN: &str =
    "let godwit open /dev/userfaultfd, or set vm.unprivileged_userfaultfd to 1";
/// The cure where the directory of sockets and records cannot be used.
const OWN_DIRECTORY: &str = "make it this user's own, with mode 700, or set XDG_RUNTIME_DIR to a \
                             directory that is";
const KEYS: &str = "let this user read them; or remove what is there, and make all by `godwit \
                    keys`; or name others by --keys";

/// Tries what migrations need of this host, on a [`Subject`] that `program` becomes, with `keys` as
/// the directory of this host's keys. Takes some milliseconds.
///
/// ```no_run
/// use godwit_doctor::{host, worst, Verdict};
///
/// let findings = host(&std::env::current_exe()?, "/etc/godwit/keys".as_ref());
/// if worst(&findings) == Verdict::Bad {
///     println!("no VM of this host can be migrated");
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
#[must_use]
pub fn host(program: &Path, keys: &Path) -> Vec<Finding> {
    let mut findings = vec![kernel()];
    match Subject::start(program) {
        Ok(mut subject) => findings.extend(tried(&mut subject)),
        Err(error) => findings.push(Finding::bad(
            "page tables",
            format!("could not be tried: {} as another process: {error}", program.display()),
            "let godwit start itself: its program must be there, and may be run",
        )),
    }
    findings.extend([rights(), kvm(), run_directory(), encryption(keys), memory(), huge_pages()]);
    findings.push(clock());
    findings
}

fn kernel() -> Finding {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    match godwit_track::kernel_support() {
        Ok(()) => Finding::good("kernel", format!("Linux {release}")),
        Err(error) => {
            Finding::bad("kernel", format!("Linux {release}: {error}"), "boot Linux 6.7 or newer")
        }
    }
}

/// What can be done to another process.
fn tried(subject: &mut Subject) -> Vec<Finding> {
    let block = match memory_of(subject) {
        Ok(block) => block,
        Err(error) => {
            let cause = godwit_track::may_trace(subject.pid()).err();
            let text = cause.map_or_else(|| error.to_string(), |cause| cause.to_string());
            let text = format!("another process's memory cannot be read: {text}");
            return vec![Finding::bad("memory access", text, MAY_TRACE)];
        }
    };
    let mut findings =
        vec![Finding::good("memory access", "another process's memory is read as it is")];
    match track(subject, block) {
        Ok((tracker, finding)) => {
            findings.push(finding);
            findings.push(govern(&tracker, subject));
        }
        Err(finding) => findings.push(finding),
    }
    findings
}

/// The subject's memory, which was read and is right.
fn memory_of(subject: &Subject) -> io::Result<RamBlock> {
    let backing = ProcessBacking::open(subject.pid(), subject.address(), PAGES.bytes().0)?;
    let block = RamBlock::new("memory", Box::new(backing), PAGES);
    let mut page = vec![0; usize::try_from(PAGE_SIZE).unwrap_or_default()];
    block.read(PageIndex(1), &mut page).map_err(io::Error::other)?;
    if page.iter().all(|byte| *byte == FILLED) {
        return Ok(block);
    }
    Err(io::Error::other("other bytes are read than are there: the kernel is not to be trusted"))
}

/// Whether all writes of the subject are seen, and no others.
fn track(subject: &mut Subject, block: RamBlock) -> Result<(PagemapTracker, Finding), Finding> {
    const WHAT: &str = "page tables";
    let bad = |error: &dyn std::fmt::Display| {
        let cure = "let godwit trace other processes, or boot Linux 6.7 or newer";
        Finding::bad(WHAT, format!("a process's writes cannot be tracked: {error}"), cure)
    };
    let all = block.all();
    let tracker = PagemapTracker::start(subject.pid(), &[block]).map_err(|error| bad(&error))?;
    let harvest = |found: &mut Vec<u64>| {
        let mut add = |run: godwit_units::PageRun| {
            found.extend(run.start.0..run.start.0 + run.count.0);
        };
        tracker.harvest(0, all, all.count, &mut add)
    };
    harvest(&mut Vec::new()).map_err(|error| bad(&error))?;
    for page in WRITTEN {
        subject.write(page).map_err(|error| bad(&error))?;
    }
    let mut found = Vec::new();
    harvest(&mut found).map_err(|error| bad(&error))?;
    let mut written = WRITTEN.to_vec();
    written.sort_unstable();
    if found != written {
        let text = format!(
            "pages {written:?} of a process were written, and {found:?} were seen: the kernel's \
             PAGEMAP_SCAN is broken"
        );
        return Err(Finding::bad(WHAT, text, "boot another kernel"));
    }
    let stopped = tracker.attachment().stopped();
    let text = format!(
        "a process's writes are seen from outside, all and no others; to begin stopped it for \
         {} µs",
        stopped.as_micros()
    );
    Ok((tracker, Finding::good(WHAT, text)))
}

/// Whether writers can be held to a rate, by which way.
fn govern(tracker: &PagemapTracker, subject: &mut Subject) -> Finding {
    const WHAT: &str = "governor";
    let threads = [subject.pid()];
    let called = tracker.prepare_governor(Way::Call, &threads);
    let (prepared, way) = match (called, subject.device()) {
        (Ok(()), _) => (Ok(()), "userfaultfd(2)"),
        (Err(_), Some(device)) => {
            (tracker.prepare_governor(Way::Device(device), &threads), "/dev/userfaultfd")
        }
        (refused, None) => (refused, "userfaultfd(2)"),
    };
    let govern = || -> Result<(), TrackError> {
        prepared?;
        tracker.govern(Some(LIMIT))
    };
    let lacking = |error: &dyn std::fmt::Display| {
        let text = format!(
            "a guest that outruns the link can have its processors throttled, but not its writes \
             governed, which costs it less: {error}"
        );
        Finding::note(WHAT, text, MAY_GOVERN)
    };
    let written = govern().map_err(|error| lacking(&error)).and_then(|()| {
        let writes = WRITTEN.iter().try_for_each(|page| subject.write(*page));
        writes.map_err(|error| {
            let cure = "boot another kernel; --throttle vcpus does without";
            Finding::bad(WHAT, format!("a writer is held for ever: {error}"), cure)
        })
    });
    let _ = tracker.govern(None);
    match written {
        Ok(()) => Finding::good(WHAT, format!("a process's writes are governed, by {way}")),
        Err(finding) => finding,
    }
}

/// Whose processes may be looked into.
fn rights() -> Finding {
    const WHAT: &str = "rights";
    let user = rustix::process::getuid();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    // CAP_SYS_PTRACE is 19 (linux/capability.h).
    if effective.is_some_and(|bits| bits >> 19 & 1 == 1) {
        return Finding::good(WHAT, "any user's VM can be migrated (CAP_SYS_PTRACE)");
    }
    let cure = "run godwit as root, or give it CAP_SYS_PTRACE, for those of other users";
    Finding::note(WHAT, format!("only VMs of user {} can be migrated", user.as_raw()), cure)
}

fn kvm() -> Finding {
    const WHAT: &str = "KVM";
    let made = Kvm::new().and_then(|kvm| kvm.create_vm()).and_then(|vm| vm.create_vcpu(0));
    let Err(error) = made else { return Finding::good(WHAT, "a VM with a processor can be made") };
    let error = io::Error::from_raw_os_error(error.errno());
    let cure = match error.kind() {
        ErrorKind::NotFound => {
            "switch virtualization on in the firmware, and load kvm_intel or \
                                kvm_amd; guests under emulation can be migrated"
        }
        ErrorKind::PermissionDenied => {
            "add this user to the group kvm, for microvms; QEMU has \
                                        rights of its own"
        }
        _ => {
            "see why it does not work (dmesg | grep -i kvm); guests under emulation can be migrated"
        }
    };
    Finding::note(WHAT, format!("/dev/kvm: {error}"), cure)
}

/// Where sockets and the records of the guardian are.
fn run_directory() -> Finding {
    const WHAT: &str = "run directory";
    let path = godwit_qemu::run_directory::path();
    match godwit_qemu::run_directory::make(&path, rustix::process::getuid().as_raw()) {
        Ok(()) => Finding::good(WHAT, format!("{} is ours alone", path.display())),
        Err(error) => Finding::bad(WHAT, error, OWN_DIRECTORY),
    }
}

/// Whether this host has keys, and whether they are of use.
fn encryption(dir: &Path) -> Finding {
    use godwit_tls::{Files, Host, Keys, Side};
    const WHAT: &str = "encryption";
    if !dir.exists() {
        let text = format!("no keys in {}: addresses beyond this host are refused", dir.display());
        let cure = "make them by `godwit keys`, or name those of QEMU or libvirt by --keys";
        return Finding::note(WHAT, text, cure);
    }
    let side = |side| -> Result<(), godwit_tls::TlsError> {
        let keys = Keys::read(&Files::in_dir(dir, side)?)?;
        match side {
            Side::Source => Host::source(&keys, "localhost").map(drop),
            Side::Destination => Host::destination(&keys, &[]).map(drop),
        }
    };
    match (side(Side::Source), side(Side::Destination)) {
        (Ok(()), Ok(())) => {
            Finding::good(WHAT, format!("{} has keys for both sides", dir.display()))
        }
        (Ok(()), Err(error)) => Finding::note(WHAT, format!("not as a destination: {error}"), KEYS),
        (Err(error), Ok(())) => Finding::note(WHAT, format!("not as a source: {error}"), KEYS),
        (Err(error), Err(_)) => Finding::bad(WHAT, error.to_string(), KEYS),
    }
}

fn memory() -> Finding {
    const WHAT: &str = "memory";
    match Meminfo::current() {
        Ok(info) => {
            let free = ByteCount(info.mem_available.unwrap_or(info.mem_free));
            let all = ByteCount(info.mem_total);
            let huge = info.hugepages_free.zip(info.hugepagesize).filter(|(free, _)| *free > 0);
            let huge = huge.map_or_else(String::new, |(free, size)| {
                format!(", and {free} free huge pages of {}", ByteCount(size))
            });
            Finding::good(WHAT, format!("{free} of {all} are to be had for guests{huge}"))
        }
        Err(error) => {
            let text = format!("/proc/meminfo cannot be read: {error}");
            Finding::note(WHAT, text, "mount proc on /proc")
        }
    }
}

/// Whether memory of guests comes in huge pages, without which a destination fills it slowly.
fn huge_pages() -> Finding {
    const WHAT: &str = "huge pages";
    const PATH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    let setting = fs::read_to_string(PATH).unwrap_or_default();
    let chosen = setting.split(['[', ']']).nth(1).unwrap_or("not there");
    match chosen {
        "always" | "madvise" => {
            Finding::good(WHAT, format!("the kernel makes them where QEMU asks ({chosen})"))
        }
        _ => Finding::note(
            WHAT,
            format!("transparent huge pages: {chosen}"),
            format!("echo madvise > {PATH}: guests and migrations are faster with them"),
        ),
    }
}

fn clock() -> Finding {
    const WHAT: &str = "clock";
    const PATH: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let source = fs::read_to_string(PATH).unwrap_or_default();
    let source = source.trim();
    if GOOD_CLOCKS.contains(&source) || source.starts_with("kvm-clock") {
        return Finding::good(WHAT, format!("the kernel goes by {source}"));
    }
    let name = if source.is_empty() { "an unknown clock" } else { source };
    let cure = "see why the kernel distrusts the TSC: dmesg | grep -i tsc";
    Finding::note(WHAT, format!("the kernel goes by {name}: guests read their time slowly"), cure)
}
