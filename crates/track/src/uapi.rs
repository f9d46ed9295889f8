//! The kernel's numbers and structures, from `linux/userfaultfd.h`, and the calls on them.
//!
//! No crate knows asynchronous write protection yet. Everything unsafe about its ioctls is here;
//! what they mean is in `attach`, `pagemap` and `missing`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `UFFD_API`.
const UFFD_API: u64 = 0xaa;
/// Messages say whether a fault is one of write protection.
pub(crate) const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
/// `madvise(MADV_DONTNEED)` and its like are told of, and wait until that was read.
pub(crate) const UFFD_FEATURE_EVENT_REMOVE: u64 = 1 << 3;
/// Messages say which thread faulted.
pub(crate) const UFFD_FEATURE_THREAD_ID: u64 = 1 << 8;
pub(crate) const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
pub(crate) const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
pub(crate) const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
/// Faults from user mode only: all that an unprivileged process may ask for. It takes nothing away
/// here, since asynchronous write protection resolves kernel-mode faults without a message to
/// anyone.
pub(crate) const UFFD_USER_MODE_ONLY: u64 = 1;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1 << 0;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
const UFFD_EVENT_REMOVE: u8 = 0x15;

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`.
const UFFDIO_API: u64 = iowr(0xaa, 0x3f, size_of::<UffdioApi>());
/// `_IOWR(0xaa, 0x00, struct uffdio_register)`.
const UFFDIO_REGISTER: u64 = iowr(0xaa, 0x00, size_of::<UffdioRegister>());
/// `_IOR(0xaa, 0x01, struct uffdio_range)`.
const UFFDIO_UNREGISTER: u64 = ior(0xaa, 0x01, size_of::<UffdioRange>());
/// `_IOR(0xaa, 0x02, struct uffdio_range)`.
const UFFDIO_WAKE: u64 = ior(0xaa, 0x02, size_of::<UffdioRange>());
/// `_IOWR(0xaa, 0x03, struct uffdio_copy)`.
const UFFDIO_COPY: u64 = iowr(0xaa, 0x03, size_of::<UffdioCopy>());
/// `_IOWR(0xaa, 0x04, struct uffdio_zeropage)`.
const UFFDIO_ZEROPAGE: u64 = iowr(0xaa, 0x04, size_of::<UffdioZeropage>());
/// `_IOWR(0xaa, 0x06, struct uffdio_writeprotect)`.
const UFFDIO_WRITEPROTECT: u64 = iowr(0xaa, 0x06, size_of::<UffdioWriteprotect>());
/// `_IO(0xaa, 0x00)`: on /dev/userfaultfd, a userfaultfd of the process that asks, with the flags
/// of the argument.
pub(crate) const USERFAULTFD_IOC_NEW: u64 = 0xaa << 8;
/// `_IOW` of the kernel: the call reads a structure of `size` bytes.
pub(crate) const fn iow(kind: u8, number: u64, size: usize) -> u64 {
    (1 << 30) | ((size as u64) << 16) | ((kind as u64) << 8) | number
}

/// `_IOR` of the kernel, by whose name userfaultfd has calls that read a structure of `size` bytes.
const fn ior(kind: u8, number: u64, size: usize) -> u64 {
    (2 << 30) | ((size as u64) << 16) | ((kind as u64) << 8) | number
}

/// `_IOWR` of the kernel: the call reads and writes a structure of `size` bytes.
pub(crate) const fn iowr(kind: u8, number: u64, size: usize) -> u64 {
    (3 << 30) | ((size as u64) << 16) | ((kind as u64) << 8) | number
}

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

#[repr(C)]
struct UffdioZeropage {
    start: u64,
    len: u64,
    mode: u64,
    zeropage: i64,
}

#[repr(C)]
struct UffdioWriteprotect {
    start: u64,
    len: u64,
    mode: u64,
}

/// `struct uffd_msg`, with the page-fault arm of its union. In the arm of a removal, `flags` is the
/// first address and `address` the first one behind it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct UffdMsg {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u32,
    padding: u32,
}

/// A fault that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Where.
    pub(crate) address: u64,
    /// The thread that waits, as its own process numbers it.
    pub(crate) thread: i32,
}

/// What is read from a userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// A fault waits for an answer.
    Fault(Fault),
    /// What is at these addresses is thrown away as soon as this was read.
    Remove {
        /// The first address.
        start: u64,
        /// The first one behind it.
        end: u64,
    },
}

/// Messages taken by one read.
const MESSAGES: usize = 64;

/// Opens a userfaultfd for this process with all that userfaultfd(2) knows; `flags` are beside
/// O_CLOEXEC and O_NONBLOCK.
pub(crate) fn userfaultfd_with(flags: u64) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC as u64 | libc::O_NONBLOCK as u64 | flags;
    // SAFETY: userfaultfd(2) takes flags only.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let fd = i32::try_from(fd).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The same by /dev/userfaultfd, for whoever may open that
/// (Documentation/admin-guide/mm/userfaultfd.rst).
pub(crate) fn userfaultfd_of_device() -> io::Result<OwnedFd> {
    let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd")?;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: USERFAULTFD_IOC_NEW takes flags only.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a userfaultfd for this process, without the right to handle faults of the kernel (see
/// [`UFFD_USER_MODE_ONLY`]), which an unprivileged process does not have.
pub(crate) fn userfaultfd() -> io::Result<OwnedFd> {
    userfaultfd_with(UFFD_USER_MODE_ONLY)
}

/// Negotiates `features` on a new userfaultfd.
pub(crate) fn uffd_api(uffd: BorrowedFd<'_>, features: u64) -> io::Result<()> {
    let mut arg = UffdioApi { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one `struct uffdio_api`, which `arg` is, and keeps no
    // pointer to it.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut arg) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Registers `start..start + len` of the process that made `uffd` for write protection.
pub(crate) fn uffd_register_wp(uffd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    uffd_register(uffd, start, len, UFFDIO_REGISTER_MODE_WP)
}

/// Registers `start..start + len` of the process that made `uffd`: who accesses a page there that
/// has no entry waits until it is placed.
pub(crate) fn uffd_register_missing(uffd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    uffd_register(uffd, start, len, UFFDIO_REGISTER_MODE_MISSING)
}

fn uffd_register(uffd: BorrowedFd<'_>, start: u64, len: u64, mode: u64) -> io::Result<()> {
    let mut arg = UffdioRegister { start, len, mode, ioctls: 0 };
    // SAFETY: UFFDIO_REGISTER reads and writes one `struct uffdio_register`, which `arg` is, and
    // keeps no pointer to it. The range it names is in the other process; accesses to it may wait
    // from now on, and it is never unmapped.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut arg) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Fills pages from `start` on that have no entry with `bytes`, and wakes whoever waits there.
/// Returns how many bytes were placed before the first page that could not be, and why it could
/// not: EEXIST where there is an entry, EAGAIN while a message about a change of the mappings waits
/// to be read.
pub(crate) fn uffd_copy(uffd: BorrowedFd<'_>, start: u64, bytes: &[u8]) -> (usize, io::Result<()>) {
    let (src, len) = (bytes.as_ptr() as u64, bytes.len() as u64);
    let mut arg = UffdioCopy { dst: start, src, len, mode: 0, copy: 0 };
    // SAFETY: UFFDIO_COPY reads and writes one `struct uffdio_copy`, which `arg` is, and reads
    // `len` bytes at `src`, which `bytes` has. It fills only pages of the other process that hold
    // nothing.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_COPY, &raw mut arg) };
    outcome(result, arg.copy, bytes.len())
}

/// The same with zeros, for `len` bytes.
pub(crate) fn uffd_zero(uffd: BorrowedFd<'_>, start: u64, len: u64) -> (usize, io::Result<()>) {
    let mut arg = UffdioZeropage { start, len, mode: 0, zeropage: 0 };
    // SAFETY: UFFDIO_ZEROPAGE reads and writes one `struct uffdio_zeropage`, which `arg` is. It
    // fills only pages of the other process that hold nothing.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut arg) };
    outcome(result, arg.zeropage, len as usize)
}

/// What a call says that places pages: `moved` is bytes, or an error before the first page. A call
/// that stops in between says EAGAIN, whatever the reason.
fn outcome(result: libc::c_int, moved: i64, wanted: usize) -> (usize, io::Result<()>) {
    if result >= 0 {
        return (wanted, Ok(()));
    }
    let error = io::Error::last_os_error();
    (usize::try_from(moved).unwrap_or(0), Err(error))
}

/// Takes `start..start + len` off `uffd`: its protection is lifted and whoever waits there is
/// woken.
pub(crate) fn uffd_unregister(uffd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    let mut arg = UffdioRange { start, len };
    // SAFETY: UFFDIO_UNREGISTER reads one `struct uffdio_range`, which `arg` is; the range is in
    // the other process.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_UNREGISTER, &raw mut arg) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Protects `start..start + len`, or lifts the protection and wakes whoever waits there. Tries
/// again while the other process changes its mappings, which takes moments.
pub(crate) fn uffd_write_protect(
    uffd: BorrowedFd<'_>,
    start: u64,
    len: u64,
    protect: bool,
) -> io::Result<()> {
    const TRIES: u32 = 10_000;
    let mode = if protect { UFFDIO_WRITEPROTECT_MODE_WP } else { 0 };
    let mut last = io::Error::from(io::ErrorKind::WouldBlock);
    for _ in 0..TRIES {
        let mut arg = UffdioWriteprotect { start, len, mode };
        // SAFETY: UFFDIO_WRITEPROTECT reads one `struct uffdio_writeprotect`, which `arg` is. It
        // changes protection in the other process that only its first writes notice.
        let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut arg) };
        if result >= 0 {
            return Ok(());
        }
        last = io::Error::last_os_error();
        if last.kind() != io::ErrorKind::WouldBlock {
            break;
        }
        std::thread::yield_now();
    }
    Err(last)
}

/// Wakes whoever waits in `start..start + len`. Where the protection still stands they come back
/// with a new message.
pub(crate) fn uffd_wake(uffd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    let mut arg = UffdioRange { start, len };
    // SAFETY: UFFDIO_WAKE reads one `struct uffdio_range`, which `arg` is.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE, &raw mut arg) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes faults that wait, without waiting for any; whether there may be more.
pub(crate) fn uffd_read(uffd: BorrowedFd<'_>, mut found: impl FnMut(Fault)) -> io::Result<bool> {
    uffd_messages(uffd, |message| {
        if let Message::Fault(fault) = message {
            found(fault);
        }
    })
}

/// Takes all messages in their order, without waiting for any; whether there may be more.
pub(crate) fn uffd_messages(
    uffd: BorrowedFd<'_>,
    mut found: impl FnMut(Message),
) -> io::Result<bool> {
    let mut messages = [UffdMsg::default(); MESSAGES];
    let room = size_of_val(&messages);
    // SAFETY: read(2) writes at most `room` bytes to `messages`, all of whose values are plain
    // integers.
    let length = unsafe { libc::read(uffd.as_raw_fd(), messages.as_mut_ptr().cast(), room) };
    let Ok(length) = usize::try_from(length) else {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock => Ok(false),
            io::ErrorKind::Interrupted => Ok(true),
            _ => Err(error),
        };
    };
    let messages = &messages[..length / size_of::<UffdMsg>()];
    for message in messages {
        match message.event {
            UFFD_EVENT_PAGEFAULT => {
                let thread = message.thread.cast_signed();
                found(Message::Fault(Fault { address: message.address, thread }));
            }
            UFFD_EVENT_REMOVE => {
                found(Message::Remove { start: message.flags, end: message.address });
            }
            _ => {}
        }
    }
    Ok(messages.len() == MESSAGES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ioctl_numbers_are_the_kernels() {
        // The values of the kernel headers; a wrong one would fail as ENOTTY in tests/pagemap.rs.
        assert_eq!(UFFDIO_API, 0xc018_aa3f);
        assert_eq!(UFFDIO_REGISTER, 0xc020_aa00);
        assert_eq!(UFFDIO_UNREGISTER, 0x8010_aa01);
        assert_eq!(UFFDIO_WAKE, 0x8010_aa02);
        assert_eq!(UFFDIO_COPY, 0xc028_aa03);
        assert_eq!(UFFDIO_ZEROPAGE, 0xc020_aa04);
        assert_eq!(UFFDIO_WRITEPROTECT, 0xc018_aa06);
        assert_eq!(USERFAULTFD_IOC_NEW, 0xaa00);
        assert_eq!(size_of::<UffdMsg>(), 32);
    }
}
