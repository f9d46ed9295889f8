//! The system calls of the benches that have no safe wrapper, each in a function that is safe to
//! call.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// A shared mapping of a whole file, or memory of our own.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping is plain memory that any thread may use; threads are given parts that do not
// overlap.
unsafe impl Send for Mapping {}
// SAFETY: as above: whoever writes, writes parts of its own.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `file`.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn new(file: &File, len: usize) -> io::Result<Self> {
        Self::of(len, libc::MAP_SHARED, file.as_raw_fd())
    }

    /// `len` bytes of memory that nobody has touched yet.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn anonymous(len: usize) -> io::Result<Self> {
        Self::of(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    fn of(len: usize, flags: i32, file: i32) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel picks a free place; nothing that exists is touched.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, file, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: base.cast(), len })
    }

    /// Where it is mapped.
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// Writes a number, as a guest would.
    pub fn store(&self, offset: usize, value: u64) {
        assert!(offset.is_multiple_of(8));
        let at = self.at(offset, 8);
        // SAFETY: aligned and within the mapping; nobody holds a reference into it.
        unsafe { at.cast::<u64>().write_volatile(value) };
    }

    /// Reads a number that somebody else may write.
    pub fn load(&self, offset: usize) -> u64 {
        assert!(offset.is_multiple_of(8));
        let at = self.at(offset, 8);
        // SAFETY: aligned and within the mapping; nobody holds a reference into it.
        unsafe { at.cast::<u64>().read_volatile() }
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "{len} bytes at {offset} of {}",
            self.len
        );
        // SAFETY: within the mapping, as just checked.
        unsafe { self.base.add(offset) }
    }

    /// Tells the kernel what is wanted of a part.
    pub fn advise(&self, offset: usize, len: usize, advice: i32) -> io::Result<()> {
        let at = self.at(offset, len);
        // SAFETY: a part of our own mapping; none of the advices used here changes what it holds.
        check(unsafe { libc::madvise(at.cast(), len, advice) } as isize).map(drop)
    }

    /// Receives into a part, at most all of it.
    pub fn receive(&self, socket: BorrowedFd<'_>, offset: usize, len: usize) -> io::Result<usize> {
        let at = self.at(offset, len);
        // SAFETY: the kernel writes at most `len` bytes into our mapping; nobody holds a reference
        // into it.
        check(unsafe { libc::recv(socket.as_raw_fd(), at.cast(), len, libc::MSG_WAITALL) })
    }

    /// Sends `header` and a part behind it, at most all of both; with `flags` of send(2).
    pub fn send(
        &self,
        socket: BorrowedFd<'_>,
        header: &[u8],
        offset: usize,
        len: usize,
        flags: i32,
    ) -> io::Result<usize> {
        let part =
            |base: *const u8, len| libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len };
        let mut parts = [part(header.as_ptr(), header.len()), part(self.at(offset, len), len)];
        // SAFETY: msghdr is plain data for which zeros are a valid value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len();
        // SAFETY: the message points to two parts that are alive and as long as they say; they are
        // only read.
        check(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, and no reference into it is left.
        let _ = unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Sets an option of the socket layer to a number.
pub fn option(socket: BorrowedFd<'_>, name: i32, value: i32) -> io::Result<()> {
    let size = size_of::<i32>() as u32;
    // SAFETY: the kernel reads `size` bytes from `value`, which is alive.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw const value).cast(),
            size,
        )
    };
    check(result as isize).map(drop)
}

/// What is to be noted of a thread: the first version of `perf_event_attr`, which all kernels know
/// (include/uapi/linux/perf_event.h).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PerfAttributes {
    /// Who counts.
    pub kind: u32,
    /// How long this is.
    pub size: u32,
    /// What is counted.
    pub config: u64,
    /// After how many a sample is taken.
    pub sample_period: u64,
    /// What is in a sample.
    pub sample_type: u64,
    /// What a read tells.
    pub read_format: u64,
    /// The bits behind it.
    pub flags: u64,
    /// When who waits is woken.
    pub wakeup_events: u32,
    /// For breakpoints.
    pub breakpoint_type: u32,
    /// For breakpoints.
    pub breakpoint_address: u64,
}

/// Begins to note what `attributes` say of the thread `tid` of any process, on whatever processor
/// it runs.
pub fn perf_event(attributes: &PerfAttributes, tid: i32) -> io::Result<File> {
    let (any_cpu, no_group) = (-1, -1);
    // SAFETY: the kernel reads as many bytes of the attributes as they say they have.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            std::ptr::from_ref(attributes),
            tid,
            any_cpu,
            no_group,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    let fd = i32::try_from(check(fd as isize)?).map_err(io::Error::other)?;
    // SAFETY: a new descriptor, which nobody else has.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Ends that: nothing is noted any more when it returns.
pub fn end_perf_event(event: &File) -> io::Result<()> {
    // SAFETY: a request without an argument; no memory is involved.
    check(unsafe { libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_DISABLE, 0) } as isize).map(drop)
}

const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 1 << 3;
const PERF_EVENT_IOC_DISABLE: libc::c_ulong = 0x2401;

/// Takes all notes of finished zero-copy sends from the socket's error queue; returns how many
/// sends they were about, and whether the kernel copied after all.
pub fn finished_sends(socket: BorrowedFd<'_>) -> io::Result<(u32, bool)> {
    let (mut sends, mut copied) = (0, false);
    loop {
        let mut control = [0_u64; 16];
        // SAFETY: msghdr is plain data for which zeros are a valid value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
        // SAFETY: the message has no data parts, and room for control data that is alive.
        match check(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) }) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok((sends, copied)),
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        // cmsghdr is 16 bytes; behind it sock_extended_err: errno u32, origin u8, type u8, code u8,
        // pad, info u32, data u32 (Documentation/networking/msg_zerocopy.rst: info..=data are the
        // numbers of the sends, code 1: copied).
        let bytes: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let number = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        sends += number(28).wrapping_sub(number(24)).wrapping_add(1);
        copied |= bytes[22] == 1;
    }
}

/// Processor time of the calling thread.
pub fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Moves bytes between a pipe and something else, without a buffer of ours.
pub fn splice(
    from: impl AsFd,
    to: impl AsFd,
    to_offset: Option<u64>,
    from_offset: Option<u64>,
    len: usize,
    more: bool,
) -> io::Result<usize> {
    let (mut from_at, mut to_at) =
        (from_offset.map(u64::cast_signed), to_offset.map(u64::cast_signed));
    let pointer = |at: &mut Option<libc::loff_t>| {
        at.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut)
    };
    let flags = libc::SPLICE_F_MOVE | if more { libc::SPLICE_F_MORE } else { 0 };
    let (from_at, to_at) = (pointer(&mut from_at), pointer(&mut to_at));
    // SAFETY: the offsets are null or point to numbers that are alive; no other memory is involved.
    check(unsafe {
        libc::splice(from.as_fd().as_raw_fd(), from_at, to.as_fd().as_raw_fd(), to_at, len, flags)
    })
}

/// Sends bytes of a file.
pub fn sendfile(socket: BorrowedFd<'_>, file: &File, offset: u64, len: usize) -> io::Result<usize> {
    let mut at = offset.cast_signed();
    // SAFETY: the offset points to a number that is alive; no other memory is involved.
    check(unsafe { libc::sendfile(socket.as_raw_fd(), file.as_raw_fd(), &raw mut at, len) })
}

/// A pipe with room for `len` bytes.
pub fn pipe(len: usize) -> io::Result<(io::PipeReader, io::PipeWriter)> {
    let len = i32::try_from(len).map_err(io::Error::other)?;
    let (reader, writer) = io::pipe()?;
    // SAFETY: fcntl with a number; no memory is involved.
    check(unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, len) } as isize)?;
    Ok((reader, writer))
}
