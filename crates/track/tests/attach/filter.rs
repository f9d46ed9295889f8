//! A filter for system calls, as a sandbox has it: what the target needs is allowed, and nothing
//! else.
#![allow(unsafe_code, clippy::unwrap_used)]

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
    const VERSION_3: u32 = 0x2008_0522;
    const SYS_ADMIN: u32 = 1 << 21;
    let mut header = [VERSION_3, 0];
    // Effective, permitted and inheritable, of the first 32 and the others.
    let mut sets = [0_u32; 6];
    // SAFETY: both calls take a header of two words and sets of six.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()), 0);
        sets[..3].iter_mut().for_each(|set| *set &= !SYS_ADMIN);
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_mut_ptr()), 0);
    }
}
