//! A machine that stands still: RAM in a file, no guest, a tracker that never finds anything. What
//! is left of a migration is the engine.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use godwit_codec::synthetic::Image;
use godwit_engine::Cancel;
use godwit_engine::address::{Address, Listener};
use godwit_engine::compression::Compression;
use godwit_engine::destination::{self, receive};
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::security::Security;
use godwit_engine::source::{Options, migrate};
use godwit_engine::vm::{DestinationVm, RunError, SourceVm, VmError};
use godwit_memory::RamBlock;
use godwit_policy::Settings;
use godwit_track::{AsOf, DirtyTracker, TrackError};
use godwit_units::{ByteCount, PageCount, PageIndex, PageRun, Rate};

const SEED: u64 = 6;
const PAGE: usize = 4096;

/// RAM: a file without a name on a tmpfs.
#[derive(Debug)]
pub struct Ram {
    /// The file.
    pub file: File,
    /// Bytes of it.
    pub size: usize,
    blocks: Arc<Vec<RamBlock>>,
}

impl Ram {
    /// All hole, on /dev/shm.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn empty(size: usize) -> anyhow::Result<Self> {
        Self::empty_in(Path::new("/dev/shm"), size)
    }

    /// All hole, in `dir`.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn empty_in(dir: &Path, size: usize) -> anyhow::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("godwit-bulk-{}-{number}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.with_context(|| format!("cannot create {}", path.display()))?;
        let opened = file
            .set_len(size as u64)
            .map_err(anyhow::Error::from)
            .and_then(|()| Ok(RamBlock::open("ram", &path, 0, ByteCount(size as u64), false)?));
        std::fs::remove_file(&path)?;
        Ok(Self { file, size, blocks: Arc::new(vec![opened?]) })
    }

    /// With a synthetic image. Pages of zeros stay holes, as in a guest that never wrote them.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn filled(image: Image, size: usize) -> anyhow::Result<Self> {
        let ram = Self::empty(size)?;
        let half = size / 2 / PAGE * PAGE;
        let fill = |from: usize, to: usize| -> std::io::Result<()> {
            let mut page = [0; PAGE];
            for at in (from..to).step_by(PAGE) {
                image.fill(SEED, (at / PAGE) as u64, &mut page);
                if page != [0; PAGE] {
                    ram.file.write_all_at(&page, at as u64)?;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| fill(half, size));
            fill(0, half)?;
            other.join().map_err(|_| anyhow!("a thread panicked"))??;
            anyhow::Ok(())
        })?;
        Ok(ram)
    }

    /// Whether both hold the same.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn same(&self, other: &Self) -> anyhow::Result<bool> {
        let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        for at in (0..self.size).step_by(left.len()) {
            self.file.read_exact_at(&mut left, at as u64)?;
            other.file.read_exact_at(&mut right, at as u64)?;
            if left != right {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// How to move it.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// How pages are compressed.
    pub compression: Compression,
    /// The most that is sent.
    pub limit: Option<Rate>,
    /// Whether what was sent is remembered.
    pub fingerprints: bool,
    /// Connections that carry pages.
    pub channels: u8,
}

impl Way {
    /// As it is by default, but for compression: none.
    pub const PLAIN: Self = Self {
        compression: Compression::Fixed(godwit_codec::Codec::None),
        limit: None,
        fingerprints: true,
        channels: 2,
    };
}

/// What it took.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Seconds from the start to the word that the guest runs at the destination.
    pub wall: f64,
    /// Seconds of processor time, both sides.
    pub cpu: f64,
    /// Bytes on the wire.
    pub sent: u64,
}

/// Moves `ram` into a new file; with `check`, compares them afterwards.
///
/// # Errors
/// When it does not move, or is not the same afterwards.
pub fn transfer(ram: &Ram, way: Way, check: bool) -> anyhow::Result<Cost> {
    transfer_into(&Ram::empty(ram.size)?, ram, way, check)
}

/// The same into `target`, which is new.
///
/// # Errors
/// As [`transfer`].
pub fn transfer_into(target: &Ram, ram: &Ram, way: Way, check: bool) -> anyhow::Result<Cost> {
    transfer_over(&Ends::default(), target, ram, way, check)
}

/// How either end makes its connections: source, destination.
pub type Ends = (Security, Security);

/// The same over connections as `ends` make them.
///
/// # Errors
/// As [`transfer`].
pub fn transfer_over(
    (here, there): &Ends,
    target: &Ram,
    ram: &Ram,
    way: Way,
    check: bool,
) -> anyhow::Result<Cost> {
    let listener = Listener::bind(&"127.0.0.1:0".parse().map_err(anyhow::Error::msg)?)?;
    let to: Address = listener.address()?;
    let Way { channels, fingerprints, .. } = way;
    let options = Options { channels, fingerprints, security: here.clone(), ..Options::new(to) };
    let own = Own {
        max_bandwidth: way.limit.map(Into::into),
        compression: way.compression,
        ..Own::default()
    };
    let handle = MigrationHandle::new(Settings::default(), own, Cancel::default());
    let mut source = Still::new(&ram.blocks);
    let mut destination = Still::new(&target.blocks);
    let (began, before) = (Instant::now(), process_time());
    let (sent, received) = std::thread::scope(|scope| {
        let receiving = scope.spawn(move || {
            let options = destination::Options {
                wait: Some(Duration::from_secs(30)),
                security: there.clone(),
                ..destination::Options::default()
            };
            receive(&mut destination, &listener, &options, &Cancel::default(), &mut |_| {})
        });
        (migrate(&mut source, &options, &handle, &mut |_| {}), receiving.join())
    });
    let (wall, cpu) = (began.elapsed().as_secs_f64(), (process_time() - before).as_secs_f64());
    let measures = sent.map_err(|failure| anyhow!("source: {failure:?}"))?;
    received
        .map_err(|_| anyhow!("a thread panicked"))?
        .map_err(|failure| anyhow!("destination: {failure:?}"))?;
    if check {
        ensure!(ram.same(target)?, "the memories differ afterwards");
    }
    let sent = measures.round_list.iter().map(|round| round.sent.0).sum();
    Ok(Cost { wall, cpu, sent })
}

/// Processor time of this process.
pub fn process_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// The tracker of a guest that writes nothing.
struct Nothing;

impl DirtyTracker for Nothing {
    fn harvest(
        &self,
        _: usize,
        within: PageRun,
        _: PageCount,
        _: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        Ok(within.end())
    }

    fn look(
        &self,
        _: usize,
        _: PageRun,
        _: AsOf,
        _: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        Ok(())
    }
}

struct Still {
    ram: Arc<Vec<RamBlock>>,
    /// Where the device state is put when the machine is let to save it.
    state: Option<UnixStream>,
}

impl Still {
    fn new(ram: &Arc<Vec<RamBlock>>) -> Self {
        Self { ram: Arc::clone(ram), state: None }
    }
}

impl SourceVm for Still {
    fn machine(&self) -> &'static str {
        "still"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn was_running(&self) -> bool {
        true
    }

    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError> {
        Ok(Arc::new(Nothing))
    }

    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError> {
        let (ours, theirs) = UnixStream::pair()?;
        self.state = Some(theirs);
        Ok(Box::new(ours))
    }

    fn stop(&mut self) -> Result<Instant, VmError> {
        Ok(Instant::now())
    }

    fn release_state(&mut self) -> Result<(), VmError> {
        // Less than a socket holds, so nobody need wait.
        if let Some(mut state) = self.state.take() {
            state.write_all(&[7; 4096])?;
        }
        Ok(())
    }

    fn state_saved(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn retire(&mut self, _: bool) -> Result<(), VmError> {
        Ok(())
    }
}

impl DestinationVm for Still {
    fn machine(&self) -> &'static str {
        "still"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        Ok(Box::new(std::io::sink()))
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn run(&mut self) -> Result<(), RunError> {
        Ok(())
    }

    fn announce(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn discard(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}
