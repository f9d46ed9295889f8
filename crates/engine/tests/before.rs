//! What is to be done before the switchover is done while the guest runs, or the guest stays.
#![allow(clippy::unwrap_used)]

mod machine;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use godwit_codec::Codec;
use godwit_engine::compression::Compression;
use godwit_engine::destination::Faults;
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::report::Measures;
use godwit_engine::source::{BeforeSwitchover, Options};
use godwit_engine::{Cancel, EngineError, Failure, Survivor};
use godwit_policy::Settings;

use machine::{Destination, Source, options, run};

fn moved(
    source: &mut Source,
    before: BeforeSwitchover,
    cancel: &Cancel,
) -> Result<Measures, Failure> {
    let settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    let handle = MigrationHandle::new(settings, Own::default(), cancel.clone());
    let options = Options { before_switchover: Some(before), ..options(2, false) };
    let destination = Destination::of(source);
    run(source, destination, &options, Faults::default(), &handle)
}

fn busy() -> Source {
    Source::start(Duration::from_secs(60), Vec::new())
}

#[test]
fn it_is_done_once_and_the_guest_runs_until_it_is() {
    // Mutations: it is not waited for; the guest is stopped first.
    let mut source = busy();
    let (running, seen) = (Arc::clone(&source.running), Arc::new(Mutex::new(Vec::new())));
    let own = Arc::clone(&seen);
    let before = BeforeSwitchover::new(move || {
        std::thread::sleep(Duration::from_millis(300));
        own.lock().unwrap().push(running.load(Ordering::Relaxed));
        Ok(())
    });
    moved(&mut source, before, &Cancel::default()).unwrap();
    assert_eq!(*seen.lock().unwrap(), [true]);
}

#[test]
fn it_is_done_behind_the_search_for_less_downtime() {
    // Mutation: both get ready, and so it is done, before a round is made in search of less.
    let mut source = busy();
    let settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    // Slow enough that the first round leaves something to be made less.
    let max_bandwidth = Some("100MiB/s".parse().unwrap());
    let own = Own { max_bandwidth, compression: Compression::Fixed(Codec::None), ..Own::default() };
    let handle = MigrationHandle::new(settings, own, Cancel::default());
    let (seen, round) = (handle.clone(), Arc::new(AtomicU32::new(u32::MAX)));
    let own = Arc::clone(&round);
    let before = BeforeSwitchover::new(move || {
        own.store(seen.progress().unwrap().round, Ordering::Relaxed);
        Ok(())
    });
    let options = Options { before_switchover: Some(before), ..options(2, false) };
    let destination = Destination::of(&source);
    run(&mut source, destination, &options, Faults::default(), &handle).unwrap();
    assert!((1..u32::MAX).contains(&round.load(Ordering::Relaxed)), "{round:?}");
}

#[test]
fn where_it_fails_the_guest_stays() {
    let mut source = busy();
    let before = BeforeSwitchover::new(|| Err("the switch does not answer".to_owned()));
    let failure = moved(&mut source, before, &Cancel::default()).unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    assert!(matches!(&failure.cause, EngineError::Hook(why) if why.contains("switch")));
    assert!(source.running.load(Ordering::Relaxed) && !source.retired);
}

#[test]
fn who_cancels_does_not_wait_for_it() {
    // Mutation: it is waited for with nothing else heard.
    let mut source = busy();
    let (begun, begins) = mpsc::channel();
    let (begun, ends, done) = (Mutex::new(begun), Arc::<AtomicBool>::default(), AtomicU32::new(0));
    let end = Arc::clone(&ends);
    let before = BeforeSwitchover::new(move || {
        begun.lock().unwrap().send(()).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while !end.load(Ordering::Relaxed) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    let cancel = Cancel::default();
    let cancels = cancel.clone();
    let canceller = std::thread::spawn(move || {
        begins.recv().unwrap();
        cancels.cancel();
        Instant::now()
    });
    let failure = moved(&mut source, before, &cancel).unwrap_err();
    let after = canceller.join().unwrap().elapsed();
    ends.store(true, Ordering::Relaxed);
    assert!(matches!(failure.cause, EngineError::Cancelled), "{failure}");
    assert!(after < Duration::from_secs(30), "{after:?}");
    assert!(source.running.load(Ordering::Relaxed));
}
