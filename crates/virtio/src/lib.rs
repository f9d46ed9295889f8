//! The device's side of virtio, for devices that a VMM emulates itself: the registers of virtio-mmio and split queues
//! (virtio 1.2, sections 2.7 and 4.2).
//!
//! A device owns a [`Transport`], hands it the guest's accesses, and takes requests from its [`Queue`]s when the guest
//! has notified one. Requests are carried out while the guest's write to the notify register waits, so there is no thread
//! and no request in flight when the guest is stopped: the state is the registers.
//!
//! Keeps one promise: whatever is in guest memory and whatever the driver writes, nothing here panics, allocates by the
//! guest's word or goes on for ever. What makes no sense is [`Nonsense`], for which the standard has DEVICE_NEEDS_RESET.
//! The crates virtio-queue and vm-memory do the same over their own model of guest memory; here memory is any
//! [`GuestMemory`], so a VMM need not take over that model.
#![forbid(unsafe_code)]

mod mmio;
mod queue;

/// Fences; tests/loom.rs compiles the file that uses them with others.
mod sync {
    pub(crate) use std::sync::atomic::{Ordering, fence};
}

pub use mmio::{Effect, QUEUE_MOST, Transport, VirtioError};
pub use queue::{DEVICE_WRITES, NEXT, Piece, Queue};

use godwit_units::Gpa;

/// Guest memory as a device sees it.
pub trait GuestMemory {
    /// Copies guest memory at `address` to `bytes`; `None`, and nothing is promised of `bytes`, if it is not all memory.
    fn read(&self, address: Gpa, bytes: &mut [u8]) -> Option<()>;

    /// Copies `bytes` to guest memory at `address` and marks the pages as dirty; `None` if it is not all memory.
    fn write(&self, address: Gpa, bytes: &[u8]) -> Option<()>;
}

/// What the driver has put into memory or registers breaks the standard, and the device cannot go on without a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonsense;
