//! Which channel a segment goes over, seen by a destination that is made up here, byte by byte: one
//! of its channels is not read until all that comes over the other one has come. And how many
//! channels there are, and what they make of a destination on the same host.
#![allow(clippy::unwrap_used)]

mod machine;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use godwit_engine::Cancel;
use godwit_engine::destination::Faults;
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::source::{Fault, Options, migrate};
use godwit_engine::vm::SourceVm;
use godwit_policy::Settings;
use godwit_units::PageIndex;
use godwit_wire::{
    Feature, Features, FrameHeader, FrameKind, GREETING_LEN, Greeting, HEADER_LEN, Message,
    PageFrame, Role,
};

use machine::{Destination, SIZES, Source, options, run_over};

/// How long a slow channel takes for a frame.
const SLOW: Duration = Duration::from_millis(200);
/// What a connection holds of what nobody has read yet. It would be as much as a segment where the
/// kernel is left to decide.
const UNREAD: usize = 64 << 10;

/// Segments, by block and number, of which something came.
type Segments = BTreeMap<(u32, u64), u64>;

fn frame(stream: &mut TcpStream) -> (FrameHeader, Vec<u8>) {
    let mut bytes = [0; HEADER_LEN];
    stream.read_exact(&mut bytes).unwrap();
    let header = FrameHeader::decode(&bytes).unwrap();
    let mut payload = vec![0; header.length];
    stream.read_exact(&mut payload).unwrap();
    (header, payload)
}

/// How many pages of each segment come over `stream` up to its first barrier, where each frame
/// takes so long to be placed.
fn first_round(stream: &mut TcpStream, slow: Duration) -> Segments {
    let mut came = Segments::new();
    loop {
        let (header, payload) = frame(stream);
        if header.kind == FrameKind::Barrier {
            return came;
        }
        std::thread::sleep(slow);
        let frame = PageFrame::decode(&header, &payload).unwrap();
        for (run, _) in frame.runs(frame.data) {
            let segment = (frame.block, run.run.start.0 / 4096);
            *came.entry(segment).or_default() += run.run.count.0;
        }
    }
}

/// What comes in the first round over channel 0, and over channel 1, of a destination that accepts
/// such of the `features` offered. Channel 1 is not read before all has come over channel 0, or is
/// a slow one, where there is a `fault`.
fn over_each(
    features: impl FnOnce(Features) -> Features + Send + 'static,
    fault: Option<Fault>,
) -> [Segments; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    socket2::SockRef::from(&listener).set_recv_buffer_size(UNREAD).unwrap();
    let to = listener.local_addr().unwrap().to_string().parse().unwrap();
    let receiving = std::thread::spawn(move || {
        let next = || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let mut bytes = [0; GREETING_LEN];
            stream.read_exact(&mut bytes).unwrap();
            (Greeting::decode(&bytes).unwrap(), stream)
        };
        let (greeting, mut control) = next();
        control.write_all(&greeting.encode()).unwrap();
        let (header, payload) = frame(&mut control);
        let Message::Offer(offer) = Message::decode(&header, &payload).unwrap() else {
            panic!("no offer")
        };
        let features = features(offer.features);
        control.write_all(&Message::Accept { codecs: 0, features }.encode()).unwrap();
        let mut channels = [next(), next()];
        channels.sort_by_key(|(greeting, _)| greeting.role != Role::Channel(0));
        let [(_, one), (_, other)] = &mut channels;
        let came = match fault {
            None => [one, other].map(|stream| first_round(stream, Duration::ZERO)),
            Some(_) => std::thread::scope(|scope| {
                let other = scope.spawn(|| first_round(other, SLOW));
                [first_round(one, Duration::ZERO), other.join().unwrap()]
            }),
        };
        let enough =
            Message::Abort { code: godwit_wire::AbortCode::Cancelled, text: String::new() };
        control.write_all(&enough.encode()).unwrap();
        while control.read(&mut [0; 4096]).is_ok_and(|read| read > 0) {}
        came
    });
    let mut source = Source::start(Duration::ZERO, Vec::new());
    for (block, pages) in source.ram().iter().zip(SIZES) {
        (0..pages).for_each(|page| block.write(PageIndex(page), &[7; 4096]).unwrap());
    }
    let options = Options { to, fault, channels_afar: 0, ..options(2, false) };
    migrate(&mut source, &options, &MigrationHandle::default(), &mut |_| {}).unwrap_err();
    receiving.join().unwrap()
}

#[test]
fn a_channel_that_has_no_more_of_its_own_takes_a_segment_of_one_that_waits() {
    // Mutation: no channel takes what others have. Then `(1, 0)` comes over its own, channel 1,
    // which is stuck with the segment before it.
    let [first, second] = over_each(
        |offered| {
            assert!(offered.contains(Feature::AnyChannel));
            offered
        },
        None,
    );
    assert_eq!(first, Segments::from([((0, 0), 4096), ((1, 0), SIZES[1])]));
    assert_eq!(second, Segments::from([((0, 1), SIZES[0] - 4096)]));
}

#[test]
fn each_segment_goes_over_its_own_channel_to_a_destination_that_knows_no_other_way() {
    // Mutation: what the destination accepts is not looked at.
    let [first, second] = over_each(|offered| offered.without(Feature::AnyChannel), None);
    assert_eq!(first, Segments::from([((0, 0), 4096)]));
    assert_eq!(second, Segments::from([((0, 1), SIZES[0] - 4096), ((1, 0), SIZES[1])]));
}

#[test]
fn over_a_long_way_pages_of_a_segment_go_over_whichever_connection_takes_them() {
    // Mutations: each channel puts its frames on its own connection; a channel ends its round when
    // it has no more to do itself, though others use its connection.
    let [first, second] = over_each(|offered| offered, Some(Fault::LongWay));
    let mut all = first.clone();
    second.iter().for_each(|(segment, pages)| *all.entry(*segment).or_default() += pages);
    let whole = [((0, 0), 4096), ((0, 1), SIZES[0] - 4096), ((1, 0), SIZES[1])];
    assert_eq!(all, Segments::from(whole), "each page once");
    // Whichever channel deals with a segment, the slow connection takes too few of its frames.
    let over_both = first.keys().any(|segment| second.contains_key(segment));
    assert!(over_both, "{first:?} {second:?}");

    // To a destination that knows no other way all go over their own, however long it is.
    let without = |offered: Features| offered.without(Feature::AnyChannel);
    let [first, second] = over_each(without, Some(Fault::LongWay));
    assert_eq!(first, Segments::from([whole[0]]));
    assert_eq!(second, Segments::from([whole[1], whole[2]]));
}

/// The address of a destination on this host, to which nothing is a long way.
fn unix(name: &str) -> String {
    let name = format!("godwit-{name}-{}", std::process::id());
    format!("unix:{}", std::env::temp_dir().join(name).display())
}

#[test]
fn a_guest_with_many_vcpus_has_the_channels_of_a_long_way() {
    // Mutations: they do not count; those of a guest that is paused do.
    let (address, faults) = (unix("many"), Faults::default());
    for (vcpus, paused, channels) in [(1, false, 2), (100_000, false, 5), (100_000, true, 2)] {
        let mut source = Source::start(Duration::ZERO, Vec::new());
        (source.throttles, source.vcpus) = (Some(Arc::default()), vcpus);
        source.paused = paused;
        let destination = Destination::of(&source);
        let options = Options { channels_afar: 5, ..options(2, false) };
        let handle = MigrationHandle::default();
        let measures =
            run_over(&address, &mut source, destination, &options, faults, &handle).unwrap();
        assert_eq!(measures.channels, channels, "{vcpus} vCPUs, paused: {paused}");
    }
}

#[test]
fn nothing_is_compressed_for_a_destination_on_the_same_host() {
    // A destination that takes its time over what would become a hundredth, behind sockets that
    // hold too little to hide that. Mutations: none puts up what it is known by; nobody looks for
    // it; channels are not told; a limit is no link.
    let address = unix("same-host");
    for (limit, compressed) in [(None, false), (Some("10MiB/s"), true)] {
        let mut source = Source::start(Duration::ZERO, Vec::new());
        for (block, pages) in source.ram().iter().zip(SIZES) {
            (0..pages).for_each(|page| block.write(PageIndex(page), &[7; 4096]).unwrap());
        }
        let destination = Destination::of(&source);
        let max_bandwidth = limit.map(|limit| limit.parse().unwrap());
        let own = Own { max_bandwidth, ..Own::default() };
        let handle = MigrationHandle::new(Settings::default(), own, Cancel::default());
        let faults = Faults { slow_channel: Some((0, SLOW / 10)), ..Faults::default() };
        let options = options(1, false);
        let measures =
            run_over(&address, &mut source, destination, &options, faults, &handle).unwrap();
        let all = SIZES.iter().sum::<u64>() * 4096;
        assert_eq!(measures.sent.0 < all * 3 / 4, compressed, "{} of {all}", measures.sent.0);
    }
}
