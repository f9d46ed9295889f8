//! `godwit` on a terminal of a given width, as a person sees it.

use std::io::{ErrorKind, Read};
use std::process::{Child, Command, ExitStatus};
use std::thread::JoinHandle;

use anyhow::{Context, ensure};
use godwit_testbed::Godwit;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// A command whose input and output are a terminal.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    columns: usize,
    written: JoinHandle<String>,
}

/// What was written to a terminal.
#[derive(Clone, Debug)]
pub struct Screen {
    /// How the command ended.
    pub status: ExitStatus,
    /// All that was written.
    pub text: String,
    columns: usize,
}

impl Terminal {
    /// Runs `godwit` with `arguments` on a terminal of `columns`.
    ///
    /// # Errors
    /// When there are no pseudo-terminals, or the command does not start.
    pub fn start(godwit: &Godwit, columns: u16, arguments: &[&str]) -> anyhow::Result<Self> {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).context("no pseudo-terminal")?;
        grantpt(&ours)?;
        unlockpt(&ours)?;
        let name = ptsname(&ours, Vec::new())?;
        tcsetwinsize(&ours, Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 })?;
        let open = || {
            std::fs::File::options().read(true).write(true).open(name.to_string_lossy().as_ref())
        };
        let child = Command::new(godwit.program())
            .args(arguments)
            .stdin(open()?)
            .stdout(open()?)
            .stderr(open()?)
            .spawn()
            .context("cannot start godwit")?;
        let mut ours = std::fs::File::from(ours);
        let written = std::thread::spawn(move || {
            let (mut all, mut piece) = (Vec::new(), [0; 4096]);
            loop {
                match ours.read(&mut piece) {
                    // When the last of the other side has gone, reading fails (EIO).
                    Ok(0) => break,
                    Ok(count) => all.extend_from_slice(&piece[..count]),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            String::from_utf8_lossy(&all).into_owned()
        });
        Ok(Self { child, columns: columns.into(), written })
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn run(godwit: &Godwit, columns: u16, arguments: &[&str]) -> anyhow::Result<Screen> {
        Self::start(godwit, columns, arguments)?.wait()
    }

    /// Waits for the end. Commands that could go on for ever are given an end by their caller.
    ///
    /// # Errors
    /// When the command cannot be waited for.
    pub fn wait(mut self) -> anyhow::Result<Screen> {
        let status = self.child.wait()?;
        let text = self.written.join().ok().context("the reader of the terminal panicked")?;
        Ok(Screen { status, text, columns: self.columns })
    }
}

impl Screen {
    /// The lines as they were last seen: of a line that was rewritten, its last version.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let last = |line: &str| {
            let line = line.trim_end_matches('\r');
            line.rsplit('\r').next().unwrap_or_default().replace("\x1b[K", "")
        };
        self.text.split('\n').map(last).collect()
    }

    /// How often a line was rewritten.
    #[must_use]
    pub fn rewritten(&self) -> usize {
        self.text.matches("\r\x1b[K").count()
    }

    /// Checks that no version of any line is wider than the terminal.
    ///
    /// # Errors
    /// The first that is.
    pub fn check_fits(&self) -> anyhow::Result<()> {
        for line in self.text.split(['\n', '\r']) {
            let width = line.replace("\x1b[K", "").chars().count();
            ensure!(width <= self.columns, "{width} columns: {line:?}");
        }
        Ok(())
    }

    /// Checks that all of `words` were shown, whatever the line breaks.
    ///
    /// # Errors
    /// The first that was not.
    pub fn check_says(&self, words: &[&str]) -> anyhow::Result<()> {
        let flat = self.lines().join(" ");
        let flat: Vec<&str> = flat.split_whitespace().collect();
        let flat = flat.join(" ");
        for word in words {
            ensure!(flat.contains(word), "'{word}' is not in: {flat}");
        }
        Ok(())
    }
}
