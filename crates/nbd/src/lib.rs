//! A small NBD client: the fixed newstyle handshake, structured replies, metadata contexts, several
//! requests in flight.
//!
//! Specification: `doc/proto.md` of the NetworkBlockDevice project, cited below as "proto". What
//! QEMU adds (`qemu:dirty-bitmap:NAME`) is in its `docs/interop/nbd.txt`.
//!
//! Keeps two promises: whatever a server sends can neither panic the client nor decide how much it
//! allocates, and every wait has a limit. A [`Client`] is one connection; a [`Link`] makes it anew
//! once when it breaks. TLS, extended headers and resizing are left out.
//!
//! ```no_run
//! use godwit_nbd::{Address, Client, Wish};
//!
//! # fn main() -> Result<(), godwit_nbd::NbdError> {
//! let wish = Wish::new("disk0").with_context(godwit_nbd::ALLOCATION);
//! let mut client = Client::connect(&Address::Unix("/run/nbd.sock".into()), &wish)?;
//! let (first, second) = (client.ask_read(0, 4096)?, client.ask_read(4096, 4096)?);
//! let mut bytes = [0; 4096];
//! client.take_read(second, &mut bytes)?;
//! client.take_read(first, &mut bytes)?;
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

mod ahead;
mod client;
mod error;
mod handshake;
mod link;
mod pending;
mod protocol;
mod reply;
mod stream;

pub use client::{Client, DEPTH, REQUEST_MAX, STRETCH_MAX, Ticket};
pub use error::{Errno, NbdError};
pub use handshake::{Export, Wish};
pub use link::{Asked, Link};
pub use pending::Stretch;
pub use stream::Address;

/// The context that tells holes and zeros (proto, "`base:` metadata namespace").
pub const ALLOCATION: &str = "base:allocation";
/// A flag of [`ALLOCATION`]: nothing is allocated here.
pub const HOLE: u32 = 1;
/// A flag of [`ALLOCATION`]: this reads as zeros.
pub const ZERO: u32 = 2;
/// A flag of QEMU's dirty bitmaps: this is dirty (QEMU, `docs/interop/nbd.txt`).
pub const DIRTY: u32 = 1;

/// The context of QEMU's dirty bitmap `name`.
#[must_use]
pub fn dirty_bitmap(name: &str) -> String {
    format!("qemu:dirty-bitmap:{name}")
}
