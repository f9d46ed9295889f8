//! Attaching to a process that knows nothing of us: one of its threads is made to open a
//! userfaultfd, which is then taken over.
//!
//! ```text
//! godwit                                   one thread of the VMM
//!   PTRACE_SEIZE, PTRACE_INTERRUPT  ----->   stops in a system call of its own (other threads run on, vCPUs among them)
//!   save registers, floating point state and signal mask, also in a frame below its stack
//!   rip = `syscall; ret`            ----->   userfaultfd(O_CLOEXEC | O_NONBLOCK | USER_MODE_ONLY) = fd
//!   pidfd_getfd(fd)
//!   rip = `syscall; ret`            ----->   close(fd): godwit holds the only reference
//!   restore, PTRACE_DETACH          ----->   runs on; the interrupted call restarts
//! ```
//!
//! A userfaultfd belongs to the address space of the process that made it, hence the detour. When
//! godwit ends, however it ends, the kernel drops the descriptor and all write protection with it.
//!
//! Invariant: whatever fails, the thread gets its registers and its signal mask back and is let go.
//! Also when godwit is killed in the midst of it: the frame below the thread's stack takes it back
//! (`frame`). Then the process may keep a userfaultfd that nothing was ever registered with. Two
//! things it does not cover: a process with a shadow stack, and one with a filter that kills for
//! userfaultfd(2), whose suspension ends with godwit.

mod frame;
mod gadgets;
mod sched;
mod thread;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use procfs::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

pub(crate) use self::sched::become_punctual;

use self::gadgets::Memory;
use self::thread::StoppedThread;
use crate::TrackError;
use crate::permission;
use crate::uapi::{
    self, UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_THREAD_ID,
    UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED,
    UFFD_USER_MODE_ONLY,
};

/// A userfaultfd of another process, held by this one alone.
///
/// ```no_run
/// use godwit_track::{Approach, TrackError, attach};
///
/// let attachment = attach(4711, Approach::default())?;
/// println!("one thread stood still for {:?}", attachment.stopped());
/// # Ok::<(), TrackError>(())
/// ```
#[derive(Debug)]
pub struct Attachment {
    userfaultfd: OwnedFd,
    stopped: Duration,
}

impl Attachment {
    /// How long the one thread was stopped for it.
    #[must_use]
    pub fn stopped(&self) -> Duration {
        self.stopped
    }

    pub(crate) fn userfaultfd(&self) -> BorrowedFd<'_> {
        self.userfaultfd.as_fd()
    }
}

/// What a userfaultfd is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Lift protection by itself (`WP_ASYNC`): nobody waits, nobody is told.
    Tracking,
    /// Tell of each first write and let the writer wait for the answer: the governor's.
    Governing,
    /// Let whoever accesses a page that is not there wait until it is placed (`missing`). The
    /// process keeps a descriptor of its own, so that they wait on whatever becomes of this one.
    Filling,
}

/// How a userfaultfd is made in a process. The governor's has to handle faults of the kernel on the
/// process's behalf (KVM, read(2), vhost), which needs a right
/// (Documentation/admin-guide/mm/userfaultfd.rst).
///
/// ```
/// use godwit_track::{Approach, Way};
///
/// // QEMU was handed /dev/userfaultfd as its descriptor 20.
/// let approach = Approach { way: Way::Device(20), ..Approach::default() };
/// assert_ne!(approach, Approach::default());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// By userfaultfd(2). For the governor's the process needs CAP_SYS_PTRACE, or
    /// `vm.unprivileged_userfaultfd` is 1.
    #[default]
    Call,
    /// By a descriptor of /dev/userfaultfd that the process was handed, under this number.
    Device(RawFd),
}

/// What is known of a process that is attached to.
///
/// ```
/// use godwit_track::{Approach, Way};
///
/// let approach = Approach::default();
/// assert_eq!((approach.way, approach.harmless_filters), (Way::Call, 0));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Approach {
    /// How its userfaultfd is made.
    pub way: Way,
    /// So many system-call filters are known to let userfaultfd(2) and ioctl(2) pass or fail, and
    /// to kill for neither. A process with more of them, which the kernel does not suspend, is left
    /// alone.
    pub harmless_filters: u32,
}

/// Takes a userfaultfd with asynchronous write protection out of process `pid`.
///
/// # Errors
/// When the process may not be traced, is traced by someone else, does not stop within seconds, or
/// the kernel lacks the feature. The process then runs on as it did.
///
/// ```no_run
/// use godwit_track::{Approach, TrackError, attach};
///
/// // Needs the right to trace the process.
/// match attach(4711, Approach::default()) {
///     Ok(attachment) => println!("attached within {:?}", attachment.stopped()),
///     Err(TrackError::NotPermitted { pid, .. }) => println!("no right to trace {pid}"),
///     Err(error) => println!("{error}; the process runs on as it did"),
/// }
/// ```
pub fn attach(pid: i32, approach: Approach) -> Result<Attachment, TrackError> {
    take(pid, Kind::Tracking, approach)
}

/// Takes a userfaultfd for the governor out of process `pid`, which then has none of it left.
///
/// # Errors
/// As [`attach`]; also when the process has no right to handle faults of the kernel.
pub(crate) fn attach_governing(pid: i32, approach: Approach) -> Result<Attachment, TrackError> {
    take(pid, Kind::Governing, approach).map_err(|error| match error {
        TrackError::Refused { .. } => TrackError::NoKernelFaults { pid },
        error => error,
    })
}

/// What is to be thrown away, by who has seen the descriptor.
type ToDiscard<'a> = dyn Fn(BorrowedFd<'_>) -> Result<Vec<Range<u64>>, TrackError> + Sync + 'a;

/// Takes a userfaultfd for missing pages out of the process that was `looked_at`, and throws away
/// what that has at the addresses that `to_discard` names when it has seen the descriptor. The
/// process keeps a descriptor itself, whose number is returned: faults wait for an answer as long
/// as it lives.
///
/// # Errors
/// As [`attach_governing`], and those of `to_discard`; nothing was thrown away then.
pub(crate) fn attach_filling(
    looked_at: &LookedAt,
    approach: Approach,
    to_discard: &ToDiscard<'_>,
) -> Result<(Attachment, RawFd), TrackError> {
    let pid = looked_at.pid;
    let inside = |thread: &mut StoppedThread, userfaultfd: &OwnedFd| {
        negotiate(userfaultfd, pid, Kind::Filling)?;
        for range in to_discard(userfaultfd.as_fd())? {
            let advice = libc::MADV_DONTNEED.unsigned_abs().into();
            let arguments = [range.start, range.end - range.start, advice];
            thread
                .call(libc::SYS_madvise, arguments)
                .map_err(|source| thread::error(pid, "madvise(2) in the process", source))?;
        }
        Ok(())
    };
    take_and(looked_at, Kind::Filling, approach, &inside).map_err(|error| match error {
        TrackError::Refused { .. } => TrackError::NoKernelFaults { pid },
        error => error,
    })
}

/// Takes a further descriptor of the userfaultfd that process `pid` holds as `number` since
/// [`attach_filling`]. Nobody is stopped.
///
/// # Errors
/// When there is no such userfaultfd, or the process may not be traced.
pub(crate) fn take_again(pid: i32, number: RawFd) -> Result<Attachment, TrackError> {
    let failed = |step| move |source: io::Error| TrackError::Attach { pid, step, source };
    if !has_userfaultfd(pid, number) {
        return Err(failed("finding its userfaultfd")(io::ErrorKind::NotFound.into()));
    }
    let raw_pid = Pid::from_raw(pid)
        .ok_or_else(|| failed("pidfd_open")(io::ErrorKind::InvalidInput.into()))?;
    let pidfd = rustix::process::pidfd_open(raw_pid, PidfdFlags::empty())
        .map_err(|errno| failed("pidfd_open")(errno.into()))?;
    let userfaultfd = rustix::process::pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())
        .map_err(|errno| failed("pidfd_getfd")(errno.into()))?;
    Ok(Attachment { userfaultfd, stopped: Duration::ZERO })
}

/// Has process `pid` close the userfaultfd that it holds as `number`.
///
/// # Errors
/// As [`attach`]. The descriptor is then still there, and does no harm when nothing is registered
/// with it any more.
pub(crate) fn close_in(pid: i32, number: RawFd, approach: Approach) -> Result<(), TrackError> {
    let failed = |step| move |source: io::Error| thread::error(pid, step, source);
    if !has_userfaultfd(pid, number) {
        return Err(failed("finding its userfaultfd")(io::ErrorKind::NotFound.into()));
    }
    on_own_thread(&LookedAt::of(pid)?, |looked_at| {
        let mut thread = looked_at.stop(approach)?;
        let closed = thread.call(libc::SYS_close, [number.unsigned_abs().into(), 0, 0]);
        thread.release().map_err(failed("PTRACE_DETACH"))?;
        closed.map(drop).map_err(failed("close(2) in the process"))
    })
}

/// Whether process `pid` has a userfaultfd as its descriptor `number`.
///
/// ```
/// let own = std::process::id().cast_signed();
/// assert!(!godwit_track::has_userfaultfd(own, 0));
/// ```
#[must_use]
pub fn has_userfaultfd(pid: i32, number: RawFd) -> bool {
    let target = std::fs::read_link(format!("/proc/{pid}/fd/{number}"));
    target.is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]")
}

/// Has a thread of process `pid` make a userfaultfd, and takes it over.
fn take(pid: i32, kind: Kind, approach: Approach) -> Result<Attachment, TrackError> {
    let (attachment, _) = take_and(&LookedAt::of(pid)?, kind, approach, &|_, _| Ok(()))?;
    negotiate(&attachment.userfaultfd, pid, kind)?;
    Ok(attachment)
}

/// What a thread is made to do once its userfaultfd was taken over.
type Inside<'a> = dyn Fn(&mut StoppedThread, &OwnedFd) -> Result<(), TrackError> + Sync + 'a;

/// The same without asking for features, and what else the thread is to do; with the number under
/// which the process has its own descriptor, if it keeps that.
fn take_and(
    looked_at: &LookedAt,
    kind: Kind,
    approach: Approach,
    inside: &Inside<'_>,
) -> Result<(Attachment, RawFd), TrackError> {
    let taken = on_own_thread(looked_at, |looked_at| take_from(looked_at, kind, approach, inside));
    let (userfaultfd, stopped, number) = taken?;
    Ok((Attachment { userfaultfd, stopped }, number))
}

/// A process, and where its code and its stacks are. It runs on, and nothing of it was changed. Of
/// what is known code stays where it is, as nobody unloads the C library; a stack that has grown or
/// gone since is found out when it is looked for.
#[derive(Debug)]
pub(crate) struct LookedAt {
    pid: i32,
    process: Process,
    memory: Memory,
    pidfd: OwnedFd,
}

impl LookedAt {
    /// Looks at process `pid`.
    ///
    /// # Errors
    /// When it may not be traced, or has none of the code that is needed.
    pub(crate) fn of(pid: i32) -> Result<Self, TrackError> {
        let failed = |step| move |source: io::Error| TrackError::Attach { pid, step, source };
        let process =
            Process::new(pid).map_err(|source| TrackError::Proc { pid, what: "stat", source })?;
        let memory = Memory::of(pid, &process)?;
        let raw_pid = Pid::from_raw(pid)
            .ok_or_else(|| failed("pidfd_open")(io::ErrorKind::InvalidInput.into()))?;
        let pidfd = rustix::process::pidfd_open(raw_pid, PidfdFlags::empty())
            .map_err(|errno| failed("pidfd_open")(errno.into()))?;
        Ok(Self { pid, process, memory, pidfd })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Stops the main thread.
    fn stop(&self, approach: Approach) -> Result<StoppedThread, TrackError> {
        // Another may have its number since it was looked at.
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let polled = poll(&mut ended, Some(&Timespec::default()));
        if polled.is_ok_and(|count| count > 0) {
            let (step, source) = ("looking whether it lives", io::ErrorKind::NotFound.into());
            return Err(TrackError::Attach { pid: self.pid, step, source });
        }
        StoppedThread::stop(self.pid, &self.process, &self.memory, approach.harmless_filters)
    }
}

/// Does what is to be done with a process on a thread of its own: what that traces is let go when
/// it ends, wherever that is.
fn on_own_thread<T: Send>(
    looked_at: &LookedAt,
    work: impl FnOnce(&LookedAt) -> Result<T, TrackError> + Send,
) -> Result<T, TrackError> {
    let pid = looked_at.pid;
    let failed = |step| move |source: io::Error| TrackError::Attach { pid, step, source };
    std::thread::scope(|scope| {
        let work = || {
            sched::become_urgent();
            work(looked_at)
        };
        let thread =
            std::thread::Builder::new().name("attach".to_owned()).spawn_scoped(scope, work);
        thread.map_err(failed("starting a thread"))?.join().unwrap_or_else(|_| {
            Err(failed("the thread that does it")(io::Error::other("this is a bug in godwit")))
        })
    })
}

const IN_PROCESS: &str = "userfaultfd(2) in the process";

/// Stops the main thread of a process and has it make a userfaultfd; with how long it was stopped.
fn take_from(
    looked_at: &LookedAt,
    kind: Kind,
    approach: Approach,
    inside: &Inside<'_>,
) -> Result<(OwnedFd, Duration, RawFd), TrackError> {
    let pid = looked_at.pid;
    let failed = |step| move |source: io::Error| thread::error(pid, step, source);
    let mut thread = looked_at.stop(approach)?;
    let flags = libc::O_CLOEXEC as u64 | libc::O_NONBLOCK as u64;
    let flags = if kind == Kind::Tracking { flags | UFFD_USER_MODE_ONLY } else { flags };
    let made = match approach.way {
        Way::Call => thread.call(libc::SYS_userfaultfd, [flags, 0, 0]),
        Way::Device(fd) => {
            let fd = u64::from(fd.unsigned_abs());
            thread.call(libc::SYS_ioctl, [fd, uapi::USERFAULTFD_IOC_NEW, flags])
        }
    };
    if let Err(source) = &made
        && source.kind() == io::ErrorKind::TimedOut
    {
        // It goes its way by itself, once it goes.
        return Err(failed(IN_PROCESS)(io::ErrorKind::TimedOut.into()));
    }
    let taken = made.as_ref().ok().and_then(|&fd| RawFd::try_from(fd).ok()).map(|theirs| {
        let taken =
            rustix::process::pidfd_getfd(&looked_at.pidfd, theirs, PidfdGetfdFlags::empty());
        let done = taken.as_ref().map_or(Ok(()), |taken| inside(&mut thread, taken));
        let closed = match (&taken, &done, kind) {
            (Ok(_), Ok(()), Kind::Filling) => Ok(0),
            _ => thread.call(libc::SYS_close, [theirs.unsigned_abs().into(), 0, 0]),
        };
        (taken, done, closed, theirs)
    });
    let stopped = thread.release().map_err(failed("PTRACE_DETACH"))?;
    if let Err(source) = made {
        return Err(match source.raw_os_error() {
            Some(libc::ENOSYS | libc::EPERM | libc::EACCES) => permission::refused(pid, source),
            _ => failed(IN_PROCESS)(source),
        });
    }
    let (taken, done, closed, number) =
        taken.ok_or_else(|| failed(IN_PROCESS)(io::ErrorKind::InvalidData.into()))?;
    let userfaultfd = taken.map_err(|errno| failed("pidfd_getfd")(errno.into()))?;
    done?;
    closed.map_err(failed("close(2) in the process"))?;
    Ok((userfaultfd, stopped, number))
}

/// Opens a userfaultfd for this process itself: nobody is stopped.
///
/// # Errors
/// When the kernel lacks the feature or this process may not use it.
pub(crate) fn attach_own(kind: Kind) -> Result<Attachment, TrackError> {
    let pid = std::process::id().cast_signed();
    let made = match kind {
        Kind::Tracking => uapi::userfaultfd(),
        Kind::Governing | Kind::Filling => {
            uapi::userfaultfd_with(0).or_else(|refused| match refused.raw_os_error() {
                Some(libc::EPERM) => uapi::userfaultfd_of_device().map_err(|_| refused),
                _ => Err(refused),
            })
        }
    };
    let userfaultfd = made.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOSYS) => TrackError::Kernel { missing: "userfaultfd(2)" },
        Some(libc::EPERM) if kind != Kind::Tracking => TrackError::NoKernelFaults { pid },
        _ => TrackError::Attach { pid, step: "userfaultfd(2)", source },
    })?;
    negotiate(&userfaultfd, pid, kind)?;
    Ok(Attachment { userfaultfd, stopped: Duration::ZERO })
}

/// Asks for what a new userfaultfd is to do. Features are fixed from here on.
fn negotiate(userfaultfd: &OwnedFd, pid: i32, kind: Kind) -> Result<(), TrackError> {
    let common = UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
    let (features, missing) = match kind {
        Kind::Tracking => {
            (common | UFFD_FEATURE_WP_ASYNC, "asynchronous write protection by userfaultfd")
        }
        Kind::Governing => (
            common | UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_THREAD_ID,
            "write protection of shared memory by userfaultfd",
        ),
        Kind::Filling => (UFFD_FEATURE_EVENT_REMOVE, "word of discarded memory by userfaultfd"),
    };
    uapi::uffd_api(userfaultfd.as_fd(), features).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => TrackError::Kernel { missing },
        _ => TrackError::Attach { pid, step: "UFFDIO_API", source: error },
    })
}
