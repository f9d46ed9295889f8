//! The QEMU process, by a descriptor that no later process of the same number can take over
//! (pidfd_open(2)).
//!
//! Keeps one promise: that it has ended is said only of a process that has, so that no vCPU of it
//! runs any more.

use std::io;
use std::os::fd::OwnedFd;
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

#[cfg(test)]
mod tests {
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
}
