//! A filter at work: what is not allowed is refused, and known.
//!
//! The kernel refuses a call by SIGSYS (SECCOMP_RET_TRAP). Its handler notes the call for the
//! [`Witness`] and has it fail with EPERM. So the thread goes on and can be ended in order, with a
//! reason for both operators, where killing it would leave its locks held and the others waiting.
//! A thread that blocks the signal is killed by the kernel, and its process with it.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Once, OnceLock};

use seccompiler::BpfProgram;

use crate::{Calls, ConfineError};

/// `SYS_SECCOMP` of linux/signal.h: what a SIGSYS of a filter says for its reason.
const OF_A_FILTER: libc::c_int = 1;
/// Where the C library looks by itself, and does without if it may not: whether an arena that
/// shrinks gives memory back (glibc, check_may_shrink_heap), and how many arenas to have
/// (get_nprocs). Refused like all others, and nothing to tell of.
const LOOKED_AT: [&[u8]; 3] =
    [b"/proc/sys/vm/overcommit_memory\0", b"/sys/devices/system/cpu/online\0", b"/proc/stat\0"];
/// No system call.
const NOTHING: i64 = -1;

/// A system call that was not allowed.
///
/// ```
/// use godwit_confine::Tried;
///
/// assert_eq!(Tried(257).to_string(), "system call 257 of x86-64");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tried(pub i64);

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "system call {} of x86-64", self.0)
    }
}

/// Knows what the threads of one [`Confinement`] have tried.
#[derive(Clone, Debug)]
pub struct Witness(Arc<AtomicI64>);

impl Witness {
    /// The first call that was refused, if one was.
    #[must_use]
    pub fn tried(&self) -> Option<Tried> {
        let call = self.0.load(Ordering::Acquire);
        (call != NOTHING).then_some(Tried(call))
    }
}

/// What threads are confined by.
#[derive(Clone, Debug)]
pub struct Confinement {
    filter: Arc<BpfProgram>,
    witness: Witness,
}

impl Confinement {
    /// Allows `calls`.
    ///
    /// # Errors
    /// When they make no filter that the kernel could take.
    pub fn new(calls: &Calls) -> Result<Self, ConfineError> {
        let witness = Witness(Arc::new(AtomicI64::new(NOTHING)));
        Self::seen_by(calls, &witness)
    }

    /// Allows `calls`, and tells a witness that is there already.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn seen_by(calls: &Calls, witness: &Witness) -> Result<Self, ConfineError> {
        Ok(Self { filter: Arc::new(calls.filter()?), witness: witness.clone() })
    }

    /// Who learns what was tried.
    #[must_use]
    pub fn witness(&self) -> &Witness {
        &self.witness
    }

    /// Confines the calling thread, for good. What it tries is told as long as the answer lives;
    /// behind that it fails all the same.
    ///
    /// # Errors
    /// When this kernel has no such filters, or a filter that is there already forbids them.
    pub fn enter(&self) -> Result<Confined, ConfineError> {
        handle().map_err(ConfineError::Handler)?;
        WITNESS.set(Arc::as_ptr(&self.witness.0));
        CONFINED.set(true);
        let confined = Confined { _witness: self.witness.clone(), _here: PhantomData };
        seccompiler::apply_filter(&self.filter).map_err(ConfineError::Refused)?;
        Ok(confined)
    }
}

/// A thread that is confined, to be kept as long as it works.
#[derive(Debug)]
pub struct Confined {
    _witness: Witness,
    /// It stays in its thread.
    _here: PhantomData<*const ()>,
}

impl Drop for Confined {
    fn drop(&mut self) {
        WITNESS.set(ptr::null());
    }
}

/// Whether this kernel has system-call filters that can refuse in the way that is needed here.
#[must_use]
pub fn is_available() -> bool {
    let action: u32 = libc::SECCOMP_RET_TRAP;
    // SAFETY: the kernel reads one number (seccomp(2), SECCOMP_GET_ACTION_AVAIL).
    let answer = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action)
    };
    answer == 0
}

thread_local! {
    /// Without a destructor and with a constant at the beginning it is a plain place in memory, to
    /// which a signal handler may go.
    static WITNESS: Cell<*const AtomicI64> = const { Cell::new(ptr::null()) };

    /// Whether the filter of this thread is ours.
    static CONFINED: Cell<bool> = const { Cell::new(false) };
}

/// What SIGSYS did before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler, once for the process.
fn handle() -> io::Result<()> {
    static ONCE: Once = Once::new();
    let mut failed = None;
    ONCE.call_once(|| {
        // SAFETY: `sigaction` is plain integers, for which zero is a value.
        let (mut action, mut before): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = refuse;
        action.sa_sigaction = handler as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler does nothing that a signal handler may not (signal-safety(7)).
        let done = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, &raw mut before) };
        match done {
            0 => drop(BEFORE.set(before)),
            _ => failed = Some(io::Error::last_os_error()),
        }
    });
    failed.map_or(Ok(()), Err)
}

/// Notes a call that was refused, and has it fail.
extern "C" fn refuse(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let witness = WITNESS.get();
    // SAFETY: the kernel hands both over to a handler with SA_SIGINFO.
    let (reason, context) = unsafe { ((*info).si_code, &mut *context.cast::<libc::ucontext_t>()) };
    if !CONFINED.get() || reason != OF_A_FILTER {
        return others(signal);
    }
    // The registers are those from before the call (kernel/seccomp.c, syscall_rollback).
    let registers = &mut context.uc_mcontext.gregs;
    let call = registers[libc::REG_RAX as usize];
    registers[libc::REG_RAX as usize] = -i64::from(libc::EPERM);
    // A thread that ends has no witness any more, and gives its memory back.
    if witness.is_null()
        || call == libc::SYS_openat && is_looked_at(registers[libc::REG_RSI as usize] as usize)
    {
        return;
    }
    // SAFETY: it lives as long as `Confined`, which clears the pointer when it goes.
    let witness = unsafe { &*witness };
    let _ = witness.compare_exchange(NOTHING, call, Ordering::AcqRel, Ordering::Relaxed);
}

/// Whether the name at this address is one that the C library looks at by itself.
fn is_looked_at(address: usize) -> bool {
    let name = ptr::with_exposed_provenance::<u8>(address);
    let is = |known: &[u8]| {
        // SAFETY: a name ends with a zero, behind which nothing is read: the comparison ends at the
        // first byte that differs. Who passes on what is no name ends the process by it.
        (0..known.len()).all(|at| unsafe { *name.add(at) } == known[at])
    };
    !name.is_null() && LOOKED_AT.iter().any(|known| is(known))
}

/// A SIGSYS of somebody else's: as it was before there was a handler.
fn others(signal: libc::c_int) {
    // SAFETY: `sigaction` is plain integers, for which zero is a value: SIG_DFL among them.
    let default: libc::sigaction = unsafe { std::mem::zeroed() };
    let before = BEFORE.get().unwrap_or(&default);
    // SAFETY: both calls may be made in a handler (signal-safety(7)). The signal comes again when
    // this one returns.
    unsafe {
        libc::sigaction(signal, before, ptr::null_mut());
        libc::raise(signal);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// What `run` returns in a thread that may make `calls`, and what it tried beside them.
    fn confined<T: Send + 'static>(
        calls: &Calls,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> (T, Option<Tried>) {
        let confinement = Confinement::new(calls).unwrap();
        let witness = confinement.witness().clone();
        let thread = std::thread::spawn(move || {
            let _confined = confinement.enter().unwrap();
            run()
        });
        (thread.join().unwrap(), witness.tried())
    }

    fn errno<T>(result: &io::Result<T>) -> Option<i32> {
        result.as_ref().err().and_then(io::Error::raw_os_error)
    }

    #[test]
    fn what_is_not_allowed_fails_and_is_known() {
        // Mutations: the filter is not applied; the handler leaves the register as it is, so that
        // the call seems to have returned its own number.
        assert!(is_available());
        let (opened, tried) = confined(&Calls::of_any_thread().streams().files(), || {
            let opened = File::open("/etc/passwd");
            // The first one is told.
            let connected = UnixStream::connect("/nowhere");
            (errno(&opened), errno(&connected))
        });
        assert_eq!(opened, (Some(libc::EPERM), Some(libc::EPERM)));
        assert_eq!(tried, Some(Tried(libc::SYS_openat)));
        File::open("/etc/passwd").unwrap();
    }

    #[test]
    fn what_the_c_library_looks_at_by_itself_is_refused_and_not_told() {
        // Regression: a heap that shrank for the first time in a confined thread ended a migration.
        let open = |path: &'static str| {
            let (opened, tried) =
                confined(&Calls::of_any_thread(), move || errno(&File::open(path)));
            assert_eq!(opened, Some(libc::EPERM), "{path}");
            tried.is_some()
        };
        assert!(!open("/proc/sys/vm/overcommit_memory"));
        assert!(open("/proc/sys/vm/overcommit_memory2") && open("/proc/sys/vm/overcommit"));
    }

    #[test]
    fn a_thread_that_ends_may_still_be_refused_something() {
        // Regression: an arena that shrank behind `Confined` ended the process.
        let confinement = Confinement::new(&Calls::of_any_thread()).unwrap();
        let witness = confinement.witness().clone();
        let thread = std::thread::spawn(move || {
            drop(confinement.enter().unwrap());
            ["/proc/sys/vm/overcommit_memory", "/etc/passwd"].map(|it| errno(&File::open(it)))
        });
        assert_eq!(thread.join().unwrap(), [Some(libc::EPERM); 2]);
        assert_eq!(witness.tried(), None);
    }

    #[test]
    fn no_memory_can_be_made_executable() {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let map = |with| {
            // SAFETY: at a place of the kernel's choice.
            let mapped = unsafe { mmap_anonymous(ptr::null_mut(), 4096, with, MapFlags::PRIVATE) };
            mapped.map(drop)
        };
        let (mapped, tried) = confined(&Calls::of_any_thread(), move || {
            let plain = map(ProtFlags::READ | ProtFlags::WRITE);
            (plain, map(ProtFlags::READ | ProtFlags::EXEC))
        });
        assert_eq!(mapped, (Ok(()), Err(rustix::io::Errno::PERM)));
        assert_eq!(tried, Some(Tried(libc::SYS_mmap)));
    }

    #[test]
    fn the_memory_of_one_process_is_that_of_no_other() {
        let own = std::process::id().cast_signed();
        let read = |pid| {
            let (mut to, from) = ([0_u8; 8], [7_u8; 8]);
            let ours = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: 8 };
            let theirs = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: 8 };
            // SAFETY: both are ours, and long enough.
            let read = unsafe { libc::process_vm_readv(pid, &ours, 1, &theirs, 1, 0) };
            (read, to[0])
        };
        let (seen, tried) = confined(&Calls::of_any_thread().memory_of(own), move || read(own));
        assert_eq!((seen, tried), ((8, 7), None));
        let (seen, tried) = confined(&Calls::of_any_thread().memory_of(own + 1), move || read(own));
        assert_eq!((seen, tried), ((-1, 0), Some(Tried(libc::SYS_process_vm_readv))));
    }

    #[test]
    fn a_thread_can_do_its_work_and_end() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        ours.write_all(&[7]).unwrap();
        let memfd = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = File::from(memfd);
        let (done, tried) = confined(&Calls::of_any_thread().streams().files(), move || {
            // More than an arena has, so that it grows.
            let blocks: Vec<Vec<u8>> = (1..200).map(|size| vec![1; size << 12]).collect();
            let map: std::collections::HashMap<usize, usize> = (0..9).map(|i| (i, i)).collect();
            let mut word = [0];
            theirs.read_exact(&mut word).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &word, 4096).unwrap();
            file.write_all(&word).unwrap();
            let length = file.metadata().unwrap().len();
            std::thread::sleep(std::time::Duration::from_millis(1));
            let caught = std::panic::catch_unwind(|| std::panic::resume_unwind(Box::new(())));
            (blocks.len() + map.len(), length, caught.is_err())
        });
        assert_eq!((done, tried), ((208, 4097, true), None));
    }
}
