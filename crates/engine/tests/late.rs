//! What comes for the guest's card while it stands still, between two machines made up for the
//! purpose, over real sockets.
#![allow(clippy::unwrap_used)]

mod machine;

use std::sync::Arc;
use std::time::Duration;

use godwit_engine::destination::Faults;
use godwit_engine::handle::MigrationHandle;
use godwit_engine::report::Measures;
use godwit_engine::source::Options;
use godwit_engine::{Failure, Survivor};
use godwit_wire::PACKET_LIMIT;

use machine::{Destination, Source, options, run};

/// What is sent to a guest that moves; one is for nobody, and one longer than any may be.
fn packets() -> [Vec<u8>; 5] {
    [vec![1; 60], vec![2; 1514], Vec::new(), vec![3; PACKET_LIMIT + 1], vec![4; PACKET_LIMIT]]
}

/// A guest that writes for a moment, to whose card these packets come.
fn source() -> Source {
    let mut source = Source::start(Duration::from_millis(300), Vec::new());
    source.card.packets = packets().into();
    source
}

struct Moved {
    result: Result<Measures, Failure>,
    source: Source,
    delivered: Vec<Vec<u8>>,
}

fn move_over(options: &Options, change: impl FnOnce(&mut Destination)) -> Moved {
    move_from(source(), options, change)
}

fn move_from(
    mut source: Source,
    options: &Options,
    change: impl FnOnce(&mut Destination),
) -> Moved {
    let mut destination = Destination::of(&source);
    change(&mut destination);
    let found = Arc::clone(&destination.found);
    let handle = MigrationHandle::default();
    let result = run(&mut source, destination, options, Faults::default(), &handle);
    let delivered = std::mem::take(&mut found.lock().unwrap().delivered);
    Moved { result, source, delivered }
}

#[test]
fn what_comes_while_a_guest_stands_still_reaches_it_where_it_goes_on() {
    // Mutations: nothing is kept; nothing is carried; a packet that cannot be delivered, or is too
    // long, ends the migration or the carrying.
    let moved = move_over(&options(2, false), |_| {});
    assert_eq!(moved.result.unwrap().late_packets, 4, "one was too long");
    let [first, second, _, _, longest] = packets();
    assert_eq!(moved.delivered, [first, second, longest]);
    assert!(moved.source.card.packets.is_empty() && moved.source.card.ended);
    let waits = moved.source.card.waits;
    let [first, .., last] = &waits[..] else { panic!("{waits:?}") };
    assert!(first.is_zero(), "the guest is about to run there: {waits:?}");
    assert!(!last.is_zero(), "more may be on its way: {waits:?}");
}

#[test]
fn who_does_not_want_it_has_nothing_kept() {
    let moved = move_over(&Options { late_packets: false, ..options(2, false) }, |_| {});
    assert_eq!(moved.result.unwrap().late_packets, 0);
    assert!(moved.delivered.is_empty() && !moved.source.card.kept);
    assert_eq!(moved.source.card.packets.len(), packets().len());
}

#[test]
fn a_guest_that_comes_back_has_its_packets_here() {
    let moved = move_over(&options(2, false), |destination| destination.refuse_to_load = true);
    assert_eq!(moved.result.unwrap_err().survivor, Survivor::Source);
    assert!(moved.source.card.kept && moved.delivered.is_empty());
    assert_eq!(moved.source.card.packets.len(), packets().len(), "none was taken");
}

#[test]
fn to_a_guest_that_is_paused_nothing_comes_late() {
    // Mutation: it is kept all the same.
    let mut source = source();
    source.paused = true;
    let moved = move_from(source, &options(2, false), |_| {});
    assert_eq!(moved.result.unwrap().late_packets, 0);
    assert!(moved.delivered.is_empty() && !moved.source.card.kept);
}

#[test]
fn a_network_that_never_learns_where_the_guest_is_is_not_waited_for() {
    // Mutation: it is carried for as long as more comes.
    let mut source = source();
    source.card.endless = true;
    let moved = move_from(source, &options(2, false), |_| {});
    assert!(moved.result.unwrap().late_packets > 0 && moved.source.card.ended);
    assert!(moved.source.retired);
}
