//! What is to be done about the size of pages, as the operator says it, and which codecs both sides
//! know.

use std::fmt;
use std::str::FromStr;

use godwit_codec::{Codec, CodecId};

/// How pages are compressed: `auto`, `none`, `lz4`, `lz4:ACCELERATION`, `zstd`, `zstd:LEVEL`.
///
/// ```
/// use godwit_engine::compression::{Codecs, Compression};
///
/// let compression: Compression = "zstd:3".parse()?;
/// assert_eq!(compression.to_string(), "zstd:3");
/// assert_eq!(Compression::Auto.codecs(), Codecs::ALL);
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// By segment, from what is seen of link, processor and pages.
    #[default]
    Auto,
    /// Always by this codec; pages that it does not make smaller are sent as they are.
    Fixed(Codec),
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Fixed(codec) => codec.fmt(f),
        }
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == "auto" {
            return Ok(Self::Auto);
        }
        text.trim().parse().map(Self::Fixed).map_err(|error| {
            format!("{error}; use auto, none, lz4, lz4:1 to lz4:1000, zstd, or zstd:-50 to zstd:19")
        })
    }
}

impl Compression {
    /// The codecs that it may come to, as the bits of an offer.
    #[must_use]
    pub fn codecs(self) -> Codecs {
        match self {
            Self::Auto => Codecs::ALL,
            Self::Fixed(codec) => Codecs::of(codec.id()),
        }
    }
}

/// A set of codecs: a bit for each, by its number. Pages as they are need no bit.
///
/// ```
/// use godwit_codec::CodecId;
/// use godwit_engine::compression::Codecs;
///
/// let common = Codecs::ALL.common(Codecs::of(CodecId::Lz4));
/// assert!(common.contains(CodecId::Lz4) && !common.contains(CodecId::Zstd));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Codecs(pub u32);

impl Codecs {
    /// None but pages as they are.
    pub const NONE: Self = Self(0);
    /// All that are known here.
    pub const ALL: Self = Self(1 << CodecId::Lz4 as u32 | 1 << CodecId::Zstd as u32);

    /// One codec.
    #[must_use]
    pub fn of(id: CodecId) -> Self {
        Self(1 << id as u32 & Self::ALL.0)
    }

    /// Those that are in both.
    #[must_use]
    pub fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether `id` is among them.
    #[must_use]
    pub fn contains(self, id: CodecId) -> bool {
        id == CodecId::None || self.0 >> id as u32 & 1 == 1
    }

    /// The codecs.
    #[must_use]
    pub fn list(self) -> Vec<CodecId> {
        CodecId::ALL.into_iter().filter(|id| self.contains(*id)).collect()
    }
}

impl fmt::Display for Codecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.list().into_iter().filter(|id| *id != CodecId::None);
        let names: Vec<String> = names.map(|id| id.to_string()).collect();
        f.pad(if names.is_empty() { "none".to_owned() } else { names.join(" and ") }.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_is_shown() {
        for text in ["auto", "none", "lz4:1", "lz4:8", "zstd:3"] {
            assert_eq!(text.parse::<Compression>().unwrap().to_string(), text);
        }
        for text in ["", "lz5", "lz4:0", "zstd:99"] {
            assert!(text.parse::<Compression>().unwrap_err().contains("use auto"), "{text}");
        }
    }

    #[test]
    fn codecs_are_sets() {
        assert!(Codecs::NONE.contains(CodecId::None) && !Codecs::NONE.contains(CodecId::Lz4));
        assert_eq!(Codecs::ALL.list(), CodecId::ALL);
        assert_eq!(Codecs::ALL.to_string(), "lz4 and zstd");
        assert_eq!(Codecs::of(CodecId::None), Codecs::NONE);
        assert_eq!(
            Codecs::ALL.common(Codecs::of(CodecId::Zstd)).list(),
            [CodecId::None, CodecId::Zstd]
        );
        // A bit that is not known here is none of ours.
        assert_eq!(Codecs(1 << 9).common(Codecs::ALL), Codecs::NONE);
    }
}
