//! `Verify::Live`: what was placed is read back while the guest runs, and the source's memory is
//! looked at once more when nobody waits for it.
#![allow(clippy::unwrap_used)]

mod machine;

use std::sync::Arc;
use std::time::Duration;

use godwit_engine::destination::Faults;
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::report::{Difference, Measures};
use godwit_engine::source::{Fault, Options, Verify};
use godwit_engine::vm::SourceVm;
use godwit_engine::{Cancel, EngineError, Failure, Survivor};
use godwit_policy::Settings;
use godwit_units::PageIndex;

use machine::{Destination, Source, answers, options, run};

fn moved(source: &mut Source, options: &Options) -> (Result<Measures, Failure>, Option<bool>) {
    let settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    let handle = MigrationHandle::new(settings, Own::default(), Cancel::default());
    let destination = Destination::of(source);
    let found = Arc::clone(&destination.found);
    let result = run(source, destination, options, Faults::default(), &handle);
    let exact = found.lock().unwrap().pages_first;
    (result, exact)
}

fn busy() -> Source {
    Source::start(Duration::from_secs(60), Vec::new())
}

/// One that has touched its memory and writes no more.
fn rested() -> Source {
    // Long enough to touch every page, also beside the other tests.
    let source = Source::start(Duration::from_millis(600), Vec::new());
    std::thread::sleep(Duration::from_millis(650));
    source
}

/// These pages of the first block hold something, whatever the guest has come to.
fn write(source: &Source, pages: &[u64]) {
    let ram = source.ram();
    pages.iter().for_each(|page| ram[0].write(PageIndex(*page), &[0x5a; 4096]).unwrap());
}

#[test]
fn a_busy_guest_is_proven_and_looked_back_at() {
    for channels in 1..=4 {
        let (measures, exact) = moved(&mut busy(), &options(channels, true));
        let measures = measures.unwrap();
        assert!(measures.verified && measures.look_back.is_some(), "{measures:?}");
        assert_eq!(exact, Some(true));
    }
}

#[test]
fn without_fingerprints_all_is_compared_at_the_stop() {
    let options = Options { fingerprints: false, ..options(2, true) };
    let measures = moved(&mut busy(), &options).0.unwrap();
    assert!(measures.verified && measures.look_back.is_none());
    let options = Options { verify: Verify::Stopped, fingerprints: true, ..options };
    let measures = moved(&mut busy(), &options).0.unwrap();
    assert!(measures.verified && measures.look_back.is_none());
}

#[test]
fn a_write_that_nobody_reported_is_found_when_it_is_looked_back() {
    // Mutations: nothing is looked back at; the source is retired for good all the same.
    let mut source = rested();
    source.unseen = vec![4711, 17];
    let (result, exact) = moved(&mut source, &options(3, true));
    let failure = result.unwrap_err();
    assert_eq!((failure.survivor, exact), (Survivor::Destination, Some(false)));
    let EngineError::Missed { pages, block, offset } = &failure.cause else { panic!("{failure}") };
    assert_eq!((pages.0, block.as_str(), *offset), (2, "ram0", 17 << 12));
    assert!(source.retired && source.kept, "it is evidence");

    // With all of memory read at the stop the guest stays.
    let mut source = rested();
    source.unseen = vec![17];
    let stopped = Options { verify: Verify::Stopped, ..options(3, true) };
    let failure = moved(&mut source, &stopped).0.unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    assert!(matches!(failure.cause, EngineError::Digest { differing: 1, .. }), "{failure}");
}

#[test]
fn arrival_alone_is_proven_without_a_look_back() {
    // Mutations: it is looked back all the same; nothing is read back.
    let arrival = Options { verify: Verify::Arrival, ..options(3, true) };
    let (measures, exact) = moved(&mut busy(), &arrival);
    let measures = measures.unwrap();
    assert!(measures.verified && measures.look_back.is_none(), "{measures:?}");
    assert_eq!(exact, Some(true));

    let wrong = Options { fault: Some(Fault::WrongDigest), ..arrival.clone() };
    let failure = moved(&mut busy(), &wrong).0.unwrap_err();
    assert!(matches!(failure.cause, EngineError::Digest { differing: 1, .. }), "{failure}");

    // What nobody reported as written is not its matter.
    let mut source = rested();
    source.unseen = vec![17];
    let (result, exact) = moved(&mut source, &arrival);
    assert_eq!((result.is_ok(), exact), (true, Some(false)));
}

#[test]
fn a_page_that_was_given_back_after_it_was_sent_is_not_missed() {
    // Cause: the look for data names a hole between full pages as data. Mutations: a page that is a
    // hole counts; any page of zeros is taken for a hole.
    let mut source = rested();
    write(&source, &[17, 300]);
    source.given_back = vec![17, 300];
    moved(&mut source, &options(3, true)).0.unwrap();
}

#[test]
fn a_page_of_zeros_that_nobody_reported_is_missed() {
    let mut source = rested();
    write(&source, &[17]);
    source.wiped = vec![17];
    let failure = moved(&mut source, &options(3, true)).0.unwrap_err();
    assert!(matches!(failure.cause, EngineError::Missed { .. }), "{failure}");
}

#[test]
fn a_digest_that_differs_keeps_the_guest_at_the_source() {
    let options = Options { fault: Some(Fault::WrongDigest), ..options(2, true) };
    let failure = moved(&mut busy(), &options).0.unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    assert!(matches!(failure.cause, EngineError::Digest { differing: 1, .. }), "{failure}");
}

#[test]
fn an_audit_of_a_sound_move_finds_nothing_and_writes_where_pages_came_from() {
    let path = std::env::temp_dir().join(format!("godwit-trace-{}", std::process::id()));
    let options = Options { audit: true, trace: Some(path.clone()), ..options(3, true) };
    let (measures, exact) = moved(&mut busy(), &options);
    let trace = std::fs::read_to_string(&path);
    std::fs::remove_file(&path).unwrap();
    let measures = measures.unwrap();
    let audit = measures.audit.as_ref().unwrap();
    assert!(audit.is_clean() && audit.pages.0 > 0 && measures.verified, "{measures:?}");
    assert_eq!((measures.look_back, exact), (None, Some(true)));
    let trace = trace.unwrap();
    let columns = |line: &str| line.split('\t').count();
    assert!(trace.lines().count() > 1 && trace.lines().all(|line| columns(line) == 8));
}

#[test]
fn an_audit_explains_what_was_missed_and_the_guest_stays() {
    // Mutation: the source's own pages are not looked at.
    let mut source = rested();
    source.unseen = vec![4711, 17];
    let options = Options { audit: true, ..options(3, true) };
    let failure = moved(&mut source, &options).0.unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    let EngineError::Audit(audit) = &failure.cause else { panic!("{failure}") };
    assert_eq!(answers(audit), [0, 0, 2, 0]);
    let Some(Difference::NotReported { place, .. }) = &audit.sent.first else {
        panic!("{audit:?}")
    };
    assert_eq!((place.block.as_str(), place.offset), ("ram0", 17 << 12));
}

#[test]
fn an_audit_without_fingerprints_is_refused() {
    // Mutation: it is left out silently.
    let options = Options { audit: true, fingerprints: false, ..options(2, true) };
    let failure = moved(&mut busy(), &options).0.unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    assert!(matches!(failure.cause, EngineError::NoAudit), "{failure}");
}
