//! What a guest does to its machine by a write to a port, done from outside at a moment of the
//! test's choice: powering off, panicking, resetting. It may be done while the guest is stopped,
//! too: then QEMU finds what it finds when the guest did so just before.
//!
//! By QEMU's qtest protocol (system/qtest.c), which works beside any accelerator. Keeps one
//! promise: each call returns when QEMU has carried the write out, within [`LIMIT`].

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::leftovers::Place;

const LIMIT: Duration = Duration::from_secs(20);

/// The ports of one machine.
#[derive(Debug)]
pub struct Ports {
    place: Place,
}

impl Ports {
    /// A place for the socket.
    ///
    /// # Errors
    /// When there is none.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self { place: Place::new()? })
    }

    /// What QEMU is told. Both sides of a migration need a device like this one's.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let socket = format!("unix:{},server=on,wait=off", self.place.file("qtest").display());
        ["-qtest", &socket, "-qtest-log", "none", "-device", "pvpanic"].map(str::to_owned).into()
    }

    /// The guest powers off: sleep state S5 of ACPI, at q35's PM1a control register as its firmware
    /// sets it up.
    ///
    /// # Errors
    /// When QEMU does not take it.
    pub fn power_off(&self) -> anyhow::Result<()> {
        self.write("outw 0x604 0x2000")
    }

    /// The guest tells that it panicked (docs/specs/pvpanic).
    ///
    /// # Errors
    /// As [`Self::power_off`].
    pub fn panic(&self) -> anyhow::Result<()> {
        self.write("outb 0x505 1")
    }

    /// The guest resets its machine: q35's reset control register.
    ///
    /// # Errors
    /// As [`Self::power_off`].
    pub fn reset(&self) -> anyhow::Result<()> {
        self.write("outb 0xcf9 6")
    }

    fn write(&self, command: &str) -> anyhow::Result<()> {
        let mut socket =
            UnixStream::connect(self.place.file("qtest")).context("QEMU's qtest socket")?;
        socket.set_read_timeout(Some(LIMIT))?;
        writeln!(socket, "{command}")?;
        let mut answer = String::new();
        BufReader::new(socket).read_line(&mut answer)?;
        ensure!(answer.trim() == "OK", "QEMU says '{}' to {command}", answer.trim());
        Ok(())
    }
}
