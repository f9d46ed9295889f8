//! A place for a QEMU that godwit starts: where the paths of another machine are mapped to.
//!
//! Keeps one promise: what was started for it ends with it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_stamp::heartbeat::Heartbeat;
use serde_json::Value;

use crate::godwit::Running;
use crate::leftovers::{Place, end_qemus};

/// Where a started QEMU has its sockets and its pid file.
#[derive(Debug)]
pub struct Room {
    place: Place,
}

impl Room {
    /// An empty one.
    ///
    /// # Errors
    /// When no directory can be made.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self { place: Place::new()? })
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.place.dir()
    }

    /// What to give `--map`, so that what lies beside `path` lies here.
    #[must_use]
    pub fn instead_of(&self, path: &Path) -> String {
        let from = path.parent().unwrap_or(path);
        format!("{}={}", from.display(), self.dir().display())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        end_qemus(self.dir());
    }
}

/// A QEMU that godwit has started.
#[derive(Clone, Debug)]
pub struct StartedVm {
    /// Its process.
    pub pid: i32,
    /// The monitor that godwit has given it.
    pub monitor: PathBuf,
    /// What it has written.
    pub log: PathBuf,
}

impl StartedVm {
    /// The one that `receive` tells of.
    ///
    /// # Errors
    /// When it starts none within `limit`.
    pub fn of(receive: &Running, limit: Duration) -> anyhow::Result<Self> {
        let line = receive.wait_for("started", limit, |line| line["event"] == "started")?;
        Self::told(&line)
    }

    /// The one that a line of `receive`'s tells of.
    ///
    /// # Errors
    /// When it tells of none.
    pub fn told(line: &Value) -> anyhow::Result<Self> {
        let text = |key: &str| line[key].as_str().map(PathBuf::from).context("no path is told");
        let pid = line["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.context("no process is told")?;
        Ok(Self { pid, monitor: text("monitor")?, log: text("log")? })
    }

    /// Its name for `--vm`.
    #[must_use]
    pub fn vm_name(&self) -> String {
        format!("qemu:{}", self.monitor.display())
    }

    /// Whether the process runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.starts_with(" Z"))
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    /// When it has not within `limit`.
    pub fn await_end(&self, limit: Duration) -> anyhow::Result<()> {
        let until = Instant::now() + limit;
        while self.is_alive() {
            ensure!(Instant::now() < until, "process {} goes on", self.pid);
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The lines of its guest so far, where its serial line is standard output.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let text = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }

    /// Waits for `count` heartbeats beyond those so far, and returns the numbers of all.
    ///
    /// # Errors
    /// When they do not come within `limit`, or the guest tells of damage.
    pub fn await_beats(&self, count: usize, limit: Duration) -> anyhow::Result<Vec<u64>> {
        let until = Instant::now() + limit;
        let beats = || -> Vec<u64> {
            let lines = self.lines();
            lines.iter().filter_map(|line| Some(line.parse::<Heartbeat>().ok()?.n)).collect()
        };
        let wanted = beats().len() + count;
        while beats().len() < wanted {
            ensure!(Instant::now() < until, "no {count} heartbeats in {:?}", self.lines().last());
            std::thread::sleep(Duration::from_millis(20));
        }
        let bugs: Vec<String> =
            self.lines().into_iter().filter(|line| line.contains("BUG")).collect();
        ensure!(bugs.is_empty(), "{bugs:?}");
        Ok(beats())
    }
}
