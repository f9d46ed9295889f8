//! The format as others see it: golden bytes, round trips, and bytes that are wrong.
//!
//! Golden bytes are only ever added to: a change to one of them is a change of the protocol's
//! version.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use godwit_units::{ByteCount, PageCount, PageIndex, PageRun};
use godwit_wire::*;
use proptest::prelude::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse(frame: &[u8]) -> Result<Message, WireError> {
    let (header, payload) = frame.split_first_chunk().unwrap();
    let header = FrameHeader::decode(header)?;
    header.verify(payload)?;
    Message::decode(&header, payload)
}

fn offer() -> Offer {
    Offer {
        channels: 2,
        codecs: 6,
        features: Features::NONE,
        verify: true,
        running: true,
        machine: "qemu".to_owned(),
        blocks: vec![BlockOffer { name: "mem".to_owned(), pages: PageCount(262_144) }],
        disks: vec![DiskOffer {
            name: "vda".to_owned(),
            size: ByteCount(10 << 30),
            granularity: ByteCount(64 << 10),
        }],
    }
}

fn barrier(round: u32, last: bool) -> [u8; HEADER_LEN] {
    let mut frame = [0; HEADER_LEN];
    seal(&mut frame, FrameKind::Barrier, 0, barrier_aux(round, last));
    frame
}

fn pages_frame() -> Vec<u8> {
    let mut builder = PageFrameBuilder::new();
    let read = |bytes: &mut [u8]| {
        for (page, fill) in bytes.chunks_mut(4096).zip([1, 0, 9, 3, 0]) {
            page.fill(fill);
        }
        Ok::<(), ()>(())
    };
    // Of five pages, two are not wanted: one of data and one of zeros.
    let added = builder.add(PageRun::new(10, 5), read, |page, bytes| {
        let zero = bytes.iter().all(|byte| *byte == 0);
        assert_eq!(zero, page.0 == 11 || page.0 == 14);
        let wanted = page.0 != 12 && page.0 != 14;
        wanted.then_some(if zero { Content::Zero } else { Content::Data })
    });
    assert_eq!(added, Ok(Added { data: PageCount(2), zero: PageCount(1) }));
    builder.finish(7).to_vec()
}

fn missing(runs: Vec<PageRun>) -> Message {
    Message::Missing { block: 1, last: true, runs }
}

#[test]
fn runs_of_missing_pages_are_apart_in_order_and_within_64_bits() {
    let good = vec![PageRun::new(0, 1), PageRun::new(2, 5), PageRun::new(u64::MAX - 1, 1)];
    assert_eq!(parse(&missing(good.clone()).encode()).unwrap(), missing(good));
    assert_eq!(parse(&missing(vec![]).encode()).unwrap(), missing(vec![]));
    let refused = |runs| matches!(parse(&missing(runs).encode()), Err(WireError::Field { .. }));
    assert!(refused(vec![PageRun::new(4, 0)]), "an empty one");
    assert!(refused(vec![PageRun::new(2, u64::MAX - 1)]), "beyond all numbers");
    assert!(refused(vec![PageRun::new(2, 2), PageRun::new(4, 1)]), "two that touch");
    assert!(refused(vec![PageRun::new(9, 1), PageRun::new(3, 1)]), "not in order");
    let mut many = missing(vec![]).encode();
    many.resize(HEADER_LEN + (MISSING_LIMIT + 1) * 16, 0);
    seal(&mut many, FrameKind::Missing, 0, 0);
    assert!(matches!(parse(&many), Err(WireError::Length { .. })));
    let mut flags = missing(vec![]).encode();
    seal(&mut flags, FrameKind::Missing, 0, 2 << 32);
    assert!(matches!(parse(&flags), Err(WireError::Field { field: "last", .. })));
    let mut nothing = Message::Placed.encode();
    seal(&mut nothing, FrameKind::Wanted, 0, 0);
    assert!(matches!(parse(&nothing), Err(WireError::Length { .. })));
}

fn facts() -> Facts {
    Facts {
        available: ByteCount(3 << 30),
        total: ByteCount(4 << 30),
        huge_pages: vec![HugePages { size: ByteCount(2 << 20), total: 512, free: 100 }],
        processor: "CPU".to_owned(),
        flags: "fpu avx2".to_owned(),
    }
}

#[test]
fn what_a_host_tells_of_itself_has_limits() {
    let longest = Facts {
        huge_pages: vec![HugePages::default(); HUGE_LIMIT],
        processor: "p".repeat(NAME_LIMIT),
        flags: "f".repeat(FLAGS_LIMIT),
        ..facts()
    };
    assert_eq!(parse(&Message::Facts(longest.clone()).encode()), Ok(Message::Facts(longest)));
    // What is longer is cut by who tells it, and refused of who does not.
    let longer = Facts { flags: "f".repeat(FLAGS_LIMIT + 1), ..facts() };
    let Ok(Message::Facts(cut)) = parse(&Message::Facts(longer).encode()) else {
        panic!("refused")
    };
    assert_eq!(cut.flags.len(), FLAGS_LIMIT);
    let changed = |at: usize, byte: u8| {
        let mut frame = Message::Facts(facts()).encode();
        frame[HEADER_LEN + at] = byte;
        seal(&mut frame, FrameKind::Facts, 0, 0);
        parse(&frame)
    };
    let pools = WireError::Field { what: "what the host has", field: "huge pages", value: 9 };
    assert_eq!(changed(16, HUGE_LIMIT as u8 + 1), Err(pools));
    assert!(matches!(changed(43, 0x1b), Err(WireError::Name { .. })), "a control character");
    let mut more = Message::Facts(facts()).encode();
    more.push(0);
    seal(&mut more, FrameKind::Facts, 0, 0);
    assert!(matches!(parse(&more), Err(WireError::Length { .. })));
}

#[test]
fn a_packet_is_no_longer_than_any_may_be() {
    let longest = Message::LatePacket(vec![1; PACKET_LIMIT]);
    let mut frame = longest.encode();
    assert_eq!(parse(&frame), Ok(longest));
    frame.push(1);
    seal(&mut frame, FrameKind::LatePacket, 0, 0);
    assert_eq!(parse(&frame), Err(WireError::Length { what: "packet" }));
}

#[test]
fn golden_bytes() {
    let (version, session) = (Version::V5, SessionId([0x11; 16]));
    let greeting = Greeting { version, session, role: Role::Channel(3), attempt: 0 };
    let newer = Greeting { version: Version::V6, ..greeting };
    let features = Features::of(Feature::Restart);
    let resumed = Message::Resumed { attempt: 1, placed: vec![9, 5], proof: [0x44; PROOF_LEN] };
    let seen = [
        hex(&greeting.encode()),
        hex(&Message::Offer(offer()).encode()),
        hex(&Message::Commit.encode()),
        hex(&Message::Abort { code: AbortCode::Layout, text: "no".to_owned() }.encode()),
        hex(&Message::Digests { block: 1, first: 2, digests: vec![3] }.encode()),
        hex(&pages_frame()[..24]),
        hex(&pages_frame()[24 + 8192..]),
        hex(&Message::Question(b"what".to_vec()).encode()),
        hex(&Message::Answer(b"this".to_vec()).encode()),
        hex(&Message::Abort { code: AbortCode::Busy, text: "later".to_owned() }.encode()),
        hex(&barrier(5, false)),
        hex(&barrier(6, true)),
        hex(&Message::Inquiry(offer()).encode()),
        hex(&Greeting { role: Role::Resume, attempt: 2, ..greeting }.encode()),
        hex(&Message::Keep(Secret([0x22; SECRET_LEN])).encode()),
        hex(&Message::Resume { channels: 4, proof: [0x33; PROOF_LEN] }.encode()),
        hex(&resumed.encode()),
        hex(&Message::Accept { codecs: 6, features: Features::NONE }.encode()),
        hex(&Greeting { role: Role::Control, ..greeting }.encode()),
        hex(&newer.encode()),
        hex(&Greeting { role: Role::Control, ..newer }.encode()),
        hex(&Greeting::refusal().encode()),
        hex(&Message::Offer(Offer { features, ..offer() }).encode()),
        hex(&Message::Accept { codecs: 6, features }.encode()),
        hex(&Message::Prove { seed: 0x0102_0304_0506_0708 }.encode()),
        hex(&Message::PrintsRequest { disks: false }.encode()),
        hex(&Message::Prints { block: 1, segment: 2, prints: vec![3, 4] }.encode()),
        hex(&Message::Trial(vec![5; 3]).encode()),
        hex(&Message::Tried { bytes: 3, clock: 0x0102_0304_0506_0708 }.encode()),
        hex(&Message::PrintsRequest { disks: true }.encode()),
        hex(&missing(vec![PageRun::new(3, 4), PageRun::new(9, 1)]).encode()),
        hex(&Message::Wanted { block: 1, pages: vec![PageIndex(3)] }.encode()),
        hex(&Message::Placed.encode()),
        hex(&Message::Facts(facts()).encode()),
        hex(&Message::LatePacket(vec![6; 3]).encode()),
    ];
    let golden = include_str!("golden.txt");
    assert_eq!(seen.join("\n"), golden.trim_end());
}

#[test]
fn kinds_and_codes_are_listed_completely() {
    for (number, known) in (0..64).map(|n: u16| (n, FrameKind::ALL.iter().any(|k| *k as u16 == n)))
    {
        let mut frame = [0; HEADER_LEN];
        frame[0] = number as u8;
        assert_eq!(FrameHeader::decode(&frame).is_ok(), known, "kind {number}");
    }
    assert_eq!(AbortCode::ALL.map(|code| code as u16), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
}

#[test]
fn page_frames_come_back_as_they_went() {
    let frame = pages_frame();
    let (header, payload) = frame.split_first_chunk().unwrap();
    let header = FrameHeader::decode(header).unwrap();
    header.verify(payload).unwrap();
    let pages = PageFrame::decode(&header, payload).unwrap();
    let runs: Vec<_> =
        pages.runs(pages.data).map(|(run, bytes)| (run.run, run.content, bytes.to_vec())).collect();
    assert_eq!(pages.block, 7);
    assert_eq!(
        runs,
        [
            (PageRun::new(10, 1), Content::Data, vec![1; 4096]),
            (PageRun::new(11, 1), Content::Zero, vec![]),
            (PageRun::new(13, 1), Content::Data, vec![3; 4096]),
        ]
    );
}

#[test]
fn compressed_frames_keep_their_table_in_the_clear() {
    let mut builder = PageFrameBuilder::new();
    builder
        .add(
            PageRun::new(10, 2),
            |bytes| {
                bytes.fill(5);
                Ok::<(), ()>(())
            },
            |_, _| Some(Content::Data),
        )
        .unwrap();
    builder.zero(PageRun::new(40, 9));
    assert_eq!(builder.data(), [5; 8192]);
    let mut other = vec![0xee; HEADER_LEN + 3 + RUNS_LIMIT * RUN_LEN];
    let frame = builder.finish_in(&mut other, 3, 7, 2).to_vec();
    assert!(builder.is_empty());
    let (header, payload) = frame.split_first_chunk().unwrap();
    let header = FrameHeader::decode(header).unwrap();
    header.verify(payload).unwrap();
    let pages = PageFrame::decode(&header, payload).unwrap();
    assert_eq!(
        (pages.block, pages.codec, pages.data, pages.raw_len),
        (7, 2, [0xee; 3].as_slice(), 8192)
    );
    let raw = [5; 8192];
    let runs: Vec<_> = pages.runs(&raw).map(|(run, bytes)| (run.run, bytes.len())).collect();
    assert_eq!(runs, [(PageRun::new(10, 2), 8192), (PageRun::new(40, 9), 0)]);
}

#[test]
fn a_page_frame_cannot_announce_more_pages_than_fit() {
    let mut builder = PageFrameBuilder::new();
    builder.add(PageRun::new(0, 1), |_| Ok::<(), ()>(()), |_, _| Some(Content::Zero)).unwrap();
    let mut frame = builder.finish(0).to_vec();
    // One page of zeros; now with a codec, and as 257 pages of data.
    frame[24 + 8..24 + 16].copy_from_slice(&[1, 1, 0, 0, 0, 0, 0, 0]);
    seal(&mut frame, FrameKind::Pages, 1, 1 << 32);
    let (header, payload) = frame.split_first_chunk().unwrap();
    let header = FrameHeader::decode(header).unwrap();
    let error = PageFrame::decode(&header, payload).unwrap_err();
    assert!(matches!(error, WireError::Field { field: "pages", value: 257, .. }), "{error}");
}

#[test]
fn a_page_frame_whose_table_lies_is_refused() {
    let good = pages_frame();
    for (at, value) in [(24 + 8192 + 8, 2), (24 + 8192 + 12, 9), (24 + 8192 + 16 + 8, 0)] {
        let mut frame = good.clone();
        frame[at] = value;
        seal(&mut frame, FrameKind::Pages, 3, 7);
        let (header, payload) = frame.split_first_chunk().unwrap();
        let header = FrameHeader::decode(header).unwrap();
        header.verify(payload).unwrap();
        assert!(PageFrame::decode(&header, payload).is_err(), "byte {at} = {value}");
    }
}

#[test]
fn the_pages_of_a_frame_begin_at_a_page() {
    let mut builder = PageFrameBuilder::new();
    for page in [3, 9] {
        let read = |bytes: &mut [u8]| match bytes.as_ptr().addr() % 4096 {
            0 => Ok(()),
            other => Err(other),
        };
        builder.add(PageRun::new(page, 1), read, |_, _| Some(Content::Data)).unwrap();
    }
}

#[test]
fn a_failed_read_leaves_the_frame_as_it_was() {
    let mut builder = PageFrameBuilder::new();
    builder.zero(PageRun::new(0, 5));
    let room = builder.room();
    assert_eq!(
        builder.add(PageRun::new(9, 2), |_| Err("gone"), |_, _| Some(Content::Data)),
        Err("gone")
    );
    assert_eq!(builder.room(), room);
}

#[test]
fn a_frame_is_full_of_pages_or_full_of_runs() {
    let mut builder = PageFrameBuilder::new();
    assert_eq!(builder.room(), FRAME_PAGES.min(RUNS_LIMIT));
    let data = |_: &mut [u8]| Ok::<(), ()>(());
    for left in (0..FRAME_PAGES).rev() {
        builder.add(PageRun::new(left as u64 * 2, 1), data, |_, _| Some(Content::Data)).unwrap();
        assert_eq!(builder.room(), left.min(RUNS_LIMIT - (FRAME_PAGES - left)));
    }
    assert!(!builder.is_empty());
    let frame = builder.finish(0).to_vec();
    assert!(builder.is_empty());
    let (header, payload) = frame.split_first_chunk().unwrap();
    let header = FrameHeader::decode(header).unwrap();
    assert_eq!(usize::from(header.runs), FRAME_PAGES);
    let pages = PageFrame::decode(&header, payload).unwrap();
    assert_eq!(pages.raw_len, FRAME_PAGES * 4096);
    assert_eq!(pages.first_page().0, (FRAME_PAGES as u64 - 1) * 2);

    for left in (0..RUNS_LIMIT).rev() {
        builder.zero(PageRun::new(left as u64 * 2, 1));
        assert_eq!(builder.room(), FRAME_PAGES.min(left));
    }
}

#[test]
fn strangers_are_told_from_versions() {
    let mut ssh = [0; GREETING_LEN];
    ssh[..8].copy_from_slice(b"SSH-2.0-");
    assert!(matches!(Greeting::decode(&ssh), Err(WireError::NotGodwit { .. })));
}

#[test]
fn who_speaks_no_version_of_ours_is_named_with_all_of_its_own() {
    // Whatever else is in its greeting, and even if its checksum is made in another way.
    let greeting = |version, role, oldest| {
        let mut bytes = Greeting::refusal().encode();
        bytes[8..12].copy_from_slice(&[version, 0, role, oldest]);
        bytes
    };
    let ours = Versions { oldest: 5, newest: 6 };
    assert_eq!(Versions::HERE, ours);
    for (version, role, oldest, theirs) in [
        (9, 0, 8, Versions { oldest: 8, newest: 9 }),
        // Before version 6 nothing was there, and on other connections the number of a channel is.
        (4, 0, 0, Versions { oldest: 4, newest: 4 }),
        (9, 1, 3, Versions { oldest: 9, newest: 9 }),
        // No older version than the newest can be newer.
        (4, 0, 7, Versions { oldest: 4, newest: 4 }),
        // It spoke version 6, if it were told to.
        (7, 0, 6, Versions { oldest: 6, newest: 7 }),
    ] {
        let refused = Greeting::decode(&greeting(version, role, oldest));
        assert_eq!(refused, Err(WireError::Version { theirs, ours }));
    }
    let theirs = Versions { oldest: 8, newest: 9 };
    assert_eq!(
        WireError::Version { theirs, ours }.to_string(),
        "the peer speaks versions 8 to 9 of the protocol and this godwit versions 5 to 6: install \
         the same release on both hosts, or releases that have a version in common"
    );
}

#[test]
fn the_newest_common_version_is_spoken() {
    let common = |oldest, newest| Versions { oldest, newest }.common();
    assert_eq!(common(5, 5), Some(Version::V5));
    assert_eq!(common(5, 6), Some(Version::V6));
    assert_eq!(common(6, 9), Some(Version::V6));
    assert_eq!(common(4, 5), Some(Version::V5));
    assert_eq!((common(4, 4), common(7, 9), common(6, 5)), (None, None, None));
}

#[test]
fn a_version_is_spoken_in_every_greeting_and_features_only_since_they_are_there() {
    for version in Version::ALL {
        for role in [Role::Control, Role::Channel(9), Role::Resolve, Role::Resume] {
            let greeting = Greeting { version, session: SessionId([1; 16]), role, attempt: 7 };
            assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
        }
    }
    assert_eq!(Version::V5.features(), Features::NONE);
    assert_eq!(Version::NEWEST.features(), Features::HERE);
}

#[test]
fn features_are_sets_of_bits_that_need_not_be_known() {
    let known = Features::of(Feature::Restart);
    assert_eq!(known, Features(1), "the numbers are the wire's");
    let all = Features(u32::MAX);
    assert_eq!(all.common(known), known);
    assert!(known.is_within(all) && !all.is_within(known) && Features::NONE.is_within(known));
    assert!(all.contains(Feature::Restart) && !Features(!1).contains(Feature::Restart));
    assert_eq!(Features::of(Feature::Proof), Features(2));
    assert_eq!(Features::of(Feature::DiskProof), Features(32));
    let unknown = Features(u32::MAX << Feature::ALL.len());
    assert_eq!((known.to_string(), unknown.to_string()), ("restart".into(), "none".into()));
    assert_eq!(all.without(Feature::DiskProof), Features(!32));
    assert_eq!(known.without(Feature::DiskProof), known);
    assert_eq!(known.with(Feature::PostCopyWanted), Features(1 | 64));
    // Nobody accepts that somebody wants something.
    assert!(!Features::HERE.contains(Feature::PostCopyWanted));
}

#[test]
fn a_header_cannot_announce_more_than_the_limit() {
    let mut frame = Message::DeviceState(vec![1]).encode();
    frame[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let (header, _) = frame.split_first_chunk().unwrap();
    assert!(matches!(FrameHeader::decode(header), Err(WireError::TooLong { .. })));
}

#[test]
fn a_question_and_an_answer_have_their_limits() {
    let mut question = Message::Question(vec![1; QUESTION_LIMIT]).encode();
    assert!(parse(&question).is_ok());
    question.push(1);
    seal(&mut question, FrameKind::Question, 0, 0);
    assert_eq!(parse(&question), Err(WireError::Length { what: "question" }));
    let mut answer = Message::Answer(vec![1; ANSWER_LIMIT]).encode();
    assert!(parse(&answer).is_ok());
    answer.push(1);
    seal(&mut answer, FrameKind::Answer, 0, 0);
    assert_eq!(parse(&answer), Err(WireError::Length { what: "answer" }));
}

#[test]
fn a_hostile_text_cannot_write_to_the_terminal() {
    let frame =
        Message::Abort { code: AbortCode::Other, text: "\x1b[2Jgone\n".to_owned() }.encode();
    let Message::Abort { text, .. } = parse(&frame).unwrap() else { panic!("not an abort") };
    assert_eq!(text, "\u{fffd}[2Jgone\u{fffd}");
}

/// The offer of the machine `name`, whose name is then replaced by as many bytes.
fn offer_of(name: &[u8]) -> Result<Message, WireError> {
    let mut offer = offer();
    offer.machine = "m".repeat(name.len());
    let mut frame = Message::Offer(offer).encode();
    let at = HEADER_LEN + 3 + 4 + 2;
    frame[at..at + name.len()].copy_from_slice(name);
    seal(&mut frame, FrameKind::Offer, 0, 0);
    parse(&frame)
}

#[test]
fn a_name_that_is_no_text_is_refused() {
    // Regression: what was not UTF-8 was replaced, by more bytes than a name may have.
    let refused = Err(WireError::Name { what: "offer" });
    for name in [&[0xff; NAME_LIMIT][..], b"a\xc3", b"a\x1b[2J", b"a\0", "a\u{9b}".as_bytes()] {
        assert_eq!(offer_of(name), refused, "{}", name.escape_ascii());
    }
    assert!(offer_of("zürich".as_bytes()).is_ok());
}

#[test]
fn a_damaged_reason_is_shown_and_is_no_longer_than_any() {
    for byte in [0xff, 0x07] {
        let mut frame =
            Message::Abort { code: AbortCode::Other, text: "t".repeat(TEXT_LIMIT) }.encode();
        frame[HEADER_LEN + 3..].fill(byte);
        seal(&mut frame, FrameKind::Abort, 0, AbortCode::Other as u64);
        let abort = parse(&frame).unwrap();
        let Message::Abort { text, .. } = &abort else { panic!("not an abort") };
        assert!(text.starts_with("t\u{fffd}\u{fffd}"), "{text}");
        assert!(text.len() <= TEXT_LIMIT && text.len() > TEXT_LIMIT - 3, "{}", text.len());
        assert_eq!(parse(&abort.encode()).as_ref(), Ok(&abort));
    }
}

/// A frame of `kind` whose payload is `length` zeros.
fn zeros(kind: FrameKind, length: usize) -> Vec<u8> {
    let mut frame = vec![0; HEADER_LEN + length];
    seal(&mut frame, kind, 0, 0);
    frame
}

#[test]
fn limits_are_what_they_say_to_the_byte() {
    let header = |length: u32| {
        let mut frame = zeros(FrameKind::DeviceState, 0);
        frame[4..8].copy_from_slice(&length.to_le_bytes());
        FrameHeader::decode(frame.first_chunk().unwrap())
    };
    assert_eq!(header(PAYLOAD_LIMIT as u32).unwrap().length, PAYLOAD_LIMIT);
    assert!(header(PAYLOAD_LIMIT as u32 + 1).is_err());

    let digests = |length| parse(&zeros(FrameKind::Digests, length));
    let Message::Digests { digests: most, .. } = digests(DIGESTS_PER_MESSAGE * 16).unwrap() else {
        panic!("not digests")
    };
    assert_eq!(most, vec![0; DIGESTS_PER_MESSAGE]);
    for wrong in [1, 15, 17, DIGESTS_PER_MESSAGE * 16 - 1, DIGESTS_PER_MESSAGE * 16 + 16] {
        assert_eq!(digests(wrong), Err(WireError::Length { what: "digests" }), "{wrong}");
    }

    let state = |length| parse(&zeros(FrameKind::DeviceState, length));
    assert_eq!(state(DEVICE_STATE_CHUNK), Ok(Message::DeviceState(vec![0; DEVICE_STATE_CHUNK])));
    assert_eq!(
        state(DEVICE_STATE_CHUNK + 1),
        Err(WireError::Length { what: "piece of device state" })
    );
}

#[test]
fn a_resumption_has_as_many_channels_as_there_can_be() {
    let resume = |channels: u64| {
        let mut frame = zeros(FrameKind::Resume, PROOF_LEN);
        seal(&mut frame, FrameKind::Resume, 0, channels);
        parse(&frame)
    };
    assert!(resume(1).is_ok() && resume(CHANNELS_LIMIT.into()).is_ok());
    for wrong in [0, u64::from(CHANNELS_LIMIT) + 1, 257] {
        assert!(matches!(resume(wrong), Err(WireError::Field { field: "channels", .. })));
    }
    let most = usize::from(CHANNELS_LIMIT) + DISKS_LIMIT;
    let resumed = |length| parse(&zeros(FrameKind::Resumed, PROOF_LEN + length));
    assert!(
        matches!(resumed(most * 8), Ok(Message::Resumed { placed, .. }) if placed.len() == most)
    );
    for wrong in [1, 7, most * 8 + 8] {
        assert_eq!(resumed(wrong), Err(WireError::Length { what: "resumed" }), "{wrong}");
    }
}

/// The offer of a machine with so many RAM blocks and disks without names, and one more of either
/// put in by hand.
fn crowded(blocks: usize, disks: usize, more: [bool; 2]) -> Result<Message, WireError> {
    let mut offer = offer();
    offer.machine.clear();
    offer.blocks = vec![BlockOffer { name: String::new(), pages: PageCount(1) }; blocks];
    let disk = DiskOffer { name: String::new(), size: ByteCount(1), granularity: ByteCount(1) };
    offer.disks = vec![disk; disks];
    let mut frame = Message::Offer(offer).encode();
    // Channels, two flags, codecs and the name of the machine; then a count of 2 bytes and 10 bytes
    // for each block.
    let at = HEADER_LEN + 3 + 4 + 2;
    let behind = at + 2 + blocks * 10;
    if more[1] {
        frame[behind] += 1;
        frame.splice(behind + 1..behind + 1, [0; 14]);
    }
    if more[0] {
        frame[at..at + 2].copy_from_slice(&(blocks as u16 + 1).to_le_bytes());
        frame.splice(at + 2..at + 2, [0; 10]);
    }
    seal(&mut frame, FrameKind::Offer, 0, 0);
    parse(&frame)
}

#[test]
fn an_offer_names_as_many_blocks_and_disks_as_it_may() {
    let Ok(Message::Offer(most)) = crowded(BLOCKS_LIMIT, DISKS_LIMIT, [false; 2]) else {
        panic!("refused")
    };
    assert_eq!((most.blocks.len(), most.disks.len()), (BLOCKS_LIMIT, DISKS_LIMIT));
    assert!(crowded(BLOCKS_LIMIT - 1, DISKS_LIMIT - 1, [true; 2]).is_ok());
    let refused = |more| crowded(BLOCKS_LIMIT, DISKS_LIMIT, more).unwrap_err();
    assert!(matches!(refused([true, false]), WireError::Field { field: "RAM blocks", .. }));
    assert!(matches!(refused([false, true]), WireError::Field { field: "disks", .. }));
}

#[test]
fn names_and_texts_are_as_long_as_they_may_be_and_nothing_follows() {
    let mut longest = offer();
    longest.machine = "m".repeat(NAME_LIMIT);
    let longest = Message::Offer(longest);
    assert_eq!(parse(&longest.encode()), Ok(longest));
    let abort = |text: String| Message::Abort { code: AbortCode::Other, text }.encode();
    let longest = abort("t".repeat(TEXT_LIMIT));
    assert!(parse(&longest).is_ok());

    let mut longer = longest;
    longer[HEADER_LEN..HEADER_LEN + 2].copy_from_slice(&(TEXT_LIMIT as u16 + 1).to_le_bytes());
    longer.push(b't');
    seal(&mut longer, FrameKind::Abort, 0, AbortCode::Other as u64);
    assert!(parse(&longer).is_err());
    for (mut frame, kind, aux) in [
        (abort("gone".to_owned()), FrameKind::Abort, AbortCode::Other as u64),
        (Message::Offer(offer()).encode(), FrameKind::Offer, 0),
        (Message::Inquiry(offer()).encode(), FrameKind::Inquiry, 0),
        (Message::Keep(Secret([1; SECRET_LEN])).encode(), FrameKind::Keep, 0),
        (Message::Resume { channels: 1, proof: [1; PROOF_LEN] }.encode(), FrameKind::Resume, 1),
        (
            Message::Resumed { attempt: 1, placed: vec![1; 80], proof: [1; PROOF_LEN] }.encode(),
            FrameKind::Resumed,
            1,
        ),
    ] {
        frame.push(0);
        seal(&mut frame, kind, 0, aux);
        assert!(matches!(parse(&frame), Err(WireError::Length { .. })), "{kind:?}");
    }
}

#[test]
fn numbers_of_digests_do_not_run_into_each_other() {
    let message = Message::Digests { block: 0x8000_0001, first: 0xf000_0003, digests: vec![] };
    assert_eq!(parse(&message.encode()), Ok(message));
}

#[test]
fn a_barrier_says_its_round_and_whether_it_is_the_last_one() {
    for (round, last) in [(0, false), (0, true), (7, true), (u32::MAX, false), (u32::MAX, true)] {
        let header = FrameHeader::decode(&barrier(round, last)).unwrap();
        assert_eq!(barrier_of(header.aux), Ok((round, last)));
    }
    for bit in 33..64 {
        let aux = barrier_aux(7, true) | 1 << bit;
        let refused = WireError::Field { what: "barrier", field: "aux", value: aux };
        assert_eq!(barrier_of(aux), Err(refused));
    }
}

/// A reason for giving up may hold a path in any language.
#[test]
fn a_long_text_is_cut_between_two_characters() {
    for before in 0..4 {
        let text = "x".repeat(before) + &"\u{20ac}".repeat(5000);
        let frame = Message::Abort { code: AbortCode::Other, text: text.clone() }.encode();
        let Message::Abort { text: cut, .. } = parse(&frame).unwrap() else {
            panic!("not an abort")
        };
        assert!(
            text.starts_with(&cut) && cut.len() < text.len() && cut.len() > 500,
            "{}",
            cut.len()
        );
    }
}

/// Both sides compare it, and they may not be of the same release: XXH3-128, seed 0.
#[test]
fn digests_and_session_names_do_not_change() {
    assert_eq!(digest(b""), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
    assert_ne!(digest(&[0; 4096]), digest(&[0; 8192]));
    let name = SessionId(std::array::from_fn(|byte| byte as u8));
    assert_eq!(name.to_string(), "000102030405060708090a0b0c0d0e0f");
    assert_eq!(format!("{name:?}"), "SessionId(000102030405060708090a0b0c0d0e0f)");
}

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
