//! Pages that follow when the guest runs at the destination already: between two machines made up
//! for the purpose, over real sockets.
#![allow(clippy::unwrap_used)]

mod machine;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_codec::Codec;
use godwit_engine::address::{Address, Listener};
use godwit_engine::compression::Compression;
use godwit_engine::destination::{self, Notice, Received, receive};
use godwit_engine::handle::{HandleError, MigrationHandle, Own};
use godwit_engine::report::{Measures, Stage};
use godwit_engine::source::{Options, PostCopy, Verify, migrate};
use godwit_engine::vm::Kept;
use godwit_engine::vm::SourceVm;
use godwit_engine::{Cancel, EngineError, Failure, Survivor};
use godwit_memory::SEGMENT_PAGES;
use godwit_policy::{Settings, ThrottleMode};
use godwit_units::TypedRate;

use machine::{Destination, Found, Proxy, SIZES, Source, SourceDisk};

const ALL: u64 = SIZES[0] + SIZES[1];
/// In which a part of memory takes its time.
const SLOW: &str = "20MiB/s";

/// A guest that writes all the time and never converges: it may neither be slowed down nor stopped
/// for as long as what it writes would take.
fn settings() -> Settings {
    Settings {
        downtime_limit: Duration::from_millis(1),
        throttle: ThrottleMode::Off,
        patience: Some(Duration::from_millis(600)),
        ..Settings::default()
    }
}

fn handle() -> MigrationHandle {
    handle_of(settings())
}

fn handle_of(settings: Settings) -> MigrationHandle {
    let max_bandwidth = Some(SLOW.parse::<TypedRate>().unwrap());
    let own = Own { max_bandwidth, compression: Compression::Fixed(Codec::None), ..Own::default() };
    MigrationHandle::new(settings, own, Cancel::default())
}

fn options(post_copy: PostCopy) -> Options {
    Options { post_copy, ..Options::new(Address::Tcp(String::new())) }
}

struct Moved {
    result: Result<Measures, Failure>,
    received: Result<Received, Failure>,
    found: Found,
    source: Source,
}

/// A destination that takes in one guest.
fn take_in(mut destination: Destination) -> (Address, JoinHandle<Result<Received, Failure>>) {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let found = Arc::clone(&destination.found);
    let mut hear = move |notice: &Notice| {
        if let Notice::Accepted { features, .. } = notice {
            found.lock().unwrap().features.clone_from(features);
        }
    };
    let receiving = std::thread::spawn(move || {
        let options = destination::Options {
            wait: Some(Duration::from_secs(60)),
            confined: true,
            ..destination::Options::default()
        };
        let received =
            receive(&mut destination, &listener, &options, &Cancel::default(), &mut hear);
        destination.judge();
        received
    });
    (to, receiving)
}

fn move_over(
    options: &Options,
    handle: &MigrationHandle,
    change: impl FnOnce(&mut Destination),
    link: impl FnOnce(&Address) -> Address,
) -> Moved {
    move_from(Source::start(Duration::from_secs(60), Vec::new()), options, handle, change, link)
}

fn move_from(
    mut source: Source,
    options: &Options,
    handle: &MigrationHandle,
    change: impl FnOnce(&mut Destination),
    link: impl FnOnce(&Address) -> Address,
) -> Moved {
    let mut destination = Destination::of(&source);
    change(&mut destination);
    let found = Arc::clone(&destination.found);
    let (to, receiving) = take_in(destination);
    let options = Options { to: link(&to), ..options.clone() };
    let result = migrate(&mut source, &options, handle, &mut |_| {});
    let received = receiving.join().unwrap();
    let found = std::mem::take(&mut *found.lock().unwrap());
    Moved { result, received, found, source }
}

fn plainly(options: &Options, handle: &MigrationHandle) -> Moved {
    move_over(options, handle, |_| {}, Address::clone)
}

impl Found {
    fn has(&self, feature: &str) -> bool {
        self.features.split([',', ' ']).any(|word| word == feature)
    }
}

impl Moved {
    /// The guest has come whole, and part of it when it ran already.
    fn came_whole(&self) -> Measures {
        let measures = self.result.as_ref().unwrap().clone();
        let received = self.received.as_ref().unwrap();
        let fetched = received.fetched.unwrap();
        let post_copy = measures.post_copy.unwrap();
        assert!(self.found.ran && self.source.retired && self.source.guest.is_none());
        assert_eq!(self.found.misread, 0, "of {ALL} pages");
        assert!(self.found.finished, "something stays in the machine");
        assert!(self.found.has("postcopy"), "{}", self.found.features);
        assert_eq!(post_copy.missing.0, self.found.missing * 4096);
        assert_eq!(fetched.missing.0, self.found.missing);
        measures
    }
}

#[test]
fn what_came_while_it_stood_still_is_not_behind_its_memory() {
    // Mutations: it is carried at the end; pages wait until nothing comes any more.
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    source.card.packets = [vec![1; 60], vec![2; 60]].into();
    let moved = move_from(source, &options(PostCopy::Now), &handle(), |_| {}, Address::clone);
    assert_eq!(moved.came_whole().late_packets, 2);
    assert_eq!(moved.found.delivered, [vec![1; 60], vec![2; 60]]);
    assert_eq!(moved.received.as_ref().unwrap().late_packets, 2);
    let waits = &moved.source.card.waits;
    assert!(waits.iter().take(3).all(Duration::is_zero), "pages are waited for: {waits:?}");
    assert!(moved.source.card.ended, "what comes later is of no use any more");
}

#[test]
fn now_leaves_everything_and_the_guest_waits_for_no_more_than_it_uses() {
    let moved = plainly(&options(PostCopy::Now), &handle());
    let measures = moved.came_whole();
    assert_eq!(moved.found.missing, ALL, "nothing was copied before");
    let fetched = moved.received.as_ref().unwrap().fetched.unwrap();
    assert!(fetched.faults > 0 && fetched.median_wait > Duration::ZERO);
    let post_copy = measures.post_copy.unwrap();
    assert!(post_copy.asked > 0);
    assert!(measures.total >= measures.downtime + post_copy.time);
}

#[test]
fn what_was_never_touched_is_not_missing() {
    let late = Duration::from_secs(60);
    let source = Source::start_late(late, Vec::new(), late);
    let moved = move_from(source, &options(PostCopy::Now), &handle(), |_| {}, Address::clone);
    moved.came_whole();
    assert_eq!(moved.found.missing, SEGMENT_PAGES, "it keeps to the first of {ALL} pages");
}

#[test]
fn what_was_touched_after_it_was_named_as_a_hole_is_missing() {
    // Mutation: what was named as a hole is not looked at any more.
    let (busy, late) = (Duration::from_secs(60), Duration::from_millis(500));
    let handle = handle_of(Settings { patience: None, ..settings() });
    let asking = handle.clone();
    let asker = std::thread::spawn(move || {
        std::thread::sleep(2 * late);
        asking.switch_over_by_post_copy()
    });
    let source = Source::start_late(busy, Vec::new(), late);
    let moved = move_from(source, &options(PostCopy::Never), &handle, |_| {}, Address::clone);
    asker.join().unwrap().unwrap();
    moved.came_whole();
    assert!(moved.source.ram()[1].has_data(moved.source.ram()[1].all()).unwrap());
}

/// Its machine has no need of tracking.
fn untracked() -> Source {
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    source.goes_untracked = true;
    source
}

#[test]
fn who_leaves_at_once_is_not_tracked_and_all_others_are() {
    let moved = move_from(untracked(), &options(PostCopy::Now), &handle(), |_| {}, Address::clone);
    moved.came_whole();
    assert!(!moved.source.tracked && moved.found.missing == ALL);

    let moved = plainly(&options(PostCopy::Now), &handle());
    moved.came_whole();
    assert!(moved.source.tracked, "its machine needs it");
    for post_copy in [PostCopy::After(1), PostCopy::OnTimeout] {
        let moved = move_from(untracked(), &options(post_copy), &handle(), |_| {}, Address::clone);
        moved.came_whole();
        assert!(moved.source.tracked, "{post_copy}");
    }
}

#[test]
fn who_is_not_tracked_and_does_not_leave_after_all_runs_on() {
    let cancel = Cancel::default();
    let handle = MigrationHandle::new(settings(), Own::default(), cancel.clone());
    let change = move |destination: &mut Destination| {
        destination.while_preparing = Box::new(move || cancel.cancel());
    };
    let moved = move_from(untracked(), &options(PostCopy::Now), &handle, change, Address::clone);
    assert_eq!(moved.result.unwrap_err().survivor, Survivor::Source);
    assert!(!moved.found.ran && !moved.source.tracked);
    assert!(moved.source.running.load(Ordering::Relaxed));
}

#[test]
fn who_is_not_tracked_comes_whole_when_the_link_is_cut_before_it_leaves() {
    let (proxy_in, proxy_out) = std::sync::mpsc::channel::<Proxy>();
    let change = move |destination: &mut Destination| {
        let mut cut = false;
        destination.while_preparing = Box::new(move || {
            if !std::mem::replace(&mut cut, true) {
                proxy_out.recv().unwrap().cut(Duration::from_millis(300));
            }
        });
    };
    let through = |to: &Address| {
        let proxy = Proxy::new(to, &[]);
        proxy_in.send(proxy.clone()).unwrap();
        proxy.address()
    };
    let moved = move_from(untracked(), &options(PostCopy::Now), &handle(), change, through);
    let measures = moved.came_whole();
    assert_eq!((measures.resumptions, moved.source.tracked), (1, false));
}

#[test]
fn after_some_rounds_only_what_is_dirty_follows() {
    let late = Duration::from_secs(60);
    let source = Source::start_late(late, Vec::new(), late);
    let moved = move_from(source, &options(PostCopy::After(1)), &handle(), |_| {}, Address::clone);
    moved.came_whole();
    assert!((1..ALL).contains(&moved.found.missing), "{}", moved.found.missing);
}

#[test]
fn on_timeout_it_goes_over_instead_of_giving_up() {
    let given_up = plainly(&options(PostCopy::Never), &handle());
    let failure = given_up.result.unwrap_err();
    assert!(matches!(failure.cause, EngineError::NotConverging(_)), "{failure}");
    plainly(&options(PostCopy::OnTimeout), &handle()).came_whole();
}

#[test]
fn what_fits_into_the_downtime_limit_does_not_follow() {
    let settings = Settings { downtime_limit: Duration::from_secs(60), ..settings() };
    let handle = MigrationHandle::new(settings, Own::default(), Cancel::default());
    let moved = plainly(&options(PostCopy::After(1)), &handle);
    assert!(moved.result.unwrap().post_copy.is_none() && moved.found.ran);
    assert_eq!(moved.found.pages_first, Some(true));
}

#[test]
fn an_operator_asks_for_it_while_it_runs() {
    let handle = handle();
    assert!(matches!(handle.switch_over_by_post_copy(), Err(HandleError::NoPostCopy(_))));
    let asking = handle.clone();
    let asker = std::thread::spawn(move || {
        while asking.progress().is_none_or(|progress| progress.sent.0 < 1 << 20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        asking.switch_over_by_post_copy()
    });
    let moved = plainly(&options(PostCopy::Never), &handle);
    asker.join().unwrap().unwrap();
    moved.came_whole();
    assert!(matches!(handle.switch_over_by_post_copy(), Err(HandleError::Follows)));
}

#[test]
fn where_it_cannot_be_it_is_refused_before_anything_is_sent() {
    let why = "its memory is a file; use memory-backend-ram";
    let lacks = |destination: &mut Destination| destination.cannot_await = Some(why.to_owned());
    let moved = move_over(&options(PostCopy::Now), &handle(), lacks, Address::clone);
    let failure = moved.result.unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    assert!(failure.to_string().contains(why), "{failure}");
    assert!(!moved.found.ran && moved.source.running.load(Ordering::Relaxed));

    // Nobody wants it, and who asks for it on the way is told.
    let handle = MigrationHandle::default();
    let moved = move_over(&options(PostCopy::Never), &handle, lacks, Address::clone);
    assert!(moved.result.is_ok() && moved.found.ran);
    // Mutation: `consider` leaves it in what both sides have.
    let features = &moved.found.features;
    assert!(moved.found.has("restart") && !moved.found.has("postcopy"), "{features}");

    let disk = vec![Arc::new(SourceDisk::new("vda", 1 << 20))];
    for (options, disks, word) in [
        (Options { verify: Verify::Live, ..options(PostCopy::Now) }, vec![], "--verify"),
        (
            Options { reconnect: Duration::ZERO, ..options(PostCopy::After(3)) },
            vec![],
            "--reconnect",
        ),
        (options(PostCopy::OnTimeout), disk, "--disks"),
    ] {
        let mut source = Source::start(Duration::from_secs(60), disks);
        let failure = migrate(&mut source, &options, &handle, &mut |_| {}).unwrap_err();
        assert!(failure.to_string().contains(word), "{failure}");
        assert!(source.running.load(Ordering::Relaxed));
    }
}

#[test]
fn connections_that_are_lost_meanwhile_are_made_again() {
    for seed in 0..3 {
        let mut rng = fastrand::Rng::with_seed(seed);
        // Some within the switchover, which then does not happen, or is asked about.
        let cuts: Vec<(u64, Duration)> = (0..4)
            .map(|_| (rng.u64(1 << 20..8 << 20), Duration::from_millis(rng.u64(10..400))))
            .collect();
        let mut proxy = None;
        let through = |to: &Address| proxy.insert(Proxy::new(to, &cuts)).address();
        let mut source = untracked();
        source.goes_untracked = seed > 0;
        let moved = move_from(source, &options(PostCopy::Now), &handle(), |_| {}, through);
        let measures = moved.came_whole();
        let made = proxy.unwrap().cuts_made();
        assert!(made > 0, "seed {seed}");
        assert!(measures.post_copy.unwrap().resumptions > 0, "seed {seed}: {measures:?}");
    }
}

/// The source says COMMIT when the destination has loaded.
#[test]
fn what_others_would_go_on_by_is_there_before_the_guest_can_run() {
    let path = |side: &str| {
        std::env::temp_dir().join(format!("godwit-{}-follow-{side}.json", std::process::id()))
    };
    let both = [path("source"), path("destination")];
    let options = Options { follow_record: Some(both[0].clone()), ..options(PostCopy::Now) };
    let (record, at) = (both[1].clone(), both.clone());
    let (seen, see) = std::sync::mpsc::channel();
    let change = move |destination: &mut Destination| {
        destination.kept = Some(Kept { record, machine: "it".to_owned() });
        destination.while_loading = Box::new(move || {
            seen.send(at.each_ref().map(|path| path.exists())).unwrap();
        });
    };
    let moved = move_over(&options, &handle(), change, Address::clone);
    moved.came_whole();
    assert_eq!(see.iter().collect::<Vec<_>>(), [[true, true]]);
    assert!(both.iter().all(|path| !path.exists()), "they stay");
}

/// COMMIT or its answer is lost: the source asks over a new connection, over which nobody sends any
/// pages; what had been asked for before was asked for over one that is gone.
#[cfg(feature = "test-hooks")]
#[test]
fn a_handover_that_is_asked_about_loses_no_page() {
    use godwit_engine::source::Fault;
    for fault in [Fault::LoseCommit, Fault::CutAfterCommit] {
        let options = Options { fault: Some(fault), ..options(PostCopy::Now) };
        let moved = plainly(&options, &handle());
        moved.came_whole();
    }
}

#[test]
fn a_guest_whose_machine_ends_there_is_lost_and_nobody_waits_for_it() {
    let handle = handle();
    let looking = handle.clone();
    let end_soon = |destination: &mut Destination| {
        let ended = Arc::clone(&destination.ended);
        std::thread::spawn(move || {
            let serves = |stage| stage == Some(Stage::PostCopy);
            while !serves(looking.progress().map(|progress| progress.stage)) {
                std::thread::sleep(Duration::from_millis(2));
            }
            ended.store(true, Ordering::SeqCst);
        });
    };
    let began = Instant::now();
    let moved = move_over(&options(PostCopy::Now), &handle, end_soon, Address::clone);
    let failures = [moved.result.map(drop).unwrap_err(), moved.received.map(drop).unwrap_err()];
    for failure in failures {
        assert_eq!(failure.survivor, Survivor::Lost, "{failure}");
        assert!(failure.to_string().contains("the destination VM has ended"), "{failure}");
    }
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_channel_that_ends_while_the_machine_loads_is_heard_at_once() {
    // Mutations: the machine is not interrupted, and waits for its page; the reason is that it was.
    for number in [1, 2] {
        let (proxy_in, proxy_out) = std::sync::mpsc::channel::<Proxy>();
        let (waited_in, waited) = std::sync::mpsc::channel();
        let change = move |destination: &mut Destination| {
            let interrupt = Arc::clone(&destination.interrupt);
            destination.while_loading = Box::new(move || {
                let began = Instant::now();
                // The control connection stands; of the others one brings what is waited for.
                proxy_out.recv().unwrap().cut_one(number);
                let raised = || interrupt.lock().unwrap().is_raised();
                while !raised() && began.elapsed() < Duration::from_secs(20) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                waited_in.send(began.elapsed()).unwrap();
            });
        };
        let through = |to: &Address| {
            let proxy = Proxy::new(to, &[]);
            proxy_in.send(proxy.clone()).unwrap();
            proxy.address()
        };
        let options = Options { channels: 1, ..options(PostCopy::Now) };
        let moved = move_over(&options, &handle(), change, through);
        let waited = waited.recv().unwrap();
        assert!(waited < Duration::from_secs(5), "channel {number}: {waited:?}");
        let failure = moved.received.unwrap_err();
        // The source may have answered by then, and says the same.
        let words = failure.to_string();
        assert!(words.contains("the connection to the source broke"), "channel {number}: {words}");
        assert_eq!(moved.result.unwrap_err().survivor, Survivor::Source);
        assert!(!moved.found.ran && moved.source.running.load(Ordering::Relaxed));
    }
}
