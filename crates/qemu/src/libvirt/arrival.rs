//! A domain on its way: a pipe that libvirt restores it from, and the QEMU at the other end.
//!
//! ```text
//!   libvirt   reads the beginning of the image, starts QEMU, hands it the pipe, waits
//!   QEMU      reads the first eight bytes of its stream, waits for more
//!             guest memory is written from outside
//!   QEMU      reads the device state, is paused
//!   libvirt   says that the domain is restored
//! ```
//!
//! Those eight bytes are the same in every stream, and are written at once: when they have been
//! read, QEMU has made its machine, and nothing of it writes to guest memory any more.
//!
//! Invariant: when this process ends, whenever that is, the pipe ends, and QEMU with it, unless all
//! of the state was written.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use godwit_engine::Interrupt;
use godwit_libvirt::{Connection, LibvirtError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::io::ioctl_fionread;

use super::image;
use crate::QemuError;
use crate::device_state::HEADER;
use crate::mark::{Mark, leftovers};
use crate::monitor::{STEP, is_qemu_of};
use crate::process::{Descriptor, descriptors};
use crate::run_directory;

/// For libvirt to start the domain: the first start on a host takes it ten seconds, and the source
/// waits for a minute.
const START_LIMIT: Duration = Duration::from_secs(45);
/// For libvirt to clear away what it does not need any more.
const END_LIMIT: Duration = Duration::from_secs(20);
/// One write of device state without progress.
const WRITE_LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

fn system(step: &'static str) -> impl FnOnce(io::Error) -> QemuError {
    move |source| QemuError::System { step, source }
}

/// A named pipe, which goes with this.
#[derive(Debug)]
struct Pipe {
    path: PathBuf,
    /// Opened for reading as well, so that neither side's first open waits for the other's.
    held: Option<File>,
    writer: Option<File>,
}

impl Pipe {
    fn make(uuid: &str) -> Result<Self, QemuError> {
        let directory = run_directory::path();
        let user = rustix::process::getuid().as_raw();
        run_directory::make(&directory, user)
            .map_err(|why| system("making a pipe")(io::Error::other(why)))?;
        let path = directory.join(format!("{}-{uuid}.pipe", Mark::own()));
        let _ = std::fs::remove_file(&path);
        mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
            .map_err(|errno| system("making a pipe")(errno.into()))?;
        let mut pipe = Self { path, held: None, writer: None };
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut options = OpenOptions::new();
        let held = options.read(true).write(true).custom_flags(flags).open(&pipe.path);
        pipe.held = Some(held.map_err(system("opening a pipe"))?);
        let mut options = OpenOptions::new();
        let writer = options.write(true).custom_flags(flags).open(&pipe.path);
        pipe.writer = Some(writer.map_err(system("opening a pipe"))?);
        Ok(pipe)
    }

    /// Writes what it takes of `bytes` now.
    fn write(&mut self, bytes: &[u8]) -> Result<usize, QemuError> {
        match self.writer.as_mut().map(|writer| writer.write(bytes)) {
            Some(Ok(count)) => Ok(count),
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Some(Err(error)) => Err(system("writing to a pipe")(error)),
            None => Err(system("writing to a pipe")(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Whether all that was written was read.
    fn is_empty(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| ioctl_fionread(writer).is_ok_and(|n| n == 0))
    }

    /// The QEMU of the domain `uuid` that has it open.
    fn reader(&self, uuid: &str) -> Option<i32> {
        let own = std::fs::metadata(&self.path).ok()?;
        let is_own = |descriptor: Descriptor| {
            let meta = descriptor.metadata();
            meta.is_ok_and(|meta| (meta.dev(), meta.ino()) == (own.dev(), own.ino()))
        };
        let processes = std::fs::read_dir("/proc").ok()?.flatten();
        let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers
            .filter(|pid| is_qemu_of(*pid, uuid))
            .find(|pid| descriptors(*pid).is_ok_and(|mut open| open.any(is_own)))
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Removes the pipes of godwits that are gone, and lets go of a libvirt that waits for the other
/// end of one.
pub(super) fn clear() {
    let directory = run_directory::path();
    if run_directory::check(&directory, rustix::process::getuid().as_raw()).is_err() {
        return;
    }
    for (pipe, _) in leftovers(&directory, ".pipe") {
        unblock(&pipe);
        let _ = std::fs::remove_file(pipe);
    }
}

/// A domain that libvirt restores.
#[derive(Debug)]
pub(super) struct Arrival {
    pipe: Pipe,
    restored: Receiver<Result<(), LibvirtError>>,
    /// What came of it.
    outcome: Option<Result<(), LibvirtError>>,
}

impl Arrival {
    /// Has libvirt start the domain with this description; returns when its QEMU waits for device
    /// state, with its process.
    ///
    /// # Errors
    /// Why libvirt does not, in its words. Nothing of it is left then.
    pub(super) fn start(
        host: &Connection,
        (xml, uuid): (&str, &str),
        interrupt: &Interrupt,
    ) -> Result<(Self, i32), QemuError> {
        let mut arrival = Self::begin(host, uuid)?;
        let begun = arrival.await_qemu(xml, uuid, interrupt);
        match begun {
            Ok(pid) => Ok((arrival, pid)),
            Err(error) => {
                arrival.end();
                Err(error)
            }
        }
    }

    fn begin(host: &Connection, uuid: &str) -> Result<Self, QemuError> {
        let pipe = Pipe::make(uuid)?;
        let (done, restored) = channel();
        // Over a connection of its own: where two threads call over one, libvirt 9.0 may not notice
        // the second's call before its next keepalive, five seconds later (virNetClientIOWakeup,
        // which may quit a loop that is about to begin).
        let (uri, path) = (host.uri().to_owned(), pipe.path.clone());
        let restore = move || Connection::open(&uri).and_then(|host| host.restore_paused(&path));
        let restore = move || drop(done.send(restore()));
        let thread = std::thread::Builder::new().name("restore".to_owned()).spawn(restore);
        thread.map_err(system("starting a thread"))?;
        Ok(Self { pipe, restored, outcome: None })
    }

    fn await_qemu(
        &mut self,
        xml: &str,
        uuid: &str,
        interrupt: &Interrupt,
    ) -> Result<i32, QemuError> {
        let too_long = || QemuError::Domain("its description is too long".to_owned());
        let mut image = image::beginning(xml).ok_or_else(too_long)?;
        image.extend(HEADER);
        let mut rest = image.as_slice();
        let until = Instant::now() + START_LIMIT;
        loop {
            rest = &rest[self.pipe.write(rest)?..];
            if let Some(outcome) = self.try_outcome() {
                // It cannot be done: of the state it has nothing yet.
                let words =
                    outcome.err().map_or_else(|| "it ended early".to_owned(), |e| e.words());
                return Err(QemuError::Domain(format!(
                    "libvirt here cannot start the domain: {words}"
                )));
            }
            let read = rest.is_empty() && self.pipe.is_empty();
            if let Some(pid) = self.pipe.reader(uuid).filter(|_| read) {
                self.pipe.held = None;
                return Ok(pid);
            }
            if interrupt.is_raised() {
                return Err(QemuError::Domain("nobody waits for the domain any more".to_owned()));
            }
            if Instant::now() >= until {
                return Err(QemuError::Domain(format!(
                    "libvirt here did not start the domain within {} s: look at its log",
                    START_LIMIT.as_secs()
                )));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn try_outcome(&mut self) -> Option<Result<(), LibvirtError>> {
        match self.restored.try_recv() {
            Ok(outcome) => self.outcome = Some(outcome),
            Err(TryRecvError::Disconnected | TryRecvError::Empty) => {}
        }
        self.outcome.clone()
    }

    /// Where the device state is written to, once.
    pub(super) fn sink(&mut self, interrupt: &Interrupt) -> Option<StateSink> {
        let pipe = self.pipe.writer.take()?;
        Some(StateSink { pipe, interrupt: interrupt.clone(), written: 0 })
    }

    /// Waits until libvirt has the domain, all of whose state was written.
    ///
    /// # Errors
    /// Why it has not.
    pub(super) fn finish(
        &mut self,
        interrupt: &Interrupt,
        limit: Duration,
    ) -> Result<(), QemuError> {
        let failed = |words: String| QemuError::State { action: "load", words };
        let until = Instant::now() + limit;
        while self.outcome.is_none() {
            match self.restored.recv_timeout(STEP) {
                Ok(outcome) => self.outcome = Some(outcome),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(failed("nobody asked libvirt to restore it".to_owned()));
                }
                Err(RecvTimeoutError::Timeout) if interrupt.is_raised() => {
                    return Err(failed("it was not waited for any longer".to_owned()));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= until => {
                    return Err(failed(format!("libvirt took more than {} s", limit.as_secs())));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        match &self.outcome {
            Some(Err(error)) => Err(failed(error.words())),
            _ => Ok(()),
        }
    }

    /// Ends a domain that has not all of its state, and waits until libvirt has cleared it away.
    pub(super) fn end(&mut self) {
        (self.pipe.held, self.pipe.writer) = (None, None);
        // A libvirt that has not opened it yet waits for a writer.
        let until = Instant::now() + END_LIMIT;
        while self.outcome.is_none() && Instant::now() < until {
            match self.restored.recv_timeout(STEP) {
                Ok(outcome) => self.outcome = Some(outcome),
                Err(RecvTimeoutError::Timeout) => unblock(&self.pipe.path),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// Lets go of whoever waits for a writer of the pipe at `path`.
fn unblock(path: &Path) {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    drop(OpenOptions::new().write(true).custom_flags(flags).open(path));
}

/// Takes a migration's stream, of which QEMU has the first bytes.
pub(super) struct StateSink {
    pipe: File,
    interrupt: Interrupt,
    /// Bytes of the stream so far, those that QEMU has among them.
    written: usize,
}

impl Write for StateSink {
    /// A QEMU that reads nothing is waited for as long as [`WRITE_LIMIT`], or until nobody waits.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(known) = HEADER.get(self.written..).filter(|known| !known.is_empty()) {
            let count = known.len().min(bytes.len());
            if known[..count] != bytes[..count] {
                let what = "the source's device state does not begin as a migration does";
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            self.written += count;
            return Ok(count);
        }
        let began = Instant::now();
        loop {
            match self.pipe.write(bytes) {
                Ok(count) => {
                    self.written += count;
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.interrupt.is_raised() || began.elapsed() >= WRITE_LIMIT {
                        return Err(error);
                    }
                    let step = i64::from(STEP.subsec_nanos());
                    let mut fds = [PollFd::from_borrowed_fd(self.pipe.as_fd(), PollFlags::OUT)];
                    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: step }));
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn the_first_bytes_are_written_once_however_they_come() {
        let (reader, writer) = io::pipe().unwrap();
        let pipe = File::from(std::os::fd::OwnedFd::from(writer));
        let mut sink = StateSink { pipe, interrupt: Interrupt::default(), written: 0 };
        for piece in [&b"QEV"[..], b"M\0\0\0\x03\x07", b"rest"] {
            sink.write_all(piece).unwrap();
        }
        drop(sink);
        let mut reader = File::from(std::os::fd::OwnedFd::from(reader));
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"\x07rest");
    }

    #[test]
    fn another_version_of_the_stream_is_refused() {
        let (_reader, writer) = io::pipe().unwrap();
        let pipe = File::from(std::os::fd::OwnedFd::from(writer));
        let mut sink = StateSink { pipe, interrupt: Interrupt::default(), written: 0 };
        assert!(sink.write_all(b"QEVM\0\0\0\x04").is_err());
    }
}
