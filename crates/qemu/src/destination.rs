//! A stock QEMU as the destination, started with `-incoming defer`.
//!
//! It loads the device state from a socket pair and stays paused, since it was told `stop` while it waited. From
//! `migrate-incoming` on it cannot be used for another attempt: QEMU exits when its incoming migration fails.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use godwit_engine::vm::{DestinationVm, VmError};
use godwit_memory::RamBlock;
use serde_json::{Value, json};

use crate::QemuError;
use crate::machine::Machine;
use crate::qmp::QmpError;
use crate::settings::Settings;
use crate::source::{FD_NAME, failure_words, migration_event};

/// Loading takes milliseconds; a device that opens a slow disk may take longer.
const LOAD_LIMIT: Duration = Duration::from_secs(30);
/// One write of device state without progress.
const WRITE_LIMIT: Duration = Duration::from_secs(20);

/// QEMU reports why it could not load on its standard error only, and exits.
const EXITED: &str = "it has exited; see its standard error (do the options of both sides agree?)";

/// A QEMU that waits for a guest.
#[derive(Debug)]
pub struct QemuDestination {
    machine: Machine,
    ram: Arc<Vec<RamBlock>>,
    /// Whether it was told to load: it then ends with this attempt.
    prepared: bool,
}

impl QemuDestination {
    /// Looks at the QEMU behind the monitor at `path`. Changes nothing.
    ///
    /// # Errors
    /// When it does not wait for a migration, or its RAM is not in shared named files.
    pub fn open(path: &Path) -> Result<Self, QemuError> {
        let mut machine = Machine::connect(path)?;
        let state = machine.run_state()?;
        if state != "inmigrate" {
            return Err(QemuError::NotIncoming { state: format!("its state is '{state}'") });
        }
        let migration = machine.migration_state()?;
        if !matches!(migration.as_str(), "" | "none") {
            return Err(QemuError::NotIncoming {
                state: format!("its incoming migration is '{migration}' already"),
            });
        }
        let ram = machine.ram()?;
        Ok(Self { machine, ram: Arc::new(ram), prepared: false })
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.machine.pid
    }
}

impl DestinationVm for QemuDestination {
    fn machine(&self) -> &'static str {
        "qemu"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        let (ours, theirs) =
            UnixStream::pair().map_err(|source| QemuError::System { step: "socketpair", source })?;
        ours.set_write_timeout(Some(WRITE_LIMIT))
            .map_err(|source| QemuError::System { step: "SO_SNDTIMEO", source })?;
        let qmp = &mut self.machine.qmp;
        Settings::apply(qmp)?;
        // While it waits this only clears the wish to start by itself after loading.
        qmp.execute("stop", Value::Null)?;
        qmp.pass_fd(FD_NAME, theirs.as_fd())?;
        qmp.forget_events();
        self.prepared = true;
        qmp.execute("migrate-incoming", json!({ "uri": format!("fd:{FD_NAME}") }))?;
        Ok(Box::new(ours))
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        let qmp = &mut self.machine.qmp;
        let ended = |words: &str| QemuError::State { action: "load", words: words.to_owned() };
        let reached = qmp.wait_event_where("the end of its incoming migration", LOAD_LIMIT, |event| {
            matches!(migration_event(event).as_str(), "failed" | "completed")
        });
        match reached {
            Ok(event) if migration_event(&event) == "completed" => {}
            Ok(_) => return Err(ended(&failure_words(qmp, EXITED)).into()),
            Err(QmpError::Closed { .. }) => {
                return Err(ended(EXITED).into());
            }
            Err(error) => return Err(error.into()),
        }
        match self.machine.run_state()?.as_str() {
            "paused" => Ok(()),
            state => Err(ended(&format!("it is '{state}' after loading, not paused")).into()),
        }
    }

    fn run(&mut self) -> Result<(), VmError> {
        self.machine.qmp.execute("cont", Value::Null)?;
        match self.machine.run_state()? {
            state if state == "running" => Ok(()),
            state => Err(QemuError::NotRunning { state, cure: "see QEMU's log" }.into()),
        }
    }

    fn announce(&mut self) -> Result<(), VmError> {
        // QEMU's own defaults after a migration (qapi/migration.json, announce-*).
        let timing = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
        self.machine.qmp.execute("announce-self", timing)?;
        Ok(())
    }

    fn discard(&mut self) {
        // A QEMU that only had pages written into its RAM goes on waiting: another attempt overwrites them all.
        if self.prepared {
            let _ = self.machine.qmp.execute("quit", Value::Null);
        }
    }
}
