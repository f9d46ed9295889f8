//! A disk as it is now, read through an NBD server: of what was written at the destination, and of
//! all of a source whose guest stands still.

use std::collections::VecDeque;

use godwit_disk::{Disk, DiskError, DiskReader, Extent};
use godwit_nbd::{DEPTH, Link, STRETCH_MAX, Stretch};
use godwit_units::PageRun;

use crate::QemuError;
use crate::disks::round::{Pool, byte_length, extents};

/// See the module. The connection goes back to where it came from.
#[derive(Debug)]
pub(crate) struct Reader {
    disk: Disk,
    link: Option<Link>,
    pool: Pool,
}

impl Reader {
    /// Of `disk`, over `link`, which `pool` gets in the end.
    pub(crate) fn new(disk: Disk, link: Link, pool: &Pool) -> Self {
        Self { disk, link: Some(link), pool: Pool::clone(pool) }
    }

    fn link(&mut self) -> Result<&mut Link, QemuError> {
        let name = &self.disk.name;
        self.link.as_mut().ok_or_else(|| QemuError::DiskUnmovable {
            disk: name.clone(),
            why: "its connection was given back",
        })
    }

    /// What the server says of the bytes from `start` to `end`.
    fn stretches(&mut self, start: u64, end: u64) -> Result<Vec<Stretch>, QemuError> {
        let mut found: Vec<Stretch> = Vec::new();
        let mut at = start;
        while at < end {
            let length = (end - at).min(STRETCH_MAX.into()) as u32;
            let asked = self.link()?.ask_status(at, length)?;
            found.extend(self.link()?.take_status(asked)?);
            at = found.last().map_or(end, |last| last.offset + last.length);
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
        let disk = self.disk.clone();
        let link = self.link()?;
        let mut ahead = runs.iter();
        let mut asked = VecDeque::new();
        let mut rest = bytes;
        for run in runs {
            while asked.len() < DEPTH
                && let Some(next) = ahead.next()
            {
                let length = byte_length(&disk, *next) as u32;
                let read = link.ask_read(next.start.offset(), length).map_err(QemuError::from)?;
                asked.push_back(read);
            }
            let Some(oldest) = asked.pop_front() else { break };
            let (own, others) = rest.split_at_mut(run.count.bytes().0 as usize);
            let (within, beyond) = own.split_at_mut(byte_length(&disk, *run) as usize);
            beyond.fill(0);
            link.take_read(oldest, within).map_err(QemuError::from)?;
            rest = others;
        }
        Ok(())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(link) = self.link.take().filter(|link| link.under_way() == 0) {
            *self.pool.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(link);
        }
    }
}
