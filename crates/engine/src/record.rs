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
    /// Locks of all files that were there.
    held: Vec<File>,
}

impl Place {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), held: Vec::new() }
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
        let text = serde_json::to_vec(record).map_err(|error| self.refused(error))?;
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
            self.refused(error)
        })?;
        self.held.push(written);
        Ok(())
    }

    /// Leaves the record for another godwit, as one that is killed does.
    pub(crate) fn abandon(&mut self) {
        self.held.clear();
    }

    /// Leaves the record to a godwit with the keys that it was begun with; what to tell of it.
    pub(crate) fn left_for_its_keys(&mut self, why: &str) -> EngineError {
        self.abandon();
        EngineError::OtherKeys { path: self.path.clone(), why: why.to_owned() }
    }

    pub(crate) fn refused(&self, why: impl std::fmt::Display) -> EngineError {
        EngineError::Record { path: self.path.clone(), why: why.to_string() }
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
