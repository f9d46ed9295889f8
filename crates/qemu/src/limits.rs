//! How long a QEMU is waited for.

use std::time::Duration;

use crate::monitor::COMMAND_LIMIT;

/// How long a QEMU is waited for; tests have less patience.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For the answer to a command.
    pub answer: Duration,
    /// For the guest to stop. QEMU reaches pre-switchover once its own, small RAM blocks are sent
    /// and all disks are flushed; a flush may take long on a slow disk.
    pub stop: Duration,
    /// For a QEMU whose main loop stands still to take its migration back. A disk on storage that
    /// hangs holds it up, and nothing but that disk can let it go on. The guest cannot run
    /// meanwhile, and QEMU forgets the command when godwit ends: so there is nothing better to do
    /// than to wait.
    pub hang: Duration,
    /// For the end of its migration from then on, and for the guest to run again.
    pub resume: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let [stop, hang, resume] = [30, 600, 20].map(Duration::from_secs);
        Self { answer: COMMAND_LIMIT, stop, hang, resume }
    }
}
