//! Domains of a libvirt daemon: looked up, asked, stopped, run, restored and defined.
//!
//! Libvirt is reached by its own C library, which is loaded at run time: godwit is built without
//! it, and runs on hosts that have none. Whatever the library refuses comes back in its own words.
//!
//! ```text
//!   library      libvirt.so.0 and libvirt-qemu.so.0, and the functions that are used
//!   connection   a daemon
//!   domain       a domain of it, and the events of its QEMU
//! ```
//!
//! Invariant: what the library hands out (connections, domains, texts, lists) is given back once,
//! and not used afterwards. No call has a time limit of its own: a daemon that stands still is
//! found out by the library's keepalive, within [`SILENCE_LIMIT`]; a QEMU that does is for the
//! caller to give up on, from another thread.
//!
//! What a domain is to a migration is left to `godwit-qemu`.
//!
//! ```no_run
//! use godwit_libvirt::{Connection, Xml};
//!
//! # fn main() -> Result<(), godwit_libvirt::LibvirtError> {
//! let host = Connection::open("qemu:///system")?;
//! let domain = host.domain("web01")?;
//! println!("{}", domain.xml(Xml::Migratable)?);
//! # Ok(())
//! # }
//! ```

mod connection;
mod domain;
mod error;
mod library;

pub use connection::{Connection, SILENCE_LIMIT, version_words};
pub use domain::{Domain, Event, State, Subscription, Xml};
pub use error::{ErrorKind, LibvirtError};
