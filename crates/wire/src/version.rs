//! Versions of the protocol, and features: what two godwits of different releases have in common.
//!
//! A new version is for what an older peer would misread. What one side may do without is a
//! feature: the source offers those that it has, and the destination answers with those of them
//! that it has, too. Neither needs to know what the bits that it does not have mean.
//!
//! All that is encoded differently in different versions is decided by the methods of [`Version`].

use std::fmt;

/// A version of the protocol that is spoken here: the last one, and the one before.
///
/// ```
/// use godwit_wire::Version;
///
/// assert!(Version::OLDEST < Version::NEWEST);
/// assert_eq!(Version::of_number(5), Some(Version::V5));
/// assert_eq!(Version::of_number(4), None, "nobody here speaks it any more");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum Version {
    /// Connections that are lost are made again: attempts, Keep, Resume and Resumed.
    V5 = 5,
    /// Features; the greeting of a control connection tells the oldest version that its sender
    /// speaks.
    V6 = 6,
}

impl Version {
    /// Every version that is spoken here, the oldest first.
    pub const ALL: [Self; 2] = [Self::V5, Self::V6];
    /// The oldest one.
    pub const OLDEST: Self = Self::V5;
    /// The newest one, in which a source greets first.
    pub const NEWEST: Self = Self::V6;

    /// The number in the greeting.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// The version of this number, if it is spoken here.
    #[must_use]
    pub fn of_number(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.number() == number)
    }

    /// Of the features that this godwit has, those that a session of this version can have.
    #[must_use]
    pub const fn features(self) -> Features {
        match self {
            Self::V5 => Features::NONE,
            Self::V6 => Features::HERE,
        }
    }

    /// Byte 11 in the greeting of a control connection of this version: the oldest version that
    /// its sender speaks.
    pub(crate) const fn oldest_in_greeting(self) -> u8 {
        match self {
            Self::V5 => 0,
            Self::V6 => Self::OLDEST as u8,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version {}", self.number())
    }
}

/// The versions that one side speaks, by their numbers: also those that are not spoken here.
///
/// ```
/// use godwit_wire::{Version, Versions};
///
/// let newer = Versions { oldest: 6, newest: 7 };
/// assert_eq!(newer.to_string(), "versions 6 to 7");
/// assert_eq!(newer.common(), Some(Version::V6));
/// assert_eq!(Versions { oldest: 4, newest: 4 }.common(), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest one.
    pub oldest: u16,
    /// The newest one.
    pub newest: u16,
}

impl Versions {
    /// Those that are spoken here.
    pub const HERE: Self =
        Self { oldest: Version::OLDEST.number(), newest: Version::NEWEST.number() };

    /// The newest of them that is spoken here.
    #[must_use]
    pub fn common(self) -> Option<Version> {
        let spoken = |version: &Version| (self.oldest..=self.newest).contains(&version.number());
        Version::ALL.into_iter().rev().find(spoken)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { oldest, newest } = self;
        if oldest == newest {
            write!(f, "version {newest}")
        } else {
            write!(f, "versions {oldest} to {newest}")
        }
    }
}

/// Something that two godwits do with each other only where both can; the numbers are the bits of
/// [`Features`], and are never used for anything else.
///
/// To add one: give it the next number here and a name in [`Self::name`], add it to
/// [`Features::HERE`] when this godwit has it, and send what belongs to it only in sessions whose
/// features [contain](Features::contains) it.
///
/// ```
/// assert_eq!(godwit_wire::Feature::Restart.name(), "restart");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Feature {
    /// A godwit that was restarted takes up the session of the one before it.
    Restart = 0,
    /// The destination reads back what it has placed while the guest runs, so that a comparison of
    /// all memory adds next to nothing to the downtime.
    Proof = 1,
    /// Who only asks may try what the connection carries.
    Trial = 2,
    /// A source that was started anew may ask what the destination's disks hold.
    DiskPrints = 3,
    /// The last pages may follow when the guest runs at the destination.
    PostCopy = 4,
    /// [`Self::Proof`] is of disks, too: behind the digests of RAM blocks come those of the disks.
    DiskProof = 5,
    /// The source's operator wants [`Self::PostCopy`]: a destination that cannot refuses, and says
    /// why. Only ever offered, and accepted by nobody.
    PostCopyWanted = 6,
    /// What a guest lacks is copied to a third place before it runs at the destination, which has
    /// seen that it has the same storage: one that has not, and could await pages, refuses.
    PostCopySafe = 7,
    /// Pages may come over any channel: in each round all of a segment over one, or each once.
    AnyChannel = 8,
    /// Who only asks is told what the destination's host has, also who asks without a VM. Never
    /// offered by who comes to stay.
    Facts = 9,
    /// What came for the guest's cards while it stood still is carried to where it runs.
    LatePackets = 10,
}

impl Feature {
    /// Every feature that has a number.
    pub const ALL: [Self; 11] = [
        Self::Restart,
        Self::Proof,
        Self::Trial,
        Self::DiskPrints,
        Self::PostCopy,
        Self::DiskProof,
        Self::PostCopyWanted,
        Self::PostCopySafe,
        Self::AnyChannel,
        Self::Facts,
        Self::LatePackets,
    ];

    /// How it is called in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Restart => "restart",
            Self::Proof => "proof",
            Self::Trial => "trial",
            Self::DiskPrints => "disk-prints",
            Self::PostCopy => "postcopy",
            Self::DiskProof => "disk-proof",
            Self::PostCopyWanted => "postcopy-wanted",
            Self::PostCopySafe => "postcopy-safe",
            Self::AnyChannel => "any-channel",
            Self::Facts => "facts",
            Self::LatePackets => "late-packets",
        }
    }
}

/// A set of features: a bit for each, by its number.
///
/// ```
/// use godwit_wire::{Feature, Features};
///
/// let theirs = Features(1 << 31 | 1 << Feature::Restart as u32);
/// let common = theirs.common(Features::of(Feature::Restart));
/// assert!(common.contains(Feature::Restart));
/// assert_eq!(common.to_string(), "restart");
/// assert_eq!(Features::NONE.to_string(), "none");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u32);

impl Features {
    /// None.
    pub const NONE: Self = Self(0);
    /// Those that this godwit has.
    pub const HERE: Self = Self(
        Self::of(Feature::Restart).0
            | Self::of(Feature::Proof).0
            | Self::of(Feature::Trial).0
            | Self::of(Feature::DiskPrints).0
            | Self::of(Feature::PostCopy).0
            | Self::of(Feature::DiskProof).0
            | Self::of(Feature::PostCopySafe).0
            | Self::of(Feature::AnyChannel).0
            | Self::of(Feature::Facts).0
            | Self::of(Feature::LatePackets).0,
    );

    /// One feature.
    #[must_use]
    pub const fn of(feature: Feature) -> Self {
        Self(1 << feature as u32)
    }

    /// Those that are in both.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The same and `feature`.
    #[must_use]
    pub const fn with(self, feature: Feature) -> Self {
        Self(self.0 | Self::of(feature).0)
    }

    /// All but `feature`.
    #[must_use]
    pub const fn without(self, feature: Feature) -> Self {
        Self(self.0 & !Self::of(feature).0)
    }

    /// Whether `feature` is among them.
    #[must_use]
    pub const fn contains(self, feature: Feature) -> bool {
        self.0 & Self::of(feature).0 != 0
    }

    /// Whether all of them are in `other`, too.
    #[must_use]
    pub const fn is_within(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Feature::ALL.into_iter().filter(|feature| self.contains(*feature));
        let names: Vec<_> = known.map(Feature::name).collect();
        f.pad(if names.is_empty() { "none".to_owned() } else { names.join(" and ") }.as_str())
    }
}
