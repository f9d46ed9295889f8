//! Files in which either side writes down what the godwit that takes its place goes on by, should
//! it be killed.
//!
//! Invariants: such a file is its owner's alone, is locked while a godwit lives by it, and is
//! replaced whole. It is gone with its [`Place`], unless that is left to another godwit.
//!
//! It is not made durable (fsync(2)): with the host the machine ends of which it tells. Where the
//! run directory is on a disk, that would take milliseconds in which the guest stands still.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::EngineError;

/// A record is some hundred bytes, and a certificate.
const LIMIT: u64 = 1 << 20;

/// The place of a record, which is removed with this, once it is written or taken over.
pub(crate) struct Place {
    path: PathBuf,
    /// Whether a guest lacks memory that nobody finds without what is written here.
    is_of_left: bool,
    /// Locks of all files that were there.
    held: Vec<File>,
}

impl Place {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), is_of_left: false, held: Vec::new() }
    }

    /// The place of what is written of a guest that runs without all of its memory.
    pub(crate) fn of_left(path: &Path) -> Self {
        Self { path: path.to_owned(), is_of_left: true, held: Vec::new() }
    }

    /// The record that a killed godwit has left, if one has, unless it is `unfit`.
    ///
    /// # Errors
    /// When that is not dead, or the record does not fit or is not ours.
    pub(crate) fn find<T: DeserializeOwned>(
        &mut self,
        unfit: impl FnOnce(&T) -> Option<&'static str>,
    ) -> Result<Option<T>, EngineError> {
        let nofollow = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
        let mut file = match OpenOptions::new().read(true).custom_flags(nofollow).open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.refused(error)),
        };
        let about = file.metadata().map_err(|error| self.refused(error))?;
        if about.uid() != rustix::process::geteuid().as_raw() || about.mode() & 0o077 != 0 {
            return Err(self.refused("it is not this user's alone"));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(self.refused("the godwit that wrote it is still at work"));
            }
            Err(TryLockError::Error(error)) => return Err(self.refused(error)),
        }
        let mut text = String::new();
        let read = (&mut file).take(LIMIT).read_to_string(&mut text);
        read.map_err(|error| self.refused(error))?;
        let record = serde_json::from_str(&text).map_err(|error| self.refused(error))?;
        if let Some(why) = unfit(&record) {
            return Err(self.refused(why));
        }
        self.held.push(file);
        Ok(Some(record))
    }

    /// Writes `record` in the place of what is there.
    pub(crate) fn write<T: Serialize>(&mut self, record: &T) -> Result<(), EngineError> {
        let beside = self.path.with_extension(format!("{}.new", std::process::id()));
        let unwritten = |source| EngineError::Unwritten { path: self.path.clone(), source };
        let text = serde_json::to_vec(record).map_err(|error| unwritten(error.into()))?;
        let write = || {
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(&beside)?;
            file.try_lock()?;
            file.write_all(&text)?;
            std::fs::rename(&beside, &self.path)?;
            Ok(file)
        };
        let written = write().map_err(|error: std::io::Error| {
            let _ = std::fs::remove_file(&beside);
            unwritten(error)
        })?;
        self.held.push(written);
        Ok(())
    }

    /// Leaves the record for another godwit, as one that is killed does.
    pub(crate) fn abandon(&mut self) {
        self.held.clear();
    }

    pub(crate) fn refused(&self, why: impl std::fmt::Display) -> EngineError {
        let (path, why) = (self.path.clone(), why.to_string());
        match self.is_of_left {
            true => EngineError::Left { path, why },
            false => EngineError::Record { path, why },
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Behind a panic another one is to go on.
        if !self.held.is_empty() && !std::thread::panicking() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_lacks_is_not_to_be_removed_by_anybody() {
        // Mutation: it is told of as a migration that can be begun anew.
        let told = |place: Place| place.refused("its writer lives").to_string();
        let path = Path::new("/run/godwit/x.left");
        assert!(told(Place::new(path)).contains("remove it, and begin anew"));
        let left = told(Place::of_left(path));
        assert!(left.contains("x.left stays as it is") && !left.contains("remove"), "{left}");
        let unwritten = Place::of_left(Path::new("/nonexistent/x")).write(&1).unwrap_err();
        assert!(matches!(unwritten, EngineError::Unwritten { .. }), "{unwritten}");
    }
}
