//! The guest of the microvm: a program on the bare machine that stamps memory and disk, checks them
//! and says BUG.
//!
//! It is the Linux guest's workload (`godwit-stamp`, whose files it shares) without Linux:
//! one image, entered in 64-bit mode by every vCPU at once, without privilege, interrupts and
//! allocator. Keeps the same promise: nothing it finds stops it, and what it prints means the same.
//! Built by the build script of `godwit-microvm` with the ordinary toolchain.
#![no_std]
#![no_main]
#![allow(unsafe_code, dead_code)]

// The shared files say `godwit_units`; of that crate they need these two, which are here.
extern crate self as godwit_units;

mod balloon;
#[path = "../../stamp/src/beacon.rs"]
mod beacon;
#[path = "../src/boot_block.rs"]
mod boot_block;
mod card;
mod churn;
mod cpu;
mod disk;
#[path = "../../stamp/src/heartbeat.rs"]
mod heartbeat;
#[path = "../../stamp/src/main_loop.rs"]
mod main_loop;
#[path = "../../stamp/src/pace.rs"]
mod pace;
mod plugged;
mod ports;
mod serial;
#[path = "../../stamp/src/stamp.rs"]
mod stamp;
mod virtio;
mod work;
#[path = "../../stamp/src/workload.rs"]
mod workload;

use core::panic::PanicInfo;

use boot_block::{BOOT_BLOCK, BOOT_MAGIC, BootBlock};

pub const PAGE_SIZE: u64 = 4096;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCount(pub u64);

/// What every vCPU enters, on a stack of its own.
#[unsafe(no_mangle)]
extern "C" fn guest_main(number: u64) -> ! {
    // SAFETY: the VMM wrote the page before any vCPU started and never writes it again; it is
    // mapped one to one.
    let boot = unsafe { &*(BOOT_BLOCK as *const BootBlock) };
    if boot.magic != BOOT_MAGIC {
        panic!("boot block of another version");
    }
    work::run(number as usize, boot)
}

#[panic_handler]
fn panicked(info: &PanicInfo) -> ! {
    serial::print(format_args!("{} {info}\n", heartbeat::FAILED));
    cpu::power_off()
}

/// `core` was compiled with unwinding and names this; nothing here unwinds.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
