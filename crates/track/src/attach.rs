//! Attaching to a process that knows nothing of us: one of its threads is made to open a userfaultfd, which is
//! then taken over.
//!
//! ```text
//! godwit                                   one thread of the VMM
//!   PTRACE_SEIZE, PTRACE_INTERRUPT  ----->   stops (other threads run on, vCPUs among them)
//!   save registers and signal mask
//!   rip = a `syscall` instruction   ----->   userfaultfd(O_CLOEXEC | O_NONBLOCK | USER_MODE_ONLY) = fd
//!   pidfd_getfd(fd)
//!   rip = a `syscall` instruction   ----->   close(fd): godwit holds the only reference
//!   restore, PTRACE_DETACH          ----->   runs on; an interrupted call restarts
//! ```
//!
//! A userfaultfd belongs to the address space of the process that made it, hence the detour. When godwit ends,
//! however it ends, the kernel drops the descriptor and all write protection with it.
//!
//! Invariant: whatever fails, the thread gets its registers and its signal mask back and is let go.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use procfs::process::{MMPermissions, MMapPath, Process};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::TrackError;
use crate::uapi::{
    self, UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_THREAD_ID, UFFD_FEATURE_WP_ASYNC,
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED, UFFD_USER_MODE_ONLY,
};

/// `PTRACE_GETSIGMASK` and `PTRACE_SETSIGMASK` of ptrace(2); libc has them only for some targets.
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;
/// The x86-64 `syscall` instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// A userfaultfd of another process, held by this one alone.
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
}

/// How a userfaultfd for the governor is made in a process. It has to handle faults of the kernel on the process's
/// behalf (KVM, read(2), vhost), which needs a right (Documentation/admin-guide/mm/userfaultfd.rst).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By userfaultfd(2): the process has CAP_SYS_PTRACE, or `vm.unprivileged_userfaultfd` is 1.
    Call,
    /// By a descriptor of /dev/userfaultfd that the process was handed, under this number.
    Device(RawFd),
}

/// Takes a userfaultfd with asynchronous write protection out of process `pid`.
///
/// # Errors
/// When the process may not be traced, is traced by someone else, or the kernel lacks the feature. The process
/// then runs on as it did.
pub fn attach(pid: i32) -> Result<Attachment, TrackError> {
    let flags = libc::O_CLOEXEC as u64 | libc::O_NONBLOCK as u64 | UFFD_USER_MODE_ONLY;
    take(pid, Kind::Tracking, libc::SYS_userfaultfd, [flags, 0, 0])
}

/// Takes a userfaultfd for the governor out of process `pid`, which then has none of it left.
///
/// # Errors
/// As [`attach`]; also when the process has no right to handle faults of the kernel.
pub(crate) fn attach_governing(pid: i32, way: Way) -> Result<Attachment, TrackError> {
    let flags = libc::O_CLOEXEC as u64 | libc::O_NONBLOCK as u64;
    let taken = match way {
        Way::Call => take(pid, Kind::Governing, libc::SYS_userfaultfd, [flags, 0, 0]),
        Way::Device(fd) => {
            let fd = u64::from(fd.unsigned_abs());
            take(pid, Kind::Governing, libc::SYS_ioctl, [fd, uapi::USERFAULTFD_IOC_NEW, flags])
        }
    };
    taken.map_err(|error| no_right(pid, error))
}

/// The refusal of a right, told from other errors.
fn no_right(pid: i32, error: TrackError) -> TrackError {
    match error {
        TrackError::Attach { step: IN_PROCESS, source, .. } if source.raw_os_error() == Some(libc::EPERM) => {
            TrackError::NoKernelFaults { pid }
        }
        error => error,
    }
}

const IN_PROCESS: &str = "userfaultfd(2) in the process";

/// Has a thread of process `pid` make a userfaultfd by the system call `number`, and takes it over.
fn take(pid: i32, kind: Kind, number: libc::c_long, arguments: [u64; 3]) -> Result<Attachment, TrackError> {
    let failed = |step| move |source: io::Error| TrackError::Attach { pid, step, source };
    let process = Process::new(pid).map_err(|source| TrackError::Proc { pid, what: "stat", source })?;
    let instruction = find_syscall_instruction(pid, &process)?;
    let raw_pid =
        Pid::from_raw(pid).ok_or_else(|| failed("pidfd_open")(io::ErrorKind::InvalidInput.into()))?;
    let pidfd = rustix::process::pidfd_open(raw_pid, PidfdFlags::empty())
        .map_err(|errno| failed("pidfd_open")(errno.into()))?;

    let _urgent = Urgent::become_urgent();
    let started = Instant::now();
    let mut thread = StoppedThread::stop(pid, &process)?;
    let theirs =
        thread.syscall(instruction, number, arguments).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOSYS) => TrackError::Kernel { missing: "userfaultfd(2)" },
            _ => failed(IN_PROCESS)(error),
        })?;
    let theirs =
        RawFd::try_from(theirs).map_err(|_| failed(IN_PROCESS)(io::ErrorKind::InvalidData.into()))?;
    let taken = rustix::process::pidfd_getfd(&pidfd, theirs, PidfdGetfdFlags::empty());
    let closed = thread.syscall(instruction, libc::SYS_close, [theirs.unsigned_abs().into(), 0, 0]);
    thread.release().map_err(failed("PTRACE_DETACH"))?;
    let stopped = started.elapsed();

    let userfaultfd = taken.map_err(|errno| failed("pidfd_getfd")(errno.into()))?;
    closed.map_err(failed("close(2) in the process"))?;
    negotiate(&userfaultfd, pid, kind)?;
    Ok(Attachment { userfaultfd, stopped })
}

/// Opens a userfaultfd for this process itself: nobody is stopped.
///
/// # Errors
/// When the kernel lacks the feature or this process may not use it.
pub(crate) fn attach_own(kind: Kind) -> Result<Attachment, TrackError> {
    let pid = std::process::id().cast_signed();
    let made = match kind {
        Kind::Tracking => uapi::userfaultfd(),
        Kind::Governing => uapi::userfaultfd_with(0),
    };
    let userfaultfd = made.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOSYS) => TrackError::Kernel { missing: "userfaultfd(2)" },
        Some(libc::EPERM) if kind == Kind::Governing => TrackError::NoKernelFaults { pid },
        _ => TrackError::Attach { pid, step: "userfaultfd(2)", source },
    })?;
    negotiate(&userfaultfd, pid, kind)?;
    Ok(Attachment { userfaultfd, stopped: Duration::ZERO })
}

/// Asks for what a new userfaultfd is to do. Features are fixed from here on.
fn negotiate(userfaultfd: &OwnedFd, pid: i32, kind: Kind) -> Result<(), TrackError> {
    let common = UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
    let (features, missing) = match kind {
        Kind::Tracking => (common | UFFD_FEATURE_WP_ASYNC, "asynchronous write protection by userfaultfd"),
        Kind::Governing => (
            common | UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_THREAD_ID,
            "write protection of shared memory by userfaultfd",
        ),
    };
    uapi::uffd_api(userfaultfd.as_fd(), features).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => TrackError::Kernel { missing },
        _ => TrackError::Attach { pid, step: "UFFDIO_API", source: error },
    })
}

/// The address of a `syscall` instruction in the process: in its vDSO, which every process has, or else in any
/// other code it maps.
fn find_syscall_instruction(pid: i32, process: &Process) -> Result<u64, TrackError> {
    /// Enough of any library to come across a system call.
    const LOOK_AT: u64 = 4 << 20;
    let maps = process.maps().map_err(|source| match source {
        procfs::ProcError::PermissionDenied(_) => TrackError::NotPermitted { pid },
        source => TrackError::Proc { pid, what: "maps", source },
    })?;
    let memory = File::open(format!("/proc/{pid}/mem")).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => TrackError::NotPermitted { pid },
        _ => TrackError::Attach { pid, step: "opening its memory", source },
    })?;
    let code = maps.iter().filter(|map| map.perms.contains(MMPermissions::EXECUTE));
    let (vdso, other): (Vec<_>, Vec<_>) = code.partition(|map| map.pathname == MMapPath::Vdso);
    for map in vdso.into_iter().chain(other) {
        let (start, end) = map.address;
        let mut bytes = vec![0; (end - start).min(LOOK_AT) as usize];
        // What cannot be read (vsyscall) is passed over.
        if memory.read_exact_at(&mut bytes, start).is_ok()
            && let Some(at) = bytes.windows(2).position(|pair| pair == SYSCALL)
        {
            return Ok(start + at as u64);
        }
    }
    Err(TrackError::Attach {
        pid,
        step: "finding a syscall instruction",
        source: io::ErrorKind::NotFound.into(),
    })
}

/// This thread at real-time priority, if it may have that (root, CAP_SYS_NICE): while it holds a thread of the VMM
/// stopped, nothing else on the host may make it wait. The thread of the VMM is left as it is: were this process
/// killed now, nobody would put its priority back.
struct Urgent {
    /// The policy to go back to.
    before: Option<libc::c_int>,
}

impl Urgent {
    fn become_urgent() -> Self {
        // SAFETY: asks for a number.
        let before = unsafe { libc::sched_getscheduler(0) };
        let urgent = before == libc::SCHED_OTHER && schedule(libc::SCHED_RR, 1);
        Self { before: urgent.then_some(before) }
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            schedule(before, 0);
        }
    }
}

/// Makes the calling thread wake when it said it would, for the rest of its life: real-time priority, if it may have
/// that, and no slack on its timers.
pub(crate) fn become_punctual() {
    schedule(libc::SCHED_RR, 1);
    // SAFETY: takes a number and changes the calling thread only (prctl(2)).
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1u64) };
}

/// Puts the calling thread under a scheduling policy; whether that worked.
fn schedule(policy: libc::c_int, priority: libc::c_int) -> bool {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: reads one `sched_param`; thread 0 is the calling one.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}

/// A thread held by ptrace, with what it needs to go on as if nothing had happened.
struct StoppedThread {
    tid: i32,
    registers: libc::user_regs_struct,
    mask: u64,
    released: bool,
}

impl StoppedThread {
    /// Stops the main thread of `process`.
    fn stop(pid: i32, process: &Process) -> Result<Self, TrackError> {
        let failed = |step| move |source: io::Error| TrackError::Attach { pid, step, source };
        if let Err(error) = ptrace(libc::PTRACE_SEIZE, pid, 0, 0) {
            if error.raw_os_error() != Some(libc::EPERM) {
                return Err(failed("PTRACE_SEIZE")(error));
            }
            return Err(match process.status().map(|status| status.tracerpid) {
                Ok(tracer) if tracer != 0 => TrackError::Traced { pid, tracer },
                _ => TrackError::NotPermitted { pid },
            });
        }
        // Seized: from here on `thread` lets it go again, whatever happens.
        let mut thread = Self {
            tid: pid,
            // SAFETY: `user_regs_struct` is plain integers, for which zero is a value.
            registers: unsafe { std::mem::zeroed() },
            mask: 0,
            released: true,
        };
        let held = ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0).and_then(|()| thread.wait_for_interrupt());
        if let Err(error) = held {
            let _ = ptrace(libc::PTRACE_DETACH, pid, 0, 0);
            return Err(failed("PTRACE_INTERRUPT")(error));
        }
        let saved = ptrace(libc::PTRACE_GETREGS, pid, 0, (&raw mut thread.registers) as u64).and_then(|()| {
            ptrace(PTRACE_GETSIGMASK, pid, size_of::<u64>() as u64, (&raw mut thread.mask) as u64)
        });
        if let Err(error) = saved {
            let _ = ptrace(libc::PTRACE_DETACH, pid, 0, 0);
            return Err(failed("PTRACE_GETREGS")(error));
        }
        thread.released = false;
        // No signal may come between our steps; all but the trap of the single step stay pending meanwhile.
        let mut blocked = !(1u64 << (libc::SIGTRAP - 1));
        ptrace(PTRACE_SETSIGMASK, pid, size_of::<u64>() as u64, (&raw mut blocked) as u64)
            .map_err(failed("PTRACE_SETSIGMASK"))?;
        Ok(thread)
    }

    /// Waits for the stop that PTRACE_INTERRUPT asks for, passing on signals that come first.
    fn wait_for_interrupt(&self) -> io::Result<()> {
        loop {
            let status = self.wait()?;
            if status >> 16 == libc::PTRACE_EVENT_STOP {
                return Ok(());
            }
            let signal = libc::WSTOPSIG(status) as u64;
            ptrace(libc::PTRACE_CONT, self.tid, 0, signal)?;
            // Any other stop has used up the interrupt (ptrace_stop in kernel/signal.c: "any trap clears pending STOP trap").
            ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
        }
    }

    /// Waits until the thread stops; its wait status.
    fn wait(&self) -> io::Result<libc::c_int> {
        let mut status = 0;
        loop {
            // SAFETY: waitpid writes one int to `status`.
            let result = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) };
            if result == self.tid {
                break;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        if libc::WIFSTOPPED(status) {
            Ok(status)
        } else {
            Err(io::Error::new(io::ErrorKind::NotFound, "the process ended"))
        }
    }

    /// Makes the thread execute one system call, at the `syscall` instruction at `instruction`.
    fn syscall(&mut self, instruction: u64, number: libc::c_long, arguments: [u64; 3]) -> io::Result<u64> {
        let mut registers = self.registers;
        registers.rip = instruction;
        registers.rax = number.unsigned_abs();
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        // Not within a system call any more: the kernel must not restart the interrupted one now
        // (ptrace(2) and arch/x86/kernel/signal.c).
        registers.orig_rax = u64::MAX;
        ptrace(libc::PTRACE_SETREGS, self.tid, 0, (&raw mut registers) as u64)?;
        ptrace(libc::PTRACE_SINGLESTEP, self.tid, 0, 0)?;
        let status = self.wait()?;
        if libc::WSTOPSIG(status) != libc::SIGTRAP {
            return Err(io::Error::other(format!("stopped by signal {}", libc::WSTOPSIG(status))));
        }
        ptrace(libc::PTRACE_GETREGS, self.tid, 0, (&raw mut registers) as u64)?;
        if registers.rip != instruction + SYSCALL.len() as u64 {
            return Err(io::Error::other("the thread did not execute the system call"));
        }
        // Errors are -1 to -4095 (syscalls(2)).
        match registers.rax.wrapping_neg() {
            errno @ 1..=4095 => Err(io::Error::from_raw_os_error(errno as i32)),
            _ => Ok(registers.rax),
        }
    }

    fn release(mut self) -> io::Result<()> {
        self.let_go()
    }

    fn let_go(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.released, true) {
            return Ok(());
        }
        let registers = ptrace(libc::PTRACE_SETREGS, self.tid, 0, (&raw mut self.registers) as u64);
        let mask = ptrace(PTRACE_SETSIGMASK, self.tid, size_of::<u64>() as u64, (&raw mut self.mask) as u64);
        let detached = ptrace(libc::PTRACE_DETACH, self.tid, 0, 0);
        registers.and(mask).and(detached)
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        let _ = self.let_go();
    }
}

/// ptrace(2). The requests used here transfer at most one `user_regs_struct` or one signal mask at `data`.
fn ptrace(request: libc::c_uint, tid: i32, address: u64, data: u64) -> io::Result<()> {
    // SAFETY: the callers in this file pass either no pointer or, as `data`, one to a live structure of the type
    // that the request reads or writes (for the signal mask `address` holds its size).
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
