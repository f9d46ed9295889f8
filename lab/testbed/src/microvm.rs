//! One microvm with its guest: a process of the `godwit` command, like those of its users.
//!
//! Keeps two promises: every wait has a limit, and a machine that is dropped is ended and leaves
//! nothing.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::console::Console;
use crate::godwit::Godwit;
use crate::leftovers::Place;
use crate::machine::Movable;

const START_LIMIT: Duration = Duration::from_secs(30);

/// A running microvm; dropping it ends it.
#[derive(Debug)]
pub struct MicroVm {
    child: Child,
    console: Console,
    place: Place,
}

impl MicroVm {
    /// Starts one with the options `options` of `godwit microvm run`, its memory aside in a file of
    /// its own if `options` say nothing of `--block`.
    ///
    /// # Errors
    /// When it does not come up, with its own words.
    pub fn start(godwit: &Godwit, options: &[&str]) -> anyhow::Result<Self> {
        let place = Place::new()?;
        let errors =
            File::create(place.file("stderr")).context("cannot create a file for errors")?;
        let mut command = Command::new(godwit.program());
        command.args(["microvm", "run", "--control"]).arg(place.file("control")).args(options);
        if !options.contains(&"--block") {
            command.arg("--memory-path").arg(place.ram());
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors).spawn();
        let mut child =
            child.with_context(|| format!("cannot start {}", godwit.program().display()))?;
        let console =
            Console::read(child.stdout.take().context("the machine has no standard output")?);
        let mut vm = Self { child, console, place };
        let deadline = Instant::now() + START_LIMIT;
        while UnixStream::connect(vm.control_socket()).is_err() {
            if vm.child.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("the microvm did not come up; it said: {}", vm.errors().trim());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(vm)
    }

    /// Its control socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.place.file("control")
    }

    /// Sends one request and returns the first answer.
    ///
    /// # Errors
    /// When there is none.
    pub fn ask(&self, command: &str) -> anyhow::Result<Value> {
        let mut stream =
            UnixStream::connect(self.control_socket()).context("cannot reach the machine")?;
        stream.set_read_timeout(Some(START_LIMIT))?;
        writeln!(stream, "{{\"command\":\"{command}\"}}")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("answered {line:?}"))
    }

    /// Waits until its guest has told here of `blocks` blocks of memory that were plugged in and
    /// that it has stamped.
    ///
    /// # Errors
    /// When it does not within `limit`.
    pub fn wait_plugged(&self, blocks: usize, limit: Duration) -> anyhow::Result<()> {
        self.console.wait("plugged memory in use", limit, |console| {
            let lines = console.lines();
            (lines.iter().filter(|line| line.starts_with("PLUGGED ")).count() >= blocks)
                .then_some(())
        })
    }

    /// The state it says it is in.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn status(&self) -> anyhow::Result<String> {
        Ok(self.ask("status")?["state"].as_str().unwrap_or_default().to_owned())
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// Whether the process still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until it ends.
    ///
    /// # Errors
    /// When it does not within `limit`.
    pub fn wait(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "the machine has not ended within {limit:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends it at once, as a crash would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// What it complained of.
    #[must_use]
    pub fn errors(&self) -> String {
        std::fs::read_to_string(self.place.file("stderr")).unwrap_or_default()
    }
}

impl Movable for MicroVm {
    fn vm_name(&self) -> String {
        format!("microvm:{}", self.control_socket().display())
    }

    fn ram_file(&self) -> &Path {
        self.place.ram()
    }

    fn console(&self) -> &Console {
        &self.console
    }
}

impl Drop for MicroVm {
    fn drop(&mut self) {
        self.kill();
    }
}
