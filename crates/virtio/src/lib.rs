//! The device's side of virtio, for devices that a VMM emulates itself: the registers of
//! virtio-mmio and split queues (virtio 1.2, sections 2.7 and 4.2).
//!
//! A device owns a [`Transport`], hands it the guest's accesses, and takes requests from its
//! [`Queue`]s when the guest has notified one. Requests are carried out while the guest's write to
//! the notify register waits, so there is no thread and no request in flight when the guest is
//! stopped: the state is the registers.
//!
//! Keeps one promise: whatever is in guest memory and whatever the driver writes, nothing here
//! panics, allocates by the guest's word or goes on for ever. What the standard does not allow is
//! an [`InvalidRing`], for which it has DEVICE_NEEDS_RESET. Guest memory is vm-memory's, queues are
//! walked by virtio-queue.
#![forbid(unsafe_code)]

mod mmio;
mod queue;

pub use mmio::{Effect, QUEUE_MOST, Transport, VirtioError};
pub use queue::{DEVICE_WRITES, NEXT, Piece, Queue};

/// What the driver has put into memory breaks the standard, and the device cannot go on without a
/// reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidRing;
