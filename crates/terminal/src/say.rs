//! Printing. In our programs `println!` and its relatives are those of this module, for the
//! standard ones panic when nobody reads any more: a terminal that was closed must not end a
//! migration, least of all in the handover.
//!
//! Invariant: no output fails a command. What only puts out something ([`ends_quietly`]) ends
//! without a word when its reader has gone, as `head` does to it; everything else goes on.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static ENDS_QUIETLY: AtomicBool = AtomicBool::new(false);

/// Output is the only purpose of this process: it ends when nobody reads it.
pub fn ends_quietly() {
    ENDS_QUIETLY.store(true, Ordering::Relaxed);
}

/// Writes to standard output, at once.
pub fn out(text: Arguments<'_>) {
    let mut out = io::stdout().lock();
    let written = out.write_fmt(text).and_then(|()| out.flush());
    let Err(error) = written else { return };
    if ENDS_QUIETLY.load(Ordering::Relaxed) {
        if error.kind() == ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        err(format_args!("godwit: cannot write the output: {error}\n"));
        std::process::exit(crate::process::FAILED.into());
    }
}

/// Writes to standard error.
pub fn err(text: Arguments<'_>) {
    // In one piece, as other processes write there, too.
    let _ = io::stderr().lock().write_all(text.to_string().as_bytes());
}

/// Prints a line to standard output; never panics.
#[macro_export]
macro_rules! println {
    () => { $crate::say::out(format_args!("\n")) };
    ($($text:tt)*) => { $crate::say::out(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints to standard output; never panics.
#[macro_export]
macro_rules! print {
    ($($text:tt)*) => { $crate::say::out(format_args!($($text)*)) };
}

/// Prints a line to standard error; never panics.
#[macro_export]
macro_rules! eprintln {
    () => { $crate::say::err(format_args!("\n")) };
    ($($text:tt)*) => { $crate::say::err(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints to standard error; never panics.
#[macro_export]
macro_rules! eprint {
    ($($text:tt)*) => { $crate::say::err(format_args!($($text)*)) };
}
