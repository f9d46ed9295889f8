//! The image as the engine reads it at the source and writes it at the destination.

use std::collections::VecDeque;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use godwit_disk::{Content, Disk, DiskError, DiskReader, DiskRound, DiskSink, Extent};
use godwit_units::{ByteCount, PAGE_SIZE, PageCount, PageIndex, PageRun};
use rustix::fs::{Advice, FallocateFlags, FlockOperation, SeekFrom};
use rustix::io::Errno;

use super::flock;
use super::marks::{Marks, Pass};

/// How far the first pass looks ahead: what is written there meanwhile is sent again.
const WINDOW: PageCount = PageCount(16_384);
/// Reads that the kernel is told of before they are made.
const DEPTH: usize = 8;

/// One round of the image.
#[derive(Debug)]
pub(super) struct ImageRound {
    image: Arc<File>,
    disk: Disk,
    pass: Pass,
    marks: Arc<Marks>,
    /// Where the pass is.
    at: PageIndex,
    /// Up to where the first pass may look.
    window: PageIndex,
    asked: VecDeque<PageRun>,
}

impl ImageRound {
    pub(super) fn new(image: Arc<File>, disk: Disk, pass: Pass, marks: Arc<Marks>) -> Self {
        let (at, window) = (PageIndex(0), PageIndex(0));
        Self { image, disk, pass, marks, at, window, asked: VecDeque::new() }
    }

    /// Everything, by what the file system says of holes.
    fn next_of_all(&mut self) -> Result<Option<Extent>, DiskError> {
        let end = PageIndex(self.disk.pages().0);
        if self.at == self.window {
            if self.at == end {
                return Ok(None);
            }
            self.window = PageIndex((self.at.0 + WINDOW.0).min(end.0));
            // First this, then the look: what is written in between is seen and marked.
            self.marks.come_to(self.window.offset());
        }
        let extent = extent_at(&self.image, &self.disk, self.at, self.window)?;
        self.at = extent.run.end();
        Ok(Some(extent))
    }

    fn extent(&mut self, end: u64, content: Content) -> Extent {
        let run = PageRun::new(self.at.0, end - self.at.0);
        self.at = PageIndex(end);
        Extent { run, content }
    }
}

fn failed(disk: &Disk, what: &str, at: u64, error: &dyn std::fmt::Display) -> DiskError {
    format!("disk '{}' cannot be {what} at offset {at}: {error}", disk.name).into()
}

/// What is at page `at`, and how far that goes before `end`, by what the file system says of holes.
fn extent_at(
    image: &File,
    disk: &Disk,
    at: PageIndex,
    end: PageIndex,
) -> Result<Extent, DiskError> {
    // `None`: beyond the last of it.
    let seek = |to: SeekFrom| match rustix::fs::seek(image, to) {
        Ok(offset) => Ok(Some(offset)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(failed(disk, "searched", at.offset(), &error)),
    };
    let run = |to: u64| PageRun::new(at.0, to - at.0);
    let data = seek(SeekFrom::Data(at.offset()))?.map_or(end.0, |data| data / PAGE_SIZE);
    let data = data.clamp(at.0, end.0);
    if data > at.0 {
        return Ok(Extent { run: run(data), content: Content::Zero });
    }
    let hole = seek(SeekFrom::Hole(at.offset()))?.map_or(end.0, |hole| hole.div_ceil(PAGE_SIZE));
    // A hole that was punched between the two calls: it reads as zeros as well.
    Ok(Extent { run: run(hole.clamp(at.0 + 1, end.0)), content: Content::Data })
}

/// Reads `run` of the image; beyond its end there are zeros.
fn read(image: &File, disk: &Disk, run: PageRun, bytes: &mut [u8]) -> Result<(), DiskError> {
    let start = run.start.offset();
    let inside = disk.size.0.saturating_sub(start).min(bytes.len() as u64) as usize;
    let (inside, beyond) = bytes.split_at_mut(inside);
    beyond.fill(0);
    image.read_exact_at(inside, start).map_err(|error| failed(disk, "read", start, &error))
}

/// The image as it is now.
#[derive(Debug)]
pub(super) struct ImageReader {
    image: Arc<File>,
    disk: Disk,
}

impl ImageReader {
    pub(super) fn new(image: Arc<File>, disk: Disk) -> Self {
        Self { image, disk }
    }
}

impl DiskReader for ImageReader {
    fn extents(&mut self, run: PageRun) -> Result<Vec<Extent>, DiskError> {
        let mut extents = Vec::new();
        let mut at = run.start;
        while at < run.end() {
            let extent = extent_at(&self.image, &self.disk, at, run.end())?;
            at = extent.run.end();
            extents.push(extent);
        }
        Ok(extents)
    }

    fn read(&mut self, runs: &[PageRun], bytes: &mut [u8]) -> Result<(), DiskError> {
        let mut rest = bytes;
        for run in runs {
            let (own, others) = rest.split_at_mut(run.count.bytes().0 as usize);
            read(&self.image, &self.disk, *run, own)?;
            rest = others;
        }
        Ok(())
    }
}

impl DiskRound for ImageRound {
    fn dirty(&self) -> Option<ByteCount> {
        match &self.pass {
            Pass::All => None,
            Pass::Blocks { dirty, granularity } => Some(ByteCount(dirty.count().0 * granularity)),
        }
    }

    fn next(&mut self) -> Result<Option<Extent>, DiskError> {
        let Pass::Blocks { dirty, granularity } = &self.pass else { return self.next_of_all() };
        let pages = granularity / PAGE_SIZE;
        let from = PageIndex(self.at.0.div_ceil(pages));
        let Some(run) = dirty.next_run(from, PageCount(u64::MAX)) else { return Ok(None) };
        self.at = PageIndex(run.start.0 * pages);
        let end = (run.end().0 * pages).min(self.disk.pages().0);
        Ok(Some(self.extent(end, Content::Data)))
    }

    fn submit(&mut self, run: PageRun) -> Result<(), DiskError> {
        // Advice: where it is not taken, the read waits longer.
        let length = NonZeroU64::new(run.count.bytes().0);
        let _ = rustix::fs::fadvise(&*self.image, run.start.offset(), length, Advice::WillNeed);
        self.asked.push_back(run);
        Ok(())
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn complete(&mut self, bytes: &mut [u8]) -> Result<(), DiskError> {
        let run = self.asked.pop_front();
        assert_eq!(
            run.map(|run| run.count.bytes().0),
            Some(bytes.len() as u64),
            "what was asked for first"
        );
        run.map_or(Ok(()), |run| read(&self.image, &self.disk, run, bytes))
    }
}

/// The image that takes a disk in. As long as it lives, no other machine can open the image.
#[derive(Debug)]
pub(super) struct ImageSink {
    image: Arc<File>,
    size: ByteCount,
}

impl ImageSink {
    /// `None` when another machine has the image open.
    pub(super) fn new(image: Arc<File>, size: ByteCount) -> Option<Self> {
        if matches!(flock(&image, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK))
        {
            // The lock that was there may be gone (flock(2)).
            let _ = flock(&image, FlockOperation::NonBlockingLockShared);
            return None;
        }
        Some(Self { image, size })
    }

    fn error(what: &str, at: u64, error: &dyn std::fmt::Display) -> DiskError {
        format!(
            "the disk image cannot be {what} at offset {at}: {error}; is there room where it is?"
        )
        .into()
    }

    /// Writes zeros where no hole can be made.
    fn write_zeros(&self, start: u64, end: u64) -> Result<(), DiskError> {
        let zeros = vec![0; (end - start).min(1 << 20) as usize];
        let mut at = start;
        while at < end {
            let count = (end - at).min(zeros.len() as u64);
            let bytes = &zeros[..count as usize];
            self.image
                .write_all_at(bytes, at)
                .map_err(|error| Self::error("written", at, &error))?;
            at += count;
        }
        Ok(())
    }
}

impl Drop for ImageSink {
    fn drop(&mut self) {
        let _ = flock(&self.image, FlockOperation::NonBlockingLockShared);
    }
}

impl DiskSink for ImageSink {
    fn write(&mut self, run: PageRun, bytes: &[u8]) -> Result<(), DiskError> {
        let start = run.start.offset();
        let inside = self.size.0.saturating_sub(start).min(bytes.len() as u64) as usize;
        self.image
            .write_all_at(&bytes[..inside], start)
            .map_err(|error| Self::error("written", start, &error))
    }

    fn zero(&mut self, run: PageRun) -> Result<(), DiskError> {
        let (start, end) = (run.start.offset(), run.end().offset().min(self.size.0));
        if start >= end {
            return Ok(());
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&*self.image, punch, start, end - start) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.write_zeros(start, end),
            Err(error) => Err(Self::error("freed", start, &error)),
        }
    }

    fn flush(&mut self, durable: bool) -> Result<(), DiskError> {
        // What pwrite(2) has taken is there for whoever reads next.
        if !durable {
            return Ok(());
        }
        self.image
            .sync_data()
            .map_err(|error| format!("the disk image cannot be flushed: {error}").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Image(std::path::PathBuf, Arc<File>);

    impl Image {
        fn new(name: &str, size: u64) -> Self {
            let path =
                std::env::temp_dir().join(format!("godwit-moving-{name}-{}", std::process::id()));
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(&path)
                .unwrap();
            file.set_len(size).unwrap();
            Self(path, Arc::new(file))
        }
    }

    impl Drop for Image {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    const SIZE: u64 = (100 << 20) + 512;

    fn disk() -> Disk {
        Disk { name: "disk".to_owned(), size: ByteCount(SIZE) }
    }

    /// Copies a round as the engine does, and how many pages were read.
    fn copy(mut round: ImageRound, sink: &mut dyn DiskSink) -> u64 {
        let mut read = 0;
        while let Some(Extent { run, content }) = round.next().unwrap() {
            if content == Content::Zero {
                sink.zero(run).unwrap();
                continue;
            }
            for start in (run.start.0..run.end().0).step_by(256) {
                let piece = PageRun::new(start, 256.min(run.end().0 - start));
                let mut bytes = vec![9; piece.count.bytes().0 as usize];
                round.submit(piece).unwrap();
                round.complete(&mut bytes).unwrap();
                sink.write(piece, &bytes).unwrap();
                read += piece.count.0;
            }
        }
        read
    }

    #[test]
    fn holes_are_not_read_and_what_is_written_meanwhile_comes_in_the_next_round() {
        let (from, to) = (Image::new("from", SIZE), Image::new("to", SIZE));
        // What the destination's image held before must go.
        to.1.write_all_at(&[0xee; 1 << 20], 30 << 20).unwrap();
        from.1.write_all_at(&[1; 10_000], 5 << 20).unwrap();
        from.1.write_all_at(&[2; 512], SIZE - 512).unwrap();
        let marks = Arc::new(Marks::default());
        marks.start(ByteCount(SIZE), ByteCount(64 << 10));
        let mut sink = ImageSink::new(Arc::clone(&to.1), ByteCount(SIZE)).unwrap();
        let begin = || {
            ImageRound::new(Arc::clone(&from.1), disk(), marks.begin().unwrap(), Arc::clone(&marks))
        };

        let mut first = begin();
        let at_once = first.next().unwrap().unwrap();
        assert_eq!((at_once.run, at_once.content), (PageRun::new(0, 5 << 8), Content::Zero));
        sink.zero(at_once.run).unwrap();
        // Below the point that the pass has come to, and above it.
        for at in [1 << 20, 90 << 20] {
            from.1.write_all_at(&[3; 4096], at).unwrap();
            marks.mark(at, 4096);
        }
        let read = copy(first, &mut sink);
        assert!(read <= 3 + 1 + 1 + 16, "{read} pages, for a few of data");
        assert_eq!(marks.dirty(), ByteCount(64 << 10));
        let second = begin();
        assert_eq!(second.dirty(), Some(ByteCount(64 << 10)));
        assert_eq!(copy(second, &mut sink), 16);

        sink.flush(true).unwrap();
        assert!(
            std::fs::read(&from.0).unwrap() == std::fs::read(&to.0).unwrap(),
            "the images differ"
        );
        use std::os::unix::fs::MetadataExt;
        let blocks = to.1.metadata().unwrap().blocks() * 512;
        assert!(blocks < 2 << 20, "{blocks} bytes are allocated: holes were filled");
    }

    #[test]
    fn an_image_that_is_open_elsewhere_is_not_filled() {
        let image = Image::new("open", 4096);
        let other = File::open(&image.0).unwrap();
        flock(&other, FlockOperation::NonBlockingLockShared).unwrap();
        assert!(ImageSink::new(Arc::clone(&image.1), ByteCount(4096)).is_none());
        drop(other);
        let sink = ImageSink::new(Arc::clone(&image.1), ByteCount(4096)).unwrap();
        let other = File::open(&image.0).unwrap();
        assert!(flock(&other, FlockOperation::NonBlockingLockShared).is_err());
        drop(sink);
        flock(&other, FlockOperation::NonBlockingLockShared).unwrap();
    }
}
