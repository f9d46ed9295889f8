//! What the demo and the tests ask of a machine with the self-checking guest, whatever kind it is.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use godwit_units::ByteCount;

use crate::console::{Beat, Console};
use crate::disk::allocated;
use crate::vm::TestVm;

/// A machine whose guest may move.
pub trait Movable {
    /// Its name for `--vm`.
    fn vm_name(&self) -> String;

    /// The file that holds its RAM.
    fn ram_file(&self) -> &Path;

    /// What its guest prints.
    fn console(&self) -> &Console;

    /// Waits until the guest has filled its buffer.
    ///
    /// # Errors
    /// When it does not within `limit`, or says that it cannot.
    fn wait_ready(&self, limit: Duration) -> anyhow::Result<()> {
        let ready = self.console().wait("sign of being ready", limit, Console::ready);
        ready.and_then(|outcome| outcome.map_err(|text| anyhow!(text)))
    }

    /// The heartbeats that arrived on this side.
    fn heartbeats(&self) -> Vec<Beat> {
        self.console().beats()
    }

    /// The heartbeats of a guest that moved from here to `destination`.
    fn heartbeats_across(&self, destination: &dyn Movable) -> Vec<Beat> {
        self.console().beats_across(destination.console())
    }

    /// Waits for `count` heartbeats that arrive after `moment`, and returns all that did.
    ///
    /// # Errors
    /// When they do not come within `limit`.
    fn wait_for_heartbeats_after(
        &self,
        moment: Instant,
        count: usize,
        limit: Duration,
    ) -> anyhow::Result<Vec<Beat>> {
        self.console().wait(&format!("{count} heartbeats"), limit, |console| {
            let mut beats = console.beats();
            beats.retain(|beat| beat.at > moment);
            (beats.len() >= count).then_some(beats)
        })
    }

    /// Bytes of memory that the host holds for it: what its RAM file takes up.
    ///
    /// # Errors
    /// When it cannot be looked at.
    fn held(&self) -> anyhow::Result<ByteCount> {
        allocated(self.ram_file())
    }

    /// Waits until that is as `wanted`.
    ///
    /// # Errors
    /// When it is not within `limit`.
    fn await_held(
        &self,
        limit: Duration,
        wanted: &dyn Fn(ByteCount) -> bool,
    ) -> anyhow::Result<()> {
        let until = Instant::now() + limit;
        loop {
            let held = self.held()?;
            if wanted(held) {
                return Ok(());
            }
            ensure!(Instant::now() < until, "after {limit:?} the host holds {held} for it");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Lines of this side that tell of damaged memory.
    fn bugs(&self) -> Vec<String> {
        self.console().bugs()
    }
}

impl Movable for TestVm {
    fn vm_name(&self) -> String {
        format!("qemu:{}", self.qmp_socket().display())
    }

    fn ram_file(&self) -> &Path {
        Self::ram_file(self)
    }

    fn console(&self) -> &Console {
        Self::console(self)
    }
}
