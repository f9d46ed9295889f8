//! What a host tells of itself.

use godwit_units::ByteCount;

use super::limits::{FLAGS_LIMIT, HUGE_LIMIT, NAME_LIMIT};
use super::text::{Reader, put_text};
use crate::WireError;

/// What a host has, as it tells who only asks.
///
/// ```
/// use godwit_units::ByteCount;
/// use godwit_wire::{Facts, FrameHeader, Message, WireError};
///
/// let facts = Facts {
///     available: ByteCount(3 << 30),
///     total: ByteCount(4 << 30),
///     processor: "Made-up CPU @ 3 GHz".to_owned(),
///     flags: "fpu avx2".to_owned(),
///     ..Facts::default()
/// };
/// let frame = Message::Facts(facts.clone()).encode();
/// let (header, payload) = frame.split_first_chunk().expect("a header");
/// let header = FrameHeader::decode(header)?;
/// assert_eq!(Message::decode(&header, payload)?, Message::Facts(facts));
/// # Ok::<(), WireError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Memory that is to be had without swapping; 0 where that is not known, as is all else.
    pub available: ByteCount,
    /// All of its memory.
    pub total: ByteCount,
    /// Its pools of huge pages.
    pub huge_pages: Vec<HugePages>,
    /// How its processors are called; empty: not known.
    pub processor: String,
    /// What they can do, in the words of Linux with a space between two; empty: not known.
    pub flags: String,
}

/// Huge pages of one size.
///
/// ```
/// use godwit_units::ByteCount;
/// use godwit_wire::HugePages;
///
/// let pool = HugePages { size: ByteCount(2 << 20), total: 512, free: 100 };
/// assert!(pool.free <= pool.total);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugePages {
    /// The size of each.
    pub size: ByteCount,
    /// How many there are.
    pub total: u64,
    /// How many of them nobody uses.
    pub free: u64,
}

impl Facts {
    pub(super) fn encode(&self, frame: &mut Vec<u8>) {
        assert!(self.huge_pages.len() <= HUGE_LIMIT, "{} pools", self.huge_pages.len());
        frame.extend(self.available.0.to_le_bytes());
        frame.extend(self.total.0.to_le_bytes());
        frame.push(self.huge_pages.len() as u8);
        for HugePages { size, total, free } in &self.huge_pages {
            frame.extend([size.0, *total, *free].iter().flat_map(|it| it.to_le_bytes()));
        }
        put_text(frame, &self.processor, NAME_LIMIT);
        put_text(frame, &self.flags, FLAGS_LIMIT);
    }

    pub(super) fn decode(payload: &[u8]) -> Result<Self, WireError> {
        const WHAT: &str = "what the host has";
        let mut reader = Reader { what: WHAT, rest: payload };
        let (available, total) = (reader.number()?, reader.number()?);
        let [count] = reader.take()?;
        if usize::from(count) > HUGE_LIMIT {
            return Err(WireError::Field { what: WHAT, field: "huge pages", value: count.into() });
        }
        let mut huge_pages = Vec::new();
        for _ in 0..count {
            let (size, total, free) = (reader.number()?, reader.number()?, reader.number()?);
            huge_pages.push(HugePages { size: ByteCount(size), total, free });
        }
        let (processor, flags) = (reader.name()?, reader.words(FLAGS_LIMIT)?);
        reader.end()?;
        let (available, total) = (ByteCount(available), ByteCount(total));
        Ok(Self { available, total, huge_pages, processor, flags })
    }
}
