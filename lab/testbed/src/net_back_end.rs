//! A network card of a virtual machine in a process of its own: `vhost-user-tap` behind
//! vhost-user-net.
//!
//! Keeps one promise: the process goes with its value.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::godwit::built;
use crate::leftovers::Place;

const PROGRAM: &str = "vhost-user-tap";
const START_LIMIT: Duration = Duration::from_secs(30);

/// A process that carries frames between the card of one QEMU and a tap.
#[derive(Debug)]
pub struct NetBackEnd {
    child: Child,
    place: Place,
}

impl NetBackEnd {
    /// One for the tap `port` of the network namespace at `namespace`.
    pub(crate) fn start(namespace: &Path, port: &str) -> anyhow::Result<Self> {
        let program = built(PROGRAM, "cargo build --package godwit-testbed --bins")?;
        let place = Place::new()?;
        let child = Command::new(&program)
            .args([&socket(&place), namespace])
            .arg(port)
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut back_end = Self { child, place };
        let until = Instant::now() + START_LIMIT;
        while !socket(&back_end.place).exists() {
            if let Some(status) = back_end.child.try_wait()? {
                bail!("{PROGRAM} ended: {status}");
            }
            ensure!(Instant::now() < until, "{PROGRAM} does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(back_end)
    }

    /// Its process, as `godwit plan` names it.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{PROGRAM} {} (vhost-user-net 'net')", self.child.id())
    }

    /// What QEMU is told so that its netdev `net` is served by it.
    pub(crate) fn arguments(&self) -> [String; 4] {
        let chardev = format!("socket,id=char-net,path={}", socket(&self.place).display());
        ["-chardev", &chardev, "-netdev", "vhost-user,id=net,chardev=char-net"].map(str::to_owned)
    }
}

fn socket(place: &Place) -> PathBuf {
    place.file("net")
}

impl Drop for NetBackEnd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
