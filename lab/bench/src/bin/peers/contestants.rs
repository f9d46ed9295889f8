//! Who moves guests: godwit, and QEMU in each of its ways.

use godwit_testbed::Style;

/// Places of KVM's ring; more than QEMU's documentation has in its example, so that a guest that
/// writes much is not held up by a ring that is full.
const RING: u32 = 16_384;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contestant {
    Godwit,
    GodwitPostCopy,
    Plain,
    Multifd2,
    Multifd4,
    Multifd8,
    MultifdZstd,
    Multifd8Zstd,
    Xbzrle,
    AutoConverge,
    DirtyLimit,
    PostCopy,
}

impl Contestant {
    pub(crate) const ALL: [Self; 12] = [
        Self::Godwit,
        Self::GodwitPostCopy,
        Self::Plain,
        Self::Multifd2,
        Self::Multifd4,
        Self::Multifd8,
        Self::MultifdZstd,
        Self::Multifd8Zstd,
        Self::Xbzrle,
        Self::AutoConverge,
        Self::DirtyLimit,
        Self::PostCopy,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Godwit => "godwit",
            Self::GodwitPostCopy => "godwit post-copy",
            Self::Plain => "QEMU plain",
            Self::Multifd2 => "QEMU multifd 2",
            Self::Multifd4 => "QEMU multifd 4",
            Self::Multifd8 => "QEMU multifd 8",
            Self::MultifdZstd => "QEMU multifd 2, zstd",
            Self::Multifd8Zstd => "QEMU multifd 8, zstd",
            Self::Xbzrle => "QEMU xbzrle",
            Self::AutoConverge => "QEMU auto-converge",
            Self::DirtyLimit => "QEMU dirty-limit",
            Self::PostCopy => "QEMU post-copy",
        }
    }

    /// By which of QEMU's ways; `None`: by godwit.
    pub(crate) fn style(self) -> Option<Style> {
        match self {
            Self::Godwit | Self::GodwitPostCopy => None,
            Self::Plain => Some(Style::Plain),
            Self::Multifd2 => Some(Style::Multifd(2)),
            Self::Multifd4 => Some(Style::Multifd(4)),
            Self::Multifd8 => Some(Style::Multifd(8)),
            Self::MultifdZstd => Some(Style::Zstd(2)),
            Self::Multifd8Zstd => Some(Style::Zstd(8)),
            Self::Xbzrle => Some(Style::Xbzrle),
            Self::AutoConverge => Some(Style::AutoConverge),
            Self::DirtyLimit => Some(Style::DirtyLimit),
            Self::PostCopy => Some(Style::PostCopyNow),
        }
    }

    /// Whether the guest runs at the destination before its memory is there.
    pub(crate) fn is_post_copy(self) -> bool {
        matches!(self, Self::GodwitPostCopy | Self::PostCopy)
    }

    /// Places of the ring that its machine needs.
    pub(crate) fn ring(self) -> Option<u32> {
        (self == Self::DirtyLimit).then_some(RING)
    }

    /// What godwit is told; the source QEMU must live on to be asked what it used.
    pub(crate) fn options(self) -> &'static [&'static str] {
        match self {
            Self::GodwitPostCopy => &[
                "--keep-source",
                "--downtime-limit",
                "300ms",
                "--postcopy",
                "now",
                "--reconnect",
                "60s",
            ],
            _ => &["--keep-source", "--downtime-limit", "300ms"],
        }
    }
}
