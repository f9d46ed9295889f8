//! Digests of RAM blocks, chunk by chunk on all cores.
//!
//! Both sides compute them while the guest is stopped on both. A chunk without data has the digest
//! of zeros, which is not computed again.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

use godwit_memory::{DataHint, MemoryError, RamBlock};
use godwit_units::{PAGE_SIZE, PageBuffer, PageCount, PageIndex, PageRun};
use godwit_wire::digest;

use crate::Interrupt;
use crate::threads::processors;

/// Pages in a chunk: 1 MiB, which fits a core's second-level cache.
pub(crate) const CHUNK_PAGES: u64 = 256;
const CHUNK_BYTES: usize = (CHUNK_PAGES * PAGE_SIZE) as usize;
/// More threads than this do not read memory faster.
const THREADS_LIMIT: usize = 8;
/// Chunks that tell how fast digests are: 64 MiB.
const SAMPLE: usize = 64;
/// Extents of data among which the sample is looked for, in each block.
const EXTENTS_LOOKED_AT: usize = 64;

/// How many chunks a block of `pages` has.
pub(crate) fn chunks(pages: PageCount) -> usize {
    pages.0.div_ceil(CHUNK_PAGES) as usize
}

fn zero_digest() -> u128 {
    static DIGEST: OnceLock<u128> = OnceLock::new();
    *DIGEST.get_or_init(|| digest(&vec![0; CHUNK_BYTES]))
}

fn chunk_digest(
    block: &RamBlock,
    chunk: usize,
    buffer: &mut [u8],
    zeroed: &Zeroed<'_>,
) -> Result<u128, MemoryError> {
    let start = chunk as u64 * CHUNK_PAGES;
    let run = PageRun::new(start, CHUNK_PAGES.min(block.pages().0 - start));
    if run.count.0 == CHUNK_PAGES && !block.has_data(run)? {
        return Ok(zero_digest());
    }
    let buffer = &mut buffer[..run.count.bytes().0 as usize];
    block.read(run.start, buffer)?;
    zeroed(run, &mut |page| {
        let at = PageCount(page.0 - run.start.0).bytes().0 as usize;
        buffer[at..at + PAGE_SIZE as usize].fill(0);
    });
    Ok(digest(buffer))
}

/// How long digests of a page take, as measured on a part of `blocks` that has data; nothing where
/// there is none.
pub(crate) fn cost_of_page(blocks: &[RamBlock]) -> Result<Duration, MemoryError> {
    let mut longest: Option<(&RamBlock, PageRun)> = None;
    for block in blocks {
        for run in block.data(block.all(), &mut DataHint::default()).take(EXTENTS_LOOKED_AT) {
            let run = run?;
            if longest.is_none_or(|(_, other)| other.count < run.count) {
                longest = Some((block, run));
            }
        }
    }
    let Some((block, run)) = longest else { return Ok(Duration::ZERO) };
    let first = (run.start.0 / CHUNK_PAGES) as usize;
    let sample = first..(first + SAMPLE).min(chunks(block.pages()));
    let pages = sample.len() as u64 * CHUNK_PAGES;
    let began = Instant::now();
    digests(block, sample, &Interrupt::default(), |_, _| {})?;
    Ok(began.elapsed().div_f64(pages as f64))
}

/// Calls its second argument with the pages of a run that count as zero whatever they hold.
type Zeroed<'a> = dyn Fn(PageRun, &mut dyn FnMut(PageIndex)) + Sync + 'a;

/// The digests of the chunks `wanted` of `block`, in order, where the pages that `zeroed` names
/// count as zero; `None` if it was interrupted.
pub(crate) fn digests(
    block: &RamBlock,
    wanted: Range<usize>,
    interrupt: &Interrupt,
    zeroed: impl Fn(PageRun, &mut dyn FnMut(PageIndex)) + Sync,
) -> Result<Option<Vec<u128>>, MemoryError> {
    /// Chunks a thread takes at once.
    const BATCH: usize = 16;
    let total = wanted.len();
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<(usize, Vec<u128>)>, MemoryError> {
        let mut buffer = PageBuffer::new(PageCount(CHUNK_PAGES));
        let mut done = Vec::new();
        loop {
            let first = next.fetch_add(BATCH, Ordering::Relaxed);
            if first >= total || interrupt.is_raised() {
                return Ok(done);
            }
            let batch = first..total.min(first + BATCH);
            let digests: Result<Vec<u128>, MemoryError> = batch
                .map(|i| chunk_digest(block, wanted.start + i, &mut buffer, &zeroed))
                .collect();
            done.push((first, digests?));
        }
    };
    let threads = processors();
    let threads = threads.min(THREADS_LIMIT).min(total.div_ceil(BATCH));
    let parts = std::thread::scope(|scope| {
        // With fewer threads than there are processors it only takes longer.
        let other = |_| Builder::new().name("digests".to_owned()).spawn_scoped(scope, work);
        let others: Vec<_> = (1..threads).map_while(|number| other(number).ok()).collect();
        let mut parts = vec![work()];
        for other in others {
            parts.push(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        parts
    });
    let mut result = vec![0; total];
    let mut computed = 0;
    for part in parts {
        for (first, digests) in part? {
            result[first..first + digests.len()].copy_from_slice(&digests);
            computed += digests.len();
        }
    }
    Ok((computed == total).then_some(result))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cancel;

    /// Two chunks and a half: data in the first and the last, and none between them.
    fn block() -> RamBlock {
        let block =
            RamBlock::anonymous("ram", PageCount(2 * CHUNK_PAGES + CHUNK_PAGES / 2)).unwrap();
        block.write(PageIndex(7), &[1; PAGE_SIZE as usize]).unwrap();
        block.write(PageIndex(2 * CHUNK_PAGES + 3), &[2; PAGE_SIZE as usize]).unwrap();
        block
    }

    fn computed(
        block: &RamBlock,
        wanted: Range<usize>,
        zeroed: impl Fn(PageRun, &mut dyn FnMut(PageIndex)) + Sync,
    ) -> Vec<u128> {
        digests(block, wanted, &Interrupt::default(), zeroed).unwrap().unwrap()
    }

    fn bytes(block: &RamBlock, start: u64, pages: u64) -> Vec<u8> {
        let mut bytes = vec![0; PageCount(pages).bytes().0 as usize];
        block.read(PageIndex(start), &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_digest_is_that_of_its_chunks_bytes() {
        let block = block();
        assert_eq!(chunks(block.pages()), 3);
        let expected = [
            digest(&bytes(&block, 0, CHUNK_PAGES)),
            digest(&vec![0; CHUNK_BYTES]),
            // The last chunk ends with its block.
            digest(&bytes(&block, 2 * CHUNK_PAGES, CHUNK_PAGES / 2)),
        ];
        assert_eq!(computed(&block, 0..3, |_, _| {}), expected);
        assert_eq!(computed(&block, 1..3, |_, _| {}), expected[1..]);
        assert_eq!(computed(&block, 1..1, |_, _| {}), []);
    }

    #[test]
    fn a_bit_anywhere_in_a_block_shows_in_the_digest_of_its_chunk_alone() {
        let (one, other) = (block(), block());
        other.write(PageIndex(2 * CHUNK_PAGES + CHUNK_PAGES / 2 - 1), &[0x80]).unwrap();
        let (one, other) = (computed(&one, 0..3, |_, _| {}), computed(&other, 0..3, |_, _| {}));
        assert_eq!(one[..2], other[..2]);
        assert_ne!(one[2], other[2]);
    }

    #[test]
    fn many_chunks_come_in_their_order_whoever_digests_them() {
        let count = 40;
        let block = RamBlock::anonymous("ram", PageCount(count * CHUNK_PAGES)).unwrap();
        for chunk in 0..count {
            block.write(PageIndex(chunk * CHUNK_PAGES), &[1 + chunk as u8; 64]).unwrap();
        }
        let found = computed(&block, 0..count as usize, |_, _| {});
        let expected: Vec<u128> = (0..count)
            .map(|chunk| digest(&bytes(&block, chunk * CHUNK_PAGES, CHUNK_PAGES)))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn who_is_interrupted_has_no_digests() {
        let cancel = Cancel::default();
        cancel.cancel();
        let found = digests(&block(), 0..3, &Interrupt::new(&cancel), |_, _| {});
        assert_eq!(found.unwrap(), None);
    }

    #[test]
    fn pages_that_count_as_zero_do_so_whatever_they_hold() {
        let block = block();
        let zeroed = |run: PageRun, zero: &mut dyn FnMut(PageIndex)| {
            [7, 2 * CHUNK_PAGES + 3]
                .map(PageIndex)
                .into_iter()
                .filter(|page| (run.start..run.end()).contains(page))
                .for_each(zero);
        };
        let zeros = digest(&vec![0; CHUNK_BYTES]);
        let half = digest(&vec![0; CHUNK_BYTES / 2]);
        assert_eq!(computed(&block, 0..3, zeroed), [zeros, zeros, half]);
    }

    #[test]
    fn a_page_costs_time_only_where_there_is_data() {
        let empty = RamBlock::anonymous("ram", PageCount(CHUNK_PAGES)).unwrap();
        assert_eq!(cost_of_page(&[empty]).unwrap(), Duration::ZERO);
        assert!(cost_of_page(&[block()]).unwrap() > Duration::ZERO);
    }
}
