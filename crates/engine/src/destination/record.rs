//! What a destination writes down for the godwit that takes its place, should it be killed while
//! pages arrive: enough to know the source again, which comes back for what the machine holds.
//!
//! Invariant: it is gone before the machine is told to load, and when the migration has ended.

use std::path::{Path, PathBuf};

use godwit_disk::Disk;
use godwit_memory::RamBlock;
use godwit_units::ByteCount;
use godwit_wire::{Feature, Features, Secret, SessionId, Version};
use serde::{Deserialize, Serialize};

use crate::security::Security;

/// What is written down.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) session: [u8; 16],
    pub(super) secret: [u8; 32],
    pub(super) version: u16,
    pub(super) features: u32,
    /// What an operator would call the source, and the certificate that it showed.
    pub(super) source: String,
    pub(super) shown: Option<Vec<u8>>,
    /// The one that it was shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ours: Option<Vec<u8>>,
    /// The attempt to come back that was taken last.
    pub(super) attempt: u32,
    /// Whether the guest runs at the source, and what is placed is to be compared.
    pub(super) running: bool,
    pub(super) verified: bool,
    /// Names and pages of the RAM blocks, in the source's order.
    pub(super) blocks: Vec<(String, u64)>,
    /// Names and bytes of the disks that move along.
    #[serde(default)]
    pub(super) disks: Vec<(String, u64)>,
    /// Where the copy of what is missing is, of which it was seen that the source makes it there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) safe: Option<PathBuf>,
}

impl Record {
    pub(super) fn id(&self) -> SessionId {
        SessionId(self.session)
    }

    pub(super) fn secret(&self) -> Secret {
        Secret(self.secret)
    }

    pub(super) fn features(&self) -> Features {
        Features(self.features)
    }

    pub(super) fn version(&self) -> Option<Version> {
        Version::of_number(self.version)
    }

    pub(super) fn disks(&self) -> Vec<Disk> {
        let disk =
            |(name, size): &(String, u64)| Disk { name: name.clone(), size: ByteCount(*size) };
        self.disks.iter().map(disk).collect()
    }

    /// The number in `ram` of each RAM block of the source; `None`: it is another machine's.
    pub(super) fn order(&self, ram: &[RamBlock]) -> Option<Vec<usize>> {
        let find = |(name, pages): &(String, u64)| {
            ram.iter().position(|block| block.name() == name && block.pages().0 == *pages)
        };
        let order: Vec<usize> = self.blocks.iter().map(find).collect::<Option<_>>()?;
        let all = (0..ram.len()).all(|own| order.contains(&own));
        (all && order.len() == ram.len()).then_some(order)
    }

    /// Why who would look for the copy of what is missing in `safe` cannot take it up before the
    /// guest has left, if so: the source makes it elsewhere.
    pub(super) fn copied_elsewhere(&self, safe: Option<&Path>) -> Option<&'static str> {
        let looked_for = self.features().contains(Feature::PostCopySafe);
        (looked_for && self.safe.as_deref() != safe)
            .then_some("it was begun with another --postcopy-safe: give what it was begun with")
    }

    /// Why the source would not know who goes on with this `security`, if so.
    pub(super) fn other_keys(&self, security: &Security) -> Option<&'static str> {
        security.differs(self.shown.as_deref(), self.ours.as_deref())
    }

    /// Why it is not of this machine, if so.
    pub(super) fn unfit(&self, ram: &[RamBlock]) -> Option<&'static str> {
        let here = self.version().map(Version::features);
        let features = self.features();
        if self.order(ram).is_none() {
            Some("it is of a machine with other RAM blocks")
        } else if here.is_none() {
            Some("this godwit does not speak that version of the protocol")
        } else if !features.contains(Feature::Restart)
            || !here.is_some_and(|here| features.is_within(here))
        {
            Some("this godwit has not the features of the session")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_tls::{Files, Host, Keys, Side, make};
    use godwit_units::PageCount;

    use super::*;

    fn record() -> Record {
        Record {
            session: [1; 16],
            secret: [2; 32],
            version: Version::NEWEST.number(),
            features: Features::HERE.0,
            source: "east".to_owned(),
            shown: None,
            ours: None,
            attempt: 3,
            running: true,
            verified: false,
            blocks: vec![("b".to_owned(), 5), ("a".to_owned(), 4)],
            disks: vec![("system".to_owned(), 1536)],
            safe: Some("/mnt".into()),
        }
    }

    #[test]
    fn a_record_fits_its_own_machine_and_a_godwit_with_its_features() {
        let block = |name: &str, pages| RamBlock::anonymous(name, PageCount(pages)).unwrap();
        let record = record();
        let safe = Some(Path::new("/mnt"));
        let ram = [block("a", 4), block("b", 5)];
        assert_eq!((record.unfit(&ram), record.order(&ram)), (None, Some(vec![1, 0])));
        assert_eq!(record.copied_elsewhere(safe), None);
        // Mutation: it would look for the copy where the source does not make it.
        for elsewhere in [None, Some(Path::new("/mnt/other"))] {
            let why = record.copied_elsewhere(elsewhere);
            assert!(why.is_some_and(|why| why.contains("another --postcopy-safe")));
        }
        let other = [
            vec![block("a", 4)],
            vec![block("a", 4), block("b", 6)],
            vec![block("a", 4), block("b", 5), block("c", 1)],
        ];
        for other in other {
            assert!(record.unfit(&other).is_some_and(|why| why.contains("other RAM blocks")));
        }
        for features in [Features::NONE, Features(Features::HERE.0 | 1 << 31)] {
            let other = Record { features: features.0, ..record.clone() };
            assert!(other.unfit(&ram).is_some_and(|why| why.contains("features")));
        }
        let other = Record { version: u16::MAX, ..record };
        assert!(other.unfit(&ram).is_some_and(|why| why.contains("version")));
    }

    #[test]
    fn who_goes_on_has_the_keys_that_the_source_knows() {
        // Mutations: what is shown is not looked at; who has no keys is not refused.
        let dir = std::env::temp_dir().join(format!("godwit-goes-on-{}", std::process::id()));
        let made = make(&dir, &["east", "north"].map(str::to_owned), 1).unwrap();
        let keys = |number: usize| {
            let files = Files::in_dir(&made.hosts[number], Side::Destination).unwrap();
            Security::Tls(Host::destination(&Keys::read(&files).unwrap(), &[]).unwrap())
        };
        let ([east, north], plain) = ([keys(0), keys(1)], [Security::Local, Security::Insecure]);
        std::fs::remove_dir_all(&dir).unwrap();
        let ours = east.shows().map(<[u8]>::to_vec);
        let with_keys = Record { shown: Some(vec![1]), ours, ..record() };
        assert_eq!(with_keys.other_keys(&east), None);
        assert!(with_keys.other_keys(&north).is_some_and(|why| why.contains("other keys")));
        for plain in &plain {
            let why = with_keys.other_keys(plain);
            assert!(why.is_some_and(|why| why.contains("begun with keys")), "{why:?}");
            assert_eq!(record().other_keys(plain), None);
        }
        assert!(record().other_keys(&east).is_some_and(|why| why.contains("without keys")));
        // One of a release that did not write down its own.
        let older = Record { ours: None, ..with_keys };
        assert_eq!(older.other_keys(&north), None);
    }
}
