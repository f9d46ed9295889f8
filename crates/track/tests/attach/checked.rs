//! A ppoll(2) that looks whether anything but its result has changed meanwhile: registers of all
//! kinds, and the red zone.
#![allow(unsafe_code)]

use std::arch::global_asm;

// rdi, rsi, rdx, rcx: as ppoll(2); r9: a `Report`. The call is made with known words in all
// registers that it does not use, and below the stack pointer.
global_asm!(
    ".global godwit_checked_ppoll",
    "godwit_checked_ppoll:",
    "push rbp",
    "push rbx",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "push r9",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "vmovdqu ymm\\n, [r9 + 32 * \\n]",
    ".endr",
    "mov r10, rcx",
    "mov rax, 0x5a5a5a5a5a5a5a5a",
    ".irp at,8,16,24,32,40,48,56,64,72,80,88,96,104,112,120,128",
    "mov [rsp - \\at], rax",
    ".endr",
    "mov rbx, rax",
    "mov rbp, rax",
    "mov r12, rax",
    "mov r13, rax",
    "mov r14, rax",
    "mov r15, rax",
    "mov r9, rax",
    "mov r8d, 8",
    "mov eax, 271",
    "syscall",
    "mov rcx, [rsp]",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "vmovdqu [rcx + 512 + 32 * \\n], ymm\\n",
    ".endr",
    "mov [rcx + 1024], rbx",
    "mov [rcx + 1032], rbp",
    "mov [rcx + 1040], r12",
    "mov [rcx + 1048], r13",
    "mov [rcx + 1056], r14",
    "mov [rcx + 1064], r15",
    "mov [rcx + 1072], r9",
    "mov [rcx + 1080], rdi",
    "mov [rcx + 1088], rsi",
    "mov [rcx + 1096], rdx",
    "mov [rcx + 1104], r10",
    "mov [rcx + 1112], r8",
    ".irp at,8,16,24,32,40,48,56,64,72,80,88,96,104,112,120,128",
    "mov r11, [rsp - \\at]",
    "mov [rcx + 1112 + \\at], r11",
    ".endr",
    "pop r9",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbx",
    "pop rbp",
    "vzeroupper",
    "ret",
);

#[repr(C)]
struct Report {
    before: [u64; 64],
    after: [u64; 64],
    registers: [u64; 12],
    red_zone: [u64; 16],
}

unsafe extern "C" {
    fn godwit_checked_ppoll(
        fds: *mut libc::pollfd,
        count: u64,
        timeout: *mut libc::timespec,
        mask: *const u64,
        unused: u64,
        report: *mut Report,
    ) -> i64;
}

/// ppoll(2) as the kernel answers it, and what else has changed.
pub(crate) fn ppoll(fds: &mut [libc::pollfd], timeout: &mut libc::timespec) -> (i64, Vec<String>) {
    const WORD: u64 = 0x5a5a_5a5a_5a5a_5a5a;
    let before =
        std::array::from_fn(|number| (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut report = Report { before, after: [0; 64], registers: [0; 12], red_zone: [0; 16] };
    let (fds_at, count, timeout_at) = (fds.as_mut_ptr(), fds.len() as u64, &raw mut *timeout);
    // SAFETY: as ppoll(2), with pointers to what this function has borrowed or owns.
    let result = unsafe {
        godwit_checked_ppoll(fds_at, count, timeout_at, std::ptr::null(), 0, &raw mut report)
    };
    let mut changed = Vec::new();
    if report.before != report.after {
        changed.push("vector registers".to_owned());
    }
    let expected =
        [WORD, WORD, WORD, WORD, WORD, WORD, WORD, fds_at as u64, count, timeout_at as u64, 0, 8];
    if report.registers != expected {
        changed.push(format!("registers {:x?}", report.registers));
    }
    if report.red_zone != [WORD; 16] {
        changed.push(format!("the red zone {:x?}", report.red_zone));
    }
    (result, changed)
}
