//! A filter for system calls, as a sandbox has it: what the target needs is allowed, and nothing
//! else.
#![allow(unsafe_code, clippy::unwrap_used)]

use rustix::thread::CapabilitySet;

const ALLOWED: &[libc::c_long] = &[
    libc::SYS_ppoll,
    libc::SYS_poll,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_ioctl,
    libc::SYS_futex,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
];
/// `SECCOMP_RET_ALLOW` of linux/seccomp.h.
const ALLOW: u32 = 0x7fff_0000;

/// What meets all other calls.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Otherwise {
    /// The end of the process.
    Kill,
    /// EPERM.
    Refuse,
}

/// Filters this process's system calls from now on.
pub(crate) fn install(otherwise: Otherwise) {
    const LOAD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let code = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = vec![code(LOAD, 0, 0, 0)];
    for number in ALLOWED {
        program.push(code(JUMP_IF_EQUAL, 0, 1, u32::try_from(*number).unwrap()));
        program.push(code(RETURN, 0, 0, ALLOW));
    }
    // SECCOMP_RET_KILL_PROCESS, or SECCOMP_RET_ERRNO with EPERM.
    let action = match otherwise {
        Otherwise::Kill => 0x8000_0000,
        Otherwise::Refuse => 0x0005_0001,
    };
    program.push(code(RETURN, 0, 0, action));
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: reads the program, which is valid for its length.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program),
            0
        );
    }
}

/// Takes CAP_SYS_ADMIN from this thread: it may still trace, and no longer suspend filters.
pub(crate) fn drop_sys_admin() {
    let mut sets = rustix::thread::capabilities(None).unwrap();
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::SYS_ADMIN);
    }
    rustix::thread::set_capabilities(None, sets).unwrap();
}
