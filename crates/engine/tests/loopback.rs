//! The engine between two machines made up for the purpose, over real sockets and real RAM files.
//!
//! A real machine would rarely notice when device state overtakes the last pages; the one made up
//! here looks.
#![allow(clippy::unwrap_used)]

mod machine;

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use godwit_codec::Codec;
use godwit_engine::address::{Listener, Stream};
use godwit_engine::compression::Compression;
use godwit_engine::destination::{self, Notice};
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::source::{Fault, Options, Verify, inquire, inquire_host, migrate};
use godwit_engine::vm::SourceVm;
use godwit_engine::{Cancel, EngineError, Failure, Phase, Survivor};
use godwit_memory::RamBlock;
use godwit_policy::{Settings, ThrottleMode};
use godwit_wire::{DIGESTS_PER_MESSAGE, Features, GREETING_LEN, Message};

use machine::{Destination, Found, SIZES, STATE, Source, SourceDisk, options, run};

/// A short trial of a connection.
const SHORT: Duration = Duration::from_millis(50);

/// One migration; the outcome at the source, and what the destination found.
fn move_once(
    channels: u8,
    verify: bool,
    refuse_to_load: bool,
) -> (Result<(), Survivor>, Source, Found) {
    // So generous that the last round has much to carry.
    let settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    let handle = MigrationHandle::new(settings, Own::default(), Cancel::default());
    let (result, source, found) = move_steered(
        &options(channels, verify),
        &destination::Faults::default(),
        refuse_to_load,
        &handle,
    );
    (result.map_err(|failure| failure.survivor), source, found)
}

fn move_steered(
    options: &Options,
    faults: &destination::Faults,
    refuse_to_load: bool,
    handle: &MigrationHandle,
) -> (Result<(), Failure>, Source, Found) {
    // A guest that leaves its pages alone in the end: what was wrong then stays wrong.
    let busy = if faults.slow_channel.is_some() { BUSY } else { Duration::from_secs(60) };
    move_from(Source::start(busy, Vec::new()), options, faults, refuse_to_load, handle)
}

fn move_from(
    mut source: Source,
    options: &Options,
    faults: &destination::Faults,
    refuse_to_load: bool,
    handle: &MigrationHandle,
) -> (Result<(), Failure>, Source, Found) {
    let destination = Destination { refuse_to_load, ..Destination::of(&source) };
    let found = Arc::clone(&destination.found);
    let result = run(&mut source, destination, options, *faults, handle);
    let found = std::mem::take(&mut *found.lock().unwrap());
    (result.map(drop), source, found)
}

#[test]
fn device_state_never_overtakes_the_last_pages() {
    for round in 0..40 {
        let (result, source, found) = move_once(1 + round % 4, false, false);
        assert_eq!(result, Ok(()));
        assert_eq!(found.pages_first, Some(true), "migration {round}");
        assert_eq!(found.state_bytes, STATE);
        assert!(found.ran && source.retired);
    }
}

#[test]
fn what_was_never_sent_goes_with_the_last_round() {
    for verify in [false, true] {
        let handle = MigrationHandle::default();
        // Asked for before it begins: the first round passes by every segment.
        handle.switch_over(true).unwrap();
        let (result, source, found) =
            move_steered(&options(2, verify), &destination::Faults::default(), false, &handle);
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(found.pages_first, Some(true));
        assert!(found.ran && source.retired);
    }
}

#[test]
fn what_is_written_while_both_get_ready_is_not_left_for_the_last_round() {
    // Mutations: the guest is stopped as soon as the destination is prepared; a round is made in
    // search of less downtime before it is told to get ready.
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let destination =
        Destination { while_preparing: source.rests_while_preparing(), ..Destination::of(&source) };
    let found = Arc::clone(&destination.found);
    let settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    let handle = MigrationHandle::new(settings, Own::default(), Cancel::default());
    let faults = destination::Faults::default();
    let measures = run(&mut source, destination, &options(2, false), faults, &handle).unwrap();
    let data: Vec<u64> = measures.round_list.iter().map(|round| round.data.0).collect();
    // The second round takes all that was written until the guest rests.
    assert!(data.len() > 2 && data[2..].iter().all(|pages| *pages == 0), "{data:?}");
    assert_eq!(found.lock().unwrap().pages_first, Some(true));
}

#[test]
fn memory_that_is_touched_late_is_sent() {
    // Most segments are holes in the first rounds, and are touched before the last one.
    for in_parts in [true, false] {
        let source =
            Source::start_late(Duration::from_secs(60), Vec::new(), Duration::from_millis(700));
        if !in_parts {
            source.looks_at_no_parts();
        }
        let (options, faults) = (options(2, true), destination::Faults::default());
        let (result, source, found) = move_from(source, &options, &faults, false, &some_rounds());
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(found.pages_first, Some(true));
        assert!(source.ram()[1].has_data(source.ram()[1].all()).unwrap());
    }
}

#[test]
fn memory_that_is_never_touched_is_proved_and_audited_as_that() {
    // Mutations: what was never touched is left out of the digests, or of the audit.
    let never = Duration::from_secs(60);
    for audit in [false, true] {
        let source = Source::start_late(never, Vec::new(), never);
        let options = Options { audit, ..options(2, true) };
        let faults = destination::Faults::default();
        let (result, source, found) = move_from(source, &options, &faults, false, &some_rounds());
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(found.pages_first, Some(true));
        assert!(!source.ram()[1].has_data(source.ram()[1].all()).unwrap());
    }
}

#[test]
fn with_digests_compared_the_order_is_the_same() {
    for round in 0..10 {
        let (result, _source, found) = move_once(1 + round % 4, true, false);
        assert_eq!(result, Ok(()));
        assert_eq!(found.pages_first, Some(true), "migration {round}");
    }
}

#[test]
fn a_state_that_does_not_load_leaves_the_guest_at_the_source() {
    let (result, source, found) = move_once(2, false, true);
    assert_eq!(result, Err(Survivor::Source));
    assert!(source.running.load(Ordering::Relaxed) && source.guest.is_some());
    assert!(!found.ran && !source.retired);
}

#[test]
fn another_machine_is_refused_when_its_questions_were_answered_and_nothing_was_begun() {
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let destination = Destination { differs: true, ..Destination::of(&source) };
    let found = Arc::clone(&destination.found);
    let handle = MigrationHandle::default();
    let result =
        run(&mut source, destination, &options(2, false), destination::Faults::default(), &handle);
    let failure = result.map(drop).unwrap_err();
    assert_eq!((failure.phase, failure.survivor), (Phase::Setup, Survivor::Source));
    assert!(failure.to_string().contains("it is another machine"), "{failure}");
    assert!(source.running.load(Ordering::Relaxed) && !source.retired);
    assert_eq!(found.lock().unwrap().state_bytes, 0);
}

/// How long the guest writes where a channel is slow.
const BUSY: Duration = Duration::from_millis(1200);
/// How late a slow channel is with each frame.
const LATE: Duration = Duration::from_millis(60);

/// A link on which rounds take a while, and a switchover after some of them.
fn some_rounds() -> MigrationHandle {
    let settings = Settings {
        // A guest that a busy host keeps from writing must not end it before its time.
        downtime_limit: Duration::from_millis(1),
        patience: None,
        ..Settings::default()
    };
    let own = Own {
        max_bandwidth: Some("100MiB/s".parse().unwrap()),
        compression: Compression::Fixed(Codec::None),
        ..Own::default()
    };
    let handle = MigrationHandle::new(settings, own, Cancel::default());
    let forced = handle.clone();
    // The guest of this test cannot be throttled.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(1500));
        let _ = forced.switch_over(true);
    });
    handle
}

#[test]
fn what_is_shown_is_in_force_after_a_fall_back() {
    // Regression: the policy fell back to another throttle, and `status` went on to show
    // `governor`.
    let settings = Settings {
        downtime_limit: Duration::from_secs(3600),
        throttle: ThrottleMode::Governor,
        ..Settings::default()
    };
    let handle = MigrationHandle::new(settings, Own::default(), Cancel::default());
    let (result, ..) =
        move_steered(&options(2, false), &destination::Faults::default(), false, &handle);
    assert!(result.is_ok(), "{result:?}");
    // This machine cannot govern its guest, which within this limit need not be throttled either.
    assert!(handle.settings().contains(&("throttle", "adaptive".to_owned())));
}

#[test]
fn the_limit_that_a_switchover_goes_by_is_the_one_in_force() {
    // Regression: the policy let the limit grow to its ceiling, and `switchover` went by the old
    // one.
    let settings = Settings {
        downtime_limit: Duration::from_millis(1),
        downtime_ceiling: Some(Duration::from_secs(80)),
        patience: None,
        throttle: ThrottleMode::Off,
        ..Settings::default()
    };
    let own = Own {
        max_bandwidth: Some("100MiB/s".parse().unwrap()),
        compression: Compression::Fixed(Codec::None),
        ..Own::default()
    };
    let handle = MigrationHandle::new(settings, own, Cancel::default());
    let (result, ..) =
        move_steered(&options(2, false), &destination::Faults::default(), false, &handle);
    assert!(result.is_ok(), "{result:?}");
    assert!(handle.limit() > Duration::from_secs(1), "{:?}", handle.limit());
}

#[test]
fn a_paused_guest_is_not_held_to_a_limit_that_no_round_could_meet() {
    // Regression: a machine that stalled, and whose last look and flush were long for that, kept a
    // paused guest, which nobody waits for, at the source.
    for paused in [true, false] {
        // Less than is reckoned for devices.
        let settings = Settings {
            downtime_limit: Duration::from_millis(10),
            patience: Some(Duration::from_millis(300)),
            throttle: ThrottleMode::Off,
            ..Settings::default()
        };
        let handle = MigrationHandle::new(settings, Own::default(), Cancel::default());
        let mut source = Source::start(Duration::ZERO, Vec::new());
        source.paused = paused;
        let (destination, faults) = (Destination::of(&source), destination::Faults::default());
        let result = run(&mut source, destination, &options(2, false), faults, &handle);
        let gave_up = result.is_err_and(|failure| {
            matches!(failure.cause, EngineError::NotConverging(_)) || panic!("{failure}")
        });
        assert_eq!(gave_up, !paused);
    }
}

#[test]
fn an_old_page_never_lands_on_a_newer_one() {
    // One channel is late with each frame, in all phases; the other is not. Over a long way each
    // puts its frames on whichever connection takes them.
    for (slow, fault) in [(0, None), (1, None), (1, Some(Fault::LongWay))] {
        let slow_channel = Some((slow, LATE));
        let faults = destination::Faults { slow_channel, ..destination::Faults::default() };
        let options = Options { channels_afar: 0, fault, ..options(2, true) };
        let (result, _, found) = move_steered(&options, &faults, false, &some_rounds());
        assert!(result.is_ok(), "channel {slow}, {fault:?}: {result:?}");
        assert_eq!(found.pages_first, Some(true));
    }
}

#[test]
fn pages_that_are_named_as_holes_and_sent_in_one_round_go_over_one_connection() {
    // The destination refuses a page that comes twice over two. Without fingerprints what was
    // written is sent though it is a hole by now.
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    source.given_back = (0..4000).step_by(2).collect();
    let options = Options {
        channels_afar: 0,
        fault: Some(Fault::Scatter),
        fingerprints: false,
        verify: Verify::Stopped,
        ..options(2, true)
    };
    let (destination, handle) = (Destination::of(&source), some_rounds());
    let faults = destination::Faults::default();
    let measures = run(&mut source, destination, &options, faults, &handle).unwrap();
    let last = measures.round_list.last().unwrap();
    assert!(last.zero.0 > 2000, "{last:?}");
}

#[test]
fn a_thread_that_reads_a_strangers_bytes_can_open_nothing() {
    // Mutations: the channels are not confined; nobody looks at what they were kept from.
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let destination = Destination::of(&source);
    let faults = destination::Faults { trespass: true, ..destination::Faults::default() };
    let result = run(&mut source, destination, &options(2, false), faults, &some_rounds());
    let failure = result.unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    let text = failure.to_string();
    // openat(2).
    assert!(text.contains("was kept from system call 257 of x86-64"), "{text}");
    assert!(text.contains("nothing that came is used") && !text.contains('\n'), "{text}");
    assert!(source.running.load(Ordering::Relaxed));
}

/// A file system for the test that mounted it.
struct Tmpfs(std::path::PathBuf);

impl Tmpfs {
    fn mount(name: &str, size: &str) -> Option<Self> {
        let dir = std::env::temp_dir().join(format!("godwit-{name}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let options = format!("size={size}");
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "none"])
            .arg(&dir)
            .status();
        mounted.is_ok_and(|status| status.success()).then_some(Self(dir))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_guest_is_refused_where_its_memory_would_not_fit() {
    // The file takes none of the file system, and what is sent would fit; all of it would not.
    let Some(tmpfs) = Tmpfs::mount("room", "20M") else {
        let _ = std::io::Write::write_all(
            &mut std::io::stderr(),
            b"\nSKIPPED a_guest_is_refused_where_its_memory_would_not_fit: cannot mount (needs \
              root)\n",
        );
        return;
    };
    let block = |name: &str, pages: u64| {
        let path = tmpfs.0.join(name);
        let size = godwit_units::PageCount(pages).bytes();
        std::fs::File::create(&path).unwrap().set_len(size.0).unwrap();
        RamBlock::open(name, &path, 0, size, false).unwrap()
    };
    let [first, second] = SIZES;
    let ram = Arc::new(vec![block("ram0", first), block("ram1", second)]);
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let destination = Destination { ram: Arc::clone(&ram), ..Destination::of(&source) };
    let result = run(
        &mut source,
        destination,
        &options(2, false),
        destination::Faults::default(),
        &some_rounds(),
    );
    let allocated: u64 = ram.iter().map(|block| block.allocated().unwrap().0).sum();
    let failure = result.unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    let (text, mount) = (failure.to_string(), tmpfs.0.display().to_string());
    // 7300 pages do not fit into 5120; the mount must become larger by what is missing.
    assert!(text.contains(&format!("the tmpfs at {mount} has room for 20MiB")), "{text}");
    assert!(text.contains(&format!("mount -o remount,size=29M {mount}")), "{text}");
    assert!(source.running.load(Ordering::Relaxed));
    assert_eq!(allocated, 0, "looking allocates nothing");
}

#[test]
fn a_wish_to_cancel_behind_commit_comes_too_late_for_both() {
    // Mutation: Ctrl-C is heard behind COMMIT. It must neither call a migration back that has come
    // to its end nor leave it in doubt.
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let (here, there) = (Cancel::default(), Cancel::default());
    let (wish_here, wish_there) = (here.clone(), there.clone());
    let mut destination = Destination {
        while_starting: Box::new(move || {
            wish_here.cancel();
            wish_there.cancel();
            // Long enough for both to look.
            std::thread::sleep(Duration::from_millis(500));
        }),
        ..Destination::of(&source)
    };
    let receiving = std::thread::spawn(move || {
        let options = destination::Options::default();
        let mut lost = false;
        let mut notice = |notice: &Notice| {
            lost |= matches!(notice, Notice::AwaitingSource { .. } | Notice::Refused(_))
        };
        let received =
            destination::receive(&mut destination, &listener, &options, &there, &mut notice);
        (received.map(drop), lost)
    });
    let settings = Settings { downtime_limit: Duration::from_secs(10), ..Settings::default() };
    let handle = MigrationHandle::new(settings, Own::default(), here.clone());
    let options = Options { to, ..options(2, false) };
    let result = migrate(&mut source, &options, &handle, &mut |_| {}).map(drop);
    let (received, lost) = receiving.join().unwrap();
    assert!(here.is_cancelled());
    // A source in doubt drops the connection and asks over another one.
    assert!(!lost, "it was in doubt for a while");
    assert!(result.is_ok(), "{result:?}");
    assert!(received.is_ok(), "{received:?}");
    assert!(source.retired && !source.running.load(Ordering::Relaxed));
}

#[test]
fn a_source_that_only_asks_is_answered_and_leaves_no_trace() {
    let mut small = Source::start(Duration::from_secs(60), Vec::new());
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let mut destination = Destination { differs: true, ..Destination::of(&small) };
    let found = Arc::clone(&destination.found);
    let receiving = std::thread::spawn(move || {
        let (mut told, options) = (Vec::new(), destination::Options::default());
        let mut notice = |notice: &Notice| match notice {
            Notice::Asked { refusal, .. } => told.push(refusal.clone()),
            Notice::Looked { .. } => told.push(Some("nobody's".to_owned())),
            _ => {}
        };
        let cancel = Cancel::default();
        let received =
            destination::receive(&mut destination, &listener, &options, &cancel, &mut notice);
        (received.map(drop), told)
    });
    let options = Options { to, ..options(2, true) };
    let cancel = Cancel::default();
    let refused = inquire(&mut small, &options, Some(SHORT), &cancel).unwrap();
    assert!(refused.trial.is_none(), "{refused:?}");
    let here = godwit_engine::facts::of_this_host();
    let facts = refused.facts.unwrap();
    assert_eq!((facts.total, &facts.flags), (here.total, &here.flags));
    let refused = refused.refusal.unwrap();
    assert!(refused.contains("another machine"), "{refused}");
    // Mutations: nobody's machine is compared as well; what is no machine is not told of.
    let alone = inquire_host(&options, Some(SHORT), &cancel).unwrap();
    assert!(alone.refusal.is_none() && alone.trial.is_some(), "{alone:?}");
    assert_eq!(alone.facts.unwrap().total, here.total);
    for trial in [None, Some(SHORT)] {
        let inquiry = inquire(&mut small, &options, trial, &cancel).unwrap();
        assert!(inquiry.refusal.is_none() && inquiry.round_trip > Duration::ZERO, "{inquiry:?}");
        assert_eq!(inquiry.trial.is_some(), trial.is_some());
        if let Some(tried) = inquiry.trial {
            // Both clocks are this host's.
            assert!(tried.bytes.0 >= 1 << 20 && tried.clock_ahead.abs() < 5.0, "{tried:?}");
            assert!(tried.rate().bytes_per_second() > 0.0, "{tried:?}");
        }
    }
    assert!(small.running.load(Ordering::Relaxed) && found.lock().unwrap().pages_first.is_none());
    migrate(&mut small, &options, &some_rounds(), &mut |_| {}).unwrap();
    let (received, told) = receiving.join().unwrap();
    assert!(received.is_ok(), "{received:?}");
    assert_eq!(told.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false, false]);
    assert_eq!(found.lock().unwrap().inquiries, 3);
}

#[test]
fn a_second_source_is_told_of_the_first_at_once() {
    // Regression: nobody answered it, and the operator of the destination never heard of it.
    let mut first = Source::start(Duration::from_secs(60), Vec::new());
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let mut destination = Destination::of(&first);
    let (found_in, found) = std::sync::mpsc::channel();
    let receiving = std::thread::spawn(move || {
        let mut told = Vec::new();
        let mut notice = |notice: &Notice| match notice {
            Notice::Accepted { .. } => found_in.send(()).unwrap(),
            Notice::Busy { peer } => told.push(peer.clone()),
            _ => {}
        };
        let options = destination::Options::default();
        let cancel = Cancel::default();
        let received =
            destination::receive(&mut destination, &listener, &options, &cancel, &mut notice);
        (received.map(drop), told)
    });
    let at = Options { to: to.clone(), ..options(2, true) };
    let migrating =
        std::thread::spawn(move || migrate(&mut first, &at, &some_rounds(), &mut |_| {}).map(drop));
    found.recv().unwrap();

    let mut second = Source::start(Duration::from_secs(60), Vec::new());
    // A stranger that says nothing is in nobody's way for longer than a greeting takes.
    let silent = Stream::connect(&to).unwrap();
    silent.shut_down();
    let at = Options { to, ..options(2, false) };
    let failure = migrate(&mut second, &at, &some_rounds(), &mut |_| {}).unwrap_err();

    let words = failure.to_string();
    let expected = "the destination is busy: it has been taking in the guest of 127.0.0.1:";
    assert!(words.starts_with(expected) && words.contains("start another VM"), "{words}");
    assert_eq!((failure.phase, failure.survivor), (Phase::Setup, Survivor::Source));
    assert!(second.running.load(Ordering::Relaxed));
    let migrated = migrating.join().unwrap();
    assert!(migrated.is_ok(), "{migrated:?}");
    let (received, told) = receiving.join().unwrap();
    assert!(received.is_ok(), "{received:?}");
    assert!(told.len() == 1 && told[0].starts_with("127.0.0.1:"), "{told:?}");
}

#[test]
fn more_disks_than_the_protocol_can_name_are_refused_before_anything_begins() {
    // Mutation: the check is left out, and the encoder panics.
    let disks = (0..65).map(|n| Arc::new(SourceDisk::new(&format!("vd{n}"), 1 << 20))).collect();
    let mut source = Source::start(Duration::from_secs(60), disks);
    // Nobody listens there, which would be found next.
    let options = Options { to: "127.0.0.1:1".parse().unwrap(), ..options(2, false) };
    let failure = migrate(&mut source, &options, &some_rounds(), &mut |_| {}).unwrap_err();
    let text = failure.to_string();
    assert!(
        text.starts_with("the VM has 65 disks to move, and a migration takes 64 at the most"),
        "{text}"
    );
    assert_eq!(failure.survivor, Survivor::Source);
    assert!(source.running.load(Ordering::Relaxed));
}

/// As one message of the destination, the largest that it may send.
fn digests() -> Vec<u8> {
    Message::Digests { block: 0, first: 0, digests: vec![0; DIGESTS_PER_MESSAGE] }.encode()
}

#[test]
fn a_destination_that_talks_without_end_is_held_back() {
    // Mutation: the source reads whatever comes into a queue without a limit.
    let path = std::env::temp_dir().join(format!("godwit-talker-{}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let to = format!("unix:{}", path.display()).parse().unwrap();
    let talking = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut greeting = [0; GREETING_LEN];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&greeting).unwrap();
        stream
            .write_all(&Message::Accept { codecs: 0, features: Features::NONE }.encode())
            .unwrap();
        // The source is busy, and nobody looks at what this says.
        stream.set_write_timeout(Some(Duration::from_millis(700))).unwrap();
        let (digests, mut said) = (digests(), 0);
        while let Ok(count @ 1..) = stream.write(&digests) {
            said += count;
        }
        (said, listener)
    });
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    source.slow_start = Duration::from_secs(3);
    let began = Instant::now();
    let options = Options { to, ..options(1, false) };
    let failure = migrate(&mut source, &options, &some_rounds(), &mut |_| {}).unwrap_err();
    let (said, _listener) = talking.join().unwrap();
    let _ = std::fs::remove_file(&path);
    // 256 messages of 64 KiB, and what the kernel holds.
    assert!((1 << 20..24 << 20).contains(&said), "{said} bytes were taken");
    assert!(failure.to_string().contains("the destination broke the protocol"), "{failure}");
    assert_eq!(failure.survivor, Survivor::Source);
    assert!(source.running.load(Ordering::Relaxed));
    assert!(began.elapsed() < Duration::from_secs(15), "it ended after {:?}", began.elapsed());
}
