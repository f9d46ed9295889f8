//! The QEMU process, by a descriptor that no later process of the same number can take over
//! (pidfd_open(2)); and what any process has open.
//!
//! Keeps one promise: that it has ended is said only of a process that has, so that no vCPU of it
//! runs any more.

use std::fs::{self, Metadata};
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A process that may have ended.
#[derive(Debug)]
pub(crate) struct Process(OwnedFd);

impl Process {
    /// The process of this number.
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Whether it is known to have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ends_within(Duration::ZERO).unwrap_or(false)
    }

    /// Waits up to `limit` for its end, and says whether it came.
    pub(crate) fn ends_within(&self, limit: Duration) -> io::Result<bool> {
        // Readable once the process has ended (pidfd_open(2)).
        let timeout = Timespec {
            tv_sec: limit.as_secs().cast_signed(),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        Ok(poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&timeout))? > 0)
    }

    /// Ends it at once.
    pub(crate) fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.0, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// A file that a process has open.
#[derive(Debug)]
pub(crate) struct Descriptor {
    /// Its number in that process.
    pub(crate) number: RawFd,
    link: PathBuf,
}

impl Descriptor {
    /// What the kernel calls it: a path in that process's mount namespace, or `socket:[inode]` and
    /// the like. `None` where it was closed meanwhile.
    pub(crate) fn target(&self) -> Option<PathBuf> {
        fs::read_link(&self.link).ok()
    }

    /// Of the file itself, whatever its path is.
    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        fs::metadata(&self.link)
    }
}

/// What process `pid` has open.
///
/// # Errors
/// When its table cannot be read: it has ended, or is another user's. What that means, callers must
/// say: who looks for something finds nothing, who must know that it is not there knows nothing.
pub(crate) fn descriptors(pid: i32) -> io::Result<impl Iterator<Item = Descriptor>> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    Ok(entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some(Descriptor { number, link: entry.path() })
    }))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::process::Command;

    use super::*;

    #[test]
    fn the_end_of_a_process_is_known_and_not_before() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::open(child.id().cast_signed()).unwrap();
        assert!(!process.has_ended());
        process.kill().unwrap();
        assert!(process.ends_within(Duration::from_secs(20)).unwrap());
        child.wait().unwrap();
        assert!(process.has_ended());
        process.kill().unwrap();
    }

    #[test]
    fn what_a_process_has_open_is_found_and_no_table_is_no_empty_one() {
        let file = fs::File::open("/dev/null").unwrap();
        let own = std::process::id().cast_signed();
        let found = descriptors(own).unwrap().find(|it| it.number == file.as_raw_fd()).unwrap();
        assert_eq!(found.target(), Some("/dev/null".into()));
        assert!(!found.metadata().unwrap().is_file());
        let closed = Descriptor { number: -1, link: "/proc/self/fd/closed".into() };
        assert!(closed.target().is_none() && closed.metadata().is_err());
        assert!(descriptors(i32::MAX).is_err());
    }
}
