//! Memory of another process, which no file holds: what a VMM has from mmap(2) with MAP_ANONYMOUS.
//!
//! It is read and written by process_vm_readv(2) and process_vm_writev(2), one copy each: without a
//! mapping of our own, and without a byte of ours in the process. What was never touched is known
//! from its page tables, and is neither read, which would fill it, nor written. What is written
//! comes in huge pages where the process would have them.
//!
//! Invariant: nothing is read from or written to another process than the one that was opened: a
//! number that the kernel has given to another since is found out first.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use godwit_units::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};

use super::{Backing, Place, write_zeros};
use crate::pagemap::{Looked, PageRegion, scan};

/// Regions asked for in one scan.
const REGIONS: usize = 64;

/// Private memory of a process.
#[derive(Debug)]
pub struct ProcessBacking {
    pid: i32,
    pidfd: OwnedFd,
    /// Of this process's memory for ever, whoever has its number later.
    pagemap: File,
    address: u64,
    /// Bytes.
    size: u64,
}

/// The two calls, which differ in direction.
#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

impl ProcessBacking {
    /// The `size` bytes at `address` of process `pid`, both multiples of 4 KiB. Whether anything is
    /// mapped there the first access finds out.
    ///
    /// # Errors
    /// When there is no such process, or its memory may not be looked at.
    ///
    /// ```
    /// use godwit_memory::{Backing, ProcessBacking};
    /// use godwit_units::{PageBuffer, PageCount};
    ///
    /// let mut memory = PageBuffer::new(PageCount(1));
    /// memory.fill(7);
    /// let own = std::process::id().cast_signed();
    /// let backing = ProcessBacking::open(own, memory.as_ptr().addr() as u64, 4096)?;
    /// let mut bytes = [0; 4096];
    /// backing.read(0, &mut bytes)?;
    /// assert_eq!(bytes, [7; 4096]);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn open(pid: i32, address: u64, size: u64) -> io::Result<Self> {
        let whole = address.is_multiple_of(PAGE_SIZE) && size.is_multiple_of(PAGE_SIZE);
        let number = Pid::from_raw(pid).filter(|_| whole && address.checked_add(size).is_some());
        let number = number.ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        let backing = Self { pid, pidfd, pagemap, address, size };
        // The number may have changed hands between the two.
        backing.check_alive()?;
        Ok(backing)
    }

    fn check_alive(&self) -> io::Result<()> {
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        match rustix::event::poll(&mut ended, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? {
            0 => Ok(()),
            _ => Err(rustix::io::Errno::SRCH.into()),
        }
    }

    /// Moves `length` bytes between `local` and byte `at`.
    ///
    /// # Safety
    /// `local` must be valid for `length` bytes: for writes by the kernel where it is a read.
    unsafe fn copy(
        &self,
        direction: Direction,
        mut at: u64,
        mut local: *mut u8,
        mut length: usize,
    ) -> io::Result<()> {
        self.check_alive()?;
        while length > 0 {
            let own = libc::iovec { iov_base: local.cast(), iov_len: length };
            let remote = self.address + at;
            let theirs = libc::iovec {
                iov_base: std::ptr::without_provenance_mut(remote as usize),
                iov_len: length,
            };
            // SAFETY: one vector each, of which `own` is valid as the caller promises; the other is
            // only an address to the kernel, which checks it.
            let moved = unsafe {
                match direction {
                    Direction::Read => libc::process_vm_readv(self.pid, &own, 1, &theirs, 1, 0),
                    Direction::Write => libc::process_vm_writev(self.pid, &own, 1, &theirs, 1, 0),
                }
            };
            let Ok(moved) = usize::try_from(moved) else {
                let error = io::Error::last_os_error();
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                return Err(error);
            };
            if moved == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // SAFETY: the kernel moved at most `length` bytes, for which `local` is valid.
            local = unsafe { local.add(moved) };
            (at, length) = (at + moved as u64, length - moved);
        }
        Ok(())
    }

    /// Hands the parts of `at..end` that hold bytes to `found`, in order, as long as that asks for
    /// more.
    fn filled(
        &self,
        mut at: u64,
        end: u64,
        found: &mut dyn FnMut(u64, u64) -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut regions = [PageRegion::default(); REGIONS];
        while at < end {
            let range = self.address + at..self.address + end;
            let (count, walked) =
                scan(self.pagemap.as_fd(), Looked::Filled, range, 0, 0, &mut regions)?;
            for region in &regions[..count] {
                if !found(region.start - self.address, region.end - self.address)? {
                    return Ok(());
                }
            }
            // The memory of a process that has ended is nobody's.
            if walked <= self.address + at {
                return Err(rustix::io::Errno::SRCH.into());
            }
            at = walked - self.address;
        }
        Ok(())
    }
}

impl Backing for ProcessBacking {
    fn read(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        // SAFETY: the buffer is borrowed exclusively, and any bytes are valid in it.
        unsafe { self.copy(Direction::Read, at, buffer.as_mut_ptr(), buffer.len()) }
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: process_vm_writev(2) only reads what is ours.
        unsafe { self.copy(Direction::Write, at, bytes.as_ptr().cast_mut(), bytes.len()) }
    }

    fn zero(&self, at: u64, end: u64) -> io::Result<()> {
        self.filled(at, end, &mut |from, to| write_zeros(self, from, to).map(|()| true))
    }

    fn data_from(&self, at: u64, end: u64) -> io::Result<Option<u64>> {
        if at >= end {
            return Ok(None);
        }
        // No further than the first page of it.
        let (mut first, range) = ([PageRegion::default()], self.address + at..self.address + end);
        let (count, walked) =
            scan(self.pagemap.as_fd(), Looked::Filled, range.clone(), 0, 1, &mut first)?;
        match count {
            0 if walked < range.end => Err(rustix::io::Errno::SRCH.into()),
            0 => Ok(None),
            _ => Ok(Some(first[0].start - self.address)),
        }
    }

    fn hole_from(&self, at: u64, end: u64) -> io::Result<Option<u64>> {
        let mut reached = at;
        self.filled(at, end, &mut |from, to| {
            let goes_on = from == reached;
            reached = if goes_on { to } else { reached };
            Ok(goes_on)
        })?;
        Ok(Some(reached))
    }

    fn allocated(&self) -> io::Result<u64> {
        let mut bytes = 0;
        self.filled(0, self.size, &mut |from, to| {
            bytes += to - from;
            Ok(true)
        })?;
        Ok(bytes)
    }

    fn place(&self) -> io::Result<Place> {
        Ok(Place::Process { pid: self.pid, address: self.address })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::{Child, Command, Stdio};

    use godwit_units::{PageCount, PageIndex, PageRun};

    use super::*;
    use crate::{DataHint, RamBlock};

    /// Anonymous memory of this process, which is read as another's would be.
    struct Memory {
        base: *mut u8,
        bytes: usize,
    }

    impl Memory {
        fn new(pages: u64) -> Self {
            use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
            let (bytes, access) =
                ((pages * PAGE_SIZE) as usize, ProtFlags::READ | ProtFlags::WRITE);
            let at = std::ptr::null_mut();
            // SAFETY: at a place of the kernel's choice.
            let base = unsafe { mmap_anonymous(at, bytes, access, MapFlags::PRIVATE) }.unwrap();
            // Small pages, so that a hole is a page.
            // SAFETY: advice changes no bytes.
            unsafe {
                rustix::mm::madvise(base, bytes, rustix::mm::Advice::LinuxNoHugepage).unwrap();
            }
            Self { base: base.cast(), bytes }
        }

        fn block(&self) -> RamBlock {
            let own = std::process::id().cast_signed();
            let size = self.bytes as u64;
            let backing = ProcessBacking::open(own, self.base as u64, size).unwrap();
            RamBlock::new("mem", Box::new(backing), PageCount(size / PAGE_SIZE))
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: mapped in `new`, and nobody has a reference into it.
            let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
        }
    }

    fn data(block: &RamBlock) -> Vec<(u64, u64)> {
        let mut hint = DataHint::default();
        let extents = block.data(block.all(), &mut hint).map(Result::unwrap);
        extents.map(|run| (run.start.0, run.count.0)).collect()
    }

    #[test]
    fn what_was_never_touched_is_a_hole() {
        let memory = Memory::new(64);
        let block = memory.block();
        assert_eq!((data(&block), block.allocated().unwrap()), (vec![], PageCount(0)));
        block.write(PageIndex(3), &[7; 2 * 4096]).unwrap();
        block.write(PageIndex(60), &[8; 4 * 4096]).unwrap();
        assert_eq!(data(&block), [(3, 2), (60, 4)]);
        assert_eq!(block.allocated().unwrap(), PageCount(6));
        assert!(block.has_data(PageRun::new(4, 20)).unwrap());
        assert!(!block.has_data(PageRun::new(5, 55)).unwrap());
        let mut bytes = [1; 3 * 4096];
        block.read(PageIndex(4), &mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[4096], bytes[8192]), (7, 0, 0));
        // What was read is the kernel's zero page, and a hole still.
        assert_eq!(data(&block), [(3, 2), (60, 4)]);
    }

    #[test]
    fn zeroing_writes_only_where_there_is_something() {
        let memory = Memory::new(64);
        let block = memory.block();
        block.write(PageIndex(3), &[7; 4 * 4096]).unwrap();
        block.zero(PageRun::new(4, 60)).unwrap();
        let mut bytes = [1; 5 * 4096];
        block.read(PageIndex(3), &mut bytes).unwrap();
        assert!(bytes[..4096].iter().all(|byte| *byte == 7));
        assert!(bytes[4096..].iter().all(|byte| *byte == 0));
        assert_eq!(block.allocated().unwrap(), PageCount(4));
    }

    #[test]
    fn more_data_than_a_scan_reports_at_once_is_found() {
        let memory = Memory::new(1024);
        let block = memory.block();
        let written: Vec<u64> = (0..1024).step_by(3).collect();
        for page in &written {
            block.write(PageIndex(*page), &[1; 4096]).unwrap();
        }
        assert_eq!(data(&block), written.iter().map(|page| (*page, 1)).collect::<Vec<_>>());
        assert_eq!(block.allocated().unwrap(), PageCount(written.len() as u64));
    }

    fn sleeper() -> Child {
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // It runs when it answers.
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        child
    }

    #[test]
    fn a_process_that_has_ended_is_neither_read_nor_written() {
        let mut child = sleeper();
        let pid = child.id().cast_signed();
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let heap = maps.lines().find(|line| line.ends_with("[heap]")).unwrap();
        let start = u64::from_str_radix(heap.split('-').next().unwrap(), 16).unwrap();
        let backing = ProcessBacking::open(pid, start, PAGE_SIZE).unwrap();
        backing.read(0, &mut [0; 4096]).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let gone = Some(rustix::io::Errno::SRCH.raw_os_error());
        assert_eq!(backing.read(0, &mut [0; 4096]).unwrap_err().raw_os_error(), gone);
        assert_eq!(backing.write(0, &[0; 4096]).unwrap_err().raw_os_error(), gone);
        assert!(ProcessBacking::open(pid, start, PAGE_SIZE).is_err());
    }

    #[test]
    fn what_is_not_mapped_is_an_error_that_names_the_block() {
        let own = std::process::id().cast_signed();
        let backing = ProcessBacking::open(own, 4096, 4096).unwrap();
        let block = RamBlock::new("mem", Box::new(backing), PageCount(1));
        let error = block.read(PageIndex(0), &mut [0; 4096]).unwrap_err().to_string();
        assert!(error.starts_with("RAM block 'mem': cannot read 1 page"), "{error}");
    }
}
