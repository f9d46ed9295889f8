//! Evacuations that survive whoever coordinates them.
//!
//! ```text
//!   list       the VMs and destinations that an operator names, or a host has
//!   command    what takes a guest in, with its name and memory in it
//!   plan       what is written down: who goes where, and how far each is
//!   store      where, and which of several coordinators may go on with it
//!   nats       a store that several hosts share, in NATS JetStream
//!   silence    when a coordinator counts as gone
//!   runner     the coordinator
//!   moves      moves as processes
//!   remote     the same on another host
//! ```
//!
//! `godwit-fleet` decides what is to be done; here it is done, written down before, and found out
//! again afterwards. A coordinator may be killed at any step: moves go on without it, as processes
//! of their own, and the next coordinator finds each of them by its facts. One that was stopped and
//! wakes up when another has gone on can neither write nor begin anything any more.
//!
//! Invariants: a move is written down before it begins ([`Runner`]); of one virtual machine no two
//! moves are under way, since a move holds a lock on its own file for as long as its process lives
//! ([`Moves`]); what became of a move is read from what it said and from who runs the guest, never
//! from the plan.

#![forbid(unsafe_code)]

mod command;
mod list;
mod moves;
mod nats;
mod plan;
mod remote;
mod runner;
mod silence;
mod store;

pub use command::filled;
pub use list::{List, ListedDestination, ListedVm, exact, fits};
pub use moves::{Moves, migration, this_host};
pub use nats::{NatsOptions, NatsStore};
pub use plan::{Attempt, Home, Plan, PlannedDestination, PlannedVm, Receiver, Step, Wanted};
pub use remote::{Files, Host, RemoteHands, serve_hands};
pub use runner::{Event, Hands, Look, Report, ReportedVm, Runner, keys};
pub use silence::Silence;
pub use store::{Lease, MemoryStore, RedbStore, Store, Tenure, Wishes};

/// What goes wrong with an evacuation itself, rather than with a move.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvacuateError {
    /// The list of virtual machines is not one.
    #[error("{file}: {why}")]
    List {
        /// Which file.
        file: String,
        /// What is wrong, and the cure.
        why: String,
    },
    /// Another coordinator is at work.
    #[error(
        "another godwit evacuate has {place} open: wait for its end, or steer it by godwit \
         evacuate --pause, --continue, --set or --cancel"
    )]
    Busy {
        /// Where the plan is.
        place: String,
    },
    /// The plan cannot be read or written.
    #[error("the plan in {place} cannot be {action}: {why}")]
    Store {
        /// Where the plan is.
        place: String,
        /// What was tried.
        action: &'static str,
        /// Why not.
        why: String,
    },
    /// The store does not answer: moves go on, and what is to be done next has to wait.
    #[error("the store at {place} does not answer: {why}")]
    Away {
        /// Where it is.
        place: String,
        /// What was heard.
        why: String,
    },
    /// Another coordinator has taken over.
    #[error("another coordinator has taken over, as the store at {place} says")]
    Lost {
        /// Where it is.
        place: String,
    },
    /// There is nothing to go on with.
    #[error("there is no plan in {place}: begin one with godwit evacuate LIST")]
    NoPlan {
        /// Where it would be.
        place: String,
    },
    /// There is one already.
    #[error("{place} has a plan already: go on with --resume, or choose another --name")]
    Planned {
        /// Where it is.
        place: String,
    },
}
