//! The destination's half: disks of the QEMU that waits, written through exports of its own.
//!
//! QEMU opens its images when it starts, and leaves them alone until its guest runs; a writable
//! export is allowed meanwhile (`blk_root_activate` in block/block-backend.c puts the device's
//! claim off until the guest runs). All exports are gone before it does.

use std::collections::VecDeque;

use godwit_disk::{Disk, DiskChoice, DiskError, DiskReader, DiskSink};
use godwit_nbd::{ALLOCATION, Asked, DEPTH, Link, REQUEST_MAX, STRETCH_MAX, Wish, ZERO};
use godwit_units::{ByteCount, PageRun};

use crate::QemuError;
use crate::disks::find::{Drive, Found, drives, receiving};
use crate::disks::leftovers;
use crate::disks::pooled::{Pool, Pooled};
use crate::disks::reader::Reader;
use crate::disks::round::reading;
use crate::disks::server::Server;
use crate::machine::Machine;
use crate::mark::Mark;
use crate::monitor::commands::ExportAdd;
use crate::monitor::{Monitor, QmpError};

/// The exports of the disks that are being received.
#[derive(Debug)]
pub(crate) struct Receiving {
    server: Server,
    disks: Vec<Disk>,
}

impl Receiving {
    /// Opens all of `wanted`. After an error nothing stays behind, and nothing was written.
    pub(crate) fn open(
        machine: &mut Machine,
        wanted: &[Disk],
        allowed: &DiskChoice,
    ) -> Result<(Self, Vec<Box<dyn DiskSink>>), QemuError> {
        let there: Vec<Drive> = drives(&mut *machine.qmp)?;
        let found = receiving(&there, wanted, allowed)?;
        leftovers::check_alone(&mut *machine.qmp)?;
        let server = Server::start(machine)?;
        let described = |disk: &Found| Disk { name: disk.name.clone(), size: disk.size };
        let receiving = Self { server, disks: found.iter().map(described).collect() };
        let opened =
            found.iter().enumerate().map(|(place, disk)| receiving.sink(machine, place, disk));
        match opened.collect::<Result<Vec<_>, _>>() {
            Ok(sinks) => Ok((receiving, sinks)),
            Err(error) => {
                // The error is the news; whatever else fails now follows from it.
                let _ = machine.qmp.uninterrupted(|qmp| receiving.close(qmp));
                Err(error)
            }
        }
    }

    fn sink(
        &self,
        machine: &mut Machine,
        place: usize,
        disk: &Found,
    ) -> Result<Box<dyn DiskSink>, QemuError> {
        let id = format!("{}-{place}", Mark::own());
        match machine.qmp.run(&ExportAdd::writing(&id, &disk.node, &disk.name)) {
            Ok(_) => {}
            Err(QmpError::Refused { description, .. }) => {
                return Err(QemuError::DiskInUse { disk: disk.name.clone(), words: description });
            }
            Err(error) => return Err(error.into()),
        }
        let wish = Wish::new(&disk.name).with_context(ALLOCATION).writable();
        Ok(Box::new(Sink::new(Link::connect(self.server.address(), wish)?, disk.size)))
    }

    /// Reads all disks, each over a connection of its own.
    pub(crate) fn read(&self) -> Result<Vec<Box<dyn DiskReader>>, QemuError> {
        let read = |disk: &Disk| -> Result<Box<dyn DiskReader>, QemuError> {
            let link = Link::connect(self.server.address(), reading(&disk.name))?;
            Ok(Box::new(Reader::new(disk.clone(), Pooled::new(&disk.name, link, &Pool::default()))))
        };
        self.disks.iter().map(read).collect()
    }

    /// Closes all disks.
    pub(crate) fn close(self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        self.server.stop(qmp)
    }
}

/// One disk, behind whichever server.
#[derive(Debug)]
pub(crate) struct Sink {
    link: Link,
    size: u64,
    /// Writes and zeros, the oldest first.
    under_way: VecDeque<Asked>,
}

impl Sink {
    /// One of `size` bytes, over a connection that may write.
    pub(crate) fn new(link: Link, size: ByteCount) -> Self {
        Self { link, size: size.0, under_way: VecDeque::new() }
    }

    /// Makes room for one more request, and for a status beside it.
    fn make_room(&mut self) -> Result<(), QemuError> {
        while self.under_way.len() >= DEPTH - 1 {
            self.take_oldest()?;
        }
        Ok(())
    }

    fn take_oldest(&mut self) -> Result<(), QemuError> {
        match self.under_way.pop_front() {
            Some(asked) => Ok(self.link.take_done(asked)?),
            None => Ok(()),
        }
    }

    /// The bytes of `run`, cut off at the end of the disk.
    fn bytes_of(&self, run: PageRun) -> (u64, u64) {
        let start = run.start.offset().min(self.size);
        (start, run.end().offset().min(self.size))
    }

    /// Zeros that are there already are left as they are: writing them could fill a hole, where the
    /// image does not discard.
    fn zero_bytes(&mut self, start: u64, end: u64) -> Result<(), QemuError> {
        let mut at = start;
        while at < end {
            self.make_room()?;
            let asked = self.link.ask_status(at, (end - at).min(STRETCH_MAX.into()) as u32)?;
            for stretch in self.link.take_status(asked)? {
                at = stretch.offset + stretch.length;
                if stretch.flags & ZERO == 0 {
                    self.make_room()?;
                    let asked = self.link.ask_zeros(stretch.offset, stretch.length as u32)?;
                    self.under_way.push_back(asked);
                }
            }
        }
        Ok(())
    }
}

impl DiskSink for Sink {
    fn write(&mut self, run: PageRun, bytes: &[u8]) -> Result<(), DiskError> {
        let (start, end) = self.bytes_of(run);
        let bytes = bytes.get(..(end - start) as usize).unwrap_or(bytes);
        for (piece, at) in
            bytes.chunks(REQUEST_MAX as usize).zip((start..).step_by(REQUEST_MAX as usize))
        {
            self.make_room()?;
            self.under_way.push_back(self.link.ask_write(at, piece).map_err(QemuError::from)?);
        }
        Ok(())
    }

    fn zero(&mut self, run: PageRun) -> Result<(), DiskError> {
        let (start, end) = self.bytes_of(run);
        Ok(self.zero_bytes(start, end)?)
    }

    fn flush(&mut self, durable: bool) -> Result<(), DiskError> {
        while !self.under_way.is_empty() {
            self.take_oldest()?;
        }
        if durable {
            let asked = self.link.ask_flush().map_err(QemuError::from)?;
            self.link.take_done(asked).map_err(QemuError::from)?;
        }
        Ok(())
    }
}
