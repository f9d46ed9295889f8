//! A look at a guest without migrating it: how much memory it holds and how fast it dirties it.
//!
//! Writes are tracked for a few seconds, which costs the guest a fault for each page that it
//! writes, and nothing when it is over. All pages are made clean once; looks at growing intervals
//! give the curve of dirty pages over time, from which working sets and their rates can be told.

use std::time::{Duration, Instant};

use godwit_codec::{BLOCK_LEN, Codec, Compressor, is_zero, worth};
use godwit_memory::{DataHint, RamBlock};
use godwit_units::{ByteCount, PAGE_SIZE, PageCount, PageRun};
use serde::{Deserialize, Serialize};

use crate::vm::SourceVm;
use crate::{Cancel, EngineError};

/// The first look; each one after it comes half as late again.
const FIRST: Duration = Duration::from_millis(20);
const GROWTH: f64 = 1.5;
/// Pages read to tell how many are zero, at the most.
const SAMPLED: u64 = 16_384;

/// What was seen.
///
/// ```
/// use godwit_engine::measure::Measured;
///
/// /// Pages that the guest makes dirty each second, as last seen.
/// fn dirty_rate(measured: &Measured) -> Option<f64> {
///     measured.dirty.last().map(|(seconds, pages)| *pages as f64 / seconds)
/// }
/// let measured = Measured { dirty: vec![(0.5, 100)], ..Measured::default() };
/// assert_eq!(dirty_rate(&measured), Some(200.0));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// All memory, in bytes.
    pub memory_bytes: u64,
    /// Of it, what holds data that would be sent: neither holes nor zeros, as far as a sample
    /// tells.
    pub data_bytes: u64,
    /// What LZ4 makes of a byte of that, in a sample; 1 where it makes nothing smaller.
    pub compressed: f64,
    /// Time since all was clean, in seconds, and pages dirty then.
    pub dirty: Vec<(f64, u64)>,
    /// The least time it took to count the dirty pages, in seconds: the last synchronisation, with
    /// the guest stopped, costs as much.
    pub look_seconds: f64,
    /// vCPUs.
    pub vcpus: usize,
    /// Whether the guest's writes can be governed.
    #[serde(default)]
    pub can_govern: bool,
}

/// Tracks `vm` for about `time`.
///
/// # Errors
/// When it cannot be tracked, or `cancel` was wished. The guest is as before.
///
/// ```
/// use std::time::Duration;
/// use godwit_engine::vm::SourceVm;
/// use godwit_engine::{Cancel, EngineError};
///
/// fn data(vm: &mut dyn SourceVm) -> Result<u64, EngineError> {
///     let measured =
///         godwit_engine::measure::measure(vm, Duration::from_secs(2), &Cancel::default())?;
///     Ok(measured.data_bytes)
/// }
/// ```
pub fn measure(
    vm: &mut dyn SourceVm,
    time: Duration,
    cancel: &Cancel,
) -> Result<Measured, EngineError> {
    let ram = vm.ram();
    let tracker = vm.start_tracking().map_err(EngineError::Vm)?;
    tracker.begin_round();
    for (number, block) in ram.iter().enumerate() {
        tracker.harvest(number, block.all(), PageCount::ZERO, &mut |_| {})?;
    }
    let began = Instant::now();
    let mut measured = Measured::default();
    if let Some(brake) = vm.brake() {
        (measured.vcpus, measured.can_govern) = (brake.vcpus(), brake.cannot_govern().is_none());
    }
    let mut next = FIRST;
    while next <= time {
        loop {
            if cancel.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            let left = next.saturating_sub(began.elapsed());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(crate::limits::TICK));
        }
        let at = began.elapsed();
        let mut dirty = PageCount::ZERO;
        for (number, block) in ram.iter().enumerate() {
            dirty += tracker.count(number, block.all())?;
        }
        let cost = began.elapsed().saturating_sub(at);
        let least = if measured.look_seconds == 0.0 { f64::MAX } else { measured.look_seconds };
        measured.look_seconds = least.min(cost.as_secs_f64());
        measured.dirty.push((at.as_secs_f64(), dirty.0));
        next = next.mul_f64(GROWTH).max(at + cost * 4);
    }
    drop(tracker);
    let memory: PageCount = ram.iter().map(RamBlock::pages).sum();
    measured.memory_bytes = memory.bytes().0;
    let data = data(&ram)?;
    (measured.data_bytes, measured.compressed) = (data.bytes.0, data.compressed);
    Ok(measured)
}

/// What would be sent.
struct Data {
    bytes: ByteCount,
    compressed: f64,
}

/// What holds data: of the pages that the files have, the share that is not zero in a sample; and
/// how far that compresses.
fn data(ram: &[RamBlock]) -> Result<Data, EngineError> {
    let mut present = 0;
    for block in ram {
        for run in block.data(block.all(), &mut DataHint::default()) {
            present += run?.count.0;
        }
    }
    let step = (present / SAMPLED).max(1);
    let (mut number, mut sampled, mut full) = (0, 0u64, 0u64);
    let mut bytes = vec![0; PAGE_SIZE as usize];
    let mut compressor = Compressor::new();
    let (mut batch, mut room) = (Vec::new(), vec![0; BLOCK_LEN]);
    let (mut before, mut after) = (0u64, 0u64);
    for block in ram {
        for run in block.data(block.all(), &mut DataHint::default()) {
            let run = run?;
            let mut offset = (step - number % step) % step;
            while offset < run.count.0 {
                block.read(PageRun::new(run.start.0 + offset, 1).start, &mut bytes)?;
                sampled += 1;
                if !is_zero(&bytes) {
                    full += 1;
                    batch.extend_from_slice(&bytes);
                }
                if batch.len() == BLOCK_LEN {
                    let room = &mut room[..worth(BLOCK_LEN)];
                    let made =
                        compressor.compress(Codec::Lz4 { acceleration: 1 }, &[&batch], room)?;
                    before += batch.len() as u64;
                    after += made.unwrap_or(batch.len()) as u64;
                    batch.clear();
                }
                offset += step;
            }
            number += run.count.0;
        }
    }
    let share = full as f64 / sampled.max(1) as f64;
    let compressed = if before == 0 { 1.0 } else { after as f64 / before as f64 };
    let bytes = ByteCount((PageCount(present).bytes().0 as f64 * share) as u64);
    Ok(Data { bytes, compressed })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_SIZE as usize;

    /// Bytes that nothing makes smaller.
    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    fn block(name: &str, pages: u64) -> RamBlock {
        RamBlock::anonymous(name, PageCount(pages)).unwrap()
    }

    #[test]
    fn data_is_neither_holes_nor_zeros() {
        let (one, other) = (block("one", 4096), block("other", 512));
        // 60 pages of which 20 are zero; 20 more in another block.
        one.write(PageRun::new(100, 1).start, &[7; 40 * PAGE]).unwrap();
        one.write(PageRun::new(3000, 1).start, &[0; 20 * PAGE]).unwrap();
        other.write(PageRun::new(5, 1).start, &[9; 20 * PAGE]).unwrap();
        let found = data(&[one, other]).unwrap();
        assert_eq!(found.bytes, PageCount(60).bytes());
        assert!(found.compressed < 0.1, "{}", found.compressed);
    }

    #[test]
    fn what_nothing_makes_smaller_is_sent_as_it_is() {
        let block = block("noise", 512);
        block.write(PageRun::new(0, 1).start, &noise(128 * PAGE)).unwrap();
        let found = data(std::slice::from_ref(&block)).unwrap();
        assert_eq!((found.bytes, found.compressed), (PageCount(128).bytes(), 1.0));
        // Half of it noise, half of it next to nothing.
        block.write(PageRun::new(200, 1).start, &[7; 128 * PAGE]).unwrap();
        let found = data(&[block]).unwrap();
        assert_eq!(found.bytes, PageCount(256).bytes());
        assert!((0.5..0.6).contains(&found.compressed), "{}", found.compressed);
    }

    #[test]
    fn a_guest_without_data_has_none() {
        let found = data(&[block("ram", 64)]).unwrap();
        assert_eq!((found.bytes, found.compressed), (ByteCount::ZERO, 1.0));
    }

    #[test]
    fn of_much_memory_a_part_is_read() {
        let block = block("ram", 4 * SAMPLED);
        // Of each four pages the last is zero, and of the sample every page is a third.
        let mut pages = vec![7; 4 * PAGE];
        pages[3 * PAGE..].fill(0);
        let many = pages.repeat(1024);
        let pieces = 3 * SAMPLED / 4096;
        for piece in 0..pieces {
            block.write(PageRun::new(piece * 4096, 1).start, &many).unwrap();
        }
        let found = data(&[block]).unwrap();
        assert_eq!(found.bytes, PageCount(pieces * 4096 * 3 / 4).bytes());
    }
}
