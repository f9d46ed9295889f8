//! Its disks.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use godwit_disk::{Content, Disk, DiskError, DiskReader, DiskRound, DiskSink, Extent};
use godwit_engine::vm::VmError;
use godwit_units::{ByteCount, PAGE_SIZE, PageRun};

/// Bytes of a dirty block.
const BLOCK: u64 = 16 << 10;
/// Every third of these stretches is a hole.
const STRETCH: u64 = 256 << 10;
/// What the guest writes at once.
const PIECE: u64 = 512;

/// A disk that the guest writes to.
#[derive(Debug)]
pub struct SourceDisk {
    name: String,
    bytes: Mutex<Vec<u8>>,
    dirty: Mutex<BTreeSet<u64>>,
    read: AtomicBool,
    /// To read a block takes so long.
    pub slow: Duration,
    /// This many reads succeed.
    pub reads_left: AtomicU64,
    /// Blocks that were read.
    pub reads: AtomicU64,
}

impl SourceDisk {
    /// A disk of `size` bytes, of which every third stretch is zero.
    pub fn new(name: &str, size: u64) -> Self {
        let block = |at: u64| if is_hole(at) { 0 } else { (at / PAGE_SIZE % 251) as u8 };
        Self {
            name: name.to_owned(),
            bytes: Mutex::new((0..size).map(block).collect()),
            dirty: Mutex::default(),
            read: AtomicBool::new(false),
            slow: Duration::ZERO,
            reads_left: AtomicU64::new(u64::MAX),
            reads: AtomicU64::new(0),
        }
    }

    pub fn disk(&self) -> Disk {
        Disk { name: self.name.clone(), size: ByteCount(self.bytes.lock().unwrap().len() as u64) }
    }

    pub fn granularity(&self) -> ByteCount {
        ByteCount(BLOCK)
    }

    /// Whether a round is under way.
    pub fn is_read(&self) -> bool {
        self.read.load(Ordering::SeqCst)
    }

    /// The guest writes something, somewhere in the upper half: holes remain in the lower one.
    pub fn guest_writes(&self, rng: &mut fastrand::Rng) {
        let mut bytes = self.bytes.lock().unwrap();
        let pieces = bytes.len() as u64 / PIECE;
        let at = rng.u64(pieces / 2..pieces) * PIECE;
        bytes[at as usize..(at + PIECE) as usize].fill(rng.u8(..));
        drop(bytes);
        self.dirty.lock().unwrap().insert(at / BLOCK);
    }

    /// Page `page` changes, and nobody is told.
    pub fn overwrite(&self, page: u64) {
        let at = (page * PAGE_SIZE) as usize;
        self.bytes.lock().unwrap()[at..at + 512].fill(0xee);
    }

    /// Reads it as it is now.
    pub fn reader(&self) -> Box<dyn DiskReader> {
        let bytes = self.bytes.lock().unwrap().clone();
        Box::new(ImageReader::new(Arc::new(Image::holding(&self.name, bytes))))
    }

    pub fn dirty(&self) -> ByteCount {
        ByteCount(self.dirty.lock().unwrap().len() as u64 * BLOCK)
    }

    pub fn round(self: &Arc<Self>, all: bool) -> Box<dyn DiskRound> {
        assert!(!self.read.swap(true, Ordering::SeqCst), "the round before is still under way");
        let dirty = std::mem::take(&mut *self.dirty.lock().unwrap());
        let blocks = self.disk().size.0.div_ceil(BLOCK);
        let extents = if all { (0..blocks).collect() } else { dirty.into_iter().collect() };
        Box::new(Round { disk: Arc::clone(self), extents, all, asked: VecDeque::new() })
    }
}

fn is_hole(at: u64) -> bool {
    (at / STRETCH).is_multiple_of(3)
}

struct Round {
    disk: Arc<SourceDisk>,
    extents: VecDeque<u64>,
    all: bool,
    asked: VecDeque<PageRun>,
}

impl Drop for Round {
    fn drop(&mut self) {
        self.disk.read.store(false, Ordering::SeqCst);
    }
}

impl DiskRound for Round {
    fn dirty(&self) -> Option<ByteCount> {
        (!self.all).then_some(ByteCount(self.extents.len() as u64 * BLOCK))
    }

    fn next(&mut self) -> Result<Option<Extent>, DiskError> {
        let Some(block) = self.extents.pop_front() else { return Ok(None) };
        let in_hole = is_hole(block * BLOCK);
        let mut count = 1;
        while self
            .extents
            .front()
            .is_some_and(|next| *next == block + count && is_hole(next * BLOCK) == in_hole)
        {
            self.extents.pop_front();
            count += 1;
        }
        let pages = self.disk.disk().pages().0;
        let start = block * (BLOCK / PAGE_SIZE);
        let run = PageRun::new(start, (count * BLOCK / PAGE_SIZE).min(pages - start));
        // A hole is one as long as nothing was written there; what is written behind this look is
        // dirty in the next round.
        let bytes = self.disk.bytes.lock().unwrap();
        let (from, to) =
            (run.start.offset() as usize, bytes.len().min(run.end().offset() as usize));
        let hole = self.all && in_hole && bytes[from..to].iter().all(|byte| *byte == 0);
        Ok(Some(Extent { run, content: if hole { Content::Zero } else { Content::Data } }))
    }

    fn submit(&mut self, run: PageRun) -> Result<(), DiskError> {
        assert!(self.asked.len() < self.depth() && run.count.0 <= 256);
        self.asked.push_back(run);
        Ok(())
    }

    fn depth(&self) -> usize {
        3
    }

    fn complete(&mut self, bytes: &mut [u8]) -> Result<(), DiskError> {
        let run = self.asked.pop_front().unwrap();
        let blocks = run.count.bytes().0.div_ceil(BLOCK) as u32;
        std::thread::sleep(self.disk.slow * blocks);
        self.disk.reads.fetch_add(blocks.into(), Ordering::SeqCst);
        let left = self.disk.reads_left.fetch_sub(1, Ordering::SeqCst);
        if left == 0 {
            return Err(format!(
                "disk '{}' cannot be read at {}",
                self.disk.name,
                run.start.offset()
            )
            .into());
        }
        let held = self.disk.bytes.lock().unwrap();
        let start = run.start.offset() as usize;
        let inside = bytes.len().min(held.len() - start);
        bytes[..inside].copy_from_slice(&held[start..start + inside]);
        bytes[inside..].fill(0);
        Ok(())
    }
}

/// What goes wrong at a sink.
#[derive(Default)]
pub struct SinkFault {
    /// In whatever is written to this page a bit changes.
    pub flips: Option<u64>,
    /// This many writes succeed.
    pub writes_left: Option<u64>,
    /// The first write waits for this.
    pub waits_for: Option<Box<dyn Fn() -> bool + Send + Sync>>,
}

/// A disk at the destination, full of something else.
pub struct Image {
    name: String,
    bytes: Mutex<Vec<u8>>,
    open: AtomicBool,
    readers: AtomicU64,
    pub written: AtomicU64,
    pub fault: Mutex<SinkFault>,
}

impl Image {
    pub fn new(name: &str, size: u64) -> Self {
        Self::holding(name, vec![0xee; size as usize])
    }

    fn holding(name: &str, bytes: Vec<u8>) -> Self {
        Self {
            name: name.to_owned(),
            bytes: Mutex::new(bytes),
            open: AtomicBool::new(false),
            readers: AtomicU64::new(0),
            written: AtomicU64::new(0),
            fault: Mutex::default(),
        }
    }

    pub fn holds(&self, disk: &SourceDisk) -> bool {
        *self.bytes.lock().unwrap() == *disk.bytes.lock().unwrap()
    }

    /// Reads it as it is now.
    pub fn reader(self: &Arc<Self>) -> Box<dyn DiskReader> {
        Box::new(ImageReader::new(Arc::clone(self)))
    }

    /// Whether somebody has a reader.
    pub fn is_read(&self) -> bool {
        self.readers.load(Ordering::SeqCst) > 0
    }

    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::SeqCst)
    }

    /// Opens the one of `images` that is `wanted`.
    pub fn open(images: &[Arc<Self>], wanted: &Disk) -> Result<Box<dyn DiskSink>, VmError> {
        let image = images.iter().find(|image| image.name == wanted.name);
        let image = image.ok_or_else(|| format!("there is no disk '{}' here", wanted.name))?;
        let size = image.bytes.lock().unwrap().len() as u64;
        if size < wanted.size.0 {
            return Err(format!(
                "disk '{}' has {size} bytes, too few for {}",
                wanted.name, wanted.size.0
            )
            .into());
        }
        image.open.store(true, Ordering::SeqCst);
        Ok(Box::new(Sink { image: Arc::clone(image), kept: Vec::new() }))
    }

    fn put(&self, run: PageRun, fill: impl Fn(usize) -> u8) {
        let mut bytes = self.bytes.lock().unwrap();
        let start = run.start.offset() as usize;
        let end = bytes.len().min(run.end().offset() as usize);
        bytes[start..end].iter_mut().enumerate().for_each(|(index, byte)| *byte = fill(index));
        let flips = self.fault.lock().unwrap().flips.map(|page| (page * PAGE_SIZE) as usize + 700);
        if let Some(at) = flips.filter(|at| (start..end).contains(at)) {
            bytes[at] ^= 0x10;
        }
        self.written.fetch_add(1, Ordering::SeqCst);
    }
}

/// An image as it is now, all of it data.
struct ImageReader(Arc<Image>);

impl ImageReader {
    fn new(image: Arc<Image>) -> Self {
        image.readers.fetch_add(1, Ordering::SeqCst);
        Self(image)
    }
}

impl Drop for ImageReader {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl DiskReader for ImageReader {
    fn extents(&mut self, run: PageRun) -> Result<Vec<Extent>, DiskError> {
        Ok(vec![Extent { run, content: Content::Data }])
    }

    fn read(&mut self, runs: &[PageRun], bytes: &mut [u8]) -> Result<(), DiskError> {
        let held = self.0.bytes.lock().unwrap();
        let mut rest = bytes;
        for run in runs {
            let start = run.start.offset() as usize;
            let (own, others) = rest.split_at_mut(run.count.bytes().0 as usize);
            let inside = own.len().min(held.len() - start);
            own[..inside].copy_from_slice(&held[start..start + inside]);
            own[inside..].fill(0);
            rest = others;
        }
        assert!(rest.is_empty());
        Ok(())
    }
}

/// Keeps writes back until it has to settle, and then makes them in the wrong order, as a queue
/// may.
struct Sink {
    image: Arc<Image>,
    kept: Vec<(PageRun, Option<Vec<u8>>)>,
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.image.open.store(false, Ordering::SeqCst);
    }
}

impl DiskSink for Sink {
    fn write(&mut self, run: PageRun, bytes: &[u8]) -> Result<(), DiskError> {
        let mut fault = self.image.fault.lock().unwrap();
        if let Some(left) = &mut fault.writes_left {
            *left = left.checked_sub(1).ok_or("no space is left on the disk")?;
        }
        let waits_for = fault.waits_for.take();
        drop(fault);
        while waits_for.as_ref().is_some_and(|came| !came()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.kept.push((run, Some(bytes.to_vec())));
        Ok(())
    }

    fn zero(&mut self, run: PageRun) -> Result<(), DiskError> {
        self.kept.push((run, None));
        Ok(())
    }

    fn flush(&mut self, _durable: bool) -> Result<(), DiskError> {
        for (run, bytes) in self.kept.drain(..).rev() {
            match bytes {
                Some(bytes) => self.image.put(run, |index| bytes[index]),
                None => self.image.put(run, |_| 0),
            }
        }
        Ok(())
    }
}
