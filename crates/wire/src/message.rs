//! Messages of the control connection: one frame each.

use std::time::Duration;

use godwit_units::{ByteCount, PageCount, PageIndex, PageRun};

use crate::frame::{FrameHeader, FrameKind, HEADER_LEN, PAYLOAD_LIMIT, seal};
use crate::{Features, WireError};

/// RAM blocks in an offer.
pub const BLOCKS_LIMIT: usize = 1024;
/// Disks in an offer: with the channels of memory, their channels are numbered in one byte.
pub const DISKS_LIMIT: usize = 64;
/// Channels of memory.
pub const CHANNELS_LIMIT: u8 = 16;
/// Bytes in the secret of a session.
pub const SECRET_LEN: usize = 32;
/// Bytes in what proves it.
pub const PROOF_LEN: usize = 32;
/// Bytes in the name of a RAM block or a disk.
pub const NAME_LIMIT: usize = 255;
/// Bytes in the text of an abort.
pub const TEXT_LIMIT: usize = 4096;
/// Sizes of huge pages that a host tells of.
pub const HUGE_LIMIT: usize = 8;
/// Bytes in what a host tells of its processor's features.
pub const FLAGS_LIMIT: usize = 8192;
/// Bytes of one trial of the connection.
pub const TRIAL_LIMIT: usize = 256 << 10;
/// Bytes of device state in one message.
pub const DEVICE_STATE_CHUNK: usize = 256 << 10;
/// Bytes in a question of the destination.
pub const QUESTION_LIMIT: usize = 64 << 10;
/// Bytes in the answer to one.
pub const ANSWER_LIMIT: usize = 1 << 20;
/// Questions in one migration.
pub const QUESTIONS_LIMIT: usize = 4096;
/// Bytes of a packet for a card of the guest's.
pub const PACKET_LIMIT: usize = 80 << 10;
/// Digests in one message.
pub const DIGESTS_PER_MESSAGE: usize = 4096;
/// Pages of which one message has the fingerprints: those of one segment.
pub const PRINTS_PER_MESSAGE: usize = 4096;
/// Most runs of missing pages, in one message and in all of a session.
pub const MISSING_LIMIT: usize = 4096;
/// Most pages that are asked for in one message.
pub const WANTED_LIMIT: usize = 1024;

/// Channels of memory and of disks together.
const PLACED_LIMIT: usize = CHANNELS_LIMIT as usize + DISKS_LIMIT;

const _: () = assert!(QUESTION_LIMIT <= PAYLOAD_LIMIT && ANSWER_LIMIT <= PAYLOAD_LIMIT);
const _: () =
    assert!(DEVICE_STATE_CHUNK <= PAYLOAD_LIMIT && DIGESTS_PER_MESSAGE * 16 + 16 <= PAYLOAD_LIMIT);

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

/// Why a side gave up; the numbers are the wire's.
///
/// ```
/// use godwit_wire::{AbortCode, Message};
///
/// let text = "the VMs have different sizes".to_owned();
/// let frame = Message::Abort { code: AbortCode::Layout, text }.encode();
/// assert_eq!(frame[8], AbortCode::Layout as u8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum AbortCode {
    /// The VMs do not fit together.
    Layout = 1,
    /// The VM at this side cannot take part.
    Machine = 2,
    /// The peer sent what it must not send.
    Protocol = 3,
    /// Guest memory could not be read or written.
    Memory = 4,
    /// The device state could not be saved or loaded.
    DeviceState = 5,
    /// The digests differ.
    Digest = 6,
    /// The operator cancelled.
    Cancelled = 7,
    /// A wait reached its limit.
    Timeout = 8,
    /// Policy gave up: the migration would not finish.
    NotConverging = 9,
    /// Something else.
    Other = 10,
    /// The destination has another guest to take in.
    Busy = 11,
}

impl AbortCode {
    /// Every code there is.
    pub const ALL: [Self; 11] = [
        Self::Layout,
        Self::Machine,
        Self::Protocol,
        Self::Memory,
        Self::DeviceState,
        Self::Digest,
        Self::Cancelled,
        Self::Timeout,
        Self::NotConverging,
        Self::Other,
        Self::Busy,
    ];
}

/// The secret of a session, by which its source is known when it comes back.
///
/// ```
/// let secret = godwit_wire::Secret([7; godwit_wire::SECRET_LEN]);
/// assert_eq!(format!("{secret:?}"), "Secret", "it is shown to nobody");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; SECRET_LEN]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// A message of the control connection. S: sent by the source, D: by the destination.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_wire::{FrameHeader, Message, WireError};
///
/// let said = Message::RoundAck { round: 3, flush: Duration::from_millis(2) };
/// let frame = said.encode();
/// let (header, payload) = frame.split_first_chunk().expect("a header");
/// let header = FrameHeader::decode(header)?;
/// header.verify(payload)?;
/// assert_eq!(Message::decode(&header, payload)?, said);
/// # Ok::<(), WireError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// S: what will be sent.
    Offer(Offer),
    /// D: the offer fits, go on.
    Accept {
        /// Of the codecs in the offer, those that it takes.
        codecs: u32,
        /// Of the features in the offer, those that it has, too: the session has these.
        features: Features,
    },
    /// Both: the sender gives up; the guest stays where it may run.
    Abort {
        /// Why, for a program.
        code: AbortCode,
        /// Why, for a person.
        text: String,
    },
    /// S: every channel has carried all of this round, up to its barrier.
    RoundEnd {
        /// The round, counted from 0.
        round: u32,
    },
    /// D: every page of the round is in place.
    RoundAck {
        /// The round.
        round: u32,
        /// How long the last flush of a disk took, in whole microseconds; zero where none was made
        /// since the acknowledgement before.
        flush: Duration,
    },
    /// S: the guest will stop soon; be ready for device state.
    Prepare,
    /// D: ready for device state.
    Prepared,
    /// S: send digests of all RAM blocks.
    DigestRequest,
    /// D: digests of consecutive chunks of a RAM block.
    Digests {
        /// The RAM block.
        block: u32,
        /// The first chunk.
        first: u32,
        /// One XXH3-128 a chunk.
        digests: Vec<u128>,
    },
    /// S: a piece of the device state, in order.
    DeviceState(Vec<u8>),
    /// S: the device state is complete.
    DeviceStateEnd,
    /// D: all is written, checked and loaded; the guest is stopped and can run here.
    Ready,
    /// S: the guest is yours. The source never runs it again unless told [`Message::Discarded`].
    Commit,
    /// D: the guest runs here.
    Running,
    /// D: the guest does not run here and never will.
    Discarded,
    /// S: heard; nothing will be asked any more.
    Farewell,
    /// Both: the sender is there. Said every now and then, in every state, so that silence means
    /// something.
    Alive,
    /// D: a question about the machine, in the words of its kind. Only between the offer and the
    /// answer to it.
    Question(Vec<u8>),
    /// S: the answer.
    Answer(Vec<u8>),
    /// S: would this be accepted? In the place of an offer: the answer is that to an offer, and
    /// ends the session.
    Inquiry(Offer),
    /// S: keep what arrives when the connections are lost, for a source that proves this secret.
    /// Behind Accept, once.
    Keep(Secret),
    /// S: the first message of a connection of the role resume. All other connections of the
    /// session are given up.
    Resume {
        /// How many channels of memory there will be from now on.
        channels: u8,
        /// That the sender has the secret.
        proof: [u8; PROOF_LEN],
    },
    /// D: the answer. Whatever still came over the connections before is in place or thrown away.
    Resumed {
        /// The attempt whose channels the counts are of.
        attempt: u32,
        /// How many frames of each channel are in place, barriers included; those of memory first.
        placed: Vec<u64>,
        /// That the sender has the secret.
        proof: [u8; PROOF_LEN],
    },
    /// S: behind Resumed and the channels' greetings, what do you hold of every page? From a source
    /// that was started anew and knows nothing of it. Only with
    /// [`Feature::Restart`](crate::Feature::Restart).
    PrintsRequest {
        /// And of every disk that moves along? Only with
        /// [`Feature::DiskPrints`](crate::Feature::DiskPrints), or of what was read back with
        /// [`Feature::DiskProof`](crate::Feature::DiskProof).
        disks: bool,
    },
    /// D: the fingerprints of the pages of one segment, in order; none where all are zero. Of a
    /// disk one for each 16 pages, or, of one that was read back for an audit, one for each page.
    Prints {
        /// The RAM block or disk.
        block: u32,
        /// The segment, counted from 0 in its block.
        segment: u32,
        /// XXH3-64 under a seed that both sides make of the session's secret; 1 where that is 0.
        /// 0: what a disk holds there is not known.
        prints: Vec<u64>,
    },
    /// S: bytes that mean nothing, sent for the time that they take. Only behind an inquiry that
    /// was accepted, with [`Feature::Trial`](crate::Feature::Trial).
    Trial(Vec<u8>),
    /// D: all that came of [`Trial`](Self::Trial)s so far.
    Tried {
        /// Their bytes.
        bytes: u64,
        /// The time at the destination, in nanoseconds since 1970.
        clock: u64,
    },
    /// D: what its host has. Before the answer to an inquiry of a source that has
    /// [`Feature::Facts`](crate::Feature::Facts).
    Facts(Facts),
    /// S: behind Commit, a packet that came for a card of the guest's while it stood still: a
    /// `struct virtio_net_hdr` of 10 bytes (linux/virtio_net.h), little-endian, and an Ethernet
    /// frame. Only with [`Feature::LatePackets`](crate::Feature::LatePackets).
    LatePacket(Vec<u8>),
    /// S: read back what is placed, and answer the request for digests with those of fingerprints
    /// that are made with this seed. Only with [`Feature::Proof`](crate::Feature::Proof).
    Prove {
        /// The seed.
        seed: u64,
    },
    /// S: pages of a RAM block that are still to come when the guest runs at the destination, in
    /// order and apart from each other. Behind the end of the last round, and before the first
    /// piece of device state. Only with [`Feature::PostCopy`](crate::Feature::PostCopy).
    Missing {
        /// The RAM block.
        block: u32,
        /// Nothing else is missing.
        last: bool,
        /// The pages.
        runs: Vec<PageRun>,
    },
    /// D: somebody waits for these of the missing pages.
    Wanted {
        /// The RAM block.
        block: u32,
        /// The pages.
        pages: Vec<PageIndex>,
    },
    /// D: every missing page is in place, and the source is needed no more.
    Placed,
}

impl Message {
    /// The kind of frame that carries it.
    #[must_use]
    pub fn kind(&self) -> FrameKind {
        match self {
            Self::Offer(_) => FrameKind::Offer,
            Self::Accept { .. } => FrameKind::Accept,
            Self::Abort { .. } => FrameKind::Abort,
            Self::RoundEnd { .. } => FrameKind::RoundEnd,
            Self::RoundAck { .. } => FrameKind::RoundAck,
            Self::Prepare => FrameKind::Prepare,
            Self::Prepared => FrameKind::Prepared,
            Self::DigestRequest => FrameKind::DigestRequest,
            Self::Digests { .. } => FrameKind::Digests,
            Self::DeviceState(_) => FrameKind::DeviceState,
            Self::DeviceStateEnd => FrameKind::DeviceStateEnd,
            Self::Ready => FrameKind::Ready,
            Self::Commit => FrameKind::Commit,
            Self::Running => FrameKind::Running,
            Self::Discarded => FrameKind::Discarded,
            Self::Farewell => FrameKind::Farewell,
            Self::Alive => FrameKind::Alive,
            Self::Question(_) => FrameKind::Question,
            Self::Answer(_) => FrameKind::Answer,
            Self::Inquiry(_) => FrameKind::Inquiry,
            Self::Keep(_) => FrameKind::Keep,
            Self::Resume { .. } => FrameKind::Resume,
            Self::Resumed { .. } => FrameKind::Resumed,
            Self::PrintsRequest { .. } => FrameKind::PrintsRequest,
            Self::Missing { .. } => FrameKind::Missing,
            Self::Wanted { .. } => FrameKind::Wanted,
            Self::Placed => FrameKind::Placed,
            Self::Prints { .. } => FrameKind::Prints,
            Self::Prove { .. } => FrameKind::Prove,
            Self::Trial(_) => FrameKind::Trial,
            Self::Tried { .. } => FrameKind::Tried,
            Self::Facts(_) => FrameKind::Facts,
            Self::LatePacket(_) => FrameKind::LatePacket,
        }
    }

    /// The frame to send. Texts and names are cut to their limits.
    ///
    /// # Panics
    /// When there are more blocks, disks, digests, channels or bytes of device state, a question or
    /// an answer than a message may carry: a mistake of the caller.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = vec![0; HEADER_LEN];
        let mut aux = 0;
        match self {
            Self::Offer(offer) | Self::Inquiry(offer) => {
                assert!(offer.blocks.len() <= BLOCKS_LIMIT, "{} RAM blocks", offer.blocks.len());
                aux = offer.features.0.into();
                frame.extend([offer.channels, offer.verify.into(), offer.running.into()]);
                frame.extend(offer.codecs.to_le_bytes());
                put_text(&mut frame, &offer.machine, NAME_LIMIT);
                frame.extend((offer.blocks.len() as u16).to_le_bytes());
                for block in &offer.blocks {
                    put_text(&mut frame, &block.name, NAME_LIMIT);
                    frame.extend(block.pages.0.to_le_bytes());
                }
                assert!(offer.disks.len() <= DISKS_LIMIT, "{} disks", offer.disks.len());
                frame.push(offer.disks.len() as u8);
                for disk in &offer.disks {
                    put_text(&mut frame, &disk.name, NAME_LIMIT);
                    frame.extend(disk.size.0.to_le_bytes());
                    frame.extend((disk.granularity.0 as u32).to_le_bytes());
                }
            }
            Self::Abort { code, text } => {
                aux = *code as u64;
                put_text(&mut frame, text, TEXT_LIMIT);
            }
            Self::RoundEnd { round } => aux = (*round).into(),
            Self::Prove { seed } => aux = *seed,
            Self::Trial(filling) => {
                assert!(filling.len() <= TRIAL_LIMIT, "a trial of {} bytes", filling.len());
                frame.extend(filling);
            }
            Self::Tried { bytes, clock } => {
                aux = *bytes;
                frame.extend(clock.to_le_bytes());
            }
            Self::Facts(facts) => {
                assert!(facts.huge_pages.len() <= HUGE_LIMIT, "{} pools", facts.huge_pages.len());
                frame.extend(facts.available.0.to_le_bytes());
                frame.extend(facts.total.0.to_le_bytes());
                frame.push(facts.huge_pages.len() as u8);
                for HugePages { size, total, free } in &facts.huge_pages {
                    frame.extend([size.0, *total, *free].iter().flat_map(|it| it.to_le_bytes()));
                }
                put_text(&mut frame, &facts.processor, NAME_LIMIT);
                put_text(&mut frame, &facts.flags, FLAGS_LIMIT);
            }
            Self::RoundAck { round, flush } => {
                let micros = u32::try_from(flush.as_micros()).unwrap_or(u32::MAX);
                aux = u64::from(micros) << 32 | u64::from(*round);
            }
            Self::Digests { block, first, digests } => {
                assert!(digests.len() <= DIGESTS_PER_MESSAGE, "{} digests", digests.len());
                aux = u64::from(*block) << 32 | u64::from(*first);
                frame.extend(digests.iter().flat_map(|digest| digest.to_le_bytes()));
            }
            Self::Question(bytes) => {
                assert!(bytes.len() <= QUESTION_LIMIT, "a question of {} bytes", bytes.len());
                frame.extend(bytes);
            }
            Self::Answer(bytes) => {
                assert!(bytes.len() <= ANSWER_LIMIT, "an answer of {} bytes", bytes.len());
                frame.extend(bytes);
            }
            Self::DeviceState(bytes) => frame.extend(bytes),
            Self::LatePacket(bytes) => {
                assert!(bytes.len() <= PACKET_LIMIT, "a packet of {} bytes", bytes.len());
                frame.extend(bytes);
            }
            Self::Accept { codecs, features } => {
                aux = u64::from(features.0) << 32 | u64::from(*codecs);
            }
            Self::Keep(secret) => frame.extend(secret.0),
            Self::Resume { channels, proof } => {
                aux = (*channels).into();
                frame.extend(proof);
            }
            Self::Resumed { attempt, placed, proof } => {
                assert!(placed.len() <= PLACED_LIMIT, "{} channels", placed.len());
                aux = (*attempt).into();
                frame.extend(proof);
                frame.extend(placed.iter().flat_map(|count| count.to_le_bytes()));
            }
            Self::Prints { block, segment, prints } => {
                assert!(prints.len() <= PRINTS_PER_MESSAGE, "{} fingerprints", prints.len());
                aux = u64::from(*block) << 32 | u64::from(*segment);
                frame.extend(prints.iter().flat_map(|print| print.to_le_bytes()));
            }
            Self::PrintsRequest { disks } => aux = (*disks).into(),
            Self::Missing { block, last, runs } => {
                assert!(runs.len() <= MISSING_LIMIT, "{} runs", runs.len());
                aux = u64::from(*last) << 32 | u64::from(*block);
                let words = runs.iter().flat_map(|run| [run.start.0, run.count.0]);
                frame.extend(words.flat_map(u64::to_le_bytes));
            }
            Self::Wanted { block, pages } => {
                assert!(pages.len() <= WANTED_LIMIT, "{} pages", pages.len());
                aux = (*block).into();
                frame.extend(pages.iter().flat_map(|page| page.0.to_le_bytes()));
            }
            Self::Prepare
            | Self::Placed
            | Self::Prepared
            | Self::DigestRequest
            | Self::DeviceStateEnd
            | Self::Ready
            | Self::Commit
            | Self::Running
            | Self::Discarded
            | Self::Farewell
            | Self::Alive => {}
        }
        seal(&mut frame, self.kind(), 0, aux);
        frame
    }

    /// Reads a message from a frame whose checksum was found right.
    ///
    /// # Errors
    /// When the frame is not a message of the control connection or its payload is malformed.
    pub fn decode(header: &FrameHeader, payload: &[u8]) -> Result<Self, WireError> {
        let empty = |message: Self| {
            if payload.is_empty() {
                Ok(message)
            } else {
                Err(WireError::Length { what: "message without payload" })
            }
        };
        let number = |what| {
            let wrong = |_| WireError::Field { what, field: "number", value: header.aux };
            u32::try_from(header.aux).map_err(wrong)
        };
        let round = || number("round");
        match header.kind {
            FrameKind::Pages | FrameKind::Barrier => {
                Err(WireError::Kind { kind: header.kind as u16 })
            }
            FrameKind::Keep => {
                let mut reader = Reader { what: "keep", rest: payload };
                let secret = Secret(reader.take()?);
                reader.end()?;
                Ok(Self::Keep(secret))
            }
            FrameKind::Resume => decode_resume(header.aux, payload),
            FrameKind::Resumed => decode_resumed(number("attempt")?, payload),
            FrameKind::Offer => decode_offer(header.aux, payload).map(Self::Offer),
            FrameKind::Inquiry => decode_offer(header.aux, payload).map(Self::Inquiry),
            FrameKind::Accept => empty(Self::Accept {
                codecs: header.aux as u32,
                features: Features((header.aux >> 32) as u32),
            }),
            FrameKind::Abort => {
                let code = AbortCode::ALL
                    .into_iter()
                    .find(|code| *code as u64 == header.aux)
                    .ok_or(WireError::Field { what: "abort", field: "code", value: header.aux })?;
                let mut reader = Reader { what: "abort", rest: payload };
                let text = reason(reader.text(TEXT_LIMIT)?);
                reader.end()?;
                Ok(Self::Abort { code, text })
            }
            FrameKind::RoundEnd => empty(Self::RoundEnd { round: round()? }),
            FrameKind::RoundAck => empty(Self::RoundAck {
                round: header.aux as u32,
                flush: Duration::from_micros(header.aux >> 32),
            }),
            FrameKind::Trial if payload.len() > TRIAL_LIMIT => {
                Err(WireError::Length { what: "trial" })
            }
            FrameKind::Trial => Ok(Self::Trial(payload.to_vec())),
            FrameKind::Tried => {
                let clock = payload.try_into();
                let clock = clock.map_err(|_| WireError::Length { what: "answer to a trial" })?;
                Ok(Self::Tried { bytes: header.aux, clock: u64::from_le_bytes(clock) })
            }
            FrameKind::Facts => decode_facts(payload),
            FrameKind::Prove => empty(Self::Prove { seed: header.aux }),
            FrameKind::Prepare => empty(Self::Prepare),
            FrameKind::Prepared => empty(Self::Prepared),
            FrameKind::DigestRequest => empty(Self::DigestRequest),
            FrameKind::Digests => {
                if !payload.len().is_multiple_of(16) || payload.len() > DIGESTS_PER_MESSAGE * 16 {
                    return Err(WireError::Length { what: "digests" });
                }
                let digest = |bytes: &[u8]| {
                    let mut word = [0; 16];
                    word.copy_from_slice(bytes);
                    u128::from_le_bytes(word)
                };
                Ok(Self::Digests {
                    block: (header.aux >> 32) as u32,
                    first: header.aux as u32,
                    digests: payload.chunks_exact(16).map(digest).collect(),
                })
            }
            FrameKind::PrintsRequest if header.aux > 1 => Err(WireError::Field {
                what: "request for fingerprints",
                field: "disks",
                value: header.aux,
            }),
            FrameKind::PrintsRequest => empty(Self::PrintsRequest { disks: header.aux == 1 }),
            FrameKind::Missing => decode_missing(header.aux, payload),
            FrameKind::Wanted => {
                let (words, []) = payload.as_chunks() else {
                    return Err(WireError::Length { what: "wanted pages" });
                };
                if words.is_empty() || words.len() > WANTED_LIMIT {
                    return Err(WireError::Length { what: "wanted pages" });
                }
                let page = |word: &[u8; 8]| PageIndex(u64::from_le_bytes(*word));
                Ok(Self::Wanted {
                    block: number("wanted pages")?,
                    pages: words.iter().map(page).collect(),
                })
            }
            FrameKind::Placed => empty(Self::Placed),
            FrameKind::Prints => {
                let (words, []) = payload.as_chunks() else {
                    return Err(WireError::Length { what: "fingerprints" });
                };
                if words.len() > PRINTS_PER_MESSAGE {
                    return Err(WireError::Length { what: "fingerprints" });
                }
                Ok(Self::Prints {
                    block: (header.aux >> 32) as u32,
                    segment: header.aux as u32,
                    prints: words.iter().map(|word| u64::from_le_bytes(*word)).collect(),
                })
            }
            FrameKind::DeviceState if payload.len() > DEVICE_STATE_CHUNK => {
                Err(WireError::Length { what: "piece of device state" })
            }
            FrameKind::DeviceState => Ok(Self::DeviceState(payload.to_vec())),
            FrameKind::Question if payload.len() > QUESTION_LIMIT => {
                Err(WireError::Length { what: "question" })
            }
            FrameKind::Question => Ok(Self::Question(payload.to_vec())),
            FrameKind::Answer if payload.len() > ANSWER_LIMIT => {
                Err(WireError::Length { what: "answer" })
            }
            FrameKind::Answer => Ok(Self::Answer(payload.to_vec())),
            FrameKind::LatePacket if payload.len() > PACKET_LIMIT => {
                Err(WireError::Length { what: "packet" })
            }
            FrameKind::LatePacket => Ok(Self::LatePacket(payload.to_vec())),
            FrameKind::DeviceStateEnd => empty(Self::DeviceStateEnd),
            FrameKind::Ready => empty(Self::Ready),
            FrameKind::Commit => empty(Self::Commit),
            FrameKind::Running => empty(Self::Running),
            FrameKind::Discarded => empty(Self::Discarded),
            FrameKind::Farewell => empty(Self::Farewell),
            FrameKind::Alive => empty(Self::Alive),
        }
    }
}

fn put_text(frame: &mut Vec<u8>, text: &str, limit: usize) {
    let text = cut(text, limit);
    frame.extend((text.len() as u16).to_le_bytes());
    frame.extend(text.as_bytes());
}

/// As much of `text` as fits into `limit` bytes, to the end of a character.
fn cut(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The text of an abort. Why a migration ended is worth knowing even where it is damaged, so what
/// nobody can read is replaced: by more bytes than it had, so that the limit has to be kept again.
fn reason(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    cut(&text, TEXT_LIMIT).to_owned()
}

fn decode_missing(aux: u64, payload: &[u8]) -> Result<Message, WireError> {
    const WHAT: &str = "missing pages";
    let (words, []) = payload.as_chunks::<16>() else {
        return Err(WireError::Length { what: WHAT });
    };
    if words.len() > MISSING_LIMIT {
        return Err(WireError::Length { what: WHAT });
    }
    let last = match aux >> 32 {
        flag @ 0..=1 => flag == 1,
        value => return Err(WireError::Field { what: WHAT, field: "last", value }),
    };
    let mut runs: Vec<PageRun> = Vec::with_capacity(words.len());
    for word in words {
        let word = u128::from_le_bytes(*word);
        let (start, count) = (word as u64, (word >> 64) as u64);
        let wrong = |field, value| WireError::Field { what: WHAT, field, value };
        if count == 0 || start.checked_add(count).is_none() {
            return Err(wrong("pages", count));
        }
        // Runs that touch are one.
        if runs.last().is_some_and(|before| before.end().0 >= start) {
            return Err(wrong("start", start));
        }
        runs.push(PageRun::new(start, count));
    }
    Ok(Message::Missing { block: aux as u32, last, runs })
}

fn decode_resume(aux: u64, payload: &[u8]) -> Result<Message, WireError> {
    const WHAT: &str = "resume";
    let channels = u8::try_from(aux).ok().filter(|count| (1..=CHANNELS_LIMIT).contains(count));
    let channels =
        channels.ok_or(WireError::Field { what: WHAT, field: "channels", value: aux })?;
    let mut reader = Reader { what: WHAT, rest: payload };
    let proof = reader.take()?;
    reader.end()?;
    Ok(Message::Resume { channels, proof })
}

fn decode_resumed(attempt: u32, payload: &[u8]) -> Result<Message, WireError> {
    const WHAT: &str = "resumed";
    let mut reader = Reader { what: WHAT, rest: payload };
    let proof = reader.take()?;
    if !reader.rest.len().is_multiple_of(8) || reader.rest.len() > PLACED_LIMIT * 8 {
        return Err(WireError::Length { what: WHAT });
    }
    let mut placed = Vec::new();
    while !reader.rest.is_empty() {
        placed.push(u64::from_le_bytes(reader.take()?));
    }
    Ok(Message::Resumed { attempt, placed, proof })
}

fn decode_offer(aux: u64, payload: &[u8]) -> Result<Offer, WireError> {
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
    Ok(Offer {
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

fn decode_facts(payload: &[u8]) -> Result<Message, WireError> {
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
    Ok(Message::Facts(Facts { available, total, huge_pages, processor, flags }))
}

struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (bytes, rest) =
            self.rest.split_first_chunk().ok_or(WireError::Length { what: self.what })?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// The bytes of a text.
    fn text(&mut self, limit: usize) -> Result<&'a [u8], WireError> {
        let length = usize::from(u16::from_le_bytes(self.take()?));
        if length > limit || length > self.rest.len() {
            return Err(WireError::Length { what: self.what });
        }
        let (text, rest) = self.rest.split_at(length);
        self.rest = rest;
        Ok(text)
    }

    /// A name, by which both sides find the same thing and which is shown to people. It is taken as
    /// it is or not at all: what replaces a byte may be longer, and may be the name of another.
    fn name(&mut self) -> Result<String, WireError> {
        self.words(NAME_LIMIT)
    }

    fn number(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    /// The same of up to `limit` bytes.
    fn words(&mut self, limit: usize) -> Result<String, WireError> {
        let refused = WireError::Name { what: self.what };
        let name = std::str::from_utf8(self.text(limit)?).ok();
        let name = name.filter(|name| !name.chars().any(char::is_control));
        name.map(str::to_owned).ok_or(refused)
    }

    fn end(&self) -> Result<(), WireError> {
        if self.rest.is_empty() { Ok(()) } else { Err(WireError::Length { what: self.what }) }
    }
}
