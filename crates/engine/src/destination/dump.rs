//! What is in the guest's memory at the two moments that the guest never sees, for who hunts a bug:
//! when all of it has arrived, and when the machine has loaded its device state.
//!
//! Keeps two promises: nothing that is there already is overwritten; and between the two dumps a
//! page that differs was written by the machine or by somebody else on this host, since Godwit has
//! placed its last one before the first dump.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use godwit_memory::RamBlock;
use godwit_units::{ByteCount, PAGE_SIZE, PageBuffer, PageCount, PageIndex};

use super::channel::PEER;
use crate::{EngineError, Interrupt, disk_prints};

/// Pages that are read at once: 1 MiB.
const READ: u64 = 256;
/// Device state has megabytes, and with the memory of a graphics card hundreds.
const HELD_LIMIT: usize = 1 << 30;

/// A moment at which memory is dumped.
///
/// ```
/// use godwit_engine::destination::DumpStage;
///
/// assert_eq!(DumpStage::Arrived.to_string(), "arrived");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DumpStage {
    /// All pages are in place, and the machine has got nothing of its device state.
    Arrived,
    /// The machine has loaded its device state, and its guest has not run.
    Loaded,
}

impl std::fmt::Display for DumpStage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Arrived => "arrived",
            Self::Loaded => "loaded",
        })
    }
}

/// A dump that was made.
///
/// ```
/// use godwit_engine::destination::Dumped;
///
/// fn line(dumped: &Dumped) -> String {
///     format!("{}: {} in {} files", dumped.stage, dumped.data, dumped.files.len())
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dumped {
    /// When.
    pub stage: DumpStage,
    /// A file for each RAM block, as long as that is, with holes where nothing was written.
    pub files: Vec<PathBuf>,
    /// What they hold.
    pub data: ByteCount,
    /// Pages that differ from the dump before.
    pub changed: PageCount,
    /// The first of them: the name of its RAM block, and its offset there in bytes.
    pub first: Option<(String, u64)>,
}

/// The dumps of one migration.
///
/// Device state is held back until the first was made: its head may come before the last page.
pub(super) struct Dumps {
    dir: PathBuf,
    held: Vec<u8>,
    /// What was dumped first, in the order of the RAM blocks.
    arrived: Vec<File>,
}

impl Dumps {
    /// None so far; they go into `dir`.
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), held: Vec::new(), arrived: Vec::new() }
    }

    /// Keeps a piece of device state.
    pub(super) fn hold(&mut self, piece: &[u8]) -> Result<(), EngineError> {
        if self.held.len() + piece.len() > HELD_LIMIT {
            let what =
                "its device state is larger than any that is held back for --dump".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        self.held.extend_from_slice(piece);
        Ok(())
    }

    /// What was kept.
    pub(super) fn let_go(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }

    /// Dumps all of `ram`; what was dumped before is compared with it.
    pub(super) fn make(
        &mut self,
        stage: DumpStage,
        ram: &[RamBlock],
        interrupt: &Interrupt,
    ) -> Result<Dumped, EngineError> {
        let mut dumped = Dumped {
            stage,
            files: Vec::new(),
            data: ByteCount::ZERO,
            changed: PageCount(0),
            first: None,
        };
        for (number, block) in ram.iter().enumerate() {
            let path = self.dir.join(format!("{}.{stage}", file_name(block.name())));
            let failed = |source| EngineError::Dump { path: path.clone(), source };
            let file = create(&path).map_err(failed)?;
            file.set_len(block.pages().bytes().0).map_err(failed)?;
            let before = self.arrived.get(number);
            let mut buffer = PageBuffer::new(PageCount(READ));
            let mut then = PageBuffer::new(PageCount(READ));
            for part in disk_prints::parts(block.all(), READ) {
                if interrupt.is_raised() {
                    return Err(EngineError::Interrupted);
                }
                let bytes = &mut buffer[..part.count.bytes().0 as usize];
                let offset = part.start.0 * PAGE_SIZE;
                if block.has_data(part)? {
                    block.read(part.start, bytes)?;
                    file.write_all_at(bytes, offset).map_err(failed)?;
                    dumped.data = ByteCount(dumped.data.0 + bytes.len() as u64);
                } else if before.is_some() {
                    bytes.fill(0);
                }
                if let Some(before) = before {
                    let then = &mut then[..bytes.len()];
                    before.read_exact_at(then, offset).map_err(failed)?;
                    dumped.compare(block.name(), part.start, bytes, then);
                }
            }
            dumped.files.push(path);
            if stage == DumpStage::Arrived {
                self.arrived.push(file);
            }
        }
        Ok(dumped)
    }
}

impl Dumped {
    /// Counts the pages from `start` on that are not as they were `then`.
    fn compare(&mut self, block: &str, start: PageIndex, now: &[u8], then: &[u8]) {
        let pages = now.chunks_exact(PAGE_SIZE as usize).zip(then.chunks_exact(PAGE_SIZE as usize));
        for (page, _) in (start.0..).zip(pages).filter(|(_, (now, then))| now != then) {
            self.changed.0 += 1;
            self.first.get_or_insert_with(|| (block.to_owned(), page * PAGE_SIZE));
        }
    }
}

/// A new file of this user's alone: it holds all that the guest knows.
fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// The name of a RAM block as that of a file, as `/objects/mem` is none.
fn file_name(block: &str) -> String {
    let name = block.trim_start_matches('/');
    name.chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' })
        .collect()
}

#[cfg(test)]
mod tests {
    use godwit_units::PageRun;

    use super::*;

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let place = format!("godwit-dump-{name}-{}", std::process::id());
            let place = std::env::temp_dir().join(place);
            std::fs::create_dir(&place).unwrap();
            Self(place)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn page(byte: u8) -> Vec<u8> {
        vec![byte; PAGE_SIZE as usize]
    }

    #[test]
    fn what_the_machine_writes_between_both_dumps_is_counted_and_named() {
        let place = Place::new("counted");
        let ram = [RamBlock::anonymous("/objects/mem", PageCount(600)).unwrap()];
        ram[0].write(PageIndex(3), &page(1)).unwrap();
        ram[0].write(PageIndex(500), &page(2)).unwrap();
        let (mut dumps, interrupt) = (Dumps::new(&place.0), Interrupt::default());
        let first = dumps.make(DumpStage::Arrived, &ram, &interrupt).unwrap();
        assert_eq!((first.changed, first.first), (PageCount(0), None));
        assert_eq!(first.files, [place.0.join("objects_mem.arrived")]);

        // One that had data, and one that had none.
        ram[0].write(PageIndex(500), &page(3)).unwrap();
        ram[0].write(PageIndex(77), &page(4)).unwrap();
        ram[0].zero(PageRun::new(3, 1)).unwrap();
        let second = dumps.make(DumpStage::Loaded, &ram, &interrupt).unwrap();
        assert_eq!(second.changed, PageCount(3));
        assert_eq!(second.first, Some(("/objects/mem".to_owned(), 3 * PAGE_SIZE)));
        let held = std::fs::read(place.0.join("objects_mem.loaded")).unwrap();
        assert_eq!(held.len() as u64, 600 * PAGE_SIZE);
        assert_eq!(held[500 * PAGE_SIZE as usize], 3);
        assert_eq!(held[3 * PAGE_SIZE as usize], 0);
    }

    #[test]
    fn nothing_that_is_there_is_overwritten() {
        let place = Place::new("overwritten");
        let ram = [RamBlock::anonymous("ram", PageCount(1)).unwrap()];
        std::fs::write(place.0.join("ram.arrived"), "of yesterday").unwrap();
        let made = Dumps::new(&place.0).make(DumpStage::Arrived, &ram, &Interrupt::default());
        let words = made.unwrap_err().to_string();
        assert!(words.contains("ram.arrived"), "{words}");
        assert_eq!(std::fs::read(place.0.join("ram.arrived")).unwrap(), b"of yesterday");
    }
}
