//! What makes a QEMU unfit, each with its cure.

use std::io;

use godwit_memory::MemoryError;
use godwit_throttle::ThrottleError;
use godwit_track::{TrackError, Writer};

use crate::qmp::QmpError;

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
    /// Guest RAM is not in a shared named file.
    #[error(
        "{what}, so godwit cannot reach it: start QEMU with -object memory-backend-file,id=mem,size=SIZE,share=on,mem-path=/dev/shm/NAME -machine memory-backend=mem"
    )]
    RamNotShared {
        /// Which RAM, and what it is instead.
        what: String,
    },
    /// The source is not in a state to migrate from.
    #[error("the source QEMU is in the state '{state}': {cure}")]
    SourceState {
        /// QEMU's word.
        state: String,
        /// What to do.
        cure: &'static str,
    },
    /// The destination does not wait for a migration.
    #[error(
        "the destination QEMU is not waiting for a migration ({state}): start it with the source's options and -incoming defer"
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
        "{device} writes guest memory behind the page tables, which cannot be tracked: unplug it before the migration"
    )]
    Untrackable {
        /// The device.
        device: String,
    },
    /// A vhost-user back end.
    #[error(
        "{what} is a vhost-user device: its back end is another process that writes guest memory, which is not tracked yet; unplug it before the migration"
    )]
    VhostUser {
        /// The device.
        what: String,
    },
    /// Another process could write guest memory.
    #[error("process {} ({}) maps RAM block '{}' writable; its writes are not tracked yet: end it, or let it map the file read-only", .0.pid, .0.command, .0.block)]
    OtherWriter(Writer),
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
    #[error("the guest does not run (QEMU's state is '{state}'): {cure}")]
    NotRunning {
        /// QEMU's word.
        state: String,
        /// What to do.
        cure: &'static str,
    },
}
