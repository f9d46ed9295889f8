//! The guest's memory in this process: mapped files, and copies in and out for devices, by
//! vm-memory.
//!
//! Memory may be plugged in while the guest runs. Invariants: what a device writes is marked as
//! dirty *after* the data has landed, so that whoever harvests the mark and then reads the page
//! reads the data; and a block that is there stays where it is, with its number, as long as anyone
//! can refer to it.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use godwit_bitmap::DirtyBitmap;
use godwit_memory::{MemoryError, RamBlock};
use godwit_memslots::{Slot, SlotFlags, SlotId};
use godwit_track::{BlockMapping, MissingPages, TrackError, VhostLog, VhostLogRegion};
use godwit_units::{ByteCount, Gpa, Hva, PAGE_SIZE, PageCount, PageIndex, PageRun};
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::MicrovmError;
use crate::error::system;
use crate::layout::{BlockPlan, TOP};

const HUGE: u64 = 2 << 20;

/// All memory of the guest.
pub struct GuestRam {
    now: RwLock<Arc<Memory>>,
    device_log: Arc<VhostLog>,
    /// What is still to come of it.
    coming: Mutex<Weak<MissingPages>>,
}

/// The blocks that there are at one moment.
pub(crate) struct Memory {
    blocks: Arc<Vec<RamBlock>>,
    /// As devices see it: refers to what `placed` has mapped, and goes before it.
    devices: GuestMemoryMmap<VhostLogRegion>,
    placed: Vec<Arc<Placed>>,
}

/// One block, mapped.
struct Placed {
    gpa: u64,
    size: u64,
    base: NonNull<u8>,
    /// What was reserved around it, and holds it.
    _reserved: Reserved,
    file: File,
    plan: BlockPlan,
}

/// Address space, with what is mapped in it.
struct Reserved {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is shared memory, read and written by copies through raw pointers only; it is
// unmapped when the one owner goes.
unsafe impl Send for Placed {}
// SAFETY: as above; no reference into the mapping is ever made.
unsafe impl Sync for Placed {}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for GuestRam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestRam").field("blocks", &self.blocks()).finish_non_exhaustive()
    }
}

impl GuestRam {
    /// Makes and maps `plans`, which were checked.
    ///
    /// # Errors
    /// When a file cannot be made, used or mapped.
    pub fn new(plans: &[BlockPlan]) -> Result<Self, MicrovmError> {
        let placed = plans.iter().map(|plan| Ok(Arc::new(Placed::new(plan)?)));
        let placed = placed.collect::<Result<_, MicrovmError>>()?;
        // For all that may ever be plugged in: a bit for each page there could be, 2 MiB in all.
        let device_log = VhostLog::new(PageCount(TOP / PAGE_SIZE))?;
        let now = RwLock::new(Arc::new(Memory::of(placed, &device_log)?));
        Ok(Self { now, device_log, coming: Mutex::default() })
    }

    /// The blocks as they are, to keep.
    pub(crate) fn now(&self) -> Arc<Memory> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes and maps one more block, `plan`, which was checked with the others. Nobody sees it
    /// before the result was given to [`Self::replace`].
    pub(crate) fn with(&self, plan: &BlockPlan) -> Result<Memory, MicrovmError> {
        let mut placed = self.now().placed.clone();
        placed.push(Arc::new(Placed::new(plan)?));
        Memory::of(placed, &self.device_log)
    }

    /// Shows everyone `memory`, which has all blocks that there are and more.
    pub(crate) fn replace(&self, memory: Memory) {
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(memory);
    }

    /// The RAM blocks, for the engine.
    #[must_use]
    pub fn blocks(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.now().blocks)
    }

    /// The blocks as they were asked for.
    pub(crate) fn plans(&self) -> Vec<BlockPlan> {
        self.now().placed.iter().map(|placed| placed.plan.clone()).collect()
    }

    /// Paths by which another process can open the RAM files while this one lives.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let own = std::process::id();
        let path = |placed: &Placed| match &placed.plan.path {
            Some(path) => path.clone(),
            None => PathBuf::from(format!("/proc/{own}/fd/{}", placed.file.as_raw_fd())),
        };
        self.now().placed.iter().map(|placed| path(placed)).collect()
    }

    /// Removes the names of the RAM files. What is mapped stays as it is.
    pub fn remove_names(&self) {
        for path in self.plans().into_iter().filter_map(|plan| plan.path) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Where each block is mapped in this process.
    pub(crate) fn mappings(&self) -> Vec<Vec<BlockMapping>> {
        let mapping = |placed: &Placed| BlockMapping {
            pages: PageRun::new(0, placed.size / PAGE_SIZE),
            address: Hva(placed.base.as_ptr() as u64),
        };
        self.now().placed.iter().map(|placed| vec![mapping(placed)]).collect()
    }

    /// Gives `run` of block number `block` back to the host: it holds zeros then. Whoever has its
    /// pages awaited is told (madvise(2), MADV_REMOVE, userfaultfd(2)): they are not to come any
    /// more. What the kernel refuses to free stays as it is.
    pub(crate) fn give_back(&self, block: usize, run: PageRun) {
        let now = self.now();
        let Some(placed) = now.placed.get(block) else { return };
        let all = PageRun::new(0, placed.size / PAGE_SIZE);
        let Some(run) = all.intersect(run) else { return };
        let (at, length) = ((run.start.0 * PAGE_SIZE) as usize, run.count.bytes().0 as usize);
        // SAFETY: within the mapping, which `now` holds. It is shared memory of the guest's, into
        // which there are no references.
        let removed = unsafe {
            let start = placed.base.as_ptr().add(at);
            rustix::mm::madvise(start.cast(), length, Advice::LinuxRemove)
        };
        if removed.is_err() {
            // A hole all the same; nobody is told, and a page that is still to come does come.
            let _ = now.blocks[block].give_back(run);
        }
    }

    /// Throws away the pages in `missing`, one bitmap a block, and lets whoever accesses one wait
    /// until it is placed. No block may be plugged in meanwhile.
    ///
    /// # Errors
    /// When that is not possible; what was thrown away is lost then.
    pub(crate) fn await_pages(
        &self,
        missing: Vec<DirtyBitmap>,
    ) -> Result<Arc<MissingPages>, TrackError> {
        // SAFETY: these are the blocks and where they are mapped, until the machine ends. There are
        // no references into guest memory.
        let pages = unsafe { MissingPages::start_own(self.mappings(), &self.blocks(), missing) }?;
        let pages = Arc::new(pages);
        *self.coming.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&pages);
        Ok(pages)
    }

    /// Whether pages are still to come.
    pub(crate) fn lacks_pages(&self) -> bool {
        let coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        coming.is_some_and(|pages| pages.left() > PageCount::ZERO)
    }

    /// The log of what devices wrote, for a tracker. Page tables see device writes by themselves;
    /// KVM does not.
    pub(crate) fn device_log(&self) -> &Arc<VhostLog> {
        &self.device_log
    }

    /// Copies guest memory at `gpa` to `bytes`; `None` if it is not all memory. The guest may write
    /// it meanwhile: the copy then holds some mixture, which is what a device sees too.
    #[must_use]
    pub fn read(&self, gpa: u64, bytes: &mut [u8]) -> Option<()> {
        self.now().devices.read_slice(bytes, GuestAddress(gpa)).ok()
    }

    /// Copies `bytes` to guest memory at `gpa` and marks the pages; `None` if it is not all memory.
    #[must_use]
    pub fn write(&self, gpa: u64, bytes: &[u8]) -> Option<()> {
        self.now().devices.write_slice(bytes, GuestAddress(gpa)).ok()
    }

    /// Stores `value` at `gpa`, after all that was written before as the guest sees it; `None` if
    /// that is no memory.
    #[must_use]
    pub(crate) fn store(&self, gpa: u64, value: u64) -> Option<()> {
        self.now().devices.store(value, GuestAddress(gpa), Ordering::Release).ok()
    }
}

impl Memory {
    /// Memory in `placed`, whose devices mark what they write in `log`.
    fn of(placed: Vec<Arc<Placed>>, log: &Arc<VhostLog>) -> Result<Self, MicrovmError> {
        let blocks = placed.iter().map(|placed| placed.block()).collect::<Result<_, _>>()?;
        let mut by_address: Vec<_> = placed.iter().collect();
        by_address.sort_by_key(|placed| placed.gpa);
        let regions = by_address.into_iter().map(|placed| placed.region(log));
        let devices = GuestMemoryMmap::from_regions(regions.collect::<Result<_, _>>()?);
        let devices = devices.map_err(|error| MicrovmError::Layout(error.to_string()))?;
        Ok(Self { blocks: Arc::new(blocks), devices, placed })
    }

    /// The RAM blocks.
    pub(crate) fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// As devices see it.
    pub(crate) fn devices(&self) -> &GuestMemoryMmap<VhostLogRegion> {
        &self.devices
    }

    /// Cuts all blocks into slots: at least one for each, and `wanted` in all where the blocks have
    /// that many pages.
    pub(crate) fn slots(&self, wanted: usize) -> Vec<Slot> {
        let mut slots = Vec::new();
        for (block, (placed, share)) in self.shares(wanted).enumerate() {
            slots.extend(placed.slots(block, share, slots.len() as u32));
        }
        slots
    }

    /// How many that makes.
    pub(crate) fn slot_count(&self, wanted: usize) -> usize {
        self.shares(wanted).map(|(placed, share)| slot_count(ByteCount(placed.size), share)).sum()
    }

    /// All blocks, and how many of the `wanted` slots come to each by its size.
    fn shares(&self, wanted: usize) -> impl Iterator<Item = (&Placed, usize)> {
        let total: u64 = self.placed.iter().map(|placed| placed.size / PAGE_SIZE).sum();
        self.placed.iter().map(move |placed| {
            let pages = u128::from(placed.size / PAGE_SIZE);
            (&**placed, (pages * wanted as u128 / u128::from(total)) as usize)
        })
    }

    /// Cuts the last block into `wanted` slots, whose numbers begin with `id`.
    pub(crate) fn slots_of_last(&self, wanted: usize, id: u32) -> Vec<Slot> {
        let last = self.placed.iter().enumerate().next_back();
        last.map_or_else(Vec::new, |(block, placed)| placed.slots(block, wanted, id).collect())
    }
}

/// How many slots a block of `size` makes where `wanted` were asked for: at least one, and at most
/// one for each page.
pub(crate) fn slot_count(size: ByteCount, wanted: usize) -> usize {
    (wanted as u64).clamp(1, (size.0 / PAGE_SIZE).max(1)) as usize
}

impl Placed {
    /// The same for the engine: the file that is mapped, whatever has its name by now.
    fn block(&self) -> Result<RamBlock, MicrovmError> {
        let file = self.file.try_clone().map_err(system("duplicate a memory file's descriptor"))?;
        let block = RamBlock::from_fd(&self.plan.name, file.into(), 0, self.plan.size);
        Ok(block.map_err(|error| match (error, &self.plan.path) {
            (MemoryError::Unsuitable { block, problem, .. }, Some(path)) => {
                MemoryError::Unsuitable { block, path: path.clone(), problem }
            }
            (error, _) => error,
        })?)
    }

    /// The same, which is block number `block`, in [`slot_count`] slots of about one size.
    fn slots(&self, block: usize, wanted: usize, id: u32) -> impl Iterator<Item = Slot> {
        let pages = self.size / PAGE_SIZE;
        let count = slot_count(ByteCount(self.size), wanted) as u64;
        let cut =
            move |number: u64| (u128::from(pages) * u128::from(number) / u128::from(count)) as u64;
        (0..count).map(move |number| Slot {
            id: SlotId(id + number as u32),
            flags: SlotFlags::NONE,
            gfn: Gpa(self.gpa + cut(number) * PAGE_SIZE).frame(),
            pages: PageCount(cut(number + 1) - cut(number)),
            hva: Hva(self.base.as_ptr() as u64 + cut(number) * PAGE_SIZE),
            block: block as u32,
            first: PageIndex(cut(number)),
        })
    }

    /// The same for vm-memory; what goes through it is marked in `log`.
    fn region(&self, log: &Arc<VhostLog>) -> Result<GuestRegionMmap<VhostLogRegion>, MicrovmError> {
        let refused =
            |why: String| MicrovmError::Layout(format!("block '{}': {why}", self.plan.name));
        let size = usize::try_from(self.size).map_err(|error| refused(error.to_string()))?;
        let region =
            MmapRegionBuilder::new_with_bitmap(size, VhostLogRegion::new(log, Gpa(self.gpa)))
                .with_mmap_prot((ProtFlags::READ | ProtFlags::WRITE).bits().cast_signed())
                .with_mmap_flags((MapFlags::SHARED | MapFlags::NORESERVE).bits().cast_signed());
        // SAFETY: `base` and `size` are the mapping that `new` made. It is unmapped when `self` is
        // dropped, and `Memory`, which holds both, drops the region first.
        let region = unsafe { region.with_raw_mmap_pointer(self.base.as_ptr()) }.build();
        let region = region.map_err(|error| refused(error.to_string()))?;
        let end = || refused("it reaches beyond the last guest address".to_owned());
        GuestRegionMmap::new(region, GuestAddress(self.gpa)).ok_or_else(end)
    }

    fn new(plan: &BlockPlan) -> Result<Self, MicrovmError> {
        let size = plan.size.0;
        let file = match &plan.path {
            Some(path) => File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(path)
                .map_err(|source| MemoryError::Open {
                    block: plan.name.clone(),
                    path: path.clone(),
                    source,
                })?,
            None => File::from(
                rustix::fs::memfd_create(&*plan.name, MemfdFlags::CLOEXEC)
                    .map_err(system("make a memory file"))?,
            ),
        };
        file.set_len(size).map_err(system("size a memory file"))?;
        let wanted = size + 2 * HUGE;
        let too_large = || {
            MicrovmError::Layout(format!(
                "block '{}' of {} is too large",
                plan.name,
                ByteCount(size)
            ))
        };
        let length = usize::try_from(wanted).map_err(|_| too_large())?;
        // SAFETY: without MAP_FIXED the kernel picks a free place.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(system("reserve address space"))?;
        let first = NonNull::new(reserved.cast::<u8>()).ok_or_else(too_large)?;
        let reserved = Reserved { start: first, length };
        let start = (first.as_ptr() as u64).next_multiple_of(HUGE) + plan.host_offset;
        let skip = (start - first.as_ptr() as u64) as usize;
        // SAFETY: the range lies within what was just reserved, which nobody else knows of: at most
        // 2 MiB of alignment and less than 2 MiB of offset come before it.
        let mapped = unsafe {
            rustix::mm::mmap(
                first.as_ptr().add(skip).cast(),
                size as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE,
                &file,
                0,
            )
        };
        let base = mapped.map_err(system("map a memory file"))?;
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(too_large)?;
        Ok(Self { gpa: plan.gpa, size, base, _reserved: reserved, file, plan: plan.clone() })
    }
}

impl Drop for GuestRam {
    fn drop(&mut self) {
        self.remove_names();
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: what `Placed::new` reserved, with the mapping in it; no reference into it exists.
        // No slot of KVM shows it: it is kept until the VM has gone, unless KVM never showed it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram() -> GuestRam {
        let plans =
            ["name=low,size=1MiB,gpa=0", "name=odd,size=20KiB,gpa=0x203000,host-offset=0x5000"];
        GuestRam::new(&plans.map(|text| text.parse().unwrap())).unwrap()
    }

    #[test]
    fn copies_stay_within_a_block() {
        let ram = ram();
        assert!(ram.write(0x20_3ffe, b"seam").is_some());
        let mut back = [0; 4];
        assert!(ram.read(0x20_3ffe, &mut back).is_some());
        assert_eq!(&back, b"seam");
        for (gpa, len) in
            [(0xf_fffe, 4), (0x20_7ffe, 4), (0x10_0000, 1), (u64::MAX - 1, 4), (0x20_2fff, 1)]
        {
            assert!(ram.read(gpa, &mut vec![0; len]).is_none(), "{gpa:#x}");
        }
        let mut page = [0; 4096];
        ram.blocks()[1].read(PageIndex(1), &mut page).unwrap();
        assert_eq!(&page[..2], b"am");
    }

    #[test]
    fn a_block_is_the_file_that_is_mapped_whatever_has_its_name() {
        let path = PathBuf::from(format!("/dev/shm/godwit-ram-name-{}", std::process::id()));
        let low = format!("name=low,size=1MiB,gpa=0,path={}", path.display());
        let ram = GuestRam::new(&[low.parse().unwrap()]).unwrap();
        let more = |number: u64| {
            let plan = format!("name=more{number},size=1MiB,gpa={:#x}", number << 20);
            ram.replace(ram.with(&plan.parse().unwrap()).unwrap());
        };
        std::fs::remove_file(&path).unwrap();
        more(1);
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        more(2);
        ram.write(0x1000, b"guest").unwrap();
        let mut page = [0; 4096];
        ram.blocks()[0].read(PageIndex(1), &mut page).unwrap();
        assert_eq!(&page[..5], b"guest");
    }

    #[test]
    fn a_file_on_a_disk_is_refused_by_its_name() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/ram-on-a-disk");
        let on_tmpfs =
            rustix::fs::statfs(env!("CARGO_MANIFEST_DIR")).unwrap().f_type == 0x0102_1994;
        let plan = format!("name=low,size=1MiB,gpa=0,path={path}").parse().unwrap();
        let made = GuestRam::new(&[plan]);
        std::fs::remove_file(path).unwrap();
        match made {
            Ok(_) => assert!(on_tmpfs),
            Err(error) => assert!(error.to_string().contains("ram-on-a-disk"), "{error}"),
        }
    }

    #[test]
    fn slots_tile_the_blocks_at_any_alignment() {
        let ram = ram();
        let slots = ram.now().slots(100);
        let of = |block| slots.iter().filter(move |slot| slot.block == block);
        assert_eq!(of(0).map(|slot| slot.pages.0).sum::<u64>(), 256);
        assert_eq!(of(1).map(|slot| slot.pages.0).sum::<u64>(), 5);
        assert_eq!(of(1).next().unwrap().gfn.0, 0x203);
        assert_eq!(of(1).next().unwrap().hva.0 % HUGE, 0x5000);
        assert!((95..=100).contains(&slots.len()), "{}", slots.len());
        assert_eq!(ram.now().slots(0).len(), 2);
        assert_eq!(ram.now().slots(10_000).len(), 261);
        for wanted in [0, 1, 7, 100, 10_000] {
            assert_eq!(ram.now().slot_count(wanted), ram.now().slots(wanted).len(), "{wanted}");
        }
        // Counting takes no memory for each.
        assert_eq!(ram.now().slot_count(usize::MAX), 261);
        assert_eq!(slot_count(ByteCount(1 << 20), usize::MAX), 256);
    }

    #[test]
    fn device_writes_are_marked_page_by_page() {
        use godwit_track::{DirtyTracker, VhostLogTracker};
        let ram = ram();
        ram.write(0x1000, &[1; 4096]).unwrap();
        let sizes: Vec<_> = ram.blocks().iter().map(RamBlock::pages).collect();
        let slots = ram.now().slots(7);
        let tracker = VhostLogTracker::start(ram.device_log(), &sizes, &slots).unwrap();
        ram.write(0x20_3ffe, b"seam").unwrap();
        ram.write(0x2000, &[1; 4096]).unwrap();
        for (block, expected) in [(0, PageRun::new(2, 1)), (1, PageRun::new(0, 2))] {
            let mut found = Vec::new();
            let all = ram.blocks()[block].all();
            tracker.harvest(block, all, PageCount::ZERO, &mut |run| found.push(run)).unwrap();
            assert_eq!(found, [expected]);
        }
    }
}
