//! What ends a long call of a machine's adapter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Cancel;

/// Tells an adapter, within a call that takes long, that nobody waits for its end any more: the
/// operator cancelled, or the peer gave up or is lost. It is never raised when the guest is being
/// brought back or discarded, nor from COMMIT on.
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
    lost: Arc<AtomicBool>,
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
            && (self.cancel.is_cancelled() || self.lost.load(Ordering::Acquire))
    }

    /// The peer gave up or is lost, which was told before.
    pub(crate) fn raise(&self) {
        self.lost.store(true, Ordering::Release);
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
        cancel.cancel();
        lost.raise();
        for interrupt in [cancelled, lost] {
            assert!(interrupt.clone().is_raised());
            interrupt.silence();
            assert!(!interrupt.clone().is_raised());
        }
    }
}
