//! The processor: entry, sleep, the end, and the few routines the compiler calls by name.
//!
//! All of the guest runs without privilege (ring 3), with the right to use ports. There are no
//! interrupts, and an exception finds no handler: the VMM reports it, with the address.

use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;

use crate::boot_block::{MAX_CPUS, POWER_OFF_PORT, SLEEP_PORT};

/// Pages are passed by value in places, and everything is inlined into one frame.
const STACK: usize = 1 << 17;

#[repr(C, align(4096))]
struct Stacks(UnsafeCell<[u8; STACK * MAX_CPUS as usize]>);
// SAFETY: each vCPU uses its own part, as its stack.
unsafe impl Sync for Stacks {}
#[unsafe(no_mangle)]
static STACKS: Stacks = Stacks(UnsafeCell::new([0; STACK * MAX_CPUS as usize]));

global_asm!(
    ".global _start",
    "_start:",
    "lea rax, [rdi + 1]",
    "shl rax, 17",
    "lea rsp, [rip + STACKS]",
    "add rsp, rax",
    "xor ebp, ebp",
    "call guest_main",
    "ud2",
);

/// The time-stamp counter.
pub fn ticks() -> u64 {
    // SAFETY: reads a counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Sleeps for about `micros` microseconds.
pub fn sleep(micros: u32) {
    // SAFETY: a port that does just that.
    unsafe { asm!("out dx, eax", in("dx") SLEEP_PORT, in("eax") micros, options(nostack)) };
}

/// Does what no guest survives.
pub fn crash() -> ! {
    // SAFETY: nothing runs after it.
    unsafe { asm!("ud2", options(noreturn)) }
}

/// Switches the machine off.
pub fn power_off() -> ! {
    loop {
        // SAFETY: a port that does just that.
        unsafe {
            asm!("out dx, al", in("dx") POWER_OFF_PORT, in("al") 1u8, options(nostack, nomem))
        };
    }
}

/// memcpy(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller vouches for both ranges.
    unsafe {
        asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") count => _,
            options(nostack, preserves_flags));
    }
    to
}

/// memmove(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= count {
        // SAFETY: forwards is right where the target does not begin within the source.
        return unsafe { memcpy(to, from, count) };
    }
    // SAFETY: the caller vouches for both ranges; backwards, since the target begins within the
    // source.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rdi") to.wrapping_add(count).wrapping_sub(1) => _,
            inout("rsi") from.wrapping_add(count).wrapping_sub(1) => _, inout("rcx") count => _,
            options(nostack));
    }
    to
}

/// memset(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, count: usize) -> *mut u8 {
    // SAFETY: the caller vouches for the range.
    unsafe {
        asm!("rep stosb", inout("rdi") to => _, in("al") byte as u8, inout("rcx") count => _,
            options(nostack, preserves_flags));
    }
    to
}

/// memcmp(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
    for at in 0..count {
        // SAFETY: the caller vouches for both ranges. Volatile, lest the loop be made into a call
        // of itself.
        let (a, b) = unsafe { (one.add(at).read_volatile(), other.add(at).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// bcmp(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
    // SAFETY: as there.
    unsafe { memcmp(one, other, count) }
}
