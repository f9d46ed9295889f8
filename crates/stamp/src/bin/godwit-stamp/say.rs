//! Lines on standard output and standard error, whether anybody reads them or not.
//!
//! Keeps one promise: a reader who has gone away ends nothing. The standard macros panic then, and
//! the panic of process 1 is that of the kernel.

/// Prints a line on standard output; that it cannot be printed is nothing to stop for.
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout().lock(), $($argument)*);
    }};
}

/// The same on standard error.
macro_rules! tell {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr().lock(), $($argument)*);
    }};
}
