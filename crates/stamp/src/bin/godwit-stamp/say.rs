//! Lines on standard output, whether anybody reads them or not.
//!
//! Keeps one promise: a reader who has gone away ends nothing. The standard macro panics then, and
//! the panic of process 1 is that of the kernel.

/// Prints a line; that it cannot be printed is nothing to stop for.
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout().lock(), $($argument)*);
    }};
}
