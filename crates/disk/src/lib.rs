//! Disks as the engine sees them: what they are, and one round of one disk at either side.
//!
//! A disk is counted in pages of 4 KiB, as memory is, so that the same frames, codecs and channels
//! carry both. A disk whose size is no multiple of 4 KiB ends within its last page: whoever reads
//! fills up with zeros, whoever writes cuts off.
//!
//! Dirty blocks are larger than a page: their size is the granularity of the disk, a power of two
//! from 4 KiB to 1 MiB.

#![forbid(unsafe_code)]

mod choice;
mod granularity;

use std::fmt;

use godwit_units::{ByteCount, PageCount, PageRun};

pub use choice::{ChoiceError, DiskChoice, NotAllowed};
pub use granularity::{
    GranularityError, Writes, check_granularity, granularity_for, parse_granularity,
};

/// The finest granularity of dirty blocks.
pub const GRANULARITY_MIN: ByteCount = ByteCount(4 << 10);
/// The coarsest.
pub const GRANULARITY_MAX: ByteCount = ByteCount(1 << 20);
/// Where nothing is known of the guest's writes.
pub const GRANULARITY_UNKNOWN: ByteCount = ByteCount(64 << 10);

/// An error of whoever reads or writes a disk; its words name the disk, the offset and the cure.
pub type DiskError = Box<dyn std::error::Error + Send + Sync>;

/// A disk that moves along with its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// What both sides call it.
    pub name: String,
    /// Bytes that the guest sees.
    pub size: ByteCount,
}

impl Disk {
    /// All of it in pages, the last one perhaps in part.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        PageCount(self.size.0.div_ceil(godwit_units::PAGE_SIZE))
    }
}

/// What a stretch of a disk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Bytes that must be read.
    Data,
    /// Zeros, which need not be read: a hole, an unallocated or a discarded part, or zeros that
    /// were written as such.
    Zero,
}

/// A stretch of a disk and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where; never empty.
    pub run: PageRun,
    /// What.
    pub content: Content,
}

/// One round of one disk at the source: what is dirty in it, and the bytes as they are now. What
/// the guest writes after the round began belongs to the next one, whether these reads see it or
/// not.
pub trait DiskRound: Send {
    /// Dirty bytes of this round in whole blocks, as far as they are known beforehand.
    fn dirty(&self) -> Option<ByteCount>;

    /// The next stretch that is dirty in this round: in order, without overlap, none twice; `None`
    /// after the last one.
    ///
    /// # Errors
    /// When the machine can no longer tell.
    fn next(&mut self) -> Result<Option<Extent>, DiskError>;

    /// Asks for the bytes of `run`, at most 1 MiB. As many as [`Self::depth`] may be asked for
    /// before the first is taken.
    ///
    /// # Errors
    /// When the machine cannot be asked any more.
    fn submit(&mut self, run: PageRun) -> Result<(), DiskError>;

    /// How many may be under way.
    fn depth(&self) -> usize;

    /// Waits for the bytes that were asked for first and not yet taken, and fills `bytes` with
    /// them, which is as long as that run.
    ///
    /// # Errors
    /// When they cannot be read; says where.
    ///
    /// # Panics
    /// When nothing was asked for, or `bytes` has another length: a mistake of the caller.
    fn complete(&mut self, bytes: &mut [u8]) -> Result<(), DiskError>;
}

/// A disk as it is now, at either side. Others may write to it meanwhile: what is read of a stretch
/// that is being written is of no use to anybody.
///
/// ```
/// use godwit_disk::{Content, DiskError, DiskReader, Extent};
/// use godwit_units::PageRun;
///
/// /// A disk of zeros.
/// struct Empty;
///
/// impl DiskReader for Empty {
///     fn extents(&mut self, run: PageRun) -> Result<Vec<Extent>, DiskError> {
///         Ok(vec![Extent { run, content: Content::Zero }])
///     }
///
///     fn read(&mut self, _: &[PageRun], bytes: &mut [u8]) -> Result<(), DiskError> {
///         bytes.fill(0);
///         Ok(())
///     }
/// }
/// ```
pub trait DiskReader: Send {
    /// What `run` holds: stretches in order, without gaps and overlaps.
    ///
    /// # Errors
    /// When the machine cannot tell.
    fn extents(&mut self, run: PageRun) -> Result<Vec<Extent>, DiskError>;

    /// Reads all of `runs`, together at most 1 MiB, into `bytes`, one behind the other: as many at
    /// once as the disk takes.
    ///
    /// # Errors
    /// When they cannot be read; says where.
    fn read(&mut self, runs: &[PageRun], bytes: &mut [u8]) -> Result<(), DiskError>;
}

/// A disk at the destination.
pub trait DiskSink: Send {
    /// Writes `bytes`, whole pages, from the first page of `run` on. They may still be under way on
    /// return, in no order.
    ///
    /// # Errors
    /// When this or an earlier write failed.
    fn write(&mut self, run: PageRun, bytes: &[u8]) -> Result<(), DiskError>;

    /// Makes `run` read as zeros, with a hole where that is possible.
    ///
    /// # Errors
    /// As for [`Self::write`].
    fn zero(&mut self, run: PageRun) -> Result<(), DiskError>;

    /// Waits until everything is written, so that later writes cannot be overtaken. With `durable`
    /// it is also on stable storage.
    ///
    /// # Errors
    /// When a write failed.
    fn flush(&mut self, durable: bool) -> Result<(), DiskError>;
}

impl fmt::Debug for dyn DiskRound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiskRound")
    }
}

impl fmt::Debug for dyn DiskReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiskReader")
    }
}

impl fmt::Debug for dyn DiskSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiskSink")
    }
}
