//! The engine: threads and sockets that carry a migration out.
//!
//! The conversation is decided by the `protocol` crate, the rounds by `policy`, the VM is driven
//! through the two traits in [`vm`]. Here are the loops in between: [`source::migrate`] and
//! [`destination::receive`].
//!
//! Invariants kept here:
//! - A page is harvested before its bytes are read (`source/channel.rs`).
//! - In a round all of a segment goes over one channel, which one thread reads, in order, or each
//!   of its pages goes once; and no round begins before the one before it is in place. So an old
//!   version of a page cannot land on a newer one. The destination checks it
//!   (`destination/claims.rs`).
//! - Every wait has a limit (`limits`).
//! - Whatever fails before COMMIT, the guest runs on at the source, without tracking
//!   (`source/mod.rs`).

#![forbid(unsafe_code)]

pub mod address;
mod cancel;
mod cells;
pub mod compression;
pub mod destination;
mod digests;
mod disk_prints;
mod error;
pub mod facts;
pub mod handle;
mod holder;
mod interrupt;
mod limiter;
pub mod limits;
mod link;
pub mod measure;
mod missing;
mod record;
mod remainder;
pub mod report;
mod return_proof;
mod same_host;
pub mod security;
pub mod source;
#[cfg(feature = "test-hooks")]
mod stamped;
mod threads;
pub mod vm;

pub use cancel::Cancel;
pub use error::{EngineError, Failure, Phase, Survivor};
pub use interrupt::Interrupt;
