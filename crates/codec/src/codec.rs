//! The codecs by name, with their parameters, and their numbers on the wire.
//!
//! Parameters matter to the sender only: whatever a codec made with any of them, the same decoder
//! reads.

use std::fmt;
use std::str::FromStr;

use crate::{CodecError, Corruption};

/// A codec with its parameter, as the sender uses it. Printed and parsed as `none`, `lz4`, `lz4:8`,
/// `zstd`, `zstd:3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Pages as they are.
    None,
    /// LZ4 blocks.
    Lz4 {
        /// 1 (smallest result) to 1000; each step makes it faster and compress less.
        acceleration: u16,
    },
    /// Zstandard frames.
    Zstd {
        /// -50 (fastest) to 19 (smallest result), not 0.
        level: i8,
    },
}

/// The number of a codec on the wire. Numbers are only ever added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum CodecId {
    /// The bytes of the pages.
    None = 0,
    /// Blocks of [`crate::BLOCK_LEN`] input bytes (the last may be shorter), each after a
    /// little-endian u32: its length, and in the highest bit whether it stands as it is. Else it is
    /// an LZ4 block (not an LZ4 frame) of its own.
    Lz4 = 1,
    /// One Zstandard frame (RFC 8878) without dictionary, checksum and content size.
    Zstd = 2,
}

impl CodecId {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::None, Self::Lz4, Self::Zstd];

    /// The codec of this number.
    ///
    /// # Errors
    /// When there is none.
    pub fn from_wire(number: u8) -> Result<Self, CodecError> {
        Self::ALL.into_iter().find(|id| *id as u8 == number).ok_or(CodecError::Unknown { number })
    }
}

impl fmt::Display for CodecId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        })
    }
}

impl Codec {
    /// Accelerations that are taken.
    pub const ACCELERATIONS: std::ops::RangeInclusive<u16> = 1..=1000;
    /// Levels that are taken, but for 0, which zstd itself reads as its default.
    pub const LEVELS: std::ops::RangeInclusive<i8> = -50..=19;

    /// Its number on the wire.
    #[must_use]
    pub const fn id(self) -> CodecId {
        match self {
            Self::None => CodecId::None,
            Self::Lz4 { .. } => CodecId::Lz4,
            Self::Zstd { .. } => CodecId::Zstd,
        }
    }

    /// Checks its parameter.
    ///
    /// # Errors
    /// When it is out of range.
    pub fn check(self) -> Result<Self, CodecError> {
        let fits = match self {
            Self::None => true,
            Self::Lz4 { acceleration } => Self::ACCELERATIONS.contains(&acceleration),
            Self::Zstd { level } => Self::LEVELS.contains(&level) && level != 0,
        };
        if fits { Ok(self) } else { Err(CodecError::Parameter { codec: self }) }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Lz4 { acceleration } => write!(f, "lz4:{acceleration}"),
            Self::Zstd { level } => write!(f, "zstd:{level}"),
        }
    }
}

impl FromStr for Codec {
    type Err = CodecError;

    fn from_str(text: &str) -> Result<Self, CodecError> {
        let (name, parameter) = match text.split_once(':') {
            Some((name, parameter)) => (name, Some(parameter)),
            None => (text, None),
        };
        let unknown = || CodecError::Name { text: text.to_owned() };
        match (name, parameter) {
            ("none", None) => Ok(Self::None),
            ("lz4", None) => Ok(Self::Lz4 { acceleration: 1 }),
            ("lz4", Some(number)) => {
                Self::Lz4 { acceleration: number.parse().map_err(|_| unknown())? }.check()
            }
            ("zstd", None) => Ok(Self::Zstd { level: 1 }),
            ("zstd", Some(number)) => {
                Self::Zstd { level: number.parse().map_err(|_| unknown())? }.check()
            }
            _ => Err(unknown()),
        }
    }
}

impl CodecError {
    /// What is wrong with input that `codec` was to decode.
    pub(crate) fn corrupt(codec: CodecId, corruption: Corruption) -> Self {
        Self::Corrupt { codec, corruption }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_printed() {
        let all = [
            Codec::None,
            Codec::Lz4 { acceleration: 1 },
            Codec::Lz4 { acceleration: 1000 },
            Codec::Zstd { level: -5 },
            Codec::Zstd { level: 19 },
        ];
        for codec in all {
            assert_eq!(codec.to_string().parse::<Codec>().unwrap(), codec);
        }
        assert_eq!("lz4".parse::<Codec>().unwrap(), Codec::Lz4 { acceleration: 1 });
        assert_eq!("zstd".parse::<Codec>().unwrap(), Codec::Zstd { level: 1 });
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for text in [
            "", "gzip", "none:1", "lz4:0", "lz4:1001", "lz4:-1", "lz4:", "zstd:0", "zstd:20",
            "zstd:-51",
        ] {
            assert!(text.parse::<Codec>().is_err(), "{text}");
        }
    }

    #[test]
    fn wire_numbers_do_not_change() {
        let numbers: Vec<u8> = CodecId::ALL.into_iter().map(|id| id as u8).collect();
        assert_eq!(numbers, [0, 1, 2]);
        for id in CodecId::ALL {
            assert_eq!(CodecId::from_wire(id as u8).unwrap(), id);
        }
        let error = CodecId::from_wire(3).unwrap_err();
        assert_eq!(error.to_string(), "there is no codec of number 3");
    }
}
