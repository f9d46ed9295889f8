//! A disk of a virtual machine in a process of its own: qemu-storage-daemon behind vhost-user-blk.
//!
//! Keeps one promise: the daemon goes with its value. It opens its image without a lock, as one at
//! either end of a migration has it open.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::disk::DiskImage;
use crate::guest::target_dir;
use crate::leftovers::Place;
use crate::qemu_build::QemuBuild;
use crate::skip::skip;

const PROGRAM: &str = "qemu-storage-daemon";
/// Since when QEMU has `reconnect-ms`.
const RECONNECT_MS: (u32, u32, u32) = (9, 2, 0);
const START_LIMIT: Duration = Duration::from_secs(30);

/// A daemon that serves one image to one QEMU.
#[derive(Debug)]
pub struct StorageDaemon {
    child: Child,
    program: PathBuf,
    node: String,
    place: Place,
}

/// That of the same release as `build`; aloud why there is none, for the test `test`.
#[must_use]
pub fn storage_daemon_for(build: &QemuBuild, test: &str) -> Option<PathBuf> {
    let unpacked = target_dir().join("qemu-10.0/root/usr/bin").join(PROGRAM);
    let program = if build.version.0 >= 10 { unpacked } else { PathBuf::from(PROGRAM) };
    if command(&program).arg("--version").output().is_ok_and(|it| it.status.success()) {
        return Some(program);
    }
    skip(test, format!("there is no {PROGRAM} for {build}: run `make qemu`"));
    None
}

fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    if program.is_absolute() {
        let libraries = target_dir().join("qemu-10.0/root/usr/lib/x86_64-linux-gnu");
        command.env("LD_LIBRARY_PATH", libraries);
    }
    command
}

impl StorageDaemon {
    /// One that serves `image`, with more options for how it opens it.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(program: &Path, image: &DiskImage, options: &str) -> anyhow::Result<Self> {
        Self::start_holding(program, image, options, Stdio::null())
    }

    /// The same with `open` as its standard input, which it never looks at.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_holding(
        program: &Path,
        image: &DiskImage,
        options: &str,
        open: Stdio,
    ) -> anyhow::Result<Self> {
        let place = Place::new()?;
        let node = format!(
            "driver=file,node-name=disk,locking=off,filename={}{options}",
            image.path().display()
        );
        let child = Self::spawn(program, &node, &place, open)?;
        let mut daemon = Self { child, program: program.to_owned(), node, place };
        daemon.await_socket()?;
        Ok(daemon)
    }

    fn spawn(program: &Path, node: &str, place: &Place, open: Stdio) -> anyhow::Result<Child> {
        let export = format!(
            "type=vhost-user-blk,id=disk,node-name=disk,writable=on,addr.type=unix,addr.path={}",
            place.file("disk").display()
        );
        command(program)
            .args(["--blockdev", node, "--export", &export])
            .stdin(open)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))
    }

    fn await_socket(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + START_LIMIT;
        while !self.socket().exists() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{PROGRAM} ended: {status}");
            }
            if Instant::now() >= until {
                bail!("{PROGRAM} does not listen");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.place.file("disk")
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// What QEMU is told so that the guest has its disk. QEMU `reconnects` comes back to a daemon
    /// that was gone.
    #[must_use]
    pub fn arguments(&self, reconnects: Option<&QemuBuild>) -> Vec<String> {
        let again = match reconnects.map(|build| build.version) {
            None => "",
            // 11.1 has the first one no more.
            Some(version) if version < RECONNECT_MS => ",reconnect=1",
            Some(_) => ",reconnect-ms=1000",
        };
        let chardev = format!("socket,id=char0,path={}{again}", self.socket().display());
        let device = "vhost-user-blk-pci,id=vb0,chardev=char0";
        ["-chardev", &chardev, "-device", device].map(str::to_owned).into()
    }

    /// Ends it at once, as a crash would, and starts another in its place.
    ///
    /// # Errors
    /// When that does not come up.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.kill();
        let _ = std::fs::remove_file(self.socket());
        self.child = Self::spawn(&self.program, &self.node, &self.place, Stdio::null())?;
        self.await_socket()
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        self.kill();
    }
}
