//! What holds a RAM block's bytes, and how they are reached: one trait, a kind in each file.
//!
//! A kind does not know the block's name or its size; [`RamBlock`](crate::RamBlock) keeps every
//! access within the block and says which block an error is about.

mod file;
mod huge;
mod process;

use std::fmt;
use std::io;
use std::path::Path;

pub use file::FileBacking;
pub use huge::huge_pool;
pub(crate) use huge::unreserved;
pub use process::ProcessBacking;

/// Where a block is in the page tables of the process that runs the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Wherever that process maps this file, shared.
    File {
        /// Its device number (stat(2)).
        device: u64,
        /// Its inode.
        inode: u64,
        /// Where the block begins in it, in bytes.
        offset: u64,
    },
    /// At one place of the process that it belongs to, which no other shares.
    Process {
        /// That process.
        pid: i32,
        /// The address of the block's first byte in it.
        address: u64,
    },
}

/// A file system with a limit, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// All it may hold.
    pub size: u64,
    /// What of that is free.
    pub free: u64,
}

/// Memory that holds a RAM block. Positions are in bytes from the block's beginning, and all that
/// are given are multiples of 4 KiB.
///
/// Threads of godwit use one at the same time, each on pages of its own, while the guest writes
/// where it likes.
pub trait Backing: fmt::Debug + Send + Sync {
    /// Fills `buffer` from byte `at` on. What was never written reads as zeros, and stays a hole
    /// where the kind has holes.
    ///
    /// # Errors
    /// What the kernel says.
    fn read(&self, at: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Writes `bytes` from byte `at` on.
    ///
    /// # Errors
    /// What the kernel says: no memory, or no huge page, is left.
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes the bytes from `at` to `end` read as zeros. A hole stays one.
    ///
    /// # Errors
    /// What the kernel says.
    fn zero(&self, at: u64, end: u64) -> io::Result<()>;

    /// Gives the memory of the bytes from `at` to `end` back, also where it is else kept allocated.
    ///
    /// # Errors
    /// What the kernel says; that it cannot be done where the kind has no holes.
    fn give_back(&self, at: u64, end: u64) -> io::Result<()> {
        let _ = (at, end);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The first byte from `at` on that may be other than zero, as far as `end`; `None` where there
    /// is none. What holds data must never be passed over.
    ///
    /// # Errors
    /// What the kernel says.
    fn data_from(&self, at: u64, end: u64) -> io::Result<Option<u64>>;

    /// Where the data that `at` lies in ends: at most the next hole, also when that is beyond
    /// `end`, up to which must be looked; `None`: there is no hole.
    ///
    /// # Errors
    /// What the kernel says.
    fn hole_from(&self, at: u64, end: u64) -> io::Result<Option<u64>>;

    /// The same without a look at anything beyond `end`, and in the same time however much data
    /// there is: up to the end of a small piece holes may count as data.
    ///
    /// # Errors
    /// What the kernel says.
    fn data_end(&self, at: u64, end: u64) -> io::Result<u64> {
        Ok(self.hole_from(at, end)?.unwrap_or(end).min(end))
    }

    /// Bytes of memory that hold it; of all that is in the same file, where there is one.
    ///
    /// # Errors
    /// What the kernel says.
    fn allocated(&self) -> io::Result<u64>;

    /// Where trackers find it.
    ///
    /// # Errors
    /// What the kernel says.
    fn place(&self) -> io::Result<Place>;

    /// The file that holds it, as far as it has a name.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// Bytes of its huge pages, where it comes in these only (hugetlbfs): they are protected as a
    /// whole.
    fn huge_page(&self) -> Option<u64> {
        None
    }

    /// The file system with a limit that holds it.
    fn space(&self) -> Option<Space> {
        None
    }
}

/// Bytes that are looked at or overwritten together.
const PIECE: usize = 64 << 10;
static ZEROS: [u8; PIECE] = [0; PIECE];

/// Overwrites the bytes from `at` to `end` with zeros.
fn write_zeros(backing: &dyn Backing, mut at: u64, end: u64) -> io::Result<()> {
    while at < end {
        let length = (end - at).min(PIECE as u64);
        backing.write(at, &ZEROS[..length as usize])?;
        at += length;
    }
    Ok(())
}
