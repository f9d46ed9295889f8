//! What the bare-metal guest executes: two small loops, position-independent, without stack or
//! interrupts.
//!
//! They only ever write to the page that they were told to write to and to their vCPU's control
//! block, so whatever else a tracker reports was invented.
#![allow(unsafe_code)]

use std::arch::global_asm;

// wander, at random pages of a window that moves on, for ever: rdi first page, rsi pages of a
// window, r14 pages in all, r12 writes until the window moves, r13 where it is (0 at first), r15
// writes left in it (r12 at first), rbx random state, r8 turns of an empty loop between writes, r9
// generation, r10 control block, r11 offset in the page touch, the pages of a list: rdi first page,
// rsi entries, r9 generation, r11 offset in the page, r12 list of page numbers (u32) Both stop at
// an `out`, which ends KVM_RUN also without privilege; wander when the second word of the control
// block is not zero.
global_asm!(
    ".pushsection .rodata.godwit_bare, \"a\"",
    // Global, since the code that asks for them may be another codegen unit.
    ".global godwit_bare_begin, godwit_bare_touch, godwit_bare_end",
    ".hidden godwit_bare_begin, godwit_bare_touch, godwit_bare_end",
    "godwit_bare_begin:",
    "2:",
    "cmp qword ptr [r10 + 8], 0",
    "jne 4f",
    "dec r15",
    "jns 5f",
    // The next window, or the first again when there is no whole one left.
    "mov r15, r12",
    "add r13, rsi",
    "lea rax, [r13 + rsi]",
    "cmp rax, r14",
    "jbe 5f",
    "xor r13, r13",
    "5:",
    // xorshift64
    "mov rax, rbx",
    "shl rax, 13",
    "xor rbx, rax",
    "mov rax, rbx",
    "shr rax, 7",
    "xor rbx, rax",
    "mov rax, rbx",
    "shl rax, 17",
    "xor rbx, rax",
    // The high half of random * pages is a page.
    "mov rax, rbx",
    "mul rsi",
    "add rdx, r13",
    "shl rdx, 12",
    "add rdx, rdi",
    "inc r9",
    "mov qword ptr [rdx + r11], r9",
    // Counted after it was written.
    "mov qword ptr [r10], r9",
    "mov rcx, r8",
    "3:",
    "test rcx, rcx",
    "jz 2b",
    "dec rcx",
    "jmp 3b",
    "4:",
    "out 0xf4, al",
    "jmp 2b",
    ".balign 16",
    "godwit_bare_touch:",
    "2:",
    "test rsi, rsi",
    "jz 3f",
    "mov eax, dword ptr [r12]",
    "shl rax, 12",
    "add rax, rdi",
    "inc r9",
    "mov qword ptr [rax + r11], r9",
    "add r12, 4",
    "dec rsi",
    "jmp 2b",
    "3:",
    "out 0xf4, al",
    "jmp 2b",
    "godwit_bare_end:",
    ".popsection",
);

unsafe extern "C" {
    static godwit_bare_begin: u8;
    static godwit_bare_touch: u8;
    static godwit_bare_end: u8;
}

/// The bytes of both programs; `wander` begins with the first.
pub(super) fn bytes() -> &'static [u8] {
    let (begin, end) = (&raw const godwit_bare_begin, &raw const godwit_bare_end);
    // SAFETY: both symbols lie in one section of read-only data, the second after the first.
    unsafe { std::slice::from_raw_parts(begin, end as usize - begin as usize) }
}

/// Where `touch` begins.
pub(super) fn touch_offset() -> u64 {
    (&raw const godwit_bare_touch) as u64 - (&raw const godwit_bare_begin) as u64
}
