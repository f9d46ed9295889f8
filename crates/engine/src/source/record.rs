//! What a source writes down for the godwit that takes its place, should it be killed in pre-copy:
//! enough to prove to the destination that it is the same session.
//!
//! Invariants: the file is its owner's alone, is locked while a source lives by it, and is replaced
//! whole. It is gone when the migration has ended, or the guest is about to be stopped.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use godwit_memory::RamBlock;
use godwit_wire::{Feature, Features, Secret, SessionId, Version};
use serde::{Deserialize, Serialize};

use super::common::Common;
use crate::EngineError;
use crate::compression::Codecs;

/// Attempts to connect that one source can make: the next one counts on from there.
const ATTEMPTS: u32 = 1 << 24;
/// A record is some hundred bytes, and a certificate.
const LIMIT: u64 = 1 << 20;

/// What is written down.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    session: [u8; 16],
    secret: [u8; 32],
    version: u16,
    features: u32,
    codecs: u32,
    /// The certificate that the destination showed.
    shown: Option<Vec<u8>>,
    running: bool,
    /// Names and pages of the RAM blocks.
    blocks: Vec<(String, u64)>,
    /// How many godwits have taken it up already.
    restarts: u8,
}

impl Record {
    pub(super) fn new(
        (id, secret, version): (SessionId, Secret, Version),
        shown: Option<Vec<u8>>,
        common: &Common,
        (running, ram): (bool, &[RamBlock]),
    ) -> Self {
        Self {
            session: id.0,
            secret: secret.0,
            version: version.number(),
            features: common.features.0,
            codecs: common.codecs.0,
            shown,
            running,
            blocks: named(ram),
            restarts: 0,
        }
    }

    pub(super) fn id(&self) -> SessionId {
        SessionId(self.session)
    }

    pub(super) fn secret(&self) -> Secret {
        Secret(self.secret)
    }

    pub(super) fn version(&self) -> Option<Version> {
        Version::of_number(self.version)
    }

    pub(super) fn common(&self) -> Common {
        Common { codecs: Codecs(self.codecs), features: Features(self.features) }
    }

    pub(super) fn shown(&self) -> Option<Vec<u8>> {
        self.shown.clone()
    }

    /// The attempt behind all that were made so far.
    pub(super) fn attempt(&self) -> u32 {
        u32::from(self.restarts) * ATTEMPTS
    }

    /// Whether this godwit has what the session's sides have agreed on.
    fn is_understood(&self) -> bool {
        let (features, here) = (Features(self.features), self.version().map(Version::features));
        features.contains(Feature::Restart) && here.is_some_and(|here| features.is_within(here))
    }

    /// Why it is not of this machine, if so.
    fn unfit(&self, running: bool, ram: &[RamBlock]) -> Option<&'static str> {
        if self.blocks != named(ram) {
            Some("it is of a machine with other RAM blocks")
        } else if self.running != running {
            Some("the guest has been paused or let run since")
        } else if self.version().is_none() {
            Some("this godwit does not speak that version of the protocol")
        } else if !self.is_understood() {
            Some("this godwit has not the features of the session")
        } else if self.restarts == u8::MAX {
            Some("it was taken up too often")
        } else {
            None
        }
    }
}

fn named(ram: &[RamBlock]) -> Vec<(String, u64)> {
    ram.iter().map(|block| (block.name().to_owned(), block.pages().0)).collect()
}

/// The place of the record, which is removed with this, once it is written.
pub(super) struct Place {
    path: PathBuf,
    /// Locks of all files that were there.
    held: Vec<File>,
}

impl Place {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), held: Vec::new() }
    }

    /// The record that a killed godwit has left for this machine, if one has.
    ///
    /// # Errors
    /// When that is not dead, or the record does not fit or is not ours.
    pub(super) fn find(
        &mut self,
        running: bool,
        ram: &[RamBlock],
    ) -> Result<Option<Record>, EngineError> {
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
                return Err(self.refused("the godwit migrate that wrote it is still at work"));
            }
            Err(TryLockError::Error(error)) => return Err(self.refused(error)),
        }
        let mut text = String::new();
        let read = (&mut file).take(LIMIT).read_to_string(&mut text);
        read.map_err(|error| self.refused(error))?;
        let record: Record = serde_json::from_str(&text).map_err(|error| self.refused(error))?;
        if let Some(why) = record.unfit(running, ram) {
            return Err(self.refused(why));
        }
        self.held.push(file);
        Ok(Some(Record { restarts: record.restarts + 1, ..record }))
    }

    /// Writes `record` in the place of what is there.
    pub(super) fn write(&mut self, record: &Record) -> Result<(), EngineError> {
        let beside = self.path.with_extension(format!("{}.new", std::process::id()));
        let text = serde_json::to_vec(record).map_err(|error| self.refused(error))?;
        let write = || {
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(&beside)?;
            file.try_lock()?;
            file.write_all(&text)?;
            file.sync_all()?;
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

    fn refused(&self, why: impl std::fmt::Display) -> EngineError {
        EngineError::Record { path: self.path.clone(), why: why.to_string() }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.held.is_empty() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use godwit_units::PageCount;

    use super::*;

    #[test]
    fn a_record_is_found_only_where_it_fits_and_its_writer_is_gone() {
        let path = std::env::temp_dir().join(format!("godwit-record-{}", std::process::id()));
        let ram = [RamBlock::anonymous("mem", PageCount(4)).unwrap()];
        let other = [RamBlock::anonymous("mem", PageCount(5)).unwrap()];
        let common = Common { codecs: Codecs::NONE, features: Features::HERE };
        let told = (SessionId([1; 16]), Secret([2; 32]), Version::NEWEST);
        let record = Record::new(told, None, &common, (true, &ram));
        let find = |running, ram| Place::new(&path).find(running, ram).map(|found| found.is_some());
        let refused = |running, ram| find(running, ram).unwrap_err().to_string();

        assert!(!find(true, &ram).unwrap());
        let mut place = Place::new(&path);
        place.write(&record).unwrap();
        assert!(refused(true, &ram).contains("still at work"));
        // As when its writer is killed.
        place.held.clear();
        assert!(refused(true, &other).contains("other RAM blocks"));
        assert!(refused(false, &ram).contains("paused or let run"));
        let mode = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        mode(0o640);
        assert!(refused(true, &ram).contains("alone"));
        mode(0o600);

        // Mutation: features are not compared.
        for features in [Features::NONE, Features(Features::HERE.0 | 1 << 31)] {
            let other = Record { features: features.0, ..record.clone() };
            assert!(other.unfit(true, &ram).is_some_and(|why| why.contains("features")));
        }
        assert_eq!(record.unfit(true, &ram), None);

        let mut next = Place::new(&path);
        let found = next.find(true, &ram).unwrap().unwrap();
        assert_eq!((found.attempt(), found.secret().0), (ATTEMPTS, [2; 32]));
        next.write(&found).unwrap();
        drop(next);
        assert!(!find(true, &ram).unwrap(), "it is gone with its migration");
    }
}
