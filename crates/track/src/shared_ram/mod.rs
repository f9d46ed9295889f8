//! RAM that other processes write beside the VMM: vhost-user back ends, each of which maps the
//! guest's RAM and has page tables of its own.
//!
//! ```text
//!   VMM         PagemapTracker ─────────┐
//!   back end    page tables, layers ────┼── one dirty bitmap ── harvests, looks
//!   back end    page tables, layers ────┤
//!   all dirty again, landed late ───────┘
//! ```
//!
//! Back ends come and go, and map memory anew. So before each round, the last one with the guest
//! stopped among them, it is asked who they are (`find`), and whether each is what it was. When one
//! is not, what it wrote since the harvest before is not known, and **all pages count as dirty
//! again**: whoever remembers what was sent (page fingerprints) sends what is different. The same
//! when one may have come and gone between two looks ([`Sharers::steady`]): its page tables went
//! with it, and no others show what it wrote.
//!
//! Who does direct I/O has pages pinned, into which data lands after they were harvested. What such
//! a process has written since it was attached to, and what it may have had pinned by then, is
//! kept, and counts as dirty again when all has landed ([`SharedRamTracker::all_landed`]).
//!
//! Invariant: *no write is lost*, if the back ends are found, and are waited for when the guest has
//! been stopped.

mod process;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use godwit_memory::{RamBlock, SEGMENT_PAGES};
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};

use self::process::SharingProcess;
use crate::union::United;
use crate::{Approach, AsOf, DirtyTracker, PagemapTracker, TrackError};

/// A process that may map RAM blocks beside the VMM.
///
/// ```
/// use godwit_track::{Approach, Sharer};
///
/// let storage = Sharer { pid: 4711, approach: Approach::default(), lands_late: true };
/// assert_eq!(storage.clone(), storage);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharer {
    /// The process.
    pub pid: i32,
    /// How it is attached to.
    pub approach: Approach,
    /// It does direct I/O: data lands in pages after it was seen to write them.
    pub lands_late: bool,
}

/// Who was found at one look.
///
/// ```
/// use godwit_track::Sharers;
///
/// // Whoever cannot tell what was in between is looked at in full.
/// assert!(!Sharers::default().steady);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sharers {
    /// The processes that there are now.
    pub who: Vec<Sharer>,
    /// Nobody else can have written since the look before: no process that came after it has gone
    /// again.
    pub steady: bool,
}

/// Tells which processes there are now.
///
/// ```
/// use godwit_track::{Approach, FindSharers, Sharer, Sharers};
///
/// // One that is there for ever.
/// let find: FindSharers = Box::new(|| {
///     let storage = Sharer { pid: 4711, approach: Approach::default(), lands_late: false };
///     Ok(Sharers { who: vec![storage], steady: true })
/// });
/// assert_eq!(find().map(|found| found.who.len()), Ok(1));
/// ```
pub type FindSharers = Box<dyn Fn() -> Result<Sharers, String> + Send + Sync>;

/// Tracks RAM in the VMM and in all other processes that map it.
///
/// ```
/// use std::sync::Arc;
///
/// use godwit_memory::RamBlock;
/// use godwit_track::{FindSharers, PagemapTracker, SharedRamTracker, TrackError};
///
/// /// The RAM of VMM `pid`, of which `find` knows the back ends; needs the right to trace them.
/// fn start(
///     pid: i32,
///     blocks: Arc<Vec<RamBlock>>,
///     find: FindSharers,
/// ) -> Result<SharedRamTracker, TrackError> {
///     let vmm = Arc::new(PagemapTracker::start(pid, &blocks)?);
///     SharedRamTracker::start(vmm, blocks, find)
/// }
/// ```
pub struct SharedRamTracker {
    vmm: Arc<PagemapTracker>,
    blocks: Arc<Vec<RamBlock>>,
    find: FindSharers,
    processes: RwLock<Vec<SharingProcess>>,
    united: United,
    /// One of them did direct I/O at some look.
    ever_late: AtomicBool,
    /// A process that does direct I/O has gone: where its data lands is not known.
    owed: AtomicBool,
    /// Why the back ends are not known any more.
    failed: Mutex<Option<String>>,
}

impl std::fmt::Debug for SharedRamTracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedRamTracker").field("vmm", &self.vmm).finish_non_exhaustive()
    }
}

impl SharedRamTracker {
    /// Starts to track `blocks` in all processes that `find` finds and that map them, beside the
    /// `vmm`. All pages count as dirty at first.
    ///
    /// # Errors
    /// When a process cannot be attached to, or is not to be found. All are then as they were.
    pub fn start(
        vmm: Arc<PagemapTracker>,
        blocks: Arc<Vec<RamBlock>>,
        find: FindSharers,
    ) -> Result<Self, TrackError> {
        let giant = |block: &&RamBlock| {
            block.huge_page().is_some_and(|page| page.0 > SEGMENT_PAGES * PAGE_SIZE)
        };
        if let Some(block) = blocks.iter().find(giant) {
            return Err(TrackError::Sharers(format!(
                "RAM block '{}' is in huge pages of 1 GiB, which are not tracked in other \
                 processes than QEMU: use huge pages of 2 MiB",
                block.name()
            )));
        }
        let sizes: Vec<PageCount> = blocks.iter().map(RamBlock::pages).collect();
        let this = Self {
            vmm,
            blocks,
            find,
            processes: RwLock::default(),
            united: United::new(&sizes),
            ever_late: AtomicBool::new(false),
            owed: AtomicBool::new(false),
            failed: Mutex::default(),
        };
        this.follow()?;
        // All pages count as dirty as it is, and what was begun before is in the page tables.
        this.owed.store(false, Ordering::Relaxed);
        Ok(this)
    }

    /// Looks again who maps the blocks. Whether anything had changed: then all pages count as dirty
    /// again.
    ///
    /// # Errors
    /// When a process cannot be attached to, or is not to be found.
    pub fn follow(&self) -> Result<bool, TrackError> {
        let Sharers { who: wanted, steady } = (self.find)().map_err(TrackError::Sharers)?;
        let late = wanted.iter().any(|sharer| sharer.lands_late);
        let late = self.ever_late.fetch_or(late, Ordering::Relaxed) || late;
        let mut processes = self.processes.write().unwrap_or_else(PoisonError::into_inner);
        let mut changed = !steady;
        // Who was not seen is taken for one like those that were.
        self.owed.fetch_or(!steady && late, Ordering::Relaxed);
        processes.retain(|process| {
            let stays = wanted.contains(&process.sharer) && process.is_intact(&self.blocks);
            if !stays {
                changed = true;
                // What it had begun may land yet.
                self.owed.fetch_or(process.sharer.lands_late, Ordering::Relaxed);
            }
            stays
        });
        let mut attach = |sharer: &Sharer| -> Result<(), TrackError> {
            let known = processes.iter().any(|process| process.sharer == *sharer);
            if !known {
                let in_small = self.vmm.is_in_small();
                let found = SharingProcess::attach(sharer, &self.blocks, in_small)?;
                changed |= found.is_some();
                processes.extend(found);
            }
            Ok(())
        };
        let attached = wanted.iter().try_for_each(&mut attach);
        if changed || attached.is_err() {
            self.united.mark_all();
        }
        attached.map(|()| changed)
    }

    /// Whether each process that maps the blocks is what it was at the last look.
    #[must_use]
    pub fn is_intact(&self) -> bool {
        self.processes().iter().all(|process| process.is_intact(&self.blocks))
    }

    /// Whether data lands late: a process does direct I/O.
    #[must_use]
    pub fn lands_late(&self) -> bool {
        self.processes().iter().any(|process| process.sharer.lands_late)
    }

    /// All direct I/O has landed that was begun, and nobody begins more: what may have landed
    /// unseen counts as dirty.
    pub fn all_landed(&self) {
        if self.owed.swap(false, Ordering::Relaxed) {
            self.united.mark_all();
        }
        for layer in self.processes().iter().flat_map(|process| &process.layers) {
            let landed = layer.take_landing();
            landed.iter().enumerate().for_each(|(block, pages)| self.united.mark(block, pages));
        }
    }

    /// The processes that map the blocks, beside the VMM.
    #[must_use]
    pub fn pids(&self) -> Vec<i32> {
        self.processes().iter().map(|process| process.sharer.pid).collect()
    }

    fn processes(&self) -> RwLockReadGuard<'_, Vec<SharingProcess>> {
        self.processes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), TrackError> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.clone().map_or(Ok(()), |words| Err(TrackError::Sharers(words)))
    }
}

/// All trackers of a VM whose RAM is shared.
fn trackers<'a>(
    vmm: &'a PagemapTracker,
    processes: &'a [SharingProcess],
) -> impl Iterator<Item = &'a dyn DirtyTracker> {
    let layers = processes.iter().flat_map(|process| &process.layers);
    std::iter::once(vmm as &dyn DirtyTracker).chain(layers.map(|layer| layer as &dyn DirtyTracker))
}

impl DirtyTracker for SharedRamTracker {
    fn begin_round(&self) {
        let followed = self.follow().err().map(|error| error.to_string());
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = followed;
    }

    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        self.check()?;
        let processes = self.processes();
        self.united.harvest(trackers(&self.vmm, &processes), block, within, limit, found)
    }

    fn look(
        &self,
        block: usize,
        within: PageRun,
        asof: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        self.check()?;
        let processes = self.processes();
        self.united.look(trackers(&self.vmm, &processes), block, within, asof, found)
    }

    fn looks_in_parts(&self) -> bool {
        true
    }
}
