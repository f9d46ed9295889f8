//! What a tap interface is given while nobody reads it: kept, and put into another.
//!
//! A guest that moves stands still for a few milliseconds, and what a network sends to it in these
//! goes to the interface that it leaves, where nobody reads any more. A client whose packet is lost
//! in this way waits for its own timer, which for TCP is 200 ms at the least (RFC 6298, and
//! TCP_RTO_MIN of Linux): twenty times the downtime.
//!
//! - [`Outlet`], at the host that the guest leaves, keeps a copy of what the network sends to the
//!   guest's card through its interface, from [`Outlet::open`] on.
//! - [`Inlet`], at the host where the guest goes on, puts such packets into its interface there.
//!
//! Both are packet sockets (packet(7)), which need CAP_NET_RAW where the interface is. The
//! interface, the bridge that it belongs to, and whoever reads it notice nothing of an outlet: it
//! gets copies, and only of what is meant for the card. A packet with a VLAN tag beside its bytes
//! is left out, for it would arrive without.
//!
//! Invariants: what is put into the interface of a tap goes to whoever reads the tap, and not to
//! the network; and no outlet takes it for what came from there. That an interface is a tap's, the
//! caller sees to.
//!
//! ```no_run
//! use godwit_tap::{Inlet, Mac, Outlet, Packet};
//!
//! let card: Mac = "52:54:00:12:34:56".parse()?;
//! let mut outlet = Outlet::of("vnet0", card)?;
//! outlet.open()?;
//! // The guest is stopped, moves, and runs behind another interface.
//! let inlet = Inlet::of("vnet1")?;
//! while let Some(packet) = outlet.take()? {
//!     inlet.put(&packet)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod packet;
mod socket;

pub use packet::{Mac, NotAMac, PACKET_LIMIT, Packet};
pub use socket::{Inlet, Outlet};
