//! What goes wrong at a control socket.

use std::path::{Path, PathBuf};

/// A control socket that cannot be used, or was refused what it asked for.
#[derive(Debug, thiserror::Error)]
#[error("control socket {}: {problem}", path.display())]
pub struct ControlError {
    /// The socket.
    pub path: PathBuf,
    /// What is wrong, and the cure.
    pub problem: String,
}

impl ControlError {
    pub(crate) fn new(path: &Path, problem: impl Into<String>) -> Self {
        Self { path: path.to_owned(), problem: problem.into() }
    }
}
