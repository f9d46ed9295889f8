//! What a godwit that was killed has left of a post-copy: a guest that runs at the destination
//! while pages of it are at the source. At either side another godwit goes on.
//!
//! A record in the run directory tells of it, under the name of the QEMU. A destination's monitor
//! may not answer meanwhile: whoever emulates a device may wait for a page. So nothing is asked of
//! it: where its memory is, and which userfaultfd is godwit's, was written down.

use std::fs::TryLockError;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use godwit_bitmap::DirtyBitmap;
use godwit_engine::vm::{ArrivingPages, DestinationVm, PostCopyDestination, RunError, VmError};
use godwit_memory::{Place, RamBlock};
use godwit_track::{AddressSpace, Approach, MissingMeasures, MissingPages, has_userfaultfd};
use godwit_units::{ByteCount, PageCount, PageIndex, PageRun};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::guard::{Recovery, Stage, settled_stage, stage_of};
use crate::mark::{LACKS, LEFT, record_in, records, start_time};
use crate::process::Process;
use crate::{QemuError, clients, ram, run_directory, userfaultfd};

/// Between two attempts to run a guest.
const AGAIN: Duration = Duration::from_millis(500);

/// The file in which it is written down for a QEMU: [`LEFT`] at the source, or [`LACKS`].
pub(crate) fn record(pid: i32, side: &str) -> Result<PathBuf, QemuError> {
    let directory = run_directory::path();
    let user = rustix::process::getuid().as_raw();
    run_directory::make(&directory, user).map_err(|why| QemuError::Record {
        path: directory.clone(),
        source: std::io::Error::other(why),
    })?;
    Ok(record_in(&directory, pid, side))
}

/// The record of the QEMU `pid`, where a godwit has left one.
fn found(pid: i32, side: &str) -> Option<PathBuf> {
    let all = records(&run_directory::path(), side);
    all.into_iter().find(|(_, of)| *of == pid).map(|(path, _)| path)
}

/// The record of what is missing of the guest of the QEMU whose monitor listens at `path`, and its
/// process.
fn left_at(path: &Path) -> Option<(PathBuf, i32)> {
    let all = records(&run_directory::path(), LACKS);
    all.into_iter().find(|(_, pid)| clients::listens_at(*pid, path))
}

/// The record by which another godwit sends what is missing of the guest of the QEMU `pid`, where
/// one was killed that had handed the guest over, or was about to. Behind another end it says
/// nothing: the guest was brought back.
pub(crate) fn at_source(pid: i32) -> Option<PathBuf> {
    found(pid, LEFT).filter(|_| stage_of(pid) == Some(Stage::HandingOver))
}

/// Whether the guest of the QEMU `pid` is known to have come to run at the destination, by the
/// `record` that was left of it.
pub(crate) fn ran_there(record: &Path) -> bool {
    read(record)["runs_there"] == true
}

/// What stands in a record; null where it cannot be read.
fn read(record: &Path) -> Value {
    let text = std::fs::read_to_string(record).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// Whether pages of the guest of the QEMU `pid` are missing.
pub(crate) fn lacks_pages(pid: i32) -> bool {
    let Some(record) = found(pid, LACKS) else { return false };
    let record = read(&record);
    let written = serde_json::from_str(record["machine"].as_str().unwrap_or_default());
    // It is closed when the last page has come, and not before.
    written.is_ok_and(|written: Written| has_userfaultfd(pid, written.userfaultfd))
}

/// Refuses where another godwit goes on with what was left of the QEMU `pid`.
pub(crate) fn check_alone(pid: i32) -> Result<(), QemuError> {
    let held = |record: PathBuf| {
        let file = std::fs::File::open(record).ok()?;
        matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)).then_some(())
    };
    match [LEFT, LACKS].into_iter().filter_map(|side| found(pid, side)).find_map(held) {
        Some(()) => {
            Err(QemuError::NotFollowed { why: "another one is at work on that: wait for it" })
        }
        None => Ok(()),
    }
}

/// The guest of the QEMU `pid` is this side's: nothing is left of its leaving.
pub(crate) fn forget(pid: i32) {
    if let Some(record) = found(pid, LEFT) {
        let _ = std::fs::remove_file(record);
    }
}

/// What is written down of a destination.
#[derive(Serialize, Deserialize)]
struct Written {
    pid: i32,
    /// When that process was started.
    started: Option<u64>,
    /// The number of its descriptor that is godwit's userfaultfd.
    userfaultfd: i32,
    blocks: Vec<Block>,
}

/// A RAM block.
#[derive(Serialize, Deserialize)]
struct Block {
    name: String,
    bytes: u64,
    /// Where the process has it.
    address: u64,
    /// The file that holds it, and where in it.
    #[serde(default)]
    file: Option<(PathBuf, u64)>,
}

impl Block {
    fn of(block: &RamBlock, space: &AddressSpace) -> Option<Self> {
        let (name, bytes) = (block.name().to_owned(), block.pages().bytes().0);
        let address = space.mappings_of(block).ok()?.first()?.address.0;
        let file = match block.place() {
            Ok(Place::File { offset, .. }) => block.path().map(|path| (path.to_owned(), offset)),
            _ => None,
        };
        Some(Self { name, bytes, address, file })
    }

    /// Opens it in process `pid`. A file without a name is found by its address.
    fn open(self, pid: i32, space: &AddressSpace) -> Result<RamBlock, QemuError> {
        let size = ByteCount(self.bytes);
        let named = self.file.and_then(|(path, offset)| {
            let block = RamBlock::open(&self.name, &path, offset, size, false).ok()?;
            // Another may have got the name since.
            space.mappings_of(&block).is_ok().then_some(block)
        });
        match named {
            Some(block) => Ok(block),
            None => at_address(pid, self.name, size, self.address),
        }
    }
}

/// The block of this name and size that process `pid` has at an address.
fn at_address(
    pid: i32,
    name: String,
    size: ByteCount,
    address: u64,
) -> Result<RamBlock, QemuError> {
    let mut found = ram::blocks_at(pid, vec![(name, size, address)])?;
    found.pop().ok_or(QemuError::NotFollowed { why: "its memory is not where it was" })
}

/// What [`LeftDestination::open`] reads: where in its `space` a process has `ram`, and the number
/// of its userfaultfd.
pub(crate) fn words(userfaultfd: i32, (ram, space): (&[RamBlock], &AddressSpace)) -> String {
    let pid = space.pid();
    let blocks = ram.iter().filter_map(|block| Block::of(block, space)).collect();
    let started = start_time(pid.unsigned_abs());
    serde_json::to_string(&Written { pid, started, userfaultfd, blocks }).unwrap_or_default()
}

/// A QEMU in which the guest runs, or is about to, and pages of it are missing.
///
/// ```
/// // What was written down of none.
/// assert!(godwit_qemu::LeftDestination::open("{}").is_err());
/// ```
#[derive(Debug)]
pub struct LeftDestination {
    pid: i32,
    process: Process,
    number: i32,
    ram: Arc<Vec<RamBlock>>,
}

impl LeftDestination {
    /// The record of the QEMU whose monitor listens at `path`, if a godwit that was killed has left
    /// one. The guardian of that one is waited for. Nothing is asked of QEMU.
    ///
    /// # Errors
    /// When the guest does not run there.
    ///
    /// ```
    /// use godwit_qemu::LeftDestination;
    ///
    /// assert!(LeftDestination::record_of("/nonexistent/qmp".as_ref())?.is_none());
    /// # Ok::<(), godwit_qemu::QemuError>(())
    /// ```
    pub fn record_of(path: &Path) -> Result<Option<PathBuf>, QemuError> {
        let Some((record, pid)) = left_at(path) else { return Ok(None) };
        match settled_stage(pid)? {
            // One that has ended meanwhile had no guest.
            _ if !record.exists() || start_time(pid.unsigned_abs()).is_none() => Ok(None),
            Some(Stage::Loading | Stage::Discarding) => Err(QemuError::NotFollowed {
                why: "the guest never came to run there: godwit recover --vm VM tells whose it is",
            }),
            _ => Ok(Some(record)),
        }
    }

    /// The QEMU whose monitor listens at `path`, where pages of its guest are missing.
    ///
    /// ```
    /// assert_eq!(godwit_qemu::LeftDestination::pid_of("/nonexistent/qmp".as_ref()), None);
    /// ```
    #[must_use]
    pub fn pid_of(path: &Path) -> Option<i32> {
        left_at(path).map(|(_, pid)| pid)
    }

    /// Where the guest was handed over, and nobody knows whether it was run: has it run, as soon as
    /// the monitor at `path` answers. It may wait for pages to come, as may the order of a guardian
    /// that is under way, so it is tried beside them.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn run_beside(&self, path: &Path) -> Result<Option<Starting>, QemuError> {
        if settled_stage(self.pid)? != Some(Stage::Starting) {
            return Ok(None);
        }
        let (over, path) = (Arc::new(AtomicBool::new(false)), path.to_owned());
        let ends = Arc::clone(&over);
        let run = move || {
            loop {
                // Once more when all has come.
                let last = ends.load(Ordering::SeqCst);
                let run = Recovery::beside(&path).and_then(|found| found.run_here(false).map(drop));
                if run.is_ok() || last {
                    return run;
                }
                std::thread::sleep(AGAIN);
            }
        };
        let thread = std::thread::Builder::new().name("run".to_owned()).spawn(run);
        let thread = thread.map_err(|source| QemuError::System { step: "a thread", source })?;
        Ok(Some(Starting { over, thread }))
    }

    /// The QEMU that was written down in these words.
    ///
    /// # Errors
    /// When it has ended, or its memory cannot be reached.
    pub fn open(words: &str) -> Result<Self, QemuError> {
        let Written { pid, started, userfaultfd: number, blocks } = serde_json::from_str(words)
            .map_err(|_| QemuError::NotFollowed {
                why: "what was written down of it makes no sense",
            })?;
        let process = Process::open(pid)
            .map_err(|source| QemuError::System { step: "pidfd_open", source })?;
        if start_time(pid.unsigned_abs()) != started {
            return Err(QemuError::NotFollowed { why: "that QEMU has ended" });
        }
        let space = AddressSpace::of(pid)?;
        let blocks = blocks.into_iter().map(|block| block.open(pid, &space));
        let ram = Arc::new(blocks.collect::<Result<Vec<_>, _>>()?);
        Ok(Self { pid, process, number, ram })
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }
}

/// A guest that is being run beside the pages that come.
///
/// ```
/// use std::path::Path;
/// use godwit_qemu::{LeftDestination, QemuError};
///
/// fn run(vm: &LeftDestination, monitor: &Path) -> Result<(), QemuError> {
///     let starting = vm.run_beside(monitor)?;
///     // Here the pages come.
///     starting.map_or(Ok(()), |starting| starting.finish())
/// }
/// ```
#[derive(Debug)]
pub struct Starting {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Result<(), QemuError>>,
}

impl Starting {
    /// All pages have come: waits until it runs.
    ///
    /// # Errors
    /// When it does not.
    pub fn finish(self) -> Result<(), QemuError> {
        self.over.store(true, Ordering::SeqCst);
        let panicked = QemuError::NotFollowed { why: "its thread has panicked" };
        self.thread.join().unwrap_or(Err(panicked))
    }
}

/// What is asked of a machine whose guest is still to come, which this is not.
fn runs_already() -> VmError {
    QemuError::NotFollowed { why: "the guest runs here already" }.into()
}

impl DestinationVm for LeftDestination {
    fn machine(&self) -> &'static str {
        "qemu"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn pid(&self) -> u32 {
        self.pid.unsigned_abs()
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        Err(runs_already())
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        Err(runs_already())
    }

    fn run(&mut self) -> Result<(), RunError> {
        Err(RunError::NeverRan(runs_already()))
    }

    fn announce(&mut self) -> Result<(), VmError> {
        // Whoever ran it has done so.
        Ok(())
    }

    fn discard(&mut self) -> Result<(), VmError> {
        Err(runs_already())
    }

    fn has_ended(&self) -> bool {
        self.process.has_ended()
    }

    fn post_copy(&mut self) -> Option<&mut dyn PostCopyDestination> {
        Some(self)
    }
}

impl PostCopyDestination for LeftDestination {
    fn cannot_await(&mut self) -> Option<String> {
        None
    }

    fn await_pages(
        &mut self,
        missing: Vec<DirtyBitmap>,
    ) -> Result<Arc<dyn ArrivingPages>, VmError> {
        if !has_userfaultfd(self.pid, self.number) {
            // It is closed when the last page has come, and not before.
            return Ok(Arc::new(Whole));
        }
        let harmless_filters = userfaultfd::own_filters(self.pid);
        let approach = Approach { harmless_filters, ..Approach::default() };
        let pages = MissingPages::take_again(approach, self.pid, self.number, &self.ram, missing)?;
        Ok(Arc::new(pages))
    }
}

/// A machine of which nothing is missing.
struct Whole;

impl ArrivingPages for Whole {
    fn await_faults(
        &self,
        time: Duration,
        _: &mut dyn FnMut(usize, PageIndex),
    ) -> Result<(), VmError> {
        std::thread::sleep(time);
        Ok(())
    }

    fn place(&self, _: usize, _: PageIndex, _: &[u8]) -> Result<PageCount, VmError> {
        Ok(PageCount::ZERO)
    }

    fn place_zeros(&self, _: usize, _: PageRun) -> Result<PageCount, VmError> {
        Ok(PageCount::ZERO)
    }

    fn left(&self) -> PageCount {
        PageCount::ZERO
    }

    fn next_run(&self, _: usize, _: PageIndex) -> Option<PageRun> {
        None
    }

    fn measures(&self) -> MissingMeasures {
        MissingMeasures::default()
    }

    fn finish(&self) -> Result<(), VmError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use godwit_units::PageBuffer;

    use super::*;

    #[test]
    fn what_was_written_down_of_a_machine_opens_it() {
        let mut memory = PageBuffer::new(PageCount(2));
        memory.fill(7);
        let address = memory.as_ptr().addr() as u64;
        let own = std::process::id().cast_signed();
        let ram = at_address(own, "pc.ram".to_owned(), ByteCount(8192), address).unwrap();
        let words = words(5, (&[ram], &AddressSpace::of(own).unwrap()));
        let left = LeftDestination::open(&words).unwrap();
        assert_eq!((left.pid, left.number, left.ram[0].name()), (own, 5, "pc.ram"));
        let mut bytes = [0; 4096];
        left.ram[0].read(PageIndex(1), &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4096]);
        // Mutation: a later process of the same number is taken for it.
        let started = start_time(own.unsigned_abs()).unwrap();
        let other = words.replace(&started.to_string(), "1");
        assert!(LeftDestination::open(&other).unwrap_err().to_string().contains("has ended"));
        for wrong in ["", "{}", "[1]", &words.replace("8192", "\"x\"")] {
            assert!(LeftDestination::open(wrong).is_err(), "{wrong}");
        }
    }
}
