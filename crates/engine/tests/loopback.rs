//! The engine between two machines made up for the purpose, over real sockets and real RAM files.
//!
//! A real machine would rarely notice when device state overtakes the last pages; the one made up here looks.
//! It is also the shortest example of what a VMM has to provide.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_codec::Codec;
use godwit_engine::address::{Address, Listener};
use godwit_engine::compression::Compression;
use godwit_engine::destination::{self, receive};
use godwit_engine::source::{Options, migrate};
use godwit_engine::steering::{Own, Steering};
use godwit_engine::vm::{DestinationVm, RunError, SourceVm, VmError};
use godwit_engine::{Cancel, Failure, Survivor};
use godwit_memory::RamBlock;
use godwit_policy::Settings;
use godwit_track::{DirtyTracker, TrackError};
use godwit_units::{PageCount, PageIndex, PageRun, Rate};

const SIZES: [u64; 2] = [6000, 1300];
const STATE: usize = 700_000;

fn blocks() -> Arc<Vec<RamBlock>> {
    let block =
        |(i, pages): (usize, &u64)| RamBlock::anonymous(&format!("ram{i}"), PageCount(*pages)).unwrap();
    Arc::new(SIZES.iter().enumerate().map(block).collect())
}

fn bytes(blocks: &[RamBlock]) -> Vec<Vec<u8>> {
    let read = |block: &RamBlock| {
        let mut bytes = vec![0; block.pages().bytes().0 as usize];
        block.read(PageIndex(0), &mut bytes).unwrap();
        bytes
    };
    blocks.iter().map(read).collect()
}

/// Dirty pages as a set; the guest marks a page after it has written it.
#[derive(Default)]
struct Marks(Mutex<BTreeSet<(usize, u64)>>);

impl DirtyTracker for Marks {
    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let mut marks = self.0.lock().unwrap();
        let range = (block, within.start.0)..(block, within.end().0);
        let most = if limit.0 == 0 { usize::MAX } else { limit.0 as usize };
        let pages: Vec<u64> = marks.range(range).take(most).map(|(_, page)| *page).collect();
        for page in &pages {
            marks.remove(&(block, *page));
            found(PageRun::new(*page, 1));
        }
        let stopped = pages.len() == most;
        Ok(if stopped { PageIndex(pages[most - 1] + 1) } else { within.end() })
    }

    fn peek(&self, block: usize, within: PageRun, found: &mut dyn FnMut(PageRun)) -> Result<(), TrackError> {
        let range = (block, within.start.0)..(block, within.end().0);
        self.0.lock().unwrap().range(range).for_each(|(_, page)| found(PageRun::new(*page, 1)));
        Ok(())
    }
}

/// A machine whose guest writes as fast as it can.
struct Source {
    ram: Arc<Vec<RamBlock>>,
    marks: Arc<Marks>,
    running: Arc<AtomicBool>,
    guest: Option<JoinHandle<()>>,
    state: Option<UnixStream>,
    retired: bool,
    /// The guest writes for so long, and then no more.
    busy: Duration,
}

impl Source {
    fn start(busy: Duration) -> Self {
        let ram = blocks();
        let mut source = Self {
            ram,
            marks: Arc::default(),
            running: Arc::default(),
            guest: None,
            state: None,
            retired: false,
            busy,
        };
        source.resume().unwrap();
        source
    }
}

impl SourceVm for Source {
    fn machine(&self) -> &'static str {
        "made-up"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn was_running(&self) -> bool {
        true
    }

    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError> {
        Ok(Arc::clone(&self.marks) as Arc<dyn DirtyTracker>)
    }

    fn tracking_stop(&self) -> Duration {
        Duration::ZERO
    }

    fn throttle(&mut self, _share: f64) -> Result<(), VmError> {
        Ok(())
    }

    fn limit_disks(&mut self, _rate: Option<Rate>) -> Result<(), VmError> {
        Ok(())
    }

    fn vcpu_time(&self) -> Option<Duration> {
        None
    }

    fn vcpus(&self) -> usize {
        1
    }

    fn direct_io(&self) -> bool {
        false
    }

    fn drain(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError> {
        let (ours, theirs) = UnixStream::pair()?;
        self.state = Some(theirs);
        Ok(Box::new(ours))
    }

    fn stop(&mut self) -> Result<Instant, VmError> {
        self.running.store(false, Ordering::Relaxed);
        self.guest.take().unwrap().join().unwrap();
        Ok(Instant::now())
    }

    fn release_state(&mut self) -> Result<(), VmError> {
        let mut state = self.state.take().unwrap();
        std::thread::spawn(move || state.write_all(&vec![7; STATE]));
        Ok(())
    }

    fn state_saved(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmError> {
        if self.guest.is_none() {
            self.running.store(true, Ordering::Relaxed);
            let until = Instant::now() + self.busy;
            let (ram, marks, running) =
                (Arc::clone(&self.ram), Arc::clone(&self.marks), Arc::clone(&self.running));
            self.guest = Some(std::thread::spawn(move || {
                let mut seed = 1u64;
                while running.load(Ordering::Relaxed) {
                    if Instant::now() >= until {
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    }
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let block = (seed >> 60) as usize % SIZES.len();
                    let page = (seed >> 20) % SIZES[block];
                    ram[block].write(PageIndex(page), &[(seed >> 33) as u8 | 1; 4096]).unwrap();
                    marks.0.lock().unwrap().insert((block, page));
                }
            }));
        }
        Ok(())
    }

    fn retire(&mut self, _keep: bool) -> Result<(), VmError> {
        self.retired = true;
        Ok(())
    }
}

/// What the destination found.
#[derive(Debug, Default)]
struct Found {
    state_bytes: usize,
    /// Whether all pages were in place when the first device state came.
    pages_first: Option<bool>,
    ran: bool,
}

struct Destination {
    ram: Arc<Vec<RamBlock>>,
    source_ram: Arc<Vec<RamBlock>>,
    found: Arc<Mutex<Found>>,
    refuse_to_load: bool,
}

struct Sink {
    ram: Arc<Vec<RamBlock>>,
    source_ram: Arc<Vec<RamBlock>>,
    found: Arc<Mutex<Found>>,
}

impl Write for Sink {
    fn write(&mut self, state: &[u8]) -> std::io::Result<usize> {
        let mut found = self.found.lock().unwrap();
        found.state_bytes += state.len();
        // The source's guest is stopped when there is device state, so its memory stands still.
        found.pages_first.get_or_insert_with(|| bytes(&self.ram) == bytes(&self.source_ram));
        Ok(state.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl DestinationVm for Destination {
    fn machine(&self) -> &'static str {
        "made-up"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        let (ram, source_ram) = (Arc::clone(&self.ram), Arc::clone(&self.source_ram));
        Ok(Box::new(Sink { ram, source_ram, found: Arc::clone(&self.found) }))
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        if self.refuse_to_load { Err("this state is not to my taste".into()) } else { Ok(()) }
    }

    fn run(&mut self) -> Result<(), RunError> {
        self.found.lock().unwrap().ran = true;
        Ok(())
    }

    fn announce(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn discard(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}

fn options(channels: u8, verify: bool) -> Options {
    let to = Address::Tcp(String::new());
    Options { to, verify, channels, ledger: true, keep_source: false, fault: None }
}

/// One migration; the outcome at the source, and what the destination found.
fn move_once(channels: u8, verify: bool, refuse_to_load: bool) -> (Result<(), Survivor>, Source, Found) {
    // So generous that the last round has much to carry.
    let settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    let steering = Steering::new(settings, Own::default(), Cancel::default());
    let (result, source, found) =
        move_steered(&options(channels, verify), &destination::Faults::default(), refuse_to_load, &steering);
    (result.map_err(|failure| failure.survivor), source, found)
}

fn move_steered(
    options: &Options,
    faults: &destination::Faults,
    refuse_to_load: bool,
    steering: &Steering,
) -> (Result<(), Failure>, Source, Found) {
    // A guest that leaves its pages alone in the end: what was wrong then stays wrong.
    let busy = if faults.slow_channel.is_some() { BUSY } else { Duration::from_secs(60) };
    let mut source = Source::start(busy);
    let found: Arc<Mutex<Found>> = Arc::default();
    let mut destination = Destination {
        ram: blocks(),
        source_ram: Arc::clone(&source.ram),
        found: Arc::clone(&found),
        refuse_to_load,
    };
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let faults = *faults;
    let receiving = std::thread::spawn(move || {
        let cancel = Cancel::default();
        let options = destination::Options {
            wait: Some(Duration::from_secs(60)),
            faults,
            ..destination::Options::default()
        };
        receive(&mut destination, &listener, &options, &cancel, &mut |_| {}).map(drop)
    });
    let options = Options { to, ..options.clone() };
    let result = migrate(&mut source, &options, steering, &mut |_| {});
    let received = receiving.join().unwrap();
    assert_eq!(result.is_ok(), received.is_ok(), "{result:?} {received:?}");
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
        let steering = Steering::new(Settings::default(), Own::default(), Cancel::default());
        // Asked for before it begins: the first round passes by every segment.
        steering.switch_over(true).unwrap();
        let (result, source, found) =
            move_steered(&options(2, verify), &destination::Faults::default(), false, &steering);
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(found.pages_first, Some(true));
        assert!(found.ran && source.retired);
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

/// How long the guest writes where a channel is slow.
const BUSY: Duration = Duration::from_millis(1200);
/// How late a slow channel is with each frame.
const LATE: Duration = Duration::from_millis(60);

/// A link on which rounds take a while, and a switchover after some of them.
fn some_rounds() -> Steering {
    let settings =
        Settings { downtime_limit: Duration::from_millis(50), patience: None, ..Settings::default() };
    let own = Own {
        max_bandwidth: Some("100MiB/s".parse().unwrap()),
        compression: Compression::Fixed(Codec::None),
    };
    let steering = Steering::new(settings, own, Cancel::default());
    let forced = steering.clone();
    // The guest of this test cannot be throttled.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(1500));
        let _ = forced.switch_over(true);
    });
    steering
}

#[test]
fn an_old_page_never_lands_on_a_newer_one() {
    // One channel is late with each frame, in all phases; the other is not.
    for slow in 0..2 {
        let slow_channel = Some((slow, LATE));
        let faults = destination::Faults { slow_channel, any_channel: false };
        let (result, _, found) = move_steered(&options(2, true), &faults, false, &some_rounds());
        assert!(result.is_ok(), "channel {slow}: {result:?}");
        assert_eq!(found.pages_first, Some(true));
    }
}
