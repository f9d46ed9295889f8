//! The firmware by which the guest program of the microvm runs under a stock QEMU.
//!
//! QEMU resets a processor into real mode, and the guest program is entered in 64-bit mode and ring
//! 3. Between the two are the few steps below, the same for every vCPU: memory holds the program,
//! its descriptors and its page tables already (`godwit_microvm::place_guest`, and `kvm/image.rs`
//! for the rest). They run under TCG only. There every vCPU waits in ring 3, at `gate`, until it
//! finds itself elsewhere: the VM's state is saved then, and loaded under KVM, so that KVM never
//! meets code that some of them cannot run.
#![no_std]
#![no_main]
#![allow(unsafe_code)]

use core::arch::global_asm;
use core::panic::PanicInfo;

// Guest addresses below 0x8000: 0x7f8, where the program's entry is; 0x800, the descriptors;
// 0x2000, the top-level page table; 0x6000, a lock; up to 0x8000, stacks of 64 bytes.
global_asm!(
    r#"
    .section .firmware, "ax"
    .global firmware
    .code16
    // The first vCPU comes here from the reset vector with CS at 4 GiB less 64 KiB, the others by
    // their start-up interrupt with CS at 0xf0000: only offsets are used.
firmware:
    cli
    lgdtl %cs:(descriptors - firmware)
    // Physical address extension, and SSE with its exceptions.
    movl $0x620, %eax
    movl %eax, %cr4
    movl $0x2000, %eax
    movl %eax, %cr3
    // EFER: long mode.
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    // Protection, monitor coprocessor, numeric error and paging at once: the page tables map
    // everything one to one.
    movl $0x80000033, %eax
    movl %eax, %cr0
    ljmpl $0x28, $long
    .code64
long:
    movl $0x30, %eax
    movl %eax, %ss
    movl $0x13, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %fs
    movl %eax, %gs
    // The vCPU's number: its local APIC's.
    movl $1, %eax
    cpuid
    shrl $24, %ebx
    movl %ebx, %r12d
    shll $6, %ebx
    movl $0x8000, %esp
    subl %ebx, %esp
    // All share one task segment, which says that all ports may be used. Whoever loads it marks it
    // as busy, and a busy one is not loaded.
1:  lock btsl $0, 0x6000
    jc 1b
    andb $0xfd, 0x81d
    movl $0x18, %eax
    ltr %ax
    movl $0, 0x6000
    // The first vCPU starts the others, which wait for that since their reset.
    movl $0x1b, %ecx
    rdmsr
    testl $0x100, %eax
    jz 2f
    movl $0xfee00300, %ebx
    movl $0x000c46f0, (%rbx)
2:  pushq $0x13
    pushq $0
    pushq $2
    pushq $0x0b
    pushq $gate
    iretq
    // In ring 3: says so with a letter, and waits until this is no TCG.
gate:
    movl $0x3f8, %edx
    movb $'G', %al
    outb %al, %dx
3:  pause
    movl $0x40000000, %eax
    cpuid
    // "TCGT", the beginning of its signature.
    cmpl $0x54474354, %ebx
    je 3b
    movl %r12d, %edi
    jmpq *0x7f8
    .balign 8
descriptors:
    .word 7 * 8 - 1
    .long 0x800

    .section .reset, "ax"
    .code16
    .byte 0xe9
    .word 0x10000 - 0xfff3
    .code64
"#,
    options(att_syntax)
);

#[panic_handler]
fn panicked(_: &PanicInfo<'_>) -> ! {
    loop {}
}
