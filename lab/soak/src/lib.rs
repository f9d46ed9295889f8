//! A soak: many VMs at once, of every kind, moved to and fro while their host is busy.
//!
//! ```text
//!   damage   bits flipped in the work of a witness, to see that it tells
//!   machine  the VMs: which kind each is, and what its guest has and does
//!   draw     the settings of one move, and whether a fault strikes it, from a seed
//!   load     what keeps the host busy beside the VMs
//!   run      one thread for each VM, which moves it until all moves are made
//!   table    a line for each VM while it runs
//!   report   rows, targets, and the table of docs/reliability.md
//! ```
//!
//! The VMs and the checks behind each move are those of `godwit-faults`: the guest runs on one
//! side, has found no damage in its memory or on its disk, counts on from where it was, and
//! nothing of godwit's is left. All memory is compared at every move (`--verify`).

#![forbid(unsafe_code)]

pub mod damage;
pub mod draw;
pub mod load;
pub mod machine;
pub mod report;
pub mod run;
pub mod table;
