//! What a source offers.

use godwit_units::{ByteCount, PageCount};

use super::limits::{BLOCKS_LIMIT, DISKS_LIMIT, NAME_LIMIT};
use super::text::{Reader, put_text};
use crate::{Features, WireError};

/// A RAM block as the source offers it.
///
/// ```
/// use godwit_units::PageCount;
/// use godwit_wire::BlockOffer;
///
/// let block = BlockOffer { name: "mem".to_owned(), pages: PageCount(1 << 20) };
/// assert_eq!(block.pages.bytes().0, 4 << 30);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockOffer {
    /// Its name.
    pub name: String,
    /// Its size.
    pub pages: PageCount,
}

/// A disk as the source offers it.
///
/// ```
/// use godwit_units::ByteCount;
/// use godwit_wire::DiskOffer;
///
/// let disk = DiskOffer {
///     name: "vda".to_owned(),
///     size: ByteCount(10 << 30),
///     granularity: ByteCount::ZERO,
/// };
/// assert_eq!(disk.granularity, ByteCount::ZERO, "not chosen yet");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOffer {
    /// Its name.
    pub name: String,
    /// Bytes that the guest sees.
    pub size: ByteCount,
    /// The size of the blocks in which the source tracks writes to it, for the destination's
    /// information; 0: not chosen yet.
    pub granularity: ByteCount,
}

/// What the source wants to send.
///
/// ```
/// use godwit_units::PageCount;
/// use godwit_wire::{BlockOffer, Features, FrameHeader, Message, Offer, WireError};
///
/// let offer = Offer {
///     channels: 2,
///     codecs: 0,
///     features: Features::HERE,
///     verify: false,
///     running: true,
///     machine: "qemu".to_owned(),
///     blocks: vec![BlockOffer { name: "mem".to_owned(), pages: PageCount(1 << 20) }],
///     disks: Vec::new(),
/// };
/// let frame = Message::Offer(offer.clone()).encode();
/// let (header, payload) = frame.split_first_chunk().expect("a header");
/// let header = FrameHeader::decode(header)?;
/// header.verify(payload)?;
/// assert_eq!(Message::decode(&header, payload)?, Message::Offer(offer));
/// # Ok::<(), WireError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// How many data channels it will open.
    pub channels: u8,
    /// Codecs that it would like to use: a bit for each, by its number
    /// ([`PageFrame::codec`](crate::PageFrame::codec)).
    pub codecs: u32,
    /// Features that it has; none in version 5.
    pub features: Features,
    /// Whether digests will be compared.
    pub verify: bool,
    /// Whether the guest runs now and shall run at the destination.
    pub running: bool,
    /// What kind of machine it is (`qemu`): the device state is of that kind.
    pub machine: String,
    /// The RAM blocks, in the order in which frames number them.
    pub blocks: Vec<BlockOffer>,
    /// The disks that move along, numbered on from the RAM blocks. Each has one more channel,
    /// numbered on from [`Self::channels`].
    pub disks: Vec<DiskOffer>,
}

impl Offer {
    /// Appends all but its features; returns these, as the header has them.
    pub(super) fn encode(&self, frame: &mut Vec<u8>) -> u64 {
        assert!(self.blocks.len() <= BLOCKS_LIMIT, "{} RAM blocks", self.blocks.len());
        frame.extend([self.channels, self.verify.into(), self.running.into()]);
        frame.extend(self.codecs.to_le_bytes());
        put_text(frame, &self.machine, NAME_LIMIT);
        frame.extend((self.blocks.len() as u16).to_le_bytes());
        for block in &self.blocks {
            put_text(frame, &block.name, NAME_LIMIT);
            frame.extend(block.pages.0.to_le_bytes());
        }
        assert!(self.disks.len() <= DISKS_LIMIT, "{} disks", self.disks.len());
        frame.push(self.disks.len() as u8);
        for disk in &self.disks {
            put_text(frame, &disk.name, NAME_LIMIT);
            frame.extend(disk.size.0.to_le_bytes());
            frame.extend((disk.granularity.0 as u32).to_le_bytes());
        }
        self.features.0.into()
    }

    pub(super) fn decode(aux: u64, payload: &[u8]) -> Result<Self, WireError> {
        const WHAT: &str = "offer";
        // Bits above these are somebody's who has more features than there are numbers today.
        let features = Features(aux as u32);
        let mut reader = Reader { what: WHAT, rest: payload };
        let flag = |field, value: u8| match value {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(WireError::Field { what: WHAT, field, value: other.into() }),
        };
        let [channels, verify, running] = reader.take()?;
        let codecs = u32::from_le_bytes(reader.take()?);
        let machine = reader.name()?;
        let count = u16::from_le_bytes(reader.take()?);
        if usize::from(count) > BLOCKS_LIMIT {
            return Err(WireError::Field { what: WHAT, field: "RAM blocks", value: count.into() });
        }
        let mut blocks = Vec::new();
        for _ in 0..count {
            let name = reader.name()?;
            blocks.push(BlockOffer { name, pages: PageCount(u64::from_le_bytes(reader.take()?)) });
        }
        let [count] = reader.take()?;
        if usize::from(count) > DISKS_LIMIT {
            return Err(WireError::Field { what: WHAT, field: "disks", value: count.into() });
        }
        let mut disks = Vec::new();
        for _ in 0..count {
            let name = reader.name()?;
            let size = ByteCount(u64::from_le_bytes(reader.take()?));
            disks.push(DiskOffer {
                name,
                size,
                granularity: ByteCount(u32::from_le_bytes(reader.take()?).into()),
            });
        }
        reader.end()?;
        Ok(Self {
            channels,
            codecs,
            features,
            verify: flag("verify", verify)?,
            running: flag("running", running)?,
            machine,
            blocks,
            disks,
        })
    }
}
