//! What ends a long call of a machine's adapter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::Cancel;

/// Tells an adapter, within a call that takes long, that nobody waits for its end any more: the
/// operator cancelled, the peer gave up or is lost, or what the call needs cannot come. It is never
/// raised when the guest is being brought back or discarded, nor from COMMIT on.
///
/// ```
/// use std::time::{Duration, Instant};
/// use godwit_engine::{Cancel, Interrupt};
///
/// /// Waits for a machine that is `ready` at some time.
/// fn wait(ready: impl Fn() -> bool, interrupt: &Interrupt) -> Result<(), String> {
///     while !ready() {
///         if interrupt.is_raised() {
///             return Err("interrupted".to_owned());
///         }
///         std::thread::sleep(Duration::from_millis(20));
///     }
///     Ok(())
/// }
///
/// let cancel = Cancel::default();
/// let interrupt = Interrupt::new(&cancel);
/// assert!(wait(|| true, &interrupt).is_ok());
/// cancel.cancel();
/// assert!(wait(|| false, &interrupt).is_err());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    cancel: Cancel,
    over: Arc<AtomicBool>,
    /// What the call needs cannot come any more.
    starved: Arc<AtomicBool>,
    /// The number of the last connection that was lost, and of the one in use.
    lost: Arc<AtomicU32>,
    current: Arc<AtomicU32>,
    /// A connection that is lost is made again, and nobody need hurry for that.
    patient: Arc<AtomicBool>,
    silenced: Arc<AtomicBool>,
}

impl Interrupt {
    /// One that the wish to cancel raises.
    #[must_use]
    pub fn new(cancel: &Cancel) -> Self {
        Self { cancel: cancel.clone(), ..Self::default() }
    }

    /// Whether the call should end now, with whatever error: the engine knows the reason.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        !self.silenced.load(Ordering::Acquire)
            && (self.cancel.is_cancelled()
                || self.over.load(Ordering::Acquire)
                || self.starved.load(Ordering::Acquire)
                || self.is_lost() && !self.patient.load(Ordering::Acquire))
    }

    /// Whether the peer gave up.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Whether the connection in use is lost.
    pub(crate) fn is_lost(&self) -> bool {
        let lost = self.lost.load(Ordering::Acquire);
        lost > 0 && lost >= self.current.load(Ordering::Acquire)
    }

    /// The peer gave up, which was told before.
    pub(crate) fn raise(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// What the call needs cannot come any more, which was told before.
    pub(crate) fn starve(&self) {
        self.starved.store(true, Ordering::Release);
    }

    /// Connection `number`, counted from 1, is lost, which was told before.
    pub(crate) fn lost(&self, number: u32) {
        self.lost.fetch_max(number, Ordering::AcqRel);
    }

    /// Connection `number` is the one in use from now on: what became of earlier ones is of no
    /// interest.
    pub(crate) fn uses(&self, number: u32) {
        self.current.store(number, Ordering::Release);
    }

    /// Whether a connection that is lost will be made again.
    pub(crate) fn be_patient(&self, patient: bool) {
        self.patient.store(patient, Ordering::Release);
    }

    /// From now on every call is to be taken to its end.
    pub(crate) fn silence(&self) {
        self.silenced.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_raises_it_once_it_was_silenced() {
        let cancel = Cancel::default();
        let (cancelled, lost) = (Interrupt::new(&cancel), Interrupt::default());
        let starved = Interrupt::default();
        cancel.cancel();
        lost.uses(1);
        lost.lost(1);
        starved.starve();
        for interrupt in [cancelled, lost, starved] {
            assert!(interrupt.clone().is_raised());
            interrupt.silence();
            assert!(!interrupt.clone().is_raised());
        }
    }

    #[test]
    fn a_lost_connection_raises_it_unless_another_one_is_made() {
        let interrupt = Interrupt::default();
        interrupt.uses(1);
        interrupt.be_patient(true);
        interrupt.lost(1);
        assert!(!interrupt.is_raised());
        // From here on none is made again.
        interrupt.be_patient(false);
        assert!(interrupt.is_raised());
        interrupt.uses(2);
        assert!(!interrupt.is_raised());
        interrupt.lost(1);
        assert!(!interrupt.is_raised(), "who read the earlier connection is late");
        interrupt.be_patient(true);
        interrupt.raise();
        assert!(interrupt.is_raised(), "a peer that gave up does not come back");
    }
}
