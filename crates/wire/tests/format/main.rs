//! The format as others see it: golden bytes, round trips, and bytes that are wrong.
//!
//! Golden bytes are only ever added to: a change to one of them is a change of the protocol's
//! version.
#![allow(clippy::unwrap_used)]

mod greeting;
mod limits;
mod pages;
mod properties;

use godwit_units::{ByteCount, PageCount, PageIndex, PageRun};
use godwit_wire::*;

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
    let golden = include_str!("../golden.txt");
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

/// Both sides compare it, and they may not be of the same release: XXH3-128, seed 0.
#[test]
fn digests_and_session_names_do_not_change() {
    assert_eq!(digest(b""), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
    assert_ne!(digest(&[0; 4096]), digest(&[0; 8192]));
    let name = SessionId(std::array::from_fn(|byte| byte as u8));
    assert_eq!(name.to_string(), "000102030405060708090a0b0c0d0e0f");
    assert_eq!(format!("{name:?}"), "SessionId(000102030405060708090a0b0c0d0e0f)");
}

#[test]
fn numbers_of_digests_do_not_run_into_each_other() {
    let message = Message::Digests { block: 0x8000_0001, first: 0xf000_0003, digests: vec![] };
    assert_eq!(parse(&message.encode()), Ok(message));
}
