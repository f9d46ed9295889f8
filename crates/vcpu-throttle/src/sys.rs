//! The system calls: ptrace(2) and waitid(2), and what /proc says of a thread. All of them belong
//! to the calling thread: a tracee knows one tracer thread only.
#![allow(unsafe_code)]

use std::io;

/// A state that a tracee is found in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Nothing has happened.
    Nothing,
    /// It stopped since it was interrupted, or since a stop of its process ended.
    Trap,
    /// It stopped with its whole process, by SIGSTOP or one of its kind.
    GroupStop,
    /// It stopped to be asked whether this signal is to be delivered.
    Signal(libc::c_int),
    /// It has ended.
    Ended,
}

/// Looks at what happened to tracee `tid`, without waiting and without taking the news away
/// (WNOWAIT). So a signal that it wants to be asked about stays with it: were this process killed
/// before it answers, the kernel would deliver it.
pub(crate) fn peek(tid: i32) -> io::Result<Seen> {
    let options = libc::WEXITED
        | libc::WSTOPPED
        | libc::WNOHANG
        | libc::WNOWAIT
        | libc::__WALL
        | libc::__WNOTHREAD;
    // SAFETY: `siginfo_t` is plain integers, for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: waitid writes one `siginfo_t` to `info`.
    let result = unsafe { libc::waitid(libc::P_PID, tid.unsigned_abs(), &raw mut info, options) };
    if result < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            // Not a tracee any more: it has ended, or an execve of another thread of its process
            // has ended it.
            Some(libc::ECHILD) => Ok(Seen::Ended),
            Some(libc::EINTR) => Ok(Seen::Nothing),
            _ => Err(error),
        };
    }
    // SAFETY: waitid fills in `si_pid` and `si_status`, or leaves all at zero (waitid(2), WNOHANG).
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(Seen::Nothing);
    }
    if info.si_code != libc::CLD_TRAPPED {
        return Ok(Seen::Ended);
    }
    // `signal | event << 8` (ptrace(2), "Stopped states").
    Ok(match (status & 0xff, status >> 8) {
        (libc::SIGTRAP, libc::PTRACE_EVENT_STOP) => Seen::Trap,
        (_, libc::PTRACE_EVENT_STOP) => Seen::GroupStop,
        (signal, 0) => Seen::Signal(signal),
        // No other event was asked for.
        _ => Seen::Trap,
    })
}

/// Takes the news of the end of `tid`, so that its real parent hears of it.
pub(crate) fn reap(tid: i32) {
    // SAFETY: no status is asked for.
    unsafe {
        libc::waitpid(tid, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD)
    };
}

/// Makes the calling thread the tracer of `tid`, which runs on. Without PTRACE_O_EXITKILL: it
/// survives its tracer.
pub(crate) fn seize(tid: i32) -> io::Result<()> {
    ptrace(libc::PTRACE_SEIZE, tid, 0)
}

/// Asks `tid` to stop.
pub(crate) fn interrupt(tid: i32) -> io::Result<()> {
    ptrace(libc::PTRACE_INTERRUPT, tid, 0)
}

/// Lets the stopped `tid` run on, with `signal` delivered if it is not 0.
pub(crate) fn go_on(tid: i32, signal: libc::c_int) -> io::Result<()> {
    ptrace(libc::PTRACE_CONT, tid, signal)
}

/// Leaves `tid` in the stop of its whole process; it will tell of the end of that.
pub(crate) fn listen(tid: i32) -> io::Result<()> {
    ptrace(libc::PTRACE_LISTEN, tid, 0)
}

/// Lets the stopped `tid` go for good, with `signal` delivered if it is not 0.
pub(crate) fn detach(tid: i32, signal: libc::c_int) -> io::Result<()> {
    ptrace(libc::PTRACE_DETACH, tid, signal)
}

fn ptrace(request: libc::c_uint, tid: i32, signal: libc::c_int) -> io::Result<()> {
    // SAFETY: none of the requests above takes a pointer; `data` is a signal, or zero options for
    // PTRACE_SEIZE.
    let result = unsafe { libc::ptrace(request, tid, 0usize, i64::from(signal)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The process that traces thread `tid` of process `pid`, 0 for none. `None` when the thread has
/// ended.
pub(crate) fn tracer_of(pid: i32, tid: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).ok()?;
    // Zombie or dead (proc(5)).
    if field(&status, "State:")?.starts_with(['Z', 'X']) {
        return None;
    }
    let thread = field(&status, "TracerPid:")?;
    // The kernel names the thread that traces; an operator knows its process.
    let of_thread = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    field(&of_thread, "Tgid:").unwrap_or(thread).parse().ok()
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}
