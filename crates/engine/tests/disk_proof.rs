//! `Verify::Live` and the audit of disks that move along, between two machines made up for the
//! purpose.
#![allow(clippy::unwrap_used)]

mod machine;

use std::sync::Arc;
use std::time::Duration;

use godwit_engine::destination::Faults;
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::report::{Difference, Measures};
use godwit_engine::source::Options;
use godwit_engine::{Cancel, EngineError, Failure, Survivor};
use godwit_policy::Settings;

use machine::{Destination, Image, Source, SourceDisk, answers, options, run};

/// One ends within a page, and within a dirty block; one has two segments.
const DISKS: [(&str, u64); 2] = [("system", (17 << 20) + 1536), ("data", 3 << 20)];

fn source() -> Source {
    let disks = DISKS.map(|(name, size)| Arc::new(SourceDisk::new(name, size)));
    Source::start(Duration::from_secs(60), disks.into())
}

fn moved(
    source: &mut Source,
    options: &Options,
    change: impl Fn(&mut Destination),
) -> (Result<Measures, Failure>, Option<bool>) {
    let settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    let handle = MigrationHandle::new(settings, Own::default(), Cancel::default());
    let images = DISKS.map(|(name, size)| Arc::new(Image::new(name, size)));
    let mut destination = Destination { images: images.into(), ..Destination::of(source) };
    change(&mut destination);
    let found = Arc::clone(&destination.found);
    let result = run(source, destination, options, Faults::default(), &handle);
    let exact = found.lock().unwrap().pages_first;
    (result, exact)
}

/// A bit of page `page` of disk `disk` changes whenever it is written.
fn flip(destination: &Destination, disk: usize, page: u64) {
    destination.images[disk].fault.lock().unwrap().flips = Some(page);
}

#[test]
fn disks_that_a_busy_guest_writes_to_are_proven() {
    for channels in 1..=3 {
        let (measures, exact) = moved(&mut source(), &options(channels, true), |_| {});
        let measures = measures.unwrap();
        assert!(measures.verified && measures.disks.iter().all(|disk| disk.verified));
        assert_eq!(exact, Some(true));
    }
}

#[test]
fn a_bit_that_changes_on_its_way_to_a_disk_keeps_the_guest_at_the_source() {
    // Mutations: disks are not read back; their digests are not compared; marks come before the
    // write has landed (these disks write what they were given only when they are flushed).
    for (disk, page, place) in
        [(0, 17 << 8, "disk 'system' at 0x1000000"), (1, 3, "disk 'data' at 0")]
    {
        let mut source = source();
        let result = moved(&mut source, &options(2, true), |to| flip(to, disk, page)).0;
        let failure = result.unwrap_err();
        assert_eq!(failure.survivor, Survivor::Source);
        assert!(matches!(failure.cause, EngineError::Digest { differing: 1, .. }), "{failure}");
        assert!(failure.to_string().contains(place), "{failure}");
        assert!(!source.retired && source.guest.is_some());
    }
}

#[test]
fn a_machine_that_cannot_read_its_disks_takes_them_unproven() {
    let cannot = |to: &mut Destination| to.reads_disks = false;
    let measures = moved(&mut source(), &options(2, true), cannot).0.unwrap();
    assert!(measures.verified && measures.disks.iter().all(|disk| !disk.verified));
}

#[test]
fn without_the_wish_nothing_is_read_back() {
    let measures = moved(&mut source(), &options(2, false), |_| {}).0.unwrap();
    assert!(!measures.verified && measures.disks.iter().all(|disk| !disk.verified));
}

fn audit() -> Options {
    Options { audit: true, ..options(2, true) }
}

#[test]
fn an_audit_of_disks_finds_nothing_where_nothing_is() {
    let path = std::env::temp_dir().join(format!("godwit-disk-trace-{}", std::process::id()));
    let options = Options { trace: Some(path.clone()), ..audit() };
    let (measures, exact) = moved(&mut source(), &options, |_| {});
    let trace = std::fs::read_to_string(&path);
    std::fs::remove_file(&path).unwrap();
    let measures = measures.unwrap();
    let audit = measures.audit.as_ref().unwrap();
    assert!(audit.is_clean(), "{audit}");
    assert!(measures.disks.iter().all(|disk| disk.verified));
    assert_eq!(exact, Some(true));
    let trace = trace.unwrap();
    // Each disk has a channel of its own, behind the two of memory.
    let of = |disk: &str, channel: &str| {
        let line = |line: &str| line.split('\t').map(str::to_owned).collect::<Vec<_>>();
        let mut lines = trace.lines().map(line).filter(|line| line[0] == disk).peekable();
        lines.peek().is_some() && lines.all(|line| line[3] == channel)
    };
    assert!(of("system", "2") && of("data", "3"));
}

#[test]
fn an_audit_explains_what_a_disk_does_not_hold() {
    let result = moved(&mut source(), &audit(), |to| flip(to, 1, 70)).0;
    let failure = result.unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    let EngineError::Audit(audit) = &failure.cause else { panic!("{failure}") };
    assert_eq!(answers(audit), [0, 1, 0, 0], "{audit}");
    let first = &audit.disks.as_ref().unwrap().first;
    let Some(Difference::Unknown { place, channel: Some(3), .. }) = first else {
        panic!("{audit:?}")
    };
    assert_eq!(place.to_string(), "disk 'data' at 0x46000");
}

#[test]
fn an_audit_finds_what_was_written_to_a_disk_and_not_reported() {
    // Mutation: the source's disks are not looked at.
    let mut source = source();
    // The second one is a hole.
    source.unseen_on_disk = vec![70, 0];
    let failure = moved(&mut source, &audit(), |_| {}).0.unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    let EngineError::Audit(audit) = &failure.cause else { panic!("{failure}") };
    assert_eq!(answers(audit), [0, 0, 2, 0], "{audit}");
    let Some(Difference::NotReported { place, sent: Some(0), .. }) = &audit.sent.first else {
        panic!("{audit:?}")
    };
    assert_eq!(place.to_string(), "disk 'system' at 0x0");
}
