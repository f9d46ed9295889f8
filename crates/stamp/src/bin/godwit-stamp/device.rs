//! Devices and files: opened with care, read and written in units.
//!
//! Keeps one promise: nothing is opened for writing but a block device that nobody else has, or a
//! file that is no other device's and in no other run; and nothing that is too small or named
//! twice. Whoever is refused is told why.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use godwit_stamp::pattern::EXTENT;
use godwit_stamp::sector::Unit;
use godwit_units::{ByteCount, PAGE_SIZE};
use rustix::fs::{FallocateFlags, FlockOperation, OFlags, SeekFrom, fallocate, flock, seek};
use rustix::io::Errno;
use zerocopy::IntoBytes;

/// A run has no more.
pub(crate) const MOST: usize = 64;
const EXTENT_BYTES: u64 = EXTENT * PAGE_SIZE;

/// What to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Overwrite it.
    Run,
    /// Read it.
    Check,
}

/// Why a device is not taken, or does not work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error("{0}: there is no such device or file; a file is made by `truncate -s 1G {0}`")]
    Missing(PathBuf),
    #[error("{0}: neither a block device nor a file")]
    Kind(PathBuf),
    #[error(
        "{0}: mounted, or in use by something else (lsblk {0} shows by what): unmount it, or name \
         another"
    )]
    Busy(PathBuf),
    #[error("{0}: another godwit-stamp works with it")]
    Locked(PathBuf),
    #[error("{path}: the file behind {user}, which would notice: name {user} itself, or detach it")]
    Behind { path: PathBuf, user: String },
    #[error("{path}: holds {size}, and at least {least} are needed: use a larger one")]
    TooSmall { path: PathBuf, size: ByteCount, least: ByteCount },
    #[error("{0}: the same device as {1}: name each once")]
    Twice(PathBuf, PathBuf),
    #[error("{0} devices: no more than {MOST} are possible")]
    TooMany(usize),
    #[error("{path}: cannot {what}: {source}")]
    Io { path: PathBuf, what: &'static str, source: io::Error },
    #[error("{0}: cannot be opened past its page cache (O_DIRECT): leave --direct out")]
    NoDirect(PathBuf),
    #[error(
        "{0}: cannot discard, or write zeroes by itself: leave --discard and --write-zeroes out"
    )]
    NoZeroes(PathBuf),
}

/// How a unit is made zeroes without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Zeroing {
    /// The space goes back to the device.
    Discard,
    /// The space stays.
    Write,
}

/// An open device.
#[derive(Debug)]
pub(crate) struct Device {
    path: PathBuf,
    file: File,
    identity: (bool, u64, u64),
    bytes: u64,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)
    }
}

/// Opens all of them, or none.
pub(crate) fn open_all(
    paths: &[PathBuf],
    purpose: Purpose,
    direct: bool,
) -> Result<Vec<Device>, DeviceError> {
    if paths.len() > MOST {
        return Err(DeviceError::TooMany(paths.len()));
    }
    let mut devices: Vec<Device> = Vec::new();
    for path in paths {
        let identity = identity(path)?;
        if let Some(twin) = devices.iter().find(|device| device.identity == identity) {
            return Err(DeviceError::Twice(path.clone(), twin.path.clone()));
        }
        devices.push(Device::open(path, identity, purpose, direct)?);
    }
    Ok(devices)
}

/// Whether it is a block device, and its number; or the file system's and the file's.
fn identity(path: &Path) -> Result<(bool, u64, u64), DeviceError> {
    let found = fs::metadata(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => DeviceError::Missing(path.to_owned()),
        _ => DeviceError::Io { path: path.to_owned(), what: "be looked at", source },
    })?;
    match found.file_type() {
        kind if kind.is_block_device() => Ok((true, found.rdev(), 0)),
        kind if kind.is_file() => Ok((false, found.dev(), found.ino())),
        _ => Err(DeviceError::Kind(path.to_owned())),
    }
}

impl Device {
    fn open(
        path: &Path,
        identity: (bool, u64, u64),
        purpose: Purpose,
        direct: bool,
    ) -> Result<Self, DeviceError> {
        let own = || path.to_owned();
        let (is_block, ..) = identity;
        if !is_block && let Some(user) = user_of(path) {
            return Err(DeviceError::Behind { path: own(), user });
        }
        // The kernel refuses O_EXCL, which means something else with O_CREAT, for a block device
        // that is mounted or claimed, and for a disk with such a partition (open(2)).
        let mut flags = OFlags::empty();
        flags.set(OFlags::EXCL, is_block);
        flags.set(OFlags::DIRECT, direct);
        let mut options = OpenOptions::new();
        options.read(true).write(purpose == Purpose::Run).custom_flags(flags.bits().cast_signed());
        let file = options.open(path).map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::BUSY) => DeviceError::Busy(own()),
            Some(Errno::INVAL) if direct => DeviceError::NoDirect(own()),
            _ => DeviceError::Io { path: own(), what: "open it", source },
        })?;
        if !is_block {
            let lock = match purpose {
                Purpose::Run => FlockOperation::NonBlockingLockExclusive,
                Purpose::Check => FlockOperation::NonBlockingLockShared,
            };
            flock(&file, lock).map_err(|_| DeviceError::Locked(own()))?;
        }
        let bytes = seek(&file, SeekFrom::End(0)).map_err(|problem| DeviceError::Io {
            path: own(),
            what: "learn its size",
            source: problem.into(),
        })?;
        if bytes < EXTENT_BYTES {
            let (size, least) = (ByteCount(bytes), ByteCount(EXTENT_BYTES));
            return Err(DeviceError::TooSmall { path: own(), size, least });
        }
        Ok(Self { path: own(), file, identity, bytes })
    }

    /// Its path, as it was given.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whole extents of 1 MiB in it.
    pub(crate) fn extents(&self) -> u64 {
        self.bytes / EXTENT_BYTES
    }

    /// It must have so many units.
    pub(crate) fn must_hold(&self, units: u64) -> Result<(), DeviceError> {
        if self.bytes / PAGE_SIZE >= units {
            return Ok(());
        }
        let least = ByteCount(units.saturating_mul(PAGE_SIZE));
        Err(DeviceError::TooSmall { path: self.path.clone(), size: ByteCount(self.bytes), least })
    }

    fn failed(&self, what: &'static str) -> impl Fn(io::Error) -> DeviceError {
        move |source| DeviceError::Io { path: self.path.clone(), what, source }
    }

    /// Reads the units from `start` on.
    pub(crate) fn read(&self, start: u64, units: &mut [Unit]) -> Result<(), DeviceError> {
        let read = self.file.read_exact_at(units.as_mut_bytes(), start * PAGE_SIZE);
        read.map_err(self.failed("read it"))
    }

    /// Writes the units from `start` on.
    pub(crate) fn write(&self, start: u64, units: &[Unit]) -> Result<(), DeviceError> {
        let written = self.file.write_all_at(units.as_bytes(), start * PAGE_SIZE);
        written.map_err(self.failed("write to it"))
    }

    /// Makes zeroes of the units from `start` on. A block device is asked for zeroes in either case
    /// (fallocate(2); the kernel's block/fops.c, `blkdev_fallocate`).
    pub(crate) fn zero(&self, start: u64, units: u64, how: Zeroing) -> Result<(), DeviceError> {
        let mode = match how {
            Zeroing::Discard => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Zeroing::Write => FallocateFlags::ZERO_RANGE,
        };
        fallocate(&self.file, mode, start * PAGE_SIZE, units * PAGE_SIZE).map_err(|problem| {
            match problem {
                Errno::OPNOTSUPP => DeviceError::NoZeroes(self.path.clone()),
                _ => self.failed("make zeroes of a part of it")(problem.into()),
            }
        })
    }

    /// Everything written is on it for good.
    pub(crate) fn sync(&self) -> Result<(), DeviceError> {
        self.file.sync_data().map_err(self.failed("sync it"))
    }
}

/// A loop device over this file, or the swap that it is.
fn user_of(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().skip(1).any(|line| line.split_whitespace().next() == path.to_str()) {
        return Some("the host's swap".to_owned());
    }
    let devices = fs::read_dir("/sys/block").ok()?.flatten();
    let mut names = devices.map(|device| device.file_name().to_string_lossy().into_owned());
    names.find_map(|name| {
        let behind = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()?;
        (Path::new(behind.trim_end()) == path).then(|| format!("/dev/{name}"))
    })
}
