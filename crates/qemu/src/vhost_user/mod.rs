//! vhost-user devices: their back ends are other processes, which have the guest's RAM mapped and
//! write it by page tables of their own.
//!
//! ```text
//!   device or netdev ── chardev ── connection of two unix sockets ── process ── maps RAM
//!        QMP                         sock_diag(7)          /proc/PID/fd    /proc/PID/maps
//! ```
//!
//! `front` is what QEMU has, `back_end` the processes, `attendance` whether one came and went
//! unseen, `idle` what is left to be done when the guest was stopped. Tracking them is
//! `godwit_track`'s.
//!
//! **Whose state would be lost is refused.** QEMU hands over where each queue is (it asks the back
//! end for that as the guest is stopped, `VHOST_USER_GET_VRING_BASE`), and the device's own
//! registers. A back end with more than that would need QEMU's help to hand it over
//! (`VHOST_USER_PROTOCOL_F_DEVICE_STATE`). What QEMU itself says against a migration holds, but for
//! the want of a dirty log, in whose place godwit tracks the page tables.

mod attendance;
mod back_end;
mod front;
mod idle;

pub(crate) use back_end::{BackEnd, Watch};
pub(crate) use front::{Front, check_blockers, fronts};
pub(crate) use idle::Queues;
