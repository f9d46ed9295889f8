//! The source's half between rounds: a bitmap a disk that records the guest's writes, another one
//! with each round.
//!
//! ```text
//!   start      bitmap 0 of every disk; the server; an export a disk
//!   round 0    bitmap 0 is cleared: all that is no zero is dirty
//!   progress   bitmap n+1 begins and n ends, in one transaction; of n only the part behind the copy counts
//!   round r    bitmap n+1 begins and n ends, in one transaction for all disks; n is read through an export of its own, and removed
//!              when godwit asks for something else
//!   end        the server, with it all exports; all bitmaps
//! ```
//!
//! A transaction drains all disks first (`qmp_transaction` in blockdev.c), so a write is in one
//! bitmap or in the other, whole, and those of the old one are seen by every read that is asked for
//! afterwards.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use godwit_bitmap::DirtyBitmap;
use godwit_disk::{Disk, DiskReader, DiskRound};
use godwit_nbd::{Client, DEPTH, DIRTY, Link, STRETCH_MAX, Wish, dirty_bitmap};
use godwit_units::{ByteCount, PageCount, PageIndex, PageRun};

use crate::QemuError;
use crate::disks::find::{Found, writes_so_far};
use crate::disks::granularity::Granularity;
use crate::disks::leftovers;
use crate::disks::pooled::{Pool, Pooled};
use crate::disks::reader::Reader;
use crate::disks::round::{Dirty, Round, reading};
use crate::disks::server::Server;
use crate::machine::Machine;
use crate::mark::Mark;
use crate::monitor::commands::{
    BitmapAction, ExportAdd, ExportDel, QueryCapabilities, QueryNodes, Transaction,
};
use crate::monitor::{Monitor, QmpError};

/// An export that ends lets go of its bitmap a moment later.
const BUSY_LIMIT: Duration = Duration::from_secs(5);

/// A disk that is tracked.
#[derive(Debug)]
struct Tracked {
    found: Found,
    granularity: ByteCount,
    /// The connection for reading, when no round has it.
    pool: Pool,
    /// How far the first round has asked, in bytes.
    asked: Arc<AtomicU64>,
    /// What was written behind the first round in those of its parts that have ended; one bit a
    /// block.
    behind: Option<DirtyBitmap>,
}

/// The tracking of all disks that move.
#[derive(Debug)]
pub(crate) struct Tracking {
    disks: Vec<Tracked>,
    server: Server,
    /// The bitmap that records.
    number: u32,
    rounds: u32,
    /// A bitmap that was read, and whose exports and itself are still to be removed: not while the
    /// guest stands still.
    spent: Option<u32>,
}

impl Tracking {
    /// Starts it. After an error nothing stays behind.
    pub(crate) fn start(
        machine: &mut Machine,
        found: &[Found],
        granularity: &Granularity,
    ) -> Result<Self, QemuError> {
        leftovers::check_alone(&mut *machine.qmp)?;
        check_capability(&mut *machine.qmp)?;
        let sizes = granularity.sizes(&mut *machine.qmp, found)?;
        let disks = found.iter().zip(sizes).map(|(found, granularity)| Tracked {
            granularity,
            found: found.clone(),
            pool: Arc::new(Mutex::new(None)),
            asked: Arc::new(AtomicU64::new(0)),
            behind: None,
        });
        let disks = disks.collect();
        let server = Server::start(machine)?;
        let tracking = Self { disks, server, number: 0, rounds: 0, spent: None };
        match tracking.begin(&mut *machine.qmp) {
            Ok(()) => Ok(tracking),
            Err(error) => {
                // The error is the news; whatever else fails now follows from it.
                let _ = machine.qmp.uninterrupted(|qmp| tracking.end(qmp));
                Err(error)
            }
        }
    }

    fn begin(&self, qmp: &mut dyn Monitor) -> Result<(), QemuError> {
        let actions = self.disks.iter().map(|disk| add(disk, 0)).collect();
        qmp.run(&Transaction { actions })?;
        for (place, disk) in self.disks.iter().enumerate() {
            let (id, found) = (format!("{}-{place}", Mark::own()), &disk.found);
            qmp.run(&ExportAdd::reading(&id, &found.node, &found.name))?;
            let link = Link::connect(self.server.address(), reading(&disk.found.name))?;
            *disk.pool.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(link);
        }
        Ok(())
    }

    pub(crate) fn granularity(&self) -> Vec<ByteCount> {
        self.disks.iter().map(|disk| disk.granularity).collect()
    }

    /// Begins a round for all disks.
    pub(crate) fn round(
        &mut self,
        qmp: &mut dyn Monitor,
    ) -> Result<Vec<Box<dyn DiskRound>>, QemuError> {
        let first = self.rounds == 0;
        let dirty = if first {
            let actions = self.disks.iter().map(|disk| clear(disk, self.number)).collect();
            qmp.run(&Transaction { actions })?;
            vec![None; self.disks.len()]
        } else {
            let ended = self.rotate(qmp)?;
            let mut dirty = self.read_bitmaps(qmp, ended)?;
            for (disk, dirty) in self.disks.iter_mut().zip(&mut dirty) {
                if let Some(behind) = disk.behind.take() {
                    dirty.union(&behind);
                }
            }
            dirty.into_iter().map(Some).collect()
        };
        self.rounds += 1;
        self.disks.iter().zip(dirty).map(|(disk, dirty)| self.round_of(disk, dirty)).collect()
    }

    fn round_of(
        &self,
        disk: &Tracked,
        dirty: Option<DirtyBitmap>,
    ) -> Result<Box<dyn DiskRound>, QemuError> {
        let link = self.link_of(disk)?;
        let dirty = match dirty {
            None => Dirty::All { asked: Arc::clone(&disk.asked) },
            Some(blocks) => Dirty::Blocks { blocks, granularity: disk.granularity },
        };
        let described = Disk { name: disk.found.name.clone(), size: disk.found.size };
        Ok(Box::new(Round::new(described, dirty, link)))
    }

    /// Reads all disks as they are now; no round may be under way.
    pub(crate) fn read(&self) -> Result<Vec<Box<dyn DiskReader>>, QemuError> {
        let read = |disk: &Tracked| -> Result<Box<dyn DiskReader>, QemuError> {
            let described = Disk { name: disk.found.name.clone(), size: disk.found.size };
            Ok(Box::new(Reader::new(described, self.link_of(disk)?)))
        };
        self.disks.iter().map(read).collect()
    }

    /// The connection of `disk`, when no round has it, or a new one.
    fn link_of(&self, disk: &Tracked) -> Result<Pooled, QemuError> {
        let pooled = disk.pool.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let link = match pooled {
            Some(link) => link,
            None => Link::connect(self.server.address(), reading(&disk.found.name))?,
        };
        Ok(Pooled::new(&disk.found.name, link, &disk.pool))
    }

    /// Divides the writes during the first round: those ahead of it need not be copied again.
    pub(crate) fn progress(&mut self, qmp: &mut dyn Monitor) -> Result<(), QemuError> {
        if self.rounds != 1 {
            return Ok(());
        }
        let ended = self.rotate(qmp)?;
        // Only now: what is asked for from here on is read after all the writes that the old bitmap
        // has.
        let asked: Vec<u64> =
            self.disks.iter().map(|disk| disk.asked.load(Ordering::SeqCst)).collect();
        let dirty = self.read_bitmaps(qmp, ended)?;
        for ((disk, mut dirty), asked) in self.disks.iter_mut().zip(dirty).zip(asked) {
            let kept = asked.div_ceil(disk.granularity.0).min(dirty.len().0);
            if kept < dirty.len().0 {
                dirty.clear(PageRun::new(kept, dirty.len().0 - kept));
            }
            match &mut disk.behind {
                Some(behind) => drop(behind.union(&dirty)),
                None => disk.behind = Some(dirty),
            }
        }
        Ok(())
    }

    /// Bytes of each disk that the next round would have to copy.
    pub(crate) fn dirty(&mut self, qmp: &mut dyn Monitor) -> Result<Vec<ByteCount>, QemuError> {
        self.remove_spent(qmp)?;
        let nodes = qmp.run(&QueryNodes::FLAT)?;
        let name = bitmap(self.number);
        let recorded = |disk: &Tracked| {
            let node = nodes.iter().find(|node| node.node_name == disk.found.node)?;
            let bitmap = node.dirty_bitmaps.iter().find(|bitmap| bitmap.name == name)?;
            Some(bitmap.count)
        };
        let of = |disk: &Tracked| {
            let behind =
                disk.behind.as_ref().map_or(0, |behind| behind.count().0 * disk.granularity.0);
            let lost = || QemuError::Changed("a disk lost its dirty bitmap");
            recorded(disk).map(|count| ByteCount(count + behind)).ok_or_else(lost)
        };
        self.disks.iter().map(of).collect()
    }

    /// Removes everything from QEMU.
    pub(crate) fn end(self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        let stopped = self.server.stop(qmp);
        let removed = leftovers::remove_bitmaps(qmp, |mark| mark == Mark::own());
        stopped.and(removed)
    }

    /// Lets another bitmap record, for all disks in one moment. Returns the number of the one that
    /// has ended.
    fn rotate(&mut self, qmp: &mut dyn Monitor) -> Result<u32, QmpError> {
        self.remove_spent(qmp)?;
        let (ended, next) = (self.number, self.number + 1);
        let disable = |disk: &Tracked| {
            let node = disk.found.node.clone();
            BitmapAction::Disable { node, name: bitmap(ended) }
        };
        let pair = |disk: &Tracked| [add(disk, next), disable(disk)];
        let actions = self.disks.iter().flat_map(pair).collect();
        qmp.run(&Transaction { actions })?;
        self.number = next;
        Ok(ended)
    }

    /// The dirty blocks of each disk in a bitmap that has ended.
    fn read_bitmaps(
        &mut self,
        qmp: &mut dyn Monitor,
        ended: u32,
    ) -> Result<Vec<DirtyBitmap>, QemuError> {
        self.spent = Some(ended);
        let mut read = Vec::new();
        for (place, disk) in self.disks.iter().enumerate() {
            // The name is what errors tell of.
            let name = format!("{} (bitmap {ended})", disk.found.name);
            let (id, bitmaps) = (export_of(place, ended), [bitmap(ended)]);
            let export = ExportAdd::reading(&id, &disk.found.node, &name);
            qmp.run(&export.with_bitmaps(&bitmaps))?;
            let wish = Wish::new(&name).with_context(&dirty_bitmap(&bitmap(ended)));
            let mut client = Client::connect(&self.server.address(), &wish)?;
            read.push(read_bitmap(&mut client, disk)?);
        }
        Ok(read)
    }

    /// Removes the bitmap that was read last, and its exports.
    fn remove_spent(&mut self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        let Some(spent) = self.spent.take() else { return Ok(()) };
        for place in 0..self.disks.len() {
            qmp.run(&ExportDel::hard(&export_of(place, spent)))?;
        }
        let remove = |disk: &Tracked| {
            let node = disk.found.node.clone();
            BitmapAction::Remove { node, name: bitmap(spent) }
        };
        let remove = Transaction { actions: self.disks.iter().map(remove).collect() };
        let until = Instant::now() + BUSY_LIMIT;
        while let Err(error) = qmp.run(&remove) {
            if !matches!(error, QmpError::Refused { .. }) || Instant::now() > until {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// The export of a disk with a bitmap that has ended.
fn export_of(place: usize, ended: u32) -> String {
    format!("{}-{place}-{ended}", Mark::own())
}

fn bitmap(number: u32) -> String {
    format!("{}-{number}", Mark::own())
}

fn add(disk: &Tracked, number: u32) -> BitmapAction {
    let (node, name) = (disk.found.node.clone(), bitmap(number));
    // Not persistent: it must end with QEMU, and not every format could keep it.
    let granularity = disk.granularity.0;
    BitmapAction::Add { node, name, granularity, persistent: false }
}

fn clear(disk: &Tracked, number: u32) -> BitmapAction {
    BitmapAction::Clear { node: disk.found.node.clone(), name: bitmap(number) }
}

/// With it on, QEMU's own migration would carry bitmaps, ours too, and fails over those that are
/// exported.
fn check_capability(qmp: &mut dyn Monitor) -> Result<(), QemuError> {
    let found = qmp.run(&QueryCapabilities)?;
    let on = found.iter().any(|entry| entry.state && entry.capability == "dirty-bitmaps");
    if on { Err(QemuError::BitmapsOn) } else { Ok(()) }
}

/// Asks for the status of all of the disk, many requests at a time.
fn read_bitmap(client: &mut Client, disk: &Tracked) -> Result<DirtyBitmap, QemuError> {
    let size = disk.found.size.0;
    let mut dirty = DirtyBitmap::new(PageCount(size.div_ceil(disk.granularity.0)));
    let mut mark = |offset: u64, length: u64| {
        let first = offset / disk.granularity.0;
        let end = (offset + length).div_ceil(disk.granularity.0);
        dirty.set(PageRun { start: PageIndex(first), count: PageCount(end - first) });
    };
    let piece = |from: u64| (size - from).min(STRETCH_MAX.into()) as u32;
    let (mut next, mut tickets) = (0, std::collections::VecDeque::new());
    loop {
        while next < size && tickets.len() < DEPTH {
            tickets
                .push_back((next + u64::from(piece(next)), client.ask_status(next, piece(next))?));
            next += u64::from(piece(next));
        }
        let Some((end, mut ticket)) = tickets.pop_front() else { return Ok(dirty) };
        loop {
            let found = client.take_status(ticket)?.into_iter().next().unwrap_or_default();
            found
                .iter()
                .filter(|stretch| stretch.flags & DIRTY != 0)
                .for_each(|it| mark(it.offset, it.length));
            let from = found.last().map_or(end, |last| last.offset + last.length);
            if from >= end {
                break;
            }
            // A status may end early, where there are very many stretches.
            ticket = client.ask_status(from, (end - from) as u32)?;
        }
    }
}

/// What the guest has written to each of `found` since QEMU opened it.
pub(crate) fn written(qmp: &mut dyn Monitor, found: &[Found]) -> Result<Vec<ByteCount>, QmpError> {
    Ok(writes_so_far(qmp, found)?.iter().map(|writes| writes.bytes).collect())
}
