//! A copy, in a third place, of the pages that a guest lacks when it begins to run at the
//! destination (post-copy): should the source end before they were sent, they are taken from there.
//!
//! ```text
//! head   "GODWITRM"  version u32  salt 16 bytes  session 16 bytes
//! part   kind u8  block u32  first page u64  pages u64   tag 16 bytes   the pages, of kind data
//! ...
//! end    a part of kind end: its first page is the number of parts before it
//! ```
//!
//! Numbers are little-endian, blocks are numbered as the source has them. Each part is sealed
//! ([`Seal`]) with the session's secret, which both sides have and nobody else; its number is its
//! place in the file, and what stands before the tag its head.
//!
//! Its name has the session's number. Invariants: it has that name when it is whole and on storage,
//! and not before; and only what was sealed with this session's secret is taken.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use godwit_bitmap::DirtyBitmap;
use godwit_codec::is_zero;
use godwit_memory::{DataHint, RamBlock};
use godwit_tls::{SALT_LEN, Seal, TAG_LEN};
use godwit_units::{ByteCount, PAGE_SIZE, PageBuffer, PageCount, PageIndex, PageRun};
use godwit_wire::{Content, Secret, SessionId};

use crate::{EngineError, limits, threads};

mod mark;

pub(crate) use mark::Mark;

const MAGIC: &[u8; 8] = b"GODWITRM";
const VERSION: u32 = 1;
const FILE_HEAD: usize = 8 + 4 + SALT_LEN + 16;
const PART_HEAD: usize = 1 + 4 + 8 + 8;
/// Pages in a part with data: who waits for one waits for all of its part to be read and opened.
const MOST: u64 = 64;
/// The same of zeros, which take time to be placed.
const MOST_ZEROS: u64 = 8192;
/// Written before it is brought to storage: what is told to be left is not there yet.
const UNSYNCED: u64 = 64 << 20;

/// By what both sides know a session.
pub(crate) type Known = (SessionId, Secret);

/// What a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Zero = 0,
    Data = 1,
    End = 2,
}

/// What stands before a part.
#[derive(Clone, Copy, Debug)]
struct Head {
    kind: Kind,
    block: u32,
    run: PageRun,
}

impl Head {
    fn to_bytes(self) -> [u8; PART_HEAD] {
        let mut bytes = [0; PART_HEAD];
        bytes[0] = self.kind as u8;
        bytes[1..5].copy_from_slice(&self.block.to_le_bytes());
        bytes[5..13].copy_from_slice(&self.run.start.0.to_le_bytes());
        bytes[13..].copy_from_slice(&self.run.count.0.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; PART_HEAD]) -> Option<Self> {
        let number = |at: usize| {
            bytes[at..].first_chunk().map_or(0, |number: &[u8; 8]| u64::from_le_bytes(*number))
        };
        let kind = [Kind::Zero, Kind::Data, Kind::End];
        let kind = kind.into_iter().find(|kind| *kind as u8 == bytes[0])?;
        let block = bytes[1..].first_chunk().map_or(0, |block| u32::from_le_bytes(*block));
        let (start, count) = (number(5), number(13));
        start.checked_add(count)?;
        let fits = match kind {
            Kind::Data => count <= MOST,
            Kind::Zero => count <= MOST_ZEROS,
            Kind::End => true,
        };
        fits.then_some(Self { kind, block, run: PageRun::new(start, count) })
    }

    /// Bytes of pages behind the tag.
    fn bytes(self) -> u64 {
        if self.kind == Kind::Data { self.run.count.bytes().0 } else { 0 }
    }
}

fn failed(path: &Path, why: impl std::fmt::Display) -> EngineError {
    EngineError::Remainder { path: path.to_owned(), why: why.to_string() }
}

/// Where in `directory` the copy of a session is.
pub(crate) fn place(directory: &Path, session: SessionId) -> PathBuf {
    let number: String = session.0.iter().map(|byte| format!("{byte:02x}")).collect();
    directory.join(format!("godwit-{number}.pages"))
}

/// What `work` on storage gives, if it does within `time`; storage may hang. Behind one that comes
/// `late` that is done.
fn aside<T: Send + 'static>(
    time: Duration,
    work: impl FnOnce() -> T + Send + 'static,
    late: impl FnOnce() + Send + 'static,
) -> Option<T> {
    let (tell, done) = mpsc::channel();
    let worker = threads::start("copy", move || {
        if tell.send(work()).is_err() {
            late();
        }
    });
    worker.ok().and_then(|_| done.recv_timeout(time).ok())
}

/// Removes the copy at `path`, if it is there. What cannot be removed is told.
pub(crate) fn remove(path: PathBuf) {
    let shown = path.display().to_string();
    match aside(limits::ABORT, move || std::fs::remove_file(path), || {}) {
        Some(Ok(())) => {}
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => {}
        other => tracing::warn!(path = shown, ?other, "a copy of guest memory stays"),
    }
}

/// Whether there is a copy at `path`, as far as its storage says so.
pub(crate) fn is_there(path: PathBuf) -> bool {
    aside(limits::ABORT, move || path.exists(), || {}).unwrap_or(false)
}

/// Where it is written before it is whole.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    name.into()
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

fn read_head(file: &mut impl Read) -> io::Result<(SessionId, [u8; SALT_LEN])> {
    let (mut magic, mut version) = ([0; 8], [0; 4]);
    let (mut salt, mut session) = ([0; SALT_LEN], [0; 16]);
    for bytes in [&mut magic[..], &mut version, &mut salt, &mut session] {
        file.read_exact(bytes)?;
    }
    if magic != *MAGIC || u32::from_le_bytes(version) != VERSION {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no copy of godwit's"));
    }
    Ok((SessionId(session), salt))
}

/// Writes the pages of `ram` in `missing`, one bitmap a block, to a copy at `path`, of those who
/// have the secret. `go_on` is told how much is left, also when only bringing it to storage is, and
/// may end it.
///
/// # Errors
/// When memory cannot be read or the copy not written, or those of `go_on`. Nothing stays then.
pub(crate) fn write(
    path: &Path,
    known: Known,
    salt: [u8; SALT_LEN],
    (ram, missing): (&[RamBlock], &[DirtyBitmap]),
    go_on: &mut dyn FnMut(ByteCount) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let beside = beside(path);
    let file = create(&beside).map_err(|error| failed(&beside, error))?;
    let written = fill(file, (path, known, salt), (ram, missing), go_on);
    written.and_then(|()| appear(&beside, path)).inspect_err(|_| {
        let _ = std::fs::remove_file(&beside);
    })
}

/// Writes all of a copy that is to be at `path`, and has it on storage.
fn fill(
    file: File,
    (path, known, salt): (&Path, Known, [u8; SALT_LEN]),
    (ram, missing): (&[RamBlock], &[DirtyBitmap]),
    go_on: &mut dyn FnMut(ByteCount) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let cannot = |error: io::Error| failed(path, error);
    let mut writer = Writer::begin(file, known, salt).map_err(cannot)?;
    let mut left: ByteCount = missing.iter().map(|pages| pages.count().bytes()).sum();
    let (mut told, mut buffer) = (left, PageBuffer::new(PageCount(MOST)));
    for (number, (block, missing)) in (0..).zip(ram.iter().zip(missing)) {
        let mut hint = DataHint::default();
        for run in missing.runs() {
            let mut at = run.start;
            for data in block.data(run, &mut hint) {
                let data = data?;
                writer.zeros(number, at, data.start).map_err(cannot)?;
                left = left - between(at, data.start);
                at = data.start;
                while at < data.end() {
                    let part = PageRun::new(at.0, (data.end().0 - at.0).min(MOST));
                    let bytes = &mut buffer[..part.count.bytes().0 as usize];
                    block.read(part.start, bytes)?;
                    writer.pages(number, part.start, bytes).map_err(cannot)?;
                    at = part.end();
                    left = left - part.count.bytes();
                    if writer.unsynced >= UNSYNCED {
                        writer.sync().map_err(cannot)?;
                        told = left;
                    }
                    go_on(told)?;
                }
            }
            writer.zeros(number, at, run.end()).map_err(cannot)?;
            left = left - between(at, run.end());
        }
    }
    writer.end().map_err(cannot)?;
    // Nobody may want it any more.
    go_on(ByteCount::ZERO)
}

/// The pages from `start` to `end`, none if that is not behind it.
fn between(start: PageIndex, end: PageIndex) -> ByteCount {
    PageCount(end.0.saturating_sub(start.0)).bytes()
}

/// Gives what was written `beside` its name.
fn appear(beside: &Path, path: &Path) -> Result<(), EngineError> {
    let cannot = |error: io::Error| failed(path, error);
    // Nothing else may have taken the place meanwhile.
    if path.symlink_metadata().is_ok() {
        return Err(failed(path, "something else has come to be there"));
    }
    std::fs::rename(beside, path).map_err(cannot)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = File::open(directory.unwrap_or(Path::new(".")));
    directory.and_then(|directory| directory.sync_all()).map_err(|error| {
        let _ = std::fs::remove_file(path);
        cannot(error)
    })
}

/// Writes parts.
struct Writer {
    file: BufWriter<File>,
    seal: Seal,
    parts: u64,
    /// Bytes that may not be on storage.
    unsynced: u64,
}

impl Writer {
    fn begin(file: File, (session, secret): Known, salt: [u8; SALT_LEN]) -> io::Result<Self> {
        let mut file = BufWriter::with_capacity(1 << 20, file);
        for bytes in [&MAGIC[..], &VERSION.to_le_bytes(), &salt, &session.0] {
            file.write_all(bytes)?;
        }
        Ok(Self { file, seal: Seal::new(&secret.0, &salt), parts: 0, unsynced: 0 })
    }

    fn part(&mut self, head: Head, bytes: &mut [u8]) -> io::Result<()> {
        let head = head.to_bytes();
        let tag = self.seal.seal(self.parts, &head, bytes);
        self.parts += 1;
        self.unsynced += (PART_HEAD + TAG_LEN + bytes.len()) as u64;
        self.file.write_all(&head)?;
        self.file.write_all(&tag)?;
        self.file.write_all(bytes)
    }

    fn zeros(&mut self, block: u32, start: PageIndex, end: PageIndex) -> io::Result<()> {
        let mut at = start.0;
        while at < end.0 {
            let run = PageRun::new(at, (end.0 - at).min(MOST_ZEROS));
            self.part(Head { kind: Kind::Zero, block, run }, &mut [])?;
            at = run.end().0;
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.flush()?;
        self.unsynced = 0;
        self.file.get_ref().sync_data()
    }

    /// Whole pages from `start` on, some of which may be zeros.
    fn pages(&mut self, block: u32, mut start: PageIndex, bytes: &mut [u8]) -> io::Result<()> {
        let page = PAGE_SIZE as usize;
        let zeros: Vec<bool> = bytes.chunks_exact(page).map(is_zero).collect();
        let mut rest = bytes;
        for alike in zeros.chunk_by(|one, next| one == next) {
            let (these, others) = rest.split_at_mut(alike.len() * page);
            let run = PageRun::new(start.0, alike.len() as u64);
            match alike[0] {
                true => self.zeros(block, run.start, run.end())?,
                false => self.part(Head { kind: Kind::Data, block, run }, these)?,
            }
            (start, rest) = (run.end(), others);
        }
        Ok(())
    }

    fn end(mut self) -> io::Result<()> {
        let run = PageRun::new(self.parts, 0);
        self.part(Head { kind: Kind::End, block: 0, run }, &mut [])?;
        self.file.flush()?;
        self.file.get_ref().sync_all()
    }
}

/// Why a part is not had.
#[derive(Debug)]
pub(crate) enum Unread {
    /// It is not what was written, and never will be.
    Damaged(EngineError),
    /// The storage does not give it now, or it cannot be placed now.
    Failed(EngineError),
}

/// A copy that is there, to be read by those who have the secret.
pub(crate) struct Remainder {
    path: PathBuf,
    file: File,
    seal: Seal,
    /// Its parts, by our number of the block and the first page.
    parts: Vec<Part>,
}

/// Where a part is.
struct Part {
    /// Our number of its block.
    own: usize,
    head: Head,
    number: u64,
    /// Where its tag begins.
    at: u64,
}

impl Remainder {
    /// Opens the copy at `path`, and finds out what is where in it. `blocks` are the pages of our
    /// RAM blocks, which the source has in `order`.
    ///
    /// # Errors
    /// When it is not there, not whole, or not this session's.
    pub(crate) fn open(
        path: &Path,
        (session, secret): Known,
        order: &[usize],
        blocks: &[u64],
    ) -> Result<Self, EngineError> {
        let wrong = |why: &str| failed(path, why);
        let cannot = |error: io::Error| failed(path, error);
        let mut file = BufReader::new(File::open(path).map_err(cannot)?);
        let (of, salt) = read_head(&mut file).map_err(cannot)?;
        if of != session {
            return Err(wrong("it is of another migration"));
        }
        let seal = Seal::new(&secret.0, &salt);
        // The end first: before it is known to be of who has the secret nothing is made of it.
        let mut end = [0; PART_HEAD + TAG_LEN];
        let length = file.get_ref().metadata().map_err(cannot)?.len();
        let end_at = length.checked_sub(end.len() as u64).filter(|at| *at >= FILE_HEAD as u64);
        let end_at = end_at.ok_or_else(|| wrong("it is not whole"))?;
        file.get_ref().read_exact_at(&mut end, end_at).map_err(cannot)?;
        let (mut head, mut tag) = ([0; PART_HEAD], [0; TAG_LEN]);
        head.copy_from_slice(&end[..PART_HEAD]);
        tag.copy_from_slice(&end[PART_HEAD..]);
        let last = Head::from_bytes(&head).filter(|last| last.kind == Kind::End);
        let count = last.ok_or_else(|| wrong("it is not whole"))?.run.start.0;
        if !seal.open(count, &head, &mut [], &tag) {
            return Err(wrong("it is damaged, or of somebody without the secret"));
        }
        // No page is in two parts, and no part without any.
        let mut more: u64 = blocks.iter().sum();
        if count > more {
            return Err(wrong("it is of a machine with other RAM blocks"));
        }
        let (mut parts, mut at) = (Vec::with_capacity(count as usize), FILE_HEAD as u64);
        for number in 0..count {
            let mut bytes = [0; PART_HEAD];
            file.read_exact(&mut bytes).map_err(cannot)?;
            at += PART_HEAD as u64;
            let head = Head::from_bytes(&bytes).filter(|head| head.kind != Kind::End);
            let head = head.ok_or_else(|| wrong("it is damaged"))?;
            let own = order.get(head.block as usize).copied();
            let own = own.filter(|own| head.run.end().0 <= blocks.get(*own).copied().unwrap_or(0));
            let own = own.ok_or_else(|| wrong("it is of a machine with other RAM blocks"))?;
            let behind = more.checked_sub(head.run.count.0).filter(|_| head.run.count.0 > 0);
            more = behind.ok_or_else(|| wrong("it is damaged"))?;
            parts.push(Part { own, head, number, at });
            let behind = TAG_LEN as u64 + head.bytes();
            file.seek_relative(behind.cast_signed()).map_err(cannot)?;
            at += behind;
        }
        if at != end_at {
            return Err(wrong("it is damaged"));
        }
        parts.sort_unstable_by_key(|part| (part.own, part.head.run.start));
        Ok(Self { path: path.to_owned(), file: file.into_inner(), seal, parts })
    }

    /// How many parts it has.
    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Which part has this page of our block `own`.
    pub(crate) fn find(&self, own: usize, page: PageIndex) -> Option<usize> {
        let behind =
            self.parts.partition_point(|part| (part.own, part.head.run.start) <= (own, page));
        let found = behind.checked_sub(1)?;
        let part = &self.parts[found];
        (part.own == own && page < part.head.run.end()).then_some(found)
    }

    /// Which pages part `part` has, of which of our blocks.
    pub(crate) fn pages(&self, part: usize) -> (usize, PageRun) {
        let part = &self.parts[part];
        (part.own, part.head.run)
    }

    /// What is in part `part`: its pages are left in `bytes`, where they are not zeros.
    ///
    /// # Errors
    /// When it cannot be read, or is not what was written.
    pub(crate) fn read(&self, part: usize, bytes: &mut Vec<u8>) -> Result<Content, Unread> {
        let part = &self.parts[part];
        let mut tag = [0; TAG_LEN];
        bytes.resize(part.head.bytes() as usize, 0);
        let read = self.file.read_exact_at(&mut tag, part.at);
        let read = read.and_then(|()| self.file.read_exact_at(bytes, part.at + TAG_LEN as u64));
        read.map_err(|error| Unread::Failed(failed(&self.path, error)))?;
        if !self.seal.open(part.number, &part.head.to_bytes(), bytes, &tag) {
            let (start, end) = (part.head.run.start.0, part.head.run.end().0);
            let block = part.own;
            let why = format!("pages {start} to {end} of block {block} are damaged in it");
            return Err(Unread::Damaged(failed(&self.path, why)));
        }
        Ok(if part.head.kind == Kind::Data { Content::Data } else { Content::Zero })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const KNOWN: Known = (SessionId([1; 16]), Secret([2; 32]));

    fn place(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("godwit-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    /// Two blocks, of which some pages hold their number, and what is missing of them.
    fn machine() -> (Vec<RamBlock>, Vec<DirtyBitmap>) {
        let block = |name, pages| RamBlock::anonymous(name, PageCount(pages)).unwrap();
        let ram = vec![block("ram", 300), block("rom", 5)];
        for page in (0..300).filter(|page| page % 7 != 0) {
            ram[0].write(PageIndex(page), &page_of(page)).unwrap();
        }
        let mut missing = vec![DirtyBitmap::new(PageCount(300)), DirtyBitmap::new(PageCount(5))];
        missing[0].set(PageRun::new(10, 200));
        missing[0].set(PageRun::new(299, 1));
        missing[1].set(PageRun::new(0, 5));
        (ram, missing)
    }

    fn page_of(page: u64) -> Vec<u8> {
        vec![(page % 255) as u8 + 1; PAGE_SIZE as usize]
    }

    fn write_to(path: &Path) -> Result<(), EngineError> {
        let (ram, missing) = machine();
        write(path, KNOWN, [3; SALT_LEN], (&ram, &missing), &mut |_| Ok(()))
    }

    /// The blocks are the other way round at the destination.
    fn open(path: &Path) -> Result<Remainder, EngineError> {
        Remainder::open(path, KNOWN, &[1, 0], &[5, 300])
    }

    #[test]
    fn every_page_is_found_as_it_was_and_no_other() {
        let path = place("remainder");
        write_to(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let raw = std::fs::read(&path).unwrap();
        let plain = page_of(11);
        assert!(!raw.windows(64).any(|bytes| bytes == &plain[..64]), "it can be read by anybody");

        let (copy, mut bytes) = (open(&path).unwrap(), Vec::new());
        let (_, missing) = machine();
        let mut seen = 0;
        for page in 0..300 {
            let found = copy.find(1, PageIndex(page));
            assert_eq!(found.is_some(), missing[0].is_set(PageIndex(page)), "page {page}");
            let Some(part) = found else { continue };
            let content = copy.read(part, &mut bytes).unwrap();
            let (own, run) = copy.pages(part);
            assert_eq!(own, 1);
            assert_eq!(content == Content::Zero, page % 7 == 0, "page {page}");
            if content == Content::Data {
                let at = (page - run.start.0) as usize * PAGE_SIZE as usize;
                assert_eq!(bytes[at..at + PAGE_SIZE as usize], page_of(page), "page {page}");
            }
            seen += 1;
        }
        assert_eq!(seen, 201);
        assert_eq!(copy.pages(copy.find(0, PageIndex(4)).unwrap()), (0, PageRun::new(0, 5)));
        remove(path.clone());
        assert!(!path.exists());
    }

    #[test]
    fn what_is_not_whole_or_not_of_this_session_is_not_taken() {
        let path = place("remainder-wrong");
        write_to(&path).unwrap();
        let refused = |known, order: &[usize], blocks: &[u64]| {
            Remainder::open(&path, known, order, blocks).err().unwrap().to_string()
        };
        assert!(refused((SessionId([4; 16]), KNOWN.1), &[1, 0], &[5, 300]).contains("another"));
        assert!(refused((KNOWN.0, Secret([4; 32])), &[1, 0], &[5, 300]).contains("secret"));
        assert!(refused(KNOWN, &[1, 0], &[5, 299]).contains("other RAM blocks"));
        assert!(refused(KNOWN, &[0], &[300, 5]).contains("other RAM blocks"));
        // Mutation: the end is not looked for.
        let whole = std::fs::read(&path).unwrap();
        for cut in [FILE_HEAD - 1, FILE_HEAD, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert!(open(&path).is_err(), "cut at {cut}");
        }
        // Mutation: parts are not counted.
        let mut doubled = whole.clone();
        let end = whole.len() - (PART_HEAD + TAG_LEN);
        let zeros = whole[end - (PART_HEAD + TAG_LEN)..end].to_vec();
        doubled.splice(end..end, zeros.repeat(400));
        std::fs::write(&path, &doubled).unwrap();
        assert!(open(&path).err().unwrap().to_string().contains("it is damaged"));
        // One page that is not what was written costs its part, and no other.
        let mut hurt = whole.clone();
        let at = FILE_HEAD + 2 * (PART_HEAD + TAG_LEN) + 100;
        hurt[at] ^= 1;
        std::fs::write(&path, &hurt).unwrap();
        let (copy, mut bytes) = (open(&path).unwrap(), Vec::new());
        let reads = (0..copy.parts()).map(|part| copy.read(part, &mut bytes));
        let damaged = |read: Result<Content, Unread>| match read {
            Err(Unread::Damaged(error)) => Some(error.to_string()),
            Err(Unread::Failed(error)) => panic!("{error}"),
            Ok(_) => None,
        };
        let wrong: Vec<String> = reads.filter_map(damaged).collect();
        assert_eq!(wrong.len(), 1, "{wrong:?}");
        assert!(wrong[0].contains("are damaged in it"), "{wrong:?}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn nothing_stays_of_a_copy_that_was_not_finished_and_nothing_is_overwritten() {
        let path = place("remainder-left");
        let (ram, missing) = machine();
        let mut left = Vec::new();
        let ended = write(&path, KNOWN, [3; SALT_LEN], (&ram, &missing), &mut |more| {
            left.push(more);
            if left.len() == 2 { Err(EngineError::Cancelled) } else { Ok(()) }
        });
        assert!(matches!(ended, Err(EngineError::Cancelled)));
        assert!(!path.exists() && !beside(&path).exists());
        assert_eq!(left, [PageCount(206).bytes(); 2], "none of it is on storage yet");

        std::fs::write(&path, "precious").unwrap();
        assert!(write_to(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_is_on_storage_is_not_left_any_more_and_zeros_come_in_parts() {
        let (path, pages, data) = (place("remainder-large"), 40_000, 17_000);
        let ram = vec![RamBlock::anonymous("ram", PageCount(pages)).unwrap()];
        ram[0].write(PageIndex(0), &vec![7; (data * PAGE_SIZE) as usize]).unwrap();
        let mut missing = vec![DirtyBitmap::new(PageCount(pages))];
        missing[0].set(PageRun::new(0, pages));
        let mut left = Vec::new();
        write(&path, KNOWN, [3; SALT_LEN], (&ram, &missing), &mut |more| {
            left.push(more);
            Ok(())
        })
        .unwrap();
        left.dedup();
        // Mutation: it is brought to storage at the end alone.
        assert_eq!(left.len(), 3, "{left:?}");
        assert!(left.is_sorted_by(|more, less| more > less), "{left:?}");
        let copy = Remainder::open(&path, KNOWN, &[0], &[pages]).unwrap();
        let (_, run) = copy.pages(copy.find(0, PageIndex(pages - 1)).unwrap());
        assert!(run.count.0 <= MOST_ZEROS && run.end().0 == pages, "{run:?}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn each_session_has_a_place_of_its_own() {
        let places = [1, 2].map(|number| super::place(Path::new("/mnt"), SessionId([number; 16])));
        assert_eq!(places[0], Path::new("/mnt").join(format!("godwit-{}.pages", "01".repeat(16))));
        assert_ne!(places[0], places[1]);
    }
}
