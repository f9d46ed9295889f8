//! Peers and links that fall silent while the connection stands, and peers that are only busy.
//!
//! A tunnel over a unix socket or vsock does not end when the host behind it does, so the kernel
//! has nothing to tell. Each test takes a little longer than `limits::LINK`.
#![allow(clippy::unwrap_used)]

mod machine;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use godwit_engine::address::{Address, Listener};
use godwit_engine::destination::{self, Faults, Notice, Received, receive};
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::report::Measures;
use godwit_engine::source::{Options, migrate};
use godwit_engine::{Cancel, EngineError, Failure, Phase, Survivor, limits};
use godwit_policy::Settings;

use machine::{Destination, Source, options, run};

/// Longer than a silent peer is waited for.
const BUSY: Duration = Duration::from_secs(12);
/// By then silence must have been noticed; a write that is stuck would take longer.
const NOTICED: Duration = Duration::from_secs(16);

/// A tunnel between two unix sockets that can stop carrying bytes, and stays open all the same.
struct Tunnel {
    near: PathBuf,
    far: PathBuf,
    frozen: Arc<AtomicBool>,
}

impl Tunnel {
    fn new(name: &str) -> Self {
        let path = |end: &str| {
            std::env::temp_dir().join(format!("godwit-{name}-{end}-{}", std::process::id()))
        };
        let tunnel = Self { near: path("near"), far: path("far"), frozen: Arc::default() };
        let listener = UnixListener::bind(&tunnel.near).unwrap();
        let (far, frozen) = (tunnel.far.clone(), Arc::clone(&tunnel.frozen));
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let far = UnixStream::connect(&far).unwrap();
                carry(near.try_clone().unwrap(), far.try_clone().unwrap(), Arc::clone(&frozen));
                carry(far, near, Arc::clone(&frozen));
            }
        });
        tunnel
    }

    fn address(path: &Path) -> Address {
        format!("unix:{}", path.display()).parse().unwrap()
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.near);
    }
}

fn carry(mut from: UnixStream, mut to: UnixStream, frozen: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            while frozen.load(Ordering::Relaxed) {
                std::thread::park();
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
}

fn quick() -> MigrationHandle {
    let settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    MigrationHandle::new(settings, Own::default(), Cancel::default())
}

fn destination(source: &Source, while_loading: Box<dyn FnMut() + Send>) -> Destination {
    Destination { while_loading, ..Destination::of(source) }
}

/// What became of both sides, and how long after `frozen_at` each knew.
struct Outcome {
    source: (Result<Measures, Failure>, Duration),
    destination: (Result<Received, Failure>, Duration),
    awaited: bool,
}

/// Moves `source` through `tunnel`. A destination that waits for its source to come back is told to
/// give up.
fn move_through(
    tunnel: &Tunnel,
    source: &mut Source,
    mut to: Destination,
    handle: &MigrationHandle,
    frozen_at: &Arc<Mutex<Instant>>,
) -> Outcome {
    let listener = Listener::bind(&Tunnel::address(&tunnel.far)).unwrap();
    let since = Arc::clone(frozen_at);
    let receiving = std::thread::spawn(move || {
        let (cancel, mut awaited) = (Cancel::default(), None);
        let result =
            receive(&mut to, &listener, &destination::Options::default(), &cancel, &mut |notice| {
                if matches!(notice, Notice::AwaitingSource { .. }) {
                    awaited = Some(since.lock().unwrap().elapsed());
                    cancel.cancel();
                }
            });
        let noticed = awaited.unwrap_or_else(|| since.lock().unwrap().elapsed());
        ((result, noticed), awaited.is_some())
    });
    let options = Options { to: Tunnel::address(&tunnel.near), ..options(1, false) };
    let result = migrate(source, &options, handle, &mut |_| {});
    let noticed = frozen_at.lock().unwrap().elapsed();
    let (destination, awaited) = receiving.join().unwrap();
    Outcome { source: (result, noticed), destination, awaited }
}

fn check_silent(failure: &Failure, noticed: Duration, peer: &str) {
    assert!(matches!(failure.cause, EngineError::Silent { .. }), "{failure}");
    assert!(
        failure.to_string().starts_with(&format!("nothing was heard of the {peer} for 10s")),
        "{failure}"
    );
    assert!(noticed > limits::LINK / 2 && noticed < NOTICED, "the {peer}'s silence: {noticed:?}");
}

#[test]
fn a_link_that_stands_and_carries_nothing_in_pre_copy_is_lost_for_both() {
    let tunnel = Tunnel::new("pre-copy");
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let to = destination(&source, Box::new(|| {}));
    // Slow enough that the first round lasts longer than the test.
    let own = Own { max_bandwidth: Some("100KiB/s".parse().unwrap()), ..Own::default() };
    let handle = MigrationHandle::new(
        Settings { patience: None, ..Settings::default() },
        own,
        Cancel::default(),
    );
    let frozen_at = Arc::new(Mutex::new(Instant::now()));
    let (frozen, at) = (Arc::clone(&tunnel.frozen), Arc::clone(&frozen_at));
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(2));
        frozen.store(true, Ordering::Relaxed);
        *at.lock().unwrap() = Instant::now();
    });

    let outcome = move_through(&tunnel, &mut source, to, &handle, &frozen_at);

    let failure = outcome.source.0.unwrap_err();
    check_silent(&failure, outcome.source.1, "destination");
    assert_eq!((failure.survivor, failure.phase), (Survivor::Source, Phase::PreCopy));
    assert!(source.running.load(Ordering::Relaxed));
    check_silent(&outcome.destination.0.unwrap_err(), outcome.destination.1, "source");
}

#[test]
fn a_link_that_stands_and_carries_nothing_at_ready_is_lost_for_both() {
    let tunnel = Tunnel::new("ready");
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let frozen_at = Arc::new(Mutex::new(Instant::now()));
    let (frozen, at) = (Arc::clone(&tunnel.frozen), Arc::clone(&frozen_at));
    // READY is said, and never arrives.
    let freeze = move || {
        frozen.store(true, Ordering::Relaxed);
        *at.lock().unwrap() = Instant::now();
    };
    let to = destination(&source, Box::new(freeze));

    let outcome = move_through(&tunnel, &mut source, to, &quick(), &frozen_at);

    let failure = outcome.source.0.unwrap_err();
    check_silent(&failure, outcome.source.1, "destination");
    // COMMIT was not sent: the guest is the source's.
    assert_eq!(failure.survivor, Survivor::Source);
    assert!(source.running.load(Ordering::Relaxed) && !source.retired);
    // It could not know that, and waited for the source to come back.
    assert!(outcome.awaited);
    check_silent(&outcome.destination.0.unwrap_err(), outcome.destination.1, "source");
}

#[test]
fn a_destination_that_runs_the_guest_is_not_kept_waiting_for_a_lost_source() {
    let tunnel = Tunnel::new("running");
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let frozen = Arc::clone(&tunnel.frozen);
    // COMMIT has come, and what is said from here on never arrives.
    let freeze = move || frozen.store(true, Ordering::Relaxed);
    let mut to = Destination { while_starting: Box::new(freeze), ..Destination::of(&source) };
    let listener = Listener::bind(&Tunnel::address(&tunnel.far)).unwrap();
    let options = Options { to: Tunnel::address(&tunnel.near), ..options(1, false) };
    // It asks for a minute, and is not waited for.
    std::thread::spawn(move || migrate(&mut source, &options, &quick(), &mut |_| {}));
    let (cancel, mut awaited) = (Cancel::default(), None);

    let result =
        receive(&mut to, &listener, &destination::Options::default(), &cancel, &mut |notice| {
            if let Notice::AwaitingSource { limit, arrived } = notice {
                assert_eq!((*limit, *arrived), (limits::LINGER, true));
                awaited = Some(Instant::now());
                cancel.cancel();
            }
        });

    let waited = awaited.unwrap().elapsed();
    assert!(waited < limits::LINGER / 10, "it waited for {waited:?} longer");
    assert!(result.unwrap().running);
    assert!(to.found.lock().unwrap().ran);
}

#[test]
fn a_destination_that_is_busy_for_longer_is_waited_for() {
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let to = destination(&source, Box::new(|| std::thread::sleep(BUSY)));
    let result = run(&mut source, to, &options(2, false), Faults::default(), &quick());
    assert!(result.is_ok(), "{result:?}");
}

#[test]
fn a_source_whose_monitor_hangs_for_longer_is_waited_for() {
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    source.monitor_hangs = BUSY;
    let to = destination(&source, Box::new(|| {}));
    let result = run(&mut source, to, &options(2, false), Faults::default(), &quick());
    assert!(result.is_ok(), "{result:?}");
}
