//! The clock of one process, which can be set while it runs: that of the machine belongs to all
//! tests.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};

use crate::godwit::Godwit;
use crate::leftovers::Place;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/clock.c");

/// A clock that is as far off as it was last set.
#[derive(Debug)]
pub struct Clock {
    place: Place,
    file: File,
}

impl Clock {
    /// One that is right.
    ///
    /// # Errors
    /// When there is no C compiler, which a Rust toolchain links with.
    pub fn new() -> anyhow::Result<Self> {
        let place = Place::new()?;
        let library = place.file("clock.so");
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]);
        let status = compile.arg(&library).arg(SOURCE).status().context("cannot run cc")?;
        ensure!(status.success(), "cc cannot compile {SOURCE}: {status}");
        let file = File::options()
            .write(true)
            .create_new(true)
            .open(place.file("seconds"))
            .context("cannot make the clock's file")?;
        let clock = Self { place, file };
        clock.set(0)?;
        Ok(clock)
    }

    /// It is `seconds` ahead from now on, or behind.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn set(&self, seconds: i64) -> anyhow::Result<()> {
        Ok(self.file.write_all_at(&seconds.to_ne_bytes(), 0)?)
    }

    /// `godwit`, by this clock.
    #[must_use]
    pub fn of(&self, godwit: Godwit) -> Godwit {
        let path = |path: PathBuf| path.display().to_string();
        godwit
            .with_variable("LD_PRELOAD", &path(self.place.file("clock.so")))
            .with_variable("GODWIT_TEST_CLOCK", &path(self.place.file("seconds")))
    }
}
