//! What a thread may still do: capabilities that are given up, and system calls that are filtered.
//!
//! - [`keep`] gives up all capabilities of a thread but those that are named.
//! - [`Calls`] are the system calls that a thread has a use for; [`Confinement`] allows it these
//!   and no others (seccomp(2)), and tells what else was tried.
//!
//! Both belong to the thread that asks, and to those that it starts from then on: what nobody can
//! take back from another thread is given up before there is one, or by each for itself.
//!
//! Invariants: nothing that was given up comes back, also not by running another program
//! (PR_SET_NO_NEW_PRIVS). A call that is not allowed has no effect, and whoever holds the
//! [`Witness`] learns of it before the thread goes on.
//!
//! ```
//! use godwit_confine::{Calls, Confinement};
//!
//! let confinement = Confinement::new(&Calls::of_any_thread())?;
//! let witness = confinement.witness().clone();
//! std::thread::spawn(move || {
//!     let _confined = confinement.enter().expect("this kernel has seccomp");
//!     std::fs::File::open("/etc/passwd").expect_err("no use for open(2)");
//! });
//! # Ok::<(), godwit_confine::ConfineError>(())
//! ```

mod calls;
mod rights;
mod trap;

pub use calls::Calls;
pub use rights::{Rights, give_up_all, is_sealed, keep, seal};
pub use trap::{Confined, Confinement, Tried, Witness, is_available};

/// Why a thread cannot be confined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfineError {
    /// The filter cannot be made.
    #[error("the list of system calls makes no filter: {0}")]
    Filter(#[source] seccompiler::BackendError),
    /// The kernel does not take it.
    #[error("the kernel takes no system-call filter: {0}")]
    Refused(#[source] seccompiler::Error),
    /// The handler of SIGSYS cannot be installed.
    #[error("SIGSYS cannot be handled: {0}")]
    Handler(#[source] std::io::Error),
    /// Capabilities cannot be given up.
    #[error("capabilities cannot be given up: {0}")]
    Rights(#[source] std::io::Error),
}
