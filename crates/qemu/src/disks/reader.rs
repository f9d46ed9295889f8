//! A disk as it is now, read through an NBD server: of what was written at the destination, and of
//! all of a source whose guest stands still.

use std::collections::VecDeque;

use godwit_disk::{Disk, DiskError, DiskReader, Extent};
use godwit_nbd::{DEPTH, STRETCH_MAX, Stretch};
use godwit_units::PageRun;

use crate::QemuError;
use crate::disks::pooled::Pooled;
use crate::disks::round::{byte_length, extents};

/// See the module.
#[derive(Debug)]
pub(crate) struct Reader {
    disk: Disk,
    link: Pooled,
}

impl Reader {
    /// Of `disk`, over `link`.
    pub(crate) fn new(disk: Disk, link: Pooled) -> Self {
        Self { disk, link }
    }

    /// What the server says of the bytes from `start` to `end`.
    fn stretches(&mut self, start: u64, end: u64) -> Result<Vec<Stretch>, QemuError> {
        let mut found: Vec<Stretch> = Vec::new();
        let mut at = start;
        while at < end {
            let length = (end - at).min(STRETCH_MAX.into());
            let asked = self.link.link()?.ask_status(at, length as u32)?;
            found.extend(self.link.take_status(asked, at + length)?);
            at += length;
        }
        Ok(found)
    }
}

impl DiskReader for Reader {
    fn extents(&mut self, run: PageRun) -> Result<Vec<Extent>, DiskError> {
        let start = run.start.offset();
        let end = start + byte_length(&self.disk, run);
        let found = self.stretches(start, end)?;
        Ok(extents(&found, start, end, self.disk.size.0))
    }

    fn read(&mut self, runs: &[PageRun], bytes: &mut [u8]) -> Result<(), DiskError> {
        let (disk, link) = (&self.disk, self.link.link()?);
        let mut ahead = runs.iter();
        let mut asked = VecDeque::new();
        let mut rest = bytes;
        for run in runs {
            while asked.len() < DEPTH
                && let Some(next) = ahead.next()
            {
                let length = byte_length(disk, *next) as u32;
                let read = link.ask_read(next.start.offset(), length).map_err(QemuError::from)?;
                asked.push_back(read);
            }
            let Some(oldest) = asked.pop_front() else { break };
            let (own, others) = rest.split_at_mut(run.count.bytes().0 as usize);
            let (within, beyond) = own.split_at_mut(byte_length(disk, *run) as usize);
            beyond.fill(0);
            link.take_read(oldest, within).map_err(QemuError::from)?;
            rest = others;
        }
        Ok(())
    }
}
