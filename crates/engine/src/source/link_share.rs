//! Where memory waits while disks have the link.
//!
//! Memory gets so many parts of the link for each [`ALL`] of the disks: what disks send is credit
//! for memory, what memory sends is taken off it, and a segment begins while there is credit. At
//! [`ALL`] nobody waits. Below it, the pass over memory ends with the passes over disks, wherever
//! it is.
//!
//! Invariant: nobody waits here when the round is to end, or when no disk is under way.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use godwit_units::ByteCount;

use crate::limits;

/// All parts of the link's time, as the policy counts them.
const ALL: u16 = 1024;

#[derive(Debug)]
struct State {
    share: u16,
    /// Disks whose pass is under way.
    under_way: usize,
    /// Bytes that memory may send, times [`ALL`].
    credit: i64,
    closed: bool,
}

/// The link share.
#[derive(Debug)]
pub(super) struct LinkShare {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether there are disks at all.
    disks: bool,
}

impl LinkShare {
    /// An open link share; without `disks` it stays open.
    pub(super) fn new(disks: bool) -> Self {
        let state = State { share: ALL, under_way: 0, credit: 0, closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), disks }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory gets `share` parts for each [`ALL`] of disks, from now on.
    pub(super) fn set_share(&self, share: u16) {
        let mut state = self.state();
        if state.share != share {
            (state.share, state.credit) = (share, 0);
        }
        self.changed.notify_all();
    }

    /// The share in force.
    pub(super) fn share(&self) -> u16 {
        if self.disks { self.state().share } else { ALL }
    }

    /// A round begins, with a pass over so many disks.
    pub(super) fn begin(&self, disks: usize) {
        self.state().under_way = disks;
    }

    /// A pass over a disk has ended.
    pub(super) fn disk_done(&self) {
        let mut state = self.state();
        state.under_way = state.under_way.saturating_sub(1);
        self.changed.notify_all();
    }

    /// So much of a disk was sent.
    pub(super) fn disk_sent(&self, bytes: ByteCount) {
        let mut state = self.state();
        let earned = bytes.0.saturating_mul(state.share.into());
        state.credit = state.credit.saturating_add_unsigned(earned);
        if state.credit > 0 {
            self.changed.notify_all();
        }
    }

    /// So much of memory was sent.
    pub(super) fn memory_sent(&self, bytes: ByteCount) {
        if self.disks {
            let mut state = self.state();
            if state.share < ALL {
                state.credit =
                    state.credit.saturating_sub_unsigned(bytes.0.saturating_mul(ALL.into()));
            }
        }
    }

    /// Waits until memory may be sent; false when no more of it is to be sent in this round, also
    /// when `hurries` says so.
    pub(super) fn opens(&self, hurries: impl Fn() -> bool) -> bool {
        if !self.disks {
            return true;
        }
        let mut state = self.state();
        loop {
            if state.share >= ALL {
                return true;
            }
            if state.closed || state.under_way == 0 || hurries() {
                return false;
            }
            if state.share > 0 && state.credit > 0 {
                return true;
            }
            state = self
                .changed
                .wait_timeout(state, limits::TICK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Memory waits again, behind [`Self::close`].
    pub(super) fn reopen(&self) {
        let mut state = self.state();
        (state.closed, state.under_way, state.credit) = (false, 0, 0);
    }

    /// Nobody waits any more.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const NEVER: fn() -> bool = || false;

    #[test]
    fn memory_gets_its_share_of_what_disks_send() {
        let link_share = LinkShare::new(true);
        assert!(link_share.opens(NEVER), "before anything is said");
        link_share.set_share(256);
        link_share.begin(1);
        link_share.disk_sent(ByteCount(4000));
        assert!(link_share.opens(NEVER));
        link_share.memory_sent(ByteCount(1000));
        // A quarter of what the disk has sent: no credit is left, and the hurry is all that ends
        // the wait.
        assert!(!link_share.opens(|| true));
        link_share.disk_sent(ByteCount(1));
        assert!(link_share.opens(NEVER));
        link_share.disk_done();
        assert!(!link_share.opens(NEVER), "the round ends with the disks");
        link_share.set_share(1024);
        assert!(link_share.opens(NEVER), "but not where both are passed over");
        assert_eq!(link_share.share(), 1024);
    }

    #[test]
    fn without_disks_nothing_waits() {
        let link_share = LinkShare::new(false);
        link_share.set_share(0);
        assert!(link_share.opens(NEVER));
        assert_eq!(link_share.share(), 1024);
    }

    #[test]
    fn whoever_waits_is_woken() {
        for wake in [LinkShare::disk_done, LinkShare::close, |link_share: &LinkShare| {
            link_share.set_share(1024)
        }] {
            let link_share = Arc::new(LinkShare::new(true));
            link_share.set_share(0);
            link_share.begin(1);
            let waits = Arc::new(AtomicBool::new(false));
            let (own, told) = (Arc::clone(&link_share), Arc::clone(&waits));
            // With no share there is no credit, however much disks send.
            link_share.disk_sent(ByteCount(1 << 40));
            let waiting = std::thread::spawn(move || {
                own.opens(|| {
                    told.store(true, Ordering::SeqCst);
                    false
                })
            });
            while !waits.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            assert!(!waiting.is_finished());
            wake(&link_share);
            assert_eq!(waiting.join().unwrap(), link_share.share() == 1024);
        }
    }
}
