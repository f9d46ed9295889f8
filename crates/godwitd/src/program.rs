//! `godwit`, run for an answer: what it knows of the host it says in JSON.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::Value;

/// For an answer; what is asked of monitors has shorter limits of its own.
const LIMIT: Duration = Duration::from_secs(10);

/// Where it is.
#[derive(Clone, Debug)]
pub(crate) struct Program(PathBuf);

impl Program {
    /// The one beside this program.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let own = std::env::current_exe().context("this program cannot be found")?;
        let path = own.with_file_name("godwit");
        anyhow::ensure!(path.is_file(), "there is no {}, which godwitd works by", path.display());
        Ok(Self(path))
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// What it prints for `words`; nothing where it fails or takes too long.
    pub(crate) fn text(&self, words: &[&str]) -> Option<String> {
        let mut child = Command::new(&self.0)
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let mut output = child.stdout.take()?;
        // Read beside it: a pipe holds little.
        let reading = std::thread::Builder::new().spawn(move || {
            let mut text = String::new();
            output.read_to_string(&mut text).map(|_| text)
        });
        let until = Instant::now() + LIMIT;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if Instant::now() < until && reading.is_ok() => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => {
                    let _ = child.kill();
                    let _ = child.wait();
                    break None;
                }
            }
        };
        let text = reading.ok()?.join().ok()?.ok()?;
        status.filter(std::process::ExitStatus::success).map(|_| text)
    }

    /// The same, as JSON; null where there is none.
    pub(crate) fn json(&self, words: &[&str]) -> Value {
        let text = self.text(words).unwrap_or_default();
        serde_json::from_str(text.trim()).unwrap_or(Value::Null)
    }
}
