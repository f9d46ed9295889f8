//! A disk whose storage can be made to hang, as that of an NFS server which has gone: `qemu-nbd`,
//! stopped by a signal.
//!
//! Keeps one promise: the server ends with its value, and after a killed test with the next sweep.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use godwit_units::ByteCount;
use rustix::process::{Pid, Signal, kill_process};

use crate::disk::DiskImage;
use crate::leftovers::Place;

/// It makes a socket and does nothing else before.
const START_LIMIT: Duration = Duration::from_secs(20);

/// An image behind a server of its own.
#[derive(Debug)]
pub struct RemoteDisk {
    server: Child,
    place: Place,
    /// Goes after the server.
    _image: DiskImage,
}

impl RemoteDisk {
    /// Starts a server for a new, empty image.
    ///
    /// # Errors
    /// When there is no `qemu-nbd`, or it does not come up.
    pub fn start(size: ByteCount) -> anyhow::Result<Self> {
        Self::serve(DiskImage::create("raw", size)?)
    }

    /// The same for an image that there is; it locks it.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn serve(image: DiskImage) -> anyhow::Result<Self> {
        let place = Place::new()?;
        let server = Command::new("qemu-nbd")
            .args(["--persistent", "--format", "raw", "--export-name", "disk", "--socket"])
            .arg(place.file("nbd"))
            .arg("--pid-file")
            .arg(place.pid_file())
            .arg(image.path())
            .stdin(Stdio::null())
            .spawn()
            .context("cannot run qemu-nbd")?;
        let disk = Self { server, place, _image: image };
        let until = Instant::now() + START_LIMIT;
        // It writes its number when it has the image and its lock.
        while !disk.place.pid_file().exists() {
            if Instant::now() >= until {
                bail!("qemu-nbd does not come up");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(disk)
    }

    fn socket(&self) -> PathBuf {
        self.place.file("nbd")
    }

    /// What QEMU is told so that the guest has it as a virtio disk: the block node is called
    /// `name`, the device `name-device`.
    #[must_use]
    pub fn arguments(&self, name: &str) -> Vec<String> {
        let server = format!("server.type=unix,server.path={}", self.socket().display());
        let node = format!("driver=nbd,node-name={name},export=disk,{server}");
        let device = format!("virtio-blk-pci,id={name}-device,drive={name}");
        ["-blockdev", &node, "-device", &device].map(str::to_owned).into()
    }

    /// From now on it answers nothing.
    ///
    /// # Errors
    /// When the server has ended.
    pub fn hang(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)
    }

    /// It answers again, also what it was asked meanwhile.
    ///
    /// # Errors
    /// When the server has ended.
    pub fn answer(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid =
            i32::try_from(self.server.id()).ok().and_then(Pid::from_raw).context("no process")?;
        kill_process(pid, signal).context("qemu-nbd has ended")
    }
}

impl Drop for RemoteDisk {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
