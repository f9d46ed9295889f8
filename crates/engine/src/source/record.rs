//! What a source writes down for the godwit that takes its place, should it be killed in pre-copy,
//! or when the guest runs at the destination and pages are missing: enough to prove to the
//! destination that it is the same session.
//!
//! Invariant: it is gone when the migration has ended; that of pre-copy before the guest is
//! stopped.

use std::path::{Path, PathBuf};

use godwit_memory::RamBlock;
use godwit_wire::{Feature, Features, Secret, SessionId, Version};
use serde::{Deserialize, Serialize};

use super::common::Common;
use crate::EngineError;
use crate::compression::Codecs;
use crate::record::Place;
use crate::security::Security;

/// Attempts to connect that one source can make: the next one counts on from there.
const ATTEMPTS: u32 = 1 << 24;

/// What a machine is known by: its RAM, and names and bytes of the disks that move along.
pub(super) type Machine<'a> = (&'a [RamBlock], &'a [(String, u64)]);

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
    /// The one that it was shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ours: Option<Vec<u8>>,
    running: bool,
    /// Names and pages of the RAM blocks.
    blocks: Vec<(String, u64)>,
    /// Names and bytes of the disks that move along.
    #[serde(default)]
    disks: Vec<(String, u64)>,
    /// Where what is missing is to be copied to, of which the destination has seen that it is the
    /// same storage there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    safe: Option<PathBuf>,
    /// How many godwits have taken it up already.
    restarts: u8,
    /// The guest is known to run at the destination.
    #[serde(default)]
    runs_there: bool,
}

impl Record {
    /// The one that a killed godwit has left at `place` for this machine, if one has; `or_else`
    /// says what else may stand against it.
    ///
    /// # Errors
    /// When that is not dead, or the record does not fit or is not ours.
    pub(super) fn find(
        place: &mut Place,
        running: bool,
        (ram, disks): Machine<'_>,
        or_else: impl FnOnce(&Self) -> Option<&'static str>,
    ) -> Result<Option<Self>, EngineError> {
        let found = place.find(|record: &Self| {
            record.unfit(running, (ram, disks)).or_else(|| or_else(record))
        })?;
        Ok(found.map(|record| Self { restarts: record.restarts + 1, ..record }))
    }

    pub(super) fn new(
        (id, secret, version): (SessionId, Secret, Version),
        shown: Option<Vec<u8>>,
        common: &Common,
        (running, safe): (bool, Option<&Path>),
        (ram, disks): Machine<'_>,
    ) -> Self {
        Self {
            session: id.0,
            secret: secret.0,
            version: version.number(),
            features: common.features.0,
            codecs: common.codecs.0,
            shown,
            ours: None,
            running,
            blocks: named(ram),
            disks: disks.to_vec(),
            safe: safe.map(Path::to_owned),
            restarts: 0,
            runs_there: false,
        }
    }

    /// Why who would copy what is missing to `safe` cannot take it up before the guest has left, if
    /// so: the destination looks elsewhere.
    pub(super) fn copies_elsewhere(&self, safe: Option<&Path>) -> Option<&'static str> {
        (self.safe.as_deref() != safe).then_some(
            "it was begun with another --postcopy-safe, or without: give what it was begun with",
        )
    }

    /// Why the destination would not know who goes on with this `security`, if so.
    pub(super) fn other_keys(&self, security: &Security) -> Option<&'static str> {
        security.differs(self.shown.as_deref(), self.ours.as_deref())
    }

    /// The same, which was begun with this `security`.
    pub(super) fn begun_with(mut self, security: &Security) -> Self {
        self.ours = security.shows().map(<[u8]>::to_vec);
        self
    }

    /// The directory of the copy of what is missing, if one was wanted.
    pub(super) fn safe(&self) -> Option<&Path> {
        self.safe.as_deref()
    }

    /// Whether the guest is known to run at the destination.
    pub(super) fn runs_there(&self) -> bool {
        self.runs_there
    }

    /// The same, once the guest is known to run at the destination.
    pub(super) fn running_there(mut self) -> Self {
        self.runs_there = true;
        self
    }

    /// The same behind so many godwits that have taken it up.
    pub(super) fn behind(mut self, restarts: u8) -> Self {
        self.restarts = restarts;
        self
    }

    /// How many have.
    pub(super) fn restarts(&self) -> u8 {
        self.restarts
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
    fn unfit(&self, running: bool, (ram, disks): Machine<'_>) -> Option<&'static str> {
        if self.blocks != named(ram) {
            Some("it is of a machine with other RAM blocks")
        } else if self.disks != disks {
            Some("other disks moved along")
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use godwit_units::PageCount;

    use super::*;

    #[test]
    fn a_record_is_found_only_where_it_fits_and_its_writer_is_gone() {
        let path = std::env::temp_dir().join(format!("godwit-record-{}", std::process::id()));
        let ram = [RamBlock::anonymous("mem", PageCount(4)).unwrap()];
        let other = [RamBlock::anonymous("mem", PageCount(5)).unwrap()];
        let common = Common { codecs: Codecs::NONE, features: Features::HERE };
        let told = (SessionId([1; 16]), Secret([2; 32]), Version::NEWEST);
        let disk = |name: &str| (name.to_owned(), 1536);
        let disks = [disk("system")];
        let safe = Some(Path::new("/mnt"));
        let record = Record::new(told, None, &common, (true, safe), (&ram, &disks));
        let find_with = |running, safe, ram| {
            let place = &mut Place::new(&path);
            Record::find(place, running, (ram, &disks), |it| it.copies_elsewhere(safe))
                .map(|found| found.is_some())
        };
        let find = |running, ram| find_with(running, safe, ram);
        let refused = |running, ram| find(running, ram).unwrap_err().to_string();

        assert!(!find(true, &ram).unwrap());
        let mut place = Place::new(&path);
        place.write(&record).unwrap();
        assert!(refused(true, &ram).contains("still at work"));
        // As when its writer is killed.
        place.abandon();
        assert!(refused(true, &other).contains("other RAM blocks"));
        assert!(refused(false, &ram).contains("paused or let run"));
        // Mutation: the copy may go where the destination does not look.
        for other in [None, Some(Path::new("/mnt/other"))] {
            let refused = find_with(true, other, &ram).unwrap_err().to_string();
            assert!(refused.contains("another --postcopy-safe"), "{refused}");
        }
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
            let unfit = other.unfit(true, (&ram, &disks));
            assert!(unfit.is_some_and(|why| why.contains("features")));
        }
        // Mutation: disks are not compared.
        for other in [vec![], vec![disk("data")], vec![disk("system"), disk("data")]] {
            let unfit = record.unfit(true, (&ram, &other));
            assert!(unfit.is_some_and(|why| why.contains("other disks")));
        }
        assert_eq!(record.unfit(true, (&ram, &disks)), None);

        let mut next = Place::new(&path);
        // Who follows a guest that has left need not name it.
        let found = Record::find(&mut next, true, (&ram, &disks), |_| None).unwrap().unwrap();
        assert_eq!(found.safe(), safe);
        assert_eq!((found.attempt(), found.secret().0), (ATTEMPTS, [2; 32]));
        next.write(&found).unwrap();
        drop(next);
        assert!(!find(true, &ram).unwrap(), "it is gone with its migration");
    }
}
