//! The disk: a virtio block device on virtio-mmio (virtio 1.2, sections 4.2 and 5.2), on a raw
//! image file.
//!
//! A request is carried out while the guest's write to the notify register waits. So a stopped
//! guest has no request in flight, nothing lands later, and the state is the registers. The price
//! is a vCPU that waits for its disk, which a reference machine can pay.
//!
//! Keeps one promise: nothing in guest memory makes it leave the image, allocate by the guest's
//! word, or go on for ever. A queue that makes no sense sets DEVICE_NEEDS_RESET, as the standard
//! asks.

mod marks;
mod moving;
mod pace;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use godwit_disk::{Disk as MovingDisk, DiskReader, DiskRound, DiskSink, Writes};
use godwit_units::{ByteCount, Rate};
use godwit_virtio::{Effect, InvalidRing, Piece, Transport};
use rustix::fs::FlockOperation;

use crate::ram::GuestRam;
use crate::{MicrovmError, StateError};

const SECTOR: u64 = 512;
/// Bytes of one descriptor: guests that use pages stay far below.
const LONGEST: u32 = 4 << 20;
/// A block device (virtio 1.2, 5.2.1), and VIRTIO_BLK_F_FLUSH.
const BLOCK_DEVICE: u32 = 2;
const FLUSH: u64 = 1 << 9;

/// What both sides of a migration call it.
pub(crate) const NAME: &str = "disk";

/// The device.
#[derive(Debug)]
pub(crate) struct Disk {
    image: Arc<File>,
    path: PathBuf,
    sectors: u64,
    transport: Mutex<Transport>,
    /// What the guest writes while the disk moves.
    marks: Arc<marks::Marks>,
    pace: pace::Pace,
    /// Bytes and requests that the guest has written.
    written: AtomicU64,
    requests: AtomicU64,
}

impl Disk {
    /// A disk on the raw image at `path`.
    ///
    /// # Errors
    /// When it cannot be opened or is no whole number of sectors.
    pub(crate) fn open(path: &Path) -> Result<Self, MicrovmError> {
        let problem = |problem: String| MicrovmError::Disk { path: path.to_owned(), problem };
        let image = File::options().read(true).write(true).open(path);
        let image =
            image.map_err(|error| problem(format!("cannot be opened for writing: {error}")))?;
        let length = image.metadata().map_err(|error| problem(error.to_string()))?.len();
        if length == 0 || length % SECTOR != 0 {
            let cure = "make one with `truncate -s 64M FILE`";
            return Err(problem(format!(
                "has {length} bytes, which are no sectors of {SECTOR}: {cure}"
            )));
        }
        // Whoever has an image open shares it, since a guest may move to another machine with the
        // same storage; whoever takes a copy of a disk in has it for itself. So a disk is never
        // copied onto itself.
        if matches!(
            flock(&image, FlockOperation::NonBlockingLockShared),
            Err(rustix::io::Errno::WOULDBLOCK)
        ) {
            return Err(problem(
                "is being filled by another machine: wait for that to end".to_owned(),
            ));
        }
        Ok(Self {
            image: Arc::new(image),
            path: path.to_owned(),
            sectors: length / SECTOR,
            transport: Mutex::new(Transport::new(BLOCK_DEVICE, FLUSH, 1)),
            marks: Arc::default(),
            pace: pace::Pace::default(),
            written: AtomicU64::new(0),
            requests: AtomicU64::new(0),
        })
    }

    /// The disk as it moves along.
    pub(crate) fn moving(&self) -> MovingDisk {
        MovingDisk { name: NAME.to_owned(), size: ByteCount(self.sectors * SECTOR) }
    }

    /// What the guest has written since the image was opened.
    pub(crate) fn writes(&self) -> Writes {
        let bytes = ByteCount(self.written.load(Ordering::Relaxed));
        Writes { bytes, operations: self.requests.load(Ordering::Relaxed) }
    }

    /// Limits what the guest may write; `None` lifts the limit, for a request that waits as well.
    pub(crate) fn limit(&self, rate: Option<Rate>) {
        self.pace.set(rate);
    }

    /// Marks what the guest writes, in blocks of `granularity`. The first pass begins at once.
    pub(crate) fn track(&self, granularity: ByteCount) {
        self.marks.start(self.moving().size, granularity);
    }

    /// Marks nothing any more.
    pub(crate) fn untrack(&self) {
        self.marks.stop();
    }

    /// The next round, if writes are marked.
    pub(crate) fn round(&self) -> Option<Box<dyn DiskRound>> {
        let pass = self.marks.begin()?;
        Some(Box::new(moving::ImageRound::new(
            Arc::clone(&self.image),
            self.moving(),
            pass,
            Arc::clone(&self.marks),
        )))
    }

    /// Written since the round began, in whole blocks.
    pub(crate) fn dirty(&self) -> ByteCount {
        self.marks.dirty()
    }

    /// Takes the contents of another disk in, of the same size, while no other machine has the
    /// image open.
    ///
    /// # Errors
    /// When the size is another, or another machine has it open.
    pub(crate) fn fill(&self, wanted: &MovingDisk) -> Result<Box<dyn DiskSink>, MicrovmError> {
        let problem = |problem: String| MicrovmError::Disk { path: self.path.clone(), problem };
        let size = self.moving().size;
        if size != wanted.size {
            return Err(problem(format!(
                "has {size} and the source's has {}: make it anew with `truncate -s {} FILE`",
                wanted.size, wanted.size.0
            )));
        }
        let sink = moving::ImageSink::new(Arc::clone(&self.image), size);
        sink.ok_or_else(|| {
            let words = "is open in another machine, perhaps the source itself: give this machine \
                         an image of its own, or leave out --disks where both sides share storage";
            problem(words.to_owned())
        })
        .map(|sink| Box::new(sink) as Box<dyn DiskSink>)
    }

    /// Reads it as it is now.
    pub(crate) fn reader(&self) -> Box<dyn DiskReader> {
        Box::new(moving::ImageReader::new(Arc::clone(&self.image), self.moving()))
    }

    /// Brings what was written to the image where another host with the same storage finds it.
    pub(crate) fn flush(&self) -> Result<(), MicrovmError> {
        self.image.sync_data().map_err(crate::error::system("flush the disk image"))
    }

    /// The guest reads the register at `offset`.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        let value = match offset {
            0x100 => self.sectors as u32,
            0x104 => (self.sectors >> 32) as u32,
            0x108.. => 0,
            _ => self.transport().read(offset),
        };
        for (to, from) in bytes.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    /// The guest writes the register at `offset`; requests are carried out before this returns.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8], ram: &GuestRam) {
        let Ok(bytes) = <[u8; 4]>::try_from(bytes) else { return };
        let mut transport = self.transport();
        if let Effect::Notified(queue) = transport.write(offset, u32::from_le_bytes(bytes)) {
            transport.work(queue, ram.now().devices(), |pieces| self.request(pieces, ram));
        }
    }

    fn transport(&self) -> std::sync::MutexGuard<'_, Transport> {
        self.transport.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out one request: header, data, status. Returns how many bytes it wrote.
    fn request(&self, pieces: &[Piece], ram: &GuestRam) -> Result<u32, InvalidRing> {
        let ([header, data @ ..], Some(last)) = (pieces, pieces.last()) else {
            return Err(InvalidRing);
        };
        if header.len < 16 || header.device_writes || last.len < 1 || !last.device_writes {
            return Err(InvalidRing);
        }
        let data = &data[..data.len().saturating_sub(1)];
        let mut bytes = [0; 16];
        ram.read(header.address.0, &mut bytes).ok_or(InvalidRing)?;
        let kind = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let sector = bytes[8..].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        let (status, written) = match self.transfer(kind, sector, data, ram) {
            Ok(written) => (0_u8, written),
            Err(status) => (status, 0),
        };
        ram.write(last.address.0, &[status]).ok_or(InvalidRing)?;
        Ok(written + 1)
    }

    /// Returns how many bytes of guest memory were written, or the status to answer.
    fn transfer(&self, kind: u32, sector: u64, data: &[Piece], ram: &GuestRam) -> Result<u32, u8> {
        const IO_ERROR: u8 = 1;
        const UNSUPPORTED: u8 = 2;
        let (reads, mut written) = (kind == 0, 0);
        match kind {
            0 | 1 => {}
            4 => return self.image.sync_data().map(|()| 0).map_err(|_| IO_ERROR),
            _ => return Err(UNSUPPORTED),
        }
        let mut at = sector.checked_mul(SECTOR).ok_or(IO_ERROR)?;
        for &Piece { address, len, device_writes } in data {
            let end = at.checked_add(len.into()).ok_or(IO_ERROR)?;
            if len > LONGEST || device_writes != reads || end > self.sectors * SECTOR {
                return Err(IO_ERROR);
            }
            let mut bytes = vec![0; len as usize];
            if reads {
                self.image.read_exact_at(&mut bytes, at).map_err(|_| IO_ERROR)?;
                ram.write(address.0, &bytes).ok_or(IO_ERROR)?;
                written += len;
            } else {
                ram.read(address.0, &mut bytes).ok_or(IO_ERROR)?;
                let result = self.image.write_all_at(&bytes, at);
                // After the data has landed, and before the guest is told: a round that reads the
                // block in between reads it again. What failed may have landed in part.
                self.marks.mark(at, len.into());
                self.written.fetch_add(len.into(), Ordering::Relaxed);
                result.map_err(|_| IO_ERROR)?;
            }
            at = end;
        }
        if !reads {
            self.requests.fetch_add(1, Ordering::Relaxed);
            self.pace.pay(at - sector * SECTOR);
        }
        Ok(written)
    }

    /// The size and the registers, to move.
    pub(crate) fn save(&self) -> Vec<u8> {
        let mut words = vec![self.sectors];
        words.extend(self.transport().save());
        crate::blob::bytes_of(&words)
    }

    /// Takes over saved registers.
    pub(crate) fn load(&self, bytes: &[u8]) -> Result<(), StateError> {
        let words = crate::blob::words_of(bytes).ok_or_else(|| {
            StateError::Malformed(format!("the disk's state has {} bytes", bytes.len()))
        })?;
        let [sectors, registers @ ..] = &words[..] else {
            return Err(StateError::Malformed("the disk's state is empty".to_owned()));
        };
        if *sectors != self.sectors {
            return Err(StateError::Misfit(format!(
                "the disk has {sectors} sectors at the source and {} here: both sides must open \
                 the same image",
                self.sectors
            )));
        }
        self.transport().load(registers).map_err(StateError::from)
    }
}

/// Locks for as long as the file is open (flock(2)). Where that is not to be had, nobody is kept
/// out.
fn flock(image: &File, operation: FlockOperation) -> rustix::io::Result<()> {
    rustix::fs::flock(image, operation)
}

#[cfg(test)]
mod tests;
