//! A machine made up for the purpose: the shortest example of what a VMM has to provide. Its guest
//! writes memory and disks as fast as it can, and it looks whether the engine keeps its promises.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub, unused_imports)]

mod coming;
mod disks;
mod proxy;

use std::collections::{BTreeSet, VecDeque};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_bitmap::DirtyBitmap;
use godwit_disk::{Disk, DiskChoice, DiskReader, DiskRound, DiskSink};
use godwit_engine::address::{Address, Listener};
use godwit_engine::destination::{self, receive};
use godwit_engine::handle::MigrationHandle;
use godwit_engine::report::{Audit, Measures};
use godwit_engine::source::{Options, Verify, migrate};
use godwit_engine::vm::{
    ArrivingPages, Ask, Brake, DestinationVm, DiskDestination, DiskVm, Kept, LatePackets,
    PostCopyDestination, RunError, SourceVm, VmError,
};
use godwit_engine::{Cancel, EngineError, Failure, Interrupt};
use godwit_memory::RamBlock;
use godwit_track::{AsOf, DirtyTracker, TrackError};
use godwit_units::{ByteCount, PageCount, PageIndex, PageRun, Rate};

pub use coming::Coming;
pub use disks::{Image, SourceDisk};
pub use proxy::Proxy;

pub const SIZES: [u64; 2] = [6000, 1300];
pub const STATE: usize = 700_000;

pub fn blocks() -> Arc<Vec<RamBlock>> {
    let block = |(i, pages): (usize, &u64)| {
        RamBlock::anonymous(&format!("ram{i}"), PageCount(*pages)).unwrap()
    };
    Arc::new(SIZES.iter().enumerate().map(block).collect())
}

pub fn bytes(blocks: &[RamBlock]) -> Vec<Vec<u8>> {
    let read = |block: &RamBlock| {
        let mut bytes = vec![0; block.pages().bytes().0 as usize];
        block.read(PageIndex(0), &mut bytes).unwrap();
        bytes
    };
    blocks.iter().map(read).collect()
}

/// Dirty pages as a set; the guest marks a page after it has written it.
#[derive(Default)]
struct Marks {
    pages: Mutex<BTreeSet<(usize, u64)>>,
    /// Each channel looks at its own.
    only_whole: AtomicBool,
}

impl DirtyTracker for Marks {
    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let mut marks = self.pages.lock().unwrap();
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

    fn look(
        &self,
        block: usize,
        within: PageRun,
        _: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        let range = (block, within.start.0)..(block, within.end().0);
        self.pages.lock().unwrap().range(range).for_each(|(_, page)| found(PageRun::new(*page, 1)));
        Ok(())
    }

    fn looks_in_parts(&self) -> bool {
        !self.only_whole.load(Ordering::Relaxed)
    }
}

/// A machine whose guest writes as fast as it can.
pub struct Source {
    ram: Arc<Vec<RamBlock>>,
    marks: Arc<Marks>,
    pub running: Arc<AtomicBool>,
    pub guest: Option<JoinHandle<()>>,
    state: Option<UnixStream>,
    pub retired: bool,
    /// Whether it was kept then.
    pub kept: bool,
    /// How long its monitor does not answer when the guest is to stop.
    pub monitor_hangs: Duration,
    /// How long it takes to start tracking.
    pub slow_start: Duration,
    /// Whether its guest is paused.
    pub paused: bool,
    /// Whether that may be left out.
    pub goes_untracked: bool,
    /// Whether its writes were ever tracked.
    pub tracked: bool,
    /// What is sent to its card while it stands still.
    pub card: Late,
    /// Disks that move along.
    pub disks: Vec<Arc<SourceDisk>>,
    /// Whether it was told that questions will come.
    foresees: bool,
    begun: bool,
    /// The guest writes for so long, and then no more.
    busy: Duration,
    /// It does not write while this holds.
    pub rests: Arc<AtomicBool>,
    /// Until then it keeps to [`EARLY`], and touches nothing else.
    late: Duration,
    /// Where it notes how it is throttled, if it can be, which does nothing to it.
    pub throttles: Option<Arc<Mutex<Vec<f64>>>>,
    /// How many vCPUs it has then.
    pub vcpus: usize,
    /// Pages of the first block that are written when the guest is stopped, and not reported.
    pub unseen: Vec<u64>,
    /// Pages of the first disk that are written then, and not reported.
    pub unseen_on_disk: Vec<u64>,
    /// Pages of the first block that are given back to the host when the guest is stopped, as a
    /// balloon does with pages that the guest reports free: nobody asks for them any more.
    pub given_back: Vec<u64>,
    /// Pages of the first block that are overwritten with zeros then, and not reported.
    pub wiped: Vec<u64>,
}

/// The first pages of the first block.
const EARLY: u64 = 1000;

impl Source {
    /// One whose guest is at work.
    pub fn start(busy: Duration, disks: Vec<Arc<SourceDisk>>) -> Self {
        Self::start_late(busy, disks, Duration::ZERO)
    }

    /// From here on its tracker cannot be asked of parts at once.
    pub fn looks_at_no_parts(&self) {
        self.marks.only_whole.store(true, Ordering::Relaxed);
    }

    /// What happens while the destination gets ready to load: the guest writes on for a while, and
    /// then rests for long enough that all it wrote can be sent.
    pub fn rests_while_preparing(&self) -> Box<dyn FnMut() + Send> {
        let rests = Arc::clone(&self.rests);
        Box::new(move || {
            std::thread::sleep(Duration::from_millis(200));
            rests.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(100));
        })
    }

    /// One whose guest touches most of its memory only after `late`.
    pub fn start_late(busy: Duration, disks: Vec<Arc<SourceDisk>>, late: Duration) -> Self {
        let ram = blocks();
        let mut source = Self {
            ram,
            marks: Arc::default(),
            running: Arc::default(),
            guest: None,
            state: None,
            retired: false,
            kept: false,
            monitor_hangs: Duration::ZERO,
            slow_start: Duration::ZERO,
            paused: false,
            goes_untracked: false,
            tracked: false,
            card: Late::default(),
            disks,
            foresees: false,
            begun: false,
            busy,
            rests: Arc::default(),
            late,
            throttles: None,
            vcpus: 1,
            unseen: Vec::new(),
            unseen_on_disk: Vec::new(),
            given_back: Vec::new(),
            wiped: Vec::new(),
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
        !self.paused
    }

    fn answer(&mut self, question: &[u8]) -> Result<Vec<u8>, VmError> {
        assert!(!self.begun, "a question when disks move already");
        assert!(self.foresees, "a question that could not be foreseen");
        Ok(question.iter().rev().copied().collect())
    }

    fn foresee_questions(&mut self) {
        self.foresees = true;
    }

    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError> {
        std::thread::sleep(self.slow_start);
        self.tracked = true;
        Ok(Arc::clone(&self.marks) as Arc<dyn DirtyTracker>)
    }

    fn can_go_untracked(&self) -> bool {
        self.goes_untracked
    }

    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError> {
        let (ours, theirs) = UnixStream::pair()?;
        self.state = Some(theirs);
        Ok(Box::new(ours))
    }

    fn stop(&mut self) -> Result<Instant, VmError> {
        std::thread::sleep(self.monitor_hangs);
        self.card.kept = self.card.found;
        self.running.store(false, Ordering::Relaxed);
        self.guest.take().unwrap().join().unwrap();
        for page in &self.unseen {
            self.ram[0].write(PageIndex(*page), &[0xee; 4096]).unwrap();
        }
        for page in &self.unseen_on_disk {
            self.disks[0].overwrite(*page);
        }
        for page in &self.wiped {
            self.ram[0].write(PageIndex(*page), &[0; 4096]).unwrap();
        }
        for page in &self.given_back {
            self.ram[0].zero(PageRun::new(*page, 1)).unwrap();
        }
        Ok(Instant::now())
    }

    fn release_state(&mut self) -> Result<(), VmError> {
        assert!(self.disks.iter().all(|disk| !disk.is_read()), "a disk is read behind the release");
        let mut state = self.state.take().unwrap();
        std::thread::spawn(move || state.write_all(&vec![7; STATE]));
        Ok(())
    }

    fn state_saved(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmError> {
        assert!(
            self.disks.iter().all(|disk| !disk.is_read()),
            "a disk is read when its tracking ends"
        );
        // No state will come: whoever reads it learns that.
        self.state = None;
        if self.guest.is_none() {
            self.running.store(true, Ordering::Relaxed);
            let (until, late) = (Instant::now() + self.busy, Instant::now() + self.late);
            let (ram, marks, running) =
                (Arc::clone(&self.ram), Arc::clone(&self.marks), Arc::clone(&self.running));
            let (disks, rests) = (self.disks.clone(), Arc::clone(&self.rests));
            self.guest = Some(std::thread::spawn(move || {
                let mut rng = fastrand::Rng::with_seed(1);
                while running.load(Ordering::Relaxed) {
                    if Instant::now() >= until || rests.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    }
                    let early = Instant::now() < late;
                    let block = if early { 0 } else { rng.usize(..SIZES.len()) };
                    let page = rng.u64(..if early { EARLY } else { SIZES[block] });
                    ram[block].write(PageIndex(page), &[rng.u8(1..); 4096]).unwrap();
                    marks.pages.lock().unwrap().insert((block, page));
                    disks.iter().for_each(|disk| disk.guest_writes(&mut rng));
                }
            }));
        }
        Ok(())
    }

    fn retire(&mut self, keep: bool) -> Result<(), VmError> {
        (self.retired, self.kept) = (true, keep);
        Ok(())
    }

    fn brake(&mut self) -> Option<&mut dyn Brake> {
        if self.throttles.is_some() { Some(self) } else { None }
    }

    fn moving_disks(&mut self) -> Option<&mut dyn DiskVm> {
        if !self.disks.is_empty() { Some(self) } else { None }
    }

    fn late_packets(&mut self) -> Option<&mut dyn LatePackets> {
        Some(&mut self.card)
    }
}

/// Packets for a card.
#[derive(Default)]
pub struct Late {
    pub packets: VecDeque<Vec<u8>>,
    pub found: bool,
    /// They are kept.
    pub kept: bool,
    /// And no more.
    pub ended: bool,
    /// There is always another one.
    pub endless: bool,
    /// Those that somebody waited for, and how long at the most.
    pub waits: Vec<Duration>,
}

impl LatePackets for Late {
    fn find(&mut self) {
        assert!(!self.kept, "too late to look for its card");
        self.found = true;
    }

    fn end(&mut self) {
        self.ended = true;
    }

    fn next(&mut self, wait: Duration) -> Option<Vec<u8>> {
        assert!(self.kept, "nothing was kept");
        assert!(!self.ended, "none is kept any more");
        self.waits.push(wait);
        if self.endless { Some(vec![9; 60]) } else { self.packets.pop_front() }
    }
}

impl Brake for Source {
    fn throttle(&mut self, share: f64) -> Result<(), VmError> {
        self.throttles.as_ref().unwrap().lock().unwrap().push(share);
        Ok(())
    }

    fn vcpu_time(&self) -> Option<Duration> {
        None
    }

    fn vcpus(&self) -> usize {
        self.vcpus
    }
}

impl DiskVm for Source {
    fn start_disk_tracking(&mut self) -> Result<(), VmError> {
        // Whoever begins anew knows nothing of what was read.
        self.begun = false;
        Ok(())
    }

    fn limit_disks(&mut self, _limits: &[Rate]) -> Result<(), VmError> {
        Ok(())
    }

    fn disks(&self) -> Vec<Disk> {
        self.disks.iter().map(|disk| disk.disk()).collect()
    }

    fn disk_granularity(&self) -> Vec<ByteCount> {
        self.disks.iter().map(|disk| disk.granularity()).collect()
    }

    fn begin_disk_round(&mut self) -> Result<Vec<Box<dyn DiskRound>>, VmError> {
        let all = !std::mem::replace(&mut self.begun, true);
        Ok(self.disks.iter().map(|disk| disk.round(all)).collect())
    }

    fn read_disks(&mut self) -> Result<Vec<Box<dyn DiskReader>>, VmError> {
        assert!(self.guest.is_none(), "it is read beside the guest");
        Ok(self.disks.iter().map(|disk| disk.reader()).collect())
    }

    fn dirty_disks(&mut self) -> Result<Vec<ByteCount>, VmError> {
        Ok(self.disks.iter().map(|disk| disk.dirty()).collect())
    }
}

/// What the destination found.
#[derive(Debug, Default)]
pub struct Found {
    pub state_bytes: usize,
    /// Whether all pages were in place when the first device state came, those of disks too.
    pub pages_first: Option<bool>,
    pub ran: bool,
    /// The machine was let have its disks.
    pub disks_closed: bool,
    /// Sources that only asked.
    pub inquiries: u32,
    /// What both sides have, as the destination tells it.
    pub features: String,
    /// Pages that were missing when the first device state came; what the guest read of them that
    /// was wrong; and whether nothing was left in the machine when all had come.
    pub missing: u64,
    pub misread: u64,
    pub finished: bool,
    /// Packets that were given to its card.
    pub delivered: Vec<Vec<u8>>,
}

pub struct Destination {
    pub ram: Arc<Vec<RamBlock>>,
    pub source_ram: Arc<Vec<RamBlock>>,
    pub source_disks: Vec<Arc<SourceDisk>>,
    /// Its own.
    pub images: Vec<Arc<Image>>,
    pub found: Arc<Mutex<Found>>,
    pub refuse_to_load: bool,
    /// It finds that the source is another machine, until one has asked.
    pub differs: bool,
    /// It can read its disks.
    pub reads_disks: bool,
    /// Why its guest cannot run before all pages have come, if it cannot.
    pub cannot_await: Option<String>,
    /// It was told that pages may come to be missing.
    pub ready: bool,
    /// What another process would go on by, if one can.
    pub kept: Option<Kept>,
    /// The pages that come while it runs, and its guest, which reads and writes all of memory.
    pub coming: Option<Arc<Coming>>,
    pub guest: Option<JoinHandle<u64>>,
    /// Its process has ended.
    pub ended: Arc<AtomicBool>,
    /// What ends its long calls, once it was told.
    pub interrupt: Arc<Mutex<Interrupt>>,
    /// What happens while it gets ready to load.
    pub while_preparing: Box<dyn FnMut() + Send>,
    /// What happens while it loads.
    pub while_loading: Box<dyn FnMut() + Send>,
    /// What happens while it starts the guest.
    pub while_starting: Box<dyn FnMut() + Send>,
}

impl Destination {
    /// One that does as it is told, for the guest of `source`; its disks are put in by who moves
    /// some.
    pub fn of(source: &Source) -> Self {
        Self { source_disks: source.disks.clone(), ..Self::beside(source.ram()) }
    }

    /// The same for a source that only has memory, `source_ram`.
    pub fn beside(source_ram: Arc<Vec<RamBlock>>) -> Self {
        Self {
            ram: blocks(),
            source_ram,
            source_disks: Vec::new(),
            images: Vec::new(),
            found: Arc::default(),
            refuse_to_load: false,
            differs: false,
            reads_disks: true,
            cannot_await: None,
            ready: false,
            kept: None,
            coming: None,
            guest: None,
            ended: Arc::default(),
            interrupt: Arc::default(),
            while_preparing: Box::new(|| {}),
            while_loading: Box::new(|| {}),
            while_starting: Box::new(|| {}),
        }
    }
}

struct Sink {
    ram: Arc<Vec<RamBlock>>,
    source_ram: Arc<Vec<RamBlock>>,
    source_disks: Vec<Arc<SourceDisk>>,
    images: Vec<Arc<Image>>,
    found: Arc<Mutex<Found>>,
}

impl Write for Sink {
    fn write(&mut self, state: &[u8]) -> std::io::Result<usize> {
        let mut found = self.found.lock().unwrap();
        assert!(
            found.disks_closed || self.images.is_empty(),
            "device state before the disks are closed"
        );
        found.state_bytes += state.len();
        // The source's guest is stopped when there is device state, so its memory stands still.
        found.pages_first.get_or_insert_with(|| {
            let disks = self.source_disks.iter().zip(&self.images);
            bytes(&self.ram) == bytes(&self.source_ram)
                && disks.into_iter().all(|(from, to)| to.holds(from))
        });
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

    fn compare(&mut self, ask: &mut Ask<'_>) -> Result<(), VmError> {
        assert_eq!((ask(b"abc")?, ask(b"")?), (b"cba".to_vec(), Vec::new()));
        if self.differs { Err("it is another machine".into()) } else { Ok(()) }
    }

    fn inquired(&mut self) -> Result<(), VmError> {
        self.differs = false;
        self.found.lock().unwrap().inquiries += 1;
        Ok(())
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        (self.while_preparing)();
        let (ram, source_ram) = (Arc::clone(&self.ram), Arc::clone(&self.source_ram));
        let (source_disks, images) = (self.source_disks.clone(), self.images.clone());
        Ok(Box::new(Sink { ram, source_ram, source_disks, images, found: Arc::clone(&self.found) }))
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        (self.while_loading)();
        if self.interrupt.lock().unwrap().is_raised() {
            return Err("it was interrupted".into());
        }
        if self.refuse_to_load { Err("this state is not to my taste".into()) } else { Ok(()) }
    }

    fn run(&mut self) -> Result<(), RunError> {
        (self.while_starting)();
        self.found.lock().unwrap().ran = true;
        if let Some(coming) = &self.coming {
            let (coming, source) = (Arc::clone(coming), Arc::clone(&self.source_ram));
            self.guest = Some(std::thread::spawn(move || use_all(&coming, &source)));
        }
        Ok(())
    }

    fn announce(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn deliver(&mut self, packet: Vec<u8>) -> Result<(), VmError> {
        let mut found = self.found.lock().unwrap();
        assert!(found.ran, "a packet for a guest that does not run");
        if packet.is_empty() {
            return Err("there is no way to that card".into());
        }
        found.delivered.push(packet);
        Ok(())
    }

    fn discard(&mut self) -> Result<(), VmError> {
        assert!(self.images.iter().all(|image| !image.is_open()), "a sink outlives the discard");
        Ok(())
    }

    fn disk_destination(&mut self) -> Option<&mut dyn DiskDestination> {
        Some(self)
    }

    fn post_copy(&mut self) -> Option<&mut dyn PostCopyDestination> {
        Some(self)
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    fn heed(&mut self, interrupt: &Interrupt) {
        *self.interrupt.lock().unwrap() = interrupt.clone();
    }
}

impl PostCopyDestination for Destination {
    fn cannot_await(&mut self) -> Option<String> {
        self.cannot_await.clone()
    }

    fn get_ready(&mut self) {
        assert!(self.coming.is_none(), "too late");
        self.ready = true;
    }

    fn await_pages(
        &mut self,
        missing: Vec<DirtyBitmap>,
    ) -> Result<Arc<dyn ArrivingPages>, VmError> {
        assert!(self.ready, "it was not told beforehand");
        let mut found = self.found.lock().unwrap();
        assert!(found.state_bytes == 0, "device state before it is known what is missing");
        found.missing = missing.iter().map(|pages| pages.count().0).sum();
        let coming = Arc::new(Coming::new(&self.ram, missing));
        self.coming = Some(Arc::clone(&coming));
        Ok(coming)
    }

    fn kept(&self) -> Option<Kept> {
        self.kept.clone()
    }
}

impl Destination {
    /// Waits for the guest that has run here, unless its process has ended, and puts down what it
    /// has found.
    pub fn judge(&mut self) {
        if let (Some(guest), Some(coming)) = (self.guest.take(), &self.coming)
            && !self.ended.load(Ordering::SeqCst)
        {
            let misread = guest.join().unwrap();
            let mut found = self.found.lock().unwrap();
            (found.misread, found.finished) = (misread, coming.finished.load(Ordering::SeqCst));
        }
    }
}

/// Reads each page of `coming` once, compares it with `source`, where nobody writes any more, and
/// writes it; then reads all of it once more. How much of it was not what it had to be.
fn use_all(coming: &Coming, source: &[RamBlock]) -> u64 {
    let mut rng = fastrand::Rng::with_seed(7);
    let pages = SIZES.iter().enumerate();
    let mut pages: Vec<(usize, u64)> =
        pages.flat_map(|(block, pages)| (0..*pages).map(move |page| (block, page))).collect();
    rng.shuffle(&mut pages);
    let mut misread = 0;
    let mut expected = vec![0; 4096];
    for (block, page) in pages.iter().map(|(block, page)| (*block, PageIndex(*page))) {
        source[block].read(page, &mut expected).unwrap();
        misread += u64::from(coming.read(block, page) != expected);
        coming.write(block, page, &[(page.0 % 251) as u8; 4096]);
        if page.0 % 64 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    for (block, page) in pages {
        misread += u64::from(coming.read(block, PageIndex(page)) != [(page % 251) as u8; 4096]);
    }
    misread
}

impl DiskDestination for Destination {
    fn open_disks(
        &mut self,
        wanted: &[Disk],
        _: &DiskChoice,
    ) -> Result<Vec<Box<dyn DiskSink>>, VmError> {
        wanted.iter().map(|disk| Image::open(&self.images, disk)).collect()
    }

    fn read_disks(&mut self) -> Result<Vec<Box<dyn DiskReader>>, VmError> {
        let images = self.images.iter().filter(|_| self.reads_disks);
        Ok(images.map(|image| image.reader()).collect())
    }

    fn close_disks(&mut self) -> Result<(), VmError> {
        assert!(self.images.iter().all(|image| !image.is_open()), "a sink outlives the last round");
        assert!(self.images.iter().all(|image| !image.is_read()), "a reader outlives it");
        self.found.lock().unwrap().disks_closed = true;
        Ok(())
    }
}

/// Options for a migration over loopback that is not taken up again when it breaks.
pub fn options(channels: u8, verify: bool) -> Options {
    let to = Address::Tcp(String::new());
    let verify = if verify { Verify::Live } else { Verify::No };
    Options { verify, channels, reconnect: Duration::ZERO, ..Options::new(to) }
}

/// Of how many pages the answers of `audit` are no: memory, disks, sent, order.
pub fn answers(audit: &Audit) -> [u64; 4] {
    let disks = audit.disks.clone().unwrap_or_default();
    [&audit.memory, &disks, &audit.sent, &audit.order].map(|answer| answer.differing.0)
}

/// Runs one migration of `source` into `destination`; the outcome at the source.
pub fn run(
    source: &mut Source,
    destination: Destination,
    options: &Options,
    faults: destination::Faults,
    handle: &MigrationHandle,
) -> Result<Measures, Failure> {
    run_over("127.0.0.1:0", source, destination, options, faults, handle)
}

/// The same with a destination that listens at `address`.
pub fn run_over(
    address: &str,
    source: &mut Source,
    mut destination: Destination,
    options: &Options,
    faults: destination::Faults,
    handle: &MigrationHandle,
) -> Result<Measures, Failure> {
    let listener = Listener::bind(&address.parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let receiving = std::thread::spawn(move || {
        let cancel = Cancel::default();
        let options = destination::Options {
            wait: Some(Duration::from_secs(60)),
            faults,
            disks: DiskChoice::All,
            confined: true,
            ..destination::Options::default()
        };
        receive(&mut destination, &listener, &options, &cancel, &mut |_| {}).map(drop)
    });
    let options = Options { to, ..options.clone() };
    let result = migrate(source, &options, handle, &mut |_| {});
    let received = receiving.join().unwrap();
    let arrived = match &result {
        Err(failure) => matches!(failure.cause, EngineError::Missed { .. }),
        Ok(_) => true,
    };
    assert_eq!(arrived, received.is_ok(), "{result:?} {received:?}");
    result
}
