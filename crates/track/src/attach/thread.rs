//! A thread of another process, held by ptrace and made to execute system calls.
//!
//! Invariants:
//! - Whenever the calling thread is killed, the traced one goes on as if nothing had happened
//!   (`frame`): from before its registers are set it is where it was, and after that it returns by
//!   itself. No single steps: the flag for them outlives the tracer. No stop is reported as a bare
//!   SIGTRAP: the kernel would deliver it when the tracer is gone (include/linux/ptrace.h,
//!   `ptrace_report_syscall`); with PTRACE_O_TRACESYSGOOD it is no valid signal.
//! - Every wait has a limit. A thread that does not come back is let go when the calling thread
//!   ends, which needs no stop (kernel/ptrace.c, `exit_ptrace`).
//! - A stop is taken for what it is: the kernel has one signal number for several.
#![allow(unsafe_code)]

use std::io;
use std::time::{Duration, Instant};

use procfs::process::Process;

use super::frame::{self, Frame};
use super::gadgets::Memory;
use crate::TrackError;
use crate::permission::not_permitted;

/// `PTRACE_GETSIGMASK` and `PTRACE_SETSIGMASK` of ptrace(2); libc has them only for some targets.
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;
/// `NT_X86_XSTATE` of linux/elf.h.
const NT_X86_XSTATE: u64 = 0x202;
/// More than any processor's extended state takes.
const MOST_STATE: usize = 64 << 10;
/// The selector of 64-bit code.
const CODE_64: u64 = 0x33;
/// For the thread to stop at all.
const FIRST_LIMIT: Duration = Duration::from_secs(5);
/// For each step after that.
const LIMIT: Duration = Duration::from_secs(2);
/// A thread that is to stop is looked at after so long, and then after ever longer times. It stops
/// sooner, but often on this very processor, which it cannot have while we look; and shorter sleeps
/// end before it has had it.
const SOON: Duration = Duration::from_micros(25);
const LATER: Duration = Duration::from_millis(1);
/// So often the thread is let run on for `PAUSE` when it stops outside of a system call.
const TRIES: usize = 100;
const PAUSE: Duration = Duration::from_micros(300);

/// Where a tracee has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// As it was told to, or with its whole process, or since that stop has ended. In all of these
    /// the kernel looks for signals and calls to be restarted once it goes on.
    Event,
    /// At the beginning or the end of a system call.
    Call,
    /// To be asked whether this signal is to be delivered.
    Signal(libc::c_int),
}

/// `struct user_regs_struct`, all of it in one page: setting registers either fails before the
/// first or sets them all.
#[repr(C, align(256))]
#[derive(Clone, Copy, Debug)]
struct Registers(libc::user_regs_struct);

/// A thread held by ptrace, with what it needs to go on as if nothing had happened.
#[derive(Debug)]
pub(super) struct StoppedThread {
    pid: i32,
    registers: Registers,
    mask: u64,
    /// The address of `syscall; ret`.
    syscall: u64,
    /// What its stack pointer is during calls.
    stack: u64,
    /// It returns by itself.
    returns: bool,
    /// Its registers are those of a call.
    away: bool,
    released: bool,
    /// When it was told to stop, and how long it had stood still before that.
    since: Instant,
    stood: Duration,
}

impl StoppedThread {
    /// Becomes the tracer of the main thread of `process`, and stops it where system calls can be
    /// made.
    pub(super) fn stop(
        pid: i32,
        process: &Process,
        memory: &Memory,
        harmless_filters: u32,
    ) -> Result<Self, TrackError> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        seize(pid, process)?;
        let mut thread = Self {
            pid,
            // SAFETY: `user_regs_struct` is plain integers, for which zero is a value.
            registers: Registers(unsafe { std::mem::zeroed() }),
            mask: 0,
            syscall: memory.syscall,
            stack: 0,
            // Returns are checked against a shadow stack, where there is one, which the frame has
            // not written.
            returns: !field(&status, "x86_Thread_features:")
                .is_some_and(|with| with.contains("shstk")),
            away: false,
            released: false,
            since: Instant::now(),
            stood: Duration::ZERO,
        };
        thread.prepare((process, memory), &status, harmless_filters)?;
        Ok(thread)
    }

    fn prepare(
        &mut self,
        (process, memory): (&Process, &Memory),
        status: &str,
        harmless_filters: u32,
    ) -> Result<(), TrackError> {
        let pid = self.pid;
        let failed = |step| move |source| error(pid, step, source);
        self.since = Instant::now();
        self.interrupt(FIRST_LIMIT).map_err(failed("PTRACE_INTERRUPT"))?;
        self.suspend_filters(status, harmless_filters)?;
        for attempt in 0.. {
            self.registers.0 = self.registers().map_err(failed("PTRACE_GETREGS"))?;
            // In user mode it may be in a restartable sequence (rseq(2)), which the kernel would
            // not abort any more once it has been elsewhere. So it is let run on until it is found
            // in a call, as a main loop nearly always is.
            let rsp = self.registers.0.rsp;
            let stack_ok = || memory.is_one_stack(process, rsp - 4096, rsp);
            if frame::is_in_call(&self.registers.0) && stack_ok() || attempt == TRIES {
                break;
            }
            self.go_on(libc::PTRACE_CONT, 0).map_err(failed("PTRACE_CONT"))?;
            self.stood += self.since.elapsed();
            std::thread::sleep(PAUSE);
            self.since = Instant::now();
            self.interrupt(LIMIT).map_err(failed("PTRACE_INTERRUPT"))?;
        }
        if self.registers.0.cs != CODE_64 {
            let source = io::Error::new(io::ErrorKind::Unsupported, "it runs 32-bit code");
            return Err(error(pid, "looking at its registers", source));
        }
        let mask = (&raw mut self.mask) as u64;
        self.ptrace(PTRACE_GETSIGMASK, size_of::<u64>() as u64, mask)
            .map_err(failed("PTRACE_GETSIGMASK"))?;
        let state = self.floating_point().map_err(failed("PTRACE_GETREGSET"))?;
        let frame = Frame::new(&self.registers.0, self.mask, &state, memory.sigreturn)
            .map_err(failed("looking at its registers"))?;
        if !memory.is_one_stack(process, frame.address, self.registers.0.rsp) {
            let source = io::Error::other("there is no room below its stack pointer");
            return Err(error(pid, "looking at its stack", source));
        }
        write(pid, &frame).map_err(failed("writing to its stack"))?;
        self.stack = frame.address;
        Ok(())
    }

    /// Has the kernel leave the thread's system-call filters aside while it is traced, or makes
    /// sure that they do no harm: one that kills would kill the whole process.
    fn suspend_filters(&self, status: &str, harmless: u32) -> Result<(), TrackError> {
        let number = |name| field(status, name).and_then(|words| words.parse::<u32>().ok());
        if number("Seccomp:").unwrap_or(0) == 0 {
            return Ok(());
        }
        let options = (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_SUSPEND_SECCOMP).unsigned_abs();
        let suspended = self.ptrace(libc::PTRACE_SETOPTIONS, 0, options.into());
        let filters = number("Seccomp_filters:").unwrap_or(u32::MAX);
        match suspended {
            Ok(()) => Ok(()),
            Err(_) if filters <= harmless => Ok(()),
            Err(source) => Err(TrackError::Filtered { pid: self.pid, filters, source }),
        }
    }

    /// Makes the thread execute one system call: it begins the one that takes it back, which is
    /// made another at the last moment. So it is for microseconds only that the loss of this thread
    /// would have it meet a filter for system calls, no longer suspended, with a call that the
    /// filter may kill for.
    pub(super) fn call(&mut self, number: libc::c_long, arguments: [u64; 3]) -> io::Result<u64> {
        let mut registers = self.registers;
        registers.0.rip = self.syscall;
        // The frame is looked for one word below (arch/x86/kernel/signal_64.c, rt_sigreturn).
        registers.0.rsp = self.stack + 8;
        registers.0.rax = libc::SYS_rt_sigreturn.unsigned_abs();
        // Not within a system call any more: the kernel must not restart the interrupted one now
        // (ptrace(2) and arch/x86/kernel/signal.c).
        registers.0.orig_rax = u64::MAX;
        self.set_registers(&registers)?;
        if !std::mem::replace(&mut self.away, true) {
            // No signal may come between our steps: it would find the interrupted call gone, and
            // end it with nothing. They stay pending. After the registers, so that whenever the
            // tracer is killed the frame puts the mask back.
            self.set_mask(u64::MAX)?;
        }
        let mut begun = Registers(self.run_to_call(libc::SYS_rt_sigreturn)?);
        if begun.0.rax.cast_signed() != -i64::from(libc::ENOSYS) {
            return Err(io::Error::other("the thread did not begin the system call"));
        }
        begun.0.rsp = self.stack;
        begun.0.orig_rax = number.unsigned_abs();
        [begun.0.rdi, begun.0.rsi, begun.0.rdx] = arguments;
        self.set_registers(&begun)?;
        let result = self.run_to_call(number)?.rax;
        // Errors are -1 to -4095 (syscalls(2)).
        match result.wrapping_neg() {
            errno @ 1..=4095 => Err(io::Error::from_raw_os_error(errno as i32)),
            _ => Ok(result),
        }
    }

    /// Lets the thread run to the beginning or the end of its system call; its registers there.
    fn run_to_call(&self, number: libc::c_long) -> io::Result<libc::user_regs_struct> {
        self.go_on(libc::PTRACE_SYSCALL, 0)?;
        let until = Instant::now() + LIMIT;
        loop {
            match self.wait(until)? {
                Stop::Call => break,
                // A stop of the whole process, which the thread comes back to when it is let go.
                Stop::Event => self.go_on(libc::PTRACE_SYSCALL, 0)?,
                Stop::Signal(signal) => self.go_on(libc::PTRACE_SYSCALL, signal)?,
            }
        }
        let registers = self.registers()?;
        if registers.orig_rax != number.unsigned_abs() || registers.rip != self.syscall + 2 {
            return Err(io::Error::other("the thread executes another system call"));
        }
        Ok(registers)
    }

    /// Puts everything back and lets go of the thread; how long it stood still in all.
    pub(super) fn release(mut self) -> io::Result<Duration> {
        // From the end of a call the thread would go to user mode at once. Only from a stop like
        // this does the kernel see to a call that is to be restarted (arch/x86/kernel/signal.c,
        // arch_do_signal_or_restart).
        self.interrupt_here()?;
        self.set_mask(self.mask)?;
        self.set_registers(&self.registers)?;
        self.away = false;
        self.detach()?;
        Ok(self.stood + self.since.elapsed())
    }

    fn detach(&mut self) -> io::Result<()> {
        self.released = true;
        self.ptrace(libc::PTRACE_DETACH, 0, 0)
    }

    /// Waits until the thread, which runs, has stopped.
    fn interrupt(&self, limit: Duration) -> io::Result<()> {
        let until = Instant::now() + limit;
        self.ptrace(libc::PTRACE_INTERRUPT, 0, 0)?;
        self.wait_for_event(until)
    }

    /// Moves the stopped thread to a stop in which the kernel looks for signals, without an
    /// instruction in between.
    fn interrupt_here(&self) -> io::Result<()> {
        self.ptrace(libc::PTRACE_INTERRUPT, 0, 0)?;
        self.go_on(libc::PTRACE_CONT, 0)?;
        self.wait_for_event(Instant::now() + LIMIT)
    }

    fn wait_for_event(&self, until: Instant) -> io::Result<()> {
        loop {
            match self.wait(until)? {
                Stop::Event => return Ok(()),
                Stop::Call => self.go_on(libc::PTRACE_CONT, 0)?,
                Stop::Signal(signal) => self.go_on(libc::PTRACE_CONT, signal)?,
            }
            // Any other stop has used up the interrupt (ptrace_stop in kernel/signal.c: "any trap
            // clears pending STOP trap").
            self.ptrace(libc::PTRACE_INTERRUPT, 0, 0)?;
        }
    }

    /// Waits until the thread stops.
    fn wait(&self, until: Instant) -> io::Result<Stop> {
        let mut pause = SOON;
        loop {
            let mut status = 0;
            // SAFETY: waitpid writes one int to `status`.
            let result =
                unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL | libc::WNOHANG) };
            if result == self.pid {
                return stop_of(status)
                    .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the process ended"));
            }
            if result < 0 {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            if Instant::now() > until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(pause);
            pause = (pause + pause / 4).min(LATER);
        }
    }

    fn go_on(&self, how: libc::c_uint, signal: libc::c_int) -> io::Result<()> {
        self.ptrace(how, 0, signal.unsigned_abs().into())
    }

    fn registers(&self) -> io::Result<libc::user_regs_struct> {
        let mut registers = self.registers;
        self.ptrace(libc::PTRACE_GETREGS, 0, (&raw mut registers) as u64)?;
        Ok(registers.0)
    }

    fn set_registers(&self, registers: &Registers) -> io::Result<()> {
        self.ptrace(libc::PTRACE_SETREGS, 0, (&raw const *registers) as u64)
    }

    fn set_mask(&self, mask: u64) -> io::Result<()> {
        self.ptrace(PTRACE_SETSIGMASK, size_of::<u64>() as u64, (&raw const mask) as u64)
    }

    fn floating_point(&self) -> io::Result<Vec<u8>> {
        let mut state = vec![0; MOST_STATE];
        let mut vector = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
        self.ptrace(libc::PTRACE_GETREGSET, NT_X86_XSTATE, (&raw mut vector) as u64)?;
        state.truncate(vector.iov_len);
        Ok(state)
    }

    /// ptrace(2). The requests used here transfer at most one `user_regs_struct`, signal mask or
    /// `iovec` at `data`.
    fn ptrace(&self, request: libc::c_uint, address: u64, data: u64) -> io::Result<()> {
        ptrace(request, self.pid, address, data)
    }
}

impl Drop for StoppedThread {
    /// Where something failed.
    fn drop(&mut self) {
        if self.released {
            return;
        }
        if self.away && !self.returns {
            // A call of its own is made anew, for want of a stop in which the kernel would do that.
            let _ = self.set_registers(&Registers(frame::resumed(&self.registers.0)));
            let _ = self.set_mask(self.mask);
        }
        // One that has not stopped is let go when the calling thread ends.
        let _ = self.detach();
    }
}

/// Becomes the tracer of the main thread of `process`, which runs on.
fn seize(pid: i32, process: &Process) -> Result<(), TrackError> {
    let options = libc::PTRACE_O_TRACESYSGOOD.unsigned_abs();
    let Err(source) = ptrace(libc::PTRACE_SEIZE, pid, 0, options.into()) else { return Ok(()) };
    if source.raw_os_error() != Some(libc::EPERM) {
        return Err(error(pid, "PTRACE_SEIZE", source));
    }
    Err(match process.status().map(|status| status.tracerpid) {
        Ok(tracer) if tracer != 0 => TrackError::Traced { pid, tracer },
        _ => not_permitted(pid),
    })
}

/// What a status of waitpid(2) says of a tracee that was seized; `None` of one that has ended.
fn stop_of(status: libc::c_int) -> Option<Stop> {
    if !libc::WIFSTOPPED(status) {
        return None;
    }
    // `signal << 8 | event << 16` (ptrace(2), "Stopped states"). The signal of an event is SIGTRAP,
    // or one that has stopped the whole process; that of a signal may be SIGTRAP too.
    Some(match (libc::WSTOPSIG(status), status >> 16) {
        (_, libc::PTRACE_EVENT_STOP) => Stop::Event,
        (signal, 0) if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        (signal, 0) => Stop::Signal(signal),
        // No other event was asked for.
        _ => Stop::Signal(0),
    })
}

/// What went wrong; a step that took too long is told by what the thread is at.
pub(super) fn error(pid: i32, step: &'static str, source: io::Error) -> TrackError {
    if source.kind() != io::ErrorKind::TimedOut {
        return TrackError::Attach { pid, step, source };
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    TrackError::Stuck { pid, state: field(&status, "State:").unwrap_or("unknown").to_owned() }
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Writes `frame` to the memory of process `pid`, where that may be written.
fn write(pid: i32, frame: &Frame) -> io::Result<()> {
    let len = frame.bytes.len();
    let ours = libc::iovec { iov_base: frame.bytes.as_ptr().cast_mut().cast(), iov_len: len };
    let theirs = libc::iovec { iov_base: frame.address as *mut libc::c_void, iov_len: len };
    // SAFETY: process_vm_writev reads `len` bytes of `frame`, and writes to the other process only,
    // to memory below its stack's red zone that nothing uses.
    let written =
        unsafe { libc::process_vm_writev(pid, &raw const ours, 1, &raw const theirs, 1, 0) };
    match usize::try_from(written) {
        Ok(written) if written == len => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// ptrace(2). The requests used here transfer at most one `user_regs_struct`, signal mask or
/// `iovec` at `data`.
fn ptrace(request: libc::c_uint, tid: i32, address: u64, data: u64) -> io::Result<()> {
    // SAFETY: the callers in this file pass either no pointer or, as `data`, one to a live
    // structure of the type that the request reads or writes (for the signal mask `address` holds
    // its size, and an `iovec` names a buffer that is borrowed exclusively).
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_of_one_signal_are_told_apart() {
        let status =
            |signal: libc::c_int, event: libc::c_int| Some(0x7f | signal << 8 | event << 16);
        let seen = |status: Option<libc::c_int>| status.and_then(stop_of);
        let event = libc::PTRACE_EVENT_STOP;
        assert_eq!(seen(status(libc::SIGTRAP, event)), Some(Stop::Event));
        assert_eq!(seen(status(libc::SIGSTOP, event)), Some(Stop::Event));
        assert_eq!(seen(status(libc::SIGTRAP | 0x80, 0)), Some(Stop::Call));
        assert_eq!(seen(status(libc::SIGTRAP, 0)), Some(Stop::Signal(libc::SIGTRAP)));
        assert_eq!(seen(status(libc::SIGSTOP, 0)), Some(Stop::Signal(libc::SIGSTOP)));
        // Ended, with status 0 and by SIGKILL.
        assert_eq!((stop_of(0), stop_of(9)), (None, None));
    }
}
