//! What makes a QEMU unfit, each with its cure.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use godwit_libvirt::LibvirtError;
use godwit_memory::MemoryError;
use godwit_nbd::NbdError;
use godwit_track::{Mapper, TrackError};
use godwit_units::{ByteCount, format_duration};
use godwit_vcpu_throttle::ThrottleError;

use crate::clients::Client;
use crate::monitor::QmpError;

/// What a back end does that has not finished.
fn busy(requests: Option<u16>, limit: Duration) -> String {
    match requests {
        Some(count) => {
            let limit = format_duration(limit);
            format!("still works on {count} requests {limit} after the guest was stopped")
        }
        None => "did not stop with the guest".to_owned(),
    }
}

/// What to do when the guardian does not start.
fn guardian_cure(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::TimedOut => {
            "it was not ready within 30 s: the host is overloaded, so try again later"
        }
        _ => "raise pids.max or free memory",
    }
}

/// Why a QEMU cannot be migrated, or a step failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QemuError {
    /// The monitor failed or refused.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// A RAM file cannot be used.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The process cannot be tracked.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// The vCPUs cannot be throttled.
    #[error(transparent)]
    Throttle(#[from] ThrottleError),
    /// A RAM block cannot be reached in QEMU's process.
    #[error("RAM block '{block}' {what}")]
    RamUnreachable {
        /// The block.
        block: String,
        /// Why, and the cure where there is one.
        what: String,
    },
    /// A process cannot be looked at.
    #[error(
        "process {pid} cannot be looked at ({why}): is it running, and godwit root or its user?"
    )]
    NoProcess {
        /// Its number.
        pid: i32,
        /// Why.
        why: String,
    },
    /// A process that was named as a QEMU has no monitor.
    #[error(
        "process {pid} has no QMP monitor on a unix socket: is it a QEMU? Give it one with -qmp \
         unix:PATH,server=on,wait=off"
    )]
    NoMonitor {
        /// The process.
        pid: i32,
    },
    /// Somebody else is connected to each of its monitors.
    #[error(
        "each QMP monitor of process {pid} is in use ({}){}",
        paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
        match client {
            Some(client) => format!(" by {client}: {}", client.cure()),
            None => ": whoever is connected holds it, which is libvirt where the path is one of \
                     libvirt's; give QEMU one more -qmp option, for godwit alone, or disconnect \
                     the other".to_owned(),
        }
    )]
    MonitorsInUse {
        /// The process.
        pid: i32,
        /// The monitors.
        paths: Vec<PathBuf>,
        /// Who is connected to one of them, where that can be seen.
        client: Option<Client>,
    },
    /// Somebody else is connected to the monitor.
    #[error("{client} is connected to the QMP monitor {}: {}", path.display(), client.cure())]
    MonitorBusy {
        /// The monitor.
        path: PathBuf,
        /// Who is.
        client: Client,
    },
    /// Libvirt refused, or is not there.
    #[error(transparent)]
    Libvirt(#[from] LibvirtError),
    /// A domain, or a host's libvirt, is not fit for a migration.
    #[error("{0}")]
    Domain(String),
    /// A VM of Proxmox's cannot be moved.
    #[error("{0}")]
    Proxmox(String),
    /// Incus holds the only monitor of an instance.
    #[error(
        "instance '{name}' of Incus's cannot be reached: incusd holds its only monitor, and QEMU \
         cannot be given another while it runs but through that one (from QEMU 11.1 on); have it \
         started with one for godwit: incus config set {name} raw.qemu=\"-qmp \
         unix:/run/{name}.qmp,server=on,wait=off\", then incus restart {name}"
    )]
    Incus {
        /// What it is called.
        name: String,
    },
    /// There is no such instance.
    #[error("no instance '{name}' of Incus's runs here as a VM (running: {there})")]
    NoInstance {
        /// What was asked for.
        name: String,
        /// Those that there are.
        there: String,
    },
    /// A guest cannot go on in another process with the memory that it has.
    #[error("{0}")]
    Upgrade(String),
    /// A destination QEMU cannot be started from what the source tells.
    #[error("{0}")]
    Start(String),
    /// Another godwit is at work on the same domain.
    #[error(
        "process {pid} (godwit) is at work on this VM already: wait for it, or end it with \
         `godwit cancel --migration {pid}`"
    )]
    DomainBusy {
        /// Its process.
        pid: u32,
    },
    /// A source sends what an old QEMU cannot be sent from outside.
    #[error(
        "QEMU before 8.0 does not tell where it has the RAM of devices that the source sends ({}): \
         take the guest in with QEMU 8.0 or newer", blocks.join(", ")
    )]
    OldDestination {
        /// The RAM blocks.
        blocks: Vec<String>,
    },
    /// The source is not in a state to migrate from.
    #[error("the source QEMU is in the state '{state}': {cure}")]
    SourceState {
        /// QEMU's word.
        state: String,
        /// What to do.
        cure: &'static str,
    },
    /// What is known of a guest stands against what an operator wishes.
    #[error(
        "{known}, so godwit does not {what}{}", if *for_force { " without --force" } else { "" }
    )]
    Settled {
        /// What is known.
        known: &'static str,
        /// What was wished.
        what: &'static str,
        /// Whether it could be forced.
        for_force: bool,
    },
    /// What a godwit that was killed has left missing cannot be fetched or sent.
    #[error("a godwit that was killed has left pages of the guest missing, and {why}")]
    NotFollowed {
        /// Why, and what to do.
        why: &'static str,
    },
    /// The destination does not wait for a migration.
    #[error(
        "the destination QEMU is not waiting for a migration ({state}): start it with the source's \
         options and -incoming defer"
    )]
    NotIncoming {
        /// What it does instead.
        state: String,
    },
    /// QEMU says itself that it cannot be migrated.
    #[error("QEMU cannot be migrated now: {0}")]
    Blocked(String),
    /// A device whose writes cannot be tracked.
    #[error(
        "{device} writes guest memory behind the page tables, which cannot be tracked: unplug it \
         before the migration"
    )]
    Untrackable {
        /// The device.
        device: String,
    },
    /// A vhost-user device that cannot move.
    #[error("{what} is a vhost-user device that cannot move: {why}")]
    VhostUser {
        /// The device.
        what: String,
        /// Why, and the cure.
        why: String,
    },
    /// A vhost-user device whose back end is not seen.
    #[error(
        "the process behind {what}, a vhost-user device, is not found among those that godwit may \
         look into: run godwit as root, in the network and PID namespaces of the host"
    )]
    BackEndHidden {
        /// The device.
        what: String,
    },
    /// A back end whose writes cannot be tracked.
    #[error(
        "{back_end} is the back end of a vhost-user device and {what}: a device writes guest \
         memory for it behind the page tables, which cannot be tracked; unplug the device, or give \
         it a back end that does its work by itself"
    )]
    BackEndDma {
        /// The process, and what it is the back end of.
        back_end: String,
        /// How it is known.
        what: String,
    },
    /// A back end that cannot be tracked.
    #[error("{back_end}, the back end of a vhost-user device: {source}")]
    BackEnd {
        /// The process, and what it is the back end of.
        back_end: String,
        /// Why.
        source: TrackError,
    },
    /// A back end that went with what it was to do.
    #[error(
        "the back end of {what} broke off with {requests} requests under way when the guest was \
         stopped, and nobody answers them now: reset the guest if its device hangs, and try again \
         when the device has less to do; with reconnect=1 at its chardev QEMU comes back to it"
    )]
    BackEndGone {
        /// The device.
        what: String,
        /// How many.
        requests: u16,
    },
    /// A back end that has not finished.
    #[error(
        "the back end of {what} {}: its storage or network may hang, or it is broken; the guest \
         cannot be moved before it has finished", busy(*requests, *limit)
    )]
    BackEndBusy {
        /// The device.
        what: String,
        /// How many requests it is at work on, where it stopped at all.
        requests: Option<u16>,
        /// How long it was waited for.
        limit: Duration,
    },
    /// Another process could write guest memory.
    #[error(
        "process {} ({}) maps RAM block '{}' writable and is not at the other end of a vhost-user \
         device: when it writes nobody knows; end it, or let it map the file read-only",
        .0.pid, .0.command, .0.block
    )]
    OtherWriter(Mapper),
    /// Two QEMUs have the same RAM file.
    #[error(
        "process {} ({}), another QEMU, has the file of RAM block '{}' mapped too, and a guest may \
         be running in it: leave that process alone, and start the QEMU that waits on a file of \
         its own (mem-path)", .0.pid, .0.command, .0.block
    )]
    SharedRam(Mapper),
    /// Somebody began to work on the disks.
    #[error(
        "a block job ('{id}', {kind}) runs: a QEMU whose images are being worked on cannot hand \
         them over: wait for its end, or cancel it"
    )]
    BlockJob {
        /// Its name.
        id: String,
        /// For example `mirror`.
        kind: String,
    },
    /// What the machine consists of changed during the migration.
    #[error(
        "{0} during the migration, which the destination has not got: start it again with a \
         destination that has the same"
    )]
    NotTheSame(String),
    /// A guest that runs guests.
    #[error(
        "the guest may run guests of its own ({what}): the processor writes some of their pages \
         behind the page tables, which cannot be tracked: end them and unload kvm in the guest, \
         or, where none runs and none will, say so with --allow-nested"
    )]
    Nested {
        /// How that is known.
        what: &'static str,
    },
    /// The guest was stopped or run by somebody else.
    #[error(
        "the run state of the guest changed during the migration, and is '{0}' now: \
         leave it alone, and start the migration again"
    )]
    OtherState(String),
    /// The machine changed during the migration.
    #[error("{0} during the migration: start it again")]
    Changed(&'static str),
    /// The process does not end.
    #[error("the destination QEMU (process {pid}) does not end: {source}; make sure that it does")]
    Undead {
        /// The process.
        pid: i32,
        /// Why that is not known.
        source: io::Error,
    },
    /// A capability is missing.
    #[error("this QEMU lacks the migration capability {0}: version 7.2 or newer is needed")]
    NoCapability(&'static str),
    /// QEMU reported that its migration failed.
    #[error("QEMU could not {action} its device state: {words}")]
    State {
        /// Save or load.
        action: &'static str,
        /// QEMU's words.
        words: String,
    },
    /// A system call failed.
    #[error("{step} failed: {source}")]
    System {
        /// What was being done.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The guest does not run although told to.
    #[error(
        "the guest does not run: QEMU's state is '{state}' and it refuses `cont` ({words}): remove \
         the cause, then `cont` it by hand"
    )]
    NotRunning {
        /// QEMU's word.
        state: String,
        /// Why QEMU refuses.
        words: String,
    },
    /// QEMU does not take back its migration: its main loop stands still, as long as a disk does.
    #[error(
        "QEMU did not carry out `migrate_cancel` within {limit:?}, as when its storage hangs: once \
         that answers again, give it `migrate_cancel`, and the guest runs on"
    )]
    Hangs {
        /// How long it was waited for.
        limit: Duration,
    },
    /// The guest would find another machine.
    #[error(
        "the two VMs differ: {0}; mend it and start the destination QEMU again, or let it pass \
         with godwit migrate --allow-differences KEY,... (the words in brackets)"
    )]
    Different(String),
    /// The other side says what is not understood.
    #[error(
        "the source tells of {0} in words that are not understood: use the same godwit on both \
         sides"
    )]
    Unclear(&'static str),
    /// A disk that stays is not the same at the destination.
    #[error(
        "the guest would not find its disks: {words}; start the destination QEMU on the source's \
         storage, move them along with --disks {names} on both sides, or, if they are the same, \
         say so with godwit migrate --disks-are-shared"
    )]
    OtherStorage {
        /// Which, and how they differ.
        words: String,
        /// Their names.
        names: String,
    },
    /// A disk that moves is the same at both sides.
    #[error(
        "disk '{disk}' would be copied onto itself: {file} here is an image that the source has \
         open; leave out --disks where storage is shared, or give the destination an image of its \
         own"
    )]
    OntoItself {
        /// The disk.
        disk: String,
        /// The image here.
        file: String,
    },
    /// A disk must stay as it is.
    #[error(transparent)]
    NotAllowed(#[from] godwit_disk::NotAllowed),
    /// A disk could not be read or written.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// There is no such disk at the source.
    #[error("the VM has no disk '{name}'; its drives are {there}")]
    NoSuchDisk {
        /// The name that was given.
        name: String,
        /// The names that there are.
        there: String,
    },
    /// There is nothing to move.
    #[error("the VM has no disk that its guest can write to: migrate it without --disks")]
    NoDisks,
    /// A disk stays where it is.
    #[error("disk '{disk}' cannot move: {why}")]
    DiskUnmovable {
        /// The disk.
        disk: String,
        /// Why, and what to do.
        why: &'static str,
    },
    /// QEMU's NBD server is taken.
    #[error(
        "QEMU's NBD server cannot be started: {words} (exports: {exports}); a QEMU has one only: \
         end it with nbd-server-stop"
    )]
    NbdServer {
        /// QEMU's words.
        words: String,
        /// What it exports.
        exports: String,
    },
    /// The server's socket cannot be made.
    #[error("cannot make a socket for QEMU's NBD server in {}: {source}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody migrates it already.
    #[error("godwit (process {pid}) is migrating this QEMU already: wait for it, or end it")]
    OtherGodwit {
        /// The other one.
        pid: u32,
    },
    /// Somebody still clears up.
    #[error(
        "the guardian of godwit (process {pid}), which was killed, is still bringing the guest of \
         this QEMU back: wait for it"
    )]
    OtherGuardian {
        /// The godwit that is gone.
        pid: u32,
    },
    /// There is nowhere to write down what is changed in QEMU.
    #[error(
        "cannot write in {}, where godwit records what has to be undone if it is killed: {source}; \
         make it this user's own and writable", path.display()
    )]
    Record {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The process that stands in for a godwit that is killed does not start.
    #[error(
        "cannot start the guardian, which runs the guest again if godwit is killed: {source}; \
         {}", guardian_cure(source.kind())
    )]
    Guardian {
        /// Why.
        source: io::Error,
    },
    /// A capability that cannot be on.
    #[error(
        "QEMU's migration capability dirty-bitmaps is on, which cannot be while disks move: turn \
         it off with migrate-set-capabilities"
    )]
    BitmapsOn,
    /// The destination lacks a disk.
    #[error(
        "disk '{disk}' ({size}) does not exist at the destination, whose drives are {there}: start \
         the destination QEMU with the source's drives, under the same names"
    )]
    DiskMissing {
        /// What the source calls it.
        disk: String,
        /// Its size.
        size: ByteCount,
        /// What there is.
        there: String,
    },
    /// The guest would see another size.
    #[error(
        "disk '{disk}' has {} bytes at the source and {} here: make the image anew before the \
         destination QEMU is started, with qemu-img create -f {format} {file} \
         {}", .source_size.0, .here.0, .source_size.0
    )]
    DiskSize {
        /// What the source calls it.
        disk: String,
        /// Bytes there.
        source_size: ByteCount,
        /// Bytes here.
        here: ByteCount,
        /// The image here.
        file: String,
        /// Its format.
        format: String,
    },
    /// Somebody else writes it.
    #[error("disk '{disk}' cannot be written to at the destination: {words}; end whatever uses it")]
    DiskInUse {
        /// The disk.
        disk: String,
        /// QEMU's words.
        words: String,
    },
}
