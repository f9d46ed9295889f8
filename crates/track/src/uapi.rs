//! The kernel's numbers and structures, from `linux/userfaultfd.h` and `linux/fs.h`, and the calls on them.
//!
//! No crate knows asynchronous write protection or `PAGEMAP_SCAN` yet. Everything unsafe about the two ioctls
//! is here; what they mean is in `attach` and `pagemap`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `UFFD_API`.
const UFFD_API: u64 = 0xaa;
pub(crate) const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
pub(crate) const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
pub(crate) const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
/// Faults from user mode only: all that an unprivileged process may ask for. It takes nothing away here, since
/// asynchronous write protection resolves kernel-mode faults without a message to anyone.
pub(crate) const UFFD_USER_MODE_ONLY: u64 = 1;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`.
const UFFDIO_API: u64 = iowr(0xaa, 0x3f, size_of::<UffdioApi>());
/// `_IOWR(0xaa, 0x00, struct uffdio_register)`.
const UFFDIO_REGISTER: u64 = iowr(0xaa, 0x00, size_of::<UffdioRegister>());
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u64 = iowr(b'f', 16, size_of::<ScanArg>());

/// The page was written since it was write-protected.
pub(crate) const PAGE_IS_WRITTEN: u64 = 1 << 1;
/// Write-protect the pages that are reported.
pub(crate) const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
/// Fail where the range is not registered for asynchronous write protection.
pub(crate) const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;

/// `_IOW` of the kernel: the call reads a structure of `size` bytes.
pub(crate) const fn iow(kind: u8, number: u64, size: usize) -> u64 {
    (1 << 30) | ((size as u64) << 16) | ((kind as u64) << 8) | number
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

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PageRegion {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Opens a userfaultfd for this process, without the right to handle faults of the kernel (see
/// [`UFFD_USER_MODE_ONLY`]), which an unprivileged process does not have.
pub(crate) fn userfaultfd() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC as u64 | libc::O_NONBLOCK as u64 | UFFD_USER_MODE_ONLY;
    // SAFETY: userfaultfd(2) takes flags only.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let fd = i32::try_from(fd).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Negotiates `features` on a new userfaultfd.
pub(crate) fn uffd_api(uffd: BorrowedFd<'_>, features: u64) -> io::Result<()> {
    let mut arg = UffdioApi { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one `struct uffdio_api`, which `arg` is, and keeps no pointer to it.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut arg) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Registers `start..start + len` of the process that made `uffd` for write protection.
pub(crate) fn uffd_register_wp(uffd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    let mut arg = UffdioRegister { start, len, mode: UFFDIO_REGISTER_MODE_WP, ioctls: 0 };
    // SAFETY: UFFDIO_REGISTER reads and writes one `struct uffdio_register`, which `arg` is, and keeps no pointer
    // to it. The range it names is in the other process and only gets write-protected, never unmapped.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut arg) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Scans `start..end` for pages that are written, reporting up to `max_pages` (0: no limit) of them in `regions`.
/// Returns how many regions were filled and the address where the walk ended.
pub(crate) fn pagemap_scan(
    pagemap: BorrowedFd<'_>,
    start: u64,
    end: u64,
    flags: u64,
    max_pages: u64,
    regions: &mut [PageRegion],
) -> io::Result<(usize, u64)> {
    let mut arg = ScanArg {
        size: size_of::<ScanArg>() as u64,
        flags,
        start,
        end,
        vec: regions.as_mut_ptr() as u64,
        vec_len: regions.len() as u64,
        max_pages,
        category_mask: PAGE_IS_WRITTEN,
        return_mask: PAGE_IS_WRITTEN,
        ..ScanArg::default()
    };
    // SAFETY: PAGEMAP_SCAN reads and writes one `struct pm_scan_arg` of the size it names, and writes at most
    // `vec_len` regions to `vec`; both belong to this call and are borrowed exclusively.
    let filled = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
    if filled < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((filled.unsigned_abs() as usize, arg.walk_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ioctl_numbers_are_the_kernels() {
        // The values of the kernel headers; a wrong one would fail as ENOTTY in tests/pagemap.rs.
        assert_eq!(UFFDIO_API, 0xc018_aa3f);
        assert_eq!(UFFDIO_REGISTER, 0xc020_aa00);
        assert_eq!(PAGEMAP_SCAN, 0xc060_6610);
    }
}
