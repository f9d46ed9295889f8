//! How much a message may carry, and what may be in its texts.

use godwit_units::{ByteCount, PageCount, PageRun};
use godwit_wire::*;

use super::{facts, missing, offer, parse};

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

    let trial = |length| parse(&zeros(FrameKind::Trial, length));
    assert_eq!(trial(TRIAL_LIMIT), Ok(Message::Trial(vec![0; TRIAL_LIMIT])));
    assert_eq!(trial(TRIAL_LIMIT + 1), Err(WireError::Length { what: "trial" }));

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
