//! The conversation of a migration as two state machines, without sockets, threads or clock.
//!
//! ```text
//!   source                                            destination
//!   Idle          -- Offer ------------------------>  Listening
//!   Negotiating   <------------------------ Accept -- Receiving
//!   PreCopy ⟲     -- pages …, RoundEnd ------------>     ⟲
//!                 <---------------------- RoundAck --
//!   Preparing     -- Prepare ---------------------->
//!                 <---------------------- Prepared -- Prepared
//!   Closing ⟲     -- pages …, RoundEnd ------------>     ⟲
//!                 <---------------------- RoundAck --
//!   Stopping         (guest stops)
//!   StopAndCopy   -- last pages, RoundEnd --------->               (the machine saves its devices meanwhile,
//!                 <---------------------- RoundAck --               unless digests are to be compared)
//!   Verifying     -- DigestRequest ---------------->               (with --verify)
//!                 <----------------------- Digests --
//!   SavingState   -- DeviceState …, DeviceStateEnd->  Loading
//!   AwaitingReady <------------------------- Ready -- Ready
//!   Handover      -- Commit ----------------------->  Starting
//!   Done          <----------------------- Running -- Running
//!                 -- Farewell --------------------->  Done
//! ```
//!
//! Connections that are lost before the guest is stopped are made again, with the guest running:
//!
//! ```text
//!   PreCopy, Preparing                                Receiving
//!   Severed ⟲     -- Resume ----------------------->  Severed
//!   PreCopy       <----------------------- Resumed -- Receiving
//!   Closing                                           Prepared
//!   SeveredClosing ⟲                                  SeveredPrepared
//!   Closing                                           Prepared
//! ```
//!
//! In post-copy the last pages go over behind the handover, while the guest runs at the
//! destination:
//!
//! ```text
//!   Stopping         (guest stops)
//!   StopAndCopy   -- RoundEnd, Missing … ---------->  Prepared     (who accesses one waits)
//!   SavingState   -- DeviceState …, DeviceStateEnd->  Loading      (may ask for pages already)
//!   AwaitingReady <------------------------- Ready -- Ready
//!   Handover      -- Commit ----------------------->  Starting
//!   Serving       <----------------------- Running -- Fetching
//!                 <----- pages that are waited for --
//!                 -- pages ------------------------>
//!   Done          <------------------------ Placed -- Running
//!                 -- Farewell --------------------->  Done
//! ```
//!
//! Connections that are lost in Serving and Fetching are made again without end: the source keeps
//! every page until it hears that all are in place, and nothing but that ends Serving.
//!
//! The machines say what to do; pages never enter them, and neither do signs of life: a peer that
//! falls silent is a link that is lost. [`source::step`] and [`destination::step`] are total: what
//! must not happen in a state is an error, not a panic.
//!
//! Invariant: **at most one side runs the guest.** The source may run it in every state up to and
//! including `AwaitingReady`, and again in `Cancelled`; the destination from `Starting` on. The
//! source leaves the former for good by sending COMMIT and comes back only when told `Discarded`,
//! which the destination says only in a state that it never leaves. `tests/model.rs` walks every
//! interleaving of both machines and a link that may break at any point, and checks it, and that no
//! source ends while a page is missing;
//! `tests/resumption.rs` does so with a page whose versions are sent, lost and sent again.

#![forbid(unsafe_code)]

pub mod destination;
pub mod source;

/// An input that a state cannot take: the peer broke the protocol, or the caller is mistaken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{input} is out of place in the state {state}")]
#[non_exhaustive]
pub struct Unexpected {
    /// The state.
    pub state: String,
    /// The input.
    pub input: String,
}
