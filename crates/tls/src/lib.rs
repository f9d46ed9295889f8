//! Connections that are encrypted, and whose two ends know each other: TLS 1.3 (RFC 8446), with a
//! certificate on both sides.
//!
//! - [`Keys`] are what a host shows and whom it believes, read from PEM files: godwit's own, or
//!   those that QEMU and libvirt have already ([`Files`]).
//! - [`Host`] makes of them one end of connections, and knows the name of who may be at the other
//!   end.
//! - [`Session`] is one connection; whoever has the socket reads and writes through it, one thread
//!   each way.
//! - [`make`] makes keys where there are none.
//! - [`prove`] and [`proves`]: that a peer has a secret.
//! - [`Seal`]: files that only who has a secret reads, and could have written.
//!
//! Invariants: nothing but TLS 1.3 is spoken, and a session gives out no byte of a peer whose
//! certificate was not found to be signed by the authority, valid now, not revoked, and made out to
//! the name that is expected. An end of the connection that the peer has not announced is an error.

mod connection;
mod error;
mod host;
mod keys;
mod make;
mod named;
mod proof;
mod seal;
mod session;

pub use error::TlsError;
pub use host::Host;
pub use keys::{Files, Keys, Side};
pub use make::{Made, make};
pub use proof::{PROOF_LEN, fingerprint, prove, proves};
pub use seal::{SALT_LEN, Seal, TAG_LEN};
pub use session::Session;

/// Whether `bytes`, the first that a peer has sent, are a record of TLS: a message of the handshake
/// or an alert (RFC 8446, section 5.1).
///
/// ```
/// assert!(godwit_tls::looks_encrypted(&[0x16, 3, 1, 2, 0]));
/// assert!(!godwit_tls::looks_encrypted(b"GODWIT"));
/// ```
#[must_use]
pub fn looks_encrypted(bytes: &[u8]) -> bool {
    matches!(bytes, [0x15 | 0x16, 3, ..])
}
