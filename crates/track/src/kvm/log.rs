//! The tracker on KVM's dirty log: one bitmap a slot, fetched whole and cleared in parts.
//!
//! How it works (Documentation/virt/kvm/api.rst, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2): with manual
//! protection `KVM_GET_DIRTY_LOG` only reads; pages are cleared and write-protected again by
//! `KVM_CLEAR_DIRTY_LOG`, as many or few as its mask says. So a slot is fetched once a round, and
//! each segment is cleared just before it is sent: a page that is written between the two is sent
//! once, and vCPUs never wait for the protection of all memory at once.
//!
//! Invariants:
//! - A page is reported only after it has been protected again, and whoever reads its bytes does so
//!   later still.
//! - Nothing is cleared that was not fetched *and* is not reported: the mask holds those pages and
//!   no others, however the range is rounded to 64 pages.
//! - The pages that a harvest takes from one slot cost one clear (one for each GiB, so that the
//!   lock of KVM's page tables is not held for longer), wherever the slot lies in its block. The
//!   clear skips clean words at the price of reading them, which is nothing beside a second call.
//!
//! Without manual protection fetching clears; what was fetched and not yet asked for is kept here.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_memslots::Slot;
use godwit_units::{PageCount, PageIndex, PageRun};
use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
};

use super::{Logging, uapi};
use crate::collected::{Collected, Collectors};
use crate::slots::{BlockSlots, Part};
use crate::words::for_each_mask;
use crate::{AsOf, DirtyTracker, TrackError};

const BITS: u64 = 64;
/// Words of the log that one clear covers at the most: 1 GiB, as in QEMU (`clear-bitmap-shift`).
const CLEAR_WORDS: usize = 4096;

/// What this KVM can do, and so how the log is used.
///
/// ```
/// use std::os::fd::BorrowedFd;
///
/// use godwit_track::LogMode;
///
/// fn tell(vm: BorrowedFd<'_>) {
///     let initially_set = LogMode::offered(vm) == LogMode::ManualInitiallySet;
///     println!("to start costs the guest {}", if initially_set { "nothing" } else { "a pause" });
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogMode {
    /// Fetch and clear apart; at first all pages are dirty and none is protected, so that starting
    /// costs the guest nothing.
    ManualInitiallySet,
    /// Fetch and clear apart; starting protects all pages at once.
    Manual,
    /// Fetching clears (no KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2): a whole slot is protected at a time.
    ClearedByFetch,
}

impl fmt::Display for LogMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ManualInitiallySet => "KVM dirty log with manual protection, initially all set",
            Self::Manual => {
                "KVM dirty log with manual protection (fallback: this KVM has no initially-all-set \
                 log, so starting protects all memory at once)"
            }
            Self::ClearedByFetch => {
                "KVM dirty log cleared by fetching it (fallback: this KVM has no manual \
                 protection, so each round protects whole slots at once)"
            }
        })
    }
}

impl LogMode {
    /// The best mode that this VM's KVM offers.
    #[must_use]
    pub fn offered(vm: BorrowedFd<'_>) -> Self {
        let offered = uapi::check_extension(vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2);
        if offered & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE == 0 {
            Self::ClearedByFetch
        } else if offered & KVM_DIRTY_LOG_INITIALLY_SET == 0 {
            Self::Manual
        } else {
            Self::ManualInitiallySet
        }
    }

    fn flags(self) -> u32 {
        match self {
            Self::ManualInitiallySet => {
                KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET
            }
            Self::Manual => KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
            Self::ClearedByFetch => 0,
        }
    }
}

/// How many calls a tracker has made.
///
/// ```
/// use godwit_track::KvmLogTracker;
///
/// fn tell(tracker: &KvmLogTracker) {
///     let calls = tracker.calls();
///     println!("{} fetches, {} clears", calls.fetches, calls.clears);
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvmLogCalls {
    /// `KVM_GET_DIRTY_LOG`.
    pub fetches: u64,
    /// `KVM_CLEAR_DIRTY_LOG`.
    pub clears: u64,
}

/// Tracks what vCPUs write, by KVM's dirty log. Dropping it ends the logging.
///
/// ```
/// use std::os::fd::BorrowedFd;
///
/// use godwit_memslots::Slot;
/// use godwit_track::{DirtyTracker, KvmLogTracker, TrackError};
/// use godwit_units::PageCount;
///
/// /// `slots` are the slots of `vm`, which all show RAM block 0 of `pages` pages.
/// fn track(
///     vm: BorrowedFd<'_>,
///     pages: PageCount,
///     slots: &[Slot],
/// ) -> Result<Box<dyn DirtyTracker>, TrackError> {
///     // SAFETY: the VM keeps these slots for as long as it is tracked.
///     Ok(Box::new(unsafe { KvmLogTracker::start(vm, &[pages], slots) }?))
/// }
/// ```
#[derive(Debug)]
pub struct KvmLogTracker {
    logging: Logging,
    mode: LogMode,
    slots: BlockSlots,
    /// What was fetched, by slot.
    fetched: Vec<Mutex<Fetched>>,
    /// The number of the round; 0 as long as nobody has said that rounds begin.
    round: AtomicU64,
    collectors: Collectors,
    masks: Collectors,
    fetches: AtomicU64,
    clears: AtomicU64,
}

/// Pages of one slot that are known to be dirty and were not harvested since.
#[derive(Debug)]
struct Fetched {
    /// Plain words, as the kernel writes them.
    pages: Box<[u64]>,
    /// The round in which they were fetched.
    round: u64,
}

impl KvmLogTracker {
    /// Begins to log `slots` of RAM blocks of the sizes `blocks`, in the best mode that there is.
    ///
    /// # Errors
    /// When slots and blocks do not fit, or KVM refuses; no slot is logged then that was not
    /// before.
    ///
    /// # Safety
    /// As for [`KvmLogTracker::start_in`].
    pub unsafe fn start(
        vm: BorrowedFd<'_>,
        blocks: &[PageCount],
        slots: &[Slot],
    ) -> Result<Self, TrackError> {
        // SAFETY: one contract for both.
        unsafe { Self::start_in(LogMode::offered(vm), vm, blocks, slots) }
    }

    /// [`KvmLogTracker::start`] in the mode `mode`, which must be offered. All trackers of one VM
    /// must use the same mode, since it belongs to the VM.
    ///
    /// # Errors
    /// As [`KvmLogTracker::start`].
    ///
    /// # Safety
    /// The VM must have all of `slots`, with these numbers, frames, sizes and host addresses, for
    /// as long as the tracker lives: it changes their flags, and KVM writes a bit for each of their
    /// pages.
    pub unsafe fn start_in(
        mode: LogMode,
        vm: BorrowedFd<'_>,
        blocks: &[PageCount],
        slots: &[Slot],
    ) -> Result<Self, TrackError> {
        let slots = BlockSlots::new(blocks, slots)?;
        if mode != LogMode::ClearedByFetch {
            // Before the slots are logged: the log is all set only if this is known by then.
            uapi::enable_cap(vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, mode.flags().into()).map_err(
                |source| TrackError::Kvm {
                    call: "KVM_ENABLE_CAP for KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2",
                    source,
                },
            )?;
        }
        // SAFETY: by the contract of this function.
        let logging = unsafe { Logging::start(vm, slots.all())? };
        let fetched = slots.all().iter().map(|slot| {
            let pages = vec![0; slot.pages.0.div_ceil(BITS) as usize].into_boxed_slice();
            Mutex::new(Fetched { pages, round: 0 })
        });
        Ok(Self {
            logging,
            mode,
            fetched: fetched.collect(),
            slots,
            round: AtomicU64::new(0),
            collectors: Collectors::default(),
            masks: Collectors::default(),
            fetches: AtomicU64::new(0),
            clears: AtomicU64::new(0),
        })
    }

    /// How the log is used; printing it says what it fell back to, if so.
    #[must_use]
    pub fn mode(&self) -> LogMode {
        self.mode
    }

    /// The calls made so far.
    #[must_use]
    pub fn calls(&self) -> KvmLogCalls {
        KvmLogCalls {
            fetches: self.fetches.load(Ordering::Relaxed),
            clears: self.clears.load(Ordering::Relaxed),
        }
    }

    fn fetched(&self, slot: usize) -> MutexGuard<'_, Fetched> {
        // The words are valid whatever a panicking thread left: at worst a page is sent once more.
        self.fetched[slot].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Learns which pages of the slot are dirty now.
    fn fetch(&self, slot: usize, fetched: &mut Fetched) -> Result<(), TrackError> {
        let id = self.slots.all()[slot].id;
        let failed = |source| TrackError::KvmSlot { call: "KVM_GET_DIRTY_LOG", slot: id.0, source };
        self.fetches.fetch_add(1, Ordering::Relaxed);
        // Before the call: what is written during it may be missed, and belongs to the next round.
        fetched.round = self.round.load(Ordering::Acquire);
        if self.mode == LogMode::ClearedByFetch {
            // The kernel has forgotten what it told before.
            let mut now = vec![0; fetched.pages.len()];
            // SAFETY: the slot has as many pages as was promised to `start_in`, and `now` a bit for
            // each.
            unsafe { uapi::fetch_dirty_log(self.logging.vm(), id, &mut now) }.map_err(failed)?;
            fetched.pages.iter_mut().zip(now).for_each(|(known, now)| *known |= now);
            return Ok(());
        }
        // What was not cleared is told again.
        // SAFETY: as above; `pages` was made for this slot.
        unsafe { uapi::fetch_dirty_log(self.logging.vm(), id, &mut fetched.pages) }.map_err(failed)
    }

    /// Moves the dirty pages of `part` to `collected`, fetching them first if need be.
    fn collect(&self, part: Part, collected: &mut Collected<'_>) -> Result<(), TrackError> {
        let mut fetched = self.known(part.slot)?;
        collected.bitmap.merge_words(part.in_request.start, &fetched.pages, part.in_slot);
        clear_bits(&mut fetched.pages, part.in_slot);
        Ok(())
    }

    /// What is known of the slot in this round, fetched first if need be.
    fn known(&self, slot: usize) -> Result<MutexGuard<'_, Fetched>, TrackError> {
        let mut fetched = self.fetched(slot);
        let round = self.round.load(Ordering::Acquire);
        if round == 0 || fetched.round != round {
            self.fetch(slot, &mut fetched)?;
        }
        Ok(fetched)
    }

    /// Keeps what was collected from `part` for the next harvest.
    fn put_back(&self, part: Part, collected: &Collected<'_>) {
        let mut fetched = self.fetched(part.slot);
        collected.bitmap.for_each_run_in(part.in_request, |run| {
            let start = run.start.0 - part.in_request.start.0 + part.in_slot.start.0;
            set_bits(&mut fetched.pages, PageRun::new(start, run.count.0));
        });
    }

    /// Clears and protects the pages of `part` that were collected, and no others.
    fn clear(&self, part: Part, collected: &Collected<'_>) -> Result<(), TrackError> {
        let slot = &self.slots.all()[part.slot];
        // From the word that the part begins in; bits outside the part stay zero.
        let skip = part.in_slot.start.0 % BITS;
        let words = (skip + part.in_slot.count.0).div_ceil(BITS);
        let mut mask = self.masks.start(PageRun::new(0, words * BITS));
        mask.bitmap.merge(PageIndex(skip), &collected.bitmap, part.in_request);
        let base = part.in_slot.start.0 - skip;
        let mask = &mask.bitmap.words()[..words as usize];
        for (number, chunk) in mask.chunks(CLEAR_WORDS).enumerate() {
            let Some(first) = chunk.iter().position(|word| *word != 0) else { continue };
            let last = chunk.iter().rposition(|word| *word != 0).unwrap_or(first);
            let start = base + (number * CLEAR_WORDS + first) as u64 * BITS;
            // A multiple of 64, but for the last word of the slot (api.rst, KVM_CLEAR_DIRTY_LOG).
            let pages = ((last + 1 - first) as u64 * BITS).min(slot.pages.0 - start) as u32;
            self.clears.fetch_add(1, Ordering::Relaxed);
            uapi::clear_dirty_log(self.logging.vm(), slot.id, start, pages, &chunk[first..=last])
                .map_err(|source| TrackError::KvmSlot {
                call: "KVM_CLEAR_DIRTY_LOG",
                slot: slot.id.0,
                source,
            })?;
        }
        Ok(())
    }
}

impl DirtyTracker for KvmLogTracker {
    fn begin_round(&self) {
        self.round.fetch_add(1, Ordering::AcqRel);
    }

    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let mut collected = self.collectors.start(within);
        for part in self.slots.parts(block, within) {
            if let Err(error) = self.collect(part, &mut collected) {
                self.slots.parts(block, within).for_each(|part| self.put_back(part, &collected));
                return Err(error);
            }
        }
        let cut = collected.cut(limit);
        let beyond = self.slots.parts(block, within).filter_map(|part| part.from(cut));
        beyond.for_each(|part| self.put_back(part, &collected));
        let mut cleared = Ok(());
        if self.mode != LogMode::ClearedByFetch {
            let mut harvested = self.slots.parts(block, within).filter_map(|part| part.before(cut));
            cleared = harvested.try_for_each(|part| self.clear(part, &collected));
        }
        // Also after a failure: some of these pages may have been cleared, and a page too many does
        // no harm.
        let next = collected.report(cut, found);
        cleared.map(|()| next)
    }

    /// Now: fetches the log of every slot that shows some of `within`, so ask for whole blocks.
    fn look(
        &self,
        block: usize,
        within: PageRun,
        asof: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        let mut collected = self.collectors.start(within);
        for part in self.slots.parts(block, within) {
            let fetched = match asof {
                AsOf::Round => self.known(part.slot)?,
                AsOf::Now => {
                    let mut fetched = self.fetched(part.slot);
                    self.fetch(part.slot, &mut fetched)?;
                    fetched
                }
            };
            collected.bitmap.merge_words(part.in_request.start, &fetched.pages, part.in_slot);
        }
        collected.report(within.count.0, found);
        Ok(())
    }
}

fn clear_bits(words: &mut [u64], bits: PageRun) {
    for_each_mask(bits.start.0..bits.end().0, |word, mask| words[word] &= !mask);
}

fn set_bits(words: &mut [u64], bits: PageRun) {
    for_each_mask(bits.start.0..bits.end().0, |word, mask| words[word] |= mask);
}
