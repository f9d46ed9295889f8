//! Which system calls a thread has a use for, by what it does.
//!
//! A list is put together from parts. Each part is what the standard library, the C library and
//! the kernel's interfaces were seen to need for one kind of work, and no call that opens a file
//! by its name, runs a program, looks into other processes or changes who this one is.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Is, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use crate::ConfineError;

/// What an argument of a call has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Only {
    /// This number, in the lower half of argument `at`.
    Value { at: u8, value: u64 },
    /// None of these bits are set in argument `at`.
    Without { at: u8, bits: u64 },
    /// All of these bits are set in argument `at`.
    With { at: u8, bits: u64 },
}

/// System calls that a thread may make.
///
/// ```
/// use godwit_confine::Calls;
///
/// // Reads from a socket and writes into the memory of process 4711.
/// let calls = Calls::of_any_thread().streams().memory_of(4711);
/// assert_ne!(calls, Calls::of_any_thread());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Each with what one of its uses looks like; without any use it is allowed as it comes.
    allowed: BTreeMap<i64, Vec<Only>>,
}

/// `PAGEMAP_SCAN` of linux/fs.h: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u64 = 0xc060_6610;
/// `UFFDIO_COPY`, `UFFDIO_ZEROPAGE` and `UFFDIO_WAKE` of linux/userfaultfd.h: pages for the process
/// that a userfaultfd is of, and the word that they are there.
const USERFAULTFD: [u64; 3] = [0xc028_aa03, 0xc020_aa04, 0x8010_aa02];

impl Calls {
    /// What any thread needs: memory of its own, of which none is ever executable, locks, sleep,
    /// the clock, random numbers, words on a terminal, its end.
    #[must_use]
    pub fn of_any_thread() -> Self {
        let executable = Only::Without { at: 2, bits: libc::PROT_EXEC as u64 };
        Self::default()
            .also(&[
                libc::SYS_brk,
                libc::SYS_munmap,
                libc::SYS_mremap,
                libc::SYS_madvise,
                libc::SYS_futex,
                libc::SYS_sched_yield,
                // How many arenas the C library has.
                libc::SYS_sched_getaffinity,
                libc::SYS_nanosleep,
                libc::SYS_clock_nanosleep,
                libc::SYS_restart_syscall,
                libc::SYS_clock_gettime,
                libc::SYS_gettimeofday,
                libc::SYS_getrandom,
                libc::SYS_gettid,
                libc::SYS_getpid,
                libc::SYS_write,
                libc::SYS_close,
                libc::SYS_rt_sigprocmask,
                libc::SYS_rt_sigreturn,
                libc::SYS_sigaltstack,
                libc::SYS_set_robust_list,
                libc::SYS_rseq,
                libc::SYS_exit,
            ])
            .only(libc::SYS_mmap, &[executable])
            .only(libc::SYS_mprotect, &[executable])
            // The standard library looks whether what it closes is open.
            .only(libc::SYS_fcntl, &[value(1, libc::F_GETFD)])
    }

    /// Connections that are there already.
    #[must_use]
    pub fn streams(self) -> Self {
        self.also(&[
            libc::SYS_read,
            libc::SYS_readv,
            libc::SYS_writev,
            libc::SYS_recvfrom,
            libc::SYS_sendto,
            libc::SYS_poll,
            libc::SYS_ppoll,
            libc::SYS_shutdown,
            libc::SYS_getsockopt,
            libc::SYS_setsockopt,
            libc::SYS_getsockname,
            libc::SYS_getpeername,
        ])
    }

    /// Connections that others make, and second handles of those.
    #[must_use]
    pub fn accepting(self) -> Self {
        let uses = [libc::F_GETFD, libc::F_DUPFD_CLOEXEC, libc::F_GETFL, libc::F_SETFL];
        self.streams()
            .also(&[libc::SYS_accept4])
            .only(libc::SYS_fcntl, &uses.map(|wish| value(1, wish)))
    }

    /// Files that are open already.
    #[must_use]
    pub fn files(self) -> Self {
        self.also(&[
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            libc::SYS_preadv,
            libc::SYS_pwritev,
            libc::SYS_lseek,
            libc::SYS_fallocate,
            libc::SYS_fsync,
            libc::SYS_fdatasync,
            libc::SYS_fstat,
            libc::SYS_fstatfs,
            libc::SYS_flock,
        ])
        // statx(2) of a descriptor.
        .only(libc::SYS_statx, &[Only::With { at: 2, bits: libc::AT_EMPTY_PATH as u64 }])
    }

    /// Pages that come while whoever has the memory runs, by a userfaultfd that is there.
    #[must_use]
    pub fn missing_pages(self) -> Self {
        self.also(&[libc::SYS_poll, libc::SYS_ppoll])
            .only(libc::SYS_ioctl, &USERFAULTFD.map(|value| Only::Value { at: 1, value }))
    }

    /// The memory of process `pid`, and what its page tables say of it.
    #[must_use]
    pub fn memory_of(self, pid: i32) -> Self {
        self.only(libc::SYS_process_vm_readv, &[value(0, pid)])
            .only(libc::SYS_process_vm_writev, &[value(0, pid)])
            .only(libc::SYS_ioctl, &[Only::Value { at: 1, value: PAGEMAP_SCAN }])
    }

    /// Connections that it makes itself: to a server of disks that has ended the last one.
    #[must_use]
    pub fn connecting(self) -> Self {
        let streams = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];
        self.streams()
            .also(&[libc::SYS_connect])
            .only(libc::SYS_socket, &streams.map(|domain| value(0, domain)))
            .only(libc::SYS_fcntl, &[value(1, libc::F_GETFL), value(1, libc::F_SETFL)])
    }

    fn also(mut self, calls: &[libc::c_long]) -> Self {
        self.allowed.extend(calls.iter().map(|call| (*call, Vec::new())));
        self
    }

    /// Allows `call` where one of `uses` fits, or one that was named before.
    fn only(mut self, call: libc::c_long, uses: &[Only]) -> Self {
        let named = self.allowed.entry(call).or_default();
        named.extend(
            uses.iter().filter(|wanted| !named.contains(wanted)).copied().collect::<Vec<_>>(),
        );
        self
    }

    /// The filter, which has every other call end in SIGSYS. One for another kind of processor
    /// than the program's own ends the process.
    pub(crate) fn filter(&self) -> Result<BpfProgram, ConfineError> {
        let rule = |only: &Only| {
            let (at, is, value) = match *only {
                Only::Value { at, value } => (at, Is::Eq, value),
                Only::Without { at, bits } => (at, Is::MaskedEq(bits), 0),
                Only::With { at, bits } => (at, Is::MaskedEq(bits), bits),
            };
            SeccompRule::new(vec![SeccompCondition::new(at, Length::Dword, is, value)?])
        };
        let rules = self.allowed.iter().map(|(call, uses)| {
            let rules = uses.iter().map(rule).collect::<Result<Vec<_>, _>>()?;
            Ok((*call, rules))
        });
        let rules = rules.collect::<Result<BTreeMap<_, _>, _>>().map_err(ConfineError::Filter)?;
        SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, TargetArch::x86_64)
            .and_then(BpfProgram::try_from)
            .map_err(ConfineError::Filter)
    }
}

fn value(at: u8, value: i32) -> Only {
    Only::Value { at, value: u64::from(value.cast_unsigned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_list_opens_or_runs_or_looks_into_anything() {
        let all = Calls::of_any_thread().accepting().files().missing_pages();
        let all = all.memory_of(1).connecting();
        for call in [
            libc::SYS_open,
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_creat,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_ptrace,
            libc::SYS_pidfd_open,
            libc::SYS_pidfd_getfd,
            libc::SYS_kill,
            libc::SYS_tgkill,
            libc::SYS_pidfd_send_signal,
            libc::SYS_unlink,
            libc::SYS_unlinkat,
            libc::SYS_rename,
            libc::SYS_renameat2,
            libc::SYS_mount,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_setuid,
            libc::SYS_capset,
            libc::SYS_prctl,
            libc::SYS_bpf,
            libc::SYS_keyctl,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_sendmsg,
            libc::SYS_bind,
            libc::SYS_listen,
        ] {
            assert!(!all.allowed.contains_key(&call), "system call {call}");
        }
    }

    #[test]
    fn a_list_holds_each_use_once_and_fits_the_kernel() {
        let calls = Calls::of_any_thread().accepting().connecting().files();
        let calls = calls.missing_pages().memory_of(4711);
        assert_eq!(calls.allowed[&libc::SYS_fcntl].len(), 4);
        // BPF_MAXINSNS of linux/bpf_common.h.
        let filter = calls.filter().unwrap();
        assert!(filter.len() < 4096, "{}", filter.len());
    }
}
