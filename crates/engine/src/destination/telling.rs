//! What the destination tells of what it holds: digests for a comparison, and fingerprints for a
//! source that was started anew or that audits.

use godwit_fingerprints::{Fingerprint, Key, SegmentFingerprints};
use godwit_memory::{RamBlock, segments};
use godwit_units::{PageBuffer, PageCount, PageIndex, PageRun};
use godwit_wire::{DIGESTS_PER_MESSAGE, Message};

use super::Destination;
use super::disk::readers;
use super::lanes::Lanes;
use super::proof::Tables;
use crate::{EngineError, digests, disk_prints};

impl Destination<'_> {
    /// Tells the digests that the source compares with its own.
    pub(super) fn send_digests(&self, lanes: &Lanes) -> Result<(), EngineError> {
        if let Some(proven) = lanes.proven() {
            return self.send_proven(lanes, &proven.digests);
        }
        if let Some(prover) = lanes.prover() {
            return self.send_proven(lanes, &prover.digests(|| self.session.ends())?);
        }
        for (number, own) in lanes.order().iter().enumerate() {
            let block = &self.ram[*own];
            let chunks = digests::chunks(block.pages());
            for first in (0..chunks).step_by(DIGESTS_PER_MESSAGE) {
                let digests = digests::digests(
                    block,
                    first..chunks.min(first + DIGESTS_PER_MESSAGE),
                    self.session.interrupt(),
                    |_, _| {},
                )?;
                let digests = digests.ok_or(EngineError::Interrupted)?;
                let (block, first) = (number as u32, first as u32);
                self.session.say(&Message::Digests { block, first, digests })?;
            }
        }
        Ok(())
    }

    /// Tells the `digests` of what was read back: of the source's RAM blocks in its order, and of
    /// the disks that were.
    fn send_proven(&self, lanes: &Lanes, digests: &[Vec<u128>]) -> Result<(), EngineError> {
        let disks = self.ram.len()..digests.len();
        for (number, own) in lanes.order().iter().copied().chain(disks).enumerate() {
            let pieces = digests[own].chunks(DIGESTS_PER_MESSAGE);
            for (piece, first) in pieces.zip((0..).step_by(DIGESTS_PER_MESSAGE)) {
                let (block, digests) = (number as u32, piece.to_vec());
                self.session.say(&Message::Digests { block, first, digests })?;
            }
        }
        Ok(())
    }

    /// Tells a source that was started anew, or one that audits, what is in memory here.
    pub(super) fn send_prints(&mut self, lanes: &mut Lanes) -> Result<(), EngineError> {
        // A source that audits asks by the key of its proof. One that was started anew knows
        // nothing of what the one before it wanted to have proven.
        // One that has merely lost its connections may audit as well, behind the last round.
        let behind = lanes.proven().is_some();
        let audit = lanes.take_proof_key();
        let audit = audit.filter(|_| behind || !self.session.may_ask_for_prints());
        lanes.end_proof();
        let key = match audit {
            Some(key) => key,
            None => Key::new(self.session.prints_seed(self.disk_prints_wanted)?),
        };
        let mut pages = PageBuffer::new(PageCount(READ));
        for (number, own) in lanes.order().iter().enumerate() {
            let block = &self.ram[*own];
            for (segment, at) in segments(&[block.pages()]).enumerate() {
                self.check_wanted()?;
                let prints = if block.has_data(at.run)? {
                    prints(block, at.run, &key, &mut pages)?
                } else {
                    Vec::new()
                };
                let (block, segment) = (number as u32, segment as u32);
                self.session.say(&Message::Prints { block, segment, prints })?;
            }
        }
        match (self.disk_prints_wanted, audit.and(lanes.proven())) {
            (false, _) => Ok(()),
            (true, Some(proven)) => self.send_read_back(lanes, &proven.tables, &key),
            (true, None) => self.send_disk_prints(lanes, &key),
        }
    }

    /// Tells a source that audits what was read back of each page of the disks.
    fn send_read_back(&self, lanes: &Lanes, tables: &Tables, key: &Key) -> Result<(), EngineError> {
        for (index, segments) in tables[self.ram.len()..].iter().enumerate() {
            let block = (lanes.order().len() + index) as u32;
            for (segment, table) in (0..).zip(segments) {
                self.check_wanted()?;
                let prints = words(table, key);
                self.session.say(&Message::Prints { block, segment, prints })?;
            }
        }
        Ok(())
    }

    /// Whether somebody still waits for what takes long: the operator has not cancelled, and no
    /// other connection of the source has come.
    fn check_wanted(&self) -> Result<(), EngineError> {
        if self.session.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        self.session.superseded().map_or(Ok(()), Err)
    }

    /// Tells it what is on the disks here.
    fn send_disk_prints(&mut self, lanes: &Lanes, key: &Key) -> Result<(), EngineError> {
        let readers = readers(self.vm, lanes.disks().len())?;
        let mut readers = readers.into_iter().flatten();
        for (index, disk) in lanes.disks().iter().enumerate() {
            let block = (lanes.order().len() + index) as u32;
            let tell = |segment, prints| {
                self.check_wanted()?;
                self.session.say(&Message::Prints { block, segment, prints })
            };
            disk_prints::tell(readers.next(), disk.pages(), key, tell)?;
        }
        Ok(())
    }
}

/// Pages that are read at once for their fingerprints: 256 KiB.
const READ: u64 = 64;

/// The fingerprints of the pages of `run`.
fn prints(
    block: &RamBlock,
    run: PageRun,
    key: &Key,
    pages: &mut [u8],
) -> Result<Vec<u64>, EngineError> {
    let mut prints = Vec::with_capacity(run.count.0 as usize);
    for part in disk_prints::parts(run, READ) {
        let pages = &mut pages[..part.count.bytes().0 as usize];
        block.read(part.start, pages)?;
        prints.extend(pages.chunks_exact(4096).map(|page| key.page(page).word()));
    }
    Ok(prints)
}

/// The fingerprints in `table`; none where all are of zeros.
fn words(table: &SegmentFingerprints, key: &Key) -> Vec<u64> {
    let pages = table.run().start.0..table.run().end().0;
    let prints = pages.map(|page| table.print(PageIndex(page)).unwrap_or_else(|| key.zero()));
    let prints: Vec<u64> = prints.map(Fingerprint::word).collect();
    if prints.iter().all(|print| *print == key.zero().word()) { Vec::new() } else { prints }
}
