//! A process beside the VMM that maps RAM blocks: where, under which protection, and whether that
//! is still so.
//!
//! Invariant: as long as it is intact, its page tables have told of every write since it was
//! attached to. It is not when it has ended, or has mapped anything of the blocks anew, which comes
//! without protection.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use godwit_bitmap::DirtyBitmap;
use godwit_memory::RamBlock;
use godwit_memory::pagemap::{Looked, PM_SCAN_CHECK_WPASYNC, PageRegion, scan};
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Sharer;
use crate::attach::attach;
use crate::mappings::{AddressSpace, BlockMapping, open_pagemap};
use crate::protected::{Protected, Then};
use crate::{AsOf, DirtyTracker, TrackError, uapi};

const REGISTER: &str = "UFFDIO_REGISTER";
/// How often a process is attached to that maps its memory anew meanwhile.
const TRIES: u32 = 5;

/// A process that was attached to.
#[derive(Debug)]
pub(super) struct SharingProcess {
    pub(super) sharer: Sharer,
    process: OwnedFd,
    /// What it maps, block by block.
    mapped: Vec<Vec<BlockMapping>>,
    pub(super) layers: Vec<Layer>,
}

/// Mappings that do not overlap. A back end may have the same pages of a file mapped twice.
#[derive(Debug)]
pub(super) struct Layer {
    protected: Protected,
    /// A scan found that the process, or its memory, is not what it was.
    lost: AtomicBool,
    /// Where data lands late: what was written so far, by block.
    landing: Option<Vec<Mutex<DirtyBitmap>>>,
}

impl SharingProcess {
    /// Attaches to a process. `None`: it maps nothing of `blocks`, or has ended.
    pub(super) fn attach(
        sharer: &Sharer,
        blocks: &[RamBlock],
        in_small: bool,
    ) -> Result<Option<Self>, TrackError> {
        let pid = sharer.pid;
        let number = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput);
        let opened = number
            .map_err(io::Error::from)
            .and_then(|number| Ok(pidfd_open(number, PidfdFlags::empty())?));
        let process = match opened {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            opened => {
                opened.map_err(|source| TrackError::Attach { pid, step: "pidfd_open", source })?
            }
        };
        let mut tries = 0;
        loop {
            tries += 1;
            match Self::try_attach(sharer, &process, blocks, in_small) {
                // A process on its way out gives errors of any kind.
                Err(_) if !runs(&process) => return Ok(None),
                // It may map its memory anew in this very moment.
                Err(TrackError::Attach { step: REGISTER, .. }) if tries < TRIES => {}
                Ok(Some(this)) if tries < TRIES && !this.is_intact(blocks) => {}
                attached => return attached,
            }
        }
    }

    fn try_attach(
        sharer: &Sharer,
        process: &OwnedFd,
        blocks: &[RamBlock],
        in_small: bool,
    ) -> Result<Option<Self>, TrackError> {
        let pid = sharer.pid;
        let mapped = mapped(pid, blocks)?;
        if mapped.iter().all(Vec::is_empty) {
            return Ok(None);
        }
        let failed = |step| move |source| TrackError::Attach { pid, step, source };
        let process = process.try_clone().map_err(failed("dup"))?;
        let attachment = Arc::new(attach(pid, sharer.approach)?);
        let pagemap = Arc::new(open_pagemap(pid)?);
        for (block, mappings) in blocks.iter().zip(&mapped) {
            for mapping in mappings {
                let bytes = mapping.pages.count.bytes().0;
                uapi::uffd_register_wp(attachment.userfaultfd(), mapping.address.0, bytes)
                    .map_err(|source| match source.raw_os_error() {
                        Some(libc::EBUSY) => {
                            TrackError::Registered { block: block.name().to_owned() }
                        }
                        _ => failed(REGISTER)(source),
                    })?;
            }
        }
        let landing = |block: &RamBlock| Mutex::new(DirtyBitmap::new(block.pages()));
        let layer = |blocks_mapped| Layer {
            protected: Protected {
                attachment: Arc::clone(&attachment),
                pagemap: Arc::clone(&pagemap),
                blocks: blocks_mapped,
            },
            lost: AtomicBool::new(false),
            landing: sharer.lands_late.then(|| blocks.iter().map(landing).collect()),
        };
        let layers = layers(&mapped).into_iter().map(layer).collect();
        let this = Self { sharer: sharer.clone(), process, mapped, layers };
        this.protect(in_small)?;
        Ok(Some(this))
    }

    /// Protects all that it maps now, so that whatever it pins from here on is seen. What it has
    /// pinned by now is in its page tables, which are reported where they were ever filled.
    fn protect(&self, in_small: bool) -> Result<(), TrackError> {
        for layer in &self.layers {
            for (block, mappings) in layer.protected.blocks.iter().enumerate() {
                for mapping in mappings.iter().filter(|_| in_small) {
                    let bytes = mapping.pages.count.bytes().0;
                    let userfaultfd = layer.protected.attachment.userfaultfd();
                    uapi::uffd_write_protect(userfaultfd, mapping.address.0, bytes, true)
                        .map_err(|source| TrackError::Scan { block, source })?;
                }
                let end = mappings.last().map_or(0, |mapping| mapping.pages.end().0);
                let all = PageRun::new(0, end);
                layer.harvest(block, all, PageCount::ZERO, &mut |_| {})?;
            }
        }
        Ok(())
    }

    /// Whether its page tables have told of all that it wrote.
    pub(super) fn is_intact(&self, blocks: &[RamBlock]) -> bool {
        let same = || mapped(self.sharer.pid, blocks).is_ok_and(|now| now == self.mapped);
        let told = || self.layers.iter().all(|layer| !layer.lost.load(Ordering::Relaxed));
        told() && same() && self.layers.iter().all(Layer::is_protected) && runs(&self.process)
    }
}

/// Whether a process has not ended yet: a descriptor of it becomes readable (pidfd_open(2)).
fn runs(process: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&now)) == Ok(0)
}

/// What process `pid` maps of `blocks`.
fn mapped(pid: i32, blocks: &[RamBlock]) -> Result<Vec<Vec<BlockMapping>>, TrackError> {
    let space = AddressSpace::of(pid)?;
    Ok(blocks.iter().map(|block| space.shared_parts_of(block)).collect())
}

/// The mappings, by block, in as few layers as there need be.
fn layers(mapped: &[Vec<BlockMapping>]) -> Vec<Vec<Vec<BlockMapping>>> {
    let mut layers: Vec<Vec<Vec<BlockMapping>>> = Vec::new();
    for (block, mappings) in mapped.iter().enumerate() {
        for mapping in mappings {
            let free = |layer: &Vec<Vec<BlockMapping>>| {
                layer[block].last().is_none_or(|last| last.pages.end() <= mapping.pages.start)
            };
            let number = layers.iter().position(free).unwrap_or_else(|| {
                layers.push(vec![Vec::new(); mapped.len()]);
                layers.len() - 1
            });
            layers[number][block].push(*mapping);
        }
    }
    layers
}

impl Layer {
    /// Whether each mapping is still one that was registered: the kernel refuses to scan another.
    fn is_protected(&self) -> bool {
        let mut mappings = self.protected.blocks.iter().flatten();
        mappings.all(|mapping| {
            let range = mapping.address.0..mapping.address.0 + PAGE_SIZE;
            let mut region = [PageRegion::default()];
            let pagemap = self.protected.pagemap.as_fd();
            scan(pagemap, Looked::Written, range, PM_SCAN_CHECK_WPASYNC, 0, &mut region).is_ok()
        })
    }

    /// What was written where data lands late, block by block, which is then forgotten.
    pub(super) fn take_landing(&self) -> Vec<DirtyBitmap> {
        let take = |pages: &Mutex<DirtyBitmap>| {
            let mut pages = pages.lock().unwrap_or_else(PoisonError::into_inner);
            let empty = DirtyBitmap::new(pages.len());
            std::mem::replace(&mut *pages, empty)
        };
        self.landing.iter().flatten().map(take).collect()
    }

    /// A process that has ended, or memory that is mapped anew, has nothing to tell; who looks
    /// whether it is intact learns so. Other failures are failures.
    fn pass_over<T>(&self, scanned: Result<T, TrackError>, gone: T) -> Result<T, TrackError> {
        match scanned {
            Err(TrackError::Scan { source, .. })
                if matches!(source.raw_os_error(), Some(libc::EPERM | libc::ESRCH)) =>
            {
                self.lost.store(true, Ordering::Relaxed);
                Ok(gone)
            }
            scanned => scanned,
        }
    }
}

impl DirtyTracker for Layer {
    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let mut note = |run| {
            if let Some(landing) = &self.landing {
                landing[block].lock().unwrap_or_else(PoisonError::into_inner).set(run);
            }
            found(run);
        };
        let scanned = self.protected.scan(block, within, Then::Protect, limit.0, &mut note);
        self.pass_over(scanned, within.end())
    }

    fn look(
        &self,
        block: usize,
        within: PageRun,
        _: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        let scanned = self.protected.scan(block, within, Then::Nothing, 0, found).map(drop);
        self.pass_over(scanned, ())
    }
}

#[cfg(test)]
mod tests {
    use godwit_units::Hva;

    use super::*;

    #[test]
    fn mappings_of_the_same_pages_are_in_layers_of_their_own() {
        // What libvhost-user maps for memory below and above 4 GiB: the second region from the
        // file's begin on, too.
        let mapping = |start, count, address| BlockMapping {
            pages: PageRun::new(start, count),
            address: Hva(address),
        };
        let (low, all) = (mapping(0, 100, 0x1000_0000), mapping(0, 300, 0x5000_0000));
        let (second, other) = (mapping(100, 50, 0x9000_0000), mapping(0, 7, 0xa000_0000));
        let found = layers(&[vec![low, all, second], vec![other]]);
        assert_eq!(found, [vec![vec![low, second], vec![other]], vec![vec![all], vec![]]]);
        assert!(layers(&[vec![], vec![]]).is_empty());
    }
}
