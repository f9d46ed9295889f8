//! Whatever is said comes back, and whatever is wrong is found or harmless.

use std::time::Duration;

use godwit_units::{ByteCount, PageCount, PageIndex, PageRun};
use godwit_wire::*;
use proptest::prelude::*;

use super::{pages_frame, parse};

fn any_message() -> impl Strategy<Value = Message> {
    prop_oneof![
        (
            any::<(u8, u32, u32)>(),
            any::<(bool, bool)>(),
            any::<bool>(),
            "[a-z]{0,9}",
            prop::collection::vec(("[a-z/.0-9]{0,40}", any::<u64>()), 0..5),
            prop::collection::vec(("[a-z/.0-9]{0,40}", any::<(u64, u32)>()), 0..5)
        )
            .prop_map(
                |(
                    (channels, codecs, features),
                    (verify, asks),
                    running,
                    machine,
                    blocks,
                    disks,
                )| {
                    let kind = if asks { Message::Inquiry } else { Message::Offer };
                    kind(Offer {
                        channels,
                        codecs,
                        features: Features(features),
                        verify,
                        running,
                        machine,
                        blocks: blocks
                            .into_iter()
                            .map(|(name, n)| BlockOffer { name, pages: PageCount(n) })
                            .collect(),
                        disks: disks
                            .into_iter()
                            .map(|(name, (size, granularity))| DiskOffer {
                                name,
                                size: ByteCount(size),
                                granularity: ByteCount(granularity.into()),
                            })
                            .collect(),
                    })
                }
            ),
        (0..AbortCode::ALL.len(), "[ -~]{0,80}")
            .prop_map(|(i, text)| Message::Abort { code: AbortCode::ALL[i], text }),
        any::<u32>().prop_map(|round| Message::RoundEnd { round }),
        (any::<u32>(), any::<u32>()).prop_map(|(round, micros)| Message::RoundAck {
            round,
            flush: Duration::from_micros(micros.into())
        }),
        (any::<u32>(), any::<u32>(), prop::collection::vec(any::<u128>(), 0..9))
            .prop_map(|(block, first, digests)| Message::Digests { block, first, digests }),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(Message::DeviceState),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(Message::Question),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(Message::Answer),
        any::<(u32, u32)>().prop_map(|(codecs, features)| Message::Accept {
            codecs,
            features: Features(features)
        }),
        Just(Message::Prepare),
        Just(Message::Prepared),
        Just(Message::DigestRequest),
        Just(Message::DeviceStateEnd),
        Just(Message::Ready),
        Just(Message::Commit),
        Just(Message::Running),
        Just(Message::Discarded),
        Just(Message::Farewell),
        Just(Message::Alive),
        any::<[u8; SECRET_LEN]>().prop_map(|secret| Message::Keep(Secret(secret))),
        (1..=CHANNELS_LIMIT, any::<[u8; PROOF_LEN]>())
            .prop_map(|(channels, proof)| Message::Resume { channels, proof }),
        (any::<u32>(), prop::collection::vec(any::<u64>(), 0..81), any::<[u8; PROOF_LEN]>())
            .prop_map(|(attempt, placed, proof)| Message::Resumed { attempt, placed, proof }),
        any::<u64>().prop_map(|seed| Message::Prove { seed }),
        prop::collection::vec(any::<u8>(), 0..81).prop_map(Message::Trial),
        any::<(u64, u64)>().prop_map(|(bytes, clock)| Message::Tried { bytes, clock }),
        prop::collection::vec(any::<u8>(), 0..81).prop_map(Message::LatePacket),
        any_missing(),
        any_facts(),
        (any::<u32>(), prop::collection::vec(any::<u64>().prop_map(PageIndex), 1..9))
            .prop_map(|(block, pages)| Message::Wanted { block, pages }),
        Just(Message::Placed),
    ]
}

fn any_facts() -> impl Strategy<Value = Message> {
    let pools = prop::collection::vec(any::<(u64, u64, u64)>(), 0..=HUGE_LIMIT);
    (any::<(u64, u64)>(), pools, "[ -~]{0,80}", "[ -~]{0,300}").prop_map(
        |((available, total), pools, processor, flags)| {
            let pool = |(size, total, free)| HugePages { size: ByteCount(size), total, free };
            let (available, total) = (ByteCount(available), ByteCount(total));
            let huge_pages = pools.into_iter().map(pool).collect();
            Message::Facts(Facts { available, total, huge_pages, processor, flags })
        },
    )
}

fn any_missing() -> impl Strategy<Value = Message> {
    let runs = prop::collection::vec((1..99_u64, 1..99_u64), 0..9);
    (any::<u32>(), any::<bool>(), runs).prop_map(|(block, last, steps)| {
        let mut end = 0;
        let run = |(gap, count)| {
            let run = PageRun::new(end + gap, count);
            end = run.end().0;
            run
        };
        Message::Missing { block, last, runs: steps.into_iter().map(run).collect() }
    })
}

proptest! {
    #[test]
    fn messages_round_trip(message in any_message()) {
        prop_assert_eq!(parse(&message.encode()), Ok(message));
    }

    #[test]
    fn a_flipped_bit_is_always_found(
        message in any_message(), at in any::<prop::sample::Index>(), bit in 0u8..8,
    ) {
        let mut frame = message.encode();
        let at = at.index(frame.len());
        frame[at] ^= 1 << bit;
        prop_assert!(parse(&frame).is_err());
    }

    #[test]
    fn arbitrary_bytes_never_panic(
        kind in 0usize..FrameKind::ALL.len(), runs in any::<u16>(), aux in any::<u64>(),
        payload in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut frame = vec![0; HEADER_LEN];
        frame.extend(payload);
        seal(&mut frame, FrameKind::ALL[kind], runs, aux);
        let (header, payload) = frame.split_first_chunk().unwrap();
        let header = FrameHeader::decode(header).unwrap();
        let _ = Message::decode(&header, payload);
        if let Ok(pages) = PageFrame::decode(&header, payload) {
            prop_assert!(pages.raw_len <= FRAME_PAGES * 4096);
            let raw = vec![0; pages.raw_len];
            prop_assert!(pages.runs(&raw).count() <= usize::from(runs));
        }
    }

    #[test]
    fn any_greeting_is_answered(bytes in prop::array::uniform32(any::<u8>())) {
        let mut greeting = [0; GREETING_LEN];
        greeting[..32].copy_from_slice(&bytes);
        prop_assert!(Greeting::decode(&greeting).is_err());
    }

    /// What a peer sends that was once right: one that follows the format up to a point, with a
    /// checksum that fits.
    #[test]
    fn a_message_with_wrong_bytes_never_panics(message in any_message(), damage in any_damage()) {
        let mut frame = message.encode();
        damage.apply(&mut frame);
        let (header, payload) = frame.split_first_chunk().unwrap();
        if let Ok(header) = FrameHeader::decode(header) {
            prop_assert_eq!(header.verify(payload), Ok(()));
            // What is understood all the same says what it says: it can be sent on and comes back
            // equal.
            if let Ok(understood) = Message::decode(&header, payload) {
                prop_assert_eq!(parse(&understood.encode()), Ok(understood));
            }
        }
    }

    #[test]
    fn a_page_frame_with_wrong_bytes_never_panics(
        damage in any_damage(), in_table in any::<bool>(),
    ) {
        let mut frame = pages_frame();
        let table = frame.len() - 3 * RUN_LEN;
        damage.apply_from(&mut frame, if in_table { table } else { HEADER_LEN });
        let (header, payload) = frame.split_first_chunk().unwrap();
        let Ok(header) = FrameHeader::decode(header) else { return Ok(()) };
        if let Ok(pages) = PageFrame::decode(&header, payload) {
            prop_assert!(pages.raw_len <= FRAME_PAGES * 4096);
            let raw = vec![0; pages.raw_len];
            let mut taken = 0;
            for (run, bytes) in pages.runs(&raw) {
                prop_assert!(run.run.start.0.checked_add(run.run.count.0).is_some());
                taken += bytes.len();
            }
            prop_assert_eq!(taken, pages.raw_len);
        }
    }

    /// Whatever goes into a frame comes out of it, in the same order.
    #[test]
    fn a_frame_holds_what_was_put_in(
        pieces in prop::collection::vec(
            (0u64..40, prop::collection::vec(any_look(), 1..30)),
            0..12,
        ),
    ) {
        let mut builder = PageFrameBuilder::new();
        let mut model = Vec::new();
        let mut start = 0;
        for (gap, looks) in pieces {
            start += gap;
            let count = looks.len().min(builder.room());
            let looks = &looks[..count];
            let run = PageRun::new(start, count as u64);
            let read = |bytes: &mut [u8]| {
                for (page, look) in bytes.chunks_mut(4096).zip(looks) {
                    page.fill(look.unwrap_or(9));
                }
                Ok::<(), ()>(())
            };
            let wanted = |page: godwit_units::PageIndex, bytes: &[u8]| {
                let look = looks[(page.0 - start) as usize]?;
                assert_eq!(bytes, [look; 4096]);
                Some(if look == 0 { Content::Zero } else { Content::Data })
            };
            let added = builder.add(run, read, wanted).unwrap();
            let zero = looks.iter().filter(|look| **look == Some(0)).count() as u64;
            let all = looks.iter().flatten().count() as u64;
            prop_assert_eq!(added, Added { data: PageCount(all - zero), zero: PageCount(zero) });
            model.extend((start..).zip(looks).filter_map(|(page, look)| Some((page, (*look)?))));
            start += count as u64;
        }
        let data = model.iter().filter(|(_, look)| *look != 0).count();
        prop_assert_eq!(builder.data().len(), data * 4096);

        let frame = builder.finish(3).to_vec();

        let (header, payload) = frame.split_first_chunk().unwrap();
        let header = FrameHeader::decode(header).unwrap();
        header.verify(payload).unwrap();
        let pages = PageFrame::decode(&header, payload).unwrap();
        let mut seen = Vec::new();
        for (run, bytes) in pages.runs(pages.data) {
            let zero = run.content == Content::Zero;
            prop_assert_eq!(bytes.len() as u64, if zero { 0 } else { run.run.count.0 * 4096 });
            for page in 0..run.run.count.0 {
                let look = if zero { 0 } else { bytes[page as usize * 4096] };
                seen.push((run.run.start.0 + page, look));
            }
        }
        prop_assert_eq!((pages.block, seen), (3, model));
    }

    #[test]
    fn a_greeting_with_wrong_bytes_is_answered(
        session in any::<[u8; 16]>(),
        at in 8usize..32,
        value in any::<u8>(),
        sealed in any::<bool>(),
    ) {
        let (session, role) = (SessionId(session), Role::Channel(3));
        let version = Version::NEWEST;
        let mut bytes = Greeting { version, session, role, attempt: 0 }.encode();
        let changed = bytes[at] != value;
        bytes[at] = value;
        if sealed {
            let checksum = twox_hash::XxHash3_64::oneshot(&bytes[..32]);
            bytes[32..].copy_from_slice(&checksum.to_le_bytes());
        }
        let understood = Greeting::decode(&bytes);
        prop_assert!(sealed || !changed || understood.is_err());
        // Not looked at: the number of the channel where there is none.
        if let Ok(understood) = understood && at != 10 {
            prop_assert_eq!(understood.encode(), bytes);
        }
    }
}

/// A page that is looked at: with these bytes, as zero, or not wanted.
fn any_look() -> impl Strategy<Value = Option<u8>> {
    prop_oneof![(0u8..3).prop_map(Some), Just(None)]
}

/// What befalls a frame on its way out of a peer that is wrong: some bytes are others, its end is
/// missing or there is more, its numbers are others. Length and checksum fit again afterwards.
#[derive(Clone, Debug)]
struct Damage {
    bytes: Vec<(prop::sample::Index, u8)>,
    keep: Option<prop::sample::Index>,
    more: Vec<u8>,
    kind: Option<usize>,
    runs: Option<u16>,
    aux: Option<u64>,
}

fn any_damage() -> impl Strategy<Value = Damage> {
    (
        prop::collection::vec((any::<prop::sample::Index>(), any_byte()), 0..4),
        prop::option::weighted(0.2, any::<prop::sample::Index>()),
        prop::collection::vec(any::<u8>(), 0..5),
        prop::option::weighted(0.1, 0..FrameKind::ALL.len()),
        prop::option::weighted(0.2, any::<u16>()),
        prop::option::weighted(0.2, prop_oneof![any::<u64>(), 0u64..5, Just(u64::MAX)]),
    )
        .prop_map(|(bytes, keep, more, kind, runs, aux)| Damage {
            bytes,
            keep,
            more,
            kind,
            runs,
            aux,
        })
}

/// Lengths and counts go wrong at their ends.
fn any_byte() -> impl Strategy<Value = u8> {
    prop_oneof![any::<u8>(), Just(0), Just(1), Just(0x7f), Just(0x80), Just(0xff)]
}

impl Damage {
    fn apply(&self, frame: &mut Vec<u8>) {
        self.apply_from(frame, HEADER_LEN);
    }

    /// Leaves the bytes before `first` alone.
    fn apply_from(&self, frame: &mut Vec<u8>, first: usize) {
        let header = FrameHeader::decode(frame.first_chunk().unwrap()).unwrap();
        if frame.len() > first {
            for (at, value) in &self.bytes {
                let at = first + at.index(frame.len() - first);
                frame[at] = *value;
            }
            if let Some(keep) = &self.keep {
                frame.truncate(first + keep.index(frame.len() - first));
            }
        }
        frame.extend(&self.more);
        let kind = self.kind.map_or(header.kind, |kind| FrameKind::ALL[kind]);
        seal(frame, kind, self.runs.unwrap_or(header.runs), self.aux.unwrap_or(header.aux));
    }
}
