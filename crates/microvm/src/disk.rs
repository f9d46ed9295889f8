//! The disk: a virtio block device on virtio-mmio (virtio 1.2, sections 4.2 and 5.2), on a raw image file.
//!
//! A request is carried out while the guest's write to the notify register waits. So a stopped guest has no request
//! in flight, nothing lands later, and the state is the registers. The price is a vCPU that waits for its disk, which a
//! reference machine can pay.
//!
//! Keeps one promise: nothing in guest memory makes it leave the image, allocate by the guest's word, or go on for
//! ever. A queue that makes no sense sets DEVICE_NEEDS_RESET, as the standard asks.

mod marks;
mod moving;
mod pace;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use godwit_block::{Disk as MovingDisk, DiskRound, DiskSink, Writes};
use godwit_units::{ByteCount, Rate};
use rustix::fs::FlockOperation;

use crate::boot_block::DISK_MMIO;
use crate::ram::GuestRam;
use crate::{MicrovmError, StateError};

/// Registers and configuration space.
pub(crate) const MMIO: std::ops::Range<u64> = DISK_MMIO..DISK_MMIO + 0x1000;
const SECTOR: u64 = 512;
const QUEUE_MAX: u32 = 256;
/// Bytes of one descriptor: guests that use pages stay far below.
const LONGEST: u32 = 4 << 20;
const NEEDS_RESET: u32 = 64;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
/// VIRTIO_F_VERSION_1 is bit 0 of the second word; VIRTIO_BLK_F_FLUSH bit 9 of the first.
const FEATURES: [u32; 2] = [1 << 9, 1];
const NEXT: u16 = 1;
const DEVICE_WRITES: u16 = 2;
const STATE_WORDS: usize = 15;

/// What both sides of a migration call it.
pub(crate) const NAME: &str = "disk";

/// The device.
#[derive(Debug)]
pub(crate) struct Disk {
    image: Arc<File>,
    path: PathBuf,
    sectors: u64,
    registers: Mutex<Registers>,
    /// What the guest writes while the disk moves.
    marks: Arc<marks::Marks>,
    pace: pace::Pace,
    /// Bytes and requests that the guest has written.
    written: AtomicU64,
    requests: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Registers {
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: [u32; 2],
    queue_select: u32,
    queue_size: u32,
    queue_ready: u32,
    /// Descriptors, driver's ring, device's ring.
    queue: [u64; 3],
    interrupt: u32,
    next_available: u16,
    next_used: u16,
}

/// Why a request could not even be answered.
struct Nonsense;

impl Disk {
    /// A disk on the raw image at `path`.
    ///
    /// # Errors
    /// When it cannot be opened or is no whole number of sectors.
    pub(crate) fn open(path: &Path) -> Result<Self, MicrovmError> {
        let problem = |problem: String| MicrovmError::Disk { path: path.to_owned(), problem };
        let image = File::options().read(true).write(true).open(path);
        let image = image.map_err(|error| problem(format!("cannot be opened for writing: {error}")))?;
        let length = image.metadata().map_err(|error| problem(error.to_string()))?.len();
        if length == 0 || length % SECTOR != 0 {
            let cure = "make one with `truncate -s 64M FILE`";
            return Err(problem(format!("has {length} bytes, which are no sectors of {SECTOR}: {cure}")));
        }
        // Whoever has an image open shares it, since a guest may move to another machine with the same storage; whoever takes a copy
        // of a disk in has it for itself. So a disk is never copied onto itself.
        if matches!(flock(&image, FlockOperation::NonBlockingLockShared), Err(rustix::io::Errno::WOULDBLOCK))
        {
            return Err(problem("is being filled by another machine: wait for that to end".to_owned()));
        }
        Ok(Self {
            image: Arc::new(image),
            path: path.to_owned(),
            sectors: length / SECTOR,
            registers: Mutex::default(),
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

    /// Takes the contents of another disk in, of the same size, while no other machine has the image open.
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
            problem(
                "is open in another machine, perhaps the source itself: give this machine an image of its own, or leave out --disks where both sides share storage".to_owned(),
            )
        })
        .map(|sink| Box::new(sink) as Box<dyn DiskSink>)
    }

    /// Brings what was written to the image where another host with the same storage finds it.
    pub(crate) fn flush(&self) -> Result<(), MicrovmError> {
        self.image.sync_data().map_err(crate::error::system("flush the disk image"))
    }

    /// The guest reads the register at `offset`.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        let registers = self.registers.lock().unwrap_or_else(PoisonError::into_inner);
        let value = match offset {
            0x00 => 0x7472_6976,
            0x04 | 0x08 => 2,
            0x0c => 0x5457_4447,
            0x10 => FEATURES.get(registers.device_features_select as usize).copied().unwrap_or(0),
            0x34 if registers.queue_select == 0 => QUEUE_MAX,
            0x44 if registers.queue_select == 0 => registers.queue_ready,
            0x60 => registers.interrupt,
            0x70 => registers.status,
            0x100 => self.sectors as u32,
            0x104 => (self.sectors >> 32) as u32,
            _ => 0,
        };
        for (to, from) in bytes.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    /// The guest writes the register at `offset`; requests are carried out before this returns.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8], ram: &GuestRam) {
        let Ok(bytes) = <[u8; 4]>::try_from(bytes) else { return };
        let value = u32::from_le_bytes(bytes);
        let mut registers = self.registers.lock().unwrap_or_else(PoisonError::into_inner);
        let registers = &mut *registers;
        match offset {
            0x14 => registers.device_features_select = value,
            0x20 => {
                let select = registers.driver_features_select as usize;
                if let Some(word) = registers.driver_features.get_mut(select) {
                    *word = value;
                }
            }
            0x24 => registers.driver_features_select = value,
            0x30 => registers.queue_select = value,
            0x38 if value.is_power_of_two() && value <= QUEUE_MAX => registers.queue_size = value,
            0x44 => registers.queue_ready = value & 1,
            0x50 if value == 0 => self.work(registers, ram),
            0x64 => registers.interrupt &= !value,
            0x70 => {
                let offers = |select: usize| registers.driver_features[select] & !FEATURES[select] == 0;
                let accepted = offers(0) && offers(1) && registers.driver_features[1] & 1 != 0;
                match value {
                    0 => *registers = Registers::default(),
                    _ if value & FEATURES_OK != 0 && !accepted => registers.status = value & !FEATURES_OK,
                    _ => registers.status = value,
                }
            }
            0x80..=0xa4 => {
                let (part, high) = ((offset - 0x80) / 16, offset & 4 != 0);
                if let (Some(address), 0 | 4) = (registers.queue.get_mut(part as usize), offset & 15) {
                    let (shift, keep) = if high { (32, 0xffff_ffff) } else { (0, !0xffff_ffff) };
                    *address = *address & keep | u64::from(value) << shift;
                }
            }
            _ => {}
        }
    }

    fn work(&self, registers: &mut Registers, ram: &GuestRam) {
        if registers.status & DRIVER_OK == 0 || registers.queue_ready == 0 || registers.queue_size == 0 {
            return;
        }
        if self.requests(registers, ram).is_err() {
            registers.status |= NEEDS_RESET;
        }
    }

    fn requests(&self, registers: &mut Registers, ram: &GuestRam) -> Result<(), Nonsense> {
        let [descriptors, driver, device] = registers.queue;
        let size = registers.queue_size as u16;
        // What another vCPU adds meanwhile comes with a notification of its own.
        let available = u16_at(ram, driver.wrapping_add(2))?;
        if available.wrapping_sub(registers.next_available) > size {
            return Err(Nonsense);
        }
        while registers.next_available != available {
            let slot = u64::from(registers.next_available % size);
            let head = u16_at(ram, driver.wrapping_add(4 + 2 * slot))?;
            let written = self.request(descriptors, head, size, ram)?;
            let mut entry = [0; 8];
            entry[..4].copy_from_slice(&u32::from(head).to_le_bytes());
            entry[4..].copy_from_slice(&written.to_le_bytes());
            let slot = u64::from(registers.next_used % size);
            ram.write(device.wrapping_add(4 + 8 * slot), &entry).ok_or(Nonsense)?;
            registers.next_available = registers.next_available.wrapping_add(1);
            registers.next_used = registers.next_used.wrapping_add(1);
            // The index after the entry; x86 keeps stores in order (SDM volume 3, 10.2.2).
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            ram.write(device.wrapping_add(2), &registers.next_used.to_le_bytes()).ok_or(Nonsense)?;
            registers.interrupt |= 1;
        }
        Ok(())
    }

    /// Carries out one request: header, data, status. Returns how many bytes it wrote.
    fn request(&self, descriptors: u64, head: u16, size: u16, ram: &GuestRam) -> Result<u32, Nonsense> {
        let mut chain = Vec::new();
        let mut next = Some(head);
        while let Some(index) = next {
            if index >= size || chain.len() >= usize::from(size) {
                return Err(Nonsense);
            }
            let mut bytes = [0; 16];
            ram.read(descriptors.wrapping_add(16 * u64::from(index)), &mut bytes).ok_or(Nonsense)?;
            let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
            let address = bytes[..8].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
            let len = u32::from(half(8)) | u32::from(half(10)) << 16;
            let flags = half(12);
            chain.push((address, len, flags & DEVICE_WRITES != 0));
            next = (flags & NEXT != 0).then(|| half(14));
        }
        let ([(header, 16.., false), data @ ..], Some((status_at, 1.., true))) = (&chain[..], chain.last())
        else {
            return Err(Nonsense);
        };
        let data = &data[..data.len().saturating_sub(1)];
        let mut bytes = [0; 16];
        ram.read(*header, &mut bytes).ok_or(Nonsense)?;
        let kind = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let sector = bytes[8..].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        let (status, written) = match self.transfer(kind, sector, data, ram) {
            Ok(written) => (0_u8, written),
            Err(status) => (status, 0),
        };
        ram.write(*status_at, &[status]).ok_or(Nonsense)?;
        Ok(written + 1)
    }

    /// Returns how many bytes of guest memory were written, or the status to answer.
    fn transfer(&self, kind: u32, sector: u64, data: &[(u64, u32, bool)], ram: &GuestRam) -> Result<u32, u8> {
        const IO_ERROR: u8 = 1;
        const UNSUPPORTED: u8 = 2;
        let (reads, mut written) = (kind == 0, 0);
        match kind {
            0 | 1 => {}
            4 => return self.image.sync_data().map(|()| 0).map_err(|_| IO_ERROR),
            _ => return Err(UNSUPPORTED),
        }
        let mut at = sector.checked_mul(SECTOR).ok_or(IO_ERROR)?;
        for &(address, len, device_writes) in data {
            let end = at.checked_add(len.into()).ok_or(IO_ERROR)?;
            if len > LONGEST || device_writes != reads || end > self.sectors * SECTOR {
                return Err(IO_ERROR);
            }
            let mut bytes = vec![0; len as usize];
            if reads {
                self.image.read_exact_at(&mut bytes, at).map_err(|_| IO_ERROR)?;
                ram.write(address, &bytes).ok_or(IO_ERROR)?;
                written += len;
            } else {
                ram.read(address, &mut bytes).ok_or(IO_ERROR)?;
                let result = self.image.write_all_at(&bytes, at);
                // After the data has landed, and before the guest is told: a round that reads the block in between reads it again. What
                // failed may have landed in part.
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

    /// The registers and the size, to move.
    pub(crate) fn save(&self) -> Vec<u8> {
        let r = *self.registers.lock().unwrap_or_else(PoisonError::into_inner);
        let words: [u64; STATE_WORDS] = [
            self.sectors,
            r.status.into(),
            r.device_features_select.into(),
            r.driver_features_select.into(),
            r.driver_features[0].into(),
            r.driver_features[1].into(),
            r.queue_select.into(),
            r.queue_size.into(),
            r.queue_ready.into(),
            r.queue[0],
            r.queue[1],
            r.queue[2],
            r.interrupt.into(),
            r.next_available.into(),
            r.next_used.into(),
        ];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Takes over saved registers.
    pub(crate) fn load(&self, bytes: &[u8]) -> Result<(), StateError> {
        if bytes.len() != STATE_WORDS * 8 {
            return Err(StateError::Malformed(format!("the disk's state has {} bytes", bytes.len())));
        }
        let mut words = [0_u64; STATE_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            *word = bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        }
        let [sectors, rest @ ..] = words;
        if sectors != self.sectors {
            return Err(StateError::Misfit(format!(
                "the disk has {sectors} sectors at the source and {} here: both sides must open the same image",
                self.sectors
            )));
        }
        let size = rest[6];
        if size > u64::from(QUEUE_MAX) || (size != 0 && !size.is_power_of_two()) {
            return Err(StateError::Malformed(format!("a queue of {size}")));
        }
        *self.registers.lock().unwrap_or_else(PoisonError::into_inner) = Registers {
            status: rest[0] as u32,
            device_features_select: rest[1] as u32,
            driver_features_select: rest[2] as u32,
            driver_features: [rest[3] as u32, rest[4] as u32],
            queue_select: rest[5] as u32,
            queue_size: size as u32,
            queue_ready: rest[7] as u32,
            queue: [rest[8], rest[9], rest[10]],
            interrupt: rest[11] as u32,
            next_available: rest[12] as u16,
            next_used: rest[13] as u16,
        };
        Ok(())
    }
}

/// Locks for as long as the file is open (flock(2)). Where that is not to be had, nobody is kept out.
fn flock(image: &File, operation: FlockOperation) -> rustix::io::Result<()> {
    rustix::fs::flock(image, operation)
}

fn u16_at(ram: &GuestRam, gpa: u64) -> Result<u16, Nonsense> {
    let mut bytes = [0; 2];
    ram.read(gpa, &mut bytes).ok_or(Nonsense)?;
    Ok(u16::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests;
