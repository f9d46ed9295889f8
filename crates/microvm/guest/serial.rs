//! The serial line: one line of text at a time, whole, whichever vCPU prints it.

use core::arch::asm;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::boot_block::SERIAL_PORT;

const LONGEST: usize = 512;

static BUSY: AtomicBool = AtomicBool::new(false);

struct Line {
    bytes: [u8; LONGEST],
    len: usize,
}

impl Write for Line {
    /// What is too long is cut, which is better than what never ends.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let count = text.len().min(LONGEST - self.len);
        self.bytes[self.len..self.len + count].copy_from_slice(&text.as_bytes()[..count]);
        self.len += count;
        Ok(())
    }
}

/// Prints `text`. All of it leaves in one instruction, so that the VMM sees few exits.
pub fn print(text: fmt::Arguments) {
    let mut line = Line { bytes: [0; LONGEST], len: 0 };
    let _ = line.write_fmt(text);
    while BUSY.swap(true, Ordering::Acquire) {
        core::hint::spin_loop();
    }
    // SAFETY: reads `len` bytes of `bytes`, which are there; the port is the serial line's and
    // takes any byte.
    unsafe {
        asm!("rep outsb", in("dx") SERIAL_PORT, inout("rsi") line.bytes.as_ptr() => _,
            inout("rcx") line.len => _, options(nostack, readonly));
    }
    BUSY.store(false, Ordering::Release);
}
