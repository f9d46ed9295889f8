//! With the guest running at the destination: whether the source's memory, where nobody writes any
//! more, holds what was sent of it.
//!
//! What was sent was compared with what the destination holds before it could run. That leaves what
//! was written and never sent, because nobody reported it. All memory is read once more for that,
//! when it keeps nobody waiting.
//!
//! A page that is a hole here may have been sent: its content was given back meanwhile, and whoever
//! gave it back does not ask for it. So holes are not compared. A coarse look names small holes as
//! data, so a page that differs and is zero is looked at once more, alone.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use godwit_balloon::FreeHints;
use godwit_codec::is_zero;
use godwit_fingerprints::Key;
use godwit_memory::{MemoryError, RamBlock};
use godwit_units::{PAGE_SIZE, PageBuffer, PageCount, PageIndex, PageRun};

use super::owned::Owned;
use crate::EngineError;
use crate::threads::processors;

/// Pages read at once, 1 MiB: each read of another process costs the kernel a look at it, and few
/// pages are looked up at once (docs/benchmarks.md).
const READ: u64 = 256;
/// More threads than this do not read memory faster.
const THREADS_LIMIT: usize = 8;

/// Compares all memory of `ram` with what was sent of `segments`, but for pages that were left out
/// because the guest said that they are `free`. What was missed, if anything.
pub(super) fn look_back(
    ram: &[RamBlock],
    segments: &[Owned],
    key: &Key,
    free: Option<&FreeHints>,
) -> Result<Option<EngineError>, EngineError> {
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    let work = || -> Result<(), MemoryError> {
        let mut pages = PageBuffer::new(PageCount(READ));
        while let Some(owned) = segments.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = differing(ram, owned, key, free, &mut pages)?;
            missed.lock().unwrap_or_else(PoisonError::into_inner).extend(found);
        }
        Ok(())
    };
    let threads = processors();
    let threads = threads.min(THREADS_LIMIT).min(segments.len());
    std::thread::scope(|scope| {
        // With fewer threads than there are processors it only takes longer.
        let other = |_| Builder::new().name("look back".to_owned()).spawn_scoped(scope, work);
        let others: Vec<_> = (1..threads).map_while(|number| other(number).ok()).collect();
        let mut done = work();
        for other in others {
            let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done = done.and(other);
        }
        done
    })?;
    let mut missed = missed.into_inner().unwrap_or_else(PoisonError::into_inner);
    missed.sort_unstable();
    Ok(missed.first().map(|(block, page)| EngineError::Missed {
        pages: PageCount(missed.len() as u64),
        block: ram[*block].name().to_owned(),
        offset: PageIndex(*page).offset(),
    }))
}

/// The pages of `owned` that hold something else than what was sent, with the number of their
/// block.
fn differing(
    ram: &[RamBlock],
    owned: &Owned,
    key: &Key,
    free: Option<&FreeHints>,
    pages: &mut [u8],
) -> Result<Vec<(usize, u64)>, MemoryError> {
    let segment = owned.segment();
    let Some(sent) = owned.fingerprints() else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for data in ram[segment.block].data_coarse(segment.run) {
        let data = data?;
        let mut at = data.start.0;
        while at < data.end().0 {
            let count = READ.min(data.end().0 - at);
            let pages = &mut pages[..PageCount(count).bytes().0 as usize];
            ram[segment.block].read(PageIndex(at), pages)?;
            for (page, bytes) in (at..).zip(pages.chunks_exact(PAGE_SIZE as usize)) {
                let same = match sent.print(PageIndex(page)) {
                    Some(sent) => key.page(bytes) == sent,
                    // Nothing was sent: it is a hole at the destination.
                    None => is_zero(bytes),
                };
                let is_exact = same || is_zero(bytes) && is_hole(&ram[segment.block], page)?;
                if !is_exact {
                    found.push((segment.block, page));
                }
            }
            at += count;
        }
    }
    if let (Some(free), false) = (free, found.is_empty()) {
        let mut skipped = std::collections::BTreeSet::new();
        free.skipped(segment.block, segment.run, |page| {
            skipped.insert(page.0);
        });
        found.retain(|(_, page)| !skipped.contains(page));
    }
    Ok(found)
}

/// Whether `page` holds nothing, not even zeros.
pub(super) fn is_hole(block: &RamBlock, page: u64) -> Result<bool, MemoryError> {
    Ok(block.data_coarse(PageRun::new(page, 1)).next().transpose()?.is_none())
}
