//! Disks that move along with the guest.
//!
//! The source is read through an NBD export of QEMU's own, and the guest's writes are found by
//! dirty bitmaps of QEMU's own (`docs/interop/bitmaps.rst`), so every image format and every node
//! that QEMU can open can move. The destination is written through a writable export of the QEMU
//! that waits there.
//!
//! ```text
//!   find       which disks, and by what names
//!   server     QEMU's NBD server, on a socket that godwit opened
//!   tracking   a bitmap a disk that records, another one with each round
//!   round      what a round has to copy, and reading it
//!   reader     reading anywhere, as it is now
//!   pooled     the connection that both of these read by
//!   sink       writing at the destination
//! ```
//!
//! Invariant: all that is added to QEMU bears a mark, and all that bears the mark of a process that
//! is gone is removed when a godwit looks at that QEMU next.

mod find;
mod granularity;
mod leftovers;
mod pooled;
mod reader;
mod round;
mod server;
mod sink;
mod tracking;

pub use find::ListedDisk;
pub(crate) use find::{Drive, Found, by_name, choose, drives, writable_and_staying};
pub(crate) use granularity::Granularity;
pub(crate) use leftovers::{clear, remove};
pub(crate) use pooled::{Pool, Pooled};
pub(crate) use reader::Reader;
pub(crate) use round::reading;
pub(crate) use server::FD_NAME;
pub(crate) use sink::{Receiving, Sink};
pub(crate) use tracking::{Tracking, written};
