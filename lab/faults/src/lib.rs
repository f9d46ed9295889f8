//! Faults: every one of a numbered list, at every step of a migration, with every kind of VM.
//!
//! ```text
//!   point    the list: what strikes, where, and what must come of it
//!   phase    the steps, and the byte on the link at which each begins
//!   rig      the VMs
//!   scene    a migration that is held at a step, and what can be done to it
//!   cell     one fault at one step: from two VMs to the verdict
//!   report   rows, targets, and the table of docs/reliability.md
//!   defects  what a migration gets wrong on purpose, and whether that is found
//!   tally    rows, targets and the table of these
//!   followed faults while the memory of a guest follows it; of a microvm's in followed_microvms
//! ```
//!
//! A cell is a real migration between real VMs by the `godwit` command. Behind the fault exactly
//! one side runs the guest, by itself or by what `docs/recovery.md` has an operator type; the guest
//! has found no damage; nothing of godwit's is left; and the next migration comes to a good end.
//! The guest of a cell is that of the cell before, so its stamps hold through all of them.

#![forbid(unsafe_code)]

pub mod cell;
pub mod defects;
pub mod followed;
pub mod followed_microvms;
pub mod phase;
pub mod point;
pub mod report;
pub mod rig;
pub mod scene;
pub mod tally;
