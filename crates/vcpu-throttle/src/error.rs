//! What can go wrong when a process is throttled. Whatever it is, the process then runs at full
//! speed.

use std::io;

/// Why vCPUs cannot be throttled (any longer).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ThrottleError {
    /// Not a share.
    #[error("a throttle of {0} is not possible: use 0 (none) to 0.99")]
    Share(f64),
    /// The process may not be traced.
    #[error(
        "no right to trace process {pid}: run godwit as root or as the user that runs the VM, with \
         CAP_SYS_PTRACE where kernel.yama.ptrace_scope is not 0"
    )]
    NotPermitted {
        /// The process.
        pid: i32,
    },
    /// Someone else traces it.
    #[error(
        "vCPU thread {tid} of process {pid} is already traced by process {tracer} (a debugger?): \
         detach that first"
    )]
    Traced {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
        /// Its tracer.
        tracer: i32,
    },
    /// There is nothing to throttle.
    #[error(
        "process {pid} has none of the vCPU threads that were to be throttled: has it ended? start \
         again with a running VM"
    )]
    Gone {
        /// The process.
        pid: i32,
    },
    /// A system call failed.
    #[error("cannot throttle process {pid}, which runs at full speed: {step} failed: {source}")]
    System {
        /// The process.
        pid: i32,
        /// What was being done.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Our own thread does not answer.
    #[error(
        "the thread that throttles process {pid} does not answer: this is a bug in godwit; end \
         godwit, and the kernel releases the VM"
    )]
    NoAnswer {
        /// The process.
        pid: i32,
    },
}
