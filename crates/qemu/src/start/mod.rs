//! A destination QEMU that nobody has prepared: godwit starts it, from what the source tells of its
//! own.
//!
//! ```text
//!   description   the source: its command line, and what is not in that any more
//!   options       which options are carried, left out, or refused with the cure
//!   values        what is in their values: paths, programs, descriptors, addresses
//!   mapping       which paths of the source's are which here
//!   carry         the command line that comes of all that
//!   in_place      the same for a QEMU that takes another's place on this host
//!   launch        the process, its monitor and its log
//!   destination   the engine's destination made of that
//! ```
//!
//! A source is a stranger until it has proven otherwise, and what it tells becomes a process with
//! this one's rights. Invariant: it decides neither which program is started, nor which other
//! programs that one starts, and no path is opened that the operator did not name. What is not
//! known is refused, by name.

mod carry;
mod description;
mod destination;
mod in_place;
mod launch;
mod mapping;
mod options;
mod values;

pub(crate) use description::{QUESTION, describe};
pub use destination::{Shown, StartTerms, StartedDestination};
pub use launch::{COMMAND, launch};
pub use mapping::{MapError, Mapping};

use std::path::{Path, PathBuf};

use crate::QemuError;

/// The options of a destination whose source has `told` what it is.
pub(crate) fn words(
    told: &[u8],
    named: (&[Mapping], &[PathBuf]),
    monitor: &Path,
) -> Result<Vec<String>, QemuError> {
    let told = serde_json::from_slice(told).map_err(|_| QemuError::Unclear("its QEMU"))?;
    Ok(carry::carry(&told, named, monitor)?.words)
}

/// What stands against starting a destination.
fn refused(words: impl Into<String>) -> QemuError {
    QemuError::Start(words.into())
}
