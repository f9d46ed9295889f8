//! The QEMU adapter: everything godwit knows about QEMU, which is never patched nor linked.
//!
//! QEMU is driven through its monitor (`monitor`) and watched through `/proc`. `machine` finds out
//! what runs there and refuses what cannot be migrated; `source` and `destination` implement the
//! engine's traits.
//!
//! The division of work: QEMU's own migration carries the device state and nothing else. Its
//! capability `x-ignore-shared` leaves RAM in shared files out, `pause-before-switchover` stops the
//! guest and waits before it saves any device, and the stream goes through a socket pair whose
//! other end godwit holds.

#![forbid(unsafe_code)]

mod cards;
mod clients;
mod command_line;
mod compare;
mod destination;
mod device_ram;
mod device_state;
mod disk_limits;
mod disks;
mod error;
mod fate;
mod find;
mod governor;
mod guard;
mod host;
mod left;
mod libvirt;
mod limits;
mod machine;
mod mark;
pub mod monitor;
mod post_copy;
mod process;
mod proxmox;
mod ram;
mod rank;
pub mod run_directory;
mod settings;
mod source;
mod start;
pub mod strangers;
mod upgrade;
mod userfaultfd;
mod vhost_user;
mod way_back;

pub use clients::Client;
pub use destination::QemuDestination;
pub use disks::ListedDisk;
pub use error::QemuError;
pub use find::{monitor_of, monitors_of};
pub use guard::{COMMAND as GUARD_COMMAND, Known, Recovery, known_of, stand_guard};
pub use host::{
    HostVm, HostVms, ManagedVm, Owner, RamKind, Verdict, domains_that_run, monitor_of_instance,
    proxmox_vms_that_run, vms_of_host,
};
pub use left::{LeftDestination, Starting};
pub use libvirt::{DiskPaths, LibvirtDestination, domain_state};
pub use limits::Limits;
pub use machine::Reporting;
pub use proxmox::vm_state as proxmox_state;
pub use ram::StateBy;
pub use source::{Identity, QemuSource};
pub use start::{
    COMMAND as LAUNCH_COMMAND, MapError, Mapping, Shown, StartTerms, StartedDestination, launch,
};
pub use upgrade::{InPlace, Successor};

/// The names under which QEMU may hold descriptors of godwit's.
const FD_NAMES: [&str; 3] = [source::FD_NAME, disks::FD_NAME, userfaultfd::FD_NAME];
