//! The QEMUs of this host, whatever runs them: who they are, what they are called, where their RAM
//! is, and whether they could move.
//!
//! Invariant: to look changes nothing, and keeps nobody waiting. A monitor is connected to only
//! where nobody is, for the moments that a few questions take; one that libvirt holds is asked
//! nothing, since each monitor command marks its domain as tainted.
//!
//! ```text
//!   incus      what is different about Incus
//!   kinds      words for what is told of each
//!   managed    those of one manager, as they are to leave this host
//!   process    what /proc tells: names, owners, accelerator, kind of RAM
//!   verdict    whether it could move, by the best way there is to ask
//! ```

mod incus;
mod kinds;
mod managed;
mod process;
mod verdict;

use godwit_units::ByteCount;

pub use incus::monitor_of_instance;
pub use kinds::{Owner, RamKind, Verdict};
pub use managed::{ManagedVm, domains_that_run, proxmox_vms_that_run};
use process::Found;
use verdict::Asked;

/// How many are asked at a time.
const AT_ONCE: usize = 16;

/// A QEMU of this host.
#[derive(Clone, Debug)]
pub struct HostVm {
    /// Its process.
    pub pid: i32,
    /// What it is called.
    pub name: Option<String>,
    /// Who keeps it.
    pub owner: Owner,
    /// What runs its guest, `kvm` or `tcg` most often.
    pub accelerator: Option<String>,
    /// The size of its RAM.
    pub ram: Option<ByteCount>,
    /// Of what kind that is.
    pub ram_kind: Option<RamKind>,
    /// How much memory it has in huge pages of its own (hugetlbfs).
    pub huge_pages: Option<ByteCount>,
    /// What it does, in QEMU's words.
    pub state: Option<String>,
    /// By what name godwit takes it.
    pub vm: Option<String>,
    /// Whether it could move.
    pub verdict: Verdict,
}

/// What there is on this host, as far as it can be seen.
#[derive(Clone, Debug, Default)]
pub struct HostVms {
    /// In the order of their processes.
    pub vms: Vec<HostVm>,
    /// Why there may be more, if there may be.
    pub hidden: Option<&'static str>,
}

/// Looks for the QEMUs of this host whose process numbers or names are among `only`, or for all
/// where that is empty; `uri` is where libvirt is asked for its domains.
///
/// # Errors
/// When /proc cannot be read.
pub fn vms_of_host(only: &[String], uri: &str) -> std::io::Result<HostVms> {
    let mut found = process::all()?;
    found.retain(|it| {
        let names = [Some(it.pid.to_string()), it.name.clone(), it.owner.id().map(str::to_owned)];
        only.is_empty() || names.iter().flatten().any(|name| only.contains(name))
    });
    let hidden = process::hidden();
    let mut vms = Vec::new();
    // One that hangs takes its time, and the others are not to wait for it.
    for some in found.chunks(AT_ONCE) {
        std::thread::scope(|scope| {
            let begin = |found| {
                let thread = std::thread::Builder::new().name("look".to_owned());
                (found, thread.spawn_scoped(scope, move || look(found, uri)).ok())
            };
            let looks: Vec<_> = some.iter().map(begin).collect();
            vms.extend(looks.into_iter().filter_map(|(found, thread)| match thread {
                Some(thread) => thread.join().ok().flatten(),
                // Without a thread it takes its turn.
                None => look(found, uri),
            }));
        });
    }
    Ok(HostVms { vms, hidden })
}

/// What is told of one; nothing of one that has ended meanwhile.
fn look(found: &Found, uri: &str) -> Option<HostVm> {
    let Asked { vm, state, ram, accelerator, verdict } = verdict::ask(found, uri);
    if !found.is_there() {
        return None;
    }
    Some(HostVm {
        pid: found.pid,
        name: found.name.clone(),
        owner: found.owner.clone(),
        accelerator: accelerator.or_else(|| found.accelerator()),
        ram: ram.or_else(|| found.ram()),
        ram_kind: found.ram_kind(),
        huge_pages: found.huge_pages(),
        state,
        vm,
        verdict,
    })
}
